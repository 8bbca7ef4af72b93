"""The paper's throughput model (section 3.4, equations 1-8), the search for its optimum, planning backwards.

Two readings of the same equations. `representative` is the paper's: each stage works on one length, the mean
of the requests it gets. `service` takes true mean service times. Prefill time is convex in length, so the
first flatters every deployment by a few percent; the second is the rate at which queues begin to grow without
bound. Neither knows queues, bursts, the time of a transfer or the cost of a conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import DecodeProfile, PrefillArrays, PrefillProfile
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.scenarios.models import Deployment, Scenario
from prfaas_env.simulator.formulas import BITS_PER_BYTE, FloatArray, decode_step_s
from prfaas_env.sites import arrival_shares, sites_of
from prfaas_env.workload.laws import LengthLaw
from prfaas_env.workload.means import input_law, mean_output_tokens

Means = Literal["representative", "service"]

_THRESHOLD_STEP_TOKENS = 100.0
#: Thresholds of the search: 1,000 to 131,072 tokens in steps of 100, the last step clipped.
THRESHOLDS_TOKENS: FloatArray = np.append(np.arange(1_000.0, 131_072.0, _THRESHOLD_STEP_TOKENS), 131_072.0)
THRESHOLDS_TOKENS.setflags(write=False)

#: Link sizes that planning backwards may choose, bit/s.
LINK_LADDER_BPS: tuple[float, ...] = tuple(g * 1e9 for g in (1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400))
#: Most instances of a deployment that planning backwards considers.
MAX_INSTANCES = 10_000

#: A share of requests below this is none at all (it is rounding of a sum of weights).
_NO_SHARE = 1e-12
#: Relative difference below which two rates are a tie.
_TIE = 1e-9


# Equations 1 to 8. Arguments are numbers or arrays that broadcast.


def kv_rate_bps(kv_bits: ArrayLike, prefill_s: ArrayLike) -> FloatArray:
    """Equation 1: bit/s of KV cache that one instance makes, Phi_kv(l) = S_kv(l) / T_prefill(l)."""
    return _divide(kv_bits, prefill_s)


def min_egress_bps(n_instances: ArrayLike, kv_bits: ArrayLike, prefill_s: ArrayLike) -> FloatArray:
    """Equation 2: bit/s that keep `n_instances` (N / P) busy prefill instances from waiting for the link.

    `kv_bits` and `prefill_s` are means over the offloaded requests, or the values at their mean length.
    """
    return np.asarray(n_instances, dtype=np.float64) * kv_rate_bps(kv_bits, prefill_s)


def theta_prfaas_rps(
    n_prfaas: ArrayLike, prefill_s: ArrayLike, link_bps: ArrayLike, kv_bits: ArrayLike
) -> FloatArray:
    """Equation 3: offloaded requests per second, limited by remote prefill or by the link."""
    return np.minimum(_divide(n_prfaas, prefill_s), _divide(link_bps, kv_bits))


def theta_pdp_rps(n_prefill: ArrayLike, prefill_s: ArrayLike) -> FloatArray:
    """Equation 4: requests per second that the local prefill instances take."""
    return _divide(n_prefill, prefill_s)


def theta_pdd_rps(
    n_decode: ArrayLike, slots: ArrayLike, step_s: ArrayLike, output_tokens_mean: ArrayLike
) -> FloatArray:
    """Equation 5: requests per second that the decode instances finish, each `slots` (BS_max) at a time."""
    tokens_per_s = np.asarray(n_decode, dtype=np.float64) * _divide(slots, step_s)
    return _divide(tokens_per_s, output_tokens_mean)


def path_limit_rps(theta_rps: ArrayLike, share: ArrayLike) -> FloatArray:
    """Arrival rate at which a path that gets `share` of the requests is full; infinite for a share of 0."""
    used = np.asarray(share, dtype=np.float64) > 0.0
    return np.where(used, _divide(theta_rps, np.where(used, share, 1.0)), np.inf)


def lambda_max_rps(
    theta_prfaas: ArrayLike, theta_pdp: ArrayLike, theta_pdd: ArrayLike, offload_share: ArrayLike
) -> FloatArray:
    """Equation 6: the largest arrival rate that all three stages carry; `offload_share` is p."""
    remote = path_limit_rps(theta_prfaas, offload_share)
    local = path_limit_rps(theta_pdp, 1.0 - np.asarray(offload_share, dtype=np.float64))
    return np.minimum(np.minimum(remote, local), theta_pdd)


def prefill_gap_rps(theta_prfaas: ArrayLike, theta_pdp: ArrayLike, offload_share: ArrayLike) -> FloatArray:
    """Equation 7 as a difference: Theta_prfaas / p - Theta_pdp / (1 - p).

    It is 0 at the best threshold, positive when the remote path has room to spare (lower the threshold).
    """
    remote = path_limit_rps(theta_prfaas, offload_share)
    return remote - path_limit_rps(theta_pdp, 1.0 - np.asarray(offload_share, dtype=np.float64))


def stage_gap_rps(theta_prfaas: ArrayLike, theta_pdp: ArrayLike, theta_pdd: ArrayLike) -> FloatArray:
    """Equation 8 as a difference: Theta_prfaas + Theta_pdp - Theta_pdd.

    Positive when decode is the narrower stage. Only right where equation 7 holds: with one prefill path full
    and the other idle it can be positive although prefill is the bottleneck.
    """
    both = np.add(theta_prfaas, theta_pdp, dtype=np.float64)
    return np.subtract(both, theta_pdd, dtype=np.float64)


def _divide(numerator: ArrayLike, denominator: ArrayLike) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64)


def decode_batch(decode: DecodeProfile, input_tokens_mean: float) -> int:
    """Sequences that a full decode instance holds: its slots, or fewer where KV room runs out first.

    Admission reserves `kv_reserve_tokens` beyond the input; requests count at their mean length. At least 1.
    """
    if decode.kv_capacity_tokens is None:
        return decode.slots
    room = decode.kv_capacity_tokens / (input_tokens_mean + decode.kv_reserve_tokens)
    return min(decode.slots, max(int(room), 1))


def decode_instance_rps(decode: DecodeProfile, input_tokens_mean: float, output_tokens_mean: float) -> float:
    """Requests per second of one full decode instance (equation 5 with N_d = 1).

    The step is taken at the full batch, each sequence at its mean context: its input and half of its output.
    """
    batch = decode_batch(decode, input_tokens_mean)
    context_tokens = round(batch * (input_tokens_mean + output_tokens_mean / 2.0))
    step_s = decode_step_s(decode.a_s, decode.b_s_per_sequence, decode.c_s_per_token, batch, context_tokens)
    return float(theta_pdd_rps(1, batch, step_s, output_tokens_mean))


# The search.


@dataclass(frozen=True)
class Optimum:
    """One point of the throughput model.

    `threshold_tokens` is infinite for "never offload". A path that gets no requests has a Theta of 0.
    `egress_bps` is at `lambda_max_rps`. Service TTFT is prefill service time alone: no queue, no transfer; NaN
    where the search was told to leave it out.
    """

    threshold_tokens: float
    n_prfaas: float
    n_prefill: int
    n_decode: int
    theta_prfaas_rps: float
    theta_pdp_rps: float
    theta_pdd_rps: float
    lambda_max_rps: float
    egress_bps: float
    offload_share: float
    service_ttft_mean_s: float
    service_ttft_p90_s: float

    def as_json(self) -> dict[str, Any]:
        """The fields in order, with null for what is infinite or was left out."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class RemotePath:
    """PrfaaS instances with one prefill profile behind one link; a part of a shared cluster need not be whole."""

    prefill: PrefillProfile
    n_prfaas: float
    link_bps: float


