"""What all requests of a router share: workers, decision, connections, staged KV, verdicts about workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import aiohttp
import orjson

from prfaas_env.telemetry import meets
from prfaas_serving.backends import HandOver, Leg, make_backend
from prfaas_serving.backends.engines import TOKENIZES
from prfaas_serving.breaker import RetryBudget
from prfaas_serving.cache_index import PrefixIndex
from prfaas_serving.choice import Chooser, Route
from prfaas_serving.config import Resolved
from prfaas_serving.decisions import DecisionHolder
from prfaas_serving.fleet import Attempt, Fleet, Worker
from prfaas_serving.length import LengthCounter
from prfaas_serving.metrics import Metrics
from prfaas_serving.paths import Paths
from prfaas_serving.requests import (
    Job,
)
from prfaas_serving.upstream import ILL, LegFailure, Upstream

log = logging.getLogger("prfaas_serving.forward")


Outcome = Literal["finished", "rejected", "aborted", "failed"]
#: Codes of refusals for want of room or of workers; other errors are failures.
REFUSED_CODES = frozenset({"saturated", "busy", "no_endpoint", "no_prefill", "retry_budget"})


@dataclass(slots=True)
class Legs:
    """When the legs of a request ran, and where: of the last prefill and the last decode. Times are monotonic."""

    attempts: int = 1
    prefill_cluster: str | None = None
    """None = the decode worker prefilled, or nothing was sent yet; so for all `prefill_` fields."""
    prefill_worker: str | None = None
    prefill_sent_s: float | None = None
    prefill_ahead: int | None = None
    """Prefills of this router at the worker when it was sent; 0 = it found the worker idle."""
    prefill_end_s: float | None = None
    """When the answer of the prefill leg was there; None where the decode worker runs it by itself."""
    decode_worker: str | None = None
    decode_sent_s: float | None = None
    kv_bytes: int | None = None
    """Bytes of KV that the decode worker says it fetched, where its answer tells it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a request that a route was chosen for. Times are real seconds."""

    arrival_s: float
    input_tokens: int
    incremental_tokens: dict[str, int]
    """Per cluster, as known at the door."""
    output_tokens: int
    outcome: Outcome
    remote: bool
    """The route chosen at the door."""
    ttft_s: float | None
    tpot_s: float | None
    legs: Legs | None = None


class Listener(Protocol):
    """Told about traffic as it happens; what telemetry is fed from. All times are of the monotonic clock."""

    def arrival(
        self, now_s: float, tokens: int, incremental_tokens: int, cached_tokens: int, route: Route
    ) -> None:
        """A request was routed."""

    def first_token(self, now_s: float, ttft_s: float, route: Route) -> None:
        """Its first token came."""

    def finished(self, now_s: float, output_tokens: int, tpot_s: float) -> None:
        """It ended well."""

    def rejected(self, now_s: float, reason: str) -> None:
        """It was refused or failed before its first token."""

    def ended(self, now_s: float, ended: Ended) -> None:
        """A request that a route was chosen for is over, however it ended."""


@dataclass(eq=False)
class Handle:
    """Staged KV at a prefill worker, waiting to be fetched."""

    prefill: Worker
    handover: HandOver
    settled: bool = False
    """Fetched, or its release has begun."""


class Forwarder:
    """What all requests of a router share.

    Args:
        resolved: the configuration.
        metrics: where events are counted.
    """

    def __init__(self, resolved: Resolved, metrics: Metrics) -> None:
        config = resolved.config
        self.resolved = resolved
        self.config = config
        self.metrics = metrics
        self.backend = make_backend(config.backend)
        self.fleet = Fleet(config, resolved.pd.name, resolved.remote_clusters)
        self.paths = Paths(resolved)
        self.holder = DecisionHolder(resolved.decision())
        self.index = self._make_index() if config.cache.enabled else None
        self.chooser = Chooser(self.fleet, self.paths, self.holder, self.index, config.cache.shared)
        self.upstream = Upstream(config, metrics)
        self.counter = LengthCounter(config.length, self._ask_engine, self._can_ask)
        self.budget = RetryBudget(config.retry.budget, config.retry.reserve)
        self.listeners: list[Listener] = []
        self.open_requests = 0
        self.handles_open = 0
        self.background: set[asyncio.Task[Any]] = set()
        self.models: list[str] = []
        """Names of the served models, as workers list them."""
        for spec in config.workers:
            self.fleet.add(spec, "config")
        metrics.watch(self)

    def _make_index(self) -> PrefixIndex:
        kv, cache = self.paths.kv, self.config.cache
        state_bytes = kv.fixed_bytes + sum(w.bytes_per_token * w.window_tokens for w in kv.windows)
        unit_bytes = max(kv.bytes_per_token * cache.block_tokens, 1)
        return PrefixIndex(cache, self.resolved.needs_state, -(-state_bytes // unit_bytes))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that must end whatever becomes of the request it belongs to."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self.background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background work failed", exc_info=task.exception())

    async def close(self, wait_s: float) -> None:
        """Let background work end, then cancel it and close connections."""
        if self.background:
            await asyncio.wait(set(self.background), timeout=wait_s)
        for task in set(self.background):
            task.cancel()
        if self.background:
            await asyncio.wait(set(self.background), timeout=1.0)
        await self.upstream.close()

    def addresses(self) -> list[str]:
        """What must not reach a client."""
        return [w.spec.host_port for w in self.fleet]

    def _can_ask(self) -> bool:
        return any(w.engine in TOKENIZES and w.state == "up" for w in self.fleet)

    async def _ask_engine(self, body: dict[str, Any]) -> tuple[int, list[int] | None] | None:
        """Ask a worker's /tokenize: (count, ids if it gives them)."""
        now_s = time.monotonic()
        able = [w for w in self.fleet if w.engine in TOKENIZES and w.usable(now_s)]
        if not able:
            return None
        worker = min(able, key=lambda w: w.in_flight)
        asked = {
            k: body[k] for k in ("model", "prompt", "messages", "tools", "chat_template_kwargs") if k in body
        }
        headers = {"Content-Type": "application/json"}
        headers.update(worker.auth)
        try:
            async with self.upstream.session.post(
                worker.url("/tokenize"), data=orjson.dumps(asked), headers=headers
            ) as answer:
                found = orjson.loads(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, ConnectionError, TimeoutError, orjson.JSONDecodeError):
            return None
        if not isinstance(found, dict) or type(found.get("count")) is not int:
            return None
        ids = found.get("tokens")
        return found["count"], ids if isinstance(ids, list) and len(ids) == found["count"] else None

    # ------------------------------------------------------------------ staged KV

    def hold(self, handle: Handle) -> None:
        """Staged KV exists from now on."""
        self.handles_open += 1
        handle.prefill.staged += 1

    def _settle(self, handle: Handle) -> None:
        handle.settled = True
        self.handles_open -= 1
        handle.prefill.staged -= 1

    def fetched(self, handle: Handle) -> None:
        """The decode side has it."""
        if not handle.settled:
            self._settle(handle)

    def release(self, handle: Handle, job: Job, attempt_id: str) -> None:
        """Have staged KV that nobody will decode given back; the second call for a handle does nothing."""
        if handle.settled:
            return
        self._settle(handle)
        leg = self.backend.release_leg(job, handle.handover)
        if leg is not None:
            self.spawn(self._release(leg, job, attempt_id))

    async def _release(self, leg: Leg, job: Job, attempt_id: str) -> None:
        """Send the release to decode workers until one takes it."""
        end_s = time.monotonic() + self.config.deadlines.release_s
        tried: set[Worker] = set()
        outcome = "expired"
        while time.monotonic() < end_s:
            now_s = time.monotonic()
            usable = self.fleet.decode.usable(now_s)
            fresh = [w for w in usable if w not in tried] or usable
            if not fresh:
                await asyncio.sleep(0.1)
                continue
            worker = min(fresh, key=lambda w: w.in_flight)
            tried.add(worker)
            place = worker.begin(now_s)
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + end_s - now_s):
                    response = await self.upstream.send(worker, job, leg, f"{attempt_id}-release", "decode")
                    await response.read()
                if response.status < 500 and response.status != 429:
                    worker.answered()
                    outcome = "released"
                    break
            except TimeoutError:
                pass  # no verdict: it may only be busy, and the last try gets what time is left
            except (LegFailure, aiohttp.ClientError, ConnectionError):
                worker.failed(place, time.monotonic())
            finally:
                worker.breaker.abandoned(place.trial)
                self.fleet.release(place)
            await asyncio.sleep(0.05)
        self.metrics.released.labels(outcome).inc()

    def served(self, ttft_s: float, tpot_s: float) -> None:
        """A decided request was answered whole."""
        slo, scale = self.resolved.scenario.slo, self.config.time_scale
        self.metrics.finished.inc()
        if meets(slo.ttft_s, ttft_s / scale) and meets(slo.tpot_s, tpot_s / scale):
            self.metrics.good.inc()

    # ------------------------------------------------------------------ verdicts

    def blame(self, place: Attempt, failure: LegFailure) -> None:
        """What a failed leg says about its worker."""
        worker, now_s = place.worker, time.monotonic()
        if failure.kind == "busy":
            worker.refused(now_s, failure.retry_after_s)
            self.metrics.refusals.labels(worker.name).inc()
        elif failure.unread:
            worker.breaker.abandoned(place.trial)
        elif failure.kind in ILL:
            worker.failed(place, now_s)
            self.metrics.worker_failures.labels(worker.name, failure.kind).inc()
            log.warning("worker %s: %s", worker.name, failure)
        else:
            worker.answered()
