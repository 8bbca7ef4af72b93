"""The router sees and decides what the simulator sees and decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios import load_scenario
from tests.serving.parity import (
    OVER_HTTP,
    REPLAYED,
    SLOW_LINK,
    SLOWED,
    Within,
    decided_alike,
    differences,
    over_http,
    replay,
    scenario_file,
    simulated,
)
from tests.serving.virtual import run_virtually


@pytest.mark.parametrize(
    ("more", "tolerances"), [("", REPLAYED), (SLOW_LINK, SLOWED)], ids=["steady", "slow_link"]
)
def test_the_same_events_give_the_same_readings_and_decisions(
    more: str, tolerances: dict[str, Within], tmp_path: Path
) -> None:
    """Four minutes at the door, in queues, on the link and in decode, with the threshold of the paper's scheduler."""
    file = scenario_file(tmp_path, more)
    scenario = load_scenario(file)
    world, sim, records = simulated(scenario, "dual_timescale", seed=3, seconds=240)
    live = replay(file, world, sim, records)
    assert differences(sim, live, tolerances) == {}
    assert [t.recent_lengths_tokens[0].tolist() for t in live.readings] == [
        t.recent_lengths_tokens[0].tolist() for t in sim.readings
    ]
    assert [(t.conversion_tick, t.legal_moves) for t in live.readings] == [
        (t.conversion_tick, t.legal_moves) for t in sim.readings
    ]
    policy = make_policy("dual_timescale")
    policy.reset(PolicyContext(scenario, world.schema, 0))
    live.decisions = [policy.decide(t) for t in live.readings]
    assert decided_alike(sim, live) >= 0.95


def test_a_difference_is_found(tmp_path: Path) -> None:
    file = scenario_file(tmp_path)
    world, sim, records = simulated(load_scenario(file), "static:threshold_tokens=9000", seed=3, seconds=60)
    live = replay(file, world, sim, records)
    index = world.schema.index["pd0.prefill_queue_work_s"]
    for reading in live.readings[10:]:
        reading.values[index] += 0.001
    assert set(differences(sim, live, REPLAYED)) == {"pd0.prefill_queue_work_s"}
    live.decisions = list(sim.decisions)
    assert decided_alike(sim, live) == 1.0
    other = make_policy("static:threshold_tokens=10000")
    other.reset(PolicyContext(load_scenario(file), world.schema, 0))
    live.decisions[0] = other.decide(sim.readings[0])
    assert decided_alike(sim, live) == pytest.approx(59 / 60)


def over_router(policy: str, file: Path, seconds: int, time_scale: float) -> None:
    """Both ways, compared; in virtual time, so that a busy machine makes no difference."""
    world, sim, _ = simulated(load_scenario(file), policy, seed=3, seconds=seconds)
    live = run_virtually(over_http(file, world, policy, seconds, time_scale))
    assert live.failed == 0
    assert len(live.ttft_s) == len(sim.ttft_s) == len(world.requests)
    assert len(live.readings) >= 0.95 * seconds
    assert differences(sim, live, OVER_HTTP) == {}
    assert decided_alike(sim, live) >= 0.95
    assert np.mean(live.ttft_s) == pytest.approx(np.mean(sim.ttft_s), rel=0.1)


@pytest.mark.parametrize("policy", ["dual_timescale", "earliest_finish"])
def test_the_same_requests_through_a_router_and_fake_workers(policy: str, tmp_path: Path) -> None:
    over_router(policy, scenario_file(tmp_path), 60, 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("time_scale", [0.1, 1.0])
@pytest.mark.parametrize("policy", ["dual_timescale", "earliest_finish"])
def test_four_minutes_through_a_router_and_fake_workers(
    policy: str, time_scale: float, tmp_path: Path
) -> None:
    over_router(policy, scenario_file(tmp_path), 240, time_scale)