@dataclass(frozen=True)
class _Demand:
    """What one request of each path asks for, by threshold; all of shape (n_thresholds,).

    Values of a path that gets no request are 0.
    """

    threshold_tokens: FloatArray
    share: FloatArray
    """P(L > t)."""
    remote_s: FloatArray
    local_s: FloatArray
    remote_bits: FloatArray


def _share(lengths: LengthLaw, thresholds_tokens: FloatArray) -> FloatArray:
    share = lengths.survival(thresholds_tokens)
    return np.where(share < _NO_SHARE, 0.0, np.where(share > 1.0 - _NO_SHARE, 1.0, share))


def _kv_bits(kv: KVLayout, tokens: FloatArray) -> FloatArray:
    whole = np.rint(tokens).astype(np.int64)
    return BITS_PER_BYTE * kv.transfer_bytes_array(whole).astype(np.float64)


def _remote_s(
    lengths: LengthLaw,
    remote: PrefillProfile,
    t: FloatArray,
    means: Means,
    share: FloatArray | None = None,
) -> FloatArray:
    """Prefill time of an offloaded request by threshold, shape (n_thresholds,); of no meaning where none goes."""
    share = _share(lengths, t) if share is None else share
    goes = share > 0.0
    if means == "representative":
        return remote.seconds_array(np.where(goes, lengths.mean_above(t), 0.0))
    return lengths.partial_expectation(remote.seconds_array, t)[0] / np.where(goes, share, 1.0)


