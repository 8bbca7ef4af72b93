"""A worker's protocol with a stub model: legs, hand-over, refusals, roles, and the router in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_serving.app import Router
from prfaas_serving.backends.engines import read_load
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.workers.frames import frame_head, read_frame
from tests.serving.support import Setup, run
from tests.serving.workers.stub import (
    FIXED_BYTES,
    TOKEN_BYTES,
    Bench,
    StubModel,
    answer_of,
    asked,
    bench,
    ids_of,
    soon,
)

PAIR = {"p": "prefill", "d": "decode"}
PROMPT = list(range(10, 40))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = {"do_remote_decode": True}


def stream_of(text: str) -> list[Any]:
    """Data of the events of a stream."""
    found = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [data if data == "[DONE]" else orjson.loads(data) for data in found]


# ---------------------------------------------------------------------------------------- handing over


@given(st.lists(st.integers(2, 999), min_size=1, max_size=40))
@settings(max_examples=10, deadline=None)
def test_a_hand_over_gives_what_one_worker_gives(ids: list[int]) -> None:
    async def work() -> None:
        async with bench(PAIR) as b:
            handed = await b.prefilled("p", ids)
            assert handed["remote_num_tokens"] == len(ids) - 1
            status, headers, answer = await b.post(
                "d", COMPLETIONS, {**asked(ids), "kv_transfer_params": handed}
            )
            assert (status, ids_of(answer)) == (200, answer_of(ids, 4))
            assert answer["usage"] == {
                "prompt_tokens": len(ids),
                "completion_tokens": 4,
                "total_tokens": len(ids) + 4,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            expected = FIXED_BYTES + TOKEN_BYTES * (len(ids) - 1) if len(ids) > 1 else None
            assert headers.get("X-Prfaas-Kv-Bytes") == (None if expected is None else str(expected))
            assert not b.workers["p"].store.staged
            alone = await b.post("d", COMPLETIONS, asked(ids))
            assert ids_of(alone[2]) == ids_of(answer)

    run(work)


def test_streams_and_chats() -> None:
    async def work() -> None:
        async with bench(PAIR) as b:
            whole = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}
            _, _, answer = await b.post("p", CHAT, {**whole, "kv_transfer_params": ASK})
            assert answer["object"] == "chat.completion"
            handed = answer["kv_transfer_params"]
            body = {
                **whole,
                "stream": True,
                "stream_options": {"include_usage": True},
                "kv_transfer_params": handed,
            }
            status, _, text = await b.post("d", CHAT, body)
            events = stream_of(text)
            assert status == 200
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            words = [e["choices"][0]["delta"]["content"] for e in events[1:4]]
            ids = StubModel().encode("hello")
            assert words == [f"<{token}>" for token in answer_of(ids, 3)]
            assert [e["choices"][0]["finish_reason"] for e in events[:4]] == [None, None, None, "length"]
            assert events[4]["usage"]["completion_tokens"] == 3
            assert events[5] == "[DONE]"
            _, _, one = await b.post("d", CHAT, whole)
            assert one["choices"][0]["message"]["content"] == "".join(words)

    run(work)


def test_an_end_of_the_model_ends_the_answer() -> None:
    async def work() -> None:
        tokens = answer_of(PROMPT, 6)
        model = StubModel(eos_ids=frozenset({tokens[2]}))
        at = tokens.index(tokens[2]) + 1
        async with bench({"w": "both"}, {"w": model}) as b:
            _, _, answer = await b.post("w", COMPLETIONS, asked(PROMPT, 6))
            assert (ids_of(answer), answer["choices"][0]["finish_reason"]) == (tokens[:at], "stop")
            _, _, answer = await b.post("w", COMPLETIONS, asked(PROMPT, 6, ignore_eos=True))
            assert (ids_of(answer), answer["choices"][0]["finish_reason"]) == (tokens, "length")
            _, _, answer = await b.post("w", COMPLETIONS, asked(PROMPT, 6, min_tokens=6))
            assert ids_of(answer) == tokens

    run(work)


def test_a_seed_makes_a_drawn_answer_the_same_again() -> None:
    async def work() -> None:
        async with bench({"w": "both"}) as b:
            drawn = [
                ids_of((await b.post("w", COMPLETIONS, asked(PROMPT, 5, temperature=1, seed=s)))[2])
                for s in (3, 3, 4)
            ]
            assert drawn[0] == drawn[1] != drawn[2]
            assert drawn[0] != answer_of(PROMPT, 5)

    run(work)


# ---------------------------------------------------------------------------------------- layer by layer


def test_parts_cross_while_the_prefill_goes_on() -> None:
    """30 tokens but the last are pieces of 8, 8, 8 and 5; attention layers go over in each, states in the last."""

    async def work() -> None:
        turns = threading.Semaphore(0)
        async with bench(PAIR, {"p": StubModel(turns=turns)}) as b:
            handed = await b.prefilled("p", PROMPT)  # answered while not one layer is computed
            task = asyncio.create_task(
                b.post("d", COMPLETIONS, {**asked(PROMPT), "kv_transfer_params": handed})
            )

            def over() -> int:
                records = b.workers["d"].transfers.as_json()
                return records[-1]["parts"] if records else 0

            for given_turns, parts in ((2, 1), (2, 2), (4, 4), (4, 6), (1, 7), (1, 8), (1, 9)):
                for _ in range(given_turns):
                    turns.release()
                await soon(lambda parts=parts: over() == parts, f"{parts} parts are over")
            assert not task.done()
            assert b.workers["d"].transfers.as_json()[-1]["outcome"] == "open"
            turns.release()
            status, _, answer = await task
            assert (status, ids_of(answer)) == (200, answer_of(PROMPT, 4))
            sent, fetched = (b.workers[name].transfers.as_json()[-1] for name in ("p", "d"))
            for record in (sent, fetched):
                assert record["outcome"] == "done"
                assert record["parts"] == 10
                assert record["tensor_bytes"] == FIXED_BYTES + TOKEN_BYTES * 29
                assert record["wire_bytes"] > record["tensor_bytes"]
                assert record["last_part_bytes"] == 5 * TOKEN_BYTES // 2
                assert 0 <= record["first_byte_s"] <= record["last_byte_s"]
            await soon(
                lambda: b.workers["d"].transfers.as_json()[-1]["tail_s"] == sent["tail_s"], "the receipt"
            )
            assert sent["prefill_end_s"] >= 0

    run(work)


def test_an_answer_can_wait_for_the_end_of_the_prefill() -> None:
    async def work() -> None:
        turns = threading.Semaphore(0)
        async with bench(PAIR, {"p": StubModel(turns=turns)}, answers="finished") as b:
            task = asyncio.create_task(b.prefilled("p", PROMPT))
            for _ in range(15):
                turns.release()
            await soon(lambda: turns._value == 0, "15 layers are computed")
            await asyncio.sleep(0.05)
            assert not task.done()
            turns.release()
            handed = await task
            assert handed["remote_num_tokens"] == 29

    run(work)


def test_the_model_runs_in_its_own_thread_and_pages_answer_meanwhile() -> None:
    async def work() -> None:
        turns, model = threading.Semaphore(0), StubModel()
        model.turns = turns
        async with bench({"w": "both"}, {"w": model}) as b:
            task = asyncio.create_task(b.post("w", COMPLETIONS, asked(PROMPT)))
            await soon(lambda: model.calls, "the model is at work")
            running, waiting, use, _ = read_load("vllm", (await b.get("w", "/metrics")).encode())
            assert (running, waiting) == (1, 0)
            assert use is not None
            assert use > 0
            for _ in range(100):
                turns.release()
            assert (await task)[0] == 200
            assert all(name.startswith("model") for name in model.calls)
            running, _, use, fields = read_load("vllm", (await b.get("w", "/metrics")).encode())
            assert (running, use) == (0, 0)
            assert fields["vllm:prompt_tokens_by_source_total{local_compute}"] == 30
            assert fields["process_start_time_seconds"] > 0

    run(work)


# ---------------------------------------------------------------------------------------- what goes wrong


async def refused(b: Bench, handed: dict[str, Any], ids: list[int] = PROMPT) -> tuple[int, str]:
    """(status, message) of a decode leg that must not generate anything."""
    status, _, answer = await b.post("d", COMPLETIONS, {**asked(ids), "kv_transfer_params": handed})
    assert status >= 400, answer
    assert not b.workers["d"].metrics.generated._value.get()
    return status, answer["error"]["message"]


def test_wrong_handles_are_told_apart() -> None:
    async def work() -> None:
        async with bench(PAIR) as b:
            handed = await b.prefilled("p", PROMPT)
            cases = [
                ({**handed, "remote_engine_id": "e"}, PROMPT, "foreign_handle: "),
                ({**handed, "remote_request_id": "req-0"}, PROMPT, "unknown_request: "),
                (handed, [*PROMPT[:5], 7, *PROMPT[6:]], "other_prompt: "),
                (
                    {**handed, "remote_num_tokens": None},
                    PROMPT[:-1],
                    "wrong_length: the cache holds 29 tokens, 28",
                ),
                ({**handed, "remote_port": 1}, PROMPT, "cannot be reached"),
            ]
            for wrong, ids, words in cases:
                status, message = await refused(b, wrong, ids)
                assert status == 500
                assert words in message
            status, message = await refused(b, handed, PROMPT[:-2])
            assert status == 400
            assert "the handle holds 29 tokens, this prompt needs 27" in message
            status, message = await refused(b, {"do_remote_prefill": True})
            assert status == 400
            assert "the handle lacks remote_host" in message
            assert b.workers["d"].metrics.failed._value.get() == len(cases)
            # all of that has left the cache where it is; used once, it is gone
            good = {**asked(PROMPT), "kv_transfer_params": handed}
            assert (await b.post("d", COMPLETIONS, good))[0] == 200
            again = await b.post("d", COMPLETIONS, good)
            assert again[0] == 500
            assert "unknown_request: " in again[2]["error"]["message"]

    run(work)


def test_another_model_is_refused() -> None:
    async def work() -> None:
        async with bench(PAIR, {"d": StubModel(fingerprint="other")}) as b:
            handed = await b.prefilled("p", PROMPT)
            assert "foreign_model: " in (await refused(b, handed))[1]

    run(work)


@contextlib.asynccontextmanager
async def tampering(port: int, how: str) -> AsyncIterator[int]:
    """A port that passes a transfer on but for its second part: lost, cut short, or the end of the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            header, _ = await read_frame(reader)
            far_writer.write(frame_head(header))
            seen = 0
            while True:
                header, payload = await read_frame(far_reader)
                seen += header["kind"] == "part"
                if seen == 2 and header["kind"] == "part":
                    if how == "lost":
                        continue
                    if how == "broken":
                        writer.write(frame_head(header, len(payload)) + payload[:10])
                        break
                    if how == "moved":
                        header["start"] += 1
                    if how == "rubbish":
                        payload = b"\0" * len(payload)
                writer.write(frame_head(header, len(payload)) + payload)
                if header["kind"] == "end":
                    break
            await writer.drain()
            if how != "broken":
                await reader.read()
        finally:
            writer.close()
            far_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("lost", "layer 3: tokens 8..16 after 0"),
        ("broken", "the connection ended within a frame"),
        ("moved", "tokens 1..8 after 0"),
        ("rubbish", "not safetensors"),
    ],
)
def test_half_a_cache_is_never_decoded_from(how: str, words: str) -> None:
    async def work() -> None:
        async with bench(PAIR) as b:
            handed = await b.prefilled("p", PROMPT)
            async with tampering(handed["remote_port"], how) as port:
                status, message = await refused(b, {**handed, "remote_port": port})
            assert status == 500
            assert words in message
            # the staged cache is still whole
            good = {**asked(PROMPT), "kv_transfer_params": handed}
            status, _, answer = await b.post("d", COMPLETIONS, good)
            assert (status, ids_of(answer)) == (200, answer_of(PROMPT, 4))

    run(work)


