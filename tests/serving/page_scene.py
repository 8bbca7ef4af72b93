"""A router with fake workers whose page has something to show: 15 minutes of traffic told with times of the past, and a
control loop that only remembers what it is told.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from prfaas_env.base import stream
from prfaas_env.decision import ClusterDecision
from prfaas_serving.app import Router
from prfaas_serving.choice import Route
from prfaas_serving.requests import ClientError
from prfaas_serving.ui.history import N_STEPS, STEP_S, History
from tests.serving.support import Setup, serving

REMOTE = Route("remote", "prfaas0", "rule")
LOCAL = Route("local", "pd0", "rule")
#: Browsers that are looked for, besides the one named by PRFAAS_CHROMIUM.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Quiet and offline; the sandbox needs rights that root in a container lacks.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",
]


def browser_path() -> str:
    """Chromium on this machine; the test is skipped without it."""
    pytest.importorskip("playwright", reason="playwright is not installed: pip install 'prfaas-env[dev]'")
    named = os.environ.get("PRFAAS_CHROMIUM")
    if named is not None:
        assert Path(named).is_file(), f"PRFAAS_CHROMIUM: no file {named}"
        return named
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on PATH and PRFAAS_CHROMIUM is not set")


@dataclass(frozen=True)
class Line:
    """A line of a decision log, as far as the page reads it."""

    n: int
    unix_s: float
    acted: dict[str, Any] | None
    proposed: dict[str, Any] | None
    by: str = "policy"
    reason: str = "ppo"
    mode: str = "active"
    guard: str = "ok"
    decide_us: float = 90.0

    def as_json(self) -> dict[str, Any]:
        """As a mapping."""
        return {"kind": "decision", **self.__dict__}


def logged(threshold: float | str | None, move: int = 1, margin: float | str | None = None) -> dict[str, Any]:
    """A decision as the log has it."""
    return {"threshold_tokens": threshold, "margin_s": margin, "cache_rule": "scarce", "moves": [move]}


@dataclass
class FakeControl:
    """What the page needs of a control loop."""

    mode: str = "active"
    policy_spec: str = "bundles/ppo_drift"
    policy_hash: str = "5f2c9e0b71aa"
    guard: str = "ok"
    last: Any = None
    alarms: dict[str, str] = field(default_factory=dict)
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=256))
    told: list[tuple[str, str]] = field(default_factory=list)

    def set_mode(self, mode: str, reason: str) -> None:
        """Remember an order."""
        self.mode = mode
        self.told.append((mode, reason))

    async def close(self) -> None:
        """Nothing runs."""


def install(router: Router, control: FakeControl) -> None:
    """Give a router a control loop, and its admin port the call that switches the mode."""
    router.control = control  # type: ignore[attr-defined]
    inner = router.admin.handle

    async def handle(request: Any) -> Any:
        if (request.method, request.path) == ("PUT", "/mode"):
            body = orjson.loads(await request.read())
            if set(body) != {"mode", "reason"} or body["mode"] not in {"active", "shadow", "off"}:
                raise ClientError(400, "mode must be active, shadow or off", "invalid_mode")
            control.set_mode(body["mode"], body["reason"])
            return {"mode": control.mode}
        return await inner(request)

    router.admin.handle = handle  # type: ignore[method-assign]


def decisions(control: FakeControl, unix_s: float) -> None:
    """Some lines of every kind."""
    add = control.recent.append
    for k in range(12):
        t = round(14_000 + 9_000 * math.sin(k / 2))
        add(Line(k, unix_s - 12 + k, logged(t), logged(t)))
    add(Line(12, unix_s - 0.9, logged(18_000, 0), logged(18_000, 0), reason="ppo: decode is short"))
    add(Line(13, unix_s - 0.6, logged(18_000), logged(40_000), "rule", "clamped to 18,000 by the rate limit"))
    add(
        Line(
            14,
            unix_s - 0.3,
            logged("inf"),
            logged("inf", 2),
            "fallback",
            "metrics are 41 s old",
            guard="fallback",
        )
    )
    add(Line(15, unix_s - 0.1, logged(None, 1, 2.0), None, "operator", "override", "shadow"))


def traffic(router: Router, minutes: float = 15.0) -> History:
    """Replace the page's history by one that was told a wave of traffic up to now."""
    f, rng = router.forwarder, stream(7, "arrivals")
    steps = min(int(minutes * 60 / STEP_S), N_STEPS)
    now_s, unix_s = time.monotonic(), time.time()
    begin_s = now_s - steps * STEP_S
    history = History(f, lambda: f.fleet.changes.under_way, begin_s)
    f.listeners.remove(router.page.history)
    router.page.history = history
    f.listeners.append(history)
    link = f.paths.links["prfaas0"]
    for k in range(steps):
        at_s = begin_s + k * STEP_S
        wave = 1.0 + 0.6 * math.sin(k / 22.0)
        for _ in range(int(rng.poisson(2.4 * STEP_S * wave))):
            tokens = int(min(rng.lognormal(9.0, 1.3), 131_072))
            route = REMOTE if tokens > 19_400 else LOCAL
            arrived_s = at_s + float(rng.uniform(0, STEP_S * 0.6))
            history.arrival(arrived_s, tokens, tokens, 0, route)
            ttft_s = (0.25 + tokens / 24_000) * float(rng.lognormal(0, 0.35)) * wave
            if rng.uniform() < 0.01:
                f.metrics.rejected.labels("saturated").inc()
                continue
            history.first_token(arrived_s, ttft_s, route)
            f.served(ttft_s, 0.024 if ttft_s < 4.0 else 0.03)
        bits = float(rng.uniform(0.3, 0.75)) * wave * link.nominal_bps * STEP_S * 0.6
        flow = link.routed(bits)
        link.opened(flow, at_s)
        link.closed(flow, at_s + STEP_S * 0.7, arrived=True)
        if k == steps // 2 and "x1" in f.fleet.workers:
            f.fleet.relabel(f.fleet.workers["x1"], "decode")
        if k % 12 == 0:
            f.holder.set(ClusterDecision(threshold_tokens=round(19_400 * wave)), "policy", "ppo")
        history.tick(at_s + STEP_S, unix_s - (steps - 1 - k) * STEP_S)
    f.holder.set(ClusterDecision(threshold_tokens=19_400), "policy", "ppo")
    return history


#: More workers than the usual ones: `x1` changes its role in the middle of `traffic`.
WORKERS = (
    ("far-0", "prfaas0", "prefill"),
    ("far-1", "prfaas0", "prefill"),
    ("near-0", "pd0", "prefill"),
    ("near-1", "pd0", "prefill"),
    ("x1", "pd0", "prefill"),
    ("near-2", "pd0", "decode"),
    ("near-3", "pd0", "decode"),
)


@asynccontextmanager
async def scene(
    *, busy: bool = True, control: FakeControl | dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Setup]:
    """A router and its workers, with or without traffic and a control loop, fake or (by its settings) real."""
    # a browser beside it needs the processor too
    config.setdefault("health", {"probe_s": 0.5, "load_poll_s": 0.5})
    if isinstance(control, dict):
        config["control"] = control
    async with serving(workers=WORKERS, **config) as s:
        if isinstance(control, FakeControl):
            install(s.router, control)
        if busy:
            traffic(s.router)
        yield s
