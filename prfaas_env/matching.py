"""How many tokens of a prompt a cache can serve: the match rule of the hybrid prefix cache pool (paper section 3.2).

Attention KV is kept in blocks and matches partially: the longest leading run of cached blocks counts. Recurrent state
(and the windows of sliding-window layers) is kept as a checkpoint and serves one exact length only: the largest one
at which a checkpoint is cached and that lies within the run. One token at least must be prefilled to give a first
token, and only whole blocks match, so a hit is at most `input_tokens - 1`, rounded down to blocks.

Plain functions over numbers and arrays or lists: the engines compile them, a router calls them as they are.
"""

from __future__ import annotations

from prfaas_env.simulator.formulas import Ints

#: View of a cache as it is now (any other view is a number of a period, see `seen`).
SEE_NOW = -1

#: When a checkpoint of the state is kept, by the name of the scenario setting `prefix_pool.checkpoints`.
CHECKPOINT_RULES = ("none", "end_of_prompt", "every_n_tokens")
NO_CHECKPOINTS, END_OF_PROMPT, EVERY_N_TOKENS = range(3)


def full_blocks(input_tokens: int, block_tokens: int) -> int:
    """Whole blocks of a prompt: what can be stored. The tail behind them is never cached."""
    return input_tokens // block_tokens


def usable_blocks(input_tokens: int, block_tokens: int) -> int:
    """Most blocks of a prompt that a hit may have: whole ones that leave at least one token to prefill."""
    return max(input_tokens - 1, 0) // block_tokens


def checkpoint_at(rule: int, every_blocks: int, n_blocks: int, blocks: int) -> bool:
    """Whether a prompt of `n_blocks` whole blocks leaves a checkpoint after its first `blocks` blocks.

    Args:
        rule: NO_CHECKPOINTS; END_OF_PROMPT: after the last whole block; EVERY_N_TOKENS: at multiples of
            `every_blocks`, and at no other place.
        every_blocks: distance of checkpoints in blocks (read by EVERY_N_TOKENS alone).
        n_blocks: whole blocks of the prompt.
        blocks: place, 1..n_blocks.
    """
    if rule == END_OF_PROMPT:
        return blocks == n_blocks
    return rule == EVERY_N_TOKENS and blocks % every_blocks == 0


def seen(state: int, period: int) -> int:
    """1 if an entry is cached in a view, else 0.

    `state` is 1 or 0 for cached or not; an entry that remembers also holds what it was at the start of the period in
    which it last changed (see `changed`). `period` is SEE_NOW, or the present period: then the view is that of its
    start.
    """
    if state >> 2 == period:
        return (state >> 1) & 1
    return state & 1


def changed(state: int, period: int, cached: int) -> int:
    """State of an entry that becomes cached (1) or not (0) in a period: `period * 4 + before * 2 + now`."""
    return period << 2 | seen(state, period) << 1 | cached


def matched_blocks(
    ids: Ints,
    first: int,
    most_blocks: int,
    states: Ints,
    attention_at: int,
    checkpoints_at: int,
    needs_state: bool,
    period: int,
) -> int:
    """Leading blocks of a prompt that one cache can serve.

    Args:
        ids: block ids; block k of the prompt is `ids[first + k]`. An id stands for a block and all blocks before it.
        first: position of the prompt's first id.
        most_blocks: `usable_blocks` of the prompt.
        states: entries of the cache (see `seen`): the attention block of id b at `attention_at + b`, the checkpoint
            behind it at `checkpoints_at + b`.
        attention_at: see `states`.
        checkpoints_at: see `states`.
        needs_state: the model has recurrent state or windows, so only lengths with a checkpoint can be used.
        period: the view, SEE_NOW or a period.

    Returns:
        Blocks, 0..most_blocks; times the block size these are the hit tokens.
    """
    usable = 0
    for k in range(most_blocks):
        block = ids[first + k]
        if seen(states[attention_at + block], period) == 0:
            break
        if not needs_state or seen(states[checkpoints_at + block], period) != 0:
            usable = k + 1
    return usable
