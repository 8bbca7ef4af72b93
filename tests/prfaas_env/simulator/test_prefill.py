"""The prefill queue: FIFO per cluster and role, one at a time per instance, lowest idle id."""

from __future__ import annotations

import math

import pytest

S = 1_000_000_000
NEVER, ALWAYS = math.inf, 0.0


def spans(engine):
    records = engine.records
    return list(zip(records.prefill_start_ns.tolist(), records.prefill_end_ns.tolist(), strict=True))


def test_fifo_on_one_instance(tiny):
    # local: 2 ms per token. Short requests do not overtake.
    engine = tiny.run(
        tiny.scenario(), [(0, 1000, 1), (0.1, 3000, 1), (0.2, 10, 1), (9, 500, 1)], threshold=NEVER
    )
    assert spans(engine) == [(0, 2 * S), (2 * S, 8 * S), (8 * S, 8_020_000_000), (9 * S, 10 * S)]
    assert engine.records.service_ns.tolist() == [2 * S, 6 * S, 20_000_000, S]


def test_two_instances_take_the_head_as_they_become_idle(tiny):
    # I0: A 0..2; I1: B 0.1..6.1; C waits for I0: 2..3; D follows on I0: 3..4; E (arrives 5) takes idle I0
    engine = tiny.run(
        tiny.scenario(pd={"n_prefill": 2}),
        [(0, 1000, 1), (0.1, 3000, 1), (0.2, 500, 1), (0.3, 500, 1), (5, 100, 1)],
        threshold=NEVER,
    )
    assert spans(engine) == [
        (0, 2 * S),
        (100_000_000, 6_100_000_000),
        (2 * S, 3 * S),
        (3 * S, 4 * S),
        (5 * S, 5_200_000_000),
    ]


def test_arrivals_of_one_instant_start_in_order_of_request(tiny):
    engine = tiny.run(
        tiny.scenario(pd={"n_prefill": 2}), [(1, 2000, 1), (1, 1000, 1), (1, 500, 1)], threshold=NEVER
    )
    assert spans(engine) == [(S, 5 * S), (S, 3 * S), (3 * S, 4 * S)]


def test_remote_and_local_queues_are_apart(tiny):
    # threshold 500: 500 tokens stay (at equality local), 501 go
    engine = tiny.run(tiny.scenario(), [(0, 500, 1), (0, 501, 1), (0, 500, 1), (0, 501, 1)], threshold=500.0)
    assert spans(engine) == [(0, S), (0, 501_000_000), (S, 2 * S), (501_000_000, 1_002_000_000)]
    assert engine.records.route.tolist() == [1, 2, 1, 2]
    assert engine.records.prfaas.tolist() == [-1, 0, -1, 0]
    assert engine.records.sent_bytes.tolist() == [0, 501_000, 0, 501_000]
    assert engine.totals().remote == 2


def test_a_prefill_time_is_rounded_half_even_once(tiny):
    # 5 and 7 tokens at 0.5 ns each are 2.5 and 3.5 ns: 2 and 4
    scenario = tiny.scenario(local={"c1_s_per_token": 0.5e-9})
    engine = tiny.run(scenario, [(0, 5, 1), (1, 7, 1)], threshold=NEVER)
    assert engine.records.service_ns.tolist() == [2, 4]


def test_prefill_of_no_time_at_all(tiny):
    scenario = tiny.scenario(local={"c1_s_per_token": 0.0}, kv={"bytes_per_token": 0, "n_layers": 3})
    engine = tiny.run(scenario, [(1, 5, 1), (1, 5, 1), (1, 5, 2)], threshold=NEVER)
    assert spans(engine) == [(S, S)] * 3
    assert engine.records.transfer_end_ns.tolist() == [S] * 3
    assert engine.records.first_token_ns.tolist() == [1_010_000_000] * 3


@pytest.mark.parametrize("layers", [1, 3])
def test_remote_prefill_of_no_time_and_no_bytes(tiny, layers):
    scenario = tiny.scenario(remote={"c1_s_per_token": 0.0}, kv={"bytes_per_token": 0, "n_layers": layers})
    engine = tiny.run(scenario, [(1, 5, 1), (1, 5, 2)], threshold=ALWAYS)
    assert engine.records.transfer_end_ns.tolist() == [S] * 2
    assert engine.records.finish_ns.tolist() == [1_010_000_000, 1_020_000_000]


def test_table_profile_is_read_between_its_points(tiny):
    # 100 tokens 1 s, 300 tokens 2 s, 500 tokens 6 s: 200 -> 1.5, 400 -> 4, 600 -> 8 (last slope), 50 -> 0.75
    table = {
        "kind": "table",
        "tokens": [100, 300, 500],
        "seconds_at": [1.0, 2.0, 6.0],
        "source": "made up",
        "c0_s": None,
        "c1_s_per_token": None,
    }
    scenario = tiny.scenario(pd={"n_prefill": 4})
    hardware = scenario.model.hardware["local"].model_dump()
    hardware["prefill"] = {k: v for k, v in table.items() if v is not None}
    model = {**scenario.model.model_dump(), "hardware": {"local": hardware, "remote": hardware}}
    scenario = scenario.replace(model=model)
    rows = [(0, 200, 1), (0, 400, 1), (0, 600, 1), (0, 50, 1)]
    engine = tiny.run(scenario, rows, threshold=NEVER)
    assert engine.records.service_ns.tolist() == [1_500_000_000, 4 * S, 8 * S, 750_000_000]


def test_lowest_idle_id_takes_the_work(hand):
    """Instances of one cluster are equal, so only the inside of the reference engine tells them apart."""
    reference = hand("simpy")
    engine = reference.engine(reference.scenario(pd={"n_prefill": 3}), [(4, 10_000, 1), (5, 10_000, 1)])
    reference.drive(engine, threshold=NEVER)
    for at_s, busy in [(4.5, [True, False, False, False]), (5.5, [True, True, False, False])]:
        engine.run_until(reference.ns(at_s))
        assert [i.running is not None for i in engine.sites[0].instances] == busy


def test_telemetry_of_the_queue(tiny):
    # two local instances, three requests at 0: 1,000 and 2,000 tokens run (2 s, 4 s), 500 tokens (1 s) wait
    engine = tiny.engine(
        tiny.scenario(pd={"n_prefill": 2}), [(0, 1000, 1), (0.25, 2000, 1), (0.5, 500, 1), (0.75, 250, 1)]
    )
    tiny.drive(engine, threshold=NEVER)
    engine.run_until(tiny.ns(1.0))
    pd = engine.telemetry().pd[0]
    assert pd.prefill_queue_requests == 2
    assert pd.prefill_queue_tokens == 750
    assert pd.prefill_queue_work_s == 1.5
    assert pd.prefill_queue_oldest_s == 0.5
    assert pd.prefill_residual_s == 1.0 + 3.25
    assert pd.prefill_busy_instances == 2
    assert pd.prefill_instances == 2
    remote = engine.telemetry().prfaas[0]
    assert remote.prefill_queue_requests == remote.prefill_busy_instances == 0
    assert remote.prefill_instances == 1


def test_busy_time_of_prefill_is_exact(tiny):
    engine = tiny.run(
        tiny.scenario(pd={"n_prefill": 2}), [(0, 1000, 1), (0.5, 500, 1)], threshold=NEVER, until=10
    )
    totals = engine.totals()
    assert totals.prefill_busy_ns == 3 * S
    assert totals.prefill_instances_ns == 20 * S
    assert totals.remote_busy_ns == 0
    assert totals.remote_instances_ns == 10 * S
