import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError, stream
from prfaas_env.workload.arrivals import RATE_CHAIN_STREAM, sample_arrivals_ns
from prfaas_env.workload.models import (
    DeterministicArrivals,
    GammaArrivals,
    PoissonArrivals,
    RegimeArrivals,
    RegimeChain,
)
from prfaas_env.workload.regimes import sample_chain, value_at

CHAIN = RegimeChain(values=(0.0, 2.0, 8.0), probabilities=(0.3, 0.4, 0.3), mean_holding_s=50.0)
ALL = [
    PoissonArrivals(rate_rps=2.5),
    GammaArrivals(rate_rps=2.5, shape=0.25),
    DeterministicArrivals(rate_rps=2.5),
    RegimeArrivals(rate_rps=CHAIN),
]
KINDS = [a.kind for a in ALL]
SHAPE = {GammaArrivals: {"shape": 0.5}}


@pytest.mark.parametrize("arrivals", ALL, ids=KINDS)
def test_sorted_whole_nanoseconds_inside_the_horizon(arrivals):
    ns = sample_arrivals_ns(arrivals, 7, horizon_s=400.0)
    assert ns.dtype == np.int64
    assert len(ns) > 100
    assert np.all(np.diff(ns) >= 0)
    assert ns[0] >= 0
    assert ns[-1] < 400_000_000_000


@pytest.mark.parametrize("arrivals", ALL, ids=KINDS)
def test_a_count_and_a_longer_horizon_give_the_same_first_requests(arrivals):
    short = sample_arrivals_ns(arrivals, 11, horizon_s=300.0)
    long = sample_arrivals_ns(arrivals, 11, horizon_s=20_000.0)
    counted = sample_arrivals_ns(arrivals, 11, n_requests=len(long))
    assert np.array_equal(long[: len(short)], short)
    assert np.all(long[len(short) :] >= 300_000_000_000)
    assert np.array_equal(counted, long)


@pytest.mark.parametrize("arrivals", ALL, ids=KINDS)
def test_the_seed_decides(arrivals):
    one = sample_arrivals_ns(arrivals, 1, horizon_s=200.0)
    assert np.array_equal(one, sample_arrivals_ns(arrivals, 1, horizon_s=200.0))
    if arrivals.kind != "deterministic":
        assert not np.array_equal(one, sample_arrivals_ns(arrivals, 2, horizon_s=200.0))


@pytest.mark.parametrize("arrivals", ALL, ids=KINDS)
def test_mean_rate(arrivals):
    expected = arrivals.rate_rps.mean if arrivals.kind == "regimes" else arrivals.rate_rps
    total = sum(len(sample_arrivals_ns(arrivals, seed, horizon_s=20_000.0)) for seed in range(10))
    assert total / 200_000 == pytest.approx(expected, rel=0.03)


def _waits_p90(ns, service_s):
    """P90 wait of a first-come first-served queue with constant service (Lindley's recursion)."""
    waits, wait = [], 0.0
    for gap_s in np.diff(ns) / 1e9:
        wait = max(wait + service_s - gap_s, 0.0)
        waits.append(wait)
    return np.percentile(waits, 90)


def test_burstiness_of_gamma_arrivals():
    # Squared coefficient of variation is 1 / shape: 1 at shape 1, CV 2 at shape 0.25. Same mean rate.
    cv, rate, wait = {}, {}, {}
    for shape in (1.0, 0.25):
        runs = [
            sample_arrivals_ns(GammaArrivals(rate_rps=2.5, shape=shape), s, n_requests=20_000)
            for s in range(20)
        ]
        gaps = np.concatenate([np.diff(ns, prepend=0) for ns in runs])
        cv[shape] = gaps.std() / gaps.mean()
        rate[shape] = 1e9 / gaps.mean()
        wait[shape] = np.mean([_waits_p90(ns[:3_000], 0.3) for ns in runs])
    assert cv[1.0] == pytest.approx(1.0, abs=0.02)
    assert cv[0.25] == pytest.approx(2.0, abs=0.04)
    assert rate[1.0] == pytest.approx(2.5, rel=0.02)
    assert rate[0.25] == pytest.approx(2.5, rel=0.02)
    assert wait[0.25] > 1.5 * wait[1.0]


def test_gamma_of_shape_one_is_poisson():
    gamma = sample_arrivals_ns(GammaArrivals(rate_rps=2.5, shape=1.0), 5, horizon_s=1_000.0)
    assert np.array_equal(gamma, sample_arrivals_ns(PoissonArrivals(rate_rps=2.5), 5, horizon_s=1_000.0))


def test_poisson_counts_have_the_variance_of_their_mean():
    ns = sample_arrivals_ns(PoissonArrivals(rate_rps=4.0), 3, horizon_s=100_000.0)
    counts = np.bincount(ns // 10_000_000_000, minlength=10_000)
    assert counts.mean() == pytest.approx(40.0, rel=0.01)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.06)


