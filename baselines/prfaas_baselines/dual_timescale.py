"""The PrfaaS paper's own scheduler (section 3.4.3), with every value that the paper leaves open as a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from prfaas_baselines.conversion_guard import ConversionGuard
from prfaas_baselines.parameters import knob, parameter_table, parameters_from, tuned_fingerprint
from prfaas_baselines.planning import (
    GuardedPlanningParameters,
    Planner,
    Reading,
    guarded_planners,
    prefill_limit_rps,
    proposal_for,
)
from prfaas_env.decision import (
    THRESHOLD_MAX_TOKENS,
    THRESHOLD_MIN_TOKENS,
    CacheRule,
    ClusterDecision,
    Decision,
    Move,
)
from prfaas_env.policy import PolicyContext
from prfaas_env.telemetry import Telemetry
from prfaas_env.theory import Optimum

_SHORT = "3.4.3, short term: "
_LONG = "3.4.3, long term: "
_TRIGGER = _SHORT + "utilisation near a threshold or a queue surge triggers; neither has a value"
_STEP = _SHORT + "the size of a routing adjustment is not given"


class DualTimescaleParameters(GuardedPlanningParameters):
    """Free parameters of the dual-timescale scheduler."""

    short_period_s: float = knob(5.0, "s", "time between two routing adjustments", _SHORT + "no period", gt=0)
    search_period_s: float = knob(
        30.0,
        "s",
        "longest time between two searches of the threshold",
        _SHORT + "no period of policy updates",
        gt=0,
    )
    utilisation_high: float = knob(
        0.8, "share", "link utilisation from which the link counts as congested", _TRIGGER, gt=0
    )
    utilisation_room: float = knob(
        0.7, "share", "link utilisation up to which the link has room", _TRIGGER, ge=0
    )
    queue_surge: float = knob(
        1.0, "requests per instance", "prefill queue, remote or local, that counts as a surge", _TRIGGER, gt=0
    )
    retransmission_high: float = knob(
        0.02,
        "share",
        "retransmitted share from which the link counts as congested",
        "3.3, transport: loss and retransmission are signals without a value",
        gt=0,
    )
    step_factor: float = knob(1.25, "ratio", "factor of one adjustment of the threshold", _STEP, gt=1)
    most_factor: float = knob(
        2.0, "ratio", "furthest that adjustments take the threshold from the searched one", _STEP, ge=1
    )
    relax_share: float = knob(
        0.3,
        "share",
        "part of the way back to the searched threshold per quiet adjustment, on a log scale",
        _STEP,
        ge=0,
        le=1,
    )
    threshold_min_tokens: float = knob(
        float(THRESHOLD_MIN_TOKENS), "tokens", "lowest threshold", _SHORT + "no range", ge=0
    )
    threshold_max_tokens: float = knob(
        float(THRESHOLD_MAX_TOKENS), "tokens", "highest threshold", _SHORT + "no range", gt=0
    )
    abundant_below_utilisation: float = knob(
        0.0,
        "share",
        "link utilisation below which bandwidth counts as abundant for the cache rule; 0: always scarce",
        _SHORT + "the border between scarce and abundant is not given",
        ge=0,
    )
    long_period_s: float = knob(30.0, "s", "time between two looks at the split", _LONG + "no period", gt=0)
    imbalance_rule: Literal["terms", "sum"] = knob(
        "terms",
        "-",
        "what is compared with Theta_pdd: the narrower prefill term of equation 6, or the sum of equation 8",
        "3.4, equation 8: the sum is right only where equation 7 holds",
    )
    imbalance_share: float = knob(
        0.05,
        "share",
        "how far one stage must lie below the other to be the bottleneck",
        _LONG + "how much less or more is not given",
        ge=0,
        lt=1,
    )
    stage_load_high: float = knob(
        0.9, "share", "measured load from which a stage counts as a bottleneck", _LONG + "no value", ge=0
    )
    stage_queue_surge: float = knob(
        3.0,
        "requests per instance",
        "queue of a stage that makes it one whatever its load",
        _LONG + "no value",
        gt=0,
    )


@dataclass
class _Cluster:
    """What the scheduler keeps of one PD cluster."""

    planner: Planner
    guard: ConversionGuard
    searched_tokens: float = 0.0
    threshold_tokens: float = 0.0
    split: tuple[int, int] | None = None
    next_search_s: float = 0.0
    next_short_s: float = 0.0
    next_long_s: float = 0.0


class DualTimescale:
    """Length threshold on a short clock, node conversions on a long one (paper section 3.4.3).

    Short term. At the start, after every change of the split and each `search_period_s` the threshold is
    searched over the recent incremental lengths with the present number of instances and the present capacity
    of the link. Each `short_period_s` it is adjusted: up by `step_factor` when the link is congested
    (utilisation, retransmissions) or the remote queue surges, down when the local queue surges and the remote
    side has room, else back towards the searched one. A cluster without a remote side keeps an infinite
    threshold, one without local prefill 0.

    Long term. Each `long_period_s`, on a conversion tick, the stages are compared: by default the narrower
    prefill term of equation 6 with its decode term, or literally the sum of equation 8. A stage that lies
    `imbalance_share` below the other, and that measures a high load or a long queue, gets one node if the
    conversion guard allows it. An empty cluster goes back to the split that it started with.

    Every PD cluster is planned by itself; see `planning` for deployments with several PrfaaS clusters.

    Args:
        parameters: any field of `DualTimescaleParameters` by name, and `tuned` (see `tuned_files`).

    Raises:
        PrfaasError: an unknown parameter or a value that is not allowed.
    """

    constant = False
    Parameters = DualTimescaleParameters

    def __init__(self, **parameters: Any) -> None:
        self.parameters = parameters_from(DualTimescaleParameters, "dual_timescale", parameters)
        self.fingerprint = tuned_fingerprint("dual_timescale", parameters)
        self._clusters: list[_Cluster] = []

    def reset(self, context: PolicyContext) -> None:
        """Start an episode: the threshold for the planned load, until lengths are seen."""
        scenario, p = context.scenario, self.parameters
        self._clusters = []
        for planner, guard in guarded_planners(scenario, p):
            self._clusters.append(_Cluster(planner, guard, next_long_s=p.long_period_s))

    def decide(self, telemetry: Telemetry) -> Decision:
        """Threshold and cache rule for every cluster, and at most one move in each."""
        return Decision(tuple(self._decide(telemetry, cluster) for cluster in self._clusters))

    def _decide(self, telemetry: Telemetry, cluster: _Cluster) -> ClusterDecision:
        guard, planner, now_s = cluster.guard, cluster.planner, telemetry.time_s
        guard.observe(telemetry)
        if guard.warm:
            planner.remember(telemetry)
        utilisation = planner.link_utilisation(telemetry)
        if guard.split != cluster.split or now_s >= cluster.next_search_s:
            self._search(telemetry, cluster)
        elif now_s >= cluster.next_short_s:
            self._adjust(telemetry, cluster, utilisation)
        rule: CacheRule = "abundant" if utilisation < self.parameters.abundant_below_utilisation else "scarce"
        return ClusterDecision(
            threshold_tokens=cluster.threshold_tokens, move=self._move(telemetry, cluster), cache_rule=rule
        )

    # -------------------------------------------------------------------------------------- short term

    def _search(self, telemetry: Telemetry, cluster: _Cluster) -> None:
        """A policy update: the threshold that suits the present capacity and the recent lengths."""
        p, now_s = self.parameters, telemetry.time_s
        cluster.searched_tokens = self._clamped(cluster.planner.threshold(cluster.planner.read(telemetry)))
        cluster.threshold_tokens = cluster.searched_tokens
        cluster.split = cluster.guard.split
        cluster.next_search_s = now_s + p.search_period_s
        cluster.next_short_s = now_s + p.short_period_s

    def _adjust(self, telemetry: Telemetry, cluster: _Cluster, utilisation: float) -> None:
        """A routing adjustment from link utilisation, retransmissions and queues."""
        p, searched = self.parameters, cluster.searched_tokens
        cluster.next_short_s = telemetry.time_s + p.short_period_s
        if searched <= 0.0 or math.isinf(searched):
            return  # one path only
        planner = cluster.planner
        pd, links = telemetry.pd[planner.site.index], telemetry.link
        retransmitted = max(links[k].retransmission_share for k in planner.site.links)
        congested = utilisation >= p.utilisation_high or retransmitted >= p.retransmission_high
        remote_surge = planner.remote_waiting(telemetry) > p.queue_surge * planner.remote_instances(telemetry)
        local_surge = pd.prefill_queue_requests > p.queue_surge * pd.prefill_instances
        threshold = cluster.threshold_tokens
        if (congested or remote_surge) and not local_surge:
            threshold *= p.step_factor
        elif local_surge and not remote_surge and not congested and utilisation <= p.utilisation_room:
            threshold /= p.step_factor
        elif not local_surge:
            threshold *= (searched / threshold) ** p.relax_share
        threshold = min(max(threshold, searched / p.most_factor), searched * p.most_factor)
        cluster.threshold_tokens = self._clamped(threshold)

    def _clamped(self, threshold: float) -> float:
        """Within the allowed range, but for the two thresholds that mean one path only."""
        if threshold <= 0.0 or math.isinf(threshold):
            return threshold
        return min(max(threshold, self.parameters.threshold_min_tokens), self.parameters.threshold_max_tokens)

    # --------------------------------------------------------------------------------------- long term

    def _move(self, telemetry: Telemetry, cluster: _Cluster) -> Move:
        guard = cluster.guard
        legal = telemetry.legal_moves[cluster.planner.site.index]
        if not (legal[Move.PREFILL_TO_DECODE] or legal[Move.DECODE_TO_PREFILL]):
            return Move.NONE
        standing = guard.standing_order(telemetry)
        if standing is not None:
            return standing
        if not guard.warm or telemetry.time_s < cluster.next_long_s:
            return Move.NONE
        cluster.next_long_s = telemetry.time_s + self.parameters.long_period_s
        return self._rebalance(telemetry, cluster)

    def _rebalance(self, telemetry: Telemetry, cluster: _Cluster) -> Move:
        planner, guard = cluster.planner, cluster.guard
        reading = planner.read(telemetry)
        splits = planner.splits(reading)
        if reading.n_prefill not in splits:
            return Move.NONE
        now = planner.point(reading, reading.n_prefill)
        before = self._stages(cluster, reading, now)
        step = self._direction(telemetry, cluster, reading, now, before)
        if step == 0 or reading.n_prefill + step not in splits:
            return Move.NONE
        move = Move.DECODE_TO_PREFILL if step > 0 else Move.PREFILL_TO_DECODE
        then = planner.point(reading, reading.n_prefill + step)
        after = self._stages(cluster, reading, then)
        gain = min(after) / min(before) - 1.0 if min(before) > 0.0 else math.inf
        proposal = proposal_for(move, gain, reading, now, then, guard)
        missed = guard.objective_missed(
            telemetry, lambda: planner.idle_ttft_s(reading), planner.idle_step_s(reading)
        )
        return Move.NONE if guard.check(telemetry, proposal, missed) else move

    def _stages(self, cluster: _Cluster, reading: Reading, point: Optimum) -> tuple[float, float]:
        """(prefill, decode) as the imbalance rule compares them, requests per second.

        The terms of equation 6 are taken at the best threshold, which is searched again after a conversion;
        the sum of equation 8 at the threshold in force.
        """
        if self.parameters.imbalance_rule == "sum":
            point = cluster.planner.point_at(reading, point.n_prefill, cluster.threshold_tokens)
            return point.theta_prfaas_rps + point.theta_pdp_rps, point.theta_pdd_rps
        return prefill_limit_rps(point), point.theta_pdd_rps

    def _direction(
        self,
        telemetry: Telemetry,
        cluster: _Cluster,
        reading: Reading,
        now: Optimum,
        stages_rps: tuple[float, float],
    ) -> int:
        """Change of the number of prefill instances that the bottleneck asks for: 1, -1 or 0."""
        prefill_rps, decode_rps = stages_rps
        most = 1.0 - self.parameters.imbalance_share
        planner = cluster.planner
        pd = telemetry.pd[planner.site.index]
        if prefill_rps < most * decode_rps:
            waiting = pd.prefill_queue_requests + planner.remote_waiting(telemetry)
            servers = reading.n_prefill + reading.n_prfaas
            return int(self._pressed(reading.prefill_load(now), waiting, servers))
        if decode_rps < most * prefill_rps:
            load = max(reading.decode_load(now), cluster.guard.decode_use)
            return -int(self._pressed(load, pd.decode_queue_requests, reading.n_decode))
        return 0

    def _pressed(self, load: float, waiting: float, servers: float) -> bool:
        """Whether a stage shows in practice what the model says of it."""
        p = self.parameters
        return load >= p.stage_load_high or waiting > p.stage_queue_surge * servers


DualTimescale.__doc__ = f"{DualTimescale.__doc__}\n\n{parameter_table(DualTimescaleParameters)}\n"
