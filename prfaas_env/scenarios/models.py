"""Everything that defines a run, as frozen models; the YAML files in `data/` are instances of `Scenario`."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from prfaas_env.base import MAX_S, Bps, Bytes, Frozen, PrfaasError, Seconds, Tokens
from prfaas_env.profiles.catalogue import ModelProfile, load_model
from prfaas_env.profiles.latency import HardwareProfile
from prfaas_env.scenarios.faults import Faults
from prfaas_env.simulator.formulas import MAX_RATE_BPS, connection_rate_bps
from prfaas_env.workload.means import with_mean_rate
from prfaas_env.workload.models import ProfileArrivals, RegimeChain, TraceWorkload, Workload
from prfaas_env.workload.traces import trace_digest

#: Most instances of one cluster and most clusters or links of one kind (event keys hold no more).
MAX_INSTANCES = 16_000
MAX_CLUSTERS = 120
#: Largest capacity of one cluster's prefix pool.
MAX_POOL_BYTES = 1 << 60


class PrfaasCluster(Frozen):
    """A remote cluster that only prefills."""

    name: str = "prfaas0"
    hardware: str = Field(description="name of a hardware profile of the scenario's model")
    n_instances: int = Field(ge=1, le=MAX_INSTANCES)


class PdCluster(Frozen):
    """A local cluster whose instances prefill or decode and can change role."""

    name: str = "pd0"
    hardware: str = Field(
        description="name of a hardware profile of the scenario's model, with a decode profile"
    )
    n_prefill: int = Field(ge=0, le=MAX_INSTANCES // 2)
    n_decode: int = Field(ge=1, le=MAX_INSTANCES // 2)
    min_prefill: int | None = Field(
        default=None,
        ge=0,
        description="fewest active prefill instances; default 1, or 0 if it starts with none",
    )
    min_decode: int = Field(default=1, ge=1)
    arrival_share: float = Field(
        default=1.0, ge=0, description="weight of this cluster's share of the arrivals"
    )
    rdma_bps: Bps = Field(
        default=800e9, ge=1e6, description="KV hand-over inside the cluster, bit/s per node"
    )
    rdma_latency_s: Seconds = 0.0

    @property
    def prefill_floor(self) -> int:
        """Fewest active prefill instances that a conversion may leave."""
        return min(1, self.n_prefill) if self.min_prefill is None else self.min_prefill

    @model_validator(mode="after")
    def _floors(self) -> Self:
        if self.prefill_floor > self.n_prefill:
            raise ValueError(f"n_prefill {self.n_prefill} is below min_prefill {self.prefill_floor}")
        if self.min_decode > self.n_decode:
            raise ValueError(f"n_decode {self.n_decode} is below min_decode {self.min_decode}")
        return self


class Link(Frozen):
    """Ethernet between one PrfaaS cluster and one PD cluster.

    A KV cache is one flow over `connections` TCP connections. Each of them carries at most what its window and the
    loss on the way allow at this round-trip time (`formulas.connection_rate_bps`).
    """

    prfaas: str = "prfaas0"
    pd: str = "pd0"
    capacity_bps: Bps = Field(gt=0, le=MAX_RATE_BPS, description="nominal capacity, bit/s")
    latency_s: Seconds = Field(default=0.0, description="one-way latency, added once per request")
    flow_cap_bps: Bps | None = Field(
        default=None, gt=0, description="most that one flow gets (line rate of a sender); none = no cap"
    )
    rtt_s: Seconds | None = Field(default=None, description="round-trip time; none = twice latency_s")
    connections: int = Field(default=1, ge=1, le=100_000, description="TCP connections per flow")
    window_bytes: int | None = Field(
        default=None, ge=1, description="most bytes in flight per connection; none = no limit"
    )
    loss: float = Field(default=0.0, ge=0, le=0.5, description="share of segments lost on the way")
    segment_bytes: int = Field(default=1460, ge=1, description="payload of one segment")
    setup_s: Seconds = Field(
        default=0.0, description="time to set up connections: paid by the first flow after idle_s"
    )
    idle_s: float = Field(
        default=10.0, ge=0.001, le=MAX_S, description="without a flow for this long, connections are closed"
    )
    jitter_s: Seconds = Field(
        default=0.0, description="mean of an exponential delay per KV cache on top of latency_s"
    )

    @property
    def round_trip_s(self) -> float:
        """Round-trip time."""
        return 2.0 * self.latency_s if self.rtt_s is None else self.rtt_s

    @property
    def flow_limit_bps(self) -> float:
        """Most that one flow gets: line rate, windows and loss; infinite without any of them."""
        window_bytes = math.inf if self.window_bytes is None else float(self.window_bytes)
        each_bps = connection_rate_bps(self.round_trip_s, window_bytes, self.segment_bytes, self.loss)
        line_bps = math.inf if self.flow_cap_bps is None else self.flow_cap_bps
        return min(line_bps, self.connections * each_bps)

    @model_validator(mode="after")
    def _has_round_trip(self) -> Self:
        if (self.window_bytes is not None or self.loss > 0) and self.round_trip_s == 0:
            raise ValueError("window_bytes and loss act through the round-trip time: set rtt_s or latency_s")
        return self


class Deployment(Frozen):
    """Hardware counts per cluster and the links between them."""

    prfaas: tuple[PrfaasCluster, ...] = Field(default=(), max_length=MAX_CLUSTERS)
    pd: tuple[PdCluster, ...] = Field(min_length=1, max_length=MAX_CLUSTERS)
    links: tuple[Link, ...] = Field(default=(), max_length=2 * MAX_CLUSTERS)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for kind, clusters in (("prfaas", self.prfaas), ("pd", self.pd)):
            names = [c.name for c in clusters]
            if len(set(names)) != len(names):
                raise ValueError(f"{kind} cluster names must differ, found {names}")
        prfaas_names = {c.name for c in self.prfaas}
        pd_names = {c.name for c in self.pd}
        pairs = set()
        for link in self.links:
            if link.prfaas not in prfaas_names:
                raise ValueError(f"link names prfaas cluster {link.prfaas!r}; known: {sorted(prfaas_names)}")
            if link.pd not in pd_names:
                raise ValueError(f"link names pd cluster {link.pd!r}; known: {sorted(pd_names)}")
            if (link.prfaas, link.pd) in pairs:
                raise ValueError(f"two links between {link.prfaas!r} and {link.pd!r}")
            pairs.add((link.prfaas, link.pd))
        if not any(c.arrival_share > 0 for c in self.pd):
            raise ValueError("arrival_share is 0 at every pd cluster; at least one must be above 0")
        linked_pd = {link.pd for link in self.links}
        for cluster in self.pd:
            if cluster.name not in linked_pd and cluster.prefill_floor < 1:
                raise ValueError(
                    f"pd cluster {cluster.name!r} has no link to a prfaas cluster, so it needs at least one "
                    f"prefill instance (n_prefill {cluster.n_prefill}, min_prefill {cluster.prefill_floor})"
                )
        return self


class ConstantCapacity(Frozen):
    """The link stays at its nominal capacity."""

    kind: Literal["constant"] = "constant"


class StepCapacity(Frozen):
    """Capacity changes at given times, the same on every link; before the first, nominal."""

    kind: Literal["steps"] = "steps"
    at_s: tuple[Seconds, ...] = Field(min_length=1)
    capacity_bps: tuple[Annotated[Bps, Field(ge=0, le=MAX_RATE_BPS)], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if len(self.at_s) != len(self.capacity_bps):
            raise ValueError(f"{len(self.at_s)} at_s but {len(self.capacity_bps)} capacity_bps")
        if any(b <= a for a, b in zip(self.at_s, self.at_s[1:], strict=False)):
            raise ValueError("at_s must rise strictly")
        return self


class RegimeCapacity(Frozen):
    """Capacity follows a regime chain, one independent chain per link."""

    kind: Literal["regimes"] = "regimes"
    capacity_bps: RegimeChain

    @field_validator("capacity_bps")
    @classmethod
    def _within(cls, chain: RegimeChain) -> RegimeChain:
        _refuse_above_most(chain)
        return chain


class TraceCapacity(Frozen):
    """Capacity follows a recorded file, the same on every link: CSV with the columns `time_s,capacity_bps`.

    Before the first row the capacity is nominal, after the last one it stays. `file` is relative to the scenario file.
    """

    kind: Literal["trace"] = "trace"
    file: str
    speed: float = Field(default=1.0, gt=0, description="how many times as fast as recorded")


LinkCapacity = Annotated[
    ConstantCapacity | StepCapacity | RegimeCapacity | TraceCapacity, Field(discriminator="kind")
]


def _refuse_above_most(chain: RegimeChain) -> None:
    for value in chain.values:
        if not 0 <= value <= MAX_RATE_BPS:
            raise ValueError(f"values must be within 0 and {MAX_RATE_BPS:g} bit/s, found {value:g}")


class Transport(Frozen):
    """How a KV cache crosses the link."""

    pipelining: bool = Field(default=True, description="send layer by layer while the prefill runs")
    background_bps: RegimeChain | None = Field(
        default=None,
        description="other traffic on each link, which leaves the rest of the capacity to KV caches",
    )

    @field_validator("background_bps")
    @classmethod
    def _within(cls, chain: RegimeChain | None) -> RegimeChain | None:
        if chain is not None:
            _refuse_above_most(chain)
        return chain


class PrefixPool(Frozen):
    """Prefix cache pool of every cluster (paper section 3.2); the block size is that of the workload's prefix data."""

    prfaas_capacity_bytes: Bytes | None = Field(
        ge=0, le=MAX_POOL_BYTES, description="bytes per PrfaaS cluster; null = no limit"
    )
    pd_capacity_bytes: Bytes | None = Field(
        ge=0, le=MAX_POOL_BYTES, description="bytes per PD cluster; null = no limit"
    )
    checkpoints: Literal["end_of_prompt", "every_n_tokens", "none"] = Field(
        default="end_of_prompt",
        description="where a model with recurrent state or windows leaves checkpoints it can go on from",
    )
    checkpoint_every_tokens: Tokens | None = Field(
        default=None, description="for every_n_tokens: distance of checkpoints, a whole multiple of the block"
    )
    metadata_age_s: Seconds = Field(
        default=0.0,
        description="routing sees the pools as they were at the last multiple of this; 0 = as they are",
    )

    @model_validator(mode="after")
    def _distance(self) -> Self:
        if (self.checkpoints == "every_n_tokens") != (self.checkpoint_every_tokens is not None):
            raise ValueError(
                f"checkpoint_every_tokens goes with checkpoints: every_n_tokens and with no other rule; found "
                f"{self.checkpoint_every_tokens} with {self.checkpoints}"
            )
        return self


