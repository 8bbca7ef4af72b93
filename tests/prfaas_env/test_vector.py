"""The batched env plays exactly what scalar envs play, in every autoreset mode."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList, NormalizeReward, RecordEpisodeStatistics

import prfaas_env  # noqa: F401  (registers the env)
from prfaas_env import vector
from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.simulator import kernel
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.layout import Sizes
from prfaas_env.simulator.records import PREFIX_COUNTERS
from prfaas_env.simulator.world import draw_world
from prfaas_env.telemetry import Telemetry
from prfaas_env.vector import THREADS_FROM, PrfaasVectorEnv
from tests.differential.cases import Case, scenario_of

ROUTINGS, FORMS, REWARDS = (
    ("threshold", "margin"),
    ("discrete", "continuous"),
    ("waiting", "goodput", "cost", "paired"),
)
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
#: What `info` holds on every step, one number per env.
SCALARS = (
    "time_s",
    "arrived",
    "finished",
    "open",
    "rejected",
    "aborted",
    "remote",
    "conversions",
    "invalid_moves",
    "egress_bits",
    "clipped",
)
#: And with a prefix pool.
PREFIX = {"hit_share", "hit_tokens", "mispredictions", "evictions", "copies"}


def short(name: str = "drift", *more: str) -> Scenario:
    """24 whole control intervals and a half one, the first of them warm-up."""
    return load_scenario(name, overrides=["measure.horizon_s=24.5", "measure.warmup_s=5.3", *more])


def make(n: int, mode: AutoresetMode = NEXT_STEP, **kwargs: Any) -> PrfaasVectorEnv:
    kwargs.setdefault("scenario", short())
    env = gym.make_vec("prfaas_env:PrfaaS-v0", num_envs=n, autoreset_mode=mode, **kwargs)
    assert isinstance(env, PrfaasVectorEnv)
    return env


class Scalars:
    """Scalar envs with the same arguments, stepped one by one."""

    def __init__(self, n: int, **kwargs: Any) -> None:
        kwargs.setdefault("scenario", short())
        self.envs = [gym.make("PrfaaS-v0", disable_env_checker=True, **kwargs) for _ in range(n)]

    def reset(self, seeds: Sequence[int]) -> list[tuple[Any, dict[str, Any]]]:
        return [env.reset(seed=seed) for env, seed in zip(self.envs, seeds, strict=True)]


def same_info(infos: dict[str, Any], e: int, info: dict[str, Any]) -> None:
    """Everything of a scalar `info` is in the batched one, marked as there."""
    for name in (*SCALARS, *PREFIX.intersection(info)):
        assert infos[name][e] == info[name], name
        assert infos[f"_{name}"][e]
    assert np.array_equal(infos["action_mask"][e], info["action_mask"])
    assert infos["_action_mask"][e]
    terms = info.get("reward_terms")
    if terms is not None:
        assert infos["_reward_terms"][e]
        for name, term in terms.items():
            assert infos["reward_terms"][name][e] == term, name
    for name in ("episode_metrics", "episode_seed"):
        assert (name in info) == (name in infos and bool(infos[f"_{name}"][e]))
        if name in info:
            assert infos[name][e] == info[name]


def play_both(n: int, steps: int, mode: AutoresetMode, seed: int = 10, **kwargs: Any) -> int:
    """Step both with the same random actions and compare everything; gives the number of episodes that ended."""
    env, scalars = make(n, mode, **kwargs), Scalars(n, **kwargs)
    env.action_space.seed(3)
    observations, infos = env.reset(seed=seed)
    for e, (observation, info) in enumerate(scalars.reset(range(seed, seed + n))):
        assert np.array_equal(observations[e], observation)
        same_info(infos, e, info)
    over = [False] * n
    ended = 0
    for _ in range(steps):
        actions = env.action_space.sample()
        observations, rewards, terminated, truncated, infos = env.step(actions)
        assert observations.dtype == np.float32
        assert not terminated.any()
        for e, scalar in enumerate(scalars.envs):
            if over[e]:
                observation, info = scalar.reset()
                reward, end = 0.0, False
            else:
                observation, reward, _, end, info = scalar.step(actions[e])
            assert rewards[e] == reward
            assert truncated[e] == end
            ended += end
            if end and mode is SAME_STEP:
                assert infos["_final_obs"][e]
                assert infos["_final_info"][e]
                assert np.array_equal(infos["final_obs"][e], observation)
                same_info(infos["final_info"], e, info)
                observation, info = scalar.reset()
            over[e] = end and mode is NEXT_STEP
            assert np.array_equal(observations[e], observation)
            same_info(infos, e, info)
        if mode is SAME_STEP and not truncated.any():
            assert "final_obs" not in infos
            assert "final_info" not in infos
    env.close()
    return ended


# ------------------------------------------------------------------ the same as scalar envs


@pytest.mark.parametrize(
    ("mode", "routing", "action"), list(product((NEXT_STEP, SAME_STEP), ROUTINGS, FORMS))
)
def test_same_as_scalar_envs(mode: AutoresetMode, routing: str, action: str) -> None:
    """Three envs over three episodes each with every reward: seeds of later episodes and figures included."""
    for reward in REWARDS:
        kwargs = {"routing": routing, "action": action, "reward": reward}
        assert play_both(3, 78, mode, **kwargs, reference="static") == 9


def test_same_with_margins_of_ones_own_which_change_the_routing() -> None:
    kwargs = {"routing": "margin", "reward": "waiting"}
    assert play_both(3, 78, NEXT_STEP, **kwargs, margins_s=[-1.0, 0.9, math.inf]) == 9
    rewards = []
    for margins_s in ([0.0], [0.9]):
        env = make(2, **kwargs, margins_s=margins_s)
        env.reset(seed=3)
        rewards.append(sum(env.step(np.tile(env.codec.neutral(), (2, 1)))[1] for _ in range(60)))
        env.close()
    assert (rewards[0] != rewards[1]).all()


@pytest.mark.parametrize("name", scenario_names())
def test_same_in_every_shipped_scenario(name: str) -> None:
    assert play_both(2, 55, SAME_STEP, scenario=short(name), routing="margin") == 4


def test_pools_of_worlds_of_different_sizes_lie_side_by_side() -> None:
    """Rows are as wide as the largest world needs; each env plays as alone, also one loaded after a larger one."""
    scenario = load_scenario("mooncake_pool")
    sizes = (30, 5, 200, 60)
    batch = vector.Batch(scenario, 3)
    for e, n in enumerate(sizes[:3]):
        batch.load(e, draw_world(scenario, e, n_requests=n))
    batch.load(2, draw_world(scenario, 3, n_requests=sizes[3]))
    until_ns = np.array([20, 40, 60]) * 10**9
    task = np.full(3, kernel.DECIDE)
    value, move = np.full((3, 1), 3000.0), np.full((3, 1), kernel.MOVE_NONE)
    batch.step(task, until_ns, False, value, move, np.ones((3, 1), dtype=np.int64))
    for e, (seed, n) in enumerate(((0, 30), (1, 5), (3, 60))):
        engine = make_engine("compiled", draw_world(scenario, seed, n_requests=n))
        engine.apply(Decision.same(1, threshold_tokens=3000.0, cache_rule="abundant"))
        engine.run_until(int(until_ns[e]))
        assert batch.totals_of(e) == engine.totals()
    assert batch.totals_of(2).prefix[PREFIX_COUNTERS.index("hit_tokens")] > 0


def test_same_with_prefix_pools() -> None:
    """Also where the reference goes by the abundant rule and copies prefixes."""
    assert play_both(3, 30, NEXT_STEP, scenario=short("mooncake_pool", "prefix_pool.metadata_age_s=2")) == 3
    small = short("mooncake_pool", "measure.horizon_s=90.5", "prefix_pool.pd_capacity_bytes=400 GB")
    kwargs = {"scenario": small, "reward": "paired", "reference": f"{__name__}:Copying"}
    for mode in (NEXT_STEP, SAME_STEP):
        assert play_both(2, 93, mode, **kwargs) == 2
    env = make(2, **kwargs)
    env.reset(seed=0)
    for _ in range(90):
        env.step(np.tile(env.single_action_space.nvec - 1, (2, 1)))
    assert env._reference is not None
    copies = env._reference.totals.prefix[PREFIX_COUNTERS.index("copies")]
    assert (copies > 0).all()
    assert (env._totals.prefix[PREFIX_COUNTERS.index("copies")] == 0).all()


class Copying:
    """Alternates between the two sides under the abundant rule."""

    name = "copying"
    constant = False

    def reset(self, context: PolicyContext) -> None:
        self._n_pd = context.schema.n_pd
        self._turn = 0

    def decide(self, telemetry: Telemetry) -> Decision:
        self._turn += 1
        threshold = 0.0 if self._turn % 2 else math.inf
        return Decision.same(self._n_pd, threshold_tokens=threshold, cache_rule="abundant")


def test_same_in_worlds_with_several_clusters() -> None:
    """Random deployments with up to three clusters of each kind, limits that reject, and odd control intervals."""
    shapes = set()
    for seed in range(24):
        scenario = scenario_of(Case(seed))
        scenario = scenario.replace(
            measure={"horizon_s": 20.0, "warmup_s": scenario.measure.warmup_s},
            workload={
                "kind": "synthetic",
                "arrivals": {"kind": "poisson", "rate_rps": 3.0},
                "input_tokens": {"kind": "fixed", "tokens": 2500},
                "output_tokens": {"kind": "fixed", "tokens": 9},
            },
        )
        shapes.add((len(scenario.deployment.pd), len(scenario.deployment.prfaas)))
        mode = (NEXT_STEP, SAME_STEP)[seed % 2]
        assert play_both(2, 45, mode, scenario=scenario, routing=ROUTINGS[seed // 2 % 2]) >= 2
    assert len(shapes) > 6


@pytest.mark.parametrize("n", [1, THREADS_FROM + 8])
def test_same_for_any_number_of_envs(n: int) -> None:
    """One env, and so many that two threads share them."""
    assert play_both(n, 52, SAME_STEP, routing="margin") == 2 * n


def test_same_with_a_reference_that_learns_about_the_link() -> None:
    assert play_both(2, 52, SAME_STEP, routing="margin", reward="paired", reference="dual_timescale") == 4


def test_same_without_a_warm_up_and_with_one_to_the_last_step() -> None:
    for warmup_s in (0.0, 24.0, 24.2):
        scenario = short("drift", f"measure.warmup_s={warmup_s}")
        assert play_both(2, 52, NEXT_STEP, scenario=scenario) == 4


def test_same_while_arrays_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under overload from arrays as small as they may be: all envs move to larger ones whenever one must."""
    grown = []
    grow = vector.Batch._grow

    def counted(self: vector.Batch, status: int) -> None:
        grown.append(status)
        grow(self, status)

    monkeypatch.setattr(vector.Batch, "_grow", counted)
    monkeypatch.setattr(vector, "initial_sizes", lambda scenario, changes: Sizes(12, 1, changes))
    scenario = short("drift").with_rate(12.0)
    assert play_both(5, 52, SAME_STEP, scenario=scenario, routing="margin") == 10
    assert {kernel.GROW_HEAP, kernel.GROW_FLOWS} <= set(grown)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_same_count_of_clipped_values(mode: AutoresetMode) -> None:
    """More arrivals per second than the field's range holds; each episode counts from 0."""
    scenario = short("paper", "workload.arrivals={kind: deterministic, rate_rps: 1200}")
    scenario = scenario.replace(measure={"horizon_s": 3.0})
    assert play_both(2, 10, mode, scenario=scenario) >= 4
    env = make(1, DISABLED, scenario=scenario)
    env.reset(seed=0)
    for _ in range(3):
        infos = env.step(np.array([[9, 1]]))[4]
    assert infos["clipped"][0] >= 3


