"""What `prfaas compare` does: run what is missing, write, show; Ctrl-C says how to go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from prfaas_trainings import results, tables
from prfaas_trainings.compare import (
    CompareFolder,
    ComparePlan,
    Comparison,
    run_compare,
    run_timelines,
    timeline_rows,
)
from prfaas_trainings.episodes import EpisodeRunner, default_jobs, episode_runner
from prfaas_trainings.parts import INTERRUPTED
from prfaas_trainings.progress import ProgressReport, progress_bar


def run(
    plan: ComparePlan,
    out: Path | None,
    *,
    jobs: int | None,
    timeline: Sequence[str],
    force: bool,
    report: bool,
    as_json: bool,
    again: str,
) -> None:
    """Run what is missing of a comparison, write its files where `out` is given, print its tables.

    `again` is the command that goes on with it (`parts.command_line`).

    Raises:
        PrfaasError: see `CompareFolder`, `run_compare`, `timeline_rows`.
        typer.Exit: after Ctrl-C in a comparison with a folder; the command to go on with has been printed.
    """
    folder = CompareFolder(out, plan, force=force) if out is not None else None
    written: list[Path] = []
    try:
        n_jobs = min(jobs or default_jobs(), len(plan.parts) * len(plan.rows))
        with episode_runner(n_jobs) as runner:
            comparison = _run(plan, runner, folder)
            if out is not None:
                written = _write(comparison, runner, timeline, out)
    except KeyboardInterrupt:
        if folder is None:
            raise
        done = len(folder.done())
        typer.echo(f"stopped: {done} of {len(plan.parts)} parts are finished and kept in {out}", err=True)
        typer.echo(f"go on with: {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if report and out is not None:
        from prfaas_trainings.report import write_report

        written.append(write_report(out, out / "report.html"))
    if as_json:
        typer.echo(comparison.json_text(), nl=False)
        return
    console = tables.console_for_tables()
    tables.show(comparison, console)
    if written:
        console.print(
            f"written: {', '.join(str(path) for path in written)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _run(plan: ComparePlan, runner: EpisodeRunner, folder: CompareFolder | None) -> Comparison:
    there = len(folder.done()) if folder is not None else 0
    total = (len(plan.parts) - there) * len(plan.rows)
    if not total:
        return run_compare(plan, runner, folder)
    progress = ProgressReport("episodes", total)
    if there:
        progress.say(f"{there} of {len(plan.parts)} parts (scenario and seed) are there already")
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress.update(done)

    try:
        return run_compare(plan, runner, folder, advance)
    finally:
        progress.close()


def _write(comparison: Comparison, runner: EpisodeRunner, timeline: Sequence[str], out: Path) -> list[Path]:
    picked = timeline_rows(comparison, timeline)
    with progress_bar("timelines", len(comparison.scenarios) * len(picked)) as advance:
        timelines = run_timelines(comparison, picked, runner, advance)
    return results.write_files(comparison, timelines, out)
