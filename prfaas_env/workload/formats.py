"""Line by line readers of the trace formats. Every fault names the file and the line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args

from prfaas_env.base import MAX_TOKENS, PrfaasError
from prfaas_env.workload.models import PREFIX_BLOCK_TOKENS, TraceFormat

TRACE_FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)

#: Seconds per unit of the stamp, where the format counts units; azure has wall-clock times.
TIME_UNITS_S: dict[TraceFormat, float] = {"mooncake": 1e-3, "burstgpt": 1.0, "bailian": 1.0, "vllm": 1.0}

_T = TypeVar("_T")
_MAX_STAMP_NS = 9_000_000_000_000_000_000
_LFS_START = "version https://git-lfs"
_FRACTION_STAMP = re.compile(r'"timestamp"\s*:\s*[0-9]+\.[0-9]')
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WALL_CLOCK = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
    r" ?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


@dataclass
class Rows:
    """The rows of a file as read, in file order: one list entry per row."""

    line: list[int] = field(default_factory=list)
    stamp_ns: list[int] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    #: Name of the session or "" per row; None when the file has no such column.
    session: list[str] | None = None
    #: Prefix block ids per row; None when the file has none.
    blocks: list[list[int]] | None = None
    notes: list[str] = field(default_factory=list)


def sniff_format(path: Path) -> TraceFormat | None:
    """The format that the first line of a file looks like, or None."""
    for _, line in text_lines(path):
        return _looks_like(line)
    return None


def read_rows(path: Path, trace_format: TraceFormat, time_unit_s: float | None) -> Rows:
    """Read a whole trace file.

    Args:
        path: the file.
        trace_format: `mooncake`, `bailian` or `vllm` (JSON lines), `azure` or `burstgpt` (CSV, columns found by
            header name).
        time_unit_s: seconds per unit of the stamp; None = the format's.

    Raises:
        PrfaasError: a file that cannot be read, is of another format, or has a bad line.
    """
    first = next(text_lines(path), None)
    if first is None:
        raise PrfaasError(f"{path}: the file is empty; a {trace_format} trace has one request per line")
    if _begins_profile(first[1]):
        raise PrfaasError(
            f"{path}:{first[0]}: a profile of rates, not requests; use it as arrivals of kind profile"
        )
    found = _looks_like(first[1])
    # A vllm file has the keys of a mooncake file: their blocks are compared later.
    if found is not None and found != trace_format and {found, trace_format} != {"mooncake", "vllm"}:
        raise PrfaasError(
            f"{path}:{first[0]}: the format is set to {trace_format}, but this line looks like {found}: "
            f"{_shown(first[1])}"
        )
    if trace_format in PREFIX_BLOCK_TOKENS:
        return _read_json_lines(path, trace_format, time_unit_s)
    if trace_format == "azure":
        return _read_csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), None, _wall_clock_ns)
    unit_ns = _unit_ns(TIME_UNITS_S[trace_format] if time_unit_s is None else time_unit_s)
    columns = ("Timestamp", "Request tokens", "Response tokens")
    return _read_csv(path, columns, "Session ID", lambda text: _number_ns(text, unit_ns))


def _looks_like(line: str) -> TraceFormat | None:
    names = {name.strip().lower() for name in line.split(",")}
    if line.startswith("{"):
        if '"chat_id"' in line:
            return "bailian"
        # Mooncake counts whole milliseconds.
        return "vllm" if _FRACTION_STAMP.search(line) else "mooncake"
    if "contexttokens" in names:
        return "azure"
    if "request tokens" in names:
        return "burstgpt"
    return None


def is_rate_profile(path: Path) -> bool:
    """Whether the first line of a file is the header of a rate profile."""
    return any(_begins_profile(line) for _, line in islice(text_lines(path), 1))


def _begins_profile(line: str) -> bool:
    return "window_start_s" in {name.strip().lower() for name in line.split(",")}


def _shown(value: object, limit: int = 60) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= limit else text[:limit] + "...")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.strip()
                if number == 1 and line.startswith(_LFS_START):
                    raise PrfaasError(
                        f"{path}:1: a Git LFS pointer, not the trace itself; fetch the file (git lfs pull)"
                    )
                if line:
                    yield number, line
    except UnicodeDecodeError as error:
        raise PrfaasError(f"{path}: not a text file in UTF-8 ({error.reason}); unpack it first") from None
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None


# --- numbers and times -------------------------------------------------------------------------------


def _unit_ns(unit_s: float) -> Decimal:
    return Decimal(repr(unit_s)) * 1_000_000_000


def _number_ns(value: int | Decimal | str, unit_ns: Decimal) -> int:
    """A stamp in units to whole nanoseconds, without binary fractions on the way."""
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise ValueError("a number is allowed") from None
    if not number.is_finite() or number < 0:
        raise ValueError("a number of 0 or more is allowed")
    if number * unit_ns > _MAX_STAMP_NS:
        raise ValueError("that is later than any date; check time_unit_s")
    return int((number * unit_ns).to_integral_value(ROUND_HALF_EVEN))


def _wall_clock_ns(text: str) -> int:
    """A date and time with up to 9 decimals to nanoseconds since 1970; without a zone it is read as UTC."""
    match = _WALL_CLOCK.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "allowed: YYYY-MM-DD HH:MM:SS with up to 9 decimals and an optional zone such as +00:00"
        )
    day, clock, decimals, zone = match.groups()
    try:
        instant = datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}")
    except ValueError as error:
        raise ValueError(f"no such date or time ({error})") from None
    since = instant - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int((decimals or "").ljust(9, "0"))


def _tokens(value: object) -> int:
    """A token count from JSON or CSV."""
    if isinstance(value, str) and re.fullmatch(r" *[0-9]{1,12} *", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"a whole number from 0 to {MAX_TOKENS:,} is allowed")
    return value


# --- JSON lines --------------------------------------------------------------------------------------


def _read_json_lines(path: Path, trace_format: TraceFormat, time_unit_s: float | None) -> Rows:
    unit_ns = _unit_ns(TIME_UNITS_S[trace_format] if time_unit_s is None else time_unit_s)
    whole = trace_format == "mooncake" and time_unit_s is None
    rows = Rows()
    blocks: list[list[int]] = []
    chats = _Chats(path) if trace_format == "bailian" else None
    rows_without = 0
    for number, line in text_lines(path):
        record = _json_object(path, number, line)
        stamp = _checked(path, number, record, "timestamp", lambda v: _json_stamp_ns(v, unit_ns, whole))
        rows.line.append(number)
        rows.stamp_ns.append(stamp)
        rows.input_tokens.append(_checked(path, number, record, "input_length", _tokens))
        rows.output_tokens.append(_checked(path, number, record, "output_length", _tokens))
        if chats is not None:
            chats.add(number, record)
        if "hash_ids" in record:
            blocks.append(_checked(path, number, record, "hash_ids", _block_ids))
        else:
            rows_without += 1
        if rows_without and blocks:
            raise PrfaasError(
                f"{path}:{number}: hash_ids is {'there' if 'hash_ids' in record else 'missing'}, unlike in "
                "the lines before; either every line has it or none"
            )
    rows.blocks = blocks if blocks else None
    if chats is not None:
        rows.session = chats.sessions(rows.notes)
    return rows


class _Chats:
    """Chats of a Bailian trace: each row names itself and the row that it goes on from (-1 = none)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line: dict[int, int] = {}
        self._parent: dict[int, int] = {}
        self._turn: dict[int, int] = {}

    def add(self, number: int, record: dict[str, Any]) -> None:
        """Take one row."""
        chat = _checked(self._path, number, record, "chat_id", _whole)
        if chat in self._line:
            raise PrfaasError(f"{self._path}:{number}: chat_id {chat} is that of line {self._line[chat]} too")
        self._line[chat] = number
        self._parent[chat] = _checked(self._path, number, record, "parent_chat_id", _whole)
        self._turn[chat] = _checked(self._path, number, record, "turn", _turn)

    def sessions(self, notes: list[str]) -> list[str]:
        """Name of each row's session in file order: the first chat of its chain of parents."""
        root: dict[int, int] = {}
        for chat in self._line:
            chain: list[int] = []
            at = chat
            while at not in root:
                chain.append(at)
                if self._parent[at] == at or len(chain) > len(self._line):
                    raise PrfaasError(
                        f"{self._path}:{self._line[chat]}: the parents of chat_id {chat} go round in a circle"
                    )
                if self._parent[at] not in self._line:
                    root[at] = at
                else:
                    at = self._parent[at]
            root.update(dict.fromkeys(chain, root[at]))
        orphans = sum(p != -1 and p not in self._line for p in self._parent.values())
        if orphans:
            notes.append(f"{orphans} rows go on from a chat that is not in the file: each begins a session")
        odd = sum(self._turn[c] != self._turn[p] + 1 for c, p in self._parent.items() if p in self._line)
        if odd:
            notes.append(f"{odd} rows whose turn is not one more than their parent's: kept, parents count")
        return [str(root[chat]) for chat in self._line]


