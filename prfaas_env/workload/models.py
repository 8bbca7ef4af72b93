"""Configuration of a workload: where arrivals, input lengths and output lengths come from."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from prfaas_env.base import MAX_TOKENS, Frozen, Tokens


class RegimeChain(Frozen):
    """A value that holds for an exponential time, then is drawn anew (with replacement, so it may stay)."""

    values: tuple[float, ...] = Field(min_length=1)
    probabilities: tuple[float, ...] = Field(min_length=1)
    mean_holding_s: float = Field(gt=0)

    @model_validator(mode="after")
    def _distribution(self) -> Self:
        if len(self.values) != len(self.probabilities):
            raise ValueError(f"{len(self.values)} values but {len(self.probabilities)} probabilities")
        if any(p < 0 for p in self.probabilities) or abs(sum(self.probabilities) - 1.0) > 1e-9:
            raise ValueError(
                f"probabilities must be >= 0 and sum to 1, they sum to {sum(self.probabilities)}"
            )
        return self

    @property
    def mean(self) -> float:
        """Long-run mean of the value."""
        return sum(v * p for v, p in zip(self.values, self.probabilities, strict=True))


def _refuse_negative(field: str, value: float | RegimeChain) -> None:
    lowest = min(value.values) if isinstance(value, RegimeChain) else value
    if lowest < 0:
        raise ValueError(f"{field} must be 0 or more, found {lowest}")


class PoissonArrivals(Frozen):
    """Independent exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate_rps: float = Field(ge=0)


class GammaArrivals(Frozen):
    """Gamma gaps of shape k: squared coefficient of variation 1/k; shape 1 is Poisson, below is burstier."""

    kind: Literal["gamma"] = "gamma"
    rate_rps: float = Field(ge=0)
    shape: float = Field(gt=0)


class DeterministicArrivals(Frozen):
    """Even spacing ("uniform" arrivals of the paper); the first request comes one gap after time 0."""

    kind: Literal["deterministic"] = "deterministic"
    rate_rps: float = Field(ge=0)


class RegimeArrivals(Frozen):
    """Poisson arrivals whose rate follows a regime chain."""

    kind: Literal["regimes"] = "regimes"
    rate_rps: RegimeChain

    @model_validator(mode="after")
    def _not_negative(self) -> Self:
        _refuse_negative("rate_rps", self.rate_rps)
        return self


Arrivals = Annotated[
    PoissonArrivals | GammaArrivals | DeterministicArrivals | RegimeArrivals, Field(discriminator="kind")
]


class LogNormalLengths(Frozen):
    """exp(Normal(mu, sigma)) truncated (not clipped) to [min_tokens, max_tokens], rounded down."""

    kind: Literal["lognormal"] = "lognormal"
    mu: float | RegimeChain
    sigma: float = Field(gt=0)
    min_tokens: Tokens
    max_tokens: Tokens

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.max_tokens <= self.min_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} must exceed min_tokens {self.min_tokens}")
        return self

    def standard_range(self, mu: float) -> tuple[float, float]:
        """[min_tokens, max_tokens] in standard deviations of the logarithm from `mu`."""
        return (math.log(self.min_tokens) - mu) / self.sigma, (math.log(self.max_tokens) - mu) / self.sigma


class FixedLengths(Frozen):
    """Every request the same."""

    kind: Literal["fixed"] = "fixed"
    tokens: Tokens


class PoissonLengths(Frozen):
    """Poisson around a mean that may follow a regime chain; at least `min_tokens`."""

    kind: Literal["poisson"] = "poisson"
    mean_tokens: float | RegimeChain
    min_tokens: Tokens = 1

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        _refuse_negative("mean_tokens", self.mean_tokens)
        means = self.mean_tokens.values if isinstance(self.mean_tokens, RegimeChain) else (self.mean_tokens,)
        if max(means) > MAX_TOKENS:
            raise ValueError(f"mean_tokens must be at most {MAX_TOKENS:,}, found {max(means):g}")
        return self


class EmpiricalLengths(Frozen):
    """Drawn with replacement from a list of observed lengths."""

    kind: Literal["empirical"] = "empirical"
    tokens: tuple[Tokens, ...] = Field(min_length=1)


Lengths = Annotated[
    LogNormalLengths | FixedLengths | PoissonLengths | EmpiricalLengths, Field(discriminator="kind")
]


class SyntheticWorkload(Frozen):
    """Requests drawn from laws."""

    kind: Literal["synthetic"] = "synthetic"
    arrivals: Arrivals
    input_tokens: Lengths
    output_tokens: Lengths


#: Formats of recorded requests: Mooncake (JSON lines), Azure LLM inference and BurstGPT (CSV).
TraceFormat = Literal["mooncake", "azure", "burstgpt"]
#: Rule for rows with 0 input or output tokens: left out and counted, set to 1 and counted, refused.
ZeroTokens = Literal["drop", "one", "refuse"]


class TraceWorkload(Frozen):
    """Requests read from a file.

    `file` is a path (relative to the scenario file) or `bundled:NAME`. The slice [start_s, end_s) of trace
    time is replayed from its own beginning, `speed` times as fast.
    """

    kind: Literal["trace"] = "trace"
    file: str
    format: TraceFormat
    time_unit_s: float | None = Field(
        default=None, gt=0, description="seconds per unit of the stamp; none = the format's"
    )
    block_tokens: int | None = Field(
        default=None, ge=1, description="tokens per prefix block; none = inferred and printed"
    )
    start_s: float = Field(default=0.0, ge=0)
    end_s: float | None = Field(default=None, gt=0)
    speed: float = Field(default=1.0, gt=0)
    spread: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="spread equal stamps over their step, seeded; auto = when under half are distinct",
    )
    zero_tokens: ZeroTokens = Field(
        default="drop",
        description="rows with zero input or output tokens: dropped and counted, set to 1, refused",
    )
    extra_input_tokens: int = Field(
        default=0,
        ge=0,
        le=MAX_TOKENS,
        description="tokens added to every input: the server's template, which a client's count lacks",
    )

    @model_validator(mode="after")
    def _slice(self) -> Self:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s {self.end_s} must exceed start_s {self.start_s}")
        if self.time_unit_s is not None and self.format == "azure":
            raise ValueError("time_unit_s does not apply to format azure, whose stamps are dates and times")
        if self.block_tokens is not None and self.format != "mooncake":
            raise ValueError(f"block_tokens does not apply to format {self.format}, which has no prefix data")
        return self


Workload = Annotated[SyntheticWorkload | TraceWorkload, Field(discriminator="kind")]
