"""The configuration of a router: schema, defaults, reading, and what it resolves to.

Unknown keys are errors, as in scenarios. What the deployment looks like (clusters, links, KV bytes, latency profiles)
comes from a scenario; this file names it and says which workers stand for its instances.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from prfaas_env.base import Bps, Frozen, PrfaasError, Seconds, Tokens, first_error
from prfaas_env.bundle_manifest import is_bundle
from prfaas_env.decision import CacheRule, ClusterDecision
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.scenarios.loader import apply_overrides, read_yaml
from prfaas_serving.drift import OUT_OF_RANGE_SHARE

BackendName = Literal["vllm_nixl", "vllm_mooncake", "sglang", "llmd_sidecar", "dynamo_direct", "echo"]
EngineName = Literal["vllm", "sglang", "dynamo", "echo"]
RoleName = Literal["prefill", "decode", "both"]

#: What engine stands behind a backend when a worker does not say.
ENGINE_OF: dict[str, EngineName] = {
    "vllm_nixl": "vllm",
    "vllm_mooncake": "vllm",
    "sglang": "sglang",
    "llmd_sidecar": "vllm",
    "dynamo_direct": "dynamo",
    "echo": "echo",
}
#: Ports of 0 are picked by the system.
_Port = Annotated[int, Field(ge=0, le=65_535)]
_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0, le=1e9)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class ServerTls(Frozen):
    """TLS of a listening port."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = Field(
        default=None, description="if set, clients must show a certificate of it"
    )


class Listen(Frozen):
    """Where clients connect."""

    host: str = "127.0.0.1"
    port: _Port = 8080
    tls: ServerTls | None = None


class Admin(Frozen):
    """Where operators connect. A token is always required."""

    host: str = Field(default="127.0.0.1", description="loopback by default")
    port: _Port = 8081
    token_file: str | None = Field(default=None, description="file that holds the token")
    token_env: str | None = Field(default=None, description="environment variable that holds the token")
    tls: ServerTls | None = None

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if (self.token_file is None) == (self.token_env is None):
            raise ValueError("give exactly one of token_file and token_env")
        return self

    def token(self) -> str:
        """The token.

        Raises:
            PrfaasError: it cannot be read or is shorter than 16 characters.
        """
        if self.token_env is not None:
            where, text = f"admin.token_env: {self.token_env}", os.environ.get(self.token_env, "")
        else:
            where = f"admin.token_file: {self.token_file}"
            try:
                text = Path(str(self.token_file)).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PrfaasError(f"{where}: cannot be read: {error}") from None
        token = text.strip()
        if len(token) < 16:
            raise PrfaasError(f"{where}: the token must have at least 16 characters, found {len(token)}")
        return token


class Upstream(Frozen):
    """Connections to workers."""

    ca_file: str | None = Field(
        default=None, description="authorities for https workers; none = the system's"
    )
    client_cert_file: str | None = None
    client_key_file: str | None = None
    connect_s: _Positive = Field(default=2.0, description="time to open a connection")
    keepalive_s: _Positive = Field(default=30.0, description="how long an idle connection is kept")


