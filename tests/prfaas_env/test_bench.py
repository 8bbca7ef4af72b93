"""`prfaas bench`: what it measures and writes, at tiny sizes. No test depends on how fast anything is."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from prfaas_env import bench
from prfaas_env.base import PrfaasError
from prfaas_env.bench import Figure, Figures, Report
from prfaas_env.cli import app
from prfaas_env.scenarios import load_scenario
from prfaas_env.workload.means import mean_rate_rps

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def invoke(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert isinstance(result.exception, PrfaasError), (result.output, result.exception)
    message = str(result.exception)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Two benchmarks that measure nothing; gives the calls."""
    calls: list[tuple[str, bool]] = []

    def benchmark(name: str) -> Callable[[bool], Figures]:
        def run(quick: bool) -> Figures:
            calls.append((name, quick))
            fast = Figure(f"{name} speed", "steps/CPU-s", (1.0, 3000.0, 2.0), "highest", at_least=2500.0)
            slow = Figure(f"{name} cost", "CPU ms", (5.0,), "lowest", at_most=2.5)
            return {"fast": fast, "slow": slow}

        return run

    monkeypatch.setattr(bench, "BENCHMARKS", {name: benchmark(name) for name in ("one", "two")})
    monkeypatch.setattr(bench.metadata, "entry_points", lambda group: [])
    return calls


# ------------------------------------------------------------------------------------------- figures


def test_a_figure_is_the_sample_that_was_chosen() -> None:
    samples = (3.0, 1.0, 2.0, 10.0)
    assert Figure("x", "s", samples, "highest").value == 10.0
    assert Figure("x", "s", samples, "lowest").value == 1.0
    assert Figure("x", "s", samples, "median").value == 2.5
    assert Figure("x", "s", samples, "median").spread == (1.0, 2.5, 10.0)


def test_targets() -> None:
    speed, cost = (4.0, 5.0), (2.0, 3.0)
    assert Figure("x", "s", speed, "highest").met is None
    assert Figure("x", "s", speed, "highest", at_least=5.0).met is True
    assert Figure("x", "s", speed, "highest", at_least=5.1).met is False
    assert Figure("x", "s", cost, "lowest", at_most=2.0).met is True
    assert Figure("x", "s", cost, "lowest", at_most=1.9).met is False
    assert bench.target(Figure("x", "s", speed, "highest", at_least=1e6)) == ">= 1,000,000"
    assert bench.target(Figure("x", "s", cost, "lowest", at_most=2.0)) == "<= 2"


def test_json_of_a_figure() -> None:
    content = Figure("x", "s", (4.0, 5.0, 1.0), "highest", at_least=5.0).as_json()
    assert content == {
        "what": "x",
        "unit": "s",
        "value": 5.0,
        "chosen": "highest",
        "min": 1.0,
        "median": 4.0,
        "max": 5.0,
        "samples": [4.0, 5.0, 1.0],
        "at_least": 5.0,
        "at_most": None,
        "met": True,
    }


# ------------------------------------------------------------------------------- what is measured


def sensible(figures: Figures) -> None:
    for figure in figures.values():
        assert np.isfinite(figure.samples).all()
        assert min(figure.samples) > 0


def test_engines() -> None:
    figures = bench.engine_figures(60, 20, 2)
    sensible(figures)
    assert set(figures) == {"compiled_rps", "simulate_rps", "simpy_rps", "ratio"}
    compiled, simpy = figures["compiled_rps"].samples, figures["simpy_rps"].samples
    assert figures["ratio"].samples == pytest.approx([a / b for a, b in zip(compiled, simpy, strict=True)])


def test_the_hard_world_has_everything_on() -> None:
    scenario = bench.hard_world()
    assert len(scenario.deployment.prfaas) == len(scenario.deployment.pd) == 2
    assert scenario.prefix_pool is not None
    world = bench.draw_world(scenario, 0, n_requests=300)
    assert world.requests.block_tokens > 0
    assert len(world.faults) > 0
    assert world.give_up_ns is not None
    assert world.jitter_ns is not None
    assert scenario.faults.deadline_s is not None
    assert all(link.flow_limit_bps < float("inf") for link in scenario.deployment.links)
    figures = bench.hard_figures(60, 20, 2)
    assert figures["compiled_rps"].at_least == 3e5
    assert all(x > 0 for figure in figures.values() for x in figure.samples)


def test_scalar_env() -> None:
    figures = bench.env_figures({"compiled": 5, "simpy": 3}, 2)
    sensible(figures)
    assert figures["compiled_steps"].at_least == 25_000
    assert len(figures["simpy_reset_ms"].samples) == 2


