import json

import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.inspect import infinite_cache_hits, inspect_trace
from prfaas_env.workload.models import TraceWorkload

# Counted independently over the same files: p10, p50, p90, p95, p99, mean, max.
PUBLISHED = {
    ("mooncake_conversation_first_32min", "input_tokens"): (
        965,
        7_545,
        28_564,
        41_781,
        91_849,
        12_782,
        124_847,
    ),
    ("mooncake_conversation_first_32min", "output_tokens"): (24, 356, 607, 703, 1_128, 347, 2_000),
    ("azure_llm_2023_conv", "input_tokens"): (207, 1_020, 2_735, 4_083, 4_142, 1_155, 14_050),
    ("azure_llm_2023_conv", "output_tokens"): (54, 129, 424, 451, 601, 211, 1_000),
    ("azure_llm_2023_code", "input_tokens"): (147, 1_469, 5_188, 7_303, 7_436, 2_048, 7_437),
    ("azure_llm_2023_code", "output_tokens"): (7, 13, 55, 90, 252, 28, 1_899),
}
UNCACHED = (389, 3_220, 20_604, 31_616, 80_934, 8_301, 124_335)
# Threshold on the uncached length: share of requests, share of tokens.
UNCACHED_ABOVE = {
    2_000: (0.541, 0.962),
    8_000: (0.303, 0.824),
    19_400: (0.110, 0.530),
    32_000: (0.049, 0.350),
}


def _figures(q):
    return (q.p10, q.p50, q.p90, q.p95, q.p99, q.mean, q.max)


@pytest.mark.parametrize(("name", "field"), PUBLISHED, ids=lambda v: v)
def test_quantiles_of_the_bundled_traces(name, field):
    found = _figures(getattr(inspect_trace(f"bundled:{name}"), field))
    assert found == pytest.approx(PUBLISHED[name, field], abs=1.0)


def test_mooncake_rates_and_prefixes():
    s = inspect_trace("bundled:mooncake_conversation_first_32min")
    assert (s.format, s.requests, s.zero_rows) == ("mooncake", 6_151, 0)
    assert s.span_s == pytest.approx(1_919.999)
    assert s.mean_rate_rps == pytest.approx(3.204, abs=1e-3)
    assert s.distinct_stamp_share == pytest.approx(641 / 6_151)
    assert s.share_above == pytest.approx(0.1905, abs=1e-4)
    # After spreading the arrivals are about Poisson; the raw stamps come in lumps of ten.
    assert s.interarrival_cv == pytest.approx(1.0, abs=0.05)
    assert s.count_10s_mean == pytest.approx(32.0, abs=0.2)
    assert s.count_10s_variance_to_mean < 2.0
    assert s.prefix.block_tokens == 512
    assert s.prefix.hit_tokens_share == pytest.approx(0.351, abs=5e-4)
    assert s.prefix.share_over_one_block == pytest.approx(0.357, abs=5e-4)
    assert _figures(s.prefix.uncached_tokens) == pytest.approx(UNCACHED, abs=1.0)
    assert any("spread" in note for note in s.notes)


@pytest.mark.parametrize("threshold", UNCACHED_ABOVE)
def test_mooncake_above_a_threshold(threshold):
    prefix = inspect_trace(
        "bundled:mooncake_conversation_first_32min", "mooncake", threshold_tokens=threshold
    ).prefix
    found = (prefix.uncached_share_above, prefix.uncached_tokens_share_above)
    assert found == pytest.approx(UNCACHED_ABOVE[threshold], abs=6e-4)