def _demand(
    lengths: LengthLaw,
    remote: PrefillProfile | None,
    local: PrefillProfile,
    kv: KVLayout,
    thresholds_tokens: FloatArray,
    means: Means,
) -> _Demand:
    share = _share(lengths, thresholds_tokens)
    # Thresholds with no request between them give the same point: keep the first of each run.
    first = np.concatenate([[True], share[1:] != share[:-1]])
    t, share = thresholds_tokens[first], share[first]
    goes, stays = share > 0.0, share < 1.0
    remote_s = np.full(len(t), np.inf) if remote is None else _remote_s(lengths, remote, t, means, share)
    if means == "representative":
        l_long = np.where(goes, lengths.mean_above(t), 0.0)
        l_short = np.where(stays, lengths.mean_below(t), 0.0)
        local_s = local.seconds_array(l_short)
        bits = _kv_bits(kv, l_long)
    else:
        p, rest = np.where(goes, share, 1.0), np.where(stays, 1.0 - share, 1.0)
        local_s = lengths.partial_expectation(local.seconds_array, t)[1] / rest
        bits = lengths.partial_expectation(lambda tokens: _kv_bits(kv, tokens), t)[0] / p
    return _Demand(
        threshold_tokens=t,
        share=share,
        remote_s=np.where(goes, remote_s, 0.0),
        local_s=np.where(stays, local_s, 0.0),
        remote_bits=np.where(goes, bits, 0.0),
    )


class DemandMemory:
    """What searches over one law have in common: the demand by threshold, of the law that was searched last.

    A planner that searches several splits of one reading gives each search the same memory. Results do not change.
    """

    def __init__(self) -> None:
        self._lengths: LengthLaw | None = None
        self._found: dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]] = {}

    def recall(
        self,
        make: Callable[..., Any],
        lengths: LengthLaw,
        profiles: tuple[Any, ...],
        thresholds_tokens: FloatArray,
        means: Means,
    ) -> Any:
        """`make(lengths, *profiles, thresholds_tokens, means)`, or what it gave for the same arguments before."""
        if lengths is not self._lengths:
            self._lengths, self._found = lengths, {}
        key = (make, *(id(profile) for profile in profiles), thresholds_tokens.tobytes(), means)
        if key not in self._found:
            # The profiles are kept too: an identity is only unique among objects that live.
            self._found[key] = (profiles, make(lengths, *profiles, thresholds_tokens, means))
        return self._found[key][1]


def _best(limit_rps: FloatArray, headroom_rps: FloatArray) -> tuple[int, int]:
    """Row and column of the best point: highest limit, then widest prefill, then the first."""
    tied = limit_rps >= limit_rps.max() * (1.0 - _TIE)
    room = np.where(tied, headroom_rps, -np.inf)
    row, column = np.unravel_index(int(np.argmax(room >= room.max() * (1.0 - _TIE))), limit_rps.shape)
    return int(row), int(column)


