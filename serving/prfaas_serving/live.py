"""Telemetry of a running router: the simulator's fields from the router's own counters and the workers' load pages.

Windows, length bins and the observed capacity are those of `prfaas_env.telemetry` (`DoorMeter`, `LinkMeter`); what is
here decides only what feeds them. Times inside the router are real seconds; a reading is in seconds of the scenario.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from prfaas_env.decision import legal_moves
from prfaas_env.simulator.formulas import BITS_PER_BYTE, NS_PER_S, ns_from_s
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import (
    DoorMeter,
    LinkMeter,
    Telemetry,
    TelemetrySchema,
    decision_fields,
    decode_work_s,
    pack,
)
from prfaas_serving.backends.engines import LOAD_PATH
from prfaas_serving.choice import Route
from prfaas_serving.fleet import Pool, RoleChanges, Worker
from prfaas_serving.forward import REFUSED_CODES, Ended, Forwarder
from prfaas_serving.paths import Flow

#: Requests that must have ended at a worker while its counters stood still before the page counts as frozen.
_FROZEN_AFTER = 5
#: Bits that must have been fetched before engines' byte counters correct the predicted size of a KV cache.
_ENOUGH_BITS = 1e9
_MOVED = "vllm:nixl_bytes_transferred_sum"
_DEFERRED = "vllm:num_requests_waiting_by_reason{deferred}"
#: Weight of one transfer in the rate that the link is believed to carry.
_RATE_WEIGHT = 0.5

Reading = dict[str, float]


class RouterClock:
    """Real seconds of the monotonic clock as ns of the scenario since the start.

    Args:
        start_s: monotonic time of instant 0.
        time_scale: real seconds per second of the scenario.
    """

    def __init__(self, start_s: float, time_scale: float = 1.0) -> None:
        self.start_s = start_s
        self.time_scale = time_scale

    def ns(self, now_s: float) -> int:
        """Nanoseconds of the scenario, in whole microseconds so that ticks fall on their instants."""
        return max(round((now_s - self.start_s) / self.time_scale * 1e6), 0) * 1000

    def at_s(self, time_ns: int) -> float:
        """Monotonic time of an instant."""
        return self.start_s + time_ns / 1e9 * self.time_scale


# ------------------------------------------------------------------------------------------------ link


@dataclass(eq=False)
class _Sending:
    """A transfer as the watch sees it. `share_s`: seconds of the whole link per transfer when it opened."""

    bits: float
    left_bits: float
    opened_ns: int
    share_s: float
    at: str
    due_ns: int = -1
    """When it should have arrived by the believed rate; -1 = still sending."""


class LinkWatch:
    """Feeds a `LinkMeter` from the transfers that the router knows.

    The router knows the size of a transfer, when it begins, and when the first token came, one decode step after its
    end. Between these, open transfers share the link evenly at the rate it is believed to carry. That rate is learned
    from every arrival: the bits of a transfer over its even share of the busy wall time, never above nominal. What an
    arrival shows to be missing is delivered after it, what a transfer that is overdue has not delivered lowers the
    rate. A transfer whose decode worker has no free slot says nothing about the link once its bits should be there.

    Args:
        clock: of the router.
        nominal_bps: configured capacity, per second of the scenario.
        flow_limit_bps: most that one transfer gets.
        tail_s: time from the end of a transfer to its first token: latency and a decode step, of the scenario.
        has_slot: whether the decode worker of a name would start a sequence at once.
        size_factor: real over predicted size of a KV cache.
    """

    def __init__(
        self,
        clock: RouterClock,
        nominal_bps: float,
        flow_limit_bps: float,
        tail_s: float,
        has_slot: Callable[[str], bool],
        size_factor: Callable[[], float],
    ) -> None:
        self.meter = LinkMeter(nominal_bps)
        self.rate_bps = nominal_bps
        """What the link is believed to carry in all."""
        self._clock = clock
        self._limit_bps = flow_limit_bps
        self._tail_s = tail_s
        self._tail_ns = ns_from_s(tail_s)
        self._has_slot = has_slot
        self._size_factor = size_factor
        self._open: dict[Flow, _Sending] = {}
        self._share_s = 0.0
        self._late_bits = 0.0
        self._at_ns = 0

    def opened(self, flow: Flow, now_s: float) -> None:
        """A transfer begins."""
        self.advance(self._clock.ns(now_s))
        bits = flow.bits * self._size_factor()
        self._open[flow] = _Sending(bits, bits, self._at_ns, self._share_s, flow.at)

    def closed(self, flow: Flow, now_s: float, arrived: bool) -> None:
        """It has arrived, or will not."""
        self.advance(self._clock.ns(now_s))
        sending = self._open.pop(flow, None)
        if sending is None or not arrived:
            return
        early = sending.left_bits > 0.0
        self._late_bits += sending.left_bits
        if early or self._has_slot(sending.at):
            self._learn(sending)

    def unsent_bits(self, now_s: float) -> float:
        """Bits of open transfers that should still be on their way."""
        self.advance(self._clock.ns(now_s))
        return sum(s.left_bits for s in self._open.values())

    def sending_to(self, worker: str) -> int:
        """Transfers to a worker that should still be on their way."""
        return sum(s.at == worker and s.left_bits > 0.0 for s in self._open.values())

    def _learn(self, sending: _Sending) -> None:
        """The rate that an arrival shows."""
        taken_s = (self._at_ns - sending.opened_ns) / NS_PER_S
        if taken_s <= self._tail_s or sending.bits <= 0.0:
            return
        tail_share_s = self._tail_s / max(self._sharing() + (sending.left_bits > 0.0), 1)
        share_s = max(self._share_s - sending.share_s - tail_share_s, 1e-9)
        shown_bps = min(sending.bits / share_s, self.meter.nominal_bps)
        # a transfer hardly longer than its tail shows little
        weight = _RATE_WEIGHT * (taken_s - self._tail_s) / taken_s
        self.rate_bps += weight * (shown_bps - self.rate_bps)

    def _overdue(self, sending: _Sending) -> bool:
        """Whether it should have been told of by now; the link alone can be what holds it up."""
        return (
            sending.left_bits <= 0.0
            and self._at_ns >= sending.due_ns + 2 * self._tail_ns
            and self._has_slot(sending.at)
        )

    def _sharing(self) -> int:
        """Transfers that share the link: those that still send, and those that are overdue."""
        return sum(s.left_bits > 0.0 or self._overdue(s) for s in self._open.values())

    def advance(self, to_ns: int) -> None:
        """Account for the time up to an instant."""
        while self._at_ns < to_ns:
            step_ns = to_ns - self._at_ns
            if not self._open:
                self._account(step_ns, 0.0, False)
                continue
            step_ns = min(step_ns, NS_PER_S)  # what is overdue lowers the rate as time goes by
            sending = [s for s in self._open.values() if s.left_bits > 0.0]
            overdue = [s for s in self._open.values() if self._overdue(s)]
            total_bps, n = 0.0, len(sending) + len(overdue)
            if sending:
                each_bps = min(self.rate_bps / len(sending), self._limit_bps)
                total_bps = each_bps * len(sending)
                first_ns = min(s.left_bits for s in sending) / each_bps * 1e9
                step_ns = min(step_ns, max(math.ceil(first_ns), 1))
                for s in sending:
                    s.left_bits = max(s.left_bits - each_bps * (step_ns / 1e9), 0.0)
                    if s.left_bits < 1.0:
                        s.left_bits, s.due_ns = 0.0, self._at_ns + step_ns
            # the link is the limit while one is open, unless each gets what one can get at most, or decode is full
            open_now = bool(sending) or any(self._has_slot(s.at) for s in self._open.values())
            limited = max(n, 1) * self._limit_bps > self.rate_bps
            self._account(step_ns, total_bps, open_now and limited, n)
            for s in overdue:
                share_s = self._share_s - s.share_s
                self.rate_bps = min(self.rate_bps, max(s.bits / share_s, 1e-3 * self.meter.nominal_bps))

    def _account(self, step_ns: int, total_bps: float, congested: bool, sharing: int = 0) -> None:
        step_s = step_ns / 1e9
        late_bps = min(self._late_bits / step_s, max(self.meter.nominal_bps - total_bps, 0.0))
        self._late_bits = max(self._late_bits - late_bps * step_s, 0.0)
        self._share_s += step_s / max(sharing, 1)
        self._at_ns += step_ns
        self.meter.advance(self._at_ns, total_bps + late_bps, congested)


# ------------------------------------------------------------------------------------------------ workers


@dataclass
class _Page:
    """What was last seen of a worker's load page."""

    fields: dict[str, float] = field(default_factory=dict)
    since_s: float = -math.inf
    """When these counters were first read."""
    ended_then: int = 0


