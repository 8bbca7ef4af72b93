"""What every backend offers: the legs of a request in the words of one engine or sidecar."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from prfaas_serving.fleet import Worker
from prfaas_serving.requests import Job

if TYPE_CHECKING:
    from prfaas_serving.upstream import FailureKind


class Flow(Enum):
    """The order of the legs."""

    SEQUENTIAL = "sequential"
    """Prefill leg, then decode leg with what it answered."""
    CONCURRENT = "concurrent"
    """Both legs at once; the prefill leg ends when its cache has gone over."""
    SINGLE = "single"
    """One leg to the decode side, which is told where to prefill."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One HTTP request to a worker (POST)."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


#: What passes from the prefill leg to the decode leg; opaque to everyone but the backend.
HandOver = dict[str, Any]
#: Reads JSON from a worker: (worker, url) -> object or None.
FetchJson = Callable[[Worker, str], Awaitable[Any]]


class Backend(Protocol):
    """One way to run a request on two workers."""

    name: str
    flow: Flow
    decode_alone: bool
    """Whether a decode worker can take a whole prompt by itself."""
    resend: bool
    """Whether a leg may be sent again with the same hand-over after a connection that was dropped unread."""

    async def open(self, job: Job, prefill: Worker, fetch: FetchJson) -> HandOver:
        """What both legs need to find each other, before any is sent (concurrent flows)."""

    def prefill_leg(self, job: Job, handover: HandOver) -> Leg:
        """The prefill leg."""

    def read_prefill(self, answer: dict[str, Any]) -> HandOver | None:
        """What the prefill leg's answer hands over (sequential flows); None if it hands nothing over."""

    def decode_leg(self, job: Job, prefill: Worker, decode: Worker, handover: HandOver) -> Leg:
        """The decode leg behind a prefill elsewhere."""

    def alone_leg(self, job: Job, decode: Worker) -> Leg:
        """The whole request on one worker."""

    def release_leg(self, job: Job, handover: HandOver) -> Leg | None:
        """A request to a decode worker that makes the prefill worker let its staged cache go; None if closing the
        legs is enough."""

    def forget(self, prefill: Worker) -> None:
        """A prefill worker failed: what was learned about it may no longer hold."""

    def mismatch(self, answer: dict[str, Any], handover: HandOver) -> bool:
        """Whether the hand-over belongs to another prompt than the one that was prefilled."""

    def refusal_kind(self, status: int, body: bytes) -> FailureKind | None:
        """What a status of 400 or above means in this engine's words; None = what it usually means."""

    async def gone(self, status: int, workers: Sequence[Worker], fetch: FetchJson) -> Worker | None:
        """Which of the workers of a request that was refused as the client's mistake is not there any more; None if
        all are, so that it is the client's."""


class Plain:
    """The parts that most backends share."""

    resend = True
    decode_alone = True

    async def open(self, job: Job, prefill: Worker, fetch: FetchJson) -> HandOver:
        """Nothing to agree on beforehand."""
        return {}

    def prefill_leg(self, job: Job, handover: HandOver) -> Leg:
        """No prefill leg of its own."""
        raise NotImplementedError

    def read_prefill(self, answer: dict[str, Any]) -> HandOver | None:
        """Nothing is handed over."""
        return None

    def alone_leg(self, job: Job, decode: Worker) -> Leg:
        """The client's body as it is."""
        return Leg(job.path, job.plain_body())

    def release_leg(self, job: Job, handover: HandOver) -> Leg | None:
        """Closing the legs is enough."""
        return None

    def forget(self, prefill: Worker) -> None:
        """Nothing was learned."""

    def mismatch(self, answer: dict[str, Any], handover: HandOver) -> bool:
        """Cannot be told."""
        return False

    def refusal_kind(self, status: int, body: bytes) -> FailureKind | None:
        """As usual."""
        return None

    async def gone(self, status: int, workers: Sequence[Worker], fetch: FetchJson) -> Worker | None:
        """A worker that is not there does not answer."""
        return None
