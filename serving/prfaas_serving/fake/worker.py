"""A fake worker: it speaks an engine's protocol faithfully, holds staged KV, takes time from a latency profile.

What it does not have is a model: its text is made of a digest of the prompt and the number of the token, so that a
reader can tell that every token came, once, and from the right prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
import uuid
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest
from multidict import CIMultiDict

from prfaas_env.simulator.formulas import decode_step_s
from prfaas_serving.cache_index import Blocks, PrefixIndex, blocks_of
from prfaas_serving.config import Cache
from prfaas_serving.fake.spec import FakeSpec, Fault, PartSizes
from prfaas_serving.length import Prompt, messages_text

_JSON = "application/json"


class EngineDead(Exception):
    """The engine asserted: nothing works any more."""


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class PullFailed(Exception):
    """A KV cache could not be fetched."""


@dataclass(eq=False)
class Staged:
    """KV held for a decode worker that has not fetched it."""

    key: str
    tokens: int
    parts: list[int]
    expires_at: float
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    missing_part: bool = False


@dataclass(eq=False)
class Sequence_:
    """A request being decoded."""

    wanted: int
    context: int
    made: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Seen:
    """A request as it came, for contract tests."""

    path: str
    headers: CIMultiDict[str]
    body: Any
    leg: str


def tokens_of(body: dict[str, Any]) -> list[int]:
    """Token ids of a prompt: its own, or one per four characters."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if all(type(t) is int for t in prompt):
            return prompt
        prompt = "".join(str(p) for p in prompt)
    extra = 0
    if "messages" in body:
        prompt, messages = messages_text(body)
        extra = 4 * messages
    text = str(prompt or "")
    ids = [hash_of(text[k : k + 4]) for k in range(0, len(text) // 4 * 4, 4)]
    return [*ids, *([0] * extra)] or [0]


def hash_of(text: str) -> int:
    """A small number for a piece of text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest(), "big")


def digest_of(ids: Sequence[int]) -> str:
    """Short name of a prompt, the first part of every token of its answer."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=3).hexdigest()


def token_text(digest: str, k: int) -> str:
    """Text of token k of an answer."""
    return f"{digest}-{k} "


class FakeWorker:
    """One worker. `start` it inside a running event loop.

    Args:
        spec: what it is.
        own_process: whether `/_fake/kill` may end the process.
    """

    KINDS = frozenset(
        {
            "status",
            "hang",
            "drop",
            "break_stream",
            "error_event",
            "role_only",
            "abort_finish",
            "no_params",
            "missing_part",
            "wrong_tokens",
            "slow",
            "unhealthy",
            "no_load",
            "cached",
            "switch_refused",
        }
    )

    def __init__(self, spec: FakeSpec, *, own_process: bool = False) -> None:
        self.spec = spec
        self.role = spec.role
        self.engine_id = str(uuid.uuid4())
        self.faults: list[Fault] = []
        self.seen: deque[Seen] = deque(maxlen=512)
        self.staged: dict[str, Staged] = {}
        self.rooms_used: set[str] = set()
        self.dead = False
        self.port = 0
        self.kv_port = 0
        self.frozen: asyncio.Event = asyncio.Event()
        self.frozen.set()
        self.counters: dict[str, float] = {}
        self.double_pulls = 0
        self.pulls_open = 0
        self.switches = 0
        self.graphs = [1, 2, 4] if spec.role != "prefill" else []
        """SGLang: batch sizes of its decode graphs."""
        self.broken = False
        """SGLang: a switch failed half-way."""
        self._own_process = own_process
        self._sizes = PartSizes(spec.kv, spec.byte_scale)
        self._index = PrefixIndex(
            Cache(block_tokens=spec.block_tokens, capacity_tokens=spec.cache_tokens), spec.needs_state
        )
        self._prefill_turn = asyncio.Lock()
        self._waiting = 0
        self._prefills = 0
        self._decoding: list[Sequence_] = []
        self._decode_queue: deque[tuple[Sequence_, asyncio.Event]] = deque()
        self._loop_task: asyncio.Task[None] | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._kv_server: asyncio.Server | None = None
        self._kv_tasks: set[asyncio.Task[None]] = set()
        self._runner: web.ServerRunner | None = None
        self._client: aiohttp.ClientSession | None = None
        self._began = time.time()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the ports."""
        server = web.Server(
            self._handle, handler_cancellation=True, access_log=None, request_factory=_request
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.spec.host, self.spec.port, backlog=1024)
        await site.start()
        sockets = site._server.sockets if site._server is not None else ()  # type: ignore[attr-defined]
        self.port = next(iter(sockets)).getsockname()[1]
        self._kv_server = await asyncio.start_server(self._serve_kv, self.spec.host, 0)
        self.kv_port = self._kv_server.sockets[0].getsockname()[1]
        self._reaper = asyncio.create_task(self._reap())

    async def close(self) -> None:
        """Close everything at once, as a kill would."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._kv_server is not None:
            self._kv_server.close()
        tasks = [t for t in (self._loop_task, self._reaper, *self._kv_tasks) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._client is not None:
            await self._client.close()
            self._client = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.spec.host}:{self.port}"

    @property
    def staged_bytes(self) -> int:
        """Bytes of all staged KV."""
        return sum(sum(s.parts) for s in self.staged.values())

    @property
    def running(self) -> int:
        """Requests at work."""
        return self._prefills + len(self._decoding)

    def count(self, name: str, by: float = 1.0) -> None:
        """Add to a counter of /metrics."""
        self.counters[name] = self.counters.get(name, 0.0) + by

    def _fault(self, kind: str, leg: str) -> Fault | None:
        for fault in self.faults:
            if fault.kind == kind and fault.hits(leg):
                return fault
        return None

    async def _sleep(self, seconds: float) -> None:
        """So many seconds of the profile."""
        await asyncio.sleep(seconds * self.spec.time_scale)
        await self.frozen.wait()

    async def _reap(self) -> None:
        """Drop staged KV whose lease has ended."""
        while True:
            await asyncio.sleep(min(self.spec.lease_s / 10, 0.5))
            now = time.monotonic()
            for staged in [s for s in self.staged.values() if s.expires_at < now]:
                self._drop_staged(staged)
                self.count("vllm:nixl_num_kv_expired_reqs_total")

    def _drop_staged(self, staged: Staged) -> None:
        self.staged.pop(staged.key, None)
        staged.gone.set()

    # ------------------------------------------------------------------ HTTP

    async def _handle(self, request: BaseRequest) -> web.StreamResponse:
        await self.frozen.wait()
        try:
            return await self._dispatch(request)
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client is gone
        except Refused as refusal:
            message = str(refusal)
            body = {"error": {"message": message, "type": "error", "param": None, "code": refusal.status}}
            return web.Response(
                status=refusal.status, body=orjson.dumps(body), content_type=_JSON, headers=refusal.headers
            )
        except EngineDead:
            self.dead = True
            return web.json_response({"error": {"message": "EngineDeadError", "code": 500}}, status=500)

    async def _dispatch(self, request: BaseRequest) -> web.StreamResponse:
        path = request.path
        if path.startswith("/_fake/"):
            return await self._command(request, path.removeprefix("/_fake/"))
        if path in {"/health", "/ready", "/health_generate"}:
            ill = self.dead or any(f.kind == "unhealthy" for f in self.faults)
            return web.Response(status=503 if ill else 200)
        if path == "/metrics":
            return web.Response(text=self._metrics())
        if path == "/query":
            return web.json_response({"0": {"engine_id": self.engine_id, "kv_port": self.kv_port}})
        if self.spec.engine == "sglang" and path in {"/v1/loads", "/server_info"}:
            return web.json_response(self._loads() if path == "/v1/loads" else self._server_info())
        if path == "/load" and self.spec.engine in {"vllm", "mooncake", "llmd"}:
            return web.json_response({"server_load": self.running + self._waiting})
        self._authorize(request)
        if path == "/v1/models":
            entry = {"id": self.spec.model, "object": "model", "max_model_len": self.spec.max_model_len}
            return web.json_response({"object": "list", "data": [entry]})
        if self.dead:
            raise Refused(500, "EngineDeadError")
        if request.method != "POST":
            raise Refused(405, "method not allowed")
        raw = await request.read()
        try:
            body = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError:
            raise Refused(400, "not JSON") from None
        if path == "/tokenize":
            ids = tokens_of(body)
            return web.json_response(
                {"count": len(ids), "max_model_len": self.spec.max_model_len, "tokens": ids}
            )
        if path == "/pd_role_switch" and self.spec.engine == "sglang":
            return await self._switch(body)
        if path in {"/v1/completions", "/v1/chat/completions"}:
            return await self._generate(request, body)
        if path == "/v1/embeddings":
            return web.json_response({"object": "list", "data": [{"embedding": [0.0], "index": 0}]})
        raise Refused(404, "Not Found")

    def _authorize(self, request: BaseRequest) -> None:
        if (
            self.spec.api_key is not None
            and request.headers.get("Authorization") != f"Bearer {self.spec.api_key}"
        ):
            raise Refused(401, "Unauthorized")

    async def _command(self, request: BaseRequest, what: str) -> web.StreamResponse:
        raw = await request.read()
        body = orjson.loads(raw) if raw else {}
        if what == "fault":
            self.faults.append(Fault(**body))
        elif what == "clear":
            self.faults.clear()
        elif what == "via":
            self.spec = self.spec.model_copy(update={"kv_via_port": body["port"]})
        elif what == "kill" and self._own_process:
            os._exit(9)
        elif what != "state":
            raise Refused(404, "no such command")
        return web.json_response(
            {
                "name": self.spec.name,
                "kv_port": self.kv_port,
                "staged": len(self.staged),
                "staged_bytes": self.staged_bytes,
                "running": self.running,
                "waiting": self._waiting,
                "pulls_open": self.pulls_open,
                "double_pulls": self.double_pulls,
                "dead": self.dead,
                "counters": self.counters,
            }
        )

    async def _switch(self, body: dict[str, Any]) -> web.Response:
        """SGLang's change of role: refused while it is busy; the first one to decode needs to know the graphs."""
        old, role = self.role, body.get("new_role")
        refused: tuple[str, bool] | None = None
        if self.broken:
            refused = "instance is unhealthy after a failed role switch; restart required", False
        elif role not in {"prefill", "decode"}:
            refused = f"invalid new_role={role!r}", True
        elif role != old and (self.running or self._waiting):
            refused = "instance is not idle; drain all requests before switching", True
        elif role == "decode" and not self.graphs and body.get("decode_cuda_graph_memory_gb") is None:
            refused = "decode_cuda_graph_memory_gb is required before capturing decode graphs", True
        elif role != old and (fault := self._fault("switch_refused", "any")) is not None:
            self.broken = fault.value > 0
            refused = ("role switch failed; instance unhealthy, restart required", False)
            if not self.broken:
                refused = ("transfer backend does not support runtime role switch", True)
        if refused is not None:
            message, safe = refused
            answer = {"success": False, "message": message, "old_role": old, "new_role": role}
            return web.json_response({**answer, "safe_to_restore": safe}, status=400)
        if role != old:
            self.role = role  # type: ignore[assignment]
            self.switches += 1
            self._index.forget("own")
            self.graphs = self.graphs or (role == "decode" and body.get("decode_cuda_graph_bs")) or []
        return web.json_response(
            {"success": True, "message": "", "old_role": old, "new_role": role, "safe_to_restore": True}
        )

    def _server_info(self) -> dict[str, Any]:
        """SGLang's: the role of the start at the top, the present one within."""
        state = {
            "disaggregation_mode": self.role,
            "decode_cuda_graph_bs": self.graphs,
            "decode_cuda_graph_memory_gb": 1.25 if self.graphs else 0.0,
        }
        return {"disaggregation_mode": self.spec.role, "version": "0.5.23", "internal_states": [state]}

    # ------------------------------------------------------------------ generating

    async def _generate(self, request: BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if self.broken:
            raise Refused(500, "the instance is unhealthy after a failed role switch")
        leg = self._leg(body)
        self.seen.append(Seen(request.path, request.headers.copy(), body, leg))
        await self._early_faults(request, leg)
        ids = tokens_of(body)
        wanted = body.get("max_completion_tokens", body.get("max_tokens")) or 16
        if not isinstance(wanted, int) or wanted < 1:
            raise Refused(400, "max_tokens must be at least 1")
        room = self.spec.max_model_len - len(ids)
        if room < 1 or wanted > self.spec.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.spec.max_model_len} tokens")
        wanted = min(wanted, room)
        if self._waiting >= self.spec.max_queue:
            raise Refused(503, "engine is currently busy")
        self._waiting += 1
        waiting = True
        try:
            params = body.get("kv_transfer_params") or {}
            if self.spec.engine == "sglang":
                params = {}
                if "bootstrap_room" in body:
                    params = {
                        "room": str(body["bootstrap_room"]),
                        "host": body["bootstrap_host"],
                        "port": body["bootstrap_port"],
                    }
            cached = await self._prompt(request, body, ids, params, leg)
            if leg == "prefill":
                return await self._prefill_answer(request, body, ids, cached, params)
            self._waiting -= 1
            waiting = False
            return await self._decode_answer(request, body, ids, cached, wanted, leg)
        finally:
            if waiting:
                self._waiting -= 1

    def _leg(self, body: dict[str, Any]) -> str:
        params = body.get("kv_transfer_params")
        if self.spec.engine == "sglang":
            if "bootstrap_room" not in body:
                if self.role != "both":
                    raise Refused(400, "Disaggregated request received without bootstrap room id")
                return "decode"
            return "prefill" if self.role == "prefill" else "decode"
        return "prefill" if isinstance(params, dict) and params.get("do_remote_decode") else "decode"

    async def _early_faults(self, request: BaseRequest, leg: str) -> None:
        fault = self._fault("status", leg)
        if fault is not None:
            headers = {"Retry-After": "1"} if fault.value in (429, 503) else {}
            raise Refused(int(fault.value), f"fault {int(fault.value)} at 127.0.0.1:{self.port}", headers)
        if self._fault("hang", leg) is not None:
            await asyncio.Event().wait()
        if self._fault("drop", leg) is not None and request.transport is not None:
            request.transport.abort()
            await asyncio.Event().wait()

    async def _prompt(
        self, request: BaseRequest, body: dict[str, Any], ids: list[int], params: dict[str, Any], leg: str
    ) -> int:
        """Have the KV of the prompt, by prefill or by fetching it; gives the cached tokens."""
        blocks = blocks_of(Prompt(len(ids), "ids", ids=ids), self.spec.block_tokens, 1.0)
        cached = self._index.match("own", blocks)
        header = request.headers.get("x-prefiller-host-port")
        if self.spec.engine == "llmd" and header is not None:
            params = await self._sidecar_prefill(request, body, header)
        if leg == "decode" and (params.get("do_remote_prefill") or "room" in params):
            if await self._fetch(ids, cached, params):
                self._index.store("own", blocks)
                return 0
        elif leg == "prefill" and self.spec.engine in {"sglang", "mooncake"}:
            self._open_room(params, ids)
        fault = self._fault("cached", leg)
        slow = self._fault("slow", leg)
        try:
            async with self._prefill_turn:
                self._prefills += 1
                try:
                    seconds = self.spec.prefill.seconds(len(ids) - cached, cached)
                    await self._sleep(seconds * (slow.value if slow is not None else 1.0))
                finally:
                    self._prefills -= 1
        except asyncio.CancelledError:
            self._close_room(params)
            raise
        self._index.store("own", blocks)
        source = "local_cache_hit" if cached else "local_compute"
        self.count(f'vllm:prompt_tokens_by_source_total{{source="{source}"}}', len(ids))
        return int(fault.value) if fault is not None else cached

    async def _prefill_answer(
        self, request: BaseRequest, body: dict[str, Any], ids: list[int], cached: int, params: dict[str, Any]
    ) -> web.StreamResponse:
        extra: dict[str, Any] = {"kv_transfer_params": None}
        finish = "abort" if self._fault("abort_finish", "prefill") is not None else "length"
        if self.spec.engine in {"sglang", "mooncake"}:
            await self._wait_for_decode(params)
            extra = {}
        elif finish != "abort" and self._fault("no_params", "prefill") is None:
            extra = {"kv_transfer_params": self._stage(ids, cached)}
        return self._answer(request, body, ids, cached, 1, finish, extra)

    def _left(self, ids: list[int]) -> int:
        """Tokens that prefill leaves to the decode side: recurrent state is handed over as of the last but one."""
        return 1 if self.spec.kv.fixed_bytes and len(ids) > 1 else 0

    def _stage(self, ids: list[int], cached: int) -> dict[str, Any]:
        """Hold the KV until it is fetched; gives what the decode side needs."""
        key = f"req-{uuid.uuid4().hex}"
        staged = Staged(key, len(ids), self._sizes.of(len(ids)), time.monotonic() + self.spec.lease_s)
        staged.ready.set()
        staged.missing_part = self._fault("missing_part", "prefill") is not None
        self.staged[key] = staged
        wrong = self._fault("wrong_tokens", "prefill") is not None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(-(-len(ids) // self.spec.block_tokens)))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": key,
            "remote_host": self.spec.kv_host,
            "remote_port": self.spec.kv_via_port or self.kv_port,
            "tp_size": 1,
            "remote_num_tokens": len(ids) - self._left(ids) - (7 if wrong else 0),
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    # ------------------------------------------------------------------ rooms (SGLang, Mooncake)

    def _room(self, params: dict[str, Any]) -> str | None:
        return params.get("room") or params.get("transfer_id")

    def _open_room(self, params: dict[str, Any], ids: list[int]) -> None:
        room = self._room(params)
        if room is None:
            raise Refused(400, "no room")
        if room in self.rooms_used:
            raise EngineDead  # as the real scheduler: a room used twice crashes it
        self.rooms_used.add(room)
        staged = Staged(room, len(ids), self._sizes.of(len(ids)), time.monotonic() + 300.0)
        staged.missing_part = self._fault("missing_part", "prefill") is not None
        self.staged[room] = staged

    def _close_room(self, params: dict[str, Any]) -> None:
        staged = self.staged.get(self._room(params) or "")
        if staged is not None and self.spec.engine in {"sglang", "mooncake"}:
            self._drop_staged(staged)

    async def _wait_for_decode(self, params: dict[str, Any]) -> None:
        """A prefill ends when its decode partner has the cache."""
        staged = self.staged.get(self._room(params) or "")
        if staged is None:
            raise Refused(500, "room is gone")
        staged.ready.set()
        try:
            await staged.gone.wait()
        except asyncio.CancelledError:
            self._drop_staged(staged)
            raise

    # ------------------------------------------------------------------ KV side channel

    async def _serve_kv(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._kv_tasks.add(task)
        try:
            await self._give_kv(reader, writer)
        except (OSError, asyncio.IncompleteReadError, orjson.JSONDecodeError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            self._kv_tasks.discard(task)
            with contextlib.suppress(OSError, RuntimeError):
                writer.transport.abort()

    async def _give_kv(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order = orjson.loads(await reader.readuntil(b"\n"))
        staged = self.staged.get(order["key"])
        end = time.monotonic() + 10.0
        while staged is None and order.get("wait") and time.monotonic() < end:
            await asyncio.sleep(0.005)  # the prefill leg may not have come yet
            staged = self.staged.get(order["key"])
        if staged is None:
            writer.write(b'{"ok":false}\n')
            await writer.drain()
            await reader.read(1)
            return
        ready = asyncio.ensure_future(staged.ready.wait())
        gone = asyncio.ensure_future(staged.gone.wait())
        left = asyncio.ensure_future(reader.readuntil(b"\n"))
        waits: set[asyncio.Future[Any]] = {ready, gone, left}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                return
            await self.frozen.wait()
            parts = self._sizes.of(staged.tokens - int(order["have"]))
            if staged.missing_part:
                parts = parts[:-1]
            writer.write(orjson.dumps({"ok": True, "parts": parts, "tokens": staged.tokens}) + b"\n")
            for part in parts:
                for start in range(0, part, 65536):
                    writer.write(bytes(min(65536, part - start)))
                    await writer.drain()
            await left  # the partner says that it has everything
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
            if not left.cancelled():
                left.exception()
        if order["key"] not in self.staged:
            self.double_pulls += 1
        self._drop_staged(staged)

    async def _fetch(self, ids: list[int], cached: int, params: dict[str, Any]) -> bool:
        """Fetch the KV of a prompt; False if it has to be computed here.

        Raises:
            Refused: it could not be fetched and must not be computed.
        """
        held = params.get("remote_num_tokens")
        if isinstance(held, int) and len(ids) - self._left(ids) > held:
            raise EngineDead  # more blocks than the peer holds: the real engine asserts
        host, port, key, wait = await self._peer(params)
        began = time.monotonic()
        self.pulls_open += 1
        try:
            n_bytes = await self._pull(host, port, key, len(ids), cached, wait)
        except (PullFailed, OSError, asyncio.IncompleteReadError):
            self.count("vllm:nixl_num_failed_transfers_total")
            if self.spec.failure_policy == "fail" or self.spec.engine == "sglang":
                raise Refused(500, "Internal server error") from None
            return False
        finally:
            self.pulls_open -= 1
        self.count("vllm:nixl_bytes_transferred_sum", n_bytes / self.spec.byte_scale)
        self.count("vllm:nixl_xfer_time_seconds_sum", time.monotonic() - began)
        self.count('vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}', len(ids))
        return True

    async def _peer(self, params: dict[str, Any]) -> tuple[str, int, str, bool]:
        """(host, port, key, whether to wait for it) of the side that holds the KV."""
        if "room" in params:
            return (
                params["host"],
                self.spec.relay_from.get(str(params["port"]), params["port"]),
                params["room"],
                True,
            )
        if "remote_bootstrap_addr" in params:
            async with self._session().get(f"{params['remote_bootstrap_addr']}/query") as answer:
                page = await answer.json()
            entry = page["0"]
            if entry["engine_id"] != params["remote_engine_id"]:
                raise Refused(500, "the peer has another engine id")
            port = self.spec.relay_from.get(str(entry["kv_port"]), entry["kv_port"])
            return "127.0.0.1", port, params["transfer_id"], True
        return params["remote_host"], params["remote_port"], params["remote_request_id"], False

    async def _pull(self, host: str, port: int, key: str, tokens: int, have: int, wait: bool) -> int:
        try:
            async with asyncio.timeout(self.spec.handshake_s):
                reader, writer = await asyncio.open_connection(host, port, limit=2**20)
        except TimeoutError:
            raise PullFailed("no answer") from None
        try:
            writer.write(orjson.dumps({"key": key, "have": have, "wait": wait}) + b"\n")
            await writer.drain()
            head = orjson.loads(await reader.readuntil(b"\n"))  # as the real engine: no limit of time
            if not head.get("ok"):
                raise PullFailed("unknown handle")
            expected = self._sizes.of(tokens - have)
            if head["parts"] != expected:
                raise PullFailed(f"parts {head['parts']}, expected {expected}")
            left = sum(expected)
            while left > 0:
                piece = await reader.read(min(left, 65536))
                if not piece:
                    raise PullFailed("broke off")
                left -= len(piece)
            writer.write(b"done\n")
            await writer.drain()
            return sum(expected)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _sidecar_prefill(
        self, request: BaseRequest, body: dict[str, Any], host_port: str
    ) -> dict[str, Any]:
        """What llm-d's sidecar does: run the prefill leg by itself."""
        asked = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        asked.pop("stream_options", None)
        headers = {k: v for k, v in request.headers.items() if k.lower() in {"authorization", "x-request-id"}}
        try:
            async with self._session().post(
                f"http://{host_port}{request.path}", json=asked, headers=headers
            ) as answer:
                if answer.status != 200:
                    raise Refused(answer.status, await answer.text())
                found = await answer.json()
        except aiohttp.ClientError:
            raise Refused(502, "prefiller unreachable") from None
        return found.get("kv_transfer_params") or {}

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession()
        return self._client

    # ------------------------------------------------------------------ decoding

    async def _decode_answer(
        self, request: BaseRequest, body: dict[str, Any], ids: list[int], cached: int, wanted: int, leg: str
    ) -> web.StreamResponse:
        sequence = Sequence_(wanted, len(ids))
        await self._join(sequence)
        try:
            if body.get("stream"):
                return await self._stream(request, body, ids, cached, sequence)
            while sequence.made < wanted:
                sequence.more.clear()
                await sequence.more.wait()
            return self._answer(request, body, ids, cached, wanted, "length", {"kv_transfer_params": None})
        finally:
            self._leave(sequence)

    async def _join(self, sequence: Sequence_) -> None:
        if len(self._decoding) >= self.spec.decode.slots:
            turn = asyncio.Event()
            self._decode_queue.append((sequence, turn))
            self._waiting += 1
            try:
                await turn.wait()
            except asyncio.CancelledError:
                if (sequence, turn) in self._decode_queue:
                    self._decode_queue.remove((sequence, turn))
                self._leave(sequence)
                raise
            finally:
                self._waiting -= 1
        else:
            self._decoding.append(sequence)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._decode_loop())

    def _leave(self, sequence: Sequence_) -> None:
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        while self._decode_queue and len(self._decoding) < self.spec.decode.slots:
            following, turn = self._decode_queue.popleft()
            self._decoding.append(following)
            turn.set()

    async def _decode_loop(self) -> None:
        """One step after the other for all sequences, on a schedule of its own so that it does not drift."""
        loop = asyncio.get_running_loop()
        d = self.spec.decode
        at = loop.time()
        while self._decoding:
            context = sum(s.context + s.made for s in self._decoding)
            step_s = decode_step_s(d.a_s, d.b_s_per_sequence, d.c_s_per_token, len(self._decoding), context)
            at = max(at + step_s * self.spec.time_scale, loop.time() - 0.1)
            await asyncio.sleep(max(at - loop.time(), 0.0))
            await self.frozen.wait()
            for sequence in list(self._decoding):
                if sequence.made < sequence.wanted:
                    sequence.made += 1
                    sequence.more.set()

    async def _stream(
        self, request: BaseRequest, body: dict[str, Any], ids: list[int], cached: int, sequence: Sequence_
    ) -> web.StreamResponse:
        chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        digest, identity = digest_of(ids), self._identity(request, chat)
        if chat:
            await response.write(_event(self._chunk(identity, chat, role=True)))
        fault = self._fault("role_only", "decode")
        if fault is not None:
            await asyncio.sleep(fault.value)
            if request.transport is not None:
                request.transport.abort()
            await asyncio.Event().wait()
        broken, error = self._fault("break_stream", "decode"), self._fault("error_event", "decode")
        sent = 0
        while sent < sequence.wanted:
            while sequence.made <= sent:
                sequence.more.clear()
                await sequence.more.wait()
            last = sent + 1 == sequence.wanted
            await response.write(
                _event(self._chunk(identity, chat, text=token_text(digest, sent), last=last))
            )
            sent += 1
            if broken is not None and sent >= broken.value:
                if request.transport is not None:
                    request.transport.abort()
                await asyncio.Event().wait()
            if error is not None and sent >= error.value:
                problem = {"message": f"engine failed at 127.0.0.1:{self.port}", "type": "error", "code": 500}
                await response.write(_event({"error": problem}) + b"data: [DONE]\n\n")
                return response
        if (body.get("stream_options") or {}).get("include_usage"):
            chunk = {**self._chunk(identity, chat), "choices": [], "usage": _usage(len(ids), sent, cached)}
            await response.write(_event(chunk))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _identity(self, request: BaseRequest, chat: bool) -> str:
        given = request.headers.get("X-Request-Id", uuid.uuid4().hex)
        return f"{'chatcmpl' if chat else 'cmpl'}-{given}"

    def _chunk(
        self, identity: str, chat: bool, *, role: bool = False, text: str | None = None, last: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        if chat:
            choice["delta"] = {"role": "assistant", "content": ""} if role else {"content": text or ""}
        else:
            choice["text"] = text or ""
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {
            "id": identity,
            "object": kind,
            "created": int(self._began),
            "model": self.spec.model,
            "choices": [choice],
        }

    def _answer(
        self,
        request: BaseRequest,
        body: dict[str, Any],
        ids: list[int],
        cached: int,
        wanted: int,
        finish: str,
        extra: dict[str, Any],
    ) -> web.Response:
        chat, digest = "messages" in body, digest_of(ids)
        text = "".join(token_text(digest, k) for k in range(wanted))
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice["message" if chat else "text"] = {"role": "assistant", "content": text} if chat else text
        content = {
            "id": self._identity(request, chat),
            "object": "chat.completion" if chat else "text_completion",
            "created": int(self._began),
            "model": self.spec.model,
            "choices": [choice],
            "usage": _usage(len(ids), wanted, cached),
            **extra,
        }
        return web.Response(body=orjson.dumps(content), content_type=_JSON)

    # ------------------------------------------------------------------ load pages

    def _metrics(self) -> str:
        if any(f.kind == "no_load" for f in self.faults):
            return ""
        if self.spec.engine == "sglang":
            return f"sglang:num_running_reqs {self.running}\nsglang:num_queue_reqs {self._waiting}\n"
        label = f'{{engine="0",model_name="{self.spec.model}"}}'
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{label} {self.running}",
            f"vllm:num_requests_waiting{label} {self._waiting}",
            f'vllm:num_requests_waiting_by_reason{{engine="0",reason="deferred"}} {self.pulls_open}',
            f"vllm:kv_cache_usage_perc{label} 0.0",
            f"process_start_time_seconds {self._began}",
            *(f"{name} {value}" for name, value in self.counters.items()),
        ]
        return "\n".join(lines) + "\n"

    def _loads(self) -> dict[str, Any]:
        staged = len(self.staged)
        return {
            "loads": [
                {
                    "dp_rank": 0,
                    "num_running_reqs": self.running,
                    "num_waiting_reqs": self._waiting,
                    "token_usage": 0.0,
                    "disaggregation": {
                        "mode": self.role,
                        "prefill_bootstrap_queue_reqs": 0,
                        "prefill_inflight_queue_reqs": staged,
                        "decode_prealloc_queue_reqs": 0,
                        "decode_transfer_queue_reqs": self.pulls_open,
                    },
                }
            ]
        }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> BaseRequest:
    return BaseRequest(
        message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=256 * 2**20
    )


__all__ = ["Blocks", "FakeWorker", "Fault", "digest_of", "token_text", "tokens_of"]
