"""Several sites: what PD clusters share, worked out by hand, and what they do not."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import ENGINES
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.records import Route
from prfaas_env.simulator.run import EpisodeRun
from prfaas_env.simulator.world import World, draw_world
from prfaas_env.workload.requests import RequestTable

from .conftest import ALWAYS, Tiny, ns

PD = [{"name": "p"}, {"name": "q"}]
LINKS = [{"pd": "p"}, {"pd": "q"}]


def test_one_queue_for_all_and_a_link_for_each(tiny: Tiny) -> None:
    """One remote instance, 1 token per ms; two PD clusters with a link of 1 token per ms each.

    A (p, 2,000 tokens, at 0 s), B (q, 1,000, at 0.1 s) and C (p, 500, at 0.2 s) are prefilled first come, first
    served: to 2, 3 and 3.5 s. B crosses its own link at full rate, 3 to 4 s, while A is on the other one. C joins A
    there at 3.5 s, when A has 500 tokens to go: both at half rate, both through at 4.5 s.
    """
    engine = tiny.run(
        tiny.scenario(pd=PD, link=LINKS),
        [(0.0, 2000, 10), (0.1, 1000, 10), (0.2, 500, 10)],
        pd_of=[0, 1, 0],
        threshold=ALWAYS,
    )
    r = engine.records
    assert list(r.prefill_start_ns) == [0, ns(2.0), ns(3.0)]
    assert list(r.prefill_end_ns) == [ns(2.0), ns(3.0), ns(3.5)]
    assert list(r.transfer_end_ns) == [ns(4.5), ns(4.0), ns(4.5)]
    assert list(r.first_token_ns) == [ns(4.51), ns(4.01), ns(4.51)]
    assert engine.totals().egress_bits == pytest.approx((2500 * 8000, 1000 * 8000))


def test_a_tie_at_the_shared_queue_goes_to_the_lower_pd_cluster(tiny: Tiny) -> None:
    scenario = tiny.scenario(pd=PD, link=LINKS)
    engine = tiny.run(scenario, [(0.0, 1000, 1), (0.0, 500, 1)], pd_of=[0, 1], threshold=ALWAYS)
    assert list(engine.records.prefill_end_ns) == [ns(1.0), ns(1.5)]


def test_each_pd_cluster_takes_the_prfaas_cluster_that_it_reaches_first(tiny: Tiny) -> None:
    """PD p is near cluster a (latency 0) and far from b (2 s), PD q the other way round.

    Each of the first two goes to the near cluster. The third, at p, finds a busy for 1 s more: 1 + 1 + 1 s there,
    1 + 1 + 2 s at b, so it waits for a.
    """
    links = [
        {"prfaas": "a", "pd": "p"},
        {"prfaas": "b", "pd": "p", "latency_s": 2.0},
        {"prfaas": "a", "pd": "q", "latency_s": 2.0},
        {"prfaas": "b", "pd": "q"},
    ]
    scenario = tiny.scenario(prfaas=[{"name": "a"}, {"name": "b"}], pd=PD, link=links)
    engine = tiny.run(
        scenario,
        [(0.0, 1000, 1), (0.0, 1000, 1), (0.0, 1000, 1)],
        pd_of=[0, 0, 1],
        threshold=ALWAYS,
    )
    assert list(engine.records.transfer_end_ns) == [ns(2.0), ns(3.0), ns(2.0)]
    bits = 1000 * 8000
    assert engine.totals().egress_bits == pytest.approx((2 * bits, 0, 0, bits))


# --------------------------------------------------------------------- two sites apart are two single ones


def _twin(one: Scenario) -> Scenario:
    """Two copies of a single site that share nothing."""
    d = one.deployment.model_dump(mode="json")
    copies = {
        "prfaas": [{**d["prfaas"][0], "name": n} for n in ("a", "b")],
        "pd": [{**d["pd"][0], "name": n} for n in ("p", "q")],
        "links": [{**d["links"][0], "prfaas": a, "pd": p} for a, p in (("a", "p"), ("b", "q"))],
    }
    return Scenario.model_validate({**one.model_dump(mode="json"), "deployment": copies})


def _together(one: Scenario, worlds: list[World]) -> World:
    """Both worlds side by side in one."""
    n = [len(w.requests) for w in worlds]
    pd_of = np.repeat(np.arange(2), n)
    table = RequestTable.without_prefixes(
        *(
            np.concatenate([getattr(w.requests, c) for w in worlds])
            for c in ("arrival_ns", "input_tokens", "output_tokens")
        )
    )
    order = np.lexsort((pd_of, table.arrival_ns))
    links = tuple(w.links[0] for w in worlds)
    return World(_twin(one), 0, table.take(order), pd_of[order], links)


def _play(world: World, engine: str, spec: str) -> EpisodeRun:
    run = EpisodeRun(world, engine)
    policy = make_policy(spec)
    policy.reset(PolicyContext(world.scenario, world.schema, 0))
    ticks = ns_from_s(world.scenario.measure.horizon_s) // run.control_ns
    for tick in range(1, ticks + 1):
        run.engine.apply(policy.decide(run.engine.telemetry()))
        run.run_until(tick * run.control_ns)
    return run


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("spec", ["static", "dual_timescale", "earliest_finish_conversion"])
def test_two_sites_apart_equal_two_single_runs(engine: str, spec: str) -> None:
    """The same arrivals, request by request and counter by counter, with a policy that plans and converts nodes."""
    one = load_scenario(
        "paper",
        overrides=[
            "measure.horizon_s=240",
            "workload.arrivals.rate_rps=3.2",
            "workload.output_tokens.tokens=300",
            "deployment.links.0.capacity_bps=10 Gbps",
        ],
    )
    worlds = [draw_world(one, seed) for seed in (1, 2)]
    singles = [_play(w, engine, spec) for w in worlds]
    both = _play(_together(one, worlds), engine, spec)
    for i, single in enumerate(singles):
        mine = both.world.pd_of == i
        for column in (
            "route",
            "prefill_start_ns",
            "transfer_end_ns",
            "first_token_ns",
            "finish_ns",
            "status",
        ):
            found = getattr(both.engine.records, column)[mine]
            assert np.array_equal(found, getattr(single.engine.records, column)), column
    totals, parts = both.engine.totals(), [s.engine.totals() for s in singles]
    for name in ("arrived", "finished", "remote", "conversions", "invalid_moves", "remote_busy_ns"):
        assert getattr(totals, name) == sum(getattr(p, name) for p in parts), name
    assert totals.egress_bits == tuple(p.egress_bits[0] for p in parts)
    assert (both.engine.records.route == Route.REMOTE).any()
    if spec != "static":
        assert totals.conversions > 0
