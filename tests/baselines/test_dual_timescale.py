"""The dual-timescale scheduler, on hand-made telemetry."""

from __future__ import annotations

import math

import pytest

from prfaas_env.decision import Move
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios.loader import load_scenario

PAPER = load_scenario("paper")
#: Round figures for the short clock.
SHORT = (
    "means=representative,short_period_s=5,search_period_s=60,utilisation_high=0.9,utilisation_room=0.7,"
    "queue_surge=2,step_factor=1.5,most_factor=4,relax_share=0.5"
)
#: Rules of the guard out of the way, so that the imbalance alone decides.
LONG = (
    "means=representative,act_above_load=0,min_gain=0,utilisation_limit=100,dwell_s=0,opposite_dwell_s=0,"
    "warmup_s=0,long_period_s=60,imbalance_share=0.1,stage_load_high=0.8,stage_queue_surge=3"
)
BUSY = {"lengths_valid": 1.0, "arrival_rate_30s_rps": 3.0}
LONG_OUTPUT = {"output_valid": 1.0, "output_tokens_mean": 2048.0}
SHORT_OUTPUT = {"output_valid": 1.0, "output_tokens_mean": 256.0}
BEST = 19_400  # best threshold of the paper's start
CONGESTED = {"link": {"utilisation_5s": 0.95}}
REMOTE_SURGE = {"prfaas": {"prefill_queue_requests": 9}}  # 4 instances
LOCAL_SURGE = {"pd": {"prefill_queue_requests": 7}}  # 3 instances
LOSSY = {"link": {"retransmission_share": 0.5}}


def started(scenario, make_telemetry, parameters):
    """A policy that has taken its first decision, and that decision."""
    policy = make_policy(f"dual_timescale:{parameters}")
    telemetry = make_telemetry(scenario, time_s=0, conversion_tick=False)
    policy.reset(PolicyContext(scenario, telemetry.schema, 0))
    return policy, policy.decide(telemetry)


# ----------------------------------------------------------------------------------------- short clock


def test_first_threshold_is_searched_for_the_planned_load(make_telemetry) -> None:
    _, decision = started(PAPER, make_telemetry, SHORT)
    assert decision.clusters[0].threshold_tokens == BEST


@pytest.mark.parametrize(
    ("signal", "factor"),
    [
        (CONGESTED, 1.5),
        (REMOTE_SURGE, 1.5),
        (LOSSY, 1.5),
        (LOCAL_SURGE, 1 / 1.5),
        ({**LOCAL_SURGE, **CONGESTED}, 1.0),  # both sides are full: nothing to gain
        ({**LOCAL_SURGE, **REMOTE_SURGE}, 1.0),
        ({**LOCAL_SURGE, "link": {"utilisation_5s": 0.8}}, 1.0),  # no room on the link
        ({}, 1.0),
    ],
)
def test_a_signal_adjusts_the_threshold_by_one_step(signal, factor, make_telemetry) -> None:
    policy, _ = started(PAPER, make_telemetry, SHORT)
    decision = policy.decide(make_telemetry(PAPER, time_s=5, **signal))
    assert decision.clusters[0].threshold_tokens == pytest.approx(BEST * factor)


def test_congestion_is_judged_by_observed_capacity(make_telemetry) -> None:
    """9.5 of 100 Gbps nominal: an idle link, unless it delivers 10 Gbps."""
    signal = {"link": {"utilisation_5s": 0.095, "observed_capacity_bps": 10e9}}
    for basis, factor in (("observed", 1.5), ("nominal", 1.0)):
        policy, _ = started(PAPER, make_telemetry, f"{SHORT},link_basis={basis}")
        decision = policy.decide(make_telemetry(PAPER, time_s=5, **signal))
        assert decision.clusters[0].threshold_tokens == pytest.approx(BEST * factor)


def test_adjustments_keep_their_period(make_telemetry) -> None:
    policy, _ = started(PAPER, make_telemetry, SHORT)
    seen = [
        policy.decide(make_telemetry(PAPER, time_s=t, **CONGESTED)).clusters[0].threshold_tokens
        for t in range(1, 11)
    ]
    assert seen == pytest.approx([BEST] * 4 + [BEST * 1.5] * 5 + [BEST * 1.5**2])


def test_threshold_relaxes_to_the_searched_one(make_telemetry) -> None:
    policy, _ = started(PAPER, make_telemetry, SHORT)
    policy.decide(make_telemetry(PAPER, time_s=5, **CONGESTED))
    seen = [policy.decide(make_telemetry(PAPER, time_s=t)).clusters[0].threshold_tokens for t in (10, 15, 20)]
    # Half of the way on a log scale each time.
    assert seen == pytest.approx([BEST * 1.5**0.5, BEST * 1.5**0.25, BEST * 1.5**0.125])


