"""What the page for operators is made of: alarms, state as JSON, and its files.

The files hold no secret and are served without a token; the state needs it. The browser loads nothing from anywhere
else, and runs no script but the page's own (`CONTENT_SECURITY_POLICY`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest

from prfaas_serving.ui.history import STEP_S, History, waiting

if TYPE_CHECKING:
    from prfaas_serving.app import Router
    from prfaas_serving.control import ControlLoop

log = logging.getLogger("prfaas_serving.ui")

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
#: Path -> (file, content type).
_FILES = {
    "/ui": ("index.html", "text/html"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/charts.js": ("charts.js", "text/javascript"),
    "/ui/words.js": ("words.js", "text/javascript"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}

#: How often roles are looked at; a step of the history is a whole number of these.
_LOOK_S = 1.0
#: The state is made anew at most this often, however many look.
_FRESH_S = 0.5
#: Decisions and changes shown.
_SHOWN = 20
#: A link whose observed capacity is below this share of nominal is told about.
_SLOW_LINK = 0.5

Level = Literal["critical", "warning", "notice"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator should know now. The name is one of few, the text is for people."""

    name: str
    level: Level
    text: str


@lru_cache(maxsize=16)
def _file(path: str) -> tuple[bytes, str, str] | None:
    """(content, content type, tag) of a file of the page."""
    known = _FILES.get(path)
    if known is None:
        return None
    name, content_type = known
    content = files(__package__).joinpath(name).read_bytes()
    return content, content_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


