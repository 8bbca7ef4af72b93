"""The relay of an answer to the client: whole bodies, streams event by event, and what is said where one breaks off."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import aiohttp
import orjson
from multidict import CIMultiDict

from prfaas_serving import sse
from prfaas_serving.answers import Answer, CutOff
from prfaas_serving.forward import Forwarder
from prfaas_serving.legs import LegRunner
from prfaas_serving.requests import error_body, merge_usage, scrub


class Sink(Protocol):
    """Where an answer goes."""

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Status and headers."""

    async def write(self, data: bytes) -> None:
        """A piece of the body."""


class Relay:
    """Passes the body of one answer on.

    Args:
        shared: what all requests share.
        legs: of the request; they know the cached tokens and who answers.
    """

    def __init__(self, shared: Forwarder, legs: LegRunner) -> None:
        self._f = shared
        self._legs = legs
        self.usage: dict[str, Any] | None = None
        """As the worker gave it."""
        self.events = 0
        """Events of a stream."""
        self.failed: str | None = None
        """Why a stream broke off."""

    async def pass_on(self, answer: Answer, sink: Sink) -> bool:
        """Send a body to the client as it comes; gives whether all of it went out.

        Raises:
            CutOff: nothing that could still be sent would be a proper end.
        """
        if answer.body is not None:
            await sink.write(self._edited(answer))
            return True
        if answer.events is None:
            return await self._raw(answer, sink)
        return await self._stream(answer, sink)

    def _edited(self, answer: Answer) -> bytes:
        """A whole answer for the client: hand-over fields removed, cached tokens put in."""
        assert answer.body is not None
        parsed = answer.parsed
        if parsed is None:
            return answer.body
        usage = parsed.get("usage")
        self.usage = usage if isinstance(usage, dict) else None
        changed = parsed.get("kv_transfer_params") is not None
        if changed:
            parsed["kv_transfer_params"] = None
        changed |= merge_usage(usage, self._legs.cached_tokens)
        return orjson.dumps(parsed) if changed else answer.body

    async def _raw(self, answer: Answer, sink: Sink) -> bool:
        """Pass the body of another route on as it comes; one that breaks off is cut off."""
        idle_s = self._f.config.deadlines.idle_s
        try:
            while True:
                async with asyncio.timeout(idle_s):
                    piece = await answer.response.content.readany()
                    if not piece:
                        break
                    await sink.write(piece)
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            raise CutOff from None
        return True

    async def _stream(self, answer: Answer, sink: Sink) -> bool:
        """Pass events on; a stream that breaks off ends with an error event and without an end marker."""
        f, loop = self._f, asyncio.get_running_loop()
        limits, idle_s = f.config.limits, f.config.deadlines.idle_s
        readany, events = answer.response.content.readany, answer.events
        assert events is not None
        done = writing = False
        problem: str | None = None
        start = loop.time()
        total = start + max(f.config.deadlines.total_s - (time.monotonic() - self._legs.trip.started_s), 0.0)
        renewed = start
        try:
            async with asyncio.timeout_at(min(start + idle_s, total)) as clock:
                block = answer.first
                while True:
                    if block:
                        block, done, problem = self._edit(block)
                        self.events += block.count(b"\n\n")
                        writing = True
                        now = loop.time()
                        if now - renewed > 0.25 * min(idle_s, limits.client_stall_s):
                            renewed = now
                            clock.reschedule(min(now + idle_s, total))
                        await sink.write(block)
                        writing = False
                    if done or problem is not None:
                        break
                    piece = await readany()
                    if not piece:
                        break
                    block = events.whole(piece)
        except TimeoutError:
            if writing:
                self.failed = "client_stall"
                raise CutOff from None
            f.metrics.deadlines.labels("stream").inc()
            problem = "timeout"
        except (aiohttp.ClientError, ConnectionError, sse.EventTooLong):
            problem = "broken"
        if problem is None and not done:
            problem = "broken"
        if problem is not None:
            await self._stream_broke(sink, problem)
        return problem is None

    async def _stream_broke(self, sink: Sink, problem: str) -> None:
        f = self._f
        self.failed = problem
        f.metrics.stream_errors.labels(problem).inc()
        if problem != "upstream_error":
            if self._legs.decode is not None:
                self._legs.decode.worker.failed(self._legs.decode, time.monotonic())
                f.metrics.worker_failures.labels(self._legs.decode.worker.name, problem).inc()
            text = "the answer took too long" if problem == "timeout" else "the worker stopped in the middle"
            await sink.write(b"data: " + error_body(text, "server_error", f"stream_{problem}") + b"\n\n")

    def _edit(self, block: bytes) -> tuple[bytes, bool, str | None]:
        """(whole events for the client, whether the end marker is among them, what went wrong in them)."""
        done = block.rstrip().endswith(b"data: [DONE]")
        if b'"usage"' not in block and b'"error"' not in block and b'"kv_transfer_params"' not in block:
            return block, done, None
        kept: list[bytes] = []
        for event in sse.split(block):
            data = sse.data_of(event)
            chunk = None if data is None else sse.parse(data)
            if chunk is None:
                kept.append(event)
                continue
            if sse.error_of(chunk) is not None:
                kept.append(b"data: " + scrub(data.decode(), self._f.addresses()).encode() + b"\n\n")  # type: ignore[union-attr]
                return b"".join(kept), False, "upstream_error"
            usage = chunk.get("usage")
            if isinstance(usage, dict):
                self.usage = usage
                self._legs.late_prefill_answer()
            changed = merge_usage(usage, self._legs.cached_tokens)
            if chunk.get("kv_transfer_params") is not None:
                chunk["kv_transfer_params"] = None
                changed = True
            kept.append(sse.event(chunk) if changed else event)
        return b"".join(kept), done, None
