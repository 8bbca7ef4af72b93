"""The decision in force, who made it, and the routing rule that reads it.

The hot path reads one number: `threshold_tokens`, or `margin_s` where that is not None.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from prfaas_env.decision import CacheRule, ClusterDecision
from prfaas_serving.paths import finite

Origin = Literal["config", "policy", "rule", "admin"]


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the decision."""

    version: int
    at_s: float
    origin: Origin
    reason: str
    decision: ClusterDecision

    def as_json(self) -> dict[str, Any]:
        """For the admin port and logs."""
        d = self.decision
        return {
            "version": self.version,
            "unix_s": round(self.at_s, 3),
            "origin": self.origin,
            "reason": self.reason,
            "rule": "margin" if d.margin_s is not None else "threshold",
            "threshold_tokens": None if d.threshold_tokens is None else finite(d.threshold_tokens),
            "never_remote": d.threshold_tokens == math.inf or d.margin_s == math.inf,
            "margin_s": None if d.margin_s is None else finite(d.margin_s),
            "cache_rule": d.cache_rule,
        }


class DecisionHolder:
    """The decision in force.

    A policy (or the config) sets what holds by itself; an operator's override lies over it until it is cleared.
    Moves of nodes are not held here.
    """

    def __init__(self, decision: ClusterDecision) -> None:
        self.threshold_tokens: float = math.inf
        """Read by the hot path when `margin_s` is None."""
        self.margin_s: float | None = None
        self.cache_rule: CacheRule = "scarce"
        self.history: deque[Change] = deque(maxlen=256)
        self._override: ClusterDecision | None = None
        self._base = decision
        self.version = 0
        self._apply(decision, "config", "start")

    @property
    def base(self) -> ClusterDecision:
        """What holds without an override."""
        return self._base

    @property
    def override(self) -> ClusterDecision | None:
        """What an operator laid over it."""
        return self._override

    @property
    def current(self) -> ClusterDecision:
        """What is in force."""
        return self._base if self._override is None else self._override

    def set(self, decision: ClusterDecision, origin: Origin, reason: str) -> None:
        """A new base decision; in force unless an override lies over it."""
        self._base = decision
        if self._override is None:
            self._apply(decision, origin, reason)

    def set_override(self, decision: ClusterDecision, reason: str) -> None:
        """An operator takes over."""
        self._override = decision
        self._apply(decision, "admin", reason)

    def clear_override(self, reason: str) -> bool:
        """The operator lets go; False if there was no override."""
        if self._override is None:
            return False
        self._override = None
        self._apply(self._base, "admin", reason)
        return True

    def _apply(self, decision: ClusterDecision, origin: Origin, reason: str) -> None:
        self.version += 1
        self.margin_s = decision.margin_s
        self.threshold_tokens = math.inf if decision.threshold_tokens is None else decision.threshold_tokens
        self.cache_rule = decision.cache_rule
        self.history.append(Change(self.version, time.time(), origin, reason, decision))
