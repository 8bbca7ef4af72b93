"""One training with several seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas_agents.record import read_record
from prfaas_env.base import PrfaasError
from prfaas_trainings.config import TrainingConfig

from .test_resume import WILD

Quick = Callable[..., TrainingConfig]


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_a_run_per_seed_and_the_best_one_kept(
    write_config: Callable[..., Path], run: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    path = write_config(seeds=[3, 5], total_steps=16, ppo=WILD)
    text = run("train", "-c", str(path), "--out", str(out), "--jobs", "1")
    summary = json.loads((out / "summary.json").read_text())
    best = {seed: _best(out / f"seed{seed}") for seed in (3, 5)}
    chosen = min(best, key=lambda seed: best[seed])
    assert summary["chosen_seed"] == chosen
    assert summary["score"]["best"] == min(best.values())
    assert summary["score"]["mean"] == pytest.approx(sum(best.values()) / 2)
    kept, own = read_record(out / "policy.zip"), read_record(out / f"seed{chosen}" / "policy.zip")
    assert kept.weights_sha256 == own.weights_sha256
    assert kept.training_seed == chosen
    assert kept.validation["scores_by_seed"] == {str(k): v for k, v in best.items()}
    assert f"kept seed{chosen}" in text
    hashes = {
        read_record(out / f"seed{k}" / "checkpoints/step_000000016/policy.zip").weights_sha256 for k in (3, 5)
    }
    assert len(hashes) == 2
    assert json.loads((out / "run.json").read_text())["status"] == "all seeds done"
    with pytest.raises(PrfaasError, match="holds an earlier result"):
        run("train", "-c", str(path), "--out", str(out))
    with pytest.raises(PrfaasError, match="give one of the runs to --resume"):
        run("train", "--resume", str(out), "--steps", "32")


def _best(folder: Path) -> float:
    return min(float(v["score"]) for v in json.loads((folder / "validation.json").read_text()))


def test_what_is_missing_is_made_up(
    write_config: Callable[..., Path],
    run: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed while the first seed learned: that one goes on, the other begins."""
    from prfaas_trainings.training import Run

    out = tmp_path / "run"
    path = write_config(seeds=[0, 1], total_steps=32, ppo=WILD)
    real = Run.checkpoint

    def fail(self: Run) -> Any:
        if self.model.num_timesteps == 32:
            raise MemoryError
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint", fail)
        with pytest.raises(MemoryError):
            run("train", "-c", str(path), "--out", str(out), "--jobs", "1")
    assert not (out / "seed1").exists()
    run("train", "--resume", str(out), "--jobs", "1")
    facts = json.loads((out / "seed0" / "run.json").read_text())
    assert (facts["resumed_at"], facts["steps"]) == (16, 32)
    assert json.loads((out / "seed1" / "run.json").read_text())["resumed_at"] is None
    assert set(json.loads((out / "summary.json").read_text())["runs"]) == {"seed0", "seed1"}
    before = (out / "policy.zip").read_bytes()
    run("train", "--resume", str(out), "--jobs", "1")  # nothing left: the summary stays
    assert (out / "policy.zip").read_bytes() == before
