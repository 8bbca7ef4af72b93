"""Line by line readers of the trace formats. Every fault names the file and the line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar, get_args

from prfaas_env.base import MAX_TOKENS, PrfaasError
from prfaas_env.workload.models import TraceFormat

TRACE_FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)

#: Seconds per unit of the stamp, where the format counts units; azure has wall-clock times.
TIME_UNITS_S: dict[TraceFormat, float] = {"mooncake": 1e-3, "burstgpt": 1.0}

_T = TypeVar("_T")
_MAX_STAMP_NS = 9_000_000_000_000_000_000
_LFS_START = "version https://git-lfs"
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
    for _, line in _lines(path):
        return _looks_like(line)
    return None


def read_rows(path: Path, trace_format: TraceFormat, time_unit_s: float | None) -> Rows:
    """Read a whole trace file.

    Args:
        path: the file.
        trace_format: `mooncake` (JSON lines), `azure` or `burstgpt` (CSV, columns found by header name).
        time_unit_s: seconds per unit of the stamp; None = the format's.

    Raises:
        PrfaasError: a file that cannot be read, is of another format, or has a bad line.
    """
    first = next(_lines(path), None)
    if first is None:
        raise PrfaasError(f"{path}: the file is empty; a {trace_format} trace has one request per line")
    found = _looks_like(first[1])
    if found is not None and found != trace_format:
        raise PrfaasError(
            f"{path}:{first[0]}: the format is set to {trace_format}, but this line looks like {found}: "
            f"{_shown(first[1])}"
        )
    if trace_format == "mooncake":
        return _read_mooncake(path, time_unit_s)
    if trace_format == "azure":
        return _read_csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), None, _wall_clock_ns)
    unit_ns = _unit_ns(TIME_UNITS_S[trace_format] if time_unit_s is None else time_unit_s)
    columns = ("Timestamp", "Request tokens", "Response tokens")
    return _read_csv(path, columns, "Session ID", lambda text: _number_ns(text, unit_ns))


def _looks_like(line: str) -> TraceFormat | None:
    names = {name.strip().lower() for name in line.split(",")}
    if line.startswith("{"):
        return "mooncake"
    if "contexttokens" in names:
        return "azure"
    if "request tokens" in names:
        return "burstgpt"
    return None


def _shown(value: object, limit: int = 60) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
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


# --- Mooncake ----------------------------------------------------------------------------------------


def _read_mooncake(path: Path, time_unit_s: float | None) -> Rows:
    unit_ns = _unit_ns(TIME_UNITS_S["mooncake"] if time_unit_s is None else time_unit_s)
    rows = Rows()
    blocks: list[list[int]] = []
    rows_without = 0
    for number, line in _lines(path):
        record = _json_object(path, number, line)
        stamp = _checked(path, number, record, "timestamp", lambda v: _json_stamp_ns(v, unit_ns, time_unit_s))
        rows.line.append(number)
        rows.stamp_ns.append(stamp)
        rows.input_tokens.append(_checked(path, number, record, "input_length", _tokens))
        rows.output_tokens.append(_checked(path, number, record, "output_length", _tokens))
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
    return rows


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


def _json_stamp_ns(value: object, unit_ns: Decimal, time_unit_s: float | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError("a number is allowed")
    if isinstance(value, Decimal) and time_unit_s is None and value != value.to_integral_value():
        # A fraction tells of stamps in seconds; read as milliseconds they would run 1,000 times too fast.
        raise ValueError("whole milliseconds are allowed; for another unit state time_unit_s (1 for seconds)")
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
    lines = _lines(path)
    header_line, header_text = next(lines)
    header = [name.strip() for name in _fields(path, header_line, header_text)]
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
        fields = _fields(path, number, line)
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


def _fields(path: Path, number: int, line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise PrfaasError(f"{path}:{number}: not a CSV line ({error}): {_shown(line)}") from None
