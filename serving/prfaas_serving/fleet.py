"""Workers, what the router counts about each, and the choice among them.

Everything here belongs to one event loop; no locks. A `Worker` lives as long as its name is configured: failing
health probes, coming back, or changing role never resets its counters.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from yarl import URL

from prfaas_env.prediction import PathState
from prfaas_serving.breaker import Breaker, PairTable, SharedBlame
from prfaas_serving.config import (
    ENGINE_OF,
    EngineName,
    RoleName,
    RouterConfig,
    WorkerSpec,
    refuse_twins,
)
from prfaas_serving.moves.state import MoveState

WorkerState = Literal["probation", "up", "down"]
#: Why nothing new is sent to a worker that is well: an operator's drain, a move under way, a move that went wrong.
Hold = Literal["operator", "move", "out"]

#: Share of its concurrency that a returning worker starts with.
_RAMP_FROM = 0.1
#: A worker is too loaded for prefix affinity above this many times the mean load of its pool, plus this much.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK = 2.0


class NoWorker(Exception):
    """No worker of a pool can take the request: none is usable (`full` False), or the queue or the wait is full."""

    def __init__(self, what: str, *, full: bool) -> None:
        super().__init__(what)
        self.full = full


class Attempt:
    """One try of a request on one worker, as the worker's counters see it."""

    __slots__ = (
        "answering",
        "ended",
        "predicted_s",
        "queued_s",
        "sent_s",
        "started_s",
        "tokens",
        "trial",
        "worker",
    )

    def __init__(
        self, worker: Worker, predicted_s: float, now_s: float, trial: bool, tokens: int, queued_s: float
    ) -> None:
        self.worker = worker
        self.predicted_s = predicted_s
        self.started_s = now_s
        """When it is taken to have begun: a prefill behind another one begins when that one ends."""
        self.sent_s = now_s
        self.queued_s = queued_s
        """When it began to wait for the worker's pool."""
        self.tokens = tokens
        self.trial = trial
        self.ended = False
        self.answering = False
        """Its first content has come."""


@dataclass
class Load:
    """What a worker last said about itself."""

    running: float = 0.0
    waiting: float = 0.0
    kv_use: float | None = None
    at_s: float = -1.0
    own_then: int = 0
    """Requests this router had there at the time."""
    told_bits: float = 0.0
    """`Worker.told_bits` at the time."""
    fields: dict[str, float] = field(default_factory=dict)
    """Everything that was read, by metric name without labels, for telemetry."""

    @property
    def foreign(self) -> float:
        """Requests there that are not this router's."""
        return max(self.running + self.waiting - self.own_then, 0.0)


