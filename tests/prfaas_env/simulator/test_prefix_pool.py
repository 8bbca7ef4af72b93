"""One pool: order of use, pins, room, the two classes, and the numbers of a world; by hand and against a slow model."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.matching import END_OF_PROMPT, EVERY_N_TOKENS, NO_CHECKPOINTS, SEE_NOW
from prfaas_env.simulator import prefix_pool as X
from prfaas_env.simulator.records import PREFIX_COUNTERS
from prfaas_env.workload.requests import RequestTable

from .conftest import tiny_scenario, tiny_world

BLOCK = 100
UNIT = BLOCK * 1000
"""Bytes of one unit: 100 tokens of 1,000 bytes."""
PD = 1
"""Number of the pool of the PD cluster; 0 is that of the PrfaaS cluster."""


def table_of(rows, lengths=None):
    """Prompts with these ids, `lengths` tokens long (default: one token more than their whole blocks)."""
    lengths = [BLOCK * len(row) + 1 for row in rows] if lengths is None else lengths
    n = len(rows)
    return RequestTable(
        arrival_ns=np.arange(n, dtype=np.int64),
        input_tokens=np.array(lengths, dtype=np.int64),
        output_tokens=np.ones(n, dtype=np.int64),
        session=np.full(n, -1, dtype=np.int64),
        block_offsets=np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64),
        block_ids=np.concatenate([np.zeros(0, dtype=np.int64), *[np.array(r, dtype=np.int64) for r in rows]]),
        block_tokens=BLOCK,
    )


def start(rows, units, lengths=None, *, kv=None, **pool):
    """The array of a world with these prompts and a PD pool of so many units; PrfaaS pools have no limit."""
    settings_ = {
        "prfaas_capacity_bytes": None,
        "pd_capacity_bytes": None if units is None else units * UNIT + UNIT // 2,  # whole units only
        **pool,
    }
    scenario = tiny_scenario(kv=kv or {}).replace(prefix_pool=settings_)
    world = dataclasses.replace(tiny_world(scenario, []), requests=table_of(rows, lengths))
    return X.start_pools(world).tolist()


def pd(C):
    return X.pool_state(C, PD)


def counter(C, name):
    return C[X.INPUT_TOKENS + PREFIX_COUNTERS.index(name)]


def store(C, r, n=None, now_ns=0, pool=PD):
    n = C[C[X.O_OFFSETS] + r + 1] - C[C[X.O_OFFSETS] + r] if n is None else n
    X.store_prefix(C, pool, r, n, C[X.RULE], now_ns)


# ------------------------------------------------------------------------------------------ order of use


def test_a_prompt_leaves_its_front_as_the_most_recent():
    C = start([[0, 1, 2], [3]], 10)
    store(C, 0)
    assert pd(C).order == (2, 1, 0)
    store(C, 1)
    assert pd(C).order == (2, 1, 0, 3)
    store(C, 0)  # stored again: touched
    assert pd(C).order == (3, 2, 1, 0)
    assert pd(C).used == 4


def test_the_least_recently_used_goes_first():
    C = start([[0, 1, 2], [3, 4], [5]], 4)
    store(C, 0)
    store(C, 1)  # one unit was free: the tail of prompt 0 goes
    assert pd(C).order == (1, 0, 4, 3)
    assert counter(C, "evictions") == 1
    store(C, 0, 1)  # touches block 0 alone
    store(C, 2)
    assert pd(C).order == (4, 3, 0, 5)  # block 1 was the oldest


def test_a_checkpoint_is_older_than_its_block_and_takes_its_units():
    # state of 250,000 bytes: 3 units
    C = start([[0, 1], [0, 1, 2]], 20, kv={"fixed_bytes": 250_000})
    assert C[X.CHECKPOINT_UNITS] == 3
    n = C[X.N_BLOCKS]
    store(C, 0)
    assert pd(C).order == (n + 1, 1, 0)
    assert pd(C).used == 5
    store(C, 1)  # checkpoint behind block 2; the one behind block 1 is touched too
    assert pd(C).order == (n + 2, 2, n + 1, 1, 0)
    assert pd(C).used == 9


def test_windows_count_with_the_state():
    """A preset with 39 windowed layers (window 128): a checkpoint holds the full windows, an exact length only."""
    kv = {"fixed_bytes": 0, "windows": [{"bytes_per_token": 39 * 40, "window_tokens": 128}]}
    C = start([[0, 1], [0, 1]], None, kv=kv)
    assert C[X.CHECKPOINT_UNITS] == -(-39 * 40 * 128 // UNIT) == 2
    X.store_prefix(C, PD, 0, 2, NO_CHECKPOINTS, 0)
    assert X.cached_blocks(C, PD, 1, 10_000, SEE_NOW) == 0
    X.store_prefix(C, PD, 0, 2, END_OF_PROMPT, 0)
    assert X.cached_blocks(C, PD, 1, 10_000, SEE_NOW) == 2


def test_transfer_bytes_of_windows_stop_growing_while_pool_units_do_not():
    """9 full and 39 windowed layers: on the wire the windows are capped at 128 tokens, the pool reserves whole ones."""
    kv = tiny_scenario(
        kv={"bytes_per_token": 9 * 40, "windows": [{"bytes_per_token": 39 * 40, "window_tokens": 128}]}
    ).model.kv
    assert [kv.transfer_bytes(n) for n in (1, 128, 129, 8192)] == [1920, 245_760, 246_120, 3_148_800]
    assert [kv.reserved_bytes(n) for n in (1, 128, 129, 8192)] == [1920, 245_760, 247_680, 15_728_640]


# ------------------------------------------------------------------------------------------ room


def test_what_does_not_fit_is_not_stored_and_counted():
    C = start([[0, 1, 2, 3]], 3)
    store(C, 0)
    assert pd(C).cached == {0, 1, 2}  # the front
    assert counter(C, "unstored") == 1
    assert counter(C, "evictions") == 0  # nothing of its own is put out


def test_a_checkpoint_without_room_is_counted_and_evicts_nothing():
    C = start([[9], [0, 1]], 3, kv={"fixed_bytes": 250_000}, checkpoints="none")
    store(C, 0)
    X.store_prefix(C, PD, 1, 2, END_OF_PROMPT, 0)  # needs 3 units more, of which only block 9 could go
    assert pd(C).cached == {0, 1, 2}  # numbers 0, 1 and 2 are ids 0, 1 and 9
    assert counter(C, "unstored") == 1
    assert counter(C, "evictions") == 0


def test_a_pool_of_no_capacity_holds_nothing():
    C = start([[0, 1]], 0)
    store(C, 0)
    X.hold(C, PD, 0, 5 * UNIT, 0)
    assert pd(C)[:4] == (0, 0, 0, 0)
    assert (counter(C, "unstored"), counter(C, "unheld_units")) == (2, 5)


def test_no_limit_never_evicts():
    C = start([list(range(50 * k, 50 * k + 50)) for k in range(20)], None)
    for r in range(20):
        store(C, r)
        X.hold(C, PD, r, 10**15, 0)
    assert pd(C).used == 1000
    assert (counter(C, "evictions"), counter(C, "unstored"), counter(C, "unheld_units")) == (0, 0, 0)


# ------------------------------------------------------------------------------------------ pins


def test_pinned_entries_stay_and_come_back_as_recent():
    C = start([[0, 1], [2, 3, 4]], 3)
    store(C, 0)
    X.pin_prefix(C, PD, 0, 2)
    assert pd(C).pinned == 2
    assert pd(C).order == ()
    store(C, 1)
    assert pd(C).cached == {0, 1, 2}  # one unit for the other prompt
    assert counter(C, "unstored") == 2
    X.unpin_prefix(C, PD, 0, 2)
    assert pd(C).pinned == 0
    assert pd(C).order == (2, 1, 0)


def test_pins_count():
    C = start([[0], [1]], 1)
    store(C, 0)
    for _ in range(2):
        X.pin_prefix(C, PD, 0, 1)
    X.unpin_prefix(C, PD, 0, 1)
    store(C, 1)
    assert pd(C).cached == {0}
    assert pd(C).pins == {0: 1}
    X.unpin_prefix(C, PD, 0, 1)
    store(C, 1)
    assert pd(C).cached == {1}


def test_the_checkpoint_that_was_matched_is_pinned_and_others_are_touched():
    C = start(
        [[0, 1, 2]], 30, kv={"fixed_bytes": UNIT}, checkpoints="every_n_tokens", checkpoint_every_tokens=BLOCK
    )
    n = C[X.N_BLOCKS]
    store(C, 0)
    assert pd(C).order == (n + 2, 2, n + 1, 1, n, 0)
    X.pin_prefix(C, PD, 0, 2)
    assert pd(C).pins == {0: 1, 1: 1, n + 1: 1}
    assert pd(C).order == (n + 2, 2, n)
    X.unpin_prefix(C, PD, 0, 2)
    assert pd(C).order == (n + 2, 2, n, n + 1, 1, 0)


def test_giving_a_request_up_leaves_nothing_behind():
    C = start([[0, 1], [2]], 8)
    store(C, 0)
    store(C, 0, pool=0)
    X.claim(C, 0, 201, PD, 2, 0, 2, 2)
    X.hold(C, PD, 0, 3 * UNIT, 0)
    X.begin_copy(C, 0, PD, 2)
    assert (pd(C).pinned, pd(C).held, X.pool_state(C, 0).pinned) == (2, 3, 2)
    for _ in range(2):  # once more does no harm
        X.forget(C, PD, 0)
        assert (pd(C).pinned, pd(C).held, X.pool_state(C, 0).pinned) == (0, 0, 0)
        assert not X.copying(C, 0)


# ------------------------------------------------------------------------------------------ transfer cache


def test_a_transfer_takes_whole_units_and_evicts():
    C = start([[0, 1, 2], [3]], 4)
    store(C, 0)
    X.hold(C, PD, 1, UNIT + 1, 0)  # two units; one is free
    assert pd(C)[:4] == (4, 2, 0, 2)
    assert pd(C).cached == {0, 1}
    X.release(C, 1)
    X.release(C, 1)
    assert pd(C).held == 0


def test_what_cannot_be_held_is_counted():
    C = start([[0, 1, 2], [3]], 4)
    store(C, 0)
    X.pin_prefix(C, PD, 0, 3)
    X.hold(C, PD, 1, 3 * UNIT, 0)
    assert pd(C)[:4] == (4, 3, 3, 1)
    assert counter(C, "unheld_units") == 2
    X.release(C, 1)
    assert pd(C).held == 0


# ------------------------------------------------------------------------------------------ a slow model


class Model:
    """The same pool with dictionaries and lists."""

    def __init__(self, capacity, n_blocks, checkpoint_units, rule, every):
        self.capacity, self.n, self.checkpoint_units = capacity, n_blocks, checkpoint_units
        self.rule, self.every = rule, every
        self.recency: list[int] = []
        """Every cached entry, least recently used first."""
        self.pins: Counter[int] = Counter()
        self.held: dict[int, int] = {}
        self.evictions = self.unstored = self.unheld = 0

    def units(self, entry):
        return 1 if entry < self.n else self.checkpoint_units

    def used(self):
        return sum(self.units(e) for e in self.recency) + sum(self.held.values())

    def evictable(self):
        return [e for e in self.recency if not self.pins[e]]

    def room(self, units):
        if self.used() - sum(self.units(e) for e in self.evictable()) + units > self.capacity:
            return False
        while self.used() + units > self.capacity:
            self.recency.remove(self.evictable()[0])
            self.evictions += 1
        return True

    def recent(self, entry):
        self.recency.remove(entry)
        self.recency.append(entry)

    def store(self, ids):
        mine = []
        missing = 0
        for k, block in enumerate(ids):
            entries = [block]
            place = k + 1
            if self.checkpoint_units and (
                (self.rule == END_OF_PROMPT and place == len(ids))
                or (self.rule == EVERY_N_TOKENS and place % self.every == 0)
            ):
                entries.append(self.n + block)
            for entry in entries:
                if entry not in self.recency:
                    for m in mine:
                        self.pins[m] += 1
                    fits = self.room(self.units(entry))
                    for m in mine:
                        self.pins[m] -= 1
                    if not fits:
                        missing = len(ids) - k if entry == block else len(ids) - place + 1
                        break
                    self.recency.append(entry)
                mine.append(entry)
            if missing:
                break
        self.unstored += missing
        blocks = [e for e in mine if e < self.n]
        for block in reversed(blocks):
            if self.n + block in self.recency and self.checkpoint_units:
                self.recent(self.n + block)
            self.recent(block)

    def match(self, ids):
        usable = 0
        for k, block in enumerate(ids):
            if block not in self.recency:
                break
            if not self.checkpoint_units or self.n + block in self.recency:
                usable = k + 1
        return usable

    def pin(self, ids):
        for k, block in reversed(list(enumerate(ids))):
            if self.checkpoint_units:
                if k == len(ids) - 1:
                    self.pins[self.n + block] += 1
                if self.n + block in self.recency:
                    self.recent(self.n + block)
            self.pins[block] += 1
            self.recent(block)

    def unpin(self, ids):
        for k, block in reversed(list(enumerate(ids))):
            for entry in [self.n + block] * (self.checkpoint_units > 0 and k == len(ids) - 1) + [block]:
                self.pins[entry] -= 1
                if not self.pins[entry]:
                    self.recent(entry)

    def hold(self, r, units):
        free = self.capacity - self.used() + sum(self.units(e) for e in self.evictable())
        taken = min(units, free)
        assert self.room(taken)
        self.held[r] = taken
        self.unheld += units - taken


PROMPTS = [[0, 1, 2, 3], [0, 1], [0, 1, 2, 4, 5], [6], [6, 7, 8], [0, 1, 9], [10, 11, 12, 13, 14]]


@settings(max_examples=300, derandomize=True)
@given(
    st.integers(0, 14),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["end_of_prompt", "every_n_tokens", "none"]),
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "pin", "unpin", "hold", "release"]),
            st.integers(0, len(PROMPTS) - 1),
            st.integers(0, 6),
        ),
        max_size=40,
    ),
)
def test_the_pool_does_what_the_slow_model_does(capacity, checkpoint_units, rule, every, operations):
    pool = {"checkpoints": rule}
    if rule == "every_n_tokens":
        pool["checkpoint_every_tokens"] = every * BLOCK
    C = start(PROMPTS, capacity, kv={"fixed_bytes": checkpoint_units * UNIT}, **pool)
    model = Model(capacity, C[X.N_BLOCKS], checkpoint_units, C[X.RULE], every)
    pinned: dict[int, int] = {}
    for what, r, amount in operations:
        ids = PROMPTS[r]
        if what == "store":
            store(C, r)
            model.store(ids)
        elif what == "pin" and r not in pinned:
            n = X.cached_blocks(C, PD, r, BLOCK * len(ids) + 1, SEE_NOW)
            assert n == model.match(ids)
            pinned[r] = n
            X.pin_prefix(C, PD, r, n)
            model.pin(ids[:n])
        elif what == "unpin" and r in pinned:
            n = pinned.pop(r)
            X.unpin_prefix(C, PD, r, n)
            model.unpin(ids[:n])
        elif what == "hold" and r not in model.held:
            X.hold(C, PD, r, amount * UNIT, 0)
            model.hold(r, amount)
        elif what == "release":
            X.release(C, r)
            model.held.pop(r, None)
        state = pd(C)
        assert state.order == tuple(model.evictable())
        assert state.cached == frozenset(model.recency)
        assert state.pins == {e: n for e, n in model.pins.items() if n}
        assert state.held == sum(model.held.values())
        assert state.used + state.held == model.used() <= capacity
        assert state.pinned == sum(model.units(e) for e, n in model.pins.items() if n)
        assert counter(C, "evictions") == model.evictions
        assert counter(C, "unstored") == model.unstored
        assert counter(C, "unheld_units") == model.unheld


# ------------------------------------------------------------------------------------------ numbers of a world


def test_equal_blocks_behind_equal_blocks_get_equal_numbers():
    offsets, numbers = X.prefix_numbers(table_of([[70, 71, 5], [70, 71], [5]]))
    assert offsets.tolist() == [0, 3, 5, 6]
    # id 5 comes behind 71 and at the front: two places, two numbers
    a, b, c = numbers[:3].tolist()
    assert numbers.tolist() == [a, b, c, a, b, ({0, 1, 2, 3} - {a, b, c}).pop()]


def test_a_repeated_id_in_one_prompt_is_two_places():
    _, numbers = X.prefix_numbers(table_of([[4, 4, 4], [4, 4]]))
    assert len(set(numbers[:3].tolist())) == 3
    assert numbers[3:].tolist() == numbers[:2].tolist()


def test_the_id_of_a_partial_block_is_left_out():
    # 250 tokens: two whole blocks and one that is not; 300: three
    offsets, numbers = X.prefix_numbers(table_of([[0, 1, 2], [0, 1, 2]], [250, 300]))
    assert offsets.tolist() == [0, 2, 5]
    assert sorted(set(numbers.tolist())) == [0, 1, 2]


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
def test_numbers_are_dense_and_stand_for_runs(rows):
    offsets, numbers = X.prefix_numbers(table_of(rows))
    runs = [tuple(row[: k + 1]) for row in rows for k in range(len(row))]
    assert offsets.tolist() == [0, *np.cumsum([len(row) for row in rows]).tolist()]
    by_run: dict[tuple[int, ...], int] = {}
    for run, number in zip(runs, numbers.tolist(), strict=True):
        assert by_run.setdefault(run, number) == number
    assert sorted(by_run.values()) == list(range(len(by_run)))


def test_without_pool_or_prefix_data_the_array_is_one_zero():
    scenario = tiny_scenario()
    pooled = scenario.replace(prefix_pool={"prfaas_capacity_bytes": None, "pd_capacity_bytes": None})
    assert X.start_pools(tiny_world(scenario, [(0, 1000, 1)])).tolist() == [0]
    assert X.start_pools(tiny_world(pooled, [(0, 1000, 1)])).tolist() == [0]
    with_ids = dataclasses.replace(tiny_world(scenario, []), requests=table_of([[0, 1]]))
    assert X.start_pools(with_ids).tolist() == [0]


def test_checkpoints_lie_on_block_borders():
    with pytest.raises(PrfaasError, match=r"checkpoint_every_tokens is 250; .* multiple of .* 100 tokens"):
        start([[0]], 3, checkpoints="every_n_tokens", checkpoint_every_tokens=250)
    C = start([[0]], 3, checkpoints="every_n_tokens", checkpoint_every_tokens=300)
    assert C[X.EVERY_BLOCKS] == 3