def http_url(url: str) -> str:
    """An address without path or query.

    Raises:
        ValueError: it is another kind of URL.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in {"http", "https"} and parts.hostname is not None
        parts.port  # noqa: B018 - reading it checks it
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment or parts.path not in {"", "/"} or parts.username:
        raise ValueError(f"must be http://host:port or https://host:port, found {url!r}")
    return url.rstrip("/")


class WorkerSpec(Frozen):
    """One worker."""

    name: str = Field(pattern=_NAME)
    url: str = Field(description="http://host:port or https://host:port")
    cluster: str = Field(description="a PrfaaS cluster of the scenario, or the PD cluster this router serves")
    role: RoleName
    engine: EngineName | None = Field(default=None, description="none = the one the backend is made for")
    max_concurrent: int | None = Field(default=None, ge=1, description="none = the limit of its role")
    bootstrap_host: str | None = Field(default=None, description="none = the host of the url")
    bootstrap_port: _Port = Field(default=8998, description="SGLang and Mooncake: port of the KV hand-over")
    instance_id: str | None = Field(default=None, description="Dynamo: id of the instance; digits")
    api_key_env: str | None = Field(
        default=None,
        description="environment variable with the key sent to this worker in place of the caller's",
    )

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        return http_url(url)

    @property
    def host(self) -> str:
        """Host name or address."""
        return str(urlsplit(self.url).hostname)

    @property
    def host_port(self) -> str:
        """`host:port` as in the url."""
        return urlsplit(self.url).netloc


class Kubernetes(Frozen):
    """Workers from the endpoints of one Service per cluster and role."""

    api_url: str = Field(default="https://kubernetes.default.svc", description="address of the API server")
    namespace: str = "default"
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    ca_file: str | None = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    services: tuple[KubernetesService, ...] = Field(min_length=1)
    poll_s: _Positive = 5.0


class KubernetesService(Frozen):
    """Every ready endpoint of this Service is a worker."""

    service: str
    cluster: str
    role: RoleName
    port_name: str | None = Field(default=None, description="none = the first port")
    scheme: Literal["http", "https"] = "http"
    bootstrap_port: _Port = 8998


Kubernetes.model_rebuild()


class Dynamo(Frozen):
    """Workers from the instances that a Dynamo frontend lists; their ids are others after every start."""

    url: str = Field(description="the frontend; also what requests are sent to")
    groups: tuple[DynamoGroup, ...] = Field(
        min_length=1, description="the first that fits an instance counts"
    )
    poll_s: _Positive = 1.0

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        return http_url(url)


class DynamoGroup(Frozen):
    """Instances of one component, or those of them in some networks, are workers of one cluster and role.

    One model has one prefill component in Dynamo, so that near and far prefill instances differ by address alone.
    """

    component: str
    namespace: str = "dynamo"
    networks: tuple[str, ...] = Field(
        default=(), description="such as 10.1.0.0/16; instances at these addresses; none = at any"
    )
    cluster: str
    role: RoleName

    @field_validator("networks")
    @classmethod
    def _networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)  # its ValueError says what is wrong
        return networks


Dynamo.model_rebuild()


class Discovery(Frozen):
    """Where workers come from besides `workers`."""

    file: str | None = Field(default=None, description="YAML file with a `workers` list; watched")
    file_poll_s: _Positive = 1.0
    kubernetes: Kubernetes | None = None
    dynamo: Dynamo | None = None

    @property
    def sources(self) -> list[str]:
        """Those that are set, in words."""
        file = [] if self.file is None else [f"file {self.file}"]
        return file + [name for name in ("kubernetes", "dynamo") if getattr(self, name) is not None]


class DecisionSettings(Frozen):
    """What is in force at the start: a threshold or a margin; none of both = the scenario's planned threshold."""

    threshold_tokens: float | None = Field(default=None, ge=0)
    margin_s: float | None = Field(default=None, ge=-1e6, le=1e6)
    never_remote: bool = Field(default=False, description="an infinite threshold")
    cache_rule: CacheRule = "scarce"

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [
            name
            for name, set_ in (
                ("threshold_tokens", self.threshold_tokens is not None),
                ("margin_s", self.margin_s is not None),
                ("never_remote", self.never_remote),
            )
            if set_
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one")
        return self


class Length(Frozen):
    """How prompts are counted."""

    tokenizer: str | None = Field(
        default=None, description="tokenizer.json, or the folder it is in (with its chat template)"
    )
    ask_engine: bool = Field(default=True, description="without a tokenizer: ask a worker's /tokenize")
    ask_engine_s: _Positive = Field(
        default=0.5, description="how long that may take before the estimate is used"
    )
    chars_per_token: float = Field(default=4.0, gt=0, le=100, description="the estimate")
    message_tokens: int = Field(
        default=4, ge=0, description="tokens that a chat template adds per message, for the estimate"
    )


class Cache(Frozen):
    """The index of prompt prefixes that workers are believed to hold."""

    enabled: bool = True
    block_tokens: Tokens = Field(default=256, description="block of the index, in tokens")
    shared: bool = Field(
        default=False, description="the workers of a cluster share one cache (an external store)"
    )
    needs_state: bool | None = Field(
        default=None, description="recurrent state: only checkpoints match; none = as the scenario's model"
    )
    checkpoints: Literal["end_of_prompt", "every_n_tokens", "none"] = "end_of_prompt"
    checkpoint_every_tokens: Tokens | None = None
    capacity_tokens: Tokens = Field(default=4_000_000, description="what one cache holds before it forgets")

    @model_validator(mode="after")
    def _distance(self) -> Self:
        if (self.checkpoints == "every_n_tokens") != (self.checkpoint_every_tokens is not None):
            raise ValueError(
                "checkpoint_every_tokens goes with checkpoints: every_n_tokens and no other rule"
            )
        if self.checkpoint_every_tokens is not None and self.checkpoint_every_tokens % self.block_tokens:
            raise ValueError(f"checkpoint_every_tokens must be a whole multiple of {self.block_tokens}")
        return self


class Deadlines(Frozen):
    """How long each part of a request may take before its leg is given up."""

    prefill_floor_s: _Positive = Field(default=30.0, description="least time of a prefill leg")
    prefill_factor: float = Field(default=3.0, ge=1, description="times the predicted wait and prefill")
    transfer_floor_s: _Positive = Field(default=5.0, description="least time of a KV transfer")
    transfer_factor: float = Field(default=3.0, ge=1, description="times bytes over observed bandwidth")
    first_token_s: _Positive = Field(
        default=120.0, description="decode leg without a transfer: first content"
    )
    generation_factor: float = Field(
        default=4.0,
        ge=1,
        description="answers that are not streamed: times the decode steps of a full batch; without max_tokens total_s",
    )
    idle_s: _Positive = Field(default=60.0, description="longest gap within a stream")
    total_s: _Positive = Field(default=3600.0, description="a whole request")
    queue_s: _Positive = Field(default=10.0, description="longest wait for a free worker in this router")
    release_s: _Positive = Field(default=10.0, description="giving staged KV back")


class Retry(Frozen):
    """What may be tried again."""

    max_prefill_tries: int = Field(default=2, ge=1, le=2)
    budget: float = Field(default=0.1, ge=0, le=1, description="retries over requests, in the long run")
    reserve: float = Field(default=10.0, ge=0, description="retries saved up at most")
    local_max_tokens: float | None = Field(
        default=None, ge=0, description="longest prompt that falls back to local prefill; none = any"
    )
    retry_after_s: _Positive = Field(default=1.0, description="Retry-After of refusals")


class Limits(Frozen):
    """Bounds of everything a client can make grow."""

    body_bytes: _Count = 32 * 2**20
    header_bytes: _Count = 32 * 2**10
    requests: _Count = Field(default=4096, description="requests in the router at once")
    queue: int = Field(default=512, ge=0, description="requests that wait for a worker, per pool")
    prefill_per_worker: _Count = 64
    decode_per_worker: _Count = 256
    body_read_s: _Positive = Field(default=60.0, description="time to send a request's body")
    client_stall_s: _Positive = Field(default=60.0, description="time a client may leave its stream unread")


class Health(Frozen):
    """Probes and breakers."""

    probe_s: _Positive = 2.0
    probe_timeout_s: _Positive = 2.0
    failures: _Count = Field(default=2, description="failed probes in a row that take a worker out")
    load_poll_s: _Positive = 1.0
    ramp_s: Seconds = Field(default=20.0, description="a returning worker gets its full share after this")
    breaker_failures: _Count = Field(default=5, description="failures in a row that open the breaker")
    breaker_open_s: _Positive = 5.0
    breaker_max_open_s: _Positive = 60.0
    pair_failures: _Count = Field(default=3, description="failed transfers in a row that keep a pair apart")
    pair_open_s: _Positive = 30.0
    canary: bool = Field(default=True, description="one real generation per role before /ready")


ControlMode = Literal["active", "shadow", "off"]


class ControlSettings(Frozen):
    """The control loop: a policy that decides from live telemetry, and what keeps it within bounds.

    Times are real seconds. The two clocks are the scenario's `control`.
    """

    policy: str = Field(min_length=1, description="NAME[:key=value,...], a bundle's folder, or module:Class")
    mode: ControlMode = Field(
        default="shadow",
        description="active: the policy acts; shadow: it is asked and logged, `rule` acts; off: nothing acts",
    )
    rule: str = Field(default="static", min_length=1, description="what acts in shadow mode, as `policy`")
    log_file: str | None = Field(default=None, description="decision log, one JSON object per line")
    log_bytes: int = Field(default=256 << 20, ge=1 << 16, description="size at which a new file is begun")
    log_keep: int = Field(default=8, ge=0, description="old files kept")
    stale_after_s: _Positive = Field(
        default=10.0, description="older figures of a worker hold the last decision"
    )
    fallback_after_s: _Positive = Field(
        default=60.0, description="after so long the planned threshold holds instead, without node moves"
    )
    threshold_min_tokens: float = Field(default=0.0, ge=0, description="lowest threshold put in force")
    threshold_max_tokens: float | None = Field(default=None, gt=0, description="highest one; none = no limit")
    threshold_factor_per_s: float | None = Field(
        default=4.0,
        gt=1,
        description="most that the threshold changes per second of the scenario; none = any",
    )
    margin_min_s: float | None = Field(default=None, ge=-1e6, le=1e6)
    margin_max_s: float | None = Field(default=None, ge=-1e6, le=1e6)
    out_of_range_share: float = Field(
        default=OUT_OF_RANGE_SHARE,
        ge=0,
        le=1,
        description="fall back when more telemetry fields than this lie outside their range",
    )
    moves: bool = Field(default=True, description="whether role changes may be ordered")
    flip_back_s: Seconds = Field(default=60.0, description="a move that undoes the last one waits so long")
    manual_hold_s: Seconds = Field(
        default=600.0, description="no moves so long after an operator changed a role"
    )
    drain_s: float | None = Field(
        default=None, gt=0, description="longest drain; none = the scenario's drain_limit_s"
    )
    switch_s: Seconds = Field(default=0.0, description="rest of a worker between two roles")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.fallback_after_s < self.stale_after_s:
            raise ValueError(
                f"fallback_after_s {self.fallback_after_s:g} is below stale_after_s {self.stale_after_s:g}"
            )
        high = math.inf if self.threshold_max_tokens is None else self.threshold_max_tokens
        if self.threshold_min_tokens > high:
            raise ValueError(
                f"threshold_min_tokens {self.threshold_min_tokens:g} is above threshold_max_tokens {high:g}"
            )
        if None not in (self.margin_min_s, self.margin_max_s) and self.margin_min_s > self.margin_max_s:  # type: ignore[operator]
            raise ValueError(
                f"margin_min_s {self.margin_min_s:g} is above margin_max_s {self.margin_max_s:g}"
            )
        return self


class RelabelActuator(Frozen):
    """Engines that serve either role (vLLM with NIXL): nothing to call."""

    kind: Literal["relabel"]


class SglangActuator(Frozen):
    """SGLang servers started with --enable-pd-role-switch."""

    kind: Literal["sglang"]
    decode_cuda_graph_memory_gb: float | None = Field(
        default=None,
        ge=0,
        le=1e4,
        description="memory for the decode graphs that a server captures at its first switch to decode; "
        "none = what a decode server says its own take",
    )
    decode_cuda_graph_bs: tuple[_Count, ...] | None = Field(
        default=None, description="batch sizes of those graphs; none = those of a decode server"
    )


class HttpActuator(Frozen):
    """Workers with a call for it: POST {"role": ...}, GET gives {"role": ...}."""

    kind: Literal["http"]
    path: str = Field(default="/role", pattern=r"^/[!-~]*$")


class PodLabel(Frozen):
    """A label of the pod says its role; the engine serves either."""

    key: str = Field(
        default="llm-d.ai/role",
        pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
    )
    prefill: str = "prefill"
    decode: str = "decode"
    both: str = "prefill-decode"


class TwoDeployments(Frozen):
    """One Deployment per role: one gets a replica less, the other one more. The new pod is found by discovery."""

    prefill: str = Field(min_length=1)
    decode: str = Field(min_length=1)


class KubernetesActuator(Frozen):
    """Pods, by the Kubernetes API. A worker has the name of its pod, as discovery gives it."""

    kind: Literal["kubernetes"]
    api_url: str = Field(default="https://kubernetes.default.svc", description="address of the API server")
    namespace: str = "default"
    token_file: str | None = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    ca_file: str | None = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    label: PodLabel | None = None
    scale: TwoDeployments | None = None
    poll_s: _Positive = Field(default=1.0, description="pause between two looks while pods change")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.label is None) == (self.scale is None):
            raise ValueError("give exactly one of label and scale")
        return self


