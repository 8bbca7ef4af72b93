"""The hybrid planner, on hand-made telemetry: the throughput plan, the load, who gives and who gets."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas_baselines.hybrid_planner import HybridPlanner
from prfaas_env.decision import Move
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios.loader import load_scenario

PAPER = load_scenario("paper")
#: The guard out of the way, so that the planner alone decides.
FREE = {
    "act_above_load": 0,
    "min_gain": 0,
    "utilisation_limit": 100,
    "dwell_s": 0,
    "opposite_dwell_s": 0,
    "warmup_s": 0,
    "rate_window_s": 5,
    "load_period_s": 5,
    "throughput_period_s": 60,
    "target_load": 1,
}
#: 20 slots at 25 ms a step and 1,024 tokens: what one decode node finishes.
DECODE_RPS = 20 / 0.025 / 1024


def started(make_telemetry, **parameters: Any) -> HybridPlanner:
    policy = HybridPlanner(**{**FREE, **parameters})
    policy.reset(PolicyContext(PAPER, make_telemetry(PAPER).schema, 0))
    return policy


def run(policy, make_telemetry, *, until_s: float, rate=lambda t: 2.0, pd=None, conversion=lambda t: False):
    """Decisions of every 5 s up to and with `until_s`."""
    out = []
    for k in range(int(until_s // 5) + 1):
        t = 5.0 * k
        fields = {"lengths_valid": 1.0, "arrival_rate_5s_rps": rate(t), **(pd or {})}
        out.append(
            policy.decide(make_telemetry(PAPER, time_s=t, pd=fields, conversion_tick=conversion(t))).clusters[
                0
            ]
        )
    return out


def need(policy) -> tuple[int, int]:
    return policy._clusters[0].need


def test_no_plan_before_a_window_is_over(make_telemetry) -> None:
    policy = started(make_telemetry)
    run(policy, make_telemetry, until_s=55)
    assert need(policy) == (0, 0)
    run_on = run(policy, make_telemetry, until_s=60)
    assert need(policy) != (0, 0)
    assert all(c.move is Move.NONE for c in run_on)


@pytest.mark.parametrize(("rate", "decode"), [(0.7, 1), (0.79, 2), (2.0, 3), (2.5, 4), (3.0, 4)])
def test_decode_gets_the_fewest_nodes_that_carry_the_rate(rate, decode, make_telemetry) -> None:
    """One node finishes 0.78125 requests per second."""
    policy = started(make_telemetry)
    run(policy, make_telemetry, until_s=60, rate=lambda t: rate)
    assert pytest.approx(0.78125) == DECODE_RPS
    assert need(policy)[1] == decode


def test_the_target_load_leaves_room(make_telemetry) -> None:
    tight, loose = started(make_telemetry), started(make_telemetry, target_load=0.5)
    for policy in (tight, loose):
        run(policy, make_telemetry, until_s=60, rate=lambda t: 1.5)
    assert need(tight)[1] == 2
    assert need(loose)[1] == 4  # as for 3 req/s


def test_nodes_are_divided_where_there_are_too_few(make_telemetry) -> None:
    policy = started(make_telemetry)
    run(policy, make_telemetry, until_s=60, rate=lambda t: 40.0)
    prefill, decode = need(policy)
    # Both want more than there are: prefill all that decode may spare (7), decode 52; 8 * 7 / 59 is 0.95.
    assert (prefill, decode) == (1, 7)


@pytest.mark.parametrize(("predictor", "decode"), [("constant", 2), ("trend", 3)])
def test_the_rate_of_the_next_window(predictor, decode, make_telemetry) -> None:
    """1.0 in the first window and 1.5 in the second: carried on, 2.0 in the third."""
    policy = started(make_telemetry, predictor=predictor)
    run(policy, make_telemetry, until_s=120, rate=lambda t: 1.0 if t <= 60 else 1.5)
    assert need(policy)[1] == decode


def test_a_role_below_its_need_gets_a_node(make_telemetry) -> None:
    policy = started(make_telemetry, floor="throughput")
    few = {"decode_instances": 2, "prefill_instances": 6}
    out = run(policy, make_telemetry, until_s=75, rate=lambda t: 2.5, pd=few, conversion=lambda t: t == 75)
    assert [c.move for c in out[:-1]] == [Move.NONE] * (len(out) - 1)
    assert out[-1].move is Move.PREFILL_TO_DECODE


FULL = {"decode_sequences": 100, "decode_queue_requests": 10, "decode_slot_use": 1.0}
IDLE = {"decode_sequences": 10, "decode_slot_use": 0.1}


@pytest.mark.parametrize(
    ("pd", "parameters", "move"),
    [
        (FULL, {}, Move.PREFILL_TO_DECODE),  # 110 of 100 slots
        ({**FULL, "decode_queue_requests": 0, "decode_sequences": 99}, {}, Move.NONE),
        (FULL, {"decode_up": 1.2}, Move.NONE),
        ({**IDLE, "prefill_queue_work_s": 12.0}, {"prefill_up_s": 4}, Move.DECODE_TO_PREFILL),  # 4 s per node
        ({**IDLE, "prefill_queue_work_s": 11.9}, {"prefill_up_s": 4}, Move.NONE),
        ({**FULL, "prefill_queue_work_s": 100.0}, {}, Move.NONE),  # both ask: nobody can give
        ({**IDLE, "decode_sequences": 70, "prefill_queue_work_s": 30.0}, {}, Move.DECODE_TO_PREFILL),
        (
            {**IDLE, "decode_sequences": 70, "prefill_queue_work_s": 30.0},
            {"donor": "spare"},
            Move.NONE,
        ),  # 0.7 > 0.6
        ({**FULL, "prefill_queue_work_s": 3.0}, {"donor": "spare"}, Move.NONE),
        ({**FULL, "prefill_queue_work_s": 1.2}, {"donor": "spare"}, Move.PREFILL_TO_DECODE),  # 0.4 s per node
    ],
)
def test_a_queue_gets_a_node(pd, parameters, move, make_telemetry) -> None:
    policy = started(make_telemetry, **parameters)
    (*_, last) = run(policy, make_telemetry, until_s=15, pd=pd, conversion=lambda t: t == 15)
    assert last.move is move


@pytest.mark.parametrize(("floor", "move"), [("throughput", Move.NONE), ("none", Move.DECODE_TO_PREFILL)])
def test_the_load_keeps_the_floor_of_the_throughput_plan(floor, move, make_telemetry) -> None:
    policy = started(make_telemetry, floor=floor, means="representative")
    pd = {**IDLE, "prefill_queue_work_s": 30.0}
    # 3.2 req/s need 5 decode nodes (4.1) and, by the paper's model, 3 to prefill: what there is.
    (*_, last) = run(
        policy, make_telemetry, until_s=75, rate=lambda t: 3.2, pd=pd, conversion=lambda t: t == 75
    )
    assert last.move is move


def test_the_guard_has_the_last_word(make_telemetry) -> None:
    policy = started(make_telemetry, warmup_s=60)
    (*_, last) = run(policy, make_telemetry, until_s=15, pd=FULL, conversion=lambda t: t == 15)
    assert last.move is Move.NONE


def test_the_load_is_looked_at_once_per_period(make_telemetry) -> None:
    policy = started(make_telemetry, load_period_s=20)
    out = run(policy, make_telemetry, until_s=40, pd=FULL, conversion=lambda t: t in (15, 40))
    assert out[3].move is Move.NONE  # 15 s: the last look was at 0
    assert out[8].move is Move.PREFILL_TO_DECODE


def test_routing(make_telemetry) -> None:
    by_threshold = started(make_telemetry, means="representative")
    assert {c.threshold_tokens for c in run(by_threshold, make_telemetry, until_s=30)} == {19_400}
    by_margin = started(make_telemetry, routing="margin", margin_s=1.5)
    assert {c.margin_s for c in run(by_margin, make_telemetry, until_s=30)} == {1.5}


def test_the_threshold_follows_the_split(make_telemetry) -> None:
    policy = started(make_telemetry, means="representative")
    two = {"prefill_instances": 2, "decode_instances": 6}
    (first,) = policy.decide(make_telemetry(PAPER, time_s=0, conversion_tick=False)).clusters
    (then,) = policy.decide(make_telemetry(PAPER, time_s=5, pd=two, conversion_tick=False)).clusters
    assert (first.threshold_tokens, then.threshold_tokens) == (19_400, 15_500)
