"""What holds in every world under every sequence of decisions, checked at every tick.

Worlds are small and random: one or two PD clusters, none to two PrfaaS clusters, links that may be thin or down,
bursts and silence, overload, tight limits. Decisions are random too: thresholds and margins with their infinities, and
a node move ordered on every tick, legal or not.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.formulas import NEVER_NS, ns_from_s
from prfaas_env.simulator.records import Route, Status, Totals
from prfaas_env.simulator.world import CapacityTrace, World
from prfaas_env.workload.requests import RequestTable

S = 1_000_000_000
TICKS = 24
LAWS = settings(max_examples=60, derandomize=True)
STAMPS = (
    "prefill_start_ns",
    "prefill_end_ns",
    "transfer_end_ns",
    "decode_join_ns",
    "first_token_ns",
    "finish_ns",
)


@dataclass(frozen=True)
class Case:
    """A world and a decision per second."""

    world: World
    decisions: tuple[Decision, ...]

    @property
    def has_warm_up(self) -> bool:
        """Whether converted instances are slow for a while."""
        costs = self.world.scenario.conversion
        return costs.warmup_s > 0 and costs.warmup_speed < 1


# ------------------------------------------------------------------------------------------ random worlds

some = st.sampled_from


@st.composite
def scenarios(draw):
    """Any topology up to 2 x 2 with made-up profiles."""
    n_prfaas = draw(st.integers(0, 2))
    prfaas = [
        {"name": f"prfaas{j}", "hardware": "remote", "n_instances": draw(st.integers(1, 3))}
        for j in range(n_prfaas)
    ]
    pd, links = [], []
    for i in range(draw(st.integers(1, 2))):
        linked = [j for j in range(n_prfaas) if draw(some([True, True, False]))]
        n_prefill = draw(st.integers(0 if linked else 1, 3))
        n_decode = draw(st.integers(1, 3))
        pd.append(
            {
                "name": f"pd{i}",
                "hardware": "local",
                "n_prefill": n_prefill,
                "n_decode": n_decode,
                "min_prefill": draw(st.none() | st.integers(0, n_prefill)) if linked else None,
                "min_decode": draw(some([1, 1, n_decode])),
                "rdma_bps": draw(some([8e9, 3e6])),
                "rdma_latency_s": draw(some([0.0, 0.0017])),
            }
        )
        for j in linked:
            links.append(
                {
                    "prfaas": f"prfaas{j}",
                    "pd": f"pd{i}",
                    "capacity_bps": draw(some([1e6, 8e6, 1e8 / 3])),
                    "latency_s": draw(some([0.0, 0.013])),
                    "flow_cap_bps": draw(some([None, 3e6])),
                }
            )
    decode = {
        "a_s": draw(some([0.01, 0.037])),
        "b_s_per_sequence": draw(some([0.0, 0.0, 0.003])),
        "c_s_per_token": draw(some([0.0, 0.0, 1e-6])),
        "slots": draw(st.integers(1, 4)),
        "kv_capacity_tokens": draw(some([None, None, 3000])),
        "kv_reserve_tokens": draw(some([0, 50])),
        "source": "made up",
    }
    control_s = draw(some([1.0, 1.0, 0.5]))
    return Scenario.model_validate(
        {
            "name": "random",
            "model": {
                "name": "random",
                "kv": {
                    "fixed_bytes": draw(some([0, 50_000])),
                    "bytes_per_token": draw(some([0, 333, 1000])),
                    "n_layers": draw(some([1, 3, 57])),
                },
                "kv_source": "made up",
                "hardware": {
                    "remote": {"prefill": _prefill(draw, [2e-4, 1e-3])},
                    "local": {"prefill": _prefill(draw, [5e-4, 2e-3]), "decode": decode},
                },
            },
            "deployment": {"prfaas": prfaas, "pd": pd, "links": links},
            "workload": {
                "kind": "synthetic",
                "arrivals": {"kind": "poisson", "rate_rps": 1.0},
                "input_tokens": {"kind": "fixed", "tokens": 100},
                "output_tokens": {"kind": "fixed", "tokens": 10},
            },
            "transport": {"pipelining": draw(st.booleans())},
            "conversion": {
                "switch_s": draw(some([0.0, 1.5])),
                "drain_limit_s": draw(some([0.3, 0.3, 2.0, 120.0])),
                "warmup_s": draw(some([0.0, 0.0, 2.5, 7.0])),
                "warmup_speed": draw(some([1.0, 0.5, 0.3])),
            },
            "control": {
                "control_interval_s": control_s,
                "conversion_interval_s": draw(some([1.0, 1.0, 3.0])),
            },
            "slo": {"ttft_s": draw(some([None, 2.0])), "tpot_s": draw(some([None, 0.02]))},
            "admission": {
                "max_input_tokens": draw(some([None, None, 2500])),
                "max_queue_requests": draw(some([None, None, 3])),
            },
        }
    )


def _prefill(draw, slopes):
    return {
        "kind": "polynomial",
        "c0_s": draw(some([0.0, 0.05])),
        "c1_s_per_token": draw(some(slopes)),
        "source": "made up",
    }


def _trace(rng, nominal_bps):
    """A capacity over time with outages, positive at the end."""
    rates = [0.0, nominal_bps / 7, nominal_bps]
    at_s = [0.0, *np.unique(np.round(rng.uniform(0.001, 30.0, rng.integers(0, 4)), 3)), 30.001]
    values = [*rng.choice(rates, len(at_s) - 1), nominal_bps]
    return CapacityTrace(np.array([round(t * S) for t in at_s], dtype=np.int64), np.array(values))


def _requests(rng, n, n_pd):
    """Arrivals over 18 s: half of the requests on whole seconds in bursts, all of them within 3 s now and then."""
    at_ns = rng.integers(0, rng.choice([3, 18]) * S, n)
    at_ns = np.where(rng.random(n) < 0.5, at_ns // S * S, at_ns)
    pd_of = rng.integers(0, n_pd, n)
    order = np.lexsort((pd_of, at_ns))
    inputs = np.where(rng.random(n) < 0.3, 1000, rng.integers(1, 3000, n))
    outputs = rng.integers(1, rng.choice([2, 80, 400, 1500]), n)
    return RequestTable.without_prefixes(at_ns[order], inputs, outputs), pd_of[order]


def _decision(rng):
    move = Move(int(rng.integers(3)))
    if rng.random() < 0.5:
        return ClusterDecision(threshold_tokens=float(rng.choice([0.0, 400.0, 1000.0, math.inf])), move=move)
    return ClusterDecision(margin_s=float(rng.choice([-math.inf, -1.0, 0.0, 0.5, math.inf])), move=move)


@st.composite
def cases(draw):
    """A scenario, up to 60 requests, capacity traces, a decision per tick."""
    scenario = draw(scenarios())
    n_pd = len(scenario.deployment.pd)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    requests, pd_of = _requests(rng, draw(st.integers(0, 60)), n_pd)
    traces = tuple(_trace(rng, link.capacity_bps) for link in scenario.deployment.links)
    decisions = tuple(Decision(tuple(_decision(rng) for _ in range(n_pd))) for _ in range(TICKS))
    return Case(World(scenario, 0, requests, pd_of, traces), decisions)


def play(name, case, at=(), read=None):
    """Run a case; yields the engine at each tick, before the tick's decision, and once more when all is drained.

    At the instants `at` between the first and the last tick it stops too and calls `read` with the engine.
    """
    engine = make_engine(name, case.world)
    control_ns = ns_from_s(case.world.scenario.control.control_interval_s)
    for tick, decision in enumerate(case.decisions):
        engine.run_until(tick * control_ns)
        yield engine
        engine.apply(decision)
        until = (tick + 1) * control_ns if tick + 1 < len(case.decisions) else 0
        for at_ns in sorted(t for t in at if tick * control_ns <= t < until):
            engine.run_until(at_ns)
            read(engine)
    engine.run_to_end()
    yield engine


def drained(name, case):
    """The engine at the end of a case."""
    *_, engine = play(name, case)
    return engine


def copied(records):
    return {name: getattr(records, name).copy() for name in records.__dataclass_fields__}


def assert_same(a, b):
    for name in a:
        assert np.array_equal(a[name], b[name]), name


# ------------------------------------------------------------------------------------------------- laws


@LAWS
@given(cases())
def test_requests_are_conserved(engine_name, case):
    """arrived = finished + open + rejected + aborted, in the counters and in the records."""
    arrival = case.world.requests.arrival_ns
    before = None
    for engine in play(engine_name, case):
        totals, records, now = engine.totals(), engine.records, engine.now_ns
        status = records.status
        counts = {s: int((status == s).sum()) for s in Status}
        if not engine.done:
            assert totals.arrived == int((arrival < now).sum())
        assert totals.arrived == len(arrival) - counts[Status.PENDING]
        assert totals.finished == counts[Status.FINISHED]
        assert totals.rejected == counts[Status.REJECTED] == sum(totals.reject_reasons)
        assert totals.aborted == counts[Status.ABORTED] == 0
        assert totals.arrived == totals.finished + counts[Status.OPEN] + totals.rejected + totals.aborted
        assert totals.first_tokens == int((records.first_token_ns < NEVER_NS).sum())
        assert totals.remote == int((records.route == Route.REMOTE).sum())
        assert totals.good <= totals.finished <= totals.first_tokens
        if before is not None:
            for name in Totals.__annotations__:
                a, b = np.atleast_1d(getattr(before, name)), np.atleast_1d(getattr(totals, name))
                assert (b >= a).all(), f"{name} fell"
        before = totals
    assert engine.done, "traffic ended, capacity is positive, yet requests remain"
    assert totals.finished + totals.rejected == len(arrival)


@LAWS
@given(cases())
def test_instances_slots_and_room_are_conserved(engine_name, case):
    deployment = case.world.scenario.deployment
    profile = case.world.scenario.model.hardware["local"].decode
    for engine in play(engine_name, case):
        telemetry = engine.telemetry()
        for pd, spec in zip(telemetry.pd, deployment.pd, strict=True):
            n = spec.n_prefill + spec.n_decode
            assert pd.prefill_instances + pd.decode_instances + pd.converting_instances == n
            assert pd.converting_instances <= 1
            assert pd.prefill_instances >= spec.prefill_floor
            assert pd.decode_instances >= spec.min_decode
            assert pd.prefill_busy_instances <= pd.prefill_instances + pd.converting_instances
            assert pd.decode_busy_instances <= pd.decode_instances + pd.converting_instances
            assert pd.decode_sequences <= profile.slots * (pd.decode_instances + pd.converting_instances)
            assert pd.decode_slot_use <= 1.0
            assert pd.decode_kv_fill <= 1.0
        for group, spec in zip(telemetry.prfaas, deployment.prfaas, strict=True):
            assert group.prefill_instances == spec.n_instances
            assert group.prefill_busy_instances <= spec.n_instances
    totals = engine.totals()
    n = sum(spec.n_prefill + spec.n_decode for spec in deployment.pd)
    instance_ns = totals.prefill_instances_ns + totals.decode_slots_ns / profile.slots
    assert instance_ns <= n * totals.time_ns
    assert totals.prefill_busy_ns <= totals.prefill_instances_ns
    assert totals.remote_busy_ns <= totals.remote_instances_ns
    assert totals.decode_slots_used_ns <= totals.decode_slots_ns


@LAWS
@given(cases())
def test_integral_of_waiting_is_the_sum_of_first_token_times(engine_name, case):
    """Little's law, exactly: open requests at their age."""
    arrival = case.world.requests.arrival_ns
    for engine in play(engine_name, case):
        records, now = engine.records, engine.now_ns
        accepted = (records.status == Status.OPEN) | (records.status == Status.FINISHED)
        ages = np.minimum(records.first_token_ns[accepted], now) - arrival[accepted]
        assert engine.totals().waiting_ns == int(ages.sum())


