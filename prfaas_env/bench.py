"""What `prfaas bench` measures: speed of the engines and environments, growth, memory, time to the first step.

Everything has fixed seeds and is taken several times; CPU time unless a figure says wall time. Other rooms add
benchmarks through the entry-point group `prfaas.benchmarks`: a name for a function `(quick: bool) -> Figures`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from prfaas_env import ENV_ID, __version__
from prfaas_env.base import PrfaasError
from prfaas_env.decision import N_MOVES, PAPER_THRESHOLD_TOKENS, Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import ENGINES, Engine, make_engine
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import World, draw_world
from prfaas_env.telemetry import Telemetry

_GROUP = "prfaas.benchmarks"
SEED = 0
#: Instances of the `paper` scenario, and those that the growth is measured at (1,250 are 10,000 GPUs).
PAPER_INSTANCES = 12
GROWTH_INSTANCES = (PAPER_INSTANCES, 125, 1_250)
#: Arrivals per 12 instances for the hour whose memory is measured, in req/s: 1.1 million requests at 1,250.
HOUR_RATE_RPS = 3.0
VECTOR_SIZES = (1, 8, 64, 256, 1_024)
#: The batch that the target names.
TARGET_ENVS = 256


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Args:
        what: what it is.
        unit: its unit.
        samples: what was measured, in order.
        chosen: which of the samples stands for it. Other load on the machine only ever slows a run down, so a
            speed is the best of several; a ratio of two speeds is the median.
        at_least: target, or None.
        at_most: target, or None.
    """

    what: str
    unit: str
    samples: tuple[float, ...]
    chosen: Literal["highest", "lowest", "median"]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        """The sample that stands for it."""
        pick: dict[str, Callable[[Iterable[float]], float]] = {
            "highest": max,
            "lowest": min,
            "median": statistics.median,
        }
        return pick[self.chosen](self.samples)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def spread(self) -> tuple[float, float, float]:
        """Smallest, median and largest sample."""
        return min(self.samples), statistics.median(self.samples), max(self.samples)

    def as_json(self) -> dict[str, Any]:
        """Plain mapping for JSON."""
        low, middle, high = self.spread
        return {
            "what": self.what,
            "unit": self.unit,
            "value": self.value,
            "chosen": self.chosen,
            "min": low,
            "median": middle,
            "max": high,
            "samples": list(self.samples),
            "at_least": self.at_least,
            "at_most": self.at_most,
            "met": self.met,
        }


#: Figures of one benchmark by key.
Figures = dict[str, Figure]
Benchmark = Callable[[bool], Figures]


class Stopwatch:
    """CPU time of the process (all its threads) and wall time, added up over laps."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0
        self._cpu_s = self._wall_s = 0.0

    def start(self) -> None:
        """Begin a lap."""
        self._wall_s = time.perf_counter()
        self._cpu_s = time.process_time()

    def stop(self) -> None:
        """End it."""
        self.cpu_s += time.process_time() - self._cpu_s
        self.wall_s += time.perf_counter() - self._wall_s


class _PaperThreshold:
    """The paper's threshold and no moves, so that nothing but the simulator is measured."""

    constant = True

    def __init__(self) -> None:
        self._decision = Decision(())

    def reset(self, context: PolicyContext) -> None:
        """One decision for all PD clusters."""
        self._decision = Decision.same(
            len(context.scenario.deployment.pd), threshold_tokens=float(PAPER_THRESHOLD_TOKENS)
        )

    def decide(self, telemetry: Telemetry) -> Decision:
        """The same every time."""
        return self._decision


def _ready(name: str, world: World, margin_s: float | None = None) -> Engine:
    """An engine at the start of a world with the paper's threshold, or a margin, in force."""
    n_pd = len(world.scenario.deployment.pd)
    threshold_tokens = float(PAPER_THRESHOLD_TOKENS) if margin_s is None else None
    engine = make_engine(name, world)
    engine.apply(Decision.same(n_pd, threshold_tokens=threshold_tokens, margin_s=margin_s))
    return engine


# ----------------------------------------------------------------------------------------- the engines


