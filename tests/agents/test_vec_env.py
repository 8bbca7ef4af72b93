"""The batched envs as one vec env: what the scalar envs play, and Stable-Baselines3 learns on it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

import prfaas_env  # noqa: F401  (registers the env)
from prfaas_agents.vec_env import BatchedVecEnv, envs_per_scenario, make_batched_vec_env
from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.vector import PrfaasVectorEnv

SHORT = load_scenario("paper", overrides=["measure.horizon_s=20.5", "measure.warmup_s=3.2"])
LONGER = load_scenario("drift", overrides=["measure.horizon_s=31"])
KWARGS: dict[str, Any] = {"routing": "margin"}


def dummy(scenario: Scenario, n: int, **kwargs: Any) -> DummyVecEnv:
    """Stable-Baselines3's own vec env of scalar envs."""
    return DummyVecEnv(
        [
            lambda: gym.make("PrfaaS-v0", scenario=scenario, disable_env_checker=True, **kwargs)
            for _ in range(n)
        ]
    )


def random_actions(env: VecEnv, n_steps: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    env.action_space.seed(seed)
    return [np.stack([env.action_space.sample() for _ in range(env.num_envs)]) for _ in range(n_steps)]


def equal(a: Any, b: Any) -> bool:
    """Equality of values that may be arrays or hold some."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return bool(np.array_equal(a, b))


@pytest.mark.parametrize("action", ["discrete", "continuous"])
@pytest.mark.parametrize("reward", ["waiting", "cost", "paired"])
def test_it_plays_what_the_scalar_envs_play(action: str, reward: str) -> None:
    """Three envs over three episodes each: observations, rewards, ends, all infos, masks and episode seeds."""
    kwargs = {**KWARGS, "action": action, "reward": reward, "reference": "static"}
    ours = make_batched_vec_env([SHORT], 3, **kwargs)
    theirs = dummy(SHORT, 3, **kwargs)
    ours.seed(40)
    theirs.seed(40)
    assert np.array_equal(ours.reset(), theirs.reset())
    ends = 0
    for actions in random_actions(ours, 60):
        before = [info["episode_seed"] for info in ours.reset_infos]
        assert before == [info["episode_seed"] for info in theirs.reset_infos]
        if action == "discrete":
            assert np.array_equal(get_action_masks(ours), get_action_masks(theirs))
        observation, reward_, done, infos = ours.step(actions)
        observation_, reward__, done_, infos_ = theirs.step(actions)
        assert np.array_equal(observation, observation_)
        assert np.array_equal(reward_, reward__)
        assert reward_.dtype == reward__.dtype
        assert np.array_equal(done, done_)
        ends += int(done.sum())
        for info, info_ in zip(infos, infos_, strict=True):
            del info_["action_mask"]
            assert equal(info, info_)
    assert ends == 6


def test_short_infos_and_arrays_hold_the_same() -> None:
    """Without `full_infos` a step's info is short, the last one of an episode is whole; `arrays` has it all."""
    full = make_batched_vec_env([SHORT, LONGER], 5, **KWARGS)
    small = make_batched_vec_env([SHORT, LONGER], 5, full_infos=False, **KWARGS)
    for env in (full, small):
        env.seed(1)
        env.reset()
    for actions in random_actions(full, 40):
        *_, done, infos = full.step(actions)
        *_, infos_ = small.step(actions)
        for e in range(5):
            if done[e]:
                assert equal(infos[e], infos_[e])
            else:
                assert infos_[e] == {"TimeLimit.truncated": False}
            for name in (
                "time_s",
                "arrived",
                "open",
                "egress_bits",
                "conversions",
                "invalid_moves",
                "clipped",
            ):
                assert small.arrays[name][e] == infos[e][name]
            for name, term in infos[e]["reward_terms"].items():
                assert small.arrays[f"reward_terms/{name}"][e] == term
    values = dict(zip(small.get_attr("schema")[3].names, small.telemetry_values[3], strict=True))
    reading = small.get_attr("telemetry")[3]
    assert list(values.values()) == reading.values.tolist()


def test_several_scenarios_side_by_side() -> None:
    """Each env plays what it plays in a vec env of its scenario alone."""
    together = make_batched_vec_env([SHORT, LONGER], 5, weights=[2, 3], **KWARGS)
    apart = [make_batched_vec_env([s], n, **KWARGS) for s, n in ((SHORT, 2), (LONGER, 3))]
    together.seed(7)
    apart[0].seed(7)
    apart[1].seed(9)
    assert np.array_equal(together.reset(), np.concatenate([env.reset() for env in apart]))
    names = [s.name for s in together.get_attr("scenario")]
    assert names == ["paper"] * 2 + ["drift"] * 3
    for actions in random_actions(together, 45):
        observation, reward, done, infos = together.step(actions)
        parts = [apart[0].step(actions[:2]), apart[1].step(actions[2:])]
        assert np.array_equal(observation, np.concatenate([p[0] for p in parts]))
        assert np.array_equal(reward, np.concatenate([p[1] for p in parts]))
        assert np.array_equal(done, np.concatenate([p[2] for p in parts]))
        assert equal(dict(enumerate(infos)), dict(enumerate(parts[0][3] + parts[1][3])))
    assert together.arrays["time_s"].tolist() == [3.0, 3.0, 14.0, 14.0, 14.0]


@pytest.mark.parametrize("name", ["two_regions", "shared_prfaas"])
def test_several_sites_play_what_the_scalar_envs_play(name: str) -> None:
    """Spaces, masks, rewards and figures at the end, for two envs over an episode and the start of the next."""
    scenario = load_scenario(name, overrides=["measure.horizon_s=20", "control.conversion_interval_s=5"])
    batched = make_batched_vec_env([scenario], 2, routing="margin")
    scalar = DummyVecEnv(
        [
            lambda: gym.make("PrfaaS-v0", scenario=scenario, routing="margin", disable_env_checker=True)
            for _ in range(2)
        ]
    )
    assert batched.observation_space == scalar.observation_space
    assert batched.action_space == scalar.action_space
    batched.seed(5)
    scalar.seed(5)
    assert np.array_equal(batched.reset(), scalar.reset())
    for actions in random_actions(batched, 25):
        masks = [batched.env_method("action_masks"), scalar.env_method("action_masks")]
        assert np.array_equal(*masks)
        one, other = batched.step(actions), scalar.step(actions)
        for mine, theirs in zip(one[:3], other[:3], strict=True):
            assert np.array_equal(mine, theirs)
        for mine, theirs in zip(one[3], other[3], strict=True):
            assert mine.get("episode_metrics") == theirs.get("episode_metrics")
            assert mine["invalid_moves"] == theirs["invalid_moves"]


@pytest.mark.parametrize(
    ("weights", "n", "expected"),
    [
        ([1], 4, [4]),
        ([1, 1], 8, [4, 4]),
        ([3, 1], 8, [6, 2]),
        ([0.98, 0.01, 0.01], 8, [6, 1, 1]),
        ([1, 2, 1], 3, [1, 1, 1]),
    ],
)
def test_envs_follow_the_weights(weights: list[float], n: int, expected: list[int]) -> None:
    assert envs_per_scenario(weights, n) == expected


def test_seeds_are_drawn_from_the_given_range() -> None:
    """All in range, the same again after the same `seed`, and envs that meet on one seed part again."""

    def played(seed: int) -> list[list[int]]:
        env = make_batched_vec_env([SHORT], 6, seeds=range(50, 54), **KWARGS)
        env.seed(seed)
        env.reset()
        rows = [[info["episode_seed"] for info in env.reset_infos]]
        for actions in random_actions(env, 21 * 6):
            if env.step(actions)[2].any():
                rows.append([info["episode_seed"] for info in env.reset_infos])
        return rows

    first = played(0)
    assert played(0) == first
    assert played(1) != first
    assert set(Counter(seed for row in first for seed in row)) == {50, 51, 52, 53}
    assert len({tuple(column) for column in zip(*first, strict=True)}) == 6


def test_a_reset_without_a_seed_goes_on_drawing() -> None:
    env = make_batched_vec_env([SHORT], 2, **KWARGS)
    env.seed(3)
    env.reset()
    first = [info["episode_seed"] for info in env.reset_infos]
    env.reset()
    second = [info["episode_seed"] for info in env.reset_infos]
    assert first == [3, 4]
    scalar = gym.make("PrfaaS-v0", scenario=SHORT)
    scalar.reset(seed=3)
    assert second[0] == scalar.reset()[1]["episode_seed"]


# ------------------------------------------------------------------ the other methods of a vec env


def test_attributes_and_methods_per_env() -> None:
    env = make_batched_vec_env([SHORT, LONGER], 3, weights=[1, 2], **KWARGS)
    env.reset()
    assert env.render_mode is None
    assert env.has_attr("action_masks")
    assert is_masking_supported(env)
    assert not env.has_attr("no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        env.get_attr("no_such_thing")
    with pytest.raises(AttributeError, match="no_such_method"):
        env.env_method("no_such_method")
    env.set_attr("label", "mine", indices=[1])
    assert env.get_attr("label", indices=1) == ["mine"]
    assert not env.has_attr("label")
    with pytest.raises(AttributeError, match="scenario of a batched env is fixed"):
        env.set_attr("scenario", LONGER)
    assert env.env_is_wrapped(Monitor) == [False] * 3
    assert env.env_is_wrapped(Monitor, indices=[0]) == [False]
    masks = env.env_method("action_masks")
    assert [mask.shape for mask in masks] == [(16,)] * 3
    assert [m.tolist() for m in env.env_method("action_masks", indices=[2])] == [masks[2].tolist()]
    for _ in range(5):
        env.step(np.tile([6, 1], (3, 1)))
    figures = env.env_method("episode_metrics")
    assert [f["requests"]["arrived"] for f in figures] == env.arrays["arrived"].tolist()
    assert env.seed(None) == [None] * 3
    env.set_options({"split": 1})
    with pytest.raises(PrfaasError, match="knows no options"):
        env.reset()


def test_actions_of_a_wrong_shape_are_named() -> None:
    env = make_batched_vec_env([SHORT], 2, **KWARGS)
    env.reset()
    with pytest.raises(ValueError, match="actions for 3 envs, there are 2"):
        env.step(np.ones((3, 2), dtype=np.int64))
    with pytest.raises(ValueError, match=r"actions must have shape \(2, 2\), found \(2, 3\)"):
        env.step(np.ones((2, 3), dtype=np.int64))
    with pytest.raises(RuntimeError, match="call step_async"):
        env.step_wait()


def test_batches_that_do_not_fit_are_named() -> None:
    same = {"scenario": SHORT, "autoreset_mode": "SameStep"}
    one = PrfaasVectorEnv(2, **same)
    with pytest.raises(PrfaasError, match="no batched env was given"):
        BatchedVecEnv([])
    with pytest.raises(PrfaasError, match="given twice"):
        BatchedVecEnv([one, one])
    with pytest.raises(
        PrfaasError, match="scenario paper: autoreset_mode is 'NextStep'; it must be 'SameStep'"
    ):
        BatchedVecEnv(PrfaasVectorEnv(2, scenario=SHORT))
    with pytest.raises(
        PrfaasError,
        match=r"scenario homogeneous observes other things than paper: .*removed: prfaas0\.prefill_queue_requests",
    ):
        BatchedVecEnv([one, PrfaasVectorEnv(1, **{**same, "scenario": "homogeneous"})])
    swapped = load_scenario("two_regions").model_dump(mode="json")
    swapped["deployment"]["links"].reverse()
    with pytest.raises(
        PrfaasError, match=r"observes other .*: link0 joins prfaas1 and pd1, was prfaas0 and pd0"
    ):
        make_batched_vec_env(["two_regions", Scenario.model_validate(swapped)], 2)
    with pytest.raises(PrfaasError, match="scenario paper acts by other things than paper"):
        BatchedVecEnv([one, PrfaasVectorEnv(1, **same, routing="margin")])
    with pytest.raises(PrfaasError, match="at least one seed"):
        BatchedVecEnv(one, seeds=range(0))
    with pytest.raises(PrfaasError, match="1 envs for 2 scenarios"):
        make_batched_vec_env([SHORT, LONGER], 1)
    with pytest.raises(PrfaasError, match="each must be above 0"):
        make_batched_vec_env([SHORT, LONGER], 4, weights=[1, 0])


# ------------------------------------------------------------------ learning


class Watch(BaseCallback):
    """Keeps what a rollout shows."""

    def __init__(self) -> None:
        super().__init__()
        self.invalid = 0
        self.last: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        env = self.training_env.unwrapped
        assert isinstance(env, BatchedVecEnv)
        self.invalid += int(env.arrays["invalid_moves"].sum())
        self.last += [
            info for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True) if done
        ]
        return True


def test_maskable_ppo_learns_on_it_and_never_orders_an_illegal_move() -> None:
    env = make_batched_vec_env([SHORT, LONGER], 4, **KWARGS)
    watch = Watch()
    model = MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.learn(256, callback=watch)
    assert watch.invalid == 0
    assert len(watch.last) >= 4
    assert all(info["conversions"] == info["episode_metrics"]["conversions"] for info in watch.last)


def test_ppo_learns_on_it_behind_a_monitor(tmp_path: Path) -> None:
    """A plain PPO, with an episode file that takes its columns from the last info."""
    env = VecMonitor(
        make_batched_vec_env([SHORT], 4, **KWARGS),
        str(tmp_path / "episodes"),
        info_keywords=("conversions", "invalid_moves"),
    )
    watch = Watch()
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.learn(256, callback=watch)
    assert watch.invalid > 0  # without masks illegal orders happen, so the count above can fail
    assert [info["l"] for info in model.ep_info_buffer] == [21] * 12
    assert all("terminal_observation" in info for info in watch.last)
    env.close()
    rows = (tmp_path / "episodes.monitor.csv").read_text().splitlines()
    assert rows[1] == "r,l,t,conversions,invalid_moves"
    assert len(rows) == 14
    mean, _ = evaluate_policy(model, make_batched_vec_env([SHORT], 2, **KWARGS), 4, warn=False)
    assert mean < 0
