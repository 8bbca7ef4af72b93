"""`prfaas shadow-report`: what a policy would have done differently from what acted, and what that might be worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import InputRanges
from prfaas_env.decision import Decision
from prfaas_env.policy import Policy, make_policy, policy_hash
from prfaas_env.simulator.engine import DEFAULT_ENGINE
from prfaas_serving.decision_log import DecisionLine, Lengths, Log
from prfaas_serving.drift import OUT_OF_RANGE_SHARE, outside, ranges_of
from prfaas_serving.log_world import (
    Difference,
    RecordedWorld,
    Run,
    difference,
    recorded_world,
    simulated,
    what_happened,
)
from prfaas_serving.replay import KINDS, Differing, decision_text, differences, rerun

#: Differing lines that a report shows.
MAX_EXAMPLES = 5


@dataclass
class Divergence:
    """Where what the policy proposed is not what was put in force."""

    intervals: int = 0
    """Decisions with both."""
    differing: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    by: Counter[str] = field(default_factory=Counter)
    """Who acted, in the differing intervals."""
    examples: list[Differing] = field(default_factory=list)
    """The first line of each kind, then further ones. `logged` is what acted, `found` what was proposed."""
    requests: int = 0
    """Requests that arrived while both were thresholds."""
    routed_otherwise: int = 0
    """Of them, those that the two thresholds send different ways."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        share = self.differing / self.intervals if self.intervals else None
        return {
            "intervals": self.intervals,
            "differing": self.differing,
            "differing_share": share,
            "kinds": {k: self.kinds[k] / self.intervals for k in KINDS if self.kinds[k]},
            "acted_by": dict(self.by),
            "requests": self.requests,
            "routed_otherwise": self.routed_otherwise,
            "examples": [
                {
                    "where": e.where,
                    "n": e.n,
                    "time_s": e.time_s,
                    "kinds": list(e.kinds),
                    "text": example_text(e),
                }
                for e in self.examples
            ],
        }


def example_text(example: Differing) -> str:
    """One differing line in words."""
    return (
        f"{example.where}: decision {example.n} at {example.time_s:.3f} s: "
        f"acted {decision_text(example.logged)}; proposed {decision_text(example.found)}"
    )


def divergence(log: Log) -> Divergence:
    """Compare what was proposed with what was put in force, line by line."""
    found = Divergence()
    shown: set[str] = set()
    previous: DecisionLine | None = None
    spare: list[Differing] = []
    for k, line in enumerate(log.lines):
        if not isinstance(line, DecisionLine):
            continue
        if previous is not None and previous.proposed is not None and previous.acted is not None:
            _count_routes(found, previous.proposed, previous.acted, line.new_lengths)
        previous = line
        if line.proposed is None or line.acted is None:
            continue
        found.intervals += 1
        kinds = differences(line.acted, line.proposed)
        if not kinds:
            continue
        found.differing += 1
        found.kinds.update(kinds)
        found.by[line.by] += 1
        example = Differing(log.where(k), line.n, line.time_ns / 1e9, kinds, line.acted, line.proposed)
        if set(kinds) - shown:
            shown |= set(kinds)
            found.examples.append(example)
        elif len(spare) < MAX_EXAMPLES:
            spare.append(example)
    found.examples = (found.examples + spare)[:MAX_EXAMPLES]
    found.examples.sort(key=lambda e: e.n)
    return found


def _count_routes(found: Divergence, proposed: Decision, acted: Decision, lengths: Lengths) -> None:
    """Arrivals of one interval that two thresholds route differently (margins need the queues at each arrival)."""
    for a, b, came in zip(proposed.clusters, acted.clusters, lengths, strict=True):
        if a.threshold_tokens is None or b.threshold_tokens is None:
            continue
        low, high = sorted((a.threshold_tokens, b.threshold_tokens))
        found.requests += len(came)
        found.routed_otherwise += sum(low < length <= high for length in came)


# ------------------------------------------------------------------------------------------ drift


