"""What the router takes, refuses, strips, passes on and adds."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import orjson
import pytest

from prfaas_serving.fake.spec import Fault
from tests.serving.support import LONG, SHORT, Setup, completion, expected_text, run, serving, until

CHAT = "/v1/chat/completions"
PAIR = (("r1", "prfaas0", "prefill"), ("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))


def decode_bodies(s: Setup) -> list[Any]:
    return [x.body for n in ("d1", "d2") if n in s.workers for x in s.workers[n].seen]


_LOCAL = [
    ("n", completion(LONG, n=2)),
    ("best_of", completion(LONG, best_of=3)),
    ("beam_search", completion(LONG, use_beam_search=True)),
    ("echo", completion(LONG, echo=True)),
    ("prompt_logprobs", completion(LONG, prompt_logprobs=1)),
    ("prompt_list", completion([LONG, LONG])),
    ("prompt_list", completion([[1, 2, 3], [4, 5, 6]])),
    ("prompt_list", completion([])),
    ("prompt_type", completion({"a": 1})),
]


@pytest.mark.parametrize(("reason", "body"), _LOCAL)
def test_what_cannot_be_split_goes_whole_to_a_decode_worker(reason: str, body: dict[str, Any]) -> None:
    async def work() -> None:
        async with serving(workers=PAIR, threshold=0.0) as s:
            reply = await s.post("/v1/completions", body)
            assert reply.status == 200
            assert reply.headers["X-Prfaas-Route"] == "local"
            assert reply.headers["X-Prfaas-Reason"] == reason
            assert s.metric("decisions_total", route="alone", reason=reason) == 1
            assert not s.workers["r1"].seen
            assert decode_bodies(s) == [body], "sent as it came"
            await s.settled()

    run(work)


def test_pictures_stay_local_and_texts_in_parts_do_not() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, threshold=0.0) as s:
            text = {"type": "text", "text": LONG}
            picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            for parts, reason in (([text, picture], "multimodal"), ([text], "rule")):
                body = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}
                reply = await s.post(CHAT, body)
                assert reply.headers["X-Prfaas-Reason"] == reason

    run(work)


def test_n_of_one_is_an_ordinary_request() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            reply = await s.complete(LONG, n=1, best_of=1, echo=False)
            assert reply.headers["X-Prfaas-Route"] == "remote"

    run(work)


def test_other_v1_routes_go_whole_and_others_do_not_exist() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            reply = await s.post("/v1/embeddings", {"input": "x"})
            assert reply.status == 200
            assert reply.headers["X-Prfaas-Reason"] == "route"
            assert (await s.post("/v1/responses", {"input": "x"})).status == 404  # the worker's own answer
            models = await s.get("/v1/models")
            assert models.json["data"][0]["id"] == "fake"
            assert (await s.get("/v1/completions")).status == 405
            assert (await s.post("/metrics", {})).status == 405
            for path in ("/tokenize", "/inference/v1/generate", "/pd_role_switch", "/state", "/"):
                reply = await s.post(path, {})
                assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
            assert (await s.get("/health")).json == {"status": "ok"}

    run(work)


_BAD = [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"{}", b'{"stream": 1}', b'{"stream": "yes"}']


@pytest.mark.parametrize("raw", _BAD)
def test_a_broken_body_is_the_clients_mistake(raw: bytes) -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            for path in ("/v1/completions", CHAT):
                reply = await s.post(path, raw)
                assert reply.status == 400
                assert reply.json["error"]["type"] == "invalid_request_error"
                assert reply.headers["X-Request-Id"]
            await s.settled()

    run(work)


@pytest.mark.parametrize("backend", ["vllm_nixl", "sglang"])
def test_fields_and_headers_that_steer_the_hand_over_are_stripped(backend: str) -> None:
    async def work() -> None:
        async with serving(backend, PAIR) as s:
            mine = {
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "remote_host": "10.9.8.7",
                    "remote_port": 1,
                },
                "bootstrap_host": "10.9.8.7",
                "bootstrap_port": 9,
                "bootstrap_room": 7,
            }
            headers = {"x-prefiller-host-port": "10.9.8.7:1", "X-Data-Parallel-Rank": "3", "X-Custom": "kept"}
            for _ in range(2):
                body = completion(LONG, 4, **mine)
                reply = await s.post("/v1/completions", body, headers)
                assert (reply.status, reply.text) == (200, expected_text(body, 4))
            for worker in s.workers.values():
                for seen in worker.seen:
                    assert b"10.9.8.7" not in orjson.dumps(seen.body)
                    assert "x-prefiller-host-port" not in seen.headers
                    assert seen.headers.get("X-Data-Parallel-Rank") is None
                    assert seen.headers["X-Custom"] == "kept"
            rooms = [x.body.get("bootstrap_room") for x in s.workers["r1"].seen]
            assert 7 not in rooms
            assert s.metric("stripped_fields_total", field="kv_transfer_params") == 2
            await s.settled()

    run(work)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_the_prefill_leg_makes_one_token(path: str) -> None:
    """Every name of the limit is clamped; minima and stream options go."""

    async def work() -> None:
        async with serving(workers=PAIR) as s:
            asked = {
                "stream": True,
                "stream_options": {"include_usage": True},
                "min_tokens": 3,
                "temperature": 0.5,
            }
            if path == CHAT:
                asked["max_completion_tokens"] = 5
            reply = await s.complete(LONG, 5, path, **asked)
            assert reply.status == 200
            prefill, decode = s.workers["r1"].seen[0].body, s.workers["d1"].seen[0].body
            assert prefill["max_tokens"] == 1
            assert prefill.get("max_completion_tokens", 1) == 1
            assert prefill["stream"] is False
            assert not {"stream_options", "min_tokens"} & set(prefill)
            assert prefill["temperature"] == 0.5
            assert decode["stream"] is True
            assert decode["max_tokens"] == 5
            assert decode["min_tokens"] == 3
            assert decode.pop("kv_transfer_params")["do_remote_prefill"] is True
            assert decode == completion(LONG, 5, path, **asked)

    run(work)


@pytest.mark.parametrize("backend", ["vllm_nixl", "vllm_mooncake", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_counted_once_with_the_cache_of_the_prefill_leg(backend: str, stream: bool) -> None:
    async def work() -> None:
        async with serving(backend, PAIR) as s:
            s.workers["r1"].faults.append(Fault("cached", "prefill", value=256.0))
            body = completion(
                LONG, 40, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
            )
            reply = await s.post("/v1/completions", body)
            found = (
                [e for e in reply.events if isinstance(e, dict) and e.get("usage")]
                if stream
                else [reply.json]
            )
            assert len(found) == 1
            assert found[0]["usage"] == {
                "prompt_tokens": 300,
                "completion_tokens": 40,
                "total_tokens": 340,
                "prompt_tokens_details": {"cached_tokens": 256},
            }
            assert s.metric("output_tokens_total") == 40
            assert s.metric("cached_tokens_total") == 256

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_what_the_worker_said(stream: bool) -> None:
    """Status, type and body as in a direct call; hop-by-hop headers dropped, others kept."""

    async def work() -> None:
        async with serving(workers=PAIR) as s:
            body = completion(SHORT, 5, stream=stream)
            headers = {"X-Request-Id": "same", "Content-Type": "application/json"}
            async with s.session.post(
                s.workers["d1"].url + "/v1/completions", json=body, headers=headers
            ) as direct:
                raw = await direct.read()
                kind = direct.headers["Content-Type"]
            reply = await s.post("/v1/completions", body, {"X-Request-Id": "same"})
            assert reply.headers["Content-Type"] == kind
            assert reply.headers["X-Request-Id"] == "same"
            inner = s.workers["d1"].seen[-1].headers["X-Request-Id"]
            assert reply.body == raw.replace(b"cmpl-same", b"cmpl-" + inner.encode())
            assert ("Content-Length" in reply.headers) != stream

    run(work)


def test_both_legs_get_the_credentials_and_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "sk-very-secret-value"

    async def work() -> None:
        async with serving(workers=PAIR, spec={"api_key": secret}, health={"breaker_failures": 1}) as s:
            sent = {
                "Authorization": f"Bearer {secret}",
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "Connection": "keep-alive, X-Hop",
                "X-Hop": "1",
                "TE": "trailers",
            }
            reply = await s.complete(LONG, headers=sent)
            assert reply.status == 200
            for name in ("r1", "d1"):
                got = s.workers[name].seen[0].headers
                assert got["Authorization"] == sent["Authorization"]
                assert got["traceparent"] == sent["traceparent"]
                assert not {"X-Hop", "TE"} & set(got)
            ids = {s.workers[n].seen[0].headers["X-Request-Id"] for n in ("r1", "d1")}
            assert len(ids) == 1
            for wrong in ({"Authorization": "Bearer nope"}, {}):
                for prompt in (LONG, SHORT):
                    reply = await s.complete(prompt, headers=wrong)
                    assert reply.status == 401
            assert all(s.worker(n).breaker.state(time.monotonic()) == "closed" for n in s.workers)
            assert all(s.worker(n).state == "up" for n in s.workers)
            await s.settled()

    run(work)
    assert secret not in caplog.text


def test_a_worker_key_of_the_configuration_takes_the_place_of_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRFAAS_TEST_KEY", "worker-key")
    entry = {n: {"api_key_env": "PRFAAS_TEST_KEY"} for n, _, _ in PAIR}

    async def work() -> None:
        async with serving(workers=PAIR, spec={"api_key": "worker-key"}, entry=entry) as s:
            reply = await s.complete(LONG, headers={"Authorization": "Bearer someone"})
            assert reply.status == 200
            assert (await s.complete(LONG)).status == 200

    run(work)


def test_no_key_sends_no_authorization() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            await s.complete(LONG)
            assert "Authorization" not in s.workers["r1"].seen[0].headers

    run(work)


def test_one_client_id_used_twice_at_once_is_told_apart() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            replies = await asyncio.gather(
                *(s.complete(LONG + str(k), 8, headers={"X-Request-Id": "twin"}) for k in range(6))
            )
            assert [r.status for r in replies] == [200] * 6
            assert [r.text for r in replies] == [
                expected_text(completion(LONG + str(k), 8), 8) for k in range(6)
            ]
            assert {r.headers["X-Request-Id"] for r in replies} == {"twin"}
            for name in ("r1", "d1"):
                ids = [x.headers["X-Request-Id"] for x in s.workers[name].seen]
                assert len(set(ids)) == 6
                assert all(i.startswith("twin-") for i in ids)
            assert {r.json["id"] for r in replies} == {
                "cmpl-" + x.headers["X-Request-Id"] for x in s.workers["d1"].seen
            }

    run(work)


@pytest.mark.parametrize("given", ["x" * 200, "a b", "ü", ""])
def test_an_unfit_client_id_is_replaced(given: str) -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            reply = await s.complete(SHORT, headers={"X-Request-Id": given})
            assert reply.status == 200
            assert len(reply.headers["X-Request-Id"]) == 32

    run(work)


def test_a_late_answer_of_an_old_attempt_changes_nothing() -> None:
    """The first prefill worker answers long after another one took over."""

    async def work() -> None:
        slow = {
            "r1": {"prefill": {"kind": "polynomial", "c0_s": 0.8, "c1_s_per_token": 0.0, "source": "tests"}}
        }
        workers = (("r1", "prfaas0", "prefill"), ("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))
        async with serving(workers=workers, per_worker=slow, deadlines={"prefill_floor_s": 0.2}) as s:
            reply = await s.complete(LONG, 4)
            assert (reply.status, reply.text) == (200, expected_text(completion(LONG, 4), 4))
            assert s.worker("r1").in_flight == 0
            await asyncio.sleep(0.9)
            assert s.worker("r1").in_flight == 0
            assert s.worker("r1").work_s(time.monotonic()) == 0
            await s.settled()

    run(work)


def test_limits_of_body_and_headers() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, limits={"body_bytes": 2000, "header_bytes": 3000}) as s:
            reply = await s.complete("x" * 3000)
            assert reply.status == 413
            assert reply.json["error"]["type"] == "invalid_request_error"
            reply = await s.complete(SHORT, headers={f"X-{k}": "v" * 500 for k in range(8)})
            assert (reply.status, reply.json["error"]["code"]) == (431, "headers_too_large")
            assert (await s.complete(SHORT)).status == 200
            await s.settled()

    run(work)


def test_limit_of_open_requests() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, limits={"requests": 2}) as s:
            tasks = [
                asyncio.create_task(s.post("/v1/completions", completion(SHORT, 100_000, stream=True)))
                for _ in range(2)
            ]
            await until(lambda: s.router.forwarder.open_requests == 2, "two are open")
            reply = await s.complete(SHORT)
            assert (reply.status, reply.json["error"]["code"]) == (429, "saturated")
            for task in tasks:
                task.cancel()
            await s.settled()
            assert (await s.complete(SHORT)).status == 200

    run(work)


def test_a_body_that_never_comes() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, limits={"body_read_s": 0.2}) as s:
            reader, writer = await asyncio.open_connection("127.0.0.1", s.router.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            head = await reader.readline()
            assert b" 408 " in head
            writer.close()

    run(work)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, limits={"client_stall_s": 0.4}, deadlines={"idle_s": 0.6}) as s:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", s.router.port))
                body = orjson.dumps(completion(SHORT, 150_000, stream=True))
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
                    + body
                )
                s.workers["d1"].spec = s.workers["d1"].spec.model_copy(
                    update={"decode": s.workers["d1"].spec.decode.model_copy(update={"a_s": 1e-5})}
                )
                await until(lambda: s.router.forwarder.open_requests == 1, "it is open")
                await until(lambda: s.router.forwarder.open_requests == 0, "it was cut off", 30.0)
            await until(lambda: not s.workers["d1"]._decoding, "the worker is free")

    run(work)


@pytest.mark.parametrize("clients", [1, 64])
def test_tokens_arrive_one_by_one(clients: int) -> None:
    """The gap at the client is the gap at the worker; nothing is collected on the way."""
    step_s = 0.1

    async def work() -> None:
        decode = {"a_s": step_s, "slots": 128, "source": "tests"}
        async with serving(workers=PAIR, spec={"decode": decode}) as s:
            replies = await asyncio.gather(
                *(s.complete(LONG + str(k), 20, stream=True) for k in range(clients))
            )
            gaps = []
            for reply in replies:
                assert len(reply.pieces) >= 10, "tokens came in lumps"
                gaps += [b - a for a, b in zip(reply.at_s, reply.at_s[1:], strict=False)]
            middle = sorted(gaps)[len(gaps) // 2]
            assert 0.5 * step_s < middle < 2.0 * step_s

    run(work)


def test_ready_after_one_generation_per_role() -> None:
    async def work() -> None:
        async with serving(workers=PAIR, health={"canary": True}, ready=False) as s:
            s.workers["r1"].faults.append(Fault("status", "prefill", count=None, value=500.0))
            await until(lambda: len(s.router.health.missing()) == 1, "all but the remote role are ready")
            reply = await s.get("/ready")
            assert (reply.status, reply.json) == (
                503,
                {"ready": False, "missing": ["remote prefill prfaas0"]},
            )
            assert (await s.get("/health")).status == 200
            s.workers["r1"].faults.clear()
            await until(lambda: not s.router.health.missing(), "the remote role is ready")
            assert (await s.get("/ready")).status == 200
            assert {x.leg for x in s.workers["r1"].seen} == {"prefill"}
            await s.workers["d1"].close()
            await until(lambda: s.router.health.missing() == ["decode"], "the decode role is gone")
            assert (await s.get("/ready")).status == 503

    run(work)


def test_a_shutdown_lets_open_requests_end() -> None:
    async def work() -> None:
        decode = {"a_s": 0.02, "slots": 8, "source": "tests"}
        async with serving(workers=PAIR, spec={"decode": decode}) as s:
            body = completion(SHORT, 30, stream=True)
            task = asyncio.create_task(s.post("/v1/completions", body))
            await until(lambda: s.workers["d1"]._decoding, "it streams")
            drained = asyncio.create_task(s.router.drain(10.0))
            await asyncio.sleep(0.05)
            assert not drained.done()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", s.router.port)
            assert await drained
            reply = await task
            assert (reply.status, reply.text) == (200, expected_text(body, 30))

    run(work)


def test_metrics_page_names_no_address() -> None:
    async def work() -> None:
        async with serving(workers=PAIR) as s:
            await s.complete(LONG)
            page = (await s.get("/metrics")).body.decode()
            assert 'prfaas_router_decisions_total{reason="rule",route="remote"} 1.0' in page
            assert "prfaas_router_ttft_seconds_bucket" in page
            assert "prfaas_router_threshold_tokens 100.0" in page
            assert not any(str(w.port) in page for w in s.workers.values())

    run(work)
