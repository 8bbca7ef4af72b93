"""The same requests through the simulator and through the router: readings and decisions side by side.

Two ways. `replay` feeds the router's own counters with what happened in the simulator, at injected times: it shows that
the same events give the same reading. `over_http` sends the requests to a router with fake workers, at a `time_scale`
and in virtual time: it shows that the protocol takes the times the simulator says. Both use the same profile, so this
is a check of windows, estimators and protocol, not of speed.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_env.decision import Decision
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.formulas import NEVER_NS, ns_from_s
from prfaas_env.simulator.records import RequestRecords
from prfaas_env.simulator.records import Route as SimRoute
from prfaas_env.simulator.world import World, draw_world
from prfaas_env.telemetry import Telemetry
from prfaas_serving.app import Router
from prfaas_serving.choice import Route
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.control import ControlLoop
from prfaas_serving.demo import Row, load
from prfaas_serving.fake.cluster import FakeCluster, of_deployment, router_workers
from prfaas_serving.fake.worker import FakeWorker
from prfaas_serving.fleet import Waiter
from prfaas_serving.forward import Ended, Forwarder
from prfaas_serving.live import LiveTelemetry, RouterClock
from prfaas_serving.metrics import Metrics
from tests.serving.support import until

#: Roles are fixed (the minima are the split), so that a difference is one of readings and not of who was converted.
#: Engines send a cache when its prefill is over, so layer-wise sending is off.
SCENARIO = """
extends: paper
name: parity
deployment:
  prfaas: [{name: prfaas0, hardware: h200, n_instances: 2}]
  pd: [{name: pd0, hardware: h20, n_prefill: 2, n_decode: 3, min_prefill: 2, min_decode: 3}]
  links: [{prfaas: prfaas0, pd: pd0, capacity_bps: 6 Gbps}]
transport: {pipelining: false}
workload:
  arrivals: {kind: poisson, rate_rps: 1.1}
  input_tokens: {kind: lognormal, mu: 9.3, sigma: 0.9, min_tokens: 128, max_tokens: 60000}
  output_tokens: {kind: poisson, mean_tokens: 60}
