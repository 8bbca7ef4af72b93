"""What `prfaas sweep` does: a study from options or a file, run, shown; Ctrl-C says how to go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from prfaas_env.base import first_error
from prfaas_trainings import tables
from prfaas_trainings.episodes import default_jobs, episode_runner
from prfaas_trainings.parts import INTERRUPTED
from prfaas_trainings.progress import ProgressReport
from prfaas_trainings.seeds import Split, seeds_of
from prfaas_trainings.study import Cell, Study, load_study, study_of_options
from prfaas_trainings.sweep import Plan, SweepFolder, SweepResult, prepare, run_sweep, write_results

#: What a sweep compares when no policy is named.
DEFAULT_POLICIES = ("static", "earliest_finish")


def from_options(
    scenario: str,
    assignments: Sequence[str],
    policies: Sequence[str],
    seeds: int | None,
    reference: str | None,
    metrics: Sequence[str] | None,
) -> Study:
    """The study of the command line."""
    return study_of_options(
        scenario, assignments, policies or DEFAULT_POLICIES, **_changes(seeds, reference, metrics)
    )


def from_study(spec: str, seeds: int | None, reference: str | None, metrics: Sequence[str] | None) -> Study:
    """A study of a file, with what the command line changes of it."""
    study = load_study(spec)
    try:
        return Study.model_validate({**study.model_dump(), **_changes(seeds, reference, metrics)})
    except ValidationError as error:
        raise first_error(error, f"study {spec}") from None


def _changes(seeds: int | None, reference: str | None, metrics: Sequence[str] | None) -> dict[str, Any]:
    given = {"seeds": seeds, "reference": reference, "metrics": tuple(metrics) if metrics else None}
    return {name: value for name, value in given.items() if value is not None}


def run(
    study: Study,
    out: Path,
    *,
    split: str,
    first_seed: int | None,
    engine: str,
    jobs: int | None,
    force: bool,
    as_json: bool,
    again: str,
) -> None:
    """Run what is missing of a sweep, write its results, print its tables.

    `again` is the command that goes on with it (`command_line`).

    Raises:
        PrfaasError: see `prepare`, `SweepFolder`, `run_sweep`.
        typer.Exit: after Ctrl-C; the command to go on with has been printed.
    """
    chosen = seeds_of(split, first_seed, study.seeds)
    named: Split = split  # type: ignore[assignment]
    plan = prepare(study, seeds=chosen, split=named, engine=engine)
    folder = SweepFolder(out, plan, force=force)
    try:
        _run_cells(plan, folder, jobs)
    except KeyboardInterrupt:
        done = len(folder.done())
        typer.echo(f"stopped: {done} of {len(plan.cells)} cells are finished and kept in {out}", err=True)
        typer.echo(f"go on with: {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    result = SweepResult.of(plan, folder)
    written = list(write_results(result, out))
    if as_json:
        typer.echo(result.json_text(), nl=False)
        return
    console = tables.console_for_tables()
    tables.show_sweep(result, console)
    console.print(f"written: {', '.join(str(path) for path in written)}", highlight=False, markup=False)


def _run_cells(plan: Plan, folder: SweepFolder, jobs: int | None) -> None:
    missing = len(plan.cells) - len(folder.done())
    if not missing:
        return
    total = missing * plan.episodes_per_cell
    report = ProgressReport("episodes", total)
    if missing < len(plan.cells):
        report.say(f"{len(plan.cells) - missing} of {len(plan.cells)} cells are there already")
    done = 0

    def advance(cell: Cell) -> None:
        nonlocal done
        done += 1
        report.update(done, f"cell {cell.index + 1} of {len(plan.cells)}: {cell.label}")

    try:
        with episode_runner(min(jobs or default_jobs(), total)) as runner:
            run_sweep(plan, folder, runner, advance)
    finally:
        report.close()
