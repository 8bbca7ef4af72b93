"""Orders of the control loop: which worker moves, and what is refused.

An order names a PD cluster and a `Move`; the steps of it are `mover.Mover`'s, as for an operator's order through the
admin port.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from prfaas_env.decision import Move
from prfaas_serving.config import RoleName
from prfaas_serving.fleet import Fleet, Worker
from prfaas_serving.requests import ClientError

#: (role that a worker leaves, role that it takes) of each move.
ROLES: dict[Move, tuple[RoleName, RoleName]] = {
    Move.PREFILL_TO_DECODE: ("prefill", "decode"),
    Move.DECODE_TO_PREFILL: ("decode", "prefill"),
}


class MoveRefused(Exception):
    """A move that was not carried out; everything is as before."""


class MoveFailed(MoveRefused):
    """It was begun and could not be ended; the worker serves in its old role, or is out."""


ChangeRole = Callable[..., Awaitable[dict[str, Any]]]


class MoveOrders:
    """Takes orders for moves of the PD cluster.

    From prefill to decode goes an idle worker, else the one that will be idle first; from decode to prefill the one
    with the fewest requests; in both cases the first of equals. This is the simulator's choice.

    Args:
        fleet: the workers.
        change_role: `Mover.change_role`.
        flip_back_s: a move that undoes the last one is refused for so long after it.
        switch_s: time that a worker rests after its switch.
    """

    def __init__(
        self, fleet: Fleet, change_role: ChangeRole, flip_back_s: float = 0.0, switch_s: float = 0.0
    ) -> None:
        self._fleet = fleet
        self._change_role = change_role
        self._flip_back_s = flip_back_s
        self._switch_s = switch_s

    def refusal(self, cluster: str, move: Move) -> str | None:
        """Why a move would be refused now, None if it would not."""
        if move is Move.NONE:
            return "no move"
        if cluster != self._fleet.pd:
            return f"cluster {cluster!r} is not served by this router"
        changes = self._fleet.changes
        if changes.under_way:
            return f"worker {next(iter(changes.under_way))!r} is changing its role already"
        last = changes.last_done
        if last is not None and last.done_s is not None:
            left_s = last.done_s + self._flip_back_s - time.monotonic()
            if left_s > 0 and (last.to_role, last.from_role) == ROLES[move]:
                return f"it would undo the last move; refused for {left_s:.0f} s more"
        return None

    def choose(self, move: Move) -> Worker | None:
        """The worker that would change its role; None if nobody can be spared."""
        now_s = time.monotonic()
        fleet = self._fleet
        leaving = fleet.local_prefill if move is Move.PREFILL_TO_DECODE else fleet.decode
        usable = [w for w in leaving.usable(now_s) if w.role == ROLES[move][0]]
        if len(leaving.usable(now_s)) < 2 or not usable:
            return None
        if move is Move.PREFILL_TO_DECODE:
            return min(usable, key=lambda w: (w.in_flight > 0, w.work_s(now_s)))
        return min(usable, key=lambda w: w.in_flight)

    async def move(self, cluster: str, move: Move, deadline_s: float, by: str = "policy") -> str:
        """Carry out a move and give the name of the worker that took the other role.

        Args:
            cluster: the PD cluster.
            move: not `NONE`.
            deadline_s: longest time for the worker's requests to end, real seconds.
            by: who ordered it: `policy` or `rule`.

        Raises:
            MoveRefused: one is under way, it would undo a recent one, or nobody can be spared.
            MoveFailed: it was begun and given up.
        """
        reason = self.refusal(cluster, move)
        if reason is not None:
            raise MoveRefused(reason)
        worker = self.choose(move)
        if worker is None:
            raise MoveRefused(f"no {ROLES[move][0]} worker can be spared")
        try:
            await self._change_role(worker, ROLES[move][1], deadline_s, by, self._switch_s)
        except ClientError as error:
            kind = MoveRefused if error.code == "role_refused" else MoveFailed
            raise kind(error.message) from None
        return worker.name
