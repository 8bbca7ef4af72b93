"""Arrival instants of synthetic workloads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prfaas_env.base import MAX_S, PrfaasError, stream
from prfaas_env.simulator.formulas import FloatArray, IntArray, ns_from_s
from prfaas_env.workload.models import (
    Arrivals,
    DeterministicArrivals,
    GammaArrivals,
    PoissonArrivals,
    RegimeArrivals,
)
from prfaas_env.workload.regimes import sample_chain

#: Sub-stream of "arrivals" for the path of the rate (1 assigns requests to PD clusters).
RATE_CHAIN_STREAM = 2
#: Most requests of one table; more is a mistake in units.
MAX_REQUESTS = 50_000_000


def sample_arrivals_ns(
    arrivals: Arrivals, seed: int, *, horizon_s: float | None = None, n_requests: int | None = None
) -> IntArray:
    """Arrival instants in nanoseconds, sorted, int64 of shape (n,).

    Every process is a unit-rate renewal process read through the cumulative rate, so that the draws are
    indexed by request: another rate moves the same requests, a longer horizon appends to the shorter one.
    All draws come from the stream "arrivals" of the episode; the rate chain has a sub-stream of its own.

    Args:
        arrivals: the law.
        seed: episode seed.
        horizon_s: all arrivals in [0, horizon_s), or
        n_requests: exactly the first `n_requests` arrivals. Give one of the two.

    Raises:
        PrfaasError: neither or both limits, a negative limit, more than `MAX_REQUESTS` requests, or
            `n_requests` of a process that has rate 0.
    """
    _check_limits(horizon_s, n_requests)
    if horizon_s is None:
        assert n_requests is not None
        _check_count(n_requests)
        times_s = _first(arrivals, seed, n_requests)
        _check_span(n_requests, float(times_s[-1]) if n_requests else 0.0)
        return np.rint(times_s * 1e9).astype(np.int64)
    # a very low rate puts its next arrival beyond what nanoseconds can hold
    with np.errstate(over="ignore"):
        times_s = np.minimum(_until(arrivals, seed, horizon_s), horizon_s + 1.0)
    times_ns = np.rint(times_s * 1e9).astype(np.int64)
    return times_ns[: int(np.searchsorted(times_ns, ns_from_s(horizon_s), side="left"))]


def _check_limits(horizon_s: float | None, n_requests: int | None) -> None:
    if (horizon_s is None) == (n_requests is None):
        raise PrfaasError("give either horizon_s or n_requests to say how many requests to draw")
    if horizon_s is not None and not 0 <= horizon_s <= MAX_S:
        raise PrfaasError(f"horizon_s is {horizon_s}; allowed: 0 up to 1e9 seconds")
    if n_requests is not None and n_requests < 0:
        raise PrfaasError(f"n_requests is {n_requests}; allowed: 0 or more")


def _check_count(n: float) -> None:
    if n > MAX_REQUESTS:
        raise PrfaasError(
            f"this workload has about {n:.3g} requests; at most {MAX_REQUESTS:,} are allowed in one table"
        )


def _check_span(n: int, last_s: float) -> None:
    if not last_s <= MAX_S:
        raise PrfaasError(f"arrivals: rate_rps is so low that {n} requests take more than {MAX_S:.0e} s")


def _first(arrivals: Arrivals, seed: int, n: int) -> FloatArray:
    """The first n arrival instants in seconds."""
    if n == 0:
        return np.zeros(0)
    rate_rps = arrivals.rate_rps.mean if isinstance(arrivals, RegimeArrivals) else arrivals.rate_rps
    if rate_rps <= 0:
        raise PrfaasError(f"arrivals: rate_rps is 0, so {n} requests never arrive; give horizon_s instead")
    _check_span(n, n / rate_rps)
    if isinstance(arrivals, DeterministicArrivals):
        return np.arange(1, n + 1) / arrivals.rate_rps
    if not isinstance(arrivals, RegimeArrivals):
        return np.cumsum(_unit_gaps(arrivals, seed)(n)) / arrivals.rate_rps
    counts = np.cumsum(stream(seed, "arrivals").standard_exponential(n))
    end_s = 2.0 * n / rate_rps + arrivals.rate_rps.mean_holding_s
    while True:
        start_s, rates, cumulative = _cumulative_rate(arrivals, seed, end_s)
        if cumulative[-1] > counts[-1]:
            return _invert(counts, start_s, rates, cumulative)
        end_s *= 2.0


def _until(arrivals: Arrivals, seed: int, horizon_s: float) -> FloatArray:
    """Arrival instants in seconds up to a little past the horizon."""
    if isinstance(arrivals, RegimeArrivals):
        start_s, rates, cumulative = _cumulative_rate(arrivals, seed, horizon_s)
        counts = _renewals_until(stream(seed, "arrivals").standard_exponential, 1.0, float(cumulative[-1]))
        return _invert(counts[counts < cumulative[-1]], start_s, rates, cumulative)
    expected = arrivals.rate_rps * horizon_s
    _check_count(expected)
    if expected == 0:
        return np.zeros(0)
    if isinstance(arrivals, DeterministicArrivals):
        return np.arange(1, int(expected) + 2) / arrivals.rate_rps
    squared_cv = 1.0 / arrivals.shape if isinstance(arrivals, GammaArrivals) else 1.0
    return _renewals_until(_unit_gaps(arrivals, seed), squared_cv, expected) / arrivals.rate_rps


def _unit_gaps(arrivals: PoissonArrivals | GammaArrivals, seed: int) -> Callable[[int], FloatArray]:
    """A source of gaps with mean 1; gamma gaps of shape 1 are the very same numbers as exponential ones."""
    rng = stream(seed, "arrivals")
    if isinstance(arrivals, PoissonArrivals):
        return rng.standard_exponential
    shape = arrivals.shape
    return lambda n: rng.standard_gamma(shape, n) / shape


def _renewals_until(gaps: Callable[[int], FloatArray], squared_cv: float, end: float) -> FloatArray:
    """Renewal instants of unit rate, at least up to `end`."""
    _check_count(end)
    drawn = np.zeros(0)
    times = np.zeros(1)
    while times[-1] <= end:
        left = end - float(times[-1])
        drawn = np.concatenate([drawn, gaps(int(left + 5.0 * np.sqrt(left * squared_cv)) + 32)])
        # Summed from the start each time, so that the size of the blocks leaves no trace in the rounding.
        times = np.cumsum(drawn)
    return times


def _cumulative_rate(
    arrivals: RegimeArrivals, seed: int, end_s: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Path of the rate on [0, end_s].

    Returns:
        Starts (k,), rates (k,), expected number of arrivals up to each start and up to the end (k + 1,).
    """
    start_s, rates = sample_chain(arrivals.rate_rps, end_s, stream(seed, "arrivals", RATE_CHAIN_STREAM))
    spans_s = np.diff(np.append(start_s, end_s))
    return start_s, rates, np.concatenate([np.zeros(1), np.cumsum(rates * spans_s)])


def _invert(counts: FloatArray, start_s: FloatArray, rates: FloatArray, cumulative: FloatArray) -> FloatArray:
    """Instants at which the cumulative rate reaches `counts` (below its last value); rate 0 is skipped."""
    k = np.searchsorted(cumulative, counts, side="right") - 1
    return start_s[k] + (counts - cumulative[k]) / rates[k]