slo: {ttft_s: 4, tpot_s: 0.03}
"""
#: A link that carries a quarter for a while, with nominal capacity unchanged: what is observed must show it.
SLOW_LINK = "link_capacity: {kind: steps, at_s: [80, 170], capacity_bps: [1.5 Gbps, 6 Gbps]}\n"


@dataclass(frozen=True)
class Within:
    """How near two readings of a field must be: |a - b| <= abs_ + rel * max(|a|, |b|) in `share` of the intervals."""

    abs_: float = 1e-8
    rel: float = 1e-9
    share: float = 1.0

    def agreement(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        """Share of the intervals that agree."""
        return float(np.mean(np.abs(a - b) <= self.abs_ + self.rel * np.maximum(np.abs(a), np.abs(b))))


EXACT = Within()
#: By field name without its group; the others are exact. The reason for each is in docs/serving.md.
REPLAYED: dict[str, Within] = {
    # the first token shows that a sequence has begun, one step after it did
    "decode_sequences": Within(1.0, 0.05, 0.97),
    "decode_slot_use": Within(1 / 60, 0.05, 0.97),
    "decode_busy_instances": Within(1.0, 0.0, 1.0),
    # the end of a transfer is inferred from the first token
    "open_flows": Within(1.0, 0.0, 0.99),
    "backlog_bytes": Within(3e8, 0.1, 0.95),
    "backlog_s": Within(0.15, 0.1, 0.95),
    "staged_bytes": Within(3e8, 0.1, 0.95),
    "utilisation_5s": Within(0.05, 0.1, 0.95),
    "utilisation_30s": Within(0.02, 0.05, 0.97),
    "observed_capacity_bps": Within(0.0, 0.15, 0.95),
    "observed_valid": Within(0.0, 0.0, 0.9),
    "observed_age_s": Within(10.0, 0.1, 0.9),
    # the router starts with the configured decision, the simulator with its own
    "threshold_tokens": Within(1e-6, 1e-9, 0.98),
    "threshold_valid": Within(0.0, 0.0, 0.98),
    "margin_s": Within(1e-6, 1e-9, 0.98),
    "margin_valid": Within(0.0, 0.0, 0.98),
}
#: With a link that changes: it shows in arrivals alone, so what is on its way is known with a delay.
SLOWED: dict[str, Within] = {
    **REPLAYED,
    "decode_busy_instances": Within(1.0, 0.0, 0.98),
    "backlog_bytes": Within(3e8, 0.1, 0.85),
    "backlog_s": Within(0.3, 0.1, 0.85),
    "staged_bytes": Within(3e8, 0.1, 0.85),
    "utilisation_5s": Within(0.05, 0.1, 0.9),
    "utilisation_30s": Within(0.02, 0.05, 0.9),
    "observed_capacity_bps": Within(0.0, 0.15, 0.9),
}
#: The same through a router in virtual time: what its timers and the transport add.
OVER_HTTP: dict[str, Within] = {
    **REPLAYED,
    # an event may fall into the next second
    **{f"arrival_rate_{w}s_rps": Within(1.01 / w, 0.0, 0.95) for w in (5, 30, 120)},
    **{f"input_token_rate_{w}s_tps": Within(6e4 / w, 0.0, 0.95) for w in (5, 30, 120)},
    **{f"length_share_{k:02d}": Within(0.03, 0.0, 0.95) for k in range(24)},
    "prefill_queue_requests": Within(1.0, 0.0, 0.97),
    "prefill_queue_tokens": Within(1e3, 0.05, 0.95),
    "prefill_queue_work_s": Within(0.1, 0.05, 0.95),
    "prefill_queue_oldest_s": Within(0.1, 0.05, 0.95),
    "prefill_residual_s": Within(0.1, 0.05, 0.95),
    "prefill_busy_instances": Within(1.0, 0.0, 0.97),
    "decode_queue_requests": Within(1.0, 0.0, 0.97),
    "decode_queue_tokens": Within(6e4, 0.0, 0.97),
    "decode_queue_work_s": Within(0.1, 0.0, 0.97),
    "decode_queue_oldest_s": Within(0.1, 0.0, 0.97),
    "decode_sequences": Within(1.0, 0.1, 0.95),
    "decode_slot_use": Within(1 / 60, 0.1, 0.95),
    "decode_busy_instances": Within(1.0, 0.0, 0.95),
    "lengths_valid": Within(0.0, 0.0, 0.97),
    "output_valid": Within(0.0, 0.0, 0.97),
    "output_tokens_mean": Within(1.0, 0.05, 0.95),
    "ttft_valid": Within(0.0, 0.0, 0.97),
    "ttft_attainment": Within(0.05, 0.0, 0.95),
    "tpot_valid": Within(0.0, 0.0, 0.97),
    "tpot_attainment": Within(0.05, 0.0, 0.95),
    # one window that was only just busy throughout is evidence here and none there, at the same capacity
    "observed_valid": Within(0.0, 0.0, 0.75),
    "observed_age_s": Within(10.0, 0.1, 0.75),
}


@dataclass
class Run:
    """One run: what was seen and decided at each tick, and the times to the first token."""

    readings: list[Telemetry] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def values(self) -> NDArray[np.float64]:
        """Shape (ticks, fields)."""
        return np.array([t.values for t in self.readings])


def scenario_file(folder: Path, more: str = "") -> Path:
    """The scenario as a file, with `more` of YAML."""
    path = folder / "parity.yaml"
    path.write_text(SCENARIO + more, encoding="utf-8")
    return path


def simulated(scenario: Scenario, spec: str, seed: int, seconds: int) -> tuple[World, Run, RequestRecords]:
    """The run in the simulator (its reference engine)."""
    world = draw_world(scenario, seed, horizon_s=float(seconds))
    engine, policy, run = make_engine("simpy", world), make_policy(spec), Run()
    policy.reset(PolicyContext(scenario, world.schema, 0))
    control_ns = ns_from_s(scenario.control.control_interval_s)
    for k in range(seconds):
        engine.run_until(k * control_ns)
        run.readings.append(engine.telemetry())
        run.decisions.append(policy.decide(run.readings[-1]))
        engine.apply(run.decisions[-1])
    engine.run_to_end(ns_from_s(seconds + 600.0))
    records = engine.records
    seen = records.first_token_ns < NEVER_NS
    run.ttft_s = ((records.first_token_ns - world.requests.arrival_ns)[seen] / 1e9).tolist()
    return world, run, records


def config(file: Path, workers: list[dict[str, Any]], **sections: Any) -> RouterConfig:
    """A router as the simulator has it: one prompt at a time per prefill worker, no prefix cache."""
    raw = {
        "backend": "vllm_nixl",
        "scenario": str(file),
        "listen": {"port": 0},
        "workers": workers,
        "limits": {"prefill_per_worker": 1, "queue": 100_000},
        "deadlines": {"queue_s": 600.0, "prefill_floor_s": 120.0, "transfer_floor_s": 60.0},
        "cache": {"enabled": False},
        "log_level": "error",
        **sections,
    }
    return RouterConfig.model_validate(raw)


def replay(file: Path, world: World, sim: Run, records: RequestRecords) -> Run:
    """What the router's telemetry shows when the simulator's events happen to its counters."""

    async def work() -> Run:
        deployment = world.scenario.deployment
        pd = deployment.pd[0]
        counts = [(c.name, "prefill", c.n_instances) for c in deployment.prfaas]
        counts += [(pd.name, "prefill", pd.n_prefill), (pd.name, "decode", pd.n_decode)]
        workers = [
            {
                "name": f"{cluster}-{role}{k}",
                "url": f"http://{cluster}-{role}{k}:1",
                "cluster": cluster,
                "role": role,
            }
            for cluster, role, n in counts
            for k in range(n)
        ]
        forwarder = Forwarder(Resolved(config(file, workers)), Metrics())
        for worker in forwarder.fleet:
            worker.came_up(0.0)
        try:
            return _Replay(forwarder, world, records).run(sim)
        finally:
            await forwarder.close(0.0)

    return asyncio.run(work())


class _Replay:
    """Turns the stamps of requests into calls on the router's counters."""

    def __init__(self, forwarder: Forwarder, world: World, records: RequestRecords) -> None:
        self.f, self.world, self.records = forwarder, world, records
        self.live = LiveTelemetry(forwarder, forwarder.fleet.changes, RouterClock(0.0))
        self._events: list[tuple[int, int, int, Callable[[int, float], None]]] = []
        self._waiters: dict[int, Waiter] = {}
        self._prefills: dict[int, Any] = {}
        self._decodes: dict[int, Any] = {}
        self._flows: dict[int, Any] = {}
        # the order of one instant: ends, arrivals, then what is dispatched
        stamps = (
            (records.prefill_end_ns, 0, self._prefill_end),
            (records.first_token_ns, 1, self._first_token),
            (records.finish_ns, 2, self._finish),
            (world.requests.arrival_ns, 3, self._arrival),
            (records.prefill_start_ns, 4, self._prefill_start),
        )
        for r in range(len(world.requests)):
            for times, kind, act in stamps:
                if times[r] < NEVER_NS:
                    heapq.heappush(self._events, (int(times[r]), kind, r, act))

    def run(self, sim: Run) -> Run:
        """Read at every tick of the simulator; its decisions are put in force."""
        run = Run()
        for reading, decision in zip(sim.readings, sim.decisions, strict=True):
            while self._events and self._events[0][0] < reading.time_ns:
                at_ns, _, r, act = heapq.heappop(self._events)
                act(r, at_ns / 1e9)
            run.readings.append(self.live.read(reading.time_s))
            self.f.holder.set(decision.clusters[0], "policy", "replayed")
        return run

    def _remote(self, r: int) -> bool:
        return bool(self.records.route[r] == SimRoute.REMOTE)

    def _pool(self, r: int) -> Any:
        return self.f.fleet.remote_prefill["prfaas0"] if self._remote(r) else self.f.fleet.local_prefill

    def _arrival(self, r: int, now_s: float) -> None:
        tokens = int(self.world.requests.input_tokens[r])
        cluster = self._pool(r).cluster
        self.live.arrival(
            now_s, tokens, tokens, 0, Route("remote" if self._remote(r) else "local", cluster, "rule")
        )
        predicted_s = self.f.paths.prefill_s(cluster, tokens, 0)
        self._waiters[r] = Waiter(now_s, predicted_s, tokens)
        self._pool(r)._waiting.append(self._waiters[r])
        if self._remote(r):
            self._flows[r] = self.f.paths.links[cluster].routed(self.f.paths.kv_bits(tokens))

    def _prefill_start(self, r: int, now_s: float) -> None:
        pool, waiter = self._pool(r), self._waiters.pop(r)
        pool._waiting.remove(waiter)
        worker = next(w for w in pool.workers if not w.assigned)
        self._prefills[r] = worker.begin(now_s, waiter.predicted_s, waiter.tokens, waiter.since_s)

    def _prefill_end(self, r: int, now_s: float) -> None:
        place = self._prefills.pop(r)
        place.worker.end(place, now_s)
        decode = min(self.f.fleet.decode.workers, key=lambda w: w.in_flight)
        self._decodes[r] = decode.begin(now_s, tokens=place.tokens)
        if r in self._flows:
            self._flows[r].at = decode.name
            self.f.paths.links["prfaas0"].opened(self._flows[r], now_s)

    def _first_token(self, r: int, now_s: float) -> None:
        self._decodes[r].answering = True
        if r in self._flows:
            self.f.paths.links["prfaas0"].closed(self._flows.pop(r), now_s, arrived=True)
        route = Route("remote" if self._remote(r) else "local", self._pool(r).cluster, "rule")
        self.live.first_token(now_s, now_s - self.world.requests.arrival_ns[r] / 1e9, route)

    def _finish(self, r: int, now_s: float) -> None:
        place = self._decodes.pop(r)
        place.worker.end(place, now_s)
        tokens = int(self.world.requests.output_tokens[r])
        first_s = self.records.first_token_ns[r] / 1e9
        self.live.finished(now_s, tokens, (now_s - first_s) / (tokens - 1) if tokens > 1 else 0.0)