class Worker:
    """One worker: where it is, whether it can be used, what it is doing for this router."""

    def __init__(self, spec: WorkerSpec, config: RouterConfig, source: str) -> None:
        health = config.health
        self.spec = spec
        self.name = spec.name
        self.cluster = spec.cluster
        self.role: RoleName = spec.role
        self.engine: EngineName = spec.engine or ENGINE_OF[config.backend]
        self.source = source
        """Where it came from: config, file, kubernetes, admin."""
        self.state: WorkerState = "probation"
        self.holds: set[Hold] = set()
        self.removed = False
        self.breaker = Breaker(health.breaker_failures, health.breaker_open_s, health.breaker_max_open_s)
        self.load = Load()
        self.in_flight = 0
        self.requests = self.failures = self.refusals = 0
        """Totals since the router started."""
        self.assigned: deque[Attempt] = deque()
        """Prefills under way, in the order they were sent; the first one is taken to be running."""
        self.assigned_s = 0.0
        self.places: dict[Attempt, None] = {}
        """Everything under way, in the order it was sent."""
        self.staged = 0
        """KV caches that it holds for a decode worker."""
        self.told_bits = 0.0
        """Predicted KV bits of the caches it fetched."""
        self.ramp_from_s = -1e9
        self.not_before_s = 0.0
        """Refused with Retry-After: nothing is sent before."""
        self.max_model_len: int | None = None
        self.engine_id: str | None = None
        self.failed_probes = 0
        self.kv_asked_tokens = 0
        """Tokens of answers for which this worker was told to fetch KV."""
        self.kv_moved_before: float | None = None
        """What its engine had counted when the router began to count."""
        self.kv_moved_share: float | None = None
        """Tokens it says it fetched over those it was told to fetch, where its engine counts them."""
        self.probed = False
        """Whether a real generation has passed."""
        self._limits = config.limits
        self._most = self._limit()
        self._allowed = float(self._most)
        self._ramp_s = health.ramp_s
        self._urls: dict[str, URL] = {}
        self.api_key = os.environ.get(spec.api_key_env or "")
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def auth(self) -> dict[str, str]:
        """The header that shows its key, none without one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def url(self, path: str) -> URL:
        """Address of a path of this worker."""
        found = self._urls.get(path)
        if found is None:
            found = URL(self.spec.url + path, encoded=True)
            if len(self._urls) < 64:
                self._urls[path] = found
        return found

    def _limit(self) -> int:
        """Requests at once that its entry or its role allows."""
        limits = self._limits
        of_role = limits.prefill_per_worker if self.role == "prefill" else limits.decode_per_worker
        return self.spec.max_concurrent or of_role

    def take_role(self, role: RoleName) -> None:
        """Serve in a role, with the role's limit."""
        self.role = role
        most = self._limit()
        if most != self._most:
            self._most, self._allowed = most, float(most)

    @property
    def draining(self) -> bool:
        """Whether nothing new is sent though it may be well."""
        return bool(self.holds)

    @draining.setter
    def draining(self, wanted: bool) -> None:
        """An operator's order; a move under way, or one that went wrong, holds a worker all the same."""
        (self.holds.add if wanted else self.holds.discard)("operator")

    @property
    def known_down(self) -> bool:
        """Whether nothing new may be sent whatever the breaker says."""
        return self.state != "up" or bool(self.holds) or self.removed

    def usable(self, now_s: float) -> bool:
        """Whether a request may be sent now, its limit apart."""
        return not self.known_down and self.breaker.allows(now_s)

    def share(self, now_s: float) -> float:
        """Part of its full load that it should get now: a returning worker ramps up."""
        since_s = now_s - self.ramp_from_s
        if since_s >= self._ramp_s:
            return 1.0
        return max(since_s / self._ramp_s, _RAMP_FROM)

    def has_room(self, now_s: float) -> bool:
        """Whether its concurrency limit leaves room."""
        return now_s >= self.not_before_s and self.in_flight < max(int(self._allowed * self.share(now_s)), 1)

    def score(self, now_s: float) -> float:
        """Load to compare within a pool: predicted work for prefill, sequences for decode, ramping counted in."""
        if self.role == "prefill":
            work = self.work_s(now_s) + 0.01 * (self.in_flight + self.load.foreign)
        else:
            work = self.in_flight + self.load.foreign
        return (work + 1e-3) / self.share(now_s)

    def work_s(self, now_s: float) -> float:
        """Predicted time until all prefills sent to it have ended."""
        if not self.assigned:
            return 0.0
        head = self.assigned[0]
        return max(self.assigned_s - head.predicted_s, 0.0) + max(
            head.started_s + head.predicted_s - now_s, 0.0
        )

    # ------------------------------------------------------------------ life of an attempt

    def begin(
        self,
        now_s: float,
        predicted_s: float | None = None,
        tokens: int = 0,
        queued_s: float | None = None,
    ) -> Attempt:
        """A request goes out; `predicted_s` is its prefill time if it is a prefill, `tokens` what it brings."""
        since_s = now_s if queued_s is None else queued_s
        attempt = Attempt(self, predicted_s or 0.0, now_s, self.breaker.sent(now_s), tokens, since_s)
        self.in_flight += 1
        self.places[attempt] = None
        self.requests += 1
        self.idle.clear()
        if predicted_s is not None:
            self.assigned.append(attempt)
            self.assigned_s += predicted_s
        return attempt

    def prefill_done(self, attempt: Attempt, now_s: float) -> None:
        """The prefill of an attempt has ended; the next one counts as running from now on."""
        if not self.assigned or attempt.predicted_s < 0:
            return
        head = self.assigned[0] is attempt
        try:
            self.assigned.remove(attempt)
        except ValueError:
            return
        self.assigned_s = self.assigned_s - attempt.predicted_s if self.assigned else 0.0
        if head and self.assigned:
            self.assigned[0].started_s = now_s

    def end(self, attempt: Attempt, now_s: float) -> bool:
        """An attempt is over; False if it already was (a late answer changes nothing)."""
        if attempt.ended:
            return False
        attempt.ended = True
        self.places.pop(attempt, None)
        self.prefill_done(attempt, now_s)
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()
        return True

    # ------------------------------------------------------------------ verdicts

    def answered(self) -> None:
        """An answer that is no failure: the limit regains what refusals took."""
        self.breaker.success()
        if self._allowed < self._most:
            self._allowed = min(self._allowed + 1.0 / self._allowed, float(self._most))

    def refused(self, now_s: float, retry_after_s: float | None) -> None:
        """429 or 503: not ill, only full. Halve what it gets, wait as long as it says."""
        self.refusals += 1
        self.breaker.success()
        self._allowed = max(min(self._allowed, self.in_flight + 1.0) / 2.0, 1.0)
        if retry_after_s is not None:
            self.not_before_s = max(self.not_before_s, now_s + min(retry_after_s, 30.0))

    def failed(self, attempt: Attempt | None, now_s: float) -> None:
        """5xx, timeout or connection error."""
        self.failures += 1
        self.breaker.failure(now_s, attempt.trial if attempt is not None else False)

    def came_up(self, now_s: float) -> None:
        """Its probes pass (again)."""
        if self.state != "up":
            self.state = "up"
            self.ramp_from_s = now_s

    def as_json(self, now_s: float) -> dict[str, Any]:
        """For the admin port."""
        return {
            "name": self.name,
            "url": self.spec.url,
            "cluster": self.cluster,
            "role": self.role,
            "source": self.source,
            "state": "out" if "out" in self.holds else "draining" if self.holds else self.state,
            "breaker": self.breaker.state(now_s),
            "share": round(self.share(now_s), 3),
            "in_flight": self.in_flight,
            "limit": int(self._allowed),
            "work_s": round(self.work_s(now_s), 3),
            "requests": self.requests,
            "failures": self.failures,
            "refusals": self.refusals,
            "foreign": self.load.foreign,
            "kv_use": self.load.kv_use,
            "max_model_len": self.max_model_len,
        }