def test_masks_are_those_of_the_scalar_env() -> None:
    """After each step, also where a conversion is under way."""
    env, scalars = make(2), Scalars(2)
    env.reset(seed=0)
    scalars.reset([0, 1])
    seen = set()
    for _ in range(20):
        actions = np.array([[9, 0], [9, 2]])
        env.step(actions)
        for e, scalar in enumerate(scalars.envs):
            scalar.step(actions[e])
            mask = scalar.get_wrapper_attr("action_masks")()
            assert np.array_equal(env.action_masks()[e], mask)
            seen.add(tuple(mask[-3:].tolist()))
    assert len(seen) > 1


# ------------------------------------------------------------------ Gymnasium's own vector env as the measure


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_conventions_are_those_of_gymnasiums_own_vector_env(mode: AutoresetMode) -> None:
    """Same arrays, same names in `infos`, same marks, as `SyncVectorEnv` gives for scalar envs.

    `episode_metrics` alone differs: one dict per env instead of arrays in nested dicts.
    """
    scenario = short()
    ours = make(3, mode, scenario=scenario)
    theirs = SyncVectorEnv(
        [lambda: gym.make("PrfaaS-v0", scenario=scenario, disable_env_checker=True)] * 3, autoreset_mode=mode
    )
    assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"]
    assert ours.action_space == theirs.action_space
    assert ours.observation_space == theirs.observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert ours.single_observation_space == theirs.single_observation_space
    first, second = ours.reset(seed=5), theirs.reset(seed=5)
    assert np.array_equal(first[0], second[0])
    _same_infos(first[1], second[1])
    ours.action_space.seed(0)
    for _ in range(52):
        actions = ours.action_space.sample()
        *results, infos = ours.step(actions)
        *expected, infos_ = theirs.step(actions)
        for a, b in zip(results, expected, strict=True):
            assert np.array_equal(a, b)
            assert a.dtype == b.dtype
        _same_infos(infos, infos_)


