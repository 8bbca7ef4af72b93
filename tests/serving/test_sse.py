"""Events out of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_serving import sse


@given(
    st.lists(st.sampled_from([b"data: {}", b": ping", b"event: x\ndata: 1", b"data: [DONE]"]), max_size=8),
    st.data(),
)
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_whole_events_come_out_in_order_however_they_are_cut(
    end: bytes, events: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(e.replace(b"\n", end[: len(end) // 2]) + end for e in events)
    cutter, out, at = sse.Events(), b"", 0
    while at < len(whole):
        step = data.draw(st.integers(1, 12))
        block = cutter.whole(whole[at : at + step])
        assert block == b"" or block.endswith(end)
        out += block
        at += step
    assert out == whole
    assert cutter.rest == b""
    assert len(sse.split(out)) == len(events)


def test_a_tail_without_an_end_stays_behind() -> None:
    cutter = sse.Events()
    assert cutter.whole(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert cutter.rest == b"data: 2\n"
    assert cutter.whole(b"\n") == b"data: 2\n\n"
    with pytest.raises(sse.EventTooLong):
        cutter.whole(b"x" * (sse.MAX_EVENT_BYTES + 1))


def choice(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "finish_reason": None, **fields}]}


@pytest.mark.parametrize(
    ("chunk", "has"),
    [
        (choice(delta={"role": "assistant", "content": ""}), False),
        (choice(delta={"role": "assistant", "content": None}), False),
        (choice(delta={"role": "assistant"}), False),
        (choice(delta={}), False),
        (choice(text=""), False),
        (choice(delta={"content": "x"}), True),
        (choice(delta={"reasoning_content": "hm"}), True),
        (choice(delta={"reasoning": "hm"}), True),
        (choice(delta={"tool_calls": [{"index": 0}]}), True),
        (choice(text="x"), True),
        (choice(text="", finish_reason="stop"), True),
        (choice(text="", token_ids=[5]), True),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, True),
        ({"choices": []}, False),
        ({"type": "response.created"}, True),
    ],
)
def test_content(chunk: dict[str, object], has: bool) -> None:
    assert sse.has_content(chunk) is has


def test_errors() -> None:
    assert sse.error_of({"error": {"message": "x"}}) == {"message": "x"}
    assert sse.error_of({"error": "x"}) == {"message": "x"}
    assert sse.error_of({"object": "error", "message": "x"}) is not None
    assert sse.error_of({"choices": []}) is None
    assert sse.error_of({"error": None, "choices": []}) is None


def test_data_over_several_lines_and_comments() -> None:
    assert sse.data_of(b"event: a\ndata: 1\ndata: 2\n\n") == b"1\n2"
    assert sse.data_of(b": keep-alive\n\n") is None
    assert sse.parse(b"[1]") is None
    assert sse.parse(b"nope") is None
