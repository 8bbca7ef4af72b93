"""Regime chains: values that hold for a while and then change."""

from __future__ import annotations

import numpy as np

from prfaas_env.base import PrfaasError
from prfaas_env.simulator.formulas import FloatArray
from prfaas_env.workload.models import RegimeChain

#: Draws are made in whole blocks of this size, so that a longer horizon only appends to a shorter one.
_BLOCK = 64
#: Most changes of value in one chain; more is a mistake in units.
MAX_CHANGES = 10_000_000


def sample_chain(
    chain: RegimeChain, horizon_s: float, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Draw one path of a regime chain over [0, horizon_s].

    With an equally seeded generator, the path for a longer horizon begins with the path for a shorter one.

    Args:
        chain: values, their probabilities, mean holding time.
        horizon_s: end of the path in seconds, >= 0.
        rng: generator that is used for nothing else.

    Returns:
        `(start_s, values)`, both float64 of shape (k,), k >= 1; value i holds on
        `[start_s[i], start_s[i + 1])` and `start_s[0]` is 0.

    Raises:
        PrfaasError: when the path would hold more than `MAX_CHANGES` values.
    """
    if horizon_s / chain.mean_holding_s > MAX_CHANGES:
        raise PrfaasError(
            f"mean_holding_s: a regime chain that holds for {chain.mean_holding_s:g} s changes about "
            f"{horizon_s / chain.mean_holding_s:.3g} times in {horizon_s:g} s; allowed: {MAX_CHANGES:,}"
        )
    cumulative = np.cumsum(np.array(chain.probabilities, dtype=np.float64))
    last = int(np.flatnonzero(np.array(chain.probabilities))[-1])
    table = np.array(chain.values, dtype=np.float64)
    starts: list[FloatArray] = [np.zeros(1)]
    values: list[FloatArray] = []
    end_s = 0.0
    while True:
        ends_s = end_s + np.cumsum(rng.standard_exponential(_BLOCK) * chain.mean_holding_s)
        drawn = np.searchsorted(cumulative, rng.random(_BLOCK), side="right")
        values.append(table[np.minimum(drawn, last)])
        starts.append(ends_s)
        end_s = float(ends_s[-1])
        if end_s > horizon_s:
            break
    start_s = np.concatenate(starts)
    k = max(int(np.searchsorted(start_s[:-1], horizon_s, side="right")), 1)
    return start_s[:k].copy(), np.concatenate(values)[:k].copy()


def value_at(start_s: FloatArray, values: FloatArray, t_s: FloatArray) -> FloatArray:
    """Values of a path at the instants `t_s` (>= 0, any shape); at a change the new value holds."""
    return values[np.searchsorted(start_s, t_s, side="right") - 1]
