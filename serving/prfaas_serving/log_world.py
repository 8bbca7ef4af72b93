"""A log as a world of the simulator: what came, what the link gave, what was decided; and what another policy would do.

The requests are those of the log with their recorded lengths and cache hits, the link has the capacity that the router
observed, instances start as the first reading has them. Times are those of the router's clock, so the ticks of the two
clocks are the same. Latencies are those of the scenario's profile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision, Move
from prfaas_env.intervals import Interval, block_interval
from prfaas_env.policy import Policy, PolicyContext
from prfaas_env.scenarios.faults import Faults
from prfaas_env.scenarios.models import (
    ConstantCapacity,
    Deployment,
    PdCluster,
    PrfaasCluster,
    Scenario,
    Slo,
)
from prfaas_env.simulator.engine import DEFAULT_ENGINE
from prfaas_env.simulator.faults import draw_jitter_ns
from prfaas_env.simulator.formulas import NEVER_NS, NS_PER_S, FloatArray, IntArray, ns_from_s
from prfaas_env.simulator.records import Status
from prfaas_env.simulator.run import Episode, run_world
from prfaas_env.simulator.world import CapacityTrace, World
from prfaas_env.telemetry import EVIDENCE_WINDOW_S, Telemetry, meets
from prfaas_env.workload.requests import RequestTable
from prfaas_serving.decision_log import DecisionLine, Log, RequestLine

BoolArray = NDArray[np.bool_]

#: Seed of what is drawn beside the recorded world (the delay of a link with jitter).
WORLD_SEED = 0
#: Evidence of the link's capacity no older than this is of the window that ends now.
FRESH_S = 1.0
#: How far back what was observed is put, in seconds: for the first window in a row, and for one that follows another.
FIRST_BACK_S = float(EVIDENCE_WINDOW_S)
LATER_BACK_S = EVIDENCE_WINDOW_S / 2
#: A client that gave up is told from a deadline that ended its request by this share.
_DEADLINE_SHARE = 0.99


class RecordedPolicy:
    """Says at each tick what was in force in the log at that time; a recorded move is ordered once.

    Args:
        routing: tick -> decision without moves.
        moves: (tick, PD cluster) -> move.
        interval_ns: length of a tick.
    """

    constant = False

    def __init__(
        self, routing: dict[int, Decision], moves: dict[tuple[int, int], Move], interval_ns: int
    ) -> None:
        self._routing, self._moves, self._interval_ns = routing, moves, interval_ns
        self._held = routing[min(routing)]

    def reset(self, context: PolicyContext) -> None:
        """Start at the beginning of the log."""
        self._held = self._routing[min(self._routing)]

    def decide(self, telemetry: Telemetry) -> Decision:
        """What was in force."""
        tick = telemetry.time_ns // self._interval_ns
        self._held = self._routing.get(tick, self._held)
        if not any((tick, i) in self._moves for i in range(len(self._held.clusters))):
            return self._held
        return Decision(
            tuple(
                dataclasses.replace(c, move=self._moves.get((tick, i), Move.NONE))
                for i, c in enumerate(self._held.clusters)
            )
        )


@dataclass(frozen=True)
class RecordedWorld:
    """A log made ready for the simulator."""

    world: World
    requests: tuple[RequestLine, ...]
    """The recorded requests in the order of the world's table."""
    policy: RecordedPolicy
    """What was put in force in the log."""
    planned: Scenario
    """What policies are told of."""
    policy_seed: int
    """Seed of a policy's own randomness."""
    start_ns: int
    """Router clock of the world's time 0."""
    notes: tuple[str, ...]
    """What the log does not hold, or the simulator does not take over."""

    @property
    def span_s(self) -> float:
        """Length of the log."""
        return self.world.scenario.measure.horizon_s


# ------------------------------------------------------------------------------------- the world


def _start_ns(log: Log, first: DecisionLine) -> int:
    """Router clock at which the world begins: that of the router, or for a later part a tick of the slow clock."""
    if log.header.part == 0:
        return 0
    slow_ns = ns_from_s(log.scenario.control.conversion_interval_s)
    return first.time_ns // slow_ns * slow_ns


def _column(log: Log, name: str) -> FloatArray:
    k = log.schema.index[name]
    return np.array([line.values[k] for line in log.decisions])


