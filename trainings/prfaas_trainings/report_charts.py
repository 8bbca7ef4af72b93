"""The pictures of a report: matplotlib's SVG made fit to stand inside an HTML page, in light and dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prfaas_env.intervals import Interval
from prfaas_trainings.episodes import FloatArray
from prfaas_trainings.plots import TimelineColumn, colour, plain, pyplot, timeline_figure

#: Ink of axes and text; the page replaces it with its own text colour.
_INK = "#010203"
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.framealpha": 0.0,
    "legend.edgecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
        _INK,
    ),
    "grid.color": "#7f8a95",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
#: Most points of a line over time.
MAX_POINTS = 400


def inline_svg(make: Callable[[], Any], name: str) -> str:
    """A figure as an SVG element without any address, id of its own, or fixed colour of text.

    Args:
        make: makes the figure.
        name: unique in the page; equal figures with equal names give equal text.
    """
    import matplotlib

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No artists with labels")
        figure = make()
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot().close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r">\s*\n\s*<", "><", text.replace(_INK, "currentColor")).strip()


def forest_figure(labels: Sequence[str], intervals: Sequence[Interval], reference: str) -> Any:
    """Mean TTFT minus the reference's, with 95% intervals, one line per policy; below 0 is better."""
    figure, axes = pyplot().subplots(figsize=(8.5, 0.9 + 0.42 * max(len(labels), 1)))
    for k, found in enumerate(intervals):
        axes.plot([found.mean], [k], "o", color=colour(k), markersize=6)
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [k, k], color=colour(k), linewidth=2.2)
    axes.axvline(0.0, color=_INK, linewidth=0.8)
    axes.set_yticks(range(len(labels)), [plain(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    reach = [abs(found.mean) for found in intervals if np.isfinite(found.mean)]
    if reach and max(reach) > 50 * max(min(reach), 0.05):
        axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel(f"mean TTFT minus that of {plain(reference)} (s); left of 0 is better")
    axes.grid(alpha=0.25, axis="x")
    figure.tight_layout()
    return figure


def stages_figure(labels: Sequence[str], stages: Sequence[str], values: FloatArray) -> Any:
    """Mean seconds of each stage of TTFT as stacked bars; `values` has shape (policies, stages)."""
    figure, axes = pyplot().subplots(figsize=(8.5, 1.2 + 0.42 * max(len(labels), 1)))
    left = np.zeros(len(labels))
    for k, stage in enumerate(stages):
        axes.barh(range(len(labels)), values[:, k], left=left, height=0.62, color=colour(k), label=stage)
        left = left + np.nan_to_num(values[:, k])
    axes.set_yticks(range(len(labels)), [plain(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("mean seconds per request that got a first token")
    axes.grid(alpha=0.25, axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="upper center", ncols=len(stages), fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_size_inches()[1]))
    return figure


def training_figure(steps: Sequence[int], scores: Sequence[float], kept: int) -> Any:
    """Validation score by decisions learned from; 1 is the policy that the training started from."""
    figure, axes = pyplot().subplots(figsize=(8.5, 3.2))
    axes.plot(steps, scores, "o-", color=colour(0), markersize=4)
    if kept in steps:
        axes.plot([kept], [scores[list(steps).index(kept)]], "o", color=colour(1), markersize=9, label="kept")
        axes.legend(fontsize=9)
    axes.axhline(1.0, color=_INK, linewidth=0.8, linestyle="--")
    axes.set_xlabel("decisions learned from")
    axes.set_ylabel("validation score")
    axes.grid(alpha=0.25)
    figure.tight_layout()
    return figure


def timelines_figure(columns: Sequence[TimelineColumn], title: str) -> Any:
    """Timelines side by side, thinned to `MAX_POINTS` per line."""
    return timeline_figure(
        [TimelineColumn(c.label, thinned(c.lines), c.link_bps) for c in columns], title, column_inches=3.4
    )


def thinned(lines: dict[str, FloatArray], points: int = MAX_POINTS) -> dict[str, FloatArray]:
    """Columns of a timeline with at most `points` rows: queues keep their peaks, TTFT its mean, others their first."""
    n = len(lines["time_s"])
    every = -(-n // points)
    if every <= 1:
        return lines
    out = {}
    for name, values in lines.items():
        blocks = np.full(-(-n // every) * every, np.nan)
        blocks[:n] = values
        shaped = blocks.reshape(-1, every)
        if name.endswith("_queue_requests") or name == "converting_instances":
            out[name] = np.nanmax(shaped, axis=1)
        elif name == "ttft_s":
            counts = np.isfinite(shaped).sum(axis=1)
            sums = np.nansum(shaped, axis=1)
            out[name] = np.divide(sums, counts, out=np.full(len(shaped), np.nan), where=counts > 0)
        else:
            out[name] = shaped[:, 0]
    return out
