"""Length-framed messages on a TCP connection: a small JSON header, then bytes.

A frame is the length of its header (4 bytes, big-endian), the header (a JSON object), and as many bytes of payload as
the header's `payload_bytes` says. Nothing that runs code when it is read ever crosses.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import orjson

_LENGTH = struct.Struct(">I")
MAX_HEADER_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 31


class FrameError(Exception):
    """What came is not a frame, or it broke off."""


def frame_head(header: dict[str, Any], payload_bytes: int = 0) -> bytes:
    """Length and header of a frame; the payload follows them."""
    content = orjson.dumps({**header, "payload_bytes": payload_bytes})
    return _LENGTH.pack(len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """(header, payload) of the next frame.

    Raises:
        FrameError: the connection ended, within a frame or before one, or this is not one.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_HEADER_BYTES:
            raise FrameError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        header = orjson.loads(await reader.readexactly(length))
        n_bytes = header.get("payload_bytes") if isinstance(header, dict) else None
        if type(n_bytes) is not int or not 0 <= n_bytes <= MAX_PAYLOAD_BYTES:
            raise FrameError("a header without a valid payload_bytes")
        return header, await reader.readexactly(n_bytes)
    except asyncio.IncompleteReadError:
        raise FrameError("the connection ended within a frame or before one") from None
    except orjson.JSONDecodeError:
        raise FrameError("a header that is not JSON") from None
    except OSError as error:
        raise FrameError(f"the connection broke: {error}") from None
