"""Which prompt prefixes workers are believed to hold: an index of block hashes, matched by `prfaas_env.matching`.

A block stands for its tokens and all before them (a chain of hashes). Where token ids are not known, blocks are cut
from the text at a fixed number of characters. What a worker was sent counts as held there once its prefill has ended;
the least recently used blocks are forgotten beyond a capacity. Events of an engine correct the index.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from prfaas_env.matching import (
    CHECKPOINT_RULES,
    SEE_NOW,
    checkpoint_at,
    full_blocks,
    matched_blocks,
    usable_blocks,
)
from prfaas_serving.config import Cache
from prfaas_serving.length import Prompt


class Blocks:
    """The whole blocks of one prompt as chained hashes."""

    __slots__ = ("hashes", "tokens")

    def __init__(self, hashes: list[bytes], tokens: int) -> None:
        self.hashes = hashes
        self.tokens = tokens


def _chain(parts: Sequence[bytes]) -> list[bytes]:
    """Hash of each part and all before it."""
    found, before = [], b""
    for part in parts:
        before = hashlib.blake2b(before + part, digest_size=16).digest()
        found.append(before)
    return found


def id_parts(ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Bytes of the whole blocks of a list of token ids."""
    try:
        whole = array("q", ids).tobytes()
    except (TypeError, OverflowError):
        return []  # not token ids: an engine will refuse them
    width = block_tokens * 8
    return [whole[k : k + width] for k in range(0, len(whole) - width + 1, width)]


def blocks_of(prompt: Prompt, block_tokens: int, chars_per_token: float) -> Blocks:
    """The blocks of a prompt; of its text where its tokens are not known."""
    if prompt.ids is not None:
        parts = id_parts(prompt.ids, block_tokens)
    else:
        text = prompt.text or ""
        width = max(int(block_tokens * chars_per_token), 1)
        parts = [text[k : k + width].encode() for k in range(0, len(text) - width + 1, width)]
    return Blocks(_chain(parts[: full_blocks(prompt.tokens, block_tokens)]), prompt.tokens)


class _Held:
    """What one cache holds: entries by hash, least recently used first; `True` keys are checkpoints."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[bytes, bool], None] = OrderedDict()


class PrefixIndex:
    """The index of one router.

    Args:
        settings: the `cache` section.
        needs_state: the model has recurrent state or windows: only lengths with a checkpoint can be used.
        checkpoint_units: what a checkpoint takes, in blocks.
    """

    def __init__(self, settings: Cache, needs_state: bool, checkpoint_units: int = 1) -> None:
        self.block_tokens = settings.block_tokens
        self._needs_state = needs_state
        self._rule = CHECKPOINT_RULES.index(settings.checkpoints)
        self._every = (settings.checkpoint_every_tokens or settings.block_tokens) // settings.block_tokens
        self._most_units = max(settings.capacity_tokens // settings.block_tokens, 1)
        self._checkpoint_units = max(checkpoint_units, 1)
        self._caches: dict[str, _Held] = {}
        self._used: dict[str, int] = {}

    def held_tokens(self, cache: str) -> int:
        """Tokens of all attention blocks that a cache is believed to hold."""
        held = self._caches.get(cache)
        return 0 if held is None else sum(not c for _, c in held.entries) * self.block_tokens

    def match(self, cache: str, blocks: Blocks) -> int:
        """Tokens of a prompt that a cache can serve, by the rule of the simulator."""
        held = self._caches.get(cache)
        hashes = blocks.hashes
        if held is None or not hashes or (hashes[0], False) not in held.entries:
            return 0
        most = min(usable_blocks(blocks.tokens, self.block_tokens), len(hashes))
        # the rule reads entries by number: block k of this prompt is number k, its checkpoint number most + k
        entries = held.entries
        states = [0] * (2 * most)
        for k in range(most):
            if (hashes[k], False) not in entries:
                break
            states[k] = 1
            states[most + k] = int((hashes[k], True) in entries)
        found = matched_blocks(list(range(most)), 0, most, states, 0, most, self._needs_state, SEE_NOW)
        return found * self.block_tokens

    def store(self, cache: str, blocks: Blocks) -> None:
        """A prompt has been prefilled: its whole blocks and the checkpoints of the rule are held from now on."""
        if not blocks.hashes:
            return
        held = self._caches.setdefault(cache, _Held())
        n = len(blocks.hashes)
        # from the last block to the first, so that the front of a prefix is the most recent
        for k in range(n - 1, -1, -1):
            key = (blocks.hashes[k], True)
            if self._needs_state and (
                key in held.entries or checkpoint_at(self._rule, self._every, n, k + 1)
            ):
                self._touch(cache, held, key)
            self._touch(cache, held, (blocks.hashes[k], False))
        self._trim(cache, held)

    def _touch(self, cache: str, held: _Held, key: tuple[bytes, bool]) -> None:
        if key in held.entries:
            held.entries.move_to_end(key)
        else:
            held.entries[key] = None
            self._used[cache] = self._used.get(cache, 0) + self._units(key)

    def _units(self, key: tuple[bytes, bool]) -> int:
        return self._checkpoint_units if key[1] else 1

    def _trim(self, cache: str, held: _Held) -> None:
        while self._used[cache] > self._most_units and held.entries:
            key, _ = held.entries.popitem(last=False)
            self._used[cache] -= self._units(key)

    def drop_last(self, cache: str, ids: Sequence[int]) -> None:
        """The block that holds the last of these tokens is no longer held, nor what a match would reach through it."""
        held = self._caches.get(cache)
        n = -(-len(ids) // self.block_tokens)
        parts = id_parts(ids, self.block_tokens)
        if held is None or len(parts) < n:
            return  # an unfinished block of the index was never stored
        last = _chain(parts)[n - 1]
        for key in ((last, False), (last, True)):
            if key in held.entries:
                del held.entries[key]
                self._used[cache] -= self._units(key)

    def forget(self, cache: str) -> None:
        """A cache is gone (its worker started anew, left, or said so)."""
        self._caches.pop(cache, None)
        self._used.pop(cache, None)


class EngineEvents:
    """Keeps the index right by the cache events of one engine (vLLM's BlockStored, BlockRemoved, AllBlocksCleared).

    Engines name blocks by hashes of their own and by their own block size; they say the tokens, from which our own
    hashes follow. Blocks of an engine are put together to blocks of the index.
    """

    def __init__(self, index: PrefixIndex, cache: str) -> None:
        self._index = index
        self._cache = cache
        #: engine hash -> (tokens before and in the block)
        self._tokens: dict[int | str, tuple[int, ...]] = {}

    def stored(
        self, hashes: Sequence[int | str], parent: int | str | None, tokens: Sequence[int], block_tokens: int
    ) -> bool:
        """Blocks were stored behind `parent`; False if that parent was never seen (events were lost)."""
        if parent is not None and parent not in self._tokens:
            return False
        before = self._tokens[parent] if parent is not None else ()
        for k, name in enumerate(hashes):
            before = (*before, *tokens[k * block_tokens : (k + 1) * block_tokens])
            self._tokens[name] = before
        blocks = blocks_of(Prompt(len(before), "ids", ids=before), self._index.block_tokens, 1.0)
        self._index.store(self._cache, blocks)
        return True

    def removed(self, hashes: Sequence[int | str]) -> None:
        """Blocks were dropped: so are the blocks of the index that end in them."""
        for name in hashes:
            tokens = self._tokens.pop(name, None)
            if tokens is not None:
                self._index.drop_last(self._cache, tokens)

    def cleared(self) -> None:
        """Everything was dropped."""
        self._tokens.clear()
        self._index.forget(self._cache)
