"""Roll-outs: copies of states that come up under a behaviour run on with one choice each; what they wait is its price.

Nobody sees the future that a price holds, so networks are fitted to many of them: from the telemetry they give the mean
price over the futures that look alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.policies import ActorCriticPolicy

from prfaas_agents.settings import RollOutSettings
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
class Priced:
    """States and what each choice cost in them.

    `cost_s` are request-seconds of waiting over the horizon less those of "no change"; NaN where a choice is not legal.
    """

    observations: NDArray[np.float32]
    """Shape (n, fields)."""
    cost_s: NDArray[np.float32]
    """Shape (n, PD clusters, choices)."""

    def __len__(self) -> int:
        return len(self.observations)


#: Prices some states of a scenario for a behaviour, until there are as many as wanted.
Pricing = Callable[[Scenario, Behaviour, int], Iterator[Priced]]


def joined(parts: Sequence[Priced]) -> Priced:
    """All of them as one."""
    return Priced(
        np.concatenate([part.observations for part in parts]), np.concatenate([part.cost_s for part in parts])
    )


@dataclass(frozen=True)
class Visit:
    """The states of some envs at one instant of decision."""

    batch: Batch
    now_ns: int
    legal: NDArray[np.bool_]
    """Legal moves, shape (n, PD clusters, 3)."""


def visits(
    scenario: Scenario,
    behaviour: Behaviour,
    margin_s: float,
    seeds: Iterator[int],
    settings: RollOutSettings,
    rng: np.random.Generator,
) -> Iterator[Visit]:
    """Play episodes with a behaviour and its detours, one after another without end; a visit per decision.

    Args:
        scenario: its control interval is that of the decisions.
        behaviour: chooses the moves.
        margin_s: held all the time.
        seeds: episode seeds, taken as needed.
        settings: envs and detours.
        rng: draws the detours.
    """
    n, control_ns = settings.n_envs, ns_from_s(scenario.control.control_interval_s)
    batch = Batch(scenario, n)
    n_pd = batch.layout.n_pd
    n_steps = math.ceil(ns_from_s(scenario.measure.horizon_s) / control_ns)
    margin = np.full((n, n_pd), margin_s)
    try:
        while True:
            detours = Detours(behaviour, n, n_pd, settings, rng)
            for e in range(n):
                batch.load(e, draw_world(scenario, next(seeds)))
            now = np.zeros(n, dtype=np.int64)
            batch.step(np.full(n, kernel.READ), now, True, margin, np.full((n, n_pd), int(Move.NONE)))
            for _ in range(n_steps):
                legal = batch.legal.reshape(n, n_pd, N_MOVES).astype(bool)
                yield Visit(batch, int(now[0]), legal)
                moves = detours(batch.observation, legal)
                now = now + control_ns
                batch.step(np.full(n, kernel.DECIDE), now, True, margin, moves)
    finally:
        batch.close()


class RollOuts:
    """Copies of visited states that run on, one per choice: it holds for one interval, then "no change" does.

    Args:
        scenario: its control interval is the interval.
        settings: how many states are visited at a time, and how long the copies run on.
        margin_s: the margin of "no change".
        n_choices: copies per state.
    """

    def __init__(
        self, scenario: Scenario, settings: RollOutSettings, margin_s: float, n_choices: int
    ) -> None:
        self._branches = Branches(scenario, settings.n_envs * n_choices, threads=True)
        self._margin_s = margin_s
        self._control_ns = ns_from_s(scenario.control.control_interval_s)
        self._horizon_ns = ns_from_s(settings.horizon_s)

    def close(self) -> None:
        """End the threads."""
        self._branches.close()

    def waited_s(self, visit: Visit, chosen: IntArray, margins_s: FloatArray, moves: IntArray) -> FloatArray:
        """Waiting from now to the end of the roll-outs, in request-seconds, shape (chosen, choices).

        Args:
            visit: the states.
            chosen: which envs.
            margins_s: held for one interval, shape (chosen, choices, PD clusters).
            moves: ordered now, same shape.
        """
        branches = self._branches
        n, each, n_pd = moves.shape
        until_ns = visit.now_ns + self._horizon_ns
        for k, e in enumerate(chosen.tolist()):
            branches.take_env(visit.batch, e, slice(k * each, (k + 1) * each), until_ns)
        live = np.arange(branches.n) < n * each
        no_margin = np.full((branches.n, n_pd), self._margin_s)
        no_move = np.full((branches.n, n_pd), int(Move.NONE), dtype=np.int64)
        margin, order = no_margin.copy(), no_move.copy()
        margin[live], order[live] = margins_s.reshape(-1, n_pd), moves.reshape(-1, n_pd)
        first_ns = min(visit.now_ns + self._control_ns, until_ns)
        branches.step(first_ns, margin, order, live=live)
        if first_ns < until_ns:
            branches.step(until_ns, no_margin, no_move, live=live)
        before_s = visit.batch.whole[chosen, WHOLE_WAITING_NS] / NS_PER_S
        after_s: FloatArray = branches.waiting_ns[live].reshape(n, each) / NS_PER_S
        return after_s - before_s[:, None]


def one_at_a_time(n_pd: int, others: NDArray[Any], neutral: float) -> NDArray[Any]:
    """The neutral value everywhere, then each other one in each PD cluster alone.

    Shape (1 + PD clusters x others, PD clusters), the type is that of the others.
    """
    rows = np.full((1 + n_pd * len(others), n_pd), neutral, dtype=others.dtype)
    for pd in range(n_pd):
        rows[1 + pd * len(others) : 1 + (pd + 1) * len(others), pd] = others
    return rows


def costs_s(waited: FloatArray, n_pd: int, at: IntArray, n_choices: int) -> FloatArray:
    """Cost of each choice less that of "no change", shape (n, PD clusters, choices).

    Args:
        waited: of the rows of `one_at_a_time`, shape (n, rows).
        n_pd: number of PD clusters.
        at: places of the others among the choices.
        n_choices: choices of a PD cluster, the neutral one included, which costs 0.
    """
    cost_s = np.zeros((len(waited), n_pd, n_choices))
    cost_s[:, :, at] = (waited[:, 1:] - waited[:, :1]).reshape(len(waited), n_pd, -1)
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
        settings: RollOutSettings,
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


def behaviour_of(policy: ActorCriticPolicy, codec: ActionCodec) -> Behaviour:
    """The moves that a policy finds best."""

    def act(observations: NDArray[np.float32], legal: NDArray[np.bool_]) -> IntArray:
        with torch.no_grad():
            logits = move_logits(policy, torch.as_tensor(observations), codec).numpy()
        best: IntArray = np.where(legal, logits, -np.inf).argmax(-1)
        return best

    return act


def action_logits(policy: ActorCriticPolicy, observations: torch.Tensor, codec: ActionCodec) -> torch.Tensor:
    """Logits of the actor, shape (n, PD clusters, routing grid + 3)."""
    features = policy.extract_features(observations, policy.pi_features_extractor)
    logits = policy.action_net(policy.mlp_extractor.forward_actor(features))
    return logits.reshape(len(observations), codec.n_pd, len(codec.grid) + N_MOVES)


def move_logits(policy: ActorCriticPolicy, observations: torch.Tensor, codec: ActionCodec) -> torch.Tensor:
    """Logits of the moves, shape (n, PD clusters, 3)."""
    return action_logits(policy, observations, codec)[:, :, len(codec.grid) :]


def fit_actor(
    policy: ActorCriticPolicy,
    n: int,
    settings: RollOutSettings,
    seed: int,
    losses: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> list[float]:
    """Train the layers of the actor on n samples.

    Args:
        policy: changed in place.
        n: number of samples.
        settings: passes, batch size, learning rate and its decay.
        seed: of the order of the samples.
        losses: of the samples with these indices, shape (batch,); their sum is minimised.

    Returns:
        The mean of each loss in the last pass.
    """
    actor = [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters()]
    optimiser = torch.optim.AdamW(actor, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    steps = settings.epochs * math.ceil(n / settings.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, steps)
    sums = np.zeros(1)
    for _ in range(settings.epochs):
        sums = np.zeros(1)
        for rows in torch.randperm(n, generator=generator).split(settings.batch_size):
            found = losses(rows)
            optimiser.zero_grad()
            sum(found[1:], found[0]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            sums = sums + len(rows) * np.array([loss.item() for loss in found])
    means: list[float] = (sums / n).tolist()
    return means


def priced_of(
    scenarios: Sequence[tuple[Scenario, float]],
    behaviour: Behaviour,
    pricing: Pricing,
    n_states: int,
    tell: Callable[[int], bool],
) -> list[Priced] | None:
    """Priced states of several scenarios, divided among them by weight; None when `tell(states so far)` stops it."""
    whole = sum(weight for _, weight in scenarios)
    parts: list[Priced] = []
    total = 0
    for scenario, weight in scenarios:
        for part in pricing(scenario, behaviour, math.ceil(n_states * weight / whole)):
            parts.append(part)
            total += len(part)
            if tell(total):
                return None
    return parts


def episode_seeds(seeds: range, rng: np.random.Generator) -> Iterator[int]:
    """Seeds drawn from a range without end."""
    return (int(rng.integers(seeds.start, seeds.stop)) for _ in itertools.count())
