"""Prefix hits of workloads without prefix data: cached tokens per request from a stated hit rate."""

from __future__ import annotations

import numpy as np
from scipy.special import betaincinv

from prfaas_env.base import stream
from prfaas_env.simulator.formulas import FloatArray, IntArray
from prfaas_env.workload.models import BetaFraction, FixedFraction, Fractions, HitRate

#: Sub-streams of "prefixes": which requests hit, and how much of their input.
_WHICH, _HOW_MUCH = 1, 2


def prefix_note(hit_rate: HitRate | None) -> str:
    """The line of a table that says how a workload without prefix ids is read."""
    if hit_rate is None:
        return "no prefix data: every prompt counts as new"
    return (
        f"no prefix data; hit rate as stated: {hit_rate.share:.1%} of the requests find a part of their input "
        f"cached ({hit_rate.cached_fraction.kind} law)"
    )


def draw_cached_tokens(
    hit_rate: HitRate | None, input_tokens: IntArray, seed: int, first: int = 0
) -> IntArray:
    """Cached tokens per request, rounded down and below the input, int64 of shape (n,).

    Request i uses the i-th uniform numbers of two sub-streams of "prefixes" and nothing else.

    Args:
        hit_rate: share of requests that hit and law of the cached fraction; None = 0 everywhere.
        input_tokens: input lengths, shape (n,).
        seed: episode seed.
        first: number of the first request, for a slice of a trace.
    """
    n = len(input_tokens)
    if hit_rate is None:
        return np.zeros(n, dtype=np.int64)
    which = stream(seed, "prefixes", _WHICH).random(first + n)[first:]
    how_much = stream(seed, "prefixes", _HOW_MUCH).random(first + n)[first:]
    cached = (_fractions(hit_rate.cached_fraction, how_much) * input_tokens).astype(np.int64)
    return np.where(which < hit_rate.share, np.minimum(cached, input_tokens - 1), 0).astype(np.int64)


def _fractions(law: Fractions, u: FloatArray) -> FloatArray:
    """Cached fractions by inverse CDF."""
    if isinstance(law, FixedFraction):
        return np.full(len(u), law.fraction)
    if isinstance(law, BetaFraction):
        return np.asarray(betaincinv(law.alpha, law.beta, u), dtype=np.float64)
    return law.low + (law.high - law.low) * u
