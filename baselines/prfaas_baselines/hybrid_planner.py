"""A planner of the kind the field runs (NVIDIA Dynamo's "hybrid" presets): slow by throughput, quick by load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from prfaas_baselines.conversion_guard import ConversionGuard, Proposal
from prfaas_baselines.parameters import knob, parameter_table, parameters_from, tuned_fingerprint
from prfaas_baselines.planning import (
    GuardedPlanningParameters,
    Planner,
    Reading,
    guarded_planners,
    prefill_limit_rps,
    proposal_for,
)
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.policy import PolicyContext
from prfaas_env.telemetry import Telemetry


class HybridPlannerParameters(GuardedPlanningParameters):
    """Parameters of the hybrid planner."""

    throughput_period_s: float = knob(
        180.0, "s", "time between two throughput plans, and what one covers", gt=0
    )
    load_period_s: float = knob(5.0, "s", "time between two looks at the queues", gt=0)
    predictor: Literal["constant", "trend"] = knob(
        "constant", "-", "rate of the next window: that of the last one, or carried on from the last two"
    )
    target_load: float = knob(
        0.9, "share", "load that a role is sized for, share of its throughput by the profiles", gt=0, le=2
    )
    prefill_up_s: float = knob(
        4.0, "s", "queued work per local prefill instance from which prefill asks for a node", gt=0
    )
    prefill_down_share: float = knob(
        0.1, "share", "part of that up to which prefill can spare a node", ge=0, le=1
    )
    decode_up: float = knob(
        1.0, "share", "sequences, waiting ones included, over decode slots from which decode asks", gt=0
    )
    decode_down: float = knob(0.6, "share", "the same up to which decode can spare a node", ge=0)
    donor: Literal["spare", "not_asking"] = knob(
        "not_asking", "-", "who may be asked for a node: a role that can spare one, or one that asks for none"
    )
    floor: Literal["throughput", "none"] = knob(
        "throughput", "-", "whether the load may take a role below what the throughput plan found it needs"
    )
    routing: Literal["threshold", "margin"] = knob(
        "threshold", "-", "the threshold that suits the profiles, or the path that is predicted to be earlier"
    )
    margin_s: float = knob(0.0, "s", "margin of the latter, as in earliest finish")


@dataclass
class _Cluster:
    """What the planner keeps of one PD cluster."""

    planner: Planner
    guard: ConversionGuard
    threshold_tokens: float
    split: tuple[int, int] | None = None
    next_throughput_s: float = 0.0
    next_load_s: float = 0.0
    rates_rps: list[float] = field(default_factory=list)
    """One sample per load period of the window that runs."""
    last_rate_rps: float | None = None
    need: tuple[int, int] = (0, 0)
    """(prefill, decode) instances that the throughput plan asks for."""


class HybridPlanner:
    """Throughput plan every `throughput_period_s`, reaction to queues every `load_period_s` (Dynamo's hybrid presets).

    Throughput. The arrival rate of the next window is predicted from the last ones. From the profiles, the lengths
    and the mean output, each role gets the fewest instances that carry it at `target_load`. Where both together are
    more than there are, the nodes are divided in proportion. These are floors: a role below its own gets a node.

    Load. Prefill asks for a node when the queued work per local prefill instance reaches `prefill_up_s`, decode when
    its sequences and those that wait fill the slots to `decode_up`. The nodes are fixed in number, so one role's gain
    is the other's loss: who gives is `donor`, and it keeps its floor.

    Where Dynamo has nothing to copy, this is what we chose. It adds and removes replicas; here each change is one
    node from role to role, on conversion ticks, with the leave of the conversion guard that all rules share. Its
    marks count queued tokens in context lengths; here they are seconds of work by the profile, since a context
    length is a minute of prefill on this hardware. It does not choose between sites: the length threshold is the one
    at which the throughput model is best for the present split, renewed by each throughput plan and after each change
    of the split. Dynamo's own router sends a request where the load is lowest; `routing=margin` is near to that.

    Every PD cluster is planned by itself; see `planning` for deployments with several PrfaaS clusters.

    Args:
        parameters: any field of `HybridPlannerParameters` by name, and `tuned`.

    Raises:
        PrfaasError: an unknown parameter or a value that is not allowed.
    """

    constant = False
    Parameters = HybridPlannerParameters

    def __init__(self, **parameters: Any) -> None:
        self.parameters = parameters_from(HybridPlannerParameters, "hybrid_planner", parameters)
        self.fingerprint = tuned_fingerprint("hybrid_planner", parameters)
        self._clusters: list[_Cluster] = []

    def reset(self, context: PolicyContext) -> None:
        """Start an episode: the threshold for the planned load, no plan of nodes until a window is over."""
        scenario, p = context.scenario, self.parameters
        self._clusters = []
        for planner, guard in guarded_planners(scenario, p):
            cluster = planner.site.cluster
            self._clusters.append(
                _Cluster(
                    planner,
                    guard,
                    planner.threshold(planner.planned()),
                    split=(cluster.n_prefill, cluster.n_decode),
                    next_throughput_s=p.throughput_period_s,
                )
            )

    def decide(self, telemetry: Telemetry) -> Decision:
        """Routing for every cluster, and at most one move in each."""
        return Decision(tuple(self._decide(telemetry, cluster) for cluster in self._clusters))

    def _decide(self, telemetry: Telemetry, cluster: _Cluster) -> ClusterDecision:
        guard, planner, p = cluster.guard, cluster.planner, self.parameters
        guard.observe(telemetry)
        if guard.warm:
            planner.remember(telemetry)
        load_due = telemetry.time_s >= cluster.next_load_s
        if load_due:
            cluster.next_load_s = telemetry.time_s + p.load_period_s
            pd = telemetry.pd[planner.site.index]
            if pd.arrivals_valid > 0.5:
                cluster.rates_rps.append(getattr(pd, f"arrival_rate_{p.rate_window_s}s_rps"))
        if telemetry.time_s >= cluster.next_throughput_s:
            cluster.next_throughput_s = telemetry.time_s + p.throughput_period_s
            self._plan(telemetry, cluster)
        elif guard.split != cluster.split and p.routing == "threshold":
            cluster.threshold_tokens = planner.threshold(planner.read(telemetry))
        cluster.split = guard.split
        move = self._move(telemetry, cluster, load_due)
        if p.routing == "margin":
            return ClusterDecision(margin_s=p.margin_s, move=move)
        return ClusterDecision(threshold_tokens=cluster.threshold_tokens, move=move)

    # ------------------------------------------------------------------------------------- throughput

    def _plan(self, telemetry: Telemetry, cluster: _Cluster) -> None:
        """A throughput plan: the need of both roles for the predicted rate, and the threshold."""
        planner = cluster.planner
        reading = planner.read(telemetry)
        if self.parameters.routing == "threshold":
            cluster.threshold_tokens = planner.threshold(reading)
        rate_rps = self._predicted_rps(cluster)
        splits = planner.splits(reading)
        cluster.need = (0, 0) if rate_rps is None or not splits else self._need(reading, planner, rate_rps)

    def _predicted_rps(self, cluster: _Cluster) -> float | None:
        """Arrival rate of the next window; None without a sample of the last one."""
        if not cluster.rates_rps:
            return None
        rate = math.fsum(cluster.rates_rps) / len(cluster.rates_rps)
        before, cluster.last_rate_rps = cluster.last_rate_rps, rate
        cluster.rates_rps = []
        if self.parameters.predictor == "trend" and before is not None:
            return max(2.0 * rate - before, 0.0)
        return rate

    def _need(self, reading: Reading, planner: Planner, rate_rps: float) -> tuple[int, int]:
        """Fewest instances of each role that carry a rate at the target load; divided where there are too few."""
        splits = planner.splits(reading)
        demand_rps = rate_rps / self.parameters.target_load
        low, high = splits[0], splits[-1]
        prefill = next(
            (n for n in splits if prefill_limit_rps(planner.point(reading, n)) >= demand_rps), high
        )
        most = planner.point(reading, low)
        each_rps = most.theta_pdd_rps / most.n_decode
        decode = max(math.ceil(demand_rps / each_rps * (1.0 - 1e-9)), reading.n_local - high)
        if prefill + decode <= reading.n_local:
            return prefill, decode
        share = round(reading.n_local * prefill / (prefill + decode))
        prefill = min(max(share, low), high)
        return prefill, reading.n_local - prefill

    # --------------------------------------------------------------------------------------------- moves

    def _move(self, telemetry: Telemetry, cluster: _Cluster, load_due: bool) -> Move:
        guard, planner = cluster.guard, cluster.planner
        legal = telemetry.legal_moves[planner.site.index]
        if not (legal[Move.PREFILL_TO_DECODE] or legal[Move.DECODE_TO_PREFILL]):
            return Move.NONE
        standing = guard.standing_order(telemetry)
        if standing is not None:
            return standing
        if not guard.warm:
            return Move.NONE
        prefill, decode = guard.split
        below_p, below_d = prefill < cluster.need[0], decode < cluster.need[1]
        if below_p != below_d:
            move = self._towards_need(telemetry, cluster, 1 if below_p else -1)
            if move is not Move.NONE:
                return move
        return self._by_load(telemetry, cluster) if load_due else Move.NONE

    def _towards_need(self, telemetry: Telemetry, cluster: _Cluster, step: int) -> Move:
        """One node to the role that is below what the throughput plan found it needs."""
        guard, planner = cluster.guard, cluster.planner
        reading = planner.read(telemetry)
        splits = planner.splits(reading)
        if reading.n_prefill not in splits or reading.n_prefill + step not in splits:
            return Move.NONE
        move = Move.DECODE_TO_PREFILL if step > 0 else Move.PREFILL_TO_DECODE
        now = planner.point(reading, reading.n_prefill)
        then = planner.point(reading, reading.n_prefill + step)
        gain = then.lambda_max_rps / now.lambda_max_rps - 1.0 if now.lambda_max_rps > 0.0 else math.inf
        proposal = proposal_for(move, gain, reading, now, then, guard)
        return self._checked(telemetry, cluster, proposal, reading)

    def _by_load(self, telemetry: Telemetry, cluster: _Cluster) -> Move:
        """One node to the role whose queue asks for it, from one that `donor` allows to be asked."""
        guard, p = cluster.guard, self.parameters
        pd = telemetry.pd[cluster.planner.site.index]
        prefill, decode = guard.split
        queued_s = pd.prefill_queue_work_s / max(prefill, 1)
        slots = decode * cluster.planner.site.decode.slots
        inside = pd.decode_sequences + pd.decode_queue_requests
        use = inside / slots if slots else math.inf if inside else 0.0
        asks = (queued_s >= p.prefill_up_s, use >= p.decode_up)
        if asks[0] == asks[1]:
            return Move.NONE
        spare = (queued_s <= p.prefill_down_share * p.prefill_up_s, use <= p.decode_down)
        giver = 1 if asks[0] else 0
        if p.donor == "spare" and not spare[giver]:
            return Move.NONE
        if p.floor == "throughput" and guard.split[giver] <= cluster.need[giver]:
            return Move.NONE
        count = (prefill, decode)
        # As the guard reads them: 1 is full. A role that gets one more node than n grows by 1/n.
        load = (max(queued_s / p.prefill_up_s, guard.prefill_use), use)
        taker = 1 - giver
        gain = 1.0 / count[taker] if count[taker] else math.inf
        move = Move.DECODE_TO_PREFILL if giver == 1 else Move.PREFILL_TO_DECODE
        proposal = Proposal(move, gain, load[taker], load[giver], count[giver], count[giver] - 1)
        return self._checked(telemetry, cluster, proposal, None)

    def _checked(
        self, telemetry: Telemetry, cluster: _Cluster, proposal: Proposal, reading: Reading | None
    ) -> Move:
        guard, planner = cluster.guard, cluster.planner
        seen = planner.read(telemetry) if reading is None else reading
        missed = guard.objective_missed(
            telemetry, lambda: planner.idle_ttft_s(seen), planner.idle_step_s(seen)
        )
        return Move.NONE if guard.check(telemetry, proposal, missed) else proposal.move


HybridPlanner.__doc__ = f"{HybridPlanner.__doc__}\n\n{parameter_table(HybridPlannerParameters)}\n"
