"""Going on after a stop, a kill, or the end: one axis of steps, schedules and choices that go on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.record import read_record
from prfaas_env.base import PrfaasError
from prfaas_trainings import training
from prfaas_trainings.checkpoint import checkpoints
from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.training import Run, resume, train

from .test_envs import check_episode_files

Quick = Callable[..., TrainingConfig]
WILD = {"n_steps": 8, "batch_size": 8, "n_epochs": 4, "hidden": [8], "scaling_steps": 4, "learning_rate": 0.3,
        "max_grad_norm": 100.0, "neutral_routing": 0.2, "neutral_move": 0.4}  # fmt: skip
SAC = {
    "buffer_size": 64,
    "learning_starts": 4,
    "batch_size": 8,
    "log_every": 8,
    "hidden": [8],
    "scaling_steps": 4,
}


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar as TensorBoard shows it: (step, value) in the order of writing."""
    found = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def check_axis(out: Path, last: int) -> dict[str, list[tuple[int, float]]]:
    """Steps of every tag rise, none is there twice, and the reward's reach the end."""
    found = scalars(out)
    for tag, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), tag
    assert [step for step, _ in found["prfaas/reward"]][-1] == last
    return found


def weights(folder: Path) -> torch.Tensor:
    state = LearnedPolicy(folder)._network.state_dict()
    return torch.cat([v.flatten().float() for v in state.values()])


def test_a_finished_run_goes_on_to_a_later_end(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(quick(total_steps=32, ppo=WILD), out, runner=runner)
    at_32 = weights(out / "checkpoints" / "step_000000032")
    with pytest.raises(PrfaasError, match="all 32 steps are done; give more with --steps"):
        resume(out, runner=runner)
    again = resume(out, runner=runner, total_steps=64)
    assert (again.steps, again.stopped) == (64, "all steps done")
    assert [v.steps for v in again.validations] == [0, 16, 32, 48, 64]
    assert again.validations[: len(first.validations)] == first.validations
    found = check_axis(out, 64)
    assert [s for s, _ in found["prfaas/reward"]] == [16, 32, 48, 64]
    assert [s for s, _ in found["prfaas_validation/score"]] == [0, 16, 32, 48, 64]
    # The rate is that of its share of the whole: one that starts anew would be back at 0.3.
    rate = dict(found["train/learning_rate"])
    assert rate[64] == pytest.approx(0.3 + (1e-4 - 0.3) * 48 / 64, rel=1e-5)
    assert rate[48] == pytest.approx(0.3 + (1e-4 - 0.3) * 32 / 64, rel=1e-5)
    assert not torch.equal(weights(out / "checkpoints" / "step_000000064"), at_32)
    assert torch.equal(weights(out / "checkpoints" / "step_000000032"), at_32)
    assert read_record(out / "policy.zip").steps == min(again.validations, key=lambda v: v.score).steps
    facts = json.loads((out / "run.json").read_text())
    assert (facts["resumed_at"], facts["steps"], facts["status"]) == (32, 64, "all steps done")
    check_episode_files(out / "episodes", 4, 1)  # one per env and leg


def test_going_on_twice_from_one_checkpoint_learns_the_same(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(quick(total_steps=16, ppo=WILD), out, runner=runner)
    shutil.copytree(out, tmp_path / "copy")
    ends = []
    for folder in (out, tmp_path / "copy"):
        torch.manual_seed(len(ends))
        np.random.seed(len(ends))  # noqa: NPY002
        random.seed(len(ends))
        resume(folder, runner=runner, total_steps=48)
        ends.append(weights(folder / "checkpoints" / "step_000000048"))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], weights(out / "checkpoints" / "step_000000016"))


