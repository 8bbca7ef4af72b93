"""Intervals against known answers, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from prfaas_env.intervals import BLOCK_S, FEWEST, Interval, block_interval
from prfaas_trainings.episodes import TTFT_EDGES_S
from prfaas_trainings.statistics import (
    histogram_quantile,
    quantile_ratio_interval,
    ratio_interval,
    seed_interval,
)


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


def test_a_ratio_by_hand() -> None:
    below = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
    found = ratio_interval(0.25 * below, below)  # the same share on every seed: pairing leaves no spread
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert found.n == 5
    # the ratio of means, not the mean of ratios: (4 + 0) / (4 + 16) and not (1 + 0) / 2
    assert ratio_interval(np.array([4.0, 0.0]), np.array([4.0, 16.0])).mean == pytest.approx(0.2)
    assert ratio_interval(np.array([4.0, 0.0]), np.array([4.0, 16.0])).low is None
    assert math.isnan(ratio_interval(np.ones(6), np.zeros(6)).mean)


def test_a_ratio_of_many_values_is_near_the_delta_method() -> None:
    rng = np.random.default_rng(3)
    below = rng.normal(10.0, 2.0, 200)
    above = 0.5 * below + rng.normal(0.0, 1.0, 200)
    found = ratio_interval(above, below)
    r = above.mean() / below.mean()
    half = 1.96 * (above - r * below).std(ddof=1) / math.sqrt(200) / below.mean()
    assert found.mean == pytest.approx(r)
    assert found.low == pytest.approx(r - half, abs=0.1 * half)
    assert found.high == pytest.approx(r + half, abs=0.1 * half)


def test_a_ratio_to_nearly_nothing_has_no_limits() -> None:
    below = np.array([5.0, -4.0, 4.0, -5.0, 0.5, 0.5])
    found = ratio_interval(np.ones(6), below)
    assert found.mean == pytest.approx(6.0)
    assert (found.low, found.high) == (None, None)


def test_quantiles_of_counts_by_hand() -> None:
    edges = np.array([0.0, 1.0, 2.0, 4.0, math.inf])
    # 10 values: the ninth tenth ends exactly with the second bin's last, half of it is inside the first one
    assert histogram_quantile(np.array([5.0, 4.0, 1.0, 0.0]), edges, 0.9) == pytest.approx(2.0)
    assert histogram_quantile(np.array([5.0, 4.0, 1.0, 0.0]), edges, 0.95) == pytest.approx(3.0)
    assert histogram_quantile(np.array([5.0, 4.0, 1.0, 0.0]), edges, 0.25) == pytest.approx(0.5)
    assert histogram_quantile(np.array([0.0, 0.0, 0.0, 7.0]), edges, 0.5) == pytest.approx(4.0)
    both = histogram_quantile(np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]), edges, 0.5)
    assert math.isnan(both[0])
    assert both[1] == pytest.approx(1.5)


def test_quantiles_of_counts_are_those_of_the_values() -> None:
    values = np.random.default_rng(0).lognormal(1.0, 1.2, 20_000)
    counts = np.histogram(values, TTFT_EDGES_S)[0].astype(np.float64)
    for q in (0.5, 0.9, 0.99):
        assert histogram_quantile(counts, TTFT_EDGES_S, q) == pytest.approx(np.quantile(values, q), rel=5e-3)


def test_the_ratio_of_pooled_quantiles_joins_requests_before_the_quantile() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    below = np.tile([0.0, 0.0, 0.0, 10.0], (6, 1))
    found = quantile_ratio_interval(np.tile([10.0, 0.0, 0.0, 0.0], (6, 1)), below, edges, 0.9)
    assert (found.mean, found.low, found.high) == pytest.approx((0.9 / 3.9, 0.9 / 3.9, 0.9 / 3.9))
    # one heavy seed of six moves the pooled P90 into its bin; the mean of the seeds' own P90 would not say so
    above = np.tile([10.0, 0.0, 0.0, 0.0], (6, 1))
    above[5] = [0.0, 0.0, 0.0, 90.0]
    found = quantile_ratio_interval(above, below, edges, 0.9)
    pooled = histogram_quantile(above.sum(axis=0), edges, 0.9)
    assert found.mean == pytest.approx(float(pooled) / 3.9)
    assert found.low is not None
    assert found.low == pytest.approx(
        0.9 / 3.9
    )  # the share of resamples without that seed is (5/6)^6, a third
    assert quantile_ratio_interval(above[:4], below[:4], edges, 0.9).low is None


def test_the_pooled_bootstrap_is_the_one_written_out() -> None:
    rng = np.random.default_rng(1)
    above, below = rng.integers(0, 20, (7, 5)), rng.integers(0, 20, (7, 5))
    edges = np.arange(6.0)
    found = quantile_ratio_interval(above.astype(float), below.astype(float), edges, 0.5, resamples=300)
    drawn = np.random.default_rng(7).integers(7, size=(300, 7))
    each = [
        float(histogram_quantile(above[d].sum(axis=0).astype(float), edges, 0.5))
        / float(histogram_quantile(below[d].sum(axis=0).astype(float), edges, 0.5))
        for d in drawn
    ]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(each, [0.025, 0.975])))
