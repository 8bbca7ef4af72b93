"""Grids, clocks, legality, masks, and decoding of actions."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.decision import (
    MARGIN_GRID_S,
    THRESHOLD_GRID_TOKENS,
    ActionCodec,
    ClusterDecision,
    Decision,
    Move,
    legal_moves,
    offload_by_margin,
    offload_by_threshold,
)

INF = math.inf
FORMS = [
    ActionCodec(n, routing, form)
    for n, routing, form in product((1, 3), ("threshold", "margin"), ("discrete", "continuous"))
]


# ------------------------------------------------------------------ grids


def test_threshold_grid() -> None:
    """0, 16 log-spaced values of which the nearest to the paper's 19,400 is 19,400, infinity."""
    assert THRESHOLD_GRID_TOKENS == (
        0, 1000, 1384, 1916, 2652, 3670, 5080, 7031, 9731, 13469, 19400, 25803, 35714, 49432, 68419, 94698, 131072, INF,
    )  # fmt: skip
    assert THRESHOLD_GRID_TOKENS[0] == 0
    inner = np.array(THRESHOLD_GRID_TOKENS[1:-1])
    exact = 1000 * (131.072) ** (np.arange(16) / 15)
    replaced = [k for k in range(16) if inner[k] != round(exact[k])]
    assert replaced == [9]
    assert abs(exact[9] - 19_400) == min(abs(exact - 19_400))


def test_margin_grid() -> None:
    assert MARGIN_GRID_S == (-INF, -30, -8, -4, -2, -1, 0, 1, 2, 4, 8, 30, INF)
    assert MARGIN_GRID_S[6] == 0.0
    assert tuple(-m for m in reversed(MARGIN_GRID_S)) == MARGIN_GRID_S


def test_margins_of_ones_own() -> None:
    codec = ActionCodec(2, "margin", "discrete", (-INF, -0.5, 0.5, 1.0))
    assert codec.space() == spaces.MultiDiscrete([4, 3, 4, 3])
    assert codec.neutral_margin_s == 0.5  # of two that are as near to 0 the larger one
    assert codec.neutral().tolist() == [2, 1, 2, 1]
    assert [c.margin_s for c in codec.decode([0, 1, 3, 1]).clusters] == [-INF, 1.0]
    assert codec.masks(((True, True, False), (False, True, True))).tolist() == [
        *[True] * 4, True, True, False, *[True] * 4, False, True, True,
    ]  # fmt: skip
    assert ActionCodec(1, "margin", "discrete", (0.5,)).neutral().tolist() == [0, 1]
    chosen = ActionCodec(1, "margin", "discrete", (0.0, 0.5, 1.0), margin_s=1.0)
    assert chosen.neutral().tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"margin_s is 0.7; it must be one of margins_s, \[0.0, 0.5, 1.0\]"):
        ActionCodec(1, "margin", "discrete", (0.0, 0.5, 1.0), margin_s=0.7)


