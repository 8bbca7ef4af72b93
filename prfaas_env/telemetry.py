"""What a scheduler can see: named fields with units, windows, and their encoding to an array.

The simulator fills a `Telemetry`, the router fills the same class from live metrics, and one `encode()` makes
the observation. Everything here can be measured at the door or on the wire; nothing knows the output length of
a running request, the future, or the true capacity of a link.

The functions on arrays (`ring_*`, `observed_capacity_step`) are plain so that an engine can compile them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prfaas_env.simulator.formulas import NS_PER_S, FloatArray, Floats, IntArray, Ints

SCHEMA_VERSION = 1

#: Windows of the rates, in whole seconds; attainment, shares and means use the longest.
WINDOWS_S = (5, 30, 120)
LONG_WINDOW_S = 120
#: Incremental lengths are counted in log bins between these limits; shorter and longer ones in the end bins.
N_LENGTH_BINS = 24
LENGTH_BIN_MIN_TOKENS = 128
LENGTH_BIN_MAX_TOKENS = 131_072
LENGTH_BIN_EDGES_TOKENS: FloatArray = np.geomspace(
    LENGTH_BIN_MIN_TOKENS, LENGTH_BIN_MAX_TOKENS, N_LENGTH_BINS + 1
)
#: Incremental lengths kept at the door for rules that search a threshold over them.
RECENT_LENGTHS = 300

#: Observed capacity: evidence window, time without evidence before it recovers, step and factor of recovery.
EVIDENCE_WINDOW_S = 5
RECOVERY_AFTER_S = 60
RECOVERY_EVERY_S = 5
RECOVERY_FACTOR = 1.1
#: Observed capacity never falls below this share of nominal, so that an outage can be recovered from.
OBSERVED_FLOOR = 0.01

# --------------------------------------------------------------------------------------------- fields

Scale = Literal["linear", "log", "symlog"]


@dataclass(frozen=True, slots=True)
class Field:
    """One number of a telemetry group.

    `low` and `high` bound the encoded range (values outside are clipped there, and counted); `scale_at` is the
    value at which a log scale bends; `flag` names the field that says whether this one is present.
    """

    name: str
    unit: str
    low: float
    high: float
    scale: Scale
    doc: str
    scale_at: float = 1.0
    flag: str | None = None


def _flag(name: str, doc: str) -> Field:
    return Field(name, "0/1", 0.0, 1.0, "linear", doc)


def _count(name: str, high: float, doc: str) -> Field:
    return Field(name, "count", 0.0, high, "log", doc)


def _time(name: str, doc: str, high: float = 3600.0, flag: str | None = None) -> Field:
    return Field(name, "s", 0.0, high, "log", doc, 1.0, flag)


def _share(name: str, doc: str, flag: str | None = None) -> Field:
    return Field(name, "share", 0.0, 1.0, "linear", doc, 1.0, flag)


def _stage(prefix: str, what: str) -> tuple[Field, ...]:
    return (
        _count(f"{prefix}_requests", 10_000.0, f"requests waiting for {what}"),
        Field(f"{prefix}_tokens", "tokens", 0.0, 1e9, "log", f"their tokens, waiting for {what}", 1e4),
        _time(f"{prefix}_work_s", f"their predicted instance time, waiting for {what}", 1e5),
        _time(f"{prefix}_oldest_s", f"how long the head of the queue has waited for {what}"),
    )


PD_FIELDS: tuple[Field, ...] = (
    _flag("arrivals_valid", "at least one whole second has been counted"),
    *(
        Field(
            f"arrival_rate_{w}s_rps",
            "req/s",
            0.0,
            1000.0,
            "log",
            f"arrivals over {w} s",
            1.0,
            "arrivals_valid",
        )
        for w in WINDOWS_S
    ),
    *(
        Field(
            f"input_token_rate_{w}s_tps",
            "tokens/s",
            0.0,
            1e8,
            "log",
            f"incremental input tokens over {w} s",
            1e4,
            "arrivals_valid",
        )
        for w in WINDOWS_S
    ),
    _flag("lengths_valid", "a request arrived in the last 120 s"),
    *(
        _share(
            f"length_share_{k:02d}",
            f"share of the last 120 s of arrivals with incremental length in log bin {k} of {N_LENGTH_BINS}",
            "lengths_valid",
        )
        for k in range(N_LENGTH_BINS)
    ),
    *_stage("prefill_queue", "a local prefill instance"),
    _time("prefill_residual_s", "time left of all running local prefills, from the profile", 1e4),
    _count("prefill_busy_instances", 10_000.0, "local prefill instances at work"),
    _count("prefill_instances", 10_000.0, "active local prefill instances"),
    *_stage("decode_queue", "a decode slot"),
    _count("decode_sequences", 1e6, "sequences being decoded"),
    _count("decode_busy_instances", 10_000.0, "decode instances with a sequence"),
    _count("decode_instances", 10_000.0, "active decode instances"),
    _share("decode_slot_use", "sequences over slots of the active decode instances"),
    _share("decode_kv_fill", "reserved share of the KV room of the decode instances; 0 without a limit"),
    _count("converting_instances", 10_000.0, "instances that drain or switch, in neither role"),
    _flag("conversion_valid", "a conversion has taken place"),
    _time(
        "since_conversion_s", "time since the last conversion was ordered", 3600.0, flag="conversion_valid"
    ),
    _time("next_conversion_s", "time to the next instant at which a conversion may be legal", 600.0),
    _flag("output_valid", "a request finished in the last 120 s"),
    Field(
        "output_tokens_mean",
        "tokens",
        0.0,
        1e5,
        "log",
        "mean output length of requests finished in 120 s",
        100.0,
        "output_valid",
    ),
    _share("hit_share", "input tokens served from the prefix cache over 120 s; 0 without a pool"),
    _flag("ttft_valid", "the scenario has a TTFT objective and a first token came in the last 120 s"),
    _share("ttft_attainment", "first tokens of the last 120 s that met the TTFT objective", "ttft_valid"),
    _flag("tpot_valid", "the scenario has a TPOT objective and a request finished in the last 120 s"),
    _share(
        "tpot_attainment", "requests finished in the last 120 s that met the TPOT objective", "tpot_valid"
    ),
    _count("rejected_120s", 10_000.0, "requests rejected in the last 120 s"),
    _flag("threshold_valid", "the present decision is a threshold"),
    Field(
        "threshold_tokens",
        "tokens",
        0.0,
        262_144.0,
        "log",
        "present threshold (never: the upper end)",
        1000.0,
        "threshold_valid",
    ),
    _flag("margin_valid", "the present decision is a margin"),
    Field(
        "margin_s",
        "s",
        -60.0,
        60.0,
        "symlog",
        "present margin (always and never: the ends)",
        1.0,
        "margin_valid",
    ),
    _flag("cache_rule_abundant", "the present cache rule is `abundant`"),
)

PRFAAS_FIELDS: tuple[Field, ...] = (
    *_stage("prefill_queue", "a remote prefill instance"),
    _time("prefill_residual_s", "time left of all running remote prefills, from the profile", 1e4),
    _count("prefill_busy_instances", 10_000.0, "remote prefill instances at work"),
    _count("prefill_instances", 10_000.0, "remote prefill instances in service"),
)

LINK_FIELDS: tuple[Field, ...] = (
    Field(
        "backlog_bytes",
        "bytes",
        0.0,
        1e14,
        "log",
        "not yet sent bytes of every request routed over the link",
        1e9,
    ),
    _time("backlog_s", "the same at observed capacity", 1e5),
    Field("staged_bytes", "bytes", 0.0, 1e14, "log", "bytes produced by prefill and not yet sent", 1e9),
    _count("open_flows", 10_000.0, "transfers in progress"),
    *(_share(f"utilisation_{w}s", f"bits sent over {w} s, share of nominal capacity") for w in WINDOWS_S[:2]),
    Field("nominal_capacity_bps", "bit/s", 0.0, 1e13, "log", "configured capacity", 1e9),
    Field("observed_capacity_bps", "bit/s", 0.0, 1e13, "log", "capacity by the evidence of the wire", 1e9),
    _flag("observed_valid", "there has been evidence of the capacity"),
    _time("observed_age_s", "time since the last evidence of the capacity", 3600.0, flag="observed_valid"),
    _share("retransmission_share", "retransmitted share of segments; 0 without loss"),
)


@dataclass(frozen=True)
class TelemetrySchema:
    """The fields of one topology, in order: every PD cluster, every PrfaaS cluster, every link."""

    n_pd: int
    n_prfaas: int
    n_links: int

    @cached_property
    def groups(self) -> tuple[tuple[str, tuple[Field, ...]], ...]:
        """(group name, its fields) in order."""
        return (
            *((f"pd{i}", PD_FIELDS) for i in range(self.n_pd)),
            *((f"prfaas{j}", PRFAAS_FIELDS) for j in range(self.n_prfaas)),
            *((f"link{k}", LINK_FIELDS) for k in range(self.n_links)),
        )

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All fields in order, one per observation value."""
        return tuple(f for _, fields in self.groups for f in fields)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """`group.field` names in order."""
        return tuple(f"{group}.{f.name}" for group, fields in self.groups for f in fields)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each `group.field` name."""
        return {name: k for k, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.fields)

    @cached_property
    def hash(self) -> str:
        """Hash of version, names, units, ranges and scales, 12 hex digits."""
        content = [SCHEMA_VERSION, list(self.names), [asdict(f) for f in self.fields]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    @cached_property
    def scales(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, IntArray]:
        """Constants of the encoding, each of shape (len(self),).

        low, high, bend (0 = linear), straightened low, 1 / straightened span, position of the flag or -1.
        """
        flags: list[int] = []
        for group, fields in self.groups:
            flags.extend(-1 if f.flag is None else self.index[f"{group}.{f.flag}"] for f in fields)
        low = [f.low for f in self.fields]
        high = [f.high for f in self.fields]
        bend = [0.0 if f.scale == "linear" else f.scale_at for f in self.fields]
        bottom = [straighten(x, b) for x, b in zip(low, bend, strict=True)]
        top = [straighten(x, b) for x, b in zip(high, bend, strict=True)]
        inverse = [1.0 / (t - b) for t, b in zip(top, bottom, strict=True)]
        return (
            np.array(low),
            np.array(high),
            np.array(bend),
            np.array(bottom),
            np.array(inverse),
            np.array(flags, dtype=np.int64),
        )

    @cached_property
    def _bent(self) -> tuple[IntArray, FloatArray]:
        """Positions of the fields that are not linear, and their bends."""
        bend = self.scales[2]
        positions = np.flatnonzero(bend)
        return positions, bend[positions]

    @cached_property
    def _always(self) -> NDArray[np.bool_]:
        """Which fields have no flag."""
        return self.scales[-1] < 0

    def present(self, values: FloatArray) -> NDArray[np.bool_]:
        """Which fields are there: those without a flag, and those whose flag is set.

        Args:
            values: in physical units, shape (..., len(self)).
        """
        there: NDArray[np.bool_] = self._always | (values[..., self.scales[-1]] > 0.5)
        return there

    def encode(self, values: FloatArray) -> tuple[NDArray[np.float32], int]:
        """(observation float32 of shape (len(self),) in [0, 1], number of clipped values).

        Fixed scales, no running statistics. A field whose flag is 0 is encoded as 0. The same numbers, bit for bit,
        as `encode_values` gives one after the other.
        """
        low, high, _, bottom, inverse, _ = self.scales
        positions, bend = self._bent
        inside = np.minimum(np.maximum(values, low), high)
        present = self.present(values)
        clipped = int(np.count_nonzero(present & (inside != values)))
        bent = inside[positions]
        # log1p of the math module, not NumPy's, which may differ in the last bit
        inside[positions] = np.copysign([math.log1p(x) for x in (np.abs(bent) / bend).tolist()], bent)
        share = np.minimum(np.maximum((inside - bottom) * inverse, 0.0), 1.0)
        share[~present] = 0.0
        return share.astype(np.float32), clipped

    def difference(self, other: TelemetrySchema) -> str:
        """One line that names the fields added, removed or moved from `other` to this schema; empty if equal."""
        if self.names == other.names and self.fields == other.fields:
            return ""
        mine, theirs = set(self.names), set(other.names)
        added = [n for n in self.names if n not in theirs]
        removed = [n for n in other.names if n not in mine]
        moved = [n for n in self.names if n in theirs and self.index[n] != other.index[n]]
        parts = [
            f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("added", added), ("removed", removed), ("moved", moved))
            if names
        ]
        return "; ".join(parts) or "same names, other units or scales"


def straighten(value: float, bend: float) -> float:
    """A value on its straightened scale: itself (`bend` 0), or sign(x) log(1 + |x| / bend)."""
    if bend == 0.0:
        return value
    return math.copysign(math.log1p(abs(value) / bend), value)


def encode_values(
    values: Floats,
    low: Floats,
    high: Floats,
    bend: Floats,
    bottom: Floats,
    inverse: Floats,
    flag: Ints,
    out: Floats | NDArray[np.float32],
) -> int:
    """Encode a reading into `out`; gives the number of present values that had to be clipped.

    All have shape (n_fields,); for the constants see `TelemetrySchema.scales`.
    """
    clipped = 0
    for k in range(len(values)):
        if flag[k] >= 0 and values[flag[k]] <= 0.5:
            out[k] = 0.0
            continue
        value = min(max(values[k], low[k]), high[k])
        if value != values[k]:
            clipped += 1
        share = (straighten(value, bend[k]) - bottom[k]) * inverse[k]
        out[k] = min(max(share, 0.0), 1.0)
    return clipped


@lru_cache(maxsize=64)
def schema_for(n_pd: int, n_prfaas: int, n_links: int) -> TelemetrySchema:
    """The schema of a topology (cached)."""
    return TelemetrySchema(n_pd, n_prfaas, n_links)


class _Group:
    """Attribute access to one group of a telemetry: `telemetry.pd[0].prefill_queue_work_s`."""

    __slots__ = ("_index", "_prefix", "_values")

    def __init__(self, prefix: str, index: dict[str, int], values: FloatArray) -> None:
        self._prefix = prefix
        self._index = index
        self._values = values

    def __getattr__(self, name: str) -> float:
        try:
            return float(self._values[self._index[self._prefix + name]])
        except KeyError:
            raise AttributeError(f"no telemetry field {self._prefix + name!r}") from None

    @property
    def length_shares(self) -> FloatArray:
        """Shape (24,): shares of incremental length per log bin."""
        start = self._index[self._prefix + "length_share_00"]
        return self._values[start : start + N_LENGTH_BINS]


class Telemetry:
    """One reading: `values` in physical units, float64 of shape (len(schema),), all finite.

    `recent_lengths_tokens[i]` holds the last (at most 300) incremental lengths at the door of PD cluster i, oldest
    first; it is for rules that search a threshold and is not part of the observation. `conversion_tick` says
    whether the decision that follows may order a conversion.
    """

    __slots__ = ("conversion_tick", "legal_moves", "recent_lengths_tokens", "schema", "time_ns", "values")

    def __init__(
        self,
        schema: TelemetrySchema,
        time_ns: int,
        values: FloatArray,
        *,
        conversion_tick: bool,
        legal_moves: tuple[tuple[bool, bool, bool], ...],
        recent_lengths_tokens: tuple[IntArray, ...],
    ) -> None:
        self.schema = schema
        self.time_ns = time_ns
        self.values = values
        self.conversion_tick = conversion_tick
        self.legal_moves = legal_moves
        self.recent_lengths_tokens = recent_lengths_tokens

    @property
    def time_s(self) -> float:
        """Time since the start, in seconds."""
        return self.time_ns / NS_PER_S

    @property
    def pd(self) -> tuple[_Group, ...]:
        """One view per PD cluster."""
        return tuple(_Group(f"pd{i}.", self.schema.index, self.values) for i in range(self.schema.n_pd))

    @property
    def prfaas(self) -> tuple[_Group, ...]:
        """One view per PrfaaS cluster."""
        return tuple(
            _Group(f"prfaas{j}.", self.schema.index, self.values) for j in range(self.schema.n_prfaas)
        )

    @property
    def link(self) -> tuple[_Group, ...]:
        """One view per link."""
        return tuple(_Group(f"link{k}.", self.schema.index, self.values) for k in range(self.schema.n_links))

    def encode(self) -> NDArray[np.float32]:
        """The observation: float32 in [0, 1], shape (len(schema),)."""
        return self.schema.encode(self.values)[0]

    def as_dict(self) -> dict[str, float]:
        """`group.field` to value, for logs."""
        return dict(zip(self.schema.names, self.values.tolist(), strict=True))


def pack(schema: TelemetrySchema, readings: list[dict[str, float]]) -> FloatArray:
    """Values array from one reading per group in schema order.

    Raises:
        ValueError: a reading misses a field, has one too many, or holds a value that is not one finite number; it
            is named.
    """
    values = np.empty(len(schema))
    position = 0
    if len(readings) != len(schema.groups):
        raise ValueError(f"{len(readings)} readings for {len(schema.groups)} groups")
    for (group, fields), reading in zip(schema.groups, readings, strict=True):
        if len(reading) != len(fields):
            known = {f.name for f in fields}
            raise ValueError(f"{group}: fields {sorted(known ^ set(reading))} are missing or unknown")
        for field in fields:
            try:
                values[position] = reading[field.name]
            except KeyError:
                raise ValueError(f"{group}: field {field.name!r} is missing") from None
            except (TypeError, ValueError):
                found = reading[field.name]
                raise ValueError(
                    f"{group}: field {field.name!r} must be one number, found {found!r}"
                ) from None
            position += 1
    if not np.isfinite(values).all():
        bad = [schema.names[k] for k in np.flatnonzero(~np.isfinite(values))]
        raise ValueError(f"telemetry is not finite: {', '.join(bad)}")
    return values


# --------------------------------------------------------------------------------------------- windows

#: Buckets kept: the longest window and the one being filled.
N_BUCKETS = LONG_WINDOW_S + 1


def ring_row(
    stamps: IntArray, stamps_at: int, table: FloatArray, table_at: int, columns: int, bucket: int
) -> int:
    """Position in `table` of the row for second `bucket`, cleared if it held another second.

    Rings are flat, so that many can lie in one array: stamps `stamps[stamps_at:][:N_BUCKETS]`, rows of
    `columns` values from `table_at` on.
    """
    slot = bucket % N_BUCKETS
    row = table_at + slot * columns
    if stamps[stamps_at + slot] != bucket:
        stamps[stamps_at + slot] = bucket
        for c in range(columns):
            table[row + c] = 0.0
    return row


def ring_sum(
    stamps: IntArray,
    stamps_at: int,
    table: FloatArray,
    table_at: int,
    columns: int,
    c: int,
    bucket: int,
    window_s: int,
) -> float:
    """Sum of column c over the `window_s` whole seconds before second `bucket`, oldest first."""
    total = 0.0
    for b in range(max(bucket - window_s, 0), bucket):
        slot = b % N_BUCKETS
        if stamps[stamps_at + slot] == b:
            total += table[table_at + slot * columns + c]
    return total


def roll_windows(
    stamps: IntArray,
    stamps_at: int,
    table: FloatArray,
    table_at: int,
    columns: int,
    short_columns: int,
    sums: FloatArray,
    sums_at: int,
    last: int,
    bucket: int,
) -> None:
    """Bring the running sums of all windows from second `last` to second `bucket`; for whole numbers, so exact.

    `sums` holds `columns` values per window of `WINDOWS_S` from `sums_at` on, over the seconds before `last`; windows
    but the longest sum up their first `short_columns` alone. Must run before a row of second `bucket` is written,
    while the rows that leave the longest window are still there.
    """
    if bucket - last > LONG_WINDOW_S:
        # no row is younger than second `last`
        for c in range(len(WINDOWS_S) * columns):
            sums[sums_at + c] = 0.0
        return
    for b in range(last, bucket):
        for w in range(len(WINDOWS_S)):
            at = sums_at + w * columns
            n = columns if WINDOWS_S[w] == LONG_WINDOW_S else short_columns
            slot = b % N_BUCKETS
            if stamps[stamps_at + slot] == b:
                row = table_at + slot * columns
                for c in range(n):
                    sums[at + c] += table[row + c]
            gone = b - WINDOWS_S[w]
            if gone >= 0 and stamps[stamps_at + gone % N_BUCKETS] == gone:
                row = table_at + gone % N_BUCKETS * columns
                for c in range(n):
                    sums[at + c] -= table[row + c]


def length_bin(tokens: float) -> int:
    """Log bin of an incremental length (0..23); shorter and longer ones fall into the end bins."""
    if tokens < LENGTH_BIN_MIN_TOKENS:
        return 0
    low = 0
    high = N_LENGTH_BINS - 1
    while low < high:
        middle = (low + high + 1) // 2
        if LENGTH_BIN_EDGES_TOKENS[middle] <= tokens:
            low = middle
        else:
            high = middle - 1
    return low


#: An objective counts as met up to this relative excess, so that a constant step of exactly the objective meets it.
SLO_TOLERANCE = 1e-9


def meets(objective_s: float | None, value_s: float) -> bool:
    """Whether a time meets an objective; an objective that is not set is met."""
    return objective_s is None or within(objective_s, value_s)


def within(objective_s: float, value_s: float) -> bool:
    """Whether a time meets an objective that is set."""
    return value_s <= objective_s * (1.0 + SLO_TOLERANCE)


# Columns of a door ring.
(
    _ARRIVALS,
    _TOKENS,
    _INPUT_TOKENS,
    _HIT_TOKENS,
    _FIRST,
    _FIRST_OK,
    _FINISHED,
    _OUTPUT,
    _TPOT_OK,
    _REJECTED,
    _BINS,
) = range(11)
N_DOOR_COLUMNS = _BINS + N_LENGTH_BINS
#: Columns that the shorter windows need too: arrivals and their tokens.
N_RATE_COLUMNS = _INPUT_TOKENS


class DoorMeter:
    """Counters of one PD cluster, in a ring of 1 s buckets. The engines and the router use this one class.

    A window covers whole seconds only: those that ended at or before the instant of reading.
    """

    __slots__ = ("recent", "stamps", "table", "tpot_slo_s", "ttft_slo_s")

    def __init__(self, ttft_slo_s: float | None, tpot_slo_s: float | None) -> None:
        self.stamps: IntArray = np.full(N_BUCKETS, -1, dtype=np.int64)
        self.table: FloatArray = np.zeros(N_BUCKETS * N_DOOR_COLUMNS)
        self.recent: deque[int] = deque(maxlen=RECENT_LENGTHS)
        self.ttft_slo_s = ttft_slo_s
        self.tpot_slo_s = tpot_slo_s

    def _row(self, time_ns: int) -> int:
        return ring_row(self.stamps, 0, self.table, 0, N_DOOR_COLUMNS, time_ns // NS_PER_S)

    def arrival(
        self, time_ns: int, incremental_tokens: int, input_tokens: int, hit_tokens: int | None = None
    ) -> None:
        """A request was accepted at the door; `hit_tokens` of it need no prefill (default: all but the incremental)."""
        hit = input_tokens - incremental_tokens if hit_tokens is None else hit_tokens
        count_arrival(self.table, self._row(time_ns), incremental_tokens, input_tokens, hit)
        self.recent.append(incremental_tokens)

    def first_token(self, time_ns: int, ttft_s: float) -> None:
        """A first token came `ttft_s` after its request."""
        count_first_token(self.table, self._row(time_ns), meets(self.ttft_slo_s, ttft_s))

    def missed(self, time_ns: int) -> None:
        """A request was given up before its first token: its objective is missed."""
        count_first_token(self.table, self._row(time_ns), False)

    def finished(self, time_ns: int, output_tokens: int, tpot_s: float) -> None:
        """A request finished with this many output tokens."""
        count_finish(self.table, self._row(time_ns), output_tokens, meets(self.tpot_slo_s, tpot_s))

    def rejected(self, time_ns: int) -> None:
        """A request was rejected at the door."""
        count_rejection(self.table, self._row(time_ns))

    def reading(self, time_ns: int) -> dict[str, float]:
        """The windowed fields of a PD group at `time_ns`."""
        bucket = time_ns // NS_PER_S
        sums = np.zeros((len(WINDOWS_S), N_DOOR_COLUMNS))
        rows = self.table.reshape(N_BUCKETS, N_DOOR_COLUMNS)
        for w, window_s in enumerate(WINDOWS_S):
            # counts are whole numbers, so the order of adding cannot matter
            inside = (self.stamps >= max(bucket - window_s, 0)) & (self.stamps < bucket)
            np.matmul(inside.astype(np.float64), rows, out=sums[w])
        out = np.zeros(len(PD_FIELDS))
        door_fields(sums, bucket, self.ttft_slo_s is not None, self.tpot_slo_s is not None, out, 0)
        return dict(zip(_DOOR_NAMES, out[_DOOR_POSITIONS].tolist(), strict=True))

    def recent_lengths(self) -> IntArray:
        """The last incremental lengths, oldest first."""
        return np.array(self.recent, dtype=np.int64)


def count_arrival(
    table: FloatArray, row: int, incremental_tokens: int, input_tokens: int, hit_tokens: int
) -> None:
    """Count an accepted request in the row of its second."""
    table[row + _ARRIVALS] += 1
    table[row + _TOKENS] += incremental_tokens
    table[row + _INPUT_TOKENS] += input_tokens
    table[row + _HIT_TOKENS] += hit_tokens
    table[row + _BINS + length_bin(incremental_tokens)] += 1


def count_first_token(table: FloatArray, row: int, in_time: bool) -> None:
    """Count a first token in the row of its second."""
    table[row + _FIRST] += 1
    if in_time:
        table[row + _FIRST_OK] += 1


def count_finish(table: FloatArray, row: int, output_tokens: int, in_time: bool) -> None:
    """Count a finished request in the row of its second."""
    table[row + _FINISHED] += 1
    table[row + _OUTPUT] += output_tokens
    if in_time:
        table[row + _TPOT_OK] += 1


def count_rejection(table: FloatArray, row: int) -> None:
    """Count a rejected request in the row of its second."""
    table[row + _REJECTED] += 1


#: Position of each field inside its group.
PD_INDEX = {f.name: k for k, f in enumerate(PD_FIELDS)}
PRFAAS_INDEX = {f.name: k for k, f in enumerate(PRFAAS_FIELDS)}
LINK_INDEX = {f.name: k for k, f in enumerate(LINK_FIELDS)}

_F_ARRIVALS_VALID = PD_INDEX["arrivals_valid"]
_F_RATE = PD_INDEX[f"arrival_rate_{WINDOWS_S[0]}s_rps"]
_F_TOKEN_RATE = PD_INDEX[f"input_token_rate_{WINDOWS_S[0]}s_tps"]
_F_LENGTHS_VALID = PD_INDEX["lengths_valid"]
_F_SHARES = PD_INDEX["length_share_00"]
_F_OUTPUT_VALID = PD_INDEX["output_valid"]
_F_OUTPUT = PD_INDEX["output_tokens_mean"]
_F_HIT = PD_INDEX["hit_share"]
_F_TTFT_VALID = PD_INDEX["ttft_valid"]
_F_TTFT = PD_INDEX["ttft_attainment"]
_F_TPOT_VALID = PD_INDEX["tpot_valid"]
_F_TPOT = PD_INDEX["tpot_attainment"]
_F_REJECTED = PD_INDEX["rejected_120s"]
_DOOR_POSITIONS = [
    _F_ARRIVALS_VALID,
    *range(_F_RATE, _F_RATE + len(WINDOWS_S)),
    *range(_F_TOKEN_RATE, _F_TOKEN_RATE + len(WINDOWS_S)),
    _F_LENGTHS_VALID,
    *range(_F_SHARES, _F_SHARES + N_LENGTH_BINS),
    _F_OUTPUT_VALID,
    _F_OUTPUT,
    _F_HIT,
    _F_TTFT_VALID,
    _F_TTFT,
    _F_TPOT_VALID,
    _F_TPOT,
    _F_REJECTED,
]
_DOOR_NAMES = tuple(PD_FIELDS[k].name for k in _DOOR_POSITIONS)


def door_fields(
    sums: FloatArray, bucket: int, has_ttft: bool, has_tpot: bool, out: FloatArray, at: int
) -> None:
    """The windowed fields of a PD group from column sums of shape (windows, columns), into `out` from `at` on."""
    out[at + _F_ARRIVALS_VALID] = 1.0 if bucket >= 1 else 0.0
    for w in range(len(WINDOWS_S)):
        seconds = max(min(WINDOWS_S[w], bucket), 1)
        out[at + _F_RATE + w] = sums[w, _ARRIVALS] / seconds
        out[at + _F_TOKEN_RATE + w] = sums[w, _TOKENS] / seconds
    w = len(WINDOWS_S) - 1
    arrivals, first, finished = sums[w, _ARRIVALS], sums[w, _FIRST], sums[w, _FINISHED]
    out[at + _F_LENGTHS_VALID] = 1.0 if arrivals > 0 else 0.0
    for k in range(N_LENGTH_BINS):
        out[at + _F_SHARES + k] = sums[w, _BINS + k] / max(arrivals, 1.0)
    out[at + _F_OUTPUT_VALID] = 1.0 if finished > 0 else 0.0
    out[at + _F_OUTPUT] = sums[w, _OUTPUT] / max(finished, 1.0)
    out[at + _F_HIT] = sums[w, _HIT_TOKENS] / max(sums[w, _INPUT_TOKENS], 1.0)
    out[at + _F_TTFT_VALID] = 1.0 if has_ttft and first > 0 else 0.0
    out[at + _F_TTFT] = sums[w, _FIRST_OK] / max(first, 1.0)
    out[at + _F_TPOT_VALID] = 1.0 if has_tpot and finished > 0 else 0.0
    out[at + _F_TPOT] = sums[w, _TPOT_OK] / max(finished, 1.0)
    out[at + _F_REJECTED] = sums[w, _REJECTED]


# Columns of a link ring.
_BITS, _CONGESTED_NS = range(2)
N_LINK_COLUMNS = 2
# Fields of the observed-capacity state, and of the peak.
_OBSERVED, _EVIDENCE_BUCKET, _NEXT_BUCKET, _PEAK_BPS = range(4)
N_LINK_STATE = 4


def decode_work_s(waiting: int, output_tokens_mean: float, full_step_s: float, slots: int) -> float:
    """Predicted decode-instance seconds of the waiting requests: a slot's share of full steps for a mean output."""
    return waiting * output_tokens_mean * full_step_s / slots


