"""What goes wrong in one episode, drawn before it starts: by instance and time, never by what a policy does."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from prfaas_env.base import PrfaasError, stream
from prfaas_env.scenarios.faults import RandomOutages
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.formulas import NEVER_NS, FloatArray, IntArray, ns_from_s

#: Most failures or outages of one instance or link; more is a mistake in units.
MAX_SPELLS = 1_000_000
#: (start s, end s, what holds meanwhile).
Spell = tuple[float, float, float]


@dataclass(frozen=True)
class FaultTrace:
    """Speeds of instances over time, in order of (time, cluster, instance); arrays of shape (k,).

    `speed[i]` holds from `time_ns[i]` on for one instance: 0 = down, 1 = full. Clusters count from 0, PrfaaS clusters
    first, then PD clusters.
    """

    time_ns: IntArray
    cluster: IntArray
    instance: IntArray
    speed: FloatArray

    @classmethod
    def none(cls) -> FaultTrace:
        """Nothing goes wrong."""
        return cls.of([])

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, float]]) -> FaultTrace:
        """From rows (time ns, cluster, instance, speed) in any order, one at most per instance and time."""
        ordered = sorted(rows)
        columns = list(zip(*ordered, strict=True)) if ordered else [(), (), (), ()]
        whole = [np.array(column, dtype=np.int64) for column in columns[:3]]
        return cls(whole[0], whole[1], whole[2], np.array(columns[3], dtype=np.float64))

    def __len__(self) -> int:
        return len(self.time_ns)


def random_spells(
    mtbf_s: float, mttr_s: float, value: float, end_s: float, rng: np.random.Generator
) -> list[Spell]:
    """Exponential times between spells and of spells, from time 0 (all is well) to `end_s`."""
    if end_s / (mtbf_s + mttr_s) > MAX_SPELLS:
        raise PrfaasError(
            f"faults: mtbf_s {mtbf_s:g} and mttr_s {mttr_s:g} make about "
            f"{end_s / (mtbf_s + mttr_s):.3g} failures in {end_s:g} s; allowed: {MAX_SPELLS:,}"
        )
    out: list[Spell] = []
    at_s = 0.0
    while True:
        well_s, ill_s = rng.exponential((mtbf_s, mttr_s)).tolist()
        at_s += well_s
        if at_s >= end_s:
            return out
        out.append((at_s, at_s + ill_s, value))
        at_s += ill_s


def least_over_time(spells: Iterable[Spell]) -> list[tuple[int, float]]:
    """(time ns, least value of the spells under way, 1 where there is none) at each change, in order."""
    edges = sorted({ns_from_s(t) for a, b, _ in spells for t in (a, b)})
    starting = sorted((ns_from_s(a), ns_from_s(b), v) for a, b, v in spells)
    under_way: list[tuple[float, int]] = []
    out: list[tuple[int, float]] = []
    last, k = 1.0, 0
    for at_ns in edges:
        while k < len(starting) and starting[k][0] <= at_ns:
            heapq.heappush(under_way, (starting[k][2], starting[k][1]))
            k += 1
        # the least one that still lasts
        while under_way and under_way[0][1] <= at_ns:
            heapq.heappop(under_way)
        value = under_way[0][0] if under_way else 1.0
        if value != last:
            out.append((at_ns, value))
            last = value
    return out


def draw_faults(scenario: Scenario, seed: int, end_s: float) -> FaultTrace:
    """Failures and slow spells of every instance up to `end_s`; where two overlap, the slower one holds."""
    faults = scenario.faults
    if not (faults.random_failures or faults.instance_faults):
        return FaultTrace.none()
    deployment = scenario.deployment
    sizes = [(c.name, c.n_instances) for c in deployment.prfaas]
    sizes += [(c.name, c.n_prefill + c.n_decode) for c in deployment.pd]
    rows: list[tuple[int, int, int, float]] = []
    for cluster, (name, size) in enumerate(sizes):
        for instance in range(size):
            spells = [
                (f.at_s, f.at_s + f.duration_s, f.speed)
                for f in faults.instance_faults
                if f.cluster == name and (not f.instances or instance in f.instances)
            ]
            for n, law in enumerate(faults.random_failures):
                if not law.clusters or name in law.clusters:
                    rng = stream(seed, "faults", 0, n, cluster, instance)
                    spells += random_spells(law.mtbf_s, law.mttr_s, law.speed, end_s, rng)
            rows += [(at_ns, cluster, instance, speed) for at_ns, speed in least_over_time(spells)]
    return FaultTrace.of(rows)


def outage_shares(scenario: Scenario, link: int, seed: int, end_s: float) -> list[tuple[int, float]]:
    """(time ns, share of the capacity that outages leave of a link) at each change; 1 before the first."""
    faults = scenario.faults
    spells: list[Spell] = [
        (o.at_s, o.at_s + o.duration_s, o.share) for o in faults.link_outages if o.link in (None, link)
    ]
    law: RandomOutages | None = faults.random_outages
    if law is not None:
        spells += random_spells(law.mtbf_s, law.mttr_s, law.share, end_s, stream(seed, "faults", 1, link))
    return least_over_time(spells)


def draw_give_up_ns(scenario: Scenario, arrival_ns: IntArray, seed: int) -> IntArray | None:
    """When the client of each request gives up, shape (n,), drawn by request; None if nobody does."""
    mean_s = scenario.faults.cancel_mean_s
    if mean_s is None:
        return None
    patience_s = stream(seed, "faults", 2).exponential(mean_s, len(arrival_ns))
    after_ns = np.rint(np.minimum(patience_s, (NEVER_NS - arrival_ns.max(initial=0)) / 2e9) * 1e9)
    give_up_ns: IntArray = arrival_ns + np.maximum(after_ns, 1.0).astype(np.int64)
    return give_up_ns


def draw_jitter_ns(scenario: Scenario, n: int, seed: int) -> IntArray | None:
    """Extra delay of each request's KV cache for a mean of 1 s, shape (n,), in ns; None where no link has jitter.

    A link scales it by its own mean, so that a request meets the same luck on every path.
    """
    if not any(link.jitter_s > 0 for link in scenario.deployment.links):
        return None
    draws = stream(seed, "link", 1 << 20).exponential(1.0, n)
    jitter_ns: IntArray = np.rint(np.minimum(draws, 1e3) * 1e9).astype(np.int64)
    return jitter_ns


def deadline_ns(scenario: Scenario) -> int:
    """Longest wait for a first token; NEVER_NS if there is no deadline."""
    deadline_s = scenario.faults.deadline_s
    return NEVER_NS if deadline_s is None or not math.isfinite(deadline_s) else ns_from_s(deadline_s)
