"""`PrfaaS-v0`: the checkers, seeding, bounds under any load, the end of an episode, processes, snapshots, rendering."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import prfaas_env
from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision, Move
from prfaas_env.env import TRAINING_SEEDS, PrfaasEnv
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.simulator.engine import ENGINES
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import World, draw_world
from prfaas_env.telemetry import Telemetry
from prfaas_env.testing import check_env_conserves

ROUTINGS, FORMS, REWARDS = (
    ("threshold", "margin"),
    ("discrete", "continuous"),
    ("waiting", "goodput", "cost", "paired"),
)
ENGINE = pytest.mark.parametrize("engine", ENGINES)


def short(horizon_s: float = 30, *more: str, name: str = "paper") -> Scenario:
    return load_scenario(name, overrides=[f"measure.horizon_s={horizon_s}", *more])


def make(scenario: Scenario | str | None = None, **kwargs: Any) -> PrfaasEnv:
    env = gym.make("PrfaaS-v0", scenario=scenario or short(), **kwargs).unwrapped
    assert isinstance(env, PrfaasEnv)
    return env


def world_of(env: gym.Env[Any, Any]) -> World:
    inner = env.unwrapped
    assert isinstance(inner, PrfaasEnv)
    return inner.snapshot().engine.world


def world_hash(world: World) -> str:
    """Hash of everything random of an episode."""
    requests = world.requests
    columns = [requests.arrival_ns, requests.input_tokens, requests.output_tokens, world.pd_of]
    columns += [c for link in world.links for c in (link.time_ns, link.capacity_bps)]
    return hashlib.sha256(b"".join(c.tobytes() for c in columns)).hexdigest()[:16]


def play(env: gym.Env[Any, Any], actions: Any) -> list[tuple[Any, ...]]:
    """Transitions in a form that compares exactly."""
    out = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        mask = info.pop("action_mask")
        out.append((observation.tolist(), reward, terminated, truncated, mask.tolist(), info))
    return out


def sampled(env: gym.Env[Any, Any], n: int, seed: int = 0) -> list[Any]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(n)]


def run_python(code: str, *args: str, cwd: Path) -> str:
    """Standard output of a fresh interpreter; an error of it fails the test with its message."""
    command = [sys.executable, "-c", code, *args]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# ------------------------------------------------------------------ checkers


@pytest.mark.parametrize(
    ("name", "routing", "form", "reward"),
    [
        (name, routing, form, REWARDS[k % 4])
        for k, (name, routing, form) in enumerate(product(scenario_names(), ROUTINGS, FORMS))
    ],
)
def test_both_checkers_find_nothing(
    name: str, routing: str, form: str, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gymnasium's, all render modes included, and Stable-Baselines3's, with every warning an error."""
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kwargs = {"scenario": name, "routing": routing, "action": form, "reward": reward}
        check_env(gym.make("PrfaaS-v0", **kwargs).unwrapped)
        sb3.check_env(gym.make("PrfaaS-v0", **kwargs).unwrapped)
        sb3.check_env(gym.make("PrfaaS-v0", **kwargs))
    capsys.readouterr()  # what render_mode="human" printed


@ENGINE
def test_every_engine_passes_the_checker(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(engine=engine, reward="paired"), skip_render_check=True)


def test_default_wrappers_find_nothing() -> None:
    """`gym.make` checks every transition of the first episode and warns about what it finds."""
    env = gym.make("PrfaaS-v0", scenario=short(60))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            env.reset(seed=1)
            for action in sampled(env, 60):
                _, _, _, truncated, _ = env.step(action)
        assert truncated


# ------------------------------------------------------------------ making


def test_registration_is_one_id_without_a_time_limit_of_its_own() -> None:
    spec = gym.spec("PrfaaS-v0")
    assert prfaas_env.ENV_ID == "PrfaaS-v0"
    assert spec.entry_point == "prfaas_env.env:PrfaasEnv"
    assert spec.max_episode_steps is None
    assert not spec.nondeterministic
    prfaas_env.register_envs()
    assert gym.spec("PrfaaS-v0") is spec


