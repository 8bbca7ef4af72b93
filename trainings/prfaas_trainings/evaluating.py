"""Evaluation of a trained policy: the same code for the validation inside a training and for `prfaas evaluate`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.record import POLICY_FILE
from prfaas_env.base import PrfaasError
from prfaas_trainings.checkpoint import CHECKPOINTS, CONFIG_FILE, checkpoints, step_folder
from prfaas_trainings.compare import Comparison, compare
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.episodes import EpisodeRunner, Row
from prfaas_trainings.seeds import Split

#: Label of the policy in an evaluation.
CANDIDATE = "candidate"


def evaluate(
    folder: Path,
    config: TrainingConfig,
    *,
    seeds: range,
    split: Split,
    runner: EpisodeRunner,
    on_done: Callable[[], None] | None = None,
) -> Comparison:
    """The policy of a folder on the scenarios of its training, deterministic, masked as it was trained.

    On validation seeds the scenarios have the validation's overrides, so that the figures are those of the training.

    Raises:
        PrfaasError: another observation than the policy was trained on (the fields are named), test seeds or trace
            seconds that it has seen.
    """
    scenarios = config.load_scenarios(validation=split == "validation")
    row = Row(CANDIDATE, functools.partial(LearnedPolicy, folder / POLICY_FILE))
    return compare(
        config.at_decision_interval(scenarios),
        [row],
        seeds=seeds,
        split=split,
        runner=runner,
        engine=config.engine,
        on_done=on_done,
    )


def policy_folder(run: Path, step: int | None) -> Path:
    """The folder of a policy with its configuration: a run (its best policy), or its checkpoint at a step.

    Raises:
        PrfaasError: no such run or step.
    """
    if not (run / CONFIG_FILE).is_file():
        raise PrfaasError(
            f"{run}: holds no {CONFIG_FILE}; give the folder of a training run or of a checkpoint"
        )
    if step is None:
        return run
    folder = step_folder(run, step)
    if not folder.is_dir():
        known = ", ".join(f"{int(p.name.removeprefix('step_')):,}" for p in checkpoints(run)) or "none"
        raise PrfaasError(f"--step {step}: no such checkpoint in {run / CHECKPOINTS}; there are {known}")
    return folder


def config_of(folder: Path) -> TrainingConfig:
    """The configuration that a run or checkpoint stores."""
    return load_config(folder / CONFIG_FILE)
