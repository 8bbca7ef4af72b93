"""Rules that never change: everything local, everything remote, one threshold. None of them moves a node."""

from __future__ import annotations

import math

from prfaas_baselines.parameters import cache_rule as checked_rule
from prfaas_baselines.parameters import number, tuned_fingerprint, with_tuned
from prfaas_baselines.planning import Planner, PlanningParameters
from prfaas_env.decision import ClusterDecision, Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.sites import sites_of
from prfaas_env.telemetry import Telemetry

#: Shipped default of llm-d's decider.
UNCACHED_TOKENS = 16


class Static:
    """One threshold for the whole episode.

    Args:
        threshold_tokens: the threshold, 0 to infinity, for every PD cluster. None: the optimum of the paper's
            model (section 3.4, representative lengths) for the planned load, nominal links and the split that
            the scenario starts with, per PD cluster; `plan` prints the same one where it finds that split best.
        cache_rule: `scarce` (the default) or `abundant` (paper section 3.4.3), for the whole episode.
        tuned: family of scenarios whose tuned threshold is taken (see `tuned_files`).

    Raises:
        PrfaasError: a threshold that is not a number of tokens, an unknown rule.
    """

    constant = True
    _name = "static"

    def __init__(
        self, threshold_tokens: float | None = None, cache_rule: str | None = None, tuned: str | None = None
    ) -> None:
        keywords = {"threshold_tokens": threshold_tokens, "cache_rule": cache_rule, "tuned": tuned}
        given = with_tuned(self._name, keywords)
        self.fingerprint = tuned_fingerprint(self._name, keywords)
        threshold, rule = given.get("threshold_tokens"), given.get("cache_rule")
        self._given = (
            None if threshold is None else number(self._name, "threshold_tokens", threshold, 0.0, "tokens")
        )
        self._rule = checked_rule(self._name, "scarce" if rule is None else rule)
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


class UncachedThreshold(Static):
    """Offload what the local cache does not hold, from a few tokens on: llm-d's `prefix-based-pd-decider`.

    A request is disaggregated when more than this many of its tokens are not in the cache of the cluster that would
    decode it; that is the cache rule `scarce`, which judges the local cache alone. It is `static` with another default:
    tuned, the two are the same rule.

    Args:
        threshold_tokens: uncached tokens above which a request goes remote; default 16, as shipped there.
        tuned: family of scenarios whose tuned threshold is taken (see `tuned_files`).

    Raises:
        PrfaasError: a threshold that is not a number of tokens.
    """

    _name = "uncached_threshold"

    def __init__(self, threshold_tokens: float | None = None, tuned: str | None = None) -> None:
        keywords = {"threshold_tokens": threshold_tokens, "tuned": tuned}
        threshold = with_tuned(self._name, keywords).get("threshold_tokens")
        super().__init__(UNCACHED_TOKENS if threshold is None else threshold)
        self.fingerprint = tuned_fingerprint(self._name, keywords)