def observed_capacity_step(
    state: FloatArray, at: int, bucket: int, delivered_bps: float, backlogged: bool, nominal_bps: float
) -> None:
    """One whole second more for the observed capacity.

    `delivered_bps` is the rate over the last evidence window, `backlogged` whether the link was the limit
    throughout it. Evidence sets the estimate; any faster delivery raises it; without evidence for 60 s it
    grows by 10% each 5 s up to nominal.

    Args:
        state: from `at` on (observed capacity, second of the last evidence or -1, next second), updated.
        at: position in `state`.
        bucket: the second that just ended, counted from 1.
        delivered_bps: rate over the evidence window.
        backlogged: the link limited some flow throughout the window.
        nominal_bps: configured capacity.
    """
    if backlogged or delivered_bps > state[at + _OBSERVED]:
        state[at + _OBSERVED] = max(delivered_bps, OBSERVED_FLOOR * nominal_bps)
        state[at + _EVIDENCE_BUCKET] = bucket
    elif state[at + _EVIDENCE_BUCKET] >= 0:
        silent_s = bucket - state[at + _EVIDENCE_BUCKET]
        if silent_s >= RECOVERY_AFTER_S and silent_s % RECOVERY_EVERY_S == 0:
            state[at + _OBSERVED] = state[at + _OBSERVED] * RECOVERY_FACTOR
    state[at + _OBSERVED] = min(state[at + _OBSERVED], nominal_bps)
    state[at + _NEXT_BUCKET] = bucket + 1


