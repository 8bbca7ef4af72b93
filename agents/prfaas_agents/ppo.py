"""The parts of Stable-Baselines3 learners that start as "no change": earliest finish without conversions.

Observation values lie in [0, 1], but many of them move in a small part of it (3 or 5 instances of up to 10,000, on a
log scale). The network therefore begins with a fixed scaling per field, measured once before learning and then part
of the weights: there are no running statistics that could be lost or differ between training and use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from prfaas_agents.record import POLICY_FILE, RECORD_FILE, PolicyRecord, file_sha256
from prfaas_agents.settings import ActivationName
from prfaas_env.base import write_whole
from prfaas_env.decision import N_MOVES, ActionCodec

#: Smallest spread that a field is scaled by, and largest scaled value.
MIN_SPREAD = 0.01
MAX_SCALED = 10.0


class FixedScaling(BaseFeaturesExtractor):
    """(observation - shift) * gain per field, clipped to -10..10. Both are buffers, saved with the weights.

    Columns that only a critic reads (`foresight`) come last, and observations may lack them.
    """

    shift: torch.Tensor
    gain: torch.Tensor

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        n = gym.spaces.utils.flatdim(observation_space)
        super().__init__(observation_space, features_dim=n)
        self.register_buffer("shift", torch.zeros(n))
        self.register_buffer("gain", torch.ones(n))

    def fit(self, observations: NDArray[np.float32]) -> None:
        """Take mean and spread per field from observations, shape (samples, fields)."""
        spread = np.maximum(observations.std(axis=0), MIN_SPREAD)
        n = observations.shape[1]
        with torch.no_grad():
            self.shift[:n] = torch.as_tensor(observations.mean(axis=0))
            self.gain[:n] = torch.as_tensor(1.0 / spread)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Scaled observations, same shape."""
        n = observations.shape[-1]
        return torch.clamp((observations - self.shift[:n]) * self.gain[:n], -MAX_SCALED, MAX_SCALED)


ACTIVATIONS: dict[ActivationName, type[torch.nn.Module]] = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}


def policy_kwargs(
    hidden: tuple[int, ...], activation: ActivationName = "tanh", sizes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Fixed scaling, then `hidden` layers for actor and critic each; `sizes` of what else a network has."""
    return {
        **(sizes or {}),
        "net_arch": list(hidden),
        "activation_fn": ACTIVATIONS[activation],
        "features_extractor_class": FixedScaling,
    }


def fit_scaling(model: BaseAlgorithm, steps: int) -> None:
    """Measure the scaling of the model's networks: play its own (first) policy for `steps` steps of its vec env."""
    env = model.get_env()
    assert env is not None
    seen = [env.reset()]
    state, starts = None, np.ones(env.num_envs, dtype=bool)
    for _ in range(steps):
        actions, state = model.predict(seen[-1], state, starts, deterministic=False)  # type: ignore[arg-type]
        observations, _, starts, _ = env.step(actions)
        seen.append(observations)
    measured = np.concatenate(seen)  # type: ignore[arg-type]
    for scaling in model.policy.modules():
        if isinstance(scaling, FixedScaling):
            scaling.fit(measured)


@dataclass
class LearningRate:
    """Linear from `start` to `end` over the training, whether that is measured in steps or in time.

    Stable-Baselines3 calls it with its own progress, which knows steps alone; `done` (0 to 1) is set by the training.
    """

    start: float
    end: float
    done: float = 0.0

    def __call__(self, progress_remaining: float) -> float:
        """The rate now."""
        return self.start + (self.end - self.start) * min(max(self.done, 0.0), 1.0)


def start_neutral(model: BaseAlgorithm, codec: ActionCodec, p_routing: float, p_move: float) -> None:
    """Bias the action logits so that the neutral action has these probabilities in every state (nearly).

    The output weights of a fresh network are small (gain 0.01), so the bias decides: the deterministic policy is
    exactly the neutral action. A part with n choices gets the bias log(p (n - 1) / (1 - p)).

    Raises:
        ValueError: the continuous form, which has no logits.
    """
    if codec.form != "discrete":
        raise ValueError("the neutral start needs the discrete action form")
    neutral = codec.neutral()
    layer = model.policy.action_net
    assert isinstance(layer, torch.nn.Linear)
    part = 0
    with torch.no_grad():
        layer.bias.zero_()
        for k, n in enumerate([len(codec.grid), N_MOVES] * codec.n_pd):
            p = p_routing if k % 2 == 0 else p_move
            if n > 1:
                layer.bias[part + int(neutral[k])] = math.log(p * (n - 1) / (1.0 - p))
            part += n


def settle_routing(model: BaseAlgorithm, codec: ActionCodec) -> None:
    """Let the bias alone choose the routing (discrete form): while nothing is learned of it, it is "no change"."""
    layer = model.policy.action_net
    assert isinstance(layer, torch.nn.Linear)
    with torch.no_grad():
        layer.weight[routing_rows(codec)] = 0.0


def routing_rows(codec: ActionCodec) -> list[int]:
    """Rows of the action layer that choose the routing (discrete form)."""
    width = len(codec.grid) + N_MOVES
    return [pd * width + k for pd in range(codec.n_pd) for k in range(len(codec.grid))]


def set_progress(model: BaseAlgorithm, done: float) -> None:
    """Tell the learning rate how much of the training is done (0 to 1)."""
    rate = model.learning_rate
    assert isinstance(rate, LearningRate)
    rate.done = done


def action_probabilities(
    model: BaseAlgorithm, observation: np.ndarray[Any, Any]
) -> list[np.ndarray[Any, Any]]:
    """Probabilities of each action part at one observation, in the order of the action."""
    with torch.no_grad():
        tensor, _ = model.policy.obs_to_tensor(observation)
        distribution = model.policy.get_distribution(tensor)
    parts: Any = distribution.distribution
    return [part.probs.numpy()[0] for part in parts]


def save_policy(model: BaseAlgorithm, record: PolicyRecord, folder: Path) -> Path:
    """Write `policy.zip` (Stable-Baselines3) and `policy.json` into a folder, each whole or not at all.

    `record.weights_sha256` is filled in here.

    Returns:
        The path of `policy.zip`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / POLICY_FILE
    temporary = folder / f".{POLICY_FILE}.tmp.zip"
    model.save(temporary)
    done = record.model_copy(update={"weights_sha256": file_sha256(temporary)})
    temporary.replace(file)
    write_whole(folder / RECORD_FILE, done.model_dump_json(indent=2) + "\n")
    return file
