"""State of instances and queues, shared by the processes of the SimPy engine."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import simpy

from prfaas_env.profiles.latency import HardwareProfile
from prfaas_env.simulator.decode import DecodeBatch, Sequence
from prfaas_env.simulator.formulas import prefill_s, slowness
from prfaas_env.simulator.link import Flow
from prfaas_env.simulator.records import TimeIntegral


class Role(enum.IntEnum):
    """What an instance works at."""

    PREFILL = 0
    DECODE = 1


class Phase(enum.IntEnum):
    """Whether an instance counts in its role."""

    ACTIVE = 0
    DRAINING = 1
    SWITCHING = 2


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of a request: from its prefill queue to the decode queue."""

    request: int
    number: int
    new_tokens: int
    cached_tokens: int
    context_tokens: int
    remaining_tokens: int
    prefill_ns: int
    bytes_to_send: int
    queued_ns: int
    started: simpy.Event
    sent: simpy.Event
    link: int = -1
    started_ns: int = -1
    prefill_end_ns: int = 0
    instance: Instance | None = None
    """Where it is being prefilled."""
    flow: Flow | None = None
    opened: bool = False
    """Its flow has been opened (it may be over)."""
    joined: bool = False
    """Its cache has arrived at the decode side."""
    dead: bool = False
    """Lost or aborted: whatever of it is still to come is ignored."""


@dataclass(slots=True, eq=False)
class Instance:
    """One model replica: a role, a phase, its speed, and its work.

    It works at `warm_speed` (below 1 while it warms up) times `health` (below 1 while a fault slows it down); `up` is
    False while it is down.
    """

    id: int
    role: Role
    batch: DecodeBatch | None
    phase: Phase = Phase.ACTIVE
    warm_speed: float = 1.0
    health: float = 1.0
    up: bool = True
    running: Attempt | None = None
    drained: simpy.Event | None = None
    warm_until_ns: int = -1
    wake_version: int = 0

    @property
    def speed(self) -> float:
        """Speed now, share of full."""
        return self.warm_speed * self.health

    def serves(self, role: Role) -> bool:
        """Whether it counts in a role now: active and not down."""
        return self.role is role and self.phase is Phase.ACTIVE and self.up

    def sequences(self) -> int:
        """Sequences in decode here."""
        return len(self.batch.sequences) if self.batch is not None else 0


class PrefillTimes:
    """Prefill profile of one kind of hardware with plain Python numbers, quick to call."""

    def __init__(self, hardware: HardwareProfile) -> None:
        arrays = hardware.prefill.arrays()
        self._coefficients: tuple[list[float], ...] = tuple(
            a.tolist() for a in (arrays.start_tokens, arrays.c0_s, arrays.c1_s, arrays.c2_s)
        )

    def seconds(self, new_tokens: int, cached_tokens: int) -> float:
        """Prefill time in seconds."""
        start, c0, c1, c2 = self._coefficients
        return prefill_s(start, c0, c1, c2, new_tokens, cached_tokens)


@dataclass(slots=True)
class PrefillPool:
    """Prefill side of one cluster: a FIFO queue and the instances that serve it."""

    cluster: int
    instances: list[Instance]
    times: PrefillTimes
    queue: deque[Attempt] = field(default_factory=deque)
    queued_work_ns: int = 0
    queued_tokens: int = 0
    active: int = 0
    """Instances that count in the prefill role now."""
    busy: TimeIntegral = field(default_factory=TimeIntegral)
    in_role: TimeIntegral = field(default_factory=TimeIntegral)
    """Instances in the role, draining ones included: the ground of utilisation."""

    def push(self, attempt: Attempt) -> None:
        """Queue an attempt at the tail."""
        self.queue.append(attempt)
        self.queued_work_ns += attempt.prefill_ns
        self.queued_tokens += attempt.new_tokens

    def pop(self) -> Attempt:
        """Take the head of the queue."""
        attempt = self.queue.popleft()
        self.queued_work_ns -= attempt.prefill_ns
        self.queued_tokens -= attempt.new_tokens
        return attempt

    def remove(self, attempt: Attempt) -> None:
        """Take an attempt out of the queue, wherever it stands."""
        self.queue.remove(attempt)
        self.queued_work_ns -= attempt.prefill_ns
        self.queued_tokens -= attempt.new_tokens

    def best_idle(self) -> Instance | None:
        """Idle instance: the fastest, then the lowest id."""
        idle = [i for i in self.instances if i.running is None and i.serves(Role.PREFILL)]
        return min(idle, key=lambda i: (slowness(i.speed), i.id), default=None)

    def residuals_ns(self, now_ns: int) -> list[int]:
        """Time left of each running prefill."""
        return [i.running.prefill_end_ns - now_ns for i in self.instances if i.running is not None]

    def first_free_ns(self, now_ns: int) -> int:
        """Time until the first active instance is free (0 when one is idle or there is none)."""
        best = -1
        for instance in self.instances:
            if not instance.serves(Role.PREFILL):
                continue
            if instance.running is None:
                return 0
            left = instance.running.prefill_end_ns - now_ns
            if best < 0 or left < best:
                best = left
        return max(best, 0)

    def idle_count(self) -> int:
        """Idle active instances."""
        return sum(i.running is None and i.serves(Role.PREFILL) for i in self.instances)


@dataclass(slots=True)
class DecodePool:
    """Decode side of one PD cluster: one FIFO queue over its instances."""

    cluster: int
    instances: list[Instance]
    kv_reserve_tokens: int
    queue: deque[tuple[int, Sequence]] = field(default_factory=deque)
    queued_tokens: int = 0
    active: int = 0
    """Instances that count in the decode role now."""
    sequences: TimeIntegral = field(default_factory=TimeIntegral)
    slots: TimeIntegral = field(default_factory=TimeIntegral)
    """Slots of the instances in the role, draining ones included."""

    def push(self, now_ns: int, sequence: Sequence) -> None:
        """Queue a sequence whose KV cache has arrived."""
        self.queue.append((now_ns, sequence))
        self.queued_tokens += sequence.context_tokens

    def pop(self) -> Sequence:
        """Take the head of the queue."""
        _, sequence = self.queue.popleft()
        self.queued_tokens -= sequence.context_tokens
        return sequence

    def remove(self, request: int) -> None:
        """Take a sequence out of the queue, wherever it stands."""
        k = next(k for k, (_, sequence) in enumerate(self.queue) if sequence.request == request)
        self.queued_tokens -= self.queue[k][1].context_tokens
        del self.queue[k]

    def place_for(self, sequence: Sequence) -> Instance | None:
        """Active instance with the fewest sequences (then lowest id) that has a slot and KV room."""
        best: Instance | None = None
        fewest = 0
        for instance in self.instances:
            batch = instance.batch
            if not instance.serves(Role.DECODE) or batch is None:
                continue
            n = len(batch.sequences)
            if (best is None or n < fewest) and batch.has_room(sequence.kv_tokens):
                best, fewest = instance, n
        return best


def fewest_sequences(instances: list[Instance]) -> Instance | None:
    """Active decode instance with the fewest sequences, then lowest id."""
    candidates = [i for i in instances if i.serves(Role.DECODE)]
    return min(candidates, key=lambda i: (i.sequences(), i.id), default=None)


def earliest_prefill_to_finish(instances: list[Instance]) -> Instance | None:
    """Active prefill instance: idle first, then the earliest to finish, then lowest id."""
    candidates = [i for i in instances if i.serves(Role.PREFILL)]
    return min(
        candidates,
        key=lambda i: (i.running is not None, i.running.prefill_end_ns if i.running else 0, i.id),
        default=None,
    )
