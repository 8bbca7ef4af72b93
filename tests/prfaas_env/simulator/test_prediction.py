"""Prediction of first-token times by hand, and what margin routing makes of it at the instant of an arrival."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.decision import offload_by_margin
from prfaas_env.prediction import PathState, first_token_s, prefill_wait_s, transfer_end_s

S, MS = 1_000_000_000, 1_000_000
INF = math.inf
LOCAL, REMOTE = 1, 2


# ------------------------------------------------------------------------------------------ the formulas


@pytest.mark.parametrize(
    ("queued_work_s", "idle", "active", "residual_s", "wait_s"),
    [
        (0.0, 1, 1, 0.0, 0.0),
        (0.0, 2, 4, 0.0, 0.0),
        # all busy, nothing queues: the first residual
        (0.0, 0, 3, 1.5, 1.5),
        # all busy: the first residual and a share of the queue
        (6.0, 0, 3, 1.5, 3.5),
        # queued at this very instant before idle instances: they count too
        (6.0, 2, 3, 0.0, 2.0),
        (0.0, 0, 0, 0.0, INF),
        (4.0, 0, 0, 0.0, INF),
    ],
)
def test_wait_for_a_prefill_instance(queued_work_s, idle, active, residual_s, wait_s):
    assert prefill_wait_s(queued_work_s, idle, active, residual_s) == wait_s


@pytest.mark.parametrize(
    ("prefill_end_s", "bits", "backlog_bits", "observed_bps", "latency_s", "layers", "end_s"),
    [
        # everything after the prefill
        (2.0, 8e6, 0.0, 8e6, 0.0, 1, 3.0),
        # a quarter after the prefill
        (2.0, 8e6, 0.0, 8e6, 0.0, 4, 2.25),
        # the whole transfer takes longer than prefill and tail
        (2.0, 32e6, 0.0, 8e6, 0.0, 4, 4.0),
        # backlog before it
        (2.0, 8e6, 16e6, 8e6, 0.0, 4, 3.0),
        (2.0, 8e6, 4e6, 8e6, 0.0, 4, 2.25),
        # latency once
        (2.0, 8e6, 16e6, 8e6, 0.5, 4, 3.5),
        (2.0, 0.0, 0.0, 8e6, 0.0, 1, 2.0),
        (2.0, 8e6, 0.0, 0.0, 0.0, 1, INF),
        (INF, 8e6, 0.0, 8e6, 0.0, 1, INF),
    ],
)
def test_end_of_a_transfer(prefill_end_s, bits, backlog_bits, observed_bps, latency_s, layers, end_s):
    assert transfer_end_s(prefill_end_s, bits, backlog_bits, observed_bps, latency_s, layers) == end_s


def test_first_token_of_a_local_and_of_a_remote_path():
    # local: 1 s residual + 4 s / 2 + prefill 3 + hand-over 0.25 + step 0.5
    local = PathState(queued_work_s=4.0, idle_instances=0, active_instances=2, residual_s=1.0)
    assert first_token_s(local, 3.0, 8e6, 0.25, 4, 0.5) == 6.75
    # remote: 1.5 s of prefill, a quarter of 8e6 bits at 8e6: 1.75; backlog 24e6 + 8e6: 4.0; + 0.125 + 0.5
    remote = PathState(0.0, 1, 2, 0.0, backlog_bits=24e6, observed_bps=8e6)
    assert first_token_s(remote, 1.5, 8e6, 0.125, 4, 0.5) == 4.625
    assert first_token_s(PathState(0.0, 1, 2, 0.0, 0.0, 8e6), 1.5, 8e6, 0.125, 4, 0.5) == 2.375


ANY = st.floats(min_value=0.0, max_value=1e6) | st.just(INF)


@given(ANY, ANY)
def test_infinite_margins_decide_alone(remote_s, local_s):
    assert offload_by_margin(remote_s, local_s, -INF)
    assert not offload_by_margin(remote_s, local_s, INF)


@pytest.mark.parametrize(
    ("remote_s", "local_s", "margin_s", "offload"),
    [
        (2.0, 3.0, 0.0, True),
        (3.0, 3.0, 0.0, False),
        (2.0, 3.0, 1.0, False),
        (2.0, 3.0, 0.999, True),
        (4.0, 3.0, -1.0, False),
        (4.0, 3.0, -1.001, True),
        # no local instance left: remote whatever the finite margin; no remote capacity: local
        (4.0, INF, 30.0, True),
        (INF, 3.0, -30.0, False),
        (INF, INF, 0.0, False),
    ],
)
def test_remote_only_if_it_is_better_by_more_than_the_margin(remote_s, local_s, margin_s, offload):
    assert offload_by_margin(remote_s, local_s, margin_s) is offload


@given(
    work=st.floats(0, 1e4),
    idle=st.integers(0, 4),
    active=st.integers(1, 8),
    residual=st.floats(0, 100),
    backlog=st.floats(0, 1e12),
    observed=st.floats(1e3, 1e12),
    prefill=st.floats(0, 100),
    bits=st.floats(0, 1e11),
    layers=st.integers(1, 60),
    more=st.floats(0, 1e6),
)
def test_a_busier_path_is_never_predicted_sooner(
    work, idle, active, residual, backlog, observed, prefill, bits, layers, more
):
    idle = min(idle, active)
    base = first_token_s(
        PathState(work, idle, active, residual, backlog, observed), prefill, bits, 0.1, layers, 0.02
    )
    assert math.isfinite(base)
    assert base >= prefill
    worse = [
        (PathState(work + more, idle, active, residual, backlog, observed), prefill, bits),
        (PathState(work, idle, active, residual, backlog + more, observed), prefill, bits),
        (PathState(work, idle, active, residual, backlog, observed / (1 + more)), prefill, bits),
        (PathState(work, idle, active, residual, backlog, observed), prefill + more, bits),
        (PathState(work, idle, active, residual, backlog, observed), prefill, bits + more),
    ]
    for state, prefill_s, bits_ in worse:
        assert first_token_s(state, prefill_s, bits_, 0.1, layers, 0.02) >= base


# -------------------------------------------------------------------------- prediction and what then happens


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("capacity_bps", [2e6, 8e6, 800e6])
def test_prediction_is_exact_for_an_idle_deployment(tiny, layers, capacity_bps):
    scenario = tiny.scenario(
        kv={"n_layers": layers},
        link={"capacity_bps": capacity_bps, "latency_s": 0.03},
        pd={"rdma_latency_s": 0.002},
    )
    for tokens in (100, 1000, 7000):
        idle = PathState(0.0, 1, 1, 0.0)
        local = first_token_s(idle, 2e-3 * tokens, 8000.0 * tokens, 8000 * tokens / 8e9 + 0.002, layers, 0.01)
        engine = tiny.run(scenario, [(1, tokens, 3)], threshold=INF)
        assert engine.records.first_token_ns[0] == S + round(local * 1e9)
        wire = PathState(0.0, 1, 1, 0.0, 0.0, capacity_bps)
        remote = first_token_s(wire, 1e-3 * tokens, 8000.0 * tokens, 0.03, layers, 0.01)
        engine = tiny.run(scenario, [(1, tokens, 3)], threshold=0.0)
        predicted_ns = S + round(remote * 1e9)
        if layers == 1 or capacity_bps >= 8e6:
            assert engine.records.first_token_ns[0] == predicted_ns
        else:
            # a link slower than the prefill starts one layer late: the prediction leaves that out
            assert 0 <= engine.records.first_token_ns[0] - predicted_ns <= 1e6 * tokens / layers


def routes(engine):
    return engine.records.route.tolist()


def test_a_burst_of_equal_requests_is_split_over_both_paths(tiny):
    """Ten requests of 1,000 tokens at one instant, all instances idle, link 80e6 bit/s.

    With r sent and l kept so far: remote r + 1 + 0.1 + 0.01 s, local 2 l + 2 + 0.001 + 0.01 s.
    """
    scenario = tiny.scenario(link={"capacity_bps": 80e6})
    burst = [(3, 1000, 1)] * 10
    # 1.11 < 2.011: remote; 2.11: local; 2.11 < 4.011, 3.11 < 4.011: remote twice; 4.11: local; and so on
    split = tiny.run(scenario, burst, margin=0.0)
    assert routes(split) == [REMOTE, LOCAL, REMOTE, REMOTE, LOCAL, REMOTE, REMOTE, LOCAL, REMOTE, REMOTE]
    # 2.11: local; 2.11 < 4.011, 3.11 < 4.011: remote twice; 4.11: local; ...
    split = tiny.run(scenario, burst, margin=1.0)
    assert routes(split) == [LOCAL, REMOTE, REMOTE, LOCAL, REMOTE, REMOTE, LOCAL, REMOTE, REMOTE, LOCAL]
    assert routes(tiny.run(scenario, burst, margin=INF)) == [LOCAL] * 10
    assert routes(tiny.run(scenario, burst, margin=-INF)) == [REMOTE] * 10


def test_a_burst_splits_within_one_control_interval_too(tiny):
    """The same, 10 ms apart between two decisions: what has been routed since counts."""
    scenario = tiny.scenario(link={"capacity_bps": 80e6})
    engine = tiny.run(scenario, [(3 + k / 100, 1000, 1) for k in range(10)], margin=0.0)
    assert sorted(set(routes(engine))) == [LOCAL, REMOTE]
    assert 5 <= routes(engine).count(REMOTE) <= 8


def test_work_that_runs_and_queues_is_counted(tiny):
    # R0 (3,000 tokens) runs remotely 0..3, R1 (1,000) queues: work 1 s. At 1.0 R2 of 1,000: remote 2 + 1 + 1 + tail 0.1
    # = 4.11; local 2.011: stays. R3: local 2 + 2 = 4.011 + ..., still below; R4: local 6.011, remote 4.11: goes.
    scenario = tiny.scenario(link={"capacity_bps": 80e6})
    engine = tiny.engine(scenario, [(0, 3000, 1), (0.5, 1000, 1), (1, 1000, 1), (1, 1000, 1), (1, 1000, 1)])
    tiny.drive(engine, threshold=0.0)
    engine.run_until(S)
    tiny.drive(engine, margin=0.0)
    engine.run_to_end()
    assert routes(engine)[2:] == [LOCAL, LOCAL, REMOTE]


def test_backlog_of_the_link_is_counted(tiny):
    # Four remote instances: 4 x 1,000 tokens at 0 put 32e6 bits on a link of 8e6 bit/s. At 0.5 a request of 1,000:
    # all busy until 1.0; prefill 1.5 + ..., but the link needs (32e6 + 8e6) / 8e6 = 5 s: local 2.011 s is better.
    scenario = tiny.scenario(prfaas={"n_instances": 4}, kv={"n_layers": 4})
    engine = tiny.engine(scenario, [(0, 1000, 1)] * 4 + [(0.5, 1000, 1)])
    tiny.drive(engine, threshold=0.0)
    engine.run_until(S // 2)
    tiny.drive(engine, margin=-2.8)
    engine.run_to_end()
    # sent by 0.5 s: opened at 0.25, 2e6 bits; backlog 30e6: (30e6 + 8e6) / 8e6 = 4.75 + 0.01; minus 2.8: below 2.011
    assert routes(engine)[4] == REMOTE
    engine = tiny.engine(scenario, [(0, 1000, 1)] * 4 + [(0.5, 1000, 1)])
    tiny.drive(engine, threshold=0.0)
    engine.run_until(S // 2)
    tiny.drive(engine, margin=-2.7)
    engine.run_to_end()
    assert routes(engine)[4] == LOCAL


def test_prediction_reads_observed_capacity_not_the_true_one(tiny):
    """Nominal 80e6, true 0.8e6 until 30 s. A flow of 8e6 bits shows it (1..11 s); then the link is idle.

    At 20 s: remote at 0.8e6 is 1 + 10 s, local 2 s. Without that flow the nominal 80e6 is believed.
    """
    scenario = tiny.scenario(link={"capacity_bps": 80e6})
    trace = [[(0, 0.8e6), (30, 80e6)]]
    for rows, expected in ([(0, 1000, 1), (20, 1000, 1)], LOCAL), ([(20, 1000, 1)], REMOTE):
        engine = tiny.engine(scenario, rows, capacity=trace)
        tiny.drive(engine, threshold=0.0)
        engine.run_until(15 * S)
        tiny.drive(engine, margin=0.0)
        engine.run_to_end()
        assert routes(engine)[-1] == expected


def test_everything_goes_while_there_is_no_local_instance(tiny):
    scenario = tiny.scenario(pd={"n_prefill": 0})
    for rule in ({"threshold": INF}, {"threshold": 0.0}, {"margin": INF}, {"margin": 0.0}, {"margin": -INF}):
        assert routes(tiny.run(scenario, [(0, 1000, 1)] * 3, **rule)) == [REMOTE] * 3


def test_everything_stays_without_a_link(tiny):
    scenario = tiny.scenario(prfaas=[], link=[])
    for rule in ({"threshold": 0.0}, {"margin": -INF}):
        engine = tiny.run(scenario, [(0, 1000, 1)] * 2, **rule)
        assert routes(engine) == [LOCAL] * 2
        assert engine.totals().egress_bits == ()


def test_earliest_predicted_finish_among_several_prfaas_clusters(tiny):
    # cluster 1 has two instances. Requests of 1,000 at one instant, links 80e6 each: a tie goes to 0; then 1 (wait 1 s
    # against 0 s); then 1 again (1 s / 2 queued against 1 s); then both would wait 1 s: 0
    scenario = tiny.scenario(
        prfaas=[{"name": "prfaas0"}, {"name": "prfaas1", "n_instances": 2}],
        link=[{"prfaas": "prfaas0", "capacity_bps": 80e6}, {"prfaas": "prfaas1", "capacity_bps": 80e6}],
    )
    engine = tiny.run(scenario, [(1, 1000, 1)] * 4, threshold=0.0)
    assert engine.records.prfaas.tolist() == [0, 1, 1, 0]


def test_lowest_prfaas_id_on_a_tie_whatever_the_order_of_the_links(tiny):
    scenario = tiny.scenario(
        prfaas=[{"name": "prfaas0"}, {"name": "prfaas1"}],
        link=[{"prfaas": "prfaas1"}, {"prfaas": "prfaas0"}],
    )
    engine = tiny.run(scenario, [(1, 1000, 1)], threshold=0.0)
    assert engine.records.prfaas.tolist() == [0]
    # the egress is counted on the link it went over: the second one
    assert engine.totals().egress_bits == (0.0, 8e6)
