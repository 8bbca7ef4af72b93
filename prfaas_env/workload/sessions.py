"""Conversations: multi-turn sessions with growing prompts and prefix ids, all drawn at reset."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import ndtri

from prfaas_env.base import MAX_S, PrfaasError, stream
from prfaas_env.simulator.formulas import NS_PER_S, FloatArray, IntArray, ns_from_s
from prfaas_env.workload.arrivals import MAX_REQUESTS, mean_arrival_rps, sample_arrivals_ns
from prfaas_env.workload.lengths import lengths_from, parameter_at
from prfaas_env.workload.models import (
    EmpiricalTurns,
    ExponentialThink,
    FixedThink,
    FixedTurns,
    SessionWorkload,
    ThinkTime,
    Turns,
)
from prfaas_env.workload.requests import RequestTable
from prfaas_env.workload.session_law import session_law

#: Most prefix ids of one table (8 bytes each); more is a block size that does not suit the lengths.
MAX_BLOCK_IDS = 250_000_000
#: Sub-streams of "sessions".
_TURNS, _THINK = 0, 1
#: Sub-streams of the length streams: 1 is the regime chain of the first (or only) law, as in other workloads;
#: draws of turn k come from the sub-stream (_PER_TURN, k).
_FIRST_CHAIN, _PER_TURN, _NEW_CHAIN = 1, 2, 3
#: A wait beyond any horizon; waits are cut here, so that sums of them stay within int64.
_NEVER_NS = 2 * int(MAX_S) * NS_PER_S


def session_requests(
    workload: SessionWorkload,
    *,
    seed: int,
    horizon_s: float | None = None,
    n_requests: int | None = None,
    base_dir: Path | None = None,
) -> RequestTable:
    """Draw all turns of all sessions of an episode.

    Draws are indexed by session and turn, with a stream or sub-stream per field: another law for one field
    leaves the draws of the others alone, and a longer horizon appends sessions. `session` in the table is the
    number of the session in order of its start. Sessions that began before 0 take part only within
    `warm_start_s`, with their turns from 0 on.

    Args:
        workload: the laws.
        seed: episode seed.
        horizon_s: arrivals in [0, horizon_s), or
        n_requests: exactly the first `n_requests`. Give one of the two.
        base_dir: folder against which the path of a rate profile is read.

    Raises:
        PrfaasError: limits that make no sense, too many requests or prefix ids, or `n_requests` of a workload
            that has none.
    """
    if (horizon_s is None) == (n_requests is None):
        raise PrfaasError("give either horizon_s or n_requests to say how many requests to draw")
    if horizon_s is not None:
        if not 0 <= horizon_s <= MAX_S - workload.warm_start_s:
            raise PrfaasError(
                f"horizon_s is {horizon_s}; allowed: 0 up to 1e9 seconds, warm_start_s included"
            )
        # A horizon of 0 has no arrivals, whatever began before.
        span_s = horizon_s + workload.warm_start_s if horizon_s else 0.0
        drawn = _draw(workload, seed, _starts_ns(workload, seed, base_dir, horizon_s=span_s))
        end_ns = ns_from_s(horizon_s)
        return _table(workload, drawn, _in_order(drawn, end_ns))
    assert n_requests is not None
    return _table(workload, *_first(workload, seed, n_requests, base_dir))


def _starts_ns(workload: SessionWorkload, seed: int, base_dir: Path | None, **limit: float | int) -> IntArray:
    """Starts of the sessions in episode time; negative within the warm start."""
    starts_ns = sample_arrivals_ns(workload.arrivals, seed, base_dir=base_dir, **limit)  # type: ignore[arg-type]
    return starts_ns - ns_from_s(workload.warm_start_s)


def _first(workload: SessionWorkload, seed: int, n: int, base_dir: Path | None) -> tuple[_Drawn, IntArray]:
    """Enough sessions for the first n requests, and the rows of these in order."""
    if n < 0:
        raise PrfaasError(f"n_requests is {n}; allowed: 0 or more")
    mean_turns = session_law(workload).mean_turns
    if n and mean_turns == 0:
        raise PrfaasError(
            "workload: no first prompt is within context_limit_tokens, so there are no requests"
        )
    warm = mean_arrival_rps(workload.arrivals, base_dir) * workload.warm_start_s
    sessions = 0 if n == 0 else math.ceil(1.1 * (warm + n / mean_turns)) + 32
    while True:
        starts_ns = _starts_ns(workload, seed, base_dir, n_requests=sessions)
        drawn = _draw(workload, seed, starts_ns)
        # What lies at or before the last start comes before every turn of the sessions that follow.
        last_ns = int(starts_ns[-1]) + 1 if sessions else 0
        order = _in_order(drawn, last_ns)
        if len(order) >= n:
            return drawn, order[:n]
        sessions *= 2


# --- draws -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """Every turn of every drawn session, by turn and then session, int64 of shape (n,); ranks by session.

    `rank` (sessions,) is that of the system prompt; all 0 where there are none.
    """

    session: IntArray
    turn: IntArray
    arrival_ns: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    rank: IntArray


def _in_order(drawn: _Drawn, end_ns: int) -> IntArray:
    """Rows with arrivals in [0, end_ns), by arrival, session and turn."""
    rows = np.flatnonzero((drawn.arrival_ns >= 0) & (drawn.arrival_ns < end_ns))
    order = np.lexsort((drawn.turn[rows], drawn.session[rows], drawn.arrival_ns[rows]))
    return rows[order]


def _draw(workload: SessionWorkload, seed: int, starts_ns: IntArray) -> _Drawn:
    n = len(starts_ns)
    # Regimes go by the time since the first possible start, which is not negative.
    start_s = (starts_ns + ns_from_s(workload.warm_start_s)) / NS_PER_S
    first = parameter_at(workload.first_tokens, start_s, seed, "input_lengths", _FIRST_CHAIN)
    new = parameter_at(workload.new_tokens, start_s, seed, "input_lengths", _NEW_CHAIN)
    out = parameter_at(workload.output_tokens, start_s, seed, "output_lengths", _FIRST_CHAIN)
    n_turns = _turns(workload.turns, stream(seed, "sessions", _TURNS).random(n))
    rank, system_tokens = _system_prompts(workload, seed, n)

    at_ns = starts_ns.copy()
    u = stream(seed, "input_lengths", _PER_TURN, 0).random(n)
    prompt = system_tokens + lengths_from(workload.first_tokens, u, first)
    here = np.arange(n)
    columns: list[tuple[IntArray, IntArray, IntArray, IntArray, IntArray]] = []
    total = 0
    for turn in range(int(n_turns.max(initial=0))):
        here = here[(prompt[here] <= workload.context_limit_tokens) & (n_turns[here] > turn)]
        if not len(here):
            break
        total += len(here)
        if total > MAX_REQUESTS:
            raise PrfaasError(f"workload: more than {MAX_REQUESTS:,} turns; that is the most of one table")
        # Draws are made up to the last session that is still here, so that each session has its own.
        reach = int(here[-1]) + 1
        u = stream(seed, "output_lengths", _PER_TURN, turn).random(reach)[here]
        output = lengths_from(workload.output_tokens, u, out[here])
        columns.append((here, np.full(len(here), turn), at_ns[here], prompt[here], output))
        u = stream(seed, "sessions", _THINK, turn).random(reach)[here]
        gap_s = workload.service_s + workload.service_s_per_output_token * output
        gap_s = gap_s + _think_s(workload.think_time, u)
        gap_ns = np.rint(np.minimum(gap_s, MAX_S) * NS_PER_S).astype(np.int64)
        at_ns[here] = np.minimum(at_ns[here] + gap_ns, _NEVER_NS)
        u = stream(seed, "input_lengths", _PER_TURN, turn + 1).random(reach)[here]
        prompt[here] += output + lengths_from(workload.new_tokens, u, new[here])
    empty = (np.zeros(0, dtype=np.int64),) * 5
    session, turns, arrival, inputs, outputs = (
        np.concatenate(column).astype(np.int64) for column in zip(*(columns or [empty]), strict=True)
    )
    return _Drawn(session, turns, arrival, inputs, outputs, rank)


def _system_prompts(workload: SessionWorkload, seed: int, n: int) -> tuple[IntArray, IntArray]:
    """Rank and length of each session's system prompt; zeros where there are none."""
    library = workload.system_prompts
    if library is None:
        return np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    edges = np.cumsum(library.probabilities)
    u = stream(seed, "prefixes").random(n)
    rank = np.minimum(np.searchsorted(edges, u, side="right"), len(edges) - 1).astype(np.int64)
    return rank, np.array(library.lengths, dtype=np.int64)[rank]


