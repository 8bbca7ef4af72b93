"""Earliest finish: each request takes the path with the earlier predicted first token, alone or with conversions."""

from __future__ import annotations

import math
from typing import Any

from prfaas_baselines.conversion_guard import ConversionGuard
from prfaas_baselines.parameters import cache_rule as checked_rule
from prfaas_baselines.parameters import (
    knob,
    number,
    parameter_table,
    parameters_from,
    tuned_fingerprint,
    with_tuned,
)
from prfaas_baselines.planning import (
    GuardedPlanningParameters,
    Planner,
    guarded_planners,
    proposal_for,
)
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.policy import PolicyContext
from prfaas_env.telemetry import Telemetry


class EarliestFinish:
    """Remote when its predicted first token plus a margin comes before the local one; no node moves.

    Args:
        margin_s: seconds by which the remote path must be ahead (negative: may be behind); may be infinite.
        cache_rule: `scarce` (the default) or `abundant` (paper section 3.4.3), for the whole episode.
        tuned: family of scenarios whose tuned margin is taken (see `tuned_files`).

    Raises:
        PrfaasError: a margin that is not a number, an unknown rule.
    """

    constant = True

    def __init__(
        self, margin_s: float | None = None, cache_rule: str | None = None, tuned: str | None = None
    ) -> None:
        name = "earliest_finish"
        keywords = {"margin_s": margin_s, "cache_rule": cache_rule, "tuned": tuned}
        given = with_tuned(name, keywords)
        self.fingerprint = tuned_fingerprint(name, keywords)
        margin, rule = given.get("margin_s"), given.get("cache_rule")
        self._margin_s = number(name, "margin_s", 0.0 if margin is None else margin, -math.inf, "seconds")
        self._rule = checked_rule(name, "scarce" if rule is None else rule)
        self._decision = Decision(())

    def reset(self, context: PolicyContext) -> None:
        """Take the number of PD clusters."""
        n_pd = len(context.scenario.deployment.pd)
        self._decision = Decision.same(n_pd, margin_s=self._margin_s, cache_rule=self._rule)

    def decide(self, telemetry: Telemetry) -> Decision:
        """The same margin every time; the prediction itself is made at each arrival."""
        return self._decision


class ConversionParameters(GuardedPlanningParameters):
    """Parameters of earliest finish with conversions."""

    margin_s: float = knob(0.0, "s", "margin of the routing, as in earliest finish")
    period_s: float = knob(60.0, "s", "time between two searches of the split", gt=0)


class EarliestFinishConversion:
    """Earliest finish, and one node moved each period towards the split that the throughput model finds best.

    Every `period_s`, on a conversion tick, the model of the paper (section 3.4, equations 3-6) is searched over
    threshold and split with the last incremental lengths, the present capacity of the link and the mean output
    of finished requests (the last one known). A node moves towards the best split when the conversion guard
    allows it. An empty cluster goes back to the split that it started with. Every PD cluster is planned by
    itself; see `planning` for deployments with several PrfaaS clusters.

    Args:
        parameters: any field of `ConversionParameters` by name, and `tuned` (see `tuned_files`).

    Raises:
        PrfaasError: an unknown parameter or a value that is not allowed.
    """

    constant = False
    Parameters = ConversionParameters

    def __init__(self, **parameters: Any) -> None:
        self.parameters = parameters_from(ConversionParameters, "earliest_finish_conversion", parameters)
        self.fingerprint = tuned_fingerprint("earliest_finish_conversion", parameters)
        self._planners: list[Planner] = []
        self._guards: list[ConversionGuard] = []
        self._due_s: list[float] = []
        self._stay = ClusterDecision(margin_s=self.parameters.margin_s)

    def reset(self, context: PolicyContext) -> None:
        """Start an episode: nothing is known of the load yet."""
        pairs = guarded_planners(context.scenario, self.parameters)
        self._planners = [planner for planner, _ in pairs]
        self._guards = [guard for _, guard in pairs]
        self._due_s = [0.0] * len(pairs)

    def decide(self, telemetry: Telemetry) -> Decision:
        """Margin for every cluster, and at most one move in each."""
        return Decision(tuple(self._decide(telemetry, i) for i in range(len(self._guards))))

    def _decide(self, telemetry: Telemetry, i: int) -> ClusterDecision:
        guard, planner = self._guards[i], self._planners[i]
        guard.observe(telemetry)
        if guard.warm:
            planner.remember(telemetry)
        move = Move.NONE
        legal = telemetry.legal_moves[i]
        if legal[Move.PREFILL_TO_DECODE] or legal[Move.DECODE_TO_PREFILL]:
            standing = guard.standing_order(telemetry)
            if standing is not None:
                move = standing
            elif guard.warm and telemetry.time_s >= self._due_s[i]:
                self._due_s[i] = telemetry.time_s + self.parameters.period_s
                move = self._search(telemetry, guard, planner)
        if move is Move.NONE:
            return self._stay
        return ClusterDecision(margin_s=self.parameters.margin_s, move=move)

    def _search(self, telemetry: Telemetry, guard: ConversionGuard, planner: Planner) -> Move:
        reading = planner.read(telemetry)
        best = planner.best(reading)
        present = reading.n_prefill in planner.splits(reading)  # not when a role has lost too many nodes
        if best is None or not present or best.n_prefill == reading.n_prefill:
            return Move.NONE
        step = 1 if best.n_prefill > reading.n_prefill else -1
        move = Move.DECODE_TO_PREFILL if step > 0 else Move.PREFILL_TO_DECODE
        now = planner.point(reading, reading.n_prefill)
        then = planner.point(reading, reading.n_prefill + step)
        gain = then.lambda_max_rps / now.lambda_max_rps - 1.0 if now.lambda_max_rps > 0.0 else math.inf
        proposal = proposal_for(move, gain, reading, now, then, guard)
        missed = guard.objective_missed(
            telemetry, lambda: planner.idle_ttft_s(reading), planner.idle_step_s(reading)
        )
        return Move.NONE if guard.check(telemetry, proposal, missed) else move


EarliestFinishConversion.__doc__ = (
    f"{EarliestFinishConversion.__doc__}\n\n{parameter_table(ConversionParameters)}\n"
)
