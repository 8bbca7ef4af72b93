"""Training envs: seeds, the mix, workers that start afresh, episode files."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from prfaas_env.env import PrfaasEnv
from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.envs import (
    EPISODE_COLUMNS,
    EnvFactory,
    EpisodeColumns,
    ScenarioMix,
    ShapedReward,
    make_vec_env,
    shaped,
)

Quick = Callable[..., TrainingConfig]
TWO = [
    {"scenario": "paper", "overrides": ["measure.horizon_s=15"], "weight": 3},
    {"scenario": "drift", "overrides": ["measure.horizon_s=30"], "weight": 1},
]


def factory(config: TrainingConfig, index: int = 0, folder: Path | None = None, **changes: Any) -> EnvFactory:
    fields: dict[str, Any] = {
        "index": index,
        "scenarios": config.at_decision_interval(config.load_scenarios()),
        "weights": tuple(s.weight for s in config.scenarios),
        "seeds": config.training_seeds.seeds,
        "routing": config.routing,
        "reward": config.reward,
        "reference": config.reference,
        "engine": config.engine,
        "reward_shape": "plain",
        "reward_factor": 1.0,
        "episodes_folder": folder,
    }
    return EnvFactory(**{**fields, **changes})


def mix_of(env: Any) -> ScenarioMix:
    mix = env.unwrapped
    assert isinstance(mix, ScenarioMix)
    return mix


def episodes(env: Any, n: int, seed: int) -> list[tuple[str, int]]:
    """(scenario, episode seed) of n episodes after one seeded reset."""
    out = []
    for k in range(n):
        _, info = env.reset(seed=seed if k == 0 else None)
        out.append((info["scenario"], info["episode_seed"]))
    return out


def test_one_seed_fixes_all_episodes_and_others_differ(quick: Quick) -> None:
    config = quick(scenarios=TWO)
    drawn = episodes(factory(config)(), 6, 7)
    assert episodes(factory(config)(), 6, 7) == drawn
    assert len({seed for _, seed in drawn}) == 6
    assert not {seed for _, seed in drawn} & {seed for _, seed in episodes(factory(config)(), 6, 8)}


def test_the_same_seed_in_another_process(quick: Quick) -> None:
    code = (
        "import sys, json, pickle, base64\n"
        "env = pickle.loads(base64.b64decode(sys.argv[1]))()\n"
        "out = []\n"
        "for k in range(3):\n"
        "    _, info = env.reset(seed=7 if k == 0 else None)\n"
        "    out.append([info['scenario'], info['episode_seed'], env.unwrapped.inner._run.world.requests"
        ".arrival_ns.tolist()[:5]])\n"
        "print(json.dumps(out))\n"
    )
    import base64
    import pickle

    config = quick(scenarios=TWO)
    text = base64.b64encode(pickle.dumps(factory(config))).decode()
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=True)
    env: Any = factory(config)()
    own = []
    for k in range(3):
        _, info = env.reset(seed=7 if k == 0 else None)
        run = mix_of(env).inner._run
        assert run is not None
        own.append([info["scenario"], info["episode_seed"], run.world.requests.arrival_ns.tolist()[:5]])
    assert json.loads(done.stdout) == own


def test_copies_with_one_base_seed_play_different_episodes(quick: Quick) -> None:
    vec_env = make_vec_env(quick(n_envs=4), None)
    vec_env.seed(11)
    vec_env.reset()
    seeds = {info["episode_seed"] for info in vec_env.reset_infos}
    for _ in range(8):  # two episodes more of 60 s at 15 s each
        _, _, dones, _ = vec_env.step(np.tile(quick().codec().neutral(), (4, 1)))
        if dones.all():
            seeds |= {info["episode_seed"] for info in vec_env.reset_infos}
    assert len(seeds) == 12


def test_seeds_stay_in_their_range_and_weights_are_kept(quick: Quick) -> None:
    config = quick(scenarios=TWO, training_seeds={"first": 50, "count": 3})
    drawn = episodes(factory(config)(), 400, 1)
    assert {seed for _, seed in drawn} == {50, 51, 52}
    share = sum(name == "paper" for name, _ in drawn) / 400
    assert share == pytest.approx(0.75, abs=0.07)


def test_both_env_checks_pass(quick: Quick) -> None:
    check_env(factory(quick(scenarios=TWO))(), warn=True)


def test_masks_and_figures_are_those_of_the_env_that_plays(quick: Quick) -> None:
    env: Any = factory(quick(scenarios=TWO))()
    for k in range(4):
        env.reset(seed=3 if k == 0 else None)
        inner = mix_of(env).inner
        assert isinstance(inner, PrfaasEnv)
        assert np.array_equal(env.get_wrapper_attr("action_masks")(), inner.action_masks())
        _, _, _, _, info = env.step(inner.codec.neutral())
        assert mix_of(env).episode_metrics()["requests"]["arrived"] == info["arrived"]
    env.close()


@pytest.mark.parametrize(
    ("shape", "reward", "shaped"),
    [
        ("plain", -3.0, -0.3),
        ("log", -(math.e - 1.0), -0.1),
        ("log", math.e**2 - 1.0, 0.2),
        ("log", 0.0, 0.0),
    ],
)
def test_the_shaped_reward_by_hand(quick: Quick, shape: Any, reward: float, shaped: float) -> None:
    env = ShapedReward(factory(quick())(), shape, 0.1)
    assert env.reward(reward) == pytest.approx(shaped)


def test_episode_files_hold_the_reward_of_the_env(quick: Quick, tmp_path: Path) -> None:
    env: Any = factory(quick(), folder=tmp_path, reward_shape="log", reward_factor=0.05)()
    env.reset(seed=0)
    own, learned_from = 0.0, 0.0
    while True:
        _, reward, _, truncated, info = env.step(quick().codec().neutral())
        own += math.fsum(info["reward_terms"].values())
        learned_from += reward
        if truncated:
            break
    rows = read_episodes(tmp_path / "0.monitor.csv")
    assert float(rows[0]["r"]) == pytest.approx(own, abs=1e-6)
    assert learned_from != pytest.approx(own)
    assert int(rows[0]["l"]) == 4


def read_episodes(path: Path) -> list[dict[str, str]]:
    """Rows as Stable-Baselines3's reader sees them: a comment line of JSON, a header, rows."""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#")
    json.loads(lines[0][1:])
    return list(csv.DictReader(lines[1:]))


