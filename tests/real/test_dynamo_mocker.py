"""Real Dynamo behind the router: mocker instances (two far prefill, one near prefill, two decode) and two frontends.

Shows which instances serve a request, and what happens when they die or are full. Times and tokens are made up by the
mocker, so nothing is said about speed or about what is generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from tests.real.dynamo import (
    FAR,
    FIRST_WORD,
    FOLDER,
    LEASE_S,
    START_S,
    Frontend,
    Mocker,
    close_all,
    groups_of_instances,
    write_model,
)
from tests.real.processes import PATIENCE
from tests.real.support import CHAT, COMPLETIONS, SCENARIO, Prompts, direct, run, say
from tests.serving.support import Reply, Setup, until

THRESHOLD = 500
LONG, SHORT = 2000, 100
ILL = ("connect", "timeout", "status", "broken", "unreadable")


class Deployment:
    """What all tests of this file share."""

    def __init__(self) -> None:
        shutil.rmtree(FOLDER / "instances", ignore_errors=True)
        self.model = write_model(FOLDER / "model")
        # a tenth of the usual speed: a long prompt takes about half a second, long enough to be caught at
        self.mockers = {
            "far1": Mocker("far1", self.model, "prefill", FAR, speed=0.1),
            "far2": Mocker("far2", self.model, "prefill", FAR, speed=0.1),
            "near": Mocker("near", self.model, "prefill", speed=0.1),
            "decode1": Mocker("decode1", self.model, "decode"),
            "decode2": Mocker("decode2", self.model, "decode"),
        }
        self.frontends = {mode: Frontend(mode) for mode in ("direct", "kv")}
        self.prompts = Prompts(9)

    async def up(self) -> None:
        """Start again what was killed; wait until both frontends list exactly what runs."""
        for mocker in self.mockers.values():
            if mocker.process is None or mocker.process.poll() is not None:
                mocker.start()
        for frontend in self.frontends.values():
            if frontend.process is None or frontend.process.poll() is not None:
                frontend.start()
        async with direct() as session:
            ids = await self.ids(session)
            for frontend in self.frontends.values():
                await frontend.ready(session, set(ids.values()))
            # listed is not yet connected: ask over every pair
            for frontend in self.frontends.values():
                for prefill in ("far1", "far2", "near"):
                    for decode in ("decode1", "decode2"):
                        await self._answers(session, frontend, ids[prefill], ids[decode])

    async def _answers(
        self, session: aiohttp.ClientSession, frontend: Frontend, prefill: str, decode: str
    ) -> None:
        end_s = time.monotonic() + START_S
        while True:
            status, answer = await frontend.post(
                session, COMPLETIONS, self.body(8, 1), headers_for(prefill, decode)
            )
            if status == 200:
                return
            assert time.monotonic() < end_s, answer
            await asyncio.sleep(0.2)

    async def ids(self, session: aiohttp.ClientSession) -> dict[str, str]:
        """Ids of the instances by name."""
        return {name: await m.instance_id(session) for name, m in self.mockers.items()}

    def body(self, length: int, tokens: int = 4, **fields: Any) -> dict[str, Any]:
        """A completion of a fresh prompt of so many tokens, which names the instances that served it."""
        return {
            "model": str(self.model),
            "prompt": [token % FIRST_WORD for token in self.prompts.fresh(length)],
            "max_tokens": tokens,
            "nvext": {"extra_fields": ["worker_id", "timing"]},
            **fields,
        }


def headers_for(prefill: str, decode: str) -> dict[str, str]:
    """What a request past the router must carry."""
    return {"x-dynamo-prefill-instance-id": prefill, "x-dynamo-worker-instance-id": decode}


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    """Started once, killed whatever happens."""
    with socket.socket() as there:
        try:
            there.bind((FAR, 0))
        except OSError:
            pytest.skip("no second loopback address here")
    deployment = Deployment()
    began_s = time.monotonic()
    try:
        run(deployment.up, 2 * START_S)
        say(f"Dynamo up after {time.monotonic() - began_s:.0f} s: five mocker instances, two frontends")
        yield deployment
    finally:
        close_all([*deployment.frontends.values(), *deployment.mockers.values()])


@pytest.fixture
def dynamo(shared: Deployment) -> Deployment:
    """All instances are alive."""
    run(shared.up, 2 * START_S)
    return shared


class Live(Setup):
    """A running router in front of a frontend."""

    dynamo: Deployment
    frontend: Frontend
    ids: dict[str, str]

    async def ask(self, prompt: int, tokens: int = 4, **fields: Any) -> Reply:
        """A completion of a fresh prompt through the router."""
        return await self.post(COMPLETIONS, self.dynamo.body(prompt, tokens, **fields))

    def of(self, name: str) -> Any:
        """The router's view of an instance."""
        return next(w for w in self.router.forwarder.fleet if w.spec.instance_id == self.ids[name])

    async def counted(self) -> dict[str, int]:
        """Requests by instance, as the instances count them."""
        return {
            name: int((await mocker.metrics(self.session))["requests_total"])
            for name, mocker in self.dynamo.mockers.items()
            if mocker.process is not None and mocker.process.poll() is None
        }

    def sent(self) -> dict[str, int]:
        """Requests by instance, as the router counts them."""
        return {name: self.of(name).requests for name in self.dynamo.mockers}

    def served_by(self, answer: Any) -> tuple[str, str]:
        """(prefill, decode) instance that Dynamo says it used."""
        names = {number: name for name, number in self.ids.items()}
        found = answer["nvext"]["worker_id"]
        return names[str(found["prefill_worker_id"])], names[str(found["decode_worker_id"])]

    async def idle(self, *instances: str) -> None:
        """Wait until nothing is under way at the router and at the instances (none given: all that run)."""
        f = self.router.forwarder
        await until(lambda: f.open_requests == 0 and not f.background, "nothing under way")
        assert all(w.in_flight == 0 and not w.assigned for w in f.fleet)
        assert all(p.waiting == 0 for p in f.fleet.pools())
        assert all(link.open_flows == 0 for link in f.paths.links.values())
        end_s = time.monotonic() + 15.0 * PATIENCE
        for name in instances or self.dynamo.mockers:
            mocker = self.dynamo.mockers[name]
            while mocker.process is not None and mocker.process.poll() is None:
                if (await mocker.metrics(self.session))["inflight_requests"] == 0:
                    break
                assert time.monotonic() < end_s, f"{mocker.name} is still busy"
                await asyncio.sleep(0.1)

    def troubles(self) -> dict[str, float]:
        """Failures that the router holds against instances, by name."""
        return {
            name: sum(
                self.metric("worker_failures_total", worker=self.of(name).name, kind=kind) for kind in ILL
            )
            for name in self.ids
        }