def test_even_spacing_starts_one_gap_after_zero():
    ns = sample_arrivals_ns(DeterministicArrivals(rate_rps=4.0), 0, horizon_s=1.0)
    assert ns.tolist() == [250_000_000, 500_000_000, 750_000_000]
    # The horizon is open: the arrival at 1.0 s is not in [0, 1).
    assert sample_arrivals_ns(DeterministicArrivals(rate_rps=3.0), 0, n_requests=3).tolist() == [
        333_333_333,
        666_666_667,
        1_000_000_000,
    ]


def test_another_rate_moves_the_same_requests():
    slow = sample_arrivals_ns(PoissonArrivals(rate_rps=1.0), 9, n_requests=500)
    fast = sample_arrivals_ns(PoissonArrivals(rate_rps=4.0), 9, n_requests=500)
    assert np.allclose(slow / 4.0, fast, atol=1.0)


def test_regime_arrivals_are_poisson_at_the_rate_of_the_moment():
    horizon_s = 100_000.0
    ns = sample_arrivals_ns(RegimeArrivals(rate_rps=CHAIN), 21, horizon_s=horizon_s)
    start_s, rates = sample_chain(CHAIN, horizon_s, stream(21, "arrivals", RATE_CHAIN_STREAM))
    spans_s = np.diff(np.append(start_s, horizon_s))
    rate_then = value_at(start_s, rates, ns / 1e9)
    for rate in CHAIN.values:
        spent_s = spans_s[rates == rate].sum()
        assert (rate_then == rate).sum() == pytest.approx(rate * spent_s, rel=0.02)
    # Counts per regime stretch: mean and variance rate x span, so scaled residuals have variance 1.
    stretch = np.searchsorted(start_s, ns / 1e9, side="right") - 1
    counts = np.bincount(stretch, minlength=len(start_s))
    busy = (rates > 0) & (spans_s > 2.0)
    residual = (counts - rates * spans_s)[busy] / np.sqrt((rates * spans_s)[busy])
    assert residual.mean() == pytest.approx(0.0, abs=0.1)
    assert residual.var() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(
    "arrivals",
    [
        PoissonArrivals(rate_rps=0.0),
        GammaArrivals(rate_rps=0.0, shape=0.5),
        DeterministicArrivals(rate_rps=0.0),
        RegimeArrivals(rate_rps=RegimeChain(values=(0.0,), probabilities=(1.0,), mean_holding_s=9.0)),
    ],
    ids=KINDS,
)
def test_rate_zero_is_an_empty_table(arrivals):
    assert len(sample_arrivals_ns(arrivals, 0, horizon_s=1_000.0)) == 0
    assert len(sample_arrivals_ns(arrivals, 0, n_requests=0)) == 0
    with pytest.raises(PrfaasError, match="rate_rps is 0"):
        sample_arrivals_ns(arrivals, 0, n_requests=1)


@pytest.mark.parametrize("rate_rps", [5e-324, 1e-300, 1e-12, 1e-7])
@pytest.mark.parametrize("law", [PoissonArrivals, DeterministicArrivals, GammaArrivals, RegimeArrivals])
@pytest.mark.filterwarnings("error")
def test_a_rate_too_low_for_one_arrival_gives_none(law, rate_rps):
    chain = RegimeChain(values=(rate_rps,), probabilities=(1.0,), mean_holding_s=1e4)
    arrivals = law(rate_rps=chain) if law is RegimeArrivals else law(rate_rps=rate_rps, **SHAPE.get(law, {}))
    assert len(sample_arrivals_ns(arrivals, 3, horizon_s=1_000.0)) == 0
    with pytest.raises(PrfaasError, match=r"rate_rps is so low that 1000 requests take more than 1e\+09 s"):
        sample_arrivals_ns(arrivals, 3, n_requests=1_000)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "horizon_s or n_requests"),
        ({"horizon_s": 1.0, "n_requests": 1}, "horizon_s or n_requests"),
        ({"horizon_s": -1.0}, "horizon_s is -1"),
        ({"horizon_s": float("nan")}, "horizon_s is nan"),
        ({"horizon_s": float("inf")}, "horizon_s is inf"),
        ({"n_requests": -3}, "n_requests is -3"),
        ({"n_requests": 10**9}, "at most 50,000,000"),
        ({"horizon_s": 9e8}, "at most 50,000,000"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    with pytest.raises(PrfaasError, match=message):
        sample_arrivals_ns(PoissonArrivals(rate_rps=2.5), 0, **limits)


@given(
    seed=st.integers(0, 2**40),
    n=st.integers(0, 300),
    rates=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=4),
    holding_s=st.floats(0.1, 100.0),
)
@settings(max_examples=60, deadline=None)
def test_regime_arrivals_come_in_the_number_asked_for(seed, n, rates, holding_s):
    chain = RegimeChain(
        values=tuple(rates), probabilities=tuple([1.0 / len(rates)] * len(rates)), mean_holding_s=holding_s
    )
    ns = sample_arrivals_ns(RegimeArrivals(rate_rps=chain), seed, n_requests=n)
    assert len(ns) == n
    assert np.all(np.diff(ns) >= 0)
    assert np.all(ns >= 0)
