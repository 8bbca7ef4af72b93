"""Lookahead planners: try candidate decisions in copies of the running simulator and take the one that costs least.

They look into the simulator beside the telemetry, so they run there only. `clairvoyant` rolls out the true world;
`sampled` redraws everything that a router cannot know (see `prfaas_env.outlook`) and averages over the draws.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prfaas_baselines.parameters import knob, parameter_table, parameters_from
from prfaas_env.base import Frozen, PrfaasError, stream
from prfaas_env.branches import Branches
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.outlook import Arrivals, Outlook, arrived_requests, finished_outputs, open_requests
from prfaas_env.policy import OwnInterval, PolicyContext
from prfaas_env.simulator.compiled_engine import CompiledEngine, StateView
from prfaas_env.simulator.formulas import FloatArray, IntArray, ns_from_s
from prfaas_env.simulator.prefix_pool import has_pool
from prfaas_env.telemetry import Telemetry
from prfaas_env.workload.means import mean_output_tokens

#: Margins that are tried, in seconds, "no change" first: a tie goes to the first candidate.
MARGINS_S = (0.0, -8.0, -3.0, 3.0, 8.0)
#: Moves that are tried where they are legal, none first.
MOVES = (Move.NONE, Move.PREFILL_TO_DECODE, Move.DECODE_TO_PREFILL)


class LookaheadParameters(Frozen):
    """What both planners have."""

    interval_s: float = knob(5.0, "s", "time between two decisions, for which a candidate is held", gt=0)
    horizon_s: float = knob(90.0, "s", "how far a roll-out looks ahead", gt=0)


@dataclass
class _Episode:
    """What belongs to the running episode."""

    context: PolicyContext
    clock: OwnInterval
    engine: CompiledEngine | None = None
    decision_s: list[float] = field(default_factory=list)


class Lookahead:
    """What both planners do: roll out every candidate, cluster after cluster, and take the one that costs least.

    A candidate is a legal move and one of `MARGINS_S`, held for `interval_s`; then margin 0 and no move up to
    `horizon_s`. Its cost is the integral of requests waiting for their first token over the roll-out, plus the
    scenario's `reject_penalty_s` for each request rejected or aborted in it. A tie goes to margin 0 and no move.

    With several PD clusters the first one is decided with margin 0 and no move in the others, then the second one with
    the first one's decision in force, and so on.
    """

    constant = False
    simulator_only = True
    name = "lookahead"

    def __init__(self, parameters: LookaheadParameters, samples: int = 1) -> None:
        if parameters.horizon_s < parameters.interval_s:
            raise PrfaasError(
                f"policy {self.name!r}: horizon_s is {parameters.horizon_s:g}; it must be at least interval_s, "
                f"{parameters.interval_s:g}"
            )
        self._interval_ns = ns_from_s(parameters.interval_s)
        self._horizon_ns = ns_from_s(parameters.horizon_s)
        self._interval_s = parameters.interval_s
        self._samples = samples
        self._episode: _Episode | None = None
        self._branches: Branches | None = None

    def reset(self, context: PolicyContext) -> None:
        """Start an episode."""
        clock = OwnInterval(self._interval_s, f"policy {self.name!r}")
        clock.reset(context)
        self._episode = _Episode(context, clock)

    def attach(self, engine: CompiledEngine) -> None:
        """Take the engine to look into."""
        episode = self._running()
        episode.engine = engine
        scenario = episode.context.scenario
        if self._branches is None or not self._branches.fits(scenario):
            most = len(MARGINS_S) * len(MOVES) * self._samples
            self._branches = Branches(scenario, most)

    def decide(self, telemetry: Telemetry) -> Decision:
        """The decision of the interval that begins, or the one in force without its moves."""
        episode = self._running()
        if not episode.clock.is_due(telemetry):
            return episode.clock.held
        started = time.perf_counter()
        decision = self._plan(telemetry)
        episode.decision_s.append(time.perf_counter() - started)
        return episode.clock.decided(telemetry, decision)

    @property
    def decision_interval_s(self) -> float:
        """Time between two decisions."""
        return self._interval_s

    @property
    def decision_times_s(self) -> FloatArray:
        """Wall time of each decision of the episode so far, in order."""
        return np.array([] if self._episode is None else self._episode.decision_s, dtype=np.float64)

    # ------------------------------------------------------------------ inside

    def _running(self) -> _Episode:
        if self._episode is None:
            raise PrfaasError(f"policy {self.name!r}: reset() comes before everything else")
        return self._episode

    def _engine(self) -> CompiledEngine:
        engine = self._running().engine
        if engine is None:
            raise PrfaasError(
                f"policy {self.name!r} looks into the simulator and was given none: it does not run outside it"
            )
        return engine

    def _plan(self, telemetry: Telemetry) -> Decision:
        self._engine()
        n_pd = len(telemetry.legal_moves)
        margins, moves = [0.0] * n_pd, [Move.NONE] * n_pd
        self._look(telemetry)
        for pd, legal in enumerate(telemetry.legal_moves):
            candidates = [(move, margin) for move in MOVES if legal[move] for margin in MARGINS_S]
            value = np.tile(np.array(margins), (len(candidates), 1))
            move = np.tile(np.array(moves, dtype=np.int64), (len(candidates), 1))
            move[:, pd], value[:, pd] = np.array(candidates).T
            best = int(np.argmin(self._costs(telemetry.time_ns, value, move)))
            moves[pd], margins[pd] = candidates[best]
        return Decision(
            tuple(ClusterDecision(margin_s=m, move=x) for m, x in zip(margins, moves, strict=True))
        )

    def _look(self, telemetry: Telemetry) -> None:
        """Note what a decision needs to know before its roll-outs."""

    def _costs(self, now_ns: int, value: FloatArray, move: IntArray) -> IntArray:
        """Costs of candidates in ns of waiting, added up over the samples, shape (candidates,)."""
        branches = self._branches
        assert branches is not None
        n = len(value)
        used = n * self._samples
        self._set(branches, n, now_ns)
        live = np.arange(branches.n) < used
        values, moves = np.zeros((branches.n, branches.n_pd)), np.full((branches.n, branches.n_pd), Move.NONE)
        values[:used], moves[:used] = np.tile(value, (self._samples, 1)), np.tile(move, (self._samples, 1))
        end_ns = now_ns + self._horizon_ns
        branches.step(now_ns + self._interval_ns, values, moves, live=live)
        if self._horizon_ns > self._interval_ns:
            values[:], moves[:] = 0.0, Move.NONE
            branches.step(end_ns, values, moves, live=live)
        penalty_ns = ns_from_s(self._running().context.scenario.reward.reject_penalty_s)
        costs = branches.waiting_ns[:used] + penalty_ns * branches.lost_requests[:used]
        total: IntArray = costs.reshape(self._samples, n).sum(axis=0)
        return total

    def _set(self, branches: Branches, n: int, now_ns: int) -> None:
        """Set branches s n .. s n + n - 1 to sample s of what is to come."""
        raise NotImplementedError


class Clairvoyant(Lookahead):
    """Roll-outs of the true world: future arrivals, outputs, link capacity and faults are known.

    A reference that shows what knowing the near future is worth to this planner.

    Args:
        parameters: any field of `LookaheadParameters` by name.

    Raises:
        PrfaasError: an unknown parameter or a value that is not allowed.
    """

    name = "clairvoyant"
    Parameters = LookaheadParameters

    def __init__(self, **parameters: Any) -> None:
        self.parameters = parameters_from(LookaheadParameters, self.name, parameters)
        super().__init__(self.parameters)

    def _set(self, branches: Branches, n: int, now_ns: int) -> None:
        branches.take(self._engine(), slice(0, n), now_ns + self._horizon_ns)


Clairvoyant.__doc__ = f"{Clairvoyant.__doc__}\n\n{parameter_table(LookaheadParameters)}\n"


class SampledParameters(LookaheadParameters):
    """Parameters of the planner that knows what a router knows."""

    samples: int = knob(4, "-", "draws of what is to come, over which costs are averaged", ge=1, le=64)
    rate_window_s: float = knob(30.0, "s", "window of the arrival rate", gt=0)
    length_window_s: float = knob(120.0, "s", "arrivals whose lengths and doors are drawn again", gt=0)
    output_window_s: float = knob(60.0, "s", "finished requests whose outputs are drawn again", gt=0)
    min_requests: int = knob(20, "requests", "requests to draw from where a window holds fewer", ge=1)


class Sampled(Lookahead):
    """Roll-outs of draws from what a router could have recorded; nothing of the future or hidden is read.

    In each of `samples` draws, the same for all candidates of a decision:

    - Outputs: a request that has given g tokens gets the output of a recently finished one that gave more than g; where
      none did, g tokens and the whole output of a recently finished one. Before any has finished, the mean of the
      scenario's planned workload stands for all.
    - Arrivals: Poisson at the rate of `rate_window_s` at all doors together (of the time since the start, while that is
      less); each with the door, the length and the declared cached tokens of a recent arrival, and an output as above.
    - Links: the observed capacity, from now on.
    - No fault to come and no repair, nobody who gives up before the scenario's deadline, no jitter.

    Random numbers come from the policy's own stream, by seed and time of the decision. A scenario with prefix pools in
    use is refused: what a drawn prompt would find in them cannot be known.

    Args:
        parameters: any field of `SampledParameters` by name.

    Raises:
        PrfaasError: an unknown parameter or a value that is not allowed.
    """

    name = "sampled"
    Parameters = SampledParameters

    def __init__(self, **parameters: Any) -> None:
        self.parameters = parameters_from(SampledParameters, self.name, parameters)
        super().__init__(self.parameters, self.parameters.samples)
        self._seen = _Seen(self.parameters)
        self._outlooks: list[Outlook] = []

    def reset(self, context: PolicyContext) -> None:
        """Start an episode: nothing has been seen yet."""
        super().reset(context)
        self._seen = _Seen(self.parameters)

    def attach(self, engine: CompiledEngine) -> None:
        """Take the engine to look into.

        Raises:
            PrfaasError: the scenario has prefix pools and its workload prefix data.
        """
        if has_pool(engine.world.scenario, engine.world.requests):
            raise PrfaasError(
                f"policy {self.name!r}: scenario {engine.world.scenario.name!r} has prefix pools (prefix_pool); what a "
                "drawn prompt would find in them cannot be known, so it does not run there"
            )
        super().attach(engine)

    def _look(self, telemetry: Telemetry) -> None:
        context = self._running().context
        state = self._engine().view()
        self._seen.look(state)
        generated = open_requests(state).generated_tokens
        random = stream(context.seed, "policy", telemetry.time_ns)
        capacity_bps = np.array([link.observed_capacity_bps for link in telemetry.link])
        planned = self._seen.finished_tokens
        if not len(planned):
            planned = np.array([max(round(mean_output_tokens(context.scenario.workload)), 1)])
        self._outlooks = []
        for _ in range(self._samples):
            arrivals = self._seen.draw_arrivals(random, telemetry.time_ns, self._horizon_ns)
            self._outlooks.append(
                Outlook(
                    _draw_outputs(random, planned, generated),
                    arrivals,
                    _draw_outputs(random, planned, np.zeros(len(arrivals.pd), dtype=np.int64)),
                    capacity_bps,
                )
            )

    def _set(self, branches: Branches, n: int, now_ns: int) -> None:
        last = n * self._samples
        # what arrives later is drawn
        branches.take(self._engine(), slice(0, last, n), now_ns)
        for s, outlook in enumerate(self._outlooks):
            branches.redraw(s * n, outlook, now_ns + self._horizon_ns)
            branches.fork(s * n, slice(s * n + 1, s * n + n))


def _draw_outputs(random: np.random.Generator, outputs: IntArray, generated: IntArray) -> IntArray:
    """All output tokens of requests that have given `generated` so far, from those of finished ones (sorted, >= 1)."""
    first = np.searchsorted(outputs, generated, side="right")
    longer = first < len(outputs)
    at = random.integers(np.where(longer, first, 0), len(outputs))
    drawn: IntArray = outputs[at] + np.where(longer, 0, generated)
    return drawn


class _Seen:
    """What a router could have recorded of arrivals and finished requests."""

    def __init__(self, parameters: SampledParameters) -> None:
        self._parameters = parameters
        self._first_open = 0
        self._looked_ns = 0
        self._finish_ns = self._outputs = self.finished_tokens = np.zeros(0, dtype=np.int64)
        self._recent = Arrivals(*[np.zeros(0, dtype=np.int64)] * len(Arrivals._fields))
        self._first_recent = 0
        self._rate_rps = 0.0

    def look(self, state: StateView) -> None:
        """Note what has happened since the last look."""
        p, now_ns = self._parameters, state.now_ns
        finish_ns, outputs = finished_outputs(state, self._first_open, self._looked_ns)
        order = np.argsort(finish_ns, kind="stable")
        self._finish_ns = np.concatenate((self._finish_ns, finish_ns[order]))
        self._outputs = np.concatenate((self._outputs, outputs[order]))
        kept = self._recent_from(self._finish_ns, now_ns - ns_from_s(p.output_window_s))
        self._finish_ns, self._outputs = self._finish_ns[kept:], self._outputs[kept:]
        self.finished_tokens = np.sort(self._outputs)
        self._first_open, self._looked_ns = state.first_open, now_ns
        arrivals = arrived_requests(state, self._first_recent)
        kept = self._recent_from(arrivals.arrival_ns, now_ns - ns_from_s(p.length_window_s))
        rate_window_ns = min(ns_from_s(p.rate_window_s), now_ns)
        since = int(np.searchsorted(arrivals.arrival_ns, now_ns - rate_window_ns))
        count = len(arrivals.arrival_ns) - since
        self._rate_rps = count / (rate_window_ns / 1e9) if rate_window_ns > 0 else 0.0
        self._recent = Arrivals(*(column[kept:] for column in arrivals))
        # the window of the rate may be the longer one
        self._first_recent += min(kept, since)

    def _recent_from(self, times_ns: IntArray, since_ns: int) -> int:
        """Where the recent ones begin: those of a window, or more where it holds too few."""
        at = int(np.searchsorted(times_ns, since_ns))
        return max(min(at, len(times_ns) - self._parameters.min_requests), 0)

    def draw_arrivals(self, random: np.random.Generator, now_ns: int, span_ns: int) -> Arrivals:
        """Arrivals within `span_ns` from now."""
        n = int(random.poisson(self._rate_rps * span_ns / 1e9))
        if len(self._recent.pd) == 0:
            n = 0
        arrival_ns = now_ns + np.sort(random.integers(0, span_ns, n))
        at = random.integers(0, max(len(self._recent.pd), 1), n)
        pd, input_tokens, cached_tokens = (column[at] for column in self._recent[1:])
        return Arrivals(arrival_ns, pd, input_tokens, cached_tokens)


Sampled.__doc__ = f"{Sampled.__doc__}\n\n{parameter_table(SampledParameters)}\n"
