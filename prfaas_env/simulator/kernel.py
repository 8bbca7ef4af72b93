"""The compiled engine's event loop: plain functions over the arrays of `layout`, compiled by `jit`.

It does what `simpy_engine` does, in the same order and with the same formulas; read that one first. Interpreted,
these functions give the same results, only slowly.

Arguments everywhere: `Z` whole numbers, `F` reals, `P` requests (see `layout`), `C` caches (see `prefix_pool`).
"""

from __future__ import annotations

import math

from prfaas_env.decision import legal_moves, offload_by_margin, offload_by_threshold
from prfaas_env.prediction import path_first_token_s
from prfaas_env.simulator import layout as L
from prfaas_env.simulator import prefix_pool as X
from prfaas_env.simulator.events import (
    ATTEMPT_BITS,
    CLUSTER_BITS,
    INSTANCE_BITS,
    REQUEST_BITS,
    Kind,
    event_key,
)
from prfaas_env.simulator.formulas import (
    BIT_UNIT,
    BITS_PER_BYTE,
    NEVER_NS,
    NO_RATE_BPS,
    NS_PER_S,
    RATE_UNIT_BPS,
    FloatArray,
    IntArray,
    bit_units,
    fair_share_bps,
    flow_end_ns,
    jitter_ns,
    kv_transfer_bytes,
    left_bits,
    ns_from_s,
    pipelined_cap_bps,
    pipelined_open_ns,
    prefill_s,
    rate_units,
    rdma_s,
    retransmitted_share,
    sent_bits,
    slowness,
    virtual_now,
    virtual_ratio,
    virtual_when,
    water_level_bps,
)
from prfaas_env.simulator.kernel_prefix import claim_prefix, seen_prefix, seen_tokens
from prfaas_env.simulator.prefix_pool import (
    copy_ended,
    copying,
    forget,
    handed_over,
    hold,
    prefill_ended,
    release,
)
from prfaas_env.simulator.records import PREFIX_COUNTERS, REJECT_REASONS
from prfaas_env.telemetry import (
    LINK_FIELDS,
    LINK_INDEX,
    N_BUCKETS,
    N_DOOR_COLUMNS,
    N_LINK_COLUMNS,
    N_RATE_COLUMNS,
    PD_FIELDS,
    PD_INDEX,
    PRFAAS_FIELDS,
    RECENT_LENGTHS,
    WINDOWS_S,
    count_arrival,
    count_finish,
    count_first_token,
    count_rejection,
    decode_work_s,
    door_fields,
    encode_values,
    link_advance,
    link_fields,
    margin_field,
    ring_row,
    roll_windows,
    threshold_field,
    within,
)

#: Positions inside the telemetry groups (each block of fields is declared in the order it is written here).
PD_POOL_AT = PD_INDEX["prefill_queue_requests"]
DECODE_QUEUE_AT = PD_INDEX["decode_queue_requests"]
OUTPUT_MEAN_AT = PD_INDEX["output_tokens_mean"]
DECODE_AT = PD_INDEX["decode_sequences"]
CONVERTING_AT = PD_INDEX["converting_instances"]
DECISION_AT = PD_INDEX["threshold_valid"]
RETRANSMISSION_AT = LINK_INDEX["retransmission_share"]
N_PD_FIELDS, N_PRFAAS_FIELDS, N_LINK_FIELDS = len(PD_FIELDS), len(PRFAAS_FIELDS), len(LINK_FIELDS)

CAPACITY, FAULT, PREFILL_END, FLOW_OPEN, FLOW_END, HANDOVER_END, DECODE, CONVERSION = (
    int(Kind.CAPACITY),
    int(Kind.FAULT),
    int(Kind.PREFILL_END),
    int(Kind.FLOW_OPEN),
    int(Kind.FLOW_END),
    int(Kind.HANDOVER_END),
    int(Kind.DECODE),
    int(Kind.CONVERSION),
)
PREFILL_ROLE, DECODE_ROLE = 0, 1
ACTIVE, DRAINING, SWITCHING = 0, 1, 2
OPEN, FINISHED, REJECTED, ABORTED = 1, 2, 3, 4
ATTEMPT_MASK = (1 << ATTEMPT_BITS) - 1
LOCAL_ROUTE, REMOTE_ROUTE = 1, 2
MOVE_TO_DECODE, MOVE_NONE, MOVE_TO_PREFILL = 0, 1, 2
#: Key of a tournament tree: sequences or slowness above, instance number below.
TREE_SHIFT = 20
FIRST, FINISH = 0, 1
#: Share of a link's capacity that must stay free for its caps to be taken as fitting without comparing each.
ROOM_SHARE = 1e-9

#: Why `run` came back: done, or an array is too small.
RAN, GROW_HEAP, GROW_FLOWS = 0, 1, 2


# ------------------------------------------------------------------ small structures


def pair_push(Z: IntArray, base: int, n: int, first: int, second: int) -> None:
    """Add a pair to a binary heap of `n` pairs from `base` on, the least (first, second) at the top."""
    hole = n
    while hole > 0:
        parent = (hole - 1) >> 1
        at = base + 2 * parent
        above = Z[at]
        if above < first or (above == first and Z[at + 1] <= second):
            break
        Z[base + 2 * hole] = above
        Z[base + 2 * hole + 1] = Z[at + 1]
        hole = parent
    Z[base + 2 * hole] = first
    Z[base + 2 * hole + 1] = second


def pair_pop(Z: IntArray, base: int, n: int) -> int:
    """Take the least pair out of a binary heap; `n` pairs are left. Gives the second number of the pair.

    The hole goes down to a leaf and the last pair up from there: it mostly belongs near the bottom, and which child
    is less is computed, not branched on.
    """
    top = Z[base + 1]
    hole = 0
    child = 1
    while child < n:
        at = base + 2 * child
        # the pair behind the last one, if it comes to that, is the last one itself
        right = (Z[at + 2] < Z[at]) | ((Z[at + 2] == Z[at]) & (Z[at + 3] < Z[at + 1]))
        step = int(right)
        at += 2 * step
        Z[base + 2 * hole] = Z[at]
        Z[base + 2 * hole + 1] = Z[at + 1]
        hole = child + step
        child = 2 * hole + 1
    if hole < n:
        pair_push(Z, base, hole, Z[base + 2 * n], Z[base + 2 * n + 1])
    return top


def heap_push(Z: IntArray, time_ns: int, key: int) -> None:
    """Add an event; the heap is ordered by (time, key)."""
    pair_push(Z, Z[L.O_HEAP], Z[L.HEAP_N], time_ns, key)
    Z[L.HEAP_N] += 1


def heap_pop(Z: IntArray) -> int:
    """Take out the first event; gives its key (its time is the present)."""
    Z[L.HEAP_N] -= 1
    return pair_pop(Z, Z[L.O_HEAP], Z[L.HEAP_N])


def tree_set(Z: IntArray, at: int, leaves: int, leaf: int, key: int) -> None:
    """Set a leaf of a tournament tree and the minima above it; the least key is at `at + 1`."""
    node = leaves + leaf
    Z[at + node] = key
    node >>= 1
    while node >= 1:
        left = Z[at + 2 * node]
        right = Z[at + 2 * node + 1]
        least = left if left < right else right
        if Z[at + node] == least:
            break
        Z[at + node] = least
        node >>= 1


def integral_add(Z: IntArray, at: int, now: int, change: int) -> None:
    """Change a count whose integral over time is kept (count, total, since)."""
    Z[at + 1] += Z[at] * (now - Z[at + 2])
    Z[at + 2] = now
    Z[at] += change


def integral_at(Z: IntArray, at: int, now: int) -> int:
    """Integral of such a count up to now."""
    return Z[at + 1] + Z[at] * (now - Z[at + 2])


def mile_base(Z: IntArray, inst: int) -> int:
    """Where the milestones of an instance start: a heap of (virtual time, request * 2 + FIRST or FINISH)."""
    return Z[L.O_MILE] + inst * Z[L.MILE_CAP] * L.W_MILE


def mile_push(Z: IntArray, inst: int, target: int, what: int) -> None:
    """Add a milestone to an instance's heap."""
    i = L.AT_INST + inst * L.W_INST
    pair_push(Z, mile_base(Z, inst), Z[i + L.I_MILE_N], target, what)
    Z[i + L.I_MILE_N] += 1


def mile_pop(Z: IntArray, inst: int) -> int:
    """Take out the first milestone; gives what it is."""
    i = L.AT_INST + inst * L.W_INST
    Z[i + L.I_MILE_N] -= 1
    return pair_pop(Z, mile_base(Z, inst), Z[i + L.I_MILE_N])


# ------------------------------------------------------------------ formulas on the arrays


def transfer_bytes(Z: IntArray, tokens: int) -> int:
    """Bytes of KV cache to send for `tokens` new tokens."""
    n = Z[L.N_WINDOWS]
    at = Z[L.O_WINDOWS]
    return kv_transfer_bytes(Z[L.KV_FIXED], Z[L.KV_PER_TOKEN], Z[at : at + n], Z[at + n : at + 2 * n], tokens)


def pool_prefill_s(Z: IntArray, F: FloatArray, q: int, new_tokens: int, cached_tokens: int) -> float:
    """Prefill time on the hardware of pool q."""
    at = Z[q + L.Q_PROFILE]
    n = Z[q + L.Q_SEGMENTS]
    return prefill_s(
        F[at : at + n],
        F[at + n : at + 2 * n],
        F[at + 2 * n : at + 3 * n],
        F[at + 3 * n : at + 4 * n],
        new_tokens,
        cached_tokens,
    )


def flow_ints(Z: IntArray, k: int, field: int) -> int:
    """Offset in Z of a field of the flows of link k: flow p has `Z[offset + p]`."""
    return Z[L.O_FLOW] + (k * L.W_FLOW + field) * Z[L.FLOW_CAP]


def flow_reals(Z: IntArray, k: int, field: int) -> int:
    """Offset in F of a field of the flows of link k."""
    return Z[L.OF_FLOW] + (k * L.WF_FLOW + field) * Z[L.FLOW_CAP]


def flow_remaining(Z: IntArray, F: FloatArray, k: int, position: int, now: int) -> float:
    """Bits of a flow not yet sent (computed, not stored)."""
    return left_bits(
        F[flow_reals(Z, k, L.FLF_REMAINING) + position],
        F[flow_reals(Z, k, L.FLF_RATE) + position],
        now - Z[flow_ints(Z, k, L.FL_SINCE) + position],
    )


def unsent_bits(Z: IntArray, F: FloatArray, k: int, now: int) -> float:
    """Bits of all open flows of link k not yet sent."""
    units = 0
    for position in range(Z[Z[L.O_LINK] + k * L.W_LINK + L.K_FLOWS]):
        units += bit_units(flow_remaining(Z, F, k, position, now))
    return units * BIT_UNIT


def meter_advance(Z: IntArray, F: FloatArray, k: int, time_ns: int) -> None:
    """Account link k at its settled rate up to `time_ns`."""
    link = Z[L.O_LINK] + k * L.W_LINK
    if time_ns <= Z[link + L.K_ACCOUNTED_NS]:
        return
    real = Z[L.OF_LINK] + k * L.WF_LINK
    link_advance(
        Z,
        Z[L.O_WIRE] + k * N_BUCKETS,
        F,
        Z[L.OF_WIRE] + k * N_BUCKETS * N_LINK_COLUMNS,
        F,
        real + L.KF_STATE,
        Z[link + L.K_ACCOUNTED_NS],
        time_ns,
        F[real + L.KF_TOTAL_RATE],
        Z[link + L.K_CONGESTED] != 0,
        F[real + L.KF_NOMINAL],
        F[L.PEAK_FROM_S],
    )
    Z[link + L.K_ACCOUNTED_NS] = time_ns


