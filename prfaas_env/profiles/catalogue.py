"""The catalogue of published models and the reader of HuggingFace `config.json` files."""

from __future__ import annotations

from pydantic import Field

from prfaas_env.base import Frozen
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import HardwareProfile


class ModelProfile(Frozen):
    """One model: what its cache weighs and how fast each kind of instance runs it."""

    name: str
    kv: KVLayout
    kv_source: str = Field(description="where the geometry or the bytes come from")
    hardware: dict[str, HardwareProfile] = {}
    max_input_tokens: int | None = Field(default=None, ge=1, description="native limit of the model, if any")


def load_model(name: str) -> ModelProfile:
    """Catalogue entry `name`; ValueError naming the known ones if there is none."""
    raise NotImplementedError