@LAWS
@given(cases())
def test_stamps_are_ordered_and_durations_are_those_of_the_profiles(engine_name, case):
    engine = drained(engine_name, case)
    world, records = case.world, engine.records
    profile = world.scenario.model.hardware["local"].decode
    rejected = records.status == Status.REJECTED
    for name in STAMPS:
        assert (getattr(records, name)[rejected] == NEVER_NS).all()
    assert (records.route[rejected] == Route.NONE).all()
    assert (records.attempts[rejected] == 0).all()
    done = records.status == Status.FINISHED
    columns = [world.requests.arrival_ns] + [getattr(records, name) for name in STAMPS]
    for earlier, later in itertools.pairwise(columns):
        assert (earlier[done] <= later[done]).all()
    assert (records.decode_join_ns[done] < records.first_token_ns[done]).all()
    assert (records.finish_ns[done] < NEVER_NS).all()
    single = world.requests.output_tokens == 1
    assert (records.first_token_ns == records.finish_ns)[done & single].all()
    assert (records.first_token_ns < records.finish_ns)[done & ~single].all()
    assert (records.attempts[done] >= 1).all()
    once = np.flatnonzero(done & (records.attempts == 1))
    constant = profile.b_s_per_sequence == profile.c_s_per_token == 0.0
    step_ns = round(profile.a_s * 1e9)
    for k in once:
        hardware = "remote" if records.route[k] == Route.REMOTE else "local"
        nominal = world.scenario.model.hardware[hardware].prefill.seconds(int(world.requests.input_tokens[k]))
        service = int(records.service_ns[k])
        assert service == records.prefill_end_ns[k] - records.prefill_start_ns[k]
        if hardware == "remote" or not case.has_warm_up:
            assert service == ns_from_s(nominal)
        else:
            speed = world.scenario.conversion.warmup_speed
            assert service in (ns_from_s(nominal), ns_from_s(nominal / speed))
        first = int(records.first_token_ns[k] - records.decode_join_ns[k])
        whole = int(records.finish_ns[k] - records.decode_join_ns[k])
        if constant and not case.has_warm_up:
            assert first == step_ns
            assert whole == step_ns * int(world.requests.output_tokens[k])
        else:
            assert first >= step_ns - 1
            assert whole >= step_ns * int(world.requests.output_tokens[k]) - 1


