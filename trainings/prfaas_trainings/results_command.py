"""What `prfaas results` does: run what is missing, make the page; Ctrl-C says how to go on."""

from __future__ import annotations

from pathlib import Path

import typer

from prfaas_trainings.episodes import default_jobs, episode_runner
from prfaas_trainings.parts import INTERRUPTED
from prfaas_trainings.progress import ProgressReport, progress_bar
from prfaas_trainings.results_config import ResultsConfig
from prfaas_trainings.results_page import write_page
from prfaas_trainings.results_run import ResultsFolder, missing_chunks, prepare, run_results


def run(
    config: ResultsConfig, out: Path, *, docs: Path | None, jobs: int | None, force: bool, again: str
) -> list[Path]:
    """Run what is missing of a page of results and write it; gives the files.

    `again` is the command that goes on with it (`parts.command_line`).

    Raises:
        PrfaasError: see `prepare`, `ResultsFolder`, `run_results`, `write_page`.
        typer.Exit: after Ctrl-C; the command to go on with has been printed.
    """
    with progress_bar("checking policies", len(config.table_labels)) as advance:
        plan = prepare(config, lambda label: advance())
    folder = ResultsFolder(out, plan, force=force)
    missing = missing_chunks(plan, folder)
    total = sum(len(seeds) for _, _, seeds in missing)
    try:
        if missing:
            report = ProgressReport("episodes", total)
            report.say(f"{total:,} episodes in {len(missing):,} parts to run")
            done = 0

            def tell() -> None:
                nonlocal done
                done += 1
                report.update(done)

            try:
                with episode_runner(min(jobs or default_jobs(), total)) as runner:
                    run_results(missing, folder, config.engine, runner, tell)
            finally:
                report.close()
    except KeyboardInterrupt:
        left = len(missing_chunks(plan, folder))
        typer.echo(f"stopped: {left:,} parts are left; finished ones are kept in {out}", err=True)
        typer.echo(f"go on with: {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    return write_page(out, docs)
