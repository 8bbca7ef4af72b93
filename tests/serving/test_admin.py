"""The operators' port."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker
from tests.serving.support import LONG, SHORT, completion, run, serving, until

PAIR = (
    ("r1", "prfaas0", "prefill"),
    ("l1", "pd0", "prefill"),
    ("d1", "pd0", "decode"),
    ("d2", "pd0", "decode"),
)


def test_a_token_is_required_and_the_port_is_loopback() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            for token in (None, "", "wrong", "0123456789abcdef-tesT"):
                assert (await s.admin("GET", "/state", token=token)).status == 401
            assert (await s.admin("GET", "/state")).status == 200
            assert s.router.config.admin is not None
            assert s.router.config.admin.host == "127.0.0.1"
            assert (await s.get("/state")).status == 404, "nothing of it on the public port"

    run(work)


def test_threshold_and_margin_take_effect_at_once() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            assert (await s.complete(LONG)).headers["X-Prfaas-Route"] == "remote"
            reply = await s.admin("PUT", "/override", {"never_remote": True, "reason": "maintenance"})
            assert (reply.json["overridden"], reply.json["reason"]) == (True, "maintenance")
            assert (await s.complete(LONG)).headers["X-Prfaas-Route"] == "local"
            reply = await s.admin("PUT", "/decision", {"threshold_tokens": 1})
            assert reply.json["never_remote"], "an override lies over it"
            assert (await s.complete(SHORT)).headers["X-Prfaas-Route"] == "local"
            reply = await s.admin("DELETE", "/override")
            assert (reply.json["overridden"], reply.json["threshold_tokens"]) == (False, 1)
            assert (await s.complete(SHORT)).headers["X-Prfaas-Route"] == "remote"
            version = reply.json["version"]
            reply = await s.admin(
                "PUT", "/override", {"margin_s": -1000.0, "version": version, "dry_run": True}
            )
            assert reply.json["dry_run"]
            assert (await s.admin("GET", "/decision")).json["version"] == version
            reply = await s.admin("PUT", "/override", {"margin_s": 1000.0, "version": version})
            assert reply.json["rule"] == "margin"
            assert (await s.complete(LONG)).headers["X-Prfaas-Route"] == "local"
            history = (await s.admin("GET", "/decisions")).json["decisions"]
            assert [c["origin"] for c in history] == ["config", "admin", "admin", "admin"]

    run(work)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/override", {}, 400),
        ("PUT", "/override", {"threshold_tokens": 5, "margin_s": 1}, 400),
        ("PUT", "/override", {"threshold": 5}, 400),
        ("PUT", "/override", {"threshold_tokens": -5}, 400),
        ("PUT", "/override", {"threshold_tokens": "x"}, 400),
        ("PUT", "/override", {"threshold_tokens": 5, "version": 99}, 409),
        ("PUT", "/override", [1], 400),
        ("GET", "/nothing", None, 404),
        ("POST", "/state", {}, 404),
        ("POST", "/workers/none/drain", {}, 404),
        ("POST", "/workers/r1/fly", {}, 404),
        ("POST", "/workers/r1/role", {"role": "decode"}, 409),
        ("POST", "/workers/l1/role", {"role": "decode"}, 409),
        ("POST", "/workers/l1/role", {"role": "cook"}, 400),
        ("POST", "/workers", {"name": "x"}, 400),
        ("POST", "/workers", {"name": "r1", "url": "http://h:1", "cluster": "pd0", "role": "decode"}, 400),
        ("POST", "/workers", {"name": "x", "url": "http://h:1", "cluster": "mars", "role": "decode"}, 400),
        ("POST", "/workers/r1/cache_events", {"events": []}, 409),
    ],
)
def test_wrong_calls_are_refused_in_one_line(method: str, path: str, body: Any, status: int) -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            reply = await s.admin(method, path, body)
            assert reply.status == status, reply.body
            assert "\n" not in reply.json["error"]["message"]
            assert s.router.forwarder.holder.version == 1

    run(work)


def test_workers_come_go_and_drain() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            extra = FakeWorker(FakeSpec(name="r2", role="prefill"))
            await extra.start()
            try:
                entry = {"name": "r2", "url": extra.url, "cluster": "prfaas0", "role": "prefill"}
                reply = await s.admin("POST", "/workers", entry)
                assert (reply.json["state"], reply.json["source"]) == ("probation", "admin")
                await until(lambda: s.worker("r2").state == "up", "the new worker is up")
                await s.admin("POST", "/workers/r1/drain")
                assert (await s.complete(LONG)).headers["X-Prfaas-Route"] == "remote"
                assert [x.leg for x in extra.seen] == ["prefill"]
                assert not s.workers["r1"].seen
                await s.admin("POST", "/workers/r1/undrain")
                await s.admin("DELETE", "/workers/r2")
                await s.complete(LONG)
                assert len(s.workers["r1"].seen) == 1
                names = [w["name"] for w in (await s.admin("GET", "/state")).json["workers"]]
                assert names == ["r1", "l1", "d1", "d2"]
            finally:
                await extra.close()

    run(work)


def test_a_removed_worker_ends_what_it_has() -> None:
    async def work() -> None:
        async with serving(workers=PAIR[:3]) as s:
            task = asyncio.create_task(s.post("/v1/completions", completion(SHORT, 200, stream=True)))
            await until(lambda: s.workers["d1"]._decoding, "it streams")
            assert (await s.admin("DELETE", "/workers/d1")).json["in_flight"] == 1
            reply = await task
            assert reply.events[-1] == "[DONE]"

    run(work)


@pytest.mark.parametrize("backend", ["vllm_nixl", "sglang"])
def test_a_worker_changes_its_role_once_it_is_idle(backend: str) -> None:
    async def work() -> None:
        async with serving(backend, PAIR) as s:
            tasks = [
                asyncio.create_task(s.post("/v1/completions", completion(SHORT + str(k), 150, stream=True)))
                for k in range(4)
            ]
            await until(lambda: s.worker("d2").in_flight > 0, "the worker has work")
            change = asyncio.create_task(s.admin("POST", "/workers/d2/role", {"role": "prefill"}))
            await until(lambda: s.worker("d2").draining, "it drains")
            assert (await s.admin("POST", "/workers/d2/role", {"role": "prefill"})).status == 409
            reply = await change
            assert (reply.status, reply.json["role"]) == (200, "prefill")
            assert all(r.status == 200 and r.events[-1] == "[DONE]" for r in await asyncio.gather(*tasks))
            assert s.workers["d2"].switches == (1 if backend == "sglang" else 0)
            s.workers["d2"].seen.clear()
            await s.admin("POST", "/workers/l1/drain")
            reply = await s.complete(SHORT)
            assert reply.status == 200
            assert [x.leg for x in s.workers["d2"].seen] == ["prefill"]
            reply = await s.admin("POST", "/workers/d2/role", {"role": "decode"})
            assert reply.status == 409, "the last usable prefill worker stays"
            await s.settled()

    run(work)


def test_a_worker_that_does_not_drain_in_time_keeps_its_role() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            tasks = [
                asyncio.create_task(
                    s.post("/v1/completions", completion(SHORT + str(k), 100_000, stream=True))
                )
                for k in range(4)
            ]
            await until(lambda: s.worker("d2").in_flight > 0, "the worker has work")
            reply = await s.admin("POST", "/workers/d2/role", {"role": "prefill", "drain_s": 0.1})
            assert (reply.status, reply.json["error"]["code"]) == (409, "not_drained")
            assert (s.worker("d2").role, s.worker("d2").draining) == ("decode", False)
            for task in tasks:
                task.cancel()

    run(work)


def test_cache_events_reach_the_index() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, cache={"block_tokens": 4, "needs_state": False}, threshold=5.0) as s:
            events = [
                {
                    "type": "BlockStored",
                    "block_hashes": [1, 2],
                    "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
                    "block_size": 4,
                },
                {
                    "type": "BlockStored",
                    "block_hashes": [9],
                    "parent_block_hash": 7,
                    "token_ids": [1],
                    "block_size": 1,
                },
            ]
            reply = await s.admin("POST", "/workers/l1/cache_events", {"events": events})
            assert reply.json == {"events": 2, "lost": 1}
            assert (await s.complete([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])).headers["X-Prfaas-Route"] == "local"
            await s.admin(
                "POST",
                "/workers/l1/cache_events",
                {"events": [{"type": "BlockRemoved", "block_hashes": [1]}]},
            )
            index = s.router.forwarder.index
            assert index is not None

    run(work)


def test_the_state_is_whole() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            await s.complete(LONG)
            state = (await s.admin("GET", "/state")).json
            assert state["backend"] == "vllm_nixl"
            assert state["decision"]["threshold_tokens"] == 100
            assert {p["cluster"]: p["usable"] for p in state["pools"] if p["role"] == "prefill"} == {
                "pd0": ["l1"],
                "prfaas0": ["r1"],
            }
            assert state["links"][0]["delivered_bits"] > 0
            assert (state["open_requests"], state["handles_open"]) == (0, 0)

    run(work)
