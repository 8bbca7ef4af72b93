"""The HTTP side of the router: an explicit table of routes, limits, answers, draining."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest
from multidict import CIMultiDict

from prfaas_env.base import PrfaasError
from prfaas_serving.answers import CutOff, PassedOn
from prfaas_serving.config import Resolved, ServerTls
from prfaas_serving.exchange import Exchange
from prfaas_serving.forward import Forwarder
from prfaas_serving.metrics import Metrics
from prfaas_serving.requests import (
    CHAT,
    TWO_LEG_ROUTES,
    ClientError,
    Job,
    error_body,
    forwarded_headers,
    parse_json,
    request_id,
    strip_fields,
    why_local,
)
from prfaas_serving.ui import STATE_PATH

log = logging.getLogger("prfaas_serving.app")

Handler = Callable[[BaseRequest], Awaitable[web.StreamResponse]]
_JSON = "application/json"


class HttpSink:
    """An answer on its way to a client."""

    def __init__(self, request: BaseRequest, streamed: bool) -> None:
        self._request = request
        self._streamed = streamed
        self.response: web.StreamResponse | None = None

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Send status and headers, unless the whole body comes at once."""
        self._status, self._headers = status, headers
        if self._streamed:
            self.response = web.StreamResponse(status=status, headers=headers)
            await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send a piece."""
        if self.response is None:
            self.response = web.Response(status=self._status, headers=self._headers, body=data)
        else:
            await self.response.write(data)


def _json_response(content: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(content), content_type=_JSON)


def error_response(error: ClientError, client_id: str | None = None) -> web.Response:
    """An error for a client."""
    headers: dict[str, str] = {"Content-Type": _JSON}
    if isinstance(error, PassedOn):
        headers["Content-Type"] = error.content_type
    if client_id is not None:
        headers["X-Request-Id"] = client_id
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(round(error.retry_after_s), 1))
    return web.Response(status=error.status, body=error.body(), headers=headers)


def server_ssl(tls: ServerTls | None, where: str) -> ssl.SSLContext | None:
    """The TLS of a listening port, None without it."""
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.client_ca_file is not None:
            context.load_verify_locations(tls.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise PrfaasError(f"{where}.tls: certificate or key cannot be read: {error}") from None
    return context


class Port:
    """A listening port with a handler of its own."""

    def __init__(self, handler: Handler, *, body_bytes: int, cancel: bool) -> None:
        def make_request(
            message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]
        ) -> BaseRequest:
            return BaseRequest(
                message,
                payload,
                protocol,
                writer,
                task,
                asyncio.get_running_loop(),
                client_max_size=body_bytes,
            )

        self._server = web.Server(
            handler,
            request_factory=make_request,
            handler_cancellation=cancel,
            access_log=None,
            keepalive_timeout=75.0,
            lingering_time=2.0,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=2.0)
        self._sites: list[web.BaseSite] = []
        self.port = 0

    async def start(self, host: str, port: int, context: ssl.SSLContext | None, where: str) -> None:
        """Listen.

        Raises:
            PrfaasError: the address cannot be had.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=context, backlog=1024)
        try:
            await site.start()
        except (OSError, socket.gaierror) as error:
            raise PrfaasError(f"{where}: cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._sites.append(site)
        sockets = site._server.sockets if site._server is not None else ()  # type: ignore[attr-defined]
        self.port = next((s.getsockname()[1] for s in sockets), port)

    async def stop_listening(self) -> None:
        """Take no new connections."""
        for site in self._sites:
            await site.stop()
        self._sites.clear()

    async def close(self) -> None:
        """Close everything."""
        await self._runner.cleanup()


class Router:
    """A router: its ports, its workers, its background work.

    Args:
        resolved: the configuration.
    """

    def __init__(self, resolved: Resolved) -> None:
        # here, for they use this class's parts
        from prfaas_serving.admin import AdminApi
        from prfaas_serving.control import ControlLoop
        from prfaas_serving.discovery import Discoverer
        from prfaas_serving.health import HealthChecker
        from prfaas_serving.moves.making import make_mover
        from prfaas_serving.ui.page import Page

        config = resolved.config
        self.resolved = resolved
        self.config = config
        self.metrics = Metrics()
        self.started_s = time.monotonic()
        self.draining = False
        self._tls = server_ssl(config.listen.tls, "listen")
        self.port = 0
        self.admin_port = 0
        self._public = Port(self._handle, body_bytes=config.limits.body_bytes, cancel=True)
        self._admin: Port | None = None
        self._token = b""
        if config.admin is not None:
            self._admin_tls = server_ssl(config.admin.tls, "admin")
            self._token = config.admin.token().encode()
            self._admin = Port(self._handle_admin, body_bytes=2**20, cancel=False)
        self._make = (AdminApi, Discoverer, HealthChecker, make_mover, ControlLoop, Page)
        self.control: ControlLoop | None = None
        """None when the configuration has no `control`."""
        self._tasks: list[asyncio.Task[None]] = []
        self._table: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics_page,
            ("GET", "/v1/models"): self._models,
        }

    async def start(self) -> None:
        """Open the ports and begin to watch workers.

        Raises:
            PrfaasError: a port or a file cannot be had.
        """
        make_admin, make_discoverer, make_health, make_mover, make_control, make_page = self._make
        self.forwarder = Forwarder(self.resolved, self.metrics)
        self.health = make_health(self.forwarder)
        try:
            self.mover = make_mover(self.forwarder, self.health)
        except PrfaasError:
            await self.forwarder.close(0.0)
            raise
        self.discoverer = make_discoverer(self.forwarder, self.health, self.resolved.where)
        self.admin = make_admin(self)
        self.page = make_page(self)
        listen = self.config.listen
        try:
            if self.config.control is not None:
                self.control = make_control(self.forwarder, self.mover.change_role)
                self.metrics.watch_control(self.control)
            await self._public.start(listen.host, listen.port, self._tls, "listen")
            self.port = self._public.port
            if self._admin is not None and self.config.admin is not None:
                await self._admin.start(
                    self.config.admin.host, self.config.admin.port, self._admin_tls, "admin"
                )
                self.admin_port = self._admin.port
            await self.discoverer.start()
        except PrfaasError:
            await self.close()
            raise
        self.health.start()
        self.mover.start()
        if self.control is not None:
            self.control.start()
        self.page.start()

    async def drain(self, wait_s: float) -> bool:
        """Take nothing new and let open requests end; False if some had to be cut off."""
        self.draining = True
        await self._public.stop_listening()
        end_s = time.monotonic() + wait_s
        while self.forwarder.open_requests > 0 and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        return self.forwarder.open_requests == 0

    async def close(self) -> None:
        """Close everything; open requests are cut off and what they staged is released."""
        self.draining = self.mover.closing = True
        await self._public.close()
        if self._admin is not None:
            await self._admin.close()
        if self.control is not None:
            await self.control.close()
        await self.mover.close()
        await self.page.close()
        await self.discoverer.close()
        await self.health.close()
        await self.forwarder.close(self.config.deadlines.release_s)

    # ------------------------------------------------------------------ public port

    async def _handle(self, request: BaseRequest) -> web.StreamResponse:
        try:
            response = await self._dispatch(request)
        except ClientError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = web.Response(
                status=error.status,
                body=error_body(error.reason, "invalid_request_error", None),
                content_type=_JSON,
            )
        self.metrics.requests.labels(f"{response.status // 100}xx").inc()
        if self.draining:
            response.force_close()
        return response

    async def _dispatch(self, request: BaseRequest) -> web.StreamResponse:
        path = request.path
        handler = self._table.get((request.method, path))
        if handler is not None:
            return await handler(request)
        if (path in TWO_LEG_ROUTES and request.method != "POST") or any(path == p for _, p in self._table):
            raise ClientError(405, f"method {request.method} is not allowed here", "method_not_allowed")
        if not path.startswith("/v1/"):
            raise ClientError(404, "no such route", "not_found")
        return await self._forward(request, path)

    async def _forward(self, request: BaseRequest, path: str) -> web.StreamResponse:
        limits, forwarder = self.config.limits, self.forwarder
        if self.draining:
            raise ClientError(503, "the router is shutting down", "draining", retry_after_s=1.0)
        if sum(len(n) + len(v) for n, v in request.raw_headers) > limits.header_bytes:
            raise ClientError(431, f"headers exceed {limits.header_bytes} bytes", "headers_too_large")
        if forwarder.open_requests >= limits.requests:
            self.metrics.rejected.labels("too_many").inc()
            for listener in forwarder.listeners:
                listener.rejected(time.monotonic(), "saturated")
            raise ClientError(
                429, "too many open requests", "saturated", retry_after_s=self.config.retry.retry_after_s
            )
        client_id = request_id(request.headers.get("X-Request-Id"))
        job: Job | None = None
        try:
            job = await self._job(request, path, client_id)
            return await self._run(request, job)
        except ClientError as error:
            return error_response(error, client_id)

    async def _job(self, request: BaseRequest, path: str, client_id: str) -> Job:
        if request.content.is_eof():
            raw = await request.read()
        else:
            try:
                async with asyncio.timeout(self.config.limits.body_read_s):
                    raw = await request.read()
            except TimeoutError:
                raise ClientError(408, "the body did not come in time", "body_timeout") from None
        job = Job(
            path=path,
            method=request.method,
            query=request.query_string,
            raw=raw,
            body={},
            headers=forwarded_headers(request.headers),
            client_id=client_id,
        )
        if path not in TWO_LEG_ROUTES:
            job.local_reason = "route"
            job.path = request.raw_path
            if "Content-Type" in request.headers:
                job.headers["Content-Type"] = request.headers["Content-Type"]
            return job
        body = parse_json(raw)
        job.stripped = strip_fields(body)
        for name in job.stripped:
            self.metrics.stripped.labels(name).inc()
        if not body:
            raise ClientError(400, "the body is empty", "invalid_body")
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise ClientError(400, f"stream must be true or false, found {stream!r}", "invalid_stream")
        job.body, job.altered = body, bool(job.stripped)
        job.stream = stream is True
        job.local_reason = why_local(body, path == CHAT)
        return job

    async def _run(self, request: BaseRequest, job: Job) -> web.StreamResponse:
        exchange = Exchange(self.forwarder, job)
        gone = "client"
        try:
            answer = await exchange.open()
            sink = HttpSink(request, streamed=answer.body is None)
            await exchange.pass_on(answer, sink)
            response = sink.response
            assert response is not None
            if answer.body is None:
                await response.write_eof()
            gone = ""
            return response
        except (ClientError, AssertionError):
            gone = ""
            raise
        except CutOff:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None
        except (ConnectionError, OSError):
            raise asyncio.CancelledError from None  # the client's connection broke under a write
        finally:
            if gone:
                self.metrics.client_gone.labels(exchange.phase).inc()
            exchange.close()

    async def _health(self, request: BaseRequest) -> web.Response:
        return _json_response({"status": "ok"})

    async def _ready(self, request: BaseRequest) -> web.Response:
        missing = self.health.missing()
        ready = not missing and not self.draining
        if self.draining:
            missing = [*missing, "draining"]
        return _json_response({"ready": ready, "missing": missing}, 200 if ready else 503)

    async def _metrics_page(self, request: BaseRequest) -> web.Response:
        return web.Response(body=self.metrics.page(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _models(self, request: BaseRequest) -> web.StreamResponse:
        return await self._forward(request, "/v1/models")

    # ------------------------------------------------------------------ admin port

    async def _handle_admin(self, request: BaseRequest) -> web.StreamResponse:
        of_page = self.page.open_answer(request)
        if of_page is not None:
            return of_page
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), b"Bearer " + self._token):
            return error_response(ClientError(401, "a valid token is required", "unauthorized"))
        if (request.method, request.path) == ("GET", STATE_PATH):
            return self.page.state_answer()
        try:
            return _json_response(await self.admin.handle(request))
        except ClientError as error:
            return error_response(error)
        except web.HTTPException as error:
            return error_response(ClientError(error.status, error.reason, "invalid_request"))
