"""Domain randomisation: scenario fields that are drawn anew instead of being fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import yaml
from pydantic import Field, model_validator

from prfaas_env.base import Frozen, PrfaasError
from prfaas_env.scenarios import Scenario, load_scenario

#: First entry of the spawn key of draws that belong to a group of envs (see `group_draws`).
_GROUP_STREAM = 1


class Distribution(Frozen):
    """What a field is drawn from: one of a list, or a number between two, evenly or evenly on a log scale."""

    values: tuple[Any, ...] | None = Field(default=None, min_length=1)
    uniform: tuple[float, float] | None = None
    log_uniform: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of values, uniform, log_uniform; found {given or 'none'}")
        limits = self.uniform or self.log_uniform
        if limits is not None and not limits[0] < limits[1]:
            raise ValueError(f"{given[0]}: the first number must be below the second, found {list(limits)}")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError(f"log_uniform: both numbers must be above 0, found {list(self.log_uniform)}")
        return self

    def at(self, share: float) -> Any:
        """The value at a share in [0, 1) of the distribution."""
        if self.values is not None:
            return self.values[int(share * len(self.values))]
        if self.uniform is not None:
            low, high = self.uniform
            return low + share * (high - low)
        assert self.log_uniform is not None
        low, high = (math.log(x) for x in self.log_uniform)
        return math.exp(low + share * (high - low))


Randomise = dict[str, Distribution]


def assignment(path: str, value: Any) -> str:
    """`path=value` as `load_scenario` reads it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip()
    return f"{path}={text.removesuffix('...').strip()}"


def with_shares(
    scenario: Scenario, randomise: Mapping[str, Distribution], shares: Mapping[str, float]
) -> Scenario:
    """The scenario with each field at its share; PrfaasError for a field or value that it does not take."""
    given = [assignment(path, spec.at(shares[path])) for path, spec in randomise.items()]
    try:
        return load_scenario(scenario, overrides=given)
    except PrfaasError as error:
        raise PrfaasError(f"randomise: {error}") from None


def drawn(scenario: Scenario, randomise: Mapping[str, Distribution], random: np.random.Generator) -> Scenario:
    """The scenario with every field drawn, in the order of the mapping; itself where there is none."""
    if not randomise:
        return scenario
    return with_shares(scenario, randomise, {path: float(random.random()) for path in randomise})


def group_draws(
    scenario: Scenario, randomise: Mapping[str, Distribution], key: tuple[int, ...], n: int
) -> list[Scenario]:
    """`n` scenarios drawn for groups of envs; `key` (seed of the training, stage, place of the scenario) fixes them."""
    random = np.random.default_rng(np.random.SeedSequence(key[0], spawn_key=(_GROUP_STREAM, *key[1:])))
    return [drawn(scenario, randomise, random) for _ in range(n)]


def check(scenario: Scenario, randomise: Mapping[str, Distribution]) -> list[Scenario]:
    """Scenarios at the ends and in between, every listed value once; PrfaasError for one that is not allowed."""
    found = []
    for path, spec in randomise.items():
        n = len(spec.values) if spec.values is not None else 3
        rest = dict.fromkeys(randomise, 0.0)
        for k in range(n):
            # 0, a number that is hardly whole, and just below 1
            share = (k + 0.5) / n if spec.values is not None else (0.0, 0.377, 1.0 - 1e-12)[k]
            found.append(with_shares(scenario, randomise, {**rest, path: share}))
    return found
