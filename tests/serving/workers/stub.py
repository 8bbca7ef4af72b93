"""A model without a model: its next token is a digest of all tokens so far, which only a whole, right cache gives."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from prfaas_env.profiles.geometry import FullAttention, LinearAttention
from prfaas_serving.workers.model import Sampling
from prfaas_serving.workers.parts import ByteLaw, Part
from prfaas_serving.workers.server import ModelWorker
from prfaas_serving.workers.settings import WorkerSettings

#: 1 x 4 x 4 values of 4 bytes, and 3 inputs of 2 channels: 64 + 24 bytes.
STATE = LinearAttention(
    layers=1,
    heads=1,
    k_head_dim=4,
    v_head_dim=4,
    state_dtype_bytes=4,
    conv_channels=2,
    conv_kernel=4,
    conv_dtype_bytes=4,
)
#: 2 + 2 values of 4 bytes per token.
ATTENTION = FullAttention(layers=1, kv_heads=1, k_head_dim=2, v_head_dim=2, dtype_bytes=4)
LAW = ByteLaw((STATE, ATTENTION, STATE, ATTENTION))
FIXED_BYTES, TOKEN_BYTES = 2 * 88, 2 * 16
VOCABULARY = 1000


def digest(ids: Sequence[int]) -> bytes:
    """64 bytes that name a list of tokens."""
    return hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=64).digest()


def answer_of(ids: Sequence[int], tokens: int) -> list[int]:
    """What the model makes of a prompt, greedily."""
    found = list(ids)
    for _ in range(tokens):
        found.append(2 + digest(found)[0])
    return found[len(ids) :]


@dataclass
class StubModel:
    """See `prfaas_serving.workers.model.Model`.

    Args:
        turns: if set, each layer of each piece takes one turn of it before it is computed.
        fails: whether its passes fail.
    """

    name: str = "stub"
    max_model_len: int = 500
    law: ByteLaw = LAW
    fingerprint: str = "stub"
    eos_ids: frozenset[int] = frozenset({1})
    vocabulary: int = VOCABULARY
    turns: threading.Semaphore | None = None
    fails: bool = False
    calls: list[str] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        """One token per character."""
        return [2 + ord(letter) % 250 for letter in text]

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """The contents one after another."""
        try:
            return self.encode("".join(message["content"] for message in messages))
        except (KeyError, TypeError):
            raise ValueError("a message without content") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Each token in brackets."""
        return "".join(f"<{token}>" for token in ids)

    def new_cache(self) -> list[int]:
        """A list of tokens."""
        return []

    def extend(self, cache: list[int], ids: Sequence[int], computed: Callable[[int], None]) -> None:
        """The tokens are there from the first layer on."""
        self.calls.append(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("the stub fails")
        cache.extend(ids)
        for layer in range(len(self.law.layers)):
            if self.turns is not None and not self.turns.acquire(timeout=30):
                raise RuntimeError("nobody gave a turn")
            computed(layer)

    def part(self, cache: list[int], layer: int, start: int, stop: int) -> Part:
        """Tokens as keys, positions as values; the digest as state."""
        if self.law.is_state(layer):
            state = np.frombuffer(digest(cache), dtype=np.uint8)
            tensors = {"state": state.copy(), "conv": np.zeros(24, dtype=np.uint8)}
        else:
            tokens = np.array([cache[start:stop]] * 2, dtype=np.float32)
            places = np.array([range(start, stop)] * 2, dtype=np.float32)
            tensors = {"keys": tokens, "values": places}
        return Part(layer, start, stop, save_tensors(tensors), sum(t.nbytes for t in tensors.values()))

    def load(self, parts: Sequence[Part]) -> list[int]:
        """The tokens from each attention layer, checked against each state."""
        layers: dict[int, list[int]] = {}
        states = []
        for part in parts:
            tensors = load_tensors(part.data)
            if "state" in tensors:
                states.append(tensors["state"].tobytes())
                continue
            held = layers.setdefault(part.layer, [])
            if tensors["values"][0].tolist() != list(range(len(held), len(held) + part.stop - part.start)):
                raise ValueError("out of order")
            held += [int(token) for token in tensors["keys"][0]]
        tokens, *others = layers.values()
        if any(other != tokens for other in others) or any(state != digest(tokens) for state in states):
            raise ValueError("layers of different prompts")
        return tokens

    def next_token(self, cache: list[int], token: int, sampling: Sampling, number: int) -> int:
        """The digest's first byte; with a temperature another one."""
        self.calls.append(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("the stub fails")
        cache.append(token)
        place = 0 if sampling.temperature == 0 else 1 + (sampling.seed + number) % 60
        return 2 + digest(cache)[place]


@dataclass
class Bench:
    """Workers in this process and a session to ask them."""

    workers: dict[str, ModelWorker]
    session: aiohttp.ClientSession

    async def post(self, name: str, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """(status, headers, parsed answer or text of a stream)."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        url = self.workers[name].url + path
        sent = {"Content-Type": "application/json", **headers}
        async with self.session.post(url, data=data, headers=sent) as answer:
            raw = await answer.read()
            if answer.content_type == "application/json":
                return answer.status, answer.headers, orjson.loads(raw)
            return answer.status, answer.headers, raw.decode()

    async def get(self, name: str, path: str) -> Any:
        """A page, parsed if it is JSON."""
        async with self.session.get(self.workers[name].url + path) as answer:
            raw = await answer.read()
            return orjson.loads(raw) if answer.content_type == "application/json" else raw.decode()

    async def prefilled(self, name: str, ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        """What a prefill leg hands over."""
        body = {**asked(ids, 1), "kv_transfer_params": {"do_remote_decode": True}, **fields}
        status, _, answer = await self.post(name, "/v1/completions", body)
        assert status == 200, answer
        handed: dict[str, Any] = answer["kv_transfer_params"]
        return handed


def asked(ids: Sequence[int], tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A greedy completion with token ids."""
    return {
        "model": "stub",
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }


def ids_of(answer: Any) -> list[int]:
    """Token ids of a whole answer."""
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@contextlib.asynccontextmanager
async def bench(
    roles: dict[str, str], models: dict[str, StubModel] | None = None, **fields: Any
) -> AsyncIterator[Bench]:
    """Workers of some roles, small pieces of 8 tokens."""
    async with contextlib.AsyncExitStack() as stack:
        workers = {}
        for name, role in roles.items():
            model = (models or {}).get(name, StubModel())
            settings = WorkerSettings.model_validate({"role": role, "chunk_tokens": 8, **fields})
            worker = ModelWorker(model, settings)
            await worker.start()
            stack.push_async_callback(worker.close)
            workers[name] = worker
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        stack.push_async_callback(session.close)
        yield Bench(workers, session)


async def soon(condition: Callable[[], Any], what: str) -> None:
    """Wait until something is true."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never became true: {what}")