@pytest.mark.parametrize(
    ("routing", "form", "margins_s", "message"),
    [
        ("threshold", "discrete", (0.0, 1.0), "belong to discrete margins, not discrete threshold"),
        ("margin", "continuous", (0.0, 1.0), "belong to discrete margins, not continuous margin"),
        ("margin", "discrete", (), "one or more rising numbers"),
        ("margin", "discrete", (1.0, 1.0), "one or more rising numbers"),
        ("margin", "discrete", (math.nan,), "one or more rising numbers"),
        ("margin", "discrete", (0.0, math.nan, 1.0), "one or more rising numbers"),
        ("margin", "discrete", (-INF, INF), "need a finite one"),
    ],
)
def test_margins_that_do_not_fit(routing: Any, form: Any, margins_s: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionCodec(1, routing, form, margins_s)


def test_moves() -> None:
    assert [(m.name, int(m)) for m in Move] == [
        ("PREFILL_TO_DECODE", 0),
        ("NONE", 1),
        ("DECODE_TO_PREFILL", 2),
    ]


# ------------------------------------------------------------------ decisions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of threshold_tokens and margin_s"),
        ({"threshold_tokens": 1.0, "margin_s": 1.0}, "exactly one of threshold_tokens and margin_s"),
        ({"threshold_tokens": -1.0}, "threshold_tokens must be >= 0, found -1.0"),
        ({"threshold_tokens": math.nan}, "must be a number"),
        ({"margin_s": math.nan}, "must be a number"),
    ],
)
def test_decisions_that_make_no_sense(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterDecision(**fields)


def test_defaults_of_a_decision() -> None:
    decision = Decision.same(2, threshold_tokens=5.0)
    assert decision.clusters == (ClusterDecision(threshold_tokens=5.0),) * 2
    assert decision.clusters[0].move is Move.NONE
    assert decision.clusters[0].cache_rule == "scarce"
    for fields in (
        {"threshold_tokens": 0.0},
        {"threshold_tokens": INF},
        {"margin_s": -INF},
        {"margin_s": INF},
    ):
        Decision.same(1, **fields)


def test_threshold_rule_at_equality_is_local() -> None:
    """Paper section 3.4.3: remote when l > t. A prompt of 19,400 incremental tokens stays, 19,401 goes."""
    assert not offload_by_threshold(19_400, 19_400.0)
    assert offload_by_threshold(19_401, 19_400.0)
    assert offload_by_threshold(1, 0.0)
    assert not offload_by_threshold(0, 0.0)
    assert not offload_by_threshold(10**9, INF)


def test_margin_rule_is_strict_and_its_ends_decide_alone() -> None:
    assert offload_by_margin(1.0, 3.0, 1.999)
    assert not offload_by_margin(1.0, 3.0, 2.0)
    assert offload_by_margin(5.0, 3.0, -2.5)
    for remote_s, local_s in product((0.0, 1.0, INF), repeat=2):
        assert offload_by_margin(remote_s, local_s, -INF)
        assert not offload_by_margin(remote_s, local_s, INF)
    assert not offload_by_margin(INF, INF, -30.0)


# ------------------------------------------------------------------ clocks and legality


@pytest.mark.parametrize(
    ("tick", "converting", "prefill", "decode", "min_prefill", "min_decode", "queue", "legal"),
    [
        (True, 0, 3, 5, 1, 1, 0, (True, True, True)),
        (False, 0, 3, 5, 1, 1, 0, (False, True, False)),  # not the slow clock's tick
        (True, 1, 3, 5, 1, 1, 0, (False, True, False)),  # one conversion at a time
        (True, 0, 1, 5, 1, 1, 0, (False, True, True)),  # min_prefill holds for what remains
        (True, 0, 3, 1, 1, 1, 0, (True, True, False)),  # min_decode too
        (True, 0, 3, 2, 1, 2, 0, (True, True, False)),
        (True, 0, 1, 5, 0, 1, 0, (True, True, True)),  # the last prefill node may go
        (True, 0, 1, 5, 0, 1, 1, (False, True, True)),  # but not while requests queue for it
        (True, 0, 2, 5, 0, 1, 9, (True, True, True)),
        (True, 0, 0, 5, 0, 1, 0, (False, True, True)),  # there is none to move
    ],
)
def test_legal_moves(
    tick: bool, converting: int, prefill: int, decode: int, min_prefill: int, min_decode: int, queue: int,
    legal: tuple[bool, bool, bool],
) -> None:  # fmt: skip
    assert legal_moves(tick, converting, prefill, decode, min_prefill, min_decode, queue) == legal


@given(
    st.booleans(), st.integers(0, 1), st.integers(0, 5), st.integers(1, 5), st.integers(0, 3), st.integers(1, 3),
    st.integers(0, 3),
)  # fmt: skip
def test_a_legal_move_never_breaks_a_floor(
    tick: bool, converting: int, prefill: int, decode: int, min_prefill: int, min_decode: int, queue: int
) -> None:
    to_decode, none, to_prefill = legal_moves(
        tick, converting, prefill, decode, min_prefill, min_decode, queue
    )
    assert none
    if to_decode:
        assert prefill - 1 >= min_prefill
    if to_prefill:
        assert decode - 1 >= min_decode
    if to_decode or to_prefill:
        assert tick
        assert not converting


# ------------------------------------------------------------------ spaces and decoding


def test_spaces() -> None:
    assert ActionCodec(2, "threshold", "discrete").space() == spaces.MultiDiscrete([18, 3, 18, 3])
    assert ActionCodec(1, "margin", "discrete").space() == spaces.MultiDiscrete([13, 3])
    for routing in ("threshold", "margin"):
        box = ActionCodec(2, routing, "continuous").space()
        assert box == spaces.Box(-1.0, 1.0, (4,), np.float32)


@pytest.mark.parametrize("routing", ["threshold", "margin"])
def test_every_discrete_action_is_its_grid_value_and_move(routing: Any) -> None:
    codec = ActionCodec(2, routing, "discrete")
    grid = THRESHOLD_GRID_TOKENS if routing == "threshold" else MARGIN_GRID_S
    for a, b in product(range(len(grid)), range(3)):
        first, second = codec.decode(np.array([a, b, 0, 2])).clusters
        assert (first.threshold_tokens if routing == "threshold" else first.margin_s) == grid[a]
        assert first.move is Move(b)
        assert (second.threshold_tokens if routing == "threshold" else second.margin_s) == grid[0]
        assert second.move is Move.DECODE_TO_PREFILL
        assert first.cache_rule == second.cache_rule == "scarce"  # not in the action space


UNIT = st.floats(-1, 1, width=32)


@given(UNIT, UNIT)
def test_continuous_thresholds_are_log_spaced_and_rise(x: float, y: float) -> None:
    codec = ActionCodec(1, "threshold", "continuous")
    a, b = (codec.decode(np.array([v, 0], np.float32)).clusters[0].threshold_tokens for v in (x, y))
    assert a is not None
    assert b is not None
    assert math.log(a) == pytest.approx(math.log(1000) + (x + 1) / 2 * math.log(131.072), rel=1e-12)
    assert (a < b) == (x < y) or abs(x - y) < 1e-14
    assert 1000 * (1 - 1e-12) <= a <= 131_072 * (1 + 1e-12)


@given(UNIT, UNIT)
def test_continuous_margins_are_odd_and_rise(x: float, y: float) -> None:
    codec = ActionCodec(1, "margin", "continuous")
    a, b, minus = (codec.decode(np.array([v, 0], np.float32)).clusters[0].margin_s for v in (x, y, -x))
    assert a is not None
    assert b is not None
    assert a == -minus if minus is not None else False
    assert (a < b) == (x < y) or abs(x - y) < 1e-14
    assert abs(a) <= 30 or abs(x) == 1


def test_ends_of_the_continuous_form() -> None:
    threshold = ActionCodec(1, "threshold", "continuous")
    margin = ActionCodec(1, "margin", "continuous")

    def of(codec: ActionCodec, x: float) -> ClusterDecision:
        return codec.decode(np.array([x, 0.0])).clusters[0]

    assert of(threshold, -1).threshold_tokens == 1000.0
    assert of(threshold, 1).threshold_tokens == pytest.approx(131_072.0, rel=1e-12)
    assert of(threshold, 0).threshold_tokens == pytest.approx(math.sqrt(1000 * 131_072))
    assert of(margin, -1).margin_s == -INF  # always
    assert of(margin, 1).margin_s == INF  # never
    assert of(margin, 0).margin_s == 0.0
    assert of(margin, math.nextafter(1, 0)).margin_s == pytest.approx(30.0)
    # outside: the nearest end, as a Gaussian policy may ask for more
    assert of(threshold, 5) == of(threshold, 1)
    assert of(margin, -7) == of(margin, -1)


@pytest.mark.parametrize("routing", ["threshold", "margin"])
def test_moves_by_thirds(routing: Any) -> None:
    codec = ActionCodec(1, routing, "continuous")
    cases = {-9: 0, -1: 0, -0.34: 0, -0.33: 1, 0: 1, 0.33: 1, 0.34: 2, 1: 2, 9: 2}
    for y, move in cases.items():
        assert codec.decode(np.array([0.0, y])).clusters[0].move is Move(move)


@pytest.mark.parametrize("codec", FORMS, ids=str)
def test_the_parts_are_independent(codec: ActionCodec) -> None:
    """Changing one part of an action changes that part of the decision and nothing else."""
    space = codec.space()
    space.seed(3)
    for _ in range(30):
        a, b = space.sample(), space.sample()
        for k in range(2 * codec.n_pd):
            mixed = a.copy()
            mixed[k] = b[k]
            for i, (was, now) in enumerate(
                zip(codec.decode(a).clusters, codec.decode(mixed).clusters, strict=True)
            ):
                routing_part, move_part = 2 * i == k, 2 * i + 1 == k
                assert now.move is was.move or move_part
                assert (now.threshold_tokens, now.margin_s) == (
                    was.threshold_tokens,
                    was.margin_s,
                ) or routing_part


@pytest.mark.parametrize("codec", FORMS, ids=str)
def test_neutral_changes_nothing(codec: ActionCodec) -> None:
    action = codec.neutral()
    assert action in codec.space()
    for cluster in codec.decode(action).clusters:
        assert cluster.move is Move.NONE
        if codec.routing == "margin":
            assert cluster.margin_s == 0.0
        else:
            assert cluster.threshold_tokens == pytest.approx(19_400, rel=1e-6)


@pytest.mark.parametrize(
    ("form", "action", "message"),
    [
        ("discrete", [0, 1, 0], r"action must have shape \(2,\), found \(3,\)"),
        ("discrete", 0, r"action must have shape \(2,\), found \(\)"),
        ("discrete", [[0, 1]], r"action must have shape \(2,\), found \(1, 2\)"),
        ("discrete", [18, 0], r"action part 0 is \(18, 0\); allowed whole numbers: 0..17, 0..2"),
        ("discrete", [0, 3], r"action part 0 is \(0, 3\)"),
        ("discrete", [-1, 0], r"action part 0 is \(-1, 0\)"),
        ("discrete", [0.5, 1.0], r"action part 0 is \(0.5, 1.0\); allowed whole numbers"),
        ("discrete", [0.0, 1.5], r"action part 0 is \(0.0, 1.5\)"),
        ("discrete", [math.nan, 1], "action part 0 is"),
        ("discrete", [INF, 1], "action part 0 is"),
        ("continuous", [math.nan, 0], "action part 0 is not finite"),
        ("continuous", [0, INF], "action part 0 is not finite"),
    ],
)
def test_actions_that_are_none(form: Any, action: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionCodec(1, "threshold", form).decode(action)


# ------------------------------------------------------------------ masks


@pytest.mark.parametrize("routing", ["threshold", "margin"])
def test_masks_are_the_parts_one_after_the_other(routing: Any) -> None:
    """sb3-contrib reads one flat array: the masks of the parts of the MultiDiscrete, in order."""
    codec = ActionCodec(2, routing, "discrete")
    legal = ((False, True, True), (True, True, False))
    mask = codec.masks(legal)
    parts = np.split(mask, np.cumsum(codec.space().nvec)[:-1])
    assert mask.dtype == np.bool_
    assert [p.tolist() for p in parts] == [
        [True] * len(codec.grid),
        [False, True, True],
        [True] * len(codec.grid),
        [True, True, False],
    ]


def test_masks_work_in_sb3_contrib() -> None:
    distributions = pytest.importorskip("sb3_contrib.common.maskable.distributions")
    torch = pytest.importorskip("torch")
    codec = ActionCodec(2, "threshold", "discrete")
    nvec = codec.space().nvec.tolist()
    logits = torch.zeros(200, sum(nvec))
    distribution = distributions.MaskableMultiCategoricalDistribution(nvec).proba_distribution(logits)
    mask = codec.masks(((False, True, False), (True, True, False)))
    distribution.apply_masking(np.tile(mask, (200, 1)))
    actions = distribution.sample().numpy()
    assert set(actions[:, 1]) == {1}
    assert set(actions[:, 3]) == {0, 1}
    assert len(set(actions[:, 0])) > 10
