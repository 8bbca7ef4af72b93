"""Sim to real: fit a profile on one run of real workers, then predict other thresholds and policies, and measure them.

`python -m tests.real.sim_to_real` (`make sim-to-real`). Three of the project's own hybrid workers, one of them in a
network namespace behind a shaped link. The two that prefill have a core each; the one that decodes, the router and the
client take what is left. Runs are cut into pieces that are kept, so that the study can be stopped and goes on where
it was. Needs root, Linux, and two cores that nobody else uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import orjson
import typer
import yaml

from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import DecodeProfile, PrefillPolynomial
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.world import draw_world
from prfaas_env.workload.requests import RequestTable
from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.decision_log import read_log
from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fitting import fit_deployment, write_fitted
from prfaas_serving.measured import of_log
from prfaas_serving.processes import run_command
from prfaas_serving.workers.parts import byte_law
from prfaas_serving.workers.processes import write_tiny_models
from tests.real.net import ShapedNetwork
from tests.real.sim_to_real_results import (
    Piece,
    compared,
    figures,
    order,
    plot,
    predicted,
    write_page,
)

#: Not those of the tests, which may run at the same time.
NEAR, FAR = "10.78.0.1", "10.78.0.2"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sim-to-real.md"

#: Lengths of the prompts: log-normal around the median, cut off.
MEDIAN_TOKENS, SIGMA, MIN_TOKENS, MAX_TOKENS = 700, 0.6, 128, 3000
OUTPUT_TOKENS = 4
#: Share of the time that one prefill worker would be busy with all prompts, and the link with all caches.
PREFILL_LOAD, LINK_LOAD = 0.6, 0.5
#: Quantile of the lengths that is the fitted threshold, and those of the other ones.
FIT_QUANTILE = 0.5
OTHER_QUANTILES = (0.25, 0.75, 0.9)
POLICIES = ("never", "always", "earliest_finish:margin_s=0")
FIT_SEED, FIRST_SEED = 2_100_000, 2_100_001
#: Lengths that a first look at the machine uses; some twice, for the first ones are slow.
LOOK_TOKENS = (256, 512, 256, 512, 1024, 2048, 1024, 2048, 512)
#: A small bucket and a short queue: the link is then as near to a plain rate as a token bucket can be.
BURST, QUEUE = "64kb", "20ms"
START_S = 180.0
#: Workers that do not compute: what they take is known, so they show the method without the noise of the machine.
FAKE = "fake"
FAKE_PREFILL = PrefillPolynomial(c0_s=0.03, c1_s_per_token=1.6e-4, c2_s_per_token2=2e-8, source="known")
FAKE_DECODE = DecodeProfile(a_s=0.012, b_s_per_sequence=0.001, slots=64, source="known")
FAKE_KV = KVLayout(fixed_bytes=220_000, bytes_per_token=1024, n_layers=4)


# ------------------------------------------------------------------------------------ the machine


def _ticks(pid: int) -> int:
    """CPU time of a process and its ended children, in clock ticks; 0 once it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return 0


def _busy() -> int:
    """Ticks of the whole machine that were not idle, of all cores."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return user + nice + system + irq + softirq + steal


class Foreign:
    """Share of the machine that others take."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = [os.getpid(), *pids]
        self._then = self._now()

    def _now(self) -> tuple[float, int, int]:
        return time.monotonic(), _busy(), sum(map(_ticks, self._pids))

    def share(self) -> float:
        """Since it was made."""
        (s0, all0, own0), (s1, all1, own1) = self._then, self._now()
        whole = (s1 - s0) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        return max((all1 - all0) - (own1 - own0), 0) / whole


