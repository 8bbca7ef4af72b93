"""`prfaas train`: a learner on a mix of scenarios, checkpoints, resuming, and the best policy by validation seeds."""

from __future__ import annotations

import copy
import io
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import Image, Logger, TensorBoardOutputFormat
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch.utils.tensorboard import SummaryWriter

from prfaas_agents.algorithms import make_learner
from prfaas_agents.ppo import fit_scaling, set_progress, settle_routing
from prfaas_agents.record import (
    POLICY_FILE,
    RECORD_FILE,
    CodecRecord,
    PolicyRecord,
    TelemetryRecord,
    TrainedOn,
    read_record,
)
from prfaas_agents.routing_fit import routing_fit
from prfaas_agents.settings import RoutingFitSettings, WarmStartSettings
from prfaas_agents.warm_start import warm_start
from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.formulas import ns_from_s
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.sites import link_difference, link_pairs
from prfaas_trainings.checkpoint import (
    CHECKPOINTS,
    CONFIG_FILE,
    Progress,
    newest,
    progress_of,
    read_state,
    remove_unfinished,
    restore,
    step_folder,
    write_checkpoint,
)
from prfaas_trainings.compare import Comparison, labels_of, replayed_slice, run_timelines, versions
from prfaas_trainings.config import Stage, TrainingConfig
from prfaas_trainings.envs import TrainingEnvs
from prfaas_trainings.episodes import EpisodeRunner, default_jobs, warm_up
from prfaas_trainings.evaluating import config_of, evaluate
from prfaas_trainings.folders import check_folder
from prfaas_trainings.progress import ProgressReport
from prfaas_trainings.scalars import PREFIX, ScalarsCallback

