"""`prfaas trace`: look into recorded requests before replaying them."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from prfaas_env.base import PrfaasError
from prfaas_env.workload.formats import TRACE_FORMATS, is_rate_profile
from prfaas_env.workload.inspect import (
    DEFAULT_THRESHOLD_TOKENS,
    ProfileSummary,
    TraceSummary,
    inspect_profile,
    inspect_trace,
)
from prfaas_env.workload.traces import resolve_trace_file

app = typer.Typer(no_args_is_help=True, help="Recorded requests.")


@app.callback()
def trace() -> None:
    """Recorded requests."""


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="A trace file or rate profile, or bundled:NAME.")],
    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format", help=f"{', '.join(TRACE_FORMATS)}; told from the first line when not given."
        ),
    ] = None,
    threshold: Annotated[
        int, typer.Option(min=0, help="Routing threshold in tokens for the shares above it.")
    ] = DEFAULT_THRESHOLD_TOKENS,
    time_unit_s: Annotated[
        float | None, typer.Option(help="Seconds per unit of the stamp; the format's when not given.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per prefix block; inferred when not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Print span, rate, lengths, share above a threshold, burstiness and prefix reuse of a trace.

    Of a rate profile (windows with a mean rate each): span, rates by day, burstiness.
    """
    if trace_format is not None and trace_format not in TRACE_FORMATS:
        raise PrfaasError(f"--format is {trace_format!r}; allowed: {', '.join(TRACE_FORMATS)}")
    if trace_format is None and is_rate_profile(resolve_trace_file(file)):
        if time_unit_s is not None or block_tokens is not None:
            raise PrfaasError(
                f"{file}: a rate profile, to which --time-unit-s and --block-tokens do not apply"
            )
        profile = inspect_profile(file)
        if as_json:
            typer.echo(json.dumps(profile.to_dict(), indent=2, allow_nan=False))
        else:
            _show_profile(profile, Console())
        return
    summary = inspect_trace(
        file,
        trace_format,
        threshold_tokens=threshold,
        time_unit_s=time_unit_s,
        block_tokens=block_tokens,
    )
    if as_json:
        typer.echo(json.dumps(summary.to_dict(), indent=2, allow_nan=False))
    else:
        _show(summary, Console())


def _show(summary: TraceSummary, console: Console) -> None:
    lengths = Table("tokens", "p10", "p50", "p90", "p95", "p99", "mean", "max", title=summary.file)
    rows = [("input", summary.input_tokens), ("output", summary.output_tokens)]
    if summary.prefix is not None:
        rows.append(("input not in an infinite cache", summary.prefix.uncached_tokens))
    for name, q in rows:
        lengths.add_row(name, *(f"{v:,.0f}" for v in (q.p10, q.p50, q.p90, q.p95, q.p99, q.mean, q.max)))
    for column in lengths.columns[1:]:
        column.justify = "right"
    figures = Table(show_header=False)
    for name, text in _figures(summary):
        figures.add_row(name, text)
    console.print(lengths)
    console.print(figures)
    for note in summary.notes:
        console.print(f"- {note}", markup=False, highlight=False)


def _show_profile(s: ProfileSummary, console: Console) -> None:
    figures = Table(show_header=False, title=s.file)
    figures.add_row("format", "rate profile (arrivals of kind profile)")
    figures.add_row("windows", f"{s.windows:,} of {s.window_s:,.0f} s, {s.silent_windows} without arrivals")
    figures.add_row("span", f"{s.span_s:,.0f} s ({s.span_s / 86_400:.2f} days)")
    figures.add_row("mean rate", f"{s.mean_rate_rps:,.3f} requests/s")
    figures.add_row("lowest, highest rate", f"{s.lowest_rate_rps:,.3f}, {s.highest_rate_rps:,.3f} requests/s")
    figures.add_row("highest by mean", f"{s.peak_to_mean:.2f}")
    if s.cv_median is not None and s.cv_max is not None:
        figures.add_row("inter-arrival CV by window", f"median {s.cv_median:.2f}, highest {s.cv_max:.2f}")
    console.print(figures)
    if s.days:
        days = Table("day", "mean rate", "lowest", "highest")
        for number, day in enumerate(s.days):
            days.add_row(str(number), *(f"{v:,.1f}" for v in day))
        for column in days.columns:
            column.justify = "right"
        console.print(days)


def _figures(s: TraceSummary) -> list[tuple[str, str]]:
    out = [
        ("format", s.format),
        ("requests", f"{s.requests:,}"),
        ("rows with 0 tokens", f"{s.zero_rows:,}"),
        ("span", f"{s.span_s:,.3f} s"),
        ("mean rate", f"{s.mean_rate_rps:.3f} requests/s"),
        ("distinct stamps", f"{s.distinct_stamp_share:.1%} of requests"),
        (
            f"inputs above {s.threshold_tokens:,}",
            f"{s.share_above:.1%}, {s.tokens_share_above:.1%} of the tokens",
        ),
        ("longest gap", f"{s.longest_gap_s:,.3f} s"),
    ]
    if s.interarrival_cv is not None:
        out.append(("inter-arrival CV", f"{s.interarrival_cv:.2f}"))
    if s.count_10s_mean is not None and s.count_10s_variance_to_mean is not None:
        spread = f"variance/mean {s.count_10s_variance_to_mean:.1f}"
        out.append(("arrivals per 10 s", f"mean {s.count_10s_mean:.1f}, max {s.count_10s_max}, {spread}"))
    if s.sessions and s.mean_turns is not None:
        out.append(("sessions", f"{s.sessions:,}, {s.mean_turns:.2f} requests each"))
    if s.prefix is None:
        out.append(("prefix data", "none"))
        return out
    p = s.prefix
    out += [
        ("prefix blocks", f"{p.block_tokens} tokens"),
        ("requests that share more than one block", f"{p.share_over_one_block:.1%}"),
        ("input tokens in an infinite cache", f"{p.hit_tokens_share:.1%}"),
        (
            f"uncached inputs above {s.threshold_tokens:,}",
            f"{p.uncached_share_above:.1%}, {p.uncached_tokens_share_above:.1%} of the uncached tokens",
        ),
    ]
    return out
