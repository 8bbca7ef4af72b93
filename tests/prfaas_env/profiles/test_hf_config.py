"""The reader of HuggingFace configs: one small config per family, written from its published facts."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.catalogue import load_model
from prfaas_env.profiles.geometry import AttentionGeometry
from prfaas_env.profiles.hf_config import (
    geometry_from_hf_config,
    kv_layout_from_hf_config,
    layers_from_hf_config,
    max_input_tokens_from_hf_config,
)
from prfaas_env.profiles.kv import KVLayout, WindowGroup

MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
FULL_FROM_1 = [4, 8, 12, 16, 20, 24, 27]
KDA_FROM_1 = [i for i in range(1, 28) if i not in FULL_FROM_1]

KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "num_nextn_predict_layers": 0,
    "model_max_length": 1_048_576,
    "linear_attn_config": {
        "full_attn_layers": FULL_FROM_1,
        "kda_layers": KDA_FROM_1,
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    **MLA,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "use_sliding_window": False,
    "max_position_embeddings": 262_144,
}
QWEN35 = {
    "model_type": "qwen3_5_moe",
    "vision_config": {"num_heads": 16, "depth": 27, "hidden_size": 1152},
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 60,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
    },
}
MIMO = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "hybrid_layer_pattern": [0 if i in (0, 5, 11, 17, 23, 29, 35, 41, 47) else 1 for i in range(48)],
    "max_position_embeddings": 262_144,
}
RING_25 = {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 80,
    "num_nextn_predict_layers": 1,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "num_kv_heads_for_linear_attn": 64,
    "layer_group_size": 8,
    "max_position_embeddings": 131_072,
    **MLA,
}
MINIMAX_M25 = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attn_type_list": [1] * 62,
    "num_mtp_modules": 3,
    "max_position_embeddings": 196_608,
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 94,
    "max_position_embeddings": 40_960,
}
DENSE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in fields}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (KIMI_LINEAR, "kimi-linear-48b-a3b"),
        (QWEN3_NEXT, "qwen3-next-80b-a3b"),
        (QWEN35, "qwen3.5-397b-a17b"),
        (MIMO, "mimo-v2-flash"),
        (RING_25, "ring-2.5-1t"),
        (MINIMAX_M25, "minimax-m2.5"),
        (QWEN3_235B, "qwen3-235b-a22b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_models_weigh_what_the_catalogue_says(config: dict[str, Any], name: str) -> None:
    assert kv_layout_from_hf_config(config) == load_model(name).kv
    assert max_input_tokens_from_hf_config(config) == load_model(name).max_input_tokens


# Other members of the families -------------------------------------------------------------------------


def test_deepseek_like_latent_attention_is_counted_once() -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        **MLA,
    }
    # 61 x 576 x 2; the prediction layer is left out.
    assert kv_layout_from_hf_config(config) == KVLayout(fixed_bytes=0, bytes_per_token=70_272, n_layers=61)


def test_bailing_3_has_kda_with_convolutions() -> None:
    config = {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 24,
        "hidden_size": 1536,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_kv_heads_for_linear_attn": 0,
        "layer_group_size": 4,
        "short_conv_kernel_size": 4,
        **MLA,
    }
    # 6 MLA x 1,152; 18 x (16 x 128 x 128 x 4 + 3 x 2,048 x 3 x 2)
    assert kv_layout_from_hf_config(config) == KVLayout(
        fixed_bytes=18 * (1_048_576 + 36_864), bytes_per_token=6_912, n_layers=24
    )


def test_bailing_2_has_lightning_with_gqa() -> None:
    config = {
        "model_type": "bailing_moe_linear",
        "num_hidden_layers": 20,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "layer_group_size": 5,
        "num_nextn_predict_layers": 0,
    }
    # 4 full x 4 heads x 256 x 2; 16 x 16 x 128 x 128 x 4
    assert kv_layout_from_hf_config(config) == KVLayout(
        fixed_bytes=16_777_216, bytes_per_token=8_192, n_layers=20
    )


@pytest.mark.parametrize(
    "layers",
    [
        {"attn_type_list": ([0] * 7 + [1]) * 10},
        {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10},
    ],
)
def test_minimax_01_has_lightning(layers: dict[str, Any]) -> None:
    config = {
        "model_type": "minimax",
        "num_hidden_layers": 80,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        **layers,
    }
    # 10 x 8 heads x 256 x 2; 70 x 64 x 128 x 128 x 4
    assert kv_layout_from_hf_config(config) == KVLayout(
        fixed_bytes=293_601_280, bytes_per_token=40_960, n_layers=80
    )


def test_sliding_layers_by_layer_types() -> None:
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    }
    # 18 layers x 8 heads x 128 x 2 on each side.
    layout = kv_layout_from_hf_config(config)
    assert layout.bytes_per_token == 36_864
    assert layout.windows == (WindowGroup(bytes_per_token=36_864, window_tokens=128),)


def test_prediction_layers_at_the_end_of_a_layer_list_are_left_out() -> None:
    config = DENSE | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 16,
        "num_nextn_predict_layers": 1,
    }
    # hidden 32 / 4 heads = 8: one full and one sliding layer of 2 x 16 x 2.
    assert kv_layout_from_hf_config(config) == KVLayout(
        fixed_bytes=0,
        bytes_per_token=64,
        windows=(WindowGroup(bytes_per_token=64, window_tokens=16),),
        n_layers=2,
    )


@pytest.mark.parametrize(
    ("fields", "full_layers"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 0),
        ({"model_type": "mistral", "sliding_window": None}, 6),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 6),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 5,
            },
            5,
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            0,
        ),
        ({"model_type": "gemma3_text", "sliding_window": 4096, "sliding_window_pattern": 3}, 2),
    ],
)
def test_windows_without_a_layer_list(fields: dict[str, Any], full_layers: int) -> None:
    layout = kv_layout_from_hf_config(DENSE | {"num_hidden_layers": 6} | fields)
    assert layout.bytes_per_token == 64 * full_layers
    assert sum(w.bytes_per_token for w in layout.windows) == 64 * (6 - full_layers)


@pytest.mark.parametrize("section", ["text_config", "language_config", "llm_config"])
def test_nested_sections(section: str) -> None:
    nested = {"vision_config": {"num_hidden_layers": 99}, section: DENSE}
    assert kv_layout_from_hf_config(nested) == kv_layout_from_hf_config(DENSE)
    deeper = {"thinker_config": nested}
    assert kv_layout_from_hf_config(deeper) == kv_layout_from_hf_config(DENSE)


def test_a_nested_section_falls_back_on_the_one_around_it() -> None:
    outer = {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 99}
    nested = outer | {"text_config": {"num_hidden_layers": 2}}
    assert kv_layout_from_hf_config(nested) == kv_layout_from_hf_config(DENSE)


@pytest.mark.parametrize(
    "lists",
    [
        {"full_attn_layers": [i - 1 for i in FULL_FROM_1], "kda_layers": [i - 1 for i in KDA_FROM_1]},
        {"full_attn_layers": FULL_FROM_1},
        {"kda_layers": KDA_FROM_1},
        {"full_attn_layers": FULL_FROM_1, "kda_layers": None},
    ],
    ids=["from 0", "full only", "kda only", "null"],
)
def test_kda_layer_lists_from_0_and_from_1(lists: dict[str, Any]) -> None:
    sizes = without(KIMI_LINEAR["linear_attn_config"], "full_attn_layers", "kda_layers")
    config = KIMI_LINEAR | {"linear_attn_config": sizes | lists}
    assert kv_layout_from_hf_config(config) == load_model("kimi-linear-48b-a3b").kv


def test_kimi_as_transformers_writes_it() -> None:
    """The layer kinds as a list and the sizes as fields of their own: the same bytes."""
    kinds = ["full_attention" if i in FULL_FROM_1 else "linear_attention" for i in range(1, 28)]
    sizes = KIMI_LINEAR["linear_attn_config"]
    config = without(KIMI_LINEAR, "linear_attn_config") | {
        "layer_types": kinds,
        "linear_num_heads": sizes["num_heads"],
        "linear_head_dim": sizes["head_dim"],
        "linear_conv_kernel_dim": sizes["short_conv_kernel_size"],
    }
    assert kv_layout_from_hf_config(config) == load_model("kimi-linear-48b-a3b").kv


def test_layers_one_by_one_add_up() -> None:
    """Kimi-Linear's layers in order, each with what it keeps."""
    layers = layers_from_hf_config(KIMI_LINEAR)
    assert [layer.kind for layer in layers] == [
        "latent" if i in FULL_FROM_1 else "linear" for i in range(1, 28)
    ]
    assert all(layer.layers == 1 for layer in layers)
    assert AttentionGeometry(groups=layers).layout() == kv_layout_from_hf_config(KIMI_LINEAR)


