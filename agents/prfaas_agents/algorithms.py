"""The algorithms by name, behind one interface. Each starts as "no change": earliest finish without conversions.

Discrete actions: PPO, maskable and recurrent PPO. Continuous ones: SAC and TQC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import TQC, MaskablePPO, RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.tqc.policies import TQCPolicy
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.sac.policies import SACPolicy

from prfaas_agents.foresight import FORESIGHT
from prfaas_agents.foresight_networks import ForesightPolicy, MaskableForesightPolicy
from prfaas_agents.ppo import LearningRate, policy_kwargs, start_neutral
from prfaas_agents.record import PolicyRecord
from prfaas_agents.settings import AlgorithmName, LearnerSettings, PpoSettings, SacSettings
from prfaas_env.decision import ActionCodec


@dataclass(frozen=True)
class Algorithm:
    """Classes of one algorithm."""

    learner: type[BaseAlgorithm]
    network: type[BasePolicy]
    masks: bool = False
    """Whether it takes the mask of the legal moves."""
    recurrent: bool = False


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "ppo": Algorithm(PPO, ForesightPolicy),
    "maskable_ppo": Algorithm(MaskablePPO, MaskableForesightPolicy, masks=True),
    "recurrent_ppo": Algorithm(RecurrentPPO, RecurrentActorCriticPolicy, recurrent=True),
    "sac": Algorithm(SAC, SACPolicy),
    "tqc": Algorithm(TQC, TQCPolicy),
}


def make_learner(
    vec_env: VecEnv,
    codec: ActionCodec,
    settings: LearnerSettings,
    seed: int,
    network: Mapping[str, int] | None = None,
) -> BaseAlgorithm:
    """A learner whose first policy is "no change". One torch thread: the networks are small.

    Args:
        vec_env: envs with the codec's action space.
        codec: action codec, of the form that the settings name.
        settings: hyper-parameters; their class says which algorithm.
        seed: seed of the weights, of action sampling and of the envs.
        network: sizes of the network beside its hidden layers, by name; default those of the settings.

    Raises:
        ValueError: a codec of the other form.
    """
    if codec.form != settings.form:
        raise ValueError(f"{settings.algorithm} needs the {settings.form} action form, found {codec.form}")
    torch.set_num_threads(1)
    classes = ALGORITHMS[settings.algorithm]
    sizes = settings.network if network is None else network
    arguments = policy_kwargs(settings.hidden, settings.activation, sizes)
    if isinstance(settings, PpoSettings):
        arguments["optimizer_kwargs"] = {"eps": settings.adam_epsilon}
    model = classes.learner(
        classes.network,
        vec_env,
        learning_rate=LearningRate(settings.learning_rate, settings.final_learning_rate),
        policy_kwargs=arguments,
        seed=seed,
        device="cpu",
        **settings.keywords(),
    )
    if isinstance(settings, PpoSettings):
        start_neutral(model, codec, settings.neutral_routing, settings.neutral_move)
    elif isinstance(settings, SacSettings):
        start_around_neutral(model, codec, settings.first_std)
    return model


def start_around_neutral(model: BaseAlgorithm, codec: ActionCodec, std: float) -> None:
    """Let a squashed Gaussian start at the neutral action in every state, with this spread before tanh.

    The output weights start at zero (they learn from the first step on), so the bias alone decides.
    """
    actor = model.policy.actor
    with torch.no_grad():
        for layer, bias in ((actor.mu, np.arctanh(codec.neutral())), (actor.log_std, math.log(std))):
            layer.weight.zero_()
            layer.bias.copy_(torch.as_tensor(bias, dtype=torch.float32).expand_as(layer.bias))


def make_network(record: PolicyRecord) -> BasePolicy:
    """A fresh network of the shape that a record describes."""
    fields = len(record.telemetry.names) + record.network.get(FORESIGHT, 0)
    arguments: dict[str, Any] = policy_kwargs(record.hidden, record.activation, record.network)
    return ALGORITHMS[record.algorithm].network(
        gym.spaces.Box(0.0, 1.0, shape=(fields,), dtype=np.float32),
        record.action.codec().space(),
        lambda _: 0.0,
        **arguments,
    )
