"""A shaped link: a TCP relay whose connections share one rate, fairly, and that can be cut or changed."""

from __future__ import annotations

import asyncio
import contextlib

#: Bytes granted at once. Small, so that connections take turns.
_CHUNK = 4096
#: Grants may run ahead of the clock by this much, since timers are coarse.
_AHEAD_S = 0.002


class ShapedLink:
    """Carries bytes from remote prefill workers to the decode side at `bytes_per_s` in all.

    Args:
        bytes_per_s: rate of the link in real bytes and seconds; 0 = cut.
        latency_s: added once per connection.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._rate = bytes_per_s
        self._latency_s = latency_s
        self._next_s = 0.0
        self._up = asyncio.Event()
        if bytes_per_s > 0:
            self._up.set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.carried_bytes = 0
        self.open_connections = 0

    def set_rate(self, bytes_per_s: float) -> None:
        """Another rate from now on; 0 cuts the link: what is under way waits."""
        self._rate = bytes_per_s
        if bytes_per_s > 0:
            self._next_s = 0.0
            self._up.set()
        else:
            self._up.clear()

    async def listen(self, host: str, port: int) -> int:
        """Relay one port to `host:port`; gives the port to connect to instead."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._relay(reader, writer, host, port)
            finally:
                self._tasks.discard(task)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close all relays and their connections."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _relay(
        self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        self.open_connections += 1
        far_out: asyncio.StreamWriter | None = None
        pumps: list[asyncio.Task[None]] = []
        try:
            if self._latency_s > 0:
                await asyncio.sleep(self._latency_s)
            await self._up.wait()
            far, far_out = await asyncio.open_connection(host, port)
            pumps = [
                asyncio.create_task(self._pump(near, far_out, shaped=False)),
                asyncio.create_task(self._pump(far, near_out, shaped=True)),
            ]
            # whoever ends first ends both: a half-open relay would hide that one side is gone
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.open_connections -= 1
            for pump in pumps:
                pump.cancel()
            for out in (near_out, far_out):
                if out is not None:
                    with contextlib.suppress(OSError, RuntimeError):
                        out.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, shaped: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(_CHUNK):
                if shaped:
                    await self._grant(len(piece))
                sink.write(piece)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()

    async def _grant(self, n_bytes: int) -> None:
        """Wait until the link has carried so many bytes for this connection; turns go round."""
        await self._up.wait()
        now = asyncio.get_running_loop().time()
        self._next_s = max(self._next_s, now) + n_bytes / self._rate
        wait_s = self._next_s - now
        if wait_s > _AHEAD_S:
            await asyncio.sleep(wait_s)
            await self._up.wait()
        self.carried_bytes += n_bytes
