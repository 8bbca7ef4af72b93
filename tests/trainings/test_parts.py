"""Runs in parts: the command that goes on, whole parts in any order, numbers through JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import load_scenario
from prfaas_trainings.episodes import (
    FIGURE_NAMES,
    TTFT_EDGES_S,
    EpisodeRunner,
    Job,
    Outcome,
    Row,
    not_null,
    nulls,
)
from prfaas_trainings.parts import Part, PartsFolder, command_line, run_parts


def test_the_command_that_goes_on() -> None:
    options = {
        "--scenario": ["a b", "c"], "--reference": None, "--deployments": False, "--report": True, "--seeds": 5,
        "--out": Path("x"),
    }  # fmt: skip
    assert command_line("compare", options) == (
        "prfaas compare --scenario 'a b' --scenario c --report --seeds 5 --out x"
    )


def outcome(mark: float) -> Outcome:
    counts = np.zeros(len(TTFT_EDGES_S) - 1, dtype=np.int64)
    counts[int(mark)] = 3
    return Outcome(dict.fromkeys(FIGURE_NAMES, mark), "h", (), (), counts, None, None, None)


class _Given(EpisodeRunner):
    """Outcomes without episodes, in a given order of jobs."""

    def __init__(self, order: list[int], failed: int | None = None) -> None:
        super().__init__(1)
        self._order, self._failed = order, failed

    def each(self, jobs: Any) -> Iterator[Any]:
        assert sorted(self._order) == list(range(len(jobs)))
        for k in self._order:
            yield k, ValueError("no") if k == self._failed else outcome(k)


def parts() -> list[Part]:
    job = Job(load_scenario("paper"), Row("never", "never"), 1)
    return [Part(f"p{k}", (job, job), ("first", "second")) for k in range(3)]


@given(st.permutations(range(6)))
def test_a_part_is_finished_once_with_its_last_episode(order: list[int]) -> None:
    finished: dict[int, list[float | None]] = {}
    seen: list[int] = []
    told: list[int] = []

    def finish(p: int, found: list[Outcome]) -> None:
        assert p not in finished
        finished[p] = [each.figures["arrived"] for each in found]
        seen.append(len(told))

    run_parts(parts(), _Given(order), finish, told.append)
    assert finished == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert told == [k // 2 for k in order]
    last = [max(order.index(2 * p), order.index(2 * p + 1)) for p in range(3)]
    assert seen == sorted(last)


def test_a_failure_names_part_and_job() -> None:
    kept: list[int] = []
    with pytest.raises(PrfaasError, match="p1, second: ValueError: no"):
        run_parts(parts(), _Given([0, 1, 2, 3, 4, 5], failed=3), lambda p, found: kept.append(p))
    assert kept == [0]


@given(st.lists(st.floats()))
def test_numbers_come_back_from_json(values: list[float]) -> None:
    back = not_null(json.loads(json.dumps(nulls(np.array(values)), allow_nan=False)))
    expected = np.array([v if math.isfinite(v) else math.nan for v in values])
    assert np.array_equal(back, expected, equal_nan=True)


def test_an_outcome_comes_back_from_json() -> None:
    made = outcome(7.0)
    full = Outcome(
        made.figures, "hash", ("w",), ("n",), made.ttft_counts,
        np.array([0.1, 0.2]), np.array([math.nan, 1 / 3]), {"time_s": np.array([0.0, 1.0])},
    )  # fmt: skip
    for one in (made, full):
        back = Outcome.of_json(json.loads(json.dumps(one.as_json(), allow_nan=False)))
        assert back.as_json() == one.as_json()
        assert np.array_equal(back.ttft_counts, one.ttft_counts)
        assert back.ttft_counts.dtype == one.ttft_counts.dtype
        assert (back.ttft_s is None) == (one.ttft_s is None)
    with pytest.raises(KeyError):  # a part of an earlier version
        Outcome.of_json({**full.as_json(), "figures": {}})


def test_a_parts_folder_is_whole(tmp_path: Path) -> None:
    def folder(**changes: Any) -> PartsFolder:
        fields = {"kind": "run", "marker": "m.json", "parts": "parts", "part": "part"}
        return PartsFolder(tmp_path / "x", configuration={"a": 1, **changes}, **fields)  # type: ignore[arg-type]

    first = folder()
    first.write_part("p", [1.5])
    assert first.has("p")
    assert folder().read_part("p", "label", lambda content: content) == [1.5]
    with pytest.raises(PrfaasError, match="is not the part label; remove it"):
        first.read_part("p", "label", lambda content: None)
    with pytest.raises(PrfaasError, match="is not a finished part"):
        first.read_part("q", "label", lambda content: content)
    with pytest.raises(PrfaasError, match="holds a run of another configuration: a: 1 there, 2 now"):
        folder(a=2)
    (tmp_path / "x" / "m.json").write_text("{")
    with pytest.raises(PrfaasError, match="--force starts anew"):
        folder()
