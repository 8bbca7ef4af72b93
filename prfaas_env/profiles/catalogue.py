"""The catalogue of published models: one YAML file per model in `data/`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from prfaas_env.base import Frozen, first_error
from prfaas_env.profiles.geometry import AttentionGeometry, LayerGroup
from prfaas_env.profiles.hf_config import kv_layout_from_hf_config, max_input_tokens_from_hf_config
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import DecodeProfile, HardwareProfile, PrefillPolynomial, PrefillTable
from prfaas_env.simulator.formulas import BITS_PER_BYTE


class ModelProfile(Frozen):
    """One model: what its cache weighs and how fast each kind of instance runs it."""

    name: str
    kv: KVLayout
    kv_source: str = Field(description="where the geometry or the bytes come from")
    hardware: dict[str, HardwareProfile] = Field(default_factory=dict)
    max_input_tokens: int | None = Field(default=None, ge=1, description="native limit of the model, if any")


class KvRateTable(Frozen):
    """Published KV rates Phi_kv of one instance; prefill time follows as S_kv / Phi_kv (paper equation 1)."""

    kind: Literal["kv_rate"] = "kv_rate"
    tokens: tuple[int, ...] = Field(min_length=2)
    kv_rate_gbps: tuple[float, ...] = Field(min_length=2)
    source: str = Field(description="where the rates come from")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.tokens) != len(self.kv_rate_gbps):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.kv_rate_gbps)} kv_rate_gbps")
        if min(self.kv_rate_gbps) <= 0:
            raise ValueError("kv_rate_gbps must be above 0")
        return self

    def prefill(self, kv: KVLayout) -> PrefillTable:
        """The prefill times that give these rates with this layout; refused where they fall with length."""
        return PrefillTable(
            tokens=self.tokens,
            seconds_at=tuple(
                kv.transfer_bytes(tokens) * BITS_PER_BYTE / (gbps * 1e9)
                for tokens, gbps in zip(self.tokens, self.kv_rate_gbps, strict=True)
            ),
            source=self.source,
        )


class _HardwareEntry(Frozen):
    gpus: int = Field(default=8, ge=1)
    prefill: Annotated[PrefillTable | PrefillPolynomial | KvRateTable, Field(discriminator="kind")]
    decode: DecodeProfile | None = None


class CatalogueEntry(Frozen):
    """One file of the catalogue: bytes from `attention` (geometry), or as `kv` where none is published."""

    name: str
    attention: tuple[LayerGroup, ...] = ()
    kv: KVLayout | None = None
    kv_source: str
    hardware: dict[str, _HardwareEntry] = Field(default_factory=dict)
    max_input_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if bool(self.attention) == (self.kv is not None):
            raise ValueError("give either attention or kv")
        return self

    def profile(self) -> ModelProfile:
        """The model with its bytes and its derived tables worked out."""
        kv = AttentionGeometry(groups=self.attention).layout() if self.kv is None else self.kv
        return ModelProfile(
            name=self.name,
            kv=kv,
            kv_source=self.kv_source,
            hardware={
                name: HardwareProfile(
                    gpus=entry.gpus,
                    prefill=entry.prefill.prefill(kv)
                    if isinstance(entry.prefill, KvRateTable)
                    else entry.prefill,
                    decode=entry.decode,
                )
                for name, entry in self.hardware.items()
            },
            max_input_tokens=self.max_input_tokens,
        )


@cache
def model_names() -> tuple[str, ...]:
    """Names of the catalogue, sorted."""
    data = files("prfaas_env.profiles") / "data"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in data.iterdir() if f.name.endswith(".yaml")))


@cache
def load_entry(name: str) -> CatalogueEntry:
    """Catalogue entry `name` as it is written; ValueError naming the known ones if there is none."""
    if name not in model_names():
        raise ValueError(f"unknown model {name!r}; known: {', '.join(model_names())}")
    path = files("prfaas_env.profiles") / "data" / f"{name}.yaml"
    try:
        return CatalogueEntry.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise first_error(error, path.name) from None


@cache
def load_model(name: str) -> ModelProfile:
    """Model `name` of the catalogue; ValueError naming the known ones if there is none."""
    return load_entry(name).profile()


def model_from_hf_config(path: str | Path, name: str | None = None) -> ModelProfile:
    """A model with the bytes of a HuggingFace `config.json` and no hardware yet.

    Args:
        path: the file, or the folder it is in.
        name: name of the model; none = the folder's.

    Raises:
        PrfaasError: naming the file and the field that is missing, wrong or not supported.
    """
    kv = kv_layout_from_hf_config(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return ModelProfile(
        name=name or folder.resolve().name,
        kv=kv,
        kv_source="geometry of its config.json; cache in bf16, state in fp32 unless it states another dtype",
        max_input_tokens=max_input_tokens_from_hf_config(path),
    )
