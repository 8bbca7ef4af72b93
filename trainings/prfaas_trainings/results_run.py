"""Run the episodes of a page of results; every finished part is on disk under a name that says what it is.

A results folder holds `measured.json` (versions, engine), `plan.json` (the configuration with its scenarios and
policies resolved) and `parts/`: one file per policy, scenario and up to ten seeds. A part's name is made of the hashes
of its scenario and policy and of its seeds, so another policy, scenario or more seeds run only what is new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prfaas_env.base import PrfaasError, first_error, write_whole
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.run import simulate
from prfaas_trainings.compare import Comparison, PolicyFacts, check_unseen, facts_of, versions
from prfaas_trainings.episodes import EpisodeRunner, Job, Outcome, Row, is_trace, parse_row, warm_up
from prfaas_trainings.parts import Part, PartsFolder, run_parts
from prfaas_trainings.results_config import ResultsConfig, ResultsPolicy, ResultsScenario, spec_of

#: Marks a folder as one of results and says what every part depends on beside its own name.
MARKER = "measured.json"
PARTS = "parts"
#: The resolved configuration.
PLAN = "plan.json"
FORMAT = 1
#: Seeds that are kept together.
SEEDS_PER_PART = 10
#: The training seed on which every policy is tried for a tick.
TRIAL_SEED = 0
#: A learned policy that refuses a scenario has no bundle of that topology.
NO_POLICY = "no policy for this topology"
NOT_POSSIBLE = "not possible here"
LEFT_OUT = "left out here"


@dataclass(frozen=True)
class Training:
    """What is known of a policy's training: steps, seconds, seed, algorithm; None where nothing says it."""

    algorithm: str
    steps: int | None
    elapsed_s: float | None
    seed: int | None


@dataclass(frozen=True)
class Table:
    """One scenario at one load."""

    label: str
    scenario: Scenario
    first_seed: int
    count: int
    note: str = ""

    @property
    def seeds(self) -> range:
        """Its test seeds."""
        return range(self.first_seed, self.first_seed + self.count)


@dataclass(frozen=True)
class Cell:
    """One policy on one table: it runs there, or `missing` says in a word and `reason` in a line why not."""

    table: str
    policy: str
    spec: str
    deployment: str | None = None
    hash: str = ""
    learned: bool = False
    missing: str = ""
    reason: str = ""

    @property
    def row(self) -> Row:
        """The row to run."""
        return Row(self.policy, self.spec, self.deployment)

    @property
    def key(self) -> str:
        """12 hex digits that tell policies apart: the hash, for a learned one with the spec (it may hold options)."""
        text = f"{self.hash} {self.spec}" if self.learned else self.hash
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ResultsPlan:
    """Everything that the page needs beside the outcomes."""

    config: ResultsConfig
    tables: tuple[Table, ...]
    cells: tuple[Cell, ...]
    trainings: dict[str, Training] = field(default_factory=dict)
    """By label, of learned policies."""

    @cached_property
    def _at(self) -> dict[tuple[str, str], Cell]:
        return {(cell.table, cell.policy): cell for cell in self.cells}

    def cell(self, table: str, policy: str) -> Cell | None:
        """The cell of a policy on a table, None where it has none."""
        return self._at.get((table, policy))

    @property
    def chunks(self) -> tuple[tuple[Table, Cell, range], ...]:
        """What a part holds each, tables first, then seeds, so that all policies of a table go on together."""
        return tuple(
            (table, cell, table.seeds[at : at + SEEDS_PER_PART])
            for table in self.tables
            for at in range(0, table.count, SEEDS_PER_PART)
            for cell in self.cells
            if cell.table == table.label and not cell.missing
        )

    def as_json(self) -> dict[str, Any]:
        """A mapping for JSON; `of_json` gives the plan back."""
        return {
            "format": FORMAT,
            "command": "prfaas results",
            "versions": versions(),
            "config": self.config.model_dump(mode="json"),
            "tables": [
                {
                    **asdict(t),
                    "scenario": t.scenario.model_dump(mode="json"),
                    "scenario_hash": t.scenario.hash,
                }
                for t in self.tables
            ],
            "cells": [asdict(cell) for cell in self.cells],
            "trainings": {label: asdict(found) for label, found in self.trainings.items()},
        }

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> ResultsPlan:
        """The plan of `as_json`."""
        return cls(
            ResultsConfig.model_validate(content["config"]),
            tuple(
                Table(
                    t["label"],
                    Scenario.model_validate(t["scenario"]),
                    t["first_seed"],
                    t["count"],
                    t["note"],
                )
                for t in content["tables"]
            ),
            tuple(Cell(**cell) for cell in content["cells"]),
            {label: Training(**found) for label, found in content["trainings"].items()},
        )


