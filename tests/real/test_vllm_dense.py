"""Three real vLLM workers with a dense model behind the router: remote prefill, local prefill, decode.

Real engines prove protocol, byte laws and failure handling. Nothing here is said about speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml

from prfaas_serving.exchange import Exchange
from prfaas_serving.upstream import ILL
from tests.real.engines import LEASE_S, MAX_MODEL_TOKENS, MODEL, START_S, Engine, free_port
from tests.real.models import folder_of, layout_of
from tests.real.support import (
    CHAT,
    COMPLETIONS,
    SCENARIO,
    SOON_S,
    Live,
    Place,
    Prompts,
    asked,
    direct,
    ids_of,
    routing,
    run,
    say,
    streamed_ids,
    watched,
)
from tests.serving.support import TOKEN, Reply, until

PAGE_TOKENS = 128
"""Tokens of one KV page on a CPU worker."""
ALWAYS, NEVER = 0.0, 1e9


class Trio:
    """The workers that all tests of this file share."""

    def __init__(self) -> None:
        model = folder_of("dense")
        self.remote = Engine("remote", model, "prefill")
        self.local = Engine("local", model, "prefill")
        self.decode = Engine("decode", model, "decode", arguments=("--max-num-queued-reqs", "4"))
        self.prompts = Prompts(1)

    @property
    def all(self) -> tuple[Engine, ...]:
        """All three."""
        return self.remote, self.local, self.decode

    def places(self, *, local: bool = True, **entries: dict[str, Any]) -> dict[str, Place]:
        """The deployment; `entries` are more fields of workers by name. Without a local prefill worker the decode
        worker prefills what is not remote."""
        found = {
            "remote": Place(self.remote, "prfaas0", "prefill"),
            "local": Place(self.local, "pd0", "prefill"),
            "decode": Place(self.decode, "pd0", "decode" if local else "both"),
        }
        if not local:
            del found["local"]
        for name, entry in entries.items():
            found[name].entry = entry
        return found


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    """Started once, killed whatever happens."""
    workers = Trio()
    began_s = time.monotonic()

    async def up() -> None:
        async with direct() as session:
            await asyncio.gather(*(engine.ready(session) for engine in workers.all))

    try:
        for engine in workers.all:
            engine.start()
        run(up, START_S + 100.0)
        say(f"three workers up after {time.monotonic() - began_s:.0f} s")
        yield workers
    finally:
        for engine in workers.all:
            engine.close()


class Between:
    """A backend that does something in the moment between the legs, when staged KV is on its way to be fetched."""

    def __init__(self, live: Live, act: Callable[[], None]) -> None:
        self._backend = live.router.forwarder.backend
        self._act = act
        live.router.forwarder.backend = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode_leg(self, *arguments: Any) -> Any:
        """As the backend's, after the act (once)."""
        act, self._act = self._act, lambda: None
        act()
        return self._backend.decode_leg(*arguments)


async def reset(live: Live) -> None:
    """Empty all prefix caches, so that the next request starts from nothing."""
    for engine in live.engines.values():
        async with live.session.post(engine.url + "/reset_prefix_cache") as answer:
            assert answer.status == 200


# ---------------------------------------------------------------------- what a request gets


@pytest.mark.parametrize("tokens", [100, 1000, 4000])
def test_same_tokens_by_every_way(trio: Trio, tokens: int) -> None:
    """Remote prefill, local prefill, decode worker alone, and one process past the router."""

    async def work() -> None:
        prompt = trio.prompts.fresh(tokens)
        found: dict[str, list[int]] = {}
        for way, threshold, local in (
            ("remote", ALWAYS, True),
            ("local", NEVER, True),
            ("alone", NEVER, False),
        ):
            async with routing(trio.places(local=local), threshold) as live:
                before = await live.figures()
                reply = await live.ask(prompt, 24)
                assert reply.status == 200, reply.body
                assert reply.headers["X-Prfaas-Route"] == ("remote" if way == "remote" else "local")
                await live.idle()
                moved = {n: f.since(before[n]) for n, f in (await live.figures()).items()}
                assert (moved["decode"].fetched_bytes > 0) == (way != "alone")
                assert moved["remote"].computed_tokens == (tokens if way == "remote" else 0)
                found[way] = ids_of(reply.json)
                await reset(live)
        async with direct() as session:
            _, answer = await trio.local.post(session, COMPLETIONS, asked(prompt, 24))
            found["one process"] = ids_of(answer)
        assert len(found["one process"]) == 24
        assert len(set(found["one process"])) > 4, "the model says something"
        assert len({tuple(ids) for ids in found.values()}) == 1, found

    run(work)


