"""`prfaas sweep`: whole cells, resumed exactly, refused when it is another one, errors and Ctrl-C named."""

from __future__ import annotations

import csv
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.telemetry import Telemetry
from prfaas_trainings.compare import compare
from prfaas_trainings.episodes import FIGURE_NAMES, EpisodeRunner, parse_row
from prfaas_trainings.parts import first_difference
from prfaas_trainings.statistics import seed_interval
from prfaas_trainings.study import Study, study_of_options
from prfaas_trainings.sweep import CELLS, Plan, SweepFolder, SweepResult, prepare, run_sweep
from prfaas_trainings.sweep_plots import spans_a_decade

from .conftest import _APP, Counting, heed_ctrl_c

LINK = "deployment.links.0.capacity_bps"
SEEDS = range(2_000_000, 2_000_005)
OPTIONS = [f"{LINK}=5Gbps,100Gbps", "measure.horizon_s=60"]


def study(*policies: str, options: list[str] = OPTIONS, **fields: Any) -> Study:
    return study_of_options("paper", options, policies or ("static", "earliest_finish"), **fields)


def planned(chosen: Study, seeds: range = SEEDS) -> Plan:
    return prepare(chosen, seeds=seeds, split="test", engine="simpy")


@pytest.fixture(scope="module")
def swept(runner: EpisodeRunner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """Two cells, two policies, five seeds."""
    plan, out = planned(study()), tmp_path_factory.mktemp("sweep") / "s"
    run_sweep(plan, SweepFolder(out, plan), runner)
    return plan, out


def test_every_cell_is_what_compare_says(swept: tuple[Plan, Path], runner: EpisodeRunner) -> None:
    plan, out = swept
    result = SweepResult.of(plan, SweepFolder(out, plan))
    scenarios = [cell.scenario for cell in plan.cells]
    rows = [parse_row(p) for p in ("static", "earliest_finish")]
    for s, scenario in enumerate(scenarios):
        other = compare([scenario], rows, seeds=SEEDS, split="test", runner=runner, engine="simpy")
        for r in range(2):
            for name in FIGURE_NAMES:
                mine, theirs = result.values(s, r, name), other.values(0, r, name)
                assert np.array_equal(mine, theirs, equal_nan=True)
                assert result.own(s, r, name) == other.own(0, r, name)
            assert result.difference(s, r, "ttft_mean_s") == other.difference(0, r, 0, "ttft_mean_s")
    thin, fat = (result.own(s, 1, "link_use").mean for s in (0, 1))
    assert thin > 5 * fat


def test_csv_has_a_row_per_cell_policy_and_seed(swept: tuple[Plan, Path]) -> None:
    plan, out = swept
    rows = list(csv.DictReader(SweepResult.of(plan, SweepFolder(out, plan)).csv_text().splitlines()))
    keys = {(r[LINK], r["policy"], int(r["seed"])) for r in rows}
    assert keys == {
        (b, p, k) for b in ("5Gbps", "100Gbps") for p in ("static", "earliest_finish") for k in SEEDS
    }
    assert len(rows) == 20
    assert {r["scenario_hash"] for r in rows} == {c.scenario.hash for c in plan.cells}
    for seed in SEEDS:  # the link does not move the arrivals
        assert len({r["arrivals_hash"] for r in rows if int(r["seed"]) == seed}) == 1
    for name in (
        "ttft_p99_s",
        "goodput_rps",
        "egress_mean_bps",
        "link_use",
        "rejected",
        "aborted",
        "open_at_end",
    ):
        assert all(float(r[name]) >= 0 for r in rows)


def test_json_says_what_was_swept_and_how(swept: tuple[Plan, Path]) -> None:
    plan, out = swept
    result = SweepResult.of(plan, SweepFolder(out, plan))
    content = json.loads(result.json_text())
    assert content["seeds"] == {"split": "test", "first": 2_000_000, "count": 5}
    assert content["versions"]["prfaas-env"]
    assert [c["axes"][LINK] for c in content["results"]] == ["5Gbps", "100Gbps"]
    entry = content["results"][0]["policies"]["earliest_finish"]
    by_hand = seed_interval(result.values(0, 1, "ttft_mean_s") - result.values(0, 0, "ttft_mean_s"))
    assert entry["difference_to_reference"]["ttft_mean_s"]["low"] == by_hand.low
    assert content["policies"]["static"]["policy_hash"] == plan.facts[0].hash


def test_a_stopped_sweep_goes_on_to_the_same_result(swept: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, reference = swept
    out = tmp_path / "s"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, SweepFolder(out, plan), Counting(13))
    assert [f.name for f in (out / CELLS).iterdir()] == ["0000.json"]  # the second cell was not whole
    first = (out / CELLS / "0000.json").stat().st_mtime_ns
    rest = Counting()
    run_sweep(plan, SweepFolder(out, plan), rest)
    assert rest.asked == 10
    assert (out / CELLS / "0000.json").stat().st_mtime_ns == first
    for name in ("0000.json", "0001.json"):
        assert (out / CELLS / name).read_text() == (reference / CELLS / name).read_text()
    again = Counting()
    run_sweep(plan, SweepFolder(out, plan), again)
    assert again.asked == 0


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (lambda: planned(study(), range(2_000_000, 2_000_006)), r"seeds\.count: 5 there, 6 now"),
        (lambda: planned(study(), range(2_000_001, 2_000_006)), r"seeds\.first: 2000000 there, 2000001 now"),
        (lambda: planned(study("static", "always")), r"policies\.always: null there"),
        (
            lambda: planned(study("static:threshold_tokens=9", "earliest_finish")),
            r"policies\.static:threshold",
        ),
        (
            lambda: planned(study(options=[f"{LINK}=5Gbps,50Gbps", "measure.horizon_s=60"])),
            rf'cells\.1\.cell: "{LINK}=100Gbps" there, "{LINK}=50Gbps" now',
        ),
        (
            lambda: planned(study(options=[f"{LINK}=5Gbps,100Gbps", "measure.horizon_s=61"])),
            r"cells\.0\.scenario_hash: ",
        ),
        (
            lambda: planned(study(options=["transport.pipelining=true,false", "measure.horizon_s=60"])),
            r"study\.axes\.0: ",
        ),
        (
            lambda: prepare(study(), seeds=SEEDS, split="test", engine="compiled"),
            'engine: "simpy" there, "compiled" now',
        ),
    ],
)
def test_another_configuration_in_the_folder_is_refused_by_field(
    swept: tuple[Plan, Path], changed: Callable[[], Plan], field: str
) -> None:
    _, out = swept
    before = sorted(p.name for p in out.rglob("*"))
    with pytest.raises(PrfaasError, match=rf"holds a sweep of another configuration: {field}") as caught:
        SweepFolder(out, changed())
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in out.rglob("*")) == before


