"""Bad files and lines: one line that names the file, the line, what was found and what is allowed."""

import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.workload.formats import sniff_format
from prfaas_env.workload.traces import read_trace, resolve_trace_file

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n7,ChatGPT,100,11,111,x\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
NO_IDS = '{"timestamp": 0, "input_length": 600, "output_length": 5}\n'
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 1544884\n"


def _mooncake(**changed):
    import json

    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | changed)


CASES = {
    # Azure
    "date": ("azure", AZURE + "16/11/2023 18:17,5,5\n", ":3: TIMESTAMP is '16/11/2023 18:17'; allowed: YYYY"),
    "no such day": (
        "azure",
        AZURE + "2023-02-30 18:17:03,5,5\n",
        ":3: TIMESTAMP is '2023-02-30 18:17:03'; no such",
    ),
    "too many decimals": ("azure", AZURE + "2023-11-16 18:17:03.1234567890,5,5\n", "up to 9 decimals"),
    "token text": (
        "azure",
        AZURE + "2023-11-16 18:17:04,abc,5\n",
        ":3: ContextTokens is 'abc'; a whole number",
    ),
    "token fraction": (
        "azure",
        AZURE + "2023-11-16 18:17:04,5,5.5\n",
        ":3: GeneratedTokens is '5.5'; a whole",
    ),
    "token negative": ("azure", AZURE + "2023-11-16 18:17:04,-5,5\n", ":3: ContextTokens is '-5'"),
    "token empty": ("azure", AZURE + "2023-11-16 18:17:04,,5\n", ":3: ContextTokens is ''"),
    "token huge": ("azure", AZURE + "2023-11-16 18:17:04,5000000000,5\n", "from 0 to 1,000,000,000"),
    "line cut off": (
        "azure",
        AZURE + "2023-11-16 18:1",
        ":3: 1 fields in '2023-11-16 18:1'; the header has 3",
    ),
    "one field more": ("azure", AZURE + "2023-11-16 18:17:04,5,5,5\n", ":3: 4 fields"),
    "line number counts blanks": (
        "azure",
        AZURE + "\n\n2023-11-16 18:17:04,x,5\n",
        ":5: ContextTokens is 'x'",
    ),
    "header": (
        "azure",
        "TIMESTAMP,Context,GeneratedTokens\n",
        ":1: the header has no column 'ContextTokens'; found",
    ),
    "no header": (
        "azure",
        "2023-11-16 18:17:03.9799600,4808,10\n",
        ":1: the header has no column 'TIMESTAMP'",
    ),
    "header alone": ("azure", AZURE.splitlines()[0], "no requests in the file (0 rows"),
    "open quote": ("azure", AZURE + '2023-11-16 18:17:04,"5,5\n', ":3: "),
    # BurstGPT
    "burst stamp": ("burstgpt", BURST + "soon,m,5,5,10,x\n", ":3: Timestamp is 'soon'; a number is allowed"),
    "burst nan": ("burstgpt", BURST + "nan,m,5,5,10,x\n", ":3: Timestamp is 'nan'; a number of 0 or more"),
    "burst negative": ("burstgpt", BURST + "-1,m,5,5,10,x\n", ":3: Timestamp is '-1'; a number of 0 or more"),
    "burst late": ("burstgpt", BURST + "1e300,m,5,5,10,x\n", "later than any date; check time_unit_s"),
    # Mooncake
    "not json": ("mooncake", MOONCAKE + "{timestamp: 0}\n", ":2: not a JSON object"),
    "json cut off": ("mooncake", MOONCAKE + MOONCAKE[:50], ":2: not a JSON object"),
    "nan": (
        "mooncake",
        MOONCAKE + _mooncake(timestamp=float("nan")),
        ":2: not a JSON object (NaN is no number)",
    ),
    "list": ("mooncake", MOONCAKE + "[1, 2]\n", ":2: found '[1, 2]'; a JSON object is allowed"),
    "key missing": (
        "mooncake",
        MOONCAKE + '{"timestamp": 1}\n',
        ":2: no key 'input_length'; found ['timestamp']",
    ),
    "stamp text": (
        "mooncake",
        MOONCAKE + _mooncake(timestamp="1"),
        ":2: timestamp is '1'; a number is allowed",
    ),
    "stamp true": ("mooncake", MOONCAKE + _mooncake(timestamp=True), ":2: timestamp is 'True'"),
    "stamp negative": (
        "mooncake",
        MOONCAKE + _mooncake(timestamp=-1),
        ":2: timestamp is '-1'; a number of 0",
    ),
    "stamp in seconds": ("mooncake", MOONCAKE + _mooncake(timestamp=1.5), "whole milliseconds are allowed"),
    "length text": (
        "mooncake",
        MOONCAKE + _mooncake(input_length="x"),
        ":2: input_length is 'x'; a whole number",
    ),
    "length fraction": ("mooncake", MOONCAKE + _mooncake(output_length=1.5), ":2: output_length is"),
    "length negative": ("mooncake", MOONCAKE + _mooncake(input_length=-600), ":2: input_length is '-600'"),
    "ids no list": ("mooncake", MOONCAKE + _mooncake(hash_ids=5), ":2: hash_ids is '5'; a list of whole"),
    "ids text": ("mooncake", MOONCAKE + _mooncake(hash_ids=["a"]), ":2: hash_ids is"),
    "ids too big": ("mooncake", MOONCAKE + _mooncake(hash_ids=[2**63]), ":2: hash_ids is"),
    "ids missing": ("mooncake", MOONCAKE + NO_IDS, ":2: hash_ids is missing, unlike in the lines before"),
    "ids there": ("mooncake", NO_IDS + MOONCAKE, ":2: hash_ids is there, unlike in the lines before"),
    "one id short": (
        "mooncake",
        MOONCAKE * 3 + _mooncake(input_length=2000, hash_ids=[0, 1, 2]) + "\n" + MOONCAKE,
        ":4: 3 hash_ids for 2000 tokens; with block_tokens 512 (the size that fits most lines) there must",
    ),
    # Files
    "pointer": ("mooncake", LFS, ":1: a Git LFS pointer, not the trace itself"),
    "pointer to csv": ("azure", LFS, ":1: a Git LFS pointer, not the trace itself"),
    "empty": ("mooncake", "", ": the file is empty"),
    "blank": ("azure", "\n \n", ": the file is empty"),
    "azure as mooncake": (
        "mooncake",
        AZURE,
        ":1: the format is set to mooncake, but this line looks like azure",
    ),
    "burst as azure": ("azure", BURST, ":1: the format is set to azure, but this line looks like burstgpt"),
    "mooncake as azure": (
        "azure",
        MOONCAKE,
        ":1: the format is set to azure, but this line looks like mooncake",
    ),
    "prose": ("mooncake", "Once upon a time\n", ":1: not a JSON object"),
}


