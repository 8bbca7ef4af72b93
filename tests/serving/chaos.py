"""Mixed requests while workers are killed, frozen, made to hang, refuse and break: run by the tests of chaos.

Workers are processes of their own; the router runs in the test's process, so that what it leaves behind can be counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.fake.cluster import FakeCluster, Member, router_workers
from prfaas_serving.fake.link import ShapedLink
from prfaas_serving.fake.spec import FakeSpec
from tests.serving.support import completion, expected_text, until

PATHS = ("/v1/completions", "/v1/chat/completions")
#: Statuses that the router may answer with when workers are in trouble.
ERRORS = {429, 500, 502, 503, 504}
FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "hang"},
    {"kind": "status", "value": 503.0},
    {"kind": "status", "value": 500.0},
    {"kind": "status", "value": 429.0},
    {"kind": "drop"},
    {"kind": "break_stream", "leg": "decode", "value": 2.0},
    {"kind": "error_event", "leg": "decode", "value": 2.0},
    {"kind": "role_only", "leg": "decode"},
    {"kind": "abort_finish", "leg": "prefill"},
    {"kind": "no_params", "leg": "prefill"},
    {"kind": "missing_part", "leg": "prefill"},
    {"kind": "wrong_tokens", "leg": "prefill"},
)


@dataclass
class Outcome:
    """What became of all requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    freezes: int = 0
    faults: int = 0
    settle_s: float = 0.0
    released: float = 0.0
    expired: float = 0.0
    tasks_left: int = 0
    files_left: int = 0
    double_pulls: int = 0
    elapsed_s: float = 0.0

    def as_text(self) -> str:
        """One line for a report."""
        return (
            f"{dict(self.kinds)}; {self.kills} kills, {self.freezes} freezes, {self.faults} faults in "
            f"{self.elapsed_s:.0f} s; staged KV at 0 after {self.settle_s:.1f} s ({self.released:.0f} released, "
            f"{self.expired:.0f} left to their lease); {self.tasks_left} tasks and {self.files_left} files left"
        )


def cluster_of(lease_s: float) -> FakeCluster:
    """Two remote prefill, one local prefill and two decode workers, one process each, behind a link."""
    common: dict[str, Any] = {
        "prefill": {"kind": "polynomial", "c0_s": 0.01, "c1_s_per_token": 2e-5, "source": "tests"},
        "decode": {"a_s": 0.004, "slots": 64, "source": "tests"},
        "lease_s": lease_s,
    }
    wanted = (
        ("prfaas0", "prefill", "r1"),
        ("prfaas0", "prefill", "r2"),
        ("pd0", "prefill", "l1"),
        ("pd0", "decode", "d1"),
        ("pd0", "decode", "d2"),
    )
    members = [
        Member(cluster, role, FakeSpec(name=name, role=role, **common), name)
        for cluster, role, name in wanted
    ]
    return FakeCluster(members, "pd0", ShapedLink(200e6))


def config_of(cluster: FakeCluster) -> RouterConfig:
    """A router for it, with short deadlines."""
    return RouterConfig.model_validate(
        {
            "backend": "vllm_nixl",
            "listen": {"port": 0},
            "workers": router_workers(cluster.members),
            "decision": {"threshold_tokens": 100},
            "cache": {"enabled": False},
            "retry": {"reserve": 30.0, "budget": 0.2},
            "deadlines": {
                "prefill_floor_s": 1.0,
                "transfer_floor_s": 1.0,
                "first_token_s": 2.0,
                "idle_s": 1.5,
                "queue_s": 3.0,
                "release_s": 4.0,
            },
            "health": {
                "probe_s": 0.2,
                "probe_timeout_s": 0.5,
                "load_poll_s": 0.3,
                "ramp_s": 1.0,
                "breaker_open_s": 0.5,
                "pair_open_s": 1.0,
                "canary": False,
            },
            "log_level": "error",
        }
    )


async def request(
    session: aiohttp.ClientSession, url: str, k: int, rng: np.random.Generator, out: Outcome
) -> None:
    """One request; `out` gets what became of it."""
    path = PATHS[int(rng.integers(2))]
    stream = bool(rng.integers(2))
    length = int(rng.choice([20, 200, 1200, 6000]))
    tokens = int(rng.integers(2, 30))
    leaves_after_s = float(rng.uniform(0, 0.4)) if rng.random() < 0.15 else None
    body = completion(f"{k} " + "w" * length, tokens, path, **({"stream": True} if stream else {}))
    right = expected_text(body, tokens)
    try:
        async with asyncio.timeout(leaves_after_s):
            async with session.post(url + path, json=body) as answer:
                raw = await answer.read()
                status, kind = answer.status, answer.headers.get("Content-Type", "")
    except TimeoutError:
        out.kinds["left" if leaves_after_s is not None else "hung"] += 1
        if leaves_after_s is None:
            out.wrong.append(f"{k}: no answer in time")
        return
    except aiohttp.ClientError as error:
        out.kinds["broken connection"] += 1
        out.wrong.append(f"{k}: {error!r}")
        return
    out.kinds[judge(k, status, kind, raw, right, out)] += 1
    if status != 200:
        await asyncio.sleep(0.5)  # as Retry-After asks, or all would be burnt in one bad moment


