"""What a sweep varies: options, study files, cells, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios import load_scenario
from prfaas_trainings.compare import rows_of
from prfaas_trainings.study import (
    Study,
    load_study,
    read_studies,
    split_assignments,
    study_names,
    study_of_options,
)

LINK = "deployment.links.0.capacity_bps"


def make(**fields: Any) -> Study:
    return Study(**{"name": "s", "vary": {LINK: ("5 Gbps", "10 Gbps")}, "policies": ("static",), **fields})


def test_assignments_with_one_and_with_several_values() -> None:
    single, several = split_assignments(
        [f"{LINK}=5Gbps, 10 Gbps", "measure.horizon_s=60", "link_capacity.at_s=[1, 2],[3]", "slo.ttft_s=null"]
    )
    assert single == {"measure.horizon_s": 60, "slo.ttft_s": None}
    assert several == {LINK: ("5Gbps", "10 Gbps"), "link_capacity.at_s": ([1, 2], [3])}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no-equals"], "write it as field.path=value"),
        (["=3"], "write it as"),
        ([f"{LINK}="], "write it as"),
        (["a=1,2", "a=3"], "--set a: is given twice"),
        (["a=[1,2"], "not valid YAML"),
    ],
)
def test_wrong_assignments_are_one_line(given: list[str], message: str) -> None:
    with pytest.raises(PrfaasError, match=message):
        split_assignments(given)


@pytest.mark.parametrize("given", [[], ["a=1"], ["a=1,2", "b=1,2", "c=1,2"]])
def test_a_sweep_varies_one_or_two_fields(given: list[str]) -> None:
    with pytest.raises(PrfaasError, match=r"varies one or two fields.*found [03]"):
        study_of_options("paper", given, ["static"])


def test_cells_are_all_combinations_with_numbers_and_texts() -> None:
    study = study_of_options(
        "paper",
        [f"{LINK}=5Gbps,10Gbps", "workload.arrivals.rate_rps=1,2.5,3", "measure.horizon_s=60"],
        ["static"],
    )
    cells = study.cells()
    assert [c.index for c in cells] == list(range(6))
    assert [c.texts for c in cells[:4]] == [("5Gbps", "1"), ("5Gbps", "2.5"), ("5Gbps", "3"), ("10Gbps", "1")]
    assert cells[4].numbers == (10e9, 2.5)
    assert cells[4].label == f"{LINK}=10Gbps, workload.arrivals.rate_rps=2.5"
    by_hand = load_scenario(
        "paper", overrides=[f"{LINK}=10Gbps", "workload.arrivals.rate_rps=2.5", "measure.horizon_s=60"]
    )
    assert cells[4].scenario == by_hand
    assert len({c.scenario.hash for c in cells}) == 6


def test_cases_take_scenarios_deployments_and_fields() -> None:
    study = make(
        cases=(
            {"name": "own"},
            {"name": "local", "deployment": "homogeneous", "set": {"deployment.pd.0.n_prefill": 12}},
            {"name": "other", "scenario": "drift"},
        ),
        vary={"control.conversion_interval_s": (15, 30)},
        set={"measure.horizon_s": 60},
    )
    cells = study.cells()
    assert study.axes == ("control.conversion_interval_s", "case")
    assert [c.texts[1] for c in cells] == ["own", "local", "other"] * 2
    assert cells[0].numbers == (15.0, None)
    assert [len(c.scenario.deployment.links) for c in cells[:3]] == [1, 0, 1]
    assert cells[1].scenario.deployment.pd[0].n_prefill == 12
    assert cells[2].scenario.name == "drift"
    assert {c.scenario.measure.horizon_s for c in cells} == {60}


def test_a_faulty_cell_is_named_before_anything_runs() -> None:
    with pytest.raises(
        PrfaasError, match=rf"study s, cell {LINK}=-1: .*links\.0\.capacity_bps: .*greater than 0"
    ):
        make(vary={LINK: ("5 Gbps", -1)}).cells()
    with pytest.raises(PrfaasError, match=r"cell deployment\.links\.0\.capacty=1: .*unknown field 'capacty'"):
        make(vary={"deployment.links.0.capacty": (1, 2)}).cells()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vary": {LINK: ("5 Gbps",)}}, "needs two or more values, found 1"),
        ({"vary": {LINK: ("5 Gbps", "5 Gbps")}}, "a value is given twice"),
        ({"vary": {}}, "varies one or two things .*, found 0"),
        ({"vary": {"a": (1, 2), "b": (1, 2)}, "cases": [{"name": "c"}]}, "found 3"),
        ({"cases": [{"name": "c"}, {"name": "c"}]}, "names must differ"),
        ({"metrics": ["ttft"]}, "unknown figure 'ttft'; known: ttft_mean_s"),
        ({"policies": []}, "policies"),
        ({"sets": {}}, "unknown field 'sets'; known: .*cases"),
    ],
)
def test_wrong_fields_of_a_file_are_one_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    content = {"vary": {LINK: ["5 Gbps", "10 Gbps"]}, "policies": ["static"], **fields}
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({"studies": {"one": content}}, default_flow_style=False).replace("!!python", "")
    )
    with pytest.raises(PrfaasError, match=rf"mine\.yaml: studies\.one: .*{message}") as caught:
        read_studies(path)
    assert "\n" not in str(caught.value)


def test_files_hold_named_studies(tmp_path: Path) -> None:
    fields = {"vary": {LINK: ["5 Gbps", "10 Gbps"]}, "policies": ["static"], "scenario": "own.yaml"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"studies": {"one": fields, "two": {**fields, "seeds": 3}}}))
    (tmp_path / "own.yaml").write_text("extends: paper\nname: own\n")
    assert load_study(f"{path}:two").seeds == 3
    assert load_study(f"{path}:one").cells()[0].scenario.name == "own"  # relative to the file
    with pytest.raises(PrfaasError, match="holds several studies: one, two"):
        load_study(str(path))
    with pytest.raises(PrfaasError, match="has no study 'three'; it has one, two"):
        load_study(f"{path}:three")
    with pytest.raises(PrfaasError, match="unknown study 'nothing'; shipped: bursts, "):
        load_study("nothing")
    path.write_text(yaml.safe_dump({"studies": {"only": fields}}))
    assert load_study(str(path)).name == "only"
    path.write_text(yaml.safe_dump({"study": {}}))
    with pytest.raises(PrfaasError, match=r"mine\.yaml: .*unknown field 'study'; known: studies"):
        load_study(str(path))
    path.write_text(yaml.safe_dump({"studies": {"only": {**fields, "name": "other"}}}))
    with pytest.raises(PrfaasError, match="the key is the name"):
        load_study(str(path))


@pytest.mark.parametrize("name", study_names())
def test_shipped_studies_are_whole(name: str) -> None:
    study = load_study(name)
    assert study.description
    cells = study.cells()
    assert len(cells) > 1
    assert len({c.scenario.hash for c in cells}) == len(cells)
    assert rows_of(study.policies, deployments=False)


def test_the_price_study_spends_the_same_money() -> None:
    """32 H200 and 64 H20 at a price of r H20 per H200, each at the split that `plan` finds best."""
    from prfaas_env.theory import plan

    for cell in load_study("price_ratio").cells()[1:]:
        ratio, gpus = float(cell.texts[0].split(":")[0]), int(cell.texts[0].split()[1])
        pd = cell.scenario.deployment.pd[0]
        assert gpus == 32 * ratio + 64 == 8 * (pd.n_prefill + pd.n_decode)
        assert plan(cell.scenario)["prfaas"].n_prefill == pd.n_prefill
