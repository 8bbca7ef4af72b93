"""`PrfaaS-v0`: the Gymnasium environment around the cluster-and-link model."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from prfaas_env.base import PrfaasError
from prfaas_env.decision import MARGIN_GRID_S, ActionCodec, ActionForm, Decision, Routing
from prfaas_env.policy import Policy, PolicyContext, make_policy, refuse_simulator_only
from prfaas_env.rewards import reward_terms
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import DEFAULT_ENGINE, ENGINES
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.records import Totals, prefix_info
from prfaas_env.simulator.run import EpisodeRun
from prfaas_env.simulator.world import World, draw_world, scenario_schema
from prfaas_env.sites import link_pairs
from prfaas_env.telemetry import Telemetry

#: Episode seeds an unseeded reset may draw: the training range (validation and test seeds lie above it).
TRAINING_SEEDS = 1_000_000

RewardName = Literal["waiting", "goodput", "cost", "paired"]
RenderMode = Literal["rgb_array", "ansi", "human"]


@dataclass(frozen=True)
class EnvSnapshot:
    """Whole state of an env between two steps. Opaque; give it to `restore`."""

    engine: Any
    start: Totals | None
    tick: int
    clipped: int
    reference: Any
    reference_policy: Policy | None
    random_state: dict[str, Any]


class PrfaasEnv(gym.Env[NDArray[np.float32], NDArray[Any]]):
    """
    ## Description
    A Prefill-as-a-Service deployment (PrfaaS-PD, arXiv 2604.15039): a remote cluster of fast accelerators that
    only prefills, a local cluster whose nodes prefill or decode, and an Ethernet link that carries the KV
    caches. Each step the agent says which prompts are prefilled remotely (by a length threshold, or by a margin
    between two predicted first-token times) and may order one local node to change role. Requests queue, are
    prefilled, cross the link (shared exactly, max-min fair) and are decoded; a conversion drains a node and costs
    switching time. The task never ends: it is a continuing one with a time limit.

    ## Action Space
    One pair per PD cluster (N clusters); the parts never constrain each other.

    | `action` | `routing` | space | first part | second part |
    |---|---|---|---|---|
    | `"discrete"` | `"threshold"` | `MultiDiscrete([18, 3] * N)` | 0 tokens, 16 log-spaced values 1,000..131,072 (19,400 among them), infinity | prefill to decode, none, decode to prefill |
    | `"discrete"` | `"margin"` | `MultiDiscrete([13, 3] * N)` | always, -30, -8, -4, -2, -1, 0, 1, 2, 4, 8, 30 s, never; or `margins_s` | the same |
    | `"continuous"` | either | `Box(-1, 1, (2 N,))` | log map to 1,000..131,072 tokens, or symmetric log map to -30..30 s with the ends always and never | thirds |

    A request goes remote when its incremental length exceeds the threshold (at equality it stays local), or when
    its predicted remote first-token time plus the margin is below the predicted local one. Conversions are legal
    at multiples (from the first) of `control.conversion_interval_s` when none is under way and both roles keep
    their minimum; any other order becomes "none" and is counted in `info["invalid_moves"]`. `action_masks()`
    gives the legal parts in sb3-contrib's order; `info["action_mask"]` is the same array.

    ## Observation Space
    `Box(0, 1, (n,), float32)`: every field of `prfaas_env.telemetry` for each PD cluster, each PrfaaS cluster and
    each link, scaled by fixed constants (no running statistics) and clipped to its range; clips are counted in
    `info["clipped"]`. A field that is absent (no request finished yet, say) is 0 and its flag is 0. Nothing in it
    knows the future, the output length of a running request, or the true link capacity. The table of fields with
    units and ranges is in `docs/environment.md`; `env.unwrapped.schema` holds it as data.

    ## Rewards
    | `reward` | per step |
    |---|---|
    | `"waiting"` (default) | minus the mean number of requests waiting for their first token, minus `reject_penalty_s` of waiting per rejected or aborted request, divided by `reward.scale` |
    | `"goodput"` | finished requests per second that met every objective |
    | `"cost"` | `waiting` minus the prices of egress and of conversions |
    | `"paired"` | `waiting` minus the same of the `reference` policy on the same arrivals |

    The reward is the sum of `info["reward_terms"]`. Undiscounted, the sum of `waiting` x control interval x scale
    is the total time to first token, requests still open at their age.

    ## Starting State
    An empty system with the scenario's split. `reset(seed=k)` plays episode k; `reset()` draws an episode seed in
    0..999,999 from `np_random`, so one seeded reset makes all later episodes reproducible. The whole workload is
    drawn at reset: another policy meets the same arrivals.

    ## Episode End
    `terminated` is always False. `truncated` is True at `measure.horizon_s`; the last observation is a normal one
    (bootstrap from it). `info["episode_metrics"]` then holds the figures of `prfaas simulate --json`.

    ## Arguments
    ```python
    gym.make("PrfaaS-v0", scenario="paper", engine="compiled", routing="threshold", action="discrete",
             margins_s=None, reward="waiting", reference="earliest_finish", render_mode=None)
    ```
    `scenario`: a shipped name, a path of a YAML file, or a `Scenario`. `engine`: `"compiled"` or `"simpy"`,
    with the same results. `margins_s`: other margins than those of the table, rising. `reference`: the policy that
    `reward="paired"` compares with. `render_mode`: `None`, `"ansi"`, `"rgb_array"`, `"human"`.

    ## Version History
    * v0: first version.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi", "human"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        scenario: str | Path | Scenario = "paper",
        *,
        engine: str = DEFAULT_ENGINE,
        routing: Routing = "threshold",
        action: ActionForm = "discrete",
        margins_s: Sequence[float] | None = None,
        reward: RewardName = "waiting",
        reference: str = "earliest_finish",
        render_mode: RenderMode | None = None,
    ) -> None:
        _one_of("engine", engine, ENGINES)
        _one_of("routing", routing, ("threshold", "margin"))
        _one_of("action", action, ("discrete", "continuous"))
        _one_of("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        self.scenario = load_scenario(scenario)
        self.schema = scenario_schema(self.scenario)
        try:
            self.codec = ActionCodec(
                self.schema.n_pd, routing, action, MARGIN_GRID_S if margins_s is None else tuple(margins_s)
            )
        except ValueError as error:
            raise PrfaasError(str(error)) from None
        self.action_space = self.codec.space()
        self.observation_space = spaces.Box(0.0, 1.0, shape=(len(self.schema),), dtype=np.float32)
        self.render_mode = render_mode
        self._engine_name = engine
        self._reward_name = reward
        self._terms = reward_terms(reward)
        self._reference_policy: Policy | None = _reference(reference) if reward == "paired" else None
        self._control_ns = ns_from_s(self.scenario.control.control_interval_s)
        self._horizon_ns = ns_from_s(self.scenario.measure.horizon_s)
        self._run: EpisodeRun | None = None
        self._reference: EpisodeRun | None = None
        self._telemetry: Telemetry | None = None
        self._totals: Totals
        self._tick = 0
        self._clipped = 0

    # ------------------------------------------------------------------ Gymnasium

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode: number `seed`, or one drawn from `np_random` in the training range.

        There are no `options`; a key in them raises PrfaasError.
        """
        if options:
            raise PrfaasError(f"reset() knows no options, found {', '.join(map(repr, options))}")
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(TRAINING_SEEDS)) if seed is None else seed
        world = draw_world(self.scenario, episode_seed)
        self._start(world)
        if self._reference_policy is not None:
            self._reference = EpisodeRun(world, self._engine_name)
            self._reference_policy.reset(PolicyContext(self.scenario, self.schema, 0))
        observation = self._observe()
        info = self._info()
        info["episode_seed"] = episode_seed
        return observation, info

    def step(
        self, action: NDArray[Any]
    ) -> tuple[NDArray[np.float32], SupportsFloat, bool, bool, dict[str, Any]]:
        """Put a decision in force and run to the next tick of the fast clock."""
        return self.step_decision(self.codec.decode(action))

    def step_decision(
        self, decision: Decision
    ) -> tuple[NDArray[np.float32], SupportsFloat, bool, bool, dict[str, Any]]:
        """`step` with a `Decision` of any value (rules and planners are not bound to the action grid)."""
        run = self._running()
        if run.engine.now_ns >= self._horizon_ns:
            raise gym.error.ResetNeeded("the episode is over: call reset() before step()")
        before = self._totals
        run.engine.apply(decision)
        self._tick += 1
        next_ns = min(self._tick * self._control_ns, self._horizon_ns)
        run.run_until(next_ns)
        after = self._totals = run.engine.totals()
        terms = self._terms(self.scenario.reward, before, after)
        if self._reference is not None:
            terms["reference"] = self._step_reference(next_ns)
        observation = self._observe()
        truncated = next_ns >= self._horizon_ns
        info = self._info()
        info["reward_terms"] = terms
        if truncated:
            info["episode_metrics"] = self.episode_metrics()
        if self.render_mode == "human":
            self.render()
        return observation, math.fsum(terms.values()), False, truncated, info

    def _step_reference(self, next_ns: int) -> float:
        """Step the reference policy on the same arrivals; minus its own reward."""
        assert self._reference is not None
        assert self._reference_policy is not None
        engine = self._reference.engine
        before = engine.totals()
        engine.apply(self._reference_policy.decide(engine.telemetry()))
        self._reference.run_until(next_ns)
        return -math.fsum(self._terms(self.scenario.reward, before, engine.totals()).values())

    def render(self) -> Any:
        """The present state as text (`ansi`), as a picture (`rgb_array`), or printed (`human`)."""
        from prfaas_env import rendering

        if self.render_mode is None:
            gym.logger.warn(
                "render() was called but no render_mode was given to gym.make: nothing to show. "
                'Try gym.make("PrfaaS-v0", render_mode="ansi").'
            )
            return None
        telemetry = self.telemetry
        pairs = link_pairs(self.scenario.deployment)
        if self.render_mode == "ansi":
            return rendering.text(telemetry, pairs)
        if self.render_mode == "rgb_array":
            return rendering.picture(telemetry, pairs, self.scenario.name)
        rendering.show(telemetry, pairs)
        return None

    # ------------------------------------------------------------------ beyond Gymnasium

    @property
    def telemetry(self) -> Telemetry:
        """The reading behind the last observation."""
        if self._telemetry is None:
            raise gym.error.ResetNeeded("call reset() first")
        return self._telemetry

    def episode_metrics(self) -> dict[str, Any]:
        """The figures of the episode so far: what `info["episode_metrics"]` holds on its last step."""
        return self._running().metrics()

    def action_masks(self) -> NDArray[np.bool_]:
        """Legal parts of the discrete action now, flat, in sb3-contrib's order."""
        return self.codec.masks(self.telemetry.legal_moves)

    def snapshot(self) -> EnvSnapshot:
        """Copy the whole state, that of the reference policy and of the generator included."""
        run = self._running()
        return EnvSnapshot(
            engine=run.engine.snapshot(),
            start=run.start,
            tick=self._tick,
            clipped=self._clipped,
            reference=self._reference.engine.snapshot() if self._reference is not None else None,
            reference_policy=copy.deepcopy(self._reference_policy),
            random_state=copy.deepcopy(dict(self.np_random.bit_generator.state)),
        )

    def restore(self, snapshot: EnvSnapshot) -> NDArray[np.float32]:
        """Return to a snapshot of this env or of an equal one; gives the observation of that moment."""
        self._start(snapshot.engine.world)
        run = self._running()
        run.engine.restore(snapshot.engine)
        run.start = snapshot.start
        self._totals = run.engine.totals()
        if snapshot.reference is not None:
            self._reference = EpisodeRun(snapshot.engine.world, self._engine_name)
            self._reference.engine.restore(snapshot.reference)
            self._reference_policy = copy.deepcopy(snapshot.reference_policy)
        self.np_random.bit_generator.state = copy.deepcopy(snapshot.random_state)
        observation = self._observe()
        self._tick, self._clipped = snapshot.tick, snapshot.clipped
        return observation

    def __getstate__(self) -> dict[str, Any]:
        """Engines run on generators, which do not pickle: a snapshot stands for them."""
        state = self.__dict__.copy()
        state["_pickled"] = self.snapshot() if self._run is not None else None
        state["_run"] = state["_reference"] = state["_telemetry"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        snapshot = state.pop("_pickled")
        self.__dict__.update(state)
        if snapshot is not None:
            self.restore(snapshot)

    # ------------------------------------------------------------------ inside

    def _start(self, world: World) -> None:
        self._run = EpisodeRun(world, self._engine_name)
        self._totals = self._run.engine.totals()
        self._tick = 0
        self._clipped = 0

    def _running(self) -> EpisodeRun:
        if self._run is None:
            raise gym.error.ResetNeeded("call reset() before this")
        return self._run

    def _observe(self) -> NDArray[np.float32]:
        engine = self._running().engine
        self._telemetry = engine.telemetry()
        observation, clipped = engine.encode(self._telemetry)
        self._clipped += clipped
        return observation

    def _info(self) -> dict[str, Any]:
        totals = self._totals
        return {
            "time_s": totals.time_ns / 1e9,
            "arrived": totals.arrived,
            "finished": totals.finished,
            "open": totals.arrived - totals.finished - totals.rejected - totals.aborted,
            "rejected": totals.rejected,
            "aborted": totals.aborted,
            "remote": totals.remote,
            "conversions": totals.conversions,
            "invalid_moves": totals.invalid_moves,
            "egress_bits": sum(totals.egress_bits),
            **(prefix_info(totals) if self.scenario.prefix_pool is not None else {}),
            "clipped": self._clipped,
            "action_mask": self.action_masks(),
        }


def _reference(spec: str) -> Policy:
    """The reference policy of `reward="paired"`."""
    policy = make_policy(spec)
    refuse_simulator_only(policy, spec, "be the reference of an environment")
    return policy


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise PrfaasError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
