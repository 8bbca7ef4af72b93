"""The last 15 minutes of a router in steps of 5 s, in bounded memory.

Requests are counted where they pass (a few additions each); everything else is read by a timer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from prfaas_env.telemetry import LENGTH_BIN_EDGES_TOKENS, N_LENGTH_BINS, length_bin
from prfaas_serving.paths import finite

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from prfaas_serving.choice import Route
    from prfaas_serving.fleet import Pool
    from prfaas_serving.forward import Forwarder

STEP_S = 5.0
N_STEPS = 180
#: First-token times are counted in log bins from this time on, each this much wider than the one before, so that a
#: quantile is off by at most half of that; the last bin begins above an hour.
TTFT_BIN_MIN_S = 0.001
TTFT_BIN_RATIO = 1.05
N_TTFT_BINS = 311
_LOG_RATIO = math.log(TTFT_BIN_RATIO)
QUANTILES = (("p50_s", 0.5), ("p90_s", 0.9), ("p99_s", 0.99))
#: Conversions remembered.
_N_CONVERSIONS = 50

Counts = NDArray[np.int64]


def ttft_bin(ttft_s: float) -> int:
    """Log bin of a first-token time; shorter and longer ones fall into the end bins."""
    if ttft_s <= TTFT_BIN_MIN_S:
        return 0
    return min(int(math.log(ttft_s / TTFT_BIN_MIN_S) / _LOG_RATIO), N_TTFT_BINS - 1)


def quantile_s(counts: Counts, share: float) -> float | None:
    """A quantile (nearest rank) of times counted in log bins, as the geometric middle of its bin; None without any.

    Args:
        counts: shape (N_TTFT_BINS,).
        share: in (0, 1].
    """
    n = int(counts.sum())
    if n == 0:
        return None
    rank = max(math.ceil(share * n), 1)
    k = int(np.searchsorted(np.cumsum(counts), rank))
    return TTFT_BIN_MIN_S * float(TTFT_BIN_RATIO ** (k + 0.5))


def quantiles(counts: Counts) -> dict[str, float | None]:
    """The quantiles that are shown."""
    return {name: quantile_s(counts, share) for name, share in QUANTILES}


@dataclass(frozen=True, slots=True)
class Step:
    """What was seen in one step. Rates are over its true length; depths and counts are of its end."""

    unix_s: float
    arrivals_rps: float
    remote_rps: float
    finished_rps: float
    good_rps: float
    refused_rps: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    open_requests: int
    prefill_workers: int
    decode_workers: int
    both_workers: int
    converting_workers: int
    threshold_tokens: float | None
    margin_s: float | None
    queues: dict[str, float]
    """Requests waiting for prefill or a decode slot, by `cluster role`."""
    link_use: dict[str, float]
    """Bits carried over what the nominal capacity could have carried, by remote cluster."""
    link_observed: dict[str, float]
    """Observed over nominal capacity."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A worker that was seen in another role than before."""

    unix_s: float
    worker: str
    from_role: str
    to_role: str


def waiting(pool: Pool) -> float:
    """Requests that wait for a pool: in the router, and at its workers behind others."""
    at_workers = pool.behind if pool.role == "prefill" else sum(w.load.waiting for w in pool.workers)
    return pool.waiting + at_workers


def pool_name(pool: Pool) -> str:
    """`cluster role`."""
    return f"{pool.cluster} {pool.role}"


