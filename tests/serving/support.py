"""A router with fake workers in one event loop, and a client that reads answers as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.fake.link import ShapedLink
from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker, digest_of, token_text, tokens_of

TOKEN = "0123456789abcdef-test"
os.environ["PRFAAS_TEST_TOKEN"] = TOKEN

#: Short enough that a failing test ends soon, long enough for a busy machine.
PATIENCE_S = 10.0

FAST_HEALTH = {
    "probe_s": 0.1,
    "load_poll_s": 0.1,
    "ramp_s": 0.0,
    "breaker_open_s": 0.3,
    "probe_timeout_s": 1.0,
}
FAST_DEADLINES = {
    "transfer_floor_s": 1.0,
    "prefill_floor_s": 2.0,
    "queue_s": 2.0,
    "release_s": 3.0,
    "idle_s": 2.0,
}


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a test's coroutine with a limit of time."""

    async def limited() -> Any:
        async with asyncio.timeout(90):
            return await work()

    return asyncio.run(limited())


async def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until something is true."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"never became true: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Reply:
    """An answer as a client sees it."""

    status: int
    headers: Any
    body: bytes
    at_s: list[float] = field(default_factory=list)
    """When each piece came."""
    pieces: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of all events; the end marker as it is."""
        found = []
        for event in self.body.replace(b"\r\n", b"\n").split(b"\n\n"):
            if event.startswith(b"data: "):
                data = event[6:]
                found.append("[DONE]" if data == b"[DONE]" else orjson.loads(data))
        return found

    @property
    def text(self) -> str:
        """All text of a stream or a whole answer."""
        if self.headers["Content-Type"].startswith("text/event-stream"):
            parts = [c for e in self.events if isinstance(e, dict) for c in e.get("choices", [])]
        else:
            parts = self.json["choices"]
        found = ""
        for choice in parts:
            inner = choice.get("delta") or choice.get("message")
            found += choice["text"] if "text" in choice else (inner or {}).get("content") or ""
        return found


def expected_text(body: dict[str, Any], tokens: int) -> str:
    """What a fake worker answers."""
    digest = digest_of(tokens_of(body))
    return "".join(token_text(digest, k) for k in range(tokens))


@dataclass
class Setup:
    """A running router with its workers."""

    router: Router
    workers: dict[str, FakeWorker]
    session: aiohttp.ClientSession
    link: ShapedLink | None = None
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Address of the public port."""
        return f"{self.scheme}://127.0.0.1:{self.router.port}"

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        """Send a request and read all of its answer."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as answer:
            reply = Reply(answer.status, answer.headers, b"")
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for piece in answer.content.iter_any():
                    reply.pieces.append(piece)
                    reply.at_s.append(time.monotonic())
            reply.body = b"".join(reply.pieces)
            return reply

    async def complete(
        self, prompt: Any, tokens: int = 4, path: str = "/v1/completions", **fields: Any
    ) -> Reply:
        """A completion."""
        headers = fields.pop("headers", None)
        body = completion(prompt, tokens, path, **fields)
        return await self.post(path, body, headers)

    async def get(self, path: str) -> Reply:
        """A GET on the public port."""
        async with self.session.get(self.url + path) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def admin(self, method: str, path: str, body: Any = None, token: str | None = TOKEN) -> Reply:
        """A call on the admin port."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{self.router.admin_port}{path}"
        data = None if body is None else orjson.dumps(body)
        async with self.session.request(method, url, data=data, headers=headers) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    def worker(self, name: str) -> Any:
        """The router's view of a worker."""
        return self.router.forwarder.fleet.workers[name]

    def metric(self, name: str, **labels: str) -> float:
        """A value of the router's metrics, 0 if there is none."""
        return self.router.metrics.registry.get_sample_value(f"prfaas_router_{name}", labels) or 0.0

    @property
    def staged(self) -> int:
        """Staged KV caches at all workers."""
        return sum(len(w.staged) for w in self.workers.values())

    async def settled(self) -> None:
        """Wait until nothing is under way and nothing staged is left, then check the router's own counters."""
        f = self.router.forwarder
        await until(lambda: f.open_requests == 0 and not f.background, "the router has nothing under way")
        await until(lambda: self.staged == 0, "no staged KV is left")
        assert f.handles_open == 0
        assert all(w.in_flight == 0 and not w.assigned for w in f.fleet)
        assert all(p.waiting == 0 for p in f.fleet.pools())
        assert all(link.open_flows == 0 for link in f.paths.links.values())
        assert all(abs(link.backlog_bits(time.monotonic())) < 1 for link in f.paths.links.values())