def test_the_threshold_is_respected(trio: Trio) -> None:
    """At it and below local, above remote: counted where the tokens were computed and where KV was fetched."""

    async def work() -> None:
        threshold = 1000
        for local in (False, True):
            async with routing(trio.places(local=local), threshold) as live:
                for tokens in (200, threshold - 1, threshold, threshold + 1, 3000):
                    before = await live.figures()
                    reply = await live.ask(trio.prompts.fresh(tokens), 2)
                    after = await live.figures()
                    counted = {n: f.since(before[n]) for n, f in after.items()}
                    remote = tokens > threshold
                    assert reply.headers["X-Prfaas-Route"] == ("remote" if remote else "local")
                    assert reply.headers["X-Prfaas-Reason"] == "rule"
                    assert counted["remote"].computed_tokens == (tokens if remote else 0)
                    decode = counted["decode"]
                    if local:
                        assert counted["local"].computed_tokens == (0 if remote else tokens)
                    fetched = remote or local
                    assert decode.fetched_tokens == (tokens if fetched else 0), (tokens, decode)
                    assert decode.computed_tokens == (0 if fetched else tokens), (tokens, decode)
                await live.idle()
                # what an alarm would look at: KV really moved
                decode_worker = live.worker("decode")
                await until(lambda: (decode_worker.kv_moved_share or 0) > 0.99, "KV moved")  # noqa: B023

    run(work)


def test_bytes_of_the_dense_model(trio: Trio) -> None:
    """Whole pages of bytes per token; nothing fixed."""

    async def work() -> None:
        layout = layout_of("dense")
        async with routing(trio.places(), ALWAYS) as live:
            for tokens in (1, PAGE_TOKENS, PAGE_TOKENS + 1, 5 * PAGE_TOKENS, 2000):
                before = await trio.decode.figures(live.session)
                await live.ask(trio.prompts.fresh(tokens), 2)
                moved = (await trio.decode.figures(live.session)).since(before)
                expected = layout.reserved_bytes(tokens, PAGE_TOKENS)
                assert moved.fetched_bytes == expected, tokens
            await live.idle()

    run(work)


def test_streams_are_intact(trio: Trio) -> None:
    """Same text, ids, usage and end marker as from one worker; passed on piece by piece."""

    async def work() -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": " ".join(map(str, trio.prompts.fresh(300)))}],
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        async with routing(trio.places(), ALWAYS) as live:
            through = await live.post(CHAT, body)
            async with live.session.post(trio.local.url + CHAT, json=body) as answer:
                alone = Reply(answer.status, answer.headers, await answer.read())
            assert through.status == alone.status == 200
            assert through.headers["X-Prfaas-Route"] == "remote"
            assert through.headers["Content-Type"] == alone.headers["Content-Type"]
            assert through.events[-1] == alone.events[-1] == "[DONE]"
            assert through.text == alone.text != ""
            assert streamed_ids(through) == streamed_ids(alone)
            assert len(streamed_ids(through)) == 40
            # a busy worker puts more than one token into an event, so events are not compared one by one
            for reply in (through, alone):
                *content, usage, end = reply.events
                ended = [c["finish_reason"] for e in content for c in e["choices"]]
                assert ended == [None] * (len(ended) - 1) + ["length"]
                assert (usage["choices"], end) == ([], "[DONE]")
            assert through.events[-2]["usage"]["completion_tokens"] == 40
            assert through.events[-2]["usage"]["prompt_tokens"] == alone.events[-2]["usage"]["prompt_tokens"]
            assert len({e["id"] for e in through.events[:-1]}) == 1
            assert len(through.pieces) > 2, "the stream came in one piece"
            await live.idle()

    run(work)


