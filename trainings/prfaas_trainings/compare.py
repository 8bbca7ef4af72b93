"""Policies against each other on the same seeds: paired differences with intervals, and who loses to whom."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_env import __version__
from prfaas_env.base import PrfaasError
from prfaas_env.intervals import CONFIDENCE, RESAMPLES, Interval, block_interval
from prfaas_env.policy import PolicyContext, policy_hash
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.engine import DEFAULT_ENGINE
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.workload.models import TraceWorkload
from prfaas_trainings.episodes import (
    FIGURE_NAMES,
    EpisodeRunner,
    FloatArray,
    Job,
    Outcome,
    Row,
    is_learned,
    is_trace,
    parse_row,
    warm_up,
)
from prfaas_trainings.parts import Part, PartsFolder, run_parts
from prfaas_trainings.seeds import Split, overlap
from prfaas_trainings.statistics import seed_interval

#: What a comparison holds when no policy is named.
DEFAULT_POLICIES = (
    "never@homogeneous",
    "always@naive",
    "static",
    "dual_timescale",
    "earliest_finish",
    "earliest_finish_conversion",
)
#: The paper's other two deployments, with their trivial policies.
DEPLOYMENT_ROWS = DEFAULT_POLICIES[:2]
#: What a learned policy does against a rule, in the order of the lines.
LOSES, _WINS, _OPEN, _EQUAL = "loses to", "wins against", "cannot be told from", "is the same as"
WORDS = (LOSES, _WINS, _OPEN, _EQUAL)
#: Most policies in the timeline plot.
MAX_TIMELINES = 4
#: The file that marks a folder as a comparison and says what is compared; its finished parts are beside it.
MARKER = "compare.json"
PARTS = "parts"
FORMAT = 1

HOW_AVERAGED = (
    "TTFT figures are means over seeds of each episode's figure; open requests count at their present age."
)


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, this package, NumPy, Gymnasium, SimPy and further packages."""
    names = ("numpy", "gymnasium", "simpy", *packages)
    return {
        "python": platform.python_version(),
        "prfaas-env": __version__,
        **{name: metadata.version(name) for name in names},
    }


def what_runs(
    rows: Sequence[Row], facts: Sequence[PolicyFacts], seeds: range, split: Split, engine: str
) -> dict[str, Any]:
    """What results depend on beside the scenarios, for the configuration of a result folder."""
    extra = ["torch", "stable-baselines3"] if any(f.learned for f in facts) else []
    return {
        "policies": {
            row.label: {"policy": row.spec, "deployment": row.deployment, "policy_hash": known.hash}
            for row, known in zip(rows, facts, strict=True)
        },
        "seeds": {"split": split, "first": seeds.start, "count": len(seeds)},
        "engine": engine,
        "versions": versions(*extra),
    }


def replayed_slice(scenario: Scenario) -> tuple[str, float, float] | None:
    """(file, first second, last second) of the trace that an episode replays, or None without a trace."""
    workload = scenario.workload
    if not isinstance(workload, TraceWorkload):
        return None
    last_s = workload.start_s + scenario.measure.horizon_s * workload.speed
    end_s = last_s if workload.end_s is None else min(workload.end_s, last_s)
    file = workload.file if workload.file.startswith("bundled:") else str(Path(workload.file).resolve())
    return file, workload.start_s, end_s


@dataclass(frozen=True)
class PolicyFacts:
    """What the comparison knows of a row's policy before it runs."""

    learned: bool
    hash: str
    seen_seeds: tuple[tuple[int, int], ...]
    seen_slices: tuple[tuple[str, float, float], ...]


def facts_of(row: Row, scenarios: Sequence[Scenario]) -> PolicyFacts:
    """Make the policy once; a learned one must also accept every scenario."""
    policy = row.make()
    if is_learned(policy):
        for scenario in scenarios:
            own = row.scenario(scenario)
            policy.reset(PolicyContext(own, scenario_schema(own), 0))
    return PolicyFacts(
        is_learned(policy),
        policy_hash(policy, row.spec),
        tuple(getattr(policy, "seen_seeds", ())),
        tuple(getattr(policy, "seen_slices", ())),
    )


