"""Long-run figures of a workload, for the theory: arrival rate, input law, mean output."""

from __future__ import annotations

from pathlib import Path

from prfaas_env.base import PrfaasError
from prfaas_env.workload.arrivals import mean_arrival_rps
from prfaas_env.workload.laws import LengthLaw, empirical_law, length_law
from prfaas_env.workload.models import Arrivals, RegimeArrivals, SessionWorkload, TraceWorkload, Workload
from prfaas_env.workload.session_law import session_law
from prfaas_env.workload.traces import load_trace, replay, slice_span_s


def mean_rate_rps(workload: Workload, base_dir: Path | None = None) -> float:
    """Long-run arrival rate, requests per second; of a trace, requests of its slice by replayed time.

    Of sessions: their rate times the mean number of turns that the law of turns and the context limit allow.

    Raises:
        PrfaasError: a trace slice of no length, or a bad file.
    """
    if isinstance(workload, TraceWorkload):
        span_s = slice_span_s(load_trace(workload, base_dir), workload) / workload.speed
        if span_s <= 0.0:
            raise PrfaasError(f"the slice of {workload.file} spans 0 s, so it has no arrival rate")
        return len(replay(workload, seed=0, base_dir=base_dir)) / span_s
    rate = mean_arrival_rps(workload.arrivals, base_dir)
    return rate * session_law(workload).mean_turns if isinstance(workload, SessionWorkload) else rate


def with_mean_rate(workload: Workload, rate_rps: float, base_dir: Path | None = None) -> Workload:
    """The same workload with another mean rate of requests per second.

    A trace is replayed faster or slower; arrivals have their rate set, or all rates of their regimes scaled; of
    sessions, the rate at which they begin changes.

    Raises:
        PrfaasError: a workload without arrivals, which cannot be scaled, or a bad file.
    """
    if isinstance(workload, TraceWorkload):
        factor = rate_rps / mean_rate_rps(workload, base_dir)
        return workload.model_copy(update={"speed": workload.speed * factor})
    if isinstance(workload, SessionWorkload):
        mean_turns = session_law(workload).mean_turns
        if mean_turns == 0:
            raise PrfaasError(
                "no first prompt is within context_limit_tokens, so no rate scales the sessions"
            )
        rate_rps = rate_rps / mean_turns
    return workload.model_copy(update={"arrivals": _with_rate(workload.arrivals, rate_rps)})


def _with_rate(arrivals: Arrivals, rate_rps: float) -> Arrivals:
    if not isinstance(arrivals, RegimeArrivals):
        return arrivals.model_copy(update={"rate_rps": rate_rps})
    chain = arrivals.rate_rps
    if chain.mean == 0:
        raise PrfaasError("the regimes have no arrivals, so no rate scales them")
    factor = rate_rps / chain.mean
    scaled = chain.model_copy(update={"values": tuple(v * factor for v in chain.values)})
    return arrivals.model_copy(update={"rate_rps": scaled})


def input_law(workload: Workload, base_dir: Path | None = None) -> LengthLaw:
    """Law of the input length, before any cached prefix is taken off; of a trace, the lengths of its slice.

    Raises:
        PrfaasError: a trace slice or sessions without requests.
    """
    if isinstance(workload, TraceWorkload):
        table = replay(workload, seed=0, base_dir=base_dir)
        if not len(table):
            raise PrfaasError(f"the slice of {workload.file} holds no requests, so it has no length law")
        return empirical_law(table.input_tokens)
    if isinstance(workload, SessionWorkload):
        return _of_sessions(session_law(workload).prompts)
    return length_law(workload.input_tokens)


def output_law(workload: Workload, base_dir: Path | None = None) -> LengthLaw:
    """Law of the output length; of a trace, the lengths of its slice.

    Raises:
        PrfaasError: a trace slice or sessions without requests.
    """
    if isinstance(workload, TraceWorkload):
        table = replay(workload, seed=0, base_dir=base_dir)
        if not len(table):
            raise PrfaasError(f"the slice of {workload.file} holds no requests, so it has no length law")
        return empirical_law(table.output_tokens)
    if isinstance(workload, SessionWorkload):
        return _of_sessions(session_law(workload).outputs)
    return length_law(workload.output_tokens)


def _of_sessions(law: LengthLaw | None) -> LengthLaw:
    if law is None:
        raise PrfaasError(
            "workload: no first prompt is within context_limit_tokens, so there is no length law"
        )
    return law


def mean_output_tokens(workload: Workload, base_dir: Path | None = None) -> float:
    """Mean output length in tokens (L_out of the paper)."""
    return output_law(workload, base_dir).mean
