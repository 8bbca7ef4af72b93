"""Long-run figures of a workload, for the theory: arrival rate, input law, mean output."""

from __future__ import annotations

from pathlib import Path

from prfaas_env.base import PrfaasError
from prfaas_env.workload.laws import LengthLaw, empirical_law, length_law
from prfaas_env.workload.models import RegimeArrivals, TraceWorkload, Workload
from prfaas_env.workload.traces import load_trace, replay, slice_span_s


def mean_rate_rps(workload: Workload, base_dir: Path | None = None) -> float:
    """Long-run arrival rate, requests per second; of a trace, requests of its slice by replayed time.

    Raises:
        PrfaasError: a trace slice of no length.
    """
    if isinstance(workload, TraceWorkload):
        span_s = slice_span_s(load_trace(workload, base_dir), workload) / workload.speed
        if span_s <= 0.0:
            raise PrfaasError(f"the slice of {workload.file} spans 0 s, so it has no arrival rate")
        return len(replay(workload, seed=0, base_dir=base_dir)) / span_s
    arrivals = workload.arrivals
    return arrivals.rate_rps.mean if isinstance(arrivals, RegimeArrivals) else arrivals.rate_rps


def input_law(workload: Workload, base_dir: Path | None = None) -> LengthLaw:
    """Law of the input length, before any cached prefix is taken off; of a trace, the lengths of its slice.

    Raises:
        PrfaasError: a trace slice without requests.
    """
    if isinstance(workload, TraceWorkload):
        table = replay(workload, seed=0, base_dir=base_dir)
        if not len(table):
            raise PrfaasError(f"the slice of {workload.file} holds no requests, so it has no length law")
        return empirical_law(table.input_tokens)
    return length_law(workload.input_tokens)


def output_law(workload: Workload, base_dir: Path | None = None) -> LengthLaw:
    """Law of the output length; of a trace, the lengths of its slice.

    Raises:
        PrfaasError: a trace slice without requests.
    """
    if isinstance(workload, TraceWorkload):
        table = replay(workload, seed=0, base_dir=base_dir)
        if not len(table):
            raise PrfaasError(f"the slice of {workload.file} holds no requests, so it has no length law")
        return empirical_law(table.output_tokens)
    return length_law(workload.output_tokens)


def mean_output_tokens(workload: Workload, base_dir: Path | None = None) -> float:
    """Mean output length in tokens (L_out of the paper)."""
    return output_law(workload, base_dir).mean
