"""Arrival instants of synthetic workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prfaas_env.base import MAX_S, PrfaasError, stream
from prfaas_env.simulator.formulas import FloatArray, IntArray, ns_from_s
from prfaas_env.workload.models import (
    Arrivals,
    DeterministicArrivals,
    GammaArrivals,
    PoissonArrivals,
    ProfileArrivals,
    RegimeArrivals,
)
from prfaas_env.workload.rate_profile import RateCycle, gap_quantiles, rate_cycle
from prfaas_env.workload.regimes import sample_chain

#: Sub-stream of "arrivals" for the path of the rate (1 assigns requests to PD clusters).
RATE_CHAIN_STREAM = 2
#: Most requests of one table; more is a mistake in units.
MAX_REQUESTS = 50_000_000
#: Most windows of a rate profile in one episode.
MAX_WINDOWS = 10_000_000


def mean_arrival_rps(arrivals: Arrivals, base_dir: Path | None = None) -> float:
    """Long-run rate of a law, per second.

    Raises:
        PrfaasError: a bad file of a rate profile.
    """
    if isinstance(arrivals, RegimeArrivals):
        return arrivals.rate_rps.mean
    if arrivals.rate_rps is None:
        return rate_cycle(arrivals, base_dir).mean_rps
    return arrivals.rate_rps


def sample_arrivals_ns(
    arrivals: Arrivals,
    seed: int,
    *,
    horizon_s: float | None = None,
    n_requests: int | None = None,
    base_dir: Path | None = None,
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
        base_dir: folder against which the path of a rate profile is read.

    Raises:
        PrfaasError: neither or both limits, a negative limit, more than `MAX_REQUESTS` requests,
            `n_requests` of a process that has rate 0, or a bad file of a rate profile.
    """
    _check_limits(horizon_s, n_requests)
    if horizon_s is None:
        assert n_requests is not None
        _check_count(n_requests)
        times_s = _first(arrivals, seed, n_requests, base_dir)
        _check_span(n_requests, float(times_s[-1]) if n_requests else 0.0)
        return np.rint(times_s * 1e9).astype(np.int64)
    # a very low rate puts its next arrival beyond what nanoseconds can hold
    with np.errstate(over="ignore"):
        times_s = np.minimum(_until(arrivals, seed, horizon_s, base_dir), horizon_s + 1.0)
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


def _first(arrivals: Arrivals, seed: int, n: int, base_dir: Path | None) -> FloatArray:
    """The first n arrival instants in seconds."""
    if n == 0:
        return np.zeros(0)
    rate_rps = mean_arrival_rps(arrivals, base_dir)
    if rate_rps <= 0:
        raise PrfaasError(f"arrivals: rate_rps is 0, so {n} requests never arrive; give horizon_s instead")
    _check_span(n, n / rate_rps)
    if isinstance(arrivals, RegimeArrivals | ProfileArrivals):
        return _first_on_path(arrivals, seed, n, rate_rps, base_dir)
    if isinstance(arrivals, DeterministicArrivals):
        return np.arange(1, n + 1) / arrivals.rate_rps
    return np.cumsum(_unit_gaps(arrivals, seed)(n)) / arrivals.rate_rps


def _first_on_path(
    arrivals: RegimeArrivals | ProfileArrivals, seed: int, n: int, rate_rps: float, base_dir: Path | None
) -> FloatArray:
    """The first n arrival instants of a rate that changes: the path is prolonged until they fit."""
    if isinstance(arrivals, ProfileArrivals):
        cycle = rate_cycle(arrivals, base_dir)
        end_s = 2.0 * n / rate_rps + cycle.period_s
    else:
        cycle = None
        end_s = 2.0 * n / rate_rps + arrivals.rate_rps.mean_holding_s
    while True:
        path = _path(arrivals, cycle, seed, end_s)
        counts = _counts_on_path(arrivals, seed, path, n)
        if len(counts) >= n:
            return _invert(counts[:n], path.start_s, path.rates, path.cumulative)
        end_s *= 2.0


def _until(arrivals: Arrivals, seed: int, horizon_s: float, base_dir: Path | None) -> FloatArray:
    """Arrival instants in seconds up to a little past the horizon."""
    if isinstance(arrivals, RegimeArrivals | ProfileArrivals):
        cycle = rate_cycle(arrivals, base_dir) if isinstance(arrivals, ProfileArrivals) else None
        path = _path(arrivals, cycle, seed, horizon_s)
        counts = _counts_on_path(arrivals, seed, path, None)
        return _invert(counts, path.start_s, path.rates, path.cumulative)
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


