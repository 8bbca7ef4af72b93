"""Rows, outcomes and the processes they run in."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.policy import make_policy, policy_hash
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_trainings.episodes import (
    FIGURE_NAMES,
    TTFT_EDGES_S,
    EpisodeRunner,
    Job,
    Row,
    episode_runner,
    figures_of,
    is_trace,
    parse_row,
    run_job,
)

SHORT = load_scenario("paper", overrides=["measure.horizon_s=60"])


class Boom:
    """A policy that fails in a worker."""

    constant = False

    def reset(self, context: object) -> None:
        raise PrfaasError("policy boom: does not fit")

    def decide(self, telemetry: object) -> object:
        raise AssertionError("never asked")


@pytest.mark.parametrize(
    ("text", "policy", "deployment"),
    [
        ("never", "never", None),
        ("never@homogeneous", "never", "homogeneous"),
        ("static:threshold_tokens=8000@naive", "static:threshold_tokens=8000", "naive"),
        ("ppo:path=runs/a@b/policy.zip", "ppo:path=runs/a@b/policy.zip", None),
        ("ppo:path=runs/a@b/policy.zip@naive", "ppo:path=runs/a@b/policy.zip", "naive"),
    ],
)
def test_rows(text: str, policy: str, deployment: str | None) -> None:
    assert parse_row(text) == Row(text, policy, deployment)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("agent=ppo:path=runs/a/policy.zip", Row("agent", "ppo:path=runs/a/policy.zip")),
        ("all H20=never@homogeneous", Row("all H20", "never", "homogeneous")),
        ("low=static:threshold_tokens=8000", Row("low", "static:threshold_tokens=8000")),
    ],
)
def test_labels(text: str, row: Row) -> None:
    assert parse_row(text) == row


def test_a_row_on_a_deployment_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: paper\nname: mine\ndeployment:\n  pd:\n"
        "    - {name: pd0, hardware: h20, n_prefill: 2, n_decode: 6}\n"
    )
    row = parse_row(f"never@{path}")
    assert row.policy == "never"
    assert row.scenario(SHORT).deployment.pd[0].n_prefill == 2
    assert row.scenario(SHORT).measure == SHORT.measure


@pytest.mark.parametrize("text", ["never@homogenous", "never@", "@naive", "=never", "agent=", "agent=@naive"])
def test_a_wrong_deployment_is_named(text: str) -> None:
    with pytest.raises(PrfaasError, match="--policy") as caught:
        parse_row(text)
    assert "\n" not in str(caught.value)


def test_every_policy_meets_the_same_arrivals_on_every_deployment() -> None:
    rows = [parse_row(t) for t in ("never", "always", "earliest_finish", "never@homogeneous", "always@naive")]
    outcomes = [run_job(Job(row.scenario(SHORT), row, 2_000_000)) for row in rows]
    assert len({o.arrivals_hash for o in outcomes}) == 1
    other = run_job(Job(SHORT, rows[0], 2_000_001))
    assert other.arrivals_hash != outcomes[0].arrivals_hash
    # Not the same run under five names.
    assert len({o.figures["ttft_mean_s"] for o in outcomes}) > 2


def test_figures_are_those_of_simulate() -> None:
    episode = simulate(SHORT, make_policy("earliest_finish"), seed=2_000_003)
    outcome = run_job(Job(SHORT, Row("ef", "earliest_finish"), 2_000_003, per_request=True))
    assert outcome.figures == figures_of(episode.metrics)
    assert outcome.figures["ttft_mean_s"] == episode.metrics["ttft_s"]["mean"]
    assert outcome.figures["open_at_end"] == episode.metrics["requests"]["open"]
    assert tuple(outcome.figures) == FIGURE_NAMES
    assert outcome.ttft_s is not None
    assert np.nanmean(outcome.ttft_s) == pytest.approx(episode.metrics["ttft_s"]["mean"])
    assert int(outcome.ttft_counts.sum()) == episode.metrics["cohort"]
    assert outcome.timeline is None


def test_requests_outside_the_cohort_are_not_a_number() -> None:
    warm = load_scenario("paper", overrides=["measure.horizon_s=60", "measure.warmup_s=30"])
    outcome = run_job(Job(warm, Row("n", "never"), 2_000_000, per_request=True))
    assert outcome.ttft_s is not None
    assert outcome.arrival_s is not None
    assert np.array_equal(np.isnan(outcome.ttft_s), outcome.arrival_s < 30.0)


def test_an_episode_without_requests_has_figures_all_the_same() -> None:
    silent = load_scenario("paper", overrides=["measure.horizon_s=10", "workload.arrivals.rate_rps=0"])
    outcome = run_job(Job(silent, Row("n", "never"), 2_000_000))
    assert outcome.figures["ttft_mean_s"] is None
    assert outcome.figures["arrived"] == 0.0
    assert outcome.ttft_counts.sum() == 0


def test_ttft_bins_cover_everything() -> None:
    assert TTFT_EDGES_S[0] == 0.0
    assert math.isinf(TTFT_EDGES_S[-1])
    assert (np.diff(TTFT_EDGES_S) > 0).all()


def test_policy_hash_tells_parameters_apart() -> None:
    a, b = "static:threshold_tokens=1000", "static:threshold_tokens=2000"
    assert policy_hash(make_policy(a), a) != policy_hash(make_policy(b), b)
    assert len(policy_hash(make_policy(a), a)) == 12


def test_a_trace_is_one_sample() -> None:
    assert is_trace(load_scenario("mooncake"))
    assert not is_trace(SHORT)


def test_processes_give_the_same_outcomes_in_order_and_pass_errors_on() -> None:
    rows = [Row("never", "never"), Row("ef", "earliest_finish")]
    jobs = [Job(SHORT, row, seed, timeline=True) for seed in (2_000_000, 2_000_001) for row in rows]
    counted = []
    with episode_runner(2) as parallel:
        outcomes = parallel.run(jobs, lambda: counted.append(1))
        with pytest.raises(PrfaasError, match="boom: does not fit"):
            parallel.run([Job(SHORT, Row("boom", Boom), 2_000_000)])  # type: ignore[arg-type]
    assert len(counted) == 4
    for job, outcome in zip(jobs, outcomes, strict=True):
        own = run_job(job)
        assert outcome.figures == own.figures
        assert outcome.arrivals_hash == own.arrivals_hash
        assert outcome.timeline is not None
        assert own.timeline is not None
        assert np.array_equal(outcome.timeline["time_s"], own.timeline["time_s"])


def test_one_job_needs_no_process(runner: EpisodeRunner) -> None:
    done = []
    outcomes = runner.run([Job(SHORT, Row("never", "never"), 2_000_000)], lambda: done.append(1))
    assert len(outcomes) == len(done) == 1
