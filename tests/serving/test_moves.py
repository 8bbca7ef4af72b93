"""Node moves under load: nothing is lost, every worker drains, one at a time, nobody is the last of a role."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.web_request import BaseRequest

from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.telemetry import Telemetry
from prfaas_serving.fake.worker import FakeWorker
from prfaas_serving.fleet import RoleChange
from prfaas_serving.moves.orders import ROLES, MoveFailed, MoveOrders, MoveRefused
from prfaas_serving.moves.state import MoveState
from tests.serving.support import Setup, completion, expected_text, run, serving, until
from tests.serving.virtual import run_virtually

WORKERS = (
    ("r1", "prfaas0", "prefill"),
    ("l1", "pd0", "prefill"),
    ("l2", "pd0", "prefill"),
    ("d1", "pd0", "decode"),
    ("d2", "pd0", "decode"),
    ("d3", "pd0", "decode"),
)


@dataclass
class Watch:
    """Looks on while workers move."""

    setup: Setup
    most_under_way: int = 0
    fewest: dict[str, int] = field(default_factory=lambda: {"prefill": 9, "decode": 9})
    not_drained: list[str] = field(default_factory=list)
    done: list[RoleChange] = field(default_factory=list)

    def ended(self, change: RoleChange) -> None:
        """At the moment in which a worker has its new role."""
        worker, fake = self.setup.worker(change.worker), self.setup.workers[change.worker]
        if change.outcome != "done":
            return
        self.done.append(change)
        if worker.in_flight or worker.staged or fake.running or fake._waiting:
            self.not_drained.append(change.worker)

    def look(self) -> None:
        """Count workers in service and moves under way."""
        fleet = self.setup.router.forwarder.fleet
        self.most_under_way = max(self.most_under_way, len(fleet.changes.under_way))
        for role, pool in (("prefill", fleet.local_prefill), ("decode", fleet.decode)):
            serving_now = sum(not w.known_down for w in pool.workers)
            self.fewest[role] = min(self.fewest[role], serving_now)

    async def keep_looking(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(0.003)


@dataclass
class Traffic:
    """Requests that never stop, each checked for its exact text."""

    setup: Setup
    asked: int = 0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    stop: bool = False

    async def client(self, number: int) -> None:
        """One request after the other."""
        for k in itertools.count():
            if self.stop:
                return
            self.asked += 1
            tokens = 5 + (number + k) % 20
            body = completion(f"{number} {k} " + "w" * (40 if k % 2 else 900), tokens, stream=k % 3 > 0)
            reply = await self.setup.post("/v1/completions", body)
            if reply.status != 200 or reply.text != expected_text(body, tokens):
                self.wrong.append(f"{number}.{k}: {reply.status} {reply.text[:80]!r}")
            self.answered += 1


async def moved(orders: MoveOrders, move: Move) -> str:
    """One move and, while it is under way, a second order that must be refused."""
    first = asyncio.create_task(orders.move("pd0", move, 20.0))
    await asyncio.sleep(0)
    for double in (Move.PREFILL_TO_DECODE, Move.DECODE_TO_PREFILL):
        if not first.done():
            with pytest.raises(MoveRefused, match="already"):
                await orders.move("pd0", double, 20.0)
    return await first


class RoleCall:
    """Gives fake workers the call of workers with a role of their own: they refuse it while busy, and the other leg."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.switches = self.refused_legs = 0
        original = FakeWorker._dispatch

        async def dispatch(fake: FakeWorker, request: BaseRequest) -> web.StreamResponse:
            if request.path == "/role":
                return await self._role(fake, request)
            if request.method == "POST" and request.path.startswith("/v1/"):
                body = await request.json()
                if fake.role not in ("both", fake._leg(body)):
                    self.refused_legs += 1
                    return web.json_response({"error": {"message": f"I am {fake.role}"}}, status=409)
            return await original(fake, request)

        monkeypatch.setattr(FakeWorker, "_dispatch", dispatch)

    async def _role(self, fake: FakeWorker, request: BaseRequest) -> web.StreamResponse:
        if request.method == "POST":
            if fake.running or fake._waiting or fake.staged:
                return web.json_response({"error": {"message": "requests are under way"}}, status=409)
            fake.role = (await request.json())["role"]
            self.switches += 1
        return web.json_response({"role": fake.role})