def meter_advance_for_reading(Z: IntArray, F: FloatArray, k: int, now: int) -> None:
    """Account up to the last whole second."""
    meter_advance(Z, F, k, now // NS_PER_S * NS_PER_S)


def account_links(Z: IntArray, F: FloatArray) -> None:
    """Account every link up to the last whole second."""
    for k in range(Z[L.N_LINK]):
        meter_advance_for_reading(Z, F, k, Z[L.NOW])


def door_roll(Z: IntArray, F: FloatArray, pd: int, bucket: int) -> None:
    """Bring the windows of a PD cluster's door to second `bucket`."""
    site = Z[L.O_PD] + pd * L.W_PD
    last = Z[site + L.D_WINDOW_AT]
    if last < bucket:
        roll_windows(
            Z,
            Z[L.O_DOOR] + pd * N_BUCKETS,
            F,
            Z[L.OF_DOOR] + pd * N_BUCKETS * N_DOOR_COLUMNS,
            N_DOOR_COLUMNS,
            N_RATE_COLUMNS,
            F,
            Z[L.OF_SUMS] + pd * len(WINDOWS_S) * N_DOOR_COLUMNS,
            last,
            bucket,
        )
        Z[site + L.D_WINDOW_AT] = bucket


def door_row(Z: IntArray, F: FloatArray, pd: int, now: int) -> int:
    """Row of the present second in the door ring of a PD cluster."""
    door_roll(Z, F, pd, now // NS_PER_S)
    return ring_row(
        Z,
        Z[L.O_DOOR] + pd * N_BUCKETS,
        F,
        Z[L.OF_DOOR] + pd * N_BUCKETS * N_DOOR_COLUMNS,
        N_DOOR_COLUMNS,
        now // NS_PER_S,
    )


# ------------------------------------------------------------------ routing


def predict_s(
    Z: IntArray, F: FloatArray, pd: int, k: int, new_tokens: int, cached_tokens: int, had_tokens: int
) -> float:
    """Predicted first-token time over link k, or locally (k < 0), in seconds from now.

    The decode side has `had_tokens` of the context already.
    """
    now = Z[L.NOW]
    site = Z[L.O_PD] + pd * L.W_PD
    real = Z[L.OF_PD] + pd * L.WF_PD
    n_bytes = transfer_bytes(Z, new_tokens + cached_tokens - had_tokens)
    backlog_bits = 0.0
    observed_bps = math.inf
    if k < 0:
        pool = Z[site + L.D_POOL]
        latency_s = rdma_s(n_bytes, F[real + L.DF_RDMA_BPS], F[real + L.DF_RDMA_LATENCY_S])
    else:
        link = Z[L.O_LINK] + k * L.W_LINK
        wire = Z[L.OF_LINK] + k * L.WF_LINK
        pool = Z[link + L.K_POOL]
        latency_s = F[wire + L.KF_LATENCY_S]
        meter_advance_for_reading(Z, F, k, now)
        backlog_bits = Z[link + L.K_PENDING_BITS] + unsent_bits(Z, F, k, now)
        observed_bps = F[wire + L.KF_STATE]
    q = Z[L.O_POOL] + pool * L.W_POOL
    first_free_ns = 0
    if Z[q + L.Q_IDLE] == 0 and Z[q + L.Q_ACTIVE] > 0:
        first_free_ns = max(Z[Z[q + L.Q_FREE_TREE] + 1] - now, 0)
    return path_first_token_s(
        Z[q + L.Q_WORK_NS] / 1e9,
        Z[q + L.Q_IDLE],
        Z[q + L.Q_ACTIVE],
        first_free_ns / 1e9,
        backlog_bits,
        observed_bps,
        pool_prefill_s(Z, F, q, new_tokens, cached_tokens),
        float(n_bytes * BITS_PER_BYTE),
        latency_s,
        Z[L.LAYERS],
        F[real + L.DF_FIRST_STEP_S],
    )


def best_link(
    Z: IntArray,
    F: FloatArray,
    C: IntArray,
    P: IntArray,
    pd: int,
    r: int,
    context_tokens: int,
    cached_tokens: int,
    had_tokens: int,
) -> tuple[int, float]:
    """(link with the earliest predicted finish, that prediction); the lowest on a tie.

    Each cluster counts `cached_tokens`, or with -1 what it is seen to have cached of request r.
    """
    at = Z[L.O_LINKS_OF_PD] + pd * max(Z[L.N_LINK], 1)
    best = Z[at]
    best_s = math.inf
    for n in range(Z[Z[L.O_PD] + pd * L.W_PD + L.D_N_LINKS]):
        k = Z[at + n]
        cached = cached_tokens
        if cached < 0:
            cached = seen_tokens(Z, C, P, Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL], r, context_tokens)
        predicted_s = predict_s(Z, F, pd, k, context_tokens - cached, cached, had_tokens)
        if predicted_s < best_s:
            best = k
            best_s = predicted_s
    return best, best_s


def route(
    Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, pd: int, r: int, input_tokens: int, incremental: int
) -> int:
    """Link to go over, or -1 for local prefill."""
    if Z[Z[L.O_PD] + pd * L.W_PD + L.D_N_LINKS] == 0:
        return -1
    k = chosen_link(Z, F, C, P, pd, r, input_tokens, incremental)
    return k if k < 0 else alive(Z, pd, k)


def alive(Z: IntArray, pd: int, k: int) -> int:
    """Link k, or -1 where its PrfaaS cluster is wholly down and there is local prefill."""
    remote = Z[L.O_POOL] + Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL] * L.W_POOL
    if Z[remote + L.Q_ACTIVE] > 0:
        return k
    local = Z[L.O_POOL] + Z[Z[L.O_PD] + pd * L.W_PD + L.D_POOL] * L.W_POOL
    return -1 if Z[local + L.Q_ACTIVE] > 0 else k


def chosen_link(
    Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, pd: int, r: int, input_tokens: int, incremental: int
) -> int:
    """What the decision in force says: a link or -1; a link where there is no local prefill."""
    site = Z[L.O_PD] + pd * L.W_PD
    n_links = Z[site + L.D_N_LINKS]
    forced = Z[Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL + L.Q_ACTIVE] == 0
    value = F[Z[L.OF_PD] + pd * L.WF_PD + L.DF_VALUE]
    by_margin = Z[site + L.D_BY_MARGIN] != 0
    if not by_margin:
        if not (forced or offload_by_threshold(incremental, value)):
            return -1
        if n_links == 1:
            return Z[Z[L.O_LINKS_OF_PD] + pd * max(Z[L.N_LINK], 1)]
    own = seen_tokens(Z, C, P, Z[site + L.D_POOL], r, input_tokens)
    k, remote_s = best_link(Z, F, C, P, pd, r, input_tokens, -1, own)
    if not by_margin:
        return k
    local_s = predict_s(Z, F, pd, -1, input_tokens - own, own, own)
    if forced or offload_by_margin(remote_s, local_s, value):
        return k
    return -1


def refusal(Z: IntArray, pd: int, k: int, input_tokens: int) -> int:
    """Counter of the reason for a rejection, or -1."""
    site = Z[L.O_PD] + pd * L.W_PD
    if Z[L.MAX_INPUT] >= 0 and input_tokens > Z[L.MAX_INPUT]:
        return L.REJECT_OVER_LIMIT
    if Z[site + L.D_KV_CAP] >= 0 and input_tokens + Z[site + L.D_KV_RESERVE] > Z[site + L.D_KV_CAP]:
        return L.REJECT_KV
    pool = Z[site + L.D_POOL] if k < 0 else Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL]
    if Z[L.MAX_QUEUE] >= 0 and Z[Z[L.O_POOL] + pool * L.W_POOL + L.Q_LEN] >= Z[L.MAX_QUEUE]:
        return L.REJECT_QUEUE
    return -1


def arrive(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, r: int) -> None:
    """A request at the door: route it, refuse it or queue it."""
    now = Z[L.NOW]
    pd = P[r, L.P_PD]
    input_tokens = P[r, L.P_INPUT]
    incremental = input_tokens - seen_prefix(Z, C, P, pd, r, input_tokens)
    Z[L.ARRIVED] += 1
    P[r, L.P_INCREMENTAL] = incremental
    k = route(Z, F, C, P, pd, r, input_tokens, incremental)
    reason = refusal(Z, pd, k, input_tokens)
    row = door_row(Z, F, pd, now)
    if reason >= 0:
        Z[reason] += 1
        P[r, L.P_STATUS] = REJECTED
        Z[L.UNRESOLVED] -= 1
        count_rejection(F, row)
        return
    P[r, L.P_STATUS] = OPEN
    cached_tokens = P[r, L.P_HAD]
    copy_link = -1
    copied_tokens = 0
    if C[X.ON] != 0:
        cached_tokens, copy_link, copied_tokens = claim_prefix(Z, C, P, pd, r, k)
        P[r, L.P_INCREMENTAL] = input_tokens - cached_tokens
    count_arrival(F, row, incremental, input_tokens, cached_tokens)
    site = Z[L.O_PD] + pd * L.W_PD
    recent = Z[site + L.D_RECENT_AT]
    Z[Z[L.O_RECENT] + pd * RECENT_LENGTHS + recent] = incremental
    Z[site + L.D_RECENT_AT] = (recent + 1) % RECENT_LENGTHS
    Z[site + L.D_RECENT_N] = min(Z[site + L.D_RECENT_N] + 1, RECENT_LENGTHS)
    integral_add(Z, L.WAITING, now, 1)
    P[r, L.P_ROUTE] = REMOTE_ROUTE if k >= 0 else LOCAL_ROUTE
    if k >= 0:
        Z[L.REMOTE] += 1
        P[r, L.P_PRFAAS] = Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL]
    if copy_link >= 0:
        copy_first(Z, F, P, r, copy_link, copied_tokens)
    else:
        start_attempt(Z, F, P, r, 1, input_tokens - cached_tokens, cached_tokens, P[r, L.P_OUTPUT], k)


def copy_first(Z: IntArray, F: FloatArray, P: IntArray, r: int, k: int, tokens: int) -> None:
    """Send a cached prefix over link k before the prefill of request r (abundant rule, paper 5.1)."""
    n_bytes = transfer_bytes(Z, tokens)
    P[r, L.P_BYTES] = n_bytes
    P[r, L.P_SENT_BYTES] += n_bytes
    P[r, L.P_LINK] = k
    P[r, L.P_OPENED] = -1
    Z[Z[L.O_LINK] + k * L.W_LINK + L.K_PENDING_BITS] += n_bytes * BITS_PER_BYTE
    open_when_ready(Z, F, P, k, r)


def copy_arrives(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, r: int) -> None:
    """A copied prefix is there: queue the first attempt."""
    pd = P[r, L.P_PD]
    copy_ended(C, r, Z[L.NOW])
    input_tokens = P[r, L.P_INPUT]
    new_tokens = P[r, L.P_INCREMENTAL]
    # whoever was to prefill it may be gone meanwhile
    k = (
        alive(Z, pd, P[r, L.P_LINK])
        if P[r, L.P_ROUTE] == REMOTE_ROUTE
        else retry_link(Z, F, C, P, r, new_tokens)
    )
    start_attempt(Z, F, P, r, 1, new_tokens, input_tokens - new_tokens, P[r, L.P_OUTPUT], k)


def start_attempt(
    Z: IntArray,
    F: FloatArray,
    P: IntArray,
    r: int,
    number: int,
    new_tokens: int,
    cached_tokens: int,
    remaining_tokens: int,
    k: int,
) -> None:
    """Queue one try of a request for prefill over link k or locally (k < 0)."""
    pd = P[r, L.P_PD]
    pool = Z[Z[L.O_PD] + pd * L.W_PD + L.D_POOL] if k < 0 else Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL]
    q = Z[L.O_POOL] + pool * L.W_POOL
    work_ns = ns_from_s(pool_prefill_s(Z, F, q, new_tokens, cached_tokens))
    n_bytes = transfer_bytes(Z, cached_tokens + new_tokens - P[r, L.P_HAD])
    P[r, L.P_ATTEMPTS] = number
    P[r, L.P_WORK_NS] = work_ns
    P[r, L.P_BYTES] = n_bytes
    P[r, L.P_NEW] = new_tokens
    P[r, L.P_CONTEXT] = cached_tokens + new_tokens
    P[r, L.P_REMAINING] = remaining_tokens
    P[r, L.P_QUEUED] = Z[L.NOW]
    P[r, L.P_LINK] = k
    if k >= 0:
        Z[Z[L.O_LINK] + k * L.W_LINK + L.K_PENDING_BITS] += n_bytes * BITS_PER_BYTE
    P[r, L.P_NEXT] = -1
    if Z[q + L.Q_LEN] == 0:
        Z[q + L.Q_HEAD] = r
    else:
        P[Z[q + L.Q_TAIL], L.P_NEXT] = r
    Z[q + L.Q_TAIL] = r
    Z[q + L.Q_LEN] += 1
    Z[q + L.Q_WORK_NS] += work_ns
    Z[q + L.Q_TOKENS] += new_tokens


# ------------------------------------------------------------------ prefill and link


def counts_in(Z: IntArray, i: int, role: int) -> bool:
    """Whether the instance at offset `i` counts in a role: active and not down."""
    return Z[i + L.I_ROLE] == role and Z[i + L.I_PHASE] == ACTIVE and Z[i + L.I_UP] != 0