def _turns(law: Turns, u: FloatArray) -> IntArray:
    """Numbers of turns by inverse CDF."""
    if isinstance(law, FixedTurns):
        return np.full(len(u), law.turns, dtype=np.int64)
    if isinstance(law, EmpiricalTurns):
        table = np.array(law.turns, dtype=np.int64)
        return table[(u * len(table)).astype(np.int64)]
    if law.mean_turns == 1:
        return np.ones(len(u), dtype=np.int64)
    turns = 1 + np.floor(np.log1p(-u) / math.log1p(-1.0 / law.mean_turns))
    return np.asarray(np.minimum(turns, law.max_turns), dtype=np.int64)


def _think_s(law: ThinkTime, u: FloatArray) -> FloatArray:
    """Think times by inverse CDF."""
    if isinstance(law, FixedThink):
        return np.full(len(u), law.think_s)
    if isinstance(law, ExponentialThink):
        return -law.mean_s * np.log1p(-u)
    if law.sigma == 0 or law.median_s == 0:
        return np.full(len(u), law.median_s)
    return np.asarray(law.median_s * np.exp(law.sigma * ndtri(u)), dtype=np.float64)


# --- prefix ids --------------------------------------------------------------------------------------


def _table(workload: SessionWorkload, drawn: _Drawn, order: IntArray) -> RequestTable:
    begin = "sessions that began before time 0 are left out"
    if workload.warm_start_s:
        begin = f"sessions that began up to {workload.warm_start_s:g} s before time 0 go on after it (warm_start_s)"
    offsets, ids = _block_ids(workload, drawn, order)
    return RequestTable(
        arrival_ns=drawn.arrival_ns[order],
        input_tokens=drawn.input_tokens[order],
        output_tokens=drawn.output_tokens[order],
        session=drawn.session[order],
        block_offsets=offsets,
        block_ids=ids,
        block_tokens=workload.block_tokens,
        notes=(
            f"prefix blocks of {workload.block_tokens} tokens, from sessions and their system prompts",
            "turns arrive a stated allowance and a think time after the one before, whatever a policy does",
            begin,
        ),
    )


