"""Where everything lies in the arrays of the compiled engine.

One env is three arrays: whole numbers `Z` (int64, 1-D), reals `F` (float64, 1-D), requests `P` (int64, one row
per request). `Z` starts with scalars, among them the offset of each block; a block is an array of structs, so
field f of instance i is `Z[Z[O_INST] + i * W_INST + f]`. Copying the three arrays copies the whole state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_env.profiles.latency import DecodeProfile
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.faults import deadline_ns
from prfaas_env.simulator.formulas import (
    LONG_AGO_NS,
    NEVER_NS,
    FloatArray,
    IntArray,
    decode_step_s,
    ns_from_s,
    virtual_ratio,
)
from prfaas_env.simulator.world import links_of
from prfaas_env.telemetry import (
    N_BUCKETS,
    N_DOOR_COLUMNS,
    N_LINK_COLUMNS,
    N_LINK_STATE,
    RECENT_LENGTHS,
    WINDOWS_S,
)

# ------------------------------------------------------------------ scalars of Z
(
    NOW,
    N_REQUESTS,
    NEXT_ARRIVAL,
    UNRESOLVED,
    HEAP_N,
    HEAP_CAP,
    HEAP_ROOM,
    NEXT_GIVE_UP,
    NEXT_DEADLINE,
    NEXT_ABORT_NS,
    DEADLINE_NS,
    HAS_JITTER,
    N_FAULTS,
    FAULT_AT,
    N_INST,
    N_POOL,
    N_PD,
    N_PRFAAS,
    N_LINK,
    FLOW_CAP,
    MILE_CAP,
    CAP_CAP,
    LAYERS,
    CONVERSION_NS,
    MAX_INPUT,
    MAX_QUEUE,
    KV_FIXED,
    KV_PER_TOKEN,
    N_WINDOWS,
    SWITCH_NS,
    DRAIN_NS,
    WARMUP_NS,
    HAS_TTFT,
    HAS_TPOT,
    ARRIVED,
    FINISHED,
    ABORTED,
    REMOTE,
    CONVERSIONS,
    INVALID_MOVES,
    FIRST_TOKENS,
    GOOD,
    REJECT_OVER_LIMIT,
    REJECT_KV,
    REJECT_QUEUE,
    WAITING,  # count, total, since
    _WAITING_TOTAL,
    _WAITING_SINCE,
    N_DIRTY,
    O_INST,
    O_POOL,
    O_PD,
    O_LINK,
    O_FLOW,
    O_HEAP,
    O_MILE,
    O_DIRTY,
    O_WINDOWS,
    O_CAPACITY,
    O_DOOR,
    O_RECENT,
    O_WIRE,
    O_LINKS_OF_PD,
    O_FAULT,
    OF_INST,
    OF_PD,
    OF_LINK,
    OF_FLOW,
    OF_CAPACITY,
    OF_DOOR,
    OF_WIRE,
    OF_SUMS,
    OF_FAULT,
    N_SCALARS,
) = range(74)

# ------------------------------------------------------------------ scalars of F
TTFT_SLO_S, TPOT_SLO_S, WARMUP_SPEED, PEAK_FROM_S, N_REALS = range(5)

# ------------------------------------------------------------------ blocks of Z
(
    I_ROLE,
    I_PHASE,
    I_RUNNING,
    I_END_NS,
    I_SEQUENCES,
    I_KV,
    I_CONTEXT,
    I_SUM_U,
    I_ANCHOR_NS,
    I_ANCHOR_U,
    I_DIRTY,
    I_MILE_N,
    I_NEXT_NS,
    I_SCHED_NS,
    I_SCHED_AFTER_NS,
    I_POOL,
    I_CONVERT_TO,
    I_LIMIT_NS,
    I_SWITCH_END_NS,
    I_WARM_UNTIL_NS,
    I_UP,
    W_INST,
) = range(22)
IF_SPEED, IF_RATIO, IF_HEALTH, WF_INST = range(4)

(
    Q_FIRST,
    Q_N,
    Q_HEAD,
    Q_TAIL,
    Q_LEN,
    Q_WORK_NS,
    Q_TOKENS,
    Q_ACTIVE,
    Q_IDLE,
    Q_BUSY,
    _Q_BUSY_TOTAL,
    _Q_BUSY_SINCE,
    Q_IN_ROLE,
    _Q_IN_ROLE_TOTAL,
    _Q_IN_ROLE_SINCE,
    Q_IDLE_TREE,
    Q_FREE_TREE,
    Q_LEAVES,
    Q_PROFILE,
    Q_SEGMENTS,
    Q_PD,
    W_POOL,
) = range(22)

(
    D_POOL,
    D_HEAD,
    D_TAIL,
    D_LEN,
    D_TOKENS,
    D_ACTIVE,
    D_SEQ,
    _D_SEQ_TOTAL,
    _D_SEQ_SINCE,
    D_SLOTS,
    _D_SLOTS_TOTAL,
    _D_SLOTS_SINCE,
    D_CONVERTING,
    D_CONVERTED_NS,
    D_PREFILL_FLOOR,
    D_MIN_DECODE,
    D_BY_MARGIN,
    D_ABUNDANT,
    D_SLOTS_EACH,
    D_KV_CAP,
    D_KV_RESERVE,
    D_TOKEN_U,
    D_N_LINKS,
    D_TREE,
    D_RECENT_N,
    D_RECENT_AT,
    D_WINDOW_AT,
    D_FLAT,
    W_PD,
) = range(29)
(
    DF_VALUE,
    DF_A_S,
    DF_B_S,
    DF_C_S,
    DF_RDMA_BPS,
    DF_RDMA_LATENCY_S,
    DF_FIRST_STEP_S,
    DF_FULL_STEP_S,
    WF_PD,
) = range(9)

(
    K_POOL,
    K_PD,
    K_FLOWS,
    K_NEXT_END,
    K_SCHED_NS,
    K_DIRTY,
    K_CONGESTED,
    K_PENDING_BITS,
    K_CAP_AT,
    K_CAP_N,
    K_ACCOUNTED_NS,
    K_INSTANCES,
    K_PAST,
    K_AT_CAPS,
    K_HELD_UNITS,
    K_CHANGED,
    K_EARLY,
    K_CONNECTIONS,
    K_SEGMENT_BYTES,
    K_SETUP_NS,
    K_IDLE_NS,
    K_IDLE_SINCE_NS,
    K_READY_NS,
    K_WAITING,
    W_LINK,
) = range(25)
(
    KF_CAPACITY,
    KF_TOTAL_RATE,
    KF_COMPLETED,
    KF_NOMINAL,
    KF_FLOW_CAP,
    KF_LATENCY_S,
    KF_MOST_CAP,
    KF_ROUND_TRIP_S,
    KF_LOSS,
    KF_JITTER_S,
    KF_STATE,
) = range(11)
WF_LINK = KF_STATE + N_LINK_STATE

# Flows of a link: one array of FLOW_CAP numbers per field, so that a pass over one field reads little memory.
FL_REQUEST, FL_SINCE, FL_UNTIL, FL_END, FL_CHANGED, W_FLOW = range(6)
FLF_BITS, FLF_REMAINING, FLF_RATE, FLF_CAP, FLF_PRODUCE, WF_FLOW = range(6)

M_TARGET, M_WHAT, W_MILE = range(3)

# ------------------------------------------------------------------ a row of P
(
    P_ARRIVAL,
    P_INPUT,
    P_OUTPUT,
    P_PD,
    P_INCREMENTAL,
    P_ROUTE,
    P_PRFAAS,
    P_ATTEMPTS,
    P_STATUS,
    P_SENT_BYTES,
    P_SERVICE,
    P_PREFILL_START,
    P_PREFILL_END,
    P_TRANSFER_END,
    P_JOIN,
    P_FIRST,
    P_FINISH,
    P_ABORT,
    P_NEXT,
    P_WORK_NS,
    P_BYTES,
    P_OPENED,
    P_NEW,
    P_CONTEXT,
    P_REMAINING,
    P_QUEUED,
    P_STARTED,
    P_END,
    P_LINK,
    P_JOINED_U,
    P_GIVE_UP,
    P_GIVE_UP_WHO,
    P_LUCK,
    P_HAD,  # tokens of the prompt that the PD cluster had in its cache: not sent (a declared hit from the start)
    W_P,
) = range(35)

#: A fault: time, cluster, instance; its speed lies in F.
E_TIME, E_CLUSTER, E_INSTANCE, W_FAULT = range(4)

#: The instances always come first, so that their place is a constant.
AT_INST, AT_REAL_INST = N_SCALARS, N_REALS
#: Blocks that lie in F.
REAL_BLOCKS = (OF_INST, OF_PD, OF_LINK, OF_FLOW, OF_CAPACITY, OF_DOOR, OF_WIRE, OF_SUMS, OF_FAULT)
#: Position of the peak inside a link's meter state.
STATE_PEAK = N_LINK_STATE - 1

#: Columns of P that make up `RequestRecords`, by field name.
RECORD_COLUMNS = {
    "prefill_start_ns": P_PREFILL_START,
    "prefill_end_ns": P_PREFILL_END,
    "transfer_end_ns": P_TRANSFER_END,
    "decode_join_ns": P_JOIN,
    "first_token_ns": P_FIRST,
    "finish_ns": P_FINISH,
    "abort_ns": P_ABORT,
    "incremental_tokens": P_INCREMENTAL,
    "service_ns": P_SERVICE,
    "route": P_ROUTE,
    "prfaas": P_PRFAAS,
    "attempts": P_ATTEMPTS,
    "status": P_STATUS,
    "sent_bytes": P_SENT_BYTES,
}

NO_KEY = NEVER_NS


@dataclass(frozen=True)
class Sizes:
    """Capacities that can grow: heap entries, flows per link, capacity changes per link, faults."""

    heap: int
    flows: int
    changes: int
    faults: int = 0


def _leaves(n: int) -> int:
    """Leaves of a tournament tree over n players: the next power of two, at least 1."""
    return 1 << max(n - 1, 0).bit_length() if n > 1 else 1


def initial_sizes(scenario: Scenario, changes: int) -> Sizes:
    """Capacities that suffice for ordinary load; the engine asks for more when it needs them."""
    deployment = scenario.deployment
    instances = sum(c.n_instances for c in deployment.prfaas) + sum(
        c.n_prefill + c.n_decode for c in deployment.pd
    )
    remote = sum(c.n_instances for c in deployment.prfaas)
    return Sizes(heap=16 * instances + 64, flows=4 * remote + 16, changes=changes)


class Layout:
    """Sizes and offsets of one topology, and the start state of its arrays."""

    def __init__(self, scenario: Scenario, sizes: Sizes) -> None:
        self.scenario = scenario
        self.sizes = sizes
        deployment = scenario.deployment
        self.n_prfaas, self.n_pd, self.n_link = (
            len(deployment.prfaas),
            len(deployment.pd),
            len(deployment.links),
        )
        self.pool_sizes = [c.n_instances for c in deployment.prfaas] + [
            c.n_prefill + c.n_decode for c in deployment.pd
        ]
        self.n_inst = sum(self.pool_sizes)
        decodes = [scenario.hardware_of(c).decode for c in deployment.pd]
        self.decodes = [d for d in decodes if d is not None]
        self.mile_cap = 2 * max(d.slots for d in self.decodes) + 2
        self._place()

    def _place(self) -> None:
        at, real = N_SCALARS, N_REALS
        self.offsets: dict[int, int] = {}
        self.block_sizes: dict[int, int] = {}
        n_pool = self.n_prfaas + self.n_pd

        def ints(name: int, size: int) -> None:
            nonlocal at
            self.offsets[name], self.block_sizes[name] = at, size
            at += size

        def reals(name: int, size: int) -> None:
            nonlocal real
            self.offsets[name], self.block_sizes[name] = real, size
            real += size

        ints(O_INST, self.n_inst * W_INST)
        ints(O_POOL, n_pool * W_POOL)
        ints(O_PD, self.n_pd * W_PD)
        ints(O_LINK, self.n_link * W_LINK)
        ints(O_FLOW, self.n_link * self.sizes.flows * W_FLOW)
        ints(O_HEAP, self.sizes.heap * 2)
        ints(O_MILE, self.n_inst * self.mile_cap * W_MILE)
        ints(O_DIRTY, self.n_inst)
        ints(O_WINDOWS, 2 * len(self.scenario.model.kv.windows))
        ints(O_CAPACITY, self.n_link * self.sizes.changes)
        ints(O_DOOR, self.n_pd * N_BUCKETS)
        ints(O_RECENT, self.n_pd * RECENT_LENGTHS)
        ints(O_WIRE, self.n_link * N_BUCKETS)
        ints(O_LINKS_OF_PD, self.n_pd * max(self.n_link, 1))
        ints(O_FAULT, self.sizes.faults * W_FAULT)
        self.trees: list[tuple[int, int, int]] = []
        for n in self.pool_sizes:
            leaves = _leaves(n)
            self.trees.append((at, at + 2 * leaves, at + 4 * leaves))
            at += 6 * leaves
        reals(OF_INST, self.n_inst * WF_INST)
        reals(OF_PD, self.n_pd * WF_PD)
        reals(OF_LINK, self.n_link * WF_LINK)
        reals(OF_FLOW, self.n_link * self.sizes.flows * WF_FLOW)
        reals(OF_CAPACITY, self.n_link * self.sizes.changes)
        reals(OF_DOOR, self.n_pd * N_BUCKETS * N_DOOR_COLUMNS)
        reals(OF_WIRE, self.n_link * N_BUCKETS * N_LINK_COLUMNS)
        reals(OF_SUMS, self.n_pd * len(WINDOWS_S) * N_DOOR_COLUMNS)
        reals(OF_FAULT, self.sizes.faults)
        deployment = self.scenario.deployment
        clusters: list[Any] = [*deployment.prfaas, *deployment.pd]
        self.profiles = [self.scenario.hardware_of(c).prefill.arrays() for c in clusters]
        self.profile_at = []
        for arrays in self.profiles:
            self.profile_at.append(real)
            real += 4 * len(arrays.start_tokens)
        self.n_int, self.n_real = at, real

    def start(self) -> tuple[IntArray, FloatArray]:
        """Z and F of an empty system at time 0, the capacity trace left out."""
        ints = np.zeros(self.n_int, dtype=np.int64)
        reals = np.zeros(self.n_real)
        for name, offset in self.offsets.items():
            ints[name] = offset
        self._start_scalars(ints, reals)
        self._start_pools(ints, reals)
        self._start_sites(ints, reals)
        self._start_links(ints, reals)
        return ints, reals

    def _start_scalars(self, ints: IntArray, reals: FloatArray) -> None:
        s = self.scenario
        kv = s.model.kv
        limits = [x for x in (s.admission.max_input_tokens, s.model.max_input_tokens) if x is not None]
        ratio = round(s.control.conversion_interval_s / s.control.control_interval_s)
        for name, value in (
            (NEXT_ABORT_NS, NEVER_NS),
            (DEADLINE_NS, deadline_ns(s)),
            (HAS_JITTER, any(link.jitter_s > 0 for link in s.deployment.links)),
            (HEAP_CAP, self.sizes.heap),
            # what one instant may add at most
            (HEAP_ROOM, self.sizes.heap - 4 * self.n_inst - self.n_link * (2 + self.sizes.flows) - 16),
            (N_INST, self.n_inst),
            (N_POOL, self.n_prfaas + self.n_pd),
            (N_PD, self.n_pd),
            (N_PRFAAS, self.n_prfaas),
            (N_LINK, self.n_link),
            (FLOW_CAP, self.sizes.flows),
            (MILE_CAP, self.mile_cap),
            (CAP_CAP, self.sizes.changes),
            (LAYERS, kv.n_layers if s.transport.pipelining and kv.n_layers > 1 else 1),
            (CONVERSION_NS, ratio * ns_from_s(s.control.control_interval_s)),
            (MAX_INPUT, min(limits, default=-1)),
            (MAX_QUEUE, -1 if s.admission.max_queue_requests is None else s.admission.max_queue_requests),
            (KV_FIXED, kv.fixed_bytes),
            (KV_PER_TOKEN, kv.bytes_per_token),
            (N_WINDOWS, len(kv.windows)),
            (SWITCH_NS, ns_from_s(s.conversion.switch_s)),
            (DRAIN_NS, ns_from_s(s.conversion.drain_limit_s)),
            (WARMUP_NS, ns_from_s(s.conversion.warmup_s) if s.conversion.warmup_speed < 1 else 0),
            (HAS_TTFT, s.slo.ttft_s is not None),
            (HAS_TPOT, s.slo.tpot_s is not None),
        ):
            ints[name] = value
        reals[TTFT_SLO_S] = s.slo.ttft_s or 0.0
        reals[TPOT_SLO_S] = s.slo.tpot_s or 0.0
        reals[WARMUP_SPEED] = s.conversion.warmup_speed
        reals[PEAK_FROM_S] = s.measure.warmup_s
        per_token, window = kv.window_arrays()
        at = self.offsets[O_WINDOWS]
        ints[at : at + len(window)] = per_token
        ints[at + len(window) : at + 2 * len(window)] = window

    def _start_pools(self, ints: IntArray, reals: FloatArray) -> None:
        deployment = self.scenario.deployment
        first = 0
        for q, n in enumerate(self.pool_sizes):
            pd = q - self.n_prfaas
            n_prefill = n if pd < 0 else deployment.pd[pd].n_prefill
            idle_tree, free_tree, decode_tree = self.trees[q]
            leaves = _leaves(n)
            arrays = self.profiles[q]
            segments = len(arrays.start_tokens)
            base = self.offsets[O_POOL] + q * W_POOL
            for name, value in (
                (Q_FIRST, first),
                (Q_N, n),
                (Q_HEAD, -1),
                (Q_TAIL, -1),
                (Q_ACTIVE, n_prefill),
                (Q_IDLE, n_prefill),
                (Q_IN_ROLE, n_prefill),
                (Q_IDLE_TREE, idle_tree),
                (Q_FREE_TREE, free_tree),
                (Q_LEAVES, leaves),
                (Q_PROFILE, self.profile_at[q]),
                (Q_SEGMENTS, segments),
                (Q_PD, pd),
            ):
                ints[base + name] = value
            at = self.profile_at[q]
            for k, column in enumerate((arrays.start_tokens, arrays.c0_s, arrays.c1_s, arrays.c2_s)):
                reals[at + k * segments : at + (k + 1) * segments] = column
            for i in range(n):
                inst = self.offsets[O_INST] + (first + i) * W_INST
                ints[inst + I_ROLE] = 0 if i < n_prefill else 1
                ints[inst + I_RUNNING] = -1
                ints[inst + I_POOL] = q
                ints[inst + I_CONVERT_TO] = -1
                for name in (I_LIMIT_NS, I_SWITCH_END_NS, I_WARM_UNTIL_NS):
                    ints[inst + name] = -1
                for name in (I_NEXT_NS, I_SCHED_NS, I_SCHED_AFTER_NS):
                    ints[inst + name] = NEVER_NS
                real = self.offsets[OF_INST] + (first + i) * WF_INST
                ints[inst + I_UP] = 1
                reals[real + IF_SPEED] = reals[real + IF_RATIO] = reals[real + IF_HEALTH] = 1.0
            idle = np.where(np.arange(leaves) < n_prefill, np.arange(leaves), NO_KEY)
            decode = np.where(
                (np.arange(leaves) >= n_prefill) & (np.arange(leaves) < n), np.arange(leaves), NO_KEY
            )
            _fill_tree(ints, idle_tree, leaves, idle)
            _fill_tree(ints, free_tree, leaves, np.full(leaves, NO_KEY))
            _fill_tree(ints, decode_tree, leaves, decode if pd >= 0 else np.full(leaves, NO_KEY))
            first += n

    def _start_sites(self, ints: IntArray, reals: FloatArray) -> None:
        deployment = self.scenario.deployment
        for i, (spec, d) in enumerate(zip(deployment.pd, self.decodes, strict=True)):
            links = links_of(deployment, spec.name)
            base = self.offsets[O_PD] + i * W_PD
            for name, value in (
                (D_POOL, self.n_prfaas + i),
                (D_HEAD, -1),
                (D_TAIL, -1),
                (D_ACTIVE, spec.n_decode),
                (D_SLOTS, spec.n_decode * d.slots),
                (D_CONVERTED_NS, -1),
                (D_PREFILL_FLOOR, spec.prefill_floor),
                (D_MIN_DECODE, spec.min_decode),
                (D_SLOTS_EACH, d.slots),
                (D_KV_CAP, -1 if d.kv_capacity_tokens is None else d.kv_capacity_tokens),
                (D_KV_RESERVE, d.kv_reserve_tokens),
                (D_TOKEN_U, ns_from_s(d.a_s)),
                (D_N_LINKS, len(links)),
                (D_TREE, self.trees[self.n_prfaas + i][2]),
                (D_FLAT, _always_nominal(d)),
            ):
                ints[base + name] = value
            at = self.offsets[O_LINKS_OF_PD] + i * max(self.n_link, 1)
            ints[at : at + len(links)] = links
            real = self.offsets[OF_PD] + i * WF_PD
            a, b, c = d.a_s, d.b_s_per_sequence, d.c_s_per_token
            for name, number in (
                (DF_VALUE, np.inf),
                (DF_A_S, a),
                (DF_B_S, b),
                (DF_C_S, c),
                (DF_RDMA_BPS, spec.rdma_bps),
                (DF_RDMA_LATENCY_S, spec.rdma_latency_s),
                (DF_FIRST_STEP_S, decode_step_s(a, b, c, 1, 0)),
                (DF_FULL_STEP_S, decode_step_s(a, b, c, d.slots, 0)),
            ):
                reals[real + name] = number
            stamps = self.offsets[O_DOOR] + i * N_BUCKETS
            ints[stamps : stamps + N_BUCKETS] = -1

    def _start_links(self, ints: IntArray, reals: FloatArray) -> None:
        deployment = self.scenario.deployment
        prfaas = {c.name: j for j, c in enumerate(deployment.prfaas)}
        pd = {c.name: i for i, c in enumerate(deployment.pd)}
        for k, link in enumerate(deployment.links):
            base = self.offsets[O_LINK] + k * W_LINK
            ints[base + K_POOL] = prfaas[link.prfaas]
            ints[base + K_PD] = pd[link.pd]
            ints[base + K_INSTANCES] = self.pool_sizes[prfaas[link.prfaas]]
            ints[base + K_NEXT_END] = ints[base + K_SCHED_NS] = NEVER_NS
            real = self.offsets[OF_LINK] + k * WF_LINK
            reals[real + KF_NOMINAL] = link.capacity_bps
            for name, value in (
                (K_CONNECTIONS, link.connections),
                (K_SEGMENT_BYTES, link.segment_bytes),
                (K_SETUP_NS, ns_from_s(link.setup_s)),
                (K_IDLE_NS, ns_from_s(link.idle_s)),
                (K_IDLE_SINCE_NS, LONG_AGO_NS),
            ):
                ints[base + name] = value
            reals[real + KF_FLOW_CAP] = link.flow_limit_bps
            reals[real + KF_ROUND_TRIP_S] = link.round_trip_s
            reals[real + KF_LOSS] = link.loss
            reals[real + KF_JITTER_S] = link.jitter_s
            reals[real + KF_LATENCY_S] = link.latency_s
            reals[real + KF_STATE : real + KF_STATE + N_LINK_STATE] = (link.capacity_bps, -1.0, 1.0, 0.0)
            stamps = self.offsets[O_WIRE] + k * N_BUCKETS
            ints[stamps : stamps + N_BUCKETS] = -1


def _always_nominal(d: DecodeProfile) -> bool:
    """Whether a step at full speed is the nominal one whatever the batch."""
    nominal_ns = ns_from_s(d.a_s)
    flat = d.b_s_per_sequence == 0.0 and d.c_s_per_token == 0.0
    return flat and virtual_ratio(nominal_ns, d.a_s, 0.0, 0.0, 1, 1, 1.0) == 1.0


def _fill_tree(ints: IntArray, at: int, leaves: int, keys: NDArray[Any]) -> None:
    """A whole tournament tree: leaves at `at + leaves`, the smallest of two children at each node above."""
    ints[at + leaves : at + 2 * leaves] = keys
    for node in range(leaves - 1, 0, -1):
        ints[at + node] = min(ints[at + 2 * node], ints[at + 2 * node + 1])
