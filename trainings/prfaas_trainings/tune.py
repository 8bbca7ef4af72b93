"""`prfaas tune` on a rule: trials of Optuna on training seeds, the best of them chosen on validation seeds.

Every trial meets the same scenarios and seeds in the same order, block by block; after a block it may be stopped
(asynchronous successive halving). Everything finished is kept in the folder at once, so a tuning goes on where it was
stopped, with the trials that it would have made in one go.
"""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from prfaas_baselines.tuned_files import Provenance, Score, Seeds, TunedFile, tuned_yaml
from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.policy import make_policy, policy_factory
from prfaas_env.scenarios import Scenario
from prfaas_trainings.compare import versions, without_limits
from prfaas_trainings.config import SeedRange
from prfaas_trainings.episodes import EpisodeRunner, FloatArray, Job, PolicySource, Row, is_trace, warm_up
from prfaas_trainings.parts import PartsFolder
from prfaas_trainings.statistics import seed_interval
from prfaas_trainings.tune_config import NamedFamily, Tuning, Value

#: File that marks the folder of a tuning, and what is in it.
MARKER = "tune.json"
PARTS = "evaluations"
STUDY_FILE = "study.log"
TUNED_FILE = "tuned.yaml"
TRIALS_FILE = "trials.csv"

#: TTFT means, shape (scenarios, seeds).
Means = FloatArray

Parameters = dict[str, Value]


def spec_of(policy: str, parameters: Parameters) -> str:
    """The policy spec of parameters."""
    items = ",".join(f"{key}={_text(value)}" for key, value in parameters.items())
    return f"{policy}:{items}" if items else policy


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def relative(means: Means, reference: Means) -> float:
    """Mean over scenarios of mean TTFT over that of the reference, both on the same seeds.

    Args:
        means, reference: shape (scenarios, seeds).
    """
    return float(np.mean(means.sum(axis=1) / reference.sum(axis=1)))


def score_of(means: Means, reference: Means, cases: Sequence[Scenario], labels: Sequence[str]) -> Score:
    """The score with its interval: seeds are resampled, each with all its scenarios.

    The interval is that of the linearised ratio, whose mean over seeds is the score. A replayed trace is one sample
    whatever the number of seeds, so there is none.
    """
    base = reference.mean(axis=1)
    ratio = means.mean(axis=1) / base
    per_seed = np.mean(ratio[:, None] + (means - ratio[:, None] * reference) / base[:, None], axis=0)
    traced = any(is_trace(case) for case in cases)
    interval = without_limits(per_seed) if traced else seed_interval(per_seed)
    return Score(
        relative=relative(means, reference),
        low=interval.low,
        high=interval.high,
        ttft_mean_s={label: float(m) for label, m in zip(labels, means.mean(axis=1), strict=True)},
    )


@dataclass(frozen=True)
class Candidate:
    """A rule with parameters."""

    label: str
    make: PolicySource


def candidate(policy: str, parameters: Parameters) -> Candidate:
    """A rule with parameters; its factory is looked up once."""
    return Candidate(spec_of(policy, parameters), functools.partial(policy_factory(policy), **parameters))


class Bench:
    """Runs candidates on the scenarios of a family."""

    def __init__(self, cases: Sequence[Scenario], runner: EpisodeRunner, engine: str) -> None:
        self.cases = tuple(cases)
        self._runner, self._engine = runner, engine

    def means(self, what: Candidate, seeds: Sequence[int]) -> Means:
        """TTFT means on seeds, shape (scenarios, seeds).

        Raises:
            PrfaasError: an episode without a request, or one that the rule refuses.
        """
        row = Row(what.label, what.make)
        jobs = [Job(case, row, seed, self._engine) for case in self.cases for seed in seeds]
        found = [outcome.figures["ttft_mean_s"] for outcome in self._runner.run(jobs)]
        for job, value in zip(jobs, found, strict=True):
            if value is None:
                raise PrfaasError(f"scenario {job.scenario.name}, seed {job.seed}: no request to measure")
        return np.array(found, dtype=np.float64).reshape(len(self.cases), len(seeds))


def kept_means(folder: PartsFolder, name: str, bench: Bench, what: Candidate, seeds: Sequence[int]) -> Means:
    """Means of a candidate, run now or read from the folder, where they are kept under a name.

    Raises:
        PrfaasError: an episode failed, or the file is broken or of another candidate.
    """
    part = name.replace(" ", "_")
    if not folder.has(part):
        means = bench.means(what, seeds)
        folder.write_part(part, {"policy": what.label, "seeds": list(seeds), "ttft_mean_s": means.tolist()})

    def mine(content: Any) -> Means | None:
        same = content["policy"] == what.label and content["seeds"] == list(seeds)
        return np.array(content["ttft_mean_s"], dtype=np.float64) if same else None

    found: Means = folder.read_part(part, name, mine)
    return found


