"""`prfaas train`: PPO on a mix of scenarios, checkpoints, and the best policy by validation seeds."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv

from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.ppo import fit_scaling, make_ppo, save_policy, set_progress
from prfaas_agents.record import (
    POLICY_FILE,
    RECORD_FILE,
    CodecRecord,
    PolicyRecord,
    TelemetryRecord,
    TrainedOn,
    read_record,
)
from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.sites import link_pairs
from prfaas_trainings.compare import Comparison, compare, labels_of, replayed_slice, versions
from prfaas_trainings.config import TrainingConfig
from prfaas_trainings.envs import make_vec_env
from prfaas_trainings.episodes import EpisodeRunner, Row, default_jobs, warm_up
from prfaas_trainings.folders import check_folder
from prfaas_trainings.progress import ProgressReport
from prfaas_trainings.scalars import PREFIX, ScalarsCallback

#: The file that marks a folder as a training run.
MARKER = "run.json"
CHECKPOINTS = "checkpoints"
#: Why a training ended, when the user wanted so.
BY_CTRL_C = "stopped by Ctrl-C"
#: Label of the policy under training in a validation.
CANDIDATE = "candidate"


def check_out(out: Path, force: bool) -> None:
    """Refuse a run folder that is in use (see `folders.check_folder`)."""
    check_folder(out, MARKER, replace=force)


@dataclass(frozen=True)
class Validated:
    """One checkpoint on the validation seeds.

    `score` is the weighted mean over scenarios of mean TTFT divided by that of the first policy, "no change":
    below 1 is better than earliest finish. A scenario without requests has no mean and counts as 1.
    """

    steps: int
    score: float
    ttft_mean_s: dict[str, float | None]
    folder: Path

    def as_json(self) -> dict[str, Any]:
        """Plain mapping for JSON."""
        return {
            "steps": self.steps,
            "score": self.score,
            "ttft_mean_s": self.ttft_mean_s,
            "checkpoint": f"{CHECKPOINTS}/{self.folder.name}",
        }


@dataclass
class TrainingResult:
    """What a training leaves: `policy` is the best one by validation, `validations` in order of steps."""

    policy: Path
    steps: int
    stopped: str
    best: Validated
    validations: list[Validated] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.stopped == BY_CTRL_C


# ------------------------------------------------------------------------------------------- stopping


class StopSign:
    """Set by the first Ctrl-C; a second one interrupts at once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def is_set(self) -> bool:
        """Whether to stop."""
        return self._event.is_set()

    def set(self) -> None:
        """Ask for the stop."""
        self._event.set()


@contextmanager
def stop_on_ctrl_c(report: ProgressReport) -> Iterator[StopSign]:
    """A stop sign that Ctrl-C sets while the block runs (in the main thread; elsewhere it stays unset)."""
    sign = StopSign()
    if threading.current_thread() is not threading.main_thread():
        yield sign
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        sign.set()
        signal.signal(signal.SIGINT, before)
        report.say("stopping after this step; what was learned is kept (Ctrl-C again stops at once)")

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield sign
    finally:
        signal.signal(signal.SIGINT, before)


# ----------------------------------------------------------------------------------------- the run


