"""When a node may change role: one guard, shared by every rule that converts nodes.

A rule proposes a move with its expected gain and the load of the role that would give the node; the guard
allows it or says why not. What is safe is decided here alone:

- only moves that are legal now;
- samples of the first `warmup_s` after the start and after each conversion are left out;
- a dwell time after a conversion, a longer one before a move back;
- a node is released only if the role it leaves stays below `utilisation_limit` without it (for one pool of n
  equal nodes its load becomes load * n / (n - 1)); when that cannot be, because both roles are full, only to
  a role that is `relief_ratio` times fuller than this one would be;
- the gain must exceed `min_gain`, and the role that gets the node must be loaded; an objective that is being
  missed lifts both bars, but never one that a prompt misses on an idle system;
- a role that lost nodes and is below its floor gets one, whatever the rule wants;
- an empty system goes back to its base split, the start of the scenario, and stays there.

The split is read anew each tick, so nodes moved by hand or lost to a fault are seen.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas_baselines.parameters import knob
from prfaas_env.base import Frozen
from prfaas_env.decision import Move
from prfaas_env.scenarios.models import PdCluster, Slo
from prfaas_env.telemetry import LONG_WINDOW_S, Telemetry

logger = logging.getLogger(__name__)

_CONVERSION_OPEN = "3.4.3, long term: hysteresis and cost of a conversion are not given"


class GuardParameters(Frozen):
    """Parameters of the conversion guard."""

    utilisation_limit: float = knob(
        0.9, "share", "highest load that a release may leave to the role it leaves", _CONVERSION_OPEN, gt=0
    )
    relief_ratio: float = knob(
        1.0,
        "ratio",
        "above that limit a node is still released to a role that is this many times fuller; 0: never",
        _CONVERSION_OPEN,
        ge=0,
    )
    min_gain: float = knob(
        0.03, "share", "gain that a move must exceed, share of the present maximum", _CONVERSION_OPEN, ge=0
    )
    act_above_load: float = knob(
        0.8,
        "share",
        "load of the role that would get the node from which a move is worth it",
        _CONVERSION_OPEN,
        ge=0,
    )
    dwell_s: float = knob(
        15.0, "s", "time from the end of a conversion to the next order", _CONVERSION_OPEN, ge=0
    )
    opposite_dwell_s: float = knob(
        60.0,
        "s",
        "time from the start of a conversion to an order in the other direction",
        _CONVERSION_OPEN,
        ge=0,
    )
    warmup_s: float = knob(
        15.0,
        "s",
        "time after the start and after a conversion whose samples are left out",
        _CONVERSION_OPEN,
        ge=0,
    )
    slo_target: float = knob(
        0.9,
        "share",
        "attainment below which an objective that can be met lifts min_gain and act_above_load",
        "own",
        ge=0,
        le=1,
    )


class Refusal(enum.Enum):
    """Why a proposed move is not ordered."""

    NOT_LEGAL = "not legal now"
    WARMING_UP = "samples of the warm-up are left out"
    DWELL = "too soon after the last conversion"
    OPPOSITE_DWELL = "too soon after a move in the other direction"
    OVERLOAD = "the role it leaves would be overloaded"
    SMALL_GAIN = "the gain is too small"
    NO_NEED = "the role that would get the node has room"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A move that a rule wants.

    `gain` is the expected growth of the rule's maximum as a share of its present value, `need` the load of the
    role that gets the node. `load` is the present load of the role that gives it (1 = full), `capacity` its
    capacity now and `capacity_after` without the node, in any one unit: for a pool of equal nodes n and n - 1.
    """

    move: Move
    gain: float
    need: float
    load: float
    capacity: float
    capacity_after: float


def load_after_release(load: float, capacity: float, capacity_after: float) -> float:
    """Load of a role once a node has left it: load * n / (n - 1) for n equal nodes; infinite if none is left."""
    if load <= 0.0:
        return 0.0
    if capacity_after <= 0.0:
        return math.inf
    return load * capacity / capacity_after


