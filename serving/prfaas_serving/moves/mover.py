"""Carries a move out: drain, switch, verify, relabel, one at a time, written down before each step.

A step that fails, or takes longer than it may, is undone: the worker is asked to take its old role, checked in it, and
gets traffic again. Where that fails too it is taken out with an alarm, and tried again from time to time: what it says
it is then, and a generation, decide where it serves. A router that starts and finds a move unfinished asks the worker
what it is, and finishes or undoes the move.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from prfaas_env.base import PrfaasError, one_line
from prfaas_serving.config import Moves, RoleName
from prfaas_serving.fleet import Fleet, RoleChange, Worker
from prfaas_serving.moves.base import Actuator, StepFailed, patiently, within
from prfaas_serving.moves.state import OpenMove, Step
from prfaas_serving.requests import ClientError

log = logging.getLogger("prfaas_serving.moves")

#: Longest pause between two tries to switch an engine that is still busy.
_BUSY_PAUSE_S = 2.0


class Mover:
    """Changes roles of workers of the PD cluster, whoever orders it.

    Args:
        fleet: the workers; its `state` is written.
        actuator: what carries the steps out.
        settings: deadlines.
    """

    def __init__(self, fleet: Fleet, actuator: Actuator, settings: Moves) -> None:
        self._fleet = fleet
        self._state = fleet.state
        self.actuator = actuator
        self._s = settings
        self.alarms: dict[str, str] = {name: out.reason for name, out in self._state.out.items()}
        """Workers that are out, and why; `state_file` when it cannot be written."""
        self.closing = False
        """The router ends."""
        self._task: asyncio.Task[None] | None = None
        self._undoing: set[asyncio.Task[None]] = set()
        last = self._state.last
        if last is not None:
            done_s = time.monotonic() - max(time.time() - last.done_unix_s, 0.0)
            fleet.changes.before = RoleChange(
                last.worker, fleet.pd, last.from_role, last.to_role, "", done_s, done_s, "done"
            )
        found = self._state.move
        self._unfinished: tuple[OpenMove, RoleChange] | None = None
        if found is not None:
            # under way from the very start, so that nothing else is ordered before it is settled
            change = RoleChange(
                found.worker, found.cluster, found.from_role, found.to_role, found.by, time.monotonic()
            )
            self._unfinished = found, fleet.changes.enter(change)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Settle what an earlier run left, then look after workers that are out."""
        self._task = asyncio.create_task(self._look_after())

    async def close(self) -> None:
        """Stop. What is unfinished stays written down."""
        self.closing = True
        tasks = {t for t in (self._task, *self._undoing) if t is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.actuator.close()

    async def _look_after(self) -> None:
        await self.recover()
        while True:
            await asyncio.sleep(self._s.retry_s)
            for name in list(self._state.out):
                try:
                    await self.try_again(name)
                except Exception:  # one worker's trouble must not end the care for the others
                    log.exception("worker %s is out", name)

    # ------------------------------------------------------------------ a move

    async def change_role(
        self, worker: Worker, role: RoleName, drain_s: float, by: str = "operator", switch_s: float = 0.0
    ) -> dict[str, Any]:
        """Drain a worker, have it switch, verify it in its new role, and send it what that role gets.

        One change at a time in the PD cluster; the last usable worker of a role stays.

        Args:
            worker: in the PD cluster.
            role: new role.
            drain_s: longest time for its requests to end.
            by: who ordered it.
            switch_s: time that it rests after the switch before it is verified.

        Returns:
            The worker, as the admin port shows it.

        Raises:
            ClientError: refused, or a step failed: then the worker has its old role, or is out.
        """
        self._refuse(worker, role)
        if worker.role == role and "out" not in worker.holds:
            return worker.as_json(time.monotonic())
        if "out" not in worker.holds:
            try:
                self._keep_one(worker)
            except StepFailed as failure:
                raise ClientError(409, str(failure), failure.code) from None
        move = OpenMove(
            worker=worker.name,
            url=worker.spec.url,
            cluster=worker.cluster,
            from_role=worker.role,
            to_role=role,
            by=by,
            kind=self.actuator.kind,
            ordered_unix_s=time.time(),
        )
        change = self._fleet.changes.begin(worker, role, by)
        worker.holds.add("move")
        outcome = "cancelled"
        try:
            await self._carry_out(move, worker, drain_s, switch_s)
            outcome = "done"
        except StepFailed as failure:
            outcome = failure.code
            became = await self._undo(move, failure)
            status = 502 if failure.code == "not_switched" or not failure.safe else 409
            raise ClientError(status, f"{failure}; {became}", failure.code) from None
        except asyncio.CancelledError:
            self._cancelled(change)
            raise
        except Exception as error:
            outcome = "not_verified"
            await self._undo(move, StepFailed(outcome, one_line(error)))
            raise
        finally:
            if outcome != "cancelled":
                self._ended(change, outcome)
        return worker.as_json(time.monotonic())

    def _refuse(self, worker: Worker, role: RoleName) -> None:
        under_way = self._fleet.changes.under_way
        reason = None
        if worker.cluster != self._fleet.pd:
            reason = "workers of a PrfaaS cluster only prefill"
        elif under_way:
            reason = f"worker {next(iter(under_way))!r} is changing its role; one at a time"
        else:
            reason = self.actuator.refusal(worker, role)
        if reason is not None:
            raise ClientError(409, reason, "role_refused")

    async def _carry_out(self, move: OpenMove, worker: Worker, drain_s: float, switch_s: float) -> None:
        """All steps; the step that was reached is `self._state.move.step`."""
        out = "out" in worker.holds
        self._note(move, "drain")

        def keep() -> None:
            if not out:
                self._keep_one(worker)

        await within(
            drain_s,
            self.actuator.drain(worker, keep),
            "not_drained",
            lambda: f"worker {worker.name!r} still has {worker.in_flight} requests",
        )
        memo = await within(
            self._s.switch_s, self.actuator.prepare(move), "not_switched", lambda: "no end of the preparation"
        )
        move = move.model_copy(update={"memo": memo})
        self._note(move, "switch")
        await self._switch(move, move.to_role)
        if switch_s > 0.0:
            await asyncio.sleep(switch_s)
        self._note(move, "verify", must=False)
        await self._verify(move, move.to_role)
        keep()
        self._finish(move)

    def _keep_one(self, worker: Worker) -> None:
        """Raise if nobody else could serve what this worker serves."""
        now_s = time.monotonic()
        if not any(w is not worker and w.usable(now_s) for w in self._fleet.home(worker).workers):
            raise StepFailed("last_of_role", f"{worker.name!r} is the last usable {worker.role} worker")

    async def _switch(self, move: OpenMove, role: RoleName) -> None:
        """Have it switch; it may need a moment to see that its last request is over."""

        async def until_idle() -> None:
            pause_s = 0.05
            while True:
                try:
                    return await self.actuator.switch(move, role)
                except StepFailed as failure:
                    if not failure.busy:
                        raise
                    last.append(failure)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _BUSY_PAUSE_S)

        last: list[StepFailed] = []
        await within(
            self._s.switch_s,
            until_idle(),
            "not_switched",
            lambda: str(last[-1]) if last else f"worker {move.worker!r} has not answered",
        )

    async def _verify(self, move: OpenMove, role: RoleName) -> None:
        await within(
            self._s.verify_s,
            self.actuator.verify(move, role),
            "not_verified",
            lambda: f"worker {move.worker!r} is not seen to serve as {role} (it says {self.actuator.seen})",
        )

    def _finish(self, move: OpenMove) -> None:
        """Written first, then in force: after a kill in between the file is right."""
        worker = self._fleet.workers.get(move.worker)
        gone = self.actuator.replaces
        spec = None if gone or worker is None else worker.spec
        self._write(lambda: self._state.done(move, spec, self._fleet.workers.keys()))
        self.alarms.pop(move.worker, None)
        if worker is not None:
            worker.holds.discard("out")
        self.actuator.relabel(move, move.to_role)
        log.info("worker %s: %s -> %s (%s)", move.worker, move.from_role, move.to_role, move.by)

    def _cancelled(self, change: RoleChange) -> None:
        """Whoever ordered the move has gone. One that the engine was asked for is undone, or, when the router ends,
        left for its next start."""
        move = self._state.move
        if move is None or move.step == "drain":
            self._write(self._state.drop)
            self._ended(change, "cancelled")
        elif self.closing:
            self._fleet.changes.end(change, "cancelled")  # nothing is sent to its worker any more
        else:
            task = asyncio.create_task(self._undo_cancelled(move, change))
            self._undoing.add(task)
            task.add_done_callback(self._undoing.discard)

    async def _undo_cancelled(self, move: OpenMove, change: RoleChange) -> None:
        try:
            await self._undo(move, StepFailed("cancelled", "the order was withdrawn"))
        finally:
            self._ended(change, "cancelled")

    def _ended(self, change: RoleChange, outcome: str) -> None:
        worker = self._fleet.workers.get(change.worker)
        if worker is not None:
            worker.holds.discard("move")
        self._fleet.changes.end(change, outcome)
        if worker is not None:
            self._fleet.freed(worker)

    # ------------------------------------------------------------------ back

    async def _undo(self, move: OpenMove, failure: StepFailed) -> str:
        """Bring the worker back; says what became of it."""
        reached = self._state.move
        if reached is not None:
            move = reached
        if move.step == "drain":
            self._write(self._state.drop)
            return "it serves in its old role"
        if not failure.safe:
            return self._take_out(move, str(failure))
        self._note(move, "rollback", must=False)
        try:
            await self._back(move)
        except StepFailed as second:
            return self._take_out(move, f"{failure}; and back: {second}")
        worker = self._fleet.workers.get(move.worker)
        if worker is not None and "out" in worker.holds:
            self._serves(worker, move.from_role)
        self._write(self._state.drop)
        return "it has its old role again"

    async def _back(self, move: OpenMove) -> None:
        """Have it take its old role and show that it serves in it."""
        if await self._now(move) != move.from_role:
            await self._switch(move, move.from_role)
        await self._verify(move, move.from_role)

    async def _now(self, move: OpenMove, within_s: float | None = None) -> RoleName | None:
        """What the worker says it is."""
        return await within(
            self._s.verify_s if within_s is None else within_s,
            patiently(lambda: self.actuator.role_of(move)),
            "not_verified",
            lambda: f"worker {move.worker!r} has not said what it is",
        )

    def _take_out(self, move: OpenMove, reason: str) -> str:
        worker = self._fleet.workers.get(move.worker)
        self._write(lambda: self._state.take_out(move.worker, move.url, reason))
        if worker is not None:
            worker.holds.add("out")
        self.alarms[move.worker] = reason
        log.error("worker %s is taken out: %s", move.worker, reason)
        return "it was taken out"

    # ------------------------------------------------------------------ what is written down

    def _note(self, move: OpenMove, step: Step, *, must: bool = True) -> None:
        """Write the step down before it begins.

        Raises:
            StepFailed: it cannot be written, and `must`: then nobody is asked to change.
        """
        noted = move.model_copy(update={"step": step})
        before = self._state.move
        if not self._write(lambda: self._state.open(noted)) and must:
            # what was not begun must not look begun
            with contextlib.suppress(PrfaasError):
                self._state.open(before) if before is not None else self._state.drop()
            raise StepFailed("not_written", self.alarms["state_file"])

    def _write(self, change: Any) -> bool:
        """Change the state; False, with an alarm, if the file does not have it."""
        try:
            change()
        except PrfaasError as error:
            if "state_file" not in self.alarms:
                log.error("%s", error)
            self.alarms["state_file"] = str(error)
            return False
        self.alarms.pop("state_file", None)
        return True

    # ------------------------------------------------------------------ after a restart

    async def recover(self) -> None:
        """Settle the move that an earlier run left unfinished."""
        if self._unfinished is None:
            return
        (move, change), self._unfinished = self._unfinished, None
        log.warning(
            "worker %s was on its way from %s to %s (%s) when the router ended",
            *(move.worker, move.from_role, move.to_role, move.step),
        )
        try:
            outcome = await self._settle(move)
        except StepFailed as failure:
            outcome = failure.code
            self._take_out(move, f"unfinished before a restart: {failure}")
        except Exception as error:
            outcome = "not_verified"
            log.exception("worker %s", move.worker)
            self._take_out(move, f"unfinished before a restart: {one_line(error)}")
        self._ended(change, outcome)

    async def _settle(self, move: OpenMove) -> str:
        """Finish an unfinished move or undo it; gives the outcome.

        Raises:
            StepFailed: neither can be done.
        """
        if move.step == "drain":
            self._write(self._state.drop)
            return "rolled_back"
        if move.kind != self.actuator.kind:
            raise StepFailed(
                "not_verified", f"begun with actuator {move.kind}, which is {self.actuator.kind} now"
            )
        await self._until_up(move)
        if move.step != "rollback" and self.actuator.asks and await self._now(move) == move.to_role:
            try:
                await self._verify(move, move.to_role)
                self._keep_others(move)
                self._finish(move)
                return "done"
            except StepFailed as failure:
                log.warning("%s; back", failure)
                if not failure.safe:
                    raise
        await self._back(move)
        self._write(self._state.drop)
        return "rolled_back"

    def _keep_others(self, move: OpenMove) -> None:
        worker = self._fleet.workers.get(move.worker)
        if worker is not None and "out" not in worker.holds and worker.role == move.from_role:
            self._keep_one(worker)

    async def _until_up(self, move: OpenMove) -> None:
        """Health checks, and sources of workers, need a moment after a start."""
        end_s = time.monotonic() + self._s.verify_s
        while time.monotonic() < end_s:
            worker = self._fleet.workers.get(move.worker)
            there = self.actuator.replaces or (worker is not None and worker.state == "up")
            now_s = time.monotonic()
            others = [
                w for w in self._fleet if w.cluster == self._fleet.pd and w is not worker and w.usable(now_s)
            ]
            if there and others:
                return
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------------ workers that are out, or come back

    async def try_again(self, name: str) -> bool:
        """Look at a worker that is out; True if it serves again, in the role that it says it has."""
        out, worker = self._state.out.get(name), self._fleet.workers.get(name)
        if out is None or name in self._fleet.changes.under_way:
            return False
        if worker is None or worker.spec.url != out.url:  # it is gone
            self._write(lambda: self._state.forget(name))
            self.alarms.pop(name, None)
            return False
        if worker.state != "up":
            return False
        asked = _as_it_is(worker, self.actuator.kind)
        try:
            role = await self._now(asked) or worker.role
            await self._verify(asked, role)
        except StepFailed as failure:
            log.info("worker %s stays out: %s", name, failure)
            return False
        if name in self._fleet.changes.under_way or worker.removed:
            return False
        self._serves(worker, role)
        log.warning("worker %s serves again, as %s", name, role)
        return True

    async def comes_up(self, worker: Worker) -> None:
        """A worker's health checks pass (again): believe what it says it is, for its engine may have started anew."""
        actuator = self.actuator
        if not actuator.asks or actuator.replaces:
            return
        if worker.cluster != self._fleet.pd or worker.role == "both":
            return
        if worker.holds & {"move", "out"}:
            return  # whoever holds it asks
        try:
            role = await self._now(
                _as_it_is(worker, self.actuator.kind), self._fleet.config.health.probe_timeout_s
            )
        except StepFailed as failure:
            log.info("worker %s: %s", worker.name, failure)
            return
        if role is not None and role != worker.role and not worker.holds & {"move", "out"}:
            log.warning("worker %s says that it is %s, not %s: so it serves", worker.name, role, worker.role)
            self._serves(worker, role)

    def _serves(self, worker: Worker, role: RoleName) -> None:
        """A worker is well in a role."""
        self._write(lambda: self._state.serves(worker.spec, role))
        worker.holds.discard("out")
        self.alarms.pop(worker.name, None)
        if worker.role != role:
            self._fleet.relabel(worker, role)
        self._fleet.freed(worker)

    def forget(self, worker: Worker) -> None:
        """A worker was let go by an operator."""
        self._write(lambda: self._state.forget(worker.name))
        self.alarms.pop(worker.name, None)

    def as_json(self) -> dict[str, Any]:
        """For the admin port."""
        move = self._state.move
        return {
            "actuator": self.actuator.kind,
            "state_file": None if self._state.path is None else str(self._state.path),
            "under_way": None if move is None else move.model_dump(exclude={"url", "memo"}),
            "alarms": dict(self.alarms),
        }


def _as_it_is(worker: Worker, kind: str) -> OpenMove:
    """A worker as actuators are asked about it when no move is under way."""
    return OpenMove(
        worker=worker.name,
        url=worker.spec.url,
        cluster=worker.cluster,
        from_role=worker.role,
        to_role=worker.role,
        by="",
        kind=kind,
    )
