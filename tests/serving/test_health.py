"""Probes, load polls, restarts, and workers that look well but are not."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from prfaas_serving.backends import engines
from prfaas_serving.fake.spec import Fault
from tests.serving.support import LONG, SHORT, run, serving, until

PAIR = (("r1", "prfaas0", "prefill"), ("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))


def test_a_frozen_worker_is_found_and_taken_back() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, health={"probe_timeout_s": 0.2, "ramp_s": 5.0}) as s:
            r1 = s.worker("r1")
            r1.requests = 9
            s.workers["r1"].frozen.clear()
            await until(lambda: r1.state == "down", "the frozen worker is found")
            assert (await s.complete(LONG)).headers["X-Prfaas-Reason"] == "no_remote"
            s.workers["r1"].frozen.set()
            await until(lambda: r1.state == "up", "it is taken back")
            assert r1.share(time.monotonic()) < 1.0, "it ramps up"
            assert r1.requests == 9
            assert (await s.complete(LONG)).headers["X-Prfaas-Route"] == "remote"

    run(work)


def test_one_failed_probe_is_not_enough() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, health={"failures": 3}) as s:
            s.workers["r1"].faults.append(Fault("unhealthy"))
            await until(lambda: s.worker("r1").failed_probes >= 1, "a probe failed")
            assert s.worker("r1").state == "up" or s.worker("r1").failed_probes >= 3
            await until(lambda: s.worker("r1").state == "down", "three in a row")
            s.workers["r1"].faults.clear()
            await until(lambda: s.worker("r1").state == "up", "back")
            assert s.worker("r1").failed_probes == 0

    run(work)


@pytest.mark.parametrize("backend", ["vllm_nixl", "sglang"])
def test_the_load_of_others_is_read(backend: str) -> None:
    async def work() -> None:
        async with serving(backend, PAIR) as s:
            s.workers["d1"]._waiting = 7
            await until(lambda: s.worker("d1").load.foreign == 7, "the load is read")
            s.workers["d1"]._waiting = 0
            await until(lambda: s.worker("d1").load.foreign == 0, "and read again")

    run(work)


def test_a_load_page_without_known_figures_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def work() -> None:
        async with serving(workers=PAIR) as s:
            s.workers["d1"].faults.append(Fault("no_load"))
            await until(lambda: "nothing known in /metrics" in caplog.text, "the warning")
            assert caplog.text.count("nothing known") == 1

    run(work)


def test_everything_green_and_no_kv_moved(caplog: pytest.LogCaptureFixture) -> None:
    """The decode worker computes every prompt itself and says 200."""
    caplog.set_level(logging.ERROR)

    async def work() -> None:
        async with serving(workers=PAIR) as s:
            d1 = s.workers["d1"]
            await until(lambda: s.worker("d1").kv_moved_before is not None, "it was asked before")
            d1.counters['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] = 0.0
            original = d1.count

            def silent(name: str, by: float = 1.0) -> None:
                if "external" not in name:
                    original(name, by)

            d1.count = silent  # type: ignore[method-assign]
            for _ in range(4):
                assert (await s.complete(LONG)).status == 200
            await until(lambda: s.worker("d1").kv_moved_share == 0.0, "the share is seen")
            assert "worker d1 was told to fetch 1200 tokens of KV and fetched none" in caplog.text

    run(work)


@pytest.mark.parametrize("before", [None, 50_000.0])
def test_kv_that_moves_is_seen_to_move(before: float | None) -> None:
    """Also by a router that is newer than its engines: what moved before is not its own."""

    async def work() -> None:
        async with serving(workers=PAIR) as s:
            counter = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
            if before is not None:
                s.workers["d1"].counters[counter] = before
                s.worker("d1").kv_moved_before = None  # as a new router finds it
            await until(lambda: s.worker("d1").kv_moved_before == (before or 0.0), "it was asked before")
            for _ in range(4):
                assert (await s.complete(LONG)).status == 200
            await until(lambda: s.worker("d1").kv_moved_share == 1.0, "the share is seen")
            page = (await s.get("/metrics")).body.decode()
            assert 'prfaas_router_worker_kv_moved_share{worker="d1"} 1.0' in page

    run(work)


def test_a_new_process_at_an_old_address_starts_cold() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, health={"ramp_s": 30.0}) as s:
            r1 = s.worker("r1")
            r1.ramp_from_s = -1e9
            await until(lambda: r1.load.at_s > 0, "its load was read")
            s.workers["r1"]._began += 100.0
            await until(lambda: r1.share(time.monotonic()) < 1.0, "the restart is seen")

    run(work)


def test_a_request_that_no_decode_worker_can_take_is_refused_before_any_prefill() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, spec={"max_model_len": 400}) as s:
            too_much, too_long = (LONG, 401), (LONG + LONG, 1)  # 300 and 600 tokens
            for prompt, tokens in (too_much, too_long):
                reply = await s.complete(prompt, tokens)
                assert reply.status == 400
                assert "maximum context length" in reply.json["error"]["message"]
            assert not s.workers["r1"].seen
            assert s.metric("decisions_total", route="alone", reason="over_model_length") == 2
            # more than there is room for is no mistake: engines give what there is
            reply = await s.complete(LONG, 200)
            assert reply.status == 200
            assert reply.json["usage"]["completion_tokens"] == 100
            assert reply.headers["X-Prfaas-Route"] == "remote"
            await s.settled()

    run(work)


def test_metrics_of_vllm_old_and_new() -> None:
    text = (
        "# HELP x y\n"
        'vllm:num_requests_running{engine="0",model_name="a,b"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="a,b"} 4.0\n'
        'vllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 1.0\n'
        'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n'
        "vllm:something_else 9\n"
        'vllm:nixl_bytes_transferred_sum{engine="0"} NaN\n'
        "broken\n"
    )
    running, waiting, use, fields = engines.read_load("vllm", text.encode())
    assert (running, waiting, use) == (7.0, 2.0, 0.5)
    assert fields["vllm:num_requests_waiting_by_reason{deferred}"] == 1.0
    assert not any("nixl" in name or "else" in name for name in fields)
    new = text.replace("gpu_cache_usage_perc", "kv_cache_usage_perc")
    assert engines.read_load("vllm", new.encode())[2] == 0.5


def test_loads_of_sglang() -> None:
    rank: dict[str, Any] = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "token_usage": 0.2,
        "disaggregation": {"mode": "decode", "decode_transfer_queue_reqs": 4},
    }
    page = {"loads": [rank, {**rank, "token_usage": 0.95}, "rubbish"]}
    import orjson

    running, waiting, use, _ = engines.read_load("sglang", orjson.dumps(page))
    assert (running, waiting, use) == (6.0, 12.0, 0.95)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"loads": 5}', b"nope", b'{"loads": [{}]}'])
def test_unreadable_pages(content: bytes) -> None:
    for engine in ("vllm", "sglang"):
        with pytest.raises(engines.Unreadable):
            engines.read_load(engine, content)


def test_short_prompts_count_as_prompts() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            for prompt in (SHORT, LONG):
                await s.complete(prompt)
            assert s.metric("prompt_tokens_total", route="local") == 2
            assert s.metric("prompt_tokens_total", route="remote") == 300

    run(work)
