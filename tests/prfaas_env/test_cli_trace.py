import json

import pytest
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_env.cli_trace import app


def _run(*args):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["inspect", *args])


def test_table_for_people():
    result = _run("bundled:mooncake_conversation_first_32min")
    assert result.exit_code == 0
    for text in ("12,782", "124,847", "6,151", "19.1%", "35.1%", "format mooncake, told from the first line"):
        assert text in result.output


def test_azure_code_says_that_nothing_is_above_the_threshold():
    result = _run("bundled:azure_llm_2023_code", "--format", "azure")
    assert result.exit_code == 0
    for text in ("8,819", "3,435.948 s", "217.169 s", "0.0%", "7,437", "no prefix data"):
        assert text in result.output
    assert "told from the first line" not in result.output


def test_json():
    result = _run("bundled:azure_llm_2023_conv", "--json", "--threshold", "1000")
    found = json.loads(result.output)
    assert found["requests"] == 19_366
    assert found["threshold_tokens"] == 1_000
    assert 0.4 < found["share_above"] < 0.6
    assert found["prefix"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("bundled:nothing",), "no bundled trace 'nothing'; bundled are azure_llm_2023_code"),
        (
            ("bundled:azure_llm_2023_code", "--format", "parquet"),
            "--format is 'parquet'; allowed: mooncake, azure",
        ),
        (("bundled:azure_llm_2023_code", "--format", "mooncake"), ":1: the format is set to mooncake, but"),
        (
            ("bundled:azure_llm_2023_code", "--block-tokens", "16"),
            "block_tokens does not apply to format azure",
        ),
        (
            ("bundled:servegen_m-small_rate_10min", "--format", "azure"),
            ":1: a profile of rates, not requests; use it as arrivals of kind profile",
        ),
        (
            ("bundled:servegen_m-small_rate_10min", "--block-tokens", "16"),
            "a rate profile, to which --time-unit-s and --block-tokens do not apply",
        ),
    ],
)
def test_mistakes_are_one_line(args, message):
    result = _run(*args)
    assert isinstance(result.exception, PrfaasError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_rate_profile():
    result = _run("bundled:servegen_m-small_rate_10min")
    assert result.exit_code == 0
    for text in (
        "rate profile",
        "2,016 of 600 s, 37 without arrivals",
        "14.00 days",
        "1,174.404",
        "3,879.508",
        "3.30",
    ):
        assert text in result.output
    found = json.loads(_run("bundled:servegen_m-large_rate_10min", "--json").output)
    assert found["mean_rate_rps"] == pytest.approx(195.844, abs=1e-3)
    assert len(found["days"]) == 14
    assert found["days"][0] == pytest.approx([279.30, 151.18, 582.99], abs=0.01)
    assert found["cv_max"] == 55.6636


def test_sessions_and_prefixes_of_a_bailian_trace(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        {"chat_id": k, "parent_chat_id": k - 1, "timestamp": 2.5 * k, "input_length": 20 * (k + 1)}
        | {"output_length": 5, "turn": k + 1, "hash_ids": list(range(-(-20 * (k + 1) // 16)))}
        for k in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = _run(str(path))
    assert result.exit_code == 0
    for text in ("bailian", "1, 3.00 requests each", "16 tokens", "format bailian, told from the first line"):
        assert text in result.output
