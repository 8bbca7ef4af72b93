"""What is in a trace: rates, lengths, burstiness, prefix reuse."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from prfaas_env.base import PrfaasError, first_error
from prfaas_env.simulator.formulas import NS_PER_S, IntArray
from prfaas_env.workload.formats import TRACE_FORMATS, sniff_format
from prfaas_env.workload.models import TraceFormat, TraceWorkload, ZeroTokens
from prfaas_env.workload.rate_profile import read_profile
from prfaas_env.workload.requests import RequestTable
from prfaas_env.workload.traces import load_trace, replay, resolve_trace_file

#: The paper's optimum (table 6), the default threshold of the summary.
DEFAULT_THRESHOLD_TOKENS = 19_400
_BIN_S = 10
_DAY_S = 86_400


@dataclass(frozen=True)
class Quantiles:
    """Spread of a number of tokens over requests (linear between observations)."""

    p10: float
    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: IntArray) -> Quantiles:
        """Quantiles of a non-empty array."""
        p10, p50, p90, p95, p99 = (float(v) for v in np.percentile(values, [10, 50, 90, 95, 99]))
        return cls(p10, p50, p90, p95, p99, float(values.mean()), float(values.max()))


@dataclass(frozen=True)
class PrefixSummary:
    """Reuse of prefixes if one cache kept every block for ever (an upper limit of any cache)."""

    block_tokens: int
    #: Share of requests whose leading run of blocks was seen before and is longer than one block.
    share_over_one_block: float
    #: Cached tokens by input tokens, over all requests; hits end at the input length.
    hit_tokens_share: float
    uncached_tokens: Quantiles
    #: Share of requests whose uncached length is above the threshold, and their share of the uncached tokens.
    uncached_share_above: float
    uncached_tokens_share_above: float


@dataclass(frozen=True)
class TraceSummary:
    """Figures of a trace. Gaps and counts are of the replay: after spreading, where stamps are rounded."""

    file: str
    format: str
    requests: int
    zero_rows: int
    span_s: float
    mean_rate_rps: float
    distinct_stamp_share: float
    input_tokens: Quantiles
    output_tokens: Quantiles
    threshold_tokens: int
    share_above: float
    tokens_share_above: float
    interarrival_cv: float | None
    longest_gap_s: float
    #: Arrivals per whole 10 s; None when the trace is shorter.
    count_10s_mean: float | None
    count_10s_max: int | None
    count_10s_variance_to_mean: float | None
    sessions: int
    #: Requests per session, of those in sessions; None when there are none.
    mean_turns: float | None
    prefix: PrefixSummary | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON."""
        return asdict(self) | {"notes": list(self.notes)}