class Conversion(Frozen):
    """What a change of role costs."""

    switch_s: Seconds = 15.0
    drain_limit_s: Seconds = Field(
        default=120.0, gt=0, description="after it, a draining instance's sequences are prefilled again"
    )
    warmup_s: Seconds = 0.0
    warmup_speed: float = Field(
        default=1.0, ge=0.001, le=1, description="speed during the warm-up, share of full"
    )


class Control(Frozen):
    """The two clocks of the scheduler."""

    control_interval_s: float = Field(default=1.0, ge=0.001, le=MAX_S)
    conversion_interval_s: Seconds = 15.0

    @model_validator(mode="after")
    def _whole_multiple(self) -> Self:
        ratio = self.conversion_interval_s / self.control_interval_s
        if ratio < 1 or abs(ratio - round(ratio)) > 1e-9:
            raise ValueError(
                f"conversion_interval_s {self.conversion_interval_s} must be a whole multiple of "
                f"control_interval_s {self.control_interval_s}"
            )
        return self


class Slo(Frozen):
    """Service-level objectives; none = not part of goodput."""

    ttft_s: float | None = Field(default=None, gt=0)
    tpot_s: float | None = Field(default=None, gt=0)


class Admission(Frozen):
    """Limits at the door; a request over one is rejected with a counted reason."""

    max_input_tokens: int | None = Field(default=None, ge=1)
    max_queue_requests: int | None = Field(
        default=None,
        ge=1,
        description="most requests that wait in the chosen prefill cluster's queue (running ones do not count)",
    )


