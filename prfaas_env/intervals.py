"""A mean with its 95% interval, and the moving-block bootstrap along the arrival time of one stretch of traffic.

Random numbers come from a fixed seed, so that equal figures give equal intervals.
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
