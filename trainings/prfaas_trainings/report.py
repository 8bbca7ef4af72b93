"""`prfaas report`: one HTML file that tells what a comparison or a training found, to someone who missed it.

It is made of the files in the folder alone (`metrics.json` and `curves.json`, or `run.json` and `validation.json`)
and of the paper's table computed anew. It needs no network: styles and pictures stand in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_env import __version__
from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.intervals import Interval
from prfaas_trainings import report_charts, reproduction
from prfaas_trainings.compare import LOSES, WORDS
from prfaas_trainings.compare import MARKER as COMPARE_MARKER
from prfaas_trainings.episodes import FIGURES, STAGES, TTFT_EDGES_S, Figure, FloatArray, not_null
from prfaas_trainings.plots import CdfLine, TimelineColumn, cdf_figure, distribution
from prfaas_trainings.results import CURVES, METRICS
from prfaas_trainings.tables import LATENCY, SERVICE, interval_text

TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = "report.html.j2"
#: Files of a training.
RUN, VALIDATION = "run.json", "validation.json"
_BY_NAME = {figure.name: figure for figure in FIGURES}
_STAGE_TITLES = dict(zip(STAGES, ("queue", "prefill", "transfer", "decode wait", "first step"), strict=True))
_COST_TITLES = {
    "ttft_s": "waiting for the first token",
    "egress_s": "egress",
    "conversion_s": "conversions",
    "lost_s": "rejected, aborted",
    "total_s": "sum",
}
#: Most things that one sentence lists.
_LISTED = 4
#: Most scenarios whose figures the answer spells out; with more it says on which ones.
_SPELLED_OUT = 3
#: Characters of a value that the method section shows.
_MAX_VALUE = 90


# ------------------------------------------------------------------------------------------ the folder


def read_json(path: Path) -> Any:
    """A JSON file; PrfaasError that names it where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PrfaasError(f"{path}: cannot be read: {error}") from None


def read_folder(folder: Path) -> dict[str, Any]:
    """What a result folder holds: `comparison` and `curves`, `run` and `validations`, each None where it is not.

    Raises:
        PrfaasError: nothing to report on, an unfinished comparison, a sweep, a broken file.
    """
    if not folder.is_dir():
        raise PrfaasError(
            f"{folder}: is not a folder; give that of a comparison, a demonstration or a training"
        )
    found: dict[str, Any] = dict.fromkeys(("comparison", "curves", "run", "validations"))
    if (folder / METRICS).is_file():
        found["comparison"] = read_json(folder / METRICS)
        command = found["comparison"].get("command")
        if command != "prfaas compare":
            raise PrfaasError(
                f"{folder / METRICS}: is of {command}; a report is made of a comparison or a training"
            )
        if not (folder / CURVES).is_file():
            raise PrfaasError(f"{folder}: holds no {CURVES}; run the comparison again to write it")
        found["curves"] = read_json(folder / CURVES)
    elif (folder / COMPARE_MARKER).is_file():
        raise PrfaasError(
            f"{folder}: the comparison is not finished; go on with prfaas compare --out {folder}"
        )
    for place in (folder, folder / "training"):
        if (place / RUN).is_file():
            found["run"] = read_json(place / RUN)
            if (place / VALIDATION).is_file():
                found["validations"] = read_json(place / VALIDATION)
            break
    if found["comparison"] is None and found["run"] is None:
        raise PrfaasError(f"{folder}: holds neither {METRICS} of a comparison nor {RUN} of a training")
    return found


def write_report(folder: Path, out: Path, reproduction_requests: int = reproduction.REQUESTS) -> Path:
    """Write the report on a folder to `out`, whole, and give its path.

    `reproduction_requests` are simulated per column of the paper's table; 0 leaves it out.

    Raises:
        PrfaasError: see `read_folder`; a file of the folder lacks something; `out` cannot be written.
    """
    found = read_folder(folder)
    try:
        page = render(found, reproduction_requests)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise PrfaasError(
            f"{folder}: its files lack what a report needs ({type(error).__name__}: {error}); "
            "run the comparison or training again with this version"
        ) from error
    write_whole(out, page)
    return out


