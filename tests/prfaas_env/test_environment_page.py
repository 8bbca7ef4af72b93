"""`docs/environment.md` stays true: its field table, its other tables, and its examples.

Run as a program it writes the table of observation fields anew.
"""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from prfaas_env.env import PrfaasEnv
from prfaas_env.rewards import REWARDS
from prfaas_env.scenarios import load_scenario
from prfaas_env.scenarios.models import RewardSettings
from prfaas_env.simulator.engine import ENGINES
from prfaas_env.telemetry import LINK_FIELDS, PD_FIELDS, PRFAAS_FIELDS, Field, schema_for

PAGE = Path(__file__).parents[2] / "docs" / "environment.md"
_BLOCK = re.compile(r"(<!-- fields: begin .*? -->\n)(.*?)(<!-- fields: end -->)", re.DOTALL)


def _row(name: str, f: Field, meaning: str) -> str:
    scale = f.scale if f.scale == "linear" else f"{f.scale}, s = {f.scale_at:,g}"
    flag = f"`{f.flag}`" if f.flag else ""
    return f"| {name} | {f.unit} | {f.low:,g} | {f.high:,g} | {scale} | {flag} | {meaning} |"


def _table(fields: tuple[Field, ...]) -> list[str]:
    """Markdown rows; fields that differ by a number at the end share one."""
    rows = ["| field | unit | low | high | scale | flag | meaning |", "|---|---|---|---|---|---|---|"]
    k = 0
    while k < len(fields):
        stem = re.sub(r"_\d\d$", "_", fields[k].name)
        same = (
            [f for f in fields if f.name.startswith(stem) and f.name != stem]
            if stem != fields[k].name
            else []
        )
        if same:
            meaning = same[0].doc.replace(
                f"log bin {int(same[0].name[-2:])} of", "one of the log bins, in all"
            )
            rows.append(_row(f"`{same[0].name}` .. `{same[-1].name}`", same[0], meaning))
            k += len(same)
        else:
            rows.append(_row(f"`{fields[k].name}`", fields[k], fields[k].doc))
            k += 1
    return rows


def fields_markdown() -> str:
    """The three tables of the page."""
    parts = (
        ("Each PD cluster", PD_FIELDS),
        ("Each PrfaaS cluster", PRFAAS_FIELDS),
        ("Each link", LINK_FIELDS),
    )
    out: list[str] = []
    for title, fields in parts:
        out += ["", f"**{title}** ({len(fields)} fields)", "", *_table(fields)]
    return "\n".join([*out, "", ""])


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page(), re.DOTALL | re.MULTILINE)
    assert found, f"docs/environment.md has no section {title!r}"
    return found[1]


def first_column(text: str, after: str) -> list[str]:
    """Names in the first column of the table that begins with the header `after`."""
    table = text[text.index(after) :].split("\n\n")[0]
    return [re.findall(r"`\"?(\w+)\"?`", line)[0] for line in table.splitlines()[2:]]


def test_sections_in_gymnasium_order() -> None:
    titles = re.findall(r"^## (.*)$", page(), re.MULTILINE)
    order = ["Description", "Action Space", "Observation Space", "Rewards", "Starting State", "Episode End"]
    assert titles == [
        *order,
        "Arguments",
        "Info",
        "Snapshot and restore",
        "What is modelled, simplified and left out",
        "Version History",
    ]
    in_docstring = re.findall(r"^## (.*)$", inspect.getdoc(PrfaasEnv) or "", re.MULTILINE)
    assert in_docstring == [*order, "Arguments", "Version History"]


def test_the_field_table_is_the_schema() -> None:
    found = _BLOCK.search(page())
    assert found
    assert found[2].strip() == fields_markdown().strip(), (
        "docs/environment.md is behind prfaas_env/telemetry.py; write it anew: "
        "python tests/prfaas_env/test_environment_page.py"
    )


def test_the_field_table_names_every_field() -> None:
    """Independent of how rows are written: each name stands in the page, ranges included."""
    text = section("Observation Space")
    for fields in (PD_FIELDS, PRFAAS_FIELDS, LINK_FIELDS):
        for f in fields:
            if not f.name.startswith("length_share_"):
                assert f"| `{f.name}` | {f.unit} |" in text
                assert f.doc in text
    assert "`length_share_00` .. `length_share_23`" in text
    assert f"make {len(schema_for(1, 1, 1))} numbers" in text


