"""Trained policies without pickle: a bundle as a `Policy`, and a policy that can be exchanged while it runs.

The network runs in onnxruntime (extra `[policy]`), which is imported when the first bundle is made. Masks, sampling
and decoding to decisions happen here, with the same `ActionCodec` as in training.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_env.base import PrfaasError, one_line, stream
from prfaas_env.bundle_manifest import (
    ACTION,
    LOG_STD,
    LOGITS,
    MEAN,
    NETWORK_FILE,
    OBSERVATION,
    BundleFiles,
    BundleManifest,
    read_bundle,
)
from prfaas_env.decision import N_MOVES, Decision
from prfaas_env.onnx_check import BadNetworkError, check_network
from prfaas_env.policy import OwnInterval, Policy, PolicyContext, make_policy, refuse_simulator_only
from prfaas_env.sites import link_pairs
from prfaas_env.telemetry import Telemetry, TelemetrySchema

Float32 = NDArray[np.float32]

_NEEDS = "a policy bundle needs onnxruntime: pip install 'prfaas-env[policy]'"


class Network:
    """A checked ONNX network in one onnxruntime thread.

    Args:
        files: the bundle.

    Raises:
        PrfaasError: no onnxruntime, a network that may not run, or one whose inputs or outputs are not those of the
            manifest.
    """

    def __init__(self, files: BundleFiles) -> None:
        self._where = files.folder / NETWORK_FILE
        try:
            check_network(files.network)
        except BadNetworkError as error:
            raise PrfaasError(f"{self._where}: {error}") from None
        try:
            import onnxruntime
        except ImportError:
            raise PrfaasError(f"bundle {files.folder}: {_NEEDS}") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # what is wrong comes as an exception
        try:
            self._session = onnxruntime.InferenceSession(
                files.network, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the runtime raises classes of its own
            raise PrfaasError(f"{self._where}: onnxruntime refuses it: {one_line(error)}") from None
        self._check(files.manifest)

    def _check(self, manifest: BundleManifest) -> None:
        record = manifest.network
        shapes = {OBSERVATION: [1, len(manifest.telemetry.names)]}
        shapes.update({state.input: list(state.shape) for state in record.states})
        found = {i.name: (i.type, i.shape) for i in self._session.get_inputs()}
        for name in found.keys() ^ shapes.keys():
            raise PrfaasError(f"{self._where}: input {name!r} is in only one of network and manifest")
        for name, sizes in shapes.items():
            if found[name] != ("tensor(float)", sizes):
                kind, other = found[name]
                raise PrfaasError(
                    f"{self._where}: input {name!r} is {kind} {other}; the manifest says float {sizes}"
                )
        codec = manifest.decision.codec()
        parts = (len(codec.grid) + N_MOVES) * codec.n_pd if codec.form == "discrete" else 2 * codec.n_pd
        wanted: dict[str, tuple[int, ...]] = dict.fromkeys(record.outputs, (1, parts))
        wanted.update({state.output: state.shape for state in record.states})
        for name in {o.name for o in self._session.get_outputs()} ^ wanted.keys():
            raise PrfaasError(f"{self._where}: output {name!r} is in only one of network and manifest")
        # once for real, since shapes in the file are only claims
        zeros = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
        for (name, shape), value in zip(wanted.items(), self.run(list(wanted), zeros), strict=True):
            if value.shape != shape or value.dtype != np.float32:
                raise PrfaasError(
                    f"{self._where}: output {name!r} has shape {value.shape} of {value.dtype}; "
                    f"the manifest asks for {shape} of float32"
                )

    def run(self, outputs: list[str], inputs: dict[str, Float32]) -> list[Float32]:
        """The named outputs; PrfaasError if it fails or gives numbers that are not finite."""
        try:
            values: list[Float32] = self._session.run(outputs, inputs)
        except Exception as error:  # the runtime raises classes of its own
            raise PrfaasError(f"{self._where}: onnxruntime failed: {one_line(error)}") from None
        for name, value in zip(outputs, values, strict=True):
            # float64 cannot overflow here; for so few numbers lists are quicker than array functions
            if not math.isfinite(sum(value.ravel().tolist())):
                raise PrfaasError(f"{self._where}: output {name!r} is not finite")
        return values


class BundlePolicy:
    """A policy bundle, deterministic unless `sample` is set.

    It decides every `decision_interval_s` that it was trained with and holds its routing between; a move is ordered
    once. A move that is not legal now is masked or becomes none, as in its training. Recurrent state starts at zero
    with every `reset` and advances with every decision.

    Args:
        path: folder of the bundle.
        sample: draw actions from the policy's distribution instead of taking the most likely ones.
        seed: seed of the draws; by default that of the context. Needs `sample`.

    Raises:
        PrfaasError: one line with the file or field that is wrong; in `reset`: other telemetry than the policy was
            trained on (the fields are named), links that join other clusters, or a control interval that does not
            divide its own.
    """

    constant = False
    learned = True

    def __init__(self, path: str | Path, sample: bool = False, seed: int | None = None) -> None:
        if not isinstance(sample, bool):
            raise PrfaasError(f"bundle {path}: sample is {sample!r}; allowed: true, false")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise PrfaasError(f"bundle {path}: seed is {seed!r}; a whole number of at least 0")
        if seed is not None and not sample:
            raise PrfaasError(f"bundle {path}: seed needs sample=true")
        files = read_bundle(str(path))
        self.folder = files.folder
        self.manifest = files.manifest
        self.fingerprint = files.fingerprint
        self._network = Network(files)
        self._sample, self._seed = sample, seed
        self._decision = self.manifest.decision
        self._codec = self._decision.codec()
        self._states = self.manifest.network.states
        continuous = [MEAN, LOG_STD] if sample else [ACTION]
        heads = [LOGITS] if self._codec.form == "discrete" else continuous
        self._n_heads = len(heads)
        self._outputs = [*heads, *(state.output for state in self._states)]
        self._clock = OwnInterval(self._decision.decision_interval_s, f"bundle {self.folder}")
        self._schema: TelemetrySchema | None = None
        self._rng = np.random.default_rng(0)
        self._inputs: dict[str, Float32] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BundlePolicy:
        """A copy with a state of its own; the network, which has none, is shared."""
        other = copy.copy(self)
        other._rng = copy.deepcopy(self._rng, memo)
        other._clock = copy.copy(self._clock)
        other._inputs = dict(self._inputs)  # arrays are replaced, never written to
        return other

    @property
    def decision_interval_s(self) -> float:
        """Time between two decisions: it need not be asked in between."""
        return self._decision.decision_interval_s

    @property
    def seen_seeds(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the episode seeds that it was trained or chosen on."""
        return tuple(self.manifest.training.seed_ranges.values())

    @property
    def seen_slices(self) -> tuple[tuple[str, float, float], ...]:
        """(file, first second, last second) of the traces that it was trained on."""
        return tuple(t.slice for t in self.manifest.training.scenarios if t.slice is not None)

    def reset(self, context: PolicyContext) -> None:
        """Start an episode; refuses a deployment that it does not fit."""
        misfit = self.manifest.telemetry.misfit(
            context.schema, self.manifest.topology.links, link_pairs(context.scenario.deployment)
        )
        if misfit:
            raise PrfaasError(f"bundle {self.folder}: {misfit}")
        self._clock.reset(context)
        self._schema = context.schema
        self._rng = stream(context.seed if self._seed is None else self._seed, "policy")
        self._inputs = {s.input: np.zeros(s.shape, dtype=np.float32) for s in self._states}

    def decide(self, telemetry: Telemetry) -> Decision:
        """A new decision at the start of each interval of its own, the held one in between."""
        if not self._clock.is_due(telemetry):
            return self._clock.held
        if telemetry.schema is not self._schema and telemetry.schema != self._schema:
            raise PrfaasError(
                f"bundle {self.folder}: telemetry has another schema than the context of reset()"
            )
        return self._clock.decided(telemetry, self._codec.decode(self.act(telemetry)))

    def act(self, telemetry: Telemetry) -> NDArray[Any]:
        """The action at a reading, shape (2 * n_pd,): one step of the network, which moves recurrent state on."""
        inputs = {OBSERVATION: telemetry.encode()[np.newaxis], **self._inputs}
        values = self._network.run(self._outputs, inputs)
        self._inputs = {s.input: v for s, v in zip(self._states, values[self._n_heads :], strict=True)}
        if self._codec.form == "discrete":
            return self._discrete(values[0][0].tolist(), telemetry)
        if not self._sample:
            action: Float32 = values[0][0]
            return action
        mean, log_std = (v[0].astype(np.float64) for v in values[:2])
        raw = mean + np.exp(np.minimum(log_std, 20.0)) * self._rng.standard_normal(len(mean))
        drawn: NDArray[np.float64] = (
            np.tanh(raw) if self.manifest.network.squashed else np.clip(raw, -1.0, 1.0)
        )
        return drawn

    def _discrete(self, logits: list[float], telemetry: Telemetry) -> NDArray[np.int64]:
        n_grid, at = len(self._codec.grid), 0
        action = []
        for legal in telemetry.legal_moves:
            action.append(self._choose(logits[at : at + n_grid]))
            moves = logits[at + n_grid : at + n_grid + N_MOVES]
            if self._decision.masked:
                moves = [x if allowed else -math.inf for x, allowed in zip(moves, legal, strict=True)]
            action.append(self._choose(moves))
            at += n_grid + N_MOVES
        return np.array(action, dtype=np.int64)

    def _choose(self, logits: list[float]) -> int:
        """The first of the largest logits, or a draw from softmax."""
        top = max(logits)
        if not self._sample:
            return logits.index(top)
        reached, total = [], 0.0
        for x in logits:
            total += math.exp(x - top)
            reached.append(total)
        return min(bisect.bisect_right(reached, self._rng.random() * total), len(logits) - 1)


