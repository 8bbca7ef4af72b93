"""`prfaas export` from a run folder to `prfaas simulate` and `compare`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from prfaas_agents.record import read_record
from prfaas_env.base import PrfaasError
from prfaas_env.bundle import BundlePolicy
from prfaas_env.bundle_manifest import BundleManifest
from prfaas_env.cli import app
from prfaas_env.policy import make_policy
from prfaas_env.simulator.run import simulate
from prfaas_trainings import commands, exporting
from prfaas_trainings.compare import compare
from prfaas_trainings.episodes import EpisodeRunner, parse_row
from prfaas_trainings.exporting import export_run
from prfaas_trainings.training import train

from .conftest import quick
from .test_training import WILD

_APP = typer.Typer()
_APP.command("export")(commands.export)
_APP.command("other")(lambda: None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, runner: EpisodeRunner) -> Path:
    """Folder of one quick training."""
    out = tmp_path_factory.mktemp("export") / "run"
    train(quick(ppo=WILD, description="Seconds of learning."), out, runner=runner)
    return out


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_run_goes_out_and_into_simulate(run: Path, tmp_path: Path, runner: EpisodeRunner) -> None:
    out = tmp_path / "bundle"
    result = CliRunner().invoke(_APP, ["export", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"bundle: {out}   (ppo, " in result.stdout
    assert files(out) == ["MODEL_CARD.md", "manifest.json", "policy.onnx"]
    assert files(tmp_path) == ["bundle"]
    record, policy = read_record(run / "policy.zip"), BundlePolicy(out)
    manifest = policy.manifest
    assert (manifest.name, manifest.description) == ("quick", "Seconds of learning.")
    assert manifest.decision.conversion_interval_s == 15.0
    assert manifest.decision.decision_interval_s == record.decision_interval_s
    assert manifest.training.scenarios == record.trained_on
    assert manifest.training.weights_sha256 == record.weights_sha256
    assert manifest.evaluation == record.validation != {}
    _check_ranges(manifest)
    args = ["simulate", "--set", "measure.horizon_s=60", "--engine", "simpy", "--json", "--policy"]
    figures = []
    for spec in (str(out), f"ppo:path={run}"):
        done = CliRunner().invoke(app, [*args, spec])
        assert done.exit_code == 0, done.output
        figures.append(json.loads(done.stdout))
        del figures[-1]["policy"]
    assert figures[0] == figures[1]
    (scenario,) = quick().load_scenarios()
    rows = [parse_row("earliest_finish"), parse_row(f"mine={out}")]
    found = compare(
        [scenario], rows, seeds=range(2_000_000, 2_000_002), split="test", runner=runner, engine="simpy"
    )
    assert found.facts[1].learned
    assert found.facts[1].hash == policy.fingerprint
    with pytest.raises(PrfaasError, match="policy mine: seed 3 was used to train"):
        compare([scenario], rows, seeds=range(3, 4), split="test", runner=runner, engine="simpy")


def _check_ranges(manifest: BundleManifest) -> None:
    """The ranges are those of the first training episodes: 60 s each, a decision a second."""
    ranges, names = manifest.input_ranges, manifest.telemetry.names
    assert ranges is not None
    assert len(ranges.low) == len(names)
    (scenario,) = quick().load_scenarios()
    horizon_s = scenario.measure.horizon_s
    per_episode = math.ceil(horizon_s / manifest.decision.decision_interval_s)
    assert ranges.readings == exporting.RANGE_EPISODES * per_episode
    limits = dict(zip(names, zip(ranges.low, ranges.high, strict=True), strict=True))
    link_bps = scenario.deployment.links[0].capacity_bps
    assert limits["link0.nominal_capacity_bps"] == (link_bps, link_bps)
    remote = float(scenario.deployment.prfaas[0].n_instances)
    assert limits["prfaas0.prefill_instances"] == (remote, remote)
    low, high = limits["pd0.arrival_rate_30s_rps"]
    assert low is not None
    assert high is not None
    assert 0 < low < high


def test_an_exported_policy_runs_where_torch_cannot_be_imported(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    export_run(run, out)
    code = f"""
import sys
for name in ("torch", "stable_baselines3", "sb3_contrib", "onnx", "tensorboard", "matplotlib", "cloudpickle"):
    sys.modules[name] = None
