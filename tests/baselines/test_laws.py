"""What holds for every baseline, in every deployment, whatever the telemetry says."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas_env.decision import Decision, Move
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios.loader import load_scenario

NAMES = (
    "never",
    "always",
    "static",
    "uncached_threshold",
    "dual_timescale",
    "earliest_finish",
    "earliest_finish_conversion",
    "hybrid_planner",
    "length_ttft_grid",
)
SCENARIOS = ("paper", "drift", "homogeneous", "naive", "three_sites")

counts = st.integers(0, 60)
shares = st.floats(0, 1)
flags = st.sampled_from([0.0, 1.0])


def groups(n: int, **fields):
    return st.lists(st.fixed_dictionaries(fields), min_size=n, max_size=n)


@st.composite
def readings(draw, scenario):
    """Keyword arguments of `make_telemetry` but for the time."""
    deployment = scenario.deployment
    n_pd = len(deployment.pd)
    pd = draw(
        groups(
            n_pd,
            prefill_instances=st.integers(0, 8),
            decode_instances=st.integers(0, 8),
            converting_instances=st.integers(0, 1),
            lengths_valid=flags,
            arrival_rate_5s_rps=st.floats(0, 50),
            arrival_rate_30s_rps=st.floats(0, 50),
            arrival_rate_120s_rps=st.floats(0, 50),
            prefill_queue_requests=counts,
            prefill_queue_work_s=st.floats(0, 1e4),
            prefill_busy_instances=st.integers(0, 8),
            prefill_residual_s=st.floats(0, 1e3),
            decode_queue_requests=counts,
            decode_sequences=counts,
            decode_slot_use=shares,
            output_valid=flags,
            output_tokens_mean=st.floats(0, 1e5),
            ttft_valid=flags,
            ttft_attainment=shares,
        )
    )
    prfaas = draw(
        groups(len(deployment.prfaas), prefill_instances=st.integers(0, 4), prefill_queue_requests=counts)
    )
    link = draw(
        groups(
            len(deployment.links),
            utilisation_5s=shares,
            observed_capacity_bps=st.floats(0, 1e11),
            retransmission_share=shares,
        )
    )
    some = st.lists(st.integers(1, 200_000), max_size=80)
    lengths = draw(st.lists(some, min_size=n_pd, max_size=n_pd))
    return {"pd": pd, "prfaas": prfaas, "link": link, "lengths": lengths}


@pytest.mark.parametrize("scenario_name", SCENARIOS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_decisions_are_whole_and_legal(name, scenario_name, three_sites, make_telemetry, data) -> None:
    scenario = three_sites if scenario_name == "three_sites" else load_scenario(scenario_name)
    policy = make_policy(name)
    policy.reset(PolicyContext(scenario, make_telemetry(scenario).schema, 0))
    for k in range(4):
        telemetry = make_telemetry(scenario, time_s=300.0 * k, **data.draw(readings(scenario)))
        decision = policy.decide(telemetry)
        assert isinstance(decision, Decision)
        assert len(decision.clusters) == len(scenario.deployment.pd)
        for cluster, legal in zip(decision.clusters, telemetry.legal_moves, strict=True):
            assert legal[cluster.move]
            if cluster.threshold_tokens is not None:
                assert cluster.threshold_tokens >= 0


@pytest.mark.parametrize("name", NAMES)
def test_the_same_readings_give_the_same_decisions(name, make_telemetry) -> None:
    """A second episode of the same object, and another object, decide alike: nothing is carried over."""
    scenario = load_scenario("drift")

    def run(policy):
        policy.reset(PolicyContext(scenario, make_telemetry(scenario).schema, 0))
        out = []
        for t in range(0, 450, 15):
            fields = {"lengths_valid": 1.0, "arrival_rate_30s_rps": 2.5, "decode_queue_requests": t % 100}
            fields |= {"output_valid": 1.0, "output_tokens_mean": 1800.0}
            link = {"observed_capacity_bps": 6e9 if t > 200 else 1e11, "utilisation_5s": 0.06}
            lengths = [[1_000 + 400 * k for k in range(100)]]
            out.append(
                policy.decide(make_telemetry(scenario, time_s=t, pd=fields, link=link, lengths=lengths))
            )
        return out

    policy = make_policy(name)
    first = run(policy)
    assert run(policy) == first
    assert run(make_policy(name)) == first
    if policy.constant:
        assert len(set(first)) == 1


def test_remote_nodes_that_all_fail_make_the_threshold_infinite(make_telemetry) -> None:
    scenario = load_scenario("paper")
    policy = make_policy("dual_timescale")
    telemetry = make_telemetry(scenario, time_s=0, prfaas={"prefill_instances": 0})
    policy.reset(PolicyContext(scenario, telemetry.schema, 0))
    (cluster,) = policy.decide(telemetry).clusters
    assert cluster.threshold_tokens == math.inf
    assert cluster.move is Move.NONE