def _deployment(log: Log, notes: list[str]) -> Deployment:
    """Instances as the first reading has them."""
    scenario, schema = log.scenario, log.schema
    first = dict(zip(schema.names, log.decisions[0].values, strict=True))
    prfaas, pds, links = [], [], []
    for j, remote in enumerate(scenario.deployment.prfaas):
        counts = _column(log, f"prfaas{j}.prefill_instances")
        n = max(round(first[f"prfaas{j}.prefill_instances"]), 1)
        prfaas.append(PrfaasCluster.model_validate({**remote.model_dump(), "n_instances": n}))
        _note_changes(remote.name, counts, notes)
    for i, pd in enumerate(scenario.deployment.pd):
        pds.append(_pd_cluster(log, i, pd, first, notes))
    for k, link in enumerate(scenario.deployment.links):
        links.append(link.model_copy(update={"capacity_bps": first[f"link{k}.nominal_capacity_bps"]}))
    return Deployment(prfaas=tuple(prfaas), pd=tuple(pds), links=tuple(links))


def _pd_cluster(log: Log, i: int, pd: PdCluster, first: dict[str, float], notes: list[str]) -> PdCluster:
    """A PD cluster as the first reading has it; as planned where the log is of a router that does not serve it."""
    n_prefill, n_decode, converting = (
        round(first[f"pd{i}.{name}_instances"]) for name in ("prefill", "decode", "converting")
    )
    if n_decode < 1:
        if any(line.pd == i for line in log.requests):
            raise PrfaasError(
                f"{log.path}: the first reading has no decode instance at {pd.name}: nothing to simulate"
            )
        return pd
    if converting:
        notes.append(f"{pd.name}: {converting} instances were changing role at the start; left out")
    total = sum(_column(log, f"pd{i}.{name}_instances") for name in ("prefill", "decode", "converting"))
    _note_changes(pd.name, np.asarray(total), notes)
    fields = {
        "n_prefill": n_prefill,
        "n_decode": n_decode,
        "min_prefill": min(pd.prefill_floor, n_prefill),
        "min_decode": min(pd.min_decode, n_decode),
    }
    return PdCluster.model_validate({**pd.model_dump(), **fields})


def _note_changes(cluster: str, counts: FloatArray, notes: list[str]) -> None:
    share = float((counts != counts[0]).mean())
    if share:
        notes.append(
            f"{cluster}: {counts.min():g} to {counts.max():g} instances in the log, simulated with {counts[0]:g} "
            f"throughout (another number for {share:.1%} of the time)"
        )


def _capacity(log: Log, link: int, start_ns: int) -> CapacityTrace:
    """Capacity as the router observed it.

    What it observed is the rate of a window in which the link was the limit throughout: the first such window holds
    from its beginning on, each further one moves on with time and stands for its middle.
    """
    value, valid, age_s, nominal = (
        _column(log, f"link{link}.{name}")
        for name in (
            "observed_capacity_bps",
            "observed_valid",
            "observed_age_s",
            "nominal_capacity_bps",
        )
    )
    steps: list[tuple[int, float]] = [(0, float(nominal[0]))]
    was_fresh = False
    for line, seen, ok, age, most in zip(log.decisions, value, valid, age_s, nominal, strict=True):
        bps = float(seen if ok > 0.5 else most)
        fresh = ok > 0.5 and age < FRESH_S
        back_s = (LATER_BACK_S if was_fresh else FIRST_BACK_S) if fresh else 0.0
        was_fresh = fresh
        if bps == steps[-1][1]:
            continue
        at_ns = max(line.time_ns - start_ns - ns_from_s(back_s), 0)
        while steps and steps[-1][0] >= at_ns:
            steps.pop()
        steps.append((at_ns, bps))
    if steps[0][0] > 0:
        steps.insert(0, (0, float(nominal[0])))
    times, values = zip(*steps, strict=True)
    return CapacityTrace(np.array(times, dtype=np.int64), np.array(values, dtype=np.float64))


def _lines_in(log: Log, start_ns: int, notes: list[str]) -> list[RequestLine]:
    """Recorded requests that arrived in the world's time, in its order."""
    n_pd = len(log.scenario.deployment.pd)
    for k, line in enumerate(log.lines):
        if isinstance(line, RequestLine) and line.pd >= n_pd:
            raise PrfaasError(f"{log.where(k)}: pd is {line.pd}; the scenario has {n_pd} PD clusters, from 0")
    lines = [line for line in log.requests if line.arrival_ns >= start_ns]
    early = len(log.requests) - len(lines)
    if early:
        notes.append(f"{early} requests arrived before the log begins; left out")
    if not lines:
        raise PrfaasError(f"{log.path}: has no requests: nothing to simulate")
    return sorted(lines, key=lambda line: (line.arrival_ns, line.pd))


