"""The decision log: what the router saw, what the policy said, what was put in force; one JSON object per line.

A file begins with a header. It is enough to run the policy again on what it saw, and to make a scenario of what came
and ran. Prompts, prefix hashes and keys are not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError

from prfaas_env.base import PrfaasError, first_error
from prfaas_env.decision import CacheRule, ClusterDecision, Decision, Move
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.formulas import IntArray
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import RECENT_LENGTHS, Telemetry, TelemetrySchema
from prfaas_serving.config import ControlMode

FORMAT_VERSION: Literal[1] = 1
#: Lines that may wait for the disk; what comes beyond is dropped and counted.
QUEUE_LINES = 10_000
#: Smallest size at which a file may be exchanged: a header alone has some 20 KB.
MIN_BYTES = 1 << 16
#: How long `close` waits for the disk.
CLOSE_S = 5.0

By = Literal["policy", "rule", "hold", "fallback", "operator", "off"]
Guard = Literal["ok", "hold", "fallback"]
What = Literal["mode", "reload", "alarm", "guard", "override", "manual_move", "dropped"]
Outcome = Literal["finished", "rejected", "aborted", "failed", "open"]

# ------------------------------------------------------------------------------------- decisions


def _number(value: float | None) -> Any:
    """A value for JSON, which has no infinity; whole numbers without a point."""
    if value is None or not math.isfinite(value):
        return None if value is None else "inf" if value > 0 else "-inf"
    return int(value) if value == int(value) else value


def decision_json(decision: Decision) -> dict[str, Any]:
    """A decision as in the log: `threshold_tokens`, `margin_s`, `cache_rule`, and `moves` with one number per cluster.

    The first three are plain values where there is one PD cluster, and lists where there are several.
    """
    clusters = decision.clusters
    columns: dict[str, list[Any]] = {
        "threshold_tokens": [_number(c.threshold_tokens) for c in clusters],
        "margin_s": [_number(c.margin_s) for c in clusters],
        "cache_rule": [c.cache_rule for c in clusters],
    }
    one = len(clusters) == 1
    return {
        **{name: column[0] if one else column for name, column in columns.items()},
        "moves": [int(c.move) for c in clusters],
    }


def _float(value: Any, name: str) -> float | None:
    if value is None or value in ("inf", "-inf"):
        return None if value is None else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{name} must be a number, "inf" or null, found {value!r}')
    return float(value)


_RULES: dict[Any, CacheRule] = {"scarce": "scarce", "abundant": "abundant"}


def decision_from_json(raw: Any) -> Decision:
    """The decision of `decision_json`; ValueError names what is wrong."""
    if isinstance(raw, Decision):
        return raw
    names = ("threshold_tokens", "margin_s", "cache_rule", "moves")
    if not isinstance(raw, dict) or set(raw) != set(names):
        raise ValueError(f"a decision has {', '.join(names)}; found {raw!r:.80}")
    moves = raw["moves"]
    if not isinstance(moves, list) or not all(type(m) is int and 0 <= m < len(Move) for m in moves):
        raise ValueError(f"moves must be a list of 0..{len(Move) - 1}, found {moves!r:.80}")
    columns = [raw[name] if isinstance(raw[name], list) else [raw[name]] for name in names[:3]]
    if any(len(column) != len(moves) for column in columns):
        raise ValueError(f"a decision for {len(moves)} clusters needs as many values of each kind")
    clusters = []
    for threshold, margin, rule, move in zip(*columns, moves, strict=True):
        if not isinstance(rule, str) or rule not in _RULES:
            raise ValueError(f"cache_rule must be one of {', '.join(_RULES)}, found {rule!r}")
        clusters.append(
            ClusterDecision(
                threshold_tokens=_float(threshold, "threshold_tokens"),
                margin_s=_float(margin, "margin_s"),
                move=Move(move),
                cache_rule=_RULES[rule],
            )
        )
    return Decision(tuple(clusters))


LoggedDecision = Annotated[
    Decision, BeforeValidator(decision_from_json), PlainSerializer(decision_json, return_type=dict)
]

# ----------------------------------------------------------------------------------------- lines

Ns = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
#: Incremental lengths of each PD cluster, oldest first.
Lengths = tuple[tuple[Count, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What every line can."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    def as_json(self) -> dict[str, Any]:
        """The line as a plain mapping, `kind` first."""
        found: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return found

    @classmethod
    def from_json(cls, raw: str | bytes | Mapping[str, Any]) -> Self:
        """A line from its text or mapping; PrfaasError names the field."""
        adapter = _adapter(cls)
        try:
            found: Self = (
                adapter.validate_json(raw, strict=True)
                if isinstance(raw, str | bytes)
                else adapter.validate_python(dict(raw))
            )
            return found
        except ValidationError as error:
            raise first_error(error, cls.__name__) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderLine(_Line):
    """First line of every file: what ran. A later part of the same log has `part` > 0 and the lengths so far."""

    kind: Literal["header"] = "header"
    format_version: Literal[1] = FORMAT_VERSION
    prfaas_version: str
    unix_s: float
    """Wall clock at `time_ns`; with `time_ns` it tells one run of a router from another."""
    time_ns: Ns = 0
    """Router clock of the start."""
    schema_hash: str
    names: tuple[str, ...]
    """Telemetry fields, `group.field`, in the order of `DecisionLine.values`."""
    scenario: dict[str, Any]
    scenario_hash: str
    policy_spec: str
    policy_hash: str
    backend: str
    mode: ControlMode
    policy_seed: Count = 0
    """Seed of the policy's own randomness."""
    part: Count = 0
    recent_lengths: Lengths = ()
    """Incremental lengths before the first decision of this file, at most 300 per PD cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLine(_Line):
    """One tick of the fast clock."""

    kind: Literal["decision"] = "decision"
    n: Count
    """Number of the decision since the start."""
    time_ns: Ns
    unix_s: float
    mode: ControlMode
    values: tuple[float, ...]
    """Telemetry in physical units, in the order of the header's `names`."""
    conversion_tick: bool
    legal_moves: tuple[tuple[bool, bool, bool], ...]
    new_lengths: Lengths
    """Incremental lengths at each PD cluster's door since the line before (see `lengths_since`)."""
    proposed: LoggedDecision | None
    """What the policy said; None if it was not asked."""
    acted: LoggedDecision | None
    """What was put in force; None if nothing was."""
    by: By
    reason: str
    policy_hash: str
    guard: Guard
    decide_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LegTimes:
    """When the legs that gave a request its answer ran; None = there was no such leg, or it is not known."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    attempts: Count
    """Tries in all; 1 = nothing failed."""
    prefill_cluster: str | None = None
    prefill_worker: str | None = None
    prefill_sent_ns: Ns | None = None
    prefill_ahead: Count | None = None
    """Prefills at the worker when this one was sent; 0 = it found it idle."""
    prefill_end_ns: Ns | None = None
    decode_worker: str | None = None
    decode_sent_ns: Ns | None = None
    kv_bytes: Count | None = None
    """Bytes of KV fetched, where the decode worker says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine(_Line):
    """One request, written when it ended (or `open` when the log was closed)."""

    kind: Literal["request"] = "request"
    arrival_ns: Ns
    input_tokens: Count
    incremental_tokens: dict[str, Count]
    """Input tokens that each cluster's cache would not spare, by cluster name, as known at the door."""
    output_tokens: Count
    outcome: Outcome
    remote: bool
    ttft_s: Annotated[float, Field(ge=0)] | None
    tpot_s: Annotated[float, Field(ge=0)] | None
    end_ns: Ns | None = None
    pd: Count = 0
    """The PD cluster at whose door it came, by place."""
    legs: LegTimes | None = None
    """None in logs of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionLine(_Line):
    """One change of a worker's role, written when it is over."""

    kind: Literal["conversion"] = "conversion"
    ordered_ns: Ns
    done_ns: Ns | None
    cluster: str
    worker: str
    from_role: str
    to_role: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine(_Line):
    """Something that changed what decides. A `reload` says which policy decides from now on."""

    kind: Literal["event"] = "event"
    time_ns: Ns
    what: What
    text: str
    policy_spec: str | None = None
    policy_hash: str | None = None


