"""Both engines agree exactly, per request, per counter and per telemetry field, on random worlds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from prfaas_env.decision import Decision
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator import kernel
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.records import PREFIX_COUNTERS
from prfaas_env.simulator.world import CapacityTrace, World
from prfaas_env.workload.requests import RequestTable

from .cases import (
    BLOCK_TOKENS,
    Case,
    compare_records,
    decisions_of,
    disagreement,
    shrink,
    world_of,
)

N_CASES = 2_000
BATCH = 50


@pytest.mark.parametrize("first", range(0, N_CASES, BATCH))
def test_engines_agree(first: int) -> None:
    """2,000 random worlds; a disagreement is shrunk and names its first differing event."""
    for seed in range(first, first + BATCH):
        found = disagreement(Case(seed))
        if found is not None:
            small = shrink(Case(seed))
            pytest.fail(f"{small}: {disagreement(small)}")


def test_cases_reach_every_mechanism() -> None:
    """The random worlds are not all alike: each mechanism occurs in a fair share of them."""
    seen = dict.fromkeys(
        ("conversion", "invalid move", "reject", "retry", "remote", "local", "tie", "no traffic"), 0
    )
    pooled = dict.fromkeys(PREFIX_COUNTERS, 0)
    for seed in range(150):
        world = world_of(Case(seed))
        if len(world.requests) == 0:
            seen["no traffic"] += 1
            continue
        seen["tie"] += len(np.unique(world.requests.arrival_ns)) < len(world.requests)
        engine = _played(Case(seed))
        totals, records = engine.totals(), engine.records
        seen["conversion"] += totals.conversions > 0
        seen["invalid move"] += totals.invalid_moves > 0
        seen["reject"] += totals.rejected > 0
        seen["retry"] += bool((records.attempts > 1).any())
        seen["remote"] += bool((records.route == 2).any())
        seen["local"] += bool((records.route == 1).any())
        for name, count in zip(PREFIX_COUNTERS, totals.prefix, strict=True):
            pooled[name] += count > 0
    rare = {"retry": 3, "no traffic": 1, "mispredictions": 2}
    seen.update(pooled)
    assert all(count >= rare.get(name, 20) for name, count in seen.items()), seen


def _played(case: Case):  # type: ignore[no-untyped-def]
    world = world_of(case)
    engine = make_engine("compiled", world)
    for tick, decision in enumerate(decisions_of(case)):
        engine.apply(decision)
        engine.run_until((tick + 1) * ns_from_s(world.scenario.control.control_interval_s))
    engine.run_to_end(engine.now_ns + ns_from_s(10_000.0))
    return engine


def test_a_wrong_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a reference with a frozen link share disagrees, and the message names an event."""
    from prfaas_env.simulator.link import LinkState

    settle = LinkState.settle

    def frozen(self: LinkState, now_ns: int) -> None:
        kept = {id(flow): flow.rate_bps for flow in self.flows if flow.rate_bps > 0}
        settle(self, now_ns)
        for flow in self.flows:
            flow.rate_bps = kept.get(id(flow), flow.rate_bps)

    monkeypatch.setattr(LinkState, "settle", frozen)
    found = [text for seed in range(60) if (text := disagreement(Case(seed))) is not None]
    assert found
    assert any("first differing event" in text for text in found)


