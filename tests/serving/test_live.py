"""Telemetry of a running router: by hand, against the simulator's link, and never anything that is not finite."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.decision import ClusterDecision
from prfaas_env.scenarios import load_scenario
from prfaas_env.telemetry import Telemetry, length_bin, schema_for
from prfaas_serving.app import Router
from prfaas_serving.choice import Route
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.fleet import Load, Worker
from prfaas_serving.forward import Ended, Forwarder
from prfaas_serving.live import LinkWatch, LiveTelemetry, LoadPages, RouterClock, SizeFactor
from prfaas_serving.metrics import Metrics
from prfaas_serving.paths import Flow
from tests.serving.support import LONG, SHORT, run, serving, until

T0 = 1000.0
HERE = Route("local", "pd0", "rule")
WORKERS = [
    {"name": "r1", "url": "http://r1:1", "cluster": "prfaas0", "role": "prefill"},
    {"name": "l1", "url": "http://l1:1", "cluster": "pd0", "role": "prefill"},
    {"name": "l2", "url": "http://l2:1", "cluster": "pd0", "role": "prefill"},
    {"name": "d1", "url": "http://d1:1", "cluster": "pd0", "role": "decode"},
    {"name": "d2", "url": "http://d2:1", "cluster": "pd0", "role": "decode"},
]


async def made(scale: float = 1.0, scenario: str = "drift", **config: Any) -> tuple[Forwarder, LiveTelemetry]:
    """A forwarder without connections, all workers up since T0, and its telemetry."""
    raw = {"backend": "vllm_nixl", "scenario": scenario, "workers": WORKERS, "time_scale": scale}
    raw["decision"] = {"threshold_tokens": 1000}
    forwarder = Forwarder(Resolved(RouterConfig.model_validate(raw | config)), Metrics())
    for worker in forwarder.fleet:
        worker.came_up(T0)
    clock = RouterClock(T0, scale)
    return forwarder, LiveTelemetry(forwarder, forwarder.fleet.changes, clock)


def reading(act: Any, at_s: float, scale: float = 1.0, **config: Any) -> Telemetry:
    """The reading at `at_s` seconds of the scenario after `act(forwarder, live)`."""

    async def work() -> Telemetry:
        forwarder, live = await made(scale, **config)
        act(forwarder, live)
        found = live.read(T0 + at_s * scale)
        await forwarder.close(0.0)
        return found

    return asyncio.run(work())  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_nothing_yet_is_a_whole_reading(scale: float) -> None:
    t = reading(lambda f, live: None, 0.0, scale)
    assert t.schema == schema_for(1, 1, 1)
    assert t.time_ns == 0
    pd = t.pd[0]
    assert (pd.arrivals_valid, pd.lengths_valid, pd.output_valid, pd.ttft_valid) == (0, 0, 0, 0)
    assert (pd.prefill_instances, pd.decode_instances, t.prfaas[0].prefill_instances) == (2, 2, 1)
    assert (pd.threshold_tokens, pd.threshold_valid, pd.margin_valid) == (1000, 1, 0)
    assert t.link[0].nominal_capacity_bps == t.link[0].observed_capacity_bps == 100e9
    assert (t.conversion_tick, t.legal_moves) == (False, ((False, True, False),))
    assert np.isfinite(t.encode()).all()


def test_the_door_counts_in_seconds_of_the_scenario() -> None:
    """Ten arrivals in the third second at a tenth of real time."""

    def act(forwarder: Forwarder, live: LiveTelemetry) -> None:
        for k in range(10):
            live.arrival(T0 + 0.2 + k * 0.01, 3000, 1000, 2000, HERE)
        live.first_token(T0 + 0.25, 0.5, HERE)  # 5 s of the scenario: within the objective of 6 s
        live.first_token(T0 + 0.25, 0.7, HERE)
        live.finished(T0 + 0.28, 40, 0.0025)
        live.rejected(T0 + 0.28, "saturated")
        live.rejected(T0 + 0.28, "upstream_error")
        live.ended(T0 + 0.28, Ended(T0, 5, {}, 0, "aborted", False, None, None))
        live.ended(T0 + 0.28, Ended(T0, 5, {}, 0, "aborted", False, 0.1, None))

    t = reading(act, 5.0, 0.1)
    pd = t.pd[0]
    assert t.time_ns == 5_000_000_000
    assert pd.arrival_rate_5s_rps == pytest.approx(2.0)
    assert pd.input_token_rate_5s_tps == pytest.approx(2000.0)
    assert pd.arrival_rate_120s_rps == pytest.approx(2.0), "five whole seconds have been counted"
    assert pd.length_shares[length_bin(1000)] == 1.0
    assert pd.hit_share == pytest.approx(2 / 3)
    assert pd.ttft_attainment == pytest.approx(1 / 3), "one of two, and one given up"
    assert (pd.output_tokens_mean, pd.tpot_attainment, pd.rejected_120s) == (40, 1.0, 1)
    assert t.recent_lengths_tokens[0].tolist() == [1000] * 10


def test_queues_and_running_prefills_by_hand() -> None:
    """l1: one prefill of 4 s that began 1 s ago and one of 3 s behind it; l2 idle; r1: one that is overdue."""

    def act(forwarder: Forwarder, live: LiveTelemetry) -> None:
        w = forwarder.fleet.workers
        w["l1"].begin(T0 + 9.0, 4.0, 4000)
        w["l1"].begin(T0 + 9.5, 3.0, 3000, T0 + 8.0)
        w["r1"].begin(T0 + 2.0, 5.0, 5000)

    t = reading(act, 10.0)
    pd, remote = t.pd[0], t.prfaas[0]
    assert (pd.prefill_queue_requests, pd.prefill_queue_tokens, pd.prefill_queue_work_s) == (1, 3000, 3.0)
    assert pd.prefill_queue_oldest_s == pytest.approx(2.0)
    assert pd.prefill_residual_s == pytest.approx(3.0)
    assert (pd.prefill_busy_instances, pd.prefill_instances) == (1, 2)
    assert (remote.prefill_busy_instances, remote.prefill_residual_s, remote.prefill_queue_requests) == (
        1,
        0,
        0,
    )


def test_who_waits_in_the_router_is_queued() -> None:
    async def work() -> None:
        forwarder, live = await made(limits={"prefill_per_worker": 1})
        pool = forwarder.fleet.remote_prefill["prfaas0"]
        await pool.acquire(5.0, 2.0, 2000)
        tasks = [asyncio.create_task(pool.acquire(5.0, 1.5, 1500)) for _ in range(3)]
        await asyncio.sleep(0.05)
        t = live.read(time.monotonic())
        remote = t.prfaas[0]
        assert (remote.prefill_queue_requests, remote.prefill_queue_tokens) == (3, 4500)
        assert remote.prefill_queue_work_s == pytest.approx(4.5)
        assert 0.0 < remote.prefill_queue_oldest_s < 5.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await forwarder.close(0.0)

    asyncio.run(work())


def test_decode_by_hand() -> None:
    """d1: 20 sequences (all slots), two more at the worker, of which one still fetches; d2: one sequence."""

    def act(forwarder: Forwarder, live: LiveTelemetry) -> None:
        d1, d2 = forwarder.fleet.workers["d1"], forwarder.fleet.workers["d2"]
        for _ in range(20):
            d1.begin(T0 + 5.0, tokens=100).answering = True
        d1.begin(T0 + 6.0, tokens=700)
        d1.begin(T0 + 7.0, tokens=800)
        d2.begin(T0 + 7.0, tokens=100).answering = True
        fields = {
            "vllm:num_requests_waiting_by_reason{deferred}": 1.0,
            "vllm:prompt_tokens_by_source_total": 1,
        }
        d1.load = Load(20.0, 2.0, 0.5, T0 + 9.5, 22, 0.0, fields)
        live.finished(T0 + 8.0, 100, 0.02)

    t = reading(act, 10.0)
    pd = t.pd[0]
    assert (pd.decode_queue_requests, pd.decode_queue_tokens) == (1, 700)
    assert 3.0 < pd.decode_queue_oldest_s <= 4.0, "since its transfer must have ended"
    assert (pd.decode_sequences, pd.decode_busy_instances, pd.decode_instances) == (21, 2, 2)
    assert pd.decode_slot_use == pytest.approx(21 / 40)
    assert pd.decode_queue_work_s == pytest.approx(1 * 100 * 0.025 / 20)
    assert pd.decode_kv_fill == 0.0, "the scenario knows no limit, so training saw 0"


def test_without_a_page_the_slots_of_the_profile_tell_the_queue() -> None:
    def act(forwarder: Forwarder, live: LiveTelemetry) -> None:
        d1 = forwarder.fleet.workers["d1"]
        for k in range(23):
            d1.begin(T0 + 5.0, tokens=10).answering = k < 20

    assert reading(act, 10.0).pd[0].decode_queue_requests == 3


def test_conversions_and_their_legality() -> None:
    async def work() -> None:
        forwarder, live = await made()
        fleet = forwarder.fleet
        assert live.read(T0 + 15.0).legal_moves == ((True, True, True),)
        assert live.read(T0 + 15.0).pd[0].next_conversion_s == 0.0
        assert live.read(T0 + 14.0).legal_moves == ((False, True, False),)
        assert live.read(T0 + 14.0).pd[0].next_conversion_s == pytest.approx(1.0)
        late = live.read(T0 + 16.0, last_ns=14_000_000_000)
        assert (late.conversion_tick, late.legal_moves) == (True, ((True, True, True),)), "a late tick counts"
        assert live.read(T0 + 15.0, moves_allowed=False).legal_moves == ((False, True, False),)
        change = fleet.changes.begin(fleet.workers["l1"], "decode", "policy")
        change.ordered_s = T0 + 15.0
        fleet.workers["l1"].draining = True
        t = live.read(T0 + 30.0)
        assert t.legal_moves == ((False, True, False),)
        assert (t.pd[0].converting_instances, t.pd[0].since_conversion_s) == (1, 15.0)
        assert (t.pd[0].prefill_instances, t.pd[0].decode_instances) == (1, 2)
        fleet.changes.end(change, "done")
        fleet.workers["l1"].draining = False
        fleet.relabel(fleet.workers["l1"], "decode")
        t = live.read(T0 + 45.0)
        assert t.legal_moves == ((False, True, True),), "the last prefill worker stays"
        assert (t.pd[0].prefill_instances, t.pd[0].decode_instances) == (1, 3)
        await forwarder.close(0.0)

    asyncio.run(work())


def test_other_pd_clusters_have_stand_ins_and_are_named_so() -> None:
    async def work() -> None:
        scenario = load_scenario("two_regions")
        deployment = scenario.deployment
        pd = deployment.pd[0].name
        linked = next(link.prfaas for link in deployment.links if link.pd == pd)
        workers = [
            {"name": "r", "url": "http://a:1", "cluster": linked, "role": "prefill"},
            {"name": "l", "url": "http://l:1", "cluster": pd, "role": "prefill"},
            {"name": "d", "url": "http://d:1", "cluster": pd, "role": "decode"},
        ]
        forwarder, live = await made(scenario="two_regions", workers=workers)
        t = live.read(T0 + 15.0)
        assert t.schema == schema_for(len(deployment.pd), len(deployment.prfaas), len(deployment.links))
        assert t.pd[1].decode_instances == deployment.pd[1].n_decode
        assert t.legal_moves[1] == (False, True, False)
        assert live.sources["pd1.decode_instances"] == "stand-in"
        assert live.sources["pd0.decode_instances"] == "router"
        assert set(live.sources) == set(t.schema.names)
        await forwarder.close(0.0)

    asyncio.run(work())


# ------------------------------------------------------------------------------------------------ link


def watch(nominal: float = 100.0, limit: float = math.inf, tail: float = 0.0, slot: bool = True) -> LinkWatch:
    return LinkWatch(RouterClock(0.0), nominal, limit, tail, lambda _: slot, lambda: 1.0)


def transfers(w: LinkWatch, rate: float, bits: float, until_s: float, gap_s: float) -> None:
    """Transfers one after the other over a link that carries `rate`."""
    at = w._at_ns / 1e9
    while at < until_s:
        flow = Flow(bits)
        w.opened(flow, at)
        at += bits / rate
        w.closed(flow, at, arrived=True)
        at += gap_s
    w.advance(round(until_s) * 1_000_000_000)


def backlog(w: LinkWatch, rate: float, bits: float, until_s: float, tail: float) -> None:
    """Two transfers always under way over a link that carries `rate`, each told of `tail` after its end."""
    at = w._at_ns / 1e9
    old: Flow | None = None
    while at < until_s:
        flow = Flow(bits)
        w.opened(flow, at)
        if old is not None:
            w.closed(old, at + tail, arrived=True)
        old, at = flow, at + bits / rate
    if old is not None:
        w.closed(old, at, arrived=True)
    w.advance(round(until_s) * 1_000_000_000)


def test_a_slow_link_is_found_and_so_is_its_recovery() -> None:
    """20 of 100 for two minutes of back-to-back transfers, then full speed."""
    w = watch()
    transfers(w, 20.0, 40.0, 120.0, 0.0)
    observed = w.meter.reading(120_000_000_000)
    assert observed["observed_capacity_bps"] == pytest.approx(20.0, rel=0.1)
    assert observed["utilisation_30s"] == pytest.approx(0.2, rel=0.1)
    transfers(w, 100.0, 40.0, 180.0, 0.0)
    assert w.meter.observed_bps == pytest.approx(100.0, rel=0.1)


def test_the_tail_after_a_transfer_is_not_the_links() -> None:
    w = watch(tail=0.1)
    backlog(w, 20.0, 40.0, 120.0, 0.1)
    assert w.meter.observed_bps == pytest.approx(20.0, rel=0.15)


def test_parallel_transfers_share_the_busy_time() -> None:
    """Four at a time over a link of 20: each takes four times as long; the sum of their times is not the busy time."""
    w = watch()
    at = 0.0
    for _ in range(30):
        flows = [Flow(20.0) for _ in range(4)]
        for flow in flows:
            w.opened(flow, at)
        at += 4.0
        for flow in flows:
            w.closed(flow, at, arrived=True)
    assert w.meter.observed_bps == pytest.approx(20.0, rel=0.1)
    assert w.rate_bps == pytest.approx(20.0, rel=0.1)


def test_a_dead_link_is_seen_without_any_arrival() -> None:
    w = watch()
    transfers(w, 100.0, 50.0, 10.0, 0.5)
    w.opened(Flow(200.0), 10.0)
    w.advance(60_000_000_000)
    assert w.meter.observed_bps <= 2.0


def test_a_full_decode_worker_says_nothing_about_the_link() -> None:
    w = watch(slot=False)
    for k in range(20):
        flow = Flow(10.0)
        w.opened(flow, k * 10.0)
        w.closed(flow, k * 10.0 + 9.5, arrived=True)  # 0.1 s of transfer, the rest is a wait for a slot
    assert w.meter.observed_bps == 100.0
    assert w.rate_bps == 100.0


def test_light_traffic_is_no_evidence() -> None:
    w = watch()
    transfers(w, 100.0, 30.0, 60.0, 2.0)
    assert w.meter.observed_bps == 100.0
    assert w.meter.reading(60_000_000_000)["observed_valid"] == 0.0


def test_a_flow_limit_is_not_the_links() -> None:
    """One connection gets 10 of 100: the link is not what is slow."""
    w = watch(limit=10.0)
    transfers(w, 10.0, 40.0, 60.0, 0.0)
    assert w.meter.observed_bps == 100.0


@given(
    st.lists(st.tuples(st.sampled_from("oacx"), st.integers(0, 4), st.floats(0.0, 8.0)), max_size=50),
    st.sampled_from([math.inf, 30.0]),
)
def test_no_more_is_delivered_than_was_routed_nor_than_the_link_carries(
    steps: list[tuple[str, int, float]], limit: float
) -> None:
    w, now, flows, routed = watch(limit=limit, tail=0.02), 0.0, [], 0.0
    for what, which, wait in steps:
        now += wait
        if what == "o":
            flows.append(Flow(60.0 * (which + 1)))
            routed += flows[-1].bits
            w.opened(flows[-1], now)
        elif what == "a":
            w.advance(int(now * 1e9))
        elif flows:
            w.closed(flows.pop(which % len(flows)), now, arrived=what == "c")
        assert 0.0 < w.rate_bps <= 100.0
        assert 1.0 <= w.meter.observed_bps <= 100.0
        assert w.unsent_bits(now) >= 0.0
    for flow in flows:
        w.closed(flow, now, arrived=True)
    w.advance(int((now + 100.0) * 1e9))
    rows = w.meter.table.reshape(-1, 2)[:, 0]
    assert rows.sum() <= routed + 1.0
    assert rows.max(initial=0.0) <= 100.0 + 1e-6
    if not any(what == "x" for what, *_ in steps) and now < 20.0:
        assert rows.sum() == pytest.approx(routed, abs=1.0), "what arrived was delivered"


# ------------------------------------------------------------------------------------------------ pages


def worker(name: str = "d1") -> Worker:
    config = RouterConfig.model_validate({"backend": "vllm_nixl", "workers": WORKERS})
    found = Worker(next(w for w in config.workers if w.name == name), config, "config")
    found.came_up(T0)
    return found


def test_a_page_that_stands_still_while_requests_end_is_as_old_as_its_figures() -> None:
    pages, w = LoadPages(), worker()
    assert pages.at_s(w) == T0, "not read yet: as old as the worker's service"
    counters = {"vllm:prompt_tokens_by_source_total{local_compute}": 5.0}
    w.load = Load(1.0, 0.0, 0.1, T0 + 1.0, 0, 0.0, counters)
    assert pages.at_s(w) == T0 + 1.0
    w.load = Load(1.0, 0.0, 0.1, T0 + 2.0, 0, 0.0, counters)
    assert pages.at_s(w) == T0 + 2.0, "nothing was done there: it need not change"
    for _ in range(5):
        w.end(w.begin(T0 + 2.0), T0 + 2.5)
    w.load = Load(1.0, 0.0, 0.1, T0 + 300.0, 0, 0.0, counters)
    assert pages.at_s(w) == T0 + 1.0
    w.load = Load(1.0, 0.0, 0.1, T0 + 301.0, 0, 0.0, {k: v + 1 for k, v in counters.items()})
    assert pages.at_s(w) == T0 + 301.0


def test_gauges_alone_may_stand_still() -> None:
    pages, w = LoadPages(), worker()
    for at in (1.0, 2.0):
        for _ in range(9):
            w.end(w.begin(T0), T0)
        w.load = Load(0.0, 0.0, None, T0 + at, 0, 0.0, {"num_running_reqs": 0.0})
        assert pages.at_s(w) == T0 + at


def test_real_sizes_correct_predicted_ones() -> None:
    """The engine moved half of what was predicted; a new engine begins again at 0."""
    w, size = worker(), SizeFactor()

    def page(n_bytes: float, told_bits: float) -> None:
        w.load = Load(0, 0, None, T0, 0, told_bits, {"vllm:nixl_bytes_transferred_sum": n_bytes})
        size.read([w])

    page(7e9, 0.0)
    assert size.value == 1.0
    page(7e9 + 1e9, 16e9)
    assert size.value == pytest.approx(0.5)
    page(0.1e9, 20e9)
    page(1.1e9, 28e9)
    assert size.value == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------ a real router


def live_of(router: Router) -> LiveTelemetry:
    return LiveTelemetry(
        router.forwarder, router.forwarder.fleet.changes, RouterClock(time.monotonic(), 0.05), 0.5
    )


def test_requests_through_a_router_arrive_in_the_reading() -> None:
    async def work() -> None:
        async with serving(time_scale=0.05, spec={"time_scale": 0.05}) as s:
            live = live_of(s.router)
            replies = [await s.complete(LONG, 4), await s.complete(SHORT, 4), await s.complete(LONG, 4)]
            assert [r.status for r in replies] == [200] * 3
            await until(lambda: live.clock.ns(time.monotonic()) > 3e9, "whole seconds have passed")
            t = live.read(time.monotonic())
            pd = t.pd[0]
            assert pd.arrival_rate_120s_rps * t.time_s == pytest.approx(3, rel=0.4)
            assert (pd.lengths_valid, pd.output_valid, pd.output_tokens_mean) == (1, 1, 4)
            assert t.recent_lengths_tokens[0].tolist() == live.new_lengths
            assert len(live.new_lengths) == 3
            assert t.link[0].utilisation_5s >= 0.0
            assert (pd.decode_sequences, pd.prefill_busy_instances, t.link[0].open_flows) == (0, 0, 0)
            assert live.links["prfaas0"].unsent_bits(time.monotonic()) == 0.0
            await s.settled()

    run(work)


@pytest.mark.parametrize("fault", ["no_load", "nan", "500"])
def test_bad_pages_age_and_never_reach_the_reading(fault: str) -> None:
    async def work() -> None:
        async with serving() as s:
            live = live_of(s.router)
            await until(lambda: live.stale_s(time.monotonic()) < 0.4, "pages are read")
            fake = s.workers["d1"]
            if fault == "no_load":
                fake._metrics = lambda: ""  # type: ignore[method-assign]
            elif fault == "nan":
                fake._metrics = lambda: (  # type: ignore[method-assign]
                    "vllm:num_requests_running NaN\nvllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc NaN\n"
                )
            else:
                fake._metrics = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
            await until(lambda: live.stale_workers(time.monotonic()) == ["d1"], "the figures get old")
            assert (await s.complete(SHORT)).status == 200
            t = live.read(time.monotonic())
            assert np.isfinite(t.values).all()
            assert np.isfinite(t.encode()).all()

    run(work)


@given(
    st.dictionaries(
        st.sampled_from(["running", "waiting", "use", "deferred"]),
        st.one_of(st.floats(), st.integers(-(10**18), 10**18)),
    ),
    st.floats(0.0, 1e3),
    st.sampled_from([ClusterDecision(margin_s=-math.inf), ClusterDecision(threshold_tokens=math.inf)]),
)
def test_whatever_a_page_says_the_reading_is_finite(
    said: dict[str, float], at: float, decision: ClusterDecision
) -> None:
    def act(forwarder: Forwarder, live: LiveTelemetry) -> None:
        from prfaas_serving.backends.engines import Unreadable, read_load

        names = {
            "running": "num_requests_running",
            "waiting": "num_requests_waiting",
            "use": "kv_cache_usage_perc",
            "deferred": 'num_requests_waiting_by_reason{reason="deferred"}',
        }
        page = "\n".join(f"vllm:{names[k]} {v}" for k, v in said.items()).encode()
        forwarder.holder.set(decision, "admin", "test")
        try:
            running, waiting, use, fields = read_load("vllm", page)
        except Unreadable:
            return
        for w in forwarder.fleet:
            w.load = Load(running, waiting, use, T0 + at, 0, 0.0, fields)
            w.begin(T0 + at, tokens=5)

    t = reading(act, at)
    assert np.isfinite(t.values).all()
    assert (t.encode() >= 0).all()
    assert (t.encode() <= 1).all()