@dataclass(eq=False)
class RoleChange:
    """One change of a worker's role, from its order to its end. Times are monotonic."""

    worker: str
    cluster: str
    from_role: str
    to_role: str
    by: str
    """Who ordered it: "operator", "policy" or "rule"."""
    ordered_s: float
    done_s: float | None = None
    outcome: str = "under_way"
    """`done`, or the step that failed: `not_drained`, `last_of_role`, `not_written`, `not_switched`, `not_verified`,
    `cancelled`; `rolled_back` when a restarted router undid it."""


class RoleChanges:
    """All changes of role, whoever ordered them."""

    def __init__(self) -> None:
        self.under_way: dict[str, RoleChange] = {}
        """By worker."""
        self.past: deque[RoleChange] = deque(maxlen=256)
        """Those that are over, newest last."""
        self.ended: list[Callable[[RoleChange], None]] = []
        """Called with every change that is over."""
        self.before: RoleChange | None = None
        """The last one that an earlier run of this router carried out, if its state file tells."""

    @property
    def ordered_s(self) -> float | None:
        """When the last one was ordered; None before the first."""
        everything = [*self.past, *self.under_way.values()]
        return max((c.ordered_s for c in everything), default=None)

    @property
    def last_done(self) -> RoleChange | None:
        """The last one that was carried out, by this run of the router or an earlier one."""
        return next((c for c in reversed(self.past) if c.outcome == "done"), self.before)

    def begin(self, worker: Worker, role: str, by: str) -> RoleChange:
        """A change is ordered."""
        return self.enter(RoleChange(worker.name, worker.cluster, worker.role, role, by, time.monotonic()))

    def enter(self, change: RoleChange) -> RoleChange:
        """A change is under way."""
        self.under_way[change.worker] = change
        return change

    def end(self, change: RoleChange, outcome: str) -> None:
        """It is over."""
        change.done_s, change.outcome = time.monotonic(), outcome
        self.under_way.pop(change.worker, None)
        self.past.append(change)
        for tell in self.ended:
            tell(change)