@pytest.mark.parametrize(
    ("signal", "parameters", "limit"),
    [
        (CONGESTED, "most_factor=4", BEST * 4),
        (LOCAL_SURGE, "most_factor=4", BEST / 4),
        (CONGESTED, "most_factor=100", 131_072),
        (LOCAL_SURGE, "most_factor=100", 1_000),
        (CONGESTED, "most_factor=100,threshold_max_tokens=50000", 50_000),
    ],
)
def test_adjustments_are_bounded(signal, parameters, limit, make_telemetry) -> None:
    short = SHORT.replace(",most_factor=4", "").replace("search_period_s=60", "search_period_s=1000")
    policy, _ = started(PAPER, make_telemetry, f"{short},{parameters}")
    for t in range(5, 105, 5):
        decision = policy.decide(make_telemetry(PAPER, time_s=t, **signal))
    assert decision.clusters[0].threshold_tokens == pytest.approx(limit)


def test_search_again_each_period_and_with_recent_lengths(make_telemetry) -> None:
    policy, _ = started(PAPER, make_telemetry, SHORT)
    short_prompts = make_telemetry(PAPER, time_s=59, lengths=[[3_000, 5_000] * 150])
    assert policy.decide(short_prompts).clusters[0].threshold_tokens == BEST
    again = make_telemetry(PAPER, time_s=60, lengths=[[3_000, 5_000] * 150])
    assert policy.decide(again).clusters[0].threshold_tokens < 5_000


def test_search_again_when_the_split_changes(make_telemetry) -> None:
    """Two local prefill nodes balance at 15.5K; also when a node was moved by hand or lost."""
    policy, _ = started(PAPER, make_telemetry, SHORT)
    fields = {"prefill_instances": 2, "converting_instances": 1}
    decision = policy.decide(make_telemetry(PAPER, time_s=1, pd=fields))
    assert decision.clusters[0].threshold_tokens == 15_500


def test_search_uses_the_present_link(make_telemetry) -> None:
    policy, _ = started(PAPER, make_telemetry, SHORT)
    thin = make_telemetry(PAPER, time_s=60, link={"observed_capacity_bps": 5e9})
    assert policy.decide(thin).clusters[0].threshold_tokens > 1.5 * BEST


@pytest.mark.parametrize(("border", "rule"), [(0.0, "scarce"), (0.3, "scarce"), (0.5, "abundant")])
def test_cache_rule(border, rule, make_telemetry) -> None:
    policy, _ = started(PAPER, make_telemetry, f"{SHORT},abundant_below_utilisation={border}")
    decision = policy.decide(make_telemetry(PAPER, time_s=5, link={"utilisation_5s": 0.4}))
    assert decision.clusters[0].cache_rule == rule


def test_the_rule_stays_scarce_on_an_idle_link_by_default(make_telemetry) -> None:
    _, decision = started(PAPER, make_telemetry, SHORT)
    assert decision.clusters[0].cache_rule == "scarce"


@pytest.mark.parametrize(("name", "threshold"), [("homogeneous", math.inf), ("naive", 0.0)])
def test_with_one_path_the_threshold_stays(name, threshold, make_telemetry) -> None:
    scenario = load_scenario(name)
    policy, decision = started(scenario, make_telemetry, SHORT)
    assert decision.clusters[0].threshold_tokens == threshold
    for signal in (LOCAL_SURGE, {"pd": {"prefill_queue_requests": 0}}):
        decision = policy.decide(make_telemetry(scenario, time_s=5, **signal))
        assert decision.clusters[0].threshold_tokens == threshold


# ------------------------------------------------------------------------------------------ long clock


def move_of(make_telemetry, pd, parameters=LONG, time_s=60.0, scenario=PAPER, **fields) -> Move:
    policy, _ = started(scenario, make_telemetry, parameters)
    return policy.decide(make_telemetry(scenario, time_s=time_s, pd=pd, **fields)).clusters[0].move


@pytest.mark.parametrize(
    ("fields", "move"),
    [
        ({**BUSY, **LONG_OUTPUT}, Move.PREFILL_TO_DECODE),
        ({**BUSY, **SHORT_OUTPUT}, Move.DECODE_TO_PREFILL),
        ({**BUSY, "output_valid": 1.0, "output_tokens_mean": 1200.0}, Move.NONE),  # 3.25 against 3.33 req/s
    ],
)
def test_a_node_goes_to_the_bottleneck(fields, move, make_telemetry) -> None:
    assert move_of(make_telemetry, fields) is move


@pytest.mark.parametrize("output", [LONG_OUTPUT, SHORT_OUTPUT])
def test_a_bottleneck_that_nobody_feels_is_left_alone(output, make_telemetry) -> None:
    idle = {**BUSY, **output, "arrival_rate_30s_rps": 0.2}
    assert move_of(make_telemetry, idle) is Move.NONE