def search(
    lengths: LengthLaw,
    *,
    remote: PrefillProfile | None,
    local: PrefillProfile,
    decode: DecodeProfile,
    kv: KVLayout,
    n_prfaas: float,
    n_local: int,
    link_bps: float,
    output_tokens_mean: float,
    splits: Sequence[int] | None = None,
    thresholds_tokens: FloatArray = THRESHOLDS_TOKENS,
    means: Means = "representative",
    more: Sequence[RemotePath] = (),
    service_ttft: bool = True,
    memory: DemandMemory | None = None,
) -> Optimum:
    """Best threshold and split of `n_local` instances: the paper's exhaustive 2-D search (section 3.4).

    Ties, which are common where decode is the limit: among points whose `lambda_max_rps` differs by less than
    1e-9 of it, the one whose prefill has most room, min(Theta_prfaas / p, Theta_pdp / (1 - p)), that is where
    equation 7 holds best; then the first threshold, then the first split, in the order given (the defaults
    rise).

    Args:
        lengths: law of the incremental input length.
        remote: prefill profile of a PrfaaS instance; None without one.
        local: prefill profile of a local instance.
        decode: decode profile of a local instance.
        kv: bytes of KV cache.
        n_prfaas: PrfaaS instances; with 0, "never" (an infinite threshold) is the only one considered.
        n_local: local instances, prefill and decode together.
        link_bps: capacity of the link, bit/s.
        output_tokens_mean: mean output length (L_out).
        splits: numbers of prefill instances to consider; default 1 to n_local - 1.
        thresholds_tokens: thresholds to consider, shape (n,); a request goes remote when it is longer.
        means: the paper's representative lengths, or true mean service times.
        more: further remote paths. Each offloaded request takes one of them, so their Thetas (equation 3) add up.
            Service TTFT counts the first path's profile alone.
        service_ttft: work out the service TTFTs too, which takes more than half of the time.
        memory: shared by searches over the same law, which then cost less; the result is the same.

    Raises:
        PrfaasError: counts, rates or lengths that make no sense.
    """
    if n_prfaas == 0 and not more:
        thresholds_tokens = np.array([np.inf])
    n_prefill = _legal_splits(n_local, splits)
    if n_prfaas < 0 or (n_prfaas > 0 and remote is None):
        raise PrfaasError(f"n_prfaas is {n_prfaas}; allowed: 0 or more, and 0 without a remote profile")
    if not link_bps >= 0.0:
        raise PrfaasError(f"link_bps is {link_bps}; allowed: 0 or more")
    if not output_tokens_mean > 0.0:
        raise PrfaasError(f"output_tokens_mean is {output_tokens_mean}; allowed: above 0")
    recall = (memory or DemandMemory()).recall
    grid = np.asarray(thresholds_tokens, dtype=np.float64)
    demand: _Demand = recall(_demand, lengths, (remote, local, kv), grid, means)
    p = demand.share[:, None]
    # A path without requests has no service time: its Theta is 0, and its limit infinite.
    theta_remote = np.where(
        p > 0.0,
        theta_prfaas_rps(n_prfaas, demand.remote_s[:, None], link_bps, demand.remote_bits[:, None]),
        0.0,
    )
    for path in more:
        seconds = recall(_remote_s, lengths, (path.prefill,), demand.threshold_tokens, means)
        theta = theta_prfaas_rps(path.n_prfaas, seconds[:, None], path.link_bps, demand.remote_bits[:, None])
        theta_remote = theta_remote + np.where(p > 0.0, theta, 0.0)
    theta_local = np.where(p < 1.0, theta_pdp_rps(n_prefill[None, :], demand.local_s[:, None]), 0.0)
    theta_decode = (n_local - n_prefill) * decode_instance_rps(decode, lengths.mean, output_tokens_mean)
    # Equation 6 (`lambda_max_rps`), with its two prefill terms kept: ties go to the widest prefill.
    prefill = np.minimum(path_limit_rps(theta_remote, p), path_limit_rps(theta_local, 1.0 - p))
    limit = np.minimum(prefill, theta_decode[None, :])
    i, j = _best(limit, prefill)
    threshold, share = float(demand.threshold_tokens[i]), float(demand.share[i])
    return Optimum(
        threshold_tokens=threshold,
        n_prfaas=n_prfaas + sum(path.n_prfaas for path in more),
        n_prefill=int(n_prefill[j]),
        n_decode=n_local - int(n_prefill[j]),
        theta_prfaas_rps=float(theta_remote[i, 0]),
        theta_pdp_rps=float(theta_local[i, j]),
        theta_pdd_rps=float(theta_decode[j]),
        lambda_max_rps=float(limit[i, j]),
        egress_bps=float(limit[i, j]) * share * float(demand.remote_bits[i]),
        offload_share=share,
        service_ttft_mean_s=(
            service_ttft_mean_s(lengths, remote, local, threshold) if service_ttft else math.nan
        ),
        service_ttft_p90_s=(
            float(service_ttft_quantile_s(lengths, remote, local, threshold, 0.9))
            if service_ttft
            else math.nan
        ),
    )


def search_paths(lengths: LengthLaw, paths: Sequence[RemotePath], **arguments: Any) -> Optimum:
    """`search` over any number of remote paths, none included.

    Args:
        lengths: law of the incremental input length.
        paths: remote paths; one without instances is left out.
        arguments: further ones of `search`.
    """
    used = [path for path in paths if path.n_prfaas > 0.0]
    first = used[0] if used else None
    return search(
        lengths,
        remote=None if first is None else first.prefill,
        n_prfaas=0 if first is None else first.n_prfaas,
        link_bps=0.0 if first is None else first.link_bps,
        more=used[1:],
        **arguments,
    )


