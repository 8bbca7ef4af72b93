"""Stationary laws of queueing theory: prefill as M/G/1, the link as processor sharing, decode as M/G/infinity."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas_env.decision import Decision
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.world import draw_world

N = 200_000
LENGTHS = {
    "fixed": {"kind": "fixed", "tokens": 1000},
    "two": {"kind": "empirical", "tokens": [200, 200, 200, 3400]},
    "lognormal": {"kind": "lognormal", "mu": 6.5, "sigma": 1.0, "min_tokens": 10, "max_tokens": 20_000},
}


def run(hand, lengths, rate_rps, threshold_tokens, **sections):
    """(records, arrival in s, input tokens, totals) of Poisson arrivals, everything local or everything remote."""
    base = hand.scenario(**sections)
    workload = {
        "kind": "synthetic",
        "arrivals": {"kind": "poisson", "rate_rps": rate_rps},
        "input_tokens": LENGTHS[lengths],
        "output_tokens": {"kind": "fixed", "tokens": 5},
    }
    scenario = Scenario.model_validate({**base.model_dump(mode="json"), "workload": workload})
    world = draw_world(scenario, 1, n_requests=N)
    engine = make_engine("compiled", world)
    engine.apply(Decision.same(1, threshold_tokens=threshold_tokens))
    engine.run_to_end()
    return engine.records, world.requests.arrival_ns, world.requests.input_tokens, engine.totals()


@pytest.mark.parametrize("lengths", sorted(LENGTHS))
def test_wait_for_one_prefill_instance_is_that_of_an_m_g_1_queue(hand, lengths):
    """Pollaczek and Khinchine: E[W] = rate E[S^2] / (2 (1 - load)), here at load 0.6."""
    mean_tokens = {"fixed": 1000.0, "two": 1000.0, "lognormal": 1070.0}[lengths]
    records, arrival, tokens, _ = run(
        hand, lengths, 0.6 / (2e-3 * mean_tokens), np.inf, decode={"slots": 10_000, "a_s": 0.001}
    )
    rate = N / (arrival[-1] / 1e9)
    service_s = 2e-3 * tokens
    load = rate * service_s.mean()
    wait_s = ((records.prefill_start_ns - arrival) / 1e9).mean()
    assert wait_s == pytest.approx(rate * (service_s**2).mean() / (2 * (1 - load)), rel=0.06)


@pytest.mark.parametrize("lengths", sorted(LENGTHS))
def test_transfers_on_one_link_are_those_of_processor_sharing(hand, lengths):
    """E[T] = E[S] / (1 - load) whatever the sizes are; prefill takes no time, so that flows arrive as requests do."""
    mean_tokens = {"fixed": 1000.0, "two": 1000.0, "lognormal": 1070.0}[lengths]
    records, arrival, tokens, totals = run(
        hand,
        lengths,
        0.6 / (1e-3 * mean_tokens),
        0.0,
        remote={"c1_s_per_token": 0.0},
        decode={"slots": 10_000, "a_s": 0.001},
    )
    rate = N / (arrival[-1] / 1e9)
    alone_s = 1e-3 * tokens
    load = rate * alone_s.mean()
    assert 0.55 < load < 0.65
    transfer_s = (records.transfer_end_ns - records.prefill_end_ns) / 1e9
    assert transfer_s.mean() == pytest.approx(alone_s.mean() / (1 - load), rel=0.05)
    # and in proportion to size: a long transfer is slowed down as much as a short one
    long = tokens > np.median(tokens) if lengths != "fixed" else np.ones(N, dtype=bool)
    assert transfer_s[long].mean() == pytest.approx(alone_s[long].mean() / (1 - load), rel=0.06)
    assert totals.egress_bits[0] == 8000.0 * tokens.sum()


def test_mean_batch_is_rate_times_residence(hand):
    """Little's law for decode with slots for all: sequences = rate x outputs x step."""
    records, arrival, _, totals = run(
        hand, "fixed", 20.0, np.inf, local={"c1_s_per_token": 1e-5}, decode={"slots": 10_000, "a_s": 0.5}
    )
    assert totals.decode_slots_used_ns == N * 5 * 500_000_000
    seconds = (records.finish_ns.max() - arrival[0]) / 1e9
    assert totals.decode_slots_used_ns / 1e9 / seconds == pytest.approx(20.0 * 2.5, rel=0.01)