async def quiet(limit: float, patience_s: float) -> None:
    """Wait until others take less than a share of the machine, or until patience ends."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        watch = Foreign([])
        await asyncio.sleep(3.0)
        if watch.share() <= limit:
            return


# ------------------------------------------------------------------------------------ the workers


@dataclass
class WorkerProcess:
    """One model worker in a process group of its own."""

    name: str
    cluster: str
    role: str
    host: str
    cores: set[int]
    namespace: str | None
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    def _model_command(self, python: str, model: Path, ready: Path) -> list[str]:
        """A worker that runs a model."""
        command = [python, "-m", "prfaas_serving.workers", "--model", str(model), "--role", self.role]
        command += ["--host", self.host, "--port", "0", "--ready-file", str(ready)]
        return [*command, "--set", "answers=finished"]

    def _fake_command(self, ready: Path) -> list[str]:
        """A worker that sleeps for as long as a known profile says, and sends as many bytes."""
        spec = FakeSpec(
            name=self.name,
            model="tiny",
            role="prefill" if self.role == "prefill" else "decode",
            host=self.host,
            kv_host=self.host,
            prefill=FAKE_PREFILL,
            decode=FAKE_DECODE,
            kv=FAKE_KV,
        )
        specs = ready.with_name(f"{self.name}.specs.json")
        write_whole(specs, json.dumps([spec.model_dump(mode="json")]))
        return [sys.executable, "-m", "prfaas_serving.fake", str(specs), str(ready)]

    def start(self, python: str, model: Path | None, folder: Path) -> None:
        """Start it; `wait` tells when it serves. Without a model it is a fake one."""
        ready = folder / f"{self.name}.ready.json"
        ready.unlink(missing_ok=True)
        command = self._fake_command(ready) if model is None else self._model_command(python, model, ready)
        if self.namespace is not None:
            command = ["ip", "netns", "exec", self.namespace, *command]
        cores = self.cores
        with (folder / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # fake workers end with it
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
            )
        self._ready, self._log = ready, folder / f"{self.name}.log"

    def wait(self) -> None:
        """Until it serves.

        Raises:
            PrfaasError: it ended, or takes too long.
        """
        assert self.process is not None
        end = time.monotonic() + START_S
        while not self._ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                tail = self._log.read_text(errors="replace")[-500:]
                raise PrfaasError(f"worker {self.name} did not start: {' '.join(tail.split())}")
            time.sleep(0.2)
        told = json.loads(self._ready.read_text())
        self.port = told["port"] if "port" in told else told[self.name][0]

    def kill(self) -> None:
        """End it and all it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def deployment(
    python: str, model: Path | None, folder: Path
) -> Iterator[tuple[list[WorkerProcess], ShapedNetwork]]:
    """The three workers and the link; all of it is taken down again."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise PrfaasError("the study needs two cores: one for each worker that prefills")
    try:
        net = ShapedNetwork(NEAR, FAR)
    except OSError as error:
        raise PrfaasError(f"no network namespaces here: {error}") from None
    workers = [
        WorkerProcess("remote", "prfaas0", "prefill", FAR, {cores[0]}, net.namespace),
        WorkerProcess("local", "pd0", "prefill", NEAR, {cores[1]}, None),
        WorkerProcess("decode", "pd0", "decode", NEAR, set(cores), None),
    ]
    try:
        for worker in workers:
            worker.start(python, model, folder)
        for worker in workers:
            worker.wait()
        yield workers, net
    finally:
        for worker in workers:
            worker.kill()
        net.close()


# ------------------------------------------------------------------------------------ one run


@dataclass
class Study:
    """What all runs share."""

    folder: Path
    workers: list[WorkerProcess]
    net: ShapedNetwork
    most_foreign: float
    patience_s: float

    def say(self, text: str) -> None:
        """Tell how far it is."""
        typer.echo(f"{time.strftime('%H:%M:%S')} {text}")

    def config(self, scenario: Path, policy: str, log: Path | None) -> RouterConfig:
        """A router that works as the simulator does: one prompt at a time per prefill worker, no cache."""
        return RouterConfig.model_validate(
            {
                "backend": "vllm_nixl",
                "scenario": str(scenario),
                "listen": {"port": 0},
                "workers": [
                    {
                        "name": w.name,
                        "url": f"http://{w.host}:{w.port}",
                        "cluster": w.cluster,
                        "role": w.role,
                        "bootstrap_port": 1,
                    }
                    for w in self.workers
                ],
                "decision": {"never_remote": True},
                "control": {
                    "policy": policy,
                    "mode": "active",
                    "moves": False,
                    "threshold_factor_per_s": None,
                    "stale_after_s": 60.0,
                    "log_file": None if log is None else str(log),
                },
                "limits": {"prefill_per_worker": 1, "queue": 100_000},
                "deadlines": {"queue_s": 600.0, "prefill_floor_s": 120.0, "transfer_floor_s": 60.0},
                "health": {
                    "ramp_s": 0.0,
                    "probe_s": 1.0,
                    "probe_timeout_s": 10.0,
                    "load_poll_s": 2.0,
                    "canary": False,
                },
                "cache": {"enabled": False},
                "log_level": "error",
            }
        )

    async def run(self, scenario: Path, policy: str, requests: RequestTable, log: Path) -> tuple[int, float]:
        """Requests through a router with a policy: (failed, share of others)."""
        log.unlink(missing_ok=True)
        router = Router(Resolved(self.config(scenario, policy, log)))
        await router.start()
        try:
            end = time.monotonic() + START_S
            while router.health.missing() or router.forwarder.open_requests:
                if time.monotonic() > end:
                    raise PrfaasError(f"the workers are not ready: {', '.join(router.health.missing())}")
                await asyncio.sleep(0.05)
            assert router.control is not None
            while router.control.n < 2:  # the policy's decision is in force
                await asyncio.sleep(0.05)
            # `ip netns exec` becomes the worker
            watch = Foreign([w.process.pid for w in self.workers if w.process is not None])
            url = f"http://127.0.0.1:{router.port}/v1/completions"
            failed = await _load(url, requests)
            return failed, watch.share()
        finally:
            await router.close()

    async def piece(self, scenario: Path, loaded: Scenario, policy: str, seed: int, seconds: float) -> Piece:
        """One piece; of one that others disturbed too much, the least disturbed of three tries."""
        best: Piece | None = None
        for _ in range(3):
            await quiet(self.most_foreign, self.patience_s)
            requests = draw_world(loaded, seed, horizon_s=seconds).requests
            log = self.folder / "logs" / f"{_file(policy)}-{seed}.log"
            failed, share = await self.run(scenario, policy, requests, log)
            lines = sorted(
                (x for x in read_log(log).requests if x.ttft_s is not None), key=lambda x: x.arrival_ns
            )
            start_s = lines[0].arrival_ns / 1e9 - float(requests.arrival_ns[0]) / 1e9
            piece = Piece(
                policy,
                seed,
                tuple(max(x.arrival_ns / 1e9 - start_s, 0.0) for x in lines),
                tuple(x.ttft_s or 0.0 for x in lines),
                sum(x.remote for x in lines),
                failed,
                round(share, 4),
            )
            if best is None or share < best.foreign_share:
                best = piece
                os.replace(log, log.with_suffix(".kept.log"))
            if share <= self.most_foreign:
                break
        assert best is not None
        return best


def _file(policy: str) -> str:
    return policy.replace(":", "-").replace("=", "-")


async def _load(url: str, requests: RequestTable) -> int:
    """Send requests at their times; how many failed.

    No prompt was ever sent before, nor begins as another one does: a worker's own prefix cache has none of it.
    """
    luck = np.random.default_rng()
    bodies = [
        orjson.dumps(
            {
                "model": "tiny",
                "prompt": luck.integers(8, 440, size=int(n)).tolist(),
                "max_tokens": int(out),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        for n, out in zip(requests.input_tokens, requests.output_tokens, strict=True)
    ]
    failed = 0
    began = time.monotonic() + 0.2
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    ) as session:

        async def one(k: int) -> None:
            nonlocal failed
            await asyncio.sleep(began + requests.arrival_ns[k] / 1e9 - time.monotonic())
            headers = {"Content-Type": "application/json"}
            try:
                async with session.post(url, data=bodies[k], headers=headers) as answer:
                    raw = await answer.read()
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
                return
            if answer.status != 200 or not raw.endswith(b"data: [DONE]\n\n"):
                failed += 1

        await asyncio.gather(*(one(k) for k in range(len(requests))))
    return failed


# ------------------------------------------------------------------------------------ the study


def base_scenario(
    name: str, layout: KVLayout, seconds_at: dict[int, float], rate_rps: float, link_bps: float
) -> dict[str, Any]:
    """What the router of the first run is told: a straight line through a first look, nominal rates."""
    slope, fixed = np.polyfit(list(seconds_at), list(seconds_at.values()), 1)
    hardware = {
        "prefill": {
            "kind": "polynomial",
            "c0_s": max(float(fixed), 0.0),
            "c1_s_per_token": max(float(slope), 1e-9),
            "source": "first look",
        },
        "decode": {"a_s": 0.02, "slots": 64, "source": "guess"},
    }
    return {
        "extends": "paper",
        "name": "sim_to_real_base",
        "description": "Three tiny workers on one machine.",
        "model": {
            "name": name,
            "kv": layout.model_dump(mode="json"),
            "kv_source": "as configured",
            "hardware": {"core": {"gpus": 1, **hardware}},
        },
        "deployment": {
            "prfaas": [{"name": "prfaas0", "hardware": "core", "n_instances": 1}],
            "pd": [{"name": "pd0", "hardware": "core", "n_prefill": 1, "n_decode": 1}],
            "links": [{"prfaas": "prfaas0", "pd": "pd0", "capacity_bps": link_bps}],
        },
        "transport": {"pipelining": False},
        "workload": {
            "arrivals": {"kind": "poisson", "rate_rps": rate_rps},
            "input_tokens": {
                "kind": "lognormal",
                "mu": math.log(MEDIAN_TOKENS),
                "sigma": SIGMA,
                "min_tokens": MIN_TOKENS,
                "max_tokens": MAX_TOKENS,
            },
            "output_tokens": {"kind": "fixed", "tokens": OUTPUT_TOKENS},
        },
        "slo": {"ttft_s": 5.0, "tpot_s": 1.0},
    }


def _lengths() -> np.ndarray:
    """Many lengths of the law."""
    luck = np.random.default_rng(np.random.SeedSequence(1))
    return np.clip(np.exp(luck.normal(math.log(MEDIAN_TOKENS), SIGMA, 20_000)), MIN_TOKENS, MAX_TOKENS)


async def look(study: Study, name: str, layout: KVLayout) -> Path:
    """A first look at the machine, which sets rate and link; kept as the base scenario."""
    path = study.folder / "base.yaml"
    if path.exists():
        return path
    guess = study.folder / "look.yaml"
    write_whole(
        guess, yaml.safe_dump(base_scenario(name, layout, {256: 0.1, 1024: 0.4}, 1.0, 1e8), sort_keys=False)
    )
    await quiet(study.most_foreign, study.patience_s)
    study.net.set_rate(1_000_000_000)
    n = len(LOOK_TOKENS)
    table = RequestTable.without_prefixes(
        np.arange(n, dtype=np.int64) * 4_000_000_000,
        np.array(LOOK_TOKENS, dtype=np.int64),
        np.full(n, OUTPUT_TOKENS, dtype=np.int64),
    )
    failed, _ = await study.run(guess, "never", table, study.folder / "look.log")
    lines = [line for line in read_log(study.folder / "look.log").requests if line.ttft_s is not None]
    if failed or len(lines) != n:
        raise PrfaasError(f"{failed} of {n} requests of the first look failed; see {study.folder}/*.log")
    seconds = {
        tokens: min(line.ttft_s or 0.0 for line in lines if line.input_tokens == tokens)
        for tokens in set(LOOK_TOKENS)
    }
    lengths = _lengths()
    known = sorted(seconds)
    slope, fixed = np.polyfit(known, [seconds[t] for t in known], 1)
    rate_rps = PREFILL_LOAD / float(np.maximum(fixed + slope * lengths, 1e-3).mean())
    mean_bits = 8.0 * float(layout.transfer_bytes_array(lengths.astype(np.int64)).mean())
    link_bps = max(round(rate_rps * mean_bits / LINK_LOAD / 1e6), 1) * 1e6
    text = yaml.safe_dump(
        base_scenario(name, layout, seconds, round(rate_rps, 3), link_bps),
        sort_keys=False,
        allow_unicode=True,
    )
    write_whole(path, text)
    study.say(
        f"first look: {', '.join(f'{t} tokens {1e3 * seconds[t]:.0f} ms' for t in known)}; "
        f"{rate_rps:.2f} req/s, link {link_bps / 1e6:.0f} Mbit/s"
    )
    return path


def _threshold(quantile: float) -> str:
    return f"static:threshold_tokens={round(float(np.quantile(_lengths(), quantile)), -1):.0f}"


def _kept(path: Path) -> Piece | None:
    return Piece.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


async def fit(study: Study, base: Path, seconds: float) -> Path:
    """The run that is fitted; the scenario that comes of it."""
    policy, path = _threshold(FIT_QUANTILE), study.folder / "pieces" / "fit.json"
    piece = _kept(path)
    if piece is None:
        piece = await study.piece(base, load_scenario(base), policy, FIT_SEED, seconds)
        write_whole(path, json.dumps(piece.as_json()))
    log = study.folder / "logs" / f"{_file(policy)}-{FIT_SEED}.kept.log"
    fitted = fit_deployment(of_log(read_log(log)), name="sim_to_real")
    write_fitted(fitted, study.folder / "fitted")
    # for the router: the workload of the study instead of the recorded one
    scenario = study.folder / "fitted.yaml"
    write_whole(scenario, yaml.safe_dump(fitted.scenario.model_dump(mode="json"), sort_keys=False))
    study.say(f"fitted to {fitted.n} requests, others took {piece.foreign_share:.0%} of the machine")
    return scenario


async def measure(
    study: Study, name: str, layout: KVLayout, pieces: int, seconds: float, fit_s: float
) -> None:
    """All runs that are still missing."""
    base = await look(study, name, layout)
    link_bps = load_scenario(base).deployment.links[0].capacity_bps
    study.net.set_rate(round(link_bps), BURST, QUEUE)
    scenario = await fit(study, base, fit_s)
    loaded = load_scenario(scenario)
    for seed in range(FIRST_SEED, FIRST_SEED + pieces):
        for policy in study_policies():
            path = study.folder / "pieces" / f"{_file(policy)}-{seed}.json"
            if path.exists():
                continue
            piece = await study.piece(scenario, loaded, policy, seed, seconds)
            write_whole(path, json.dumps(piece.as_json()))
            study.say(
                f"{policy} on trace {seed}: {len(piece.ttft_s)} requests, mean "
                f"{1e3 * np.mean(piece.ttft_s):.0f} ms, {piece.failed} failed, others {piece.foreign_share:.0%}"
            )


def study_policies() -> list[str]:
    """What is measured: the fitted threshold, the others, and rules."""
    return [_threshold(q) for q in (FIT_QUANTILE, *OTHER_QUANTILES)] + list(POLICIES)


def evaluate(folder: Path, seconds: float) -> dict[str, Any]:
    """The result of the pieces that there are."""
    fitted_on = _threshold(FIT_QUANTILE)
    scenario = load_scenario(folder / "fitted.yaml")
    policies: dict[str, dict[str, Any]] = {}
    for policy in study_policies():
        found = sorted((folder / "pieces").glob(f"{_file(policy)}-*.json"))
        measured = [piece for path in found if (piece := _kept(path)) is not None]
        if not measured:
            continue
        simulated = [predicted(scenario, policy, piece.seed, seconds) for piece in measured]
        policies[policy] = {
            "threshold": policy.startswith("static"),
            "fitted_on": policy == fitted_on,
            **compared(figures(measured), figures(simulated)),
            "pieces": [
                {
                    "seed": m.seed,
                    "measured_mean_s": float(np.mean(m.ttft_s)),
                    "predicted_mean_s": float(np.mean(s.ttft_s)),
                    "foreign_share": m.foreign_share,
                    "failed": m.failed,
                }
                for m, s in zip(measured, simulated, strict=True)
            ],
        }
    if not policies:
        raise PrfaasError(f"{folder}: no piece has been measured yet")
    workload: Any = scenario.workload
    base = load_scenario(folder / "base.yaml")
    fit_piece = _kept(folder / "pieces" / "fit.json")
    assert fit_piece is not None
    return {
        "deployment": {
            "model": base.model.name,
            "rate_rps": workload.arrivals.rate_rps,
            "link_bps": base.deployment.links[0].capacity_bps,
            "n_tokens_median": MEDIAN_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "piece_s": seconds,
            "cores": os.cpu_count(),
        },
        "fit": {
            **json.loads((folder / "fitted" / "report.json").read_text(encoding="utf-8")),
            "from": f"decision log of {fitted_on}",
            "foreign_share": fit_piece.foreign_share,
            "profile": yaml.safe_load((folder / "fitted" / "profile.yaml").read_text(encoding="utf-8")),
        },
        "policies": policies,
        "order": order(policies),
    }


def _model(python: str, name: str, folder: Path) -> Path:
    path = folder / "models" / name
    if not (path / "config.json").exists():
        write_tiny_models(Path(python), path.parent, name)
    return path


def study(
    out: Annotated[Path, typer.Option(help="Folder of the runs; what is there is kept.")] = Path(
        "runs/sim-to-real"
    ),
    python: Annotated[
        str, typer.Option(help="Python of the workers' environment (torch, transformers).")
    ] = sys.executable,
    model: Annotated[
        str, typer.Option(help=f"A name of tiny_models.py; or {FAKE}: workers that sleep a known profile.")
    ] = "qwen3-next",
    pieces: Annotated[int, typer.Option(min=1, help="Traces, each measured once per policy.")] = 5,
    seconds: Annotated[float, typer.Option(min=20, help="Length of a trace.")] = 60.0,
    fit_seconds: Annotated[float, typer.Option(min=20, help="Length of the run that is fitted.")] = 150.0,
    most_foreign: Annotated[
        float, typer.Option(help="Share of the machine that others may take; a piece is then taken again.")
    ] = 0.1,
    patience: Annotated[float, typer.Option(help="Longest wait for a quiet machine, s.")] = 60.0,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Measure what is missing.")] = True,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Write page, plot and JSON.")] = True,
) -> None:
    """Fit on one run of real workers, predict the others, measure them, write docs/sim-to-real.*."""
    for name in ("pieces", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    if run:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # workers and network are taken down
        folder = None if model == FAKE else _model(python, model, out)
        layout = FAKE_KV if folder is None else byte_law(folder, 4).layout  # the workers compute in fp32
        with deployment(python, folder, out) as (workers, net):
            shared = Study(out, workers, net, most_foreign, patience)
            asyncio.run(measure(shared, model, layout, pieces, seconds, fit_seconds))
    result = evaluate(out, seconds)
    write_whole(out / "result.json", json.dumps(result, indent=1) + "\n")
    for name, row in result["policies"].items():
        error, m = row["error"], row["measured"]
        typer.echo(
            f"{name}: mean {1e3 * m['mean_s']['value']:.0f} ms measured, predicted {error['mean_s']:+.1%}; "
            f"P90 {1e3 * m['p90_s']['value']:.0f} ms, predicted {error['p90_s']:+.1%}"
        )
    if write:
        kind = "known" if result["deployment"]["model"] == FAKE else "real"
        plot(result, PAGE.parent / "img" / f"sim-to-real-{kind}.png")
        write_page(result, PAGE, kind)


def main() -> None:
    """Entry point."""
    run_command(study)


if __name__ == "__main__":
    main()
