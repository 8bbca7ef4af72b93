"""Training envs: a mix of scenarios, with the figures that a training logs.

The usual form is one process with many envs stepped in one compiled call (`batched`). The other one is an env per
process or several in this one, on any engine, each of which draws its scenario anew for every episode.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from prfaas_agents.vec_env import BatchedVecEnv, WithForesight, envs_per_scenario, make_batched_vec_env
from prfaas_env import ENV_ID
from prfaas_env.bundle_manifest import grid_of_json
from prfaas_env.decision import N_MOVES, ActionCodec, ActionForm, Routing
from prfaas_env.env import PrfaasEnv, RewardName
from prfaas_env.scenarios import Scenario
from prfaas_trainings.config import Choices, RewardShape, Stage, TrainingConfig
from prfaas_trainings.episodes import figures_of, start_worker
from prfaas_trainings.randomise import Randomise, drawn, group_draws

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
        shape: `plain`, `sqrt` for sign(r) (sqrt(1 + |r|) - 1), or `log` for sign(r) log(1 + |r|).
        factor: multiplies the shaped reward. 1 - gamma makes a value a discounted mean of rewards, whatever gamma.
    """
    if shape == "log":
        rewards = np.copysign(np.log1p(np.abs(rewards)), rewards)
    elif shape == "sqrt":
        rewards = np.copysign(np.sqrt(1.0 + np.abs(rewards)) - 1.0, rewards)
    return rewards * factor


class ScenarioMix(gym.Env[NDArray[np.float32], NDArray[Any]]):
    """Each episode plays one of several scenarios with a seed from a range.

    `reset(seed=k)` seeds the generator that draws both; later unseeded resets go on drawing from it, so one seeded
    reset makes all later episodes reproducible. Fields of `randomise` are drawn for every episode. The last step's
    `info` holds `EPISODE_COLUMNS`.
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
        action: ActionForm = "discrete",
        margins_s: tuple[float, ...] | None = None,
        randomise: Randomise | None = None,
    ) -> None:
        self._make = functools.partial(
            gym.make,
            ENV_ID,
            disable_env_checker=True,
            engine=engine,
            routing=routing,
            action=action,
            margins_s=margins_s,
            reward=reward,
            reference=reference,
        )
        self._scenarios = scenarios
        self._randomise = randomise or {}
        self._envs: list[gym.Env[Any, Any]] = [self._make(scenario=scenario) for scenario in scenarios]
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
        if self._randomise:
            scenario = drawn(self._scenarios[self._playing], self._randomise, self.np_random)
            self._envs[self._playing].close()
            self._envs[self._playing] = self._make(scenario=scenario)
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

    def draw_state(self) -> dict[str, Any]:
        """State of the generator that the next episodes are drawn from."""
        return dict(self.np_random.bit_generator.state)

    def set_draw_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `draw_state` gave; it counts from the next reset on."""
        self.np_random.bit_generator.state = dict(state)

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