def check_unseen(row: Row, facts: PolicyFacts, scenarios: Sequence[Scenario], seeds: range) -> None:
    """A test must not use what a policy was trained or chosen on."""
    seed = overlap(seeds, facts.seen_seeds)
    if seed is not None:
        raise PrfaasError(
            f"policy {row.label}: seed {seed:,} was used to train or choose it; take other seeds, or say "
            "--split training or validation"
        )
    for scenario in scenarios:
        mine = replayed_slice(row.scenario(scenario))
        for file, start_s, end_s in facts.seen_slices if mine else ():
            if mine and mine[0] == file and mine[1] < end_s and start_s < mine[2]:
                raise PrfaasError(
                    f"policy {row.label}: was trained on seconds {start_s:g} to {end_s:g} of the trace that "
                    f"scenario {scenario.name} replays from {mine[1]:g} to {mine[2]:g} s; set "
                    "workload.start_s, or say --split training"
                )


def rows_of(policies: Sequence[str], deployments: bool) -> tuple[Row, ...]:
    """Rows of `--policy` and `--deployments`; PrfaasError for a row given twice."""
    texts = list(policies) or list(DEFAULT_POLICIES)
    if deployments:
        texts = [t for t in DEPLOYMENT_ROWS if t not in texts] + texts
    rows = tuple(parse_row(text) for text in texts)
    for label, count in Counter(row.label for row in rows).items():
        if count > 1:
            raise PrfaasError(f"--policy {label!r} is given {count} times")
    return rows


