"""Instances that fail or slow down, clients that give up, deadlines: what is lost and what goes on, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.decision import Move
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.faults import (
    FaultTrace,
    draw_faults,
    draw_give_up_ns,
    least_over_time,
    random_spells,
)
from prfaas_env.simulator.formulas import NEVER_NS
from prfaas_env.simulator.records import Status
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import draw_world

S, MS = 1_000_000_000, 1_000_000
NEVER, ALWAYS = math.inf, 0.0
REMOTE, PD = 0, 1

# Remote 1 token per ms, local 1 per 2 ms, link 1 token per ms, local hand-over 1 token per us, decode step 10 ms.
# Cluster 0 is the PrfaaS cluster, cluster 1 the PD cluster (instance 0 prefills, 1 decodes).


def seconds(engine, name):
    values = getattr(engine.records, name)
    return [None if t == NEVER_NS else t / S for t in values.tolist()]


def balance(engine):
    t = engine.totals()
    return (t.arrived, t.finished, t.rejected, t.aborted)


# --------------------------------------------------------------------------------------------- failures


def test_a_lost_prefill_is_done_again_by_the_same_cluster(tiny):
    # down from 0.4 to 3 s: the prefill of 0..1 s is lost and runs 3..4 s; the flow takes 1 s more
    faults = [(0.4, REMOTE, 0, 0.0), (3.0, REMOTE, 0, 1.0)]
    scenario = tiny.scenario(pd={"n_prefill": 0, "min_prefill": 0})
    engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS, faults=faults)
    assert seconds(engine, "prefill_start_ns") == [3.0]
    assert seconds(engine, "transfer_end_ns") == [5.0]
    assert engine.records.attempts.tolist() == [2]
    assert balance(engine) == (1, 1, 0, 0)
    assert engine.totals().egress_bits == (8e6,)


def test_another_instance_takes_it_at_once(tiny):
    engine = tiny.run(
        tiny.scenario(prfaas={"n_instances": 2}),
        [(0, 1000, 1)],
        threshold=ALWAYS,
        faults=[(0.4, REMOTE, 0, 0.0)],
    )
    assert seconds(engine, "prefill_start_ns") == [0.4]
    assert seconds(engine, "transfer_end_ns") == [2.4]


def test_what_was_sent_of_a_lost_prefill_was_sent(tiny):
    # 4 layers: from 0.25 s the flow runs at 8e6 bit/s; at 0.5 s 2e6 bits are over; then the whole again
    engine = tiny.run(
        tiny.scenario(prfaas={"n_instances": 2}, kv={"n_layers": 4}, link={"capacity_bps": 80e6}),
        [(0, 1000, 1)],
        threshold=ALWAYS,
        faults=[(0.5, REMOTE, 0, 0.0)],
    )
    assert engine.totals().egress_bits == (10e6,)
    assert engine.records.sent_bytes.tolist() == [1_250_000]
    # prefill 0.5..1.5, of which the last quarter at 80e6 bit/s is 25 ms
    assert seconds(engine, "transfer_end_ns") == [1.525]


def test_a_cache_that_is_prefilled_is_safe(tiny):
    # the prefill is over at 1 s; the instance fails while the flow runs
    engine = tiny.run(tiny.scenario(), [(0, 1000, 1)], threshold=ALWAYS, faults=[(1.5, REMOTE, 0, 0.0)])
    assert seconds(engine, "transfer_end_ns") == [2.0]
    assert engine.records.attempts.tolist() == [1]


def test_an_outage_of_the_prfaas_cluster_falls_back_to_local(tiny):
    # at 0.5 s the only remote instance goes: the running prompt and the one behind it go to the local instance,
    # and so does what arrives while it is down; after the repair at 20 s prompts go remote again
    faults = [(0.5, REMOTE, 0, 0.0), (20.0, REMOTE, 0, 1.0)]
    requests = [(0, 1000, 1), (0.2, 1000, 1), (10, 1000, 1), (21, 1000, 1)]
    engine = tiny.run(tiny.scenario(), requests, threshold=ALWAYS, faults=faults)
    assert seconds(engine, "prefill_start_ns") == [0.5, 2.5, 10.0, 21.0]
    assert seconds(engine, "prefill_end_ns") == [2.5, 4.5, 12.0, 22.0]
    assert engine.records.attempts.tolist() == [2, 2, 1, 1]
    # by margin as well, whatever the margin says
    again = tiny.run(tiny.scenario(), requests, margin=-math.inf, faults=faults)
    assert seconds(again, "prefill_end_ns") == [2.5, 4.5, 12.0, 22.0]
    assert again.totals().egress_bits == (8e6,)


def test_an_outage_of_local_prefill_goes_remote(tiny):
    faults = [(0.5, PD, 0, 0.0)]
    engine = tiny.run(
        tiny.scenario(), [(0, 1000, 1), (0.2, 1000, 1), (3, 1000, 1)], threshold=NEVER, faults=faults
    )
    assert seconds(engine, "prefill_start_ns") == [0.5, 1.5, 3.0]
    assert engine.telemetry().pd[0].prefill_instances == 0


def test_a_queue_without_any_way_out_waits_for_the_repair(tiny):
    scenario = tiny.scenario(prfaas=[], link=[])
    faults = [(0.5, 0, 0, 0.0), (4.0, 0, 0, 1.0)]
    engine = tiny.run(scenario, [(0, 1000, 1), (0.2, 1000, 1)], threshold=NEVER, faults=faults)
    # the first is a second attempt, behind the one that was queued
    assert seconds(engine, "prefill_start_ns") == [6.0, 4.0]
    assert engine.records.attempts.tolist() == [2, 1]


def test_sequences_of_a_lost_decode_instance_are_prefilled_again(tiny):
    # prefill 0..2 s, hand-over 1 ms; two tokens by 2.0225 s, when the instance fails: 1,002 tokens are prefilled
    # again, 2.004 s, and the other instance decodes the 8 that are left
    scenario = tiny.scenario(pd={"n_decode": 2})
    engine = tiny.run(scenario, [(0, 1000, 10)], threshold=NEVER, faults=[(2.0225, PD, 1, 0.0)])
    first_s = 2.011
    assert seconds(engine, "first_token_ns") == [first_s]
    assert seconds(engine, "finish_ns") == [pytest.approx(2.0225 + 2.004 + 0.001002 + 0.08, abs=1e-9)]
    assert engine.records.attempts.tolist() == [2]
    assert balance(engine) == (1, 1, 0, 0)


def test_a_slow_instance(tiny):
    # half speed from 1 s on: what runs is not touched, what starts then takes twice as long
    engine = tiny.run(
        tiny.scenario(), [(0.5, 1000, 1), (3, 1000, 1)], threshold=NEVER, faults=[(1.0, PD, 0, 0.5)]
    )
    assert seconds(engine, "prefill_end_ns") == [2.5, 7.0]
    # an idle instance at full speed goes before it
    engine = tiny.run(
        tiny.scenario(pd={"n_prefill": 2}), [(3, 1000, 1)], threshold=NEVER, faults=[(1.0, PD, 0, 0.5)]
    )
    assert seconds(engine, "prefill_end_ns") == [5.0]


def test_a_slow_instance_decodes_at_its_speed_from_then_on(tiny):
    # ten steps of 10 ms from 2.001 s; at 2.051 s five are done, the others take 20 ms each
    engine = tiny.run(tiny.scenario(), [(0, 1000, 10)], threshold=NEVER, faults=[(2.051, PD, 1, 0.5)])
    assert seconds(engine, "finish_ns") == [2.151]


def test_an_instance_that_fails_while_it_drains_has_drained(tiny):
    # two prefills of 4..8 s; at 5 s instance 0 is to become a decode instance and drains; at 6 s it goes down: its
    # prompt waits for instance 1, and it switches from then on, 2 s; at 12 s it is back
    scenario = tiny.scenario(pd={"n_prefill": 2, "n_decode": 1})
    engine = tiny.engine(
        scenario, [(4.0, 2000, 1), (4.0, 2000, 1)], faults=[(6.0, PD, 0, 0.0), (12.0, PD, 0, 1.0)]
    )
    tiny.drive(engine, threshold=NEVER, moves={5.0: Move.PREFILL_TO_DECODE})
    seen = []
    for at_s in (5.5, 7.0, 8.5, 13.0):
        engine.run_until(round(at_s * S))
        group = engine.telemetry().pd[0]
        seen.append((group.prefill_instances, group.decode_instances, group.converting_instances))
    assert seen == [(1, 1, 1), (1, 1, 1), (1, 1, 0), (1, 2, 0)]
    engine.run_to_end()
    assert seconds(engine, "prefill_start_ns") == [8.0, 4.0]
    assert engine.records.attempts.tolist() == [2, 1]


def test_down_instances_count_in_neither_role(tiny):
    scenario = tiny.scenario(pd={"n_prefill": 2, "n_decode": 3}, prfaas={"n_instances": 3})
    faults = [(1.0, PD, 0, 0.0), (1.0, PD, 4, 0.0), (2.0, REMOTE, 2, 0.0), (5.0, PD, 0, 1.0)]
    engine = tiny.engine(scenario, [], faults=faults)
    seen = []
    for at_s in (1, 2, 3, 6):
        engine.run_until(at_s * S)
        t = engine.telemetry()
        seen.append((t.pd[0].prefill_instances, t.pd[0].decode_instances, t.prfaas[0].prefill_instances))
    assert seen == [(2, 3, 3), (1, 2, 3), (1, 2, 2), (2, 2, 2)]


# ------------------------------------------------------------------------------- clients and deadlines


STAGES = {
    # where a request is at 3.5 s: (arrival of it and of those before it, instances, settings)
    "prefill queue": ([(3.0, 1000, 9), (3.1, 1000, 9)], {}),
    "prefill": ([(0.0, 1000, 9), (3.1, 1000, 9)], {}),
    "flow": ([(0.0, 1000, 9), (2.0, 1000, 9)], {}),
    "set-up": ([(0.0, 1000, 9), (2.0, 1000, 9)], {"link": {"setup_s": 0.9, "idle_s": 0.001}}),
    "hand-over": ([(0.0, 1000, 9), (1.4, 1000, 9)], {"link": {"latency_s": 0.2}}),
    "decode queue": (
        [(0.0, 1000, 900), (1.4, 1000, 9)],
        {"decode": {"a_s": 0.01, "slots": 1, "source": "-"}},
    ),
    "decode": ([(0.0, 1000, 9), (1.0, 1000, 999)], {}),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_gives_up_frees_what_it_holds(tiny, stage):
    """In every stage: it is counted once, nothing of it is left, and the next one runs as if it had not been there."""
    requests, changes = STAGES[stage]
    scenario = tiny.scenario(**changes)
    engine = tiny.run(scenario, [*requests, (50, 1000, 9)], threshold=ALWAYS, give_up=[60.0, 3.5, 60.0])
    assert engine.records.status.tolist() == [Status.FINISHED, Status.ABORTED, Status.FINISHED]
    assert engine.records.abort_ns.tolist() == [NEVER_NS, 3_500_000_000, NEVER_NS]
    assert balance(engine) == (3, 2, 0, 1)
    alone = tiny.run(scenario, [requests[0], (50, 1000, 9)], threshold=ALWAYS)
    assert engine.records.finish_ns[2] == alone.records.finish_ns[1]
    t = engine.telemetry()
    for field in (
        "prefill_queue_requests",
        "prefill_queue_tokens",
        "decode_queue_requests",
        "decode_queue_tokens",
    ):
        assert getattr(t.pd[0], field) == 0
    assert t.pd[0].decode_sequences == t.prfaas[0].prefill_busy_instances == 0
    assert t.link[0].backlog_bytes == t.link[0].open_flows == 0
    sent_bits = 8 * int(engine.records.sent_bytes.sum())
    assert engine.totals().egress_bits[0] == pytest.approx(sent_bits, abs=16)


def test_waiting_ends_when_a_client_gives_up(tiny):
    # waits from 0 to 0.7 s; the integral of waiting requests is 0.7 s
    engine = tiny.run(tiny.scenario(), [(0, 1000, 9)], threshold=ALWAYS, give_up=[0.7])
    assert engine.totals().waiting_ns == 700_000_000
    assert engine.totals().remote_busy_ns == 700_000_000


def test_a_client_that_comes_too_late_changes_nothing(tiny):
    engine = tiny.run(tiny.scenario(), [(0, 1000, 9)], threshold=ALWAYS, give_up=[2.09])
    # finish and cancel at one instant: the finish was first
    assert seconds(engine, "finish_ns") == [2.09]
    assert balance(engine) == (1, 1, 0, 0)


def test_deadline_for_the_first_token(tiny):
    # first tokens would come at 2.01, 3.01, ... s after 0; a deadline of 2.5 s stops the second, whose prefill queued
    scenario = tiny.scenario(faults={"deadline_s": 2.5})
    engine = tiny.run(scenario, [(0, 1000, 900), (0, 1000, 9), (9, 1000, 9)], threshold=ALWAYS)
    assert engine.records.status.tolist() == [Status.FINISHED, Status.ABORTED, Status.FINISHED]
    assert seconds(engine, "abort_ns")[1] == 2.5
    # decoding may go on beyond it
    assert seconds(engine, "finish_ns")[0] == pytest.approx(11.0)


def test_given_up_requests_miss_the_objective(tiny):
    scenario = tiny.scenario(slo={"ttft_s": 10.0})
    engine = tiny.run(
        scenario, [(0, 1000, 9), (3, 1000, 9)], threshold=ALWAYS, give_up=[50.0, 3.5], until=20.0
    )
    assert engine.telemetry().pd[0].ttft_attainment == 0.5


def test_metrics_show_given_up_requests_as_never_served():
    paper = load_scenario("paper").replace(faults={"deadline_s": 1.0})
    from prfaas_env.policy import make_policy

    episode = simulate(paper, make_policy("never"), seed=1, duration_s=300.0)
    metrics = episode.metrics
    assert metrics["requests"]["aborted"] > 100
    assert metrics["ttft_open_inf_s"]["p99"] is None
    assert metrics["ttft_s"]["p99"] <= 1.01


# ------------------------------------------------------------------------------------------------ drawing


def test_spells_that_overlap():
    assert least_over_time([(1, 4, 0.5), (2, 3, 0.0), (6, 7, 0.25), (7, 8, 0.25)]) == [
        (1 * S, 0.5),
        (2 * S, 0.0),
        (3 * S, 0.5),
        (4 * S, 1.0),
        (6 * S, 0.25),
        (8 * S, 1.0),
    ]
    assert least_over_time([]) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 20), st.sampled_from([0.0, 0.25, 0.5])), max_size=12
    )
)
@settings(max_examples=200, derandomize=True)
def test_least_over_time_is_the_least_at_every_instant(rows):
    spells = [(float(a), float(a + n), v) for a, n, v in rows]
    changes = least_over_time(spells)
    assert all(x[1] != y[1] for x, y in zip([(0, 1.0), *changes], changes, strict=False))
    for second in range(60):
        expected = min([v for a, b, v in spells if a <= second < b], default=1.0)
        found = [v for t, v in changes if t <= second * S]
        assert (found[-1] if found else 1.0) == expected


def test_failures_are_drawn_by_instance():
    law = {"mtbf_s": 2000.0, "mttr_s": 100.0, "clusters": ["pd0"]}
    small = load_scenario("paper").replace(faults={"random_failures": [law]})
    more = small.replace(faults={"random_failures": [law, {"mtbf_s": 900.0, "mttr_s": 9.0, "speed": 0.5}]})
    a, b = draw_faults(small, 3, 20_000.0), draw_faults(more, 3, 20_000.0)
    assert set(a.cluster.tolist()) == {1}
    assert set(b.cluster.tolist()) == {0, 1}
    # the times at which instances go down are those of the first law in both
    down = {(t, n) for t, n, v in zip(a.time_ns, a.instance, a.speed, strict=True) if v == 0}
    assert down == {
        (t, n)
        for t, c, n, v in zip(b.time_ns, b.cluster, b.instance, b.speed, strict=True)
        if v == 0 and c == 1
    }
    # about 8 instances x 20,000 s / 2,100 s
    assert 50 < len(down) < 110
    assert (np.diff(b.time_ns) >= 0).all()
    assert np.array_equal(draw_faults(small, 3, 20_000.0).time_ns, a.time_ns)
    assert len(draw_faults(load_scenario("paper"), 3, 20_000.0)) == 0


def test_random_spells_do_not_overlap_and_have_the_means():
    spells = random_spells(100.0, 10.0, 0.0, 1e6, np.random.default_rng(0))
    ends = [0.0, *(b for _, b, _ in spells)]
    assert all(a > before for before, (a, _, _) in zip(ends, spells, strict=False))
    assert np.mean([b - a for a, b, _ in spells]) == pytest.approx(10.0, rel=0.05)
    assert len(spells) == pytest.approx(1e6 / 110, rel=0.05)


def test_clients_give_up_by_request():
    scenario = load_scenario("paper").replace(faults={"cancel_mean_s": 30.0})
    arrival_ns = np.arange(5000) * S
    short, long = (draw_give_up_ns(scenario, arrival_ns[:n], 4) for n in (100, 5000))
    assert np.array_equal(short, long[:100])
    assert ((long - arrival_ns) / S).mean() == pytest.approx(30.0, rel=0.05)
    assert (long > arrival_ns).all()
    assert draw_give_up_ns(load_scenario("paper"), arrival_ns, 4) is None
    assert draw_world(scenario, 1).give_up_ns is not None


def test_a_trace_of_faults_is_in_order():
    trace = FaultTrace.of([(5, 1, 0, 0.0), (3, 0, 2, 0.5), (5, 0, 1, 1.0)])
    assert list(zip(trace.time_ns, trace.cluster, trace.instance, trace.speed, strict=True)) == [
        (3, 0, 2, 0.5),
        (5, 0, 1, 1.0),
        (5, 1, 0, 0.0),
    ]
    assert len(FaultTrace.none()) == 0


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"instance_faults": [{"cluster": "x", "at_s": 1, "duration_s": 1}]}, "no cluster 'x'; known: "),
        ({"random_failures": [{"clusters": ["y"], "mtbf_s": 1, "mttr_s": 1}]}, "no cluster 'y'"),
        (
            {"instance_faults": [{"cluster": "pd0", "instances": [8], "at_s": 1, "duration_s": 1}]},
            r"has instances 0\.\.7, found 8",
        ),
        (
            {"instance_faults": [{"cluster": "pd0", "instances": [1, 1], "at_s": 1, "duration_s": 1}]},
            "different",
        ),
        (
            {"instance_faults": [{"cluster": "pd0", "at_s": 1, "duration_s": 1, "speed": 1e-9}]},
            "speed must be 0",
        ),
        ({"link_outages": [{"link": 1, "at_s": 1, "duration_s": 1}]}, "there are 1 links"),
    ],
)
def test_a_fault_of_something_that_is_not_there_is_refused(faults, words):
    with pytest.raises(ValueError, match=words):
        load_scenario("paper").replace(faults=faults)
