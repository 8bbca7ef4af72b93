"""One episode's world, drawn before it starts: requests, their PD cluster, link capacity over time.

Nothing in it depends on a policy, so that every policy meets the same world (common random numbers).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas_env.base import stream
from prfaas_env.scenarios.models import Deployment, RegimeCapacity, Scenario, StepCapacity
from prfaas_env.simulator.formulas import FloatArray, IntArray, ns_from_s
from prfaas_env.simulator.prefix_pool import every_blocks
from prfaas_env.telemetry import TelemetrySchema, schema_for
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.regimes import sample_chain
from prfaas_env.workload.requests import RequestTable


@dataclass(frozen=True)
class CapacityTrace:
    """Capacity of one link: `capacity_bps[k]` from `time_ns[k]` on; `time_ns[0]` is 0."""

    time_ns: IntArray
    capacity_bps: FloatArray


@dataclass(frozen=True)
class World:
    """A scenario with everything random drawn.

    `pd_of[i]` is the PD cluster at whose door request i arrives; requests are in order of (arrival, PD cluster,
    drawing), which is the order in which an engine handles them.
    """

    scenario: Scenario
    seed: int
    requests: RequestTable
    pd_of: IntArray
    links: tuple[CapacityTrace, ...]

    @property
    def schema(self) -> TelemetrySchema:
        """Telemetry schema of the topology."""
        return scenario_schema(self.scenario)


def scenario_schema(scenario: Scenario) -> TelemetrySchema:
    """Telemetry schema of a scenario's topology."""
    deployment = scenario.deployment
    return schema_for(len(deployment.pd), len(deployment.prfaas), len(deployment.links))


def links_of(deployment: Deployment, pd: str) -> list[int]:
    """Links of a PD cluster in order of their PrfaaS cluster, so that a tie goes to the lowest one."""
    order = [cluster.name for cluster in deployment.prfaas]
    links = [k for k, link in enumerate(deployment.links) if link.pd == pd]
    return sorted(links, key=lambda k: order.index(deployment.links[k].prfaas))


def _capacity_trace(scenario: Scenario, link: int, seed: int, end_s: float) -> CapacityTrace:
    nominal_bps = scenario.deployment.links[link].capacity_bps
    law = scenario.link_capacity
    if isinstance(law, StepCapacity):
        times_s = np.array(law.at_s)
        values = np.array(law.capacity_bps)
        if times_s[0] > 0:
            times_s = np.concatenate(([0.0], times_s))
            values = np.concatenate(([nominal_bps], values))
    elif isinstance(law, RegimeCapacity):
        times_s, values = sample_chain(law.capacity_bps, end_s, stream(seed, "link", link))
    else:
        times_s, values = np.zeros(1), np.full(1, nominal_bps)
    time_ns = np.array([ns_from_s(float(t)) for t in times_s], dtype=np.int64)
    return CapacityTrace(time_ns, np.asarray(values, dtype=np.float64))


def _assign_pd(scenario: Scenario, n: int, seed: int) -> IntArray:
    clusters = scenario.deployment.pd
    if len(clusters) == 1:
        return np.zeros(n, dtype=np.int64)
    weights = np.array([c.arrival_share for c in clusters])
    edges = np.cumsum(weights / weights.sum())
    draws = stream(seed, "arrivals", 1).random(n)
    return np.minimum(np.searchsorted(edges, draws, side="right"), len(clusters) - 1).astype(np.int64)


def draw_world(
    scenario: Scenario,
    seed: int,
    *,
    n_requests: int | None = None,
    horizon_s: float | None = None,
    whole_trace: bool = False,
) -> World:
    """Draw an episode.

    Args:
        scenario: what to draw.
        seed: episode seed; the same seed gives the same world.
        n_requests: exactly this many arrivals, however long they take (a trace gives at most what it holds).
        horizon_s: arrivals in [0, horizon_s); default the scenario's horizon unless `n_requests` is given.
        whole_trace: no limit at all (for a trace workload: its whole slice).

    Raises:
        PrfaasError: the workload cannot be drawn or read, or its blocks do not suit the prefix pool.
    """
    if n_requests is None and horizon_s is None and not whole_trace:
        horizon_s = scenario.measure.horizon_s
    table = generate_requests(scenario.workload, seed=seed, horizon_s=horizon_s, n_requests=n_requests)
    every_blocks(scenario, table.block_tokens)  # only here the size of a block is known
    pd_of = _assign_pd(scenario, len(table), seed)
    order = np.lexsort((pd_of, table.arrival_ns))
    if not np.array_equal(order, np.arange(len(table))):
        table, pd_of = table.take(order), pd_of[order]
    last_s = float(table.arrival_ns[-1]) / 1e9 if len(table) else 0.0
    end_s = max(scenario.measure.horizon_s, horizon_s or 0.0, last_s) + 3600.0
    links = tuple(_capacity_trace(scenario, k, seed, end_s) for k in range(len(scenario.deployment.links)))
    return World(scenario, seed, table, pd_of, links)
