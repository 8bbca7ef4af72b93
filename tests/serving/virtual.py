"""An event loop whose time is virtual: it jumps to the next timer when nothing is left to do.

Sockets are real. On loopback what one end has sent is there for the other at once, so that "nothing is readable" means
that everybody waits for a timer. A run takes the time of its work, however slow the machine, and gives the same times.
Everything must live in one process; work for threads is done in place.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

#: Real time to wait for sockets before the clock jumps.
_GRACE_S = 0.0005
#: Real time without any timer after which nothing will ever happen.
_STUCK_S = 5.0


class VirtualSelector(selectors.DefaultSelector):
    """A selector that moves a clock instead of waiting."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        """Ready sockets; if none, the clock has moved by `timeout`."""
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        ready = super().select(_GRACE_S)
        if ready:
            return ready
        if timeout is None:
            ready = super().select(_STUCK_S)
            assert ready, "no timer and no socket: nothing will ever happen"
            return ready
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop."""

    def __init__(self) -> None:
        self.clock = VirtualSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        """Virtual seconds."""
        return self.clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Done at once: a thread would take no virtual time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine with `time.monotonic` and the loop's clock virtual."""
    loops: list[VirtualLoop] = []

    def factory() -> asyncio.AbstractEventLoop:
        loops.append(VirtualLoop())
        return loops[0]

    def monotonic() -> float:
        return loops[0].clock.now_s if loops else 1000.0

    with mock.patch.object(time, "monotonic", monotonic), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