def check_episode_files(folder: Path, n_files: int, least: int) -> None:
    files = sorted(folder.glob("*.monitor.csv"))
    assert len(files) == n_files
    for path in files:
        rows = read_episodes(path)
        assert len(rows) >= least
        for row in rows:
            assert set(row) == {"r", "l", "t", *EPISODE_COLUMNS}
            assert all(value not in ("", None) for value in row.values()), row
            assert 0 <= int(row["episode_seed"]) < 1_000_000
            float(row["ttft_p90_s"])
            float(row["link_utilisation"])


def test_every_worker_writes_a_file_of_its_own(quick: Quick, tmp_path: Path) -> None:
    vec_env = DummyVecEnv([factory(quick(scenarios=TWO), k, tmp_path) for k in range(4)])
    vec_env.seed(0)
    vec_env.reset()
    for _ in range(6):
        vec_env.step(np.tile(quick().codec().neutral(), (4, 1)))
    # Rows are there without closing: a killed run loses at most the row being written.
    check_episode_files(tmp_path, 4, 3)
    torn = tmp_path / "0.monitor.csv"
    whole = read_episodes(torn)
    torn.write_text(torn.read_text()[:-20])
    assert read_episodes(torn)[: len(whole) - 1] == whole[:-1]
    try:
        from stable_baselines3.common.monitor import load_results

        assert len(load_results(str(tmp_path))) >= 11
    except ImportError:  # its reader needs pandas, which we do not install
        pass
    vec_env.close()


# ------------------------------------------------------------------------------------------------ batched


BATCHED = {"vectorization": "batched", "engine": "compiled", "n_envs": 4}