def test_usage_is_right(trio: Trio) -> None:
    """Counts of the decode worker, cached tokens of the worker that prefilled."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS) as live:
            shared = trio.prompts.fresh(10 * PAGE_TOKENS)
            for cached, tail in ((0, 50), (10 * PAGE_TOKENS, 70)):
                reply = await live.ask(shared + trio.prompts.fresh(tail), 5)
                usage = reply.json["usage"]
                assert usage["prompt_tokens"] == len(shared) + tail
                assert usage["completion_tokens"] == 5
                assert usage["total_tokens"] == len(shared) + tail + 5
                assert usage["prompt_tokens_details"]["cached_tokens"] == cached
            assert reply.json.get("kv_transfer_params") is None
            hosts = [e.url.removeprefix("http://") for e in trio.all]
            assert not any(host.encode() in reply.body for host in hosts)
            await live.idle()

    run(work)


def test_many_at_once(trio: Trio) -> None:
    """Short and long prompts together: every one gets its own tokens, by the route of its length."""

    async def work() -> None:
        prompts = [trio.prompts.fresh(n) for n in (100, 1500, 300, 2500, 700, 1200, 50, 1800)]
        async with routing(trio.places(), 1000) as live:
            replies = await asyncio.gather(*(live.ask(p, 12) for p in prompts))
            await live.idle()
            for prompt, reply in zip(prompts, replies, strict=True):
                assert reply.status == 200
                assert reply.headers["X-Prfaas-Route"] == ("remote" if len(prompt) > 1000 else "local")
                assert ids_of(reply.json) == ids_of(await live.alone(trio.local, prompt, 12))

    run(work)


# ---------------------------------------------------------------------- what goes wrong


async def leave(live: Live, body: Any, when: Callable[[], Any]) -> None:
    """Send a request and drop the connection once something is true."""
    task = asyncio.create_task(live.post(COMPLETIONS, body))
    await until(lambda: task.done() or when(), "the moment to leave", 60.0)
    assert not task.done(), "the answer came before the client could leave"
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("phase", ["queue", "prefill", "transfer", "decode", "stream"])
def test_a_client_leaves(trio: Trio, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every phase: engines stop, all KV is free long before any lease ends, the next one is served."""

    async def work() -> None:
        entries = {"decode": {"max_concurrent": 1}} if phase == "queue" else {}
        with watched(monkeypatch) as seen:
            async with routing(trio.places(**entries), ALWAYS) as live:
                await _leave_in(phase, live, seen)
                took_s = await live.idle()
                say(f"client left in phase {phase}: all KV free after {took_s:.1f} s (lease {LEASE_S} s)")
                # of an answer in one piece the router sees nothing between the hand-over and its end
                assert live.metric("client_gone_total", phase="transfer" if phase == "decode" else phase) == 1
                if phase == "queue":
                    assert live.metric("client_gone_total", phase="stream") == 1
                prompt = trio.prompts.fresh(1100)
                reply = await live.ask(prompt, 4)
                assert ids_of(reply.json) == ids_of(await live.alone(trio.local, prompt, 4))
                assert reply.headers["X-Prfaas-Route"] == "remote"
                await live.idle()

    async def _leave_in(phase: str, live: Live, seen: list[Exchange]) -> None:
        long, more = trio.prompts.fresh(3000), trio.prompts.fresh(3000)
        if phase == "queue":
            # its KV is staged while it waits for the one place at the decode worker, which a long answer has
            body = asked(long, 12_000, stream=True)
            async with live.session.post(live.url + COMPLETIONS, json=body) as first:
                assert await first.content.readany()
                await leave(
                    live,
                    asked(more, 4),
                    lambda: seen[-1].phase == "queue" and live.router.forwarder.handles_open == 1,
                )
                await until(
                    lambda: live.router.forwarder.handles_open == 0, "the handle is given back", SOON_S
                )
                await live.free("remote")
                first.close()
        elif phase == "prefill":
            body = asked(trio.prompts.fresh(MAX_MODEL_TOKENS - 100), 4)
            began: list[float] = []

            def running() -> bool:
                if seen and seen[0].phase == "prefill":
                    began.append(time.monotonic())
                return bool(began) and time.monotonic() - began[0] > 0.3

            await leave(live, body, running)
        elif phase == "transfer":
            moment: list[bool] = []
            Between(live, lambda: moment.append(True))
            await leave(live, asked(long, 400), lambda: moment)
        elif phase == "decode":
            body = asked(long, 600)
            await leave(live, body, lambda: seen and seen[0].phase == "transfer" and _decoding(seen[0]))
        else:
            body = asked(long, 600, stream=True)
            async with live.session.post(live.url + COMPLETIONS, json=body) as answer:
                for _ in range(3):
                    assert await answer.content.readany()
                answer.close()

    run(work)


