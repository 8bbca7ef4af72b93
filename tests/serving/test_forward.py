"""A request through router and fake workers, on every backend: text, legs, usage, headers, and nothing left behind."""

from __future__ import annotations

import pytest

from tests.serving.support import LONG, SHORT, completion, expected_text, run, serving

PAIRS = ["vllm_nixl", "vllm_mooncake", "sglang", "llmd_sidecar"]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("backend", PAIRS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_long_prompts_go_remote_and_short_ones_stay(backend: str, stream: bool, path: str) -> None:
    async def work() -> None:
        async with serving(backend) as s:
            for prompt, route, prefillers in ((LONG, "remote", ("r1", "r2")), (SHORT, "local", ("l1",))):
                for worker in s.workers.values():
                    worker.seen.clear()
                reply = await s.complete(prompt, 5, path, stream=stream)
                assert reply.status == 200, reply.body
                assert reply.text == expected_text(completion(prompt, 5, path), 5)
                assert reply.headers["X-Prfaas-Route"] == route
                if stream:
                    assert reply.events[-1] == "[DONE]"
                legs = {n: [x.leg for x in w.seen] for n, w in s.workers.items() if w.seen}
                assert sum(legs.get(n, []) == ["prefill"] for n in prefillers) == 1
                assert len(legs) == 2
                assert sum(legs.get(n, []) == ["decode"] for n in ("d1", "d2")) == 1
            await s.settled()

    run(work)
