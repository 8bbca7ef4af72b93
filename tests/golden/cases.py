"""Golden traces: stored arrivals, capacity steps and actions, and what `PrfaaS-v0` made of them.

A file `NAME.json` here holds one episode. Its inputs (`scenario`, `env`, `requests`, `capacity`, `actions`) are
written by hand or drawn once; `python -m tests.golden.regenerate` writes `expected` from them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np

import prfaas_env.env
from prfaas_env.env import PrfaasEnv
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.formulas import NEVER_NS
from prfaas_env.simulator.world import CapacityTrace, World
from prfaas_env.workload.requests import RequestTable

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))
#: The telemetry is kept on every k-th step.
TELEMETRY_EVERY = 15
#: Stamps may differ by this much, and all other figures by this share (or as much, below 1).
STAMP_TOLERANCE_NS = 1_000
TOLERANCE = 1e-6


def read(name: str) -> dict[str, Any]:
    """The stored episode."""
    stored: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return stored


def text(stored: dict[str, Any]) -> str:
    """An episode as its file has it: one short list or number a line."""

    def block(value: Any, indent: str) -> str:
        inner = indent + "  "
        if isinstance(value, dict) and value:
            items = (f"{inner}{json.dumps(k)}: {block(v, inner)}" for k, v in value.items())
            return "{\n" + ",\n".join(items) + f"\n{indent}}}"
        return json.dumps(value, allow_nan=False)

    return block(stored, "") + "\n"


def scenario_of(stored: dict[str, Any]) -> Scenario:
    """A shipped scenario with overrides."""
    return load_scenario(stored["scenario"]["name"], overrides=stored["scenario"]["overrides"])


def world_of(stored: dict[str, Any], scenario: Scenario) -> World:
    """The stored world."""
    columns = {name: np.array(values, dtype=np.int64) for name, values in stored["requests"].items()}
    table = RequestTable.without_prefixes(
        columns["arrival_ns"], columns["input_tokens"], columns["output_tokens"]
    )
    traces = tuple(
        CapacityTrace(
            np.array(link["time_ns"], dtype=np.int64), np.array(link["capacity_bps"], dtype=np.float64)
        )
        for link in stored["capacity"]
    )
    return World(scenario, 0, table, columns["pd_of"], traces)


def play(stored: dict[str, Any], engine: str) -> dict[str, Any]:
    """`expected` of an episode, as this version of the env plays it."""
    scenario = scenario_of(stored)
    world = world_of(stored, scenario)
    env = gym.make("PrfaaS-v0", scenario=scenario, engine=engine, **stored["env"]).unwrapped
    assert isinstance(env, PrfaasEnv)
    rewards: list[float] = []
    readings: list[list[float]] = []
    observed: list[float] = []
    with mock.patch.object(prfaas_env.env, "draw_world", return_value=world):
        env.reset(seed=0)
    truncated = False
    for k, action in enumerate(stored["actions"]):
        assert not truncated, "more actions than the episode has steps"
        observation, reward, _, truncated, info = env.step(np.array(action))
        rewards.append(float(reward))
        observed.append(float(observation.astype(np.float64).sum()))
        if (k + 1) % TELEMETRY_EVERY == 0:
            readings.append(env.telemetry.values.tolist())
    assert truncated, "fewer actions than the episode has steps"
    records = env._running().engine.records
    return {
        "rewards": rewards,
        "observation_sums": observed,
        "telemetry": dict(zip(env.schema.names, map(list, zip(*readings, strict=True)), strict=True)),
        "requests": {
            field.name: [None if v == NEVER_NS else v for v in getattr(records, field.name).tolist()]
            for field in dataclasses.fields(records)
        },
        "metrics": info["episode_metrics"],
    }


def difference(expected: Any, found: Any, where: str = "") -> str | None:
    """The first place where two results differ by more than the tolerance, or None."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or expected.keys() != found.keys():
            return f"{where}: fields {_keys(expected)} / {_keys(found)}"
        parts = ((f"{where}.{k}" if where else k, v, found[k]) for k, v in expected.items())
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(expected) != len(found):
            return f"{where}: {expected!r:.60} / {found!r:.60}"
        parts = ((f"{where}[{k}]", v, found[k]) for k, v in enumerate(expected))
    else:
        return None if _close(expected, found, where) else f"{where}: {expected!r:.60} / {found!r:.60}"
    return next((text for at, a, b in parts if (text := difference(a, b, at)) is not None), None)


def _keys(value: Any) -> list[str]:
    return sorted(value) if isinstance(value, dict) else [repr(value)]


def _close(expected: Any, found: Any, where: str) -> bool:
    numbers = isinstance(expected, int | float) and isinstance(found, int | float)
    if not numbers or isinstance(expected, bool):
        return bool(expected == found)
    if where.split("[")[0].endswith("_ns"):
        return abs(expected - found) <= STAMP_TOLERANCE_NS
    return math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