class ToldErrors(gym.Wrapper[NDArray[np.float32], NDArray[Any], NDArray[np.float32], NDArray[Any]]):
    """Writes an error of the env to a file and ends the process, so that the parent can tell what happened."""

    def __init__(self, env: gym.Env[Any, Any], file: Path) -> None:
        super().__init__(env)
        self._file = file

    def reset(self, **arguments: Any) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode."""
        with self._told():
            return super().reset(**arguments)

    def step(
        self, action: NDArray[Any]
    ) -> tuple[NDArray[np.float32], SupportsFloat, bool, bool, dict[str, Any]]:
        """One decision."""
        with self._told():
            return super().step(action)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._file.write_text(traceback.format_exc(), encoding="utf-8")
            raise SystemExit(1) from None


def error_file(episodes_folder: Path, index: int) -> Path:
    """Where the worker of env `index` writes the error that it ends with."""
    return episodes_folder / f"worker_{index}.error.txt"


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
    action: ActionForm = "discrete"
    margins_s: tuple[float, ...] | None = None
    randomise: Randomise = field(default_factory=dict)
    file_prefix: str = ""

    def __call__(self) -> gym.Env[Any, Any]:
        """The env, monitored: one episode file per env, a row per finished episode, flushed at once."""
        in_worker = multiprocessing.parent_process() is not None
        if in_worker:
            start_worker()
        env = ScenarioMix(
            self.scenarios,
            self.weights,
            self.seeds,
            routing=self.routing,
            reward=self.reward,
            reference=self.reference,
            engine=self.engine,
            action=self.action,
            margins_s=self.margins_s,
            randomise=self.randomise,
        )
        folder = self.episodes_folder
        file = None if folder is None else str(folder / f"{self.file_prefix}{self.index}")
        made: gym.Env[Any, Any] = Monitor(env, file, info_keywords=EPISODE_COLUMNS)
        made = ShapedReward(made, self.reward_shape, self.reward_factor)
        return made if folder is None or not in_worker else ToldErrors(made, error_file(folder, self.index))


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


def allowed_choices(codec: ActionCodec, choices: Choices) -> NDArray[np.bool_]:
    """Flat mask of the discrete form in sb3-contrib's order, with "no change" alone in what is not learned."""
    neutral = codec.neutral()
    parts: list[NDArray[np.bool_]] = []
    for k in range(codec.n_pd):
        for name, at, n in (("routing", 2 * k, len(codec.grid)), ("moves", 2 * k + 1, N_MOVES)):
            parts.append(
                np.ones(n, dtype=np.bool_) if choices in ("both", name) else np.arange(n) == neutral[at]
            )
    return np.concatenate(parts)


class SomeChoices(VecEnvWrapper):
    """Masks that leave "no change" alone in one part of the actions; see `TrainingConfig.choices`."""

    def __init__(self, venv: VecEnv, codec: ActionCodec, choices: Choices) -> None:
        super().__init__(venv)
        self._allowed = allowed_choices(codec, choices)

    def reset(self) -> VecEnvObs:
        """Start every env."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """One decision of every env."""
        return self.venv.step_wait()

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of the envs; masks are those of the choices."""
        found = self.venv.env_method(method_name, *method_args, indices=indices, **kwargs)
        return [mask & self._allowed for mask in found] if method_name == "action_masks" else found


def make_vec_env(
    config: TrainingConfig, episodes_folder: Path | None, stage: Stage | None = None, file_prefix: str = ""
) -> VecEnv:
    """The training envs.

    Batched: a number of envs in proportion to the weights plays each scenario; fields of `randomise` are drawn once
    for each of `randomise_groups` groups of them. Otherwise every episode draws its scenario by weight and the fields
    anew; with `processes` each env is in a process of its own that starts afresh ("spawn").

    Args:
        config: the training.
        episodes_folder: folder for the episode files: one per process that writes, a row per finished episode,
            flushed at once. None: no files.
        stage: stage of the training, the last one by default.
        file_prefix: begins the names of the episode files.
    """
    stage = config.stages()[-1] if stage is None else stage
    scenarios = config.at_decision_interval(config.stage_scenarios(stage))
    weights = tuple(s.weight for s in stage.scenarios)
    factor = 1.0 - config.settings.gamma
    if config.vectorization == "batched":
        scenarios, weights = _drawn_groups(config, stage, scenarios, weights)
        batched = make_batched_vec_env(
            scenarios,
            config.n_envs,
            weights=weights,
            seeds=config.training_seeds.seeds,
            routing=config.routing,
            action=config.settings.form,
            margins_s=grid_of_json(config.margins_s),
            reward=config.reward,
            reference=config.reference,
            stagger=config.stagger,
        )
        file = None if episodes_folder is None else str(episodes_folder / f"{file_prefix}0")
        monitored = VecMonitor(EpisodeColumns(batched), file, info_keywords=EPISODE_COLUMNS)
        chosen = _chosen(config, stage, ShapedRewards(monitored, config.reward_shape, factor))
        return WithForesight(chosen, batched) if config.foresight else chosen
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
            action=config.settings.form,
            margins_s=grid_of_json(config.margins_s),
            randomise=stage.randomise,
            file_prefix=file_prefix,
        )
        for k in range(config.n_envs)
    ]
    if config.vectorization == "none":
        return _chosen(config, stage, DummyVecEnv(list(factories)))
    return _chosen(config, stage, SubprocVecEnv(list(factories), start_method="spawn"))


