"""A router of this process in front of real workers, and what tests ask of both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.exchange import Exchange
from tests.real.engines import MODEL, PATIENCE, Engine, Figures
from tests.real.skips import MEASURED
from tests.serving.support import TOKEN, Reply, Setup, until

SCENARIO = Path(__file__).parent / "tiny.yaml"
#: Well below the lease of staged KV, with room for a busy machine.
SOON_S = 15.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
os.environ["PRFAAS_TEST_TOKEN"] = TOKEN


def run(work: Callable[[], Coroutine[Any, Any, Any]], limit_s: float = 180.0) -> Any:
    """Run a test's coroutine with a limit of time."""

    async def limited() -> Any:
        async with asyncio.timeout(limit_s * PATIENCE):
            return await work()

    return asyncio.run(limited())


class Prompts:
    """Prompts as token ids, none like another, so that no prefix cache holds any of them."""

    def __init__(self, seed: int) -> None:
        self._luck = np.random.default_rng(np.random.SeedSequence(seed))

    def fresh(self, tokens: int) -> list[int]:
        """A prompt of so many tokens; special tokens are left out."""
        found: list[int] = self._luck.integers(8, 440, size=tokens).tolist()
        return found


def asked(prompt: Any, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy completion of exactly so many tokens, which come back as ids too."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def ids_of(answer: Any) -> list[int]:
    """Generated token ids of a whole answer."""
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def streamed_ids(reply: Reply) -> list[int]:
    """Generated token ids of a stream."""
    return [
        token
        for event in reply.events
        if isinstance(event, dict)
        for choice in event["choices"]
        for token in choice.get("token_ids") or ()
    ]


@dataclass
class Place:
    """A worker and its place in the deployment."""

    engine: Engine
    cluster: str
    role: str
    entry: dict[str, Any] = field(default_factory=dict)
    """More fields of its entry in the configuration."""


@dataclass
class Pair:
    """A prefill worker in the remote cluster, and the decode worker."""

    remote: Engine
    decode: Engine

    @property
    def places(self) -> dict[str, Place]:
        """The deployment."""
        return {
            "remote": Place(self.remote, "prfaas0", "prefill"),
            "decode": Place(self.decode, "pd0", "decode"),
        }


@dataclass
class Live(Setup):
    """A running router in front of real workers."""

    engines: Mapping[str, Engine] = field(default_factory=dict)

    async def ask(self, prompt: Any, tokens: int = 8, **fields: Any) -> Reply:
        """A completion through the router."""
        return await self.post(COMPLETIONS, asked(prompt, tokens, **fields))

    async def figures(self) -> dict[str, Figures]:
        """Counters of all workers that run."""
        return {name: await engine.figures(self.session) for name, engine in self.engines.items()}

    async def alone(self, engine: Engine, prompt: Any, tokens: int = 8, **fields: Any) -> Any:
        """The same request on one worker, past the router."""
        status, answer = await engine.post(self.session, COMPLETIONS, asked(prompt, tokens, **fields))
        assert status == 200, answer
        return answer

    async def free(self, *names: str, within_s: float = SOON_S) -> float:
        """Wait until workers hold no KV and run nothing; the seconds that took."""
        began_s = time.monotonic()
        while True:
            held = {
                name: (figures.kv_use, figures.busy)
                for name in names or self.engines
                if (figures := await self.engines[name].figures(self.session)).kv_use or figures.busy
            }
            took_s = time.monotonic() - began_s
            if not held:
                return took_s
            assert took_s < within_s, f"(share of KV room, requests) still there: {held}"
            await asyncio.sleep(0.1)

    async def idle(self, *names: str, within_s: float = SOON_S) -> float:
        """Wait until nothing is under way anywhere and nothing is held; the seconds that took at the workers."""
        f = self.router.forwarder
        await until(lambda: f.open_requests == 0 and not f.background, "nothing under way", within_s)
        assert f.handles_open == 0
        assert all(w.in_flight == 0 and not w.assigned for w in f.fleet)
        assert all(p.waiting == 0 for p in f.fleet.pools())
        assert all(link.open_flows == 0 for link in f.paths.links.values())
        return await self.free(*names, within_s=within_s)


@contextlib.asynccontextmanager
async def routing(
    places: Mapping[str, Place], threshold: float, *, ready: bool = True, **config: Any
) -> AsyncIterator[Live]:
    """A router in front of workers.

    Args:
        places: by name.
        threshold: tokens.
        ready: wait until all workers are up.
        config: sections of the configuration.
    """
    model = next(iter(places.values())).engine.model
    raw: dict[str, Any] = {
        "backend": "vllm_nixl",
        "scenario": str(SCENARIO),
        "listen": {"port": 0},
        "admin": {"port": 0, "token_env": "PRFAAS_TEST_TOKEN"},
        "workers": [
            {"name": n, "url": p.engine.url, "cluster": p.cluster, "role": p.role, **p.entry}
            for n, p in places.items()
        ],
        "decision": {"threshold_tokens": threshold},
        "length": {"tokenizer": str(model)},
        "cache": {"enabled": False},
        # a busy machine accepts connections late
        "upstream": {"connect_s": 20.0},
        **config,
        "health": {
            "canary": False,
            "ramp_s": 0.0,
            "load_poll_s": 0.5,
            "probe_timeout_s": 5.0,
            **config.get("health", {}),
        },
        "deadlines": {"transfer_floor_s": 20.0, **config.get("deadlines", {})},
    }
    router = Router(Resolved(RouterConfig.model_validate(raw)))
    async with contextlib.AsyncExitStack() as stack:
        await router.start()
        stack.push_async_callback(router.close)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120 * PATIENCE)
        )
        stack.push_async_callback(session.close)
        live = Live(router, {}, session, engines={n: p.engine for n, p in places.items()})
        if ready:
            await until(
                lambda: all(w.state == "up" for w in router.forwarder.fleet),
                "workers are up",
                30.0 * PATIENCE,
            )
        yield live


def say(text: str) -> None:
    """A measured figure, shown at the end of the run."""
    MEASURED.append(text)


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exchange]]:
    """All exchanges of a router, so that a test can see in which phase a request is."""
    seen: list[Exchange] = []
    original = Exchange.__init__

    def remember(self: Exchange, *arguments: Any) -> None:
        original(self, *arguments)
        seen.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "__init__", remember)
        yield seen


@contextlib.asynccontextmanager
async def direct() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a router."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120 * PATIENCE)) as session:
        yield session