def speed_of(F: FloatArray, inst: int) -> float:
    """Speed of an instance now, share of full."""
    real = L.AT_REAL_INST + inst * L.WF_INST
    return F[real + L.IF_SPEED] * F[real + L.IF_HEALTH]


def set_prefill_state(Z: IntArray, F: FloatArray, inst: int) -> None:
    """Bring the trees of an instance's pool up to date with its role, phase and work."""
    i = L.AT_INST + inst * L.W_INST
    q = Z[L.O_POOL] + Z[i + L.I_POOL] * L.W_POOL
    leaf = inst - Z[q + L.Q_FIRST]
    leaves = Z[q + L.Q_LEAVES]
    idle_key = L.NO_KEY
    free_key = L.NO_KEY
    if counts_in(Z, i, PREFILL_ROLE):
        if Z[i + L.I_RUNNING] >= 0:
            free_key = Z[i + L.I_END_NS]
        else:
            speed = speed_of(F, inst)
            slow = slowness(speed) if speed < 1.0 else 0
            idle_key = (slow << TREE_SHIFT) + leaf
    at = Z[q + L.Q_IDLE_TREE]
    if Z[at + leaves + leaf] != idle_key:
        Z[q + L.Q_IDLE] += 1 if Z[at + leaves + leaf] == L.NO_KEY else 0
        Z[q + L.Q_IDLE] -= 1 if idle_key == L.NO_KEY else 0
        tree_set(Z, at, leaves, leaf, idle_key)
    at = Z[q + L.Q_FREE_TREE]
    if Z[at + leaves + leaf] != free_key:
        tree_set(Z, at, leaves, leaf, free_key)


def set_decode_state(Z: IntArray, inst: int) -> None:
    """Bring the decode tree up to date: active decode instances with a free slot, by sequences, then number."""
    i = L.AT_INST + inst * L.W_INST
    q = Z[L.O_POOL] + Z[i + L.I_POOL] * L.W_POOL
    site = Z[L.O_PD] + Z[q + L.Q_PD] * L.W_PD
    leaf = inst - Z[q + L.Q_FIRST]
    key = L.NO_KEY
    n = Z[i + L.I_SEQUENCES]
    if counts_in(Z, i, DECODE_ROLE) and n < Z[site + L.D_SLOTS_EACH]:
        key = (n << TREE_SHIFT) + leaf
    tree_set(Z, Z[site + L.D_TREE], Z[q + L.Q_LEAVES], leaf, key)


def dispatch_prefill(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, pool: int) -> None:
    """Give the heads of the queue to idle instances: the fastest, then the lowest number."""
    now = Z[L.NOW]
    q = Z[L.O_POOL] + pool * L.W_POOL
    while Z[q + L.Q_LEN] > 0 and Z[q + L.Q_IDLE] > 0:
        leaf = Z[Z[q + L.Q_IDLE_TREE] + 1] & ((1 << TREE_SHIFT) - 1)
        inst = Z[q + L.Q_FIRST] + leaf
        r = Z[q + L.Q_HEAD]
        Z[q + L.Q_HEAD] = P[r, L.P_NEXT]
        Z[q + L.Q_LEN] -= 1
        Z[q + L.Q_WORK_NS] -= P[r, L.P_WORK_NS]
        Z[q + L.Q_TOKENS] -= P[r, L.P_NEW]
        duration_ns = P[r, L.P_WORK_NS]
        speed = speed_of(F, inst)
        if speed < 1.0:
            cached_tokens = P[r, L.P_CONTEXT] - P[r, L.P_NEW]
            duration_ns = ns_from_s(pool_prefill_s(Z, F, q, P[r, L.P_NEW], cached_tokens) / speed)
        end_ns = now + duration_ns
        P[r, L.P_STARTED] = now
        P[r, L.P_END] = end_ns
        i = L.AT_INST + inst * L.W_INST
        Z[i + L.I_RUNNING] = r
        Z[i + L.I_END_NS] = end_ns
        set_prefill_state(Z, F, inst)
        integral_add(Z, q + L.Q_BUSY, now, 1)
        if C[X.ON] != 0:
            hold(C, pool, r, P[r, L.P_BYTES], now)
        if P[r, L.P_FIRST] == NEVER_NS:
            P[r, L.P_PREFILL_START] = now
            P[r, L.P_PREFILL_END] = end_ns
            P[r, L.P_SERVICE] = duration_ns
        k = P[r, L.P_LINK]
        attempt = P[r, L.P_ATTEMPTS]
        if k >= 0:
            P[r, L.P_SENT_BYTES] += P[r, L.P_BYTES]
            if Z[L.LAYERS] > 1:
                open_ns = now + pipelined_open_ns(duration_ns, Z[L.LAYERS])
                heap_push(Z, open_ns, event_key(FLOW_OPEN, k, 0, r, attempt))
        heap_push(Z, end_ns, event_key(PREFILL_END, pool, leaf, r, attempt))


def prefill_ends(
    Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, pool: int, leaf: int, r: int, attempt: int
) -> None:
    """A prefill is done: its instance is free, its cache is wholly there. One that was lost is ignored."""
    now = Z[L.NOW]
    q = Z[L.O_POOL] + pool * L.W_POOL
    inst = Z[q + L.Q_FIRST] + leaf
    i = L.AT_INST + inst * L.W_INST
    if Z[i + L.I_RUNNING] != r or is_late(P, r, attempt):
        return
    integral_add(Z, q + L.Q_BUSY, now, -1)
    Z[i + L.I_RUNNING] = -1
    if Z[i + L.I_PHASE] == DRAINING:
        begin_switch(Z, F, inst)
    else:
        set_prefill_state(Z, F, inst)
    if C[X.ON] != 0:
        prefill_ended(C, pool, Z[L.N_PRFAAS] + P[r, L.P_PD], r, P[r, L.P_INPUT], now)
    k = P[r, L.P_LINK]
    if k < 0:
        real = Z[L.OF_PD] + P[r, L.P_PD] * L.WF_PD
        handover_ns = ns_from_s(
            rdma_s(P[r, L.P_BYTES], F[real + L.DF_RDMA_BPS], F[real + L.DF_RDMA_LATENCY_S])
        )
        push_handover(Z, F, C, P, r, now + handover_ns)
    elif Z[L.LAYERS] == 1:
        open_when_ready(Z, F, P, k, r)
    else:
        link = Z[L.O_LINK] + k * L.W_LINK
        requests = flow_ints(Z, k, L.FL_REQUEST)
        for position in range(Z[link + L.K_PAST], Z[link + L.K_FLOWS]):
            if Z[requests + position] == r:
                production_ends(Z, F, k, position)
                break


def is_late(P: IntArray, r: int, attempt: int) -> bool:
    """Whether an event belongs to an attempt that was lost or aborted."""
    return P[r, L.P_STATUS] != OPEN or P[r, L.P_ATTEMPTS] & ATTEMPT_MASK != attempt


def handover_ends(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, r: int, attempt: int) -> None:
    """A cache is at the decode side (or a copied prefix at its target), if its request still wants it."""
    if not is_late(P, r, attempt):
        cache_arrives(Z, F, C, P, r)


def push_handover(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, r: int, at_ns: int) -> None:
    """The cache of request r is at the decode side at `at_ns` (or a copied prefix at its target)."""
    key = event_key(HANDOVER_END, Z[L.N_PRFAAS] + P[r, L.P_PD], 0, r, P[r, L.P_ATTEMPTS])
    heap = Z[L.O_HEAP]
    if at_ns == Z[L.NOW] and (Z[L.HEAP_N] == 0 or Z[heap] > at_ns or Z[heap + 1] > key):
        # it would be the next event
        cache_arrives(Z, F, C, P, r)
        return
    heap_push(Z, at_ns, key)


def cache_arrives(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, r: int) -> None:
    """What was sent for request r is there: a copied prefix, or its whole cache."""
    if C[X.ON] != 0:
        if copying(C, r):
            copy_arrives(Z, F, C, P, r)
            return
        pd_pool = Z[L.N_PRFAAS] + P[r, L.P_PD]
        handed_over(C, pd_pool, r, P[r, L.P_INPUT], P[r, L.P_LINK] >= 0, Z[L.NOW])
    join_decode_queue(Z, P, r)


# Flows of a link lie in two parts: positions 0..K_PAST-1 are past their production, the others are still fed by their
# prefill. `FL_CHANGED` lists the K_CHANGED positions whose cap is new since the last settling. A flow still fed ends
# after its prefill, when it is looked at again anyway, so only ends of the first part need an event; K_EARLY says that
# some flow is an exception (no bytes, or so few that rounding matters).


def open_when_ready(Z: IntArray, F: FloatArray, P: IntArray, k: int, r: int) -> None:
    """Open the flow of request r now, or once connections are set up: those of a link long idle are closed."""
    now = Z[L.NOW]
    link = Z[L.O_LINK] + k * L.W_LINK
    if Z[link + L.K_FLOWS] == 0:
        if Z[link + L.K_SETUP_NS] > 0 and now - Z[link + L.K_IDLE_SINCE_NS] >= Z[link + L.K_IDLE_NS]:
            Z[link + L.K_IDLE_SINCE_NS] = now + Z[link + L.K_SETUP_NS]
        if Z[link + L.K_IDLE_SINCE_NS] > now:
            Z[link + L.K_READY_NS] = Z[link + L.K_IDLE_SINCE_NS]
            Z[link + L.K_WAITING] += 1
            heap_push(Z, Z[link + L.K_READY_NS], event_key(FLOW_OPEN, k, 0, r, P[r, L.P_ATTEMPTS]))
            return
    open_flow(Z, F, P, k, r)


def flow_opens(Z: IntArray, F: FloatArray, P: IntArray, k: int, r: int, attempt: int) -> None:
    """The first layers of a cache are there, or connections are set up."""
    if not is_late(P, r, attempt):
        open_when_ready(Z, F, P, k, r)


def open_flow(Z: IntArray, F: FloatArray, P: IntArray, k: int, r: int) -> None:
    """Add the flow of request r to link k; it gets a rate when the instant is settled."""
    now = Z[L.NOW]
    link = Z[L.O_LINK] + k * L.W_LINK
    position = Z[link + L.K_FLOWS]
    Z[link + L.K_FLOWS] = position + 1
    bits_whole = P[r, L.P_BYTES] * BITS_PER_BYTE
    bits = float(bits_whole)
    until_ns = P[r, L.P_END]
    prefill_ns = until_ns - P[r, L.P_STARTED]
    own_bps = F[Z[L.OF_LINK] + k * L.WF_LINK + L.KF_FLOW_CAP]
    produce_bps = pipelined_cap_bps(bits, prefill_ns) if prefill_ns > 0 else math.inf
    Z[flow_ints(Z, k, L.FL_REQUEST) + position] = r
    Z[flow_ints(Z, k, L.FL_SINCE) + position] = now
    Z[flow_ints(Z, k, L.FL_UNTIL) + position] = until_ns
    Z[flow_ints(Z, k, L.FL_END) + position] = NEVER_NS
    F[flow_reals(Z, k, L.FLF_BITS) + position] = bits
    F[flow_reals(Z, k, L.FLF_REMAINING) + position] = bits
    F[flow_reals(Z, k, L.FLF_RATE) + position] = NO_RATE_BPS
    F[flow_reals(Z, k, L.FLF_PRODUCE) + position] = produce_bps
    F[flow_reals(Z, k, L.FLF_CAP) + position] = min(own_bps, produce_bps)
    Z[flow_ints(Z, k, L.FL_CHANGED) + Z[link + L.K_CHANGED]] = position
    Z[link + L.K_CHANGED] += 1
    if now >= until_ns:
        production_ends(Z, F, k, position)
    P[r, L.P_OPENED] = P[r, L.P_ATTEMPTS]
    Z[link + L.K_PENDING_BITS] -= bits_whole
    Z[link + L.K_DIRTY] = 1


def production_ends(Z: IntArray, F: FloatArray, k: int, position: int) -> None:
    """The prefill behind a flow is over: its own cap alone holds from now on."""
    link = Z[L.O_LINK] + k * L.W_LINK
    cap = flow_reals(Z, k, L.FLF_CAP) + position
    rate_bps = F[flow_reals(Z, k, L.FLF_RATE) + position]
    if rate_bps != NO_RATE_BPS:
        Z[link + L.K_HELD_UNITS] -= rate_units(rate_bps)
        Z[flow_ints(Z, k, L.FL_CHANGED) + Z[link + L.K_CHANGED]] = position
        Z[link + L.K_CHANGED] += 1
    F[cap] = F[Z[L.OF_LINK] + k * L.WF_LINK + L.KF_FLOW_CAP]
    Z[link + L.K_DIRTY] = 1
    past = Z[link + L.K_PAST]
    Z[link + L.K_PAST] = past + 1
    for field in range(L.FL_CHANGED):
        at = flow_ints(Z, k, field)
        Z[at + past], Z[at + position] = Z[at + position], Z[at + past]
    for field in range(L.WF_FLOW):
        at = flow_reals(Z, k, field)
        F[at + past], F[at + position] = F[at + position], F[at + past]
    changed = flow_ints(Z, k, L.FL_CHANGED)
    for n in range(Z[link + L.K_CHANGED]):
        if Z[changed + n] == position:
            Z[changed + n] = past
        elif Z[changed + n] == past:
            Z[changed + n] = position


