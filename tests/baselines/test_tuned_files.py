"""Tuned parameters: the shipped files, by name, overridden, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from prfaas_baselines.tuned_files import (
    TunedFile,
    best_rule,
    best_spec,
    best_table,
    read_best,
    read_tuned,
    tuned_families,
    tuned_folder,
    tuned_table,
    tuned_yaml,
)
from prfaas_env.base import PrfaasError
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios.loader import load_scenario

SHIPPED = sorted((path.parent.name, path.stem) for path in tuned_folder().glob("*/*.yaml"))
RULE = "earliest_finish_conversion"


def content(**changes):
    score = {"relative": 0.9, "low": 0.8, "high": 1.0, "ttft_mean_s": {"paper": 2.0}}
    fields = {
        "policy": RULE,
        "family": "mine",
        "parameters": {"period_s": 30.0, "margin_s": 0.5},
        "training": {"default": score, "tuned": score},
        "validation": {"default": score, "tuned": score},
        "study": {
            "trials": 1,
            "pruned": 0,
            "reference": "static",
            "training_seeds": {"first": 0, "count": 2},
            "validation_seeds": {"first": 1_000_000, "count": 2},
            "scenarios": {"paper": "0" * 12},
            "validation_scenarios": {"paper": "0" * 12},
            "versions": {},
        },
    }
    return {**fields, **changes}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content()))
    return path


@pytest.mark.parametrize(("policy", "family"), SHIPPED)
def test_every_shipped_file_makes_its_rule(policy: str, family: str, make_telemetry) -> None:
    found = read_tuned(policy, family)
    assert (found.policy, found.family) == (policy, family)
    # Chosen where it is at least as good as the defaults, on seeds that the search did not see.
    assert found.validation["tuned"].relative <= found.validation["default"].relative
    training, validation = found.study.training_seeds, found.study.validation_seeds
    assert training.first + training.count <= 1_000_000 <= validation.first
    assert found.study.trials >= 200
    rule = make_policy(f"{policy}:tuned={family}")
    scenario = load_scenario("paper")
    rule.reset(PolicyContext(scenario, make_telemetry(scenario).schema, 0))
    assert len(rule.decide(make_telemetry(scenario)).clusters) == 1
    parameters = getattr(rule, "parameters", None)
    if parameters is not None:
        assert {name: getattr(parameters, name) for name in found.parameters} == found.parameters
    lines = (tuned_folder() / policy / f"{family}.csv").read_text().splitlines()
    assert len(lines) == found.study.trials + 1


def test_something_is_shipped() -> None:
    assert {policy for policy, family in SHIPPED if family == "drift"} >= {
        "dual_timescale",
        "earliest_finish_conversion",
    }


def test_parameters_of_a_file_of_ones_own(own: Path) -> None:
    rule = make_policy(f"{RULE}:tuned={own}")
    assert (rule.parameters.period_s, rule.parameters.margin_s) == (30.0, 0.5)
    assert rule.parameters.dwell_s == make_policy(RULE).parameters.dwell_s
    changed = make_policy(f"{RULE}:tuned={own},period_s=45")
    assert (changed.parameters.period_s, changed.parameters.margin_s) == (45.0, 0.5)


@pytest.mark.parametrize(
    ("policy", "key", "value"),
    [
        ("static", "threshold_tokens", 7_000),
        ("uncached_threshold", "threshold_tokens", 500),
        ("earliest_finish", "margin_s", 1.5),
    ],
)
def test_rules_with_one_parameter(policy, key, value, tmp_path: Path, make_telemetry) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content(policy=policy, parameters={key: value})))
    scenario = load_scenario("paper")

    def decided(spec):
        rule = make_policy(spec)
        rule.reset(PolicyContext(scenario, make_telemetry(scenario).schema, 0))
        (cluster,) = rule.decide(make_telemetry(scenario)).clusters
        return getattr(cluster, key)

    assert decided(f"{policy}:tuned={path}") == value
    assert decided(f"{policy}:tuned={path},{key}=9") == 9


def test_two_tuned_files_are_two_policies_to_a_comparison(own: Path) -> None:
    from prfaas_env.policy import policy_hash

    spec = f"{RULE}:tuned={own}"
    first = policy_hash(make_policy(spec), spec)
    own.write_text(yaml.safe_dump(content(parameters={"period_s": 75.0})))
    assert policy_hash(make_policy(spec), spec) != first


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (f"{RULE}:tuned=mars", ["tuned is 'mars'", "families with tuned parameters"]),
        ("static:tuned=nowhere.yaml", ["tuned is 'nowhere.yaml'", ".yaml file"]),
        ("best_rule:family=mars", ["family is 'mars'", "known: "]),
    ],
)
def test_unknown_names(spec: str, words: list[str]) -> None:
    with pytest.raises(PrfaasError) as raised:
        make_policy(spec)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "static"}, ["holds parameters of 'static'"]),
        ({"parameters": {"period": 3.0}}, ["'period'", "period_s"]),
        ({"parameters": {"period_s": -1.0}}, ["period_s", "greater than 0"]),
        ({"colour": "red"}, ["unknown field 'colour'"]),
    ],
)
def test_a_faulty_file_is_named(changes, words, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content(**changes)))
    with pytest.raises(PrfaasError) as raised:
        make_policy(f"{RULE}:tuned={path}")
    for word in words:
        assert word in str(raised.value)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    record = TunedFile.model_validate(content())
    path = tmp_path / "again.yaml"
    path.write_text(tuned_yaml(record))
    assert read_tuned(RULE, str(path)) == record
    assert tuned_families(RULE, tmp_path) == []


PAGE = Path(__file__).parents[2] / "docs" / "baselines.md"


@pytest.mark.parametrize("table", [tuned_table, best_table])
def test_the_page_shows_what_is_shipped(table) -> None:
    """Put what `tuned_table()` and `best_table()` give into the page when files are tuned anew."""
    assert table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", sorted(read_best().families))
def test_the_best_rule_is_the_lowest_of_its_candidates(family: str) -> None:
    found = read_best().families[family]
    assert found.spec == best_spec(family)
    lowest = min(found.candidates, key=lambda spec: found.candidates[spec].relative)
    assert found.candidates[found.spec].relative == found.candidates[lowest].relative
    assert found.candidates[found.reference].relative == 1.0
    rule = best_rule(family)
    assert type(rule) is type(make_policy(found.spec))
    assert make_policy(f"best_rule:family={family}").fingerprint  # type: ignore[attr-defined]
