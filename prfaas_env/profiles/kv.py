"""Bytes of KV cache per request, as a frozen layout (paper section 3.2 and table 5)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from prfaas_env.base import Frozen
from prfaas_env.simulator.formulas import IntArray, kv_transfer_bytes


class WindowGroup(Frozen):
    """Sliding-window layers of one window size: they keep (and send) at most the last `window_tokens` tokens."""

    bytes_per_token: int = Field(ge=0, description="bytes per token, all layers of the group together")
    window_tokens: int = Field(ge=1)


class KVLayout(Frozen):
    """What one request's cache weighs on the wire.

    `fixed_bytes` (recurrent state, short convolutions) are sent once per request whatever its length,
    `bytes_per_token` grow with length, `windows` grow up to their window.
    """

    fixed_bytes: int = Field(ge=0)
    bytes_per_token: int = Field(ge=0)
    windows: tuple[WindowGroup, ...] = ()
    n_layers: int = Field(ge=1, description="layers that hold cache or state: the parts of layer-wise sending")

    def window_arrays(self) -> tuple[IntArray, IntArray]:
        """(bytes per token, window tokens) of the window groups, each int64 of shape (n_groups,)."""
        return (
            np.array([w.bytes_per_token for w in self.windows], dtype=np.int64),
            np.array([w.window_tokens for w in self.windows], dtype=np.int64),
        )

    def transfer_bytes(self, tokens: int) -> int:
        """Bytes to send for `tokens` tokens (>= 0)."""
        per_token, window = self.window_arrays()
        return kv_transfer_bytes(self.fixed_bytes, self.bytes_per_token, per_token, window, tokens)
