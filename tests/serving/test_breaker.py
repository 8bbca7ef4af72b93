"""Breakers, pairs and the retry budget, by hand and as laws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas_serving.breaker import Breaker, PairTable, RetryBudget


def test_opens_after_failures_in_a_row_and_closes_by_a_trial() -> None:
    b = Breaker(failures=3, open_s=5.0, max_open_s=60.0)
    b.failure(0.0)
    b.failure(0.0)
    b.success()
    b.failure(1.0)
    b.failure(1.0)
    assert b.state(1.0) == "closed"
    b.failure(1.0)
    assert (b.state(5.9), b.allows(5.9)) == ("open", False)
    assert (b.state(6.0), b.allows(6.0)) == ("half_open", True)
    assert b.sent(6.0)
    assert not b.allows(6.0), "one trial at a time"
    assert not b.sent(6.0)
    b.success()
    assert (b.state(6.0), b.allows(6.0), b.opened) == ("closed", True, 1)


def test_a_failed_trial_doubles_the_pause_up_to_a_limit() -> None:
    b = Breaker(failures=1, open_s=5.0, max_open_s=12.0)
    b.failure(0.0)
    now = 5.0
    for pause in (10.0, 12.0, 12.0):
        assert b.sent(now)
        b.failure(now, trial=True)
        assert b.state(now + pause - 0.1) == "open"
        assert b.state(now + pause) == "half_open"
        now += pause
    assert b.sent(now)
    b.success()
    b.failure(now)
    assert b.state(now + 4.9) == "open"
    assert b.state(now + 5.0) == "half_open"


def test_late_failures_do_not_lengthen_the_pause_and_abandoned_trials_free_it() -> None:
    b = Breaker(failures=1, open_s=5.0, max_open_s=60.0)
    b.failure(0.0)
    b.failure(4.0)
    assert b.state(5.0) == "half_open"
    trial = b.sent(5.0)
    b.abandoned(trial)
    assert b.allows(5.0)


@given(st.lists(st.tuples(st.sampled_from(["failure", "success", "sent"]), st.floats(0, 3)), max_size=60))
def test_a_breaker_never_locks_for_ever(steps: list[tuple[str, float]]) -> None:
    b, now, trials = Breaker(2, 1.0, 8.0), 0.0, 0
    for what, wait in steps:
        now += wait
        if what == "failure":
            b.failure(now, trial=trials > 0)
            trials = max(trials - 1, 0)
        elif what == "success":
            b.success()
            trials = 0
        elif b.allows(now):
            trials += b.sent(now)
        assert trials <= 1
    b.abandoned(trials > 0)
    assert b.allows(now + 8.0)


def test_pairs() -> None:
    pairs = PairTable(failures=2, open_s=10.0)
    assert not pairs.failed("p", "d", 0.0)
    pairs.worked("p", "d")
    assert not pairs.failed("p", "d", 0.0)
    assert pairs.failed("p", "d", 1.0)
    assert pairs.apart("p", "d", 10.9)
    assert not pairs.apart("p", "d", 11.0)
    assert not pairs.apart("p", "other", 2.0)
    assert pairs.failed("p", "d", 20.0), "the next failure keeps them apart at once"
    pairs.forget("p")
    assert not pairs.apart("p", "d", 20.0)


@given(st.lists(st.booleans(), max_size=300))
def test_retries_are_at_most_their_share_and_the_reserve(retries: list[bool]) -> None:
    budget, given_ = RetryBudget(0.1, 5.0), 0
    for wanted in retries:
        budget.request()
        given_ += wanted and budget.take()
    assert given_ <= 5 + 0.1 * len(retries) + 1e-9
