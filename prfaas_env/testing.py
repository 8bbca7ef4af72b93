"""Checks that anyone can run on an env or an episode: requests, bytes and instances balance."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from prfaas_env.env import PrfaasEnv
from prfaas_env.simulator.formulas import NS_PER_S


def check_env_conserves(env: gym.Env[Any, Any], *, steps: int = 500, seed: int = 0) -> None:
    """Step `env` with random actions and assert at every step what must always hold.

    `arrived = finished + open + rejected + aborted`, open requests counted from the records; observation
    float32, finite and inside its space; reward finite and equal to the sum of its terms; instances never
    more than the deployment has; egress below capacity x time (tolerance 1 ns per change of the link).

    Raises:
        AssertionError: a law is broken; the message names it.
    """
    inner = env.unwrapped
    assert isinstance(inner, PrfaasEnv)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        _check_observation(env, observation)
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert math.isfinite(float(reward)), f"reward is {reward}"
        assert float(reward) == math.fsum(info["reward_terms"].values()), "reward is not the sum of its terms"
        assert not terminated, "the task never ends"
        _check_balance(inner, info)
        if truncated:
            observation, _ = env.reset()


def _check_observation(env: gym.Env[Any, Any], observation: Any) -> None:
    assert observation.dtype == np.float32, f"observation is {observation.dtype}"
    assert np.isfinite(observation).all(), "observation is not finite"
    assert env.observation_space.contains(observation), "observation is outside its space"


def _check_balance(env: PrfaasEnv, info: dict[str, Any]) -> None:
    resolved = info["finished"] + info["rejected"] + info["aborted"]
    assert info["arrived"] == resolved + info["open"], "requests are not conserved"
    assert env._run is not None
    engine = env._run.engine
    records, totals = engine.records, engine.totals()
    assert int((records.status == 1).sum()) == info["open"], "open requests in the records differ"
    telemetry = env.telemetry
    for pd, spec in zip(telemetry.pd, env.scenario.deployment.pd, strict=True):
        instances = pd.prefill_instances + pd.decode_instances + pd.converting_instances
        assert instances == spec.n_prefill + spec.n_decode, "instances are not conserved"
        assert pd.prefill_instances >= spec.prefill_floor, "fewer prefill instances than the minimum"
        assert pd.decode_instances >= spec.min_decode, "fewer decode instances than the minimum"
    for trace, bits in zip(engine.world.links, totals.egress_bits, strict=True):
        ends = np.append(trace.time_ns[1:], totals.time_ns)
        spans = np.clip(np.minimum(ends, totals.time_ns) - trace.time_ns, 0, None)
        room = float((trace.capacity_bps * spans).sum()) / NS_PER_S
        slack = float(trace.capacity_bps.max()) * 1e-9 * (2 * totals.remote + len(spans) + 1)
        assert bits <= room + slack, f"link sent {bits:.0f} bits, it had room for {room:.0f}"
