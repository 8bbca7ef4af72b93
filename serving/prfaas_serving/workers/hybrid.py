"""A hybrid class of transformers as a worker's model: recurrent layers and attention over everything, on a CPU.

Tried with Qwen3-Next (gated delta net and full attention) and Kimi-Linear (Kimi delta attention and latent attention).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# set before transformers is imported: nothing is ever fetched
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from prfaas_env.base import PrfaasError, one_line
from prfaas_serving.workers.model import Sampling
from prfaas_serving.workers.parts import Part, byte_law

_DTYPE = torch.float32


class HybridModel:
    """See `prfaas_serving.workers.model.Model`.

    Args:
        folder: weights (safetensors), configuration and tokenizer.
        name: what clients call it.
        threads: threads of torch.

    Raises:
        PrfaasError: the folder cannot be read, or the model keeps something that is not supported.
    """

    def __init__(self, folder: Path, name: str, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.law = byte_law(folder, _DTYPE.itemsize)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPE).eval()
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise PrfaasError(f"{folder}: {one_line(error)}") from None
        config = self._model.config
        self.name = name
        self.max_model_len = int(config.max_position_embeddings)
        self.vocabulary = int(config.vocab_size)
        eos = config.eos_token_id
        self.eos_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.fingerprint = _fingerprint(folder)
        self._computed: Callable[[int], None] | None = None
        layers = self._model.model.layers
        if len(layers) != len(self.law.layers):
            raise PrfaasError(
                f"{folder}: {len(layers)} layers, but its config.json says {len(self.law.layers)}"
            )
        for number, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[..., None]:
        def after(module: Any, arguments: Any, output: Any) -> None:
            if self._computed is not None:
                self._computed(number)

        return after

    # ------------------------------------------------------------------ text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        found: list[int] = self._tokenizer.encode(text)
        return found

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """Token ids of a conversation, ready for the answer."""
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template of the model's maker raises
            raise ValueError(f"the chat template refuses these messages: {one_line(error)}") from None
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    # ------------------------------------------------------------------ caches

    def new_cache(self) -> DynamicCache:
        """An empty cache."""
        return DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def extend(self, cache: DynamicCache, ids: Sequence[int], computed: Callable[[int], None]) -> None:
        """Run tokens through all layers, without the head."""
        self._computed = computed
        try:
            self._model.model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
        finally:
            self._computed = None

    @torch.inference_mode()
    def part(self, cache: DynamicCache, layer: int, start: int, stop: int) -> Part:
        """A layer's part, as a copy.

        Of the inputs of a short convolution with kernel k a layer of transformers keeps k; the oldest is never read
        again, and only k - 1 go over.
        """
        kept = cache.layers[layer]
        if self.law.is_state(layer):
            tensors = {
                "conv": kept.conv_states[0][..., 1:].contiguous(),
                "state": kept.recurrent_states[0].contiguous(),
            }
        else:
            tensors = {
                "keys": kept.keys[..., start:stop, :].contiguous(),
                "values": kept.values[..., start:stop, :].contiguous(),
            }
        data = save_tensors(tensors)
        return Part(layer, start, stop, data, sum(t.numel() * t.element_size() for t in tensors.values()))

    @torch.inference_mode()
    def load(self, parts: Sequence[Part]) -> DynamicCache:
        """The cache that whole, checked parts make."""
        cache = self.new_cache()
        pieces: list[list[dict[str, torch.Tensor]]] = [[] for _ in self.law.layers]
        for part in parts:
            pieces[part.layer].append(load_tensors(part.data))
        for layer, found in enumerate(pieces):
            kept = cache.layers[layer]
            try:
                if self.law.is_state(layer):
                    (tensors,) = found
                    conv = functional.pad(tensors["conv"], (1, 0))
                    state = tensors["state"]
                    kept.lazy_initialization(conv_states=conv, conv_kernel_size=conv.shape[-1])
                    kept.lazy_initialization(recurrent_states=state)
                    kept.conv_states[0].copy_(conv)
                    kept.recurrent_states[0].copy_(state)
                    kept.has_previous_state[0] = True
                else:
                    keys = torch.cat([tensors["keys"] for tensors in found], dim=-2)
                    values = torch.cat([tensors["values"] for tensors in found], dim=-2)
                    kept.lazy_initialization(keys, values)
                    kept.keys, kept.values = keys, values
            except (KeyError, RuntimeError) as error:
                raise ValueError(f"layer {layer}: {one_line(error)}") from None
        return cache

    @torch.inference_mode()
    def next_token(self, cache: DynamicCache, token: int, sampling: Sampling, number: int) -> int:
        """Run one token and choose the one after it."""
        logits = self._model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1]
        if sampling.temperature == 0.0:
            return int(logits.argmax())
        luck = torch.Generator().manual_seed((sampling.seed * 1_000_003 + number) % 2**63)
        shares = torch.softmax(logits / sampling.temperature, dim=-1)
        return int(torch.multinomial(shares, 1, generator=luck))


def _fingerprint(folder: Path) -> str:
    """Of configuration and weights."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