def _block_ids(workload: SessionWorkload, drawn: _Drawn, order: IntArray) -> tuple[IntArray, IntArray]:
    """Offsets (n + 1,) and ids of the rows `order`.

    Ids are given to: the whole blocks of every system prompt of the library, then, session by session, the
    whole blocks of its conversation and one per turn for a partial last block. A partial block has an id of its
    own, since the block that the next turn fills in its place holds other text. All turns of a session count,
    so that the horizon moves no id.
    """
    size = workload.block_tokens
    library = workload.system_prompts
    lengths = np.array(library.lengths if library else (0,), dtype=np.int64)
    system_blocks = lengths // size
    system_base = np.cumsum(system_blocks) - system_blocks
    shared = system_blocks[drawn.rank]
    longest = np.zeros(len(drawn.rank), dtype=np.int64)
    np.maximum.at(longest, drawn.session, drawn.input_tokens)
    turns = np.bincount(drawn.session, minlength=len(drawn.rank))
    own = np.maximum(longest // size - shared, 0)
    reserved = own + turns
    base = int(system_blocks.sum()) + np.cumsum(reserved) - reserved

    session, tokens = drawn.session[order], drawn.input_tokens[order]
    counts = -(-tokens // size)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    if offsets[-1] > MAX_BLOCK_IDS:
        raise PrfaasError(
            f"workload: {int(offsets[-1]):,} prefix ids with block_tokens {size}; at most {MAX_BLOCK_IDS:,} are "
            "allowed in one table; take larger blocks or a shorter horizon"
        )
    # Block j of a conversation behind a system prompt of s whole blocks has the id base + j - s.
    ids = np.arange(offsets[-1]) + np.repeat(base[session] - shared[session] - offsets[:-1], counts)
    # The first blocks are those of the system prompt.
    lead = np.minimum(shared[session], counts)
    within = np.arange(int(lead.sum())) - np.repeat(np.cumsum(lead) - lead, lead)
    ids[np.repeat(offsets[:-1], lead) + within] = np.repeat(system_base[drawn.rank[session]], lead) + within
    partial = tokens % size > 0
    of = session[partial]
    ids[offsets[1:][partial] - 1] = base[of] + own[of] + drawn.turn[order][partial]
    return offsets, ids
