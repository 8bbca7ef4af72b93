"""The whole workload of an episode as one table."""

from __future__ import annotations

from pathlib import Path

from prfaas_env.simulator.formulas import NS_PER_S
from prfaas_env.workload.arrivals import sample_arrivals_ns
from prfaas_env.workload.hits import draw_cached_tokens, prefix_note
from prfaas_env.workload.lengths import sample_lengths
from prfaas_env.workload.models import SessionWorkload, SyntheticWorkload, TraceWorkload, Workload
from prfaas_env.workload.requests import RequestTable
from prfaas_env.workload.sessions import session_requests
from prfaas_env.workload.traces import replay


def generate_requests(
    workload: Workload,
    *,
    seed: int,
    horizon_s: float | None = None,
    n_requests: int | None = None,
    base_dir: Path | None = None,
) -> RequestTable:
    """Draw or read all requests of an episode.

    Arrivals, input lengths and output lengths come from separate streams of the episode seed, so that another
    law for one of them leaves the others as they are.

    Args:
        workload: synthetic laws, sessions or a trace.
        seed: episode seed; the same seed gives the same table.
        horizon_s: arrivals in [0, horizon_s). A trace needs no limit: without one, its whole slice.
        n_requests: the first `n_requests` instead.
        base_dir: folder against which a relative path of a trace or rate profile is read.

    Raises:
        PrfaasError: limits that make no sense, more than 50 million requests, a bad trace file or line.
    """
    if isinstance(workload, TraceWorkload):
        return replay(workload, seed=seed, horizon_s=horizon_s, n_requests=n_requests, base_dir=base_dir)
    if isinstance(workload, SessionWorkload):
        return session_requests(
            workload, seed=seed, horizon_s=horizon_s, n_requests=n_requests, base_dir=base_dir
        )
    return _synthetic(workload, seed, horizon_s, n_requests, base_dir)


def _synthetic(
    workload: SyntheticWorkload,
    seed: int,
    horizon_s: float | None,
    n_requests: int | None,
    base_dir: Path | None,
) -> RequestTable:
    arrival_ns = sample_arrivals_ns(
        workload.arrivals, seed, horizon_s=horizon_s, n_requests=n_requests, base_dir=base_dir
    )
    arrival_s = arrival_ns / NS_PER_S
    input_tokens = sample_lengths(workload.input_tokens, arrival_s, seed, "input_lengths")
    return RequestTable.without_prefixes(
        arrival_ns,
        input_tokens,
        sample_lengths(workload.output_tokens, arrival_s, seed, "output_lengths"),
        notes=(prefix_note(workload.hit_rate),),
        cached_tokens=draw_cached_tokens(workload.hit_rate, input_tokens, seed),
    )
