"""What goes wrong in a scenario: instances that fail or slow down, links that go out, clients that give up."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from prfaas_env.base import MAX_S, Frozen, Seconds

#: Least speed of a slow instance, share of full; 0 is an instance that is down.
MIN_SPEED = 0.001


def _check_speed(speed: float) -> None:
    if 0 < speed < MIN_SPEED:
        raise ValueError(f"speed must be 0 (down) or at least {MIN_SPEED}, found {speed}")


class RandomFailures(Frozen):
    """Each instance fails and is repaired on its own: exponential times between and during failures."""

    clusters: tuple[str, ...] = Field(default=(), description="names of clusters; none = all")
    mtbf_s: float = Field(gt=0, le=MAX_S, description="mean time from a repair to the next failure")
    mttr_s: float = Field(gt=0, le=MAX_S, description="mean time to repair")
    speed: float = Field(default=0.0, ge=0, lt=1, description="speed meanwhile, share of full; 0 = down")

    @model_validator(mode="after")
    def _speed(self) -> Self:
        _check_speed(self.speed)
        return self


class InstanceFault(Frozen):
    """Instances that are down or slow from a given time on."""

    cluster: str
    instances: tuple[int, ...] = Field(
        default=(), description="numbers in the cluster, from 0; none = the whole cluster"
    )
    at_s: Seconds
    duration_s: float = Field(gt=0, le=MAX_S)
    speed: float = Field(default=0.0, ge=0, lt=1, description="speed meanwhile, share of full; 0 = down")

    @model_validator(mode="after")
    def _valid(self) -> Self:
        _check_speed(self.speed)
        if any(n < 0 for n in self.instances) or len(set(self.instances)) != len(self.instances):
            raise ValueError(f"instances must be different numbers from 0 on, found {list(self.instances)}")
        return self


class LinkOutage(Frozen):
    """A link that is out, or has a part of its capacity, from a given time on."""

    link: int | None = Field(default=None, ge=0, description="position in deployment.links; none = all links")
    at_s: Seconds
    duration_s: float = Field(gt=0, le=MAX_S)
    share: float = Field(default=0.0, ge=0, lt=1, description="share of the capacity that is left")


class RandomOutages(Frozen):
    """Each link goes out on its own: exponential times between and during outages."""

    mtbf_s: float = Field(gt=0, le=MAX_S, description="mean time from the end of one outage to the next")
    mttr_s: float = Field(gt=0, le=MAX_S, description="mean length of an outage")
    share: float = Field(default=0.0, ge=0, lt=1, description="share of the capacity that is left")


class Faults(Frozen):
    """Faults of a scenario, all drawn or fixed before an episode starts; by default there are none.

    An instance that goes down loses what it works on: a running prefill, or the sequences it decodes. Those requests
    are prefilled again, as new attempts, where their route still has an instance, else on the other side.
    """

    random_failures: tuple[RandomFailures, ...] = ()
    instance_faults: tuple[InstanceFault, ...] = ()
    random_outages: RandomOutages | None = None
    link_outages: tuple[LinkOutage, ...] = ()
    cancel_mean_s: float | None = Field(
        default=None,
        gt=0,
        le=MAX_S,
        description="a client gives up an exponential time after its arrival, whatever has come by then",
    )
    deadline_s: float | None = Field(
        default=None, gt=0, le=MAX_S, description="a request without its first token by then is aborted"
    )