def _whole(value: object) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("a whole 64-bit number is allowed")
    return value


def _turn(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("a whole number from 1 is allowed")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_float=Decimal, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PrfaasError(
            f"{path}:{number}: not a JSON object ({error}): {_shown(line)}; allowed: one object per line "
            "with timestamp, input_length, output_length and optional hash_ids"
        ) from None
    if not isinstance(record, dict):
        raise PrfaasError(f"{path}:{number}: found {_shown(line)}; a JSON object is allowed")
    return record


def _checked(path: Path, number: int, record: dict[str, Any], key: str, convert: Callable[[Any], _T]) -> _T:
    if key not in record:
        raise PrfaasError(f"{path}:{number}: no key {key!r}; found {sorted(record)}")
    try:
        return convert(record[key])
    except ValueError as error:
        raise PrfaasError(f"{path}:{number}: {key} is {_shown(record[key])}; {error}") from None


def _json_stamp_ns(value: object, unit_ns: Decimal, whole: bool) -> int:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError("a number is allowed")
    if isinstance(value, Decimal) and whole and value != value.to_integral_value():
        # A fraction tells of stamps in seconds; read as milliseconds they would run 1,000 times too fast.
        raise ValueError(
            "whole milliseconds are allowed; for stamps in seconds use format vllm or state time_unit_s"
        )
    return _number_ns(value, unit_ns)


def _block_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and -(2**63) <= v < 2**63 for v in value):
        raise ValueError("a list of whole 64-bit numbers is allowed")
    return value