def capacity(
    lengths: LengthLaw,
    *,
    remote: PrefillProfile | None,
    local: PrefillProfile,
    decode: DecodeProfile,
    kv: KVLayout,
    n_prfaas: int,
    n_local: int,
    link_bps: float,
    output_tokens_mean: float,
    threshold_tokens: float,
    n_prefill: int,
    means: Means = "representative",
) -> Optimum:
    """One point of the model: this threshold, this split. Other arguments and errors as in `search`.

    Args:
        threshold_tokens: requests longer than this go remote; 0 = all, infinite = none. Without PrfaaS
            instances no request may exceed it, and the result says infinite.
        n_prefill: local instances that prefill, 0 to n_local - 1.
    """
    if n_prfaas == 0 and float(_share(lengths, np.array(threshold_tokens))) > 0.0:
        raise PrfaasError(
            f"threshold_tokens is {threshold_tokens:g} but there is no PrfaaS instance; "
            "allowed: a threshold that no request exceeds"
        )
    point = search(
        lengths,
        remote=remote,
        local=local,
        decode=decode,
        kv=kv,
        n_prfaas=n_prfaas,
        n_local=n_local,
        link_bps=link_bps,
        output_tokens_mean=output_tokens_mean,
        splits=(n_prefill,),
        thresholds_tokens=np.array([float(threshold_tokens)]),
        means=means,
    )
    return point


def _legal_splits(n_local: int, splits: Sequence[int] | None) -> FloatArray:
    if splits is None:
        splits = range(1, n_local)
    if not splits or min(splits) < 0 or max(splits) >= n_local:
        raise PrfaasError(
            f"no legal split: {n_local} local instances, n_prefill {list(splits)}; "
            "allowed: n_prefill from 0, and at least one instance left to decode"
        )
    return np.array(splits, dtype=np.float64)


# First-token time as the paper counts it: service time, empty queues, no transfer.


def service_ttft_mean_s(
    lengths: LengthLaw, remote: PrefillProfile | None, local: PrefillProfile, threshold_tokens: float
) -> float:
    """Mean prefill service time in seconds of all requests, remote above the threshold and local up to it.

    Infinite when requests go remote and `remote` is None.
    """
    total = float(lengths.partial_expectation(local.seconds_array, threshold_tokens)[1])
    if float(_share(lengths, np.array(threshold_tokens))) > 0.0:
        if remote is None:
            return math.inf
        total += float(lengths.partial_expectation(remote.seconds_array, threshold_tokens)[0])
    return total


def service_ttft_quantile_s(
    lengths: LengthLaw,
    remote: PrefillProfile | None,
    local: PrefillProfile,
    threshold_tokens: ArrayLike,
    q: float,
) -> FloatArray:
    """Quantile q in seconds of the prefill service time of all requests, remote and local ones mixed.

    The smallest time that a share q of the requests does not exceed, exact to about 1e-9 of the longest. Each
    profile rises with length, so the requests done within x seconds are those up to a length on either path.

    Args:
        threshold_tokens: any shape; the result has the same.
        q: above 0, at most 1.
    """
    t = np.asarray(threshold_tokens, dtype=np.float64).ravel()[:, None]
    longest = lengths.quantile(1.0)
    slowest = local.seconds_array(longest)
    if remote is not None:
        slowest = np.maximum(slowest, remote.seconds_array(longest))
    share = _share(lengths, t)
    low, high = np.zeros_like(t), np.full_like(t, slowest)
    # Each round cuts the bracket into sections. For one threshold the calls cost most, for many the points.
    sections, rounds = (1024, 3) if t.size == 1 else (32, 6)
    steps = np.arange(1, sections + 1) / sections
    local_arrays, remote_arrays = local.arrays(), None if remote is None else remote.arrays()
    for _ in range(rounds):
        x = low + (high - low) * steps
        x[:, -1:] = high
        ends = [np.minimum(_tokens_within(local_arrays, x), t)]
        if remote_arrays is not None:
            ends.append(_tokens_within(remote_arrays, x))
        beyond = lengths.survival(np.stack(ends))
        within = 1.0 - beyond[0]
        if remote_arrays is not None:
            within += np.maximum(share - beyond[1], 0.0)
        # The end of the bracket holds by construction, whatever the rounding of a sum that is q.
        reached = within >= q - _NO_SHARE
        reached[:, -1] = True
        k = np.argmax(reached, axis=1)[:, None]
        low = np.where(k > 0, np.take_along_axis(x, np.maximum(k - 1, 0), axis=1), low)
        high = np.take_along_axis(x, k, axis=1)
    if remote is None:
        high = np.where(1.0 - share >= q - _NO_SHARE, high, np.inf)
    return high.reshape(np.shape(threshold_tokens))