def _chosen(config: TrainingConfig, stage: Stage, vec_env: VecEnv) -> VecEnv:
    """The envs with the choices of a stage."""
    return vec_env if stage.choices == "both" else SomeChoices(vec_env, config.codec(), stage.choices)


def _drawn_groups(
    config: TrainingConfig, stage: Stage, scenarios: tuple[Scenario, ...], weights: tuple[float, ...]
) -> tuple[tuple[Scenario, ...], tuple[float, ...]]:
    """Scenarios and weights of a batched training, a scenario per group where fields are drawn."""
    if not stage.randomise:
        return scenarios, weights
    groups, shares = [], []
    counts = envs_per_scenario(weights, config.n_envs)
    for k, (scenario, n_envs) in enumerate(zip(scenarios, counts, strict=True)):
        n = min(n_envs, config.randomise_groups)
        groups += group_draws(scenario, stage.randomise, (config.seed, stage.index, k), n)
        shares += [n_envs / n] * n
    return tuple(groups), tuple(shares)


# ------------------------------------------------------------------ the envs of a training


class TrainingEnvs:
    """The vec env of the present stage of a training, and how it ends.

    Args:
        config: the training.
        episodes_folder: see `make_vec_env`.
        leg: how often the training was resumed before; each leg has episode files of its own.
        steps: steps done before, which say which stage comes first.
    """

    def __init__(self, config: TrainingConfig, episodes_folder: Path, leg: int, steps: int) -> None:
        self._config = config
        self._folder = episodes_folder
        self._leg = leg
        self.stage = config.stage_at(steps)
        self.vec_env = self._made()

    def _made(self) -> VecEnv:
        stage = self.stage
        parts = [f"resumed{self._leg}-"] if self._leg else []
        parts += [f"stage{stage.index}-"] if self._config.curriculum else []
        return make_vec_env(self._config, self._folder, stage, "".join(parts))

    def enter(self, stage: Stage) -> VecEnv:
        """Make the envs of another stage, with seeds of their own; the old ones end."""
        self.vec_env.close()
        self.stage = stage
        self.vec_env = self._made()
        self.seed_stage()
        return self.vec_env

    def seed_stage(self) -> None:
        """Seed the draws of a stage that comes after another one."""
        seeds = np.random.SeedSequence(self._config.seed, spawn_key=(0, self.stage.index))
        self.vec_env.seed(int(seeds.generate_state(1)[0]))

    def draw_states(self) -> list[dict[str, Any]]:
        """States of the generators that episodes are drawn from, one per env."""
        states: list[dict[str, Any]] = self.vec_env.env_method("draw_state")
        return states

    def set_draw_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Put them back; the next reset goes on drawing there."""
        self.vec_env.reset()  # uses up the seeds that the learner has set
        for k, state in enumerate(states):
            self.vec_env.env_method("set_draw_state", state, indices=[k])

    def end(self) -> None:
        """End the workers at once; after a failure the usual way would wait for answers that never come."""
        processes = self._processes()
        if not processes:
            self.vec_env.close()  # nobody to wait for, and the episode files are open here
        for process in processes:
            process.terminate()
            process.join(timeout=10)

    def _processes(self) -> list[Any]:
        return list(getattr(self.vec_env, "processes", []))

    def dead_worker(self) -> str:
        """Which env worker is gone and how it ended."""
        processes = self._processes()
        multiprocessing.connection.wait([process.sentinel for process in processes], timeout=5)
        for k, process in enumerate(processes):
            process.join(timeout=0.2)
            if process.exitcode is None:
                continue
            file = error_file(self._folder, k)
            if file.is_file():
                last = file.read_text(encoding="utf-8").strip().splitlines()[-1]
                return f"env worker {k} ended with {last} (whole text in {file})"
            how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            return f"env worker {k} ended with {how}"
        return "an env worker does not answer"