# --- CSV ---------------------------------------------------------------------------------------------


def _read_csv(
    path: Path,
    columns: tuple[str, str, str],
    session_column: str | None,
    stamp_ns: Callable[[str], int],
) -> Rows:
    lines = text_lines(path)
    header_line, header_text = next(lines)
    header = [name.strip() for name in csv_fields(path, header_line, header_text)]
    lower = [name.lower() for name in header]
    missing = [name for name in columns if name.lower() not in lower]
    if missing:
        raise PrfaasError(f"{path}:{header_line}: the header has no column {missing[0]!r}; found {header}")
    stamp_at, input_at, output_at = (lower.index(name.lower()) for name in columns)
    session_at = (
        lower.index(session_column.lower()) if session_column and session_column.lower() in lower else None
    )
    rows = Rows(session=None if session_at is None else [])
    converters: Iterable[tuple[int, list[int], Callable[[str], int]]] = (
        (stamp_at, rows.stamp_ns, stamp_ns),
        (input_at, rows.input_tokens, _tokens),
        (output_at, rows.output_tokens, _tokens),
    )
    for number, line in lines:
        fields = csv_fields(path, number, line)
        if len(fields) != len(header):
            raise PrfaasError(
                f"{path}:{number}: {len(fields)} fields in {_shown(line)}; the header has {len(header)}"
            )
        rows.line.append(number)
        for at, column, convert in converters:
            try:
                column.append(convert(fields[at]))
            except ValueError as error:
                raise PrfaasError(f"{path}:{number}: {header[at]} is {_shown(fields[at])}; {error}") from None
        if rows.session is not None and session_at is not None:
            rows.session.append(fields[session_at].strip())
    return rows


def csv_fields(path: Path, number: int, line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise PrfaasError(f"{path}:{number}: not a CSV line ({error}): {_shown(line)}") from None