@pytest.mark.parametrize(
    ("name", "requests", "span_s", "gap_s", "counts"),
    [
        ("azure_llm_2023_code", 8_819, 3_435.948, 217.169, (26, 327, 72)),
        ("azure_llm_2023_conv", 19_366, 3_501.722, 4.315, (55, 98, 3.9)),
    ],
)
def test_azure(name, requests, span_s, gap_s, counts):
    s = inspect_trace(f"bundled:{name}")
    assert (s.format, s.requests) == ("azure", requests)
    assert s.span_s == pytest.approx(span_s, abs=1e-3)
    assert s.mean_rate_rps == pytest.approx(requests / span_s, rel=1e-6)
    assert s.longest_gap_s == pytest.approx(gap_s, abs=1e-3)
    # Nothing is ever above the paper's threshold here.
    assert (s.share_above, s.tokens_share_above) == (0.0, 0.0)
    mean, largest, ratio = counts
    assert s.count_10s_mean == pytest.approx(mean, abs=0.5)
    assert s.count_10s_max == largest
    assert s.count_10s_variance_to_mean == pytest.approx(ratio, rel=0.02)
    assert s.prefix is None
    assert s.distinct_stamp_share == 1.0


def _row(timestamp, length, ids):
    return (
        json.dumps({"timestamp": timestamp, "input_length": length, "output_length": 1, "hash_ids": ids})
        + "\n"
    )


def test_hits_of_a_session_count_the_new_part_only(tmp_path):
    # Three turns of 200 + 50 + 60 new tokens, blocks of 10, then a stranger and a partial repeat.
    text = (
        _row(0, 200, list(range(20)))
        + _row(1, 250, list(range(25)))
        + _row(2, 310, list(range(31)))
        + _row(3, 30, [5, 6, 7])
        + _row(4, 25, [0, 1, 2])
    )
    (tmp_path / "t.jsonl").write_text(text)
    table = generate_requests(
        TraceWorkload(file="t.jsonl", format="mooncake", block_tokens=10), seed=0, base_dir=tmp_path
    )
    blocks, tokens = infinite_cache_hits(table)
    # The stranger's ids were seen, but not behind the same run; the repeat ends inside its last block.
    assert blocks.tolist() == [0, 20, 25, 0, 3]
    assert tokens.tolist() == [0, 200, 250, 0, 25]
    assert (table.input_tokens - tokens).tolist() == [200, 50, 60, 30, 0]


def test_a_trace_without_ids_is_labelled(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 00:00:00,200,1\n2023-11-16 00:00:01,250,1\n"
    (tmp_path / "t.csv").write_text(text)
    s = inspect_trace("t.csv", base_dir=tmp_path)
    assert s.prefix is None
    assert any("no prefix data" in note for note in s.notes)


def test_one_request_has_no_gaps(tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 00:00:00,20000,1\n")
    s = inspect_trace("t.csv", base_dir=tmp_path)
    assert (s.span_s, s.mean_rate_rps, s.longest_gap_s) == (0.0, 0.0, 0.0)
    assert s.interarrival_cv is None
    assert s.count_10s_mean is None
    assert (s.share_above, s.tokens_share_above) == (1.0, 1.0)
    json.dumps(s.to_dict(), allow_nan=False)


def test_even_arrivals_have_no_variation(tmp_path):
    rows = "".join(f"2023-11-16 00:00:{t:02d},5,1\n" for t in range(0, 60, 2))
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    s = inspect_trace("t.csv", base_dir=tmp_path)
    assert s.interarrival_cv == pytest.approx(0.0)
    assert (s.count_10s_mean, s.count_10s_max, s.count_10s_variance_to_mean) == (5.0, 5, 0.0)


def test_unknown_formats_and_useless_settings_are_told(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        PrfaasError, match=r"t\.csv:1: cannot tell the format .* state one of mooncake, azure"
    ):
        inspect_trace("t.csv", base_dir=tmp_path)
    with pytest.raises(PrfaasError, match="time_unit_s does not apply to format azure"):
        inspect_trace("bundled:azure_llm_2023_code", time_unit_s=1.0)


def test_hits_of_an_empty_table():
    table = generate_requests(
        TraceWorkload(file="bundled:mooncake_conversation_first_32min", format="mooncake"),
        seed=0,
        n_requests=0,
    )
    blocks, tokens = infinite_cache_hits(table)
    assert blocks.shape == tokens.shape == (0,)
    assert blocks.dtype == np.int64
