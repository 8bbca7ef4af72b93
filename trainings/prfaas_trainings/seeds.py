"""Which episode seeds belong to which purpose, so that no result is measured on what was learned from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prfaas_env.base import PrfaasError
from prfaas_env.env import TRAINING_SEEDS

Split = Literal["training", "validation", "test"]

#: Seeds of each split: [first, end).
SPLITS: dict[Split, range] = {
    "training": range(TRAINING_SEEDS),
    "validation": range(1_000_000, 1_001_000),
    "test": range(2_000_000, 2**31),
}


def describe(split: Split) -> str:
    """The range of a split in words."""
    seeds = SPLITS[split]
    if split == "test":
        return f"{split} seeds are {seeds.start:,} and up"
    return f"{split} seeds are {seeds.start:,}..{seeds.stop - 1:,}"


def seeds_of(split: str, first: int | None, count: int, *, option: str = "--first-seed") -> range:
    """`count` seeds of a split from `first` (default: its first seed).

    Raises:
        PrfaasError: unknown split, or a seed that belongs to another split.
    """
    if split not in SPLITS:
        raise PrfaasError(f"--split is {split!r}; allowed: {', '.join(SPLITS)}")
    allowed = SPLITS[split]
    start = allowed.start if first is None else first
    seeds = range(start, start + count)
    for seed in (seeds.start, seeds.stop - 1):
        if count and seed not in allowed:
            raise PrfaasError(
                f"{option}: seed {seed:,} is not a {split} seed; "
                f"{'; '.join(describe(name) for name in SPLITS)}; choose with --split"
            )
    return seeds


def overlap(seeds: Iterable[int], seen: Iterable[tuple[int, int]]) -> int | None:
    """First of `seeds` that lies in one of the ranges [first, end) of `seen`, or None."""
    ranges = [range(a, b) for a, b in seen]
    return next((seed for seed in seeds if any(seed in r for r in ranges)), None)
