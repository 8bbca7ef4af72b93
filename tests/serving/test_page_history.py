"""What the page remembers and says, without a browser."""

from __future__ import annotations

import asyncio
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prfaas_serving.ui
from prfaas_env.decision import ClusterDecision
from prfaas_env.telemetry import LENGTH_BIN_EDGES_TOKENS, length_bin
from prfaas_serving.ui.history import (
    N_STEPS,
    N_TTFT_BINS,
    STEP_S,
    TTFT_BIN_RATIO,
    History,
    quantile_s,
    ttft_bin,
)
from tests.serving.page_scene import LOCAL, REMOTE, FakeControl, Line, decisions, install, logged, scene
from tests.serving.support import LONG, SHORT, run, serving, until

FOLDER = Path(prfaas_serving.ui.__file__).parent


# ---------------------------------------------------------------------------------------- quantiles


def _counts(times_s: list[float]) -> Any:
    counts = np.zeros(N_TTFT_BINS, dtype=np.int64)
    for t in times_s:
        counts[ttft_bin(t)] += 1
    return counts


@given(
    st.lists(st.floats(min_value=0.001, max_value=3000.0), min_size=1, max_size=200),
    st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_are_right_within_half_a_bin(times_s: list[float], share: float) -> None:
    exact = sorted(times_s)[max(math.ceil(share * len(times_s)), 1) - 1]
    found = quantile_s(_counts(times_s), share)
    assert found is not None
    assert abs(math.log(found / exact)) <= 0.5 * math.log(TTFT_BIN_RATIO) + 1e-9


def test_quantiles_at_the_ends() -> None:
    assert quantile_s(_counts([]), 0.5) is None
    assert ttft_bin(0.0) == ttft_bin(0.001) == 0
    assert ttft_bin(3600.0) < N_TTFT_BINS - 1, "an hour has a bin of its own"
    assert ttft_bin(1e9) == N_TTFT_BINS - 1


# ------------------------------------------------------------------------------------------ history


def test_a_step_holds_what_happened_in_it() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            f = s.router.forwarder
            history = History(f, lambda: frozenset({"near-1"}), now_s=1000.0)
            link = f.paths.links["prfaas0"]
            for tokens, route in ((128, LOCAL), (5_000, LOCAL), (50_000, REMOTE)):
                history.arrival(1001.0, tokens + 7, tokens, 7, route)
            for ttft_s in (0.1, 0.2, 0.4, 10.0):
                history.first_token(1002.0, ttft_s, LOCAL)
            f.served(0.1, 0.020)
            f.served(0.1, 0.025)
            f.served(0.1, 0.026)  # over the paper's 25 ms
            f.metrics.rejected.labels("saturated").inc(2)
            f.metrics.stream_errors.labels("broken").inc()
            flow = link.routed(2.0 * link.nominal_bps)
            link.opened(flow, 1000.0)
            link.closed(flow, 1002.0, arrived=True)
            history.tick(1005.0, 2000.0)
            step = history.steps[-1]
            assert (step.arrivals_rps, step.remote_rps) == (3 / 5, 1 / 5)
            assert (step.finished_rps, step.good_rps, step.refused_rps) == (3 / 5, 2 / 5, 3 / 5)
            assert step.ttft_p50_s == pytest.approx(0.2, rel=0.03)
            assert step.ttft_p99_s == pytest.approx(10.0, rel=0.03)
            assert step.link_use == {"prfaas0": pytest.approx(2 / 5)}
            assert (step.prefill_workers, step.decode_workers, step.converting_workers) == (2, 2, 1)
            assert step.threshold_tokens == 100
            lengths = history.lengths()
            assert sum(lengths["local"]) == 2
            assert sum(lengths["remote"]) == 1
            assert lengths["remote"][length_bin(50_000)] == 1
            assert lengths["edges_tokens"] == LENGTH_BIN_EDGES_TOKENS.tolist()
            f.holder.set(ClusterDecision(margin_s=math.inf), "policy", "x")
            history.arrival(1006.0, 1, 1, 0, LOCAL)
            assert history.totals() == {
                "arrivals": 4,
                "remote": 1,
                "finished": 3,
                "good": 2,
                "refused": 3,
            }, "the step under way counts"
            assert history.span_s(1007.5) == 7.5
            history.tick(1015.0, 2010.0)
            assert history.steps[-1].arrivals_rps == 1 / 10, "over its true length"
            assert history.steps[-1].ttft_p50_s is None
            assert (history.steps[-1].threshold_tokens, history.steps[-1].margin_s) == (None, None), "never"

    run(work)


def test_the_window_forgets_and_does_not_grow() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            history = History(s.router.forwarder, frozenset, now_s=0.0)
            history.arrival(0.0, 9, 9, 0, REMOTE)
            history.first_token(0.0, 1.0, REMOTE)
            s.router.forwarder.served(1.0, 0.01)
            for k in range(1, N_STEPS + 1):
                history.tick(k * STEP_S, float(k))
            assert history.totals()["arrivals"] == history.ttft()["count"] == 1
            for k in range(N_STEPS + 1, 3 * N_STEPS):
                history.tick(k * STEP_S, float(k))
            assert len(history.steps) == N_STEPS
            assert history.ttft()["count"] == 0
            assert not any(history.totals().values())
            assert sum(history.lengths()["remote"]) == 0
            assert history.span_s(3 * N_STEPS * STEP_S) == (N_STEPS + 1) * STEP_S
            columns = history.columns()
            assert {len(v) for v in columns.values() if isinstance(v, list)} == {N_STEPS}
            assert {len(v) for c in columns.values() if isinstance(c, dict) for v in c.values()} == {N_STEPS}

    run(work)


def test_link_use_is_never_above_capacity_and_never_falls_back() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            link = s.router.forwarder.paths.links["prfaas0"]
            history = History(s.router.forwarder, frozenset, now_s=0.0)
            one = link.routed(100.0 * link.nominal_bps)
            link.opened(one, 0.0)
            carried = [link.carried_bits(t / 10) for t in range(1, 40)]
            assert carried == sorted(carried)
            assert carried[-1] == pytest.approx(3.9 * link.nominal_bps), "a transfer under way counts"
            link.closed(one, 4.0, arrived=True)  # all of it at once: more than the link can carry
            history.tick(5.0, 5.0)
            assert history.steps[-1].link_use["prfaas0"] == 1.0
            before = link.carried_bits(5.0)
            two = link.routed(link.nominal_bps)
            link.opened(two, 5.0)
            link.carried_bits(5.5)
            link.closed(two, 6.0, arrived=False)
            assert link.carried_bits(6.0) >= before
            history.tick(10.0, 10.0)
            assert 0.0 <= history.steps[-1].link_use["prfaas0"] <= 1.0

    run(work)


def test_real_requests_are_counted() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            for prompt in (LONG, LONG, SHORT):
                assert (await s.complete(prompt)).status == 200
            history = s.router.page.history
            assert (history.totals()["arrivals"], history.totals()["remote"]) == (3, 2)
            assert history.totals()["finished"] == 3
            assert history.ttft()["count"] == 3
            assert sum(history.lengths()["remote"]) == 2
            assert s.metric("finished_total") == 3.0

    run(work)


def test_a_change_of_role_is_seen() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            reply = await s.admin("POST", "/workers/near-0/role", {"role": "decode"})
            assert reply.status == 200
            seen = s.router.page.history.conversions
            await until(lambda: seen, "the page saw the conversion")
            assert [(c.worker, c.from_role, c.to_role) for c in seen] == [("near-0", "prefill", "decode")]

    run(work)


# ---------------------------------------------------------------------------------- state and alarms


def test_state_without_traffic_and_without_a_control_loop() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            reply = await s.admin("GET", "/ui/state")
            state = reply.json
            assert reply.status == 200
            assert reply.headers["Cache-Control"] == "no-store"
            assert state["control"] is None
            assert state["alarms"] == []
            assert state["ttft"] == {"count": 0, "p50_s": None, "p90_s": None, "p99_s": None}
            assert state["slo"] == {"ttft_s": None, "tpot_s": 0.025}
            assert b"NaN" not in reply.body
            assert b"Infinity" not in reply.body

    run(work)


def test_state_with_a_control_loop() -> None:
    async def work() -> None:
        control = FakeControl(mode="shadow", guard="hold", alarms={"stale": "metrics are 12 s old"})
        async with scene(control=control) as s:
            decisions(control, time.time())
            for k in range(50):
                control.recent.append(Line(100 + k, 0.0, logged(k), logged("inf", 0)))
            state = (await s.admin("GET", "/ui/state")).json
            assert state["control"]["mode"] == "shadow"
            assert [d["n"] for d in state["control"]["decisions"]] == list(range(149, 129, -1)), (
                "newest first"
            )
            assert {a["name"] for a in state["alarms"]} == {"guard_hold", "stale"}
            assert len(state["steps"]["unix_s"]) == N_STEPS
            assert s.metric("alarm", alarm="stale", level="warning") == 1.0
            assert s.metric("alarm", alarm="guard_hold", level="warning") == 1.0
            control.alarms.clear()
            assert s.metric("alarm", alarm="stale", level="warning") == 0.0

    run(work)


def test_alarms_of_the_router_itself() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            f = s.router.forwarder
            f.paths.links["prfaas0"].measured_bps = 0.3 * f.paths.links["prfaas0"].nominal_bps
            s.worker("near-3").kv_moved_share = 0.0
            s.worker("near-3").breaker.failure(time.monotonic(), False)
            for _ in range(s.router.config.health.breaker_failures):
                s.worker("near-2").breaker.failure(time.monotonic(), False)
            await s.admin("PUT", "/override", {"never_remote": True, "reason": "night"})
            for name in ("far-0", "far-1"):
                await s.workers[name].close()
            await until(lambda: s.worker("far-0").state == s.worker("far-1").state == "down", "both down")
            found = [(a.name, a.level) for a in s.router.page.alarms()]
            assert found == [
                ("not_ready", "critical"),
                ("kv_not_moving", "critical"),
                ("worker_down", "warning"),
                ("breaker_open", "warning"),
                ("link_slow", "warning"),
                ("override", "notice"),
            ]
            texts = {a.name: a.text for a in s.router.page.alarms()}
            assert "30%" in texts["link_slow"]
            assert "far-0, far-1" in texts["worker_down"]
            assert texts["breaker_open"].endswith("near-2.")
            assert "night" in texts["override"]

    run(work)


def test_the_state_is_not_made_anew_for_every_reader() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            page, made = s.router.page, []
            inner = page.state
            page.state = lambda: made.append(1) or inner()  # type: ignore[method-assign,func-returns-value]
            replies = [(await s.admin("GET", "/ui/state")).body for _ in range(5)]
            assert len(made) <= 2
            assert orjson.loads(replies[0])["pd"] == "pd0"

    run(work)


# --------------------------------------------------------------------------------------------- HTTP


def test_files_need_no_token_and_the_state_does() -> None:
    async def work() -> None:
        async with scene(busy=False, control=FakeControl()) as s:
            page = await s.admin("GET", "/ui", token=None)
            assert page.status == 200
            policy = page.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert page.headers["X-Content-Type-Options"] == "nosniff"
            assert page.headers["Referrer-Policy"] == "no-referrer"
            named = re.findall(r'(?:src|href)="(ui/[^"]+)"', page.body.decode())
            assert set(named) == {"ui/page.js", "ui/style.css", "ui/icon.svg"}
            for name in (*named, "ui/charts.js", "ui/words.js"):
                reply = await s.admin("GET", f"/{name}", token=None)
                assert reply.status == 200, name
                assert reply.headers["Content-Security-Policy"] == policy
            for token in (None, "", "wrong"):
                assert (await s.admin("GET", "/ui/state", token=token)).status == 401
                assert (
                    await s.admin("PUT", "/mode", {"mode": "off", "reason": "x"}, token=token)
                ).status == 401
            assert (await s.admin("GET", "/ui/../state", token=None)).status in {401, 404}
            assert (await s.admin("GET", "/ui/history.py", token=None)).status == 401, (
                "files are listed by name"
            )
            assert (await s.admin("POST", "/ui", {}, token=None)).status == 405
            assert (await s.get("/ui")).status == 404, "nothing of it on the public port"

    run(work)


def test_an_unchanged_file_is_not_sent_again() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            url = f"http://127.0.0.1:{s.router.admin_port}/ui"
            async with s.session.get(url) as first:
                tag = first.headers["ETag"]
            async with s.session.get(url, headers={"If-None-Match": tag}) as again:
                assert (again.status, await again.read()) == (304, b"")
            async with s.session.get(url + "/", allow_redirects=False) as slash:
                assert (slash.status, slash.headers["Location"]) == (308, "../ui")

    run(work)


def test_a_router_without_an_admin_port_has_no_page_to_reach() -> None:
    async def work() -> None:
        async with serving(admin=None) as s:
            assert (await s.get("/ui")).status == 404
            assert s.router.admin_port == 0

    run(work)


# ------------------------------------------------------------------------------------------- sources


def _sources(suffix: str) -> dict[str, str]:
    return {p.name: p.read_text(encoding="utf-8") for p in FOLDER.glob(f"*{suffix}")}


def test_text_enters_the_page_as_text_alone() -> None:
    banned = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
    )
    scripts = _sources(".js")
    assert set(scripts) == {"page.js", "charts.js", "words.js"}
    for name, text in scripts.items():
        assert not [word for word in banned if word in text], name
        assert "localStorage" not in text, "the token is forgotten with the tab"
        assert "console." not in text, name


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in (_sources(".js") | _sources(".css") | _sources(".html") | _sources(".svg")).items():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) - {"http://www.w3.org/2000/svg"}
        assert not found, f"{name}: {found}"
        assert "@import" not in text, name
    html = _sources(".html")["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)", html), "no inline script"
    assert not re.search(r"<style|\sstyle=|\son\w+=", html), "no inline style or handler"
    assert not re.search(r'id="token"[^>]*\sname=', html), "a token without a name cannot be sent by a form"


