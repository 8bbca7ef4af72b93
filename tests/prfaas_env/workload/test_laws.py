import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from prfaas_env.workload.laws import empirical_law, length_law, log_mass
from prfaas_env.workload.lengths import sample_lengths
from prfaas_env.workload.models import (
    EmpiricalLengths,
    FixedLengths,
    LogNormalLengths,
    PoissonLengths,
    RegimeChain,
)

PAPER = LogNormalLengths(mu=9.90, sigma=1.00, min_tokens=128, max_tokens=131_072)
MIXED = PAPER.model_copy(
    update={"mu": RegimeChain(values=(9.4, 9.9, 10.2), probabilities=(0.3, 0.5, 0.2), mean_holding_s=300.0)}
)
GRID = np.arange(1_000.0, 131_073.0, 100.0)
# The H200 prefill knots of the reconstructed profile: a function with kinks.
KNOTS_TOKENS = np.array([1024, 8192, 27486, 32000, 45046, 62410, 130000.0])
KNOTS_S = np.array([0.44, 0.72, 1.633, 1.84, 2.484, 3.51, 7.40])


def _prefill_s(tokens):
    return np.interp(tokens, KNOTS_TOKENS, KNOTS_S)


def test_paper_figures():
    law = length_law(PAPER)
    assert law.mean == pytest.approx(27_486, abs=1)
    assert law.quantile([0.5, 0.9, 0.99]) == pytest.approx([19_199, 62_410, 115_417], abs=3)
    assert law.survival(19_400) == pytest.approx(0.4957, abs=5e-5)
    assert law.mean_above(19_400) == pytest.approx(45_046, abs=1)
    assert law.mean_below(19_400) == pytest.approx(10_224, abs=1)


def test_other_readings_of_k_give_other_shares():
    # Paper-facts 9.1: 19.4 x 1024 as threshold, 128,000 as upper limit.
    assert length_law(PAPER).survival(19.4 * 1024) == pytest.approx(0.486, abs=5e-4)
    decimal = length_law(PAPER.model_copy(update={"max_tokens": 128_000}))
    assert decimal.survival(19_400) == pytest.approx(0.495, abs=5e-4)
    assert decimal.mean_above(19_400) == pytest.approx(44_800, abs=60)


def test_partial_expectations_against_adaptive_integration():
    a, b = PAPER.standard_range(9.90)
    law = stats.truncnorm(a, b)
    for t in (1_000.0, 19_400.0, 60_000.0):
        z = np.log(t) - 9.90
        kinks = [k for k in np.log(KNOTS_TOKENS) - 9.90 if z < k < b]
        exact, _ = integrate.quad(
            lambda x: _prefill_s(np.exp(9.90 + x)) * law.pdf(x), z, b, points=kinks, limit=200, epsabs=1e-12
        )
        above, below = length_law(PAPER).partial_expectation(_prefill_s, t)
        assert above == pytest.approx(exact, rel=3e-6)
        assert above + below == pytest.approx(length_law(PAPER).expectation(_prefill_s), rel=1e-12)


@pytest.mark.parametrize("lengths", [PAPER, MIXED], ids=["one", "mixture"])
def test_partial_expectations_of_simple_functions_are_exact(lengths):
    law = length_law(lengths)
    above, below = law.partial_expectation(np.ones_like, GRID)
    assert above == pytest.approx(law.survival(GRID), abs=1e-13)
    assert below == pytest.approx(1.0 - law.survival(GRID), abs=1e-13)
    above, below = law.partial_expectation(lambda x: x, GRID)
    inside = GRID < 131_072
    assert above[inside] / law.survival(GRID)[inside] == pytest.approx(law.mean_above(GRID)[inside], rel=1e-9)
    assert below == pytest.approx((1.0 - law.survival(GRID)) * law.mean_below(GRID), rel=1e-9)


def test_partial_expectation_takes_any_order_and_shape():
    law = length_law(PAPER)
    t = np.array([[60_000.0, 500.0], [19_400.0, 19_400.0]])
    above, below = law.partial_expectation(_prefill_s, t)
    assert above.shape == below.shape == (2, 2)
    for i, threshold in np.ndenumerate(t):
        assert above[i] == pytest.approx(law.partial_expectation(_prefill_s, threshold)[0], rel=1e-6)
    assert law.partial_expectation(_prefill_s, np.zeros(0))[0].shape == (0,)


def test_ends_of_the_range():
    law = length_law(PAPER)
    assert law.survival([0, 127, 131_072, 1e9]).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert law.mean_above(100) == pytest.approx(law.mean)
    assert law.mean_below(1e9) == pytest.approx(law.mean)
    assert np.isnan(law.mean_above(131_072))
    assert np.isnan(law.mean_below(100))
    assert law.quantile([0.0, 1.0]) == pytest.approx([128, 131_072])
    with pytest.raises(ValueError, match="from 0 to 1"):
        law.quantile(1.5)


@pytest.mark.parametrize("lengths", [PAPER, MIXED], ids=["one", "mixture"])
def test_samples_follow_the_law(lengths):
    # Many short regimes, so that their shares come close to the probabilities.
    arrival_s = np.arange(1, 200_001) * 100.0
    tokens = sample_lengths(lengths, arrival_s, 3, "input_lengths")
    law = length_law(lengths)
    t = np.array([500, 2_000, 8_000, 19_400, 45_000, 100_000])
    assert [(tokens > x).mean() for x in t] == pytest.approx(law.survival(t), abs=0.008)
    assert tokens.mean() == pytest.approx(law.mean, rel=0.02)