@LAWS
@given(cases())
def test_telemetry_counts_what_the_records_say(engine_name, case):
    """Queues, sequences and flows of a reading are the requests between two stamps (until one is prefilled again)."""
    pipelined = case.world.scenario.transport.pipelining and case.world.scenario.model.kv.n_layers > 1
    for engine in play(engine_name, case):
        records, now, telemetry = engine.records, engine.now_ns, engine.telemetry()
        assert np.isfinite(telemetry.values).all()
        encoded = telemetry.encode()
        assert encoded.dtype == np.float32
        assert ((encoded >= 0) & (encoded <= 1)).all()
        if (records.attempts > 1).any():
            return
        # what lies at `now` has not been handled, except that a drained run handled its last instant
        reached = now + 1 if engine.done else now
        accepted = records.attempts == 1
        pd_of = case.world.pd_of
        remote = records.route == Route.REMOTE

        def between(mask, start, end, reached=reached, records=records):
            started = True if start is None else getattr(records, start) < reached
            return int((mask & started & (getattr(records, end) >= reached)).sum())

        for i, pd in enumerate(telemetry.pd):
            mine = accepted & (pd_of == i)
            assert pd.prefill_queue_requests == between(mine & ~remote, None, "prefill_start_ns")
            assert pd.prefill_busy_instances == between(mine & ~remote, "prefill_start_ns", "prefill_end_ns")
            assert pd.decode_queue_requests == between(mine, "transfer_end_ns", "decode_join_ns")
            assert pd.decode_sequences == between(mine, "decode_join_ns", "finish_ns")
        for j, group in enumerate(telemetry.prfaas):
            mine = accepted & (records.prfaas == j)
            assert group.prefill_queue_requests == between(mine, None, "prefill_start_ns")
            assert group.prefill_busy_instances == between(mine, "prefill_start_ns", "prefill_end_ns")
        for k, spec in enumerate(case.world.scenario.deployment.links):
            mine = accepted & (records.prfaas == int(spec.prfaas[-1])) & (pd_of == int(spec.pd[-1]))
            on_the_way = between(mine, "prefill_end_ns", "transfer_end_ns")
            if spec.latency_s == 0.0 and not pipelined:
                assert telemetry.link[k].open_flows == on_the_way
            assert telemetry.link[k].staged_bytes <= telemetry.link[k].backlog_bytes + 1e-6


