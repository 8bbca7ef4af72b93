"""Attention geometry: groups of layers with their heads and sizes, and the bytes that follow from them.

Every byte count of the catalogue comes from here (paper section 3.2; checked against table 5). A group says
how many layers it has and what one of them keeps per token or per request; `AttentionGeometry.layout` adds
them up. Extra prediction layers (MTP, nextn) are left out everywhere: their cache is not handed over.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prfaas_env.base import Frozen
from prfaas_env.profiles.kv import KVLayout, WindowGroup

_Count = Annotated[int, Field(ge=1)]


class _KeyValueHeads(Frozen):
    layers: _Count
    kv_heads: _Count
    k_head_dim: _Count
    v_head_dim: _Count
    dtype_bytes: _Count = 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group."""
        return self.layers * self.kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype_bytes


class FullAttention(_KeyValueHeads):
    """Full attention with `kv_heads` key and value heads (GQA; MHA when every query head has its own)."""

    kind: Literal["full"] = "full"


class SlidingAttention(_KeyValueHeads):
    """Attention over the last `window_tokens` tokens only: its bytes are capped at the window."""

    kind: Literal["sliding"] = "sliding"
    window_tokens: _Count


class LatentAttention(Frozen):
    """Multi-head latent attention (MLA): a latent and a rope slice per token, not doubled for K and V."""

    kind: Literal["latent"] = "latent"
    layers: _Count
    latent_rank: _Count
    rope_dim: int = Field(ge=0, description="stored even where the model does not rotate it")
    dtype_bytes: _Count = 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group."""
        return self.layers * (self.latent_rank + self.rope_dim) * self.dtype_bytes


class LinearAttention(Frozen):
    """Recurrent layers (KDA, gated delta net, lightning): a state per head, the tail of a short convolution.

    The state is `heads x k_head_dim x v_head_dim`; a convolution of kernel k keeps its last k - 1 inputs per
    channel. Both are sent once per request whatever its length.
    """

    kind: Literal["linear"] = "linear"
    layers: _Count
    heads: _Count
    k_head_dim: _Count
    v_head_dim: _Count
    state_dtype_bytes: _Count
    conv_channels: int = Field(default=0, ge=0, description="0 = no short convolution")
    conv_kernel: _Count = 1
    conv_dtype_bytes: _Count = 2

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one request in all layers of the group."""
        state = self.heads * self.k_head_dim * self.v_head_dim * self.state_dtype_bytes
        conv = self.conv_channels * (self.conv_kernel - 1) * self.conv_dtype_bytes
        return self.layers * (state + conv)


LayerGroup = Annotated[
    FullAttention | LatentAttention | SlidingAttention | LinearAttention, Field(discriminator="kind")
]


class AttentionGeometry(Frozen):
    """All attention layers of one model, in groups of equal layers (order does not matter)."""

    groups: tuple[LayerGroup, ...] = Field(min_length=1)

    def layout(self) -> KVLayout:
        """The bytes on the wire; groups of the same window are merged, windows rise."""
        fixed_bytes = 0
        bytes_per_token = 0
        windows: dict[int, int] = {}
        for group in self.groups:
            if isinstance(group, LinearAttention):
                fixed_bytes += group.fixed_bytes
            elif isinstance(group, SlidingAttention):
                windows[group.window_tokens] = windows.get(group.window_tokens, 0) + group.bytes_per_token
            else:
                bytes_per_token += group.bytes_per_token
        return KVLayout(
            fixed_bytes=fixed_bytes,
            bytes_per_token=bytes_per_token,
            windows=tuple(
                WindowGroup(bytes_per_token=windows[tokens], window_tokens=tokens)
                for tokens in sorted(windows)
            ),
            n_layers=sum(group.layers for group in self.groups),
        )