@dataclass(frozen=True)
class ProfileSummary:
    """Figures of a rate profile, in its own time and rates."""

    file: str
    windows: int
    #: Length of most windows.
    window_s: float
    span_s: float
    mean_rate_rps: float
    lowest_rate_rps: float
    highest_rate_rps: float
    #: Highest by mean rate.
    peak_to_mean: float
    silent_windows: int
    #: CV of the gaps, by window; None when the file has no such column.
    cv_median: float | None
    cv_max: float | None
    #: Mean, lowest and highest rate of each whole day; empty for a shorter file.
    days: tuple[tuple[float, float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON."""
        return asdict(self) | {"days": [list(day) for day in self.days]}


def inspect_profile(file: str | Path, base_dir: Path | None = None) -> ProfileSummary:
    """Summarise a rate profile.

    Args:
        file: a path or `bundled:NAME`.
        base_dir: folder against which a relative path is read.

    Raises:
        PrfaasError: a bad file or line.
    """
    profile = read_profile(resolve_trace_file(str(file), base_dir))
    rates, edges_s = profile.rates_rps, profile.edges_s
    span_s = float(edges_s[-1] - edges_s[0])
    mean_rps = profile.mean_rps
    day_of = ((edges_s[:-1] - edges_s[0]) // _DAY_S).astype(np.int64)
    days = [(rates[day_of == d], np.diff(edges_s)[day_of == d]) for d in range(int(span_s // _DAY_S))]
    return ProfileSummary(
        file=str(file),
        windows=len(profile),
        window_s=float(np.median(np.diff(edges_s))),
        span_s=span_s,
        mean_rate_rps=mean_rps,
        lowest_rate_rps=float(rates.min()),
        highest_rate_rps=float(rates.max()),
        peak_to_mean=float(rates.max() / mean_rps) if mean_rps else 0.0,
        silent_windows=int((rates == 0).sum()),
        cv_median=None if profile.cv is None else float(np.median(profile.cv)),
        cv_max=None if profile.cv is None else float(profile.cv.max()),
        days=tuple((float(r @ s / s.sum()), float(r.min()), float(r.max())) for r, s in days if len(r)),
    )


def infinite_cache_hits(table: RequestTable) -> tuple[IntArray, IntArray]:
    """Leading blocks of each request that an earlier one had too, and the tokens they save.

    A block counts only behind the same run of blocks from the start. The last id may cover a partial block,
    so hit tokens end at the input length.

    Returns:
        `(blocks, tokens)`, both int64 of shape (n,).
    """
    # A node per distinct run of blocks: (node of the run before, id) -> node; 0 is the empty run.
    nodes: dict[tuple[int, int], int] = {}
    hits = np.zeros(len(table), dtype=np.int64)
    ids = table.block_ids.tolist()
    offsets = table.block_offsets.tolist()
    for i in range(len(table)):
        node = 0
        known = 0
        for block in ids[offsets[i] : offsets[i + 1]]:
            fresh = len(nodes) + 1
            node = nodes.setdefault((node, block), fresh)
            known += node != fresh
        hits[i] = known
    return hits, np.minimum(hits * table.block_tokens, table.input_tokens)


def inspect_trace(
    file: str | Path,
    trace_format: TraceFormat | None = None,
    *,
    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS,
    time_unit_s: float | None = None,
    block_tokens: int | None = None,
    zero_tokens: ZeroTokens = "drop",
    base_dir: Path | None = None,
) -> TraceSummary:
    """Summarise a trace.

    Args:
        file: a path or `bundled:NAME`.
        trace_format: None = told from the first line.
        threshold_tokens: routing threshold for the shares above it.
        time_unit_s, block_tokens, zero_tokens: as in `TraceWorkload`.
        base_dir: folder against which a relative path is read.

    Raises:
        PrfaasError: a bad file or line, or a format that cannot be told.
    """
    path = resolve_trace_file(str(file), base_dir)
    notes: list[str] = []
    if trace_format is None:
        trace_format = sniff_format(path)
        if trace_format is None:
            raise PrfaasError(
                f"{path}:1: cannot tell the format from this line; state one of {', '.join(TRACE_FORMATS)}"
            )
        notes.append(f"format {trace_format}, told from the first line")
    try:
        workload = TraceWorkload(
            file=str(file),
            format=trace_format,
            time_unit_s=time_unit_s,
            block_tokens=block_tokens,
            zero_tokens=zero_tokens,
        )
    except ValidationError as error:
        raise first_error(error, str(file)) from None
    trace = load_trace(workload, base_dir)
    table = replay(workload, seed=0, base_dir=base_dir)
    span_s = int(trace.stamp_ns[-1]) / NS_PER_S
    gaps_s = np.diff(table.arrival_ns) / NS_PER_S
    counts = _counts(table.arrival_ns, span_s)
    above = table.input_tokens > threshold_tokens
    in_sessions = table.session[table.session >= 0]
    n_sessions = len(np.unique(in_sessions))
    return TraceSummary(
        file=str(file),
        format=trace_format,
        requests=len(table),
        zero_rows=trace.zero_rows,
        span_s=span_s,
        mean_rate_rps=len(table) / span_s if span_s > 0 else 0.0,
        distinct_stamp_share=trace.distinct_share,
        input_tokens=Quantiles.of(table.input_tokens),
        output_tokens=Quantiles.of(table.output_tokens),
        threshold_tokens=threshold_tokens,
        share_above=float(above.mean()),
        tokens_share_above=float(table.input_tokens[above].sum() / table.input_tokens.sum()),
        interarrival_cv=float(gaps_s.std() / gaps_s.mean()) if len(gaps_s) and gaps_s.any() else None,
        longest_gap_s=float(gaps_s.max()) if len(gaps_s) else 0.0,
        count_10s_mean=float(counts.mean()) if len(counts) else None,
        count_10s_max=int(counts.max()) if len(counts) else None,
        count_10s_variance_to_mean=float(counts.var() / counts.mean()) if counts.any() else None,
        sessions=n_sessions,
        mean_turns=len(in_sessions) / n_sessions if n_sessions else None,
        prefix=_prefix_summary(table, threshold_tokens) if table.block_tokens else None,
        notes=(*notes, *table.notes),
    )


def _counts(arrival_ns: IntArray, span_s: float) -> IntArray:
    """Arrivals in each whole bin of 10 s."""
    bins = int(span_s // _BIN_S)
    index = arrival_ns // (_BIN_S * NS_PER_S)
    return np.bincount(index[index < bins], minlength=bins).astype(np.int64)


def _prefix_summary(table: RequestTable, threshold_tokens: int) -> PrefixSummary:
    blocks, hit_tokens = infinite_cache_hits(table)
    uncached = table.input_tokens - hit_tokens
    above = uncached > threshold_tokens
    total = int(uncached.sum())
    return PrefixSummary(
        block_tokens=table.block_tokens,
        share_over_one_block=float((blocks > 1).mean()),
        hit_tokens_share=float(hit_tokens.sum() / table.input_tokens.sum()),
        uncached_tokens=Quantiles.of(uncached),
        uncached_share_above=float(above.mean()),
        uncached_tokens_share_above=float(uncached[above].sum() / total) if total else 0.0,
    )
