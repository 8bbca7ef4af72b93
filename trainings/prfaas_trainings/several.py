"""One training with several seeds: a run per seed in a folder of its own, and the best of them by validation."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from prfaas_agents.record import POLICY_FILE, read_record
from prfaas_env.base import PrfaasError, write_whole
from prfaas_trainings.checkpoint import CONFIG_FILE
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.progress import ProgressReport
from prfaas_trainings.training import (
    MARKER,
    TrainingResult,
    check_out,
    resume,
    save_policy_copy,
    train,
    write_json,
)

SUMMARY = "summary.json"


def seed_folder(out: Path, seed: int) -> Path:
    """Folder of the run with one seed."""
    return out / f"seed{seed}"


def is_several(out: Path) -> bool:
    """Whether a folder holds runs with several seeds."""
    return (out / MARKER).is_file() and bool(_marker(out).get("learning_seeds"))


def _marker(folder: Path) -> dict[str, Any]:
    path = folder / MARKER
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrfaasError(f"{path}: cannot be read: {error}") from None
    return dict(found)


def train_all(
    config: TrainingConfig, out: Path, *, runner: EpisodeRunner, force: bool = False
) -> list[TrainingResult]:
    """Train with each of `config.seeds`, one after another.

    `out` gets a run folder per seed, `summary.json`, and the best policy by validation as `policy.zip`. Ctrl-C ends
    the run under way and the whole.

    Raises:
        PrfaasError: as `training.train`.
    """
    check_out(out, force)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / CONFIG_FILE, config.yaml())
    write_json(
        out / MARKER,
        {
            "command": "prfaas train",
            "name": config.name,
            "learning_seeds": list(config.seeds),
            "status": "running",
        },
    )
    return _go(config, out, runner, force=force, trust=False)


def resume_all(out: Path, *, runner: EpisodeRunner, trust: bool) -> list[TrainingResult]:
    """Go on with the runs that have not ended, and begin those that have not begun.

    Raises:
        PrfaasError: as `training.resume`.
    """
    return _go(load_config(out / CONFIG_FILE), out, runner, force=False, trust=trust)


def _go(
    config: TrainingConfig, out: Path, runner: EpisodeRunner, *, force: bool, trust: bool
) -> list[TrainingResult]:
    results = []
    for seed in config.seeds:
        folder = seed_folder(out, seed)
        begun = not force and (folder / MARKER).is_file()
        if begun and _marker(folder).get("best") is not None and _ended(folder):
            continue
        report = ProgressReport(f"seed {seed}", 1000)
        results.append(
            resume(folder, runner=runner, trust=trust, report=report)
            if begun
            else train(config.of_seed(seed), folder, runner=runner, force=force, report=report)
        )
        _summarise(config, out)
        if results[-1].interrupted:
            break
    return results


def _ended(folder: Path) -> bool:
    return not str(_marker(folder)["status"]).startswith("stopped")


def _summarise(config: TrainingConfig, out: Path) -> None:
    """Write `summary.json`, and keep the best policy of all runs so far."""
    runs = {}
    for seed in config.seeds:
        folder = seed_folder(out, seed)
        if (folder / MARKER).is_file() and "best" in (found := _marker(folder)):
            runs[seed] = {"status": found["status"], "steps": found["steps"], "best": found["best"]}
    scores = {seed: run["best"]["score"] for seed, run in runs.items()}
    chosen = min(scores, key=lambda seed: scores[seed])
    validation = read_record(seed_folder(out, chosen) / POLICY_FILE).validation
    save_policy_copy(
        seed_folder(out, chosen),
        out,
        {**validation, "scores_by_seed": {str(k): v for k, v in scores.items()}},
    )
    values = list(scores.values())
    complete = len(runs) == len(config.seeds) and all(_ended(seed_folder(out, seed)) for seed in runs)
    summary = {
        "runs": {f"seed{seed}": run for seed, run in runs.items()},
        "chosen_seed": chosen,
        "score": {
            "best": min(values),
            "mean": statistics.fmean(values),
            "worst": max(values),
            "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        },
    }
    write_json(out / SUMMARY, summary)
    write_json(out / MARKER, {**_marker(out), "status": "all seeds done" if complete else "unfinished"})


def describe_all(out: Path) -> str:
    """What `summary.json` says, in a line."""
    found = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    scores = ", ".join(f"{name} {run['best']['score']:.3f}" for name, run in found["runs"].items())
    return f"best scores by seed: {scores}; kept seed{found['chosen_seed']}"
