"""From a Stable-Baselines3 policy to a policy bundle: the network as ONNX, the manifest, the model card.

`prfaas_env.bundle` runs what is written here without torch. The network takes the encoded observation; scaling and
every other step of the policy up to logits or actions is part of it.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnx
import onnx.reference
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.tqc.policies import TQCPolicy
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.sac.policies import SACPolicy

from prfaas_agents.card import model_card
from prfaas_agents.record import PolicyRecord
from prfaas_env import __version__
from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import (
    CARD_FILE,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    NETWORK_FILE,
    OBSERVATION,
    OUTPUTS,
    BundleManifest,
    DecisionRecord,
    FileRecord,
    InputRanges,
    NetworkRecord,
    StateRecord,
    TopologyRecord,
    TrainingRecord,
    sha256,
)
from prfaas_env.decision import ActionCodec
from prfaas_env.onnx_check import BadNetworkError, check_network

#: Version of the standard operators; onnxruntime 1.14 and later run it.
OPSET = 17
#: Largest relative difference between the policy and what was written, and how many readings it is checked on.
TOLERANCE = 1e-5
N_CHECKED = 64

HIDDEN, CELL = "hidden", "cell"


class _Actor(torch.nn.Module):
    """The deterministic part of a policy as one call: observation (and states) in, outputs (and states) out."""

    def __init__(self, policy: BasePolicy, codec: ActionCodec) -> None:
        super().__init__()
        self.policy = policy
        self.discrete = codec.form == "discrete"

    def _features(self, observation: torch.Tensor) -> torch.Tensor:
        policy: Any = self.policy
        features: torch.Tensor = BasePolicy.extract_features(
            policy, observation, policy.pi_features_extractor
        )
        return features

    def _heads(self, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        policy: Any = self.policy
        out: torch.Tensor = policy.action_net(latent)
        if self.discrete:
            return (out,)
        return torch.clamp(out, -1.0, 1.0), out, policy.log_std + 0.0 * out


class _FeedForward(_Actor):
    """PPO and MaskablePPO."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs of the bundle's form."""
        policy: Any = self.policy
        return self._heads(policy.mlp_extractor.forward_actor(self._features(observation)))


class _Recurrent(_Actor):
    """RecurrentPPO: hidden and cell state of the actor's LSTM in and out."""

    def forward(
        self, observation: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of the bundle's form, then the new states."""
        policy: Any = self.policy
        latent, (hidden, cell) = policy.lstm_actor(self._features(observation).unsqueeze(0), (hidden, cell))
        return (*self._heads(policy.mlp_extractor.forward_actor(latent.squeeze(0))), hidden, cell)


class _Squashed(torch.nn.Module):
    """SAC and TQC: the action is tanh of the mean."""

    def __init__(self, policy: BasePolicy) -> None:
        super().__init__()
        self.actor: Any = policy.actor

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Action, mean, logarithm of the standard deviation."""
        mean, log_std, _ = self.actor.get_action_dist_params(observation)
        return torch.tanh(mean), mean, log_std


@dataclass(frozen=True)
class ExportedNetwork:
    """A network as written: the file's bytes, what the manifest says of it, and how it was learned."""

    content: bytes
    record: NetworkRecord
    algorithm: str
    masked: bool


def policy_of(model: Any) -> BasePolicy:
    """The policy of an algorithm object, or the policy itself."""
    policy = getattr(model, "policy", model)
    if not isinstance(policy, BasePolicy):
        raise PrfaasError(f"export: {type(model).__name__} is not a Stable-Baselines3 model or policy")
    return policy


def _algorithm(policy: BasePolicy) -> str:
    kinds: tuple[tuple[type, str], ...] = (
        (RecurrentActorCriticPolicy, "recurrent_ppo"),
        (MaskableActorCriticPolicy, "maskable_ppo"),
        (ActorCriticPolicy, "ppo"),
        (TQCPolicy, "tqc"),
        (SACPolicy, "sac"),
    )
    for kind, name in kinds:
        if isinstance(policy, kind):
            return name
    raise PrfaasError(
        f"export: {type(policy).__name__} is not supported; policies of PPO, MaskablePPO, RecurrentPPO, SAC and TQC are"
    )


def _check_spaces(policy: BasePolicy, codec: ActionCodec, n_fields: int) -> None:
    wide = n_fields + getattr(policy, "foresight_fields", 0)  # columns of the critic alone are not exported
    if policy.observation_space.shape != (wide,) or not isinstance(policy.observation_space, gym.spaces.Box):
        raise PrfaasError(
            f"export: the policy observes {policy.observation_space}; the telemetry has {n_fields} values"
        )
    if policy.action_space != codec.space():
        raise PrfaasError(
            f"export: the policy acts in {policy.action_space}; the record says {codec.space()}"
        )


def export_network(model: Any, codec: ActionCodec, n_fields: int) -> ExportedNetwork:
    """The network of a policy as ONNX, compared with the policy before it is given back.

    Args:
        model: PPO, MaskablePPO, RecurrentPPO, SAC or TQC, or a policy of one of them. It is not changed.
        codec: codec of its actions.
        n_fields: length of the observation.

    Raises:
        PrfaasError: another kind of policy, spaces that do not fit, or a network that would not give the same.
    """
    policy = policy_of(model)
    algorithm = _algorithm(policy)
    _check_spaces(policy, codec, n_fields)
    if getattr(policy, "use_sde", False) or getattr(getattr(policy, "actor", None), "use_sde", False):
        raise PrfaasError("export: state-dependent exploration (use_sde) is not supported")
    distribution = getattr(policy, "action_dist", None)
    if codec.form == "continuous" and isinstance(policy, ActorCriticPolicy):
        assert isinstance(distribution, DiagGaussianDistribution)
    # without the distribution, which after learning holds a part of the last graph and cannot be copied
    own = copy.deepcopy(policy, {id(distribution): None}).to("cpu")
    own.set_training_mode(False)
    states: tuple[StateRecord, ...] = ()
    module: torch.nn.Module
    if isinstance(own, RecurrentActorCriticPolicy):
        module = _Recurrent(own, codec)
        shape = (own.lstm_actor.num_layers, 1, own.lstm_actor.hidden_size)
        states = tuple(StateRecord(input=n, output=f"{n}_next", shape=shape) for n in (HIDDEN, CELL))
    elif algorithm in ("sac", "tqc"):
        module = _Squashed(own)
    else:
        module = _FeedForward(own, codec)
    record = NetworkRecord(
        opset=OPSET, outputs=OUTPUTS[codec.form], squashed=algorithm in ("sac", "tqc"), states=states
    )
    content = _traced(module.eval(), record, n_fields)
    try:
        check_network(content)
    except BadNetworkError as error:
        raise PrfaasError(f"export: the network of {type(policy).__name__} {error}") from None
    _compare(module, content, record, n_fields)
    return ExportedNetwork(content, record, algorithm, masked=algorithm == "maskable_ppo")


def _zeros(record: NetworkRecord, n_fields: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(1, n_fields), *(torch.zeros(state.shape) for state in record.states))


def _traced(module: torch.nn.Module, record: NetworkRecord, n_fields: int) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # the tracing exporter is told to be old; it needs nothing but onnx, and these networks have no branches
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            _zeros(record, n_fields),
            file,
            dynamo=False,
            opset_version=OPSET,
            input_names=[OBSERVATION, *(state.input for state in record.states)],
            output_names=[*record.outputs, *(state.output for state in record.states)],
        )
    return file.getvalue()


