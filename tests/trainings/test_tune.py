"""`prfaas tune` on rules: the same trials whether stopped or not, pairs of seeds, the choice on validation seeds."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from optuna.trial import TrialState
from pydantic import ValidationError

from prfaas_baselines.tuned_files import BestFile, TunedFile, read_tuned
from prfaas_env.base import PrfaasError
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_env.theory import plan
from prfaas_env.workload.means import mean_rate_rps
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.load import at_load
from prfaas_trainings.tune import (
    STUDY_FILE,
    TRIALS_FILE,
    TUNED_FILE,
    Bench,
    Candidate,
    PolicyTuning,
    Told,
    blocks_of,
    check_space,
    complete,
    finished,
    goes_on,
    open_study,
    relative,
    rule_defaults,
    score_of,
    spec_of,
)
from prfaas_trainings.tune_best import UNTUNED, candidates_of, choose_best
from prfaas_trainings.tune_config import (
    Family,
    FamilyScenario,
    NamedFamily,
    SpaceField,
    Tuning,
    load_family,
    load_tuning,
    read_families,
    tune_folder,
    tuning_names,
)

from .conftest import invoke

QUIET = Told(lambda text: None, lambda what, total, begun: lambda done, note: None)
SHORT = ("measure.horizon_s=40",)


def family(**changes: Any) -> NamedFamily:
    fields: dict[str, Any] = {
        "scenarios": [{"scenario": "paper", "overrides": list(SHORT)}],
        "training_seeds": {"first": 0, "count": 4},
        "validation_seeds": {"first": 1_000_000, "count": 5},
        "best_seeds": {"first": 1_000_500, "count": 3},
        "block": 1,
    }
    return NamedFamily("short", Family.model_validate({**fields, **changes}))


def tuning(**changes: Any) -> Tuning:
    fields: dict[str, Any] = {
        "name": "t",
        "policy": "static",
        "space": {"threshold_tokens": {"low": 1_000, "high": 100_000, "log": True}},
        "start": {"threshold_tokens": 19_400},
        "trials": 8,
        "startup_trials": 4,
        "finalists": 3,
        "reduction_factor": 2,
        "reference": "earliest_finish",
        "engine": "simpy",
    }
    return Tuning.model_validate({**fields, **changes})


@pytest.fixture(scope="module")
def whole(
    runner: EpisodeRunner, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PolicyTuning, TunedFile, Path]:
    """A tuning in one go."""
    out = tmp_path_factory.mktemp("tune") / "whole"
    made = PolicyTuning(tuning(), family(), out, runner)
    return made, made.run(QUIET), out


# ------------------------------------------------------------------------------------------- the space


@pytest.mark.parametrize(
    "field",
    [
        {"low": 1},
        {"low": 2, "high": 1},
        {"low": 0, "high": 1, "log": True},
        {"low": 1, "high": 8, "log": True, "step": 1},
        {"low": 0.5, "high": 3, "whole": True},
        {"choices": ["a"]},
        {"choices": ["a", "a"]},
        {"choices": ["a", "b"], "low": 0},
        {"low": 0, "high": 1, "colour": "red"},
    ],
)
def test_a_faulty_field_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SpaceField.model_validate(field)


def test_numbers_are_tried_as_they_are_written_down() -> None:
    field = SpaceField(low=1.0, high=100.0, log=True)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(20):
        value = field.suggest(study.ask(), "x")
        assert value == float(f"{value:.4g}")
        assert 1.0 <= value <= 100.0
    whole = SpaceField(low=10, high=30, whole=True, step=10)
    assert {whole.suggest(study.ask(), "n") for _ in range(30)} == {10, 20, 30}
    assert not whole.holds(True)
    assert not SpaceField(choices=(5, 30)).holds("5")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"space": {"treshold": {"low": 1, "high": 2}}, "start": {}},
            ["space.treshold", "unknown parameter"],
        ),
        (
            {"space": {"threshold_tokens": {"low": -5, "high": 9}}, "start": {}},
            ["space.threshold_tokens", "-5"],
        ),
        ({"start": {}}, ["space.threshold_tokens", "the default None is not in it"]),
        (
            {
                "policy": "earliest_finish_conversion",
                "space": {"period_s": {"low": 5, "high": 50}},
                "start": {},
            },
            ["space.period_s", "the default 60.0 is not in it"],
        ),
        ({"policy": "nobody"}, ["space.threshold_tokens", "nobody"]),
    ],
)
def test_a_space_that_the_rule_does_not_have(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PrfaasError) as raised:
        check_space(tuning(**changes))
    for word in ("tuning t", *words):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"policy": None}, "policy or training"),
        ({"training": "drift"}, "policy or training"),
        ({"policy": None, "training": "drift", "family": "drift", "start": {}}, "family"),
        ({"overrides": ["minutes=1"]}, "overrides belong to a tuning of a training"),
        ({"start": {"other": 1}}, "start.other: is not in the space"),
        ({"more_starts": [{"threshold_tokens": 5}]}, "more_starts.0.threshold_tokens: 5 is not in"),
        ({"trails": 3}, "unknown field 'trails'"),
    ],
)
def test_a_faulty_tuning_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        tuning(**changes)


@pytest.mark.parametrize(
    ("field", "first"), [("training_seeds", 1_000_000), ("validation_seeds", 0), ("best_seeds", 2_000_000)]
)
def test_seeds_of_another_split_are_refused(field: str, first: int) -> None:
    with pytest.raises(ValidationError, match=f"{field}: "):
        family(**{field: {"first": first, "count": 2}})


# ------------------------------------------------------------------------------------------- the score


def test_relative_is_the_mean_of_ratios_of_means() -> None:
    means = np.array([[1.0, 3.0], [10.0, 10.0]])
    reference = np.array([[2.0, 2.0], [5.0, 15.0]])
    # (4 / 4 + 20 / 20) / 2, and with other seeds (3 / 2 + 10 / 15) / 2
    assert relative(means, reference) == 1.0
    assert relative(means[:, 1:], reference[:, 1:]) == pytest.approx((1.5 + 10 / 15) / 2)


def test_the_interval_is_around_the_score_and_paired() -> None:
    rng = np.random.default_rng(3)
    reference = rng.lognormal(1.0, 1.0, size=(2, 200))
    case = load_scenario("paper")
    twice = score_of(2.0 * reference, reference, [case], ["a", "b"])
    assert (twice.relative, twice.low, twice.high) == pytest.approx((2.0, 2.0, 2.0))
    noisy = score_of(reference * rng.uniform(0.8, 1.0, size=(2, 200)), reference, [case], ["a", "b"])
    assert noisy.low is not None
    assert noisy.high is not None
    assert noisy.low < noisy.relative < noisy.high
    assert noisy.low > 0.85
    assert noisy.high < 0.95
    assert noisy.relative == pytest.approx(0.9, abs=0.02)
    traced = score_of(2.0 * reference, reference, [load_scenario("mooncake")], ["a", "b"])
    assert (traced.low, traced.high) == (None, None)


# ------------------------------------------------------------------------------------------- a tuning


def test_the_defaults_come_first_and_are_run_to_the_end(whole: tuple[PolicyTuning, TunedFile, Path]) -> None:
    _, record, out = whole
    rows = list(csv.DictReader((out / TRIALS_FILE).open()))
    assert len(rows) == 8 == record.study.trials
    assert rows[0]["threshold_tokens"] == "19400.0"
    assert (rows[0]["ended"], rows[0]["blocks"]) == ("complete", "4")
    assert sum(row["ended"] == "pruned" for row in rows) == record.study.pruned > 0
    assert {row["blocks"] for row in rows if row["ended"] == "pruned"} <= {"1", "2", "3"}


def test_the_scores_are_those_of_the_simulator(whole: tuple[PolicyTuning, TunedFile, Path]) -> None:
    _, record, out = whole
    scenario = load_scenario("paper", overrides=SHORT)

    def total(spec: str, seeds: range) -> float:
        runs = [simulate(scenario, make_policy(spec), seed=seed, engine="simpy") for seed in seeds]
        return sum(run.metrics["ttft_s"]["mean"] for run in runs)

    rows = list(csv.DictReader((out / TRIALS_FILE).open()))
    for row in rows[:4]:
        seeds = range(int(row["blocks"]))
        spec = f"static:threshold_tokens={row['threshold_tokens']}"
        expected = total(spec, seeds) / total("earliest_finish", seeds)
        assert float(row["relative"]) == pytest.approx(expected, rel=1e-5)
    validation = range(1_000_000, 1_000_005)
    chosen = spec_of("static", dict(record.parameters))
    for name, spec in (("default", "static"), ("tuned", chosen)):
        expected = total(spec, validation) / total("earliest_finish", validation)
        assert record.validation[name].relative == pytest.approx(expected)


def test_the_best_of_the_finalists_on_validation_seeds_is_chosen(
    whole: tuple[PolicyTuning, TunedFile, Path],
) -> None:
    _, record, out = whole
    kept = sorted((out / "evaluations").glob("validation_trial_*.json"))
    assert 1 <= len(kept) <= 3
    base = json.loads((out / "evaluations" / "validation_reference.json").read_text())["ttft_mean_s"]
    scores = {}
    for file in [*kept, out / "evaluations" / "validation_default.json"]:
        content = json.loads(file.read_text())
        assert content["seeds"] == list(range(1_000_000, 1_000_005))
        scores[content["policy"]] = np.sum(content["ttft_mean_s"]) / np.sum(base)
    best = min(scores, key=lambda spec: scores[spec])
    assert spec_of("static", dict(record.parameters)) == best
    assert record.validation["tuned"].relative <= record.validation["default"].relative


def test_defaults_that_nothing_beats_stay(runner: EpisodeRunner, tmp_path: Path) -> None:
    """A space of bad thresholds: the plan's optimum wins, and the file holds no parameters."""
    made = PolicyTuning(
        tuning(space={"threshold_tokens": {"low": 1, "high": 50}}, start={"threshold_tokens": 10}, trials=2),
        family(),
        tmp_path / "t",
        runner,
    )
    record = made.run(QUIET)
    assert record.parameters == {}
    assert record.validation["tuned"] == record.validation["default"]