def test_a_cache_that_cannot_be_fetched_may_be_computed_here() -> None:
    async def work() -> None:
        async with bench(PAIR, on_failure="recompute") as b:
            handed = await b.prefilled("p", PROMPT)
            wrong = {**handed, "remote_request_id": "req-0"}
            status, headers, answer = await b.post(
                "d", COMPLETIONS, {**asked(PROMPT), "kv_transfer_params": wrong}
            )
            assert (status, ids_of(answer)) == (200, answer_of(PROMPT, 4))
            assert headers["X-Prfaas-Kv-Source"] == "local"
            assert b.workers["d"].metrics.failed._value.get() == 1

    run(work)


def test_a_failing_model_fails_its_requests_alone() -> None:
    async def work() -> None:
        model = StubModel(fails=True)
        async with bench(PAIR, {"p": model}, answers="finished") as b:
            body = {**asked(PROMPT, 1), "kv_transfer_params": ASK}
            status, _, answer = await b.post("p", COMPLETIONS, body)
            assert (status, answer["error"]["message"]) == (500, "the model failed")
            assert not b.workers["p"].store.staged
            model.fails = False
            assert (await b.prefilled("p", PROMPT))["remote_num_tokens"] == 29

    run(work)


def test_a_prefill_that_fails_on_the_way_ends_the_transfer() -> None:
    async def work() -> None:
        turns = threading.Semaphore(0)
        model = StubModel(turns=turns)
        async with bench(PAIR, {"p": model}) as b:
            handed = await b.prefilled("p", PROMPT)
            task = asyncio.create_task(refused(b, handed))
            for _ in range(4):
                turns.release()
            await soon(
                lambda: (r := b.workers["d"].transfers.as_json()) and r[-1]["parts"] == 2, "parts are over"
            )
            model.fails = True
            for _ in range(4):
                turns.release()
            status, message = await task
            assert status == 500
            assert "prefill_failed: the model failed" in message

    run(work)


