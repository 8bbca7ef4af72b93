"""The steps of a node move against engines in memory: every step failing, and a router killed at every point."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Move
from prfaas_serving.config import RoleName, RouterConfig
from prfaas_serving.fleet import Fleet, Worker
from prfaas_serving.moves.base import Actuator, Site, StepFailed
from prfaas_serving.moves.mover import Mover
from prfaas_serving.moves.orders import MoveOrders, MoveRefused
from prfaas_serving.moves.state import MoveState, OpenMove
from prfaas_serving.requests import ClientError
from tests.serving.virtual import run_virtually

CONFIGURED: dict[str, RoleName] = {"l1": "prefill", "l2": "prefill", "d1": "decode", "d2": "decode"}


class Killed(BaseException):
    """The router's process ends here: nothing after this is run."""


class World:
    """What outlives a router: engines and the state file.

    Args:
        folder: of the state file; None = the router has none.
        asks: whether engines have a role of their own.
    """

    def __init__(self, folder: Path | None, asks: bool = True) -> None:
        self.file = None if folder is None else folder / "moves.json"
        self.asks = asks
        self.roles: dict[str, RoleName] = dict(CONFIGURED)
        self.broken: set[str] = set()
        self.dead: set[str] = set()
        self.plan: list[str] = []
        """What becomes of the next calls; `ok` when it is empty."""
        self.calls: list[str] = []
        self.kill_at: int | None = None
        self.points = 0
        self.killed = False
        self.watch: Callable[[], None] = lambda: None
        self.slow_s = 0.0

    def point(self, what: str) -> None:
        """Here the router may be killed."""
        if self.killed or self.points == self.kill_at:
            self.killed = True
            raise Killed(what)
        self.points += 1
        self.watch()

    def revive(self) -> None:
        """All engines are restarted where they need to be; nothing goes wrong any more."""
        for name in self.broken | self.dead:
            self.roles[name] = CONFIGURED[name]
        self.broken.clear()
        self.dead.clear()
        self.plan.clear()

    def config(self, **entry: RoleName) -> RouterConfig:
        """Of a router in front of the engines; `entry` are roles that differ from the usual ones."""
        roles = {**CONFIGURED, **entry}
        return RouterConfig.model_validate(
            {
                "backend": "vllm_nixl",
                "workers": [
                    {"name": n, "url": f"http://{n}:1", "cluster": "pd0", "role": r} for n, r in roles.items()
                ],
                "moves": {
                    "state_file": None if self.file is None else str(self.file),
                    "switch_s": 5.0,
                    "verify_s": 5.0,
                    "retry_s": 30.0,
                },
            }
        )


class State(MoveState):
    """Writes that a router can be killed before and after."""

    world: World

    def _write(self, **changes: Any) -> None:
        self.world.point("before a write")
        super()._write(**changes)
        self.world.point("after a write")


class Engines(Actuator):
    """The actuator of the tests."""

    kind = "engines"

    def __init__(self, site: Site, world: World) -> None:
        super().__init__(site)
        self.world = world
        self.asks = world.asks  # type: ignore[misc]

    async def switch(self, move: OpenMove, role: RoleName) -> None:
        w, name = self.world, move.worker
        w.point("before a switch")
        w.calls.append(f"switch {name} {role}")
        await asyncio.sleep(w.slow_s)
        what = w.plan.pop(0) if w.plan else "ok"
        if what == "dies":
            w.dead.add(name)
        if name in w.dead:
            raise StepFailed("not_switched", f"worker {name!r} cannot be reached")
        if what == "broken" or name in w.broken:
            w.broken.add(name)
            raise StepFailed("not_switched", "restart required", safe=False)
        if what == "refused":
            raise StepFailed("not_switched", "refused")
        if what == "busy":
            raise StepFailed("not_switched", "not idle", busy=True)
        if what == "other":
            w.roles[name] = "both"
        else:
            w.roles[name] = role
        w.point("after a switch")
        if what == "lost":
            raise StepFailed("not_switched", "the answer was lost")

    async def role_of(self, move: OpenMove) -> RoleName | None:
        self.world.point("before a question")
        self.world.calls.append(f"ask {move.worker}")
        if not self.world.asks:
            return None
        if move.worker in self.world.dead:
            raise StepFailed("not_verified", f"worker {move.worker!r} cannot be reached")
        return self.world.roles[move.worker]