def test_arrays_that_grow_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting with arrays as small as they may be gives the same results through every growth."""
    from prfaas_env.simulator import compiled_engine
    from prfaas_env.simulator.layout import Sizes

    grown = []
    grow = compiled_engine.CompiledEngine._grow

    def counted(self: compiled_engine.CompiledEngine, status: int) -> None:
        grown.append(status)
        grow(self, status)

    monkeypatch.setattr(compiled_engine.CompiledEngine, "_grow", counted)
    monkeypatch.setattr(
        compiled_engine, "initial_sizes", lambda scenario, changes: Sizes(heap=12, flows=1, changes=changes)
    )
    for seed in range(40):
        assert disagreement(Case(seed)) is None
    assert kernel.GROW_HEAP in grown
    assert kernel.GROW_FLOWS in grown


def test_many_copies_of_one_instant_grow_the_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty arrivals of one instant open a flow each for a copied prefix; the arrays grow within that instant."""
    from prfaas_env.simulator import compiled_engine
    from prfaas_env.simulator.layout import Sizes

    no_limit = {"prfaas_capacity_bytes": None, "pd_capacity_bytes": None}
    scenario = load_scenario("paper").replace(prefix_pool=no_limit)
    n = 31
    table = dataclasses.replace(
        RequestTable.without_prefixes(
            np.array([0] + [ns_from_s(60.0)] * (n - 1)), np.full(n, 2001), np.full(n, 2)
        ),
        block_offsets=np.arange(n + 1) * 9,
        block_ids=np.tile(np.arange(9), n),
        block_tokens=BLOCK_TOKENS,
    )
    capacity = CapacityTrace(np.zeros(1, dtype=np.int64), np.array([100e9]))
    world = World(scenario, 0, table, np.zeros(n, dtype=np.int64), (capacity,))
    monkeypatch.setattr(
        compiled_engine, "initial_sizes", lambda scenario, changes: Sizes(heap=12, flows=1, changes=changes)
    )
    engines = [make_engine(name, world) for name in ("simpy", "compiled")]
    for engine in engines:
        engine.apply(Decision.same(1, threshold_tokens=math.inf))
        engine.run_until(ns_from_s(60.0))
        engine.apply(Decision.same(1, threshold_tokens=0.0, cache_rule="abundant"))
        engine.run_until(ns_from_s(60.0001))
        assert engine.telemetry().link[0].open_flows == n - 1
        engine.run_to_end(ns_from_s(10_000.0))
    assert engines[0].totals().prefix[PREFIX_COUNTERS.index("copies")] == n - 1
    assert engines[0].totals() == engines[1].totals()
    assert compare_records(engines[0].records, engines[1].records) is None


def test_snapshot_and_restore_are_exact() -> None:
    """A restored engine goes on exactly as the one it was taken from."""
    for seed in range(30):
        case = Case(seed)
        world = world_of(case)
        control_ns = ns_from_s(world.scenario.control.control_interval_s)
        first, second = make_engine("compiled", world), make_engine("compiled", world)
        decisions = decisions_of(case)
        for tick, decision in enumerate(decisions):
            if tick == 20:
                second.restore(first.snapshot())
            for engine in (first,) if tick < 20 else (first, second):
                engine.apply(decision)
                engine.run_until((tick + 1) * control_ns)
        assert compare_records(first.records, second.records) is None
        assert first.totals() == second.totals()
        assert np.array_equal(first.telemetry().values, second.telemetry().values)


def test_a_planner_that_reuses_one_snapshot_disturbs_nothing() -> None:
    """Branches tried from a snapshot taken into the same memory each time leave the run as it would have been."""
    for seed in range(20):
        case = Case(seed)
        world = world_of(case)
        control_ns = ns_from_s(world.scenario.control.control_interval_s)
        alone, planning, branch = (make_engine("compiled", world) for _ in range(3))
        decisions = decisions_of(case)
        buffer = planning.snapshot()
        for tick, decision in enumerate(decisions):
            buffer = planning.snapshot(buffer)
            for other in (decisions[0], decisions[-1]):
                branch.restore(buffer)
                branch.apply(other)
                branch.run_until((tick + 5) * control_ns)
            planning.run_until((tick + 2) * control_ns)
            planning.restore(buffer)
            for engine in (alone, planning):
                engine.apply(decision)
                engine.run_until((tick + 1) * control_ns)
        assert compare_records(alone.records, planning.records) is None
        assert alone.totals() == planning.totals()
        assert np.array_equal(alone.telemetry().values, planning.telemetry().values)


def test_interpreted_kernel_is_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain functions give the same results as their compiled twins."""
    from prfaas_env.simulator import compiled_engine

    twins = compiled_engine.compiled_kernel()
    plain = {name: getattr(kernel, name, None) for name in twins}
    plain["encode_values"] = compiled_engine.encode_values
    cases = [Case(seed, max_requests=20, max_ticks=15) for seed in range(12)]
    expected = [_played(case).records for case in cases]
    monkeypatch.setattr(compiled_engine, "compiled_kernel", lambda: plain)
    for case, records in zip(cases, expected, strict=True):
        found = compare_records(_played(case).records, records)
        assert found is None, f"{dataclasses.asdict(case)}: {found}"