def test_a_cache_nobody_fetches_goes_with_its_lease() -> None:
    async def work() -> None:
        async with bench(PAIR, lease_s=0.2) as b:
            worker = b.workers["p"]
            handed = await b.prefilled("p", PROMPT)
            assert worker.store.total_bytes == FIXED_BYTES + TOKEN_BYTES * 29
            await soon(lambda: not worker.store.staged, "the lease has ended")
            assert worker.metrics.expired._value.get() == 1
            assert "unknown_request" in (await refused(b, handed))[1]

    run(work)


def test_a_client_that_leaves_frees_what_it_held() -> None:
    async def work() -> None:
        turns = threading.Semaphore(0)
        async with bench(PAIR, {"p": StubModel(turns=turns)}, answers="finished") as b:
            worker = b.workers["p"]
            task = asyncio.create_task(b.prefilled("p", PROMPT))
            await soon(lambda: worker.store.staged, "the prefill is under way")
            task.cancel()
            await soon(lambda: not worker.store.staged and not worker._legs["prefill"], "all is free")
            assert (await b.get("p", "/role"))["prefill_legs"] == 0
            for _ in range(100):
                turns.release()

    run(work)


def test_what_is_full_says_so() -> None:
    async def work() -> None:
        turns = threading.Semaphore(0)
        model = StubModel(turns=turns)
        async with bench({"w": "both"}, {"w": model}, max_queue=1, kv_capacity_bytes=4000) as b:
            small = asked(PROMPT[:3])
            running = [asyncio.create_task(b.post("w", COMPLETIONS, small)) for _ in range(2)]
            await soon(lambda: b.workers["w"]._thread.waiting == 1, "one waits")
            status, headers, answer = await b.post("w", COMPLETIONS, small)
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "busy", "1")
            for _ in range(100):
                turns.release()
            assert [(await task)[0] for task in running] == [200, 200]
            # 176 fixed bytes and 32 for each of 113 + 7 tokens fit, one token more does not
            prompt = [7] * 113
            assert (await b.post("w", COMPLETIONS, asked(prompt, 6)))[0] == 200
            status, _, answer = await b.post("w", COMPLETIONS, asked(prompt, 7))
            assert (status, answer["error"]["code"]) == (503, "kv_full")

    run(work)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, "one text or one list"),
        ({"prompt": [5000]}, "within 0..999"),
        ({"prompt": "a", "max_tokens": 0}, "at least 1"),
        ({"prompt": "a", "max_tokens": 501}, "maximum context length is 500"),
        ({"prompt": "a" * 500}, "maximum context length is 500"),
        ({"prompt": "a", "n": 2}, "n is not supported"),
        ({"prompt": "a", "logprobs": 1}, "logprobs is not supported"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "a", "kv_transfer_params": 3}, "kv_transfer_params must be an object"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(body: Any, words: str) -> None:
    async def work() -> None:
        async with bench({"w": "both"}) as b:
            status, _, answer = await b.post("w", COMPLETIONS, body)
            assert status == 400
            assert words in answer["error"]["message"]

    run(work)


