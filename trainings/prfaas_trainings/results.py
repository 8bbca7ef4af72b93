"""The files of a comparison: `results.csv`, `metrics.json`, `curves.json` and the plots, each whole or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_env.base import write_whole
from prfaas_trainings.compare import Comparison
from prfaas_trainings.episodes import TTFT_EDGES_S, FloatArray, nulls
from prfaas_trainings.folders import check_folder, whole_folder

#: Figures, intervals and verdicts.
METRICS = "metrics.json"
#: What the plots and the report draw: distributions of TTFT, timelines.
CURVES = "curves.json"

Timelines = dict[tuple[int, int], dict[str, FloatArray]]


def curves(comparison: Comparison, timelines: Timelines) -> dict[str, Any]:
    """`curves.json` as a mapping.

    `ttft_edges_s` are the inner edges of the bins (below the first and above the last is open). Per scenario and
    policy: `ttft_bins` and `ttft_counts`, the filled bins with the requests of all seeds in them, and `timeline`,
    the columns of the first seed, where there is one.
    """
    out: dict[str, Any] = {
        "ttft_edges_s": TTFT_EDGES_S[1:-1].tolist(),
        "timeline_seed": comparison.seeds[0],
        "scenarios": {},
    }
    for s, label in enumerate(comparison.labels):
        out["scenarios"][label] = {
            row.label: _curve(comparison, s, r, timelines.get((s, r)))
            for r, row in enumerate(comparison.rows)
        }
    return out


def _curve(comparison: Comparison, s: int, r: int, timeline: dict[str, FloatArray] | None) -> dict[str, Any]:
    counts = np.sum([outcome.ttft_counts for outcome in comparison.outcomes[s, r]], axis=0)
    filled = np.flatnonzero(counts)
    links = comparison.rows[r].scenario(comparison.scenarios[s]).deployment.links
    return {
        "ttft_bins": filled.tolist(),
        "ttft_counts": counts[filled].tolist(),
        "link_capacity_bps": links[0].capacity_bps if links else None,
        "timeline": None if timeline is None else {k: nulls(v) for k, v in timeline.items()},
    }


def write_files(comparison: Comparison, timelines: Timelines, folder: Path) -> list[Path]:
    """Write all files of a comparison into a folder, each whole; gives their paths."""
    from prfaas_trainings.plots import draw_all

    texts = {
        "results.csv": comparison.csv_text(),
        METRICS: comparison.json_text(),
        CURVES: json.dumps(curves(comparison, timelines), allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [*(folder / name for name in texts), *draw_all(comparison, timelines, folder)]


def check_out(out: Path, force: bool) -> None:
    """Refuse a folder that is in use (see `folders.check_folder`)."""
    check_folder(out, METRICS, replace=force)


def write_comparison(comparison: Comparison, timelines: Timelines, out: Path) -> None:
    """Write a comparison that was run in one go to `out`, whole or not at all."""
    with whole_folder(out, METRICS) as folder:
        write_files(comparison, timelines, folder)
