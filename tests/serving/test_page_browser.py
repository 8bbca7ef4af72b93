"""The page in a real headless Chromium: with and without data, by keyboard, on a phone, in the dark, under alarms.

Skipped where playwright or Chromium is missing (see `page_scene.browser_path`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas_serving.control import ControlLoop
from tests.serving.page_scene import FLAGS, FakeControl, browser_path, decisions, scene
from tests.serving.support import LONG, SHORT, TOKEN, Setup, until

pytestmark = pytest.mark.browser

#: Longest wait for something to appear; the machine may be busy.
WAIT_MS = 120_000


class Seen:
    """A page, and everything that went wrong in it or left it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.urls: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type in {"error", "warning"} else None)
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("request", lambda r: self.urls.append(r.url))

    async def log_in(self, token: str = TOKEN) -> None:
        """Give the token, by keyboard."""
        await self.page.keyboard.type(token)
        await self.page.keyboard.press("Enter")

    async def text(self, selector: str) -> str:
        """Text of an element."""
        return str(await self.page.inner_text(selector))

    async def wait(self, script: str) -> None:
        """Wait until a script is true; from outside, for the page itself may not evaluate text."""
        end_s = time.monotonic() + WAIT_MS / 1000
        while not await self.page.evaluate(script):
            assert time.monotonic() < end_s, f"never became true: {script}"
            await asyncio.sleep(0.05)


class Chromium:
    """One browser for all tests of this file, in an event loop that lasts as long."""

    def __init__(self, path: str) -> None:
        from playwright.async_api import async_playwright

        self._runner = asyncio.Runner()
        self._playwright = self._runner.run(async_playwright().start())
        self.browser: Any = self._runner.run(
            self._playwright.chromium.launch(executable_path=path, args=FLAGS)
        )

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test's coroutine with a limit of time."""

        async def limited() -> None:
            async with asyncio.timeout(600):
                await work()

        self._runner.run(limited())

    def close(self) -> None:
        """End it."""
        self._runner.run(self.browser.close())
        self._runner.run(self._playwright.stop())
        self._runner.close()

    @asynccontextmanager
    async def look(
        self, s: Setup, *, log_in: bool = True, width: int = 1280, **context: Any
    ) -> AsyncIterator[Seen]:
        """The page of a router with storage of its own; afterwards nothing may have gone wrong in it."""
        inner = await self.browser.new_context(viewport={"width": width, "height": 900}, **context)
        try:
            inner.set_default_timeout(WAIT_MS)
            seen = Seen(await inner.new_page())
            await seen.page.goto(f"http://127.0.0.1:{s.router.admin_port}/ui")
            await seen.wait("document.activeElement.id === 'token'")
            if log_in:
                await seen.log_in()
                await seen.page.wait_for_selector("#board", state="visible")
            yield seen
            assert not [u for u in seen.urls if TOKEN in u], "the token is in a URL"
            origin = f"http://127.0.0.1:{s.router.admin_port}/"
            assert not [u for u in seen.urls if not u.startswith(origin)], "something came from elsewhere"
            assert not seen.errors, seen.errors
        finally:
            await inner.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """The browser; without one the tests are skipped."""
    found = Chromium(browser_path())
    yield found
    found.close()


def test_token_is_asked_for_once_and_kept_in_the_tab(chromium: Chromium) -> None:
    async def work() -> None:
        async with scene(busy=False) as s, chromium.look(s, log_in=False) as seen:
            await seen.log_in("wrong-token-entirely")
            await seen.wait("document.querySelector('#login-error').textContent.includes('does not take')")
            assert not await seen.page.is_visible("#board")
            assert await seen.page.get_attribute("#token", "aria-invalid") == "true"
            await seen.wait("document.activeElement.id === 'token'")
            await seen.log_in("with ümlaut")
            await seen.wait("document.querySelector('#login-error').textContent.includes('plain')")
            await seen.log_in()
            await seen.page.wait_for_selector("#board", state="visible")
            assert await seen.page.input_value("#token") == ""
            await seen.page.reload()
            await seen.page.wait_for_selector("#board", state="visible")
            assert await seen.page.evaluate(
                "[localStorage.length, document.cookie, location.href.includes('?')]"
            ) == [
                0,
                "",
                False,
            ]
            await seen.page.click("#forget")
            await seen.page.wait_for_selector("#login", state="visible")
            assert await seen.page.evaluate("sessionStorage.length") == 0
            seen.errors = [e for e in seen.errors if "401" not in e]  # the browser notes the refused calls

    chromium.run(work)