def test_pages() -> None:
    async def work() -> None:
        async with bench({"w": "both"}, api_key="secret") as b:
            assert (await b.post("w", COMPLETIONS, asked(PROMPT)))[0] == 401
            key = {"Authorization": "Bearer secret"}
            assert (await b.post("w", COMPLETIONS, asked(PROMPT), **key))[0] == 200
            status, _, answer = await b.post("w", "/tokenize", {"prompt": "abc"}, **key)
            assert (status, answer["count"]) == (200, 3)
            assert len(answer["tokens"]) == 3
            assert (await b.post("w", "/v1/embeddings", {}, **key))[0] == 404
            for path in ("/health", "/metrics", "/query"):
                async with b.session.get(b.workers["w"].url + path) as page:
                    assert page.status == 200
            async with b.session.get(b.workers["w"].url + "/v1/models", headers=key) as page:
                assert (await page.json())["data"][0]["max_model_len"] == 500

    run(work)


# ---------------------------------------------------------------------------------------- roles


def test_a_role_is_kept_and_changed() -> None:
    async def work() -> None:
        async with bench({"w": "prefill"}) as b:
            status, headers, answer = await b.post("w", COMPLETIONS, asked(PROMPT))
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "wrong_role", "1")
            status, _, answer = await b.post("w", "/role", {"role": "decode"})
            assert (status, answer["role"]) == (200, "decode")
            assert (await b.get("w", "/role"))["role"] == "decode"
            assert (await b.post("w", COMPLETIONS, asked(PROMPT)))[0] == 200
            prefill = {**asked(PROMPT, 1), "kv_transfer_params": ASK}
            assert (await b.post("w", COMPLETIONS, prefill))[0] == 503
            assert (await b.post("w", "/role", {"role": "both"}))[0] == 200
            assert (await b.post("w", COMPLETIONS, prefill))[0] == 200
            page = await b.get("w", "/metrics")
            assert 'prfaas_worker_role{role="both"} 1.0' in page
            assert 'prfaas_worker_role{role="decode"} 0.0' in page
            assert "prfaas_worker_role_changes_total 2.0" in page

    run(work)


