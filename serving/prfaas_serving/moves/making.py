"""The mover of a router, from its configuration."""

from __future__ import annotations

from prfaas_env.base import PrfaasError
from prfaas_serving.config import ActuatorSettings, HttpActuator, KubernetesActuator, SglangActuator
from prfaas_serving.forward import Forwarder
from prfaas_serving.health import HealthChecker
from prfaas_serving.moves.base import Actuator, Site
from prfaas_serving.moves.http import Http
from prfaas_serving.moves.mover import Mover
from prfaas_serving.moves.relabel import Relabel
from prfaas_serving.moves.sglang import Sglang


def make_actuator(settings: ActuatorSettings, site: Site) -> Actuator:
    """The actuator that the configuration asks for.

    Raises:
        PrfaasError: its package is not installed, or a file that it names cannot be read.
    """
    if isinstance(settings, SglangActuator):
        return Sglang(site, settings)
    if isinstance(settings, HttpActuator):
        return Http(site, settings)
    if isinstance(settings, KubernetesActuator):
        try:  # the package is large, and only those who chose it need it
            from prfaas_serving.moves.kubernetes import Label, Scale
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "kubernetes":
                raise
            raise PrfaasError(
                "moves.actuator: kind kubernetes needs the package kubernetes: "
                "pip install 'prfaas-env[serving,kubernetes]'"
            ) from None
        return Label(site, settings) if settings.label is not None else Scale(site, settings)
    return Relabel(site)


def make_mover(forwarder: Forwarder, health: HealthChecker) -> Mover:
    """A mover that verifies roles by generations of the router's own; workers that come up are asked what they are."""
    config = forwarder.config
    generate = health.generate_on if config.moves.generate else None
    site = Site(forwarder.fleet, forwarder.upstream.session, generate)
    mover = Mover(forwarder.fleet, make_actuator(config.actuator, site), config.moves)
    health.coming_up = mover.comes_up
    return mover
