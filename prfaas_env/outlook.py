"""What a branch is to expect instead of what its world holds: for planners that must not know the future.

`open_requests` and `arrived_requests` read from a state what a router could have recorded itself. `rewrite` puts a
guess of everything else in the place of the truth: how many tokens the open requests will still give, who arrives, and
what the links can carry. What happened so far stays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prfaas_env.simulator import kernel
from prfaas_env.simulator import layout as L
from prfaas_env.simulator.compiled_engine import StateView, blank_rows
from prfaas_env.simulator.events import (
    ATTEMPT_BITS,
    CLUSTER_BITS,
    INSTANCE_BITS,
    REQUEST_BITS,
    Kind,
    event_key,
)
from prfaas_env.simulator.formulas import NEVER_NS, FloatArray, IntArray, ns_from_s, virtual_now

_KIND_SHIFT = CLUSTER_BITS + INSTANCE_BITS + REQUEST_BITS + ATTEMPT_BITS
_REQUEST_MASK = (1 << REQUEST_BITS) - 1
#: Events whose time tells what is to come; those that still hold are found anew.
_TELLING = np.isin(np.arange(len(Kind)), [Kind.CAPACITY, Kind.FAULT, Kind.FLOW_END, Kind.DECODE])


class OpenRequests(NamedTuple):
    """The requests under way: their numbers and the output tokens that each has given so far, both of shape (n,)."""

    number: IntArray
    generated_tokens: IntArray


class Arrivals(NamedTuple):
    """Requests at the doors in order of time; arrays of shape (n,)."""

    arrival_ns: IntArray
    pd: IntArray
    input_tokens: IntArray
    cached_tokens: IntArray
    """Tokens of the prompt that a hit rate declares as cached."""


class Outlook(NamedTuple):
    """A guess of what is to come.

    `open_output_tokens` has the order of `open_requests`: all output tokens of each, more than it has given so far.
    `output_tokens` are those of `arrivals`. `capacity_bps` holds for each link from now on.
    """

    open_output_tokens: IntArray
    arrivals: Arrivals
    output_tokens: IntArray
    capacity_bps: FloatArray


# ------------------------------------------------------------------ what a router knows


def open_requests(state: StateView) -> OpenRequests:
    """The requests under way."""
    Z, F, P = state.ints, state.reals, state.requests
    first, arrived = state.first_open, int(Z[L.NEXT_ARRIVAL])
    number = first + np.flatnonzero(P[first:arrived, L.P_STATUS] == kernel.OPEN)
    # a request that is prefilled again carries what it gave before as context
    generated = P[number, L.P_CONTEXT] - P[number, L.P_INPUT]
    for inst, token_u in _decoding(state):
        i = L.AT_INST + inst * L.W_INST
        ratio = F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_RATIO]
        u = virtual_now(Z[i + L.I_ANCHOR_U], Z[i + L.I_ANCHOR_NS], ratio, Z[L.NOW])
        what = _milestones(state, inst)[:, L.M_WHAT]
        running = what[what & 1 == kernel.FINISH] >> 1
        generated[np.searchsorted(number, running)] += (u - P[running, L.P_JOINED_U]) // token_u
    return OpenRequests(number, generated)


def arrived_requests(state: StateView, first: int) -> Arrivals:
    """The requests from number `first` on that have arrived, rejected ones included."""
    rows = state.requests[first : int(state.ints[L.NEXT_ARRIVAL])]
    return Arrivals(*(rows[:, c].copy() for c in (L.P_ARRIVAL, L.P_PD, L.P_INPUT, L.P_HAD)))


def finished_outputs(state: StateView, first: int, since_ns: int) -> tuple[IntArray, IntArray]:
    """(finish times, output tokens) of the requests from number `first` on that finished at `since_ns` or later."""
    rows = state.requests[first : int(state.ints[L.NEXT_ARRIVAL])]
    rows = rows[(rows[:, L.P_FINISH] >= since_ns) & (rows[:, L.P_FINISH] < NEVER_NS)]
    return rows[:, L.P_FINISH].copy(), rows[:, L.P_OUTPUT].copy()


def _decoding(state: StateView) -> list[tuple[int, int]]:
    """(instance, virtual time of a token) of the instances with sequences."""
    Z = state.ints
    count = Z[L.AT_INST + L.I_MILE_N : L.AT_INST + int(Z[L.N_INST]) * L.W_INST : L.W_INST]
    out = []
    for inst in np.flatnonzero(count).tolist():
        pool = Z[L.O_POOL] + Z[L.AT_INST + inst * L.W_INST + L.I_POOL] * L.W_POOL
        out.append((inst, int(Z[Z[L.O_PD] + Z[pool + L.Q_PD] * L.W_PD + L.D_TOKEN_U])))
    return out


def _milestones(state: StateView, inst: int) -> IntArray:
    """The milestones of an instance, shape (n, W_MILE), a view."""
    Z = state.ints
    base = kernel.mile_base(Z, inst)
    n = int(Z[L.AT_INST + inst * L.W_INST + L.I_MILE_N])
    return Z[base : base + n * L.W_MILE].reshape(n, L.W_MILE)


# ------------------------------------------------------------------ what it expects


def rewrite(state: StateView, outlook: Outlook) -> None:
    """Put an outlook in the place of what is to come.

    From here on the state holds: outputs and arrivals of the outlook, link capacities of the outlook from now on, no
    fault, nobody who gives up before a deadline of the scenario, no jitter. What is on its way with a jitter that
    nobody knows arrives after the latency of the link. Instances stay as they are, those that are down too.

    Args:
        state: a state that may be written to, with room for the arrivals and for an event more per instance and link.
        outlook: what to expect; arrivals at the present instant or later.
    """
    requests = open_requests(state)
    _expect_outputs(state, requests, outlook.open_output_tokens)
    _forget_events(state)
    for k, capacity_bps in enumerate(outlook.capacity_bps.tolist()):
        _expect_capacity(state, k, capacity_bps)
    for inst, _ in _decoding(state):
        kernel.wake_decode(state.ints, state.reals, inst)
    _expect_arrivals(state, outlook, len(requests.number))


def _expect_outputs(state: StateView, requests: OpenRequests, output_tokens: IntArray) -> None:
    P, number = state.requests, requests.number
    P[number, L.P_OUTPUT] = output_tokens
    P[number, L.P_REMAINING] = output_tokens - (P[number, L.P_CONTEXT] - P[number, L.P_INPUT])
    P[number, L.P_LUCK] = 0
    for inst, token_u in _decoding(state):
        miles = _milestones(state, inst)
        what = miles[:, L.M_WHAT].copy()
        r = what >> 1
        target = np.where(
            what & 1 == kernel.FINISH,
            P[r, L.P_JOINED_U] + P[r, L.P_REMAINING] * token_u,
            miles[:, L.M_TARGET],
        )
        order = np.lexsort((what, target))  # what is sorted is a heap
        miles[:, L.M_TARGET], miles[:, L.M_WHAT] = target[order], what[order]


def _forget_events(state: StateView) -> None:
    """Take the events out whose times tell what is to come."""
    Z, P = state.ints, state.requests
    base, n, now = int(Z[L.O_HEAP]), int(Z[L.HEAP_N]), int(Z[L.NOW])
    events = Z[base : base + 2 * n].reshape(n, 2)
    kind = (events[:, 1] >> _KIND_SHIFT) - 1
    kept = events[~_TELLING[kind]]
    if Z[L.HAS_JITTER]:
        kind = (kept[:, 1] >> _KIND_SHIFT) - 1
        number = (kept[:, 1] >> ATTEMPT_BITS) & _REQUEST_MASK
        for row in np.flatnonzero(kind == kernel.HANDOVER_END).tolist():
            k = int(P[number[row], L.P_LINK])
            if k >= 0:
                latency_s = state.reals[Z[L.OF_LINK] + k * L.WF_LINK + L.KF_LATENCY_S]
                kept[row, 0] = now + ns_from_s(float(latency_s))
    order = np.lexsort((kept[:, 1], kept[:, 0]))
    Z[base : base + 2 * len(kept)] = kept[order].ravel()
    Z[L.HEAP_N] = len(kept)
    Z[L.N_FAULTS] = Z[L.FAULT_AT]
    instances = Z[L.AT_INST : L.AT_INST + int(Z[L.N_INST]) * L.W_INST].reshape(-1, L.W_INST)
    instances[:, [L.I_NEXT_NS, L.I_SCHED_NS, L.I_SCHED_AFTER_NS]] = NEVER_NS


def _expect_capacity(state: StateView, k: int, capacity_bps: float) -> None:
    """One change of link k, now; the next instant that is handled shares the link anew."""
    Z = state.ints
    link = Z[L.O_LINK] + k * L.W_LINK
    at = k * Z[L.CAP_CAP]
    Z[Z[L.O_CAPACITY] + at] = Z[L.NOW]
    state.reals[Z[L.OF_CAPACITY] + at] = capacity_bps
    Z[link + L.K_CAP_AT], Z[link + L.K_CAP_N] = 0, 1
    # the end of a flow, and whether all had what they could take, depend on the true capacity
    Z[link + L.K_SCHED_NS] = Z[link + L.K_NEXT_END] = NEVER_NS
    Z[link + L.K_AT_CAPS] = 0
    kernel.heap_push(Z, Z[L.NOW], event_key(kernel.CAPACITY, k))


def _expect_arrivals(state: StateView, outlook: Outlook, n_open: int) -> None:
    Z, P = state.ints, state.requests
    arrivals, first = outlook.arrivals, int(Z[L.NEXT_ARRIVAL])
    n = first + len(arrivals.arrival_ns)
    rows = P[first:n]
    rows[:] = blank_rows(len(rows))
    for column, values in zip((L.P_ARRIVAL, L.P_PD, L.P_INPUT, L.P_HAD), arrivals, strict=True):
        rows[:, column] = values
    rows[:, L.P_OUTPUT] = outlook.output_tokens
    Z[L.N_REQUESTS] = Z[L.NEXT_GIVE_UP] = n
    Z[L.UNRESOLVED] = n_open + len(rows)
    if Z[L.DEADLINE_NS] == NEVER_NS:
        Z[L.NEXT_DEADLINE] = n
    kernel.find_abort(Z, P)
