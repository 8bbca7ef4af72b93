import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.workload.models import RegimeChain
from prfaas_env.workload.regimes import sample_chain, value_at

THREE = RegimeChain(values=(1.0, 5.0, 25.0), probabilities=(0.2, 0.5, 0.3), mean_holding_s=60.0)


def test_value_at_takes_the_new_value_at_a_change():
    start_s = np.array([0.0, 10.0, 20.0])
    values = np.array([7.0, 8.0, 9.0])
    assert value_at(start_s, values, np.array([0.0, 9.999, 10.0, 19.0, 20.0, 1e6])).tolist() == [
        7,
        7,
        8,
        8,
        9,
        9,
    ]
    assert value_at(start_s, values, np.zeros(0)).tolist() == []


def test_holding_times_and_shares_follow_the_chain():
    start_s, values = sample_chain(THREE, 60.0 * 40_000, np.random.default_rng(3))
    holding_s = np.diff(start_s)
    assert holding_s.mean() == pytest.approx(60.0, rel=0.02)
    assert holding_s.std() == pytest.approx(60.0, rel=0.02)
    for value, probability in zip(THREE.values, THREE.probabilities, strict=True):
        assert (values == value).mean() == pytest.approx(probability, abs=0.01)
    # With replacement: the next value does not depend on the present one.
    stays = (values[1:] == values[:-1]).mean()
    assert stays == pytest.approx(0.2**2 + 0.5**2 + 0.3**2, abs=0.01)


def test_a_value_of_probability_zero_never_comes():
    chain = RegimeChain(values=(1.0, 2.0, 3.0), probabilities=(0.0, 1.0, 0.0), mean_holding_s=1.0)
    _, values = sample_chain(chain, 5_000.0, np.random.default_rng(0))
    assert set(values) == {2.0}


def test_absurdly_short_holding_times_are_refused():
    chain = RegimeChain(values=(1.0,), probabilities=(1.0,), mean_holding_s=1e-9)
    with pytest.raises(PrfaasError, match="mean_holding_s"):
        sample_chain(chain, 3600.0, np.random.default_rng(0))


@given(
    seed=st.integers(0, 2**32),
    holding_s=st.floats(0.5, 500.0),
    horizon_s=st.floats(0.0, 2_000.0),
    longer=st.floats(1.0, 3.0),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_laws_of_every_path(seed, holding_s, horizon_s, longer, weights):
    probabilities = np.array(weights) / sum(weights)
    chain = RegimeChain(
        values=tuple(10.0 * (k + 1) for k in range(len(weights))),
        probabilities=tuple(probabilities),
        mean_holding_s=holding_s,
    )
    start_s, values = sample_chain(chain, horizon_s, np.random.default_rng(seed))
    assert start_s[0] == 0.0
    assert len(start_s) == len(values)
    assert np.all(np.diff(start_s) > 0.0)
    assert start_s[-1] <= horizon_s
    assert set(values) <= set(chain.values)
    longer_start_s, longer_values = sample_chain(chain, horizon_s * longer, np.random.default_rng(seed))
    assert np.array_equal(longer_start_s[: len(start_s)], start_s)
    assert np.array_equal(longer_values[: len(values)], values)
    # The longer path adds changes after the shorter horizon only.
    assert np.all(longer_start_s[len(start_s) :] > horizon_s)
