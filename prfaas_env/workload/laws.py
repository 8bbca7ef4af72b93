"""Length laws as the theory reads them: tails, partial means, quantiles, expectations.

A law is a mixture of parts. A regime chain gives one part per value, weighted by its probability: each value
holds for the same mean time, so that is its long-run share. The log-normal law is the continuous one of the
paper (section 4.1); rounding down to whole tokens lowers a drawn length by less than one token. The other
laws are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from prfaas_env.simulator.formulas import FloatArray
from prfaas_env.workload.lengths import poisson_table, truncated_normal_quantile
from prfaas_env.workload.models import (
    EmpiricalLengths,
    FixedLengths,
    Lengths,
    LogNormalLengths,
    RegimeChain,
)

#: Gauss-Legendre nodes on each interval of a continuous law.
_ORDER = 8
#: Intervals of a continuous law before thresholds cut them: half of equal weight, half of equal width.
_INTERVALS = 128


class Part(ABC):
    """One component of a mixture."""

    @abstractmethod
    def split(self, t: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """P(L > t), P(L <= t), E[L; L > t], E[L; L <= t], each of the shape of `t` (1-d)."""

    @abstractmethod
    def quantile(self, q: FloatArray) -> FloatArray:
        """Smallest length whose probability of not being exceeded is at least q."""

    @abstractmethod
    def nodes(self, cuts: FloatArray, intervals: int) -> tuple[FloatArray, FloatArray]:
        """Lengths and weights (sum 1) for expectations; no node stands for lengths on both sides of a cut."""


@dataclass(frozen=True)
class _LogNormal(Part):
    mu: float
    sigma: float
    a: float
    b: float

    def _standard(self, t: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.clip((np.log(np.maximum(t, 0.0)) - self.mu) / self.sigma, self.a, self.b)

    def split(self, t: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        z = self._standard(t)
        whole = log_mass(self.a, self.b)
        # E[X; X > t] = exp(mu + s^2 / 2) P(Z > z - s), the shifted normal.
        s = self.sigma
        scale = self.mu + s * s / 2 - whole
        return (
            np.exp(log_mass(z, self.b) - whole),
            np.exp(log_mass(self.a, z) - whole),
            np.exp(log_mass(z - s, self.b - s) + scale),
            np.exp(log_mass(self.a - s, z - s) + scale),
        )

    def quantile(self, q: FloatArray) -> FloatArray:
        x = np.exp(self.mu + self.sigma * truncated_normal_quantile(q, self.a, self.b))
        return np.clip(x, np.exp(self.mu + self.sigma * self.a), np.exp(self.mu + self.sigma * self.b))

    def nodes(self, cuts: FloatArray, intervals: int) -> tuple[FloatArray, FloatArray]:
        half = np.linspace(0.0, 1.0, intervals // 2 + 1)
        by_weight = truncated_normal_quantile(half, self.a, self.b)
        low, high = truncated_normal_quantile(np.array([1e-15, 1.0 - 1e-15]), self.a, self.b)
        edges = np.unique(np.concatenate([by_weight, low + (high - low) * half, self._standard(cuts)]))
        left, right = edges[:-1, None], edges[1:, None]
        points, weights = np.polynomial.legendre.leggauss(_ORDER)
        z = left + (right - left) * (points[None, :] + 1.0) / 2.0
        # Density relative to its peak among the nodes, then scaled to the exact weight of the interval.
        nearest = np.take_along_axis(z, np.abs(z).argmin(axis=1)[:, None], axis=1)
        density = weights[None, :] * np.exp((nearest - z) * (nearest + z) / 2.0)
        share = np.exp(log_mass(left, right) - log_mass(self.a, self.b))
        weight = share * density / density.sum(axis=1, keepdims=True)
        return np.exp(self.mu + self.sigma * z).ravel(), (weight / weight.sum()).ravel()


@dataclass(frozen=True)
class _Atoms(Part):
    """Weights on single lengths, sorted."""

    tokens: FloatArray
    weights: FloatArray

    def split(self, t: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        k = np.searchsorted(self.tokens, t, side="right")
        return (*_sums_at(self.weights, k), *_sums_at(self.weights * self.tokens, k))

    def quantile(self, q: FloatArray) -> FloatArray:
        # A little less than q, so that a weight which sums to q but for rounding counts as reached.
        k = np.searchsorted(np.cumsum(self.weights), q - 1e-12, side="left")
        return self.tokens[np.minimum(k, len(self.tokens) - 1)]

    def nodes(self, cuts: FloatArray, intervals: int) -> tuple[FloatArray, FloatArray]:
        return self.tokens, self.weights


def log_mass(low: ArrayLike, high: ArrayLike) -> FloatArray:
    """log P(low < Z <= high) of a standard normal, exact far into both tails; -inf for an empty range."""
    low, high = np.broadcast_arrays(np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64))
    flip = low + high > 0
    # On the left side, where both probabilities are small numbers.
    below = log_ndtr(np.where(flip, -high, low))
    upto = log_ndtr(np.where(flip, -low, high))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = upto + np.log(-np.expm1(below - upto))
    return np.asarray(np.where(high > low, value, -np.inf), dtype=np.float64)


def _above_below(tokens: FloatArray, values: FloatArray, t: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sums of `values` at tokens > t and <= t; `tokens` sorted."""
    return _sums_at(values, np.searchsorted(tokens, t, side="right"))