def set_rate(Z: IntArray, F: FloatArray, k: int, position: int, rate_bps: float) -> None:
    """Let a flow go on at a rate from now; at its present one nothing changes."""
    rate = flow_reals(Z, k, L.FLF_RATE) + position
    if rate_bps == F[rate]:
        return
    now = Z[L.NOW]
    remaining = flow_remaining(Z, F, k, position, now)
    F[flow_reals(Z, k, L.FLF_REMAINING) + position] = remaining
    Z[flow_ints(Z, k, L.FL_SINCE) + position] = now
    end_ns = flow_end_ns(now, remaining, rate_bps)
    Z[flow_ints(Z, k, L.FL_END) + position] = end_ns
    F[rate] = rate_bps
    link = Z[L.O_LINK] + k * L.W_LINK
    if position >= Z[link + L.K_PAST] and end_ns <= Z[flow_ints(Z, k, L.FL_UNTIL) + position]:
        Z[link + L.K_EARLY] = 1


def settle_changes(Z: IntArray, F: FloatArray, k: int) -> bool:
    """Share link k where all finite caps were met and still are with room to spare; only what changed needs work.

    Gives False, with nothing changed, where they may not fit. Where it gives True the rates are those of
    `settle_all`: with this much room every pass of `water_level_bps` finds one more finite cap below the level, until
    the flows without a cap share evenly what the others leave.
    """
    link = Z[L.O_LINK] + k * L.W_LINK
    real = Z[L.OF_LINK] + k * L.WF_LINK
    if Z[link + L.K_AT_CAPS] == 0:
        return False
    n = Z[link + L.K_FLOWS]
    caps = flow_reals(Z, k, L.FLF_CAP)
    changed = flow_ints(Z, k, L.FL_CHANGED)
    most_bps = F[real + L.KF_MOST_CAP] if n > 0 else 0.0
    held_units = Z[link + L.K_HELD_UNITS]
    capacity_bps = F[real + L.KF_CAPACITY]
    for m in range(Z[link + L.K_CHANGED]):
        cap_bps = F[caps + Z[changed + m]]
        if cap_bps < math.inf:
            if cap_bps > capacity_bps:
                return False
            held_units += rate_units(cap_bps)
            most_bps = max(most_bps, cap_bps)
    # own caps of a link are finite for all its flows or for none
    n_free = Z[link + L.K_PAST] if F[real + L.KF_FLOW_CAP] == math.inf else 0
    needed_bps = held_units * RATE_UNIT_BPS + n_free * most_bps
    if needed_bps + capacity_bps * ROOM_SHARE + n * RATE_UNIT_BPS > capacity_bps:
        return False
    for m in range(Z[link + L.K_CHANGED]):
        position = Z[changed + m]
        if F[caps + position] < math.inf:
            set_rate(Z, F, k, position, F[caps + position])
    units = held_units
    if n_free > 0:
        share_bps = fair_share_bps(capacity_bps, held_units, n_free)
        for position in range(n_free):
            set_rate(Z, F, k, position, share_bps)
        units += n_free * rate_units(share_bps)
    F[real + L.KF_MOST_CAP] = most_bps
    F[real + L.KF_TOTAL_RATE] = units * RATE_UNIT_BPS
    Z[link + L.K_HELD_UNITS] = held_units
    Z[link + L.K_CONGESTED] = 1 if n_free > 0 else 0
    return True


def settle_all(Z: IntArray, F: FloatArray, k: int) -> None:
    """Share link k among all its flows."""
    link = Z[L.O_LINK] + k * L.W_LINK
    real = Z[L.OF_LINK] + k * L.WF_LINK
    n = Z[link + L.K_FLOWS]
    caps = flow_reals(Z, k, L.FLF_CAP)
    level_bps = water_level_bps(F[real + L.KF_CAPACITY], F[caps : caps + n])
    units = 0
    held_units = 0
    most_bps = 0.0
    for position in range(n):
        cap_bps = F[caps + position]
        rate_bps = min(cap_bps, level_bps)
        units += rate_units(rate_bps)
        if cap_bps < math.inf:
            held_units += rate_units(rate_bps)
            most_bps = max(most_bps, cap_bps)
        set_rate(Z, F, k, position, rate_bps)
    F[real + L.KF_MOST_CAP] = most_bps
    F[real + L.KF_TOTAL_RATE] = units * RATE_UNIT_BPS
    Z[link + L.K_HELD_UNITS] = held_units
    Z[link + L.K_AT_CAPS] = 1 if most_bps <= level_bps else 0
    Z[link + L.K_CONGESTED] = 1 if level_bps < math.inf else 0


def settle_link(Z: IntArray, F: FloatArray, k: int) -> None:
    """Account the time up to now, share the capacity anew (max-min), find the next end."""
    now = Z[L.NOW]
    link = Z[L.O_LINK] + k * L.W_LINK
    meter_advance(Z, F, k, now)
    if not settle_changes(Z, F, k):
        settle_all(Z, F, k)
    ends = flow_ints(Z, k, L.FL_END)
    next_end = NEVER_NS
    for position in range(Z[link + L.K_PAST]):
        next_end = min(next_end, Z[ends + position])
    if Z[link + L.K_EARLY] != 0:
        Z[link + L.K_EARLY] = 0
        until = flow_ints(Z, k, L.FL_UNTIL)
        for position in range(Z[link + L.K_PAST], Z[link + L.K_FLOWS]):
            if Z[ends + position] <= Z[until + position]:
                next_end = min(next_end, Z[ends + position])
                Z[link + L.K_EARLY] = 1
    Z[link + L.K_CHANGED] = 0
    Z[link + L.K_DIRTY] = 0
    Z[link + L.K_NEXT_END] = next_end
    if next_end < Z[link + L.K_SCHED_NS]:
        Z[link + L.K_SCHED_NS] = next_end
        heap_push(Z, next_end, event_key(FLOW_END, k, 0, 0, 0))


def flows_end(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, k: int) -> None:
    """Take out the flows that end now, in order of request; a wake-up that came too early is set anew."""
    now = Z[L.NOW]
    link = Z[L.O_LINK] + k * L.W_LINK
    if Z[link + L.K_SCHED_NS] == now:
        Z[link + L.K_SCHED_NS] = NEVER_NS
    next_end = Z[link + L.K_NEXT_END]
    if next_end != now:
        if next_end < Z[link + L.K_SCHED_NS]:
            Z[link + L.K_SCHED_NS] = next_end
            heap_push(Z, next_end, event_key(FLOW_END, k, 0, 0, 0))
        return
    real = Z[L.OF_LINK] + k * L.WF_LINK
    latency_ns = ns_from_s(F[real + L.KF_LATENCY_S])
    ends = flow_ints(Z, k, L.FL_END)
    requests = flow_ints(Z, k, L.FL_REQUEST)
    while True:
        best = -1
        for position in range(Z[link + L.K_FLOWS] if Z[link + L.K_EARLY] != 0 else Z[link + L.K_PAST]):
            if Z[ends + position] == now and (best < 0 or Z[requests + position] < Z[requests + best]):
                best = position
        if best < 0:
            break
        r = Z[requests + best]
        F[real + L.KF_COMPLETED] += F[flow_reals(Z, k, L.FLF_BITS) + best]
        remove_flow(Z, F, k, best)
        # a flow without bytes is over at once, but the request waits for its prefill
        at_ns = max(now, P[r, L.P_END]) + latency_ns
        if Z[L.HAS_JITTER] != 0:
            at_ns += jitter_ns(F[real + L.KF_JITTER_S], P[r, L.P_LUCK])
        push_handover(Z, F, C, P, r, at_ns)
    Z[link + L.K_NEXT_END] = NEVER_NS
    Z[link + L.K_DIRTY] = 1


def remove_flow(Z: IntArray, F: FloatArray, k: int, position: int) -> None:
    """Take a flow out; the last one of its part takes its place."""
    link = Z[L.O_LINK] + k * L.W_LINK
    changed = flow_ints(Z, k, L.FL_CHANGED)
    n = Z[link + L.K_CHANGED]
    listed = False
    for m in range(n):
        if Z[changed + m] == position:
            Z[changed + m] = Z[changed + n - 1]
            Z[link + L.K_CHANGED] = n - 1
            listed = True
            break
    if not listed and F[flow_reals(Z, k, L.FLF_CAP) + position] < math.inf:
        Z[link + L.K_HELD_UNITS] -= rate_units(F[flow_reals(Z, k, L.FLF_RATE) + position])
    hole = position
    if position < Z[link + L.K_PAST]:
        Z[link + L.K_PAST] -= 1
        hole = Z[link + L.K_PAST]
        move_flow(Z, F, k, hole, position)
    Z[link + L.K_FLOWS] -= 1
    if Z[link + L.K_FLOWS] == 0:
        Z[link + L.K_IDLE_SINCE_NS] = Z[L.NOW]
    move_flow(Z, F, k, Z[link + L.K_FLOWS], hole)


def move_flow(Z: IntArray, F: FloatArray, k: int, source: int, target: int) -> None:
    """Move a flow to a position that is free."""
    if source == target:
        return
    for field in range(L.FL_CHANGED):
        at = flow_ints(Z, k, field)
        Z[at + target] = Z[at + source]
    for field in range(L.WF_FLOW):
        at = flow_reals(Z, k, field)
        F[at + target] = F[at + source]
    changed = flow_ints(Z, k, L.FL_CHANGED)
    for m in range(Z[Z[L.O_LINK] + k * L.W_LINK + L.K_CHANGED]):
        if Z[changed + m] == source:
            Z[changed + m] = target


def capacity_changes(Z: IntArray, F: FloatArray, k: int) -> None:
    """The next value of the capacity trace of link k."""
    link = Z[L.O_LINK] + k * L.W_LINK
    at = Z[link + L.K_CAP_AT]
    F[Z[L.OF_LINK] + k * L.WF_LINK + L.KF_CAPACITY] = F[Z[L.OF_CAPACITY] + k * Z[L.CAP_CAP] + at]
    Z[link + L.K_DIRTY] = 1
    Z[link + L.K_CAP_AT] = at + 1
    push_capacity(Z, k)


def push_capacity(Z: IntArray, k: int) -> None:
    """Schedule the next capacity change of link k."""
    link = Z[L.O_LINK] + k * L.W_LINK
    at = Z[link + L.K_CAP_AT]
    if at < Z[link + L.K_CAP_N]:
        heap_push(Z, Z[Z[L.O_CAPACITY] + k * Z[L.CAP_CAP] + at], event_key(CAPACITY, k, 0, 0, 0))


# ------------------------------------------------------------------ decode


def mark_dirty(Z: IntArray, inst: int) -> None:
    """The batch of an instance changed: fix its step when the instant is settled."""
    i = L.AT_INST + inst * L.W_INST
    if Z[i + L.I_DIRTY] == 0:
        Z[i + L.I_DIRTY] = 1
        n = Z[L.N_DIRTY]
        Z[Z[L.O_DIRTY] + n] = inst
        Z[L.N_DIRTY] = n + 1


def join_decode_queue(Z: IntArray, P: IntArray, r: int) -> None:
    """The cache of request r has arrived."""
    now = Z[L.NOW]
    site = Z[L.O_PD] + P[r, L.P_PD] * L.W_PD
    if P[r, L.P_FIRST] == NEVER_NS:
        P[r, L.P_TRANSFER_END] = now
    P[r, L.P_QUEUED] = now
    P[r, L.P_NEXT] = -1
    if Z[site + L.D_LEN] == 0:
        Z[site + L.D_HEAD] = r
    else:
        P[Z[site + L.D_TAIL], L.P_NEXT] = r
    Z[site + L.D_TAIL] = r
    Z[site + L.D_LEN] += 1
    Z[site + L.D_TOKENS] += P[r, L.P_CONTEXT]


