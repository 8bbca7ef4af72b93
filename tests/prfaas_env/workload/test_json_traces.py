"""Bailian and vLLM traces, and files of the one format read as another."""

import json

import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.workload.formats import sniff_format
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.inspect import infinite_cache_hits, inspect_trace
from prfaas_env.workload.models import TraceWorkload
from prfaas_env.workload.traces import read_trace, resolve_trace_file

S = 1_000_000_000
MOONCAKE = "bundled:mooncake_conversation_first_32min"


def _chat(chat, parent, stamp, length, turn, ids, output=10):
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": stamp,
        "input_length": length,
        "output_length": output,
        "type": "text",
        "turn": turn,
        "hash_ids": ids,
    }


#: Two sessions: 159 <- 55 <- 7, and 8; 20 goes on from a chat before the file.
CHATS = [
    _chat(7, -1, 0.25, 20, 1, [1, 2]),
    _chat(8, -1, 1.0, 16, 1, [9]),
    _chat(20, 3, 2.0, 40, 4, [5, 6, 7]),
    _chat(55, 7, 3.114, 40, 2, [1, 3, 4]),
    _chat(159, 55, 61.1140001, 50, 3, [1, 3, 10, 11]),
]


def _write(tmp_path, rows, name="t.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / name


def _table(tmp_path, rows, trace_format, **settings):
    _write(tmp_path, rows)
    workload = TraceWorkload(file="t.jsonl", format=trace_format, **settings)
    return generate_requests(workload, seed=0, base_dir=tmp_path)


def _warnings(notes):
    return [note for note in notes if note.startswith("WARNING: ")]


# ------------------------------------------------------------------ Bailian


def test_bailian_by_hand(tmp_path):
    table = _table(tmp_path, CHATS, "bailian")
    assert table.arrival_ns.tolist() == [0, 750_000_000, 1_750_000_000, 2_864_000_000, 60_864_000_100]
    assert table.input_tokens.tolist() == [20, 16, 40, 40, 50]
    assert table.session.tolist() == [0, 1, 2, 0, 0]
    assert table.block_tokens == 16
    assert table.block_ids.tolist() == [1, 2, 9, 5, 6, 7, 1, 3, 4, 1, 3, 10, 11]
    assert any("prefix blocks of 16 tokens (as bailian has them)" in note for note in table.notes)
    assert any("stamps count 1 s (the unit of the format" in note for note in table.notes)
    assert "1 rows go on from a chat that is not in the file: each begins a session" in table.notes
    assert not _warnings(table.notes)
    _, cached = infinite_cache_hits(table)
    assert cached.tolist() == [0, 0, 0, 16, 32]


def test_three_turns_of_one_chain(tmp_path):
    """200 + 50 + 60 new tokens: with ids only what is new is new; without ids the run says so."""
    ids = [*range(12), 100], [*range(15), 101], [*range(19), 102]
    rows = [
        _chat(k, k - 1, 10.0 * k, n, k + 1, i)
        for k, (n, i) in enumerate(zip((200, 250, 310), ids, strict=True))
    ]
    table = _table(tmp_path, rows, "bailian")
    _, cached = infinite_cache_hits(table)
    assert cached.tolist() == [0, 192, 240]
    assert table.session.tolist() == [0, 0, 0]
    for row in rows:
        del row["hash_ids"]
    table = _table(tmp_path, rows, "bailian")
    assert "no prefix data: every prompt counts as new" in table.notes
    assert table.session.tolist() == [0, 0, 0]
    assert not table.cached_tokens.any()
    hit_rate = {"share": 1.0, "cached_fraction": {"kind": "fixed", "fraction": 0.8}}
    assert _table(tmp_path, rows, "bailian", hit_rate=hit_rate).cached_tokens.tolist() == [160, 200, 248]


def test_parents_after_their_children_and_rows_without_tokens(tmp_path):
    rows = [CHATS[4], CHATS[3], CHATS[0], CHATS[1] | {"output_length": 0}]
    table = _table(tmp_path, rows, "bailian")
    assert table.input_tokens.tolist() == [20, 40, 50]
    assert table.session.tolist() == [0, 0, 0]  # the chain holds, in whatever order
    # A chain goes on through a row that was left out.
    table = _table(tmp_path, [CHATS[0], CHATS[3] | {"output_length": 0}, CHATS[4]], "bailian")
    assert table.session.tolist() == [0, 0]


def test_turns_that_do_not_follow_are_told(tmp_path):
    table = _table(tmp_path, [CHATS[0], CHATS[3] | {"turn": 5}], "bailian")
    assert any(
        note.startswith("1 rows whose turn is not one more than their parent's") for note in table.notes
    )


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (2, {"chat_id": 7}, ":2: chat_id 7 is that of line 1 too"),
        (2, {"chat_id": "8"}, ":2: chat_id is '8'; a whole 64-bit number is allowed"),
        (2, {"parent_chat_id": None}, ":2: parent_chat_id is 'None'; a whole 64-bit"),
        (2, {"parent_chat_id": 8}, ":2: the parents of chat_id 8 go round in a circle"),
        (1, {"parent_chat_id": 159}, ":1: the parents of chat_id 7 go round in a circle"),
        (3, {"turn": 0}, ":3: turn is '0'; a whole number from 1 is allowed"),
        (3, {"turn": True}, ":3: turn is 'True'"),
        (4, {"timestamp": "1"}, ":4: timestamp is '1'; a number is allowed"),
        (4, {"input_length": 49}, ":4: 3 hash_ids for 49 tokens; with block_tokens 16 (as bailian has them)"),
        (5, {"hash_ids": [1, "a"]}, ":5: hash_ids is"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path, line, changes, message):
    rows = [row | changes if k == line else row for k, row in enumerate(CHATS, start=1)]
    path = _write(tmp_path, rows)
    with pytest.raises(PrfaasError) as error:
        read_trace(path, "bailian")
    assert str(error.value).startswith(f"{path}{message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["chat_id", "parent_chat_id", "turn", "timestamp", "input_length"])
def test_a_missing_key_is_named(tmp_path, key):
    rows = [dict(row) for row in CHATS]
    del rows[2][key]
    path = _write(tmp_path, rows)
    with pytest.raises(PrfaasError, match=f":3: no key '{key}'; found"):
        read_trace(path, "bailian")


def test_pointer_file(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:3d74\nsize 132054902\n")
    with pytest.raises(PrfaasError, match=r":1: a Git LFS pointer, not the trace itself; fetch the file"):
        read_trace(path, "bailian")


# ------------------------------------------------------------------ vLLM, and one format read as another


def _timed(stamps, lengths, block):
    return [
        {"timestamp": t, "input_length": n, "output_length": 5, "hash_ids": list(range(-(-n // block)))}
        for t, n in zip(stamps, lengths, strict=True)
    ]


def test_vllm_counts_seconds_and_blocks_of_16(tmp_path):
    table = _table(tmp_path, _timed([0, 0.5, 61.000001], [20, 33, 16], 16), "vllm")
    assert table.arrival_ns.tolist() == [0, S // 2, 61_000_001_000]
    assert table.block_tokens == 16
    assert np.diff(table.block_offsets).tolist() == [2, 3, 1]
    # Another multiplier and block size, as stated.
    rows = _timed([0, 1500], [600, 20], 512)
    table = _table(tmp_path, rows, "vllm", time_unit_s=0.001, block_tokens=512)
    assert table.arrival_ns.tolist() == [0, 1_500_000_000]
    assert table.block_tokens == 512


def test_a_mooncake_file_with_the_defaults_of_vllm_is_refused():
    """It would run 1,000 times too slow with the wrong reuse."""
    with pytest.raises(PrfaasError) as error:
        read_trace(resolve_trace_file(MOONCAKE), "vllm")
    assert (
        ":1: 14 hash_ids for 6758 tokens; with block_tokens 16 (as vllm has them) there must be 423"
        in str(error.value)
    )
    assert "512 would fit every line: is it a mooncake file, with milliseconds?" in str(error.value)


def test_a_mooncake_file_with_a_wrong_block_size_is_refused():
    for block_tokens in (16, 256, 511, 513, 1024):
        with pytest.raises(
            PrfaasError, match=rf"with block_tokens {block_tokens} \(as stated\) there must be"
        ):
            read_trace(resolve_trace_file(MOONCAKE), "mooncake", block_tokens=block_tokens)


@pytest.mark.parametrize(
    "settings", [{"trace_format": "mooncake"}, {"trace_format": "vllm", "block_tokens": 512}]
)
def test_a_mooncake_file_in_seconds_is_said_loudly(settings):
    trace_format = settings.pop("trace_format")
    if trace_format == "mooncake":
        settings["time_unit_s"] = 1.0
    notes = read_trace(resolve_trace_file(MOONCAKE), trace_format, **settings).notes
    told = _warnings(notes)
    assert any("0.0032 requests per second" in note and "check the unit" in note for note in told)
    assert any("1000 times slower" in note for note in told) == (trace_format == "mooncake")
    assert not _warnings(read_trace(resolve_trace_file(MOONCAKE), "mooncake").notes)


def test_seconds_read_as_milliseconds_are_refused_or_said_loudly(tmp_path):
    # With fractions: refused.
    path = _write(tmp_path, _timed([0, 0.5], [20, 33], 16))
    with pytest.raises(
        PrfaasError, match="whole milliseconds are allowed; for stamps in seconds use format vllm"
    ):
        read_trace(path, "mooncake")
    # Whole seconds with blocks of 16, or at a rate that no site has.
    table = _table(tmp_path, _timed(range(30), [20 + k for k in range(30)], 16), "mooncake")
    assert any("Mooncake's own blocks have 512 tokens" in note for note in _warnings(table.notes))
    table = _table(tmp_path, _timed([k // 4 for k in range(120)], [600] * 120, 512), "mooncake")
    assert any("4.14e+03 requests per second" in note for note in _warnings(table.notes))


def test_bailian_and_the_others_are_told_apart(tmp_path):
    chats = _write(tmp_path, CHATS)
    assert sniff_format(chats) == "bailian"
    for other in ("mooncake", "vllm", "azure"):
        with pytest.raises(
            PrfaasError, match=f"the format is set to {other}, but this line looks like bailian"
        ):
            read_trace(chats, other)
    assert sniff_format(resolve_trace_file(MOONCAKE)) == "mooncake"
    with pytest.raises(PrfaasError, match="the format is set to bailian, but this line looks like mooncake"):
        read_trace(resolve_trace_file(MOONCAKE), "bailian")
    assert sniff_format(_write(tmp_path, _timed([0.5], [20], 16))) == "vllm"


def test_inspect_describes_sessions_and_prefixes(tmp_path):
    summary = inspect_trace(_write(tmp_path, CHATS))
    assert summary.format == "bailian"
    assert (summary.sessions, summary.mean_turns) == (3, 5 / 3)
    assert summary.prefix is not None
    assert summary.prefix.block_tokens == 16
    assert summary.prefix.hit_tokens_share == pytest.approx(48 / 166)
    assert any("format bailian, told from the first line" in note for note in summary.notes)


# ------------------------------------------------------------------ BurstGPT


SIX = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
EIGHT = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_burstgpt_in_both_shapes(tmp_path):
    rows = [
        ("7", "s1", "0.5", "ChatGPT,100,11,111,Conversation log"),
        ("7", "", "0.1", "GPT-4,200,0,200,API log"),
        ("7", "", "3", "GPT-4,300,33,333,API log"),
        ("60", "s1", "2", "ChatGPT,400,44,444,Conversation log"),
    ]
    six = SIX + "".join(f"{stamp},{rest}\n" for stamp, _, _, rest in rows)
    eight = EIGHT + "".join(",".join(row) + "\n" for row in rows)
    for text, sessions in ((six, [-1, -1, -1]), (eight, [0, -1, 0])):
        (tmp_path / "b.csv").write_text(text)
        workload = TraceWorkload(file="b.csv", format="burstgpt", spread="never")
        table = generate_requests(workload, seed=0, base_dir=tmp_path)
        assert sniff_format(tmp_path / "b.csv") == "burstgpt"
        # Ties keep file order; the row without a response is a failure.
        assert table.arrival_ns.tolist() == [0, 0, 53 * S]
        assert table.input_tokens.tolist() == [100, 300, 400]
        assert table.output_tokens.tolist() == [11, 33, 44]
        assert table.session.tolist() == sessions
        assert any(note.startswith("1 rows with 0 input or output tokens: left out") for note in table.notes)
        assert "no prefix data: every prompt counts as new" in table.notes


def test_burstgpt_eight_columns_with_bad_lines(tmp_path):
    path = tmp_path / "b.csv"
    path.write_text(
        EIGHT + "7,s1,0.5,ChatGPT,100,11,111,Conversation log\n8,s1,ChatGPT,100,11,111,Conversation log\n"
    )
    with pytest.raises(PrfaasError, match=r":3: 7 fields in .*; the header has 8"):
        read_trace(path, "burstgpt")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(PrfaasError, match=":1: a Git LFS pointer"):
        read_trace(path, "burstgpt")


# ------------------------------------------------------------------ Azure


def test_azure_code_trace(tmp_path):
    """Seven decimals, silent gaps and a zone; the summary shows the span, the rate, the maxima, the share above."""
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:43.3074770,4808,10\n"
        "2023-11-16 18:20:07.0417510,3180,8\n"
        "2023-11-16 18:20:08.0417510+00:00,110,27\n"
    )
    table = generate_requests(TraceWorkload(file="a.csv", format="azure"), seed=0, base_dir=tmp_path)
    assert table.arrival_ns.tolist() == [0, 143_734_274_000, 144_734_274_000]
    summary = inspect_trace("bundled:azure_llm_2023_code")
    assert summary.requests == 8_819
    assert summary.span_s == pytest.approx(3_435.948056, abs=1e-6)
    assert summary.mean_rate_rps == pytest.approx(8_819 / 3_435.948056)
    assert summary.longest_gap_s == pytest.approx(217.168952, abs=1e-6)
    assert (summary.input_tokens.max, summary.output_tokens.max) == (7_437, 1_899)
    assert summary.share_above == 0.0
    assert summary.sessions == 0
    assert summary.mean_turns is None
