"""`docs/workloads.md` stays true: its examples load, its tables hold what the models hold."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from prfaas_env.scenarios import load_scenario
from prfaas_env.workload.generate import generate_requests
from prfaas_env.workload.models import Arrivals, ProfileArrivals, SessionWorkload, TraceFormat, Workload
from prfaas_env.workload.traces import bundled_profiles

PAGE = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def first_column(title: str) -> list[str]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0] if title else PAGE.split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    return [row for row in rows if row not in {"kind", "format"}]  # the table's head


def kinds(union: object) -> list[str]:
    return [model.model_fields["kind"].default for model in get_args(get_args(union)[0])]


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_load_and_draw(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: paper\nname: mine\n{text}")
    table = generate_requests(load_scenario(path).workload, seed=0, horizon_s=200.0)
    assert len(table) > 50


def test_the_session_example_shows_every_field() -> None:
    assert len(EXAMPLES) == 3
    assert list(yaml.safe_load(EXAMPLES[1])["workload"]) == list(SessionWorkload.model_fields)


def test_tables_name_every_kind_and_format() -> None:
    assert first_column("") == kinds(Workload)
    assert first_column("Arrivals") == kinds(Arrivals)
    assert sorted(first_column("Traces")) == sorted(get_args(TraceFormat))
    for name in bundled_profiles():
        assert f"`{name}`" in PAGE
    row = next(line for line in PAGE.splitlines() if line.startswith("| `profile` |"))
    assert [f for f in re.findall(r"`(\w+)`", row) if f != "profile"] == [
        f for f in ProfileArrivals.model_fields if f != "kind"
    ]
