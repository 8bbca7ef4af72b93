"""The length x TTFT grid, on hand-made telemetry."""

from __future__ import annotations

import math

import pytest

from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.sites import sites_of

PAPER = load_scenario("paper")
SITE = sites_of(PAPER)[0]
TABLE = (
    "border_s=10,second_row_s=5,third_row_s=20,threshold_1_tokens=40000,threshold_2_tokens=30000,"
    "threshold_3_tokens=20000,threshold_4_tokens=10000"
)
LENGTHS = [[8_000, 12_000]]  # 10,000 on average


def started(spec, make_telemetry, scenario=PAPER):
    policy = make_policy(spec)
    policy.reset(PolicyContext(scenario, make_telemetry(scenario).schema, 0))
    return policy


def own_s(tokens: int = 10_000) -> float:
    """First-token time of a prompt alone on the local path: prefill, hand-over over RDMA, one decode step."""
    kv = 8.0 * PAPER.model.kv.transfer_bytes(tokens)
    return SITE.prefill.seconds(tokens) + kv / SITE.cluster.rdma_bps + SITE.cluster.rdma_latency_s + 0.025


@pytest.mark.parametrize(
    ("work_s", "threshold"), [(0.0, 40_000), (3 * 9.0, 30_000), (3 * 14.0, 20_000), (3 * 60.0, 10_000)]
)
def test_the_row_follows_the_local_queue(work_s, threshold, make_telemetry) -> None:
    """Three local nodes, all busy with 2 s left on average: the wait is 2 s and a third of the queued work."""
    policy = started(f"length_ttft_grid:{TABLE}", make_telemetry)
    pd = {"prefill_queue_work_s": work_s, "prefill_busy_instances": 3, "prefill_residual_s": 6.0}
    reading = make_telemetry(PAPER, pd=pd, lengths=LENGTHS)
    (cluster,) = policy.decide(reading).clusters
    assert cluster.threshold_tokens == threshold
    expected_s = 2.0 + work_s / 3 + own_s()
    assert policy.first_token_s(reading, SITE) == pytest.approx(expected_s, rel=1e-9)


def test_an_idle_node_means_no_wait(make_telemetry) -> None:
    policy = started("length_ttft_grid", make_telemetry)
    pd = {"prefill_busy_instances": 2, "prefill_residual_s": 50.0}
    assert policy.first_token_s(make_telemetry(PAPER, pd=pd, lengths=LENGTHS), SITE) == pytest.approx(own_s())


def test_ahead_is_local_minus_remote(make_telemetry) -> None:
    local = started("length_ttft_grid:basis=local", make_telemetry)
    ahead = started("length_ttft_grid:basis=ahead", make_telemetry)
    idle = make_telemetry(PAPER, lengths=LENGTHS)
    busy = make_telemetry(
        PAPER,
        lengths=LENGTHS,
        prfaas={"prefill_queue_work_s": 40.0, "prefill_busy_instances": 4, "prefill_residual_s": 8.0},
    )
    gain_s = ahead.first_token_s(idle, SITE)
    assert 0 < gain_s < local.first_token_s(idle, SITE)  # an H200 prefills sooner than an H20
    # Four remote nodes: 2 s left on average and 10 s of queued work each; the local side does not change.
    assert ahead.first_token_s(busy, SITE) == pytest.approx(gain_s - 12.0)


def test_a_full_link_counts(make_telemetry) -> None:
    ahead = started("length_ttft_grid:basis=ahead", make_telemetry)
    bits = 8.0 * PAPER.model.kv.transfer_bytes(10_000)
    link = {"backlog_bytes": 100e9, "observed_capacity_bps": 10e9}
    local = started("length_ttft_grid", make_telemetry)
    reading = make_telemetry(PAPER, lengths=LENGTHS, link=link)
    remote_s = (8 * 100e9 + bits) / 10e9 + SITE.routes[0].link.latency_s + 0.025
    expected_s = local.first_token_s(reading, SITE) - remote_s
    assert ahead.first_token_s(reading, SITE) == pytest.approx(expected_s)


def test_with_one_path_only(make_telemetry) -> None:
    naive, homogeneous = load_scenario("naive"), load_scenario("homogeneous")
    policy = started("length_ttft_grid", make_telemetry, naive)
    assert policy.first_token_s(make_telemetry(naive), sites_of(naive)[0]) == math.inf
    assert policy.decide(make_telemetry(naive)).clusters[0].threshold_tokens == 4_000
    policy = started("length_ttft_grid:basis=ahead", make_telemetry, homogeneous)
    assert policy.first_token_s(make_telemetry(homogeneous), sites_of(homogeneous)[0]) == -math.inf


def test_before_the_first_request_the_planned_mean_holds(make_telemetry) -> None:
    policy = started("length_ttft_grid", make_telemetry)
    planned = policy.first_token_s(make_telemetry(PAPER), SITE)
    mean = 27_000  # the paper's mean input length
    assert planned == pytest.approx(own_s(mean), rel=0.05)
