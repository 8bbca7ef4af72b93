"""Caches on their way from a prefill worker to a decode worker.

The decode worker connects to the prefill worker's KV port and sends an order; the prefill worker sends each part as
soon as it is computed, then an end, or an error; the decode worker says `done` once it holds a whole, checked cache,
which lets the staged one go, and is told how long after the end of the prefill that was.

| frame | from | header |
| --- | --- | --- |
| order | decode | engine_id, request_id, tokens, prompt, model, wait |
| part | prefill | layer, start, stop; its tensors as payload |
| end | prefill | parts, prefill_s |
| error | prefill | code, message |
| done | decode | - |
| receipt | prefill | tail_s |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prfaas_serving.workers.frames import FrameError, frame_head, read_frame
from prfaas_serving.workers.parts import Assembly, BrokenCache, ByteLaw, Part

#: How long an order may wait for a prefill leg that has not come yet.
_WAIT_S = 10.0
#: How long a receipt is waited for; it only tells a time.
_RECEIPT_S = 5.0
#: How long an accepted connection may take to say what it wants.
_ORDER_S = 10.0

Outcome = Literal["open", "done", "failed"]


class TransferFailed(Exception):
    """A cache could not be fetched, or is not the one that was asked for."""


@dataclass
class Transfer:
    """What is recorded of one transfer, on either side; times in seconds since `started_unix_s`, when it was ordered.

    `tail_s` is the time from the end of the prefill to the decode worker's word that it has everything; 0 if that came
    first. Both sides know it, by the prefill side's clock.
    """

    request_id: str
    side: Literal["sent", "fetched"]
    tokens: int
    started_unix_s: float = field(default_factory=time.time)
    parts: int = 0
    tensor_bytes: int = 0
    wire_bytes: int = 0
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    prefill_s: float | None = None
    prefill_end_s: float | None = None
    """On the prefill side only."""
    tail_s: float | None = None
    last_part_bytes: int = 0
    outcome: Outcome = "open"
    error: str | None = None
    _began_s: float = field(default_factory=time.monotonic)

    def since_s(self, at_s: float | None = None) -> float:
        """Seconds since it was ordered."""
        return (time.monotonic() if at_s is None else at_s) - self._began_s

    def as_json(self) -> dict[str, Any]:
        """For /transfers."""
        return {name: value for name, value in asdict(self).items() if name[0] != "_"}


@dataclass(eq=False)
class Staged:
    """A cache that is being computed for a decode worker, or waits for it.

    Args:
        request_id: its name.
        tokens: tokens it will hold.
        prompt: digest of these tokens.
        total_bytes: what its tensors will weigh.
    """

    request_id: str
    tokens: int
    prompt: str
    total_bytes: int
    parts: list[Part] = field(default_factory=list)
    began_s: float | None = None
    ended_s: float | None = None
    failed: str | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def begin(self) -> None:
        """Its prefill begins."""
        self.began_s = time.monotonic()
        self.begun.set()

    def add(self, part: Part) -> None:
        """A part has been computed."""
        self.parts.append(part)
        self._tell()

    def end(self) -> None:
        """Its prefill has ended."""
        self.ended_s = time.monotonic()
        self._tell()

    def fail(self, why: str) -> None:
        """Its prefill will not end."""
        self.failed = why
        self._tell()

    @property
    def prefill_s(self) -> float | None:
        """Time that the prefill took."""
        return None if self.ended_s is None or self.began_s is None else self.ended_s - self.began_s


class Store:
    """The staged caches of a prefill worker and the port they are fetched at.

    Args:
        engine_id: of this process.
        model: fingerprint of its model.
        lease_s: time from the end of a prefill for which a cache waits to be fetched.
        opened: told about every transfer as it begins.
        sent: told about every transfer that is over.
        expired: told about every cache whose lease ended.
    """

    def __init__(
        self,
        engine_id: str,
        model: str,
        lease_s: float,
        opened: Callable[[Transfer], None],
        sent: Callable[[Transfer], None],
        expired: Callable[[], None],
    ) -> None:
        self.staged: dict[str, Staged] = {}
        self.port = 0
        self._engine_id = engine_id
        self._model = model
        self._lease_s = lease_s
        self._opened = opened
        self._sent = sent
        self._expired = expired
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()

    async def start(self, host: str, port: int) -> None:
        """Open the port. OSError: it is taken."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._reaper = asyncio.create_task(self._reap())

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._server.close()
        tasks = [t for t in (self._reaper, *self._tasks) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def total_bytes(self) -> int:
        """Bytes of all staged caches, with what is still to be computed."""
        return sum(staged.total_bytes for staged in self.staged.values())

    def stage(self, staged: Staged) -> None:
        """Take a cache in, before it is computed."""
        self.staged[staged.request_id] = staged
        self._arrived.set()
        self._arrived = asyncio.Event()

    def drop(self, staged: Staged) -> None:
        """Let a cache go."""
        if self.staged.get(staged.request_id) is staged:
            del self.staged[staged.request_id]

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(self._lease_s / 10, 0.5))
            limit_s = time.monotonic() - self._lease_s
            for staged in list(self.staged.values()):
                if staged.ended_s is not None and staged.ended_s < limit_s:
                    self.drop(staged)
                    staged.fail("its lease has ended")
                    self._expired()

    # ------------------------------------------------------------------ sending

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(_ORDER_S):
                order, _ = await read_frame(reader)
            await self._answer(order, reader, writer)
        except (FrameError, OSError, TimeoutError):
            pass  # the other side has gone, or is none of ours
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _answer(
        self, order: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            staged = await self._find(order)
        except TransferFailed as refusal:
            code, _, message = str(refusal).partition(": ")
            await _refuse(writer, code, message)
            return
        transfer = Transfer(staged.request_id, "sent", staged.tokens)
        self._opened(transfer)
        # what comes from the other side: `done`, or the end of the connection
        word = asyncio.ensure_future(read_frame(reader))
        sending = asyncio.ensure_future(self._send(staged, transfer, writer))
        try:
            await asyncio.wait({word, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise FrameError("the decode worker left before it had everything")
            sending.result()
            header, _ = await word
            if header.get("kind") != "done":
                raise FrameError(f"expected done, found {header.get('kind')!r}")
            self._done(staged, transfer)
            writer.write(frame_head({"kind": "receipt", "tail_s": transfer.tail_s}))
            await writer.drain()
        except (FrameError, OSError, TransferFailed) as error:
            if transfer.outcome == "open":
                transfer.outcome, transfer.error = "failed", str(error)
        finally:
            word.cancel()
            sending.cancel()
            await asyncio.wait({word, sending})
            for future in (word, sending):
                if not future.cancelled():
                    future.exception()
            if transfer.outcome == "open":
                transfer.outcome, transfer.error = "failed", "closed"
            self._sent(transfer)

    def _done(self, staged: Staged, transfer: Transfer) -> None:
        """The other side has the whole cache."""
        assert staged.ended_s is not None
        transfer.tail_s = max(time.monotonic() - staged.ended_s, 0.0)
        transfer.prefill_s = staged.prefill_s
        transfer.prefill_end_s = transfer.since_s(staged.ended_s)
        transfer.outcome = "done"
        self.drop(staged)

    async def _find(self, order: dict[str, Any]) -> Staged:
        """The cache that is ordered.

        Raises:
            TransferFailed: `code: message`.
        """
        if order.get("kind") != "order":
            raise TransferFailed(f"bad_order: expected an order, found {order.get('kind')!r}")
        if order.get("engine_id") != self._engine_id:
            raise TransferFailed(
                "foreign_handle: this handle is of another worker, or of one that has restarted"
            )
        if order.get("model") != self._model:
            raise TransferFailed("foreign_model: the decode worker has another model")
        name = str(order.get("request_id"))
        end_s = time.monotonic() + _WAIT_S
        while name not in self.staged and order.get("wait") and time.monotonic() < end_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end_s - time.monotonic()):
                    await self._arrived.wait()
        staged = self.staged.get(name)
        if staged is None:
            raise TransferFailed(
                "unknown_request: no such cache; it was fetched, its lease ended, or it never was"
            )
        if order.get("tokens") != staged.tokens:
            raise TransferFailed(
                f"wrong_length: the cache holds {staged.tokens} tokens, {order.get('tokens')} are asked for"
            )
        if order.get("prompt") != staged.prompt:
            raise TransferFailed("other_prompt: the cache is of another prompt")
        return staged

    async def _send(self, staged: Staged, transfer: Transfer, writer: asyncio.StreamWriter) -> None:
        while True:
            changed = staged.changed
            while transfer.parts < len(staged.parts):
                await _send_part(staged.parts[transfer.parts], transfer, writer)
            if staged.failed is not None:
                await _refuse(writer, "prefill_failed", staged.failed)
                raise TransferFailed(staged.failed)
            if staged.ended_s is not None and transfer.parts == len(staged.parts):
                break
            await changed.wait()
        writer.write(frame_head({"kind": "end", "parts": transfer.parts, "prefill_s": staged.prefill_s}))
        await writer.drain()


async def _send_part(part: Part, transfer: Transfer, writer: asyncio.StreamWriter) -> None:
    head = frame_head(
        {"kind": "part", "layer": part.layer, "start": part.start, "stop": part.stop}, len(part.data)
    )
    if transfer.first_byte_s is None:
        transfer.first_byte_s = transfer.since_s()
    writer.write(head)
    writer.write(part.data)
    await writer.drain()
    transfer.parts += 1
    transfer.tensor_bytes += part.tensor_bytes
    transfer.wire_bytes += len(head) + len(part.data)
    transfer.last_part_bytes = part.tensor_bytes
    transfer.last_byte_s = transfer.since_s()


async def _refuse(writer: asyncio.StreamWriter, code: str, message: str) -> None:
    writer.write(frame_head({"kind": "error", "code": code, "message": message}))
    await writer.drain()


# ---------------------------------------------------------------------------------------- fetching


@dataclass(frozen=True)
class Order:
    """What a decode worker asks for."""

    host: str
    port: int
    engine_id: str
    request_id: str
    tokens: int
    prompt: str
    model: str
    wait: bool = False

    def frame(self) -> bytes:
        """On the wire."""
        fields = {k: v for k, v in asdict(self).items() if k not in {"host", "port"}}
        return frame_head({"kind": "order", **fields})


class Fetcher:
    """The decode side of transfers.

    Args:
        law: of the model.
        connect_s: longest time to reach a prefill worker.
        idle_s: longest time without anything from it.
    """

    def __init__(self, law: ByteLaw, connect_s: float, idle_s: float) -> None:
        self._law = law
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._receipts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for no more receipts."""
        for task in self._receipts:
            task.cancel()
        if self._receipts:
            await asyncio.wait(self._receipts)

    async def fetch(self, order: Order, transfer: Transfer) -> list[Part]:
        """Fetch a cache.

        Args:
            order: what and where.
            transfer: filled as it goes; its `tail_s` comes with the receipt, a little later.

        Raises:
            TransferFailed: nothing of it may be used. The staged cache stays where it is.
        """
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(order.host, order.port)
        except (OSError, TimeoutError) as error:
            raise self._failed(
                transfer, f"the prefill worker cannot be reached: {error or 'no answer'}"
            ) from None
        try:
            writer.write(order.frame())
            parts = await self._read(reader, Assembly(self._law, order.tokens), transfer)
            writer.write(frame_head({"kind": "done"}))
            await writer.drain()
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, FrameError | BrokenCache | OSError):
                raise self._failed(transfer, str(error)) from None
            if isinstance(error, TimeoutError):
                raise self._failed(transfer, f"nothing came for {self._idle_s:g} s") from None
            if transfer.outcome == "open":
                transfer.outcome, transfer.error = "failed", "given up"
            raise
        transfer.outcome = "done"
        task = asyncio.create_task(self._receipt(reader, writer, transfer))
        self._receipts.add(task)
        task.add_done_callback(self._receipts.discard)
        return parts

    def _failed(self, transfer: Transfer, why: str) -> TransferFailed:
        transfer.outcome, transfer.error = "failed", why
        return TransferFailed(why)

    async def _read(self, reader: asyncio.StreamReader, assembly: Assembly, transfer: Transfer) -> list[Part]:
        while True:
            async with asyncio.timeout(self._idle_s):
                header, payload = await read_frame(reader)
            kind = header.get("kind")
            if kind == "error":
                raise self._failed(transfer, f"{header.get('code')}: {header.get('message')}")
            if kind == "end":
                if header.get("parts") != transfer.parts:
                    raise BrokenCache(f"{transfer.parts} parts came, {header.get('parts')} were sent")
                prefill_s = header.get("prefill_s")
                transfer.prefill_s = prefill_s if isinstance(prefill_s, float) else None
                return assembly.finish()
            place = [header.get(name) for name in ("layer", "start", "stop")]
            if kind != "part" or not all(type(value) is int for value in place):
                raise BrokenCache(f"an unknown frame {kind!r}")
            layer, start, stop = place
            assembly.add(layer, start, stop, payload)  # type: ignore[arg-type]
            last_s = transfer.since_s()
            transfer.first_byte_s = last_s if transfer.first_byte_s is None else transfer.first_byte_s
            transfer.last_byte_s = last_s
            transfer.parts += 1
            transfer.wire_bytes += len(frame_head(header, len(payload))) + len(payload)
            transfer.last_part_bytes = assembly.parts[-1].tensor_bytes
            transfer.tensor_bytes += transfer.last_part_bytes

    async def _receipt(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, transfer: Transfer
    ) -> None:
        try:
            async with asyncio.timeout(_RECEIPT_S):
                header, _ = await read_frame(reader)
            tail_s = header.get("tail_s")
            transfer.tail_s = tail_s if isinstance(tail_s, float) else None
        except (FrameError, TimeoutError):
            pass
        finally:
            writer.close()


class Transfers:
    """The last transfers of a worker, those under way too, newest last."""

    def __init__(self, kept: int = 1000) -> None:
        self._past: deque[Transfer] = deque(maxlen=kept)

    def add(self, transfer: Transfer) -> None:
        """Remember one."""
        self._past.append(transfer)

    def as_json(self) -> list[dict[str, Any]]:
        """For /transfers."""
        return [transfer.as_json() for transfer in self._past]