class Stopping(EpisodeRunner):
    """Ctrl-C after a number of calls."""

    def __init__(self, calls: int) -> None:
        super().__init__(1)
        self.left = calls

    def run(self, jobs: Any, on_done: Any = None) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().run(jobs, on_done)


@pytest.mark.parametrize("calls", [1, 4, 9])
def test_a_stopped_tuning_goes_on_as_if_it_had_not_been(
    calls: int, whole: tuple[PolicyTuning, TunedFile, Path], runner: EpisodeRunner, tmp_path: Path
) -> None:
    _, record, out = whole
    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        PolicyTuning(tuning(), family(), again, Stopping(calls)).run(QUIET)
    assert PolicyTuning(tuning(), family(), again, runner).run(QUIET) == record
    for name in (TRIALS_FILE, TUNED_FILE):
        assert (again / name).read_text() == (out / name).read_text()


def test_a_trial_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / STUDY_FILE
    cut_off = open_study(tuning(), file).ask()
    again = open_study(tuning(), file)
    assert finished(again) == []
    assert again.trials[cut_off.number].state is TrialState.FAIL


def test_more_trials_may_be_asked_for_later(runner: EpisodeRunner, tmp_path: Path) -> None:
    few = PolicyTuning(tuning(trials=3), family(), tmp_path / "t", runner).run(QUIET)
    more = PolicyTuning(tuning(trials=5), family(), tmp_path / "t", runner).run(QUIET)
    assert (few.study.trials, more.study.trials) == (3, 5)


