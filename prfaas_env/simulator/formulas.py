"""The arithmetic of the world: one copy of every formula, called by both engines and by the router.

Plain functions over numbers and one-dimensional arrays, without NumPy reductions, so that the interpreted
and the compiled result are equal bit for bit. Time is int64 nanoseconds; a duration is rounded once,
half-even, when it is scheduled.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
#: What a formula reads or fills: an array, or a list where plain Python is quicker.
Floats = FloatArray | list[float]
Ints = IntArray | list[int]

NS_PER_S = 1_000_000_000
BITS_PER_BYTE = 8
#: A time that never comes, far below the int64 limit so that sums of a few of them do not overflow.
NEVER_NS = 4_000_000_000_000_000_000
#: Before any time of an episode.
LONG_AGO_NS = -(1 << 61)


def ns_from_s(seconds: float) -> int:
    """Seconds (float) to nanoseconds (int), rounded half-even."""
    return round(seconds * 1e9)


def piecewise_s(start_tokens: Floats, c0_s: Floats, c1_s: Floats, c2_s: Floats, tokens: float) -> float:
    """Value in seconds at `tokens` of a piecewise quadratic.

    Segment k holds for `start_tokens[k] <= tokens < start_tokens[k + 1]`; its value is
    `c0 + c1 x + c2 x^2` with `x = tokens - start_tokens[k]`. Below the first start and above the last one
    the first and last segment go on. All arrays have shape (n_segments,).
    """
    k = 0
    n = len(start_tokens)
    while k + 1 < n and start_tokens[k + 1] <= tokens:
        k += 1
    x = tokens - start_tokens[k]
    return float(c0_s[k] + x * (c1_s[k] + x * c2_s[k]))


def prefill_s(
    start_tokens: Floats,
    c0_s: Floats,
    c1_s: Floats,
    c2_s: Floats,
    new_tokens: int,
    cached_tokens: int,
) -> float:
    """Prefill time in seconds of `new_tokens` behind a cached prefix of `cached_tokens`.

    With no cache it is the profile at the length (paper table 5). With a cache it is
    `T(cached + new) - T(cached) + T(0)`: for a quadratic profile exactly the fixed cost, the linear cost of
    the new tokens and their attention over the whole context.
    """
    if cached_tokens == 0:
        value = piecewise_s(start_tokens, c0_s, c1_s, c2_s, float(new_tokens))
    else:
        value = (
            piecewise_s(start_tokens, c0_s, c1_s, c2_s, float(cached_tokens + new_tokens))
            - piecewise_s(start_tokens, c0_s, c1_s, c2_s, float(cached_tokens))
            + piecewise_s(start_tokens, c0_s, c1_s, c2_s, 0.0)
        )
    return max(value, 0.0)


def kv_transfer_bytes(
    fixed_bytes: int,
    bytes_per_token: int,
    window_bytes_per_token: Ints,
    window_tokens: Ints,
    tokens: int,
) -> int:
    """Bytes of KV cache and state that cross the wire for `tokens` tokens (paper section 3.2, table 5).

    `fixed_bytes` (recurrent state, short convolutions) go once per request; full-attention layers send
    `bytes_per_token` each token; sliding-window group g sends its bytes for at most `window_tokens[g]`
    tokens. Window arrays have shape (n_groups,).
    """
    total = fixed_bytes + bytes_per_token * tokens
    for g in range(len(window_tokens)):
        total += window_bytes_per_token[g] * min(tokens, window_tokens[g])
    return int(total)


def rdma_s(n_bytes: int, rdma_bps: float, rdma_latency_s: float) -> float:
    """Hand-over time inside a PD cluster, not shared with anything."""
    return n_bytes * BITS_PER_BYTE / rdma_bps + rdma_latency_s


def decode_step_s(a_s: float, b_s: float, c_s: float, batch: int, context_tokens: int) -> float:
    """Decode step time in seconds: `a + b * batch + c * context tokens of the whole batch`."""
    return a_s + b_s * batch + c_s * context_tokens


def virtual_now(anchor_u: int, anchor_ns: int, ratio: float, now_ns: int) -> int:
    """Virtual decode time (nominal ns) at `now_ns`; it runs at `ratio` = nominal step / step since the anchor.

    At ratio 1 this is exact, so that it does not matter when the anchor was set.
    """
    if ratio == 1.0:
        return anchor_u + (now_ns - anchor_ns)
    return anchor_u + round((now_ns - anchor_ns) * ratio)


def virtual_when(anchor_u: int, anchor_ns: int, ratio: float, target_u: int) -> int:
    """Instant at which virtual decode time reaches `target_u`; exact at ratio 1."""
    if ratio == 1.0:
        return anchor_ns + (target_u - anchor_u)
    return anchor_ns + round((target_u - anchor_u) / ratio)


def virtual_ratio(
    token_u: int, a_s: float, b_s: float, c_s: float, batch: int, context_tokens: int, speed: float
) -> float:
    """Speed of virtual decode time: nominal step over the step of this batch at this instance speed."""
    return token_u / ns_from_s(decode_step_s(a_s, b_s, c_s, batch, context_tokens) / speed)


def pipelined_open_ns(prefill_ns: int, n_layers: int) -> int:
    """Delay from the start of a prefill to the opening of its layer-wise flow: T / n."""
    return round(prefill_ns / n_layers)


def pipelined_cap_bps(bits: float, prefill_ns: int) -> float:
    """Rate cap of a layer-wise flow until its prefill ends: S / T, in bit/s."""
    return bits / (prefill_ns / 1e9)


#: Rates are added up in whole units of this many bit/s, so that the order of adding does not matter.
RATE_UNIT_BPS = 2.0**-14
#: Largest capacity of a link, bit/s: what int64 units hold.
MAX_RATE_BPS = 5e14
#: Rate of a flow before it is settled for the first time.
NO_RATE_BPS = -1.0


#: The same for bits left of flows.
BIT_UNIT = 2.0**-10


def rate_units(rate_bps: float) -> int:
    """A rate in whole units of `RATE_UNIT_BPS`."""
    return round(rate_bps / RATE_UNIT_BPS)


def bit_units(bits: float) -> int:
    """Bits in whole units of `BIT_UNIT`."""
    return round(bits / BIT_UNIT)


def water_level_bps(capacity_bps: float, caps_bps: Floats) -> float:
    """Max-min fair sharing of one link: each flow gets the smaller of its cap and this level, in bit/s.

    The level starts at the even share; what flows with a cap below it leave raises it for the others.

    Args:
        capacity_bps: capacity of the link, bit/s, at most `MAX_RATE_BPS`.
        caps_bps: shape (n,), cap of each flow, bit/s, in any order; may be infinite.

    Returns:
        The level; infinite if every flow gets its cap.
    """
    n = len(caps_bps)
    n_capped = -1
    level_bps = 0.0
    while True:
        units, count = 0, 0
        for k in range(n):
            if caps_bps[k] <= level_bps:
                units += rate_units(caps_bps[k])
                count += 1
        if count == n:
            return math.inf
        if count == n_capped:
            return level_bps
        n_capped = count
        level_bps = max(level_bps, fair_share_bps(capacity_bps, units, n - count))


def fair_share_bps(capacity_bps: float, capped_units: int, n_flows: int) -> float:
    """Even share for `n_flows` flows of what flows at their cap leave of a link."""
    return max(capacity_bps - capped_units * RATE_UNIT_BPS, 0.0) / n_flows


#: Constant of `connection_rate_bps`: losses at even distance, every segment acknowledged.
LOSS_CONSTANT = math.sqrt(1.5)


def connection_rate_bps(rtt_s: float, window_bytes: float, segment_bytes: int, loss: float) -> float:
    """Steady rate of one TCP connection: window over round trip, or what loss allows, if that is less.

    The law of loss is that of Mathis, Semke, Mahdavi and Ott (1997): segment / rtt x sqrt(3/2) / sqrt(loss).
    Infinite at rtt 0.
    """
    if rtt_s <= 0.0:
        return math.inf
    rate_bps = window_bytes * BITS_PER_BYTE / rtt_s
    if loss > 0.0:
        rate_bps = min(rate_bps, segment_bytes * BITS_PER_BYTE / rtt_s * LOSS_CONSTANT / math.sqrt(loss))
    return rate_bps


def retransmitted_share(rate_bps: float, rtt_s: float, segment_bytes: int, loss: float) -> float:
    """Share of segments sent again on connections that get `rate_bps` each from a link that is their limit.

    A shared link holds a connection at a rate by dropping segments: the loss of `connection_rate_bps` at that rate,
    where it is above the loss of the way.
    """
    if rtt_s <= 0.0 or rate_bps <= 0.0:
        return loss
    ratio = segment_bytes * BITS_PER_BYTE / rtt_s * LOSS_CONSTANT / rate_bps
    return max(loss, min(ratio * ratio, 1.0))


def jitter_ns(mean_s: float, luck_ns: int) -> int:
    """Extra delay of a KV cache on a link whose mean is `mean_s`; `luck_ns` is the request's draw for a mean of 1 s."""
    return ns_from_s(mean_s * (luck_ns / 1e9))


def slowness(speed: float) -> int:
    """Rank of an instance by speed, 0 for full speed: the fastest idle instance takes the next prompt."""
    return round((1.0 - speed) * 1e6)


def flow_end_ns(now_ns: int, remaining_bits: float, rate_bps: float) -> int:
    """Instant at which a flow of `remaining_bits` ends at a constant rate; NEVER_NS at rate 0."""
    if remaining_bits <= 0.0:
        return now_ns
    if rate_bps <= 0.0:
        return NEVER_NS
    wait_ns = remaining_bits / rate_bps * 1e9
    if wait_ns >= 1e18:
        return NEVER_NS
    return now_ns + round(wait_ns)


def sent_bits(rate_bps: float, elapsed_ns: int) -> float:
    """Bits sent at a constant rate in `elapsed_ns`."""
    return rate_bps * (elapsed_ns / 1e9)


def left_bits(remaining_bits: float, rate_bps: float, elapsed_ns: int) -> float:
    """What is left of `remaining_bits` after `elapsed_ns` at a constant rate."""
    return max(remaining_bits - sent_bits(rate_bps, elapsed_ns), 0.0)
