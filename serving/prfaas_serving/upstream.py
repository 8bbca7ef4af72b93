"""Connections to workers: one session, one silent reconnect, verdicts about what came back."""

from __future__ import annotations

import asyncio
import ssl
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp
import orjson
from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector, TraceConfig
from multidict import CIMultiDict

from prfaas_env.base import PrfaasError
from prfaas_serving.backends.base import Leg
from prfaas_serving.config import RouterConfig
from prfaas_serving.fleet import Worker
from prfaas_serving.metrics import Metrics
from prfaas_serving.requests import Job

LegName = Literal["prefill", "decode"]
FailureKind = Literal[
    "connect", "timeout", "status", "busy", "client", "aborted", "broken", "stream_error", "unreadable"
]
#: Kinds that say that a worker is ill.
ILL = frozenset({"connect", "timeout", "status", "broken", "unreadable"})
#: Most of an error body that is read.
_ERROR_BYTES = 64 * 1024

_NO_TIMEOUT = ClientTimeout(total=None, connect=None, sock_read=None, sock_connect=None)
_SKIP = frozenset({"Accept-Encoding", "Accept", "User-Agent", "Content-Type"})


class LegFailure(Exception):
    """One leg of a request failed before anything of it reached the client."""

    def __init__(
        self,
        leg: LegName,
        kind: FailureKind,
        *,
        status: int | None = None,
        body: bytes = b"",
        content_type: str | None = None,
        retry_after_s: float | None = None,
        transfer: bool = False,
        unread: bool = False,
        at: Worker | None = None,
    ) -> None:
        super().__init__(leg, kind, status)
        self.leg = leg
        self.kind = kind
        self.status = status
        self.body = body
        self.content_type = content_type
        self.retry_after_s = retry_after_s
        self.transfer = transfer
        """Whether the transfer between the legs is what took too long."""
        self.unread = unread
        """The connection was dropped before the worker can have read the request."""
        self.at = at
        """The worker at fault, where it is not the one that the leg was sent to."""

    def __str__(self) -> str:
        return f"{self.leg} leg: {self.kind}{'' if self.status is None else f' {self.status}'}"

    @property
    def final(self) -> bool:
        """Whether another worker would say the same: the client's own mistake."""
        return self.kind == "client"


def _ssl_context(config: RouterConfig) -> ssl.SSLContext | bool:
    upstream = config.upstream
    if upstream.ca_file is None and upstream.client_cert_file is None:
        return True
    try:
        context = ssl.create_default_context(cafile=upstream.ca_file)
        if upstream.client_cert_file is not None:
            context.load_cert_chain(upstream.client_cert_file, upstream.client_key_file)
    except (OSError, ssl.SSLError) as error:
        raise PrfaasError(f"upstream: ca_file or client certificate cannot be read: {error}") from None
    return context


async def _reused(session: ClientSession, context: SimpleNamespace, parameters: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


class _Trace:
    """Whether a request went out on a connection that had been used before."""

    __slots__ = ("reused",)

    def __init__(self) -> None:
        self.reused = False


class Upstream:
    """The client session of a router."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._ssl = _ssl_context(config)
        trace = TraceConfig()
        trace.on_connection_reuseconn.append(_reused)
        trace.freeze()
        self._timeout = ClientTimeout(total=None, sock_connect=config.upstream.connect_s)
        self.session = ClientSession(
            connector=TCPConnector(
                limit=0, keepalive_timeout=config.upstream.keepalive_s, ssl=self._ssl, ttl_dns_cache=10
            ),
            timeout=self._timeout,
            trace_configs=[trace],
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
            skip_auto_headers=_SKIP,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self.session.close()

    def headers(self, job: Job, leg: Leg, worker: Worker, attempt_id: str) -> CIMultiDict[str]:
        """Headers of one leg: the client's end-to-end ones, the id of the attempt, what the backend adds."""
        headers = job.headers.copy()
        if job.raw or job.method == "POST":
            headers["Content-Type"] = job.headers.get("Content-Type", "application/json")
        headers["X-Request-Id"] = attempt_id
        for name, value in leg.headers.items():
            headers[name] = value
        headers.update(worker.auth)
        return headers

    async def send(
        self, worker: Worker, job: Job, leg: Leg, attempt_id: str, name: LegName, *, resend: bool = True
    ) -> ClientResponse:
        """Send one leg and wait for the head of its answer.

        A connection that had been idle and was closed under us is replaced once, silently.

        Raises:
            LegFailure: no answer. Its `unread` says that the worker cannot have read the request.
        """
        headers = self.headers(job, leg, worker, attempt_id)
        for again in (False, True):
            trace = _Trace()
            try:
                return await self.session.request(
                    job.method,
                    worker.url(leg.path),
                    data=leg.body,
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=trace,
                )
            except (aiohttp.ServerDisconnectedError, ConnectionError, aiohttp.ClientOSError) as error:
                refused = isinstance(error, aiohttp.ClientConnectorError)
                if trace.reused and not again and not refused:
                    if not resend:
                        raise LegFailure(name, "connect", unread=True) from None
                    self._metrics.reconnects.inc()
                    continue
                raise LegFailure(name, "connect" if refused else "broken") from None
            except (aiohttp.ServerTimeoutError, TimeoutError):
                raise LegFailure(name, "connect") from None
            except aiohttp.ClientError:
                raise LegFailure(name, "unreadable") from None
        raise AssertionError("not reached")

    async def read(self, response: ClientResponse, name: LegName) -> bytes:
        """The whole body of an answer.

        Raises:
            LegFailure: it broke off.
        """
        try:
            return await response.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            raise LegFailure(name, "broken") from None

    async def refuse(self, response: ClientResponse, name: LegName) -> LegFailure:
        """The failure that an answer with status 400 or above is."""
        status = response.status
        try:
            body = await response.content.read(_ERROR_BYTES)
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            body = b""
        response.release() if response.content.at_eof() else response.close()
        return failure_of(
            name, status, body, response.headers.get("Content-Type"), response.headers.get("Retry-After")
        )

    async def fetch_json(self, worker: Worker, url: str) -> Any:
        """JSON from a URL of a worker; None if it cannot be had."""
        try:
            async with self.session.get(
                url, timeout=ClientTimeout(total=self._config.upstream.connect_s)
            ) as answer:
                return orjson.loads(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, ConnectionError, TimeoutError, orjson.JSONDecodeError):
            return None


def failure_of(
    name: LegName, status: int, body: bytes, content_type: str | None, retry_after: str | None
) -> LegFailure:
    """What a status of 400 or above means."""
    kind: FailureKind = "status" if status >= 500 else "client"
    if status in (429, 503, 529):
        kind = "busy"
    elif status in (408, 409, 425):
        kind = "aborted"  # passing states: another try may do
    retry_after_s = None
    if retry_after is not None and retry_after.strip().isdigit():
        retry_after_s = float(retry_after)
    return LegFailure(
        name, kind, status=status, body=body, content_type=content_type, retry_after_s=retry_after_s
    )


async def cancelled(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait for its end, whatever that is."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # read, so that nobody complains
