"""`PrfaasVectorEnv` as a Stable-Baselines3 `VecEnv`: many envs in one process, stepped in one compiled call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from prfaas_agents.foresight import Foresight
from prfaas_env.base import PrfaasError
from prfaas_env.decision import ActionCodec
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.formulas import FloatArray
from prfaas_env.sites import link_difference, link_pairs
from prfaas_env.telemetry import Telemetry, TelemetrySchema
from prfaas_env.vector import PrfaasVectorEnv

#: Entries of `info` that stay arrays of the whole batch: a mask per env and step would cost more than the step.
_NOT_PER_ENV = frozenset({"action_mask", "reward_terms", "episode_seed", "final_obs", "final_info"})


class OneOfMany:
    """One env of a batch, as `get_attr` and `env_method` see it."""

    def __init__(self, batch: PrfaasVectorEnv, row: int) -> None:
        self._batch = batch
        self._row = row

    @property
    def render_mode(self) -> None:
        """The batch does not render."""
        return None

    @property
    def spec(self) -> gym.envs.registration.EnvSpec | None:
        """How the batch was made, if by `gym.make_vec`."""
        return self._batch.spec

    @property
    def scenario(self) -> Scenario:
        """The scenario."""
        return self._batch.scenario

    @property
    def schema(self) -> TelemetrySchema:
        """The telemetry behind an observation."""
        return self._batch.schema

    @property
    def codec(self) -> ActionCodec:
        """How actions become decisions."""
        return self._batch.codec

    @property
    def telemetry(self) -> Telemetry:
        """The reading behind the last observation."""
        return self._batch.telemetry_of(self._row)

    def action_masks(self) -> NDArray[np.bool_]:
        """Legal parts of the discrete action now, flat, in sb3-contrib's order."""
        masks: NDArray[np.bool_] = self._batch.action_masks()[self._row]
        return masks

    def episode_metrics(self) -> dict[str, Any]:
        """Figures of the running episode so far, as in `PrfaasEnv`."""
        return self._batch.episode_metrics_of(self._row)

    def draw_state(self) -> dict[str, Any]:
        """State of the generator that the next episode seeds are drawn from."""
        return self._batch.draw_state(self._row)

    def set_draw_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `draw_state` gave; it counts from the next reset on."""
        self._batch.set_draw_state(self._row, state)


class BatchedVecEnv(VecEnv):
    """Envs of one or more batches side by side: those of the first batch come first.

    Plays what `DummyVecEnv` plays with the scalar envs. `infos[i]` holds the scalars of the env's `info` and
    `reward_terms`, at the end of an episode also `episode_metrics`, `terminal_observation` and
    `TimeLimit.truncated` (true: the task never ends). `arrays` holds the same figures of the last step as arrays over
    all envs, nearly for free. `action_masks()` comes through `env_method`, as MaskablePPO of sb3-contrib asks for it.

    Args:
        batches: batched envs in `SAME_STEP` mode with equal observations and actions; their scenarios may differ.
        seeds: episode seeds to draw from. `seed(k)` then seeds the draws. Without it `seed(k)` lets env i play
            episode k + i first, and later seeds come from the training range.
        full_infos: with False `infos` hold figures at the end of an episode only. Dicts for many envs cost about a
            quarter of a step.
        stagger: the first episodes are cut off after different numbers of steps, so that the envs are at different
            times of their episodes from then on.

    Raises:
        PrfaasError: no batch, the same batch twice, another autoreset mode, batches that do not fit together.
    """

    def __init__(
        self,
        batches: PrfaasVectorEnv | Sequence[PrfaasVectorEnv],
        seeds: range | None = None,
        full_infos: bool = True,
        stagger: bool = False,
    ) -> None:
        self._stagger = stagger
        self.batches = [batches] if isinstance(batches, PrfaasVectorEnv) else list(batches)
        _check_fit(self.batches)
        if seeds is not None and (len(seeds) == 0 or seeds.step != 1):
            raise PrfaasError(f"seeds is {seeds}; a range of at least one seed with step 1")
        self.episode_seeds = seeds
        if seeds is not None:
            for batch in self.batches:
                batch.episode_seeds = seeds
        self._full_infos = full_infos
        ends = np.cumsum([batch.num_envs for batch in self.batches]).tolist()
        self._slices = [slice(end - b.num_envs, end) for b, end in zip(self.batches, ends, strict=True)]
        self._envs = [OneOfMany(batch, row) for batch in self.batches for row in range(batch.num_envs)]
        self._actions: NDArray[Any] | None = None
        self.arrays: dict[str, NDArray[Any]] = {}
        first = self.batches[0]
        super().__init__(len(self._envs), first.single_observation_space, first.single_action_space)

    # ------------------------------------------------------------------ stepping

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds for the next reset: `seed + i` for env i, or fresh ones."""
        self._seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        return self._seeds

    def reset(self) -> NDArray[np.float32]:
        """Start every env; shape (num_envs, fields)."""
        if any(self._options):
            raise PrfaasError(f"reset() knows no options, found {self._options}")
        observations, infos = [], []
        for batch, part in zip(self.batches, self._slices, strict=True):
            wanted: list[int | None] = self._seeds[part]
            if self.episode_seeds is not None:
                batch.seed_draws(wanted)
                wanted = [None] * batch.num_envs
            options = {"first_steps": _staggered(batch)} if self._stagger else None
            observation, info = batch.reset(seed=wanted, options=options)
            observations.append(observation)
            infos.append(info)
            self.reset_infos[part] = [{"episode_seed": s} for s in info["episode_seed"].tolist()]
        self._reset_seeds()
        self.arrays = _side_by_side(infos)
        return np.concatenate(observations)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take the actions, shape (num_envs, parts)."""
        self._actions = np.asarray(actions)

    def step_wait(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Step every env; those whose episode ended start the next one."""
        actions = self._actions
        if actions is None:
            raise RuntimeError("call step_async() before step_wait()")
        self._actions = None
        if len(actions) != self.num_envs:
            raise ValueError(f"actions for {len(actions)} envs, there are {self.num_envs}")
        observations, rewards, dones, infos, found = [], [], [], [], []
        for batch, part in zip(self.batches, self._slices, strict=True):
            observation, reward, _, truncated, info = batch.step(actions[part])
            observations.append(observation)
            rewards.append(reward)
            dones.append(truncated)
            rows: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(batch.num_envs)]
            if self._full_infos:
                _add_figures(rows, info)
            for e in np.flatnonzero(truncated).tolist():
                rows[e] = _last_row(info, e)
                self.reset_infos[part.start + e] = {"episode_seed": int(info["episode_seed"][e])}
            infos += rows
            found.append(info)
        self.arrays = _side_by_side(found)
        return (
            np.concatenate(observations),
            np.concatenate(rewards).astype(np.float32),
            np.concatenate(dones),
            infos,
        )

    def close(self) -> None:
        """Close the batches."""
        for batch in self.batches:
            batch.close()

    @property
    def telemetry_values(self) -> FloatArray:
        """Readings behind the last observations in physical units, shape (num_envs, fields); names in `schema`."""
        return np.concatenate([batch.telemetry_values for batch in self.batches])

    # ------------------------------------------------------------------ single envs

    def has_attr(self, attr_name: str) -> bool:
        """Whether an env has such an attribute (nothing is computed)."""
        return all(hasattr(type(env), attr_name) or attr_name in vars(env) for env in self._envs)

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of `OneOfMany`, or one put there by `set_attr`, per env."""
        return [getattr(self._envs[i], attr_name) for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Put a value of your own beside each env; what the env itself consists of is fixed.

        Raises:
            AttributeError: a name that the env has.
        """
        if attr_name.startswith("_") or hasattr(OneOfMany, attr_name):
            raise AttributeError(f"{attr_name} of a batched env is fixed: make another env for another value")
        for i in self._get_indices(indices):
            setattr(self._envs[i], attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of `OneOfMany` per env; `action_masks` of all envs is one call per batch."""
        chosen = list(self._get_indices(indices))
        if method_name == "action_masks":
            masks = np.concatenate([batch.action_masks() for batch in self.batches])
            return list(masks[chosen])
        return [getattr(self._envs[i], method_name)(*method_args, **method_kwargs) for i in chosen]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None
    ) -> list[bool]:
        """Never: there are no env objects that could be."""
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[None]:
        """No pictures."""
        return [None] * self.num_envs


def _staggered(batch: PrfaasVectorEnv) -> NDArray[np.int64]:
    """Steps of the first episode of each env, shape (num_envs,): evenly from a whole one down."""
    scenario = batch.scenario
    steps = math.ceil(scenario.measure.horizon_s / scenario.control.control_interval_s)
    return steps - np.arange(batch.num_envs, dtype=np.int64) * steps // batch.num_envs


class WithForesight(VecEnvWrapper):
    """Observations of a batched vec env with the work to come beside them: columns for a critic alone.

    Args:
        venv: the envs, perhaps wrapped.
        batched: the batched vec env inside.
    """

    def __init__(self, venv: VecEnv, batched: BatchedVecEnv) -> None:
        seen = venv.observation_space
        assert isinstance(seen, gym.spaces.Box)
        self._batches = batched.batches
        self._sights = [Foresight(b.scenario, b.scenario.control.control_interval_s) for b in self._batches]
        wide = np.full(self._sights[0].n_fields, np.inf, dtype=np.float32)
        space = gym.spaces.Box(
            np.concatenate([seen.low, -wide]), np.concatenate([seen.high, wide]), dtype=np.float32
        )
        super().__init__(venv, observation_space=space)
        self._tables: list[FloatArray] = []
        self._steps = [np.zeros(b.num_envs, dtype=np.int64) for b in self._batches]

    def reset(self) -> VecEnvObs:
        """Start every env."""
        observations = self.venv.reset()
        self._tables = [
            np.stack([sight.table(batch.world_of(e)) for e in range(batch.num_envs)])
            for sight, batch in zip(self._sights, self._batches, strict=True)
        ]
        for steps in self._steps:
            steps[:] = 0
        return self._beside(observations)

    def step_wait(self) -> VecEnvStepReturn:
        """One decision of every env."""
        observations, rewards, dones, infos = self.venv.step_wait()
        first = 0
        for sight, batch, tables, steps in zip(
            self._sights, self._batches, self._tables, self._steps, strict=True
        ):
            steps += 1
            for e in np.flatnonzero(dones[first : first + batch.num_envs]).tolist():
                info = infos[first + e]
                ahead = sight.rows(tables[e : e + 1], steps[e : e + 1])[0]
                info["terminal_observation"] = np.concatenate([info["terminal_observation"], ahead])
                tables[e] = sight.table(batch.world_of(e))
                steps[e] = 0
            first += batch.num_envs
        return self._beside(observations), rewards, dones, infos

    def _beside(self, observations: Any) -> NDArray[np.float32]:
        ahead = [s.rows(t, k) for s, t, k in zip(self._sights, self._tables, self._steps, strict=True)]
        return np.concatenate([observations, np.concatenate(ahead)], axis=1)


# ------------------------------------------------------------------ infos


def _add_figures(rows: Sequence[dict[str, Any]], info: Mapping[str, Any]) -> None:
    """Put the figures of each env of a batch into its row."""
    names = [name for name in info if not name.startswith("_") and name not in _NOT_PER_ENV]
    columns = [info[name].tolist() for name in names]
    found = _terms_of(info)
    values = [found[name].tolist() for name in found]
    for row, figures, term in zip(rows, zip(*columns, strict=True), zip(*values, strict=True), strict=True):
        row.update(zip(names, figures, strict=True))
        row["reward_terms"] = dict(zip(found, term, strict=True))


def _last_row(info: Mapping[str, Any], e: int) -> dict[str, Any]:
    """`info` of the last step of env e, whose next episode has started."""
    final = info["final_info"]
    row = {
        name: final[name][e].item() if isinstance(final[name][e], np.generic) else final[name][e]
        for name in final
        if not name.startswith("_") and name not in _NOT_PER_ENV
    }
    row["reward_terms"] = {name: term[e].item() for name, term in _terms_of(info).items()}
    row["terminal_observation"] = info["final_obs"][e]
    row["TimeLimit.truncated"] = True
    return row


def _terms_of(info: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Reward terms of the step, those of envs that ended included; none after a reset."""
    terms = info.get("final_info", info).get("reward_terms", {})
    return {name: term for name, term in terms.items() if not name.startswith("_")}


def _side_by_side(infos: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Figures of the step over the envs of all batches, those of `reward_terms` under `reward_terms/NAME`."""
    out = {}
    for name in infos[0]:
        if not name.startswith("_") and name not in _NOT_PER_ENV:
            out[name] = np.concatenate([_of_the_step(info, name) for info in infos])
    terms = [_terms_of(info) for info in infos]
    for name in terms[0]:
        out[f"reward_terms/{name}"] = np.concatenate([found[name] for found in terms])
    return out


def _of_the_step(info: Mapping[str, Any], name: str) -> NDArray[Any]:
    """A figure of each env, the last one where the next episode has started."""
    values: NDArray[Any] = info[name]
    if "final_info" not in info:
        return values
    return np.where(info["_final_info"], info["final_info"][name], values)


# ------------------------------------------------------------------ making


def _check_fit(batches: Sequence[PrfaasVectorEnv]) -> None:
    if not batches:
        raise PrfaasError("no batched env was given")
    if len({id(batch) for batch in batches}) != len(batches):
        raise PrfaasError("the same batched env was given twice")
    first = batches[0]
    for batch in batches:
        if batch.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise PrfaasError(
                f"batched env of scenario {batch.scenario.name}: autoreset_mode is "
                f"{batch.autoreset_mode.value!r}; it must be {AutoresetMode.SAME_STEP.value!r}"
            )
        for what, difference in (
            ("observes", batch.schema.difference(first.schema)),
            ("acts by", "" if batch.codec == first.codec else f"{batch.codec}, not {first.codec}"),
            (
                "observes",
                link_difference(link_pairs(batch.scenario.deployment), link_pairs(first.scenario.deployment)),
            ),
        ):
            if difference:
                raise PrfaasError(
                    f"scenario {batch.scenario.name} {what} other things than {first.scenario.name}: "
                    f"one vec env needs equal observations and actions: {difference}"
                )


def envs_per_scenario(weights: Sequence[float], n_envs: int) -> list[int]:
    """Number of envs for each scenario: nearly in proportion to the weights, at least one each.

    Raises:
        PrfaasError: fewer envs than scenarios, or a weight that is not positive.
    """
    if n_envs < len(weights):
        raise PrfaasError(f"{n_envs} envs for {len(weights)} scenarios; at least one each")
    if not weights or not all(w > 0 and math.isfinite(w) for w in weights):
        raise PrfaasError(f"weights are {list(weights)}; each must be above 0")
    # one each, then one after another to the scenario that is furthest below its share (Sainte-Lague)
    counts = [1] * len(weights)
    for _ in range(n_envs - len(weights)):
        behind = max(range(len(weights)), key=lambda k: weights[k] / (2 * counts[k] + 1))
        counts[behind] += 1
    return counts


def make_batched_vec_env(
    scenarios: Sequence[str | Path | Scenario],
    n_envs: int,
    *,
    weights: Sequence[float] | None = None,
    seeds: range | None = None,
    full_infos: bool = True,
    stagger: bool = False,
    **arguments: Any,
) -> BatchedVecEnv:
    """One vec env that mixes scenarios: a fixed number of envs plays each (`envs_per_scenario`).

    Args:
        scenarios: names, paths or scenarios with equal observations and actions.
        n_envs: envs in all.
        weights: share of envs per scenario, equal by default.
        seeds: see `BatchedVecEnv`.
        full_infos: see `BatchedVecEnv`.
        stagger: see `BatchedVecEnv`.
        arguments: of `PrfaasVectorEnv` (`routing`, `action`, `margins_s`, `reward`, `reference`).
    """
    counts = envs_per_scenario([1.0] * len(scenarios) if weights is None else weights, n_envs)
    batches = [
        PrfaasVectorEnv(n, scenario=scenario, autoreset_mode=AutoresetMode.SAME_STEP, **arguments)
        for n, scenario in zip(counts, scenarios, strict=True)
    ]
    return BatchedVecEnv(batches, seeds, full_infos, stagger)