def labels_of(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """One label per scenario: its name, with the hash where two share a name."""
    names = Counter(s.name for s in scenarios)
    labels = tuple(s.name if names[s.name] == 1 else f"{s.name}-{s.hash}" for s in scenarios)
    if len(set(labels)) < len(labels):
        raise PrfaasError("--scenario: the same scenario is given twice")
    return labels


@dataclass(frozen=True)
class Verdict:
    """How a learned policy does against one rule on one scenario: its mean TTFT minus the rule's, in seconds."""

    scenario: str
    policy: str
    rule: str
    difference: Interval

    @property
    def word(self) -> str:
        """Which line it belongs to."""
        d = self.difference
        if d.mean == d.low == d.high == 0.0:
            return _EQUAL
        return {1: LOSES, -1: _WINS, 0: _OPEN}[d.sign]

    @property
    def amount(self) -> str:
        """The difference with its interval."""
        d = self.difference
        if self.word == _EQUAL:
            return ""
        if d.low is None or d.high is None:
            return f" {d.mean:+.2f} s (too few samples for an interval)"
        return f" {d.mean:+.2f} s [{d.low:+.2f}, {d.high:+.2f}]"


@dataclass(frozen=True)
class ComparePlan:
    """A comparison ready to run: scenarios and policies checked, seeds chosen."""

    scenarios: tuple[Scenario, ...]
    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    facts: tuple[PolicyFacts, ...]
    seeds: range
    split: Split
    engine: str
    reference: int

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(scenario, seed) of each part: all policies on one world."""
        return tuple((s, seed) for s in range(len(self.scenarios)) for seed in self.seeds)

    def configuration(self) -> dict[str, Any]:
        """Everything that an outcome depends on, as it stands in `compare.json`."""
        return {
            "format": FORMAT,
            **what_runs(self.rows, self.facts, self.seeds, self.split, self.engine),
            "scenarios": {
                label: {
                    "scenario_hash": scenario.hash,
                    "hash_by_policy": {
                        row.label: row.scenario(scenario).hash for row in self.rows if row.deployment
                    },
                }
                for label, scenario in zip(self.labels, self.scenarios, strict=True)
            },
        }

    def part(self, s: int, seed: int) -> Part:
        """Every policy on one seed of a scenario."""
        scenario = self.scenarios[s]
        return Part(
            f"scenario {self.labels[s]}, seed {seed}",
            tuple(
                Job(row.scenario(scenario), row, seed, self.engine, per_request=is_trace(scenario))
                for row in self.rows
            ),
            tuple(f"policy {row.label}" for row in self.rows),
        )


@dataclass(frozen=True)
class Comparison(ComparePlan):
    """Outcomes of every policy on every scenario and seed of a plan, and what follows from them."""

    outcomes: dict[tuple[int, int], tuple[Outcome, ...]]
    """(scenario, row) to one outcome per seed."""

    def values(self, scenario: int, row: int, figure: str) -> FloatArray:
        """A figure per seed, NaN where it does not exist, shape (seeds,)."""
        found = [outcome.figures[figure] for outcome in self.outcomes[scenario, row]]
        return np.array([math.nan if v is None else v for v in found])

    def own(self, scenario: int, row: int, figure: str) -> Interval:
        """Mean of a figure with its interval."""
        if is_trace(self.scenarios[scenario]):
            if figure == "ttft_mean_s":
                return self._blocks(
                    scenario, [outcome.ttft_s for outcome in self.outcomes[scenario, row]], row
                )
            return without_limits(self.values(scenario, row, figure))
        values = self.values(scenario, row, figure)
        return seed_interval(values[np.isfinite(values)])

    def difference(self, scenario: int, row: int, other: int, figure: str) -> Interval:
        """Paired difference of a figure, row minus other, with its interval.

        On a trace the TTFT of each request is paired (those that both accept) and blocks of arrival time are
        drawn; other figures have no interval there, since one trace is one sample.
        """
        if is_trace(self.scenarios[scenario]):
            if figure == "ttft_mean_s":
                pairs = zip(self.outcomes[scenario, row], self.outcomes[scenario, other], strict=True)
                return self._blocks(scenario, [a.ttft_s - b.ttft_s for a, b in pairs], row)  # type: ignore[operator]
            return without_limits(self._paired(scenario, row, other, figure))
        return seed_interval(self._paired(scenario, row, other, figure))

    def _paired(self, scenario: int, row: int, other: int, figure: str) -> FloatArray:
        values = self.values(scenario, row, figure) - self.values(scenario, other, figure)
        return values[np.isfinite(values)]

    def _blocks(self, scenario: int, per_seed: Sequence[FloatArray | None], row: int) -> Interval:
        arrival_s: list[FloatArray] = []
        values: list[FloatArray] = []
        for outcome, found in zip(self.outcomes[scenario, row], per_seed, strict=True):
            assert found is not None
            assert outcome.arrival_s is not None
            there = ~np.isnan(found)
            arrival_s.append(outcome.arrival_s[there])
            values.append(found[there])
        span_s = max((float(a[-1]) for a in arrival_s if len(a)), default=0.0)
        return block_interval(np.concatenate(arrival_s), np.concatenate(values), span_s)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every learned policy against every rule on the same hardware, scenario by scenario."""
        return tuple(
            Verdict(self.labels[s], row.label, rule.label, self.difference(s, r, k, "ttft_mean_s"))
            for s in range(len(self.scenarios))
            for r, row in enumerate(self.rows)
            if self.facts[r].learned
            for k, rule in enumerate(self.rows)
            if not self.facts[k].learned and rule.deployment == row.deployment
        )

    @property
    def subjects(self) -> tuple[int, ...]:
        """Rows that a report is about: the learned ones, else the first one on the scenario's own hardware."""
        learned = tuple(r for r, facts in enumerate(self.facts) if facts.learned)
        own = (r for r, row in enumerate(self.rows) if row.deployment is None)
        return learned or (next(own, 0),)

    def duels(self, scenario: int) -> list[tuple[int, int, Verdict]]:
        """(subject, other row, verdict on mean TTFT) for every subject and every other row of a scenario."""
        return [
            (
                r,
                k,
                Verdict(
                    self.labels[scenario],
                    self.rows[r].label,
                    other.label,
                    self.difference(scenario, r, k, "ttft_mean_s"),
                ),
            )
            for r in self.subjects
            for k, other in enumerate(self.rows)
            if k != r
        ]

    def cost(self, scenario: int, row: int) -> dict[str, Interval]:
        """What a request costs in seconds of waiting, by the prices of the scenario (its section `reward`).

        Keys: `ttft_s`, `egress_s`, `conversion_s`, `lost_s` (rejected and aborted) and their sum `total_s`, each per
        accepted request.
        """
        prices = self.scenarios[scenario].reward
        measure = self.scenarios[scenario].measure
        requests = np.array([float(o.ttft_counts.sum()) for o in self.outcomes[scenario, row]])
        requests[requests == 0] = math.nan
        gbit = self.values(scenario, row, "egress_mean_bps") * (measure.horizon_s - measure.warmup_s) / 1e9
        lost = self.values(scenario, row, "rejected") + self.values(scenario, row, "aborted")
        per_seed = {
            "ttft_s": self.values(scenario, row, "ttft_mean_s"),
            "egress_s": prices.egress_price_s_per_gbit * gbit / requests,
            "conversion_s": prices.conversion_price_s * self.values(scenario, row, "conversions") / requests,
            "lost_s": prices.reject_penalty_s * lost / requests,
        }
        per_seed["total_s"] = np.sum(list(per_seed.values()), axis=0)
        trace = is_trace(self.scenarios[scenario])
        return {
            name: without_limits(values) if trace else seed_interval(values[np.isfinite(values)])
            for name, values in per_seed.items()
        }

    def lines(self) -> list[str]:
        """Plain lines: what each learned policy loses, wins, and leaves open on each scenario."""
        out = []
        pairs = dict.fromkeys((v.scenario, v.policy) for v in self.verdicts)
        for scenario, policy in pairs:
            mine = [v for v in self.verdicts if (v.scenario, v.policy) == (scenario, policy)]
            for word in WORDS:
                told = sorted((v for v in mine if v.word == word), key=lambda v: -v.difference.mean)
                if told:
                    by = "" if word == _EQUAL else " by"
                    against = "; ".join(f"{v.rule}{by}{v.amount}" for v in told)
                    out.append(f"{scenario}: {policy} {word} {against} (mean TTFT, 95% interval)")
        return out

    def warnings(self, scenario: int, row: int) -> Counter[str]:
        """Warnings of the episodes with the number of seeds that gave them."""
        return Counter(w for outcome in self.outcomes[scenario, row] for w in outcome.warnings)

    def best_rule(self, scenario: int) -> int | None:
        """Row of the rule on the scenario's own hardware with the lowest mean TTFT, or None without any."""
        own = [k for k, row in enumerate(self.rows) if not self.facts[k].learned and row.deployment is None]
        return min(own, key=lambda k: _nan_last(self.values(scenario, k, "ttft_mean_s")), default=None)

    def summary(self) -> dict[str, Any]:
        """`metrics.json` as a mapping: every number finite or null."""
        extra = ["torch", "stable-baselines3"] if any(f.learned for f in self.facts) else []
        rows: list[dict[str, Any]] = [
            {
                "label": row.label,
                "policy": row.spec,
                "policy_hash": facts.hash,
                "learned": facts.learned,
                "deployment": row.deployment,
            }
            for row, facts in zip(self.rows, self.facts, strict=True)
        ]
        return {
            "command": "prfaas compare",
            "versions": versions(*extra),
            "engine": self.engine,
            "split": self.split,
            "seeds": {"first": self.seeds.start, "count": len(self.seeds)},
            "reference": self.rows[self.reference].label,
            "intervals": {
                "confidence": CONFIDENCE,
                "resamples": RESAMPLES,
                "seeds": "studentised bootstrap over seeds of the paired differences",
                "blocks": "moving blocks of 60 s over the arrival time of one replayed trace",
            },
            "how_averaged": HOW_AVERAGED,
            "rows": rows,
            "subjects": [self.rows[r].label for r in self.subjects],
            "scenarios": [self._scenario_summary(s) for s in range(len(self.scenarios))],
            "lines": self.lines(),
        }

    def _scenario_summary(self, s: int) -> dict[str, Any]:
        results = {}
        for r, row in enumerate(self.rows):
            results[row.label] = {
                "scenario_hash": row.scenario(self.scenarios[s]).hash,
                "figures": {name: interval_json(self.own(s, r, name)) for name in FIGURE_NAMES},
                "difference_to_reference": {
                    name: interval_json(self.difference(s, r, self.reference, name)) for name in FIGURE_NAMES
                },
                "cost": {name: interval_json(found) for name, found in self.cost(s, r).items()},
                "warnings": dict(self.warnings(s, r)),
            }
        scenario = self.scenarios[s]
        notes = dict.fromkeys(n for r in range(len(self.rows)) for o in self.outcomes[s, r] for n in o.notes)
        return {
            "label": self.labels[s],
            "name": scenario.name,
            "description": scenario.description,
            "hash": scenario.hash,
            "trace": is_trace(scenario),
            "horizon_s": scenario.measure.horizon_s,
            "warmup_s": scenario.measure.warmup_s,
            "slo": scenario.slo.model_dump(mode="json"),
            "prices": scenario.reward.model_dump(mode="json"),
            "clusters": {
                "prfaas": len(scenario.deployment.prfaas),
                "pd": len(scenario.deployment.pd),
                "links": len(scenario.deployment.links),
            },
            "notes": list(notes),
            "results": results,
            "learned_minus_rule_ttft_mean_s": [
                {"policy": v.policy, "rule": v.rule, **interval_json(v.difference)}
                for v in self.verdicts
                if v.scenario == self.labels[s]
            ],
            "subject_minus_other_ttft_mean_s": [
                {
                    "policy": v.policy,
                    "other": v.rule,
                    "same_hardware": self.rows[r].deployment == self.rows[k].deployment,
                    "word": v.word,
                    **interval_json(v.difference),
                }
                for r, k, v in self.duels(s)
            ],
        }

    def json_text(self) -> str:
        """Text of `metrics.json`."""
        return json.dumps(self.summary(), indent=2, allow_nan=False) + "\n"

    def csv_text(self) -> str:
        """Text of `results.csv`: one line per scenario, policy and seed; a figure that does not exist is empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for s, label in enumerate(self.labels):
            for r, row in enumerate(self.rows):
                scenario_hash = row.scenario(self.scenarios[s]).hash
                for seed, outcome in zip(self.seeds, self.outcomes[s, r], strict=True):
                    figures = [outcome.figures[name] for name in FIGURE_NAMES]
                    writer.writerow(
                        (
                            label,
                            scenario_hash,
                            row.label,
                            row.deployment or "",
                            self.facts[r].hash,
                            self.split,
                            seed,
                            outcome.arrivals_hash,
                            *("" if v is None else repr(v) for v in figures),
                            "; ".join(outcome.warnings),
                        )
                    )
        return out.getvalue()


CSV_COLUMNS = (
    "scenario",
    "scenario_hash",
    "policy",
    "deployment",
    "policy_hash",
    "split",
    "seed",
    "arrivals_hash",
    *FIGURE_NAMES,
    "warnings",
)


def without_limits(values: FloatArray) -> Interval:
    """The mean of the finite values without an interval: one replayed trace is one sample."""
    finite = values[np.isfinite(values)]
    return Interval(float(finite.mean()) if len(finite) else math.nan, None, None, len(finite), "seeds")


def interval_json(interval: Interval) -> dict[str, Any]:
    """An interval for JSON, with null for what does not exist."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in interval.as_json().items()
    }


