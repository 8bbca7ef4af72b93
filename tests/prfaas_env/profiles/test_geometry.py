"""Bytes of each kind of attention layer, by hand."""

import pytest
from pydantic import ValidationError

from prfaas_env.profiles.geometry import (
    AttentionGeometry,
    FullAttention,
    LatentAttention,
    LinearAttention,
    SlidingAttention,
)


def test_full_attention_has_keys_and_values() -> None:
    assert FullAttention(layers=3, kv_heads=2, k_head_dim=5, v_head_dim=7).bytes_per_token == 3 * 2 * 12 * 2
    eight_bit = FullAttention(layers=3, kv_heads=2, k_head_dim=5, v_head_dim=7, dtype_bytes=1)
    assert eight_bit.bytes_per_token == 72


def test_latent_attention_is_counted_once() -> None:
    # One MLA layer of DeepSeek or Kimi: 576 values of 2 bytes.
    assert LatentAttention(layers=1, latent_rank=512, rope_dim=64).bytes_per_token == 1_152


def test_linear_attention_has_state_and_convolution() -> None:
    one = LinearAttention(
        layers=1,
        heads=32,
        k_head_dim=128,
        v_head_dim=128,
        state_dtype_bytes=4,
        conv_channels=12_288,
        conv_kernel=4,
    )
    # 32 x 128 x 128 x 4 = 2,097,152 and 12,288 x 3 x 2 = 73,728.
    assert one.fixed_bytes == 2_097_152 + 73_728
    assert one.model_copy(update={"conv_channels": 0, "state_dtype_bytes": 2}).fixed_bytes == 1_048_576


def test_groups_add_up_and_equal_windows_merge() -> None:
    sliding = {"kv_heads": 1, "k_head_dim": 1, "v_head_dim": 1}
    geometry = AttentionGeometry(
        groups=(
            SlidingAttention(layers=2, window_tokens=512, **sliding),
            SlidingAttention(layers=3, window_tokens=128, **sliding),
            SlidingAttention(layers=4, window_tokens=512, **sliding),
            FullAttention(layers=5, kv_heads=1, k_head_dim=1, v_head_dim=1),
            LatentAttention(layers=6, latent_rank=1, rope_dim=0),
            LinearAttention(layers=7, heads=1, k_head_dim=1, v_head_dim=1, state_dtype_bytes=4),
        )
    )
    layout = geometry.layout()
    assert layout.n_layers == 27
    assert layout.fixed_bytes == 28
    assert layout.bytes_per_token == 5 * 4 + 6 * 2
    assert [(w.window_tokens, w.bytes_per_token) for w in layout.windows] == [(128, 12), (512, 24)]


def test_a_group_without_layers_is_refused() -> None:
    with pytest.raises(ValidationError, match="layers"):
        FullAttention(layers=0, kv_heads=1, k_head_dim=1, v_head_dim=1)
