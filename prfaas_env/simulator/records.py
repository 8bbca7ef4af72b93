"""What an engine writes down: per-request stamps, counters, and integrals over time."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from prfaas_env.simulator.formulas import NEVER_NS, IntArray


class Status(enum.IntEnum):
    """Where a request stands."""

    PENDING = 0  # has not arrived yet
    OPEN = 1
    FINISHED = 2
    REJECTED = 3
    ABORTED = 4


class Route(enum.IntEnum):
    """Where a request's prefill goes."""

    NONE = 0
    LOCAL = 1
    REMOTE = 2


#: Reasons for a rejection, in the order of their counters.
REJECT_REASONS = ("over_limit", "kv_capacity", "queue_full")

#: Counters of all prefix pools together, in the order of `Totals.prefix`.
PREFIX_COUNTERS = (
    "input_tokens",  # input tokens of accepted requests
    "hit_tokens",  # of them, tokens that no prefill had to compute
    "mispredictions",  # requests that found less in the cache than routing had seen
    "evictions",  # entries put out for others
    "copies",  # prefixes sent across a link ahead of a prefill
    "unstored",  # blocks and checkpoints for which a full pool had no room
    "unheld_units",  # units of transfers for which a full pool had no room
)
NO_PREFIX = (0,) * len(PREFIX_COUNTERS)

_STAMPS = (
    "prefill_start_ns",
    "prefill_end_ns",
    "transfer_end_ns",
    "decode_join_ns",
    "first_token_ns",
    "finish_ns",
    "abort_ns",
)


@dataclass
class RequestRecords:
    """Per-request results, int64 arrays of shape (n,); a stamp that has not happened is NEVER_NS.

    Stamps up to the first token are those of the attempt that gave it. `service_ns` is that attempt's prefill
    time, `incremental_tokens` the first attempt's tokens to prefill (of a rejected request: the incremental length by
    which it was judged). `sent_bytes` counts everything sent over a link for the request, a copied prefix included.
    """

    prefill_start_ns: IntArray
    prefill_end_ns: IntArray
    transfer_end_ns: IntArray
    decode_join_ns: IntArray
    first_token_ns: IntArray
    finish_ns: IntArray
    abort_ns: IntArray
    incremental_tokens: IntArray
    service_ns: IntArray
    route: IntArray
    prfaas: IntArray
    attempts: IntArray
    status: IntArray
    sent_bytes: IntArray

    def cached_tokens(self, input_tokens: IntArray) -> IntArray:
        """Prompt tokens that the prefix caches spared the first attempt, shape (n,); 0 unless accepted."""
        accepted = (self.status != Status.PENDING) & (self.status != Status.REJECTED)
        return np.where(accepted, input_tokens - self.incremental_tokens, 0)

    @classmethod
    def empty(cls, n: int) -> RequestRecords:
        """Records of n requests before the start."""
        never = {name: np.full(n, NEVER_NS, dtype=np.int64) for name in _STAMPS}
        zero = {
            name: np.zeros(n, dtype=np.int64)
            for name in (
                "incremental_tokens",
                "service_ns",
                "route",
                "attempts",
                "status",
                "sent_bytes",
            )
        }
        return cls(**never, **zero, prfaas=np.full(n, -1, dtype=np.int64))


@dataclass(slots=True)
class TimeIntegral:
    """A whole number held over time and its exact integral in count x ns."""

    count: int = 0
    total: int = 0
    since_ns: int = 0

    def add(self, now_ns: int, change: int) -> None:
        """Change the number now."""
        self.total += self.count * (now_ns - self.since_ns)
        self.since_ns = now_ns
        self.count += change

    def at(self, now_ns: int) -> int:
        """Integral from 0 to `now_ns`."""
        return self.total + self.count * (now_ns - self.since_ns)


class Totals(NamedTuple):
    """Cumulative figures at one instant; differences of two give an interval.

    Integrals are exact, in count x ns. Clusters are added up, except that `egress_bits` is per link.
    """

    time_ns: int
    arrived: int
    finished: int
    rejected: int
    aborted: int
    remote: int
    conversions: int
    invalid_moves: int
    waiting_ns: int
    """Integral of requests that wait for their first token."""
    remote_busy_ns: int
    remote_instances_ns: int
    prefill_busy_ns: int
    prefill_instances_ns: int
    decode_slots_used_ns: int
    decode_slots_ns: int
    first_tokens: int
    good: int
    """Finished requests that met every objective of the scenario."""
    egress_bits: tuple[float, ...]
    egress_peak_bps: tuple[float, ...]
    """Most that one whole second after the warm-up delivered, per link."""
    reject_reasons: tuple[int, ...]
    prefix: tuple[int, ...] = NO_PREFIX
    """Counters of the prefix pools, in the order of `PREFIX_COUNTERS`."""


#: Counters of the prefix pools that `info` repeats.
INFO_COUNTERS = ("hit_tokens", "mispredictions", "evictions", "copies")


def prefix_info(totals: Totals) -> dict[str, Any]:
    """Entries of `info` of a scenario with a prefix pool; arrays where the totals hold arrays."""
    counts = dict(zip(PREFIX_COUNTERS, totals.prefix, strict=True))
    share = counts["hit_tokens"] / np.maximum(counts["input_tokens"], 1)
    return {
        "hit_share": share if isinstance(share, np.ndarray) else float(share),
        **{name: counts[name] for name in INFO_COUNTERS},
    }


@dataclass
class Counters:
    """Running counts of an engine."""

    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    remote: int = 0
    conversions: int = 0
    invalid_moves: int = 0
    first_tokens: int = 0
    good: int = 0
    rejects: list[int] = field(default_factory=lambda: [0] * len(REJECT_REASONS))

    @property
    def rejected(self) -> int:
        """All rejections."""
        return sum(self.rejects)
