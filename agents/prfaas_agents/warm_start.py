"""A first policy from roll-outs: what each node move would have cost, regressed on what a scheduler can see.

Every visited state is copied once per legal move, and the copies run on for a while with the neutral margin and no
further move. The difference of what they wait is the price of the move in the future that came. Nobody sees that
future, so a network is fitted to many such prices: from the telemetry it gives the mean price over the futures that
look alike. Its prices become the logits of the policy's moves, from which a learner goes on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.policies import ActorCriticPolicy

from prfaas_agents.ppo import FixedScaling, routing_rows
from prfaas_agents.settings import WarmStartSettings
from prfaas_env.branches import WHOLE_WAITING_NS, Branches
from prfaas_env.decision import N_MOVES, ActionCodec, Move
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator import kernel
from prfaas_env.simulator.formulas import NS_PER_S, FloatArray, IntArray, ns_from_s
from prfaas_env.simulator.world import draw_world
from prfaas_env.vector import Batch

#: A detour begins with this probability per decision and lasts this many.
_DETOUR_RATE = 0.05
_DETOUR_DECISIONS = range(2, 8)

#: Observations of shape (n, fields) and legal moves (n, PD clusters, 3) to moves (n, PD clusters).
Behaviour = Callable[[NDArray[np.float32], NDArray[np.bool_]], IntArray]


@dataclass(frozen=True)
class PricedMoves:
    """States and what each move cost in them.

    `cost_s` are request-seconds of waiting over the horizon, less those of "no move"; NaN where the move is not legal.
    """

    observations: NDArray[np.float32]
    """Shape (n, fields)."""
    cost_s: NDArray[np.float32]
    """Shape (n, PD clusters, 3)."""

    def __len__(self) -> int:
        return len(self.observations)


def joined(parts: Sequence[PricedMoves]) -> PricedMoves:
    """All of them as one."""
    return PricedMoves(
        np.concatenate([part.observations for part in parts]), np.concatenate([part.cost_s for part in parts])
    )


# ------------------------------------------------------------------------------------------ pricing


def price_moves(
    scenario: Scenario,
    behaviour: Behaviour,
    margin_s: float,
    seeds: Iterator[int],
    n_states: int,
    settings: WarmStartSettings,
    rng: np.random.Generator,
) -> Iterator[PricedMoves]:
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
        Some states at a time, `n_states` or a few more in all.
    """
    n, control_ns = settings.n_envs, ns_from_s(scenario.control.control_interval_s)
    batch = Batch(scenario, n)
    n_pd = batch.layout.n_pd
    each = 1 + 2 * n_pd
    branches = Branches(scenario, n * each, threads=True)
    orders = _candidate_moves(n_pd)
    horizon_ns = ns_from_s(settings.horizon_s)
    n_steps = math.ceil(ns_from_s(scenario.measure.horizon_s) / control_ns)
    margin = np.full((n, n_pd), margin_s)
    found = 0
    try:
        while True:
            detours = Detours(behaviour, n, n_pd, settings, rng)
            for e in range(n):
                batch.load(e, draw_world(scenario, next(seeds)))
            now = np.zeros(n, dtype=np.int64)
            batch.step(np.full(n, kernel.READ), now, True, margin, np.full((n, n_pd), int(Move.NONE)))
            for _ in range(n_steps):
                legal = batch.legal.reshape(n, n_pd, N_MOVES).astype(bool)
                open_ = legal[:, :, [Move.PREFILL_TO_DECODE, Move.DECODE_TO_PREFILL]].any((1, 2))
                chosen = np.flatnonzero(open_ & (rng.random(n) < settings.priced_share))
                if len(chosen):
                    cost_s = _priced(batch, branches, chosen, orders, margin_s, int(now[0]) + horizon_ns)
                    cost_s = np.where(legal[chosen], cost_s, np.nan).astype(np.float32)
                    yield PricedMoves(batch.observation[chosen].copy(), cost_s)
                    found += len(chosen)
                    if found >= n_states:
                        return
                moves = detours(batch.observation, legal)
                now = now + control_ns
                batch.step(np.full(n, kernel.DECIDE), now, True, margin, moves)
    finally:
        branches.close()
        batch.close()


def _candidate_moves(n_pd: int) -> IntArray:
    """No move, then each move of each PD cluster alone: shape (1 + 2 PD clusters, PD clusters)."""
    rows = np.full((1 + 2 * n_pd, n_pd), int(Move.NONE), dtype=np.int64)
    for pd in range(n_pd):
        rows[1 + 2 * pd, pd] = Move.PREFILL_TO_DECODE
        rows[2 + 2 * pd, pd] = Move.DECODE_TO_PREFILL
    return rows


