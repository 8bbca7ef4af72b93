"""Prefill and decode profiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prfaas_env.profiles.catalogue import load_model, model_names
from prfaas_env.profiles.latency import DecodeProfile, PrefillPolynomial, PrefillTable

PROFILES = [
    pytest.param(load_model(name).hardware[hardware].prefill, id=f"{name}-{hardware}")
    for name in model_names()
    for hardware in load_model(name).hardware
]


def test_table_is_linear_between_and_outside_its_points() -> None:
    table = PrefillTable(tokens=(100, 200, 400), seconds_at=(1.0, 2.0, 3.0), source="test")
    assert table.seconds(100) == 1.0
    assert table.seconds(150) == pytest.approx(1.5)
    assert table.seconds(300) == pytest.approx(2.5)
    assert table.seconds(600) == pytest.approx(4.0)
    assert table.seconds(50) == pytest.approx(0.5)


def test_polynomial_with_a_cached_prefix_costs_its_attention() -> None:
    profile = PrefillPolynomial(c0_s=0.5, c1_s_per_token=1e-3, c2_s_per_token2=1e-6, source="test")
    # 0.5 + 1e-3 x 100 + 1e-6 x (300^2 - 200^2)
    assert profile.seconds(100, cached_tokens=200) == pytest.approx(0.5 + 0.1 + 0.05)


@pytest.mark.parametrize("profile", PROFILES)
def test_array_equals_scalar_and_rises(profile: PrefillTable | PrefillPolynomial) -> None:
    lengths = np.array([1, 128, 1023, 1024, 1025, 8192, 19_400, 31_999, 32_000, 62_410, 131_072], dtype=float)
    seconds = profile.seconds_array(lengths)
    assert seconds.tolist() == [profile.seconds(int(n)) for n in lengths]
    assert (np.diff(seconds) > 0).all()
    assert (seconds > 0).all()


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True), st.integers(0, 2 * 10**6))
def test_table_array_equals_scalar(tokens: list[int], length: int) -> None:
    knots = sorted(tokens)
    table = PrefillTable(tokens=knots, seconds_at=[n**0.5 for n in knots], source="test")
    assert table.seconds_array(np.array([float(length)]))[0] == table.seconds(length)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds_at": (1.0,)}, "seconds_at"),
        ({"seconds_at": (1.0, 2.0, 3.0)}, "2 tokens but 3 seconds_at"),
        ({"seconds_at": (2.0, 1.0)}, "must not fall"),
        ({"tokens": (200, 100)}, "rise strictly"),
        ({"tokens": (-1, 100)}, "negative"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    content = {"tokens": (100, 200), "seconds_at": (1.0, 2.0), "source": "test"} | changes
    with pytest.raises(ValidationError, match=message):
        PrefillTable.model_validate(content)


def test_a_falling_polynomial_or_an_empty_decode_is_refused() -> None:
    with pytest.raises(ValidationError, match="c1_s_per_token"):
        PrefillPolynomial(c0_s=1.0, c1_s_per_token=-1e-6, source="test")
    with pytest.raises(ValidationError, match="slots"):
        DecodeProfile(a_s=0.025, slots=0, source="test")