def completion(prompt: Any, tokens: int = 4, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    """Body of a request."""
    asked: dict[str, Any] = {"model": "fake", "max_tokens": tokens, **fields}
    if path.endswith("chat/completions"):
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    return asked


ENGINE = {
    "vllm_nixl": "vllm",
    "vllm_mooncake": "mooncake",
    "sglang": "sglang",
    "llmd_sidecar": "llmd",
    "echo": "echo",
}
#: (name, cluster, role) of the usual workers: two remote prefill, one local prefill, two decode.
USUAL = (
    ("r1", "prfaas0", "prefill"),
    ("r2", "prfaas0", "prefill"),
    ("l1", "pd0", "prefill"),
    ("d1", "pd0", "decode"),
    ("d2", "pd0", "decode"),
)


@contextlib.asynccontextmanager
async def serving(
    backend: str = "vllm_nixl",
    workers: tuple[tuple[str, str, str], ...] = USUAL,
    *,
    spec: dict[str, Any] | None = None,
    per_worker: dict[str, dict[str, Any]] | None = None,
    entry: dict[str, dict[str, Any]] | None = None,
    threshold: float | None = 100.0,
    link_bytes_per_s: float | None = None,
    ready: bool = True,
    **config: Any,
) -> AsyncIterator[Setup]:
    """A router in front of fake workers.

    Args:
        backend: of the router; fakes speak the same.
        workers: (name, cluster, role).
        spec: fields of every `FakeSpec`.
        per_worker: more fields by name.
        entry: more fields of a worker's entry in the configuration.
        threshold: None = whatever `decision` in `config` says.
        link_bytes_per_s: put remote workers behind a shaped link.
        ready: wait until all workers are up.
        config: sections of the configuration.
    """
    fakes: dict[str, FakeWorker] = {}
    link = None if link_bytes_per_s is None else ShapedLink(link_bytes_per_s)
    router: Router | None = None
    async with contextlib.AsyncExitStack() as stack:
        for name, cluster, role in workers:
            fields = {
                "engine": ENGINE[backend],
                "role": role,
                **(spec or {}),
                **(per_worker or {}).get(name, {}),
            }
            fake = FakeWorker(FakeSpec(name=name, **fields))
            await fake.start()
            stack.push_async_callback(fake.close)
            fakes[name] = fake
            if link is not None and cluster != "pd0":
                port = await link.listen("127.0.0.1", fake.kv_port)
                fake.spec = fake.spec.model_copy(update={"kv_via_port": port})
        if link is not None:
            stack.push_async_callback(link.close)
        raw: dict[str, Any] = {
            "backend": backend,
            "listen": {"port": 0},
            "admin": {"port": 0, "token_env": "PRFAAS_TEST_TOKEN"},
            "workers": [
                {
                    "name": name,
                    "url": fakes[name].url,
                    "cluster": cluster,
                    "role": role,
                    "bootstrap_port": _bootstrap(backend, fakes[name]),
                    **(entry or {}).get(name, {}),
                }
                for name, cluster, role in workers
            ],
            **({} if threshold is None else {"decision": {"threshold_tokens": threshold}}),
            "cache": {"enabled": False},
            **config,
            "health": {"canary": False, **FAST_HEALTH, **config.get("health", {})},
            "deadlines": {**FAST_DEADLINES, **config.get("deadlines", {})},
        }
        router = Router(Resolved(RouterConfig.model_validate(raw)))
        await router.start()
        stack.push_async_callback(router.close)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
        )
        stack.push_async_callback(session.close)
        setup = Setup(router, fakes, session, link)
        if ready:
            await until(lambda: all(w.state == "up" for w in router.forwarder.fleet), "all workers are up")
        yield setup


def _bootstrap(backend: str, fake: FakeWorker) -> int:
    if backend == "sglang":
        return fake.spec.kv_via_port or fake.kv_port
    return fake.port


LONG = "long prompt " * 100
"""300 tokens by the fakes' count."""
SHORT = "short one"
