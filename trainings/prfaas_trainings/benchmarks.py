"""Benchmarks of this room for `prfaas bench`."""

from __future__ import annotations

import copy
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from prfaas_agents.algorithms import make_learner
from prfaas_agents.export import fill_bundle
from prfaas_agents.record import CodecRecord, PolicyRecord, TelemetryRecord
from prfaas_agents.settings import PpoSettings
from prfaas_agents.vec_env import make_batched_vec_env
from prfaas_env.bench import SEED, Figure, Figures
from prfaas_env.bundle import BundlePolicy
from prfaas_env.decision import ActionCodec, Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.formulas import FloatArray, ns_from_s
from prfaas_env.simulator.world import draw_world
from prfaas_env.sites import link_pairs
from prfaas_env.telemetry import Telemetry


class TimedSteps(VecEnvWrapper):
    """Adds up the wall time between `step_async` and the end of `step_wait`, resets of ended episodes included."""

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self.steps_s = 0.0
        self._start_s = 0.0

    def reset(self) -> VecEnvObs:
        """Reset every env (not timed)."""
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        """Begin a step."""
        self._start_s = time.perf_counter()
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """End it."""
        result = self.venv.step_wait()
        self.steps_s += time.perf_counter() - self._start_s
        return result


def ppo_figures(n_envs: int, n_steps: int, repeats: int) -> Figures:
    """Share of the simulator in a PPO run: time inside the steps of the envs over the time of learning.

    Args:
        n_envs: envs.
        n_steps: decisions per env between two updates; the rest as in `PpoSettings`.
        repeats: rollouts with their update that are timed, after one that is not.
    """
    envs = make_batched_vec_env(["drift"], n_envs, routing="margin", full_infos=False)
    timed = TimedSteps(envs)
    settings = PpoSettings(n_steps=n_steps, batch_size=min(PpoSettings().batch_size, n_envs * n_steps))
    model = make_learner(timed, envs.batches[0].codec, settings, SEED)
    model.learn(n_envs * n_steps)
    shares, rates = [], []
    for _ in range(repeats):
        timed.steps_s, start_s = 0.0, time.perf_counter()
        model.learn(n_envs * n_steps, reset_num_timesteps=False)
        elapsed_s = time.perf_counter() - start_s
        shares.append(timed.steps_s / elapsed_s)
        rates.append(n_envs * n_steps / elapsed_s)
    timed.close()
    what = f"PPO, {n_envs} envs x {n_steps} decisions per update"
    return {
        "simulator_share": Figure(
            f"{what}: simulator in the wall time", "share", tuple(shares), "median", at_most=0.25
        ),
        "decisions_per_s": Figure(f"{what}: learning", "decisions/s, wall", tuple(rates), "highest"),
    }


def ppo_share(quick: bool) -> Figures:
    """The simulator's share of training PPO."""
    return ppo_figures(4, 16, 1) if quick else ppo_figures(64, 256, 3)


def bundle_figures(n: int, repeats: int) -> Figures:
    """Time of one decision of an exported policy, from telemetry to decision.

    Args:
        n: decisions per sample, each at a reading of its own.
        repeats: samples, after one that is not timed.
    """
    scenario = load_scenario("drift")
    readings = _readings(scenario, n)
    codec = ActionCodec(len(scenario.deployment.pd), "margin", "discrete")
    envs = make_batched_vec_env([scenario], 1, routing="margin", full_infos=False)
    model = make_learner(envs, codec, PpoSettings(), SEED)
    envs.close()
    record = PolicyRecord(
        telemetry=TelemetryRecord.of(readings[0].schema),
        links=link_pairs(scenario.deployment),
        action=CodecRecord.of(codec),
        decision_interval_s=scenario.control.control_interval_s,
        hidden=PpoSettings().hidden,
        weights_sha256="",
        steps=0,
        reward="waiting",
        trained_on=(),
        training_seed=SEED,
        seed_ranges={},
        validation={},
        versions={},
    )
    with tempfile.TemporaryDirectory() as name:
        fill_bundle(Path(name), model, record, name="benchmark")
        policy = BundlePolicy(name)
    samples: dict[str, list[float]] = {"cpu_p50": [], "cpu_p99": [], "wall_p50": [], "wall_p99": []}
    for k in range(repeats + 1):
        policy.reset(PolicyContext(scenario, readings[0].schema, SEED))
        cpu_us, wall_us = _times_us(policy.decide, readings)
        for name, times in (("cpu", cpu_us), ("wall", wall_us)) if k > 0 else ():
            for q in (50, 99):
                samples[f"{name}_p{q}"].append(float(np.nanpercentile(times, q)))
    what = f"bundle, {len(readings[0].schema)} fields, two layers of 64: telemetry to decision"
    return {
        f"decide_{key}_us": Figure(
            f"{what}, {key[-3:]}",
            "us" if key.startswith("cpu") else "us, wall",
            tuple(values),
            "lowest",
            at_most=100.0 if key == "cpu_p99" else None,
        )
        for key, values in samples.items()
    }


def _readings(scenario: Scenario, n: int) -> list[Telemetry]:
    """Readings of an episode under earliest finish, one per tick and repeated up to n with later times."""
    engine = make_engine("simpy", draw_world(scenario, SEED))
    engine.apply(Decision.same(len(scenario.deployment.pd), margin_s=0.0))
    interval_ns = ns_from_s(scenario.control.control_interval_s)
    found = []
    for k in range(min(n, 300)):
        engine.run_until(k * interval_ns)
        found.append(engine.telemetry())
    out = []
    for k in range(n):
        reading = copy.copy(found[k % len(found)])
        reading.time_ns = k * interval_ns  # a policy decides once per interval
        out.append(reading)
    return out


def _interrupted() -> int:
    """How often another process took the core from this thread; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nivcsw


def _times_us(
    call: Callable[[Telemetry], Any], readings: Sequence[Telemetry]
) -> tuple[FloatArray, FloatArray]:
    """CPU and wall time of each call, each of shape (readings,).

    CPU time is NaN for a call during which another process took the core: it would measure how cold the caches were
    afterwards.
    """
    cpu_us, wall_us = np.empty(len(readings)), np.empty(len(readings))
    for k, reading in enumerate(readings):
        before = _interrupted()
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        call(reading)
        cpu_us[k] = (time.thread_time_ns() - cpu_ns) / 1e3
        wall_us[k] = (time.perf_counter_ns() - wall_ns) / 1e3
        if _interrupted() != before:
            cpu_us[k] = math.nan
    return cpu_us, wall_us


def bundle(quick: bool) -> Figures:
    """A decision of a policy bundle."""
    return bundle_figures(50, 1) if quick else bundle_figures(2_000, 10)
