"""The project's own workers with two real hybrid classes behind the router: tokens, bytes, failures, roles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.real.engines import START_S
from tests.real.hybrid import MODELS, HybridEngine, folder_of, generated, layout_of
from tests.real.support import (
    CHAT,
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
)
from tests.serving.support import Reply, until

ALWAYS, NEVER = 0.0, 1e9
LENGTHS = (1, 2, 65, 256, 257, 700)
TOKENS = 12


@dataclass
class Trio:
    """A worker of each place."""

    model: str
    remote: HybridEngine
    local: HybridEngine
    decode: HybridEngine

    @property
    def places(self) -> dict[str, Place]:
        """The deployment."""
        return {
            "remote": Place(self.remote, "prfaas0", "prefill", {"bootstrap_port": self.remote.port}),
            "local": Place(self.local, "pd0", "prefill", {"bootstrap_port": self.local.port}),
            "decode": Place(self.decode, "pd0", "decode"),
        }


def started(*engines: HybridEngine) -> None:
    """Start workers and wait until they are up."""

    async def up() -> None:
        async with direct() as session:
            await asyncio.gather(*(engine.ready(session) for engine in engines))

    for engine in engines:
        engine.start()
    run(up, START_S + 60.0)


@pytest.fixture(scope="module", params=MODELS)
def trio(request: pytest.FixtureRequest) -> Iterator[Trio]:
    """Started once per model, killed whatever happens."""
    model = request.param
    engines = [
        HybridEngine(f"{model}-{name}", folder_of(model), role)
        for name, role in (("remote", "prefill"), ("local", "prefill"), ("decode", "decode"))
    ]
    try:
        started(*engines)
        yield Trio(model, *engines)
    finally:
        for engine in engines:
            engine.close()


def test_same_tokens_however_it_is_served(trio: Trio) -> None:
    """Remote prefill, local prefill, one worker alone, and transformers' own generate agree."""

    async def work() -> None:
        prompts = [Prompts(n).fresh(n) for n in LENGTHS]
        expected = await asyncio.to_thread(generated, trio.model, prompts, TOKENS)
        for threshold, route in ((ALWAYS, "remote"), (NEVER, "local")):
            async with routing(trio.places, threshold) as live:
                for prompt, tokens in zip(prompts, expected, strict=True):
                    reply = await live.ask(prompt, TOKENS)
                    assert reply.status == 200, reply.body
                    assert reply.headers["X-Prfaas-Route"] == route
                    assert reply.json["usage"]["prompt_tokens"] == len(prompt)
                    assert reply.json["usage"]["completion_tokens"] == TOKENS
                    assert ids_of(reply.json) == tokens, (route, len(prompt))
                    stream = await live.ask(prompt, TOKENS, stream=True)
                    assert streamed_ids(stream) == tokens
                    assert stream.events[-1] == "[DONE]"
                    assert ids_of(await live.alone(trio.decode, prompt, TOKENS)) == tokens
                await live.idle()
        say(
            f"{trio.model}: {len(LENGTHS)} prompts of {LENGTHS[0]}..{LENGTHS[-1]} tokens give the same {TOKENS} tokens "
            "by remote prefill, local prefill, one worker alone, and transformers' generate"
        )

    run(work, 400.0)


def test_chat_has_the_same_words(trio: Trio) -> None:
    """Chat, streamed and not, with usage."""

    async def work() -> None:
        async with routing(trio.places, ALWAYS) as live:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Which prompts does the remote cluster prefill?"}],
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
            }
            whole = await live.post(CHAT, body)
            stream = await live.post(
                CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}
            )
            assert whole.status == stream.status == 200
            assert whole.headers["X-Prfaas-Route"] == "remote"
            assert stream.text == whole.text == whole.json["choices"][0]["message"]["content"]
            usage = [e["usage"] for e in stream.events if isinstance(e, dict) and e.get("usage")]
            assert usage == [whole.json["usage"]]
            status, alone = await trio.decode.post(live.session, CHAT, body)
            assert status == 200
            assert alone["choices"][0]["message"]["content"] == whole.text

    run(work)


