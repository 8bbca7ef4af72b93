"""Rate profiles: files of windows with a mean arrival rate each, such as those that ServeGen publishes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.special import gammaincinv

from prfaas_env.base import MAX_S, PrfaasError
from prfaas_env.simulator.formulas import FloatArray
from prfaas_env.workload.formats import csv_fields, text_lines
from prfaas_env.workload.models import ProfileArrivals
from prfaas_env.workload.traces import resolve_trace_file

START_COLUMN, RATE_COLUMN, CV_COLUMN = "window_start_s", "total_rate_rps", "rate_weighted_mean_cv"


@dataclass(frozen=True)
class RateProfile:
    """A parsed file: window k holds on [edges_s[k], edges_s[k + 1]). The arrays are read-only.

    `edges_s` has shape (n + 1,), `rates_rps` and `cv` (n,). The last window is as long as the one before it.
    `cv` is the coefficient of variation of the gaps in a window; None when the file has no such column.
    """

    edges_s: FloatArray
    rates_rps: FloatArray
    cv: FloatArray | None

    def __len__(self) -> int:
        return len(self.rates_rps)

    @property
    def mean_rps(self) -> float:
        """Mean rate by time."""
        spans_s = np.diff(self.edges_s)
        return float(self.rates_rps @ spans_s / spans_s.sum())


def read_profile(path: Path) -> RateProfile:
    """Read a CSV of windows; columns are found by name; kept in memory until the file changes.

    Raises:
        PrfaasError: a bad file or line, named in the message.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None
    return _read_cached(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _read_cached(path: Path, mtime_ns: int, size: int) -> RateProfile:
    lines = text_lines(path)
    first = next(lines, None)
    if first is None:
        raise PrfaasError(f"{path}: the file is empty; a rate profile has one window per line")
    header = [name.strip().lower() for name in csv_fields(path, *first)]
    for name in (START_COLUMN, RATE_COLUMN):
        if name not in header:
            raise PrfaasError(f"{path}:{first[0]}: the header has no column {name!r}; found {header}")
    names = [name for name in (START_COLUMN, RATE_COLUMN, CV_COLUMN) if name in header]
    columns: dict[str, list[float]] = {name: [] for name in names}
    numbers: list[int] = []
    for number, line in lines:
        fields = csv_fields(path, number, line)
        if len(fields) != len(header):
            raise PrfaasError(
                f"{path}:{number}: {len(fields)} fields in {line!r}; the header has {len(header)}"
            )
        numbers.append(number)
        for name in names:
            columns[name].append(_number(path, number, name, fields[header.index(name)]))
    starts_s = np.array(columns[START_COLUMN])
    if len(starts_s) < 2:
        raise PrfaasError(
            f"{path}: {len(starts_s)} windows; at least 2 are allowed, so that their length shows"
        )
    back = np.flatnonzero(np.diff(starts_s) <= 0)
    if len(back):
        i = int(back[0]) + 1
        raise PrfaasError(
            f"{path}:{numbers[i]}: {START_COLUMN} is {starts_s[i]:g} after {starts_s[i - 1]:g}; it must rise"
        )
    cv = np.array(columns[CV_COLUMN]) if CV_COLUMN in columns else None
    profile = RateProfile(
        np.append(starts_s, 2 * starts_s[-1] - starts_s[-2]), np.array(columns[RATE_COLUMN]), cv
    )
    for array in (profile.edges_s, profile.rates_rps, *(() if cv is None else (cv,))):
        array.setflags(write=False)
    return profile


_LIMITS = {START_COLUMN: MAX_S, RATE_COLUMN: 1e9, CV_COLUMN: 1e9}


def _number(path: Path, number: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LIMITS[name]:
        raise PrfaasError(
            f"{path}:{number}: {name} is {text.strip()!r}; a number from 0 to {_LIMITS[name]:.0e} is allowed"
        )
    return value


@dataclass(frozen=True)
class RateCycle:
    """The slice of a profile that arrivals follow, in episode time, from 0 on; it repeats after its end.

    `start_s` has shape (k,) and begins with 0; `rates_rps` and `cv` (k,) hold from there to the next start.
    """

    start_s: FloatArray
    rates_rps: FloatArray
    cv: FloatArray
    period_s: float

    @property
    def mean_rps(self) -> float:
        """Mean rate by time."""
        return float(self.rates_rps @ np.diff(self.start_s, append=self.period_s) / self.period_s)


def rate_cycle(arrivals: ProfileArrivals, base_dir: Path | None = None) -> RateCycle:
    """Read the file of a law and cut, squeeze and scale it.

    Raises:
        PrfaasError: a bad file, a slice outside it, no CV column where one is asked for, or a slice without
            arrivals where a mean rate above 0 is asked for.
    """
    path = resolve_trace_file(arrivals.file, base_dir)
    profile = read_profile(path)
    first_s, last_s = float(profile.edges_s[0]), float(profile.edges_s[-1])
    low_s = first_s + arrivals.start_s
    high_s = last_s if arrivals.end_s is None else first_s + arrivals.end_s
    if low_s >= last_s or high_s > last_s:
        raise PrfaasError(
            f"arrivals: the slice {arrivals.start_s:g} to {high_s - first_s:g} s is not within "
            f"{arrivals.file}, which spans {last_s - first_s:g} s"
        )
    if arrivals.burstiness == "column" and profile.cv is None:
        raise PrfaasError(f"{path}: no column {CV_COLUMN!r}, which burstiness: column reads")
    a = int(np.searchsorted(profile.edges_s, low_s, side="right")) - 1
    b = int(np.searchsorted(profile.edges_s, high_s, side="left"))
    start_s = (np.maximum(profile.edges_s[a:b], low_s) - low_s) / arrivals.time_compression
    rates = profile.rates_rps[a:b]
    cv = np.ones(b - a) if profile.cv is None else np.minimum(profile.cv[a:b], arrivals.max_cv)
    cycle = RateCycle(start_s, rates, cv, (high_s - low_s) / arrivals.time_compression)
    if arrivals.rate_rps is None:
        return cycle
    if cycle.mean_rps == 0 and arrivals.rate_rps > 0:
        raise PrfaasError(f"{path}: the slice has no arrivals, so no rate scales it")
    factor = arrivals.rate_rps / cycle.mean_rps if arrivals.rate_rps > 0 else 0.0
    return RateCycle(start_s, rates * factor, cv, cycle.period_s)


def gap_quantiles(cv: float) -> Callable[[FloatArray], FloatArray]:
    """Quantile function of gamma gaps with mean 1 and this coefficient of variation; at 0 every gap is 1."""
    shape = cv**-2.0 if cv > 1e-3 else math.inf
    if math.isinf(shape):
        return np.ones_like
    return lambda u: np.asarray(gammaincinv(shape, u) / shape, dtype=np.float64)
