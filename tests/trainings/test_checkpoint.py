"""Checkpoints: complete, whole or absent, signed, and never a way for foreign code to run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prfaas_agents.algorithms import ALGORITHMS, make_learner
from prfaas_agents.ppo import FixedScaling
from prfaas_agents.settings import AlgorithmName
from prfaas_env.base import PrfaasError
from prfaas_trainings import signing
from prfaas_trainings.checkpoint import (
    Progress,
    checkpoints,
    newest,
    progress_of,
    read_state,
    remove_unfinished,
    restore,
    write_checkpoint,
)
from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.envs import TrainingEnvs, make_vec_env
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.training import Run, resume, train

Quick = Callable[..., TrainingConfig]
SMALL: dict[AlgorithmName, dict[str, Any]] = {
    "ppo": {"n_steps": 8, "batch_size": 8, "n_epochs": 1},
    "maskable_ppo": {"n_steps": 8, "batch_size": 8, "n_epochs": 1},
    "recurrent_ppo": {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "lstm_units": 8},
    "sac": {"buffer_size": 64, "learning_starts": 4, "batch_size": 8, "log_every": 8},
    "tqc": {"buffer_size": 64, "learning_starts": 4, "batch_size": 8, "log_every": 8, "n_quantiles": 5},
}


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def config_of(quick: Quick, name: AlgorithmName, **changes: Any) -> TrainingConfig:
    own = {"hidden": [8], "scaling_steps": 4, **SMALL[name]}
    return quick(**{"ppo": None, "algorithm": name, name: own, "total_steps": 16, **changes})


def learner(config: TrainingConfig, seed: int) -> Any:
    return make_learner(make_vec_env(config, None), config.codec(), config.settings, seed)


def draw_all(model: Any) -> list[Any]:
    """The next numbers of every generator that a training draws from."""
    return [
        torch.rand(3).tolist(),
        np.random.rand(3).tolist(),  # noqa: NPY002
        random.random(),
        model.action_space.sample().tolist(),
    ]


def flat(value: Any) -> list[Any]:
    """Every number in nested state."""
    if isinstance(value, torch.Tensor):
        return value.flatten().tolist()
    if isinstance(value, dict):
        return [x for k in sorted(value, key=str) for x in flat(value[k])]
    if isinstance(value, list | tuple):
        return [x for v in value for x in flat(v)]
    return [value]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_everything_comes_back(
    quick: Quick, tmp_path: Path, name: AlgorithmName, runner: EpisodeRunner
) -> None:
    config = config_of(quick, name)
    out = tmp_path / "run"
    train(config, out, runner=runner)
    folder = checkpoints(out)[-1]
    state = read_state(folder)
    assert progress_of(state).steps == 16
    one, two = learner(config, 5), learner(config, 6)
    restore(one, folder, state)
    drawn = draw_all(one)
    restore(two, folder, state)
    assert draw_all(two) == drawn
    assert one.num_timesteps == two.num_timesteps == 16
    assert one._n_updates == two._n_updates > 0
    assert flat(one.get_parameters()) == flat(two.get_parameters())
    stored = torch.load(folder / "state.pt", weights_only=True)["learner"]
    assert flat(stored["state_dicts"]) == flat(one.get_parameters())
    fresh = learner(config, 5)
    assert flat(fresh.get_parameters()) != flat(one.get_parameters())
    # The input scaling is part of the weights: there are no statistics beside them to lose.
    scaling = next(m for m in one.policy.modules() if isinstance(m, FixedScaling))
    assert not torch.equal(scaling.gain, torch.ones_like(scaling.gain))
    if name in ("sac", "tqc"):
        assert one.replay_buffer.pos == two.replay_buffer.pos == 8
        assert np.array_equal(one.replay_buffer.observations, two.replay_buffer.observations)
        assert one.replay_buffer.observations[:8].any()
        assert torch.equal(one.log_ent_coef, two.log_ent_coef)
        assert not torch.equal(one.log_ent_coef, fresh.log_ent_coef)
        older = checkpoints(out)[0]
        assert not (older / "replay.pt").exists()
        with pytest.raises(PrfaasError, match=r"replay\.pt: is missing; only the newest"):
            restore(one, older, read_state(older))


@pytest.fixture
def run_folder(quick: Quick, tmp_path: Path, runner: EpisodeRunner) -> Path:
    out = tmp_path / "run"
    train(quick(total_steps=16), out, runner=runner)
    return out


def test_a_checkpoint_holds_what_the_page_says(run_folder: Path) -> None:
    for folder in checkpoints(run_folder):
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.yaml",
            "policy.json",
            "policy.zip",
            "signature.json",
            "state.json",
            "state.pt",
        ]
        assert signing.distrust(folder) is None


def test_it_is_absent_until_it_is_whole(
    quick: Quick, run_folder: Path, runner: EpisodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure at each file in turn leaves the checkpoints that were there, and nothing that looks like one."""
    config = quick(total_steps=16)
    model = learner(config, 0)
    envs = TrainingEnvs(config, run_folder / "episodes", 1, 16)
    record = Run(config, run_folder, envs, runner, _Silent()).record(32, {})
    progress = Progress(32, 1.0, 0, [], 0)
    before = checkpoints(run_folder)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    for what in ("save_policy", "write_whole", "sign"):
        with monkeypatch.context() as patch:
            patch.setattr(f"prfaas_trainings.checkpoint.{what}", fail)
            with pytest.raises(OSError, match="disk full"):
                write_checkpoint(model, record, "", progress, run_folder)
        assert checkpoints(run_folder) == before
    remove_unfinished(run_folder)
    assert sorted((run_folder / "checkpoints").iterdir()) == before
    assert write_checkpoint(model, record, "", progress, run_folder) == checkpoints(run_folder)[-1]