def test_ids_in_the_script_exist_once_in_the_page() -> None:
    html = _sources(".html")["index.html"]
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'\$\("([^"]+)"\)', _sources(".js")["page.js"]))
    assert used <= set(ids), used - set(ids)
    for target in re.findall(r'(?:aria-labelledby|aria-describedby|for)="([^"]+)"', html):
        assert set(target.split()) <= set(ids), target


def _luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    """Text at least 4.5:1, lines, borders of controls and focus at least 3:1 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    css = _sources(".css")["style.css"]
    blocks = re.findall(r":root \{([^}]*)\}", css)
    assert len(blocks) == 2
    found = dict(re.findall(r"--([\w-]+): (#\w+);", blocks[0]))
    if scheme == "dark":
        found |= dict(re.findall(r"--([\w-]+): (#\w+);", blocks[1]))
    colours = {k: v if len(v) == 7 else "#" + "".join(2 * c for c in v[1:]) for k, v in found.items()}
    text = [("text", b) for b in ("back", "card", "warn-back", "bad-back", "good-back", "note-back")]
    text += [
        ("soft", "back"),
        ("soft", "card"),
        ("soft", "warn-back"),
        ("soft", "bad-back"),
        ("on-accent", "accent"),
    ]
    text += [("warn", "card"), ("warn", "warn-back"), ("bad", "card"), ("bad", "bad-back")]
    lines = [(k, "card") for k in ("k1", "k2", "k3", "k4", "field", "focus", "warn", "bad")]
    lines += [("field", "back"), ("focus", "back")]
    low = {
        p: _contrast(colours[p[0]], colours[p[1]])
        for p in text
        if _contrast(colours[p[0]], colours[p[1]]) < 4.5
    }
    low |= {
        p: _contrast(colours[p[0]], colours[p[1]])
        for p in lines
        if _contrast(colours[p[0]], colours[p[1]]) < 3
    }
    assert not low


def test_the_history_is_closed_with_the_router() -> None:
    async def work() -> None:
        async with scene(busy=False) as s:
            page = s.router.page
            await page.close()
            assert page.history not in s.router.forwarder.listeners
            install(s.router, FakeControl())
            assert (await s.admin("GET", "/ui/state")).status == 200, "what is there is still shown"
            await asyncio.sleep(0)

    run(work)
