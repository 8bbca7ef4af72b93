"""What a scheduler can decide: values, clocks, masks, and decoding from an action array.

A `Decision` holds any value; the grids below belong to the decoding of actions alone.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

#: Margin grid in seconds: offload always, 11 margins, never. Index 6 is "no change": earliest finish.
MARGIN_GRID_S: tuple[float, ...] = (
    -math.inf,
    -30.0,
    -8.0,
    -4.0,
    -2.0,
    -1.0,
    0.0,
    1.0,
    2.0,
    4.0,
    8.0,
    30.0,
    math.inf,
)
THRESHOLD_MIN_TOKENS = 1_000
THRESHOLD_MAX_TOKENS = 131_072
#: The paper's optimum takes the place of the grid value nearest to it.
PAPER_THRESHOLD_TOKENS = 19_400
#: Largest finite margin of the continuous form, in seconds.
MARGIN_MAX_S = 30.0


def _threshold_grid() -> tuple[float, ...]:
    grid = [float(round(x)) for x in np.geomspace(THRESHOLD_MIN_TOKENS, THRESHOLD_MAX_TOKENS, 16)]
    nearest = min(range(len(grid)), key=lambda k: abs(grid[k] - PAPER_THRESHOLD_TOKENS))
    grid[nearest] = float(PAPER_THRESHOLD_TOKENS)
    return (0.0, *grid, math.inf)


#: Threshold grid in tokens: 0 (all remote), 16 log-spaced values, infinity (all local).
THRESHOLD_GRID_TOKENS = _threshold_grid()

CacheRule = Literal["scarce", "abundant"]
Routing = Literal["threshold", "margin"]
ActionForm = Literal["discrete", "continuous"]


class Move(enum.IntEnum):
    """A node move inside one PD cluster; the value is its index in the action."""

    PREFILL_TO_DECODE = 0
    NONE = 1
    DECODE_TO_PREFILL = 2


N_MOVES = len(Move)


@dataclass(frozen=True, slots=True)
class ClusterDecision:
    """Decision for one PD cluster.

    Exactly one of `threshold_tokens` (offload when the incremental length exceeds it; at equality local) and
    `margin_s` (offload when predicted remote first-token time + margin < predicted local one) is set; both
    may be infinite. `cache_rule` is the paper's scarce/abundant choice (section 3.4.3).
    """

    threshold_tokens: float | None = None
    margin_s: float | None = None
    move: Move = Move.NONE
    cache_rule: CacheRule = "scarce"

    def __post_init__(self) -> None:
        if (self.threshold_tokens is None) == (self.margin_s is None):
            raise ValueError("a decision needs exactly one of threshold_tokens and margin_s")
        value = self.threshold_tokens if self.threshold_tokens is not None else self.margin_s
        if value is None or math.isnan(value):
            raise ValueError("a threshold or margin must be a number")
        if self.threshold_tokens is not None and self.threshold_tokens < 0:
            raise ValueError(f"threshold_tokens must be >= 0, found {self.threshold_tokens}")

    @property
    def without_move(self) -> ClusterDecision:
        """The same routing, no node move."""
        return self if self.move is Move.NONE else replace(self, move=Move.NONE)


@dataclass(frozen=True, slots=True)
class Decision:
    """One `ClusterDecision` per PD cluster, in the order of the deployment."""

    clusters: tuple[ClusterDecision, ...]

    @classmethod
    def same(cls, n_pd: int, **fields: Any) -> Decision:
        """The same decision for every PD cluster."""
        return cls((ClusterDecision(**fields),) * n_pd)


def offload_by_threshold(incremental_tokens: int, threshold_tokens: float) -> bool:
    """The paper's rule (section 3.4.3): remote when l > t; at equality local."""
    return incremental_tokens > threshold_tokens


def offload_by_margin(remote_s: float, local_s: float, margin_s: float) -> bool:
    """Remote when its predicted first-token time plus the margin is below the local one.

    An infinite margin decides alone, whatever the predictions.
    """
    if margin_s == math.inf:
        return False
    if margin_s == -math.inf:
        return True
    return remote_s + margin_s < local_s


def legal_moves(
    on_conversion_tick: bool,
    converting: int,
    active_prefill: int,
    active_decode: int,
    min_prefill: int,
    min_decode: int,
    prefill_queue_requests: int,
) -> tuple[bool, bool, bool]:
    """Legality of each `Move` in one PD cluster now.

    A conversion is legal on a conversion tick when none is under way and the role it leaves keeps its
    minimum; the last prefill instance stays while its queue holds requests (they are never re-routed).
    """
    free = on_conversion_tick and converting == 0
    to_decode = (
        free and active_prefill - 1 >= min_prefill and (active_prefill > 1 or prefill_queue_requests == 0)
    )
    to_prefill = free and active_decode - 1 >= min_decode
    return (to_decode and active_prefill >= 1, True, to_prefill)


