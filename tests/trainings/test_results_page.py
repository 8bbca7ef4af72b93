"""`prfaas results`: parts by content, rows without a policy, targets by hand, the same page from the parts alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios import load_scenario
from prfaas_env.telemetry import Telemetry
from prfaas_env.workload.means import mean_rate_rps
from prfaas_trainings.compare import Comparison, PolicyFacts, compare
from prfaas_trainings.config import config_folder
from prfaas_trainings.episodes import (
    DECISION_EDGES_S,
    FIGURE_NAMES,
    TTFT_EDGES_S,
    EpisodeRunner,
    Job,
    Outcome,
    Row,
    run_job,
)
from prfaas_trainings.load import at_load, capacity_rps
from prfaas_trainings.results_config import ResultsConfig, load_results_config, spec_of
from prfaas_trainings.results_page import PAGE, RESULTS, write_page
from prfaas_trainings.results_run import (
    PARTS,
    ResultsFolder,
    ResultsPlan,
    comparisons,
    missing_chunks,
    prepare,
    read_plan,
    run_results,
)
from prfaas_trainings.results_targets import (
    NotMeasuredError,
    decision_quantile_s,
    judge,
    lost_seeds,
    p90_ratio,
    pooled_p90_s,
    share_of_way,
)

from .conftest import Counting, invoke

MODULE = "tests.trainings.test_results_page"
SEEDS = range(2_000_000, 2_000_006)


class OneSite:
    """A "learned" policy for one PD cluster; it sends everything remote."""

    constant = True
    learned = True
    fingerprint = "0123456789ab"
    seen_seeds: tuple[tuple[int, int], ...] = ((0, 1_000_000),)

    def reset(self, context: PolicyContext) -> None:
        if context.schema.n_pd != 1:
            raise PrfaasError("bundle /some/where: other topology: 2 pd clusters, trained on 1")
        self._decision = Decision.same(1, threshold_tokens=0.0)

    def decide(self, telemetry: Telemetry) -> Decision:
        return self._decision


class Peeker(OneSite):
    """One that has seen a test seed."""

    seen_seeds = ((2_000_001, 2_000_002),)


def fields(**changes: Any) -> dict[str, Any]:
    """A configuration of seconds."""
    base: dict[str, Any] = {
        "engine": "simpy",
        "headline": "steady",
        "scenarios": [
            {
                "label": "steady",
                "scenario": "paper",
                "set": {"measure.horizon_s": 40},
                "seeds": 6,
                "family": "f",
            },
            {"label": "sites", "scenario": "two_regions", "set": {"measure.horizon_s": 20}, "seeds": 1},
        ],
        "policies": [
            {"label": "homogeneous", "policy": "never@homogeneous", "role": "deployment"},
            {"label": "rule", "policy": "earliest_finish"},
            {"label": "paper rule", "policy": "dual_timescale"},
            {"label": "far", "policy": "earliest_finish:margin_s=-8", "role": "reference"},
            {"label": "agent", "policy": f"{MODULE}:OneSite", "role": "learned"},
        ],
        "subjects": {
            "learned": "agent",
            "best_rule": "rule",
            "tuned_paper": "paper rule",
            "ahead": "far",
            "converting": "paper rule",
        },
        "targets": [
            {"statement": "wins", "measure": "better", "scenarios": ["steady", "sites"], "against": "rule"}
        ],
    }
    return {**base, **changes}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def to_file(**changes: Any) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(fields(**changes)))
        return path

    return to_file


def run_all(config: ResultsConfig, out: Path, runner: EpisodeRunner) -> ResultsPlan:
    plan = prepare(config)
    folder = ResultsFolder(out, plan)
    run_results(missing_chunks(plan, folder), folder, config.engine, runner)
    return plan


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResultsPlan, Path]:
    """A finished folder."""
    out = tmp_path_factory.mktemp("results") / "r"
    return run_all(ResultsConfig.model_validate(fields()), out, Counting()), out


# ---------------------------------------------------------------------------------- the configuration


def test_the_shipped_configuration_names_what_the_page_must_show() -> None:
    config = load_results_config("results")
    assert len(config.table_labels) == 13
    assert [t for t in config.table_labels if t.startswith("mooncake")] == [
        f"mooncake, load {load}" for load in ("0.6", "0.7", "0.8", "0.9", "1")
    ]
    by_label = {s.label: s for s in config.scenarios}
    assert by_label["drift"].seeds == 200
    assert {s.seeds for s in config.scenarios if not s.label.startswith(("drift", "mooncake"))} == {50}
    specs = {p.label: p.policy for p in config.policies}
    assert specs["best rule"] == "best_rule:family={family}"
    assert spec_of(config.policies[4], by_label["link 10 Gbps"]) == "dual_timescale:tuned=link_10gbps"
    for scenario in config.scenarios:
        for resolved in scenario.resolved():
            assert resolved.measure.horizon_s > 420  # of the trace at least seven blocks of 60 s
    for scenario in by_label["mooncake"].resolved():
        assert scenario.workload.start_s == 960  # type: ignore[union-attr]
    thin = by_label["link 10 Gbps"].resolved()[0]
    assert thin.deployment.links[0].capacity_bps == 10e9


def test_the_trained_configurations_do_not_list_it() -> None:
    assert (config_folder() / "results" / "results.yaml").is_file()
    assert not (config_folder() / "results.yaml").exists()


def test_a_load_is_a_share_of_what_the_equations_carry() -> None:
    scenario = load_scenario("mooncake", overrides=["workload.start_s=960"])
    half = at_load(scenario, 0.5)
    assert mean_rate_rps(half.workload) == pytest.approx(0.5 * capacity_rps(scenario))
    assert half.measure.horizon_s == pytest.approx(960 / half.workload.speed, rel=0.01)  # type: ignore[union-attr]
    paper = at_load(load_scenario("paper"), 0.8)
    assert mean_rate_rps(paper.workload) == pytest.approx(0.8 * capacity_rps(load_scenario("paper")))
    assert paper.measure.horizon_s == 3600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"first_seed": 7}, "test seeds are 2,000,000 and up, found 7..12"),
        ({"headline": "drift"}, "headline: 'drift' is not among steady, sites"),
        (
            {"subjects": {**fields()["subjects"], "ahead": "x"}},
            "subjects.ahead: 'x' is not among homogeneous",
        ),
        ({"policies": [*fields()["policies"], fields()["policies"][1]]}, "label 'rule' is given 2 times"),
        (
            {"policies": [*fields()["policies"], {"label": "t", "policy": "dual_timescale:tuned={family}"}]},
            "policy t: its spec 'dual_timescale:tuned={family}' needs a family; scenario sites has none",
        ),
        (
            {
                "targets": [
                    {
                        "statement": "s",
                        "measure": "within",
                        "scenarios": ["no"],
                        "against": "rule",
                        "at_most": 1,
                    }
                ]
            },
            "targets.0.scenarios: 'no' is not among steady, sites",
        ),
        ({"targets": [{"statement": "s", "measure": "best", "scenarios": ["steady"]}]}, "targets.0"),
    ],
)
def test_a_faulty_configuration_is_told_in_one_line(
    write: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    path = write(**changes)
    with pytest.raises(PrfaasError) as caught:
        load_results_config(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------ running


def test_figures_are_those_of_a_comparison(done: tuple[ResultsPlan, Path], runner: EpisodeRunner) -> None:
    plan, out = done
    found = comparisons(plan, out)["steady"]
    scenario = plan.tables[0].scenario
    rows = [Row("rule", "earliest_finish"), Row("paper rule", "dual_timescale")]
    other = compare([scenario], rows, seeds=SEEDS, split="test", runner=runner, engine="simpy")
    for mine, theirs in ((1, 0), (2, 1)):
        for name in FIGURE_NAMES:
            assert found.own(0, mine, name) == other.own(0, theirs, name)
    assert found.difference(0, 1, 2, "ttft_mean_s") == other.difference(0, 0, 1, "ttft_mean_s")


def test_every_decision_of_a_policy_is_timed(done: tuple[ResultsPlan, Path]) -> None:
    plan, out = done
    content = json.loads((write_page(out)[0]).read_text())
    rows = {row["label"]: row for row in content["tables"][0]["rows"]}
    assert rows["paper rule"]["decisions"] == 6 * 40
    assert rows["rule"]["decisions"] == 6  # a constant policy is asked once
    assert 0 < rows["paper rule"]["decision_s"]["p50"] <= rows["paper rule"]["decision_s"]["p99"] < 1
    scenario = plan.tables[0].scenario
    timed = run_job(Job(scenario, Row("d", "dual_timescale"), 2_000_000, "simpy", timed=True))
    plain = run_job(Job(scenario, Row("d", "dual_timescale"), 2_000_000, "simpy"))
    assert timed.figures == plain.figures
    assert plain.decision_counts is None
    again = Outcome.of_json(json.loads(json.dumps(timed.as_json())))
    assert np.array_equal(again.decision_counts, timed.decision_counts)  # type: ignore[arg-type]


def test_files_beside_the_configuration(write: Callable[..., Path]) -> None:
    agent = {"label": "agent", "policy": "{here}/a", "by_scenario": {"sites": "{here}/b"}, "role": "learned"}
    path = write(policies=[*fields()["policies"][:4], {**agent, "run": "{here}/runs/a"}])
    here = path.parent.resolve()
    row = load_results_config(str(path)).policies[-1]
    assert (row.policy, row.by_scenario["sites"], row.run) == (f"{here}/a", f"{here}/b", f"{here}/runs/a")


def test_a_policy_of_another_topology_is_a_row_that_says_so(done: tuple[ResultsPlan, Path]) -> None:
    plan, out = done
    write_page(out)
    cell = plan.cell("sites", "agent")
    assert cell is not None
    assert cell.missing == "no policy for this topology"
    page = (out / PAGE).read_text()
    (line,) = [x for x in page.splitlines() if x.startswith("| **agent** | *no policy for this topology*")]
    assert line.count("|") == 16
    assert "agent: no policy for this topology: other topology: 2 pd clusters, trained on 1" in page
    assert "/some/where" not in page
    assert not [c for _, c, _ in plan.chunks if c.table == "sites" and c.policy == "agent"]


def test_left_out_rows_give_their_reason(tmp_path: Path) -> None:
    scenarios = [{**fields()["scenarios"][1], "without": {"homogeneous": "one cluster, not two"}}]
    config = ResultsConfig.model_validate(fields(scenarios=scenarios, headline="sites"))
    run_all(config, tmp_path / "r", Counting())
    write_page(tmp_path / "r")
    page = (tmp_path / "r" / PAGE).read_text()
    assert "| homogeneous | *left out here* |" in page
    assert "homogeneous: left out here: one cluster, not two" in page


def test_seen_seeds_and_unknown_policies_are_refused() -> None:
    policies = fields()["policies"]
    peeking = [*policies[:4], {"label": "agent", "policy": f"{MODULE}:Peeker", "role": "learned"}]
    with pytest.raises(PrfaasError, match=r"policy agent: seed 2,000,001 was used to train or choose it"):
        prepare(ResultsConfig.model_validate(fields(policies=peeking)))
    unknown = [*policies[:4], {"label": "agent", "policy": "no_such", "role": "learned"}]
    with pytest.raises(PrfaasError, match=r"policy agent: unknown policy 'no_such'"):
        prepare(ResultsConfig.model_validate(fields(policies=unknown)))


def test_a_stopped_run_goes_on_and_a_new_policy_runs_alone(
    done: tuple[ResultsPlan, Path], tmp_path: Path
) -> None:
    plan, reference = done
    config, out = plan.config, tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        run_all(config, out, Counting(20))
    assert len(list((out / PARTS).iterdir())) == 3  # the fourth part of six was not whole
    with pytest.raises(
        PrfaasError, match=r"is not finished \(steady, far, seeds 2,000,000 and up are missing"
    ):
        write_page(out)
    rest = Counting()
    run_all(config, out, rest)
    assert rest.asked == 12 + 4
    assert {p.name for p in (out / PARTS).iterdir()} == {p.name for p in (reference / PARTS).iterdir()}
    more = [*fields()["policies"], {"label": "twin", "policy": "earliest_finish"}]
    more.append({"label": "near", "policy": "earliest_finish:margin_s=2", "scenarios": ["steady"]})
    new = Counting()
    grown = run_all(ResultsConfig.model_validate(fields(policies=more)), out, new)
    assert new.asked == 6  # the twin shares the parts of the same policy
    found = comparisons(grown, out)["steady"]
    assert found.difference(0, 5, 1, "ttft_mean_s").mean == 0.0


def test_parts_of_other_versions_are_refused(done: tuple[ResultsPlan, Path], tmp_path: Path) -> None:
    plan, _ = done
    out = tmp_path / "r"
    ResultsFolder(out, plan)
    marker = out / "measured.json"
    marker.write_text(marker.read_text().replace('"prfaas-env": "', '"prfaas-env": "9.'))
    with pytest.raises(
        PrfaasError, match=r"holds a set of results of another configuration: versions.prfaas-env"
    ):
        ResultsFolder(out, plan)
    with pytest.raises(PrfaasError, match=r"is no folder of prfaas results"):
        read_plan(tmp_path)


def test_the_page_comes_back_from_the_parts_alone(
    done: tuple[ResultsPlan, Path], run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = done
    write_page(out)
    first = {name: (out / name).read_text() for name in (RESULTS, PAGE)}
    for name in (RESULTS, PAGE):
        (out / name).unlink()

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was run")

    monkeypatch.setattr("prfaas_trainings.episodes.simulate", refused)
    monkeypatch.setattr("prfaas_trainings.results_run.simulate", refused)
    monkeypatch.setattr("prfaas_trainings.episodes.make_policy", refused)
    told = run("results", "--from", str(out), "--docs", str(tmp_path / "docs" / "results.md"))
    assert {name: (out / name).read_text() for name in (RESULTS, PAGE)} == first
    assert (tmp_path / "docs" / "results.md").read_text() == first[PAGE]
    image = tmp_path / "docs" / "img" / "results_steady.png"
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size < 100_000
    assert "![Mean TTFT of every policy](img/results_steady.png)" in first[PAGE]
    assert str(image) in told


def test_the_command_runs_a_part_of_a_configuration(
    write: Callable[..., Path], run: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--config", str(write()), "--out", str(out), "--jobs", "1"]
    run("results", *options, "--scenario", "steady", "--policy", "rule", "--policy", "far", "--seeds", "2")
    content = json.loads((out / RESULTS).read_text())
    assert [t["label"] for t in content["tables"]] == ["steady"]
    assert [r["label"] for r in content["tables"][0]["rows"]] == ["rule", "far"]
    assert {t["verdict"] for t in content["targets"]} == {"not measured"}
    assert "- Not measured: agent: no figures on this scenario." in (out / PAGE).read_text()
    with pytest.raises(PrfaasError, match=r"--policy 'nobody': is not among homogeneous"):
        run("results", *options, "--policy", "nobody")
    with pytest.raises(PrfaasError, match=r"--seeds: has no effect with --from"):
        run("results", "--from", str(out), "--seeds", "2")


def test_ctrl_c_says_how_to_go_on(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prfaas_trainings.results_command.run_results", stopped)
    config, out = write(), tmp_path / "out"
    ended = invoke(
        ["results", "--config", str(config), "--out", str(out), "--policy", "rule", "--seeds", "2"]
    )
    assert ended.exit_code == 130
    assert "stopped: 2 parts are left" in ended.stderr
    wanted = f"go on with: prfaas results --config {config} --out {out} --policy rule --seeds 2"
    assert wanted in ended.stderr
    assert not (out / PAGE).exists()


def test_every_section_is_there(done: tuple[ResultsPlan, Path]) -> None:
    _, out = done
    write_page(out)
    page = (out / PAGE).read_text()
    wanted = [
        "## Targets",
        "## steady in short",
        "## Scenario: steady",
        "## Scenario: sites",
        "## Spread over training seeds",
        "## Ablations",
        "## Decision time",
        "## Training time",
        "## How this page is made",
    ]
    assert [line for line in page.splitlines() if line.startswith("## ")] == wanted
    assert "a reference that knows the future, never a limit" in " ".join(page.split())
    assert "| agent |  | not kept | not kept |  |" in page
    assert "`0123456789ab`" in page
    json.loads((out / RESULTS).read_text(), parse_constant=lambda name: pytest.fail(name))


# ------------------------------------------------------------------------- statistics by hand


def made(**means: list[float]) -> Comparison:
    """A comparison whose episodes have these mean TTFTs; each has 10 requests that all have its mean."""
    labels = list(means)
    n = len(means[labels[0]])

    def outcome(mean_s: float) -> Outcome:
        counts = np.histogram([mean_s] * 10, TTFT_EDGES_S)[0]
        decisions = np.histogram([mean_s / 1e3] * 4, DECISION_EDGES_S)[0]
        figures: dict[str, float | None] = {**dict.fromkeys(FIGURE_NAMES, 0.0), "ttft_mean_s": mean_s}
        return Outcome(figures, "h", (), (), counts, None, None, None, decisions)

    return Comparison(
        scenarios=(load_scenario("paper"),),
        labels=("steady",),
        rows=tuple(Row(label, "static") for label in labels),
        facts=tuple(PolicyFacts(False, "h", (), ()) for _ in labels),
        seeds=range(2_000_000, 2_000_000 + n),
        split="test",
        engine="compiled",
        reference=0,
        outcomes={(0, r): tuple(outcome(v) for v in means[label]) for r, label in enumerate(labels)},
    )


RULE = [10.0, 12.0, 9.0, 30.0, 11.0, 14.0]
HALF_WAY = made(rule=RULE, far=[v - 4 for v in RULE], agent=[v - 3 for v in RULE])


def verdicts(comparison: Comparison, *targets: dict[str, Any]) -> list[tuple[str, bool | None, bool | None]]:
    given = [{"statement": "s", "scenarios": ["steady"], **target} for target in targets]
    config = ResultsConfig.model_validate(fields(targets=given))
    return [(j.word, j.met, j.sure) for j in judge(config, {"steady": comparison})]


def test_the_share_of_the_way_by_hand() -> None:
    share = share_of_way(HALF_WAY, "agent", "rule", "far")
    assert (share.mean, share.low, share.high) == pytest.approx((0.75, 0.75, 0.75))
    with pytest.raises(NotMeasuredError, match="rule is not ahead of far"):
        share_of_way(HALF_WAY, "agent", "far", "rule")
    way = {"measure": "share_of_way", "start": "rule", "end": "far"}
    assert verdicts(HALF_WAY, {**way, "at_least": 0.7}, {**way, "at_least": 0.8}) == [
        ("yes", True, True),
        ("**no**", False, True),
    ]
    back = {"measure": "share_of_way", "start": "far", "end": "rule", "at_least": 0.1}
    assert verdicts(HALF_WAY, back) == [("not measured", None, None)]


def test_differences_are_judged_by_their_interval() -> None:
    mixed = made(rule=RULE, agent=[v + d for v, d in zip(RULE, (-9, 1, -7, 8, -6, 5), strict=True)])
    better, not_worse = ({"measure": m, "against": "rule"} for m in ("better", "not_worse"))
    assert verdicts(HALF_WAY, better, not_worse) == [("yes", True, True), ("yes", True, True)]
    # the mean is lower, but not beyond doubt: better is missed, not worse is met
    assert verdicts(mixed, better, not_worse) == [
        ("**no** (not beyond doubt)", False, False),
        ("yes (not beyond doubt)", True, False),
    ]
    worse = made(rule=RULE, agent=[v + 3 for v in RULE])
    assert verdicts(worse, better, not_worse) == [("**no**", False, True), ("**no**", False, True)]
    few = made(rule=RULE[:3], agent=[1.0, 1.0, 1.0])
    assert verdicts(few, better, not_worse) == [("not measured", None, None)] * 2


def test_reductions_and_nearness_by_hand() -> None:
    fifth = made(rule=RULE, agent=[0.8 * v for v in RULE])
    for figure in ("mean", "p90"):
        given = {"measure": "reduction", "against": "rule", "figure": figure}
        assert verdicts(fifth, {**given, "at_least": 0.15}, {**given, "at_least": 0.25}) == [
            ("yes", True, True),
            ("**no**", False, True),
        ]
    near = made(rule=RULE, agent=[1.015 * v for v in RULE])
    within = {"measure": "within", "against": "rule"}
    assert verdicts(near, {**within, "at_most": 0.02}, {**within, "at_most": 0.01}) == [
        ("yes", True, True),
        ("**no**", False, True),
    ]
    # better by more than that is a miss too
    assert verdicts(fifth, {**within, "at_most": 0.02}) == [("**no**", False, True)]


def test_p90_is_of_all_requests_of_all_seeds() -> None:
    # 60 requests, 50 of them up to 14 s: the 54th is of the seed with 30 s; the mean of the seeds' own P90 is 14.3 s
    assert pooled_p90_s(HALF_WAY, "rule") == pytest.approx(30.0, rel=0.03)
    assert pooled_p90_s(made(rule=[1.0] * 9 + [50.0] * 1), "rule") < 1.1
    assert pooled_p90_s(made(rule=[1.0] * 8 + [50.0] * 2), "rule") == pytest.approx(50, rel=0.03)
    ratio = p90_ratio(made(rule=[2.0] * 6, agent=[1.0] * 6), "agent", "rule")
    assert ratio.mean == pytest.approx(0.5, rel=0.03)


def test_lost_seeds_and_decision_times_by_hand() -> None:
    c = made(rule=[5.0, 5.0, 5.0, 5.0], agent=[4.0, 9.0, 5.0, 6.0])
    assert lost_seeds(c, "agent", "rule") == [(2_000_001, 9.0, 5.0), (2_000_003, 6.0, 5.0)]
    assert decision_quantile_s(c, "rule", 0.5) == pytest.approx(5e-3, rel=0.03)
    slow = made(rule=[5.0] * 6, agent=[50.0] * 6)
    faster = {"measure": "faster_decisions", "against": "rule"}
    assert verdicts(slow, faster) == [("**no**", False, None)]
    assert verdicts(made(rule=[5.0] * 6, agent=[1.0] * 6), faster) == [("yes", True, None)]


def test_every_training_seed_counts() -> None:
    policies = [
        *fields()["policies"],
        *({"label": f"seed {k}", "policy": "static", "role": "training seed"} for k in range(2)),
    ]
    target = {"statement": "s", "measure": "all_better", "scenarios": ["steady"], "against": "rule"}
    config = ResultsConfig.model_validate(fields(policies=policies, targets=[target]))
    low, high = [v - 3 for v in RULE], [v + 3 for v in RULE]
    for second, met in ((low, True), (high, False)):
        (found,) = judge(config, {"steady": made(rule=RULE, agent=low, **{"seed 0": low, "seed 1": second})})
        assert found.met is met
        assert found.measured.startswith(f"{2 + met} of 3: ")
    (found,) = judge(config, {"steady": made(rule=RULE, agent=high, **{"seed 0": low, "seed 1": low})})
    assert found.met is False
    assert found.measured.startswith("2 of 3: ")
    assert verdicts(HALF_WAY, {"measure": "all_better", "against": "rule"}) == [("not measured", None, None)]


def test_training_time_is_told_from_the_run(tmp_path: Path) -> None:
    from prfaas_trainings.results_run import training_of

    (tmp_path / "run.json").write_text(
        json.dumps({"algorithm": "ppo", "steps": 5, "elapsed_s": 90.5, "seeds": {"learning": 2}})
    )
    found = training_of(Row("agent", f"{MODULE}:OneSite"), str(tmp_path))
    assert (found.algorithm, found.steps, found.elapsed_s, found.seed) == ("ppo", 5, 90.5, 2)
    with pytest.raises(PrfaasError, match=r"policy agent: run .*: holds no run.json of a training"):
        training_of(Row("agent", f"{MODULE}:OneSite"), str(tmp_path / "none"))
