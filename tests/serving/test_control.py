"""The control loop with injected time: who decides, guard rails, outages, oscillation, operators."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import InputRanges
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.telemetry import Telemetry
from prfaas_serving import control
from prfaas_serving.admin import AdminApi
from prfaas_serving.choice import Route
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.control import ControlLoop
from prfaas_serving.decision_log import EventLine, read_log
from prfaas_serving.fleet import Load
from prfaas_serving.forward import Ended, Forwarder
from prfaas_serving.metrics import Metrics
from tests.serving.support import SHORT, run, serving, until

T0 = 50_000.0
WORKERS = [
    {"name": "r1", "url": "http://r1:1", "cluster": "prfaas0", "role": "prefill"},
    {"name": "l1", "url": "http://l1:1", "cluster": "pd0", "role": "prefill"},
    {"name": "l2", "url": "http://l2:1", "cluster": "pd0", "role": "prefill"},
    {"name": "d1", "url": "http://d1:1", "cluster": "pd0", "role": "decode"},
    {"name": "d2", "url": "http://d2:1", "cluster": "pd0", "role": "decode"},
]


class Scripted:
    """A policy of the tests: says what the test puts into `say`, and keeps what it saw."""

    constant = False
    say: Callable[[Telemetry], Decision]
    seen: list[Telemetry]
    resets = 0

    def reset(self, context: Any) -> None:
        type(self).resets += 1

    def decide(self, telemetry: Telemetry) -> Decision:
        type(self).seen.append(telemetry)
        return type(self).say(telemetry)


class Slow(Scripted):
    """Decides every 5 s only."""

    decision_interval_s = 5.0


def says(threshold: float | None = 5000.0, margin: float | None = None, move: Move = Move.NONE) -> None:
    """What `Scripted` says from now on."""
    decision = Decision((ClusterDecision(threshold, margin, move),))
    Scripted.say = staticmethod(lambda t: decision)  # type: ignore[assignment]


SCRIPTED = f"{__name__}:Scripted"
SLOW = f"{__name__}:Slow"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Scripted.seen, Scripted.resets = [], 0
    says()


class Bench:
    """A control loop without a network; every tick happens when the test says so."""

    def __init__(self, control: ControlLoop, forwarder: Forwarder, orders: list[tuple[str, Move]]) -> None:
        self.control, self.f, self.orders = control, forwarder, orders
        self.k = 0
        self.polls = True
        self.spoil: Callable[[str], dict[str, float] | None] = lambda name: {}

    def poll(self, at_s: float) -> None:
        """All workers answer their load poll, unless `spoil` gives None."""
        for worker in self.f.fleet:
            fields = self.spoil(worker.name)
            if fields is not None:
                worker.load = Load(0.0, 0.0, 0.1, T0 + at_s, 0, 0.0, {"x_total": at_s, **fields})

    async def ticks(self, n: int) -> list[Any]:
        """So many ticks of one second; gives their lines."""
        before = self.control.n
        for _ in range(n):
            if self.polls:
                self.poll(float(self.k))
            await self.control.tick(T0 + self.k)
            self.k += 1
            await asyncio.sleep(0)
        return list(self.control.recent)[before - self.control.n :] if self.control.n > before else []

    @property
    def threshold(self) -> float:
        """In force."""
        return self.f.holder.threshold_tokens


def bench(work: Callable[[Bench], Coroutine[Any, Any, None]], **control: Any) -> None:
    """Run a test of the loop."""

    async def go() -> None:
        raw = {
            "backend": "vllm_nixl",
            "workers": WORKERS,
            "decision": {"threshold_tokens": 5000},
            "scenario": control.pop("scenario", "paper"),
            "control": {
                "policy": SCRIPTED,
                "mode": "active",
                "rule": "static:threshold_tokens=777",
                **control,
            },
        }
        forwarder = Forwarder(Resolved(RouterConfig.model_validate(raw)), Metrics())
        for worker in forwarder.fleet:
            worker.came_up(T0)
        orders: list[tuple[str, Move]] = []

        async def change_role(worker: Any, role: str, *_: Any) -> dict[str, Any]:
            by = _[1]
            change = forwarder.fleet.changes.begin(worker, role, by)
            forwarder.fleet.relabel(worker, role)  # type: ignore[arg-type]
            forwarder.fleet.changes.end(change, "done")
            orders.append((worker.name, role))  # type: ignore[arg-type]
            return {}

        loop = ControlLoop(forwarder, change_role, start_s=T0)
        loop.patience_s = 60.0  # a busy machine is no slow policy
        try:
            async with asyncio.timeout(600):
                await work(Bench(loop, forwarder, orders))
        finally:
            await loop.close()
            await forwarder.close(0.0)

    asyncio.run(go())


# ------------------------------------------------------------------------------------------------ who decides


def test_the_policy_acts_in_active_mode() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        (line,) = await b.ticks(1)
        assert (line.by, line.guard, line.mode, line.n) == ("policy", "ok", "active", 0)
        assert line.proposed == line.acted == Decision((ClusterDecision(8000.0),))
        assert b.threshold == 8000
        assert b.f.holder.history[-1].origin == "policy"
        says(None, -math.inf)
        await b.ticks(1)
        assert b.f.holder.margin_s == -math.inf
        assert Scripted.seen[1].time_ns == 1_000_000_000

    bench(work)


def test_in_shadow_mode_a_rule_acts_and_the_policy_is_logged() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        (line,) = await b.ticks(1)
        assert line.by == "rule"
        assert line.proposed == Decision((ClusterDecision(8000.0),))
        assert b.threshold != 8000
        await b.ticks(3)
        assert b.threshold == 777

    bench(work, mode="shadow")


def test_off_nobody_is_asked_and_the_configured_decision_holds() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        await b.ticks(2)
        await b.control.set_mode("off", "look")
        assert b.threshold == 5000
        seen = len(Scripted.seen)
        (line,) = await b.ticks(1)
        assert (line.by, line.proposed, len(Scripted.seen)) == ("off", None, seen)
        resets = Scripted.resets
        await b.control.set_mode("active", "on again")
        assert Scripted.resets == resets + 1, "what it remembered is too old"
        await b.ticks(1)
        assert b.threshold == 8000

    bench(work)


def test_an_override_lies_over_everything_and_stops_moves() -> None:
    async def work(b: Bench) -> None:
        says(8000.0, move=Move.PREFILL_TO_DECODE)
        b.f.holder.set_override(ClusterDecision(threshold_tokens=123.0), "operator")
        lines = await b.ticks(32)
        assert {line.by for line in lines} == {"operator"}
        assert b.threshold == 123
        assert b.orders == []
        b.f.holder.clear_override("operator")
        await b.ticks(1)
        assert b.threshold == 8000

    bench(work)


def test_a_policy_with_an_interval_is_asked_then_and_held_between() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        lines = await b.ticks(11)
        assert [t.time_s for t in Scripted.seen] == [0.0, 5.0, 10.0]
        assert {line.by for line in lines} == {"policy"}
        assert lines[3].proposed == Decision((ClusterDecision(8000.0),))

    bench(work, policy=SLOW)


def test_zero_traffic_is_a_state_with_a_decision() -> None:
    async def work(b: Bench) -> None:
        lines = await b.ticks(70)
        assert {line.by for line in lines} == {"policy"}
        assert all(0.0 <= line.acted.clusters[0].threshold_tokens < math.inf for line in lines)
        assert b.control.alarms == {}
        assert b.orders == []

    bench(work, policy="dual_timescale")


@pytest.mark.parametrize(
    "policy", ["dual_timescale", "earliest_finish_conversion", "hybrid_planner", "static"]
)
def test_any_rule_runs(policy: str) -> None:
    async def work(b: Bench) -> None:
        for k in range(60):
            b.control.live.arrival(
                T0 + k * 0.3, 2000 * (k % 20 + 1), 2000 * (k % 20 + 1), 0, Route("local", "pd0", "rule")
            )
        lines = await b.ticks(35)
        assert {line.by for line in lines} == {"policy"}
        assert all(np.isfinite(line.values).all() for line in lines)

    bench(work, policy=policy)


# ------------------------------------------------------------------------------------------------ bounds


def test_thresholds_are_clamped_and_move_by_a_factor_per_second() -> None:
    async def work(b: Bench) -> None:
        says(100_000.0)
        lines = await b.ticks(4)
        assert [line.acted.clusters[0].threshold_tokens for line in lines] == [10_000, 20_000, 30_000, 30_000]
        assert "on the way to" in lines[0].reason
        assert "clamped" in lines[3].reason
        says(math.inf)
        await b.ticks(1)
        assert b.threshold == 30_000
        says(0.0)
        lines = await b.ticks(6)
        assert lines[0].acted.clusters[0].threshold_tokens == 15_000
        assert lines[-1].acted.clusters[0].threshold_tokens == 2000

    bench(work, threshold_factor_per_s=2.0, threshold_min_tokens=2000, threshold_max_tokens=30_000)


def test_the_ends_are_reached_within_seconds() -> None:
    async def work(b: Bench) -> None:
        says(math.inf)
        await b.ticks(4)
        assert b.threshold == math.inf
        says(0.0)
        await b.ticks(8)
        assert b.threshold == 0.0
        says(19_400.0)
        await b.ticks(8)
        assert b.threshold == 19_400

    bench(work)


def test_margins_are_clamped() -> None:
    async def work(b: Bench) -> None:
        for wanted, found in ((-math.inf, -5.0), (2.0, 2.0), (math.inf, 10.0)):
            says(None, wanted)
            await b.ticks(1)
            assert b.f.holder.margin_s == found

    bench(work, margin_min_s=-5.0, margin_max_s=10.0)


@given(
    st.lists(st.one_of(st.just(math.inf), st.floats(0, 1e6)), min_size=1, max_size=8),
    st.sampled_from([None, 1.5, 4.0]),
)
@settings(max_examples=25)
def test_whatever_is_asked_for_bounds_hold(wanted: list[float], factor: float | None) -> None:
    async def work(b: Bench) -> None:
        last = max(b.threshold, 128.0)
        for tokens in wanted:
            says(tokens)
            await b.ticks(1)
            assert 100 <= b.threshold <= 200_000
            if factor is not None:
                assert last / factor * 0.99 <= max(b.threshold, 128.0) <= last * factor * 1.01
            last = max(b.threshold, 128.0)

    bench(work, threshold_min_tokens=100, threshold_max_tokens=200_000, threshold_factor_per_s=factor)


# ------------------------------------------------------------------------------------------------ outages

FAULTS = ("empty", "nan", "500", "hangs", "frozen")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy", [SCRIPTED, "dual_timescale"])
def test_five_minutes_without_good_figures(fault: str, policy: str) -> None:
    """The decision is held, then the planned threshold holds without moves; then all is as before."""

    async def work(b: Bench) -> None:
        says(8000.0, move=Move.DECODE_TO_PREFILL)
        await b.ticks(5)
        held = b.threshold
        split = b.control.live.split()
        orders = list(b.orders)
        if fault == "frozen":
            b.spoil = lambda name: {"x_total": 4.0} if name == "d1" else {}  # answers, with old figures
        else:
            b.spoil = lambda name: None if name == "d1" else {}  # nothing readable: the last figures age
        now = []
        for _ in range(300):
            d1 = b.f.fleet.workers["d1"]
            d1.end(d1.begin(T0 + b.k, tokens=100), T0 + b.k + 0.5)  # it serves all the while
            now += await b.ticks(1)
        assert all(np.isfinite(line.values).all() for line in now)
        assert [line.guard for line in now].count("ok") <= 12
        assert {line.guard for line in now[13:50]} == {"hold"}
        assert {line.acted.clusters[0].threshold_tokens for line in now[13:50]} == {held}
        assert {line.by for line in now[65:]} == {"fallback"}
        planned = b.f.resolved.planned_threshold()
        assert b.threshold == planned
        assert now[-1].acted.clusters[0] == ClusterDecision(threshold_tokens=planned)
        assert all(c.move is Move.NONE for line in now[13:] for c in line.acted.clusters)
        assert b.orders == orders
        assert b.control.live.split() == split
        assert min(split) >= 1
        assert "d1" in b.control.alarms["stale_metrics"]
        b.spoil = lambda name: {}
        after = await b.ticks(8)
        assert {line.guard for line in after} == {"ok"}
        assert {line.by for line in after} == {"policy"}
        assert "stale_metrics" not in b.control.alarms

    bench(work, policy=policy)


def test_no_reading_that_is_not_finite_reaches_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(b: Bench) -> None:
        await b.ticks(2)
        seen = len(Scripted.seen)
        says(9000.0)
        original = b.control.live._read_decode
        monkeypatch.setattr(
            b.control.live, "_read_decode", lambda *a: {**original(*a), "decode_sequences": math.nan}
        )
        await b.ticks(5)
        assert len(Scripted.seen) == seen
        assert "decode_sequences" in b.control.alarms["telemetry"]
        assert b.threshold == 5000
        await b.ticks(70)
        assert b.control.guard == "fallback"
        assert b.threshold == b.f.resolved.planned_threshold()
        monkeypatch.undo()
        await b.ticks(5)
        assert b.threshold == 9000

    bench(work)


def test_a_policy_that_fails_is_held_then_replaced_and_comes_back() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        await b.ticks(3)

        def fail(t: Telemetry) -> Decision:
            raise RuntimeError("broken\nover two lines")

        Scripted.say = staticmethod(fail)  # type: ignore[assignment]
        lines = await b.ticks(3)
        assert {line.by for line in lines} == {"hold"}
        assert b.threshold == 8000
        assert "broken over two lines" in b.control.alarms["policy"]
        lines = await b.ticks(70)
        assert lines[-1].by == "fallback"
        says(8000.0)
        await b.ticks(12)
        assert (b.threshold, b.control.alarms) == (8000, {})

    bench(work)


def test_a_decision_for_another_deployment_is_a_failure() -> None:
    async def work(b: Bench) -> None:
        Scripted.say = staticmethod(lambda t: Decision(()))  # type: ignore[assignment]
        (line,) = await b.ticks(1)
        assert line.by == "hold"
        assert "1 PD clusters" in b.control.alarms["policy"]

    bench(work)


def test_a_policy_that_takes_too_long_does_not_stop_the_loop() -> None:
    async def work(b: Bench) -> None:
        hold = True

        def slow(t: Telemetry) -> Decision:
            while hold:
                time.sleep(0.005)
            return Decision((ClusterDecision(threshold_tokens=1234.0),))

        Scripted.say = staticmethod(slow)  # type: ignore[assignment]
        b.control.patience_s = 0.02
        (line,) = (await b.ticks(1))[-1:]
        assert line.by == "hold"
        assert "no answer" in line.reason
        (line,) = (await b.ticks(1))[-1:]
        assert "has not answered" in line.reason
        hold = False
        b.control.patience_s = 60.0
        while not b.control._policy._running.done():  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        says(1500.0)
        await b.ticks(4)
        assert b.threshold == 1500

    bench(work)


def test_strange_telemetry_falls_back() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        await b.ticks(1)
        for k in range(40):  # a flood of absurd requests: counts and rates leave their ranges
            b.control.live.arrival(T0 + 0.5 + k / 100, 10**12, 10**12, 0, Route("local", "pd0", "rule"))
            b.control.live.finished(T0 + 0.5, 10**9, 1.0)
        (line,) = (await b.ticks(2))[-1:]
        assert line.by == "fallback"
        assert "out of their range" in line.reason
        assert b.threshold == b.f.resolved.planned_threshold()

    bench(work, out_of_range_share=0.03)


def test_a_reading_unlike_the_training_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(b: Bench) -> None:
        n = len(b.control.live.schema)
        says(8000.0)
        for low, high, by in ((-1e15, 1e15, "policy"), (1e15, 1e15, "fallback")):
            ranges = InputRanges(low=(low,) * n, high=(high,) * n, readings=1)
            monkeypatch.setattr(control, "ranges_of", lambda policy, ranges=ranges: ranges)
            (line,) = (await b.ticks(2))[-1:]
            assert line.by == by
        assert "out of the range of the policy's training" in line.reason

    bench(work, out_of_range_share=0.3)


# ------------------------------------------------------------------------------------------------ oscillation


@pytest.mark.parametrize("policy", ["dual_timescale", "earliest_finish_conversion"])
def test_no_oscillation_at_constant_load(policy: str) -> None:
    """200 intervals of the same load: at most one change of direction of the threshold, no move and its undoing."""

    async def work(b: Bench) -> None:
        rng = np.random.default_rng(5)
        lengths = np.exp(rng.normal(9.0, 0.8, 4000)).astype(int).clip(128, 60_000)
        sent = 0
        thresholds = []
        for k in range(320):
            for j in range(2):
                at, n = T0 + k + j * 0.5, int(lengths[sent % len(lengths)])
                sent += 1
                b.control.live.arrival(at, n, n, 0, Route("local", "pd0", "rule"))
                b.control.live.first_token(at + 0.3, 0.8, Route("local", "pd0", "rule"))
                b.control.live.finished(at + 0.4, 256, 0.02)
            (line,) = await b.ticks(1)
            if k >= 120:  # from then on the long window is full
                thresholds.append(line.acted.clusters[0].threshold_tokens)
        assert len(thresholds) == 200
        assert len(b.orders) <= 1, f"moves at constant load: {b.orders}"
        if thresholds[0] is not None:
            logs = np.log(np.array(thresholds, dtype=float))
            assert logs.max() - logs.min() <= math.log(1.6)
            steps = np.sign(np.diff(logs)[np.abs(np.diff(logs)) > 1e-9])
            assert np.count_nonzero(np.diff(steps)) <= 200 // 30 + 1, "one change per search at most"

    bench(work, policy=policy)


# ------------------------------------------------------------------------------------------------ moves


def test_moves_are_ordered_on_the_slow_clock_and_never_take_the_last() -> None:
    async def work(b: Bench) -> None:
        says(8000.0, move=Move.PREFILL_TO_DECODE)
        lines = await b.ticks(100)
        assert len(b.orders) == 1, "the other prefill worker is the last"
        assert b.control.live.split() == (1, 3)
        moved = [line for line in lines if line.acted.clusters[0].move is not Move.NONE]
        assert [line.time_ns for line in moved] == [15_000_000_000]
        assert b.control.counts["illegal_moves"] == 99

    bench(work)


def test_a_move_back_waits() -> None:
    async def work(b: Bench) -> None:
        says(8000.0, move=Move.PREFILL_TO_DECODE)
        await b.ticks(16)
        says(8000.0, move=Move.DECODE_TO_PREFILL)
        await b.ticks(60)
        assert len(b.orders) == 1
        assert b.control.counts["moves_refused"] >= 3

    bench(work, flip_back_s=3600.0)


def test_an_operators_own_move_is_noticed_and_respected() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        await b.ticks(3)
        b.f.fleet.relabel(b.f.fleet.workers["d2"], "prefill")
        says(8000.0, move=Move.PREFILL_TO_DECODE)
        lines = await b.ticks(90)
        assert b.orders == []
        assert (lines[0].values[b.control.live.schema.index["pd0.prefill_instances"]]) == 3
        assert all(line.legal_moves == ((False, True, False),) for line in lines[1:])
        await b.ticks(20)
        assert len(b.orders) == 1, "after the stated time it may"

    bench(work, manual_hold_s=100.0)


def test_moves_can_be_switched_off() -> None:
    async def work(b: Bench) -> None:
        says(8000.0, move=Move.PREFILL_TO_DECODE)
        await b.ticks(40)
        assert b.orders == []

    bench(work, moves=False)


# ------------------------------------------------------------------------------------------------ reload


def test_a_failed_reload_keeps_the_last_good_policy_and_says_which() -> None:
    async def work(b: Bench) -> None:
        says(8000.0)
        await b.ticks(1)
        before = b.control.policy_hash
        for wrong in ("nonsense", "static:threshold_tokens=-1", "clairvoyant", "/nowhere/bundle", "os:path"):
            result = await b.control.reload(wrong, "test")
            assert result.error is not None
            assert SCRIPTED in str(result)
            assert "stays active" in str(result)
            await b.ticks(1)
            assert (b.threshold, b.control.policy_hash) == (8000, before)
        result = await b.control.reload("static:threshold_tokens=9000", "test")
        assert result.error is None
        await b.ticks(1)
        assert (b.threshold, b.control.policy_spec) == (9000, "static:threshold_tokens=9000")
        assert b.control.policy_hash != before

    bench(work)


@pytest.mark.parametrize("field", ["policy", "rule"])
def test_a_wrong_first_policy_is_an_error_of_the_configuration(field: str) -> None:
    async def work(b: Bench) -> None:
        raise AssertionError

    with pytest.raises(PrfaasError, match="nonsense"):
        bench(work, **{field: "nonsense"})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"stale_after_s": 20, "fallback_after_s": 10}, "fallback_after_s"),
        ({"threshold_min_tokens": 20, "threshold_max_tokens": 10}, "threshold_min_tokens"),
        ({"margin_min_s": 2, "margin_max_s": 1}, "margin_min_s"),
        ({"threshold_factor_per_s": 0.5}, "threshold_factor_per_s"),
        ({"mode": "on"}, "mode"),
        ({"polizy": "x"}, "polizy"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RouterConfig.model_validate(
            {"backend": "vllm_nixl", "workers": WORKERS, "control": {"policy": "static", **wrong}}
        )


# ------------------------------------------------------------------------------------------------ the log


def test_the_log_tells_everything(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"

    async def work(b: Bench) -> None:
        says(8000.0, move=Move.PREFILL_TO_DECODE)
        b.control.live.arrival(T0 + 0.5, 3000, 2000, 1000, Route("remote", "prfaas0", "rule"))
        b.control.live.ended(
            T0 + 2.0, Ended(T0 + 0.5, 3000, {"pd0": 2000, "prfaas0": 3000}, 7, "finished", True, 1.0, 0.02)
        )
        await b.ticks(20)
        await b.control.set_mode("shadow", "for the night")
        await b.control.reload("nonsense", "by mistake")
        await b.control.reload("static", "well")
        await b.ticks(2)

    bench(work, log_file=str(file))
    found = read_log(file)
    assert found.header.policy_spec == SCRIPTED
    assert [d.n for d in found.decisions] == list(range(22))
    assert found.decisions[0].new_lengths == ((2000,),)
    assert found.decisions[-1].mode == "shadow"
    assert (found.requests[0].input_tokens, found.requests[0].incremental_tokens) == (
        3000,
        {"pd0": 2000, "prfaas0": 3000},
    )
    assert found.requests[0].arrival_ns == 500_000_000
    assert [(c.from_role, c.to_role, c.outcome) for c in found.conversions] == [("prefill", "decode", "done")]
    kinds = [line.what for line in found.lines if isinstance(line, EventLine)]
    assert kinds.count("mode") == 1
    assert kinds.count("reload") == 2
    readings = [t for _, _, t in found.telemetry()]
    assert readings[3].recent_lengths_tokens[0].tolist() == [2000]
    assert readings[3].time_ns == 3_000_000_000


# ------------------------------------------------------------------------------------------------ a whole router


def test_admin_calls_of_a_running_router() -> None:
    async def work() -> None:
        config = {"policy": "static:threshold_tokens=300", "mode": "active"}
        async with serving(time_scale=0.05, control=config) as s:
            control = s.router.control
            assert control is not None
            await until(lambda: control.n > 5, "it decides")
            state = (await s.admin("GET", "/control")).json
            assert (state["mode"], state["guard"], state["last"]["by"]) == ("active", "ok", "policy")
            assert set(state["sources"]) == set(state["telemetry"])
            assert s.router.forwarder.holder.threshold_tokens == 300
            assert (await s.complete(SHORT)).status == 200
            reply = await s.admin("POST", "/reload", {"policy": "nonsense"})
            assert reply.status == 400
            assert "static:threshold_tokens=300" in reply.json["error"]["message"]
            reply = await s.admin("POST", "/reload", {"policy": "static:threshold_tokens=400"})
            assert reply.json["policy"] == "static:threshold_tokens=400"
            await until(lambda: s.router.forwarder.holder.threshold_tokens == 400, "the new one acts")
            reply = await s.admin("PUT", "/mode", {"mode": "off", "reason": "test"})
            assert reply.json["mode"] == "off"
            assert s.router.forwarder.holder.threshold_tokens == 100
            assert (await s.admin("PUT", "/mode", {"mode": "on"})).status == 400
            assert (await s.admin("DELETE", "/mode")).status == 404
            assert s.metric("control_mode", mode="off") == 1.0
            assert s.metric("control_ticks", by="policy") > 5

    run(work)


def test_without_a_control_block_there_is_none() -> None:
    async def work() -> None:
        async with serving() as s:
            assert s.router.control is None
            assert (await s.admin("GET", "/control")).status == 409
            assert isinstance(s.router.admin, AdminApi)

    run(work)