def _nan_last(values: FloatArray) -> float:
    mean = float(np.mean(values))
    return math.inf if math.isnan(mean) else mean


class CompareFolder(PartsFolder):
    """A comparison's folder, new or to be gone on with.

    Raises:
        PrfaasError: the folder holds something else, or a comparison of another configuration (the field is named).
    """

    def __init__(self, out: Path, plan: ComparePlan, *, force: bool = False) -> None:
        self._plan = plan
        super().__init__(
            out,
            kind="comparison",
            marker=MARKER,
            parts=PARTS,
            part="part",
            configuration=plan.configuration(),
            force=force,
        )

    def name(self, s: int, seed: int) -> str:
        """Name of the part of a scenario and seed; it does not depend on the order of the scenarios."""
        return f"{self._plan.scenarios[s].hash}-{seed}"

    def done(self) -> list[tuple[int, int]]:
        """Parts that are finished."""
        return [part for part in self._plan.parts if self.has(self.name(*part))]

    def write(self, s: int, seed: int, outcomes: Sequence[Outcome]) -> None:
        """Keep a finished part: one outcome per policy."""
        content = {
            "scenario": self._plan.labels[s],
            "scenario_hash": self._plan.scenarios[s].hash,
            "seed": seed,
            "outcomes": {
                row.label: outcome.as_json() for row, outcome in zip(self._plan.rows, outcomes, strict=True)
            },
        }
        self.write_part(self.name(s, seed), content)

    def read(self, s: int, seed: int) -> list[Outcome]:
        """One outcome per policy of a finished part.

        Raises:
            PrfaasError: the file is broken, or another part's.
        """

        def whole(content: Any) -> list[Outcome] | None:
            outcomes = [Outcome.of_json(content["outcomes"][row.label]) for row in self._plan.rows]
            mine = (content["scenario_hash"], content["seed"]) == (self._plan.scenarios[s].hash, seed)
            return outcomes if mine else None

        label = f"scenario {self._plan.labels[s]}, seed {seed}"
        found: list[Outcome] = self.read_part(self.name(s, seed), label, whole)
        return found