@pytest.mark.parametrize("algorithm", [pytest.param("recurrent_ppo", marks=pytest.mark.slow), "sac"])
def test_other_algorithms_go_on(quick: Quick, runner: EpisodeRunner, tmp_path: Path, algorithm: str) -> None:
    own = SAC if algorithm == "sac" else {**WILD, "lstm_units": 8}
    out = tmp_path / "run"
    train(quick(total_steps=32, algorithm=algorithm, ppo=None, **{algorithm: own}), out, runner=runner)
    result = resume(out, runner=runner, total_steps=64)
    assert result.steps == 64
    found = check_axis(out, 64)
    assert set(found) >= {"prfaas/reward", "prfaas/ttft_p99_s", "prfaas/margin_mean_s", "train/learning_rate"}
    if algorithm == "sac":
        assert set(found) >= {
            "train/actor_loss",
            "train/critic_loss",
            "train/ent_coef",
            "train/ent_coef_loss",
        }
        assert [s for s, _ in found["prfaas/reward"]] == list(range(8, 65, 8))


def test_a_curriculum_goes_on_in_its_stage(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    easy = [{"scenario": "drift", "overrides": ["measure.horizon_s=30"]}]
    config = quick(
        total_steps=64,
        curriculum=[
            {"steps": 16, "scenarios": easy},
            {"steps": 16, "randomise": {"conversion.switch_s": {"values": [5]}}},
        ],
    )
    out = tmp_path / "run"

    class Enough(Exception):
        pass

    real = Run.checkpoint

    def stop_at_32(self: Run) -> Any:
        validated = real(self)
        if validated.steps == 32:
            raise Enough
        return validated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "checkpoint", stop_at_32)
        with pytest.raises(Enough):
            train(config, out, runner=runner)
    files = sorted(p.name for p in (out / "episodes").iterdir())
    assert files == [f"stage{s}-{e}.monitor.csv" for s in (0, 1, 2) for e in (0, 1)]
    names = {(out / "episodes" / f).read_text().splitlines()[-1].split(",")[4] for f in files[:2]}
    assert names == {"drift"}
    result = resume(out, runner=runner)
    assert result.steps == 64
    assert sorted(p.name for p in (out / "episodes").iterdir())[:2] == [
        "resumed1-stage2-0.monitor.csv",
        "resumed1-stage2-1.monitor.csv",
    ]
    check_axis(out, 64)
    assert [t.name for t in read_record(out / "policy.zip").trained_on] == ["paper", "paper", "drift"]


def test_killed_between_a_checkpoint_and_its_validation(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    real = training.evaluate

    def killed(folder: Path, *arguments: Any, **named: Any) -> Any:
        if folder.name == "step_000000032":
            raise MemoryError
        return real(folder, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "evaluate", killed)
        with pytest.raises(MemoryError):
            train(quick(total_steps=64, ppo=WILD), out, runner=runner)
    assert len(checkpoints(out)) == 3
    (out / "policy.json").write_text("{}")  # and while the best policy was being copied
    (out / "checkpoints" / ".step_000000048.tmp").mkdir()
    result = resume(out, runner=runner, total_steps=40)
    assert [v.steps for v in result.validations] == [0, 16, 32, 48]
    assert read_record(out / "policy.zip").steps == result.best.steps
    assert not list((out / "checkpoints").glob(".*"))
    check_axis(out, 48)


def test_what_was_written_after_the_last_checkpoint_is_dropped(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path
) -> None:
    """Killed as the checkpoint of step 32 was about to be written: the curves had come to 32 already."""
    out = tmp_path / "run"
    real = training.write_checkpoint

    def killed(*arguments: Any) -> Any:
        if arguments[3].steps == 32:
            raise MemoryError
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "write_checkpoint", killed)
        with pytest.raises(MemoryError):
            train(quick(total_steps=48, ppo=WILD), out, runner=runner)
    assert [step for step, _ in scalars(out)["prfaas/reward"]] == [16, 32]
    resume(out, runner=runner)
    found = check_axis(out, 48)
    assert [step for step, _ in found["prfaas/reward"]] == [16, 32, 48]
    assert [step for step, _ in found["train/loss"]] == [16, 32, 48]


