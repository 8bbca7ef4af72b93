"""vLLM with the MooncakeConnector: both legs at once, joined by a transfer id; the prefill worker pushes."""

from __future__ import annotations

import uuid
from typing import Any
from weakref import WeakKeyDictionary

from prfaas_serving.backends.base import FetchJson, Flow, HandOver, Leg, Plain
from prfaas_serving.fleet import Worker
from prfaas_serving.requests import Job, prefill_body, with_fields


class NoEngineId(Exception):
    """The bootstrap server of a prefill worker did not say its engine id."""


class VllmMooncake(Plain):
    """The engine id of every prefill worker is asked once at its bootstrap server (`/query`), by data-parallel rank."""

    name = "vllm_mooncake"
    flow = Flow.CONCURRENT
    resend = False

    def __init__(self) -> None:
        self._engine_ids: WeakKeyDictionary[Worker, dict[str, str]] = WeakKeyDictionary()

    async def open(self, job: Job, prefill: Worker, fetch: FetchJson) -> HandOver:
        """A new transfer id with the address of the prefill worker.

        Raises:
            NoEngineId: it cannot be had.
        """
        ids = self._engine_ids.get(prefill)
        if ids is None:
            ids = _engine_ids(await fetch(prefill, f"{bootstrap_address(prefill)}/query"))
            if not ids:
                raise NoEngineId(prefill.name)
            self._engine_ids[prefill] = ids
        rank = next(iter(ids))
        return {
            "transfer_id": f"xfer-{uuid.uuid4()}",
            "remote_engine_id": ids[rank],
            "remote_bootstrap_addr": bootstrap_address(prefill),
            "rank": rank,
        }

    def forget(self, prefill: Worker) -> None:
        """Ask again before the next transfer: the worker may have started anew with another id."""
        self._engine_ids.pop(prefill, None)

    def prefill_leg(self, job: Job, handover: HandOver) -> Leg:
        """One token, and push the cache to whoever comes with this transfer id."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": handover["transfer_id"],
        }
        return Leg(
            job.path,
            prefill_body(job, {"kv_transfer_params": params}),
            {"X-data-parallel-rank": handover["rank"]},
        )

    def decode_leg(self, job: Job, prefill: Worker, decode: Worker, handover: HandOver) -> Leg:
        """The client's body with where the cache comes from."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": handover["transfer_id"],
            "remote_engine_id": handover["remote_engine_id"],
            "remote_bootstrap_addr": handover["remote_bootstrap_addr"],
        }
        return Leg(job.path, with_fields(job, {"kv_transfer_params": params}))


def bootstrap_address(prefill: Worker) -> str:
    """URL of the bootstrap server of a prefill worker."""
    host = prefill.spec.bootstrap_host or prefill.spec.host
    return f"http://{f'[{host}]' if ':' in host else host}:{prefill.spec.bootstrap_port}"


def _engine_ids(answer: Any) -> dict[str, str]:
    found = {}
    for rank, entry in answer.items() if isinstance(answer, dict) else ():
        engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
        if isinstance(engine_id, str) and engine_id:
            found[str(rank)] = engine_id
    return found
