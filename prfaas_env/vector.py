"""The batched environment: many copies of `PrfaaS-v0` stepped in one compiled call.

`gym.make_vec("PrfaaS-v0", num_envs=N, vectorization_mode="vector_entry_point")`. Each copy plays exactly what the
scalar env plays with the same seed and actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from prfaas_env.base import PrfaasError
from prfaas_env.decision import ActionForm, Routing
from prfaas_env.env import TRAINING_SEEDS, PrfaasEnv, RewardName
from prfaas_env.policy import Policy, PolicyContext, make_policy
from prfaas_env.rewards import reward_terms
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator import kernel
from prfaas_env.simulator import layout as L
from prfaas_env.simulator.compiled_engine import (
    StateView,
    bigger,
    compiled_kernel,
    first_open,
    load_world,
    moved,
    recent_lengths,
    request_rows,
    totals_of,
)
from prfaas_env.simulator.formulas import FloatArray, IntArray, ns_from_s
from prfaas_env.simulator.layout import RECORD_COLUMNS, Layout, Sizes, initial_sizes
from prfaas_env.simulator.metrics import episode_metrics
from prfaas_env.simulator.prefix_pool import start_pools
from prfaas_env.simulator.records import RequestRecords, Totals, prefix_info
from prfaas_env.simulator.world import World, draw_world, scenario_schema
from prfaas_env.telemetry import Telemetry

#: From this many envs on a second thread pays for itself.
THREADS_FROM = 32

BoolArray = NDArray[np.bool_]


class Batch:
    """States of n compiled engines of one scenario, stepped together.

    Args:
        scenario: the scenario.
        n: number of states.
        threads: False: never step in two threads.
    """

    def __init__(self, scenario: Scenario, n: int, threads: bool = True) -> None:
        self.scenario = scenario
        self.n = n
        self.schema = scenario_schema(scenario)
        self._functions = compiled_kernel()
        self.worlds: list[World | None] = [None] * n
        self._set_layout(Layout(scenario, initial_sizes(scenario, 1)))
        fields, n_pd, n_link = len(self.schema), self.layout.n_pd, self.layout.n_link
        self.ints = np.zeros((n, self.layout.n_int), dtype=np.int64)
        self.reals = np.zeros((n, self.layout.n_real))
        self.requests = np.zeros((n, 1, L.W_P), dtype=np.int64)
        self.caches = np.zeros((n, 1), dtype=np.int64)
        self.values = np.zeros((n, fields))
        self.observation = np.zeros((n, fields), dtype=np.float32)
        self.legal = np.zeros((n, 3 * n_pd), dtype=np.int64)
        self.whole = np.zeros((n, kernel.N_ALL_TOTALS), dtype=np.int64)
        self.real = np.zeros((n, 2 * n_link))
        self.clipped = np.zeros(n, dtype=np.int64)
        self._status = np.zeros(n, dtype=np.int64)
        self._scarce = np.zeros((n, n_pd), dtype=np.int64)
        self._first_open = [0] * n
        self._pool = ThreadPoolExecutor(2) if threads and n >= THREADS_FROM else None

    def _set_layout(self, layout: Layout) -> None:
        self.layout = layout
        self._start = layout.start()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    # ------------------------------------------------------------------ state

    def load(self, e: int, world: World) -> None:
        """Put env e at the start of a world."""
        changes = max((len(trace.time_ns) for trace in world.links), default=0)
        if changes > self.layout.sizes.changes:
            old = self.layout.sizes
            self.make_room(replace(old, changes=max(changes, 2 * old.changes)))
        if len(world.faults) > self.layout.sizes.faults:
            self.make_room(replace(self.layout.sizes, faults=2 * len(world.faults)))
        rows = request_rows(world)
        caches = start_pools(world)
        self.make_rows(len(rows), len(caches))
        self.caches[e, : len(caches)] = caches
        self.worlds[e] = world
        self._first_open[e] = 0
        self.ints[e], self.reals[e] = self._start
        self.requests[e, : len(rows)] = rows
        load_world(world, self.layout, self.ints[e], self.reals[e])
        self._functions["begin"](self.ints[e], self.requests[e])

    def make_rows(self, requests: int, caches: int) -> None:
        """Have room for this many rows of requests, and numbers of prefix pools, in each state."""
        if requests > self.requests.shape[1]:
            wider = np.zeros((self.n, requests + requests // 8, L.W_P), dtype=np.int64)
            wider[:, : self.requests.shape[1]] = self.requests
            self.requests = wider
        if caches > self.caches.shape[1]:
            more = np.zeros((self.n, caches + caches // 8), dtype=np.int64)
            more[:, : self.caches.shape[1]] = self.caches
            self.caches = more

    def view(self, e: int) -> StateView:
        """The running state of env e, for branches (see `prfaas_env.branches`)."""
        world = self.worlds[e]
        assert world is not None
        state = (self.ints[e], self.reals[e], self.requests[e], self.caches[e])
        self._first_open[e] = first_open(state[0], state[2], self._first_open[e])
        return StateView(world, self.layout, *state, self._first_open[e])

    def make_room(self, sizes: Sizes) -> None:
        """Have arrays of these capacities, none below the present one; states stay as they are."""
        old = self.layout
        if sizes == old.sizes:
            return
        new = Layout(self.scenario, sizes)
        ints = np.zeros((self.n, new.n_int), dtype=np.int64)
        reals = np.zeros((self.n, new.n_real))
        for e in range(self.n):
            if self.worlds[e] is not None:
                ints[e], reals[e] = moved(old, new, self.ints[e], self.reals[e])
        self.ints, self.reals = ints, reals
        self._set_layout(new)

    # ------------------------------------------------------------------ stepping

    def step(
        self,
        task: IntArray,
        until_ns: IntArray,
        by_margin: bool,
        value: FloatArray,
        move: IntArray,
        abundant: IntArray | None = None,
    ) -> None:
        """`kernel.step_many` on all envs, in two threads where they help; arrays grow as needed.

        The cache rule is scarce unless `abundant` says otherwise: it is not in the action space.
        """
        if abundant is None:
            abundant = self._scarce
        room = self.layout.n_pd + 1
        if self.ints[:, L.HEAP_N].max() + room > self.layout.sizes.heap and task.any():
            self._grow(kernel.GROW_HEAP)
        task = task.copy()
        while True:
            self._status[:] = kernel.RAN
            cuts = [0, self.n] if self._pool is None else [0, self.n // 2, self.n]
            state = (self.ints, self.reals, self.caches, self.requests)
            orders = (task, until_ns, int(by_margin), value, move, abundant, self.schema.scales)
            results = (self.values, self.observation, self.legal, self.whole, self.real, self.clipped)
            calls = [(*state, a, b, *orders, *results, self._status) for a, b in pairwise(cuts)]
            if self._pool is None:
                self._functions["step_many"](*calls[0])
            else:
                other = self._pool.submit(self._functions["step_many"], *calls[1])
                self._functions["step_many"](*calls[0])
                other.result()
            if not self._status.any():
                return
            short = self._status != kernel.RAN
            for status in np.unique(self._status[short]).tolist():
                self._grow(status)
            task = np.where(short, kernel.RUN_ON, kernel.SKIP)

    def _grow(self, status: int) -> None:
        self.make_room(bigger(self.layout.sizes, status))

    # ------------------------------------------------------------------ readings

    def totals(self) -> Totals:
        """`Totals` whose numbers are arrays over the envs, as of the last step."""
        return totals_of([*self.whole.T.copy()], [*self.real.T.copy()], self.layout.n_link)

    def totals_of(self, e: int) -> Totals:
        """`Totals` of one env, as of the last step."""
        return totals_of(self.whole[e].tolist(), self.real[e].tolist(), self.layout.n_link)

    def telemetry_of(self, e: int) -> Telemetry:
        """The reading of one env (for policies; the batch itself needs none)."""
        now = int(self.ints[e, L.NOW])
        flags = self.legal[e].astype(bool).tolist()
        return Telemetry(
            self.schema,
            now,
            self.values[e].copy(),
            conversion_tick=now > 0 and now % int(self.ints[e, L.CONVERSION_NS]) == 0,
            legal_moves=tuple((flags[k], flags[k + 1], flags[k + 2]) for k in range(0, len(flags), 3)),
            recent_lengths_tokens=tuple(recent_lengths(self.ints[e], pd) for pd in range(self.layout.n_pd)),
        )

    def metrics_of(self, e: int, start: Totals) -> dict[str, Any]:
        """`info["episode_metrics"]` of one env."""
        world = self.worlds[e]
        assert world is not None
        n = len(world.requests)
        records = RequestRecords(**{name: self.requests[e, :n, k] for name, k in RECORD_COLUMNS.items()})
        return episode_metrics(world, records, start, self.totals_of(e))


@dataclass
class _Reference:
    """The reference policy of `reward="paired"`, on its own states of the same worlds."""

    batch: Batch
    policies: list[Policy]
    totals: Totals


class PrfaasVectorEnv(VectorEnv[NDArray[np.float32], NDArray[Any], NDArray[Any]]):
    """`PrfaaS-v0` times N in one compiled call; arguments as in `PrfaasEnv`, without rendering.

    `autoreset_mode`: `NEXT_STEP` (default), `SAME_STEP` (the last observation and info are in
    `infos["final_obs"]` and `infos["final_info"]`) or `DISABLED`. Scalars of `info` come as arrays of shape
    (num_envs,), `action_mask` as (num_envs, n). Resets without a seed draw one from `episode_seeds`, the training
    range unless it is set to another.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        *,
        scenario: str | Path | Scenario = "paper",
        engine: str = "compiled",
        routing: Routing = "threshold",
        action: ActionForm = "discrete",
        margins_s: Sequence[float] | None = None,
        reward: RewardName = "waiting",
        reference: str = "earliest_finish",
        render_mode: None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        if engine != "compiled":
            raise PrfaasError(f"engine is {engine!r}; the batched env is of the 'compiled' one")
        if render_mode is not None:
            raise PrfaasError("the batched env does not render; make a scalar env for that")
        if num_envs < 1:
            raise PrfaasError(f"num_envs is {num_envs}; at least 1")
        self.num_envs = num_envs
        self.render_mode = None
        self.scenario = load_scenario(scenario)
        self.schema = scenario_schema(self.scenario)
        self.autoreset_mode = _autoreset_mode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        # the scalar env checks its arguments and declares the spaces
        single = PrfaasEnv(
            self.scenario,
            routing=routing,
            action=action,
            margins_s=margins_s,
            reward=reward,
            reference=reference,
        )
        self.codec = single.codec
        self.single_action_space, self.single_observation_space = (
            single.action_space,
            single.observation_space,
        )
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._terms = reward_terms(reward)
        self._control_ns = ns_from_s(self.scenario.control.control_interval_s)
        self._horizon_ns = ns_from_s(self.scenario.measure.horizon_s)
        self._warmup_ns = ns_from_s(self.scenario.measure.warmup_s)
        self._batch = Batch(self.scenario, num_envs)
        self._reference: _Reference | None = None
        if reward == "paired":
            other = Batch(self.scenario, num_envs)
            policies = [make_policy(reference) for _ in range(num_envs)]
            self._reference = _Reference(other, policies, other.totals())
        self._randoms: list[np.random.Generator | None] = [None] * num_envs
        self._seeds = np.zeros(num_envs, dtype=np.int64)
        self.episode_seeds = range(TRAINING_SEEDS)
        self._tick = np.zeros(num_envs, dtype=np.int64)
        self._cut = np.zeros(num_envs, dtype=np.int64)
        self._clips = np.zeros(num_envs, dtype=np.int64)
        self._starts: list[Totals | None] = [None] * num_envs
        self._warming = np.ones(num_envs, dtype=np.bool_)
        self._ended = np.ones(num_envs, dtype=np.bool_)
        self._values = np.array(self.codec.grid)
        self._totals = self._batch.totals()
        self._decision = (
            np.zeros((num_envs, self.schema.n_pd)),
            np.full((num_envs, self.schema.n_pd), kernel.MOVE_NONE, dtype=np.int64),
        )

    # ------------------------------------------------------------------ Gymnasium

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start every env, or those of `options["reset_mask"]`; env i of an int seed gets `seed + i`.

        `options["first_steps"]`, shape (num_envs,): the episode that starts now is cut off after so many steps, so
        that later ones of different envs end at different times (0: not).
        """
        seeds = self._seed_list(seed)
        mask = np.ones(self.num_envs, dtype=np.bool_)
        options = options or {}
        unknown = set(options) - {"reset_mask", "first_steps"}
        if unknown:
            raise ValueError(f"reset(options=...): unknown {sorted(unknown)}; known: reset_mask, first_steps")
        if "reset_mask" in options:
            mask = np.asarray(options["reset_mask"], dtype=np.bool_)
            if mask.shape != (self.num_envs,) or not mask.any():
                raise ValueError(f"reset_mask must have shape ({self.num_envs},) with at least one True")
        cut = np.asarray(options.get("first_steps", np.zeros(self.num_envs)), dtype=np.int64)
        if cut.shape != (self.num_envs,) or (cut < 0).any():
            raise ValueError(f"first_steps must have shape ({self.num_envs},) and no negative numbers")
        self._reset(np.flatnonzero(mask), seeds)
        self._cut[mask] = cut[mask]
        infos = self._infos(mask)
        infos["episode_seed"] = self._seeds.copy()
        infos["_episode_seed"] = mask
        return self._batch.observation.copy(), infos

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step every env; one that ended is reset now (`NEXT_STEP`) or was reset at once (`SAME_STEP`)."""
        if self._batch.worlds[0] is None:
            raise gym.error.ResetNeeded("call reset() before step()")
        value, move = self._decode(actions)
        renew = self._ended.copy()
        if renew.any() and self.autoreset_mode is AutoresetMode.DISABLED:
            raise gym.error.ResetNeeded(
                f"envs {np.flatnonzero(renew).tolist()} are over: reset them (options reset_mask)"
            )
        live = ~renew
        before = self._totals
        until_ns = np.minimum((self._tick + 1) * self._control_ns, self._horizon_ns)
        self._tick += live
        self._advance(live, until_ns, value, move)
        self._clips += self._batch.clipped * live
        self._totals = self._batch.totals()
        reward, terms = self._reward(live, before, until_ns)
        truncated = live & ((until_ns >= self._horizon_ns) | (self._tick == self._cut))
        self._ended = truncated.copy()
        finals = {int(e): self.episode_metrics_of(int(e)) for e in np.flatnonzero(truncated)}
        infos = self._infos(live)
        _add_terms(infos, terms, live)
        if finals:
            self._add_metrics(infos, finals, truncated)
        if renew.any():
            self._renew(renew, infos)
        if finals and self.autoreset_mode is AutoresetMode.SAME_STEP:
            infos = self._reset_at_once(live, truncated, infos, terms)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        return self._batch.observation.copy(), reward, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads."""
        self._batch.close()
        if self._reference is not None:
            self._reference.batch.close()

    def action_masks(self) -> BoolArray:
        """Legal parts of the discrete action per env, shape (num_envs, n), in sb3-contrib's order."""
        n_grid = len(self.codec.grid)
        n_pd = self.schema.n_pd
        out = np.ones((self.num_envs, n_pd, n_grid + 3), dtype=np.bool_)
        np.not_equal(self._batch.legal.reshape(self.num_envs, n_pd, 3), 0, out=out[:, :, n_grid:])
        return out.reshape(self.num_envs, -1)

    def seed_draws(self, seeds: Sequence[int | None]) -> None:
        """Seed the generators that resets without a seed draw episode seeds from; None leaves one as it is."""
        for e, seed in enumerate(self._seed_list(seeds)):
            if seed is not None:
                self._randoms[e], _ = seeding.np_random(seed)

    def draw_state(self, e: int) -> dict[str, Any]:
        """State of the generator that env e draws episode seeds from; plain numbers and texts.

        Raises:
            ResetNeeded: before the first reset.
        """
        random = self._randoms[e]
        if random is None:
            raise gym.error.ResetNeeded("call reset() first")
        return dict(random.bit_generator.state)

    def set_draw_state(self, e: int, state: Mapping[str, Any]) -> None:
        """Put back what `draw_state` gave: env e goes on drawing from there at its next reset."""
        random, _ = seeding.np_random(0)
        random.bit_generator.state = dict(state)
        self._randoms[e] = random

    @property
    def telemetry_values(self) -> FloatArray:
        """Readings behind the last observations in physical units, shape (num_envs, fields), in schema order."""
        return self._batch.values.copy()

    def world_of(self, e: int) -> World:
        """What env e plays, the future included: for planners and critics, never for a policy."""
        world = self._batch.worlds[e]
        if world is None:
            raise gym.error.ResetNeeded("call reset() first")
        return world

    def telemetry_of(self, e: int) -> Telemetry:
        """The reading behind the last observation of env e."""
        return self._batch.telemetry_of(e)

    def episode_metrics_of(self, e: int) -> dict[str, Any]:
        """The figures of the running episode of env e so far."""
        start = self._starts[e]
        return self._batch.metrics_of(e, start if start is not None else self._batch.totals_of(e))

    # ------------------------------------------------------------------ inside

    def _seed_list(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            seeds: list[int | None] = [int(seed) + e for e in range(self.num_envs)]
        elif isinstance(seed, str) or not isinstance(seed, Sequence | np.ndarray):
            raise ValueError(f"seed is {seed!r}; a whole number, None, or one of these per env")
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} envs")
        for e, each in enumerate(seeds):
            if each is not None and (not isinstance(each, int | np.integer) or each < 0):
                raise ValueError(f"seed of env {e} is {each}; it must be a whole number of at least 0")
        return seeds

    def _reset(self, envs: NDArray[Any], seeds: list[int | None]) -> None:
        for e in envs.tolist():
            seed = seeds[e]
            random = self._randoms[e]
            if seed is not None or random is None:
                random, _ = seeding.np_random(seed)
                self._randoms[e] = random
            drawn = self.episode_seeds
            self._seeds[e] = int(random.integers(drawn.start, drawn.stop)) if seed is None else seed
            world = draw_world(self.scenario, int(self._seeds[e]))
            self._batch.load(e, world)
            if self._reference is not None:
                self._reference.batch.load(e, world)
                policy = self._reference.policies[e]
                policy.reset(PolicyContext(self.scenario, self.schema, 0))
        task = np.zeros(self.num_envs, dtype=np.int64)
        task[envs] = kernel.READ
        nothing = self._decision
        self._batch.step(task, self._tick, False, *nothing)
        if self._reference is not None:
            self._reference.batch.step(task, self._tick, False, *nothing)
            self._reference.totals = self._reference.batch.totals()
        self._totals = self._batch.totals()
        self._tick[envs] = 0
        self._cut[envs] = 0
        self._clips[envs] = self._batch.clipped[envs]
        self._ended[envs] = False
        self._warming[envs] = self._warmup_ns > 0
        for e in envs.tolist():
            self._starts[e] = None if self._warming[e] else self._batch.totals_of(e)

    def _decode(self, actions: NDArray[Any]) -> tuple[FloatArray, IntArray]:
        """(routing values, moves), each of shape (num_envs, n_pd)."""
        array = np.asarray(actions)
        n_pd = self.schema.n_pd
        if array.shape != (self.num_envs, 2 * n_pd):
            raise ValueError(f"actions must have shape ({self.num_envs}, {2 * n_pd}), found {array.shape}")
        first, second = array[:, 0::2], array[:, 1::2]
        if self.codec.form == "discrete":
            n_grid = len(self.codec.grid)
            whole = array.dtype.kind in "iu" or bool((array == np.floor(array)).all())
            if not whole or array.min() < 0 or first.max() >= n_grid or second.max() > 2:
                raise ValueError(f"actions must be whole numbers in 0..{n_grid - 1} and 0..2")
            return self._values[first.astype(np.int64)], second.astype(np.int64)
        decisions = [self.codec.decode(row) for row in array]
        value = [
            [c.margin_s if c.threshold_tokens is None else c.threshold_tokens for c in d.clusters]
            for d in decisions
        ]
        move = [[int(c.move) for c in d.clusters] for d in decisions]
        return np.array(value, dtype=np.float64), np.array(move, dtype=np.int64)

    def _advance(self, live: BoolArray, until_ns: IntArray, value: FloatArray, move: IntArray) -> None:
        """Run the live envs to `until_ns`, with a stop at the end of the warm-up for its totals."""
        by_margin = self.codec.routing == "margin"
        task = np.where(live, kernel.DECIDE, kernel.SKIP)
        crossing = self._warming & live & (until_ns >= self._warmup_ns)
        if crossing.any():
            first_ns = np.where(crossing, self._warmup_ns, until_ns)
            self._batch.step(task, first_ns, by_margin, value, move)
            for e in np.flatnonzero(crossing).tolist():
                self._starts[e] = self._batch.totals_of(e)
            self._warming &= ~crossing
            task = np.where(crossing, kernel.RUN_ON, kernel.SKIP)
        self._batch.step(task, until_ns, by_margin, value, move)

    def _reward(
        self, live: BoolArray, before: Totals, until_ns: IntArray
    ) -> tuple[NDArray[np.float64], dict[str, FloatArray]]:
        with np.errstate(divide="ignore", invalid="ignore"):
            # the same arithmetic as for one env, on totals whose numbers are arrays
            terms: dict[str, Any] = dict(self._terms(self.scenario.reward, before, self._totals))
            if self._reference is not None:
                terms["reference"] = self._step_reference(live, until_ns)
        arrays = terms if live.all() else {name: np.where(live, term, 0.0) for name, term in terms.items()}
        columns = list(arrays.values())
        if len(columns) == 1:
            return columns[0].copy(), arrays
        if len(columns) == 2:
            return columns[0] + columns[1], arrays
        rows = np.stack(columns, axis=1).tolist()
        return np.array([math.fsum(row) for row in rows]), arrays

    def _step_reference(self, live: BoolArray, until_ns: IntArray) -> FloatArray:
        """Step the reference policy on the same arrivals; minus its own reward, shape (num_envs,)."""
        reference = self._reference
        assert reference is not None
        value, move = np.zeros_like(self._decision[0]), self._decision[1].copy()
        abundant = np.zeros_like(move)
        by_margin = False
        for e in np.flatnonzero(live).tolist():
            decision = reference.policies[e].decide(reference.batch.telemetry_of(e))
            for pd, cluster in enumerate(decision.clusters):
                by_margin = cluster.threshold_tokens is None
                chosen = cluster.margin_s if by_margin else cluster.threshold_tokens
                value[e, pd] = chosen if chosen is not None else 0.0
                move[e, pd] = int(cluster.move)
                abundant[e, pd] = int(cluster.cache_rule == "abundant")
        before = reference.totals
        task = np.where(live, kernel.DECIDE, kernel.SKIP)
        reference.batch.step(task, until_ns, by_margin, value, move, abundant)
        reference.totals = reference.batch.totals()
        terms = self._terms(self.scenario.reward, before, reference.totals)
        out: FloatArray = -np.sum(np.array(list(terms.values())), axis=0)
        return out

    def _infos(self, mask: BoolArray) -> dict[str, Any]:
        t = self._totals
        figures: dict[str, Any] = {
            "time_s": t.time_ns / 1e9,
            "arrived": t.arrived,
            "finished": t.finished,
            "open": t.arrived - t.finished - t.rejected - t.aborted,
            "rejected": t.rejected,
            "aborted": t.aborted,
            "remote": t.remote,
            "conversions": t.conversions,
            "invalid_moves": t.invalid_moves,
            "egress_bits": sum(t.egress_bits, start=np.zeros(self.num_envs)),
            **(prefix_info(t) if self.scenario.prefix_pool is not None else {}),
            "clipped": self._clips.copy(),
            "action_mask": self.action_masks(),
        }
        return {**figures, **{f"_{name}": mask for name in figures}}

    def _add_metrics(
        self, infos: dict[str, Any], finals: dict[int, dict[str, Any]], truncated: BoolArray
    ) -> None:
        metrics = np.full(self.num_envs, None, dtype=object)
        for e, figures in finals.items():
            metrics[e] = figures
        infos["episode_metrics"] = metrics
        infos["_episode_metrics"] = truncated

    def _renew(self, renew: BoolArray, infos: dict[str, Any]) -> None:
        """Reset the envs that ended in the step before; their infos are those of a reset."""
        self._reset(np.flatnonzero(renew), [None] * self.num_envs)
        for name, values in self._infos(renew).items():
            if not name.startswith("_"):
                infos[name] = np.where(renew[:, None] if np.ndim(values) == 2 else renew, values, infos[name])
                infos[f"_{name}"] = np.ones(self.num_envs, dtype=np.bool_)
        infos["episode_seed"] = self._seeds.copy()
        infos["_episode_seed"] = renew

    def _reset_at_once(
        self, live: BoolArray, truncated: BoolArray, infos: dict[str, Any], terms: dict[str, FloatArray]
    ) -> dict[str, Any]:
        """SAME_STEP: keep the last observation and info, and start the next episode."""
        final_obs = np.full(self.num_envs, None, dtype=object)
        for e in np.flatnonzero(truncated).tolist():
            final_obs[e] = self._batch.observation[e].copy()
        final_info = {
            name: np.copy(values)
            for name, values in infos.items()
            if isinstance(values, np.ndarray) and not name.startswith("_")
        }
        final_info.update({f"_{name}": truncated for name in list(final_info)})
        _add_terms(final_info, terms, truncated)
        self._reset(np.flatnonzero(truncated), [None] * self.num_envs)
        fresh = self._infos(np.ones(self.num_envs, dtype=np.bool_))
        _add_terms(fresh, terms, live & ~truncated)
        fresh["episode_seed"] = self._seeds.copy()
        fresh["_episode_seed"] = truncated
        fresh["final_obs"] = final_obs
        fresh["_final_obs"] = truncated
        fresh["final_info"] = final_info
        fresh["_final_info"] = truncated
        return fresh


def _add_terms(infos: dict[str, Any], terms: dict[str, FloatArray], mask: BoolArray) -> None:
    """Terms of the reward of the envs in `mask`, if there is one."""
    if mask.any():
        infos["reward_terms"] = {**terms, **{f"_{name}": mask for name in terms}}
        infos["_reward_terms"] = mask


def _autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    try:
        return AutoresetMode(mode)
    except ValueError:
        allowed = ", ".join(repr(known.value) for known in AutoresetMode)
        raise PrfaasError(f"autoreset_mode is {mode!r}; allowed: {allowed}") from None