def place_for(Z: IntArray, site: int, kv_tokens: int) -> int:
    """Decode instance with the fewest sequences, then lowest number, that has a slot and room; -1 if none."""
    q = Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL
    first = Z[q + L.Q_FIRST]
    capacity = Z[site + L.D_KV_CAP]
    if capacity < 0:
        key = Z[Z[site + L.D_TREE] + 1]
        return -1 if key == L.NO_KEY else first + (key & ((1 << TREE_SHIFT) - 1))
    best = -1
    fewest = 0
    for inst in range(first, first + Z[q + L.Q_N]):
        i = L.AT_INST + inst * L.W_INST
        if not counts_in(Z, i, DECODE_ROLE):
            continue
        n = Z[i + L.I_SEQUENCES]
        room = n < Z[site + L.D_SLOTS_EACH] and Z[i + L.I_KV] + kv_tokens <= capacity
        if room and (best < 0 or n < fewest):
            best = inst
            fewest = n
    return best


def dispatch_decode(Z: IntArray, F: FloatArray, P: IntArray, pd: int) -> None:
    """Admit the heads of the decode queue; the head blocks."""
    now = Z[L.NOW]
    site = Z[L.O_PD] + pd * L.W_PD
    while Z[site + L.D_LEN] > 0:
        r = Z[site + L.D_HEAD]
        kv_tokens = P[r, L.P_INPUT] + Z[site + L.D_KV_RESERVE]
        inst = place_for(Z, site, kv_tokens)
        if inst < 0:
            return
        Z[site + L.D_HEAD] = P[r, L.P_NEXT]
        Z[site + L.D_LEN] -= 1
        Z[site + L.D_TOKENS] -= P[r, L.P_CONTEXT]
        i = L.AT_INST + inst * L.W_INST
        u = virtual_now(
            Z[i + L.I_ANCHOR_U],
            Z[i + L.I_ANCHOR_NS],
            F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_RATIO],
            now,
        )
        P[r, L.P_JOINED_U] = u
        Z[i + L.I_SEQUENCES] += 1
        Z[i + L.I_KV] += kv_tokens
        Z[i + L.I_CONTEXT] += P[r, L.P_CONTEXT]
        Z[i + L.I_SUM_U] += u
        set_decode_state(Z, inst)
        token_u = Z[site + L.D_TOKEN_U]
        if P[r, L.P_FIRST] == NEVER_NS:
            P[r, L.P_JOIN] = now
            mile_push(Z, inst, u + token_u, 2 * r + FIRST)
        mile_push(Z, inst, u + P[r, L.P_REMAINING] * token_u, 2 * r + FINISH)
        mark_dirty(Z, inst)
        integral_add(Z, site + L.D_SEQ, now, 1)


def leave_batch(Z: IntArray, P: IntArray, site: int, inst: int, r: int) -> None:
    """Take a sequence out of an instance."""
    i = L.AT_INST + inst * L.W_INST
    Z[i + L.I_SEQUENCES] -= 1
    Z[i + L.I_KV] -= P[r, L.P_INPUT] + Z[site + L.D_KV_RESERVE]
    Z[i + L.I_CONTEXT] -= P[r, L.P_CONTEXT]
    Z[i + L.I_SUM_U] -= P[r, L.P_JOINED_U]
    set_decode_state(Z, inst)
    mark_dirty(Z, inst)
    integral_add(Z, site + L.D_SEQ, Z[L.NOW], -1)


def settle_batch(Z: IntArray, F: FloatArray, inst: int) -> None:
    """Fix the step for the present batch and wake for the next milestone."""
    now = Z[L.NOW]
    i = L.AT_INST + inst * L.W_INST
    real = L.AT_REAL_INST + inst * L.WF_INST
    q = Z[L.O_POOL] + Z[i + L.I_POOL] * L.W_POOL
    pd = Z[q + L.Q_PD]
    site = Z[L.O_PD] + pd * L.W_PD
    Z[i + L.I_DIRTY] = 0
    if Z[site + L.D_FLAT] != 0 and F[real + L.IF_RATIO] == 1.0 and speed_of(F, inst) == 1.0:
        # the step is the same whatever the batch, and at ratio 1 the anchor does not matter
        wake_decode(Z, F, inst)
        return
    token_u = Z[site + L.D_TOKEN_U]
    profile = Z[L.OF_PD] + pd * L.WF_PD
    u = virtual_now(Z[i + L.I_ANCHOR_U], Z[i + L.I_ANCHOR_NS], F[real + L.IF_RATIO], now)
    Z[i + L.I_ANCHOR_NS] = now
    Z[i + L.I_ANCHOR_U] = u
    batch = Z[i + L.I_SEQUENCES]
    generated = (batch * u - Z[i + L.I_SUM_U]) // token_u
    F[real + L.IF_RATIO] = virtual_ratio(
        token_u,
        F[profile + L.DF_A_S],
        F[profile + L.DF_B_S],
        F[profile + L.DF_C_S],
        batch,
        Z[i + L.I_CONTEXT] + generated,
        speed_of(F, inst),
    )
    wake_decode(Z, F, inst)


def wake_decode(Z: IntArray, F: FloatArray, inst: int) -> None:
    """Schedule the next milestone of an instance unless an event at or before it is already there."""
    i = L.AT_INST + inst * L.W_INST
    next_ns = NEVER_NS
    if Z[i + L.I_MILE_N] > 0:
        next_ns = virtual_when(
            Z[i + L.I_ANCHOR_U],
            Z[i + L.I_ANCHOR_NS],
            F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_RATIO],
            Z[mile_base(Z, inst)],
        )
    Z[i + L.I_NEXT_NS] = next_ns
    push_decode(Z, inst)


def push_decode(Z: IntArray, inst: int) -> None:
    """Put the next milestone into the heap unless an event at or before it is already there.

    The event that was the earliest so far is remembered: when this one has come, that one need not be added again.
    """
    i = L.AT_INST + inst * L.W_INST
    if Z[i + L.I_NEXT_NS] < Z[i + L.I_SCHED_NS]:
        Z[i + L.I_SCHED_AFTER_NS] = Z[i + L.I_SCHED_NS]
        Z[i + L.I_SCHED_NS] = Z[i + L.I_NEXT_NS]
        pool = Z[i + L.I_POOL]
        leaf = inst - Z[Z[L.O_POOL] + pool * L.W_POOL + L.Q_FIRST]
        heap_push(Z, Z[i + L.I_NEXT_NS], event_key(DECODE, pool, leaf, 0, 0))


def decode_event(Z: IntArray, F: FloatArray, P: IntArray, pool: int, leaf: int) -> None:
    """First tokens and finishes due now on one instance, in order of request."""
    now = Z[L.NOW]
    q = Z[L.O_POOL] + pool * L.W_POOL
    inst = Z[q + L.Q_FIRST] + leaf
    i = L.AT_INST + inst * L.W_INST
    if Z[i + L.I_SCHED_NS] == now:
        Z[i + L.I_SCHED_NS] = Z[i + L.I_SCHED_AFTER_NS]
        Z[i + L.I_SCHED_AFTER_NS] = NEVER_NS
    if Z[i + L.I_NEXT_NS] != now:
        push_decode(Z, inst)
        return
    pd = Z[q + L.Q_PD]
    site = Z[L.O_PD] + pd * L.W_PD
    anchor_u, anchor_ns = Z[i + L.I_ANCHOR_U], Z[i + L.I_ANCHOR_NS]
    ratio = F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_RATIO]
    u = virtual_now(anchor_u, anchor_ns, ratio, now)
    base = mile_base(Z, inst)
    while Z[i + L.I_MILE_N] > 0 and (
        Z[base] <= u or virtual_when(anchor_u, anchor_ns, ratio, Z[base]) <= now
    ):
        what = mile_pop(Z, inst)
        r = what >> 1
        if what & 1 == FIRST:
            first_token(Z, F, P, pd, r)
        else:
            leave_batch(Z, P, site, inst, r)
            finish(Z, F, P, pd, r)
    if Z[i + L.I_SEQUENCES] == 0 and Z[i + L.I_PHASE] == DRAINING:
        begin_switch(Z, F, inst)
    if Z[i + L.I_DIRTY] == 0:
        wake_decode(Z, F, inst)
    else:
        Z[i + L.I_NEXT_NS] = NEVER_NS


def in_time(value_s: float, objective_s: float, has_objective: int) -> bool:
    """Whether a time meets an objective; one that is not set is met."""
    return has_objective == 0 or within(objective_s, value_s)


def first_token(Z: IntArray, F: FloatArray, P: IntArray, pd: int, r: int) -> None:
    """The first token of request r is out."""
    now = Z[L.NOW]
    P[r, L.P_FIRST] = now
    Z[L.FIRST_TOKENS] += 1
    integral_add(Z, L.WAITING, now, -1)
    ttft_s = (now - P[r, L.P_ARRIVAL]) / 1e9
    count_first_token(F, door_row(Z, F, pd, now), in_time(ttft_s, F[L.TTFT_SLO_S], Z[L.HAS_TTFT]))


def finish(Z: IntArray, F: FloatArray, P: IntArray, pd: int, r: int) -> None:
    """Request r is finished."""
    now = Z[L.NOW]
    P[r, L.P_FINISH] = now
    P[r, L.P_STATUS] = FINISHED
    Z[L.FINISHED] += 1
    Z[L.UNRESOLVED] -= 1
    tokens = P[r, L.P_OUTPUT]
    first_ns = P[r, L.P_FIRST]
    tpot_s = 0.0
    if tokens > 1:
        tpot_s = (now - first_ns) / 1e9 / (tokens - 1)
    ttft_s = (first_ns - P[r, L.P_ARRIVAL]) / 1e9
    tpot_ok = in_time(tpot_s, F[L.TPOT_SLO_S], Z[L.HAS_TPOT])
    count_finish(F, door_row(Z, F, pd, now), tokens, tpot_ok)
    if tpot_ok and in_time(ttft_s, F[L.TTFT_SLO_S], Z[L.HAS_TTFT]):
        Z[L.GOOD] += 1


# ------------------------------------------------------------------ conversions


def site_legal(Z: IntArray, pd: int) -> tuple[bool, bool, bool]:
    """Legal moves of a PD cluster now."""
    now = Z[L.NOW]
    site = Z[L.O_PD] + pd * L.W_PD
    q = Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL
    return legal_moves(
        now > 0 and now % Z[L.CONVERSION_NS] == 0,
        Z[site + L.D_CONVERTING],
        Z[q + L.Q_ACTIVE],
        Z[site + L.D_ACTIVE],
        Z[site + L.D_PREFILL_FLOOR],
        Z[site + L.D_MIN_DECODE],
        Z[q + L.Q_LEN],
    )


def apply_decision(
    Z: IntArray, F: FloatArray, pd: int, by_margin: int, value: float, move: int, abundant: int
) -> None:
    """Put the decision for one PD cluster in force."""
    site = Z[L.O_PD] + pd * L.W_PD
    Z[site + L.D_BY_MARGIN] = by_margin
    Z[site + L.D_ABUNDANT] = abundant
    F[Z[L.OF_PD] + pd * L.WF_PD + L.DF_VALUE] = value
    if move == MOVE_NONE:
        return
    to_decode, _, to_prefill = site_legal(Z, pd)
    if not (to_decode if move == MOVE_TO_DECODE else to_prefill):
        Z[L.INVALID_MOVES] += 1
        return
    inst = conversion_source(Z, site, move)
    if inst >= 0:
        order_conversion(Z, F, pd, inst, move)


def conversion_source(Z: IntArray, site: int, move: int) -> int:
    """Prefill to decode: idle first, then earliest to finish; decode to prefill: fewest sequences; then number."""
    q = Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL
    role = PREFILL_ROLE if move == MOVE_TO_DECODE else DECODE_ROLE
    best = -1
    best_key = NEVER_NS
    for inst in range(Z[q + L.Q_FIRST], Z[q + L.Q_FIRST] + Z[q + L.Q_N]):
        i = L.AT_INST + inst * L.W_INST
        if not counts_in(Z, i, role):
            continue
        busy_key = Z[i + L.I_END_NS] if Z[i + L.I_RUNNING] >= 0 else -1
        key = Z[i + L.I_SEQUENCES] if role == DECODE_ROLE else busy_key
        if key < best_key:
            best = inst
            best_key = key
    return best