def test_kimi_without_linear_layers() -> None:
    layout = kv_layout_from_hf_config(KIMI_LINEAR | {"linear_attn_config": None})
    assert layout == KVLayout(fixed_bytes=0, bytes_per_token=27 * 1_152, n_layers=27)


# Dtypes ------------------------------------------------------------------------------------------------


def test_state_dtype_from_the_config_or_the_caller() -> None:
    text = QWEN35["text_config"]
    state, conv = 45 * 64 * 128 * 128, 45 * 12_288 * 3
    for config, asked, state_bytes in (
        (text, None, 4),
        (text | {"mamba_ssm_dtype": "bfloat16"}, None, 2),
        (text, 2, 2),
        (without(text, "mamba_ssm_dtype"), None, 4),
    ):
        layout = kv_layout_from_hf_config(config, state_dtype_bytes=asked)
        assert layout.fixed_bytes == state * state_bytes + conv * 2
    assert kv_layout_from_hf_config(text, conv_dtype_bytes=4).fixed_bytes == state * 4 + conv * 4


def test_cache_dtype_from_the_config_or_the_caller() -> None:
    eight_bit = DENSE | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert kv_layout_from_hf_config(DENSE).bytes_per_token == 128
    assert kv_layout_from_hf_config(DENSE, kv_dtype_bytes=1).bytes_per_token == 64
    assert kv_layout_from_hf_config(eight_bit).bytes_per_token == 64
    assert kv_layout_from_hf_config(eight_bit, kv_dtype_bytes=2).bytes_per_token == 128
    no_scheme = DENSE | {"quantization_config": {"quant_method": "fp8"}}
    assert kv_layout_from_hf_config(no_scheme).bytes_per_token == 128


