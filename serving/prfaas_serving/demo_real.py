"""`make demo-serving REAL=1`: the demonstration on real model workers: tiny hybrid models on this machine's CPUs.

One remote prefill worker behind a shaped link, one local prefill worker, one decode worker, each a process with one
thread. How long they take is measured first; the scenario that the router reckons with is made of that, and the load is
set to what one prefill worker can just not keep up with comfortably.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import orjson
import typer
import yaml
from rich.console import Console

from prfaas_env.base import PrfaasError
from prfaas_env.policy import policy_names
from prfaas_env.profiles.hf_config import kv_layout_from_hf_config
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.formulas import BITS_PER_BYTE
from prfaas_env.simulator.world import draw_world
from prfaas_serving.config import RouterConfig
from prfaas_serving.demo import OUTPUT_TOKENS, Row, decisions, measure, report
from prfaas_serving.fake.link import ShapedLink
from prfaas_serving.processes import run_command
from prfaas_serving.running import run_loop
from prfaas_serving.workers.processes import WorkerProcess, write_tiny_models

THRESHOLDS = (math.inf, 800.0, 400.0, 150.0, 0.0)
MARGINS = (0.0, 0.5)
#: Prompts of the load: mean of about 400 tokens.
LENGTHS = {"kind": "lognormal", "mu": 5.6, "sigma": 0.9, "min_tokens": 32, "max_tokens": 1600}
_MEASURED_TOKENS = (64, 400, 1200)
_REMOTE, _LOCAL, _DECODE = "remote-p0", "local-p0", "local-d0"


class RealStage:
    """Three workers and the link between the sites.

    Args:
        python: interpreter of the workers' environment.
        folder: for the model, logs and the scenario.
        model: name of a tiny model.
        link_bps: capacity of the link.
        load: prefill work that arrives per second, in seconds.
    """

    def __init__(self, python: Path, folder: Path, model: str, link_bps: float, load: float) -> None:
        self.time_scale = 1.0
        self.scenario = folder / "scenario.yaml"
        self._folder = folder
        self._model = folder / "models" / model
        self._python = python
        self._link = ShapedLink(link_bps / BITS_PER_BYTE)
        self._link_bps = link_bps
        self._load = load
        self._workers: dict[str, WorkerProcess] = {}

    async def start(self) -> None:
        """Write the model, start the workers, measure them, write the scenario."""
        write_tiny_models(self._python, self._model.parent, self._model.name)
        kv_port = _free_port()
        via = await self._link.listen("127.0.0.1", kv_port)
        behind_link = {"kv_port": kv_port, "kv_announced_port": via}
        for name, role, values in (
            (_REMOTE, "prefill", behind_link),
            (_LOCAL, "prefill", {}),
            (_DECODE, "decode", {}),
        ):
            self._workers[name] = WorkerProcess(name, role, self._model, self._python, self._folder, values)
        for worker in self._workers.values():
            worker.start()
        for worker in self._workers.values():
            await worker.ready()
        await self._measure()

    async def close(self) -> None:
        """End everything."""
        for worker in self._workers.values():
            await worker.close()
        await self._link.close()

    async def carried_bytes(self) -> float:
        """Bytes that have crossed the link, in both directions."""
        return float(self._link.carried_bytes)

    def config(self, policy: str | None) -> RouterConfig:
        """A router in front of them."""
        clusters = {_REMOTE: ("prfaas0", "prefill"), _LOCAL: ("pd0", "prefill"), _DECODE: ("pd0", "decode")}
        return RouterConfig.model_validate(
            {
                "backend": "vllm_nixl",
                "scenario": str(self.scenario),
                "listen": {"port": 0},
                "workers": [
                    {"name": n, "url": self._workers[n].url, "cluster": cluster, "role": role}
                    for n, (cluster, role) in clusters.items()
                ],
                "decision": {"never_remote": True},
                "control": None if policy is None else {"policy": policy, "mode": "active", "moves": False},
                "limits": {"prefill_per_worker": 1, "queue": 100_000},
                "deadlines": {"queue_s": 600.0, "prefill_floor_s": 120.0, "transfer_floor_s": 120.0},
                "health": {"ramp_s": 0.0, "probe_s": 0.5, "probe_timeout_s": 10.0},
                "upstream": {"connect_s": 20.0},
                "cache": {"enabled": False},
                "log_level": "error",
            }
        )

    def body(self, tokens: int, number: int, k: int) -> dict[str, Any]:
        """A streamed completion; prompts are drawn anew for each row and request, token ids make every token count."""
        luck = np.random.default_rng(np.random.SeedSequence([number, k]))
        return {
            "model": "tiny",
            "prompt": luck.integers(8, 440, size=tokens).tolist(),
            "max_tokens": OUTPUT_TOKENS,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": 0,
        }

    # ------------------------------------------------------------------ what the scenario is made of

    async def _measure(self) -> None:
        """Time prefills and decode steps on the decode worker, which does whole requests, and write the scenario."""
        url = self._workers[_DECODE].url + "/v1/completions"
        seconds = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

            async def once(tokens: int, k: int) -> float:
                body = {**self.body(tokens, 1_000_000, k), "stream": False}
                async with session.post(url, data=orjson.dumps(body)) as answer:
                    if answer.status != 200:
                        raise PrfaasError(f"worker {_DECODE}: status {answer.status}: {await answer.text()}")
                    return float(answer.headers["X-Prfaas-Prefill-Seconds"])

            await once(_MEASURED_TOKENS[0], 0)
            for tokens in _MEASURED_TOKENS:
                seconds.append(min([await once(tokens, k) for k in range(2)]))
            async with session.get(self._workers[_DECODE].url + "/metrics") as answer:
                page = dict(
                    line.split() for line in (await answer.text()).splitlines() if line.startswith("prfaas")
                )
        name = "prfaas_worker_step_seconds"
        step_s = float(page[f"{name}_sum"]) / float(page[f"{name}_count"])
        # a busy machine may take longer for less; a profile never falls
        self._write([float(s) for s in np.maximum.accumulate(seconds)], step_s)

    def _write(self, prefill_s: list[float], step_s: float) -> None:
        layout = kv_layout_from_hf_config(
            self._model, kv_dtype_bytes=4, state_dtype_bytes=4, conv_dtype_bytes=4
        )
        source = "Measured on this machine just now."
        raw: dict[str, Any] = {
            "name": "demo_real",
            "description": "Tiny hybrid model workers on this machine's CPUs.",
            "model": {
                "name": self._model.name,
                "kv": layout.model_dump(mode="json"),
                "kv_source": "Configuration of the model, cache in fp32.",
                "hardware": {
                    "cpu": {
                        "gpus": 1,
                        "prefill": {
                            "kind": "table",
                            "tokens": [float(t) for t in _MEASURED_TOKENS],
                            "seconds_at": prefill_s,
                            "source": source,
                        },
                        # sequences are decoded in turn: a step takes as much for each
                        "decode": {"a_s": 1e-4, "b_s_per_sequence": step_s, "slots": 8, "source": source},
                    }
                },
            },
            "deployment": {
                "prfaas": [{"name": "prfaas0", "hardware": "cpu", "n_instances": 1}],
                "pd": [{"name": "pd0", "hardware": "cpu", "n_prefill": 1, "n_decode": 1}],
                "links": [{"prfaas": "prfaas0", "pd": "pd0", "capacity_bps": self._link_bps}],
            },
            "transport": {"pipelining": True},
            "workload": {
                "kind": "synthetic",
                "arrivals": {"kind": "poisson", "rate_rps": 1.0},
                "input_tokens": LENGTHS,
                "output_tokens": {"kind": "fixed", "tokens": OUTPUT_TOKENS},
            },
        }
        self.scenario.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
        scenario = load_scenario(str(self.scenario))
        profile = scenario.model.hardware["cpu"].prefill
        drawn = draw_world(scenario, 0, horizon_s=1000.0).requests.input_tokens
        mean_s = float(profile.seconds_array(drawn.astype(np.float64)).mean())
        raw["workload"]["arrivals"]["rate_rps"] = self._load / mean_s
        self.scenario.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def _run(stage: RealStage, seconds: float, policies: list[str], console: Console) -> list[Row]:
    try:
        await stage.start()
        scenario = load_scenario(str(stage.scenario))
        requests = draw_world(scenario, 0, horizon_s=seconds).requests
        if not len(requests):
            raise PrfaasError(f"--seconds {seconds:g}: no request arrives in that time")
        profile = scenario.model.hardware["cpu"].prefill
        console.print(
            f"{len(requests)} requests with {int(requests.input_tokens.sum()):,} tokens in {seconds:g} s per row, on "
            f"real {scenario.model.name} workers; one prefill of 400 tokens takes {profile.seconds(400):.2f} s",
            highlight=False,
        )
        return await measure(stage, requests, decisions(policies, THRESHOLDS, MARGINS))
    finally:
        await stage.close()


def demo(
    environment: Annotated[
        Path, typer.Option(help="Environment with the extra `workers`; `make demo-serving REAL=1` makes it.")
    ] = Path(".envs/hybrid"),
    model: Annotated[str, typer.Option(help="qwen3-next or kimi-linear (slower).")] = "qwen3-next",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of the load per row.")] = 8.0,
    load: Annotated[
        float, typer.Option(min=0.05, max=5, help="Arriving prefill work, as a share of one worker's.")
    ] = 0.8,
    link_mbps: Annotated[float, typer.Option(min=0.1, help="Capacity of the link, Mbit/s.")] = 50.0,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", help="A further row: a policy or a bundle's folder; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON.")] = None,
) -> None:
    """Serve a load on real model workers by thresholds, margins and policies, and compare first-token times."""
    if model not in {"qwen3-next", "kimi-linear"}:
        raise PrfaasError(f"--model {model}: must be qwen3-next or kimi-linear")
    # not resolved: the interpreter of an environment is a link whose place tells which environment it is
    python = Path(os.path.abspath(environment)) / "bin" / "python"
    if not python.exists():
        raise PrfaasError(f"--environment {environment}: no {python}; `make demo-serving REAL=1` makes it")
    for name in policies or ():
        if name not in policy_names() and not Path(name).is_dir():
            raise PrfaasError(f"--policy {name}: neither a known policy nor a folder")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        stage = RealStage(python, Path(folder), model, link_mbps * 1e6, load)
        rows = run_loop(_run(stage, seconds, policies or [], console))
    report(rows, console, out)


def main() -> None:
    """Entry point of `python -m prfaas_serving.demo_real`."""
    run_command(demo)


if __name__ == "__main__":
    main()
