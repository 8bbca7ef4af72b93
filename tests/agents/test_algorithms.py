"""Every algorithm through the one interface: it starts as "no change", learns, and decides the same from its file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from prfaas_agents.algorithms import ALGORITHMS, make_learner
from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.ppo import FixedScaling, fit_scaling, save_policy
from prfaas_agents.record import CodecRecord
from prfaas_agents.settings import SETTINGS, AlgorithmName, LearnerSettings, SacSettings, TqcSettings
from prfaas_env.decision import (
    PAPER_THRESHOLD_TOKENS,
    THRESHOLD_MAX_TOKENS,
    THRESHOLD_MIN_TOKENS,
    ActionCodec,
    Move,
    Routing,
)
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.simulator.run import simulate

from .conftest import SHORT, make_record

SMALL: dict[AlgorithmName, dict[str, Any]] = {
    "ppo": {"n_steps": 8, "batch_size": 8, "n_epochs": 1},
    "maskable_ppo": {"n_steps": 8, "batch_size": 8, "n_epochs": 1},
    "recurrent_ppo": {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "lstm_units": 8},
    "sac": {"buffer_size": 64, "learning_starts": 4, "batch_size": 8, "gradient_steps": 1},
    "tqc": {"buffer_size": 64, "learning_starts": 4, "batch_size": 8, "gradient_steps": 1, "n_quantiles": 5},
}


def settings_of(name: AlgorithmName, **changes: Any) -> LearnerSettings:
    return SETTINGS[name](**{"hidden": (8,), "scaling_steps": 4, **SMALL[name], **changes})


def learner(name: AlgorithmName, routing: Routing = "margin", seed: int = 0, **changes: Any) -> BaseAlgorithm:
    settings = settings_of(name, **changes)

    def make() -> gym.Env[Any, Any]:
        return gym.make(
            "PrfaaS-v0",
            scenario=SHORT,
            routing=routing,
            action=settings.form,
            engine="simpy",
            disable_env_checker=True,
        )

    return make_learner(DummyVecEnv([make]), ActionCodec(1, routing, settings.form), settings, seed)


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(name, learner after a few updates, folder of its policy)."""
    name = request.param
    model = learner(name)
    fit_scaling(model, 4)
    model.learn(16)
    settings = settings_of(name)
    record = make_record(
        algorithm=name,
        hidden=settings.hidden,
        network=settings.network,
        action=CodecRecord(n_pd=1, routing="margin", form=settings.form),
    )
    folder = tmp_path_factory.mktemp(name)
    save_policy(model, record, folder)
    yield name, model, folder
    model.get_env().close()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("routing", ["margin", "threshold"])
def test_the_first_policy_is_no_change_everywhere(name: AlgorithmName, routing: Routing) -> None:
    model = learner(name, routing)
    codec = ActionCodec(1, routing, settings_of(name).form)
    seen = np.random.default_rng(0).random((20, model.observation_space.shape[0]), dtype=np.float32)  # type: ignore[index]
    actions, _ = model.predict(seen, deterministic=True)
    for action in actions:
        decided = codec.decode(action).clusters[0]
        assert decided.move is Move.NONE
        if routing == "margin":
            assert decided.margin_s == pytest.approx(0.0, abs=1e-6)
        else:
            assert decided.threshold_tokens == pytest.approx(PAPER_THRESHOLD_TOKENS, rel=1e-5)


def test_it_learns_and_every_scaling_is_measured(trained: Any) -> None:
    _, model, _ = trained
    assert model._n_updates > 0
    found = [m for m in model.policy.modules() if isinstance(m, FixedScaling)]
    assert found
    assert all(
        torch.equal(m.gain, found[0].gain) and not torch.equal(m.gain, torch.ones_like(m.gain)) for m in found
    )


def test_the_file_decides_as_the_learner_does(trained: Any) -> None:
    """Over an episode in time order, so that a recurrent policy's state is carried along."""
    name, model, folder = trained
    policy = LearnedPolicy(folder)
    asked: list[Any] = []
    act = policy._act

    def watched(telemetry: Any) -> Any:
        action = act(telemetry)
        asked.append((telemetry.encode(), policy._codec.masks(telemetry.legal_moves), action))
        return action

    policy._act = watched  # type: ignore[method-assign]
    for _ in range(2):  # a second episode begins as the first one did
        asked.clear()
        simulate(SHORT, policy, seed=1, engine="simpy")
        state, start = None, np.array([True])
        for observation, mask, action in asked:
            given = {"action_masks": mask} if name == "maskable_ppo" else {}
            if name == "recurrent_ppo":
                given = {"state": state, "episode_start": start}
            own, state = model.predict(observation, deterministic=True, **given)
            start = np.array([False])
            assert np.array_equal(own, action)
    assert len(asked) == 24


