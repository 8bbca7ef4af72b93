"""Figures of an episode from records and totals written by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from prfaas_env.simulator.metrics import episode_metrics
from prfaas_env.simulator.records import RequestRecords, Route, Status, Totals

S = 1_000_000_000

# Arrival (s), output tokens; then prefill start and end, transfer end, join, first token, finish (s; None = not yet),
# route and status. Measured from 10 s to 100 s.
ROWS = [
    # before the window; finishes in it
    (5, 10, 5, 6, 7, 8, 9, 12, Route.LOCAL, Status.FINISHED),
    # at its start: TTFT 2, ten gaps of 0.1 s
    (10, 11, 10.5, 11.5, 11.6, 11.7, 12, 13, Route.REMOTE, Status.FINISHED),
    # TTFT 4, ten gaps of 0.11 s
    (20, 11, 20, 22, 23, 23.5, 24, 25.1, Route.LOCAL, Status.FINISHED),
    # open, first token not yet: 70 s old at the end
    (30, 11, 31, None, None, None, None, None, Route.REMOTE, Status.OPEN),
    # open, first token after 6 s
    (40, 11, 41, 44, 45, 45.5, 46, None, Route.LOCAL, Status.OPEN),
    (50, 11, None, None, None, None, None, None, Route.NONE, Status.REJECTED),
    # one token: TTFT 8, no TPOT
    (60, 1, 63, 67, 67.2, 67.4, 68, 68, Route.LOCAL, Status.FINISHED),
    # aborted before its first token, at 90 s: 20 s old
    (70, 11, 71, 75, None, None, None, None, Route.LOCAL, Status.ABORTED),
    # at the end: what lies there has not been handled
    (100, 11, None, None, None, None, None, None, Route.NONE, Status.PENDING),
]
STAMPS = (
    "prefill_start_ns",
    "prefill_end_ns",
    "transfer_end_ns",
    "decode_join_ns",
    "first_token_ns",
    "finish_ns",
)
ZERO = {
    "time_ns": 0,
    "arrived": 0,
    "finished": 0,
    "rejected": 0,
    "aborted": 0,
    "remote": 0,
    "conversions": 0,
    "invalid_moves": 0,
    "waiting_ns": 0,
    "remote_busy_ns": 0,
    "remote_instances_ns": 0,
    "prefill_busy_ns": 0,
    "prefill_instances_ns": 0,
    "decode_slots_used_ns": 0,
    "decode_slots_ns": 0,
    "first_tokens": 0,
    "good": 0,
    "egress_bits": (0.0,),
    "egress_peak_bps": (0.0,),
    "reject_reasons": (0, 0, 0),
}
START = dict(
    ZERO,
    time_ns=10 * S,
    conversions=1,
    invalid_moves=2,
    remote_busy_ns=5 * S,
    remote_instances_ns=10 * S,
    prefill_busy_ns=1 * S,
    prefill_instances_ns=10 * S,
    decode_slots_used_ns=0,
    decode_slots_ns=40 * S,
    egress_bits=(1e6,),
)
END = dict(
    ZERO,
    time_ns=100 * S,
    arrived=8,
    finished=4,
    rejected=1,
    aborted=1,
    remote=2,
    conversions=4,
    invalid_moves=3,
    remote_busy_ns=(5 + 45) * S,
    remote_instances_ns=100 * S,
    prefill_busy_ns=(1 + 89) * S,
    prefill_instances_ns=100 * S,
    decode_slots_used_ns=36 * S,
    decode_slots_ns=400 * S,
    egress_bits=(1e6 + 360e6,),
    egress_peak_bps=(7e6,),
    reject_reasons=(0, 0, 1),
)


def records_of(rows):
    records = RequestRecords.empty(len(rows))
    for k, row in enumerate(rows):
        for name, at_s in zip(STAMPS, row[2:8], strict=True):
            if at_s is not None:
                getattr(records, name)[k] = round(at_s * S)
        records.route[k], records.status[k] = row[8], row[9]
        if row[3] is not None:
            records.service_ns[k] = round((row[3] - row[2]) * S)
    aborted = [k for k, row in enumerate(rows) if row[9] is Status.ABORTED]
    records.abort_ns[aborted] = 90 * S
    return records


@pytest.fixture(scope="module")
def world(hand):
    scenario = hand.scenario(
        measure={"warmup_s": 10.0, "horizon_s": 100.0}, slo={"ttft_s": 5.0, "tpot_s": 0.1}
    )
    return hand.world(scenario, [(row[0], 1000, row[1]) for row in ROWS])


@pytest.fixture(scope="module")
def figures(world):
    return episode_metrics(world, records_of(ROWS), Totals(**START), Totals(**END))


def test_requests_of_the_whole_run(figures):
    assert figures["requests"] == {
        "arrived": 8,
        "finished": 4,
        "open": 2,
        "rejected": 1,
        "aborted": 1,
        "remote": 2,
    }
    assert figures["rejected_by_reason"] == {"over_limit": 0, "kv_capacity": 0, "queue_full": 1}


def test_cohort_is_the_accepted_arrivals_of_the_window(figures):
    # those of 10, 20, 30, 40, 60 and 70 s
    assert figures["cohort"] == 6
    assert figures["window_s"] == 90.0
    assert figures["warmup_s"] == 10.0


def test_ttft_with_open_requests_at_their_age(figures):
    # 2, 4, 6, 8, 20 (aborted), 70
    assert figures["ttft_s"] == {
        "mean": pytest.approx(110 / 6),
        "p50": 7.0,
        "p90": pytest.approx(20 + 0.5 * 50),
        "p95": pytest.approx(20 + 0.75 * 50),
        "p99": pytest.approx(20 + 0.95 * 50),
    }


def test_ttft_with_open_requests_at_infinity(figures):
    assert figures["ttft_open_inf_s"] == {"mean": None, "p50": 8.0, "p90": None, "p95": None, "p99": None}
    assert any("open requests move the quantiles" in line for line in figures["warnings"])


def test_service_ttft_and_the_stages(figures):
    # of the requests with a first token: 10, 20, 40, 60 s; prefill 1, 2, 3, 4 s
    assert figures["service_ttft_s"] == {"mean": 2.5, "p90": pytest.approx(3.7)}
    assert figures["prefill_s"] == 2.5
    assert figures["queue_wait_s"] == pytest.approx((0.5 + 0 + 1 + 3) / 4)
    assert figures["transfer_s"] == pytest.approx((0.1 + 1 + 1 + 0.2) / 4)
    assert figures["decode_wait_s"] == pytest.approx((0.1 + 0.5 + 0.5 + 0.2) / 4)
    assert figures["first_step_s"] == pytest.approx((0.3 + 0.5 + 0.5 + 0.6) / 4)
    # the stages add up to the TTFT of those requests
    stages = ("queue_wait_s", "prefill_s", "transfer_s", "decode_wait_s", "first_step_s")
    assert sum(figures[s] for s in stages) == pytest.approx((2 + 4 + 6 + 8) / 4)


def test_tpot_throughput_and_goodput(figures):
    assert figures["tpot_s"]["mean"] == pytest.approx(0.105)
    assert figures["tpot_s"]["p50"] == pytest.approx(0.105)
    # finished in the window, the one that arrived before it too
    assert figures["throughput_rps"] == pytest.approx(4 / 90)
    # TTFT 2 <= 5 and TPOT 0.1 <= 0.1: one request; 0.11 is too slow, 8 s too late
    assert figures["goodput_rps"] == pytest.approx(1 / 90)
    assert figures["offload_share"] == pytest.approx(2 / 6)


def test_egress_utilisation_and_moves_of_the_window(figures):
    assert figures["egress"] == {"bits": 360e6, "mean_bps": pytest.approx(4e6), "peak_bps": 7e6}
    assert figures["utilisation"] == {
        "prfaas": pytest.approx(0.5),
        "prefill": pytest.approx(89 / 90),
        "decode": pytest.approx(0.1),
        "link": pytest.approx(0.5),
    }
    assert "prefill saturated" in figures["warnings"]
    assert "decode saturated" not in figures["warnings"]
    assert (figures["conversions"], figures["invalid_moves"]) == (3, 1)
    assert figures["notes"] == []


def test_a_run_in_which_everything_finished_is_not_flagged(world):
    rows = [row for row in ROWS if row[9] is Status.FINISHED]
    table = world.requests.take(np.array([0, 1, 2, 6]))
    done = dataclasses.replace(world, requests=table, pd_of=world.pd_of[:4])
    figures = episode_metrics(done, records_of(rows), Totals(**START), Totals(**END))
    # 2, 4, 8
    assert figures["ttft_s"] == figures["ttft_open_inf_s"]
    assert figures["ttft_s"]["p90"] == pytest.approx(4 + 0.8 * 4)
    assert not any("open" in line for line in figures["warnings"])


def test_nothing_measured_gives_no_figures_and_says_so(world):
    """A run that is drained before the warm-up is over has an empty window: no rate comes out of it."""
    end = Totals(**{**START, "arrived": 1, "finished": 1})
    records = records_of([(row if k == 0 else ROWS[8]) for k, row in enumerate(ROWS)])
    records.finish_ns[0] = 10 * S
    figures = episode_metrics(world, records, end, end, horizon_reached=False)
    assert figures["cohort"] == 0
    assert figures["window_s"] == 0.0
    assert figures["throughput_rps"] == figures["goodput_rps"] == 0.0
    assert figures["egress"]["mean_bps"] == figures["utilisation"]["link"] == 0.0
    assert figures["ttft_s"]["mean"] is None
    assert figures["queue_wait_s"] is None
    assert any("nothing was measured" in line for line in figures["warnings"])


def test_figures_are_plain_json(figures):
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