def test_heads_that_are_null_or_derived() -> None:
    assert kv_layout_from_hf_config(DENSE | {"num_key_value_heads": None}).bytes_per_token == 256
    assert kv_layout_from_hf_config(DENSE | {"head_dim": 16}).bytes_per_token == 256


def test_groups_keep_their_geometry() -> None:
    groups = geometry_from_hf_config(MIMO).groups
    assert [(g.kind, g.layers) for g in groups] == [("full", 9), ("sliding", 39)]


# Refusals: one line that names the file, the field and what was found ----------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config: num_hidden_layers: missing; a positive whole number is needed"),
        (without(DENSE, "num_key_value_heads"), "config: num_key_value_heads: missing"),
        (without(DENSE, "hidden_size"), "config: head_dim: missing, and no hidden_size"),
        (DENSE | {"hidden_size": 33}, "config: head_dim: missing, and hidden_size 33 is not a multiple of 4"),
        (
            DENSE | {"num_hidden_layers": "2"},
            "config: num_hidden_layers: must be a positive whole number (found '2')",
        ),
        (DENSE | {"num_hidden_layers": True}, "config: num_hidden_layers: must be a positive whole number"),
        (
            DENSE | {"num_key_value_heads": [2, 2]},
            "num_key_value_heads: must be a positive whole number (found [2, 2])",
        ),
        (
            {"text_config": without(DENSE, "num_key_value_heads")},
            "config: text_config.num_key_value_heads: missing",
        ),
        (
            DENSE | {"layer_types": ["full_attention", "chunked_attention"]},
            "config: layer_types: unknown layer type 'chunked_attention' at layer 1; known: full_attention,",
        ),
        (
            {"text_config": DENSE | {"layer_types": ["mamba", "full_attention"]}},
            "config: text_config.layer_types: unknown layer type 'mamba' at layer 0",
        ),
        (DENSE | {"layer_types": ["full_attention"]}, "layer_types: has 1 items but num_hidden_layers is 2"),
        (DENSE | {"layer_types": "full_attention"}, "layer_types: must be a list with one item per layer"),
        (DENSE | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window: missing"),
        (
            DENSE | {"layer_types": ["full_attention", "linear_attention"]},
            "linear_num_value_heads: missing, but 1 layers are of linear attention",
        ),
        (
            MIMO | {"hybrid_layer_pattern": [0, 2] + [1] * 46},
            "hybrid_layer_pattern: unknown layer type 2 at layer 1",
        ),
        (MIMO | {"hybrid_layer_pattern": "M*M-"}, "hybrid_layer_pattern: must be a list"),
        (MIMO | {"sliding_window_size": 256}, "sliding_window_size: differs from sliding_window 128"),
        (
            DENSE | {"attn_type_list": [1, 3]},
            "attn_type_list: unknown layer type 3 at layer 1; known: 0 (linear)",
        ),
        (
            DENSE | {"model_type": "gemma2", "sliding_window": 4096},
            "sliding_window: found 4096 but no layer_types",
        ),
        (DENSE | {"attention_chunk_size": 8192}, "attention_chunk_size: not supported: chunked attention"),
        (DENSE | {"index_topk": 2048}, "config: index_topk: not supported: a sparse-attention indexer"),
        (
            DENSE | {"hybrid_override_pattern": "M*"},
            "hybrid_override_pattern: not supported: state-space layers",
        ),
        (
            DENSE | {"num_kv_shared_layers": 10},
            "num_kv_shared_layers: not supported: layers that share one cache",
        ),
        (DENSE | {"model_type": "glm_moe_dsa"}, "model_type: 'glm_moe_dsa' is not supported"),
        (
            RING_25 | {"num_hidden_layers": 78},
            "layer_group_size: num_hidden_layers 78 is not a multiple of it (found 8)",
        ),
        (RING_25 | {"head_dim": 64}, "head_dim: found 64, but hidden_size 8192 / 64 heads is another size"),
        (RING_25 | {"num_kv_heads_for_linear_attn": 8}, "num_kv_heads_for_linear_attn: fewer key heads"),
        (without(QWEN3_NEXT, "linear_conv_kernel_dim"), "linear_conv_kernel_dim: missing"),
        (QWEN3_NEXT | {"mamba_ssm_dtype": "fp4"}, "mamba_ssm_dtype: unknown dtype 'fp4'; known: float32"),
        (
            DENSE | {"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}},
            "quantization_config: kv_cache_scheme must have num_bits 8 or 16 (found 4)",
        ),
    ],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PrfaasError) as refusal:
        kv_layout_from_hf_config(config)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({}, "linear_attn_config.full_attn_layers: missing, and no kda_layers either"),
        ({"full_attn_layers": [4, 28]}, "linear_attn_config.full_attn_layers: layer 28 is out of 1..27"),
        (
            {"full_attn_layers": [4, 4]},
            "linear_attn_config.full_attn_layers: layer 4 is out of 1..27 or named twice",
        ),
        ({"full_attn_layers": [4], "kda_layers": [1, 2, 3]}, "names 4 layers but num_hidden_layers is 27"),
        (
            {"kda_layers": "all"},
            "linear_attn_config.kda_layers: must be a list of layer numbers (found 'all')",
        ),
    ],
)
def test_kda_layer_lists_that_cannot_be(lists: dict[str, Any], message: str) -> None:
    sizes = without(KIMI_LINEAR["linear_attn_config"], "full_attn_layers", "kda_layers")
    with pytest.raises(PrfaasError) as refusal:
        kv_layout_from_hf_config(KIMI_LINEAR | {"linear_attn_config": sizes | lists})
    assert message in str(refusal.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_value_gives_a_layout_or_one_line(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from([KIMI_LINEAR, QWEN3_NEXT, QWEN35, MIMO, RING_25, MINIMAX_M25, DENSE]))
    field = data.draw(st.sampled_from([*config, "sliding_window", "quantization_config", "layer_types"]))
    changed = config | {field: data.draw(JSON_VALUES)}
    message = ""
    try:
        n_layers = kv_layout_from_hf_config(changed).n_layers
    except PrfaasError as refusal:
        n_layers, message = 0, str(refusal)
    assert n_layers > 0 or message.startswith("config: ")
    assert "\n" not in message


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, message in (
        ("{", "not a JSON file: Expecting property name"),
        ("[]", "must be a JSON object, found list"),
        (json.dumps(without(DENSE, "num_hidden_layers")), "num_hidden_layers: missing"),
    ):
        path.write_text(content)
        with pytest.raises(PrfaasError) as refusal:
            kv_layout_from_hf_config(path)
        assert str(refusal.value).startswith(f"{path}: {message}")


def test_a_file_a_folder_and_a_mapping_read_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    layout = kv_layout_from_hf_config(MIMO)
    assert kv_layout_from_hf_config(tmp_path) == layout
    assert kv_layout_from_hf_config(str(tmp_path / "config.json")) == layout


def test_no_stated_limit_is_none() -> None:
    assert max_input_tokens_from_hf_config(DENSE) is None