def link_advance(
    stamps: IntArray,
    stamps_at: int,
    table: FloatArray,
    table_at: int,
    state: FloatArray,
    state_at: int,
    accounted_ns: int,
    time_ns: int,
    rate_bps: float,
    congested: bool,
    nominal_bps: float,
    peak_from_s: float,
) -> None:
    """Account [accounted_ns, time_ns) of a link at a constant total rate, second by second.

    Each second that ends is read for the peak and for the observed capacity (`N_LINK_STATE` values of `state`
    from `state_at` on).
    """
    start_ns = accounted_ns
    while start_ns < time_ns:
        bucket = start_ns // NS_PER_S
        end_ns = min((bucket + 1) * NS_PER_S, time_ns)
        if rate_bps > 0.0 or congested:
            row = ring_row(stamps, stamps_at, table, table_at, N_LINK_COLUMNS, bucket)
            table[row + _BITS] += rate_bps * ((end_ns - start_ns) / 1e9)
            if congested:
                table[row + _CONGESTED_NS] += end_ns - start_ns
        if end_ns == (bucket + 1) * NS_PER_S:
            _link_second_ended(
                stamps, stamps_at, table, table_at, state, state_at, bucket + 1, nominal_bps, peak_from_s
            )
        start_ns = end_ns


def _link_second_ended(
    stamps: IntArray,
    stamps_at: int,
    table: FloatArray,
    table_at: int,
    state: FloatArray,
    state_at: int,
    ended: int,
    nominal_bps: float,
    peak_from_s: float,
) -> None:
    """Seconds 0..ended - 1 are over: peak, evidence window, observed capacity."""
    bits, congested_ns = 0.0, 0.0
    for b in range(max(ended - EVIDENCE_WINDOW_S, 0), ended):
        slot = b % N_BUCKETS
        if stamps[stamps_at + slot] == b:
            row = table_at + slot * N_LINK_COLUMNS
            bits += table[row + _BITS]
            congested_ns += table[row + _CONGESTED_NS]
            if b == ended - 1 and b >= peak_from_s:
                state[state_at + _PEAK_BPS] = max(state[state_at + _PEAK_BPS], table[row + _BITS])
    whole = ended >= EVIDENCE_WINDOW_S
    observed_capacity_step(
        state,
        state_at,
        ended,
        bits / EVIDENCE_WINDOW_S if whole else 0.0,
        whole and congested_ns >= EVIDENCE_WINDOW_S * NS_PER_S,
        nominal_bps,
    )