def order_conversion(Z: IntArray, F: FloatArray, pd: int, inst: int, move: int) -> None:
    """Drain an instance towards the other role."""
    now = Z[L.NOW]
    site = Z[L.O_PD] + pd * L.W_PD
    q = Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL
    i = L.AT_INST + inst * L.W_INST
    Z[L.CONVERSIONS] += 1
    Z[site + L.D_CONVERTING] += 1
    Z[site + L.D_CONVERTED_NS] = now
    Z[i + L.I_PHASE] = DRAINING
    if move == MOVE_TO_DECODE:
        Z[q + L.Q_ACTIVE] -= 1
        Z[i + L.I_CONVERT_TO] = DECODE_ROLE
        set_prefill_state(Z, F, inst)
    else:
        Z[site + L.D_ACTIVE] -= 1
        Z[i + L.I_CONVERT_TO] = PREFILL_ROLE
        set_decode_state(Z, inst)
    if Z[i + L.I_RUNNING] < 0 and Z[i + L.I_SEQUENCES] == 0:
        begin_switch(Z, F, inst)
    elif move == MOVE_TO_PREFILL:
        Z[i + L.I_LIMIT_NS] = now + Z[L.DRAIN_NS]
        push_conversion(Z, inst, Z[i + L.I_LIMIT_NS])


def push_conversion(Z: IntArray, inst: int, at_ns: int) -> None:
    """Something about the conversion of an instance happens at `at_ns`."""
    pool = Z[L.AT_INST + inst * L.W_INST + L.I_POOL]
    leaf = inst - Z[Z[L.O_POOL] + pool * L.W_POOL + L.Q_FIRST]
    heap_push(Z, at_ns, event_key(CONVERSION, pool, leaf, 0, 0))


def count_role(Z: IntArray, inst: int, change: int) -> None:
    """Account an instance that leaves (-1) or joins (1) its role."""
    i = L.AT_INST + inst * L.W_INST
    q = Z[L.O_POOL] + Z[i + L.I_POOL] * L.W_POOL
    if Z[i + L.I_ROLE] == PREFILL_ROLE:
        integral_add(Z, q + L.Q_IN_ROLE, Z[L.NOW], change)
    else:
        site = Z[L.O_PD] + Z[q + L.Q_PD] * L.W_PD
        integral_add(Z, site + L.D_SLOTS, Z[L.NOW], change * Z[site + L.D_SLOTS_EACH])


def begin_switch(Z: IntArray, F: FloatArray, inst: int) -> None:
    """An instance has drained: switch."""
    i = L.AT_INST + inst * L.W_INST
    Z[i + L.I_PHASE] = SWITCHING
    F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_SPEED] = 1.0
    Z[i + L.I_WARM_UNTIL_NS] = -1
    Z[i + L.I_LIMIT_NS] = -1
    count_role(Z, inst, -1)
    set_prefill_state(Z, F, inst)
    Z[i + L.I_SWITCH_END_NS] = Z[L.NOW] + Z[L.SWITCH_NS]
    push_conversion(Z, inst, Z[i + L.I_SWITCH_END_NS])


def conversion_event(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, pool: int, leaf: int) -> None:
    """Drain limit, end of the switch, or end of the warm-up of an instance, whichever is due."""
    now = Z[L.NOW]
    inst = Z[Z[L.O_POOL] + pool * L.W_POOL + L.Q_FIRST] + leaf
    i = L.AT_INST + inst * L.W_INST
    if Z[i + L.I_WARM_UNTIL_NS] == now:
        Z[i + L.I_WARM_UNTIL_NS] = -1
        F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_SPEED] = 1.0
        set_prefill_state(Z, F, inst)
        mark_dirty(Z, inst)
    if Z[i + L.I_LIMIT_NS] == now and Z[i + L.I_PHASE] == DRAINING:
        evict(Z, F, C, P, inst)
        begin_switch(Z, F, inst)
    elif Z[i + L.I_SWITCH_END_NS] == now and Z[i + L.I_PHASE] == SWITCHING:
        end_switch(Z, F, inst)


def end_switch(Z: IntArray, F: FloatArray, inst: int) -> None:
    """An instance joins its new role, warming up if the scenario says so."""
    i = L.AT_INST + inst * L.W_INST
    q = Z[L.O_POOL] + Z[i + L.I_POOL] * L.W_POOL
    site = Z[L.O_PD] + Z[q + L.Q_PD] * L.W_PD
    Z[i + L.I_SWITCH_END_NS] = -1
    Z[i + L.I_ROLE] = Z[i + L.I_CONVERT_TO]
    Z[i + L.I_CONVERT_TO] = -1
    Z[i + L.I_PHASE] = ACTIVE
    Z[site + L.D_CONVERTING] -= 1
    count_role(Z, inst, 1)
    if Z[L.WARMUP_NS] > 0:
        F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_SPEED] = F[L.WARMUP_SPEED]
        Z[i + L.I_WARM_UNTIL_NS] = Z[L.NOW] + Z[L.WARMUP_NS]
        push_conversion(Z, inst, Z[i + L.I_WARM_UNTIL_NS])
    if Z[i + L.I_ROLE] == PREFILL_ROLE:
        Z[q + L.Q_ACTIVE] += Z[i + L.I_UP]
        set_prefill_state(Z, F, inst)
    else:
        Z[site + L.D_ACTIVE] += Z[i + L.I_UP]
        set_decode_state(Z, inst)


def evict(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, inst: int) -> None:
    """Drain limit reached: what still decodes here is prefilled again, prompt and produced tokens."""
    now = Z[L.NOW]
    i = L.AT_INST + inst * L.W_INST
    q = Z[L.O_POOL] + Z[i + L.I_POOL] * L.W_POOL
    pd = Z[q + L.Q_PD]
    site = Z[L.O_PD] + pd * L.W_PD
    base = mile_base(Z, inst)
    u = virtual_now(
        Z[i + L.I_ANCHOR_U],
        Z[i + L.I_ANCHOR_NS],
        F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_RATIO],
        now,
    )
    last = -1
    while True:
        # the next request in rising order among the finishes that were to come
        r = -1
        for n in range(Z[i + L.I_MILE_N]):
            what = Z[base + L.W_MILE * n + L.M_WHAT]
            if what & 1 == FINISH and what >> 1 > last and (r < 0 or what >> 1 < r):
                r = what >> 1
        if r < 0:
            break
        last = r
        token_u = Z[site + L.D_TOKEN_U]
        # tokens that have come out: rounding may see the first or the last one 1 ns early
        produced = min((u - P[r, L.P_JOINED_U]) // token_u, P[r, L.P_REMAINING] - 1)
        if P[r, L.P_FIRST] == NEVER_NS:
            produced = 0
        leave_batch(Z, P, site, inst, r)
        cached_tokens = P[r, L.P_INPUT] - P[r, L.P_INCREMENTAL]
        new_tokens = P[r, L.P_CONTEXT] + produced - cached_tokens
        k = retry_link(Z, F, C, P, r, new_tokens)
        start_attempt(
            Z,
            F,
            P,
            r,
            P[r, L.P_ATTEMPTS] + 1,
            new_tokens,
            cached_tokens,
            P[r, L.P_REMAINING] - produced,
            k,
        )
    Z[i + L.I_MILE_N] = 0
    Z[i + L.I_NEXT_NS] = NEVER_NS


# ------------------------------------------------------------------ faults and requests given up


def push_fault(Z: IntArray) -> None:
    """Schedule the next fault."""
    if Z[L.FAULT_AT] < Z[L.N_FAULTS]:
        at = Z[L.O_FAULT] + Z[L.FAULT_AT] * L.W_FAULT
        heap_push(Z, Z[at + L.E_TIME], event_key(FAULT, Z[at + L.E_CLUSTER], Z[at + L.E_INSTANCE], 0, 0))


def fault_event(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, pool: int, leaf: int) -> None:
    """An instance goes down (speed 0), comes back, or changes speed."""
    speed = F[Z[L.OF_FAULT] + Z[L.FAULT_AT]]
    Z[L.FAULT_AT] += 1
    push_fault(Z)
    q = Z[L.O_POOL] + pool * L.W_POOL
    inst = Z[q + L.Q_FIRST] + leaf
    i = L.AT_INST + inst * L.W_INST
    was_up = Z[i + L.I_UP]
    up = 1 if speed > 0.0 else 0
    Z[i + L.I_UP] = up
    F[L.AT_REAL_INST + inst * L.WF_INST + L.IF_HEALTH] = speed if up != 0 else 1.0
    is_pd = pool >= Z[L.N_PRFAAS]
    if Z[i + L.I_PHASE] == ACTIVE:
        if Z[i + L.I_ROLE] == PREFILL_ROLE:
            Z[q + L.Q_ACTIVE] += up - was_up
        else:
            Z[Z[L.O_PD] + Z[q + L.Q_PD] * L.W_PD + L.D_ACTIVE] += up - was_up
    if is_pd:
        set_decode_state(Z, inst)
        mark_dirty(Z, inst)
    if was_up != 0 and up == 0:
        lose_work(Z, F, C, P, pool, inst)
    else:
        set_prefill_state(Z, F, inst)


def lose_work(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, pool: int, inst: int) -> None:
    """What an instance worked on is prefilled again; a cluster without any instance hands its queue on."""
    q = Z[L.O_POOL] + pool * L.W_POOL
    i = L.AT_INST + inst * L.W_INST
    r = Z[i + L.I_RUNNING]
    if r >= 0:
        stop_prefill(Z, F, C, P, inst)
        retry(Z, F, P, r, retry_link(Z, F, C, P, r, P[r, L.P_NEW]))
    else:
        set_prefill_state(Z, F, inst)
    if pool >= Z[L.N_PRFAAS]:
        evict(Z, F, C, P, inst)
    if Z[i + L.I_PHASE] == DRAINING:
        begin_switch(Z, F, inst)
    if Z[q + L.Q_ACTIVE] > 0:
        return
    r = Z[q + L.Q_HEAD]
    for _ in range(Z[q + L.Q_LEN]):
        after = P[r, L.P_NEXT]
        k = retry_link(Z, F, C, P, r, P[r, L.P_NEW])
        other = (
            Z[Z[L.O_PD] + P[r, L.P_PD] * L.W_PD + L.D_POOL]
            if k < 0
            else Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL]
        )
        if other != pool:
            leave_prefill_queue(Z, P, q, r)
            forget_bits(Z, F, P, r, False)
            retry(Z, F, P, r, k)
        r = after


def stop_prefill(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, inst: int) -> None:
    """A running prefill ends before its time; nothing of it is left."""
    i = L.AT_INST + inst * L.W_INST
    r = Z[i + L.I_RUNNING]
    Z[i + L.I_RUNNING] = -1
    integral_add(Z, Z[L.O_POOL] + Z[i + L.I_POOL] * L.W_POOL + L.Q_BUSY, Z[L.NOW], -1)
    set_prefill_state(Z, F, inst)
    if C[X.ON] != 0:
        release(C, r)
    forget_bits(Z, F, P, r, True)


def forget_bits(Z: IntArray, F: FloatArray, P: IntArray, r: int, started: bool) -> None:
    """Nothing more of the attempt of request r crosses its link; what has been sent counts as delivered."""
    k = P[r, L.P_LINK]
    if k < 0:
        return
    link = Z[L.O_LINK] + k * L.W_LINK
    if P[r, L.P_OPENED] != P[r, L.P_ATTEMPTS]:
        Z[link + L.K_PENDING_BITS] -= P[r, L.P_BYTES] * BITS_PER_BYTE
        if started:
            P[r, L.P_SENT_BYTES] -= P[r, L.P_BYTES]
        return
    requests = flow_ints(Z, k, L.FL_REQUEST)
    for position in range(Z[link + L.K_FLOWS]):
        if Z[requests + position] == r:
            left = bit_units(flow_remaining(Z, F, k, position, Z[L.NOW])) * BIT_UNIT
            completed = Z[L.OF_LINK] + k * L.WF_LINK + L.KF_COMPLETED
            F[completed] += F[flow_reals(Z, k, L.FLF_BITS) + position] - left
            P[r, L.P_SENT_BYTES] -= int(left) // BITS_PER_BYTE
            remove_flow(Z, F, k, position)
            Z[link + L.K_DIRTY] = 1
            return


def retry_link(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, r: int, new_tokens: int) -> int:
    """Link for another attempt, or -1: the side it was routed to first, unless nobody is left there."""
    pd = P[r, L.P_PD]
    site = Z[L.O_PD] + pd * L.W_PD
    if Z[site + L.D_N_LINKS] == 0:
        return -1
    if P[r, L.P_ROUTE] != REMOTE_ROUTE and Z[Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL + L.Q_ACTIVE] > 0:
        return -1
    cached_tokens = P[r, L.P_INPUT] - P[r, L.P_INCREMENTAL]
    context_tokens = cached_tokens + new_tokens
    return alive(Z, pd, best_link(Z, F, C, P, pd, r, context_tokens, cached_tokens, P[r, L.P_HAD])[0])


