"""Rules where there are several clusters: every PD cluster is decided for by itself, on its part of what is shared."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prfaas_baselines.dual_timescale import DualTimescale
from prfaas_baselines.fixed import Static
from prfaas_baselines.planning import Planner, PlanningParameters
from prfaas_env.policy import PolicyContext, make_policy, policy_names
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.sites import sites_of
from prfaas_env.theory import plan_sites

SEVERAL = ("two_regions", "shared_prfaas")
SHARED = load_scenario("shared_prfaas")
RULES = [name for name in policy_names() if name not in ("ppo", "learned", "best_rule")]


def started(policy, scenario):
    policy.reset(PolicyContext(scenario, scenario_schema(scenario), 0))
    return policy


@pytest.mark.parametrize("name", SEVERAL)
def test_static_takes_the_plan_of_each_cluster(name: str, make_telemetry) -> None:
    scenario = load_scenario(name)
    decision = started(Static(), scenario).decide(make_telemetry(scenario))
    for cluster, site, plan in zip(decision.clusters, sites_of(scenario), plan_sites(scenario), strict=True):
        if plan.optimum.n_prefill == site.cluster.n_prefill:  # `plan` finds the split of the scenario best
            assert cluster.threshold_tokens == plan.optimum.threshold_tokens
    assert len({c.threshold_tokens for c in decision.clusters}) == len(decision.clusters)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_runs_and_keeps_every_cluster_going(name: str, rule: str) -> None:
    """No PD cluster is left behind: each one's requests get their first token, but for the rules that drown."""
    scenario = load_scenario(name, overrides=["measure.horizon_s=600"])
    episode = simulate(scenario, make_policy(rule), seed=5)
    assert episode.metrics["invalid_moves"] == 0
    if rule in ("never", "always", "uncached_threshold"):
        return
    world, records = episode.world, episode.records
    for i in range(len(scenario.deployment.pd)):
        mine = (world.pd_of == i) & (records.first_token_ns < 600e9)
        arrival = world.requests.arrival_ns
        early = (world.pd_of == i) & (arrival < 500e9)
        assert mine[early].mean() > 0.99
        ttft_s = (records.first_token_ns[mine] - arrival[mine]) / 1e9
        assert 1.0 < ttft_s.mean() < 10.0
        assert 0.2 < (records.route[mine] == 2).mean() < 0.9  # both paths are used


def test_a_surge_in_one_cluster_moves_its_threshold_alone(make_telemetry) -> None:
    policy = started(DualTimescale(), SHARED)
    policy.decide(make_telemetry(SHARED, time_s=0.0, conversion_tick=False))
    before = policy.decide(make_telemetry(SHARED, time_s=1.0, conversion_tick=False))
    local_surge = [{}, {"prefill_queue_requests": 40}, {}]
    after = policy.decide(make_telemetry(SHARED, time_s=6.0, pd=local_surge, conversion_tick=False))
    pairs = list(zip(before.clusters, after.clusters, strict=True))
    assert pairs[1][1].threshold_tokens == pytest.approx(pairs[1][0].threshold_tokens / 1.25)
    for k in (0, 2):
        assert pairs[k][1].threshold_tokens == pytest.approx(pairs[k][0].threshold_tokens)


def test_each_cluster_orders_its_own_move(make_telemetry) -> None:
    """The middle cluster's decode is full and queues; the others are quiet."""
    policy = started(DualTimescale(), SHARED)
    full = {
        "decode_slot_use": 1.0,
        "decode_queue_requests": 200,
        "arrival_rate_30s_rps": 3.0,
        "output_valid": 1.0,
        "output_tokens_mean": 2_000.0,
    }
    moves = []
    for time_s in (0.0, 30.0, 60.0, 90.0):
        decision = policy.decide(make_telemetry(SHARED, time_s=time_s, pd=[{}, full, {}]))
        moves.append([c.move.name for c in decision.clusters])
    assert ["NONE", "PREFILL_TO_DECODE", "NONE"] in moves
    assert all(row[0] == row[2] == "NONE" for row in moves)


def test_shares_by_measured_arrivals(make_telemetry) -> None:
    """Doors see 1, 1 and 2 req/s where the plan said 5 : 3 : 2: the small cluster gets half."""
    rates = [{"arrival_rate_120s_rps": r} for r in (1.0, 1.0, 2.0)]
    telemetry = make_telemetry(SHARED, pd=rates, prfaas={"prefill_queue_requests": 12})

    def planners(**parameters):
        return [Planner(SHARED, s, PlanningParameters(**parameters)) for s in sites_of(SHARED)]

    measured = planners(share_basis="measured")
    assert [p.read(telemetry).n_prfaas for p in measured] == pytest.approx([2.0, 2.0, 4.0])
    assert [p.remote_waiting(telemetry) for p in measured] == pytest.approx([3.0, 3.0, 6.0])
    assert [p.read(telemetry).n_prfaas for p in planners()] == pytest.approx([4.0, 2.4, 1.6])
    quiet = make_telemetry(SHARED, pd=[{"arrival_rate_120s_rps": 0.1}] * 3)
    assert [p.read(quiet).n_prfaas for p in measured] == pytest.approx([4.0, 2.4, 1.6])  # too few to tell


def test_a_failed_prfaas_cluster_leaves_the_other_path(make_telemetry) -> None:
    regions = load_scenario("two_regions")
    site = sites_of(regions)[1]
    planner = Planner(regions, site, PlanningParameters())
    lost = [{"prefill_instances": 0}, {}]
    reading = planner.read(make_telemetry(regions, prfaas=lost))
    assert reading.n_prfaas == pytest.approx(1.0)
    assert math.isfinite(planner.threshold(reading))
    both = [{"prefill_instances": 0}] * 2
    assert planner.threshold(planner.read(make_telemetry(regions, prfaas=both))) == math.inf


def test_idle_first_token_takes_the_best_of_all_paths(make_telemetry) -> None:
    """From the west the near 20 Gbps link (1 ms) beats the far one of 8 Gbps (35 ms), unless its cluster is gone."""
    regions = load_scenario("two_regions")
    planner = Planner(regions, sites_of(regions)[1], PlanningParameters())
    tokens = 27_486
    lengths = [[tokens]] * 2
    bits = 8 * (182_378_824 + 17_280 * tokens)
    (near,) = planner.idle_ttft_s(planner.read(make_telemetry(regions, lengths=lengths)))
    assert near == pytest.approx(1.633 + bits / 57 / 20e9 + 0.001 + 0.025, abs=1e-9)
    gone = make_telemetry(regions, lengths=lengths, prfaas=[{}, {"prefill_instances": 0}])
    (far,) = planner.idle_ttft_s(planner.read(gone))
    assert far == pytest.approx(1.633 + bits / 57 / 8e9 + 0.035 + 0.025, abs=1e-9)
    assert np.isfinite(far)