def test_spaces_are_flat_and_bounded() -> None:
    env = make()
    assert env.observation_space == gym.spaces.Box(0.0, 1.0, (len(env.schema),), np.float32)
    assert env.action_space == gym.spaces.MultiDiscrete([18, 3])
    assert make(routing="margin").action_space == gym.spaces.MultiDiscrete([13, 3])
    assert make(action="continuous").action_space == gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_scenario_by_name_path_or_object(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: drift\nname: mine\n")
    drift = load_scenario("drift")
    for spec in ("drift", drift, path, str(path)):
        assert make(spec).scenario.hash == drift.hash
    assert gym.make("PrfaaS-v0").unwrapped.scenario == load_scenario("paper")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scenario": "papr"}, "unknown scenario 'papr'; shipped: "),
        ({"engine": "gpu"}, "engine is 'gpu'; allowed: "),
        ({"routing": "length"}, "routing is 'length'; allowed: 'threshold', 'margin'"),
        ({"action": "box"}, "action is 'box'; allowed: 'discrete', 'continuous'"),
        ({"reward": "speed"}, "unknown reward 'speed'; known: waiting, goodput, cost, paired"),
        ({"reward": "paired", "reference": "nobody"}, "unknown policy 'nobody'; installed: "),
    ],
)
def test_wrong_arguments_are_one_line(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(PrfaasError) as caught:
        gym.make("PrfaaS-v0", **kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_render_mode_is_one_line() -> None:
    with pytest.raises(
        PrfaasError, match="render_mode is 'gif'; allowed: None, 'rgb_array', 'ansi', 'human'"
    ):
        PrfaasEnv(render_mode="gif")
    with pytest.raises(TypeError, match="horizon"):
        gym.make("PrfaaS-v0", horizon=5)


def test_reset_has_no_options() -> None:
    env = make()
    env.reset(seed=1, options={})
    with pytest.raises(PrfaasError, match="reset\\(\\) knows no options, found 'split'"):
        env.reset(options={"split": 3})


def test_nothing_works_before_reset() -> None:
    env = make()
    calls: list[Callable[[], Any]] = [
        lambda: env.step(env.codec.neutral()),
        env.action_masks,
        env.snapshot,
        lambda: env.telemetry,
    ]
    for call in calls:
        with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\)"):
            call()


@pytest.mark.parametrize("action", [[18, 0], [0, 3], [-1, 0], [0], [0, 0, 0], [math.nan, 0], [0.5, 0]])
def test_a_wrong_action_changes_nothing(action: list[Any]) -> None:
    env = make()
    env.reset(seed=1)
    with pytest.raises(ValueError, match="action"):
        env.step(np.array(action))
    other = make()
    other.reset(seed=1)
    actions = sampled(env, 5)
    assert play(env, actions) == play(other, actions)


# ------------------------------------------------------------------ bounds and finite values


@pytest.mark.parametrize(("routing", "form"), list(product(ROUTINGS, FORMS)))
def test_observations_stay_inside_under_overload(routing: str, form: str) -> None:
    """500 random steps each (2,000 in all) at three times the load that the deployment can carry."""
    overloaded = load_scenario("paper").with_rate(9.0).replace(measure={"horizon_s": 500})
    env = make(overloaded, routing=routing, action=form)
    observation, info = env.reset(seed=2)
    for action in sampled(env, 500):
        assert observation.dtype == np.float32
        assert observation in env.observation_space
        observation, reward, _, _, info = env.step(action)
        assert isinstance(reward, float)
        assert math.isfinite(reward)
    assert observation in env.observation_space
    assert info["open"] > 1000, "not an overload"


def finite(info: Any) -> bool:
    """Whether every number in an info is finite."""
    if isinstance(info, dict):
        return all(finite(v) for v in info.values())
    if isinstance(info, list | tuple):
        return all(finite(v) for v in info)
    return not isinstance(info, float) or math.isfinite(info)


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("name", ["paper", "homogeneous", "naive"])
def test_zero_traffic_has_defined_values(reward: str, name: str) -> None:
    env = make(short(150, "workload.arrivals.rate_rps=0", "slo.ttft_s=6", name=name), reward=reward)
    observation, _ = env.reset(seed=0)
    for action in sampled(env, 150):
        observation, value, _, truncated, info = env.step(action)
        assert observation in env.observation_space
        assert value == 0.0 if reward != "cost" else value <= 0.0  # conversions still cost
        assert finite(info)
        pd = env.telemetry.pd[0]
        assert (pd.arrivals_valid, pd.lengths_valid, pd.output_valid, pd.ttft_valid, pd.tpot_valid) == (
            1,
            0,
            0,
            0,
            0,
        )
        assert pd.arrival_rate_5s_rps == 0.0
    assert truncated
    metrics = info["episode_metrics"]
    assert metrics["requests"]["arrived"] == 0
    assert metrics["ttft_s"] == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    assert metrics["throughput_rps"] == 0.0
    json.dumps(metrics, allow_nan=False)


@ENGINE
def test_a_role_with_every_node_draining_has_defined_values(engine: str) -> None:
    """The only local prefill node leaves its role while it works; nothing local can prefill until it is back."""
    deployment = "deployment.pd.0={name: pd0, hardware: h20, n_prefill: 1, n_decode: 1, min_prefill: 0}"
    env = make(
        short(
            60, deployment, "workload.arrivals={kind: deterministic, rate_rps: 0.11}", "conversion.switch_s=5"
        ),
        engine=engine,
    )
    env.reset(seed=0)
    away = 0
    for tick in range(60):
        observation, reward, _, _, info = env.step(np.array([17, 0 if tick == 30 else 1]))
        assert observation in env.observation_space
        assert math.isfinite(reward)
        assert finite(info)
        pd = env.telemetry.pd[0]
        if tick >= 30:
            assert pd.prefill_instances == 0
            away += pd.converting_instances == 1
    assert info["conversions"] == 1
    assert info["invalid_moves"] == 0
    assert 5 <= away < 30


@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_an_untrained_gaussian_policy_covers_the_range(squash: str, routing: str) -> None:
    """PPO starts with N(0, 1) clipped to the box, SAC with tanh of it: no end may swallow the draws."""
    env = make(routing=routing, action="continuous")
    draws = np.random.default_rng(0).standard_normal((4000, 2))
    actions = np.clip(draws, -1, 1) if squash == "clip" else np.tanh(draws)
    clusters = [env.codec.decode(a.astype(np.float32)).clusters[0] for a in actions]
    moves = np.bincount([c.move for c in clusters], minlength=3) / len(clusters)
    assert moves.min() > 0.2
    if routing == "threshold":
        edges = 1000 * 131.072 ** (np.arange(1, 7) / 7)  # about one octave each, 1K to 128K
        shares = np.bincount(np.digitize([c.threshold_tokens for c in clusters], edges), minlength=7) / len(
            clusters
        )
        assert shares.min() > 0.06
        assert shares.max() < 0.30
    else:
        margins = np.array([c.margin_s for c in clusters])
        for low, high in ((-30, -4), (-4, -1), (-1, 0), (0, 1), (1, 4), (4, 30)):
            assert ((margins > low) & (margins <= high)).mean() > 0.03
        assert np.isinf(margins).mean() < 0.33


# ------------------------------------------------------------------ seeds


def test_the_seed_is_the_episode() -> None:
    env = make()
    for seed in (0, 5, 1_000_003, 2_000_000):
        _, info = env.reset(seed=seed)
        assert info["episode_seed"] == seed
        assert world_hash(world_of(env)) == world_hash(draw_world(env.scenario, seed))


def test_unseeded_resets_follow_the_seeded_one() -> None:
    """One seeded reset makes all later episodes reproducible; they differ and lie in the training range."""

    def episodes(env: PrfaasEnv) -> list[int]:
        env.reset(seed=7)
        return [env.reset()[1]["episode_seed"] for _ in range(20)]

    first = episodes(make())
    assert episodes(make()) == first
    assert len(set(first)) == 20
    assert all(0 <= seed < TRAINING_SEEDS for seed in first)
    assert TRAINING_SEEDS == 1_000_000  # validation and test seeds lie above


def test_actions_do_not_shift_later_episodes() -> None:
    """Neither what was played nor for how long changes which episode comes next."""
    seeds = []
    for steps, reward in ((0, "waiting"), (3, "waiting"), (30, "paired")):
        env = make(reward=reward)
        env.reset(seed=3)
        play(env, sampled(env, steps, seed=steps))
        seeds.append(env.reset()[1]["episode_seed"])
    assert len(set(seeds)) == 1


@pytest.mark.parametrize("seed", [-1, 1.5, "one"])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises((gym.error.Error, TypeError)):
        make().reset(seed=seed)


_WORLDS = """
import sys, hashlib, gymnasium, prfaas_env
env = gymnasium.make("PrfaaS-v0", scenario="drift")
for seed in (11, None, None):
    env.reset(seed=seed)
    world = env.unwrapped.snapshot().engine.world
    columns = [world.requests.arrival_ns, world.requests.input_tokens, world.requests.output_tokens]
    columns += [world.links[0].time_ns, world.links[0].capacity_bps]
    print(hashlib.sha256(b"".join(c.tobytes() for c in columns)).hexdigest())
"""


def test_two_processes_draw_the_same_worlds(tmp_path: Path) -> None:
    first, second = (run_python(_WORLDS, cwd=tmp_path).split() for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_parallel_copies_play_different_episodes() -> None:
    """Four copies from one base seed, three episodes each: twelve different worlds, the same ones again."""

    def worlds() -> list[str]:
        vec = gym.make_vec("PrfaaS-v0", 4, vectorization_mode="sync", scenario=short(3))
        vec.reset(seed=50)
        vec.action_space.seed(1)
        out = [world_hash(world_of(env)) for env in vec.envs]
        for _ in range(2):
            ended = np.zeros(4, dtype=bool)
            while not ended.all():
                _, _, terminated, truncated, _ = vec.step(vec.action_space.sample())
                ended |= truncated
                assert not terminated.any()
            vec.step(vec.action_space.sample())  # resets
            out += [world_hash(world_of(env)) for env in vec.envs]
        vec.close()
        return out

    found = worlds()
    assert len(set(found)) == 12
    assert worlds() == found


def test_the_last_info_passes_through_a_vector_env() -> None:
    vec = gym.make_vec(
        "PrfaaS-v0", 2, vectorization_mode="sync", scenario=short(2.5, "workload.arrivals.rate_rps=1")
    )
    vec.reset(seed=4)
    for _ in range(3):
        *_, truncated, infos = vec.step(np.array([[10, 1], [0, 1]]))
    assert truncated.all()
    assert infos["_episode_metrics"].all()
    arrived = infos["episode_metrics"]["requests"]["arrived"]
    assert arrived.tolist() == infos["arrived"].tolist()
    vec.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_seeded_action_space_is_reproducible(form: str) -> None:
    one, two = make(action=form), make(action=form)
    assert np.array_equal(sampled(one, 20, seed=9), sampled(two, 20, seed=9))
    assert not np.array_equal(sampled(one, 20, seed=9), sampled(two, 20, seed=10))


@ENGINE
def test_other_actions_meet_the_same_arrivals(engine: str) -> None:
    scenario = short(60, "measure.warmup_s=10", name="drift")
    seen = []
    for actions in ([[0, 1]] * 60, [[17, 1]] * 60, [[5, 0], [12, 2]] * 30):
        env = make(scenario, engine=engine)
        env.reset(seed=6)
        seen.append([info["arrived"] for *_, info in play(env, [np.array(a) for a in actions])])
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][-1] > 60


@ENGINE
def test_the_same_seed_and_actions_give_the_same_episode(engine: str) -> None:
    """Also when the two envs take turns: they share no state."""
    one, two = (make(reward="paired", engine=engine) for _ in range(2))
    first, second = one.reset(seed=8), two.reset(seed=8)
    assert np.array_equal(first[0], second[0])
    actions = sampled(one, 30)
    together = [(play(one, [a])[0], play(two, [a])[0]) for a in actions]
    assert all(a == b for a, b in together)
    one.reset(seed=8)
    assert play(one, actions) == [a for a, _ in together]


# ------------------------------------------------------------------ the end of an episode


@pytest.mark.parametrize(
    ("horizon_s", "interval_s", "steps"),
    [(30, 1, 30), (10.5, 1, 11), (10, 3, 4), (2, 0.25, 8), (0.4, 1, 1), (9, 3, 3), (0.3, 0.1, 3)],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_truncated_exactly_at_the_horizon(
    horizon_s: float, interval_s: float, steps: int, engine: str
) -> None:
    control = "control={control_interval_s: %s, conversion_interval_s: %s}"
    env = make(short(horizon_s, control % (interval_s, 15 * interval_s)), engine=engine)
    for seed in (0, 1):
        env.reset(seed=seed)
        for k in range(1, steps + 1):
            observation, _, terminated, truncated, info = env.step(env.codec.neutral())
            assert terminated is False
            assert truncated is (k == steps)
            assert ("episode_metrics" in info) == truncated
            assert info["time_s"] == pytest.approx(min(k * interval_s, horizon_s), abs=1e-9)
        assert observation in env.observation_space
        assert np.array_equal(observation, env.telemetry.encode())  # a normal one: bootstrap from it
        with pytest.raises(
            gym.error.ResetNeeded, match=r"the episode is over: call reset\(\) before step\(\)"
        ):
            env.step(env.codec.neutral())
        assert env.telemetry.time_s == pytest.approx(horizon_s)


class Turns:
    """A policy that changes its mind and moves nodes, legally and not."""

    constant = False

    def reset(self, context: PolicyContext) -> None:
        self.n_pd = context.schema.n_pd

    def decide(self, telemetry: Telemetry) -> Decision:
        tick = round(telemetry.time_s)
        move = Move((tick // 15) % 3)
        if tick % 2:
            return Decision.same(self.n_pd, margin_s=float(tick % 9 - 4), move=move)
        return Decision.same(self.n_pd, threshold_tokens=3_000.0 * (tick % 11), move=move)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("paper", []),
        ("drift", ["measure.warmup_s=33.5"]),
        ("drift", ["measure.horizon_s=77.7", "slo.ttft_s=3"]),
        ("naive", []),
        ("homogeneous", ["admission.max_queue_requests=3", "workload.arrivals.rate_rps=4"]),
        ("mooncake", ["measure.warmup_s=20"]),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_episode_metrics_are_those_of_simulate(name: str, overrides: list[str], engine: str) -> None:
    scenario = load_scenario(name, overrides=["measure.horizon_s=90", *overrides])
    episode = simulate(scenario, Turns(), seed=12, engine=engine)
    env = make(scenario, engine=engine)
    policy = Turns()
    policy.reset(PolicyContext(scenario, env.schema, 0))
    env.reset(seed=12)
    truncated = False
    while not truncated:
        *_, truncated, info = env.step_decision(policy.decide(env.telemetry))
    assert info["episode_metrics"] == episode.metrics
    assert info["invalid_moves"] > 0
    counts = episode.metrics["requests"]
    assert {k: info[k] for k in counts} == counts


def test_a_constant_policy_asked_once_or_every_tick_is_the_same() -> None:
    scenario = short(60, name="drift")
    env = make(scenario)
    env.reset(seed=3)
    policy = make_policy("static:threshold_tokens=9000")
    policy.reset(PolicyContext(scenario, env.schema, 0))
    truncated = False
    while not truncated:
        *_, truncated, info = env.step_decision(policy.decide(env.telemetry))
    assert info["episode_metrics"] == simulate(scenario, policy, seed=3).metrics


# ------------------------------------------------------------------ what is in force


def test_a_decision_holds_from_its_tick_on_and_shows_in_the_next_reading() -> None:
    env = make()
    env.reset(seed=1)
    assert (
        env.telemetry.pd[0].threshold_tokens == 262_144.0
    )  # before the first decision everything stays local
    env.step(np.array([3, 1]))
    assert env.telemetry.pd[0].threshold_tokens == env.codec.grid[3]
    env.step_decision(Decision.same(1, margin_s=2.5))
    pd = env.telemetry.pd[0]
    assert (pd.threshold_valid, pd.margin_valid, pd.margin_s) == (0.0, 1.0, 2.5)


@ENGINE
def test_masks_follow_the_clock_and_illegal_orders_become_none(engine: str) -> None:
    env = make(short(40, "conversion.switch_s=5"), engine=engine)
    _, info = env.reset(seed=1)
    legal = [info["action_mask"][18:].tolist()]
    for tick in range(39):
        order = {3: 2, 15: 0, 16: 2, 30: 2}.get(tick, 1)
        *_, info = env.step(np.array([9, order]))
        assert np.array_equal(info["action_mask"], env.action_masks())
        assert info["action_mask"][:18].all()
        assert info["action_mask"].shape == (21,)
        legal.append(info["action_mask"][18:].tolist())
    none_only = [False, True, False]
    assert legal[15] == [True, True, True]
    assert [k for k, mask in enumerate(legal) if mask != none_only] == [15, 30]
    assert info["conversions"] == 2  # at 15 and at 30
    assert info["invalid_moves"] == 2  # at 3 and at 16


def test_the_mask_does_not_depend_on_the_routing_part() -> None:
    """sb3-contrib masks each part alone: no routing choice may make a move legal or not within a step."""
    masks = []
    for first in range(18):
        env = make(short(40), action="discrete")
        env.reset(seed=2)
        for _ in range(15):
            env.step(np.array([9, 1]))
        masks.append((env.action_masks().tolist(), env.telemetry.legal_moves))
        invalid = env.step(np.array([first, 2]))[4]["invalid_moves"]
        assert invalid == 0
    assert all(m == masks[0] for m in masks)


def test_counts_balance_and_never_fall() -> None:
    env = make(short(60, "admission.max_queue_requests=2", "workload.arrivals.rate_rps=5"))
    _, info = env.reset(seed=5)
    keys = (
        "arrived",
        "finished",
        "rejected",
        "aborted",
        "remote",
        "conversions",
        "invalid_moves",
        "egress_bits",
    )
    assert all(info[k] == 0 for k in (*keys, "open", "clipped", "time_s"))
    for action in sampled(env, 60):
        before = info
        *_, info = env.step(action)
        assert info["arrived"] == info["finished"] + info["open"] + info["rejected"] + info["aborted"]
        assert all(info[k] >= before[k] for k in keys)
    assert info["rejected"] > 0
    assert info["remote"] > 0
    assert info["egress_bits"] > 0


def test_clips_are_counted() -> None:
    env = make(short(20, "workload.arrivals={kind: deterministic, rate_rps: 1100}"))
    env.reset(seed=0)
    clipped = [info["clipped"] for *_, info in play(env, [env.codec.neutral()] * 20)]
    assert clipped[-1] > 20  # 1,100 req/s is above the range of the three rate fields
    assert clipped == sorted(clipped)
    assert env.reset(seed=0)[1]["clipped"] == 0


# ------------------------------------------------------------------ processes


def test_import_is_light(tmp_path: Path) -> None:
    """Beside itself, importing the package loads nothing that Gymnasium does not load anyway."""
    code = (
        "import sys, gymnasium; before = set(sys.modules); import prfaas_env; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(sorted(new), sorted(m for m in sys.modules if m.startswith('prfaas')))"
    )
    assert run_python(code, cwd=tmp_path) == "['prfaas_env'] ['prfaas_env']"


def test_an_episode_needs_no_learning_library(tmp_path: Path) -> None:
    code = """
import sys
for name in ("torch", "stable_baselines3", "sb3_contrib", "matplotlib", "pandas", "tensorboard"):
    sys.modules[name] = None
import gymnasium
env = gymnasium.make("prfaas_env:PrfaaS-v0")  # alone: the module part registers the id
observation, info = env.reset(seed=1)
for _ in range(5):
    observation, *_ = env.step(env.action_space.sample())
print(observation.shape == env.observation_space.shape)
"""
    assert run_python(code, cwd=tmp_path) == "True"


_CONTINUE = """
import pickle, sys
from pathlib import Path
env, actions = pickle.loads(Path("env.pickle").read_bytes())
rewards = [env.step(a)[1] for a in actions]
print(repr((rewards, env.unwrapped.telemetry.values.tolist(), env.reset()[1]["episode_seed"])))
"""


@pytest.mark.parametrize("reward", ["waiting", "paired"])
@ENGINE
def test_a_running_env_pickles_into_another_process(tmp_path: Path, reward: str, engine: str) -> None:
    env = gym.make("PrfaaS-v0", scenario=short(60), reward=reward, engine=engine)
    env.reset(seed=4)
    actions = sampled(env, 40)
    for action in actions[:20]:
        env.step(action)
    (tmp_path / "env.pickle").write_bytes(pickle.dumps((env, actions[20:])))
    there = run_python(_CONTINUE, cwd=tmp_path)
    rewards = [env.step(a)[1] for a in actions[20:]]
    here = (rewards, env.unwrapped.telemetry.values.tolist(), env.reset()[1]["episode_seed"])
    assert there == repr(here)


def test_an_env_that_was_never_reset_pickles() -> None:
    env = pickle.loads(pickle.dumps(make(reward="paired")))
    again = make(reward="paired")
    assert np.array_equal(env.reset(seed=1)[0], again.reset(seed=1)[0])
    actions = sampled(again, 5)
    assert play(env, actions) == play(again, actions)


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_worker_processes_of_sb3(method: str) -> None:
    """Fresh interpreters build the env from a factory; attributes and masks come back over the pipe."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    factory = functools.partial(gym.make, "prfaas_env:PrfaaS-v0", scenario=short(30), reward="paired")
    vec = vec_env.SubprocVecEnv([factory, factory], start_method=method)
    try:
        vec.seed(5)
        first = vec.reset()
        local = [make(short(30), reward="paired") for _ in range(2)]
        assert np.array_equal(first, [e.reset(seed=5 + k)[0] for k, e in enumerate(local)])
        assert [s.hash for s in vec.get_attr("scenario")] == [short(30).hash] * 2
        for tick in range(16):
            masks = np.stack(vec.env_method("action_masks"))
            assert np.array_equal(masks, [e.action_masks() for e in local])
            action = np.array([[tick % 18, 1], [17 - tick % 18, 1]])
            observations, rewards, _, _ = vec.step(action)
            here = [e.step(a) for e, a in zip(local, action, strict=True)]
            assert np.array_equal(observations, [h[0] for h in here])
            assert rewards.tolist() == [h[1] for h in here]
        assert masks[:, 18:].all()  # tick 15: conversions are legal
    finally:
        vec.close()


# ------------------------------------------------------------------ snapshots


@pytest.fixture(params=list(product(ENGINES, ("waiting", "paired"))), ids=str)
def running(request: pytest.FixtureRequest) -> tuple[PrfaasEnv, list[Any], Callable[[], PrfaasEnv]]:
    """An env at step 20 of 60 with the actions for all of them, and a maker of equal ones."""
    engine, reward = request.param

    def fresh() -> PrfaasEnv:
        return make(
            short(60, "measure.warmup_s=10", name="drift"), engine=engine, reward=reward, routing="margin"
        )

    env = fresh()
    env.reset(seed=9)
    actions = sampled(env, 60)
    play(env, actions[:20])
    return env, actions, fresh


def test_restore_returns_exactly(running: tuple[PrfaasEnv, list[Any], Callable[[], PrfaasEnv]]) -> None:
    env, actions, fresh = running
    here, mask = env.telemetry.encode(), env.action_masks()
    snapshot = env.snapshot()
    rest = play(env, actions[20:])
    assert rest[-1][3]
    next_episode = env.reset()[1]["episode_seed"]
    for target in (env, fresh(), env):
        observation = target.restore(snapshot)
        assert np.array_equal(observation, here)
        assert np.array_equal(target.action_masks(), mask)
        assert play(target, actions[20:]) == rest
        assert target.reset()[1]["episode_seed"] == next_episode
    # another future from the same moment
    target.restore(snapshot)
    assert play(target, actions[:40]) != rest


def test_a_snapshot_disturbs_nothing(running: tuple[PrfaasEnv, list[Any], Callable[[], PrfaasEnv]]) -> None:
    env, actions, fresh = running
    undisturbed = fresh()
    undisturbed.reset(seed=9)
    play(undisturbed, actions[:20])
    for action in actions[20:40]:
        env.snapshot()
        env.restore(env.snapshot())
        assert play(env, [action]) == play(undisturbed, [action])


def test_copies_go_their_own_way(running: tuple[PrfaasEnv, list[Any], Callable[[], PrfaasEnv]]) -> None:
    env, actions, _ = running
    twin = copy.deepcopy(env)
    elsewhere = play(twin, actions[:20])
    rest = play(env, actions[20:])
    assert elsewhere != rest[:20]
    twin.reset(seed=9)
    play(twin, actions[:20])
    assert play(twin, actions[20:]) == rest


def test_a_snapshot_pickles() -> None:
    env = make(short(30), reward="paired")
    env.reset(seed=2)
    actions = sampled(env, 30)
    play(env, actions[:10])
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    rest = play(env, actions[10:])
    other = make(short(30), reward="paired")
    other.restore(snapshot)
    assert play(other, actions[10:]) == rest


# ------------------------------------------------------------------ rendering


def test_text() -> None:
    env = make(short(60, name="drift"), render_mode="ansi")
    env.reset(seed=1)
    play(env, [np.array([10, 1])] * 10)
    text = env.render()
    assert text.splitlines()[0] == "t = 10.0 s   local 0: threshold 19,400 tokens, 3 prefill / 5 decode"
    pd, remote, link = env.telemetry.pd[0], env.telemetry.prfaas[0], env.telemetry.link[0]
    assert f"{pd.prefill_busy_instances:.0f}/3 busy" in text
    assert f"{remote.prefill_busy_instances:.0f}/4 busy" in text
    assert f"{pd.decode_sequences:.0f} sequences on 5" in text
    assert f"{link.utilisation_5s * 100:.0f}% of 100 Gbps" in text
    env.step_decision(Decision.same(1, margin_s=-1.5))
    assert "local 0: margin -1.5 s" in env.render()


def test_picture() -> None:
    env = make(short(60), render_mode="rgb_array")
    env.reset(seed=1)
    empty = env.render()
    assert empty.dtype == np.uint8
    assert empty.ndim == 3
    assert empty.shape[2] == 3
    play(env, [np.array([5, 1])] * 20)
    busy = env.render()
    assert busy.shape == empty.shape
    assert not np.array_equal(busy, empty)
    assert np.array_equal(busy, env.render())


def test_human_prints_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    env = make(short(5), render_mode="human")
    env.reset(seed=1)
    assert capsys.readouterr().out == ""
    for k in (1, 2):
        env.step(env.codec.neutral())
        assert capsys.readouterr().out.startswith(f"t = {k}.0 s   local 0: threshold 19,400 tokens")


def test_render_without_a_mode_says_how() -> None:
    env = make()
    env.reset(seed=1)
    with pytest.warns(UserWarning, match="no render_mode was given"):
        assert env.render() is None


def test_rendering_a_deployment_without_a_remote_site() -> None:
    env = make(short(5, name="homogeneous"), render_mode="ansi")
    env.reset(seed=1)
    assert "remote" not in env.render()
    assert "link" not in env.render()
    several = make(short(5, "deployment.prfaas=[{name: a, hardware: h200, n_instances: 1}, "
                   "{name: b, hardware: h200, n_instances: 2}]",
                   "deployment.links=[{prfaas: a, pd: pd0, capacity_bps: 1 Gbps}, "
                   "{prfaas: b, pd: pd0, capacity_bps: 2 Gbps}]"), render_mode="rgb_array")  # fmt: skip
    several.reset(seed=1)
    assert several.render().shape[0] > 300
    assert len(several.observation_space.low) == len(several.schema)


def test_rendering_changes_nothing() -> None:
    seen = []
    for mode in (None, "ansi", "rgb_array"):
        env = make(short(20), render_mode=mode)
        env.reset(seed=1)
        out = []
        for action in sampled(env, 20):
            out += play(env, [action])
            if mode:
                env.render()
        seen.append(out)
    assert seen[0] == seen[1] == seen[2]


# ------------------------------------------------------------------ several sites


SEVERAL = pytest.mark.parametrize("name", ["two_regions", "shared_prfaas"])


@ENGINE
@SEVERAL
def test_spaces_and_masks_follow_the_sites(name: str, engine: str) -> None:
    """One action pair and one mask part per PD cluster, one group of fields per cluster and link."""
    env = make(short(30, "control.conversion_interval_s=5", name=name), engine=engine)
    d = env.scenario.deployment
    n = len(d.pd)
    assert env.action_space.nvec.tolist() == [18, 3] * n
    groups = [g for g, _ in env.schema.groups]
    counts = [sum(g.startswith(kind) for g in groups) for kind in ("pd", "prfaas", "link")]
    assert counts == [n, len(d.prfaas), len(d.links)]
    observation, info = env.reset(seed=1)
    assert observation.shape == env.observation_space.shape == (len(env.schema),)
    assert info["action_mask"].shape == (21 * n,)
    for _ in range(5):
        _, _, _, _, info = env.step(env.codec.neutral())
    # Every cluster orders for itself: the last one moves a node, the others keep theirs.
    assert info["action_mask"].reshape(n, 21)[:, 18:].any(axis=1).all()
    action = env.codec.neutral()
    action[-1] = Move.DECODE_TO_PREFILL
    _, _, _, _, info = env.step(action)
    assert [pd.converting_instances for pd in env.telemetry.pd] == [0] * (n - 1) + [1]
    legal = info["action_mask"].reshape(n, 21)[:, 18:]
    assert legal[-1].tolist() == [False, True, False]


@ENGINE
@SEVERAL
def test_checkers_on_several_sites(name: str, engine: str) -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for routing, form in (("margin", "discrete"), ("threshold", "continuous")):
            kwargs = {"engine": engine, "routing": routing, "action": form}
            check_env(make(short(10, name=name), **kwargs), skip_render_check=True)
            sb3.check_env(make(short(10, name=name), **kwargs))
    check_env_conserves(make(short(40, name=name), engine=engine, action="continuous"), steps=60)


# ------------------------------------------------------------------ a wrong observation is named


def _spoilt(first: Any, later: Any) -> PrfaasEnv:
    """An env of somebody else's: `first` and `later` spoil what reset and step give."""

    class Spoilt(PrfaasEnv):
        def reset(self, **kwargs: Any) -> Any:
            observation, info = super().reset(**kwargs)
            return first(self, observation, info)

        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return (later(self, observation), *rest)

    return Spoilt(short(10, name="two_regions"))


def _over(observation: Any) -> Any:
    observation = observation.copy()
    observation[1] = 1.5
    return observation


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda env, o: env.observation_space,
            r"observation of type Box; expected a float32 array of shape \(N,\)",
        ),
        (lambda env, o: o.tolist(), "observation of type list"),
        (lambda env, o: o.astype(np.float64), "observation of float64; expected a float32"),
        (lambda env, o: o[:-1], r"shape \(M,\).*: link3\.retransmission_share and what follows is missing"),
        (lambda env, o: np.append(o, np.float32(0)), r": 1 values behind link3\.retransmission_share"),
        (lambda env, o: o[None], r"shape \(1, N\); expected a float32 array of shape \(N,\)"),
        (lambda env, o: _over(o), r"pd0\.arrival_rate_5s_rps = 1\.5; it must be finite and within 0 and 1"),
        (lambda env, o: o * np.float32(np.nan), r"pd0\.arrivals_valid = nan"),
    ],
)
def test_a_wrong_observation_is_named_at_the_first_call(spoil: Any, message: str) -> None:
    n = len(make(short(10, name="two_regions")).schema)
    message = message.replace("N", str(n)).replace("M", str(n - 1))
    with pytest.raises(AssertionError, match=rf"^reset\(\) gave .*{message}"):
        check_env_conserves(_spoilt(lambda e, o, i: (spoil(e, o), i), lambda e, o: o), steps=3)
    with pytest.raises(AssertionError, match=rf"^step\(\) gave .*{message}"):
        check_env_conserves(_spoilt(lambda e, o, i: (o, i), spoil), steps=3)


@pytest.mark.parametrize("reset", [lambda e, o, i: o, lambda e, o, i: (o, [i]), lambda e, o, i: (o, i, i)])
def test_reset_gives_an_observation_and_a_dict(reset: Any) -> None:
    with pytest.raises(AssertionError, match=r"^reset\(\) must give \(observation, info dict\)"):
        check_env_conserves(_spoilt(reset, lambda e, o: o), steps=1)