# ----------------------------------------------------------------------------------------- exchange


@dataclasses.dataclass(frozen=True)
class ActivePolicy:
    """Which policy decides: its spec, 12 hex digits of a bundle (empty for a rule), how often one was put in place."""

    spec: str
    fingerprint: str
    generation: int

    def __str__(self) -> str:
        return f"{self.spec}{f' ({self.fingerprint})' if self.fingerprint else ''}"


@dataclasses.dataclass(frozen=True)
class ReloadResult:
    """What a reload led to; `error` is None when it took place."""

    active: ActivePolicy
    error: str | None

    def __str__(self) -> str:
        if self.error is None:
            return f"policy {self.active} is active"
        return f"policy {self.active} stays active: {self.error}"


class ReloadablePolicy:
    """A policy that can be exchanged for another one, or for its file's new content, while it runs.

    A rule by name, a bundle's folder and `module:Class` are all the same here (see `make_policy`). A new policy
    starts without recurrent state and decides at the next reading. `reload` may be called from another thread.

    Args:
        spec: the first policy.

    Raises:
        PrfaasError: the first policy is wrong: there is none to stay with.
    """

    constant = False

    def __init__(self, spec: str) -> None:
        self._lock = threading.Lock()
        self._context: PolicyContext | None = None
        self._policy: Policy = _from_telemetry(spec)
        self._active = _active(spec, self._policy, 1)

    @property
    def active(self) -> ActivePolicy:
        """Which policy decides now."""
        return self._active

    @property
    def policy(self) -> Policy:
        """The policy that decides now."""
        return self._policy

    def reload(self, spec: str | None = None) -> ReloadResult:
        """Put another policy in place, or the same one read anew; one that is wrong leaves the present one there."""
        wanted = self._active.spec if spec is None else spec
        with self._lock:
            try:
                policy = _from_telemetry(wanted)
                if self._context is not None:
                    policy.reset(self._context)
            except Exception as error:  # whatever a policy raises, the present one goes on
                told = (
                    str(error) if isinstance(error, PrfaasError) else f"policy {wanted!r}: {one_line(error)}"
                )
                return ReloadResult(self._active, told)
            self._policy = policy
            self._active = _active(wanted, policy, self._active.generation + 1)
            return ReloadResult(self._active, None)

    def reset(self, context: PolicyContext) -> None:
        """Start an episode with the active policy."""
        with self._lock:
            self._policy.reset(context)
            self._context = context

    def decide(self, telemetry: Telemetry) -> Decision:
        """Decision of the active policy."""
        return self._policy.decide(telemetry)


def _from_telemetry(spec: str) -> Policy:
    """A policy that can run outside the simulator."""
    policy = make_policy(spec)
    refuse_simulator_only(policy, spec, "run outside it")
    return policy


def _active(spec: str, policy: Policy, generation: int) -> ActivePolicy:
    return ActivePolicy(spec, str(getattr(policy, "fingerprint", None) or ""), generation)