@pytest.mark.parametrize(
    ("changed", "where", "word"),
    [
        ({"reference": "static"}, {}, "tuning.reference"),
        ({}, {"training_seeds": {"first": 0, "count": 3}}, "family.training_seeds.count"),
        ({}, {"scenarios": [{"scenario": "drift", "overrides": list(SHORT)}]}, "scenario"),
    ],
)
def test_another_tuning_in_the_folder_is_refused_by_the_field(
    changed: dict[str, Any],
    where: dict[str, Any],
    word: str,
    whole: tuple[PolicyTuning, TunedFile, Path],
    runner: EpisodeRunner,
) -> None:
    with pytest.raises(PrfaasError, match=word):
        PolicyTuning(tuning(**changed), family(**where), whole[2], runner)


def test_further_starts_follow_the_first_trial(runner: EpisodeRunner, tmp_path: Path) -> None:
    starts = [{"threshold_tokens": 5_000}, {"threshold_tokens": 30_000}]
    made = PolicyTuning(tuning(more_starts=starts, trials=3), family(), tmp_path / "t", runner)
    made.run(QUIET)
    rows = list(csv.DictReader((tmp_path / "t" / TRIALS_FILE).open()))
    assert [float(row["threshold_tokens"]) for row in rows] == [19_400, 5_000, 30_000]