def _same_infos(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name == "episode_metrics":
            continue
        if name in ("reward_terms", "final_info"):
            _same_infos(ours[name], value)
        elif name == "final_obs":
            assert all(np.array_equal(a, b) for a, b in zip(ours[name], value, strict=True))
        elif name.startswith("_"):
            assert np.array_equal(ours[name], value), name
        else:
            mark = theirs[f"_{name}"]
            assert np.array_equal(ours[name][mark], value[mark]), name


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_gymnasiums_vector_wrappers_work(mode: AutoresetMode) -> None:
    env = RecordEpisodeStatistics(make(2, mode))
    env.reset(seed=1)
    total = np.zeros(2)
    for _ in range(25):
        _, reward, _, truncated, infos = env.step(env.action_space.sample())
        total += reward
    assert truncated.all()
    episode = infos["episode"]
    assert np.allclose(episode["r"], total)
    assert episode["l"].tolist() == [25, 25]
    rows = DictInfoToList(NormalizeReward(make(2, mode)))
    _, listed = rows.reset(seed=1)
    assert [info["episode_seed"] for info in listed] == [1, 2]
    *_, listed = rows.step(rows.action_space.sample())
    assert [info["time_s"] for info in listed] == [1.0, 1.0]


def test_made_by_id() -> None:
    """The batched env is what `make_vec` gives by default; the other modes still work."""
    env = gym.make_vec("prfaas_env:PrfaaS-v0", num_envs=2)
    assert isinstance(env, PrfaasVectorEnv)
    assert env.spec is not None
    assert env.spec.id == "PrfaaS-v0"
    assert env.metadata["autoreset_mode"] is NEXT_STEP
    by_string = gym.make_vec(
        "PrfaaS-v0",
        num_envs=3,
        vectorization_mode="vector_entry_point",
        autoreset_mode="SameStep",
        scenario="drift",
        routing="margin",
    )
    assert by_string.metadata["autoreset_mode"] is SAME_STEP
    assert by_string.num_envs == 3
    assert by_string.unwrapped.scenario.name == "drift"
    assert isinstance(gym.make_vec("PrfaaS-v0", num_envs=1, vectorization_mode="sync"), SyncVectorEnv)


# ------------------------------------------------------------------ reset


def test_disabled_autoreset_needs_a_reset_mask() -> None:
    """An env that is over must be reset by the caller; the others go on untouched."""
    env, scalars = make(3, DISABLED), Scalars(3)
    env.reset(seed=[7, 8, 9])
    scalars.reset([7, 8, 9])
    action = np.tile([9, 1], (3, 1))
    for _ in range(10):
        env.step(action)
        for scalar in scalars.envs:
            scalar.step(action[0])
    before = env.telemetry_values
    observations, infos = env.reset(
        seed=[None, 30, None], options={"reset_mask": np.array([False, True, False])}
    )
    assert infos["_episode_seed"].tolist() == [False, True, False]
    assert infos["_time_s"].tolist() == [False, True, False]
    assert infos["episode_seed"].tolist() == [7, 30, 9]
    assert np.array_equal(env.telemetry_values[[0, 2]], before[[0, 2]])
    assert np.array_equal(observations[1], scalars.envs[1].reset(seed=30)[0])
    for _ in range(15):
        observations, rewards, _, truncated, infos = env.step(action)
        for e, scalar in enumerate(scalars.envs):
            observation, reward, _, end, info = scalar.step(action[0])
            assert np.array_equal(observations[e], observation)
            assert rewards[e] == reward
            assert truncated[e] == end
            same_info(infos, e, info)
    assert truncated.tolist() == [True, False, True]
    with pytest.raises(gym.error.ResetNeeded, match=r"envs \[0, 2\] are over: reset them"):
        env.step(action)
    _, infos = env.reset(options={"reset_mask": truncated})
    assert [infos["episode_seed"][e] for e in (0, 2)] == [
        scalars.envs[e].reset()[1]["episode_seed"] for e in (0, 2)
    ]
    assert env.step(action)[4]["time_s"].tolist() == [1.0, 16.0, 1.0]


def test_next_step_ignores_the_action_of_a_reset() -> None:
    """The step after an end is a reset: reward 0, no flags, no `reward_terms`."""
    env = make(2)
    env.reset(seed=0)
    action = np.tile([9, 1], (2, 1))
    for _ in range(25):
        *_, truncated, infos = env.step(action)
    assert truncated.all()
    assert infos["_episode_metrics"].all()
    assert "episode_seed" not in infos
    _, reward, _, truncated, infos = env.step(np.tile([17, 0], (2, 1)))
    assert reward.tolist() == [0.0, 0.0]
    assert not truncated.any()
    assert infos["_episode_seed"].all()
    assert "reward_terms" not in infos
    assert "episode_metrics" not in infos
    assert infos["time_s"].tolist() == [0.0, 0.0]


def test_seeds() -> None:
    """An int seeds env i with seed + i, a list each env; the same again gives the same later episodes."""

    def seeds_of(env: PrfaasVectorEnv, seed: Any) -> list[list[int]]:
        out = [env.reset(seed=seed)[1]["episode_seed"].tolist()]
        return out + [env.reset()[1]["episode_seed"].tolist() for _ in range(3)]

    env = make(3)
    first = seeds_of(env, 5)
    assert first[0] == [5, 6, 7]
    assert seeds_of(env, [5, 6, 7]) == first
    assert seeds_of(make(3), np.int64(5)) == first
    assert seeds_of(env, [5, None, 7])[0][0::2] == [5, 7]
    unseeded = seeds_of(make(3), None) + seeds_of(make(3), None)
    assert len({seed for row in unseeded for seed in row}) == 24
    env.episode_seeds = range(40, 42)
    assert {seed for row in seeds_of(env, 5)[1:] for seed in row} <= {40, 41}


def test_draws_can_be_seeded_apart_from_episodes() -> None:
    """`seed_draws` settles which episodes unseeded resets play, without playing one."""
    env = make(2)
    env.seed_draws([3, 4])
    first = env.reset()[1]["episode_seed"].tolist()
    env.seed_draws([3, None])
    second = env.reset()[1]["episode_seed"].tolist()
    assert second[0] == first[0]
    assert second[1] != first[1]
    with pytest.raises(ValueError, match="1 seeds for 2 envs"):
        env.seed_draws([1])


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ([1, 2], "2 seeds for 3 envs"),
        ([1, 2, 3, 4], "4 seeds for 3 envs"),
        (-1, "seed of env 0 is -1; it must be a whole number of at least 0"),
        ([1, -2, 3], "seed of env 1 is -2"),
        ([1, 2, 3.5], "seed of env 2 is 3.5"),
        (1.5, "seed is 1.5; a whole number, None, or one of these per env"),
        ("one", "seed is 'one'"),
    ],
)
def test_a_wrong_seed_is_named_and_changes_nothing(seed: Any, message: str) -> None:
    env = make(3)
    before, _ = env.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        env.reset(seed=seed)
    assert np.array_equal(env._batch.observation, before)
    assert env.step(np.tile([9, 1], (3, 1)))[4]["time_s"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 1}, r"unknown \['split'\]; known: reset_mask"),
        ({"reset_mask": np.ones(2, dtype=np.bool_)}, r"reset_mask must have shape \(3,\)"),
        ({"reset_mask": np.zeros(3, dtype=np.bool_)}, "at least one True"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    env = make(3)
    with pytest.raises(ValueError, match=message):
        env.reset(options=options)


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    "actions",
    [
        np.zeros(2, dtype=np.int64),
        np.zeros((3, 2), dtype=np.int64),
        np.zeros((2, 3), dtype=np.int64),
        np.array([[18, 0], [0, 0]]),
        np.array([[0, 3], [0, 0]]),
        np.array([[0, 0], [-1, 0]]),
        np.array([[0.5, 0], [0, 0]]),
        np.array([[np.nan, 0], [0, 0]]),
    ],
)
def test_a_wrong_action_changes_nothing(actions: np.ndarray[Any, Any]) -> None:
    env, other = make(2), make(2)
    env.reset(seed=1)
    other.reset(seed=1)
    with pytest.raises(ValueError, match="actions must"):
        env.step(actions)
    right = np.tile([9, 1], (2, 1))
    for _ in range(3):
        assert np.array_equal(env.step(right)[0], other.step(right)[0])


