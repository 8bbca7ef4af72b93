"""Drawn scenario fields and curricula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import load_scenario
from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.envs import ScenarioMix, make_vec_env
from prfaas_trainings.randomise import Distribution, drawn, group_draws

Quick = Callable[..., TrainingConfig]
FIELDS = {
    "deployment.links.0.capacity_bps": {"log_uniform": [1e10, 1e12]},
    "conversion.switch_s": {"values": [5, 15, 60]},
    "workload.arrivals.rate_rps": {"uniform": [0.5, 1e-5 + 2.5]},
}
SPECS = {path: Distribution.model_validate(spec) for path, spec in FIELDS.items()}


def test_distributions_by_hand() -> None:
    assert Distribution(uniform=(2.0, 4.0)).at(0.25) == 2.5
    assert Distribution(log_uniform=(1.0, 100.0)).at(0.5) == pytest.approx(10.0)
    three = Distribution(values=("a", "b", "c"))
    assert [three.at(x) for x in (0.0, 0.34, 0.99)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "exactly one of values, uniform, log_uniform; found none"),
        ({"uniform": [0, 1], "values": [1]}, "exactly one"),
        ({"uniform": [2, 1]}, "the first number must be below the second"),
        ({"log_uniform": [0, 1]}, "above 0"),
        ({"normal": [0, 1]}, "unknown field 'normal'"),
        ({"values": []}, "values"),
    ],
)
def test_wrong_distributions(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Distribution.model_validate(spec)


def test_draws_are_spread_and_reproducible() -> None:
    scenario = load_scenario("paper")
    random = np.random.default_rng(0)
    found = [drawn(scenario, SPECS, random) for _ in range(60)]
    capacity = [math.log10(s.deployment.links[0].capacity_bps) for s in found]
    assert 10 <= min(capacity) < 10.3
    assert 11.7 < max(capacity) <= 12
    assert abs(np.mean(capacity) - 11) < 0.25
    assert {s.conversion.switch_s for s in found} == {5, 15, 60}
    assert len({s.hash for s in found}) == 60
    again = np.random.default_rng(0)
    assert [drawn(scenario, SPECS, again).hash for _ in range(60)] == [s.hash for s in found]
    assert drawn(scenario, {}, again) is scenario
    a, b = group_draws(scenario, SPECS, (0, 1, 0), 3), group_draws(scenario, SPECS, (0, 2, 0), 3)
    assert [s.hash for s in group_draws(scenario, SPECS, (0, 1, 0), 3)] == [s.hash for s in a]
    assert not {s.hash for s in a} & {s.hash for s in b}


def test_every_episode_draws_anew_and_one_seed_fixes_all(quick: Quick) -> None:
    def play() -> list[tuple[float, int]]:
        vec_env = make_vec_env(quick(n_envs=1, randomise=FIELDS), None)
        vec_env.seed(4)
        out = []
        for _ in range(5):
            vec_env.reset()
            mix: Any = vec_env.envs[0].unwrapped  # type: ignore[attr-defined]
            assert isinstance(mix, ScenarioMix)
            out.append((mix.inner.scenario.conversion.switch_s, mix._episode_seed))
            assert mix.inner.scenario.control.control_interval_s == 15.0
        return out

    first = play()
    assert len({switch_s for switch_s, _ in first}) > 1
    assert play() == first


def test_groups_of_batched_envs_draw_once(quick: Quick) -> None:
    config = quick(vectorization="batched", engine="compiled", n_envs=6, randomise=FIELDS, randomise_groups=4)
    vec_env: Any = make_vec_env(config, None)
    batches = vec_env.unwrapped.batches
    assert sum(b.num_envs for b in batches) == 6
    rates = [b.scenario.workload.arrivals.rate_rps for b in batches]
    assert len(set(rates)) == 4
    assert all(0.5 <= rate <= 2.6 for rate in rates)
    vec_env.close()


@pytest.mark.parametrize(
    ("randomise", "message"),
    [
        ({"conversion.colour": {"values": [1]}}, r"randomise: .*unknown field 'colour'"),
        ({"conversion.switch_s": {"uniform": [-1, 5]}}, r"randomise: .*switch_s"),
        ({"conversion.min_prefill": {"uniform": [1, 3]}}, r"randomise: .*min_prefill"),
        ({"deployment.links": {"values": [[]]}}, "links|observations"),
    ],
)
def test_fields_that_cannot_be_drawn_are_named(quick: Quick, randomise: dict[str, Any], message: str) -> None:
    config = quick(randomise=randomise)
    with pytest.raises(PrfaasError, match=message):
        config.stage_scenarios(config.stages()[0])


def test_stages_of_a_curriculum(quick: Quick) -> None:
    other = [{"scenario": "drift", "overrides": ["measure.horizon_s=60"]}]
    config = quick(
        total_steps=100,
        randomise=FIELDS,
        curriculum=[{"steps": 20, "scenarios": other, "randomise": {}}, {"steps": 30}],
    )
    first, second, last = config.stages()
    assert [(s.index, s.end) for s in config.stages()] == [(0, 20), (1, 50), (2, 100)]
    assert first.scenarios[0].scenario == "drift"
    assert first.randomise == {}
    assert second.scenarios == last.scenarios == config.scenarios
    assert second.randomise == last.randomise == SPECS
    assert [config.stage_at(k).index for k in (0, 19, 20, 49, 50, 1000)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"total_steps": 32, "curriculum": [{"steps": 32}]},
            "curriculum's 32 steps leave none of total_steps 32",
        ),
        ({"seeds": [1, 1]}, "seeds must be different"),
        ({"algorithm": "sac"}, "ppo: has no effect, the algorithm is sac"),
        ({"algorithm": "dqn"}, "algorithm"),
        (
            {"algorithm": "maskable_ppo", "ppo": None, "maskable_ppo": {"n_steps": 2}},
            "batch_size 256 exceeds",
        ),
    ],
)
def test_wrong_combinations(quick: Quick, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        quick(**changes)
