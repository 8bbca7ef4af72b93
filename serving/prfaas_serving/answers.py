"""What workers answer: whole bodies and prefill legs read, errors told apart, refusals passed on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import ClientResponse
from multidict import CIMultiDict

from prfaas_serving import sse
from prfaas_serving.requests import (
    ClientError,
    parse_json,
    scrub,
)
from prfaas_serving.upstream import LegFailure, LegName, failure_of

#: Reasons of an end that is none: the engine gave the request up.
_ABORTED = frozenset({"abort", "error"})


@dataclass
class Answer:
    """An answer whose first content has come."""

    response: ClientResponse
    status: int
    headers: CIMultiDict[str]
    body: bytes | None
    """The whole body; None for a stream."""
    first: bytes = b""
    """Whole events of a stream so far."""
    events: sse.Events | None = None
    """None for an answer of another route, passed on as it comes."""
    parsed: dict[str, Any] | None = None
    """The object of a whole body."""


class PassedOn(ClientError):
    """A worker's 4xx answer: status, type and body go to the client as they are, without addresses."""

    def __init__(self, failure: LegFailure, addresses: list[str]) -> None:
        super().__init__(failure.status or 400, "refused by the worker", "upstream")
        self.content_type = failure.content_type or "application/json"
        text = failure.body.decode(errors="replace")
        self._raw = scrub(text, addresses).encode() if text else super().body()

    def body(self) -> bytes:
        """The worker's own."""
        return self._raw


class CutOff(Exception):
    """The client's connection must be closed: nothing that could be sent would be a proper end."""


async def read_to_end(response: ClientResponse) -> None:
    """Read the end of a body whose last event has come, so that the connection can serve again."""
    try:
        async with asyncio.timeout(1.0):
            while await response.content.readany():
                pass
        response.release()
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        response.close()


def whole_answer(response: ClientResponse, body: bytes) -> dict[str, Any] | None:
    """The object of a whole answer; None for another kind of body.

    Raises:
        LegFailure: it cannot be read, or reports an error in spite of its status.
    """
    if not response.headers.get("Content-Type", "").startswith("application/json"):
        return None
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise LegFailure("decode", "unreadable") from None
    if not isinstance(answer, dict):
        return None
    error = sse.error_of(answer)
    if error is not None and "choices" not in answer:
        raise stream_failure(error)
    return answer


def prefill_answer(raw: bytes, content_type: str) -> dict[str, Any]:
    """The object that a prefill leg answered; of a stream, its last chunk with usage.

    Raises:
        LegFailure: it is none, or it says that the engine gave up.
    """
    if content_type.startswith("text/event-stream"):
        answer: dict[str, Any] = {}
        for event in sse.split(raw):
            data = sse.data_of(event)
            chunk = None if data is None else sse.parse(data)
            if chunk is not None:
                error = sse.error_of(chunk)
                if error is not None:
                    raise stream_failure(error, "prefill")
                _refuse_aborted(chunk)
                if chunk.get("usage") or not answer:
                    answer = chunk
        return answer
    try:
        answer = parse_json(raw)
    except ClientError:
        raise LegFailure("prefill", "unreadable") from None
    error = sse.error_of(answer)
    if error is not None:
        raise stream_failure(error, "prefill")
    _refuse_aborted(answer)
    return answer


def _refuse_aborted(answer: dict[str, Any]) -> None:
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if isinstance(reason, dict):
            reason = reason.get("type")
        if reason in _ABORTED:
            raise LegFailure("prefill", "aborted")


def stream_failure(error: dict[str, Any], leg: LegName = "decode") -> LegFailure:
    """The failure that an error object in a 200 answer is."""
    code = error.get("code")
    status = code if type(code) is int and 400 <= code < 600 else 500
    failure = failure_of(leg, status, orjson.dumps({"error": error}), "application/json", None)
    return failure
