"""The catalogue against hand-computed bytes and the published figures of the paper."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.catalogue import (
    CatalogueEntry,
    KvRateTable,
    load_entry,
    load_model,
    model_from_hf_config,
    model_names,
)
from prfaas_env.profiles.kv import KVLayout

MIB = 2**20

#: name: (layers, bytes per token, fixed bytes, window groups), multiplied out from the heads and sizes.
BYTES = {
    # 7 MLA x (512 + 64) x 2; 20 KDA x (32 x 128 x 128 x 4 + 3 x 32 x 128 x 3 x 2)
    "kimi-linear-48b-a3b": (27, 8_064, 20 * (2_097_152 + 73_728), ()),
    # 12 x 2 heads x 512 x 2; 36 x (32 x 128 x 128 x 4 + (2 x 16 + 32) x 128 x 3 x 2)
    "qwen3-next-80b-a3b": (48, 24_576, 36 * (2_097_152 + 49_152), ()),
    # 15 x 2 heads x 512 x 2; 45 x (64 x 128 x 128 x 4 + (2 x 16 + 64) x 128 x 3 x 2)
    "qwen3.5-397b-a17b": (60, 30_720, 45 * (4_194_304 + 73_728), ()),
    # 9 x 4 heads x 320 x 2; 39 x 8 heads x 320 x 2 for the last 128 tokens
    "mimo-v2-flash": (48, 23_040, 0, ((128, 199_680),)),
    # 10 MLA x 576 x 2; 70 x 64 x 128 x 128 x 4
    "ring-2.5-1t": (80, 11_520, 293_601_280, ()),
    # 62 x 8 heads x 256 x 2
    "minimax-m2.5": (62, 253_952, 0, ()),
    # 94 x 4 heads x 256 x 2
    "qwen3-235b-a22b": (94, 192_512, 0, ()),
    # 173.93 MiB; 15 MLA x 576 x 2
    "prfaas-1t": (57, 17_280, 182_378_824, ()),
}

#: Published KV rates in Gbps at 1K, 8K, 32K, 128K (paper table 3).
RATES_GBPS = {
    "kimi-linear-48b-a3b": (1.19, 2.29, 3.87, 4.88),
    "mimo-v2-flash": (0.82, 2.85, 4.66, 4.71),
    "qwen3.5-397b-a17b": (4.13, 6.28, 8.25, 7.47),
    "ring-2.5-1t": (7.27, 4.47, 2.59, 1.46),
    "minimax-m2.5": (4.94, 32.87, 59.93, 47.82),
    "qwen3-235b-a22b": (4.12, 22.42, 33.35, 21.50),
}
LENGTHS = (1_024, 8_192, 32_000, 130_000)


def kv_rate_gbps(name: str, tokens: int, hardware: str = "h200") -> float:
    model = load_model(name)
    return model.kv.transfer_bytes(tokens) * 8 / model.hardware[hardware].prefill.seconds(tokens) / 1e9


def test_the_catalogue_is_complete() -> None:
    assert model_names() == tuple(sorted(BYTES))


@pytest.mark.parametrize("name", sorted(BYTES))
def test_bytes_by_hand(name: str) -> None:
    model = load_model(name)
    layers, per_token, fixed, windows = BYTES[name]
    assert model.name == name
    assert model.kv.n_layers == layers
    assert model.kv.bytes_per_token == per_token
    assert model.kv.fixed_bytes == fixed
    assert tuple((w.window_tokens, w.bytes_per_token) for w in model.kv.windows) == windows


@pytest.mark.parametrize("name", sorted(set(BYTES) - {"prfaas-1t"}))
def test_bytes_come_from_geometry(name: str) -> None:
    entry = load_entry(name)
    assert entry.kv is None
    assert sum(group.layers for group in entry.attention) == BYTES[name][0]


def test_every_figure_has_a_source() -> None:
    for name in model_names():
        model = load_model(name)
        assert model.kv_source
        for hardware in model.hardware.values():
            assert any(word in hardware.prefill.source for word in ("Published", "Derived", "Back-solved"))
            assert hardware.decode is None or "Back-solved" in hardware.decode.source


def test_an_independent_tool_finds_the_same_sizes() -> None:
    """30,720 B per token and a 94 MB state in bf16; 23,040 B per token and 26 MB of windows."""
    qwen = load_model("qwen3.5-397b-a17b").kv
    state_bf16 = sum(
        group.model_copy(update={"state_dtype_bytes": 2, "conv_channels": 0}).fixed_bytes
        for group in load_entry("qwen3.5-397b-a17b").attention
        if group.kind == "linear"
    )
    assert state_bf16 / 1e6 == pytest.approx(94, abs=0.5)
    # Its prefill times give its KV rates of 16.5, 11.9, 9.3 and 7.7 Gbps with these bytes.
    for tokens, seconds, gbps in (
        (1_024, 0.061, 16.5),
        (8_192, 0.232, 11.9),
        (32_768, 0.944, 9.3),
        (131_072, 4.277, 7.7),
    ):
        sent = qwen.model_copy(update={"fixed_bytes": state_bf16}).transfer_bytes(tokens)
        assert sent * 8 / seconds / 1e9 == pytest.approx(gbps, abs=0.06)
    mimo = load_model("mimo-v2-flash").kv
    assert (mimo.transfer_bytes(128) - 128 * mimo.bytes_per_token) / 1e6 == pytest.approx(26, abs=0.5)
    assert mimo.transfer_bytes(32_768) * 8 / 0.569 / 1e9 == pytest.approx(11.0, abs=0.06)


# The internal 1T model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "mib"), [(1_024, 190.8), (8_192, 308.9), (32_000, 701.3), (130_000, 2_316.3)]
)
def test_published_kv_sizes(tokens: int, mib: float) -> None:
    assert load_model("prfaas-1t").kv.transfer_bytes(tokens) / MIB == pytest.approx(mib, abs=0.05)


def test_the_inferred_geometry_is_close_to_the_fixed_part() -> None:
    """42 KDA layers of 64 heads in fp32 with their convolutions: 173.91 MiB against 173.93."""
    layer_bytes = 64 * 128 * 128 * 4 + 3 * 64 * 128 * 3 * 2
    assert 42 * layer_bytes / MIB == pytest.approx(load_model("prfaas-1t").kv.fixed_bytes / MIB, abs=0.03)


@pytest.mark.parametrize(
    ("tokens", "gbit", "fixed_share"),
    [
        (1_024, 1.60, 0.91),
        (8_192, 2.59, 0.56),
        (19_400, 4.14, 0.35),
        (27_486, 5.26, 0.28),
        (45_046, 7.69, 0.19),
        (62_410, 10.09, 0.14),
        (131_072, 19.58, 0.075),
    ],
)
def test_kv_sizes_along_the_length_law(tokens: int, gbit: float, fixed_share: float) -> None:
    kv = load_model("prfaas-1t").kv
    assert kv.transfer_bytes(tokens) * 8 / 1e9 == pytest.approx(gbit, abs=0.0051)
    assert kv.fixed_bytes / kv.transfer_bytes(tokens) == pytest.approx(fixed_share, abs=0.0051)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        (1_024, 0.44),
        (8_192, 0.72),
        (27_486, 4 / 2.45),
        (32_000, 1.84),
        (45_046, 4 / 1.61),
        (62_410, 3.51),
        (130_000, 7.40),
    ],
)
def test_h200_prefill_times(tokens: int, seconds: float) -> None:
    assert load_model("prfaas-1t").hardware["h200"].prefill.seconds(tokens) == pytest.approx(
        seconds, abs=0.001
    )


@pytest.mark.parametrize(("tokens", "gbps"), [(1_024, 3.61), (8_192, 3.59), (32_000, 3.19), (130_000, 2.62)])
def test_published_kv_rates_of_the_1t_model(tokens: int, gbps: float) -> None:
    # T is printed with two digits after the point: 0.44 alone leaves 1.2% open.
    assert kv_rate_gbps("prfaas-1t", tokens) == pytest.approx(gbps, rel=0.012)


@pytest.mark.parametrize(("tokens", "seconds"), [(10_224, 3 / 1.64), (27_486, 9 / 2.11), (62_410, 9.73)])
def test_h20_prefill_goes_through_the_back_solved_points(tokens: int, seconds: float) -> None:
    assert load_model("prfaas-1t").hardware["h20"].prefill.seconds(tokens) == pytest.approx(
        seconds, abs=0.001
    )


@pytest.mark.parametrize(
    ("tokens", "ratio"),
    [(1_024, 1.37), (8_192, 2.16), (10_224, 2.24), (27_486, 2.61), (45_046, 2.79), (62_410, 2.77)],
)
def test_ratio_of_h20_and_h200(tokens: int, ratio: float) -> None:
    hardware = load_model("prfaas-1t").hardware
    found = hardware["h20"].prefill.seconds(tokens) / hardware["h200"].prefill.seconds(tokens)
    assert found == pytest.approx(ratio, abs=0.0051)


def test_mean_h20_prefill_meets_the_published_mean_ttft() -> None:
    """Not used in the fit: the mean over the truncated log-normal is 4.447 s, published 4.44 s."""
    z = np.linspace((np.log(128) - 9.9), (np.log(131_072) - 9.9), 20_001)
    weight = np.exp(-(z**2) / 2)
    seconds = load_model("prfaas-1t").hardware["h20"].prefill.seconds_array(np.exp(z + 9.9))
    assert (weight * seconds).sum() / weight.sum() == pytest.approx(4.447, abs=0.005)


def test_decode_of_the_1t_model() -> None:
    hardware = load_model("prfaas-1t").hardware
    assert hardware["h200"].decode is None
    decode = hardware["h20"].decode
    assert decode is not None
    # 20 slots / (25 ms x 1,024 tokens) per instance; 3, 5 and 8 instances give the published rates.
    rate_rps = decode.slots / (decode.a_s * 1024)
    assert rate_rps == pytest.approx(0.78125)
    for instances, published in ((3, 2.35), (5, 3.91), (8, 6.25)):
        assert instances * rate_rps == pytest.approx(published, abs=0.0075)
    assert decode.b_s_per_sequence == decode.c_s_per_token == 0


# The models of table 3 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RATES_GBPS))
def test_derived_prefill_times_give_back_the_published_rates(name: str) -> None:
    prefill = load_model(name).hardware["h200"].prefill
    assert prefill.kind == "table"
    assert prefill.tokens == LENGTHS
    assert np.all(np.diff(prefill.seconds_at) > 0)
    for tokens, gbps in zip(LENGTHS, RATES_GBPS[name], strict=True):
        assert kv_rate_gbps(name, tokens) == pytest.approx(gbps, rel=1e-9)
    assert load_model(name).hardware["h200"].decode is None


def test_derived_prefill_times_meet_what_is_known_otherwise() -> None:
    # Read off the paper's figure 2: about 5.5 s for MiniMax at 128K.
    assert load_model("minimax-m2.5").hardware["h200"].prefill.seconds(130_000) == pytest.approx(
        5.5, abs=0.05
    )
    # An independent latency model: 4.277 s for Qwen3.5 at 131,072 tokens, 0.944 s at 32,768.
    qwen = load_model("qwen3.5-397b-a17b").hardware["h200"].prefill
    assert qwen.seconds(131_072) == pytest.approx(4.277, rel=0.07)
    assert qwen.seconds(32_768) == pytest.approx(0.944, rel=0.25)


@pytest.mark.parametrize(
    ("name", "gpus", "tokens", "gbps"),
    [
        ("minimax-m2.5", 512, 32_000, 3_836),
        ("qwen3-235b-a22b", 512, 32_000, 2_134),
        ("ring-2.5-1t", 512, 32_000, 165.8),
        ("ring-2.5-1t", 512, 130_000, 93.4),
        ("ring-2.5-1t", 10_000, 130_000, 1_825),
    ],
)
def test_link_demand_of_whole_clusters(name: str, gpus: int, tokens: int, gbps: float) -> None:
    """Section 2.3: instances times KV rate; the 1.8 Tbps of 10,000 GPUs is the value at 128K."""
    instances = gpus / load_model(name).hardware["h200"].gpus
    assert instances * kv_rate_gbps(name, tokens) == pytest.approx(gbps, rel=1e-3)


def test_published_ratios_between_models() -> None:
    assert kv_rate_gbps("minimax-m2.5", 32_000) / kv_rate_gbps("mimo-v2-flash", 32_000) == pytest.approx(
        13, abs=0.5
    )
    assert kv_rate_gbps("qwen3-235b-a22b", 32_000) / kv_rate_gbps(
        "qwen3.5-397b-a17b", 32_000
    ) == pytest.approx(4, abs=0.5)


def test_native_limits() -> None:
    limits = {name: load_model(name).max_input_tokens for name in model_names()}
    assert limits == {
        "kimi-linear-48b-a3b": 1_048_576,
        "mimo-v2-flash": 262_144,
        "minimax-m2.5": 196_608,
        "prfaas-1t": None,
        "qwen3-235b-a22b": 40_960,
        "qwen3-next-80b-a3b": 262_144,
        "qwen3.5-397b-a17b": 262_144,
        "ring-2.5-1t": 131_072,
    }


# Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prfaas", "", "../data/prfaas-1t", "prfaas-1t.yaml"])
def test_an_unknown_model_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown model .*; known: kimi-linear-48b-a3b, .*, ring-2\.5-1t"):
        load_model(name)


def test_rates_that_mean_falling_times_are_refused() -> None:
    table = KvRateTable(tokens=(1_000, 2_000), kv_rate_gbps=(1.0, 10.0), source="test")
    with pytest.raises(ValidationError, match="must not fall"):
        table.prefill(KVLayout(fixed_bytes=0, bytes_per_token=1_000, n_layers=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_rate_gbps": (1.0, 2.0, 3.0)}, "2 tokens but 3"),
        ({"kv_rate_gbps": (1.0, 0.0)}, "above 0"),
    ],
)
def test_bad_rates_are_refused(changes: dict[str, object], message: str) -> None:
    content = {"tokens": (1_000, 2_000), "kv_rate_gbps": (1.0, 1.0), "source": "test"} | changes
    with pytest.raises(ValidationError, match=message):
        KvRateTable.model_validate(content)


def test_an_entry_has_either_geometry_or_bytes() -> None:
    kv = {"fixed_bytes": 0, "bytes_per_token": 1, "n_layers": 1}
    group = {"kind": "full", "layers": 1, "kv_heads": 1, "k_head_dim": 1, "v_head_dim": 1}
    for content in ({}, {"kv": kv, "attention": [group]}):
        with pytest.raises(ValidationError, match="give either attention or kv"):
            CatalogueEntry.model_validate({"name": "x", "kv_source": "test"} | content)


def test_model_from_hf_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(
        '{"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 4096}'
    )
    model = model_from_hf_config(path)
    assert model.name == "my-model"
    assert model == model_from_hf_config(folder)
    assert model_from_hf_config(path, name="other").name == "other"
    assert model.kv == KVLayout(fixed_bytes=0, bytes_per_token=2 * 3 * 8 * 2, n_layers=2)
    assert model.hardware == {}
    assert model.max_input_tokens == 4_096
    with pytest.raises(PrfaasError, match=r"nothing\.json: cannot be read: No such file"):
        model_from_hf_config(folder / "nothing.json")
