"""Intervals of means and ratios by bootstrap over seeds; that along one replayed trace is in `prfaas_env.intervals`.

Every interval is a 95% one. Random numbers come from a fixed seed, so that equal figures give equal intervals.
"""

from __future__ import annotations

import math

import numpy as np

from prfaas_env.intervals import CONFIDENCE, FEWEST, RESAMPLES, FloatArray, Interval

#: Share of resamples without any spread above which the studentised bootstrap is not used.
_DEGENERATE = 0.01


def seed_interval(values: FloatArray, resamples: int = RESAMPLES) -> Interval:
    """Studentised bootstrap of the mean of independent values (one per seed), shape (n,), all finite.

    The studentised form (bootstrap-t) keeps its coverage for ten skewed values, where plain percentiles are too
    narrow. Where many resamples have no spread at all (nearly all values equal) plain percentiles are used.

    Returns:
        The interval; without limits below five values.
    """
    n = len(values)
    mean = math.fsum(values.tolist()) / n if n else math.nan
    if n < FEWEST:
        return Interval(mean, None, None, n, "seeds")
    spread = float(np.std(values, ddof=1))
    if spread <= 1e-12 * max(abs(mean), 1e-300):
        return Interval(mean, mean, mean, n, "seeds")
    draws = values[np.random.default_rng(n).integers(n, size=(resamples, n))]
    means = draws.mean(axis=1)
    errors = draws.std(axis=1, ddof=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    degenerate = errors < 1e-9 * spread
    if degenerate.mean() > _DEGENERATE:
        low, high = np.quantile(means, [tail, 1.0 - tail])
        return Interval(mean, float(low), float(high), n, "seeds")
    t = (means[~degenerate] - mean) / errors[~degenerate]
    t_low, t_high = np.quantile(t, [tail, 1.0 - tail])
    return Interval(mean, float(mean - t_high * spread), float(mean - t_low * spread), n, "seeds")


def ratio_interval(above: FloatArray, below: FloatArray, resamples: int = RESAMPLES) -> Interval:
    """Paired bootstrap of mean(above) / mean(below): seeds are drawn, both means are of the same ones.

    Args:
        above: one value per seed, shape (n,), finite.
        below: likewise, of the same seeds.

    Returns:
        The ratio with percentile limits; NaN where the mean of `below` is 0. Without limits below five seeds, and
        where that mean has the other sign in more resamples than an interval leaves out on one side.
    """
    n = len(above)
    total = math.fsum(below.tolist())
    ratio = math.fsum(above.tolist()) / total if total else math.nan
    if n < FEWEST or not total:
        return Interval(ratio, None, None, n, "seeds")
    drawn = np.random.default_rng(n).integers(n, size=(resamples, n))
    sums = below[drawn].sum(axis=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    same_sign = sums * total > 0.0
    if 1.0 - same_sign.mean() > tail:
        return Interval(ratio, None, None, n, "seeds")
    low, high = np.quantile(above[drawn].sum(axis=1)[same_sign] / sums[same_sign], [tail, 1.0 - tail])
    return Interval(ratio, float(low), float(high), n, "seeds")


def histogram_quantile(counts: FloatArray, edges: FloatArray, q: float) -> FloatArray:
    """Quantile of counted values, linear within a bin; NaN without values.

    Args:
        counts: values per bin, shape (..., bins).
        edges: of the bins, shape (bins + 1,); the last one may be infinite, and its bin then gives its lower edge.
        q: between 0 and 1.

    Returns:
        The quantiles, shape (...).
    """
    reached = np.cumsum(counts, axis=-1)
    wanted = q * reached[..., -1]
    k = np.minimum((reached < wanted[..., np.newaxis]).sum(axis=-1), counts.shape[-1] - 1)
    inside = np.take_along_axis(counts, k[..., np.newaxis], axis=-1)[..., 0]
    before = np.take_along_axis(reached, k[..., np.newaxis], axis=-1)[..., 0] - inside
    part = np.divide(wanted - before, inside, out=np.zeros_like(wanted), where=inside > 0)
    width = np.diff(np.where(np.isfinite(edges), edges, edges[-2]))
    found: FloatArray = np.where(reached[..., -1] > 0, edges[k] + part * width[k], math.nan)
    return found


def quantile_ratio_interval(
    above: FloatArray, below: FloatArray, edges: FloatArray, q: float, resamples: int = RESAMPLES
) -> Interval:
    """Paired bootstrap over seeds of the ratio of two quantiles over all requests of all seeds together.

    Args:
        above: requests per seed and bin, shape (n, bins).
        below: likewise, of the same seeds.
        edges: of the bins, see `histogram_quantile`.
        q: between 0 and 1.

    Returns:
        The ratio with percentile limits; without them below five seeds.
    """
    n = len(above)

    def ratio(weights: FloatArray) -> FloatArray:
        top, bottom = (histogram_quantile(weights @ counts, edges, q) for counts in (above, below))
        found: FloatArray = np.divide(top, bottom, out=np.full_like(top, math.nan), where=bottom > 0)
        return found

    above, below = above.astype(np.float64), below.astype(np.float64)
    whole = float(ratio(np.ones((1, n)))[0]) if n else math.nan
    if n < FEWEST or math.isnan(whole):
        return Interval(whole, None, None, n, "seeds")
    rng = np.random.default_rng(n)
    found = []
    for first in range(0, resamples, 1000):  # a few rows at a time: a row is a whole histogram
        size = min(1000, resamples - first)
        drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, np.newaxis]
        weights = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)
        found.append(ratio(weights))
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.nanquantile(np.concatenate(found), [tail, 1.0 - tail])
    return Interval(whole, float(low), float(high), n, "seeds")
