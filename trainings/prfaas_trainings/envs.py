"""Training envs: a mix of scenarios, with the figures that a training logs.

The usual form is one process with many envs stepped in one compiled call (`batched`). The other one is an env per
process or several in this one, on any engine, each of which draws its scenario anew for every episode.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from prfaas_agents.vec_env import BatchedVecEnv, make_batched_vec_env
from prfaas_env import ENV_ID
from prfaas_env.decision import Routing
from prfaas_env.env import PrfaasEnv, RewardName
from prfaas_env.scenarios import Scenario
from prfaas_trainings.config import RewardShape, TrainingConfig
from prfaas_trainings.episodes import figures_of, start_worker

#: Columns of the episode files besides reward, length and time.
EPISODE_COLUMNS = (
    "episode_seed",
    "scenario",
    "ttft_mean_s",
    "ttft_p90_s",
    "goodput_rps",
    "link_utilisation",
    "conversions",
    "invalid_moves",
    "rejected",
)


def episode_columns(metrics: dict[str, Any], episode_seed: int, scenario: str) -> dict[str, Any]:
    """The columns of a finished episode."""
    figures = figures_of(metrics)
    own = {
        "episode_seed": episode_seed,
        "scenario": scenario,
        "link_utilisation": metrics["utilisation"]["link"],
    }
    return {name: own[name] if name in own else figures[name] for name in EPISODE_COLUMNS}


def shaped(rewards: NDArray[Any], shape: RewardShape, factor: float) -> NDArray[Any]:
    """What is learned from, for rewards of any shape; episode files and scalars keep the env's own.

    Args:
        rewards: the env's rewards.
        shape: `plain`, or `log` for sign(r) log(1 + |r|).
        factor: multiplies the shaped reward. 1 - gamma makes a value a discounted mean of rewards, whatever gamma.
    """
    if shape == "log":
        rewards = np.copysign(np.log1p(np.abs(rewards)), rewards)
    return rewards * factor


class ScenarioMix(gym.Env[NDArray[np.float32], NDArray[Any]]):
    """Each episode plays one of several scenarios with a seed from a range.

    `reset(seed=k)` seeds the generator that draws both; later unseeded resets go on drawing from it, so one seeded
    reset makes all later episodes reproducible. The last step's `info` holds `EPISODE_COLUMNS`.
    """

    metadata = PrfaasEnv.metadata

    def __init__(
        self,
        scenarios: tuple[Scenario, ...],
        weights: tuple[float, ...],
        seeds: range,
        *,
        routing: Routing,
        reward: RewardName,
        reference: str,
        engine: str,
    ) -> None:
        self._envs = [
            gym.make(
                ENV_ID,
                disable_env_checker=True,
                scenario=scenario,
                engine=engine,
                routing=routing,
                action="discrete",
                reward=reward,
                reference=reference,
            )
            for scenario in scenarios
        ]
        self._names = [scenario.name for scenario in scenarios]
        self._shares = np.array(weights) / sum(weights)
        self._seeds = seeds
        self._env = self._envs[0]
        self._playing = 0
        self._episode_seed = -1
        self.action_space = self._env.action_space
        self.observation_space = self._env.observation_space

    @property
    def inner(self) -> PrfaasEnv:
        """The env that plays the present episode."""
        env = self._env.unwrapped
        assert isinstance(env, PrfaasEnv)
        return env

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draw a scenario and an episode seed, and start."""
        super().reset(seed=seed)
        self._playing = int(self.np_random.choice(len(self._envs), p=self._shares))
        self._env = self._envs[self._playing]
        self._episode_seed = int(self.np_random.integers(self._seeds.start, self._seeds.stop))
        observation, info = self._env.reset(seed=self._episode_seed)
        return observation, {**info, "scenario": self._names[self._playing]}

    def step(
        self, action: NDArray[Any]
    ) -> tuple[NDArray[np.float32], SupportsFloat, bool, bool, dict[str, Any]]:
        """One decision."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        if terminated or truncated:
            name = self._names[self._playing]
            info.update(episode_columns(info["episode_metrics"], self._episode_seed, name))
        return observation, reward, terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Legal parts of the action now (sb3-contrib's order)."""
        return self.inner.action_masks()

    def episode_metrics(self) -> dict[str, Any]:
        """Figures of the running episode so far."""
        return self.inner.episode_metrics()

    def close(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()


class ShapedReward(gym.RewardWrapper[NDArray[np.float32], NDArray[Any]]):
    """Rewards through `shaped`, for one env."""

    def __init__(self, env: gym.Env[Any, Any], shape: RewardShape, factor: float) -> None:
        super().__init__(env)
        self._shape: RewardShape = shape
        self._factor = factor

    def reward(self, reward: SupportsFloat) -> float:
        """The shaped reward."""
        return float(shaped(np.array(float(reward)), self._shape, self._factor))


@dataclass(frozen=True)
class EnvFactory:
    """Makes one training env; pickles into a worker that starts afresh."""

    index: int
    scenarios: tuple[Scenario, ...]
    weights: tuple[float, ...]
    seeds: range
    routing: Routing
    reward: RewardName
    reference: str
    engine: str
    reward_shape: RewardShape
    reward_factor: float
    episodes_folder: Path | None

    def __call__(self) -> gym.Env[Any, Any]:
        """The env, monitored: one episode file per env, a row per finished episode, flushed at once."""
        if multiprocessing.parent_process() is not None:
            start_worker()
        env = ScenarioMix(
            self.scenarios,
            self.weights,
            self.seeds,
            routing=self.routing,
            reward=self.reward,
            reference=self.reference,
            engine=self.engine,
        )
        file = None if self.episodes_folder is None else str(self.episodes_folder / str(self.index))
        monitored = Monitor(env, file, info_keywords=EPISODE_COLUMNS)
        return ShapedReward(monitored, self.reward_shape, self.reward_factor)


class EpisodeColumns(VecEnvWrapper):
    """Adds `EPISODE_COLUMNS` to the last `info` of each episode of a batched vec env."""

    venv: BatchedVecEnv

    def __init__(self, venv: BatchedVecEnv) -> None:
        super().__init__(venv)
        self._names = [batch.scenario.name for batch in venv.batches for _ in range(batch.num_envs)]
        self._episode_seeds = [-1] * venv.num_envs

    def reset(self) -> VecEnvObs:
        """Start every env."""
        observations = self.venv.reset()
        self._episode_seeds = [int(info["episode_seed"]) for info in self.venv.reset_infos]
        return observations

    def step_wait(self) -> VecEnvStepReturn:
        """One decision of every env."""
        observations, rewards, dones, infos = self.venv.step_wait()
        for e in np.flatnonzero(dones).tolist():
            infos[e].update(
                episode_columns(infos[e]["episode_metrics"], self._episode_seeds[e], self._names[e])
            )
            self._episode_seeds[e] = int(self.venv.reset_infos[e]["episode_seed"])
        return observations, rewards, dones, infos


class ShapedRewards(VecEnvWrapper):
    """Rewards through `shaped`, for a vec env."""

    def __init__(self, venv: VecEnv, shape: RewardShape, factor: float) -> None:
        super().__init__(venv)
        self._shape: RewardShape = shape
        self._factor = factor

    def reset(self) -> VecEnvObs:
        """Start every env."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """One decision of every env."""
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, shaped(rewards, self._shape, self._factor), dones, infos


def make_vec_env(config: TrainingConfig, episodes_folder: Path | None) -> VecEnv:
    """The training envs.

    Batched: a number of envs in proportion to the weights plays each scenario. Otherwise every episode draws its
    scenario by weight; with `processes` each env is in a process of its own that starts afresh ("spawn").

    Args:
        config: the training.
        episodes_folder: folder for the episode files: one per process that writes, a row per finished episode,
            flushed at once. None: no files.
    """
    scenarios = config.at_decision_interval(config.load_scenarios())
    weights = tuple(s.weight for s in config.scenarios)
    factor = 1.0 - config.ppo.gamma
    if config.vectorization == "batched":
        batched = make_batched_vec_env(
            scenarios,
            config.n_envs,
            weights=weights,
            seeds=config.training_seeds.seeds,
            routing=config.routing,
            reward=config.reward,
            reference=config.reference,
        )
        file = None if episodes_folder is None else str(episodes_folder / "0")
        monitored = VecMonitor(EpisodeColumns(batched), file, info_keywords=EPISODE_COLUMNS)
        return ShapedRewards(monitored, config.reward_shape, factor)
    factories = [
        EnvFactory(
            index=k,
            scenarios=scenarios,
            weights=weights,
            seeds=config.training_seeds.seeds,
            routing=config.routing,
            reward=config.reward,
            reference=config.reference,
            engine=config.engine,
            reward_shape=config.reward_shape,
            reward_factor=factor,
            episodes_folder=episodes_folder,
        )
        for k in range(config.n_envs)
    ]
    if config.vectorization == "none":
        return DummyVecEnv(list(factories))
    return SubprocVecEnv(list(factories), start_method="spawn")