async def over_http(file: Path, world: World, spec: str, seconds: int, time_scale: float) -> Run:
    """The run through a router and fake workers, each second of the scenario in `time_scale` ones of the clock."""
    scenario = load_scenario(file)
    cluster = of_deployment(
        scenario,
        time_scale=time_scale,
        byte_scale=2e-4,
        handshake_s=5.0,
        max_model_len=1_000_000,
    )
    run, fakes = Run(), await _in_process(cluster)
    try:
        polls = max(time_scale, 0.05)
        resolved = Resolved(
            config(
                file,
                router_workers(cluster.members),
                time_scale=time_scale,
                health={"ramp_s": 0.0, "probe_s": 0.5, "load_poll_s": polls},
                control={
                    "policy": spec,
                    "mode": "off",
                    "threshold_factor_per_s": None,
                    "stale_after_s": 20.0 * polls + 5.0,
                    "flip_back_s": 0.0,
                },
            )
        )
        router = Router(resolved)
        await router.start()
        try:
            await until(lambda: not router.health.missing(), "the cluster is ready", 60.0)
            assert router.control is not None
            await router.control.close()
            router.forwarder.listeners.clear()
            await _measure(router, world, seconds, time_scale, run)
        finally:
            await router.close()
    finally:
        for fake in fakes:
            await fake.close()
        if cluster.link is not None:
            await cluster.link.close()
    return run


