"""Cheap scenarios and trainings for the tests of this room."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from prfaas_trainings import commands
from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.episodes import EpisodeRunner, episode_runner


@pytest.fixture(scope="session")
def runner() -> Iterator[EpisodeRunner]:
    """Episodes in this process."""
    with episode_runner(1) as made:
        yield made


class Counting(EpisodeRunner):
    """Counts the episodes it is given, and stops after some."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__(1)
        self.asked = 0
        self._stop_after = stop_after

    def each(self, jobs: Any) -> Iterator[Any]:
        for k, found in enumerate(super().each(jobs)):
            if self._stop_after is not None and k >= self._stop_after:
                raise KeyboardInterrupt
            self.asked += 1
            yield found


def heed_ctrl_c() -> None:
    """In a child before it begins: Ctrl-C ends it, also where the tests run in the background and ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def quick(**changes: Any) -> TrainingConfig:
    """A training of seconds: two envs in this process, minute-long episodes."""
    fields: dict[str, Any] = {
        "name": "quick",
        "scenarios": [{"scenario": "paper", "overrides": ["measure.horizon_s=60"]}],
        "engine": "simpy",
        "total_steps": 32,
        "n_envs": 2,
        "vectorization": "none",
        "validation": {"seeds": {"first": 1_000_000, "count": 2}, "every_steps": 16, "timeline": False},
        "ppo": {"n_steps": 8, "batch_size": 8, "n_epochs": 2, "hidden": [8], "scaling_steps": 4},
    }
    return TrainingConfig.model_validate({**fields, **changes})


@pytest.fixture(name="quick")
def quick_fixture() -> Callable[..., TrainingConfig]:
    """`quick(**changes)`."""
    return quick


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration file with changed fields; a field set to ... is left out."""

    def write(**changes: Any) -> Path:
        fields = {**quick().model_dump(mode="json"), **changes}
        path = tmp_path / "training.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in fields.items() if v is not ...}))
        return path

    return write


_APP = typer.Typer()
for _name in ("compare", "report", "results", "sweep", "train", "tune", "evaluate", "demo"):
    _APP.command(_name)(getattr(commands, _name))


def invoke(arguments: Sequence[str]) -> Any:
    """Run a command of this room as `prfaas` would; exceptions pass through."""
    return CliRunner().invoke(_APP, list(arguments), catch_exceptions=False)


@pytest.fixture(name="run")
def run_fixture() -> Callable[..., str]:
    """`run("compare", ...)`: standard output of a command that must succeed."""

    def run(*arguments: str) -> str:
        result = invoke(arguments)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    return run
