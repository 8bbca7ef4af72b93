"""Workers with a call for it: POST PATH {"role": "prefill" | "decode" | "both"}, GET PATH gives {"role": ...}."""

from __future__ import annotations

from prfaas_serving.config import HttpActuator, RoleName
from prfaas_serving.moves.base import Actuator, Site, StepFailed, is_role
from prfaas_serving.moves.state import OpenMove

#: Answers of a worker that is not idle yet.
_BUSY = frozenset({409, 425, 429, 503})


class Http(Actuator):
    """Tells the worker its role.

    Args:
        site: the router's parts.
        settings: path of the call.
    """

    kind = "http"

    def __init__(self, site: Site, settings: HttpActuator) -> None:
        super().__init__(site)
        self._path = settings.path

    async def switch(self, move: OpenMove, role: RoleName) -> None:
        """POST the role; a worker that is still busy is asked again."""
        status, answer = await self._ask(
            "not_switched", move.url, move.worker, "POST", self._path, {"role": role}
        )
        if not 200 <= status < 300:
            raise StepFailed(
                "not_switched",
                f"worker {move.worker!r} refused role {role} with status {status}: {_reason(answer)}",
                busy=status in _BUSY,
            )

    async def role_of(self, move: OpenMove) -> RoleName | None:
        """GET the role."""
        status, answer = await self._ask("not_verified", move.url, move.worker, "GET", self._path)
        found = answer.get("role") if isinstance(answer, dict) else None
        if status != 200 or not is_role(found):
            raise StepFailed(
                "not_verified",
                f"worker {move.worker!r} does not tell its role: status {status}, role {found!r}; "
                "allowed: prefill, decode, both",
            )
        return found


def _reason(answer: object) -> str:
    """What an error answer says, in the forms that are in use."""
    if not isinstance(answer, dict):
        return "no reason given"
    error = answer.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    return str(inner or answer.get("message") or "no reason given")[:300]