def test_every_trial_meets_the_same_seeds_in_the_same_order(runner: EpisodeRunner, tmp_path: Path) -> None:
    asked: dict[str, list[int]] = {}

    class Noting(EpisodeRunner):
        def run(self, jobs: Any, on_done: Any = None) -> Any:
            for job in jobs:
                asked.setdefault(job.row.label, []).append(job.seed)
            return super().run(jobs, on_done)

    PolicyTuning(tuning(trials=6, finalists=1), family(), tmp_path / "t", Noting(1)).run(QUIET)
    for label, seeds in asked.items():
        search = [seed for seed in seeds if seed < 1_000_000]
        own = search[: len(search) - 4] if len(search) > 4 else search  # the winner is read once more
        assert own == list(range(len(own))), label


@pytest.mark.parametrize(
    ("score", "others", "kept"),
    [
        (1.0, [], True),
        (1.1, [1.0], False),  # the better of two
        (0.9, [1.0], True),
        (1.5, [1.0, 2.0, 3.0, 4.0, 5.0], True),  # second of six: a third goes on
        (2.5, [1.0, 2.0, 3.0, 4.0, 5.0], False),
    ],
)
def test_of_three_trials_one_goes_on(score: float, others: list[float], kept: bool) -> None:
    assert goes_on(score, others, 3) is kept


def test_blocks() -> None:
    seeds = family(training_seeds={"first": 10, "count": 5}).family.training_seeds
    assert blocks_of(seeds, 2) == ((10, 11), (12, 13), (14,))


def test_a_scenario_without_requests_is_told(runner: EpisodeRunner) -> None:
    empty = load_scenario("paper", overrides=["workload.arrivals.rate_rps=0", *SHORT])
    with pytest.raises(PrfaasError, match="scenario paper, seed 3: no request"):
        Bench([empty], runner, "simpy").means(Candidate("static", "never"), [3])


# -------------------------------------------------------------------------------------------- families


def test_a_load_is_a_share_of_what_the_plan_carries() -> None:
    paper = load_scenario("paper")
    capacity_rps = plan(paper, "service")["prfaas"].lambda_max_rps
    assert mean_rate_rps(at_load(paper, 0.8).workload) == pytest.approx(0.8 * capacity_rps)
    half = load_scenario("mooncake", overrides=["workload.end_s=960"])
    loaded = at_load(half, 0.6)
    capacity_rps = plan(half, "service")["prfaas"].lambda_max_rps
    assert mean_rate_rps(loaded.workload) == pytest.approx(0.6 * capacity_rps)
    # The same requests in another time: rate times horizon stays.
    assert mean_rate_rps(half.workload) * 960 == pytest.approx(
        mean_rate_rps(loaded.workload) * loaded.measure.horizon_s
    )


def test_training_and_validation_parts_of_a_scenario() -> None:
    given = FamilyScenario(
        scenario="mooncake",
        training=("workload.end_s=100",),
        validation=("workload.start_s=100", "workload.end_s=150"),
    )
    made = Family(scenarios=(given,))
    (training,), (validation,) = made.cases("training"), made.cases("validation")
    assert training.workload.end_s == 100  # type: ignore[union-attr]
    assert (validation.workload.start_s, validation.workload.end_s) == (100, 150)  # type: ignore[union-attr]


def test_no_shipped_family_touches_the_half_of_the_trace_that_is_for_tests() -> None:
    for name, found in read_families(tune_folder() / "families.yaml").items():
        for split in ("training", "validation"):
            for case in found.cases(split):  # type: ignore[arg-type]
                if case.workload.kind == "trace":
                    assert case.workload.end_s is not None, name
                    assert case.workload.end_s <= 960, name


