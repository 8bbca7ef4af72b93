"""Intervals of means and ratios: bootstrap over seeds, moving blocks over the arrival time of one replayed trace.

Every interval is a 95% one. Random numbers come from a fixed seed, so that equal figures give equal intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 10_000
#: Length of a moving block of a replayed trace, in seconds of arrival time.
BLOCK_S = 60
#: Fewest independent values (seeds, or block lengths of a trace) that an interval is given for.
FEWEST = 5
#: Share of resamples without any spread above which the studentised bootstrap is not used.
_DEGENERATE = 0.01

Method = Literal["seeds", "blocks"]


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval; `low` and `high` are None where there are too few values for one."""

    mean: float
    low: float | None
    high: float | None
    n: int
    method: Method

    @property
    def sign(self) -> int:
        """1 or -1 when the interval excludes 0, else 0."""
        if self.low is not None and self.low > 0:
            return 1
        if self.high is not None and self.high < 0:
            return -1
        return 0

    def as_json(self) -> dict[str, Any]:
        """Plain mapping for JSON."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n, "method": self.method}


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


def block_interval(
    arrival_s: FloatArray, values: FloatArray, span_s: float, resamples: int = RESAMPLES
) -> Interval:
    """Moving-block bootstrap of the mean of per-request values along arrival time.

    Requests of one trace are not independent: a burst moves all that are in the system. Blocks of 60 s of
    arrival time are drawn with replacement, each starting at any second, and joined to the length of the trace.

    Args:
        arrival_s: arrival of each request in [0, span_s), shape (n,); several replays of the trace are pooled.
        values: their values, shape (n,).
        span_s: length of the trace.

    Returns:
        The interval; without limits for a trace shorter than five blocks. `n` is the number of block lengths.
    """
    n_bins = max(math.ceil(span_s), 1)
    blocks = n_bins // BLOCK_S
    mean = math.fsum(values.tolist()) / len(values) if len(values) else math.nan
    if blocks < FEWEST or len(values) == 0:
        return Interval(mean, None, None, blocks, "blocks")
    second = np.minimum(arrival_s.astype(np.int64), n_bins - 1)
    sums = np.concatenate(([0.0], np.cumsum(np.bincount(second, weights=values, minlength=n_bins))))
    counts = np.concatenate(([0.0], np.cumsum(np.bincount(second, minlength=n_bins))))
    block_sums, block_counts = sums[BLOCK_S:] - sums[:-BLOCK_S], counts[BLOCK_S:] - counts[:-BLOCK_S]
    starts = np.random.default_rng(n_bins).integers(len(block_sums), size=(resamples, blocks))
    drawn = block_counts[starts].sum(axis=1)
    means = block_sums[starts].sum(axis=1)[drawn > 0] / drawn[drawn > 0]
    # Seconds near both ends are in fewer blocks; centring takes that bias out.
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(means - means.mean(), [tail, 1.0 - tail])
    return Interval(mean, float(mean + low), float(mean + high), blocks, "blocks")


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
