"""`prfaas demo`: replay a real trace, learn for a few minutes, compare on seeds and trace seconds not seen before."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.record import POLICY_FILE, RECORD_FILE
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_trainings import results, tables
from prfaas_trainings.compare import (
    DEFAULT_POLICIES,
    Comparison,
    compare,
    rows_of,
    run_timelines,
    timeline_rows,
)
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.episodes import EpisodeRunner, Row, episode_runner
from prfaas_trainings.folders import check_folder, replace_folder
from prfaas_trainings.progress import progress_bar
from prfaas_trainings.seeds import SPLITS
from prfaas_trainings.training import TrainingResult, describe, train, write_json

#: The file that marks a folder as a demonstration.
MARKER = "demo.json"
#: The paper's threshold for its case study (table 6).
PAPER_POLICY = "static:threshold_tokens=19400"
#: Label of the agent in the tables.
AGENT = "ppo"
#: The trace is learned from up to here and compared on from here, in seconds of the trace.
TRACE_CUT_S = 1200
#: The policy that ships trained. It has learned on the trace too, up to 960 s.
SHIPPED = "learned"


@dataclass(frozen=True)
class DemoPlan:
    """How much of everything the demonstration does."""

    replay_s: float
    training: str
    overrides: tuple[str, ...]
    scenarios: tuple[tuple[str, tuple[str, ...]], ...]
    """Scenarios to compare on: name and overrides."""
    seeds: int

    def held_out(self) -> tuple[Scenario, ...]:
        """The scenarios to compare on."""
        return tuple(load_scenario(name, overrides=overrides) for name, overrides in self.scenarios)


def demo_plan(minutes: float, quick: bool) -> DemoPlan:
    """The demonstration of `minutes` of learning, or one of seconds that only shows that everything runs."""
    rest = f"workload.start_s={TRACE_CUT_S}"
    if quick:
        return DemoPlan(
            replay_s=60.0,
            training="demo",
            overrides=(
                "minutes=null",
                "total_steps=64",
                "n_envs=2",
                "vectorization=none",
                "engine=simpy",
                "scenarios.0.overrides=[measure.horizon_s=120]",
                "scenarios.1.overrides=[workload.end_s=120, measure.horizon_s=120]",
                "validation={seeds: {first: 1000000, count: 1}, every_steps: 32}",
                "ppo={n_steps: 16, batch_size: 16, n_epochs: 2, scaling_steps: 8}",
            ),
            scenarios=(
                ("drift", ("measure.horizon_s=60",)),
                ("mooncake", (rest, "measure.horizon_s=60")),
            ),
            seeds=2,
        )
    return DemoPlan(
        replay_s=1920.0,
        training="demo",
        overrides=(f"minutes={minutes!r}",),
        scenarios=(("drift", ()), ("mooncake", (rest, f"measure.horizon_s={1920 - TRACE_CUT_S}"))),
        seeds=20,
    )


class Stages:
    """The stages with the seconds that each took."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, title: str) -> Iterator[None]:
        """Announce a stage and time it."""
        number = len(self.seconds) + 1
        self._console.print(f"\n[bold]{number}. {title}[/bold]", highlight=False)
        start_s = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start_s, 1)