@dataclass(frozen=True)
class _Path:
    """A rate that changes, on [0, end]: `rates[k]` and `cv[k]` hold from `start_s[k]` on.

    `cumulative` (k + 1,) is the expected number of arrivals up to each start and up to the end.
    """

    start_s: FloatArray
    rates: FloatArray
    cv: FloatArray
    cumulative: FloatArray


def _path(
    arrivals: RegimeArrivals | ProfileArrivals, cycle: RateCycle | None, seed: int, end_s: float
) -> _Path:
    """Path of the rate on [0, end_s]."""
    if isinstance(arrivals, RegimeArrivals):
        start_s, rates = sample_chain(arrivals.rate_rps, end_s, stream(seed, "arrivals", RATE_CHAIN_STREAM))
        cv = np.ones(len(rates))
    else:
        assert cycle is not None
        start_s, rates, cv = _repeated(cycle, end_s)
    spans_s = np.diff(np.append(start_s, end_s))
    return _Path(start_s, rates, cv, np.concatenate([np.zeros(1), np.cumsum(rates * spans_s)]))


def _repeated(cycle: RateCycle, end_s: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Starts, rates and CVs of the windows that begin before `end_s` (at least one)."""
    k = len(cycle.start_s)
    times = int(end_s / cycle.period_s) + 1
    if times * k > MAX_WINDOWS:
        raise PrfaasError(
            f"arrivals: the rate profile has about {times * k:.3g} windows in {end_s:g} s; allowed: "
            f"{MAX_WINDOWS:,}; check time_compression"
        )
    start_s = (np.arange(times)[:, None] * cycle.period_s + cycle.start_s).ravel()
    n = max(int(np.searchsorted(start_s, end_s, side="left")), 1)
    return start_s[:n], np.tile(cycle.rates_rps, times)[:n], np.tile(cycle.cv, times)[:n]


def _counts_on_path(
    arrivals: RegimeArrivals | ProfileArrivals, seed: int, path: _Path, n: int | None
) -> FloatArray:
    """Expected number of arrivals up to each arrival: renewals of unit rate, below the last cumulative rate.

    Args:
        n: at most that many; None = all.
    """
    end = float(path.cumulative[-1])
    rng = stream(seed, "arrivals")
    if isinstance(arrivals, ProfileArrivals) and arrivals.burstiness == "column":
        counts = _bursty_renewals(rng, path, n)
    elif n is not None:
        counts = np.cumsum(rng.standard_exponential(n))
    else:
        counts = _renewals_until(rng.standard_exponential, 1.0, end)
    return counts[counts < end]


def _bursty_renewals(rng: np.random.Generator, path: _Path, n: int | None) -> FloatArray:
    """Renewals whose gap has the CV of the window in which it begins.

    Arrival i takes the i-th uniform number, whatever the windows. The mean gap is 1 in every window, so the
    long-run rate is that of the path.
    """
    end = float(path.cumulative[-1])
    if n is None:
        _check_count(end)
    quantiles = {float(cv): gap_quantiles(float(cv)) for cv in np.unique(path.cv)}
    blocks: list[FloatArray] = []
    drawn = np.zeros(0)
    position, count = 0.0, 0
    while position < end and (n is None or count < n):
        k = int(np.searchsorted(path.cumulative, position, side="right")) - 1
        window_end = float(path.cumulative[k + 1])
        left = window_end - position
        wanted = int(left + 3.0 * path.cv[k] * np.sqrt(left)) + 8
        if len(drawn) < wanted:
            drawn = np.concatenate([drawn, rng.random(max(wanted, 1024))])
        gaps = quantiles[float(path.cv[k])](drawn[:wanted])
        # Added one after the other from the position, so that the size of the blocks leaves no trace.
        times = np.cumsum(np.concatenate(([position], gaps)))[1:]
        taken = min(int(np.searchsorted(times, window_end, side="left")) + 1, wanted)
        blocks.append(times[:taken])
        drawn = drawn[taken:]
        position, count = float(times[taken - 1]), count + taken
        _check_count(count)
    counts = np.concatenate(blocks) if blocks else np.zeros(0)
    return counts if n is None else counts[:n]


def _invert(counts: FloatArray, start_s: FloatArray, rates: FloatArray, cumulative: FloatArray) -> FloatArray:
    """Instants at which the cumulative rate reaches `counts` (below its last value); rate 0 is skipped."""
    k = np.searchsorted(cumulative, counts, side="right") - 1
    return start_s[k] + (counts - cumulative[k]) / rates[k]