ActuatorSettings = Annotated[
    RelabelActuator | SglangActuator | HttpActuator | KubernetesActuator, Field(discriminator="kind")
]


class Moves(Frozen):
    """How a worker of the PD cluster changes its role. Times are real seconds."""

    actuator: ActuatorSettings | None = Field(
        default=None, description="none = sglang for that backend, relabel for the others"
    )
    state_file: str | None = Field(
        default=None,
        description="roles as moved and the move under way, for the next start; none = forgotten at the end",
    )
    generate: bool = Field(
        default=True, description="one real generation in the new role before the worker takes traffic"
    )
    switch_s: _Positive = Field(default=120.0, description="longest switch of an engine")
    verify_s: _Positive = Field(default=60.0, description="longest check of the new role")
    retry_s: _Positive = Field(
        default=30.0, description="how often a worker that was taken out is tried again"
    )


class RouterConfig(Frozen):
    """Everything that defines a router."""

    backend: BackendName
    scenario: str = Field(default="paper", description="shipped name or path: clusters, link, profiles")
    pd: str | None = Field(default=None, description="the PD cluster served; none = the scenario's first")
    listen: Listen = Listen()
    admin: Admin | None = Field(default=None, description="none = no admin port")
    upstream: Upstream = Upstream()
    workers: tuple[WorkerSpec, ...] = ()
    discovery: Discovery = Discovery()
    decision: DecisionSettings = DecisionSettings()
    control: ControlSettings | None = Field(
        default=None, description="none = the decision changes by hand alone"
    )
    moves: Moves = Moves()
    length: Length = Length()
    cache: Cache = Cache()
    deadlines: Deadlines = Deadlines()
    retry: Retry = Retry()
    limits: Limits = Limits()
    health: Health = Health()
    link_bps: Bps | None = Field(default=None, gt=0, description="nominal capacity; none = the scenario's")
    drain_s: Seconds = Field(default=30.0, description="SIGTERM: time for open requests to end")
    time_scale: float = Field(
        default=1.0, gt=0, le=1e3, description="real seconds per second of the scenario; not 1 only for fakes"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    seed: int = Field(default=0, ge=0, description="of the choice among workers")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        refuse_twins(self.workers)
        if not self.workers and not self.discovery.sources:
            raise ValueError(
                "no workers: give workers, discovery.file, discovery.kubernetes or discovery.dynamo"
            )
        if self.discovery.dynamo is not None and self.backend != "dynamo_direct":
            raise ValueError(f"discovery.dynamo goes with backend dynamo_direct, found {self.backend}")
        return self

    @model_validator(mode="after")
    def _moves_fit(self) -> Self:
        actuator = self.actuator
        if isinstance(actuator, RelabelActuator) and not self.moves.generate:
            raise ValueError("moves.generate: false leaves actuator relabel without any check")
        if isinstance(actuator, KubernetesActuator) and actuator.scale and self.discovery.kubernetes is None:
            raise ValueError(
                "moves.actuator.scale makes new pods: it needs discovery.kubernetes to find them"
            )
        return self

    @property
    def actuator(self) -> ActuatorSettings:
        """What carries node moves out."""
        if self.moves.actuator is not None:
            return self.moves.actuator
        if ENGINE_OF[self.backend] == "sglang":
            return SglangActuator(kind="sglang")
        return RelabelActuator(kind="relabel")


def refuse_twins(workers: Sequence[WorkerSpec]) -> None:
    """ValueError if two workers have one name or one address (Dynamo's stand behind one, told apart by their ids)."""
    names: set[str] = set()
    places: set[tuple[str, str | None]] = set()
    for worker in workers:
        if worker.name in names:
            raise ValueError(f"two workers have the name {worker.name!r}")
        place = (worker.url, worker.instance_id)
        if place in places:
            raise ValueError(f"two workers have the url {worker.url!r}")
        names.add(worker.name)
        places.add(place)


class WorkersFile(Frozen):
    """Content of `discovery.file`."""

    workers: tuple[WorkerSpec, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        refuse_twins(self.workers)
        return self


class Resolved:
    """A configuration with its scenario: what a router is made of.

    Raises:
        PrfaasError: worker, cluster or setting that does not fit the scenario or the backend.
    """

    def __init__(self, config: RouterConfig, where: str = "router") -> None:
        self.config = config
        self.where = where
        self.scenario: Scenario = load_scenario(config.scenario)
        pds = self.scenario.deployment.pd
        names = [pd.name for pd in pds]
        if config.pd is not None and config.pd not in names:
            raise PrfaasError(
                f"{where}: pd: no PD cluster {config.pd!r} in the scenario; known: {', '.join(names)}"
            )
        self.pd_index = 0 if config.pd is None else names.index(config.pd)
        self.pd = pds[self.pd_index]
        self.links = tuple(link for link in self.scenario.deployment.links if link.pd == self.pd.name)
        for worker in config.workers:
            self.check_worker(worker, where)
        for number, group in enumerate(config.discovery.dynamo.groups if config.discovery.dynamo else ()):
            self._check_place(group.cluster, group.role, f"{where}: discovery.dynamo.groups.{number}")
        if config.admin is not None:
            config.admin.token()

    @property
    def remote_clusters(self) -> tuple[str, ...]:
        """PrfaaS clusters that the served PD cluster is linked to, in the order of links."""
        return tuple(link.prfaas for link in self.links)

    def check_worker(self, worker: WorkerSpec, where: str) -> None:
        """Refuse a worker that the scenario or the backend has no place for."""
        at = f"{where}: worker {worker.name!r}"
        self._check_place(worker.cluster, worker.role, at)
        if self.config.backend == "dynamo_direct" and not (worker.instance_id or "").isdigit():
            raise PrfaasError(
                f"{at}: instance_id must be digits for dynamo_direct, found {worker.instance_id!r}"
            )
        if worker.api_key_env is not None and not os.environ.get(worker.api_key_env):
            raise PrfaasError(f"{at}: api_key_env: environment variable {worker.api_key_env!r} is not set")

    def _check_place(self, cluster: str, role: RoleName, at: str) -> None:
        known = (self.pd.name, *self.remote_clusters)
        if cluster not in known:
            raise PrfaasError(f"{at}: cluster is {cluster!r}; allowed: {', '.join(known)}")
        if cluster != self.pd.name and role != "prefill":
            raise PrfaasError(f"{at}: role is {role!r}; workers of a PrfaaS cluster only prefill")

    def decision(self) -> ClusterDecision:
        """The decision at the start. Without a setting it is the scenario's planned threshold."""
        settings = self.config.decision
        if settings.margin_s is not None:
            return ClusterDecision(margin_s=settings.margin_s, cache_rule=settings.cache_rule)
        threshold = math.inf if settings.never_remote else settings.threshold_tokens
        if threshold is None:
            threshold = self.planned_threshold()
        return ClusterDecision(threshold_tokens=threshold, cache_rule=settings.cache_rule)

    def planned_threshold(self) -> float:
        """The threshold of the rule `static`: the paper's model at the planned load."""
        # solving the model needs scipy, which a router with a given decision does without
        from prfaas_baselines.planning import Planner, PlanningParameters
        from prfaas_env.sites import sites_of

        if not self.links:
            return math.inf
        planner = Planner(
            self.scenario, sites_of(self.scenario)[self.pd_index], PlanningParameters(means="representative")
        )
        return planner.threshold(planner.planned())

    def modes(self) -> list[tuple[str, str]]:
        """(setting, what it resolves to): what `--check` and the start print."""
        config, decision = self.config, self.decision()
        rule = (
            f"margin {decision.margin_s:g} s"
            if decision.margin_s is not None
            else f"threshold {decision.threshold_tokens:g} tokens"
        )
        planned = config.decision == DecisionSettings(cache_rule=config.decision.cache_rule)
        counts = {role: sum(w.role == role for w in config.workers) for role in ("prefill", "decode", "both")}
        remote = sum(w.cluster != self.pd.name for w in config.workers)
        if config.length.tokenizer is not None:
            length = f"tokenizer {config.length.tokenizer}"
        elif config.length.ask_engine:
            length = "the engine's /tokenize, else an estimate"
        else:
            length = f"estimate: {config.length.chars_per_token:g} characters per token"
        found = [*(["config"] if config.workers else []), *config.discovery.sources]
        return [
            ("backend", config.backend),
            ("scenario", f"{self.scenario.name} (hash {self.scenario.hash}), PD cluster {self.pd.name}"),
            ("remote clusters", ", ".join(self.remote_clusters) or "none: nothing can go remote"),
            (
                "decision",
                f"{rule}{' (planned for the scenario)' if planned else ''}, cache rule {decision.cache_rule}",
            ),
            ("control", self._control_mode()),
            ("node moves", self._moves_mode()),
            ("workers from", ", ".join(found)),
            (
                "workers",
                f"{remote} remote prefill, {counts['prefill'] - remote} local prefill, "
                f"{counts['decode']} decode, {counts['both']} both",
            ),
            ("prompt length", length),
            ("prefix index", self._cache_mode()),
            (
                "listen",
                f"{'https' if config.listen.tls else 'http'}://{config.listen.host}:{config.listen.port}",
            ),
            (
                "admin",
                "off" if config.admin is None else f"{config.admin.host}:{config.admin.port}, token required",
            ),
        ]

    def _control_mode(self) -> str:
        c, clocks = self.config.control, self.scenario.control
        if c is None:
            return "off: the decision changes by hand alone"
        acts = {"active": "acts", "shadow": f"is asked, {c.rule} acts", "off": "is not asked"}[c.mode]
        log = f"decisions logged to {c.log_file}" if c.log_file else "no decision log"
        moves = f"moves every {clocks.conversion_interval_s:g} s at most" if c.moves else "no moves"
        return f"{c.mode}: policy {c.policy} {acts} every {clocks.control_interval_s:g} s, {moves}, {log}"

    def _moves_mode(self) -> str:
        moves = self.config.moves
        keeps = "not kept over a restart" if moves.state_file is None else f"kept in {moves.state_file}"
        return f"{self.config.actuator.kind}, roles as moved are {keeps}"

    def _cache_mode(self) -> str:
        cache = self.config.cache
        if not cache.enabled:
            return "off: every prompt counts as new"
        state = f"with checkpoints ({cache.checkpoints})" if self.needs_state else "attention blocks"
        return f"blocks of {cache.block_tokens} tokens, {state}, {'per cluster' if cache.shared else 'per worker'}"

    @property
    def needs_state(self) -> bool:
        """Whether only checkpoints of a state can be gone on from."""
        kv = self.scenario.model.kv
        stated = self.config.cache.needs_state
        return (kv.fixed_bytes > 0 or bool(kv.windows)) if stated is None else stated

    def without_effect(self) -> list[str]:
        """Settings that were given and that nothing reads, one line each."""
        config, lines = self.config, []
        given = config.length.model_fields_set
        if config.length.tokenizer is not None:
            lines += [
                f"length.{name} has no effect: length.tokenizer is set"
                for name in sorted(given - {"tokenizer", "message_tokens", "chars_per_token"})
            ]
        if not config.cache.enabled:
            lines += [
                f"cache.{name} has no effect: cache.enabled is false"
                for name in sorted(config.cache.model_fields_set - {"enabled"})
            ]
        if not self.needs_state:
            lines += [
                f"cache.{name} has no effect: the model needs no checkpoints"
                for name in ("checkpoints", "checkpoint_every_tokens")
                if name in config.cache.model_fields_set and config.cache.enabled
            ]
        if not self.links and config.link_bps is not None:
            lines.append(f"link_bps has no effect: PD cluster {self.pd.name} has no link")
        return lines


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Resolved, list[str]]:
    """Read a router's configuration.

    Args:
        path: YAML file; a scenario, discovery or tokenizer path in it is relative to its folder.
        overrides: `dotted.path=value` assignments, applied last.

    Returns:
        The resolved configuration, and one line per setting that an override replaced.

    Raises:
        PrfaasError: one line that names file and field.
    """
    file = Path(path)
    raw = read_yaml(file)
    _relative_to(file.parent, raw)
    before = [(a.partition("=")[0], _at(raw, a.partition("=")[0])) for a in overrides]
    apply_overrides(raw, overrides)
    notes = [
        f"{name}: {old!r} (file) is overridden by {_at(raw, name)!r} (--set)"
        for name, old in before
        if old is not None and old != _at(raw, name)
    ]
    return Resolved(validate(RouterConfig, raw, str(file)), str(file)), notes


def validate(model: type[Any], raw: Any, where: str) -> Any:
    """An instance of a configuration model; PrfaasError naming the field."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise first_error(error, where) from None


def _at(raw: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        elif isinstance(raw, dict):
            raw = raw.get(part)
        else:
            return None
    return raw


def _relative_to(folder: Path, raw: dict[str, Any]) -> None:
    scenario = raw.get("scenario")
    if isinstance(scenario, str) and scenario.endswith((".yaml", ".yml")):
        raw["scenario"] = str(folder / scenario)
    for section, field in (
        ("discovery", "file"),
        ("length", "tokenizer"),
        ("admin", "token_file"),
        ("control", "log_file"),
        ("moves", "state_file"),
    ):
        part = raw.get(section)
        if isinstance(part, dict) and isinstance(part.get(field), str):
            part[field] = str(folder / part[field])
    control = raw.get("control")
    if not isinstance(control, dict):
        return
    for field in ("policy", "rule"):
        spec = control.get(field)
        if isinstance(spec, str) and "\0" not in spec and is_bundle(str(folder / spec)):
            control[field] = str(folder / spec)