def slo_reachable(idle_s: Sequence[float], objective_s: float, target: float) -> bool:
    """Whether the share of prompts that meet an objective on an idle system reaches the target.

    Args:
        idle_s: first-token time (or step time) of each recent prompt with nobody else in the system.
        objective_s: the objective.
        target: share that must meet it.
    """
    if len(idle_s) == 0:
        return False
    return sum(s <= objective_s for s in idle_s) >= target * len(idle_s)


class ConversionGuard:
    """Guard of one PD cluster. Call `observe` on every tick, then `standing_order`, and `check` to order a move.

    Args:
        parameters: see `GuardParameters`.
        cluster: the PD cluster as the scenario starts it.
        index: its place in the deployment.
        links: places of its links.
        slo: objectives of the scenario.
    """

    def __init__(
        self, parameters: GuardParameters, cluster: PdCluster, index: int, links: Sequence[int], slo: Slo
    ) -> None:
        self.parameters = parameters
        self._cluster = cluster
        self._index = index
        self._links = tuple(links)
        self._slo = slo
        self._counts: tuple[int, int, int] | None = None
        self._ordered = Move.NONE
        self._last_move = Move.NONE
        self._last_move_s = -math.inf
        self._last_converting_s = -math.inf
        self._now_s = 0.0
        self._slot_use: _Mean = _Mean()
        self._prefill_use: _Mean = _Mean()

    # ------------------------------------------------------------------------------------ what it sees

    def observe(self, telemetry: Telemetry) -> None:
        """Take in the reading of a tick."""
        pd = telemetry.pd[self._index]
        self._now_s = telemetry.time_s
        counts = (int(pd.prefill_instances), int(pd.decode_instances), int(pd.converting_instances))
        started = Move.NONE if self._counts is None else _started(self._counts, counts)
        if started is not Move.NONE:
            self._last_move, self._last_move_s = started, self._now_s
        if self._counts is not None and started is not self._ordered:
            logger.info(
                "%s at %g s: ordered %s, seen %s; the split is read anew",
                self._cluster.name,
                self._now_s,
                self._ordered.name,
                started.name,
            )
        self._ordered = Move.NONE
        if counts[2] > 0 or started is not Move.NONE:
            self._last_converting_s = self._now_s
            self._slot_use, self._prefill_use = _Mean(), _Mean()
        elif pd.conversion_valid > 0.5:
            # Orders given before this guard began to look count too.
            self._last_converting_s = max(self._last_converting_s, self._now_s - pd.since_conversion_s)
        self._counts = counts
        if self.warm:
            self._slot_use.add(pd.decode_slot_use)
            self._prefill_use.add(pd.prefill_busy_instances / max(counts[0], 1))

    @property
    def split(self) -> tuple[int, int]:
        """(prefill, decode) instances now."""
        return (0, 0) if self._counts is None else self._counts[:2]

    @property
    def warm(self) -> bool:
        """Whether the present sample counts: `warmup_s` after the start and after the last conversion."""
        return self._now_s - max(0.0, self._last_converting_s) >= self.parameters.warmup_s

    @property
    def decode_use(self) -> float:
        """Mean share of decode slots in use over the warm samples since the last conversion (a slow mean)."""
        return self._slot_use.value

    @property
    def prefill_use(self) -> float:
        """The same for the share of busy local prefill instances."""
        return self._prefill_use.value

    def empty(self, telemetry: Telemetry) -> bool:
        """No arrival in 120 s and nothing queued, running or on the way."""
        pd = telemetry.pd[self._index]
        if telemetry.time_s < LONG_WINDOW_S or pd.lengths_valid > 0.5:
            return False
        inside = pd.prefill_queue_requests + pd.prefill_busy_instances + pd.decode_queue_requests
        links = telemetry.link
        return inside + pd.decode_sequences + sum(links[k].backlog_bytes for k in self._links) == 0

    def objective_missed(
        self, telemetry: Telemetry, idle_ttft_s: Callable[[], Sequence[float]], idle_step_s: float
    ) -> bool:
        """Whether an objective that can be met is being missed.

        An objective that a lone prompt misses on an idle system is unreachable and never drives a move.

        Args:
            telemetry: the reading now.
            idle_ttft_s: gives the first-token times of the recent prompts on an idle system; asked only when
                they matter.
            idle_step_s: time per output token of a lone sequence.
        """
        pd = telemetry.pd[self._index]
        target, slo = self.parameters.slo_target, self._slo
        ttft_missed = slo.ttft_s is not None and pd.ttft_valid > 0.5 and pd.ttft_attainment < target
        if ttft_missed and slo_reachable(idle_ttft_s(), slo.ttft_s or 0.0, target):
            return True
        tpot_missed = slo.tpot_s is not None and pd.tpot_valid > 0.5 and pd.tpot_attainment < target
        return tpot_missed and slo_reachable([idle_step_s], slo.tpot_s or 0.0, target)

    # ---------------------------------------------------------------------------------- what it allows

    def standing_order(self, telemetry: Telemetry) -> Move | None:
        """What is to be done whatever a rule wants; None when the rule may decide.

        A role that lost nodes and is below its floor gets one. An empty system goes back to its base split, one
        node at a time, and then stays (`Move.NONE`).
        """
        prefill, decode = self.split
        cluster, legal = self._cluster, telemetry.legal_moves[self._index]
        if decode < cluster.min_decode and legal[Move.PREFILL_TO_DECODE]:
            return self._order(Move.PREFILL_TO_DECODE)
        if prefill < cluster.prefill_floor and legal[Move.DECODE_TO_PREFILL]:
            return self._order(Move.DECODE_TO_PREFILL)
        if not self.empty(telemetry):
            return None
        if prefill == cluster.n_prefill:
            return Move.NONE
        move = Move.PREFILL_TO_DECODE if prefill > cluster.n_prefill else Move.DECODE_TO_PREFILL
        if self._timing(telemetry, move, warm_needed=False) is not None:
            return Move.NONE
        return self._order(move)

    def _order(self, move: Move) -> Move:
        self._ordered = move
        return move

    def check(
        self, telemetry: Telemetry, proposal: Proposal, objective_missed: bool = False
    ) -> Refusal | None:
        """None, and the move counts as ordered; or why it must not be."""
        refusal = self._timing(telemetry, proposal.move, warm_needed=True)
        if refusal is not None:
            return refusal
        after = load_after_release(proposal.load, proposal.capacity, proposal.capacity_after)
        ratio = self.parameters.relief_ratio
        relief = ratio > 0.0 and proposal.need >= ratio * after
        if after > self.parameters.utilisation_limit and not relief:
            return Refusal.OVERLOAD
        if not objective_missed and proposal.need < self.parameters.act_above_load:
            return Refusal.NO_NEED
        if proposal.gain <= (0.0 if objective_missed else self.parameters.min_gain):
            return Refusal.SMALL_GAIN
        self._order(proposal.move)
        return None

    def _timing(self, telemetry: Telemetry, move: Move, warm_needed: bool) -> Refusal | None:
        if move is Move.NONE or not telemetry.legal_moves[self._index][move]:
            return Refusal.NOT_LEGAL
        if warm_needed and not self.warm:
            return Refusal.WARMING_UP
        now_s = telemetry.time_s
        if now_s - self._last_converting_s < self.parameters.dwell_s:
            return Refusal.DWELL
        opposite = self._last_move is not Move.NONE and self._last_move is not move
        if opposite and now_s - self._last_move_s < self.parameters.opposite_dwell_s:
            return Refusal.OPPOSITE_DWELL
        return None


def _started(before: tuple[int, int, int], after: tuple[int, int, int]) -> Move:
    """The conversion that began between two readings of (prefill, decode, converting); a failure is none."""
    prefill, decode, converting = (b - a for a, b in zip(before, after, strict=True))
    if prefill < 0 and (converting > 0 or decode > 0):
        return Move.PREFILL_TO_DECODE
    if decode < 0 and (converting > 0 or prefill > 0):
        return Move.DECODE_TO_PREFILL
    return Move.NONE


class _Mean:
    """Plain mean of the first samples, then an exponential one over about `LENGTH` samples; 0 without any."""

    LENGTH = 30
    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.count = min(self.count + 1, self.LENGTH)
        self.value += (sample - self.value) / self.count