# --------------------------------------------------------------------------------------------- preparing


def prepare(config: ResultsConfig, on_table: Callable[[str], None] | None = None) -> ResultsPlan:
    """Resolve scenarios and policies, and try every policy for one tick on every scenario that it is to run on.

    A policy that refuses a scenario becomes a row that says so. `on_table` is called with each table's label.

    Raises:
        PrfaasError: an unknown policy or scenario, seeds or trace seconds that a policy has seen.
    """
    tables, cells, trainings = [], [], {}
    facts: dict[tuple[str, str], PolicyFacts] = {}
    for given in config.scenarios:
        for label, scenario in zip(given.labels(), given.resolved(), strict=True):
            if on_table is not None:
                on_table(label)
            table = Table(label, scenario, config.first_seed, given.seeds, given.note)
            tables.append(table)
            for policy in config.policies:
                if config.runs_on(policy, given):
                    cells.append(_cell(config, policy, given, table, facts))
    for policy in config.policies:
        mine = next((c for c in cells if c.policy == policy.label and c.learned), None)
        if mine is not None:
            trainings[policy.label] = training_of(mine.row, policy.run)
    return ResultsPlan(config, tuple(tables), tuple(cells), trainings)


def _cell(
    config: ResultsConfig,
    policy: ResultsPolicy,
    given: ResultsScenario,
    table: Table,
    facts: dict[tuple[str, str], PolicyFacts],
) -> Cell:
    row = parse_row(f"{policy.label}={spec_of(policy, given)}")
    if policy.label in given.without:
        return Cell(
            table.label,
            policy.label,
            row.spec,
            row.deployment,
            "",
            False,
            LEFT_OUT,
            given.without[policy.label],
        )
    key = (policy.label, row.spec)
    if key not in facts:
        try:
            facts[key] = facts_of(row, ())
        except PrfaasError as error:
            raise PrfaasError(f"policy {policy.label}: {error}") from None
    known = facts[key]
    cell = Cell(table.label, policy.label, row.spec, row.deployment, known.hash, known.learned)
    try:
        placed = row.scenario(table.scenario)
        tick_s = placed.control.control_interval_s
        simulate(placed, row.make(), seed=TRIAL_SEED, engine=config.engine, duration_s=tick_s)
    except PrfaasError as error:
        missing = NO_POLICY if known.learned else NOT_POSSIBLE
        return Cell(
            table.label,
            policy.label,
            row.spec,
            row.deployment,
            known.hash,
            known.learned,
            missing,
            _told(error),
        )
    check_unseen(row, known, (table.scenario,), table.seeds)
    return cell


def _told(error: PrfaasError) -> str:
    """What was refused, without the name or folder of the policy in front, which differ from machine to machine."""
    text = str(error)
    before, separator, after = text.partition(": ")
    return after if separator and before.startswith(("bundle ", "policy ")) else text


