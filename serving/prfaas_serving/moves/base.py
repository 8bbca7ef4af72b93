"""What every actuator is: the steps of a move that differ from engine to engine.

A move is drain -> switch -> verify -> relabel. The steps belong to an `Actuator`; their order, deadlines, rollback and
what is written down before each belong to `mover.Mover`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import aiohttp
import orjson
from aiohttp import ClientSession, ClientTimeout

from prfaas_serving.config import RoleName
from prfaas_serving.fleet import Fleet, Worker
from prfaas_serving.moves.state import OpenMove

#: One real generation with a worker in a role, past the pools; None if it went well, else what was wrong.
Generate = Callable[[Worker, RoleName], Awaitable[str | None]]

#: Tries of the generation that verifies a role: a single busy partner is no verdict.
_TRIES = 3


class StepFailed(Exception):
    """A step of a move failed.

    Args:
        code: which one, in one word; goes to logs and to the answer for who ordered the move.
        text: what happened.
        safe: whether the worker may be asked to go back; False = only a restart of the engine helps.
        busy: whether the same call may work in a moment.
    """

    def __init__(self, code: str, text: str, *, safe: bool = True, busy: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.safe = safe
        self.busy = busy


@dataclass(frozen=True)
class Site:
    """What an actuator works with."""

    fleet: Fleet
    session: ClientSession
    generate: Generate | None
    """None: no generation is asked for."""


class Actuator(ABC):
    """The steps of a move, for one kind of engine or orchestrator.

    A step raises `StepFailed`; the mover then has the worker go back to its old role by `switch` and `verify` again.
    Every call may be repeated: after a restart nobody knows whether the last one was carried out.
    """

    kind: str
    #: Whether the worker itself is told its role, so that it can be asked for it and must agree with the router.
    asks = True
    #: Whether a move ends with another worker than it began with.
    replaces = False

    def __init__(self, site: Site) -> None:
        self._site = site
        self.seen: RoleName | None = None
        """What the worker under verification last said it is."""

    def refusal(self, worker: Worker, role: RoleName) -> str | None:
        """Why it can never have this worker take this role; None if it can."""
        return None

    async def prepare(self, move: OpenMove) -> dict[str, Any]:
        """What must be known after a restart in mid-move, gathered before anything changes."""
        return {}

    async def drain(self, worker: Worker, keep: Callable[[], None]) -> None:
        """Wait until the worker has neither a request nor KV that is still to be fetched from it.

        `keep` is called again and again and raises when the move must be given up.
        """
        while worker.in_flight or worker.staged:
            keep()
            try:
                async with asyncio.timeout(0.5):
                    await (worker.idle.wait() if worker.in_flight else asyncio.sleep(0.01))
            except TimeoutError:
                continue
        keep()

    @abstractmethod
    async def switch(self, move: OpenMove, role: RoleName) -> None:
        """Have the worker take a role: the new one, or the old one when a move is undone."""

    @abstractmethod
    async def role_of(self, move: OpenMove) -> RoleName | None:
        """What the worker says it is; None where that means nothing.

        Raises:
            StepFailed: it cannot be asked.
        """

    async def verify(self, move: OpenMove, role: RoleName) -> None:
        """Show that the worker is what it should be: by what it says, then by one real generation."""
        self.seen = None
        while self.asks:
            self.seen = await patiently(lambda: self.role_of(move))
            if self.seen == role:
                break
            await asyncio.sleep(0.2)
        await self._generation(move, role)

    async def _generation(self, move: OpenMove, role: RoleName) -> None:
        generate, worker = self._site.generate, self._site.fleet.workers.get(move.worker)
        if generate is None:
            return
        for left in reversed(range(_TRIES)):
            wrong = "the worker is gone" if worker is None else await generate(worker, role)
            if wrong is None:
                return
            if not left or worker is None:
                raise StepFailed(
                    "not_verified", f"worker {move.worker!r} does not generate as {role}: {wrong}"
                )
            await asyncio.sleep(0.3)

    def relabel(self, move: OpenMove, role: RoleName) -> None:
        """Let the router send the worker what its role gets."""
        worker = self._site.fleet.workers.get(move.worker)
        if worker is not None and worker.role != role:
            self._site.fleet.relabel(worker, role)

    async def close(self) -> None:  # noqa: B027 - most have none
        """Close connections of its own."""

    # ------------------------------------------------------------------ asking workers

    async def _ask(
        self, code: str, move_url: str, name: str, method: str, path: str, body: Any = None
    ) -> tuple[int, Any]:
        """(status, parsed answer or None) of a call to a worker.

        Raises:
            StepFailed: no answer.
        """
        worker = self._site.fleet.workers.get(name)
        headers = {} if body is None else {"Content-Type": "application/json"}
        if worker is not None:
            headers.update(worker.auth)
        data = None if body is None else orjson.dumps(body)
        try:
            # no limit of its own: the step has one
            async with self._site.session.request(
                method, move_url + path, data=data, headers=headers, timeout=ClientTimeout(total=None)
            ) as answer:
                status, raw = answer.status, await answer.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise StepFailed(code, f"worker {name!r} cannot be reached: {type(error).__name__}") from None
        try:
            return status, orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError:
            return status, None


_Found = TypeVar("_Found")


async def patiently(ask: Callable[[], Awaitable[_Found]]) -> _Found:
    """Ask until there is an answer; who is busy is asked again. The step has a limit."""
    while True:
        try:
            return await ask()
        except StepFailed as failure:
            if not failure.busy:
                raise
        await asyncio.sleep(0.3)


def is_role(found: Any) -> TypeGuard[RoleName]:
    """Whether something a worker said is a role."""
    return found in ("prefill", "decode", "both")


async def within(seconds: float, work: Awaitable[_Found], code: str, what: Callable[[], str]) -> _Found:
    """Await a step; one that takes too long has failed. `what` says then how it stands."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        took_s = time.monotonic() - began_s
        raise StepFailed(code, f"{what()} after {took_s:.3g} s") from None
