"""Run a study cell by cell in parallel processes; every finished cell is on disk and is not run again.

A sweep folder holds `sweep.json` (what is swept), `cells/NNNN.json` (one per finished cell), and once all cells are
there `results.csv`, `metrics.json` and one plot per figure.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.intervals import CONFIDENCE, RESAMPLES, Interval
from prfaas_trainings.compare import (
    HOW_AVERAGED,
    PolicyFacts,
    check_unseen,
    facts_of,
    interval_json,
    rows_of,
    what_runs,
    without_limits,
)
from prfaas_trainings.episodes import (
    FIGURE_NAMES,
    EpisodeRunner,
    FloatArray,
    Job,
    Outcome,
    Row,
    is_trace,
    warm_up,
)
from prfaas_trainings.parts import Part, PartsFolder, run_parts
from prfaas_trainings.seeds import Split
from prfaas_trainings.statistics import seed_interval
from prfaas_trainings.study import Cell, Study

#: The file that marks a folder as a sweep and says what is swept.
MARKER = "sweep.json"
CELLS = "cells"
FORMAT = 2


@dataclass(frozen=True)
class Plan:
    """A study ready to run: cells and policies checked, seeds chosen."""

    study: Study
    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]
    facts: tuple[PolicyFacts, ...]
    seeds: range
    split: Split
    engine: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the policies."""
        return tuple(row.label for row in self.rows)

    @property
    def reference(self) -> int:
        """Row that differences are taken from."""
        return 0 if self.study.reference is None else self.labels.index(self.study.reference)

    @property
    def episodes_per_cell(self) -> int:
        """Episodes of one cell: policies x seeds."""
        return len(self.rows) * len(self.seeds)

    def configuration(self) -> dict[str, Any]:
        """Everything that a result depends on, as it stands in `sweep.json`."""
        study = self.study
        return {
            "format": FORMAT,
            "study": {"name": study.name, "scenario": study.scenario, "axes": list(study.axes)},
            **what_runs(self.rows, self.facts, self.seeds, self.split, self.engine),
            "cells": [
                {
                    "cell": cell.label,
                    "scenario_hash": cell.scenario.hash,
                    "hash_by_policy": {
                        row.label: row.scenario(cell.scenario).hash for row in self.rows if row.deployment
                    },
                }
                for cell in self.cells
            ],
        }


def prepare(study: Study, *, seeds: range, split: Split, engine: str) -> Plan:
    """Check a study before anything runs.

    Raises:
        PrfaasError: a faulty cell (named), an unknown policy or reference, a policy that does not fit a cell, seeds
            or trace seconds that a policy has seen.
    """
    cells = study.cells()
    rows = rows_of(study.policies, deployments=False)
    labels = [row.label for row in rows]
    if study.reference is not None and study.reference not in labels:
        raise PrfaasError(
            f"study {study.name}: reference {study.reference!r} is not among the policies: {', '.join(labels)}"
        )
    facts = []
    for row in rows:
        known = facts_of(row, ())
        for cell in cells:
            try:
                facts_of(row, (cell.scenario,))
                if split == "test":
                    check_unseen(row, known, (cell.scenario,), seeds)
            except PrfaasError as error:
                raise PrfaasError(f"cell {cell.label}, policy {row.label}: {error}") from None
        facts.append(known)
    return Plan(study, cells, rows, tuple(facts), seeds, split, engine)


# ------------------------------------------------------------------------------------------ the folder


