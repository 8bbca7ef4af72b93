"""The `prfaas` command: figures, tables, files, and one line for every mistake."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import prfaas_env
from prfaas_env.base import PrfaasError
from prfaas_env.cli import app
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import load_scenario, scenario_names
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import schema_rows

PRFAAS = Path(sys.executable).parent / "prfaas"
COLUMNS = (
    "request_id,arrival_s,input_tokens,output_tokens,incremental_tokens,route,prefill_start_s,prefill_end_s,"
    "transfer_end_s,first_token_s,finish_s,attempts,status"
)
STAMPS = ("arrival_s", "prefill_start_s", "prefill_end_s", "transfer_end_s", "first_token_s", "finish_s")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments])


def run(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def figures(*arguments: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run("simulate", "--json", *arguments))
    return content


def refused(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert isinstance(result.exception, PrfaasError), (result.output, result.exception)
    assert result.stdout == ""
    message = str(result.exception)
    assert len(message.splitlines()) == 1
    return message


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def stamp(row: dict[str, str], name: str) -> float:
    return float(row[name]) if row[name] else math.inf


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests, one each two seconds, of 1,000 to 100,000 tokens, in Mooncake's format."""
    lengths = [1000, 30_000, 5000, 100_000, 2000, 40_000] * 2
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 2000 * k, "input_length": n, "output_length": 50}) + "\n"
            for k, n in enumerate(lengths)
        )
    )
    return path


# ------------------------------------------------------------------ simulate: figures

QUANTILES = ["mean", "p50", "p90", "p95", "p99"]


def test_json_keys() -> None:
    """Scripts read these names: adding one is fine, changing one breaks them."""
    content = figures("--duration", "30", "--seed", "4")
    assert list(content) == [
        *(
            "scenario",
            "scenario_hash",
            "policy",
            "seed",
            "engine",
            "requests",
            "window_s",
            "warmup_s",
            "drained",
        ),
        *("cohort", "ttft_s", "ttft_open_inf_s", "service_ttft_s", "queue_wait_s", "prefill_s", "transfer_s"),
        *(
            "decode_wait_s",
            "first_step_s",
            "tpot_s",
            "throughput_rps",
            "goodput_rps",
            "hit_share",
            "offload_share",
            "egress",
        ),
        *("conversions", "invalid_moves", "rejected_by_reason", "utilisation", "warnings", "notes"),
    ]
    assert list(content["requests"]) == ["arrived", "finished", "open", "rejected", "aborted", "remote"]
    for name in ("ttft_s", "ttft_open_inf_s", "tpot_s"):
        assert list(content[name]) == QUANTILES
    assert list(content["service_ttft_s"]) == ["mean", "p90"]
    assert list(content["egress"]) == ["bits", "mean_bps", "peak_bps"]
    assert list(content["utilisation"]) == ["prfaas", "prefill", "decode", "link"]
    assert (content["scenario"], content["policy"], content["seed"]) == ("paper", "static", 4)
    assert content["scenario_hash"] == load_scenario("paper").hash


@pytest.mark.parametrize("policy", ["static:threshold_tokens=12000", "earliest_finish:margin_s=1", "always"])
def test_json_is_what_simulate_returns(policy: str) -> None:
    content = figures(
        *("--scenario", "drift", "--policy", policy, "--seed", "9", "--duration", "40"),
        *("--set", "slo.ttft_s=2", "--set", "measure.warmup_s=10"),
    )
    scenario = load_scenario("drift", overrides=["slo.ttft_s=2", "measure.warmup_s=10"])
    expected = simulate(scenario, make_policy(policy), seed=9, duration_s=40).metrics
    assert {k: content[k] for k in expected if k != "warnings"} == {
        k: expected[k] for k in expected if k != "warnings"
    }
    assert content["window_s"] == 30.0
    assert content["scenario_hash"] == scenario.hash


def test_engines_give_the_same_figures() -> None:
    one, two = (
        figures("--engine", e, "--duration", "30", "--scenario", "drift") for e in ("compiled", "simpy")
    )
    assert one | {"engine": ""} == two | {"engine": ""}