def retry(Z: IntArray, F: FloatArray, P: IntArray, r: int, k: int) -> None:
    """Prefill once more what an attempt was to prefill."""
    start_attempt(
        Z,
        F,
        P,
        r,
        P[r, L.P_ATTEMPTS] + 1,
        P[r, L.P_NEW],
        P[r, L.P_CONTEXT] - P[r, L.P_NEW],
        P[r, L.P_REMAINING],
        k,
    )


def unlink(Z: IntArray, P: IntArray, head: int, tail: int, length: int, r: int) -> bool:
    """Take request r out of a queue, wherever it stands; False if it is not in it. Offsets in Z of its three fields."""
    before = -1
    at = Z[head]
    for _ in range(Z[length]):
        if at == r:
            if before < 0:
                Z[head] = P[r, L.P_NEXT]
            else:
                P[before, L.P_NEXT] = P[r, L.P_NEXT]
            if Z[tail] == r:
                Z[tail] = before
            Z[length] -= 1
            return True
        before = at
        at = P[at, L.P_NEXT]
    return False


def leave_prefill_queue(Z: IntArray, P: IntArray, q: int, r: int) -> bool:
    """Take request r out of the prefill queue of the pool at offset `q`; False if it is not in it."""
    if not unlink(Z, P, q + L.Q_HEAD, q + L.Q_TAIL, q + L.Q_LEN, r):
        return False
    Z[q + L.Q_WORK_NS] -= P[r, L.P_WORK_NS]
    Z[q + L.Q_TOKENS] -= P[r, L.P_NEW]
    return True


def leave_decode(Z: IntArray, F: FloatArray, P: IntArray, pd: int, r: int) -> bool:
    """Take request r out of the batch it decodes in; False if there is none."""
    site = Z[L.O_PD] + pd * L.W_PD
    q = Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL
    for inst in range(Z[q + L.Q_FIRST], Z[q + L.Q_FIRST] + Z[q + L.Q_N]):
        i = L.AT_INST + inst * L.W_INST
        base = mile_base(Z, inst)
        n = Z[i + L.I_MILE_N]
        found = False
        for m in range(n):
            found = found or Z[base + L.W_MILE * m + L.M_WHAT] >> 1 == r
        if not found:
            continue
        leave_batch(Z, P, site, inst, r)
        Z[i + L.I_MILE_N] = 0
        for m in range(n):
            target = Z[base + L.W_MILE * m + L.M_TARGET]
            what = Z[base + L.W_MILE * m + L.M_WHAT]
            if what >> 1 != r:
                mile_push(Z, inst, target, what)
        if Z[i + L.I_SEQUENCES] == 0 and Z[i + L.I_PHASE] == DRAINING:
            begin_switch(Z, F, inst)
        return True
    return False


def abort(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, r: int) -> None:
    """Nobody waits for request r any more: whatever holds it lets it go."""
    if P[r, L.P_STATUS] != OPEN:
        return
    now = Z[L.NOW]
    P[r, L.P_STATUS] = ABORTED
    P[r, L.P_ABORT] = now
    Z[L.ABORTED] += 1
    Z[L.UNRESOLVED] -= 1
    pd = P[r, L.P_PD]
    if P[r, L.P_FIRST] == NEVER_NS:
        integral_add(Z, L.WAITING, now, -1)
        count_first_token(F, door_row(Z, F, pd, now), False)
    if C[X.ON] != 0:
        forget(C, Z[L.N_PRFAAS] + pd, r)
    if leave_decode(Z, F, P, pd, r):
        return
    site = Z[L.O_PD] + pd * L.W_PD
    if unlink(Z, P, site + L.D_HEAD, site + L.D_TAIL, site + L.D_LEN, r):
        Z[site + L.D_TOKENS] -= P[r, L.P_CONTEXT]
        return
    k = P[r, L.P_LINK]
    pool = Z[site + L.D_POOL] if k < 0 else Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL]
    q = Z[L.O_POOL] + pool * L.W_POOL
    if leave_prefill_queue(Z, P, q, r):
        forget_bits(Z, F, P, r, False)
        return
    for inst in range(Z[q + L.Q_FIRST], Z[q + L.Q_FIRST] + Z[q + L.Q_N]):
        i = L.AT_INST + inst * L.W_INST
        if Z[i + L.I_RUNNING] == r:
            stop_prefill(Z, F, C, P, inst)
            if Z[i + L.I_PHASE] == DRAINING:
                begin_switch(Z, F, inst)
            return
    forget_bits(Z, F, P, r, True)


def next_abort(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray) -> None:
    """A client that gives up now, or else a request whose deadline is now."""
    n = Z[L.N_REQUESTS]
    at = Z[L.NEXT_GIVE_UP]
    if at < n and P[P[at, L.P_GIVE_UP_WHO], L.P_GIVE_UP] == Z[L.NOW]:
        Z[L.NEXT_GIVE_UP] = at + 1
        abort(Z, F, C, P, P[at, L.P_GIVE_UP_WHO])
    else:
        r = Z[L.NEXT_DEADLINE]
        Z[L.NEXT_DEADLINE] = r + 1
        if P[r, L.P_FIRST] == NEVER_NS:
            abort(Z, F, C, P, r)
    find_abort(Z, P)


def find_abort(Z: IntArray, P: IntArray) -> None:
    """Find the next instant at which a request that is not resolved is given up."""
    n = Z[L.N_REQUESTS]
    at = Z[L.NEXT_GIVE_UP]
    while at < n and P[P[at, L.P_GIVE_UP_WHO], L.P_STATUS] > OPEN:
        at += 1
    Z[L.NEXT_GIVE_UP] = at
    r = Z[L.NEXT_DEADLINE]
    while r < n and (P[r, L.P_STATUS] > OPEN or P[r, L.P_FIRST] != NEVER_NS):
        r += 1
    Z[L.NEXT_DEADLINE] = r
    next_ns = NEVER_NS
    if at < n:
        next_ns = P[P[at, L.P_GIVE_UP_WHO], L.P_GIVE_UP]
    if r < n:
        next_ns = min(next_ns, P[r, L.P_ARRIVAL] + Z[L.DEADLINE_NS])
    Z[L.NEXT_ABORT_NS] = next_ns


# ------------------------------------------------------------------ the loop


def settle(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray) -> None:
    """The end of an instant: share the links, start prefills, admit to decode, fix decode steps."""
    for k in range(Z[L.N_LINK]):
        if Z[Z[L.O_LINK] + k * L.W_LINK + L.K_DIRTY] != 0:
            settle_link(Z, F, k)
    for pool in range(Z[L.N_POOL]):
        q = Z[L.O_POOL] + pool * L.W_POOL
        if Z[q + L.Q_LEN] > 0 and Z[q + L.Q_IDLE] > 0:
            dispatch_prefill(Z, F, C, P, pool)
    for pd in range(Z[L.N_PD]):
        if Z[Z[L.O_PD] + pd * L.W_PD + L.D_LEN] > 0:
            dispatch_decode(Z, F, P, pd)
    for n in range(Z[L.N_DIRTY]):
        settle_batch(Z, F, Z[Z[L.O_DIRTY] + n])
    Z[L.N_DIRTY] = 0


def handle(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, key: int) -> None:
    """One event, read from its key."""
    attempt = key & ATTEMPT_MASK
    request_mask = (1 << REQUEST_BITS) - 1
    r = (key >> ATTEMPT_BITS) & request_mask
    leaf = (key >> (ATTEMPT_BITS + REQUEST_BITS)) & ((1 << INSTANCE_BITS) - 1)
    cluster = (key >> (ATTEMPT_BITS + REQUEST_BITS + INSTANCE_BITS)) & ((1 << CLUSTER_BITS) - 1)
    kind = (key >> (ATTEMPT_BITS + REQUEST_BITS + INSTANCE_BITS + CLUSTER_BITS)) - 1
    if kind == DECODE:
        decode_event(Z, F, P, cluster, leaf)
    elif kind == PREFILL_END:
        prefill_ends(Z, F, C, P, cluster, leaf, r, attempt)
    elif kind == FLOW_OPEN:
        flow_opens(Z, F, P, cluster, r, attempt)
    elif kind == FLOW_END:
        flows_end(Z, F, C, P, cluster)
    elif kind == HANDOVER_END:
        handover_ends(Z, F, C, P, r, attempt)
    elif kind == FAULT:
        fault_event(Z, F, C, P, cluster, leaf)
    elif kind == CAPACITY:
        capacity_changes(Z, F, cluster)
    else:
        conversion_event(Z, F, C, P, cluster, leaf)


def lacks_room(Z: IntArray, now: int) -> int:
    """Whether the instant `now` could overflow the heap or a link's flows; `RAN` if not."""
    for k in range(Z[L.N_LINK]):
        link = Z[L.O_LINK] + k * L.W_LINK
        if now > Z[link + L.K_READY_NS]:
            Z[link + L.K_WAITING] = 0
        if Z[link + L.K_FLOWS] + Z[link + L.K_INSTANCES] + Z[link + L.K_WAITING] >= Z[L.FLOW_CAP]:
            return GROW_FLOWS
    return GROW_HEAP if Z[L.HEAP_N] > Z[L.HEAP_ROOM] else RAN


def run(Z: IntArray, F: FloatArray, C: IntArray, P: IntArray, until_ns: int, to_end: bool) -> int:
    """Handle everything before `until_ns`; with `to_end` stop after the instant that resolves the last request.

    Gives RAN, or which array must grow before the call is repeated.
    """
    heap = Z[L.O_HEAP]
    n_requests = Z[L.N_REQUESTS]
    while not to_end or Z[L.UNRESOLVED] > 0:
        arrival = Z[L.NEXT_ARRIVAL]
        now = P[arrival, L.P_ARRIVAL] if arrival < n_requests else NEVER_NS
        if Z[L.HEAP_N] > 0 and Z[heap] < now:
            now = Z[heap]
        if Z[L.NEXT_ABORT_NS] < now:
            now = Z[L.NEXT_ABORT_NS]
        if now >= until_ns:
            break
        lack = lacks_room(Z, now)
        if lack != RAN:
            return lack
        Z[L.NOW] = now
        while True:
            if Z[L.HEAP_N] > 0 and Z[heap] == now:
                handle(Z, F, C, P, heap_pop(Z))
            elif Z[L.NEXT_ABORT_NS] == now:
                next_abort(Z, F, C, P)
            elif arrival < n_requests and P[arrival, L.P_ARRIVAL] == now:
                if C[X.ON] != 0 and lacks_room(Z, now) != RAN:
                    # each arrival may open a flow for a copy; the next call goes on within this instant
                    return lacks_room(Z, now)
                Z[L.NEXT_ARRIVAL] = arrival + 1
                arrive(Z, F, C, P, arrival)
                arrival += 1
            else:
                break
        settle(Z, F, C, P)
    if until_ns < NEVER_NS and (not to_end or Z[L.UNRESOLVED] > 0):
        Z[L.NOW] = until_ns
    return RAN


def begin(Z: IntArray, P: IntArray) -> None:
    """Schedule what comes first: capacity changes, a fault, an abort (arrays as `Layout.start` made them)."""
    find_abort(Z, P)
    push_fault(Z)
    for k in range(Z[L.N_LINK]):
        Z[Z[L.O_LINK] + k * L.W_LINK + L.K_CAP_AT] = 1
        push_capacity(Z, k)


# ------------------------------------------------------------------ readings


def staged_bits(Z: IntArray, F: FloatArray, k: int, now: int) -> float:
    """Bits that prefill has produced and link k has not yet sent."""
    units = 0
    until = flow_ints(Z, k, L.FL_UNTIL)
    produce = flow_reals(Z, k, L.FLF_PRODUCE)
    for position in range(Z[Z[L.O_LINK] + k * L.W_LINK + L.K_FLOWS]):
        remaining = flow_remaining(Z, F, k, position, now)
        if now < Z[until + position]:
            to_come = sent_bits(F[produce + position], Z[until + position] - now)
            remaining = max(remaining - to_come, 0.0)
        units += bit_units(remaining)
    return units * BIT_UNIT


def delivered_bits(Z: IntArray, F: FloatArray, k: int) -> float:
    """Bits sent over link k since the start."""
    bits = flow_reals(Z, k, L.FLF_BITS)
    begun = 0.0
    for position in range(Z[Z[L.O_LINK] + k * L.W_LINK + L.K_FLOWS]):
        begun += F[bits + position]
    return F[Z[L.OF_LINK] + k * L.WF_LINK + L.KF_COMPLETED] + (begun - unsent_bits(Z, F, k, Z[L.NOW]))


