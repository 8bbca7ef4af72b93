"""One thing goes wrong at a time: what the client gets, what was tried, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from prfaas_serving.fake.spec import Fault
from tests.serving.support import LONG, SHORT, Setup, completion, expected_text, run, serving, until

ONE_OF_EACH = (("r1", "prfaas0", "prefill"), ("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))
PAIRED = ["vllm_nixl", "vllm_mooncake", "sglang"]
RIGHT = expected_text(completion(LONG, 4), 4)


def legs(s: Setup) -> dict[str, list[str]]:
    """What reached each worker that got something."""
    return {n: [x.leg for x in w.seen] for n, w in s.workers.items() if w.seen}


def remote_faults(s: Setup, *faults: Fault) -> None:
    for name in ("r1", "r2"):
        if name in s.workers:
            s.workers[name].faults.extend(faults)


@pytest.mark.parametrize("backend", PAIRED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_prefill_goes_to_another_remote_worker(backend: str, stream: bool) -> None:
    async def work() -> None:
        async with serving(backend) as s:
            remote_faults(s, Fault("status", "prefill", count=1, value=500.0))
            reply = await s.complete(LONG, stream=stream)
            assert (reply.status, reply.text) == (200, RIGHT)
            assert reply.headers["X-Prfaas-Route"] == "remote"
            assert s.metric("fallbacks_total", to="remote", cause="other_worker") == 1
            assert legs(s)["r1"] == legs(s)["r2"] == ["prefill"]
            await s.settled()

    run(work)


@pytest.mark.parametrize("backend", PAIRED)
def test_without_another_remote_worker_the_local_one_prefills(backend: str) -> None:
    async def work() -> None:
        async with serving(backend, ONE_OF_EACH) as s:
            remote_faults(s, Fault("status", "prefill", count=None, value=500.0))
            reply = await s.complete(LONG)
            assert (reply.status, reply.text) == (200, RIGHT)
            assert reply.headers["X-Prfaas-Route"] == "local"
            assert reply.headers["X-Prfaas-Reason"] == "prefill_status"
            assert "prefill" in legs(s)["l1"]
            await s.settled()

    run(work)


def test_after_two_prefill_tries_the_decode_worker_does_it_alone() -> None:
    async def work() -> None:
        async with serving() as s:
            remote_faults(s, Fault("status", "prefill", count=None, value=500.0))
            reply = await s.complete(LONG)
            assert (reply.status, reply.text) == (200, RIGHT)
            assert "l1" not in legs(s), "a third prefill try"
            decoded = [x for n in ("d1", "d2") for x in s.workers[n].seen]
            assert len(decoded) == 1
            assert "kv_transfer_params" not in decoded[0].body
            await s.settled()

    run(work)


def test_sglang_has_no_way_without_a_prefill_worker() -> None:
    async def work() -> None:
        async with serving("sglang", ONE_OF_EACH) as s:
            for name in ("r1", "l1"):
                s.workers[name].faults.append(Fault("status", "prefill", count=None, value=500.0))
            reply = await s.complete(LONG)
            assert reply.status == 500
            assert reply.json["error"]["code"] == "upstream_error"
            await s.settled()

    run(work)


@pytest.mark.parametrize("backend", PAIRED)
def test_a_dead_remote_side_is_left_out_after_a_few_failures(backend: str) -> None:
    async def work() -> None:
        health = {"breaker_failures": 2, "breaker_open_s": 60.0, "failures": 1000}
        async with serving(backend, ONE_OF_EACH, health=health) as s:
            await s.workers["r1"].close()
            for _ in range(4):
                reply = await s.complete(LONG)
                assert (reply.status, reply.text) == (200, RIGHT)
                assert reply.headers["X-Prfaas-Route"] == "local"
            assert reply.headers["X-Prfaas-Reason"] == "no_remote"
            assert s.metric("worker_failures_total", worker="r1", kind="connect") == 2
            assert s.worker("r1").breaker.state(time.monotonic()) == "open"
            await s.settled()

    run(work)


@pytest.mark.parametrize("backend", PAIRED)
def test_a_hanging_prefill_ends_at_its_deadline(backend: str) -> None:
    async def work() -> None:
        async with serving(backend, ONE_OF_EACH, deadlines={"prefill_floor_s": 0.3}) as s:
            remote_faults(s, Fault("hang", "prefill", count=None))
            reply = await s.complete(LONG)
            assert (reply.status, reply.text) == (200, RIGHT)
            assert s.metric("deadline_hits_total", leg="prefill") == 1
            await s.settled()

    run(work)


@pytest.mark.parametrize("backend", PAIRED)
@pytest.mark.parametrize("fault", ["status", "drop", "hang"])
def test_the_first_failed_leg_cancels_its_partner_within_a_second(backend: str, fault: str) -> None:
    """The engines alone wait for ever, or for half an hour."""

    async def work() -> None:
        async with serving(
            backend, ONE_OF_EACH, deadlines={"prefill_floor_s": 0.2, "transfer_floor_s": 0.2}
        ) as s:
            s.workers["d1"].faults.append(Fault(fault, "decode", count=1, value=500.0))
            reply = await s.complete(LONG)
            failed_at = time.monotonic()
            assert reply.status in (200, 500, 502, 503, 504)
            await until(
                lambda: not s.workers["r1"].running and not s.workers["r1"].staged, "partner is free", 1.0
            )
            assert time.monotonic() - failed_at < 1.0
            await s.settled()

    run(work)


def test_another_decode_worker_fetches_what_was_staged() -> None:
    """A decode worker that cannot be reached does not cost a second prefill."""

    async def work() -> None:
        async with serving(health={"failures": 1000}) as s:
            await s.workers["d1"].close()
            for _ in range(6):
                reply = await s.complete(LONG)
                assert (reply.status, reply.text) == (200, RIGHT)
                assert reply.headers["X-Prfaas-Route"] == "remote"
            prefills = sum(x.leg == "prefill" for n in ("r1", "r2") for x in s.workers[n].seen)
            assert prefills == 6
            await s.settled()

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_link_falls_back_to_local_prefill(stream: bool) -> None:
    async def work() -> None:
        deadlines = {"transfer_floor_s": 0.4, "release_s": 8.0}
        async with serving(
            "vllm_nixl", ONE_OF_EACH, link_bytes_per_s=50e6, deadlines=deadlines, spec={"handshake_s": 5.0}
        ) as s:
            assert s.link is not None
            assert (await s.complete(LONG)).headers["X-Prfaas-Route"] == "remote"
            s.link.set_rate(0)
            began = time.monotonic()
            body = completion("another " * 200, 4, stream=stream)
            reply = await s.post("/v1/completions", body)
            took_s = time.monotonic() - began
            assert (reply.status, reply.text) == (200, expected_text(body, 4))
            assert reply.headers["X-Prfaas-Reason"] == "transfer_deadline"
            assert s.metric("deadline_hits_total", leg="transfer") == 1
            if stream:  # a whole answer is given the time to generate it as well
                assert took_s < 2.5
            s.link.set_rate(50e6)
            await s.settled()
            assert s.metric("handles_released_total", outcome="released") == 1

    run(work)


@pytest.mark.parametrize("backend", PAIRED)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_the_clients_mistakes_go_back_as_they_are(backend: str, status: int) -> None:
    async def work() -> None:
        async with serving(backend, health={"breaker_failures": 1}) as s:
            remote_faults(s, Fault("status", "prefill", count=None, value=float(status)))
            for _ in range(3):
                reply = await s.complete(LONG)
                assert reply.status == status
                assert reply.json["error"]["code"] == status
                assert b"127.0.0.1" not in reply.body
                assert b"worker" in reply.body
            assert all(s.worker(n).breaker.state(time.monotonic()) == "closed" for n in s.workers)
            if backend == "vllm_nixl":
                assert not any(s.workers[n].seen for n in ("d1", "d2")), (
                    "decode began behind a failed prefill"
                )
            await s.settled()

    run(work)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_worker_is_not_a_dead_one(status: int) -> None:
    async def work() -> None:
        async with serving(health={"breaker_failures": 1}) as s:
            s.workers["r1"].faults.append(Fault("status", "prefill", count=None, value=float(status)))
            for _ in range(6):
                reply = await s.complete(LONG)
                assert (reply.status, reply.text) == (200, RIGHT)
            assert s.worker("r1").state == "up"
            assert s.worker("r1").breaker.state(time.monotonic()) == "closed"
            assert s.worker("r1").not_before_s > 0
            assert s.metric("worker_failures_total", worker="r1", kind="status") == 0
            await s.settled()

    run(work)


def test_all_busy_is_told_with_retry_after() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH, deadlines={"queue_s": 0.2}) as s:
            s.workers["d1"].faults.append(Fault("status", "decode", count=None, value=503.0))
            reply = await s.complete(SHORT)
            assert reply.status == 503
            assert reply.json["error"]["code"] == "busy"
            assert int(reply.headers["Retry-After"]) >= 1
            s.workers["d1"].faults.clear()
            await s.settled()

    run(work)


@pytest.mark.parametrize(
    ("kind", "metric"), [("no_params", "no_handover"), ("wrong_tokens", "handle_mismatches")]
)
def test_a_handle_that_cannot_be_trusted_is_not_used(kind: str, metric: str) -> None:
    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH, spec={"lease_s": 1.0}) as s:
            s.workers["r1"].faults.append(Fault(kind, "prefill"))
            reply = await s.complete(LONG)
            assert (reply.status, reply.text) == (200, RIGHT)
            assert reply.headers["X-Prfaas-Route"] == "local"
            assert s.metric(f"{metric}_total", worker="r1") == 1
            assert "kv_transfer_params" not in s.workers["d1"].seen[0].body
            assert not s.workers["d1"].dead
            await s.settled()

    run(work)


def test_an_aborted_prefill_sends_no_half_cache_on() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH) as s:
            s.workers["r1"].faults.append(Fault("abort_finish", "prefill"))
            reply = await s.complete(LONG)
            assert (reply.status, reply.text) == (200, RIGHT)
            assert reply.headers["X-Prfaas-Reason"] == "prefill_aborted"
            await s.settled()

    run(work)


def test_a_missing_part_is_noticed_and_computed() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH, spec={"lease_s": 1.0}) as s:
            s.workers["r1"].faults.append(Fault("missing_part", "prefill"))
            reply = await s.complete(LONG)
            assert (reply.status, reply.text) == (200, RIGHT)
            assert s.workers["d1"].counters["vllm:nixl_num_failed_transfers_total"] == 1
            failed = "vllm:nixl_num_failed_transfers_total"
            await until(lambda: s.worker("d1").load.fields.get(failed) == 1, "the router has read it", 30.0)
            assert s.metric("worker_failed_transfers", worker="d1") == 1
            await s.settled()

    run(work)


@pytest.mark.parametrize("backend", PAIRED)
def test_a_first_chunk_with_only_a_role_is_held(backend: str) -> None:
    """The worker dies between the role and the first word: the client never notices."""

    async def work() -> None:
        async with serving(backend) as s:
            s.workers["d1"].faults.append(Fault("role_only", "decode", count=None))
            for _ in range(4):
                body = completion(LONG, 4, "/v1/chat/completions", stream=True)
                reply = await s.post("/v1/chat/completions", body)
                assert (reply.status, reply.text) == (200, expected_text(body, 4))
                roles = [e for e in reply.events[:-1] if e["choices"][0]["delta"].get("role")]
                assert len(roles) == 1
            assert sum(len(s.workers[n].seen) for n in ("d1", "d2")) > 4
            await s.settled()

    run(work)


@pytest.mark.parametrize("backend", ["vllm_nixl", "sglang"])
def test_a_stream_that_breaks_ends_with_an_error_and_no_end_marker(backend: str) -> None:
    async def work() -> None:
        async with serving(backend, ONE_OF_EACH) as s:
            s.workers["d1"].faults.append(Fault("break_stream", "decode", value=2.0))
            reply = await s.complete(LONG, 6, stream=True)
            assert reply.status == 200
            assert [e["choices"][0]["text"] for e in reply.events[:-1]] == RIGHT.split(" ")[:2] or len(
                reply.events
            ) == 3
            assert reply.events[-1]["error"]["code"] == "stream_broken"
            assert b"[DONE]" not in reply.body
            assert len(s.workers["d1"].seen) == 1, "tried again after the first byte"
            assert s.metric("stream_errors_total", kind="broken") == 1
            await s.settled()

    run(work)


def test_a_silent_stream_ends_at_its_deadline() -> None:
    async def work() -> None:
        async with serving(
            "vllm_nixl", ONE_OF_EACH, deadlines={"idle_s": 0.5}, health={"failures": 1000}
        ) as s:
            body = completion(SHORT, 2000, stream=True)
            waiting = asyncio.create_task(s.post("/v1/completions", body))
            await until(lambda: s.workers["d1"].running, "the stream began")
            await asyncio.sleep(0.05)
            s.workers["d1"].frozen.clear()
            reply = await waiting
            assert reply.events[-1]["error"]["code"] == "stream_timeout"
            assert b"[DONE]" not in reply.body
            s.workers["d1"].frozen.set()
            await s.settled()

    run(work)


def test_an_error_event_passes_without_addresses_and_without_end_marker() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH) as s:
            s.workers["d1"].faults.append(Fault("error_event", "decode", value=2.0))
            reply = await s.complete(LONG, 6, stream=True)
            assert reply.events[-1]["error"]["message"] == "engine failed at worker"
            assert b"[DONE]" not in reply.body
            await s.settled()

    run(work)


def test_an_error_event_before_content_is_an_error_status() -> None:
    """Headers are held until there is something to stream, so an early error has its own status."""

    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH) as s:
            s.workers["d1"].faults.append(Fault("error_event", "decode", count=None, value=0.0))
            reply = await s.complete(SHORT, 4, "/v1/chat/completions", stream=True)
            # the fake's first token comes before its error; a role chunk alone does not count
            assert reply.status in (200, 500)

    run(work)


@pytest.mark.parametrize("backend", PAIRED)
@pytest.mark.parametrize("when", ["prefill", "transfer", "stream", "unary"])
def test_a_client_that_leaves_frees_everything(backend: str, when: str) -> None:
    async def work() -> None:
        slow = {"prefill": {"kind": "polynomial", "c0_s": 0.4, "c1_s_per_token": 0.0, "source": "tests"}}
        link = 20e3 if when == "transfer" else None
        if when == "transfer" and backend != "vllm_nixl":
            pytest.skip("pushed caches do not cross the relay here")
        async with serving(
            backend, link_bytes_per_s=link, per_worker={"r1": slow, "r2": slow} if when == "prefill" else None
        ) as s:
            body = completion(LONG, 5000, stream=when != "unary")
            task = asyncio.create_task(s.post("/v1/completions", body))
            workers = s.workers.values()
            if when == "prefill":
                await until(lambda: any(w._prefills for w in workers), "prefill runs")
            elif when == "transfer":
                await until(lambda: any(w.pulls_open for w in workers), "transfer runs")
            else:
                await until(lambda: any(w._decoding for w in workers), "decode runs")
                await asyncio.sleep(0.05)
            task.cancel()
            await until(lambda: not any(w._decoding or w._prefills for w in workers), "workers are free", 1.0)
            if s.link is not None:
                s.link.set_rate(50e6)
            await s.settled()
            assert sum(w.double_pulls for w in workers) == 0
            assert (
                sum(
                    s.metric("client_gone_total", phase=p)
                    for p in ("queue", "prefill", "transfer", "decode", "stream")
                )
                == 1
            )

    run(work)


async def staged_for_a_full_worker(s: Setup) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """A stream that takes the decode worker's only place, and a request whose cache waits for it."""
    first = asyncio.create_task(s.post("/v1/completions", completion(SHORT, 100_000, stream=True)))
    await until(lambda: s.workers["d1"]._decoding and not s.staged, "the only place is taken")
    second = asyncio.create_task(s.post("/v1/completions", completion(LONG, 4)))
    await until(lambda: s.staged == 1, "the cache is staged")
    return first, second