def _engine_rps(name: str, world: World, margin_s: float | None = None) -> float:
    """Simulated requests per CPU-second of one run to the last finish."""
    engine, watch = _ready(name, world, margin_s), Stopwatch()
    watch.start()
    engine.run_to_end()
    watch.stop()
    return len(world.requests) / watch.cpu_s


def _simulate_rps(scenario: Scenario, n_requests: int) -> float:
    """The same of `simulate`: drawing the world, running it, working out the metrics."""
    watch = Stopwatch()
    watch.start()
    simulate(scenario, _PaperThreshold(), seed=SEED, n_requests=n_requests)
    watch.stop()
    return n_requests / watch.cpu_s


def engine_figures(n_requests: int, n_simpy: int, repeats: int) -> Figures:
    """Both engines on the paper's scenario (2.5 req/s, drained): requests per CPU-second."""
    scenario = load_scenario("paper")
    world = draw_world(scenario, SEED, n_requests=n_requests)
    short = draw_world(scenario, SEED, n_requests=n_simpy)
    simulate(scenario, _PaperThreshold(), seed=SEED, n_requests=1)  # compiles
    compiled, whole, simpy = [], [], []
    for _ in range(repeats):
        compiled.append(_engine_rps("compiled", world))
        whole.append(_simulate_rps(scenario, n_requests))
        simpy.append(_engine_rps("simpy", short))
    unit = "requests/CPU-s"
    ratio = tuple(a / b for a, b in zip(compiled, simpy, strict=True))
    return {
        "compiled_rps": Figure("compiled engine", unit, tuple(compiled), "highest", at_least=1e6),
        "simulate_rps": Figure(
            "the same with drawing the workload and working out the metrics", unit, tuple(whole), "highest"
        ),
        "simpy_rps": Figure("SimPy engine", unit, tuple(simpy), "highest"),
        "ratio": Figure("compiled over SimPy", "times", ratio, "median"),
    }


def engine_benchmark(quick: bool) -> Figures:
    """Speed of the engines on the paper's scenario."""
    return engine_figures(10_000, 500, 2) if quick else engine_figures(100_000, 3_000, 7)


def hard_world(rate_rps: float = 5.0) -> Scenario:
    """Everything on: sessions through prefix pools in two regions, wide-area links, other traffic, faults."""
    sessions, regions = load_scenario("agent_sessions"), load_scenario("two_regions")
    wide_area = {
        "connections": 8,
        "window_bytes": 16 * 2**20,
        "loss": 1e-6,
        "setup_s": 0.05,
        "jitter_s": 0.002,
    }
    links = [{**link.model_dump(), **wide_area} for link in regions.deployment.links]
    return regions.replace(
        name="hard_world",
        workload=sessions.workload,
        prefix_pool=sessions.prefix_pool,
        deployment={**regions.deployment.model_dump(), "links": links},
        transport={
            "background_bps": {"values": [0.0, 2e9], "probabilities": [0.5, 0.5], "mean_holding_s": 60.0}
        },
        faults={
            "random_failures": [{"mtbf_s": 7200.0, "mttr_s": 120.0}],
            "random_outages": {"mtbf_s": 3600.0, "mttr_s": 5.0},
            "cancel_mean_s": 600.0,
            "deadline_s": 120.0,
        },
    ).with_rate(rate_rps)


def hard_figures(n_requests: int, n_simpy: int, repeats: int) -> Figures:
    """Both engines on `hard_world`, routed by predicted finish (margin 0), drained."""
    scenario = hard_world()
    world = draw_world(scenario, SEED, n_requests=n_requests)
    short = draw_world(scenario, SEED, n_requests=n_simpy)
    _engine_rps("compiled", short, 0.0)  # compiles
    compiled, simpy = [], []
    for _ in range(repeats):
        compiled.append(_engine_rps("compiled", world, 0.0))
        simpy.append(_engine_rps("simpy", short, 0.0))
    unit = "requests/CPU-s"
    return {
        "compiled_rps": Figure("compiled engine", unit, tuple(compiled), "highest", at_least=3e5),
        "simpy_rps": Figure("SimPy engine", unit, tuple(simpy), "highest"),
    }