class SweepFolder(PartsFolder):
    """A sweep folder, new or to be gone on with.

    Args:
        out: the folder.
        plan: what is swept.
        force: an earlier sweep there is removed first.

    Raises:
        PrfaasError: the folder holds something else, or a sweep of another configuration (the field is named).
    """

    def __init__(self, out: Path, plan: Plan, *, force: bool = False) -> None:
        self._plan = plan
        super().__init__(
            out,
            kind="sweep",
            marker=MARKER,
            parts=CELLS,
            part="cell",
            configuration=plan.configuration(),
            force=force,
        )

    def file(self, cell: Cell) -> Path:
        """The file of a finished cell."""
        return self.file_of(_part_name(cell))

    def done(self) -> list[Cell]:
        """Cells that are finished."""
        return [cell for cell in self._plan.cells if self.has(_part_name(cell))]

    def write(self, cell: Cell, outcomes: Sequence[Sequence[Outcome]]) -> None:
        """Keep a finished cell, whole: `outcomes[row][seed]`."""
        content = {
            "cell": cell.label,
            "scenario_hash": cell.scenario.hash,
            "outcomes": {
                label: [
                    {
                        "seed": seed,
                        "arrivals_hash": outcome.arrivals_hash,
                        "figures": outcome.figures,
                        "warnings": list(outcome.warnings),
                    }
                    for seed, outcome in zip(self._plan.seeds, found, strict=True)
                ]
                for label, found in zip(self._plan.labels, outcomes, strict=True)
            },
        }
        self.write_part(_part_name(cell), content)

    def read(self, cell: Cell) -> dict[str, list[dict[str, Any]]]:
        """Policy label to one entry per seed of a finished cell.

        Raises:
            PrfaasError: the file is broken.
        """

        def whole(content: Any) -> dict[str, list[dict[str, Any]]] | None:
            outcomes: dict[str, list[dict[str, Any]]] = content["outcomes"]
            mine = content["scenario_hash"] == cell.scenario.hash and all(
                [entry["seed"] for entry in outcomes[label]] == list(self._plan.seeds)
                and all(entry["figures"].keys() >= set(FIGURE_NAMES) for entry in outcomes[label])
                for label in self._plan.labels
            )
            return outcomes if mine else None

        found: dict[str, list[dict[str, Any]]] = self.read_part(_part_name(cell), cell.label, whole)
        return found


def _part_name(cell: Cell) -> str:
    return f"{cell.index:04d}"


# ---------------------------------------------------------------------------------------------- running


def run_sweep(
    plan: Plan,
    folder: SweepFolder,
    runner: EpisodeRunner,
    on_done: Callable[[Cell], None] | None = None,
) -> None:
    """Run the cells that are not there yet; each is written as soon as its last episode ends.

    Args:
        plan: what to run.
        folder: where finished cells are kept.
        runner: processes to run in.
        on_done: called with its cell after each episode.

    Raises:
        PrfaasError: an episode failed; the message names cell, policy and seed. Finished cells are kept.
    """
    there = {cell.index for cell in folder.done()}
    missing = [cell for cell in plan.cells if cell.index not in there]
    if not missing:
        return
    warm_up(missing[0].scenario, plan.engine)
    n = len(plan.rows)

    def finish(p: int, found: list[Outcome]) -> None:
        for s, seed in enumerate(plan.seeds):
            if len({outcome.arrivals_hash for outcome in found[s * n : (s + 1) * n]}) > 1:
                raise PrfaasError(
                    f"cell {missing[p].label}, seed {seed}: the policies met different arrivals"
                )
        folder.write(missing[p], [found[r::n] for r in range(n)])

    tell = None if on_done is None else lambda p: on_done(missing[p])
    run_parts([_part(plan, cell) for cell in missing], runner, finish, tell)


def _part(plan: Plan, cell: Cell) -> Part:
    """Every policy on every seed of a cell, seed by seed."""
    placed = [row.scenario(cell.scenario) for row in plan.rows]
    pairs = [(seed, r) for seed in plan.seeds for r in range(len(plan.rows))]
    return Part(
        f"cell {cell.label}",
        tuple(Job(placed[r], plan.rows[r], seed, plan.engine) for seed, r in pairs),
        tuple(f"policy {plan.labels[r]}, seed {seed}" for seed, r in pairs),
    )


