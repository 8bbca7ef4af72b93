"""`prfaas compare`: paired, labelled, whole; who loses to whom."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios import load_scenario
from prfaas_env.telemetry import Telemetry
from prfaas_trainings import tables
from prfaas_trainings.compare import (
    CSV_COLUMNS,
    DEFAULT_POLICIES,
    PARTS,
    CompareFolder,
    ComparePlan,
    Comparison,
    PolicyFacts,
    _ttft_by_row,
    compare,
    prepare,
    replayed_slice,
    rows_of,
    run_compare,
    run_timelines,
    timeline_rows,
)
from prfaas_trainings.episodes import FIGURE_NAMES, TTFT_EDGES_S, EpisodeRunner, Outcome, Row, parse_row
from prfaas_trainings.plots import ttft_distribution
from prfaas_trainings.seeds import SPLITS

from .conftest import Counting, heed_ctrl_c

SHORT = load_scenario("paper", overrides=["measure.horizon_s=60"])
SLICE = load_scenario("mooncake", overrides=["workload.start_s=1200", "measure.horizon_s=330"])
SEEDS = range(2_000_000, 2_000_005)


class Learned:
    """A "learned" policy that sends everything remote; it claims to have seen some seeds and trace seconds."""

    constant = True
    learned = True
    fingerprint = "0123456789ab"
    seen_seeds: tuple[tuple[int, int], ...] = ((0, 1_000_000), (1_000_000, 1_000_008))
    seen_slices: tuple[tuple[str, float, float], ...] = (
        ("bundled:mooncake_conversation_first_32min.jsonl", 0.0, 1200.0),
    )

    def reset(self, context: PolicyContext) -> None:
        self._decision = Decision.same(context.schema.n_pd, threshold_tokens=0.0)

    def decide(self, telemetry: Telemetry) -> Decision:
        return self._decision


ROWS = [Row("never", "never"), Row("ef", "earliest_finish"), Row("learned", Learned)]


@pytest.fixture(scope="module")
def result(runner: EpisodeRunner) -> Comparison:
    """Three policies on two cheap scenarios."""
    return compare([SHORT, SLICE], ROWS, seeds=SEEDS, split="test", runner=runner, reference="ef")


def test_differences_are_paired_by_seed(result: Comparison) -> None:
    own = [result.values(0, r, "ttft_p90_s") for r in range(3)]
    found = result.difference(0, 0, 1, "ttft_p90_s")
    assert found.mean == pytest.approx((own[0] - own[1]).mean())
    assert found.n == len(SEEDS)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.mean < found.high
    back = result.difference(0, 1, 0, "ttft_p90_s")
    assert back.mean == pytest.approx(-found.mean)
    assert result.own(0, 0, "ttft_mean_s").mean == pytest.approx(result.values(0, 0, "ttft_mean_s").mean())


def test_a_trace_pairs_requests_and_draws_blocks(result: Comparison) -> None:
    found = result.difference(1, 2, 1, "ttft_mean_s")
    assert found.method == "blocks"
    assert found.n == 5
    pairs = zip(result.outcomes[1, 2], result.outcomes[1, 1], strict=True)
    each = [a.ttft_s - b.ttft_s for a, b in pairs if a.ttft_s is not None and b.ttft_s is not None]
    assert found.mean == pytest.approx(float(np.nanmean(np.concatenate(each))))
    # One trace is one sample: the spread over its seeds is no interval for anything else.
    assert result.difference(1, 2, 1, "goodput_rps").low is None
    assert result.own(1, 2, "ttft_p90_s").low is None


def test_csv_holds_every_policy_scenario_and_seed(result: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(result.csv_text())))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert len(rows) == 2 * 3 * len(SEEDS)
    keys = {(r["scenario"], r["policy"], int(r["seed"])) for r in rows}
    assert keys == {
        (s, p, k) for s in ("paper", "mooncake") for p in ("never", "ef", "learned") for k in SEEDS
    }
    for scenario in ("paper", "mooncake"):
        for seed in SEEDS:
            same = [r for r in rows if r["scenario"] == scenario and int(r["seed"]) == seed]
            assert len({r["arrivals_hash"] for r in same}) == 1
    assert {r["split"] for r in rows} == {"test"}
    assert {r["policy_hash"] for r in rows if r["policy"] == "learned"} == {"0123456789ab"}
    first = next(r for r in rows if r["policy"] == "ef" and r["scenario"] == "paper")
    assert float(first["ttft_mean_s"]) == result.outcomes[0, 1][0].figures["ttft_mean_s"]


def test_json_says_what_was_compared_and_how(result: Comparison) -> None:
    content = json.loads(result.json_text())
    assert content["split"] == "test"
    assert content["seeds"] == {"first": 2_000_000, "count": 5}
    assert content["reference"] == "ef"
    assert content["versions"]["prfaas-env"]
    assert [s["hash"] for s in content["scenarios"]] == [SHORT.hash, SLICE.hash]
    assert [s["trace"] for s in content["scenarios"]] == [False, True]
    assert any("spread" in note for note in content["scenarios"][1]["notes"])
    paper = content["scenarios"][0]["results"]
    assert set(paper) == {"never", "ef", "learned"}
    assert set(paper["never"]["figures"]) == set(FIGURE_NAMES)
    assert paper["ef"]["difference_to_reference"]["ttft_mean_s"]["mean"] == 0.0
    assert paper["never"]["scenario_hash"] == SHORT.hash
    assert [row["learned"] for row in content["rows"]] == [False, False, True]


def test_lines_name_losses_and_wins_of_the_learned(result: Comparison) -> None:
    verdicts = {(v.scenario, v.rule): v.difference for v in result.verdicts}
    assert set(verdicts) == {(s, r) for s in ("paper", "mooncake") for r in ("never", "ef")}
    lines = result.lines()
    for (scenario, rule), difference in verdicts.items():
        word = {1: "loses to", -1: "wins against", 0: "cannot be told from"}[difference.sign]
        assert any(
            line.startswith(f"{scenario}: learned {word} ")
            and f"{rule} by {difference.mean:+.2f} s [" in line
            for line in lines
        )
    # Everything remote is slower than earliest finish on a link that is shared.
    assert verdicts["paper", "ef"].mean > 0


def test_a_rule_alone_gives_no_lines(runner: EpisodeRunner) -> None:
    assert compare([SHORT], ROWS[:2], seeds=SEEDS[:1], split="test", runner=runner).lines() == []


def _made(values: dict[str, list[float]]) -> Comparison:
    """A comparison on made-up mean TTFTs per seed; the policy `agent` is the learned one."""
    blank = dict.fromkeys(FIGURE_NAMES, 0.0)
    outcomes = {
        (0, r): tuple(
            Outcome(
                {**blank, "ttft_mean_s": v},
                "x",
                (),
                (),
                np.zeros(len(TTFT_EDGES_S) - 1, int),
                None,
                None,
                None,
            )
            for v in each
        )
        for r, each in enumerate(values.values())
    }
    return Comparison(
        scenarios=(SHORT,),
        labels=("paper",),
        rows=tuple(Row(name, name) for name in values),
        facts=tuple(PolicyFacts(name == "agent", "h", (), ()) for name in values),
        seeds=range(2_000_000, 2_000_000 + len(next(iter(values.values())))),
        split="test",
        engine="simpy",
        reference=0,
        outcomes=outcomes,
    )


def test_lines_by_hand() -> None:
    noise = np.array([-0.2, 0.1, 0.0, 0.2, -0.1, 0.05, -0.05, 0.0])
    made = _made(
        {
            "agent": (5.0 + noise).tolist(),
            "better": (3.0 - noise).tolist(),
            "worse": (9.0 + 2 * noise).tolist(),
            "alike": (5.0 - 3 * noise).tolist(),
            "twin": (5.0 + noise).tolist(),
        }
    )
    loses, wins, alike, twin = made.lines()
    assert twin == "paper: agent is the same as twin (mean TTFT, 95% interval)"
    assert loses.startswith("paper: agent loses to better by +2.00 s [+1.")
    assert wins.startswith("paper: agent wins against worse by -4.00 s [-4.")
    assert alike.startswith("paper: agent cannot be told from alike by +0.00 s [-0.")
    assert made.best_rule(0) == 1


# ----------------------------------------------------------------------------------- what must not be compared


def test_seeds_that_a_policy_has_seen_are_refused(runner: EpisodeRunner) -> None:
    class Saw(Learned):
        seen_seeds = ((2_000_003, 2_000_004),)

    with pytest.raises(PrfaasError, match=r"policy saw: seed 2,000,003 was used to train or choose it"):
        compare([SHORT], [Row("saw", Saw)], seeds=SEEDS, split="test", runner=runner)


def test_trace_seconds_that_a_policy_has_seen_are_refused(runner: EpisodeRunner) -> None:
    whole = load_scenario("mooncake", overrides=["measure.horizon_s=60"])
    with pytest.raises(PrfaasError, match=r"trained on seconds 0 to 1200 of the trace .* from 0 to 60 s"):
        compare([whole], ROWS, seeds=SEEDS[:1], split="test", runner=runner)
    seen = compare([whole], ROWS[2:], seeds=SPLITS["training"][:1], split="training", runner=runner)
    assert seen.split == "training"


def test_the_replayed_slice_ends_with_slice_or_horizon() -> None:
    file = "bundled:mooncake_conversation_first_32min.jsonl"
    assert replayed_slice(SLICE) == (file, 1200.0, 1530.0)
    cut = load_scenario("mooncake", overrides=["workload.end_s=600", "measure.horizon_s=1920"])
    assert replayed_slice(cut) == (file, 0.0, 600.0)
    fast = load_scenario("mooncake", overrides=["workload.speed=2", "measure.horizon_s=100"])
    assert replayed_slice(fast) == (file, 0.0, 200.0)
    assert replayed_slice(SHORT) is None


def test_unknown_reference_and_no_seeds(runner: EpisodeRunner) -> None:
    with pytest.raises(PrfaasError, match="--reference 'x' is not among the policies: never, ef, learned"):
        compare([SHORT], ROWS, seeds=SEEDS, split="test", runner=runner, reference="x")
    with pytest.raises(PrfaasError, match="--seeds must be 1 or more"):
        compare([SHORT], ROWS, seeds=range(0), split="test", runner=runner)


def test_the_same_row_or_scenario_twice(runner: EpisodeRunner) -> None:
    with pytest.raises(PrfaasError, match="'never' is given 2 times"):
        rows_of(["never", "always", "never"], deployments=False)
    with pytest.raises(PrfaasError, match="same scenario is given twice"):
        compare([SHORT, SHORT], ROWS, seeds=SEEDS, split="test", runner=runner)


def test_default_rows_and_deployments() -> None:
    assert tuple(row.label for row in rows_of([], deployments=False)) == DEFAULT_POLICIES
    assert [row.label for row in rows_of(["static"], deployments=True)] == [
        "never@homogeneous",
        "always@naive",
        "static",
    ]


# ----------------------------------------------------------------------------------------------- output


def test_timelines_of_learned_best_rule_and_reference(result: Comparison, runner: EpisodeRunner) -> None:
    assert timeline_rows(result, ["never"]) == [0]
    picked = timeline_rows(result, [])
    assert picked[0] == 2
    assert 1 in picked
    with pytest.raises(PrfaasError, match="--timeline 'x' is not among the policies"):
        timeline_rows(result, ["x"])
    lines = run_timelines(result, [0], runner)
    assert set(lines) == {(0, 0), (1, 0)}
    assert len(lines[0, 0]["time_s"]) == 60


def test_the_plotted_distribution_is_that_of_the_requests(runner: EpisodeRunner) -> None:
    one = compare([SLICE], ROWS[1:2], seeds=SEEDS[:1], split="test", runner=runner)
    ttft_s = one.outcomes[0, 0][0].ttft_s
    assert ttft_s is not None
    x, y = ttft_distribution(one, 0, 0)
    for edge, share in list(zip(x, y, strict=True))[::50]:
        assert share == pytest.approx(float((ttft_s < edge).mean()), abs=1e-12)


@pytest.mark.parametrize("width", [90, 170])
def test_tables_show_every_policy_and_the_flags(result: Comparison, width: int) -> None:
    out = io.StringIO()
    tables.show(result, tables.Console(file=out, width=width))
    text = out.getvalue()
    for word in ("never", "ef", "learned", "paper", "mooncake", "P99", "rejec-", "one replayed trace"):
        assert word in text
    mean = result.own(0, 1, "ttft_mean_s").mean
    assert f"{mean:,.2f}" in text
    difference = result.difference(0, 0, 1, "ttft_mean_s")
    assert f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]" in text
    assert "means over seeds of each episode's figure" in text
    for line in result.lines():
        assert line in text


def test_saturation_is_flagged(runner: EpisodeRunner) -> None:
    load = load_scenario("paper", overrides=["measure.horizon_s=90", "workload.arrivals.rate_rps=3"])
    found = compare([load], ROWS[:2], seeds=SEEDS[:2], split="test", runner=runner)
    out = io.StringIO()
    tables.show(found, tables.Console(file=out, width=170))
    assert "\n * never " in out.getvalue()
    assert "* prefill saturated, of 2 seeds: never\n" in out.getvalue()
    assert "\n ef " in out.getvalue()
    assert "note: every policy and seed: open requests move the quantiles" in out.getvalue()


def test_command_writes_whole_results(tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "result"
    arguments = [
        "compare", "-s", "paper", "-s", "mooncake", "-p", "never", "-p", "earliest_finish", "--deployments",
        "--seeds", "2", "--jobs", "1", "--set", "measure.horizon_s=30", "--out", str(out),
    ]  # fmt: skip
    text = run(*arguments)
    assert "never@homogeneous" in text
    names = sorted(p.name for p in out.iterdir())
    assert names == [
        "compare.json",
        "curves.json",
        "metrics.json",
        "parts",
        "results.csv",
        "timeline_mooncake.png",
        "timeline_paper.png",
        "ttft_cdf_mooncake.png",
        "ttft_cdf_paper.png",
    ]
    for name in names:
        if name.endswith(".png"):
            assert (out / name).read_bytes().startswith(b"\x89PNG")
    content = json.loads((out / "metrics.json").read_text())
    assert [row["deployment"] for row in content["rows"]] == ["homogeneous", "naive", None, None]
    with (out / "results.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 4 * 2
    first = (out / "results.csv").read_text()
    run(*arguments, "--force")
    assert (out / "results.csv").read_text() == first


# ------------------------------------------------------------------------------------- going on with one


def planned(**changes: Any) -> ComparePlan:
    fields: dict[str, Any] = {"seeds": SEEDS, "split": "test", "engine": "simpy"}
    return prepare(**{"scenarios": [SHORT, SLICE], "rows": ROWS[1:], **fields, **changes})


@pytest.fixture(scope="module")
def kept(runner: EpisodeRunner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    """A comparison with its folder."""
    out = tmp_path_factory.mktemp("compare") / "c"
    return out, run_compare(planned(), runner, CompareFolder(out, planned()))


def test_what_was_kept_is_what_was_run(kept: tuple[Path, Comparison], runner: EpisodeRunner) -> None:
    out, found = kept
    direct = run_compare(planned(), runner)
    assert found.json_text() == direct.json_text()  # the intervals of the trace come from every request
    assert found.csv_text() == direct.csv_text()
    for key, outcomes in direct.outcomes.items():
        for mine, theirs in zip(found.outcomes[key], outcomes, strict=True):
            assert np.array_equal(mine.ttft_counts, theirs.ttft_counts)
    assert len(list((out / PARTS).iterdir())) == 2 * len(SEEDS)


def test_a_stopped_comparison_goes_on_to_the_same_result(
    kept: tuple[Path, Comparison], tmp_path: Path
) -> None:
    reference, whole = kept
    out = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        run_compare(planned(), Counting(7), CompareFolder(out, planned()))
    first = sorted((out / PARTS).iterdir())
    assert [p.name for p in first] == [f"{SHORT.hash}-{seed}.json" for seed in SEEDS[:3]]  # 7 // 2 policies
    stamps = [p.stat().st_mtime_ns for p in first]
    rest = Counting()
    found = run_compare(planned(), rest, CompareFolder(out, planned()))
    assert rest.asked == 2 * 2 * len(SEEDS) - 6
    assert [p.stat().st_mtime_ns for p in first] == stamps
    assert found.json_text() == whole.json_text()
    for path in (reference / PARTS).iterdir():
        assert (out / PARTS / path.name).read_text() == path.read_text()
    again = Counting()
    swapped = planned(scenarios=[SLICE, SHORT], reference="learned")  # neither moves an outcome
    run_compare(swapped, again, CompareFolder(out, swapped))
    assert again.asked == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seeds": range(2_000_000, 2_000_006)}, r"seeds\.count: 5 there, 6 now"),
        ({"engine": "compiled"}, 'engine: "simpy" there, "compiled" now'),
        ({"rows": ROWS}, r"policies\.never: null there"),
        ({"scenarios": [SHORT]}, r"scenarios\.mooncake: .* there, null now"),
        (
            {"scenarios": [load_scenario("paper", overrides=["measure.horizon_s=61"]), SLICE]},
            r"scenarios\.paper\.scenario_hash: ",
        ),
    ],
)
def test_another_configuration_is_refused_by_field(
    kept: tuple[Path, Comparison], changes: dict[str, Any], field: str
) -> None:
    out, _ = kept
    before = sorted(p.name for p in out.rglob("*"))
    with pytest.raises(PrfaasError, match=rf"holds a comparison of another configuration: {field}") as caught:
        CompareFolder(out, planned(**changes))
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in out.rglob("*")) == before


def test_broken_and_foreign_parts_are_named(kept: tuple[Path, Comparison], tmp_path: Path) -> None:
    out, _ = kept
    folder = CompareFolder(tmp_path / "c", planned())
    mine = folder.file_of(folder.name(0, SEEDS[0]))
    mine.write_text('{"outcomes": {}}')
    with pytest.raises(PrfaasError, match=r"is not a finished part .*remove it to run it again"):
        folder.read(0, SEEDS[0])
    mine.write_text((out / PARTS / f"{SHORT.hash}-{SEEDS[1]}.json").read_text())
    with pytest.raises(PrfaasError, match="is not the part scenario paper, seed 2000000"):
        folder.read(0, SEEDS[0])


class Fails(Learned):
    """A policy with a fault of its own."""

    learned = False
    seen_seeds = ()
    seen_slices = ()

    def decide(self, telemetry: Telemetry) -> Decision:
        raise ZeroDivisionError("no margin")


def test_an_error_names_scenario_seed_and_policy(runner: EpisodeRunner) -> None:
    with pytest.raises(
        PrfaasError, match="scenario paper, seed 2000000, policy bad: ZeroDivisionError: no margin"
    ):
        compare([SHORT], [Row("bad", Fails)], seeds=SEEDS, split="test", runner=runner)


_PROGRAM = """
import sys
import typer
from prfaas_trainings import commands
if __name__ == "__main__":
    app = typer.Typer()
    app.command("compare")(commands.compare)
    app(sys.argv[1:])
