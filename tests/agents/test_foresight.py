"""Foresight: the columns are the work to come, the critic reads them, and nothing of them reaches the actor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from prfaas_agents.algorithms import make_learner
from prfaas_agents.export import export_network
from prfaas_agents.foresight import EDGES_S, FORESIGHT, Foresight
from prfaas_agents.ppo import fit_scaling
from prfaas_agents.settings import LearnerSettings, MaskablePpoSettings, PpoSettings
from prfaas_agents.vec_env import BatchedVecEnv, WithForesight, make_batched_vec_env
from prfaas_env.decision import ActionCodec
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.world import CapacityTrace, World, draw_world
from prfaas_env.workload.requests import RequestTable

INTERVAL = "control.control_interval_s=15"
SHORT = load_scenario("drift", overrides=["measure.horizon_s=90", INTERVAL])
SITES = load_scenario("two_regions", overrides=["measure.horizon_s=60", INTERVAL])
N_SEEN = 83
SETTINGS = {"n_steps": 6, "batch_size": 12, "n_epochs": 2, "hidden": (8,), "learning_rate": 0.01}


def by_hand(arrival_s: list[float], inputs: list[int], outputs: list[int], horizon_s: float) -> World:
    """A world of one site with these requests and a link that has 20 Gbps at first and 10 Gbps from 30 s on."""
    scenario = load_scenario("paper", overrides=[f"measure.horizon_s={horizon_s}", INTERVAL])
    world = draw_world(scenario, 0)
    requests = RequestTable.without_prefixes(
        (np.array(arrival_s) * 1e9).astype(np.int64), np.array(inputs), np.array(outputs)
    )
    link = CapacityTrace(np.array([0, 30 * 10**9]), np.array([20e9, 10e9]))
    pd_of = np.zeros(len(requests), dtype=np.int64)
    return replace(world, requests=requests, pd_of=pd_of, links=(link,))


def test_columns_by_hand() -> None:
    world = by_hand([1.0, 16.0, 44.9, 45.0], [1_000, 40_000, 2_000, 20_000], [500, 1_000, 100, 2_000], 60.0)
    sight = Foresight(world.scenario, 15.0)
    assert sight.n_fields == 5 * (len(EDGES_S) - 1)
    table = sight.table(world)
    assert table.shape == (5, 5)  # kinds; sums at 0, 15, 30, 45 and 60 s
    start, later = sight.rows(np.stack([table, table]), np.array([0, 2]))
    # at 0: [0, 15), [15, 30), [30, 60), [60, 120), ...
    long_15_s = 40_000 / 20_000 / 15
    assert start[:5] == pytest.approx([1 / 15, 0.05 / 15, 0.0, 0.5 / 15, math.log1p(2.0)])
    assert start[5:10] == pytest.approx([1 / 15, long_15_s, long_15_s, 1.0 / 15, math.log1p(2.0)])
    assert start[10:15] == pytest.approx([2 / 30, 1.1 / 30, 1.0 / 30, 2.1 / 30, math.log1p(1.0)])
    assert (start[15:] == 0.0).all()  # nothing comes after the horizon
    # at 30 s the third request is in the first stretch and the fourth in the second
    assert later[:5] == pytest.approx([1 / 15, 0.1 / 15, 0.0, 0.1 / 15, math.log1p(1.0)])
    assert later[5:10] == pytest.approx([1 / 15, 1.0 / 15, 1.0 / 15, 2.0 / 15, math.log1p(1.0)])
    assert (later[10:] == 0.0).all()


def test_every_cluster_and_link_has_columns_of_its_own() -> None:
    world = draw_world(SITES, 5)
    sight = Foresight(SITES, 15.0)
    n_pd, n_links = len(SITES.deployment.pd), len(SITES.deployment.links)
    table = sight.table(world)
    assert table.shape[0] == 4 * n_pd + n_links
    assert n_pd > 1
    for pd in range(n_pd):
        assert table[4 * pd, -1] * 15.0 == pytest.approx((world.pd_of == pd).sum())


def made(*scenarios: Scenario, n: int = 4, **arguments: Any) -> tuple[BatchedVecEnv, WithForesight]:
    batched = make_batched_vec_env(scenarios, n, routing="margin", **arguments)
    return batched, WithForesight(batched, batched)


def test_the_wrapper_adds_columns_and_follows_each_env_into_its_next_episode() -> None:
    longer = load_scenario("drift", overrides=["measure.horizon_s=120", INTERVAL])
    batched, env = made(SHORT, longer)
    env.seed(7)
    seen: Any = env.reset()
    assert seen.shape == (4, *env.observation_space.shape)
    assert env.observation_space.contains(seen[0])
    sights = [Foresight(b.scenario, 15.0) for b in batched.batches]
    steps = np.zeros(4, dtype=np.int64)
    ended = 0
    worlds = [batched.batches[e // 2].world_of(e % 2) for e in range(4)]
    for _ in range(20):
        for e in range(4):
            sight = sights[e // 2]
            expected = sight.rows(sight.table(worlds[e])[None], steps[e : e + 1])[0]
            assert np.array_equal(seen[e, N_SEEN:], expected)
        env.step_async(np.tile([6, 1], (4, 1)))
        seen, _, dones, infos = env.step_wait()
        steps += 1
        for e in np.flatnonzero(dones).tolist():
            ended += 1
            last = infos[e]["terminal_observation"]
            assert last.shape == env.observation_space.shape
            assert (last[N_SEEN:] == 0.0).all()
            steps[e] = 0
            before, worlds[e] = worlds[e], batched.batches[e // 2].world_of(e % 2)
            assert worlds[e].seed != before.seed
    assert ended == 2 * (20 // 6) + 2 * (20 // 8)
    env.close()


@pytest.mark.parametrize("settings", [MaskablePpoSettings(**SETTINGS), PpoSettings(**SETTINGS)])
def test_the_critic_reads_them_and_the_actor_does_not(settings: LearnerSettings) -> None:
    _, env = made(SHORT)
    n_hidden = env.observation_space.shape[0] - N_SEEN  # type: ignore[index]
    codec = ActionCodec(1, "margin", settings.form)
    model = make_learner(env, codec, settings, 0, {FORESIGHT: n_hidden})
    fit_scaling(model, 6)
    model.learn(48)
    policy: Any = model.policy
    rng = np.random.default_rng(0)
    seen = torch.as_tensor(rng.random((32, N_SEEN + n_hidden)).astype(np.float32))
    other = seen.clone()
    other[:, N_SEEN:] = torch.as_tensor(rng.random((32, n_hidden)).astype(np.float32) * 10)

    def logits(observations: torch.Tensor) -> torch.Tensor:
        features = policy.extract_features(observations, policy.pi_features_extractor)
        found: torch.Tensor = policy.action_net(policy.mlp_extractor.forward_actor(features))
        return found

    with torch.no_grad():
        assert torch.equal(logits(seen), logits(other))
        assert not torch.allclose(policy.predict_values(seen), policy.predict_values(other))
    network = onnx.load_from_string(export_network(model, codec, N_SEEN).content)
    assert [d.dim_value for d in network.graph.input[0].type.tensor_type.shape.dim][-1] == N_SEEN
    env.close()


def test_without_foresight_a_network_is_what_it_was() -> None:
    batched = make_batched_vec_env([SHORT], 2, routing="margin")
    codec = ActionCodec(1, "margin", "discrete")
    model = make_learner(batched, codec, MaskablePpoSettings(**SETTINGS), 0)
    nets: Any = model.policy.mlp_extractor
    assert nets.policy_net[0].in_features == nets.value_net[0].in_features == N_SEEN
    batched.close()


def test_staggered_envs_end_their_first_episodes_at_different_times() -> None:
    batched = make_batched_vec_env([SHORT], 3, routing="margin", stagger=True)
    batched.seed(1)
    batched.reset()
    ends: list[list[int]] = [[], [], []]
    for step in range(1, 19):
        batched.step_async(np.tile([6, 1], (3, 1)))
        _, _, dones, _ = batched.step_wait()
        for e in np.flatnonzero(dones).tolist():
            ends[e].append(step)
    assert ends == [[6, 12, 18], [4, 10, 16], [2, 8, 14]]
    batched.close()
