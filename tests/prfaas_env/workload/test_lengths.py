import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from prfaas_env.base import stream
from prfaas_env.workload.lengths import poisson_table, sample_lengths, truncated_normal_quantile
from prfaas_env.workload.models import (
    EmpiricalLengths,
    FixedLengths,
    LogNormalLengths,
    PoissonLengths,
    RegimeChain,
)
from prfaas_env.workload.regimes import sample_chain, value_at

PAPER = LogNormalLengths(mu=9.90, sigma=1.00, min_tokens=128, max_tokens=131_072)


def _arrivals(n, gap_s=0.4):
    return np.arange(1, n + 1) * gap_s


def _draw(lengths, n, seed=0, name="input_lengths"):
    return sample_lengths(lengths, _arrivals(n), seed, name)


def test_paper_law_by_sampling():
    tokens = _draw(PAPER, 400_000)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 128
    assert tokens.max() <= 131_072
    assert tokens.mean() == pytest.approx(27_486, rel=0.005)
    assert np.median(tokens) == pytest.approx(19_199, rel=0.01)
    assert np.percentile(tokens, 90) == pytest.approx(62_410, rel=0.01)
    assert (tokens > 19_400).mean() == pytest.approx(0.4957, abs=0.003)
    # Truncated, not clipped: no heap at the ends.
    assert (tokens >= 131_000).mean() < 1e-3
    assert (tokens == 128).mean() < 1e-4


def test_lengths_are_the_inverse_distribution_of_one_uniform_each():
    u = stream(4, "input_lengths").random(1_000)
    a, b = PAPER.standard_range(9.90)
    expected = np.floor(np.exp(9.90 + stats.truncnorm(a, b).ppf(u)))
    assert np.abs(_draw(PAPER, 1_000, seed=4) - expected).max() <= 1


@pytest.mark.parametrize(
    "lengths",
    [
        PAPER,
        FixedLengths(tokens=1024),
        PoissonLengths(mean_tokens=300.0),
        EmpiricalLengths(tokens=(5, 6, 7, 900)),
        PAPER.model_copy(
            update={"mu": RegimeChain(values=(9.0, 10.2), probabilities=(0.5, 0.5), mean_holding_s=20.0)}
        ),
    ],
    ids=["lognormal", "fixed", "poisson", "empirical", "regimes"],
)
def test_draws_are_indexed_by_request(lengths):
    few = _draw(lengths, 50, seed=6)
    many = _draw(lengths, 5_000, seed=6)
    assert np.array_equal(many[:50], few)
    if lengths.kind != "fixed":
        assert not np.array_equal(few, _draw(lengths, 50, seed=7))
        assert not np.array_equal(few, _draw(lengths, 50, seed=6, name="output_lengths"))
    assert len(sample_lengths(lengths, np.zeros(0), 6, "input_lengths")) == 0


def test_a_larger_parameter_lengthens_each_request():
    longer = _draw(PAPER.model_copy(update={"mu": 10.4}), 2_000)
    assert np.all(longer >= _draw(PAPER, 2_000))


def test_regime_of_the_arrival_instant_sets_the_law():
    chain = RegimeChain(values=(7.0, 11.0), probabilities=(0.5, 0.5), mean_holding_s=300.0)
    lengths = PAPER.model_copy(update={"mu": chain})
    arrival_s = _arrivals(40_000)
    tokens = sample_lengths(lengths, arrival_s, 2, "input_lengths")
    start_s, values = sample_chain(chain, arrival_s[-1], stream(2, "input_lengths", 1))
    mu = value_at(start_s, values, arrival_s)
    for value in chain.values:
        a, b = PAPER.standard_range(value)
        expected = np.exp(value + stats.truncnorm(a, b).median())
        assert np.median(tokens[mu == value]) == pytest.approx(expected, rel=0.03)
        # And each is what a law without regimes draws for that request.
        plain = sample_lengths(PAPER.model_copy(update={"mu": value}), arrival_s, 2, "input_lengths")
        assert np.array_equal(plain[mu == value], tokens[mu == value])


@pytest.mark.parametrize("mean", [0.3, 20.0, 1_024.0, 250_000.0])
def test_poisson_lengths(mean):
    tokens = _draw(PoissonLengths(mean_tokens=mean), 5_000)
    u = stream(0, "input_lengths").random(5_000)
    assert np.array_equal(tokens, np.maximum(stats.poisson(mean).ppf(u), 1))


def test_poisson_minimum_and_regimes():
    chain = RegimeChain(values=(0.0, 400.0), probabilities=(0.5, 0.5), mean_holding_s=10.0)
    tokens = _draw(PoissonLengths(mean_tokens=chain, min_tokens=16), 20_000)
    assert tokens.min() == 16
    assert (tokens == 16).mean() == pytest.approx(0.5, abs=0.06)
    assert tokens[tokens > 16].mean() == pytest.approx(400.0, rel=0.01)


@pytest.mark.parametrize("mean", [0.0, 1e-3, 3.0, 1e3, 1e6])
def test_poisson_table_covers_all_but_nothing(mean):
    first, cumulative = poisson_table(mean)
    law = stats.poisson(mean)
    assert law.cdf(first - 1) < 1e-16
    assert law.sf(first + len(cumulative) - 1) < 1e-16
    assert cumulative == pytest.approx(law.cdf(np.arange(first, first + len(cumulative))), abs=1e-12)


def test_empirical_draws_every_value_by_its_share():
    tokens = _draw(EmpiricalLengths(tokens=(10, 20, 20, 70)), 40_000)
    for value, share in ((10, 0.25), (20, 0.5), (70, 0.25)):
        assert (tokens == value).mean() == pytest.approx(share, abs=0.01)


@given(
    mu=st.floats(-60.0, 80.0),
    sigma=st.floats(0.01, 20.0),
    low=st.integers(1, 5_000),
    width=st.integers(1, 200_000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_every_lognormal_stays_in_its_range(mu, sigma, low, width, seed):
    lengths = LogNormalLengths(mu=mu, sigma=sigma, min_tokens=low, max_tokens=low + width)
    tokens = sample_lengths(lengths, _arrivals(200), seed, "input_lengths")
    assert tokens.min() >= low
    assert tokens.max() <= low + width


@given(a=st.floats(-300.0, 300.0), width=st.floats(1e-3, 50.0))
@settings(max_examples=150, deadline=None)
def test_quantile_rises_from_end_to_end_far_into_the_tails(a, width):
    b = a + width
    u = np.linspace(0.0, 1.0, 65)
    z = truncated_normal_quantile(u, a, b)
    assert np.all(np.isfinite(z))
    assert np.all(np.diff(z) >= -1e-9 * max(abs(a), abs(b), 1.0))
    assert z[0] == pytest.approx(a, abs=1e-6 * max(abs(a), 1.0))
    assert z[-1] == pytest.approx(b, abs=1e-6 * max(abs(b), 1.0))


def test_far_tail_is_exponential():
    # Beyond z = 40 the normal tail falls like exp(-40 (z - 40)): the median lies ln(2) / 40 above the cut,
    # where plain probabilities are all 0 or 1. First correction: - ln(2)^2 / (2 * 40^3), below 1e-5.
    right = truncated_normal_quantile(np.array([0.5]), 40.0, 100.0)[0]
    assert right - 40.0 == pytest.approx(np.log(2) / 40, rel=2e-3)
    assert truncated_normal_quantile(np.array([0.5]), -100.0, -40.0)[0] == pytest.approx(-right, rel=1e-12)