Line = HeaderLine | DecisionLine | RequestLine | ConversionLine | EventLine
_LineT = TypeVar("_LineT", DecisionLine, RequestLine, ConversionLine, EventLine)
_ANY: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])
_REQUESTS: TypeAdapter[list[RequestLine]] = TypeAdapter(list[RequestLine])
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def requests_json(lines: Sequence[RequestLine]) -> list[dict[str, Any]]:
    """Lines of requests as mappings; for thousands of them a third of the time of `as_json` on each."""
    found: list[dict[str, Any]] = _REQUESTS.dump_python(list(lines), mode="json")
    return found


def line_bytes(line: Line) -> bytes:
    """A line as it stands in the file, with its end.

    Raises:
        ValueError: a number that is not finite, which JSON cannot hold.
    """
    if isinstance(line, DecisionLine) and not all(map(math.isfinite, line.values)):
        raise ValueError(f"decision {line.n}: a telemetry value is not finite")
    return _adapter(type(line)).dump_json(line) + b"\n"


def lengths_since(previous: Sequence[IntArray], present: Sequence[IntArray]) -> Lengths:
    """What came to two successive readings' `recent_lengths_tokens`, per PD cluster.

    Where several answers fit (equal lengths in a row) any of them rebuilds the same reading.
    """
    found = []
    for before, now in zip(previous, present, strict=True):
        shift = 0
        while shift < len(before) and not np.array_equal(before[shift:], now[: len(before) - shift]):
            shift += 1
        found.append(tuple(now[len(before) - shift :].tolist()))
    return tuple(found)


