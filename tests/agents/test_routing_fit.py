"""The routing from roll-outs: prices by hand, the fit, and moves that stay as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prfaas_agents.algorithms import make_learner
from prfaas_agents.roll_outs import Behaviour, Priced, action_logits, behaviour_of, joined
from prfaas_agents.routing_fit import fit_routing, price_margins, routing_fit
from prfaas_agents.settings import MaskablePpoSettings, RoutingFitSettings
from prfaas_agents.vec_env import make_batched_vec_env
from prfaas_env.decision import ActionCodec, ClusterDecision, Decision, Move
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.compiled_engine import CompiledEngine
from prfaas_env.simulator.formulas import NS_PER_S
from prfaas_env.simulator.world import draw_world

DRIFT = load_scenario("drift", overrides=["measure.horizon_s=300", "control.control_interval_s=15"])
SITES = load_scenario("two_regions", overrides=["measure.horizon_s=120", "control.control_interval_s=15"])
MARGINS_S = (-1.0, 0.0, 0.5, 4.0)
CODEC = ActionCodec(1, "margin", "discrete", MARGINS_S, margin_s=0.5)
NONE = int(Move.NONE)


def always(move: Move) -> Behaviour:
    def act(observations: Any, legal: Any) -> Any:
        return np.where(legal[:, :, move], int(move), NONE)

    return act


def waited_s(
    scenario: Scenario, seed: int, at_s: int, pd: int, margin_s: float, behaviour: Behaviour, horizon_s: int
) -> tuple[float, Any]:
    """Request-seconds of waiting up to the end of a horizon, with one margin for the first 15 s of it."""
    engine = CompiledEngine(draw_world(scenario, seed))
    n_pd = len(scenario.deployment.pd)
    seen = None
    for k in range((at_s + horizon_s) // 15):
        if k:
            engine.run_until(15 * k * NS_PER_S)
        telemetry = engine.telemetry()
        margins = [0.5] * n_pd
        if 15 * k == at_s:
            seen, margins[pd] = telemetry, margin_s
        moves = [NONE] * n_pd
        if 15 * k <= at_s:
            moves = behaviour(telemetry.encode()[None], np.array([telemetry.legal_moves]))[0].tolist()
        engine.apply(
            Decision(
                tuple(ClusterDecision(margin_s=m, move=Move(x)) for m, x in zip(margins, moves, strict=True))
            )
        )
    engine.run_until((at_s + horizon_s) * NS_PER_S)
    return engine.totals().waiting_ns / NS_PER_S, seen


@pytest.mark.parametrize("move", [Move.NONE, Move.DECODE_TO_PREFILL])
@pytest.mark.parametrize("scenario", [DRIFT, SITES], ids=["drift", "two_regions"])
def test_a_price_is_the_difference_of_two_whole_runs(scenario: Scenario, move: Move) -> None:
    seeds, n_pd = [3, 4], len(scenario.deployment.pd)
    settings = RoutingFitSettings(n_envs=2, priced_share=1.0, horizon_s=60.0, detour_share=0.0)
    codec = ActionCodec(n_pd, "margin", "discrete", MARGINS_S, margin_s=0.5)
    rng = np.random.default_rng(0)
    found = joined(list(price_margins(scenario, always(move), codec, iter(seeds), 8, settings, rng)))
    assert found.cost_s.shape == (8, n_pd, len(MARGINS_S))
    assert (found.cost_s[:, :, 2] == 0.0).all()
    for row, seed in ((6, 3), (7, 4)):  # the fourth instant of both episodes
        neutral_s, seen = waited_s(scenario, seed, 45, 0, 0.5, always(move), 60)
        assert np.array_equal(found.observations[row], seen.encode())
        for pd in range(n_pd):
            for k, margin_s in enumerate(MARGINS_S):
                with_s, _ = waited_s(scenario, seed, 45, pd, margin_s, always(move), 60)
                assert found.cost_s[row, pd, k] == pytest.approx(with_s - neutral_s, abs=1e-3)
    assert len(np.unique(found.cost_s[6:])) > 3


def learner() -> Any:
    vec_env = make_batched_vec_env([DRIFT], 2, routing="margin", action="discrete", margins_s=MARGINS_S)
    return make_learner(vec_env, CODEC, MaskablePpoSettings(hidden=(32,), n_steps=8, batch_size=8), 0)


def test_the_fit_gives_the_prices_back_and_leaves_the_moves() -> None:
    model = learner()
    torch.manual_seed(0)
    torch.nn.init.normal_(model.policy.action_net.weight, std=1.0)
    rng = np.random.default_rng(0)
    observations = rng.random((4000, len(model.observation_space.low)), dtype=np.float32)
    cost_s = np.zeros((4000, 1, 4), dtype=np.float32)
    cost_s[:, 0, 0] = 20.0 * (observations[:, 5] - 0.5)  # worth it where a field is small
    cost_s[:, 0, 3] = 15.0
    priced = Priced(observations, cost_s)
    seen = torch.as_tensor(observations)
    with torch.no_grad():
        before = action_logits(model.policy, seen, CODEC).numpy()
    settings = RoutingFitSettings(epochs=60, batch_size=128, learning_rate=3e-3)
    fit_routing(model.policy, CODEC, priced, settings, 0)
    with torch.no_grad():
        after = action_logits(model.policy, seen, CODEC).numpy()
    price = (after[:, 0, 2, None] - after[:, 0, :4]) * settings.cost_scale_s / settings.sharpness
    assert np.abs(price - cost_s[:, 0]).mean() < 1.0
    wanted = np.where(observations[:, 5] < 0.5, 0, -1)
    clear = np.abs(observations[:, 5] - 0.5) > 0.2
    best = after[:, 0, :4].argmax(1)
    assert (best[clear & (wanted == 0)] == 0).mean() > 0.95
    assert np.isin(best[clear & (wanted == -1)], (1, 2)).mean() > 0.95
    moves = [logits[:, 0, 4:].argmax(1) for logits in (before, after)]
    assert len(np.unique(moves[0])) > 1
    assert (moves[0] == moves[1]).mean() > 0.97


def test_the_whole_changes_the_routing_alone_and_can_be_stopped() -> None:
    model = learner()
    settings = RoutingFitSettings(states=60, n_envs=4, horizon_s=30.0, epochs=2)
    before = {k: v.clone() for k, v in model.policy.state_dict().items()}
    told: list[int] = []
    stopped = routing_fit(
        model.policy, CODEC, [(DRIFT, 1.0)], range(10), settings, 0, lambda n: told.append(n) or n > 10
    )
    assert stopped == (0, None)
    assert told[-1] > 10
    assert all(torch.equal(v, before[k]) for k, v in model.policy.state_dict().items())
    states, losses = routing_fit(
        model.policy, CODEC, [(DRIFT, 1.0), (DRIFT, 1.0)], range(10), settings, 0, lambda _: False
    )
    assert 60 <= states < 68
    assert losses is not None
    changed = {k for k, v in model.policy.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all("policy_net" in k or "action_net" in k for k in changed)
    legal = np.ones((1, 1, 3), dtype=bool)
    assert (
        behaviour_of(model.policy, CODEC)(np.zeros((1, len(model.observation_space.low)), np.float32), legal)
        == NONE
    )