def _sums_at(values: FloatArray, k: NDArray[np.intp]) -> tuple[FloatArray, FloatArray]:
    """Sums of `values` from each place of `k` on, and before it. Two running sums, so neither cancels."""
    n = len(values)
    below, above = np.zeros(n + 1), np.zeros(n + 1)
    np.cumsum(values, out=below[1:])
    np.cumsum(values[::-1], out=above[1:])
    return above[n - k], below[k]


class LengthLaw:
    """Distribution of a length in tokens. Thresholds and probabilities: numbers or arrays of any shape."""

    def __init__(self, parts: Sequence[tuple[float, Part]]) -> None:
        self._parts = [(weight, part) for weight, part in parts if weight > 0]

    @property
    def parts(self) -> list[tuple[float, Part]]:
        """Components of the mixture with their weights: one per regime that occurs."""
        return self._parts

    def _split(self, t: ArrayLike) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        thresholds = np.asarray(t, dtype=np.float64)
        sums = np.zeros((4, thresholds.size))
        for weight, part in self._parts:
            for total, some in zip(sums, part.split(thresholds.ravel()), strict=True):
                total += weight * some
        # Rounding may leave a probability one unit above 1.
        sums[:2] = np.minimum(sums[:2], 1.0)
        above, below, sum_above, sum_below = sums.reshape(4, *thresholds.shape)
        return above, below, sum_above, sum_below

    @cached_property
    def mean(self) -> float:
        """Mean length."""
        return float(self._split(0.0)[2])

    def survival(self, t: ArrayLike) -> FloatArray:
        """P(L > t): the share that a threshold t offloads (p of the paper)."""
        return self._split(t)[0]

    def mean_above(self, t: ArrayLike) -> FloatArray:
        """E[L | L > t] (l_long of the paper); NaN where no length is above."""
        above, _, sum_above, _ = self._split(t)
        return _ratio(sum_above, above)

    def mean_below(self, t: ArrayLike) -> FloatArray:
        """E[L | L <= t] (l_short of the paper); NaN where no length is at or below."""
        _, below, _, sum_below = self._split(t)
        return _ratio(sum_below, below)

    def quantile(self, q: ArrayLike) -> FloatArray:
        """Length that a share q does not exceed (the smallest such), same shape as `q`."""
        probability = np.asarray(q, dtype=np.float64)
        if probability.size and not (probability.min() >= 0.0 and probability.max() <= 1.0):
            raise ValueError("a quantile needs probabilities from 0 to 1")
        flat = probability.ravel()
        each = np.stack([part.quantile(flat) for _, part in self._parts])
        # The quantile of a mixture lies between those of its parts; bisect down to neighbouring floats.
        low, high = each.min(axis=0), each.max(axis=0)
        for _ in range(200):
            middle = (low + high) / 2.0
            if np.all((middle <= low) | (middle >= high)):
                break
            reached = self._split(middle)[1] >= flat - 1e-12
            low, high = np.where(reached, low, middle), np.where(reached, middle, high)
        at_low = self._split(low)[1] >= flat - 1e-12
        return np.asarray(np.where(at_low, low, high).reshape(probability.shape), dtype=np.float64)

    def quadrature(self, n: int = 1024) -> tuple[FloatArray, FloatArray]:
        """Lengths (sorted) and weights (sum 1) so that E[f(L)] is about sum(weights * f(tokens)).

        A continuous part gets about n nodes (Gauss-Legendre on intervals of equal weight and of equal width
        in the logarithm), a discrete one all its lengths.
        """
        return self._nodes(np.zeros(0), max(n // _ORDER, 2))

    def _nodes(self, cuts: FloatArray, intervals: int) -> tuple[FloatArray, FloatArray]:
        found = [(weight, *part.nodes(cuts, intervals)) for weight, part in self._parts]
        tokens = np.concatenate([nodes for _, nodes, _ in found])
        weights = np.concatenate([weight * w for weight, _, w in found])
        order = np.argsort(tokens, kind="stable")
        return tokens[order], weights[order]

    def partial_expectation(
        self, f: Callable[[FloatArray], FloatArray], thresholds: ArrayLike
    ) -> tuple[FloatArray, FloatArray]:
        """E[f(L); L > t] and E[f(L); L <= t] for each threshold, not divided by the probabilities.

        Args:
            f: maps an array of lengths (float, sorted) to values of the same shape; called once.
            thresholds: tokens, any shape, any order.

        Returns:
            `(above, below)`, both of the shape of `thresholds`; they sum to E[f(L)].
        """
        t = np.asarray(thresholds, dtype=np.float64)
        tokens, weights = self._nodes(t.ravel(), _INTERVALS)
        above, below = _above_below(tokens, weights * f(tokens), t.ravel())
        return above.reshape(t.shape), below.reshape(t.shape)

    def expectation(self, f: Callable[[FloatArray], FloatArray]) -> float:
        """E[f(L)] for a vectorised f."""
        return float(self.partial_expectation(f, 0.0)[0])


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0.0, numerator / denominator, np.nan)


def atoms_law(tokens: FloatArray, weights: FloatArray) -> LengthLaw:
    """The law with these weights (sum 1) on these lengths (sorted)."""
    return LengthLaw([(1.0, _Atoms(tokens, weights))])


def empirical_law(tokens: ArrayLike) -> LengthLaw:
    """The law that gives each observed length the same weight."""
    values, counts = np.unique(np.asarray(tokens, dtype=np.float64), return_counts=True)
    return atoms_law(values, counts / counts.sum())


def length_law(lengths: Lengths) -> LengthLaw:
    """Long-run law of a configured length."""
    if isinstance(lengths, FixedLengths):
        return empirical_law([lengths.tokens])
    if isinstance(lengths, EmpiricalLengths):
        return empirical_law(lengths.tokens)
    if isinstance(lengths, LogNormalLengths):
        return LengthLaw(
            [
                (share, _LogNormal(mu, lengths.sigma, *lengths.standard_range(mu)))
                for share, mu in _regimes(lengths.mu)
            ]
        )
    return LengthLaw(
        [(share, _poisson_atoms(mean, lengths.min_tokens)) for share, mean in _regimes(lengths.mean_tokens)]
    )


def _regimes(value: float | RegimeChain) -> list[tuple[float, float]]:
    """(long-run share, value) of each regime."""
    if isinstance(value, RegimeChain):
        return list(zip(value.probabilities, value.values, strict=True))
    return [(1.0, value)]


def _poisson_atoms(mean: float, min_tokens: int) -> _Atoms:
    first, cumulative = poisson_table(mean)
    weights = np.diff(np.concatenate([np.zeros(1), cumulative]))
    tokens = np.maximum(np.arange(first, first + len(weights)), min_tokens)
    values, place = np.unique(tokens, return_inverse=True)
    summed = np.bincount(place, weights=weights)
    return _Atoms(values.astype(np.float64), summed / summed.sum())
