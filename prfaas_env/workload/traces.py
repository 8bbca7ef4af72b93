"""Recorded requests: finding the file, reading it once, spreading rounded stamps, cutting a slice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from prfaas_env.base import PrfaasError, stream
from prfaas_env.simulator.formulas import NS_PER_S, IntArray, ns_from_s
from prfaas_env.workload.formats import TIME_UNITS_S, Rows, read_rows
from prfaas_env.workload.hits import draw_cached_tokens, prefix_note
from prfaas_env.workload.models import PREFIX_BLOCK_TOKENS, TraceFormat, TraceWorkload, ZeroTokens
from prfaas_env.workload.requests import RequestTable

DATA_DIR = Path(__file__).parent / "data"
#: Bundled rate profiles (arrivals of kind profile).
RATES_DIR = DATA_DIR / "rates"
BUNDLED_PREFIX = "bundled:"
#: Block size that is taken when several fit (Mooncake's own).
_USUAL_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Trace:
    """A parsed file in order of time (ties in file order). Arrays are int64 and read-only.

    Arrays have shape (n,), but `block_offsets` (n + 1,) and `block_ids` (total ids,).
    """

    #: Nanoseconds since the first stamp of the file.
    stamp_ns: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    session: IntArray
    block_offsets: IntArray
    block_ids: IntArray
    #: Tokens per prefix block; 0 = no prefix data.
    block_tokens: int
    #: Rows of the file whose input or output has 0 tokens.
    zero_rows: int
    distinct_stamps: int
    #: Median gap between distinct stamps; 1 s when there is one stamp only.
    typical_step_ns: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.stamp_ns)

    @property
    def distinct_share(self) -> float:
        """Distinct stamps by rows; well below 1 when stamps are rounded."""
        return self.distinct_stamps / len(self)


def bundled_traces() -> tuple[str, ...]:
    """Names of the request traces that `bundled:NAME` accepts."""
    return tuple(sorted(p.stem for p in DATA_DIR.iterdir() if p.suffix in {".jsonl", ".csv"}))


def bundled_profiles() -> tuple[str, ...]:
    """Names of the rate profiles that `bundled:NAME` accepts."""
    return tuple(sorted(p.stem for p in RATES_DIR.iterdir() if p.suffix == ".csv"))


def resolve_trace_file(file: str, base_dir: Path | None = None) -> Path:
    """Path of a trace or rate profile: `bundled:NAME` (with or without the ending), or a path, relative to `base_dir`.

    Raises:
        PrfaasError: no such file, or no bundled trace of that name.
    """
    if file.startswith(BUNDLED_PREFIX):
        name = file.removeprefix(BUNDLED_PREFIX)
        for path in sorted((*DATA_DIR.iterdir(), *RATES_DIR.iterdir())):
            if path.suffix in {".jsonl", ".csv"} and name in {path.name, path.stem}:
                return path
        known = ", ".join((*bundled_traces(), *bundled_profiles()))
        raise PrfaasError(f"file: no bundled trace {name!r}; bundled are {known}")
    path = (base_dir or Path()) / file
    if not path.is_file():
        what = "is not a file" if path.exists() else "no such trace file"
        raise PrfaasError(f"{path}: {what}; give a path or one of bundled:{{{','.join(bundled_traces())}}}")
    return path


def trace_digest(file: str) -> str:
    """SHA-256 of a trace file's content, hex; the same wherever the file lies.

    Raises:
        PrfaasError: no such file, or it cannot be read.
    """
    path = resolve_trace_file(file)
    try:
        state = path.stat()
        return _digest(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None


@lru_cache(maxsize=16)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_trace(
    path: Path,
    trace_format: TraceFormat,
    *,
    time_unit_s: float | None = None,
    block_tokens: int | None = None,
    zero_tokens: ZeroTokens = "drop",
) -> Trace:
    """Read a trace file; the parsed file is kept in memory until the file changes.

    Args:
        path: the file.
        trace_format: its format.
        time_unit_s: seconds per unit of the stamp; None = the format's.
        block_tokens: tokens per prefix block; None = inferred from the number of ids per row.
        zero_tokens: rule for rows with 0 input or output tokens.

    Raises:
        PrfaasError: a bad file or line, named in the message.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None
    return _read_cached(
        path, state.st_mtime_ns, state.st_size, trace_format, time_unit_s, block_tokens, zero_tokens
    )