@LAWS
@given(cases())
def test_bytes_are_conserved_and_links_not_exceeded(engine_name, case):
    world = case.world
    for engine in play(engine_name, case):
        totals = engine.totals()
        for trace, bits, peak in zip(world.links, totals.egress_bits, totals.egress_peak_bps, strict=True):
            ends = np.append(trace.time_ns[1:], totals.time_ns)
            spans = np.clip(np.minimum(ends, totals.time_ns) - trace.time_ns, 0, None)
            room = float((trace.capacity_bps * spans).sum()) / S
            # a flow ends on a whole ns
            slack = (
                float(trace.capacity_bps.max())
                * 1e-9
                * (totals.remote + int(engine.records.attempts.sum()) + 1)
            )
            assert 0.0 <= bits <= room + slack + 1e-6
            assert peak <= trace.capacity_bps.max() * (1 + 1e-9) + slack
    # all that was to be sent has been sent, and nothing else
    assert math.fsum(engine.totals().egress_bits) == 8.0 * int(engine.records.sent_bytes.sum())
    kv = world.scenario.model.kv
    for k in np.flatnonzero((engine.records.attempts == 1) & (engine.records.route == Route.REMOTE)):
        assert engine.records.sent_bytes[k] == kv.transfer_bytes(int(world.requests.input_tokens[k]))