@pytest.mark.parametrize("name", [n for n in tuning_names() if load_tuning(n).policy])
def test_shipped_tunings_search_every_parameter(name: str) -> None:
    found = load_tuning(name)
    assert found.trials >= 200
    first = check_space(found)
    assert found.family is not None
    load_family(found.family)
    defaults = rule_defaults(str(found.policy))
    if defaults:
        assert set(found.space) == set(defaults)
        assert first == defaults


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("families: {a: {scenarios: [{scenario: nowhere.yaml}]}}", "nowhere.yaml"),
        ("families: {a: {scenarios: []}}", "families.a.scenarios"),
        ("families: {a: {scenarios: [{scenario: paper}], seed: 3}}", "unknown field 'seed'"),
    ],
)
def test_a_faulty_family_is_named(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "families.yaml"
    path.write_text(text)
    with pytest.raises(PrfaasError, match=word):
        load_family(f"{path}:a").family.cases("training")
    with pytest.raises(PrfaasError, match="unknown family"):
        load_family("mars")


# ------------------------------------------------------------------------------------- the best rule


def test_the_best_rule_of_a_family(
    whole: tuple[PolicyTuning, TunedFile, Path],
    runner: EpisodeRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, record, out = whole
    folder = tmp_path / "tuned"
    (folder / "static").mkdir(parents=True)
    (folder / "static" / "short.yaml").write_text((out / TUNED_FILE).read_text())
    labels = [c.name for c in candidates_of("short", folder)]
    assert labels == [*UNTUNED, *(["static:tuned=short"] if record.parameters else [])]
    monkeypatch.setattr("prfaas_trainings.tune_best.UNTUNED", UNTUNED[:5])
    found = choose_best(family(), folder, tmp_path / "out", runner, "simpy", QUIET)
    assert found.validation_seeds.first == 1_000_500
    assert found.candidates[found.reference].relative == 1.0
    assert found.spec == min(found.candidates, key=lambda label: found.candidates[label].relative)
    # Everything is kept: the same again without an episode, but for a rule whose parameters have changed.
    assert choose_best(family(), folder, tmp_path / "out", Stopping(0), "simpy", QUIET) == found
    changed = {**record.model_dump(mode="json"), "parameters": {"threshold_tokens": 4_321.0}}
    (folder / "static" / "short.yaml").write_text(yaml.safe_dump(changed))
    again = choose_best(family(), folder, tmp_path / "out", Stopping(1), "simpy", QUIET)
    assert again.candidates["static:tuned=short"] != found.candidates.get("static:tuned=short")
    assert again.candidates["static"] == found.candidates["static"]


# ----------------------------------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a command on a tuning and a family in files."""

    def write(**changes: Any) -> list[str]:
        (tmp_path / "t.yaml").write_text(yaml.safe_dump(tuning(**changes).model_dump(mode="json")))
        one = family().family.model_dump(mode="json")
        (tmp_path / "f.yaml").write_text(yaml.safe_dump({"families": {"short": one}}))
        return [
            *("tune", "--config", str(tmp_path / "t.yaml"), "--family", f"{tmp_path / 'f.yaml'}:short"),
            *("--out", str(tmp_path / "out"), "--jobs", "1"),
        ]

    return write


def test_the_command_writes_shows_and_saves(
    files: Callable[..., list[str]], run: Callable[..., str], tmp_path: Path
) -> None:
    save = tmp_path / "saved"
    text = run(*files(trials=3), "--save", str(save))
    assert "default, validation" in text
    saved = read_tuned("static", str(save / "static" / "short.yaml"))
    assert len((save / "static" / "short.csv").read_text().splitlines()) == 4
    shown = json.loads(run(*files(trials=3), "--json"))
    assert TunedFile.model_validate(shown) == saved
    best = json.loads(
        run(
            *("tune", "--best", "--family", f"{tmp_path / 'f.yaml'}:short", "--save", str(save)),
            *("--out", str(tmp_path / "best"), "--jobs", "1", "--json"),
        )
    )
    record = BestFile.model_validate(yaml.safe_load((save / "best.yaml").read_text()))
    assert record.families["short"].spec == best["spec"]


def test_ctrl_c_says_how_to_go_on(
    files: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = files()
    asked = 0
    means = Bench.means

    def stopping(self: Bench, *given: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 4:
            raise KeyboardInterrupt
        return means(self, *given)

    monkeypatch.setattr(Bench, "means", stopping)
    result = invoke(arguments)
    assert result.exit_code == 130
    assert "go on with: prfaas tune --config" in result.stderr
    monkeypatch.undo()
    assert len(complete(open_study(tuning(), tmp_path / "out" / STUDY_FILE))) == 0
    assert invoke(arguments).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["tune"], "say --config"),
        (["tune", "--best"], "--best needs --family and --save"),
        (["tune", "--best", "--trials", "3"], "--trials: has no effect with --best"),
        (["tune", "--config", "nothing"], "unknown tuning 'nothing'"),
        (["tune", "--config", "static", "--family", "mars"], "unknown family 'mars'"),
        (["tune", "--config", "static", "--set", "trials=0"], "trials"),
        (["tune", "--config", "static", "--set", "space.colour={low: 1, high: 2}"], "space.colour"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrfaasError, match=word):
        invoke(arguments)
    assert not list(tmp_path.iterdir())
