"""Benchmarks of this room for `prfaas bench`."""

from __future__ import annotations

import time
from typing import Any

from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from prfaas_agents.algorithms import make_learner
from prfaas_agents.settings import PpoSettings
from prfaas_agents.vec_env import make_batched_vec_env
from prfaas_env.bench import SEED, Figure, Figures


class TimedSteps(VecEnvWrapper):
    """Adds up the wall time between `step_async` and the end of `step_wait`, resets of ended episodes included."""

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self.steps_s = 0.0
        self._start_s = 0.0

    def reset(self) -> VecEnvObs:
        """Reset every env (not timed)."""
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        """Begin a step."""
        self._start_s = time.perf_counter()
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """End it."""
        result = self.venv.step_wait()
        self.steps_s += time.perf_counter() - self._start_s
        return result


def ppo_figures(n_envs: int, n_steps: int, repeats: int) -> Figures:
    """Share of the simulator in a PPO run: time inside the steps of the envs over the time of learning.

    Args:
        n_envs: envs.
        n_steps: decisions per env between two updates; the rest as in `PpoSettings`.
        repeats: rollouts with their update that are timed, after one that is not.
    """
    envs = make_batched_vec_env(["drift"], n_envs, routing="margin", full_infos=False)
    timed = TimedSteps(envs)
    settings = PpoSettings(n_steps=n_steps, batch_size=min(PpoSettings().batch_size, n_envs * n_steps))
    model = make_learner(timed, envs.batches[0].codec, settings, SEED)
    model.learn(n_envs * n_steps)
    shares, rates = [], []
    for _ in range(repeats):
        timed.steps_s, start_s = 0.0, time.perf_counter()
        model.learn(n_envs * n_steps, reset_num_timesteps=False)
        elapsed_s = time.perf_counter() - start_s
        shares.append(timed.steps_s / elapsed_s)
        rates.append(n_envs * n_steps / elapsed_s)
    timed.close()
    what = f"PPO, {n_envs} envs x {n_steps} decisions per update"
    return {
        "simulator_share": Figure(
            f"{what}: simulator in the wall time", "share", tuple(shares), "median", at_most=0.25
        ),
        "decisions_per_s": Figure(f"{what}: learning", "decisions/s, wall", tuple(rates), "highest"),
    }


def ppo_share(quick: bool) -> Figures:
    """The simulator's share of training PPO."""
    return ppo_figures(4, 16, 1) if quick else ppo_figures(64, 256, 3)