def test_untrained_it_is_earliest_finish(tmp_path: Path) -> None:
    for name in ("recurrent_ppo", "tqc"):
        settings = settings_of(name)
        record = make_record(
            algorithm=name,
            hidden=settings.hidden,
            network=settings.network,
            action=CodecRecord(n_pd=1, routing="margin", form=settings.form),
        )
        save_policy(learner(name), record, tmp_path / name)
        own = simulate(SHORT, LearnedPolicy(tmp_path / name), seed=2, engine="simpy").metrics
        rule = simulate(SHORT, make_policy("earliest_finish"), seed=2, engine="simpy").metrics
        assert own["ttft_s"] == rule["ttft_s"]


def test_a_masked_policy_never_asks_for_an_illegal_move(tmp_path: Path) -> None:
    """One that always wants to move, over an episode in which it mostly may not."""
    model = learner("maskable_ppo")
    with torch.no_grad():
        model.policy.action_net.bias[-3:] = torch.tensor([5.0, -5.0, 4.0])
    record = make_record(algorithm="maskable_ppo", hidden=(8,), decision_interval_s=1.0)
    save_policy(model, record, tmp_path)
    policy = LearnedPolicy(tmp_path)
    metrics = simulate(SHORT, policy, seed=0, engine="simpy").metrics
    assert metrics["conversions"] > 0
    policy.reset(PolicyContext(SHORT, policy.record.telemetry.as_schema(), 0))
    assert metrics["invalid_moves"] == 0
    seen: list[tuple[int, tuple[bool, ...]]] = []
    act = policy._act

    def watched(telemetry: Any) -> Any:
        action = act(telemetry)
        seen.append((int(action[1]), telemetry.legal_moves[0]))
        return action

    policy._act = watched  # type: ignore[method-assign]
    simulate(SHORT, policy, seed=0, engine="simpy")
    assert all(legal[move] for move, legal in seen)
    assert {move for move, _ in seen} > {int(Move.NONE)}


@pytest.mark.parametrize("name", ["sac", "tqc"])
def test_untrained_continuous_actions_cover_the_useful_thresholds(name: AlgorithmName) -> None:
    model = learner(name, "threshold")
    codec = ActionCodec(1, "threshold", "continuous")
    seen = np.random.default_rng(0).random((1000, model.observation_space.shape[0]), dtype=np.float32)  # type: ignore[index]
    actions, _ = model.predict(seen, deterministic=False)
    tokens = np.array([codec.decode(a).clusters[0].threshold_tokens for a in actions])
    assert tokens.min() < 2_000
    assert tokens.max() > 90_000
    ends = (tokens < THRESHOLD_MIN_TOKENS * 1.05) | (tokens > THRESHOLD_MAX_TOKENS / 1.05)
    assert ends.mean() < 0.1
    assert np.median(tokens) == pytest.approx(PAPER_THRESHOLD_TOKENS, rel=0.15)


def test_untrained_discrete_actions_reach_every_threshold() -> None:
    model = learner("ppo", "threshold")
    codec = ActionCodec(1, "threshold", "discrete")
    seen = np.random.default_rng(0).random((4000, model.observation_space.shape[0]), dtype=np.float32)  # type: ignore[index]
    actions, _ = model.predict(seen, deterministic=False)
    assert {float(codec.decode(a).clusters[0].threshold_tokens or 0.0) for a in actions} == set(codec.grid)


@pytest.mark.parametrize(("name", "form"), [("sac", "discrete"), ("ppo", "continuous")])
def test_the_other_form_of_actions_is_refused(name: AlgorithmName, form: Any) -> None:
    env = DummyVecEnv([lambda: gym.make("PrfaaS-v0", scenario=SHORT, action=form, engine="simpy")])
    with pytest.raises(ValueError, match=f"{name} needs the .* action form, found {form}"):
        make_learner(env, ActionCodec(1, "threshold", form), settings_of(name), 0)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="leaves none of 5 quantiles"):
        TqcSettings(n_quantiles=5, top_quantiles_to_drop=5)
    with pytest.raises(ValueError, match="unknown field 'clip_range'"):
        SacSettings.model_validate({"clip_range": 0.1})
    assert SacSettings().keywords()["ent_coef"] == "auto_0.01"
    assert SacSettings(ent_coef=0.2).keywords()["ent_coef"] == 0.2
