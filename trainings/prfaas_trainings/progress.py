"""A progress bar with the time left; plain lines now and then where the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Seconds between two plain lines.
LINE_EVERY_S = 10.0


class ProgressReport:
    """Progress of one piece of work on standard error.

    Args:
        what: what is counted.
        total: how much there is.
        clock: seconds (for tests).
    """

    def __init__(
        self,
        what: str,
        total: float,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._what, self._total, self._clock = what, total, clock
        self._start_s = self._line_s = clock()
        self._begun = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()

    def begin(self, done: float) -> None:
        """This much was done before; it says nothing about the time left."""
        self._begun = done

    def update(self, done: float, note: str = "") -> None:
        """Say how much is done; `note` stands behind the name."""
        text = f"{self._what}{f' ({note})' if note else ''}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
            return
        now_s = self._clock()
        if now_s - self._line_s < LINE_EVERY_S:
            return
        self._line_s = now_s
        elapsed_s = now_s - self._start_s
        gone = done - self._begun
        left = f"{elapsed_s * (self._total - done) / gone:,.0f} s left" if gone > 0 else "time left unknown"
        share = done / self._total if self._total else 1.0
        self._console.print(f"{text}: {share:.0%}, {elapsed_s:,.0f} s, {left}", markup=False, highlight=False)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of `total` things; call the given function once per thing done."""
    report = ProgressReport(what, total)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        report.update(done)

    try:
        yield advance
    finally:
        report.close()
