"""A small load generator and an echo worker that cost little, on asyncio protocols: for benchmarks only.

They speak just enough HTTP/1.1 for a router under test: requests with a Content-Length, answers with a
Content-Length or chunked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import orjson

_HEAD = b"HTTP/1.1 200 OK\r\n"
#: Timers may wake a loop late by so much (uvloop's count whole milliseconds).
_TIMER_S = 0.002


class EchoProtocol(asyncio.Protocol):
    """Answers every request at once: a prefill leg and a plain request with JSON, a streamed one with chunks."""

    def __init__(self, chunks: int) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._n = chunks
        self._pieces = [_chunk(_token(k)) for k in range(chunks)]
        self._stream_head = _HEAD + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._end = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client."""
        # uvloop's transports are no subclass of asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer every whole request."""
        self._buffer += data
        while (request := self._request()) is not None:
            self._answer(*request)

    def _request(self) -> tuple[bytes, bytes] | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self._buffer[:end]
        length = content_length(head)
        if len(self._buffer) < end + 4 + length:
            return None
        body = self._buffer[end + 4 : end + 4 + length]
        self._buffer = self._buffer[end + 4 + length :]
        return head, body

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"GET /v1/models"):
            self._json(b'{"object":"list","data":[{"id":"echo","object":"model"}]}')
        elif head.startswith(b"GET "):
            self._json(b"{}")
        elif b'"do_remote_decode":true' in body:
            self._json(_PREFILLED)
        elif b'"stream":true' in body:
            self._transport.write(self._stream_head)
            self._send(0)
        else:
            self._json(_UNARY)

    def _send(self, k: int) -> None:
        """One chunk per turn of the loop, so that each is a write of its own."""
        if self._transport is None or self._transport.is_closing():
            return
        if k == self._n:
            self._transport.write(self._end)
            return
        self._transport.write(self._pieces[k])
        asyncio.get_running_loop().call_soon(self._send, k + 1)

    def _json(self, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(
            _HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )


def _token(k: int) -> bytes:
    choice = {"index": 0, "text": f"w{k} ", "finish_reason": None}
    return (
        b"data: " + orjson.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}) + b"\n\n"
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


_USAGE = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
_CHOICE = {"index": 0, "text": "w", "finish_reason": "length"}
_UNARY = orjson.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [_CHOICE], "usage": _USAGE})
_PREFILLED = orjson.dumps(
    {
        **orjson.loads(_UNARY),
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "echo",
            "remote_block_ids": [[1]],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        },
    }
)


def content_length(head: bytes) -> int:
    """Length of the body that a head announces, 0 without one."""
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


@dataclass
class LoadResult:
    """What a load generator measured; times in seconds."""

    finished: int = 0
    failed: int = 0
    elapsed_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    """Time to the first byte of the body."""
    whole_s: list[float] = field(default_factory=list)

    @property
    def rps(self) -> float:
        """Finished requests per second."""
        return self.finished / self.elapsed_s if self.elapsed_s else 0.0

    def count(self, client: LoadClient, good: bool) -> None:
        """Take in a request that has just ended."""
        if good:
            self.finished += 1
            self.first_s.append(client.first_s - client.sent_s)
            self.whole_s.append(time.perf_counter() - client.sent_s)
        else:
            self.failed += 1


class LoadClient(asyncio.Protocol):
    """One connection that sends one request at a time."""

    def __init__(self, ended: Callable[[LoadClient, bool], None]) -> None:
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._chunked = False
        self._need = -1
        self._in_body = False
        self.sent_s = self.first_s = 0.0
        self._good = False
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        # uvloop's transports are no subclass of asyncio's
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closed."""
        self.open = False
        if self._need != -1 or self._in_body or self.sent_s:
            self._ended(self, False)

    def send(self, request: bytes) -> None:
        """Send one request."""
        assert self._transport is not None
        self._buffer.clear()
        self._in_body = False
        self.first_s = 0.0
        self.sent_s = time.perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection."""
        self.sent_s = 0.0
        self._need, self._in_body = -1, False
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Read until the answer is whole."""
        self._buffer += data
        if not self._in_body:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end])
            self._good = head.startswith(b"HTTP/1.1 200")
            self._chunked = b"chunked" in head.lower()
            self._need = 0 if self._chunked else content_length(head)
            del self._buffer[: end + 4]
            self._in_body = True
        if self._buffer and not self.first_s:
            self.first_s = time.perf_counter()
        whole = self._buffer.endswith(b"0\r\n\r\n") if self._chunked else len(self._buffer) >= self._need
        if whole:
            self._in_body, self._need, sent = False, -1, self.sent_s
            if not self.first_s:
                self.first_s = time.perf_counter()
            self._ended(self, self._good and bool(sent))


def request_bytes(path: str, body: bytes, host: str) -> bytes:
    """A POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def closed_load(
    port: int, request: bytes, clients: int, seconds: float, warm_s: float = 0.5
) -> LoadResult:
    """So many clients, each sending its next request when the last one is answered."""
    loop = asyncio.get_running_loop()
    result, done = LoadResult(), asyncio.Event()
    began = loop.time() + warm_s
    stop = began + seconds

    def ended(client: LoadClient, good: bool) -> None:
        now = loop.time()
        if now >= began:
            result.count(client, good)
        if now >= stop:
            done.set()
        elif client.open:
            client.send(request)

    connections = []
    for _ in range(clients):
        _, protocol = await loop.create_connection(lambda: LoadClient(ended), "127.0.0.1", port)
        connections.append(protocol)
        protocol.send(request)
    await done.wait()
    result.elapsed_s = loop.time() - began
    for protocol in connections:
        protocol.close()
    return result


async def wait_until(at_s: float) -> None:
    """Wait for a time of `time.perf_counter`, never less, and more exactly than by the timers of a loop.

    The last two milliseconds are spent in turns of the loop, so that its other work goes on.
    """
    if (pause_s := at_s - time.perf_counter() - _TIMER_S) > 0:
        await asyncio.sleep(pause_s)
    while time.perf_counter() < at_s:
        await asyncio.sleep(0)


async def open_load(
    port: int, request: bytes, rate_rps: float, seconds: float, warm_s: float = 0.5
) -> LoadResult:
    """Requests at even times whatever the answers take, over as many connections as that needs."""
    loop = asyncio.get_running_loop()
    result = LoadResult()
    idle: list[LoadClient] = []
    everything: list[LoadClient] = []
    open_now = 0
    start = time.perf_counter()
    began = start + warm_s

    def ended(client: LoadClient, good: bool) -> None:
        nonlocal open_now
        open_now -= 1
        if client.sent_s >= began:
            result.count(client, good)
        if client.open:
            idle.append(client)

    n = int((warm_s + seconds) * rate_rps)
    for k in range(n):
        await wait_until(start + k / rate_rps)
        if idle:
            client = idle.pop()
        else:
            _, client = await loop.create_connection(lambda: LoadClient(ended), "127.0.0.1", port)
            everything.append(client)
        open_now += 1
        client.send(request)
    end = loop.time() + 10.0
    while open_now and loop.time() < end:
        await asyncio.sleep(0.01)
    result.elapsed_s = seconds
    result.failed += open_now
    for client in everything:
        client.close()
    return result
