"""The shipped policy: its figures are those that were published, it needs no torch, and it does not swing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from prfaas_agents.shipped_policies import FOLDER, learned, topologies
from prfaas_env.base import PrfaasError
from prfaas_env.decision import Move
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import Telemetry

#: 200 decisions and a few.
HOUR = "measure.horizon_s=3150"
EVEN = "workload.arrivals.kind=deterministic"


def ordered(scenario: Any, seed: int = 1) -> list[int]:
    """Moves that began, in order: 1 prefill to decode, -1 back."""
    timeline = simulate(scenario, make_policy("learned"), seed=seed, timeline=True).timeline
    prefill, decode = (np.diff(timeline[f"{role}_instances"]) for role in ("prefill", "decode"))
    return [1 if p < 0 else -1 for p, d in zip(prefill, decode, strict=True) if p < 0 or d < 0]


def flips(moves: list[int]) -> int:
    """Moves back."""
    return sum(a != b for a, b in itertools.pairwise(moves))


def constant(rate_rps: float, tokens: int) -> Any:
    lengths = f"workload.input_tokens={{kind: fixed, tokens: {tokens}}}"
    return load_scenario("paper", overrides=[EVEN, f"workload.arrivals.rate_rps={rate_rps}", lengths, HOUR])


@pytest.mark.parametrize("topology", topologies())
def test_figures_are_the_published_ones(topology: str) -> None:
    published = json.loads((FOLDER / "figures.json").read_text())[topology]
    for scenario, by_seed in published["ttft_mean_s"].items():
        for seed, expected in by_seed.items():
            episode = simulate(load_scenario(scenario), learned(topology), seed=int(seed))
            assert episode.metrics["ttft_s"]["mean"] == pytest.approx(expected, rel=0.02), (scenario, seed)


@pytest.mark.parametrize(
    ("rate_rps", "tokens"), [(0.5, 20_000), (1.2, 20_000), (1.9, 20_000), (2.3, 20_000), (2.5, 10_000), (1.5, 40_000)]
)  # fmt: skip
def test_at_most_one_flip_in_200_intervals_of_constant_load(rate_rps: float, tokens: int) -> None:
    assert flips(ordered(constant(rate_rps, tokens))) <= 1


def test_one_huge_prompt_a_minute_moves_nothing_back_and_forth() -> None:
    assert flips(ordered(constant(1 / 60, 120_000))) <= 1


def test_an_empty_system_and_missing_metrics() -> None:
    scenario = load_scenario("paper", overrides=["workload.arrivals.rate_rps=0", HOUR])
    assert flips(ordered(scenario)) <= 1
    schema = scenario_schema(scenario)
    policy = learned()
    policy.reset(PolicyContext(scenario, schema, 0))
    moves, margins = [], set()
    for k in range(200):
        # nothing known but the split: every flag 0, every count 0
        values = np.zeros(len(schema))
        values[schema.index["pd0.prefill_instances"]] = 3
        values[schema.index["pd0.decode_instances"]] = 5
        reading = Telemetry(
            schema,
            15 * k * 10**9,
            values,
            conversion_tick=k > 0,
            legal_moves=((True, True, True),),
            recent_lengths_tokens=(np.zeros(0, dtype=np.int64),),
        )
        decided = policy.decide(reading).clusters[0]
        margins.add(decided.margin_s)
        moves.append(decided.move)
    assert len(margins) == 1  # nothing changes, so it holds one
    assert flips([int(m) for m in moves if m is not Move.NONE]) <= 1


def test_an_unknown_topology_and_another_one() -> None:
    with pytest.raises(PrfaasError, match="no bundle for topology 'moon'; there is one_site"):
        make_policy("learned:topology=moon")
    with pytest.raises(PrfaasError, match="trained on other telemetry than this deployment"):
        simulate(load_scenario("two_regions"), make_policy("learned"), seed=1)


def test_it_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['stable_baselines3'] = None;"
        "from prfaas_env.policy import make_policy; make_policy('learned')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
