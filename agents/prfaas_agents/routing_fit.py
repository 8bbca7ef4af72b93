"""The routing of a policy, from roll-outs: what holding each margin for one interval would have cost.

A margin's effect on one interval is small beside the noise of a queue's returns, so learning it from rewards harms the
moves learned with it. Copies of one state that differ by the margin alone meet the same arrivals: their difference has
little noise. The moves stay as they were learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy

from prfaas_agents.roll_outs import (
    Behaviour,
    Priced,
    RollOuts,
    action_logits,
    behaviour_of,
    costs_s,
    episode_seeds,
    fit_actor,
    joined,
    move_logits,
    one_at_a_time,
    priced_of,
    visits,
)
from prfaas_agents.settings import RoutingFitSettings
from prfaas_env.decision import ActionCodec
from prfaas_env.scenarios import Scenario


def price_margins(
    scenario: Scenario,
    behaviour: Behaviour,
    codec: ActionCodec,
    seeds: Iterator[int],
    n_states: int,
    settings: RoutingFitSettings,
    rng: np.random.Generator,
) -> Iterator[Priced]:
    """Play episodes with a behaviour at the neutral margin and price every margin in a part of the states.

    A margin is held in one PD cluster for one interval, then the neutral one; the move of now is the behaviour's.

    Args:
        scenario: its control interval is that of the decisions.
        behaviour: chooses the moves.
        codec: the margins, and which is neutral.
        seeds: episode seeds, taken as needed.
        n_states: states wanted.
        settings: horizon, envs, share of the states.
        rng: which states are priced, and detours.

    Yields:
        Some states at a time, `n_states` or a few more in all; choices are the margins of the codec.
    """
    neutral_s, grid = codec.neutral_margin_s, np.array(codec.grid)
    others = np.flatnonzero(grid != neutral_s)
    rows = one_at_a_time(codec.n_pd, grid[others], neutral_s)
    found = 0
    with closing(RollOuts(scenario, settings, neutral_s, len(rows))) as roll_outs:
        for visit in visits(scenario, behaviour, neutral_s, seeds, settings, rng):
            chosen = np.flatnonzero(rng.random(settings.n_envs) < settings.priced_share)
            if not len(chosen):
                continue
            observations = visit.batch.observation[chosen].copy()
            moves = behaviour(observations, visit.legal[chosen])[:, None, :].repeat(len(rows), 1)
            waited = roll_outs.waited_s(visit, chosen, np.tile(rows, (len(chosen), 1, 1)), moves)
            yield Priced(observations, costs_s(waited, codec.n_pd, others, len(grid)).astype(np.float32))
            found += len(chosen)
            if found >= n_states:
                return


def fit_routing(
    policy: ActorCriticPolicy, codec: ActionCodec, priced: Priced, settings: RoutingFitSettings, seed: int
) -> tuple[float, float]:
    """Let the logits of the margins give their prices: logit(neutral) - logit(margin) = sharpness x cost / scale.

    The logits of the moves are fitted to what they were, so that the shared layers change nothing in them.

    Returns:
        The mean loss of the prices and that of the moves in the last pass.
    """
    observations = torch.as_tensor(priced.observations)
    wanted = torch.as_tensor(priced.cost_s / settings.cost_scale_s)
    n_grid, neutral = len(codec.grid), int(codec.neutral()[0])
    with torch.no_grad():
        held = move_logits(policy, observations, codec)

    def losses(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = action_logits(policy, observations[rows], codec)
        routing = logits[:, :, :n_grid] / settings.sharpness
        price = routing[:, :, neutral, None] - routing
        return (
            torch.nn.functional.huber_loss(price, wanted[rows]),
            torch.nn.functional.mse_loss(logits[:, :, n_grid:], held[rows]),
        )

    of_prices, of_moves = fit_actor(policy, len(priced), settings, seed, losses)
    return of_prices, of_moves


def routing_fit(
    policy: ActorCriticPolicy,
    codec: ActionCodec,
    scenarios: Sequence[tuple[Scenario, float]],
    seeds: range,
    settings: RoutingFitSettings,
    seed: int,
    tell: Callable[[int], bool],
) -> tuple[int, tuple[float, float] | None]:
    """Fit the routing of a policy to the prices of the margins in the states that its moves come to.

    Args:
        policy: a feed-forward actor-critic policy on margins; changed in place.
        codec: its actions.
        scenarios: with weights, which divide the states among them. Their control interval is that of the decisions.
        seeds: training seeds to draw episodes from.
        settings: how much, and how.
        seed: of the draws and of the order of the samples.
        tell: called with the states so far; True stops the work, and the policy is as it was.

    Returns:
        The number of priced states, and the losses of `fit_routing` (None when stopped).
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(3,)))
    episodes = episode_seeds(seeds, rng)

    def pricing(scenario: Scenario, behaviour: Behaviour, n_states: int) -> Iterator[Priced]:
        return price_margins(scenario, behaviour, codec, episodes, n_states, settings, rng)

    parts = priced_of(scenarios, behaviour_of(policy, codec), pricing, settings.states, tell)
    if parts is None:
        return 0, None
    priced = joined(parts)
    return len(priced), fit_routing(policy, codec, priced, settings, seed)
