"""Two real vLLM workers with a hybrid model (three recurrent layers, one of full attention) behind the router.

What crosses is a fixed state plus whole pages per token. On random weights in bf16 some next tokens are near ties, so
that tokens are compared on the dense model and bytes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.engines import START_S, Engine
from tests.real.models import folder_of, layout_of
from tests.real.support import Pair, Prompts, direct, ids_of, routing, run, say

ALWAYS = 0.0
HYBRID = ("--no-enable-prefix-caching", "--no-disable-hybrid-kv-cache-manager")
PAGE_TOKENS = 256
"""Tokens of one page of the attention layer, which is made as large as a page of state."""


def _has_bf16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Started once, killed whatever happens."""
    if not _has_bf16():
        pytest.skip("the CPU has no avx512_bf16, which this model needs")
    workers = [
        Engine(
            f"hybrid-{name}",
            folder_of("hybrid"),
            role,
            dtype="bfloat16",
            arguments=HYBRID,
            settings={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
        )
        for name, role in (("remote", "prefill"), ("decode", "decode"))
    ]

    async def up() -> None:
        async with direct() as session:
            await asyncio.gather(*(engine.ready(session) for engine in workers))

    try:
        for engine in workers:
            engine.start()
        run(up, START_S + 100.0)
        yield Pair(*workers)
    finally:
        for engine in workers:
            engine.close()


def test_bytes_are_a_fixed_state_and_whole_pages(pair: Pair) -> None:
    """Every length, below, at and above a page: exactly what the model's geometry says.

    The state is that of the last token but one, which the decode worker goes on from: one token is not sent.
    """

    async def work() -> None:
        layout = layout_of("hybrid")
        assert layout.fixed_bytes > 0
        async with routing(pair.places, ALWAYS, cache={"enabled": False}) as live:
            lines = []
            for tokens in (
                1,
                100,
                PAGE_TOKENS,
                PAGE_TOKENS + 1,
                PAGE_TOKENS + 2,
                2 * PAGE_TOKENS,
                1000,
                3000,
            ):
                before = await pair.decode.figures(live.session)
                reply = await live.ask(Prompts(tokens).fresh(tokens), 2)
                assert reply.status == 200, reply.body
                assert reply.headers["X-Prfaas-Route"] == "remote"
                moved = (await pair.decode.figures(live.session)).since(before)
                expected = layout.reserved_bytes(max(tokens - 1, 1), PAGE_TOKENS)
                lines.append((tokens, int(moved.fetched_bytes), expected))
            say(
                f"hybrid: {layout.fixed_bytes:,} fixed + {layout.bytes_per_token * PAGE_TOKENS:,} B per page of "
                f"{PAGE_TOKENS}: " + ", ".join(f"{n} tokens {b:,} B" for n, b, _ in lines)
            )
            assert [(n, b) for n, b, _ in lines] == [(n, e) for n, _, e in lines]
            await live.idle()

    run(work)


def test_a_hand_over_gives_the_tokens_of_one_process(pair: Pair) -> None:
    """A decode worker that got a wrong state would differ nearly always; near ties alone differ seldom."""

    async def work() -> None:
        async with routing(pair.places, ALWAYS) as live:
            same = 0
            for k in range(10):
                prompt = Prompts(100 + k).fresh(300 + 37 * k)
                reply = await live.ask(prompt, 6)
                assert reply.headers["X-Prfaas-Route"] == "remote"
                alone = await live.alone(pair.decode, prompt, 6)
                same += ids_of(reply.json) == ids_of(alone)
            say(f"hybrid in bf16: {same} of 10 prompts give the tokens of one process")
            assert same >= 6
            await live.idle()

    run(work)
