"""The files of a comparison: written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from prfaas_trainings.compare import Comparison
from prfaas_trainings.episodes import FloatArray
from prfaas_trainings.folders import check_folder, whole_folder

#: The file that marks a folder as a comparison.
MARKER = "metrics.json"


def check_out(out: Path, force: bool) -> None:
    """Refuse a folder that is in use (see `folders.check_folder`)."""
    check_folder(out, MARKER, replace=force)


def write_files(
    comparison: Comparison, timelines: dict[tuple[int, int], dict[str, FloatArray]], folder: Path
) -> None:
    """Write `results.csv`, `metrics.json` and the plots into a folder that nobody else reads yet."""
    from prfaas_trainings.plots import draw_all

    (folder / "results.csv").write_text(comparison.csv_text(), encoding="utf-8")
    (folder / MARKER).write_text(comparison.json_text(), encoding="utf-8")
    draw_all(comparison, timelines, folder)


def write_comparison(
    comparison: Comparison, timelines: dict[tuple[int, int], dict[str, FloatArray]], out: Path
) -> None:
    """Write a comparison to `out`, whole or not at all."""
    with whole_folder(out, MARKER) as folder:
        write_files(comparison, timelines, folder)
