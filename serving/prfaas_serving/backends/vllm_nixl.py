"""vLLM with the NixlConnector: prefill leg first, its `kv_transfer_params` go on to the decode leg, which pulls."""

from __future__ import annotations

from typing import Any

from prfaas_serving.backends.base import Flow, HandOver, Leg, Plain
from prfaas_serving.fleet import Worker
from prfaas_serving.requests import Job, prefill_body, prompt_tokens_of, with_fields

#: What a prefill leg asks for; the engine answers with the same object filled.
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Tokens at the end of a prompt that a prefill worker leaves to the decode worker, at most: one where there is
#: recurrent state, which cannot be taken back, and a few with several prediction modules.
_MOST_LEFT_TOKENS = 4


class VllmNixl(Plain):
    """The object that the prefill leg answers is relayed as it is: its keys grow with every version."""

    name = "vllm_nixl"
    flow = Flow.SEQUENTIAL

    def prefill_leg(self, job: Job, handover: HandOver) -> Leg:
        """One token, and keep the cache for a remote decode."""
        return Leg(job.path, prefill_body(job, {"kv_transfer_params": PREFILL_PARAMS}))

    def read_prefill(self, answer: dict[str, Any]) -> HandOver | None:
        """`kv_transfer_params` of the answer."""
        params = answer.get("kv_transfer_params")
        return params if isinstance(params, dict) and params else None

    def decode_leg(self, job: Job, prefill: Worker, decode: Worker, handover: HandOver) -> Leg:
        """The client's body with the handle."""
        return Leg(job.path, with_fields(job, {"kv_transfer_params": handover}))

    def release_leg(self, job: Job, handover: HandOver) -> Leg | None:
        """One token with the handle: the engine frees the blocks once they are fetched; nothing else does before
        the lease ends."""
        return Leg(job.path, prefill_body(job, {"kv_transfer_params": handover}))

    def mismatch(self, answer: dict[str, Any], handover: HandOver) -> bool:
        """A handle for another prompt kills the decode engine, so the two counts must agree where both are given, but
        for the tokens that are left to the decode worker."""
        held, prompt = handover.get("remote_num_tokens"), prompt_tokens_of(answer)
        return type(held) is int and prompt is not None and not 0 <= prompt - held <= _MOST_LEFT_TOKENS
