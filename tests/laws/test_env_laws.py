"""Laws of the env over random deployments, loads, links, clocks and actions: nothing is lost, nothing is unbounded."""

from __future__ import annotations

import json
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.env import PrfaasEnv
from prfaas_env.profiles.catalogue import load_model
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.engine import ENGINES
from prfaas_env.testing import check_env_conserves

#: Steps of an episode: the horizon is this many control intervals, or a little less.
STEPS = 40


def _lengths(high: int) -> st.SearchStrategy[dict[str, Any]]:
    tokens = st.integers(1, high)
    return st.one_of(
        tokens.map(lambda n: {"kind": "fixed", "tokens": n}),
        tokens.map(lambda n: {"kind": "poisson", "mean_tokens": n}),
        st.lists(tokens, min_size=1, max_size=4).map(lambda n: {"kind": "empirical", "tokens": n}),
        st.tuples(st.floats(5, 11), st.floats(0.1, 1.5)).map(
            lambda p: {
                "kind": "lognormal",
                "mu": p[0],
                "sigma": p[1],
                "min_tokens": 1,
                "max_tokens": high,
            }
        ),
    )


def _chain(values: st.SearchStrategy[float]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(values, values, st.floats(1, 30)).map(
        lambda c: {"values": [c[0], c[1]], "probabilities": [0.5, 0.5], "mean_holding_s": c[2]}
    )


_RATE = st.floats(0, 6)
_ARRIVALS = st.one_of(
    _RATE.map(lambda r: {"kind": "poisson", "rate_rps": r}),
    _RATE.map(lambda r: {"kind": "deterministic", "rate_rps": r}),
    st.tuples(_RATE, st.floats(0.1, 3)).map(lambda g: {"kind": "gamma", "rate_rps": g[0], "shape": g[1]}),
    _chain(_RATE).map(lambda c: {"kind": "regimes", "rate_rps": c}),
)
_BPS = st.sampled_from([0.0, 1e8, 1e9, 2e10, 1e11])
_CAPACITY = st.one_of(
    st.just({"kind": "constant"}),
    st.tuples(_BPS, _BPS).map(lambda c: {"kind": "steps", "at_s": [3.0, 9.5], "capacity_bps": list(c)}),
    _chain(_BPS).map(lambda c: {"kind": "regimes", "capacity_bps": c}),
)


@st.composite
def _deployments(draw: st.DrawFn) -> dict[str, Any]:
    remote = [
        {"name": f"far{j}", "hardware": "h200", "n_instances": draw(st.integers(1, 3))}
        for j in range(draw(st.integers(0, 2)))
    ]
    pd, links = [], []
    for i in range(draw(st.integers(1, 2))):
        linked = [r["name"] for r in remote if draw(st.booleans())]
        n_prefill = draw(st.integers(0 if linked else 1, 3))
        n_decode = draw(st.integers(1, 3))
        pd.append(
            {
                "name": f"near{i}",
                "hardware": "h20",
                "n_prefill": n_prefill,
                "n_decode": n_decode,
                "min_prefill": draw(st.integers(0 if linked else 1, n_prefill)),
                "min_decode": draw(st.integers(1, n_decode)),
                "arrival_share": draw(st.floats(0.1, 2)),
                "rdma_latency_s": draw(st.sampled_from([0.0, 0.01])),
            }
        )
        links += [
            {
                "prfaas": name,
                "pd": f"near{i}",
                "capacity_bps": draw(st.sampled_from([1e9, 2e10, 1e11])),
                "latency_s": draw(st.sampled_from([0.0, 0.05])),
                "flow_cap_bps": draw(st.sampled_from([None, 5e8, 2e10])),
            }
            for name in linked
        ]
    return {"prfaas": remote, "pd": pd, "links": links}


@st.composite
def _models(draw: st.DrawFn) -> dict[str, Any]:
    model: dict[str, Any] = load_model("prfaas-1t").model_dump(mode="json")
    model["max_input_tokens"] = draw(st.sampled_from([None, None, 60_000]))
    model["hardware"]["h20"]["decode"] |= {
        "a_s": draw(st.sampled_from([0.005, 0.025])),
        "b_s_per_sequence": draw(st.sampled_from([0.0, 1e-4])),
        "c_s_per_token": draw(st.sampled_from([0.0, 1e-8])),
        "slots": draw(st.sampled_from([1, 4, 20])),
        "kv_capacity_tokens": draw(st.sampled_from([None, 50_000, 400_000])),
        "kv_reserve_tokens": draw(st.sampled_from([0, 2_000])),
    }
    return model


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small scenarios of every kind the models allow."""
    interval_s = draw(st.sampled_from([0.25, 1.0, 3.0]))
    horizon_s = STEPS * interval_s - draw(st.sampled_from([0.0, 0.1]))
    raw = {
        "name": "random",
        "model": draw(_models()),
        "deployment": draw(_deployments()),
        "workload": {
            "kind": "synthetic",
            "arrivals": draw(_ARRIVALS),
            "input_tokens": draw(_lengths(131_072)),
            "output_tokens": draw(_lengths(2_000)),
        },
        "link_capacity": draw(_CAPACITY),
        "transport": {"pipelining": draw(st.booleans())},
        "conversion": {
            "switch_s": draw(st.sampled_from([0.0, 2.0])),
            "drain_limit_s": draw(st.sampled_from([0.5, 5.0, 120.0])),
            "warmup_s": draw(st.sampled_from([0.0, 3.0])),
            "warmup_speed": draw(st.sampled_from([0.25, 1.0])),
        },
        "control": {
            "control_interval_s": interval_s,
            "conversion_interval_s": interval_s * draw(st.integers(1, 6)),
        },
        "slo": {
            "ttft_s": draw(st.sampled_from([None, 0.5, 6.0])),
            "tpot_s": draw(st.sampled_from([None, 0.025])),
        },
        "admission": {
            "max_input_tokens": draw(st.sampled_from([None, None, 30_000])),
            "max_queue_requests": draw(st.sampled_from([None, 1, 10])),
        },
        "measure": {"horizon_s": horizon_s, "warmup_s": draw(st.sampled_from([0.0, horizon_s / 3]))},
    }
    return Scenario.model_validate(raw)


@settings(max_examples=125)
@given(
    scenario=scenarios(),
    routing=st.sampled_from(["threshold", "margin"]),
    action=st.sampled_from(["discrete", "continuous"]),
    reward=st.sampled_from(["waiting", "cost", "goodput"]),
    engine=st.sampled_from(ENGINES),
    seed=st.integers(0, 2**31),
)
@pytest.mark.filterwarnings("error")
def test_a_random_policy_on_a_random_scenario(
    scenario: Scenario, routing: str, action: str, reward: str, engine: str, seed: int
) -> None:
    """125 scenarios, two episodes of 40 steps each: 10,000 steps."""
    env = PrfaasEnv(scenario, engine=engine, routing=routing, action=action, reward=reward)
    check_env_conserves(env, steps=STEPS, seed=seed)
    end = _last_step(env, seed)
    json.dumps(end["episode_metrics"], allow_nan=False)  # every figure is finite or null


def _last_step(env: gym.Env[Any, Any], seed: int) -> dict[str, Any]:
    """Info of the last step of episode `seed`, played with the first action of the grid and the last one in turns."""
    observation, info = env.reset(seed=seed)
    space = env.action_space
    ends = (
        (np.zeros(space.shape, np.int64), space.nvec - 1)
        if isinstance(space, gym.spaces.MultiDiscrete)
        else (space.low, space.high)
    )
    steps, truncated = 0, False
    while not truncated:
        observation, reward, _, truncated, info = env.step(ends[steps % 2])
        steps += 1
        assert observation in env.observation_space
        assert math.isfinite(float(reward))
    assert steps == STEPS
    return info
