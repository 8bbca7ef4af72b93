"""Earliest finish with conversions, on hand-made telemetry."""

from __future__ import annotations

import pytest

from prfaas_env.decision import Move
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.scenarios.models import Slo

PAPER = load_scenario("paper")
#: Rules of the guard out of the way, so that the search alone decides.
BARE = "act_above_load=0,min_gain=0,utilisation_limit=100,dwell_s=0,opposite_dwell_s=0,warmup_s=0,period_s=60"
LONG_OUTPUT = {"output_valid": 1.0, "output_tokens_mean": 2048.0}
SHORT_OUTPUT = {"output_valid": 1.0, "output_tokens_mean": 256.0}
BUSY = {"lengths_valid": 1.0, "arrival_rate_30s_rps": 2.0, "arrival_rate_120s_rps": 2.0}


def policy_for(scenario, telemetry, parameters=BARE):
    policy = make_policy(f"earliest_finish_conversion:{parameters}")
    policy.reset(PolicyContext(scenario, telemetry.schema, 0))
    return policy


def moves(policy, telemetry) -> list[Move]:
    decision = policy.decide(telemetry)
    assert all(c.margin_s == 0.0 for c in decision.clusters)
    return [c.move for c in decision.clusters]


@pytest.mark.parametrize(
    ("fields", "move"),
    [
        (LONG_OUTPUT, Move.PREFILL_TO_DECODE),  # the model's best split is 1/7
        (SHORT_OUTPUT, Move.DECODE_TO_PREFILL),  # 6/2
        ({}, Move.NONE),  # 1,024 tokens: 3/5 is best
    ],
)
def test_one_node_towards_the_best_split(fields, move, make_telemetry) -> None:
    telemetry = make_telemetry(PAPER, time_s=60, pd={**BUSY, **fields})
    assert moves(policy_for(PAPER, telemetry), telemetry) == [move]


def test_the_link_moves_the_split(make_telemetry) -> None:
    """With 1 Gbps observed nearly all prefill is local, so nodes are wanted there."""
    telemetry = make_telemetry(PAPER, time_s=60, pd=BUSY, link={"observed_capacity_bps": 1e9})
    assert moves(policy_for(PAPER, telemetry), telemetry) == [Move.DECODE_TO_PREFILL]


def test_the_recent_lengths_move_the_split(make_telemetry) -> None:
    telemetry = make_telemetry(PAPER, time_s=60, pd=BUSY, lengths=[[2_000] * 300])
    assert moves(policy_for(PAPER, telemetry), telemetry) == [Move.PREFILL_TO_DECODE]


def test_the_last_valid_output_mean_is_kept(make_telemetry) -> None:
    first = make_telemetry(PAPER, time_s=0, pd={**BUSY, **LONG_OUTPUT}, conversion_tick=False)
    policy = policy_for(PAPER, first)
    assert moves(policy, first) == [Move.NONE]  # not a conversion tick
    later = make_telemetry(PAPER, time_s=60, pd=BUSY)
    assert moves(policy, later) == [Move.PREFILL_TO_DECODE]


def test_searches_once_a_period(make_telemetry) -> None:
    policy = policy_for(PAPER, make_telemetry(PAPER))
    ordered = [
        t
        for t in range(15, 300, 15)
        if moves(policy, make_telemetry(PAPER, time_s=t, pd={**BUSY, **LONG_OUTPUT})) != [Move.NONE]
    ]
    assert ordered == [15, 75, 135, 195, 255]


def test_an_illegal_move_is_not_ordered(make_telemetry) -> None:
    fields = {**BUSY, **LONG_OUTPUT, "prefill_instances": 1, "decode_instances": 7}
    at_the_floor = make_telemetry(PAPER, time_s=60, pd=fields)
    assert moves(policy_for(PAPER, at_the_floor), at_the_floor) == [Move.NONE]
    converting = make_telemetry(
        PAPER, time_s=60, pd={**BUSY, **LONG_OUTPUT, "decode_instances": 4, "converting_instances": 1}
    )
    assert moves(policy_for(PAPER, converting), converting) == [Move.NONE]