@pytest.mark.parametrize(("trace_format", "text", "message"), CASES.values(), ids=CASES.keys())
def test_bad_lines_are_refused_with_file_and_line(tmp_path, trace_format, text, message):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(PrfaasError) as error:
        read_trace(path, trace_format)
    told = str(error.value)
    assert told.startswith(str(path))
    assert message in told
    assert "\n" not in told
    assert len(told) < len(str(path)) + 300


def test_stated_block_size_that_does_not_fit(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text(MOONCAKE)
    with pytest.raises(
        PrfaasError, match=r":1: 2 hash_ids for 600 tokens; with block_tokens 16 \(as stated\) there"
    ):
        read_trace(path, "mooncake", block_tokens=16)
    path.write_text(NO_IDS)
    with pytest.raises(PrfaasError, match="block_tokens is 16, but the file has no prefix data"):
        read_trace(path, "mooncake", block_tokens=16)


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "trace.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe\x00\x01")
    with pytest.raises(PrfaasError, match="not a text file in UTF-8"):
        read_trace(path, "azure")
    with pytest.raises(PrfaasError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none", "azure")


def test_byte_order_mark_is_no_part_of_the_header(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\ufeff" + AZURE, encoding="utf-8")
    assert len(read_trace(path, "azure")) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [(AZURE, "azure"), (BURST, "burstgpt"), ("\n" + MOONCAKE, "mooncake"), ("a,b\n", None), ("", None)],
)
def test_format_is_told_from_the_first_line(tmp_path, text, expected):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    assert sniff_format(path) == expected


def test_a_mooncake_file_with_the_defaults_of_another_tool_is_not_misread():
    # Seconds and 16-token blocks on a file of milliseconds and 512-token blocks: refused by the block count.
    path = resolve_trace_file("bundled:mooncake_conversation_first_32min")
    with pytest.raises(PrfaasError, match=r":1: 14 hash_ids for 6758 tokens; with block_tokens 16"):
        read_trace(path, "mooncake", time_unit_s=1.0, block_tokens=16)
