"""Checkpoints: everything that a training needs to go on, in a folder that is whole or absent.

policy.zip, policy.json   the policy with its record (observation schema, versions, seeds)
config.yaml               the training's configuration
state.pt                  weights, optimisers, torch's generator; read as weights alone, nothing pickled is run
state.json                counters, time used, generators of Python, NumPy, the action space and the envs' draws
replay.pt                 (SAC, TQC) the replay buffer; kept in the newest checkpoint only
signature.json            see `signing`
"""

from __future__ import annotations

import json
import random
import shutil
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm

from prfaas_agents.ppo import save_policy
from prfaas_agents.record import PolicyRecord
from prfaas_env.base import PrfaasError, write_whole
from prfaas_trainings.signing import distrust, sign

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.yaml"
STATE_FILE = "state.json"
TENSORS_FILE = "state.pt"
REPLAY_FILE = "replay.pt"
_FORMAT = 1
_REPLAY_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


@dataclass(frozen=True)
class Progress:
    """What a training counts itself."""

    steps: int
    elapsed_s: float
    """Time used, of all legs together."""
    leg: int
    """How often it was resumed."""
    draws: list[dict[str, Any]]
    """States of the envs' generators."""
    stage: int
    routing_fitted: bool = False
    """Whether this is the policy of the routing fit, which comes after learning."""


def step_folder(out: Path, steps: int) -> Path:
    """Folder of the checkpoint at a step."""
    return out / CHECKPOINTS / f"step_{steps:09d}"


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run in order of steps; what was being written when a run was killed is not among them."""
    folder = out / CHECKPOINTS
    return sorted(p for p in folder.glob("step_*") if p.is_dir()) if folder.is_dir() else []


def write_checkpoint(
    model: BaseAlgorithm, record: PolicyRecord, config: str, progress: Progress, out: Path
) -> Path:
    """Write a checkpoint, whole or not at all.

    Returns:
        Its folder.
    """
    folder = step_folder(out, progress.steps)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    save_policy(model, record, temporary)
    write_whole(temporary / CONFIG_FILE, config)
    torch.save({"learner": _tensors(model), "torch_random": torch.get_rng_state()}, temporary / TENSORS_FILE)
    write_whole(temporary / STATE_FILE, json.dumps(_state(model, progress), allow_nan=False) + "\n")
    if getattr(model, "replay_buffer", None) is not None:
        torch.save(_replay(model), temporary / REPLAY_FILE)
    sign(temporary)
    temporary.rename(folder)
    for older in checkpoints(out):
        if older != folder:
            (older / REPLAY_FILE).unlink(missing_ok=True)
    return folder


def remove_unfinished(out: Path) -> None:
    """Remove what was being written when a run was killed."""
    for left in (out / CHECKPOINTS).glob(".step_*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def newest(out: Path, trust: bool) -> Path:
    """The newest checkpoint of a run.

    Raises:
        PrfaasError: there is none, or it is not as this user wrote it and `trust` is False.
    """
    found = checkpoints(out)
    if not found:
        raise PrfaasError(f"--resume {out}: holds no checkpoint in {CHECKPOINTS}/")
    why = distrust(found[-1], frozenset({REPLAY_FILE}))
    if why is not None and not trust:
        raise PrfaasError(
            f"{found[-1]}: {why}; a checkpoint that is not your own can be harmful: add --trust if you know where it "
            "comes from"
        )
    return found[-1]


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint; PrfaasError with the fault in one line."""
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PrfaasError(f"{path}: is not JSON: {error}") from None
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise PrfaasError(f"{path}: is not a training state of format {_FORMAT}")
    return state


def progress_of(state: Mapping[str, Any]) -> Progress:
    """The counters of a stored state."""
    return Progress(**state["progress"])


def restore(model: BaseAlgorithm, folder: Path, state: Mapping[str, Any]) -> None:
    """Put a checkpoint's weights, optimisers, counters, replay buffer and generators into a fresh learner.

    Raises:
        PrfaasError: a file is missing, broken, or of another network.
    """
    loaded = _load(folder / TENSORS_FILE)
    try:
        parts = loaded["learner"]
        model.set_parameters(parts["state_dicts"], exact_match=True, device=model.device)
        with torch.no_grad():
            for name, value in parts["variables"].items():
                attrgetter(name)(model).copy_(value)
    except (KeyError, ValueError, RuntimeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        raise PrfaasError(f"{folder / TENSORS_FILE}: does not fit the configuration: {first}") from None
    model.num_timesteps = state["progress"]["steps"]
    model._n_updates = state["updates"]
    model._episode_num = state["episodes"]
    model.ep_info_buffer = deque(state["last_episodes"], maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(maxlen=model._stats_window_size)
    if getattr(model, "replay_buffer", None) is not None:
        _restore_replay(model, folder / REPLAY_FILE)
    _restore_random(model, state["random"], loaded["torch_random"])


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a broken file makes the reader raise many things
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PrfaasError(f"{path}: is not a file of plain weights: {first}") from None


# ------------------------------------------------------------------------------------- what is stored


def _tensors(model: BaseAlgorithm) -> dict[str, Any]:
    _, variables = model._get_torch_save_params()
    return {
        "state_dicts": model.get_parameters(),
        "variables": {name: attrgetter(name)(model).detach().clone() for name in variables},
    }


def _state(model: BaseAlgorithm, progress: Progress) -> dict[str, Any]:
    episodes = [{k: float(v) for k, v in e.items() if k in "rlt"} for e in model.ep_info_buffer or ()]
    return {
        "format": _FORMAT,
        "progress": vars(progress),
        "updates": int(model._n_updates),
        "episodes": int(model._episode_num),
        "last_episodes": episodes,
        "random": _random_state(model),
    }


def _random_state(model: BaseAlgorithm) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (Stable-Baselines3 draws from it)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {**numpy_state, "state": {k: _plain(v) for k, v in numpy_state["state"].items()}},
        "actions": model.action_space.np_random.bit_generator.state,
    }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _restore_random(model: BaseAlgorithm, stored: Mapping[str, Any], torch_state: torch.Tensor) -> None:
    version, numbers, gauss = stored["python"]
    random.setstate((version, tuple(numbers), gauss))
    given = dict(stored["numpy"])
    given["state"] = {**given["state"], "key": np.array(given["state"]["key"], dtype=np.uint32)}
    np.random.set_state(given)  # noqa: NPY002
    model.action_space.np_random.bit_generator.state = stored["actions"]
    torch.set_rng_state(torch_state)


def _replay(model: Any) -> dict[str, Any]:
    """The filled part of the replay buffer."""
    buffer = model.replay_buffer
    n = buffer.buffer_size if buffer.full else buffer.pos
    arrays = {name: torch.as_tensor(getattr(buffer, name)[:n].copy()) for name in _REPLAY_ARRAYS}
    return {"pos": int(buffer.pos), "full": bool(buffer.full), "arrays": arrays}


def _restore_replay(model: Any, path: Path) -> None:
    if not path.is_file():
        raise PrfaasError(f"{path}: is missing; only the newest checkpoint keeps the replay buffer")
    stored = _load(path)
    buffer = model.replay_buffer
    for name, values in stored["arrays"].items():
        target = getattr(buffer, name)
        if target[: len(values)].shape != tuple(values.shape):
            raise PrfaasError(f"{path}: {name} has shape {tuple(values.shape)}, the buffer {target.shape}")
        target[: len(values)] = values.numpy()
    buffer.pos, buffer.full = stored["pos"], stored["full"]
