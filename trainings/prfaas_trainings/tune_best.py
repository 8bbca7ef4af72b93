"""The best rule of a family: every rule, tuned or not, on validation seeds that no tuning has used."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from prfaas_baselines.tuned_files import BestRule, Seeds, read_tuned, tuned_families
from prfaas_trainings.compare import versions
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.parts import PartsFolder
from prfaas_trainings.tune import PARTS, Bench, Candidate, Told, candidate, kept_means, relative, score_of
from prfaas_trainings.tune_config import NamedFamily

#: File that marks a folder of evaluations.
MARKER = "best.json"
#: Rules as they are without tuning.
UNTUNED = (
    "static",
    "uncached_threshold",
    "earliest_finish",
    "earliest_finish_conversion",
    "earliest_finish_conversion:period_s=15",
    "dual_timescale",
    "hybrid_planner",
    "length_ttft_grid",
)
#: What everything is measured by.
REFERENCE = "earliest_finish_conversion:period_s=15"


@dataclass(frozen=True)
class NamedCandidate:
    """A candidate and the spec that names it (the label of the candidate spells its parameters out)."""

    name: str
    candidate: Candidate


def part_name(what: NamedCandidate) -> str:
    """Name of the evaluation of a candidate: other parameters are another one."""
    return hashlib.sha256(what.candidate.label.encode()).hexdigest()[:12]


def candidates_of(family: str, folder: Path) -> list[NamedCandidate]:
    """The untuned rules, and the tuned ones that a folder has for a family (`RULE:tuned=FAMILY`).

    Raises:
        PrfaasError: a faulty tuned file.
    """
    found = [NamedCandidate(spec, Candidate(spec, spec)) for spec in UNTUNED]
    for path in sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else ():
        if family in tuned_families(path.name, folder):
            parameters = read_tuned(path.name, str(path / f"{family}.yaml")).parameters
            if parameters:
                made = candidate(path.name, dict(parameters))
                found.append(NamedCandidate(f"{path.name}:tuned={family}", made))
    return found


def choose_best(
    family: NamedFamily,
    folder: Path,
    out: Path,
    runner: EpisodeRunner,
    engine: str,
    told: Told,
    *,
    force: bool = False,
) -> BestRule:
    """Run every candidate on the same seeds; the lowest mean TTFT relative to the reference wins.

    A candidate that was run before is read from `out`; one whose parameters have changed since is run anew.

    Args:
        family: where.
        folder: tuned files, as `prfaas tune --save` writes them.
        out: where finished evaluations are kept.
        runner: processes to run in.
        engine: engine name.
        told: progress.
        force: evaluations that are there are removed first.

    Raises:
        PrfaasError: a faulty tuned file, an episode that failed, or evaluations of something else in `out`.
    """
    own = family.family
    bench = Bench(own.cases("validation"), runner, engine)
    seeds = list(own.best_seeds.seeds)
    found = candidates_of(family.name, folder)
    parts = PartsFolder(
        out,
        kind="choice of the best rule",
        marker=MARKER,
        parts=PARTS,
        part="evaluation",
        configuration={
            "command": "prfaas tune --best",
            "family": family.name,
            "scenarios": [case.hash for case in bench.cases],
            "seeds": {"first": seeds[0], "count": len(seeds)},
            "engine": engine,
            "versions": versions(),
        },
        force=force,
    )
    advance = told.stage("rules", len(found), 0)
    means = {}
    for k, what in enumerate(found):
        means[what.name] = kept_means(parts, part_name(what), bench, what.candidate, seeds)
        advance(k + 1, what.name)
    base = means[REFERENCE]
    best = min(means, key=lambda label: relative(means[label], base))
    return BestRule(
        spec=best,
        reference=REFERENCE,
        validation_seeds=Seeds(first=seeds[0], count=len(seeds)),
        scenarios={label: case.hash for label, case in zip(own.labels(), bench.cases, strict=True)},
        versions=versions(),
        candidates={label: score_of(m, base, bench.cases, own.labels()) for label, m in means.items()},
    )
