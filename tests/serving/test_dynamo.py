"""Dynamo in direct mode: a frontend that wants both instance ids."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from tests.serving.support import completion, run, until


class Frontend:
    """Answers 500 unless both headers are there, 503 once the named prefill instance is dead."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, str | None]] = []
        self.dead: set[str] = set()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/health":
            return web.json_response({"status": "healthy", "instances": []})
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        pair = (
            request.headers.get("x-dynamo-prefill-instance-id"),
            request.headers.get("x-dynamo-worker-instance-id"),
        )
        self.seen.append(pair)
        if None in pair:
            return web.json_response({"error": {"message": "no instance", "code": 500}}, status=500)
        if pair[0] in self.dead:
            return web.json_response({"error": {"message": "no instances", "code": 503}}, status=503)
        choice = {"index": 0, "message": {"role": "assistant", "content": None}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})


@contextlib.asynccontextmanager
async def direct() -> AsyncIterator[tuple[Frontend, Router, aiohttp.ClientSession]]:
    frontend = Frontend()
    runner = web.ServerRunner(web.Server(frontend.handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr,attr-defined]
    url = f"http://127.0.0.1:{port}"
    workers: list[dict[str, Any]] = [
        {"name": "r1", "cluster": "prfaas0", "role": "prefill", "url": url, "instance_id": "11"},
        {"name": "r2", "cluster": "prfaas0", "role": "prefill", "url": url, "instance_id": "12"},
        {"name": "l1", "cluster": "pd0", "role": "prefill", "url": url, "instance_id": "21"},
        {"name": "d1", "cluster": "pd0", "role": "decode", "url": url, "instance_id": "31"},
    ]
    config = {
        "backend": "dynamo_direct",
        "listen": {"port": 0},
        "workers": workers,
        "decision": {"threshold_tokens": 100},
        "health": {"canary": False, "ramp_s": 0},
        "length": {"ask_engine": False},
        "cache": {"enabled": False},
    }
    router = Router(Resolved(RouterConfig.model_validate(config)))
    await router.start()
    async with aiohttp.ClientSession() as session:
        try:
            await until(lambda: all(w.state == "up" for w in router.forwarder.fleet), "all are up")
            yield frontend, router, session
        finally:
            await router.close()
            await runner.cleanup()


def test_both_headers_name_the_pair() -> None:
    async def work() -> None:
        async with direct() as (frontend, router, session):
            url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
            sent = {"x-dynamo-prefill-instance-id": "99"}
            for prompt, prefillers in (("x" * 1000, {"11", "12"}), ("x", {"21"})):
                body = completion(prompt, 4, "/v1/chat/completions")
                async with session.post(url, json=body, headers=sent) as answer:
                    assert answer.status == 200
                prefill, decode = frontend.seen[-1]
                assert prefill in prefillers
                assert decode == "31"

    run(work)


def test_a_dead_prefill_instance_is_replaced() -> None:
    """The frontend answers 503 for good; the router takes another instance and then the local one."""

    async def work() -> None:
        async with direct() as (frontend, router, session):
            url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
            frontend.dead = {"11", "12"}
            body = completion("x" * 1000, 4, "/v1/chat/completions")
            async with session.post(url, json=body) as answer:
                status = answer.status
            assert {p for p, _ in frontend.seen} <= {"11", "12", "21"}
            assert status in (200, 503)
            frontend.dead = {"11"}
            router.forwarder.fleet.workers["d1"].not_before_s = 0.0
            async with session.post(url, json=body) as answer:
                assert answer.status == 200

    run(work)
