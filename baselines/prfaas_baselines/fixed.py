"""Rules that never change: everything local, everything remote, one threshold. None of them moves a node."""

from __future__ import annotations

import math

from prfaas_baselines.parameters import cache_rule as checked_rule
from prfaas_baselines.parameters import number
from prfaas_baselines.planning import Planner, PlanningParameters
from prfaas_env.decision import ClusterDecision, Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.sites import sites_of
from prfaas_env.telemetry import Telemetry


class Static:
    """One threshold for the whole episode.

    Args:
        threshold_tokens: the threshold, 0 to infinity, for every PD cluster. None: the optimum of the paper's
            model (section 3.4, representative lengths) for the planned load, nominal links and the split that
            the scenario starts with, per PD cluster; `plan` prints the same one where it finds that split best.
        cache_rule: `scarce` or `abundant` (paper section 3.4.3), for the whole episode.

    Raises:
        PrfaasError: a threshold that is not a number of tokens, an unknown rule.
    """

    constant = True

    def __init__(self, threshold_tokens: float | None = None, cache_rule: str = "scarce") -> None:
        self._given = (
            None
            if threshold_tokens is None
            else number("static", "threshold_tokens", threshold_tokens, 0.0, "tokens")
        )
        self._rule = checked_rule("static", cache_rule)
        self._decision = Decision(())

    def reset(self, context: PolicyContext) -> None:
        """Work out the thresholds of this scenario."""
        scenario = context.scenario
        if self._given is not None:
            self._decision = Decision.same(
                len(scenario.deployment.pd), threshold_tokens=self._given, cache_rule=self._rule
            )
            return
        parameters = PlanningParameters(means="representative")
        planners = [Planner(scenario, site, parameters) for site in sites_of(scenario)]
        self._decision = Decision(
            tuple(
                ClusterDecision(threshold_tokens=p.threshold(p.planned()), cache_rule=self._rule)
                for p in planners
            )
        )

    def decide(self, telemetry: Telemetry) -> Decision:
        """The same decision every time."""
        return self._decision


class Never(Static):
    """Nothing is offloaded. A cluster without local prefill still offloads: it has no other path."""

    def __init__(self) -> None:
        super().__init__(math.inf)


class Always(Static):
    """Everything is offloaded. A cluster without a link still prefills locally: it has no other path."""

    def __init__(self) -> None:
        super().__init__(0.0)