class LoadPages:
    """How old the figures of workers are.

    A page that cannot be read or is not understood leaves the last figures to age. A page with counters that stand
    still while requests end at its worker is frozen: its figures are as old as the first time they were seen.
    """

    def __init__(self) -> None:
        self._pages: dict[Worker, _Page] = {}

    def at_s(self, worker: Worker) -> float:
        """When the figures of a worker were true, monotonic; before its first page the time it came up."""
        load = worker.load
        if load.at_s < 0.0:
            return worker.ramp_from_s
        page = self._pages.get(worker)
        counters = {k: v for k, v in load.fields.items() if "_total" in k or k.endswith("_sum")}
        ended = worker.requests - worker.in_flight
        if page is None or not counters or counters != page.fields:
            self._pages[worker] = _Page(counters, load.at_s, ended)
            return load.at_s
        if ended - page.ended_then >= _FROZEN_AFTER:
            return page.since_s
        return load.at_s

    def forget(self, workers: Iterable[Worker]) -> None:
        """Keep only these workers."""
        known = set(workers)
        for worker in self._pages.keys() - known:
            del self._pages[worker]


class SizeFactor:
    """Real over predicted size of KV caches, from the byte counters of the decode workers (vLLM with NIXL)."""

    def __init__(self) -> None:
        self._first: dict[Worker, tuple[float, float]] = {}
        self._last: dict[Worker, tuple[float, float]] = {}
        self.value = 1.0

    def read(self, workers: Iterable[Worker]) -> None:
        """Read the counters of the last polls."""
        moved_bits = told_bits = 0.0
        for worker in workers:
            counted = worker.load.fields.get(_MOVED)
            if counted is None:
                continue
            now = (counted * BITS_PER_BYTE, worker.load.told_bits)
            last = self._last.get(worker, now)
            if now[0] < last[0] or worker not in self._first:  # a new engine counts from 0
                self._first[worker] = now
            self._last[worker] = now
            moved_bits += now[0] - self._first[worker][0]
            told_bits += now[1] - self._first[worker][1]
        if told_bits >= _ENOUGH_BITS:
            self.value = min(max(moved_bits / told_bits, 0.1), 10.0)


