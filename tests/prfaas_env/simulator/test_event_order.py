"""Events of one instant, on ties made on purpose: the order of `events.Kind`, dispatch last."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.decision import Decision, Move
from prfaas_env.simulator.events import CLUSTER_BITS, INSTANCE_BITS, REQUEST_BITS, Kind, event_key

S, MS = 1_000_000_000, 1_000_000
NEVER, ALWAYS = math.inf, 0.0

KEY = st.tuples(
    st.sampled_from(list(Kind)),
    st.integers(0, 2**CLUSTER_BITS - 1),
    st.integers(0, 2**INSTANCE_BITS - 1),
    st.integers(0, 2**REQUEST_BITS - 1),
    st.integers(0, 100),
)


@given(KEY, KEY)
def test_keys_sort_like_their_parts(a, b):
    assert (event_key(*a) < event_key(*b)) == (a < b)


def test_kinds_in_the_order_of_the_design():
    order = [
        "DECISION",
        "CAPACITY",
        "FAULT",
        "PREFILL_END",
        "FLOW_END",
        "HANDOVER_END",
        "DECODE",
        "CONVERSION",
        "GIVE_UP",
        "DEADLINE",
        "ARRIVAL",
    ]
    assert [k.name for k in sorted(Kind) if k not in (Kind.FLOW_OPEN, Kind.SETTLE)] == order
    assert max(Kind) is Kind.SETTLE


def test_decision_comes_before_an_arrival_of_its_instant(tiny):
    engine = tiny.engine(tiny.scenario(), [(1, 1000, 1), (2, 1000, 1)])
    tiny.drive(engine, threshold=NEVER)
    engine.run_until(S)
    engine.apply(Decision.same(1, threshold_tokens=ALWAYS))
    engine.run_until(2 * S)
    engine.apply(Decision.same(1, threshold_tokens=NEVER))
    engine.run_to_end()
    assert engine.records.route.tolist() == [2, 1]


def test_run_until_leaves_what_lies_at_its_instant(tiny):
    engine = tiny.engine(tiny.scenario(), [(1, 1000, 1)])
    tiny.drive(engine, threshold=NEVER)
    for at_ns, arrived in [(S - 1, 0), (S, 0), (S + 1, 1)]:
        engine.run_until(at_ns)
        assert engine.now_ns == at_ns
        assert engine.totals().arrived == arrived
    # prefill ends at 3 s, first token and finish at 3.011 s
    engine.run_until(3_011_000_000)
    assert engine.totals().finished == 0
    assert not engine.done
    engine.run_until(3_011_000_001)
    assert engine.totals().finished == 1
    assert engine.done


def test_prefill_end_frees_the_instance_for_an_arrival_of_the_same_instant(tiny):
    engine = tiny.run(tiny.scenario(), [(0, 1000, 1), (2, 500, 1)], threshold=NEVER)
    assert engine.records.prefill_start_ns.tolist() == [0, 2 * S]
    # but one that waits is served first
    engine = tiny.run(tiny.scenario(), [(0, 1000, 1), (1, 1500, 1), (2, 500, 1)], threshold=NEVER)
    assert engine.records.prefill_start_ns.tolist() == [0, 2 * S, 5 * S]


def test_flow_that_ends_as_the_link_goes_down_has_ended(tiny):
    trace = [[(0, 8e6), (2, 0), (10, 8e6)]]
    engine = tiny.run(tiny.scenario(), [(0, 1000, 1), (0, 1000, 1)], threshold=ALWAYS, capacity=trace)
    # A's flow fills 1..2 s; B's prefill ends at 2 s and its flow waits for the link
    assert engine.records.transfer_end_ns.tolist() == [2 * S, 11 * S]


def test_flow_that_opens_as_another_ends_gets_the_whole_link(tiny):
    engine = tiny.run(tiny.scenario(), [(0, 1000, 1), (0, 1000, 1)], threshold=ALWAYS)
    assert engine.records.transfer_end_ns.tolist() == [2 * S, 3 * S]


def test_decode_finish_frees_the_slot_for_a_hand_over_of_the_same_instant(tiny):
    scenario = tiny.scenario(decode={"slots": 1}, pd={"n_prefill": 2})
    # R0 joins at 2.001 and ends at 2.301, when R1 is handed over
    engine = tiny.run(scenario, [(0, 1000, 30), (0.3, 1000, 1)], threshold=NEVER)
    assert engine.records.finish_ns[0] == engine.records.transfer_end_ns[1] == 2_301_000_000
    assert engine.records.decode_join_ns[1] == 2_301_000_000


@pytest.mark.parametrize("local_first", [True, False])
def test_hand_overs_of_one_instant_queue_in_order_of_request(tiny, local_first):
    scenario = tiny.scenario(decode={"slots": 1})
    if local_first:
        # R0 local until 0.8004. R1 local: prefill 0.8..1.8, hand-over 0.5 ms.
        # R2 remote: prefill 0.2005..1.0005, flow 0.8 s.
        rows = [(0, 400, 1), (0.1, 500, 1), (0.2005, 800, 1)]
        tie = 1_800_500_000
    else:
        # R1 remote: prefill 0.1..1.1, flow until 2.1. R2 local: prefill 1.0995..2.0995, hand-over 0.5 ms
        rows = [(0, 400, 1), (0.1, 1000, 1), (1.0995, 500, 1)]
        tie = 2_100_000_000
    engine = tiny.run(scenario, rows, threshold=500.0)
    assert engine.records.transfer_end_ns.tolist()[1:] == [tie, tie]
    assert engine.records.decode_join_ns.tolist()[1:] == [tie, tie + 10 * MS]


def test_flows_that_end_together_queue_in_order_of_request(tiny):
    scenario = tiny.scenario(decode={"slots": 1}, prfaas={"n_instances": 3})
    engine = tiny.run(scenario, [(0, 1000, 1)] * 3, threshold=ALWAYS)
    assert engine.records.transfer_end_ns.tolist() == [4 * S] * 3
    assert engine.records.decode_join_ns.tolist() == [4 * S, 4 * S + 10 * MS, 4 * S + 20 * MS]


@pytest.mark.parametrize(("arrival_ns", "local"), [(7 * S - 1, False), (7 * S, True)])
def test_conversion_end_comes_before_an_arrival_of_its_instant(tiny, arrival_ns, local):
    # no local prefill until the instance ordered at 5 s has switched, at 7 s; before that everything must go
    scenario = tiny.scenario(pd={"n_prefill": 0, "n_decode": 2})
    engine = tiny.run(
        scenario, [(arrival_ns / 1e9, 1000, 1)], threshold=NEVER, moves={5: Move.DECODE_TO_PREFILL}
    )
    assert engine.records.route.tolist() == [1 if local else 2]
    assert engine.records.prefill_start_ns.tolist() == [arrival_ns]


def test_conversion_that_takes_no_time_serves_an_arrival_of_its_instant(tiny):
    scenario = tiny.scenario(pd={"n_decode": 2}, conversion={"switch_s": 0.0})
    engine = tiny.run(
        scenario, [(4, 1000, 1), (5, 1000, 1)], threshold=NEVER, moves={5: Move.DECODE_TO_PREFILL}
    )
    assert engine.records.prefill_start_ns.tolist() == [4 * S, 5 * S]


def test_decode_finish_comes_before_the_drain_limit_of_its_instant(tiny):
    # joins at 2.01 s, 599 steps of 10 ms: ends at 8 s, as the limit of 3 s from 5 s is reached
    scenario = tiny.scenario(pd={"n_decode": 2}, conversion={"drain_limit_s": 3.0})
    engine = tiny.engine(scenario, [(0.009, 1000, 599), (0.01, 10, 10_000)])
    tiny.drive(engine, threshold=NEVER)
    engine.run_until(5 * S)
    # both instances have one sequence: the lowest id, that of R0, converts
    engine.apply(Decision.same(1, threshold_tokens=NEVER, move=Move.DECODE_TO_PREFILL))
    engine.run_until(9 * S)
    assert engine.records.finish_ns[0] == 8 * S
    assert engine.records.attempts[0] == 1


def test_arrivals_of_one_instant_go_by_cluster_then_request(tiny):
    """Two PD clusters share one PrfaaS instance: its queue is in order of (cluster, request)."""
    scenario = tiny.scenario(pd=[{"name": "pd0"}, {"name": "pd1"}], link=[{"pd": "pd0"}, {"pd": "pd1"}])
    engine = tiny.run(scenario, [(1, 100, 1), (1, 200, 1), (1, 300, 1)], threshold=ALWAYS, pd_of=[0, 0, 1])
    assert engine.records.prefill_start_ns.tolist() == [S, S + 100 * MS, S + 300 * MS]
    assert engine.records.transfer_end_ns.tolist() == [S + 200 * MS, S + 500 * MS, S + 900 * MS]