def _priced(
    batch: Batch, branches: Branches, chosen: IntArray, orders: IntArray, margin_s: float, until_ns: int
) -> FloatArray:
    """Cost of each move less that of none, shape (chosen, PD clusters, 3), illegal ones included (they cost 0)."""
    each, n_pd = orders.shape
    for k, e in enumerate(chosen.tolist()):
        branches.take_env(batch, e, slice(k * each, (k + 1) * each), until_ns)
    live = np.arange(branches.n) < len(chosen) * each
    before_s = np.repeat(batch.whole[chosen, WHOLE_WAITING_NS] / NS_PER_S, each)
    moves = np.tile(orders, (branches.n // each, 1))
    branches.step(until_ns, np.full((branches.n, n_pd), margin_s), moves, live=live)
    waited_s = (branches.waiting_ns[live] / NS_PER_S - before_s).reshape(len(chosen), each)
    cost_s = np.zeros((len(chosen), n_pd, N_MOVES))
    for pd in range(n_pd):
        cost_s[:, pd, Move.PREFILL_TO_DECODE] = waited_s[:, 1 + 2 * pd] - waited_s[:, 0]
        cost_s[:, pd, Move.DECODE_TO_PREFILL] = waited_s[:, 2 + 2 * pd] - waited_s[:, 0]
    return cost_s


class Detours:
    """A behaviour that now and then leaves another one for a while.

    A share of the envs never moves a node, so that a split which does not suit lasts. A share is sent on detours: the
    same move for some decisions in a row. Both bring up states that the behaviour itself avoids and must know a way
    out of.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        n_envs: int,
        n_pd: int,
        settings: WarmStartSettings,
        rng: np.random.Generator,
    ) -> None:
        self._behaviour = behaviour
        self._rng = rng
        luck = np.arange(n_envs) / n_envs
        self._idle = luck < settings.idle_share
        self._wanders = (luck >= settings.idle_share) & (luck < settings.idle_share + settings.detour_share)
        self._left = np.zeros(n_envs, dtype=np.int64)
        self._move = np.full((n_envs, n_pd), int(Move.NONE), dtype=np.int64)

    def __call__(self, observations: NDArray[np.float32], legal: NDArray[np.bool_]) -> IntArray:
        """The moves now."""
        moves = self._behaviour(observations, legal).copy()
        rng, n = self._rng, len(moves)
        starts = self._wanders & (self._left == 0) & (rng.random(n) < _DETOUR_RATE)
        self._left[starts] = rng.integers(_DETOUR_DECISIONS.start, _DETOUR_DECISIONS.stop, starts.sum())
        self._move[starts] = rng.integers(0, N_MOVES, self._move[starts].shape)
        away = self._left > 0
        moves[away] = self._move[away]
        self._left[away] -= 1
        moves[self._idle] = int(Move.NONE)
        return moves


# ------------------------------------------------------------------------------------------ fitting


def behaviour_of(policy: ActorCriticPolicy, codec: ActionCodec) -> Behaviour:
    """The moves that a policy finds best."""

    def act(observations: NDArray[np.float32], legal: NDArray[np.bool_]) -> IntArray:
        with torch.no_grad():
            logits = _move_logits(policy, torch.as_tensor(observations), codec).numpy()
        best: IntArray = np.where(legal, logits, -np.inf).argmax(-1)
        return best

    return act


def _move_logits(policy: ActorCriticPolicy, observations: torch.Tensor, codec: ActionCodec) -> torch.Tensor:
    """Logits of the moves, shape (n, PD clusters, 3)."""
    features = policy.extract_features(observations, policy.pi_features_extractor)
    logits = policy.action_net(policy.mlp_extractor.forward_actor(features))
    parts = logits.reshape(len(observations), codec.n_pd, len(codec.grid) + N_MOVES)
    return parts[:, :, len(codec.grid) :]


def fit_moves(
    policy: ActorCriticPolicy, codec: ActionCodec, priced: PricedMoves, settings: WarmStartSettings, seed: int
) -> float:
    """Let the logits of the moves give their prices: logit(none) - logit(move) = sharpness x cost / scale.

    The Huber loss bends at one scale: prices have long tails. The choice of the routing is left as it was.

    Returns:
        The mean loss of the last pass.
    """
    observations = torch.as_tensor(priced.observations)
    known = torch.as_tensor(~np.isnan(priced.cost_s))
    cost_s = np.nan_to_num(priced.cost_s)
    cost_s[:, :, [Move.PREFILL_TO_DECODE, Move.DECODE_TO_PREFILL]] += settings.move_cost_s
    wanted = torch.as_tensor(cost_s / settings.cost_scale_s)
    for scaling in policy.modules():
        if isinstance(scaling, FixedScaling):
            scaling.fit(priced.observations)
    actor = [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters()]
    optimiser = torch.optim.AdamW(actor, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    n, size = len(priced), settings.batch_size
    steps = settings.epochs * math.ceil(n / size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, steps)
    loss_sum = 0.0
    routing = routing_rows(codec)
    kept = policy.action_net.weight.detach().clone(), policy.action_net.bias.detach().clone()
    for _ in range(settings.epochs):
        loss_sum = 0.0
        for rows in torch.randperm(n, generator=generator).split(size):
            logits = _move_logits(policy, observations[rows], codec) / settings.sharpness
            price = logits[:, :, int(Move.NONE), None] - logits
            mask = known[rows]
            loss = torch.nn.functional.huber_loss(price * mask, wanted[rows] * mask)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            loss_sum += loss.item() * len(rows)
    with torch.no_grad():  # weight decay moved what has no gradient too
        policy.action_net.weight[routing] = kept[0][routing]
        policy.action_net.bias[routing] = kept[1][routing]
    return loss_sum / n


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
    episodes = (int(rng.integers(seeds.start, seeds.stop)) for _ in itertools.count())
    whole = sum(weight for _, weight in scenarios)
    parts: list[PricedMoves] = []
    total = 0
    for k in range(settings.rounds):
        behaviour = behaviour_of(policy, codec)
        for scenario, weight in scenarios:
            wanted = math.ceil(settings.states * weight / whole)
            for part in price_moves(
                scenario, behaviour, codec.neutral_margin_s, episodes, wanted, settings, rng
            ):
                parts.append(part)
                total += len(part)
                if tell(k, total, None):
                    return total
        loss = fit_moves(policy, codec, joined(parts), settings, seed + k)
        if tell(k, total, loss):
            return total
    return total
