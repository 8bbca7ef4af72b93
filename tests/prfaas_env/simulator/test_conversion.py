"""Conversions: what is legal, who converts, how it drains, switches and warms up, by hand."""

from __future__ import annotations

import math

import pytest

from prfaas_env.decision import ClusterDecision, Decision, Move

S, MS = 1_000_000_000, 1_000_000
NEVER, ALWAYS = math.inf, 0.0
TO_DECODE, NONE, TO_PREFILL = Move.PREFILL_TO_DECODE, Move.NONE, Move.DECODE_TO_PREFILL


def roles(engine, pd=0):
    """(prefill, decode, converting) instances now."""
    group = engine.telemetry().pd[pd]
    return (int(group.prefill_instances), int(group.decode_instances), int(group.converting_instances))


def order(engine, move, threshold=NEVER):
    engine.apply(Decision.same(1, threshold_tokens=threshold, move=move))


# ---------------------------------------------------------------------------------------------- legality


def test_legal_at_multiples_of_the_slow_clock_from_the_first_on(tiny):
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2, "n_decode": 2}), [])
    seen = {}
    for second in range(11):
        engine.run_until(second * S)
        seen[second] = engine.legal()[0]
        assert engine.telemetry().conversion_tick == (second in (5, 10))
        assert engine.telemetry().legal_moves == engine.legal()
        order(engine, NONE)
    assert {t for t, legal in seen.items() if legal[TO_DECODE]} == {5, 10}
    assert {t for t, legal in seen.items() if legal[TO_PREFILL]} == {5, 10}
    assert all(legal[NONE] for legal in seen.values())


def test_orders_off_the_clock_become_none_and_are_counted(tiny):
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2, "n_decode": 2}), [])
    for second in range(6):
        engine.run_until(second * S)
        order(engine, TO_DECODE)
        assert engine.totals().invalid_moves == min(second + 1, 5)
        assert engine.totals().conversions == (second == 5)
        assert roles(engine) == ((2, 2, 0) if second < 5 else (1, 2, 1))


def test_one_at_a_time(tiny):
    # the switch takes 7 s: at 10 s one is still under way, at 15 s none is
    scenario = tiny.scenario(pd={"n_prefill": 3, "n_decode": 3}, conversion={"switch_s": 7.0})
    engine = tiny.engine(scenario, [])
    for second, move in [(5, TO_DECODE), (10, TO_PREFILL), (15, TO_PREFILL)]:
        engine.run_until(second * S)
        order(engine, move)
    assert engine.totals().conversions == 2
    assert engine.totals().invalid_moves == 1
    engine.run_until(12 * S)
    engine.run_until(23 * S)
    assert roles(engine) == (3, 3, 0)


def test_switch_takes_its_time_and_counts_in_neither_role(tiny):
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2, "n_decode": 2}), [])
    engine.run_until(5 * S)
    assert roles(engine) == (2, 2, 0)
    assert engine.telemetry().pd[0].conversion_valid == 0.0
    order(engine, TO_DECODE)
    assert roles(engine) == (1, 2, 1)
    engine.run_until(7 * S)
    # what lies at 7 s comes after this instant's decision
    assert roles(engine) == (1, 2, 1)
    engine.run_until(7 * S + 1)
    assert roles(engine) == (1, 3, 0)
    pd = engine.telemetry().pd[0]
    assert (pd.conversion_valid, pd.since_conversion_s) == (1.0, 2.000000001)
    assert pd.next_conversion_s == pytest.approx(2.999999999)
    # an instance is in a role until it has drained, and again once it has switched
    engine.run_until(10 * S)
    totals = engine.totals()
    assert totals.prefill_instances_ns == 2 * 5 * S + 5 * S
    assert totals.decode_slots_ns == 4 * (2 * 10 * S + 3 * S)


@pytest.mark.parametrize(
    ("pd", "legal"),
    [
        ({"n_prefill": 1, "n_decode": 2}, (False, True, True)),
        ({"n_prefill": 2, "n_decode": 1}, (True, True, False)),
        ({"n_prefill": 3, "n_decode": 3, "min_prefill": 3}, (False, True, True)),
        ({"n_prefill": 3, "n_decode": 3, "min_decode": 3}, (True, True, False)),
        ({"n_prefill": 1, "n_decode": 1, "min_prefill": 0}, (True, True, False)),
        # a cluster that starts without prefill may stay without, and cannot give what it has not
        ({"n_prefill": 0, "n_decode": 2}, (False, True, True)),
    ],
)
def test_minima_hold_for_what_remains(tiny, pd, legal):
    engine = tiny.engine(tiny.scenario(pd=pd), [])
    engine.run_until(5 * S)
    assert engine.legal() == (legal,)
    for move in (TO_DECODE, TO_PREFILL):
        fresh = tiny.engine(tiny.scenario(pd=pd), [])
        fresh.run_until(5 * S)
        order(fresh, move)
        assert fresh.totals().conversions == legal[move]
        assert fresh.totals().invalid_moves == (not legal[move])


