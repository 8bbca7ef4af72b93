"""The reference engine: the world as SimPy processes, written to be read.

Time is whole nanoseconds. SimPy's queue is ordered by (time, priority); every event here carries the key of
`events.event_key` as its priority, so that one instant is handled in the fixed order of the world. SimPy's own
events (a process starts, an awaited event fires) have priorities 0 and 1 and so take effect at once.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from prfaas_env.decision import (
    ClusterDecision,
    Decision,
    Move,
    legal_moves,
    offload_by_margin,
    offload_by_threshold,
)
from prfaas_env.prediction import PathState, first_token_s
from prfaas_env.simulator.cluster import (
    Attempt,
    DecodePool,
    Instance,
    Phase,
    PrefillPool,
    PrefillTimes,
    Role,
    earliest_prefill_to_finish,
    fewest_sequences,
)
from prfaas_env.simulator.decode import FIRST, DecodeBatch, Sequence
from prfaas_env.simulator.events import Kind, event_key
from prfaas_env.simulator.faults import deadline_ns
from prfaas_env.simulator.formulas import (
    BITS_PER_BYTE,
    NEVER_NS,
    decode_step_s,
    jitter_ns,
    kv_transfer_bytes,
    ns_from_s,
    pipelined_cap_bps,
    pipelined_open_ns,
    rdma_s,
    retransmitted_share,
)
from prfaas_env.simulator.link import Flow, LinkState
from prfaas_env.simulator.records import (
    REJECT_REASONS,
    Counters,
    RequestRecords,
    Route,
    Status,
    TimeIntegral,
    Totals,
)
from prfaas_env.simulator.simpy_prefix import PrefixSide
from prfaas_env.simulator.world import World, links_of
from prfaas_env.telemetry import (
    DoorMeter,
    LinkMeter,
    Telemetry,
    decision_fields,
    decode_work_s,
    meets,
    pack,
)

Process = Generator[simpy.Event, Any, None]
_SETTLE_KEY = event_key(Kind.SETTLE)


@dataclass(frozen=True, slots=True)
class DecisionLog:
    """A decision and the instant at which it came into force, before its events or (`after`) after them."""

    time_ns: int
    after: bool
    decision: Decision


@dataclass(frozen=True)
class Snapshot:
    """State of an engine: its world, the instant (`after`: its events are handled), the decisions that led there."""

    world: World
    time_ns: int
    after: bool
    decisions: tuple[DecisionLog, ...]


class _KeyedEvent(simpy.Event):
    """Fires at an absolute time, in the world's order within the instant."""

    def __init__(self, env: simpy.Environment, at_ns: int, key: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=key, delay=at_ns - env.now)  # type: ignore[arg-type]


class PdSite:
    """One PD cluster: its instances, both pools, its meter, its decision, its conversion."""

    def __init__(self, world: World, index: int, cluster_id: int) -> None:
        scenario = world.scenario
        spec = scenario.deployment.pd[index]
        hardware = scenario.hardware_of(spec)
        if hardware.decode is None:
            raise ValueError(f"pd cluster {spec.name!r} has no decode profile")
        self.spec = spec
        self.index = index
        self.decode_profile = hardware.decode
        self.instances = [
            Instance(k, Role.PREFILL if k < spec.n_prefill else Role.DECODE, DecodeBatch(hardware.decode))
            for k in range(spec.n_prefill + spec.n_decode)
        ]
        self.prefill = PrefillPool(cluster_id, self.instances, PrefillTimes(hardware))
        self.decode = DecodePool(cluster_id, self.instances, hardware.decode.kv_reserve_tokens)
        self.door = DoorMeter(scenario.slo.ttft_s, scenario.slo.tpot_s)
        self.decision = ClusterDecision(threshold_tokens=math.inf)
        self.converting = 0
        self.converted_ns = -1
        self.links = links_of(scenario.deployment, spec.name)
        d = hardware.decode
        self.first_step_s = decode_step_s(d.a_s, d.b_s_per_sequence, d.c_s_per_token, 1, 0)
        self.full_step_s = decode_step_s(d.a_s, d.b_s_per_sequence, d.c_s_per_token, d.slots, 0)