def _cached_tokens(log: Log, lines: Sequence[RequestLine], notes: list[str]) -> IntArray:
    """Tokens that the cache of the PD cluster had, as the door saw it."""
    out, uneven = [], 0
    for line in lines:
        seen = line.incremental_tokens
        own = seen.get(
            log.scenario.deployment.pd[line.pd].name, min(seen.values(), default=line.input_tokens)
        )
        uneven += any(value != own for value in seen.values())
        out.append(max(min(line.input_tokens - own, line.input_tokens - 1), 0))
    if uneven:
        notes.append(
            f"{uneven} of {len(lines)} requests had other cache hits at the remote cluster; simulated with those of "
            "the PD cluster everywhere"
        )
    if log.scenario.prefix_pool is not None and any(out):
        notes.append("cache hits are those recorded, whatever a policy sends where")
    return np.array(out, dtype=np.int64)


def _output_tokens(lines: Sequence[RequestLine], notes: list[str]) -> IntArray:
    """Output lengths; one that was never seen in full is at least the usual one."""
    known = [line.output_tokens for line in lines if line.outcome == "finished"]
    usual = round(float(np.median(known))) if known else 1
    unknown = len(lines) - len(known)
    if unknown:
        notes.append(
            f"{unknown} requests did not finish; their outputs are taken to be {usual} tokens at least"
        )
    return np.array(
        [
            max(line.output_tokens if line.outcome == "finished" else max(line.output_tokens, usual), 1)
            for line in lines
        ],
        dtype=np.int64,
    )


