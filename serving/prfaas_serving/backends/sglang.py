"""SGLang: the same body to both workers at once, joined by the prefill worker's bootstrap server and a room number."""

from __future__ import annotations

import secrets

from prfaas_serving.backends.base import FetchJson, Flow, HandOver, Leg, Plain
from prfaas_serving.fleet import Worker
from prfaas_serving.requests import Job, with_fields


class Sglang(Plain):
    """A prefill server waits for its decode server, so neither leg may be awaited before the other is sent.

    A room number used twice crashes both schedulers: every attempt has its own, and a leg is never sent again with
    the same one. A decode server cannot prefill, so there is no way without a prefill worker.
    """

    name = "sglang"
    flow = Flow.CONCURRENT
    resend = False
    decode_alone = False

    async def open(self, job: Job, prefill: Worker, fetch: FetchJson) -> HandOver:
        """A new room at the prefill worker."""
        return {
            "bootstrap_host": prefill.spec.bootstrap_host or prefill.spec.host,
            "bootstrap_port": prefill.spec.bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }

    def prefill_leg(self, job: Job, handover: HandOver) -> Leg:
        """The client's body with the room."""
        return Leg(job.path, with_fields(job, handover))

    def decode_leg(self, job: Job, prefill: Worker, decode: Worker, handover: HandOver) -> Leg:
        """The same."""
        return Leg(job.path, with_fields(job, handover))
