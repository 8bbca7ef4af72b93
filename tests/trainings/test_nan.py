"""No NaN or infinity reaches a learner: random decisions under overload, without traffic, in a drain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan

from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.envs import make_vec_env

STEPS = 10_000
CASES: dict[str, list[dict[str, Any]]] = {
    "overload": [
        {
            "scenario": "drift",
            "overrides": ["measure.horizon_s=100", "workload.arrivals.rate_rps.values=[5, 7, 9]"],
        }
    ],
    "no traffic": [
        {"scenario": "paper", "overrides": ["measure.horizon_s=600", "workload.arrivals.rate_rps=0"]}
    ],
    "a request now and then, roles that drain": [
        {
            "scenario": "paper",
            "overrides": [
                "measure.horizon_s=600",
                "workload.arrivals.rate_rps=0.02",
                "conversion.switch_s=60",
                "control.conversion_interval_s=1",
            ],
        }
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_random_decisions_never_give_nan(case: str) -> None:
    per_case = STEPS // len(CASES) + 1
    config = TrainingConfig.model_validate(
        {
            "name": "nan",
            "scenarios": CASES[case],
            "engine": "simpy",
            "decision_interval_s": 1.0,
            "reward": "cost",
            "total_steps": 1,
            "n_envs": 1,
            "vectorization": "none",
            "ppo": {"n_steps": 256, "batch_size": 256},
        }
    )
    vec_env = make_vec_env(config, None)
    assert isinstance(vec_env, DummyVecEnv)
    checked = VecCheckNan(vec_env, raise_exception=True)
    checked.seed(1)
    checked.action_space.seed(1)
    assert np.isfinite(np.asarray(checked.reset())).all()
    for _ in range(per_case):
        observation, reward, _, infos = checked.step(np.array([checked.action_space.sample()]))
        assert np.isfinite(np.asarray(observation)).all()
        assert np.isfinite(reward).all()
        for name, value in infos[0].items():
            if isinstance(value, float):
                assert np.isfinite(value), name
        assert all(np.isfinite(v) for v in infos[0]["reward_terms"].values())
    checked.close()