@lru_cache(maxsize=16)
def _read_cached(
    path: Path,
    mtime_ns: int,
    size: int,
    trace_format: TraceFormat,
    time_unit_s: float | None,
    block_tokens: int | None,
    zero_tokens: ZeroTokens,
) -> Trace:
    rows = read_rows(path, trace_format, time_unit_s)
    notes = [_time_note(trace_format, time_unit_s), *rows.notes]
    length = np.array(rows.input_tokens, dtype=np.int64)
    output = np.array(rows.output_tokens, dtype=np.int64)
    block_size, offsets, ids = _blocks(path, rows, length, trace_format, block_tokens, notes)
    stamp_ns = np.array(rows.stamp_ns, dtype=np.int64)
    zero = (length == 0) | (output == 0)
    n_zero = int(zero.sum())
    keep = _zero_rule(path, rows, zero, zero_tokens, notes)
    if not keep.any():
        raise PrfaasError(f"{path}: no requests in the file ({len(stamp_ns)} rows, {n_zero} with 0 tokens)")
    order = np.flatnonzero(keep)
    backwards = int((np.diff(stamp_ns[order]) < 0).sum())
    if backwards:
        order = order[np.argsort(stamp_ns[order], kind="stable")]
        notes.append(f"rows are not in order of time ({backwards} steps back): sorted, ties in file order")
    offsets, ids = _take_blocks(offsets, ids, order)
    stamp_ns = stamp_ns[order] - stamp_ns[order[0]]
    _doubt_unit(stamp_ns, trace_format, time_unit_s, notes)
    steps_ns = np.diff(np.unique(stamp_ns))
    trace = Trace(
        stamp_ns=stamp_ns,
        input_tokens=np.maximum(length[order], 1),
        output_tokens=np.maximum(output[order], 1),
        session=_sessions(rows, order),
        block_offsets=offsets,
        block_ids=ids,
        block_tokens=block_size,
        zero_rows=n_zero,
        distinct_stamps=len(steps_ns) + 1,
        typical_step_ns=int(np.median(steps_ns)) if len(steps_ns) else NS_PER_S,
        notes=tuple(notes),
    )
    for array in (
        trace.stamp_ns,
        trace.input_tokens,
        trace.output_tokens,
        trace.session,
        trace.block_offsets,
        trace.block_ids,
    ):
        array.setflags(write=False)
    return trace


def _time_note(trace_format: TraceFormat, time_unit_s: float | None) -> str:
    if trace_format not in TIME_UNITS_S:
        return "stamps are wall-clock times (UTC where no zone is given); trace time starts at the first one"
    unit_s = TIME_UNITS_S[trace_format] if time_unit_s is None else time_unit_s
    origin = "the unit of the format" if time_unit_s is None else "as stated"
    return f"stamps count {unit_s:g} s ({origin}, format {trace_format}); trace time starts at the first one"


#: Mean rates (requests per second) outside which a stamp of whole units was hardly read in the right unit.
_PLAUSIBLE_RPS = (0.02, 1000.0)
#: Fewest rows from which a rate is worked out.
_ROWS_FOR_DOUBT = 20


def _doubt_unit(
    stamp_ns: IntArray, trace_format: TraceFormat, time_unit_s: float | None, notes: list[str]
) -> None:
    """Say it loudly when the stamps were hardly meant in this unit; `stamp_ns` begins with 0."""
    if trace_format not in TIME_UNITS_S:
        return
    own_s = TIME_UNITS_S[trace_format]
    unit_s = own_s if time_unit_s is None else time_unit_s
    if unit_s != own_s:
        ratio = unit_s / own_s
        pace = f"{ratio:g} times slower" if ratio > 1 else f"{1 / ratio:g} times faster"
        notes.append(
            f"WARNING: with {unit_s:g} s as the stated unit the trace runs {pace} than by its format's"
        )
    span_s = int(stamp_ns[-1]) / NS_PER_S
    if (
        len(stamp_ns) < _ROWS_FOR_DOUBT
        or span_s == 0
        or np.any(stamp_ns % int(round(unit_s * NS_PER_S) or 1))
    ):
        return
    rate_rps = len(stamp_ns) / span_s
    if not _PLAUSIBLE_RPS[0] <= rate_rps <= _PLAUSIBLE_RPS[1]:
        notes.append(
            f"WARNING: {rate_rps:.3g} requests per second over {span_s:,.0f} s; check the unit of the stamps "
            f"(read as {unit_s:g} s; mooncake counts milliseconds, bailian, vllm and burstgpt seconds)"
        )