def hard_benchmark(quick: bool) -> Figures:
    """Speed of the engines with the hard parts of the world on."""
    return hard_figures(3_000, 200, 2) if quick else hard_figures(50_000, 1_000, 5)


# ------------------------------------------------------------------------------------ growth and memory


def scaled(scenario: Scenario, n_instances: int, rate_rps: float) -> Scenario:
    """The paper's deployment with about as many times the instances, arrivals and link capacity.

    Args:
        scenario: one PrfaaS and one PD cluster.
        n_instances: instances in all, split as before.
        rate_rps: mean arrival rate per as many instances as `scenario` has.
    """
    deployment = scenario.deployment
    (prfaas,), (pd,), (link,) = deployment.prfaas, deployment.pd, deployment.links
    factor = n_instances / (prfaas.n_instances + pd.n_prefill + pd.n_decode)
    n_prfaas, n_prefill = round(prfaas.n_instances * factor), round(pd.n_prefill * factor)
    bigger = {
        "prfaas": (prfaas.model_copy(update={"n_instances": n_prfaas}),),
        "pd": (
            pd.model_copy(update={"n_prefill": n_prefill, "n_decode": n_instances - n_prfaas - n_prefill}),
        ),
        "links": (link.model_copy(update={"capacity_bps": link.capacity_bps * factor}),),
    }
    return scenario.replace(deployment=deployment.model_copy(update=bigger)).with_rate(rate_rps * factor)


def peak_rss_bytes() -> int:
    """Most memory this process ever held.

    Linux hands the peak of a parent on to its child in `ru_maxrss`, so the status file is read where there is one.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _child(code: str, *arguments: Any, cache: str | None = None) -> list[float]:
    """Numbers that a fresh interpreter writes as JSON; `code` finds the arguments in `sys.argv[1:]`."""
    environment = dict(os.environ)
    if cache is not None:
        environment["PRFAAS_CACHE_DIR"] = cache
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PrfaasError(f"a measuring process ended with exit code {done.returncode}: {last}")
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


_HOUR = """
import json, sys
from prfaas_env.bench import hour
sys.stdout.write(json.dumps(hour(int(sys.argv[1]), float(sys.argv[2]))))
"""


def hour(n_instances: int, duration_s: float) -> tuple[int, float, int]:
    """(requests, CPU seconds, peak memory in bytes) of simulating the paper's scenario at another size."""
    watch = Stopwatch()
    scenario = scaled(load_scenario("paper"), n_instances, HOUR_RATE_RPS)
    watch.start()
    episode = simulate(scenario, _PaperThreshold(), seed=SEED, duration_s=duration_s)
    watch.stop()
    return len(episode.world.requests), watch.cpu_s, peak_rss_bytes()


def growth_figures(n_requests: int, repeats: int, duration_s: float, sizes: tuple[int, ...]) -> Figures:
    """Cost per request at equal load per instance, relative to the first size; memory and time of an hour."""
    scenario = load_scenario("paper")
    rate_rps = 2.5
    worlds = {n: draw_world(scaled(scenario, n, rate_rps), SEED, n_requests=n_requests) for n in sizes}
    simulate(scenario, _PaperThreshold(), seed=SEED, n_requests=1)  # compiles
    costs: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(repeats):
        for n, world in worlds.items():
            costs[n].append(1e6 / _engine_rps("compiled", world))
    base, *larger = sizes
    out: Figures = {
        f"cost_{n}_us": Figure(f"one request at {n:,} instances", "CPU us", tuple(costs[n]), "lowest")
        for n in sizes
    }
    for n in larger:
        ratio = tuple(a / b for a, b in zip(costs[n], costs[base], strict=True))
        out[f"cost_{n}_ratio"] = Figure(
            f"the same relative to {base} instances, at {n:,}",
            "times",
            ratio,
            "median",
            at_most=3.0 if n == GROWTH_INSTANCES[-1] else None,
        )
    largest = sizes[-1]
    requests, cpu_s, peak_bytes = _child(_HOUR, largest, duration_s)
    what = f"{duration_s:,.0f} s at {largest:,} instances ({requests:,.0f} requests)"
    out["hour_cpu_s"] = Figure(f"simulating {what}", "CPU s", (cpu_s,), "lowest")
    out["hour_peak_mib"] = Figure(
        f"peak memory of {what}", "MiB", (peak_bytes / 2**20,), "lowest", at_most=1024.0
    )
    return out