async def _in_process(cluster: FakeCluster) -> list[FakeWorker]:
    """Start the workers of a cluster in this process, behind its link."""
    fakes = []
    for member in cluster:
        fake = FakeWorker(member.spec)
        await fake.start()
        fakes.append(fake)
        member.port, member.kv_port = fake.port, fake.kv_port
        if cluster.link is not None and member.cluster != cluster.pd:
            member.via_port = await cluster.link.listen("127.0.0.1", fake.kv_port)
            fake.spec = fake.spec.model_copy(update={"kv_via_port": member.via_port})
    return fakes


async def _measure(router: Router, world: World, seconds: int, time_scale: float, run: Run) -> None:
    """Start a control loop and the load at one instant."""
    start_s = time.monotonic() + 0.5
    loop = ControlLoop(router.forwarder, router.mover.change_role, start_s=start_s)
    loop.mode = "active"
    router.control = loop

    def ended(now_s: float, request: Ended) -> None:
        if request.ttft_s is None:
            run.failed += 1
        else:
            run.ttft_s.append(request.ttft_s / time_scale)

    loop.live.on_end = ended
    loop.start()
    await asyncio.sleep(start_s - time.monotonic())
    row = Row("parity")
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    await load(url, world.requests, time_scale, row, 0, world.requests.output_tokens.tolist())
    run.failed += row.failed
    by_ns = {line.time_ns: line for line in loop.recent}
    for k in range(seconds):
        line = by_ns.get(k * loop.control_ns)
        if line is not None and line.proposed is not None:
            run.readings.append(
                Telemetry(
                    loop.live.schema,
                    line.time_ns,
                    np.array(line.values),
                    conversion_tick=line.conversion_tick,
                    legal_moves=line.legal_moves,
                    recent_lengths_tokens=(),
                )
            )
            run.decisions.append(line.proposed)