def training_of(row: Row, run: str | None) -> Training:
    """How long a learned policy was trained: of `run.json` of its run, else what its file or bundle says.

    Raises:
        PrfaasError: `run` is given and holds no `run.json` of a training.
    """
    policy: Any = row.make()
    record = getattr(policy, "record", None)
    bundle = getattr(policy, "manifest", None)
    said = record if record is not None else getattr(bundle, "training", None)
    algorithm = str(getattr(said, "algorithm", ""))
    steps, seed = getattr(said, "steps", None), getattr(said, "training_seed", getattr(said, "seed", None))
    file = getattr(policy, "file", None)
    folder = Path(run) if run is not None else None if file is None else Path(file).parent
    if folder is None or not (folder / "run.json").is_file():
        if run is not None:
            raise PrfaasError(f"policy {row.label}: run {run}: holds no run.json of a training")
        return Training(algorithm, steps, None, seed)
    try:
        told = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return Training(
            told["algorithm"], told.get("steps", steps), told.get("elapsed_s"), told["seeds"]["learning"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrfaasError(
            f"policy {row.label}: {folder / 'run.json'}: is not that of a training: {error!r}"
        ) from None


# ------------------------------------------------------------------------------------------- the folder


class ResultsFolder(PartsFolder):
    """A results folder, new or to be gone on with.

    Raises:
        PrfaasError: the folder holds something else, or parts of another engine or of other versions.
    """

    def __init__(self, out: Path, plan: ResultsPlan, *, force: bool = False) -> None:
        super().__init__(
            out,
            kind="set of results",
            marker=MARKER,
            parts=PARTS,
            part="part",
            configuration={"format": FORMAT, "engine": plan.config.engine, "versions": versions()},
            force=force,
        )
        write_whole(out / PLAN, json.dumps(plan.as_json(), indent=1) + "\n")


def _name(table: Table, cell: Cell, seeds: range) -> str:
    return f"{cell.row.scenario(table.scenario).hash}-{cell.key}-{seeds.start}-{len(seeds)}"


def _read(folder: Path, table: Table, cell: Cell, seeds: range) -> list[Outcome]:
    file = folder / PARTS / f"{_name(table, cell, seeds)}.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["seeds"] != list(seeds):
            raise ValueError("it is of other seeds")
        outcomes = [Outcome.of_json(each) for each in content["outcomes"]]
        if len(outcomes) != len(seeds):
            raise ValueError("it is of fewer seeds")
    except FileNotFoundError:
        raise PrfaasError(
            f"{folder}: is not finished ({table.label}, {cell.policy}, seeds {seeds.start:,} and up are missing); "
            f"go on with prfaas results --out {folder}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PrfaasError(f"{file}: is not a finished part ({error}); remove it to run it again") from None
    return outcomes


def read_plan(folder: Path) -> ResultsPlan:
    """The plan of a results folder.

    Raises:
        PrfaasError: no such folder, or of another version.
    """
    file = folder / PLAN
    try:
        return ResultsPlan.of_json(json.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise first_error(error, str(file)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrfaasError(f"{folder}: is no folder of prfaas results ({file.name}: {error})") from None


def missing_chunks(plan: ResultsPlan, folder: ResultsFolder) -> list[tuple[Table, Cell, range]]:
    """What is still to be run; two rows with the same policy share their parts."""
    by_name = {_name(*chunk): chunk for chunk in plan.chunks}
    return [chunk for name, chunk in by_name.items() if not folder.has(name)]


def run_results(
    missing: Sequence[tuple[Table, Cell, range]],
    folder: ResultsFolder,
    engine: str,
    runner: EpisodeRunner,
    on_done: Callable[[], None] | None = None,
) -> None:
    """Run parts; each is written as soon as its last episode ends.

    Args:
        missing: what to run, see `missing_chunks`.
        folder: where finished parts are kept.
        engine: engine name.
        runner: processes to run in.
        on_done: called after each episode.

    Raises:
        PrfaasError: an episode failed; the message names scenario, policy and seed. Finished parts are kept.
    """
    if not missing:
        return
    warm_up(missing[0][0].scenario, engine)
    parts = []
    for table, cell, seeds in missing:
        placed = cell.row.scenario(table.scenario)
        jobs = [
            Job(placed, cell.row, seed, engine, per_request=is_trace(placed), timed=True) for seed in seeds
        ]
        parts.append(
            Part(
                f"scenario {table.label}, policy {cell.policy}",
                tuple(jobs),
                tuple(f"seed {s}" for s in seeds),
            )
        )

    def finish(p: int, outcomes: list[Outcome]) -> None:
        table, cell, seeds = missing[p]
        content = {
            "scenario": table.label,
            "policy": cell.spec,
            "policy_hash": cell.hash,
            "deployment": cell.deployment,
            "seeds": list(seeds),
            "outcomes": [outcome.as_json() for outcome in outcomes],
        }
        folder.write_part(_name(table, cell, seeds), content)

    run_parts(parts, runner, finish, None if on_done is None else lambda p: on_done())


def comparisons(plan: ResultsPlan, folder: Path) -> dict[str, Comparison]:
    """What was measured, by table: the policies that ran there, in the order of the configuration.

    Raises:
        PrfaasError: parts are missing or broken, or policies met different arrivals.
    """
    out = {}
    for table in plan.tables:
        cells = [c for c in plan.cells if c.table == table.label and not c.missing]
        if not cells:
            continue
        found = [
            tuple(
                outcome
                for chunk_table, chunk_cell, seeds in plan.chunks
                if chunk_table is table and chunk_cell is cell
                for outcome in _read(folder, table, cell, seeds)
            )
            for cell in cells
        ]
        for k, seed in enumerate(table.seeds):
            if len({outcomes[k].arrivals_hash for outcomes in found}) > 1:
                raise PrfaasError(f"scenario {table.label}, seed {seed}: the policies met different arrivals")
        out[table.label] = Comparison(
            scenarios=(table.scenario,),
            labels=(table.label,),
            rows=tuple(cell.row for cell in cells),
            facts=tuple(PolicyFacts(cell.learned, cell.hash, (), ()) for cell in cells),
            seeds=table.seeds,
            split="test",
            engine=plan.config.engine,
            reference=0,
            outcomes={(0, r): outcomes for r, outcomes in enumerate(found)},
        )
    return out
