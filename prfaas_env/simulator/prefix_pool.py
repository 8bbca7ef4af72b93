"""The hybrid prefix cache pool of every cluster (paper section 3.2), as functions over one array of whole numbers.

Both engines call these functions, one on a list, one compiled on an int64 array `C`; they differ in when they call.

One pool per cluster (PrfaaS clusters first, then PD clusters) with one capacity for everything in it, counted in whole
units of one attention block (block tokens x bytes per token). Two classes share it:

- Prefix cache: attention blocks (1 unit each) and checkpoints of the state, which take ceil(state bytes / unit) units.
  The state is the recurrent state and the full windows of sliding-window layers. One list orders the entries of both
  kinds by last use; the least recently used one goes first. A pinned entry is in no list and is never evicted.
- Transfer cache: units held for a cache that is being sent, from the start of its prefill to the end of its hand-over.

Order of use: a prompt that is stored or matched is touched from its last block to its first, the checkpoint behind a
block just before (so as less recent than) that block; the front of a prefix is the most recent. An entry that loses its
last pin is touched too, in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prfaas_env.base import PrfaasError
from prfaas_env.matching import (
    CHECKPOINT_RULES,
    END_OF_PROMPT,
    SEE_NOW,
    changed,
    checkpoint_at,
    full_blocks,
    matched_blocks,
    usable_blocks,
)
from prfaas_env.simulator.formulas import IntArray, Ints, ns_from_s

if TYPE_CHECKING:
    from prfaas_env.scenarios.models import Scenario
    from prfaas_env.simulator.world import World
    from prfaas_env.workload.requests import RequestTable

# ------------------------------------------------------------------ scalars of C
(
    ON,  # 0: no pool, and the array ends here
    N_POOLS,
    N_BLOCKS,
    BLOCK_TOKENS,
    NEEDS_STATE,
    RULE,
    EVERY_BLOCKS,
    CHECKPOINT_UNITS,
    UNIT_BYTES,
    AGE_NS,
    O_REQUESTS,
    O_OFFSETS,
    O_IDS,
    O_POOLS,
    W_POOL,
    INPUT_TOKENS,  # from here on as in `records.PREFIX_COUNTERS`
    HIT_TOKENS,
    MISPREDICTIONS,
    EVICTIONS,
    COPIES,
    UNSTORED,
    UNHELD_UNITS,
    N_SCALARS,
) = range(23)

#: A pool: scalars, then four arrays over its entries. Entry b < N_BLOCKS is the attention block of id b, entry
#: N_BLOCKS + b the checkpoint behind it (there are none if the model needs no state).
H_CAPACITY, H_USED, H_PINNED, H_HELD, H_OLDEST, H_NEWEST, W_HEAD = range(7)
E_STATE, E_OLDER, E_NEWER, E_PINS = range(4)

#: What a request has pinned and holds, and its copy under way.
R_PD_BLOCKS, R_OTHER, R_OTHER_BLOCKS, R_HELD_POOL, R_HELD, R_COPY_POOL, R_COPY_BLOCKS, W_REQUEST = range(8)

#: Capacity of a pool without a limit, in units.
NO_LIMIT_UNITS = 1 << 60


# ------------------------------------------------------------------ small parts


def pool_at(C: Ints, pool: int) -> int:
    """Where a pool starts."""
    return C[O_POOLS] + pool * C[W_POOL]


def request_at(C: Ints, r: int) -> int:
    """Where the numbers of a request start."""
    return C[O_REQUESTS] + r * W_REQUEST


def n_entries(C: Ints) -> int:
    """Entries of one pool."""
    return C[N_BLOCKS] * (1 + C[NEEDS_STATE])


def entry_at(base: int, n: int, field: int, entry: int) -> int:
    """Where a field of an entry of the pool at `base` is; `n` is `n_entries` (read once per prompt, not per entry)."""
    return base + W_HEAD + field * n + entry


def entry_units(C: Ints, entry: int) -> int:
    """Units that an entry takes."""
    return 1 if entry < C[N_BLOCKS] else C[CHECKPOINT_UNITS]


def period_of(C: Ints, now_ns: int) -> int:
    """Number of the period between two syncs of the metadata that holds `now_ns`; a sync comes before its instant."""
    return now_ns // C[AGE_NS] if C[AGE_NS] > 0 else 0


def view_of(C: Ints, now_ns: int) -> int:
    """The view that routing has at `now_ns`: the pools as they were at the last sync."""
    return period_of(C, now_ns) if C[AGE_NS] > 0 else SEE_NOW


def unlink(C: Ints, base: int, n: int, entry: int) -> None:
    """Take an entry out of the list of its pool."""
    older = C[entry_at(base, n, E_OLDER, entry)]
    newer = C[entry_at(base, n, E_NEWER, entry)]
    if older >= 0:
        C[entry_at(base, n, E_NEWER, older)] = newer
    else:
        C[base + H_OLDEST] = newer
    if newer >= 0:
        C[entry_at(base, n, E_OLDER, newer)] = older
    else:
        C[base + H_NEWEST] = older


def link_newest(C: Ints, base: int, n: int, entry: int) -> None:
    """Put an entry at the recent end of the list."""
    newest = C[base + H_NEWEST]
    C[entry_at(base, n, E_OLDER, entry)] = newest
    C[entry_at(base, n, E_NEWER, entry)] = -1
    if newest >= 0:
        C[entry_at(base, n, E_NEWER, newest)] = entry
    else:
        C[base + H_OLDEST] = entry
    C[base + H_NEWEST] = entry


def touch(C: Ints, base: int, n: int, entry: int) -> None:
    """Make an entry the most recently used one; a pinned one is in no list."""
    if C[entry_at(base, n, E_PINS, entry)] == 0 and C[base + H_NEWEST] != entry:
        unlink(C, base, n, entry)
        link_newest(C, base, n, entry)


def pin(C: Ints, base: int, n: int, entry: int) -> None:
    """Keep a cached entry from being evicted."""
    at = entry_at(base, n, E_PINS, entry)
    if C[at] == 0:
        unlink(C, base, n, entry)
        C[base + H_PINNED] += entry_units(C, entry)
    C[at] += 1


def unpin(C: Ints, base: int, n: int, entry: int) -> None:
    """Undo one `pin`; the last one touches the entry."""
    at = entry_at(base, n, E_PINS, entry)
    C[at] -= 1
    if C[at] == 0:
        C[base + H_PINNED] -= entry_units(C, entry)
        link_newest(C, base, n, entry)


def make_room(C: Ints, base: int, n: int, units: int, period: int) -> bool:
    """Evict least recently used entries until `units` are free; False, with nothing evicted, if they cannot be."""
    free = C[base + H_CAPACITY] - C[base + H_USED] - C[base + H_HELD]
    if free + C[base + H_USED] - C[base + H_PINNED] < units:
        return False
    while free < units:
        entry = C[base + H_OLDEST]
        unlink(C, base, n, entry)
        at = entry_at(base, n, E_STATE, entry)
        C[at] = changed(C[at], period, 0)
        C[base + H_USED] -= entry_units(C, entry)
        C[EVICTIONS] += 1
        free += entry_units(C, entry)
    return True


def put(C: Ints, base: int, n: int, entry: int, period: int) -> bool:
    """Have an entry in the pool and pin it; False if there is no room."""
    at = entry_at(base, n, E_STATE, entry)
    if C[at] & 1:
        pin(C, base, n, entry)
        return True
    units = entry_units(C, entry)
    if not make_room(C, base, n, units, period):
        return False
    C[at] = changed(C[at], period, 1)
    C[base + H_USED] += units
    C[base + H_PINNED] += units
    C[entry_at(base, n, E_PINS, entry)] = 1
    return True


# ------------------------------------------------------------------ what an engine calls


def cached_blocks(C: Ints, pool: int, r: int, input_tokens: int, view: int) -> int:
    """Blocks of request r that a pool can serve in a view (`SEE_NOW`, or `view_of` an instant)."""
    states = entry_at(pool_at(C, pool), n_entries(C), E_STATE, 0)
    first = C[O_OFFSETS] + r
    return matched_blocks(
        C,
        C[O_IDS] + C[first],
        min(usable_blocks(input_tokens, C[BLOCK_TOKENS]), C[first + 1] - C[first]),
        C,
        states,
        states + C[N_BLOCKS],
        C[NEEDS_STATE] != 0,
        view,
    )


def pin_prefix(C: Ints, pool: int, r: int, n_blocks: int) -> None:
    """Touch the first `n_blocks` blocks of request r, pin them and the checkpoint behind them; the pool has them."""
    base = pool_at(C, pool)
    n = n_entries(C)
    ids = C[O_IDS] + C[C[O_OFFSETS] + r]
    for k in range(n_blocks - 1, -1, -1):
        block = C[ids + k]
        if C[NEEDS_STATE] != 0:
            checkpoint = C[N_BLOCKS] + block
            if k == n_blocks - 1:
                pin(C, base, n, checkpoint)
            elif C[entry_at(base, n, E_STATE, checkpoint)] & 1:
                touch(C, base, n, checkpoint)
        pin(C, base, n, block)


def unpin_prefix(C: Ints, pool: int, r: int, n_blocks: int) -> None:
    """Undo `pin_prefix`."""
    base = pool_at(C, pool)
    n = n_entries(C)
    ids = C[O_IDS] + C[C[O_OFFSETS] + r]
    for k in range(n_blocks - 1, -1, -1):
        block = C[ids + k]
        if C[NEEDS_STATE] != 0 and k == n_blocks - 1:
            unpin(C, base, n, C[N_BLOCKS] + block)
        unpin(C, base, n, block)


def store_prefix(C: Ints, pool: int, r: int, n_blocks: int, rule: int, now_ns: int) -> None:
    """Store the first `n_blocks` blocks of request r with their checkpoints by a rule, from the front on.

    What is stored already stays; the rest makes room by evicting entries of others. When nothing evictable is left,
    the rest is not stored, and counted.
    """
    base = pool_at(C, pool)
    n = n_entries(C)
    ids = C[O_IDS] + C[C[O_OFFSETS] + r]
    period = period_of(C, now_ns)
    kept = 0
    whole = True
    while whole and kept < n_blocks:
        block = C[ids + kept]
        if not put(C, base, n, block, period):
            break
        kept += 1
        if C[NEEDS_STATE] != 0 and checkpoint_at(rule, C[EVERY_BLOCKS], n_blocks, kept):
            whole = put(C, base, n, C[N_BLOCKS] + block, period)
    C[UNSTORED] += n_blocks - kept + (0 if whole else 1)
    for k in range(kept - 1, -1, -1):
        block = C[ids + k]
        if C[NEEDS_STATE] != 0:
            checkpoint = C[N_BLOCKS] + block
            stored = checkpoint_at(rule, C[EVERY_BLOCKS], n_blocks, k + 1) and (whole or k + 1 < kept)
            if stored:
                unpin(C, base, n, checkpoint)
            elif C[entry_at(base, n, E_STATE, checkpoint)] & 1:
                touch(C, base, n, checkpoint)
        unpin(C, base, n, block)


def store_prompt(C: Ints, pool: int, r: int, input_tokens: int, now_ns: int) -> None:
    """Store the whole blocks of the prompt of request r with the checkpoints of the scenario."""
    first = C[O_OFFSETS] + r
    n_blocks = min(full_blocks(input_tokens, C[BLOCK_TOKENS]), C[first + 1] - C[first])
    store_prefix(C, pool, r, n_blocks, C[RULE], now_ns)


def claim(
    C: Ints, r: int, input_tokens: int, pd_pool: int, pd_blocks: int, other: int, other_blocks: int, used: int
) -> None:
    """Pin what an accepted request found in the pools and count its tokens.

    Args:
        C: the array.
        r: the request.
        input_tokens: its prompt.
        pd_pool: pool of its PD cluster.
        pd_blocks: blocks found there.
        other: pool of the PrfaaS cluster that serves it or that its copy comes from; -1 if there is none.
        other_blocks: blocks found there.
        used: blocks that its prefill will not compute.
    """
    at = request_at(C, r)
    C[at + R_PD_BLOCKS] = pd_blocks
    C[at + R_OTHER] = other
    C[at + R_OTHER_BLOCKS] = other_blocks
    C[at + R_HELD_POOL] = -1
    C[at + R_COPY_POOL] = -1
    pin_prefix(C, pd_pool, r, pd_blocks)
    if other >= 0:
        pin_prefix(C, other, r, other_blocks)
    C[INPUT_TOKENS] += input_tokens
    C[HIT_TOKENS] += used * C[BLOCK_TOKENS]


def hold(C: Ints, pool: int, r: int, n_bytes: int, now_ns: int) -> None:
    """A prefill starts: hold units for the `n_bytes` that it will send. What does not fit is counted and not held."""
    base = pool_at(C, pool)
    at = request_at(C, r)
    units = -(-n_bytes // C[UNIT_BYTES])
    most = C[base + H_CAPACITY] - C[base + H_HELD] - C[base + H_PINNED]
    taken = min(units, most)
    make_room(C, base, n_entries(C), taken, period_of(C, now_ns))
    C[base + H_HELD] += taken
    C[UNHELD_UNITS] += units - taken
    C[at + R_HELD_POOL] = pool
    C[at + R_HELD] = taken


def release(C: Ints, r: int) -> None:
    """Drop the transfer cache of a request, if it has one."""
    at = request_at(C, r)
    if C[at + R_HELD] > 0:
        C[pool_at(C, C[at + R_HELD_POOL]) + H_HELD] -= C[at + R_HELD]
        C[at + R_HELD] = 0


def let_go(C: Ints, pd_pool: int, r: int) -> None:
    """Unpin what a request has pinned, if it has something pinned."""
    at = request_at(C, r)
    if C[at + R_OTHER_BLOCKS] > 0:
        unpin_prefix(C, C[at + R_OTHER], r, C[at + R_OTHER_BLOCKS])
        C[at + R_OTHER_BLOCKS] = 0
    if C[at + R_PD_BLOCKS] > 0:
        unpin_prefix(C, pd_pool, r, C[at + R_PD_BLOCKS])
        C[at + R_PD_BLOCKS] = 0


def prefill_ended(C: Ints, pool: int, pd_pool: int, r: int, input_tokens: int, now_ns: int) -> None:
    """A prefill is done in the cluster of `pool`: unpin what the request had found and store its prompt there."""
    # stored first: what the request had found stays pinned meanwhile and is touched once
    store_prompt(C, pool, r, input_tokens, now_ns)
    let_go(C, pd_pool, r)


def handed_over(C: Ints, pd_pool: int, r: int, input_tokens: int, remote: bool, now_ns: int) -> None:
    """A cache is at the decode side: drop its transfer cache, and store the prompt there if it came over a link."""
    release(C, r)
    if remote:
        store_prompt(C, pd_pool, r, input_tokens, now_ns)


def begin_copy(C: Ints, r: int, target: int, n_blocks: int) -> None:
    """A prefix of `n_blocks` blocks is on its way to the pool `target`."""
    at = request_at(C, r)
    C[at + R_COPY_POOL] = target
    C[at + R_COPY_BLOCKS] = n_blocks
    C[COPIES] += 1


def copying(C: Ints, r: int) -> bool:
    """Whether a copy for request r is under way."""
    return C[request_at(C, r) + R_COPY_BLOCKS] > 0


def copy_ended(C: Ints, r: int, now_ns: int) -> None:
    """A copied prefix has arrived: its target has it now, with one checkpoint behind it. It is not pinned there."""
    at = request_at(C, r)
    store_prefix(C, C[at + R_COPY_POOL], r, C[at + R_COPY_BLOCKS], END_OF_PROMPT, now_ns)
    C[at + R_COPY_BLOCKS] = 0


def forget(C: Ints, pd_pool: int, r: int) -> None:
    """A request is given up or starts anew: drop its pins, its transfer cache and its copy under way, if any."""
    let_go(C, pd_pool, r)
    release(C, r)
    C[request_at(C, r) + R_COPY_BLOCKS] = 0


# ------------------------------------------------------------------ a world's array


class PoolState(NamedTuple):
    """One pool now, in units; entries as block numbers (checkpoints apart), least recently used first."""

    capacity: int
    used: int
    pinned: int
    held: int
    order: tuple[int, ...]
    """Entries that may be evicted, least recently used first; checkpoints as N_BLOCKS + block."""
    cached: frozenset[int]
    pins: dict[int, int]


def pool_state(C: Ints, pool: int) -> PoolState:
    """Read one pool (for tests and curious people; engines do not need it)."""
    base, n = pool_at(C, pool), n_entries(C)
    order = []
    entry = C[base + H_OLDEST]
    while entry >= 0:
        order.append(int(entry))
        entry = C[entry_at(base, n, E_NEWER, entry)]
    entries = range(n)
    return PoolState(
        int(C[base + H_CAPACITY]),
        int(C[base + H_USED]),
        int(C[base + H_PINNED]),
        int(C[base + H_HELD]),
        tuple(order),
        frozenset(e for e in entries if C[entry_at(base, n, E_STATE, e)] & 1),
        {e: int(C[entry_at(base, n, E_PINS, e)]) for e in entries if C[entry_at(base, n, E_PINS, e)]},
    )


def has_pool(scenario: Scenario, requests: RequestTable) -> bool:
    """Whether the pools do anything: there are some, and the workload has prefix data."""
    return scenario.prefix_pool is not None and requests.block_tokens > 0


def state_bytes(scenario: Scenario) -> int:
    """Bytes of one checkpoint: recurrent state and full windows. 0: the model has attention blocks alone."""
    kv = scenario.model.kv
    return kv.fixed_bytes + sum(w.bytes_per_token * w.window_tokens for w in kv.windows)


def every_blocks(scenario: Scenario, block_tokens: int) -> int:
    """Distance of checkpoints in blocks, for `every_n_tokens`; 0 for other rules.

    Raises:
        PrfaasError: it is no whole number of blocks.
    """
    pool = scenario.prefix_pool
    if pool is None or pool.checkpoint_every_tokens is None or block_tokens == 0:
        return 0
    if pool.checkpoint_every_tokens % block_tokens:
        raise PrfaasError(
            f"scenario {scenario.name}: prefix_pool.checkpoint_every_tokens is {pool.checkpoint_every_tokens}; "
            f"it must be a whole multiple of the workload's block of {block_tokens} tokens"
        )
    return pool.checkpoint_every_tokens // block_tokens


def prefix_numbers(table: RequestTable) -> tuple[IntArray, IntArray]:
    """Whole blocks of every prompt as dense numbers 0..U-1: equal ones behind equal blocks get equal numbers.

    A trace may use one id behind different blocks; a number here stands for a block and all blocks before it. The
    last id of a row that covers a partial block is left out.

    Returns:
        `(offsets, numbers)`, int64 of shapes (n + 1,) and (total whole blocks,).
    """
    n = len(table)
    if n == 0 or table.block_tokens == 0:
        return np.zeros(n + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    starts = table.block_offsets[:-1]
    counts = np.minimum(np.diff(table.block_offsets), table.input_tokens // table.block_tokens)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    ids = table.block_ids[np.repeat(starts, counts) + within]
    _, numbers = np.unique(ids, return_inverse=True)
    before = np.concatenate(([-1], numbers[:-1]))
    before[within == 0] = -1
    pairs = np.unique(numbers * (len(ids) + 1) + before + 1)
    if len(pairs) == (numbers.max() + 1 if len(numbers) else 0):
        return offsets, numbers.astype(np.int64)  # each id has one place only
    nodes: dict[tuple[int, int], int] = {}
    out = []
    node = -1
    for first, number in zip((within == 0).tolist(), numbers.tolist(), strict=True):
        node = nodes.setdefault((-1 if first else node, number), len(nodes))
        out.append(node)
    return offsets, np.array(out, dtype=np.int64)


def start_pools(world: World) -> IntArray:
    """The array of a world with empty pools; of one number, 0, where there is no pool or no prefix data."""
    scenario, table = world.scenario, world.requests
    pool = scenario.prefix_pool
    if pool is None or not has_pool(scenario, table):
        return np.zeros(1, dtype=np.int64)
    offsets, numbers = prefix_numbers(table)
    n_blocks = int(numbers.max()) + 1 if len(numbers) else 0
    unit_bytes = table.block_tokens * scenario.model.kv.bytes_per_token
    state = state_bytes(scenario)
    deployment = scenario.deployment
    n_pools = len(deployment.prfaas) + len(deployment.pd)
    entries = n_blocks * (2 if state else 1)
    width = W_HEAD + 4 * entries
    o_requests = N_SCALARS
    o_offsets = o_requests + len(table) * W_REQUEST
    o_ids = o_offsets + len(offsets)
    o_pools = o_ids + len(numbers)
    out = np.zeros(o_pools + n_pools * width, dtype=np.int64)
    every = every_blocks(scenario, table.block_tokens)
    for name, value in (
        (ON, 1),
        (N_POOLS, n_pools),
        (N_BLOCKS, n_blocks),
        (BLOCK_TOKENS, table.block_tokens),
        (NEEDS_STATE, state > 0),
        (RULE, CHECKPOINT_RULES.index(pool.checkpoints)),
        (EVERY_BLOCKS, max(every, 1)),
        (CHECKPOINT_UNITS, -(-state // unit_bytes)),
        (UNIT_BYTES, unit_bytes),
        (AGE_NS, ns_from_s(pool.metadata_age_s)),
        (O_REQUESTS, o_requests),
        (O_OFFSETS, o_offsets),
        (O_IDS, o_ids),
        (O_POOLS, o_pools),
        (W_POOL, width),
    ):
        out[name] = value
    out[o_offsets:o_ids] = offsets
    out[o_ids:o_pools] = numbers
    for k in range(n_pools):
        base = o_pools + k * width
        capacity = pool.prfaas_capacity_bytes if k < len(deployment.prfaas) else pool.pd_capacity_bytes
        out[base + H_CAPACITY] = NO_LIMIT_UNITS if capacity is None else capacity // unit_bytes
        out[base + H_OLDEST] = out[base + H_NEWEST] = -1
    return out