# ---------------------------------------------------------------------------------------- the trials


def check_space(tuning: Tuning) -> Parameters:
    """Check that the rule takes both ends of every range; gives the values of the first trial, its defaults.

    Raises:
        PrfaasError: a field that the rule does not have, a value that it refuses, a default outside its range.
    """
    assert tuning.policy is not None
    where = f"tuning {tuning.name}"
    for name, field in tuning.space.items():
        for end in field.ends:
            try:
                make_policy(spec_of(tuning.policy, {name: end}))
            except PrfaasError as error:
                raise PrfaasError(f"{where}: space.{name}: {error}") from None
    defaults = rule_defaults(tuning.policy)
    first: Parameters = {}
    for name, field in tuning.space.items():
        value: Any = tuning.start.get(name, defaults.get(name))
        if value is None or not field.holds(value):
            raise PrfaasError(
                f"{where}: space.{name}: the default {value!r} is not in it; widen it, or give a value in `start`"
            )
        first[name] = value
    return first


def rule_defaults(policy: str) -> dict[str, Any]:
    """Defaults of a rule whose class names its parameters; of another one nothing is known."""
    model = getattr(policy_factory(policy), "Parameters", None)
    return {} if model is None else {name: field.default for name, field in model.model_fields.items()}


def open_study(tuning: Tuning, file: Path) -> optuna.Study:
    """The study in a journal file, new or to be gone on with; trials that were cut off there are given up."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
    study = optuna.create_study(
        storage=storage,
        study_name=tuning.name,
        load_if_exists=True,
        direction="minimize",
        pruner=optuna.pruners.NopPruner(),
    )
    for cut_off in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(cut_off.number, state=TrialState.FAIL)
    return study


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that count, in order: run to the end, or stopped after a block."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def next_trial(study: optuna.Study, tuning: Tuning, first: Parameters) -> Trial:
    """The next trial: `first`, then those that the tuning wants to begin with, then what the sampler says.

    The sampler is seeded by how many trials there were, so a stopped study goes on as it would have.
    """
    n = len(finished(study))
    starts = (first, *({**first, **change} for change in tuning.more_starts))
    if n < len(starts) and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.enqueue_trial(starts[n])
    study.sampler = optuna.samplers.TPESampler(
        seed=np.random.SeedSequence(tuning.seed, spawn_key=(n,)).generate_state(1)[0],
        n_startup_trials=tuning.startup_trials,
        multivariate=True,
    )
    return study.ask()


def suggest(tuning: Tuning, trial: Trial) -> Parameters:
    """The values that a trial tries."""
    return {name: field.suggest(trial, name) for name, field in tuning.space.items()}


@dataclass
class Search:
    """The trials of a rule on training seeds."""

    tuning: Tuning
    study: optuna.Study
    bench: Bench
    blocks: tuple[tuple[int, ...], ...]
    reference: Means
    first: Parameters

    def run(self, on_trial: Callable[[int, float], None]) -> None:
        """Run the trials that are missing; `on_trial` gets how many there are and the best score so far."""
        best = min((score_at_end(t) for t in complete(self.study)), default=math.inf)
        while (n := len(finished(self.study))) < self.tuning.trials:
            trial = next_trial(self.study, self.tuning, self.first)
            try:
                value = self._try(trial, keep=n == 0)
            except BaseException:
                self.study.tell(trial, state=TrialState.FAIL)
                raise
            if value is not None:
                best = min(best, value)
            on_trial(n + 1, best)

    def _try(self, trial: Trial, keep: bool) -> float | None:
        """Run a trial block by block; its score, or None when it was stopped."""
        assert self.tuning.policy is not None
        what = candidate(self.tuning.policy, suggest(self.tuning, trial))
        found: list[Means] = []
        score, n = math.inf, 0
        for k, block in enumerate(self.blocks):
            found.append(self.bench.means(what, block))
            n += len(block)
            score = relative(np.concatenate(found, axis=1), self.reference[:, :n])
            trial.report(score, k + 1)
            if not keep and k + 1 < len(self.blocks) and not self._goes_on(score, k + 1):
                self.study.tell(trial, state=TrialState.PRUNED)
                return None
        self.study.tell(trial, score)
        return score

    def _goes_on(self, score: float, blocks: int) -> bool:
        """Whether a trial with this score goes on; asked after 1, r, r^2, ... blocks (r the reduction factor).

        Only trials that count are looked at, so that a trial which was cut off changes nothing.
        """
        factor = self.tuning.reduction_factor
        if round(factor ** round(math.log(blocks, factor))) != blocks:
            return True
        there = (trial.intermediate_values.get(blocks) for trial in finished(self.study))
        return goes_on(score, [value for value in there if value is not None], factor)


def goes_on(score: float, others: Sequence[float], reduction_factor: int) -> bool:
    """Successive halving without waiting: whether a score is among the best 1/`reduction_factor`, or the best at all.

    Args:
        score: of the trial.
        others: scores that earlier trials had after as many blocks.
        reduction_factor: of so many trials one goes on.
    """
    kept = max((len(others) + 1) // reduction_factor, 1)
    return sum(other < score for other in others) < kept


def score_at_end(trial: FrozenTrial) -> float:
    """Score of a trial that was run to its end."""
    assert trial.value is not None
    return trial.value


def complete(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that were run on every training seed."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def blocks_of(seeds: SeedRange, block: int) -> tuple[tuple[int, ...], ...]:
    """Seeds in blocks, in order; the last one may be shorter."""
    each = list(seeds.seeds)
    return tuple(tuple(each[k : k + block]) for k in range(0, len(each), block))


def trials_csv(tuning: Tuning, study: optuna.Study) -> str:
    """Table of the trials that count: number, how it ended, blocks, score by then, and every searched value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("trial", "ended", "blocks", "relative", *tuning.space))
    for k, trial in enumerate(finished(study)):
        steps = trial.intermediate_values
        blocks = max(steps, default=0)
        score = trial.value if trial.value is not None else steps.get(blocks)
        values = (trial_value(tuning, trial, name) for name in tuning.space)
        writer.writerow(
            (k, trial.state.name.lower(), blocks, "" if score is None else f"{score:.6g}", *values)
        )
    return out.getvalue()


