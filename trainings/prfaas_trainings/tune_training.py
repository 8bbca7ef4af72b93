"""`prfaas tune` on a training: every trial is a short `prfaas train`, judged by its own validation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.scenarios.loader import value_at
from prfaas_trainings.compare import versions
from prfaas_trainings.config import load_config
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.parts import PartsFolder
from prfaas_trainings.tune import (
    MARKER,
    PARTS,
    STUDY_FILE,
    TRIALS_FILE,
    Parameters,
    Told,
    complete,
    finished,
    next_trial,
    open_study,
    score_at_end,
    suggest,
    trial_parameters,
    trials_csv,
)
from prfaas_trainings.tune_config import Tuning

#: The training with the best values, ready for `prfaas train --config`.
CONFIG_FILE = "tuned.yaml"
RUNS = "runs"


@dataclass(frozen=True)
class BestTraining:
    """The best trial: its values and score, that of the training as it stands, and the configuration of the best."""

    values: Parameters
    score: float
    first_score: float
    trials: int
    config: Path

    def as_json(self) -> dict[str, Any]:
        """Plain mapping for JSON."""
        return {
            "values": self.values,
            "validation_score": self.score,
            "validation_score_of_the_first": self.first_score,
            "trials": self.trials,
            "config": str(self.config),
        }


def describe(best: BestTraining) -> str:
    """The best trial in one line."""
    values = ", ".join(f"{name}={value}" for name, value in best.values.items())
    return (
        f"best of {best.trials} trainings: {values}; validation score {best.score:.3f} "
        f"({best.first_score:.3f} as it stood)"
    )


def assignments(values: Parameters) -> list[str]:
    """Values as `field.path=value`."""
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


class TrainingTuning:
    """A tuning of a training in a folder, new or to be gone on with.

    Args:
        tuning: which training, and what is searched.
        out: the folder; a run folder per trial lies in `runs/`.
        runner: processes for the validations.
        force: an earlier tuning there is removed first.

    Raises:
        PrfaasError: an unknown training or field, a value that it refuses, or a folder with something else.
    """

    def __init__(self, tuning: Tuning, out: Path, runner: EpisodeRunner, *, force: bool = False) -> None:
        assert tuning.training is not None
        self.tuning, self.out, self._runner = tuning, out, runner
        self.training = tuning.training
        self.base = load_config(self.training, tuning.overrides)
        if self.base.seeds:
            raise PrfaasError(
                f"tuning {tuning.name}: training {self.training} has several seeds; add `seeds=[]` to overrides"
            )
        self.first = self._check_space()
        self.folder = PartsFolder(
            out,
            kind="tuning",
            marker=MARKER,
            parts=PARTS,
            part="evaluation",
            configuration={
                "command": "prfaas tune",
                "tuning": {k: v for k, v in tuning.text.items() if k not in {"trials", "finalists"}},
                "training": self.base.model_dump(mode="json"),
                "versions": versions("optuna", "torch", "stable-baselines3"),
            },
            force=force,
        )

    def _check_space(self) -> Parameters:
        """Values of the training as it stands; both ends of every range must be allowed."""
        where, first = f"tuning {self.tuning.name}", {}
        for name, field in self.tuning.space.items():
            for value in field.ends:
                try:
                    load_config(self.training, [*self.tuning.overrides, *assignments({name: value})])
                except PrfaasError as error:
                    raise PrfaasError(f"{where}: space.{name}: {error}") from None
            own = value_at(self.base, name)
            if not field.holds(own):
                raise PrfaasError(f"{where}: space.{name}: the training's own {own!r} is not in it; widen it")
            first[name] = own
        return first

    def run(self, told: Told) -> BestTraining:
        """Run the trials that are missing; write the table of trials and the configuration of the best.

        Raises:
            PrfaasError: a training failed, or every one was refused.
        """
        study = open_study(self.tuning, self.out / STUDY_FILE)
        done = len(finished(study))
        if done:
            told.say(f"{done} of {self.tuning.trials} trainings are there already")
        advance = told.stage("trainings", self.tuning.trials, done)
        while (n := len(finished(study))) < self.tuning.trials:
            trial = next_trial(study, self.tuning, self.first)
            try:
                score = self._train(trial)
            except BaseException:
                study.tell(trial, state=TrialState.FAIL)
                raise
            # A combination that the configuration refuses is a trial without a score.
            study.tell(trial, score, state=TrialState.PRUNED if score is None else TrialState.COMPLETE)
            advance(n + 1, "refused" if score is None else f"score {score:.3f}")
            write_whole(self.out / TRIALS_FILE, trials_csv(self.tuning, study))
        ranked = sorted(complete(study), key=lambda t: (score_at_end(t), t.number))
        return self._written(ranked, len(finished(study)))

    def _train(self, trial: Trial) -> float | None:
        """Score of a trial's training: that of its best policy; None where the configuration refuses the values."""
        from prfaas_trainings.training import train

        values = suggest(self.tuning, trial)
        try:
            config = load_config(self.training, [*self.tuning.overrides, *assignments(values)])
        except PrfaasError:
            return None
        result = train(config, self.out / RUNS / f"{trial.number:04d}", runner=self._runner, force=True)
        if result.interrupted:
            raise KeyboardInterrupt
        return result.best.score

    def _written(self, ranked: list[FrozenTrial], trials: int) -> BestTraining:
        if not ranked:
            raise PrfaasError(
                f"tuning {self.tuning.name}: no trial gave a training; every combination was refused"
            )
        best = ranked[0]
        values = trial_parameters(self.tuning, best)
        # Without the overrides that only made the trials short.
        config = load_config(self.training, assignments(values))
        write_whole(self.out / CONFIG_FILE, config.yaml())
        first = min(ranked, key=lambda t: t.number)
        return BestTraining(values, score_at_end(best), score_at_end(first), trials, self.out / CONFIG_FILE)
