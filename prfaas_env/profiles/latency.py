"""Prefill and decode latency of one model on one kind of instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from prfaas_env.base import Frozen
from prfaas_env.simulator.formulas import FloatArray, piecewise_s, prefill_s


@dataclass(frozen=True)
class PrefillArrays:
    """A prefill profile as the engines read it: piecewise quadratic, arrays of shape (n_segments,)."""

    start_tokens: FloatArray
    c0_s: FloatArray
    c1_s: FloatArray
    c2_s: FloatArray


class _PrefillBase(Frozen):
    def arrays(self) -> PrefillArrays:
        raise NotImplementedError

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Prefill time in seconds of `new_tokens` behind `cached_tokens`."""
        a = self.arrays()
        return prefill_s(a.start_tokens, a.c0_s, a.c1_s, a.c2_s, new_tokens, cached_tokens)

    def seconds_array(self, tokens: FloatArray) -> FloatArray:
        """Prefill time in seconds of an array of lengths (no cache), same shape; equals `seconds` exactly."""
        a = self.arrays()
        k = np.clip(np.searchsorted(a.start_tokens, tokens, side="right") - 1, 0, len(a.start_tokens) - 1)
        x = tokens - a.start_tokens[k]
        return np.maximum(a.c0_s[k] + x * (a.c1_s[k] + x * a.c2_s[k]), 0.0)


class PrefillTable(_PrefillBase):
    """Measured points, linear between them; the first and last slope go on outside. Must rise with length."""

    kind: Literal["table"] = "table"
    tokens: tuple[float, ...] = Field(min_length=2)
    seconds_at: tuple[float, ...] = Field(min_length=2)
    source: str = Field(description="where the figures come from")

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        if len(self.tokens) != len(self.seconds_at):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.seconds_at)} seconds_at")
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError("tokens must rise strictly")
        if any(b < a for a, b in zip(self.seconds_at, self.seconds_at[1:], strict=False)):
            raise ValueError("seconds_at must not fall: prefill time is monotone in length")
        if self.seconds_at[0] < 0 or self.tokens[0] < 0:
            raise ValueError("tokens and seconds_at must not be negative")
        return self

    def arrays(self) -> PrefillArrays:
        x = np.array(self.tokens, dtype=np.float64)
        y = np.array(self.seconds_at, dtype=np.float64)
        return PrefillArrays(x[:-1].copy(), y[:-1].copy(), np.diff(y) / np.diff(x), np.zeros(len(x) - 1))


class PrefillPolynomial(_PrefillBase):
    """`c0 + c1 l + c2 l^2` seconds; coefficients must not be negative, so that it rises with length."""

    kind: Literal["polynomial"] = "polynomial"
    c0_s: float = Field(ge=0)
    c1_s_per_token: float = Field(ge=0)
    c2_s_per_token2: float = Field(default=0.0, ge=0)
    source: str = Field(description="where the figures come from")

    def arrays(self) -> PrefillArrays:
        one = np.zeros(1)
        return PrefillArrays(one, one + self.c0_s, one + self.c1_s_per_token, one + self.c2_s_per_token2)


PrefillProfile = Annotated[PrefillTable | PrefillPolynomial, Field(discriminator="kind")]


class DecodeProfile(Frozen):
    """Decode step `a + b * batch + c * context tokens` seconds, `slots` sequences at most (25 ms, 20)."""

    a_s: float = Field(gt=0, le=10)
    b_s_per_sequence: float = Field(default=0.0, ge=0)
    c_s_per_token: float = Field(default=0.0, ge=0)
    slots: int = Field(ge=1, description="BS_max of the paper")
    kv_capacity_tokens: int | None = Field(
        default=None, ge=1, description="tokens of KV room per instance; none = slots are the only limit"
    )
    kv_reserve_tokens: int = Field(default=0, ge=0, description="room reserved per request beyond its input")
    source: str = Field(description="where the figures come from")


class HardwareProfile(Frozen):
    """One kind of instance serving one model. Figures that were not measured say so in their `source`."""

    gpus: int = Field(default=8, ge=1, description="GPUs per instance (P in the paper)")
    prefill: PrefillProfile
    decode: DecodeProfile | None = None


__all__ = [
    "DecodeProfile",
    "HardwareProfile",
    "PrefillArrays",
    "PrefillPolynomial",
    "PrefillProfile",
    "PrefillTable",
    "piecewise_s",
]
