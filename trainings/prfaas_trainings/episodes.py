"""Episodes of many policies on the same seeds, in worker processes: what `compare` and validation both run."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.policy import Policy, PolicyContext, make_policy
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.simulator.engine import DEFAULT_ENGINE, make_engine
from prfaas_env.simulator.formulas import NS_PER_S
from prfaas_env.simulator.metrics import cohort
from prfaas_env.simulator.run import Episode, simulate
from prfaas_env.simulator.world import World, draw_world
from prfaas_env.telemetry import Telemetry
from prfaas_env.workload.models import TraceWorkload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
#: A policy by its spec, or made by a call that pickles (a learned policy from a path that a spec cannot hold).
PolicySource = str | Callable[[], Policy]

#: Edges of the TTFT histogram in seconds; the plotted distribution is exact at them.
TTFT_EDGES_S: FloatArray = np.concatenate(([0.0], np.geomspace(0.01, 1e5, 701), [math.inf]))
#: Edges of the histogram of decision times in seconds: 100 bins to a decade.
DECISION_EDGES_S: FloatArray = np.concatenate(([0.0], np.geomspace(1e-7, 100.0, 901), [math.inf]))


@dataclass(frozen=True)
class Figure:
    """One figure of an episode: its name with the unit, where `metrics` holds it, and how a table shows it."""

    name: str
    path: tuple[str, ...]
    title: str
    digits: int
    factor: float = 1.0
    """Table value = figure x factor."""


FIGURES: tuple[Figure, ...] = (
    Figure("ttft_mean_s", ("ttft_s", "mean"), "TTFT\nmean s", 2),
    Figure("ttft_p50_s", ("ttft_s", "p50"), "P50\ns", 2),
    Figure("ttft_p90_s", ("ttft_s", "p90"), "P90\ns", 2),
    Figure("ttft_p99_s", ("ttft_s", "p99"), "P99\ns", 2),
    Figure("tpot_mean_s", ("tpot_s", "mean"), "TPOT\nmean ms", 1, 1e3),
    Figure("goodput_rps", ("goodput_rps",), "good\nreq/s", 3),
    Figure("throughput_rps", ("throughput_rps",), "done\nreq/s", 3),
    Figure("egress_mean_bps", ("egress", "mean_bps"), "egress\nGbps", 2, 1e-9),
    Figure("offload_share", ("offload_share",), "remote\n%", 1, 100.0),
    Figure("conversions", ("conversions",), "conver-\nsions", 1),
    Figure("invalid_moves", ("invalid_moves",), "invalid\nmoves", 1),
    Figure("rejected", ("requests", "rejected"), "rejec-\nted", 1),
    Figure("open_at_end", ("requests", "open"), "open\nat end", 1),
    Figure("arrived", ("requests", "arrived"), "arrived", 0),
    Figure("aborted", ("requests", "aborted"), "abor-\nted", 1),
    Figure("link_use", ("utilisation", "link"), "link\nuse %", 1, 100.0),
    Figure("queue_wait_s", ("queue_wait_s",), "queue\ns", 3),
    Figure("prefill_s", ("prefill_s",), "prefill\ns", 3),
    Figure("transfer_s", ("transfer_s",), "trans-\nfer s", 3),
    Figure("decode_wait_s", ("decode_wait_s",), "decode\nwait s", 3),
    Figure("first_step_s", ("first_step_s",), "first\nstep s", 3),
)
#: The stages of TTFT in order; over requests that got a first token their means add up to its mean.
STAGES = ("queue_wait_s", "prefill_s", "transfer_s", "decode_wait_s", "first_step_s")
FIGURE_NAMES = tuple(f.name for f in FIGURES)


def figures_of(metrics: dict[str, Any]) -> dict[str, float | None]:
    """The figures of an episode by name; None where one does not exist."""
    out: dict[str, float | None] = {}
    for figure in FIGURES:
        value: Any = metrics
        for key in figure.path:
            value = value[key]
        out[figure.name] = None if value is None else float(value)
    return out


# ------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class Row:
    """One row of a comparison: a policy, on the scenario's own hardware or on another deployment."""

    label: str
    policy: PolicySource
    deployment: str | None = None

    def scenario(self, scenario: Scenario) -> Scenario:
        """The scenario with this row's deployment."""
        if self.deployment is None:
            return scenario
        return load_scenario(scenario, deployment=self.deployment)

    def make(self) -> Policy:
        """A fresh policy."""
        return make_policy(self.policy) if isinstance(self.policy, str) else self.policy()

    @property
    def spec(self) -> str:
        """The policy's spec (the label where it was made by a call)."""
        return self.policy if isinstance(self.policy, str) else self.label