#: The file that marks a folder as a training run.
MARKER = "run.json"
#: Why a training ended, when the user wanted so.
BY_CTRL_C = "stopped by Ctrl-C"
ALL_STEPS = "all steps done"
VALIDATIONS = "validation.json"
#: Packages whose versions are recorded.
PACKAGES = ("torch", "stable-baselines3", "sb3-contrib", "tensorboard")


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

    @classmethod
    def of_json(cls, stored: Mapping[str, Any], out: Path) -> Validated:
        """What `as_json` gave, of a run in `out`."""
        return cls(stored["steps"], stored["score"], stored["ttft_mean_s"], out / stored["checkpoint"])


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
    """One training in one folder: learner, checkpoints, validation, the best policy so far.

    Args:
        config: the training.
        out: the run folder.
        envs: its envs.
        runner: processes for the validation.
        report: progress.
        start: checkpoint to go on from, with its state; None starts anew.
    """

    def __init__(
        self,
        config: TrainingConfig,
        out: Path,
        envs: TrainingEnvs,
        runner: EpisodeRunner,
        report: ProgressReport,
        start: Checkpoint | None = None,
    ) -> None:
        self.config = config
        self.out = out
        self.envs = envs
        self.report = report
        self._runner = runner
        self._scenarios = config.load_scenarios(validation=True)
        self._training_scenarios = config.load_scenarios()
        self._labels = labels_of(self._scenarios)
        self.codec = config.codec()
        self.schema = scenario_schema(self._scenarios[0])
        self.validations: list[Validated] = [] if start is None else start.validations
        self._before_s = 0.0 if start is None else start.progress.elapsed_s
        self._start_s = time.monotonic()
        self._leg = 0 if start is None else start.progress.leg + 1
        self._network = config.network()
        self.model: BaseAlgorithm = make_learner(
            envs.vec_env, self.codec, config.settings, config.seed, self._network
        )
        if start is None:
            fit_scaling(self.model, config.settings.scaling_steps)
            if config.stages()[0].choices == "moves":
                settle_routing(self.model, self.codec)
            self._saved_updates = -1
        else:
            if start.progress.stage == envs.stage.index:
                envs.set_draw_states(start.progress.draws)
            else:
                envs.seed_stage()
            restore(self.model, start.folder, start.state)
            self._saved_updates = self.model._n_updates
        # Last, so that a checkpoint that cannot be restored leaves the curves as they are.
        board = _Board(out / "tensorboard", None if start is None else start.progress.steps + 1)
        self.model.set_logger(Logger(str(out), [board]))
        #: For what is written at a moment of our own, whatever the learner has recorded and not written yet.
        self.notes = Logger(str(out), [board])

    @property
    def elapsed_s(self) -> float:
        """Time used, that of earlier legs included."""
        return self._before_s + time.monotonic() - self._start_s

    @property
    def changed(self) -> bool:
        """Whether the policy was updated since the last checkpoint."""
        return bool(self.model._n_updates != self._saved_updates)

    @property
    def best(self) -> Validated:
        """Lowest score; the earliest one among equals."""
        return min(self.validations, key=lambda v: v.score)

    def record(self, steps: int, validation: dict[str, Any]) -> PolicyRecord:
        """What is written beside the weights."""
        config = self.config
        seeds = {"training": config.training_seeds, "validation": config.validation.seeds}
        return PolicyRecord(
            algorithm=config.algorithm,
            telemetry=TelemetryRecord.of(self.schema),
            links=link_pairs(self._training_scenarios[0].deployment),
            action=CodecRecord.of(self.codec),
            decision_interval_s=config.decision_interval_s,
            hidden=config.settings.hidden,
            activation=config.settings.activation,
            network=self._network,
            weights_sha256="",
            steps=steps,
            reward=config.reward,
            trained_on=trained_on(config),
            training_seed=config.seed,
            seed_ranges={name: (r.seeds.start, r.seeds.stop) for name, r in seeds.items()},
            validation=validation,
            versions=versions(*PACKAGES),
        )

    def checkpoint(self, *, routing_fitted: bool = False) -> Validated:
        """Save everything, validate the policy, and keep it as `policy.zip` if it is the best so far."""
        steps = int(self.model.num_timesteps)
        progress = Progress(
            steps=steps,
            elapsed_s=self.elapsed_s,
            leg=self._leg,
            draws=self.envs.draw_states(),
            stage=self.envs.stage.index,
            routing_fitted=routing_fitted,
        )
        folder = write_checkpoint(self.model, self.record(steps, {}), self.config.yaml(), progress, self.out)
        self._saved_updates = self.model._n_updates
        return self.validate(folder)

    def validate(self, folder: Path) -> Validated:
        """Validate the checkpoint that is the learner's present state."""
        validated = self._validated(folder)
        self.validations.append(validated)
        write_json(self.out / VALIDATIONS, [v.as_json() for v in self.validations])
        self.keep_best()
        self.notes.dump(validated.steps)
        return validated

    def keep_best(self) -> None:
        """Make the best policy so far the run's own, unless it is so already."""
        best = self.best
        kept = self.out / POLICY_FILE
        if kept.is_file() and (self.out / RECORD_FILE).is_file():
            try:
                if read_record(kept).steps == best.steps:
                    return
            except PrfaasError:
                pass  # a run that was killed between the two files
        save_policy_copy(best.folder, self.out, {"chosen": best.as_json(), **self._validation_facts()})

    def _validation_facts(self) -> dict[str, Any]:
        seeds = self.config.validation.seeds
        return {
            "seeds": [seeds.first, seeds.first + seeds.count],
            "scenarios": dict(zip(self._labels, (s.hash for s in self._scenarios), strict=True)),
            "first_policy_ttft_mean_s": self.validations[0].ttft_mean_s,
        }

    def _validated(self, folder: Path) -> Validated:
        seeds = self.config.validation.seeds.seeds
        found = evaluate(folder, self.config, seeds=seeds, split="validation", runner=self._runner)
        means = [found.own(s, 0, "ttft_mean_s").mean for s in range(len(self._labels))]
        ttft = {k: None if math.isnan(v) else v for k, v in zip(self._labels, means, strict=True)}
        first = self.validations[0].ttft_mean_s if self.validations else ttft
        weights = [s.weight for s in self.config.scenarios]
        ratios = [
            w * _ratio(ttft[label], first[label]) for w, label in zip(weights, self._labels, strict=True)
        ]
        score = sum(ratios) / sum(weights)
        logger = self.notes
        logger.record(f"{PREFIX}_validation/score", score)
        for label, value in ttft.items():
            if value is None:
                continue
            logger.record(f"{PREFIX}_validation/ttft_mean_s_{label}", value)
        if self.config.validation.timeline:
            logger.record(f"{PREFIX}_validation/timeline", timeline_picture(found, self._runner))
        return Validated(int(self.model.num_timesteps), score, ttft, folder)

    # ------------------------------------------------------------------ learning

    def warm_start(self, settings: WarmStartSettings, sign: StopSign) -> None:
        """Fit the first policy to roll-outs, and save and validate it. Stopped half-way it is what it was."""
        config, model = self.config, self.model
        before = copy.deepcopy(model.policy.state_dict())
        self.report.say(
            f"warm start: {settings.rounds} x {settings.states:,} states with roll-outs of {settings.horizon_s:g} s"
        )

        def tell(k: int, states: int, loss: float | None) -> bool:
            if loss is not None:
                self.report.say(f"warm start: round {k + 1}, {states:,} states, loss {loss:.4f}")
                self.notes.record(f"{PREFIX}_warm_start/loss", loss)
                self.notes.record(f"{PREFIX}_warm_start/states", states)
                self.notes.dump(states)
            return sign.is_set

        states = warm_start(
            model.policy,
            self.codec,
            self._weighted(config.stages()[0]),
            config.training_seeds.seeds,
            settings,
            config.seed,
            tell,
        )
        if sign.is_set:
            model.policy.load_state_dict(before)
            return
        model.num_timesteps = states
        self.report.say(f"warm start: {describe(self.checkpoint())}")

    def routing_fit(self, settings: RoutingFitSettings, sign: StopSign) -> bool:
        """Fit the routing to roll-outs, and save and validate the policy.

        Returns:
            Whether it was done; stopped half-way the policy is what it was.
        """
        config, model = self.config, self.model
        self.report.say(
            f"routing: {settings.states:,} states with roll-outs of {settings.horizon_s:g} s of "
            f"{len(self.codec.grid)} margins"
        )
        states, losses = routing_fit(
            model.policy,
            self.codec,
            self._weighted(config.stages()[-1]),
            config.training_seeds.seeds,
            settings,
            config.seed,
            lambda _: sign.is_set,
        )
        if losses is None:
            return False
        model.num_timesteps += states
        self.report.say(f"routing: {states:,} states, loss {losses[0]:.4f}, of the moves {losses[1]:.4f}")
        self.notes.record(f"{PREFIX}_routing_fit/loss", losses[0])
        self.notes.record(f"{PREFIX}_routing_fit/loss_moves", losses[1])
        self.notes.dump(model.num_timesteps)
        self.report.say(f"routing: {describe(self.checkpoint(routing_fitted=True))}")
        return True

    def _weighted(self, stage: Stage) -> list[tuple[Scenario, float]]:
        """Scenarios of a stage at the decision interval, with their weights."""
        scenarios = self.config.at_decision_interval(self.config.stage_scenarios(stage))
        return [(s, given.weight) for s, given in zip(scenarios, stage.scenarios, strict=True)]

    def write_update(self) -> None:
        """Write what an on-policy update has recorded, at the step of the update; others write by steps."""
        if not isinstance(self.model, OffPolicyAlgorithm):
            self.model.logger.dump(self.model.num_timesteps)

    def learn(self, schedule: ScheduleCallback) -> None:
        """All stages that are not done, until the schedule ends them."""
        config, model = self.config, self.model
        scalars = ScalarsCallback(
            self.codec, self.schema, config.decision_interval_s, config.settings.log_steps
        )
        # Off-policy learners would log once per few episodes; the scalars do so by steps (see ScalarsCallback).
        off_policy = {"log_interval": 2**62} if isinstance(model, OffPolicyAlgorithm) else {}
        for stage in config.stages():
            end = 2**62 if stage.end is None else stage.end
            if model.num_timesteps >= end:
                continue
            if stage.index != self.envs.stage.index:
                self.report.say(f"step {model.num_timesteps:,}: stage {stage.index + 1} begins")
                model.set_env(self.envs.enter(stage))
            model.learn(
                total_timesteps=end - model.num_timesteps,
                callback=CallbackList([scalars, schedule]),
                reset_num_timesteps=False,
                **off_policy,
            )
            if schedule.ended:
                return


