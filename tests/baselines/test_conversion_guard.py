"""Rules of the conversion guard, one by one, on hand-made telemetry."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_baselines.conversion_guard import (
    ConversionGuard,
    GuardParameters,
    Proposal,
    Refusal,
    load_after_release,
    slo_reachable,
)
from prfaas_env.decision import Move
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.scenarios.models import Slo

PAPER = load_scenario("paper")
PARAMETERS = GuardParameters(
    utilisation_limit=0.9,
    relief_ratio=0.0,
    min_gain=0.05,
    act_above_load=0.0,
    dwell_s=45,
    opposite_dwell_s=180,
    warmup_s=30,
    slo_target=0.9,
)
TO_DECODE = Proposal(Move.PREFILL_TO_DECODE, gain=0.2, need=1.0, load=0.5, capacity=3, capacity_after=2)
TO_PREFILL = Proposal(Move.DECODE_TO_PREFILL, gain=0.2, need=1.0, load=0.5, capacity=5, capacity_after=4)


def guard(slo: Slo = Slo(), **changes: float) -> ConversionGuard:  # noqa: B008 (frozen)
    parameters = PARAMETERS.model_copy(update=changes)
    return ConversionGuard(parameters, PAPER.deployment.pd[0], 0, (0,), slo)


@pytest.fixture
def see(make_telemetry):
    """Feed one reading of the paper's deployment to a guard and return it."""

    def feed(guard, time_s, prefill=3, decode=5, converting=0, **fields):
        counts = {
            "prefill_instances": prefill,
            "decode_instances": decode,
            "converting_instances": converting,
        }
        telemetry = make_telemetry(PAPER, time_s=time_s, pd={**counts, **fields})
        guard.observe(telemetry)
        return telemetry

    return feed


@given(st.floats(0.01, 3.0), st.integers(2, 50))
def test_load_after_release_of_a_pool(load: float, n: int) -> None:
    assert load_after_release(load, n, n - 1) == pytest.approx(load * n / (n - 1))


def test_load_after_the_last_node_left() -> None:
    assert load_after_release(0.1, 1, 0) == math.inf
    assert load_after_release(0.0, 1, 0) == 0.0


@pytest.mark.parametrize(("load", "refusal"), [(0.59, None), (0.61, Refusal.OVERLOAD)])
def test_a_release_must_leave_the_role_below_the_limit(see, load, refusal) -> None:
    # 3 prefill nodes: 0.6 * 3 / 2 = 0.9, the limit.
    g = guard()
    telemetry = see(g, 600)
    assert g.check(telemetry, Proposal(Move.PREFILL_TO_DECODE, 0.2, 1.0, load, 3, 2)) is refusal


@pytest.mark.parametrize(
    ("ratio", "need", "refusal"),
    [
        (0.0, 9.0, Refusal.OVERLOAD),
        (1.0, 1.6, None),
        (1.0, 1.4, Refusal.OVERLOAD),
        (2.0, 2.9, Refusal.OVERLOAD),
    ],
)
def test_a_full_role_gives_only_to_a_fuller_one(see, ratio, need, refusal) -> None:
    # One of three prefill nodes at load 1 leaves 1.5, over the limit.
    g = guard(relief_ratio=ratio)
    assert g.check(see(g, 600), Proposal(Move.PREFILL_TO_DECODE, 0.2, need, 1.0, 3, 2)) is refusal


@pytest.mark.parametrize(("need", "refusal"), [(0.7, Refusal.NO_NEED), (0.9, None)])
def test_no_move_to_a_role_with_room(see, need, refusal) -> None:
    g = guard(act_above_load=0.8)
    proposal = Proposal(Move.PREFILL_TO_DECODE, 0.2, need, 0.5, 3, 2)
    assert g.check(see(g, 600), proposal) is refusal
    g = guard(act_above_load=0.8)
    assert g.check(see(g, 600), proposal, objective_missed=True) is None


@pytest.mark.parametrize(
    ("gain", "refusal"), [(0.051, None), (0.049, Refusal.SMALL_GAIN), (-0.1, Refusal.SMALL_GAIN)]
)
def test_hysteresis(see, gain, refusal) -> None:
    g = guard()
    assert g.check(see(g, 600), Proposal(Move.DECODE_TO_PREFILL, gain, 1.0, 0.5, 5, 4)) is refusal


