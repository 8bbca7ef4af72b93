"""The operators' port: state, decisions, override of threshold or margin, workers, roles. JSON in, JSON out.

| call | what it does |
| --- | --- |
| GET /state | decision, pools, workers, links, budget |
| GET /ui | the page for operators; its files alone need no token |
| GET /ui/state | what the page shows |
| GET /decisions | the last changes of the decision |
| GET /decision, PUT /decision | the decision in force; set what holds without an override |
| PUT /override, DELETE /override | lay a decision over it; take it away |
| POST /workers, DELETE /workers/NAME | take a worker in; let it go (what runs there goes on) |
| POST /workers/NAME/drain, /undrain | send nothing new there; send again |
| POST /workers/NAME/role | a node move: drain, switch, verify, relabel |
| POST /workers/NAME/cache_events | cache events of an engine |
| GET /control | the control loop: mode, policy, guard, alarms, last decision, telemetry and where it comes from |
| GET /requests | the last 5000 requests that ended, as in the decision log, with its header |
| PUT /mode | active, shadow or off |
| POST /reload | exchange the policy; without `policy` read the present one anew |
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Literal

from aiohttp.web_request import BaseRequest
from pydantic import Field

from prfaas_env.base import Frozen, PrfaasError
from prfaas_env.decision import CacheRule, ClusterDecision
from prfaas_serving.cache_index import EngineEvents
from prfaas_serving.config import ControlMode, RoleName, WorkerSpec, validate
from prfaas_serving.decision_log import requests_json
from prfaas_serving.fleet import Worker
from prfaas_serving.paths import finite
from prfaas_serving.requests import ClientError, parse_json

if TYPE_CHECKING:
    from prfaas_serving.app import Router


class DecisionOrder(Frozen):
    """A decision as an operator writes it; `version` refuses it if another change came between."""

    threshold_tokens: float | None = Field(default=None, ge=0)
    margin_s: float | None = Field(default=None, ge=-1e6, le=1e6)
    never_remote: bool = False
    cache_rule: CacheRule = "scarce"
    version: int | None = Field(default=None, description="the version that it was made for")
    dry_run: bool = False
    reason: str = Field(default="operator", max_length=200)

    def decision(self) -> ClusterDecision:
        """The decision.

        Raises:
            ClientError: not exactly one rule is given.
        """
        given = (self.threshold_tokens is not None) + (self.margin_s is not None) + self.never_remote
        if given != 1:
            raise ClientError(
                400, "give exactly one of threshold_tokens, margin_s, never_remote", "invalid_decision"
            )
        if self.margin_s is not None:
            return ClusterDecision(margin_s=self.margin_s, cache_rule=self.cache_rule)
        threshold = math.inf if self.never_remote else self.threshold_tokens
        return ClusterDecision(threshold_tokens=threshold, cache_rule=self.cache_rule)


class RoleOrder(Frozen):
    """A change of role."""

    role: RoleName
    drain_s: float = Field(default=120.0, gt=0, le=3600)


class ModeOrder(Frozen):
    """A change of the control loop's mode."""

    mode: ControlMode
    reason: str = Field(default="operator", max_length=200)


class ReloadOrder(Frozen):
    """Another policy, or the present one read anew."""

    policy: str | None = Field(default=None, min_length=1, max_length=1000)
    reason: str = Field(default="operator", max_length=200)


class CacheEvent(Frozen):
    """One cache event of an engine, in vLLM's words."""

    type: Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    block_hashes: tuple[int | str, ...] = ()
    parent_block_hash: int | str | None = None
    token_ids: tuple[int, ...] = ()
    block_size: int = Field(default=16, ge=1)


class CacheEvents(Frozen):
    """A batch of them."""

    events: tuple[CacheEvent, ...]


