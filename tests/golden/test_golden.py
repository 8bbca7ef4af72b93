"""`PrfaaS-v0` on stored arrivals gives what it gave: rewards, telemetry, stamps of every request, episode metrics."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

from prfaas_env.simulator.engine import ENGINES

from .cases import FOLDER, NAMES, difference, play, read, text

CHANGED = (
    "the dynamics changed. If that is wanted, run `python -m tests.golden.regenerate` and write a line in "
    "CHANGELOG.md. First difference in {name} ({engine} engine), stored / now: {found}"
)


def check(name: str, stored: dict[str, Any], engine: str) -> None:
    found = difference(stored["expected"], play(stored, engine))
    if found is not None:
        pytest.fail(CHANGED.format(name=name, engine=engine, found=found))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_the_dynamics_are_those_of_the_golden_traces(name: str, engine: str) -> None:
    check(name, read(name), engine)


def test_a_change_of_dynamics_is_found_and_says_what_to_do() -> None:
    """One more ms of switching time is enough."""
    stored = read("clusters")
    slower = copy.deepcopy(stored)
    slower["scenario"]["overrides"].append("conversion.switch_s=2.001")
    with pytest.raises(pytest.fail.Exception) as caught:
        check("clusters", slower, "compiled")
    message = str(caught.value)
    assert "run `python -m tests.golden.regenerate` and write a line in CHANGELOG.md" in message
    assert "First difference in clusters (compiled engine), stored / now: " in message


@pytest.mark.parametrize(
    ("path", "by"),
    [
        (("rewards", 20), 1e-5),
        (("observation_sums", 7), 1e-4),
        (("telemetry", "pd0.decode_sequences", 1), 1),
        (("requests", "finish_ns", 3), 2_000),
        (("requests", "attempts", 5), 1),
        (("metrics", "ttft_s", "p90"), 1e-4),
        (("metrics", "requests", "finished"), 1),
    ],
)
def test_every_stored_figure_counts(path: tuple[Any, ...], by: float) -> None:
    """A figure that is off by more than the tolerance is named; one within it is not."""
    expected = read("paper")["expected"]
    off, close = copy.deepcopy(expected), copy.deepcopy(expected)
    for changed, step in ((off, by), (close, by / 1e4 if by < 1 else 0)):
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] += step
    found = difference(expected, off)
    assert found is not None
    assert str(path[0]) in found
    assert difference(expected, close) is None


def test_missing_and_new_figures_are_differences() -> None:
    expected = read("paper")["expected"]
    fewer = {name: value for name, value in expected.items() if name != "metrics"}
    assert difference(expected, fewer) is not None
    assert difference(fewer, expected) is not None
    shorter = {**expected, "rewards": expected["rewards"][:-1]}
    assert difference(expected, shorter) is not None
    assert difference([None, 1], [2, 1]) == "[0]: None / 2"


def test_the_traces_reach_the_mechanisms() -> None:
    """Between them: both routes, conversions, illegal orders, every reason to reject, retries, requests left open."""
    seen: Counter[str] = Counter()
    for name in NAMES:
        stored = read(name)
        assert 40 <= len(stored["requests"]["arrival_ns"]) <= 80
        expected = stored["expected"]
        metrics = expected["metrics"]
        seen.update(metrics["rejected_by_reason"])
        seen.update({k: metrics[k] for k in ("conversions", "invalid_moves")})
        seen.update({k: metrics["requests"][k] for k in ("remote", "open", "finished")})
        seen["local"] += expected["requests"]["route"].count(1)
        seen["retries"] += sum(a > 1 for a in expected["requests"]["attempts"])
        seen["decode wait"] += metrics["decode_wait_s"] > 0
    wanted = ("over_limit", "kv_capacity", "queue_full", "conversions", "invalid_moves", "remote", "local")
    assert all(seen[name] > 0 for name in (*wanted, "open", "finished", "retries", "decode wait")), seen


@pytest.mark.parametrize("name", NAMES)
def test_files_are_as_the_script_writes_them(name: str) -> None:
    """So that a regeneration shows changed figures only."""
    assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == text(read(name))
