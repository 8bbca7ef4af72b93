"""Rewriting what a branch expects: with the truth nothing changes, and nothing but the outlook decides what comes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from prfaas_env.branches import Branches
from prfaas_env.decision import Decision
from prfaas_env.outlook import Arrivals, Outlook, arrived_requests, finished_outputs, open_requests
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.compiled_engine import CompiledEngine
from prfaas_env.simulator.faults import FaultTrace
from prfaas_env.simulator.formulas import NEVER_NS, ns_from_s
from prfaas_env.simulator.world import CapacityTrace, World, draw_world
from prfaas_env.workload.requests import RequestTable
from tests.differential.cases import Case, world_of
from tests.prfaas_env.test_branches import Orders, follow


def true_outlook(world: World, engine: CompiledEngine) -> Outlook:
    """What really comes, as an outlook; the capacity must be constant."""
    table, state = world.requests, engine.view()
    number = open_requests(state).number
    first = engine.totals().arrived
    arrivals = Arrivals(
        table.arrival_ns[first:], world.pd_of[first:], table.input_tokens[first:], table.cached_tokens[first:]
    )
    capacity = np.array([trace.capacity_bps[0] for trace in world.links])
    return Outlook(table.output_tokens[number], arrivals, table.output_tokens[first:], capacity)


def without_surprises(world: World) -> World:
    """The same requests with links of constant capacity, no faults and patient clients."""
    links = tuple(CapacityTrace(np.array([0]), np.array([t.capacity_bps.max()])) for t in world.links)
    return dataclasses.replace(world, links=links, faults=FaultTrace.none(), give_up_ns=None, jitter_ns=None)


def test_the_truth_as_outlook_changes_nothing() -> None:
    """Random worlds, evictions, deadlines and several sites included; the branch ends where its source does."""
    compared, retried, deadlines = 0, 0, 0
    for seed in range(240):
        case = Case(seed, max_requests=40, max_ticks=30)
        world = world_of(case)
        scenario = world.scenario
        if scenario.prefix_pool is not None or any(x.jitter_s for x in scenario.deployment.links):
            continue
        world = without_surprises(world)
        control_ns = ns_from_s(scenario.control.control_interval_s)
        orders, engine = Orders(world, seed, 30), CompiledEngine(world)
        branches = Branches(scenario, 2)
        for tick in range(30):
            if tick == seed % 20:
                branches.take(engine, slice(0, 1), engine.now_ns)
                branches.redraw(0, true_outlook(world, engine), 30 * control_ns)
                branches.fork(0, slice(1, 2))
                follow(branches, orders, range(tick, 30), control_ns)
            engine.apply(orders.decision(tick))
            engine.run_until((tick + 1) * control_ns)
        first, records = branches.records_of(1)
        whole = engine.records
        for name in ("first_token_ns", "finish_ns", "abort_ns", "status", "route", "attempts", "sent_bytes"):
            found = getattr(records, name)
            assert np.array_equal(found, getattr(whole, name)[first : first + len(found)]), (seed, name)
        ours, theirs = branches.totals_of(1), engine.totals()
        assert (ours.waiting_ns, ours.arrived, ours.good) == (theirs.waiting_ns, theirs.arrived, theirs.good)
        compared += 1
        retried += int((whole.attempts > 1).any())
        deadlines += theirs.aborted > 0
    assert compared > 40
    assert retried > 3
    assert deadlines > 3


# ------------------------------------------------------------------ hand-made cases


def small(**changes: object) -> Scenario:
    """One prefill and one decode instance; a prefill takes 1 ms per token, a decode step 1 s, one layer."""
    raw = load_scenario("paper").model_dump(mode="json")
    profile = {"kind": "polynomial", "c0_s": 0.0, "c1_s_per_token": 1e-3, "source": "made up"}
    raw["model"] = {
        "name": "made up",
        "kv": {"fixed_bytes": 0, "bytes_per_token": 1000, "n_layers": 1},
        "kv_source": "made up",
        "hardware": {
            "here": {"prefill": profile, "decode": {"a_s": 1.0, "slots": 4, "source": "made up"}},
            "there": {"prefill": profile},
        },
    }
    raw["deployment"] = {
        "prfaas": [{"name": "far", "hardware": "there", "n_instances": 1}],
        "pd": [{"name": "near", "hardware": "here", "n_prefill": 1, "n_decode": 1, "rdma_bps": 8e15}],
        "links": [{"prfaas": "far", "pd": "near", "capacity_bps": 8e6, "latency_s": 0.0, **changes}],
    }
    return Scenario.model_validate(raw)


def world_with(scenario: Scenario, arrival_s: list[float], outputs: list[int]) -> World:
    table = RequestTable.without_prefixes(
        np.array([ns_from_s(t) for t in arrival_s]), np.full(len(outputs), 1000), np.array(outputs)
    )
    link = CapacityTrace(np.array([0, ns_from_s(8.0)]), np.array([8e6, 0.0]))
    return World(scenario, 0, table, np.zeros(len(outputs), dtype=np.int64), (link,))


NO_ARRIVALS = Arrivals(*[np.zeros(0, dtype=np.int64)] * 4)
NONE = np.zeros(0, dtype=np.int64)
STAY = np.ones((1, 1), dtype=np.int64)


def test_what_a_router_knows() -> None:
    """The second request is prefilled from 2 to 3 s and gives a token each second: two of them by 5.5 s."""
    engine = CompiledEngine(world_with(small(), [0.0, 2.0, 4.2, 9.0], [2, 9, 9, 9]))
    engine.apply(Decision.same(1, threshold_tokens=np.inf))
    engine.run_until(ns_from_s(5.5))
    state = engine.view()
    known = open_requests(state)
    assert known.number.tolist() == [1, 2]
    assert known.generated_tokens.tolist() == [2, 0]
    assert arrived_requests(state, 1).arrival_ns.tolist() == [ns_from_s(2.0), ns_from_s(4.2)]
    finish_ns, outputs = finished_outputs(state, 0, ns_from_s(1.0))
    assert outputs.tolist() == [2]
    assert abs(finish_ns[0] - ns_from_s(3.0)) < 10
    assert finished_outputs(state, 0, int(finish_ns[0]) + 1)[1].tolist() == []


def test_outputs_and_arrivals_of_the_outlook() -> None:
    """At 5.5 s the second request has two tokens: five in all end at 8 s; a new one of one token comes at 7 s."""
    engine = CompiledEngine(world_with(small(), [0.0, 2.0, 6.0], [2, 90, 50]))
    engine.apply(Decision.same(1, threshold_tokens=np.inf))
    engine.run_until(ns_from_s(5.5))
    branches = Branches(engine.world.scenario, 1)
    branches.take(engine, slice(0, 1), engine.now_ns)
    arrivals = Arrivals(*(np.array([x]) for x in (ns_from_s(7.0), 0, 500, 0)))
    outlook = Outlook(np.array([5]), arrivals, np.array([1]), np.array([8e6]))
    branches.redraw(0, outlook, ns_from_s(30.0))
    branches.step(ns_from_s(30.0), np.full((1, 1), np.inf), STAY)
    first, records = branches.records_of(0)
    assert first == 1
    assert np.abs(records.finish_ns - [ns_from_s(8.0), ns_from_s(8.5)]).max() < 10
    assert branches.totals_of(0).finished == 3
    engine.run_until(ns_from_s(30.0))
    assert engine.totals().finished == 1


def test_the_link_keeps_the_capacity_of_the_outlook() -> None:
    """A cache of 1 MB at 8 Mbit/s takes a second, at half of it two; the true link dies at 8 s."""
    engine = CompiledEngine(world_with(small(), [5.0, 7.0], [1, 1]))
    engine.apply(Decision.same(1, threshold_tokens=0.0))
    engine.run_until(ns_from_s(6.5))
    branches = Branches(engine.world.scenario, 2)
    branches.take(engine, slice(0, 2), engine.now_ns)
    arrivals = Arrivals(*(np.array([x]) for x in (ns_from_s(10.0), 0, 1000, 0)))
    for k, capacity in enumerate((8e6, 4e6)):
        branches.redraw(
            k, Outlook(np.array([1]), arrivals, np.array([1]), np.array([capacity])), ns_from_s(30.0)
        )
    branches.step(ns_from_s(30.0), np.zeros((2, 1)), np.ones((2, 1), dtype=np.int64), by_margin=False)
    # half of the first cache is sent at 6.5 s
    for k, (first_s, second_s) in enumerate(((7.0, 12.0), (7.5, 13.0))):
        _, records = branches.records_of(k)
        assert np.abs(records.transfer_end_ns - [ns_from_s(first_s), ns_from_s(second_s)]).max() < 10
    engine.apply(Decision.same(1, threshold_tokens=0.0))
    engine.run_until(ns_from_s(30.0))
    assert engine.records.transfer_end_ns[1] == NEVER_NS


def test_a_jitter_under_way_is_not_known() -> None:
    """A cache whose jitter would hold it for long comes after the latency of the link."""
    scenario = small(jitter_s=5.0, latency_s=0.5)
    world = world_with(scenario, [0.0], [1])
    world = dataclasses.replace(world, jitter_ns=np.array([3 * 10**9]))
    engine = CompiledEngine(world)
    engine.apply(Decision.same(1, threshold_tokens=0.0))
    engine.run_until(ns_from_s(4.0))
    branches = Branches(scenario, 1)
    branches.take(engine, slice(0, 1), engine.now_ns)
    branches.redraw(0, Outlook(np.array([1]), NO_ARRIVALS, NONE, np.array([8e6])), ns_from_s(30.0))
    branches.step(ns_from_s(30.0), np.zeros((1, 1)), STAY, by_margin=False)
    assert branches.records_of(0)[1].transfer_end_ns.tolist() == [ns_from_s(4.5)]
    engine.run_until(ns_from_s(30.0))
    assert engine.records.transfer_end_ns[0] == ns_from_s(2.5 + 15.0)


def test_more_arrivals_than_the_world_has_rows() -> None:
    """The table of a branch grows with its outlook."""
    engine = CompiledEngine(world_with(small(), [0.0], [1]))
    branches = Branches(engine.world.scenario, 1)
    branches.take(engine, slice(0, 1), 0)
    n = 3000
    arrivals = Arrivals(
        np.arange(n) * 10**6, np.zeros(n, dtype=np.int64), np.full(n, 10), np.zeros(n, dtype=np.int64)
    )
    branches.redraw(0, Outlook(NONE, arrivals, np.ones(n, dtype=np.int64), np.array([8e6])), ns_from_s(100.0))
    branches.step(ns_from_s(100.0), np.full((1, 1), np.inf), STAY)
    assert branches.totals_of(0).arrived == n


def test_prefix_pools_are_refused() -> None:
    scenario = load_scenario("mooncake_pool")
    engine = CompiledEngine(draw_world(scenario, 0, n_requests=20))
    branches = Branches(scenario, 1)
    with pytest.raises(ValueError, match="branch 0 has not been set"):
        branches.view(0)
    branches.take(engine, slice(0, 1), 0)
    with pytest.raises(ValueError, match="with prefix pools cannot expect other requests"):
        branches.redraw(0, Outlook(NONE, NO_ARRIVALS, NONE, np.array([8e6])), 1)
