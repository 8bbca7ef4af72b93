"""Requests refused at the door: counted with their reason, and in no other figure."""

from __future__ import annotations

import math

import pytest

S = 1_000_000_000
NEVER, ALWAYS = math.inf, 0.0


def reasons(engine):
    """(over_limit, kv_capacity, queue_full)"""
    return engine.totals().reject_reasons


@pytest.mark.parametrize("where", ["model", "admission", "both"])
def test_case_a16_a_prompt_over_the_limit_is_rejected_and_never_cut(tiny, where):
    limits = {"model": {}, "admission": {}}
    for name in limits:
        if where in (name, "both"):
            limits[name] = {"max_input_tokens": 40_960}
    if where == "both":
        limits["admission"] = {"max_input_tokens": 50_000}
    scenario = tiny.scenario(pd={"n_prefill": 2}, slo={"ttft_s": 1000.0}, **limits)
    engine = tiny.run(scenario, [(1, 200_000, 10), (1, 40_960, 10), (1, 40_961, 10)], threshold=NEVER)
    assert reasons(engine) == (2, 0, 0)
    assert engine.records.status.tolist() == [3, 2, 3]
    assert engine.records.route.tolist() == [0, 1, 0]
    totals = engine.totals()
    assert (totals.arrived, totals.finished, totals.rejected, totals.good) == (3, 1, 2, 1)
    # waiting is that of the one request alone
    assert totals.waiting_ns == engine.records.first_token_ns[1] - S


def test_no_limit_no_rejection(tiny):
    engine = tiny.run(tiny.scenario(), [(1, 200_000, 1)], threshold=NEVER)
    assert reasons(engine) == (0, 0, 0)
    assert engine.records.service_ns.tolist() == [400 * S]


def test_a_prompt_that_no_instance_can_hold(tiny):
    scenario = tiny.scenario(decode={"kv_capacity_tokens": 1000, "kv_reserve_tokens": 100})
    engine = tiny.run(scenario, [(0, 900, 5), (0, 901, 5)], threshold=NEVER)
    assert reasons(engine) == (0, 1, 0)
    assert engine.records.status.tolist() == [2, 3]


def test_the_limit_on_input_is_named_before_the_kv_room(tiny):
    scenario = tiny.scenario(decode={"kv_capacity_tokens": 1000}, admission={"max_input_tokens": 500})
    engine = tiny.run(scenario, [(0, 5000, 5)], threshold=NEVER)
    assert reasons(engine) == (1, 0, 0)


def test_full_queue_of_the_chosen_cluster(tiny):
    # at most 2 waiting: R0 runs 0..2, R1 and R2 wait, R3 (0.3 s) is refused; R4 is remote, where nothing waits.
    # At 2.5 R1 runs, R2 waits: R5 is taken.
    scenario = tiny.scenario(admission={"max_queue_requests": 2})
    rows = [(0, 1000, 1), (0.1, 1000, 1), (0.2, 1000, 1), (0.3, 1000, 1), (0.4, 1001, 1), (2.5, 1000, 1)]
    engine = tiny.run(scenario, rows, threshold=1000.0)
    assert reasons(engine) == (0, 0, 1)
    assert engine.records.status.tolist() == [2, 2, 2, 3, 2, 2]
    # the remote queue has a limit of its own: R0 runs 1 s, two wait, the fourth is refused
    engine = tiny.run(scenario, [(k / 10, 1000, 1) for k in range(4)], threshold=ALWAYS)
    assert engine.records.status.tolist() == [2, 2, 2, 3]
    assert engine.totals().remote == 3


def test_rejections_are_seen_in_telemetry_and_not_among_the_arrivals(tiny):
    scenario = tiny.scenario(admission={"max_input_tokens": 1000})
    engine = tiny.engine(scenario, [(0.5, 1001, 1), (0.6, 1000, 1), (2.5, 1001, 1)])
    tiny.drive(engine, threshold=NEVER)
    engine.run_until(2 * S)
    pd = engine.telemetry().pd[0]
    assert pd.rejected_120s == 1
    assert pd.arrival_rate_120s_rps == 0.5
    assert pd.input_token_rate_120s_tps == 500
    assert engine.telemetry().recent_lengths_tokens[0].tolist() == [1000]
    engine.run_until(3 * S)
    assert engine.telemetry().pd[0].rejected_120s == 2


def test_a_world_of_rejections_only_is_done(tiny):
    scenario = tiny.scenario(admission={"max_input_tokens": 1000})
    engine = tiny.run(scenario, [(1, 2000, 1), (2, 2000, 1)], threshold=NEVER)
    assert engine.done
    assert engine.totals().waiting_ns == 0
