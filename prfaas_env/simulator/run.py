"""Run a policy through an episode: the loop behind `prfaas simulate` and every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas_env.policy import Policy, PolicyContext, begin_episode, ticks_between_decisions
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.engine import DEFAULT_ENGINE, Engine, make_engine
from prfaas_env.simulator.formulas import NEVER_NS, FloatArray, ns_from_s
from prfaas_env.simulator.metrics import episode_metrics
from prfaas_env.simulator.records import RequestRecords, Totals
from prfaas_env.simulator.world import World, draw_world
from prfaas_env.telemetry import Telemetry

#: Columns of a timeline, one row per decision.
TIMELINE = (
    "time_s",
    "threshold_tokens",
    "margin_s",
    "prefill_instances",
    "decode_instances",
    "converting_instances",
    "local_queue_requests",
    "remote_queue_requests",
    "decode_queue_requests",
    "link_utilisation_5s",
    "observed_capacity_bps",
    "true_capacity_bps",
)


@dataclass(frozen=True)
class Episode:
    """One finished run. `timeline` maps each name of `TIMELINE` to an array, or is None when not asked for."""

    world: World
    records: RequestRecords
    end: Totals
    metrics: dict[str, Any]
    timeline: dict[str, FloatArray] | None


def _timeline_row(telemetry: Telemetry, world: World) -> tuple[float, ...]:
    """First PD cluster, all PrfaaS clusters and the first link of one reading (true capacity: for plots only)."""
    pd = telemetry.pd[0]
    links = telemetry.link
    capacity = float("nan")
    if links:
        trace = world.links[0]
        k = int(np.searchsorted(trace.time_ns, telemetry.time_ns, side="right")) - 1
        capacity = float(trace.capacity_bps[k])
    return (
        telemetry.time_s,
        pd.threshold_tokens if pd.threshold_valid else float("nan"),
        pd.margin_s if pd.margin_valid else float("nan"),
        pd.prefill_instances,
        pd.decode_instances,
        pd.converting_instances,
        pd.prefill_queue_requests,
        sum(p.prefill_queue_requests for p in telemetry.prfaas),
        pd.decode_queue_requests,
        links[0].utilisation_5s if links else 0.0,
        links[0].observed_capacity_bps if links else float("nan"),
        capacity,
    )


class EpisodeRun:
    """One engine on one world with the totals at the end of the warm-up; `simulate` and the env step it."""

    def __init__(self, world: World, engine: str) -> None:
        self.world = world
        self.engine = make_engine(engine, world)
        self.warmup_ns = ns_from_s(world.scenario.measure.warmup_s)
        self.control_ns = ns_from_s(world.scenario.control.control_interval_s)
        self.start: Totals | None = self.engine.totals() if self.warmup_ns == 0 else None

    def run_until(self, t_ns: int, drain: bool = False) -> None:
        """Run to `t_ns`; with `drain` stop at the last finish if that comes first."""
        if self.start is None and self.engine.now_ns < self.warmup_ns <= t_ns:
            self._run(self.warmup_ns, drain)
            self.start = self.engine.totals()
        self._run(t_ns, drain)

    def _run(self, t_ns: int, drain: bool) -> None:
        if drain:
            self.engine.run_to_end(t_ns)
            if self.engine.done:
                return
        if t_ns < NEVER_NS:
            self.engine.run_until(t_ns)

    def metrics(self, drained: bool = False, records: RequestRecords | None = None) -> dict[str, Any]:
        """The figures of the episode so far; `records` are those of the engine now, if they have been read already."""
        end = self.engine.totals()
        start = self.start if self.start is not None else end
        if records is None:
            records = self.engine.records
        return episode_metrics(self.world, records, start, end, horizon_reached=not drained)


def _is_over(world: World, engine: Engine) -> bool:
    """Whether every request is resolved, or has arrived and waits for a link that stays down for ever."""
    if engine.done:
        return True
    dead = [
        k
        for k, trace in enumerate(world.links)
        if trace.capacity_bps[-1] == 0 and trace.time_ns[-1] < engine.now_ns
    ]
    totals = engine.totals()
    if not dead or totals.arrived < len(world.requests):
        return False
    stuck = sum(engine.telemetry().link[k].open_flows for k in dead)
    return stuck == totals.arrived - totals.finished - totals.rejected - totals.aborted


def simulate(
    scenario: Scenario,
    policy: Policy,
    *,
    seed: int,
    engine: str = DEFAULT_ENGINE,
    n_requests: int | None = None,
    duration_s: float | None = None,
    whole_trace: bool = False,
    timeline: bool = False,
    policy_seed: int = 0,
) -> Episode:
    """Run one episode.

    Args:
        scenario: the scenario.
        policy: decides on every tick of the fast clock; a constant policy is asked once, one with a
            `decision_interval_s` at its multiples (in a drained run or with a timeline on every tick too).
        seed: episode seed; the world depends on it alone.
        engine: engine name.
        n_requests: this many arrivals, drained to the last finish.
        duration_s: arrivals and run stop here; default the scenario's horizon.
        whole_trace: replay the whole slice of a trace workload, drained to the last finish.
        timeline: keep one row per decision (then constant policies are asked every tick too).
        policy_seed: seed of the policy's own randomness.

    Returns:
        The episode with its metrics.
    """
    world = draw_world(scenario, seed, n_requests=n_requests, horizon_s=duration_s, whole_trace=whole_trace)
    return run_world(
        world,
        policy,
        engine=engine,
        end_s=duration_s if duration_s is not None else scenario.measure.horizon_s,
        drain=n_requests is not None or whole_trace,
        timeline=timeline,
        policy_seed=policy_seed,
    )


def run_world(
    world: World,
    policy: Policy,
    *,
    engine: str = DEFAULT_ENGINE,
    end_s: float | None = None,
    drain: bool = False,
    timeline: bool = False,
    policy_seed: int = 0,
    planned: Scenario | None = None,
) -> Episode:
    """Run one episode of a world that is there already, drawn or recorded.

    Args:
        world: requests, links and faults; its scenario gives clusters, clocks and objectives.
        policy: as in `simulate`.
        engine: engine name.
        end_s: the run stops here; default the horizon of the world's scenario. Not with `drain`.
        drain: run to the last finish instead.
        timeline: as in `simulate`.
        policy_seed: seed of the policy's own randomness.
        planned: the scenario that the policy is told of; default that of the world.

    Returns:
        The episode with its metrics.
    """
    scenario = world.scenario
    stop_s = scenario.measure.horizon_s if end_s is None else end_s
    end_ns = NEVER_NS if drain else ns_from_s(stop_s)
    run = EpisodeRun(world, engine)
    context = PolicyContext(scenario if planned is None else planned, world.schema, policy_seed)
    begin_episode(policy, context, run.engine)
    # the end of a drained run is looked for on every tick
    step = 1 if drain or timeline else ticks_between_decisions(policy, scenario.control.control_interval_s)
    rows: list[tuple[float, ...]] = []
    tick = 0
    while True:
        run.engine.apply(policy.decide(run.engine.telemetry()))
        if timeline:
            rows.append(_timeline_row(run.engine.telemetry(), world))
        tick += step
        ask_once = policy.constant and not timeline
        run.run_until(end_ns if ask_once else min(tick * run.control_ns, end_ns), drain)
        if run.engine.now_ns >= end_ns or (drain and (ask_once or _is_over(world, run.engine))):
            break
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(TIMELINE))
    lines = {name: columns[:, k] for k, name in enumerate(TIMELINE)} if timeline else None
    records = run.engine.records
    return Episode(world, records, run.engine.totals(), run.metrics(drain, records), lines)
