"""A scenario at a share of what it can carry."""

from __future__ import annotations

from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.theory import plan_sites
from prfaas_env.workload.models import TraceWorkload
from prfaas_env.workload.traces import load_trace, slice_span_s


def capacity_rps(scenario: Scenario) -> float:
    """Largest mean arrival rate by `plan` with true mean service times; with several PD clusters, where one is full.

    Raises:
        PrfaasError: a load that the equations cannot read.
    """
    return min(site.scenario_limit_rps for site in plan_sites(scenario, "service"))


def at_load(scenario: Scenario, load: float) -> Scenario:
    """The scenario with a mean arrival rate of this share of `capacity_rps`.

    A trace is replayed at another speed, and the horizon becomes the time that its slice then takes.

    Raises:
        PrfaasError: a load that the equations cannot read.
    """
    changed = scenario.with_rate(load * capacity_rps(scenario))
    workload = changed.workload
    if not isinstance(workload, TraceWorkload):
        return changed
    span_s = slice_span_s(load_trace(workload), workload) / workload.speed
    return load_scenario(changed, overrides=[f"measure.horizon_s={span_s!r}"])