class SimpyEngine:
    """One episode of one world. `apply` a decision, `run_until` the next one, read `telemetry` and `totals`."""

    name = "simpy"

    def __init__(self, world: World) -> None:
        self.world = world
        self._log: list[DecisionLog] = []
        self._start()

    # ------------------------------------------------------------------ set-up

    def _start(self) -> None:
        scenario = self.world.scenario
        deployment = scenario.deployment
        self.env = simpy.Environment()
        self.records = RequestRecords.empty(len(self.world.requests))
        self.counters = Counters()
        self.waiting = TimeIntegral()
        n_prfaas = len(deployment.prfaas)
        self.remote = [
            PrefillPool(
                j,
                [Instance(k, Role.PREFILL, None) for k in range(spec.n_instances)],
                PrefillTimes(scenario.hardware_of(spec)),
            )
            for j, spec in enumerate(deployment.prfaas)
        ]
        self.sites = [PdSite(self.world, i, n_prfaas + i) for i in range(len(deployment.pd))]
        prfaas_index = {spec.name: j for j, spec in enumerate(deployment.prfaas)}
        self.links = [
            LinkState(
                float(trace.capacity_bps[0]),
                LinkMeter(spec.capacity_bps, scenario.measure.warmup_s),
                setup_ns=ns_from_s(spec.setup_s),
                idle_ns=ns_from_s(spec.idle_s),
            )
            for spec, trace in zip(deployment.links, self.world.links, strict=True)
        ]
        self.link_prfaas = [prfaas_index[spec.prfaas] for spec in deployment.links]
        self.link_specs = deployment.links
        self._link_wake = [0] * len(self.links)
        #: bits of requests routed over each link whose flow has not opened yet
        self.pending_bits = [0] * len(self.links)
        kv = scenario.model.kv
        per_token, window = kv.window_arrays()
        self._kv: tuple[int, int, list[int], list[int]] = (
            kv.fixed_bytes,
            kv.bytes_per_token,
            per_token.tolist(),
            window.tolist(),
        )
        pipelined = scenario.transport.pipelining and kv.n_layers > 1
        self.pipeline_layers = kv.n_layers if pipelined else 1
        self.control_ns = ns_from_s(scenario.control.control_interval_s)
        ratio = round(scenario.control.conversion_interval_s / scenario.control.control_interval_s)
        self.conversion_ns = ratio * self.control_ns
        limits = [
            x for x in (scenario.admission.max_input_tokens, scenario.model.max_input_tokens) if x is not None
        ]
        self.max_input_tokens = min(limits, default=None)
        requests = self.world.requests
        self._arrival_ns: list[int] = requests.arrival_ns.tolist()
        self._input: list[int] = requests.input_tokens.tolist()
        self._output: list[int] = requests.output_tokens.tolist()
        self._pd_of: list[int] = self.world.pd_of.tolist()
        self.prefix = PrefixSide(self.world)
        self._had_tokens = [0] * len(requests)
        jitter = self.world.jitter_ns
        self._luck_ns: list[int] | None = None if jitter is None else jitter.tolist()
        self._flow_limits_bps = [spec.flow_limit_bps for spec in deployment.links]
        #: the attempt under way of each open request, until its sequence joins a batch
        self.attempts: dict[int, Attempt] = {}
        self._unresolved = len(requests)
        self._settle_due = False
        for pool in self.remote:
            pool.active = pool.in_role.count = len(pool.instances)
        for site in self.sites:
            site.prefill.active = site.prefill.in_role.count = site.spec.n_prefill
            site.decode.active = site.spec.n_decode
            site.decode.slots.count = site.spec.n_decode * site.decode_profile.slots
        self.env.process(self._arrivals())
        for k in range(len(self.links)):
            self.env.process(self._capacity_changes(k))
        self.env.process(self._faults())
        self.env.process(self._give_ups())
        if scenario.faults.deadline_s is not None:
            self.env.process(self._deadlines())

    # ------------------------------------------------------------------ time

    @property
    def now_ns(self) -> int:
        """Present instant."""
        return self.env.now  # type: ignore[return-value]

    def _at(
        self,
        at_ns: int,
        kind: Kind,
        cluster: int = 0,
        instance: int = 0,
        request: int = 0,
        attempt: int = 0,
    ) -> simpy.Event:
        return _KeyedEvent(self.env, at_ns, event_key(kind, cluster, instance, request, attempt))

    def run_until(self, t_ns: int) -> None:
        """Handle everything that lies before `t_ns`; what lies at it follows the next decision."""
        if t_ns > self.now_ns:
            self.env.run(until=t_ns)

    def run_to_end(self, limit_ns: int = NEVER_NS) -> None:
        """Run to the end of the instant in which the last request is resolved, or to `limit_ns`."""
        if self._unresolved == 0:
            return
        step, peek = self.env.step, self.env.peek
        while self._unresolved > 0 and peek() < limit_ns:
            step()
        if self._unresolved > 0:
            if limit_ns < NEVER_NS:
                self.run_until(limit_ns)
            return
        self._end_instant()

    def _end_instant(self) -> None:
        while self.env.peek() == self.env.now:
            self.env.step()

    @property
    def _instant_over(self) -> bool:
        """Whether what lies at this instant is handled: true at the end of a drained run, never after `run_until`."""
        return self.env.peek() > self.env.now

    @property
    def done(self) -> bool:
        """Whether every request of the world is finished, rejected or aborted."""
        return self._unresolved == 0

    # ------------------------------------------------------------------ decisions

    def _legal(self, site: PdSite) -> tuple[bool, bool, bool]:
        now = self.now_ns
        return legal_moves(
            now > 0 and now % self.conversion_ns == 0,
            site.converting,
            site.prefill.active,
            site.decode.active,
            site.spec.prefill_floor,
            site.spec.min_decode,
            len(site.prefill.queue),
        )

    def apply(self, decision: Decision) -> None:
        """Put a decision in force; an order that is not legal becomes "no move" and is counted."""
        if len(decision.clusters) != len(self.sites):
            raise ValueError(
                f"decision for {len(decision.clusters)} PD clusters, there are {len(self.sites)}"
            )
        self._log.append(DecisionLog(self.now_ns, self._instant_over, decision))
        for site, cluster in zip(self.sites, decision.clusters, strict=True):
            site.decision = cluster
            if cluster.move is Move.NONE:
                continue
            if not self._legal(site)[cluster.move]:
                self.counters.invalid_moves += 1
                continue
            if cluster.move is Move.PREFILL_TO_DECODE:
                source, role = earliest_prefill_to_finish(site.instances), Role.DECODE
            else:
                source, role = fewest_sequences(site.instances), Role.PREFILL
            if source is not None:
                self._order_conversion(site, source, role)

    def _order_conversion(self, site: PdSite, instance: Instance, role: Role) -> None:
        now = self.now_ns
        self.counters.conversions += 1
        site.converting += 1
        site.converted_ns = now
        instance.phase = Phase.DRAINING
        instance.drained = self.env.event()
        self._count_active(site.prefill, site, instance, -1)
        if instance.running is None and instance.sequences() == 0:
            instance.drained.succeed()
        self.env.process(self._convert(site, instance, role))

    def _convert(self, site: PdSite, instance: Instance, role: Role) -> Process:
        """Drain, switch, join the other role, warm up (design of the paper's node conversion, 3.4.3)."""
        costs = self.world.scenario.conversion
        cluster = site.prefill.cluster
        assert instance.drained is not None
        if role is Role.PREFILL:
            limit = self._at(
                self.now_ns + ns_from_s(costs.drain_limit_s), Kind.CONVERSION, cluster, instance.id
            )
            yield instance.drained | limit
            self._evict(site, instance)
        else:
            yield instance.drained
        instance.drained = None
        instance.phase, instance.warm_speed, instance.warm_until_ns = Phase.SWITCHING, 1.0, -1
        self._count_role(site, instance, -1)
        yield self._at(self.now_ns + ns_from_s(costs.switch_s), Kind.CONVERSION, cluster, instance.id)
        instance.role, instance.phase = role, Phase.ACTIVE
        site.converting -= 1
        self._count_role(site, instance, 1)
        self._count_active(site.prefill, site, instance, int(instance.up))
        if costs.warmup_s > 0 and costs.warmup_speed < 1:
            instance.warm_speed = costs.warmup_speed
            warm_until_ns = instance.warm_until_ns = self.now_ns + ns_from_s(costs.warmup_s)
            self._settle_later()
            yield self._at(warm_until_ns, Kind.CONVERSION, cluster, instance.id)
            if instance.warm_until_ns != warm_until_ns:
                return  # it has switched again since
            instance.warm_speed = 1.0
            if instance.batch is not None:
                instance.batch.dirty = True
        self._settle_later()

    @staticmethod
    def _count_active(pool: PrefillPool, site: PdSite | None, instance: Instance, change: int) -> None:
        """Account an instance that stops (-1) or begins (1) to count in its role."""
        if instance.role is Role.PREFILL:
            pool.active += change
        elif site is not None:
            site.decode.active += change

    def _count_role(self, site: PdSite, instance: Instance, change: int) -> None:
        """Account an instance that leaves (-1) or joins (1) its role."""
        if instance.role is Role.PREFILL:
            site.prefill.in_role.add(self.now_ns, change)
        else:
            site.decode.slots.add(self.now_ns, change * site.decode_profile.slots)

    def _evict(self, site: PdSite, instance: Instance) -> None:
        """Drain limit reached: what still decodes here is prefilled again, prompt and produced tokens."""
        batch = instance.batch
        if batch is None or not batch.sequences:
            return
        now = self.now_ns
        for request in sorted(batch.sequences):
            produced = self._handed_out(batch, request)
            sequence = batch.leave(request)
            site.decode.sequences.add(now, -1)
            cached_tokens = self._input[request] - int(self.records.incremental_tokens[request])
            self._start_attempt(
                request,
                site,
                number=sequence.attempt + 1,
                new_tokens=sequence.context_tokens + produced - cached_tokens,
                cached_tokens=cached_tokens,
                remaining_tokens=sequence.remaining_tokens - produced,
                link=self._retry_link(request, site, sequence.context_tokens + produced - cached_tokens),
            )
        batch.refresh_next()

    def _handed_out(self, batch: DecodeBatch, request: int) -> int:
        """Tokens of this attempt that have come out: rounding may see the first or the last one 1 ns early."""
        if self.records.first_token_ns[request] == NEVER_NS:
            return 0
        sequence = batch.sequences[request]
        return min(batch.generated(sequence, self.now_ns), sequence.remaining_tokens - 1)

    # ------------------------------------------------------------------ faults

    def _faults(self) -> Process:
        trace = self.world.faults
        rows = zip(
            trace.time_ns.tolist(),
            trace.cluster.tolist(),
            trace.instance.tolist(),
            trace.speed.tolist(),
            strict=True,
        )
        for at_ns, cluster, instance, speed in rows:
            yield self._at(at_ns, Kind.FAULT, cluster, instance)
            self._set_health(cluster, instance, speed)

    def _set_health(self, cluster: int, number: int, speed: float) -> None:
        """An instance goes down (speed 0), comes back, or changes speed."""
        n_prfaas = len(self.remote)
        site = self.sites[cluster - n_prfaas] if cluster >= n_prfaas else None
        pool = site.prefill if site is not None else self.remote[cluster]
        instance = pool.instances[number]
        was_up, instance.up = instance.up, speed > 0
        instance.health = speed if instance.up else 1.0
        if instance.phase is Phase.ACTIVE:
            self._count_active(pool, site, instance, int(instance.up) - int(was_up))
        if was_up and not instance.up:
            self._lose_work(pool, site, instance)
        if instance.batch is not None:
            instance.batch.dirty = True
        self._settle_later()

    def _lose_work(self, pool: PrefillPool, site: PdSite | None, instance: Instance) -> None:
        """What an instance worked on when it went down is prefilled again; a cluster without any hands its queue on.

        What has been prefilled is safe: it lies in the cluster's memory, not in the instance.
        """
        attempt = instance.running
        if attempt is not None:
            self._stop_prefill(pool, instance)
            self._retry(attempt)
        if site is not None:
            self._evict(site, instance)
        if instance.drained is not None and not instance.drained.triggered:
            instance.drained.succeed()
        if pool.active == 0:
            for queued in list(pool.queue):
                home = self.sites[self._pd_of[queued.request]]
                link = self._retry_link(queued.request, home, queued.new_tokens)
                other = home.prefill if link < 0 else self.remote[self.link_prfaas[link]]
                if other is not pool:
                    pool.remove(queued)
                    self._forget_bits(queued)
                    self._retry(queued, link)

    def _stop_prefill(self, pool: PrefillPool, instance: Instance) -> None:
        """A running prefill ends before its time; nothing of it is left."""
        attempt = instance.running
        assert attempt is not None
        instance.running = None
        pool.busy.add(self.now_ns, -1)
        self.prefix.release(attempt.request)
        self._forget_bits(attempt)

    def _forget_bits(self, attempt: Attempt) -> None:
        """Nothing more of an attempt crosses its link."""
        if attempt.link < 0:
            return
        if not attempt.opened:
            self.pending_bits[attempt.link] -= attempt.bytes_to_send * BITS_PER_BYTE
            if attempt.started_ns >= 0:
                self.records.sent_bytes[attempt.request] -= attempt.bytes_to_send
        elif attempt.flow is not None and attempt.flow in self.links[attempt.link].flows:
            left = self.links[attempt.link].drop(attempt.flow, self.now_ns)
            self.records.sent_bytes[attempt.request] -= int(left) // BITS_PER_BYTE
            self._settle_later()

    def _retry(self, attempt: Attempt, link: int | None = None) -> None:
        """Prefill once more what an attempt was to prefill."""
        attempt.dead = True
        request = attempt.request
        site = self.sites[self._pd_of[request]]
        self._start_attempt(
            request,
            site,
            number=attempt.number + 1,
            new_tokens=attempt.new_tokens,
            cached_tokens=attempt.cached_tokens,
            remaining_tokens=attempt.remaining_tokens,
            link=self._retry_link(request, site, attempt.new_tokens) if link is None else link,
        )

    def _retry_link(self, request: int, site: PdSite, new_tokens: int) -> int:
        """Link for another attempt, or -1: the side it was routed to first, unless nobody is left there."""
        if not site.links:
            return -1
        remote = self.records.route[request] == Route.REMOTE
        if not remote and site.prefill.active > 0:
            return -1
        cached_tokens = self._input[request] - int(self.records.incremental_tokens[request])
        context_tokens, had_tokens = cached_tokens + new_tokens, self._had_tokens[request]
        return self._alive(site, self._best_link(site, request, context_tokens, cached_tokens, had_tokens)[0])

    def _alive(self, site: PdSite, link: int) -> int:
        """A link, or -1 where its PrfaaS cluster is wholly down and there is local prefill."""
        if site.prefill.active > 0 and self.remote[self.link_prfaas[link]].active == 0:
            return -1
        return link

    def _give_ups(self) -> Process:
        times = self.world.give_up_ns
        if times is None:
            return
        pd_of = self.world.pd_of
        for request in np.lexsort((np.arange(len(times)), pd_of, times)).tolist():
            yield self._at(int(times[request]), Kind.GIVE_UP, self._pd_of[request], 0, request)
            self._abort(request)

    def _deadlines(self) -> Process:
        wait_ns = deadline_ns(self.world.scenario)
        for request, at_ns in enumerate(self._arrival_ns):
            yield self._at(at_ns + wait_ns, Kind.DEADLINE, self._pd_of[request], 0, request)
            if self.records.first_token_ns[request] == NEVER_NS:
                self._abort(request)

    def _abort(self, request: int) -> None:
        """Nobody waits for a request any more: whatever holds it lets it go."""
        records, now = self.records, self.now_ns
        if records.status[request] != Status.OPEN:
            return
        site = self.sites[self._pd_of[request]]
        records.status[request] = Status.ABORTED
        records.abort_ns[request] = now
        self.counters.aborted += 1
        self._unresolved -= 1
        if records.first_token_ns[request] == NEVER_NS:
            self.waiting.add(now, -1)
            site.door.missed(now)
        self.prefix.forget(site.prefill.cluster, request)
        attempt = self.attempts.pop(request, None)
        if attempt is None:
            self._abort_decode(site, request)
        elif attempt.joined:
            site.decode.remove(request)
        else:
            self._abort_attempt(site, attempt)
        self._settle_later()

    def _abort_decode(self, site: PdSite, request: int) -> None:
        for instance in site.instances:
            batch = instance.batch
            if batch is None or request not in batch.sequences:
                continue
            batch.leave(request)
            site.decode.sequences.add(self.now_ns, -1)
            if instance.drained is not None and not batch.sequences:
                instance.drained.succeed()

    def _abort_attempt(self, site: PdSite, attempt: Attempt) -> None:
        attempt.dead = True
        pool = site.prefill if attempt.link < 0 else self.remote[self.link_prfaas[attempt.link]]
        if attempt.instance is None:
            if attempt.number > 0:  # 0: the copy of a prefix, in no queue
                pool.remove(attempt)
            self._forget_bits(attempt)
        elif attempt.instance.running is attempt:
            instance = attempt.instance
            self._stop_prefill(pool, instance)
            if instance.drained is not None:
                instance.drained.succeed()
        else:
            self._forget_bits(attempt)

    # ------------------------------------------------------------------ arrivals and routing

    def _arrivals(self) -> Process:
        for request, at_ns in enumerate(self._arrival_ns):
            yield self._at(at_ns, Kind.ARRIVAL, self._pd_of[request], 0, request)
            self._arrive(request)

    def _arrive(self, request: int) -> None:
        now = self.now_ns
        site = self.sites[self._pd_of[request]]
        input_tokens = self._input[request]
        others = [(k, self.link_prfaas[k]) for k in site.links]
        pools = [pool for _, pool in others]
        abundant = site.decision.cache_rule == "abundant"
        incremental = input_tokens - self.prefix.seen_prefix(
            request, site.prefill.cluster, pools, abundant, now
        )
        records = self.records
        self.counters.arrived += 1
        records.incremental_tokens[request] = incremental
        link = self._route(site, request, incremental)
        reason = self._refusal(site, link, input_tokens)
        if reason is not None:
            self.counters.rejects[REJECT_REASONS.index(reason)] += 1
            records.status[request] = Status.REJECTED
            self._unresolved -= 1
            site.door.rejected(now)
            return
        records.status[request] = Status.OPEN
        claim = self.prefix.claim(request, site.prefill.cluster, others, link, abundant, now)
        self._had_tokens[request] = claim.had_tokens
        records.incremental_tokens[request] = input_tokens - claim.cached_tokens
        site.door.arrival(now, incremental, input_tokens, claim.cached_tokens)
        self.waiting.add(now, 1)
        remote = link >= 0
        records.route[request] = Route.REMOTE if remote else Route.LOCAL
        if remote:
            self.counters.remote += 1
            records.prfaas[request] = self.link_prfaas[link]
        if claim.copy_link >= 0:
            self._copy_first(site, request, claim.copy_link, claim.copied_tokens, link)
        else:
            self._first_attempt(site, request, link)

    def _first_attempt(self, site: PdSite, request: int, link: int) -> None:
        new_tokens = int(self.records.incremental_tokens[request])
        self._start_attempt(
            request,
            site,
            number=1,
            new_tokens=new_tokens,
            cached_tokens=self._input[request] - new_tokens,
            remaining_tokens=self._output[request],
            link=link,
        )

    def _copy_first(self, site: PdSite, request: int, copy_link: int, tokens: int, link: int) -> None:
        """Send a cached prefix across before the prefill (abundant rule, paper 5.1); then queue the first attempt."""
        copy = Attempt(
            request=request,
            number=0,
            new_tokens=0,
            cached_tokens=0,
            context_tokens=0,
            remaining_tokens=0,
            prefill_ns=0,
            bytes_to_send=self._bytes(tokens),
            queued_ns=self.now_ns,
            started=self.env.event(),
            sent=self.env.event(),
            link=copy_link,
            started_ns=0,
        )
        self.records.sent_bytes[request] += copy.bytes_to_send
        self.pending_bits[copy_link] += copy.bytes_to_send * BITS_PER_BYTE
        self.attempts[request] = copy
        self._open_when_ready(copy)
        self.env.process(self._after_copy(site, copy, link))

    def _after_copy(self, site: PdSite, copy: Attempt, link: int) -> Process:
        request = copy.request
        yield copy.sent
        arrives_ns = self.now_ns + self._delay_ns(copy)
        yield self._at(arrives_ns, Kind.HANDOVER_END, site.decode.cluster, 0, request, 0)
        if copy.dead:
            return
        self.prefix.copy_ended(request, self.now_ns)
        # whoever was to prefill it may be gone meanwhile
        new_tokens = int(self.records.incremental_tokens[request])
        link = self._alive(site, link) if link >= 0 else self._retry_link(request, site, new_tokens)
        self._first_attempt(site, request, link)

    def _delay_ns(self, attempt: Attempt) -> int:
        """From the end of a flow to the arrival of what it carried."""
        spec = self.link_specs[attempt.link]
        delay_ns = ns_from_s(spec.latency_s)
        if self._luck_ns is not None:
            delay_ns += jitter_ns(spec.jitter_s, self._luck_ns[attempt.request])
        return delay_ns

    def _refusal(self, site: PdSite, link: int, input_tokens: int) -> str | None:
        """Why a request is rejected at the door, if it is."""
        if self.max_input_tokens is not None and input_tokens > self.max_input_tokens:
            return "over_limit"
        capacity = site.decode_profile.kv_capacity_tokens
        if capacity is not None and input_tokens + site.decode.kv_reserve_tokens > capacity:
            return "kv_capacity"
        most = self.world.scenario.admission.max_queue_requests
        pool = site.prefill if link < 0 else self.remote[self.link_prfaas[link]]
        if most is not None and len(pool.queue) >= most:
            return "queue_full"
        return None

    def _bytes(self, tokens: int) -> int:
        return kv_transfer_bytes(*self._kv, tokens)

    def _rdma_s(self, site: PdSite, n_bytes: int) -> float:
        return rdma_s(n_bytes, site.spec.rdma_bps, site.spec.rdma_latency_s)

    def _path(self, site: PdSite, pool: PrefillPool, link: int) -> PathState:
        """What prediction reads now for the local pool (`link` < 0) or a remote pool over a link."""
        now = self.now_ns
        backlog_bits, observed_bps = 0.0, math.inf
        if link >= 0:
            state = self.links[link]
            state.meter.advance_for_reading(now, state.total_rate_bps, state.congested)
            backlog_bits = self.pending_bits[link] + state.unsent_bits(now)
            observed_bps = state.meter.observed_bps
        return PathState(
            queued_work_s=pool.queued_work_ns / 1e9,
            idle_instances=pool.idle_count(),
            active_instances=pool.active,
            residual_s=pool.first_free_ns(now) / 1e9,
            backlog_bits=backlog_bits,
            observed_bps=observed_bps,
        )

    def _predict(
        self, site: PdSite, link: int, new_tokens: int, cached_tokens: int, had_tokens: int
    ) -> float:
        """Predicted first-token time over a path, in seconds from now; the decode side has `had_tokens` already."""
        n_bytes = self._bytes(new_tokens + cached_tokens - had_tokens)
        pool = site.prefill if link < 0 else self.remote[self.link_prfaas[link]]
        latency_s = self._rdma_s(site, n_bytes) if link < 0 else self.link_specs[link].latency_s
        return first_token_s(
            self._path(site, pool, link),
            pool.times.seconds(new_tokens, cached_tokens),
            float(n_bytes * BITS_PER_BYTE),
            latency_s,
            self.pipeline_layers,
            site.first_step_s,
        )

    def _best_link(
        self, site: PdSite, request: int, context_tokens: int, cached_tokens: int | None, had_tokens: int
    ) -> tuple[int, float]:
        """(link of the PrfaaS cluster with the earliest predicted finish, that prediction); lowest id on a tie.

        Each cluster counts what it is seen to have cached of the request, or `cached_tokens` if given.
        """
        best, best_s = site.links[0], math.inf
        for link in site.links:
            cached = cached_tokens
            if cached is None:
                cached = self.prefix.seen_tokens(self.link_prfaas[link], request, self.now_ns)
            predicted_s = self._predict(site, link, context_tokens - cached, cached, had_tokens)
            if predicted_s < best_s:
                best, best_s = link, predicted_s
        return best, best_s

    def _route(self, site: PdSite, request: int, incremental: int) -> int:
        """Link to go over, or -1 for local prefill. Decided once, at arrival."""
        if not site.links:
            return -1
        link = self._chosen_link(site, request, incremental)
        return link if link < 0 else self._alive(site, link)

    def _chosen_link(self, site: PdSite, request: int, incremental: int) -> int:
        """What the decision in force says, or the link where there is no local prefill."""
        decision = site.decision
        forced = site.prefill.active == 0
        if decision.threshold_tokens is not None:
            if not (forced or offload_by_threshold(incremental, decision.threshold_tokens)):
                return -1
            if len(site.links) == 1:
                return site.links[0]
        input_tokens = self._input[request]
        own = self.prefix.seen_tokens(site.prefill.cluster, request, self.now_ns)
        link, remote_s = self._best_link(site, request, input_tokens, None, own)
        if decision.threshold_tokens is not None:
            return link
        assert decision.margin_s is not None
        local_s = self._predict(site, -1, input_tokens - own, own, own)
        if forced or offload_by_margin(remote_s, local_s, decision.margin_s):
            return link
        return -1

    # ------------------------------------------------------------------ life of an attempt

    def _start_attempt(
        self,
        request: int,
        site: PdSite,
        *,
        number: int,
        new_tokens: int,
        cached_tokens: int,
        remaining_tokens: int,
        link: int,
    ) -> None:
        """Queue one try of a request for prefill, over a link or locally (`link` < 0)."""
        context_tokens = cached_tokens + new_tokens
        pool = site.prefill if link < 0 else self.remote[self.link_prfaas[link]]
        attempt = Attempt(
            request=request,
            number=number,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            context_tokens=context_tokens,
            remaining_tokens=remaining_tokens,
            prefill_ns=ns_from_s(pool.times.seconds(new_tokens, cached_tokens)),
            bytes_to_send=self._bytes(context_tokens - self._had_tokens[request]),
            queued_ns=self.now_ns,
            started=self.env.event(),
            sent=self.env.event(),
            link=link,
        )
        self.attempts[request] = attempt
        self.records.attempts[request] = number
        if link >= 0:
            self.pending_bits[link] += attempt.bytes_to_send * BITS_PER_BYTE
        pool.push(attempt)
        self.env.process(self._serve(site, pool, attempt))
        self._settle_later()

    def _serve(self, site: PdSite, pool: PrefillPool, attempt: Attempt) -> Process:
        """Prefill, hand the KV cache over, join the decode queue."""
        instance: Instance = yield attempt.started
        attempt.instance = instance
        request, number, link = attempt.request, attempt.number, attempt.link
        if link >= 0 and self.pipeline_layers > 1:
            self.env.process(self._open_while_prefilling(attempt))
        yield self._at(attempt.prefill_end_ns, Kind.PREFILL_END, pool.cluster, instance.id, request, number)
        if attempt.dead:
            return
        self._end_prefill(pool, instance)
        self.prefix.prefill_ended(pool.cluster, site.prefill.cluster, request, self.now_ns)
        if link >= 0:
            if attempt.flow is not None:
                self.links[link].prefill_ended(attempt.flow)
                self._settle_later()
            elif self.pipeline_layers == 1:
                self._open_when_ready(attempt)
            yield attempt.sent
            handover_ns = self._delay_ns(attempt)
        else:
            handover_ns = ns_from_s(self._rdma_s(site, attempt.bytes_to_send))
        yield self._at(self.now_ns + handover_ns, Kind.HANDOVER_END, site.decode.cluster, 0, request, number)
        if not attempt.dead:
            self._join_decode_queue(site, attempt)

    def _open_while_prefilling(self, attempt: Attempt) -> Process:
        """Layer-wise sending: the flow opens when the first of n layers is done."""
        delay_ns = pipelined_open_ns(attempt.prefill_end_ns - self.now_ns, self.pipeline_layers)
        yield self._at(
            self.now_ns + delay_ns, Kind.FLOW_OPEN, attempt.link, 0, attempt.request, attempt.number
        )
        if not attempt.dead:
            self._open_when_ready(attempt)

    def _open_when_ready(self, attempt: Attempt) -> None:
        """Open a flow now, or once connections are set up."""
        at_ns = self.links[attempt.link].opening_ns(self.now_ns)
        if at_ns == self.now_ns:
            self._open_flow(attempt)
            return

        def set_up(_: simpy.Event) -> None:
            if not attempt.dead:
                self._open_flow(attempt)

        event = self._at(at_ns, Kind.FLOW_OPEN, attempt.link, 0, attempt.request, attempt.number)
        assert event.callbacks is not None
        event.callbacks.append(set_up)

    def _open_flow(self, attempt: Attempt) -> None:
        link = self.links[attempt.link]
        bits = attempt.bytes_to_send * BITS_PER_BYTE
        prefill_ns = attempt.prefill_end_ns - attempt.started_ns
        attempt.flow = Flow(
            request=attempt.request,
            attempt=attempt.number,
            bits=float(bits),
            opened_ns=self.now_ns,
            producing_until_ns=attempt.prefill_end_ns,
            produce_bps=pipelined_cap_bps(float(bits), prefill_ns) if prefill_ns > 0 else math.inf,
            own_cap_bps=self._flow_limits_bps[attempt.link],
            owner=attempt,
        )
        attempt.opened = True
        self.pending_bits[attempt.link] -= bits
        link.open(attempt.flow)
        self._settle_later()

    def _end_prefill(self, pool: PrefillPool, instance: Instance) -> None:
        pool.busy.add(self.now_ns, -1)
        instance.running = None
        if instance.drained is not None:
            instance.drained.succeed()
        self._settle_later()

    def _join_decode_queue(self, site: PdSite, attempt: Attempt) -> None:
        records, request = self.records, attempt.request
        attempt.joined = True
        self.prefix.handed_over(site.prefill.cluster, request, attempt.link >= 0, self.now_ns)
        wants_first = records.first_token_ns[request] == NEVER_NS
        if wants_first:
            records.transfer_end_ns[request] = self.now_ns
        site.decode.push(
            self.now_ns,
            Sequence(
                request=request,
                attempt=attempt.number,
                context_tokens=attempt.context_tokens,
                remaining_tokens=attempt.remaining_tokens,
                # the prompt and the reserve on every attempt: tokens produced before live in the reserve
                kv_tokens=self._input[request] + site.decode.kv_reserve_tokens,
                wants_first=wants_first,
            ),
        )
        self._settle_later()

    # ------------------------------------------------------------------ link

    def _capacity_changes(self, k: int) -> Process:
        trace = self.world.links[k]
        for at_ns, capacity_bps in zip(
            trace.time_ns[1:].tolist(), trace.capacity_bps[1:].tolist(), strict=True
        ):
            yield self._at(at_ns, Kind.CAPACITY, k)
            self.links[k].capacity_bps = capacity_bps
            self.links[k].dirty = True
            self._settle_later()

    def _wake_link(self, k: int) -> None:
        """Have the flows that end next end in their turn; an older wake-up finds its version gone."""
        link = self.links[k]
        self._link_wake[k] += 1
        version = self._link_wake[k]
        if link.next_end_ns == NEVER_NS:
            return

        def flows_end(_: simpy.Event) -> None:
            if version != self._link_wake[k]:
                return
            for flow in link.end_due(self.now_ns):
                flow.owner.sent.succeed()
            self._settle_later()

        event = self._at(link.next_end_ns, Kind.FLOW_END, k)
        assert event.callbacks is not None
        event.callbacks.append(flows_end)

    # ------------------------------------------------------------------ decode

    def _wake_decode(self, site: PdSite, instance: Instance) -> None:
        batch = instance.batch
        assert batch is not None
        instance.wake_version += 1
        version = instance.wake_version
        if batch.next_ns == NEVER_NS:
            return

        def milestone(_: simpy.Event) -> None:
            if version != instance.wake_version:
                return
            for request, what in batch.due(self.now_ns):
                if what == FIRST:
                    self._first_token(site, request)
                else:
                    self._finish(site, instance, batch, request)
            if not batch.dirty:
                batch.refresh_next()
                self._wake_decode(site, instance)

        event = self._at(batch.next_ns, Kind.DECODE, site.decode.cluster, instance.id)
        assert event.callbacks is not None
        event.callbacks.append(milestone)

    def _first_token(self, site: PdSite, request: int) -> None:
        now = self.now_ns
        self.records.first_token_ns[request] = now
        self.counters.first_tokens += 1
        self.waiting.add(now, -1)
        site.door.first_token(now, (now - self._arrival_ns[request]) / 1e9)

    def _finish(self, site: PdSite, instance: Instance, batch: DecodeBatch, request: int) -> None:
        now = self.now_ns
        batch.leave(request)
        site.decode.sequences.add(now, -1)
        self.records.finish_ns[request] = now
        self.records.status[request] = Status.FINISHED
        self.counters.finished += 1
        self._unresolved -= 1
        tokens = self._output[request]
        first_ns = int(self.records.first_token_ns[request])
        tpot_s = (now - first_ns) / 1e9 / (tokens - 1) if tokens > 1 else 0.0
        site.door.finished(now, tokens, tpot_s)
        slo = self.world.scenario.slo
        ttft_s = (first_ns - self._arrival_ns[request]) / 1e9
        self.counters.good += meets(slo.ttft_s, ttft_s) and meets(slo.tpot_s, tpot_s)
        if instance.drained is not None and not batch.sequences:
            instance.drained.succeed()
        self._settle_later()

    # ------------------------------------------------------------------ end of an instant

    def _settle_later(self) -> None:
        if self._settle_due:
            return
        self._settle_due = True
        event = _KeyedEvent(self.env, self.now_ns, _SETTLE_KEY)
        assert event.callbacks is not None
        event.callbacks.append(self._settle)

    def _settle(self, _: simpy.Event) -> None:
        """Share the links, start prefills, admit to decode, fix decode steps: once, when the instant is over."""
        self._settle_due = False
        now = self.now_ns
        for k, link in enumerate(self.links):
            if link.dirty:
                link.settle(now)
                self._wake_link(k)
        for pool in self.remote:
            if pool.queue:
                self._dispatch_prefill(pool)
        for site in self.sites:
            if site.prefill.queue:
                self._dispatch_prefill(site.prefill)
        for site in self.sites:
            if site.decode.queue:
                self._dispatch_decode(site)
            for instance in site.instances:
                if instance.batch is not None and instance.batch.dirty:
                    instance.batch.settle(now, instance.speed)
                    self._wake_decode(site, instance)

    def _dispatch_prefill(self, pool: PrefillPool) -> None:
        while pool.queue:
            instance = pool.best_idle()
            if instance is None:
                return
            attempt = pool.pop()
            now = self.now_ns
            duration_ns = attempt.prefill_ns
            if instance.speed < 1.0:
                duration_ns = ns_from_s(
                    pool.times.seconds(attempt.new_tokens, attempt.cached_tokens) / instance.speed
                )
            attempt.started_ns = now
            attempt.prefill_end_ns = now + duration_ns
            instance.running = attempt
            pool.busy.add(now, 1)
            records, request = self.records, attempt.request
            self.prefix.hold(pool.cluster, request, attempt.bytes_to_send, now)
            if records.first_token_ns[request] == NEVER_NS:
                records.prefill_start_ns[request] = now
                records.prefill_end_ns[request] = attempt.prefill_end_ns
                records.service_ns[request] = duration_ns
            if attempt.link >= 0:
                records.sent_bytes[request] += attempt.bytes_to_send
            attempt.started.succeed(instance)

    def _dispatch_decode(self, site: PdSite) -> None:
        pool, now = site.decode, self.now_ns
        while pool.queue:
            instance = pool.place_for(pool.queue[0][1])
            if instance is None:
                return
            sequence = pool.pop()
            self.attempts.pop(sequence.request, None)
            assert instance.batch is not None
            instance.batch.join(sequence, now)
            pool.sequences.add(now, 1)
            if sequence.wants_first:
                self.records.decode_join_ns[sequence.request] = now

    # ------------------------------------------------------------------ readings

    def totals(self) -> Totals:
        """Cumulative figures now, computed without storing."""
        now = self.now_ns
        for link in self.links:
            link.meter.advance_for_reading(now, link.total_rate_bps, link.congested)
        c = self.counters
        local = [site.prefill for site in self.sites]
        decode = [site.decode for site in self.sites]
        return Totals(
            time_ns=now,
            arrived=c.arrived,
            finished=c.finished,
            rejected=c.rejected,
            aborted=c.aborted,
            remote=c.remote,
            conversions=c.conversions,
            invalid_moves=c.invalid_moves,
            waiting_ns=self.waiting.at(now),
            remote_busy_ns=sum(p.busy.at(now) for p in self.remote),
            remote_instances_ns=sum(p.in_role.at(now) for p in self.remote),
            prefill_busy_ns=sum(p.busy.at(now) for p in local),
            prefill_instances_ns=sum(p.in_role.at(now) for p in local),
            decode_slots_used_ns=sum(p.sequences.at(now) for p in decode),
            decode_slots_ns=sum(p.slots.at(now) for p in decode),
            first_tokens=c.first_tokens,
            good=c.good,
            egress_bits=tuple(link.delivered_bits(now) for link in self.links),
            egress_peak_bps=tuple(link.meter.peak_bps for link in self.links),
            reject_reasons=tuple(c.rejects),
            prefix=self.prefix.counters(),
        )

    def telemetry(self) -> Telemetry:
        """What a scheduler can see now, computed without storing."""
        readings = [self._read_site(site) for site in self.sites]
        readings += [self._read_remote(pool) for pool in self.remote]
        readings += [self._read_link(k) for k in range(len(self.links))]
        schema = self.world.schema
        return Telemetry(
            schema,
            self.now_ns,
            pack(schema, readings),
            conversion_tick=self.now_ns > 0 and self.now_ns % self.conversion_ns == 0,
            legal_moves=self.legal(),
            recent_lengths_tokens=tuple(site.door.recent_lengths() for site in self.sites),
        )

    def encode(self, telemetry: Telemetry) -> tuple[NDArray[np.float32], int]:
        """`TelemetrySchema.encode`."""
        return telemetry.schema.encode(telemetry.values)

    def legal(self) -> tuple[tuple[bool, bool, bool], ...]:
        """Legal moves of each PD cluster now."""
        return tuple(self._legal(site) for site in self.sites)

    def _read_prefill(self, pool: PrefillPool) -> dict[str, float]:
        now = self.now_ns
        return {
            "prefill_queue_requests": float(len(pool.queue)),
            "prefill_queue_tokens": float(pool.queued_tokens),
            "prefill_queue_work_s": pool.queued_work_ns / 1e9,
            "prefill_queue_oldest_s": (now - pool.queue[0].queued_ns) / 1e9 if pool.queue else 0.0,
            "prefill_residual_s": sum(pool.residuals_ns(now)) / 1e9,
            "prefill_busy_instances": float(pool.busy.count),
            "prefill_instances": float(pool.active),
        }

    _read_remote = _read_prefill

    def _read_site(self, site: PdSite) -> dict[str, float]:
        now, decode, profile = self.now_ns, site.decode, site.decode_profile
        out = site.door.reading(now)
        out.update(self._read_prefill(site.prefill))
        active = [i for i in site.instances if i.serves(Role.DECODE)]
        batches = [i.batch for i in site.instances if i.batch is not None]
        used = sum(i.sequences() for i in active)
        capacity = profile.kv_capacity_tokens
        kv_fill = 0.0
        if capacity is not None and active:
            kv_fill = sum(i.batch.kv_tokens for i in active if i.batch) / (capacity * len(active))
        to_next_ns = self.conversion_ns - now % self.conversion_ns
        if now > 0 and now % self.conversion_ns == 0 and site.converting == 0:
            to_next_ns = 0
        out.update(
            decode_queue_requests=float(len(decode.queue)),
            decode_queue_tokens=float(decode.queued_tokens),
            decode_queue_work_s=decode_work_s(
                len(decode.queue), out["output_tokens_mean"], site.full_step_s, profile.slots
            ),
            decode_queue_oldest_s=(now - decode.queue[0][0]) / 1e9 if decode.queue else 0.0,
            decode_sequences=float(decode.sequences.count),
            decode_busy_instances=float(sum(bool(b.sequences) for b in batches)),
            decode_instances=float(len(active)),
            decode_slot_use=used / (len(active) * profile.slots) if active else 0.0,
            decode_kv_fill=kv_fill,
            converting_instances=float(site.converting),
            conversion_valid=float(site.converted_ns >= 0),
            since_conversion_s=(now - site.converted_ns) / 1e9 if site.converted_ns >= 0 else 0.0,
            next_conversion_s=to_next_ns / 1e9,
        )
        d = site.decision
        out.update(decision_fields(d.threshold_tokens, d.margin_s, d.cache_rule))
        return out

    def _read_link(self, k: int) -> dict[str, float]:
        now, link = self.now_ns, self.links[k]
        link.meter.advance_for_reading(now, link.total_rate_bps, link.congested)
        backlog_bits = self.pending_bits[k] + link.unsent_bits(now)
        out = link.meter.reading(now)
        out.update(
            backlog_bytes=backlog_bits / BITS_PER_BYTE,
            backlog_s=backlog_bits / link.meter.observed_bps,
            staged_bytes=link.staged_bits(now) / BITS_PER_BYTE,
            open_flows=float(len(link.flows)),
            retransmission_share=self._retransmitted(k),
        )
        return out

    def _retransmitted(self, k: int) -> float:
        """Share of segments sent again now, as the senders of the flows would count them."""
        link, spec = self.links[k], self.link_specs[k]
        if not link.congested:
            return spec.loss if link.flows else 0.0
        each_bps = link.total_rate_bps / (len(link.flows) * spec.connections) if link.flows else 0.0
        return retransmitted_share(each_bps, spec.round_trip_s, spec.segment_bytes, spec.loss)

    # ------------------------------------------------------------------ snapshots

    def snapshot(self) -> Snapshot:
        """The whole state. Generators cannot be copied, so it is the world, the decisions taken and the time."""
        return Snapshot(self.world, self.now_ns, self._instant_over, tuple(self._log))

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot by replaying its decisions; exact, since the world is drawn once."""
        self.world = snapshot.world
        self._log = []
        self._start()
        for entry in snapshot.decisions:
            self._replay_to(entry.time_ns, entry.after)
            self.apply(entry.decision)
        self._replay_to(snapshot.time_ns, snapshot.after)

    def _replay_to(self, time_ns: int, after: bool) -> None:
        self.run_until(time_ns)
        if after:
            self._end_instant()
