"""Plots of a comparison as PNG files, and what all plots share; matplotlib is loaded when one is drawn."""

from __future__ import annotations

import re
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
        draw_ttft_cdf(comparison, s, paths[-1])
        chosen = {r: columns for (scenario, r), columns in timelines.items() if scenario == s}
        if chosen:
            paths.append(folder / file_name("timeline", label))
            draw_timeline(comparison, s, chosen, paths[-1])
    return paths


def ttft_distribution(comparison: Comparison, s: int, r: int) -> tuple[FloatArray, FloatArray]:
    """(TTFT in seconds, share of requests at or below it), all seeds pooled, open requests at their age."""
    counts = np.sum([outcome.ttft_counts for outcome in comparison.outcomes[s, r]], axis=0)
    total = max(int(counts.sum()), 1)
    return TTFT_EDGES_S[1:-1], np.cumsum(counts)[:-1] / total


def draw_ttft_cdf(comparison: Comparison, s: int, path: Path) -> None:
    """Distribution of TTFT of every policy on one scenario."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 5.2))
    lowest, highest = np.inf, 0.0
    for r, row in enumerate(comparison.rows):
        x, y = ttft_distribution(comparison, s, r)
        axes.plot(
            x,
            y,
            label=row.label,
            color=colour(r),
            linewidth=_LEARNED_WIDTH if comparison.facts[r].learned else 1.4,
            linestyle="--" if row.deployment is not None else "-",
        )
        inside = x[(y > 0.001) & (y < 0.999)]
        if len(inside):
            lowest, highest = min(lowest, float(inside[0])), max(highest, float(inside[-1]))
    axes.set_xscale("log")
    if highest > lowest:
        axes.set_xlim(lowest * 0.9, highest * 1.1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("time to first token (s), open requests at their age")
    axes.set_ylabel("share of requests")
    n = len(comparison.seeds)
    axes.set_title(f"{comparison.labels[s]}: {n} {comparison.split} seed{'s' if n > 1 else ''}, pooled")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, title="dashed: other hardware" if _has_deployments(comparison) else None)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _has_deployments(comparison: Comparison) -> bool:
    return any(row.deployment is not None for row in comparison.rows)


def draw_timeline(
    comparison: Comparison, s: int, chosen: dict[int, dict[str, FloatArray]], path: Path
) -> None:
    """Decision, queues, link and split over time, one column per policy, all on the first seed."""
    plt = pyplot()
    figure, grid = plt.subplots(
        4, len(chosen), figsize=(4.6 * len(chosen) + 1.0, 9.5), sharex=True, sharey="row", squeeze=False
    )
    for column, (r, lines) in enumerate(chosen.items()):
        t = lines["time_s"]
        top, queues, link, split = (grid[k][column] for k in range(4))
        top.set_title(comparison.rows[r].label, fontsize=10)
        _draw_decision(top, t, lines)
        for name, label in (("local", "local prefill"), ("remote", "remote prefill"), ("decode", "decode")):
            queues.step(t, lines[f"{name}_queue_requests"], where="post", label=label, linewidth=1.0)
        queues.set_yscale("symlog", linthresh=10)
        links = comparison.rows[r].scenario(comparison.scenarios[s]).deployment.links
        if links:
            _draw_link(link, t, lines, links[0].capacity_bps)
        for name, label in (
            ("prefill", "prefill"),
            ("decode", "decode"),
            ("converting", "converting"),
        ):
            split.step(t, lines[f"{name}_instances"], where="post", label=label, linewidth=1.2)
        split.set_xlabel("time (s)")
        for axes in (top, queues, link, split):
            axes.grid(alpha=0.3)
    for row, label in enumerate(
        ("decision", "waiting requests", "link (Gbps)", "local instances"),
    ):
        grid[row][0].set_ylabel(label)
        if row > 0:  # a limit would stop the axis from growing, so only after every column is drawn
            grid[row][0].set_ylim(bottom=0)
        handles, _ = grid[row][-1].get_legend_handles_labels()
        if handles:
            grid[row][-1].legend(fontsize=7, loc="upper right")
    figure.suptitle(f"{comparison.labels[s]}, {comparison.split} seed {comparison.seeds[0]}")
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


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
    axes.legend(fontsize=7, loc="upper right")


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
