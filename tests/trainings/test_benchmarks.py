"""The benchmarks of this room, at tiny sizes."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

import numpy as np

from prfaas_agents.vec_env import make_batched_vec_env
from prfaas_trainings import benchmarks


def test_share_of_the_simulator() -> None:
    figures = benchmarks.ppo_figures(2, 8, 2)
    assert all(0 < x < 1 for x in figures["simulator_share"].samples)
    assert figures["simulator_share"].at_most == 0.25
    assert all(x > 0 for x in figures["decisions_per_s"].samples)


def test_the_steps_of_the_envs_are_timed_and_nothing_else() -> None:
    envs = make_batched_vec_env(["drift"], 2)
    timed = benchmarks.TimedSteps(envs)
    timed.reset()
    assert timed.steps_s == 0.0
    start_s = time.perf_counter()
    for _ in range(3):
        observation: Any = timed.step(np.stack([envs.batches[0].codec.neutral()] * 2))[0]
    assert 0 < timed.steps_s <= time.perf_counter() - start_s
    assert observation.shape == (2, *envs.observation_space.shape)  # type: ignore[misc]
    timed.close()


def test_a_decision_of_a_bundle() -> None:
    figures = benchmarks.bundle_figures(40, 2)
    assert figures["decide_cpu_p99_us"].at_most == 100.0
    for clock in ("cpu", "wall"):
        low, high = (figures[f"decide_{clock}_{q}_us"] for q in ("p50", "p99"))
        assert len(low.samples) == 2
        assert all(0 < a <= b for a, b in zip(low.samples, high.samples, strict=True))


def test_the_command_finds_it() -> None:
    (entry,) = [e for e in metadata.entry_points(group="prfaas.benchmarks") if e.name == "ppo_share"]
    assert entry.load() is benchmarks.ppo_share