def test_last_prefill_instance_stays_while_its_queue_holds_requests(tiny):
    scenario = tiny.scenario(pd={"min_prefill": 0, "n_decode": 1})
    # R0 runs 4..8, R1 waits 4..8: illegal at 5
    waiting = tiny.engine(scenario, [(4, 2000, 1), (4, 100, 1)])
    tiny.drive(waiting, threshold=NEVER)
    waiting.run_until(5 * S)
    assert waiting.legal() == ((False, True, False),)
    order(waiting, TO_DECODE)
    assert waiting.totals().invalid_moves == 1
    # R0 alone runs: legal, and it finishes first; what arrives meanwhile must go remote
    running = tiny.engine(scenario, [(4, 2000, 1), (6, 100, 1)])
    tiny.drive(running, threshold=NEVER, moves={5: TO_DECODE})
    assert running.totals().conversions == 1
    running.run_until(10 * S + 1)
    assert running.records.prefill_end_ns.tolist() == [8 * S, 6_100_000_000]
    assert running.records.route.tolist() == [1, 2]
    assert roles(running) == (0, 2, 0)


def test_decisions_are_per_cluster(tiny):
    scenario = tiny.scenario(
        pd=[{"name": "pd0", "n_prefill": 2}, {"name": "pd1", "n_prefill": 2, "n_decode": 2}],
        link=[{"pd": "pd0"}, {"pd": "pd1"}],
    )
    engine = tiny.engine(scenario, [])
    engine.run_until(5 * S)
    engine.apply(
        Decision(
            (
                ClusterDecision(threshold_tokens=NEVER, move=TO_PREFILL),  # illegal: one decode instance
                ClusterDecision(margin_s=0.0, move=TO_PREFILL),
            )
        )
    )
    assert (engine.totals().conversions, engine.totals().invalid_moves) == (1, 1)
    engine.run_until(8 * S)
    assert (roles(engine, 0), roles(engine, 1)) == ((2, 1, 0), (3, 1, 0))
    with pytest.raises(ValueError, match="1 PD clusters, there are 2"):
        order(engine, NONE)


# ------------------------------------------------------------------------------------------- who converts


def test_an_idle_prefill_instance_goes_first(tiny):
    # instance 0 runs until 24 s, instance 1 is idle: switched at 7 s
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2}), [(4, 10_000, 1)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_DECODE})
    engine.run_until(7 * S + 1)
    assert roles(engine) == (1, 2, 0)
    assert engine.telemetry().pd[0].prefill_busy_instances == 1


def test_else_the_earliest_to_finish_ends_its_prefill_and_takes_no_other(tiny):
    # instance 0: 1..9; instance 1: 2..6; R2 waits. Ordered at 5: instance 1 ends R1 at 6, switches, decodes at 8.
    # R2 is not its work: it waits for instance 0 until 9.
    rows = [(1, 4000, 1), (2, 2000, 1), (3, 500, 1)]
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2}), rows)
    tiny.drive(engine, threshold=NEVER, moves={5: TO_DECODE})
    for at_ns, expected in [(6 * S + 1, (1, 1, 1)), (8 * S, (1, 1, 1)), (8 * S + 1, (1, 2, 0))]:
        engine.run_until(at_ns)
        assert roles(engine) == expected
    engine.run_to_end()
    assert engine.records.prefill_end_ns.tolist() == [9 * S, 6 * S, 10 * S]
    assert engine.records.attempts.tolist() == [1, 1, 1]


def test_prefill_instance_that_drains_still_counts_as_busy(tiny):
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2}), [(1, 4000, 1), (2, 2000, 1)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_DECODE})
    pd = engine.telemetry().pd[0]
    assert (pd.prefill_busy_instances, pd.prefill_instances, pd.prefill_residual_s) == (2, 1, 5.0)
    engine.run_until(20 * S)
    # busy 8 + 4 s; in the role: 20 s, and 6 s until it had drained
    assert engine.totals().prefill_busy_ns == 12 * S
    assert engine.totals().prefill_instances_ns == 26 * S