def growth_benchmark(quick: bool) -> Figures:
    """Large deployments: cost per request and memory."""
    if quick:
        return growth_figures(5_000, 2, 60.0, GROWTH_INSTANCES)
    return growth_figures(100_000, 5, 3_600.0, GROWTH_INSTANCES)


# -------------------------------------------------------------------------------------- environments


def masked_actions(random: np.random.Generator, masks: NDArray[np.bool_], n_pd: int) -> NDArray[np.int64]:
    """Random legal discrete actions, shape (n, 2 n_pd), for masks of shape (n, n_pd * (grid + 3))."""
    parts = masks.reshape(len(masks), n_pd, -1)
    luck = random.random(parts.shape) * parts
    routing = np.argmax(luck[:, :, :-N_MOVES], axis=2)
    move = np.argmax(luck[:, :, -N_MOVES:], axis=2)
    return np.stack((routing, move), axis=2).reshape(len(masks), 2 * n_pd)


def _env_rates(engine: str, steps: int, repeats: int) -> tuple[list[float], list[float]]:
    """(steps per CPU-second, CPU milliseconds per reset) of `gym.make` with its default wrappers."""
    env: gym.Env[Any, Any] = gym.make(ENV_ID, scenario="drift", engine=engine, routing="margin")
    n_pd = env.action_space.shape[0] // 2 if env.action_space.shape else 1
    random = np.random.default_rng(SEED)
    env.reset(seed=SEED)
    env.step(env.unwrapped.codec.neutral())  # type: ignore[attr-defined]  # compiles
    rates, resets = [], []
    for _ in range(repeats):
        watch, reset = Stopwatch(), Stopwatch()
        reset.start()
        _, info = env.reset(seed=SEED)
        reset.stop()
        resets.append(1e3 * reset.cpu_s)
        for _ in range(steps):
            action = masked_actions(random, info["action_mask"][None], n_pd)[0]
            watch.start()
            *_, info = env.step(action)
            watch.stop()
        rates.append(steps / watch.cpu_s)
    env.close()
    return rates, resets


def env_figures(steps: dict[str, int], repeats: int) -> Figures:
    """The scalar environment, drift scenario, masked random actions, with each engine."""
    out: Figures = {}
    for engine in ENGINES:
        rates, resets = _env_rates(engine, steps[engine], repeats)
        out[f"{engine}_steps"] = Figure(
            f"gym.make, {engine} engine",
            "steps/CPU-s",
            tuple(rates),
            "highest",
            at_least=25_000.0 if engine == "compiled" else None,
        )
        out[f"{engine}_reset_ms"] = Figure(f"its reset, {engine} engine", "CPU ms", tuple(resets), "lowest")
    return out


def env_benchmark(quick: bool) -> Figures:
    """Steps of the scalar environment."""
    if quick:
        return env_figures({"compiled": 300, "simpy": 50}, 2)
    return env_figures({"compiled": 3_600, "simpy": 900}, 5)


def _vector_rates(n: int, steps: int, repeats: int, warmup: int) -> dict[str, list[float]]:
    """Steps per second (wall, CPU) and CPU milliseconds of a reset per env, of `gym.make_vec` with n envs."""
    envs: Any = gym.make_vec(
        ENV_ID, num_envs=n, vectorization_mode="vector_entry_point", scenario="drift", routing="margin"
    )
    n_pd = envs.single_action_space.shape[0] // 2
    random = np.random.default_rng(SEED)
    out: dict[str, list[float]] = {"wall": [], "cpu": [], "reset_ms": []}
    envs.reset(seed=SEED)  # compiles, and takes its memory
    for _ in range(repeats):
        reset = Stopwatch()
        reset.start()
        _, info = envs.reset(seed=SEED)
        reset.stop()
        out["reset_ms"].append(1e3 * reset.cpu_s / n)
    for k in range(-1, repeats):  # the first round fills the queues
        watch, done = Stopwatch(), 0
        while done < (warmup if k < 0 else steps):
            actions = masked_actions(random, info["action_mask"], n_pd)
            watch.start()
            *_, info = envs.step(actions)
            watch.stop()
            done += 1
        if k >= 0:
            out["wall"].append(n * steps / watch.wall_s)
            out["cpu"].append(n * steps / watch.cpu_s)
    envs.close()
    return out