def read_pool(Z: IntArray, P: IntArray, pool: int, out: FloatArray, at: int) -> None:
    """The prefill fields of a PD or PrfaaS group, from the position of the first one on."""
    now = Z[L.NOW]
    q = Z[L.O_POOL] + pool * L.W_POOL
    n = Z[q + L.Q_LEN]
    residual_ns = 0
    for inst in range(Z[q + L.Q_FIRST], Z[q + L.Q_FIRST] + Z[q + L.Q_N]):
        i = L.AT_INST + inst * L.W_INST
        if Z[i + L.I_RUNNING] >= 0:
            residual_ns += Z[i + L.I_END_NS] - now
    out[at] = n
    out[at + 1] = Z[q + L.Q_TOKENS]
    out[at + 2] = Z[q + L.Q_WORK_NS] / 1e9
    out[at + 3] = (now - P[Z[q + L.Q_HEAD], L.P_QUEUED]) / 1e9 if n > 0 else 0.0
    out[at + 4] = residual_ns / 1e9
    out[at + 5] = Z[q + L.Q_BUSY]
    out[at + 6] = Z[q + L.Q_ACTIVE]


def read_site(Z: IntArray, F: FloatArray, P: IntArray, pd: int, out: FloatArray, at: int) -> None:
    """All fields of a PD group."""
    now = Z[L.NOW]
    site = Z[L.O_PD] + pd * L.W_PD
    real = Z[L.OF_PD] + pd * L.WF_PD
    bucket = now // NS_PER_S
    door_roll(Z, F, pd, bucket)
    width = len(WINDOWS_S) * N_DOOR_COLUMNS
    at_sums = Z[L.OF_SUMS] + pd * width
    sums = F[at_sums : at_sums + width].reshape((len(WINDOWS_S), N_DOOR_COLUMNS))
    door_fields(sums, bucket, Z[L.HAS_TTFT] != 0, Z[L.HAS_TPOT] != 0, out, at)
    read_pool(Z, P, Z[site + L.D_POOL], out, at + PD_POOL_AT)
    q = Z[L.O_POOL] + Z[site + L.D_POOL] * L.W_POOL
    used = 0
    busy = 0
    kv = 0
    for inst in range(Z[q + L.Q_FIRST], Z[q + L.Q_FIRST] + Z[q + L.Q_N]):
        i = L.AT_INST + inst * L.W_INST
        n = Z[i + L.I_SEQUENCES]
        busy += 1 if n > 0 else 0
        if counts_in(Z, i, DECODE_ROLE):
            used += n
            kv += Z[i + L.I_KV]
    active = Z[site + L.D_ACTIVE]
    slots = Z[site + L.D_SLOTS_EACH]
    waiting = Z[site + L.D_LEN]
    out[at + DECODE_QUEUE_AT] = waiting
    out[at + DECODE_QUEUE_AT + 1] = Z[site + L.D_TOKENS]
    out[at + DECODE_QUEUE_AT + 2] = decode_work_s(
        waiting, out[at + OUTPUT_MEAN_AT], F[real + L.DF_FULL_STEP_S], slots
    )
    out[at + DECODE_QUEUE_AT + 3] = (now - P[Z[site + L.D_HEAD], L.P_QUEUED]) / 1e9 if waiting > 0 else 0.0
    out[at + DECODE_AT] = Z[site + L.D_SEQ]
    out[at + DECODE_AT + 1] = busy
    out[at + DECODE_AT + 2] = active
    out[at + DECODE_AT + 3] = used / (active * slots) if active > 0 else 0.0
    capacity = Z[site + L.D_KV_CAP]
    out[at + DECODE_AT + 4] = kv / (capacity * active) if capacity >= 0 and active > 0 else 0.0
    out[at + CONVERTING_AT] = Z[site + L.D_CONVERTING]
    converted_ns = Z[site + L.D_CONVERTED_NS]
    out[at + CONVERTING_AT + 1] = 1.0 if converted_ns >= 0 else 0.0
    out[at + CONVERTING_AT + 2] = (now - converted_ns) / 1e9 if converted_ns >= 0 else 0.0
    to_next_ns = Z[L.CONVERSION_NS] - now % Z[L.CONVERSION_NS]
    if now > 0 and now % Z[L.CONVERSION_NS] == 0 and Z[site + L.D_CONVERTING] == 0:
        to_next_ns = 0
    out[at + CONVERTING_AT + 3] = to_next_ns / 1e9
    value = F[real + L.DF_VALUE]
    by_margin = Z[site + L.D_BY_MARGIN] != 0
    out[at + DECISION_AT] = 0.0 if by_margin else 1.0
    out[at + DECISION_AT + 1] = 0.0 if by_margin else threshold_field(value)
    out[at + DECISION_AT + 2] = 1.0 if by_margin else 0.0
    out[at + DECISION_AT + 3] = margin_field(value) if by_margin else 0.0
    out[at + DECISION_AT + 4] = Z[site + L.D_ABUNDANT]


def read_link(Z: IntArray, F: FloatArray, k: int, out: FloatArray, at: int) -> None:
    """All fields of a link group."""
    now = Z[L.NOW]
    real = Z[L.OF_LINK] + k * L.WF_LINK
    meter_advance_for_reading(Z, F, k, now)
    link_fields(
        Z,
        Z[L.O_WIRE] + k * N_BUCKETS,
        F,
        Z[L.OF_WIRE] + k * N_BUCKETS * N_LINK_COLUMNS,
        F,
        real + L.KF_STATE,
        now,
        F[real + L.KF_NOMINAL],
        out,
        at,
    )
    link = Z[L.O_LINK] + k * L.W_LINK
    backlog_bits = Z[link + L.K_PENDING_BITS] + unsent_bits(Z, F, k, now)
    out[at] = backlog_bits / BITS_PER_BYTE
    out[at + 1] = backlog_bits / F[real + L.KF_STATE]
    out[at + 2] = staged_bits(Z, F, k, now) / BITS_PER_BYTE
    out[at + 3] = Z[link + L.K_FLOWS]
    out[at + RETRANSMISSION_AT] = retransmitted(Z, F, k)


def retransmitted(Z: IntArray, F: FloatArray, k: int) -> float:
    """Share of segments sent again now, as the senders of the flows of link k would count them."""
    link = Z[L.O_LINK] + k * L.W_LINK
    real = Z[L.OF_LINK] + k * L.WF_LINK
    n = Z[link + L.K_FLOWS]
    if Z[link + L.K_CONGESTED] == 0:
        return F[real + L.KF_LOSS] if n > 0 else 0.0
    each_bps = F[real + L.KF_TOTAL_RATE] / (n * Z[link + L.K_CONNECTIONS]) if n > 0 else 0.0
    return retransmitted_share(
        each_bps, F[real + L.KF_ROUND_TRIP_S], Z[link + L.K_SEGMENT_BYTES], F[real + L.KF_LOSS]
    )


def read_telemetry(Z: IntArray, F: FloatArray, P: IntArray, out: FloatArray, legal: IntArray) -> None:
    """All fields in the order of the schema into `out`, legal moves per PD cluster into `legal` (3 each)."""
    at = 0
    for pd in range(Z[L.N_PD]):
        read_site(Z, F, P, pd, out, at)
        at += N_PD_FIELDS
        to_decode, none, to_prefill = site_legal(Z, pd)
        legal[3 * pd] = to_decode
        legal[3 * pd + 1] = none
        legal[3 * pd + 2] = to_prefill
    for pool in range(Z[L.N_PRFAAS]):
        read_pool(Z, P, pool, out, at)
        at += N_PRFAAS_FIELDS
    for k in range(Z[L.N_LINK]):
        read_link(Z, F, k, out, at)
        at += N_LINK_FIELDS


#: Whole numbers of `Totals` before the rejections by reason, in order.
N_WHOLE_TOTALS = 17


N_REASONS, N_PREFIX = len(REJECT_REASONS), len(PREFIX_COUNTERS)
#: All of them: then the rejections by reason, then the counters of the prefix pools.
N_ALL_TOTALS = N_WHOLE_TOTALS + N_REASONS + N_PREFIX


def read_totals(Z: IntArray, F: FloatArray, C: IntArray, whole: IntArray, real: FloatArray) -> None:
    """`Totals` as whole numbers (N_ALL_TOTALS) and reals (bits, peak per link)."""
    account_links(Z, F)
    now = Z[L.NOW]
    rejected = Z[L.REJECT_OVER_LIMIT] + Z[L.REJECT_KV] + Z[L.REJECT_QUEUE]
    for k in range(6, N_WHOLE_TOTALS):
        whole[k] = 0
    whole[0] = now
    whole[1] = Z[L.ARRIVED]
    whole[2] = Z[L.FINISHED]
    whole[3] = rejected
    whole[4] = Z[L.ABORTED]
    whole[5] = Z[L.REMOTE]
    whole[6] = Z[L.CONVERSIONS]
    whole[7] = Z[L.INVALID_MOVES]
    whole[8] = integral_at(Z, L.WAITING, now)
    for pool in range(Z[L.N_POOL]):
        q = Z[L.O_POOL] + pool * L.W_POOL
        at = 9 if pool < Z[L.N_PRFAAS] else 11
        whole[at] += integral_at(Z, q + L.Q_BUSY, now)
        whole[at + 1] += integral_at(Z, q + L.Q_IN_ROLE, now)
    for pd in range(Z[L.N_PD]):
        site = Z[L.O_PD] + pd * L.W_PD
        whole[13] += integral_at(Z, site + L.D_SEQ, now)
        whole[14] += integral_at(Z, site + L.D_SLOTS, now)
    whole[15] = Z[L.FIRST_TOKENS]
    whole[16] = Z[L.GOOD]
    whole[17] = Z[L.REJECT_OVER_LIMIT]
    whole[18] = Z[L.REJECT_KV]
    whole[19] = Z[L.REJECT_QUEUE]
    for k in range(N_PREFIX):
        whole[N_WHOLE_TOTALS + N_REASONS + k] = C[X.INPUT_TOKENS + k] if C[X.ON] != 0 else 0
    n = Z[L.N_LINK]
    for k in range(n):
        real[k] = delivered_bits(Z, F, k)
        real[n + k] = F[Z[L.OF_LINK] + k * L.WF_LINK + L.KF_STATE + L.STATE_PEAK]


# ------------------------------------------------------------------ many envs in one call

#: What `step_many` does with an env: nothing, decide and run, run on, only read.
SKIP, DECIDE, RUN_ON, READ = 0, 1, 2, 3


def step_many(
    Zs: IntArray,
    Fs: FloatArray,
    Cs: IntArray,
    Ps: IntArray,
    first: int,
    last: int,
    task: IntArray,
    until_ns: IntArray,
    by_margin: int,
    value: FloatArray,
    move: IntArray,
    abundant: IntArray,
    scales: tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, IntArray],
    values: FloatArray,
    observation: FloatArray,
    legal: IntArray,
    whole: IntArray,
    real: FloatArray,
    clipped: IntArray,
    status: IntArray,
) -> None:
    """Step the envs first..last-1, each by its `task`; row e of every array belongs to env e.

    Args:
        Zs: (n, ints), with `Fs` (n, reals), `Cs` (n, caches) and `Ps` (n, requests, columns) the states.
        first: first env.
        last: one past the last env.
        task: (n,) SKIP, DECIDE, RUN_ON or READ.
        until_ns: (n,) instant to run to.
        by_margin: 1 if `value` holds margins in s, 0 for thresholds in tokens.
        value: (n, n_pd).
        move: (n, n_pd).
        abundant: (n, n_pd) 1 where the cache rule is the abundant one.
        scales: constants of the encoding.
        values: (n, fields) out, readings in physical units.
        observation: (n, fields) float32 out.
        legal: (n, 3 n_pd) out.
        whole: (n, whole totals) out.
        real: (n, 2 n_links) out.
        clipped: (n,) number of clipped values, out.
        status: (n,) RAN, or what must grow before RUN_ON, out.
    """
    low, high, bend, bottom, inverse, flag = scales
    for e in range(first, last):
        if task[e] == SKIP:
            continue
        Z, F, C, P = Zs[e], Fs[e], Cs[e], Ps[e]
        if task[e] == DECIDE:
            for pd in range(Z[L.N_PD]):
                apply_decision(Z, F, pd, by_margin, value[e, pd], move[e, pd], abundant[e, pd])
        if task[e] != READ:
            status[e] = run(Z, F, C, P, until_ns[e], False)
            if status[e] != RAN:
                continue
        read_telemetry(Z, F, P, values[e], legal[e])
        clipped[e] = encode_values(values[e], low, high, bend, bottom, inverse, flag, observation[e])
        read_totals(Z, F, C, whole[e], real[e])
