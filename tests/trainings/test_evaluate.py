"""`prfaas evaluate` gives what the validation of the training gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas_agents.record import read_record
from prfaas_env.base import PrfaasError
from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.training import TrainingResult, train

from .test_resume import SAC, WILD

TWO = [
    {"scenario": "paper", "overrides": ["measure.horizon_s=90"]},
    {"scenario": "drift", "overrides": ["measure.horizon_s=60"]},
]


@pytest.fixture(
    scope="module", params=["maskable_ppo", pytest.param("recurrent_ppo", marks=pytest.mark.slow), "sac"]
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, runner: EpisodeRunner
) -> tuple[Path, TrainingConfig, TrainingResult]:
    from .conftest import quick

    own: dict[str, Any] = {"sac": SAC, "recurrent_ppo": {**WILD, "lstm_units": 8}}.get(request.param, WILD)
    validation = {**quick().validation.model_dump(), "overrides": ["measure.horizon_s=120"]}
    config = quick(
        scenarios=TWO, algorithm=request.param, ppo=None, validation=validation, **{request.param: own}
    )
    out = tmp_path_factory.mktemp("evaluate") / "run"
    return out, config, train(config, out, runner=runner)


def test_validation_and_command_agree_on_every_checkpoint(trained: Any, run: Callable[..., str]) -> None:
    out, config, result = trained
    assert len(result.validations) == 3
    for validated in result.validations:
        step = str(validated.steps)
        found = json.loads(
            run("evaluate", str(out), "--split", "validation", "--step", step, "--json", "--jobs", "1")
        )
        for label, value in validated.ttft_mean_s.items():
            of = {s["label"]: s["results"]["candidate"]["figures"] for s in found["scenarios"]}
            figures = of[label]
            assert figures["ttft_mean_s"]["mean"] == pytest.approx(value, rel=1e-6)
        seeds = config.validation.seeds
        assert found["seeds"] == {"first": seeds.first, "count": seeds.count}


def test_what_a_result_records(trained: Any, run: Callable[..., str], tmp_path: Path) -> None:
    out, config, _ = trained
    run("evaluate", str(out), "--seeds", "2", "--out", str(tmp_path / "r"), "--jobs", "1")
    found = json.loads((tmp_path / "r" / "metrics.json").read_text())
    assert found["split"] == "test"
    assert found["seeds"] == {"first": 2_000_000, "count": 2}
    text = (tmp_path / "r" / "metrics.json").read_text()
    assert read_record(out / "policy.zip").weights_sha256[:12] in text
    assert found["versions"]["python"]
    for scenario in config.at_decision_interval(config.load_scenarios()):
        assert scenario.hash in text


def test_mistakes_are_one_line(trained: Any, run: Callable[..., str], tmp_path: Path) -> None:
    out, _, _ = trained
    for arguments, message in (
        ([str(tmp_path)], r"holds no config\.yaml; give the folder of a training run"),
        ([str(out), "--step", "7"], r"--step 7: no such checkpoint .* there are 0, 16, 32"),
        ([str(out), "--split", "training"], "--split is 'training'; allowed: test, validation"),
        ([str(out), "--first-seed", "5"], "seed 5 is not a test seed"),
    ):
        with pytest.raises(PrfaasError, match=message):
            run("evaluate", *arguments)
