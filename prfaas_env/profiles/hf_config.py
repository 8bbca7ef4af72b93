"""Reads the attention geometry of a model from its HuggingFace `config.json`.

The families of the catalogue are understood, in their own spelling:

| what | fields |
|---|---|
| full attention (Qwen3, MiniMax-M2, Llama) | `num_key_value_heads`, `head_dim`, `v_head_dim` |
| latent attention (DeepSeek, Kimi, Ring) | `kv_lora_rank`, `qk_rope_head_dim` |
| sliding windows | `layer_types`; `hybrid_layer_pattern`, `swa_*` (MiMo); `sliding_window_pattern` (Gemma) |
| gated delta net (Qwen3-Next, Qwen3.5) | `layer_types` or `full_attention_interval`, `linear_*` |
| KDA (Kimi Linear) | `linear_attn_config` with 1-based (or 0-based) layer lists; `layer_types`, `linear_num_heads` |
| lightning or KDA (Bailing, Ring) | `layer_group_size`, `short_conv_kernel_size` where it is KDA |
| lightning (MiniMax-01, M1) | `attn_type_list` or `layer_types` |

What changes the cache in a way that is not understood is refused by name, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.geometry import (
    AttentionGeometry,
    FullAttention,
    LatentAttention,
    LayerGroup,
    LinearAttention,
    SlidingAttention,
)
from prfaas_env.profiles.kv import KVLayout

ConfigSource = str | PathLike[str] | Mapping[str, Any]

#: Where multimodal configs keep the language model.
_TEXT_SECTIONS = ("text_config", "language_config", "llm_config", "thinker_config")

#: Fields that change the cache in a way not modelled here, and what they stand for.
_UNSUPPORTED_FIELDS = {
    "index_topk": "a sparse-attention indexer with its own cache",
    "index_head_dim": "a sparse-attention indexer with its own cache",
    "sparse_attention_config": "a sparse-attention indexer with its own cache",
    "compress_ratios": "compressed attention",
    "hybrid_override_pattern": "state-space layers",
    "layers_block_type": "state-space layers",
    "attn_layer_period": "state-space layers",
    "attn_layer_indices": "state-space layers",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "ssm_cfg": "state-space layers",
    "ssm_state_size": "state-space layers",
    "full_attn_idxs": "convolution layers",
    "conv_L_cache": "convolution layers",
    "local_layer_ids": "local layers of their own kind",
    "num_kv_shared_layers": "layers that share one cache",
    "cla_share_factor": "layers that share one cache",
    "attention_k_eq_v": "keys that are also the values",
    "global_head_dim": "full layers with heads of their own size",
    "num_global_key_value_heads": "full layers with heads of their own size",
    "attention_other_setting": "windowed layers with heads of their own size",
    "block_configs": "layers that differ one by one",
    "cross_attention_layers": "cross-attention layers",
}
_UNSUPPORTED_MODEL_TYPES = {
    "deepseek_v32": "a sparse-attention indexer with its own cache",
    "deepseek_v4": "compressed attention",
    "glm_moe_dsa": "a sparse-attention indexer with its own cache",
}
#: Models whose `sliding_window`, where it is set without a layer list, holds for every layer.
_ALL_LAYERS_SLIDE = ("mistral", "mixtral")
#: Fields that count extra prediction layers; layer lists may include them at their end.
_EXTRA_LAYER_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_LAYER_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}


class _Config:
    """The text section of one config, with the sections around it as fall-back, and its error messages."""

    def __init__(self, content: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.where = where
        self._sections: list[tuple[str, Mapping[str, Any]]] = [(prefix, content)]
        while True:
            prefix, section = self._sections[0]
            inner = next((name for name in _TEXT_SECTIONS if isinstance(section.get(name), Mapping)), None)
            if inner is None:
                break
            self._sections.insert(0, (f"{prefix}{inner}.", section[inner]))

    def path(self, field: str) -> str:
        """`field` with the section it was found in (or should be in)."""
        for prefix, section in self._sections:
            if field in section:
                return prefix + field
        return self._sections[0][0] + field

    def part(self, field: str) -> _Config:
        """The object under `field`, with error messages of its own."""
        value = self.get(field)
        if not isinstance(value, Mapping):
            raise self.error(field, f"must be an object (found {short(value)})")
        return _Config(value, self.where, f"{self.path(field)}.")

    def error(self, field: str, message: str) -> PrfaasError:
        """The refusal of `field`, for the caller to raise."""
        return PrfaasError(f"{self.where}: {self.path(field)}: {message}")

    def get(self, field: str) -> Any:
        """Value of `field`, or None where it is absent or null."""
        for _, section in self._sections:
            if field in section:
                return section[field]
        return None

    def is_null(self, field: str) -> bool:
        """Whether `field` is there and null."""
        return self.get(field) is None and any(field in section for _, section in self._sections)

    def count(self, field: str, *others: str, default: int | None = None) -> int:
        """A positive integer from the first of the fields that is set, else the default, else an error."""
        for name in (field, *others):
            if self.get(name) is not None:
                return self._positive(name, self.get(name))
        if default is not None:
            return default
        also = f" (or {', '.join(others)})" if others else ""
        raise self.error(field, f"missing{also}; a positive whole number is needed")

    def _positive(self, field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, f"must be a positive whole number (found {short(value)})")
        return value

    def layer_list(self, field: str, n_layers: int) -> list[Any]:
        """The list `field`, one item per layer; extra prediction layers at its end are cut off."""
        value = self.get(field)
        if not isinstance(value, list):
            raise self.error(field, f"must be a list with one item per layer (found {short(value)})")
        extra = sum(self.count(name, default=0) for name in _EXTRA_LAYER_FIELDS if self.get(name))
        if len(value) not in {n_layers, n_layers + extra}:
            raise self.error(field, f"has {len(value)} items but num_hidden_layers is {n_layers}")
        return value[:n_layers]


def _read(source: ConfigSource) -> tuple[Mapping[str, Any], str]:
    """Content of a config and the name that error messages give it."""
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PrfaasError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise PrfaasError(f"{path}: must be a JSON object, found {type(content).__name__}")
    return content, str(path)


# Which layer is of which kind -------------------------------------------------------------------------------


def _kinds_from_linear_attn_config(config: _Config, n_layers: int) -> list[str]:
    """Kimi Linear: the lists name layers from 1 (published) or from 0, told apart by what they cover."""
    part = config.part("linear_attn_config")
    full, kda = part.get("full_attn_layers"), part.get("kda_layers")
    named: list[int] = []
    for field, value in (("full_attn_layers", full), ("kda_layers", kda)):
        if value is None:
            continue
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise part.error(field, f"must be a list of layer numbers (found {short(value)})")
        named += value
    field = "kda_layers" if full is None else "full_attn_layers"
    if full is None and kda is None:
        raise part.error("full_attn_layers", "missing, and no kda_layers either")
    base = 0 if 0 in named else 1
    numbers = range(base, base + n_layers)
    for i in named:
        if i not in numbers or named.count(i) > 1:
            raise part.error(field, f"layer {i} is out of {base}..{numbers[-1]} or named twice")
    if full is not None and kda is not None and len(named) != n_layers:
        raise part.error(
            field, f"with kda_layers names {len(named)} layers but num_hidden_layers is {n_layers}"
        )
    return ["full" if (i in full if full is not None else i not in kda) else "linear" for i in numbers]


def _kinds_from_layer_types(config: _Config, n_layers: int) -> list[str]:
    field = "layer_types"
    kinds = []
    for i, name in enumerate(config.layer_list(field, n_layers)):
        if not isinstance(name, str) or name not in _LAYER_KINDS:
            raise config.error(
                field, f"unknown layer type {short(name)} at layer {i}; known: {', '.join(_LAYER_KINDS)}"
            )
        kinds.append(_LAYER_KINDS[name])
    return kinds


def _kinds_from_flags(config: _Config, n_layers: int, field: str, kinds: tuple[str, str]) -> list[str]:
    """A list of 0 and 1, one per layer; `kinds` is what they mean."""
    flags = config.layer_list(field, n_layers)
    for i, flag in enumerate(flags):
        if flag not in (0, 1):
            raise config.error(
                field, f"unknown layer type {short(flag)} at layer {i}; known: 0 ({kinds[0]}), 1 ({kinds[1]})"
            )
    return [kinds[int(flag)] for flag in flags]


def _every_nth_full(n_layers: int, interval: int, other: str) -> list[str]:
    return ["full" if (i + 1) % interval == 0 else other for i in range(n_layers)]


def _kinds_from_layer_group_size(config: _Config, n_layers: int) -> list[str]:
    """Bailing: the last layer of each group is full. Readers disagree on a broken last group: refused."""
    size = config.count("layer_group_size")
    if n_layers % size:
        raise config.error(
            "layer_group_size", f"num_hidden_layers {n_layers} is not a multiple of it (found {size})"
        )
    return _every_nth_full(n_layers, size, "linear")


def _kinds_from_window(config: _Config, n_layers: int) -> list[str]:
    """No layer list at all: full attention, unless a window is switched on."""
    field = "sliding_window"
    if config.get(field) is None or config.get("use_sliding_window") is False:
        return ["full"] * n_layers
    if config.get("use_sliding_window") is True and config.get("max_window_layers") is not None:
        first = config.count("max_window_layers") if config.get("max_window_layers") != 0 else 0
        return ["full" if i < first else "sliding" for i in range(n_layers)]
    if config.get("model_type") in _ALL_LAYERS_SLIDE:
        return ["sliding"] * n_layers
    raise config.error(
        field, f"found {short(config.get(field))} but no layer_types: which layers slide is not stated"
    )


_SPELLINGS: dict[str, Callable[[_Config, int], list[str]]] = {
    "linear_attn_config": _kinds_from_linear_attn_config,
    "layer_types": _kinds_from_layer_types,
    "hybrid_layer_pattern": lambda c, n: _kinds_from_flags(c, n, "hybrid_layer_pattern", ("full", "sliding")),
    "attn_type_list": lambda c, n: _kinds_from_flags(c, n, "attn_type_list", ("linear", "full")),
    "full_attention_interval": lambda c, n: _every_nth_full(n, c.count("full_attention_interval"), "linear"),
    "layer_group_size": _kinds_from_layer_group_size,
    "sliding_window_pattern": lambda c, n: _every_nth_full(n, c.count("sliding_window_pattern"), "sliding"),
}


def _layer_kinds(config: _Config, n_layers: int) -> list[str]:
    """`full`, `sliding` or `linear` for each layer, from the first spelling that the config has."""
    for field, reader in _SPELLINGS.items():
        if config.get(field) is not None:
            return reader(config, n_layers)
    return _kinds_from_window(config, n_layers)


# What a layer of a kind keeps -------------------------------------------------------------------------------


def _head_dim(config: _Config) -> int:
    """`head_dim`, or hidden_size / num_attention_heads where it is not stated."""
    if config.get("head_dim") is not None:
        return config.count("head_dim")
    if config.get("hidden_size") is None:
        raise config.error("head_dim", "missing, and no hidden_size to derive it from")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden % heads:
        raise config.error(
            "head_dim", f"missing, and hidden_size {hidden} is not a multiple of {heads} heads"
        )
    return hidden // heads


def _kv_heads(config: _Config) -> int:
    """`num_key_value_heads`; an explicit null means one per attention head."""
    field = "num_key_value_heads"
    if config.is_null(field):
        return config.count("num_attention_heads")
    return config.count(field)


def _full_group(config: _Config, layers: int, dtype_bytes: int) -> LayerGroup:
    if config.get("kv_lora_rank") is not None:
        return LatentAttention(
            layers=layers,
            latent_rank=config.count("kv_lora_rank"),
            rope_dim=config.count("qk_rope_head_dim"),
            dtype_bytes=dtype_bytes,
        )
    k_head_dim = _head_dim(config)
    return FullAttention(
        layers=layers,
        kv_heads=_kv_heads(config),
        k_head_dim=k_head_dim,
        v_head_dim=config.count("v_head_dim", default=k_head_dim),
        dtype_bytes=dtype_bytes,
    )


def _sliding_group(config: _Config, layers: int, dtype_bytes: int) -> LayerGroup:
    """Windowed layers, with heads of their own where `swa_*` says so (MiMo)."""
    window_tokens = config.count("sliding_window", "sliding_window_size")
    if config.count("sliding_window_size", default=window_tokens) != window_tokens:
        raise config.error("sliding_window_size", f"differs from sliding_window {window_tokens}")
    own = config.get("swa_head_dim") is not None
    k_head_dim = config.count("swa_head_dim") if own else _head_dim(config)
    return SlidingAttention(
        layers=layers,
        kv_heads=config.count("swa_num_key_value_heads", default=_kv_heads(config)),
        k_head_dim=k_head_dim,
        v_head_dim=config.count("swa_v_head_dim", "v_head_dim", default=k_head_dim),
        window_tokens=window_tokens,
        dtype_bytes=dtype_bytes,
    )


def _kv_dtype_bytes(config: _Config) -> int:
    """Bytes of a cached key or value: 1 where the config asks for an 8-bit cache, else 2."""
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if scheme is None:
        return 2
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else scheme
    if bits not in (8, 16):
        raise config.error(
            "quantization_config", f"kv_cache_scheme must have num_bits 8 or 16 (found {short(bits)})"
        )
    return int(bits) // 8


def _state_dtype_bytes(config: _Config) -> int:
    """Bytes of a recurrent-state value: what the config says, else fp32, which engines keep it in."""
    field = "mamba_ssm_dtype"
    name = config.get(field)
    if name is None:
        return 4
    if not isinstance(name, str) or name not in _DTYPE_BYTES:
        raise config.error(field, f"unknown dtype {short(name)}; known: {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def _kda_group(
    layers: int, heads: int, head_dim: int, kernel: int, state_dtype_bytes: int, conv_dtype_bytes: int
) -> LayerGroup:
    """Kimi delta attention: square state per head; q, k and v each pass a short convolution."""
    return LinearAttention(
        layers=layers,
        heads=heads,
        k_head_dim=head_dim,
        v_head_dim=head_dim,
        state_dtype_bytes=state_dtype_bytes,
        conv_channels=3 * heads * head_dim,
        conv_kernel=kernel,
        conv_dtype_bytes=conv_dtype_bytes,
    )


def _gated_delta_group(
    config: _Config, layers: int, state_dtype_bytes: int, conv_dtype_bytes: int
) -> LayerGroup:
    """Gated delta net: a state per value head; a convolution over q and k (key heads) and v."""
    k_heads, v_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    k_dim, v_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    return LinearAttention(
        layers=layers,
        heads=v_heads,
        k_head_dim=k_dim,
        v_head_dim=v_dim,
        state_dtype_bytes=state_dtype_bytes,
        conv_channels=2 * k_heads * k_dim + v_heads * v_dim,
        conv_kernel=config.count("linear_conv_kernel_dim"),
        conv_dtype_bytes=conv_dtype_bytes,
    )


def _bailing_group(config: _Config, layers: int, state_dtype_bytes: int, conv_dtype_bytes: int) -> LayerGroup:
    """Ling and Ring: KDA where there is a short convolution (3.0), else lightning attention (2.0, 2.5)."""
    heads, head_dim = config.count("num_attention_heads"), _head_dim(config)
    field = "num_kv_heads_for_linear_attn"
    if config.get(field) and config.count(field) != heads:
        raise config.error(field, f"fewer key heads than the {heads} query heads are not supported")
    if config.get("short_conv_kernel_size") is not None:
        kernel = config.count("short_conv_kernel_size")
        return _kda_group(layers, heads, head_dim, kernel, state_dtype_bytes, conv_dtype_bytes)
    hidden = config.get("hidden_size")
    if hidden is not None and hidden != heads * head_dim:
        # A config written anew can carry the rotary size here; the state would come out too small.
        raise config.error(
            "head_dim", f"found {head_dim}, but hidden_size {hidden} / {heads} heads is another size"
        )
    return _lightning_group(config, layers, state_dtype_bytes)


def _lightning_group(config: _Config, layers: int, state_dtype_bytes: int) -> LayerGroup:
    """Lightning attention: square state per query head, no convolution."""
    head_dim = _head_dim(config)
    return LinearAttention(
        layers=layers,
        heads=config.count("num_attention_heads"),
        k_head_dim=head_dim,
        v_head_dim=head_dim,
        state_dtype_bytes=state_dtype_bytes,
    )


def _linear_group(config: _Config, layers: int, state_dtype_bytes: int, conv_dtype_bytes: int) -> LayerGroup:
    if config.get("linear_attn_config") is not None:
        part = config.part("linear_attn_config")
        heads, head_dim = part.count("num_heads"), part.count("head_dim")
        kernel = part.count("short_conv_kernel_size")
        return _kda_group(layers, heads, head_dim, kernel, state_dtype_bytes, conv_dtype_bytes)
    if config.get("linear_num_heads") is not None:  # the same model as transformers writes it
        heads, head_dim = config.count("linear_num_heads"), config.count("linear_head_dim")
        kernel = config.count("linear_conv_kernel_dim")
        return _kda_group(layers, heads, head_dim, kernel, state_dtype_bytes, conv_dtype_bytes)
    if config.get("linear_num_value_heads") is not None:
        return _gated_delta_group(config, layers, state_dtype_bytes, conv_dtype_bytes)
    if config.get("layer_group_size") is not None:
        return _bailing_group(config, layers, state_dtype_bytes, conv_dtype_bytes)
    if str(config.get("model_type")).startswith("minimax"):
        return _lightning_group(config, layers, state_dtype_bytes)
    raise config.error("linear_num_value_heads", f"missing, but {layers} layers are of linear attention")


# The reader -------------------------------------------------------------------------------------------------


def _refuse_unsupported(config: _Config) -> None:
    for field, reason in _UNSUPPORTED_FIELDS.items():
        if config.get(field) not in (None, False, 0, [], {}):
            raise config.error(field, f"not supported: {reason}")
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _UNSUPPORTED_MODEL_TYPES:
        raise config.error(
            "model_type", f"{model_type!r} is not supported: {_UNSUPPORTED_MODEL_TYPES[model_type]}"
        )
    # MiMo states its window a second time as a chunk size; elsewhere it means chunked attention.
    if config.get("attention_chunk_size") and not any(
        config.get(f) for f in ("hybrid_layer_pattern", "layer_types")
    ):
        raise config.error("attention_chunk_size", "not supported: chunked attention without layer_types")


class _Dtypes(NamedTuple):
    """As asked for; none = what the config says."""

    kv_bytes: int | None
    state_bytes: int | None
    conv_bytes: int


def _checked(source: ConfigSource) -> _Config:
    content, where = _read(source)
    config = _Config(content, where)
    _refuse_unsupported(config)
    return config


def _group(config: _Config, kind: str, layers: int, dtypes: _Dtypes) -> LayerGroup:
    """So many layers of a kind."""
    if kind == "linear":
        state = _state_dtype_bytes(config) if dtypes.state_bytes is None else dtypes.state_bytes
        return _linear_group(config, layers, state, dtypes.conv_bytes)
    kv = _kv_dtype_bytes(config) if dtypes.kv_bytes is None else dtypes.kv_bytes
    return _full_group(config, layers, kv) if kind == "full" else _sliding_group(config, layers, kv)


def geometry_from_hf_config(
    source: ConfigSource,
    *,
    kv_dtype_bytes: int | None = None,
    state_dtype_bytes: int | None = None,
    conv_dtype_bytes: int = 2,
) -> AttentionGeometry:
    """Attention geometry of a HuggingFace config.

    Args:
        source: path of a `config.json` (or of the folder it is in), or its content as a mapping.
        kv_dtype_bytes: bytes per cached key or value, whatever the weights are in; none = 1 where the config
            asks for an 8-bit cache (`kv_cache_scheme`), else 2.
        state_dtype_bytes: bytes per value of a recurrent state; none = what the config states as
            `mamba_ssm_dtype`, else 4 (fp32).
        conv_dtype_bytes: bytes per cached input of a short convolution.

    Raises:
        PrfaasError: naming the file and the field that is missing, wrong or not supported.
    """
    config = _checked(source)
    kinds = _layer_kinds(config, config.count("num_hidden_layers"))
    dtypes = _Dtypes(kv_dtype_bytes, state_dtype_bytes, conv_dtype_bytes)
    # in this order in every geometry
    named = [kind for kind in ("full", "sliding", "linear") if kind in kinds]
    return AttentionGeometry(groups=tuple(_group(config, kind, kinds.count(kind), dtypes) for kind in named))


def layers_from_hf_config(
    source: ConfigSource,
    *,
    kv_dtype_bytes: int | None = None,
    state_dtype_bytes: int | None = None,
    conv_dtype_bytes: int = 2,
) -> tuple[LayerGroup, ...]:
    """What each layer keeps, in order: groups of one layer, which add up to `geometry_from_hf_config`.

    Arguments and errors as there.
    """
    config = _checked(source)
    dtypes = _Dtypes(kv_dtype_bytes, state_dtype_bytes, conv_dtype_bytes)
    kinds = _layer_kinds(config, config.count("num_hidden_layers"))
    return tuple(_group(config, kind, 1, dtypes) for kind in kinds)


def kv_layout_from_hf_config(
    source: ConfigSource,
    *,
    kv_dtype_bytes: int | None = None,
    state_dtype_bytes: int | None = None,
    conv_dtype_bytes: int = 2,
) -> KVLayout:
    """Bytes on the wire of a HuggingFace config; arguments and errors as `geometry_from_hf_config`."""
    return geometry_from_hf_config(
        source,
        kv_dtype_bytes=kv_dtype_bytes,
        state_dtype_bytes=state_dtype_bytes,
        conv_dtype_bytes=conv_dtype_bytes,
    ).layout()


def max_input_tokens_from_hf_config(source: ConfigSource) -> int | None:
    """Native limit that a HuggingFace config states, or none."""
    content, where = _read(source)
    config = _Config(content, where)
    fields = ("max_position_embeddings", "model_max_length")
    return config.count(*fields) if any(config.get(f) is not None for f in fields) else None
