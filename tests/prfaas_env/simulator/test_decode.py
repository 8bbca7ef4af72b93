"""Decode: whole steps, virtual time, slots, KV room, placement."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.profiles.latency import DecodeProfile
from prfaas_env.simulator.decode import FINISH, FIRST, DecodeBatch, Sequence

S, MS = 1_000_000_000, 1_000_000
NEVER = math.inf
# a request of k tokens that meets an idle local instance joins 2 ms per token later, and 1 us per token for its cache
JOIN_1000 = 2 * S + MS


def stamps(engine, name):
    return getattr(engine.records, name + "_ns").tolist()


def test_first_token_one_step_after_the_join_and_n_steps_in_all(tiny):
    engine = tiny.run(tiny.scenario(), [(0, 1000, 7)], threshold=NEVER)
    assert stamps(engine, "decode_join") == [JOIN_1000]
    assert stamps(engine, "first_token") == [JOIN_1000 + 10 * MS]
    assert stamps(engine, "finish") == [JOIN_1000 + 70 * MS]


def test_one_output_token_finishes_with_its_first(tiny):
    engine = tiny.run(tiny.scenario(slo={"ttft_s": 3, "tpot_s": 0.01}), [(0, 1000, 1)], threshold=NEVER)
    assert stamps(engine, "first_token") == stamps(engine, "finish") == [JOIN_1000 + 10 * MS]
    totals = engine.totals()
    assert (totals.first_tokens, totals.finished, totals.good) == (1, 1, 1)


@pytest.mark.parametrize("step_s", [0.025, 1 / 3, 0.0171717171717])
@pytest.mark.parametrize("at_s", [0.0, 1e6, 1_000_000.123456789])
def test_constant_step_gives_whole_nanoseconds_even_late(tiny, step_s, at_s):
    # three sequences that join and leave at odd instants: with b = c = 0 nobody feels the others
    rows = [(at_s, 1000, 1024), (at_s + 0.0123, 777, 333), (at_s + 0.5, 10, 2)]
    scenario = tiny.scenario(decode={"a_s": step_s}, pd={"n_prefill": 3})
    engine = tiny.run(scenario, rows, threshold=NEVER)
    step_ns = round(step_s * 1e9)
    for k, (arrival_s, tokens, output) in enumerate(rows):
        join = tiny.ns(arrival_s) + tokens * 2 * MS + tokens * 1000
        assert engine.records.decode_join_ns[k] == join
        assert engine.records.first_token_ns[k] == join + step_ns
        assert engine.records.finish_ns[k] == join + output * step_ns


def test_step_that_depends_on_batch_and_context_by_hand(tiny):
    """Two sequences; step = 10 ms + 5 ms x batch + 1 us x context tokens, fixed at each change of the batch.

    Times in ms after R0 joins. R0: context 1,000, 4 tokens. Alone: 10 + 5 + 1 = 16 ms a step.
    R1 (context 2,000, 2 tokens) joins at 24: R0 has made 1.5 tokens. Context 3,000 + 1 whole token: 23.001 ms.
    R1: first at 24 + 23.001 = 47.001, finish at 70.002. R0 has then made 3.5 tokens.
    Alone again: context 1,000 + 3: 16.003 ms; half a step: 8.0015. R0 ends at 78.0035.
    """
    scenario = tiny.scenario(decode={"b_s_per_sequence": 0.005, "c_s_per_token": 1e-6}, pd={"n_prefill": 2})
    # R1 prefills 4 s and hands over 2 ms; R0 joins at 10 + 2.001 s
    joins = 10 * S + JOIN_1000
    engine = tiny.run(scenario, [(8.023, 2000, 2), (10, 1000, 4)], threshold=NEVER)
    assert stamps(engine, "decode_join") == [joins + 24 * MS, joins]
    assert stamps(engine, "first_token") == [joins + 47_001_000, joins + 16 * MS]
    assert stamps(engine, "finish") == [joins + 70_002_000, joins + 78_003_500]


def test_first_token_of_a_slowed_sequence(tiny):
    """A join in the middle of another's first step delays that first token too.

    step = 10 ms x batch (a = 10 us... written as b = 10 ms, a = 1 us). R0 joins at 0; R1 joins at 5.0005 ms: R0 has
    made half a token; two steps of 20.001 ms follow: R0's first token 10.0005 ms later, R1's 20.001 ms later.
    """
    scenario = tiny.scenario(decode={"a_s": 1e-6, "b_s_per_sequence": 0.01}, pd={"n_prefill": 2})
    # hand-overs: 1 us per token; R1 500 tokens: 1 s + 0.5 ms
    engine = tiny.run(scenario, [(0, 1000, 1), (1.0055005, 500, 1)], threshold=NEVER)
    join0, join1 = stamps(engine, "decode_join")
    assert (join0, join1) == (JOIN_1000, JOIN_1000 + 5_000_500)
    first0 = join1 + 10_000_500
    # R0 leaves; R1 has made half a token and goes on alone: half of 10.001 ms
    assert stamps(engine, "first_token") == [first0, first0 + 5_000_500]


def test_a_full_instance_makes_the_next_wait_for_a_slot(tiny):
    scenario = tiny.scenario(decode={"slots": 1}, pd={"n_prefill": 2})
    engine = tiny.run(scenario, [(0, 1000, 30), (0, 1000, 1), (0, 2000, 5)], threshold=NEVER)
    # R0 and R1 are handed over together; R0 has the slot for 300 ms; R1 joins the instant it ends
    assert stamps(engine, "transfer_end") == [JOIN_1000, JOIN_1000, 6 * S + 2 * MS]
    assert stamps(engine, "decode_join") == [JOIN_1000, JOIN_1000 + 300 * MS, 6 * S + 2 * MS]
    assert stamps(engine, "first_token")[1] == JOIN_1000 + 310 * MS


def test_kv_room_and_the_head_of_the_line(tiny):
    # room 1,000 tokens; reserve 100: R0 takes 500, R1 and R2 want 600 each
    scenario = tiny.scenario(
        decode={"kv_capacity_tokens": 1000, "kv_reserve_tokens": 100}, pd={"n_prefill": 3}
    )
    engine = tiny.run(scenario, [(0, 400, 100), (0.0001, 500, 10), (0.0002, 500, 3)], threshold=NEVER)
    join0 = 800 * MS + 400_000
    assert stamps(engine, "decode_join")[0] == join0
    # both others wait for R0's end, 1 s later; then 600 + 600 do not fit together either
    assert stamps(engine, "decode_join")[1] == join0 + S
    assert stamps(engine, "decode_join")[2] == join0 + S + 100 * MS
    # R2 wants 400 and is handed over after R1: it would fit beside R0, but R1 is the head of the line
    small = tiny.run(scenario, [(0, 400, 100), (0.0001, 500, 10), (0.5, 300, 3)], threshold=NEVER)
    assert stamps(small, "decode_join") == [join0, join0 + S, join0 + S]


def test_exact_fit_is_a_fit(tiny):
    scenario = tiny.scenario(
        decode={"kv_capacity_tokens": 1000, "kv_reserve_tokens": 100}, pd={"n_prefill": 2}
    )
    engine = tiny.run(scenario, [(0, 400, 100), (0, 400, 100)], threshold=NEVER)
    assert stamps(engine, "decode_join") == [800_400_000] * 2


def test_fewest_sequences_then_lowest_id(tiny):
    """The step grows with the batch, so that neighbours are seen: 10 ms x batch, two instances.

    Four requests are handed over one after the other: instance 0, 1, then 0 (tie, lowest id), then 1.
    """
    scenario = tiny.scenario(
        decode={"a_s": 1e-6, "b_s_per_sequence": 0.01}, pd={"n_prefill": 4, "n_decode": 2}
    )
    step1, step2 = 10_001_000, 20_001_000
    # joins at 2.001 s + 0, 1 step1, 2 step1, 3 step1
    gap = step1 / 1e9
    rows = [(k * gap, 1000, 10) for k in range(3)]
    engine = tiny.run(scenario, rows, threshold=NEVER)
    # R0 and R2 share instance 0: R0 makes 2 tokens alone, 8 shared
    join = [JOIN_1000 + k * step1 for k in range(3)]
    assert stamps(engine, "decode_join") == join
    finish = stamps(engine, "finish")
    assert finish[0] == join[2] + 8 * step2
    assert finish[1] == join[1] + 10 * step1
    # R2 made 8 tokens by then, 2 are left alone
    assert finish[2] == finish[0] + 2 * step1
    # a fourth goes to instance 1, which has fewer
    engine = tiny.run(scenario, [*rows, (3 * gap, 1000, 10)], threshold=NEVER)
    finish = stamps(engine, "finish")
    assert finish[0] == join[2] + 8 * step2
    # R1 made 2 tokens alone, 8 shared
    assert finish[1] == JOIN_1000 + 3 * step1 + 8 * step2


def test_an_instance_without_room_is_passed_over(tiny):
    # one slot each: the second goes to instance 1 though later arrivals tie; the third waits for the first end
    scenario = tiny.scenario(decode={"slots": 1}, pd={"n_prefill": 3, "n_decode": 2})
    engine = tiny.run(scenario, [(0, 1000, 50), (0, 1000, 20), (0, 1000, 1)], threshold=NEVER)
    assert stamps(engine, "decode_join") == [JOIN_1000, JOIN_1000, JOIN_1000 + 200 * MS]


def test_telemetry_of_decode(tiny):
    # two slots; three handed over at 2.001 s, one waits; R3 arrives later
    scenario = tiny.scenario(
        decode={"slots": 2, "kv_capacity_tokens": 4000, "kv_reserve_tokens": 500}, pd={"n_prefill": 3}
    )
    engine = tiny.engine(scenario, [(0, 1000, 400), (0, 1000, 50), (0, 1000, 400)])
    tiny.drive(engine, threshold=NEVER)
    engine.run_until(JOIN_1000 + 100 * MS)
    pd = engine.telemetry().pd[0]
    assert pd.decode_sequences == 2
    assert pd.decode_queue_requests == 1
    assert pd.decode_queue_tokens == 1000
    assert pd.decode_queue_oldest_s == 0.1
    assert pd.decode_slot_use == 1.0
    assert pd.decode_kv_fill == 0.75
    assert pd.decode_busy_instances == pd.decode_instances == 1
    # nobody has finished: the mean output is not known, and neither is the queued work
    assert pd.output_valid == 0.0
    engine.run_until(5 * S)
    pd = engine.telemetry().pd[0]
    assert (pd.output_valid, pd.output_tokens_mean) == (1.0, 50.0)
    assert engine.totals().decode_slots_ns == 10 * S
    # R0 from 2.001, R1 0.5 s long, then R2 from 2.501
    assert engine.totals().decode_slots_used_ns == (5 * S - JOIN_1000) + 500 * MS + (
        5 * S - JOIN_1000 - 500 * MS
    )


# ----------------------------------------------------------------------------- the clock of a batch, step by step


class SteppedBatch:
    """The same batch without virtual time: it goes from milestone to milestone with floats of tokens."""

    def __init__(self, profile):
        self.profile = profile
        self.progress = {}
        self.joined = {}
        self.now = 0.0
        self.step_s = 1.0

    def advance(self, seconds):
        for request in self.progress:
            self.progress[request] += (seconds - self.now) / self.step_s
        self.now = seconds

    def settle(self):
        p = self.profile
        made = math.floor(sum(self.progress.values()) + 1e-6)
        context = sum(self.joined.values()) + made
        self.step_s = p.a_s + p.b_s_per_sequence * len(self.joined) + p.c_s_per_token * context


@settings(max_examples=100, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 30), st.integers(1, 5000)), min_size=1, max_size=8
    ),
    st.sampled_from([(0.01, 0.0, 0.0), (0.01, 0.002, 0.0), (0.007, 0.001, 3e-7)]),
)
def test_virtual_time_agrees_with_a_clock_that_counts_tokens(rows, step):
    """Joins at given ms, (outputs, context); ends within a few ns per change of the batch."""
    a, b, c = step
    profile = DecodeProfile(a_s=a, b_s_per_sequence=b, c_s_per_token=c, slots=8, source="made up")
    batch, mirror = DecodeBatch(profile), SteppedBatch(profile)
    joins = sorted((at * MS, k, out, context) for k, (at, out, context) in enumerate(rows))
    wanted = {}
    firsts, ends, now = {}, {}, 0
    while len(ends) < len(rows):
        upcoming = min([j[0] for j in joins[:1]] + [batch.next_ns])
        now = upcoming
        mirror.advance(now / 1e9)
        for request, what in batch.due(now):
            assert what in (FIRST, FINISH)
            (firsts if what == FIRST else ends)[request] = now
            expected = 1 if what == FIRST else wanted[request]
            assert abs(mirror.progress[request] - expected) < 1e-6
            if what == FINISH:
                batch.leave(request)
                del mirror.progress[request], mirror.joined[request]
        while joins and joins[0][0] == now:
            _, request, out, context = joins.pop(0)
            batch.join(Sequence(request, 1, context, out, context, True), now)
            mirror.progress[request], mirror.joined[request], wanted[request] = 0.0, context, out
        if batch.dirty:
            mirror.settle()
            batch.settle(now, 1.0)
        else:
            batch.refresh_next()
    assert firsts.keys() == ends.keys()
    assert all(firsts[r] <= ends[r] for r in ends)
    assert batch.kv_tokens == batch.context_tokens == batch.sum_joined_u == 0