def test_a_release_that_a_busy_worker_does_not_come_to_says_nothing_about_it() -> None:
    """The release waits in the worker's own queue until its time is over: the worker is full, not ill."""

    async def work() -> None:
        async with serving(
            "vllm_nixl",
            (("r1", "prfaas0", "prefill"), ("d1", "pd0", "decode")),
            limits={"decode_per_worker": 1},
            spec={"lease_s": 1.5, "decode": {"a_s": 0.01, "slots": 1, "source": "tests"}},
            deadlines={"release_s": 0.5},
        ) as s:
            first, second = await staged_for_a_full_worker(s)
            second.cancel()
            await until(
                lambda: s.metric("handles_released_total", outcome="expired") == 1, "its time is over"
            )
            assert s.worker("d1").failures == 0
            first.cancel()
            await s.settled()

    run(work)


def test_a_client_that_leaves_between_the_legs_has_its_kv_released_once() -> None:
    """No decode worker has room, so the cache waits; the client leaves: one release, not the end of the lease."""

    async def work() -> None:
        async with serving(
            "vllm_nixl",
            (("r1", "prfaas0", "prefill"), ("d1", "pd0", "decode")),
            limits={"decode_per_worker": 1},
            spec={"lease_s": 60.0},
        ) as s:
            first, second = await staged_for_a_full_worker(s)
            second.cancel()
            await until(lambda: s.staged == 0, "released long before its lease ends", 5.0)
            first.cancel()
            await s.settled()
            assert s.metric("handles_released_total", outcome="released") == 1
            releases = [x for x in s.workers["d1"].seen if x.headers["X-Request-Id"].endswith("-release")]
            assert len(releases) == 1
            assert releases[0].body["max_tokens"] == 1

    run(work)