@contextlib.asynccontextmanager
async def routing(dynamo: Deployment, mode: str = "kv", **config: Any) -> AsyncIterator[Live]:
    """A router that finds its workers at a frontend."""
    frontend = dynamo.frontends[mode]
    raw: dict[str, Any] = {
        "backend": "dynamo_direct",
        "scenario": str(SCENARIO),
        "listen": {"port": 0},
        "discovery": {"dynamo": {"url": frontend.url, "poll_s": 0.2, "groups": groups_of_instances()}},
        "decision": {"threshold_tokens": THRESHOLD},
        "length": {"tokenizer": str(dynamo.model)},
        "cache": {"enabled": False},
        "upstream": {"connect_s": 10.0},
        "health": {"canary": False, "ramp_s": 0.0, "probe_s": 0.5, "probe_timeout_s": 5.0},
        **config,
    }
    router = Router(Resolved(RouterConfig.model_validate(raw)))
    async with contextlib.AsyncExitStack() as stack:
        await router.start()
        stack.push_async_callback(router.close)
        timeout = aiohttp.ClientTimeout(total=60 * PATIENCE)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        stack.push_async_callback(session.close)
        live = Live(router, {}, session)
        live.dynamo, live.frontend = dynamo, frontend
        live.ids = await dynamo.ids(session)
        fleet = router.forwarder.fleet
        await until(
            lambda: len(fleet.workers) == len(dynamo.mockers) and all(w.state == "up" for w in fleet),
            "all instances are found",
            30.0 * PATIENCE,
        )
        yield live