@dataclass(frozen=True)
class ActionCodec:
    """Action arrays to decisions and back, for a number of PD clusters.

    Discrete: `MultiDiscrete([18, 3] * n_pd)` for thresholds, `[len(margins_s), 3] * n_pd` for margins. Continuous:
    `Box(-1, 1, (2 * n_pd,))`; the first value maps log-spaced to 1,000..131,072 tokens, or symmetrically
    log-spaced to -30..30 s with the ends -1 and 1 meaning always and never; the second one by thirds to the
    moves. The parts never constrain each other.

    `margins_s` are the margins of the discrete form, rising. A prompt that goes remote takes a link and a queue that
    others need, so the best margin is often a little above 0; a grid of few values is learned sooner. `margin_s` is
    the one of "no change": by default that nearest to 0, which is earliest finish, and of two such the larger one.
    """

    n_pd: int
    routing: Routing
    form: ActionForm
    margins_s: tuple[float, ...] = MARGIN_GRID_S
    margin_s: float | None = None

    def __post_init__(self) -> None:
        margins = self.margins_s
        if margins != MARGIN_GRID_S and (self.routing, self.form) != ("margin", "discrete"):
            raise ValueError(f"margins_s belong to discrete margins, not {self.form} {self.routing}")
        if not margins or math.isnan(margins[0]) or any(not a < b for a, b in pairwise(margins)):
            raise ValueError(f"margins_s must be one or more rising numbers, found {list(margins)}")
        if not math.isfinite(self.neutral_margin_s):
            raise ValueError(f"margins_s need a finite one, found {list(margins)}")
        if self.neutral_margin_s not in margins:
            raise ValueError(f"margin_s is {self.margin_s}; it must be one of margins_s, {list(margins)}")

    @property
    def grid(self) -> tuple[float, ...]:
        """Grid of the routing part of the discrete form."""
        return self.margins_s if self.routing == "margin" else THRESHOLD_GRID_TOKENS

    @property
    def neutral_margin_s(self) -> float:
        """The margin of "no change"."""
        return min(reversed(self.margins_s), key=abs) if self.margin_s is None else self.margin_s

    def space(self) -> spaces.Space[Any]:
        """The Gymnasium action space."""
        if self.form == "discrete":
            return spaces.MultiDiscrete([len(self.grid), N_MOVES] * self.n_pd)
        return spaces.Box(-1.0, 1.0, shape=(2 * self.n_pd,), dtype=np.float32)

    def _cluster(self, routing_value: float, move: Move) -> ClusterDecision:
        if self.routing == "margin":
            return ClusterDecision(margin_s=routing_value, move=move)
        return ClusterDecision(threshold_tokens=routing_value, move=move)

    def decode(self, action: NDArray[Any] | Sequence[Any]) -> Decision:
        """Decision of an action array of shape (2 * n_pd,); ValueError names a wrong shape or range."""
        array = np.asarray(action)
        if array.shape != (2 * self.n_pd,):
            raise ValueError(f"action must have shape ({2 * self.n_pd},), found {array.shape}")
        decode = self._decode_discrete if self.form == "discrete" else self._decode_continuous
        parts = array.tolist()
        return Decision(tuple(decode(i, parts[2 * i], parts[2 * i + 1]) for i in range(self.n_pd)))

    @cached_property
    def _discrete(self) -> dict[tuple[float, float], ClusterDecision]:
        """Every decision of one cluster by its pair of action values."""
        return {
            (k, int(move)): self._cluster(value, move) for k, value in enumerate(self.grid) for move in Move
        }

    def _decode_discrete(self, i: int, first: float, second: float) -> ClusterDecision:
        decision = self._discrete.get((first, second))
        if decision is None:
            raise ValueError(
                f"action part {i} is ({first}, {second}); allowed whole numbers: "
                f"0..{len(self.grid) - 1}, 0..{N_MOVES - 1}"
            )
        return decision

    def _decode_continuous(self, i: int, first: float, second: float) -> ClusterDecision:
        if not (math.isfinite(first) and math.isfinite(second)):
            raise ValueError(f"action part {i} is not finite: ({first}, {second})")
        x = min(max(first, -1.0), 1.0)
        y = min(max(second, -1.0), 1.0)
        value = _margin_of_unit(x) if self.routing == "margin" else _threshold_of_unit(x)
        return self._cluster(value, Move(min(int((y + 1.0) * 1.5), 2)))

    def neutral(self) -> NDArray[Any]:
        """The action "no change": the neutral margin or the paper's threshold, and no move."""
        if self.form == "discrete":
            target = self.neutral_margin_s if self.routing == "margin" else float(PAPER_THRESHOLD_TOKENS)
            return np.array([self.grid.index(target), int(Move.NONE)] * self.n_pd, dtype=np.int64)
        x = 0.0 if self.routing == "margin" else _unit_of_threshold(float(PAPER_THRESHOLD_TOKENS))
        return np.array([x, 0.0] * self.n_pd, dtype=np.float32)

    def masks(self, moves: Sequence[Sequence[bool]]) -> NDArray[np.bool_]:
        """Flat mask of the discrete form (sb3-contrib order), from `legal_moves` of each PD cluster."""
        parts: list[bool] = []
        for legal in moves:
            parts.extend([True] * len(self.grid))
            parts.extend(legal)
        return np.array(parts, dtype=np.bool_)


_LOG_SPAN = math.log(THRESHOLD_MAX_TOKENS / THRESHOLD_MIN_TOKENS)
_MARGIN_SCALE_S = 1.0


def _threshold_of_unit(x: float) -> float:
    return THRESHOLD_MIN_TOKENS * math.exp((x + 1.0) / 2.0 * _LOG_SPAN)


def _unit_of_threshold(tokens: float) -> float:
    return 2.0 * math.log(tokens / THRESHOLD_MIN_TOKENS) / _LOG_SPAN - 1.0


def _margin_of_unit(x: float) -> float:
    if abs(x) >= 1.0:
        return math.copysign(math.inf, x)
    return math.copysign(_MARGIN_SCALE_S * math.expm1(abs(x) * math.log1p(MARGIN_MAX_S / _MARGIN_SCALE_S)), x)
