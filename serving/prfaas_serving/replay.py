"""`prfaas replay`: a logged policy run again on what it saw. The same policy must say the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prfaas_env.base import PrfaasError
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.policy import Policy, PolicyContext, make_policy, policy_hash, refuse_simulator_only
from prfaas_serving.decision_log import DecisionLine, EventLine, Log

#: In what two decisions can differ: the threshold, the margin, one against the other, the cache rule, the node move.
KINDS = ("threshold", "margin", "threshold or margin", "cache rule", "move")


def differences(a: Decision, b: Decision) -> tuple[str, ...]:
    """In what two decisions for the same PD clusters differ: some of `KINDS` in their order, none if they are equal."""
    found: set[str] = set()
    for x, y in zip(a.clusters, b.clusters, strict=True):
        if (x.margin_s is None) != (y.margin_s is None):
            found.add("threshold or margin")
        elif x.threshold_tokens != y.threshold_tokens:
            found.add("threshold")
        elif x.margin_s != y.margin_s:
            found.add("margin")
        if x.cache_rule != y.cache_rule:
            found.add("cache rule")
        if x.move != y.move:
            found.add("move")
    return tuple(kind for kind in KINDS if kind in found)


def _text(cluster: ClusterDecision) -> str:
    if cluster.margin_s is None:
        value = cluster.threshold_tokens
        assert value is not None
        routing = "never remote" if value == math.inf else f"threshold {value:,.10g} tokens"
    elif math.isinf(cluster.margin_s):
        routing = "never remote" if cluster.margin_s > 0 else "always remote"
    else:
        routing = f"margin {cluster.margin_s:.10g} s"
    rule = "" if cluster.cache_rule == "scarce" else f", cache rule {cluster.cache_rule}"
    move = "" if cluster.move is Move.NONE else f", move {cluster.move.name.lower()}"
    return routing + rule + move


def decision_text(decision: Decision | None) -> str:
    """A decision in a few words."""
    if decision is None:
        return "nothing"
    return "; ".join(_text(cluster) for cluster in decision.clusters)


@dataclass(frozen=True)
class Differing:
    """One line of the log on which a decision differs from the policy's."""

    where: str
    n: int
    time_s: float
    kinds: tuple[str, ...]
    logged: Decision
    found: Decision

    def __str__(self) -> str:
        return (
            f"{self.where}: decision {self.n} at {self.time_s:.3f} s: the log has "
            f"{decision_text(self.logged)}; the policy says {decision_text(self.found)}"
        )


@dataclass
class Rerun:
    """What a policy says on the readings of a log, against what the log has."""

    policy: str
    policy_hash: str
    is_own: bool
    """The very policy of the log, by its hash."""
    compared: int = 0
    identical: int = 0
    not_asked: int = 0
    """Decisions for which the policy of the log was not asked."""
    other_policy: int = 0
    """Decisions of a policy that the log does not name, which cannot be run again."""
    kinds: Counter[str] = field(default_factory=Counter)
    first: Differing | None = None

    @property
    def share(self) -> float:
        """Identical decisions among those compared; NaN where there are none."""
        return self.identical / self.compared if self.compared else math.nan

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "policy": self.policy,
            "policy_hash": self.policy_hash,
            "is_own": self.is_own,
            "compared": self.compared,
            "identical": self.identical,
            "identical_share": self.share if self.compared else None,
            "not_asked": self.not_asked,
            "other_policy": self.other_policy,
            "kinds": dict(self.kinds),
            "first": None if self.first is None else str(self.first),
        }


def context_of(log: Log) -> PolicyContext:
    """What the policy of a log was told before its first decision."""
    return PolicyContext(log.scenario, log.schema, log.header.policy_seed)


def policy_for(log: Log, spec: str) -> tuple[Policy, str]:
    """(policy, its hash) ready to decide on the log's readings.

    Raises:
        PrfaasError: no such policy, one that looks into the simulator, or one that does not fit the deployment.
    """
    policy = make_policy(spec)
    refuse_simulator_only(policy, spec, "be run on a log")
    policy.reset(context_of(log))
    return policy, policy_hash(policy, spec)


class _Policies:
    """The policy that decided at each place of a log, or one for all of it."""

    def __init__(self, log: Log, spec: str | None) -> None:
        self._log = log
        self._own = spec is None
        self._reloads: Iterator[tuple[int, EventLine]] = iter(
            [
                (k, line)
                for k, line in enumerate(log.lines)
                if isinstance(line, EventLine) and line.what == "reload" and line.policy_spec is not None
            ]
        )
        self._next = next(self._reloads, None)
        self._was_off = False
        self.policy, self.hash = policy_for(log, log.header.policy_spec if spec is None else spec)

    def pass_by(self, line: DecisionLine) -> None:
        """A decision, in order, whether the policy was asked or not: when the loop was off, it begins anew after."""
        is_off = line.mode == "off"
        if self._was_off and not is_off:
            self.policy.reset(context_of(self._log))
        self._was_off = is_off

    def at(self, k: int, wanted_hash: str) -> Policy | None:
        """The policy to ask at the decision in place `k`; None if it is one that the log does not name."""
        while self._next is not None and self._next[0] < k:
            spec = self._next[1].policy_spec
            self._next = next(self._reloads, None)
            if self._own and spec is not None:  # a reload starts a policy anew, even the same one
                self.policy, self.hash = policy_for(self._log, spec)
        return self.policy if not self._own or wanted_hash == self.hash else None


def rerun(log: Log, spec: str | None = None) -> Rerun:
    """Run a policy on the readings of a log.

    Args:
        log: the log.
        spec: another policy; None = the log's own, with its reloads.

    Raises:
        PrfaasError: a policy that cannot be made or run here, or the log's own one whose hash is no longer that of
            the log.
    """
    policies = _Policies(log, spec)
    if spec is None and policies.hash != log.header.policy_hash:
        raise PrfaasError(
            f"{log.place_of_header}: policy_hash: policy {log.header.policy_spec!r} is {policies.hash} now, the log "
            f"is of {log.header.policy_hash}; name a policy (--policy) to run that one on the log"
        )
    is_own = policies.hash == log.header.policy_hash
    found = Rerun(log.header.policy_spec if spec is None else spec, policies.hash, is_own)
    for k, line, telemetry in log.telemetry():
        policies.pass_by(line)
        if line.proposed is None:
            found.not_asked += 1
            continue
        policy = policies.at(k, line.policy_hash)
        if policy is None:
            found.other_policy += 1
            continue
        decision = policy.decide(telemetry)
        found.compared += 1
        kinds = differences(line.proposed, decision)
        if not kinds:
            found.identical += 1
            continue
        found.kinds.update(kinds)
        if found.first is None:
            found.first = Differing(log.where(k), line.n, telemetry.time_s, kinds, line.proposed, decision)
    return found
