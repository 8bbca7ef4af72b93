"""`make demo-serving`: a router in front of a fake cluster under a real trace: thresholds, margins, and policies."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import aiohttp
import numpy as np
import orjson
import typer
from rich.console import Console
from rich.table import Table

from prfaas_env.base import PrfaasError
from prfaas_env.decision import ClusterDecision
from prfaas_env.policy import policy_names
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.world import draw_world
from prfaas_env.workload.requests import RequestTable
from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.fake.cluster import FakeCluster, of_deployment, router_workers
from prfaas_serving.processes import run_command
from prfaas_serving.running import run_loop

#: Thresholds in tokens and margins in seconds of the table.
THRESHOLDS = (math.inf, 40_000.0, 19_400.0, 8_000.0, 0.0)
MARGINS = (0.0, 2.0)
#: Policies that decide in the control loop; the second is shipped with the agents and may not be installed.
POLICIES = ("dual_timescale", "learned")
OUTPUT_TOKENS = 8


@dataclass
class Row:
    """What one decision, or one policy, gave. Times in seconds of the scenario."""

    decision: ClusterDecision | str
    ttft_s: list[float] = field(default_factory=list)
    remote: int = 0
    failed: int = 0
    link_bytes: float = 0.0
    elapsed_s: float = 0.0
    moves: int = 0

    @property
    def name(self) -> str:
        """The rule in words."""
        if isinstance(self.decision, str):
            return self.decision
        if self.decision.margin_s is not None:
            return f"margin {self.decision.margin_s:g} s"
        threshold = self.decision.threshold_tokens
        if threshold == math.inf:
            return "never remote"
        return "always remote" if threshold == 0 else f"threshold {threshold:,.0f}"


def decisions(
    policies: Sequence[str] = (),
    thresholds: Sequence[float] = THRESHOLDS,
    margins: Sequence[float] = MARGINS,
) -> list[ClusterDecision | str]:
    """The rows of the table: fixed decisions, the policies that are installed, and further ones."""
    installed = policy_names()
    return [
        *(ClusterDecision(threshold_tokens=t) for t in thresholds),
        *(ClusterDecision(margin_s=m) for m in margins),
        *(name for name in POLICIES if name in installed),
        *policies,
    ]


class Stage(Protocol):
    """The workers that a demonstration runs on."""

    time_scale: float
    """Real seconds per second of the scenario."""

    @property
    def body(self) -> Callable[[int, int, int], dict[str, Any]] | None:
        """As `body_of` of `load`."""

    async def start(self) -> None:
        """Start them. PrfaasError: they do not come up."""

    async def close(self) -> None:
        """End them."""

    def config(self, policy: str | None) -> RouterConfig:
        """A router in front of them."""

    async def carried_bytes(self) -> float:
        """Bytes of KV that have crossed the link."""


async def load(
    url: str,
    requests: RequestTable,
    time_scale: float,
    row: Row,
    number: int,
    output_tokens: Sequence[int] | None = None,
    body_of: Callable[[int, int, int], dict[str, Any]] | None = None,
) -> None:
    """Send the requests of a trace at their times and wait for all answers.

    Args:
        url: of the router's completions.
        requests: the trace.
        time_scale: real seconds per second of the trace.
        row: filled with what came.
        number: tells loads apart.
        output_tokens: per request; none = a few.
        body_of: (input tokens, number, k) -> request k; none = as fake workers want it.
    """
    ids = np.arange(int(requests.input_tokens.max()) + len(requests), dtype=np.int64)

    def fake_body(n: int, number: int, k: int) -> dict[str, Any]:
        # tokens of its own, so that no two requests of any row share a prefix
        prompt = ids[k : k + n].tolist()
        prompt[0] = 1_000_000 * (number + 1) + k
        return {"model": "fake", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}

    make = body_of or fake_body
    began = time.monotonic()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    ) as session:

        async def one(k: int) -> None:
            body = make(int(requests.input_tokens[k]), number, k)
            if output_tokens is not None:
                body["max_tokens"] = output_tokens[k]
            data = orjson.dumps(body)
            await asyncio.sleep(requests.arrival_ns[k] / 1e9 * time_scale - (time.monotonic() - began))
            sent = time.monotonic()
            try:
                async with session.post(
                    url, data=data, headers={"Content-Type": "application/json"}
                ) as answer:
                    first = 0.0
                    raw = b""
                    async for piece in answer.content.iter_any():
                        first = first or time.monotonic()
                        raw += piece
            except (aiohttp.ClientError, TimeoutError):
                row.failed += 1
                return
            if answer.status != 200 or not raw.endswith(b"data: [DONE]\n\n"):
                row.failed += 1
                return
            row.ttft_s.append((first - sent) / time_scale)
            row.remote += answer.headers["X-Prfaas-Route"] == "remote"

        await asyncio.gather(*(one(k) for k in range(len(requests))))
    row.elapsed_s = (time.monotonic() - began) / time_scale


def config_of(
    cluster: FakeCluster, scenario: str, time_scale: float = 1.0, policy: str | None = None
) -> RouterConfig:
    """A router for a fake cluster: one prefill at a time per worker, as in the simulator."""
    control = {"policy": policy, "mode": "active", "moves": True}
    return RouterConfig.model_validate(
        {
            "backend": "vllm_nixl",
            "scenario": scenario,
            "listen": {"port": 0},
            "workers": router_workers(cluster.members),
            "decision": {"never_remote": True},
            "control": None if policy is None else control,
            "time_scale": time_scale,
            "limits": {"prefill_per_worker": 1, "queue": 100_000},
            "deadlines": {"queue_s": 600.0, "prefill_floor_s": 120.0, "transfer_floor_s": 60.0},
            "health": {"ramp_s": 0.0, "probe_s": 0.5, "load_poll_s": max(0.05, min(time_scale, 1.0))},
            "cache": {"enabled": False},
            "log_level": "error",
        }
    )


class FakeStage:
    """The deployment of a scenario on fake workers.

    Args:
        scenario: the deployment.
        time_scale: real seconds per second of the scenario.
    """

    def __init__(self, scenario: Scenario, time_scale: float) -> None:
        self.time_scale = time_scale
        self.body: Callable[[int, int, int], dict[str, Any]] | None = None
        self._scenario = scenario
        # the link carries as many bytes per real second as costs little here
        self._byte_scale = 2e-3 * time_scale
        self._cluster = of_deployment(
            scenario,
            time_scale=time_scale,
            byte_scale=self._byte_scale,
            handshake_s=5.0,
            max_model_len=1_000_000,
        )

    async def start(self) -> None:
        """Start them."""
        await self._cluster.start()

    async def close(self) -> None:
        """End them."""
        await self._cluster.close()

    def config(self, policy: str | None) -> RouterConfig:
        """A router in front of them."""
        return config_of(self._cluster, self._scenario.name, self.time_scale, policy)

    async def carried_bytes(self) -> float:
        """Bytes of KV that have crossed the link."""
        link = self._cluster.link
        return 0.0 if link is None else link.carried_bytes / self._byte_scale


async def measure(stage: Stage, requests: RequestTable, chosen: Sequence[ClusterDecision | str]) -> list[Row]:
    """Run the requests once per row, each through a router of its own.

    Args:
        stage: the workers, started.
        requests: the load.
        chosen: one row each: a decision that stays, or a policy for the control loop.

    Raises:
        PrfaasError: the workers do not come up, or a policy is wrong.
    """
    rows = []
    for number, decision in enumerate(chosen):
        row = Row(decision)
        router = Router(Resolved(stage.config(decision if isinstance(decision, str) else None)))
        await router.start()
        try:
            await _ready(router)
            before = await stage.carried_bytes()
            if not isinstance(decision, str):
                router.forwarder.holder.set(decision, "admin", "demonstration")
            url = f"http://127.0.0.1:{router.port}/v1/completions"
            await load(url, requests, stage.time_scale, row, number, body_of=stage.body)
            row.link_bytes = await stage.carried_bytes() - before
            if router.control is not None:
                row.moves = router.control.counts["moves"]
            rows.append(row)
        finally:
            await router.close()
    return rows


async def on_fakes(
    scenario: Scenario,
    time_scale: float,
    requests: RequestTable,
    chosen: Sequence[ClusterDecision | str],
) -> list[Row]:
    """`measure` on the fake workers of a scenario, which are started for it and ended."""
    stage = FakeStage(scenario, time_scale)
    try:
        await stage.start()
        return await measure(stage, requests, chosen)
    finally:
        await stage.close()


async def _ready(router: Router) -> None:
    end = time.monotonic() + 60.0
    # a canary is over when its transfer is, so that none of it counts in the first row
    while router.health.missing() or router.forwarder.open_requests:
        if time.monotonic() > end:
            raise PrfaasError(f"the workers did not become ready: {', '.join(router.health.missing())}")
        await asyncio.sleep(0.05)


def table_of(rows: Sequence[Row]) -> Table:
    """The table of a demonstration."""
    rates_bps = [row.link_bytes * 8 / row.elapsed_s if row.elapsed_s else math.nan for row in rows]
    small = max(rates_bps, default=0.0) < 1e8
    unit, unit_bps = ("Mbit/s", 1e6) if small else ("Gbit/s", 1e9)
    table = Table("rule", "remote", "TTFT (s)", "P50", "P90", unit, "moves", "lost")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row, rate_bps in zip(rows, rates_bps, strict=True):
        n = len(row.ttft_s)
        values = [float(np.mean(row.ttft_s)), *np.percentile(row.ttft_s, [50, 90])] if n else [math.nan] * 3
        table.add_row(
            row.name,
            f"{row.remote / n:.0%}" if n else "-",
            *(f"{v:.2f}" for v in values),
            f"{rate_bps / unit_bps:.2f}" if row.elapsed_s else "-",
            str(row.moves) if isinstance(row.decision, str) else "-",
            str(row.failed),
        )
    return table


def demo(
    scenario: Annotated[str, typer.Option(help="Deployment and load.")] = "mooncake",
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds of the load, in the scenario's time.")
    ] = 90.0,
    time_scale: Annotated[
        float,
        typer.Option("--time-scale", min=0.001, max=10, help="Real seconds per second of the scenario."),
    ] = 0.1,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", help="A further row: a policy or a bundle's folder; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON.")] = None,
) -> None:
    """Serve a recorded load on a fake cluster by thresholds, margins and policies, and compare first-token times."""
    loaded = load_scenario(scenario)
    requests = draw_world(loaded, 0, horizon_s=seconds).requests
    if not len(requests):
        raise PrfaasError(f"--seconds {seconds:g}: no request arrives in that time")
    console = Console()
    console.print(
        f"{len(requests)} requests of {seconds:g} s of scenario {loaded.name}, in {seconds * time_scale:g} s per row; "
        "times below are the scenario's",
        highlight=False,
    )
    for name in POLICIES:
        if name not in policy_names():
            console.print(
                f"no policy {name!r} is installed: no row; --policy FOLDER names a bundle", highlight=False
            )
    rows = run_loop(on_fakes(loaded, time_scale, requests, decisions(policies or ())))
    report(rows, console, out)


def report(rows: Sequence[Row], console: Console, out: Path | None) -> None:
    """Print the table and write the figures.

    Raises:
        PrfaasError: a request failed.
    """
    from prfaas_env.base import write_whole

    console.print(table_of(rows))
    if out is not None:
        write_whole(
            out, orjson.dumps([_figures(row) for row in rows], option=orjson.OPT_INDENT_2).decode() + "\n"
        )
    if any(row.failed for row in rows):
        raise PrfaasError(f"{sum(row.failed for row in rows)} requests failed")


def _figures(row: Row) -> dict[str, Any]:
    n = len(row.ttft_s)
    return {
        "rule": row.name,
        "requests": n,
        "remote": row.remote,
        "failed": row.failed,
        "moves": row.moves,
        "mean_ttft_s": float(np.mean(row.ttft_s)) if n else None,
        "p90_ttft_s": float(np.percentile(row.ttft_s, 90)) if n else None,
        "link_bytes": row.link_bytes,
    }


def main() -> None:
    """Entry point of `python -m prfaas_serving.demo`."""
    run_command(demo)


if __name__ == "__main__":
    main()