def test_a_router_without_traffic_or_control_loop(chromium: Chromium) -> None:
    async def work() -> None:
        async with scene(busy=False) as s, chromium.look(s) as seen:
            assert await seen.text("#alarms") == "None."
            assert "no control loop" in await seen.text("#mode-note")
            assert not await seen.page.is_visible("#modes")
            assert "No first tokens" in await seen.text("#ttft")
            assert "No prompts" in await seen.text("#lengths")
            assert await seen.text("#rule") == "Remote above 100 tokens"
            assert await seen.page.locator("#decisions tr").count() == 1
            assert "NaN" not in await seen.text("body")
            assert "undefined" not in await seen.text("body")

    chromium.run(work)


def test_what_is_shown_is_what_the_router_has(chromium: Chromium) -> None:
    async def work() -> None:
        control = FakeControl()
        async with scene(control=control) as s:
            decisions(control, time.time())
            for prompt in (LONG, SHORT):
                await s.complete(prompt)
            async with chromium.look(s) as seen:
                state = (await s.admin("GET", "/ui/state")).json
                tiles = await seen.page.locator(".worker .name").all_inner_texts()
                assert tiles == ["far-0", "far-1", "near-0", "near-1", "x1", "near-2", "near-3"]
                assert await seen.page.get_by_role("heading", name="Prefill (2)").count() == 1
                assert await seen.page.get_by_role("heading", name="Decode (3)").count() == 1
                assert "x1: prefill to decode" in await seen.text("#conversions")
                assert "19.4K" in await seen.text("#lengths")
                for kind in ("local", "remote"):
                    bars = await seen.page.locator(f"#lengths rect.{kind}[y]").count()
                    assert bars == sum(n > 0 for n in state["lengths"][kind])
                for chart in ("ttft", "goodput", "link", "queues", "split", "rules"):
                    lines = seen.page.locator(f"#{chart} > svg > path.line")
                    assert await lines.count() >= 1, chart
                    drawn = await lines.first.get_attribute("d")
                    assert drawn is not None
                    assert len(drawn) > 1000, f"{chart}: 180 steps"
                    label = await seen.page.get_attribute(f"#{chart} > svg", "aria-label")
                    assert label is not None
                    assert "over 15 minutes" in label
                rows = await seen.page.locator("#decisions tr").all_inner_texts()
                assert len(rows) == 16
                assert "Remote when sooner by more than 2 s" in rows[0]
                assert "proposed: Never remote; a worker from decode to prefill" in rows[1]
                assert "clamped to 18,000 by the rate limit" in rows[2]
                assert "a worker from prefill to decode" in rows[3]

    chromium.run(work)


def test_the_mode_is_switched_by_keyboard_with_confirmation(chromium: Chromium) -> None:
    async def work() -> None:
        control = FakeControl()
        async with scene(control=control, busy=False) as s, chromium.look(s) as seen:
            page = seen.page
            active = "document.activeElement"
            for _ in range(60):
                await page.keyboard.press("Tab")
                if await page.evaluate(f"{active}.dataset.mode") == "shadow":
                    break
            assert await page.evaluate(f"{active}.matches(':focus-visible')")
            outline = await page.evaluate(
                f"getComputedStyle({active}).outlineStyle + getComputedStyle({active}).outlineWidth"
            )
            assert outline == "solid3px"
            await page.keyboard.press("Enter")
            await seen.wait("document.querySelector('#ask').open")
            assert await seen.text("#ask-title") == "Switch to shadow?"
            for _ in range(6):  # the keyboard stays in the dialog
                await page.keyboard.press("Tab")
                assert await page.evaluate(f"{active} === document.body || {active}.closest('#ask') !== null")
            await page.keyboard.press("Escape")
            await seen.wait("!document.querySelector('#ask').open")
            assert control.told == [], "nothing happens without a confirmation"
            assert await page.evaluate(f"{active}.dataset.mode") == "shadow", "the focus comes back"
            await page.keyboard.press("Enter")
            await page.keyboard.type("to watch <b>it</b>")
            await page.keyboard.press("Enter")
            await seen.wait(
                "document.querySelector('[data-mode=shadow]').getAttribute('aria-pressed') === 'true'"
            )
            assert control.told == [("shadow", "to watch <b>it</b>")]
            assert await seen.text("#status") == "The mode is shadow now."

    chromium.run(work)