# ---------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class SweepResult:
    """All cells of a finished sweep."""

    plan: Plan
    outcomes: tuple[dict[str, list[dict[str, Any]]], ...]
    """Per cell: policy label to one entry per seed."""

    @classmethod
    def of(cls, plan: Plan, folder: SweepFolder) -> SweepResult:
        """The result of a folder whose cells are all there."""
        return cls(plan, tuple(folder.read(cell) for cell in plan.cells))

    def values(self, cell: int, row: int, figure: str) -> FloatArray:
        """A figure per seed, NaN where it does not exist, shape (seeds,)."""
        found = [entry["figures"][figure] for entry in self.outcomes[cell][self.plan.labels[row]]]
        return np.array([math.nan if v is None else float(v) for v in found])

    def own(self, cell: int, row: int, figure: str) -> Interval:
        """Mean of a figure with its 95% interval; on a replayed trace, which is one sample, without limits."""
        return self._interval(cell, self.values(cell, row, figure))

    def difference(self, cell: int, row: int, figure: str) -> Interval:
        """Paired difference to the reference policy of the same cell, with its 95% interval."""
        return self._interval(
            cell, self.values(cell, row, figure) - self.values(cell, self.plan.reference, figure)
        )

    def _interval(self, cell: int, values: FloatArray) -> Interval:
        if is_trace(self.plan.cells[cell].scenario):
            return without_limits(values)
        return seed_interval(values[np.isfinite(values)])

    def warnings(self, cell: int, row: int) -> Counter[str]:
        """Warnings of the episodes with the number of seeds that gave them."""
        entries = self.outcomes[cell][self.plan.labels[row]]
        return Counter(text for entry in entries for text in entry["warnings"])

    def csv_text(self) -> str:
        """Text of `results.csv`: one line per cell, policy and seed; a figure that does not exist is empty."""
        plan = self.plan
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("cell", *plan.study.axes, *CSV_COLUMNS))
        for cell, outcomes in zip(plan.cells, self.outcomes, strict=True):
            for row, facts in zip(plan.rows, plan.facts, strict=True):
                scenario_hash = row.scenario(cell.scenario).hash
                for entry in outcomes[row.label]:
                    figures = (entry["figures"][name] for name in FIGURE_NAMES)
                    writer.writerow(
                        (
                            cell.index,
                            *cell.texts,
                            scenario_hash,
                            row.label,
                            row.deployment or "",
                            facts.hash,
                            plan.split,
                            entry["seed"],
                            entry["arrivals_hash"],
                            *("" if v is None else repr(v) for v in figures),
                            "; ".join(entry["warnings"]),
                        )
                    )
        return out.getvalue()

    def summary(self) -> dict[str, Any]:
        """`metrics.json` as a mapping: every number finite or null."""
        plan = self.plan
        return {
            "command": "prfaas sweep",
            **plan.configuration(),
            "description": plan.study.description,
            "reference": plan.labels[plan.reference],
            "intervals": {
                "confidence": CONFIDENCE,
                "resamples": RESAMPLES,
                "seeds": "studentised bootstrap over seeds, of a figure and of the paired differences",
            },
            "how_averaged": HOW_AVERAGED,
            "results": [
                {
                    "cell": cell.label,
                    "axes": dict(zip(plan.study.axes, cell.texts, strict=True)),
                    "scenario_hash": cell.scenario.hash,
                    "trace": is_trace(cell.scenario),
                    "policies": {label: self._entry(c, r) for r, label in enumerate(plan.labels)},
                }
                for c, cell in enumerate(plan.cells)
            ],
        }

    def _entry(self, cell: int, row: int) -> dict[str, Any]:
        return {
            "figures": {name: interval_json(self.own(cell, row, name)) for name in FIGURE_NAMES},
            "difference_to_reference": {
                name: interval_json(self.difference(cell, row, name)) for name in FIGURE_NAMES
            },
            "warnings": dict(self.warnings(cell, row)),
        }

    def json_text(self) -> str:
        """Text of `metrics.json`."""
        return json.dumps(self.summary(), indent=2, allow_nan=False) + "\n"


CSV_COLUMNS = (
    "scenario_hash",
    "policy",
    "deployment",
    "policy_hash",
    "split",
    "seed",
    "arrivals_hash",
    *FIGURE_NAMES,
    "warnings",
)


def write_results(result: SweepResult, out: Path) -> Iterator[Path]:
    """Write `results.csv`, `metrics.json` and the plots, each whole; gives the paths as they are written."""
    from prfaas_trainings.sweep_plots import draw

    for name, text in (("results.csv", result.csv_text()), ("metrics.json", result.json_text())):
        write_whole(out / name, text)
        yield out / name
    for figure in result.plan.study.metrics:
        yield draw(result, figure, out)
