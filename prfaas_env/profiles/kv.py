"""Bytes of KV cache per request, as a frozen layout (paper section 3.2 and table 5)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from prfaas_env.base import Frozen
from prfaas_env.simulator.formulas import IntArray, kv_transfer_bytes

#: Answer of `KVLayout.tokens_for_bytes` when every length fits, far above any context.
EVERY_LENGTH = 2**62


class WindowGroup(Frozen):
    """Sliding-window layers of one size: they keep (and send) at most the last `window_tokens` tokens."""

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
    n_layers: int = Field(
        ge=1, description="layers that hold cache or state: the parts of layer-wise sending"
    )

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

    def transfer_bytes_array(self, tokens: IntArray) -> IntArray:
        """Bytes to send for an int64 array of lengths (>= 0), same shape; equals `transfer_bytes` exactly."""
        total = self.fixed_bytes + self.bytes_per_token * tokens
        for window in self.windows:
            total = total + window.bytes_per_token * np.minimum(tokens, window.window_tokens)
        return total

    def reserved_bytes(self, tokens: int, page_tokens: int = 1) -> int:
        """Bytes an instance sets aside for `tokens` tokens: a separate, larger figure than `transfer_bytes`.

        Engines that give all layer groups pages of one size reserve windowed layers like full ones, for the
        whole length in whole pages of `page_tokens` tokens; nothing is capped at the window. It says how much
        memory a request takes on such an engine, never what crosses the wire.
        """
        per_token = self.bytes_per_token + sum(window.bytes_per_token for window in self.windows)
        pages = -(-tokens // page_tokens)
        return self.fixed_bytes + per_token * pages * page_tokens

    def tokens_for_bytes(self, n_bytes: int) -> int:
        """The largest number of tokens whose `transfer_bytes` are at most `n_bytes`: its exact inverse.

        Below `fixed_bytes` not even the state fits: 0, as if one token did not. Where the layout has stopped
        growing and every length fits: `EVERY_LENGTH`.
        """
        left = n_bytes - self.fixed_bytes
        if left < 0:
            return 0
        start = 0
        # Between two windows the bytes are linear: walk the pieces, spending what each costs.
        for end in sorted({window.window_tokens for window in self.windows}):
            slope = self._slope(start)
            if slope * (end - start) > left:
                return start + left // slope
            left -= slope * (end - start)
            start = end
        return start + left // self.bytes_per_token if self.bytes_per_token else EVERY_LENGTH

    def _slope(self, tokens: int) -> int:
        """Bytes that one more token adds to `tokens` tokens."""
        return self.bytes_per_token + sum(
            window.bytes_per_token for window in self.windows if window.window_tokens > tokens
        )