# --- prefix blocks -----------------------------------------------------------------------------------


def _blocks(
    path: Path,
    rows: Rows,
    length: IntArray,
    trace_format: TraceFormat,
    stated: int | None,
    notes: list[str],
) -> tuple[int, IntArray, IntArray]:
    """Block size (0 = none), offsets (n + 1,), ids; checks ids = ceil(length / size) in every row."""
    if rows.blocks is None:
        if stated is not None:
            raise PrfaasError(f"{path}: block_tokens is {stated}, but the file has no prefix data (hash_ids)")
        return 0, np.zeros(len(length) + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    counts = np.array([len(ids) for ids in rows.blocks], dtype=np.int64)
    of_format = PREFIX_BLOCK_TOKENS[trace_format]
    size, origin = stated or of_format or 0, "as stated" if stated else f"as {trace_format} has them"
    if not size:
        size, origin = _inferred_block_tokens(path, length, counts), "the size that fits most lines"
    wrong = np.flatnonzero(counts != -(-length // size))
    if len(wrong):
        i = int(wrong[0])
        hint = ""
        if size != _USUAL_BLOCK_TOKENS and np.all(counts == -(-length // _USUAL_BLOCK_TOKENS)):
            hint = f"; {_USUAL_BLOCK_TOKENS} would fit every line: is it a mooncake file, with milliseconds?"
        raise PrfaasError(
            f"{path}:{rows.line[i]}: {counts[i]} hash_ids for {length[i]} tokens; with block_tokens {size} "
            f"({origin}) there must be {-(-int(length[i]) // size)}, one per begun block{hint}"
        )
    if stated is None and of_format is None:
        origin = "inferred from the ids per row"
    notes.append(f"prefix blocks of {size} tokens ({origin})")
    if trace_format == "mooncake" and stated is None and size != _USUAL_BLOCK_TOKENS:
        notes.append(
            f"WARNING: Mooncake's own blocks have {_USUAL_BLOCK_TOKENS} tokens; if this is a file of format vllm "
            "or bailian, its stamps are seconds, not milliseconds"
        )
    ids = np.fromiter((i for row in rows.blocks for i in row), dtype=np.int64, count=int(counts.sum()))
    return size, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]), ids


def _inferred_block_tokens(path: Path, length: IntArray, counts: IntArray) -> int:
    """The block size b with ids = ceil(length / b) in every row, or else the one that fits most rows."""
    some = counts > 0
    if not some.any():
        raise PrfaasError(f"{path}: every hash_ids list is empty; remove the key or state block_tokens")
    low = -(-length[some] // counts[some])
    several = counts > 1
    high = (length[several] - 1) // (counts[several] - 1)
    lowest = int(low.max())
    highest = int(high.min()) if several.any() else max(lowest, _USUAL_BLOCK_TOKENS)
    powers = [b for b in (1 << k for k in range(31)) if lowest <= b <= highest]
    if lowest <= _USUAL_BLOCK_TOKENS <= highest:
        return _USUAL_BLOCK_TOKENS
    if lowest == highest:
        return max(lowest, 1)
    if len(powers) == 1:
        return powers[0]
    if lowest < highest:
        raise PrfaasError(
            f"{path}: prefix blocks may have any size from {lowest} to {highest} tokens; state block_tokens"
        )
    # The usual sizes first, so that they win a tie.
    candidates = [_USUAL_BLOCK_TOKENS, 16, int(np.median(low)), max(lowest, 1), max(highest, 1)]
    fits: dict[int, int] = {b: int(np.sum(counts == -(-length // b))) for b in candidates}
    return max(fits, key=lambda b: fits[b])


def _take_blocks(offsets: IntArray, ids: IntArray, order: IntArray) -> tuple[IntArray, IntArray]:
    """Offsets and ids of the rows `order`."""
    counts = np.diff(offsets)[order]
    new = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    # Position of every id: start of its row in the old array plus its place in the row.
    positions = np.arange(new[-1]) + np.repeat(offsets[:-1][order] - new[:-1], counts)
    return new, ids[positions]


# --- rows --------------------------------------------------------------------------------------------


def _zero_rule(
    path: Path,
    rows: Rows,
    zero: np.ndarray[tuple[int], np.dtype[np.bool_]],
    rule: ZeroTokens,
    notes: list[str],
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows to keep; adds the note."""
    n = int(zero.sum())
    if n == 0:
        return np.ones(len(zero), dtype=np.bool_)
    if rule == "refuse":
        i = int(np.flatnonzero(zero)[0])
        raise PrfaasError(
            f"{path}:{rows.line[i]}: {rows.input_tokens[i]} input and {rows.output_tokens[i]} output tokens; "
            "at least 1 of each is allowed (zero_tokens: drop leaves such lines out, one sets 0 to 1)"
        )
    if rule == "one":
        notes.append(f"{n} rows with 0 input or output tokens: 0 set to 1 (zero_tokens: one)")
        return np.ones(len(zero), dtype=np.bool_)
    notes.append(f"{n} rows with 0 input or output tokens: left out (zero_tokens: drop)")
    return ~zero


def _sessions(rows: Rows, order: IntArray) -> IntArray:
    """Sessions numbered by first appearance in time; -1 where a row names none."""
    if rows.session is None:
        return np.full(len(order), -1, dtype=np.int64)
    numbers: dict[str, int] = {}
    names = [rows.session[i] for i in order]
    return np.array([numbers.setdefault(s, len(numbers)) if s else -1 for s in names], dtype=np.int64)


# --- replay ------------------------------------------------------------------------------------------


def spread_stamps(stamp_ns: IntArray, typical_step_ns: int, rng: np.random.Generator) -> IntArray:
    """Undo the rounding of stamps: each group of equal ones is spread uniformly over its step.

    Stamps are taken as rounded down. The step of a group reaches to the next stamp; where that is more than
    1.5 typical steps away (an empty stretch), and for the last group, it is the typical step. Inside a
    group the drawn instants are sorted, so the order of rows stays.

    Args:
        stamp_ns: sorted stamps, shape (n,).
        typical_step_ns: the usual gap between distinct stamps.
        rng: draws one uniform number per row.

    Returns:
        Sorted instants, int64 of shape (n,), none of them at or after the next stamp.
    """
    stamps, group, counts = np.unique(stamp_ns, return_inverse=True, return_counts=True)
    step_ns = np.append(np.diff(stamps), typical_step_ns)
    step_ns = np.where(step_ns > 1.5 * typical_step_ns, typical_step_ns, step_ns)
    u = rng.random(len(stamp_ns))
    u = u[np.lexsort((u, group))]
    return np.asarray(stamp_ns + (u * np.repeat(step_ns, counts)).astype(np.int64), dtype=np.int64)


def is_spread(trace: Trace, workload: TraceWorkload) -> bool:
    """Whether the workload's rule spreads this trace's stamps."""
    return workload.spread == "always" or (workload.spread == "auto" and trace.distinct_share < 0.5)


def load_trace(workload: TraceWorkload, base_dir: Path | None = None) -> Trace:
    """The whole trace of a workload (from memory when the file has not changed)."""
    return read_trace(
        resolve_trace_file(workload.file, base_dir),
        workload.format,
        time_unit_s=workload.time_unit_s,
        block_tokens=workload.block_tokens,
        zero_tokens=workload.zero_tokens,
    )


def slice_span_s(trace: Trace, workload: TraceWorkload) -> float:
    """Length in seconds of the replayed slice at speed 1: up to `end_s` or, if earlier, the end of the trace.

    Raises:
        PrfaasError: the slice starts after the end of the trace.
    """
    end_ns = int(trace.stamp_ns[-1])
    if is_spread(trace, workload):
        end_ns += trace.typical_step_ns
    end_s = end_ns / NS_PER_S
    if workload.start_s > end_s:
        raise PrfaasError(
            f"start_s is {workload.start_s:g}; the trace {workload.file} ends at {end_s:g} s of trace time"
        )
    return (end_s if workload.end_s is None else min(workload.end_s, end_s)) - workload.start_s


def replay(
    workload: TraceWorkload,
    *,
    seed: int,
    horizon_s: float | None = None,
    n_requests: int | None = None,
    base_dir: Path | None = None,
) -> RequestTable:
    """Requests of the workload's slice, from the start of the slice, `speed` times as fast.

    The whole trace is spread before the slice is cut, so a request keeps its instant whatever the slice.

    Args:
        workload: file, format, slice, speed, rules.
        seed: episode seed; matters only where stamps are spread (stream "arrivals").
        horizon_s: arrivals in [0, horizon_s) of replayed time; None = the whole slice.
        n_requests: the first `n_requests` of the slice instead.
        base_dir: folder against which a relative path is read.

    Raises:
        PrfaasError: bad file, line, slice or limit; fewer than `n_requests` in the slice.
    """
    trace = load_trace(workload, base_dir)
    slice_span_s(trace, workload)
    notes = list(trace.notes)
    arrival_ns = trace.stamp_ns
    if is_spread(trace, workload):
        arrival_ns = spread_stamps(trace.stamp_ns, trace.typical_step_ns, stream(seed, "arrivals"))
        notes.append(
            f"{len(trace):,} rows share {trace.distinct_stamps:,} distinct stamps: each group is spread over "
            f"its step (typical {trace.typical_step_ns / NS_PER_S:g} s), seeded (spread: {workload.spread})"
        )
    start_ns = ns_from_s(workload.start_s)
    first = int(np.searchsorted(arrival_ns, start_ns, side="left"))
    last = len(trace)
    if workload.end_s is not None:
        last = int(np.searchsorted(arrival_ns, ns_from_s(workload.end_s), side="left"))
    arrival_ns = arrival_ns[first:last] - start_ns
    if workload.speed != 1.0:
        arrival_ns = np.rint(arrival_ns / workload.speed).astype(np.int64)
        notes.append(f"replayed {workload.speed:g} times as fast (speed)")
    arrival_ns = arrival_ns[: _limit(arrival_ns, workload, horizon_s, n_requests)]
    last = first + len(arrival_ns)
    input_tokens = trace.input_tokens[first:last] + workload.extra_input_tokens
    if workload.extra_input_tokens:
        notes.append(f"{workload.extra_input_tokens} tokens added to every input (extra_input_tokens)")
    offsets = trace.block_offsets[first : last + 1]
    if trace.block_tokens and workload.hit_rate is not None:
        raise PrfaasError(
            f"hit_rate does not apply to {workload.file}, which has prefix ids (blocks of {trace.block_tokens} "
            "tokens); leave it out"
        )
    if not trace.block_tokens:
        notes.append(prefix_note(workload.hit_rate))
    cached_tokens = draw_cached_tokens(workload.hit_rate, input_tokens, seed, first)
    return RequestTable(
        arrival_ns=arrival_ns,
        input_tokens=input_tokens,
        output_tokens=trace.output_tokens[first:last].copy(),
        session=trace.session[first:last].copy(),
        block_offsets=offsets - offsets[0],
        block_ids=trace.block_ids[offsets[0] : offsets[-1]].copy(),
        block_tokens=trace.block_tokens,
        notes=tuple(notes),
        cached_tokens=cached_tokens,
    )


def _limit(
    arrival_ns: IntArray, workload: TraceWorkload, horizon_s: float | None, n_requests: int | None
) -> int:
    """How many requests of the slice are asked for."""
    if horizon_s is not None and n_requests is not None:
        raise PrfaasError("give horizon_s or n_requests, not both")
    if horizon_s is not None:
        if not 0 <= horizon_s < 1e9:
            raise PrfaasError(f"horizon_s is {horizon_s}; allowed: 0 up to 1e9 seconds")
        return int(np.searchsorted(arrival_ns, ns_from_s(horizon_s), side="left"))
    if n_requests is None:
        return len(arrival_ns)
    if not 0 <= n_requests <= len(arrival_ns):
        raise PrfaasError(
            f"n_requests is {n_requests}; the slice of {workload.file} holds {len(arrival_ns)} requests"
        )
    return n_requests