class Run:
    """One training in one folder: model, checkpoints, validation, the best policy so far."""

    def __init__(
        self,
        config: TrainingConfig,
        out: Path,
        vec_env: VecEnv,
        runner: EpisodeRunner,
        report: ProgressReport,
    ) -> None:
        self.config = config
        self.out = out
        self.report = report
        self._runner = runner
        self._scenarios = config.load_scenarios(validation=True)
        self._training_scenarios = config.load_scenarios()
        self._labels = scenario_labels(self._scenarios)
        self.codec = config.codec()
        self.schema = scenario_schema(self._scenarios[0])
        self.model: PPO = make_ppo(vec_env, self.codec, config.ppo, config.seed)
        fit_scaling(self.model, config.ppo.scaling_steps)
        self.validations: list[Validated] = []
        self._validated_updates = -1

    @property
    def changed(self) -> bool:
        """Whether the policy was updated since the last validation."""
        return self.model._n_updates != self._validated_updates

    @property
    def best(self) -> Validated:
        """Lowest score; the earliest one among equals."""
        return min(self.validations, key=lambda v: v.score)

    def record(self, steps: int, validation: dict[str, Any]) -> PolicyRecord:
        """What is written beside the weights."""
        config = self.config
        seeds = {"training": config.training_seeds, "validation": config.validation.seeds}
        return PolicyRecord(
            telemetry=TelemetryRecord.of(self.schema),
            links=link_pairs(self._training_scenarios[0].deployment),
            action=CodecRecord(n_pd=self.codec.n_pd, routing=self.codec.routing, form=self.codec.form),
            decision_interval_s=config.decision_interval_s,
            hidden=config.ppo.hidden,
            weights_sha256="",
            steps=steps,
            reward=config.reward,
            trained_on=tuple(
                TrainedOn(name=s.name, hash=s.hash, weight=given.weight, slice=replayed_slice(s))
                for s, given in zip(self._training_scenarios, config.scenarios, strict=True)
            ),
            training_seed=config.seed,
            seed_ranges={name: (r.seeds.start, r.seeds.stop) for name, r in seeds.items()},
            validation=validation,
            versions=versions("torch", "stable-baselines3"),
        )

    def checkpoint(self) -> Validated:
        """Save the present policy, validate it, and keep it as `policy.zip` if it is the best so far."""
        steps = int(self.model.num_timesteps)
        folder = self.out / CHECKPOINTS / f"step_{steps:09d}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        save_policy(self.model, self.record(steps, {}), temporary)
        temporary.rename(folder)
        self._validated_updates = self.model._n_updates
        validated = self._validate(steps, folder)
        self.validations.append(validated)
        if self.best is validated:
            save_policy_copy(folder, self.out, {"chosen": validated.as_json(), **self._validation_facts()})
        write_json(self.out / "validation.json", [v.as_json() for v in self.validations])
        return validated

    def _validation_facts(self) -> dict[str, Any]:
        seeds = self.config.validation.seeds
        return {
            "seeds": [seeds.first, seeds.first + seeds.count],
            "scenarios": dict(zip(self._labels, (s.hash for s in self._scenarios), strict=True)),
            "first_policy_ttft_mean_s": self.validations[0].ttft_mean_s,
        }

    def _validate(self, steps: int, folder: Path) -> Validated:
        found = validate(folder, self._scenarios, self.config, self._runner)
        means = [found.own(s, 0, "ttft_mean_s").mean for s in range(len(self._labels))]
        ttft = {k: None if math.isnan(v) else v for k, v in zip(self._labels, means, strict=True)}
        first = self.validations[0].ttft_mean_s if self.validations else ttft
        weights = [s.weight for s in self.config.scenarios]
        ratios = [
            w * _ratio(ttft[label], first[label]) for w, label in zip(weights, self._labels, strict=True)
        ]
        score = sum(ratios) / sum(weights)
        logger = self.model.logger
        logger.record(f"{PREFIX}_validation/score", score)
        for label, value in ttft.items():
            if value is None:
                continue
            logger.record(f"{PREFIX}_validation/ttft_mean_s_{label}", value)
        return Validated(steps, score, ttft, folder)


def _ratio(value: float | None, first: float | None) -> float:
    """value / first; 1 where there is none (the same arrivals, so neither or both)."""
    return 1.0 if value is None or first is None else value / first


