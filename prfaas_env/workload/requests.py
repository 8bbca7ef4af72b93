"""The request table: the whole workload of an episode, drawn at reset."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prfaas_env.simulator.formulas import IntArray


@dataclass(frozen=True)
class RequestTable:
    """All requests of an episode in order of arrival (ties keep their order).

    Arrays are int64 of shape (n,). `session` is -1 where there is none. Prefix blocks of request i are
    `block_ids[block_offsets[i]:block_offsets[i + 1]]`, each of `block_tokens` tokens (0 = no prefix data).
    `cached_tokens` is the part of the input that a hit rate declares cached, in a workload without prefix
    data: 0 by default, always below the input.
    """

    arrival_ns: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    session: IntArray
    block_offsets: IntArray
    block_ids: IntArray
    block_tokens: int = 0
    #: One line per rule that was applied while reading or drawing (spread, dropped rows, inferred units).
    notes: tuple[str, ...] = field(default=())
    cached_tokens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        n = len(self.arrival_ns)
        if len(self.cached_tokens) == n:
            return
        # Zeros say nothing, so that a table changed in length need not name them.
        if self.cached_tokens.any():
            raise ValueError(f"{len(self.cached_tokens)} cached_tokens for {n} requests")
        object.__setattr__(self, "cached_tokens", np.zeros(n, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @classmethod
    def without_prefixes(
        cls,
        arrival_ns: IntArray,
        input_tokens: IntArray,
        output_tokens: IntArray,
        notes: tuple[str, ...] = (),
        cached_tokens: IntArray | None = None,
    ) -> RequestTable:
        """A table with neither sessions nor prefix ids."""
        n = len(arrival_ns)
        return cls(
            arrival_ns=arrival_ns,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            session=np.full(n, -1, dtype=np.int64),
            block_offsets=np.zeros(n + 1, dtype=np.int64),
            block_ids=np.zeros(0, dtype=np.int64),
            notes=notes,
            cached_tokens=np.zeros(n, dtype=np.int64) if cached_tokens is None else cached_tokens,
        )

    def take(self, order: IntArray) -> RequestTable:
        """The same requests in another order; `order` holds positions, shape (n,)."""
        starts, ends = self.block_offsets[:-1][order], self.block_offsets[1:][order]
        ids = [self.block_ids[a:b] for a, b in zip(starts, ends, strict=True)] if len(self.block_ids) else []
        return RequestTable(
            arrival_ns=self.arrival_ns[order],
            input_tokens=self.input_tokens[order],
            output_tokens=self.output_tokens[order],
            session=self.session[order],
            block_offsets=np.concatenate(([0], np.cumsum(ends - starts))).astype(np.int64),
            block_ids=np.concatenate(ids) if ids else self.block_ids[:0],
            block_tokens=self.block_tokens,
            notes=self.notes,
            cached_tokens=self.cached_tokens[order],
        )
