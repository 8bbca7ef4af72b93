"""Fits of latency profiles, cache bytes and link figures to what was measured.

Every fit is linear with coefficients that are not negative, in relative error, and robust: least absolute deviations
first, then least squares over the points that lie near them. A tenth of wrong points does not move it; what is left
out is counted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from scipy.optimize import linprog, nnls
from scipy.sparse import block_array, csr_array, eye_array

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import DecodeProfile, PrefillPolynomial
from prfaas_env.simulator.formulas import BITS_PER_BYTE, MAX_RATE_BPS, FloatArray

#: Fewest points of a fit.
MIN_POINTS = 8
#: Longest over shortest length, at least: else the fixed cost cannot be told from the cost per token.
MIN_SPREAD = 1.5
#: Runs of at least so different a load tell what a sequence adds to a decode step.
MIN_BATCH_SPREAD = 0.5
#: Points within so many scaled median deviations of the robust fit count, and all within the floor.
_NEAR = 4.0
_NEAR_FLOOR = 0.01
_MAD_TO_SIGMA = 1.4826
#: Points that the least deviations are taken over; of more, every n-th in order of size.
_MOST_POINTS = 4000
#: Points beside a point, itself counted, whose median says what is usual there; and the share of it that is far below.
_NEIGHBOURS = 15
_LOW_SHARE = 0.3
#: A fitted decode step takes this long at least: a profile has no step of 0 s.
_MIN_STEP_S = 1e-6

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class FitQuality:
    """How well a fit stands."""

    points: int
    """Points given."""
    outliers: int
    """Of these, points too far away to count."""
    residual_p50: float
    """Median of |fitted - measured| / fitted over all points."""
    residual_p90: float
    low: float
    """Smallest value of what the fit is a function of (tokens, sequences, bits) among the points that count."""
    high: float

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


def _least_squares(scaled: FloatArray, wanted: FloatArray) -> FloatArray:
    found, _ = nnls(scaled, wanted)
    return np.asarray(found, dtype=np.float64)


def _least_deviations(scaled: FloatArray, wanted: FloatArray) -> FloatArray:
    """Coefficients >= 0 with the least sum of |scaled @ c - wanted|, as a linear programme."""
    step = -(-len(wanted) // _MOST_POINTS)
    a, b = scaled[::step], wanted[::step]
    n, k = a.shape
    apart = eye_array(n)
    at_most: Any = block_array([[csr_array(a), -apart], [csr_array(-a), -apart]], format="csr")
    solved = linprog(
        np.concatenate([np.zeros(k), np.ones(n)]),
        A_ub=at_most,
        b_ub=np.concatenate([b, -b]),
        bounds=(0.0, None),
        method="highs",
    )
    if solved.x is None:  # never seen: all zeros are feasible
        return _least_squares(scaled, wanted)
    return np.maximum(np.asarray(solved.x[:k], dtype=np.float64), 0.0)


def robust_fit(columns: FloatArray, values: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Coefficients >= 0 with `columns @ coefficients` near `values` in relative error, and which points counted.

    Errors are relative to the value, or to a share of its neighbours' median where the value is far below that: a value
    a hundred times too small weighs no more than one a few times too large.

    Args:
        columns: shape (n, k), not negative.
        values: shape (n,), above 0.
    """
    # near 1, as solvers like it
    unit = float(np.median(values))
    size = np.maximum(np.abs(columns).max(axis=0), 1e-300) / unit
    shaped = columns / (size * unit)
    values = values / unit
    order = np.argsort(shaped.sum(axis=1), kind="stable")
    usual = np.empty(len(values))
    usual[order] = median_filter(values[order], size=_NEIGHBOURS, mode="mirror")
    scale = np.maximum(values, _LOW_SHARE * usual)
    found = _least_deviations((shaped / scale[:, None])[order], (values / scale)[order])
    fitted = np.maximum(shaped @ found, 1e-300)
    # a point that is twice as slow is as far away as one that is twice as fast
    away = np.abs(np.log(values / fitted))
    near = away <= max(_NEAR * _MAD_TO_SIGMA * float(np.median(away)), _NEAR_FLOOR)
    if near.sum() > columns.shape[1]:
        count = fitted[near]
        found = _least_squares(shaped[near] / count[:, None], values[near] / count)
    return found / size, near