@LAWS
@given(cases())
def test_busy_times_are_the_sums_of_the_records(engine_name, case):
    engine = drained(engine_name, case)
    records, totals = engine.records, engine.totals()
    if (records.attempts > 1).any():
        return
    remote = records.route == Route.REMOTE
    assert totals.remote_busy_ns == int(records.service_ns[remote].sum())
    assert totals.prefill_busy_ns == int(records.service_ns[~remote].sum())
    done = records.status == Status.FINISHED
    assert totals.decode_slots_used_ns == int((records.finish_ns - records.decode_join_ns)[done].sum())


@LAWS
@given(cases())
def test_legal_moves_are_carried_out_and_others_counted(engine_name, case):
    engines = play(engine_name, case)
    legal, conversions, invalid = None, 0, 0
    for engine, decision in zip(engines, (None, *case.decisions), strict=True):
        if decision is not None:
            for cluster, moves in zip(decision.clusters, legal, strict=True):
                assert moves[Move.NONE]
                if cluster.move is not Move.NONE:
                    conversions += moves[cluster.move]
                    invalid += not moves[cluster.move]
        totals = engine.totals()
        assert (totals.conversions, totals.invalid_moves) == (conversions, invalid)
        legal = engine.legal()
        interval_ns = ns_from_s(case.world.scenario.control.conversion_interval_s)
        on_clock = engine.now_ns > 0 and engine.now_ns % interval_ns == 0
        assert on_clock or not any(m[Move.PREFILL_TO_DECODE] or m[Move.DECODE_TO_PREFILL] for m in legal)


