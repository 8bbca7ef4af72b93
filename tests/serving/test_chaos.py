"""Everything goes wrong at random: every request is answered once or fails properly, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.chaos import Outcome, chaos


def check(out: Outcome, n_requests: int) -> None:
    assert out.wrong == []
    assert sum(out.kinds.values()) == n_requests
    assert out.kinds["hung"] == out.kinds["broken connection"] == 0
    good = out.kinds["whole answer"] + out.kinds["whole stream"] + out.kinds["left"]
    assert good > 0.5 * n_requests, out.as_text()
    assert out.tasks_left == 0
    assert out.files_left == 0
    assert out.settle_s < 15.0


def test_a_little_chaos() -> None:
    check(asyncio.run(chaos(200, seed=3, concurrency=40)), 200)


@pytest.mark.slow
def test_chaos_of_two_thousand_requests() -> None:
    check(asyncio.run(chaos(2000, seed=7, concurrency=40)), 2000)