def test_with_a_real_control_loop(chromium: Chromium) -> None:
    async def work() -> None:
        policy = "static:threshold_tokens=300"
        control = {"policy": policy, "mode": "active"}
        async with scene(busy=False, control=control) as s, chromium.look(s) as seen:
            loop = s.router.control
            assert isinstance(loop, ControlLoop)
            assert (await s.complete(SHORT)).status == 200
            await seen.wait("document.querySelector('#rule').textContent === 'Remote above 300 tokens'")
            await seen.wait("document.body.innerText.includes('static:threshold_tokens=300')")
            await until(lambda: loop.n > 3, "it decides")
            await seen.wait("document.querySelectorAll('#decisions tr').length > 2")
            await seen.page.click("[data-mode=off]")
            await seen.page.fill("#ask-reason", "to see the rule")
            await seen.page.click("#ask-yes")
            await seen.wait(
                "document.querySelector('[data-mode=off]').getAttribute('aria-pressed') === 'true'"
            )
            assert loop.mode == "off"
            await seen.wait("document.querySelector('#rule').textContent === 'Remote above 100 tokens'")

    chromium.run(work)


def test_a_refused_order_is_told_and_changes_nothing(chromium: Chromium) -> None:
    async def work() -> None:
        async with scene(control=FakeControl(), busy=False) as s, chromium.look(s) as seen:
            await seen.page.route(
                "**/mode",
                lambda r: r.fulfill(status=409, json={"error": {"message": "the policy cannot be loaded"}}),
            )
            await seen.page.click("[data-mode=off]")
            await seen.page.click("#ask-yes")
            await seen.wait("document.querySelector('#ask-error').textContent !== ''")
            assert await seen.text("#ask-error") == "Not done: the policy cannot be loaded."
            assert await seen.page.is_visible("#ask")
            seen.errors = [e for e in seen.errors if "409" not in e]

    chromium.run(work)


def test_override_and_its_clearing(chromium: Chromium) -> None:
    async def work() -> None:
        async with scene(busy=False) as s, chromium.look(s) as seen:
            page, holder = seen.page, s.router.forwarder.holder
            await page.click("#override")
            await page.fill("#rule-tokens", "2.5")
            assert await page.is_checked("#rule-threshold")
            await page.click("#ask-yes")
            assert await page.is_visible("#ask"), "not a whole number"
            await page.fill("#rule-tokens", "8000")
            await page.fill("#ask-reason", "<img src=x onerror=alert(1)>")
            await page.click("#ask-yes")
            await seen.wait("document.querySelector('#rule').textContent === 'Remote above 8,000 tokens'")
            assert holder.override is not None
            assert holder.threshold_tokens == 8000
            assert "<img src=x onerror=alert(1)>" in await seen.text("#alarms"), "text stays text"
            assert await page.locator("main img").count() == 0
            await page.click("#clear")
            await page.click("#ask-yes")
            await seen.wait("document.querySelector('#rule').textContent === 'Remote above 100 tokens'")
            assert holder.override is None
            await page.click("#override")
            await page.check("#rule-never")
            await page.click("#ask-yes")
            await seen.wait("document.querySelector('#rule').textContent === 'Never remote'")

    chromium.run(work)


def test_alarms_appear_are_announced_and_go(chromium: Chromium) -> None:
    async def work() -> None:
        control = FakeControl()
        async with scene(control=control) as s, chromium.look(s) as seen:
            page = seen.page
            assert await page.get_attribute("#alarms", "aria-live") == "assertive"
            control.alarms["stale"] = "metrics of near-2 are 41 s old"
            control.guard = "fallback"
            for name in ("far-0", "far-1"):
                await s.workers[name].close()
            await seen.wait("document.querySelectorAll('#alarms li.critical').length === 1")
            await seen.wait("document.querySelectorAll('.worker.down').length === 2")
            texts = await page.locator("#alarms li").all_inner_texts()
            assert texts[0] == "Critical: No worker is ready for: remote prefill prfaas0."
            assert "Warning: metrics of near-2 are 41 s old" in texts
            assert (await page.title()).startswith("(4) ")
            await page.evaluate("document.querySelector('#alarms li').dataset.same = '1'")
            control.alarms.clear()
            control.guard = "ok"
            await seen.wait("document.querySelectorAll('#alarms li').length === 2")
            assert await page.get_attribute("#alarms li", "data-same") == "1", (
                "what stays is not announced again"
            )

    chromium.run(work)


