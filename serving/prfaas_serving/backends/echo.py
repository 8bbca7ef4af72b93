"""For load tests: two legs as with vLLM, to workers that answer at once and move no cache."""

from __future__ import annotations

from typing import Any

from prfaas_serving.backends.base import HandOver, Leg
from prfaas_serving.backends.vllm_nixl import VllmNixl
from prfaas_serving.requests import Job


class Echo(VllmNixl):
    """As vLLM, but nothing has to be released."""

    name = "echo"

    def release_leg(self, job: Job, handover: HandOver) -> Leg | None:
        """Nothing is held."""
        return None

    def mismatch(self, answer: dict[str, Any], handover: HandOver) -> bool:
        """Nothing is counted."""
        return False