def test_the_table_for_people() -> None:
    text = run("simulate", "--duration", "60", "--seed", "1")
    content = figures("--duration", "60", "--seed", "1")
    assert "paper (" in text.splitlines()[0]
    assert f"{content['requests']['arrived']} arrived" in text
    assert f"{content['ttft_s']['mean']:.3f}" in text
    assert f"{content['ttft_s']['p90']:.3f}" in text
    assert f"remote {content['utilisation']['prfaas']:.1%}" in text
    assert f"throughput {content['throughput_rps']:.3f} req/s" in text
    assert "note: includes start (measure.warmup_s is 0)" in text
    silent = run("simulate", "--duration", "20", "--set", "workload.arrivals.rate_rps=0")
    assert "0 arrived" in silent


def test_duration_stops_and_requests_drain() -> None:
    stopped = figures("--duration", "30")
    assert (stopped["drained"], stopped["window_s"]) == (False, 30.0)
    assert stopped["requests"]["open"] > 0
    drained = figures("--requests", "50")
    assert drained["drained"]
    assert drained["requests"]["arrived"] == drained["requests"]["finished"] == 50
    assert drained["ttft_s"] == drained["ttft_open_inf_s"]
    default = figures("--set", "measure.horizon_s=25")
    assert default["window_s"] == 25.0
    assert refused("simulate", "--requests", "3", "--duration", "3") == (
        "--requests and --duration exclude each other"
    )


def test_a_trace_drains_and_can_be_cut_or_sped_up(trace: Path) -> None:
    whole = figures("--trace", trace)
    assert whole["requests"]["finished"] == whole["requests"]["arrived"] == 12
    assert whole["drained"]
    assert "trace format mooncake (told from the first line)" in whole["notes"]
    assert figures("--trace", trace, "--requests", "5")["requests"]["finished"] == 5
    cut = figures("--trace", trace, "--duration", "7")
    assert (cut["requests"]["arrived"], cut["drained"], cut["window_s"]) == (4, False, 7.0)
    named = figures("--trace", trace, "--trace-format", "mooncake")
    assert named["requests"] == whole["requests"]
    assert not any("told from the first line" in note for note in named["notes"])
    rows = {}
    for rate in ("0.5", "5"):
        out = trace.with_name(f"{rate}.csv")
        figures("--trace", trace, "--rate", rate, "--requests-out", out)
        rows[rate] = rows_of(out)
    slow, fast = (float(rows[r][-1]["arrival_s"]) for r in ("0.5", "5"))
    assert slow == pytest.approx(10 * fast, rel=1e-6)


def test_rate_and_deployment() -> None:
    busy = figures("--rate", "5", "--duration", "100")["requests"]["arrived"]
    idle = figures("--rate", "2.5", "--duration", "100")["requests"]["arrived"]
    assert 1.5 < busy / idle < 2.6
    naive = figures("--deployment", "naive", "--policy", "always", "--duration", "60")
    assert naive["scenario"] == "paper@naive"
    assert naive["offload_share"] == 1.0
    homogeneous = figures("--deployment", "homogeneous", "--policy", "always", "--duration", "60")
    assert homogeneous["requests"]["remote"] == 0
    assert homogeneous["egress"] == {"bits": 0, "mean_bps": 0.0, "peak_bps": 0.0}


def test_low_load_is_said() -> None:
    """Below 30% of capacity every sensible policy looks alike, so nobody should compare policies there."""

    def said(*arguments: str) -> list[str]:
        return [w for w in figures("--duration", "20", *arguments)["warnings"] if "offered load" in w]

    [line] = said("--rate", "0.3")
    assert line.startswith("offered load is 10% of capacity by the paper's equations: below 30%")
    assert said("--rate", "0.9")
    assert said("--rate", "1.1") == said() == []
    assert said("--scenario", "homogeneous", "--rate", "0.2", "--policy", "never")
    text = run("simulate", "--rate", "0.3", "--duration", "20")
    assert "warning: offered load is 10% of capacity" in text


# ------------------------------------------------------------------ simulate: one line per request