def test_decode_instance_with_the_fewest_sequences_converts_and_takes_no_new_ones(tiny):
    # R0 and R2 on instance 0, R1 on 1. At 5 instance 1 drains (R1 ends at 6.001) and has switched at 8.001.
    # R3, handed over at 5.5, finds instance 0 full (2 slots) and waits for R0's end at 9.001, not for a free slot of 1.
    scenario = tiny.scenario(decode={"slots": 2}, pd={"n_prefill": 3, "n_decode": 2})
    rows = [(0, 1000, 700), (0, 1000, 400), (0, 1000, 900), (4.4995, 500, 1)]
    engine = tiny.engine(scenario, rows)
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    assert roles(engine) == (3, 1, 1)
    engine.run_until(8_001_000_000)
    assert roles(engine) == (3, 1, 1)
    engine.run_until(8_001_000_001)
    assert roles(engine) == (4, 1, 0)
    engine.run_to_end()
    assert engine.records.finish_ns.tolist()[:3] == [9_001_000_000, 6_001_000_000, 11_001_000_000]
    assert engine.records.transfer_end_ns[3] == 5_500_000_000
    assert engine.records.decode_join_ns[3] == 9_001_000_000


def test_lowest_id_on_a_tie(tiny):
    """Two decode instances with one sequence each, told apart by how long their sequences last."""
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2, "n_decode": 2}), [(0, 1000, 400), (0, 1000, 5000)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    # R0 sits on the lower id and ends at 6.001
    engine.run_until(8_001_000_001)
    assert roles(engine) == (3, 1, 0)


def test_lowest_id_on_a_tie_of_prefill_instances(hand):
    """Two prefills that end together, in the reference engine, whose instances can be looked at."""
    reference = hand("simpy")
    engine = reference.engine(reference.scenario(pd={"n_prefill": 2}), [(4, 1000, 1), (4, 1000, 1)])
    reference.drive(engine, threshold=NEVER, moves={5: TO_DECODE})
    assert [i.phase.name for i in engine.sites[0].instances] == ["DRAINING", "ACTIVE", "ACTIVE"]


# ------------------------------------------------------------------------------------------ drain limit


def test_drain_limit_prefills_prompt_and_produced_tokens_again_locally(tiny):
    """R0: joins instance 0 at 2.001, 1,000 tokens of 10 ms. Ordered at 5, limit 3 s: evicted at 8.0.

    It has made floor(5.999 / 0.01) = 599 tokens. Prefill of 1,599 tokens: 3.198 s, 8..11.198; hand-over 1.599 ms;
    joins the other instance at 11.199599; 401 tokens left: 4.01 s.
    """
    scenario = tiny.scenario(pd={"n_decode": 2}, conversion={"drain_limit_s": 3.0})
    # R1 joins the other instance at 2.02001: one sequence each, and the lowest id converts
    engine = tiny.engine(scenario, [(0, 1000, 1000), (0.5, 10, 6000)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    engine.run_until(8 * S)
    assert engine.telemetry().pd[0].decode_sequences == 2
    engine.run_until(8 * S + 1)
    pd = engine.telemetry().pd[0]
    assert (pd.decode_sequences, pd.prefill_busy_instances) == (1, 1)
    engine.run_until(60 * S)
    records, totals = engine.records, engine.totals()
    assert records.finish_ns[0] == 15_209_599_000
    # everything up to the first token is as it was
    assert records.first_token_ns[0] == 2_011_000_000
    assert records.prefill_start_ns[0] == 0
    assert records.prefill_end_ns[0] == 2 * S
    assert records.transfer_end_ns[0] == records.decode_join_ns[0] == 2_001_000_000
    assert records.service_ns[0] == 2 * S
    assert records.attempts.tolist() == [2, 1]
    assert (totals.arrived, totals.finished, totals.first_tokens) == (2, 1, 2)
    assert (totals.conversions, totals.rejected, totals.aborted) == (1, 0, 0)


def test_drain_limit_prefills_again_remotely_where_it_was_remote(tiny):
    """R0: remote prefill 1 s, flow 1 s, joins at 2.0. At 8.0 it has made 600 tokens.

    1,600 tokens: prefill 8..9.6, 12.8e6 bits until 11.2, 400 tokens left: 15.2.
    """
    scenario = tiny.scenario(pd={"n_decode": 2}, conversion={"drain_limit_s": 3.0})
    # R1 is local (10 tokens are at the threshold) and keeps the other instance busy longer
    engine = tiny.engine(scenario, [(0, 1000, 1000), (3, 10, 6000)])
    tiny.drive(engine, threshold=10.0)
    engine.run_until(5 * S)
    order(engine, TO_PREFILL, threshold=NEVER)
    engine.run_until(60 * S)
    assert engine.records.finish_ns[0] == 15_200_000_000
    assert engine.records.first_token_ns[0] == 2_010_000_000
    assert engine.records.transfer_end_ns[0] == 2 * S
    assert engine.records.attempts.tolist() == [2, 1]
    assert engine.records.sent_bytes.tolist() == [2_600_000, 0]
    assert engine.totals().egress_bits == (20.8e6,)
    assert engine.totals().remote == 1


def test_evicted_before_its_first_token(tiny):
    """Steps of 10 s: R0 joins at 2.001 and is evicted at 8 without a token; the second attempt gives the stamps."""
    scenario = tiny.scenario(decode={"a_s": 10.0}, pd={"n_decode": 2}, conversion={"drain_limit_s": 3.0})
    engine = tiny.engine(scenario, [(0, 1000, 2), (2, 10, 100)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    engine.run_until(100 * S)
    records = engine.records
    assert records.prefill_start_ns[0] == 8 * S
    assert records.prefill_end_ns[0] == 10 * S
    assert records.transfer_end_ns[0] == records.decode_join_ns[0] == 10_001_000_000
    assert records.first_token_ns[0] == 20_001_000_000
    assert records.finish_ns[0] == 30_001_000_000
    assert records.attempts.tolist() == [2, 1]
    # R1: prefill 2..2.02, hand-over 10 us, one step of 10 s. Waiting is the time to the first token of both.
    assert records.first_token_ns[1] == 12_020_010_000
    assert engine.totals().waiting_ns == 20_001_000_000 + 10_020_010_000


def test_evicted_sequences_keep_their_order_and_are_counted_once(tiny):
    """Two sequences of one instance are evicted together and both finish, each counted once."""
    scenario = tiny.scenario(
        decode={"slots": 3}, pd={"n_decode": 2, "n_prefill": 3}, conversion={"drain_limit_s": 1.0}
    )
    # R0 to R4 go to instances 0, 1, 0, 1, 0: instance 1 has fewer and converts, with R1 and R3
    rows = [(k * 0.001, 100, 2000) for k in range(5)]
    engine = tiny.engine(scenario, rows)
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    engine.run_until(6 * S)
    assert engine.records.attempts.tolist() == [1] * 5
    engine.run_until(6 * S + 1)
    assert engine.records.attempts.tolist() == [1, 2, 1, 2, 1]
    engine.run_to_end()
    assert engine.totals().finished == engine.totals().arrived == 5
    # 2,000 tokens each, whatever the interruptions: first token stays, the rest is counted
    assert engine.totals().first_tokens == 5


def test_an_evicted_sequence_still_fits_the_kv_room(tiny):
    """Room is the prompt plus the reserve on every attempt: produced tokens live in the reserve.

    With room for exactly one request per instance, an evicted one must be admitted again.
    """
    scenario = tiny.scenario(
        decode={"kv_capacity_tokens": 1050, "kv_reserve_tokens": 50},
        pd={"n_decode": 2},
        conversion={"drain_limit_s": 1.0},
    )
    engine = tiny.engine(scenario, [(0, 1000, 1000), (2.5, 500, 800)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    engine.run_to_end(1000 * S)
    assert engine.done
    assert engine.records.attempts.max() == 2


def test_a_token_counts_when_it_has_been_handed_out(tiny):
    """Evicted 1 ns before its only token: it has produced nothing, whatever rounding says.

    Steps of 4 s, 8 s while warming up. Instance 1 decodes from 7 s; R1 joins it at 7.000000001 and its token is due
    at 15.000000001. Ordered back at 10, limit 5 s: evicted at 15. Prefill 15..17, join 17.001, first token 21.001.
    """
    scenario = tiny.scenario(
        decode={"a_s": 4.0},
        pd={"n_prefill": 2},
        conversion={"switch_s": 2.0, "warmup_s": 100.0, "warmup_speed": 0.5, "drain_limit_s": 5.0},
    )
    engine = tiny.engine(scenario, [(0, 1000, 100), (4.999000001, 1000, 1)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_DECODE, 10: TO_PREFILL})
    engine.run_until(15 * S)
    assert engine.records.decode_join_ns[1] == 7_000_000_001
    engine.run_to_end()
    assert engine.records.attempts.tolist() == [1, 2]
    assert engine.records.first_token_ns[1] == engine.records.finish_ns[1] == 21_001_000_000
    assert engine.totals().first_tokens == engine.totals().finished == 2


# ---------------------------------------------------------------------------------------------- warm-up


WARM = {"switch_s": 2.0, "warmup_s": 4.0, "warmup_speed": 0.5}


def test_prefill_started_while_warming_up_takes_longer_to_its_end(tiny):
    # instance 0 is busy 4..24. Ordered at 5, active at 7, warm until 11. 1,000 tokens at half speed: 4 s.
    rows = [(4, 10_000, 1), (8, 1000, 1), (12, 1000, 1)]
    engine = tiny.engine(tiny.scenario(pd={"n_decode": 2}, conversion=WARM), rows)
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    engine.run_to_end()
    assert engine.records.prefill_end_ns.tolist() == [24 * S, 12 * S, 14 * S]
    assert engine.records.service_ns.tolist() == [20 * S, 4 * S, 2 * S]


@pytest.mark.parametrize(("arrival_ns", "seconds"), [(11 * S - 1, 4), (11 * S, 2)])
def test_end_of_warm_up_comes_before_an_arrival_of_its_instant(tiny, arrival_ns, seconds):
    rows = [(4, 10_000, 1), (arrival_ns / 1e9, 1000, 1)]
    engine = tiny.engine(tiny.scenario(pd={"n_decode": 2}, conversion=WARM), rows)
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    engine.run_to_end()
    assert engine.records.prefill_end_ns[1] == arrival_ns + seconds * S


def test_warm_up_time_is_rounded_once(tiny):
    # 5 tokens of 0.5 ns at half speed are exactly 5 ns; rounding the 2.5 ns first would give 4
    scenario = tiny.scenario(
        local={"c1_s_per_token": 0.5e-9}, pd={"n_decode": 2, "n_prefill": 0}, conversion=WARM
    )
    engine = tiny.engine(scenario, [(8, 5, 1)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_PREFILL})
    engine.run_to_end()
    assert engine.records.service_ns.tolist() == [5]


def test_a_warm_instance_of_full_speed_is_preferred(tiny):
    # instance 0 goes to decode at 5 (idle, lowest id) and comes back at 10, active at 12 and slow until 16.
    # At 13 both prefill instances are idle: the fast one (id 1) works first, then the slow one.
    rows = [(13, 1000, 1), (13, 1000, 1)]
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2}, conversion=WARM), rows)
    tiny.drive(engine, threshold=NEVER, moves={5: TO_DECODE, 10: TO_PREFILL})
    engine.run_to_end()
    assert engine.records.prefill_end_ns.tolist() == [15 * S, 17 * S]


def test_decode_steps_are_longer_until_the_warm_up_ends(tiny):
    # Instance 0 decodes from 7, at half speed until 11. R1 (instance 2 has R0) joins at 8.0: steps of 20 ms.
    # 150 tokens by 11.0, the other 250 at 10 ms: 13.5.
    rows = [(0, 1000, 3000), (5.999, 1000, 400)]
    engine = tiny.engine(tiny.scenario(pd={"n_prefill": 2}, conversion=WARM), rows)
    tiny.drive(engine, threshold=NEVER, moves={5: TO_DECODE})
    engine.run_to_end()
    assert engine.records.decode_join_ns[1] == 8 * S
    assert engine.records.first_token_ns[1] == 8 * S + 20 * MS
    assert engine.records.finish_ns[1] == 13_500_000_000


def test_end_of_an_older_warm_up_does_not_end_a_newer_one(tiny):
    """Warm-up of 20 s, conversions every 5 s: instance 0 to decode (slow 7..27) and back (slow 12..32)."""
    scenario = tiny.scenario(
        pd={"n_prefill": 2}, conversion={"switch_s": 2.0, "warmup_s": 20.0, "warmup_speed": 0.5}
    )
    engine = tiny.engine(scenario, [(26, 2000, 1), (28, 1000, 1), (33, 500, 1)])
    tiny.drive(engine, threshold=NEVER, moves={5: TO_DECODE, 10: TO_PREFILL})
    engine.run_to_end()
    # R0 keeps the fast instance until 30; R1 has the slow one, 4 s; by 33 it is warm
    assert engine.records.prefill_end_ns.tolist() == [30 * S, 32 * S, 34 * S]
