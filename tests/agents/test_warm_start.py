"""The warm start: prices are those of two whole runs, the fit finds them again, and states off the way come up."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from prfaas_agents.algorithms import make_learner
from prfaas_agents.ppo import routing_rows, settle_routing
from prfaas_agents.roll_outs import Detours, Priced, behaviour_of, joined
from prfaas_agents.settings import MaskablePpoSettings, WarmStartSettings
from prfaas_agents.vec_env import make_batched_vec_env
from prfaas_agents.warm_start import fit_moves, price_moves, warm_start
from prfaas_env.decision import ActionCodec, Decision, Move
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.compiled_engine import CompiledEngine
from prfaas_env.simulator.formulas import NS_PER_S
from prfaas_env.simulator.world import draw_world

DRIFT = load_scenario("drift", overrides=["measure.horizon_s=300", "control.control_interval_s=15"])
SITES = load_scenario("two_regions", overrides=["measure.horizon_s=120", "control.control_interval_s=15"])
CODEC = ActionCodec(1, "margin", "discrete")
NONE = int(Move.NONE)


def stay(observations: Any, legal: Any) -> Any:
    return np.full(legal.shape[:2], NONE)


def priced(
    scenario: Scenario, seeds: list[int], n_states: int, margin_s: float = 0.0, **settings: Any
) -> Priced:
    given = WarmStartSettings(**{"n_envs": len(seeds), "priced_share": 1.0, "horizon_s": 60.0, **settings})
    rng = np.random.default_rng(0)
    return joined(list(price_moves(scenario, stay, margin_s, iter(seeds), n_states, given, rng)))


def waited_s(
    scenario: Scenario, seed: int, at_s: int, pd: int, move: Move, horizon_s: int, margin_s: float
) -> tuple[float, Any]:
    """Request-seconds of waiting up to the end of a horizon, with one move at its start; and what was seen there."""
    engine = CompiledEngine(draw_world(scenario, seed))
    n_pd = len(scenario.deployment.pd)
    engine.apply(Decision.same(n_pd, margin_s=margin_s))
    engine.run_until(at_s * NS_PER_S)
    seen = engine.telemetry()
    decisions = list(Decision.same(n_pd, margin_s=margin_s).clusters)
    decisions[pd] = type(decisions[pd])(margin_s=margin_s, move=move)
    engine.apply(Decision(tuple(decisions)))
    engine.run_until((at_s + horizon_s) * NS_PER_S)
    return engine.totals().waiting_ns / NS_PER_S, seen


@pytest.mark.parametrize(
    ("scenario", "margin_s"),
    [(DRIFT, 0.0), (DRIFT, 0.9), (SITES, 0.0)],
    ids=["drift", "margin", "two_regions"],
)
def test_a_price_is_the_difference_of_two_whole_runs(scenario: Scenario, margin_s: float) -> None:
    seeds = [3, 4]
    found = priced(scenario, seeds, 6, margin_s)
    n_pd = len(scenario.deployment.pd)
    assert found.cost_s.shape == (6, n_pd, 3)
    some = False
    for row, (at_s, seed) in enumerate(itertools.product((15, 30, 45), seeds)):
        without_s, seen = waited_s(scenario, seed, at_s, 0, Move.NONE, 60, margin_s)
        assert np.array_equal(found.observations[row], seen.encode())
        for pd, move in itertools.product(range(n_pd), (Move.PREFILL_TO_DECODE, Move.DECODE_TO_PREFILL)):
            cost_s = found.cost_s[row, pd, move]
            assert np.isnan(cost_s) == (not seen.legal_moves[pd][move])
            if not np.isnan(cost_s):
                with_s, _ = waited_s(scenario, seed, at_s, pd, move, 60, margin_s)
                assert cost_s == pytest.approx(with_s - without_s, abs=1e-3)
                some = some or cost_s != 0.0
        assert (found.cost_s[row, :, NONE] == 0.0).all()
    assert some


def test_the_states_wanted_come_and_episodes_follow_one_another() -> None:
    found = priced(DRIFT, [5, 6], 30)
    assert 30 <= len(found) < 32
    with pytest.raises(
        RuntimeError, match="StopIteration"
    ):  # one episode each has 19 instants; the seeds are used up
        priced(DRIFT, [5, 6], 100)


def test_a_share_of_the_states_is_priced() -> None:
    settings = WarmStartSettings(n_envs=8, priced_share=0.5, horizon_s=15.0)
    rng = np.random.default_rng(0)
    found = joined(
        list(itertools.islice(price_moves(DRIFT, stay, 0.0, iter(range(8)), 10_000, settings, rng), 19))
    )
    assert 0.35 < len(found) / (8 * 19) < 0.65


def test_detours_leave_the_behaviour_and_come_back() -> None:
    settings = WarmStartSettings(idle_share=0.25, detour_share=0.25)
    seen: list[Any] = []
    detours = Detours(
        lambda observations, legal: np.full((8, 1), int(Move.DECODE_TO_PREFILL)),
        8,
        1,
        settings,
        np.random.default_rng(0),
    )
    for _ in range(400):
        seen.append(detours(np.zeros((8, 3), dtype=np.float32), np.ones((8, 1, 3), dtype=bool))[:, 0])
    moves = np.array(seen)
    assert (moves[:, :2] == NONE).all()  # a quarter never moves
    assert (moves[:, 4:] == int(Move.DECODE_TO_PREFILL)).all()  # half does as the behaviour says
    away = moves[:, 2:4] != int(Move.DECODE_TO_PREFILL)
    assert 0.05 < away.mean() < 0.25  # 2 of 3 detours of 4.5 decisions on average, begun in 5% of the others
    # a detour lasts: what follows a decision away is mostly away too
    assert (away[1:] & away[:-1]).sum() > 0.6 * away[:-1].sum()


def learner(**settings: Any) -> Any:
    vec_env = make_batched_vec_env([DRIFT], 2, routing="margin", action="discrete")
    chosen = MaskablePpoSettings(**{"hidden": (32,), "n_steps": 8, "batch_size": 8, **settings})
    return make_learner(vec_env, CODEC, chosen, 0)


def test_the_fit_gives_the_prices_back_and_leaves_the_routing() -> None:
    model = learner()
    rng = np.random.default_rng(1)
    observations = rng.random((4_000, model.observation_space.shape[0]), dtype=np.float32)
    cost_s = np.zeros((4_000, 1, 3), dtype=np.float32)
    cost_s[:, 0, 0] = 200.0 * (observations[:, 5] - 0.5)
    cost_s[:, 0, 2] = 100.0 * (0.5 - observations[:, 9])
    cost_s[::3, 0, 0] = np.nan
    rows = routing_rows(CODEC)
    before = model.policy.action_net.weight[rows].clone(), model.policy.action_net.bias[rows].clone()
    settings = WarmStartSettings(epochs=30, batch_size=256)
    first = fit_moves(model.policy, CODEC, Priced(observations, cost_s), settings, 0)
    assert first < 0.1
    legal = np.ones((4_000, 1, 3), dtype=bool)
    moves = behaviour_of(model.policy, CODEC)(observations, legal)[:, 0]
    best = np.nan_to_num(
        np.stack([200 * (observations[:, 5] - 0.5), np.zeros(4_000), 100 * (0.5 - observations[:, 9])]).T
    )
    gap_s = best[np.arange(4_000), moves] - best.min(1)
    assert gap_s.mean() < 10.0  # prices spread over +-100; never moving costs about 40
    assert torch.equal(model.policy.action_net.weight[rows], before[0])
    assert torch.equal(model.policy.action_net.bias[rows], before[1])


def test_illegal_moves_are_never_the_best() -> None:
    model = learner()
    observations = np.random.default_rng(2).random((50, model.observation_space.shape[0]), dtype=np.float32)
    legal = np.zeros((50, 1, 3), dtype=bool)
    legal[:, :, int(Move.DECODE_TO_PREFILL)] = True
    assert (behaviour_of(model.policy, CODEC)(observations, legal) == int(Move.DECODE_TO_PREFILL)).all()


def test_a_settled_routing_is_no_change_whatever_the_trunk_does() -> None:
    model = learner()
    settle_routing(model, CODEC)
    with torch.no_grad():
        for parameter in model.policy.mlp_extractor.policy_net.parameters():
            parameter.mul_(50.0)
    observations = np.random.default_rng(3).random((100, model.observation_space.shape[0]), dtype=np.float32)
    actions, _ = model.predict(observations, deterministic=True)
    assert (actions[:, 0] == CODEC.neutral()[0]).all()


def test_the_whole_is_repeatable_and_stops_when_told() -> None:
    settings = WarmStartSettings(rounds=2, states=20, n_envs=4, epochs=1, batch_size=16)
    told: list[tuple[int, int, float | None]] = []

    def go(stop_after: int) -> tuple[int, Any]:
        model = learner()
        told.clear()

        def tell(k: int, states: int, loss: float | None) -> bool:
            told.append((k, states, loss))
            return len(told) >= stop_after

        n = warm_start(model.policy, CODEC, [(DRIFT, 1.0)], range(100), settings, 7, tell)
        return n, model.policy.action_net.weight.detach().clone()

    n, weights = go(10**6)
    assert n >= 40
    assert [k for k, _, loss in told if loss is not None] == [0, 1]
    again, same = go(10**6)
    assert again == n
    assert torch.equal(weights, same)
    few, _ = go(2)
    assert few < n
    assert len(told) == 2