def test_csv_columns_and_stamps(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    content = figures(
        "--requests",
        "120",
        "--seed",
        "2",
        "--policy",
        "static:threshold_tokens=15000",
        "--requests-out",
        path,
    )
    assert path.read_text().splitlines()[0] == COLUMNS
    assert [p.name for p in tmp_path.iterdir()] == ["requests.csv"]
    rows = rows_of(path)
    assert [int(r["request_id"]) for r in rows] == list(range(120))
    for row in rows:
        at = [stamp(row, name) for name in STAMPS]
        assert at == sorted(at), row
        assert row["incremental_tokens"] == row["input_tokens"]
        assert row["route"] == ("remote" if int(row["input_tokens"]) > 15_000 else "local")
        assert (row["attempts"], row["status"]) == ("1", "finished")
        assert all(len(row[name].partition(".")[2]) == 9 for name in STAMPS)  # whole nanoseconds
    assert stamp(rows[-1], "arrival_s") > 20  # absolute: seconds of the simulation

    def mean(a: str, b: str) -> float:
        return float(np.mean([stamp(r, b) - stamp(r, a) for r in rows]))

    assert mean("arrival_s", "first_token_s") == pytest.approx(content["ttft_s"]["mean"])
    assert mean("arrival_s", "prefill_start_s") == pytest.approx(content["queue_wait_s"])
    assert mean("prefill_start_s", "prefill_end_s") == pytest.approx(content["prefill_s"])
    assert mean("prefill_end_s", "transfer_end_s") == pytest.approx(content["transfer_s"])
    ttft = [stamp(r, "first_token_s") - stamp(r, "arrival_s") for r in rows]
    assert np.quantile(ttft, 0.9) == pytest.approx(content["ttft_s"]["p90"])
    assert sum(r["route"] == "remote" for r in rows) == content["requests"]["remote"]


def test_csv_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    content = figures(
        *("--duration", "60", "--rate", "8", "--requests-out", path),
        *("--set", "admission.max_queue_requests=5", "--policy", "never"),
    )
    rows = rows_of(path)
    counts = content["requests"]
    assert len(rows) == counts["arrived"]
    for status in ("finished", "open", "rejected"):
        assert sum(r["status"] == status for r in rows) == counts[status] > 0
    for row in rows:
        at = [stamp(row, name) for name in STAMPS]
        assert at == sorted(at)
        assert (row["finish_s"] == "") == (row["status"] != "finished")
        if row["status"] == "rejected":
            assert (row["route"], row["attempts"], row["prefill_start_s"]) == ("none", "0", "")
        assert stamp(row, "arrival_s") < 60


def test_csv_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        run("simulate", "--requests", "2", "--requests-out", pipe)
        assert os.read(reader, 10_000).decode().splitlines()[0] == COLUMNS
    finally:
        os.close(reader)


# ------------------------------------------------------------------ simulate: mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "papr"], "unknown scenario 'papr'; shipped: "),
        (["--policy", "nobody"], "unknown policy 'nobody'; installed: always, "),
        (
            ["--policy", "static:treshold=3"],
            "policy 'static': unknown parameter 'treshold'; known: threshold_tokens",
        ),
        (["--policy", "static:threshold_tokens=x"], "policy 'static': threshold_tokens is 'x'"),
        (["--policy", "json:loads"], "policy 'json:loads'"),
        (["--deployment", "none"], "unknown scenario 'none'"),
        (
            ["--set", "measure.horizn_s=3"],
            "scenario paper: measure: unknown field 'horizn_s'; known: horizon_s",
        ),
        (["--set", "deployment.pd.0.n_decode=0"], "scenario paper: deployment.pd.0.n_decode: "),
        (["--set", "deployment.pd.0.min_prefill=9"], "n_prefill 3 is below min_prefill 9"),
        (["--set", "horizon"], "--set 'horizon': write it as field.path=value"),
        (["--engine", "gpu"], "--engine is 'gpu'; allowed: "),
        (["--rate", "0"], "the arrival rate must be above 0 and at most"),
        (["--rate", "inf"], "the arrival rate must be above 0 and at most"),
        (["--rate", "nan"], "the arrival rate must be above 0 and at most"),
        (["--duration", "0"], "--duration must be above 0 and at most 1e+09 s, found 0.0"),
        (["--duration", "inf"], "--duration must be above 0 and at most 1e+09 s, found inf"),
        (["--duration", "nan"], "--duration must be above 0 and at most 1e+09 s, found nan"),
        (["--requests", "100000000"], "at most 50,000,000 are allowed"),
        (["--duration", "1e9"], "at most 50,000,000 are allowed"),
        (["--trace-format", "azure"], "--trace-format needs --trace"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--trace", "bundled:nothing"], "no bundled trace 'nothing'; bundled are "),
        (["--duration", "5", "--set", "measure.warmup_s=5"], "--duration 5 is within measure.warmup_s 5"),
        (
            ["--requests", "2", "--set", "measure.warmup_s=900"],
            "within measure.warmup_s 900: nothing to measure",
        ),
        (
            ["--set", "workload.arrivals.rate_rps=0", "--requests", "2"],
            "rate_rps is 0, so 2 requests never arrive",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    assert message in refused("simulate", *arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", ":4: "),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": []}', ":4: "),
        ('{"timestamp": 1, "input_length": "x", "output_length": 5, "hash_ids": []}', ":4: "),
        ('{"timestamp": 1, "output_length": 5, "hash_ids": []}', ":4: "),
    ],
)
def test_a_bad_trace_line_is_named(line: str, message: str, trace: Path) -> None:
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    told = refused(
        "simulate", "--trace", trace, "--trace-format", "mooncake", "--requests-out", trace.with_name("o.csv")
    )
    assert f"{trace}{message}" in told
    assert not trace.with_name("o.csv").exists()
    assert f"{trace}{message}" in refused("trace", "inspect", trace, "--format", "mooncake")


def test_unknown_trace_format(trace: Path) -> None:
    told = refused("simulate", "--trace", trace, "--trace-format", "parquet")
    assert told == "--trace-format is 'parquet'; allowed: mooncake, azure, burstgpt, bailian, vllm"


def test_a_trace_whose_format_cannot_be_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1,2,3\n")
    told = refused("simulate", "--trace", path)
    assert told == (
        f"--trace {path}: cannot tell the format from the first line; state --trace-format, one of "
        "mooncake, azure, burstgpt, bailian, vllm"
    )
    told = refused("simulate", "--trace", "bundled:servegen_m-small_rate_10min")
    assert "a profile of rates, not requests; use arrivals of kind profile" in told


def test_a_scenario_file_with_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: paper\nname: mine\nlinkcapacity: {kind: constant}\n")
    told = refused("simulate", "--scenario", path)
    assert told.startswith(
        f"{path}: (top level): unknown field 'linkcapacity'; known: name, description, model,"
    )


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("gone/requests.csv", "--requests-out: folder {0}/gone does not exist"),
        ("file/requests.csv", "--requests-out: folder {0}/file does not exist"),
        ("folder", "{0}/folder: cannot be written: Is a directory"),
    ],
)
def test_an_output_that_cannot_be_written(out: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    assert refused("simulate", "--requests", "2", "--requests-out", tmp_path / out) == message.format(
        tmp_path
    )
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_folder_that_vanishes_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def vanish(*args: Any, **kwargs: Any) -> Any:
        shutil.rmtree(folder)
        return simulate(*args, **kwargs)

    monkeypatch.setattr("prfaas_env.cli_simulate.simulate", vanish)
    told = refused("simulate", "--requests", "2", "--json", "--requests-out", folder / "requests.csv")
    assert told == f"{folder / 'requests.csv'}: cannot be written: No such file or directory"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk(tmp_path: Path) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    assert refused("simulate", "--requests", "2", "--requests-out", link).endswith(
        "cannot be written: No space left on device"
    )
    assert Path("/dev/full").is_char_device()


# ------------------------------------------------------------------ scenario, trace, plan


def test_scenario_list() -> None:
    text = run("scenario", "list")
    for name in scenario_names():
        assert name in text
        assert load_scenario(name).description[:40] in text


@pytest.mark.parametrize("name", scenario_names())
def test_scenario_show_can_be_edited_and_given_back(name: str, tmp_path: Path) -> None:
    text = run("scenario", "show", name)
    assert text.splitlines()[0] == f"# hash {load_scenario(name).hash}"
    path = tmp_path / "again.yaml"
    path.write_text(text)
    assert load_scenario(path) == load_scenario(name)


def test_scenario_show_with_changes() -> None:
    text = run("scenario", "show", "drift", "--deployment", "naive", "--set", "measure.horizon_s=77")
    expected = load_scenario("drift", deployment="naive", overrides=["measure.horizon_s=77"])
    assert text.splitlines()[0] == f"# hash {expected.hash}"
    assert "horizon_s: 77.0" in text
    assert "unknown scenario 'nowhere'" in refused("scenario", "show", "nowhere")


def test_scenario_fields() -> None:
    rows = json.loads(run("scenario", "fields", "--json"))
    assert rows == schema_rows(scenario_schema(load_scenario("paper")))
    assert len(json.loads(run("scenario", "fields", "homogeneous", "--json"))) < len(rows)
    text = run("scenario", "fields")
    for row in rows:
        assert row["name"] in text
    assert "unknown scenario 'nowhere'" in refused("scenario", "fields", "nowhere")


def test_plan_and_trace_are_mounted() -> None:
    assert list(json.loads(run("plan", "--json"))["deployments"]) == ["prfaas", "homogeneous", "naive"]
    assert json.loads(run("trace", "inspect", "bundled:azure_llm_2023_code", "--json"))["requests"] == 8_819


def test_version() -> None:
    assert (
        run("--version").strip()
        == f"prfaas-env {prfaas_env.__version__}"
        == f"prfaas-env {metadata.version('prfaas-env')}"
    )


# ------------------------------------------------------------------ commands of other rooms


def entry_points(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    """Have other rooms offer these commands."""
    found = [metadata.EntryPoint(name, value, "prfaas.commands") for name, value in entries]
    real = metadata.entry_points

    def fake(*, group: str) -> Any:
        return found if group == "prfaas.commands" else real(group=group)

    monkeypatch.setattr(metadata, "entry_points", fake)


def test_a_command_of_another_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "another_room_for_tests.py").write_text(
        '"""A room."""\nimport typer\n\n\ndef greet(name: str, loud: bool = False) -> None:\n'
        '    """Say hello."""\n    typer.echo(f"hello {name}{\'!\' if loud else \'\'}")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry_points(
        monkeypatch, ("greet", "another_room_for_tests:greet"), ("broken", "no_such_room_for_tests:run")
    )
    assert run("scenario", "list")  # an own command imports no other room
    assert "another_room_for_tests" not in sys.modules
    assert run("greet", "world", "--loud") == "hello world!\n"
    assert "hello" in run("greet", "--help") or "Say hello." in run("greet", "--help")
    text = run("--help")
    assert "Say hello." in text
    assert "command 'broken' cannot be loaded: No module named 'no_such_room_for_tests'" in text
    told = refused("broken", "--any", "thing", "-x")
    assert told == "command 'broken' cannot be loaded: No module named 'no_such_room_for_tests'"
    result = invoke("nothing")
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.output


def test_a_command_that_its_room_lacks_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points(monkeypatch, ("lost", "json:no_such_function"))
    assert "prfaas-env" in run("--version")
    assert "paper" in run("scenario", "list")
    assert (
        refused("lost")
        == "command 'lost' cannot be loaded: module 'json' has no attribute 'no_such_function'"
    )


# ------------------------------------------------------------------ as a process


def process(*arguments: str, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [str(PRFAAS)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=cwd, timeout=300)


def test_a_mistake_is_one_line_on_stderr_and_exit_2(tmp_path: Path) -> None:
    result = process("simulate", "--set", "mesure.horizon_s=5", "--json", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "error: scenario paper: (top level): unknown field 'mesure'; known: name, "
    )
    assert result.stderr.count("\n") == 1
    result = process("simulate", "--bogus", cwd=tmp_path)
    assert result.returncode == 2
    assert "--bogus" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_policy_of_this_folder(tmp_path: Path) -> None:
    """`module:Class` finds a file where the command is run, also through the installed script."""
    (tmp_path / "my_rule.py").write_text(
        "from prfaas_env.decision import Decision\n\n\nclass Rule:\n    constant = True\n\n"
        "    def __init__(self, tokens=1000):\n        self.tokens = tokens\n\n"
        "    def reset(self, context):\n        pass\n\n"
        "    def decide(self, telemetry):\n"
        "        return Decision.same(telemetry.schema.n_pd, threshold_tokens=self.tokens)\n"
    )
    result = process(
        *("simulate", "--policy", "my_rule:Rule:tokens=7000", "--requests", "40", "--json"), cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    mine, rule = (
        json.loads(result.stdout),
        figures("--policy", "static:threshold_tokens=7000", "--requests", "40"),
    )
    assert mine | {"policy": ""} == rule | {"policy": ""}


_WITHOUT_LEARNING = """
import sys
for name in ("torch", "stable_baselines3", "sb3_contrib", "tensorboard", "matplotlib", "pandas", "PIL"):
    sys.modules[name] = None
from prfaas_env.cli import main
main()
"""


def test_without_learning_libraries(tmp_path: Path) -> None:
    out = tmp_path / "requests.csv"
    arguments = (
        "simulate",
        "--policy",
        "earliest_finish",
        "--requests",
        "20",
        "--json",
        "--requests-out",
        str(out),
    )
    result = process(*arguments, cwd=tmp_path, code=_WITHOUT_LEARNING)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["requests"]["finished"] == 20
    assert len(rows_of(out)) == 20
    result = process("plan", "--json", cwd=tmp_path, code=_WITHOUT_LEARNING)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """`prfaas ... | head -1` ends without a word."""
    with subprocess.Popen(
        [str(PRFAAS), "scenario", "fields", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 1