@pytest.mark.parametrize(
    "body", [{"role": "x"}, {}, {"role": "both", "drain": 3}, {"role": "both", "drain_s": -1}]
)
def test_a_wrong_order_of_a_role_is_refused(body: dict[str, Any]) -> None:
    async def work() -> None:
        async with bench({"w": "prefill"}) as b:
            assert (await b.post("w", "/role", body))[0] == 400
            assert (await b.get("w", "/role"))["role"] == "prefill"

    run(work)


def test_a_role_does_not_change_under_its_requests() -> None:
    """409 while a staged cache waits; with a drain nothing new is taken, and the change comes once it is fetched."""

    async def work() -> None:
        async with bench({**PAIR, "w": "prefill"}) as b:
            handed = await b.prefilled("w", PROMPT)
            status, _, answer = await b.post("w", "/role", {"role": "decode"})
            assert status == 409
            assert answer["error"]["message"] == ("1 requests of role prefill are under way; still prefill")
            assert (await b.post("w", "/role", {"role": "both"}))[0] == 200  # takes nothing away
            assert (await b.post("w", "/role", {"role": "prefill"}))[0] == 200
            order = asyncio.create_task(b.post("w", "/role", {"role": "decode", "drain_s": 20}))
            await soon(lambda: b.workers["w"]._next_role == "decode", "the change is under way")
            prefill = {**asked(PROMPT, 1), "kv_transfer_params": ASK}
            assert (await b.post("w", COMPLETIONS, prefill))[0] == 503
            assert (await b.post("w", COMPLETIONS, asked(PROMPT)))[0] == 503
            assert (await b.post("w", "/role", {"role": "both"}))[0] == 409
            fetched = await b.post("d", COMPLETIONS, {**asked(PROMPT), "kv_transfer_params": handed})
            assert ids_of(fetched[2]) == answer_of(PROMPT, 4)
            assert (await order)[0] == 200
            assert (await b.post("w", COMPLETIONS, asked(PROMPT)))[0] == 200

    run(work)


