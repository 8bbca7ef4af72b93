"""SGLang: `POST /pd_role_switch`, in 0.5.23 and later, of a server started with `--enable-pd-role-switch`.

The contract (sgl-project/sglang, `srt/disaggregation/role_switch.py`; pull request 28403):

- body `{"new_role": "prefill" | "decode"}`; answer `{success, message, old_role, new_role, safe_to_restore}`, status
  400 with `success` false. The server must be idle; its prefix cache is dropped.
- A server that was started for prefill captures its decode graphs at the first switch to decode and refuses to without
  `decode_cuda_graph_memory_gb`; it takes the batch sizes from `decode_cuda_graph_bs`.
- The role it has is a success without effect, but refused after a switch that broke (`safe_to_restore` false: only a
  restart helps). So asking for the present role shows that nothing is broken.
- `GET /server_info`: `internal_states[].disaggregation_mode` is the present role; `disaggregation_mode` at the top
  stays the one of the start. `decode_cuda_graph_bs` and `decode_cuda_graph_memory_gb` stand beside it.
"""

from __future__ import annotations

from typing import Any

from prfaas_serving.config import RoleName, SglangActuator
from prfaas_serving.fleet import Worker
from prfaas_serving.moves.base import Actuator, Site, StepFailed, is_role
from prfaas_serving.moves.state import OpenMove

PATH = "/pd_role_switch"
INFO_PATH = "/server_info"


class Sglang(Actuator):
    """Has a server switch in place.

    Args:
        site: the router's parts.
        settings: what a first switch to decode is told about graphs.
    """

    kind = "sglang"

    def __init__(self, site: Site, settings: SglangActuator) -> None:
        super().__init__(site)
        self._settings = settings

    def refusal(self, worker: Worker, role: RoleName) -> str | None:
        """A server is one or the other."""
        return "an SGLang server cannot serve both roles" if role == "both" else None

    async def switch(self, move: OpenMove, role: RoleName) -> None:
        """Ask for the role."""
        await self._switch(move, role, await self._graphs(move) if role == "decode" else {})

    async def _switch(self, move: OpenMove, role: RoleName, graphs: dict[str, Any]) -> None:
        status, answer = await self._ask(
            "not_switched", move.url, move.worker, "POST", PATH, {"new_role": role, **graphs}
        )
        told = answer if isinstance(answer, dict) else {}
        if status == 200 and told.get("success") is True:
            return
        message = str(told.get("message") or "no reason given")[:300]
        soon = "not idle" in message or "in progress" in message
        raise StepFailed(
            "not_switched",
            f"worker {move.worker!r} refused role {role} with status {status}: {message}",
            # an older server does not say; asking it for its present role will tell
            safe=soon or told.get("safe_to_restore", True) is True,
            busy=soon,
        )

    async def role_of(self, move: OpenMove) -> RoleName | None:
        """The role that all of its schedulers have."""
        states = await self._states("not_verified", move.url, move.worker)
        found = {state.get("disaggregation_mode") for state in states}
        only = next(iter(found)) if len(found) == 1 else None
        if not is_role(only):
            named = ", ".join(sorted(map(str, found))) or "nothing"
            raise StepFailed(
                "not_verified",
                f"worker {move.worker!r}: internal_states of {INFO_PATH} say {named}; allowed: one role",
            )
        return only

    async def verify(self, move: OpenMove, role: RoleName) -> None:
        """By its own words, by a switch to where it is, which a broken server refuses, then by a generation."""
        if await self.role_of(move) == role:
            await self._switch(move, role, {})
        await super().verify(move, role)

    async def _states(self, code: str, url: str, name: str) -> list[dict[str, Any]]:
        status, answer = await self._ask(code, url, name, "GET", INFO_PATH)
        states = answer.get("internal_states") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(states, list):
            raise StepFailed(code, f"worker {name!r}: no internal_states in {INFO_PATH} (status {status})")
        return [state for state in states if isinstance(state, dict)]

    async def _graphs(self, move: OpenMove) -> dict[str, Any]:
        """Sizes of the decode graphs that it has to capture; nothing if it has some, or nobody can tell."""
        given = {
            "decode_cuda_graph_bs": None
            if self._settings.decode_cuda_graph_bs is None
            else list(self._settings.decode_cuda_graph_bs),
            "decode_cuda_graph_memory_gb": self._settings.decode_cuda_graph_memory_gb,
        }
        if None in given.values():
            if any(
                s.get("decode_cuda_graph_bs")
                for s in await self._states("not_switched", move.url, move.worker)
            ):
                return {}
            for peer in self._site.fleet.decode.workers:
                if peer.name == move.worker:
                    continue
                try:
                    states = await self._states("not_switched", peer.spec.url, peer.name)
                except StepFailed:
                    continue
                found = _largest(states)
                if found:
                    given = {key: found.get(key) if value is None else value for key, value in given.items()}
                    break
        return {key: value for key, value in given.items() if value is not None}


def _largest(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What a server says about its decode graphs: the sizes of one scheduler, the most memory of any."""
    sizes = next((s["decode_cuda_graph_bs"] for s in states if s.get("decode_cuda_graph_bs")), None)
    if sizes is None:
        return {}
    memory = [
        s["decode_cuda_graph_memory_gb"]
        for s in states
        if isinstance(s.get("decode_cuda_graph_memory_gb"), int | float)
    ]
    return {"decode_cuda_graph_bs": sizes, "decode_cuda_graph_memory_gb": max(memory, default=None)}
