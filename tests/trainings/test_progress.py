"""Progress where the output is not a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from prfaas_trainings.progress import ProgressReport


def test_plain_lines_now_and_then_with_the_time_left() -> None:
    out = io.StringIO()
    now = [0.0]
    report = ProgressReport("episodes", 100, console=Console(file=out, width=120), clock=lambda: now[0])
    for done in range(1, 101):
        now[0] = done * 1.0
        report.update(done)
    report.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "episodes: 10%, 10 s, 90 s left"
    assert lines[-1] == "episodes: 100%, 100 s, 0 s left"


def test_notes_and_lines_between() -> None:
    out = io.StringIO()
    now = [0.0]
    report = ProgressReport("training", 10, console=Console(file=out, width=120), clock=lambda: now[0])
    report.say("[step 5] is not markup")
    now[0] = 20.0
    report.update(0, "step 0")
    assert out.getvalue().splitlines() == [
        "[step 5] is not markup",
        "training (step 0): 0%, 20 s, time left unknown",
    ]
