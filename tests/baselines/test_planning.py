"""What a planner reads from telemetry, checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prfaas_baselines.planning import Planner, PlanningParameters, prefill_limit_rps
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.sites import sites_of

PAPER = load_scenario("paper")


def planner(scenario=PAPER, index=0, **parameters) -> Planner:
    return Planner(scenario, sites_of(scenario)[index], PlanningParameters(**parameters))


def test_sites_share_prfaas_clusters_by_arrivals(three_sites) -> None:
    a, b, c = sites_of(three_sites)
    assert (a.links, [r.j for r in a.routes]) == ((0, 1), [0, 1])
    # weights 2 and 1 at east, alone at west
    assert [r.share for r in a.routes] == pytest.approx([2 / 3, 1.0])
    assert (b.links, [r.j for r in b.routes]) == ((2,), [0])
    assert [r.share for r in b.routes] == pytest.approx([1 / 3])
    assert c.routes == ()


def test_planned_reading_adds_up_links_and_shares(three_sites) -> None:
    readings = [planner(three_sites, i).planned() for i in range(3)]
    assert [r.n_prfaas for r in readings] == pytest.approx([4 * 2 / 3 + 2, 4 / 3, 0.0])
    assert [r.link_bps for r in readings] == [50e9, 20e9, 0.0]
    assert [r.n_local for r in readings] == [8, 6, 8]


def test_reading_of_the_present(three_sites, make_telemetry) -> None:
    telemetry = make_telemetry(
        three_sites,
        pd=[
            {
                "prefill_instances": 2,
                "decode_instances": 5,
                "converting_instances": 1,
                "arrival_rate_30s_rps": 2.0,
                "arrival_rate_120s_rps": 1.0,
                "prefill_queue_requests": 6,
                "decode_queue_requests": 15,
            },
            {},
            {},
        ],
        prfaas=[{"prefill_instances": 3, "prefill_queue_requests": 9}, {}],
        link=[{"observed_capacity_bps": 5e9, "utilisation_5s": 0.1}, {"utilisation_5s": 0.5}, {}],
    )
    p = planner(three_sites, backlog_clear_s=60.0)
    reading = p.read(telemetry)
    assert (reading.n_prefill, reading.n_decode, reading.n_converting, reading.n_local) == (2, 5, 1, 8)
    assert reading.n_prfaas == pytest.approx(3 * 2 / 3 + 2)
    assert reading.link_bps == 15e9
    # 2 req/s and (6 + 9 * 2/3) requests to clear in 60 s.
    assert reading.prefill_demand_rps == pytest.approx(2.0 + 12 / 60)
    assert reading.decode_backlog_rps == pytest.approx(15 / 60)
    # 0.1 * 40 + 0.5 * 10 Gbps sent, of 15 observed and of 50 nominal.
    assert p.link_utilisation(telemetry) == pytest.approx(9 / 15)
    nominal = planner(three_sites, link_basis="nominal", rate_window_s=120, backlog_clear_s=60.0)
    assert nominal.link_utilisation(telemetry) == pytest.approx(9 / 50)
    assert nominal.read(telemetry).link_bps == 50e9
    assert nominal.read(telemetry).prefill_demand_rps == pytest.approx(1.0 + 12 / 60)


def test_utilisation_without_links_is_zero(make_telemetry) -> None:
    scenario = load_scenario("homogeneous")
    p = planner(scenario)
    assert p.link_utilisation(make_telemetry(scenario)) == 0.0
    assert p.threshold(p.read(make_telemetry(scenario))) == math.inf


def test_output_mean_is_the_last_valid_one(make_telemetry) -> None:
    p = planner()
    assert p.planned().output_tokens_mean == 1024
    p.remember(make_telemetry(PAPER, pd={"output_valid": 1.0, "output_tokens_mean": 400.0}))
    p.remember(make_telemetry(PAPER, pd={"output_valid": 0.0, "output_tokens_mean": 0.0}))
    assert p.read(make_telemetry(PAPER)).output_tokens_mean == 400.0


def test_recent_lengths_replace_the_planned_law(make_telemetry) -> None:
    p = planner(min_lengths=3)
    few = p.read(make_telemetry(PAPER, lengths=[[10, 20]]))
    assert few.lengths.mean == pytest.approx(27_486, abs=1)
    enough = p.read(make_telemetry(PAPER, lengths=[[10, 20, 30]]))
    assert enough.lengths.mean == pytest.approx(20.0)


def test_the_best_split_of_the_paper(make_telemetry) -> None:
    p = planner(means="representative")
    reading = p.read(make_telemetry(PAPER))
    best = p.best(reading)
    assert best is not None
    assert (best.n_prefill, best.n_decode, best.threshold_tokens) == (3, 5, 19_400)
    assert best.lambda_max_rps == pytest.approx(3.25, abs=0.01)
    assert p.threshold(reading) == 19_400


def test_loads_against_the_published_stages(make_telemetry) -> None:
    """Prefill takes 3.25 req/s and decode 3.906 (table 6): loads follow by division."""
    p = planner(means="representative", backlog_clear_s=60.0)
    fields = {"arrival_rate_30s_rps": 2.6, "decode_queue_requests": 60}
    reading = p.read(make_telemetry(PAPER, pd=fields))
    point = p.point(reading, 3)
    assert prefill_limit_rps(point) == pytest.approx(3.25, abs=0.01)
    assert reading.prefill_load(point) == pytest.approx(2.6 / 3.25, abs=0.01)
    assert reading.decode_load(point) == pytest.approx((2.6 + 1.0) / 3.906, abs=0.01)
    # What prefill cannot let through does not load decode.
    flood = p.read(make_telemetry(PAPER, pd={"arrival_rate_30s_rps": 50.0}))
    assert flood.decode_load(p.point(flood, 3)) == pytest.approx(3.25 / 3.906, abs=0.01)


def test_a_given_threshold_is_not_searched(make_telemetry) -> None:
    p = planner(means="representative")
    point = p.point_at(p.read(make_telemetry(PAPER)), 3, 10_000.0)
    assert point.threshold_tokens == 10_000
    assert point.lambda_max_rps == pytest.approx(2.71, abs=0.01)


def test_splits_keep_the_floors(make_telemetry) -> None:
    p = planner()
    assert p.splits(p.read(make_telemetry(PAPER))) == tuple(range(1, 8))
    lost = {"prefill_instances": 0, "decode_instances": 1}
    assert p.splits(p.read(make_telemetry(PAPER, pd=lost))) == ()
    assert p.best(p.read(make_telemetry(PAPER, pd=lost))) is None


def test_no_local_prefill_means_everything_remote(make_telemetry) -> None:
    naive = load_scenario("naive")
    p = planner(naive, means="representative")
    reading = p.read(make_telemetry(naive))
    assert p.threshold(reading) == 0.0
    point = p.point(reading, 0)
    assert (point.offload_share, point.n_prefill) == (1.0, 0)
    assert point.lambda_max_rps == pytest.approx(2.45, abs=0.01)  # table 6
    best = p.best(reading)
    assert best is not None
    assert best.n_prefill == 3  # the same hardware as `paper`


def test_threshold_while_no_decode_instance_is_active(make_telemetry) -> None:
    p = planner(means="representative")
    fields = {"decode_instances": 0, "converting_instances": 5}
    assert p.threshold(p.read(make_telemetry(PAPER, pd=fields))) == 19_400


def test_idle_first_token_takes_the_faster_path(make_telemetry) -> None:
    p = planner()
    tokens = 27_486
    times = p.idle_ttft_s(p.read(make_telemetry(PAPER, lengths=[[tokens, 1_024]])))
    bits = 8 * (182_378_824 + 17_280 * tokens)
    # Remote: H200 prefill of table 5, the last of 57 layers on a 100 Gbps link, one 25 ms step.
    assert times[0] == pytest.approx(1.633 + bits / 57 / 100e9 + 0.025, abs=1e-9)
    assert times[1] < 0.44 + 0.03

    homogeneous = load_scenario("homogeneous")
    p = planner(homogeneous)
    (alone,) = p.idle_ttft_s(p.read(make_telemetry(homogeneous, lengths=[[tokens]])))
    h20_s = 0.46907 + 1.30039e-4 * tokens + 2.9403e-10 * tokens**2
    assert alone == pytest.approx(h20_s + bits / 800e9 + 0.025, abs=1e-9)


def test_no_recent_prompts_give_no_idle_times(make_telemetry) -> None:
    p = planner()
    assert p.idle_ttft_s(p.read(make_telemetry(PAPER))) == []
    assert p.idle_step_s(p.read(make_telemetry(PAPER))) == pytest.approx(0.025)


def test_a_dead_link_leaves_a_usable_threshold(make_telemetry) -> None:
    p = planner()
    telemetry = make_telemetry(PAPER, link={"observed_capacity_bps": 0.0})
    assert np.isfinite(p.best(p.read(telemetry)).lambda_max_rps)
    assert p.threshold(p.read(telemetry)) == 131_072