def test_a_missed_objective_lifts_the_bar_but_not_below_zero(see) -> None:
    small = Proposal(Move.DECODE_TO_PREFILL, 0.01, 1.0, 0.5, 5, 4)
    assert guard_check(see, small, objective_missed=True) is None
    assert guard_check(see, small, objective_missed=False) is Refusal.SMALL_GAIN
    worse = Proposal(Move.DECODE_TO_PREFILL, -0.01, 1.0, 0.5, 5, 4)
    assert guard_check(see, worse, objective_missed=True) is Refusal.SMALL_GAIN


def guard_check(see, proposal, objective_missed):
    g = guard()
    return g.check(see(g, 600), proposal, objective_missed)


def test_only_legal_moves(see) -> None:
    g = guard()
    see(g, 600)
    off_tick = see(g, 601)
    off_tick.legal_moves = ((False, True, False),)
    assert g.check(off_tick, TO_DECODE) is Refusal.NOT_LEGAL
    assert g.check(off_tick, Proposal(Move.NONE, 1.0, 1.0, 0.0, 3, 3)) is Refusal.NOT_LEGAL
    last = see(g, 615, prefill=1, decode=7)  # min_prefill is 1
    assert g.check(last, TO_DECODE) is Refusal.NOT_LEGAL


def test_warm_up_after_the_start(see) -> None:
    g = guard()
    assert g.check(see(g, 15), TO_DECODE) is Refusal.WARMING_UP
    assert g.check(see(g, 30), TO_DECODE) is None


def test_warm_up_and_dwell_after_a_conversion(see) -> None:
    g = guard()
    see(g, 600)
    see(g, 601, prefill=2, converting=1)
    see(g, 616, prefill=2, converting=1)
    assert g.check(see(g, 630, prefill=2, decode=6), TO_DECODE) is Refusal.WARMING_UP
    assert g.check(see(g, 660, prefill=2, decode=6), TO_DECODE) is Refusal.DWELL
    # The conversion was last seen at 616; 45 s later the same direction is free.
    assert g.check(see(g, 661, prefill=2, decode=6), TO_DECODE) is None


def test_moves_back_wait_longer(see) -> None:
    g = guard()
    see(g, 600)
    see(g, 601, prefill=2, converting=1)
    assert g.check(see(g, 780, prefill=2, decode=6), TO_PREFILL) is Refusal.OPPOSITE_DWELL
    assert g.check(see(g, 780, prefill=2, decode=6), TO_DECODE) is None
    g = guard()
    see(g, 600)
    see(g, 601, prefill=2, converting=1)
    assert g.check(see(g, 781, prefill=2, decode=6), TO_PREFILL) is None


def test_warm_up_samples_are_left_out_of_the_measured_use(see) -> None:
    g = guard()
    for t in range(30):
        see(g, t, decode_slot_use=1.0, prefill_busy_instances=3)
    assert g.decode_use == 0.0
    for t in range(30, 40):
        see(g, t, decode_slot_use=0.4, prefill_busy_instances=1.5)
    assert g.decode_use == pytest.approx(0.4)
    assert g.prefill_use == pytest.approx(0.5)
    see(g, 40, prefill=2, converting=1, decode_slot_use=1.0)
    assert g.decode_use == 0.0


def test_a_move_by_hand_is_seen_and_logged(see, caplog) -> None:
    g = guard()
    see(g, 600)
    with caplog.at_level(logging.INFO, logger="prfaas_baselines"):
        see(g, 601, prefill=4, decode=4)  # an operator moved a node; no conversion was visible
    assert "pd0" in caplog.text
    assert "DECODE_TO_PREFILL" in caplog.text
    assert g.split == (4, 4)
    # It counts like a move of our own: an order back waits.
    assert g.check(see(g, 690, prefill=4, decode=4), TO_DECODE) is Refusal.OPPOSITE_DWELL


def test_an_ordered_move_is_not_logged_but_one_that_failed_is(see, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="prfaas_baselines"):
        g = guard()
        assert g.check(see(g, 600), TO_DECODE) is None
        see(g, 601, prefill=2, converting=1)
        assert caplog.text == ""
        g = guard()
        assert g.check(see(g, 600), TO_DECODE) is None
        see(g, 601)
        assert "ordered PREFILL_TO_DECODE, seen NONE" in caplog.text


def test_a_lost_node_is_no_move(see) -> None:
    g = guard()
    see(g, 600)
    telemetry = see(g, 601, decode=4)
    assert g.check(telemetry, TO_DECODE) is None
    assert g.warm


# ------------------------------------------------------------------------------------------ objectives


def test_slo_reachable_counts_prompts() -> None:
    idle_s = [1.0] * 9 + [7.0]
    assert slo_reachable(idle_s, 6.0, 0.9)
    assert not slo_reachable(idle_s, 6.0, 0.95)
    assert not slo_reachable([], 6.0, 0.9)