class _Silent:
    def say(self, text: str) -> None:
        pass

    def begin(self, done: float) -> None:
        pass


# ------------------------------------------------------------------------------------------------ trust


def test_a_changed_or_foreign_checkpoint_needs_trust(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = checkpoints(run_folder)[-1]
    assert newest(run_folder, trust=False) == last
    config = last / "config.yaml"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(PrfaasError, match=r"changed: config\.yaml; .* add --trust"):
        newest(run_folder, trust=False)
    assert newest(run_folder, trust=True) == last
    signing.sign(last)
    (last / "more.txt").write_text("")
    with pytest.raises(PrfaasError, match=r"not signed: more\.txt"):
        newest(run_folder, trust=False)
    (last / "more.txt").unlink()
    (last / "state.json").rename(last / "away")
    with pytest.raises(PrfaasError, match=r"missing: state\.json; not signed: away"):
        newest(run_folder, trust=False)
    (last / "away").rename(last / "state.json")
    assert newest(run_folder, trust=False) == last
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user"))
    with pytest.raises(PrfaasError, match="was signed with another key than this user's"):
        newest(run_folder, trust=False)
    (last / "signature.json").unlink()
    with pytest.raises(PrfaasError, match=r"holds no readable signature\.json"):
        newest(run_folder, trust=False)


def test_the_key_is_made_once_and_private() -> None:
    first = signing._key()
    assert signing._key() == first
    assert len(first) == 32
    assert signing.key_file().stat().st_mode & 0o077 == 0
    assert [p.name for p in signing.key_file().parent.iterdir()] == ["signing.key"]


class Harmful:
    """Pickled, it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "harm"))


def test_nothing_pickled_runs_even_with_trust(
    run_folder: Path, tmp_path: Path, runner: EpisodeRunner
) -> None:
    harm = tmp_path / "harm"
    last = checkpoints(run_folder)[-1]
    torch.save({"learner": Harmful(harm)}, last / "state.pt")
    with pytest.raises(PrfaasError, match=r"state\.pt: is not a file of plain weights"):
        resume(run_folder, runner=runner, trust=True, total_steps=32)
    assert not harm.exists()


def test_broken_parts_are_named(run_folder: Path, tmp_path: Path, runner: EpisodeRunner) -> None:
    def broken(change: Callable[[Path], None]) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run_folder, copy)
        change(checkpoints(copy)[-1])
        with pytest.raises(PrfaasError) as caught:
            resume(copy, runner=runner, trust=True, total_steps=32)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "state.json: cannot be read" in broken(lambda f: (f / "state.json").unlink())
    assert "state.json: is not JSON" in broken(lambda f: (f / "state.json").write_text("{") and None)
    assert "is not a training state of format 1" in broken(
        lambda f: (f / "state.json").write_text("{}") and None
    )
    assert "state.pt: cannot be read" in broken(lambda f: (f / "state.pt").unlink())

    def wider(folder: Path) -> None:
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(text.replace("- 8\n", "- 9\n"))

    assert "state.pt: does not fit the configuration" in broken(wider)

    def unvalidated(folder: Path) -> None:
        (folder.parent.parent / "validation.json").unlink()

    assert "validation.json: is not a list of validations" in broken(unvalidated)


def test_another_observation_is_refused_by_field(run_folder: Path, runner: EpisodeRunner) -> None:
    path = checkpoints(run_folder)[-1] / "policy.json"
    record = json.loads(path.read_text())
    names, fields = record["telemetry"]["names"], record["telemetry"]["fields"]
    gone = names.pop(3)
    fields.pop(3)
    names.append("pd0.moon_phase")
    fields.append({**fields[-1], "name": "pd0.moon_phase"})
    path.write_text(json.dumps(record))
    with pytest.raises(PrfaasError, match=rf"added: {gone}; removed: pd0\.moon_phase; moved: "):
        resume(run_folder, runner=runner, trust=True, total_steps=32)


def test_other_versions_and_scenarios_are_noted(
    run_folder: Path, runner: EpisodeRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoints(run_folder)[-1] / "policy.json"
    record = json.loads(path.read_text())
    record["versions"]["torch"] = "1.0"
    record["trained_on"][0]["hash"] = "0" * 12
    path.write_text(json.dumps(record))
    resume(run_folder, runner=runner, trust=True, total_steps=32)
    said = capsys.readouterr().err
    assert f"note: the checkpoint was written with torch 1.0 (now {torch.__version__.split('+')[0]}" in said
    assert "note: scenario paper is not as it was: its hash was 000000000000" in said


def test_the_draws_of_the_envs_go_on(quick: Quick, tmp_path: Path, runner: EpisodeRunner) -> None:
    """The next episodes after a restored state are those that the first process would have played next."""
    for form in ({}, {"vectorization": "batched", "engine": "compiled"}):
        config = quick(total_steps=16, **form)
        (tmp_path / "episodes").mkdir(exist_ok=True)
        envs = TrainingEnvs(config, tmp_path / "episodes", 0, 0)
        envs.vec_env.seed(3)
        envs.vec_env.reset()
        stored = json.loads(json.dumps(envs.draw_states()))
        envs.vec_env.reset()
        expected = [info["episode_seed"] for info in envs.vec_env.unwrapped.reset_infos]
        again = TrainingEnvs(config, tmp_path / "episodes", 1, 8)
        again.vec_env.seed(99)
        again.set_draw_states(stored)
        again.vec_env.reset()
        assert [info["episode_seed"] for info in again.vec_env.unwrapped.reset_infos] == expected
        assert len(set(expected)) == 2