@LAWS
@given(cases())
def test_thresholds_decide_where_local_prefill_exists(engine_name, case):
    engine = drained(engine_name, case)
    control_ns = ns_from_s(case.world.scenario.control.control_interval_s)
    deployment = case.world.scenario.deployment
    for k, (at_ns, tokens) in enumerate(
        zip(case.world.requests.arrival_ns.tolist(), case.world.requests.input_tokens.tolist(), strict=True)
    ):
        pd = int(case.world.pd_of[k])
        spec = deployment.pd[pd]
        route = engine.records.route[k]
        if engine.records.status[k] == Status.REJECTED:
            continue
        # an arrival on a tick follows that tick's decision
        decision = case.decisions[min(at_ns // control_ns, TICKS - 1)].clusters[pd]
        if not any(link.pd == spec.name for link in deployment.links):
            assert route == Route.LOCAL
        elif decision.threshold_tokens is not None and spec.prefill_floor >= 1:
            assert route == (Route.REMOTE if tokens > decision.threshold_tokens else Route.LOCAL)
        elif decision.margin_s == -math.inf or spec.n_prefill + spec.n_decode == 0:
            assert route == Route.REMOTE
        elif decision.margin_s == math.inf and spec.prefill_floor >= 1:
            assert route == Route.LOCAL


@LAWS
@given(cases(), st.lists(st.integers(0, TICKS * S), max_size=12))
def test_reading_changes_nothing(engine_name, case, instants):
    """A run read at odd instants, several times, with a snapshot taken, and the same run left alone."""

    def read(engine):
        for _ in range(2):
            engine.telemetry()
            engine.totals()
            engine.legal()
            engine.snapshot()

    silent = [(engine.totals(), copied(engine.records)) for engine in play(engine_name, case)]
    watched = [
        (engine.totals(), copied(engine.records)) for engine in play(engine_name, case, instants, read)
    ]
    for (totals_a, records_a), (totals_b, records_b) in zip(silent, watched, strict=True):
        assert totals_a == totals_b
        assert_same(records_a, records_b)


@LAWS
@given(cases())
def test_same_world_same_decisions_same_trajectory(engine_name, case):
    arrays = [
        case.world.requests.arrival_ns,
        case.world.requests.input_tokens,
        case.world.requests.output_tokens,
    ]
    kept = [a.copy() for a in arrays]
    runs = []
    for _ in range(2):
        values = []
        for engine in play(engine_name, case):
            values.append(engine.telemetry().values)
        runs.append((values, engine.totals(), copied(engine.records)))
    assert all(np.array_equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1] == runs[1][1]
    assert_same(runs[0][2], runs[1][2])
    # whatever is decided, the world is as it was drawn
    assert all(np.array_equal(a, b) for a, b in zip(arrays, kept, strict=True))


@LAWS
@given(cases(), st.integers(0, TICKS - 1), st.integers(0, S - 1))
def test_a_snapshot_returns_to_the_very_state(engine_name, case, at_tick, into_ns):
    """Restored into the same engine and into a fresh one, the rest of the run is the same to the last bit."""
    control_ns = ns_from_s(case.world.scenario.control.control_interval_s)
    engine = make_engine(engine_name, case.world)

    def rest(engine):
        out = []
        for tick in range(at_tick + 1, TICKS):
            engine.run_until(tick * control_ns)
            out.append(engine.telemetry().values)
            engine.apply(case.decisions[tick])
        engine.run_to_end()
        return out, engine.totals(), copied(engine.records)

    for tick in range(at_tick + 1):
        engine.run_until(tick * control_ns)
        engine.apply(case.decisions[tick])
    engine.run_until(at_tick * control_ns + into_ns % control_ns)
    snapshot = engine.snapshot()
    here = engine.telemetry().values
    first = rest(engine)
    end, engine_end = engine.snapshot(), engine.telemetry().values
    fresh = make_engine(engine_name, case.world)
    for other in (engine, fresh):
        other.restore(snapshot)
        assert np.array_equal(other.telemetry().values, here)
        again = rest(other)
        assert all(np.array_equal(a, b) for a, b in zip(first[0], again[0], strict=True))
        assert first[1] == again[1]
        assert_same(first[2], again[2])
        # a drained run has handled its last instant; a decision after it is part of the state too
        other.restore(end)
        assert other.done
        assert np.array_equal(other.telemetry().values, engine_end)
        assert_same(first[2], copied(other.records))
        other.apply(case.decisions[0])
        later = other.snapshot()
        other.run_until(other.now_ns + 5 * S)
        values = other.telemetry().values
        other.restore(later)
        other.run_until(other.now_ns + 5 * S)
        assert np.array_equal(other.telemetry().values, values)


@LAWS
@given(scenarios())
def test_no_traffic_at_all(engine_name, scenario):
    """Zero arrivals for a whole run: telemetry is finite and neutral, nothing is counted."""
    empty = np.zeros(0, dtype=np.int64)
    links = tuple(
        CapacityTrace(np.zeros(1, dtype=np.int64), np.array([link.capacity_bps]))
        for link in scenario.deployment.links
    )
    world = World(scenario, 0, RequestTable.without_prefixes(empty, empty, empty), empty, links)
    engine = make_engine(engine_name, world)
    assert engine.done
    for tick in range(TICKS):
        engine.run_until(tick * S)
        telemetry = engine.telemetry()
        assert np.isfinite(telemetry.values).all()
        for pd in telemetry.pd:
            assert pd.lengths_valid == pd.output_valid == pd.ttft_valid == pd.decode_sequences == 0.0
        engine.apply(Decision.same(len(telemetry.pd), margin_s=0.0))
    totals = engine.totals()
    assert totals.arrived == totals.waiting_ns == totals.remote_busy_ns == totals.prefill_busy_ns == 0
