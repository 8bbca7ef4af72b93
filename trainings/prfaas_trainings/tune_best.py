"""The best rule of a family: every rule, tuned or not, on validation seeds that no tuning has used."""

from __future__ import annotations

from pathlib import Path

from prfaas_baselines.tuned_files import BestRule, Seeds, read_tuned, tuned_families
from prfaas_trainings.compare import versions
from prfaas_trainings.episodes import EpisodeRunner
from prfaas_trainings.tune import Bench, Candidate, Told, candidate, relative, score_of
from prfaas_trainings.tune_config import NamedFamily

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


def candidates_of(family: str, folder: Path) -> list[Candidate]:
    """The untuned rules, and the tuned ones that a folder has for a family (`RULE:tuned=FAMILY`).

    Raises:
        PrfaasError: a faulty tuned file.
    """
    found = [Candidate(spec, spec) for spec in UNTUNED]
    for path in sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else ():
        if family in tuned_families(path.name, folder):
            parameters = read_tuned(path.name, str(path / f"{family}.yaml")).parameters
            if parameters:
                made = candidate(path.name, dict(parameters))
                found.append(Candidate(f"{path.name}:tuned={family}", made.make))
    return found


def choose_best(
    family: NamedFamily, folder: Path, runner: EpisodeRunner, engine: str, told: Told
) -> BestRule:
    """Run every candidate on the same seeds; the lowest mean TTFT relative to the reference wins.

    Args:
        family: where.
        folder: tuned files, as `prfaas tune --save` writes them.
        runner: processes to run in.
        engine: engine name.
        told: progress.

    Raises:
        PrfaasError: a faulty tuned file, or an episode that failed.
    """
    own = family.family
    bench = Bench(own.cases("validation"), runner, engine)
    seeds = list(own.best_seeds.seeds)
    found = candidates_of(family.name, folder)
    advance = told.stage("rules", len(found), 0)
    means = {}
    for k, what in enumerate(found):
        means[what.label] = bench.means(what, seeds)
        advance(k + 1, what.label)
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
