"""Decode on one instance: all sequences advance together, one virtual clock, no event per token."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from prfaas_env.profiles.latency import DecodeProfile
from prfaas_env.simulator.formulas import NEVER_NS, ns_from_s, virtual_now, virtual_ratio, virtual_when


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in decode.

    `context_tokens` is what its cache holds when it joins, `joined_u` the virtual time of joining.
    """

    request: int
    attempt: int
    context_tokens: int
    remaining_tokens: int
    kv_tokens: int
    wants_first: bool
    joined_u: int = 0


FIRST, FINISH = 0, 1


@dataclass(slots=True)
class DecodeBatch:
    """Sequences of one instance and their virtual clock.

    Virtual time u is in nominal nanoseconds: one token takes `a` nominal ns, and u runs at a / step. With a
    constant step u is real time, so that a finish is join + n steps in whole ns. The step is fixed at each
    change of the batch until the next one (`settle`).
    """

    profile: DecodeProfile
    sequences: dict[int, Sequence] = field(default_factory=dict)
    kv_tokens: int = 0
    context_tokens: int = 0
    sum_joined_u: int = 0
    anchor_ns: int = 0
    anchor_u: int = 0
    ratio: float = 1.0
    dirty: bool = False
    milestones: list[tuple[int, int, int, int]] = field(default_factory=list)
    next_ns: int = NEVER_NS
    token_u: int = 0
    """Virtual time of one token."""

    def __post_init__(self) -> None:
        self.token_u = ns_from_s(self.profile.a_s)

    def has_room(self, kv_tokens: int) -> bool:
        """Whether a sequence that reserves this much KV room can join now."""
        capacity = self.profile.kv_capacity_tokens
        return len(self.sequences) < self.profile.slots and (
            capacity is None or self.kv_tokens + kv_tokens <= capacity
        )

    def u_at(self, now_ns: int) -> int:
        """Virtual time at `now_ns`."""
        return virtual_now(self.anchor_u, self.anchor_ns, self.ratio, now_ns)

    def generated(self, sequence: Sequence, now_ns: int) -> int:
        """Whole tokens this sequence has produced since it joined."""
        done = (self.u_at(now_ns) - sequence.joined_u) // self.token_u
        return min(done, sequence.remaining_tokens)

    def join(self, sequence: Sequence, now_ns: int) -> None:
        """Add a sequence; its first token comes one step later."""
        u = self.u_at(now_ns)
        sequence.joined_u = u
        self.sequences[sequence.request] = sequence
        self.kv_tokens += sequence.kv_tokens
        self.context_tokens += sequence.context_tokens
        self.sum_joined_u += u
        step_u = self.token_u
        if sequence.wants_first:
            heapq.heappush(self.milestones, (u + step_u, sequence.request, FIRST, sequence.attempt))
        end_u = u + sequence.remaining_tokens * step_u
        heapq.heappush(self.milestones, (end_u, sequence.request, FINISH, sequence.attempt))
        self.dirty = True

    def leave(self, request: int) -> Sequence:
        """Take a sequence out (finished, or its instance goes away)."""
        sequence = self.sequences.pop(request)
        self.kv_tokens -= sequence.kv_tokens
        self.context_tokens -= sequence.context_tokens
        self.sum_joined_u -= sequence.joined_u
        self.dirty = True
        return sequence

    def due(self, now_ns: int) -> list[tuple[int, int]]:
        """(request, FIRST or FINISH) reached now, in order of request; `leave` is the caller's part."""
        u = self.u_at(now_ns)
        out = []
        while self.milestones and (self.milestones[0][0] <= u or self._when(self.milestones[0][0]) <= now_ns):
            _, request, what, attempt = heapq.heappop(self.milestones)
            sequence = self.sequences.get(request)
            if sequence is not None and sequence.attempt == attempt:
                out.append((request, what))
        return sorted(out)

    def _when(self, target_u: int) -> int:
        return virtual_when(self.anchor_u, self.anchor_ns, self.ratio, target_u)

    def settle(self, now_ns: int, speed: float) -> None:
        """Fix the step for the present batch; `speed` below 1 is a warm-up."""
        u = self.u_at(now_ns)
        self.anchor_ns, self.anchor_u = now_ns, u
        batch = len(self.sequences)
        generated = (batch * u - self.sum_joined_u) // self.token_u
        p = self.profile
        self.ratio = virtual_ratio(
            self.token_u,
            p.a_s,
            p.b_s_per_sequence,
            p.c_s_per_token,
            batch,
            self.context_tokens + generated,
            speed,
        )
        self.dirty = False
        self.refresh_next()

    def refresh_next(self) -> None:
        """Instant of the next milestone of a sequence that is still here."""
        while self.milestones:
            target_u, request, _, attempt = self.milestones[0]
            sequence = self.sequences.get(request)
            if sequence is not None and sequence.attempt == attempt:
                self.next_ns = self._when(target_u)
                return
            heapq.heappop(self.milestones)
        self.next_ns = NEVER_NS