def test_bytes_are_a_fixed_state_and_bytes_per_token(trio: Trio) -> None:
    """What crosses is what the model's geometry says, to the byte, for every length."""

    async def work() -> None:
        layout, seen = layout_of(trio.model), []
        async with routing(trio.places, ALWAYS) as live:
            for tokens in LENGTHS[1:]:
                before = await trio.decode.figures(live.session)
                reply = await live.ask(Prompts(tokens + 1).fresh(tokens), 1)
                assert reply.headers["X-Prfaas-Route"] == "remote"
                moved = (await trio.decode.figures(live.session)).since(before)
                record = (await trio.decode.transfers(live.session))[-1]
                seen.append((tokens, int(moved.fetched_bytes)))
                assert moved.fetched_bytes == record["tensor_bytes"] == layout.transfer_bytes(tokens - 1)
                assert moved.fetched_tokens == tokens - 1
                assert 0 < record["wire_bytes"] - record["tensor_bytes"] < 400 * record["parts"]
                assert reply.headers["X-Prfaas-Kv-Bytes"] == str(record["tensor_bytes"])
            await live.idle()
        say(
            f"{trio.model}: {layout.fixed_bytes:,} B fixed + {layout.bytes_per_token:,} B per token but the last: "
            + ", ".join(f"{n} tokens {b:,} B" for n, b in seen)
        )

    run(work)


def test_both_legs_at_once(trio: Trio) -> None:
    """The same workers in the words of Mooncake: the router sees the time of the prefill itself."""

    async def work() -> None:
        async with routing(trio.places, ALWAYS, backend="vllm_mooncake") as live:
            for tokens in (1, 300):
                prompt = Prompts(9).fresh(tokens)
                reply = await live.ask(prompt, TOKENS)
                assert reply.status == 200, reply.body
                assert reply.headers["X-Prfaas-Route"] == "remote"
                assert ids_of(reply.json) == ids_of(await live.alone(trio.decode, prompt, TOKENS))
            await live.idle()
            assert live.metric("prefill_seconds_count", route="remote") == 2

    run(work)


def test_the_prefill_worker_is_killed_in_mid_prefill(trio: Trio) -> None:
    """Nothing is decoded from half a cache: another prefill, the same tokens."""

    async def work() -> None:
        prompt = Prompts(11).fresh(1500)
        async with routing(trio.places, ALWAYS) as live:
            task = asyncio.create_task(live.ask(prompt, TOKENS))
            try:
                await _some_parts_over(live, trio.decode)
                trio.remote.kill()
                killed_s = time.monotonic()
                reply = await task
            finally:
                task.cancel()
            assert reply.status == 200, reply.body
            assert reply.headers["X-Prfaas-Route"] == "local"
            # the router has it tried once more, to release what nobody can release any more
            records = await trio.decode.transfers(live.session)
            (record,) = [t for t in records if t["outcome"] == "failed" and t["parts"]]
            assert record["tensor_bytes"] < layout_of(trio.model).transfer_bytes(1499)
            say(
                f"{trio.model}: prefill worker killed with {record['parts']} parts over ({record['error']}); "
                f"answered by another one {time.monotonic() - killed_s:.1f} s later"
            )
            assert ids_of(reply.json) == ids_of(await live.alone(trio.decode, prompt, TOKENS))
            await live.idle("local", "decode")
        trio.remote.close()
        trio.remote.start()
        async with direct() as session:
            await trio.remote.ready(session)

    run(work, 200.0 + START_S)


async def _some_parts_over(live: Live, decode: HybridEngine) -> None:
    """Wait until a transfer is under way, with something fetched."""
    end_s = time.monotonic() + 60.0
    while not any(t["outcome"] == "open" and t["parts"] for t in await decode.transfers(live.session)):
        assert time.monotonic() < end_s, "no transfer came under way"
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------- changes of role


