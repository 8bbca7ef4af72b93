"""The link: hand-worked transfers, an independent fluid simulator, and the laws of fair sharing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.simulator.formulas import NEVER_NS, RATE_UNIT_BPS, water_level_bps
from prfaas_env.simulator.link import Flow, LinkState
from prfaas_env.telemetry import LinkMeter

S = 1_000_000_000
ALWAYS = 0.0


# ------------------------------------------------------------------------------- whole transfers by hand
# 1,000 tokens: 1 s of remote prefill, 8e6 bits, 1 s alone on the default 8e6 bit/s.


def transfer_ends(engine):
    return engine.records.transfer_end_ns.tolist()


def test_one_flow_alone(tiny):
    engine = tiny.run(tiny.scenario(), [(0, 1000, 1)], threshold=ALWAYS)
    # prefill 0..1 s, flow 1..2 s
    assert transfer_ends(engine) == [2 * S]
    assert engine.records.prefill_end_ns.tolist() == [S]


def test_case_a19_12_5_gb_at_100_gbps_takes_one_second(tiny):
    # 12.5 GB = 12,500,000,000 bytes (powers of 1000) as 1,000 tokens of 12.5 MB; prefill 1 s; 100e9 bit/s
    scenario = tiny.scenario(kv={"bytes_per_token": 12_500_000}, link={"capacity_bps": "100 Gbps"})
    engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [2 * S]
    assert engine.totals().egress_bits == (100e9,)
    assert engine.records.sent_bytes.tolist() == [12_500_000_000]


def test_same_12_5_gb_at_100_gigabytes_per_second(tiny):
    # 100 GB/s = 800e9 bit/s: 0.125 s
    scenario = tiny.scenario(kv={"bytes_per_token": 12_500_000}, link={"capacity_bps": "100 GB/s"})
    assert transfer_ends(tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)) == [1_125_000_000]


def test_second_flow_joins_and_both_share(tiny):
    # A opens at 1.0, B at 1.5. A alone sends half in 0.5 s; then each gets half: A's 4e6 bits take 1 s, end 2.5;
    # B has 4e6 left and the whole link: 0.5 s, end 3.0.
    scenario = tiny.scenario(prfaas={"n_instances": 2})
    engine = tiny.run(scenario, [(0, 1000, 1), (0.5, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [2_500_000_000, 3 * S]


def test_one_gigabyte_each_b_just_after_a(tiny):
    # 1 GB each on 1 GB/s, B 1 ms later: A has 0.999 GB left at half rate = 1.998 s, so both end near 2 s after the
    # start. A share frozen at the start would let A end after 1 s.
    scenario = tiny.scenario(
        kv={"bytes_per_token": 1_000_000}, link={"capacity_bps": "1 GB/s"}, prfaas={"n_instances": 2}
    )
    engine = tiny.run(scenario, [(0, 1000, 1), (0.001, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [1 * S + 1_999_000_000, 1 * S + 2_000_000_000]


def test_three_flows_of_equal_size_that_open_together(tiny):
    # 3 x 8e6 bits over 8e6 bit/s: all end together after 3 s
    scenario = tiny.scenario(prfaas={"n_instances": 3})
    engine = tiny.run(scenario, [(0, 1000, 1)] * 3, threshold=ALWAYS)
    assert transfer_ends(engine) == [4 * S] * 3


def test_flow_cap_holds_alone_and_frees_nothing_when_shared(tiny):
    # cap 5e6 on 8e6: alone at 5e6. B opens at 1.5 when A has sent 2.5e6; both at 4e6: A ends at 1.5 + 5.5/4 = 2.875;
    # B then has 2.5e6 left at its cap 5e6: 0.5 s, 3.375.
    scenario = tiny.scenario(prfaas={"n_instances": 2}, link={"flow_cap_bps": 5e6})
    engine = tiny.run(scenario, [(0, 1000, 1), (0.5, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [2_875_000_000, 3_375_000_000]


def test_latency_is_added_once(tiny):
    for layers in (1, 4):
        scenario = tiny.scenario(kv={"n_layers": layers}, link={"latency_s": 0.25})
        engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)
        # without pipelining flow 1..2 s; with 4 layers three quarters go during prefill: 1.25 s
        expected = (2.0 if layers == 1 else 1.25) + 0.25
        assert transfer_ends(engine) == [tiny.ns(expected)]
        # the local hand-over does not pay it: prefill 2 s, 8e6 bits at 8e9 bit/s = 1 ms
        local = tiny.run(scenario, [(0, 1000, 1)], threshold=math.inf)
        assert transfer_ends(local) == [2_001_000_000]


def test_hand_over_inside_the_pd_cluster_is_not_shared(tiny):
    # two local prefills end together at 2 s; each hand-over takes its own 1 ms + 2 ms latency
    scenario = tiny.scenario(pd={"n_prefill": 2, "rdma_latency_s": 0.002})
    engine = tiny.run(scenario, [(0, 1000, 1)] * 2, threshold=math.inf)
    assert transfer_ends(engine) == [2_003_000_000] * 2


def test_fixed_state_and_windows_travel_too(tiny):
    # 500,000 B of state + 1,000 tokens x 1,000 B + window of 100 tokens x 5,000 B = 2,000,000 B = 2 s
    scenario = tiny.scenario(
        kv={"fixed_bytes": 500_000, "windows": [{"bytes_per_token": 5000, "window_tokens": 100}]}
    )
    engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [3 * S]


@pytest.mark.parametrize(
    ("capacity_bps", "end_s"),
    [
        # opens at 0.25 with cap 8e6 (S/T): 6e6 sent at 1.0; 2e6 left, one layer's share
        (80e6, 1.025),
        (16e6, 1.125),
        (8e6, 1.25),
        # the link is slower than prefill from the start: 8e6 / 4e6 after 0.25
        (4e6, 2.25),
    ],
)
def test_pipelined_tail_is_one_layer_on_a_fast_link(tiny, capacity_bps, end_s):
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": capacity_bps})
    engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [tiny.ns(end_s)]
    # prefill is never held up by the link
    assert engine.records.prefill_end_ns.tolist() == [S]


def test_pipelining_can_be_switched_off(tiny):
    scenario = tiny.scenario(kv={"n_layers": 4}, transport={"pipelining": False})
    assert transfer_ends(tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)) == [2 * S]


def test_pipelined_flow_keeps_its_own_cap_after_prefill(tiny):
    # cap 4e6 < S/T = 8e6 all the time: opens 0.25, 8e6 bits at 4e6: 2.25
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 80e6, "flow_cap_bps": 4e6})
    assert transfer_ends(tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)) == [2_250_000_000]
    # cap 16e6: 6e6 until 1.0 at S/T, then 2e6 at 16e6
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 80e6, "flow_cap_bps": 16e6})
    assert transfer_ends(tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)) == [1_125_000_000]


def test_congested_pipelined_flows(tiny):
    # A: 1,000 tokens, opens 0.25; B: 2,000 tokens (T = 2 s, S = 16e6), opens 0.5; both capped at 8e6 while prefilling.
    # Link 12e6. A alone at 8e6 until 0.5: 2e6. Then 6e6 each: A ends at 0.5 + 6/6 = 1.5 (its cap ended at 1.0 and never
    # bound). B has 10e6 left, capped at 8e6 until 2.0: 6e6 left, then 12e6: 2.5.
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 12e6}, prfaas={"n_instances": 2})
    engine = tiny.run(scenario, [(0, 1000, 1), (0, 2000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [1_500_000_000, 2_500_000_000]


def test_share_that_a_capped_flow_leaves_goes_to_the_other(tiny):
    # Link 18e6. B: T 0..1, opens 0.25, 8e6 until 1.0, 2e6 left. A: T 0.5..1.5, opens 0.75, capped at 8e6.
    # From 1.0 B gets 18 - 8 = 10e6 (not 9e6): ends at 1.2. A: 6e6 by 1.5, then 2e6 at 18e6: 1.5 + 1/9 s.
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 18e6}, prfaas={"n_instances": 2})
    engine = tiny.run(scenario, [(0, 1000, 1), (0.5, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [1_200_000_000, 1_611_111_111]


def test_flow_that_fell_behind_catches_up_after_its_prefill(tiny):
    # 2e6 bit/s until 0.75, then 80e6. Opens 0.25: 1e6 sent at 0.75. Capped at S/T = 8e6 until 1.0: 3e6 sent.
    # Then 5e6 left at 80e6: 0.0625 s.
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 80e6})
    engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS, capacity=[[(0, 2e6), (0.75, 80e6)]])
    assert transfer_ends(engine) == [1_062_500_000]


def test_capacity_change_is_felt_in_mid_flow(tiny):
    # 8e6 until 1.5: half sent; then 4e6: the other half takes 1 s
    engine = tiny.run(tiny.scenario(), [(0, 1000, 1)], threshold=ALWAYS, capacity=[[(0, 8e6), (1.5, 4e6)]])
    assert transfer_ends(engine) == [2_500_000_000]


def test_outage_and_back(tiny):
    # half sent at 1.5; nothing until 3.5; the other half takes 0.5 s
    engine = tiny.run(
        tiny.scenario(), [(0, 1000, 1)], threshold=ALWAYS, capacity=[[(0, 8e6), (1.5, 0), (3.5, 8e6)]]
    )
    assert transfer_ends(engine) == [4 * S]


def test_link_that_is_down_at_the_start(tiny):
    engine = tiny.run(
        tiny.scenario(kv={"n_layers": 4}), [(0, 1000, 1)], threshold=ALWAYS, capacity=[[(0, 0), (5, 16e6)]]
    )
    assert transfer_ends(engine) == [5_500_000_000]


def test_links_do_not_share_with_each_other(tiny):
    # two PrfaaS clusters, a link each. B at 0.1: predicted over cluster 0 0.9 + 1 + 1 s, over idle cluster 1 1 + 1.6 s
    scenario = tiny.scenario(
        prfaas=[{"name": "prfaas0"}, {"name": "prfaas1"}],
        link=[{"prfaas": "prfaas0"}, {"prfaas": "prfaas1", "capacity_bps": 5e6}],
    )
    engine = tiny.run(scenario, [(0, 1000, 1), (0.1, 1000, 1)], threshold=ALWAYS)
    assert engine.records.prfaas.tolist() == [0, 1]
    assert transfer_ends(engine) == [2 * S, 2_700_000_000]
    assert engine.totals().egress_bits == (8e6, 8e6)


def test_peak_egress_does_not_depend_on_who_reads(tiny):
    # one flow of 8 s at full rate from 8 s to 16 s: no event in between; the peak is known as soon as a second is over
    rows = [(0, 8000, 1)]
    silent, read = tiny.engine(tiny.scenario(), rows), tiny.engine(tiny.scenario(), rows)
    for engine in (silent, read):
        tiny.drive(engine, threshold=ALWAYS)
        for at_s in range(8, 13):
            engine.run_until(at_s * S + S // 2)
            if engine is read:
                engine.telemetry()
        assert engine.totals().egress_peak_bps == (8e6,)
        engine.run_to_end()
        assert engine.totals().egress_peak_bps == (8e6,)
    assert silent.totals() == read.totals()


def test_peak_egress_counts_whole_seconds_after_the_warm_up(tiny):
    # R0: 2 s at the full 8e6 bit/s, before 10 s. R1: 2e6 bits within the second from 20 s
    scenario = tiny.scenario(measure={"warmup_s": 10.0, "horizon_s": 100.0})
    engine = tiny.run(scenario, [(0, 2000, 1), (20, 250, 1)], threshold=ALWAYS, until=30)
    assert engine.totals().egress_peak_bps == (2e6,)


def test_staged_bytes_are_what_prefill_made_and_the_link_has_not_sent(tiny):
    # 4 layers, prefill 0..1 s, link 4e6 bit/s = 0.5e6 B/s, 1e6 B in all; opens at 0.25
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 4e6})
    engine = tiny.engine(scenario, [(0, 1000, 1)])
    tiny.drive(engine, threshold=ALWAYS)
    # by 0.5 s prefill made half (500,000 B); sent 0.25 s x 0.5e6 = 125,000 B
    # by 1.5 s all is made; sent 1.25 x 0.5e6 = 625,000 B
    expected = [(0.1, 0), (0.5, 375_000), (0.75, 500_000), (1.0, 625_000), (1.5, 375_000), (2.5, 0)]
    for at_s, staged in expected:
        engine.run_until(tiny.ns(at_s))
        assert engine.telemetry().link[0].staged_bytes == pytest.approx(staged, abs=0.01), at_s


def test_observed_capacity_through_an_engine(tiny):
    """Nominal 80e6. Pipelined flows that the link does not hold up say nothing; an outage with a backlog does."""
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 80e6})
    engine = tiny.engine(
        scenario, [(0, 20_000, 1), (20, 1000, 1)], capacity=[[(0, 80e6), (20, 0), (40, 80e6)]]
    )
    tiny.drive(engine, threshold=ALWAYS)
    # a flow of 8e6 bit/s, its own cap, from 5 s to 20 s
    engine.run_until(19 * S)
    link = engine.telemetry().link[0]
    assert (link.observed_valid, link.observed_capacity_bps, link.open_flows) == (0.0, 80e6, 1.0)
    assert link.utilisation_5s == pytest.approx(0.1)
    # from 20 s on nothing moves: the window of five whole seconds is full at 25 s
    for at_s, observed in [(24, 80e6), (25, 0.8e6), (40, 0.8e6)]:
        engine.run_until(at_s * S)
        link = engine.telemetry().link[0]
        assert link.observed_capacity_bps == observed
        assert (link.observed_valid, link.observed_age_s) == ((0.0, 0.0) if at_s == 24 else (1.0, 0.0))
    # one layer of 20,000 tokens and the whole cache of 1,000, at a hundredth of nominal
    assert link.backlog_bytes == pytest.approx(5e6 + 1e6)
    assert link.backlog_s == pytest.approx(60.0)
    # both go at full rate from 40 s, 48e6 bits: the window that ends at 41 s delivered more than was observed
    engine.run_to_end()
    engine.run_until(60 * S)
    link = engine.telemetry().link[0]
    assert (link.observed_age_s, link.open_flows, link.backlog_bytes) == (19.0, 0.0, 0.0)
    assert link.observed_capacity_bps == pytest.approx(48e6 / 5)


def test_backlog_counts_queued_running_and_open_requests(tiny):
    # one instance: A prefills 0..1, B queues and prefills 1..2; link 8e6; no pipelining
    engine = tiny.engine(tiny.scenario(), [(0, 1000, 1), (0, 1000, 1)])
    tiny.drive(engine, threshold=ALWAYS)
    for at_s, backlog in [(0.5, 2e6), (1.5, 1.5e6), (2.0, 1e6), (2.75, 0.25e6), (4.0, 0.0)]:
        engine.run_until(tiny.ns(at_s))
        assert engine.telemetry().link[0].backlog_bytes == pytest.approx(backlog, abs=0.01), at_s


# --------------------------------------------------------------------------------- fair rates by hand


@pytest.mark.parametrize(
    ("capacity", "caps", "rates", "limited"),
    [
        (10.0, [math.inf, math.inf], [5.0, 5.0], True),
        (10.0, [1.0, math.inf, math.inf], [1.0, 4.5, 4.5], True),
        # 2 and 3 are below their share, the rest gets what they leave
        (10.0, [math.inf, 2.0, 3.0], [5.0, 2.0, 3.0], True),
        (10.0, [4.0, 4.0], [4.0, 4.0], False),
        (10.0, [5.0, 5.0], [5.0, 5.0], False),
        (10.0, [6.0, 5.0], [5.0, 5.0], True),
        (0.0, [3.0, math.inf], [0.0, 0.0], True),
        (10.0, [0.0, 20.0], [0.0, 10.0], True),
        (10.0, [], [], False),
    ],
)
def test_max_min_rates_by_hand(capacity, caps, rates, limited):
    level = water_level_bps(capacity, caps)
    assert (level < math.inf) is limited
    assert [min(cap, level) for cap in caps] == rates


# ------------------------------------------------------------------------ an independent fluid simulator


@dataclass(frozen=True)
class Job:
    """A transfer: opens, is fed at `produce_bps` until `fed_until_ns`, has a cap of its own."""

    open_ns: int
    bits: int
    fed_until_ns: int
    produce_bps: float
    own_cap_bps: float

    def cap(self, at_ns):
        return self.own_cap_bps if at_ns >= self.fed_until_ns else min(self.own_cap_bps, self.produce_bps)


def exact_level(capacity, caps):
    """The water level: sum of min(cap, level) is the capacity; infinite when every cap fits."""
    if sum(caps) <= capacity:
        return math.inf
    # raise the level from one cap to the next and stop where the capacity runs out
    level, used = Fraction(0), Fraction(0)
    open_caps = sorted(caps)
    while open_caps:
        step = open_caps[0] - level
        if open_caps[0] == math.inf or used + step * len(open_caps) > capacity:
            return level + (capacity - used) / len(open_caps)
        used += step * len(open_caps)
        level = open_caps[0]
        open_caps = [c for c in open_caps if c > level]
    raise AssertionError("unreachable: the caps exceed the capacity")


def fraction(x):
    return x if x == math.inf else Fraction(x)


def exact_fluid(jobs, capacity):
    """Exact finish times in ns (Fractions; None = never) of jobs on a link of capacity [(from ns, bit/s)]."""
    times = sorted(
        {j.open_ns for j in jobs} | {j.fed_until_ns for j in jobs} | {t for t, _ in capacity} | {0}
    )
    left = {k: Fraction(j.bits) for k, j in enumerate(jobs)}
    done = {}
    now = Fraction(0)
    while len(done) < len(jobs):
        bps = next(Fraction(c) for t, c in reversed(capacity) if t <= now)
        active = [k for k, j in enumerate(jobs) if j.open_ns <= now and k not in done]
        caps = [fraction(jobs[k].cap(now)) for k in active]
        level = exact_level(bps, caps)
        rates = {k: min(cap, level) / 10**9 for k, cap in zip(active, caps, strict=True)}  # bits per ns
        ends = {k: now + left[k] / rates[k] for k in active if rates[k] > 0 or left[k] == 0}
        following = [t for t in times if t > now]
        upcoming = min([*ends.values(), *following], default=None)
        if upcoming is None:
            return [done.get(k) for k in range(len(jobs))]
        for k in active:
            left[k] -= rates[k] * (upcoming - now)
            if left[k] == 0:
                done[k] = upcoming
        now = upcoming
    return [done[k] for k in range(len(jobs))]


def test_the_fluid_simulator_on_a_case_by_hand():
    jobs = [Job(1 * S, 8_000_000, S, math.inf, math.inf), Job(1_500_000_000, 8_000_000, 0, math.inf, 5e6)]
    # A half by 1.5, both at 4e6: A ends 2.5, B has 4e6 left at its cap 5e6: 0.8 s
    assert exact_fluid(jobs, [(0, 8e6)]) == [2_500_000_000, 3_300_000_000]


class Driven:
    """A `LinkState` driven through jobs and capacity changes, all changes of an instant before one settling."""

    def __init__(self, jobs, capacity):
        self.link = LinkState(float(capacity[0][1]), LinkMeter(1e9))
        self.capacity = dict(capacity[1:])
        self.ends = [NEVER_NS] * len(jobs)
        self.steps = []  # (from ns, to ns, rates with caps, capacity), one per interval of constant rates
        flows = [
            Flow(k, 1, float(j.bits), j.open_ns, j.fed_until_ns, j.produce_bps, j.own_cap_bps, owner=k)
            for k, j in enumerate(jobs)
        ]
        times = sorted({j.open_ns for j in jobs} | {j.fed_until_ns for j in jobs} | set(self.capacity))
        now = 0
        while True:
            upcoming = min([t for t in times if t > now] + [self.link.next_end_ns])
            if now == 0 and 0 in times:
                upcoming = 0
                times.remove(0)
            if upcoming == NEVER_NS:
                return
            self._note(now, upcoming)
            now = upcoming
            self._instant(now, jobs, flows)

    def _instant(self, now, jobs, flows):
        if now in self.capacity:
            self.link.capacity_bps = float(self.capacity[now])
            self.link.dirty = True
        for flow, job in zip(flows, jobs, strict=True):
            if job.fed_until_ns == now and flow in self.link.flows:
                self.link.prefill_ended(flow)
        for flow in self.link.end_due(now):
            self.ends[flow.owner] = now
        for flow, job in zip(flows, jobs, strict=True):
            if job.open_ns == now:
                self.link.open(flow)
        self.link.settle(now)

    def _note(self, start, end):
        if end > start:
            rates = [(f.rate_bps, f.cap_bps) for f in self.link.flows]
            self.steps.append((start, end, rates, self.link.capacity_bps))


EXACT = settings(max_examples=150, derandomize=True)
MS = 1_000_000


@st.composite
def jobs_and_capacity(draw, outage=True):
    """Up to 8 transfers and up to 4 capacity changes over some seconds; the last capacity is positive."""
    jobs = []
    for _ in range(draw(st.integers(1, 8))):
        open_ns = draw(st.integers(0, 4000)) * MS
        bits = draw(st.integers(1, 50_000_000))
        produce_bps = draw(st.sampled_from([math.inf, 1e6, 3.7e6, 20e6, 1e9 / 7]))
        fed_until_ns = 0 if produce_bps == math.inf else open_ns + draw(st.integers(0, 3000)) * MS
        own = draw(st.sampled_from([math.inf, 2e6, 5e6, 1e7 / 3]))
        jobs.append(Job(open_ns, bits, fed_until_ns, produce_bps, own))
    rates = [1e6, 8e6, 1e7 / 3, 50e6] + ([0.0] if outage else [])
    changes = draw(st.dictionaries(st.integers(1, 6000), st.sampled_from(rates), max_size=3))
    capacity = [(0, draw(st.sampled_from(rates))), *((t * MS, c) for t, c in sorted(changes.items()))]
    capacity.append((7000 * MS, draw(st.sampled_from(rates[:4]))))
    return jobs, capacity


@EXACT
@given(jobs_and_capacity())
def test_finish_times_agree_with_the_fluid_simulator(case):
    jobs, capacity = case
    driven = Driven(jobs, capacity)
    for got, exact in zip(driven.ends, exact_fluid(jobs, capacity), strict=True):
        # 1e-9 of the time, and whole ns: each end so far was rounded by at most half of one
        assert abs(got - exact) <= exact * Fraction(1, 10**9) + len(jobs)


@EXACT
@given(jobs_and_capacity())
def test_every_bit_is_sent_once(case):
    jobs, capacity = case
    driven = Driven(jobs, capacity)
    link = driven.link
    assert not link.flows
    assert all(end < NEVER_NS for end in driven.ends)
    assert link.delivered_bits(max(driven.ends)) == float(sum(j.bits for j in jobs))
    # rates times time give the same, up to half a ns of each end at most at full rate
    moved = sum(sum(r for r, _ in rates) * (end - start) / 1e9 for start, end, rates, _ in driven.steps)
    slack = max(c for _, c in capacity) * 1e-9 * len(jobs) + 1e-6
    assert moved == pytest.approx(sum(j.bits for j in jobs), abs=slack)


@EXACT
@given(jobs_and_capacity())
def test_rates_are_fair_capped_and_waste_nothing(case):
    jobs, capacity = case
    for _, _, rates, bps in Driven(jobs, capacity).steps:
        total = sum(r for r, _ in rates)
        below = [r for r, cap in rates if r < cap]
        assert all(r <= cap for r, cap in rates)
        # what capped flows leave is known to half a unit each
        slack = bps * 1e-12 + len(rates) * RATE_UNIT_BPS / 2
        assert total <= bps + slack
        if below:
            # work-conserving, and nobody below its cap has less than another flow
            assert total == pytest.approx(bps, abs=slack)
            assert min(below) >= max(r for r, _ in rates) * (1 - 1e-12)


@EXACT
@given(jobs_and_capacity(), st.sampled_from([1.0, 1.1, 2.0, 10.0]), st.integers(0, 3))
def test_more_capacity_never_ends_a_transfer_later(case, factor, from_change):
    jobs, capacity = case
    more = [(t, c * factor if k >= from_change else c) for k, (t, c) in enumerate(capacity)]
    slow, fast = Driven(jobs, capacity).ends, Driven(jobs, more).ends
    assert all(f <= s + len(jobs) for f, s in zip(fast, slow, strict=True))


@EXACT
@given(jobs_and_capacity(), st.integers(0, 7), st.data())
def test_equal_transfers_that_overlap_fully_end_together(case, which, data):
    jobs, capacity = case
    twin = jobs[which % len(jobs)]
    position = data.draw(st.integers(0, len(jobs)))
    ends = Driven([*jobs[:position], twin, *jobs[position:]], capacity).ends
    at = which % len(jobs)
    assert ends[position] == ends[at + (position <= at)]


@EXACT
@given(jobs_and_capacity(), st.permutations(range(8)))
def test_order_of_opening_within_an_instant_does_not_matter(case, order):
    jobs, capacity = case
    order = [k for k in order if k < len(jobs)]
    ends = Driven(jobs, capacity).ends
    shuffled = Driven([jobs[k] for k in order], capacity).ends
    for position, k in enumerate(order):
        # sums are taken in another order: the last bit of a rate may move an end by 1 ns
        assert abs(shuffled[position] - ends[k]) <= len(jobs)


# ------------------------------------------------------------------------------- the same through an engine


@st.composite
def remote_requests(draw):
    """Requests for a remote cluster, the layers, the caps, and a capacity trace that ends positive."""
    n = draw(st.integers(1, 12))
    arrivals = sorted(draw(st.integers(0, 8000)) for _ in range(n))
    rows = [(a / 1000, draw(st.integers(1, 4000)), 1) for a in arrivals]
    changes = draw(
        st.dictionaries(st.integers(1, 15_000), st.sampled_from([0.0, 2e6, 8e6, 9.7e6]), max_size=4)
    )
    trace = [(0.0, draw(st.sampled_from([0.0, 3e6, 8e6])))]
    trace += [(t / 1000, c) for t, c in sorted(changes.items())] + [(20.0, 8e6)]
    return rows, draw(st.sampled_from([1, 3, 57])), draw(st.sampled_from([None, 3e6])), trace


@settings(max_examples=60, derandomize=True)
@given(remote_requests(), st.integers(1, 4))
def test_engine_agrees_with_the_fluid_simulator(tiny, case, instances):
    rows, layers, flow_cap_bps, trace = case
    scenario = tiny.scenario(
        kv={"n_layers": layers, "fixed_bytes": 12_345},
        link={"flow_cap_bps": flow_cap_bps, "latency_s": 0.125},
        prfaas={"n_instances": instances},
    )
    engine = tiny.run(scenario, rows, threshold=ALWAYS, capacity=[trace])
    records = engine.records
    jobs = []
    for k, (_, tokens, _) in enumerate(rows):
        start, end = int(records.prefill_start_ns[k]), int(records.prefill_end_ns[k])
        bits = 8 * (12_345 + 1000 * tokens)
        pipelined = layers > 1
        jobs.append(
            Job(
                open_ns=start + round(Fraction(end - start, layers)) if pipelined else end,
                bits=bits,
                fed_until_ns=end if pipelined else 0,
                produce_bps=bits / ((end - start) / 1e9),
                own_cap_bps=math.inf if flow_cap_bps is None else flow_cap_bps,
            )
        )
    exact = exact_fluid(jobs, [(tiny.ns(t), c) for t, c in trace])
    for got, end in zip(records.transfer_end_ns.tolist(), exact, strict=True):
        assert abs(got - 125_000_000 - end) <= end * Fraction(1, 10**9) + len(jobs)
    assert engine.totals().egress_bits == (float(sum(j.bits for j in jobs)),)


@settings(max_examples=60, derandomize=True)
@given(remote_requests(), st.lists(st.integers(0, 25_000_000_000), min_size=2, max_size=20))
def test_egress_never_exceeds_capacity_in_any_window(tiny, case, instants):
    rows, layers, flow_cap_bps, trace = case
    scenario = tiny.scenario(
        kv={"n_layers": layers}, link={"flow_cap_bps": flow_cap_bps}, prfaas={"n_instances": 3}
    )
    engine = tiny.engine(scenario, rows, capacity=[trace])
    tiny.drive(engine, threshold=ALWAYS)
    times = sorted(set(instants))
    sent = []
    for at_ns in times:
        engine.run_until(at_ns)
        sent.append(engine.totals().egress_bits[0])
    starts = np.array([tiny.ns(t) for t, _ in trace] + [30 * S])
    rates = np.array([c for _, c in trace])
    room = [float((np.diff(np.minimum(starts, t)) * rates).sum()) / 1e9 for t in times]
    ends = engine.records.transfer_end_ns
    for a in range(len(times)):
        for b in range(a + 1, len(times)):
            in_window = int(((ends >= times[a]) & (ends <= times[b])).sum())
            # an end lies on a whole ns: at most 1 ns of capacity each
            assert -1e-6 <= sent[b] - sent[a] <= room[b] - room[a] + 9.7e6 * 1e-9 * (in_window + 1)
