"""Plots of a sweep: one figure of the episodes by the varied field, a line per policy with 95% intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_trainings.episodes import FIGURES
from prfaas_trainings.plots import DPI, colour, pyplot
from prfaas_trainings.sweep import SweepResult

#: Values that span this factor are drawn on a log axis.
DECADE = 10.0
_BY_NAME = {figure.name: figure for figure in FIGURES}


def spans_a_decade(values: Sequence[float]) -> bool:
    """Whether values are all above 0 and the largest is ten times the smallest or more."""
    finite = [v for v in values if np.isfinite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) >= DECADE * min(finite)


def draw(result: SweepResult, figure: str, folder: Path) -> Path:
    """Write `FIGURE.png`: x is the first varied field, one panel per value of the second one.

    Returns:
        The path.
    """
    plan, shown = result.plan, _BY_NAME[figure]
    plt = pyplot()
    panels = list(dict.fromkeys(cell.texts[1:] for cell in plan.cells))
    drawing, grid = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels) + 1.6, 4.6), sharey=True, squeeze=False
    )
    every: list[float] = []
    for axes, panel in zip(grid[0], panels, strict=True):
        cells = [c for c, cell in enumerate(plan.cells) if cell.texts[1:] == panel]
        every += _panel(axes, result, cells, figure)
        if panel:
            axes.set_title(f"{plan.study.axes[1]} = {panel[0]}", fontsize=9)
        axes.grid(alpha=0.3, which="both")
    grid[0][0].set_ylabel(_title(shown.title, figure))
    if spans_a_decade(every):
        grid[0][0].set_yscale("log")
    grid[0][-1].legend(fontsize=8)
    n = len(plan.seeds)
    drawing.suptitle(
        f"{plan.study.name}: {n} {plan.split} seed{'s' if n > 1 else ''}, 95% intervals", fontsize=10
    )
    drawing.tight_layout()
    path = folder / f"{figure}.png"
    temporary = folder / f".{figure}.tmp.png"
    drawing.savefig(temporary, dpi=DPI)
    plt.close(drawing)
    temporary.replace(path)
    return path


def _title(title: str, figure: str) -> str:
    return f"{' '.join(title.replace('-' + chr(10), '').split())}  ({figure})"


def _panel(axes: Any, result: SweepResult, cells: Sequence[int], figure: str) -> list[float]:
    """Draw the lines of one panel; gives the means drawn."""
    plan, shown = result.plan, _BY_NAME[figure]
    numbers = [plan.cells[c].numbers[0] for c in cells]
    numeric = all(x is not None for x in numbers)
    places = (
        [float(x) for x in numbers if x is not None] if numeric else [float(k) for k in range(len(cells))]
    )
    order = np.argsort(places)
    means: list[float] = []
    for r, label in enumerate(plan.labels):
        found = [result.own(cells[k], r, figure) for k in order]
        y = [i.mean * shown.factor for i in found]
        low = [_reach(i.mean, i.low) * shown.factor for i in found]
        high = [_reach(i.high, i.mean) * shown.factor for i in found]
        axes.errorbar(
            [places[k] for k in order],
            y,
            yerr=(low, high),
            label=label,
            color=colour(r),
            marker="o",
            markersize=4,
            linewidth=1.4 if numeric else 0.0,
            elinewidth=1.2,
            capsize=2.5,
        )
        means += y
    axes.set_xlabel(plan.study.axes[0])
    if not numeric:
        axes.set_xticks(places, [plan.cells[c].texts[0] for c in cells], rotation=20, ha="right", fontsize=8)
        return means
    if spans_a_decade(places):
        axes.set_xscale("log")
    if len(places) <= 12:
        axes.set_xticks(places, [plan.cells[c].texts[0] for c in cells], fontsize=8)
        axes.minorticks_off()
    return means


def _reach(upper: float | None, lower: float | None) -> float:
    """Length of one side of an interval; 0 where there is none."""
    return 0.0 if upper is None or lower is None else max(upper - lower, 0.0)
