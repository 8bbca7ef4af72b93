"""The prefix index against a plain model of the rule, and in the router."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_serving.cache_index import EngineEvents, PrefixIndex, blocks_of
from prfaas_serving.config import Cache
from prfaas_serving.length import Prompt
from tests.serving.support import run, serving

BLOCK = 4


def index(needs_state: bool = False, **settings: Any) -> PrefixIndex:
    return PrefixIndex(Cache(block_tokens=BLOCK, capacity_tokens=10_000, **settings), needs_state)


def blocks(ids: list[int]) -> Any:
    return blocks_of(Prompt(len(ids), "ids", ids=ids), BLOCK, 1.0)


def test_whole_blocks_that_leave_one_token() -> None:
    i = index()
    i.store("w", blocks([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert i.match("w", blocks([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8
    assert i.match("w", blocks([1, 2, 3, 4, 5, 6, 7, 8])) == 4, "one token must be prefilled"
    assert i.match("w", blocks([1, 2, 3, 4, 5])) == 4
    assert i.match("w", blocks([1, 2, 3, 4])) == 0
    assert i.match("w", blocks([1, 2, 3, 5, 5, 6, 7, 8, 9])) == 0
    assert i.match("other", blocks([1, 2, 3, 4, 5])) == 0


def test_recurrent_state_serves_one_exact_length() -> None:
    i = index(needs_state=True)
    i.store("w", blocks(list(range(12))))
    assert i.match("w", blocks([*range(12), 99])) == 12
    assert i.match("w", blocks(list(range(9)))) == 0, "no checkpoint within the run"
    i = index(needs_state=True, checkpoints="every_n_tokens", checkpoint_every_tokens=8)
    i.store("w", blocks(list(range(16))))
    assert i.match("w", blocks(list(range(14)))) == 8
    i = index(needs_state=True, checkpoints="none")
    i.store("w", blocks(list(range(16))))
    assert i.match("w", blocks(list(range(16)))) == 0


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(
    st.lists(prompts, max_size=6), prompts, st.sampled_from(["attention", "end_of_prompt", "every_n_tokens"])
)
def test_against_the_rule_in_words(stored: list[list[int]], asked: list[int], rule: str) -> None:
    """The largest length in whole blocks, below the prompt's, with all blocks (and a checkpoint, if needed) held."""
    state = rule != "attention"
    settings: dict[str, Any] = {"checkpoints": rule} if state else {}
    if rule == "every_n_tokens":
        settings["checkpoint_every_tokens"] = 2 * BLOCK
    i = index(state, **settings)
    held, checkpoints = set(), set()
    for ids in stored:
        i.store("w", blocks(ids))
        n = len(ids) // BLOCK
        for k in range(1, n + 1):
            held.add(tuple(ids[: k * BLOCK]))
            if (rule == "end_of_prompt" and k == n) or (rule == "every_n_tokens" and k % 2 == 0):
                checkpoints.add(tuple(ids[: k * BLOCK]))
    expected = 0
    for k in range(1, (len(asked) - 1) // BLOCK + 1):
        if tuple(asked[: k * BLOCK]) not in held:
            break
        if not state or tuple(asked[: k * BLOCK]) in checkpoints:
            expected = k * BLOCK
    assert i.match("w", blocks(asked)) == expected


def test_least_recently_used_blocks_are_forgotten_from_the_end() -> None:
    i = PrefixIndex(Cache(block_tokens=BLOCK, capacity_tokens=5 * BLOCK), False)
    i.store("w", blocks([1] * 12))
    i.store("w", blocks([2] * 12))  # six blocks in room for five
    assert i.match("w", blocks([1] * 13)) == 8
    assert i.match("w", blocks([2] * 13)) == 12
    assert i.held_tokens("w") == 5 * BLOCK
    i.forget("w")
    assert i.match("w", blocks([2] * 13)) == 0
    assert i.held_tokens("w") == 0


def test_texts_match_by_pieces() -> None:
    i = PrefixIndex(Cache(block_tokens=10), False)

    def of(text: str) -> Any:
        return blocks_of(Prompt(len(text) // 4, "estimate", text=text), 10, 4.0)

    i.store("w", of("a" * 100))
    assert i.match("w", of("a" * 100)) == 20
    assert i.match("w", of("a" * 50 + "b" * 50)) == 10


def test_ids_that_are_none_hold_nothing() -> None:
    assert blocks_of(Prompt(9, "ids", ids=["x"] * 9), BLOCK, 1.0).hashes == []  # type: ignore[list-item]


def test_events_of_an_engine_with_smaller_blocks() -> None:
    i = index()
    e = EngineEvents(i, "w")
    assert e.stored([11, 12], None, [1, 2, 3, 4], 2)
    assert i.match("w", blocks([1, 2, 3, 4, 5])) == 4
    assert e.stored([13, 14], 12, [5, 6, 7, 8], 2)
    assert i.match("w", blocks([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8
    e.removed([14])
    assert i.match("w", blocks([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 4
    assert not e.stored([16], 15, [9, 9], 2), "its parent was never seen"
    e.cleared()
    assert i.match("w", blocks([1, 2, 3, 4, 5])) == 0


TEXT = "all work and no play makes a dull boy " * 40  # 380 tokens by the fakes' count


@pytest.mark.parametrize("needs_state", [False, True])
def test_a_repeated_prompt_stays_local_for_its_few_new_tokens(needs_state: bool) -> None:
    async def work() -> None:
        cache = {"block_tokens": 16, "needs_state": needs_state}
        spec = {"needs_state": needs_state}
        async with serving(cache=cache, spec=spec, threshold=100.0) as s:
            first = await s.complete(TEXT[:1400])  # 350 tokens
            assert first.headers["X-Prfaas-Route"] == "remote"
            s.router.forwarder.holder.threshold_tokens = 1e9
            again = await s.complete(TEXT[:1400])
            assert again.headers["X-Prfaas-Route"] == "local", (
                "nothing is cached at the local prefill worker yet"
            )
            s.router.forwarder.holder.threshold_tokens = 100.0
            longer = await s.complete(TEXT)
            expected = "local"  # 350 are held (checkpoint at 336), 380 asked
            assert longer.headers["X-Prfaas-Route"] == expected
            assert longer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 336
            shorter = await s.complete(TEXT[:1000])  # 250 tokens
            assert shorter.headers["X-Prfaas-Route"] == ("remote" if needs_state else "local")
            await s.settled()

    run(work)


def test_prefixes_come_back_to_the_worker_that_has_them() -> None:
    async def work() -> None:
        workers = (
            *((f"r{k}", "prfaas0", "prefill") for k in range(4)),
            ("l1", "pd0", "prefill"),
            ("d1", "pd0", "decode"),
        )
        async with serving(
            cache={"block_tokens": 16, "needs_state": False}, workers=workers, threshold=0.0
        ) as s:
            for k in range(12):
                await s.complete(TEXT + f" {k}")
            counts = [len(s.workers[f"r{k}"].seen) for k in range(4)]
            assert max(counts) == 12
            assert s.metric("cached_tokens_total") >= 11 * 368

    run(work)


def test_a_restarted_engine_has_an_empty_cache() -> None:
    async def work() -> None:
        workers = (("r1", "prfaas0", "prefill"), ("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))
        async with serving(
            cache={"block_tokens": 16, "needs_state": False}, workers=workers, threshold=0.0
        ) as s:
            await s.complete(TEXT)
            i = s.router.forwarder.index
            assert i is not None
            assert i.held_tokens("r1") > 0
            s.workers["r1"].engine_id = "another"
            await s.complete("x" * 40)
            assert i.held_tokens("r1") == 0

    run(work)