def test_tables_of_the_docstring_and_the_page_are_the_same() -> None:
    rows = [line.strip() for line in (inspect.getdoc(PrfaasEnv) or "").splitlines() if line.startswith("|")]
    assert len(rows) > 8
    lines = set(page().splitlines())
    assert not [row for row in rows if row not in lines]


def test_rewards_and_their_defaults() -> None:
    text = section("Rewards")
    assert first_column(text, "| `reward` |") == list(REWARDS)
    settings = RewardSettings()
    for name, default in settings.model_dump().items():
        assert f"`{name}` ({default:g})" in text
    for name in ("waiting", "goodput", "cost", "paired"):
        env = PrfaasEnv(load_scenario("paper", overrides=["measure.horizon_s=2"]), reward=name)
        env.reset(seed=0)
        terms = env.step(env.codec.neutral())[4]["reward_terms"]
        assert set(terms) <= set(first_column(text, "| term |"))


def test_info_keys() -> None:
    listed = first_column(section("Info"), "| key |")
    env = PrfaasEnv(load_scenario("paper", overrides=["measure.horizon_s=2"]))
    _, at_reset = env.reset(seed=0)
    *_, at_step = env.step(env.codec.neutral())
    *_, truncated, at_end = env.step(env.codec.neutral())
    assert truncated
    always = [k for k in listed if k not in {"episode_seed", "reward_terms", "episode_metrics"}]
    assert list(at_reset) == [*always, "episode_seed"]
    assert list(at_step) == [*always, "reward_terms"]
    assert list(at_end) == [*always, "reward_terms", "episode_metrics"]


def test_info_keys_of_a_scenario_with_a_prefix_pool() -> None:
    listed = first_column(section("Info"), "| key |")
    more = first_column(section("Info"), "| key (prefix pool) |")
    env = PrfaasEnv(load_scenario("mooncake_pool", overrides=["measure.horizon_s=2"]))
    _, at_reset = env.reset(seed=0)
    always = [k for k in listed if k not in {"episode_seed", "reward_terms", "episode_metrics"}]
    at = always.index("clipped")
    assert list(at_reset) == [*always[:at], *more, *always[at:], "episode_seed"]


def test_arguments() -> None:
    text = section("Arguments")
    parameters = inspect.signature(PrfaasEnv).parameters
    assert first_column(text, "| argument |") == list(parameters)
    for source in (text, inspect.getdoc(PrfaasEnv) or ""):
        call = re.search(r'gym\.make\(\s*"PrfaaS-v0",\s*(.*?),?\s*\)\n', source, re.DOTALL)
        assert call
        given = dict(re.findall(r"(\w+)=(\S+?)(?:,|$)", call[1].replace("\n", " ")))
        assert given == {k: repr(p.default).replace("'", '"') for k, p in parameters.items()}
        for engine in ENGINES:
            assert f'`"{engine}"`' in source


def test_examples_run() -> None:
    examples = doctest.DocTestParser().get_doctest(page(), {}, "environment.md", str(PAGE), 0)
    assert len(examples.examples) > 20
    told: list[str] = []
    result = doctest.DocTestRunner().run(examples, out=told.append)
    assert result.failed == 0, "".join(told)


@pytest.mark.parametrize("name", ["paper", "drift", "naive", "homogeneous", "mooncake", "mooncake_pool"])
def test_the_observation_has_the_size_that_the_page_gives(name: str) -> None:
    env = PrfaasEnv(name)
    deployment = env.scenario.deployment
    counts = (len(deployment.pd), len(deployment.prfaas), len(deployment.links))
    sizes = [int(n) for n in re.findall(r"\((\d+) fields\)", section("Observation Space"))]
    assert np.dot(counts, sizes) == env.observation_space.shape[0]


if __name__ == "__main__":
    new = _BLOCK.sub(lambda m: m[1] + fields_markdown() + m[3], page())
    if new != page():
        PAGE.write_text(new, encoding="utf-8")
        sys.stdout.write(f"{PAGE} written\n")
