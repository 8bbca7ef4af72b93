"""Predicted first-token time of a path: one function of (PathState, length, profile).

The same functions are read by the simulator at the instant of an arrival and by the router from its own
counters. Plain arithmetic over numbers; nothing here knows the future or an output length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathState:
    """What prediction reads at the instant of an arrival.

    The prefill fields describe the cluster that would prefill; the link fields are neutral (0 backlog,
    infinite capacity) for a local path.
    """

    queued_work_s: float
    idle_instances: int
    active_instances: int
    residual_s: float
    """Time until the first busy instance is free (0 when one is idle)."""
    backlog_bits: float = 0.0
    """Bits not yet sent of all requests routed over the link, queued and running ones included."""
    observed_bps: float = math.inf


def prefill_wait_s(
    queued_work_s: float, idle_instances: int, active_instances: int, residual_s: float
) -> float:
    """Predicted wait for a prefill instance: 0 when one is idle and nothing queues, else the first residual
    plus the queued work spread over the instances; infinite without instances."""
    if active_instances <= 0:
        return math.inf
    if idle_instances > 0 and queued_work_s <= 0.0:
        return 0.0
    return residual_s + queued_work_s / active_instances


def transfer_end_s(
    prefill_end_s: float,
    bits: float,
    backlog_bits: float,
    observed_bps: float,
    latency_s: float,
    pipeline_layers: int,
) -> float:
    """Predicted arrival of the whole KV cache, in seconds from now.

    The link must first deliver its backlog, so this request's last bit cannot leave before
    (backlog + bits) / capacity; nor before its prefill ends plus the part that cannot overlap with it (one
    layer of n with layer-wise pipelining, everything without: `pipeline_layers` = 1).
    """
    if observed_bps <= 0.0:
        return math.inf
    tail_s = bits / pipeline_layers / observed_bps
    return max(prefill_end_s + tail_s, (backlog_bits + bits) / observed_bps) + latency_s


def path_first_token_s(
    queued_work_s: float,
    idle_instances: int,
    active_instances: int,
    residual_s: float,
    backlog_bits: float,
    observed_bps: float,
    prefill_s: float,
    bits: float,
    latency_s: float,
    pipeline_layers: int,
    first_step_s: float,
) -> float:
    """`first_token_s` with the path state spread out, for engines that compile it."""
    prefill_end_s = prefill_wait_s(queued_work_s, idle_instances, active_instances, residual_s) + prefill_s
    if observed_bps == math.inf:
        return prefill_end_s + latency_s + first_step_s
    return (
        transfer_end_s(prefill_end_s, bits, backlog_bits, observed_bps, latency_s, pipeline_layers)
        + first_step_s
    )


def first_token_s(
    state: PathState,
    prefill_s: float,
    bits: float,
    latency_s: float,
    pipeline_layers: int,
    first_step_s: float,
) -> float:
    """Predicted time from arrival to first token over a path, the decode queue left out (both paths share it).

    Args:
        state: the path now.
        prefill_s: prefill time of this request on the path's hardware.
        bits: KV bits to hand over.
        latency_s: one-way latency of the hand-over.
        pipeline_layers: parts of layer-wise sending; 1 = the transfer starts when the prefill ends.
        first_step_s: decode step time.
    """
    return path_first_token_s(
        state.queued_work_s,
        state.idle_instances,
        state.active_instances,
        state.residual_s,
        state.backlog_bits,
        state.observed_bps,
        prefill_s,
        bits,
        latency_s,
        pipeline_layers,
        first_step_s,
    )
