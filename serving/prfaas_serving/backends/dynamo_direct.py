"""Dynamo in direct mode: one request to its frontend; two headers name the prefill and the decode instance."""

from __future__ import annotations

from prfaas_serving.backends.base import Flow, HandOver, Leg, Plain
from prfaas_serving.fleet import Worker
from prfaas_serving.requests import Job

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
