"""Frames, the byte law, and putting parts together: whole and right, or refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.geometry import SlidingAttention
from prfaas_serving.workers.frames import MAX_HEADER_BYTES, FrameError, frame_head, read_frame
from prfaas_serving.workers.parts import Assembly, BrokenCache, ByteLaw, Part, byte_law, tensor_bytes_of
from tests.serving.workers.stub import FIXED_BYTES, LAW, TOKEN_BYTES, StubModel

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


def read(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The first frame of some bytes that end there."""

    async def work() -> tuple[dict[str, Any], bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(work())


@given(st.dictionaries(st.sampled_from(["kind", "layer"]), st.integers(0, 9)), st.binary(max_size=50))
def test_a_frame_comes_out_as_it_went_in(header: dict[str, int], payload: bytes) -> None:
    assert read(frame_head(header, len(payload)) + payload) == (
        {**header, "payload_bytes": len(payload)},
        payload,
    )


def test_a_frame_that_is_cut_anywhere_is_none() -> None:
    raw = frame_head({"kind": "part"}, 3) + b"abc"
    assert read(raw)[1] == b"abc"
    for length in range(len(raw)):
        with pytest.raises(FrameError, match="ended within a frame or before one"):
            read(raw[:length])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ((MAX_HEADER_BYTES + 1).to_bytes(4, "big") + b"{}", "a header of 65537 bytes"),
        ((2).to_bytes(4, "big") + b"{]", "not JSON"),
        ((2).to_bytes(4, "big") + b"[]", "without a valid payload_bytes"),
        ((2).to_bytes(4, "big") + b"{}", "without a valid payload_bytes"),
        ((20).to_bytes(4, "big") + b'{"payload_bytes":-1}', "without a valid payload_bytes"),
    ],
)
def test_what_is_no_frame_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        read(raw)


def test_the_law_by_hand() -> None:
    """Three layers of 4 x 64 x 64 values of state and 3 inputs of (2 + 2) x 64 + 4 x 64 channels, all of 4 bytes."""
    qwen = byte_law(QWEN3_NEXT, 4)
    assert qwen.part_bytes(0, 99) == 4 * 64 * 64 * 4 + 3 * 512 * 4 == 71_680
    assert qwen.part_bytes(3, 10) == 10 * 2 * 128 * 4
    assert [qwen.is_state(layer) for layer in range(4)] == [True, True, True, False]
    assert qwen.total_bytes(1000) == 3 * 71_680 + 1000 * 1024
    kimi = byte_law(KIMI_LINEAR, 4)
    assert kimi.part_bytes(0, 1) == 4 * 64 * 64 * 4 + 3 * 3 * 256 * 4 == 74_752
    assert kimi.total_bytes(1000) == 3 * 74_752 + 1000 * (64 + 16) * 4
    assert qwen.total_bytes(0) == 0


def test_a_window_is_refused() -> None:
    with pytest.raises(PrfaasError, match="sliding windows are not supported"):
        ByteLaw((SlidingAttention(layers=1, kv_heads=1, k_head_dim=2, v_head_dim=2, window_tokens=8),))


def parts_of(ids: list[int], chunk: int) -> list[Part]:
    """All parts of a prompt, in the order they are computed in."""
    model = StubModel()
    cache: list[int] = []
    found = []
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        model.extend(cache, ids[start:stop], lambda _: None)
        for layer in range(len(LAW.layers)):
            if not LAW.is_state(layer):
                found.append(model.part(cache, layer, start, stop))
            elif stop == len(ids):
                found.append(model.part(cache, layer, 0, stop))
    return found


def assembled(parts: list[Part], tokens: int) -> list[Part]:
    """The parts after they were checked."""
    assembly = Assembly(LAW, tokens)
    for part in parts:
        assembly.add(part.layer, part.start, part.stop, part.data)
    return assembly.finish()


@given(st.integers(1, 40), st.integers(1, 16), st.data())
def test_only_a_whole_cache_is_taken(tokens: int, chunk: int, data: st.DataObject) -> None:
    """All parts in order make the cache and weigh what the law says; one lost, doubled or swapped never does."""
    ids = list(range(2, 2 + tokens))
    parts = parts_of(ids, chunk)
    whole = assembled(parts, tokens)
    assert sum(part.tensor_bytes for part in whole) == FIXED_BYTES + TOKEN_BYTES * tokens
    assert LAW.total_bytes(tokens) == FIXED_BYTES + TOKEN_BYTES * tokens
    assert StubModel().load(whole) == ids
    k = data.draw(st.integers(0, len(parts) - 1), label="part")
    with pytest.raises(BrokenCache):
        assembled(parts[:k] + parts[k + 1 :], tokens)
    with pytest.raises(BrokenCache):
        assembled(parts[: k + 1] + parts[k:], tokens)
    with pytest.raises(BrokenCache):
        assembled(parts, tokens + 1)
    if tokens > 1:
        with pytest.raises(BrokenCache):
            assembled(parts, tokens - 1)


def test_a_part_of_another_size_is_refused_by_its_numbers() -> None:
    (part,) = [p for p in parts_of([5, 6, 7], 8) if p.layer == 1]
    with pytest.raises(BrokenCache, match=r"layer 1: tokens 0\.\.2 weigh 48 bytes, must be 32"):
        Assembly(LAW, 3).add(1, 0, 2, part.data)
    with pytest.raises(BrokenCache, match="a part of layer 4; this model has 4"):
        Assembly(LAW, 3).add(4, 0, 3, part.data)
    with pytest.raises(BrokenCache, match="not safetensors"):
        Assembly(LAW, 3).add(1, 0, 3, part.data[:-1])
    assert tensor_bytes_of(part.data) == 48