def test_a_drain_that_takes_too_long_leaves_the_role() -> None:
    async def work() -> None:
        async with bench({"w": "prefill"}) as b:
            await b.prefilled("w", PROMPT)
            status, _, _ = await b.post("w", "/role", {"role": "decode", "drain_s": 0.05})
            assert status == 409
            assert (await b.get("w", "/role"))["role"] == "prefill"
            await b.prefilled("w", PROMPT)

    run(work)


# ---------------------------------------------------------------------------------------- behind the router


@contextlib.asynccontextmanager
async def routed(b: Bench, backend: str) -> AsyncIterator[Setup]:
    """A router whose remote prefill worker is p, local prefill l, decode d."""
    places = {"p": ("prfaas0", "prefill"), "l": ("pd0", "prefill"), "d": ("pd0", "decode")}
    raw = {
        "backend": backend,
        "scenario": "paper",
        "listen": {"port": 0},
        "workers": [
            {
                "name": name,
                "url": worker.url,
                "cluster": places[name][0],
                "role": places[name][1],
                "bootstrap_port": worker.port,
            }
            for name, worker in b.workers.items()
        ],
        "decision": {"threshold_tokens": 20},
        "cache": {"enabled": False},
        "health": {"ramp_s": 0.0, "probe_s": 0.2},
        "log_level": "error",
    }
    router = Router(Resolved(RouterConfig.model_validate(raw)))
    await router.start()
    try:
        s = Setup(router, {}, b.session)
        # canaries prove each way once
        await soon(lambda: not router.health.missing() and not router.forwarder.open_requests, "it is ready")
        yield s
    finally:
        await router.close()


@pytest.mark.parametrize("backend", ["vllm_nixl", "vllm_mooncake"])
def test_the_router_drives_it_as_it_drives_vllm(backend: str) -> None:
    """Remote above the threshold, local below; a remote worker that is gone; nothing stays staged."""

    async def work() -> None:
        async with bench({"p": "prefill", "l": "prefill", "d": "decode"}) as b, routed(b, backend) as s:
            for prompt, route in ((PROMPT, "remote"), (PROMPT[:20], "local"), ([5], "local")):
                for stream in (False, True):
                    reply = await s.post(COMPLETIONS, asked(prompt, stream=stream))
                    assert (reply.status, reply.headers["X-Prfaas-Route"]) == (200, route), reply.body
                    assert reply.text == StubModel().decode(answer_of(prompt, 4))
            moved = b.workers["d"].metrics.registry.get_sample_value("vllm:nixl_bytes_transferred_sum")
            assert moved is not None
            assert moved >= 2 * (FIXED_BYTES + TOKEN_BYTES * 29)
            await b.workers["p"].close()
            reply = await s.post(COMPLETIONS, asked(PROMPT))
            assert (reply.status, reply.headers["X-Prfaas-Route"]) == (200, "local"), reply.body
            assert reply.text == StubModel().decode(answer_of(PROMPT, 4))
            await soon(lambda: not b.workers["l"].store.staged, "nothing is staged")
            await soon(lambda: not s.router.forwarder.handles_open, "no handle is open")

    run(work)


def test_a_client_that_leaves_between_the_legs_frees_the_cache() -> None:
    """The router has the decode worker fetch the cache that nobody wants any more."""

    async def work() -> None:
        turns = threading.Semaphore(0)
        models = {"p": StubModel(turns=turns)}
        async with bench({"p": "prefill", "l": "prefill", "d": "decode"}, models) as b:
            for _ in range(1000):
                turns.release()  # for the canaries
            async with routed(b, "vllm_nixl") as s:
                while turns.acquire(blocking=False):
                    pass
                task = asyncio.create_task(s.post(COMPLETIONS, asked(PROMPT, 50)))
                await soon(lambda: b.workers["d"]._pulls, "the cache is on its way")
                task.cancel()
                for _ in range(1000):
                    turns.release()
                await soon(lambda: not b.workers["p"].store.staged, "the cache is free")
                await soon(lambda: not s.router.forwarder.handles_open, "no handle is open")

    run(work)
