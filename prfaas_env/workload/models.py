"""Configuration of a workload: where arrivals, input lengths and output lengths come from."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prfaas_env.base import MAX_S, MAX_TOKENS, Frozen, Seconds, Tokens


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


class ProfileArrivals(Frozen):
    """Arrivals whose rate follows a file of windows with a mean rate each (a CSV such as ServeGen's).

    `file` is a path (relative to the scenario file) or `bundled:NAME`, with the columns `window_start_s` and
    `total_rate_rps`. The slice [start_s, end_s) of profile time is walked from its own beginning and then
    again and again. `time_compression` squeezes its time axis and leaves its rates alone.
    """

    kind: Literal["profile"] = "profile"
    file: str
    rate_rps: float | None = Field(
        default=None,
        ge=0,
        description="mean rate over the slice, to which all its rates are scaled; none = as in the file",
    )
    start_s: Seconds = 0.0
    end_s: float | None = Field(
        default=None, gt=0, le=MAX_S, description="end of the slice in profile time; none = end of the file"
    )
    time_compression: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="seconds of profile time per second; 24 = a day in an hour"
    )
    burstiness: Literal["poisson", "column"] = Field(
        default="poisson",
        description="column = gamma gaps with the CV of the window's column rate_weighted_mean_cv",
    )
    max_cv: float = Field(
        default=10.0, gt=0, le=100, description="a CV of the column above this counts as this"
    )

    @model_validator(mode="after")
    def _slice(self) -> Self:
        _check_slice(self.start_s, self.end_s)
        return self


def _check_slice(start_s: float, end_s: float | None) -> None:
    if end_s is not None and end_s <= start_s:
        raise ValueError(f"end_s {end_s} must exceed start_s {start_s}")


Arrivals = Annotated[
    PoissonArrivals | GammaArrivals | DeterministicArrivals | RegimeArrivals | ProfileArrivals,
    Field(discriminator="kind"),
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


class FixedFraction(Frozen):
    """The same fraction for every request that hits."""

    kind: Literal["fixed"] = "fixed"
    fraction: float = Field(ge=0, le=1)


class UniformFraction(Frozen):
    """Uniform on [low, high]."""

    kind: Literal["uniform"] = "uniform"
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.high < self.low:
            raise ValueError(f"high {self.high} must not be below low {self.low}")
        return self


class BetaFraction(Frozen):
    """Beta with parameters `alpha` and `beta`; mean alpha / (alpha + beta)."""

    kind: Literal["beta"] = "beta"
    alpha: float = Field(gt=0, le=1e6)
    beta: float = Field(gt=0, le=1e6)


Fractions = Annotated[FixedFraction | UniformFraction | BetaFraction, Field(discriminator="kind")]


class HitRate(Frozen):
    """Prefix hits of a workload without prefix data: which requests hit, and how much of their input."""

    share: float = Field(ge=0, le=1, description="share of requests that find a part of their input cached")
    cached_fraction: Fractions = Field(description="cached part of the input of a request that hits")


_HIT_RATE = Field(
    default=None,
    description="cached tokens drawn at reset, for a workload without prefix data; none = every prompt is new",
)


class SyntheticWorkload(Frozen):
    """Requests drawn from laws."""

    kind: Literal["synthetic"] = "synthetic"
    arrivals: Arrivals
    input_tokens: Lengths
    output_tokens: Lengths
    hit_rate: HitRate | None = _HIT_RATE


#: Most turns of one session; more is a mistake.
MAX_TURNS = 4096
_Turns = Annotated[int, Field(ge=1, le=MAX_TURNS)]


class GeometricTurns(Frozen):
    """After each turn the session goes on with the same probability, at most to `max_turns`."""

    kind: Literal["geometric"] = "geometric"
    mean_turns: float = Field(ge=1, le=MAX_TURNS, description="mean before the cut at max_turns")
    max_turns: _Turns = 1024


class FixedTurns(Frozen):
    """Every session the same."""

    kind: Literal["fixed"] = "fixed"
    turns: _Turns


class EmpiricalTurns(Frozen):
    """Drawn with replacement from a list of observed numbers of turns."""

    kind: Literal["empirical"] = "empirical"
    turns: tuple[_Turns, ...] = Field(min_length=1)


Turns = Annotated[GeometricTurns | FixedTurns | EmpiricalTurns, Field(discriminator="kind")]


class FixedThink(Frozen):
    """The same time before every next turn."""

    kind: Literal["fixed"] = "fixed"
    think_s: Seconds


class ExponentialThink(Frozen):
    """Exponential time before the next turn."""

    kind: Literal["exponential"] = "exponential"
    mean_s: Seconds


class LogNormalThink(Frozen):
    """Log-normal time before the next turn: half are below the median, sigma is that of the logarithm."""

    kind: Literal["lognormal"] = "lognormal"
    median_s: Seconds
    sigma: float = Field(ge=0, le=10)


ThinkTime = Annotated[FixedThink | ExponentialThink | LogNormalThink, Field(discriminator="kind")]


class SystemPrompts(Frozen):
    """A library of system prompts that sessions share; the one of rank r is chosen with weight 1 / r^exponent."""

    tokens: tuple[Tokens, ...] = Field(
        min_length=1,
        max_length=100_000,
        description="length by rank, most popular first; begun again at its end",
    )
    n_prompts: int | None = Field(
        default=None, ge=1, le=100_000, description="size of the library; none = one prompt per length"
    )
    zipf_exponent: float = Field(default=1.0, ge=0, le=20)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length in tokens of every prompt, by rank."""
        n = len(self.tokens) if self.n_prompts is None else self.n_prompts
        return tuple(self.tokens[r % len(self.tokens)] for r in range(n))

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Chance of every prompt, by rank."""
        n = len(self.tokens) if self.n_prompts is None else self.n_prompts
        weights = [r**-self.zipf_exponent for r in range(1, n + 1)]
        total = math.fsum(weights)
        return tuple(w / total for w in weights)


class SessionWorkload(Frozen):
    """Conversations: each turn's prompt is the whole conversation so far and the new text.

    `arrivals` are those of sessions. The prompt of the first turn is the session's system prompt and
    `first_tokens`; that of a later turn is the prompt before, its output, and `new_tokens`. A turn arrives
    `service_s + service_s_per_output_token * (output before) + think time` after the one before: a stated
    allowance, drawn with everything else, so that no policy moves an arrival. A session ends after its turns,
    or before the first prompt that is longer than `context_limit_tokens`. A regime chain in a length holds
    for a whole session, by the session's start.

    Prompts carry prefix ids of blocks of `block_tokens` tokens; an equal leading run of ids is equal text, and
    the last id covers the partial block.
    """

    kind: Literal["sessions"] = "sessions"
    arrivals: Arrivals
    turns: Turns
    think_time: ThinkTime
    service_s: Seconds = Field(default=0.0, description="allowance for serving a turn before the user thinks")
    service_s_per_output_token: float = Field(
        default=0.0, ge=0, le=1e3, description="the same per output token of that turn"
    )
    system_prompts: SystemPrompts | None = None
    first_tokens: Lengths = Field(description="user tokens of the first turn")
    new_tokens: Lengths = Field(description="user tokens of every later turn")
    output_tokens: Lengths
    context_limit_tokens: Tokens
    block_tokens: int = Field(default=512, ge=1, le=MAX_TOKENS)
    warm_start_s: Seconds = Field(
        default=0.0,
        description="sessions begin that long before time 0, with their turns from 0 on; 0 = the first begins after 0",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_hit_rate(cls, value: Any) -> Any:
        """Say why before the field counts as unknown."""
        if isinstance(value, dict) and value.get("hit_rate") is not None:
            raise ValueError("hit_rate does not apply to kind sessions, whose prompts have prefix ids")
        return value


#: Formats of recorded requests. JSON lines: Mooncake, Bailian, vLLM's timed trace; CSV: Azure LLM inference, BurstGPT.
TraceFormat = Literal["mooncake", "azure", "burstgpt", "bailian", "vllm"]
#: Formats whose rows may carry prefix ids -> tokens per block that the format sets; none = inferred.
PREFIX_BLOCK_TOKENS: dict[TraceFormat, int | None] = {"mooncake": None, "bailian": 16, "vllm": 16}
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
        default=None,
        ge=1,
        description="tokens per prefix block; none = inferred and printed (mooncake), or the format's 16",
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
    hit_rate: HitRate | None = _HIT_RATE

    @model_validator(mode="after")
    def _slice(self) -> Self:
        _check_slice(self.start_s, self.end_s)
        if self.time_unit_s is not None and self.format == "azure":
            raise ValueError("time_unit_s does not apply to format azure, whose stamps are dates and times")
        if self.block_tokens is not None and self.format not in PREFIX_BLOCK_TOKENS:
            raise ValueError(f"block_tokens does not apply to format {self.format}, which has no prefix data")
        return self


Workload = Annotated[SyntheticWorkload | SessionWorkload | TraceWorkload, Field(discriminator="kind")]
