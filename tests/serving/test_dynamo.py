"""Dynamo behind the router: a frontend that wants both instance ids, and answers as Dynamo 1.6.1 does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from prfaas_serving.app import Router
from prfaas_serving.backends.dynamo_instances import read_instances
from prfaas_serving.config import Dynamo, Resolved, RouterConfig
from tests.serving.support import TOKEN, Setup, completion, run, until

PREFILL, DECODE = "x-dynamo-prefill-instance-id", "x-dynamo-worker-instance-id"
ALIASES = ("x-prefill-instance-id", "x-worker-instance-id", "x-dynamo-dp-rank", "x-dynamo-prefill-dp-rank")
CHAT = "/v1/chat/completions"
LONG, SHORT = "x" * 1000, "x"
#: Ids are unsigned and use all of their 64 bits.
IDS = {"r1": 2**64 - 1, "r2": 2**63 + 1, "l1": 21, "d1": 31, "d2": 2**53 + 1}
UNAVAILABLE = (503, "Service temporarily unavailable", "Service Unavailable")
OVERLOADED = (529, "Service temporarily overloaded", "Overloaded")
INVALID = (400, "Invalid request", "Bad Request")


@dataclass
class Fake:
    """An instance."""

    instance_id: int
    component: str
    host: str
    state: str = "up"
    """up, full, dead (listed until its lease ends) or gone."""


class Frontend:
    """As Dynamo's: instances by id, a dead one stays listed for a while, then its id is an invalid request."""

    def __init__(self) -> None:
        self.instances = {
            name: Fake(number, "backend" if name[0] == "d" else "prefill", f"127.0.{name[0] == 'r':d}.1")
            for name, number in IDS.items()
        }
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.strange: list[str] = []
        self.healthy = True

    def state(self, name: str, state: str) -> None:
        self.instances[name].state = state

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return self.health() if self.healthy else web.Response(status=503)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.strange += [name for name in ALIASES if name in request.headers]
        failure = self.refusal(request)
        if body.get("stream"):
            return await self.stream(request, failure)
        if failure is not None:
            return error(*failure)
        choice = {"index": 0, "message": {"role": "assistant", "content": "w"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    def refusal(self, request: web.BaseRequest) -> tuple[int, str, str] | None:
        ids = request.headers.get(PREFILL, ""), request.headers.get(DECODE, "")
        if not all(ids):
            return 500, "Failed to generate completions", "Internal Server Error"
        by_id = {str(i.instance_id): (name, i) for name, i in self.instances.items() if i.state != "gone"}
        pair = [by_id.get(i) for i in ids]
        self.seen.append(tuple(p[0] if p else "?" for p in pair))  # type: ignore[arg-type]
        if None in pair or [p[1].component for p in pair if p] != ["prefill", "backend"]:
            return INVALID
        states = {p[1].state for p in pair if p}
        return UNAVAILABLE if "dead" in states else OVERLOADED if "full" in states else None

    async def stream(
        self, request: web.BaseRequest, failure: tuple[int, str, str] | None
    ) -> web.StreamResponse:
        """Failures of an instance come within a stream, its refusals as a status."""
        if failure is not None and failure[0] in (400, 529):
            return error(*failure)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"content": "w", "role": "assistant"}}]}]
        if failure is not None:
            chunks = [
                {"error": {"message": failure[1], "type": "service_unavailable", "code": failure[0]}},
            ]
        for chunk in chunks:
            await answer.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def health(self) -> web.Response:
        rows = [
            {
                "namespace": "dynamo",
                "component": i.component,
                "endpoint": endpoint,
                "instance_id": i.instance_id,
                "transport": {"tcp": f"{i.host}:4000/{i.instance_id:x}/dynamo/{i.component}/{endpoint}"},
            }
            for i in self.instances.values()
            if i.state != "gone"
            for endpoint in ("generate", "worker_kv_query_source_1")
        ]
        return web.Response(
            body=orjson.dumps({"status": "healthy", "instances": rows}), content_type="application/json"
        )


