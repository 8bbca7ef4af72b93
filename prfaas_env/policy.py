"""The policy protocol, and policies by name.

A policy maps telemetry to a decision. It cannot tell whether it runs in the simulator or in the router:
both call `reset` once and then `decide` on every tick of the fast clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import yaml

from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import MANIFEST_FILE, is_bundle
from prfaas_env.decision import Decision
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.telemetry import Telemetry, TelemetrySchema

if TYPE_CHECKING:
    from prfaas_env.simulator.engine import Engine

_GROUP = "prfaas.policies"


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may know before the first tick: the planned scenario (nominal values, laws of the load), the
    telemetry schema, and a seed for randomness of its own. Never the drawn workload or true link capacity."""

    scenario: Scenario
    schema: TelemetrySchema
    seed: int


@runtime_checkable
class Policy(Protocol):
    """Telemetry in, decision out.

    `constant` is True for a policy whose decision never changes: it may be asked once per episode. A policy that
    decides at an interval of its own and holds its routing between (see `OwnInterval`) may say so with an attribute
    `decision_interval_s`: the simulator then asks it at the multiples of that alone.
    """

    constant: bool

    def reset(self, context: PolicyContext) -> None:
        """Start an episode."""

    def decide(self, telemetry: Telemetry) -> Decision:
        """Decision for the interval that starts now."""


class SimulatorPolicy(Policy, Protocol):
    """A policy that looks into the running simulator beside the telemetry: a planner. It runs nowhere else.

    It is marked by `simulator_only = True`. `attach` is called after `reset` and before the first `decide`, with the
    compiled engine whose telemetry it will get; it may copy that engine's state (see `prfaas_env.branches`), and must
    not change it.
    """

    simulator_only: bool

    def attach(self, engine: Any) -> None:
        """Take the engine of the episode, a `CompiledEngine` at its start."""


def is_simulator_only(policy: Policy) -> bool:
    """Whether a policy looks into the simulator, see `SimulatorPolicy`."""
    return bool(getattr(policy, "simulator_only", False))


def refuse_simulator_only(policy: Policy, spec: str, where: str) -> None:
    """Check that a policy lives on telemetry alone.

    Raises:
        PrfaasError: it looks into the simulator; one line that names it and says what it cannot: `where`.
    """
    if is_simulator_only(policy):
        raise PrfaasError(
            f"policy {spec!r} looks into the simulator and cannot {where}; it runs in simulate, compare, sweep "
            "and watch, on the compiled engine"
        )


def begin_episode(policy: Policy, context: PolicyContext, engine: Engine) -> None:
    """Reset a policy for an episode of `engine`, which a planner may look into.

    Raises:
        PrfaasError: the policy looks into the simulator and the engine is not the compiled one.
    """
    policy.reset(context)
    if is_simulator_only(policy):
        if engine.name != "compiled":
            name = getattr(policy, "name", type(policy).__name__)
            raise PrfaasError(
                f"policy {name!r} looks into the simulator, which it can do in the 'compiled' engine only; "
                f"found engine {engine.name!r}"
            )
        policy.attach(engine)  # type: ignore[attr-defined]


class OwnInterval:
    """The clock of a policy that decides less often than it is asked.

    It holds the routing of its last decision between and orders a move once; one that is not legal then becomes none.

    Args:
        interval_s: time between two decisions.
        where: the policy, for messages.
    """

    def __init__(self, interval_s: float, where: str) -> None:
        self._interval_s = interval_s
        self._interval_ns = ns_from_s(interval_s)
        self._where = where
        self._period = -1
        self.held = Decision(())
        """The last decision without its moves."""

    def reset(self, context: PolicyContext) -> None:
        """Start an episode.

        Raises:
            PrfaasError: the scenario's control interval does not divide this one.
        """
        control_s = context.scenario.control.control_interval_s
        if self._interval_ns % ns_from_s(control_s):
            raise PrfaasError(
                f"{self._where}: decides every {self._interval_s:g} s; the scenario's "
                f"control_interval_s {control_s:g} does not divide that"
            )
        self._period = -1

    def is_due(self, telemetry: Telemetry) -> bool:
        """Whether a new interval has begun since the last decision."""
        return telemetry.time_ns // self._interval_ns != self._period

    def decided(self, telemetry: Telemetry, decision: Decision) -> Decision:
        """Take the decision of the interval that begins; gives what goes out now."""
        self._period = telemetry.time_ns // self._interval_ns
        self.held = Decision(tuple(c.without_move for c in decision.clusters))
        return Decision(
            tuple(
                cluster if telemetry.legal_moves[i][cluster.move] else held
                for i, (cluster, held) in enumerate(zip(decision.clusters, self.held.clusters, strict=True))
            )
        )


def ticks_between_decisions(policy: Policy, control_interval_s: float) -> int:
    """Ticks of the fast clock from one question to the next: 1, or more by the policy's `decision_interval_s`.

    Raises:
        PrfaasError: an interval that is not a multiple of the control interval.
    """
    interval_s = getattr(policy, "decision_interval_s", None)
    if interval_s is None:
        return 1
    ticks, rest = divmod(ns_from_s(interval_s), ns_from_s(control_interval_s))
    if rest or ticks < 1:
        raise PrfaasError(
            f"policy {type(policy).__name__}: decision_interval_s is {interval_s:g}; it must be a multiple of the "
            f"scenario's control_interval_s {control_interval_s:g}"
        )
    return ticks


