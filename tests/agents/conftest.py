"""An untrained policy on disk, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

import prfaas_env  # noqa: F401  (registers the env)
from prfaas_agents.algorithms import make_learner
from prfaas_agents.ppo import save_policy
from prfaas_agents.record import CodecRecord, PolicyRecord, TelemetryRecord
from prfaas_agents.settings import PpoSettings
from prfaas_env.decision import ActionCodec, Routing
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.world import scenario_schema

SHORT = load_scenario("paper", overrides=["measure.horizon_s=120"])


def make_model(routing: Routing = "margin", seed: int = 0, **settings: Any) -> PPO:
    """A fresh PPO on the paper's scenario, one env."""
    vec_env = DummyVecEnv(
        [
            lambda: gym.make(
                "PrfaaS-v0", scenario=SHORT, routing=routing, engine="simpy", disable_env_checker=True
            )
        ]
    )
    chosen = PpoSettings(**{"hidden": (16,), "n_steps": 16, "batch_size": 16, "n_epochs": 2, **settings})
    return make_learner(vec_env, ActionCodec(1, routing, "discrete"), chosen, seed)


def make_record(**changes: Any) -> PolicyRecord:
    """Record of a policy from `make_model`."""
    fields: dict[str, Any] = {
        "telemetry": TelemetryRecord.of(scenario_schema(SHORT)),
        "action": CodecRecord(n_pd=1, routing="margin", form="discrete"),
        "decision_interval_s": 5.0,
        "hidden": (16,),
        "weights_sha256": "",
        "steps": 0,
        "reward": "waiting",
        "trained_on": (),
        "training_seed": 0,
        "seed_ranges": {"training": (0, 1_000_000), "validation": (1_000_000, 1_000_004)},
        "validation": {},
        "versions": {},
    }
    return PolicyRecord(**{**fields, **changes})


@pytest.fixture(scope="session")
def untrained() -> PPO:
    """A fresh model on margins. Not to be trained."""
    return make_model()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save(model, **record fields)`: the path of its policy.zip."""

    def write(model: PPO, **changes: Any) -> Path:
        return save_policy(model, make_record(**changes), tmp_path / "policy")

    return write
