"""The paper's throughput model fed with what telemetry shows: thresholds, splits and loads of one PD cluster.

Each PD cluster is planned by itself. Every link of it is a remote path of its own with the instances of the PrfaaS
cluster behind it; of a PrfaaS cluster that several PD clusters are linked to it counts the part that its arrivals
give it among them (`prfaas_env.sites`): by the scenario's plan, or as measured at the doors over 120 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from prfaas_baselines.conversion_guard import ConversionGuard, GuardParameters, Proposal
from prfaas_baselines.parameters import knob
from prfaas_env.base import Frozen
from prfaas_env.decision import Move
from prfaas_env.prediction import PathState, first_token_s
from prfaas_env.profiles.latency import PrefillProfile
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.formulas import BITS_PER_BYTE, FloatArray, IntArray, decode_step_s
from prfaas_env.sites import RemoteRoute, Site, share_of, sites_of
from prfaas_env.telemetry import LONG_WINDOW_S, Telemetry
from prfaas_env.theory import (
    THRESHOLDS_TOKENS,
    DemandMemory,
    Optimum,
    RemotePath,
    path_limit_rps,
    search_paths,
)
from prfaas_env.workload.laws import LengthLaw, empirical_law
from prfaas_env.workload.means import input_law, mean_output_tokens

_PROFILE_OPEN = "3.4.3, short term: how present capacity and lengths are profiled is not given"


class PlanningParameters(Frozen):
    """How the throughput model is fed."""

    means: Literal["representative", "service"] = knob(
        "service",
        "-",
        "one representative length per stage as in the paper, or true mean service times",
        "3.4: the paper takes representative lengths, which flatter every stage by a few percent",
    )
    link_basis: Literal["observed", "nominal"] = knob(
        "observed", "-", "which capacity of the link counts as present", _PROFILE_OPEN
    )
    share_basis: Literal["planned", "measured"] = knob(
        "planned",
        "-",
        "arrivals by which a PrfaaS cluster is divided between PD clusters: the scenario's, or those of 120 s",
        "3.4: several PD clusters are allowed in words, without a rule",
    )
    min_lengths: int = knob(
        50, "requests", "recent lengths needed before they replace the planned law", _PROFILE_OPEN, ge=1
    )
    rate_window_s: Literal[5, 30, 120] = knob(
        30, "s", "window of the arrival rate that loads are measured with", _PROFILE_OPEN
    )
    backlog_clear_s: float = knob(
        30.0,
        "s",
        "time within which waiting requests are to be worked off: they add to the rate",
        "own",
        gt=0,
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """Present capacity and load of one PD cluster. `paths` has one entry per link, in the order of the site.

    `prefill_demand_rps` is the arrival rate plus what waits for a prefill, spread over the time to clear it;
    `decode_backlog_rps` is what waits for decode, spread likewise.
    """

    n_prefill: int
    n_decode: int
    n_converting: int
    paths: tuple[RemotePath, ...]
    prefill_demand_rps: float
    decode_backlog_rps: float
    output_tokens_mean: float
    lengths: LengthLaw
    recent_tokens: IntArray

    @property
    def n_local(self) -> int:
        """Local instances in service, those in conversion included."""
        return self.n_prefill + self.n_decode + self.n_converting

    @property
    def n_prfaas(self) -> float:
        """Remote instances that count for the cluster; need not be whole."""
        return sum(path.n_prfaas for path in self.paths)

    @property
    def link_bps(self) -> float:
        """Capacity of all its links together."""
        return sum(path.link_bps for path in self.paths)

    def prefill_load(self, point: Optimum) -> float:
        """Prefill demand over what both prefill paths of a point take together."""
        return _load(self.prefill_demand_rps, prefill_limit_rps(point))

    def decode_load(self, point: Optimum) -> float:
        """Decode demand over what decode takes; no more can reach decode than prefill lets through."""
        through_rps = min(self.prefill_demand_rps, prefill_limit_rps(point))
        return _load(through_rps + self.decode_backlog_rps, point.theta_pdd_rps)


def _load(demand_rps: float, limit_rps: float) -> float:
    if demand_rps <= 0.0:
        return 0.0
    return demand_rps / limit_rps if limit_rps > 0.0 else math.inf


def prefill_limit_rps(point: Optimum) -> float:
    """Arrival rate at which the narrower prefill path of a point is full: the first two terms of equation 6."""
    remote = path_limit_rps(point.theta_prfaas_rps, point.offload_share)
    return float(min(remote, path_limit_rps(point.theta_pdp_rps, 1.0 - point.offload_share)))


class Planner:
    """Throughput model of one PD cluster. Call `remember` on ticks whose samples count, `read` before a search.

    Args:
        scenario: profiles, bytes and the planned load, which holds until there are data.
        site: the PD cluster.
        parameters: how the model is fed.
    """

    def __init__(self, scenario: Scenario, site: Site, parameters: PlanningParameters) -> None:
        self.site = site
        self._scenario = scenario
        self._parameters = parameters
        self._planned_lengths: LengthLaw | None = None
        self._output_tokens_mean: float | None = None
        self._memory = DemandMemory()

    def remember(self, telemetry: Telemetry) -> None:
        """Keep the mean output length of finished requests while there is one."""
        pd = telemetry.pd[self.site.index]
        if pd.output_valid > 0.5 and pd.output_tokens_mean >= 1.0:
            self._output_tokens_mean = pd.output_tokens_mean

    def planned(self) -> Reading:
        """The start of the scenario under its planned load: nominal links, full PrfaaS clusters."""
        site = self.site
        return Reading(
            n_prefill=site.cluster.n_prefill,
            n_decode=site.cluster.n_decode,
            n_converting=0,
            paths=tuple(
                RemotePath(r.prefill, r.cluster.n_instances * r.share, r.link.capacity_bps)
                for r in site.routes
            ),
            prefill_demand_rps=0.0,
            decode_backlog_rps=0.0,
            output_tokens_mean=self._output_mean(),
            lengths=self._law(None),
            recent_tokens=_NO_LENGTHS,
        )

    def read(self, telemetry: Telemetry) -> Reading:
        """Present capacity and load."""
        pd = telemetry.pd[self.site.index]
        recent = telemetry.recent_lengths_tokens[self.site.index]
        rate_rps = getattr(pd, f"arrival_rate_{self._parameters.rate_window_s}s_rps")
        clear_s = self._parameters.backlog_clear_s
        prefill_rps = rate_rps + (pd.prefill_queue_requests + self.remote_waiting(telemetry)) / clear_s
        return Reading(
            n_prefill=int(pd.prefill_instances),
            n_decode=int(pd.decode_instances),
            n_converting=int(pd.converting_instances),
            paths=tuple(
                RemotePath(
                    r.prefill,
                    telemetry.prfaas[r.j].prefill_instances * self.share(telemetry, r),
                    self._capacity_bps(telemetry, r),
                )
                for r in self.site.routes
            ),
            prefill_demand_rps=prefill_rps,
            decode_backlog_rps=pd.decode_queue_requests / clear_s,
            output_tokens_mean=self._output_mean(),
            lengths=self._law(recent),
            recent_tokens=recent,
        )

    def share(self, telemetry: Telemetry, route: RemoteRoute) -> float:
        """Part of the PrfaaS cluster behind a link that counts for this PD cluster now, by `share_basis`."""
        if self._parameters.share_basis == "planned":
            return route.share
        rivals = [telemetry.pd[i] for i in route.rivals]
        rates = [pd.arrival_rate_120s_rps for pd in rivals]
        if sum(rates) * LONG_WINDOW_S < self._parameters.min_lengths:
            return route.share
        return share_of(rates, route.rivals.index(self.site.index))

    def remote_instances(self, telemetry: Telemetry) -> float:
        """Remote instances in service that count for this cluster."""
        clusters = telemetry.prfaas
        return sum(clusters[r.j].prefill_instances * self.share(telemetry, r) for r in self.site.routes)

    def remote_waiting(self, telemetry: Telemetry) -> float:
        """Requests in remote queues that count for this cluster."""
        clusters = telemetry.prfaas
        return sum(clusters[r.j].prefill_queue_requests * self.share(telemetry, r) for r in self.site.routes)

    def _capacity_bps(self, telemetry: Telemetry, route: RemoteRoute) -> float:
        link = telemetry.link[route.k]
        if self._parameters.link_basis == "nominal":
            return link.nominal_capacity_bps
        return link.observed_capacity_bps

    def link_capacity_bps(self, telemetry: Telemetry) -> float:
        """Capacity of all links together, observed or nominal by `link_basis`."""
        return sum(self._capacity_bps(telemetry, r) for r in self.site.routes)

    def link_utilisation(self, telemetry: Telemetry) -> float:
        """Bits sent over 5 s as a share of `link_capacity_bps`, all links together, at most 1; 0 without links."""
        links = telemetry.link
        capacity_bps = self.link_capacity_bps(telemetry)
        if capacity_bps <= 0.0:
            return 0.0
        sent_bps = sum(links[k].utilisation_5s * links[k].nominal_capacity_bps for k in self.site.links)
        return min(sent_bps / capacity_bps, 1.0)

    def _best_of(self, reading: Reading, splits: tuple[int, ...]) -> Optimum:
        """Best point among splits; one without local prefill sends everything remote."""
        found = [
            self._search(reading, reading.n_local, some, thresholds)
            for some, thresholds in (
                (tuple(n for n in splits if n > 0), THRESHOLDS_TOKENS),
                (tuple(n for n in splits if n == 0), _ALWAYS),
            )
            if some
        ]
        return max(found, key=lambda point: point.lambda_max_rps)

    def _search(
        self, reading: Reading, n_local: int, splits: tuple[int, ...], thresholds_tokens: FloatArray
    ) -> Optimum:
        return search_paths(
            reading.lengths,
            reading.paths,
            local=self.site.prefill,
            decode=self.site.decode,
            kv=self._scenario.model.kv,
            n_local=n_local,
            output_tokens_mean=reading.output_tokens_mean,
            splits=splits,
            thresholds_tokens=thresholds_tokens,
            means=self._parameters.means,
            service_ttft=False,
            memory=self._memory,
        )

    def best(self, reading: Reading) -> Optimum | None:
        """Best threshold and split that conversions may lead to; None when too few instances are left."""
        splits = self.splits(reading)
        return self._best_of(reading, splits) if splits else None

    def point(self, reading: Reading, n_prefill: int) -> Optimum:
        """The split with `n_prefill` of all local instances, at its best threshold."""
        return self._best_of(reading, (n_prefill,))

    def point_at(self, reading: Reading, n_prefill: int, threshold_tokens: float) -> Optimum:
        """The same split at a given threshold."""
        threshold = math.inf if reading.n_prfaas <= 0.0 else threshold_tokens
        return self._search(reading, reading.n_local, (n_prefill,), np.array([threshold]))

    def threshold(self, reading: Reading) -> float:
        """Best threshold of the present split: infinite without a remote side, 0 without local prefill."""
        if reading.n_prfaas <= 0.0:
            return math.inf
        if reading.n_prefill == 0:
            return 0.0
        # While the last decode instance is away the model still needs one; it does not move the threshold.
        n_local = reading.n_prefill + max(reading.n_decode, 1)
        return self._search(reading, n_local, (reading.n_prefill,), THRESHOLDS_TOKENS).threshold_tokens

    def splits(self, reading: Reading) -> tuple[int, ...]:
        """Numbers of prefill instances that conversions may lead to; empty when too few instances are left."""
        cluster = self.site.cluster
        return tuple(range(cluster.prefill_floor, reading.n_local - cluster.min_decode + 1))

    def idle_ttft_s(self, reading: Reading) -> list[float]:
        """Predicted first-token time of each recent prompt on its faster path with nobody else in the system.

        Local nodes are taken to be there: a cluster without local prefill can convert one.
        """
        site, kv = self.site, self._scenario.model.kv
        layers = kv.n_layers if self._scenario.transport.pipelining else 1
        tokens = reading.recent_tokens
        bits = (BITS_PER_BYTE * kv.transfer_bytes_array(tokens)).tolist()
        step_s = [self._step_s(length) for length in tokens.tolist()]
        idle = PathState(0.0, 1, 1, 0.0)
        cluster = site.cluster
        best = [
            first_token_s(idle, s, b, b / cluster.rdma_bps + cluster.rdma_latency_s, layers, step)
            for s, b, step in zip(_seconds(site.prefill, tokens), bits, step_s, strict=True)
        ]
        for route, path in zip(site.routes, reading.paths, strict=True):
            if path.n_prfaas > 0.0:
                state = PathState(0.0, 1, 1, 0.0, 0.0, path.link_bps)
                remote = [
                    first_token_s(state, s, b, route.link.latency_s, layers, step)
                    for s, b, step in zip(_seconds(path.prefill, tokens), bits, step_s, strict=True)
                ]
                best = [min(pair) for pair in zip(best, remote, strict=True)]
        return best

    def idle_step_s(self, reading: Reading) -> float:
        """Decode step of a lone sequence of mean length."""
        return self._step_s(round(reading.lengths.mean))

    def _step_s(self, context_tokens: int) -> float:
        d = self.site.decode
        return decode_step_s(d.a_s, d.b_s_per_sequence, d.c_s_per_token, 1, context_tokens)

    def _output_mean(self) -> float:
        if self._output_tokens_mean is None:
            self._output_tokens_mean = mean_output_tokens(self._scenario.workload)
        return self._output_tokens_mean

    def _law(self, recent: IntArray | None) -> LengthLaw:
        """Law of the recent lengths, or the planned one while there are too few."""
        if recent is not None and len(recent) >= self._parameters.min_lengths:
            return empirical_law(recent)
        if self._planned_lengths is None:
            self._planned_lengths = input_law(self._scenario.workload)
        return self._planned_lengths


class GuardedPlanningParameters(GuardParameters, PlanningParameters):
    """Parameters of a rule that plans and converts."""


def guarded_planners(
    scenario: Scenario, parameters: GuardedPlanningParameters
) -> list[tuple[Planner, ConversionGuard]]:
    """Planner and conversion guard of each PD cluster, in the order of the deployment."""
    return [
        (
            Planner(scenario, site, parameters),
            ConversionGuard(parameters, site.cluster, site.index, site.links, scenario.slo),
        )
        for site in sites_of(scenario)
    ]


def proposal_for(
    move: Move, gain: float, reading: Reading, now: Optimum, then: Optimum, guard: ConversionGuard
) -> Proposal:
    """A move with the loads of both roles.

    Decode is one pool: its load is the larger of demand over the model's capacity and the measured share of
    slots in use. Local prefill shares its work with the remote path, so its load is demand over what both
    prefill together at their best threshold, now and after; alone it is a pool like decode.
    """
    prefill, decode = reading.prefill_load(now), max(reading.decode_load(now), guard.decode_use)
    if move is Move.DECODE_TO_PREFILL:
        return Proposal(move, gain, prefill, decode, reading.n_decode, reading.n_decode - 1)
    if reading.n_prfaas > 0.0:
        return Proposal(move, gain, decode, prefill, prefill_limit_rps(now), prefill_limit_rps(then))
    measured = max(prefill, guard.prefill_use)
    return Proposal(move, gain, decode, measured, reading.n_prefill, reading.n_prefill - 1)


def _seconds(profile: PrefillProfile, tokens: IntArray) -> list[float]:
    seconds: list[float] = profile.seconds_array(tokens.astype(np.float64)).tolist()
    return seconds


_ALWAYS = np.zeros(1)
_NO_LENGTHS: IntArray = np.zeros(0, dtype=np.int64)
