"""The match rule, by hand: blocks from the front, checkpoints at exact lengths, one token always left."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas_env.matching import (
    CHECKPOINT_RULES,
    END_OF_PROMPT,
    EVERY_N_TOKENS,
    NO_CHECKPOINTS,
    SEE_NOW,
    changed,
    checkpoint_at,
    full_blocks,
    matched_blocks,
    seen,
    usable_blocks,
)

N = 8
"""Blocks that the caches here know: ids 0..7, checkpoints behind them."""


def cache(attention, checkpoints=()):
    states = [0] * (2 * N)
    for block in attention:
        states[block] = 1
    for block in checkpoints:
        states[N + block] = 1
    return states


def match(ids, states, *, most=None, needs_state=False, period=SEE_NOW):
    return matched_blocks(ids, 0, len(ids) if most is None else most, states, 0, N, needs_state, period)


@pytest.mark.parametrize(
    ("tokens", "full", "usable"),
    [
        (0, 0, 0),
        (1, 0, 0),
        (511, 0, 0),
        (512, 1, 0),  # a hit of all 512 would leave nothing to prefill
        (513, 1, 1),
        (1023, 1, 1),
        (1024, 2, 1),
        (1025, 2, 2),
    ],
)
def test_whole_blocks_count_and_one_token_is_left(tokens, full, usable):
    assert full_blocks(tokens, 512) == full
    assert usable_blocks(tokens, 512) == usable


def test_without_state_the_leading_run_counts():
    assert match([0, 1, 2, 3], cache([0, 1, 2, 3])) == 4
    assert match([0, 1, 2, 3], cache([0, 1, 3])) == 2  # block 3 is cached, but not behind a run
    assert match([0, 1, 2, 3], cache([1, 2, 3])) == 0
    assert match([4, 5], cache([0, 1])) == 0
    assert match([], cache([0])) == 0


def test_never_more_than_the_blocks_that_may_be_used():
    assert match([0, 1, 2, 3], cache([0, 1, 2, 3]), most=3) == 3
    assert match([0, 1, 2, 3], cache([0, 1, 2, 3], [1, 3]), most=3, needs_state=True) == 2


@pytest.mark.parametrize(
    ("attention", "checkpoints", "hit"),
    [
        ([0, 1, 2, 3], [], 0),  # a state that nobody kept
        ([0, 1, 2, 3], [1], 2),
        ([0, 1, 2, 3], [1, 2], 3),  # the largest
        ([0, 1, 2, 3], [3], 4),
        ([0, 1], [1, 3], 2),  # the checkpoint behind block 3 lies outside the run
        ([0, 1], [2, 3], 0),
        ([0, 2, 3], [0, 3], 1),
    ],
)
def test_with_state_only_checkpoints_within_the_run_count(attention, checkpoints, hit):
    assert match([0, 1, 2, 3], cache(attention, checkpoints), needs_state=True) == hit


def test_arrays_with_offsets():
    """Ids and entries of many prompts and caches lie in one array."""
    array = np.array([9, 9, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], dtype=np.int64)
    # ids 5, 6, 7 at 2; attention entries from 7 on (5 and 6 at 12 and 13), checkpoints from 16 on (6 at 22)
    assert matched_blocks(array, 2, 3, array, 7, 16, True, SEE_NOW) == 2
    assert matched_blocks(array, 2, 3, array, 7, 16, False, SEE_NOW) == 2


def test_places_of_checkpoints():
    def places(rule, every, n):
        return [b for b in range(1, n + 1) if checkpoint_at(rule, every, n, b)]

    assert places(NO_CHECKPOINTS, 1, 7) == []
    assert places(END_OF_PROMPT, 1, 7) == [7]
    assert places(EVERY_N_TOKENS, 3, 7) == [3, 6]  # and none at the end
    assert places(EVERY_N_TOKENS, 1, 3) == [1, 2, 3]
    assert places(EVERY_N_TOKENS, 8, 7) == []
    assert CHECKPOINT_RULES == ("none", "end_of_prompt", "every_n_tokens")


def test_a_view_is_what_was_cached_when_the_period_began():
    state = 0
    assert (seen(state, SEE_NOW), seen(state, 0)) == (0, 0)
    state = changed(state, 3, 1)  # stored in period 3
    assert (seen(state, SEE_NOW), seen(state, 3), seen(state, 4)) == (1, 0, 1)
    state = changed(state, 3, 0)  # evicted again in the same period
    assert (seen(state, SEE_NOW), seen(state, 3), seen(state, 4)) == (0, 0, 0)
    state = changed(changed(state, 3, 1), 7, 0)  # stored in 3, evicted in 7
    assert (seen(state, SEE_NOW), seen(state, 7), seen(state, 8)) == (0, 1, 0)
    state = changed(state, 7, 1)  # and stored again: at the start of period 7 it was there too
    assert (seen(state, SEE_NOW), seen(state, 7), seen(state, 8)) == (1, 1, 1)


def test_a_stale_view_matches_what_was_there():
    states = [changed(0, 1, 1), changed(1, 2, 0), *[0] * 14]
    assert match([0, 1], states, period=2) == 2
    assert match([0, 1], states, period=1) == 0
    assert match([0, 1], states) == 1