def trained_on(config: TrainingConfig) -> tuple[TrainedOn, ...]:
    """Every scenario of the training, those of a curriculum too; weights are those within its stage."""
    return tuple(
        TrainedOn(name=s.name, hash=s.hash, weight=given.weight, slice=replayed_slice(s))
        for stage in reversed(config.stages())
        for s, given in zip(config.stage_scenarios(stage), stage.scenarios, strict=True)
    )


def _ratio(value: float | None, first: float | None) -> float:
    """value / first; 1 where there is none (the same arrivals, so neither or both)."""
    return 1.0 if value is None or first is None else value / first


def timeline_picture(found: Comparison, runner: EpisodeRunner) -> Image:
    """What the policy does over the first episode of an evaluation, on the first scenario."""
    from prfaas_trainings.plots import draw_timeline, pyplot

    first = Comparison(**{**vars(found), "scenarios": found.scenarios[:1], "labels": found.labels[:1]})
    lines = run_timelines(first, [0], runner)[0, 0]
    png = io.BytesIO()
    draw_timeline(first, 0, {0: lines}, png)
    png.seek(0)
    return Image(pyplot().imread(png), "HWC")


class _Board(TensorBoardOutputFormat):
    """TensorBoard's format; what a killed run had written from step `purge_step` on no longer counts."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)
        self._is_closed = False


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

    def __init__(self, run: Run, sign: StopSign) -> None:
        super().__init__()
        self._run = run
        self._sign = sign
        self._limit_s = math.inf if run.config.minutes is None else run.config.minutes * 60.0
        every = run.config.validation.every_steps
        self._next_checkpoint = (run.model.num_timesteps // every + 1) * every
        self._rollout_start_s = math.nan
        self._rollout_s = 0.0
        self.ended = False
        self.stopped = ALL_STEPS
        run.report.begin(1000 * self._done(run.model.num_timesteps))

    def end(self, why: str) -> None:
        """End the training after this step."""
        self.ended, self.stopped = True, why

    def _on_rollout_start(self) -> None:
        now_s = time.monotonic()
        if not math.isnan(self._rollout_start_s):
            self._rollout_s = now_s - self._rollout_start_s  # the last rollout with its update
        self._rollout_start_s = now_s
        set_progress(self._run.model, self._done(self.num_timesteps))
        self._run.write_update()
        if self.num_timesteps >= self._next_checkpoint:
            self._checkpoint()
            self._rollout_start_s = time.monotonic()
        # A rollout that cannot be finished in time would be thrown away.
        if self._run.elapsed_s + self._rollout_s > self._limit_s:
            self.end("time is up")

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
            self.end(BY_CTRL_C)
        self._report()
        return not self.ended

    def _done(self, steps: int) -> float:
        """Share of the training that is done after these steps, 0 to 1."""
        total = self._run.config.total_steps
        by_time = self._run.elapsed_s / self._limit_s
        by_steps = steps / total if total is not None else 0.0
        return min(max(by_time, by_steps), 1.0)

    def _report(self) -> None:
        self._run.report.update(round(1000 * self._done(self.num_timesteps)), f"step {self.num_timesteps:,}")


def describe(validated: Validated) -> str:
    """A validation in words."""
    ttft = ", ".join(
        f"{label} {'-' if value is None else f'{value:.2f} s'}"
        for label, value in validated.ttft_mean_s.items()
    )
    return f"validation TTFT mean {ttft}; {validated.score:.3f} of the first policy's"


# ------------------------------------------------------------------------------------------- the call


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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to go on from."""

    folder: Path
    state: dict[str, Any]
    progress: Progress
    validations: list[Validated]