def test_the_guard_is_asked(make_telemetry) -> None:
    telemetry = make_telemetry(PAPER, time_s=60, pd={**BUSY, **LONG_OUTPUT})
    high_bar = BARE.replace("min_gain=0,", "min_gain=0.9,")
    assert moves(policy_for(PAPER, telemetry, high_bar), telemetry) == [Move.NONE]
    cold = BARE.replace("warmup_s=0", "warmup_s=61")
    assert moves(policy_for(PAPER, telemetry, cold), telemetry) == [Move.NONE]


def test_a_busy_pool_does_not_give_its_node(make_telemetry) -> None:
    """Slots in use, measured, stop a release that the model alone would make: 0.8 * 5 / 4 is full."""
    parameters = BARE.replace("utilisation_limit=100", "utilisation_limit=0.95")
    for use, move in ((0.5, Move.DECODE_TO_PREFILL), (0.8, Move.NONE)):
        fields = {**BUSY, **SHORT_OUTPUT, "decode_slot_use": use, "decode_sequences": 100 * use}
        telemetry = make_telemetry(PAPER, time_s=60, pd=fields)
        assert moves(policy_for(PAPER, telemetry, parameters), telemetry) == [move]


@pytest.mark.parametrize(
    ("tokens", "move"),
    [(20_000, Move.PREFILL_TO_DECODE), (128_000, Move.NONE)],
    ids=["reachable", "unreachable"],
)
def test_only_a_reachable_objective_lifts_the_bar(tokens, move, make_telemetry) -> None:
    """A gain below min_gain is taken when prompts that take 1.3 s alone miss 6 s, not when they take 7.3 s alone."""
    scenario = PAPER.replace(slo=Slo(ttft_s=6.0))
    fields = {**BUSY, **LONG_OUTPUT, "ttft_valid": 1.0, "ttft_attainment": 0.5}
    telemetry = make_telemetry(scenario, time_s=60, pd=fields, lengths=[[tokens] * 300])
    if tokens == 128_000:  # a bottleneck of decode here too
        telemetry.values[telemetry.schema.index["pd0.output_tokens_mean"]] = 8_000.0
    parameters = BARE.replace("min_gain=0,", "min_gain=0.9,") + ",slo_target=0.9"
    assert moves(policy_for(scenario, telemetry, parameters), telemetry) == [move]
    bare = BARE.replace("min_gain=0,", "min_gain=0.05,")
    assert moves(policy_for(scenario, telemetry, bare), telemetry) == [Move.PREFILL_TO_DECODE]


def test_an_empty_system_goes_home_and_stays(make_telemetry) -> None:
    """Old data ask for 1/7; with no arrival for 120 s the cluster returns to 3/5 and does not move again."""
    policy = policy_for(PAPER, make_telemetry(PAPER))
    prefill = 5
    seen = []
    for t in range(600, 1800, 15):
        fields = {"prefill_instances": prefill, "decode_instances": 8 - prefill, **LONG_OUTPUT}
        (move,) = moves(policy, make_telemetry(PAPER, time_s=t, pd=fields))
        seen.append(move)
        prefill += {Move.PREFILL_TO_DECODE: -1, Move.DECODE_TO_PREFILL: 1, Move.NONE: 0}[move]
    assert prefill == 3
    assert sum(m is not Move.NONE for m in seen) == 2


def test_clusters_are_planned_apart(three_sites, make_telemetry) -> None:
    telemetry = make_telemetry(
        three_sites,
        time_s=60,
        pd=[{**BUSY, **LONG_OUTPUT}, {**BUSY, **SHORT_OUTPUT}, {**BUSY, **LONG_OUTPUT}],
    )
    assert moves(policy_for(three_sites, telemetry), telemetry) == [
        Move.PREFILL_TO_DECODE,
        Move.DECODE_TO_PREFILL,
        Move.PREFILL_TO_DECODE,
    ]


def test_without_a_remote_cluster_only_moves_matter(make_telemetry) -> None:
    scenario = load_scenario("homogeneous")
    telemetry = make_telemetry(scenario, time_s=60, pd={**BUSY, **LONG_OUTPUT})
    assert moves(policy_for(scenario, telemetry), telemetry) == [Move.PREFILL_TO_DECODE]


def test_without_local_prefill_a_node_may_begin_to_prefill(make_telemetry) -> None:
    scenario = load_scenario("naive")
    telemetry = make_telemetry(scenario, time_s=60, pd=BUSY)
    assert moves(policy_for(scenario, telemetry), telemetry) == [Move.DECODE_TO_PREFILL]
