"""Engines that serve either role per request, such as vLLM with NIXL: nothing to switch."""

from __future__ import annotations

from prfaas_serving.backends.engines import FIXED_ROLE
from prfaas_serving.config import RoleName
from prfaas_serving.fleet import Worker
from prfaas_serving.moves.base import Actuator
from prfaas_serving.moves.state import OpenMove


class Relabel(Actuator):
    """The role is the router's label alone; what verifies a move is a generation through the worker in its new role."""

    kind = "relabel"
    asks = False

    def refusal(self, worker: Worker, role: RoleName) -> str | None:
        """Some engines know one role only."""
        return f"a {worker.engine} worker keeps its role" if worker.engine in FIXED_ROLE else None

    async def switch(self, move: OpenMove, role: RoleName) -> None:
        """Nothing to call."""

    async def role_of(self, move: OpenMove) -> RoleName | None:
        """The engine has none."""
        return None