def train(
    config: TrainingConfig,
    out: Path,
    *,
    runner: EpisodeRunner,
    force: bool = False,
    report: ProgressReport | None = None,
) -> TrainingResult:
    """Train a policy with one seed (`several.train_all` takes a configuration with several).

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
    check_out(out, force)
    _check_scenarios(config)
    if out.exists():
        shutil.rmtree(out)
    (out / "episodes").mkdir(parents=True)
    write_whole(out / CONFIG_FILE, config.yaml())
    return _go(config, out, runner, report or ProgressReport("training", 1000), None)


def resume(
    out: Path,
    *,
    runner: EpisodeRunner,
    trust: bool = False,
    total_steps: int | None = None,
    minutes: float | None = None,
    report: ProgressReport | None = None,
) -> TrainingResult:
    """Go on with a run from its newest checkpoint, in the same folder and on the same axis of steps.

    Running episodes are not stored: every env starts a new one, drawn where the last one left off.

    Args:
        out: the run folder.
        runner: processes for the validation.
        trust: take a checkpoint that this user did not write.
        total_steps: another end than the configuration's, in steps from the start of the run.
        minutes: another limit of time, earlier legs included.
        report: progress; made here when not given.

    Raises:
        PrfaasError: no checkpoint, one that is foreign or broken, other observations than those it was trained on
            (the fields are named), nothing left to do; and as `train`.
    """
    if not (out / MARKER).is_file():
        raise PrfaasError(f"--resume {out}: holds no {MARKER}; give the folder of a training run")
    remove_unfinished(out)
    folder = newest(out, trust)
    state = read_state(folder)
    limits = {k: v for k, v in (("total_steps", total_steps), ("minutes", minutes)) if v is not None}
    config = TrainingConfig.model_validate({**config_of(folder).model_dump(), **limits})
    own = report or ProgressReport("training", 1000)
    _check_scenarios(config)
    _check_record(read_record(folder / POLICY_FILE), config, folder, own)
    progress = progress_of(state)
    fit_is_left = config.routing_fit is not None and not progress.routing_fitted
    if config.total_steps is not None and progress.steps >= config.total_steps and not fit_is_left:
        raise PrfaasError(
            f"--resume {out}: all {config.total_steps:,} steps are done; give more with --steps, counted from the start"
        )
    if config.minutes is not None and progress.elapsed_s >= config.minutes * 60 and not fit_is_left:
        raise PrfaasError(
            f"--resume {out}: its {config.minutes:g} minutes are used up; give more with --minutes, counted from the "
            "start"
        )
    write_whole(out / CONFIG_FILE, config.yaml())
    validations = _validations(out, progress.steps)
    return _go(config, out, runner, own, Checkpoint(folder, state, progress, validations))


def _check_scenarios(config: TrainingConfig) -> None:
    for stage in config.stages():
        config.at_decision_interval(config.stage_scenarios(stage))
    config.load_scenarios(validation=True)


def _check_record(record: PolicyRecord, config: TrainingConfig, folder: Path, report: ProgressReport) -> None:
    """Refuse a checkpoint of other observations; say what else is different from then."""
    scenario = config.load_scenarios()[0]
    pairs = link_pairs(scenario.deployment)
    for what, difference in (
        ("telemetry", scenario_schema(scenario).difference(record.telemetry.as_schema())),
        ("links", link_difference(pairs, pairs if record.links is None else record.links)),
    ):
        if difference:
            raise PrfaasError(
                f"{folder}: trained on other {what} than its scenarios have with this version: {difference}"
            )
    now = versions(*PACKAGES)
    other = [
        f"{name} {was} (now {now.get(name)})" for name, was in record.versions.items() if now.get(name) != was
    ]
    if other:
        report.say(f"note: the checkpoint was written with {', '.join(other)}")
    for was, is_now in zip(record.trained_on, trained_on(config), strict=False):
        if was.hash != is_now.hash:
            report.say(
                f"note: scenario {was.name} is not as it was: its hash was {was.hash}, now {is_now.hash}"
            )


def _validations(out: Path, steps: int) -> list[Validated]:
    """What was validated up to a step."""
    path = out / VALIDATIONS
    if not path.is_file() and steps == 0:
        return []  # killed before the first one
    try:
        stored = [Validated.of_json(entry, out) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PrfaasError(f"{path}: is not a list of validations: {error}") from None
    return [v for v in stored if v.steps <= steps and v.folder.is_dir()]


def _facts(config: TrainingConfig, start: Checkpoint | None) -> dict[str, Any]:
    training = config.training_seeds
    return {
        "command": "prfaas train",
        "name": config.name,
        "algorithm": config.algorithm,
        "versions": versions(*PACKAGES),
        "scenarios": [{"name": s.name, "hash": s.hash} for s in config.load_scenarios()],
        "seeds": {
            "learning": config.seed,
            "training": [training.first, training.first + training.count],
            "validation": list(config.validation.seeds.seeds),
        },
        "resumed_at": None if start is None else start.progress.steps,
        "config": config.model_dump(mode="json"),
    }


def _go(
    config: TrainingConfig, out: Path, runner: EpisodeRunner, report: ProgressReport, start: Checkpoint | None
) -> TrainingResult:
    """The one loop of a training, from the start or from a checkpoint."""
    facts = _facts(config, start)
    write_json(out / MARKER, {**facts, "status": "running"})
    warning = short_run_warning(config, config.load_scenarios())
    if warning is not None:
        report.say(f"note: {warning}")
    warm_up(config.load_scenarios()[0], config.engine)
    again = f"go on with: prfaas train --resume {out}"
    envs = None
    try:
        with stop_on_ctrl_c(report) as sign:
            leg, steps = (0, 0) if start is None else (start.progress.leg + 1, start.progress.steps)
            envs = TrainingEnvs(config, out / "episodes", leg, steps)
            run = Run(config, out, envs, runner, report, start)
            schedule = _learn(run, sign, facts)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        message = "an env worker ended while it started" if envs is None else envs.dead_worker()
        if envs is not None:
            envs.end()
        write_json(out / MARKER, {**facts, "status": message})
        raise PrfaasError(
            f"{message}; what was learned by the last checkpoint is in {out}; {again}"
        ) from None
    except BaseException:
        if envs is not None:
            envs.end()
        raise
    finally:
        report.close()
    envs.vec_env.close()
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
            "elapsed_s": round(run.elapsed_s, 1),
            "best": result.best.as_json(),
        },
    )
    return result


def _learn(run: Run, sign: StopSign, facts: dict[str, Any]) -> ScheduleCallback:
    """Validate the first policy, learn, save and validate the last one."""
    config, model = run.config, run.model
    for name, text in (
        ("config", config.yaml()),
        ("versions", json.dumps(facts["versions"], indent=2)),
        ("seeds", json.dumps(facts["seeds"], indent=2)),
        ("scenarios", json.dumps(facts["scenarios"], indent=2)),
    ):
        run.notes.record(f"run/{name}", f"```\n{text}\n```")
    run.notes.dump(model.num_timesteps)
    if model.num_timesteps == 0 and not run.validations and not step_folder(run.out, 0).is_dir():
        run.report.say(f"first policy (no change): {describe(run.checkpoint())}")
    elif not any(v.steps == model.num_timesteps for v in run.validations):
        # killed between the checkpoint and its validation
        run.report.say(
            f"step {model.num_timesteps:,}: {describe(run.validate(step_folder(run.out, model.num_timesteps)))}"
        )
    else:
        run.report.say(f"going on at step {model.num_timesteps:,}")
        run.keep_best()
    if config.warm_start is not None and model.num_timesteps == 0 and not sign.is_set:
        run.warm_start(config.warm_start, sign)
    schedule = ScheduleCallback(run, sign)
    if sign.is_set:
        schedule.end(BY_CTRL_C)
    else:
        run.learn(schedule)
    run.write_update()
    if run.changed:
        last = run.checkpoint()
        run.report.say(f"last policy, step {last.steps:,}: {describe(last)}")
    if config.routing_fit is not None and (sign.is_set or not run.routing_fit(config.routing_fit, sign)):
        schedule.end(BY_CTRL_C)
    model.logger.close()
    return schedule


def default_runner_jobs(config: TrainingConfig) -> int:
    """Processes for the validation of a training."""
    return min(default_jobs(), config.validation.seeds.count * len(config.scenarios))
