import json
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.models import TraceWorkload
from prfaas_env.workload.traces import (
    bundled_traces,
    load_trace,
    read_trace,
    resolve_trace_file,
    slice_span_s,
    spread_stamps,
)

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = TraceWorkload(file="bundled:mooncake_conversation_first_32min.jsonl", format="mooncake")


def _row(timestamp, length, output, ids=None):
    record = {"timestamp": timestamp, "input_length": length, "output_length": output}
    return json.dumps(record if ids is None else record | {"hash_ids": ids}) + "\n"


def _write(tmp_path, text, name="trace.txt"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def _replay(tmp_path, text, trace_format, *, seed=0, **settings):
    limits = {k: settings.pop(k) for k in ("horizon_s", "n_requests") if k in settings}
    _write(tmp_path, text)
    workload = TraceWorkload(file="trace.txt", format=trace_format, **settings)
    return generate_requests(workload, seed=seed, base_dir=tmp_path, **limits)


# --- Azure -------------------------------------------------------------------------------------------


def test_azure_offsets_are_exact_and_gaps_stay(tmp_path):
    text = (
        AZURE_HEADER
        + "2023-11-16 18:17:43.3074770,4808,10\n"
        + "2023-11-16 18:20:07.0417510,3180,8\n"
        + "2023-11-16 20:20:08.0000001+02:00,110,27\n"
        + "2023-11-16T18:20:09Z,5,6"  # no newline at the end
    )
    table = _replay(tmp_path, text, "azure")
    assert table.arrival_ns.tolist() == [0, 143_734_274_000, 144_692_523_100, 145_692_523_000]
    assert table.input_tokens.tolist() == [4808, 3180, 110, 5]
    assert table.output_tokens.tolist() == [10, 8, 27, 6]
    assert table.block_tokens == 0
    assert any("no prefix data" in note for note in table.notes)


def test_azure_columns_are_found_by_name(tmp_path):
    text = (
        "GeneratedTokens,Region,TIMESTAMP,ContextTokens\r\n"
        '7,"east, two",2023-11-16 00:00:01.5,100\r\n'
        "8,west,2023-11-16 00:00:02.25,200\r\n\r\n"
    )
    table = _replay(tmp_path, text, "azure")
    assert table.arrival_ns.tolist() == [0, 750_000_000]
    assert table.input_tokens.tolist() == [100, 200]
    assert table.output_tokens.tolist() == [7, 8]


def test_azure_over_midnight_and_a_leap_day(tmp_path):
    text = (
        AZURE_HEADER + "2024-02-28 23:59:59.9999999,1,1\n2024-02-29 00:00:00,1,1\n2024-03-01 00:00:00,1,1\n"
    )
    assert _replay(tmp_path, text, "azure").arrival_ns.tolist() == [0, 100, 86_400_000_000_100]


def test_whole_azure_files_are_read_as_they_are():
    for name, rows, last_ns in (
        ("azure_llm_2023_conv", 19_366, 3_501_721_937_000),
        ("azure_llm_2023_code", 8_819, 3_435_948_056_000),
    ):
        table = generate_requests(TraceWorkload(file=f"bundled:{name}", format="azure"), seed=0)
        assert len(table) == rows
        assert table.arrival_ns[-1] == last_ns
        assert not any("spread" in note for note in table.notes)
    assert np.diff(table.arrival_ns).max() == 217_168_952_000


# --- Mooncake ----------------------------------------------------------------------------------------


def test_mooncake_by_hand(tmp_path):
    text = _row(0, 600, 5, [0, 1]) + _row(1500, 512, 6, [0]) + _row(2999, 1537, 7, [0, 1, 2, 3])
    table = _replay(tmp_path, text, "mooncake")
    assert table.arrival_ns.tolist() == [0, 1_500_000_000, 2_999_000_000]
    assert table.block_tokens == 512
    assert table.block_offsets.tolist() == [0, 2, 3, 7]
    assert table.block_ids.tolist() == [0, 1, 0, 0, 1, 2, 3]
    assert table.session.tolist() == [-1, -1, -1]
    assert any("blocks of 512 tokens (inferred" in note for note in table.notes)
    assert any("stamps count 0.001 s" in note for note in table.notes)


def test_mooncake_without_prefix_data_says_so(tmp_path):
    table = _replay(tmp_path, _row(0, 600, 5) + _row(1000, 9, 9), "mooncake")
    assert table.block_tokens == 0
    assert table.block_offsets.tolist() == [0, 0, 0]
    assert any("no prefix data" in note for note in table.notes)


def test_unit_and_block_size_as_stated(tmp_path):
    # The same keys with seconds and 16-token blocks, as other tools write them.
    text = _row(0.5, 20, 5, [1, 2]) + _row(2.0000000005, 33, 6, [1, 2, 3])
    table = _replay(tmp_path, text, "mooncake", time_unit_s=1.0, block_tokens=16)
    assert table.arrival_ns.tolist() == [0, 1_500_000_000]  # half-even to whole ns
    assert table.block_tokens == 16
    assert any("stamps count 1 s (as stated" in note for note in table.notes)
    assert any("16 tokens (as stated)" in note for note in table.notes)


def test_block_size_is_inferred_when_the_rows_leave_one_choice(tmp_path):
    text = _row(0, 20, 5, [1, 2]) + _row(1, 33, 6, [1, 2, 3]) + _row(2, 161, 1, list(range(11)))
    assert _replay(tmp_path, text, "mooncake").block_tokens == 16
    # Two ids for 200 tokens: any size from 100 to 199, of which one is a power of two.
    assert _replay(tmp_path, _row(0, 200, 5, [1, 2]), "mooncake").block_tokens == 128
    # One id for 300 tokens says little: the format's own size.
    assert _replay(tmp_path, _row(0, 300, 5, [1]), "mooncake").block_tokens == 512
    with pytest.raises(PrfaasError, match="any size from 134 to 199 tokens; state block_tokens"):
        _replay(tmp_path, _row(0, 400, 5, [1, 2, 3]), "mooncake")


def test_rows_out_of_order_are_sorted_with_their_blocks(tmp_path):
    text = (
        _row(5000, 1025, 1, [0, 1, 2])
        + _row(0, 100, 2, [7])
        + _row(5000, 513, 3, [0, 9])
        + _row(1000, 200, 4, [8])
    )
    table = _replay(tmp_path, text, "mooncake", spread="never", block_tokens=512)
    assert table.arrival_ns.tolist() == [0, 1_000_000_000, 5_000_000_000, 5_000_000_000]
    assert table.output_tokens.tolist() == [2, 4, 1, 3]  # ties keep their order
    rows = [
        table.block_ids[a:b].tolist()
        for a, b in zip(table.block_offsets[:-1], table.block_offsets[1:], strict=True)
    ]
    assert rows == [[7], [8], [0, 1, 2], [0, 9]]
    assert any("not in order of time (2 steps back)" in note for note in table.notes)


def test_long_prompts_are_never_cut(tmp_path):
    table = _replay(tmp_path, _row(0, 200_000, 5) + _row(1000, 10, 1), "mooncake")
    assert table.input_tokens.tolist() == [200_000, 10]


def test_template_tokens_of_the_server(tmp_path):
    text = _row(0, 512, 5, [0]) + _row(1000, 1024, 5, [0, 1])
    assert _replay(tmp_path, text, "mooncake").input_tokens.tolist() == [512, 1024]
    table = _replay(tmp_path, text, "mooncake", extra_input_tokens=18)
    assert table.input_tokens.tolist() == [530, 1042]
    assert any("18 tokens added to every input" in note for note in table.notes)


# --- BurstGPT ----------------------------------------------------------------------------------------

BURST_6 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_8 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_burstgpt_both_headers_by_name(tmp_path):
    six = (
        BURST_6
        + "7,ChatGPT,100,11,111,API log\n7,GPT-4,200,0,200,API log\n"
        + "7,GPT-4,300,13,313,API log\n60,ChatGPT,400,14,414,API log\n"
    )
    table = _replay(tmp_path, six, "burstgpt")
    assert table.arrival_ns.tolist() == [0, 0, 53_000_000_000]
    assert table.input_tokens.tolist() == [100, 300, 400]  # ties in file order, the failed row left out
    assert any("1 rows with 0 input or output tokens: left out" in note for note in table.notes)
    eight = (
        BURST_8
        + "7,s9,1.5,ChatGPT,100,11,111,x\n7.5,s3,2,GPT-4,200,12,212,x\n"
        + "60,s9,1,ChatGPT,300,13,313,x\n61,,1,ChatGPT,1,1,2,x\n"
    )
    table = _replay(tmp_path, eight, "burstgpt")
    assert table.arrival_ns.tolist() == [0, 500_000_000, 53_000_000_000, 54_000_000_000]
    assert table.session.tolist() == [0, 1, 0, -1]
    assert table.output_tokens.tolist() == [11, 12, 13, 1]


# --- rows with no tokens -----------------------------------------------------------------------------

ZERO = AZURE_HEADER + "2023-11-16 00:00:00,0,5\n2023-11-16 00:00:01,5,0\n2023-11-16 00:00:02,7,8\n"


def test_zero_rows_are_dropped_and_counted(tmp_path):
    table = _replay(tmp_path, ZERO, "azure")
    assert table.input_tokens.tolist() == [7]
    assert table.arrival_ns.tolist() == [0]
    assert any(note.startswith("2 rows with 0 input or output tokens: left out") for note in table.notes)


def test_zero_rows_set_to_one(tmp_path):
    table = _replay(tmp_path, ZERO, "azure", zero_tokens="one")
    assert table.input_tokens.tolist() == [1, 5, 7]
    assert table.output_tokens.tolist() == [5, 1, 8]
    assert any(note.startswith("2 rows with 0 input or output tokens: 0 set to 1") for note in table.notes)


def test_zero_rows_refused(tmp_path):
    with pytest.raises(PrfaasError, match=r"trace\.txt:2: 0 input and 5 output tokens; at least 1"):
        _replay(tmp_path, ZERO, "azure", zero_tokens="refuse")


def test_zero_rows_with_blocks_keep_the_other_rows_blocks(tmp_path):
    text = (
        _row(0, 0, 5, [])
        + _row(1000, 600, 5, [3, 4])
        + _row(2000, 5, 0, [9])
        + _row(3000, 1025, 5, [3, 4, 5])
    )
    table = _replay(tmp_path, text, "mooncake", block_tokens=512)
    assert table.input_tokens.tolist() == [600, 1025]
    assert table.block_ids.tolist() == [3, 4, 3, 4, 5]
    assert table.block_offsets.tolist() == [0, 2, 5]
    table = _replay(tmp_path, text, "mooncake", block_tokens=512, zero_tokens="one")
    assert table.block_offsets.tolist() == [0, 0, 2, 3, 6]


def test_a_file_of_zero_rows_only(tmp_path):
    with pytest.raises(PrfaasError, match="no requests in the file"):
        _replay(tmp_path, AZURE_HEADER + "2023-11-16 00:00:00,0,5\n", "azure")


# --- spreading ---------------------------------------------------------------------------------------


def test_mooncake_stamps_are_spread_inside_their_step():
    trace = load_trace(MOONCAKE)
    assert (len(trace), trace.distinct_stamps, trace.typical_step_ns) == (6_151, 641, 3_000_000_000)
    table = generate_requests(MOONCAKE, seed=5)
    assert len(table) == 6_151
    assert np.all(np.diff(table.arrival_ns) > 0)  # no group of equal stamps is left
    offset = table.arrival_ns - trace.stamp_ns
    following = np.append(np.unique(trace.stamp_ns)[1:], trace.stamp_ns[-1] + 3_000_000_000)
    step = following[np.searchsorted(following, trace.stamp_ns, side="right")] - trace.stamp_ns
    assert np.all(offset >= 0)
    assert np.all(offset < step)
    assert np.array_equal(table.input_tokens, trace.input_tokens)  # rows keep their order
    # Uniform over the step: mean 1/2, variance 1/12.
    share = offset / step
    assert share.mean() == pytest.approx(0.5, abs=0.015)
    assert share.var() == pytest.approx(1 / 12, rel=0.03)
    assert any("6,151 rows share 641 distinct stamps" in note for note in table.notes)


def test_spreading_is_reproducible_and_seeded():
    one = generate_requests(MOONCAKE, seed=5)
    again = generate_requests(MOONCAKE, seed=5)
    other = generate_requests(MOONCAKE, seed=6)
    assert np.array_equal(one.arrival_ns, again.arrival_ns)
    assert not np.array_equal(one.arrival_ns, other.arrival_ns)
    assert np.array_equal(one.input_tokens, other.input_tokens)


def test_never_and_always(tmp_path):
    raw = generate_requests(MOONCAKE.model_copy(update={"spread": "never"}), seed=5)
    assert np.array_equal(raw.arrival_ns, load_trace(MOONCAKE).stamp_ns)
    assert not any("spread" in note for note in raw.notes)
    text = BURST_6 + "".join(f"{t},m,5,5,10,x\n" for t in (0, 1, 1, 2, 3))
    kept = _replay(tmp_path, text, "burstgpt")  # 4 of 5 are distinct: auto leaves them
    assert kept.arrival_ns.tolist() == [0, 10**9, 10**9, 2 * 10**9, 3 * 10**9]
    spread = _replay(tmp_path, text, "burstgpt", spread="always")
    assert np.all(np.diff(spread.arrival_ns) > 0)
    assert (spread.arrival_ns // 10**9).tolist() == [0, 1, 1, 2, 3]


def test_auto_spreads_below_half_distinct_only(tmp_path):
    half = BURST_6 + "".join(f"{t},m,5,5,10,x\n" for t in (0, 0, 1, 1))
    assert _replay(tmp_path, half, "burstgpt").arrival_ns.tolist() == [0, 0, 10**9, 10**9]
    below = half + "1,m,5,5,10,x\n"
    assert len(np.unique(_replay(tmp_path, below, "burstgpt").arrival_ns)) == 5


@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=15),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_laws_of_spreading(groups, seed):
    stamps = np.cumsum([step * 10**9 for step, _ in groups])
    stamp_ns = np.repeat(stamps, [count for _, count in groups]).astype(np.int64)
    typical = int(np.median(np.diff(stamps))) if len(stamps) > 1 else 10**9
    spread = spread_stamps(stamp_ns, typical, np.random.default_rng(seed))
    assert np.all(np.diff(spread) >= 0)
    assert np.all(spread >= stamp_ns)
    # Never past the next stamp, and never far into an empty stretch.
    assert np.all(spread - stamp_ns < 1.5 * typical + 1)
    for here, following in pairwise(stamps):
        assert spread[stamp_ns == here].max() < following


# --- slice, speed, limits ----------------------------------------------------------------------------


def test_slice_and_speed(tmp_path):
    text = AZURE_HEADER + "".join(f"2023-11-16 00:00:{s:02d},{s + 1},{s + 1}\n" for s in range(10))
    table = _replay(tmp_path, text, "azure", start_s=2.0, end_s=6.0)
    assert table.input_tokens.tolist() == [3, 4, 5, 6]  # 6 s itself is outside
    assert table.arrival_ns.tolist() == [0, 10**9, 2 * 10**9, 3 * 10**9]
    fast = _replay(tmp_path, text, "azure", start_s=1.5, speed=3.0)
    assert fast.input_tokens.tolist() == list(range(3, 11))
    assert fast.arrival_ns[:3].tolist() == [166_666_667, 500_000_000, 833_333_333]
    assert any("3 times as fast" in note for note in fast.notes)
    # A horizon counts replayed time: 1 s at three times the speed is trace time 1.5 s to 4.5 s.
    assert _replay(tmp_path, text, "azure", start_s=1.5, speed=3.0, horizon_s=1.0).input_tokens.tolist() == [
        3,
        4,
        5,
    ]
    assert _replay(tmp_path, text, "azure", start_s=2.0, n_requests=2).input_tokens.tolist() == [3, 4]


def test_slice_of_a_prefix_trace_cuts_the_blocks_too():
    whole = generate_requests(MOONCAKE, seed=9)
    part = generate_requests(MOONCAKE.model_copy(update={"start_s": 600.0, "end_s": 900.0}), seed=9)
    inside = (whole.arrival_ns >= 600 * 10**9) & (whole.arrival_ns < 900 * 10**9)
    assert np.array_equal(part.arrival_ns, whole.arrival_ns[inside] - 600 * 10**9)
    assert np.array_equal(part.input_tokens, whole.input_tokens[inside])
    first = int(np.flatnonzero(inside)[0])
    for k in (0, 17, len(part) - 1):
        mine = part.block_ids[part.block_offsets[k] : part.block_offsets[k + 1]]
        theirs = whole.block_ids[whole.block_offsets[first + k] : whole.block_offsets[first + k + 1]]
        assert np.array_equal(mine, theirs)
        assert len(mine) == -(-part.input_tokens[k] // 512)


def test_slice_in_a_quiet_gap_is_an_empty_table(tmp_path):
    text = AZURE_HEADER + "2023-11-16 00:00:00,1,1\n2023-11-16 00:10:00,1,1\n"
    assert len(_replay(tmp_path, text, "azure", start_s=10.0, end_s=20.0)) == 0
    with pytest.raises(PrfaasError, match=r"start_s is 601; the trace trace\.txt ends at 600 s"):
        _replay(tmp_path, text, "azure", start_s=601.0)


def test_span_ends_with_the_trace():
    assert slice_span_s(load_trace(MOONCAKE), MOONCAKE) == pytest.approx(1_922.999)
    later = MOONCAKE.model_copy(update={"start_s": 900.0, "end_s": 5_000.0})
    assert slice_span_s(load_trace(later), later) == pytest.approx(1_022.999)


def test_limits(tmp_path):
    text = AZURE_HEADER + "2023-11-16 00:00:00,1,1\n2023-11-16 00:10:00,1,1\n"
    with pytest.raises(PrfaasError, match=r"n_requests is 3; the slice of trace\.txt holds 2 requests"):
        _replay(tmp_path, text, "azure", n_requests=3)
    with pytest.raises(PrfaasError, match="not both"):
        _replay(tmp_path, text, "azure", n_requests=1, horizon_s=1.0)
    with pytest.raises(PrfaasError, match="horizon_s is -1"):
        _replay(tmp_path, text, "azure", horizon_s=-1.0)


# --- files -------------------------------------------------------------------------------------------


def test_bundled_names():
    assert bundled_traces() == (
        "azure_llm_2023_code",
        "azure_llm_2023_conv",
        "mooncake_conversation_first_32min",
    )
    for name in bundled_traces():
        assert resolve_trace_file(f"bundled:{name}").is_file()
    assert resolve_trace_file("bundled:azure_llm_2023_code.csv").name == "azure_llm_2023_code.csv"
    for bad in ("bundled:nothing", "bundled:", "bundled:../models.py", "bundled:README.md"):
        with pytest.raises(PrfaasError, match="no bundled trace"):
            resolve_trace_file(bad)


def test_relative_and_absolute_paths(tmp_path, monkeypatch):
    path = _write(tmp_path, ZERO)
    assert resolve_trace_file("trace.txt", tmp_path) == path
    assert resolve_trace_file(str(path), tmp_path / "elsewhere") == path
    monkeypatch.chdir(tmp_path)
    assert resolve_trace_file("trace.txt").samefile(path)
    with pytest.raises(PrfaasError, match="no such trace file"):
        resolve_trace_file("other.txt", tmp_path)
    with pytest.raises(PrfaasError, match="is not a file"):
        resolve_trace_file(".", tmp_path)


def test_the_file_is_parsed_once_until_it_changes(tmp_path):
    path = _write(tmp_path, ZERO)
    one = read_trace(path, "azure")
    assert read_trace(path, "azure") is one
    assert read_trace(path, "azure", zero_tokens="one") is not one
    path.write_text(ZERO + "2023-11-16 00:00:03,9,9\n")
    assert len(read_trace(path, "azure")) == 2
    # Same size, other content: told by the time of change.
    path.write_text(ZERO + "2023-11-16 00:00:03,4,4\n")
    os.utime(path, ns=(0, 1))
    assert read_trace(path, "azure").input_tokens.tolist() == [7, 4]


def test_a_table_does_not_share_memory_with_the_kept_trace():
    table = generate_requests(MOONCAKE, seed=0)
    for name in ("arrival_ns", "input_tokens", "output_tokens", "session", "block_offsets", "block_ids"):
        getattr(table, name)[:] = 0
    assert generate_requests(MOONCAKE, seed=0).input_tokens[0] == 6_758
    with pytest.raises(ValueError, match="read-only"):
        load_trace(MOONCAKE).input_tokens[0] = 1


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "azure", "time_unit_s": 1.0}, "time_unit_s does not apply to format azure"),
        ({"format": "azure", "block_tokens": 16}, "block_tokens does not apply to format azure"),
        ({"format": "burstgpt", "block_tokens": 16}, "block_tokens does not apply to format burstgpt"),
        ({"format": "mooncake", "start_s": 5, "end_s": 5}, "end_s 5.0 must exceed start_s 5.0"),
        ({"format": "mooncake", "speed": 0}, "speed"),
        ({"format": "parquet"}, "format"),
        ({"format": "azure", "zero_token": "drop"}, "zero_token"),
    ],
)
def test_settings_that_do_nothing_or_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        TraceWorkload(file="x", **settings)
