"""The fakes keep the engines' rules, also the ones that hurt: otherwise the router's tests would prove little."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.profiles.kv import KVLayout
from prfaas_env.scenarios import load_scenario
from prfaas_serving.fake.cluster import of_deployment
from prfaas_serving.fake.link import ShapedLink
from prfaas_serving.fake.spec import FakeSpec, Fault, PartSizes
from prfaas_serving.fake.worker import FakeWorker, digest_of, token_text, tokens_of
from tests.serving.support import completion, expected_text, run, until

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@contextlib.asynccontextmanager
async def pair(
    engine: str = "vllm", **fields: Any
) -> AsyncIterator[tuple[FakeWorker, FakeWorker, aiohttp.ClientSession]]:
    workers = [
        FakeWorker(FakeSpec(name=role, engine=engine, role=role, **fields))  # type: ignore[arg-type]
        for role in ("prefill", "decode")
    ]
    for worker in workers:
        await worker.start()
    async with aiohttp.ClientSession() as session:
        try:
            yield workers[0], workers[1], session
        finally:
            for worker in workers:
                await worker.close()


async def post(session: aiohttp.ClientSession, worker: FakeWorker, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(worker.url + "/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


def test_staged_kv_stays_until_it_is_fetched_or_its_lease_ends() -> None:
    async def work() -> None:
        async with pair(lease_s=1.0) as (p, d, session):
            body = completion("x" * 400, 3)
            _, first = await post(session, p, {**body, "max_tokens": 1, "kv_transfer_params": ASK})
            _, _ = await post(session, p, {**body, "max_tokens": 1, "kv_transfer_params": ASK})
            assert len(p.staged) == 2
            assert p.staged_bytes == 2 * (4096 + 512 * 100)
            status, answer = await post(
                session, d, {**body, "kv_transfer_params": first["kv_transfer_params"]}
            )
            assert (status, answer["choices"][0]["text"]) == (200, expected_text(body, 3))
            await until(lambda: len(p.staged) == 1, "the fetched one is gone")
            assert d.counters["vllm:nixl_bytes_transferred_sum"] == 4096 + 512 * 100
            await until(lambda: not p.staged, "the lease ends")
            assert p.counters["vllm:nixl_num_kv_expired_reqs_total"] == 1

    run(work)


def test_a_longer_prompt_with_a_foreign_handle_kills_the_engine() -> None:
    async def work() -> None:
        async with pair() as (p, d, session):
            _, first = await post(session, p, completion("x" * 40, 1, kv_transfer_params=ASK))
            status, _ = await post(
                session, d, completion("x" * 400, 1, kv_transfer_params=first["kv_transfer_params"])
            )
            assert status == 500
            assert d.dead
            assert (await post(session, d, completion("x", 1)))[0] == 500
            async with session.get(d.url + "/health") as answer:
                assert answer.status == 503

    run(work)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_dead_peer_by_policy(policy: str) -> None:
    async def work() -> None:
        async with pair(failure_policy=policy, handshake_s=0.2) as (p, d, session):
            body = completion("x" * 400, 2)
            _, first = await post(session, p, {**body, "max_tokens": 1, "kv_transfer_params": ASK})
            await p.close()
            status, answer = await post(
                session, d, {**body, "kv_transfer_params": first["kv_transfer_params"]}
            )
            assert status == (500 if policy == "fail" else 200)
            if policy == "recompute":
                assert answer["choices"][0]["text"] == expected_text(body, 2)
            assert d.counters["vllm:nixl_num_failed_transfers_total"] == 1

    run(work)


def test_a_missing_part_is_detected() -> None:
    async def work() -> None:
        async with pair(failure_policy="fail") as (p, d, session):
            p.faults.append(Fault("missing_part", "prefill"))
            body = completion("x" * 400, 1)
            _, first = await post(session, p, {**body, "kv_transfer_params": ASK})
            status, _ = await post(session, d, {**body, "kv_transfer_params": first["kv_transfer_params"]})
            assert status == 500
            assert len(p.staged) == 1, "nobody said that it arrived"

    run(work)


def test_a_room_used_twice_crashes_sglang() -> None:
    async def work() -> None:
        async with pair("sglang") as (p, d, session):
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": p.kv_port, "bootstrap_room": 5}
            body = {**completion("x" * 40, 2), **room}
            legs = await asyncio.gather(post(session, p, body), post(session, d, body))
            assert [status for status, _ in legs] == [200, 200]
            assert (await post(session, p, body))[0] == 500
            assert p.dead
            assert (await post(session, d, completion("x", 1)))[0] == 400, "a decode server cannot prefill"

    run(work)


def test_sglangs_prefill_waits_for_its_partner() -> None:
    async def work() -> None:
        async with pair("sglang") as (p, d, session):
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": p.kv_port, "bootstrap_room": 6}
            body = {**completion("x" * 40, 2), **room}
            alone = asyncio.create_task(post(session, p, body))
            await until(lambda: p.staged, "the prefill is done")
            done, _ = await asyncio.wait({alone}, timeout=0.2)
            assert not done
            assert (await post(session, d, body))[0] == 200
            assert (await alone)[0] == 200

    run(work)


def test_prefills_queue_and_take_the_profiles_time() -> None:
    async def work() -> None:
        profile = {"kind": "polynomial", "c0_s": 0.0, "c1_s_per_token": 0.02, "source": "tests"}
        async with pair(prefill=profile, time_scale=0.1) as (p, _, session):
            began = time.monotonic()
            asked = [completion([k] * 100, 1, kv_transfer_params=ASK) for k in range(3)]
            await asyncio.gather(*(post(session, p, body) for body in asked))
            took = time.monotonic() - began
            assert took >= 3 * 100 * 0.02 * 0.1, "one after the other"

    run(work)


def test_cached_prefixes_cost_nothing_and_are_reported() -> None:
    async def work() -> None:
        async with pair() as (p, _, session):
            body = completion(list(range(100)), 1, kv_transfer_params=ASK)
            _, first = await post(session, p, body)
            _, second = await post(session, p, body)
            found = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second)]
            assert found == [0, 96]

    run(work)


@given(st.integers(0, 5000), st.integers(1, 80), st.integers(0, 10**6), st.integers(1, 4096))
def test_parts_add_up_to_the_layout(tokens: int, layers: int, fixed: int, per_token: int) -> None:
    kv = KVLayout(fixed_bytes=fixed, bytes_per_token=per_token, n_layers=layers)
    parts = PartSizes(kv, 1.0).of(tokens)
    assert len(parts) == layers + 1
    assert sum(parts) == (kv.transfer_bytes(tokens) if tokens else 0)
    assert not tokens or max(parts[1:]) - min(parts[1:]) <= 1


def test_the_link_shares_its_rate_and_can_be_cut() -> None:
    """Two transfers of 300 kB at 1 MB/s: both end after about 0.6 s, none at its own pace."""

    async def work() -> None:
        size = 300_000

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(bytes(size))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        link = ShapedLink(1e6)
        port = await link.listen("127.0.0.1", server.sockets[0].getsockname()[1])

        async def fetch() -> float:
            began = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            got = 0
            while piece := await reader.read(65536):
                got += len(piece)
            writer.close()
            assert got == size
            return time.monotonic() - began

        try:
            alone = await fetch()
            assert 0.25 < alone < 1.5
            both = await asyncio.gather(fetch(), fetch())
            assert min(both) > 1.4 * 0.3, "each had the whole rate"
            assert link.carried_bytes == 3 * size
            link.set_rate(0)
            cut = asyncio.create_task(fetch())
            done, _ = await asyncio.wait({cut}, timeout=0.5)
            assert not done
            link.set_rate(1e7)
            await cut
        finally:
            await link.close()
            server.close()

    run(work)


def test_tokens_are_named_by_their_prompt() -> None:
    assert tokens_of({"prompt": [1, 2, 3]}) == [1, 2, 3]
    assert len(tokens_of({"prompt": "x" * 41})) == 10
    assert len(tokens_of({"messages": [{"role": "user", "content": "x" * 35}]})) == 10 + 4
    assert digest_of([1, 2]) != digest_of([2, 1])
    assert token_text("ab", 3) == "ab-3 "


def test_a_deployment_becomes_a_cluster() -> None:
    cluster = of_deployment(load_scenario("paper"), time_scale=0.1, byte_scale=1e-5)
    counts: dict[tuple[str, str], int] = {}
    for member in cluster:
        counts[member.cluster, member.role] = counts.get((member.cluster, member.role), 0) + 1
    assert counts == {("prfaas0", "prefill"): 4, ("pd0", "prefill"): 3, ("pd0", "decode"): 5}
    assert cluster.link is not None
    assert cluster.link._rate == pytest.approx(100e9 / 8 * 1e-5 / 0.1)