def test_a_lost_router_is_told_and_found_again(chromium: Chromium) -> None:
    async def work() -> None:
        async with scene(busy=False) as s, chromium.look(s) as seen:
            await seen.page.route("**/ui/state", lambda r: r.abort())
            await seen.wait("document.querySelector('#status').textContent.startsWith('No connection')")
            assert await seen.page.evaluate("document.body.classList.contains('lost')")
            await seen.page.unroute("**/ui/state")
            await seen.wait("document.querySelector('#status').textContent === 'Connected again.'")
            assert not await seen.page.evaluate("document.body.classList.contains('lost')")
            seen.errors = [e for e in seen.errors if "ERR_FAILED" not in e]

    chromium.run(work)


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (320, "dark")])
def test_a_phone(chromium: Chromium, width: int, scheme: str) -> None:
    async def work() -> None:
        control = FakeControl(alarms={"x": "out_of_range: " + "a_very_long_field_name_" * 8})
        async with scene(control=control) as s:
            decisions(control, time.time())
            async with chromium.look(
                s, width=width, color_scheme=scheme, has_touch=True, is_mobile=True
            ) as seen:
                page = seen.page
                assert await page.evaluate("document.documentElement.scrollWidth") == width, (
                    "no sideways scrolling"
                )
                small = await page.evaluate(
                    "[...document.querySelectorAll('button')].filter(b => b.offsetParent)"
                    ".filter(b => b.offsetHeight < 44).map(b => b.textContent)"
                )
                assert small == [], "targets are large enough for a finger"
                light = await page.evaluate(
                    "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) > 380"
                )
                assert light == (scheme == "light")
                await page.tap("[data-mode=off]")
                await page.tap("#ask-yes")
                await until(lambda: control.mode == "off", "the mode is off", WAIT_MS / 1000)

    chromium.run(work)


def test_any_moment_is_read_by_keyboard_and_pointer(chromium: Chromium) -> None:
    async def work() -> None:
        async with scene() as s, chromium.look(s) as seen:
            page = seen.page
            assert await seen.text("#moment-text") == "now"
            await page.focus("#moment")
            for _ in range(20):
                await page.keyboard.press("ArrowLeft")
            told = await page.get_attribute("#moment", "aria-valuetext")
            assert told is not None
            assert told.startswith("1 min "), told
            steps = s.router.page.history.steps
            shown = await page.locator("#split .legend b").all_inner_texts()
            assert shown == ["2", "3"]
            await page.keyboard.press("Home")
            assert await page.locator("#split .legend b").all_inner_texts() == ["3", "2"], (
                "before the conversion"
            )
            assert await page.locator("svg .cursor").count() == 6
            await page.locator("#split").scroll_into_view_if_needed()
            box = await page.locator("#split > svg").bounding_box()
            assert box is not None
            await page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60)
            assert await page.locator("#split .legend b").all_inner_texts() == ["2", "3"]
            assert await seen.text("#moment-text") != "now"
            await page.mouse.move(2, 2)
            await seen.wait("document.querySelector('#moment-text').textContent === 'now'")
            assert len(steps) > 0

    chromium.run(work)


def test_structure_for_assistive_technology(chromium: Chromium) -> None:
    async def work() -> None:
        control = FakeControl()
        async with scene(control=control) as s:
            decisions(control, time.time())
            async with chromium.look(s, reduced_motion="reduce") as seen:
                page = seen.page
                assert await page.get_by_role("main").count() == 1
                assert await page.get_by_role("banner").count() == 1
                assert await page.get_by_role("heading", level=1).count() == 1
                unnamed = await page.evaluate(
                    "[...document.querySelectorAll('button, input, svg[role=img], section, [role=region]')]"
                    ".filter(e => !e.ariaLabel && !e.textContent.trim() && !e.labels?.length"
                    " && !e.getAttribute('aria-labelledby')).map(e => e.outerHTML)"
                )
                assert unnamed == []
                columns = await page.get_by_role("columnheader").all_inner_texts()
                assert columns == ["Time", "In force", "By", "Reason"]
                assert await page.get_by_role("row").count() == 17
                moving = await page.evaluate("document.getAnimations().length")
                assert moving == 0, "nothing moves for those who do not want it"
                await page.keyboard.press("Home")

    chromium.run(work)


def test_a_hidden_tab_stops_asking(chromium: Chromium) -> None:
    async def work() -> None:
        async with scene(busy=False) as s, chromium.look(s) as seen:
            await seen.page.evaluate(
                "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            await asyncio.sleep(0.5)
            before = len(seen.urls)
            await asyncio.sleep(3.0)
            assert len(seen.urls) == before
            await seen.page.evaluate(
                "Object.defineProperty(document, 'hidden', {get: () => false, configurable: true});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            await until(lambda: len(seen.urls) > before, "it asks again", WAIT_MS / 1000)

    chromium.run(work)