def judge(k: int, status: int, kind: str, raw: bytes, right: str, out: Outcome) -> str:
    """What an answer is; wrong ones are noted."""
    if status != 200:
        try:
            proper = isinstance(orjson.loads(raw)["error"]["message"], str)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            proper = False
        if status not in ERRORS or not proper or b"127.0.0.1" in raw:
            out.wrong.append(f"{k}: status {status}: {raw[:200]!r}")
        return f"error {status}"
    if not kind.startswith("text/event-stream"):
        choice = orjson.loads(raw)["choices"][0]
        if (choice.get("text") or choice["message"]["content"]) != right:
            out.wrong.append(f"{k}: wrong text")
        return "whole answer"
    text, ended, failed = "", 0, False
    for event in raw.split(b"\n\n"):
        if event == b"data: [DONE]":
            ended += 1
        elif event:
            chunk = orjson.loads(event[6:])
            failed |= "error" in chunk
            for choice in chunk.get("choices", []):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    if failed:
        if ended or not right.startswith(text):
            out.wrong.append(f"{k}: a broken stream with an end marker or wrong text")
        return "stream with error event"
    if ended != 1 or text != right:
        out.wrong.append(f"{k}: stream with {ended} ends, {len(text)} of {len(right)} characters")
    return "whole stream"


async def trouble(cluster: FakeCluster, rng: np.random.Generator, out: Outcome, stop: asyncio.Event) -> None:
    """Break something every now and then until told to stop; everything is mended in the end."""
    names = [m.spec.name for m in cluster]
    away: dict[str, asyncio.Task[None]] = {}

    async def kill(name: str, pause_s: float) -> None:
        cluster.kill(name)
        await asyncio.sleep(pause_s)
        await cluster.restart(name)

    async def freeze(name: str, pause_s: float) -> None:
        cluster.freeze(name)
        await asyncio.sleep(pause_s)
        cluster.thaw(name)

    while not stop.is_set():
        await asyncio.sleep(float(rng.uniform(0.05, 0.25)))
        name = names[int(rng.integers(len(names)))]
        what, pause_s = rng.random(), float(rng.uniform(0.1, 2.0))
        gone = {n for n, task in away.items() if not task.done()}
        if name in gone:
            continue
        if what < 0.3 and {"d1", "d2"} - gone == {name}:
            continue  # without any decode worker there is nothing to test but refusals
        if what < 0.12:
            out.kills += 1
            away[name] = asyncio.create_task(kill(name, pause_s))
        elif what < 0.3:
            out.freezes += 1
            away[name] = asyncio.create_task(freeze(name, pause_s))
        else:
            out.faults += 1
            fault = dict(FAULTS[int(rng.integers(len(FAULTS)))])
            fault["count"] = int(rng.integers(1, 4))
            await cluster.command(name, "fault", fault)
    await asyncio.gather(*away.values())


def open_files() -> int:
    """Open handles of this process."""
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


async def chaos(n_requests: int, seed: int, concurrency: int, lease_s: float = 5.0) -> Outcome:
    """Run it. Everything the router should have given back is counted afterwards."""
    out = Outcome()
    cluster = cluster_of(lease_s)
    tasks_before, files_before = len(asyncio.all_tasks()), open_files()
    try:
        await cluster.start()
        router = Router(Resolved(config_of(cluster)))
        await router.start()
        fleet = router.forwarder.fleet
        await until(lambda: all(w.state == "up" for w in fleet), "all workers are up")
        seeds = np.random.SeedSequence(seed)
        mine, theirs = (np.random.default_rng(s) for s in seeds.spawn(2))
        stop = asyncio.Event()
        began = time.monotonic()
        breaking = asyncio.create_task(trouble(cluster, mine, out, stop))
        places = asyncio.Semaphore(concurrency)
        url = f"http://127.0.0.1:{router.port}"
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
        ) as session:

            async def one(k: int) -> None:
                async with places:
                    await request(session, url, k, theirs, out)

            await asyncio.gather(*(one(k) for k in range(n_requests)))
            stop.set()
            await breaking
        out.elapsed_s = time.monotonic() - began
        for member in cluster:
            await cluster.command(member.spec.name, "clear")
        await _settle(router, cluster, out)
        value = router.metrics.registry.get_sample_value
        out.released = value("prfaas_router_handles_released_total", {"outcome": "released"}) or 0.0
        out.expired = value("prfaas_router_handles_released_total", {"outcome": "expired"}) or 0.0
        await router.close()
    finally:
        await cluster.close()
    await asyncio.sleep(0.3)
    out.tasks_left = len(asyncio.all_tasks()) - tasks_before
    out.files_left = open_files() - files_before
    return out


async def _settle(router: Router, cluster: FakeCluster, out: Outcome) -> None:
    f = router.forwarder
    began = time.monotonic()
    await until(lambda: f.open_requests == 0 and not f.background, "the router has nothing under way", 20.0)
    while sum(s["staged"] for s in await cluster.states()):
        assert time.monotonic() - began < 30.0, "staged KV is left"
        await asyncio.sleep(0.05)
    out.settle_s = time.monotonic() - began
    out.double_pulls = sum(s["double_pulls"] for s in await cluster.states())
    assert f.handles_open == 0
    assert all(w.in_flight == 0 and not w.assigned for w in f.fleet)
    assert all(p.waiting == 0 for p in f.fleet.pools())
    assert all(link.open_flows == 0 for link in f.paths.links.values())
