"""One episode's world, drawn before it starts: requests, their PD cluster, link capacity over time.

Nothing in it depends on a policy, so that every policy meets the same world (common random numbers).
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from prfaas_env.base import PrfaasError, stream
from prfaas_env.scenarios.models import Deployment, RegimeCapacity, Scenario, StepCapacity, TraceCapacity
from prfaas_env.simulator.faults import (
    FaultTrace,
    draw_faults,
    draw_give_up_ns,
    draw_jitter_ns,
    outage_shares,
)
from prfaas_env.simulator.formulas import MAX_RATE_BPS, FloatArray, IntArray, ns_from_s
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
    drawing), which is the order in which an engine handles them. `give_up_ns[i]` is when its client gives up, None
    where no client does; `jitter_ns[i]` see `faults.draw_jitter_ns`.
    """

    scenario: Scenario
    seed: int
    requests: RequestTable
    pd_of: IntArray
    links: tuple[CapacityTrace, ...]
    faults: FaultTrace = field(default_factory=FaultTrace.none)
    give_up_ns: IntArray | None = None
    jitter_ns: IntArray | None = None

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


def _nominal_trace(scenario: Scenario, link: int, seed: int, end_s: float) -> CapacityTrace:
    """Capacity by the scenario's law alone."""
    nominal_bps = scenario.deployment.links[link].capacity_bps
    law = scenario.link_capacity
    if isinstance(law, RegimeCapacity):
        times_s, values = sample_chain(law.capacity_bps, end_s, stream(seed, "link", link))
    else:
        times_s, values = np.zeros(0), np.zeros(0)
        if isinstance(law, StepCapacity):
            times_s, values = np.array(law.at_s), np.array(law.capacity_bps)
        elif isinstance(law, TraceCapacity):
            times_s, values = read_capacity_file(law.file)
            times_s = times_s / law.speed
        if len(times_s) == 0 or times_s[0] > 0:
            times_s = np.concatenate(([0.0], times_s))
            values = np.concatenate(([nominal_bps], values))
    time_ns = np.array([ns_from_s(float(t)) for t in times_s], dtype=np.int64)
    return CapacityTrace(time_ns, np.asarray(values, dtype=np.float64))


def _capacity_trace(scenario: Scenario, link: int, seed: int, end_s: float) -> CapacityTrace:
    """What the link has for KV caches over time: its capacity, less outages, less other traffic."""
    trace = _nominal_trace(scenario, link, seed, end_s)
    factors: list[tuple[IntArray, FloatArray]] = []
    shares = outage_shares(scenario, link, seed, end_s)
    if shares:
        factors.append((np.array([t for t, _ in shares]), np.array([v for _, v in shares])))
    chain = scenario.transport.background_bps
    background = (np.zeros(0, dtype=np.int64), np.zeros(0))
    if chain is not None:
        times_s, values = sample_chain(chain, end_s, stream(seed, "background", link))
        background = (np.array([ns_from_s(float(t)) for t in times_s], dtype=np.int64), values)
    if not factors and chain is None:
        return trace
    time_ns = np.unique(np.concatenate([trace.time_ns, background[0], *(t for t, _ in factors)]))
    left_bps = _held(trace.time_ns, trace.capacity_bps, time_ns, 0.0)
    for times, values in factors:
        left_bps = left_bps * _held(times, values, time_ns, 1.0)
    left_bps = np.maximum(left_bps - _held(*background, time_ns, 0.0), 0.0)
    changes = np.concatenate(([True], np.diff(left_bps) != 0))
    return CapacityTrace(time_ns[changes], left_bps[changes])


def _held(times: IntArray, values: FloatArray, at: IntArray, before: float) -> FloatArray:
    """Value that holds at each time of `at`: that of the last change, `before` before the first one."""
    out: FloatArray = np.concatenate(([before], values))[np.searchsorted(times, at, side="right")]
    return out


def read_capacity_file(file: str) -> tuple[FloatArray, FloatArray]:
    """Times in s and capacities in bit/s of a recorded capacity, both of shape (n,), n >= 1.

    Raises:
        PrfaasError: no such file, no such column, or a bad line, which is named.
    """
    try:
        with Path(file).open(encoding="utf-8", newline="") as stream_in:
            rows = list(csv.reader(stream_in))
    except (OSError, UnicodeDecodeError) as error:
        raise PrfaasError(f"link_capacity: {file} cannot be read: {error}") from None
    wanted = ["time_s", "capacity_bps"]
    header = [name.strip() for name in rows[0]] if rows else []
    if [name for name in wanted if name not in header]:
        raise PrfaasError(
            f"{file}: line 1: the columns must be {', '.join(wanted)}; found {', '.join(header)}"
        )
    times: list[float] = []
    values: list[float] = []
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        try:
            time_s, bps = (float(row[header.index(name)]) for name in wanted)
        except (ValueError, IndexError):
            raise PrfaasError(f"{file}: line {number}: needs two numbers, found {','.join(row)!r}") from None
        last_s = times[-1] if times else -math.inf
        if not (max(last_s, 0.0) <= time_s < math.inf and time_s != last_s):
            raise PrfaasError(f"{file}: line {number}: time_s must rise from 0 on, found {time_s:g}")
        if not 0 <= bps <= MAX_RATE_BPS:
            raise PrfaasError(
                f"{file}: line {number}: capacity_bps must be within 0 and {MAX_RATE_BPS:g}, found {bps:g}"
            )
        times.append(time_s)
        values.append(bps)
    if not times:
        raise PrfaasError(f"{file}: no rows")
    return np.array(times), np.array(values)


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
    return World(
        scenario,
        seed,
        table,
        pd_of,
        links,
        faults=draw_faults(scenario, seed, end_s),
        give_up_ns=draw_give_up_ns(scenario, table.arrival_ns, seed),
        jitter_ns=draw_jitter_ns(scenario, len(table), seed),
    )
