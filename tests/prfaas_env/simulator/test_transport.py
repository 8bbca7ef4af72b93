"""Transport beyond capacity: connections, loss, set-up, jitter, and what outages and other traffic leave; by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import load_scenario
from prfaas_env.scenarios.models import Link
from prfaas_env.simulator.faults import draw_jitter_ns
from prfaas_env.simulator.formulas import connection_rate_bps, jitter_ns, retransmitted_share
from prfaas_env.simulator.world import draw_world, read_capacity_file

S, MS = 1_000_000_000, 1_000_000
ALWAYS = 0.0

# 1,000 tokens: 1 s of remote prefill, 8e6 bits, 1 s alone on the default 8e6 bit/s (see conftest).


def transfer_ends(engine):
    return engine.records.transfer_end_ns.tolist()


# ---------------------------------------------------------------------------------------------- formulas


def test_window_over_round_trip():
    # 16 MiB in flight over 30 ms: 4.47 Gbps
    assert connection_rate_bps(0.030, 16 * 2**20, 1460, 0.0) == pytest.approx(4.4739e9, rel=1e-4)
    assert connection_rate_bps(0.0, 16 * 2**20, 1460, 0.0) == math.inf
    assert connection_rate_bps(0.030, math.inf, 1460, 0.0) == math.inf


def test_law_of_loss():
    # 1,460 bytes, 100 ms, loss 1e-4: 116.8 kbit/s x sqrt(1.5) / 0.01 = 14.3 Mbit/s
    assert connection_rate_bps(0.1, math.inf, 1460, 1e-4) == pytest.approx(116_800 * 1.224745 * 100, rel=1e-6)
    # the window is the limit where it is less
    assert connection_rate_bps(0.1, 12_500, 1460, 1e-4) == 1e6
    # four times the loss, half the rate
    assert connection_rate_bps(0.1, math.inf, 1460, 4e-4) == pytest.approx(
        connection_rate_bps(0.1, math.inf, 1460, 1e-4) / 2
    )


def test_bandwidth_delay_products_of_the_paper():
    """At 100 Gbps 16 MiB windows need 1, 8, 23, 60 connections at 1, 10, 30, 80 ms."""
    for rtt_s, connections in ((0.001, 1), (0.010, 8), (0.030, 23), (0.080, 60)):
        link = Link(capacity_bps=100e9, rtt_s=rtt_s, window_bytes=16 * 2**20, connections=connections)
        assert link.flow_limit_bps >= 100e9 * 0.99
        if connections > 1:
            fewer = link.model_copy(update={"connections": connections - 1})
            assert fewer.flow_limit_bps < 100e9


@given(st.floats(1e4, 1e10), st.floats(1e-4, 1.0), st.integers(500, 9000), st.floats(1e-6, 0.4))
@settings(max_examples=200, derandomize=True)
def test_a_share_of_retransmissions_is_the_loss_at_that_rate(rate_bps, rtt_s, segment_bytes, loss):
    share = retransmitted_share(rate_bps, rtt_s, segment_bytes, loss)
    assert loss <= share <= 1.0
    if loss < share < 1.0:
        # the law of loss, read backwards
        assert connection_rate_bps(rtt_s, math.inf, segment_bytes, share) == pytest.approx(rate_bps)


# ------------------------------------------------------------------------------------------ through the world


def test_a_window_holds_a_flow_below_the_link(tiny):
    # 12,500 B / 25 ms = 4e6 bit/s on a link of 8e6: 2 s
    link = {"rtt_s": 0.025, "window_bytes": 12_500}
    engine = tiny.run(tiny.scenario(link=link), [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [3 * S]
    # two connections fill it
    engine = tiny.run(tiny.scenario(link={**link, "connections": 2}), [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [2 * S]


def test_rtt_alone_delays_nothing_and_latency_gives_the_default_rtt(tiny):
    engine = tiny.run(tiny.scenario(link={"rtt_s": 0.5}), [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [2 * S]
    # latency 12.5 ms: round trip 25 ms, so the window of above gives 4e6 bit/s
    scenario = tiny.scenario(link={"latency_s": 0.0125, "window_bytes": 12_500})
    assert transfer_ends(tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)) == [3 * S + 12_500_000]


def test_connections_are_set_up_after_idle(tiny):
    # prefills end at 1, 3 and 20 s; 0.5 s of set-up after 5 s without a flow, and at the start
    scenario = tiny.scenario(link={"setup_s": 0.5, "idle_s": 5.0})
    requests = [(0, 1000, 1), (2, 1000, 1), (19, 1000, 1)]
    engine = tiny.run(scenario, requests, threshold=ALWAYS)
    # 1 + 0.5 + 1; then the link has been idle from 2.5 to 3 s only; then from 4 to 20 s
    assert transfer_ends(engine) == [2_500_000_000, 4 * S, 21_500_000_000]


def test_flows_that_are_ready_meanwhile_wait_for_the_same_connections(tiny):
    # A is ready at 1.0, B at 1.25; connections stand at 1.5; both share 8e6: 2 x 8e6 bits take 2 s
    scenario = tiny.scenario(prfaas={"n_instances": 2}, link={"setup_s": 0.5, "idle_s": 5.0})
    engine = tiny.run(scenario, [(0, 1000, 1), (0.25, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [3_500_000_000] * 2


def test_a_pipelined_flow_that_fell_behind_catches_up(tiny):
    # 4 layers: ready at 0.25 s, connections at 0.75 s; S/T = 8e6 bit/s until 1 s: 2e6 sent; the rest at 16e6: 0.375 s
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 16e6, "setup_s": 0.5})
    engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [1_375_000_000]


def test_connections_that_stand_after_the_prefill(tiny):
    # ready at 0.25 s, connections at 2.25 s, prefill over at 1 s: the whole cache at 16e6 takes 0.5 s
    scenario = tiny.scenario(kv={"n_layers": 4}, link={"capacity_bps": 16e6, "setup_s": 2.0})
    engine = tiny.run(scenario, [(0, 1000, 1)], threshold=ALWAYS)
    assert transfer_ends(engine) == [2_750_000_000]


def test_jitter_is_added_to_each_cache(tiny):
    # mean 0.1 s times the luck of the request; local caches do not pay it
    scenario = tiny.scenario(link={"jitter_s": 0.1, "latency_s": 0.2})
    engine = tiny.run(scenario, [(0, 1000, 1), (5, 1000, 1)], threshold=ALWAYS, luck=[0.5, 3.0])
    assert transfer_ends(engine) == [2_250_000_000, 7_500_000_000]
    local = tiny.run(scenario, [(0, 1000, 1)], threshold=math.inf, luck=[3.0])
    assert transfer_ends(local) == [2_001_000_000]
    assert jitter_ns(0.1, 3 * S) == 300_000_000


def test_luck_is_drawn_by_request(hand):
    scenario = hand.scenario(link={"jitter_s": 0.1})
    short, long = (draw_jitter_ns(scenario, n, 7) for n in (100, 10_000))
    assert np.array_equal(short, long[:100])
    assert long.mean() / S == pytest.approx(1.0, rel=0.05)
    assert draw_jitter_ns(hand.scenario(), 100, 7) is None


# ----------------------------------------------------------------------------------------------- congestion


def reading(engine):
    return engine.telemetry().link[0]


def test_what_a_router_sees_of_congestion(tiny):
    """Two flows on half the capacity they could use: backlog, utilisation, and retransmissions by the law of loss."""
    scenario = tiny.scenario(prfaas={"n_instances": 2}, link={"rtt_s": 0.02, "connections": 2, "loss": 0.01})
    engine = tiny.run(scenario, [(0, 1000, 1)] * 2, threshold=ALWAYS, until=2.0)
    link = reading(engine)
    # 16e6 bits, 8e6 sent by 2 s
    assert link.backlog_bytes == 1e6
    assert link.backlog_s == pytest.approx(1.0, rel=1e-6)
    assert link.open_flows == 2
    # each of four connections has 2e6 bit/s: ((1,460 x 8 / 0.02) x sqrt(1.5) / 2e6)^2 = 0.1279
    assert link.retransmission_share == pytest.approx(0.127896, rel=1e-4)
    # alone and not held back, only the loss of the way is left; without a flow there is nothing to see
    capped = tiny.scenario(link={"rtt_s": 0.02, "loss": 0.01, "flow_cap_bps": 1e5})
    assert reading(tiny.run(capped, [(0, 1000, 1)], threshold=ALWAYS, until=2.0)).retransmission_share == 0.01
    assert reading(tiny.run(capped, [], threshold=ALWAYS, until=2.0)).retransmission_share == 0.0


# ------------------------------------------------------------------------- what the link has for KV caches


def paper_with(**changes):
    paper = load_scenario("paper")
    return paper.replace(**changes)


def test_outages_cut_a_capacity_that_changes():
    scenario = paper_with(
        link_capacity={"kind": "steps", "at_s": [100.0], "capacity_bps": [40e9]},
        faults={
            "link_outages": [
                {"at_s": 50.0, "duration_s": 100.0, "share": 0.5},
                {"at_s": 90.0, "duration_s": 20.0},
            ]
        },
    )
    trace = draw_world(scenario, 0).links[0]
    assert (trace.time_ns / S).tolist() == [0, 50, 90, 110, 150]
    assert trace.capacity_bps.tolist() == [100e9, 50e9, 0, 20e9, 40e9]


def test_other_traffic_takes_its_part():
    chain = {"values": [30e9, 120e9], "probabilities": [0.5, 0.5], "mean_holding_s": 60.0}
    trace = draw_world(paper_with(transport={"background_bps": chain}), 3).links[0]
    assert set(trace.capacity_bps.tolist()) == {70e9, 0.0}
    # the same with another seed is another path; with the same seed the same one
    again, other = (draw_world(paper_with(transport={"background_bps": chain}), s).links[0] for s in (3, 4))
    assert np.array_equal(trace.time_ns, again.time_ns)
    assert not np.array_equal(trace.time_ns[:50], other.time_ns[:50])


def test_random_outages_leave_the_rest_as_it_was():
    law = {"mtbf_s": 600.0, "mttr_s": 30.0}
    scenario = load_scenario("drift")
    plain = draw_world(scenario, 5)
    faulty = draw_world(scenario.replace(faults={"random_outages": law}), 5)
    assert np.array_equal(plain.requests.arrival_ns, faulty.requests.arrival_ns)
    times, values = faulty.links[0].time_ns, faulty.links[0].capacity_bps
    assert (values == 0).any()
    before = plain.links[0]
    held = before.capacity_bps[np.searchsorted(before.time_ns, times, side="right") - 1]
    assert ((values == 0) | (values == held)).all()


def test_recorded_capacity(tmp_path):
    file = tmp_path / "capacity.csv"
    file.write_text("time_s,note,capacity_bps\n10,a,5e9\n20,b,0\n", encoding="utf-8")
    scenario = paper_with(link_capacity={"kind": "trace", "file": str(file), "speed": 2.0})
    trace = draw_world(scenario, 0).links[0]
    assert (trace.time_ns / S).tolist() == [0, 5, 10]
    assert trace.capacity_bps.tolist() == [100e9, 5e9, 0]
    first = scenario.hash
    file.write_text("time_s,capacity_bps\n10,5e9\n20,1\n", encoding="utf-8")
    assert scenario.hash != first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: the columns must be time_s, capacity_bps"),
        ("time_s,bps\n1,2\n", "line 1: the columns must be time_s, capacity_bps"),
        ("time_s,capacity_bps\n", "no rows"),
        ("time_s,capacity_bps\n1,2\nx,3\n", "line 3: needs two numbers"),
        ("time_s,capacity_bps\n1\n", "line 2: needs two numbers"),
        ("time_s,capacity_bps\n5,2\n5,3\n", "line 3: time_s must rise"),
        ("time_s,capacity_bps\n5,-2\n", "line 2: capacity_bps must be within"),
        ("time_s,capacity_bps\n5,nan\n", "line 2: capacity_bps must be within"),
    ],
)
def test_a_bad_capacity_file_names_its_line(tmp_path, text, words):
    file = tmp_path / "capacity.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(PrfaasError, match=words):
        read_capacity_file(str(file))
    with pytest.raises(PrfaasError, match="cannot be read"):
        read_capacity_file(str(tmp_path / "none.csv"))


def test_settings_that_could_not_act_are_refused():
    for field in ({"window_bytes": 1000}, {"loss": 0.01}):
        with pytest.raises(ValueError, match="set rtt_s or latency_s"):
            Link(capacity_bps=1e9, **field)
        assert Link(capacity_bps=1e9, latency_s=0.001, **field).round_trip_s == 0.002