def parse_row(text: str) -> Row:
    """`[LABEL=]POLICY[@DEPLOYMENT]`; the deployment is a scenario's name or the path of a YAML file.

    A label ends at an equals sign before the first colon; without one the text itself is the label.
    """
    label, spec = text, text
    before, separator, after = text.partition("=")
    if separator and ":" not in before:
        label, spec = before.strip(), after
    policy, separator, deployment = spec.rpartition("@")
    is_path_part = "/" in deployment and not deployment.endswith((".yaml", ".yml"))
    if not separator or is_path_part:
        policy, deployment = spec, ""
    elif deployment not in scenario_names() and not Path(deployment).is_file():
        raise PrfaasError(
            f"--policy {text!r}: unknown deployment {deployment!r}; shipped: {', '.join(scenario_names())}; "
            "or a path to a .yaml file"
        )
    if not label or not policy:
        raise PrfaasError(f"--policy {text!r}: write it as [LABEL=]POLICY[@DEPLOYMENT]")
    return Row(label, policy, deployment or None)


def is_learned(policy: Policy) -> bool:
    """Whether a policy was learned (and may lose to a rule, which the result then says)."""
    return bool(getattr(policy, "learned", False))


# -------------------------------------------------------------------------------------------- episodes


@dataclass(frozen=True)
class Job:
    """One episode to run.

    `per_request` keeps the TTFT of every request, `timeline` a row per decision, `timed` how long decisions took.
    """

    scenario: Scenario
    row: Row
    seed: int
    engine: str = DEFAULT_ENGINE
    per_request: bool = False
    timeline: bool = False
    timed: bool = False


class TimedPolicy:
    """A policy with the wall time of each of its decisions, in ns; everything else is the policy's own."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.constant = policy.constant
        self.decision_ns: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def reset(self, context: PolicyContext) -> None:
        """Start an episode."""
        self._policy.reset(context)

    def decide(self, telemetry: Telemetry) -> Decision:
        """Decision of the policy."""
        start_ns = time.perf_counter_ns()
        decision = self._policy.decide(telemetry)
        self.decision_ns.append(time.perf_counter_ns() - start_ns)
        return decision


@dataclass(frozen=True)
class Outcome:
    """What is kept of one episode.

    `ttft_counts` has shape (len(TTFT_EDGES_S) - 1,), the accepted requests of the cohort by TTFT. With
    `per_request`, `arrival_s` and `ttft_s` have shape (requests of the world,); NaN marks a request that was
    rejected or lies outside the cohort. Arrival counts from the start of the episode. With `timed`,
    `decision_counts` has shape (len(DECISION_EDGES_S) - 1,), the decisions by their wall time.
    """

    figures: dict[str, float | None]
    arrivals_hash: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    ttft_counts: IntArray
    arrival_s: FloatArray | None
    ttft_s: FloatArray | None
    timeline: dict[str, FloatArray] | None
    decision_counts: IntArray | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything as a mapping for JSON: every number finite or null; `of_json` gives the same outcome back."""
        filled = np.flatnonzero(self.ttft_counts)
        timed: dict[str, Any] = {}
        if self.decision_counts is not None:
            bins = np.flatnonzero(self.decision_counts)
            timed = {"decision_bins": bins.tolist(), "decision_counts": self.decision_counts[bins].tolist()}
        return {
            **timed,
            "figures": self.figures,
            "arrivals_hash": self.arrivals_hash,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "ttft_bins": filled.tolist(),
            "ttft_counts": self.ttft_counts[filled].tolist(),
            "arrival_s": None if self.arrival_s is None else nulls(self.arrival_s),
            "ttft_s": None if self.ttft_s is None else nulls(self.ttft_s),
            "timeline": None if self.timeline is None else {k: nulls(v) for k, v in self.timeline.items()},
        }

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Outcome:
        """The outcome of `as_json`."""
        figures = {name: content["figures"][name] for name in FIGURE_NAMES}
        counts = np.zeros(len(TTFT_EDGES_S) - 1, dtype=np.int64)
        counts[content["ttft_bins"]] = content["ttft_counts"]
        lines = content["timeline"]
        decisions = None
        if "decision_bins" in content:
            decisions = np.zeros(len(DECISION_EDGES_S) - 1, dtype=np.int64)
            decisions[content["decision_bins"]] = content["decision_counts"]
        return cls(
            figures=figures,
            arrivals_hash=content["arrivals_hash"],
            warnings=tuple(content["warnings"]),
            notes=tuple(content["notes"]),
            ttft_counts=counts,
            arrival_s=_numbers(content["arrival_s"]),
            ttft_s=_numbers(content["ttft_s"]),
            timeline=None if lines is None else {k: not_null(v) for k, v in lines.items()},
            decision_counts=decisions,
        )


def nulls(values: FloatArray) -> list[float | None]:
    """Numbers for JSON, null for what is not finite."""
    return [v if math.isfinite(v) else None for v in values.tolist()]