def prepare(
    scenarios: Sequence[Scenario],
    rows: Sequence[Row],
    *,
    seeds: range,
    split: Split,
    reference: str | None = None,
    engine: str = DEFAULT_ENGINE,
) -> ComparePlan:
    """Check a comparison before anything runs; arguments and errors are those of `compare`."""
    if not len(seeds):
        raise PrfaasError("--seeds must be 1 or more")
    names = [row.label for row in rows]
    if reference is not None and reference not in names:
        raise PrfaasError(f"--reference {reference!r} is not among the policies: {', '.join(names)}")
    labels = labels_of(scenarios)
    facts = tuple(facts_of(row, scenarios) for row in rows)
    if split == "test":
        for row, known in zip(rows, facts, strict=True):
            check_unseen(row, known, scenarios, seeds)
    return ComparePlan(
        scenarios=tuple(scenarios),
        labels=labels,
        rows=tuple(rows),
        facts=facts,
        seeds=seeds,
        split=split,
        engine=engine,
        reference=0 if reference is None else names.index(reference),
    )


def run_compare(
    plan: ComparePlan,
    runner: EpisodeRunner,
    folder: CompareFolder | None = None,
    on_done: Callable[[], None] | None = None,
) -> Comparison:
    """Run what is missing of a comparison and give all of it.

    Args:
        plan: what to run.
        runner: processes to run in.
        folder: where finished parts are kept; without one nothing is written.
        on_done: called after each episode that is run.

    Raises:
        PrfaasError: an episode failed, policies met different arrivals, a part's file is broken.
    """
    there = folder.done() if folder is not None else []
    missing = [part for part in plan.parts if part not in set(there)]
    found: dict[tuple[int, int], list[Outcome]] = {}

    def finish(p: int, outcomes: list[Outcome]) -> None:
        s, seed = missing[p]
        if len({outcome.arrivals_hash for outcome in outcomes}) > 1:
            raise PrfaasError(f"scenario {plan.labels[s]}, seed {seed}: the policies met different arrivals")
        if folder is None:
            found[s, seed] = outcomes
        else:
            folder.write(s, seed, outcomes)

    if missing:
        warm_up(plan.scenarios[missing[0][0]], plan.engine)
        tell = None if on_done is None else lambda p: on_done()
        run_parts([plan.part(s, seed) for s, seed in missing], runner, finish, tell)
    if folder is not None:
        found = {(s, seed): folder.read(s, seed) for s, seed in plan.parts}
    return Comparison(
        **vars(plan),
        outcomes={
            (s, r): tuple(found[s, seed][r] for seed in plan.seeds)
            for s in range(len(plan.scenarios))
            for r in range(len(plan.rows))
        },
    )