class Luck:
    """Uniform numbers for the choice among workers, drawn in blocks."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(np.random.SeedSequence(seed))
        self._block: list[float] = []

    def below(self, n: int) -> int:
        """A whole number in [0, n)."""
        if not self._block:
            self._block = self._generator.random(4096).tolist()
        return int(self._block.pop() * n)


@dataclass(eq=False)
class Waiter:
    """A request that waits for room in a pool."""

    since_s: float
    predicted_s: float
    tokens: int
    turn: asyncio.Event = field(default_factory=asyncio.Event)


class Pool:
    """The workers of one cluster that serve one role, and those who wait for one of them."""

    def __init__(self, cluster: str, role: Literal["prefill", "decode"], queue: int, luck: Luck) -> None:
        self.cluster = cluster
        self.role = role
        self.workers: list[Worker] = []
        self._most_waiting = queue
        self._waiting: deque[Waiter] = deque()
        self._luck = luck

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def waiting_s(self) -> float:
        """Predicted prefill time of those who wait here."""
        return sum(w.predicted_s for w in self._waiting)

    @property
    def waiters(self) -> Iterable[Waiter]:
        """Those who wait for room, in the order in which they get it."""
        return self._waiting

    @property
    def behind(self) -> int:
        """Prefills that wait at a worker behind another one: a worker does one after the other."""
        return sum(max(len(w.assigned) - 1, 0) for w in self.workers)

    def usable(self, now_s: float) -> list[Worker]:
        """Workers that may get a request, their limits apart."""
        return [w for w in self.workers if w.usable(now_s)]

    def any_usable(self, now_s: float) -> bool:
        """Whether there is one."""
        return any(w.usable(now_s) for w in self.workers)

    def path_state(self, now_s: float) -> PathState:
        """What prediction reads about this pool of prefill workers: the simulator's fields from the router's counters.

        A worker prefills what it was sent one after the other, so all but the first count as queued.
        """
        idle = active = 0
        queued_s, residual_s = self.waiting_s, float("inf")
        for worker in self.workers:
            if worker.known_down or not (worker.breaker.allows(now_s) or worker.in_flight):
                continue
            active += 1
            if not worker.assigned:
                idle += 1
                residual_s = 0.0
                continue
            head = worker.assigned[0]
            queued_s += max(worker.assigned_s - head.predicted_s, 0.0)
            residual_s = min(residual_s, max(head.started_s + head.predicted_s - now_s, 0.0))
        return PathState(
            queued_work_s=queued_s,
            idle_instances=idle,
            active_instances=active,
            residual_s=residual_s if active else 0.0,
        )

    def pick(
        self,
        now_s: float,
        *,
        affinity: Worker | None = None,
        avoid: Iterable[Worker] = (),
        apart: Callable[[Worker], bool] | None = None,
    ) -> Worker | None:
        """The worker for a request, or None if none has room.

        Power of two choices by `score`; the worker with the longest cached prefix comes first unless that very
        worker is overloaded. `avoid` and pairs that are `apart` are left out as long as another one is usable.
        """
        usable = [w for w in self.workers if w.usable(now_s)]
        if not usable:
            return None
        avoided = set(avoid)
        for refuse in (lambda w: w in avoided, apart):
            if refuse is not None and len(usable) > 1:
                usable = [w for w in usable if not refuse(w)] or usable
        free = [w for w in usable if w.has_room(now_s)]
        if not free:
            return None
        if affinity is not None and affinity in free and not _overloaded(affinity, usable, now_s):
            return affinity
        if len(free) == 1:
            return free[0]
        first = self._luck.below(len(free))
        second = self._luck.below(len(free) - 1)
        if second >= first:
            second += 1
        a, b = free[first], free[second]
        return a if a.score(now_s) <= b.score(now_s) else b

    async def acquire(
        self, wait_s: float, predicted_s: float | None = None, tokens: int = 0, **choice: Any
    ) -> tuple[Worker, Attempt]:
        """Choose a worker and take a place there, waiting in line for room.

        Args:
            wait_s: longest wait.
            predicted_s: prefill time, if it is for a prefill.
            tokens: what the request brings: new tokens of a prefill, context of a decode.
            choice: as for `pick`.

        Raises:
            NoWorker: none is usable, the line is full, or the wait was too long.
        """
        since_s = time.monotonic()
        if not self._waiting:
            worker = self.pick(since_s, **choice)
            if worker is not None:
                return worker, worker.begin(since_s, predicted_s, tokens)
        self._expect_usable(since_s)
        if len(self._waiting) >= self._most_waiting:
            raise NoWorker(f"the queue for {self.role} workers in {self.cluster} is full", full=True)
        waiter = Waiter(since_s, predicted_s or 0.0, tokens)
        self._waiting.append(waiter)
        try:
            worker = await self._stand_in_line(waiter, since_s + wait_s, choice)
        finally:
            self._waiting.remove(waiter)
            # a turn that was not used passes on; after one that was there may be room for more
            self.freed()
        return worker, worker.begin(time.monotonic(), predicted_s, tokens, since_s)

    def _expect_usable(self, now_s: float) -> None:
        if not self.any_usable(now_s):
            raise NoWorker(f"no usable {self.role} worker in {self.cluster}", full=False)

    async def _stand_in_line(self, waiter: Waiter, end_s: float, choice: dict[str, Any]) -> Worker:
        """Wait for a turn; who finds no room keeps the place in line."""
        while True:
            left_s = end_s - time.monotonic()
            try:
                # now and then without a call: a limit may have grown, a Retry-After may have passed
                async with asyncio.timeout(max(min(left_s, 0.25), 0.0)):
                    await waiter.turn.wait()
            except TimeoutError:
                if left_s <= 0.25:
                    raise NoWorker(
                        f"no {self.role} worker in {self.cluster} became free in time", full=True
                    ) from None
            now_s = time.monotonic()
            if waiter.turn.is_set() or self._waiting[0] is waiter:
                waiter.turn.clear()
                worker = self.pick(now_s, **choice)
                if worker is not None:
                    return worker
                if any(w.usable(now_s) and w.has_room(now_s) for w in self.workers):
                    self._pass_on(
                        waiter
                    )  # there is room, only not for this one: others need not wait behind it
            self._expect_usable(now_s)

    def _pass_on(self, waiter: Waiter) -> None:
        """The next one in line looks too."""
        behind = False
        for other in self._waiting:
            if behind and not other.turn.is_set():
                other.turn.set()
                return
            behind = behind or other is waiter

    def freed(self) -> None:
        """Room may have come: the first in line without a turn looks again."""
        for waiter in self._waiting:
            if not waiter.turn.is_set():
                waiter.turn.set()
                return


def _overloaded(worker: Worker, pool: list[Worker], now_s: float) -> bool:
    """Whether one worker has clearly more to do than the others that could take the request."""
    if len(pool) < 2:
        return False
    if worker.role == "prefill":
        loads = {w: w.in_flight + w.work_s(now_s) for w in pool}
    else:
        loads = {w: w.in_flight + w.load.foreign for w in pool}
    others = (sum(loads.values()) - loads[worker]) / (len(pool) - 1)
    return loads[worker] / worker.share(now_s) > AFFINITY_FACTOR * others + AFFINITY_SLACK


class Fleet:
    """All workers of a router, in pools.

    Args:
        config: the router's configuration.
        pd: the PD cluster served.
        remote: PrfaaS clusters it is linked to.

    Raises:
        PrfaasError: the state file of moves is not one, or another cluster's.
    """

    def __init__(self, config: RouterConfig, pd: str, remote: tuple[str, ...]) -> None:
        self.config = config
        self.state = MoveState(config.moves.state_file, pd)
        """Roles as moved, and the move under way: what survives a restart."""
        self.pd = pd
        luck = Luck(config.seed)
        queue = config.limits.queue
        self.decode = Pool(pd, "decode", queue, luck)
        self.local_prefill = Pool(pd, "prefill", queue, luck)
        self.remote_prefill = {name: Pool(name, "prefill", queue, luck) for name in remote}
        self.workers: dict[str, Worker] = {}
        self.changes = RoleChanges()
        self.pairs = PairTable(config.health.pair_failures, config.health.pair_open_s)
        self.shared_blame = SharedBlame()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def pools(self) -> list[Pool]:
        """All pools."""
        return [self.decode, self.local_prefill, *self.remote_prefill.values()]

    def home(self, worker: Worker) -> Pool:
        """The pool that it belongs to by cluster and role."""
        if worker.cluster != self.pd:
            return self.remote_prefill[worker.cluster]
        return self.local_prefill if worker.role == "prefill" else self.decode

    def add(self, spec: WorkerSpec, source: str) -> Worker:
        """Take a worker in; ValueError if the name or the address is taken."""
        refuse_twins([*(w.spec for w in self.workers.values()), spec])
        worker = Worker(spec, self.config, source)
        self.workers[spec.name] = worker
        if worker.cluster == self.pd:
            worker.take_role(self.state.role_of(spec))
            worker.holds |= self.state.holds(spec)
        self.home(worker).workers.append(worker)
        return worker

    def remove(self, worker: Worker) -> None:
        """Let a worker go: nothing new is sent; what runs there goes on."""
        worker.removed = True
        self.workers.pop(worker.name, None)
        for pool in self.pools():
            if worker in pool.workers:
                pool.workers.remove(worker)
                self._wake(pool)
        self.pairs.forget(worker.name)
        self.shared_blame.forget(worker.name)

    def keeps(self, worker: Worker, spec: WorkerSpec | None) -> bool:
        """Whether a worker stays as it is though its source now says `spec` (None: nothing of it).

        Its listing may follow a move, or be about to: then only what its source calls its role is learned.
        """
        moving = "move" in worker.holds
        if spec is None:
            return moving
        if worker.spec == spec:
            return True
        if worker.spec != spec.model_copy(update={"role": worker.spec.role}):
            return False
        if not moving and spec.role != worker.role:
            return False
        worker.spec = spec
        return True

    def relabel(self, worker: Worker, role: RoleName) -> None:
        """Move a worker to another role: its counters stay, new requests see it there."""
        pool = self.home(worker)
        if worker in pool.workers:
            pool.workers.remove(worker)
        worker.take_role(role)
        home = self.home(worker)
        home.workers.append(worker)
        for touched in (pool, home):
            self._wake(touched)

    def release(self, attempt: Attempt) -> bool:
        """An attempt is over; False if it already was."""
        worker = attempt.worker
        if not worker.end(attempt, time.monotonic()):
            return False
        self.freed(worker)
        return True

    def freed(self, worker: Worker) -> None:
        """A place at a worker may be free."""
        if not worker.removed:
            self.home(worker).freed()

    def _wake(self, pool: Pool) -> None:
        for _ in range(pool.waiting):
            pool.freed()

    def local_prefill_usable(self, now_s: float) -> bool:
        """Whether a prompt can be prefilled in the PD cluster: by a prefill worker, or by one of both roles."""
        return self.local_prefill.any_usable(now_s) or any(
            w.role == "both" and w.usable(now_s) for w in self.decode.workers
        )
