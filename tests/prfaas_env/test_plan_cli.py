"""`prfaas plan` from the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_env.cli_plan import parse_prices, plan_command
from prfaas_env.scenarios import load_scenario
from prfaas_env.theory import Optimum, cheapest, plan

_APP = typer.Typer()
_APP.command("plan")(plan_command)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(_APP, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return content


def test_json_is_the_plan() -> None:
    content = run_json("--scenario", "paper")
    assert list(content) == ["scenario", "scenario_hash", "means", "deployments"]
    assert content["scenario"] == "paper"
    assert content["scenario_hash"] == load_scenario("paper").hash
    assert content["means"] == "representative"
    assert list(content["deployments"]) == ["prfaas", "homogeneous", "naive"]
    for point in content["deployments"].values():
        assert list(point) == list(Optimum.__dataclass_fields__)
    assert content["deployments"]["homogeneous"]["threshold_tokens"] is None
    assert content["deployments"]["naive"]["threshold_tokens"] == 0
    assert content["deployments"]["prfaas"] == plan(load_scenario("paper"))["prfaas"].as_json()


def test_means_and_overrides_reach_the_plan() -> None:
    link = "deployment.links.0.capacity_bps=5 Gbps"
    content = run_json("--means", "service", "--set", link, "--set", "workload.output_tokens.tokens=512")
    scenario = load_scenario("paper", overrides=[link, "workload.output_tokens.tokens=512"])
    assert content["means"] == "service"
    assert content["scenario_hash"] == scenario.hash
    assert content["deployments"]["prfaas"] == plan(scenario, "service")["prfaas"].as_json()
    assert content["deployments"]["prfaas"]["egress_bps"] <= 5e9


def test_deployment_replaces_the_scenarios_own() -> None:
    content = run_json("--deployment", "homogeneous")
    assert content["scenario"] == "paper@homogeneous"
    assert content["deployments"]["prfaas"] == content["deployments"]["homogeneous"]


def test_table_says_what_the_figures_are() -> None:
    text = run()
    assert "19,400" in text
    assert "4 / 3 / 5" in text
    assert "never" in text
    assert "always" in text
    lines = text.splitlines()
    for start in ("- h20 prefill: Nothing published. Back-solved", "- h20 decode: Published: 40 tokens/s"):
        assert sum(line.startswith(start) for line in lines) == 1
    assert any("back-solved" in line and "neither published nor measured" in line for line in lines)
    assert "77% of the first column's" in text


def test_table_names_a_missing_baseline(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    raw = load_scenario("paper").model_dump(mode="json")
    raw["model"]["hardware"]["mine"] = raw["model"]["hardware"].pop("h20")
    raw["deployment"]["pd"][0]["hardware"] = "mine"
    path.write_text(json.dumps(raw))  # JSON is YAML
    assert "Left out: homogeneous, naive; model prfaas-1t lacks that hardware." in run("-s", str(path))
    content = run_json("-s", str(path))
    assert content["deployments"]["homogeneous"] is None
    assert content["deployments"]["naive"] is None


def test_backwards_json() -> None:
    content = run_json("--rate", "3.1", "--ttft-p90", "4", "--price", "h200=2,h20=1", "--link-price", "0.01")
    found = cheapest(
        load_scenario("paper"),
        rate_rps=3.1,
        ttft_p90_s=4.0,
        prices={"h200": 2.0, "h20": 1.0},
        link_price_per_gbps=0.01,
    )
    assert list(content) == ["scenario", "scenario_hash", "means", "demand", "cheapest", "note"]
    assert content["means"] == "service"
    assert content["demand"] == {"rate_rps": 3.1, "ttft_p90_s": 4.0}
    extra = {"link_bps": found.link_bps, "egress_at_rate_bps": found.egress_bps, "cost": found.cost}
    assert content["cheapest"] == found.optimum.as_json() | extra
    assert "no queueing" in content["note"]


def test_backwards_table() -> None:
    text = run("--rate", "2", "--ttft-p90", "12", "--price", "h200=50")
    assert "never" in text
    assert "none" in text
    assert "no queueing" in text
    assert run("--rate", "3.1", "--ttft-p90", "4").count("cost") >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "3"], "belong together"),
        (["--ttft-p90", "3"], "belong together"),
        (["--price", "h200=2"], "need --rate and --ttft-p90"),
        (["--link-price", "2"], "need --rate and --ttft-p90"),
        (["--rate", "0", "--ttft-p90", "4"], "rate to plan for is 0"),
        (["--rate", "-2", "--ttft-p90", "4"], "rate to plan for is -2"),
        (["--rate", "3", "--ttft-p90", "4", "--price", "b200=2"], "unknown hardware 'b200'"),
        (["--rate", "3", "--ttft-p90", "4", "--price", "h200"], "not hardware=price"),
        (["--rate", "3", "--ttft-p90", "0.5"], "lowest on this hardware"),
        (["--scenario", "nowhere"], "unknown scenario"),
        (["--set", "deployment.pd.0.n_decode=0"], "n_decode"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(PrfaasError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


def test_prices() -> None:
    assert parse_prices("h200=2, h20=0.5") == {"h200": 2.0, "h20": 0.5}
    for text in ("", "h200", "=2", "h200=x", "h200=nan", "h200=1,h200=2", "h200=1,"):
        with pytest.raises(PrfaasError, match="--price"):
            parse_prices(text)