def _joined(before: Lengths, new: Lengths) -> Lengths:
    """Lengths so far and new ones, the last 300 of each cluster."""
    if not before:
        return tuple(column[-RECENT_LENGTHS:] for column in new)
    return tuple((a + b)[-RECENT_LENGTHS:] for a, b in zip(before, new, strict=True))


# ---------------------------------------------------------------------------------------- writing


class _Owed:
    """Lengths of decision lines that were lost; the next decision line carries them, so that readings stay whole."""

    def __init__(self) -> None:
        self._lengths: Lengths = ()

    def pay(self, line: Line) -> Line:
        """The line with what is owed."""
        if not self._lengths or not isinstance(line, DecisionLine):
            return line
        lengths, self._lengths = _joined(self._lengths, line.new_lengths), ()
        return dataclasses.replace(line, new_lengths=lengths)

    def lost(self, line: Line) -> None:
        """A line that will not be written."""
        if isinstance(line, DecisionLine):
            self._lengths = _joined(self._lengths, line.new_lengths)


class DecisionLog:
    """Writes a log from a thread of its own, so that the disk never holds up the caller.

    A file that would exceed `max_bytes` becomes `PATH.1`, that one `PATH.2` and so on to `keep`; each begins with a
    header. A file of an earlier run at `path` is moved away likewise. What cannot be written (a full disk, a disk that
    hangs) is dropped and counted; what is written are whole lines.

    Args:
        path: the present file.
        header: of the first file; later parts follow the policy and mode in force.
        max_bytes: size of a file, at least 64 KiB.
        keep: how many old files stay.

    Raises:
        PrfaasError: the file cannot be opened, or a limit that makes no sense.
    """

    def __init__(
        self, path: str | Path, header: HeaderLine, max_bytes: int = 256 << 20, keep: int = 8
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise PrfaasError(
                f"decision log {path}: max_bytes must be at least {MIN_BYTES}, found {max_bytes}"
            )
        if keep < 0:
            raise PrfaasError(f"decision log {path}: keep must be 0 or more, found {keep}")
        self.path = Path(path)
        self._header = header
        self._max_bytes, self._keep = max_bytes, keep
        self._file: int | None = None
        self._size = self._begun = 0
        self._torn = False  # the file may hold the beginning of a line behind `_size`
        self._queue: queue.Queue[Line | threading.Event | None] = queue.Queue(QUEUE_LINES)
        self._refused = self._failed = self._told = 0
        self._owed_before, self._owed_after = _Owed(), _Owed()
        self._time_ns = header.time_ns
        self.fault: str | None = None
        """What keeps lines from being written now, None when all is well."""
        try:
            if self.path.exists() and self.path.stat().st_size:
                self._shift()
            self._open()
        except OSError as error:
            raise PrfaasError(f"decision log {path}: cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._closed = False
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written."""
        return self._refused + self._failed

    def write(self, line: Line) -> None:
        """Have a line written; returns at once. After `close` it is dropped and counted."""
        line = self._owed_before.pay(line)
        try:
            if self._closed:
                raise queue.Full
            self._queue.put_nowait(line)
        except queue.Full:
            self._refused += 1
            self._owed_before.lost(line)
            self.fault = "the log is closed" if self._closed else "the disk does not keep up"

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything given so far is written or dropped; False if that takes too long."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what waits and close the file; gives up after `timeout_s`. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    # the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._take(self._owed_after.pay(item))
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take(self, line: Line) -> None:
        try:
            content = line_bytes(line)
            missing = self.dropped - self._told
            if missing:
                text = f"{missing} lines before this one were not written"
                content = line_bytes(EventLine(time_ns=self._time_ns, what="dropped", text=text)) + content
            self._append(content)
            self._told += missing
            self.fault = None
        except (OSError, ValueError) as error:
            self._failed += 1
            self._owed_after.lost(line)
            self.fault = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._follow(line)

    def _follow(self, line: Line) -> None:
        """Keep what the header of the next part says."""
        if isinstance(line, DecisionLine):
            self._time_ns = line.time_ns
            self._header = dataclasses.replace(
                self._header,
                mode=line.mode,
                recent_lengths=_joined(self._header.recent_lengths, line.new_lengths),
            )
        elif isinstance(line, EventLine) and line.policy_spec is not None and line.policy_hash is not None:
            self._header = dataclasses.replace(
                self._header, policy_spec=line.policy_spec, policy_hash=line.policy_hash
            )

    def _append(self, content: bytes) -> None:
        if self._file is None:
            self._open()
        elif self._size > self._begun and self._size + len(content) > self._max_bytes:
            os.close(self._file)
            self._file = None
            self._shift()
            self._header = dataclasses.replace(self._header, part=self._header.part + 1)
            self._open()
        self._write(content)

    def _write(self, content: bytes) -> None:
        """Append all of it or nothing."""
        assert self._file is not None
        if self._torn:
            os.ftruncate(self._file, self._size)
        self._torn = True
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
                self._torn = False
            raise
        self._torn = False
        self._size += len(content)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(self.path, flags, 0o644)
        self._size, self._torn = 0, False
        try:
            self._write(line_bytes(self._header))
        except OSError:
            os.close(self._file)
            self._file = None
            raise
        self._begun = self._size

    def _shift(self) -> None:
        """PATH becomes PATH.1, and so on; the oldest goes."""
        if self._keep == 0:
            return
        for k in range(self._keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(part_path(self.path, k), part_path(self.path, k + 1))
        os.replace(self.path, part_path(self.path, 1))


def part_path(path: Path, k: int) -> Path:
    """The k-th file before the present one."""
    return path.with_name(f"{path.name}.{k}")


# ---------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Log:
    """A log as read, in file order."""

    path: Path
    header: HeaderLine
    """Of the oldest file read."""
    lines: tuple[DecisionLine | RequestLine | ConversionLine | EventLine, ...]
    places: tuple[tuple[Path, int], ...]
    """File and line number of each line."""
    cut: int
    """Last lines that were cut off in the middle and left out."""
    parts: int

    def where(self, k: int) -> str:
        """`FILE:LINE` of a line."""
        return "{}:{}".format(*self.places[k])

    def _of(self, kind: type[_LineT]) -> list[_LineT]:
        return [line for line in self.lines if isinstance(line, kind)]

    @cached_property
    def decisions(self) -> list[DecisionLine]:
        """The decisions in order."""
        return self._of(DecisionLine)

    @cached_property
    def requests(self) -> list[RequestLine]:
        """The requests in the order in which they ended."""
        return self._of(RequestLine)

    @cached_property
    def conversions(self) -> list[ConversionLine]:
        """The conversions in the order in which they ended."""
        return self._of(ConversionLine)

    @cached_property
    def events(self) -> list[EventLine]:
        """The events in order."""
        return self._of(EventLine)

    @property
    def missing_decisions(self) -> int:
        """Decisions whose line is not there, by the gaps in their numbers."""
        numbers = [line.n for line in self.decisions]
        return numbers[-1] - numbers[0] + 1 - len(numbers) if numbers else 0

    @cached_property
    def scenario(self) -> Scenario:
        """The scenario that the router ran; PrfaasError if this version cannot read it."""
        try:
            return Scenario.model_validate(self.header.scenario)
        except ValidationError as error:
            raise first_error(error, f"{self.place_of_header}: scenario") from None

    @property
    def place_of_header(self) -> str:
        """`FILE:1` of the header."""
        return f"{self.places[0][0] if self.places else self.path}:1"

    @cached_property
    def schema(self) -> TelemetrySchema:
        """Telemetry schema of the readings.

        Raises:
            PrfaasError: this version has other telemetry fields than the log; they are named.
        """
        schema = scenario_schema(self.scenario)
        if schema.hash == self.header.schema_hash and schema.names == self.header.names:
            return schema
        then = TelemetrySchema(schema.n_pd, schema.n_prfaas, schema.n_links)
        then.__dict__["names"] = self.header.names
        difference = schema.difference(then) if schema.names != self.header.names else "other units or scales"
        raise PrfaasError(
            f"{self.place_of_header}: the log has other telemetry than this version: {difference}"
        )

    def telemetry(self) -> Iterator[tuple[int, DecisionLine, Telemetry]]:
        """(place among `lines`, decision, reading as the policy saw it) in order.

        Raises:
            PrfaasError: see `schema`.
        """
        schema = self.schema
        recent: Lengths = self.header.recent_lengths or ((),) * schema.n_pd
        for k, line in enumerate(self.lines):
            if not isinstance(line, DecisionLine):
                continue
            recent = _joined(recent, line.new_lengths)
            yield (
                k,
                line,
                Telemetry(
                    schema,
                    line.time_ns,
                    np.array(line.values),
                    conversion_tick=line.conversion_tick,
                    legal_moves=line.legal_moves,
                    recent_lengths_tokens=tuple(np.array(column, dtype=np.int64) for column in recent),
                ),
            )


def _fault(error: ValidationError, raw: bytes, place: str) -> PrfaasError:
    with contextlib.suppress(ValueError, AttributeError):
        version = json.loads(raw).get("format_version", FORMAT_VERSION)
        if (
            version != FORMAT_VERSION
        ):  # before all other fields, which another version may have in another shape
            return PrfaasError(
                f"{place}: format_version is {version!r:.40}; this version reads {FORMAT_VERSION}"
            )
    return PrfaasError(" ".join(str(first_error(error, place)).split())[:500])


def _read_file(path: Path) -> tuple[HeaderLine, list[Any], list[tuple[Path, int]], int]:
    """Header, other lines, their places, and whether the last line was cut off."""
    lines: list[Any] = []
    places: list[tuple[Path, int]] = []
    header: HeaderLine | None = None
    cut = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                place = f"{path}:{number}"
                try:
                    line = _ANY.validate_json(raw, strict=True)
                except ValidationError as error:
                    if header is not None and not raw.endswith(b"\n"):
                        cut = 1
                        break
                    raise _fault(error, raw, place) from None
                if header is None:
                    if not isinstance(line, HeaderLine):
                        raise PrfaasError(f"{place}: a decision log begins with a header, found {line.kind}")
                    header = line
                    continue
                _check_line(line, header, lines, place)
                lines.append(line)
                places.append((path, number))
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None
    if header is None:
        raise PrfaasError(f"{path}: is empty; a decision log begins with a header")
    return header, lines, places, cut


def _check_line(line: Line, header: HeaderLine, before: list[Any], place: str) -> None:
    """PrfaasError for a line that does not fit its header or the one before."""
    if isinstance(line, HeaderLine):
        raise PrfaasError(f"{place}: a second header; each run and each part has a file of its own")
    if not isinstance(line, DecisionLine):
        return
    n_pd = len({name.partition(".")[0] for name in header.names if name.startswith("pd")})
    counts = [("values", len(line.values), len(header.names))]
    counts += [("legal_moves", len(line.legal_moves), n_pd), ("new_lengths", len(line.new_lengths), n_pd)]
    for name in ("proposed", "acted"):
        decision = getattr(line, name)
        if decision is not None:
            counts.append((f"{name}.moves", len(decision.clusters), n_pd))
    for name, found, wanted in counts:
        if found != wanted:
            raise PrfaasError(f"{place}: {name} has {found} entries; the header asks for {wanted}")
    last = next((b for b in reversed(before) if isinstance(b, DecisionLine)), None)
    if last is not None and (line.n <= last.n or line.time_ns <= last.time_ns):
        raise PrfaasError(
            f"{place}: decision {line.n} at {line.time_ns} ns comes after decision {last.n} at {last.time_ns} ns"
        )


def read_log(path: str | Path, *, parts: bool = True) -> Log:
    """Read a log.

    Args:
        path: the present file, or any other one.
        parts: read the older files of the same run beside it (`PATH.1`, `PATH.2`, ...) too.

    Raises:
        PrfaasError: a file that cannot be read, or a line that is wrong, which is named. A last line that was cut off
            is left out and counted.
    """
    newest = Path(path)
    found = [_read_file(newest)]
    while parts and found[0][0].part > 0:
        older = part_path(newest, len(found))
        if not older.is_file():
            break
        one = _read_file(older)
        start = (found[0][0].unix_s, found[0][0].time_ns, found[0][0].part - 1)
        if (one[0].unix_s, one[0].time_ns, one[0].part) != start:
            break
        found.insert(0, one)
    return Log(
        newest,
        found[0][0],
        tuple(line for _, lines, _, _ in found for line in lines),
        tuple(place for _, _, places, _ in found for place in places),
        sum(cut for *_, cut in found),
        len(found),
    )
