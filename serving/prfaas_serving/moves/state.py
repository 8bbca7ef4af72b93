"""What a router must still know about node moves after a restart, in one small file that is written whole.

The file says which roles differ from the configuration, which workers a failed move took out, the last move that was
carried out, and the move under way with the step it has come to. A step is written down before it begins, so that a
router that was killed at any point finds the move when it starts again.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson
from pydantic import Field

from prfaas_env.base import Frozen, PrfaasError, write_whole
from prfaas_serving.config import RoleName, WorkerSpec, validate

if TYPE_CHECKING:
    from prfaas_serving.fleet import Hold

Step = Literal["drain", "switch", "verify", "rollback"]

#: Entries of workers that are not there any more are kept so long.
_KEPT_S = 7 * 86_400.0


class OpenMove(Frozen):
    """A move under way."""

    worker: str
    url: str
    cluster: str
    from_role: RoleName
    to_role: RoleName
    by: str
    kind: str
    """Of the actuator."""
    step: Step = "drain"
    ordered_unix_s: float = 0.0
    memo: dict[str, Any] = Field(default_factory=dict)
    """What the actuator must still know after a restart."""


class MovedRole(Frozen):
    """A worker whose role is not the configured one."""

    url: str
    configured: RoleName
    role: RoleName
    unix_s: float


class TakenOut(Frozen):
    """A worker that a failed move left in no known state."""

    url: str
    reason: str
    unix_s: float


class LastMove(Frozen):
    """The last move that was carried out."""

    worker: str
    from_role: RoleName
    to_role: RoleName
    done_unix_s: float


class _File(Frozen):
    format_version: Literal[1] = 1
    pd: str
    roles: dict[str, MovedRole] = Field(default_factory=dict)
    out: dict[str, TakenOut] = Field(default_factory=dict)
    last: LastMove | None = None
    move: OpenMove | None = None


class MoveState:
    """The state, in memory and (with a path) on disk.

    Args:
        path: the file; None = nothing survives.
        pd: the PD cluster served.

    Raises:
        PrfaasError: the file is not one, or another cluster's.
    """

    def __init__(self, path: str | None, pd: str) -> None:
        self.path = None if path is None else Path(path)
        self._now = self._read(pd)

    def _read(self, pd: str) -> _File:
        if self.path is None or not self.path.exists():
            return _File(pd=pd)
        advice = "repair it, or remove it to begin with the configured roles"
        try:
            raw = orjson.loads(self.path.read_bytes())
        except OSError as error:
            raise PrfaasError(f"{self.path}: cannot be read: {error.strerror}") from None
        except orjson.JSONDecodeError as error:
            raise PrfaasError(f"{self.path}: not JSON ({error}); {advice}") from None
        found: _File = validate(_File, raw, str(self.path))
        if found.pd != pd:
            raise PrfaasError(
                f"{self.path}: pd: is of PD cluster {found.pd!r}, this router serves {pd!r}; "
                "give every router a moves.state_file of its own"
            )
        return found

    def _write(self, **changes: Any) -> None:
        """Change and write whole.

        Raises:
            PrfaasError: it cannot be written; memory has the change all the same.
        """
        self._now = self._now.model_copy(update=changes)
        if self.path is not None:
            write_whole(self.path, self._now.model_dump_json(indent=1) + "\n")

    # ------------------------------------------------------------------ reading

    @property
    def move(self) -> OpenMove | None:
        """The move under way."""
        return self._now.move

    @property
    def last(self) -> LastMove | None:
        """The last move that was carried out."""
        return self._now.last

    @property
    def out(self) -> dict[str, TakenOut]:
        """Workers taken out."""
        return dict(self._now.out)

    def role_of(self, spec: WorkerSpec) -> RoleName:
        """The role that a worker begins with: as moved, unless its entry has changed since."""
        moved = self._now.roles.get(spec.name)
        if moved is None or (moved.url, moved.configured) != (spec.url, spec.role):
            return spec.role
        return moved.role

    def holds(self, spec: WorkerSpec) -> set[Hold]:
        """Why nothing may be sent yet to a worker that comes."""
        found: set[Hold] = set()
        out, move = self._now.out.get(spec.name), self._now.move
        if out is not None and out.url == spec.url:
            found.add("out")
        if move is not None and (move.worker, move.url) == (spec.name, spec.url):
            found.add("move")
        return found

    # ------------------------------------------------------------------ writing

    def open(self, move: OpenMove) -> None:
        """A move is under way, and has come to its step."""
        self._write(move=move)

    def drop(self) -> None:
        """The move under way is over; the worker has its old role."""
        self._write(move=None)

    def done(self, move: OpenMove, spec: WorkerSpec | None, present: Collection[str]) -> None:
        """The move under way was carried out.

        Args:
            move: that one.
            spec: of its worker; None = it is gone, and another one stands for it.
            present: names of all workers there are.
        """
        now_s = time.time()
        last = LastMove(worker=move.worker, from_role=move.from_role, to_role=move.to_role, done_unix_s=now_s)
        out = {name: entry for name, entry in self._now.out.items() if name != move.worker}
        roles = {
            name: entry
            for name, entry in self._now.roles.items()
            if name in present or now_s - entry.unix_s < _KEPT_S
        }
        self._write(move=None, last=last, out=out, roles=self._with(roles, move.worker, move.to_role, spec))

    def serves(self, spec: WorkerSpec, role: RoleName) -> None:
        """A worker is known to be well in a role."""
        out = {name: entry for name, entry in self._now.out.items() if name != spec.name}
        self._write(out=out, roles=self._with(self._now.roles, spec.name, role, spec))

    def take_out(self, name: str, url: str, reason: str) -> None:
        """A worker is in no known state; a move of it is over."""
        out = {**self._now.out, name: TakenOut(url=url, reason=reason, unix_s=time.time())}
        self._write(out=out, move=None)

    def forget(self, name: str) -> None:
        """A worker was let go for good."""
        if name in self._now.roles or name in self._now.out:
            roles = {n: entry for n, entry in self._now.roles.items() if n != name}
            out = {n: entry for n, entry in self._now.out.items() if n != name}
            self._write(roles=roles, out=out)

    @staticmethod
    def _with(
        roles: dict[str, MovedRole], name: str, role: RoleName, spec: WorkerSpec | None
    ) -> dict[str, MovedRole]:
        kept = {n: entry for n, entry in roles.items() if n != name}
        if spec is not None and spec.role != role:
            kept[name] = MovedRole(url=spec.url, configured=spec.role, role=role, unix_s=time.time())
        return kept