def test_batched_env() -> None:
    figures = bench.vector_figures((1, 3), 30, 2, 2)
    sensible(figures)
    assert list(figures) == ["wall_1", "cpu_1", "reset_1_ms", "wall_3", "cpu_3", "reset_3_ms"]
    assert all(f.met is None for f in figures.values())  # only 256 envs have a target


def test_growth_and_memory() -> None:
    figures = bench.growth_figures(40, 2, 2.0, (12, 24))
    sensible(figures)
    small, large = figures["cost_12_us"].samples, figures["cost_24_us"].samples
    assert figures["cost_24_ratio"].samples == pytest.approx(
        [b / a for a, b in zip(small, large, strict=True)]
    )
    assert figures["hour_peak_mib"].at_most == 1024
    assert "2 s at 24 instances" in figures["hour_peak_mib"].what


@pytest.mark.parametrize("n", bench.GROWTH_INSTANCES)
def test_a_larger_deployment_has_equal_load(n: int) -> None:
    paper = load_scenario("paper")
    larger = bench.scaled(paper, n, 2.5)
    d = larger.deployment
    counts = d.prfaas[0].n_instances, d.pd[0].n_prefill, d.pd[0].n_decode
    assert sum(counts) == n
    assert counts == pytest.approx((4 * n / 12, 3 * n / 12, 5 * n / 12), abs=1)
    assert mean_rate_rps(larger.workload) == pytest.approx(2.5 * n / 12)
    assert d.links[0].capacity_bps == pytest.approx(100e9 * n / 12)
    if n == 12:
        assert larger.hash == paper.hash


def test_peak_memory_sees_an_allocation() -> None:
    code = """
import sys
import numpy as np
from prfaas_env.bench import peak_rss_bytes
before = peak_rss_bytes()
np.ones(int(sys.argv[1]))
sys.stdout.write(f"[{before}, {peak_rss_bytes()}]")
"""
    before, after = bench._child(code, 16 * 2**20)
    assert 100 * 2**20 < after - before < 160 * 2**20