def _decoding(exchange: Exchange) -> bool:
    """Whether the decode worker has the cache and generates."""
    return time.monotonic() - exchange.started_s > 3.0


def test_staged_kv_stays_until_somebody_gives_it_back(trio: Trio) -> None:
    """What the router protects from: a prefill leg without a decode leg holds its blocks for the whole lease."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS) as live:
            leg = {"do_remote_decode": True, "do_remote_prefill": False}
            prompt = trio.prompts.fresh(2000)
            answer = await live.alone(trio.remote, prompt, 1, kv_transfer_params=leg)
            await asyncio.sleep(3.0)
            assert (await trio.remote.figures(live.session)).kv_use > 0
            await live.alone(trio.decode, prompt, 1, kv_transfer_params=answer["kv_transfer_params"])
            await live.free()

    run(work)


def test_an_orphaned_handle_is_released_at_once(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router itself fails between the legs: what was staged does not wait for its lease."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS) as live:
            held: list[float] = []

            def fall() -> None:
                held.append(live.router.forwarder.handles_open)
                raise RuntimeError("the router stumbles here")

            Between(live, fall)
            with contextlib.suppress(aiohttp.ClientError):
                reply = await live.ask(trio.prompts.fresh(2000), 4)
                assert reply.status >= 500
            assert held == [1]
            took_s = await live.idle()
            assert live.metric("handles_released_total", outcome="released") == 1
            say(f"orphaned handle: blocks free after {took_s:.1f} s (lease {LEASE_S} s)")

    run(work)


def test_the_decode_worker_rejects(trio: Trio) -> None:
    """A mistake that only the decode leg shows: the client gets the engine's words, nothing stays staged."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS) as live:
            before = await live.figures()
            reply = await live.ask(trio.prompts.fresh(2000), 4, min_tokens=10)
            assert reply.status == 400, reply.body
            assert "min_tokens" in reply.json["error"]["message"]
            took_s = await live.idle()
            counted = {n: f.since(before[n]) for n, f in (await live.figures()).items()}
            assert counted["remote"].computed_tokens == 2000, "it was prefilled and staged"
            assert live.metric("handles_released_total", outcome="released") == 1
            assert all(w.failures == 0 for w in live.router.forwarder.fleet), "a client's mistake"
            say(f"decode reject: blocks free after {took_s:.1f} s (lease {LEASE_S} s)")

            # more than the model's length: refused before anything is prefilled
            before = await live.figures()
            reply = await live.ask(trio.prompts.fresh(2000), MAX_MODEL_TOKENS + 1)
            assert reply.status == 400
            assert "max_tokens" in reply.json["error"]["message"]
            counted = {n: f.since(before[n]) for n, f in (await live.figures()).items()}
            assert counted["remote"].computed_tokens == 0
            await live.idle()

    run(work)


