"""A whole fake deployment: workers in processes, a shaped link between the sites, and faults on command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.formulas import BITS_PER_BYTE
from prfaas_serving.fake.link import ShapedLink
from prfaas_serving.fake.spec import FakeSpec, of_scenario
from prfaas_serving.processes import end_child


@dataclass
class Member:
    """One worker of a cluster."""

    cluster: str
    role: str
    spec: FakeSpec
    group: str
    """Workers of one group share a process."""
    port: int = 0
    kv_port: int = 0
    via_port: int | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def entry(self) -> dict[str, Any]:
        """Its entry in a router's configuration."""
        bootstrap = self.port if self.spec.engine == "mooncake" else self.via_port or self.kv_port
        return {
            "name": self.spec.name,
            "url": self.url,
            "cluster": self.cluster,
            "role": self.role,
            "bootstrap_port": bootstrap,
        }


@dataclass
class FakeCluster:
    """Fake workers in processes of their own.

    Args:
        members: the workers.
        pd: name of the PD cluster; all others are behind the link.
        link: between the sites; None = no link in between.
    """

    members: list[Member]
    pd: str
    link: ShapedLink | None = None
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _session: aiohttp.ClientSession | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def member(self, name: str) -> Member:
        """A worker by name."""
        return next(m for m in self.members if m.spec.name == name)

    async def start(self) -> None:
        """Start all processes and wait for their ports.

        Raises:
            PrfaasError: a process ends, or takes too long.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))
        for group in dict.fromkeys(m.group for m in self.members):
            self._launch(group)
        for group in self._processes:
            await self._ready(group)

    def _files(self, group: str) -> tuple[Path, Path]:
        assert self._folder is not None
        folder = Path(self._folder.name)
        return folder / f"{group}.specs.json", folder / f"{group}.ready.json"

    def _launch(self, group: str) -> None:
        specs, ready = self._files(group)
        ready.unlink(missing_ok=True)
        content = [
            m.spec.model_copy(update={"port": m.port}).model_dump(mode="json") for m in self._of(group)
        ]
        specs.write_text(json.dumps(content), encoding="utf-8")
        self._processes[group] = subprocess.Popen(
            [sys.executable, "-m", "prfaas_serving.fake", str(specs), str(ready)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def _of(self, group: str) -> list[Member]:
        return [m for m in self.members if m.group == group]

    async def _ready(self, group: str) -> None:
        _, ready = self._files(group)
        process, end = self._processes[group], time.monotonic() + 60.0
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise PrfaasError(f"fake workers {group}: did not start")
            await asyncio.sleep(0.02)
        ports = json.loads(ready.read_text(encoding="utf-8"))
        for member in self._of(group):
            member.port, member.kv_port = ports[member.spec.name]
            if self.link is not None and member.cluster != self.pd:
                member.via_port = await self.link.listen("127.0.0.1", member.kv_port)
                await self.command(member.spec.name, "via", {"port": member.via_port})

    def pid(self, name: str) -> int:
        """Process of a worker."""
        return self._processes[self.member(name).group].pid

    def kill(self, name: str) -> None:
        """SIGKILL the process of a worker."""
        process = self._processes[self.member(name).group]
        process.kill()
        process.wait()

    def freeze(self, name: str) -> None:
        """SIGSTOP the process of a worker."""
        os.kill(self.pid(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(name), signal.SIGCONT)

    def alive(self, name: str) -> bool:
        """Whether the process of a worker runs."""
        return self._processes[self.member(name).group].poll() is None

    async def restart(self, name: str) -> None:
        """Start a killed process anew, on the same ports."""
        group = self.member(name).group
        self._launch(group)
        await self._ready(group)

    async def command(self, name: str, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A command to one worker (`fault`, `clear`, `state`, `via`); gives its state."""
        assert self._session is not None
        url = f"{self.member(name).url}/_fake/{what}"
        async with self._session.post(url, data=orjson.dumps(body or {})) as answer:
            found = orjson.loads(await answer.read())
            return found if isinstance(found, dict) else {}

    async def states(self) -> list[dict[str, Any]]:
        """States of all workers that run."""
        return [await self.command(m.spec.name, "state") for m in self.members if self.alive(m.spec.name)]

    async def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
            await end_child(process)
        if self.link is not None:
            await self.link.close()
        if self._session is not None:
            await self._session.close()
        if self._folder is not None:
            self._folder.cleanup()


def of_deployment(
    scenario: Scenario,
    *,
    engine: str = "vllm",
    time_scale: float = 0.1,
    byte_scale: float = 1e-5,
    group_by: str = "role",
    **fields: Any,
) -> FakeCluster:
    """The deployment of a scenario (its first PD cluster) as fake workers behind a shaped link.

    Args:
        scenario: clusters, profiles, the link and its capacity.
        engine: protocol of all workers.
        time_scale: real seconds per second of the scenario.
        byte_scale: bytes on the wire per byte of KV; the rate of the link is scaled likewise.
        group_by: `role` (one process per cluster and role) or `worker` (one each).
        fields: more fields of every `FakeSpec`.
    """
    pd = scenario.deployment.pd[0]
    links = [link for link in scenario.deployment.links if link.pd == pd.name]
    linked = {link.prfaas for link in links}
    wanted: list[tuple[str, str, str]] = []
    for cluster in scenario.deployment.prfaas:
        if cluster.name in linked:
            wanted += [(cluster.name, "prefill", f"{cluster.name}-p{k}") for k in range(cluster.n_instances)]
    wanted += [(pd.name, "prefill", f"{pd.name}-p{k}") for k in range(pd.n_prefill)]
    wanted += [(pd.name, "decode", f"{pd.name}-d{k}") for k in range(pd.n_decode)]
    members = [
        Member(
            cluster,
            role,
            of_scenario(
                scenario,
                cluster,
                name,
                time_scale=time_scale,
                byte_scale=byte_scale,
                engine=engine,
                role=role,
                **fields,
            ),
            name if group_by == "worker" else f"{cluster}-{role}",
        )
        for cluster, role, name in wanted
    ]
    shaped = None
    if links:
        rate = sum(link.capacity_bps for link in links) / BITS_PER_BYTE * byte_scale / time_scale
        shaped = ShapedLink(rate, links[0].latency_s * time_scale)
    return FakeCluster(members, pd.name, shaped)


def router_workers(members: Sequence[Member]) -> list[dict[str, Any]]:
    """The `workers` section for a cluster."""
    return [m.entry() for m in members]