class Measure(Frozen):
    """Horizon of an episode and the part of it that is measured."""

    horizon_s: float = Field(default=3600.0, ge=0.001, le=MAX_S)
    warmup_s: Seconds = 0.0

    @model_validator(mode="after")
    def _window(self) -> Self:
        if self.warmup_s >= self.horizon_s:
            raise ValueError(f"warmup_s {self.warmup_s} must be below horizon_s {self.horizon_s}")
        return self


class RewardSettings(Frozen):
    """Scales and prices of the rewards."""

    scale: float = Field(default=20.0, gt=0, description="divides the reward")
    reject_penalty_s: float = Field(
        default=60.0, ge=0, description="seconds of waiting charged per rejected or aborted request"
    )
    egress_price_s_per_gbit: float = Field(
        default=0.01, ge=0, description="`cost` reward: seconds of waiting that one Gbit of egress is worth"
    )
    conversion_price_s: float = Field(
        default=5.0, ge=0, description="`cost` reward: seconds of waiting that one conversion is worth"
    )


#: Highest mean arrival rate that `with_rate` takes.
MAX_RATE_RPS = 1e6


class Scenario(Frozen):
    """One deployment under one workload: everything that defines a run but the seed and the policy."""

    name: str = Field(min_length=1)
    description: str = ""
    model: ModelProfile
    deployment: Deployment
    workload: Workload
    link_capacity: LinkCapacity = ConstantCapacity()
    transport: Transport = Transport()
    faults: Faults = Faults()
    conversion: Conversion = Conversion()
    control: Control = Control()
    slo: Slo = Slo()
    admission: Admission = Admission()
    measure: Measure = Measure()
    reward: RewardSettings = RewardSettings()
    prefix_pool: PrefixPool | None = Field(
        default=None, description="prefix caches; null = none, every prompt counts as new"
    )

    @field_validator("model", mode="before")
    @classmethod
    def _from_catalogue(cls, value: Any) -> Any:
        return load_model(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _hardware_known(self) -> Self:
        known = sorted(self.model.hardware)
        clusters: list[PrfaasCluster | PdCluster] = [*self.deployment.prfaas, *self.deployment.pd]
        for cluster in clusters:
            if cluster.hardware not in self.model.hardware:
                raise ValueError(
                    f"deployment: cluster {cluster.name!r} names hardware {cluster.hardware!r}; "
                    f"the model has {known}"
                )
        self._check_faults()
        for pd in self.deployment.pd:
            if self.model.hardware[pd.hardware].decode is None:
                raise ValueError(
                    f"deployment: pd cluster {pd.name!r}: hardware {pd.hardware!r} has no decode profile"
                )
        return self

    @model_validator(mode="after")
    def _pool_has_a_unit(self) -> Self:
        if self.prefix_pool is not None and self.model.kv.bytes_per_token == 0:
            raise ValueError(
                f"prefix_pool: its unit is one block of attention KV, but model {self.model.name!r} has none "
                "(kv.bytes_per_token is 0)"
            )
        return self

    def _check_faults(self) -> None:
        sizes = {c.name: c.n_instances for c in self.deployment.prfaas}
        sizes |= {c.name: c.n_prefill + c.n_decode for c in self.deployment.pd}
        for name in (
            *(name for law in self.faults.random_failures for name in law.clusters),
            *(fault.cluster for fault in self.faults.instance_faults),
        ):
            if name not in sizes:
                raise ValueError(f"faults: no cluster {name!r}; known: {sorted(sizes)}")
        for fault in self.faults.instance_faults:
            if fault.instances and max(fault.instances) >= sizes[fault.cluster]:
                raise ValueError(
                    f"faults: cluster {fault.cluster!r} has instances 0..{sizes[fault.cluster] - 1}, "
                    f"found {max(fault.instances)}"
                )
        for outage in self.faults.link_outages:
            if outage.link is not None and outage.link >= len(self.deployment.links):
                raise ValueError(
                    f"faults: link {outage.link} of an outage; there are {len(self.deployment.links)} links"
                )

    def hardware_of(self, cluster: PrfaasCluster | PdCluster) -> HardwareProfile:
        """Latency profile of a cluster's instances."""
        return self.model.hardware[cluster.hardware]

    @property
    def hash(self) -> str:
        """Hash of the resolved content, 12 hex digits: without name and description, a trace or rate profile by its
        own content.

        Raises:
            PrfaasError: the file cannot be read.
        """
        content = self.model_dump(mode="json", exclude={"name", "description"})
        if self.prefix_pool is None:
            del content["prefix_pool"]  # a scenario without one keeps the hash of before there were any
        if isinstance(self.workload, TraceWorkload):
            content["workload"]["file"] = trace_digest(self.workload.file)
        elif isinstance(self.workload.arrivals, ProfileArrivals):
            content["workload"]["arrivals"]["file"] = trace_digest(self.workload.arrivals.file)
        if isinstance(self.link_capacity, TraceCapacity):
            content["link_capacity"]["file"] = trace_digest(self.link_capacity.file)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def replace(self, **changes: Any) -> Scenario:
        """A copy with top-level fields replaced, validated anew."""
        return Scenario.model_validate({**{k: getattr(self, k) for k in type(self).model_fields}, **changes})

    def with_rate(self, rate_rps: float) -> Scenario:
        """A copy with this mean arrival rate: set for Poisson, gamma and even spacing, scaled for regimes.

        A trace is replayed faster or slower (`speed`) to have this rate, sessions begin more or less often, and
        a rate profile is scaled.

        Raises:
            PrfaasError: a rate that is not above 0, or a workload without arrivals, which cannot be scaled.
        """
        if not 0 < rate_rps <= MAX_RATE_RPS:
            raise PrfaasError(
                f"the arrival rate must be above 0 and at most {MAX_RATE_RPS:.0e} req/s, found {rate_rps}"
            )
        try:
            return self.replace(workload=with_mean_rate(self.workload, rate_rps))
        except PrfaasError as error:
            raise PrfaasError(f"scenario {self.name}: {error}") from None
