"""Node moves of real vLLM workers under load: one remote prefill worker, and three local ones whose roles move.

The engines serve either role; what moves a worker is the router's label, after a drain and a generation in it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prfaas_env.decision import Move
from prfaas_serving.fleet import RoleChange
from prfaas_serving.moves.orders import MoveOrders, MoveRefused
from tests.real.engines import START_S, Engine
from tests.real.models import folder_of
from tests.real.support import (
    COMPLETIONS,
    Live,
    Place,
    Prompts,
    asked,
    direct,
    ids_of,
    routing,
    run,
    say,
    streamed_ids,
)
from tests.serving.support import Reply, until

MOVES = 20
CLIENTS = 3
THRESHOLD = 800
#: Prompt tokens and generated tokens, taken in turns.
SIZES = ((100, 24), (1500, 12), (400, 40), (900, 16), (30, 30))


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Place]]:
    """Started once, killed whatever happens."""
    model = folder_of("dense")
    found = {
        "remote": Place(Engine("remote", model, "prefill"), "prfaas0", "prefill"),
        "near0": Place(Engine("near0", model, "prefill"), "pd0", "prefill"),
        "near1": Place(Engine("near1", model, "decode"), "pd0", "decode"),
        "near2": Place(Engine("near2", model, "decode"), "pd0", "decode"),
    }
    began_s = time.monotonic()

    async def up() -> None:
        async with direct() as session:
            await asyncio.gather(*(place.engine.ready(session) for place in found.values()))

    try:
        for place in found.values():
            place.engine.start()
        run(up, START_S + 100.0)
        say(f"moves: four workers up after {time.monotonic() - began_s:.0f} s")
        yield found
    finally:
        for place in found.values():
            place.engine.close()


@dataclass
class Traffic:
    """Requests that never stop, none like another; what came back is checked when all is over."""

    live: Live
    prompts: Prompts
    answered: list[tuple[list[int], int, bool, Reply]] = field(default_factory=list)
    sent: int = 0
    stop: bool = False

    async def client(self) -> None:
        """One request after the other, every other one streamed."""
        while not self.stop:
            tokens, wanted = SIZES[self.sent % len(SIZES)]
            prompt, stream = self.prompts.fresh(tokens), self.sent % 2 == 0
            self.sent += 1
            body = asked(prompt, wanted, stream=stream)
            self.answered.append((prompt, wanted, stream, await self.live.post(COMPLETIONS, body)))


def wrong(traffic: Traffic) -> list[str]:
    """Requests that were lost: another status than 200, or a stream without its end."""
    return [
        f"{len(prompt)} tokens: {reply.status} {reply.body[-200:]!r}"
        for prompt, _, stream, reply in traffic.answered
        if reply.status != 200 or (stream and reply.events[-1] != "[DONE]")
    ]


def test_twenty_moves_under_load(places: dict[str, Place], tmp_path: Path) -> None:
    """Nothing lost, no token twice or missing, one at a time, each role always served; roles survive a new router."""

    async def work() -> None:
        moves = {"state_file": str(tmp_path / "moves.json")}
        async with routing(places, THRESHOLD, moves=moves) as live:
            fleet = live.router.forwarder.fleet
            traffic, done = Traffic(live, Prompts(17)), list[RoleChange]()
            refused = 0
            fleet.changes.ended.append(done.append)
            orders = MoveOrders(fleet, live.router.mover.change_role)
            began_s = time.monotonic()
            clients = [asyncio.create_task(traffic.client()) for _ in range(CLIENTS)]
            await until(lambda: len(traffic.answered) >= 2 * CLIENTS, "the first answers", 120.0)
            took_s = []
            for move in itertools.islice(
                itertools.cycle((Move.DECODE_TO_PREFILL, Move.PREFILL_TO_DECODE)), MOVES
            ):
                move_s = time.monotonic()
                order = asyncio.create_task(orders.move("pd0", move, 60.0))
                await asyncio.sleep(0)
                with pytest.raises(MoveRefused, match="already"):
                    await orders.move("pd0", move, 60.0)
                refused += 1
                while not order.done():
                    for pool in (fleet.local_prefill, fleet.decode):
                        assert any(not w.known_down for w in pool.workers), f"nobody serves {pool.role}"
                    assert len(fleet.changes.under_way) <= 1
                    await asyncio.sleep(0.02)
                await order
                took_s.append(time.monotonic() - move_s)
                so_far = len(traffic.answered)
                await until(lambda n=so_far: len(traffic.answered) >= n + 2, "requests go on", 60.0)  # type: ignore[misc]
            traffic.stop = True
            await asyncio.gather(*clients)
            span_s = time.monotonic() - began_s
            assert wrong(traffic) == []
            assert len(traffic.answered) == traffic.sent
            assert [c.outcome for c in done] == ["done"] * MOVES
            assert live.router.mover.alarms == {}
            await live.idle()
            roles = {w.name: w.role for w in fleet}
            failures = {w.name: w.failures for w in fleet}
            assert failures == dict.fromkeys(failures, 0), (
                "no try failed, not even one that another made good"
            )
            routes = Counter(reply.headers["X-Prfaas-Route"] for *_, reply in traffic.answered)
            assert min(routes["remote"], routes["local"]) >= MOVES
            movers = Counter(c.worker for c in done)
            # one process, past the router, with nothing cached
            one = live.engines["remote"]
            async with live.session.post(one.url + "/reset_prefix_cache") as answer:
                assert answer.status == 200
            for prompt, wanted, stream, reply in traffic.answered:
                ids = streamed_ids(reply) if stream else ids_of(reply.json)
                assert len(ids) == wanted
                assert ids == ids_of(await live.alone(one, prompt, wanted))
            say(
                f"moves: {MOVES} under load in {span_s:.0f} s ({dict(movers)}), each took "
                f"{sum(took_s) / MOVES:.2f} s in the mean, {max(took_s):.2f} s at most"
            )
            say(
                f"moves: {traffic.sent} requests ({routes['remote']} remote, {routes['local']} local), 0 lost, "
                f"all tokens as of one process; {refused} double orders refused"
            )
        async with routing(places, THRESHOLD, moves=moves) as live:
            assert {w.name: w.role for w in live.router.forwarder.fleet} == roles
            prompt = Prompts(18).fresh(200)
            reply = await live.ask(prompt, 12)
            assert ids_of(reply.json) == ids_of(await live.alone(live.engines["remote"], prompt, 12))
            await live.idle()

    run(work, 420.0)
