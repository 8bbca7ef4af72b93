"""The order of events within one instant, the same in every engine."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    """Event kinds in the order in which one instant handles them.

    Within a kind events go by cluster, instance, request, attempt. New events of the same instant join the
    same order. SETTLE comes when nothing else is left: link rates, then prefill dispatch, then decode dispatch.
    """

    DECISION = 0
    CAPACITY = 1
    PREFILL_END = 2
    FLOW_OPEN = 3
    FLOW_END = 4
    HANDOVER_END = 5
    DECODE = 6
    """First token or finish of a sequence."""
    CONVERSION = 7
    ARRIVAL = 8
    SETTLE = 9


_CLUSTER_BITS, _INSTANCE_BITS, _REQUEST_BITS, _ATTEMPT_BITS = 12, 20, 40, 16


def event_key(kind: int, cluster: int = 0, instance: int = 0, request: int = 0, attempt: int = 0) -> int:
    """One integer that sorts like (kind, cluster, instance, request, attempt); at least 2."""
    return (
        ((((kind + 1) << _CLUSTER_BITS | cluster) << _INSTANCE_BITS | instance) << _REQUEST_BITS | request)
        << _ATTEMPT_BITS
    ) | attempt
