"""A first policy from roll-outs: what each node move would have cost, regressed on what a scheduler can see.

Every visited state is copied once per legal move, and the copies run on for a while with the neutral margin and no
further move. The difference of what they wait is the price of the move in the future that came. Nobody sees that
future, so a network is fitted to many such prices: from the telemetry it gives the mean price over the futures that
look alike. Its prices become the logits of the policy's moves, from which a learner goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy

from prfaas_agents.ppo import FixedScaling, routing_rows
from prfaas_agents.roll_outs import (
    Behaviour,
    Priced,
    RollOuts,
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
from prfaas_agents.settings import WarmStartSettings
from prfaas_env.decision import N_MOVES, ActionCodec, Move
from prfaas_env.scenarios import Scenario

_MOVES = np.array([Move.PREFILL_TO_DECODE, Move.DECODE_TO_PREFILL], dtype=np.int64)


# ------------------------------------------------------------------------------------------ pricing


def price_moves(
    scenario: Scenario,
    behaviour: Behaviour,
    margin_s: float,
    seeds: Iterator[int],
    n_states: int,
    settings: WarmStartSettings,
    rng: np.random.Generator,
) -> Iterator[Priced]:
    """Play episodes with a behaviour and price every legal move in a part of the states that come up.

    Args:
        scenario: its control interval is that of the decisions.
        behaviour: chooses the moves between.
        margin_s: held all the time, in the roll-outs too.
        seeds: episode seeds, taken as needed.
        n_states: states wanted.
        settings: horizon, envs, share of the states.
        rng: which states are priced, and detours.

    Yields:
        Some states at a time, `n_states` or a few more in all; choices are the three moves.
    """
    n_pd = len(scenario.deployment.pd)
    rows = one_at_a_time(n_pd, _MOVES, Move.NONE)
    found = 0
    with closing(RollOuts(scenario, settings, margin_s, len(rows))) as roll_outs:
        for visit in visits(scenario, behaviour, margin_s, seeds, settings, rng):
            open_ = visit.legal[:, :, _MOVES].any((1, 2))
            chosen = np.flatnonzero(open_ & (rng.random(settings.n_envs) < settings.priced_share))
            if not len(chosen):
                continue
            moves = np.tile(rows, (len(chosen), 1, 1))
            waited = roll_outs.waited_s(visit, chosen, np.full(moves.shape, margin_s), moves)
            cost_s = np.where(visit.legal[chosen], costs_s(waited, n_pd, _MOVES, N_MOVES), np.nan)
            yield Priced(visit.batch.observation[chosen].copy(), cost_s.astype(np.float32))
            found += len(chosen)
            if found >= n_states:
                return


# ------------------------------------------------------------------------------------------ fitting


def fit_moves(
    policy: ActorCriticPolicy, codec: ActionCodec, priced: Priced, settings: WarmStartSettings, seed: int
) -> float:
    """Let the logits of the moves give their prices: logit(none) - logit(move) = sharpness x cost / scale.

    The Huber loss bends at one scale: prices have long tails. The choice of the routing is left as it was.

    Returns:
        The mean loss of the last pass.
    """
    observations = torch.as_tensor(priced.observations)
    known = torch.as_tensor(~np.isnan(priced.cost_s))
    cost_s = np.nan_to_num(priced.cost_s)
    cost_s[:, :, _MOVES] += settings.move_cost_s
    wanted = torch.as_tensor(cost_s / settings.cost_scale_s)
    for scaling in policy.modules():
        if isinstance(scaling, FixedScaling):
            scaling.fit(priced.observations)
    routing = routing_rows(codec)
    kept = policy.action_net.weight.detach().clone(), policy.action_net.bias.detach().clone()

    def losses(rows: torch.Tensor) -> tuple[torch.Tensor]:
        logits = move_logits(policy, observations[rows], codec) / settings.sharpness
        price = logits[:, :, int(Move.NONE), None] - logits
        mask = known[rows]
        return (torch.nn.functional.huber_loss(price * mask, wanted[rows] * mask),)

    (loss,) = fit_actor(policy, len(priced), settings, seed, losses)
    with torch.no_grad():  # weight decay moved what has no gradient too
        policy.action_net.weight[routing] = kept[0][routing]
        policy.action_net.bias[routing] = kept[1][routing]
    return loss


# ------------------------------------------------------------------------------------------- the whole


def warm_start(
    policy: ActorCriticPolicy,
    codec: ActionCodec,
    scenarios: Sequence[tuple[Scenario, float]],
    seeds: range,
    settings: WarmStartSettings,
    seed: int,
    tell: Callable[[int, int, float | None], bool],
) -> int:
    """Fit the moves of a policy to their prices, round after round on the states that the last fit comes to.

    Args:
        policy: a feed-forward actor-critic policy on margins; changed in place.
        codec: its actions.
        scenarios: with weights, which divide the states among them. Their control interval is that of the decisions.
        seeds: training seeds to draw episodes from.
        settings: how much, and how.
        seed: of the draws and of the order of the samples.
        tell: called with (round, states so far, loss of the fit or None while pricing); True stops the work.

    Returns:
        The number of priced states.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2,)))
    episodes = episode_seeds(seeds, rng)

    def pricing(scenario: Scenario, behaviour: Behaviour, n_states: int) -> Iterator[Priced]:
        return price_moves(scenario, behaviour, codec.neutral_margin_s, episodes, n_states, settings, rng)

    parts: list[Priced] = []
    total = 0
    for k in range(settings.rounds):
        before = total
        found = priced_of(
            scenarios,
            behaviour_of(policy, codec),
            pricing,
            settings.states,
            lambda states, k=k, before=before: tell(k, before + states, None),
        )
        if found is None:
            return total
        parts += found
        total += sum(map(len, found))
        loss = fit_moves(policy, codec, joined(parts), settings, seed + k)
        if tell(k, total, loss):
            return total
    return total
