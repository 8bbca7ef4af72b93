"""Dynamo: one request to its frontend; two headers name the prefill and the decode instance.

The frontend takes them in its modes `direct` and `kv`. Only the latter looks at its admission thresholds
(`POST /busy_threshold`); in mode `direct` they can be set and do nothing. Read off Dynamo 1.6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from prfaas_serving.backends.base import FetchJson, Flow, HandOver, Leg, Plain
from prfaas_serving.backends.dynamo_instances import Instance, read_instances
from prfaas_serving.fleet import Worker
from prfaas_serving.requests import Job

if TYPE_CHECKING:
    from prfaas_serving.upstream import FailureKind

PREFILL_HEADER = "x-dynamo-prefill-instance-id"
DECODE_HEADER = "x-dynamo-worker-instance-id"


class DynamoDirect(Plain):
    """The frontend refuses a request that does not name both, so there is no way without a prefill instance."""

    name = "dynamo_direct"
    flow = Flow.SINGLE
    decode_alone = False

    def decode_leg(self, job: Job, prefill: Worker, decode: Worker, handover: HandOver) -> Leg:
        """The client's body with both instances."""
        headers = {
            PREFILL_HEADER: str(prefill.spec.instance_id),
            DECODE_HEADER: str(decode.spec.instance_id),
        }
        return Leg(job.path, job.plain_body(), headers)

    def alone_leg(self, job: Job, decode: Worker) -> Leg:
        """Only for instances of both roles."""
        return Leg(job.path, job.plain_body(), {DECODE_HEADER: str(decode.spec.instance_id)})

    def refusal_kind(self, status: int, body: bytes) -> FailureKind | None:
        """A full instance is 529, or what the frontend was told to say instead (`DYN_HTTP_OVERLOAD_STATUS_CODE`);
        any other 503 comes of an instance that is dead and still listed."""
        return "status" if status == 503 and "overload" not in _message(body) else None

    async def gone(self, status: int, workers: Sequence[Worker], fetch: FetchJson) -> Worker | None:
        """An instance that is not listed any more is answered with 400, in the words of a client's mistake."""
        if status not in (400, 404):
            return None
        listed: dict[str, list[Instance] | None] = {}  # workers behind one frontend share its list
        for worker in workers:
            page = str(worker.url("/health"))
            if page not in listed:
                listed[page] = read_instances(await fetch(worker, page))
            instances = listed[page]
            if instances is not None and worker.spec.instance_id not in {i.instance_id for i in instances}:
                return worker
        return None


def _message(body: bytes) -> str:
    """What an error says, in lower case: `{"message": ...}`, in a stream within `{"error": ...}`."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    inner = found.get("error", found) if isinstance(found, dict) else None
    return str(inner.get("message", "")).lower() if isinstance(inner, dict) else ""
