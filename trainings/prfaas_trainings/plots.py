"""Plots of a comparison as PNG files, and what all plots share; matplotlib is loaded when one is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_trainings.compare import Comparison
from prfaas_trainings.episodes import TTFT_EDGES_S, FloatArray

DPI = 110
_COLOURS = ("#2e6fbb", "#de8928", "#3a8c58", "#be3e3e", "#7a5ba6", "#8a6d4b", "#c65d9c", "#5f6b76")
_LEARNED_WIDTH = 2.6
#: Margins are drawn on this range; always and never lie at its ends.
_MARGIN_LIMIT_S = 35.0


def pyplot() -> Any:
    """Matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def colour(k: int) -> str:
    """Colour of the k-th line."""
    return _COLOURS[k % len(_COLOURS)]


def plain(label: str) -> str:
    """A label as matplotlib shows it letter by letter: a dollar sign would begin a formula."""
    return label.replace("$", r"\$")


def file_name(kind: str, label: str) -> str:
    """A file name of a plot for a scenario label."""
    return f"{kind}_{re.sub(r'[^A-Za-z0-9_.-]+', '_', label)}.png"


def draw_all(
    comparison: Comparison, timelines: dict[tuple[int, int], dict[str, FloatArray]], folder: Path
) -> list[Path]:
    """Write `ttft_cdf_*.png` for every scenario and `timeline_*.png` where there are timelines."""
    paths = []
    for s, label in enumerate(comparison.labels):
        paths.append(folder / file_name("ttft_cdf", label))
        with _whole(paths[-1]) as path:
            draw_ttft_cdf(comparison, s, path)
        chosen = {r: columns for (scenario, r), columns in timelines.items() if scenario == s}
        if chosen:
            paths.append(folder / file_name("timeline", label))
            with _whole(paths[-1]) as path:
                draw_timeline(comparison, s, chosen, path)
    return paths


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` once it has been written."""
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def ttft_distribution(comparison: Comparison, s: int, r: int) -> tuple[FloatArray, FloatArray]:
    """(TTFT in seconds, share of requests at or below it), all seeds pooled, open requests at their age."""
    return distribution(np.sum([outcome.ttft_counts for outcome in comparison.outcomes[s, r]], axis=0))


def distribution(counts: Any) -> tuple[FloatArray, FloatArray]:
    """(TTFT in seconds, share of requests at or below it) of counts in the bins of `TTFT_EDGES_S`."""
    total = max(int(counts.sum()), 1)
    return TTFT_EDGES_S[1:-1], np.cumsum(counts)[:-1] / total


@dataclass(frozen=True)
class CdfLine:
    """One policy in a plot of distributions."""

    label: str
    x: FloatArray
    y: FloatArray
    learned: bool
    other_hardware: bool


def draw_ttft_cdf(comparison: Comparison, s: int, path: Path) -> None:
    """Distribution of TTFT of every policy on one scenario."""
    lines = [
        CdfLine(
            row.label,
            *ttft_distribution(comparison, s, r),
            comparison.facts[r].learned,
            row.deployment is not None,
        )
        for r, row in enumerate(comparison.rows)
    ]
    n = len(comparison.seeds)
    title = f"{comparison.labels[s]}: {n} {comparison.split} seed{'s' if n > 1 else ''}, pooled"
    _save(cdf_figure(lines, title), path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=DPI)
    pyplot().close(figure)


def cdf_figure(lines: Sequence[CdfLine], title: str) -> Any:
    """Distributions of TTFT on a log axis; the caller saves and closes the figure."""
    figure, axes = pyplot().subplots(figsize=(8.5, 5.2))
    lowest, highest = np.inf, 0.0
    for k, line in enumerate(lines):
        axes.plot(
            line.x,
            line.y,
            label=plain(line.label),
            color=colour(k),
            linewidth=_LEARNED_WIDTH if line.learned else 1.4,
            linestyle="--" if line.other_hardware else "-",
        )
        inside = line.x[(line.y > 0.001) & (line.y < 0.999)]
        if len(inside):
            lowest, highest = min(lowest, float(inside[0])), max(highest, float(inside[-1]))
    axes.set_xscale("log")
    if highest > lowest:
        axes.set_xlim(lowest * 0.9, highest * 1.1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("time to first token (s), open requests at their age")
    axes.set_ylabel("share of requests")
    axes.set_title(plain(title))
    axes.grid(alpha=0.3, which="both")
    dashed = any(line.other_hardware for line in lines)
    axes.legend(fontsize=8, title="dashed: other hardware" if dashed else None)
    figure.tight_layout()
    return figure


def draw_timeline(
    comparison: Comparison, s: int, chosen: dict[int, dict[str, FloatArray]], path: Path
) -> None:
    """Decision, queues, link, split and TTFT over time, one column per policy, all on the first seed."""
    columns = []
    for r, lines in chosen.items():
        links = comparison.rows[r].scenario(comparison.scenarios[s]).deployment.links
        columns.append(
            TimelineColumn(comparison.rows[r].label, lines, links[0].capacity_bps if links else None)
        )
    title = f"{comparison.labels[s]}, {comparison.split} seed {comparison.seeds[0]}"
    _save(timeline_figure(columns, title), path)


@dataclass(frozen=True)
class TimelineColumn:
    """One policy in a timeline: the columns of `prfaas_trainings.compare.run_timelines`, nominal link capacity."""

    label: str
    lines: dict[str, FloatArray]
    link_bps: float | None


_QUEUES = (("local", "local prefill"), ("remote", "remote prefill"), ("decode", "decode"))


def timeline_figure(columns: Sequence[TimelineColumn], title: str, column_inches: float = 4.6) -> Any:
    """Decision, queues, link, split and TTFT over time; the caller saves and closes the figure."""
    figure, grid = pyplot().subplots(
        5,
        len(columns),
        figsize=(column_inches * len(columns) + 2.4, 11.5),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for k, column in enumerate(columns):
        t, lines = column.lines["time_s"], column.lines
        top, queues, link, split, ttft = (grid[row][k] for row in range(5))
        top.set_title(plain(column.label), fontsize=10)
        _draw_decision(top, t, lines)
        for q, (name, label) in enumerate(_QUEUES):
            queues.step(
                t, lines[f"{name}_queue_requests"], where="post", label=label, color=colour(q), linewidth=1.0
            )
        queues.set_yscale("symlog", linthresh=10)
        if column.link_bps is not None:
            _draw_link(link, t, lines, column.link_bps)
        else:
            link.text(0.5, 0.5, "no link", transform=link.transAxes, ha="center")
        for q, name in enumerate(("prefill", "decode", "converting")):
            split.step(
                t, lines[f"{name}_instances"], where="post", label=name, color=colour(q), linewidth=1.2
            )
        ttft.plot(t, lines["ttft_s"], ".", color=colour(0), markersize=2.0, label="requests by arrival")
        ttft.set_yscale("symlog", linthresh=1)
        ttft.set_xlabel("time (s)")
        for axes in (top, queues, link, split, ttft):
            axes.grid(alpha=0.3)
    names = ("decision", "waiting requests", "link (Gbps)", "local instances", "TTFT (s)")
    for row, label in enumerate(names):
        grid[row][0].set_ylabel(label)
        if row > 0:  # a limit would stop the axis from growing, so only after every column is drawn
            grid[row][0].set_ylim(bottom=0)
        handles, _ = grid[row][-1].get_legend_handles_labels()
        if handles:
            grid[row][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.suptitle(plain(title))
    figure.tight_layout()
    return figure


def _draw_decision(axes: Any, t: FloatArray, lines: dict[str, FloatArray]) -> None:
    """Margin in seconds and threshold in thousands of tokens share one scale, so that rows can be compared."""
    margin = np.clip(lines["margin_s"], -_MARGIN_LIMIT_S, _MARGIN_LIMIT_S)
    threshold = lines["threshold_tokens"] / 1000.0
    if np.isfinite(margin).any():
        axes.step(t, margin, where="post", color=_COLOURS[0], linewidth=1.0, label="margin (s)")
    if np.isfinite(threshold).any():
        axes.step(
            t, threshold, where="post", color=_COLOURS[1], linewidth=1.0, label="threshold (1,000 tokens)"
        )
    axes.set_yscale("symlog", linthresh=1)
    axes.legend(fontsize=8, loc="upper right")


def _draw_link(axes: Any, t: FloatArray, lines: dict[str, FloatArray], nominal_bps: float) -> None:
    """Bits sent over the last 5 s beside what the link could carry and what a scheduler believes it can."""
    for name, label, colour, style in (
        ("true_capacity_bps", "true capacity", _COLOURS[7], "-"),
        ("observed_capacity_bps", "observed capacity", _COLOURS[1], "--"),
    ):
        axes.step(
            t, lines[name] / 1e9, where="post", label=label, color=colour, linestyle=style, linewidth=1.0
        )
    sent_gbps = lines["link_utilisation_5s"] * nominal_bps / 1e9
    axes.step(t, sent_gbps, where="post", label="sent (5 s)", color=_COLOURS[0], linewidth=1.0)
    axes.set_yscale("symlog", linthresh=1)