def error(status: int, message: str, kind: str) -> web.Response:
    return web.json_response({"message": message, "type": kind, "code": status}, status=status)


@dataclass
class Scene(Setup):
    """A router in front of a frontend."""

    frontend: Any = None

    async def chat(self, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        return await self.post(CHAT, completion(prompt, 4, CHAT, **fields), headers)


@contextlib.asynccontextmanager
async def direct(*names: str, discovery: dict[str, Any] | None = None, **config: Any) -> AsyncIterator[Scene]:
    frontend = Frontend()
    runner = web.ServerRunner(web.Server(frontend.handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr,attr-defined]
    url = f"http://127.0.0.1:{port}"
    workers: list[dict[str, Any]] = [
        {
            "name": name,
            "cluster": "prfaas0" if name[0] == "r" else "pd0",
            "role": "decode" if name[0] == "d" else "prefill",
            "url": url,
            "instance_id": str(IDS[name]),
        }
        for name in names or ("r1", "r2", "l1", "d1", "d2")
    ]
    raw = {
        "backend": "dynamo_direct",
        "listen": {"port": 0},
        "admin": {"port": 0, "token_env": "PRFAAS_TEST_TOKEN"},
        "decision": {"threshold_tokens": 100},
        "health": {"canary": False, "ramp_s": 0, "probe_s": 0.1},
        "length": {"ask_engine": False},
        "cache": {"enabled": False},
        **(
            {"workers": workers}
            if discovery is None
            else {"discovery": {"dynamo": {**discovery, "url": url}}}
        ),
        **config,
    }
    router = Router(Resolved(RouterConfig.model_validate(raw)))
    await router.start()
    async with aiohttp.ClientSession() as session:
        try:
            await until(
                lambda: (
                    len(router.forwarder.fleet.workers) >= len(names or IDS)
                    and all(w.state == "up" for w in router.forwarder.fleet)
                ),
                "all are up",
            )
            yield Scene(router, {}, session, frontend=frontend)
        finally:
            await router.close()
            await runner.cleanup()


def test_both_headers_name_the_pair() -> None:
    async def work() -> None:
        async with direct() as s:
            for prompt, prefillers in ((LONG, {"r1", "r2"}), (SHORT, {"l1"})):
                assert (await s.chat(prompt)).status == 200
                prefill, decode = s.frontend.seen[-1]
                assert prefill in prefillers
                assert decode in {"d1", "d2"}

    run(work)


def test_a_client_cannot_choose_instances() -> None:
    """Neither by headers, whatever their name, nor by hints in the body."""

    async def work() -> None:
        async with direct("r1", "l1", "d1") as s:
            sent = {PREFILL: "21", **dict.fromkeys(ALIASES, "21")}
            hints = {
                "prefill_worker_id": 21,
                "decode_worker_id": 21,
                "backend_instance_id": 21,
                "extra_fields": ["timing"],
            }
            assert (await s.chat(LONG, sent, nvext=hints)).status == 200
            assert s.frontend.seen == [("r1", "d1")]
            assert s.frontend.strange == []
            assert s.frontend.bodies[-1]["nvext"] == {"extra_fields": ["timing"]}

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_prefill_instance(stream: bool) -> None:
    """While it is listed its 503 makes it ill; afterwards its 400 is no client's mistake. Both are answered."""

    async def work() -> None:
        async with direct("r1", "l1", "d1", health={"canary": False, "ramp_s": 0, "probe_s": 60}) as s:
            s.frontend.state("r1", "dead")
            answer = await s.chat(LONG, stream=stream)
            assert (answer.status, answer.headers["X-Prfaas-Route"]) == (200, "local")
            assert s.frontend.seen == [("r1", "d1"), ("l1", "d1")]
            assert s.worker("r1").failures == 1
            assert s.worker("r1").refusals == 0
            s.frontend.seen.clear()
            s.frontend.state("r1", "gone")
            answer = await s.chat(LONG, stream=stream)
            assert (answer.status, answer.headers["X-Prfaas-Route"]) == (200, "local")
            assert s.frontend.seen == [("?", "d1"), ("l1", "d1")]
            assert s.worker("r1").state == "down"
            answer = await s.chat(LONG, stream=stream)
            assert answer.headers["X-Prfaas-Reason"] == "no_remote"
            assert len(s.frontend.seen) == 3
            assert (s.worker("d1").failures, s.worker("l1").failures) == (0, 0)

    run(work)


def test_the_list_of_instances_is_the_health_check() -> None:
    async def work() -> None:
        async with direct("r1", "l1", "d1") as s:
            s.frontend.state("r1", "gone")
            await until(lambda: s.worker("r1").state == "down", "one that is not listed is down")
            assert s.worker("l1").state == "up"
            s.frontend.state("r1", "up")
            await until(lambda: s.worker("r1").state == "up", "it is back")

    run(work)


def test_a_mistake_of_the_client_stays_his() -> None:
    """The same words, but both instances are there."""

    async def work() -> None:
        async with direct("r1", "l1", "d1") as s:
            s.frontend.refusal = lambda request: INVALID
            answer = await s.chat(LONG)
            assert (answer.status, answer.json["message"]) == (400, "Invalid request")
            assert {w.state for w in s.router.forwarder.fleet} == {"up"}
            assert sum(w.failures for w in s.router.forwarder.fleet) == 0
            assert len(s.frontend.bodies) == 1

    run(work)


def test_a_dead_decode_instance_is_found_behind_its_partners() -> None:
    """Its failures do not open the breakers of all prefill instances."""

    async def work() -> None:
        async with direct(
            "r1",
            "r2",
            "l1",
            "d1",
            "d2",
            retry={"budget": 1.0, "reserve": 50.0},
            health={"canary": False, "ramp_s": 0, "probe_s": 60},
        ) as s:
            s.frontend.state("d1", "dead")
            statuses = [(await s.chat(LONG if k % 2 else SHORT)).status for k in range(40)]
            assert statuses[-10:] == [200] * 10
            assert s.worker("d1").breaker.opened == 1
            assert [s.worker(name).breaker.opened for name in ("r1", "r2", "l1", "d2")] == [0, 0, 0, 0]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_instance_is_not_ill(stream: bool) -> None:
    """529 without Retry-After: another pair is tried; where all are full the client hears 503 and when to come."""

    async def work() -> None:
        async with direct() as s:
            s.frontend.state("r1", "full")
            for _ in range(12):
                assert (await s.chat(LONG, stream=stream)).status == 200
            assert s.worker("r1").refusals > 0
            assert s.worker("r1").breaker.opened == 0
            for name in ("r2", "l1"):
                s.frontend.state(name, "full")
            answer = await s.chat(LONG, stream=stream)
            assert (answer.status, answer.json["error"]["code"]) == (503, "busy")
            assert int(answer.headers["Retry-After"]) >= 1
            assert [w.failures for w in s.router.forwarder.fleet] == [0] * 5
            assert {w.state for w in s.router.forwarder.fleet} == {"up"}

    run(work)


def test_another_decode_instance_behind_the_only_prefill_instance() -> None:
    """What failed may be either of the pair: where no other prefill instance is left the decode instance changes."""

    async def work() -> None:
        async with direct("r1", "l1", "d1", "d2", health={"canary": False, "ramp_s": 0, "probe_s": 60}) as s:
            for state in ("dead", "full"):
                s.frontend.state("d1", state)
                for prompt in [SHORT] * 4:
                    assert (await s.chat(prompt)).status == 200
            assert s.worker("l1").breaker.opened == 0

    run(work)


def test_a_full_decode_instance_gives_way_to_another() -> None:
    """Which of the pair is full is not said: the next try takes another pair."""

    async def work() -> None:
        async with direct("r1", "r2", "l1", "d1", "d2") as s:
            s.frontend.state("d1", "full")
            for _ in range(8):
                assert (await s.chat(LONG)).status == 200

    run(work)


def test_roles_are_fixed() -> None:
    async def work() -> None:
        async with direct() as s:
            answer = await s.admin("POST", "/workers/d1/role", {"role": "prefill"}, token=TOKEN)
            assert (answer.status, answer.json["error"]["code"]) == (409, "role_refused")

    run(work)


GROUPS = {
    "poll_s": 0.05,
    "groups": [
        {"component": "prefill", "networks": ["127.0.1.0/24"], "cluster": "prfaas0", "role": "prefill"},
        {"component": "prefill", "cluster": "pd0", "role": "prefill"},
        {"component": "backend", "cluster": "pd0", "role": "decode"},
    ],
}


def test_instances_are_discovered() -> None:
    """By component and address; a restarted one has another id and is another worker."""

    async def work() -> None:
        async with direct(discovery=GROUPS) as s:
            fleet = s.router.forwarder.fleet
            assert {w.spec.instance_id for w in fleet} == {str(number) for number in IDS.values()}
            assert {w.spec.instance_id for w in fleet.remote_prefill["prfaas0"].workers} == {
                str(IDS["r1"]),
                str(IDS["r2"]),
            }
            assert (await s.chat(LONG)).headers["X-Prfaas-Route"] == "remote"
            assert s.frontend.seen[-1][0] in {"r1", "r2"}
            s.frontend.instances["l1"].instance_id = 77
            await until(
                lambda: "prefill-4d" in fleet.workers and "prefill-15" not in fleet.workers, "l1 anew"
            )
            await until(lambda: s.worker("prefill-4d").state == "up", "it is up")
            assert (await s.chat(SHORT)).status == 200
            assert s.frontend.seen[-1][0] == "l1"
            s.frontend.healthy = False
            await until(lambda: s.router.discoverer.problem is not None, "the frontend is missed")
            assert len(fleet.workers) == 5

    run(work)


def test_an_instance_no_group_fits_is_left_out() -> None:
    async def work() -> None:
        groups = {**GROUPS, "groups": [GROUPS["groups"][0], GROUPS["groups"][2]]}  # type: ignore[index]
        async with direct("r1", "r2", "d1", "d2", discovery=groups) as s:
            assert len(s.router.forwarder.fleet.workers) == 4
            assert not s.router.forwarder.fleet.local_prefill.workers

    run(work)


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ({"status": "unhealthy"}, None),
        ([], None),
        ({"instances": [{"endpoint": "generate", "instance_id": "7"}, 3]}, []),
        ({"instances": [{"endpoint": "clear_kv_blocks", "instance_id": 7}]}, []),
        (
            {"instances": [{"endpoint": "generate", "instance_id": 7, "transport": {"nats_tcp": "a.b"}}]},
            ["7"],
        ),
    ],
)
def test_pages_of_instances(page: Any, found: list[str] | None) -> None:
    listed = read_instances(page)
    assert (None if listed is None else [i.instance_id for i in listed]) == found
    assert all(i.address is None for i in listed or ())


@pytest.mark.parametrize(
    ("transport", "address"),
    [
        ("10.1.2.3:4000/ab/dynamo", "10.1.2.3"),
        ("[fd00::1]:4000/ab", "fd00::1"),
        ("host.name:4000/ab", "None"),
    ],
)
def test_addresses_of_instances(transport: str, address: str) -> None:
    page = {"instances": [{"endpoint": "generate", "instance_id": 7, "transport": {"tcp": transport}}]}
    listed = read_instances(page)
    assert listed is not None
    assert str(listed[0].address) == address


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "frontend:8000"}, "must be http://host:port"),
        ({"groups": []}, "at least 1 item"),
        (
            {"groups": [{"component": "p", "cluster": "c", "role": "prefill", "networks": ["10.1.2.3/8"]}]},
            "host bits",
        ),
    ],
)
def test_wrong_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dynamo.model_validate({"url": "http://f:1", **GROUPS, **change})
