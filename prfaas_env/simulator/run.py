"""Run a policy through an episode: the loop behind `prfaas simulate` and every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas_env.policy import Policy, PolicyContext
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
    start: Totals
    end: Totals
    metrics: dict[str, Any]
    timeline: dict[str, FloatArray] | None


def _timeline_row(engine: Engine, telemetry: Telemetry, world: World) -> tuple[float, ...]:
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


def simulate(
    scenario: Scenario,
    policy: Policy,
    *,
    seed: int,
    engine: str = DEFAULT_ENGINE,
    n_requests: int | None = None,
    duration_s: float | None = None,
    drain: bool = False,
    timeline: bool = False,
    policy_seed: int = 0,
) -> Episode:
    """Run one episode.

    Args:
        scenario: the scenario.
        policy: decides on every tick of the fast clock; a constant policy is asked once.
        seed: episode seed; the world depends on it alone.
        engine: engine name.
        n_requests: this many arrivals, drained to the last finish.
        duration_s: arrivals and run stop here; default the scenario's horizon.
        drain: run to the last finish although a duration is given.
        timeline: keep one row per decision (then constant policies are asked every tick too).
        policy_seed: seed of the policy's own randomness.

    Returns:
        The episode with its metrics.
    """
    world = draw_world(scenario, seed, n_requests=n_requests, horizon_s=duration_s)
    end_s = duration_s if duration_s is not None else scenario.measure.horizon_s
    drained = drain or n_requests is not None
    sim = make_engine(engine, world)
    policy.reset(PolicyContext(scenario, world.schema, policy_seed))
    warmup_ns = ns_from_s(scenario.measure.warmup_s)
    end_ns = NEVER_NS if drained else ns_from_s(end_s)
    control_ns = ns_from_s(scenario.control.control_interval_s)
    start = sim.totals() if warmup_ns == 0 else None
    rows: list[tuple[float, ...]] = []
    tick = 0
    while True:
        telemetry = sim.telemetry()
        sim.apply(policy.decide(telemetry))
        if timeline:
            rows.append(_timeline_row(sim, sim.telemetry(), world))
        tick += 1
        next_ns = end_ns if policy.constant and not timeline else min(tick * control_ns, end_ns)
        if start is None and sim.now_ns < warmup_ns <= next_ns:
            sim.run_until(warmup_ns)
            start = sim.totals()
        if drained:
            sim.run_to_end(next_ns)
            if sim.done:
                break
        if next_ns < NEVER_NS:
            sim.run_until(next_ns)
        if sim.now_ns >= end_ns:
            break
    end = sim.totals()
    if start is None:
        start = end
    metrics = episode_metrics(world, sim.records, start, end, horizon_reached=not drained)
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(TIMELINE))
    lines = {name: columns[:, k] for k, name in enumerate(TIMELINE)} if timeline else None
    return Episode(world, sim.records, start, end, metrics, lines)