def test_more_tokens_than_there_is_room_for(trio: Trio) -> None:
    """The engine gives what there is, so that such a prompt is as remote as any other."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS) as live:
            body = asked(trio.prompts.fresh(2000), MAX_MODEL_TOKENS, stream=True)
            async with live.session.post(live.url + COMPLETIONS, json=body) as answer:
                assert answer.status == 200
                assert answer.headers["X-Prfaas-Route"] == "remote"
                assert await answer.content.readany()
                answer.close()
            await live.idle()

    run(work)


def test_a_full_queue_is_503(trio: Trio) -> None:
    """More than the decode worker takes: 503 with Retry-After for some, right answers for the others, nobody is ill."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS, retry={"reserve": 1.0}) as live:
            prompts = [trio.prompts.fresh(600 + k) for k in range(40)]
            replies = await asyncio.gather(*(live.ask(p, 48) for p in prompts))
            took_s = await live.idle()
            statuses = [r.status for r in replies]
            assert set(statuses) == {200, 503}, statuses
            for reply in replies:
                if reply.status == 503:
                    assert reply.json["error"]["code"] in {"busy", "retry_budget"}, reply.body
                    assert int(reply.headers["Retry-After"]) >= 1
                else:
                    assert len(ids_of(reply.json)) == 48
            served = [k for k, r in enumerate(replies) if r.status == 200]
            for k in served[:2]:
                assert ids_of(replies[k].json) == ids_of(await live.alone(trio.local, prompts[k], 48))
            decode = live.worker("decode")
            assert decode.refusals > 0
            failures = [k for k in ILL if live.metric("worker_failures_total", worker="decode", kind=k)]
            assert (decode.failures, failures) == (0, [])
            assert decode.breaker.allows(time.monotonic())
            say(
                f"full queue: {len(served)} of {len(prompts)} served, {statuses.count(503)} times 503, "
                f"blocks free after {took_s:.1f} s"
            )

    run(work)


QUICK = {"prefill_floor_s": 8.0, "transfer_floor_s": 6.0}
"""Deadlines of these tests: long enough for a busy machine."""


def test_a_frozen_prefill_worker(trio: Trio) -> None:
    """SIGSTOP to the whole group, before the prefill and between the legs: local prefill, same tokens, and back."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS, deadlines=QUICK) as live:
            prompts = [trio.prompts.fresh(1200 + k) for k in range(3)]
            try:
                Between(live, lambda: trio.remote.signal(signal.SIGSTOP))
                began_s = time.monotonic()
                between = await live.ask(prompts[0], 8)
                between_s = time.monotonic() - began_s
                assert between.status == 200, between.body
                assert between.headers["X-Prfaas-Route"] == "local"
                assert between.headers["X-Prfaas-Reason"] == "transfer_deadline"
                before = await asyncio.gather(*(e.figures(live.session) for e in (trio.local, trio.decode)))
                began_s = time.monotonic()
                frozen = await live.ask(prompts[1], 8)
                frozen_s = time.monotonic() - began_s
                assert frozen.status == 200, frozen.body
                assert frozen.headers["X-Prfaas-Route"] == "local"
                assert (await trio.local.figures(live.session)).since(before[0]).computed_tokens == 1201
                await until(lambda: live.worker("remote").state == "down", "it is seen to be down", 30.0)
            finally:
                trio.remote.signal(signal.SIGCONT)
            await until(lambda: live.worker("remote").usable(time.monotonic()), "it is back", 30.0)
            again = await live.ask(prompts[2], 8)
            assert again.headers["X-Prfaas-Route"] == "remote"
            await live.idle(within_s=LEASE_S / 2)
            for prompt, reply in zip(prompts, (between, frozen, again), strict=True):
                assert ids_of(reply.json) == ids_of(await live.alone(trio.local, prompt, 8))
            say(
                f"frozen prefill group: answered after {between_s:.1f} s (stopped between the legs) "
                f"and {frozen_s:.1f} s (stopped before)"
            )

    run(work)


def test_the_command(trio: Trio, tmp_path: Path) -> None:
    """`prfaas serve` as a process: ready after real generations over every path, then serving, then a drain."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    port = free_port()
    config = tmp_path / "router.yaml"
    raw = {
        "backend": "vllm_nixl",
        "scenario": str(SCENARIO),
        "listen": {"port": port},
        "admin": {"port": 0, "token_file": str(token)},
        "workers": [
            {"name": n, "url": p.engine.url, "cluster": p.cluster, "role": p.role}
            for n, p in trio.places().items()
        ],
        "decision": {"threshold_tokens": 1000},
        "length": {"tokenizer": str(trio.decode.model)},
    }
    config.write_text(yaml.safe_dump(raw))
    process = subprocess.Popen(
        [sys.executable, "-m", "prfaas_env.cli", "serve", "--config", str(config)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ,
    )

    async def work() -> None:
        async with direct() as session:
            url = f"http://127.0.0.1:{port}"
            end_s = time.monotonic() + 60.0
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url + "/ready") as answer:
                        if answer.status == 200:
                            break
                assert process.poll() is None
                assert time.monotonic() < end_s, "never ready"
                await asyncio.sleep(0.1)
            for tokens, route in ((400, "local"), (1400, "remote")):
                prompt = trio.prompts.fresh(tokens)
                async with session.post(url + COMPLETIONS, json=asked(prompt, 6)) as answer:
                    assert answer.status == 200
                    assert answer.headers["X-Prfaas-Route"] == route
                    found = ids_of(orjson.loads(await answer.read()))
                _, alone = await trio.local.post(session, COMPLETIONS, asked(prompt, 6))
                assert found == ids_of(alone)

    try:
        run(work)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
        assert process.returncode == 0, errors[-2000:]
        assert b"Traceback" not in errors
    finally:
        process.kill()
        process.wait()


