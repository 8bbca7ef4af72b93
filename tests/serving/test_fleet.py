"""Choice inside a pool and what is counted about workers."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from prfaas_serving.config import RouterConfig, WorkerSpec
from prfaas_serving.fleet import Fleet, Load, NoWorker, Pool, Worker
from tests.serving.support import run

HEALTH: dict[str, Any] = {"ramp_s": 10.0, "breaker_failures": 1, "breaker_open_s": 100.0}


def fleet(n: int = 4, role: str = "decode", **sections: Any) -> tuple[Fleet, Pool]:
    """A fleet with n workers of one role, all up long ago."""
    cluster = "pd0" if role == "decode" else "prfaas0"
    config = RouterConfig.model_validate(
        {
            "backend": "vllm_nixl",
            "workers": [
                {"name": f"w{k}", "url": f"http://h{k}:1", "cluster": cluster, "role": role} for k in range(n)
            ],
            "health": HEALTH,
            **sections,
        }
    )
    found = Fleet(config, "pd0", ("prfaas0",))
    for spec in config.workers:
        found.add(spec, "config").state = "up"
    return found, found.decode if role == "decode" else found.remote_prefill["prfaas0"]


def picks(pool: Pool, n: int, now: float = 1000.0, **choice: Any) -> dict[str, int]:
    """How often each worker is chosen, each choice kept open."""
    counts: dict[str, int] = {w.name: 0 for w in pool.workers}
    for _ in range(n):
        worker = pool.pick(now, **choice)
        assert worker is not None
        worker.begin(now)
        counts[worker.name] += 1
    return counts


def test_load_is_spread() -> None:
    _, pool = fleet()
    counts = picks(pool, 400)
    assert all(90 <= n <= 110 for n in counts.values()), counts


def test_what_others_do_at_a_worker_counts_too() -> None:
    _, pool = fleet(2)
    pool.workers[0].load = Load(running=30.0, waiting=10.0, own_then=0)
    counts = picks(pool, 40)
    assert counts["w0"] <= 2
    pool.workers[0].load = Load(running=30.0, waiting=10.0, own_then=40)
    assert pool.workers[0].load.foreign == 0


def test_affinity_unless_that_very_worker_is_overloaded() -> None:
    """A prefix that everybody shares does not pull everything to one worker (at most about twice the mean)."""
    _, pool = fleet(4)
    favourite = pool.workers[2]
    assert pool.pick(1000.0, affinity=favourite) is favourite
    counts = {w.name: 0 for w in pool.workers}
    for k in range(400):
        worker = pool.pick(1000.0, affinity=favourite if k % 5 else None)  # 80% share one prefix
        assert worker is not None
        worker.begin(1000.0)
        counts[worker.name] += 1
    assert counts["w2"] == max(counts.values())
    assert counts["w2"] <= 2 * 100


def test_a_busy_worker_elsewhere_does_not_end_affinity() -> None:
    _, pool = fleet(3)
    for _ in range(50):
        pool.workers[0].begin(1000.0)
    for _ in range(10):
        pool.workers[1].begin(1000.0)
    assert pool.pick(1000.0, affinity=pool.workers[1]) is pool.workers[1]


def test_down_and_draining_workers_enter_no_mean() -> None:
    """An idle worker that is down would make every other one look overloaded, or be the least loaded itself."""
    _, pool = fleet(4)
    for _ in range(20):
        for k in (2, 3):
            pool.workers[k].begin(1000.0)
    pool.workers[0].state = "down"
    pool.workers[1].draining = True
    assert pool.pick(1000.0, affinity=pool.workers[2]) is pool.workers[2]
    counts = picks(pool, 40)
    assert counts["w0"] == counts["w1"] == 0
    state = pool.path_state(1000.0)
    assert state.active_instances == 2


def test_health_cycles_never_reset_counters_and_a_returning_worker_ramps_up() -> None:
    _, pool = fleet(3)
    back = pool.workers[0]
    back.begin(900.0)
    before = (back.in_flight, back.requests)
    back.state = "down"
    back.came_up(1000.0)
    assert (back.in_flight, back.requests) == before
    assert back.share(1000.0) == pytest.approx(0.1)
    assert back.share(1005.0) == pytest.approx(0.5)
    assert back.share(1010.0) == 1.0
    early = picks(pool, 90, 1001.0)
    assert early["w0"] <= 15, "a cold worker got its full share at once"
    for worker in pool.workers:
        worker.in_flight = 0
    late = picks(pool, 90, 1011.0)
    assert 25 <= late["w0"] <= 35


def test_limits_fall_with_refusals_and_come_back() -> None:
    found, pool = fleet(1, limits={"decode_per_worker": 16})
    worker = pool.workers[0]
    places = [worker.begin(0.0) for _ in range(16)]
    assert not worker.has_room(0.0)
    worker.refused(0.0, retry_after_s=None)
    for place in places:
        worker.end(place, 0.0)
    assert int(worker._allowed) == 8
    worker.refused(0.0, retry_after_s=2.0)
    assert not worker.has_room(1.9)
    assert worker.has_room(2.1)
    assert worker.breaker.state(0.0) == "closed"
    for _ in range(400):
        worker.answered()
    assert int(worker._allowed) == 16
    assert found.workers["w0"] is worker


def test_an_attempt_ends_once() -> None:
    found, pool = fleet(1, "prefill")
    worker = pool.workers[0]
    place = worker.begin(0.0, 3.0)
    assert found.release(place)
    assert not found.release(place)
    assert worker.in_flight == 0


def test_path_state_by_hand() -> None:
    """Three workers: one idle, one 2 s into a prefill of 5 s, one with two prefills of 4 s begun 1 s ago."""
    _, pool = fleet(3, "prefill")
    a, b, c = pool.workers
    b.begin(998.0, 5.0)
    c.begin(999.0, 4.0)
    c.begin(999.5, 4.0)
    state = pool.path_state(1000.0)
    assert (state.idle_instances, state.active_instances) == (1, 3)
    assert state.residual_s == 0.0
    assert state.queued_work_s == pytest.approx(4.0)
    first = a.begin(1000.0, 7.0)
    state = pool.path_state(1000.0)
    assert (state.idle_instances, state.residual_s) == (0, pytest.approx(3.0))
    assert a.work_s(1001.0) == pytest.approx(6.0)
    assert c.work_s(1000.0) == pytest.approx(7.0)
    a.end(first, 1001.0)
    b.breaker.failure(1001.0)
    assert pool.path_state(1001.0).active_instances == 3, "a worker whose breaker is open still ends its work"
    for place in list(b.assigned):
        b.end(place, 1001.0)
    assert pool.path_state(1001.0).active_instances == 2
    assert Pool("x", "prefill", 1, pool._luck).path_state(0.0).active_instances == 0


def test_the_next_prefill_counts_from_the_end_of_the_first() -> None:
    _, pool = fleet(1, "prefill")
    worker = pool.workers[0]
    first = worker.begin(0.0, 2.0)
    worker.begin(0.0, 3.0)
    assert worker.work_s(1.0) == pytest.approx(4.0)
    worker.end(first, 2.5)
    assert worker.work_s(3.0) == pytest.approx(2.5)


def test_the_queue_is_first_come_first_served_and_bounded() -> None:
    async def work() -> None:
        found, pool = fleet(1, limits={"decode_per_worker": 1, "queue": 3})
        order: list[int] = []
        _, holder = await pool.acquire(5.0)

        async def take(k: int) -> None:
            _, place = await pool.acquire(5.0)
            order.append(k)
            await asyncio.sleep(0.01)
            found.release(place)

        tasks = []
        for k in range(3):
            tasks.append(asyncio.create_task(take(k)))
            await asyncio.sleep(0.005)
        with pytest.raises(NoWorker) as full:
            await pool.acquire(5.0)
        assert full.value.full
        tasks[1].cancel()
        await asyncio.sleep(0)
        found.release(holder)
        await asyncio.gather(tasks[0], tasks[2])
        assert order == [0, 2]
        assert pool.waiting == 0
        assert pool.waiting_s == 0

    run(work)


def test_waiting_ends_when_time_is_up_or_nobody_is_left() -> None:
    async def work() -> None:
        found, pool = fleet(1, limits={"decode_per_worker": 1})
        await pool.acquire(5.0)
        began = time.monotonic()
        with pytest.raises(NoWorker) as late:
            await pool.acquire(0.3)
        assert late.value.full
        assert time.monotonic() - began < 5.0
        waiting = asyncio.create_task(pool.acquire(30.0))
        await asyncio.sleep(0.01)
        found.remove(pool.workers[0])
        with pytest.raises(NoWorker) as gone:
            await waiting
        assert not gone.value.full

    run(work)


def test_a_turn_given_to_one_who_left_passes_on() -> None:
    async def work() -> None:
        found, pool = fleet(1, limits={"decode_per_worker": 1})
        _, holder = await pool.acquire(5.0)
        first = asyncio.create_task(pool.acquire(5.0))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.acquire(5.0))
        await asyncio.sleep(0)
        found.release(holder)  # the first one's turn
        first.cancel()  # who leaves before it can take it
        worker, _ = await asyncio.wait_for(second, 1.0)
        assert worker.in_flight == 1

    run(work)


def test_roles_move_with_their_counters() -> None:
    config = RouterConfig.model_validate(
        {
            "backend": "vllm_nixl",
            "workers": [
                {"name": "a", "url": "http://a:1", "cluster": "pd0", "role": "prefill"},
                {"name": "b", "url": "http://b:1", "cluster": "pd0", "role": "decode"},
            ],
        }
    )
    found = Fleet(config, "pd0", ())
    for spec in config.workers:
        found.add(spec, "config").state = "up"
    worker = found.workers["a"]
    worker.requests = 7
    found.relabel(worker, "decode")
    assert worker in found.decode.workers
    assert not found.local_prefill.workers
    assert worker.requests == 7
    assert not found.local_prefill_usable(0.0)
    found.relabel(worker, "both")
    assert found.local_prefill_usable(0.0)


def test_names_and_addresses_are_taken_once() -> None:
    found, _ = fleet(1)
    for spec in ({"name": "w0", "url": "http://new:1"}, {"name": "new", "url": "http://h0:1"}):
        with pytest.raises(ValueError, match="two workers"):
            found.add(WorkerSpec.model_validate({**spec, "cluster": "pd0", "role": "decode"}), "admin")


def test_scores_of_a_ramping_worker_are_finite() -> None:
    _, pool = fleet(1)
    worker: Worker = pool.workers[0]
    worker.ramp_from_s = 1000.0
    assert math.isfinite(worker.score(1000.0))
