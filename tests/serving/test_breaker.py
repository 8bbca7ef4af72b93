"""Breakers, pairs and the retry budget, by hand and as laws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas_serving.breaker import Breaker, PairTable, RetryBudget, SharedBlame


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


def test_shared_blame_is_where_the_failures_meet() -> None:
    blame = SharedBlame(window_s=10.0)
    assert not blame.decode_at_fault("p1", "d1", 0.0), "nothing tells: the prefill worker"
    assert not blame.decode_at_fault("p1", "d1", 0.1), "the same pair again tells nothing"
    assert blame.decode_at_fault("p2", "d1", 0.2), "d1 has failed with two"
    assert blame.decode_at_fault("p1", "d1", 0.3)
    blame.worked("p3", "d1")
    assert not blame.decode_at_fault("p2", "d1", 0.4), "d1 has worked since"
    assert not blame.decode_at_fault("p2", "d2", 0.5), "p2 has failed with d1 and d2"
    assert not blame.decode_at_fault("p3", "d2", 20.0), "what was long ago does not count"


@given(st.sampled_from(["p", "d"]), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=80))
def test_shared_blame_finds_a_single_dead_worker(role: str, pairs: list[tuple[int, int]]) -> None:
    """A dead prefill worker at once; a dead decode worker once it has failed behind two, whatever worked between."""
    blame, dead = SharedBlame(), f"{role}0"
    partners: set[str] = set()
    for k, (p, d) in enumerate(pairs):
        prefill, decode = f"p{p}", f"d{d}"
        if dead not in (prefill, decode):
            blame.worked(prefill, decode)
            partners &= {dead}
            continue
        partners.add(decode if role == "p" else prefill)
        guilty = decode if blame.decode_at_fault(prefill, decode, k * 0.01) else prefill
        if role == "p" or len(partners) > 1:
            assert guilty == dead