def not_null(values: Sequence[float | None]) -> FloatArray:
    """The reverse of `nulls`: NaN for null."""
    return np.array([math.nan if v is None else v for v in values], dtype=np.float64)


def _numbers(values: Sequence[float | None] | None) -> FloatArray | None:
    return None if values is None else not_null(values)


def arrivals_hash(world: World) -> str:
    """12 hex digits of arrivals, lengths and outputs: equal for every policy on one scenario and seed."""
    table = world.requests
    digest = hashlib.sha256()
    for column in (table.arrival_ns, table.input_tokens, table.output_tokens):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()[:12]


def run_job(job: Job) -> Outcome:
    """Run one episode."""
    policy = job.row.make()
    timed = TimedPolicy(policy) if job.timed else None
    episode = simulate(job.scenario, timed or policy, seed=job.seed, engine=job.engine, timeline=job.timeline)
    ttft_s = _ttft_per_request(episode)
    accepted = ttft_s[~np.isnan(ttft_s)]
    return Outcome(
        figures=figures_of(episode.metrics),
        arrivals_hash=arrivals_hash(episode.world),
        warnings=tuple(episode.metrics["warnings"]),
        notes=tuple(episode.metrics["notes"]),
        ttft_counts=np.histogram(accepted, TTFT_EDGES_S)[0].astype(np.int64),
        arrival_s=episode.world.requests.arrival_ns / 1e9 if job.per_request else None,
        ttft_s=ttft_s if job.per_request else None,
        timeline=episode.timeline,
        decision_counts=None
        if timed is None
        else np.histogram(np.array(timed.decision_ns) / 1e9, DECISION_EDGES_S)[0].astype(np.int64),
    )


def _ttft_per_request(episode: Episode) -> FloatArray:
    start_ns = round(episode.world.scenario.measure.warmup_s * 1e9)
    c = cohort(episode.world, episode.records, start_ns, episode.end.time_ns)
    out = np.full(len(episode.world.requests), math.nan)
    out[c.mask] = c.ttft_s
    return out


def is_trace(scenario: Scenario) -> bool:
    """Whether a scenario replays a trace: one sample, whatever the number of seeds."""
    return isinstance(scenario.workload, TraceWorkload)


# ---------------------------------------------------------------------------------------------- workers


def start_worker() -> None:
    """Set up a worker process: Ctrl-C is the parent's matter, one thread, and no life after the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches every process of the terminal
    os.environ["OMP_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def warm_up(scenario: Scenario, engine: str) -> None:
    """Run one second, so that an engine that compiles does so here, once, and not in every worker."""
    started = make_engine(engine, draw_world(scenario, 0))
    started.apply(Decision.same(len(scenario.deployment.pd), margin_s=0.0))
    started.run_until(NS_PER_S)
    started.encode(started.telemetry())
    started.totals()


def default_jobs() -> int:
    """Processes when nothing is said: the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EpisodeRunner:
    """Runs jobs in `n_jobs` fresh ("spawn") processes that stay until `close`; with 1, in this process."""

    def __init__(self, n_jobs: int) -> None:
        self._executor = (
            ProcessPoolExecutor(
                n_jobs, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker
            )
            if n_jobs > 1
            else None
        )

    def run(self, jobs: Sequence[Job], on_done: Callable[[], None] | None = None) -> list[Outcome]:
        """Outcomes in the order of the jobs; `on_done` is called after each.

        Raises:
            PrfaasError: a policy refuses its scenario, or a worker process died.
        """
        done = on_done or (lambda: None)
        outcomes: dict[int, Outcome] = {}
        for k, outcome in self.each(jobs):
            if isinstance(outcome, Exception):
                raise outcome
            outcomes[k] = outcome
            done()
        return [outcomes[k] for k in range(len(jobs))]

    def each(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Outcome | Exception]]:
        """(place of the job, its outcome or the error it ended with) as the jobs end; the rest goes when closed.

        Raises:
            PrfaasError: a worker process died.
        """
        if self._executor is None:
            for k, job in enumerate(jobs):
                try:
                    outcome: Outcome | Exception = run_job(job)
                except Exception as error:
                    outcome = error
                yield k, outcome
            return
        places: dict[Future[Outcome], int] = {
            self._executor.submit(run_job, job): k for k, job in enumerate(jobs)
        }
        try:
            for future in as_completed(places):
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise PrfaasError(
                        "a worker process ended without a word (out of memory, or killed); try fewer --jobs"
                    )
                yield places[future], error if isinstance(error, Exception) else future.result()
        finally:
            for future in places:
                future.cancel()

    def close(self) -> None:
        """End the processes; waiting jobs are dropped."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def episode_runner(n_jobs: int) -> Iterator[EpisodeRunner]:
    """An `EpisodeRunner` that is closed at the end."""
    runner = EpisodeRunner(n_jobs)
    try:
        yield runner
    finally:
        runner.close()
