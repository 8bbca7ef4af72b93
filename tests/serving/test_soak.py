"""Long runs: memory over many streams, and recovery after a storm of clients that give up."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import orjson
import pytest

from prfaas_serving.bench import router_config
from prfaas_serving.fake.load import EchoProtocol, closed_load, request_bytes
from prfaas_serving.running import run_loop
from tests.serving.chaos import cluster_of, config_of
from tests.serving.support import completion, until

#: Growth that counts as none: pools of connections and the allocator's slack.
FLAT_BYTES = 12 * 2**20


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def stream_many(n_requests: int, folder: Path) -> list[tuple[int, int]]:
    """Stream so many requests through a router process; gives (requests so far, its memory) from time to time."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: EchoProtocol(6), "127.0.0.1", 0, backlog=1024) for _ in range(2)
    ]
    config = folder / "router.yaml"
    config.write_text(json.dumps(router_config([s.sockets[0].getsockname()[1] for s in servers])))
    port_file = folder / "port"
    router = subprocess.Popen(
        [sys.executable, "-m", "prfaas_serving.fake.router", str(config), str(port_file)]
    )
    try:
        await until(port_file.exists, "the router is up", 60.0)
        port = int(port_file.read_text())
        # a prompt of its own length class each time would be kinder to the index: here every one is long enough for it
        body = {"model": "echo", "prompt": "x" * 4000, "max_tokens": 6, "stream": True}
        request = request_bytes("/v1/completions", orjson.dumps(body), "127.0.0.1")
        found, finished = [], 0
        while finished < n_requests:
            result = await closed_load(port, request, 16, 5.0, 0.0)
            assert result.failed == 0
            finished += result.finished
            found.append((finished, resident_bytes(router.pid)))
        return found
    finally:
        router.terminate()
        await asyncio.to_thread(router.wait, 60)  # not in this loop: the workers answer from it
        for server in servers:
            server.close()


def flat(found: list[tuple[int, int]]) -> None:
    """Memory does not grow after the first fifth."""
    total = found[-1][0]
    early = max(memory for n, memory in found if n <= max(total // 5, found[0][0]))
    assert found[-1][1] <= early + FLAT_BYTES, found


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_thousand_streams(tmp_path: Path) -> None:
    flat(run_loop(stream_many(100_000, tmp_path)))


async def storm(calm_s: float, storm_s: float, recovery_s: float) -> tuple[float, float, float]:
    """(share of good requests before, in the storm, seconds until 95% of a window are good again)."""
    from prfaas_serving.app import Router
    from prfaas_serving.config import Resolved

    cluster = cluster_of(5.0)
    for member in cluster:
        prefill = {"kind": "polynomial", "c0_s": 0.05, "c1_s_per_token": 0.0, "source": "tests"}
        member.spec = member.spec.model_validate({**member.spec.model_dump(), "prefill": prefill})
    await cluster.start()
    router = Router(Resolved(config_of(cluster)))
    await router.start()
    loop = asyncio.get_running_loop()
    try:
        await until(lambda: all(w.state == "up" for w in router.forwarder.fleet), "all are up")
        url = f"http://127.0.0.1:{router.port}/v1/completions"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(k: int) -> bool:
                body = completion(f"{k} " + "w" * 1200, 4)
                try:
                    async with asyncio.timeout(2.0), session.post(url, json=body) as answer:
                        await answer.read()
                        return answer.status == 200
                except (TimeoutError, aiohttp.ClientError):
                    return False

            async def phase(rate: float, seconds: float, name: int) -> float:
                began, tasks = loop.time(), []
                for k in range(int(rate * seconds)):
                    await asyncio.sleep(began + k / rate - loop.time())
                    tasks.append(asyncio.create_task(one(name * 1_000_000 + k)))
                found = await asyncio.gather(*tasks)
                return sum(found) / len(found)

            before = await phase(8.0, calm_s, 1)
            during = await phase(150.0, storm_s, 2)
            ended = time.monotonic()
            k = 3
            while time.monotonic() - ended < recovery_s:
                if await phase(8.0, 5.0, k) >= 0.95 * before:
                    break
                k += 1
            took = time.monotonic() - ended
        await until(
            lambda: router.forwarder.open_requests == 0 and not router.forwarder.background, "all done", 30.0
        )
        end = time.monotonic() + 30.0
        while sum(s["staged"] for s in await cluster.states()):
            assert time.monotonic() < end, "staged KV is left"
            await asyncio.sleep(0.1)
        return before, during, took
    finally:
        await router.close()
        await cluster.close()


@pytest.mark.slow
def test_an_abort_storm_leaves_no_mark() -> None:
    """Far more than the workers can do, for a minute, from clients that give up after two seconds."""
    before, during, took = asyncio.run(storm(10.0, 60.0, 120.0))
    assert before > 0.95
    assert during < 0.7, "no storm"
    assert took < 120.0
