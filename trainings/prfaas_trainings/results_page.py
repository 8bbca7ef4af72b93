"""The page of results: `results.json`, `results.md` and one figure, made of the parts of a results folder alone."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.intervals import CONFIDENCE, RESAMPLES, Interval
from prfaas_trainings.compare import HOW_AVERAGED, Comparison, interval_json, versions
from prfaas_trainings.episodes import FIGURE_NAMES, FIGURES, is_trace
from prfaas_trainings.plots import colour, file_name, plain, pyplot
from prfaas_trainings.report import TEMPLATES
from prfaas_trainings.results_config import PolicyRole
from prfaas_trainings.results_run import ResultsPlan, comparisons, read_plan
from prfaas_trainings.results_targets import (
    TTFT,
    NotMeasuredError,
    decision_quantile_s,
    difference,
    judge,
    lost_seeds,
    lower_by,
    lower_text,
    mean_ratio,
    milliseconds,
    p90_ratio,
    percent,
    pooled_p90_s,
    row_of,
    seconds,
    share_of_way,
)
from prfaas_trainings.tables import interval_text

TEMPLATE = "results.md.j2"
RESULTS, PAGE, IMAGES = "results.json", "results.md", "img"
#: Figures of a table in order.
SHOWN = (
    TTFT,
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "goodput_rps",
    "egress_mean_bps",
    "conversions",
    "invalid_moves",
    "rejected",
    "open_at_end",
)
_BY_NAME = {figure.name: figure for figure in FIGURES}
_TITLES = {TTFT: "TTFT mean (s)", "tpot_mean_s": "TPOT (ms)", "goodput_rps": "goodput (req/s)"}
#: Most lost seeds that the page lists; `results.json` has all.
MAX_LOST = 10
_DPI = 90


# -------------------------------------------------------------------------------------------- results.json


def gather(plan: ResultsPlan, found: Mapping[str, Comparison]) -> dict[str, Any]:
    """`results.json` as a mapping: every number finite or null."""
    subjects = plan.config.subjects
    learned = any(cell.learned for cell in plan.cells)
    return {
        "command": "prfaas results",
        "title": plan.config.title,
        "versions": versions(*(["torch", "stable-baselines3"] if learned else [])),
        "engine": plan.config.engine,
        "intervals": {"confidence": CONFIDENCE, "resamples": RESAMPLES},
        "how_averaged": HOW_AVERAGED,
        "subjects": subjects.model_dump(),
        "headline": plan.config.headline,
        "tables": [_table(plan, found, k) for k in range(len(plan.tables))],
        "targets": [{**asdict(j), "verdict": j.word} for j in judge(plan.config, found)],
        "trainings": {label: asdict(training) for label, training in plan.trainings.items()},
    }


def _table(plan: ResultsPlan, found: Mapping[str, Comparison], k: int) -> dict[str, Any]:
    table, subjects = plan.tables[k], plan.config.subjects
    comparison = found.get(table.label)
    rows = []
    for policy in plan.config.policies:
        cell = plan.cell(table.label, policy.label)
        if cell is None:
            continue
        row: dict[str, Any] = {
            "label": policy.label,
            "role": policy.role,
            "policy": cell.spec,
            "deployment": cell.deployment,
            "policy_hash": cell.hash,
            "learned": cell.learned,
            "missing": cell.missing,
            "reason": cell.reason,
        }
        if not cell.missing and comparison is not None:
            row |= _figures(comparison, policy.label, (subjects.best_rule, subjects.tuned_paper))
        rows.append(row)
    way = None
    if comparison is not None:
        way = _way(comparison, subjects.learned, subjects.best_rule, subjects.ahead)
    return {
        "label": table.label,
        "scenario": table.scenario.name,
        "scenario_hash": table.scenario.hash,
        "description": table.scenario.description,
        "note": table.note,
        "trace": is_trace(table.scenario),
        "seeds": {"first": table.first_seed, "count": table.count},
        "horizon_s": table.scenario.measure.horizon_s,
        "rows": rows,
        "learned_against_best_rule": way,
        "lines": _lines(comparison, subjects.learned) if comparison is not None else [],
    }


def _figures(comparison: Comparison, label: str, others: tuple[str, str]) -> dict[str, Any]:
    r = row_of(comparison, label)
    labels = [row.label for row in comparison.rows]
    out: dict[str, Any] = {
        "scenario_hash": comparison.rows[r].scenario(comparison.scenarios[0]).hash,
        "figures": {name: interval_json(comparison.own(0, r, name)) for name in FIGURE_NAMES},
        "ttft_p90_all_requests_s": _finite(pooled_p90_s(comparison, label)),
        "decision_s": {
            name: _finite(decision_quantile_s(comparison, label, q))
            for name, q in (("p50", 0.5), ("p99", 0.99))
        },
        "decisions": sum(
            int(o.decision_counts.sum()) for o in comparison.outcomes[0, r] if o.decision_counts is not None
        ),
        "warnings": dict(comparison.warnings(0, r)),
    }
    for name, other in zip(("best_rule", "tuned_paper"), others, strict=True):
        there = other in labels and other != label
        out[f"minus_{name}"] = interval_json(difference(comparison, label, other)) if there else None
    return out


def _way(comparison: Comparison, learned: str, start: str, end: str) -> dict[str, Any] | None:
    """The learned policy against the best rule: share of the way to the planner, seeds that it loses."""
    try:
        lost = lost_seeds(comparison, learned, start)
        out: dict[str, Any] = {
            "lost": [{"seed": s, "ttft_mean_s": a, "best_rule_ttft_mean_s": b} for s, a, b in lost],
            "share_of_way": None,
        }
    except NotMeasuredError:
        return None
    with contextlib.suppress(NotMeasuredError):
        out["share_of_way"] = interval_json(share_of_way(comparison, learned, start, end))
    return out


def _lines(comparison: Comparison, learned: str) -> list[str]:
    """Losses, wins and what is left open, of the learned policy alone, against every other on the same hardware."""
    labels = [row.label for row in comparison.rows]
    if learned not in labels or not comparison.facts[labels.index(learned)].learned:
        return []
    start = f"{comparison.labels[0]}: {learned} "
    return [
        line.removeprefix(f"{comparison.labels[0]}: ")
        for line in comparison.lines()
        if line.startswith(start)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ------------------------------------------------------------------------------------------------ the page


def _interval(content: dict[str, Any] | None) -> Interval | None:
    if content is None:
        return None
    mean = math.nan if content["mean"] is None else content["mean"]
    return Interval(mean, content["low"], content["high"], content["n"], content["method"])


def _text(content: dict[str, Any] | None, name: str = TTFT, sign: str = "", limits: bool = True) -> str:
    interval = _interval(content)
    if interval is None:
        return ""
    if not limits:
        interval = Interval(interval.mean, None, None, interval.n, interval.method)
    return interval_text(interval, _BY_NAME[name], sign)


def _title(name: str) -> str:
    return _TITLES.get(name) or " ".join(_BY_NAME[name].title.replace("-\n", "").split())


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table; the first `texts` columns are left, the others right."""
    marks = ["---" if k < texts else "---:" for k in range(len(header))]
    lines = [list(header), marks, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _main_table(table: dict[str, Any]) -> str:
    header = [
        "policy",
        *(_title(name) for name in SHOWN),
        "mean TTFT minus best rule (s)",
        "minus tuned dual-timescale (s)",
        "policy hash",
    ]
    rows = []
    for row in table["rows"]:
        label = f"**{row['label']}**" if row["role"] == "learned" else row["label"]
        if row["missing"]:
            rows.append([label, f"*{row['missing']}*", *[""] * (len(header) - 3), _hash(row)])
            continue
        shown = [_text(row["figures"][name], name, limits=name == TTFT) for name in SHOWN]
        against = [_text(row[key], sign="+") for key in ("minus_best_rule", "minus_tuned_paper")]
        rows.append([label, *shown, *against, _hash(row)])
    return _markdown(header, rows)


def _hash(row: dict[str, Any]) -> str:
    return f"`{row['policy_hash']}`" if row["policy_hash"] else ""


def _by_role(table: dict[str, Any], role: PolicyRole) -> list[dict[str, Any]]:
    return [row for row in table["rows"] if row["role"] == role]


def _ablations(table: dict[str, Any]) -> list[dict[str, Any]]:
    return _by_role(table, "ablation")


def _training_seeds(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The learned policy is of one seed; the others have rows of their own."""
    others = _by_role(table, "training seed")
    return [*_by_role(table, "learned"), *others] if others else []


def _spread(
    content: dict[str, Any],
    of: Callable[[dict[str, Any]], list[dict[str, Any]]],
    notes: Mapping[str, str],
) -> str:
    """Some rows of every table that has such, against the best rule."""
    rows = []
    for table in content["tables"]:
        for row in of(table):
            if row["missing"]:
                rows.append([table["label"], row["label"], f"*{row['missing']}*", "", "", ""])
                continue
            minus = row["minus_best_rule"]
            interval = _interval(minus)
            word = "" if interval is None else {-1: "yes", 0: "cannot be told", 1: "**no**"}[interval.sign]
            if interval is not None and interval.low is None:
                word = "too few samples"
            rows.append(
                [
                    table["label"],
                    row["label"] + (f" ({notes[row['label']]})" if notes.get(row["label"]) else ""),
                    _text(row["figures"][TTFT]),
                    _text(row["figures"]["ttft_p90_s"], "ttft_p90_s"),
                    _text(minus, sign="+"),
                    word,
                ]
            )
    header = ["scenario", "policy", "TTFT mean (s)", "P90 (s)", "mean TTFT minus best rule (s)", "better"]
    return _markdown(header, rows, 2) if rows else ""


def _spread_sentence(content: dict[str, Any]) -> str:
    """Mean and spread over training seeds on the headline scenario."""
    for table in content["tables"]:
        if table["label"] != content["headline"]:
            continue
        means = [row["figures"][TTFT]["mean"] for row in _training_seeds(table) if not row["missing"]]
        if len(means) >= 2 and None not in means:
            return (
                f"On {table['label']} the {len(means)} training seeds have mean TTFT {min(means):.2f} to "
                f"{max(means):.2f} s, mean {np.mean(means):.2f}, standard deviation {np.std(means, ddof=1):.2f}."
            )
    return ""


def _decision_table(table: dict[str, Any]) -> str:
    rows = [
        [
            row["label"],
            str(row["decisions"]),
            *(
                milliseconds(math.nan if row["decision_s"][q] is None else row["decision_s"][q])
                for q in ("p50", "p99")
            ),
        ]
        for row in table["rows"]
        if not row["missing"]
    ]
    return _markdown(["policy", "decisions", "median (ms)", "P99 (ms)"], rows)


def _training_table(content: dict[str, Any]) -> str:
    rows = []
    for label, found in content["trainings"].items():
        elapsed = found["elapsed_s"]
        rows.append(
            [
                label,
                found["algorithm"],
                "not kept" if found["steps"] is None else f"{found['steps']:,}",
                "not kept" if elapsed is None else f"{elapsed / 60:.1f}",
                "" if found["seed"] is None else str(found["seed"]),
            ]
        )
    header = ["policy", "algorithm", "steps (decisions)", "wall time (min)", "training seed"]
    return _markdown(header, rows, 2) if rows else ""


def _target_table(content: dict[str, Any]) -> str:
    rows = [
        [t["statement"], t["table"], t["target"], t["measured"], t["verdict"]] for t in content["targets"]
    ]
    return _markdown(["what was asked", "scenario", "target", "measured", "met"], rows, 5) if rows else ""


def _headline(plan: ResultsPlan, found: Mapping[str, Comparison]) -> list[str]:
    """Sentences on the headline scenario: share of the way, P90 over all requests, seeds that are lost."""
    subjects, label = plan.config.subjects, plan.config.headline
    comparison = found.get(label)
    if comparison is None:
        return [f"The scenario {label} was not run."]
    n = len(comparison.seeds)
    out = []
    for sentence in (_share_sentence, _p90_sentence, _sampled_sentence):
        try:
            out.append(sentence(plan, comparison))
        except NotMeasuredError as error:
            out.append(f"Not measured: {error}.")
    try:
        lost = lost_seeds(comparison, subjects.learned, subjects.best_rule)
    except NotMeasuredError as error:
        return [*out, f"Not measured: {error}."]
    text = f"{subjects.learned} loses to {subjects.best_rule} on {len(lost)} of {n} seeds"
    if lost:
        worst = "; ".join(
            f"{seed:,} ({mine:.2f} against {other:.2f} s)" for seed, mine, other in lost[:MAX_LOST]
        )
        listed = "" if len(lost) <= MAX_LOST else f", the {MAX_LOST} largest losses"
        text += f"{listed}: {worst}"
    return [*out, f"{text}."]


def _share_sentence(plan: ResultsPlan, comparison: Comparison) -> str:
    s = plan.config.subjects
    share = share_of_way(comparison, s.learned, s.best_rule, s.ahead)
    return (
        f"{s.learned} goes {percent(share)} of the way from {s.best_rule} to {s.ahead} in mean TTFT (paired bootstrap "
        f"over seeds); {s.ahead} knows the future and is a reference, not a limit: other decisions may do better still."
    )


def _p90_sentence(plan: ResultsPlan, comparison: Comparison) -> str:
    s = plan.config.subjects
    lower = lower_by(p90_ratio(comparison, s.learned, s.converting))
    mine, other = (pooled_p90_s(comparison, label) for label in (s.learned, s.converting))
    return (
        f"P90 of TTFT over all requests of all seeds together: {mine:.2f} s against {other:.2f} s of {s.converting}, "
        f"{lower_text(lower)} (seeds drawn)."
    )


def _sampled_sentence(plan: ResultsPlan, comparison: Comparison) -> str:
    """Against every planner, decision time included."""
    s = plan.config.subjects
    row_of(comparison, s.learned)
    clauses = []
    for policy in plan.config.policies:
        if policy.role not in ("planner", "reference") or policy.label not in [
            r.label for r in comparison.rows
        ]:
            continue
        times = [
            milliseconds(decision_quantile_s(comparison, label, 0.5)) for label in (s.learned, policy.label)
        ]
        ratio = mean_ratio(comparison, s.learned, policy.label)
        clauses.append(
            f"against {policy.label} its mean TTFT is {seconds(difference(comparison, s.learned, policy.label))}, "
            f"{lower_text(lower_by(ratio))}, at a median decision of {times[0]} ms against {times[1]} ms"
        )
    if not clauses:
        raise NotMeasuredError("no planner ran on this scenario")
    return f"Of {s.learned}: {'; '.join(clauses)}."


def render(
    plan: ResultsPlan, found: Mapping[str, Comparison], content: dict[str, Any], image: str | None
) -> str:
    """The page as Markdown; `image` is the path of the figure as the page names it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # Markdown, no HTML: nothing is escaped
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    notes = {policy.label: policy.note for policy in plan.config.policies}
    headline = next((t for t in content["tables"] if t["label"] == content["headline"]), None)
    return environment.get_template(TEMPLATE).render(
        content=content,
        description=plan.config.description.strip(),
        targets=_target_table(content),
        n_missed=sum(t["met"] is False for t in content["targets"]),
        n_met=sum(t["met"] is True for t in content["targets"]),
        n_open=sum(t["met"] is None for t in content["targets"]),
        headline=_headline(plan, found),
        tables=[(table, _main_table(table), _footnotes(table)) for table in content["tables"]],
        spread=_spread(content, _training_seeds, notes),
        spread_sentence=_spread_sentence(content),
        ablations=_spread(content, _ablations, notes),
        decisions=_decision_table(headline) if headline is not None else "",
        trainings=_training_table(content),
        image=image,
        notes={label: note for label, note in notes.items() if note},
    )


def _footnotes(table: dict[str, Any]) -> list[str]:
    """Why rows are missing, and which policies gave warnings."""
    why: dict[str, list[str]] = {}
    for row in table["rows"]:
        if row["reason"]:
            why.setdefault(f"{row['missing']}: {row['reason']}", []).append(row["label"])
    told: dict[str, list[str]] = {}
    n = table["seeds"]["count"]
    for row in table["rows"]:
        for text, seeds in row.get("warnings", {}).items():
            told.setdefault(text, []).append(f"{row['label']} ({seeds} of {n})")
    return [f"{', '.join(labels)}: {text}" for text, labels in why.items()] + [
        f"{text}: {', '.join(labels)}" for text, labels in told.items()
    ]


# ----------------------------------------------------------------------------------------------- the figure


def draw(content: dict[str, Any], path: Path) -> bool:
    """Mean TTFT of every policy on the headline scenario with its interval, as a PNG; False without figures."""
    table = next((t for t in content["tables"] if t["label"] == content["headline"]), None)
    rows = [row for row in table["rows"] if not row["missing"]] if table is not None else []
    rows = [row for row in rows if (row["figures"][TTFT]["mean"] or 0.0) > 0.0]
    if table is None or not rows:
        return False
    rows.sort(key=lambda row: -row["figures"][TTFT]["mean"])
    roles = list(dict.fromkeys(row["role"] for row in rows))
    figure, axes = pyplot().subplots(figsize=(7.5, 1.1 + 0.27 * len(rows)))
    for role in roles:
        mine = [(k, row["figures"][TTFT]) for k, row in enumerate(rows) if row["role"] == role]
        x = [f["mean"] for _, f in mine]
        limits = [
            [f["mean"] - (f["mean"] if f[side] is None else f[side]) for _, f in mine]
            for side in ("low", "high")
        ]
        axes.errorbar(
            x,
            [k for k, _ in mine],
            xerr=[limits[0], [-v for v in limits[1]]],
            fmt="o",
            markersize=5,
            capsize=3,
            color=colour(roles.index(role)),
            label=role,
        )
    axes.set_yticks(range(len(rows)), [plain(row["label"]) for row in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel(f"mean TTFT on {plain(table['label'])} (s), 95% interval")
    axes.grid(alpha=0.3, which="both", axis="x")
    axes.legend(fontsize=7, loc="best")
    figure.tight_layout()
    temporary = path.with_name(f".{path.stem}.tmp.png")
    try:
        figure.savefig(temporary, dpi=_DPI)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        pyplot().close(figure)
    return True


# ------------------------------------------------------------------------------------------------- writing


def write_page(folder: Path, docs: Path | None = None) -> list[Path]:
    """Make everything from the parts of a results folder; nothing is run.

    Args:
        folder: a finished results folder; gets `results.json`, `results.md` and `img/`.
        docs: also write the page there, with its figure in `img` beside it.

    Returns:
        The files.

    Raises:
        PrfaasError: parts are missing or broken, a file cannot be written.
    """
    plan = read_plan(folder)
    found = comparisons(plan, folder)
    content = gather(plan, found)
    write_whole(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False) + "\n")
    written = [folder / RESULTS]
    name = file_name("results", plan.config.headline)
    for page in (folder / PAGE, docs):
        if page is None:
            continue
        image = page.parent / IMAGES / name
        try:
            image.parent.mkdir(parents=True, exist_ok=True)
            drawn = draw(content, image)
        except OSError as error:
            raise PrfaasError(f"{image}: cannot be written: {error.strerror or error}") from None
        write_whole(page, render(plan, found, content, f"{IMAGES}/{name}" if drawn else None))
        written += [page, *([image] if drawn else [])]
    return written
