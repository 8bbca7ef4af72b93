"""The catalogue of published models: one YAML file per model in `data/`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import yaml
from pydantic import Field, ValidationError

from prfaas_env.base import Frozen, first_error
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import HardwareProfile


class ModelProfile(Frozen):
    """One model: what its cache weighs and how fast each kind of instance runs it."""

    name: str
    kv: KVLayout
    kv_source: str = Field(description="where the geometry or the bytes come from")
    hardware: dict[str, HardwareProfile] = {}
    max_input_tokens: int | None = Field(default=None, ge=1, description="native limit of the model, if any")


@cache
def model_names() -> tuple[str, ...]:
    """Names of the catalogue, sorted."""
    data = files("prfaas_env.profiles") / "data"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in data.iterdir() if f.name.endswith(".yaml")))


@cache
def load_model(name: str) -> ModelProfile:
    """Catalogue entry `name`; ValueError naming the known ones if there is none."""
    if name not in model_names():
        raise ValueError(f"unknown model {name!r}; known: {', '.join(model_names())}")
    path = files("prfaas_env.profiles") / "data" / f"{name}.yaml"
    try:
        return ModelProfile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise first_error(error, path.name) from None