def test_a_queue_shows_the_bottleneck_too(make_telemetry) -> None:
    """At 0.2 req/s the load is low, but 25 requests wait for 7 prefill instances, or 16 for 5 decode ones."""
    quiet = {**BUSY, "arrival_rate_30s_rps": 0.2}
    parameters = f"{LONG},backlog_clear_s=10000"
    for share, move in ((12, Move.DECODE_TO_PREFILL), (10, Move.NONE)):
        fields = {**quiet, **SHORT_OUTPUT, "prefill_queue_requests": share}
        prfaas = {"prefill_queue_requests": share}
        assert move_of(make_telemetry, fields, parameters, prfaas=prfaas) is move
    for waiting, move in ((16, Move.PREFILL_TO_DECODE), (14, Move.NONE)):
        fields = {**quiet, **LONG_OUTPUT, "decode_queue_requests": waiting}
        assert move_of(make_telemetry, fields, parameters) is move


def test_slots_in_use_show_the_bottleneck_too(make_telemetry) -> None:
    fields = {**BUSY, **LONG_OUTPUT, "arrival_rate_30s_rps": 0.2, "decode_slot_use": 0.9}
    policy, _ = started(PAPER, make_telemetry, LONG)
    for t in range(1, 61):
        decision = policy.decide(make_telemetry(PAPER, time_s=t, pd=fields, conversion_tick=t == 60))
    assert decision.clusters[0].move is Move.PREFILL_TO_DECODE


def test_the_literal_sum_misses_a_prefill_bottleneck(make_telemetry) -> None:
    """At a threshold of 1,000 nearly everything goes remote: 2.45 req/s, far below decode.

    The local nodes could take many tiny prompts, so the sum of equation 8 exceeds decode all the same.
    """
    low = f"{LONG},threshold_max_tokens=1000"
    fields = {**BUSY, "output_valid": 1.0, "output_tokens_mean": 900.0}
    assert move_of(make_telemetry, fields, f"{low},imbalance_rule=terms") is Move.DECODE_TO_PREFILL
    assert move_of(make_telemetry, fields, f"{low},imbalance_rule=sum") is not Move.DECODE_TO_PREFILL


@pytest.mark.parametrize(
    ("output", "move"), [(LONG_OUTPUT, Move.PREFILL_TO_DECODE), (SHORT_OUTPUT, Move.DECODE_TO_PREFILL)]
)
def test_the_literal_sum_agrees_at_the_best_threshold(output, move, make_telemetry) -> None:
    assert move_of(make_telemetry, {**BUSY, **output}, f"{LONG},imbalance_rule=sum") is move


def test_looks_once_a_period(make_telemetry) -> None:
    policy, _ = started(PAPER, make_telemetry, LONG)
    ordered = [
        t
        for t in range(15, 300, 15)
        if policy.decide(make_telemetry(PAPER, time_s=t, pd={**BUSY, **LONG_OUTPUT})).clusters[0].move
        is not Move.NONE
    ]
    assert ordered == [60, 120, 180, 240]


def test_moves_only_on_conversion_ticks(make_telemetry) -> None:
    fields = {**BUSY, **LONG_OUTPUT}
    assert move_of(make_telemetry, fields, time_s=61, conversion_tick=False) is Move.NONE


def test_the_guard_is_asked(make_telemetry) -> None:
    fields = {**BUSY, **LONG_OUTPUT}
    assert move_of(make_telemetry, fields, LONG.replace("min_gain=0,", "min_gain=0.9,")) is Move.NONE
    assert move_of(make_telemetry, fields, LONG.replace("warmup_s=0", "warmup_s=61")) is Move.NONE


def test_an_empty_system_goes_home(make_telemetry) -> None:
    fields = {"prefill_instances": 5, "decode_instances": 3, **LONG_OUTPUT}
    assert move_of(make_telemetry, fields, time_s=600) is Move.PREFILL_TO_DECODE
    home = {"prefill_instances": 3, "decode_instances": 5, **LONG_OUTPUT}
    assert move_of(make_telemetry, home, time_s=600) is Move.NONE


def test_clusters_are_scheduled_apart(three_sites, make_telemetry) -> None:
    policy, decision = started(three_sites, make_telemetry, LONG)
    a, b, c = (cluster.threshold_tokens for cluster in decision.clusters)
    assert a < b < c == math.inf
    telemetry = make_telemetry(
        three_sites,
        time_s=60,
        pd=[{**BUSY, **LONG_OUTPUT}, {**BUSY, **SHORT_OUTPUT}, {**BUSY, **LONG_OUTPUT}],
    )
    assert [cluster.move for cluster in policy.decide(telemetry).clusters] == [
        Move.PREFILL_TO_DECODE,
        Move.DECODE_TO_PREFILL,
        Move.PREFILL_TO_DECODE,
    ]


def test_reset_forgets(make_telemetry) -> None:
    policy, first = started(PAPER, make_telemetry, SHORT)
    policy.decide(make_telemetry(PAPER, time_s=5, **CONGESTED))
    telemetry = make_telemetry(PAPER, time_s=0, conversion_tick=False)
    policy.reset(PolicyContext(PAPER, telemetry.schema, 0))
    assert policy.decide(telemetry) == first
