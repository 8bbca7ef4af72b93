"""Probes, load polls and canaries of workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import orjson
from aiohttp import ClientTimeout
from multidict import CIMultiDict

from prfaas_serving.backends.engines import HEALTH_PATH, LOAD_PATH, Unreadable, read_health, read_load
from prfaas_serving.choice import Route
from prfaas_serving.config import RoleName
from prfaas_serving.exchange import Exchange
from prfaas_serving.fleet import Load, Worker
from prfaas_serving.forward import Forwarder
from prfaas_serving.requests import COMPLETIONS, ClientError, Job

log = logging.getLogger("prfaas_serving.health")

_EXTERNAL = "vllm:prompt_tokens_by_source_total{external_kv_transfer}"
_START = "process_start_time_seconds"
#: Tokens that a decode worker must have been told to fetch before "nothing moved" is believed.
_ENOUGH_TOKENS = 1_000
_CANARY_PROMPT = "ready?"
_CANARY_EVERY_S = 1.0


class HealthChecker:
    """One watcher per worker, and one that sends canaries until every role has generated."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._f = forwarder
        self._watchers: dict[Worker, list[asyncio.Task[None]]] = {}
        self._canary: asyncio.Task[None] | None = None
        self._passed: set[str] = set()
        self._closed = False
        self._alarmed: set[str] = set()
        self.coming_up: Callable[[Worker], Awaitable[None]] | None = None
        """Called before a worker that was not up takes requests."""

    def start(self) -> None:
        """Watch the workers that are there and send canaries."""
        for worker in self._f.fleet:
            self.watch(worker)
        if self._f.config.health.canary:
            self._canary = asyncio.create_task(self._canaries())

    def watch(self, worker: Worker) -> None:
        """Watch a worker until it is removed."""
        if worker in self._watchers or self._closed:
            return
        health = self._f.config.health
        tasks = [asyncio.create_task(self._repeat(worker, self._probe, health.probe_s))]
        if LOAD_PATH[worker.engine] is not None:
            tasks.append(asyncio.create_task(self._repeat(worker, self._poll, health.load_poll_s)))
        self._watchers[worker] = tasks

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        tasks = [t for watchers in self._watchers.values() for t in watchers]
        if self._canary is not None:
            tasks.append(self._canary)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._watchers.clear()

    async def _repeat(self, worker: Worker, act: Callable[[Worker], Awaitable[None]], every_s: float) -> None:
        while not worker.removed:
            began_s = time.monotonic()
            try:
                await act(worker)
            except Exception:  # a watcher that dies would leave its worker in its last state for ever
                log.exception("watching worker %s", worker.name)
            # sooner while it is not up, so that it comes (back) quickly
            pause_s = every_s if worker.state == "up" else min(every_s, 0.5)
            await asyncio.sleep(max(pause_s - (time.monotonic() - began_s), 0.01))
        self._watchers.pop(worker, None)

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """(status, body); (0, b"") if there was no answer."""
        timeout = ClientTimeout(total=self._f.config.health.probe_timeout_s)
        try:
            async with self._f.upstream.session.get(
                worker.url(path), timeout=timeout, headers=worker.auth
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return 0, b""

    async def _probe(self, worker: Worker) -> None:
        status, body = await self._get(worker, HEALTH_PATH[worker.engine])
        now_s = time.monotonic()
        wrong = (
            read_health(worker.engine, body, worker.spec.instance_id)
            if status == 200
            else str(status or "nothing")
        )
        if wrong is None:
            worker.failed_probes = 0
            if worker.state != "up":
                log.info("worker %s is up", worker.name)
                await self._read_models(worker)
                if self.coming_up is not None:
                    await self.coming_up(worker)
                worker.came_up(now_s)
                self._f.fleet.freed(worker)
        elif status in (429,):
            worker.refused(now_s, None)
        else:
            worker.failed_probes += 1
            if worker.state == "up" and worker.failed_probes >= self._f.config.health.failures:
                worker.state = "down"
                log.warning("worker %s is down: health check answered %s", worker.name, wrong)

    async def _read_models(self, worker: Worker) -> None:
        """Learn the names and the length limit that a worker serves."""
        status, body = await self._get(worker, "/v1/models")
        if status != 200:
            return
        try:
            page = orjson.loads(body)
        except orjson.JSONDecodeError:
            return
        for entry in page.get("data") or () if isinstance(page, dict) else ():
            if not isinstance(entry, dict):
                continue
            name, limit = entry.get("id"), entry.get("max_model_len")
            if isinstance(name, str) and name not in self._f.models:
                self._f.models.append(name)
            if type(limit) is int:
                worker.max_model_len = limit

    async def _poll(self, worker: Worker) -> None:
        path = LOAD_PATH[worker.engine]
        if path is None or worker.state == "down":
            return
        own = worker.in_flight
        status, body = await self._get(worker, path)
        if status != 200:
            return
        try:
            running, waiting, use, fields = read_load(worker.engine, body)
        except Unreadable:
            if worker.name not in self._alarmed:
                self._alarmed.add(worker.name)
                log.warning("worker %s: nothing known in %s; its load is not read", worker.name, path)
            return
        before = worker.load.fields
        if before.get(_START) is not None and fields.get(_START, before[_START]) != before[_START]:
            self._restarted(worker)
        worker.load = Load(
            running, waiting, use, time.monotonic(), max(own, worker.in_flight), worker.told_bits, fields
        )
        self._moved(worker, fields)

    def _restarted(self, worker: Worker) -> None:
        """A new process at the old address: an empty cache, new transfer peers, a ramp."""
        log.info("worker %s has started anew", worker.name)
        worker.ramp_from_s = time.monotonic()
        worker.kv_asked_tokens, worker.kv_moved_before = 0, 0.0
        self._f.fleet.pairs.forget(worker.name)
        if self._f.index is not None:
            self._f.index.forget(self._f.chooser.cache_key(worker))

    def _moved(self, worker: Worker, fields: dict[str, float]) -> None:
        """Whether KV really moves to a decode worker: all green and nothing fetched is a fault of the set-up."""
        counted = fields.get(_EXTERNAL)
        if worker.kv_moved_before is None:
            # the engine may have served others before
            worker.kv_asked_tokens, worker.kv_moved_before = 0, counted or 0.0
        if counted is None or worker.kv_asked_tokens < _ENOUGH_TOKENS:
            return
        moved = counted - worker.kv_moved_before
        worker.kv_moved_share = moved / worker.kv_asked_tokens
        if moved == 0 and worker.name not in self._alarmed:
            self._alarmed.add(worker.name)
            log.error(
                "worker %s was told to fetch %s tokens of KV and fetched none",
                worker.name,
                worker.kv_asked_tokens,
            )

    # ------------------------------------------------------------------ readiness

    def roles(self) -> list[str]:
        """Roles that must have generated once before the router is ready."""
        fleet = self._f.fleet
        found = ["decode"]
        found += ["local prefill"] if fleet.local_prefill.workers else []
        return found + [
            f"remote prefill {name}" for name, pool in fleet.remote_prefill.items() if pool.workers
        ]

    def missing(self) -> list[str]:
        """Roles without a usable worker, or that have not generated yet."""
        now_s, fleet = time.monotonic(), self._f.fleet
        found = []
        for role in self.roles():
            pool = (
                fleet.decode
                if role == "decode"
                else fleet.local_prefill
                if role == "local prefill"
                else fleet.remote_prefill[role.removeprefix("remote prefill ")]
            )
            canary = self._f.config.health.canary
            if not pool.any_usable(now_s) or (
                canary and role not in self._passed and not any(w.probed for w in pool.workers)
            ):
                found.append(role)
        return found

    async def _canaries(self) -> None:
        """Generate once per path, by the way that requests go."""
        while True:
            for role in [r for r in self.missing() if r not in self._passed]:
                route = self._route(role)
                if route is not None and await self._generate(route) is None:
                    self._passed.add(role)
            await asyncio.sleep(_CANARY_EVERY_S if self.missing() else 10 * _CANARY_EVERY_S)

    def _route(self, role: str) -> Route | None:
        fleet, now_s = self._f.fleet, time.monotonic()
        if not fleet.decode.any_usable(now_s):
            return None
        if role == "decode":
            if self._f.backend.decode_alone or any(w.role == "both" for w in fleet.decode.workers):
                return Route("alone", fleet.pd, "canary")
            return None  # the other roles' canaries generate there
        if role == "local prefill":
            return Route("local", fleet.pd, "canary") if fleet.local_prefill.any_usable(now_s) else None
        name = role.removeprefix("remote prefill ")
        return Route("remote", name, "canary") if fleet.remote_prefill[name].any_usable(now_s) else None

    async def generate_on(self, worker: Worker, role: RoleName) -> str | None:
        """One real generation through a worker of the PD cluster in a role that it need not have yet.

        Its partner is a worker in service. Nothing else about the worker matters: it may be held.

        Returns:
            None if it went well, else what was wrong.
        """
        fleet, now_s = self._f.fleet, time.monotonic()
        if role == "prefill":
            if not fleet.decode.any_usable(now_s):
                return "no decode worker is usable"
            return await self._generate(Route("local", fleet.pd, "canary"), {"prefill": worker})
        remote = [name for name, pool in fleet.remote_prefill.items() if pool.any_usable(now_s)]
        if fleet.local_prefill.any_usable(now_s) and role == "decode":
            route = Route("local", fleet.pd, "canary")
        elif remote and role == "decode":
            route = Route("remote", remote[0], "canary")
        elif self._f.backend.decode_alone or role == "both":
            route = Route("alone", fleet.pd, "canary")
        else:
            return "no prefill worker is usable"
        return await self._generate(route, {"decode": worker})

    async def _generate(self, route: Route, pinned: Mapping[str, Worker] | None = None) -> str | None:
        """One token by a route; None if it came that way, else what was wrong."""
        if not self._f.models:
            for worker in [w for w in self._f.fleet if w.state == "up"]:
                await self._read_models(worker)
        body = {
            "model": self._f.models[0] if self._f.models else "",
            "prompt": _CANARY_PROMPT,
            "max_tokens": 1,
        }
        job = Job(COMPLETIONS, "POST", "", orjson.dumps(body), body, CIMultiDict(), "canary")
        exchange = Exchange(self._f, job, route, pinned)
        try:
            answer = await exchange.open()
            await exchange.pass_on(answer, _Nowhere())
        except ClientError as error:
            log.info("canary over %s: %s", route.cluster, error.message)
            return error.message
        finally:
            exchange.close()
        if exchange.route.kind != route.kind:
            return f"it went {exchange.route.kind} ({exchange.route.reason}), not {route.kind}"
        return None


class _Nowhere:
    """A canary's answer is not read."""

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Nothing."""

    async def write(self, data: bytes) -> None:
        """Nothing."""