def test_time_used_counts_over_all_legs(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(quick(total_steps=None, minutes=0.02), out, runner=runner)
    with pytest.raises(PrfaasError, match=r"its 0\.001 minutes are used up; give more with --minutes"):
        resume(out, runner=runner, minutes=0.001)


# ------------------------------------------------------------------------------------- real processes

COMMAND = "import typer; from prfaas_trainings.commands import train; typer.run(train)"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_more(out: Path, n: int, process: subprocess.Popen[str]) -> None:
    """Until there are more than n checkpoints."""
    end_s = time.monotonic() + 240
    while len(checkpoints(out)) <= n:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_at_any_time_and_gone_on(
    write_config: Callable[..., Path], tmp_path: Path, kills: int
) -> None:
    """A real process, killed at random moments: at most one interval is lost each time."""
    out = tmp_path / "run"
    path = write_config(total_steps=100_000, ppo=WILD)
    arguments = ["-c", str(path), "--out", str(out)]
    moments = random.Random(kills)
    reached = []
    for _ in range(kills):
        process = start(*arguments)
        wait_for_more(out, len(reached) and len(checkpoints(out)), process)
        time.sleep(moments.uniform(0.0, 0.8))
        process.send_signal(signal.SIGKILL)
        process.wait()
        whole = checkpoints(out)
        reached.append(int(whole[-1].name.removeprefix("step_")))
        for folder in whole[-2:]:
            LearnedPolicy(folder)  # complete, whenever it was killed
        arguments = ["--resume", str(out)]
    assert reached == sorted(set(reached))
    last = reached[-1] + 32
    process = start("--resume", str(out), "--steps", str(last))
    text, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert f"all steps done at step {last:,}" in text
    found = check_axis(out, last)
    validated = [step for step, _ in found["prfaas_validation/score"]]
    assert validated == list(
        range(0, last + 1, 16)
    )  # every interval is there once: nothing lost but what was redone
    assert [s for s, _ in found["prfaas/reward"]] == list(range(16, last + 1, 16))
    listed = json.loads((out / "validation.json").read_text())
    assert [v["steps"] for v in listed] == validated


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start("-c", str(write_config(total_steps=100_000)), "--out", str(out))
    wait_for_more(out, 1, process)
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f"go on: prfaas train --resume {out}" in text.replace("\n", "")
    assert "Traceback" not in errors
    facts = json.loads((out / "run.json").read_text())
    assert facts["status"] == "stopped by Ctrl-C"
    assert int(checkpoints(out)[-1].name.removeprefix("step_")) == facts["steps"] or facts["steps"] % 16


# ------------------------------------------------------------------------------------------- workers


def test_an_error_in_a_worker_is_told_with_its_number(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference policy that breaks in one worker after some steps."""
    (tmp_path / "breaking.py").write_text(
        "import os, pathlib\n"
        "from prfaas_baselines.earliest_finish import EarliestFinish\n"
        "class Breaks(EarliestFinish):\n"
        "    asked = 0\n"
        "    def decide(self, telemetry):\n"
        "        Breaks.asked += 1\n"
        "        if Breaks.asked > 40 and self.is_first():\n"
        "            raise RuntimeError('the moon is full')\n"
        "        return super().decide(telemetry)\n"
        "    def is_first(self):\n"
        "        try:\n"
        "            os.close(os.open(pathlib.Path(__file__).with_name('taken'), os.O_CREAT | os.O_EXCL))\n"
        "        except FileExistsError:\n"
        "            return False\n"
        "        return True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = quick(
        total_steps=1000, vectorization="processes", n_envs=3, reward="paired", reference="breaking:Breaks",
        ppo={"n_steps": 8, "batch_size": 8, "n_epochs": 1, "scaling_steps": 2},
    )  # fmt: skip
    out = tmp_path / "run"
    start_s = time.monotonic()
    with pytest.raises(PrfaasError) as caught:
        train(config, out, runner=runner)
    found = str(caught.value)
    assert "RuntimeError: the moon is full" in found
    number = int(found.split("env worker ")[1].split()[0])
    assert f"worker_{number}.error.txt" in found
    assert "prfaas train --resume" in found
    assert time.monotonic() - start_s < 120
    assert "in decide" in (out / "episodes" / f"worker_{number}.error.txt").read_text()
    LearnedPolicy(checkpoints(out)[-1])
    assert not [p for p in os.listdir(out / "checkpoints") if p.startswith(".")]