def test_retries_have_a_budget() -> None:
    async def work() -> None:
        retry = {"reserve": 2.0, "budget": 0.0}
        async with serving("vllm_nixl", ONE_OF_EACH, retry=retry, health={"breaker_failures": 1000}) as s:
            remote_faults(s, Fault("status", "prefill", count=None, value=500.0))
            found = [(await s.complete(LONG)).status for _ in range(4)]
            assert found == [200, 200, 503, 503]
            reply = await s.complete(LONG)
            assert reply.json["error"]["code"] == "retry_budget"
            assert "Retry-After" in reply.headers
            await s.settled()

    run(work)


def test_very_long_prompts_do_not_fall_back_to_the_local_side() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH, retry={"local_max_tokens": 200}) as s:
            remote_faults(s, Fault("drop", "prefill", count=None))
            reply = await s.complete(LONG)  # 300 tokens
            assert reply.status == 503
            assert reply.json["error"]["code"] == "no_prefill"
            assert "Retry-After" in reply.headers
            assert "l1" not in legs(s)
            reply = await s.complete("x" * 4 * 150)
            assert (reply.status, reply.headers["X-Prfaas-Route"]) == (200, "local")
            await s.settled()

    run(work)


def test_no_worker_is_503_and_full_is_429() -> None:
    async def work() -> None:
        two = (("r1", "prfaas0", "prefill"), ("d1", "pd0", "decode"))
        limits: dict[str, Any] = {"decode_per_worker": 1, "queue": 1}
        async with serving("vllm_nixl", two, limits=limits, deadlines={"queue_s": 5.0}) as s:
            tasks = [asyncio.create_task(s.post("/v1/completions", completion(SHORT, 100_000, stream=True)))]
            await until(lambda: s.workers["d1"]._decoding, "the only place is taken")
            tasks.append(asyncio.create_task(s.post("/v1/completions", completion(SHORT, 4))))
            await until(lambda: s.router.forwarder.fleet.decode.waiting == 1, "one waits")
            reply = await s.complete(SHORT)
            assert (reply.status, reply.json["error"]["code"]) == (429, "saturated")
            assert "Retry-After" in reply.headers
            tasks[0].cancel()
            assert (await tasks[1]).status == 200
            await s.workers["d1"].close()
            await until(lambda: s.worker("d1").state == "down", "the worker is found dead")
            reply = await s.complete(SHORT)
            assert (reply.status, reply.json["error"]["code"]) == (503, "no_endpoint")
            assert "Retry-After" in reply.headers

    run(work)