_L_UTILISATION = LINK_INDEX[f"utilisation_{WINDOWS_S[0]}s"]
_L_NOMINAL = LINK_INDEX["nominal_capacity_bps"]
_L_OBSERVED = LINK_INDEX["observed_capacity_bps"]
_L_VALID = LINK_INDEX["observed_valid"]
_L_AGE = LINK_INDEX["observed_age_s"]
_METER_POSITIONS = [_L_UTILISATION, _L_UTILISATION + 1, _L_NOMINAL, _L_OBSERVED, _L_VALID, _L_AGE]
_METER_NAMES = tuple(LINK_FIELDS[k].name for k in _METER_POSITIONS)


def link_fields(
    stamps: IntArray,
    stamps_at: int,
    table: FloatArray,
    table_at: int,
    state: FloatArray,
    state_at: int,
    time_ns: int,
    nominal_bps: float,
    out: FloatArray,
    at: int,
) -> None:
    """The measured fields of a link group into `out` from `at` on."""
    bucket = time_ns // NS_PER_S
    for w in range(2):
        bits = ring_sum(stamps, stamps_at, table, table_at, N_LINK_COLUMNS, _BITS, bucket, WINDOWS_S[w])
        seconds = max(min(WINDOWS_S[w], bucket), 1)
        out[at + _L_UTILISATION + w] = min(bits / seconds / nominal_bps, 1.0)
    evidence = state[state_at + _EVIDENCE_BUCKET]
    out[at + _L_NOMINAL] = nominal_bps
    out[at + _L_OBSERVED] = state[state_at + _OBSERVED]
    out[at + _L_VALID] = 1.0 if evidence >= 0 else 0.0
    out[at + _L_AGE] = max(time_ns / NS_PER_S - evidence, 0.0) if evidence >= 0 else 0.0