def _tokens_within(a: PrefillArrays, seconds: FloatArray) -> FloatArray:
    """The longest length whose prefill takes at most `seconds`, same shape: the inverse of a profile.

    Below 0 where not even an empty prompt does, infinite where every length does.
    """
    k = np.clip(np.searchsorted(a.c0_s, seconds, side="right") - 1, 0, len(a.c0_s) - 1)
    excess_s, c1, c2 = seconds - a.c0_s[k], a.c1_s[k], a.c2_s[k]
    # The root of c2 x^2 + c1 x = excess, written so that it also holds for c2 = 0.
    root = np.sqrt(np.maximum(c1 * c1 + 4.0 * c2 * excess_s, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        x = 2.0 * excess_s / (c1 + root)
    # A flat segment: chosen only as the last one (every length) or below the first point (none).
    flat = (c1 + root) == 0.0
    return a.start_tokens[k] + np.where(flat, np.where(excess_s >= 0.0, np.inf, -np.inf), x)


# Whole scenarios.


@dataclass(frozen=True)
class _Site:
    """One PrfaaS cluster or none, and one PD cluster, as the equations read them."""

    remote: PrefillProfile | None
    local: PrefillProfile
    decode: DecodeProfile
    n_prfaas: int
    n_prefill: int
    n_local: int
    link_bps: float
    splits: range

    def fixed(self) -> dict[str, Any]:
        """The arguments of `search` and `capacity` that describe the hardware."""
        names = ("remote", "local", "decode", "n_prfaas", "n_local", "link_bps")
        return {name: getattr(self, name) for name in names}


def _site(scenario: Scenario, deployment: Deployment, link_bps: float | None = None) -> _Site:
    """The deployment on the scenario's model; `link_bps` stands in for its own link where given.

    Raises:
        PrfaasError: more clusters than the equations know.
    """
    if len(deployment.prfaas) > 1 or len(deployment.pd) > 1:
        raise PrfaasError(
            f"scenario {scenario.name}: planning backwards and the paper's baselines know at most one prfaas "
            f"cluster and one pd cluster, found {len(deployment.prfaas)} and {len(deployment.pd)}"
        )
    pd = deployment.pd[0]
    local = scenario.hardware_of(pd)
    assert local.decode is not None  # a scenario refuses a PD cluster that cannot decode
    n_local = pd.n_prefill + pd.n_decode
    # A remote cluster without a link cannot be used.
    remote = deployment.prfaas[0] if deployment.links else None
    own_bps = deployment.links[0].capacity_bps if deployment.links else 0.0
    return _Site(
        remote=None if remote is None else scenario.hardware_of(remote).prefill,
        local=local.prefill,
        decode=local.decode,
        n_prfaas=0 if remote is None else remote.n_instances,
        n_prefill=pd.n_prefill,
        n_local=n_local,
        link_bps=own_bps if link_bps is None else link_bps,
        splits=range(max(1, pd.prefill_floor), n_local - pd.min_decode + 1),
    )


@dataclass(frozen=True)
class SitePlan:
    """The equations' answer for one PD cluster of a deployment with several clusters.

    `arrival_share` is its part of the scenario's arrivals; `optimum.n_prfaas` the PrfaaS instances that count for
    it, each shared cluster divided in proportion to arrivals, and need not be whole.
    """

    name: str
    arrival_share: float
    optimum: Optimum

    @property
    def scenario_limit_rps(self) -> float:
        """Arrival rate of the whole scenario at which this PD cluster is full; infinite without arrivals here."""
        return self.optimum.lambda_max_rps / self.arrival_share if self.arrival_share > 0 else math.inf


def plan_sites(scenario: Scenario, means: Means = "representative") -> tuple[SitePlan, ...]:
    """Best threshold and split of every PD cluster, each planned by itself on its part of the remote side.

    See `prfaas_env.sites` for how a shared PrfaaS cluster is divided. A PD cluster without arrivals has no part.
    The deployment as a whole carries the smallest `scenario_limit_rps`. With one cluster of each kind this is
    `plan`'s "prfaas".
    """
    lengths, output_tokens = input_law(scenario.workload), mean_output_tokens(scenario.workload)
    plans = []
    for site, share in zip(sites_of(scenario), arrival_shares(scenario.deployment), strict=True):
        paths = [
            RemotePath(r.prefill, r.cluster.n_instances * r.share, r.link.capacity_bps)
            for r in site.routes
            if r.share > 0.0
        ]
        optimum = search_paths(
            lengths,
            paths,
            local=site.prefill,
            decode=site.decode,
            kv=scenario.model.kv,
            n_local=site.cluster.n_prefill + site.cluster.n_decode,
            output_tokens_mean=output_tokens,
            splits=site.splits,
            means=means,
        )
        plans.append(SitePlan(site.cluster.name, share, optimum))
    return tuple(plans)


def plan(scenario: Scenario, means: Means = "representative") -> dict[str, Optimum]:
    """The scenario's best threshold and split beside the paper's two baselines (table 6).

    `prfaas` is the scenario's own deployment with its instances divided at best; without a remote cluster
    its threshold is infinite. `homogeneous` (best split of the shipped 9 + 3 local instances) and `naive`
    (the shipped 4 remote and 8 decode instances, everything remote) serve the same load with the same model;
    the naive one uses the scenario's link. A baseline whose hardware the scenario's model does not have is
    left out. The link counts at its nominal capacity, a regime chain of lengths with its long-run shares,
    a trace with the lengths of its slice.

    Raises:
        PrfaasError: more than one prfaas or pd cluster, or a load the equations cannot read.
    """
    own = _site(scenario, scenario.deployment)
    fixed: dict[str, Any] = {
        "lengths": input_law(scenario.workload),
        "output_tokens_mean": mean_output_tokens(scenario.workload),
        "kv": scenario.model.kv,
        "means": means,
    }
    found = {"prfaas": search(**fixed, **own.fixed(), splits=own.splits)}
    for name in ("homogeneous", "naive"):
        deployment = load_scenario(name).deployment
        if not _has_hardware(scenario, deployment):
            continue
        site = _site(scenario, deployment, own.link_bps if own.n_prfaas and deployment.links else None)
        found[name] = (
            search(**fixed, **site.fixed(), splits=site.splits)
            if site.n_prefill
            else capacity(**fixed, **site.fixed(), threshold_tokens=0.0, n_prefill=0)
        )
    return found


def _has_hardware(scenario: Scenario, deployment: Deployment) -> bool:
    known = scenario.model.hardware
    return all(c.hardware in known for c in deployment.prfaas) and all(
        c.hardware in known and known[c.hardware].decode is not None for c in deployment.pd
    )


# Planning backwards.


@dataclass(frozen=True)
class Sizing:
    """The cheapest deployment for a demand; `link_bps` is 0 without a remote cluster."""

    optimum: Optimum
    link_bps: float
    egress_bps: float
    """Egress at the demanded rate (`optimum.egress_bps` is at the largest rate)."""
    cost: float


def cheapest(
    scenario: Scenario,
    *,
    rate_rps: float,
    ttft_p90_s: float,
    prices: Mapping[str, float] | None = None,
    link_price_per_gbps: float = 0.0,
    means: Means = "service",
) -> Sizing:
    """Cheapest counts, threshold and link for a rate and a service TTFT P90: the equations read backwards.

    For each threshold ("always", the grid of `search`, "never") that meets the TTFT, every pool gets the
    fewest instances that carry its part of the rate (`lambda_max_rps` >= rate) and the link the smallest size
    of `LINK_LADDER_BPS` that carries the egress. True mean service times are the default here, since at the
    optimum of the representative means real queues already grow without bound. Equal costs: fewest
    instances, then the largest `lambda_max_rps`, then the lowest threshold.

    Args:
        scenario: names the hardware on both sides and the load; its own counts, link and rate do not matter.
        rate_rps: requests per second to carry.
        ttft_p90_s: largest P90 of prefill service time, seconds.
        prices: price of one instance by hardware name; 1 where none is given.
        link_price_per_gbps: price of 1e9 bit/s of link.
        means: how service times are averaged.

    Raises:
        PrfaasError: a rate, time or price that makes no sense, unknown hardware, a demand that cannot be met.
    """
    _check_demand(scenario, rate_rps, ttft_p90_s, prices or {}, link_price_per_gbps)
    site = _site(scenario, scenario.deployment)
    lengths = input_law(scenario.workload)
    output_tokens = mean_output_tokens(scenario.workload)
    thresholds = np.array([np.inf])
    if site.remote is not None:
        thresholds = np.concatenate([[0.0], THRESHOLDS_TOKENS, thresholds])
    demand = _demand(lengths, site.remote, site.local, scenario.model.kv, thresholds, means)
    p = demand.share
    # What no request exceeds is "never": no remote cluster and no link at all.
    t = np.where(p == 0.0, np.inf, demand.threshold_tokens)
    p90_s = service_ttft_quantile_s(lengths, site.remote, site.local, t, 0.9)
    meets = p90_s <= ttft_p90_s * (1.0 + 1e-6)  # the quantile is found to a little less than that
    if not meets.any():
        raise PrfaasError(
            f"no threshold gives a service TTFT P90 of {ttft_p90_s:g} s; the lowest on this hardware is "
            f"{p90_s.min():.6g} s"
        )
    decode_rps = decode_instance_rps(site.decode, lengths.mean, output_tokens)
    n_prfaas = _whole(rate_rps * p * demand.remote_s)
    n_prefill = _whole(rate_rps * (1.0 - p) * demand.local_s)
    n_decode = _whole(np.array(rate_rps / decode_rps))
    n_all = n_prfaas + n_prefill + n_decode
    egress_bps = rate_rps * p * demand.remote_bits
    ladder = np.array([0.0, *LINK_LADDER_BPS, np.inf])
    link_bps = ladder[np.searchsorted(ladder, egress_bps * (1.0 - _TIE), side="left")]
    possible = meets & (n_all <= MAX_INSTANCES) & np.isfinite(link_bps)
    if not possible.any():
        raise PrfaasError(
            f"no deployment carries {rate_rps:g} req/s with a service TTFT P90 of {ttft_p90_s:g} s: every "
            f"threshold needs more than {MAX_INSTANCES:,} instances or a link above "
            f"{LINK_LADDER_BPS[-1] / 1e9:g} Gbps"
        )
    remote_price, local_price = _instance_prices(scenario, prices or {})
    cost = (
        remote_price * n_prfaas + local_price * (n_prefill + n_decode) + link_price_per_gbps * link_bps / 1e9
    )
    limit = np.minimum(
        path_limit_rps(n_prfaas, p * demand.remote_s), path_limit_rps(n_prefill, (1.0 - p) * demand.local_s)
    )
    limit = np.minimum(limit, path_limit_rps(link_bps, p * demand.remote_bits))
    limit = np.minimum(limit, n_decode * decode_rps)
    # lexsort reads its keys from the last to the first.
    keys = (t, -limit, n_all, np.round(cost, 9))
    order = np.lexsort(tuple(np.where(possible, key, np.inf) for key in keys))
    i = int(order[0])
    optimum = capacity(
        lengths,
        remote=site.remote,
        local=site.local,
        decode=site.decode,
        kv=scenario.model.kv,
        n_prfaas=int(n_prfaas[i]),
        n_local=int(n_prefill[i] + n_decode),
        link_bps=float(link_bps[i]),
        output_tokens_mean=output_tokens,
        threshold_tokens=float(t[i]),
        n_prefill=int(n_prefill[i]),
        means=means,
    )
    return Sizing(optimum, float(link_bps[i]), float(egress_bps[i]), float(cost[i]))


def _whole(instances: FloatArray) -> FloatArray:
    """Instances in whole numbers; an excess that is mere rounding does not buy one more."""
    return np.ceil(instances * (1.0 - _TIE))


def _instance_prices(scenario: Scenario, prices: Mapping[str, float]) -> tuple[float, float]:
    """(price of a remote instance, price of a local one)."""
    deployment = scenario.deployment
    remote = prices.get(deployment.prfaas[0].hardware, 1.0) if deployment.prfaas else 0.0
    return remote, prices.get(deployment.pd[0].hardware, 1.0)


def _check_demand(
    scenario: Scenario, rate_rps: float, ttft_p90_s: float, prices: Mapping[str, float], link_price: float
) -> None:
    for name, value, unit in (("rate", rate_rps, "req/s"), ("service TTFT P90", ttft_p90_s, "s")):
        if not 0.0 < value < math.inf:
            raise PrfaasError(f"the {name} to plan for is {value:g} {unit}; allowed: above 0")
    known = sorted(scenario.model.hardware)
    for hardware, price in prices.items():
        if hardware not in scenario.model.hardware:
            raise PrfaasError(f"price: unknown hardware {hardware!r}; the model has {', '.join(known)}")
        if not 0.0 <= price < math.inf:
            raise PrfaasError(f"price of {hardware} is {price:g}; allowed: 0 or more")
    if not 0.0 <= link_price < math.inf:
        raise PrfaasError(f"the link price is {link_price:g} per Gbps; allowed: 0 or more")
