"""PPO: it starts as "no change", and a time limit is not an end."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

from prfaas_agents.algorithms import make_learner
from prfaas_agents.ppo import (
    MAX_SCALED,
    MIN_SPREAD,
    FixedScaling,
    LearningRate,
    action_probabilities,
    fit_scaling,
    set_progress,
    start_neutral,
)
from prfaas_agents.settings import PpoSettings
from prfaas_env.decision import ActionCodec, ClusterDecision, Routing
from prfaas_env.scenarios import load_scenario

from .conftest import SHORT, make_model


@pytest.mark.parametrize("routing", ["margin", "threshold"])
def test_the_first_policy_is_no_change_everywhere(routing: Routing) -> None:
    model = make_model(routing, neutral_routing=0.9, neutral_move=0.97)
    neutral = ActionCodec(1, routing, "discrete").neutral()
    rng = np.random.default_rng(0)
    for observation in rng.random((200, len(model.observation_space.low)), dtype=np.float32):  # type: ignore[attr-defined]
        action, _ = model.predict(observation, deterministic=True)
        assert np.array_equal(action, neutral)
        route, move = action_probabilities(model, observation)
        assert route[neutral[0]] == pytest.approx(0.9, abs=0.02)
        assert move[neutral[1]] == pytest.approx(0.97, abs=0.01)
        # Everything else stays possible, and nearly evenly so.
        rest = np.delete(route, neutral[0])
        assert rest.sum() == pytest.approx(0.1, abs=0.02)
        assert rest.min() > 0.5 * 0.1 / len(rest)


@pytest.mark.parametrize("margins_s", [(0.5,), (-1.0, 0.5, math.inf)])
def test_margins_of_ones_own_start_at_the_one_nearest_to_0(margins_s: tuple[float, ...]) -> None:
    codec = ActionCodec(1, "margin", "discrete", margins_s)

    def make() -> gym.Env[Any, Any]:
        return gym.make("PrfaaS-v0", scenario=SHORT, routing="margin", margins_s=margins_s)

    model = make_learner(DummyVecEnv([make]), codec, PpoSettings(n_steps=8, batch_size=8), 0)
    rng = np.random.default_rng(0)
    for observation in rng.random((20, len(model.observation_space.low)), dtype=np.float32):  # type: ignore[attr-defined]
        action, _ = model.predict(observation, deterministic=True)
        assert codec.decode(action).clusters[0] == ClusterDecision(margin_s=0.5)
    model.learn(8)


def test_a_neutral_start_needs_logits(untrained: Any) -> None:
    with pytest.raises(ValueError, match="needs the discrete action form"):
        start_neutral(untrained, ActionCodec(1, "margin", "continuous"), 0.9, 0.9)


def test_two_clusters_get_a_bias_each() -> None:
    class Two(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        action_space = ActionCodec(2, "margin", "discrete").space()

    codec = ActionCodec(2, "margin", "discrete")
    model = make_learner(DummyVecEnv([Two]), codec, PpoSettings(n_steps=8, batch_size=8), 0)
    action, _ = model.predict(np.zeros(3, np.float32), deterministic=True)
    assert np.array_equal(action, codec.neutral())


def test_one_torch_thread(untrained: Any) -> None:
    assert torch.get_num_threads() == 1


def test_the_same_seed_gives_the_same_weights() -> None:
    a, b, c = (make_model(seed=s) for s in (3, 3, 4))
    pairs = [p.detach().numpy() for p in a.policy.parameters()]
    assert all(
        np.array_equal(x, y.detach().numpy()) for x, y in zip(pairs, b.policy.parameters(), strict=True)
    )
    assert not all(
        np.array_equal(x, y.detach().numpy()) for x, y in zip(pairs, c.policy.parameters(), strict=True)
    )


def test_scaling_is_measured_once_and_saved_with_the_weights() -> None:
    scaling = FixedScaling(gym.spaces.Box(0.0, 1.0, (3,), np.float32))
    before = torch.tensor([[0.1, 0.5, 0.9]])
    assert torch.equal(scaling(before), before)
    samples = np.array([[0.2, 0.5, 0.0], [0.4, 0.5, 1.0]], np.float32)
    scaling.fit(samples)
    out = scaling(torch.as_tensor(samples)).numpy()
    assert out[:, 0] == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert out[:, 2] == pytest.approx([-1.0, 1.0], abs=1e-5)
    # A field that never moved is scaled by the smallest spread, and far values are clipped.
    far = scaling(torch.tensor([[0.3, 0.5 + MIN_SPREAD, 0.5], [0.3, 1.0, 0.5]])).numpy()
    assert far[0, 1] == pytest.approx(1.0, abs=1e-4)
    assert far[1, 1] == MAX_SCALED
    again = FixedScaling(gym.spaces.Box(0.0, 1.0, (3,), np.float32))
    again.load_state_dict(scaling.state_dict())
    assert torch.equal(again(before), scaling(before))


def test_scaling_of_a_model_comes_from_its_own_play() -> None:
    model = make_model()
    fit_scaling(model, 20)
    scaling = model.policy.features_extractor
    assert isinstance(scaling, FixedScaling)
    assert "features_extractor.gain" in model.policy.state_dict()
    gain = scaling.gain.numpy()
    assert (gain > 1.0).all()
    assert gain.max() == pytest.approx(1.0 / MIN_SPREAD)
    assert not any(p.requires_grad for p in (scaling.gain, scaling.shift))
    kept = scaling.gain.clone()
    model.learn(16)
    assert torch.equal(scaling.gain, kept)


class _ConstantReward(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: SupportsFloat) -> float:
        return 1.0


def test_a_time_limit_is_not_an_end() -> None:
    """Reward 1 for ever is worth 1 / (1 - gamma), also on the last step before the limit.

    The env has no traffic and a horizon of 8 steps, so that the limit is always near: taken for an end, values
    would lie between 1 (last step) and (1 - gamma^8) / (1 - gamma) = 4.1 (first), 2.9 on average.
    """
    gamma = 0.8
    scenario = load_scenario("paper", overrides=["measure.horizon_s=8", "workload.arrivals.rate_rps=0"])

    def make() -> gym.Env[Any, Any]:
        return _ConstantReward(
            gym.make(
                "PrfaaS-v0", scenario=scenario, routing="margin", engine="simpy", disable_env_checker=True
            )
        )

    settings = PpoSettings(
        hidden=(8,), n_steps=32, batch_size=32, n_epochs=20, gamma=gamma, learning_rate=2e-2, vf_coef=1.0,
        max_grad_norm=10.0,
    )  # fmt: skip
    vec_env = DummyVecEnv([make])
    model = make_learner(vec_env, ActionCodec(1, "margin", "discrete"), settings, 0)
    truncated, steps = [], 32 * 20
    model.learn(
        steps, callback=lambda local, _: truncated.append(local["infos"][0]["TimeLimit.truncated"]) or True
    )
    assert sum(truncated) == steps // 8  # the flag that Stable-Baselines3 bootstraps on, once per episode
    observation = vec_env.reset()
    values = []
    for _ in range(8):
        with torch.no_grad():
            values.append(float(model.policy.predict_values(model.policy.obs_to_tensor(observation)[0])))  # type: ignore[arg-type]
        observation = vec_env.step(np.array([ActionCodec(1, "margin", "discrete").neutral()]))[0]  # type: ignore[assignment]
    expected = 1.0 / (1.0 - gamma)
    assert math.isclose(expected, 5.0)
    assert values == pytest.approx([expected] * 8, rel=0.1)


def test_the_learning_rate_falls_with_what_is_done() -> None:
    rate = LearningRate(1e-3, 1e-4)
    model = make_model(learning_rate=1e-3, final_learning_rate=1e-4)
    for done, expected in ((0.0, 1e-3), (0.5, 5.5e-4), (1.0, 1e-4), (1.7, 1e-4), (-1.0, 1e-3)):
        rate.done = done
        assert rate(0.123) == pytest.approx(expected)
        set_progress(model, done)
        model.learn(16)
        assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("hidden", [[], [0], [64, -1]])
def test_layers_are_checked(hidden: list[int]) -> None:
    with pytest.raises(ValueError, match="hidden must be one or more layers"):
        PpoSettings(hidden=tuple(hidden))
