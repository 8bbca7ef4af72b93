"""Whole runs: measuring windows, draining, policies on their clock."""

from __future__ import annotations

import math

import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.policy import OwnInterval
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.simulator.engine import ENGINES, make_engine
from prfaas_env.simulator.run import TIMELINE, EpisodeRun, run_world, simulate
from prfaas_env.simulator.world import draw_world

S = 1_000_000_000


class Threshold:
    """One threshold for ever; counts how often it is asked."""

    def __init__(self, tokens, constant=True):
        self.tokens = tokens
        self.constant = constant
        self.asked = []

    def reset(self, context):
        self.context = context

    def decide(self, telemetry):
        self.asked.append(telemetry.time_ns)
        return Decision.same(len(telemetry.pd), threshold_tokens=self.tokens)


def paper(*overrides):
    return load_scenario("paper", overrides=overrides)


def test_unknown_engine_is_one_line():
    with pytest.raises(PrfaasError, match=r"unknown engine 'fast'; known: .*simpy"):
        make_engine("fast", draw_world(paper(), 0, n_requests=1))


def test_a_constant_policy_is_asked_once_and_any_other_on_every_tick(tiny):
    scenario = paper("measure.horizon_s=5.5", "control.control_interval_s=0.5")
    constant, other = Threshold(19_400), Threshold(19_400, constant=False)
    runs = [simulate(scenario, p, seed=1, engine=tiny.engine_name) for p in (constant, other)]
    assert constant.asked == [0]
    assert other.asked == [k * S // 2 for k in range(11)]
    assert runs[0].metrics == runs[1].metrics
    assert runs[0].end.time_ns == 5_500_000_000


class Wanderer:
    """Another margin and another move every 5 s, held in between; counts how often it is asked."""

    constant = False

    def __init__(self, says_so):
        self.clock = OwnInterval(5.0, "policy wanderer")
        if says_so:
            self.decision_interval_s = 5.0
        self.asked = []

    def reset(self, context):
        self.clock.reset(context)
        self.asked = []

    def decide(self, telemetry):
        self.asked.append(telemetry.time_ns)
        if not self.clock.is_due(telemetry):
            return self.clock.held
        k = telemetry.time_ns // (5 * S)
        cluster = ClusterDecision(
            margin_s=(-30.0, 0.0, 4.0, 1.0)[k % 4],
            move=Move.DECODE_TO_PREFILL if k % 12 < 6 else Move.PREFILL_TO_DECODE,
        )
        return self.clock.decided(telemetry, Decision((cluster,) * len(telemetry.pd)))


@pytest.mark.parametrize(
    ("scenario", "duration_s"), [("drift", 203.0), ("prfaas_outage", 1300.0), ("two_regions", 121.5)]
)
def test_a_policy_that_says_its_interval_is_asked_at_it_alone_with_equal_results(scenario, duration_s):
    often, seldom = Wanderer(False), Wanderer(True)
    loaded = load_scenario(scenario)
    runs = [simulate(loaded, p, seed=5, duration_s=duration_s) for p in (often, seldom)]
    assert len(often.asked) == math.ceil(duration_s)
    assert seldom.asked == [5 * k * S for k in range(math.ceil(duration_s / 5))]
    assert runs[0].metrics == runs[1].metrics
    assert runs[0].metrics["conversions"] > 1
    assert runs[0].end == runs[1].end
    for name in ("first_token_ns", "finish_ns", "route", "abort_ns"):
        assert (getattr(runs[0].records, name) == getattr(runs[1].records, name)).all()


def test_drained_runs_and_timelines_ask_on_every_tick_as_ever(tiny):
    runs = []
    for policy in (Wanderer(False), Wanderer(True)):
        run = simulate(paper(), policy, seed=2, n_requests=30, engine=tiny.engine_name)
        runs.append((run.metrics, policy.asked))
        run = simulate(paper("measure.horizon_s=12"), policy, seed=2, timeline=True, engine=tiny.engine_name)
        assert len(run.timeline["time_s"]) == 12
    assert runs[0] == runs[1]


@pytest.mark.parametrize("interval_s", [0.5, 1.5])
def test_an_interval_of_its_own_must_fit_the_clock(interval_s):
    policy = Threshold(19_400, constant=False)
    policy.decision_interval_s = interval_s
    with pytest.raises(PrfaasError, match=r"must be a multiple of the scenario's control_interval_s 1"):
        simulate(paper(), policy, seed=0, duration_s=2)


def test_case_a21_the_warm_up_is_left_out_and_reported(tiny):
    """An empty system at the start shortens waits: with a warm-up two lengths of run agree better."""
    overrides = ("workload.arrivals.rate_rps=2.9", "measure.horizon_s=4000")
    cold = simulate(paper(*overrides), Threshold(19_400), seed=3, n_requests=500, engine=tiny.engine_name)
    warm = simulate(
        paper(*overrides, "measure.warmup_s=100"),
        Threshold(19_400),
        seed=3,
        n_requests=500,
        engine=tiny.engine_name,
    )
    assert any("includes start" in note for note in cold.metrics["notes"])
    assert not any("includes start" in note for note in warm.metrics["notes"])
    assert (cold.metrics["warmup_s"], warm.metrics["warmup_s"]) == (0.0, 100.0)
    arrival = warm.world.requests.arrival_ns
    assert cold.metrics["cohort"] == 500
    assert warm.metrics["cohort"] == int((arrival >= 100 * S).sum())
    # the same world and the same records: only the window differs
    assert (cold.records.finish_ns == warm.records.finish_ns).all()
    first = (warm.records.first_token_ns - arrival)[arrival >= 100 * S] / S
    assert warm.metrics["ttft_s"]["mean"] == pytest.approx(first.mean())
    assert warm.metrics["window_s"] == pytest.approx(warm.end.time_ns / S - 100.0)


def test_a_drained_run_ends_with_its_last_finish(tiny):
    run = simulate(paper(), Threshold(19_400), seed=0, n_requests=50, engine=tiny.engine_name)
    assert run.metrics["drained"]
    assert run.end.finished == 50
    assert run.end.time_ns == run.records.finish_ns.max()


def test_a_run_to_the_horizon_leaves_requests_open(tiny):
    run = simulate(paper("measure.horizon_s=60"), Threshold(19_400), seed=0, engine=tiny.engine_name)
    assert not run.metrics["drained"]
    assert run.metrics["requests"]["open"] > 0
    assert run.end.time_ns == 60 * S


def test_drained_before_the_warm_up_is_over(tiny):
    run = simulate(
        paper("measure.warmup_s=600"), Threshold(19_400), seed=0, n_requests=5, engine=tiny.engine_name
    )
    assert run.metrics["throughput_rps"] == 0.0
    assert any("nothing was measured" in line for line in run.metrics["warnings"])


@pytest.mark.parametrize("constant", [True, False])
def test_a_link_that_never_comes_back_ends_a_drained_run_with_open_requests(tiny, constant):
    """All requests go remote and the link is down from 5 s on: what has not crossed can never finish."""
    scenario = paper("link_capacity={kind: steps, at_s: [5], capacity_bps: [0]}")
    run = simulate(scenario, Threshold(0, constant), seed=0, n_requests=20, engine=tiny.engine_name)
    counts = run.metrics["requests"]
    assert counts["arrived"] == 20
    assert 0 < counts["open"] < 20
    assert counts["finished"] + counts["open"] == 20
    assert run.metrics["ttft_open_inf_s"]["p99"] is None


def test_timeline_has_a_row_per_decision(tiny):
    scenario = paper("measure.horizon_s=8", "link_capacity={kind: steps, at_s: [3], capacity_bps: [5 Gbps]}")
    run = simulate(scenario, Threshold(19_400), seed=1, engine=tiny.engine_name, timeline=True)
    assert list(run.timeline) == list(TIMELINE)
    assert run.timeline["time_s"].tolist() == list(range(8))
    assert run.timeline["true_capacity_bps"].tolist() == [100e9] * 3 + [5e9] * 5
    assert run.timeline["threshold_tokens"].tolist() == [19_400.0] * 8
    assert all(math.isnan(x) for x in run.timeline["margin_s"])
    assert run.timeline["prefill_instances"].tolist() == [3.0] * 8


def test_totals_at_the_end_of_the_warm_up_do_not_depend_on_the_steps(tiny):
    scenario = paper("measure.horizon_s=40", "measure.warmup_s=12.5")
    world = draw_world(scenario, 4)
    runs = [EpisodeRun(world, tiny.engine_name) for _ in range(2)]
    for run in runs:
        run.engine.apply(Decision.same(1, threshold_tokens=19_400))
    runs[0].run_until(40 * S)
    for second in range(1, 41):
        runs[1].run_until(second * S)
    assert runs[0].start == runs[1].start
    assert runs[0].start.time_ns == 12_500_000_000
    assert runs[0].metrics() == runs[1].metrics()


def test_engines_by_name():
    for name in ENGINES:
        assert make_engine(name, draw_world(paper(), 0, n_requests=1)).name == name


def test_a_world_that_is_there_already_runs_the_same_and_tells_the_plan():
    scenario = paper("measure.horizon_s=60")
    drawn, given = Threshold(20_000.0), Threshold(20_000.0)
    episode = simulate(scenario, drawn, seed=3)
    planned = scenario.replace(name="the plan")
    assert run_world(draw_world(scenario, 3), given, planned=planned).metrics == episode.metrics
    assert episode.metrics["requests"]["finished"] > 0
    assert (drawn.context.scenario, given.context.scenario) == (scenario, planned)