@pytest.mark.parametrize(
    ("idle_s", "attainment", "missed"),
    [([1.0, 2.0], 0.5, True), ([1.0, 2.0], 0.95, False), ([7.0, 8.0], 0.0, False)],
    ids=["missed", "met", "unreachable"],
)
def test_ttft_objective(see, idle_s, attainment, missed) -> None:
    g = guard(slo=Slo(ttft_s=6.0))
    telemetry = see(g, 600, ttft_valid=1.0, ttft_attainment=attainment)
    assert g.objective_missed(telemetry, lambda: idle_s, 0.025) is missed


@pytest.mark.parametrize(
    ("step_s", "missed"), [(0.02, True), (0.03, False)], ids=["reachable", "unreachable"]
)
def test_tpot_objective(see, step_s, missed) -> None:
    g = guard(slo=Slo(tpot_s=0.025))
    telemetry = see(g, 600, tpot_valid=1.0, tpot_attainment=0.1)
    assert g.objective_missed(telemetry, lambda: [1.0], step_s) is missed


def test_no_objective_is_never_missed(see) -> None:
    g = guard()
    telemetry = see(g, 600, ttft_valid=1.0, ttft_attainment=0.0, tpot_valid=1.0, tpot_attainment=0.0)
    assert not g.objective_missed(telemetry, lambda: [1.0], 0.01)


# ---------------------------------------------------------------------------------------- empty system


@pytest.mark.parametrize(
    ("time_s", "fields", "empty"),
    [
        (600, {}, True),
        (119, {}, False),  # 120 s have not been seen yet
        (600, {"lengths_valid": 1.0}, False),
        (600, {"prefill_queue_requests": 1}, False),
        (600, {"prefill_busy_instances": 1}, False),
        (600, {"decode_queue_requests": 1}, False),
        (600, {"decode_sequences": 1}, False),
    ],
)
def test_what_counts_as_empty(see, time_s, fields, empty) -> None:
    g = guard()
    assert g.empty(see(g, time_s, **fields)) is empty


def test_requests_on_the_way_are_not_empty(make_telemetry) -> None:
    g = guard()
    assert not g.empty(make_telemetry(PAPER, link={"backlog_bytes": 1e8}))


def test_empty_system_returns_to_its_base_and_stays(see) -> None:
    """Six prefill and two decode nodes; the simulated cluster obeys each order within 15 s."""
    g = guard()
    prefill, decode, converting = 6, 2, 0
    orders = []
    for t in range(600, 3600, 15):
        telemetry = see(g, t, prefill=prefill, decode=decode, converting=converting)
        if converting:
            decode, converting = decode + 1, 0
            continue
        assert g.empty(telemetry)
        move = g.standing_order(telemetry)
        orders.append(move)
        if move is Move.PREFILL_TO_DECODE:
            prefill, converting = prefill - 1, 1
    assert (prefill, decode) == (3, 5)
    moves = [m for m in orders if m is not Move.NONE]
    assert moves == [Move.PREFILL_TO_DECODE] * 3
    assert all(m is Move.NONE for m in orders[-100:])


def test_going_home_needs_a_legal_move(see) -> None:
    g = guard()
    telemetry = see(g, 600, prefill=2, decode=6)
    assert g.standing_order(telemetry) is Move.DECODE_TO_PREFILL
    telemetry.legal_moves = ((False, True, False),)
    assert g.standing_order(telemetry) is Move.NONE


def test_a_conversion_before_the_first_look_counts(see) -> None:
    g = guard()
    fields = {"conversion_valid": 1.0, "since_conversion_s": 40.0}
    assert g.check(see(g, 600, **fields), TO_DECODE) is Refusal.DWELL
    fields["since_conversion_s"] = 45.0
    assert g.check(see(g, 605, **fields), TO_DECODE) is None


def test_a_role_below_its_floor_gets_a_node_at_once(see) -> None:
    """All decode nodes failed in a busy system, in the middle of the dwell time."""
    g = guard()
    see(g, 5, lengths_valid=1.0)
    busy = {"lengths_valid": 1.0, "decode_queue_requests": 50}
    assert g.standing_order(see(g, 15, prefill=3, decode=0, **busy)) is Move.PREFILL_TO_DECODE
    assert g.standing_order(see(g, 15, prefill=1, decode=0, **busy)) is None  # not legal: nothing to give
    assert g.standing_order(see(g, 15, prefill=0, decode=5, **busy)) is Move.DECODE_TO_PREFILL
    assert g.standing_order(see(g, 15, prefill=3, decode=5, **busy)) is None