def test_batched_envs_play_what_single_ones_play(quick: Quick) -> None:
    """Same episode seeds and actions: same observations, rewards and episode columns."""
    config = quick(scenarios=TWO, reward_shape="log", **BATCHED)
    batched = make_vec_env(config, None)
    batched.seed(3)
    observations = batched.reset()
    inside = batched.venv.venv  # type: ignore[attr-defined]
    assert isinstance(inside, EpisodeColumns)
    # 3 of 4 envs play the scenario of weight 3.
    names = [batch.scenario.name for batch in inside.venv.batches for _ in range(batch.num_envs)]
    assert names == ["paper", "paper", "paper", "drift"]
    seeds = [int(info["episode_seed"]) for info in inside.venv.reset_infos]
    assert len(set(seeds)) == 4
    scenarios = {s.name: s for s in config.at_decision_interval(config.load_scenarios())}
    single = [PrfaasEnv(scenarios[n], routing="margin", engine="simpy") for n in names]
    assert np.array_equal(observations, [env.reset(seed=k)[0] for env, k in zip(single, seeds, strict=True)])
    rng = np.random.default_rng(0)
    actions = np.stack([rng.integers(13, size=4), rng.integers(3, size=4)], axis=1)
    observations, rewards, dones, infos = batched.step(actions)
    for e, env in enumerate(single):
        own, reward, _, truncated, info = env.step(actions[e])
        assert rewards[e] == pytest.approx(shaped(np.array(reward), "log", 1 - config.ppo.gamma), rel=1e-5)
        assert dones[e] == truncated
        assert infos[e]["reward_terms"] == pytest.approx(info["reward_terms"])
        if truncated:
            assert names[e] == infos[e]["scenario"] == "paper"
            assert infos[e]["episode_seed"] == seeds[e]
            assert infos[e]["ttft_p90_s"] == info["episode_metrics"]["ttft_s"]["p90"]
            assert infos[e]["TimeLimit.truncated"]
            assert np.array_equal(infos[e]["terminal_observation"], own)
        else:
            assert np.array_equal(observations[e], own)  # type: ignore[index]
    assert dones.tolist() == [True, True, True, False]
    batched.close()


def test_batched_episode_file_and_masks(quick: Quick, tmp_path: Path) -> None:
    batched = make_vec_env(quick(scenarios=TWO, **BATCHED), tmp_path)
    batched.seed(0)
    batched.reset()
    assert [len(mask) for mask in batched.env_method("action_masks")] == [16] * 4
    total = np.zeros(4)
    for _ in range(4):
        infos = batched.step(np.tile(quick().codec().neutral(), (4, 1)))[3]
        total += [math.fsum(info["reward_terms"].values()) for info in infos]
        if "episode" in infos[3]:
            assert infos[3]["episode"]["r"] == pytest.approx(total[3], abs=1e-5)
            total[3] = 0.0
    check_episode_files(tmp_path, 1, 14)
    rows = read_episodes(tmp_path / "0.monitor.csv")
    assert [row["scenario"] for row in rows].count("drift") == 2
    assert len({row["episode_seed"] for row in rows}) == len(rows)
    assert batched.env_method("episode_metrics", indices=[0])[0]["requests"]["arrived"] == 0
    batched.close()


# ------------------------------------------------------------------------------------------- fresh workers


@pytest.fixture(scope="module", params=["spawn", "forkserver"])
def workers(request: pytest.FixtureRequest) -> Iterator[VecEnv]:
    from .conftest import quick

    config = quick(scenarios=TWO)
    made = SubprocVecEnv([factory(config, k) for k in range(2)], start_method=request.param)
    yield made
    made.close()


def test_workers_that_start_afresh_give_attributes_and_masks(workers: VecEnv) -> None:
    workers.seed(5)
    observations = workers.reset()
    assert np.asarray(observations).shape == (2, workers.observation_space.shape[0])  # type: ignore[index]
    masks = workers.env_method("action_masks")
    assert [len(mask) for mask in masks] == [16, 16]
    assert workers.get_attr("action_space") == [workers.action_space] * 2
    figures = workers.env_method("episode_metrics")
    assert figures[0]["requests"]["arrived"] == 0
    seeds = [info["episode_seed"] for info in workers.reset_infos]
    assert seeds[0] != seeds[1]


def test_workers_do_as_the_main_process_does(workers: VecEnv, quick: Quick) -> None:
    config = quick(scenarios=TWO)
    own = DummyVecEnv([factory(config, k) for k in range(2)])
    action = np.tile(config.codec().neutral(), (2, 1))
    for vec_env in (workers, own):
        vec_env.seed(9)
    assert np.array_equal(workers.reset(), own.reset())
    for _ in range(3):
        a, b = workers.step(action), own.step(action)
        assert np.array_equal(a[0], b[0])
        assert a[1] == pytest.approx(b[1], rel=1e-6)  # one keeps float32, the other float64
        assert np.array_equal(a[2], b[2])
