"""Intervals against known answers, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from prfaas_trainings.statistics import BLOCK_S, FEWEST, Interval, block_interval, seed_interval


def test_normal_values_give_nearly_the_t_interval() -> None:
    # 60 values placed at the quantiles of a normal law: mean 5, no chance in the sample itself.
    values = 5.0 + 2.0 * stats.norm.ppf((np.arange(60) + 0.5) / 60)
    found = seed_interval(values)
    half = stats.t.ppf(0.975, 59) * values.std(ddof=1) / math.sqrt(60)
    assert found.mean == pytest.approx(5.0)
    assert found.n == 60
    assert found.low == pytest.approx(5.0 - half, abs=0.06 * half)
    assert found.high == pytest.approx(5.0 + half, abs=0.06 * half)
    assert found.sign == 1


@pytest.mark.parametrize(("law", "least"), [("normal", 0.92), ("exponential", 0.89)])
def test_coverage_of_ten_values(law: str, least: float) -> None:
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(400):
        values = rng.normal(1.0, 1.0, 10) if law == "normal" else rng.exponential(1.0, 10)
        found = seed_interval(values, resamples=600)
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 1.0 <= found.high
    # Over many trials 0.954 and 0.939 (plain percentiles: 0.902 and 0.864); 400 have a deviation of 0.011.
    assert least <= inside / 400 <= 0.985


def test_equal_values_have_no_spread() -> None:
    assert seed_interval(np.full(6, 0.3)) == Interval(
        pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3), 6, "seeds"
    )  # type: ignore[arg-type]
    zero = seed_interval(np.zeros(6))
    assert (zero.low, zero.high, zero.sign) == (0.0, 0.0, 0)


def test_nearly_all_values_equal() -> None:
    found = seed_interval(np.array([0.0] * 9 + [10.0]))
    assert found.low == 0.0
    assert found.high is not None
    assert 1.0 < found.high < 5.0
    assert found.sign == 0


def test_too_few_values_have_no_interval() -> None:
    found = seed_interval(np.arange(float(FEWEST - 1)))
    assert (found.mean, found.low, found.high, found.sign) == (1.5, None, None, 0)
    assert math.isnan(seed_interval(np.zeros(0)).mean)


def test_sign_needs_an_interval_without_zero() -> None:
    assert seed_interval(np.array([-3.0, -2.0, -2.5, -2.2, -3.1])).sign == -1
    assert seed_interval(np.array([-3.0, 2.0, -2.5, 2.2, 0.1])).sign == 0


def test_intervals_are_reproducible() -> None:
    values = np.random.default_rng(1).normal(size=12)
    assert seed_interval(values) == seed_interval(values)


# ------------------------------------------------------------------------------------------ moving blocks


def test_blocks_of_independent_requests_give_nearly_the_normal_interval() -> None:
    rng = np.random.default_rng(2)
    arrival_s = np.sort(rng.uniform(0.0, 3600.0, 7200))
    values = rng.normal(2.0, 1.0, 7200)
    found = block_interval(arrival_s, values, 3600.0)
    assert found.mean == pytest.approx(values.mean())
    assert found.n == 60
    assert found.low is not None
    assert found.high is not None
    half = 1.96 / math.sqrt(7200)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.25)


def test_blocks_see_that_bursts_move_together() -> None:
    rng = np.random.default_rng(3)
    arrival_s = np.sort(rng.uniform(0.0, 3600.0, 7200))
    burst = rng.normal(0.0, 1.0, 121)[(arrival_s / 30.0).astype(int)]
    found = block_interval(arrival_s, burst, 3600.0)
    assert found.low is not None
    assert found.high is not None
    as_if_independent = 2 * 1.96 * burst.std() / math.sqrt(7200)
    assert found.high - found.low > 4 * as_if_independent


def test_blocks_of_equal_values_have_no_spread() -> None:
    found = block_interval(np.arange(600.0), np.full(600, 1.25), 600.0)
    assert (found.mean, found.low, found.high) == (1.25, 1.25, 1.25)


def test_replays_of_one_trace_do_not_narrow_the_blocks() -> None:
    rng = np.random.default_rng(4)
    arrival_s = np.sort(rng.uniform(0.0, 1800.0, 3600))
    burst = rng.normal(0.0, 1.0, 61)[(arrival_s / 30.0).astype(int)]
    once = block_interval(arrival_s, burst, 1800.0)
    thrice = block_interval(np.tile(arrival_s, 3), np.tile(burst, 3), 1800.0)
    assert thrice.mean == pytest.approx(once.mean)
    assert thrice.low == pytest.approx(once.low)
    assert thrice.high == pytest.approx(once.high)


def test_a_short_trace_has_no_interval() -> None:
    span_s = float(BLOCK_S * FEWEST - 1)
    found = block_interval(np.arange(span_s), np.ones(int(span_s)), span_s)
    assert (found.mean, found.low, found.high) == (1.0, None, None)
    empty = block_interval(np.zeros(0), np.zeros(0), 600.0)
    assert math.isnan(empty.mean)
    assert empty.low is None


def test_stretches_without_arrivals_are_allowed() -> None:
    arrival_s = np.concatenate([np.arange(0.0, 100.0), np.arange(1500.0, 1600.0)])
    found = block_interval(arrival_s, np.ones(200), 1600.0)
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
