"""What holds in every world with prefix pools, on every engine: rooms, pins and transfers balance."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.simulator import prefix_pool as X
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.records import PREFIX_COUNTERS, Route, Status
from prfaas_env.simulator.world import World
from tests.differential.cases import BLOCK_TOKENS, Case, decisions_of, pool_of, world_of

LAWS = settings(max_examples=60, derandomize=True, deadline=None)
#: Cases with a pool.
SEEDS = st.integers(0, 100_000).filter(lambda seed: pool_of(Case(seed)) is not None)


def play(name, case, world=None):
    """Yields the engine at each tick and when all is drained."""
    world = world_of(case) if world is None else world
    engine = make_engine(name, world)
    control_ns = ns_from_s(world.scenario.control.control_interval_s)
    for tick, decision in enumerate(decisions_of(case)):
        engine.apply(decision)
        engine.run_until((tick + 1) * control_ns)
        yield engine
    engine.run_to_end(engine.now_ns + ns_from_s(10_000.0))
    yield engine


def pools_of(engine):
    """(the array, the state of each pool); None where nothing is pooled."""
    C = engine.prefix.pools if engine.name == "simpy" else engine._caches.tolist()
    if C[X.ON] == 0:
        return C, []
    return C, [X.pool_state(C, pool) for pool in range(C[X.N_POOLS])]


def counts(engine):
    return dict(zip(PREFIX_COUNTERS, engine.totals().prefix, strict=True))


@LAWS
@given(SEEDS)
def test_units_are_conserved_and_no_pool_is_above_its_capacity(engine_name, seed):
    for engine in play(engine_name, Case(seed, max_ticks=30)):
        C, states = pools_of(engine)
        for state in states:

            def units(entries, C=C):
                return sum(X.entry_units(C, entry) for entry in entries)

            assert state.used == units(state.cached)
            assert state.pinned == units(state.pins)
            assert min(state[:4]) >= 0
            assert state.used + state.held <= state.capacity
            # every cached entry is either pinned or in the list, once
            assert sorted([*state.order, *state.pins]) == sorted(state.cached)
            assert all(n > 0 for n in state.pins.values())


@LAWS
@given(SEEDS)
def test_nothing_is_pinned_or_held_once_all_is_drained(engine_name, seed):
    *_, engine = play(engine_name, Case(seed))
    if not engine.done:
        return
    for state in pools_of(engine)[1]:
        assert (state.pinned, state.held, state.pins) == (0, 0, {})


@LAWS
@given(SEEDS)
def test_a_hit_is_whole_blocks_and_shorter_than_the_prompt(engine_name, seed):
    world = world_of(Case(seed))
    *_, engine = play(engine_name, Case(seed), world)
    records, tokens = engine.records, world.requests.input_tokens
    cached = records.cached_tokens(tokens)
    declared = world.requests.cached_tokens
    assert (cached >= 0).all()
    if declared.any():
        # no prefix data, so no pool: what the workload declares
        taken = np.isin(records.status, (Status.OPEN, Status.FINISHED, Status.ABORTED))
        assert (cached[taken] == declared[taken]).all()
        return
    assert (cached % BLOCK_TOKENS == 0).all()
    accepted = np.isin(records.status, (Status.OPEN, Status.FINISHED, Status.ABORTED))
    assert (records.incremental_tokens[accepted] >= 1).all()
    assert (records.incremental_tokens[accepted] <= tokens[accepted]).all()
    found = counts(engine)
    assert found["hit_tokens"] == cached.sum()
    assert found["hit_tokens"] <= found["input_tokens"]
    if world.requests.block_tokens:
        assert found["input_tokens"] == tokens[accepted].sum()


@LAWS
@given(SEEDS)
def test_bytes_on_the_wire_are_those_of_the_records(engine_name, seed):
    world = world_of(Case(seed))
    *_, engine = play(engine_name, Case(seed), world)
    if not engine.done:
        return
    records = engine.records
    # a transfer that is given up is counted in whole bytes
    dropped = int((records.attempts - 1).clip(0).sum() + (records.status == Status.ABORTED).sum())
    assert abs(sum(engine.totals().egress_bits) - 8.0 * int(records.sent_bytes.sum())) <= 8.01 * dropped
    kv = world.scenario.model.kv
    copies = counts(engine)["copies"]
    once = (records.attempts == 1) & (records.status == Status.FINISHED)
    for r in np.flatnonzero(once & (records.route == Route.REMOTE)):
        # at most the whole cache, and the copy of a prefix ahead of it
        most = kv.transfer_bytes(int(world.requests.input_tokens[r]))
        assert kv.transfer_bytes(1) <= records.sent_bytes[r] <= most * (2 if copies else 1)
    local = once & (records.route == Route.LOCAL) & (records.sent_bytes > 0)
    assert local.sum() <= copies


@LAWS
@given(SEEDS)
def test_hits_serve_only_what_an_earlier_request_stored(engine_name, seed):
    """A request has no longer hit than the longest whole-block prefix it shares with one that was prefilled before."""
    world = world_of(Case(seed))
    if not world.requests.block_tokens:
        return
    *_, engine = play(engine_name, Case(seed), world)
    table, records = world.requests, engine.records
    cached = records.cached_tokens(table.input_tokens) // BLOCK_TOKENS
    rows = [
        table.block_ids[a:b].tolist()[: n // BLOCK_TOKENS]
        for a, b, n in zip(
            table.block_offsets[:-1], table.block_offsets[1:], table.input_tokens.tolist(), strict=True
        )
    ]
    for r in np.flatnonzero(cached):
        ready = np.flatnonzero(records.prefill_end_ns <= table.arrival_ns[r])
        shared = 0
        for other in ready.tolist():
            n = 0
            while n < min(len(rows[other]), len(rows[r])) and rows[other][n] == rows[r][n]:
                n += 1
            shared = max(shared, n)
        # a request that is prefilled again stores earlier than its (later) stamps say
        if (records.attempts == 1).all():
            assert cached[r] <= shared


@LAWS
@given(SEEDS)
def test_a_pool_without_prefix_data_is_no_pool(engine_name, seed):
    """Neither a pool without ids nor ids without a pool changes a stamp (the cache rule aside, which then is idle)."""
    world = world_of(Case(seed))
    bare = dataclasses.replace(
        world.requests,
        block_offsets=np.zeros(len(world.requests) + 1, dtype=np.int64),
        block_ids=world.requests.block_ids[:0],
        block_tokens=0,
    )
    without = world.scenario.replace(prefix_pool=None)
    runs = []
    for scenario, requests in ((world.scenario, bare), (without, world.requests), (without, bare)):
        other = World(scenario, world.seed, requests, world.pd_of, world.links)
        *_, engine = play(engine_name, Case(seed, max_ticks=20), other)
        assert set(engine.totals().prefix) == {0}
        runs.append((engine.totals(), engine.records))
    for totals, records in runs[1:]:
        assert totals == runs[0][0]
        for field in dataclasses.fields(records):
            assert np.array_equal(getattr(records, field.name), getattr(runs[0][1], field.name))
