"""Both engines agree where hundreds of flows share a link: with room for all, at the border, and far beyond it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from prfaas_env.bench import scaled
from prfaas_env.decision import Decision
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator import compiled_engine, kernel
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.world import CapacityTrace, World, draw_world

from .cases import _compare_now, compare_records

N_REQUESTS = 250


def world_of(link_share: float, flow_cap_bps: float | None, seed: int) -> World:
    """The paper's deployment times ten; the link has a share of its capacity, and half of that for a while."""
    scenario: Scenario = scaled(load_scenario("paper"), 120, 6.0)
    deployment = scenario.deployment
    capacity_bps = deployment.links[0].capacity_bps * link_share
    link = deployment.links[0].model_copy(update={"capacity_bps": capacity_bps, "flow_cap_bps": flow_cap_bps})
    scenario = scenario.replace(deployment=deployment.model_copy(update={"links": (link,)}))
    world = draw_world(scenario, seed, n_requests=N_REQUESTS)
    times_ns = np.array([0, ns_from_s(3.0), ns_from_s(4.0)])
    traces = (CapacityTrace(times_ns, np.array([1.0, 0.5, 1.0]) * capacity_bps),)
    return World(world.scenario, world.seed, world.requests, world.pd_of, traces)


@pytest.mark.parametrize("flow_cap_bps", [None, 5e9])
@pytest.mark.parametrize("link_share", [1.0, 0.2, 0.1, 0.02])
def test_engines_agree_on_a_link_with_many_flows(link_share: float, flow_cap_bps: float | None) -> None:
    world = world_of(link_share, flow_cap_bps, seed=int(1000 * link_share))
    engines = [make_engine(name, world) for name in ("simpy", "compiled")]
    most = 0.0
    for tick in range(12):
        for engine in engines:
            engine.apply(Decision.same(1, threshold_tokens=0.0 if tick < 6 else 15_000.0))
            engine.run_until((tick + 1) * ns_from_s(1.0))
        assert _compare_now(*engines, when=f"tick {tick + 1}") is None
        most = max(most, engines[0].telemetry().link[0].open_flows)
    for engine in engines:
        engine.run_to_end()
    assert _compare_now(*engines, when="end") is None
    assert compare_records(engines[0].records, engines[1].records) is None
    assert most >= 30


def test_both_ways_of_sharing_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases above reach the short way (all caps fit) and the long one, in the interpreted kernel."""
    taken: Counter[tuple[float, bool]] = Counter()
    share = 0.0
    short_way = kernel.settle_changes

    def counted(Z, F, k):  # type: ignore[no-untyped-def]
        fits = short_way(Z, F, k)
        taken[share, bool(fits)] += 1
        return fits

    monkeypatch.setattr(kernel, "settle_changes", counted)
    names = [function.__name__ for function in compiled_engine._ENTRIES]
    plain = {name: getattr(kernel, name, None) for name in names}
    plain["encode_values"] = compiled_engine.encode_values
    monkeypatch.setattr(compiled_engine, "compiled_kernel", lambda: plain)
    for share in (1.0, 0.1, 0.02):
        engine = make_engine("compiled", world_of(share, None, seed=int(1000 * share)))
        engine.apply(Decision.same(1, threshold_tokens=0.0))
        engine.run_until(ns_from_s(8.0))
    assert taken[1.0, True] > 10 * taken[1.0, False]
    assert taken[0.1, True] > 20
    assert taken[0.1, False] > 20
    assert taken[0.02, False] > 10 * taken[0.02, True]
