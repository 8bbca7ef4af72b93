"""Scenario files: every shipped one round-trips, every mistake is one line that names file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.scenarios.loader import scenario_yaml
from prfaas_env.scenarios.models import ConstantCapacity, StepCapacity
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import draw_world
from prfaas_env.workload.means import mean_rate_rps
from prfaas_env.workload.models import TraceWorkload

NAMES = scenario_names()
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def refused(spec: Any, **how: Any) -> str:
    with pytest.raises(PrfaasError) as caught:
        load_scenario(spec, **how)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_shipped_scenarios() -> None:
    assert sorted(NAMES) == NAMES
    assert {"drift", "homogeneous", "mooncake", "naive", "paper", "shared_prfaas", "two_regions"} < set(NAMES)
    assert len({load_scenario(name).hash for name in NAMES}) == len(NAMES)
    for name in NAMES:
        scenario = load_scenario(name)
        assert scenario.name == name
        assert scenario.description


def test_paper_is_the_case_study() -> None:
    """Paper sections 4.1 and 4.2: hardware, link, lengths, decode; the load is Poisson."""
    paper = load_scenario("paper")
    deployment = paper.deployment
    assert [(c.hardware, c.n_instances) for c in deployment.prfaas] == [("h200", 4)]
    assert [(c.hardware, c.n_prefill, c.n_decode) for c in deployment.pd] == [("h20", 3, 5)]
    assert [link.capacity_bps for link in deployment.links] == [100e9]
    assert paper.workload.model_dump()["input_tokens"] == {
        "kind": "lognormal",
        "mu": 9.9,
        "sigma": 1.0,
        "min_tokens": 128,
        "max_tokens": 131_072,
    }
    assert paper.workload.model_dump()["output_tokens"] == {"kind": "fixed", "tokens": 1024}
    assert paper.slo.tpot_s == 0.025
    assert paper.slo.ttft_s is None
    assert paper.link_capacity == ConstantCapacity()


def test_homogeneous_and_naive_are_the_paper_with_other_hardware() -> None:
    """Paper table 6: 9 + 3 H20 instances without a remote cluster; 4 H200 and 8 H20 instances that only decode."""
    paper = load_scenario("paper")
    for name, (n_remote, n_prefill, n_decode) in {"homogeneous": (0, 9, 3), "naive": (4, 0, 8)}.items():
        other = load_scenario(name)
        [pd] = other.deployment.pd
        assert sum(c.n_instances for c in other.deployment.prfaas) == n_remote
        assert (pd.n_prefill, pd.n_decode) == (n_prefill, n_decode)
        assert len(other.deployment.links) == min(n_remote, 1)
        assert other.replace(deployment=paper.deployment).hash == paper.hash


@pytest.mark.parametrize("name", NAMES)
def test_show_and_load_give_the_same_scenario(name: str, write: Write) -> None:
    scenario = load_scenario(name)
    again = load_scenario(write(scenario_yaml(scenario)))
    assert again == scenario
    assert again.hash == scenario.hash
    assert load_scenario(scenario) is scenario
    assert Scenario.model_validate(json.loads(scenario.model_dump_json())) == scenario


# ------------------------------------------------------------------ hash


def test_the_hash_follows_the_content_and_not_the_name() -> None:
    paper = load_scenario("paper")
    assert load_scenario("paper", overrides=["name=other", "description=words"]).hash == paper.hash
    written_otherwise = ["deployment.links.0.capacity_bps=12.5 GB/s", "measure.horizon_s=3.6e3"]
    assert load_scenario("paper", overrides=written_otherwise).hash == paper.hash


@pytest.mark.parametrize(
    "change",
    [
        "measure.horizon_s=3601",
        "deployment.pd.0.n_decode=6",
        "deployment.links.0.capacity_bps=99 Gbps",
        "workload.arrivals.rate_rps=2.51",
        "slo.ttft_s=6",
        "reward.scale=21",
        "transport.pipelining=false",
        "model.hardware.h20.decode.slots=21",
        "admission.max_queue_requests=5",
    ],
)
def test_every_change_of_content_changes_the_hash(change: str) -> None:
    assert load_scenario("paper", overrides=[change]).hash != load_scenario("paper").hash


def test_a_trace_counts_by_its_content_wherever_it_lies(write: Write) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:01,100,5\n"
    first, second, other = (
        write(rows, "a/one.csv"),
        write(rows, "b/two.csv"),
        write(rows + "\n", "b/three.csv"),
    )

    def hash_of(file: Path | str) -> str:
        workload = f"workload={{kind: trace, file: '{file}', format: azure}}"
        return load_scenario("paper", overrides=[workload]).hash

    before = hash_of(first)
    assert before == hash_of(second) != hash_of(other)
    write(rows.replace("100", "1000"), "a/one.csv")
    assert hash_of(first) != before == hash_of(second)
    assert hash_of("bundled:azure_llm_2023_conv") == hash_of("bundled:azure_llm_2023_conv.csv")
    with pytest.raises(PrfaasError, match=r"gone\.csv: no such trace file"):
        hash_of(first.with_name("gone.csv"))


# ------------------------------------------------------------------ extends, deployments, overrides


def test_extends_merges_sections_and_another_kind_replaces(write: Write) -> None:
    path = write(
        "extends: drift\nname: mine\nmeasure: {warmup_s: 60}\n"
        "workload:\n  arrivals: {kind: poisson, rate_rps: 1.5}\n  output_tokens: {min_tokens: 5}\n"
    )
    mine, drift = load_scenario(path), load_scenario("drift")
    assert (mine.measure.warmup_s, mine.measure.horizon_s) == (60.0, drift.measure.horizon_s)
    assert mine.workload.model_dump()["arrivals"] == {"kind": "poisson", "rate_rps": 1.5}
    output = drift.workload.model_dump()["output_tokens"]
    assert mine.workload.model_dump()["output_tokens"] == output | {"min_tokens": 5}
    assert mine.link_capacity == drift.link_capacity


def test_extends_is_relative_to_the_file_and_chains(write: Write) -> None:
    write("extends: paper\nname: parent\nmeasure: {horizon_s: 100}\n", "sub/parent.yaml")
    write("extends: ../sub/parent.yaml\nname: middle\nslo: {ttft_s: 3}\n", "sub/middle.yaml")
    mine = load_scenario(write("extends: sub/middle.yaml\nname: mine\n"))
    assert (mine.name, mine.measure.horizon_s, mine.slo.ttft_s) == ("mine", 100.0, 3.0)


def test_yaml_merge_keys_work(write: Write) -> None:
    path = write(
        "extends: paper\nname: two\ndeployment:\n  pd:\n"
        "    - &node {name: a, hardware: h20, n_prefill: 1, n_decode: 2}\n    - {<<: *node, name: b, n_decode: 3}\n"
        "  links: [{pd: a, capacity_bps: 1 Gbps}]\n"
    )
    assert [(c.name, c.n_decode) for c in load_scenario(path).deployment.pd] == [("a", 2), ("b", 3)]


def test_deployment_by_name_or_path(write: Write) -> None:
    drift, naive = load_scenario("drift"), load_scenario("naive")
    mixed = load_scenario("drift", deployment="naive")
    assert mixed == drift.replace(deployment=naive.deployment, name="drift@naive")
    assert load_scenario(drift, deployment="naive") == mixed
    assert load_scenario("naive", deployment="naive") == naive
    path = write("extends: homogeneous\nname: mine\n")
    assert load_scenario("drift", deployment=str(path)).deployment == load_scenario("homogeneous").deployment
    assert f"unknown scenario 'none'; shipped: {', '.join(NAMES)};" in refused("drift", deployment="none")
    path = write("name: no deployment\n", "empty.yaml")
    assert refused("drift", deployment=str(path)) == f"{path}: has no deployment section"


def test_overrides() -> None:
    changed = load_scenario(
        "paper",
        overrides=[
            "measure.horizon_s=120",
            "deployment.links.0.capacity_bps=5 Gbps",
            "deployment.pd.0={name: pd0, hardware: h20, n_prefill: 1, n_decode: 2}",
            "slo.ttft_s=null",
            "workload.arrivals={kind: gamma, rate_rps: 1, shape: 0.5}",
            "workload.arrivals.shape=0.25",  # in order: the later one sees the earlier one
            "model.hardware.h20.decode.slots=7",
            "link_capacity={kind: steps, at_s: [10, 20], capacity_bps: [1 Gbps, 0]}",
        ],
    )
    assert changed.measure.horizon_s == 120.0
    assert changed.deployment.links[0].capacity_bps == 5e9
    assert (changed.deployment.pd[0].n_prefill, changed.deployment.pd[0].n_decode) == (1, 2)
    assert changed.workload.model_dump()["arrivals"] == {"kind": "gamma", "rate_rps": 1.0, "shape": 0.25}
    assert changed.link_capacity == StepCapacity(at_s=(10.0, 20.0), capacity_bps=(1e9, 0.0))
    model = load_scenario("paper").model.model_dump()
    model["hardware"]["h20"]["decode"]["slots"] = 7
    assert changed.model.model_dump() == model
    # the same on a Scenario that is already loaded
    paper = load_scenario("paper")
    assert load_scenario(paper, overrides=["model.hardware.h20.decode.slots=7"]).model == changed.model
    assert paper == load_scenario("paper")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("measure.horizon_s", "--set 'measure.horizon_s': write it as field.path=value"),
        ("=3", "--set '=3': write it as field.path=value"),
        ("measure.horizon_s=[", "--set 'measure.horizon_s=[': the value is not valid YAML"),
        ("measure.horizon_s=\x07", "--set 'measure.horizon_s=\\x07': the value is not valid YAML"),
        ("deployment.links.1.capacity_bps=1", "capacity_bps: '1' is not an item of a list of 1"),
        ("deployment.links.first.capacity_bps=1", "capacity_bps: 'first' is not an item of a list of 1"),
        ("name.first=1", "--set name.first: 'name' holds a plain value, not fields"),
        ("slo.tpot_s.x=1", "--set slo.tpot_s.x: 'slo.tpot_s' holds a plain value, not fields"),
        ("model.hardware.h20.decode.slots=0", "scenario paper: model.hardware.h20.decode.slots: "),
        ("measure.horizon_s=soon", "scenario paper: measure.horizon_s: "),
        ("mesure.horizon_s=5", "unknown field 'mesure'; known: name, description, model, deployment,"),
    ],
)
def test_wrong_overrides(assignment: str, message: str) -> None:
    assert message in refused("paper", overrides=[assignment])


def _told(assignment: str) -> str:
    try:
        load_scenario("paper", overrides=[assignment])
    except PrfaasError as error:
        return str(error)
    return ""


@given(st.text(max_size=30))
def test_any_override_is_taken_or_refused_in_one_line(text: str) -> None:
    for assignment in (text, f"measure.horizon_s={text}", f"model={text}", f"{text}=1"):
        told = _told(assignment)
        assert len(told.splitlines()) <= 1, repr(told)


# ------------------------------------------------------------------ mistakes in a file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "measure: {horizn_s: 5}",
            "mine.yaml: measure: unknown field 'horizn_s'; known: horizon_s, warmup_s",
        ),
        (
            "horizon_s: 5",
            "mine.yaml: (top level): unknown field 'horizon_s'; known: name, description, model,",
        ),
        ("measure: {horizon_s: soon}", "mine.yaml: measure.horizon_s: Input should be a valid number"),
        ("measure: 5", "mine.yaml: measure: "),
        ("measure: {horizon_s: .nan}", "mine.yaml: measure.horizon_s: Input should be a finite number"),
        (
            "measure: {horizon_s: 1e300}",
            "mine.yaml: measure.horizon_s: Input should be less than or equal to",
        ),
        ("measure: {horizon_s: 0}", "mine.yaml: measure.horizon_s: Input should be greater than or equal to"),
        ("measure: {warmup_s: 3600}", "mine.yaml: measure: warmup_s 3600.0 must be below horizon_s 3600.0"),
        ("control: {control_interval_s: 1e-10}", "mine.yaml: control.control_interval_s: "),
        (
            "control: {conversion_interval_s: 1.5}",
            "mine.yaml: control: conversion_interval_s 1.5 must be a whole multiple of control_interval_s 1.0",
        ),
        (
            "control: {conversion_interval_s: 0.5}",
            "mine.yaml: control: conversion_interval_s 0.5 must be a whole multiple of control_interval_s 1.0",
        ),
        (
            "workload: {output_tokens: {kind: fixed, tokens: 2000000000}}",
            "workload.synthetic.output_tokens.fixed.tokens: Input should be less than or equal to 1000000000",
        ),
        (
            "workload: {output_tokens: {kind: poisson, mean_tokens: 2.0e+9}}",
            "workload.synthetic.output_tokens.poisson: mean_tokens must be at most 1,000,000,000, found 2e+09",
        ),
        (
            "workload: {output_tokens: {kind: empirical, tokens: [5, 0]}}",
            "workload.synthetic.output_tokens.empirical.tokens.1: Input should be greater than or equal to 1",
        ),
        ("model: gpt-7", "mine.yaml: model: unknown model 'gpt-7'; known: kimi-linear-48b-a3b, "),
        ("measure: {horizon_s: 5}\nmeasure: {horizon_s: 6}", "mine.yaml:4: not valid YAML: key 'measure' is"),
        (
            "measure: {horizon_s: 5, horizon_s: 6}",
            "mine.yaml:3: not valid YAML: key 'horizon_s' is written twice",
        ),
        ("measure: [", "mine.yaml:4: not valid YAML: "),
        (
            "measure: !!python/name:os.system",
            "mine.yaml:3: not valid YAML: could not determine a constructor",
        ),
        ("? [a, b]\n: 1", "mine.yaml:3: not valid YAML: found unhashable key"),
        ("description: \x07", "mine.yaml:3: not valid YAML: special characters are not allowed"),
        ("measure: &a {b: *a}", "mine.yaml:3: not valid YAML: found unconstructable recursive node"),
        ("1: 2", "mine.yaml: (top level): unknown field 1; known: name,"),
        (
            "workload: {arrivals: {kind: burst, rate_rps: 1}}",
            "mine.yaml: workload.synthetic.arrivals: Input tag 'burst' found",
        ),
        (
            "workload: {arrivals: {kind: regimes, rate_rps: "
            "{values: [1, 2], probabilities: [0.5, 0.4], mean_holding_s: 9}}}",
            "mine.yaml: workload.synthetic.arrivals.regimes.rate_rps: probabilities must be >= 0 and sum to 1, "
            "they sum to 0.9",
        ),
        (
            "link_capacity: {kind: regimes, capacity_bps: "
            "{values: [1, 2], probabilities: [-0.5, 1.5], mean_holding_s: 9}}",
            "mine.yaml: link_capacity.regimes.capacity_bps: probabilities must be >= 0 and sum to 1",
        ),
        (
            "link_capacity: {kind: regimes, capacity_bps: {values: [1], probabilities: [0.5, 0.5], mean_holding_s: 9}}",
            "mine.yaml: link_capacity.regimes.capacity_bps: 1 values but 2 probabilities",
        ),
        (
            "link_capacity: {kind: steps, at_s: [5, 5], capacity_bps: [1, 2]}",
            "mine.yaml: link_capacity.steps: at_s must rise strictly",
        ),
        (
            "link_capacity: {kind: steps, at_s: [-5], capacity_bps: [1]}",
            "mine.yaml: link_capacity.steps.at_s.0: Input should be greater than or equal to 0 (found -5)",
        ),
        (
            "link_capacity: {kind: steps, at_s: [5], capacity_bps: [1, 2]}",
            "mine.yaml: link_capacity.steps: 1 at_s but 2 capacity_bps",
        ),
        (
            "link_capacity: {kind: steps, at_s: [5], capacity_bps: [10 GBps]}",
            "mine.yaml: link_capacity.steps.capacity_bps.0: unknown unit 'GBps' in '10 GBps'; allowed: Gbps,",
        ),
    ],
)
def test_a_mistake_names_file_and_field(text: str, message: str, write: Write) -> None:
    path = write(f"extends: paper\nname: mine\n{text}\n")
    told = refused(path)
    assert told.startswith(str(path))
    assert message in told


_PD = "{name: pd0, hardware: h20, n_prefill: 3, n_decode: 5}"
_FAR = "{name: prfaas0, hardware: h200, n_instances: 4}"


@pytest.mark.parametrize(
    ("pd", "prfaas", "links", "message"),
    [
        # impossible splits
        (
            "{hardware: h20, n_prefill: 3, n_decode: 0}",
            _FAR,
            "",
            "pd.0.n_decode: Input should be greater than or",
        ),
        (
            "{hardware: h20, n_prefill: -1, n_decode: 1}",
            _FAR,
            "",
            "pd.0.n_prefill: Input should be greater than",
        ),
        (
            "{hardware: h20, n_prefill: 1.5, n_decode: 1}",
            _FAR,
            "",
            "pd.0.n_prefill: Input should be a valid integer",
        ),
        (
            "{hardware: h20, n_prefill: 1, n_decode: 1, min_prefill: 2}",
            _FAR,
            "",
            "pd.0: n_prefill 1 is below min_prefill 2",
        ),
        (
            "{hardware: h20, n_prefill: 1, n_decode: 1, min_decode: 2}",
            _FAR,
            "",
            "pd.0: n_decode 1 is below min_decode",
        ),
        (
            "{hardware: h20, n_prefill: 0, n_decode: 1}",
            _FAR,
            "",
            "pd cluster 'pd0' has no link to a prfaas cluster, so it needs at least one prefill instance",
        ),
        (
            "{hardware: h20, n_prefill: 2, n_decode: 1, min_prefill: 0}",
            "",
            "",
            "pd cluster 'pd0' has no link to a prfaas cluster, so it needs at least one prefill instance",
        ),
        ("", _FAR, "", "deployment.pd: Tuple should have at least 1 item"),
        # links and names
        (_PD, _FAR, "{pd: pd1, capacity_bps: 1}", "link names pd cluster 'pd1'; known: ['pd0']"),
        (_PD, _FAR, "{prfaas: far, capacity_bps: 1}", "link names prfaas cluster 'far'; known: ['prfaas0']"),
        (_PD, _FAR, "{capacity_bps: 1}, {capacity_bps: 2}", "two links between 'prfaas0' and 'pd0'"),
        (_PD, _FAR, "{capacity_bps: 0}", "links.0.capacity_bps: Input should be greater than 0"),
        (
            _PD,
            _FAR,
            "{capacity_bps: 100 GBps}",
            "links.0.capacity_bps: unknown unit 'GBps' in '100 GBps'; allowed",
        ),
        (_PD, _FAR, "{}", "links.0.capacity_bps: Field required"),
        (f"{_PD}, {_PD}", _FAR, "{capacity_bps: 1}", "pd cluster names must differ, found ['pd0', 'pd0']"),
        (_PD, f"{_FAR}, {_FAR}", "{capacity_bps: 1}", "prfaas cluster names must differ"),
        # hardware
        (
            "{hardware: b200, n_prefill: 1, n_decode: 1}",
            _FAR,
            "",
            "cluster 'pd0' names hardware 'b200'; the model has [",
        ),
        ("{hardware: h200, n_prefill: 1, n_decode: 1}", _FAR, "", "hardware 'h200' has no decode profile"),
        (
            _PD,
            "{hardware: b200, n_instances: 1}",
            "",
            "cluster 'prfaas0' names hardware 'b200'; the model has [",
        ),
        # arrivals
        (
            "{hardware: h20, n_prefill: 1, n_decode: 1, arrival_share: 0}",
            _FAR,
            "",
            "arrival_share is 0 at every pd cluster; at least one must be above 0",
        ),
    ],
)
def test_impossible_deployments(pd: str, prfaas: str, links: str, message: str, write: Write) -> None:
    path = write(
        f"extends: paper\nname: mine\ndeployment: {{pd: [{pd}], prfaas: [{prfaas}], links: [{links}]}}\n"
    )
    told = refused(path)
    assert told.startswith(f"{path}: ")
    assert "deployment" in told
    assert message in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping of scenario fields, found NoneType"),
        ("- a\n", "expected a mapping of scenario fields, found list"),
        ("name: mine\n", "model: Field required (and 2 more)"),
        (b"name: caf\xe9\n", "is not UTF-8 text"),
        ("extends: 3\n", "extends: must be a scenario name or path, found 3"),
        ("extends: papr\n", "mine.yaml: extends: unknown scenario"),
        ("extends: gone.yaml\n", "gone.yaml: cannot be read: No such file or directory"),
    ],
)
def test_wrong_files(text: str | bytes, message: str, write: Write) -> None:
    told = refused(write(text))
    assert message in told
    assert str(write("").parent) in told


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused("papr").startswith(f"unknown scenario 'papr'; shipped: {', '.join(NAMES)};")
    assert refused("").startswith("unknown scenario ''")
    assert (
        refused(tmp_path / "no.yaml") == f"{tmp_path / 'no.yaml'}: cannot be read: No such file or directory"
    )
    (tmp_path / "folder.yaml").mkdir()
    assert refused(tmp_path / "folder.yaml") == f"{tmp_path / 'folder.yaml'}: cannot be read: Is a directory"


@pytest.mark.parametrize("parent", ["mine.yaml", "./mine.yaml", "../sub/mine.yaml", "other.yaml"])
def test_extends_in_a_circle(parent: str, write: Write) -> None:
    write("extends: mine.yaml\n", "sub/other.yaml")
    told = refused(write(f"extends: {parent}\n", "sub/mine.yaml"))
    assert "`extends` goes round in a circle: " in told
    assert len(told) < 1000


# ------------------------------------------------------------------ traces in a scenario


def test_a_trace_path_is_relative_to_the_file_that_names_it(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:01,100,5\n", "data/rows.csv")
    workload = "workload: {kind: trace, file: ../data/rows.csv, format: azure}"
    parent = write(f"extends: paper\nname: parent\n{workload}\n", "sub/parent.yaml")
    child = write("extends: sub/parent.yaml\nname: child\n", "child.yaml")
    monkeypatch.chdir(trace.parent.parent)
    for path in (parent, child, Path("child.yaml")):
        loaded = load_scenario(path).workload
        assert isinstance(loaded, TraceWorkload)
        assert Path(loaded.file).resolve() == trace.resolve()
    shown = write(scenario_yaml(load_scenario("child.yaml")), "elsewhere/shown.yaml")
    assert load_scenario(shown) == load_scenario(child)
    absolute = write(
        f"extends: paper\nworkload: {{kind: trace, file: {trace}, format: azure}}\n", "absolute.yaml"
    )
    assert load_scenario(absolute).workload.model_dump()["file"] == str(trace)


def test_the_path_of_a_rate_profile_is_relative_too(write: Write) -> None:
    rates = write("window_start_s,total_rate_rps\n0,1\n10,3\n", "data/rates.csv")
    arrivals = "workload: {arrivals: {kind: profile, file: ../data/rates.csv}}"
    scenario = load_scenario(write(f"extends: paper\nname: mine\n{arrivals}\n", "sub/mine.yaml"))
    assert mean_rate_rps(scenario.workload) == 2.0
    assert scenario.with_rate(5.0).workload.model_dump()["arrivals"]["file"] == str(rates)
    # Its content is part of the scenario; where it lies is not.
    before = scenario.hash
    write(rates.read_text(), "elsewhere/data/rates.csv")
    moved = write(f"extends: paper\nname: mine\n{arrivals}\n", "elsewhere/sub/mine.yaml")
    assert load_scenario(moved).hash == before
    rates.write_text("window_start_s,total_rate_rps\n0,1\n10,4\n")
    assert scenario.hash != before


def test_a_bundled_trace_is_no_path(write: Write) -> None:
    path = write("extends: mooncake\nname: mine\n", "sub/mine.yaml")
    assert load_scenario(path).workload == load_scenario("mooncake").workload


# ------------------------------------------------------------------ rates


@pytest.mark.parametrize("name", NAMES)
def test_with_rate_sets_the_mean_rate_and_nothing_else(name: str) -> None:
    scenario = load_scenario(name)
    faster = scenario.with_rate(3.5)
    assert mean_rate_rps(faster.workload) == pytest.approx(3.5, rel=1e-9)
    assert faster.replace(workload=scenario.workload) == scenario


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 0.0, -1.0])
@pytest.mark.parametrize("name", ["paper", "drift", "mooncake"])
def test_a_rate_that_is_none_is_refused(name: str, rate: float) -> None:
    with pytest.raises(
        PrfaasError, match=r"the arrival rate must be above 0 and at most 1e\+06 req/s, found"
    ):
        load_scenario(name).with_rate(rate)


def test_regimes_without_arrivals_have_no_rate_to_scale() -> None:
    silent = load_scenario("drift", overrides=["workload.arrivals.rate_rps.values=[0, 0, 0]"])
    with pytest.raises(PrfaasError, match="scenario drift: the regimes have no arrivals"):
        silent.with_rate(1.0)


# ------------------------------------------------------------------ prefix pool

NO_LIMIT = ("prefix_pool.prfaas_capacity_bytes=null", "prefix_pool.pd_capacity_bytes=null")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prefix_pool.pd_capacity_bytes=5 gigs", "prefix_pool.pd_capacity_bytes: unknown unit 'gigs'"),
        ("prefix_pool.pd_capacity_bytes=-1", "prefix_pool.pd_capacity_bytes: .* greater than or equal to 0"),
        ("prefix_pool.checkpoints=often", "'end_of_prompt', 'every_n_tokens' or 'none' .found 'often'"),
        ("prefix_pool.checkpoints=every_n_tokens", "checkpoint_every_tokens goes with .* found None"),
        ("prefix_pool.checkpoint_every_tokens=512", "found 512 with end_of_prompt"),
        ("prefix_pool.size=3", "unknown field 'size'"),
        ("model.kv.bytes_per_token=0", "prefix_pool: its unit is one block of attention KV, but model"),
    ],
)
def test_a_bad_prefix_pool_is_named(override: str, message: str) -> None:
    with pytest.raises(PrfaasError, match=message):
        load_scenario("mooncake_pool", overrides=[override])


def test_capacities_of_a_pool_must_be_stated() -> None:
    with pytest.raises(PrfaasError, match=r"prefix_pool.pd_capacity_bytes: Field required"):
        load_scenario("paper", overrides=["prefix_pool.prfaas_capacity_bytes=1 TB"])


def test_a_distance_of_checkpoints_that_is_no_whole_block_is_refused_when_the_blocks_are_known() -> None:
    overrides = ["prefix_pool.checkpoints=every_n_tokens", "prefix_pool.checkpoint_every_tokens=1000"]
    scenario = load_scenario("mooncake_pool", overrides=overrides)
    with pytest.raises(PrfaasError, match=r"is 1000; it must be a whole multiple of .* block of 512 tokens"):
        draw_world(scenario, 0)


def test_a_pool_is_part_of_the_hash_and_none_leaves_it_alone() -> None:
    paper = load_scenario("paper")
    pooled = load_scenario("paper", overrides=NO_LIMIT)
    assert pooled.hash != paper.hash
    assert pooled.replace(prefix_pool=None).hash == paper.hash
    assert "prefix_pool" in paper.model_dump()


def test_hit_share_of_the_mooncake_slice() -> None:
    """With room for all, idle prefill nodes and attention blocks alone it is that of an infinite cache, 35.1%.

    A little less: a prompt that arrives while an equal one is still being prefilled finds nothing, and one token of
    each is prefilled. With state, checkpoints behind prompts serve less; without checkpoints nothing.
    """
    nodes = ("deployment.pd.0.n_prefill=300", "deployment.pd.0.n_decode=300")

    def share(*overrides: str) -> float:
        scenario = load_scenario("mooncake_pool", overrides=[*NO_LIMIT, *nodes, *overrides])
        episode = simulate(scenario, make_policy("never"), seed=0, whole_trace=True)
        return float(episode.metrics["prefix_pool"]["hit_share"])

    dense = share("model.kv.fixed_bytes=0")
    assert 0.345 < dense < 0.351
    every_block = ("prefix_pool.checkpoints=every_n_tokens", "prefix_pool.checkpoint_every_tokens=512")
    assert share(*every_block) == dense
    assert 0.30 < share() < dense
    assert share("prefix_pool.checkpoints=none") == 0.0