def test_the_first_step_is_taken_with_cold_and_with_warm_code(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[str] = []

    def child(code: str, *arguments: Any, cache: str) -> list[float]:
        assert Path(cache).is_dir()
        cold = cache not in caches
        caches.append(cache)
        return [30.0, 31.0] if cold else [1.0, 1.5]

    monkeypatch.setattr(bench, "_child", child)
    figures = bench.start_figures(2, 3)
    assert len(set(caches)) == 2
    assert len(caches) == 2 * (1 + 3)
    assert figures["cold_cpu_s"].samples == (30.0, 30.0)
    assert figures["cold_wall_s"].value == 31.0
    assert figures["warm_cpu_s"].samples == (1.0,) * 6
    assert figures["warm_cpu_s"].met is True
    assert not any(Path(cache).exists() for cache in caches)


def test_the_first_step_in_a_fresh_process() -> None:
    cpu_s, wall_s = bench._child(bench._FIRST_STEP, "paper")
    assert cpu_s > 0
    assert wall_s > 0


def test_a_failing_child_is_one_line() -> None:
    with pytest.raises(PrfaasError, match=r"exit code 1: ZeroDivisionError: division by zero$"):
        bench._child("1 / 0")


def test_masked_actions_are_legal_and_reach_everything() -> None:
    random = np.random.default_rng(0)
    masks = np.ones((400, 2, 13 + 3), dtype=np.bool_)
    masks[:, 0, -3:] = (False, True, True)
    masks[:, 1, -3:] = (False, True, False)
    actions = bench.masked_actions(random, masks.reshape(400, -1), 2)
    assert actions.shape == (400, 4)
    assert [set(column.tolist()) for column in actions.T] == [set(range(13)), {1, 2}, set(range(13)), {1}]


# -------------------------------------------------------------------------------------- running


def test_every_benchmark_of_this_package_is_listed() -> None:
    assert bench.benchmark_names()[:6] == ["engine", "hard", "growth", "env", "vector", "start"]


def test_all_run_in_order_or_one_alone(fake: list[tuple[str, bool]]) -> None:
    said: list[str] = []
    report = bench.run_benchmarks(quick=True, say=said.append)
    assert fake == [("one", True), ("two", True)]
    assert said == ["measuring one", "measuring two"]
    assert list(report.found) == ["one", "two"]
    fake.clear()
    assert list(bench.run_benchmarks(["two"]).found) == ["two"]
    assert fake == [("two", False)]


def _entry(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, value, "prfaas.benchmarks")


def test_benchmarks_of_other_rooms(fake: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [_entry("theirs", f"{__name__}:other_room"), _entry("lacking", "no_such_package.bench:run")]
    monkeypatch.setattr(bench.metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(metadata.EntryPoint, "load", _load)
    report = bench.run_benchmarks()
    assert list(report.found) == ["one", "two", "theirs"]
    assert report.found["theirs"]["x"].value == 7.0
    assert list(report.skipped) == ["lacking"]
    assert "no_such_package" in report.skipped["lacking"]
    assert "Not measured: lacking (No module named 'no_such_package')." in bench.markdown(report)
    with pytest.raises(PrfaasError, match="benchmark 'lacking' cannot be loaded: No module named"):
        bench.run_benchmarks(["lacking"])


def _load(entry: metadata.EntryPoint) -> Any:
    if entry.name == "theirs":
        return other_room
    raise ModuleNotFoundError("No module named 'no_such_package'")


def other_room(quick: bool) -> Figures:
    return {"x": Figure("theirs", "s", (7.0,), "lowest")}


def test_an_unknown_benchmark_names_the_known_ones(fake: list[tuple[str, bool]]) -> None:
    with pytest.raises(PrfaasError, match="unknown benchmark 'three'; known: one, two"):
        bench.run_benchmarks(["one", "three"])
    assert fake == []


def test_the_report_tells_versions_and_not_the_machine(fake: list[tuple[str, bool]]) -> None:
    text = json.dumps(bench.run_benchmarks().as_json())
    machine = json.loads(text)["machine"]
    assert machine["numpy"] == np.__version__
    assert machine["cores"] >= 1
    assert machine["cpu"]
    assert {"python", "numba", "load_average"} <= set(machine)
    for secret in (socket.gethostname(), str(Path.home()), str(Path.cwd())):
        assert secret not in text


# ------------------------------------------------------------------------------------- the command


def test_table_and_files(fake: list[tuple[str, bool]], tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = invoke("--quick", "--only", "one", "--out", out)
    assert result.exit_code == 0, result.output
    assert fake == [("one", True)]
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.count("│") > 5}
    for piece in ("3,000", "1 / 2 / 3,000", ">= 2,500", "met"):
        assert piece in lines["one speed"]
    for piece in ("5", "<= 2.5", "missed"):
        assert piece in lines["one cost"]
    content = json.loads(out.read_text())
    assert content["quick"] is True
    assert content["benchmarks"]["one"]["fast"]["samples"] == [1.0, 3000.0, 2.0]
    assert content["benchmarks"]["one"]["slow"]["met"] is False


def test_json(fake: list[tuple[str, bool]]) -> None:
    result = invoke("--json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["benchmarks"]) == ["one", "two"]
    assert "measuring one" in result.stderr


def test_mistakes_are_found_before_anything_is_measured(fake: list[tuple[str, bool]], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no markers\n")
    assert "unknown benchmark 'x'" in refused("--only", "x")
    assert "does not exist" in refused("--out", tmp_path / "none" / "x.json")
    assert "needs a whole run" in refused("--write-docs", page, "--quick")
    assert "needs a whole run" in refused("--write-docs", page, "--only", "one")
    assert "<!-- bench: begin -->" in refused("--write-docs", page)
    assert "cannot be read" in refused("--write-docs", tmp_path / "none.md")
    assert page.read_text() == "no markers\n"
    assert fake == []


def test_the_page_gets_the_table_between_its_markers(fake: list[tuple[str, bool]], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Speed\n\n{bench.BEGIN}old\n{bench.END}\nafter\n")
    assert invoke("--write-docs", page).exit_code == 0
    text = page.read_text()
    assert text.startswith(f"# Speed\n\n{bench.BEGIN}")
    assert text.endswith(f"{bench.END}\nafter\n")
    assert "old" not in text
    assert "| one speed | 3,000 | steps/CPU-s | 1 / 2 / 3,000 | >= 2,500 | met |" in text
    assert "| two cost | 5 | CPU ms |  | <= 2.5 | missed |" in text
    once = text.count("**one**")
    assert invoke("--write-docs", page).exit_code == 0
    assert once == page.read_text().count("**one**") == 1


@pytest.mark.parametrize("text", ["", bench.BEGIN, bench.END + bench.BEGIN, (bench.BEGIN + bench.END) * 2])
def test_a_page_without_one_pair_of_markers_is_refused(text: str) -> None:
    with pytest.raises(PrfaasError, match=r"p\.md: needs one line"):
        bench.with_table(text, Report(False, bench.machine_facts()), "p.md")


def test_the_page_of_the_project_can_be_written_and_says_what_each_benchmark_runs() -> None:
    page = PAGE.read_text(encoding="utf-8")
    bench.with_table(page, Report(False, bench.machine_facts()), "docs/performance.md")
    method = page[: page.index(bench.BEGIN)]
    for name in bench.benchmark_names():
        assert f"| `{name}` |" in method