class Run:
    """One run of a router over the world."""

    def __init__(self, world: World, **entry: RoleName) -> None:
        world.killed, world.points = False, 0
        config = world.config(**entry)
        self.world = world
        self.fleet = Fleet(config.model_copy(update={"workers": ()}), "pd0", ("prfaas0",))
        self.state = State(None if world.file is None else str(world.file), "pd0")
        self.state.world = world
        self.fleet.state = self.state
        for spec in config.workers:
            worker = self.fleet.add(spec, "config")
            worker.came_up(time.monotonic() - 100.0)
        site = Site(self.fleet, None, self.generate)  # type: ignore[arg-type]
        self.mover = Mover(self.fleet, Engines(site, world), config.moves)
        world.watch = self.look
        self.look()

    async def generate(self, worker: Worker, role: RoleName) -> str | None:
        """One generation."""
        self.world.point("before a generation")
        self.world.calls.append(f"generate {worker.name} {role}")
        what = self.world.plan.pop(0) if self.world.plan else "ok"
        name = worker.name
        if what == "dies":
            self.world.dead.add(name)
        if name in self.world.dead | self.world.broken:
            return "the engine is dead"
        if what in {"refused", "broken", "lost", "other"}:
            return "rubbish"
        if self.world.asks and self.world.roles[name] != role:
            return "wrong role"
        return None

    def look(self) -> None:
        """At every point somebody serves each role, and nobody serves what the engine is not."""
        for role in ("prefill", "decode"):
            serving = [w for w in self.fleet if w.role == role and not w.known_down]
            assert serving, f"nobody serves {role}"
            if self.world.asks:
                wrong = [w.name for w in serving if self.world.roles[w.name] != role]
                assert not wrong, f"{wrong} are sent what only {role} workers can do"

    def worker(self, name: str) -> Worker:
        """By name."""
        return self.fleet.workers[name]

    def roles(self) -> dict[str, str]:
        """What each worker serves as; `out` for those that do not."""
        return {w.name: "out" if "out" in w.holds else w.role for w in self.fleet}

    def settled(self) -> None:
        """Nothing is under way, everything agrees."""
        self.look()
        assert self.state.move is None
        assert not self.fleet.changes.under_way
        for worker in self.fleet:
            out = "out" in worker.holds
            assert worker.holds <= {"out"}
            assert (worker.name in self.mover.alarms) == out
            assert (worker.name in self.state.out) == out
            if self.world.asks and not out and worker.name not in self.world.dead:
                assert worker.role == self.world.roles[worker.name]
        if self.world.file is not None and self.world.file.exists():
            again = State(str(self.world.file), "pd0")
            assert again.move is None
            assert set(again.out) == set(self.state.out)
            assert {w.name: again.role_of(w.spec) for w in self.fleet} == {w.name: w.role for w in self.fleet}


