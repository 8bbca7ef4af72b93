"""Tiny models with random weights and their tokenizer, written on the spot.

Runs in an engine's environment, which has torch and transformers but not this project: `python tiny_models.py FOLDER
NAME...`. Writes FOLDER/NAME for each name of `MAKERS`. Nothing is downloaded; the same seed gives the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 448
MAX_TOKENS = 16_384
#: What both models have.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = (
    "The remote cluster prefills long prompts and sends their cache over an ordinary link to the local one.",
    "A short prompt is prefilled where it is decoded, because the link would take longer than the work itself.",
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with a chat template."""
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_model(folder: Path, model: Any) -> None:
    """Weights, configuration and tokenizer."""
    model.save_pretrained(folder)
    write_tokenizer(folder)


def dense() -> Any:
    """1,024 bytes of fp32 KV per token: 2 layers x 2 heads x 32 x keys and values x 4 bytes."""
    config = LlamaConfig(
        **SHAPE,
        num_hidden_layers=2,
    )
    return LlamaForCausalLM(config).float()


def hybrid() -> Any:
    """Qwen3-Next in bf16, for engines whose kernels need it."""
    return qwen3_next().to(torch.bfloat16)


def qwen3_next() -> Any:
    """Three gated delta net layers with a state of fixed size, then one of full attention, in fp32."""
    config = Qwen3NextConfig(
        **SHAPE,
        num_hidden_layers=4,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config).float()


def kimi_linear() -> Any:
    """Three layers of Kimi delta attention, then one of latent attention, in fp32."""
    # not in every engine's version of transformers
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        **SHAPE | {"num_key_value_heads": 4},
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        linear_num_heads=4,
        linear_head_dim=64,
        linear_conv_kernel_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        pad_token_id=1,
    )
    return KimiLinearForCausalLM(config).float()


MAKERS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "hybrid": hybrid,
    "qwen3-next": qwen3_next,
    "kimi-linear": kimi_linear,
}


def main(folder: str, names: Sequence[str]) -> None:
    """Write models."""
    for name in names:
        make = MAKERS[name]
        torch.manual_seed(7)
        # larger than usual, so that the next token depends on the prompt and near ties are rare
        model = make()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.ndim >= 2 and "conv1d" not in key:
                    weight.mul_(3.0)
        write_model(Path(folder) / name, model)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
