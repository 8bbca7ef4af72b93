"""Sessions: cases by hand, ids against the text itself, independence of the draws, rates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import load_scenario
from prfaas_env.workload import sessions
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.inspect import infinite_cache_hits
from prfaas_env.workload.means import input_law, mean_rate_rps, output_law, with_mean_rate
from prfaas_env.workload.models import SessionWorkload, Workload
from prfaas_env.workload.session_law import _on_grid, session_law

S = 1_000_000_000

#: 200, then 40 or 50 new tokens behind an output of 10; turns 8 s apart.
BY_HAND = {
    "arrivals": {"kind": "deterministic", "rate_rps": 0.1},
    "turns": {"kind": "fixed", "turns": 3},
    "think_time": {"kind": "fixed", "think_s": 5},
    "service_s": 2,
    "service_s_per_output_token": 0.1,
    "first_tokens": {"kind": "fixed", "tokens": 200},
    "new_tokens": {"kind": "empirical", "tokens": [40, 50]},
    "output_tokens": {"kind": "fixed", "tokens": 10},
    "context_limit_tokens": 4096,
    "block_tokens": 16,
}
RANDOM = {
    "arrivals": {"kind": "poisson", "rate_rps": 0.8},
    "turns": {"kind": "geometric", "mean_turns": 5, "max_turns": 40},
    "think_time": {"kind": "exponential", "mean_s": 20},
    "service_s": 1,
    "system_prompts": {"tokens": [300, 90, 777], "n_prompts": 7, "zipf_exponent": 1.0},
    "first_tokens": {"kind": "lognormal", "mu": 5.5, "sigma": 1.0, "min_tokens": 4, "max_tokens": 3000},
    "new_tokens": {"kind": "lognormal", "mu": 4.5, "sigma": 1.2, "min_tokens": 2, "max_tokens": 2000},
    "output_tokens": {"kind": "poisson", "mean_tokens": 120},
    "context_limit_tokens": 4000,
    "block_tokens": 64,
    "warm_start_s": 200,
}
ARRAYS = (
    "arrival_ns",
    "input_tokens",
    "output_tokens",
    "session",
    "block_offsets",
    "block_ids",
    "cached_tokens",
)


def _workload(base=RANDOM, **changes):
    return SessionWorkload.model_validate(base | changes)


def _rows(table):
    return [
        table.block_ids[a:b].tolist()
        for a, b in zip(table.block_offsets[:-1], table.block_offsets[1:], strict=True)
    ]


def _by_turn(table, field):
    """{(session, turn): value}, turns counted in order of arrival."""
    seen: dict[int, int] = {}
    out = {}
    for session, value in zip(table.session.tolist(), getattr(table, field).tolist(), strict=True):
        out[session, seen.get(session, 0)] = value
        seen[session] = seen.get(session, 0) + 1
    return out


def _hand_table(**changes):
    """One session with 200, 50 and 60 new tokens."""
    for seed in range(60):
        table = generate_requests(_workload(BY_HAND, **changes), seed=seed, n_requests=3)
        # Session 1 begins at 20 s, after the first session's turn at 18 s and before that at 26 s.
        whole = generate_requests(_workload(BY_HAND, **changes), seed=seed, horizon_s=30.0)
        mine = np.flatnonzero(whole.session == 0)
        if whole.input_tokens[mine].tolist() == [200, 250, 310]:
            assert len(table) == 3
            return whole.take(mine)
    raise AssertionError("40 then 50 in no seed of 60")


# ------------------------------------------------------------------ by hand


def test_three_turns_by_hand():
    table = _hand_table()
    assert table.arrival_ns.tolist() == [10 * S, 18 * S, 26 * S]
    assert table.output_tokens.tolist() == [10, 10, 10]
    assert table.session.tolist() == [0, 0, 0]
    assert table.block_tokens == 16
    # 19 whole blocks in the end (ids 0 to 18), then one id per turn for its partial block (19, 20, 21).
    assert _rows(table) == [[*range(12), 19], [*range(15), 20], [*range(19), 21]]
    blocks, tokens = infinite_cache_hits(table)
    assert blocks.tolist() == [0, 12, 15]
    assert tokens.tolist() == [0, 192, 240]


def test_with_ids_only_the_new_part_is_new():
    """200 + 50 + 60 new tokens: with blocks that end where the prompts end, nothing else is prefilled."""
    table = _hand_table(block_tokens=50)
    assert _rows(table) == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 8]]
    _, cached = infinite_cache_hits(table)
    assert (table.input_tokens - cached).tolist() == [200, 50, 60]
    assert not any("no prefix data" in note for note in table.notes)


def test_system_prompts_are_shared_and_their_last_block_is_not():
    # Rank 1 has 100 tokens (6 whole blocks of 16, ids 0 to 5), rank 2 has 40 (ids 6 and 7).
    library = {"tokens": [100, 40], "zipf_exponent": 0.0}
    workload = _workload(
        BY_HAND,
        system_prompts=library,
        turns={"kind": "fixed", "turns": 1},
        first_tokens={"kind": "fixed", "tokens": 28},
    )
    table = generate_requests(workload, seed=0, n_requests=12)
    rows = _rows(table)
    for tokens, row in zip(table.input_tokens.tolist(), rows, strict=True):
        if tokens == 128:  # 8 whole blocks, two of them the session's own
            assert row[:6] == [0, 1, 2, 3, 4, 5]
            assert len(row) == 8
        else:
            assert tokens == 68  # 4 whole blocks, two of them its own, and a partial one
            assert row[:2] == [6, 7]
            assert len(row) == 5
    assert {128, 68} == set(table.input_tokens.tolist())
    own = [i for row, n in zip(rows, table.input_tokens, strict=True) for i in row[6 if n == 128 else 2 :]]
    assert len(own) == len(set(own))
    assert min(own) == 8


def test_a_session_ends_before_the_prompt_that_passes_the_limit():
    table = generate_requests(
        _workload(
            BY_HAND,
            new_tokens={"kind": "fixed", "tokens": 40},
            context_limit_tokens=250,
            turns={"kind": "fixed", "turns": 9},
        ),
        seed=0,
        horizon_s=100.0,
    )
    assert np.bincount(table.session).max() == 2
    assert set(table.input_tokens.tolist()) == {200, 250}


def test_zipf_weights():
    library = _workload(
        system_prompts={"tokens": [5, 7], "n_prompts": 3, "zipf_exponent": 1.0}
    ).system_prompts
    assert library.lengths == (5, 7, 5)
    assert library.probabilities == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    workload = _workload(
        BY_HAND,
        arrivals={"kind": "poisson", "rate_rps": 10},
        turns={"kind": "fixed", "turns": 1},
        system_prompts={"tokens": [100, 200, 300], "zipf_exponent": 1.0},
    )
    lengths = generate_requests(workload, seed=1, n_requests=20_000).input_tokens
    counts = [int((lengths == 200 + n).sum()) / 20_000 for n in (100, 200, 300)]
    assert counts == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.015)


# ------------------------------------------------------------------ ids are text


@given(
    seed=st.integers(0, 10_000),
    block_tokens=st.integers(1, 200),
    limit=st.integers(60, 3000),
    rate_rps=st.floats(0.05, 3.0),
    warm_start_s=st.sampled_from([0.0, 30.0, 400.0]),
    exponent=st.floats(0.0, 3.0),
    shared=st.lists(st.integers(1, 400), min_size=0, max_size=5),
    turns=st.sampled_from(
        [
            {"kind": "fixed", "turns": 4},
            {"kind": "geometric", "mean_turns": 3, "max_turns": 9},
            {"kind": "empirical", "turns": [1, 1, 6]},
        ]
    ),
)
@settings(max_examples=60, deadline=None)
def test_laws(seed, block_tokens, limit, rate_rps, warm_start_s, exponent, shared, turns):
    workload = _workload(
        arrivals={"kind": "poisson", "rate_rps": rate_rps},
        block_tokens=block_tokens,
        context_limit_tokens=limit,
        warm_start_s=warm_start_s,
        turns=turns,
        system_prompts={"tokens": shared, "zipf_exponent": exponent} if shared else None,
    )
    table = generate_requests(workload, seed=seed, horizon_s=60.0)
    n = len(table)
    for name in ARRAYS:
        assert getattr(table, name).dtype == np.int64
        assert getattr(table, name).flags.writeable
    assert np.all(np.diff(table.arrival_ns) >= 0)
    assert np.all((table.arrival_ns >= 0) & (table.arrival_ns < 60 * S))
    assert np.all((table.input_tokens >= 1) & (table.input_tokens <= limit))
    assert np.all(table.output_tokens >= 1)
    assert not table.cached_tokens.any()
    assert np.array_equal(np.diff(table.block_offsets), -(-table.input_tokens // block_tokens))
    assert np.all(table.block_ids >= 0)
    # Within a session prompts grow, and each whole block of a prompt is a block of the next.
    rows, last = _rows(table), {}
    ids_at: dict[int, int] = {}
    for i in range(n):
        session, tokens = int(table.session[i]), int(table.input_tokens[i])
        if session in last:
            j = last[session]
            before = int(table.input_tokens[j])
            assert tokens > before + int(table.output_tokens[j])
            whole = before // block_tokens
            assert rows[i][:whole] == rows[j][:whole]
            if before % block_tokens:
                assert rows[i][whole] != rows[j][whole]
        last[session] = i
        # An id stands at one place of a prompt only, and behind one id only: equal ids are equal chains.
        for place, block in enumerate(rows[i]):
            assert ids_at.setdefault(block, place) == place
    _chains(rows)
    # Two sessions share whole blocks of one system prompt or nothing.
    lengths = workload.system_prompts.lengths if shared else ()
    allowed = {length // block_tokens for length in lengths} | {0}
    firsts = [rows[i] for i in {int(s): k for k, s in reversed(list(enumerate(table.session)))}.values()]
    for one in firsts[:8]:
        for other in firsts[:8]:
            if one is not other:
                common = next(
                    (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                    min(len(one), len(other)),
                )
                assert common in allowed
                assert not set(one[common:]) & set(other[common:])


def _chains(rows):
    before: dict[int, int] = {}
    for row in rows:
        for left, right in zip([-1, *row], row, strict=False):
            assert before.setdefault(right, left) == left


# ------------------------------------------------------------------ draws


def test_the_seed_gives_the_table():
    tables = [generate_requests(_workload(), seed=seed, horizon_s=200.0) for seed in (3, 3, 4)]
    for name in ARRAYS:
        assert np.array_equal(getattr(tables[0], name), getattr(tables[1], name))
    assert not np.array_equal(tables[0].arrival_ns, tables[2].arrival_ns)


def test_a_longer_horizon_and_a_count_begin_with_the_shorter_one():
    short = generate_requests(_workload(), seed=5, horizon_s=300.0)
    long = generate_requests(_workload(), seed=5, horizon_s=3_000.0)
    counted = generate_requests(_workload(), seed=5, n_requests=len(long))
    assert len(short) > 500
    for name in ("arrival_ns", "input_tokens", "output_tokens", "session"):
        assert np.array_equal(getattr(long, name)[: len(short)], getattr(short, name))
        assert np.array_equal(getattr(counted, name), getattr(long, name))
    # Ids too: a session keeps its blocks whatever the limit.
    assert np.array_equal(long.block_ids[: len(short.block_ids)], short.block_ids)
    assert np.array_equal(counted.block_ids, long.block_ids)


def test_another_law_for_one_field_leaves_the_draws_of_the_others_alone():
    base = {**RANDOM, "warm_start_s": 0, "context_limit_tokens": 10**9}
    horizon_s = 400.0
    table = generate_requests(_workload(base), seed=8, horizon_s=horizon_s)
    outputs, starts = _by_turn(table, "output_tokens"), _by_turn(table, "arrival_ns")
    inputs = _by_turn(table, "input_tokens")
    # Another think time: lengths stay with their session and turn.
    other = generate_requests(
        _workload(base, think_time={"kind": "lognormal", "median_s": 3, "sigma": 1}),
        seed=8,
        horizon_s=horizon_s,
    )
    both = inputs.keys() & _by_turn(other, "input_tokens").keys()
    assert len(both) > 500
    assert all(_by_turn(other, "input_tokens")[k] == inputs[k] for k in both)
    assert other.arrival_ns.tolist() != table.arrival_ns.tolist()
    # Another law of turns: the turns that take place in both are the same ones.
    other = generate_requests(
        _workload(base, turns={"kind": "fixed", "turns": 2}), seed=8, horizon_s=horizon_s
    )
    for field, mine in (("output_tokens", outputs), ("arrival_ns", starts), ("input_tokens", inputs)):
        theirs = _by_turn(other, field)
        both = mine.keys() & theirs.keys()
        assert len(both) > 300
        assert all(mine[k] == theirs[k] for k in both)
    # Another output length, with the same allowance: arrivals stay, and so does the new text of a turn.
    other = generate_requests(
        _workload(base, output_tokens={"kind": "fixed", "tokens": 7}), seed=8, horizon_s=horizon_s
    )
    assert np.array_equal(other.arrival_ns, table.arrival_ns)
    theirs = _by_turn(other, "input_tokens")
    for (session, turn), tokens in inputs.items():
        if turn:
            new = tokens - inputs[session, turn - 1] - outputs[session, turn - 1]
            assert theirs[session, turn] - theirs[session, turn - 1] - 7 == new
        else:
            assert theirs[session, 0] == tokens
    # Another library of system prompts of the same lengths: nothing but the choice and its length moves.
    other = generate_requests(_workload(base, system_prompts=None), seed=8, horizon_s=horizon_s)
    assert np.array_equal(other.arrival_ns, table.arrival_ns)
    assert set((table.input_tokens - other.input_tokens).tolist()) == {300, 90, 777}


def test_turns_come_the_allowance_and_the_think_time_apart():
    workload = _workload(
        service_s=3,
        service_s_per_output_token=0.05,
        warm_start_s=0,
        think_time={"kind": "exponential", "mean_s": 20},
    )
    table = generate_requests(workload, seed=2, horizon_s=20_000.0)
    thinks = []
    at, outputs = _by_turn(table, "arrival_ns"), _by_turn(table, "output_tokens")
    for (session, turn), arrival_ns in at.items():
        if turn:
            gap_s = (arrival_ns - at[session, turn - 1]) / S
            thinks.append(gap_s - 3 - 0.05 * outputs[session, turn - 1])
    assert min(thinks) > -1e-6
    assert np.mean(thinks) == pytest.approx(20, rel=0.03)
    assert np.std(thinks) == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("law", "median_s", "mean_s"),
    [
        ({"kind": "fixed", "think_s": 7}, 7, 7),
        ({"kind": "exponential", "mean_s": 10}, 10 * np.log(2), 10),
        ({"kind": "lognormal", "median_s": 6, "sigma": 0.5}, 6, 6 * np.exp(0.125)),
        ({"kind": "lognormal", "median_s": 6, "sigma": 0}, 6, 6),
    ],
)
def test_think_times(law, median_s, mean_s):
    u = (np.arange(100_000) + 0.5) / 100_000
    think_s = sessions._think_s(_workload(think_time=law).think_time, u)
    assert np.median(think_s) == pytest.approx(median_s, rel=1e-3)
    assert think_s.mean() == pytest.approx(mean_s, rel=1e-3)


def test_numbers_of_turns():
    u = (np.arange(100_000) + 0.5) / 100_000
    law = _workload(turns={"kind": "geometric", "mean_turns": 4, "max_turns": 6}).turns
    counts = np.bincount(sessions._turns(law, u), minlength=7) / 100_000
    expected = [0, *(0.25 * 0.75**k for k in range(5)), 0.75**5]
    assert counts == pytest.approx(expected, abs=1e-4)
    law = _workload(turns={"kind": "empirical", "turns": [1, 5, 5, 9]}).turns
    assert np.bincount(sessions._turns(law, u))[[1, 5, 9]].tolist() == [25_000, 50_000, 25_000]
    assert set(sessions._turns(_workload(turns={"kind": "geometric", "mean_turns": 1}).turns, u)) == {1}


def test_a_wait_that_never_ends_stays_within_whole_numbers():
    workload = _workload(
        BY_HAND, turns={"kind": "fixed", "turns": 50}, think_time={"kind": "fixed", "think_s": 1e9}
    )
    table = generate_requests(workload, seed=0, horizon_s=100.0)
    assert table.arrival_ns.tolist() == [k * 10 * S for k in range(1, 10)]


# ------------------------------------------------------------------ start of the episode


def test_warm_start():
    """With a warm start long enough, an episode has its long-run rate from the beginning."""
    cold, warm = _workload(warm_start_s=0), _workload(warm_start_s=2_000)
    rate = mean_rate_rps(cold)
    assert mean_rate_rps(warm) == rate
    window_s = 50.0
    counts = {
        name: np.mean([len(generate_requests(w, seed=s, horizon_s=window_s)) for s in range(150)]) / window_s
        for name, w in (("cold", cold), ("warm", warm))
    }
    assert counts["warm"] == pytest.approx(rate, rel=0.06)
    assert counts["cold"] < 0.75 * rate
    # Cold, the first request of every session is its first turn; warm, some sessions are under way.
    table = generate_requests(warm, seed=1, horizon_s=window_s)
    assert np.all(table.arrival_ns >= 0)
    assert any("began up to 2000 s before time 0" in note for note in table.notes)
    table = generate_requests(cold, seed=1, horizon_s=window_s)
    assert any("began before time 0 are left out" in note for note in table.notes)


def test_a_horizon_of_zero_and_a_count_of_zero_are_empty():
    for limit in ({"horizon_s": 0.0}, {"n_requests": 0}):
        table = generate_requests(_workload(), seed=0, **limit)
        assert len(table) == 0
        assert table.block_offsets.tolist() == [0]
        assert table.cached_tokens.tolist() == []
    silent = _workload(arrivals={"kind": "poisson", "rate_rps": 0})
    assert len(generate_requests(silent, seed=0, horizon_s=100.0)) == 0


# ------------------------------------------------------------------ long-run figures


def test_mean_turns_by_hand():
    fixed = {"kind": "fixed", "tokens": 40}
    base = BY_HAND | {"new_tokens": fixed}
    assert session_law(_workload(base)).mean_turns == pytest.approx(3)
    # Prompts of 200, 250, 300: the limit of 260 ends a session after two.
    assert session_law(_workload(base, context_limit_tokens=260)).mean_turns == pytest.approx(2)
    assert session_law(_workload(base, context_limit_tokens=250)).mean_turns == pytest.approx(2)
    assert session_law(_workload(base, context_limit_tokens=249)).mean_turns == pytest.approx(1)
    assert session_law(_workload(base, context_limit_tokens=199)).mean_turns == 0.0
    law = input_law(_workload(base))
    assert law.mean == pytest.approx(250)
    assert law.survival([199, 200, 249, 250, 300]) == pytest.approx([1, 2 / 3, 2 / 3, 1 / 3, 0])
    geometric = {"kind": "geometric", "mean_turns": 4, "max_turns": 6}
    assert session_law(_workload(base, turns=geometric)).mean_turns == pytest.approx(4 * (1 - 0.75**6))
    empirical = {"kind": "empirical", "turns": [1, 2, 6]}
    assert session_law(_workload(base, turns=empirical)).mean_turns == pytest.approx(3)
    # 40 or 50 new tokens: the third prompt is 300, 310 or 320 with chances 1/4, 1/2, 1/4.
    assert session_law(_workload(BY_HAND, context_limit_tokens=310)).mean_turns == pytest.approx(2.75)


@pytest.mark.parametrize("limit", [4_000, 60_000])
def test_law_of_prompts_and_rate_as_drawn(limit):
    """On a grid of single tokens, and on a coarse one."""
    workload = _workload(
        context_limit_tokens=limit,
        turns={"kind": "geometric", "mean_turns": 8},
        first_tokens={"kind": "lognormal", "mu": 7.0, "sigma": 1.2, "min_tokens": 4, "max_tokens": 50_000},
        think_time={"kind": "fixed", "think_s": 0.5},
        warm_start_s=0,
    )
    table = generate_requests(workload, seed=0, horizon_s=25_000.0)
    law = input_law(workload)
    n_sessions = int(table.session.max()) + 1
    assert len(table) / n_sessions == pytest.approx(session_law(workload).mean_turns, rel=0.02)
    assert len(table) / 25_000 == pytest.approx(mean_rate_rps(workload), rel=0.03)
    assert law.mean == pytest.approx(table.input_tokens.mean(), rel=0.02)
    for q in (0.1, 0.5, 0.9):
        assert law.survival(np.quantile(table.input_tokens, q)) == pytest.approx(1 - q, abs=0.02)
    assert output_law(workload).mean == pytest.approx(table.output_tokens.mean(), rel=0.01)


def test_regimes_hold_for_a_session_and_long_outputs_end_sessions_early():
    chain = {"values": [50, 800], "probabilities": [0.5, 0.5], "mean_holding_s": 4}
    workload = _workload(
        turns={"kind": "fixed", "turns": 10},
        output_tokens={"kind": "poisson", "mean_tokens": chain},
        new_tokens={"kind": "poisson", "mean_tokens": chain | {"values": [20, 200]}},
        warm_start_s=0,
    )
    table = generate_requests(workload, seed=0, horizon_s=40_000.0)
    for session in range(40):
        outputs = table.output_tokens[table.session == session]
        assert np.all(outputs < 300) or np.all(outputs > 500)
    law = session_law(workload)
    assert len(table) / (int(table.session.max()) + 1) == pytest.approx(law.mean_turns, rel=0.03)
    # Weighted by turns, not by sessions: 425 would be the mean over sessions.
    assert law.outputs.mean == pytest.approx(table.output_tokens.mean(), rel=0.05)
    assert law.outputs.mean < 350


def test_rates_are_set_exactly():
    for workload in (_workload(), _workload(BY_HAND)):
        for rate in (0.01, 3.5, 900.0):
            faster = with_mean_rate(workload, rate)
            assert mean_rate_rps(faster) == pytest.approx(rate, rel=1e-12)
            assert faster.model_copy(update={"arrivals": workload.arrivals}) == workload


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hit_rate": {"share": 0.5}},
            "hit_rate does not apply to kind sessions, whose prompts have prefix ids",
        ),
        ({"hitrate": 1}, "unknown field 'hitrate'"),
        ({"turns": {"kind": "fixed", "turns": 0}}, "turns"),
        ({"turns": {"kind": "geometric", "mean_turns": 0.5}}, "mean_turns"),
        ({"think_time": {"kind": "exponential", "mean_s": -1}}, "mean_s"),
        ({"system_prompts": {"tokens": []}}, "tokens"),
        ({"context_limit_tokens": 0}, "context_limit_tokens"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Workload).validate_python({"kind": "sessions"} | RANDOM | changes)


def test_hit_rate_on_sessions_is_one_line_for_the_user():
    with pytest.raises(PrfaasError, match="hit_rate does not apply to kind sessions") as error:
        load_scenario(
            "agent_sessions", overrides=["workload.hit_rate={share: 1, cached_fraction: {kind: uniform}}"]
        )
    assert "\n" not in str(error.value)


def test_limits_that_make_no_sense_are_refused(monkeypatch):
    for limit in ({}, {"horizon_s": 1.0, "n_requests": 1}):
        with pytest.raises(PrfaasError, match="either horizon_s or n_requests"):
            generate_requests(_workload(), seed=0, **limit)
    with pytest.raises(PrfaasError, match="horizon_s is -1"):
        generate_requests(_workload(), seed=0, horizon_s=-1.0)
    with pytest.raises(PrfaasError, match="n_requests is -2"):
        generate_requests(_workload(), seed=0, n_requests=-2)
    nothing = _workload(BY_HAND, context_limit_tokens=100)
    assert len(generate_requests(nothing, seed=0, horizon_s=100.0)) == 0
    for call in (
        lambda: generate_requests(nothing, seed=0, n_requests=1),
        lambda: with_mean_rate(nothing, 1.0),
        lambda: input_law(nothing),
        lambda: output_law(nothing),
    ):
        with pytest.raises(PrfaasError, match="no first prompt is within context_limit_tokens"):
            call()
    monkeypatch.setattr(sessions, "MAX_BLOCK_IDS", 1_000)
    with pytest.raises(PrfaasError, match=r"prefix ids with block_tokens 64; at most 1,000 are allowed"):
        generate_requests(_workload(), seed=0, horizon_s=300.0)
    monkeypatch.setattr(sessions, "MAX_REQUESTS", 100)
    with pytest.raises(PrfaasError, match="more than 100 turns"):
        generate_requests(_workload(), seed=0, horizon_s=300.0)


# ------------------------------------------------------------------ shipped scenarios


@pytest.mark.parametrize(
    ("name", "low", "high"), [("agent_sessions", 0.88, 0.93), ("chat_sessions", 0.5, 0.7)]
)
def test_reusable_share_of_the_shipped_sessions(name, low, high):
    """Share of the input tokens that an unlimited cache holds, measured with the ids."""
    workload = load_scenario(name).workload
    for seed in range(3):
        table = generate_requests(workload, seed=seed, horizon_s=3_600.0)
        _, cached = infinite_cache_hits(table)
        assert low < cached.sum() / table.input_tokens.sum() < high
        assert len(table) / 3_600 == pytest.approx(mean_rate_rps(workload), rel=0.15)


def test_a_coarse_grid_keeps_masses_and_means():
    by_token = np.zeros(40)
    by_token[[0, 3, 5, 8, 21, 22]] = [0.1, 0.2, 0.1, 0.3, 0.2, 0.1]
    for width in (1, 2, 4, 8):
        masses = _on_grid(by_token, 40 // width, width)
        assert masses.sum() == pytest.approx(1.0)
        assert masses @ np.arange(40 // width) * width == pytest.approx(by_token @ np.arange(40))
    # 21 tokens in cells of 4: three quarters at 20, one quarter at 24.
    assert _on_grid(np.eye(40)[21], 10, 4)[[5, 6]].tolist() == [0.75, 0.25]
