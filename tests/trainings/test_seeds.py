"""Which seeds a tool accepts for which purpose."""

from __future__ import annotations

import itertools
import re

import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.env import TRAINING_SEEDS
from prfaas_trainings.seeds import SPLITS, overlap, seeds_of


def test_splits_do_not_meet() -> None:
    ranges = sorted(SPLITS.values(), key=lambda r: r.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
    # What an unseeded reset of the env draws is training.
    assert SPLITS["training"] == range(TRAINING_SEEDS)


def test_default_is_the_first_seed_of_the_split() -> None:
    assert seeds_of("test", None, 3) == range(2_000_000, 2_000_003)
    assert seeds_of("validation", None, 2) == range(1_000_000, 1_000_002)
    assert seeds_of("training", 5, 2) == range(5, 7)


@pytest.mark.parametrize(
    ("split", "first", "count", "seed"),
    [
        ("test", 0, 5, "0"),
        ("test", 1_000_000, 5, "1,000,000"),
        ("test", 1_999_999, 5, "1,999,999"),
        ("validation", 1_000_999, 2, "1,001,000"),
        ("validation", 2_000_000, 1, "2,000,000"),
        ("training", 999_999, 2, "1,000,000"),
        ("training", -1, 1, "-1"),
    ],
)
def test_a_seed_of_another_split_is_refused(split: str, first: int, count: int, seed: str) -> None:
    with pytest.raises(PrfaasError, match=re.escape(f"seed {seed} is not a {split} seed")) as caught:
        seeds_of(split, first, count)
    assert "\n" not in str(caught.value)
    assert "test seeds are 2,000,000 and up" in str(caught.value)


def test_unknown_split() -> None:
    with pytest.raises(PrfaasError, match="--split is 'dev'; allowed: training, validation, test"):
        seeds_of("dev", None, 1)


def test_overlap() -> None:
    assert overlap(range(10, 20), [(0, 10), (20, 30)]) is None
    assert overlap(range(10, 21), [(0, 10), (20, 30)]) == 20
    assert overlap(range(9, 12), [(0, 10)]) == 9
    assert overlap(range(5), []) is None
