"""The router and its workers as processes: the command, signals, the demonstration, the benchmark."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import yaml

from prfaas_env.bench import Figure
from prfaas_env.decision import ClusterDecision
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.world import draw_world
from prfaas_serving import bench, demo
from prfaas_serving.fake.load import wait_until
from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker
from prfaas_serving.running import run_loop
from tests.serving.support import completion, run, until


def test_sigterm_drains_and_the_process_ends(tmp_path: Path) -> None:
    async def work() -> None:
        decode = {"a_s": 0.02, "slots": 8, "source": "tests"}
        fake = FakeWorker(FakeSpec(name="d1", role="both", decode=decode))  # type: ignore[arg-type]
        await fake.start()
        config = tmp_path / "router.yaml"
        entry = {"name": "d1", "url": fake.url, "cluster": "pd0", "role": "both"}
        raw = {
            "backend": "vllm_nixl",
            "listen": {"port": 0},
            "workers": [entry],
            "decision": {"never_remote": True},
        }
        config.write_text(yaml.safe_dump(raw))
        port_file = tmp_path / "port"
        process = subprocess.Popen(
            [sys.executable, "-m", "prfaas_serving.fake.router", str(config), str(port_file)],
            stderr=subprocess.PIPE,
        )
        try:
            await until(port_file.exists, "the router is up", 60.0)
            url = f"http://127.0.0.1:{int(port_file.read_text())}/v1/completions"
            body = completion("hello", 50, stream=True)
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                assert answer.status == 200
                first = await answer.content.readany()
                os.kill(process.pid, signal.SIGTERM)
                rest = await answer.content.read()
                assert (first + rest).endswith(b"data: [DONE]\n\n")
            assert await asyncio.to_thread(process.wait, 30) == 0
            assert b"Traceback" not in process.stderr.read()  # type: ignore[union-attr]
        finally:
            process.kill()
            process.wait()
            await fake.close()

    run(work)


def test_a_mistake_of_the_command_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("backend: nope\n")
    code = "import sys; from prfaas_env.cli import app, main; from prfaas_serving.commands import serve; "
    code += "app.command('serve')(serve); main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "router.yaml: backend" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_demonstration_in_small() -> None:
    scenario = load_scenario("mooncake")
    requests = draw_world(scenario, 0, horizon_s=6.0).requests
    chosen = [
        ClusterDecision(threshold_tokens=math.inf),
        ClusterDecision(threshold_tokens=0.0),
        "static:threshold_tokens=10000",
    ]
    rows = run_loop(demo.on_fakes(scenario, 0.05, requests, chosen))
    assert [r.name for r in rows] == ["never remote", "always remote", "static:threshold_tokens=10000"]
    assert [(len(r.ttft_s), r.failed) for r in rows] == [(len(requests), 0)] * 3
    above = int((requests.input_tokens > 10_000).sum())
    assert [r.remote for r in rows] == [0, len(requests), above]
    assert 0 < above < len(requests), "the policy decided, not the configuration"
    assert rows[0].link_bytes == 0
    expected = sum(scenario.model.kv.transfer_bytes(int(n)) for n in requests.input_tokens)
    assert abs(rows[1].link_bytes / expected - 1) < 0.05, "the bytes of every cache crossed the link"
    assert demo.table_of(rows).row_count == 3
    assert demo.table_of([demo.Row(chosen[0])]).row_count == 1
    assert json.dumps([demo._figures(r) for r in rows])


def test_the_benchmark_gives_its_figures() -> None:
    figures = bench.router_figures(0.3, 1)
    assert all(isinstance(f, Figure) for f in figures.values())
    for kind in ("stream", "unary"):
        assert figures[f"{kind}_rps"].value > 0
        assert {f"{kind}_direct_rps", f"{kind}_added_p50_ms", f"{kind}_added_p99_ms"} <= set(figures)
    assert figures["stream_cpu_rps"].at_least == 500
    assert figures["unary_cpu_rps"].at_least == 1000
    assert figures["pause_p99_ms"].value >= 0
    assert len(figures["pause_p99_ms"].samples) == len(figures["unary_added_p99_ms"].samples) == 4


def test_even_times_are_kept_while_the_loop_goes_on() -> None:
    async def measured() -> list[tuple[float, int]]:
        turns, ended = 0, False

        async def other() -> None:
            nonlocal turns
            while not ended:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        found = []
        for pause_s in (-1.0, 0.001, 0.05):  # gone; turns alone; a timer and turns
            before, at_s = turns, time.perf_counter() + pause_s
            await wait_until(at_s)
            found.append((time.perf_counter() - at_s, turns - before))
        ended = True
        await task
        return found

    found = run_loop(measured())
    assert all(late_s >= 0 for late_s, _ in found), "never early"
    assert found[0][1] == 0, "a time that is gone is not waited for"
    assert found[2][1] > 0, "workers in the same loop answer meanwhile"