def test_a_worker_changes_its_role_under_load() -> None:
    """Prefill to decode and back, ten times each, while requests run: none lost, every token once."""
    model = "qwen3-next"
    engines = {
        "p0": HybridEngine("role-p0", folder_of(model), "prefill"),
        "p1": HybridEngine("role-p1", folder_of(model), "prefill"),
        "d0": HybridEngine("role-d0", folder_of(model), "decode"),
    }
    places = {
        name: Place(engine, "pd0", "decode" if name[0] == "d" else "prefill")
        for name, engine in engines.items()
    }
    prompts = [Prompts(100 + k).fresh(40 + 30 * k) for k in range(6)]

    async def work() -> None:
        expected = await asyncio.to_thread(generated, model, prompts, TOKENS)
        async with routing(places, NEVER, moves={"actuator": {"kind": "http"}}) as live:
            stop, wrong, served = asyncio.Event(), [], 0

            async def client(k: int) -> None:
                nonlocal served
                while not stop.is_set():
                    reply = await live.ask(prompts[k], TOKENS, stream=True)
                    served += 1
                    if reply.status != 200 or streamed_ids(reply) != expected[k]:
                        wrong.append((k, reply.status, reply.body[-300:]))

            clients = [asyncio.create_task(client(k)) for k in range(len(prompts))]
            took_s, refusals = [], 0
            try:
                for role in ("decode", "prefill") * 10:
                    await _worked(live, "p1")
                    refusals += await _refused_while_busy(live, engines["p1"], role)
                    took_s.append(await _move(live, "p1", role))
            finally:
                stop.set()
                await asyncio.gather(*clients)
            assert not wrong, wrong[0]
            say(
                f"{len(took_s)} changes of role under load in {', '.join(f'{s:.1f}' for s in took_s)} s: "
                f"{served} requests, none lost, every token once; "
                f"{refusals} orders refused with 409 while requests were under way"
            )
            assert served > len(prompts)
            assert refusals > 0
            await live.idle()

    try:
        started(*engines.values())
        run(work, 300.0)
    finally:
        for engine in engines.values():
            engine.close()


async def _worked(live: Live, name: str) -> None:
    """Wait until the router has sent a worker something in its present role."""
    worker = live.worker(name)
    before = worker.requests
    await until(lambda: worker.requests > before, f"{name} is given work", 60.0)


async def _refused_while_busy(live: Live, engine: HybridEngine, role: str) -> int:
    """An order without a drain while its requests run is refused and changes nothing."""
    other = "prefill" if role == "decode" else "decode"
    for _ in range(200):
        async with live.session.get(engine.url + "/role") as answer:
            state = await answer.json()
        assert state["role"] == other
        if state[f"{other}_legs"]:
            status, answered = await engine.turn(live.session, role)
            if status == 409:
                assert "under way" in answered["error"]["message"]
                return 1
            # it has just become idle, and has turned: back at once
            assert status == 200
            assert (await engine.turn(live.session, other))[0] == 200
        await asyncio.sleep(0.005)
    return 0


async def _move(live: Live, name: str, role: str) -> float:
    """An operator's order: the router drains, calls the worker, verifies and relabels; the seconds that took."""
    began_s = time.monotonic()
    moved: Reply = await live.admin("POST", f"/workers/{name}/role", {"role": role})
    assert moved.status == 200, moved.body
    assert moved.json["role"] == role
    return time.monotonic() - began_s


def test_a_changed_role_is_kept_to() -> None:
    """A worker refuses what its role does not serve with a status that makes a router try another one."""
    engine = HybridEngine("role-kept", folder_of("qwen3-next"), "prefill")

    async def work() -> None:
        async with direct() as session:
            prompt = Prompts(3).fresh(20)
            status, answer = await engine.post(session, "/v1/completions", asked(prompt, 2))
            assert (status, answer["error"]["code"]) == (503, "wrong_role")
            assert (await engine.turn(session, "both"))[0] == 200
            assert (await engine.post(session, "/v1/completions", asked(prompt, 2)))[0] == 200

    try:
        started(engine)
        run(work)
    finally:
        engine.close()
