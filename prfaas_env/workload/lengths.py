"""Sampling of input and output lengths."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri, ndtri_exp, pdtr

from prfaas_env.base import stream
from prfaas_env.simulator.formulas import FloatArray, IntArray
from prfaas_env.workload.models import (
    EmpiricalLengths,
    FixedLengths,
    Lengths,
    LogNormalLengths,
    PoissonLengths,
    RegimeChain,
)
from prfaas_env.workload.regimes import sample_chain, value_at

LengthStream = Literal["input_lengths", "output_lengths"]


def sample_lengths(lengths: Lengths, arrival_s: FloatArray, seed: int, stream_name: LengthStream) -> IntArray:
    """Lengths in whole tokens of requests that arrive at `arrival_s`, int64 of shape (n,).

    Request i uses the i-th uniform number of the stream and nothing else, so another law, another parameter
    or more requests never shift the draws of a request. A regime chain is evaluated at the arrival instant
    and has a sub-stream of its own.

    Args:
        lengths: the law.
        arrival_s: sorted arrival instants in seconds, shape (n,).
        seed: episode seed.
        stream_name: stream of the episode to draw from.
    """
    if isinstance(lengths, FixedLengths):
        return np.full(len(arrival_s), lengths.tokens, dtype=np.int64)
    u = stream(seed, stream_name).random(len(arrival_s))
    return lengths_from(lengths, u, parameter_at(lengths, arrival_s, seed, stream_name))


def lengths_from(lengths: Lengths, u: FloatArray, parameter: FloatArray) -> IntArray:
    """Lengths in whole tokens by inverse CDF, int64 of shape (n,).

    Args:
        lengths: the law.
        u: uniform numbers in [0, 1), shape (n,).
        parameter: of each length the parameter that a regime chain may move (`parameter_at`), shape (n,).
    """
    if isinstance(lengths, FixedLengths):
        return np.full(len(u), lengths.tokens, dtype=np.int64)
    if isinstance(lengths, EmpiricalLengths):
        table = np.array(lengths.tokens, dtype=np.int64)
        return table[(u * len(table)).astype(np.int64)]
    tokens = np.empty(len(u), dtype=np.int64)
    for value in np.unique(parameter):
        here = parameter == value
        if isinstance(lengths, LogNormalLengths):
            tokens[here] = _lognormal_tokens(u[here], float(value), lengths)
        else:
            tokens[here] = _poisson_tokens(u[here], float(value), lengths)
    return tokens


def parameter_at(
    lengths: Lengths, arrival_s: FloatArray, seed: int, stream_name: LengthStream, sub_stream: int = 1
) -> FloatArray:
    """The parameter of a law that a regime chain may move, at sorted instants: mu, mean, or 0 where there is none.

    A chain's path has a sub-stream of its own.
    """
    if isinstance(lengths, FixedLengths | EmpiricalLengths):
        return np.zeros(len(arrival_s))
    value = lengths.mu if isinstance(lengths, LogNormalLengths) else lengths.mean_tokens
    if not isinstance(value, RegimeChain):
        return np.full(len(arrival_s), value)
    end_s = float(arrival_s[-1]) if len(arrival_s) else 0.0
    start_s, values = sample_chain(value, end_s, stream(seed, stream_name, sub_stream))
    return value_at(start_s, values, arrival_s)


def _lognormal_tokens(u: FloatArray, mu: float, lengths: LogNormalLengths) -> IntArray:
    x = np.exp(mu + lengths.sigma * truncated_normal_quantile(u, *lengths.standard_range(mu)))
    # Rounding of exp and log may leave the range by one unit in the last place.
    return np.clip(x, lengths.min_tokens, lengths.max_tokens).astype(np.int64)


def _poisson_tokens(u: FloatArray, mean: float, lengths: PoissonLengths) -> IntArray:
    first, cumulative = poisson_table(mean)
    tokens = first + np.searchsorted(cumulative, u, side="right")
    return np.maximum(tokens, lengths.min_tokens).astype(np.int64)


def poisson_table(mean: float) -> tuple[int, FloatArray]:
    """First count and cumulative probabilities of a Poisson law; what it leaves out weighs under 1e-16."""
    reach = 9.0 * np.sqrt(mean) + 40.0
    first = max(int(mean - reach), 0)
    counts = np.arange(first, int(mean + reach) + 1, dtype=np.float64)
    return first, np.asarray(pdtr(counts, mean), dtype=np.float64)


def truncated_normal_quantile(u: FloatArray, a: float, b: float) -> FloatArray:
    """Quantiles of a standard normal truncated to [a, b], by inverse CDF, stable far into both tails.

    Args:
        u: probabilities in [0, 1], any shape.
        a, b: ends of the range, a < b.
    """
    if a + b > 0:
        # Mirror, so that the probabilities are small numbers near 0 and not near 1.
        return -truncated_normal_quantile(1.0 - u, -b, -a)
    below, upto = ndtr(a), ndtr(b)
    if upto > 1e-200:
        z = ndtri(below + u * (upto - below))
    else:
        with np.errstate(divide="ignore"):
            z = ndtri_exp(np.logaddexp(log_ndtr(a) + np.log1p(-u), log_ndtr(b) + np.log(u)))
    # The ends are exact; next to them a probability is no finer than one unit in the last place.
    return np.where(u <= 0.0, a, np.where(u >= 1.0, b, np.clip(z, a, b)))