@pytest.mark.parametrize(("backend", "kind"), [("vllm_nixl", None), ("sglang", None), ("vllm_nixl", "http")])
def test_twenty_conversions_under_load_lose_nothing(
    backend: str, kind: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By relabelling, by SGLang's switch, and by workers' own call: through the steps, with a state file."""
    calls = RoleCall(monkeypatch) if kind == "http" else None
    moves = {"state_file": str(tmp_path / "moves.json"), "actuator": kind and {"kind": kind}}

    async def work() -> None:
        spec = {"decode": {"a_s": 0.002, "slots": 16, "source": "tests"}}
        async with serving(backend, WORKERS, spec=spec, moves=moves) as s:
            fleet = s.router.forwarder.fleet
            watch, traffic = Watch(s), Traffic(s)
            fleet.changes.ended.append(watch.ended)
            orders = MoveOrders(fleet, s.router.mover.change_role)
            clients = [asyncio.create_task(traffic.client(n)) for n in range(8)]
            looking = asyncio.create_task(watch.keep_looking())
            plan = [
                Move.DECODE_TO_PREFILL,
                Move.PREFILL_TO_DECODE,
                Move.PREFILL_TO_DECODE,
                Move.DECODE_TO_PREFILL,
            ]
            for move in itertools.islice(itertools.cycle(plan), 20):
                await moved(orders, move)
                so_far = traffic.answered
                await until(lambda n=so_far: traffic.answered >= n + 6, "requests go on", 60.0)
            traffic.stop = True
            await asyncio.gather(*clients)
            looking.cancel()
            assert traffic.wrong == []
            assert traffic.answered == traffic.asked >= 120
            assert len(watch.done) == 20
            assert watch.not_drained == []
            assert watch.most_under_way == 1
            assert min(watch.fewest.values()) >= 1
            assert all(not w.draining for w in fleet)
            assert s.router.mover.alarms == {}
            assert MoveState(moves["state_file"], "pd0").move is None
            if backend == "sglang":
                assert sum(f.switches for f in s.workers.values()) == 20
            if calls is not None:
                assert (calls.switches, calls.refused_legs) == (20, 0)
                assert all(s.worker(name).role == fake.role for name, fake in s.workers.items())
            assert sum(w.double_pulls for w in s.workers.values()) == 0
            await s.settled()

    run_virtually(work())


def test_flip_backs_and_last_ones_are_refused() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", WORKERS) as s:
            fleet = s.router.forwarder.fleet
            orders = MoveOrders(fleet, s.router.mover.change_role, flip_back_s=1000.0)
            await orders.move("pd0", Move.PREFILL_TO_DECODE, 5.0)
            with pytest.raises(MoveRefused, match="undo the last move"):
                await orders.move("pd0", Move.DECODE_TO_PREFILL, 5.0)
            with pytest.raises(MoveRefused, match="no prefill worker can be spared"):
                await orders.move("pd0", Move.PREFILL_TO_DECODE, 5.0)
            with pytest.raises(MoveRefused, match="not served"):
                await orders.move("mars", Move.PREFILL_TO_DECODE, 5.0)
            with pytest.raises(MoveRefused, match="no move"):
                await orders.move("pd0", Move.NONE, 5.0)
            assert [len(fleet.local_prefill.workers), len(fleet.decode.workers)] == [1, 4]

    run(work)


def test_the_choice_is_the_simulators() -> None:
    """An idle prefill worker first, then the earliest to finish; the decode worker with the fewest requests."""

    async def work() -> None:
        async with serving("vllm_nixl", WORKERS) as s:
            fleet = s.router.forwarder.fleet
            orders = MoveOrders(fleet, s.router.mover.change_role)
            w = fleet.workers
            now = asyncio.get_running_loop().time()
            places = [w["l1"].begin(now, 5.0)]
            assert orders.choose(Move.PREFILL_TO_DECODE) is w["l2"]
            places.append(w["l2"].begin(now, 9.0))
            assert orders.choose(Move.PREFILL_TO_DECODE) is w["l1"]
            places += [w["d1"].begin(now), w["d2"].begin(now), w["d2"].begin(now), w["d3"].begin(now)]
            assert orders.choose(Move.DECODE_TO_PREFILL) is w["d1"]
            w["d1"].draining = True
            assert orders.choose(Move.DECODE_TO_PREFILL) is w["d3"]
            w["d1"].draining = False
            for place in places:
                fleet.release(place)

    run(work)


def test_a_worker_that_becomes_the_last_one_while_it_drains_stays() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", WORKERS[:5]) as s:
            fleet = s.router.forwarder.fleet
            orders = MoveOrders(fleet, s.router.mover.change_role)
            long = [
                asyncio.create_task(s.post("/v1/completions", completion(f"{k}", 100_000, stream=True)))
                for k in range(4)
            ]
            await until(lambda: s.worker("d1").in_flight and s.worker("d2").in_flight, "both decode")
            move = asyncio.create_task(orders.move("pd0", Move.DECODE_TO_PREFILL, 60.0))
            await until(lambda: fleet.changes.under_way, "one drains")
            leaving = next(iter(fleet.changes.under_way))
            other = s.worker("d2" if leaving == "d1" else "d1")
            other.draining = True  # an operator, or a fault
            with pytest.raises(MoveFailed, match="last usable decode"):
                await move
            assert (s.worker(leaving).role, s.worker(leaving).draining) == ("decode", False)
            assert fleet.changes.past[-1].outcome == "last_of_role"
            for task in long:
                task.cancel()

    run(work)


class BackAndForth:
    """A policy of the tests: orders whatever move is legal, to and fro."""

    constant = False
    _turn = 0

    def reset(self, context: Any) -> None:
        """Nothing."""

    def decide(self, telemetry: Telemetry) -> Decision:
        """Alternate."""
        wanted = (Move.DECODE_TO_PREFILL, Move.PREFILL_TO_DECODE)[self._turn % 2]
        move = wanted if telemetry.legal_moves[0][wanted] else Move.NONE
        self._turn += move is not Move.NONE
        return Decision((ClusterDecision(threshold_tokens=100.0, move=move),))


@pytest.mark.slow
def test_twenty_conversions_ordered_by_the_loop() -> None:
    async def work() -> None:
        control = {"policy": f"{__name__}:BackAndForth", "mode": "active", "flip_back_s": 0.0}
        async with serving("vllm_nixl", WORKERS, time_scale=0.03, control=control) as s:
            fleet = s.router.forwarder.fleet
            watch, traffic = Watch(s), Traffic(s)
            fleet.changes.ended.append(watch.ended)
            clients = [asyncio.create_task(traffic.client(n)) for n in range(6)]
            looking = asyncio.create_task(watch.keep_looking())
            await until(lambda: len(watch.done) >= 20, "twenty conversions", 600.0)
            traffic.stop = True
            await asyncio.gather(*clients)
            looking.cancel()
            assert traffic.wrong == []
            assert watch.not_drained == []
            assert watch.most_under_way == 1
            assert min(watch.fewest.values()) >= 1
            roles = [ROLES[m] for m in (Move.DECODE_TO_PREFILL, Move.PREFILL_TO_DECODE)]
            assert [(c.from_role, c.to_role) for c in watch.done[:4]] == roles * 2

    run_virtually(work())