class AdminApi:
    """The calls of the admin port."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._f = router.forwarder
        self._events: dict[str, EngineEvents] = {}

    async def handle(self, request: BaseRequest) -> Any:
        """Answer one call.

        Raises:
            ClientError: an unknown call or a wrong body.
        """
        parts = [p for p in request.path.split("/") if p]
        key = (request.method, parts[0] if parts else "")
        if len(parts) == 1:
            if key == ("GET", "state"):
                return self.state()
            if key == ("GET", "decisions"):
                return {"decisions": [c.as_json() for c in self._f.holder.history]}
            if key == ("GET", "decision"):
                return self._decision()
            if key in {("PUT", "decision"), ("PUT", "override")}:
                return self._set(await self._body(request, DecisionOrder), parts[0] == "override")
            if key == ("DELETE", "override"):
                self._f.holder.clear_override("operator")
                return self._decision()
            if key == ("POST", "workers"):
                return self._add(await self._body(request, WorkerSpec))
            if parts[0] in {"control", "requests", "mode", "reload"}:
                return await self._control(request, key)
        if len(parts) >= 2 and parts[0] == "workers":
            return await self._worker(request, parts[1], "/".join(parts[2:]))
        raise ClientError(404, "no such call", "not_found")

    async def _control(self, request: BaseRequest, key: tuple[str, str]) -> Any:
        control = self._router.control
        if control is None:
            raise ClientError(
                409, "the configuration has no `control`: there is no control loop", "no_control"
            )
        if key == ("GET", "requests"):
            return {
                "header": control.header().as_json(),
                "requests": requests_json(control.requests),
            }
        if key == ("PUT", "mode"):
            order: ModeOrder = await self._body(request, ModeOrder)
            await control.set_mode(order.mode, order.reason)
        elif key == ("POST", "reload"):
            wanted: ReloadOrder = await self._body(request, ReloadOrder)
            result = await control.reload(wanted.policy, wanted.reason)
            if result.error is not None:
                raise ClientError(400, str(result), "reload_failed")
        elif key != ("GET", "control"):
            raise ClientError(404, "no such call", "not_found")
        return control.as_json()

    async def _body(self, request: BaseRequest, model: type[Any]) -> Any:
        raw = parse_json(await request.read() or b"{}")
        try:
            return validate(model, raw, "request")
        except PrfaasError as error:
            raise ClientError(400, str(error), "invalid_body") from None

    async def _worker(self, request: BaseRequest, name: str, what: str) -> Any:
        worker = self._f.fleet.workers.get(name)
        if worker is None:
            raise ClientError(
                404, f"no worker {name!r}; known: {', '.join(self._f.fleet.workers)}", "not_found"
            )
        if request.method == "DELETE" and not what:
            self._f.fleet.remove(worker)
            self._router.mover.forget(worker)
            return {"removed": name, "in_flight": worker.in_flight}
        if request.method == "POST" and what in {"drain", "undrain"}:
            worker.draining = what == "drain"
            self._f.fleet.freed(worker)
            return worker.as_json(time.monotonic())
        if request.method == "POST" and what == "role":
            order = await self._body(request, RoleOrder)
            return await self._router.mover.change_role(worker, order.role, order.drain_s)
        if request.method == "POST" and what == "cache_events":
            return self._cache_events(worker, await self._body(request, CacheEvents))
        raise ClientError(404, "no such call", "not_found")

    # ------------------------------------------------------------------ decisions

    def _decision(self) -> dict[str, Any]:
        holder = self._f.holder
        last = holder.history[-1].as_json()
        return {**last, "overridden": holder.override is not None}

    def _set(self, order: DecisionOrder, override: bool) -> dict[str, Any]:
        holder, decision = self._f.holder, order.decision()
        if order.version is not None and order.version != holder.version:
            raise ClientError(
                409, f"version is {holder.version}, the order is for {order.version}", "version_conflict"
            )
        if order.dry_run:
            return {**self._decision(), "dry_run": True}
        if override:
            holder.set_override(decision, order.reason)
        else:
            holder.set(decision, "admin", order.reason)
        return self._decision()

    # ------------------------------------------------------------------ workers

    def _add(self, spec: WorkerSpec) -> dict[str, Any]:
        try:
            self._f.resolved.check_worker(spec, "request")
            worker = self._f.fleet.add(spec, "admin")
        except (PrfaasError, ValueError) as error:
            raise ClientError(400, str(error), "invalid_worker") from None
        self._router.health.watch(worker)
        return worker.as_json(time.monotonic())

    def _cache_events(self, worker: Worker, batch: CacheEvents) -> dict[str, Any]:
        index = self._f.index
        if index is None:
            raise ClientError(409, "the prefix index is off", "no_index")
        events = self._events.setdefault(worker.name, EngineEvents(index, self._f.chooser.cache_key(worker)))
        lost = 0
        for event in batch.events:
            if event.type == "BlockStored":
                lost += not events.stored(
                    event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size
                )
            elif event.type == "BlockRemoved":
                events.removed(event.block_hashes)
            else:
                events.cleared()
        return {"events": len(batch.events), "lost": lost}

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Everything an operator may want to know."""
        f, now_s = self._f, time.monotonic()
        return {
            "backend": f.config.backend,
            "draining": self._router.draining,
            "ready_missing": self._router.health.missing(),
            "decision": self._decision(),
            "open_requests": f.open_requests,
            "handles_open": f.handles_open,
            "retry_budget": round(f.budget.left, 3),
            "pools": [
                {
                    "cluster": p.cluster,
                    "role": p.role,
                    "waiting": p.waiting,
                    "usable": [w.name for w in p.usable(now_s)],
                    **({"path": _path(p.path_state(now_s))} if p.role == "prefill" else {}),
                }
                for p in f.fleet.pools()
            ],
            "workers": [w.as_json(now_s) for w in f.fleet],
            "links": [
                {
                    "cluster": name,
                    "nominal_bps": link.nominal_bps,
                    "observed_bps": link.observed_bps(now_s),
                    "backlog_bits": link.backlog_bits(now_s),
                    "open_flows": link.open_flows,
                    "delivered_bits": link.delivered_bits,
                }
                for name, link in f.paths.links.items()
            ],
            "pairs_apart": f.fleet.pairs.as_json(now_s),
            "moves": self._router.mover.as_json(),
        }


def _path(state: Any) -> dict[str, Any]:
    return {
        "queued_work_s": round(state.queued_work_s, 6),
        "idle": state.idle_instances,
        "active": state.active_instances,
        "residual_s": finite(state.residual_s),
    }
