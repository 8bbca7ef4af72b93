"""What `prfaas tune` does: a tuning from a file, run, shown, saved; Ctrl-C says how to go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.table import Table

from prfaas_baselines.tuned_files import (
    BEST_FILE,
    BestFile,
    BestRule,
    Score,
    TunedFile,
    read_best,
    tuned_yaml,
)
from prfaas_env.base import PrfaasError, write_whole
from prfaas_trainings import tables
from prfaas_trainings.episodes import default_jobs, episode_runner
from prfaas_trainings.parts import INTERRUPTED
from prfaas_trainings.progress import ProgressReport
from prfaas_trainings.tune import TRIALS_FILE, PolicyTuning, Told, spec_of
from prfaas_trainings.tune_best import choose_best
from prfaas_trainings.tune_config import NamedFamily, Tuning, load_family
from prfaas_trainings.tune_training import TrainingTuning, describe


class _Stages:
    """One progress bar after another."""

    def __init__(self) -> None:
        self._report: ProgressReport | None = None

    def say(self, text: str) -> None:
        typer.echo(text, err=True)

    def stage(self, what: str, total: int, begun: int) -> Callable[[int, str], None]:
        self.close()
        self._report = ProgressReport(what, total)
        self._report.begin(begun)
        return self._report.update

    def close(self) -> None:
        if self._report is not None:
            self._report.close()
            self._report = None


@contextmanager
def _stages() -> Iterator[Told]:
    stages = _Stages()
    try:
        yield Told(stages.say, stages.stage)
    finally:
        stages.close()


@contextmanager
def _stoppable(out: Path, again: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; what is finished is kept in {out}", err=True)
        typer.echo(f"go on with: {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def run_policy(
    tuning: Tuning,
    family: str | None,
    out: Path,
    *,
    save: Path | None,
    jobs: int | None,
    force: bool,
    as_json: bool,
    again: str,
) -> None:
    """Tune a rule on a family.

    Raises:
        PrfaasError: see `PolicyTuning`.
        typer.Exit: after Ctrl-C; the command to go on with has been printed.
    """
    name = family or tuning.family
    if name is None:
        raise PrfaasError(f"tuning {tuning.name}: names no family; say --family")
    chosen = load_family(name)
    with _stoppable(out, again), episode_runner(jobs or default_jobs()) as runner:
        run = PolicyTuning(tuning, chosen, out, runner, force=force)
        with _stages() as told:
            record = run.run(told)
    written = [out / "tuned.yaml", out / TRIALS_FILE]
    if save is not None:
        written += _save(record, out, save)
    if as_json:
        typer.echo(json.dumps(record.model_dump(mode="json"), indent=2, allow_nan=False))
        return
    _show(record)
    _tell(written)


def _save(record: TunedFile, out: Path, save: Path) -> list[Path]:
    folder = save / record.policy
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        folder / f"{record.family}.yaml": tuned_yaml(record),
        folder / f"{record.family}.csv": (out / TRIALS_FILE).read_text(encoding="utf-8"),
    }
    for path, text in files.items():
        write_whole(path, text)
    return list(files)


def _tell(written: list[Path]) -> None:
    console = tables.console_for_tables()
    console.print(f"written: {', '.join(str(path) for path in written)}", highlight=False, markup=False)


def _interval(score: Score) -> str:
    return "" if score.low is None or score.high is None else f"{score.low:.3f} to {score.high:.3f}"


def _seconds(score: Score) -> str:
    return ", ".join(f"{value:.2f}" for value in score.ttft_mean_s.values())


def _show(record: TunedFile) -> None:
    console = tables.console_for_tables()
    study = record.study
    console.print(
        f"[bold]{record.policy}[/bold] on {record.family}: {study.trials} trials ({study.pruned} stopped early)",
        highlight=False,
    )
    table = Table("", "seeds", f"mean TTFT / {study.reference}", "95%", "mean TTFT s")
    for split, scores, seeds in (
        ("training", record.training, study.training_seeds),
        ("validation", record.validation, study.validation_seeds),
    ):
        for name in ("default", "tuned"):
            score = scores[name]
            table.add_row(
                f"{name}, {split}",
                f"{seeds.count}",
                f"{score.relative:.3f}",
                _interval(score),
                _seconds(score),
            )
    console.print(table)
    console.print(
        spec_of(record.policy, dict(record.parameters)) if record.parameters else "the defaults are best",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def run_training(
    tuning: Tuning, out: Path, *, jobs: int | None, force: bool, as_json: bool, again: str
) -> None:
    """Tune fields of a training.

    Raises:
        PrfaasError: see `TrainingTuning`.
        typer.Exit: after Ctrl-C; the command to go on with has been printed.
    """
    with _stoppable(out, again), episode_runner(jobs or default_jobs()) as runner:
        run = TrainingTuning(tuning, out, runner, force=force)
        with _stages() as told:
            best = run.run(told)
    if as_json:
        typer.echo(json.dumps(best.as_json(), indent=2, allow_nan=False))
        return
    typer.echo(describe(best))
    _tell([best.config, out / TRIALS_FILE])


def run_best(
    family: str,
    save: Path,
    out: Path,
    *,
    jobs: int | None,
    engine: str,
    force: bool,
    as_json: bool,
    again: str,
) -> None:
    """Choose the best rule of a family among all with and without tuned parameters in a folder.

    Raises:
        PrfaasError: an unknown family, or see `choose_best`.
        typer.Exit: after Ctrl-C; the command to go on with has been printed.
    """
    chosen: NamedFamily = load_family(family)
    with _stoppable(out, again), episode_runner(jobs or default_jobs()) as runner, _stages() as told:
        found: BestRule = choose_best(chosen, save, out, runner, engine, told, force=force)
    known = read_best(save).families
    write_whole(save / BEST_FILE, tuned_yaml(BestFile(families={**known, chosen.name: found})))
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json"), indent=2, allow_nan=False))
        return
    console = tables.console_for_tables()
    table = Table("rule", f"mean TTFT / {found.reference}", "95%", "mean TTFT s")
    for label, score in sorted(found.candidates.items(), key=lambda item: item[1].relative):
        table.add_row(label, f"{score.relative:.3f}", _interval(score), _seconds(score))
    console.print(table)
    console.print(f"best on {chosen.name}: {found.spec}", highlight=False, markup=False, soft_wrap=True)
    _tell([save / BEST_FILE])
