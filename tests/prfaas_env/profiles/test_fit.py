"""Fits: what was made by a known law is found again, with noise and wrong points among it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.fit import (
    fit_bytes,
    fit_prefill,
    fit_step,
    fit_transfer,
    mean_batch,
    overlaps,
)
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import PrefillPolynomial

SEEDS = st.integers(0, 10_000)
NONE = np.zeros(200)


def lengths(rng: np.random.Generator, n: int = 200) -> np.ndarray:
    return np.round(np.exp(rng.uniform(np.log(128), np.log(60_000), n)))


def spoilt(rng: np.random.Generator, seconds: np.ndarray, noise: float, share: float) -> np.ndarray:
    """Noise on every value; of a share of them three in four are 2 to 6 times too long, the others next to nothing."""
    out = seconds * np.exp(rng.normal(0.0, noise, len(seconds)))
    wrong = rng.permutation(len(seconds))[: int(share * len(seconds))]
    out[wrong] *= np.where(np.arange(len(wrong)) % 4, rng.uniform(2.0, 6.0, len(wrong)), 1e-4)
    return out


@given(SEEDS, st.floats(0.01, 1.0), st.floats(1e-6, 1e-3), st.floats(0.0, 1e-8))
@settings(max_examples=30, deadline=None)
def test_a_known_prefill_profile_is_found_again(seed: int, c0: float, c1: float, c2: float) -> None:
    rng = np.random.default_rng(seed)
    known = PrefillPolynomial(c0_s=c0, c1_s_per_token=c1, c2_s_per_token2=c2, source="known")
    new = lengths(rng)
    exact = known.seconds_array(new)
    fitted, quality = fit_prefill(new, NONE, exact)
    np.testing.assert_allclose(fitted.seconds_array(new), exact, rtol=2e-3)
    assert quality.outliers == 0
    fitted, quality = fit_prefill(new, NONE, spoilt(rng, exact, 0.03, 0.1))
    np.testing.assert_allclose(fitted.seconds_array(new), exact, rtol=0.06)
    assert 15 <= quality.outliers <= 30
    assert (quality.low, quality.high) != (0.0, 0.0)


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_cached_tokens_count_as_in_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known = PrefillPolynomial(c0_s=0.3, c1_s_per_token=1e-4, c2_s_per_token2=2e-9, source="known")
    new, cached = lengths(rng), np.round(rng.uniform(0, 50_000, 200)) * (rng.random(200) < 0.5)
    seconds = np.array([known.seconds(int(n), int(c)) for n, c in zip(new, cached, strict=True)])
    fitted, _ = fit_prefill(new, cached, seconds)
    assert fitted.c0_s == pytest.approx(0.3, rel=1e-3)
    assert fitted.c1_s_per_token == pytest.approx(1e-4, rel=1e-3)
    assert fitted.c2_s_per_token2 == pytest.approx(2e-9, rel=1e-2)


def test_a_line_by_hand() -> None:
    """0.5 s + 1 ms per token through eight points; one of them is three times too long."""
    new = np.arange(100.0, 900.0, 100.0)
    seconds = 0.5 + 1e-3 * new
    seconds[4] *= 3.0
    fitted, quality = fit_prefill(new, np.zeros(8), seconds)
    assert fitted.c0_s == pytest.approx(0.5, rel=1e-4)
    assert fitted.c1_s_per_token == pytest.approx(1e-3, rel=1e-4)
    assert (quality.points, quality.outliers, quality.low, quality.high) == (8, 1, 100.0, 800.0)
    assert quality.residual_p50 < 1e-4
    assert "8 measured prefills of 100 to 800 tokens, 1 of them set aside" in fitted.source


@given(SEEDS, st.floats(1e-3, 0.1), st.floats(1e-4, 1e-2))
@settings(max_examples=30, deadline=None)
def test_a_known_decode_step_is_found_again(seed: int, a: float, b: float) -> None:
    rng = np.random.default_rng(seed)
    batch = rng.uniform(1.0, 12.0, 200)
    fitted, _ = fit_step(batch, spoilt(rng, a + b * batch, 0.03, 0.1), 20)
    np.testing.assert_allclose(fitted.a_s + fitted.b_s_per_sequence * batch, a + b * batch, rtol=0.06)
    assert fitted.slots == 20


def test_one_load_tells_no_cost_per_sequence() -> None:
    fitted, _ = fit_step(np.full(20, 1.2), np.full(20, 0.03), 8)
    assert (fitted.a_s, fitted.b_s_per_sequence) == (0.03, 0.0)
    assert "one load only" in fitted.source


@given(SEEDS, st.integers(0, 200_000_000), st.integers(1, 100_000))
@settings(max_examples=30, deadline=None)
def test_bytes_are_found_to_the_byte(seed: int, fixed: int, per_token: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = lengths(rng)
    known = KVLayout(fixed_bytes=fixed, bytes_per_token=per_token, n_layers=4)
    n_bytes = known.transfer_bytes_array(tokens.astype(np.int64)).astype(np.float64)
    n_bytes[:20] *= 2.0  # sent twice
    fitted, quality = fit_bytes(tokens, n_bytes, 4)
    assert fitted.bytes_per_token == pytest.approx(per_token, abs=1)
    assert abs(fitted.fixed_bytes - fixed) <= 1 + 1e-6 * n_bytes.min()
    assert quality.outliers == 20


@given(SEEDS, st.floats(1e6, 1e11), st.floats(0.0, 0.2))
@settings(max_examples=30, deadline=None)
def test_a_known_link_is_found_again(seed: int, rate_bps: float, fixed_s: float) -> None:
    rng = np.random.default_rng(seed)
    n_bytes = np.exp(rng.uniform(np.log(1e5), np.log(1e8), 200))
    seconds = fixed_s + n_bytes * 8 / rate_bps
    rate, fixed, _ = fit_transfer(n_bytes, spoilt(rng, seconds, 0.03, 0.1))
    np.testing.assert_allclose(fixed + n_bytes * 8 / rate, seconds, rtol=0.06)


def test_a_link_by_hand() -> None:
    """10 ms and 80 Mbit/s: 1 MB takes 110 ms."""
    n_bytes = np.arange(1.0, 9.0) * 1e6
    rate, fixed, quality = fit_transfer(n_bytes, 0.01 + n_bytes * 8 / 80e6)
    assert rate == pytest.approx(80e6, rel=1e-4)
    assert fixed == pytest.approx(0.01, rel=1e-3)
    assert (quality.low, quality.high) == (8e6, 64e6)


def test_too_little_is_refused_by_name() -> None:
    with pytest.raises(PrfaasError, match="prefill: 7 usable points, at least 8 are needed"):
        fit_prefill(np.arange(1.0, 8.0), np.zeros(7), np.ones(7))
    with pytest.raises(PrfaasError, match=r"transfers: all between 1,000 and 1,400 bytes; .*1\.5 times"):
        fit_transfer(np.linspace(1000, 1400, 20), np.ones(20))
    with pytest.raises(PrfaasError, match="decode step: 3 usable points"):
        fit_step(np.ones(3), np.ones(3), 4)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=12)


@given(SPANS)
@settings(deadline=None)
def test_mean_batch_and_overlaps_by_counting(spans: list[tuple[int, int]]) -> None:
    begins = np.array([b for b, _ in spans], dtype=float)
    ends = begins + np.array([n for _, n in spans])
    batch, shared = mean_batch(begins, ends), overlaps(begins, ends)
    for k, (begin, length) in enumerate(spans):
        running = [sum(b <= t < b + n for b, n in spans) for t in range(begin, begin + length)]
        if running:
            assert batch[k] == pytest.approx(np.mean(running))
        others = [s for i, s in enumerate(spans) if i != k]
        if all(n for _, n in spans):
            assert shared[k] == any(b < begin + length and begin < b + n for b, n in others)


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_a_third_of_wrong_points_does_not_carry_the_fit_away(seed: int) -> None:
    """Least squares from the start would: the wrong ones are 8 times too long, all among the short prompts."""
    rng = np.random.default_rng(seed)
    new = np.sort(lengths(rng))
    seconds = 0.05 + 1e-4 * new
    seconds[:60] *= 8.0
    fitted, quality = fit_prefill(new, NONE, seconds)
    np.testing.assert_allclose(fitted.seconds_array(new), 0.05 + 1e-4 * new, rtol=0.01)
    assert quality.outliers == 60


def test_points_that_count_share_the_noise() -> None:
    """Half say 20 ms, half 20.1 ms: they mean 20.05 ms."""
    seconds = np.array([0.02] * 4 + [0.0201] * 4)
    fitted, _ = fit_step(np.ones(8), seconds, 8)
    assert fitted.a_s == pytest.approx(0.02005, rel=1e-5)