def compare(
    scenarios: Sequence[Scenario],
    rows: Sequence[Row],
    *,
    seeds: range,
    split: Split,
    runner: EpisodeRunner,
    reference: str | None = None,
    engine: str = DEFAULT_ENGINE,
    on_done: Callable[[], None] | None = None,
) -> Comparison:
    """Run every row on every scenario with the same seeds.

    Args:
        scenarios: each gives one table.
        rows: policies, the first one being the reference unless `reference` names another.
        seeds: episode seeds, all of `split` (see `seeds_of`).
        split: what the seeds are for; on test seeds nothing a policy was trained or chosen on is allowed.
        runner: processes to run in.
        reference: label of the row that differences are taken from.
        engine: engine name.
        on_done: called after each of `len(scenarios) * len(rows) * len(seeds)` episodes.

    Raises:
        PrfaasError: an unknown reference, seeds or trace seconds that a policy has seen, a policy that does not
            fit a scenario.
    """
    plan = prepare(scenarios, rows, seeds=seeds, split=split, reference=reference, engine=engine)
    return run_compare(plan, runner, on_done=on_done)


def timeline_rows(comparison: Comparison, asked: Sequence[str]) -> list[int]:
    """Rows for the timeline: those asked for, else the subjects, the best rules and the reference."""
    names = [row.label for row in comparison.rows]
    for name in asked:
        if name not in names:
            raise PrfaasError(f"--timeline {name!r} is not among the policies: {', '.join(names)}")
    if asked:
        return [names.index(name) for name in dict.fromkeys(asked)]
    best = [comparison.best_rule(s) for s in range(len(comparison.scenarios))]
    wanted = [
        *comparison.subjects,
        *(k for k in best if k is not None),
        comparison.reference,
    ]
    return list(dict.fromkeys(wanted))[:MAX_TIMELINES]