def _short(value: float) -> float:
    """Six digits: more of a measurement is noise."""
    return float(f"{value:.6g}")


def _quality(
    argument: FloatArray, fitted: FloatArray, values: FloatArray, near: BoolArray, floor: float = 0.0
) -> FitQuality:
    residual = np.abs(fitted - values) / np.maximum(fitted, max(floor, 1e-300))
    return FitQuality(
        points=len(values),
        outliers=int((~near).sum()),
        residual_p50=float(np.quantile(residual, 0.5)),
        residual_p90=float(np.quantile(residual, 0.9)),
        low=float(argument[near].min()),
        high=float(argument[near].max()),
    )


def _enough(n: int, what: str) -> None:
    if n < MIN_POINTS:
        raise PrfaasError(f"{what}: {n} usable points, at least {MIN_POINTS} are needed")


def _spread(values: FloatArray, what: str, unit: str) -> None:
    low, high = float(values.min()), float(values.max())
    if high < MIN_SPREAD * max(low, 1e-300):
        raise PrfaasError(
            f"{what}: all between {low:,.0f} and {high:,.0f} {unit}; the longest must be at least {MIN_SPREAD:g} "
            "times the shortest, to tell the fixed cost from the cost by size"
        )


def fit_prefill(
    new_tokens: FloatArray, cached_tokens: FloatArray, seconds: FloatArray, what: str = "prefill"
) -> tuple[PrefillPolynomial, FitQuality]:
    """`c0 + c1 l + c2 l^2` from prefills that ran alone on their worker.

    Behind a cache the profile is `T(cached + new) - T(cached) + T(0)` (`formulas.prefill_s`), which is linear in the
    coefficients too. Outside the lengths of the points the polynomial goes on, untested.

    Args:
        new_tokens: shape (n,).
        cached_tokens: shape (n,).
        seconds: service times, shape (n,), above 0.
        what: named in errors.

    Raises:
        PrfaasError: too few points, or lengths that hardly differ.
    """
    _enough(len(seconds), what)
    _spread(new_tokens, what, "tokens")
    total = new_tokens + cached_tokens
    columns = np.column_stack([np.ones(len(seconds)), new_tokens, total**2 - cached_tokens**2])
    found, near = robust_fit(columns, seconds)
    c0, c1, c2 = (_short(c) for c in found)
    quality = _quality(total, columns @ np.array([c0, c1, c2]), seconds, near)
    source = (
        f"Fitted to {len(seconds)} measured prefills of {quality.low:,.0f} to {quality.high:,.0f} tokens, "
        f"{quality.outliers} of them set aside; residual P50 {quality.residual_p50:.1%}, P90 "
        f"{quality.residual_p90:.1%}."
    )
    return PrefillPolynomial(c0_s=c0, c1_s_per_token=c1, c2_s_per_token2=c2, source=source), quality


def fit_step(batch: FloatArray, seconds: FloatArray, slots: int) -> tuple[DecodeProfile, FitQuality]:
    """Decode step `a + b * batch` from the mean time per output token and the mean sequences of each request.

    Where the loads hardly differ, b cannot be told from a and is 0. A cost by context is not fitted.

    Args:
        batch: mean sequences on the worker while the request decoded, itself counted, shape (n,).
        seconds: its time per output token after the first, shape (n,), above 0.
        slots: sequences at most, as configured; it is not fitted.

    Raises:
        PrfaasError: too few points.
    """
    _enough(len(seconds), "decode step")
    ones = np.ones(len(seconds))
    low, high = np.quantile(batch, [0.05, 0.95])
    flat = high - low < MIN_BATCH_SPREAD
    columns = ones[:, None] if flat else np.column_stack([ones, batch])
    found, near = robust_fit(columns, seconds)
    quality = _quality(batch, columns @ found, seconds, near)
    how = "one load only, so no cost per sequence" if flat else "a cost per sequence"
    source = (
        f"Fitted to {len(seconds)} requests with {quality.low:.1f} to {quality.high:.1f} sequences ({how}), "
        f"{quality.outliers} of them set aside; residual P50 {quality.residual_p50:.1%}, P90 "
        f"{quality.residual_p90:.1%}. Slots as configured."
    )
    profile = DecodeProfile(
        a_s=max(_short(found[0]), _MIN_STEP_S),
        b_s_per_sequence=0.0 if flat else _short(found[1]),
        slots=slots,
        source=source,
    )
    return profile, quality


