"""Scenarios: frozen models and the YAML files that ship with the package."""

from prfaas_env.scenarios.loader import load_scenario, scenario_names
from prfaas_env.scenarios.models import Deployment, Scenario

__all__ = ["Deployment", "Scenario", "load_scenario", "scenario_names"]
