"""What our backends send against what published routers send (see `record.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.golden.record import HEADERS, REQUESTS, seen_shape
from tests.serving.support import run, serving

HERE = Path(__file__).parent
PAIR = (("p", "prfaas0", "prefill"), ("d", "pd0", "decode"))
#: Fields of the hand-over and of its clamping; the recorded bodies also hold defaults that typed parsers fill in.
COMPARED = {
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "temperature",
    "model",
}


def compared(legs: dict[str, Any], renamed: bool) -> dict[str, Any]:
    """The compared fields of both legs; `renamed`: sglang-router turns max_tokens of a chat into the newer name."""
    out = {}
    for leg, requests in legs.items():
        assert len(requests) == 1
        body = {k: v for k, v in requests[0]["body"].items() if k in COMPARED}
        if body.get("stream") is False:
            del body["stream"]  # the default, which typed parsers write out
        if renamed and requests[0]["path"].endswith("chat/completions") and "max_tokens" in body:
            body["max_completion_tokens"] = body.pop("max_tokens")
        out[leg] = {"path": requests[0]["path"], "headers": requests[0]["headers"], "body": body}
    return out


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize(
    ("reference", "backend"), [("sglang-router", "sglang"), ("vllm-router", "vllm_nixl")]
)
def test_the_same_fields_as_the_published_router(reference: str, backend: str, name: str) -> None:
    recorded = json.loads((HERE / f"{reference}.json").read_text(encoding="utf-8"))
    path, body = REQUESTS[name]

    async def work() -> dict[str, Any]:
        async with serving(backend, PAIR, threshold=0.0) as s:
            for worker in s.workers.values():
                worker.seen.clear()
            reply = await s.post(path, body, HEADERS)
            assert reply.status == 200
            assert reply.headers["X-Prfaas-Route"] == "remote"
            legs = {"prefill": s.workers["p"].seen, "decode": s.workers["d"].seen}
            return {leg: [seen_shape(x) for x in seen] for leg, seen in legs.items()}

    renamed = reference == "sglang-router"
    assert compared(run(work), renamed) == compared(recorded[name], renamed)


def test_the_recordings_hold_a_hand_over() -> None:
    """The comparison would pass on empty files."""
    for reference, field in (("sglang-router", "bootstrap_room"), ("vllm-router", "kv_transfer_params")):
        recorded = json.loads((HERE / f"{reference}.json").read_text(encoding="utf-8"))
        assert set(recorded) == set(REQUESTS)
        for legs in recorded.values():
            assert all(field in request["body"] for leg in legs.values() for request in leg)
