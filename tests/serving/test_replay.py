"""A log run again gives what it holds; a log simulated gives what happened; other policies meet the same traffic."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.formulas import NS_PER_S
from prfaas_env.simulator.run import simulate
from prfaas_serving.decision_log import (
    MIN_BYTES,
    DecisionLine,
    EventLine,
    Log,
    RequestLine,
    read_log,
)
from prfaas_serving.log_commands import replay as replay_command
from prfaas_serving.log_world import difference, recorded_world, simulated, what_happened
from prfaas_serving.replay import KINDS, context_of, decision_text, differences, rerun
from tests.prfaas_env.bundles import make_bundle
from tests.serving.log_producer import (
    TINY,
    conversion,
    decision,
    produce,
    request,
    tiny_header,
    write,
)

#: A start that no rule would choose, so that nodes are moved soon.
BUSY = load_scenario(
    "paper",
    overrides=[
        "measure.horizon_s=320",
        "workload.arrivals.rate_rps=2.6",
        "deployment.pd.0.n_prefill=1",
        "deployment.pd.0.n_decode=7",
    ],
)
APP = typer.Typer()
APP.command("replay")(replay_command)
APP.command("other")(lambda: None)  # so that the first one keeps its name


def changed(log: Log, path: Path, change: Any, **header: Any) -> Log:
    """The log with every line changed by `change` (None leaves it out)."""
    lines = [new for line in log.lines if (new := change(line)) is not None]
    return write(path, dataclasses.replace(log.header, **header), lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def busy(folder: Path) -> Log:
    """Rule with a memory, which moves nodes."""
    produce(folder / "busy", BUSY, "dual_timescale")
    log = read_log(folder / "busy")
    assert sum(
        any(c.move is not Move.NONE for c in line.acted.clusters) for line in log.decisions if line.acted
    )
    return log


# ----------------------------------------------------------------------------- run again


def test_a_rule_with_a_memory_says_the_same_again(busy: Log) -> None:
    found = rerun(busy)
    assert found.is_own
    assert found.compared == len(busy.decisions) > 320
    assert found.identical == found.compared
    assert found.share == 1.0
    assert found.first is None
    assert not found.kinds


@pytest.mark.parametrize("spec", ["earliest_finish_conversion", "hybrid_planner", "length_ttft_grid"])
def test_other_rules_say_the_same_again(folder: Path, spec: str) -> None:
    short = BUSY.replace(measure={"horizon_s": 130})
    produce(folder / spec, short, spec, drain=False)
    found = rerun(read_log(folder / spec))
    assert (found.share, found.compared) == (1.0, 130)


@pytest.mark.parametrize(
    "options", [{}, {"masked": True}, {"recurrent": True}, {"form": "continuous"}, {"interval_s": 5.0}]
)
@pytest.mark.parametrize("how", ["", ":sample=true"])
def test_a_bundle_says_the_same_again(tmp_path: Path, options: dict[str, Any], how: str) -> None:
    bundle = make_bundle(tmp_path / "bundle", **options)
    short = BUSY.replace(measure={"horizon_s": 60})
    produce(tmp_path / "log", short, f"{bundle}{how}", drain=False, header={"policy_seed": 7})
    log = read_log(tmp_path / "log")
    found = rerun(log)
    assert (found.share, found.compared) == (1.0, 60)
    if how and not options:  # another seed draws something else
        other = changed(log, tmp_path / "other", lambda line: line, policy_seed=8)
        assert rerun(other).share < 1.0


def test_a_log_of_several_files_is_run_again_whole(tmp_path: Path) -> None:
    produce(tmp_path / "log", BUSY.replace(measure={"horizon_s": 120}), "dual_timescale", max_bytes=MIN_BYTES)
    log = read_log(tmp_path / "log")
    assert log.parts > 1
    found = rerun(log)
    assert (found.share, found.compared) == (1.0, len(log.decisions))


def test_the_recent_lengths_matter(busy: Log, tmp_path: Path) -> None:
    """Without the lengths the same rule would decide otherwise: they are really rebuilt."""
    bare = changed(
        busy,
        tmp_path / "log",
        lambda line: dataclasses.replace(line, new_lengths=((),)) if isinstance(line, DecisionLine) else line,
    )
    assert rerun(bare).share < 1.0


def test_the_first_differing_line_is_named(busy: Log, tmp_path: Path) -> None:
    def change(line: Any) -> Any:
        if not isinstance(line, DecisionLine) or line.n not in (100, 200):
            return line
        return dataclasses.replace(line, proposed=Decision.same(1, threshold_tokens=1.0))

    log = changed(busy, tmp_path / "log", change)
    found = rerun(log)
    assert found.compared - found.identical == 2
    assert found.kinds == {"threshold": 2}
    assert found.first is not None
    assert (found.first.n, found.first.time_s) == (100, 100.0)
    number = next(k for k, line in enumerate(log.lines) if isinstance(line, DecisionLine) and line.n == 100)
    assert found.first.where == f"{tmp_path / 'log'}:{number + 2}"
    assert str(found.first).startswith(
        f"{found.first.where}: decision 100 at 100.000 s: the log has threshold 1 tokens; the policy says threshold "
    )


def test_another_policy_in_its_place_is_refused_unless_named(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    short = BUSY.replace(measure={"horizon_s": 30})
    produce(tmp_path / "log", short, str(bundle), drain=False)
    log = read_log(tmp_path / "log")
    moved = bundle.rename(tmp_path / "moved")
    with pytest.raises(PrfaasError, match="unknown policy"):
        rerun(log)
    assert rerun(log, str(moved)).is_own
    assert rerun(log, str(moved)).share == 1.0
    make_bundle(tmp_path / "bundle", seed=1)
    with pytest.raises(PrfaasError, match=r"log:1: policy_hash: .* name a policy \(--policy\)"):
        rerun(log)
    found = rerun(log, str(bundle))
    assert not found.is_own
    assert found.share < 1.0


def test_a_planner_cannot_run_on_a_log(busy: Log) -> None:
    with pytest.raises(PrfaasError, match="looks into the simulator and cannot be run on a log"):
        rerun(busy, "clairvoyant")


def test_reloads_are_followed(tmp_path: Path) -> None:
    first, second = "static:threshold_tokens=5000", "static:threshold_tokens=9000"
    short = BUSY.replace(measure={"horizon_s": 20})
    produce(tmp_path / "a", short, first, drain=False)
    produce(tmp_path / "b", short, second, drain=False)
    a, b = read_log(tmp_path / "a"), read_log(tmp_path / "b")
    event = EventLine(
        time_ns=10 * NS_PER_S,
        what="reload",
        text="",
        policy_spec=second,
        policy_hash=b.header.policy_hash,
    )
    lines = [*a.decisions[:10], event, *b.decisions[10:]]
    found = rerun(write(tmp_path / "log", a.header, lines))
    assert (found.compared, found.identical, found.other_policy) == (20, 20, 0)
    # without the event nobody knows what decided from there on
    untold = write(tmp_path / "log", a.header, [line for line in lines if line is not event])
    found = rerun(untold)
    assert (found.compared, found.identical, found.other_policy) == (10, 10, 10)
    # a policy named by the user is asked everywhere
    found = rerun(untold, second)
    assert (found.compared, found.identical, found.other_policy) == (20, 10, 0)


def test_a_decision_without_a_policy_is_not_compared(busy: Log, tmp_path: Path) -> None:
    def change(line: Any) -> Any:
        held = isinstance(line, DecisionLine) and line.n > 250
        return dataclasses.replace(line, proposed=None, by="hold") if held else line

    found = rerun(changed(busy, tmp_path / "log", change))
    assert (found.compared, found.identical) == (251, 251)
    assert found.not_asked == len(busy.decisions) - 251


def test_out_of_off_a_policy_begins_anew(tmp_path: Path) -> None:
    """A recurrent policy: after mode off its state is that of a start, as in the router."""
    bundle = make_bundle(tmp_path / "bundle", recurrent=True)
    produce(tmp_path / "log", BUSY.replace(measure={"horizon_s": 60}), str(bundle), drain=False)
    log = read_log(tmp_path / "log")
    policy = make_policy(str(bundle))
    lines = []
    for _, line, telemetry in log.telemetry():
        if line.n in (0, 30):
            policy.reset(context_of(log))
        off = 20 <= line.n < 30
        proposed = None if off else policy.decide(telemetry)
        lines.append(dataclasses.replace(line, proposed=proposed, mode="off" if off else "active"))
    found = rerun(write(tmp_path / "anew", log.header, lines))
    assert (found.compared, found.identical, found.not_asked) == (50, 50, 10)
    told = [dataclasses.replace(line, mode="active") for line in lines]
    assert rerun(write(tmp_path / "on", log.header, told)).share < 1.0


def test_kinds_of_difference() -> None:
    one = ClusterDecision(threshold_tokens=5.0)

    def kinds(other: ClusterDecision) -> tuple[str, ...]:
        return differences(Decision((one, one)), Decision((one, other)))

    assert kinds(one) == ()
    assert kinds(ClusterDecision(threshold_tokens=6.0)) == ("threshold",)
    assert kinds(ClusterDecision(margin_s=1.0, move=Move.DECODE_TO_PREFILL)) == (
        "threshold or margin",
        "move",
    )
    assert kinds(ClusterDecision(threshold_tokens=5.0, cache_rule="abundant")) == ("cache rule",)
    a, b = Decision.same(1, margin_s=0.0), Decision.same(1, margin_s=1.0)
    assert differences(a, b) == ("margin",)
    assert set(KINDS) == {"threshold", "margin", "threshold or margin", "cache rule", "move"}


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (ClusterDecision(threshold_tokens=19_400.0), "threshold 19,400 tokens"),
        (ClusterDecision(threshold_tokens=0.5), "threshold 0.5 tokens"),
        (ClusterDecision(threshold_tokens=math.inf), "never remote"),
        (ClusterDecision(margin_s=-math.inf), "always remote"),
        (ClusterDecision(margin_s=math.inf), "never remote"),
        (
            ClusterDecision(margin_s=-1.5, move=Move.PREFILL_TO_DECODE, cache_rule="abundant"),
            "margin -1.5 s, cache rule abundant, move prefill_to_decode",
        ),
    ],
)
def test_decisions_in_words(cluster: ClusterDecision, text: str) -> None:
    assert decision_text(Decision((cluster,))) == text
    assert decision_text(None) == "nothing"


# ------------------------------------------------------------------------------ simulated


def test_the_simulator_gives_the_run_that_the_log_is_of(busy: Log) -> None:
    """Constant capacity, all requests in the log: the same times to the nanosecond."""
    recorded = recorded_world(busy)
    assert recorded.notes == ()
    happened = what_happened(busy, recorded)
    assert len(happened.ttft_s) == len(busy.requests) > 700
    for policy in (recorded.policy, make_policy("dual_timescale")):
        run = simulated(recorded, policy, "x")
        assert run.ttft_s.tolist() == happened.ttft_s.tolist()
        assert run.good.tolist() == happened.good.tolist()
        assert run.conversions == happened.conversions > 0
        assert run.invalid_moves == 0
        assert (run.rejected, run.aborted, run.unserved) == (0, 0, 0)
        assert run.egress_bps == pytest.approx(happened.egress_bps, rel=0.02)
    assert difference(recorded, run, happened).ttft_mean_s.mean == 0.0


def test_another_policy_meets_the_traffic_that_it_would_have_met(busy: Log) -> None:
    """The answer to "what would B have done" is what B does in the world that the log came from."""
    run = simulated(recorded_world(busy), make_policy("earliest_finish"), "B")
    direct = simulate(BUSY, make_policy("earliest_finish"), seed=0, n_requests=len(busy.requests))
    arrival, first = direct.world.requests.arrival_ns, direct.records.first_token_ns
    assert run.ttft_s.tolist() == ((first - arrival) / NS_PER_S).tolist()
    assert run.ttft_s.tolist() != simulated(recorded_world(busy), make_policy("never"), "C").ttft_s.tolist()


def test_policies_are_told_the_plan_and_not_the_traffic(busy: Log) -> None:
    seen = []

    class Asks:
        constant = True

        def reset(self, context: Any) -> None:
            seen.append(context.scenario)

        def decide(self, telemetry: Any) -> Decision:
            return Decision.same(1, threshold_tokens=19_400.0)

    simulated(recorded_world(busy), Asks(), "x")
    assert seen == [BUSY]


@pytest.mark.parametrize("name", ["two_regions", "shared_prfaas"])
def test_several_sites(tmp_path: Path, name: str) -> None:
    scenario = load_scenario(name, overrides=["measure.horizon_s=60", "measure.warmup_s=0"])
    produce(tmp_path / "log", scenario, "dual_timescale")
    log = read_log(tmp_path / "log")
    assert rerun(log).share == 1.0
    recorded = recorded_world(log)
    happened = what_happened(log, recorded)
    assert len({line.pd for line in recorded.requests}) > 1
    run = simulated(recorded, recorded.policy, "x")
    if recorded.world.scenario.link_capacity == scenario.link_capacity:
        assert run.ttft_s.tolist() == happened.ttft_s.tolist()


def test_a_link_that_changes_is_known_as_observed(tmp_path: Path) -> None:
    """A thin link for 200 s: the router sees it with a delay, so times differ by little, stated in docs/replay.md."""
    thin = {"kind": "steps", "at_s": [100.0, 300.0], "capacity_bps": [6e9, 100e9]}
    scenario = BUSY.replace(link_capacity=thin, measure={"horizon_s": 500})
    produce(tmp_path / "log", scenario, "static")
    log = read_log(tmp_path / "log")
    recorded = recorded_world(log)
    trace = recorded.world.links[0]
    at = np.searchsorted(trace.time_ns, np.array([90, 115, 250]) * NS_PER_S, side="right") - 1
    assert trace.capacity_bps[at].tolist() == pytest.approx([100e9, 6e9, 6e9], rel=0.01)
    happened, run = what_happened(log, recorded), simulated(recorded, recorded.policy, "x")
    assert np.nanmean(run.ttft_s) == pytest.approx(np.nanmean(happened.ttft_s), rel=0.03)
    # the change is felt: with the nominal capacity throughout it would be another run
    blind = dataclasses.replace(
        recorded,
        world=dataclasses.replace(
            recorded.world,
            links=(
                dataclasses.replace(trace, time_ns=trace.time_ns[:1], capacity_bps=trace.capacity_bps[:1]),
            ),
        ),
    )
    nominal = simulated(blind, recorded.policy, "x")
    assert np.nanmean(nominal.ttft_s) < 0.9 * np.nanmean(happened.ttft_s)


def test_requests_that_were_rejected_or_given_up(tmp_path: Path) -> None:
    scenario = BUSY.replace(
        measure={"horizon_s": 200},
        admission={"max_input_tokens": 60_000},
        faults={"cancel_mean_s": 30.0},
        slo={"ttft_s": 5.0, "tpot_s": 0.05},
    )
    produced = produce(tmp_path / "log", scenario, "static")
    log = read_log(tmp_path / "log")
    recorded = recorded_world(log)
    happened = what_happened(log, recorded)
    totals = produced.run.engine.totals()
    assert (happened.rejected, happened.aborted) == (totals.rejected, totals.aborted)
    assert happened.rejected > 0
    assert happened.aborted > 0
    assert int(happened.good.sum()) == totals.good
    run = simulated(recorded, recorded.policy, "x")
    assert run.rejected == happened.rejected
    # outputs of requests that were given up are not known: one may end before its client gives up
    assert run.aborted == pytest.approx(happened.aborted, rel=0.1)
    assert np.nanmean(run.ttft_s) == pytest.approx(np.nanmean(happened.ttft_s), rel=0.05)
    assert any("did not finish" in note for note in recorded.notes)


# ---------------------------------------------------------------------- by hand


def tiny(path: Path, *lines: Any, n: int = 40) -> Log:
    """40 decisions a second apart, then the lines."""
    return write(path, tiny_header(), [*(decision(k) for k in range(n)), *lines])


def test_figures_of_what_happened(tmp_path: Path) -> None:
    decisions = [decision(k, fields={"link0.utilisation_5s": 0.25 if k >= 20 else 0.0}) for k in range(40)]
    lines = [
        request(1.0),
        request(2.0, ttft_s=3.0),  # too late
        request(3.0, tpot_s=0.06),  # too slow
        request(4.0, ttft_s=2.0, tpot_s=None, output_tokens=1),
        request(5.0, outcome="rejected", ttft_s=None, tpot_s=None),
        request(6.0, outcome="aborted", ttft_s=None, tpot_s=None, end_ns=10 * NS_PER_S),
        request(7.0, outcome="failed", ttft_s=None, tpot_s=None),
        conversion(15.0),
        conversion(30.0, done_ns=None),
    ]
    log = write(tmp_path / "log", tiny_header(), [*decisions, *lines])
    recorded = recorded_world(log)
    figures = what_happened(log, recorded).figures()
    assert recorded.span_s == 40.0
    assert figures == {
        "ttft_mean_s": pytest.approx((1 + 3 + 1 + 2 + 4) / 5),
        "ttft_p50_s": 2.0,
        "ttft_p90_s": pytest.approx(3.6),
        "goodput_rps": 2 / 40,
        "egress_mean_bps": pytest.approx(0.25 * 80e9 * 20 / 40),
        "conversions": 1,
        "requests": 7,
        "rejected": 1,
        "aborted": 1,
        "unserved": 1,
        "invalid_moves": None,
    }


def test_the_world_of_a_log(tmp_path: Path) -> None:
    lines = [
        request(5.0, input_tokens=100, incremental_tokens={"pd0": 100}),
        request(1.0),
        request(3.0, outcome="aborted", output_tokens=2, ttft_s=1.0, tpot_s=None, end_ns=9 * NS_PER_S),
        request(4.0, outcome="open", output_tokens=50, incremental_tokens={"pd0": 0, "prfaas0": 4000}),
    ]
    recorded = recorded_world(tiny(tmp_path / "log", *lines))
    world, table = recorded.world, recorded.world.requests
    assert table.arrival_ns.tolist() == [1 * NS_PER_S, 3 * NS_PER_S, 4 * NS_PER_S, 5 * NS_PER_S]
    assert table.input_tokens.tolist() == [4000, 4000, 4000, 100]
    assert table.output_tokens.tolist() == [11, 11, 50, 11]
    assert table.cached_tokens.tolist() == [1000, 1000, 3999, 0]
    assert world.give_up_ns is not None
    assert world.give_up_ns[1] == 9 * NS_PER_S
    assert (world.give_up_ns[[0, 2, 3]] > 10**18).all()
    deployment = world.scenario.deployment
    assert (deployment.pd[0].n_prefill, deployment.pd[0].n_decode) == (2, 5)
    assert deployment.prfaas[0].n_instances == 3
    assert deployment.links[0].capacity_bps == 80e9
    assert recorded.planned == TINY
    assert recorded.notes == (
        "1 requests were open when the log ended",
        "2 requests did not finish; their outputs are taken to be 11 tokens at least",
        "1 of 4 requests had other cache hits at the remote cluster; simulated with those of the PD cluster everywhere",
    )


def test_observed_capacity_becomes_steps(tmp_path: Path) -> None:
    def seen(k: int) -> dict[str, float]:
        if k < 10:
            return {}
        fresh = {"link0.observed_valid": 1.0, "link0.observed_capacity_bps": 20e9}
        if k < 20:  # evidence of the window that ended just now
            return {**fresh, "link0.observed_age_s": float(k - 10)}
        return {**fresh, "link0.observed_capacity_bps": 22e9, "link0.observed_age_s": float(k - 10)}

    decisions = [decision(k, fields=seen(k)) for k in range(40)]
    trace = recorded_world(write(tmp_path / "log", tiny_header(), [*decisions, request(1.0)])).world.links[0]
    assert (trace.time_ns / NS_PER_S).tolist() == [0.0, 5.0, 20.0]
    assert trace.capacity_bps.tolist() == [80e9, 20e9, 22e9]


def moves_of(log: Log) -> dict[int, Move]:
    policy = recorded_world(log).policy
    return {tick: move for (tick, _), move in policy._moves.items()}


def test_conversions_as_recorded(tmp_path: Path) -> None:
    move = Decision.same(1, threshold_tokens=10_000.0, move=Move.DECODE_TO_PREFILL)
    ordered = [decision(k, acted=move) if k in (15, 30) else decision(k) for k in range(60)]
    lines = [
        conversion(15.01),  # the one ordered at 15
        conversion(30.2, done_ns=None),  # ordered and refused
        conversion(44.0, from_role="prefill", to_role="decode"),  # by hand
        conversion(44.5, cluster="elsewhere"),
        request(1.0),
    ]
    log = write(tmp_path / "log", tiny_header(), [*ordered, *lines])
    assert moves_of(log) == {15: Move.DECODE_TO_PREFILL, 45: Move.PREFILL_TO_DECODE}
    notes = recorded_world(log).notes
    assert any(note.startswith("1 conversions were not ordered by a decision") for note in notes)
    assert any(note.startswith("1 conversions were ordered and not carried out") for note in notes)


def test_a_jittering_clock_and_gaps(tmp_path: Path) -> None:
    """Ticks of a real loop are a little late; a held or missing decision stays in force."""
    values = [1000.0 * (k + 1) for k in range(40)]
    decisions = [
        decision(
            k,
            time_ns=k * NS_PER_S + 40_000_000 * (k % 3),
            acted=Decision.same(1, threshold_tokens=values[k]) if k not in (5, 6) else None,
        )
        for k in range(40)
        if k != 20
    ]
    log = write(tmp_path / "log", tiny_header(), [*decisions, request(1.0)])
    recorded = recorded_world(log)
    assert "1 decisions are missing from the log" in recorded.notes
    said = []
    for k in range(40):
        telemetry = dataclasses.make_dataclass("T", ["time_ns"])(k * NS_PER_S)
        said.append(recorded.policy.decide(telemetry).clusters[0].threshold_tokens)
    wanted = [*values[:5], values[4], values[4], *values[7:20], values[19], *values[21:]]
    assert said == wanted


def test_a_later_part_begins_at_a_slow_tick(busy: Log, tmp_path: Path) -> None:
    def late(line: Any) -> Any:
        at = (
            line.time_ns
            if isinstance(line, DecisionLine)
            else line.end_ns
            if isinstance(line, RequestLine)
            else None
        )
        return line if at is None or at >= 100 * NS_PER_S else None

    log = changed(busy, tmp_path / "log", late, part=3)
    recorded = recorded_world(log)
    assert recorded.start_ns == 90 * NS_PER_S
    assert recorded.requests[0].arrival_ns >= recorded.start_ns
    assert any("arrived before the log begins" in note for note in recorded.notes)
    assert any("begins in the middle of a run" in note for note in recorded.notes)
    run, happened = simulated(recorded, recorded.policy, "x"), what_happened(log, recorded)
    assert np.nanmean(run.ttft_s) == pytest.approx(np.nanmean(happened.ttft_s), rel=0.3)


def test_instances_that_come_and_go_are_told(tmp_path: Path) -> None:
    decisions = [decision(k, fields={"prfaas0.prefill_instances": 3.0 if k < 30 else 2.0}) for k in range(40)]
    notes = recorded_world(write(tmp_path / "log", tiny_header(), [*decisions, request(1.0)])).notes
    assert notes == (
        "prfaas0: 2 to 3 instances in the log, simulated with 3 throughout (another number for 25.0% of the time)",
    )


def test_the_log_of_one_router_of_two(tmp_path: Path) -> None:
    """A router serves one PD cluster; of the other one its readings know nothing."""
    scenario = load_scenario("shared_prfaas", overrides=["measure.horizon_s=60", "measure.warmup_s=0"])
    produce(tmp_path / "log", scenario, "static")
    log = read_log(tmp_path / "log")
    unknown = [k for k, name in enumerate(log.header.names) if name.startswith("pd1.")]

    def blind(line: Any) -> Any:
        if isinstance(line, RequestLine):
            return None if line.pd == 1 else line
        values = [0.0 if k in unknown else v for k, v in enumerate(line.values)]
        return dataclasses.replace(line, values=tuple(values))

    one = changed(log, tmp_path / "one", blind)
    recorded = recorded_world(one)
    assert recorded.world.scenario.deployment.pd[1] == scenario.deployment.pd[1]
    assert simulated(recorded, recorded.policy, "x").unserved == 0


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "has no decisions"),
        ([decision(0)], "has no requests"),
        ([decision(0, acted=None), request(1.0)], "nothing was ever put in force"),
        ([decision(0), request(1.0, pd=1)], "log:3: pd is 1; the scenario has 1 PD clusters"),
        (
            [decision(0, fields={"pd0.decode_instances": 0.0}), request(1.0)],
            "the first reading has no decode instance at pd0",
        ),
    ],
)
def test_logs_that_cannot_be_simulated(tmp_path: Path, lines: list[Any], told: str) -> None:
    log = write(tmp_path / "log", tiny_header(), lines)
    with pytest.raises(PrfaasError, match=told):
        recorded_world(log)


# ------------------------------------------------------------------------------- command


def call(*args: Any) -> Any:
    return CliRunner().invoke(APP, ["replay", *map(str, args)])


def test_the_command_runs_a_log_again(busy: Log, tmp_path: Path) -> None:
    found = call(busy.path)
    assert found.exit_code == 0, found.output
    assert f"{len(busy.decisions)} of {len(busy.decisions)} decisions are identical (100.00%)" in found.output
    other = call(busy.path, "--policy", "never", "--json")
    assert other.exit_code == 0
    raw = json.loads(other.output)
    assert raw["is_own"] is False
    assert raw["identical_share"] == 0.0
    assert raw["first"].startswith(f"{busy.path}:")
    spoiled = changed(
        busy,
        tmp_path / "log",
        lambda line: (
            dataclasses.replace(line, proposed=Decision.same(1, margin_s=0.5))
            if isinstance(line, DecisionLine) and line.n == 7
            else line
        ),
    )
    found = call(spoiled.path)
    assert found.exit_code == 1
    assert "the first: " in found.output
    assert "decision 7 at 7.000 s: the log has margin 0.5 s; the policy says threshold" in found.output


def test_the_command_simulates(busy: Log) -> None:
    found = call(busy.path, "--simulate", "--policy", "earliest_finish", "--policy", "never", "--json")
    assert found.exit_code == 0, found.output
    raw = json.loads(found.output)
    labels = [row["label"] for row in raw["rows"]]
    assert labels == [
        "what happened",
        "what acted, simulated",
        "dual_timescale, simulated",
        "earliest_finish, simulated",
        "never, simulated",
    ]
    rows = dict(zip(labels, raw["rows"], strict=True))
    assert rows["what happened"]["ttft_mean_s"] == rows["dual_timescale, simulated"]["ttft_mean_s"]
    assert raw["simulated_less_happened"]["ttft_mean_s"]["mean"] == 0.0
    effect = raw["less_acted"]["never, simulated"]["ttft_mean_s"]
    assert effect["mean"] == pytest.approx(
        rows["never, simulated"]["ttft_mean_s"] - rows["what acted, simulated"]["ttft_mean_s"]
    )
    assert effect["low"] < effect["mean"] < effect["high"]
    text = call(busy.path, "--simulate", "--policy", "never").output
    assert "never, simulated, less what acted, simulated: mean TTFT +" in text
    assert "goodput" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--policy", "never", "--policy", "always"], "one at most without --simulate"),
        (["--simulate", "--policy", "never", "--policy", "never"], "named twice"),
        (["--engine", "other"], "--engine is 'other'; allowed"),
        (["--simulate", "--policy", "nobody"], "unknown policy 'nobody'"),
    ],
)
def test_mistakes_at_the_command(busy: Log, options: list[str], told: str) -> None:
    found = call(busy.path, *options)
    assert isinstance(found.exception, PrfaasError)
    assert told in str(found.exception)


def test_the_log_own_policy_may_be_gone(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    produce(tmp_path / "log", BUSY.replace(measure={"horizon_s": 20}), str(bundle))
    bundle.rename(tmp_path / "gone")
    found = call(tmp_path / "log", "--simulate", "--policy", "never", "--json")
    assert found.exit_code == 0, found.output
    raw = json.loads(found.output)
    assert [row["label"] for row in raw["rows"]][2:] == ["never, simulated"]
    assert any(note.startswith("the log's policy is left out: ") for note in raw["notes"])
    make_bundle(tmp_path / "bundle", seed=5)
    raw = json.loads(call(tmp_path / "log", "--simulate", "--json").output)
    assert len(raw["rows"]) == 2
    assert any("the log is of" in note for note in raw["notes"])


def test_a_scenario_round_trip_through_the_header(busy: Log) -> None:
    assert isinstance(busy.scenario, Scenario)
    assert busy.scenario == BUSY
