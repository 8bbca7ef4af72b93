"""`prfaas tune` on fields of a training: every trial is a training, judged by its validation."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios.loader import value_at
from prfaas_trainings import training
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.training import TrainingResult, Validated
from prfaas_trainings.tune import Told
from prfaas_trainings.tune_config import Tuning, load_tuning, tuning_names
from prfaas_trainings.tune_training import CONFIG_FILE, TrainingTuning

from .conftest import invoke

QUIET = Told(lambda text: None, lambda what, total, begun: lambda done, note: None)


@pytest.fixture
def tuning(write_config: Callable[..., Path]) -> Callable[..., Tuning]:
    """A tuning of the quick training."""
    path = write_config()

    def make(**changes: Any) -> Tuning:
        fields: dict[str, Any] = {
            "name": "t",
            "training": str(path),
            "space": {
                "ppo.learning_rate": {"low": 1.0e-5, "high": 1.0e-2, "log": True},
                "ppo.n_epochs": {"low": 1, "high": 4, "whole": True},
            },
            "overrides": ["total_steps=16"],
            "trials": 5,
            "startup_trials": 3,
        }
        return Tuning.model_validate({**fields, **changes})

    return make


class Fake:
    """Trainings that cost nothing: the score is the distance of the learning rate from 1e-3."""

    def __init__(self) -> None:
        self.seen: list[TrainingConfig] = []
        self.stop_after: int | None = None

    def __call__(
        self, config: TrainingConfig, out: Path, *, runner: EpisodeRunner, force: bool = False
    ) -> TrainingResult:
        self.seen.append(config)
        score = abs(config.settings.learning_rate - 1e-3)
        best = Validated(16, score, {"paper": 1.0}, out)
        result = TrainingResult(out / "policy.zip", 16, "steps", best)
        if self.stop_after is not None and len(self.seen) > self.stop_after:
            return replace(result, stopped=training.BY_CTRL_C)
        return result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Stands in for `training.train`."""
    made = Fake()
    monkeypatch.setattr(training, "train", made)
    return made


def test_the_training_as_it_stands_is_the_first_trial(
    tuning: Callable[..., Tuning], fake: Fake, runner: EpisodeRunner, tmp_path: Path
) -> None:
    best = TrainingTuning(tuning(), tmp_path / "t", runner).run(QUIET)
    own = load_config(tuning().training, ["total_steps=16"])  # type: ignore[arg-type]
    assert fake.seen[0] == own
    assert len(fake.seen) == 5 == best.trials
    scores = [abs(c.settings.learning_rate - 1e-3) for c in fake.seen]
    assert best.first_score == scores[0]
    assert best.score == min(scores)
    winner = fake.seen[scores.index(min(scores))]
    assert best.values == {
        "ppo.learning_rate": winner.settings.learning_rate,
        "ppo.n_epochs": value_at(winner, "ppo.n_epochs"),
    }
    written = load_config(tmp_path / "t" / CONFIG_FILE)
    # The winner's values in the training as it stands, with all of its steps.
    assert written.total_steps == 32
    assert written.settings == winner.settings
    rows = list(csv.DictReader((tmp_path / "t" / "trials.csv").open()))
    assert [float(row["ppo.learning_rate"]) for row in rows] == [c.settings.learning_rate for c in fake.seen]
    assert [float(row["relative"]) for row in rows] == pytest.approx(scores, rel=1e-5)


def test_a_stopped_tuning_goes_on(
    tuning: Callable[..., Tuning], fake: Fake, runner: EpisodeRunner, tmp_path: Path
) -> None:
    whole = TrainingTuning(tuning(), tmp_path / "whole", runner).run(QUIET)
    wanted = [c.settings for c in fake.seen]
    fake.seen.clear()
    fake.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        TrainingTuning(tuning(), tmp_path / "again", runner).run(QUIET)
    fake.stop_after = None
    again = TrainingTuning(tuning(), tmp_path / "again", runner).run(QUIET)
    # The third training was cut off and is done again.
    assert [c.settings for c in fake.seen] == [*wanted[:3], *wanted[2:]]
    assert (again.values, again.score) == (whole.values, whole.score)


def test_a_combination_that_is_refused_is_a_trial_without_a_score(
    tuning: Callable[..., Tuning], fake: Fake, runner: EpisodeRunner, tmp_path: Path
) -> None:
    """A rollout of 2 envs x 4 steps holds no batch of 16, one of 2 x 8 does."""
    space = {
        "ppo.n_steps": {"choices": [4, 8]},
        "ppo.batch_size": {"choices": [8, 16]},
    }
    best = TrainingTuning(tuning(space=space, trials=12), tmp_path / "t", runner).run(QUIET)
    rows = list(csv.DictReader((tmp_path / "t" / "trials.csv").open()))
    refused = [row for row in rows if (row["ppo.n_steps"], row["ppo.batch_size"]) == ("4", "16")]
    assert refused
    assert all((row["ended"], row["relative"]) == ("pruned", "") for row in refused)
    assert len(fake.seen) == 12 - len(refused)
    assert best.trials == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space": {"ppo.colour": {"low": 1, "high": 2}}}, ["space.ppo.colour", "unknown field 'colour'"]),
        ({"space": {"ppo.n_epochs": {"low": 0, "high": 2, "whole": True}}}, ["space.ppo.n_epochs"]),
        (
            {"space": {"ppo.n_epochs": {"low": 5, "high": 9, "whole": True}}},
            ["space.ppo.n_epochs", "own 2 is not in it"],
        ),
        ({"overrides": ["seeds=[0, 1]"]}, ["several seeds"]),
        ({"training": "nothing"}, ["unknown training 'nothing'"]),
    ],
)
def test_mistakes_are_named(
    changes: dict[str, Any],
    words: list[str],
    tuning: Callable[..., Tuning],
    runner: EpisodeRunner,
    tmp_path: Path,
) -> None:
    with pytest.raises(PrfaasError) as raised:
        TrainingTuning(tuning(**changes), tmp_path / "t", runner)
    for word in words:
        assert word in str(raised.value)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("name", [n for n in tuning_names() if load_tuning(n).training])
def test_shipped_tunings_begin_with_the_training_as_it_stands(
    name: str, runner: EpisodeRunner, tmp_path: Path
) -> None:
    made = TrainingTuning(load_tuning(name), tmp_path / "t", runner)
    assert made.first == {field: value_at(made.base, field) for field in made.tuning.space}


def test_the_command_trains(tuning: Callable[..., Tuning], run: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(tuning(trials=2).model_dump(mode="json")))
    out = tmp_path / "out"
    arguments = ("tune", "--config", str(path), "--out", str(out), "--jobs", "1")
    found = json.loads(run(*arguments, "--json"))
    assert found["trials"] == 2
    for number in ("0000", "0001"):
        validations = json.loads((out / "runs" / number / "validation.json").read_text())
        assert validations
    assert found["validation_score"] <= found["validation_score_of_the_first"]
    assert load_config(out / CONFIG_FILE).total_steps == 32
    # Nothing is left to do: the same again, at once.
    assert json.loads(run(*arguments, "--json")) == found
    with pytest.raises(PrfaasError, match="--family: belongs to a tuning of a policy"):
        invoke([*arguments, "--family", "drift"])
