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
    FAULT = 2
    """An instance goes down, comes back or changes speed."""
    PREFILL_END = 3
    FLOW_OPEN = 4
    FLOW_END = 5
    HANDOVER_END = 6
    DECODE = 7
    """First token or finish of a sequence."""
    CONVERSION = 8
    GIVE_UP = 9
    """A client cancels."""
    DEADLINE = 10
    ARRIVAL = 11
    SETTLE = 12


#: Bits of each part of a key: 4 + 8 + 14 + 27 + 9 = 62, so that a key fits a signed 64-bit number.
CLUSTER_BITS, INSTANCE_BITS, REQUEST_BITS, ATTEMPT_BITS = 8, 14, 27, 9


def event_key(kind: int, cluster: int = 0, instance: int = 0, request: int = 0, attempt: int = 0) -> int:
    """One integer that sorts like (kind, cluster, instance, request, attempt); at least 2.

    Two attempts of one request never have an event at the same instant, so their number may wrap.
    """
    key = (kind + 1) << CLUSTER_BITS | cluster
    key = key << INSTANCE_BITS | instance
    key = key << REQUEST_BITS | request
    return key << ATTEMPT_BITS | (attempt & ((1 << ATTEMPT_BITS) - 1))