class History:
    """A `Listener` that remembers 15 minutes.

    Args:
        forwarder: what is watched.
        changing: names of workers that are changing their role now.
        now_s: monotonic time.
    """

    def __init__(
        self, forwarder: Forwarder, changing: Callable[[], Collection[str]], now_s: float | None = None
    ) -> None:
        self._f = forwarder
        self._changing = changing
        self.steps: deque[Step] = deque(maxlen=N_STEPS)
        self.conversions: deque[Conversion] = deque(maxlen=_N_CONVERSIONS)
        self._ttft: Counts = np.zeros((N_STEPS, N_TTFT_BINS), dtype=np.int64)
        self._lengths: Counts = np.zeros((N_STEPS, 2, N_LENGTH_BINS), dtype=np.int64)
        self._flows: Counts = np.zeros((N_STEPS, 5), dtype=np.int64)
        self._spans_s: deque[float] = deque(maxlen=N_STEPS)
        self._at = 0
        self._began_s = time.monotonic() if now_s is None else now_s
        self._roles: dict[str, str] = {}
        self._before = self._totals()
        self._carried = self._carried_bits(self._began_s)
        self._clear()
        self.watch_roles(time.time())

    def _clear(self) -> None:
        self._ttft_now = [0] * N_TTFT_BINS
        self._lengths_now = ([0] * N_LENGTH_BINS, [0] * N_LENGTH_BINS)
        self._arrivals = self._remote = 0

    # ------------------------------------------------------------------ on the way of requests

    def arrival(
        self, now_s: float, tokens: int, incremental_tokens: int, cached_tokens: int, route: Route
    ) -> None:
        """A request was routed."""
        remote = route.kind == "remote"
        self._arrivals += 1
        self._remote += remote
        self._lengths_now[remote][length_bin(incremental_tokens)] += 1

    def first_token(self, now_s: float, ttft_s: float, route: Route) -> None:
        """Its first token came."""
        self._ttft_now[ttft_bin(ttft_s)] += 1

    def finished(self, now_s: float, output_tokens: int, tpot_s: float) -> None:
        """It ended well; the metrics count it."""

    def rejected(self, now_s: float, reason: str) -> None:
        """It was refused; the metrics count it."""

    def ended(self, now_s: float, ended: object) -> None:
        """It is over, however it ended; the metrics count it."""

    # ------------------------------------------------------------------ by the timer

    def watch_roles(self, unix_s: float) -> None:
        """Look for workers whose role is another one than at the last look."""
        roles: dict[str, str] = {w.name: w.role for w in self._f.fleet}
        for name, role in roles.items():
            before = self._roles.get(name, role)
            if before != role:
                self.conversions.append(Conversion(unix_s, name, before, role))
        self._roles = roles

    def tick(self, now_s: float, unix_s: float) -> None:
        """Close the step that ends now."""
        self.watch_roles(unix_s)
        length_s = max(now_s - self._began_s, 1e-9)
        totals, carried = self._totals(), self._carried_bits(now_s)
        finished, good, refused = (a - b for a, b in zip(totals, self._before, strict=True))
        ttft = np.array(self._ttft_now, dtype=np.int64)
        found = quantiles(ttft)
        f, links = self._f, self._f.paths.links
        changing = self._changing()
        local = [w for w in f.fleet if w.cluster == f.fleet.pd and w.name not in changing]
        roles = [w.role for w in local if not w.known_down]
        threshold = f.holder.threshold_tokens if f.holder.margin_s is None else None
        self.steps.append(
            Step(
                unix_s=unix_s,
                arrivals_rps=self._arrivals / length_s,
                remote_rps=self._remote / length_s,
                finished_rps=finished / length_s,
                good_rps=good / length_s,
                refused_rps=refused / length_s,
                ttft_p50_s=found["p50_s"],
                ttft_p90_s=found["p90_s"],
                ttft_p99_s=found["p99_s"],
                open_requests=f.open_requests,
                prefill_workers=roles.count("prefill"),
                decode_workers=roles.count("decode"),
                both_workers=roles.count("both"),
                converting_workers=sum(w.name in changing for w in f.fleet),
                threshold_tokens=None if threshold is None else finite(threshold),
                margin_s=None if f.holder.margin_s is None else finite(f.holder.margin_s),
                queues={pool_name(p): waiting(p) for p in f.fleet.pools()},
                link_use={
                    name: min((carried[name] - self._carried[name]) / (k.nominal_bps * length_s), 1.0)
                    for name, k in links.items()
                },
                link_observed={name: k.observed_bps(now_s) / k.nominal_bps for name, k in links.items()},
            )
        )
        self._spans_s.append(length_s)
        self._ttft[self._at] = ttft
        self._lengths[self._at] = self._lengths_now
        self._flows[self._at] = (self._arrivals, self._remote, finished, good, refused)
        self._at = (self._at + 1) % N_STEPS
        self._began_s, self._before, self._carried = now_s, totals, carried
        self._clear()

    def _totals(self) -> tuple[int, int, int]:
        m = self._f.metrics
        return _total(m.finished), _total(m.good), _total(m.rejected) + _total(m.stream_errors)

    def _carried_bits(self, now_s: float) -> dict[str, float]:
        return {name: link.carried_bits(now_s) for name, link in self._f.paths.links.items()}

    # ------------------------------------------------------------------ what is shown

    def ttft(self) -> dict[str, float | None]:
        """Count and quantiles of the whole window, the step under way included."""
        counts = self._ttft.sum(axis=0) + np.array(self._ttft_now, dtype=np.int64)
        return {"count": int(counts.sum()), **quantiles(counts)}

    def lengths(self) -> dict[str, list[float]]:
        """Incremental lengths of the whole window in the bins of telemetry, by where they were prefilled."""
        counts = self._lengths.sum(axis=0) + np.array(self._lengths_now, dtype=np.int64)
        return {
            "edges_tokens": LENGTH_BIN_EDGES_TOKENS.tolist(),
            "local": counts[0].tolist(),
            "remote": counts[1].tolist(),
        }

    def span_s(self, now_s: float) -> float:
        """How much time the window covers, the step under way included."""
        return sum(self._spans_s) + max(now_s - self._began_s, 0.0)

    def totals(self) -> dict[str, int]:
        """Requests of the whole window, the step under way included."""
        now = [a - b for a, b in zip(self._totals(), self._before, strict=True)]
        counts = self._flows.sum(axis=0) + np.array([self._arrivals, self._remote, *now], dtype=np.int64)
        return dict(zip(("arrivals", "remote", "finished", "good", "refused"), counts.tolist(), strict=True))

    def columns(self) -> dict[str, Any]:
        """The steps, oldest first, as one list per figure."""
        rows = [asdict(step) for step in self.steps]
        found: dict[str, Any] = {}
        for name in Step.__slots__:
            values = [row[name] for row in rows]
            if values and isinstance(values[0], dict):
                keys = dict.fromkeys(k for v in values for k in v)
                found[name] = {k: [_short(v.get(k)) for v in values] for k in keys}
            elif name in {"queues", "link_use", "link_observed"}:
                found[name] = {}
            else:
                found[name] = [v if name == "unix_s" else _short(v) for v in values]
        return found


def _total(counter: Counter) -> int:
    """Sum over all labels of a counter."""
    return int(sum(s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total")))


def _short(value: float | None) -> float | None:
    """Four digits are more than a screen shows."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