def test_a_killed_prefill_worker(trio: Trio) -> None:
    """kill -9 of the whole group, in mid-prefill and between the legs: same tokens; a new one takes its place."""

    async def work() -> None:
        async with routing(trio.places(), ALWAYS, deadlines={"transfer_floor_s": 20.0}) as live:
            prompt = trio.prompts.fresh(MAX_MODEL_TOKENS - 100)
            task = asyncio.create_task(live.ask(prompt, 8))
            remote = live.worker("remote")
            await until(lambda: remote.in_flight == 1, "the prefill runs", 30.0)
            await asyncio.sleep(0.3)
            assert not task.done()
            trio.remote.kill()
            killed_s = time.monotonic()
            during = await task
            during_s = time.monotonic() - killed_s
            assert during.status == 200, during.body
            assert during.headers["X-Prfaas-Route"] == "local"
            assert during.headers["X-Prfaas-Reason"].startswith("prefill_")
            assert ids_of(during.json) == ids_of(await live.alone(trio.local, prompt, 8))
            await until(lambda: remote.state == "down", "it is seen to be down", 30.0)
            prompt = trio.prompts.fresh(1100)
            reply = await live.ask(prompt, 4)
            assert (reply.status, reply.headers["X-Prfaas-Reason"]) == (200, "no_remote")
            await live.idle("local", "decode")

            # a new one at the same address is another peer
            port = trio.remote.port
            trio.remote.start(port)
            await trio.remote.ready(live.session)
            await until(lambda: remote.usable(time.monotonic()), "the new one is used", 30.0)
            prompt = trio.prompts.fresh(1200)
            before = await live.figures()
            reply = await live.ask(prompt, 8)
            assert reply.status == 200
            assert reply.headers["X-Prfaas-Route"] == "remote"
            moved = (await trio.decode.figures(live.session)).since(before["decode"])
            assert moved.fetched_tokens == 1200
            assert ids_of(reply.json) == ids_of(await live.alone(trio.local, prompt, 8))
            await live.idle()

            prompt = trio.prompts.fresh(1300)
            Between(live, trio.remote.kill)
            began_s = time.monotonic()
            between = await live.ask(prompt, 8)
            between_s = time.monotonic() - began_s
            assert between.status == 200, between.body
            assert ids_of(between.json) == ids_of(await live.alone(trio.local, prompt, 8))
            if between.headers["X-Prfaas-Route"] == "remote":
                # the engine has prefilled the prompt itself, and says so
                failed = "vllm:nixl_num_failed_transfers_total"
                decode = live.worker("decode")
                await until(lambda: decode.load.fields.get(failed), "the router has read it")
                assert live.metric("worker_failed_transfers", worker="decode") > 0
            # staged KV died with its worker: nobody has to be told
            await live.free("local", "decode")
            say(
                f"killed prefill group: answered {during_s:.1f} s after the kill in mid-prefill, "
                f"after {between_s:.1f} s in all for a kill between the legs"
            )

    run(work, 400.0)
