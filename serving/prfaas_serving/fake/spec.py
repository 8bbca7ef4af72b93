"""What a fake worker is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from pydantic import Field

from prfaas_env.base import Frozen
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import DecodeProfile, PrefillPolynomial, PrefillProfile
from prfaas_env.scenarios import Scenario

FakeEngine = Literal["vllm", "mooncake", "sglang", "llmd", "echo"]


class FakeSpec(Frozen):
    """One fake worker."""

    name: str
    engine: FakeEngine = "vllm"
    role: Literal["prefill", "decode", "both"] = "both"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "fake"
    prefill: PrefillProfile = PrefillPolynomial(c0_s=0.001, c1_s_per_token=0.0, source="tests")
    decode: DecodeProfile = DecodeProfile(a_s=0.001, slots=64, source="tests")
    kv: KVLayout = KVLayout(fixed_bytes=4096, bytes_per_token=512, n_layers=4)
    time_scale: float = Field(default=1.0, gt=0, description="real seconds per second of the profiles")
    byte_scale: float = Field(default=1.0, gt=0, description="bytes on the wire per byte of KV")
    max_model_len: int = 200_000
    max_queue: int = Field(default=1000, description="requests waiting at most; more are refused with 503")
    lease_s: float = Field(default=30.0, description="real seconds that staged KV is held for")
    handshake_s: float = Field(default=0.5, description="real seconds until an unreachable peer is given up")
    failure_policy: Literal["fail", "recompute"] = "recompute"
    api_key: str | None = None
    block_tokens: int = 16
    needs_state: bool = False
    cache_tokens: int = 2_000_000
    kv_host: str = "127.0.0.1"
    kv_via_port: int | None = Field(default=None, description="port of the link to name instead of its own")
    relay_from: dict[str, int] = Field(
        default_factory=dict, description="SGLang, Mooncake: `port of a peer` -> port of the link to it"
    )


def of_scenario(
    scenario: Scenario, cluster: str, name: str, *, time_scale: float, byte_scale: float, **fields: Any
) -> FakeSpec:
    """A worker with the profiles of a cluster of a scenario."""
    kinds = {c.name: c.hardware for c in scenario.deployment.prfaas}
    kinds |= {c.name: c.hardware for c in scenario.deployment.pd}
    hardware = scenario.model.hardware[kinds[cluster]]
    decode = hardware.decode or DecodeProfile(a_s=0.025, slots=1, source="prefill only")
    return FakeSpec(
        name=name,
        prefill=hardware.prefill,
        decode=decode,
        kv=scenario.model.kv,
        time_scale=time_scale,
        byte_scale=byte_scale,
        **fields,
    )


@dataclass
class Fault:
    """Something that goes wrong on command.

    Args:
        kind: see `FakeWorker.KINDS`.
        leg: which requests: prefill, decode, or any.
        count: how many requests it hits; None = all from now on.
        value: a status, a number of tokens or of seconds, by kind.
        every: hit only each n-th request that it could hit.
    """

    kind: str
    leg: Literal["prefill", "decode", "any"] = "any"
    count: int | None = 1
    value: float = 0.0
    every: int = 1
    seen: int = field(default=0)

    def hits(self, leg: str) -> bool:
        """Whether this request is hit; counts it."""
        if self.leg not in ("any", leg) or self.count == 0:
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        if self.count is not None:
            self.count -= 1
        return True


class PartSizes:
    """Bytes of a KV cache per part: the fixed state, then one part per layer."""

    def __init__(self, kv: KVLayout, byte_scale: float) -> None:
        self._kv = kv
        self._scale = byte_scale

    def of(self, tokens: int) -> list[int]:
        """Bytes on the wire of each part; 0 tokens are no bytes at all."""
        if tokens <= 0:
            return [0] * (self._kv.n_layers + 1)
        rest = self._kv.transfer_bytes(tokens) - self._kv.fixed_bytes
        each, odd = divmod(rest, self._kv.n_layers)
        parts = [self._kv.fixed_bytes, *(each + (k < odd) for k in range(self._kv.n_layers))]
        # rounded at the ends of the running sum, so that the whole keeps its size however small the parts are
        ends = [0, *(round(end * self._scale) for end in accumulate(parts))]
        return [end - start for start, end in pairwise(ends)]

    @cached_property
    def n_parts(self) -> int:
        """How many parts."""
        return self._kv.n_layers + 1
