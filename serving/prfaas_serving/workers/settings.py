"""What a worker is told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prfaas_env.base import Frozen

Role = Literal["prefill", "decode", "both"]
Answers = Literal["started", "finished"]
OnFailure = Literal["fail", "recompute"]


class WorkerSettings(Frozen):
    """One worker, apart from its model."""

    role: Role = "both"
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="of HTTP; 0 = a free one")
    kv_port: int = Field(default=0, ge=0, le=65535, description="where caches are fetched; 0 = a free one")
    kv_host: str | None = Field(
        default=None, description="address that decode workers are told to fetch at; none = `host`"
    )
    kv_announced_port: int | None = Field(
        default=None, ge=1, le=65535, description="port that they are told, where a relay stands in between"
    )
    chunk_tokens: int = Field(default=256, ge=1, description="tokens per piece of a prefill")
    answers: Answers = Field(
        default="started",
        description="when a prefill leg is answered: as its prefill starts, so that the transfer can overlap it, or "
        "once it is finished",
    )
    on_failure: OnFailure = Field(
        default="fail", description="a decode leg whose cache cannot be fetched: an error, or local prefill"
    )
    max_queue: int = Field(default=256, ge=1, description="prefills that wait; more are refused with 503")
    max_sequences: int = Field(default=64, ge=1, description="requests that are decoded at a time; more wait")
    kv_capacity_bytes: int = Field(
        default=512 * 2**20, ge=1, description="of staged and running caches; more is refused with 503"
    )
    lease_s: float = Field(default=60.0, gt=0, description="time for which a cache waits to be fetched")
    connect_s: float = Field(default=5.0, gt=0, description="longest time to reach a prefill worker")
    idle_s: float = Field(default=60.0, gt=0, description="longest time without a part in a transfer")
    api_key: str | None = Field(default=None, min_length=1)
