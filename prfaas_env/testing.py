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
    observation = _check_reset(env.reset(seed=seed))
    method = "reset()"
    for _ in range(steps):
        check_observation(inner, observation, method)
        method = "step()"
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert math.isfinite(float(reward)), f"reward is {reward}"
        assert float(reward) == math.fsum(info["reward_terms"].values()), "reward is not the sum of its terms"
        assert not terminated, "the task never ends"
        _check_balance(inner, info)
        if truncated:
            observation, method = _check_reset(env.reset()), "reset()"
    check_observation(inner, observation, method)


def _check_reset(result: Any) -> Any:
    """The observation of what `reset` gave."""
    pair = isinstance(result, tuple) and len(result) == 2
    assert pair and isinstance(result[1], dict), "reset() must give (observation, info dict)"  # noqa: PT018
    return result[0]


def check_observation(env: PrfaasEnv, observation: Any, method: str) -> None:
    """Assert that an observation is what the space of the env says.

    Raises:
        AssertionError: names the method that gave it, the field, and the shape and dtype that are expected.
    """
    names = env.schema.names
    expected = f"expected a float32 array of shape ({len(names)},)"
    assert isinstance(observation, np.ndarray), (
        f"{method} gave an observation of type {type(observation).__name__}; {expected}"
    )
    assert observation.dtype == np.float32, f"{method} gave an observation of {observation.dtype}; {expected}"
    if observation.shape != (len(names),):
        n = len(observation) if observation.ndim == 1 else -1
        where = f": {names[n]} and what follows is missing" if 0 <= n < len(names) else ""
        more = f": {n - len(names)} values behind {names[-1]}" if n > len(names) else ""
        raise AssertionError(f"{method} gave shape {observation.shape}; {expected}{where}{more}")
    for k in np.flatnonzero(~((observation >= 0.0) & (observation <= 1.0))):
        raise AssertionError(
            f"{method} gave {names[k]} = {observation[k]}; it must be finite and within 0 and 1"
        )
    assert env.observation_space.contains(observation), f"{method} gave an observation outside its space"


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