# ---------------------------------------------------------------------- who serves a request


@pytest.mark.parametrize("mode", ["direct", "kv"])
def test_headers_choose_the_instances(dynamo: Deployment, mode: str) -> None:
    """Every instance has counted exactly the requests that the router sent there, on both legs."""

    async def work() -> None:
        async with routing(dynamo, mode) as live:
            before = await live.counted()
            replies = await asyncio.gather(
                *(live.ask(LONG if k % 2 else SHORT, 2 + k % 3) for k in range(24)),
                *(live.ask(LONG if k % 2 else SHORT, 2, stream=True) for k in range(8)),
            )
            assert [r.status for r in replies] == [200] * 32
            counted = {name: n - before[name] for name, n in (await live.counted()).items()}
            assert counted == live.sent()
            assert min(counted.values()) > 0, counted
            assert counted["far1"] + counted["far2"] == counted["near"] == 16
            for k, reply in enumerate(replies[:24]):
                prefill, decode = live.served_by(reply.json)
                assert (prefill != "near") == bool(k % 2)
                assert decode in {"decode1", "decode2"}
            await live.idle()
            assert set(live.troubles().values()) == {0}
            say(f"mode {mode}: requests by instance as counted there: {counted}")

    run(work)


def test_the_threshold(dynamo: Deployment) -> None:
    """At the threshold near, one token above it far; text is counted as the frontend counts it."""

    async def work() -> None:
        async with routing(dynamo) as live:
            for tokens, far in ((1, False), (THRESHOLD, False), (THRESHOLD + 1, True), (4 * THRESHOLD, True)):
                for body in (dynamo.body(tokens), dynamo.body(1, prompt="x" * tokens)):
                    before = await live.counted()
                    reply = await live.post(COMPLETIONS, body)
                    assert reply.status == 200, reply.body
                    assert reply.json["usage"]["prompt_tokens"] == tokens
                    assert reply.headers["X-Prfaas-Route"] == ("remote" if far else "local")
                    counted = {name: n - before[name] for name, n in (await live.counted()).items()}
                    assert counted["near"] == (0 if far else 1)
                    assert counted["far1"] + counted["far2"] == (1 if far else 0)
                    assert counted["decode1"] + counted["decode2"] == 1
            messages = [{"role": "user", "content": "x" * (THRESHOLD - len("user: \n"))}]
            for more, route in (("", "local"), ("x", "remote")):
                messages[0]["content"] += more
                body = {"model": str(dynamo.model), "messages": messages, "max_tokens": 2}
                reply = await live.post(CHAT, body)
                assert reply.json["usage"]["prompt_tokens"] == THRESHOLD + len(more)
                assert reply.headers["X-Prfaas-Route"] == route

    run(work)