#: Of a timeline beside the columns of `prfaas_env.simulator.run.TIMELINE`: mean TTFT of the requests that arrived
#: from this row's time to the next one's, NaN where none did.
TIMELINE_TTFT = "ttft_s"


def run_timelines(
    comparison: Comparison,
    rows: Sequence[int],
    runner: EpisodeRunner,
    on_done: Callable[[], None] | None = None,
) -> dict[tuple[int, int], dict[str, FloatArray]]:
    """Timelines of the first seed: (scenario, row) to the columns of `TIMELINE` and `TIMELINE_TTFT`."""
    keys = [(s, r) for s in range(len(comparison.scenarios)) for r in rows]
    seed = comparison.seeds[0]
    jobs = [
        Job(
            comparison.rows[r].scenario(comparison.scenarios[s]),
            comparison.rows[r],
            seed,
            comparison.engine,
            per_request=True,
            timeline=True,
        )
        for s, r in keys
    ]
    out = {}
    for key, outcome in zip(keys, runner.run(jobs, on_done), strict=True):
        assert outcome.timeline is not None
        out[key] = {**outcome.timeline, TIMELINE_TTFT: _ttft_by_row(outcome)}
    return out


def _ttft_by_row(outcome: Outcome) -> FloatArray:
    assert outcome.timeline is not None
    assert outcome.arrival_s is not None
    assert outcome.ttft_s is not None
    time_s = outcome.timeline["time_s"]
    there = ~np.isnan(outcome.ttft_s)
    row = np.searchsorted(time_s, outcome.arrival_s[there], side="right") - 1
    sums = np.bincount(row, weights=outcome.ttft_s[there], minlength=len(time_s))
    counts = np.bincount(row, minlength=len(time_s))
    return np.divide(sums, counts, out=np.full(len(time_s), math.nan), where=counts > 0)