def trial_value(tuning: Tuning, trial: FrozenTrial, name: str) -> Value:
    """A value of a trial as it was tried."""
    return tuning.space[name].suggest(optuna.trial.FixedTrial(dict(trial.params)), name)  # type: ignore[arg-type]


def trial_parameters(tuning: Tuning, trial: FrozenTrial) -> Parameters:
    """All values of a trial as they were tried."""
    return {name: trial_value(tuning, trial, name) for name in tuning.space}


# --------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Told:
    """What is told while a tuning runs: a line, or progress (done, of how many, note)."""

    say: Callable[[str], None]
    stage: Callable[[str, int, int], Callable[[int, str], None]]


class PolicyTuning:
    """A tuning of a rule in a folder, new or to be gone on with.

    Args:
        tuning: what is searched.
        family: what it is searched on.
        out: the folder.
        runner: processes to run in.
        force: an earlier tuning there is removed first.

    Raises:
        PrfaasError: a faulty space, or a folder with something else.
    """

    def __init__(
        self, tuning: Tuning, family: NamedFamily, out: Path, runner: EpisodeRunner, *, force: bool = False
    ) -> None:
        assert tuning.policy is not None
        self.tuning, self.family, self.out = tuning, family, out
        self.policy = tuning.policy
        self.first = check_space(tuning)
        own = family.family
        self.labels = own.labels()
        self._search = Bench(own.cases("training", tuning.search_overrides), runner, tuning.engine)
        self._validate = Bench(own.cases("validation"), runner, tuning.engine)
        self._training = own.cases("training")
        self._cases = self._validate.cases
        self.versions = versions("optuna")
        self.folder = PartsFolder(
            out,
            kind="tuning",
            marker=MARKER,
            parts=PARTS,
            part="evaluation",
            configuration=self.configuration(),
            force=force,
        )
        self._means: dict[str, Means] = {}

    def configuration(self) -> dict[str, Any]:
        """Everything that the result depends on; more trials and finalists may be asked for later."""
        return {
            "command": "prfaas tune",
            "tuning": {
                k: v for k, v in self.tuning.text.items() if k not in {"trials", "finalists", "family"}
            },
            "family": {
                "name": self.family.name,
                **self.family.family.model_dump(mode="json", exclude={"best_seeds"}),
            },
            "scenarios": [case.hash for case in (*self._search.cases, *self._validate.cases)],
            "versions": self.versions,
        }

    def run(self, told: Told) -> TunedFile:
        """Run what is missing and write `tuned.yaml` and `trials.csv`.

        Raises:
            PrfaasError: an episode failed. What was finished is kept.
        """
        tuning, own = self.tuning, self.family.family
        warm_up(self._search.cases[0], tuning.engine)
        seeds = list(own.training_seeds.seeds)
        reference = Candidate(tuning.reference, tuning.reference)
        default = Candidate(self.policy, self.policy)
        base = self._kept("training reference", self._search, reference, seeds)
        plain = self._kept("training default", self._search, default, seeds)
        study = open_study(tuning, self.out / STUDY_FILE)
        search = Search(
            tuning, study, self._search, blocks_of(own.training_seeds, own.block), base, self.first
        )
        self._trials(search, told)
        write_whole(self.out / TRIALS_FILE, trials_csv(tuning, study))
        best = self._choose(study, told, reference, default)
        number, chosen, scores = best
        record = TunedFile(
            policy=self.policy,
            family=self.family.name,
            parameters=chosen,
            training={
                "default": score_of(plain, base, self._cases, self.labels),
                "tuned": score_of(self._trial_means(study, number, search), base, self._cases, self.labels),
            }
            if number is not None
            else {name: score_of(plain, base, self._cases, self.labels) for name in ("default", "tuned")},
            validation=scores,
            study=Provenance(
                trials=len(finished(study)),
                pruned=len(finished(study)) - len(complete(study)),
                reference=tuning.reference,
                search_overrides=tuning.search_overrides,
                training_seeds=Seeds(first=seeds[0], count=len(seeds)),
                validation_seeds=Seeds(first=own.validation_seeds.first, count=own.validation_seeds.count),
                scenarios=dict(zip(self.labels, (case.hash for case in self._training), strict=True)),
                validation_scenarios=dict(
                    zip(self.labels, (case.hash for case in self._validate.cases), strict=True)
                ),
                versions=self.versions,
            ),
        )
        write_whole(self.out / TUNED_FILE, tuned_yaml(record))
        return record

    def _trials(self, search: Search, told: Told) -> None:
        done = len(finished(search.study))
        if done >= self.tuning.trials:
            return
        if done:
            told.say(f"{done} of {self.tuning.trials} trials are there already")
        advance = told.stage("trials", self.tuning.trials, done)
        search.run(lambda n, best: advance(n, f"best {best:.3f} of {self.tuning.reference}"))

    def _choose(
        self, study: optuna.Study, told: Told, reference: Candidate, default: Candidate
    ) -> tuple[int | None, Parameters, dict[str, Score]]:
        """(trial, its parameters, scores) of what is best on validation seeds; no trial where the default is."""
        seeds = list(self.family.family.validation_seeds.seeds)
        ranked = sorted(complete(study), key=lambda t: (score_at_end(t), t.number))
        finalists = self._distinct(ranked)[: self.tuning.finalists]
        advance = told.stage("validation", len(finalists) + 2, 0)
        base = self._kept("validation reference", self._validate, reference, seeds)
        advance(1, "")
        plain = self._kept("validation default", self._validate, default, seeds)
        advance(2, "")
        best: tuple[float, int | None, Means] = (relative(plain, base), None, plain)
        for k, trial in enumerate(finalists):
            what = candidate(self.policy, trial_parameters(self.tuning, trial))
            means = self._kept(f"validation trial {trial.number}", self._validate, what, seeds)
            advance(k + 3, f"trial {trial.number}")
            score = relative(means, base)
            if score < best[0]:
                best = (score, trial.number, means)
        scores = {
            "default": score_of(plain, base, self._cases, self.labels),
            "tuned": score_of(best[2], base, self._cases, self.labels),
        }
        if best[1] is None:
            return None, {}, scores
        chosen = next(t for t in finalists if t.number == best[1])
        return best[1], trial_parameters(self.tuning, chosen), scores

    def _distinct(self, ranked: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Trials without those that repeat the values of an earlier one."""
        seen: dict[str, FrozenTrial] = {}
        for trial in ranked:
            seen.setdefault(spec_of(self.policy, trial_parameters(self.tuning, trial)), trial)
        return list(seen.values())

    def _trial_means(self, study: optuna.Study, number: int | None, search: Search) -> Means:
        """TTFT means of the chosen trial on all training seeds."""
        trial = next(t for t in complete(study) if t.number == number)
        what = candidate(self.policy, trial_parameters(self.tuning, trial))
        seeds = [seed for block in search.blocks for seed in block]
        return self._kept(f"training trial {number}", self._search, what, seeds)

    def _kept(self, name: str, bench: Bench, what: Candidate, seeds: Sequence[int]) -> Means:
        return kept_means(self.folder, name, bench, what, seeds)
