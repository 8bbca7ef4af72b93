"""Training envs: a mix of scenarios behind one env, with the figures that a training logs."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor

from prfaas_env import ENV_ID
from prfaas_env.decision import Routing
from prfaas_env.env import PrfaasEnv, RewardName
from prfaas_env.scenarios import Scenario
from prfaas_trainings.config import RewardShape
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


class ScenarioMix(gym.Env[NDArray[np.float32], NDArray[Any]]):
    """Each episode plays one of several scenarios with a seed from a range.

    `reset(seed=k)` seeds the generator that draws both; later unseeded resets go on drawing from it, so one seeded
    reset makes all later episodes reproducible. The last step's `info` holds `EPISODE_COLUMNS`; every step's
    holds `prefill_instances` (all PD clusters).
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
        info["prefill_instances"] = sum(pd.prefill_instances for pd in self.inner.telemetry.pd)
        if terminated or truncated:
            metrics = info["episode_metrics"]
            figures = figures_of(metrics)
            own = {
                "episode_seed": self._episode_seed,
                "scenario": self._names[self._playing],
                "link_utilisation": metrics["utilisation"]["link"],
            }
            info.update({name: own[name] if name in own else figures[name] for name in EPISODE_COLUMNS})
        return observation, reward, terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Legal parts of the action now (sb3-contrib's order)."""
        return self.inner.action_masks()

    def running_figures(self) -> dict[str, float | None]:
        """Figures of the episode so far."""
        return figures_of(self.inner.episode_metrics())

    def close(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()


class ShapedReward(gym.RewardWrapper[NDArray[np.float32], NDArray[Any]]):
    """The reward that is learned from; episode files and scalars keep the env's own.

    Args:
        env: the env.
        shape: `plain`, or `log` for sign(r) log(1 + |r|).
        factor: multiplies the shaped reward. 1 - gamma makes a value a discounted mean of rewards, whatever gamma.
    """

    def __init__(self, env: gym.Env[Any, Any], shape: RewardShape, factor: float) -> None:
        super().__init__(env)
        self._log = shape == "log"
        self._factor = factor

    def reward(self, reward: SupportsFloat) -> float:
        """The shaped reward."""
        value = float(reward)
        if self._log:
            value = math.copysign(math.log1p(abs(value)), value)
        return value * self._factor


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
