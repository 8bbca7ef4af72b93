"""`prfaas bench --only serving`: what the router costs, in one run with direct calls to the same worker.

The router runs on one core, echo workers and the load generator on another (where there are two). Echo workers answer
at once, so that everything measured is the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from prfaas_env.base import PrfaasError
from prfaas_env.bench import Figure, Figures
from prfaas_serving.fake.load import EchoProtocol, LoadResult, closed_load, open_load, request_bytes
from prfaas_serving.running import run_loop

#: Chunks of a streamed answer, as in the target.
CHUNKS = 33
#: Share of the measured most at which added time is measured.
LIGHT = 0.3
#: Windows of added time per measurement of speed, and the length of one relative to it. The median of the windows
#: stands for them: the best of many short ones would flatter.
_WINDOWS, _WINDOW = 4, 0.25
#: Least requests in a window, however slow the machine.
_LEAST = 10
#: Loops of `_work`: about a millisecond.
_LOOPS = 12_000
_HOST = "127.0.0.1"
_PATH = "/v1/completions"


def serving(quick: bool) -> Figures:
    """Throughput and added time of the router."""
    return router_figures(0.5 if quick else 4.0, 1 if quick else 3)


def router_figures(seconds: float, repeats: int) -> Figures:
    """Both kinds of request, through the router and direct.

    Args:
        seconds: of each measurement.
        repeats: measurements of each kind.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine, routers = (cores[:1], cores[1:2]) if len(cores) > 1 else (cores, cores)
    with pinned(routers):
        pauses_ms = tuple(pause_ms(seconds * _WINDOW, 99) for _ in range(repeats * _WINDOWS))
    with pinned(mine):
        found: Figures = run_loop(_measure(seconds, repeats, routers))
    found["pause_p99_ms"] = Figure(
        "no router, the machine alone: a millisecond of Python work, P99 over P50",
        "ms, wall",
        pauses_ms,
        "median",
    )
    return found


def pause_ms(seconds: float, q: float) -> float:
    """How much longer than the median the same Python work takes at a quantile: what no server could avoid here."""
    took_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while not took_s or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        _work()
        took_s.append(time.perf_counter() - began_s)
        time.sleep(0.001)  # idle in between, as a server under light load is
    return 1e3 * float(np.percentile(took_s, q) - np.median(took_s))


def _work() -> int:
    total = 0
    for k in range(_LOOPS):
        total += k * k
    return total


@contextlib.contextmanager
def pinned(cores: list[int]) -> Iterator[None]:
    """This process on some cores only, for a while."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _measure(seconds: float, repeats: int, router_cores: list[int]) -> Figures:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: EchoProtocol(CHUNKS), _HOST, 0, backlog=1024) for _ in range(2)
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    with tempfile.TemporaryDirectory() as folder:
        router = _Process(Path(folder), ports, router_cores)
        try:
            port = await router.port()
            return await _figures(port, router.pid, ports[1], seconds, repeats)
        finally:
            await asyncio.to_thread(router.stop)
            for server in servers:
                server.close()


async def _figures(port: int, router: int, direct: int, seconds: float, repeats: int) -> Figures:
    stream = orjson.dumps({"model": "echo", "prompt": "x" * 64, "max_tokens": CHUNKS, "stream": True})
    unary = orjson.dumps({"model": "echo", "prompt": "x" * 64, "max_tokens": 1, "n": 2})  # n: one leg
    found: Figures = {}
    for key, body, target, what in (
        ("stream", stream, 500.0, f"two legs, {CHUNKS} streamed chunks"),
        ("unary", unary, 1000.0, "one leg, not streamed"),
    ):
        request = request_bytes(_PATH, body, _HOST)
        most: list[LoadResult] = []
        bare: list[LoadResult] = []
        per_cpu: list[float] = []
        for _ in range(repeats):
            bare.append(await closed_load(direct, request, 16, seconds))
            before_s = cpu_s(router)
            most.append(await closed_load(port, request, 16, seconds, 0.0))
            if before_s is not None:
                per_cpu.append(most[-1].finished / max((cpu_s(router) or 0.0) - before_s, 1e-9))
        _refuse_failures(most + bare)
        rates = tuple(r.rps for r in most)
        if per_cpu:
            found[f"{key}_cpu_rps"] = Figure(
                f"router: {what}", "req/CPU-s of the router", tuple(per_cpu), "highest", at_least=target
            )
        found[f"{key}_rps"] = Figure(
            f"router: {what}", "req/s, wall", rates, "highest", at_least=None if per_cpu else target
        )
        found[f"{key}_direct_rps"] = Figure(
            f"the same direct to a worker: {what}", "req/s, wall", tuple(r.rps for r in bare), "highest"
        )
        light = LIGHT * max(rates)
        window_s = max(seconds * _WINDOW, _LEAST / light)
        added: dict[float, list[float]] = {50: [], 99: []}
        for _ in range(repeats * _WINDOWS):
            direct_s = await open_load(direct, request, light, window_s)
            router_s = await open_load(port, request, light, window_s)
            _refuse_failures([direct_s, router_s])
            for q, values in added.items():
                values.append(_quantile_ms(router_s, q) - _quantile_ms(direct_s, q))
        for q, most_ms in ((50, 1.0), (99, 5.0)):
            found[f"{key}_added_p{q}_ms"] = Figure(
                f"router at {LIGHT:.0%} of that: added time to the first byte, P{q}, {what}",
                "ms, wall",
                tuple(added[q]),
                "median",
                at_most=most_ms,
            )
    return found


def cpu_s(pid: int) -> float | None:
    """CPU time that a process has used; None where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantile_ms(result: LoadResult, q: float) -> float:
    return 1e3 * float(np.percentile(result.first_s, q))


def _refuse_failures(results: list[LoadResult]) -> None:
    failed = sum(r.failed for r in results)
    if failed or not all(r.finished for r in results):
        raise PrfaasError(f"benchmark serving: {failed} requests failed; the figures would mean nothing")


class _Process:
    """The router in a process of its own, on some cores."""

    def __init__(self, folder: Path, ports: list[int], cores: list[int]) -> None:
        self._file = folder / "port"
        config = router_config(ports)
        path = folder / "router.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "prfaas_serving.fake.router", str(path), str(self._file)]
        command += [",".join(map(str, cores))] if cores else []
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def port(self) -> int:
        """Its port, once it is ready."""
        end = time.monotonic() + 60.0
        while not self._file.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise PrfaasError("benchmark serving: the router did not start")
            await asyncio.sleep(0.02)
        return int(self._file.read_text(encoding="utf-8"))

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def router_config(ports: list[int]) -> dict[str, Any]:
    """A router in front of an echo prefill and an echo decode worker; everything goes remote."""
    return {
        "backend": "echo",
        "listen": {"port": 0},
        "workers": [
            {"name": "p", "url": f"http://{_HOST}:{ports[0]}", "cluster": "prfaas0", "role": "prefill"},
            {"name": "d", "url": f"http://{_HOST}:{ports[1]}", "cluster": "pd0", "role": "decode"},
        ],
        "decision": {"threshold_tokens": 0},
        "health": {"canary": False, "ramp_s": 0},
        "limits": {"prefill_per_worker": 1024, "decode_per_worker": 1024},
        "log_level": "warning",
    }