class Page:
    """The page of a router.

    Args:
        router: it must have been started.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._f = router.forwarder
        self.history = History(router.forwarder, lambda: router.forwarder.fleet.changes.under_way)
        self._task: asyncio.Task[None] | None = None
        self._state = b""
        self._made_s = -1e9

    def start(self) -> None:
        """Begin to remember."""
        self._f.listeners.append(self.history)
        self._f.metrics.watch_alarms(lambda: [(a.name, a.level) for a in self.alarms()])
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.history in self._f.listeners:
            self._f.listeners.remove(self.history)

    async def _watch(self) -> None:
        ticked_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                now_s = time.monotonic()
                if now_s - ticked_s >= STEP_S - _LOOK_S / 2:
                    ticked_s = now_s
                    self.history.tick(now_s, time.time())
                else:
                    self.history.watch_roles(time.time())
            except Exception:  # a page without a new step is better than one that stops for good
                log.exception("the history of the page")

    # ------------------------------------------------------------------ HTTP

    def open_answer(self, request: BaseRequest) -> web.Response | None:
        """The answer to a request that needs no token; None if this is none."""
        path = request.path
        if path == "/ui/":
            # names in the page are relative to /ui
            return web.Response(status=308, headers={**_HEADERS, "Location": "../ui"})
        found = _file(path)
        if found is None:
            return None
        content, content_type, tag = found
        headers = {**_HEADERS, "ETag": tag}
        if request.method not in {"GET", "HEAD"}:
            return web.Response(status=405, headers={**headers, "Allow": "GET, HEAD"})
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, content_type=content_type, charset="utf-8", headers=headers)

    def state_answer(self) -> web.Response:
        """The state as an answer."""
        return web.Response(
            body=self.state_json(),
            content_type="application/json",
            headers={**_HEADERS, "Cache-Control": "no-store"},
        )

    # ------------------------------------------------------------------ state

    @property
    def control(self) -> ControlLoop | None:
        """The control loop, if there is one."""
        return self._router.control

    def alarms(self) -> list[Alarm]:
        """What is wrong now, worst first."""
        router, f, now_s = self._router, self._f, time.monotonic()
        found: list[Alarm] = []

        def say(name: str, level: Level, text: str) -> None:
            found.append(Alarm(name, level, text))

        missing = router.health.missing()
        if missing:
            say("not_ready", "critical", f"No worker is ready for: {', '.join(missing)}.")
        still = [w.name for w in f.fleet if w.kv_moved_share == 0.0]
        if still:
            say("kv_not_moving", "critical", f"Requests succeed but no KV moves to: {', '.join(still)}.")
        down = [w.name for w in f.fleet if w.state == "down"]
        if down:
            say("worker_down", "warning", f"Health checks fail: {', '.join(down)}.")
        broken = [w.name for w in f.fleet if w.state != "down" and w.breaker.state(now_s) != "closed"]
        if broken:
            say("breaker_open", "warning", f"Kept out after failures: {', '.join(broken)}.")
        found += self._of_moves()
        for name, link in f.paths.links.items():
            share = link.observed_bps(now_s) / link.nominal_bps
            if share < _SLOW_LINK:
                say(
                    "link_slow", "warning", f"The link to {name} carries {share:.0%} of its nominal capacity."
                )
        if router.draining:
            say("draining", "warning", "The router is shutting down and takes no new requests.")
        if f.holder.override is not None:
            reason = f.holder.history[-1].reason
            say("override", "notice", f"An operator's override is in force: {reason}.")
        control = self.control
        if control is not None:
            if control.guard != "ok":
                words = {
                    "hold": "holds the last decision",
                    "fallback": "has fallen back to the planned threshold",
                }
                does = words.get(control.guard, control.guard)
                say(f"guard_{control.guard}", "warning", f"The guard of the control loop {does}.")
            for name, text in control.alarms.items():
                say(name, "warning", text)
        order = {"critical": 0, "warning": 1, "notice": 2}
        return sorted(found, key=lambda a: order[a.level])

    def _of_moves(self) -> list[Alarm]:
        """What node moves left behind."""
        alarms = dict(self._router.mover.alarms)
        file = alarms.pop("state_file", None)
        found = [
            Alarm("worker_out", "critical", f"Taken out after a node move: {text}.")
            for text in alarms.values()
        ]
        if file is not None:
            found.append(Alarm("state_file", "warning", f"Node moves are not written down: {file}."))
        return found

    def state(self) -> dict[str, Any]:
        """Everything that is shown."""
        router, f, history = self._router, self._f, self.history
        scenario = router.resolved.scenario
        return {
            "unix_s": time.time(),
            "uptime_s": time.monotonic() - router.started_s,
            "scenario": scenario.name,
            "scenario_hash": scenario.hash,
            "pd": f.fleet.pd,
            "slo": {"ttft_s": scenario.slo.ttft_s, "tpot_s": scenario.slo.tpot_s},
            "alarms": [asdict(a) for a in self.alarms()],
            "router": router.admin.state(),
            "waiting": [
                {"cluster": p.cluster, "role": p.role, "requests": waiting(p)} for p in f.fleet.pools()
            ],
            "changing": sorted(router.forwarder.fleet.changes.under_way),
            "step_s": STEP_S,
            "steps": history.columns(),
            "ttft": history.ttft(),
            "totals": history.totals(),
            "span_s": history.span_s(time.monotonic()),
            "lengths": history.lengths(),
            "conversions": [asdict(c) for c in reversed(history.conversions)],
            "changes": [c.as_json() for c in list(f.holder.history)[: -_SHOWN - 1 : -1]],
            "control": None if self.control is None else _control(self.control),
        }

    def state_json(self) -> bytes:
        """The state as JSON, made at most twice a second."""
        now_s = time.monotonic()
        if now_s - self._made_s >= _FRESH_S:
            self._state = orjson.dumps(self.state(), option=orjson.OPT_SERIALIZE_NUMPY)
            self._made_s = now_s
        return self._state


def _control(control: ControlLoop) -> dict[str, Any]:
    lines = list(control.recent)[: -_SHOWN - 1 : -1]
    return {
        "mode": control.mode,
        "policy_spec": control.policy_spec,
        "policy_hash": control.policy_hash,
        "guard": control.guard,
        "decisions": [_line(line) for line in lines],
    }


#: Of a decision line, what people read; the telemetry values stay in the log.
_LINE = ("n", "unix_s", "mode", "proposed", "acted", "by", "reason", "guard", "decide_us")


def _line(line: Any) -> dict[str, Any]:
    found = line.as_json()
    return {name: found[name] for name in _LINE}