def virtually(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test in virtual time."""
    run_virtually(work())


# ------------------------------------------------------------------------------------------------ by hand


def test_a_move_goes_through_its_steps(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        steps: list[Any] = []

        def watch() -> None:
            run.look()
            found = json.loads(world.file.read_text()) if world.file.exists() else {}  # type: ignore[union-attr]
            move = found.get("move")
            steps.append(None if move is None else move["step"])

        world.watch = watch
        answer = await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert answer["role"] == "decode"
        assert [s for s, before in zip(steps, [0, *steps], strict=False) if s != before] == [
            None,
            "drain",
            "switch",
            "verify",
            None,
        ]
        assert world.calls == ["switch l1 decode", "ask l1", "generate l1 decode"]
        run.settled()
        again = Run(world)
        assert again.roles() == {"l1": "decode", "l2": "prefill", "d1": "decode", "d2": "decode"}
        again.settled()

    virtually(work)


async def failed(run: Run, name: str, role: RoleName, code: str, drain_s: float = 5.0) -> str:
    """A move that must fail with a code; gives its text."""
    with pytest.raises(ClientError) as caught:
        await run.mover.change_role(run.worker(name), role, drain_s)
    assert caught.value.code == code
    assert "\n" not in caught.value.message
    assert run.fleet.changes.past[-1].outcome == code
    return caught.value.message


def test_the_drain_takes_too_long(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        place = run.worker("l1").begin(time.monotonic(), 1.0)
        text = await failed(run, "l1", "decode", "not_drained")
        assert "1 requests after 5 s" in text
        assert world.calls == [], "the engine was never asked"
        run.settled()
        assert run.worker("l1").usable(time.monotonic())
        run.fleet.release(place)
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)

    virtually(work)


def test_kv_that_is_still_to_be_fetched_keeps_a_worker() -> None:
    async def work() -> None:
        run = Run(World(None))
        run.worker("l1").staged = 1
        await failed(run, "l1", "decode", "not_drained", 2.0)

    virtually(work)


@pytest.mark.parametrize(
    ("plan", "code", "calls"),
    [
        # refused: still what it was, and shown to be
        (["refused"], "not_switched", ["switch l1 decode", "ask l1", "ask l1", "generate l1 prefill"]),
        # switched, but the answer was lost: switched back
        (
            ["lost"],
            "not_switched",
            ["switch l1 decode", "ask l1", "switch l1 prefill", "ask l1", "generate l1 prefill"],
        ),
        # does not generate in its new role
        (
            ["ok", "refused", "refused", "refused"],
            "not_verified",
            [
                *("switch l1 decode", "ask l1", *["generate l1 decode"] * 3),
                *("ask l1", "switch l1 prefill", "ask l1", "generate l1 prefill"),
            ],
        ),
    ],
)
def test_a_step_fails_and_the_worker_goes_back(
    tmp_path: Path, plan: list[str], code: str, calls: list[str]
) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        world.plan = list(plan)
        text = await failed(run, "l1", "decode", code)
        assert "it has its old role again" in text
        assert world.calls == calls
        assert run.roles() == CONFIGURED
        assert run.worker("l1").usable(time.monotonic())
        run.settled()

    virtually(work)


def test_one_bad_generation_is_no_verdict() -> None:
    async def work() -> None:
        run = Run(World(None))
        run.world.plan = ["ok", "refused", "ok"]
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert run.roles()["l1"] == "decode"

    virtually(work)


def test_a_busy_engine_is_asked_again_until_the_deadline() -> None:
    async def work() -> None:
        run = Run(World(None))
        run.world.plan = ["busy"] * 3
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert run.world.calls.count("switch l1 decode") == 4
        run.world.plan = ["busy"] * 8
        began_s = time.monotonic()
        with pytest.raises(ClientError, match="not idle after 5"):
            await run.mover.change_role(run.worker("d1"), "prefill", 5.0)
        assert 5.0 <= time.monotonic() - began_s < 8.0
        run.settled()

    virtually(work)


def test_an_engine_that_never_answers_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        run = Run(World(tmp_path))
        run.world.slow_s = 1e6
        text = await failed(run, "d1", "prefill", "not_switched")
        assert "has not answered after 5 s" in text
        assert run.roles()["d1"] == "decode", "asked, it says that nothing has changed"
        run.settled()

    virtually(work)


def test_a_worker_that_says_something_else_is_brought_back() -> None:
    async def work() -> None:
        run = Run(World(None))
        run.world.plan = ["other"]
        text = await failed(run, "l1", "decode", "not_verified")
        assert "it says both" in text
        assert run.world.roles["l1"] == "prefill"
        run.settled()

    virtually(work)


@pytest.mark.parametrize("plan", [["dies"], ["broken"], ["ok", "dies"]])
def test_a_worker_that_dies_or_breaks_is_out_until_it_is_well(tmp_path: Path, plan: list[str]) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        world.plan = list(plan)
        with pytest.raises(ClientError, match="it was taken out"):
            await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert run.roles()["l1"] == "out"
        assert run.worker("l1").as_json(time.monotonic())["state"] == "out"
        assert run.mover.as_json()["alarms"]["l1"]
        run.settled()
        assert not await run.mover.try_again("l1"), "nothing has been mended"
        again = Run(world)
        await again.mover.recover()
        assert again.roles()["l1"] == "out"
        assert not again.worker("l1").usable(time.monotonic())
        again.settled()
        world.revive()
        again.mover.start()
        await asyncio.sleep(31.0)
        assert again.roles() == CONFIGURED
        assert again.worker("l1").usable(time.monotonic())
        assert again.mover.alarms == {}
        again.settled()
        await again.mover.close()

    virtually(work)


def test_a_worker_that_is_out_comes_back_as_what_it_says() -> None:
    async def work() -> None:
        world = World(None)
        run = Run(world)
        world.plan = ["broken"]
        with pytest.raises(ClientError):
            await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        world.revive()
        world.roles["l1"] = "decode"
        assert await run.mover.try_again("l1")
        assert run.roles()["l1"] == "decode"
        run.settled()

    virtually(work)


def test_an_order_brings_a_worker_that_is_out_back() -> None:
    async def work() -> None:
        world = World(None)
        run = Run(world)
        world.plan = ["broken"]
        with pytest.raises(ClientError):
            await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        world.revive()
        await run.mover.change_role(run.worker("l1"), "prefill", 5.0)
        assert run.roles() == CONFIGURED
        run.settled()

    virtually(work)


def test_a_worker_becomes_the_last_one_after_its_switch() -> None:
    async def work() -> None:
        world = World(None)
        run = Run(world)

        def watch() -> None:
            if world.calls and world.calls[-1] == "ask l1":
                run.worker("l2").draining = True

        world.watch = watch
        text = await failed(run, "l1", "decode", "last_of_role")
        assert "last usable prefill" in text
        assert world.roles["l1"] == "prefill"
        assert run.worker("l1").usable(time.monotonic())

    virtually(work)


def test_an_actuator_that_breaks_leaves_nothing_under_way(tmp_path: Path) -> None:
    """Whatever an actuator raises, the worker is settled and the next move may come."""

    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)

        def watch() -> None:
            if world.calls and world.calls[-1] == "ask l1":
                world.watch = lambda: None
                raise TypeError("an answer nobody thought of")

        world.watch = watch
        with pytest.raises(TypeError):
            await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert run.fleet.changes.under_way == {}
        assert run.roles() == CONFIGURED
        assert run.worker("l1").usable(time.monotonic())
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert run.roles()["l1"] == "decode"
        run.settled()

    virtually(work)


def test_without_a_place_to_write_nothing_is_asked(tmp_path: Path) -> None:
    async def work() -> None:
        folder = tmp_path / "gone"
        folder.mkdir()
        world = World(folder)
        run = Run(world)
        folder.rmdir()
        text = await failed(run, "l1", "decode", "not_written")
        assert "moves.json" in text
        assert world.calls == []
        assert run.roles() == CONFIGURED
        assert "state_file" in run.mover.alarms
        folder.mkdir()
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert run.mover.alarms == {}
        run.settled()

    virtually(work)


def test_an_order_that_is_withdrawn_is_undone(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        world.slow_s = 1.0
        order = asyncio.create_task(run.mover.change_role(run.worker("l1"), "decode", 5.0))
        await asyncio.sleep(0.5)
        world.roles["l1"] = "decode"  # it had heard the call
        order.cancel()
        await asyncio.wait({order})
        assert run.fleet.changes.under_way, "still being settled"
        await asyncio.sleep(5.0)
        assert run.roles() == CONFIGURED
        run.settled()

    virtually(work)


def test_a_router_that_ends_leaves_the_move_for_its_next_start(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        world.slow_s = 1.0
        order = asyncio.create_task(run.mover.change_role(run.worker("l1"), "decode", 5.0))
        await asyncio.sleep(0.5)
        run.mover.closing = True
        order.cancel()
        await asyncio.wait({order})
        await run.mover.close()
        world.slow_s, world.roles["l1"] = 0.0, "decode"  # it had heard the call
        again = Run(world)
        assert not again.worker("l1").usable(time.monotonic()), "nobody knows what it is"
        with pytest.raises(ClientError, match="one at a time"):
            await again.mover.change_role(again.worker("l2"), "decode", 5.0)
        await again.mover.recover()
        assert again.roles()["l1"] == "decode"
        assert again.fleet.changes.past[-1].outcome == "done"
        again.settled()

    virtually(work)


def test_an_entry_that_was_changed_by_hand_counts_again(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        await run.mover.change_role(run.worker("d1"), "prefill", 5.0)
        assert Run(world).roles()["l1"] == "decode"
        world.asks = False  # the operator exchanged the engines
        assert Run(world, l1="both").roles()["l1"] == "both"
        assert Run(world).roles()["d1"] == "prefill"
        run = Run(world)
        run.mover.forget(run.worker("d1"))
        assert Run(world).roles()["d1"] == "decode"

    virtually(work)


def test_a_move_back_waits_over_a_restart(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        again = Run(world)
        orders = MoveOrders(again.fleet, again.mover.change_role, flip_back_s=1000.0)
        with pytest.raises(MoveRefused, match="undo the last move"):
            await orders.move("pd0", Move.DECODE_TO_PREFILL, 5.0)

    virtually(work)


def test_a_worker_that_comes_up_as_something_else_is_believed(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        world.watch = lambda: None
        world.roles["l1"] = "prefill"  # restarted: what it was launched as
        await run.mover.comes_up(run.worker("l1"))
        assert run.roles() == CONFIGURED
        run.settled()
        assert Run(world).roles() == CONFIGURED
        world.dead.add("d1")
        await run.mover.comes_up(run.worker("d1"))
        assert run.roles()["d1"] == "decode", "who cannot be asked keeps its label"

    virtually(work)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not JSON"),
        ('{"format_version": 2, "pd": "pd0"}', "format_version"),
        ('{"pd": "mars"}', "mars"),
        ('{"pd": "pd0", "roles": {"l1": {"role": "cook"}}}', "roles.l1"),
        ('{"pd": "pd0", "polizy": 1}', "polizy"),
    ],
)
def test_a_state_file_that_is_none(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "moves.json"
    file.write_text(content)
    with pytest.raises(PrfaasError, match=named) as caught:
        MoveState(str(file), "pd0")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rollback_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        world.plan = ["ok", "refused", "refused", "refused"]

        def watch() -> None:
            if (
                world.calls[-1:] == ["generate l1 decode"]
                and run.state.move
                and run.state.move.step == "rollback"
            ):
                world.kill_at = world.points

        world.watch = watch
        with pytest.raises(Killed):
            await run.mover.change_role(run.worker("l1"), "decode", 5.0)
        assert world.roles["l1"] == "decode"
        world.kill_at = None
        again = Run(world)
        await again.mover.recover()
        assert again.roles() == CONFIGURED, "what failed once is not finished now"
        assert again.fleet.changes.past[-1].outcome == "rolled_back"
        again.settled()

    virtually(work)


def test_a_move_begun_with_another_actuator_is_not_guessed_at(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        move = OpenMove(
            worker="l1",
            url="http://l1:1",
            cluster="pd0",
            from_role="prefill",
            to_role="decode",
            by="policy",
            kind="sglang",
            step="switch",
        )
        run.state.open(move)
        again = Run(world)
        await again.mover.recover()
        assert "begun with actuator sglang" in again.mover.alarms["l1"]
        assert await again.mover.try_again("l1")
        assert again.roles() == CONFIGURED
        again.settled()

    virtually(work)


def test_a_worker_whose_address_has_changed_owes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        run = Run(world)
        run.state.take_out("l1", "http://elsewhere:1", "a test")
        again = Run(world)
        assert again.roles() == CONFIGURED
        assert not await again.mover.try_again("l1")
        assert again.mover.alarms == {}
        again.settled()

    virtually(work)


# ------------------------------------------------------------------------------------------------ a router is killed


def kill_points() -> int:
    """Points at which a router can be killed during one plain move."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))

        async def work() -> None:
            run = Run(world)
            await run.mover.change_role(run.worker("l1"), "decode", 5.0)

        virtually(work)
        return world.points


def test_a_router_killed_between_any_two_steps_starts_again() -> None:
    """Every point of a move without faults: afterwards it has been finished or undone, and engine and label agree."""
    n = kill_points()
    assert n >= 12
    ends = []
    for at in range(n):
        with tempfile.TemporaryDirectory() as folder:
            world = World(Path(folder))

            async def work(world: World = world, at: int = at) -> None:
                run = Run(world)
                world.kill_at = at
                with pytest.raises(Killed):
                    await run.mover.change_role(run.worker("l1"), "decode", 5.0)
                world.kill_at = None
                again = Run(world)
                await again.mover.recover()
                again.settled()
                assert "out" not in again.roles().values()
                ends.append(again.roles()["l1"])

            virtually(work)
    assert sorted(ends, key=["prefill", "decode"].index) == ends, "undone early, finished late"
    assert set(ends) == {"prefill", "decode"}


_FAULTS = st.sampled_from(["ok", "ok", "ok", "refused", "lost", "dies", "broken", "busy", "other"])


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGURED)),
    asks=st.booleans(),
    plan=st.lists(_FAULTS, max_size=7),
    kills=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=3),
)
def test_whatever_fails_and_whenever_the_router_is_killed(
    name: str, asks: bool, plan: list[str], kills: list[int | None]
) -> None:
    """Faults of engines and kills of the router at any point of a move and of its recovery.

    At each point every role is served, and no worker is sent what its engine cannot do (`Run.look`). In the end nothing
    is under way, and every worker serves what its engine is, or is out with an alarm; with mended engines all serve.
    """
    role: RoleName = "decode" if CONFIGURED[name] == "prefill" else "prefill"
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), asks)

        async def life(kill_at: int | None, order: bool) -> bool:
            """One run; False if it was killed."""
            world.kill_at = None
            run = Run(world)
            world.kill_at = kill_at
            told = None
            try:
                await run.mover.recover()
                run.settled()
                if order:
                    try:
                        await run.mover.change_role(run.worker(name), role, 5.0)
                        told = role
                    except ClientError:
                        pass
                    run.settled()
                    if told is not None:
                        assert run.roles()[name] == told
            except Killed:
                return False
            finally:
                world.kill_at = None
            return True

        async def work() -> None:
            world.plan = list(plan)
            first = True
            for kill_at in kills:
                await life(kill_at, order=first)
                first = False
            assert await life(None, order=first)
            world.revive()
            run = Run(world)
            await run.mover.recover()
            for out in list(run.state.out):
                assert await run.mover.try_again(out)
            run.settled()
            assert "out" not in run.roles().values()
            assert Run(world).roles() == run.roles()

        virtually(work)
