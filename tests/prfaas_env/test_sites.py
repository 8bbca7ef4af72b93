"""How the remote side is divided between PD clusters when each is planned by itself."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.profiles.catalogue import load_model
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.sites import arrival_shares, link_difference, link_pairs, share_of, sites_of
from prfaas_env.theory import RemotePath, plan, plan_sites, search, search_paths
from prfaas_env.workload.means import input_law

PAPER = load_scenario("paper")
SEVERAL = ("two_regions", "shared_prfaas")


def with_deployment(**deployment: Any) -> Scenario:
    return Scenario.model_validate({**PAPER.model_dump(mode="json"), "deployment": deployment})


def sites(weights: list[float], pairs: list[tuple[int, int]], n_prfaas: int) -> Scenario:
    return with_deployment(
        prfaas=[{"name": f"r{j}", "hardware": "h200", "n_instances": j + 1} for j in range(n_prfaas)],
        pd=[
            {"name": f"p{i}", "hardware": "h20", "n_prefill": 2, "n_decode": 2, "arrival_share": w}
            for i, w in enumerate(weights)
        ],
        links=[{"prfaas": f"r{j}", "pd": f"p{i}", "capacity_bps": 10e9} for j, i in pairs],
    )


@given(data=st.data())
def test_a_shared_cluster_is_divided_wholly(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0, 10), min_size=1, max_size=4).filter(lambda w: sum(w) > 0))
    n_prfaas = data.draw(st.integers(1, 3))
    every = [(j, i) for j in range(n_prfaas) for i in range(len(weights))]
    pairs = data.draw(st.lists(st.sampled_from(every), unique=True))
    found = sites_of(sites(weights, pairs, n_prfaas))
    assert sum(arrival_shares(sites(weights, pairs, n_prfaas).deployment)) == pytest.approx(1.0)
    for j in range(n_prfaas):
        shares = [r.share for s in found for r in s.routes if r.j == j]
        assert all(0.0 <= share <= 1.0 for share in shares)
        if shares:
            assert sum(shares) == pytest.approx(1.0)
    assert sorted(r.k for s in found for r in s.routes) == list(range(len(pairs)))


def test_shares_by_hand() -> None:
    assert share_of([2.0, 1.0, 1.0], 0) == 0.5
    assert share_of([0.0, 0.0], 1) == 0.5
    assert share_of([0.0, 3.0], 0) == 0.0


def test_a_single_site_is_the_papers_plan() -> None:
    (site,) = plan_sites(PAPER)
    assert site.optimum == plan(PAPER)["prfaas"]
    assert (site.name, site.arrival_share) == ("pd0", 1.0)
    assert site.scenario_limit_rps == pytest.approx(3.248, abs=0.001)


def test_a_cluster_shared_by_equals_is_half_a_cluster_for_each() -> None:
    """8 H200 instances for two of the paper's PD clusters: each has the paper's plan."""
    pd = PAPER.deployment.pd[0].model_dump(mode="json")
    shared = with_deployment(
        prfaas=[{"name": "r", "hardware": "h200", "n_instances": 8}],
        pd=[{**pd, "name": n} for n in ("p", "q")],
        links=[{"prfaas": "r", "pd": n, "capacity_bps": 100e9} for n in ("p", "q")],
    )
    for site in plan_sites(shared):
        assert site.optimum == plan(PAPER)["prfaas"]
        assert site.scenario_limit_rps == pytest.approx(2 * 3.248, abs=0.002)


def _arguments(**changes: Any) -> dict[str, Any]:
    pd = PAPER.hardware_of(PAPER.deployment.pd[0])
    return {
        "local": pd.prefill,
        "decode": pd.decode,
        "kv": PAPER.model.kv,
        "n_local": 8,
        "output_tokens_mean": 1024,
        **changes,
    }


def test_remote_paths_add_up_path_by_path() -> None:
    """Three instances behind 1 Gbps and one behind 100: the thin link is a limit of its own, not of the sum."""
    lengths = input_law(PAPER.workload)
    h200 = PAPER.model.hardware["h200"].prefill
    at: dict[str, Any] = _arguments(splits=(3,), thresholds_tokens=[19_400.0])
    thin, fat = RemotePath(h200, 3, 1e9), RemotePath(h200, 1, 100e9)
    both = search_paths(lengths, [thin, fat], **at)
    parts = [search_paths(lengths, [path], **at) for path in (thin, fat)]
    assert both.theta_prfaas_rps == pytest.approx(sum(p.theta_prfaas_rps for p in parts))
    assert both.theta_prfaas_rps == pytest.approx(1e9 / 7.69e9 + 1.61 / 4, rel=2e-3)  # paper-sized figures
    summed = search(lengths, remote=h200, n_prfaas=4, link_bps=101e9, **at)
    assert summed.theta_prfaas_rps > 2 * both.theta_prfaas_rps
    assert both.n_prfaas == 4


def test_slower_instances_count_by_their_own_profile() -> None:
    lengths = input_law(PAPER.workload)
    h200, h20 = (PAPER.model.hardware[n].prefill for n in ("h200", "h20"))
    at: dict[str, Any] = _arguments(splits=(3,), thresholds_tokens=[19_400.0], means="service")
    mixed = search_paths(lengths, [RemotePath(h200, 2, 100e9), RemotePath(h20, 2, 100e9)], **at)
    alone = [search_paths(lengths, [RemotePath(p, 2, 100e9)], **at) for p in (h200, h20)]
    assert mixed.theta_prfaas_rps == pytest.approx(sum(a.theta_prfaas_rps for a in alone))
    assert alone[1].theta_prfaas_rps < 0.5 * alone[0].theta_prfaas_rps


def test_no_path_means_never() -> None:
    for paths in ([], [RemotePath(PAPER.model.hardware["h200"].prefill, 0.0, 1e9)]):
        assert search_paths(input_law(PAPER.workload), paths, **_arguments()).threshold_tokens == math.inf


def test_a_pd_cluster_without_arrivals_has_no_limit() -> None:
    idle, busy = plan_sites(sites([0.0, 1.0], [(0, 0), (0, 1)], 1))
    assert idle.scenario_limit_rps == math.inf
    assert (idle.optimum.n_prfaas, busy.optimum.n_prfaas) == (0, 1)


@pytest.mark.parametrize("name", SEVERAL)
def test_the_shipped_ones_are_neither_idle_nor_drowned(name: str) -> None:
    scenario = load_scenario(name)
    for means in ("representative", "service"):
        for site in plan_sites(scenario, means):
            assert 0.7 < 5.0 / site.scenario_limit_rps < 0.85
            assert 0.3 < site.optimum.offload_share < 0.6
    thresholds = {site.optimum.threshold_tokens for site in plan_sites(scenario)}
    assert len(thresholds) == len(scenario.deployment.pd)  # a decision of its own for each


def test_links_that_join_others_are_named() -> None:
    now, then = ((0, 0), (1, 0), (0, 1)), ((0, 0), (0, 1), (1, 0))
    assert link_difference(now, now) == ""
    assert link_difference(now, then) == (
        "link1 joins prfaas1 and pd0, was prfaas0 and pd1; link2 joins prfaas0 and pd1, was prfaas1 and pd0"
    )
    assert link_pairs(load_scenario("two_regions").deployment) == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_the_dense_control_is_the_catalogues_model() -> None:
    dense, minimax = load_scenario("dense").model, load_model("minimax-m2.5")
    assert dense.kv == minimax.kv
    assert dense.max_input_tokens == minimax.max_input_tokens
    hybrid = PAPER.model.hardware
    for tokens in (1_024, 8_192, 32_000, 130_000):
        h200_s = minimax.hardware["h200"].prefill.seconds(tokens)
        assert dense.hardware["h200"].prefill.seconds(tokens) == pytest.approx(h200_s, abs=1e-5)
        ratio = hybrid["h20"].prefill.seconds(tokens) / hybrid["h200"].prefill.seconds(tokens)
        assert dense.hardware["h20"].prefill.seconds(tokens) == pytest.approx(h200_s * ratio, rel=1e-4)
    assert dense.hardware["h20"].decode.slots == hybrid["h20"].decode.slots


def test_equal_cost_is_the_best_split_of_its_nodes() -> None:
    scenario = load_scenario("homogeneous_equal_cost")
    pd = scenario.deployment.pd[0]
    assert (pd.n_prefill + pd.n_decode) * 8 == 2 * 32 + 64
    best = plan(scenario)["prfaas"]
    assert (best.n_prefill, best.n_decode) == (pd.n_prefill, pd.n_decode)
    assert best.lambda_max_rps == pytest.approx(2.81, abs=0.01)


# ------------------------------------------------------------------------------------- prfaas plan


@pytest.mark.parametrize("name", SEVERAL)
def test_plan_of_several_sites(name: str, plan_run: Any) -> None:
    text = plan_run("--scenario", name)
    scenario = load_scenario(name)
    for pd in scenario.deployment.pd:
        assert pd.name in text
    assert "The whole deployment carries 6.25 req/s" in text
    content = json.loads(plan_run("--scenario", name, "--json", "--means", "service"))
    assert list(content["sites"]) == [pd.name for pd in scenario.deployment.pd]
    found = {s.name: s for s in plan_sites(scenario, "service")}
    for key, site in content["sites"].items():
        assert site["threshold_tokens"] == found[key].optimum.threshold_tokens
    assert content["deployment"]["lambda_max_rps"] == min(s.scenario_limit_rps for s in found.values())
    assert content["deployment"]["limited_by"] in found


def test_planning_backwards_says_what_it_knows(plan_run: Any) -> None:
    with pytest.raises(
        PrfaasError, match="know at most one prfaas cluster and one pd cluster, found 2 and 2"
    ):
        plan_run("--scenario", "two_regions", "--rate", "3", "--ttft-p90", "6")


def test_plan_with_an_idle_pd_cluster(plan_run: Any) -> None:
    text = plan_run("--scenario", "two_regions", "--set", "deployment.pd.1.arrival_share=0")
    assert "limited by pd_east" in text


@pytest.fixture(name="plan_run")
def _plan_run() -> Any:
    import typer
    from typer.testing import CliRunner

    from prfaas_env.cli_plan import plan_command

    app = typer.Typer()
    app.command("plan")(plan_command)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    return run
