"""Random worlds on which both engines must agree exactly, ties on purpose.

A case is a seed and a few limits that can shrink; everything else follows from the seed. Half of the cases live on
a coarse grid (whole seconds, round lengths, rates that divide them) so that many events fall on one instant.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.engine import Engine, make_engine
from prfaas_env.simulator.faults import FaultTrace
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.records import RequestRecords, Totals
from prfaas_env.simulator.world import CapacityTrace, World
from prfaas_env.workload.requests import RequestTable


@dataclass(frozen=True)
class Case:
    """One random world and decision sequence; every second one has prefix data and a pool."""

    seed: int
    max_requests: int = 60
    max_ticks: int = 60


def _pick(rng: np.random.Generator, values: list[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def _transport(rng: np.random.Generator) -> dict[str, Any]:
    """Settings of a link beyond capacity; a third of the links have them."""
    if rng.random() < 0.67:
        return {}
    return {
        "rtt_s": float(_pick(rng, [0.01, 0.08])),
        "connections": int(_pick(rng, [1, 4])),
        "window_bytes": _pick(rng, [None, 20_000, 80_000]),
        "loss": float(_pick(rng, [0.0, 0.001])),
        "setup_s": float(_pick(rng, [0.0, 0.5, 1.0, 3.3])),
        "idle_s": float(_pick(rng, [0.5, 2.0])),
        "jitter_s": float(_pick(rng, [0.0, 0.2])),
    }


def _faults(rng: np.random.Generator, scenario: Scenario) -> FaultTrace:
    """Instances that go down, come back and slow down; half of the times are whole seconds."""
    deployment = scenario.deployment
    sizes = [c.n_instances for c in deployment.prfaas] + [c.n_prefill + c.n_decode for c in deployment.pd]
    rows: dict[tuple[int, int, int], float] = {}
    for _ in range(int(_pick(rng, [0, 0, 2, 6, 20]))):
        cluster = int(rng.integers(len(sizes)))
        whole = rng.random() < 0.2
        start_s = float(rng.integers(0, 60) if rng.random() < 0.5 else rng.uniform(0, 60))
        end_s = start_s + float(_pick(rng, [0.5, 1.0, 5.0, 20.3]))
        speed = float(_pick(rng, [0.0, 0.0, 0.5, 0.25]))
        for n in range(sizes[cluster]) if whole else [int(rng.integers(sizes[cluster]))]:
            rows[ns_from_s(start_s), cluster, n] = speed
            rows[ns_from_s(end_s), cluster, n] = 1.0
    return FaultTrace.of((*place, speed) for place, speed in rows.items())


def _give_up_ns(rng: np.random.Generator, arrival_ns: np.ndarray) -> np.ndarray | None:
    """When clients give up: nobody, or most of them early, some on whole seconds."""
    kind = int(_pick(rng, [0, 0, 1, 2]))
    if kind == 0:
        return None
    wait_s = (
        rng.exponential(8.0, len(arrival_ns)) if kind == 1 else rng.integers(1, 20, len(arrival_ns)) / 2.0
    )
    return arrival_ns + np.maximum((wait_s * 1e9).astype(np.int64), 1)


def scenario_of(case: Case) -> Scenario:
    """The random scenario of a case."""
    rng = np.random.default_rng([case.seed, 0])
    coarse = bool(rng.integers(2))
    n_pd = int(_pick(rng, [1, 1, 1, 2, 3]))
    n_prfaas = int(_pick(rng, [0, 1, 1, 1, 2, 3]))
    links = [
        {
            "prfaas": f"r{j}",
            "pd": f"p{i}",
            "capacity_bps": float(_pick(rng, [8e6, 16e6, 24e6, 80e6])),
            "latency_s": float(_pick(rng, [0.0, 0.0, 0.001, 0.5, 1.0])),
            "flow_cap_bps": _pick(rng, [None, None, 4e6, 8e6]),
            **_transport(rng),
        }
        for j in range(n_prfaas)
        for i in range(n_pd)
        if rng.random() < 0.8
    ]
    linked = {link["pd"] for link in links}
    pd = []
    for i in range(n_pd):
        low = 0 if f"p{i}" in linked and rng.random() < 0.4 else 1
        n_prefill = int(rng.integers(low, 4))
        pd.append(
            {
                "name": f"p{i}",
                "hardware": "local",
                "n_prefill": n_prefill,
                "n_decode": int(rng.integers(1, 4)),
                "min_prefill": 0 if low == 0 else None,
                "rdma_bps": float(_pick(rng, [8e6, 8e8, 8e11])),
                "rdma_latency_s": float(_pick(rng, [0.0, 0.0, 0.25])),
            }
        )
    grid = 1e-3 if coarse else 0.97e-3
    capacity = _pick(rng, [None, None, 6000, 20000])
    decode = {
        "a_s": float(_pick(rng, [0.25, 0.5, 0.025] if coarse else [0.11, 0.025])),
        "b_s_per_sequence": float(_pick(rng, [0.0, 0.0, 0.25 if coarse else 0.013])),
        "c_s_per_token": float(_pick(rng, [0.0, 0.0, 2.0**-12 if coarse else 1.1e-5])),
        "slots": int(rng.integers(1, 5)),
        "kv_capacity_tokens": capacity,
        "kv_reserve_tokens": int(_pick(rng, [0, 100])),
        "source": "made up",
    }
    prefill = _pick(
        rng,
        [
            {"kind": "polynomial", "c0_s": 0.0, "c1_s_per_token": grid, "source": "made up"},
            {
                "kind": "polynomial",
                "c0_s": 0.125,
                "c1_s_per_token": grid,
                "c2_s_per_token2": 1e-8,
                "source": "made up",
            },
            {
                "kind": "table",
                "tokens": [500, 1000, 4000],
                "seconds_at": [0.5, 1.0, 3.0],
                "source": "made up",
            },
        ],
    )
    remote = {"kind": "polynomial", "c0_s": 0.0, "c1_s_per_token": grid / 2, "source": "made up"}
    pool = pool_of(case)
    control_s = float(_pick(rng, [1.0, 1.0, 0.5, 2.0, 0.7]))
    warmup_s = float(_pick(rng, [0.0, 0.0, 3.0, 20.0]))
    return Scenario.model_validate(
        {
            "name": f"case-{case.seed}",
            "model": {
                "name": "made up",
                "kv": {
                    "fixed_bytes": int(_pick(rng, [0, 0, 100_000])),
                    "bytes_per_token": max(int(_pick(rng, [0, 1000, 1000])), 0 if pool is None else 8),
                    "windows": [{"bytes_per_token": 500, "window_tokens": 800}] if rng.random() < 0.3 else [],
                    "n_layers": int(_pick(rng, [1, 2, 4, 5])),
                },
                "kv_source": "made up",
                "hardware": {
                    "local": {"prefill": prefill, "decode": decode},
                    "remote": {"prefill": remote},
                },
            },
            "deployment": {
                "prfaas": [
                    {"name": f"r{j}", "hardware": "remote", "n_instances": int(rng.integers(1, 4))}
                    for j in range(n_prfaas)
                ],
                "pd": pd,
                "links": links,
            },
            "workload": {
                "kind": "synthetic",
                "arrivals": {"kind": "poisson", "rate_rps": 1.0},
                "input_tokens": {"kind": "fixed", "tokens": 1},
                "output_tokens": {"kind": "fixed", "tokens": 1},
            },
            "transport": {"pipelining": bool(rng.integers(2))},
            "faults": {"deadline_s": _pick(rng, [None, None, None, 2.0, 7.5])},
            "conversion": {
                "switch_s": float(_pick(rng, [0.0, 1.0, 2.5])),
                "drain_limit_s": float(_pick(rng, [0.5, 2.0, 120.0])),
                "warmup_s": warmup_s,
                "warmup_speed": 0.5 if warmup_s else 1.0,
            },
            "control": {
                "control_interval_s": control_s,
                "conversion_interval_s": control_s * int(_pick(rng, [1, 1, 3])),
            },
            "slo": {"ttft_s": _pick(rng, [None, 3.0]), "tpot_s": _pick(rng, [None, 0.3])},
            "admission": {
                "max_input_tokens": _pick(rng, [None, None, 3500]),
                "max_queue_requests": _pick(rng, [None, None, 3]),
            },
            "measure": {"horizon_s": 60.0, "warmup_s": float(_pick(rng, [0.0, 0.0, 5.0, 5.3]))},
            "prefix_pool": pool,
        }
    )


#: Tokens of one block where a case has prefix data.
BLOCK_TOKENS = 250


def pool_of(case: Case) -> dict[str, Any] | None:
    """Settings of the prefix pool of a case: in half of the cases, tiny, roomy or without a limit."""
    rng = np.random.default_rng([case.seed, 3])
    if rng.integers(2) == 0:
        return None
    capacities = [None, 0, *(n * BLOCK_TOKENS * 1000 for n in (3, 10, 20, 40))]
    checkpoints = _pick(rng, ["end_of_prompt", "end_of_prompt", "every_n_tokens", "every_n_tokens", "none"])
    every = BLOCK_TOKENS * int(rng.integers(1, 4)) if checkpoints == "every_n_tokens" else None
    return {
        "prfaas_capacity_bytes": _pick(rng, capacities),
        "pd_capacity_bytes": _pick(rng, capacities),
        "checkpoints": checkpoints,
        "checkpoint_every_tokens": every,
        "metadata_age_s": float(_pick(rng, [0.0, 0.0, 3.0, 10.0, 60.0])),
    }


def with_prefixes(case: Case, table: RequestTable) -> RequestTable:
    """The same requests with block ids: a few families whose prompts go on from one another or branch off.

    In one of eight cases ids are drawn at random, so that one id comes behind different blocks.
    """
    rng = np.random.default_rng([case.seed, 4])
    odd = rng.integers(8) == 0
    families = int(rng.integers(1, 5))
    counts = -(-table.input_tokens // BLOCK_TOKENS)
    rows = []
    for n in counts.tolist():
        row = 1000 * int(rng.integers(families)) + np.arange(n)
        cut = int(rng.integers(0, n + 1)) if rng.random() < 0.4 else n
        row[cut:] += 100 * int(rng.integers(1, 4))
        rows.append(rng.integers(0, 4, n) if odd else row)
    return dataclasses.replace(
        table,
        block_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        block_ids=np.concatenate([np.zeros(0, dtype=np.int64), *rows]).astype(np.int64),
        block_tokens=BLOCK_TOKENS,
    )


def world_of(case: Case) -> World:
    """The drawn world of a case: explicit requests and capacity steps."""
    scenario = scenario_of(case)
    rng = np.random.default_rng([case.seed, 1])
    coarse = bool(rng.integers(2))
    n = int(rng.integers(0, case.max_requests + 1))
    span_s = float(_pick(rng, [5.0, 20.0, 60.0]))
    if coarse:
        arrival_s = np.sort(rng.integers(0, int(span_s) * 2, n) / 2.0)
        lengths = rng.choice([500, 1000, 1000, 2000, 4000], n)
    else:
        arrival_s = np.sort(rng.uniform(0, span_s, n))
        lengths = rng.integers(1, 4500, n)
    outputs = rng.choice([1, 2, 4, 8, 40], n)
    n_pd = len(scenario.deployment.pd)
    pd_of = rng.integers(0, n_pd, n)
    arrival_ns = np.array([ns_from_s(float(t)) for t in arrival_s], dtype=np.int64)
    order = np.lexsort((pd_of, arrival_ns))
    table = RequestTable.without_prefixes(
        arrival_ns[order], lengths.astype(np.int64)[order], outputs.astype(np.int64)[order]
    )
    if scenario.prefix_pool is not None and case.seed % 16 != 0:
        table = with_prefixes(case, table)
    elif case.seed % 3 == 0:
        # hits that a rate declares
        share = np.random.default_rng([case.seed, 4]).choice([0.0, 0.5, 0.9], n)
        cached = np.minimum((table.input_tokens * share).astype(np.int64), table.input_tokens - 1)
        table = dataclasses.replace(table, cached_tokens=cached)
    traces = []
    for link in scenario.deployment.links:
        k = int(_pick(rng, [0, 0, 1, 4]))
        times = np.concatenate(([0.0], np.sort(rng.choice(np.arange(1, 120), k, replace=False)) / 2.0))
        values = link.capacity_bps * rng.choice([1.0, 0.5, 0.25, 0.0, 0.3], k + 1)
        values[-1] = link.capacity_bps * float(_pick(rng, [1.0, 0.5]))
        traces.append(CapacityTrace(np.array([ns_from_s(float(t)) for t in times]), values))
    luck = (rng.exponential(1.0, n) * 1e9).astype(np.int64) if rng.random() < 0.5 else None
    return World(
        scenario,
        case.seed,
        table,
        pd_of[order].astype(np.int64),
        tuple(traces),
        faults=_faults(rng, scenario),
        give_up_ns=_give_up_ns(rng, table.arrival_ns),
        jitter_ns=luck,
    )


def decisions_of(case: Case) -> list[Decision]:
    """One decision per tick."""
    scenario = scenario_of(case)
    rng = np.random.default_rng([case.seed, 2])
    n_pd = len(scenario.deployment.pd)
    out = []
    for _ in range(case.max_ticks):
        clusters = []
        for _ in range(n_pd):
            move = Move(int(_pick(rng, [0, 1, 1, 1, 2])))
            if rng.random() < 0.5:
                value = float(_pick(rng, [0.0, 999.0, 1000.0, 2000.0, math.inf]))
                rule = _pick(rng, ["scarce", "abundant"]) if scenario.prefix_pool is not None else "scarce"
                clusters.append(ClusterDecision(threshold_tokens=value, move=move, cache_rule=rule))
            else:
                value = float(_pick(rng, [-math.inf, -1.0, 0.0, 0.0, 0.5, math.inf]))
                clusters.append(
                    ClusterDecision(margin_s=value, move=move, cache_rule=_pick(rng, ["scarce", "abundant"]))
                )
        out.append(Decision(tuple(clusters)))
    return out


def events_of(records: RequestRecords) -> list[tuple[int, int, str]]:
    """(time, request, what) of every stamp, in order."""
    out = []
    for field in dataclasses.fields(records):
        if field.name.endswith("_ns") and field.name != "service_ns":
            stamps = getattr(records, field.name)
            out += [(int(t), r, field.name) for r, t in enumerate(stamps)]
    return sorted(out)


def _fields_that_differ(a: Totals, b: Totals) -> list[str]:
    return [f"{name}: {x} / {y}" for name, x, y in zip(a._fields, a, b, strict=True) if x != y]


def _compare_now(first: Engine, second: Engine, when: str) -> str | None:
    a, b = first.telemetry(), second.telemetry()
    if a.legal_moves != b.legal_moves:
        return f"{when}: legal moves {a.legal_moves} / {b.legal_moves}"
    if not np.array_equal(a.values, b.values):
        k = int(np.flatnonzero(a.values != b.values)[0])
        return f"{when}: telemetry {a.schema.names[k]}: {a.values[k]!r} / {b.values[k]!r}"
    for x, y in zip(a.recent_lengths_tokens, b.recent_lengths_tokens, strict=True):
        if not np.array_equal(x, y):
            return f"{when}: recent lengths {x} / {y}"
    differ = _fields_that_differ(first.totals(), second.totals())
    return f"{when}: totals {'; '.join(differ)}" if differ else None


def compare_records(a: RequestRecords, b: RequestRecords) -> str | None:
    """The first differing event of two runs, or None if every record is equal."""
    names = [field.name for field in dataclasses.fields(a)]
    if all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names):
        return None
    for x, y in zip(events_of(a), events_of(b), strict=True):
        if x != y:
            return f"first differing event: (time ns, request, what) {x} / {y}"
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        if not np.array_equal(x, y):
            r = int(np.flatnonzero(x != y)[0])
            return f"request {r}: {name} {x[r]} / {y[r]}"
    raise AssertionError("records differ in nothing")


#: Every second case looks at counters and telemetry on every tick, the others seldom: it is quicker, and an engine
#: whose results depend on being looked at disagrees in one of the two.
SELDOM_TICKS = 7


def disagreement(case: Case, first: str = "simpy", second: str = "compiled") -> str | None:
    """What the two engines disagree on in a case, or None."""
    world = world_of(case)
    engines = [make_engine(name, world) for name in (first, second)]
    control_ns = ns_from_s(world.scenario.control.control_interval_s)
    look_every = 1 if case.seed % 2 == 0 else SELDOM_TICKS
    found = None
    for tick, decision in enumerate(decisions_of(case)):
        for engine in engines:
            engine.apply(decision)
            engine.run_until((tick + 1) * control_ns)
        if (tick + 1) % look_every:
            continue
        found = _compare_now(*engines, when=f"tick {tick + 1}")
        if found is not None:
            break
    if found is None:
        limit_ns = engines[0].now_ns + ns_from_s(10_000.0)
        for engine in engines:
            engine.run_to_end(limit_ns)
        found = _compare_now(*engines, when="end")
    records = compare_records(engines[0].records, engines[1].records)
    if found is None and records is None:
        return None
    return f"{found or 'counters equal'}; {records or 'records equal'} ({first} / {second})"


def shrink(case: Case) -> Case:
    """A smaller case that still disagrees."""
    changed = True
    while changed:
        changed = False
        for field in ("max_requests", "max_ticks"):
            value = getattr(case, field)
            for smaller in sorted({value // 2, value - value // 4, value - 1}):
                candidate = dataclasses.replace(case, **{field: smaller})
                if 0 <= smaller < value and disagreement(candidate) is not None:
                    case, changed = candidate, True
                    break
    return case
