"""Figures of one episode from its records: one definition for `simulate`, `compare`, the env and reports.

The cohort is the arrivals in [warmup_s, end]; integrals and rates use the same window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas_env.scenarios.models import Slo
from prfaas_env.simulator.formulas import NEVER_NS, NS_PER_S, FloatArray
from prfaas_env.simulator.prefix_pool import has_pool
from prfaas_env.simulator.records import (
    PREFIX_COUNTERS,
    REJECT_REASONS,
    RequestRecords,
    Route,
    Status,
    Totals,
)
from prfaas_env.simulator.world import World
from prfaas_env.telemetry import within

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))
#: Quantiles with open requests at their age and at infinity that differ by more than this flag saturation.
SATURATION_SHARE = 0.01
#: A stage this busy is named as saturated.
SATURATED_UTILISATION = 0.98


def _summary(values: FloatArray) -> dict[str, float | None]:
    """Mean and quantiles; None for an empty set or where the value is infinite."""
    if len(values) == 0:
        return dict.fromkeys(("mean", *(name for name, _ in QUANTILES)))
    out: dict[str, float | None] = {"mean": float(np.mean(values))}
    # "higher" keeps a quantile that touches infinity infinite, without inf - inf
    for name, q in QUANTILES:
        method = "linear" if np.isfinite(values).all() else "higher"
        out[name] = float(np.quantile(values, q, method=method))  # type: ignore[call-overload]
    return {k: v if v is not None and math.isfinite(v) else None for k, v in out.items()}


def _mean(values: FloatArray) -> float | None:
    return float(np.mean(values)) if len(values) else None


@dataclass(frozen=True)
class Cohort:
    """Per-request figures of the measured requests, float64 seconds, and masks over all requests of the world."""

    mask: np.ndarray[Any, np.dtype[np.bool_]]
    ttft_s: FloatArray
    """Open requests at their present age, aborted ones at their age when they ended; rejected ones are left out."""
    open_first: np.ndarray[Any, np.dtype[np.bool_]]
    """Among `ttft_s`: the first token has not come, yet or ever."""


def cohort(world: World, records: RequestRecords, start_ns: int, end_ns: int) -> Cohort:
    """The requests that arrived in [start_ns, end_ns] and were accepted, those aborted later included."""
    arrival = world.requests.arrival_ns
    accepted = (records.status != Status.PENDING) & (records.status != Status.REJECTED)
    mask = (arrival >= start_ns) & (arrival <= end_ns) & accepted
    first = records.first_token_ns[mask]
    open_first = first == NEVER_NS
    ttft_s = (
        np.where(open_first, np.minimum(records.abort_ns[mask], end_ns), first) - arrival[mask]
    ) / NS_PER_S
    return Cohort(mask, ttft_s, open_first)


def tpot_s(world: World, records: RequestRecords, mask: np.ndarray[Any, Any]) -> FloatArray:
    """Time per output token after the first of the finished requests under `mask`; one-token outputs left out."""
    done = mask & (records.finish_ns != NEVER_NS) & (world.requests.output_tokens > 1)
    span = records.finish_ns[done] - records.first_token_ns[done]
    out: FloatArray = span / NS_PER_S / (world.requests.output_tokens[done] - 1)
    return out


def meets_slo(world: World, records: RequestRecords, slo: Slo, mask: np.ndarray[Any, Any]) -> int:
    """Finished requests under `mask` that meet every objective of the scenario."""
    done = mask & (records.finish_ns != NEVER_NS)
    first = records.first_token_ns[done]
    ttft = (first - world.requests.arrival_ns[done]) / NS_PER_S
    tpot = (
        (records.finish_ns[done] - first) / NS_PER_S / np.maximum(world.requests.output_tokens[done] - 1, 1)
    )
    good = np.ones(len(first), dtype=np.bool_)
    for objective_s, figure_s in ((slo.ttft_s, ttft), (slo.tpot_s, tpot)):
        if objective_s is not None:
            good &= within(objective_s, figure_s)
    return int(good.sum())


def episode_metrics(
    world: World, records: RequestRecords, start: Totals, end: Totals, horizon_reached: bool = True
) -> dict[str, Any]:
    """The figures of an episode, ready for JSON.

    Args:
        world: the world.
        records: its records at the end.
        start: totals at the end of the warm-up.
        end: totals at the end.
        horizon_reached: False when the run was drained to its last finish.

    Returns:
        The keys of `prfaas simulate --json`; a figure that does not exist (no request, infinite) is None.
    """
    scenario = world.scenario
    start_ns, end_ns = start.time_ns, end.time_ns
    window_s = (end_ns - start_ns) / NS_PER_S
    per_s = 1.0 / window_s if window_s > 0 else 0.0
    c = cohort(world, records, start_ns, end_ns)
    ttft = _summary(c.ttft_s)
    ttft_inf = _summary(np.where(c.open_first, math.inf, c.ttft_s))
    had_first = c.mask & (records.first_token_ns != NEVER_NS)
    arrival = world.requests.arrival_ns
    service = records.service_ns[had_first] / NS_PER_S
    finished_in_window = (
        (records.finish_ns != NEVER_NS) & (records.finish_ns >= start_ns) & (records.finish_ns <= end_ns)
    )
    utilisation = {
        "prfaas": _ratio(
            end.remote_busy_ns - start.remote_busy_ns, end.remote_instances_ns - start.remote_instances_ns
        ),
        "prefill": _ratio(
            end.prefill_busy_ns - start.prefill_busy_ns, end.prefill_instances_ns - start.prefill_instances_ns
        ),
        "decode": _ratio(
            end.decode_slots_used_ns - start.decode_slots_used_ns, end.decode_slots_ns - start.decode_slots_ns
        ),
    }
    bits = sum(end.egress_bits) - sum(start.egress_bits)
    nominal_bps = sum(link.capacity_bps for link in scenario.deployment.links)
    utilisation["link"] = bits * per_s / nominal_bps if nominal_bps else 0.0
    tpot = tpot_s(world, records, c.mask)
    warnings = [f"{stage} saturated" for stage, use in utilisation.items() if use > SATURATED_UTILISATION]
    if window_s == 0:
        warnings.append("the run ended before measure.warmup_s: nothing was measured")
    if _differ(ttft, ttft_inf):
        warnings.append("open requests move the quantiles: the system is saturated or the run is too short")
    notes = list(world.requests.notes)
    if scenario.prefix_pool is not None and not has_pool(scenario, world.requests):
        notes.append("no prefix data in the workload: the prefix pool does nothing")
    if scenario.measure.warmup_s == 0:
        notes.append("includes start (measure.warmup_s is 0)")
    return {
        "requests": {
            "arrived": end.arrived,
            "finished": end.finished,
            "open": end.arrived - end.finished - end.rejected - end.aborted,
            "rejected": end.rejected,
            "aborted": end.aborted,
            "remote": end.remote,
        },
        "window_s": window_s,
        "warmup_s": scenario.measure.warmup_s,
        "drained": not horizon_reached,
        "cohort": int(c.mask.sum()),
        "ttft_s": ttft,
        "ttft_open_inf_s": ttft_inf,
        "service_ttft_s": {
            "mean": _mean(service),
            "p90": float(np.quantile(service, 0.9)) if len(service) else None,
        },
        "queue_wait_s": _mean((records.prefill_start_ns[had_first] - arrival[had_first]) / NS_PER_S),
        "prefill_s": _mean(service),
        "transfer_s": _mean(
            (records.transfer_end_ns[had_first] - records.prefill_end_ns[had_first]) / NS_PER_S
        ),
        "decode_wait_s": _mean(
            (records.decode_join_ns[had_first] - records.transfer_end_ns[had_first]) / NS_PER_S
        ),
        "first_step_s": _mean(
            (records.first_token_ns[had_first] - records.decode_join_ns[had_first]) / NS_PER_S
        ),
        "tpot_s": _summary(tpot),
        "throughput_rps": int(finished_in_window.sum()) * per_s,
        "goodput_rps": meets_slo(world, records, scenario.slo, c.mask) * per_s,
        "hit_share": _ratio(
            int((world.requests.input_tokens - records.incremental_tokens)[c.mask].sum()),
            int(world.requests.input_tokens[c.mask].sum()),
        ),
        "offload_share": _mean((records.route[c.mask] == Route.REMOTE).astype(np.float64)),
        "egress": {
            "bits": bits,
            "mean_bps": bits * per_s,
            "peak_bps": max(end.egress_peak_bps, default=0.0),
        },
        "conversions": end.conversions - start.conversions,
        "invalid_moves": end.invalid_moves - start.invalid_moves,
        "rejected_by_reason": dict(zip(REJECT_REASONS, end.reject_reasons, strict=True)),
        "utilisation": utilisation,
        **({"prefix_pool": prefix_figures(start, end)} if scenario.prefix_pool is not None else {}),
        "warnings": warnings,
        "notes": notes,
    }


def prefix_figures(start: Totals, end: Totals) -> dict[str, Any]:
    """Figures of the prefix pools between two totals: the counters, and `hit_share` of the input tokens.

    Requests count at their arrival, with the tokens of the caches that their prefill really used.
    """
    counts = {
        name: after - before
        for name, before, after in zip(PREFIX_COUNTERS, start.prefix, end.prefix, strict=True)
    }
    return {"hit_share": _ratio(counts["hit_tokens"], counts["input_tokens"]), **counts}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _differ(a: dict[str, float | None], b: dict[str, float | None]) -> bool:
    for name, _ in QUANTILES:
        x, y = a[name], b[name]
        if x is None and y is None:
            continue
        if x is None or y is None or abs(x - y) > SATURATION_SHARE * max(abs(x), 1e-12):
            return True
    return False
