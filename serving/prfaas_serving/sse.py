"""Server-sent events of completions: whole events out of pieces of bytes, and what the first ones hold."""

from __future__ import annotations

from typing import Any

import orjson

_NEVER_CONTENT = frozenset({"role"})
#: Longest event that is waited for; a worker that sends more without an end is broken.
MAX_EVENT_BYTES = 64 * 2**20
DONE = b"data: [DONE]\n\n"


class EventTooLong(Exception):
    """An event longer than `MAX_EVENT_BYTES`."""


class Events:
    """Cuts a byte stream at the ends of events, so that only whole ones go on."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def whole(self, piece: bytes) -> bytes:
        """All whole events so far, as they came."""
        if self._rest:
            piece = self._rest + piece
        if piece.endswith((b"\n\n", b"\r\n\r\n")):
            self._rest = b""
            return piece
        lf, crlf = piece.rfind(b"\n\n"), piece.rfind(b"\r\n\r\n")
        end = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
        self._rest = piece[end:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        return piece[:end]

    @property
    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest


def split(block: bytes) -> list[bytes]:
    """The events of a block of whole events, each with its end."""
    mark = b"\r\n\r\n" if b"\r\n\r\n" in block else b"\n\n"
    return [part + mark for part in block.split(mark) if part.strip()]


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None for a comment (keep-alive) or an event without data."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def parse(data: bytes) -> dict[str, Any] | None:
    """The JSON object of an event's data, None if it is none."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def error_of(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The error that a chunk reports, if it does."""
    error = chunk.get("error")
    if error:
        return error if isinstance(error, dict) else {"message": str(error)}
    if chunk.get("object") == "error":
        return chunk
    return None


def has_content(chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries something generated: text of any channel, a tool call, an end, or usage.

    A first chunk that only names the role does not; nor does one with empty text.
    """
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return bool(chunk.get("usage")) or not isinstance(choices, list)
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("finish_reason") or choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(v for k, v in delta.items() if k not in _NEVER_CONTENT):
            return True
        if choice.get("token_ids"):
            return True
    return False


def event(chunk: dict[str, Any]) -> bytes:
    """A chunk as an event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