def vector_figures(sizes: tuple[int, ...], env_steps: int, repeats: int, warmup: int) -> Figures:
    """The batched environment, drift scenario, masked random actions; no reset inside the timed steps."""
    out: Figures = {}
    for n in sizes:
        steps = min(max(env_steps // n, 10), 700)
        rates = _vector_rates(n, steps, repeats, warmup)
        out[f"wall_{n}"] = Figure(
            f"gym.make_vec, {n:,} envs",
            "env-steps/s, wall",
            tuple(rates["wall"]),
            "highest",
            at_least=200_000.0 if n == TARGET_ENVS else None,
        )
        out[f"cpu_{n}"] = Figure(
            f"gym.make_vec, {n:,} envs", "env-steps/CPU-s", tuple(rates["cpu"]), "highest"
        )
        out[f"reset_{n}_ms"] = Figure(
            f"its reset per env, {n:,} envs", "CPU ms", tuple(rates["reset_ms"]), "lowest"
        )
    return out


def vector_benchmark(quick: bool) -> Figures:
    """Steps of the batched environment."""
    return vector_figures((1, 8, 64), 2_000, 2, 5) if quick else vector_figures(VECTOR_SIZES, 100_000, 5, 60)


# -------------------------------------------------------------------------------------- the first step

_FIRST_STEP = """
import sys, time
wall_s, cpu_s = time.perf_counter(), time.process_time()
import gymnasium
import prfaas_env
env = gymnasium.make(prfaas_env.ENV_ID, scenario=sys.argv[1])
env.reset(seed=0)
env.step(env.action_space.sample())
wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
sys.stdout.write(f"[{cpu_s}, {wall_s}]")
"""


def start_figures(cold: int, warm: int) -> Figures:
    """From `import` to the first step in a fresh process, with and without compiled code on disk."""
    cold_runs: list[list[float]] = []
    warm_runs: list[list[float]] = []
    for _ in range(cold):
        with tempfile.TemporaryDirectory() as cache:
            cold_runs.append(_child(_FIRST_STEP, "paper", cache=cache))
            warm_runs += [_child(_FIRST_STEP, "paper", cache=cache) for _ in range(warm)]
    out: Figures = {}
    for name, runs, limit_s in (("cold", cold_runs, 45.0), ("warm", warm_runs, 2.0)):
        cpu, wall = zip(*runs, strict=True)
        what = f"import to first step, {name} start"
        out[f"{name}_cpu_s"] = Figure(what, "CPU s", cpu, "lowest", at_most=limit_s)
        out[f"{name}_wall_s"] = Figure(what, "s, wall", wall, "lowest")
    return out


def start_benchmark(quick: bool) -> Figures:
    """Cold and warm start."""
    return start_figures(1, 2) if quick else start_figures(2, 5)


# ------------------------------------------------------------------------------------------- running

#: Benchmarks of this package, in order.
BENCHMARKS: dict[str, Benchmark] = {
    "engine": engine_benchmark,
    "hard": hard_benchmark,
    "growth": growth_benchmark,
    "env": env_benchmark,
    "vector": vector_benchmark,
    "start": start_benchmark,
}


def benchmark_names() -> list[str]:
    """All benchmarks: own ones, then those of other rooms."""
    others = sorted({entry.name for entry in metadata.entry_points(group=_GROUP)} - set(BENCHMARKS))
    return [*BENCHMARKS, *others]


def _load(name: str) -> Benchmark:
    """A benchmark by name; ImportError where its room lacks a package."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    (entry,) = [e for e in metadata.entry_points(group=_GROUP) if e.name == name]
    found: Benchmark = entry.load()
    return found


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_facts() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "load_average": load,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numba", "numpy", "gymnasium", "simpy")},
    }


@dataclass
class Report:
    """What a run of benchmarks found. `skipped` maps a benchmark that could not be loaded to the reason."""

    quick: bool
    machine: dict[str, Any]
    load_average_after: list[float] | None = None
    found: dict[str, Figures] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain mapping for JSON."""
        return {
            "prfaas_env": __version__,
            "quick": self.quick,
            "machine": self.machine,
            "load_average_after": self.load_average_after,
            "benchmarks": {
                name: {key: figure.as_json() for key, figure in figures.items()}
                for name, figures in self.found.items()
            },
            "skipped": self.skipped,
        }


def run_benchmarks(
    names: Iterable[str] = (), *, quick: bool = False, say: Callable[[str], None] = lambda text: None
) -> Report:
    """Run benchmarks one after the other, in this process and on one core unless a figure says otherwise.

    Args:
        names: which ones; all if empty.
        quick: tiny sizes, to see that everything runs.
        say: told what is being measured.

    Raises:
        PrfaasError: an unknown name; a benchmark asked for by name that cannot be loaded.
    """
    asked, known = list(names), benchmark_names()
    for name in asked:
        if name not in known:
            raise PrfaasError(f"unknown benchmark {name!r}; known: {', '.join(known)}")
    report = Report(quick, machine_facts())
    for name in known:
        if asked and name not in asked:
            continue
        say(f"measuring {name}")
        try:
            benchmark = _load(name)
        except (ImportError, AttributeError) as error:
            reason = " ".join(str(error).split())
            if asked:
                raise PrfaasError(f"benchmark {name!r} cannot be loaded: {reason}") from None
            report.skipped[name] = reason
            continue
        report.found[name] = benchmark(quick)
    report.load_average_after = machine_facts()["load_average"]
    return report


# --------------------------------------------------------------------------------------------- text


def number(value: float) -> str:
    """A figure as text: whole above 100, three digits below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def target(figure: Figure) -> str:
    """The target as text, empty without one."""
    if figure.at_least is not None:
        return f">= {number(figure.at_least)}"
    return "" if figure.at_most is None else f"<= {number(figure.at_most)}"


def verdict(figure: Figure) -> str:
    """`met`, `missed`, or empty without a target."""
    return {True: "met", False: "missed", None: ""}[figure.met]


def facts_line(report: Report) -> str:
    """The machine in one line."""
    m = report.machine
    versions = ", ".join(f"{name} {m[name]}" for name in ("python", "numba", "numpy", "gymnasium", "simpy"))
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['system']}; {versions}; prfaas-env {__version__}; "
        f"load average {_load_text(m['load_average'])} before, {_load_text(report.load_average_after)} after"
    )


def _load_text(load: list[float] | None) -> str:
    return "unknown" if load is None else f"{load[0]:.1f}"


def markdown(report: Report) -> str:
    """The table of `docs/performance.md`."""
    lines = [facts_line(report) + ".", ""]
    for name, figures in report.found.items():
        lines += [
            f"**{name}**",
            "",
            "| what | value | unit | min / median / max | target | |",
            "| --- | ---: | --- | --- | --- | --- |",
        ]
        for figure in figures.values():
            spread = " / ".join(map(number, figure.spread)) if len(figure.samples) > 1 else ""
            lines.append(
                f"| {figure.what} | {number(figure.value)} | {figure.unit} | {spread} "
                f"| {target(figure)} | {verdict(figure)} |"
            )
        lines.append("")
    lines += [f"Not measured: {name} ({reason})." for name, reason in report.skipped.items()]
    return "\n".join(lines).strip() + "\n"


BEGIN, END = "<!-- bench: begin -->\n", "<!-- bench: end -->"


def with_table(page: str, report: Report, where: str) -> str:
    """A page with the table between its two markers replaced; PrfaasError if it has not exactly one pair."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise PrfaasError(f"{where}: needs one line {BEGIN.strip()!r} and after it one {END!r}")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{markdown(report)}{END}{rest.partition(END)[2]}"