def policy_hash(policy: Policy, spec: str) -> str:
    """12 hex digits that say which policy it is: of a learned policy's file, otherwise of the spec."""
    own = getattr(policy, "fingerprint", None)
    return own if isinstance(own, str) else hashlib.sha256(spec.encode()).hexdigest()[:12]


def policy_names() -> list[str]:
    """Names of the installed policies."""
    return sorted({entry.name for entry in metadata.entry_points(group=_GROUP)})


def _line(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())


def policy_factory(name: str) -> Callable[..., Any]:
    """What makes policies of a name or `module:Class`; its keywords are the parameters.

    Raises:
        PrfaasError: no such policy, or it cannot be loaded.
    """
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        try:
            module = importlib.import_module(module_name)
        except (ImportError, ValueError, TypeError) as error:  # the last two: empty and relative names
            raise PrfaasError(
                f"policy {name!r}: module {module_name!r} cannot be imported: {_line(error)}"
            ) from None
        if not hasattr(module, attribute):
            raise PrfaasError(f"policy {name!r}: module {module_name!r} has no {attribute!r}")
        factory = getattr(module, attribute)
        if not callable(factory):
            raise PrfaasError(f"policy {name!r}: {attribute!r} is not a class or function")
        return factory  # type: ignore[no-any-return]
    for entry in metadata.entry_points(group=_GROUP):
        if entry.name == name:
            try:
                return entry.load()  # type: ignore[no-any-return]
            except ImportError as error:
                raise PrfaasError(f"policy {name!r}: cannot be loaded: {_line(error)}") from None
    if name and "\0" not in name and Path(name).is_dir():
        raise PrfaasError(
            f"policy {name!r}: the folder holds no {MANIFEST_FILE}, so it is no policy bundle; "
            "`prfaas export` makes one of a training run"
        )
    raise PrfaasError(
        f"unknown policy {name!r}; installed: {', '.join(policy_names()) or 'none'}; or give module:Class or "
        "the folder of a policy bundle"
    )


def _split(spec: str) -> tuple[str, str]:
    """(name, parameters) of `name`, `name:key=value,...`, `module:Class` or `module:Class:key=value,...`."""
    parts = spec.split(":")
    for k in range(1, len(parts)):
        if "=" in parts[k] or parts[0] in policy_names():
            return ":".join(parts[:k]), ":".join(parts[k:])
    return spec, ""


def _bundle_folder(spec: str) -> str | None:
    """The folder of a spec that names a bundle, None for any other spec."""
    # "runs/mine", or "runs/mine:key=value,...": the colon before the first equals sign ends the path
    before = spec.partition("=")[0].rpartition(":")[0]
    for path in (spec, before):
        if path and path not in policy_names() and is_bundle(path):
            return path
    return None


def _bundle_factory(folder: str) -> Callable[..., Any]:
    from prfaas_env.bundle import BundlePolicy

    def bundle(sample: bool = False, seed: int | None = None) -> Policy:
        return BundlePolicy(folder, sample, seed)

    return bundle


def _value(spec: str, key: str, text: str) -> Any:
    """One parameter value, in YAML."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise PrfaasError(f"policy {spec!r}: the value of {key!r} is not valid YAML: {text!r}") from None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML reads 1e4 and inf as text
    return value


def make_policy(spec: str) -> Policy:
    """A policy from `NAME[:key=value,...]`, `module:Class[:key=value,...]` or `FOLDER[:key=value,...]`.

    A folder is a policy bundle (see `prfaas_env.bundle`); an installed name comes before a folder of the same name.

    Raises:
        PrfaasError: unknown policy or parameter, or a value that the policy refuses; one line.
    """
    folder = _bundle_folder(spec)
    if folder is None:
        name, text = _split(spec)
        factory = policy_factory(name)
    else:
        name, text = folder, spec[len(folder) + 1 :]
        factory = _bundle_factory(folder)
    parameters: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, separator, value = item.partition("=")
        if not separator or not key or not value:
            raise PrfaasError(f"policy {spec!r}: {item!r} is not key=value")
        if key in parameters:
            raise PrfaasError(f"policy {spec!r}: parameter {key!r} is given twice")
        parameters[key] = _value(spec, key, value)
    try:
        known = inspect.signature(factory).parameters
    except ValueError as error:
        raise PrfaasError(f"policy {spec!r}: {_line(error)}") from None
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        for key in parameters:
            if key not in known:
                raise PrfaasError(
                    f"policy {name!r}: unknown parameter {key!r}; known: {', '.join(known) or 'none'}"
                )
    try:
        policy = factory(**parameters)
    except (TypeError, ValueError) as error:
        raise PrfaasError(f"policy {spec!r}: {_line(error)}") from None
    if not isinstance(policy, Policy):
        raise PrfaasError(f"policy {spec!r}: {factory!r} does not make a policy (reset, decide, constant)")
    return policy