def differences(sim: Run, live: Run, tolerances: dict[str, Within]) -> dict[str, tuple[float, float]]:
    """(agreement found, agreement asked for) of every field that agrees less than asked for."""
    times = {t.time_ns: k for k, t in enumerate(sim.readings)}
    rows = [times[t.time_ns] for t in live.readings]
    a, b = sim.values[rows], live.values
    found = {}
    for k, name in enumerate(sim.readings[0].schema.names):
        within = tolerances.get(name.partition(".")[2], EXACT)
        agreement = within.agreement(a[:, k], b[:, k])
        if agreement < within.share:
            found[name] = (round(agreement, 3), within.share)
    return found


def same_decision(a: Decision, b: Decision) -> bool:
    """The same move, the same rule, and a threshold within 10% or a margin within 10 ms."""
    for x, y in zip(a.clusters, b.clusters, strict=True):
        if x.move is not y.move or (x.margin_s is None) != (y.margin_s is None):
            return False
        if x.margin_s is not None and y.margin_s is not None:
            if x.margin_s != y.margin_s and not abs(x.margin_s - y.margin_s) <= 0.01:
                return False
        elif x.threshold_tokens is not None and y.threshold_tokens is not None:
            low, high = sorted((x.threshold_tokens, y.threshold_tokens))
            if low != high and high > 1.1 * low:
                return False
    return True


def decided_alike(sim: Run, live: Run) -> float:
    """Share of intervals with the same decision."""
    at = {t.time_ns: d for t, d in zip(sim.readings, sim.decisions, strict=True)}
    return float(
        np.mean([same_decision(at[t.time_ns], d) for t, d in zip(live.readings, live.decisions, strict=True)])
    )