def run_demo(out: Path, plan: DemoPlan, jobs: int, console: Console) -> None:
    """Run the demonstration and put its results in `out`, in the place of an earlier demonstration.

    While it runs everything is in a folder beside `out`, which stays if the demonstration is stopped.

    Raises:
        PrfaasError: `out` holds something else than a demonstration.
    """
    check_folder(out, MARKER, replace=True)
    partial = out.with_name(f"{out.name}.partial")
    check_folder(partial, MARKER, replace=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    write_json(partial / MARKER, {"command": "prfaas demo", "status": "unfinished"})
    config = load_config(plan.training, plan.overrides)
    stages = Stages(console)
    try:
        _run_stages(partial, plan, config, jobs, console, stages)
    except KeyboardInterrupt:
        console.print(f"stopped; what there is so far is in {partial}", markup=False, highlight=False)
        raise
    write_json(
        partial / MARKER,
        {
            "command": "prfaas demo",
            "status": "complete",
            "seconds": stages.seconds,
            "training": config.name,
            "seeds": plan.seeds,
        },
    )
    replace_folder(partial, out, MARKER)
    took_s = sum(stages.seconds.values())
    parts = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in stages.seconds.items())
    for line in (
        f"\nDone in {took_s:,.0f} s ({parts}).",
        f"tables and plots: {out}   curves: tensorboard --logdir {out / 'training' / 'tensorboard'}",
        f"one page with all of it: prfaas report {out}",
        f"the policy: prfaas simulate --scenario drift --policy ppo:path={out / POLICY_FILE}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run_stages(
    folder: Path, plan: DemoPlan, config: TrainingConfig, jobs: int, console: Console, stages: Stages
) -> None:
    with stages.stage("replay", "A real trace through the paper's deployment, with the paper's threshold"):
        _replay(plan, config.engine, console)
    with episode_runner(jobs) as runner:
        with stages.stage("training", "An agent that starts as earliest finish and learns"):
            result = train(config, folder / "training", runner=runner)
            _say_training(result, console)
            if result.interrupted:
                raise KeyboardInterrupt
        for name in (POLICY_FILE, RECORD_FILE):
            shutil.copyfile(folder / "training" / name, folder / name)
        with stages.stage("comparison", "Everyone on seeds and trace seconds that nobody has seen"):
            comparison = compare_all(folder / POLICY_FILE, plan, config.engine, runner)
            picked = timeline_rows(comparison, ())
            timelines = run_timelines(comparison, picked, runner)
            results.write_files(comparison, timelines, folder)
    console.print()
    tables.show(comparison, console)


def _replay(plan: DemoPlan, engine: str, console: Console) -> None:
    scenario = load_scenario("mooncake", overrides=[f"measure.horizon_s={plan.replay_s!r}"])
    episode = simulate(scenario, make_policy(PAPER_POLICY), seed=SPLITS["test"].start, engine=engine)
    m = episode.metrics
    ttft, egress = m["ttft_s"], m["egress"]
    for line in (
        f"{scenario.description} Policy {PAPER_POLICY}, {m['window_s']:,.0f} s.",
        *(f"note: {note}" for note in m["notes"]),
        f"{m['requests']['arrived']:,} requests, {m['offload_share']:.1%} remote, "
        f"{m['throughput_rps']:.2f} done per second, egress mean {egress['mean_bps'] / 1e9:.2f} Gbps",
        f"time to first token: mean {ttft['mean']:.2f} s, P50 {ttft['p50']:.2f} s, P90 {ttft['p90']:.2f} s, "
        f"P99 {ttft['p99']:.2f} s",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _say_training(result: TrainingResult, console: Console) -> None:
    console.print(
        f"{result.stopped} at step {result.steps:,}; kept the policy of step {result.best.steps:,}: "
        f"{describe(result.best)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def demo_rows(policy: Path) -> Sequence[Row]:
    """Every rule, the other two deployments, the agent, and the policy that ships trained."""
    return [
        *rows_of(DEFAULT_POLICIES, deployments=False),
        Row(AGENT, functools.partial(LearnedPolicy, policy)),
        *rows_of([SHIPPED], deployments=False),
    ]


def compare_all(policy: Path, plan: DemoPlan, engine: str, runner: EpisodeRunner) -> Comparison:
    """Compare on test seeds; differences are to earliest finish, which is where the agent started."""
    rows, scenarios = demo_rows(policy), plan.held_out()
    seeds = SPLITS["test"][: plan.seeds]
    with progress_bar("episodes", len(rows) * len(scenarios) * len(seeds)) as advance:
        return compare(
            scenarios,
            rows,
            seeds=seeds,
            split="test",
            runner=runner,
            reference="earliest_finish",
            engine=engine,
            on_done=advance,
        )