def _compare(module: torch.nn.Module, content: bytes, record: NetworkRecord, n_fields: int) -> None:
    """Run both on the same readings, state after state; PrfaasError where they differ."""
    evaluator: Any = onnx.reference.ReferenceEvaluator(onnx.load_from_string(content))
    rng = np.random.default_rng(0)
    inputs = [t.numpy() for t in _zeros(record, n_fields)]
    n_heads = len(record.outputs)
    names = [OBSERVATION, *(state.input for state in record.states)]
    for _ in range(N_CHECKED):
        inputs[0] = rng.random((1, n_fields), dtype=np.float32)
        with torch.no_grad():
            expected = [t.numpy() for t in module(*(torch.as_tensor(x) for x in inputs))]
        with np.errstate(over="ignore"):  # of its sigmoid, far from 0
            found = evaluator.run(None, dict(zip(names, inputs, strict=True)))
        if not all(_close(a, b) for a, b in zip(expected, found, strict=True)):
            raise PrfaasError("export: the written network does not give what the policy gives")
        inputs[1:] = expected[n_heads:]


def _close(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return (
        bool(np.isfinite(a).all())
        and a.shape == b.shape
        and np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    )


def bundle_versions(
    packages: Sequence[str] = ("torch", "stable-baselines3", "sb3-contrib", "onnx"),
) -> dict[str, str]:
    """Versions of this package and of those that wrote the network."""
    return {"prfaas-env": __version__, **{name: metadata.version(name) for name in packages}}


def fill_bundle(
    folder: Path,
    model: Any,
    record: PolicyRecord,
    *,
    name: str,
    description: str = "",
    conversion_interval_s: float | None = None,
    input_ranges: InputRanges | None = None,
) -> BundleManifest:
    """Write the files of a bundle into a folder that nobody reads yet.

    Args:
        folder: an existing folder; give it its final name once this returns.
        model: what `export_network` takes.
        record: what is known of the policy and its training.
        name: name of the policy, for readers.
        description: a sentence for readers.
        conversion_interval_s: clock of the conversions in training, if known.
        input_ranges: what the telemetry fields were in training, if known.

    Raises:
        PrfaasError: see `export_network`.
    """
    seen, codec = record.telemetry, record.action.codec()
    network = export_network(model, codec, len(seen.names))
    draft = BundleManifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        name=name,
        description=description,
        network=network.record,
        telemetry=seen,
        topology=TopologyRecord(
            n_pd=seen.n_pd, n_prfaas=seen.n_prfaas, n_links=seen.n_links, links=record.links
        ),
        decision=DecisionRecord.of(
            codec,
            masked=network.masked,
            decision_interval_s=record.decision_interval_s,
            conversion_interval_s=conversion_interval_s,
        ),
        training=TrainingRecord(
            algorithm=network.algorithm,
            steps=record.steps,
            seed=record.training_seed,
            reward=record.reward,
            scenarios=record.trained_on,
            seed_ranges=record.seed_ranges,
            weights_sha256=record.weights_sha256,
        ),
        evaluation=record.validation,
        versions={**record.versions, **{f"export: {k}": v for k, v in bundle_versions().items()}},
        files={n: FileRecord(sha256="0" * 64, bytes=0) for n in (NETWORK_FILE, CARD_FILE)},
        input_ranges=input_ranges,
    )
    contents = {NETWORK_FILE: network.content, CARD_FILE: model_card(draft).encode()}
    files = {n: FileRecord(sha256=sha256(content), bytes=len(content)) for n, content in contents.items()}
    manifest = draft.model_copy(update={"files": files})
    for file, content in {**contents, MANIFEST_FILE: manifest.text().encode()}.items():
        (folder / file).write_bytes(content)
    return manifest
