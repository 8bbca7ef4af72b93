"""Fixed rules and plain earliest finish."""

from __future__ import annotations

import math

import pytest

from prfaas_env.decision import Move
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.theory import plan


def decision_of(spec, scenario, telemetry):
    policy = make_policy(spec)
    assert policy.constant
    policy.reset(PolicyContext(scenario, telemetry.schema, 0))
    decision = policy.decide(telemetry)
    assert policy.decide(telemetry) == decision
    assert all(c.move is Move.NONE for c in decision.clusters)
    return decision


@pytest.mark.parametrize(
    ("spec", "threshold", "margin"),
    [
        ("never", math.inf, None),
        ("always", 0.0, None),
        ("static:threshold_tokens=5000", 5000.0, None),
        ("static:threshold_tokens=inf", math.inf, None),
        ("uncached_threshold", 16.0, None),
        ("uncached_threshold:threshold_tokens=300", 300.0, None),
        ("earliest_finish", None, 0.0),
        ("earliest_finish:margin_s=-2.5", None, -2.5),
        ("earliest_finish:margin_s=inf", None, math.inf),
    ],
)
def test_one_decision_for_every_cluster(spec, threshold, margin, three_sites, make_telemetry) -> None:
    decision = decision_of(spec, three_sites, make_telemetry(three_sites))
    assert len(decision.clusters) == 3
    for cluster in decision.clusters:
        assert cluster.threshold_tokens == threshold
        assert cluster.margin_s == margin


@pytest.mark.parametrize("name", ["paper", "drift"])
def test_static_is_the_plan_of_a_scenario_that_starts_at_its_best_split(name, make_telemetry) -> None:
    scenario = load_scenario(name)
    optimum = plan(scenario)["prfaas"]
    assert (optimum.n_prefill, optimum.n_decode) == (3, 5)
    (cluster,) = decision_of("static", scenario, make_telemetry(scenario)).clusters
    assert cluster.threshold_tokens == optimum.threshold_tokens


def test_static_finds_the_threshold_of_the_paper(make_telemetry) -> None:
    scenario = load_scenario("paper")
    assert decision_of("static", scenario, make_telemetry(scenario)).clusters[0].threshold_tokens == 19_400


def test_static_follows_the_start_split(make_telemetry) -> None:
    """With two local prefill nodes the model balances at 15.5K (known from re-optimising figure 5)."""
    scenario = load_scenario("paper", overrides=["deployment.pd.0.n_prefill=2", "deployment.pd.0.n_decode=6"])
    assert decision_of("static", scenario, make_telemetry(scenario)).clusters[0].threshold_tokens == 15_500


@pytest.mark.parametrize(("name", "threshold"), [("homogeneous", math.inf), ("naive", 0.0)])
def test_static_with_one_path_only(name, threshold, make_telemetry) -> None:
    scenario = load_scenario(name)
    assert decision_of("static", scenario, make_telemetry(scenario)).clusters[0].threshold_tokens == threshold


def test_static_plans_each_cluster_by_itself(three_sites, make_telemetry) -> None:
    a, b, c = decision_of("static", three_sites, make_telemetry(three_sites)).clusters
    # a has 4.67 remote instances for 3 local ones, b has 1.33 for 2: b keeps longer prompts at home.
    assert 0 < a.threshold_tokens < b.threshold_tokens < 131_072
    assert c.threshold_tokens == math.inf


@pytest.mark.parametrize("name", ["static", "earliest_finish"])
def test_the_cache_rule_is_a_parameter(name) -> None:
    from prfaas_env.base import PrfaasError
    from prfaas_env.policy import PolicyContext, make_policy
    from prfaas_env.scenarios import load_scenario
    from prfaas_env.simulator.world import scenario_schema

    scenario = load_scenario("two_regions")
    for rule in ("scarce", "abundant"):
        policy = make_policy(f"{name}:cache_rule={rule}")
        policy.reset(PolicyContext(scenario, scenario_schema(scenario), 0))
        assert [c.cache_rule for c in policy.decide(None).clusters] == [rule, rule]
    with pytest.raises(PrfaasError, match="cache_rule is 'plenty'; allowed: scarce, abundant"):
        make_policy(f"{name}:cache_rule=plenty")