def scenario_labels(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """Labels as a comparison gives them."""
    return labels_of(scenarios)


def validate(
    folder: Path, scenarios: Sequence[Scenario], config: TrainingConfig, runner: EpisodeRunner
) -> Comparison:
    """A saved policy on the validation seeds, by the code of `prfaas compare` (so its figures are equal)."""
    row = Row(CANDIDATE, functools.partial(LearnedPolicy, folder / POLICY_FILE))
    return compare(
        config.at_decision_interval(scenarios),
        [row],
        seeds=config.validation.seeds.seeds,
        split="validation",
        runner=runner,
        engine=config.engine,
    )


def save_policy_copy(source: Path, target: Path, validation: dict[str, Any]) -> None:
    """Copy a checkpoint's policy to `target`, with how it was chosen in its record."""
    record = read_record(source / POLICY_FILE).model_copy(update={"validation": validation})
    temporary = target / f".{POLICY_FILE}.tmp"
    shutil.copyfile(source / POLICY_FILE, temporary)
    temporary.replace(target / POLICY_FILE)
    write_whole(target / RECORD_FILE, record.model_dump_json(indent=2) + "\n")


def write_json(path: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


# ---------------------------------------------------------------------------------------- the schedule


class ScheduleCallback(BaseCallback):
    """Progress, checkpoints by steps, and the end: by steps, by time, or by Ctrl-C."""

    def __init__(self, run: Run, sign: StopSign, start_s: float) -> None:
        super().__init__()
        self._run = run
        self._sign = sign
        self._start_s = start_s
        self._limit_s = math.inf if run.config.minutes is None else run.config.minutes * 60.0
        self._next_checkpoint = run.config.validation.every_steps
        self._rollout_start_s = math.nan
        self._rollout_s = 0.0
        self._end = False
        self.stopped = "all steps done"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _on_rollout_start(self) -> None:
        now_s = time.monotonic()
        if not math.isnan(self._rollout_start_s):
            self._rollout_s = now_s - self._rollout_start_s  # the last rollout with its update
        self._rollout_start_s = now_s
        set_progress(self._run.model, self._done())
        if self.num_timesteps >= self._next_checkpoint:
            self._checkpoint()
            self._rollout_start_s = time.monotonic()
        # A rollout that cannot be finished in time would be thrown away.
        if self._elapsed_s() + self._rollout_s > self._limit_s:
            self._end, self.stopped = True, "time is up"

    def _checkpoint(self) -> None:
        every = self._run.config.validation.every_steps
        self._next_checkpoint = (self.num_timesteps // every + 1) * every
        validated = self._run.checkpoint()
        best = self._run.best
        self._run.report.say(
            f"step {validated.steps:,}: {describe(validated)}{' (best so far)' if best is validated else ''}"
        )

    def _on_step(self) -> bool:
        if self._sign.is_set:
            self._end, self.stopped = True, BY_CTRL_C
        self._report()
        return not self._end

    def _done(self) -> float:
        """Share of the training that is done, 0 to 1."""
        total = self._run.config.total_steps
        by_time = self._elapsed_s() / self._limit_s
        by_steps = self.num_timesteps / total if total is not None else 0.0
        return min(max(by_time, by_steps), 1.0)

    def _report(self) -> None:
        self._run.report.update(round(1000 * self._done()), f"step {self.num_timesteps:,}")


def describe(validated: Validated) -> str:
    """A validation in words."""
    ttft = ", ".join(
        f"{label} {'-' if value is None else f'{value:.2f} s'}"
        for label, value in validated.ttft_mean_s.items()
    )
    return f"validation TTFT mean {ttft}; {validated.score:.3f} of the first policy's"


# ------------------------------------------------------------------------------------------- the call


def _end_workers(vec_env: VecEnv) -> None:
    """End the workers at once; after a failure the usual way would wait for answers that never come."""
    for process in getattr(vec_env, "processes", []):
        process.terminate()
        process.join(timeout=10)


def _dead_worker(vec_env: VecEnv) -> str:
    """Which env worker is gone and how it ended."""
    for k, process in enumerate(getattr(vec_env, "processes", [])):
        process.join(timeout=2)
        if process.exitcode is not None:
            how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            return f"env worker {k} ended with {how}"
    return "an env worker does not answer"


def short_run_warning(config: TrainingConfig, scenarios: Sequence[Scenario]) -> str | None:
    """A line for a run that is too short for one episode, so that some scalars cannot appear."""
    longest = max(
        math.ceil(ns_from_s(s.measure.horizon_s) / ns_from_s(config.decision_interval_s)) for s in scenarios
    )
    if config.total_steps is None or config.total_steps // config.n_envs >= longest:
        return None
    return (
        f"{config.total_steps:,} steps over {config.n_envs} envs end before one episode of {longest:,} steps does: "
        f"rollout/ep_* scalars and episode files may stay empty; {PREFIX}/* scalars show the running episodes"
    )


def train(
    config: TrainingConfig,
    out: Path,
    *,
    runner: EpisodeRunner,
    force: bool = False,
    report: ProgressReport | None = None,
) -> TrainingResult:
    """Train a policy.

    Args:
        config: what, on what, for how long.
        out: run folder: `policy.zip` and `policy.json` (the best), `checkpoints/`, `validation.json`,
            `config.yaml`, `run.json`, `tensorboard/`, `episodes/` (one file per env).
        runner: processes for the validation.
        force: replace an earlier run in `out`.
        report: progress; made here when not given.

    Raises:
        PrfaasError: a folder in use, scenarios that do not fit together, a worker process that died (what was
            learned by the last checkpoint stays in `out`).
    """
    start_s = time.monotonic()
    check_out(out, force)
    scenarios = config.load_scenarios()
    config.load_scenarios(validation=True)
    config.at_decision_interval(scenarios)
    if out.exists():
        shutil.rmtree(out)
    (out / "episodes").mkdir(parents=True)
    own = report or ProgressReport("training", 1000)
    facts: dict[str, Any] = {
        "command": "prfaas train",
        "name": config.name,
        "versions": versions("torch", "stable-baselines3", "tensorboard"),
        "scenarios": [{"name": s.name, "hash": s.hash} for s in scenarios],
        "seeds": {
            "learning": config.seed,
            "training": [
                config.training_seeds.first,
                config.training_seeds.first + config.training_seeds.count,
            ],
            "validation": list(config.validation.seeds.seeds),
        },
        "config": config.model_dump(mode="json"),
    }
    write_json(out / MARKER, {**facts, "status": "running"})
    write_whole(out / "config.yaml", config.yaml())
    warning = short_run_warning(config, scenarios)
    if warning is not None:
        own.say(f"note: {warning}")
    warm_up(scenarios[0], config.engine)
    vec_env = make_vec_env(config, out / "episodes")
    try:
        with stop_on_ctrl_c(own) as sign:
            run = Run(config, out, vec_env, runner, own)
            schedule = _learn(run, sign, start_s, facts)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        message = _dead_worker(vec_env)
        _end_workers(vec_env)
        write_json(out / MARKER, {**facts, "status": message})
        raise PrfaasError(f"{message}; what was learned by the last checkpoint is in {out}") from None
    except BaseException:
        _end_workers(vec_env)
        raise
    finally:
        own.close()
    vec_env.close()
    result = TrainingResult(
        policy=out / POLICY_FILE,
        steps=int(run.model.num_timesteps),
        stopped=schedule.stopped,
        best=run.best,
        validations=run.validations,
    )
    write_json(
        out / MARKER,
        {
            **facts,
            "status": result.stopped,
            "steps": result.steps,
            "elapsed_s": round(time.monotonic() - start_s, 1),
            "best": result.best.as_json(),
        },
    )
    return result


def _learn(run: Run, sign: StopSign, start_s: float, facts: dict[str, Any]) -> ScheduleCallback:
    """Validate the first policy, learn, validate the last one."""
    config, model = run.config, run.model
    model.set_logger(configure(str(run.out / "tensorboard"), ["tensorboard"]))
    for name, text in (
        ("config", config.yaml()),
        ("versions", json.dumps(facts["versions"], indent=2)),
        ("seeds", json.dumps(facts["seeds"], indent=2)),
        ("scenarios", json.dumps(facts["scenarios"], indent=2)),
    ):
        model.logger.record(f"run/{name}", f"```\n{text}\n```")
    first = run.checkpoint()
    run.report.say(f"first policy (no change): {describe(first)}")
    schedule = ScheduleCallback(run, sign, start_s)
    scalars = ScalarsCallback(run.codec, run.schema, config.decision_interval_s)
    if not sign.is_set:
        model.learn(
            total_timesteps=config.total_steps if config.total_steps is not None else 2**62,
            callback=CallbackList([scalars, schedule]),
            reset_num_timesteps=False,
        )
    else:
        schedule.stopped = BY_CTRL_C
    if run.changed:
        last = run.checkpoint()
        run.report.say(f"last policy, step {last.steps:,}: {describe(last)}")
    model.logger.dump(model.num_timesteps)
    model.logger.close()
    return schedule


def default_runner_jobs(config: TrainingConfig) -> int:
    """Processes for the validation of a training."""
    return min(default_jobs(), config.validation.seeds.count * len(config.scenarios))