from prfaas_env.cli import main
sys.argv = ["prfaas", "simulate", "--policy", {str(out)!r}, "--set", "measure.horizon_s=30", "--json",
            "--engine", "simpy"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    expected = simulate(
        quick(scenarios=[{"scenario": "paper", "overrides": ["measure.horizon_s=30"]}]).load_scenarios()[0],
        make_policy(str(out)),
        engine="simpy",
        seed=0,
    )
    assert json.loads(done.stdout)["ttft_s"] == expected.metrics["ttft_s"]


def test_a_checkpoint_and_a_name(run: Path, tmp_path: Path) -> None:
    checkpoint = sorted((run / "checkpoints").iterdir())[0]
    manifest = export_run(checkpoint, tmp_path / "a", name="first one")
    assert (manifest.name, manifest.training.steps, manifest.evaluation) == ("first one", 0, {})
    assert manifest.decision.conversion_interval_s == 15.0
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("policy.zip", "policy.json"):
        (alone / name).write_bytes((run / name).read_bytes())
    manifest = export_run(alone / "policy.zip", tmp_path / "b")
    assert (manifest.name, manifest.decision.conversion_interval_s) == ("alone", None)
    assert manifest.input_ranges is None


def test_folders_in_use_are_kept(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    export_run(run, out, name="one")
    with pytest.raises(PrfaasError, match="holds an earlier result"):
        export_run(run, out, name="two")
    assert BundlePolicy(out).manifest.name == "one"
    export_run(run, out, name="two", force=True)
    assert BundlePolicy(out).manifest.name == "two"
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("x")
    with pytest.raises(PrfaasError, match=r"is not empty and holds no manifest\.json"):
        export_run(run, other, force=True)
    assert files(tmp_path) == ["bundle", "other"]


def test_figures_of_a_comparison_go_along(run: Path, tmp_path: Path, runner: EpisodeRunner) -> None:
    specs = ("earliest_finish", f"mine=ppo:path={run}", "never", "earliest_finish:margin_s=0.5")
    rows = [parse_row(spec) for spec in specs]
    scenarios = quick().load_scenarios()
    found = compare(
        scenarios, rows, seeds=range(2_000_000, 2_000_003), split="test", runner=runner, engine="simpy"
    )
    folder = tmp_path / "compared"
    folder.mkdir()
    (folder / "metrics.json").write_text(found.json_text())
    out = tmp_path / "bundle"
    args = ["export", str(run), "--out", str(out), "--evaluation", str(folder)]
    assert CliRunner().invoke(_APP, args).exit_code == 0
    (kept,) = BundlePolicy(out).manifest.evaluation["comparisons"]
    assert (kept["policy"], kept["split"], kept["seeds"]) == (
        "mine",
        "test",
        {"first": 2_000_000, "count": 3},
    )
    mean = found.own(0, 1, "ttft_mean_s").mean
    assert kept["scenarios"]["paper"]["mine"]["ttft_mean_s"]["mean"] == mean
    card = (out / "MODEL_CARD.md").read_text()
    assert "Compared on 3 test seeds from 2,000,000 on" in card
    assert f"| **mine** | {mean:,.4g}" in card
    assert f"| earliest_finish | {found.own(0, 0, 'ttft_mean_s').mean:,.4g}" in card
    means = {row.label: found.own(0, k, "ttft_mean_s").mean for k, row in enumerate(rows)}
    lower = [label for label in means if means[label] < mean]
    assert 0 < len(lower) < len(rows) - 1, means
    assert f"Lower mean TTFT than this policy: {', '.join(lower)}." in card
    for name in ("policy.zip", "policy.json"):  # a comparison beside the policy needs no word
        (folder / name).write_bytes((run / name).read_bytes())
    assert export_run(folder, tmp_path / "beside").evaluation["comparisons"] == [kept]
    (folder / "metrics.json").write_text("{}")
    assert "comparisons" not in export_run(folder, tmp_path / "broken").evaluation
    (tmp_path / "no.json").write_text('{"rows": 3}')
    without = json.loads(found.json_text())
    without["rows"][1]["policy_hash"] = "0" * 12
    (tmp_path / "other.json").write_text(json.dumps(without))
    for name, told in (
        ("none.json", "cannot be read"),
        ("no.json", r"is not the metrics\.json of a comparison"),
        ("other.json", "compares no policy with hash"),
    ):
        with pytest.raises(PrfaasError, match=told):
            export_run(run, tmp_path / "b", evaluations=[tmp_path / name])
    assert not (tmp_path / "b").exists()


def test_a_failure_on_the_way_leaves_nothing_or_the_old_bundle(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundle"
    export_run(run, out, name="one")
    whole = exporting.fill_bundle

    def half(folder: Path, *args: Any, **more: Any) -> Any:
        whole(folder, *args, **more)
        raise PrfaasError("half way")

    monkeypatch.setattr(exporting, "fill_bundle", half)
    for target in (out, tmp_path / "new"):
        with pytest.raises(PrfaasError, match="half way"):
            export_run(run, target, name="two", force=True)
    assert files(tmp_path) == ["bundle"]
    assert BundlePolicy(out).manifest.name == "one"


def test_no_policy_there(tmp_path: Path) -> None:
    with pytest.raises(PrfaasError, match=r"policy\.zip: not found"):
        export_run(tmp_path, tmp_path / "b")
    assert files(tmp_path) == []


def test_a_run_folder_is_no_bundle(run: Path) -> None:
    with pytest.raises(PrfaasError, match=r"the folder holds no manifest\.json"):
        make_policy(str(run))