def render(found: dict[str, Any], reproduction_requests: int = reproduction.REQUESTS) -> str:
    """The page of what `read_folder` gave."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    comparison, run = found["comparison"], found["run"]
    columns = reproduction.reproduce(reproduction_requests) if reproduction_requests else ()
    return environment.get_template(TEMPLATE).render(
        title=_title(comparison, run),
        asked=asked(comparison) if comparison else _asked_of_run(run),
        answer=answer(comparison) if comparison else answer_of_run(run),
        comparison=comparison,
        scenarios=[_scenario(comparison, found["curves"], s) for s in range(len(comparison["scenarios"]))]
        if comparison
        else [],
        training=_training(run, found["validations"]) if run else None,
        reproduction=reproduction.rows(columns) if columns else [],
        columns=columns,
        reproduction_requests=reproduction_requests,
        low_load_rps=reproduction.LOW_LOAD_RPS,
        method=_method(comparison, run),
        version=__version__,
    )


def _title(comparison: dict[str, Any] | None, run: dict[str, Any] | None) -> str:
    if comparison is None:
        assert run is not None
        return f"Training {run['name']}"
    labels = [s["label"] for s in comparison["scenarios"]]
    return f"{_counted(len(comparison['rows']), 'policy', 'policies')} on {_list(labels)}"


# --------------------------------------------------------------------------------------------- sentences


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _list(words: Sequence[str], most: int = _LISTED) -> str:
    """`a, b and c`; the rest as a number beyond `most`."""
    shown = list(words[:most])
    if len(words) > most:
        shown.append(f"{len(words) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else "nothing"


def interval_of(content: dict[str, Any]) -> Interval:
    """The interval of a JSON mapping; a mean that does not exist is NaN."""
    mean = content["mean"]
    return Interval(
        math.nan if mean is None else mean, content["low"], content["high"], content["n"], content["method"]
    )


def shown(content: dict[str, Any], figure: Figure, sign: str = "") -> str:
    """A figure with its interval as it stands in the tables."""
    return interval_text(interval_of(content), figure, sign)


def asked(comparison: dict[str, Any]) -> str:
    """The question, in one sentence."""
    n = comparison["seeds"]["count"]
    scenarios = comparison["scenarios"]
    hours = _list([f"{s['label']} ({s['horizon_s']:,.0f} s)" for s in scenarios], 12)
    return (
        f"Which of {_counted(len(comparison['rows']), 'scheduling policy', 'scheduling policies')} gives requests "
        f"their first token soonest on {hours}, when each meets the same requests on "
        f"{_counted(n, comparison['split'] + ' seed', comparison['split'] + ' seeds')}, and what does it cost in "
        "link traffic and node moves?"
    )


def answer(comparison: dict[str, Any]) -> list[str]:
    """Three sentences made of the figures: who is best, where the subject loses and wins, what it costs."""
    if len(comparison["scenarios"]) > _SPELLED_OUT:
        return [_ranking_in_short(comparison), _standing_in_short(comparison), _price_in_short(comparison)]
    return [_ranking(comparison), _standing(comparison), _price(comparison)]


def _same_hardware(comparison: dict[str, Any]) -> list[str]:
    by_label = {row["label"]: row for row in comparison["rows"]}
    hardware = by_label[comparison["subjects"][0]]["deployment"]
    return [label for label, row in by_label.items() if row["deployment"] == hardware]


def _mean(scenario: dict[str, Any], policy: str, figure: str) -> float:
    mean = scenario["results"][policy]["figures"][figure]["mean"]
    return math.nan if mean is None else float(mean)


def _ranking(comparison: dict[str, Any]) -> str:
    names, ttft = _same_hardware(comparison), _BY_NAME["ttft_mean_s"]
    clauses = []
    for scenario in comparison["scenarios"]:
        ranked = sorted(
            (n for n in names if not math.isnan(_mean(scenario, n, ttft.name))),
            key=lambda n: _mean(scenario, n, ttft.name),
        )
        if not ranked:
            clauses.append(f"on {scenario['label']} no request got a first token")
            continue
        best = ranked[0]
        text = (
            f"on {scenario['label']} {best} has the lowest mean time to first token, "
            f"{shown(scenario['results'][best]['figures'][ttft.name], ttft)} s"
        )
        places = [
            f"{subject} comes {_ordinal(ranked.index(subject) + 1)} of {len(ranked)} with "
            f"{shown(scenario['results'][subject]['figures'][ttft.name], ttft)} s"
            for subject in comparison["subjects"]
            if subject in ranked[1:]
        ]
        clauses.append(", ".join([text, *places]))
    return _sentence("; ".join(clauses))


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _standing(comparison: dict[str, Any]) -> str:
    """Losses first; every policy on the same hardware is named."""
    clauses = []
    for scenario in comparison["scenarios"]:
        for subject in comparison["subjects"]:
            mine = [
                duel
                for duel in scenario["subject_minus_other_ttft_mean_s"]
                if duel["same_hardware"] and duel["policy"] == subject
            ]
            clauses.append(f"on {scenario['label']} {subject} {_verdicts(mine)}")
    return _sentence("; ".join(clauses))


def _verdicts(duels: Sequence[dict[str, Any]]) -> str:
    if not duels:
        return "has nothing on the same hardware to be compared with"
    by_word: dict[str, list[str]] = {}
    for duel in duels:
        by = f" by {abs(duel['mean']):.2f} s" if duel["word"] in WORDS[:2] else ""
        by_word.setdefault(duel["word"], []).append(f"{duel['other']}{by}")
    clauses = [f"{word} {_list(by_word[word], 12)}" for word in WORDS if word in by_word]
    if LOSES not in by_word:
        clauses.insert(0, "loses to no other policy beyond doubt")
    return ", ".join(clauses)


def _price(comparison: dict[str, Any]) -> str:
    """Egress and moves of each subject beside those of the best other policy."""
    names = _same_hardware(comparison)
    clauses = []
    for scenario in comparison["scenarios"]:
        others = [
            n
            for n in names
            if n not in comparison["subjects"] and not math.isnan(_mean(scenario, n, "ttft_mean_s"))
        ]
        best = min(others, key=lambda n: _mean(scenario, n, "ttft_mean_s"), default=None)
        text = _list([_use(scenario, subject) for subject in comparison["subjects"]])
        if best is not None:
            text += f" (the best other policy: {_use(scenario, best)})"
        clauses.append(f"on {scenario['label']} {text}")
    return _sentence("; ".join(clauses))


def _use(scenario: dict[str, Any], policy: str) -> str:
    egress, conversions = (_mean(scenario, policy, name) for name in ("egress_mean_bps", "conversions"))
    hours = (scenario["horizon_s"] - scenario["warmup_s"]) / 3600
    moves = f"{conversions / hours:.1f} nodes per hour" if conversions and hours > 0 else "no node"
    return f"{policy} sends {egress / 1e9:.2f} Gbps over the link and moves {moves}"


def _ranking_in_short(comparison: dict[str, Any]) -> str:
    names, won = _same_hardware(comparison), dict[str, list[str]]()
    for scenario in comparison["scenarios"]:
        means = {n: _mean(scenario, n, "ttft_mean_s") for n in names}
        told = [n for n in names if not math.isnan(means[n])]
        if told:
            won.setdefault(min(told, key=lambda n: means[n]), []).append(scenario["label"])
    clauses = [
        f"{name} has the lowest mean time to first token on {_list(labels, 6)} ({len(labels)} of "
        f"{len(comparison['scenarios'])})"
        for name, labels in sorted(won.items(), key=lambda item: -len(item[1]))
    ]
    return _sentence("; ".join(clauses) or "no request got a first token")


def _standing_in_short(comparison: dict[str, Any]) -> str:
    clauses = []
    for subject in comparison["subjects"]:
        found: dict[str, dict[str, list[str]]] = {}
        for scenario in comparison["scenarios"]:
            for duel in scenario["subject_minus_other_ttft_mean_s"]:
                if duel["same_hardware"] and duel["policy"] == subject:
                    by_other = found.setdefault(duel["word"], {})
                    by_other.setdefault(duel["other"], []).append(scenario["label"])
        told = [
            f"{word} {_list([f'{other} on {_list(labels, 6)}' for other, labels in found[word].items()], 12)}"
            for word in WORDS
            if word in found
        ]
        if LOSES not in found:
            told.insert(0, "loses to no other policy beyond doubt")
        clauses.append(
            f"{subject} {'; '.join(told) if found else 'has nothing on the same hardware to be compared with'}"
        )
    return _sentence("; ".join(clauses))


def _price_in_short(comparison: dict[str, Any]) -> str:
    clauses = []
    for subject in comparison["subjects"]:
        gbps = [_mean(s, subject, "egress_mean_bps") / 1e9 for s in comparison["scenarios"]]
        moves = [_mean(s, subject, "conversions") for s in comparison["scenarios"]]
        clauses.append(
            f"{subject} sends {min(gbps):.2f} to {max(gbps):.2f} Gbps over the link and moves {min(moves):.1f} to "
            f"{max(moves):.1f} nodes per episode, by scenario"
        )
    return _sentence("; ".join(clauses))


def _sentence(text: str) -> str:
    # a name at the start stays as it is
    start = text[:1].upper() if text.startswith(("on ", "no ")) else text[:1]
    return f"{start}{text[1:]}."


def breakable(name: str) -> Any:
    """A name that a browser may break after its joints rather than anywhere."""
    from markupsafe import Markup, escape

    return Markup("".join(f"{escape(c)}<wbr>" if c in "_@:,=-/." else str(escape(c)) for c in name))


def _asked_of_run(run: dict[str, Any]) -> str:
    names = _list([s["name"] for s in run["scenarios"]])
    return f"Can a policy that learns on {names} do better on validation seeds than the one it starts from?"


def answer_of_run(run: dict[str, Any]) -> list[str]:
    """Three sentences of a training: how far it came, what was kept, what this does not say."""
    best = run.get("best")
    if best is None:
        return [
            f"The training is not finished: {run['status']}.",
            "No policy has been kept yet.",
            "There is nothing to compare.",
        ]
    change = (1.0 - best["score"]) * 100
    means = _list(
        [f"{'no' if v is None else f'{v:.2f} s'} on {k}" for k, v in best["ttft_mean_s"].items()], 8
    )
    verdict = (
        f"its score on the validation seeds is {best['score']:.3f}, {abs(change):.1f}% "
        f"{'better' if change > 0 else 'worse'} than the policy that it started from"
        if best["steps"]
        else "nothing that was learned did better on the validation seeds than the policy it started from"
    )
    return [
        f"The training ended after {run['steps']:,} decisions{_lasted(run)} ({run['status']}); {verdict}.",
        f"Kept is the policy of step {best['steps']:,}, with a mean time to first token of {means}.",
        "The policy was chosen on these seeds, so the figures favour it; prfaas compare on test seeds says what it is "
        "worth.",
    ]


def _lasted(run: dict[str, Any]) -> str:
    return f" and {run['elapsed_s']:,.0f} s" if run.get("elapsed_s") is not None else ""


# --------------------------------------------------------------------------------------------- sections


def _cells(results: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    cells = []
    for name in names:
        content, figure = results[name], _BY_NAME[name]
        found = interval_of(content)
        text = interval_text(found, figure, "")
        mean, _, limits = text.partition(" ")
        if limits == f"[{mean}, {mean}]":
            limits = ""
        cells.append({"figure": name, "mean": mean, "limits": limits})
    return cells


def _heading(name: str) -> str:
    return " ".join(_BY_NAME[name].title.replace("-\n", "").split())


def _scenario(comparison: dict[str, Any], curves: dict[str, Any], s: int) -> dict[str, Any]:
    scenario = comparison["scenarios"][s]
    label, ttft = scenario["label"], _BY_NAME["ttft_mean_s"]
    results = scenario["results"]
    rows = [{**row, **results[row["label"]]} for row in comparison["rows"]]
    subjects = set(comparison["subjects"])
    warnings = {text for row in rows for text in row["warnings"]}
    return {
        **scenario,
        "warnings": [
            {
                "text": text,
                "policies": [
                    f"{row['label']} ({row['warnings'][text]} of {comparison['seeds']['count']} seeds)"
                    for row in rows
                    if text in row["warnings"]
                ],
            }
            for text in sorted(warnings)
        ],
        "tables": [
            {
                "title": title,
                "headings": [_heading(name) for name in names],
                "with_difference": names is LATENCY,
                "rows": [
                    {
                        "label": row["label"],
                        "subject": row["label"] in subjects,
                        "learned": row["learned"],
                        "other_hardware": row["deployment"],
                        "cells": _cells(row["figures"], names),
                        "difference": ""
                        if row["label"] == comparison["reference"]
                        else shown(row["difference_to_reference"][ttft.name], ttft, "+"),
                    }
                    for row in rows
                ],
            }
            for title, names in (("Time to first token", LATENCY), ("Throughput, link, node moves", SERVICE))
        ],
        "duels": [
            {**duel, "text": shown(duel, ttft, "+"), "loses": duel["word"] == LOSES}
            for duel in scenario["subject_minus_other_ttft_mean_s"]
        ],
        "stages": [
            {
                "label": row["label"],
                "cells": _cells(row["figures"], STAGES),
            }
            for row in rows
        ],
        "stage_headings": list(_STAGE_TITLES.values()),
        "cost_headings": list(_COST_TITLES.values()),
        "costs": [
            {
                "label": row["label"],
                "cells": [
                    {
                        "figure": name,
                        "value": row["cost"][name]["mean"],
                        "text": shown(row["cost"][name], ttft),
                    }
                    for name in _COST_TITLES
                ],
            }
            for row in rows
        ],
        "charts": _charts(comparison, curves, s, rows),
        "anchor": f"scenario-{s}",
        "label": label,
    }


def _charts(
    comparison: dict[str, Any], curves: dict[str, Any], s: int, rows: list[dict[str, Any]]
) -> dict[str, dict[str, str] | None]:
    """SVG text and alternative text by name; None for a chart without data."""
    scenario = comparison["scenarios"][s]
    label, own = scenario["label"], set(_same_hardware(comparison))
    found = curves["scenarios"][label]
    charts: dict[str, tuple[Any, str]] = {}
    others = [row for row in rows if row["label"] != comparison["reference"]]
    intervals = [interval_of(row["difference_to_reference"]["ttft_mean_s"]) for row in others]
    if any(math.isfinite(i.mean) for i in intervals):
        charts["forest"] = (
            lambda: report_charts.forest_figure(
                [row["label"] for row in others], intervals, comparison["reference"]
            ),
            f"Mean time to first token of each policy minus that of {comparison['reference']} on {label}, with "
            "95% intervals; the figures are in the table.",
        )
    lines = [_cdf_line(row, found[row["label"]]) for row in rows if found[row["label"]]["ttft_bins"]]
    if lines:
        charts["cdf"] = (
            lambda: cdf_figure(lines, ""),
            f"Share of requests by time to first token on {label}, one line per policy, all seeds pooled: "
            + "; ".join(f"{line.label} half by {_median(line):.2f} s" for line in lines),
        )
    staged = [row for row in rows if row["label"] in own]
    values = np.array(
        [[_number(row["figures"][name]["mean"]) for name in STAGES] for row in staged], dtype=np.float64
    ).reshape(len(staged), len(STAGES))
    if np.isfinite(values).any():
        charts["stages"] = (
            lambda: report_charts.stages_figure(
                [row["label"] for row in staged], list(_STAGE_TITLES.values()), values
            ),
            f"Mean seconds in queue, prefill, transfer, decode wait and first step for each policy on {label}; the "
            "figures are in the table below it.",
        )
    columns = [
        TimelineColumn(
            name,
            {k: not_null(v) for k, v in curve["timeline"].items()},
            curve["link_capacity_bps"],
        )
        for name, curve in found.items()
        if curve["timeline"] is not None
    ]
    if columns:
        charts["timeline"] = (
            lambda: report_charts.timelines_figure(columns, ""),
            f"Decision, waiting requests, link, node split and time to first token over time on {label}, seed "
            f"{curves['timeline_seed']}, side by side for {_list([c.label for c in columns], 8)}.",
        )
    drawn: dict[str, dict[str, str] | None] = dict.fromkeys(("forest", "cdf", "stages", "timeline"))
    for name, (make, alt) in charts.items():
        drawn[name] = {"svg": report_charts.inline_svg(make, f"{s}-{name}"), "alt": alt}
    return drawn


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _cdf_line(row: dict[str, Any], curve: dict[str, Any]) -> CdfLine:
    counts = np.zeros(len(TTFT_EDGES_S) - 1, dtype=np.int64)
    counts[curve["ttft_bins"]] = curve["ttft_counts"]
    x, y = distribution(counts)
    near = _around(y)
    return CdfLine(row["label"], x[near], y[near], row["learned"], row["deployment"] is not None)


def _around(y: FloatArray) -> slice:
    """The part of a distribution between its last 0 and its first 1."""
    first = max(int(np.searchsorted(y, 0.0, side="right")) - 1, 0)
    last = int(np.searchsorted(y, 1.0, side="left")) + 1
    return slice(first, last)


def _median(line: CdfLine) -> float:
    k = min(int(np.searchsorted(line.y, 0.5)), len(line.x) - 1)
    return float(line.x[k])


def _training(run: dict[str, Any], validations: list[dict[str, Any]] | None) -> dict[str, Any]:
    shown_rows = [
        {
            "steps": f"{v['steps']:,}",
            "score": f"{v['score']:.3f}",
            "means": ", ".join(
                f"{name} {'-' if mean is None else f'{mean:.2f}'}" for name, mean in v["ttft_mean_s"].items()
            ),
            "kept": "best" in run and v["steps"] == run["best"]["steps"],
        }
        for v in validations or []
    ]
    chart = None
    if validations:
        steps = [v["steps"] for v in validations]
        scores = [v["score"] for v in validations]
        kept = run["best"]["steps"] if "best" in run else -1
        chart = {
            "svg": report_charts.inline_svg(
                lambda: report_charts.training_figure(steps, scores, kept), "training"
            ),
            "alt": f"Validation score by decisions learned from: {scores[0]:.3f} at first, {min(scores):.3f} at best; "
            "the figures are in the table below it.",
        }
    return {"name": run["name"], "status": run["status"], "rows": shown_rows, "chart": chart}


def _method(comparison: dict[str, Any] | None, run: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Tables of what a reader needs to run it again: (title, headings, rows)."""
    tables = []
    if comparison is not None:
        seeds = comparison["seeds"]
        last = seeds["first"] + seeds["count"] - 1
        tables.append(
            {
                "title": "What was run",
                "headings": ["", ""],
                "rows": [
                    ["command", comparison["command"]],
                    ["seeds", f"{seeds['count']} {comparison['split']} seeds, {seeds['first']} to {last}"],
                    ["engine", comparison["engine"]],
                    ["differences are taken from", comparison["reference"]],
                    *([name, version] for name, version in comparison["versions"].items()),
                ],
            }
        )
        tables.append(
            {
                "title": "Policies",
                "headings": ["policy", "specification", "hash", "hardware", "learned"],
                "rows": [
                    [
                        row["label"],
                        row["policy"],
                        row["policy_hash"],
                        row["deployment"] or "the scenario's",
                        "yes" if row["learned"] else "no",
                    ]
                    for row in comparison["rows"]
                ],
            }
        )
        tables.append(
            {
                "title": "Scenarios",
                "headings": ["scenario", "hash", "on other hardware", "what it is"],
                "rows": [
                    [
                        s["label"],
                        s["hash"],
                        ", ".join(
                            f"{row['label']}: {s['results'][row['label']]['scenario_hash']}"
                            for row in comparison["rows"]
                            if row["deployment"]
                        )
                        or "-",
                        s["description"],
                    ]
                    for s in comparison["scenarios"]
                ],
            }
        )
    if run is not None:
        tables.append(
            {
                "title": "Training",
                "headings": ["", ""],
                "rows": [
                    *([f"scenario {s['name']}", s["hash"]] for s in run["scenarios"]),
                    *([f"seeds: {name}", _clipped(value)] for name, value in run["seeds"].items()),
                    *([name, version] for name, version in run["versions"].items()),
                ],
            }
        )
    return tables


def _clipped(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
