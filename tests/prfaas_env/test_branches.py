"""A branch does what its source does: every total, reading and record, in random worlds with everything in them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.branches import Branches
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator import kernel
from prfaas_env.simulator.compiled_engine import CompiledEngine
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.layout import Sizes
from prfaas_env.simulator.world import CapacityTrace, World, draw_world
from prfaas_env.vector import Batch
from prfaas_env.workload.requests import RequestTable
from tests.differential.cases import Case, world_of

N_SLOTS = 5


class Orders:
    """Random decisions, one form for all PD clusters of a tick."""

    def __init__(self, world: World, seed: int, ticks: int) -> None:
        rng = np.random.default_rng([seed, 9])
        n_pd = len(world.scenario.deployment.pd)
        self.by_margin = rng.random(ticks) < 0.5
        margins = rng.choice([-np.inf, -1.0, 0.0, 0.5, np.inf], (ticks, n_pd))
        thresholds = rng.choice([0.0, 999.0, 2000.0, np.inf], (ticks, n_pd))
        self.value = np.where(self.by_margin[:, None], margins, thresholds)
        self.move = rng.choice([0, 1, 1, 1, 2], (ticks, n_pd))
        self.abundant = rng.integers(0, 2, (ticks, n_pd))

    def decision(self, tick: int) -> Decision:
        clusters = []
        for value, move, abundant in zip(self.value[tick], self.move[tick], self.abundant[tick], strict=True):
            kind = "margin_s" if self.by_margin[tick] else "threshold_tokens"
            rule = "abundant" if abundant else "scarce"
            clusters.append(ClusterDecision(**{kind: float(value)}, move=Move(move), cache_rule=rule))
        return Decision(tuple(clusters))

    def arrays(self, tick: int, n: int) -> tuple[np.ndarray, np.ndarray, bool, np.ndarray]:
        """(value, move, by margin, abundant) for n branches."""
        value, move, abundant = (np.tile(a[tick], (n, 1)) for a in (self.value, self.move, self.abundant))
        return value, move, bool(self.by_margin[tick]), abundant


def follow(branches: Branches, orders: Orders, ticks: range, control_ns: int) -> None:
    """Step all branches by the orders of the source."""
    for tick in ticks:
        value, move, by_margin, abundant = orders.arrays(tick, branches.n)
        branches.step((tick + 1) * control_ns, value, move, by_margin=by_margin, abundant=abundant)


def same(branches: Branches, k: int, engine: CompiledEngine) -> None:
    """Branch k is where the engine is."""
    telemetry, other = engine.telemetry(), branches.telemetry_of(k)
    assert branches.totals_of(k) == engine.totals()
    assert np.array_equal(other.values, telemetry.values)
    assert other.legal_moves == telemetry.legal_moves
    assert branches.now_ns[k] == engine.now_ns
    for x, y in zip(other.recent_lengths_tokens, telemetry.recent_lengths_tokens, strict=True):
        assert np.array_equal(x, y)
    observation, _ = engine.encode(telemetry)
    assert np.array_equal(branches.observation[k], observation)
    assert [tuple(row) for row in branches.legal[k]] == list(telemetry.legal_moves)
    assert branches.waiting_ns[k] == engine.totals().waiting_ns
    assert branches.lost_requests[k] == engine.totals().rejected + engine.totals().aborted
    first, records = branches.records_of(k)
    whole = engine.records
    last = first + len(records.status)
    assert not np.isin(whole.status[:first], (0, kernel.OPEN)).any()
    assert not whole.status[last:].any()
    for field in dataclasses.fields(records):
        assert np.array_equal(getattr(records, field.name), getattr(whole, field.name)[first:last])


def play(case: Case, ahead: int, *, from_batch: bool = False) -> set[str]:
    """Branch every few ticks, let each branch follow the source, and compare; gives the features that occurred."""
    world = world_of(case)
    ticks = case.max_ticks
    control_ns = ns_from_s(world.scenario.control.control_interval_s)
    orders = Orders(world, case.seed, ticks)
    rng = np.random.default_rng([case.seed, 10])
    engine, check = CompiledEngine(world), CompiledEngine(world)
    batch = Batch(world.scenario, 2)
    if from_batch:
        batch.load(0, world_of(dataclasses.replace(case, max_requests=7)))
        batch.load(1, world)
    branches = Branches(world.scenario, N_SLOTS)
    for tick in range(ticks):
        if rng.random() < 0.25:
            last = min(tick + ahead, ticks)
            mine = slice(1, 3)
            until_ns = last * control_ns
            if from_batch:
                branches.take_env(batch, 1, mine, until_ns)
                branches.take_env(batch, 1, slice(0, 1), until_ns)
            else:
                branches.take(engine, mine, until_ns)
                branches.take(engine, slice(0, 1), until_ns)
            branches.fork(0, slice(3, N_SLOTS))
            branches.read()
            same(branches, 4, engine)
            follow(branches, orders, range(tick, last), control_ns)
            check.restore(engine.snapshot())
            for n in range(tick, last):
                check.apply(orders.decision(n))
                check.run_until((n + 1) * control_ns)
            for k in range(N_SLOTS):
                same(branches, k, check)
            # leave rows of another future behind
            follow_other = np.full((N_SLOTS, branches.n_pd), np.inf)
            branches.take(engine, slice(0, N_SLOTS), (ticks + 5) * control_ns)
            branches.step((ticks + 5) * control_ns, follow_other, np.ones_like(follow_other, dtype=np.int64))
        engine.apply(orders.decision(tick))
        engine.run_until((tick + 1) * control_ns)
        if from_batch:
            value, move, by_margin, abundant = orders.arrays(tick, 2)
            until = np.full(2, (tick + 1) * control_ns)
            batch.step(np.full(2, kernel.DECIDE), until, by_margin, value, move, abundant)
    totals = engine.totals()
    found = {name for name in ("aborted", "rejected", "conversions") if getattr(totals, name)}
    found |= {"faults"} if len(world.faults) else set()
    found |= {"give up"} if world.give_up_ns is not None else set()
    found |= {"pool"} if sum(totals.prefix) else set()
    found |= {"sites"} if len(world.scenario.deployment.pd) > 1 else set()
    found |= {"deadline"} if world.scenario.faults.deadline_s is not None else set()
    return found


def test_a_branch_follows_its_source_in_random_worlds() -> None:
    """Every hard feature is among the cases."""
    found = set()
    for seed in range(45):
        found |= play(Case(seed), ahead=12)
    assert found == {
        "aborted",
        "rejected",
        "conversions",
        "faults",
        "give up",
        "pool",
        "sites",
        "deadline",
    }


def test_branches_of_one_env_of_a_batch() -> None:
    for seed in range(20):
        play(Case(seed), ahead=8, from_batch=True)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(1000, 10**6),
    max_requests=st.integers(0, 120),
    max_ticks=st.integers(1, 40),
    ahead=st.integers(1, 40),
)
def test_a_branch_follows_its_source(seed: int, max_requests: int, max_ticks: int, ahead: int) -> None:
    play(Case(seed, max_requests, max_ticks), ahead)


def test_branches_go_their_own_ways() -> None:
    """Branches of one state with different decisions are the engines with these decisions; the source stays."""
    scenario = load_scenario("drift")
    world = draw_world(scenario, 3, horizon_s=400.0)
    source, alone = CompiledEngine(world), CompiledEngine(world)
    for engine in (source, alone):
        engine.apply(Decision.same(1, margin_s=0.0))
        engine.run_until(ns_from_s(150.0))
    branches = Branches(scenario, 6)
    branches.take(source, slice(0, 6), ns_from_s(200.0))
    moves = [(value, move) for value in (-8.0, 30.0) for move in Move]
    value, move = (np.array([[x[i]] for x in moves]) for i in (0, 1))
    branches.step(ns_from_s(160.0), value, move.astype(np.int64))
    branches.step(ns_from_s(200.0), np.zeros((6, 1)), np.ones((6, 1), dtype=np.int64))
    for k, (margin_s, ordered) in enumerate(moves):
        engine = CompiledEngine(world)
        engine.restore(alone.snapshot())
        engine.apply(Decision.same(1, margin_s=float(margin_s), move=ordered))
        engine.run_until(ns_from_s(160.0))
        engine.apply(Decision.same(1, margin_s=0.0))
        engine.run_until(ns_from_s(200.0))
        same(branches, k, engine)
    assert len(set(branches.waiting_ns.tolist())) > 4
    assert source.totals() == alone.totals()


def test_arrays_grow_in_the_middle_of_a_roll_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """From arrays as small as they may be, under overload: branches and their source grow and agree."""
    from prfaas_env import vector
    from prfaas_env.simulator import compiled_engine

    def small(scenario: object, changes: int) -> Sizes:
        return Sizes(12, 1, changes)

    monkeypatch.setattr(vector, "initial_sizes", small)
    monkeypatch.setattr(compiled_engine, "initial_sizes", small)
    scenario = load_scenario("drift").with_rate(12.0)
    world = draw_world(scenario, 0, horizon_s=120.0)
    engine, other = CompiledEngine(world), CompiledEngine(world)
    branches = Branches(scenario, 3)
    value, move = np.full((3, 1), -np.inf), np.ones((3, 1), dtype=np.int64)
    sizes = set()
    for second in range(0, 60, 4):
        branches.take(engine, slice(0, 3), ns_from_s(second + 20.0))
        branches.step(ns_from_s(second + 20.0), value, move)
        other.restore(engine.snapshot())
        for each, end_s in ((other, second + 20.0), (engine, second + 4.0)):
            each.apply(Decision.same(1, margin_s=-np.inf))
            each.run_until(ns_from_s(end_s))
        same(branches, 1, other)
        sizes.add(engine.view().layout.sizes)
    assert len(sizes) > 1


def test_a_branch_stops_where_its_requests_end() -> None:
    """A step past the instant that it was set for is refused, also after another source took its place."""
    scenario = load_scenario("drift")
    engine = CompiledEngine(draw_world(scenario, 0, horizon_s=100.0))
    branches = Branches(scenario, 2)
    still = np.ones((2, 1), dtype=np.int64)
    branches.take(engine, slice(0, 2), ns_from_s(10.0))
    branches.take(engine, slice(1, 2), ns_from_s(20.0))
    with pytest.raises(ValueError, match="branch 0 was set for steps to 10 s, not 15 s"):
        branches.step(ns_from_s(15.0), np.zeros((2, 1)), still)
    branches.step(ns_from_s(15.0), np.zeros((2, 1)), still, live=np.array([False, True]))
    assert branches.now_ns.tolist() == [0, ns_from_s(15.0)]


def test_sources_that_do_not_fit_are_refused() -> None:
    drift, paper = load_scenario("drift"), load_scenario("paper")
    branches = Branches(paper, 2)
    with pytest.raises(ValueError, match="branches are of scenario paper, the source is of drift"):
        branches.take(CompiledEngine(draw_world(drift, 0, horizon_s=10.0)), slice(0, 1), 10)
    with pytest.raises(ValueError, match="env 0 has no world"):
        branches.take_env(Batch(paper, 1), 0, slice(0, 1), 10)
    branches.take(CompiledEngine(draw_world(paper, 0, horizon_s=10.0)), slice(0, 1), 10)
    with pytest.raises(ValueError, match="cannot be set to itself"):
        branches.fork(0, slice(0, 2))


def test_a_late_event_finds_no_request_of_an_earlier_use() -> None:
    """A prefill is given up before its cache begins to flow; the event comes to a branch that once held the request.

    Remote prefill of 1,000 tokens takes 10 s, so its flow opens after 5 s (two layers); the deadline is 2 s.
    """
    case = next(c for c in map(Case, range(200)) if one_link(c))
    base = world_of(case)
    hardware = {
        "local": base.scenario.model.hardware["local"].model_dump(),
        "remote": {
            "prefill": {"kind": "polynomial", "c0_s": 10.0, "c1_s_per_token": 0.0, "source": "made up"}
        },
    }
    model = base.scenario.model.model_dump()
    model["hardware"] = hardware
    model["kv"] |= {"n_layers": 2, "bytes_per_token": 1000}
    raw = base.scenario.model_dump() | {
        "model": model,
        "transport": {"pipelining": True},
        "faults": {"deadline_s": 2.0},
        "admission": {},
        "prefix_pool": None,
    }
    scenario = type(base.scenario).model_validate(raw)
    table = RequestTable.without_prefixes(
        np.array([0, ns_from_s(2.5)]), np.array([1000, 1000]), np.array([4, 4])
    )
    links = (CapacityTrace(np.array([0]), np.array([8e6])),)
    world = World(scenario, 0, table, np.zeros(2, dtype=np.int64), links)
    engine, other = CompiledEngine(world), CompiledEngine(world)
    branches = Branches(scenario, 1)
    remote, still = np.zeros((1, 1)), np.ones((1, 1), dtype=np.int64)
    for each in (engine, other):
        each.apply(Decision.same(1, threshold_tokens=0.0))
        each.run_until(ns_from_s(1.0))
    branches.take(engine, slice(0, 1), ns_from_s(1.5))
    branches.step(ns_from_s(1.5), remote, still, by_margin=False)
    engine.run_until(ns_from_s(3.0))
    assert engine.totals().aborted == 1
    branches.take(engine, slice(0, 1), ns_from_s(6.0))
    branches.step(ns_from_s(6.0), remote, still, by_margin=False)
    other.run_until(ns_from_s(6.0))
    same(branches, 0, other)
    assert other.telemetry().link[0].open_flows == 0


def one_link(case: Case) -> bool:
    """One cluster of each kind, with a link that is always connected."""
    deployment = world_of(case).scenario.deployment
    counts = (len(deployment.prfaas), len(deployment.pd), len(deployment.links))
    return counts == (1, 1, 1) and deployment.links[0].setup_s == 0.0