def test_streams_and_usage(dynamo: Deployment) -> None:
    """Every token is an event of its own, passed on as it comes; usage is the frontend's."""

    async def work() -> None:
        async with routing(dynamo) as live:
            for prompt, path in ((LONG, COMPLETIONS), (SHORT, COMPLETIONS), (SHORT, CHAT)):
                fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
                body = dynamo.body(prompt, 20, **fields)
                if path == CHAT:
                    del body["prompt"]
                    body["messages"] = [{"role": "user", "content": "hello"}]
                pair = headers_for(live.ids["near"], live.ids["decode1"])
                async with live.session.post(live.frontend.url + path, json=body, headers=pair) as answer:
                    alone = Reply(answer.status, answer.headers, await answer.read())
                reply = await live.post(path, body)
                assert (reply.status, reply.headers["Content-Type"]) == (200, "text/event-stream")
                assert reply.events[-1] == "[DONE]"
                assert [shape(e) for e in reply.events] == [shape(e) for e in alone.events]
                words = reply.text.split()
                assert len(words) == 20
                assert all(word[0] == "w" and 1000 <= int(word[1:]) < 2000 for word in words)
                usage = [e["usage"] for e in reply.events if isinstance(e, dict) and e.get("usage")]
                told = [e["usage"] for e in alone.events if isinstance(e, dict) and e.get("usage")]
                assert usage == told
                assert usage[0]["completion_tokens"] == 20
                assert usage[0]["prompt_tokens"] == (prompt if path == COMPLETIONS else len("user: hello\n"))
                assert len(set(reply.at_s)) > 10, "pieces come one after another"
                whole = await live.post(path, {k: v for k, v in body.items() if k not in fields})
                assert len(whole.text.split()) == 20
                assert whole.json["usage"]["completion_tokens"] == 20
            await live.idle()

    run(work)


def shape(event: Any) -> Any:
    """What an event holds, without what differs from request to request."""
    if not isinstance(event, dict):
        return event
    choices = event.get("choices") or []
    return sorted(event), [(sorted(c), c.get("finish_reason")) for c in choices], bool(event.get("usage"))


def test_a_client_cannot_choose(dynamo: Deployment) -> None:
    """Headers and hints of a client, under all names that the frontend knows, change nothing."""

    async def work() -> None:
        async with routing(dynamo) as live:
            near, far = live.ids["near"], live.ids["far1"]
            names = ("x-dynamo-prefill-instance-id", "x-prefill-instance-id")
            hints = {"prefill_worker_id": int(near), "backend_instance_id": int(far)}
            body = dynamo.body(LONG)
            body["nvext"].update(hints)
            for _ in range(3):
                reply = await live.post(COMPLETIONS, body, dict.fromkeys(names, near))
                assert reply.status == 200, reply.body
                assert live.served_by(reply.json)[0] in {"far1", "far2"}

    run(work)


def test_a_mistake_of_the_client(dynamo: Deployment) -> None:
    """A token that the vocabulary lacks gets the same words as an instance that is gone, but is the client's."""

    async def work() -> None:
        async with routing(dynamo) as live:
            for body in (dynamo.body(1, prompt=[10**9] * LONG), dynamo.body(SHORT, temperature=9)):
                reply = await live.post(COMPLETIONS, body)
                assert (reply.status, reply.json["code"]) == (400, 400)
            assert {w.state for w in live.router.forwarder.fleet} == {"up"}
            assert set(live.troubles().values()) == {0}
            await live.idle()

    run(work)


def test_ready_after_real_generations(dynamo: Deployment) -> None:
    """The router's canaries go over every path."""

    async def work() -> None:
        async with routing(dynamo, health={"canary": True, "ramp_s": 0.0, "probe_s": 0.5}) as live:
            end_s = time.monotonic() + 20.0 * PATIENCE
            while (await live.get("/ready")).status != 200:
                assert time.monotonic() < end_s, (await live.get("/ready")).body
                await asyncio.sleep(0.1)
            sent = live.sent()
            assert sent["near"] >= 1
            assert sent["far1"] + sent["far2"] >= 1

    run(work)


def test_a_client_that_leaves(dynamo: Deployment) -> None:
    """In mid-prefill and in mid-stream: nothing goes on at the instances."""

    async def work() -> None:
        async with routing(dynamo) as live:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await live.ask(8 * LONG, 500)
            await live.idle()
            async with live.session.post(
                live.url + COMPLETIONS, json=dynamo.body(SHORT, 5000, stream=True)
            ) as answer:
                for _ in range(3):
                    assert await answer.content.readany()
                answer.close()
            await live.idle()
            assert set(live.troubles().values()) == {0}

    run(work)


