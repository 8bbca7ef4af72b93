"""`prfaas report`: every figure of the metrics, nothing from elsewhere, names as text, whatever is missing."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.intervals import Interval
from prfaas_env.scenarios import load_scenario
from prfaas_env.theory import plan
from prfaas_trainings import report, report_charts, reproduction, results
from prfaas_trainings.compare import Comparison, compare, run_timelines
from prfaas_trainings.episodes import FIGURES, STAGES, EpisodeRunner, Row
from prfaas_trainings.report import _list, _ordinal, answer, asked, breakable, read_folder, write_report
from prfaas_trainings.tables import LATENCY, SERVICE

SHORT = load_scenario("paper", overrides=["measure.horizon_s=60"])
SLICE = load_scenario("mooncake", overrides=["workload.start_s=1200", "measure.horizon_s=60"])
SEEDS = range(2_000_000, 2_000_005)
#: A name that must stay text, in a page as in a picture.
NASTY = "<script>alert('$x$')</script>"
ROWS = [
    Row("never@homogeneous", "never", "homogeneous"),
    Row(NASTY, "earliest_finish"),
    Row("always", "always"),
    Row("never", "never"),
]


class Page(HTMLParser):
    """What a page holds: elements with attributes, text, cells of figures, ids."""

    VOID = frozenset({"meta", "wbr", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.cells: dict[tuple[str, str, str], str] = {}
        self._cell: tuple[str, str, str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag not in self.VOID:
            self.open.append(tag)
        if "data-figure" in found:
            self._cell = tuple(str(found[f"data-{k}"]) for k in ("scenario", "policy", "figure"))  # type: ignore[assignment]
            assert self._cell not in self.cells
            self.cells[self._cell] = ""  # type: ignore[index]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"
        if tag == "td":
            self._cell = None

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "script" in self.open:
            return
        self.text.append(data)
        if self._cell is not None:
            self.cells[self._cell] += data if "small" not in self.open else f" {data}"

    @property
    def words(self) -> str:
        """All text with single spaces."""
        return " ".join("".join(self.text).split())


@pytest.fixture(scope="module")
def made(runner: EpisodeRunner) -> Comparison:
    return compare([SHORT, SLICE], ROWS, seeds=SEEDS, split="test", runner=runner, engine="simpy")


@pytest.fixture(scope="module")
def folder(made: Comparison, runner: EpisodeRunner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    results.write_files(made, run_timelines(made, [0, 1], runner), out)
    return out


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return write_report(folder, folder / "report.html", 200).read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    parsed = Page(text)
    assert parsed.open == []
    return parsed


def test_every_figure_of_the_metrics_is_in_a_table(page: Page, folder: Path) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    by_name = {figure.name: figure for figure in FIGURES}
    expected = set()
    for scenario in metrics["scenarios"]:
        for policy, result in scenario["results"].items():
            for name in {*LATENCY, *SERVICE, *STAGES}:
                key = (scenario["label"], policy, name)
                expected.add(key)
                figure, content = by_name[name], result["figures"][name]

                def form(value: float, figure: Any = figure) -> str:
                    return f"{value * figure.factor:,.{figure.digits}f}"

                mean, *limits = page.cells[key].split(" ", 1)
                assert mean == form(content["mean"]), key
                if content["low"] is not None and limits:
                    assert limits == [f"[{form(content['low'])}, {form(content['high'])}]"]
                if content["low"] is None:
                    assert not limits
                elif not limits:  # left out where it says nothing
                    assert form(content["low"]) == form(content["high"]) == mean
            difference = result["difference_to_reference"]["ttft_mean_s"]
            if difference["mean"]:
                assert f"{difference['mean']:+,.2f}" in page.words
            for found in result["cost"].values():
                assert f"{found['mean']:,.2f}" in page.words
    assert set(page.cells) == expected


def test_hashes_seeds_versions_and_notes_are_told(page: Page, folder: Path) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    assert "5 test seeds, 2000000 to 2000004" in page.words
    for row in metrics["rows"]:
        assert row["policy_hash"] in page.words
    for scenario in metrics["scenarios"]:
        assert scenario["hash"] in page.words
        for result in scenario["results"].values():
            assert result["scenario_hash"] in page.words
            for warning in result["warnings"]:
                assert warning in page.words
        for note in scenario["notes"]:
            assert " ".join(note.split()) in page.words
    for name, version in metrics["versions"].items():
        assert name in page.words
        assert version in page.words
    assert "One replayed trace is one sample" in page.words


def test_nothing_comes_from_elsewhere(text: str, page: Page) -> None:
    assert not re.findall(r"(?i)https?:|ftp:|@import|//[a-z]", text)
    for tag, attributes in page.elements:
        assert tag not in {"script", "link", "iframe", "object", "img"}
        for name, value in attributes.items():
            if name in {"src", "href", "xlink:href", "data", "action"}:
                assert str(value).startswith("#"), (tag, name, value)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_names_are_text(text: str, page: Page) -> None:
    assert "<script" not in text
    assert NASTY in page.words
    assert "$x$" in page.words  # not a formula


def test_pictures_have_alternative_texts_and_ids_are_unique(page: Page) -> None:
    pictures = [a for tag, a in page.elements if a.get("role") == "img"]
    assert len(pictures) == len([tag for tag, _ in page.elements if tag == "svg"]) == 2 * 4
    assert all(len(str(a["aria-label"])) > 40 for a in pictures)
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    used = {str(v)[1:] for _, a in page.elements for k, v in a.items() if k in {"href", "xlink:href"}}
    used |= {m for _, a in page.elements for m in re.findall(r"url\(#([^)]*)\)", str(a.get("clip-path")))}
    assert used <= set(ids)


def test_tables_say_what_their_columns_are(page: Page) -> None:
    tables = [k for k, (tag, _) in enumerate(page.elements) if tag == "table"]
    heads = [k for k, (tag, _) in enumerate(page.elements) if tag == "thead"]
    assert len(heads) == len(tables)
    assert all(any(t < h < t + 4 for h in heads) for t in tables)
    scoped = [a for tag, a in page.elements if tag == "th" and "scope" in a]
    assert len(scoped) > 50


def test_headings_come_again_in_a_long_table(folder: Path) -> None:
    found = read_folder(folder)
    metrics = json.loads(json.dumps(found["comparison"]))
    scenario = metrics["scenarios"] = [metrics["scenarios"][0]]
    row = metrics["rows"][3]
    for k in range(30):
        metrics["rows"].append({**row, "label": f"n{k}"})
        scenario[0]["results"][f"n{k}"] = scenario[0]["results"]["never"]
        found["curves"]["scenarios"]["paper"][f"n{k}"] = found["curves"]["scenarios"]["paper"]["never"]
    text = report.render({**found, "comparison": metrics}, 0)
    assert text.count('class="head-again"') == 2 * 2  # 34 rows, two tables


def test_equal_files_give_an_equal_page(folder: Path, text: str, tmp_path: Path) -> None:
    assert write_report(folder, tmp_path / "again.html", 200).read_text() == text


# --------------------------------------------------------------------------------------------- sentences


def test_the_answer_by_hand() -> None:
    def result(mean: float, egress_bps: float, conversions: float) -> dict[str, Any]:
        def one(value: float) -> dict[str, Any]:
            return {"mean": value, "low": value - 0.5, "high": value + 0.5, "n": 5, "method": "seeds"}

        figures = {"ttft_mean_s": mean, "egress_mean_bps": egress_bps, "conversions": conversions}
        return {"figures": {name: one(value) for name, value in figures.items()}}

    def duel(other: str, word: str, mean: float, same: bool = True) -> dict[str, Any]:
        return {"policy": "agent", "other": other, "same_hardware": same, "word": word, "mean": mean}

    comparison = {
        "rows": [
            {"label": "agent", "deployment": None},
            {"label": "rule", "deployment": None},
            {"label": "slow", "deployment": None},
            {"label": "rich", "deployment": "naive"},
        ],
        "subjects": ["agent"],
        "split": "test",
        "seeds": {"count": 5, "first": 2_000_000},
        "scenarios": [
            {
                "label": "drift",
                "horizon_s": 1900.0,
                "warmup_s": 100.0,
                "results": {
                    "agent": result(6.0, 5e9, 3.0),
                    "rule": result(5.0, 7e9, 0.0),
                    "slow": result(9.0, 1e9, 0.0),
                    "rich": result(1.0, 0.0, 0.0),
                },
                "subject_minus_other_ttft_mean_s": [
                    duel("slow", "wins against", -3.0),
                    duel("rule", "loses to", 1.0),
                    duel("rich", "loses to", 5.0, same=False),
                ],
            }
        ],
    }
    assert answer(comparison) == [
        "On drift rule has the lowest mean time to first token, 5.00 [4.50, 5.50] s, agent comes 2nd of 3 with "
        "6.00 [5.50, 6.50] s.",
        "On drift agent loses to rule by 1.00 s, wins against slow by 3.00 s.",
        "On drift agent sends 5.00 Gbps over the link and moves 6.0 nodes per hour (the best other policy: rule sends "
        "7.00 Gbps over the link and moves no node).",
    ]
    assert asked(comparison).startswith(
        "Which of 4 scheduling policies gives requests their first token soonest"
    )


def test_words() -> None:
    assert _list([]) == "nothing"
    assert _list(["a"]) == "a"
    assert _list(["a", "b", "c"]) == "a, b and c"
    assert _list(["a", "b", "c"], 1) == "a and 2 more"
    assert [_ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th",
    ]  # fmt: skip
    assert str(breakable("a_b<c")) == "a_<wbr>b&lt;c"


# ------------------------------------------------------------------------------------- what may be missing


def test_no_requests_at_all(runner: EpisodeRunner, tmp_path: Path) -> None:
    silent = load_scenario("paper", overrides=["measure.horizon_s=10", "workload.arrivals.rate_rps=0"])
    empty = compare([silent], ROWS[1:], seeds=SEEDS, split="test", runner=runner, engine="simpy")
    results.write_files(empty, run_timelines(empty, [0], runner), tmp_path)
    page = Page(write_report(tmp_path, tmp_path / "r.html", 0).read_text())
    assert "On paper no request got a first token." in page.words
    assert page.cells["paper", "never", "ttft_mean_s"] == "-"
    assert len([tag for tag, _ in page.elements if tag == "svg"]) == 1  # the timeline alone
    assert "nan" not in page.words.lower().split()
    assert "The paper's table" not in page.words


def test_one_policy_one_seed_no_timeline(runner: EpisodeRunner, tmp_path: Path) -> None:
    alone = compare([SHORT], ROWS[2:3], seeds=SEEDS[:1], split="test", runner=runner, engine="simpy")
    results.write_files(alone, {}, tmp_path)
    page = Page(write_report(tmp_path, tmp_path / "r.html", 0).read_text())
    assert "On paper always has nothing on the same hardware to be compared with." in page.words
    assert "There is no other policy in this comparison." in page.words
    assert "[" not in page.cells["paper", "always", "ttft_mean_s"]  # one seed has no interval


def test_other_seeds_are_said_to_be_no_test(made: Comparison, tmp_path: Path) -> None:
    results.write_files(dataclasses.replace(made, split="validation"), {}, tmp_path)
    page = Page(write_report(tmp_path, tmp_path / "r.html", 0).read_text())
    assert "These are validation seeds: not a test of what was trained or chosen on them." in page.words


RUN = {
    "command": "prfaas train",
    "name": "mine",
    "versions": {"python": "3.11", "torch": "2.x"},
    "scenarios": [{"name": "drift", "hash": "abcdef012345"}],
    "seeds": {"learning": 1, "training": [0, 100], "validation": list(range(1_000_000, 1_000_100))},
    "status": "stopped after 4 minutes",
    "steps": 4096,
    "elapsed_s": 240.5,
    "best": {"steps": 2048, "score": 0.75, "ttft_mean_s": {"drift": 6.25}, "checkpoint": "x"},
}
VALIDATIONS = [
    {"steps": 0, "score": 1.0, "ttft_mean_s": {"drift": 8.5}, "checkpoint": "a"},
    {"steps": 2048, "score": 0.75, "ttft_mean_s": {"drift": 6.25}, "checkpoint": "b"},
    {"steps": 4096, "score": 0.8, "ttft_mean_s": {"drift": None}, "checkpoint": "c"},
]


def write_run(folder: Path, run: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "validation.json").write_text(json.dumps(VALIDATIONS))


def test_a_training(tmp_path: Path) -> None:
    write_run(tmp_path, RUN)
    page = Page(write_report(tmp_path, tmp_path / "r.html", 0).read_text())
    assert "Training mine" in page.words
    assert "0.750, 25.0% better than the policy that it started from" in page.words
    assert "the policy of step 2,048, with a mean time to first token of 6.25 s on drift" in page.words
    for v in VALIDATIONS:
        assert f"{v['score']:.3f}" in page.words
    assert "abcdef012345" in page.words
    assert len([tag for tag, _ in page.elements if tag == "svg"]) == 1


def test_an_unfinished_training(tmp_path: Path) -> None:
    unfinished = {k: v for k, v in RUN.items() if k not in ("best", "steps", "elapsed_s")}
    write_run(tmp_path, {**unfinished, "status": "running"})
    page = Page(write_report(tmp_path, tmp_path / "r.html", 0).read_text())
    assert "The training is not finished: running." in page.words


def test_a_demonstration_has_both(folder: Path, tmp_path: Path) -> None:
    for name in ("metrics.json", "curves.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    write_run(tmp_path / "training", RUN)
    page = Page(write_report(tmp_path, tmp_path / "r.html", 0).read_text())
    assert "4 policies on paper and mooncake" in page.words
    assert "Training mine" in page.words


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds neither metrics.json of a comparison nor run.json of a training"),
        ({"compare.json": "{}"}, "the comparison is not finished; go on with prfaas compare --out"),
        ({"metrics.json": '{"command": "prfaas sweep"}'}, "is of prfaas sweep; a report is made of"),
        ({"metrics.json": "{"}, r"metrics\.json: cannot be read"),
        (
            {"metrics.json": '{"command": "prfaas compare"}'},
            r"holds no curves\.json; run the comparison again",
        ),
        (
            {"metrics.json": '{"command": "prfaas compare"}', "curves.json": "{}"},
            "its files lack what a report needs",
        ),
        ({"run.json": "{}"}, "its files lack what a report needs"),
    ],
)
def test_folders_that_hold_something_else(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(PrfaasError, match=message) as caught:
        write_report(tmp_path, tmp_path / "r.html", 0)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r.html").exists()


def test_no_folder() -> None:
    with pytest.raises(PrfaasError, match="nowhere: is not a folder"):
        write_report(Path("nowhere"), Path("r.html"))


# ------------------------------------------------------------------------------------- the paper's table


def test_the_papers_table_is_published_computed_and_simulated() -> None:
    columns = reproduction.reproduce(2_000)
    found = plan(load_scenario("paper"))
    for column in columns:
        published, optimum = column.published, found[column.published.name]
        assert column.equations == optimum
        assert optimum.lambda_max_rps == pytest.approx(published.lambda_max_rps, rel=0.005)
        assert column.equations_service.lambda_max_rps < optimum.lambda_max_rps  # prefill time is convex
        # 2,000 prompts have a mean length within 5% of the law's
        simulated = column.simulated
        assert simulated["service_ttft_mean_s"] == pytest.approx(published.service_ttft_mean_s, rel=0.05)
        assert simulated["service_ttft_p90_s"] == pytest.approx(published.service_ttft_p90_s, rel=0.06)
        assert 0 < simulated["ttft_mean_s"] - simulated["service_ttft_mean_s"] < 0.2
    table = {row["title"]: row["cells"] for row in reproduction.rows(columns)}
    assert table["threshold (tokens)"][0] == ("19,400", "19,400", "")
    assert table["instances: PrfaaS / prefill / decode"][1] == ("- / 9 / 3", "- / 9 / 3", "")
    assert [cell[0] for cell in table["largest rate (req/s)"]] == ["3.24", "2.11", "2.45"]
    assert table["service TTFT, mean (s)"][0][2] == f"{columns[0].simulated['service_ttft_mean_s']:.2f}"


def test_the_table_stands_in_the_page(page: Page) -> None:
    for words in (
        "The paper's table, anew",
        "200 requests per column",
        "19,400",
        "3.24",
        "9.73",
        "homogeneous PD",
    ):
        assert words in page.words


# ---------------------------------------------------------------------------------------------- pictures


def test_thinning_keeps_peaks_and_means() -> None:
    lines = {
        "time_s": np.arange(10.0),
        "local_queue_requests": np.array([0, 9, 0, 0, 0, 0, 0, 0, 0, 5.0]),
        "ttft_s": np.array([1.0, 3.0, np.nan, np.nan, np.nan, np.nan, np.nan, np.nan, 4.0, 6.0]),
        "margin_s": np.arange(10.0),
    }
    thin = report_charts.thinned(lines, points=4)
    assert thin["time_s"].tolist() == [0, 3, 6, 9]
    assert thin["local_queue_requests"].tolist() == [9, 0, 0, 5]
    assert thin["ttft_s"][0] == 2.0
    assert math.isnan(thin["ttft_s"][1])
    assert thin["ttft_s"][2:].tolist() == [4.0, 6.0]
    assert thin["margin_s"].tolist() == [0, 3, 6, 9]
    assert report_charts.thinned(lines, points=10) is lines


def test_a_picture_takes_the_colour_of_its_page() -> None:
    def make() -> Any:
        return report_charts.forest_figure(["a$b", "c"], [Interval(1.0, 0.5, 1.5, 5, "seeds")] * 2, "r")

    svg = report_charts.inline_svg(make, "x")
    assert svg.startswith("<svg ")
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert "xmlns" not in svg
    assert "a$b" in svg
    assert svg == report_charts.inline_svg(make, "x")


def test_the_command(folder: Path, tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "mine.html"
    assert "mine.html" in run("report", str(folder), "--out", str(out), "--reproduction-requests", "0")
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_compare_writes_it_too(tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "c"
    run(
        "compare", "-p", "never", "-p", "always", "--seeds", "1", "--jobs", "1", "--out", str(out), "--report",
        "--set", "measure.horizon_s=20",
    )  # fmt: skip
    assert "report.html" in {p.name for p in out.iterdir()}