"""


def test_a_signal_stops_it_and_the_printed_command_goes_on(tmp_path: Path, run: Callable[..., str]) -> None:
    """Ctrl-C of a real run in two processes, then the rest: the same files as of a run in one go."""
    program, out, whole = tmp_path / "program.py", tmp_path / "a folder", tmp_path / "whole"
    program.write_text(_PROGRAM)
    arguments = ["-p", "earliest_finish", "-p", "dual_timescale", "--seeds", "5", "--engine", "simpy"]
    arguments += ["--set", "measure.horizon_s=600"]
    command = [sys.executable, str(program), *arguments, "--jobs", "2", "--out", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as process:
        deadline = time.monotonic() + 120
        while not list(out.glob("parts/*.json")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    kept = list(out.glob("parts/*"))
    assert 1 <= len(kept) < 5
    assert f"{len(kept)} of 5 parts are finished and kept" in stderr
    line = next(text for text in stderr.splitlines() if text.startswith("go on with: "))
    words = shlex.split(line.removeprefix("go on with: "))
    assert words[:2] == ["prfaas", "compare"]
    assert not (out / "metrics.json").exists()
    run(*words[1:])
    run("compare", *arguments, "--jobs", "1", "--out", str(whole))
    for name in ("results.csv", "metrics.json", "curves.json"):
        assert (out / name).read_text() == (whole / name).read_text()


# -------------------------------------------------------------------------------------------- by hand


def test_cost_by_hand() -> None:
    made = _made({"a": [2.0] * 5})
    figures = dict.fromkeys(FIGURE_NAMES, 0.0) | {
        "ttft_mean_s": 2.0,
        "egress_mean_bps": 5e9,  # 60 s: 300 Gbit, at 0.01 s each 3 s, over 30 requests 0.1 s
        "conversions": 3.0,  # at 5 s each 15 s, over 30 requests 0.5 s
        "rejected": 1.0,
        "aborted": 1.0,  # two at 60 s, over 30 requests 4 s
    }
    counts = np.zeros(len(TTFT_EDGES_S) - 1, int)
    counts[5] = 30
    blank = made.outcomes[0, 0][0]
    outcome = dataclasses.replace(blank, figures=figures, ttft_counts=counts)
    cost = dataclasses.replace(made, outcomes={(0, 0): (outcome,) * 5}).cost(0, 0)
    means = {name: found.mean for name, found in cost.items()}
    assert means == pytest.approx(
        {"ttft_s": 2.0, "egress_s": 0.1, "conversion_s": 0.5, "lost_s": 4.0, "total_s": 6.6}
    )


def test_who_a_report_is_about() -> None:
    with_agent = _made({"rule": [1.0] * 5, "agent": [2.0] * 5, "other": [3.0] * 5})
    assert with_agent.subjects == (1,)
    assert [(r, k, v.word) for r, k, v in with_agent.duels(0)] == [
        (1, 0, "loses to"),
        (1, 2, "wins against"),
    ]
    rules = dataclasses.replace(
        _made({"elsewhere": [1.0], "mine": [2.0]}),
        rows=(Row("elsewhere", "never", "homogeneous"), Row("mine", "never")),
    )
    assert rules.subjects == (1,)


def test_ttft_of_a_timeline_by_hand() -> None:
    blank = _made({"a": [1.0]}).outcomes[0, 0][0]
    outcome = dataclasses.replace(
        blank,
        timeline={"time_s": np.array([0.0, 1.0, 2.0])},
        arrival_s=np.array([0.0, 0.9, 1.0, 2.5, 7.0]),
        ttft_s=np.array([1.0, 3.0, 5.0, np.nan, 8.0]),
    )
    assert _ttft_by_row(outcome).tolist() == [2.0, 5.0, 8.0]
    silent = dataclasses.replace(outcome, ttft_s=np.full(5, np.nan))
    assert np.isnan(_ttft_by_row(silent)).all()


def test_json_on_standard_output(run: Callable[..., str]) -> None:
    text = run(
        "compare", "-p", "never", "-p", "always", "--seeds", "1", "--jobs", "1", "--json",
        "--set", "measure.horizon_s=20", "--split", "validation", "--reference", "always",
    )  # fmt: skip
    content: dict[str, Any] = json.loads(text)
    assert content["split"] == "validation"
    assert content["seeds"] == {"first": 1_000_000, "count": 1}
    interval = content["scenarios"][0]["results"]["never"]["difference_to_reference"]["ttft_mean_s"]
    assert interval["low"] is None
    assert math.isfinite(interval["mean"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--first-seed", "5"], "seed 5 is not a test seed"),
        (["--split", "validation", "--first-seed", "2000000"], "is not a validation seed"),
        (["--engine", "magic"], "--engine is 'magic'; allowed"),
        (["--timeline", "never"], "--timeline needs --out"),
        (["--report"], "--report needs --out"),
        (["-p", "nobody"], "unknown policy 'nobody'"),
        (["-s", "nowhere"], "unknown scenario 'nowhere'"),
        (["-p", "never@nowhere"], "unknown deployment 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(run: Callable[..., str], arguments: list[str], message: str) -> None:
    with pytest.raises(PrfaasError, match=message) as caught:
        run("compare", "--jobs", "1", "--seeds", "1", *arguments)
    assert "\n" not in str(caught.value)


def test_parse_row_is_used_for_files_with_an_at_sign() -> None:
    assert parse_row("ppo:path=a@b/policy.zip").deployment is None
