"""Backends by name, one file each."""

from __future__ import annotations

from collections.abc import Callable

from prfaas_serving.backends.base import Backend, Flow, HandOver, Leg
from prfaas_serving.backends.dynamo_direct import DynamoDirect
from prfaas_serving.backends.echo import Echo
from prfaas_serving.backends.llmd_sidecar import LlmdSidecar
from prfaas_serving.backends.sglang import Sglang
from prfaas_serving.backends.vllm_mooncake import VllmMooncake
from prfaas_serving.backends.vllm_nixl import VllmNixl

BACKENDS: dict[str, Callable[[], Backend]] = {
    VllmNixl.name: VllmNixl,
    VllmMooncake.name: VllmMooncake,
    Sglang.name: Sglang,
    LlmdSidecar.name: LlmdSidecar,
    DynamoDirect.name: DynamoDirect,
    Echo.name: Echo,
}


def make_backend(name: str) -> Backend:
    """A backend by its name in the configuration."""
    return BACKENDS[name]()


__all__ = ["BACKENDS", "Backend", "Flow", "HandOver", "Leg", "make_backend"]