def test_a_dropped_idle_connection_is_replaced_silently() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", (("r1", "prfaas0", "prefill"), ("d1", "pd0", "decode"))) as s:
            assert (await s.complete(SHORT)).status == 200
            s.workers["d1"].faults.append(
                Fault("drop", "decode", count=1)
            )  # closes the connection that was kept
            reply = await s.complete(SHORT)
            assert reply.status == 200
            assert s.metric("reconnects_total") == 1
            assert s.metric("worker_failures_total", worker="d1", kind="broken") == 0
            await s.settled()

    run(work)


def test_sglang_never_sends_a_room_twice() -> None:
    async def work() -> None:
        async with serving("sglang", ONE_OF_EACH) as s:
            assert (await s.complete(LONG)).status == 200
            s.workers["r1"].faults.append(Fault("drop", "prefill", count=1))
            s.workers["d1"].faults.append(Fault("drop", "decode", count=1))
            reply = await s.complete(LONG)
            assert (reply.status, reply.text) == (200, RIGHT)
            for name in ("r1", "l1", "d1"):
                rooms = [x.body["bootstrap_room"] for x in s.workers[name].seen]
                assert len(set(rooms)) == len(rooms)
                assert not s.workers[name].dead
            await s.settled()

    run(work)


def test_pairs_whose_transfers_fail_are_kept_apart() -> None:
    async def work() -> None:
        health = {"pair_failures": 1, "pair_open_s": 60.0, "breaker_failures": 1000}
        workers = (
            ("r1", "prfaas0", "prefill"),
            ("l1", "pd0", "prefill"),
            ("d1", "pd0", "decode"),
            ("d2", "pd0", "decode"),
        )
        async with serving("vllm_nixl", workers, health=health) as s:
            s.workers["d1"].faults.append(Fault("status", "decode", count=None, value=500.0))
            for _ in range(12):
                reply = await s.complete(LONG)
                assert (reply.status, reply.text) == (200, RIGHT)
            apart = s.router.forwarder.fleet.pairs.as_json(time.monotonic())
            assert {"prefill": "r1", "decode": "d1"}.items() <= apart[0].items()
            with_kv = [x for x in s.workers["d1"].seen if x.body.get("kv_transfer_params")]
            assert len([x for x in with_kv if not x.headers["X-Request-Id"].endswith("release")]) <= 2
            await s.settled()

    run(work)