@dataclass(frozen=True)
class FieldDrift:
    """One telemetry field that left the range of the training."""

    name: str
    share: float
    """Share of the readings in which it was outside."""
    least: float
    greatest: float
    """Of the log, while it was there."""
    low: float | None
    high: float | None
    """Of the training; None if it never was there."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "field": self.name,
            "share": self.share,
            "log": [self.least, self.greatest],
            "training": [self.low, self.high],
        }


@dataclass(frozen=True)
class Drift:
    """Telemetry of a log against the range of a training."""

    fields: tuple[FieldDrift, ...]
    """Most often outside first."""
    mean_share: float
    """Mean share of the fields outside."""
    limit: float
    over_limit: float
    """Share of the readings with more fields outside than `limit`: the guard of the control loop then falls back."""
    readings: int

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "readings": self.readings,
            "mean_outside_share": self.mean_share,
            "limit": self.limit,
            "over_limit_share": self.over_limit,
            "fields": [f.as_json() for f in self.fields],
        }


def drift(log: Log, ranges: InputRanges, limit: float) -> Drift:
    """Fields outside the range of the training, and how often.

    Args:
        log: the log.
        ranges: of the training.
        limit: share of fields outside above which the guard falls back.
    """
    masks, values = [], []
    for _, _, telemetry in log.telemetry():
        masks.append(outside(telemetry, ranges))
        values.append(telemetry.values)
    if not masks:
        raise PrfaasError(f"{log.path}: has no decisions: nothing to report")
    beyond, seen = np.array(masks), np.array(values)
    there = log.schema.present(seen)
    shares = beyond.mean(axis=0)
    fields = [
        FieldDrift(
            log.schema.names[k],
            float(shares[k]),
            float(seen[there[:, k], k].min()),
            float(seen[there[:, k], k].max()),
            ranges.low[k],
            ranges.high[k],
        )
        for k in np.argsort(-shares, kind="stable")
        if shares[k] > 0
    ]
    each = beyond.mean(axis=1)
    return Drift(tuple(fields), float(each.mean()), limit, float((each > limit).mean()), len(each))


# ----------------------------------------------------------------------------------------- effect


@dataclass(frozen=True)
class Comparison:
    """Runs of one recorded world."""

    recorded: RecordedWorld
    happened: Run
    acted: Run
    """What was put in force, in the simulator."""
    others: tuple[Run, ...]
    """Policies, in the simulator."""
    notes: tuple[str, ...]

    @property
    def model_error(self) -> Difference:
        """The simulator less reality, under the same decisions: how far its other answers can be trusted."""
        return difference(self.recorded, self.acted, self.happened)

    def effect(self, run: Run) -> Difference:
        """A policy less what acted, both in the simulator."""
        return difference(self.recorded, run, self.acted)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        rows = [self.happened, self.acted, *self.others]
        return {
            "span_s": self.recorded.span_s,
            "rows": [{"label": run.label, **run.figures()} for run in rows],
            "simulated_less_happened": self.model_error.as_json(),
            "less_acted": {run.label: self.effect(run).as_json() for run in self.others},
            "notes": list(self.notes),
        }


def compare_on_log(log: Log, specs: Sequence[str], *, own: bool, engine: str = DEFAULT_ENGINE) -> Comparison:
    """Simulate the recorded world under what was in force and under policies.

    Args:
        log: the log.
        specs: policies to simulate.
        own: simulate the log's own policy too, if it is still the one of the log.
        engine: engine of the simulator.

    Raises:
        PrfaasError: a log that cannot be simulated, or a policy of `specs` that cannot be made or does not fit.
    """
    recorded = recorded_world(log)
    notes = list(recorded.notes)
    policies: list[tuple[str, Policy]] = []
    if own and log.header.policy_spec not in specs:
        found = _own_policy(log, notes)
        if found is not None:
            policies.append((log.header.policy_spec, found))
    policies += [(spec, make_policy(spec)) for spec in specs]
    acted = simulated(recorded, recorded.policy, "what acted, simulated", engine)
    if acted.invalid_moves:
        notes.append(f"{acted.invalid_moves} recorded node moves were not legal in the simulation")
    others = tuple(simulated(recorded, policy, f"{spec}, simulated", engine) for spec, policy in policies)
    return Comparison(recorded, what_happened(log, recorded), acted, others, tuple(notes))


def _own_policy(log: Log, notes: list[str]) -> Policy | None:
    """The log's policy; None with a note where there is none or another one in its place."""
    spec = log.header.policy_spec
    try:
        policy = make_policy(spec)
    except PrfaasError as error:
        notes.append(f"the log's policy is left out: {error}")
        return None
    if policy_hash(policy, spec) != log.header.policy_hash:
        notes.append(
            f"the log's policy {spec} is left out: it is {policy_hash(policy, spec)} now, the log is of "
            f"{log.header.policy_hash}"
        )
        return None
    return policy


# ----------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class ShadowReport:
    """Everything that `prfaas shadow-report` says."""

    log: Log
    divergence: Divergence
    identical_share: float | None
    """Share of the log's proposals that the policy makes again on the same readings; None if it was not run."""
    drift: Drift | None
    no_drift: str
    """Why there is no drift to tell of."""
    effect: Comparison | None

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        header = self.log.header
        return {
            "log": str(self.log.path),
            "policy": header.policy_spec,
            "policy_hash": header.policy_hash,
            "decisions": len(self.log.decisions),
            "requests": len(self.log.requests),
            "modes": dict(Counter(line.mode for line in self.log.decisions)),
            "guard": dict(Counter(line.guard for line in self.log.decisions)),
            "divergence": self.divergence.as_json(),
            "identical_share": self.identical_share,
            "drift": None if self.drift is None else self.drift.as_json(),
            "effect": None if self.effect is None else self.effect.as_json(),
        }


def shadow_report(
    log: Log,
    *,
    policy: str | None = None,
    limit: float = OUT_OF_RANGE_SHARE,
    simulate: bool = True,
    engine: str = DEFAULT_ENGINE,
) -> ShadowReport:
    """Report on a log.

    Args:
        log: the log.
        policy: where the log's policy is now (a bundle that was moved); None = where the log says.
        limit: share of fields outside the training's range above which the guard falls back.
        simulate: estimate the effect in the simulator.
        engine: engine of the simulator.

    Raises:
        PrfaasError: an empty log, or a policy that is not the log's.
    """
    if not log.decisions:
        raise PrfaasError(f"{log.path}: has no decisions: nothing to report")
    spec = log.header.policy_spec if policy is None else policy
    again = rerun(log, policy)
    if not again.is_own:
        raise PrfaasError(
            f"--policy {spec}: is {again.policy_hash}; the log is of {log.header.policy_hash} "
            f"({log.header.policy_spec})"
        )
    ranges = ranges_of(make_policy(spec))
    why = f"{spec} has no input ranges (a rule, or a bundle without them)" if ranges is None else ""
    return ShadowReport(
        log,
        divergence(log),
        None if math.isnan(again.share) else again.share,
        None if ranges is None else drift(log, ranges, limit),
        why,
        compare_on_log(log, [spec], own=False, engine=engine) if simulate else None,
    )
