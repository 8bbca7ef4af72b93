"""llm-d: one request to the sidecar in front of a decode worker; a header names the prefill worker."""

from __future__ import annotations

from prfaas_serving.backends.base import Flow, HandOver, Leg, Plain
from prfaas_serving.fleet import Worker
from prfaas_serving.requests import Job

HEADER = "x-prefiller-host-port"


class LlmdSidecar(Plain):
    """Without the header the decode worker prefills by itself."""

    name = "llmd_sidecar"
    flow = Flow.SINGLE

    def decode_leg(self, job: Job, prefill: Worker, decode: Worker, handover: HandOver) -> Leg:
        """The client's body; the sidecar runs the prefill leg."""
        return Leg(job.path, job.plain_body(), {HEADER: prefill.spec.host_port})
