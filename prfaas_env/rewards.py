"""Rewards by name. Each gives named terms per step; the reward is their sum, and all terms are in `info`.

All but `goodput` are in waiting requests divided by `reward.scale`: undiscounted, the sum of `waiting` times
control interval and scale is the total time to first token, open requests at their age (Little's law).
"""

from __future__ import annotations

from collections.abc import Callable

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios.models import RewardSettings
from prfaas_env.simulator.formulas import NS_PER_S
from prfaas_env.simulator.records import Totals

#: (settings, totals before, totals after) -> terms by name.
RewardTerms = Callable[[RewardSettings, Totals, Totals], dict[str, float]]


def waiting_terms(settings: RewardSettings, before: Totals, after: Totals) -> dict[str, float]:
    """`-(1/dt) integral of requests waiting for their first token / scale`, and the price of a rejection.

    Each rejected or aborted request costs `reject_penalty_s` of waiting, so that shedding never wins.
    """
    dt_ns = after.time_ns - before.time_ns
    lost = after.rejected + after.aborted - before.rejected - before.aborted
    per_s = settings.scale * dt_ns / NS_PER_S
    return {
        "waiting": -(after.waiting_ns - before.waiting_ns) / dt_ns / settings.scale,
        "rejected": -settings.reject_penalty_s * lost / per_s,
    }


def goodput_terms(settings: RewardSettings, before: Totals, after: Totals) -> dict[str, float]:
    """Finished requests per second that met every objective of the scenario."""
    dt_s = (after.time_ns - before.time_ns) / NS_PER_S
    return {"goodput": (after.good - before.good) / dt_s}


def cost_terms(settings: RewardSettings, before: Totals, after: Totals) -> dict[str, float]:
    """`waiting` plus the price of egress and of conversions, both in seconds of waiting."""
    per_s = settings.scale * (after.time_ns - before.time_ns) / NS_PER_S
    gbit = (sum(after.egress_bits) - sum(before.egress_bits)) / 1e9
    return {
        **waiting_terms(settings, before, after),
        "egress": -settings.egress_price_s_per_gbit * gbit / per_s,
        "conversion": -settings.conversion_price_s * (after.conversions - before.conversions) / per_s,
    }


#: `paired` is `waiting` minus that of a reference policy on the same arrivals; the env steps the reference.
REWARDS: dict[str, RewardTerms] = {
    "waiting": waiting_terms,
    "goodput": goodput_terms,
    "cost": cost_terms,
    "paired": waiting_terms,
}


def reward_terms(name: str) -> RewardTerms:
    """The terms of a reward by name; PrfaasError names the known ones."""
    if name not in REWARDS:
        raise PrfaasError(f"unknown reward {name!r}; known: {', '.join(REWARDS)}")
    return REWARDS[name]
