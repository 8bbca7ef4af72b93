"""The parts of a cache on the wire, what they must weigh, and putting them together again.

A part is what one layer adds in one piece of the prefill: keys and values of the tokens `start..stop` (attention), or
the state after the last token (recurrent layers, once). Its tensors travel as safetensors bytes. What they weigh is the
law of `prfaas_env.profiles`: a fixed state per request, and bytes per token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from safetensors import SafetensorError, deserialize

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.geometry import AttentionGeometry, LayerGroup, LinearAttention, SlidingAttention
from prfaas_env.profiles.hf_config import ConfigSource, layers_from_hf_config
from prfaas_env.profiles.kv import KVLayout


class BrokenCache(Exception):
    """Parts that do not make a whole cache of the prompt at hand."""


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a cache.

    Args:
        layer: number of the layer.
        start: first token it holds; 0 for a state.
        stop: one after the last token it holds, or that went into a state.
        data: its tensors, as safetensors bytes.
        tensor_bytes: what the tensors alone weigh.
    """

    layer: int
    start: int
    stop: int
    data: bytes
    tensor_bytes: int


@dataclass(frozen=True)
class ByteLaw:
    """What each layer keeps of a request, in order."""

    layers: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        """Refuse layers that keep a window: their parts would overlap."""
        if any(isinstance(layer, SlidingAttention) for layer in self.layers):
            raise PrfaasError("models with sliding windows are not supported by this worker")

    @cached_property
    def layout(self) -> KVLayout:
        """The bytes of a whole request."""
        return AttentionGeometry(groups=self.layers).layout()

    def is_state(self, layer: int) -> bool:
        """Whether a layer keeps a state of fixed size."""
        return isinstance(self.layers[layer], LinearAttention)

    def part_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of a part of a layer; `tokens` do not matter for a state."""
        group = self.layers[layer]
        if isinstance(group, LinearAttention):
            return group.fixed_bytes
        return group.bytes_per_token * tokens

    def total_bytes(self, tokens: int) -> int:
        """Bytes of the whole cache of so many tokens (>= 0); none of no token."""
        return self.layout.transfer_bytes(tokens) if tokens else 0


def byte_law(config: ConfigSource, dtype_bytes: int) -> ByteLaw:
    """The law of a model that keeps everything in one dtype; errors as `layers_from_hf_config`."""
    return ByteLaw(
        layers_from_hf_config(
            config, kv_dtype_bytes=dtype_bytes, state_dtype_bytes=dtype_bytes, conv_dtype_bytes=dtype_bytes
        )
    )


def tensor_bytes_of(data: bytes) -> int:
    """What the tensors in safetensors bytes weigh.

    Raises:
        BrokenCache: it is not safetensors.
    """
    try:
        entries: list[tuple[str, dict[str, bytes]]] = deserialize(data)  # type: ignore[no-untyped-call]
        return sum(len(entry["data"]) for _, entry in entries)
    except SafetensorError as error:
        raise BrokenCache(f"a part is not safetensors: {error}") from None


def digest_of(ids: Sequence[int]) -> str:
    """Name of a prompt, the same in every process."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()


class Assembly:
    """Parts that have come, checked one by one against the law.

    Args:
        law: of the model.
        tokens: of the cache that is expected.
    """

    def __init__(self, law: ByteLaw, tokens: int) -> None:
        self._law = law
        self._tokens = tokens
        self.parts: list[Part] = []
        self._upto = [0] * len(law.layers)

    def add(self, layer: int, start: int, stop: int, data: bytes) -> None:
        """Take the next part of a layer.

        Raises:
            BrokenCache: it does not follow on what the layer has, or has another size.
        """
        if not 0 <= layer < len(self._law.layers):
            raise BrokenCache(f"a part of layer {layer}; this model has {len(self._law.layers)}")
        state = self._law.is_state(layer)
        if start != self._upto[layer] or not start < stop <= self._tokens or (state and stop != self._tokens):
            raise BrokenCache(
                f"layer {layer}: tokens {start}..{stop} after {self._upto[layer]} of {self._tokens}"
            )
        weight, lawful = tensor_bytes_of(data), self._law.part_bytes(layer, stop - start)
        if weight != lawful:
            raise BrokenCache(f"layer {layer}: tokens {start}..{stop} weigh {weight} bytes, must be {lawful}")
        self._upto[layer] = stop
        self.parts.append(Part(layer, start, stop, data, weight))

    def finish(self) -> list[Part]:
        """The whole cache.

        Raises:
            BrokenCache: a part is missing.
        """
        for layer, upto in enumerate(self._upto):
            if upto != self._tokens:
                raise BrokenCache(f"layer {layer} holds {upto} of {self._tokens} tokens")
        return self.parts
