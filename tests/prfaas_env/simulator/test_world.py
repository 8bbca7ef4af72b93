"""The drawn world: the same for every policy, in the order in which an engine handles it."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.simulator.world import draw_world, links_of

S = 1_000_000_000


def equal(a, b):
    return (
        np.array_equal(a.requests.arrival_ns, b.requests.arrival_ns)
        and np.array_equal(a.requests.input_tokens, b.requests.input_tokens)
        and np.array_equal(a.requests.output_tokens, b.requests.output_tokens)
        and np.array_equal(a.pd_of, b.pd_of)
        and all(
            np.array_equal(x.time_ns, y.time_ns) and np.array_equal(x.capacity_bps, y.capacity_bps)
            for x, y in zip(a.links, b.links, strict=True)
        )
    )


def two_by_two(**changes):
    deployment = {
        "prfaas": [
            {"name": "a", "hardware": "h200", "n_instances": 2},
            {"name": "b", "hardware": "h200", "n_instances": 2},
        ],
        "pd": [
            {"name": "x", "hardware": "h20", "n_prefill": 2, "n_decode": 2, "arrival_share": 3},
            {"name": "y", "hardware": "h20", "n_prefill": 2, "n_decode": 2},
        ],
        "links": [
            {"prfaas": p, "pd": d, "capacity_bps": 10e9}
            for p, d in (("b", "x"), ("a", "y"), ("a", "x"), ("b", "y"))
        ],
    }
    return load_scenario("drift").replace(deployment=deployment, **changes)


def test_the_seed_is_the_world():
    scenario = load_scenario("drift")
    assert equal(draw_world(scenario, 5), draw_world(scenario, 5))
    assert not equal(draw_world(scenario, 5), draw_world(scenario, 6))


def test_what_cannot_touch_the_workload_does_not_change_it():
    """Deployment, link and costs of conversion leave arrivals and lengths as they are."""
    base = draw_world(load_scenario("drift"), 5)
    other = draw_world(
        load_scenario(
            "drift",
            deployment="naive",
            overrides=[
                "conversion.switch_s=60",
                "link_capacity={kind: constant}",
                "transport.pipelining=false",
            ],
        ),
        5,
    )
    for name in ("arrival_ns", "input_tokens", "output_tokens"):
        assert np.array_equal(getattr(base.requests, name), getattr(other.requests, name))


def test_a_longer_horizon_begins_with_the_shorter():
    scenario = load_scenario("drift")
    short, long = draw_world(scenario, 5, horizon_s=600), draw_world(scenario, 5, horizon_s=3600)
    n = len(short.requests)
    assert 0 < n < len(long.requests)
    assert short.requests.arrival_ns[-1] < 600 * S <= long.requests.arrival_ns[n]
    for name in ("arrival_ns", "input_tokens", "output_tokens"):
        assert np.array_equal(getattr(short.requests, name), getattr(long.requests, name)[:n])
    assert len(draw_world(scenario, 5, n_requests=37).requests) == 37


def test_requests_in_order_of_arrival_then_cluster():
    overrides = ["workload={kind: trace, file: 'bundled:azure_llm_2023_conv.csv', format: azure, end_s: 60}"]
    scenario = load_scenario("paper", overrides=overrides).replace(deployment=two_by_two().deployment)
    world = draw_world(scenario, 1, whole_trace=True)
    keys = list(zip(world.requests.arrival_ns.tolist(), world.pd_of.tolist(), strict=True))
    assert keys == sorted(keys)
    assert set(world.pd_of) == {0, 1}


def test_arrivals_are_shared_by_weight():
    world = draw_world(two_by_two(), 3, n_requests=20_000)
    # three quarters of 20,000; standard deviation 0.3%
    assert (world.pd_of == 0).mean() == pytest.approx(0.75, abs=0.012)


def test_constant_capacity():
    trace = draw_world(load_scenario("paper"), 0).links[0]
    assert trace.time_ns.tolist() == [0]
    assert trace.capacity_bps.tolist() == [100e9]


@pytest.mark.parametrize(
    ("at_s", "rates", "times_ns", "capacity"),
    [
        # nominal until the first step
        ([1.5, 3], [5e9, 0], [0, 1_500_000_000, 3 * S], [100e9, 5e9, 0]),
        ([0, 3], [5e9, 7e9], [0, 3 * S], [5e9, 7e9]),
    ],
)
def test_steps(at_s, rates, times_ns, capacity):
    law = {"kind": "steps", "at_s": at_s, "capacity_bps": rates}
    trace = draw_world(load_scenario("paper").replace(link_capacity=law), 0).links[0]
    assert trace.time_ns.tolist() == times_ns
    assert trace.capacity_bps.tolist() == capacity


def test_regimes_are_independent_per_link_and_cover_the_run():
    world = draw_world(two_by_two(), 8)
    assert len(world.links) == 4
    law = world.scenario.link_capacity.capacity_bps
    for trace in world.links:
        assert trace.time_ns[0] == 0
        assert (np.diff(trace.time_ns) > 0).all()
        assert set(trace.capacity_bps) <= set(law.values)
    assert len({tuple(t.time_ns[:5].tolist()) for t in world.links}) == 4


def test_links_of_a_cluster_in_order_of_their_prfaas_cluster():
    deployment = two_by_two().deployment
    assert links_of(deployment, "x") == [2, 0]
    assert links_of(deployment, "y") == [1, 3]