class LinkMeter:
    """Bits sent and observed capacity of one link. The engines and the router use the same functions."""

    __slots__ = ("_accounted_ns", "_peak_from_s", "nominal_bps", "stamps", "state", "table")

    def __init__(self, nominal_bps: float, peak_from_s: float = 0.0) -> None:
        self.nominal_bps = nominal_bps
        self._peak_from_s = peak_from_s
        self.stamps: IntArray = np.full(N_BUCKETS, -1, dtype=np.int64)
        self.table: FloatArray = np.zeros(N_BUCKETS * N_LINK_COLUMNS)
        self.state: FloatArray = np.array([nominal_bps, -1.0, 1.0, 0.0])
        self._accounted_ns = 0

    def advance(self, time_ns: int, rate_bps: float, congested: bool) -> None:
        """Account [last call, time_ns) at this total rate; `congested`: the link limited some flow all that time."""
        if time_ns <= self._accounted_ns:
            return
        link_advance(
            self.stamps,
            0,
            self.table,
            0,
            self.state,
            0,
            self._accounted_ns,
            time_ns,
            rate_bps,
            congested,
            self.nominal_bps,
            self._peak_from_s,
        )
        self._accounted_ns = time_ns

    def advance_for_reading(self, time_ns: int, rate_bps: float, congested: bool) -> None:
        """Account up to the last whole second, so that reading between events leaves later sums as they are."""
        self.advance(time_ns // NS_PER_S * NS_PER_S, rate_bps, congested)

    @property
    def observed_bps(self) -> float:
        """Observed capacity in bit/s, as of the last `advance`."""
        return float(self.state[_OBSERVED])

    @property
    def peak_bps(self) -> float:
        """Most that one whole second after `peak_from_s` delivered."""
        return float(self.state[_PEAK_BPS])

    def reading(self, time_ns: int) -> dict[str, float]:
        """The measured fields of a link group at `time_ns` (call `advance_for_reading` first)."""
        out = np.zeros(len(LINK_FIELDS))
        link_fields(
            self.stamps,
            0,
            self.table,
            0,
            self.state,
            0,
            time_ns,
            self.nominal_bps,
            out,
            0,
        )
        return dict(zip(_METER_NAMES, out[_METER_POSITIONS].tolist(), strict=True))


def decision_fields(
    threshold_tokens: float | None, margin_s: float | None, cache_rule: str
) -> dict[str, float]:
    """The fields of a PD group that repeat the present decision, infinities at the ends of their range."""
    return {
        "threshold_valid": float(threshold_tokens is not None),
        "threshold_tokens": 0.0 if threshold_tokens is None else threshold_field(threshold_tokens),
        "margin_valid": float(margin_s is not None),
        "margin_s": 0.0 if margin_s is None else margin_field(margin_s),
        "cache_rule_abundant": float(cache_rule == "abundant"),
    }


_THRESHOLD_HIGH = PD_FIELDS[PD_INDEX["threshold_tokens"]].high
_MARGIN_HIGH = PD_FIELDS[PD_INDEX["margin_s"]].high


def threshold_field(threshold_tokens: float) -> float:
    """A threshold with infinity at the end of its range."""
    return min(threshold_tokens, _THRESHOLD_HIGH)


def margin_field(margin_s: float) -> float:
    """A margin with the infinities at the ends of its range."""
    return max(min(margin_s, _MARGIN_HIGH), -_MARGIN_HIGH)


def schema_rows(schema: TelemetrySchema) -> list[dict[str, Any]]:
    """Rows of the documentation table: name, unit, range, scale, meaning, flag."""
    return [
        {
            "name": name,
            "unit": f.unit,
            "low": f.low,
            "high": f.high,
            "scale": f.scale,
            "flag": f.flag or "",
            "meaning": f.doc,
        }
        for name, f in zip(schema.names, schema.fields, strict=True)
    ]