def fit_bytes(tokens: FloatArray, n_bytes: FloatArray, n_layers: int) -> tuple[KVLayout, FitQuality]:
    """`fixed + per_token * tokens` bytes of KV from transfers of known size, rounded to whole bytes.

    Raises:
        PrfaasError: too few points, or lengths that hardly differ.
    """
    _enough(len(tokens), "KV bytes")
    _spread(tokens, "KV bytes", "tokens")
    columns = np.column_stack([np.ones(len(tokens)), tokens])
    found, near = robust_fit(columns, n_bytes)
    layout = KVLayout(
        fixed_bytes=round(float(found[0])), bytes_per_token=round(float(found[1])), n_layers=n_layers
    )
    fitted = layout.transfer_bytes_array(tokens.astype(np.int64)).astype(np.float64)
    return layout, _quality(tokens, fitted, n_bytes, near)


def fit_transfer(
    n_bytes: FloatArray, seconds: FloatArray, what: str = "transfers"
) -> tuple[float, float, FitQuality]:
    """(goodput in bit/s, fixed seconds per transfer) from transfers that had the link alone.

    Where the time does not grow with the size, the goodput is the largest rate that there is.

    Raises:
        PrfaasError: too few points, or sizes that hardly differ.
    """
    _enough(len(seconds), what)
    _spread(n_bytes, what, "bytes")
    bits = n_bytes * BITS_PER_BYTE
    columns = np.column_stack([np.ones(len(seconds)), bits])
    (fixed_s, s_per_bit), near = robust_fit(columns, seconds)
    quality = _quality(bits, columns @ np.array([fixed_s, s_per_bit]), seconds, near, floor=1e-3)
    rate_bps = 1.0 / s_per_bit if s_per_bit > 1.0 / MAX_RATE_BPS else MAX_RATE_BPS
    return min(_short(rate_bps), MAX_RATE_BPS), _short(fixed_s), quality


def mean_batch(begins_s: FloatArray, ends_s: FloatArray) -> FloatArray:
    """For each of the sequences of one worker, how many ran on average between its begin and its end, itself counted.

    Args:
        begins_s: shape (n,).
        ends_s: shape (n,), not before the begins. One without length counts those that ran at its instant.
    """
    if not len(begins_s):
        return np.zeros(0)
    edges = np.sort(np.concatenate([begins_s, ends_s]))
    running = np.searchsorted(np.sort(begins_s), edges, side="right") - np.searchsorted(
        np.sort(ends_s), edges, side="right"
    )
    area = np.concatenate([[0.0], np.cumsum(np.diff(edges) * running[:-1])])
    spans: FloatArray = ends_s - begins_s
    total: FloatArray = np.interp(ends_s, edges, area) - np.interp(begins_s, edges, area)
    at = running[np.searchsorted(edges, begins_s, side="left")]
    out: FloatArray = np.maximum(at, 1.0)
    np.divide(total, spans, out=out, where=spans > 0.0)
    return out


def overlaps(begins_s: FloatArray, ends_s: FloatArray) -> BoolArray:
    """For each interval, whether another one of them overlaps it (touching ends do not count)."""
    n = len(begins_s)
    out = np.zeros(n, dtype=np.bool_)
    if n < 2:
        return out
    order = np.argsort(begins_s, kind="stable")
    begins, ends = begins_s[order], ends_s[order]
    latest = np.concatenate([[-math.inf], np.maximum.accumulate(ends)[:-1]])
    following = np.concatenate([begins[1:], [math.inf]])
    out[order] = (begins < latest) | (following < ends)
    return out
