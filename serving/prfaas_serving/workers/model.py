"""What a worker needs of a model, and the one thread that it runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from prfaas_serving.workers.parts import ByteLaw, Part

T = TypeVar("T")
#: A model's cache of one request; opaque to everyone but the model.
Cache = Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else drawn with a seed of the request's own."""

    temperature: float = 0.0
    seed: int = 0


class Model(Protocol):
    """A causal language model. All calls but those for text come from one thread, one at a time."""

    name: str
    max_model_len: int
    law: ByteLaw
    fingerprint: str
    """Of its weights and configuration: caches go only between equal models."""
    eos_ids: frozenset[int]
    vocabulary: int
    """Number of token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """Token ids of a conversation, ready for the answer. ValueError: the messages cannot be written out."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""

    def new_cache(self) -> Cache:
        """An empty cache."""

    def extend(self, cache: Cache, ids: Sequence[int], computed: Callable[[int], None]) -> None:
        """Run tokens through all layers; `computed(layer)` is called after each layer, when its cache holds them."""

    def part(self, cache: Cache, layer: int, start: int, stop: int) -> Part:
        """A layer's part: its state, or keys and values of tokens start..stop. A copy, safe from later changes."""

    def load(self, parts: Sequence[Part]) -> Cache:
        """The cache that whole, checked parts make. ValueError: a tensor is missing or has another shape."""

    def next_token(self, cache: Cache, token: int, sampling: Sampling, number: int) -> int:
        """Run one token and choose the one after it; `number` counts the tokens of the answer from 0."""


class ModelThread:
    """A model in a thread of its own, so that the HTTP loop never waits for it.

    Prefills take turns, first come first served; decode steps of all requests come between their chunks.

    Args:
        model: the model.
        chunk_tokens: tokens per piece of a prefill. Pieces are cut at the same places whoever prefills, so that the
            same sums are made in the same order.
    """

    def __init__(self, model: Model, chunk_tokens: int) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.waiting = 0
        """Prefills that wait for their turn."""
        self.running = 0
        """Prefills at the model: 1 or 0."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """Let the thread end after what it is doing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def prefill(
        self,
        ids: Sequence[int],
        began: Callable[[], None] | None = None,
        emit: Callable[[Part], None] | None = None,
    ) -> Cache:
        """The cache of some tokens.

        Args:
            ids: the tokens, at least one.
            began: called when its turn has come.
            emit: gets each part as soon as it is final, in this event loop: keys and values after their layer in every
                piece, states after their layer in the last one.
        """
        loop = asyncio.get_running_loop()
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            if began is not None:
                began()
            cache = await self.call(self.model.new_cache)
            for start in range(0, len(ids), self.chunk_tokens):
                stop = min(start + self.chunk_tokens, len(ids))
                await self.call(self._piece, loop, cache, ids, start, stop, emit)
            return cache
        finally:
            self.running -= 1
            self._turn.release()

    def _piece(
        self,
        loop: asyncio.AbstractEventLoop,
        cache: Cache,
        ids: Sequence[int],
        start: int,
        stop: int,
        emit: Callable[[Part], None] | None,
    ) -> None:
        model, last = self.model, stop == len(ids)

        def computed(layer: int) -> None:
            if emit is None:
                return
            if not model.law.is_state(layer):
                loop.call_soon_threadsafe(emit, model.part(cache, layer, start, stop))
            elif last:
                loop.call_soon_threadsafe(emit, model.part(cache, layer, 0, stop))

        model.extend(cache, ids[start:stop], computed)
