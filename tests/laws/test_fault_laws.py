"""Laws of a world in which instances fail and clients give up: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.simulator.faults import FaultTrace
from prfaas_env.simulator.formulas import NEVER_NS
from prfaas_env.simulator.records import Route, Status, Totals

from .test_simulation_laws import LAWS, S, cases, play

#: Nothing fails after this time, so that every case ends.
WELL_FROM_S = 40


def _faults(rng, deployment):
    sizes = [c.n_instances for c in deployment.prfaas] + [c.n_prefill + c.n_decode for c in deployment.pd]
    rows = {}
    for _ in range(rng.integers(0, 12)):
        cluster = int(rng.integers(len(sizes)))
        instance = int(rng.integers(sizes[cluster]))
        start = int(rng.integers(0, 25)) * S if rng.random() < 0.5 else int(rng.integers(0, 25 * S))
        rows[start, cluster, instance] = float(rng.choice([0.0, 0.0, 0.4]))
        rows[start + int(rng.integers(1, 12 * S)), cluster, instance] = 1.0
    for cluster, size in enumerate(sizes):
        for instance in range(size):
            rows[WELL_FROM_S * S, cluster, instance] = 1.0
    return FaultTrace.of((*place, speed) for place, speed in rows.items())


@st.composite
def faulty_cases(draw):
    """A case of `cases` with faults, impatient clients, a deadline, connections that are set up, jitter."""
    case = draw(cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    world = case.world
    deployment = world.scenario.deployment
    links = tuple(
        link.model_copy(
            update={
                "setup_s": float(rng.choice([0.0, 0.5, 2.0])),
                "idle_s": float(rng.choice([0.1, 3.0])),
                "rtt_s": 0.02,
                "window_bytes": int(rng.choice([5_000, 50_000])),
                "jitter_s": float(rng.choice([0.0, 0.1])),
            }
        )
        for link in deployment.links
    )
    scenario = world.scenario.replace(
        deployment=deployment.model_copy(update={"links": links}),
        faults={"deadline_s": float(rng.choice([2.0, 9.0])) if rng.random() < 0.4 else None},
    )
    n = len(world.requests)
    arrival = world.requests.arrival_ns
    impatient = rng.random() < 0.6
    world = dataclasses.replace(
        world,
        scenario=scenario,
        faults=_faults(rng, deployment),
        give_up_ns=arrival + rng.integers(1, 20 * S, n) if impatient else None,
        jitter_ns=(rng.exponential(1.0, n) * S).astype(np.int64),
    )
    return dataclasses.replace(case, world=world)


@LAWS
@given(faulty_cases())
def test_requests_are_conserved_whatever_fails(engine_name, case):
    arrival = case.world.requests.arrival_ns
    before = None
    for engine in play(engine_name, case):
        totals, records, now = engine.totals(), engine.records, engine.now_ns
        counts = {s: int((records.status == s).sum()) for s in Status}
        assert totals.finished == counts[Status.FINISHED]
        assert totals.rejected == counts[Status.REJECTED]
        assert totals.aborted == counts[Status.ABORTED]
        assert totals.arrived == len(arrival) - counts[Status.PENDING]
        assert totals.arrived == totals.finished + counts[Status.OPEN] + totals.rejected + totals.aborted
        assert totals.first_tokens == int((records.first_token_ns < NEVER_NS).sum())
        # Little's law: open requests at their age, aborted ones until they were given up
        accepted = (records.status != Status.PENDING) & (records.status != Status.REJECTED)
        until = np.minimum(records.first_token_ns, np.minimum(records.abort_ns, now))
        assert totals.waiting_ns == int((until - arrival)[accepted].sum())
        if before is not None:
            for name in Totals.__annotations__:
                a, b = np.atleast_1d(getattr(before, name)), np.atleast_1d(getattr(totals, name))
                assert (b >= a).all(), f"{name} fell"
        before = totals
    assert engine.done, "nothing fails any more, capacity is positive, yet requests remain"
    aborted = records.status == Status.ABORTED
    assert ((records.abort_ns < NEVER_NS) == aborted).all()
    assert (records.abort_ns[aborted] > arrival[aborted]).all()
    assert (records.finish_ns[aborted] == NEVER_NS).all()
    give_up = case.world.give_up_ns
    if give_up is not None:
        finished = records.status == Status.FINISHED
        assert (records.finish_ns[finished] <= give_up[finished]).all()
    deadline_s = case.world.scenario.faults.deadline_s
    if deadline_s is not None:
        had_first = records.first_token_ns < NEVER_NS
        assert (records.first_token_ns[had_first] <= arrival[had_first] + deadline_s * S).all()


@LAWS
@given(faulty_cases())
def test_bytes_and_instances_are_conserved_whatever_fails(engine_name, case):
    deployment = case.world.scenario.deployment
    for engine in play(engine_name, case):
        telemetry = engine.telemetry()
        assert np.isfinite(telemetry.values).all()
        for pd, spec in zip(telemetry.pd, deployment.pd, strict=True):
            n = spec.n_prefill + spec.n_decode
            assert pd.prefill_instances + pd.decode_instances + pd.converting_instances <= n
            assert pd.decode_slot_use <= 1.0
            assert pd.decode_kv_fill <= 1.0
        for group in telemetry.link:
            assert 0.0 <= group.retransmission_share <= 1.0
    # drained: no work, no backlog, and every bit that went out belongs to a request
    telemetry = engine.telemetry()
    for group in (*telemetry.pd, *telemetry.prfaas):
        assert group.prefill_queue_requests == group.prefill_busy_instances == group.prefill_residual_s == 0
        assert group.prefill_queue_tokens == group.prefill_queue_work_s == 0
    for pd in telemetry.pd:
        assert pd.decode_sequences == pd.decode_queue_requests == pd.decode_queue_tokens == 0
        assert pd.decode_kv_fill == 0
    for link in telemetry.link:
        assert link.backlog_bytes == link.open_flows == link.staged_bytes == 0
    records = engine.records
    sent_bits = 8 * int(records.sent_bytes.sum())
    tries = int(records.attempts.sum())
    assert abs(sum(engine.totals().egress_bits) - sent_bits) <= 8.0 * tries + 1e-6 * sent_bits
    assert (records.sent_bytes >= 0).all()
    assert (records.prfaas[records.route == Route.LOCAL] == -1).all()
