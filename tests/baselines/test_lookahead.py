"""Lookahead planners: the cheapest candidate by hand, what the sampled one may not know, and what they gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from prfaas_baselines.lookahead import MARGINS_S, MOVES, Clairvoyant, Sampled
from prfaas_env.base import PrfaasError
from prfaas_env.bundle import ReloadablePolicy
from prfaas_env.cli_watch import frames, plan_film
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.env import PrfaasEnv
from prfaas_env.policy import Policy, PolicyContext, begin_episode, make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.compiled_engine import CompiledEngine
from prfaas_env.simulator.faults import FaultTrace
from prfaas_env.simulator.formulas import FloatArray, IntArray, ns_from_s
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import CapacityTrace, World, draw_world
from prfaas_env.vector import PrfaasVectorEnv
from prfaas_trainings.episodes import Job, Row, episode_runner

MODULE = "prfaas_baselines.lookahead"
CLAIRVOYANT, SAMPLED = f"{MODULE}:Clairvoyant", f"{MODULE}:Sampled"
SECOND = ns_from_s(1.0)


def start(policy: Policy, world: World, seed: int = 0) -> CompiledEngine:
    """An engine at the start of a world, and the policy with it."""
    engine = CompiledEngine(world)
    begin_episode(policy, PolicyContext(world.scenario, world.schema, seed), engine)
    return engine


def advance(
    engine: CompiledEngine, policy: Policy, until_s: int, note: Callable[[Decision], None] = lambda d: None
) -> None:
    """Let a policy decide each second up to `until_s`, which it does not decide at."""
    for second in range(engine.now_ns // SECOND, until_s):
        decision = policy.decide(engine.telemetry())
        note(decision)
        engine.apply(decision)
        engine.run_until((second + 1) * SECOND)


# ------------------------------------------------------------------ clairvoyant


def cost_ns(engine: CompiledEngine, first: Decision, then: Decision, ahead_s: int = 90) -> int:
    """Waiting over the look ahead under one decision for 5 s and another one after it, with whole copies."""
    other = CompiledEngine(engine.world)
    other.restore(engine.snapshot())
    now_ns, before = engine.now_ns, engine.totals()
    other.apply(first)
    other.run_until(now_ns + 5 * SECOND)
    other.apply(then)
    other.run_until(now_ns + ahead_s * SECOND)
    after = other.totals()
    lost = after.rejected + after.aborted - before.rejected - before.aborted
    penalty_s = engine.world.scenario.reward.reject_penalty_s
    return after.waiting_ns - before.waiting_ns + round(lost * penalty_s * 1e9)


def by_hand(engine: CompiledEngine) -> Decision:
    """The clusters one after the other; the first of the cheapest candidates."""
    legal = engine.telemetry().legal_moves
    clusters = [ClusterDecision(margin_s=0.0) for _ in legal]
    neutral = Decision(tuple(clusters))
    for pd in range(len(legal)):
        costs = {}
        for move in MOVES:
            for margin_s in MARGINS_S:
                if legal[pd][move]:
                    clusters[pd] = ClusterDecision(margin_s=margin_s, move=move)
                    costs[clusters[pd]] = cost_ns(engine, Decision(tuple(clusters)), neutral)
        clusters[pd] = min(costs, key=lambda c: costs[c])
    return Decision(tuple(clusters))


@pytest.mark.parametrize(
    ("name", "seed", "load"), [("drift", 1, 1.3), ("two_regions", 1, 2.5), ("prfaas_outage", 3, 1.8)]
)
def test_it_takes_the_cheapest_candidate(name: str, seed: int, load: float) -> None:
    """At every decision of two minutes under load the planner says what whole copies of the engine say."""
    scenario = load_scenario(name)
    world = draw_world(scenario.with_rate(load * scenario_rate(scenario)), seed, horizon_s=600.0)
    policy = Clairvoyant()
    engine = start(policy, world)
    advance(engine, policy, 150)
    found = set()
    for second in range(150, 271, 15):
        expected = by_hand(engine)
        assert policy.decide(engine.telemetry()) == expected
        found |= set(expected.clusters)
        engine.apply(expected)
        engine.run_until((second + 1) * SECOND)
        advance(engine, policy, second + 15)
    assert len(found) > 1


def scenario_rate(scenario: Scenario) -> float:
    arrivals = scenario.workload.arrivals  # type: ignore[union-attr]
    rate = arrivals.rate_rps
    return float(rate if isinstance(rate, float | int) else rate.mean)


def test_an_empty_system_is_left_alone() -> None:
    """All candidates cost nothing: no move and margin 0."""
    scenario = load_scenario("drift")
    world = draw_world(scenario, 0, horizon_s=10.0)
    empty = dataclasses.replace(
        world, requests=world.requests.take(np.zeros(0, dtype=np.int64)), pd_of=world.pd_of[:0]
    )
    for policy in (Clairvoyant(), Sampled()):
        engine = start(policy, empty)
        decisions: list[Decision] = []
        advance(engine, policy, 40, decisions.append)
        assert set(decisions) == {Decision.same(1, margin_s=0.0)}


def test_it_decides_each_interval_and_holds_the_margin_between() -> None:
    policy = Clairvoyant()
    engine = start(policy, draw_world(load_scenario("drift"), 1, horizon_s=200.0))
    assert len(policy.decision_times_s) == 0
    decisions: list[Decision] = []
    advance(engine, policy, 121, decisions.append)
    assert len(policy.decision_times_s) == 25
    assert (policy.decision_times_s > 0).all()
    for k, decision in enumerate(decisions):
        begun = decisions[k - k % 5].clusters[0]
        assert decision.clusters[0].margin_s == begun.margin_s
        assert k % 15 == 0 or decision.clusters[0].move is Move.NONE
    assert len(set(decisions)) > 2


class Replay:
    """Plays decisions from a list."""

    constant = False

    def __init__(self, decisions: list[Decision]) -> None:
        self._decisions = iter(decisions)

    def reset(self, context: PolicyContext) -> None: ...

    def decide(self, telemetry: object) -> Decision:
        return next(self._decisions)


@pytest.mark.parametrize(
    ("make", "name"), [(Clairvoyant, "drift"), (Sampled, "drift"), (Clairvoyant, "mooncake_pool")]
)
def test_planning_disturbs_nothing(make: type, name: str) -> None:
    """The same decisions without a planner give the same run."""
    world = draw_world(load_scenario(name), 5, horizon_s=240.0)
    policy = make()
    engine, alone = start(policy, world), CompiledEngine(world)
    decisions: list[Decision] = []
    advance(engine, policy, 240, decisions.append)
    advance(alone, Replay(decisions), 240)
    assert engine.totals() == alone.totals()
    assert np.array_equal(engine.telemetry().values, alone.telemetry().values)
    assert np.array_equal(engine.records.finish_ns, alone.records.finish_ns)
    assert engine.totals().conversions > 0


def test_better_than_earliest_finish_on_drift() -> None:
    """Three validation seeds; no order is ever illegal."""
    scenario = load_scenario("drift")
    means = {}
    for spec in ("earliest_finish", CLAIRVOYANT, f"{SAMPLED}:samples=1"):
        runs = [
            simulate(scenario, make_policy(spec), seed=1_000_000 + k, duration_s=1200.0) for k in range(3)
        ]
        assert all(run.metrics["invalid_moves"] == 0 for run in runs)
        means[spec] = sum(run.metrics["ttft_s"]["mean"] for run in runs) / 3
    clairvoyant, sampled = means[CLAIRVOYANT], means[f"{SAMPLED}:samples=1"]
    assert clairvoyant < sampled < means["earliest_finish"]
    assert clairvoyant < 0.8 * means["earliest_finish"]


# ------------------------------------------------------------------ what the sampled planner knows

UNTIL_S = 300
#: A flow has its own limit, so that a link far from full looks the same at many capacities.
HARD = ("deployment.links.0.jitter_s=0.2", "deployment.links.0.flow_cap_bps=8 Gbps", "faults.deadline_s=300")


class Spy(Sampled):
    """Keeps the costs of its last decision."""

    def _costs(self, now_ns: int, value: FloatArray, move: IntArray) -> IntArray:
        self.costs = super()._costs(now_ns, value, move)
        return self.costs


class ClairvoyantSpy(Clairvoyant):
    """The same for the one that knows everything."""

    def _costs(self, now_ns: int, value: FloatArray, move: IntArray) -> IntArray:
        self.costs = super()._costs(now_ns, value, move)
        return self.costs


def observed_world() -> World:
    """A drift hour whose link is far from full in its last half minute, with jitter and patient clients."""
    world = draw_world(load_scenario("drift", overrides=list(HARD)), 3, horizon_s=900.0)
    n = len(world.requests)
    rng = np.random.default_rng(0)
    link = CapacityTrace(np.array([0, 60 * SECOND]), np.array([30e9, 100e9]))
    return dataclasses.replace(
        world,
        links=(link,),
        give_up_ns=world.requests.arrival_ns + 800 * SECOND,
        jitter_ns=(rng.exponential(1.0, n) * 1e9).astype(np.int64),
    )


def with_another_future(world: World, engine: CompiledEngine) -> World:
    """What may be otherwise without anything having been seen so far.

    Outputs of requests that are not finished, who comes, how long clients wait, jitter of caches that are not there,
    capacity from now on and, as nothing wants it, already the present one, and failures to come.
    """
    now_ns, records, table = engine.now_ns, engine.records, world.requests
    rng = np.random.default_rng(1)
    n = len(table)
    arrived = int(np.searchsorted(table.arrival_ns, now_ns))
    order = np.concatenate((np.arange(arrived), arrived + rng.permutation(n - arrived)))
    mixed = table.take(order)
    open_ = records.finish_ns >= now_ns
    arrival_ns = table.arrival_ns.copy()
    arrival_ns[arrived:] = now_ns + (arrival_ns[arrived:] - now_ns) // 3
    outputs = np.where(open_, mixed.output_tokens + rng.integers(1, 2000, n), mixed.output_tokens)
    requests = dataclasses.replace(mixed, arrival_ns=arrival_ns, output_tokens=outputs)
    assert world.give_up_ns is not None
    assert world.jitter_ns is not None
    trace = world.links[0]
    link = CapacityTrace(
        np.concatenate((trace.time_ns, [now_ns - 10 * SECOND, now_ns + 20 * SECOND])),
        np.concatenate((trace.capacity_bps, [90e9, 2e9])),
    )
    return dataclasses.replace(
        world,
        requests=requests,
        links=(link,),
        give_up_ns=np.where(open_, np.maximum(arrival_ns, now_ns) + 7 * SECOND, world.give_up_ns),
        jitter_ns=world.jitter_ns + np.where(records.transfer_end_ns >= now_ns, 20 * SECOND, 0),
        faults=FaultTrace.of([(now_ns + 3 * SECOND, 1, 7, 0.0), (now_ns + 4 * SECOND, 0, 0, 0.0)]),
    )


def played(world: World, seed: int = 0) -> tuple[CompiledEngine, list[Decision], IntArray]:
    """A run up to `UNTIL_S`, its decisions with the one at that instant, and the costs behind that one."""
    policy = Spy(samples=2)
    engine = start(policy, world, seed)
    decisions: list[Decision] = []
    advance(engine, policy, UNTIL_S, decisions.append)
    decisions.append(policy.decide(engine.telemetry()))
    return engine, decisions, policy.costs


def true_costs(world: World, decisions: list[Decision]) -> IntArray:
    """What the clairvoyant planner finds after these decisions."""
    policy = ClairvoyantSpy()
    engine = start(policy, world)
    advance(engine, Replay(decisions), UNTIL_S)
    policy.decide(engine.telemetry())
    return policy.costs


def test_the_sampled_planner_reads_no_future_and_nothing_hidden() -> None:
    """Two worlds that look the same up to now: every decision, and every cost to the ns, is the same in both."""
    world = observed_world()
    engine, decisions, costs = played(world)
    other = with_another_future(world, engine)
    engine_too, decisions_too, costs_too = played(other)
    assert np.array_equal(engine.telemetry().values, engine_too.telemetry().values)
    assert len(costs) == 3 * len(MARGINS_S)
    assert len(set(costs.tolist())) > 5
    assert decisions == decisions_too
    assert np.array_equal(costs, costs_too)
    # each of the things that are otherwise would have mattered to one who knew it
    known = true_costs(world, decisions)
    for name in ("requests", "links", "give_up_ns", "jitter_ns", "faults"):
        changed = dataclasses.replace(world, **{name: getattr(other, name)})
        assert not np.array_equal(true_costs(changed, decisions), known), name


def test_another_policy_seed_draws_otherwise() -> None:
    world = observed_world()
    assert not np.array_equal(played(world, seed=0)[2], played(world, seed=1)[2])
    assert np.array_equal(played(world, seed=1)[2], played(world, seed=1)[2])


def test_prefix_pools_are_refused() -> None:
    scenario = load_scenario("mooncake_pool")
    with pytest.raises(
        PrfaasError, match=r"'mooncake_pool' has prefix pools .prefix_pool.; what a drawn prompt"
    ):
        simulate(scenario, Sampled(), seed=0, n_requests=10)
    simulate(scenario, Clairvoyant(), seed=0, n_requests=10)


# ------------------------------------------------------------------ where they run


def test_refused_outside_the_compiled_simulator() -> None:
    scenario = load_scenario("drift")
    world = draw_world(scenario, 0, horizon_s=10.0)
    with pytest.raises(PrfaasError, match=r"'clairvoyant' looks into the simulator.*found engine 'simpy'"):
        simulate(scenario, Clairvoyant(), seed=0, engine="simpy", duration_s=10.0)
    for make in (PrfaasEnv, PrfaasVectorEnv):
        with pytest.raises(
            PrfaasError, match="looks into the simulator and cannot be the reference of an env"
        ):
            make(scenario=scenario, reward="paired", reference=CLAIRVOYANT)
    with pytest.raises(PrfaasError, match="looks into the simulator and cannot run outside it"):
        ReloadablePolicy(CLAIRVOYANT)
    running = ReloadablePolicy("earliest_finish")
    assert "cannot run outside it" in str(running.reload(SAMPLED).error)
    policy = Clairvoyant()
    with pytest.raises(PrfaasError, match=r"reset.. comes before"):
        policy.decide(CompiledEngine(world).telemetry())
    policy.reset(PolicyContext(scenario, world.schema, 0))
    with pytest.raises(PrfaasError, match="'clairvoyant' looks into the simulator and was given none"):
        policy.decide(CompiledEngine(world).telemetry())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{CLAIRVOYANT}:samples=2", "unknown parameter 'samples'; known: interval_s, horizon_s"),
        (f"{CLAIRVOYANT}:interval_s=0", "policy 'clairvoyant': interval_s: Input should be greater than 0"),
        (f"{SAMPLED}:samples=0", "policy 'sampled': samples: Input should be greater than or equal to 1"),
        (f"{SAMPLED}:horizon_s=2", "horizon_s is 2; it must be at least interval_s, 5"),
    ],
)
def test_wrong_parameters(spec: str, message: str) -> None:
    with pytest.raises(PrfaasError) as error:
        make_policy(spec)
    assert message in str(error.value)


def test_an_interval_that_the_ticks_do_not_divide() -> None:
    with pytest.raises(
        PrfaasError, match=r"decides every 2.5 s; the scenario's control_interval_s 1 does not"
    ):
        simulate(load_scenario("drift"), Clairvoyant(interval_s=2.5), seed=0, duration_s=5.0)


def test_one_planner_plays_many_episodes() -> None:
    """Also of different scenarios, one after the other, as if each were its first."""
    policy = Sampled(samples=1)
    for name, seed in (("drift", 1), ("two_regions", 2), ("drift", 2), ("drift", 1)):
        scenario = load_scenario(name)
        again = simulate(scenario, policy, seed=seed, duration_s=90.0)
        alone = simulate(scenario, Sampled(samples=1), seed=seed, duration_s=90.0)
        assert again.end == alone.end


def test_comparisons_rebuild_them_in_every_process() -> None:
    scenario = load_scenario("drift", overrides=["measure.horizon_s=60"])
    jobs = [Job(scenario, Row(spec, spec), seed) for spec in (CLAIRVOYANT, SAMPLED) for seed in (1, 2)]
    with episode_runner(1) as here, episode_runner(2) as there:
        ours, theirs = here.run(jobs), there.run(jobs)
    assert [o.figures for o in ours] == [o.figures for o in theirs]


def test_watch_shows_them() -> None:
    scenario = load_scenario("drift")
    film = plan_film(scenario, 10.0, 0.0, 20.0)
    assert next(frames(scenario, CLAIRVOYANT, 1, "compiled", film)).ndim == 3
    with pytest.raises(PrfaasError, match="looks into the simulator"):
        next(frames(scenario, CLAIRVOYANT, 1, "simpy", film))
