"""Strange HTTP: no answer of the router is a 500, and it goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from tests.serving.support import Setup, completion, serving

PAIR = (("r1", "prfaas0", "prefill"), ("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))
DECODE = {"a_s": 0.0002, "slots": 256, "source": "tests"}


@contextlib.contextmanager
def running() -> Iterator[tuple[Setup, int]]:
    """A router with its workers on a thread of their own."""
    started, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with serving(workers=PAIR, spec={"decode": DECODE}, limits={"body_read_s": 0.3}) as s:
            found.extend((s, s.router.port, asyncio.get_running_loop()))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield found[0], found[1]
    finally:
        if found:
            found[2].call_soon_threadsafe(stop.set)
        thread.join(30)


@pytest.fixture(scope="module")
def router() -> Iterator[tuple[Setup, int]]:
    with running() as pair:
        yield pair


def alive(port: int) -> None:
    """It still answers."""
    answer = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=completion("hello", 2), timeout=20)
    assert answer.status_code == 200


def statuses(answer: bytes) -> list[int]:
    """Statuses of all answers in what came back."""
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stream",
    "stream_options",
    "echo",
    "best_of",
    "tools",
    "kv_transfer_params",
    "bootstrap_room",
    "prompt_logprobs",
    "chat_template_kwargs",
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6),
)
def test_any_values_in_known_fields(router: tuple[Setup, int], path: str, body: dict[str, Any]) -> None:
    """What the workers make of it is theirs (the fakes are not strict); the router must not fail by itself."""
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 50)
    if isinstance(body.get("max_completion_tokens"), int):
        body["max_completion_tokens"] = min(body["max_completion_tokens"], 50)
    data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    answer = requests.post(f"http://127.0.0.1:{router[1]}{path}", data=data, timeout=20)
    if answer.status_code >= 500:
        assert answer.json()["error"]["code"] in {"upstream_error", "deadline"}, answer.text


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda method, path, headers, body: (
            method + b" " + path + b" HTTP/1.1\r\n" + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + body
        ),
        st.sampled_from(
            [b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"FOO", b"TRACE", b"CONNECT"]
        ),
        st.sampled_from(
            [b"/v1/completions", b"/v1/chat/completions", b"/v1/models", b"/", b"*", b"/v1/%zz", b"//x"]
        )
        | st.binary(min_size=1, max_size=20),
        st.lists(
            st.sampled_from(
                [
                    b"Host: x",
                    b"Content-Length: 5",
                    b"Content-Length: -1",
                    b"Content-Length: 99999999999",
                    b"Transfer-Encoding: chunked",
                    b"Content-Encoding: gzip",
                    b"Content-Encoding: br",
                    b"Expect: 100-continue",
                    b"Connection: upgrade",
                    b"Upgrade: websocket",
                    b"X-Request-Id: \xff\xfe",
                    b"Content-Type: multipart/form-data",
                    b"Authorization: Bearer \x00",
                ]
            )
            | st.binary(max_size=30),
            max_size=4,
        ),
        st.sampled_from([b"", b"{}", b"5\r\n{}\r\n", b"0\r\n\r\n", b"zz\r\n", b'{"prompt": "x"}']),
    )
)
def test_any_bytes_on_the_wire(router: tuple[Setup, int], sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", router[1]), timeout=10) as wire:
        wire.settimeout(10)
        received = b""
        with contextlib.suppress(OSError):
            wire.sendall(sent)
            wire.shutdown(socket.SHUT_WR)
            while piece := wire.recv(65536):
                received += piece
    assert not any(status == 500 for status in statuses(received)), received


def test_it_still_serves(router: tuple[Setup, int]) -> None:
    alive(router[1])


def _operation(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    body = {"type": "object", "properties": properties, "required": required}
    answers = {str(code): {"description": "an answer"} for code in (200, 400, 405, 408, 413, 429, 503)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "parameters": [
            {"in": "header", "name": "X-Request-Id", "schema": {"type": "string"}},
            {"in": "header", "name": "Authorization", "schema": {"type": "string"}},
            {"in": "query", "name": "q", "schema": {"type": "string"}},
        ],
        "responses": answers,
    }


_LIMIT = {"type": "integer", "minimum": 1, "maximum": 40}
_COMMON = {
    "model": {"type": "string"},
    "max_tokens": _LIMIT,
    "max_completion_tokens": _LIMIT,
    "stream": {"type": "boolean"},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "temperature": {"type": "number"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "kv_transfer_params": {"type": "object"},
}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    "required": ["role", "content"],
}
_PROMPT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
OPENAPI = {
    "openapi": "3.0.3",
    "info": {"title": "router", "version": "1"},
    "paths": {
        "/v1/completions": {"post": _operation({**_COMMON, "prompt": _PROMPT}, ["prompt"])},
        "/v1/chat/completions": {
            "post": _operation({**_COMMON, "messages": {"type": "array", "items": _MESSAGE}}, ["messages"])
        },
        "/v1/models": {"get": {"responses": {"200": {"description": "models"}}}},
        "/health": {"get": {"responses": {"200": {"description": "ok"}}}},
        "/ready": {"get": {"responses": {"200": {"description": "ok"}, "503": {"description": "not yet"}}}},
        "/metrics": {"get": {"responses": {"200": {"description": "text"}}}},
    },
}


@pytest.mark.slow
def test_schemathesis_finds_no_server_error() -> None:
    with running() as (setup, port):
        config = SchemathesisConfig()
        config.projects.default.update(base_url=f"http://127.0.0.1:{port}")
        schema = schemathesis.openapi.from_dict(OPENAPI, config=config)
        seen: dict[int, int] = {}

        def one(operation: Any, mode: GenerationMode) -> None:
            @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def attempt(case: Any) -> None:
                answer = case.call(timeout=20)
                seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                assert answer.status_code != 500, answer.text

            attempt()

        for result in schema.get_all_operations():
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                operation = result.ok()
                if mode is GenerationMode.POSITIVE or operation.body:
                    one(operation, mode)
        alive(port)
        assert setup.router.forwarder.open_requests == 0
        assert seen[200] >= 300
        assert sum(seen[status] for status in seen if 400 <= status < 500) >= 100, seen