# ---------------------------------------------------------------------- admission


async def admit(live: Live, tokens: int | None) -> None:
    """Set the frontend's threshold of active prefill tokens per instance, while it runs."""
    wanted = 10**9 if tokens is None else tokens
    body = {"model": str(live.dynamo.model), "active_prefill_tokens_threshold": wanted}
    status, answer = await live.frontend.post(live.session, "/busy_threshold", body)
    assert (status, answer["active_prefill_tokens_threshold"]) == (200, wanted)


@contextlib.asynccontextmanager
async def full(live: Live, *names: str) -> AsyncIterator[None]:
    """Prefill instances that are kept busy for seconds, past the router; checks that they were to the end."""
    tasks = [
        asyncio.create_task(
            live.frontend.post(
                live.session,
                COMPLETIONS,
                live.dynamo.body(7 * LONG, 2),
                headers_for(live.ids[name], live.ids["decode1"]),
            )
        )
        for name in names
    ]
    await asyncio.sleep(0.3)
    try:
        yield
        assert not any(task.done() for task in tasks), "not full any more"
    finally:
        answers = await asyncio.gather(*tasks)
    assert [status for status, _ in answers] == [200] * len(tasks)


@pytest.mark.parametrize("stream", [False, True])
def test_the_admission_threshold(dynamo: Deployment, stream: bool) -> None:
    """Set live: what it refuses goes to another instance; where all are full the client hears 503 and Retry-After.
    Nobody is ill, and without the threshold all goes on."""

    async def work() -> None:
        async with routing(dynamo, retry={"budget": 1.0, "reserve": 50.0, "retry_after_s": 2.0}) as live:

            def refusals() -> int:
                return sum(live.of(name).refusals for name in ("far1", "far2", "near"))

            try:
                await admit(live, LONG)
                async with full(live, "far1"):
                    before = await live.counted()
                    for _ in range(3):
                        reply = await live.ask(LONG // 2, stream=stream)
                        assert (reply.status, reply.headers["X-Prfaas-Route"]) == (200, "remote")
                    counted = await live.counted()
                    assert counted["far1"] == before["far1"]
                    assert counted["far2"] == before["far2"] + 3
                one = refusals()
                async with full(live, "far1", "far2", "near"):
                    lengths = (SHORT, LONG, LONG + 1, LONG + 2)
                    refused = await asyncio.gather(*(live.ask(k, stream=stream) for k in lengths))
                    assert [(r.status, r.json["error"]["code"]) for r in refused] == [(503, "busy")] * 4
                    assert [r.headers["Retry-After"] for r in refused] == ["2"] * 4
                    fleet = list(live.router.forwarder.fleet)
                    assert {w.state for w in fleet} == {"up"}
                    assert all(w.breaker.allows(time.monotonic()) for w in fleet)
                    everywhere = refusals() - one
                    assert everywhere >= 4
                # the frontend looks anew when an instance reports its load
                await admit(live, None)
                again = await asyncio.gather(*(live.ask(k, stream=stream) for k in (SHORT, LONG)))
                assert [r.headers.get("X-Prfaas-Route") for r in again] == ["local", "remote"]
                assert set(live.troubles().values()) == {0}
                await live.idle()
                say(
                    f"admission threshold{', streamed' if stream else ''}: refusals (529) with one instance full: "
                    f"{one}, all answered; with all full: {everywhere}, 4 clients told 503 and Retry-After"
                )
            finally:
                await admit(live, None)

    run(work)


def test_mode_direct_admits_everything(dynamo: Deployment) -> None:
    """It takes the threshold and does not look at it."""

    async def work() -> None:
        async with routing(dynamo, "direct") as live:
            try:
                await admit(live, 1)
                async with full(live, "far1", "far2", "near"):
                    assert [(await live.ask(k)).status for k in (SHORT, LONG // 2)] == [200, 200]
                assert sum(w.refusals for w in live.router.forwarder.fleet) == 0
            finally:
                await admit(live, None)

    run(work)


# ---------------------------------------------------------------------- death


def test_a_killed_prefill_instance(dynamo: Deployment) -> None:
    """kill -9 with requests in flight: all are answered, later ones take the other one, then the near one; a new
    start is a new instance and is found."""

    async def work() -> None:
        async with routing(dynamo) as live:
            tasks = [asyncio.create_task(live.ask(LONG + k, 4, stream=k % 2 == 1)) for k in range(6)]
            far1 = live.of("far1")
            await until(lambda: far1.in_flight > 1, "requests are at far1")
            await asyncio.sleep(0.2)
            hit = far1.in_flight
            dynamo.mockers["far1"].kill()
            killed_s = time.monotonic()
            replies = await asyncio.gather(*tasks)
            took_s = time.monotonic() - killed_s
            assert [r.status for r in replies] == [200] * 6, [r.body for r in replies]
            assert all(len(r.text.split()) == 4 for r in replies)
            assert hit > 1
            for k in range(10):
                reply = await live.ask(LONG + k, 2, stream=k % 2 == 1)
                assert (reply.status, reply.headers["X-Prfaas-Route"]) == (200, "remote"), reply.body
            await until(lambda: far1.state == "down" or far1.removed, "it is not listed any more", LEASE_S)
            gone_s = time.monotonic() - killed_s
            before = live.of("far2").requests
            reply = await live.ask(LONG, 2)
            assert (reply.headers["X-Prfaas-Reason"], live.of("far2").requests) == ("rule", before + 1)

            dynamo.mockers["far2"].kill()
            for k in range(6):
                reply = await live.ask(LONG + k, 2, stream=k % 2 == 1)
                assert (reply.status, reply.headers["X-Prfaas-Route"]) == (200, "local"), reply.body
            remote = live.router.forwarder.fleet.remote_prefill["prfaas0"]
            await until(lambda: not remote.any_usable(time.monotonic()), "nobody is remote", LEASE_S)
            reply = await live.ask(LONG, 2)
            assert (reply.status, reply.headers["X-Prfaas-Reason"]) == (200, "no_remote")
            for name in ("near", "decode1", "decode2"):
                assert live.of(name).breaker.opened == 0

            old = live.ids["far1"]
            dynamo.mockers["far1"].start()
            await until(lambda: remote.any_usable(time.monotonic()), "the new one is found", START_S)
            live.ids = {**live.ids, "far1": remote.workers[0].spec.instance_id or ""}
            assert live.ids["far1"] != old
            end_s = time.monotonic() + 20.0
            while (reply := await live.ask(LONG, 2)).headers["X-Prfaas-Route"] != "remote":
                assert reply.status == 200
                assert time.monotonic() < end_s
                await asyncio.sleep(0.2)
            await live.idle()
            say(
                f"killed prefill instance: {hit} requests in flight there, all 6 answered {took_s:.1f} s after "
                f"the kill; gone from the list after {gone_s:.1f} s"
            )

    run(work, 150.0)


@pytest.mark.parametrize("mode", ["direct", "kv"])
def test_an_id_that_is_gone(dynamo: Deployment, mode: str) -> None:
    """Between two looks at the list the frontend's 400 means that the instance is gone, not that the client erred."""

    async def work() -> None:
        slow = {"canary": False, "ramp_s": 0.0, "probe_s": 600.0}
        found = {"url": dynamo.frontends[mode].url, "poll_s": 600.0, "groups": groups_of_instances()}
        async with routing(dynamo, mode, health=slow, discovery={"dynamo": found}) as live:
            near = live.of("near")
            dynamo.mockers["near"].kill()
            end_s = time.monotonic() + LEASE_S
            while live.ids["near"] in await live.frontend.listed(live.session):
                assert time.monotonic() < end_s
                await asyncio.sleep(0.1)
            status, answer = await live.frontend.post(
                live.session,
                COMPLETIONS,
                dynamo.body(SHORT),
                headers_for(live.ids["near"], live.ids["decode1"]),
            )
            assert (status, answer["message"]) == (400, "Invalid request"), "what this test is about"
            assert near.state == "up", "the router has not looked"
            reply = await live.ask(SHORT)
            assert reply.status == 503, "no other prefill worker is near"
            assert near.state == "down"
            assert (await live.ask(LONG)).status == 200
            assert live.of("decode1").failures + live.of("decode2").failures == 0

    run(work)


def test_a_killed_decode_instance(dynamo: Deployment) -> None:
    """In mid-stream: an error event and no end marker. Later requests find the other one; no prefill instance pays."""

    async def work() -> None:
        retry = {"budget": 1.0, "reserve": 50.0}
        async with routing(dynamo, retry=retry) as live:
            url = live.url + COMPLETIONS
            # the router lets the head of an answer go with its first token
            answers = await asyncio.gather(
                *(live.session.post(url, json=dynamo.body(SHORT, 1000, stream=True)) for _ in range(6))
            )
            assert [a.status for a in answers] == [200] * 6
            hit = live.of("decode1").in_flight
            dynamo.mockers["decode1"].kill()
            replies = [Reply(a.status, a.headers, await a.read()) for a in answers]
            broken = [r for r in replies if r.events[-1] != "[DONE]"]
            assert len(broken) == hit > 0
            assert all("error" in r.events[-1] for r in broken)
            assert all(len(r.text.split()) == 1000 for r in replies if r not in broken)
            statuses = [
                (await live.ask(LONG if k % 2 else SHORT, 2, stream=k % 4 > 1)).status for k in range(24)
            ]
            assert statuses == [200] * 24
            assert [live.of(name).breaker.opened for name in ("far1", "far2", "near", "decode2")] == [0] * 4
            # what a prefill instance holds for the dead one stays there for a while
            await live.idle("decode2")
            say(
                f"killed decode instance: {hit} streams cut with an error event, 24 later requests all answered"
            )

    run(work)


def test_a_killed_frontend(dynamo: Deployment) -> None:
    """Streams end with an error event, other requests are refused at once; with the new frontend all goes on."""

    async def work() -> None:
        async with routing(dynamo) as live:
            url = live.url + COMPLETIONS
            answers = await asyncio.gather(
                *(live.session.post(url, json=dynamo.body(SHORT, 1000, stream=True)) for _ in range(3))
            )
            task = asyncio.create_task(live.ask(8 * LONG, 2))
            await asyncio.sleep(0.3)
            live.frontend.kill()
            killed_s = time.monotonic()
            replies = [Reply(a.status, a.headers, await a.read()) for a in answers]
            assert all("error" in r.events[-1] for r in replies)
            refused = [await task, *[await live.ask(n) for n in (SHORT, LONG, SHORT)]]
            assert {r.status for r in refused} <= {502, 503}, [r.body for r in refused]
            assert all(int(r.headers["Retry-After"]) >= 1 for r in refused)
            took_s = time.monotonic() - killed_s
            fleet = live.router.forwarder.fleet
            await until(lambda: {w.state for w in fleet} == {"down"}, "all are down", 20.0 * PATIENCE)
            await live.idle()
            live.frontend.start()
            await until(
                lambda: all(w.usable(time.monotonic()) for w in fleet), "all are back", START_S + 60.0
            )
            end_s = time.monotonic() + 20.0 * PATIENCE
            for length in (SHORT, LONG):
                while (await live.ask(length)).status != 200:
                    assert time.monotonic() < end_s
                    await asyncio.sleep(0.2)
            await live.idle()
            say(
                f"killed frontend: 3 streams cut, 4 requests refused within {took_s:.1f} s, all back after its start"
            )

    run(work, 200.0)
