"""Links, predictions and the route at the door: by hand, and against the simulator's functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.decision import ClusterDecision
from prfaas_env.prediction import PathState, first_token_s
from prfaas_env.profiles.catalogue import load_model
from prfaas_env.scenarios import load_scenario
from prfaas_env.scenarios.models import Link
from prfaas_env.simulator.formulas import rdma_s
from prfaas_serving.choice import Cached, Chooser
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.decisions import DecisionHolder
from prfaas_serving.fleet import Fleet
from prfaas_serving.paths import LinkState, Paths


def link(nominal: float = 100.0) -> LinkState:
    return LinkState(Link(capacity_bps=nominal), nominal)


def test_backlog_counts_from_the_route_to_the_arrival() -> None:
    k = link(100.0)
    flow = k.routed(1000.0)
    assert k.backlog_bits(5.0) == 1000.0, "nothing is carried before the transfer begins"
    k.opened(flow, 10.0)
    assert k.backlog_bits(13.0) == pytest.approx(700.0)
    other = k.routed(500.0)
    k.opened(other, 13.0)
    assert k.backlog_bits(15.0) == pytest.approx(1000.0)
    k.closed(flow, 15.0, arrived=True)
    assert k.backlog_bits(15.0) == pytest.approx(500.0), "no more than what is open can be left"
    k.closed(other, 15.0, arrived=True)
    assert k.backlog_bits(15.0) == 0.0
    assert k.delivered_bits == 1500.0


def test_a_flow_closes_once_and_may_never_open() -> None:
    k = link()
    flow = k.routed(10.0)
    k.closed(flow, 0.0, arrived=False)
    k.closed(flow, 0.0, arrived=True)
    k.opened(flow, 0.0)
    assert (k.backlog_bits(0.0), k.open_flows, k.delivered_bits) == (0.0, 0, 0.0)


def test_observed_rate_is_bits_over_busy_time_and_never_above_nominal() -> None:
    k = link(100.0)
    assert k.observed_bps(0.0) == 100.0
    first, second = k.routed(100.0), k.routed(100.0)
    k.opened(first, 0.0)
    k.opened(second, 2.0)  # overlaps: summed transfer times would give 200 / 10
    k.closed(first, 4.0, arrived=True)
    k.closed(second, 8.0, arrived=True)
    assert k.observed_bps(8.0) == pytest.approx(200.0 / 8.0)
    third = k.routed(10_000.0)
    k.opened(third, 30.0)
    k.closed(third, 31.0, arrived=True)
    assert k.observed_bps(31.0) == 100.0
    assert k.observed_bps(1000.0) == 100.0, "old evidence is forgotten"
    k.measured_bps = 40.0
    assert k.observed_bps(1000.0) == 40.0


@given(st.lists(st.tuples(st.sampled_from("rocf"), st.integers(0, 5), st.floats(0, 5)), max_size=60))
def test_a_backlog_is_never_negative_and_ends_at_nothing(steps: list[tuple[str, int, float]]) -> None:
    k, now, flows = link(50.0), 0.0, []
    for what, which, wait in steps:
        now += wait
        if what == "r":
            flows.append(k.routed(100.0 * (which + 1)))
        elif flows:
            flow = flows[which % len(flows)]
            if what == "o":
                k.opened(flow, now)
            else:
                k.closed(flow, now, arrived=what == "c")
        assert 0.0 <= k.backlog_bits(now) <= sum(f.bits for f in flows if not f.done) + 1e-6
    for flow in flows:
        k.closed(flow, now, arrived=True)
    assert k.backlog_bits(now) == pytest.approx(0.0)
    assert k.open_flows == 0


WORKERS = [
    {"name": "r1", "url": "http://r1:1", "cluster": "prfaas0", "role": "prefill"},
    {"name": "l1", "url": "http://l1:1", "cluster": "pd0", "role": "prefill"},
    {"name": "d1", "url": "http://d1:1", "cluster": "pd0", "role": "decode"},
]


def parts(
    workers: list[dict[str, Any]] | None = None, **config: Any
) -> tuple[Chooser, Fleet, Paths, DecisionHolder]:
    resolved = Resolved(
        RouterConfig.model_validate(
            {
                "backend": "vllm_nixl",
                "workers": WORKERS if workers is None else workers,
                "decision": {"threshold_tokens": 1000},
            }
            | config
        )
    )
    fleet, paths = Fleet(resolved.config, "pd0", resolved.remote_clusters), Paths(resolved)
    for spec in resolved.config.workers:
        fleet.add(spec, "config").state = "up"
    holder = DecisionHolder(resolved.decision())
    return Chooser(fleet, paths, holder, None, False), fleet, paths, holder


def test_at_equality_local() -> None:
    chooser, *_ = parts()
    assert chooser.choose(1000, Cached(), 0.0).route.kind == "local"
    assert chooser.choose(1001, Cached(), 0.0).route.kind == "remote"


def test_the_cached_prefix_counts() -> None:
    """20,000 tokens with 19,000 cached and a threshold of 10,000: 1,000 new ones, local."""
    chooser, _, _, holder = parts()
    holder.set(ClusterDecision(threshold_tokens=10_000.0), "admin", "test")
    choice = chooser.choose(20_000, Cached({"pd0": 19_000}), 0.0)
    assert (choice.route.kind, choice.incremental_tokens, choice.had_tokens) == ("local", 1000, 19_000)
    assert chooser.choose(20_000, Cached({"prfaas0": 19_000}), 0.0).incremental_tokens == 20_000
    holder.set(ClusterDecision(threshold_tokens=10_000.0, cache_rule="abundant"), "admin", "test")
    assert chooser.choose(20_000, Cached({"prfaas0": 19_000}), 0.0).route.kind == "local"


def test_paths_without_workers_are_no_paths() -> None:
    chooser, fleet, _, _ = parts()
    fleet.workers["r1"].state = "down"
    choice = chooser.choose(50_000, Cached(), 0.0)
    assert (choice.route.kind, choice.route.reason) == ("local", "no_remote")
    fleet.workers["r1"].state = "up"
    fleet.workers["l1"].draining = True
    choice = chooser.choose(10, Cached(), 0.0)
    assert (choice.route.kind, choice.route.reason) == ("remote", "no_local")


def test_infinite_thresholds() -> None:
    chooser, _, _, holder = parts()
    holder.set(ClusterDecision(threshold_tokens=math.inf), "admin", "test")
    assert chooser.choose(10**6, Cached(), 0.0).route.kind == "local"
    holder.set(ClusterDecision(threshold_tokens=0.0), "admin", "test")
    assert chooser.choose(1, Cached(), 0.0).route.kind == "remote"


def test_predictions_are_the_simulators() -> None:
    """The profile of the paper: the same first-token time as its functions give from the same state."""
    _, fleet, paths, _ = parts()
    scenario, model = load_scenario("paper"), load_model("prfaas-1t")
    worker = fleet.workers["r1"]
    worker.begin(100.0, 3.0)
    worker.begin(100.0, 2.0)
    flow = paths.links["prfaas0"].routed(8e9)
    state = fleet.remote_prefill["prfaas0"].path_state(101.0)
    found = paths.remote_s("prfaas0", state, 18_000, 2_000, 500, 101.0)
    bits = 8.0 * model.kv.transfer_bytes(19_500)
    expected = first_token_s(
        PathState(2.0, 0, 1, 2.0, 8e9, 100e9),
        model.hardware["h200"].prefill.seconds(18_000, 2_000),
        bits,
        0.0,
        model.kv.n_layers,
        0.025,
    )
    assert found == expected
    assert flow.bits == 8e9
    n_bytes = model.kv.transfer_bytes(7_000)
    pd = scenario.deployment.pd[0]
    local = paths.local_s(fleet.local_prefill.path_state(101.0), 7_000, 1_000)
    assert (
        local
        == model.hardware["h20"].prefill.seconds(7_000, 1_000)
        + rdma_s(n_bytes, pd.rdma_bps, pd.rdma_latency_s)
        + 0.025
    )


def test_a_margin_moves_with_the_queues() -> None:
    chooser, fleet, _, holder = parts()
    holder.set(ClusterDecision(margin_s=0.0), "admin", "test")
    assert chooser.choose(40_000, Cached(), 100.0).route.kind == "remote"
    for _ in range(30):
        fleet.workers["r1"].begin(100.0, 5.0)
    assert chooser.choose(40_000, Cached(), 100.0).route.kind == "local"
    holder.set(ClusterDecision(margin_s=-math.inf), "admin", "test")
    assert chooser.choose(40_000, Cached(), 100.0).route.kind == "remote"
    holder.set(ClusterDecision(margin_s=math.inf), "admin", "test")
    fleet.workers["r1"].assigned.clear()
    assert chooser.choose(40_000, Cached(), 100.0).route.kind == "local"


def test_of_several_remote_clusters_the_earliest_finish() -> None:
    workers = [
        {"name": "a", "url": "http://a:1", "cluster": "prfaas0", "role": "prefill"},
        {"name": "b", "url": "http://b:1", "cluster": "prfaas1", "role": "prefill"},
        {"name": "l", "url": "http://l:1", "cluster": "pd0", "role": "prefill"},
        {"name": "d", "url": "http://d:1", "cluster": "pd0", "role": "decode"},
    ]
    scenario = load_scenario("two_regions")
    names = [p.name for p in scenario.deployment.prfaas]
    workers[0]["cluster"], workers[1]["cluster"] = names
    workers[2]["cluster"] = workers[3]["cluster"] = scenario.deployment.pd[0].name
    resolved = Resolved(
        RouterConfig.model_validate(
            {
                "backend": "vllm_nixl",
                "scenario": "two_regions",
                "workers": workers,
                "decision": {"threshold_tokens": 100},
            }
        )
    )
    fleet, paths = Fleet(resolved.config, resolved.pd.name, resolved.remote_clusters), Paths(resolved)
    for spec in resolved.config.workers:
        fleet.add(spec, "config").state = "up"
    chooser = Chooser(fleet, paths, DecisionHolder(resolved.decision()), None, False)
    first = chooser.choose(20_000, Cached(), 0.0).route.cluster
    busy = next(w for w in fleet if w.cluster == first)
    for _ in range(20):
        busy.begin(0.0, 10.0)
    other = chooser.choose(20_000, Cached(), 0.0).route.cluster
    assert {first, other} == set(names)


def test_transfer_deadlines() -> None:
    """3 x bits on the link / rate + floor."""
    _, _, paths, _ = parts()
    state = paths.links["prfaas0"]
    assert paths.transfer_deadline_s("prfaas0", 100e9, 3.0, 5.0, 0.0) == pytest.approx(8.0)
    flow = state.routed(400e9)
    state.opened(flow, 0.0)
    assert paths.transfer_deadline_s("prfaas0", 100e9, 3.0, 5.0, 0.0) == pytest.approx(17.0)
    assert paths.transfer_deadline_s("pd0", 800e9, 3.0, 5.0, 0.0) == pytest.approx(8.0)


def test_decisions_are_kept_with_their_history() -> None:
    holder = DecisionHolder(ClusterDecision(threshold_tokens=100.0))
    holder.set_override(ClusterDecision(margin_s=2.0), "look")
    assert (holder.margin_s, holder.version) == (2.0, 2)
    holder.set(ClusterDecision(threshold_tokens=50.0), "policy", "tick")
    assert holder.margin_s == 2.0, "an operator's word stays"
    assert holder.clear_override("done")
    assert not holder.clear_override("again")
    assert (holder.margin_s, holder.threshold_tokens) == (None, 50.0)
    assert [c.origin for c in holder.history] == ["config", "admin", "admin"]