def test_first_difference_by_hand() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) is None
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "a.1.b: 3 there, 2 now"
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == "a: 2 entries there, 1 entries now"
    assert first_difference({"a": 1}, {"a": 1, "z": 0}) == "z: 0 there, null now"


def test_force_and_foreign_folders(swept: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, _ = swept
    out = tmp_path / "s"
    folder = SweepFolder(out, plan)
    (out / CELLS / "0001.json").write_text("{}")
    with pytest.raises(PrfaasError, match=r"0001\.json: is not a finished cell .*remove it"):
        folder.read(plan.cells[1])
    SweepFolder(out, planned(study("static")), force=True)
    assert not list((out / CELLS).iterdir())
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(PrfaasError, match=r"is not empty and holds no sweep\.json"):
            SweepFolder(mine, plan, force=force)
    assert (mine / "thesis.txt").exists()


def test_a_cell_of_something_else_is_refused(swept: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, out = swept
    folder = SweepFolder(tmp_path / "s", plan)
    folder.file(plan.cells[1]).write_text((out / CELLS / "0000.json").read_text())
    with pytest.raises(PrfaasError, match=rf"is not the cell {LINK}=100Gbps"):
        folder.read(plan.cells[1])


class FailsOnFatLinks:
    """A policy with a fault of its own."""

    constant = True

    def reset(self, context: PolicyContext) -> None:
        if context.scenario.deployment.links[0].capacity_bps > 50e9:
            raise ZeroDivisionError("the link is too good")

    def decide(self, telemetry: Telemetry) -> Decision:
        return Decision.same(1, margin_s=0.0)


def test_an_error_names_its_cell_and_keeps_the_others(runner: EpisodeRunner, tmp_path: Path) -> None:
    plan = planned(study("static", f"{__name__}:FailsOnFatLinks"))
    out = tmp_path / "s"
    with pytest.raises(
        PrfaasError,
        match=rf"cell {LINK}=100Gbps, policy .*FailsOnFatLinks, seed 2000000: ZeroDivisionError: the link is too good",
    ) as caught:
        run_sweep(plan, SweepFolder(out, plan), runner)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert [f.name for f in (out / CELLS).iterdir()] == ["0000.json"]


class OneSiteOnly:
    """A "learned" policy for one PD cluster."""

    constant = True
    learned = True
    fingerprint = "0123456789ab"
    seen_seeds: tuple[tuple[int, int], ...] = ((0, 1_000_000),)
    seen_slices: tuple[Any, ...] = ()

    def reset(self, context: PolicyContext) -> None:
        if context.schema.n_pd != 1:
            raise PrfaasError("policy x: trained on other telemetry: added: pd1.arrivals_valid")

    def decide(self, telemetry: Telemetry) -> Decision:
        return Decision.same(1, margin_s=0.0)


def test_a_policy_that_does_not_fit_a_cell_is_refused_before_anything_runs() -> None:
    cases = ({"name": "one"}, {"name": "two", "scenario": "two_regions"})
    chosen = Study(name="s", cases=cases, policies=(f"learned={__name__}:OneSiteOnly",))
    with pytest.raises(PrfaasError, match=r"cell case=two, policy learned: .*added: pd1\.arrivals_valid"):
        planned(chosen)
    with pytest.raises(PrfaasError, match=r"cell case=one, policy learned: .*seed 0 was used to train"):
        prepare(
            chosen.model_copy(update={"cases": chosen.cases[:1]}),
            seeds=range(2),
            split="test",
            engine="simpy",
        )


def test_a_trace_has_means_without_intervals(runner: EpisodeRunner, tmp_path: Path) -> None:
    chosen = study_of_options(
        "mooncake", ["measure.horizon_s=30", "transport.pipelining=true,false"], ["static"]
    )
    plan = planned(chosen)
    folder = SweepFolder(tmp_path / "s", plan)
    run_sweep(plan, folder, runner)
    found = SweepResult.of(plan, folder).own(0, 0, "ttft_mean_s")
    assert found.mean > 0
    assert found.low is None


def test_unknown_reference_and_policy() -> None:
    with pytest.raises(PrfaasError, match="reference 'never' is not among the policies: static"):
        planned(study("static", reference="never"))
    with pytest.raises(PrfaasError, match="unknown policy 'statik'"):
        planned(study("statik"))


# --------------------------------------------------------------------------------------- the command


ARGUMENTS = [
    "sweep", "--scenario", "paper", "--set", "measure.horizon_s=60", "--set", f"{LINK}=5Gbps,100Gbps",
    "--policy", "static", "--policy", "earliest_finish", "--seeds", "5", "--engine", "simpy", "--jobs", "1",
]  # fmt: skip


def test_the_command_writes_shows_and_draws(run: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "s"
    text = run(*ARGUMENTS, "--out", str(out), "--metric", "ttft_mean_s", "--metric", "link_use")
    assert "capacity_bps" in text
    assert "5Gbps" in text
    assert "[+" in text or "[-" in text  # a paired interval
    names = {p.name for p in out.iterdir()}
    assert names == {"cells", "sweep.json", "results.csv", "metrics.json", "ttft_mean_s.png", "link_use.png"}
    assert (out / "ttft_mean_s.png").read_bytes()[:4] == b"\x89PNG"
    again = run(*ARGUMENTS, "--out", str(out), "--metric", "ttft_mean_s", "--json")  # nothing is run again
    assert json.loads(again)["results"][0]["cell"] == f"{LINK}=5Gbps"


def test_ctrl_c_says_how_to_go_on_and_that_command_does(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a folder"
    original = EpisodeRunner.each

    def stopped(self: EpisodeRunner, jobs: Any) -> Iterator[Any]:
        for k, found in enumerate(original(self, jobs)):
            if k == 12:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(EpisodeRunner, "each", stopped)
    result = CliRunner().invoke(_APP, [*ARGUMENTS, "--out", str(out)])
    assert result.exit_code == 130
    assert "1 of 2 cells are finished and kept" in result.stderr
    line = next(text for text in result.stderr.splitlines() if text.startswith("go on with: "))
    words = shlex.split(line.removeprefix("go on with: "))
    assert words[:2] == ["prfaas", "sweep"]
    assert not (out / "results.csv").exists()
    monkeypatch.setattr(EpisodeRunner, "each", original)
    run(*words[1:])
    assert (out / "results.csv").exists()


_PROGRAM = """
import sys
import typer
from prfaas_trainings import commands
if __name__ == "__main__":
    app = typer.Typer()
    app.command("sweep")(commands.sweep)
    app(sys.argv[1:])
"""


def test_a_signal_stops_the_processes(tmp_path: Path) -> None:
    """Ctrl-C of a real run in two processes: exit 130, whole cells only, and the rest runs afterwards."""
    program, out = tmp_path / "program.py", tmp_path / "s"
    program.write_text(_PROGRAM)
    arguments = ["--set", "measure.horizon_s=600", "--set", "workload.arrivals.rate_rps=0.5,1,1.5,2,2.5"]
    arguments += ["--policy", "dual_timescale", "--seeds", "5", "--engine", "simpy", "--jobs", "2"]
    command = [sys.executable, str(program), *arguments, "--out", str(out), "--metric", "ttft_mean_s"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as process:
        deadline = time.monotonic() + 120
        while (
            not list(out.glob("cells/0000.json")) and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "go on with: prfaas sweep" in stderr
    assert "Traceback" not in stderr
    kept = sorted(out.glob("cells/*"))
    assert 1 <= len(kept) < 5
    for path in kept:
        json.loads(path.read_text())
    assert not list(out.rglob("*.tmp"))


def test_parallel_cells_are_those_of_one_process(swept: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, reference = swept
    parallel = EpisodeRunner(2)
    try:
        run_sweep(plan, SweepFolder(tmp_path / "s", plan), parallel)
    finally:
        parallel.close()
    for name in ("0000.json", "0001.json"):
        assert (tmp_path / "s" / CELLS / name).read_text() == (reference / CELLS / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "magic"], "--engine is 'magic'"),
        (["--study", "link", "--set", "a=1,2"], "--set: belongs to a sweep without --study"),
        (
            ["--study", "link", "--metric", "nothing"],
            "study link: .*unknown figure 'nothing'",
        ),
        (["--set", "a=1,2", "--first-seed", "5"], "seed 5 is not a test seed"),
        (["--set", "measure.horizon=1,2"], "cell measure.horizon=1: .*unknown field 'horizon'"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(_APP, ["sweep", *arguments, "--out", str(tmp_path / "s")])
    assert isinstance(result.exception, PrfaasError)
    assert "\n" not in str(result.exception)
    assert re.search(message, str(result.exception)), result.exception
    assert not (tmp_path / "s").exists()


def test_log_axes_where_values_span_a_decade() -> None:
    assert spans_a_decade([1.0, 10.0])
    assert not spans_a_decade([1.0, 9.9])
    assert not spans_a_decade([0.0, 100.0])
    assert not spans_a_decade([])
