"""The HTTP side of a worker: vLLM's protocol with KV hand-over, so that the router drives it as it drives vLLM.

| call | what it does |
| --- | --- |
| POST /v1/completions, /v1/chat/completions | a whole request, a prefill leg or a decode leg, by `kv_transfer_params` |
| POST /tokenize, GET /v1/models | as vLLM's |
| GET /health, /metrics, /query | as vLLM's (`/query` is the bootstrap call of its MooncakeConnector) |
| GET /role, POST /role | the role in force; change it |
| GET /transfers | the last transfers with bytes and times |

A prefill leg runs all tokens of the prompt but the last, from which the decode worker goes on: recurrent state cannot
be taken back. In the words of NIXL the answer names the cache, and with `answers: started` comes as the prefill starts,
so that parts cross while later ones are computed; in the words of Mooncake both legs are sent at once and the prefill
leg is answered when its prefill is finished. A prefill leg generates nothing: its token would be thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from yarl import URL

from prfaas_env.base import PrfaasError
from prfaas_serving import sse
from prfaas_serving.requests import (
    CHAT,
    COMPLETIONS,
    KV_BYTES_HEADER,
    ClientError,
    parse_json,
    request_id,
)
from prfaas_serving.workers.metrics import WorkerMetrics
from prfaas_serving.workers.model import Cache, Model, ModelThread
from prfaas_serving.workers.parts import digest_of
from prfaas_serving.workers.requests import Asked, Text, Words, parse, prompt_ids, refusal
from prfaas_serving.workers.settings import Role, WorkerSettings
from prfaas_serving.workers.transfers import (
    Fetcher,
    Order,
    Staged,
    Store,
    Transfer,
    TransferFailed,
    Transfers,
)

log = logging.getLogger("prfaas_serving.workers")

_OPEN_PATHS = frozenset({"/health", "/metrics", "/query"})
_JSON = "application/json"
_MAX_BODY_BYTES = 64 * 2**20
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


class ModelWorker:
    """One worker. `start` it inside a running event loop.

    Args:
        model: what it serves.
        settings: ports, role, limits.
    """

    def __init__(self, model: Model, settings: WorkerSettings) -> None:
        self.model = model
        self.settings = settings
        self.role: Role = settings.role
        self.engine_id = str(uuid.uuid4())
        self.port = 0
        self.metrics = WorkerMetrics()
        self.transfers = Transfers()
        self.store = Store(
            self.engine_id,
            model.fingerprint,
            settings.lease_s,
            self.transfers.add,
            self.metrics.sent,
            self.metrics.expired.inc,
        )
        self._fetcher = Fetcher(model.law, settings.connect_s, settings.idle_s)
        self._thread = ModelThread(model, settings.chunk_tokens)
        self._next_role: Role | None = None
        self._legs: dict[Role, int] = {"prefill": 0, "decode": 0}
        self._decoding = 0
        self._decode_waiting = 0
        self._slots = asyncio.Semaphore(settings.max_sequences)
        self._decode_bytes = 0
        self._pulls = 0
        self._number = 0
        self._began = int(time.time())
        self._computing: dict[Staged, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the ports.

        Raises:
            PrfaasError: one is taken.
        """
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        routes: dict[tuple[str, str], Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/query"): self._query,
            ("GET", "/v1/models"): self._models,
            ("GET", "/transfers"): self._transfers,
            ("GET", "/role"): self._get_role,
            ("POST", "/role"): self._set_role,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", COMPLETIONS): self._generate,
            ("POST", CHAT): self._generate,
        }
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        s = self.settings
        try:
            await self.store.start(s.host, s.kv_port)
            await web.TCPSite(self._runner, s.host, s.port, backlog=1024).start()
        except OSError as error:
            await self.close()
            raise PrfaasError(
                f"{s.host}: ports {s.port} and {s.kv_port}: {error.strerror or error}"
            ) from None
        self.port = self._runner.addresses[0][1]
        self.metrics.role.labels(self.role).set(1)

    async def close(self) -> None:
        """Close everything; what is under way is broken off."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for task in self._computing.values():
            task.cancel()
        if self._computing:
            await asyncio.wait(self._computing.values())
        await self.store.close()
        await self._fetcher.close()
        if self._session is not None:
            await self._session.close()
        self._thread.close()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.settings.host}:{self.port}"

    @property
    def _announced_port(self) -> int:
        return self.settings.kv_announced_port or self.store.port

    # ------------------------------------------------------------------ every request

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            self._authorize(request)
            return await handler(request)
        except ClientError as error:
            failure = error
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client has gone
        except web.HTTPException as error:
            failure = ClientError(error.status, error.reason, "http")
        except Exception:
            log.exception("a request failed")
            failure = ClientError(500, "the model failed", "model_failed")
        retry = {} if failure.retry_after_s is None else {"Retry-After": f"{failure.retry_after_s:.0f}"}
        return web.Response(status=failure.status, body=failure.body(), content_type=_JSON, headers=retry)

    def _authorize(self, request: web.Request) -> None:
        key = self.settings.api_key
        if key is None or request.path in _OPEN_PATHS:
            return
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ClientError(401, "a valid API key is needed", "unauthorized")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        return parse_json(await request.read())

    # ------------------------------------------------------------------ pages

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        m = self.metrics
        m.running.set(self._thread.running + self._decoding)
        m.waiting.set(self._thread.waiting + self._decode_waiting + self._pulls)
        m.by_reason.labels("deferred").set(self._pulls)
        m.by_reason.labels("capacity").set(self._thread.waiting + self._decode_waiting)
        m.kv_use.set(self._used_bytes / self.settings.kv_capacity_bytes)
        m.staged.set(len(self.store.staged))
        m.staged_bytes.set(self.store.total_bytes)
        return web.Response(body=m.page(), content_type="text/plain")

    async def _query(self, request: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": self.engine_id, "kv_port": self._announced_port}})

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self.model.name, "object": "model", "max_model_len": self.model.max_model_len}
        return web.json_response({"object": "list", "data": [entry]})

    async def _transfers(self, request: web.Request) -> web.Response:
        return web.json_response({"transfers": self.transfers.as_json()})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        ids = prompt_ids(self.model, body, "messages" in body)
        return web.json_response(
            {"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids}
        )

    # ------------------------------------------------------------------ role

    async def _get_role(self, request: web.Request) -> web.Response:
        return web.json_response(self._role_state())

    def _role_state(self) -> dict[str, Any]:
        return {"role": self.role, "prefill_legs": self._open("prefill"), "decode_legs": self._open("decode")}

    def _open(self, role: Role) -> int:
        """Requests of a role that are under way; a cache that waits to be fetched is one."""
        return self._legs[role] + (len(self.store.staged) if role == "prefill" else 0)

    def _in_the_way(self, role: Role) -> int:
        """Requests under way that this role would not serve."""
        return 0 if role == "both" else self._open("decode" if role == "prefill" else "prefill")

    async def _set_role(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        role, drain_s = body.get("role"), body.get("drain_s", 0)
        unknown = body.keys() - {"role", "drain_s"}
        if role not in ROLES or unknown:
            found = f"field {min(unknown)!r}" if unknown else repr(role)
            raise refusal(f"role must be one of {', '.join(ROLES)}, drain_s seconds (found {found:.60})")
        if isinstance(drain_s, bool) or not isinstance(drain_s, int | float) or not 0 <= drain_s <= 3600:
            raise refusal(f"drain_s must be within 0..3600 (found {drain_s!r:.40})")
        if self._next_role is not None:
            raise ClientError(409, f"a change to {self._next_role} is under way", "role_change")
        self._next_role = role
        try:
            await self._drained(role, time.monotonic() + drain_s)
            if self.role != role:
                self.metrics.role.labels(self.role).set(0)
                self.metrics.role.labels(role).set(1)
                self.metrics.role_changes.inc()
                self.role = role
        finally:
            self._next_role = None
        return web.json_response(self._role_state())

    async def _drained(self, role: Role, end_s: float) -> None:
        while self._in_the_way(role):
            if time.monotonic() >= end_s:
                raise ClientError(
                    409,
                    f"{self._in_the_way(role)} requests of role {'decode' if role == 'prefill' else 'prefill'} are "
                    f"under way; still {self.role}",
                    "role_busy",
                )
            await asyncio.sleep(0.01)

    def _serves(self, role: Role) -> None:
        """Refuse a request that the role in force, or the one that is being taken, does not serve.

        Raises:
            ClientError: 503, so that a router tries another worker.
        """
        for mine in (self.role, self._next_role):
            if mine not in (None, "both", role):
                raise ClientError(
                    503,
                    f"this worker is of role {mine}, the request needs {role}",
                    "wrong_role",
                    retry_after_s=1,
                )

    # ------------------------------------------------------------------ requests

    @property
    def _used_bytes(self) -> int:
        return self.store.total_bytes + self._decode_bytes

    def _room(self, n_bytes: int) -> None:
        if self._used_bytes + n_bytes > self.settings.kv_capacity_bytes:
            raise ClientError(503, "no room for another cache now", "kv_full", retry_after_s=1)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        self._number += 1
        asked = parse(self.model, request.path, body, self._number)
        role: Role = "prefill" if asked.prefills else "decode"
        self._serves(role)
        if self._thread.waiting + self._decode_waiting >= self.settings.max_queue:
            raise ClientError(503, "the worker's queue is full", "busy", retry_after_s=1)
        name = request_id(request.headers.get("X-Request-Id"))
        words = Words(self.model.name, f"{'chatcmpl' if asked.chat else 'cmpl'}-{name}", self._began, asked)
        self._legs[role] += 1
        try:
            if asked.prefills:
                return await self._prefill_leg(asked, words)
            return await self._decode_leg(request, asked, words)
        finally:
            self._legs[role] -= 1

    # ------------------------------------------------------------------ prefill legs

    async def _prefill_leg(self, asked: Asked, words: Words) -> web.Response:
        transfer_id = asked.handover.get("transfer_id")
        tokens = asked.held_tokens
        staged = Staged(
            str(transfer_id or f"req-{uuid.uuid4().hex}"),
            tokens,
            digest_of(asked.ids[:-1]),
            self.model.law.total_bytes(tokens),
        )
        if tokens:
            if staged.request_id in self.store.staged:
                raise refusal(f"transfer_id {staged.request_id:.80} is in use", "transfer_id")
            self._room(staged.total_bytes)
            self.store.stage(staged)
            task = asyncio.create_task(self._compute(staged, asked.ids[:-1]))
            self._computing[staged] = task
            task.add_done_callback(lambda _: self._computing.pop(staged, None))
            await self._until_answered(staged, task, transfer_id is not None)
        handover = None if transfer_id is not None else self._handle(staged)
        self.metrics.success.labels("length").inc()
        return web.Response(body=orjson.dumps(words.whole("", [], "length", handover)), content_type=_JSON)

    async def _until_answered(self, staged: Staged, task: asyncio.Task[None], finished: bool) -> None:
        """Wait until the leg can be answered; one whose client leaves before that is given up."""
        begun = asyncio.ensure_future(staged.begun.wait())
        early = not finished and self.settings.answers == "started"
        try:
            await asyncio.wait({task, begun} if early else {task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            begun.cancel()
        if staged.failed is not None:
            raise ClientError(500, staged.failed, "model_failed")

    async def _compute(self, staged: Staged, ids: tuple[int, ...]) -> None:
        """Prefill; the parts go to `staged` as they come."""
        try:
            await self._thread.prefill(ids, staged.begin, staged.add)
            staged.end()
            self.metrics.prefill_seconds.observe(staged.prefill_s or 0.0)
            self.metrics.prompt_tokens.labels("local_compute").inc(staged.tokens)
        except asyncio.CancelledError:
            self.store.drop(staged)
            staged.fail("the prefill was given up")
            raise
        except Exception:
            log.exception("a prefill failed")
            self.store.drop(staged)
            staged.fail("the model failed")

    def _handle(self, staged: Staged) -> dict[str, Any]:
        """What the decode leg needs, in vLLM's words."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[0] for _ in self.model.law.layers],
            "remote_engine_id": self.engine_id,
            "remote_request_id": staged.request_id,
            "remote_host": self.settings.kv_host or self.settings.host,
            "remote_port": self._announced_port,
            "tp_size": 1,
            "remote_num_tokens": staged.tokens,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    # ------------------------------------------------------------------ decode legs

    async def _decode_leg(self, request: web.Request, asked: Asked, words: Words) -> web.StreamResponse:
        n_bytes = self.model.law.total_bytes(len(asked.ids) + asked.wanted)
        self._room(n_bytes)
        self._decode_bytes += n_bytes
        try:
            cache, headers = await self._prompt(asked)
            self._decode_waiting += 1
            try:
                await self._slots.acquire()
            finally:
                self._decode_waiting -= 1
            self._decoding += 1
            try:
                if asked.stream:
                    return await self._stream(request, asked, words, cache, headers)
                return await self._unary(asked, words, cache, headers)
            finally:
                self._decoding -= 1
                self._slots.release()
        finally:
            self._decode_bytes -= n_bytes

    async def _prompt(self, asked: Asked) -> tuple[Cache, dict[str, str]]:
        """(cache of the prompt but for its last token, headers that say where it came from)."""
        source = self.metrics.prompt_tokens
        headers = {"X-Prfaas-Kv-Source": "local"}
        if asked.fetches and asked.held_tokens:
            order = await self._order(asked)
            transfer = Transfer(order.request_id, "fetched", order.tokens)
            try:
                cache = await self._fetch(order, transfer)
            except TransferFailed as failure:
                if self.settings.on_failure == "fail":
                    raise ClientError(
                        500, f"the KV cache could not be fetched: {failure}", "kv_transfer"
                    ) from None
                log.warning("the KV cache could not be fetched, prefilling here: %s", failure)
            else:
                source.labels("external_kv_transfer").inc(asked.held_tokens)
                source.labels("local_compute").inc(1)
                headers = {
                    "X-Prfaas-Kv-Source": "external",
                    KV_BYTES_HEADER: str(transfer.tensor_bytes),
                    "X-Prfaas-Kv-Seconds": f"{transfer.last_byte_s:.6f}",
                }
                if transfer.prefill_s is not None:
                    headers["X-Prfaas-Prefill-Seconds"] = f"{transfer.prefill_s:.6f}"
                return cache, headers
        source.labels("local_compute").inc(len(asked.ids))
        if not asked.held_tokens:
            return await self._thread.call(self.model.new_cache), headers
        began_s = 0.0

        def begin() -> None:
            nonlocal began_s
            began_s = time.monotonic()

        cache = await self._thread.prefill(asked.ids[:-1], begin)
        took_s = time.monotonic() - began_s
        self.metrics.prefill_seconds.observe(took_s)
        headers["X-Prfaas-Prefill-Seconds"] = f"{took_s:.6f}"
        return cache, headers

    async def _order(self, asked: Asked) -> Order:
        """Where the cache of a decode leg is.

        Raises:
            ClientError: the handle is none, or of another prompt.
        """
        given = asked.handover
        held = given.get("remote_num_tokens")
        if held is not None and held != asked.held_tokens:
            raise refusal(
                f"the handle holds {held} tokens, this prompt needs {asked.held_tokens}: it is of another prompt",
                "handle",
            )
        prompt = digest_of(asked.ids[:-1])
        engine_id = str(given.get("remote_engine_id"))
        common = (asked.held_tokens, prompt, self.model.fingerprint)
        if "transfer_id" in given:
            far_host, far_port = await self._bootstrap(given.get("remote_bootstrap_addr"), engine_id)
            return Order(far_host, far_port, engine_id, str(given["transfer_id"]), *common, wait=True)
        host, port, key = given.get("remote_host"), given.get("remote_port"), given.get("remote_request_id")
        if not isinstance(host, str) or type(port) is not int or not isinstance(key, str):
            raise refusal("the handle lacks remote_host, remote_port or remote_request_id", "handle")
        return Order(host, port, engine_id, key, *common)

    async def _bootstrap(self, address: Any, engine_id: str) -> tuple[str, int]:
        """(host, KV port) behind a bootstrap address."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.settings.connect_s)
            )
        try:
            url = URL(str(address))
            async with self._session.get(url / "query") as answer:
                entry = orjson.loads(await answer.read())["0"]
            host, port, found = url.host, entry["kv_port"], entry["engine_id"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            raise ClientError(500, "the prefill worker's bootstrap call failed", "kv_transfer") from None
        if found != engine_id or host is None:
            raise ClientError(500, "foreign_handle: the prefill worker is another one now", "kv_transfer")
        return host, int(port)

    async def _fetch(self, order: Order, transfer: Transfer) -> Cache:
        self._pulls += 1
        self.transfers.add(transfer)
        try:
            parts = await self._fetcher.fetch(order, transfer)
            self.metrics.fetched(transfer)
        except TransferFailed:
            self.metrics.failed.inc()
            raise
        finally:
            self._pulls -= 1
        try:
            return await self._thread.call(self.model.load, parts)
        except ValueError as error:
            raise TransferFailed(str(error)) from None

    async def _tokens(self, asked: Asked, cache: Cache) -> AsyncGenerator[tuple[int, str | None]]:
        """(token, reason of the end or None) of an answer, one decode step each."""
        token = asked.ids[-1]
        for number in range(asked.wanted):
            began_s = time.monotonic()
            token = await self._thread.call(self.model.next_token, cache, token, asked.sampling, number)
            self.metrics.step_seconds.observe(time.monotonic() - began_s)
            self.metrics.generated.inc()
            ended = token in self.model.eos_ids and not asked.ignore_eos and number + 1 >= asked.least
            finish = "stop" if ended else "length" if number + 1 == asked.wanted else None
            yield token, finish
            if finish is not None:
                self.metrics.success.labels(finish).inc()
                return

    async def _unary(self, asked: Asked, words: Words, cache: Cache, headers: dict[str, str]) -> web.Response:
        text, pieces, finish = Text(self.model), [], None
        async with contextlib.aclosing(self._tokens(asked, cache)) as tokens:
            async for token, finish in tokens:
                pieces.append(text.add(token, finish is not None))
        answer = words.whole("".join(pieces), text.ids, finish or "length", None)
        return web.Response(body=orjson.dumps(answer), content_type=_JSON, headers=headers)

    async def _stream(
        self, request: web.Request, asked: Asked, words: Words, cache: Cache, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(request)
        if asked.chat:
            await response.write(sse.event(words.chunk(None, (), None)))
        text = Text(self.model)
        try:
            async with contextlib.aclosing(self._tokens(asked, cache)) as tokens:
                async for token, finish in tokens:
                    piece = text.add(token, finish is not None)
                    await response.write(sse.event(words.chunk(piece, (token,), finish)))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("a stream failed")
            failure = ClientError(500, "the model failed", "model_failed")
            await response.write(b"data: " + failure.body() + b"\n\n")
            return response
        if asked.include_usage:
            await response.write(sse.event(words.usage_chunk(len(text.ids))))
        await response.write(sse.DONE)
        return response
