"""Configurations of a training: what ships, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import json_grid
from prfaas_env.env import PrfaasEnv
from prfaas_trainings.config import TrainingConfig, config_folder, config_names, load_config

Quick = Callable[..., TrainingConfig]
WriteConfig = Callable[..., Path]


def test_shipped_configurations_load_and_their_scenarios_fit_together() -> None:
    assert {"demo", "drift"} <= set(config_names())
    for name in config_names():
        config = load_config(name)
        assert config.name == name
        assert len(config.load_scenarios()) == len(config.load_scenarios(validation=True))
        assert load_config(config_folder() / f"{name}.yaml") == config


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = load_config("demo")
    path = tmp_path / "again.yaml"
    path.write_text(config.yaml())
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"ppo": {"gama": 0.9}}, "unknown field 'gama'"),
        ({"ppo": {"gamma": 1.0}}, r"ppo\.gamma"),
        ({"ppo": {"n_steps": 8, "batch_size": 32}}, r"batch_size 32 exceeds the 16 decisions"),
        ({"scenarios": []}, "scenarios"),
        ({"vectorization": "batched"}, "vectorization batched needs engine compiled, found simpy"),
        (
            {
                "vectorization": "batched",
                "engine": "compiled",
                "n_envs": 1,
                "scenarios": [{"scenario": "paper"}] * 2,
            },
            r"n_envs 1 is fewer than one per scenario \(2\)",
        ),
        ({"scenarios": [{"scenario": "paper", "weight": 0}]}, r"scenarios\.0\.weight"),
        ({"routing": "oracle"}, "routing"),
        ({"reward": "fame"}, "reward"),
        ({"total_steps": ...}, "give total_steps, minutes, or both"),
        ({"total_steps": 0}, "total_steps"),
        ({"minutes": 0}, "minutes"),
        (
            {"routing_fit": {}, "routing": "threshold"},
            "routing_fit needs ppo or maskable_ppo, routing margin",
        ),
        (
            {"routing_fit": {}, "algorithm": "recurrent_ppo", "ppo": None, "n_envs": 8},
            "routing_fit needs .*; found recurrent_ppo",
        ),
        ({"routing_fit": {}, "engine": "compiled"}, "routing_fit goes with choices moves, found both"),
        ({"margins_s": [1, 0]}, "margins_s must be one or more rising numbers"),
        (
            {"margins_s": [0.5], "routing": "threshold"},
            "margins_s belong to discrete margins, not discrete threshold",
        ),
        ({"name": "a b/c"}, "name"),
        (
            {"training_seeds": {"first": 999_999, "count": 2}},
            r"training_seeds: training seeds are 0\.\.999,999",
        ),
        (
            {"validation": {"seeds": {"first": 2_000_000, "count": 1}}},
            r"seeds: validation seeds are 1,000,000\.\.1,000,999, found 2,000,000\.\.2,000,000",
        ),
        ({"validation": {"seeds": {"first": 1_000_000, "count": 1_001}}}, "validation seeds are"),
    ],
)
def test_wrong_fields_are_one_line_with_the_file(
    write_config: WriteConfig, changes: dict[str, Any], message: str
) -> None:
    path = write_config(**changes)
    with pytest.raises(PrfaasError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_configuration_and_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(PrfaasError, match="unknown training 'nothing'; shipped: demo, drift"):
        load_config("nothing")
    with pytest.raises(PrfaasError, match=r"missing\.yaml: cannot be read"):
        load_config(tmp_path / "missing.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: [unclosed\n")
    with pytest.raises(PrfaasError, match=r"bad\.yaml:\d+: not valid YAML"):
        load_config(bad)


def test_overrides_come_last() -> None:
    config = load_config("demo", ["ppo.gamma=0.9", "scenarios.0.weight=2", "seed=4"])
    assert (config.ppo.gamma, config.scenarios[0].weight, config.seed) == (0.9, 2.0, 4)
    with pytest.raises(PrfaasError, match="unknown field 'gama'"):
        load_config("demo", ["ppo.gama=0.9"])


def test_scenario_paths_are_relative_to_the_file(write_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: paper\nname: mine\n")
    config = load_config(write_config(scenarios=[{"scenario": "mine.yaml"}]))
    assert config.load_scenarios()[0].name == "mine"
    assert yaml.safe_load(config.yaml())["scenarios"][0]["scenario"] == str(tmp_path / "mine.yaml")


def test_a_decision_is_a_step_of_the_training_env(quick: Quick) -> None:
    config = quick(decision_interval_s=5.0)
    scenarios = config.load_scenarios()
    assert scenarios[0].control.control_interval_s == 1.0
    steps = config.at_decision_interval(scenarios)
    assert steps[0].control.control_interval_s == 5.0
    assert steps[0].replace(control=scenarios[0].control) == scenarios[0]


def test_validation_has_overrides_of_its_own(quick: Quick) -> None:
    fields = {**quick().validation.model_dump(), "overrides": ["measure.horizon_s=30"]}
    config = quick(validation=fields)
    assert config.load_scenarios()[0].measure.horizon_s == 60.0
    assert config.load_scenarios(validation=True)[0].measure.horizon_s == 30.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decision_interval_s": 2.5}, "must be a whole multiple of control_interval_s 1 of scenario paper"),
        ({"decision_interval_s": 20.0}, "conversion_interval_s 15.0 must be a whole multiple"),
        (
            {"scenarios": [{"scenario": "paper"}, {"scenario": "homogeneous"}]},
            "paper and homogeneous have different observations: removed: prfaas0",
        ),
        ({"scenarios": [{"scenario": "nowhere"}]}, "unknown scenario 'nowhere'"),
        ({"scenarios": [{"scenario": "paper", "overrides": ["measure.horizon=5"]}]}, "horizon"),
    ],
)
def test_scenarios_that_do_not_fit(quick: Quick, changes: dict[str, Any], message: str) -> None:
    config = quick(**changes)
    with pytest.raises(PrfaasError, match=message):
        config.at_decision_interval(config.load_scenarios())


def test_the_codec_is_that_of_the_env(quick: Quick) -> None:
    for routing, margins_s in (("margin", None), ("margin", (0.0, 0.5, math.inf)), ("threshold", None)):
        given = {} if margins_s is None else {"margins_s": json_grid(margins_s)}
        config = quick(routing=routing, **given)
        env = PrfaasEnv(
            config.load_scenarios()[0],
            routing=routing,  # type: ignore[arg-type]
            margins_s=margins_s,
            engine="simpy",
        )
        assert config.codec() == env.codec


def test_frozen(quick: Quick) -> None:
    with pytest.raises(ValidationError):
        quick().seed = 3
