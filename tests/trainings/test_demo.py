"""`prfaas demo --quick` from end to end, twice."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas_agents.learned import LearnedPolicy
from prfaas_env.base import PrfaasError
from prfaas_trainings.compare import DEFAULT_POLICIES, replayed_slice
from prfaas_trainings.config import load_config
from prfaas_trainings.demo import TRACE_CUT_S, demo_plan
from prfaas_trainings.report import write_report

from .conftest import invoke


def test_quick_demo(run: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "runs" / "demo"
    text = run("demo", "--quick", "--out", str(out))
    names = {p.name for p in out.iterdir()}
    assert names == {
        "demo.json", "metrics.json", "curves.json", "results.csv", "policy.zip", "policy.json", "training",
        "ttft_cdf_drift.png", "ttft_cdf_mooncake.png", "timeline_drift.png", "timeline_mooncake.png",
    }  # fmt: skip
    assert [p.name for p in out.parent.iterdir()] == ["demo"]
    for word in (*DEFAULT_POLICIES, "ppo", "drift", "mooncake", "static:threshold_tokens=19400", "spread"):
        assert word in text
    facts = json.loads((out / "demo.json").read_text())
    assert facts["status"] == "complete"
    assert set(facts["seconds"]) == {"replay", "training", "comparison"}
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(r["scenario"], r["policy"]) for r in rows} == {
        (s, p) for s in ("drift", "mooncake") for p in (*DEFAULT_POLICIES, "ppo", "learned")
    }
    assert all(int(r["seed"]) >= 2_000_000 for r in rows)
    content = json.loads((out / "metrics.json").read_text())
    assert content["reference"] == "earliest_finish"
    assert LearnedPolicy(out).fingerprint == next(r["policy_hash"] for r in content["rows"] if r["learned"])
    assert any((out / "training" / "tensorboard").iterdir())

    page = write_report(out, tmp_path / "report.html", 0).read_text()
    assert "Training demo" in page
    assert "earliest_finish" in page

    (out / "stale").write_text("")
    run("demo", "--quick", "--out", str(out))
    assert {p.name for p in out.iterdir()} == names


def test_a_foreign_folder_is_left_alone(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(PrfaasError, match=r"holds no demo\.json"):
        run("demo", "--quick", "--out", str(tmp_path))
    with pytest.raises(PrfaasError, match="--minutes must be above 0"):
        run("demo", "--minutes", "0", "--out", str(tmp_path / "new"))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("quick", [False, True])
def test_nothing_that_is_compared_was_learned_from(quick: bool) -> None:
    plan = demo_plan(4.0, quick)
    config = load_config(plan.training, plan.overrides)
    drift, rest = plan.held_out()
    assert (drift.name, rest.name) == ("drift", "mooncake")
    seen = [replayed_slice(s) for s in config.load_scenarios() if s.name == "mooncake"]
    held = replayed_slice(rest)
    assert held is not None
    assert held[1] == TRACE_CUT_S
    assert all(s is not None and s[2] <= held[1] for s in seen)
    assert len(seen) > 0


def test_the_full_demo() -> None:
    plan = demo_plan(4.0, quick=False)
    assert load_config(plan.training, plan.overrides).minutes == 4.0
    drift, rest = plan.held_out()
    assert plan.seeds >= 10
    assert drift.measure.horizon_s == 3600.0
    assert replayed_slice(rest) == ("bundled:mooncake_conversation_first_32min.jsonl", 1200.0, 1920.0)


def test_ctrl_c_while_learning_leaves_everything_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., str]
) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    (out / "demo.json").write_text('{"status": "complete"}')
    from prfaas_trainings import training

    real = training.Run.checkpoint

    def checkpoint(self: training.Run) -> training.Validated:
        validated = real(self)
        if validated.steps:
            os.kill(os.getpid(), signal.SIGINT)
        return validated

    monkeypatch.setattr(training.Run, "checkpoint", checkpoint)
    result = invoke(["demo", "--quick", "--out", str(out)])
    assert result.exit_code != 0
    assert f"stopped; what there is so far is in {out}.partial" in result.stdout
    assert (out / "demo.json").read_text() == '{"status": "complete"}'
    partial = tmp_path / "demo.partial"
    assert LearnedPolicy(partial / "training").record.steps in (0, 32)
    monkeypatch.undo()
    run("demo", "--quick", "--out", str(out))
    assert not partial.exists()
    assert (out / "results.csv").exists()