def test_a_wrong_continuous_action_is_named() -> None:
    env = make(2, action="continuous")
    env.reset(seed=1)
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="action"):
            env.step(np.array([[0.0, wrong], [0.0, 0.0]], dtype=np.float32))


def test_whole_numbers_of_any_type_are_actions() -> None:
    """Networks give floats or small integers: the same numbers are the same actions."""
    observations = []
    for dtype in (np.int64, np.int8, np.float32):
        env = make(2)
        env.reset(seed=1)
        observations.append(env.step(np.array([[9, 1], [2, 0]], dtype=dtype))[0])
    assert np.array_equal(observations[0], observations[1])
    assert np.array_equal(observations[0], observations[2])


def test_nothing_works_before_reset() -> None:
    env = make(2)
    env.seed_draws([1, 2])
    with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\) before step\(\)"):
        env.step(np.tile([9, 1], (2, 1)))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"engine": "simpy"}, "engine is 'simpy'; the batched env is of the 'compiled' one"),
        ({"render_mode": "ansi"}, "the batched env does not render"),
        ({"num_envs": 0}, "num_envs is 0; at least 1"),
        ({"scenario": "papr"}, "unknown scenario 'papr'"),
        ({"routing": "length"}, "routing is 'length'; allowed"),
        (
            {"routing": "margin", "margins_s": [1.0, 0.5]},
            "margins_s must be one or more rising numbers, found [1.0, 0.5]",
        ),
        ({"reward": "speed"}, "unknown reward 'speed'"),
        ({"reward": "paired", "reference": "nobody"}, "unknown policy 'nobody'"),
        ({"autoreset_mode": "Sometimes"}, "autoreset_mode is 'Sometimes'; allowed: 'NextStep', 'SameStep', "),
    ],
)
def test_wrong_arguments_are_one_line(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(PrfaasError) as caught:
        PrfaasVectorEnv(**kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    env = make(THREADS_FROM, reward="paired")
    env.reset(seed=0)
    env.step(np.tile([9, 1], (THREADS_FROM, 1)))
    assert threading.active_count() > before
    env.close()
    assert threading.active_count() == before


def test_results_are_copies() -> None:
    """What a step gave stays as it was."""
    env = make(2)
    action = np.tile([9, 1], (2, 1))
    first, _ = env.reset(seed=0)
    second, reward, *_, infos = env.step(action)
    results = [
        first,
        second,
        reward,
        infos["arrived"],
        infos["action_mask"],
        infos["reward_terms"]["waiting"],
    ]
    kept = [np.copy(result) for result in results]
    values = env.telemetry_values
    for _ in range(5):
        env.step(action)
    assert all(np.array_equal(a, b) for a, b in zip(results, kept, strict=True))
    assert not np.array_equal(env.telemetry_values, values)


def test_readings_per_env() -> None:
    """Telemetry and the figures so far are those of the scalar env."""
    env, scalars = make(2), Scalars(2)
    env.reset(seed=4)
    scalars.reset([4, 5])
    for _ in range(12):
        env.step(np.tile([4, 1], (2, 1)))
        for scalar in scalars.envs:
            scalar.step(np.array([4, 1]))
    for e, scalar in enumerate(scalars.envs):
        reading, expected = env.telemetry_of(e), scalar.get_wrapper_attr("telemetry")
        assert np.array_equal(reading.values, expected.values)
        assert reading.legal_moves == expected.legal_moves
        assert reading.conversion_tick == expected.conversion_tick
        assert np.array_equal(reading.recent_lengths_tokens[0], expected.recent_lengths_tokens[0])
        assert np.array_equal(env.telemetry_values[e], expected.values)
        assert env.episode_metrics_of(e) == scalar.get_wrapper_attr("episode_metrics")()