def test_mixture_is_the_weighted_sum_of_its_regimes():
    chain = MIXED.mu
    parts = [length_law(PAPER.model_copy(update={"mu": mu})) for mu in chain.values]
    law = length_law(MIXED)
    expected = sum(p * part.survival(GRID) for p, part in zip(chain.probabilities, parts, strict=True))
    assert law.survival(GRID) == pytest.approx(expected, abs=1e-15)
    assert law.mean == pytest.approx(sum(p * x.mean for p, x in zip(chain.probabilities, parts, strict=True)))
    q = np.linspace(0.01, 0.99, 50)
    assert law.survival(law.quantile(q)) == pytest.approx(1.0 - q, abs=1e-9)


def test_one_regime_is_no_regime():
    single = PAPER.model_copy(
        update={"mu": RegimeChain(values=(9.9, 5.0), probabilities=(1.0, 0.0), mean_holding_s=1.0)}
    )
    assert length_law(single).quantile([0.1, 0.9]) == pytest.approx(length_law(PAPER).quantile([0.1, 0.9]))
    assert length_law(single).mean == length_law(PAPER).mean


def test_fixed():
    law = length_law(FixedLengths(tokens=1024))
    assert law.mean == 1024
    assert law.survival([1023, 1024, 1025]).tolist() == [1.0, 0.0, 0.0]
    assert law.quantile([0.0, 0.5, 1.0]).tolist() == [1024, 1024, 1024]
    above, below = law.partial_expectation(lambda x: 2 * x, [1023, 1024])
    assert above.tolist() == [2048, 0]
    assert below.tolist() == [0, 2048]


def test_empirical_by_hand():
    law = length_law(EmpiricalLengths(tokens=(10, 2, 2, 1)))
    assert law.mean == pytest.approx(3.75)
    assert law.survival([0, 1, 2, 9.5, 10]).tolist() == [1.0, 0.75, 0.25, 0.25, 0.0]
    assert law.mean_above(1) == pytest.approx(14 / 3)
    assert law.mean_below(2) == pytest.approx(5 / 3)
    assert law.quantile([0.0, 0.25, 0.26, 0.75, 0.76, 1.0]).tolist() == [1, 1, 2, 2, 10, 10]
    tokens, weights = law.quadrature(4)
    assert tokens.tolist() == [1, 2, 10]
    assert weights.tolist() == [0.25, 0.5, 0.25]


def test_poisson_law():
    law = length_law(PoissonLengths(mean_tokens=3.0, min_tokens=2))
    exact = stats.poisson(3.0)
    assert law.survival([1, 2, 5]) == pytest.approx([1.0, exact.sf(2), exact.sf(5)])
    expected = 2 * exact.cdf(2) + sum(k * exact.pmf(k) for k in range(3, 60))
    assert law.mean == pytest.approx(expected)
    chain = RegimeChain(values=(400, 1024, 1800), probabilities=(0.35, 0.40, 0.25), mean_holding_s=400)
    assert length_law(PoissonLengths(mean_tokens=chain)).mean == pytest.approx(chain.mean)


@pytest.mark.parametrize("lengths", [PAPER, MIXED], ids=["one", "mixture"])
@pytest.mark.parametrize("n", [64, 1024])
def test_quadrature(lengths, n):
    law = length_law(lengths)
    tokens, weights = law.quadrature(n)
    assert np.all(np.diff(tokens) >= 0)
    assert np.all(weights >= 0)
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert (weights * tokens).sum() == pytest.approx(law.mean, rel=1e-6)
    dense = law.expectation(_prefill_s)
    assert (weights * _prefill_s(tokens)).sum() == pytest.approx(dense, rel=2e-4 if n == 64 else 2e-6)


@given(
    mu=st.floats(-5.0, 20.0),
    sigma=st.floats(0.05, 8.0),
    low=st.integers(1, 2_000),
    width=st.integers(10, 300_000),
    share=st.floats(0.0, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_identities_of_every_truncated_lognormal(mu, sigma, low, width, share):
    law = length_law(LogNormalLengths(mu=mu, sigma=sigma, min_tokens=low, max_tokens=low + width))
    assert low <= law.mean * (1 + 1e-9)
    assert law.mean <= (low + width) * (1 + 1e-9)
    t = low + share * width
    p = float(law.survival(t))
    assert -1e-12 <= p <= 1.0 + 1e-9
    above = p * float(law.mean_above(t)) if p > 0 else 0.0
    below = (1.0 - p) * float(law.mean_below(t)) if p < 1 else 0.0
    if 1e-9 < p < 1 - 1e-9:
        assert above + below == pytest.approx(law.mean, rel=1e-6)
        assert law.mean_above(t) >= t * (1 - 1e-7)
        if t - low > 1e-3:  # a narrower slice of the law is below what its mean can resolve
            assert law.mean_below(t) <= t * (1 + 1e-7)
    q = float(law.quantile(share))
    assert low * (1 - 1e-12) <= q <= (low + width) * (1 + 1e-12)
    assert law.survival(q) == pytest.approx(1.0 - share, abs=1e-6)
    tokens, weights = law.quadrature(256)
    assert (weights * tokens).sum() == pytest.approx(law.mean, rel=1e-4)


def test_log_mass_in_the_middle_and_in_the_tails():
    norm = stats.norm
    assert np.exp(log_mass(-1.0, 2.0)) == pytest.approx(norm.cdf(2) - norm.cdf(-1))
    assert np.exp(log_mass(8.0, 9.0)) == pytest.approx(norm.sf(8) - norm.sf(9), rel=1e-12)
    assert log_mass(50.0, 60.0) == pytest.approx(norm.logsf(50), rel=1e-12)
    assert log_mass(-60.0, -50.0) == pytest.approx(norm.logcdf(-50), rel=1e-12)
    assert log_mass(1.0, 1.0) == -np.inf


def test_empirical_law_of_an_array():
    assert empirical_law(np.array([3, 1, 2])).mean == pytest.approx(2.0)