# ------------------------------------------------------------------------------------------------ telemetry


class LiveTelemetry:
    """A router's `Telemetry`. It is a listener of the forwarder and of its links from the moment it is made.

    Args:
        forwarder: of the router.
        changes: changes of role under way and done.
        clock: of the router.
        stale_after_s: age from which a worker's figures are not used any more; real seconds.
    """

    def __init__(
        self, forwarder: Forwarder, changes: RoleChanges, clock: RouterClock, stale_after_s: float = 10.0
    ) -> None:
        resolved = forwarder.resolved
        scenario, deployment = resolved.scenario, resolved.scenario.deployment
        self._f = forwarder
        self._changes = changes
        self.clock = clock
        self._stale_after_s = stale_after_s
        self._scenario = scenario
        self._pd = resolved.pd_index
        self.schema: TelemetrySchema = scenario_schema(scenario)
        self.door = DoorMeter(scenario.slo.ttft_s, scenario.slo.tpot_s)
        self.new_lengths: list[int] = []
        """Incremental lengths since the caller last took them away."""
        self.on_end: Callable[[float, Ended], None] | None = None
        """Told about every request that is over, after it has been counted."""
        self._others = DoorMeter(scenario.slo.ttft_s, scenario.slo.tpot_s)
        self._conversion_ns = ns_from_s(scenario.control.conversion_interval_s)
        self.pages = LoadPages()
        self._size = SizeFactor()
        paths = forwarder.paths
        scale = clock.time_scale
        self._full_step_s = paths.step_s(paths.decode.slots) / scale
        self.links = {
            name: LinkWatch(
                clock,
                link.nominal_bps * scale,
                link.spec.flow_limit_bps,
                link.spec.latency_s + paths.first_step_s / scale,
                self._has_slot,
                lambda: self._size.value,
            )
            for name, link in paths.links.items()
        }
        self._silent = {
            k: LinkMeter(link.capacity_bps)
            for k, link in enumerate(deployment.links)
            if link.pd != resolved.pd.name
        }
        for name, link in paths.links.items():
            link.listener = self.links[name]
        forwarder.listeners.append(self)

    # ------------------------------------------------------------------ listener

    def arrival(
        self, now_s: float, tokens: int, incremental_tokens: int, cached_tokens: int, route: Route
    ) -> None:
        """A request was routed."""
        self.door.arrival(self.clock.ns(now_s), incremental_tokens, tokens, cached_tokens)
        self.new_lengths.append(incremental_tokens)
        del self.new_lengths[: -self.door.recent.maxlen]  # type: ignore[operator]

    def first_token(self, now_s: float, ttft_s: float, route: Route) -> None:
        """Its first token came."""
        self.door.first_token(self.clock.ns(now_s), ttft_s / self.clock.time_scale)

    def finished(self, now_s: float, output_tokens: int, tpot_s: float) -> None:
        """It ended well."""
        self.door.finished(self.clock.ns(now_s), output_tokens, tpot_s / self.clock.time_scale)

    def rejected(self, now_s: float, reason: str) -> None:
        """It was refused or failed before its first token."""
        if reason in REFUSED_CODES:
            self.door.rejected(self.clock.ns(now_s))

    def ended(self, now_s: float, ended: Ended) -> None:
        """A request is over; one that was given up without a first token missed its objective."""
        if ended.ttft_s is None and ended.outcome in {"aborted", "failed"}:
            self.door.missed(self.clock.ns(now_s))
        if self.on_end is not None:
            self.on_end(now_s, ended)

    # ------------------------------------------------------------------ age of what workers say

    def polled(self) -> list[Worker]:
        """Workers in service whose load page is read."""
        return [w for w in self._f.fleet if w.state == "up" and LOAD_PATH[w.engine] is not None]

    def stale_s(self, now_s: float) -> float:
        """Age of the oldest figures of a worker in service, real seconds; 0 where no engine has a load page."""
        return max((now_s - self.pages.at_s(w) for w in self.polled()), default=0.0)

    def stale_workers(self, now_s: float) -> list[str]:
        """Names of the workers whose figures are too old to be used."""
        return [w.name for w in self.polled() if now_s - self.pages.at_s(w) > self._stale_after_s]

    def _fresh(self, worker: Worker, now_s: float) -> bool:
        return (
            worker.state == "up"
            and worker.load.at_s >= 0.0
            and now_s - self.pages.at_s(worker) <= self._stale_after_s
        )

    def _has_slot(self, name: str) -> bool:
        """Whether a decode worker would start a sequence at once."""
        worker = self._f.fleet.workers.get(name)
        if worker is None:
            return False
        started = sum(a.answering for a in worker.places)
        waiting = worker.load.waiting - worker.load.fields.get(_DEFERRED, worker.load.waiting)
        return started < self._f.paths.decode.slots and waiting <= 0.0

    # ------------------------------------------------------------------ reading

    def read(self, now_s: float, last_ns: int | None = None, moves_allowed: bool = True) -> Telemetry:
        """The reading of an instant.

        Args:
            now_s: monotonic time.
            last_ns: instant of the last reading, so that a conversion tick between the two is not missed.
            moves_allowed: False makes every move but "none" illegal.

        Raises:
            ValueError: a field is not finite, which is named. No such reading may reach a policy.
        """
        now_ns = self.clock.ns(now_s)
        fleet, deployment = self._f.fleet, self._scenario.deployment
        self._size.read(fleet.decode.workers)
        self.pages.forget(fleet)
        tick = now_ns > 0 and (
            now_ns % self._conversion_ns == 0
            if last_ns is None
            else now_ns // self._conversion_ns != last_ns // self._conversion_ns
        )
        readings = []
        for i, _ in enumerate(deployment.pd):
            readings.append(
                self._read_pd(now_s, now_ns, tick) if i == self._pd else self._other_pd(i, now_ns)
            )
        for cluster in deployment.prfaas:
            pool = fleet.remote_prefill.get(cluster.name)
            if pool is None:
                readings.append({**_NO_PREFILL, "prefill_instances": float(cluster.n_instances)})
            else:
                readings.append(self._read_prefill(pool, now_s))
        for k, link in enumerate(deployment.links):
            if k in self._silent:
                self._silent[k].advance_for_reading(now_ns, 0.0, False)
                readings.append({**self._silent[k].reading(now_ns), **_NO_FLOWS})
            else:
                readings.append(self._read_link(link.prfaas, now_s, now_ns))
        own = self.legal(tick and moves_allowed)
        return Telemetry(
            self.schema,
            now_ns,
            pack(self.schema, readings),
            conversion_tick=tick,
            legal_moves=tuple(
                own if i == self._pd else (False, True, False) for i in range(len(deployment.pd))
            ),
            recent_lengths_tokens=tuple(
                (self.door if i == self._pd else self._others).recent_lengths()
                for i in range(len(deployment.pd))
            ),
        )

    def split(self) -> tuple[int, int]:
        """(active prefill, active decode) workers of the PD cluster."""
        fleet = self._f.fleet
        return _active(fleet.local_prefill.workers), _active(fleet.decode.workers)

    def legal(self, on_conversion_tick: bool) -> tuple[bool, bool, bool]:
        """Legal moves of the PD cluster now: the simulator's rule, with the scenario's minima and never below one."""
        spec, (prefill, decode) = self._f.resolved.pd, self.split()
        queue = self._f.fleet.local_prefill
        return legal_moves(
            on_conversion_tick,
            len(self._changes.under_way),
            prefill,
            decode,
            max(spec.prefill_floor, 1),
            max(spec.min_decode, 1),
            queue.waiting + queue.behind,
        )

    def _read_prefill(self, pool: Pool, now_s: float) -> Reading:
        """Queue, running prefills and workers of a pool. What a worker has beyond its first prompt queues there."""
        scale = self.clock.time_scale
        requests = tokens = 0
        work_s = residual_s = 0.0
        since_s = now_s
        for waiter in pool.waiters:
            requests += 1
            tokens += waiter.tokens
            work_s += waiter.predicted_s
            since_s = min(since_s, waiter.since_s)
        busy = 0
        for worker in pool.workers:
            if worker.assigned:
                busy += 1
                head = worker.assigned[0]
                residual_s += max(head.started_s + head.predicted_s - now_s, 0.0)
            for attempt in islice(worker.assigned, 1, None):
                requests += 1
                tokens += attempt.tokens
                work_s += attempt.predicted_s
                since_s = min(since_s, attempt.queued_s)
        return {
            "prefill_queue_requests": float(requests),
            "prefill_queue_tokens": float(tokens),
            "prefill_queue_work_s": work_s / scale,
            "prefill_queue_oldest_s": (now_s - since_s) / scale,
            "prefill_residual_s": residual_s / scale,
            "prefill_busy_instances": float(busy),
            "prefill_instances": float(_active(pool.workers)),
        }

    def _read_pd(self, now_s: float, now_ns: int, tick: bool) -> Reading:
        fleet, changes = self._f.fleet, self._changes
        out = self.door.reading(now_ns)
        out.update(self._read_prefill(fleet.local_prefill, now_s))
        if not fleet.local_prefill.workers:  # workers of both roles prefill too
            both = [w for w in fleet.decode.workers if w.role == "both"]
            out["prefill_instances"] = float(_active(both))
        out.update(self._read_decode(now_s, out["output_tokens_mean"]))
        to_next_ns = self._conversion_ns - now_ns % self._conversion_ns
        if tick and not changes.under_way:
            to_next_ns = 0
        ordered_ns = self.clock.ns(changes.ordered_s) if changes.ordered_s is not None else None
        out.update(
            converting_instances=float(len(changes.under_way)),
            conversion_valid=float(ordered_ns is not None),
            since_conversion_s=0.0 if ordered_ns is None else max(now_ns - ordered_ns, 0) / 1e9,
            next_conversion_s=to_next_ns / 1e9,
        )
        decision = self._f.holder.current
        out.update(decision_fields(decision.threshold_tokens, decision.margin_s, decision.cache_rule))
        return out

    def _read_decode(self, now_s: float, output_tokens_mean: float) -> Reading:
        fleet, paths = self._f.fleet, self._f.paths
        slots, scale = paths.decode.slots, self.clock.time_scale
        pool = fleet.decode
        requests, tokens, since_s = pool.waiting, sum(w.tokens for w in pool.waiters), now_s
        since_s = min((w.since_s for w in pool.waiters), default=now_s)
        sequences = used = busy = 0.0
        active = [w for w in pool.workers if _is_active(w)]
        for worker in pool.workers:
            fresh = self._fresh(worker, now_s)
            foreign = worker.load.foreign if fresh else 0.0
            started = sum(a.answering for a in worker.places)
            running = min(started + foreign, float(slots)) if foreign else float(started)
            sequences += running
            busy += running > 0
            if worker in active:
                used += running
            waiting = [a for a in worker.places if not a.answering]
            queued = self._queued_at(worker, fresh, started, len(waiting))
            for attempt in waiting[:queued]:
                arrived_s = attempt.sent_s + self._transfer_s(attempt.tokens)
                requests += 1
                tokens += attempt.tokens
                since_s = min(since_s, max(arrived_s, attempt.sent_s))
        return {
            "decode_queue_requests": float(requests),
            "decode_queue_tokens": float(tokens),
            "decode_queue_work_s": decode_work_s(requests, output_tokens_mean, self._full_step_s, slots),
            "decode_queue_oldest_s": max(now_s - since_s, 0.0) / scale,
            "decode_sequences": sequences,
            "decode_busy_instances": float(busy),
            "decode_instances": float(len(active)),
            "decode_slot_use": min(used / (len(active) * slots), 1.0) if active else 0.0,
            "decode_kv_fill": self._kv_fill(active, now_s),
        }

    def _queued_at(self, worker: Worker, fresh: bool, started: int, waiting: int) -> int:
        """Own requests there whose KV has come and that have no slot: by its page, else by the profile's slots."""
        deferred = worker.load.fields.get(_DEFERRED)
        if fresh and deferred is not None:
            told = max(worker.load.waiting - deferred, 0.0)
        else:
            sending = sum(watch.sending_to(worker.name) for watch in self.links.values())
            told = started + waiting - sending - self._f.paths.decode.slots
        return int(min(max(told, 0.0), waiting))

    def _transfer_s(self, tokens: int) -> float:
        """Real seconds that a KV cache takes over the fastest link."""
        rates = [watch.rate_bps for watch in self.links.values()]
        return self._f.paths.kv_bits(tokens) / max(rates) * self.clock.time_scale if rates else 0.0

    def _kv_fill(self, active: list[Worker], now_s: float) -> float:
        """Mean KV use of the decode workers that say it; 0 where the scenario knows no limit, as in the simulator."""
        if self._f.paths.decode.kv_capacity_tokens is None:
            return 0.0
        told = [w.load.kv_use for w in active if w.load.kv_use is not None and self._fresh(w, now_s)]
        return min(max(sum(told) / len(told), 0.0), 1.0) if told else 0.0

    def _read_link(self, name: str, now_s: float, now_ns: int) -> Reading:
        link, watch = self._f.paths.links[name], self.links[name]
        watch.advance(now_ns)
        # the measured rate is what predictions at the door reckon with from now on
        link.measured_bps = watch.meter.observed_bps / self.clock.time_scale
        backlog_bits = max(link.backlog_bits(now_s), 0.0)
        out = watch.meter.reading(now_ns)
        out.update(
            backlog_bytes=backlog_bits / BITS_PER_BYTE,
            backlog_s=backlog_bits / watch.meter.observed_bps,
            staged_bytes=watch.unsent_bits(now_s) / BITS_PER_BYTE,
            open_flows=float(link.open_flows),
            retransmission_share=0.0,
        )
        return out

    def _other_pd(self, i: int, now_ns: int) -> Reading:
        """Stand-in for a PD cluster that another router serves: its plan, without traffic."""
        spec = self._scenario.deployment.pd[i]
        to_next_ns = self._conversion_ns - now_ns % self._conversion_ns
        return {
            **self._others.reading(now_ns),
            **_NO_PREFILL,
            **_NO_DECODE,
            "prefill_instances": float(spec.n_prefill),
            "decode_instances": float(spec.n_decode),
            "converting_instances": 0.0,
            "conversion_valid": 0.0,
            "since_conversion_s": 0.0,
            "next_conversion_s": to_next_ns / 1e9,
            **decision_fields(math.inf, None, "scarce"),
        }

    # ------------------------------------------------------------------ where it comes from

    @property
    def sources(self) -> dict[str, str]:
        """Where each field comes from now: "router", "worker" (its load page), or "stand-in"."""
        resolved = self._f.resolved
        deployment = resolved.scenario.deployment
        own = {f"pd{self._pd}"}
        own |= {f"prfaas{j}" for j, c in enumerate(deployment.prfaas) if c.name in self.links}
        own |= {f"link{k}" for k in range(len(deployment.links)) if k not in self._silent}
        paged = [w for w in self._f.fleet.decode.workers if w.load.at_s >= 0.0]
        by_reason = any(_DEFERRED in w.load.fields for w in paged)
        limited = self._f.paths.decode.kv_capacity_tokens is not None
        worker_fields = {
            "decode_queue_requests": by_reason,
            "decode_queue_tokens": by_reason,
            "decode_queue_work_s": by_reason,
            "decode_queue_oldest_s": by_reason,
        }
        found = {}
        for name in self.schema.names:
            group, _, short = name.partition(".")
            if group not in own or short == "retransmission_share":
                found[name] = "stand-in"
            elif short == "decode_kv_fill":
                found[name] = "worker" if limited and paged else "stand-in"
            else:
                found[name] = "worker" if worker_fields.get(short) else "router"
        return found


def _is_active(worker: Worker) -> bool:
    """Whether it counts in its role now, as in the simulator: in service, not draining."""
    return not worker.known_down


def _active(workers: Iterable[Worker]) -> int:
    return sum(_is_active(w) for w in workers)


_NO_PREFILL: Reading = dict.fromkeys(
    (
        "prefill_queue_requests",
        "prefill_queue_tokens",
        "prefill_queue_work_s",
        "prefill_queue_oldest_s",
        "prefill_residual_s",
        "prefill_busy_instances",
        "prefill_instances",
    ),
    0.0,
)
_NO_DECODE: Reading = dict.fromkeys(
    (
        "decode_queue_requests",
        "decode_queue_tokens",
        "decode_queue_work_s",
        "decode_queue_oldest_s",
        "decode_sequences",
        "decode_busy_instances",
        "decode_instances",
        "decode_slot_use",
        "decode_kv_fill",
    ),
    0.0,
)
_NO_FLOWS: Reading = dict.fromkeys(
    ("backlog_bytes", "backlog_s", "staged_bytes", "open_flows", "retransmission_share"), 0.0
)