def _give_up_ns(lines: Sequence[RequestLine], start_ns: int, deadline_s: float | None) -> IntArray | None:
    """When clients gave up; None if none did. A request that a deadline ended may meet it under another policy."""
    out = np.full(len(lines), NEVER_NS // 2, dtype=np.int64)
    for k, line in enumerate(lines):
        if line.outcome != "aborted" or line.end_ns is None:
            continue
        if (
            deadline_s is not None
            and line.end_ns - line.arrival_ns >= _DEADLINE_SHARE * deadline_s * NS_PER_S
        ):
            continue
        out[k] = max(line.end_ns, line.arrival_ns + 1) - start_ns
    return out if (out < NEVER_NS // 2).any() else None


def recorded_world(log: Log) -> RecordedWorld:
    """Make a world of a log.

    Raises:
        PrfaasError: a log without decisions or requests, or one that this version cannot read.
    """
    if not log.decisions:
        raise PrfaasError(f"{log.path}: has no decisions: nothing to simulate")
    notes: list[str] = []
    first, last = log.decisions[0], log.decisions[-1]
    start_ns = _start_ns(log, first)
    if log.header.part:
        notes.append("the log begins in the middle of a run: the simulation begins with an empty system")
    if log.missing_decisions:
        notes.append(f"{log.missing_decisions} decisions are missing from the log")
    scenario = log.scenario
    interval_s = scenario.control.control_interval_s
    lines = _lines_in(log, start_ns, notes)
    left = sum(line.outcome == "open" for line in lines)
    if left:
        notes.append(f"{left} requests were open when the log ended")
    end_ns = max(last.time_ns, lines[-1].arrival_ns) - start_ns + ns_from_s(interval_s)
    table = RequestTable.without_prefixes(
        np.array([line.arrival_ns - start_ns for line in lines], dtype=np.int64),
        np.array([max(line.input_tokens, 1) for line in lines], dtype=np.int64),
        _output_tokens(lines, notes),
        notes=("recorded requests of a decision log",),
        cached_tokens=_cached_tokens(log, lines, notes),
    )
    here = scenario.replace(
        deployment=_deployment(log, notes),
        link_capacity=ConstantCapacity(),
        transport=scenario.transport.model_copy(update={"background_bps": None}),
        faults=Faults(deadline_s=scenario.faults.deadline_s),
        measure={"horizon_s": end_ns / NS_PER_S},
    )
    world = World(
        here,
        WORLD_SEED,
        table,
        np.array([line.pd for line in lines], dtype=np.int64),
        tuple(_capacity(log, k, start_ns) for k in range(len(scenario.deployment.links))),
        give_up_ns=_give_up_ns(lines, start_ns, scenario.faults.deadline_s),
        jitter_ns=draw_jitter_ns(here, len(lines), WORLD_SEED),
    )
    policy = _recorded_policy(log, start_ns, notes)
    return RecordedWorld(
        world, tuple(lines), policy, scenario, log.header.policy_seed, start_ns, tuple(notes)
    )


# --------------------------------------------------------------------------------- the decisions


def _recorded_policy(log: Log, start_ns: int, notes: list[str]) -> RecordedPolicy:
    interval_ns = ns_from_s(log.scenario.control.control_interval_s)
    slow_ns = ns_from_s(log.scenario.control.conversion_interval_s)
    routing: dict[int, Decision] = {}
    moves: dict[tuple[int, int], Move] = {}
    for line in log.decisions:
        if line.acted is None:
            continue
        tick = round((line.time_ns - start_ns) / interval_ns)
        routing[tick] = Decision(tuple(c.without_move for c in line.acted.clusters))
        for i, cluster in enumerate(line.acted.clusters):
            if cluster.move is not Move.NONE:
                moves[tick, i] = cluster.move
    if not routing:
        raise PrfaasError(f"{log.path}: nothing was ever put in force: nothing to simulate")
    _take_conversions(log, start_ns, interval_ns, slow_ns, moves, notes)
    return RecordedPolicy(routing, moves, interval_ns)


def _take_conversions(
    log: Log,
    start_ns: int,
    interval_ns: int,
    slow_ns: int,
    moves: dict[tuple[int, int], Move],
    notes: list[str],
) -> None:
    """Bring `moves` in line with the conversions that took place: by hand, or ordered and not carried out."""
    names = [pd.name for pd in log.scenario.deployment.pd]
    by_hand = failed = 0
    for line in log.conversions:
        if line.cluster not in names or line.ordered_ns < start_ns:
            continue
        i = names.index(line.cluster)
        at = (line.ordered_ns - start_ns) / interval_ns
        near = [tick for tick, cluster in moves if cluster == i and abs(tick - at) <= 1.0]
        if near and line.done_ns is None:
            del moves[min(near, key=lambda tick: abs(tick - at)), i]
            failed += 1
        if near or line.done_ns is None:
            continue
        slow = max(round((line.ordered_ns - start_ns) / slow_ns), 1)
        while (slow * slow_ns // interval_ns, i) in moves:
            slow += 1
        to_decode = line.to_role == "decode"
        moves[slow * slow_ns // interval_ns, i] = (
            Move.PREFILL_TO_DECODE if to_decode else Move.DECODE_TO_PREFILL
        )
        by_hand += 1
    if by_hand:
        notes.append(f"{by_hand} conversions were not ordered by a decision; simulated at the next slow tick")
    if failed:
        notes.append(f"{failed} conversions were ordered and not carried out; not simulated")


# ------------------------------------------------------------------------------------ the figures


@dataclass(frozen=True)
class Run:
    """What the recorded requests went through: really, or under a policy in the simulator.

    Arrays have one value per request of the world. `ttft_s` is NaN without a first token (of an aborted request: its
    age when it ended).
    """

    label: str
    ttft_s: FloatArray
    good: BoolArray
    """Finished and within every objective of the scenario."""
    span_s: float
    egress_bps: float
    conversions: int
    rejected: int
    aborted: int
    unserved: int
    """Neither finished, rejected nor aborted."""
    invalid_moves: int | None = None

    def figures(self) -> dict[str, Any]:
        """The figures of a row of the table; None where there is none."""
        known = self.ttft_s[np.isfinite(self.ttft_s)]
        return {
            "ttft_mean_s": float(known.mean()) if len(known) else None,
            **{f"ttft_p{q}_s": float(np.quantile(known, q / 100)) if len(known) else None for q in (50, 90)},
            "goodput_rps": float(self.good.sum()) / self.span_s,
            "egress_mean_bps": self.egress_bps,
            "conversions": self.conversions,
            "requests": len(self.ttft_s),
            "rejected": self.rejected,
            "aborted": self.aborted,
            "unserved": self.unserved,
            "invalid_moves": self.invalid_moves,
        }


def _good(slo: Slo, finished: bool, ttft_s: float | None, tpot_s: float | None) -> bool:
    """Whether a request meets every objective; one output token has no time per further token."""
    if not finished or ttft_s is None:
        return False
    return meets(slo.ttft_s, ttft_s) and (tpot_s is None or meets(slo.tpot_s, tpot_s))


def what_happened(log: Log, recorded: RecordedWorld) -> Run:
    """The log itself as a row: first-token times as measured, egress from the link's use."""
    lines, slo = recorded.requests, recorded.planned.slo

    def ttft(line: RequestLine) -> float:
        if line.ttft_s is None and line.outcome == "aborted" and line.end_ns is not None:
            return (line.end_ns - line.arrival_ns) / NS_PER_S
        return math.nan if line.ttft_s is None else line.ttft_s

    stamps = np.array([line.time_ns for line in log.decisions]) / NS_PER_S
    steps_s = np.diff(stamps, prepend=recorded.start_ns / NS_PER_S)
    bits = sum(
        float(
            (_column(log, f"link{k}.utilisation_5s") * _column(log, f"link{k}.nominal_capacity_bps"))
            @ steps_s
        )
        for k in range(len(log.scenario.deployment.links))
    )
    moved = sum(line.done_ns is not None for line in log.conversions)
    if not log.conversions:
        moved = sum(
            c.move is not Move.NONE for line in log.decisions if line.acted for c in line.acted.clusters
        )
    outcomes = [line.outcome for line in lines]
    return Run(
        "what happened",
        np.array([ttft(line) for line in lines]),
        np.array([_good(slo, line.outcome == "finished", line.ttft_s, line.tpot_s) for line in lines]),
        recorded.span_s,
        bits / recorded.span_s,
        moved,
        outcomes.count("rejected"),
        outcomes.count("aborted"),
        outcomes.count("failed") + outcomes.count("open"),
    )


def simulated(recorded: RecordedWorld, policy: Policy, label: str, engine: str = DEFAULT_ENGINE) -> Run:
    """The recorded world under a policy, run to the last finish.

    Raises:
        PrfaasError: a policy that does not fit the deployment.
    """
    world = recorded.world
    episode = run_world(
        world,
        policy,
        engine=engine,
        drain=True,
        planned=recorded.planned,
        policy_seed=recorded.policy_seed,
    )
    return _run_of(recorded, episode, label)


def _run_of(recorded: RecordedWorld, episode: Episode, label: str) -> Run:
    world, records = recorded.world, episode.records
    arrival, outputs = world.requests.arrival_ns, world.requests.output_tokens
    stamp = np.where(records.first_token_ns == NEVER_NS, records.abort_ns, records.first_token_ns)
    nothing = (stamp == NEVER_NS) | (records.status == Status.REJECTED)
    ttft_s = np.where(nothing, math.nan, (stamp - arrival) / NS_PER_S)
    done = records.status == Status.FINISHED
    span_s = (records.finish_ns - records.first_token_ns) / NS_PER_S
    tpot = [s / (n - 1) if n > 1 else None for s, n in zip(span_s.tolist(), outputs.tolist(), strict=True)]
    slo = recorded.planned.slo
    good = [_good(slo, bool(d), t, p) for d, t, p in zip(done, ttft_s.tolist(), tpot, strict=True)]
    end = episode.end
    return Run(
        label,
        ttft_s,
        np.array(good, dtype=np.bool_),
        recorded.span_s,
        sum(end.egress_bits) / recorded.span_s,
        end.conversions,
        end.rejected,
        end.aborted,
        end.arrived - end.finished - end.rejected - end.aborted,
        end.invalid_moves,
    )


@dataclass(frozen=True)
class Difference:
    """A run against another one on the same requests, with intervals by moving blocks of arrival time."""

    ttft_mean_s: Interval
    goodput_share: Interval
    """Difference of the share of requests that meet every objective."""
    compared: int
    """Requests with a first token in both."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ttft_mean_s": _interval_json(self.ttft_mean_s),
            "good_share": _interval_json(self.goodput_share),
            "requests": self.compared,
        }


def _interval_json(interval: Interval) -> dict[str, Any]:
    found = interval.as_json()
    return {**found, "mean": None if math.isnan(interval.mean) else interval.mean}


def difference(recorded: RecordedWorld, run: Run, base: Run) -> Difference:
    """`run` less `base`, request by request."""
    arrival_s = recorded.world.requests.arrival_ns / NS_PER_S
    change_s = run.ttft_s - base.ttft_s
    both = np.isfinite(change_s)
    good = run.good.astype(np.float64) - base.good
    return Difference(
        block_interval(arrival_s[both], change_s[both], recorded.span_s),
        block_interval(arrival_s, good, recorded.span_s),
        int(both.sum()),
    )
