"""When the legs of a request ran, as its line says: on every flow, behind another prefill, after a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas_env.profiles.latency import PrefillPolynomial
from prfaas_serving.decision_log import LegTimes, RequestLine
from prfaas_serving.fake.spec import Fault
from prfaas_serving.legs import _whole
from tests.serving.support import LONG, SHORT, Setup, run, serving, until

ONE_OF_EACH = (("r1", "prfaas0", "prefill"), ("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))
CONTROL = {"policy": "never", "mode": "off"}


async def lines(s: Setup, n: int) -> list[RequestLine]:
    """The last lines, once there are n."""
    control = s.router.control
    assert control is not None
    await until(lambda: len(control.requests) == n, f"{n} lines")
    answer = await s.admin("GET", "/requests")
    assert answer.status == 200
    assert answer.json["header"]["kind"] == "header"
    return [RequestLine.from_json(line) for line in answer.json["requests"]]


def legs_of(line: RequestLine) -> LegTimes:
    assert line.legs is not None
    return line.legs


@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["remote", "local"])
@pytest.mark.parametrize("backend", ["vllm_nixl", "vllm_mooncake"])
def test_both_legs_with_their_places_and_times(backend: str, prompt: Any) -> None:
    async def work() -> None:
        async with serving(backend, ONE_OF_EACH, control=CONTROL) as s:
            assert (await s.complete(prompt)).status == 200
            (line,) = await lines(s, 1)
            legs = legs_of(line)
            where = ("prfaas0", "r1") if prompt is LONG else ("pd0", "l1")
            assert (legs.prefill_cluster, legs.prefill_worker, legs.decode_worker) == (*where, "d1")
            assert (legs.attempts, legs.prefill_ahead, legs.kv_bytes) == (1, 0, None)
            sent, end, decode = legs.prefill_sent_ns, legs.prefill_end_ns, legs.decode_sent_ns
            assert sent is not None
            assert end is not None
            assert decode is not None
            assert line.ttft_s is not None
            assert line.arrival_ns <= sent <= end
            first = line.arrival_ns + round(line.ttft_s * 1e9)
            if backend == "vllm_nixl":
                assert end <= decode <= first + 2000
            else:
                assert sent <= decode <= first + 2000, "both legs are sent at once"
                assert end <= first + 2000, "taken when the answer came, not when it was looked at"

    run(work)


def test_a_worker_that_prefills_by_itself_does_not_say_when_it_ended() -> None:
    async def work() -> None:
        async with serving("llmd_sidecar", ONE_OF_EACH, control=CONTROL) as s:
            assert (await s.complete(LONG)).status == 200
            legs = legs_of((await lines(s, 1))[0])
            assert legs.prefill_worker == "r1"
            assert legs.prefill_end_ns is None

    run(work)


def test_a_prefill_behind_another_one_says_so() -> None:
    async def work() -> None:
        slow = {"prefill": PrefillPolynomial(c0_s=0.2, c1_s_per_token=0.0, source="test")}
        async with serving("vllm_nixl", ONE_OF_EACH, spec=slow, control=CONTROL) as s:
            await asyncio.gather(*(s.complete(SHORT + str(k)) for k in range(3)))
            found = sorted(legs_of(line).prefill_ahead or 0 for line in await lines(s, 3))
            assert found == [0, 1, 2]

    run(work)


def test_tries_are_counted_and_only_the_last_legs_stay() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", ONE_OF_EACH, control=CONTROL) as s:
            s.workers["r1"].faults.append(Fault("status", "prefill", count=None, value=500.0))
            assert (await s.complete(LONG)).status == 200
            legs = legs_of((await lines(s, 1))[0])
            assert (legs.attempts, legs.prefill_cluster, legs.prefill_worker) == (2, "pd0", "l1")

    run(work)


def test_a_decode_worker_alone_has_no_prefill_leg() -> None:
    async def work() -> None:
        both = (("r1", "prfaas0", "prefill"), ("d1", "pd0", "decode"))
        async with serving("vllm_nixl", both, control=CONTROL) as s:
            s.workers["r1"].faults.append(Fault("status", "prefill", count=None, value=500.0))
            assert (await s.complete(LONG)).status == 200
            legs = legs_of((await lines(s, 1))[0])
            assert (legs.attempts, legs.decode_worker) == (2, "d1")
            assert legs.prefill_cluster is None
            assert legs.prefill_worker is None
            assert legs.prefill_sent_ns is None
            assert legs.prefill_ahead is None

    run(work)


def test_without_a_control_loop_the_call_is_refused() -> None:
    async def work() -> None:
        async with serving("vllm_nixl") as s:
            assert (await s.admin("GET", "/requests")).status == 409

    run(work)


@pytest.mark.parametrize(
    ("text", "value"),
    [(None, None), ("", None), ("12", 12), ("-1", None), ("1e3", None), ("²", None), ("9" * 40, None)],
)
def test_bytes_of_a_header_are_whole_numbers(text: str | None, value: int | None) -> None:
    assert _whole(text) == value
