"""Prefix caches in whole runs, worked out on paper, on both engines.

Blocks have 100 tokens; a token weighs 1,000 bytes, so a unit is 100,000 bytes. Remote 1 ms, local 2 ms per new token;
the link carries one token per ms; the hand-over inside the PD cluster one per us.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from prfaas_env.decision import Decision, Move
from prfaas_env.simulator import prefix_pool as X
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.faults import FaultTrace
from prfaas_env.simulator.metrics import episode_metrics
from prfaas_env.simulator.records import PREFIX_COUNTERS, Route, Status

S = 1_000_000_000
BLOCK = 100
UNIT = 100_000
NEVER, ALWAYS = math.inf, 0.0
REMOTE_POOL, PD_POOL = 0, 1
A = list(range(100))
"""Ids of one long prompt; a prompt of n tokens has the first ceil(n / 100)."""
B = list(range(500, 600))
"""Another one that shares nothing with it."""


class Cached:
    """One run of requests `(arrival s, input tokens, output tokens, ids)`; ids None: no prefix data at all."""

    def __init__(self, tiny, requests, *, pool=None, block=BLOCK, pd_of=None, world_fields=None, **sections):
        scenario = tiny.scenario(**sections)
        if pool is not False:
            no_limit = {"prfaas_capacity_bytes": None, "pd_capacity_bytes": None}
            scenario = scenario.replace(prefix_pool={**no_limit, **(pool or {})})
        world = tiny.world(scenario, [r[:3] for r in requests], pd_of=pd_of)
        if requests[0][3] is not None:
            rows = [r[3][: -(-r[1] // block)] for r in requests]
            table = dataclasses.replace(
                world.requests,
                block_offsets=np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64),
                block_ids=np.array([i for row in rows for i in row], dtype=np.int64),
                block_tokens=block,
            )
            world = dataclasses.replace(world, requests=table)
        world = dataclasses.replace(world, **(world_fields or {}))
        self.world = world
        self.engine = make_engine(tiny.engine_name, world)
        self.start = self.engine.totals()

    def decide(self, at_s, **decision):
        """Run to an instant and put a decision in force for all PD clusters."""
        self.engine.run_until(round(at_s * S))
        self.engine.apply(Decision.same(len(self.world.scenario.deployment.pd), **decision))
        return self

    def at(self, at_s):
        self.engine.run_until(round(at_s * S))
        return self

    def end(self):
        self.engine.run_to_end(10**15)
        assert self.engine.done
        return self

    def pool(self, pool):
        engine = self.engine
        return X.pool_state(engine.prefix.pools if engine.name == "simpy" else engine._caches, pool)

    def blocks(self, pool):
        return sorted(self.pool(pool).cached)

    def stamps(self, name):
        return [t / S for t in getattr(self.engine.records, f"{name}_ns").tolist()]

    @property
    def records(self):
        return self.engine.records

    @property
    def counts(self):
        return dict(zip(PREFIX_COUNTERS, self.engine.totals().prefix, strict=True))

    @property
    def metrics(self):
        return episode_metrics(self.world, self.records, self.start, self.engine.totals())


# ------------------------------------------------------------------------------------------ whole sessions


def test_only_the_new_part_of_each_turn_is_prefilled(tiny):
    """Three turns of 200, 50 and 60 new tokens."""
    turns = [(0, 200, 1, A), (10, 250, 1, A), (20, 310, 1, A)]
    run = Cached(tiny, turns, block=10).decide(0, threshold_tokens=NEVER).end()
    assert (run.records.service_ns / 1e6).tolist() == [400.0, 100.0, 120.0]
    assert run.records.incremental_tokens.tolist() == [200, 50, 60]
    assert run.records.cached_tokens(run.world.requests.input_tokens).tolist() == [0, 200, 250]
    assert run.metrics["prefix_pool"]["hit_share"] == 450 / 760
    assert run.metrics["prefix_pool"]["hit_tokens"] == 450
    assert not any("no prefix data" in note for note in run.metrics["notes"])


def test_without_ids_every_turn_is_new_and_the_run_says_so(tiny):
    turns = [(0, 200, 1, None), (10, 250, 1, None), (20, 310, 1, None)]
    run = Cached(tiny, turns).decide(0, threshold_tokens=NEVER).end()
    assert (run.records.service_ns / 1e6).tolist() == [400.0, 500.0, 620.0]
    assert run.metrics["prefix_pool"]["hit_share"] == 0.0
    assert "no prefix data in the workload: the prefix pool does nothing" in run.metrics["notes"]


def test_ids_without_a_pool_change_nothing(tiny):
    turns = [(0, 200, 1, A), (10, 250, 1, A)]
    run = Cached(tiny, turns, pool=False, block=10).decide(0, threshold_tokens=NEVER).end()
    assert (run.records.service_ns / 1e6).tolist() == [400.0, 500.0]
    assert "prefix_pool" not in run.metrics
    assert set(run.engine.totals().prefix) == {0}


@pytest.mark.parametrize(
    ("kv", "pool", "service_ms"),
    [
        ({}, {}, 500.0),  # blocks alone: 1,000 of 1,250
        ({"fixed_bytes": 1}, {}, 500.0),  # the checkpoint behind the first prompt
        ({"fixed_bytes": 1}, {"checkpoints": "none"}, 2500.0),
        # checkpoints behind 400 and 800
        ({"fixed_bytes": 1}, {"checkpoints": "every_n_tokens", "checkpoint_every_tokens": 400}, 900.0),
        ({}, {"checkpoints": "none"}, 500.0),  # no state, no need
    ],
)
def test_checkpoint_rules(tiny, kv, pool, service_ms):
    requests = [(0, 1000, 1, A), (10, 1250, 1, A)]
    run = Cached(tiny, requests, pool=pool, kv=kv).decide(0, threshold_tokens=NEVER).end()
    assert run.records.service_ns[1] / 1e6 == service_ms


def test_the_same_prompt_again_leaves_a_block_to_prefill(tiny):
    run = Cached(tiny, [(0, 1000, 1, A), (10, 1000, 1, A), (20, 1001, 1, A)])
    run.decide(0, threshold_tokens=NEVER).end()
    assert run.records.incremental_tokens.tolist() == [1000, 100, 1]


def test_the_time_of_a_prefill_behind_a_cache_is_that_of_the_profile(tiny):
    # T(n) = 0.1 + 2e-3 n + 1e-6 n^2: T(1250) - T(1000) + T(0) = 0.5 + 0.5625 + 0.1
    requests = [(0, 1000, 1, A), (10, 1250, 1, A)]
    run = Cached(tiny, requests, local={"c0_s": 0.1, "c2_s_per_token2": 1e-6})
    run.decide(0, threshold_tokens=NEVER).end()
    assert run.records.service_ns[1] == 1_162_500_000


# ------------------------------------------------------------------------------------------ scarce rule


def test_the_length_rule_counts_uncached_tokens(tiny):
    """20,000 tokens with 19,000 cached stay local at a threshold of 10,000; then a full remote queue rejects."""
    requests = [
        (0, 19_000, 1, A),
        (100, 20_000, 1, A),
        *((t, 50_000, 1, B) for t in (200, 201)),
        (202, 100_000, 1, list(range(1000, 1100))),
    ]
    run = Cached(tiny, requests, block=1000, admission={"max_queue_requests": 1})
    run.decide(0, threshold_tokens=NEVER).decide(99, threshold_tokens=10_000.0).end()
    records = run.records
    assert records.route.tolist() == [Route.LOCAL, Route.LOCAL, Route.REMOTE, Route.REMOTE, Route.NONE]
    assert records.service_ns[1] == 2 * S
    # one runs and one waits: the rule says remote, the remote queue is full, so the request is turned away
    assert records.status[4] == Status.REJECTED
    assert run.engine.totals().reject_reasons == (0, 0, 1)
    assert records.incremental_tokens[4] == 100_000
    assert records.cached_tokens(run.world.requests.input_tokens)[4] == 0


@pytest.mark.parametrize(("threshold", "route"), [(499.0, Route.REMOTE), (500.0, Route.LOCAL)])
def test_at_equality_of_the_incremental_length_it_stays(tiny, threshold, route):
    requests = [(0, 1000, 1, A), (10, 1500, 1, A)]
    run = Cached(tiny, requests).decide(0, threshold_tokens=NEVER).decide(9, threshold_tokens=threshold)
    assert run.end().records.route[1] == route


def test_remote_prefill_computes_what_the_remote_cache_lacks_and_sends_what_the_local_one_lacks(tiny):
    # The PD pool holds nothing. Request 1: l = 1500, prefill 500 (0.5 s), sends 1,500 (1.5 s).
    requests = [(0, 1000, 1, A), (10, 1500, 1, A)]
    run = Cached(tiny, requests, pool={"pd_capacity_bytes": 0})
    run.decide(0, threshold_tokens=ALWAYS).decide(9, threshold_tokens=1499.0).end()
    assert run.stamps("prefill_end")[1] == 10.5
    assert run.stamps("transfer_end")[1] == 12.0
    assert run.records.sent_bytes.tolist() == [1_000_000, 1_500_000]
    assert run.records.incremental_tokens.tolist() == [1000, 500]


def test_after_a_remote_prefill_both_clusters_have_the_prompt(tiny):
    # prefill 0..1, flow 1..2
    run = Cached(tiny, [(0, 1000, 1, A), (10, 1500, 1, A)]).decide(0, threshold_tokens=ALWAYS)
    run.at(0.999)
    assert (run.blocks(REMOTE_POOL), run.blocks(PD_POOL)) == ([], [])
    run.at(1.5)
    assert (run.blocks(REMOTE_POOL), run.blocks(PD_POOL)) == (A[:10], [])
    run.at(2.001)
    assert run.blocks(PD_POOL) == A[:10]
    run.end()
    # request 1: l = 500; prefill 0.5 s, and only 500 tokens are sent
    assert run.stamps("transfer_end")[1] == 11.0
    assert run.records.sent_bytes.tolist() == [1_000_000, 500_000]


def test_a_local_prefill_hands_over_the_new_part(tiny):
    # 1 token per us inside the cluster: 500 tokens behind 1,000 cached take 0.5 ms
    run = Cached(tiny, [(0, 1000, 1, A), (10, 1500, 1, A)]).decide(0, threshold_tokens=NEVER).end()
    assert run.stamps("transfer_end") == [2.001, 11.0005]
    assert run.blocks(REMOTE_POOL) == []


def test_the_state_travels_with_every_prompt(tiny):
    # 500,000 bytes of state: 0.5 s of link on top of the new part
    requests = [(0, 1000, 1, A), (10, 1500, 1, A)]
    run = Cached(tiny, requests, kv={"fixed_bytes": 500_000}).decide(0, threshold_tokens=ALWAYS).end()
    assert run.records.sent_bytes.tolist() == [1_500_000, 1_000_000]
    assert run.stamps("transfer_end")[1] == 11.5


def test_margin_routing_predicts_with_the_cache_of_each_side(tiny):
    # The PD cluster has 1,000 tokens of 1,500, the PrfaaS cluster none: local 0.5 x 2 + 0.0005 + 0.01 = 1.0105 s,
    # remote 1.5 + 0.5 (what the PD cluster lacks) + 0.01 = 2.01 s. Without caches remote 3.01 would beat 3.0115.
    requests = [(0, 1000, 1, A), (10, 1500, 1, A), (30, 1500, 1, B)]
    run = Cached(tiny, requests).decide(0, threshold_tokens=NEVER).decide(9, margin_s=0.0).end()
    assert run.records.route.tolist() == [Route.LOCAL, Route.LOCAL, Route.REMOTE]
    border = Cached(tiny, requests).decide(0, threshold_tokens=NEVER).decide(9, margin_s=-1.0).end()
    assert border.records.route[1] == Route.REMOTE  # 2.01 - 1 < 1.0105
    over = Cached(tiny, requests).decide(0, threshold_tokens=NEVER).decide(9, margin_s=-0.99).end()
    assert over.records.route[1] == Route.LOCAL


# ------------------------------------------------------------------------------------------ abundant rule


def test_a_prefix_is_copied_to_where_the_prefill_runs(tiny):
    # PD has 1,000 tokens. Abundant: l = 500 > 400: remote. The copy of 1,000 tokens takes 1 s and 0.25 s latency,
    # the prefill 0.5 s, the 500 tokens that the PD cluster lacks 0.5 s and 0.25 s.
    requests = [(0, 1000, 1, A), (10, 1500, 1, A)]
    run = Cached(tiny, requests, link={"capacity_bps": 8e6, "latency_s": 0.25})
    run.decide(0, threshold_tokens=NEVER).decide(9, threshold_tokens=400.0, cache_rule="abundant")
    link = run.at(10.5).engine.telemetry().link[0]
    assert (link.backlog_bytes, link.open_flows, link.staged_bytes) == (500_000, 1, 500_000)
    assert run.engine.telemetry().prfaas[0].prefill_queue_requests == 0
    assert run.at(11.2).blocks(REMOTE_POOL) == []
    assert run.at(11.3).blocks(REMOTE_POOL) == A[:10]
    run.end()
    assert run.stamps("prefill_start")[1] == 11.25
    assert run.stamps("prefill_end")[1] == 11.75
    assert run.stamps("transfer_end")[1] == 12.5
    assert run.records.sent_bytes.tolist() == [0, 1_500_000]
    assert run.engine.totals().egress_bits == (12e6,)
    assert run.records.incremental_tokens[1] == 500
    assert run.counts["copies"] == 1
    assert run.blocks(REMOTE_POOL) == run.blocks(PD_POOL) == A[:15]


def test_a_prefix_is_copied_to_the_local_side_too(tiny):
    # Request 0 came through pd0, so pd1 has nothing and the PrfaaS cluster 1,000 tokens. l = 500 <= 600: local.
    # Copy 1 s, prefill 500 x 2 ms, hand-over of 500 tokens.
    requests = [(0, 1000, 1, A), (10, 1500, 1, A)]
    run = Cached(
        tiny,
        requests,
        pd=[{"name": "pd0"}, {"name": "pd1"}],
        link=[{"pd": "pd0"}, {"pd": "pd1"}],
        pd_of=[0, 1],
    )
    run.decide(0, threshold_tokens=ALWAYS).decide(9, threshold_tokens=600.0, cache_rule="abundant").end()
    assert run.records.route[1] == Route.LOCAL
    assert run.stamps("prefill_start")[1] == 11.0
    assert run.stamps("prefill_end")[1] == 12.0
    assert run.stamps("transfer_end")[1] == 12.0005
    assert run.records.sent_bytes.tolist() == [1_000_000, 1_000_000]
    assert run.engine.totals().egress_bits == (8e6, 8e6)
    assert run.engine.totals().remote == 1
    assert run.blocks(2) == A[:15]  # the pool of pd1


def test_only_the_difference_is_copied_with_one_state(tiny):
    # PrfaaS has 400 tokens, PD 1,000: 600 tokens and the state of 200,000 bytes cross, 0.8 s
    requests = [(0, 400, 1, A), (10, 1000, 1, A), (20, 1500, 1, A)]
    run = Cached(tiny, requests, kv={"fixed_bytes": 200_000})
    run.decide(0, threshold_tokens=ALWAYS).decide(9, threshold_tokens=NEVER)
    run.decide(19, threshold_tokens=ALWAYS, cache_rule="abundant").end()
    assert run.records.incremental_tokens.tolist() == [400, 600, 500]
    assert run.stamps("prefill_start")[2] == 20.8
    # the prompt itself: 500 tokens and the state
    assert run.records.sent_bytes.tolist() == [600_000, 0, 800_000 + 700_000]
    assert run.counts["copies"] == 1


def test_abundant_without_need_copies_nothing(tiny):
    requests = [(0, 1000, 1, A), (10, 1500, 1, A), (20, 1500, 1, B)]
    run = Cached(tiny, requests).decide(0, threshold_tokens=ALWAYS, cache_rule="abundant").end()
    assert run.counts["copies"] == 0
    assert run.stamps("transfer_end")[1] == 11.0


def test_scarce_and_abundant_judge_by_other_lengths(tiny):
    # The PD pool holds nothing, the PrfaaS pool 1,000 of 1,500 tokens: l is 1,500 or 500
    requests = [(0, 1000, 1, A), (10, 1500, 1, A)]
    routes = {}
    for rule in ("scarce", "abundant"):
        run = Cached(tiny, requests, pool={"pd_capacity_bytes": 0}).decide(0, threshold_tokens=ALWAYS)
        routes[rule] = run.decide(9, threshold_tokens=600.0, cache_rule=rule).end().records.route[1]
    assert routes == {"scarce": Route.REMOTE, "abundant": Route.LOCAL}


def test_a_copy_shares_the_link(tiny):
    # Request 1 (another prompt) is on the wire from 10.5 to 11.5 when the copy of request 2 opens at 10.75: 0.75 s
    # of the former left, at half rate until 12.25; the copy has 250 left then... 1,000 - 750 = 250 tokens: 12.5.
    requests = [(0, 1000, 1, A), (9.5, 1000, 1, B), (10.75, 1500, 1, A)]
    run = Cached(tiny, requests, prfaas={"n_instances": 2}).decide(0, threshold_tokens=NEVER)
    run.decide(9, threshold_tokens=ALWAYS).decide(10.6, threshold_tokens=ALWAYS, cache_rule="abundant").end()
    assert run.stamps("transfer_end")[1] == 12.25
    assert run.stamps("prefill_start")[2] == 12.5


# ------------------------------------------------------------------------------------------ pins and transfer cache


def test_matched_blocks_stay_from_arrival_to_the_end_of_the_prefill(tiny):
    # PD pool of 20 units. Request 1 holds 10 units from 5 s to 7.001 s. Request 2 arrives at 6 and matches 10 blocks.
    requests = [(0, 1000, 1, A), (5, 1000, 1, B), (6, 1500, 1, A)]
    run = Cached(tiny, requests, pool={"pd_capacity_bytes": 20 * UNIT}).decide(0, threshold_tokens=NEVER)
    assert run.at(6.5).pool(PD_POOL)[:4] == (20, 10, 10, 10)
    # At 7 B wants to be stored and request 2 wants 5 units for what it will send: A is pinned, and the 10 units of B
    # are free at 7.001 only.
    assert run.at(7.5).pool(PD_POOL)[:4] == (20, 10, 10, 0)
    assert run.counts["unstored"] == 10
    assert run.counts["unheld_units"] == 5
    assert run.counts["evictions"] == 0
    run.end()
    assert run.pool(PD_POOL)[:4] == (20, 15, 0, 0)
    assert run.blocks(PD_POOL) == list(range(15))
    assert run.records.incremental_tokens.tolist() == [1000, 1000, 500]


def test_a_cache_that_is_sent_takes_room_where_it_is_prefilled(tiny):
    run = Cached(tiny, [(0, 1000, 1, A)], pool={"prfaas_capacity_bytes": 15 * UNIT})
    run.decide(0, threshold_tokens=ALWAYS)
    assert run.at(0.5).pool(REMOTE_POOL)[:4] == (15, 0, 0, 10)
    # at 1 s the prompt wants 10 units and finds 5
    assert run.at(1.5).pool(REMOTE_POOL)[:4] == (15, 5, 0, 10)
    assert run.at(2.5).pool(REMOTE_POOL)[:4] == (15, 5, 0, 0)
    assert run.counts["unstored"] == 5
    assert run.pool(PD_POOL).used == 10


def test_a_transfer_without_room_goes_on_and_is_counted(tiny):
    run = Cached(tiny, [(0, 1000, 1, A)], pool={"prfaas_capacity_bytes": 6 * UNIT})
    run.decide(0, threshold_tokens=ALWAYS)
    assert run.at(0.5).pool(REMOTE_POOL)[:4] == (6, 0, 0, 6)
    run.end()
    assert run.counts["unheld_units"] == 4
    assert run.stamps("transfer_end") == [2.0]


def test_a_rejected_request_counts_and_pins_nothing(tiny):
    requests = [(0, 1000, 1, A), (10, 5000, 1, A)]
    run = Cached(tiny, requests, admission={"max_input_tokens": 4000}).decide(0, threshold_tokens=NEVER).end()
    assert run.records.status[1] == Status.REJECTED
    assert run.counts["input_tokens"] == 1000
    assert run.pool(PD_POOL).pinned == 0


# ------------------------------------------------------------------------------------------ faults


def test_a_request_given_up_while_its_prefix_is_copied_leaves_nothing(tiny):
    # the copy of 1,000 tokens runs from 10 s; the client leaves at 10.5
    give_up_ns = np.array([10**18, round(10.5 * S)])
    run = Cached(tiny, [(0, 1000, 1, A), (10, 1500, 1, A)], world_fields={"give_up_ns": give_up_ns})
    run.decide(0, threshold_tokens=NEVER).decide(9, threshold_tokens=400.0, cache_rule="abundant")
    assert run.at(10.4).pool(PD_POOL).pinned == 10
    run.end()
    assert run.records.status.tolist() == [Status.FINISHED, Status.ABORTED]
    assert run.records.sent_bytes.tolist() == [0, 500_000]
    assert run.engine.totals().egress_bits == (4e6,)
    assert run.at(20).engine.telemetry().link[0].open_flows == 0
    assert run.pool(PD_POOL)[1:4] == (10, 0, 0)
    assert run.blocks(REMOTE_POOL) == []


def test_a_request_given_up_drops_its_pins_and_its_transfer(tiny):
    # request 1 has 10 blocks pinned in its PD cluster and 5 units held there while it is prefilled (10..11 s)
    give_up_ns = np.array([10**18, round(10.5 * S)])
    run = Cached(tiny, [(0, 1000, 1, A), (10, 1500, 1, A)], world_fields={"give_up_ns": give_up_ns})
    run.decide(0, threshold_tokens=NEVER)
    assert run.at(10.4).pool(PD_POOL)[1:4] == (10, 10, 5)
    assert run.at(10.6).pool(PD_POOL)[1:4] == (10, 0, 0)


def test_a_lost_prefill_holds_its_room_once(tiny):
    # the remote instance 0 goes down at 0.5; instance 1 prefills the prompt again until 1.5, the flow ends at 2.5
    faults = FaultTrace(np.array([round(0.5 * S)]), np.array([0]), np.array([0]), np.array([0.0]))
    run = Cached(tiny, [(0, 1000, 1, A)], prfaas={"n_instances": 2}, world_fields={"faults": faults})
    run.decide(0, threshold_tokens=ALWAYS)
    assert run.at(0.4).pool(REMOTE_POOL)[1:4] == (0, 0, 10)
    assert run.at(0.6).pool(REMOTE_POOL)[1:4] == (0, 0, 10)
    assert run.at(2).pool(REMOTE_POOL)[1:4] == (10, 0, 10)
    run.end()
    assert run.records.attempts.tolist() == [2]
    assert run.stamps("transfer_end") == [2.5]
    assert run.pool(REMOTE_POOL)[1:4] == (10, 0, 0)
    assert run.counts["hit_tokens"] == 0


# ------------------------------------------------------------------------------------------ stale view


def test_routing_sees_the_pools_of_the_last_sync(tiny):
    # Stored at 2 s; the view of 0..5 s is empty. Request 1 at 3 s: seen l = 1,500 > 1,000: remote; it prefills 1,500
    # there but sends 500 only, for the PD cluster really has the rest. Request 2 at 6 s sees it.
    requests = [(0, 1000, 1, A), (3, 1500, 1, A), (6, 1400, 1, A)]
    run = Cached(tiny, requests, pool={"metadata_age_s": 5.0}).decide(0, threshold_tokens=NEVER)
    run.decide(2.5, threshold_tokens=1000.0).end()
    assert run.records.route.tolist() == [Route.LOCAL, Route.REMOTE, Route.LOCAL]
    assert run.records.sent_bytes.tolist() == [0, 500_000, 0]
    assert run.counts["mispredictions"] == 0
    fresh = (
        Cached(tiny, requests).decide(0, threshold_tokens=NEVER).decide(2.5, threshold_tokens=1000.0).end()
    )
    assert fresh.records.route.tolist() == [Route.LOCAL, Route.LOCAL, Route.LOCAL]


def test_what_lies_at_a_sync_comes_after_it(tiny):
    # stored at exactly 2 s, the instant of a sync: not in the view of 2..4 s
    requests = [(0, 1000, 1, A), (3.9, 1500, 1, A), (4, 1500, 1, A)]
    run = Cached(tiny, requests, pool={"metadata_age_s": 2.0}).decide(0, threshold_tokens=NEVER)
    run.decide(2.5, threshold_tokens=1000.0).end()
    assert run.records.route.tolist() == [Route.LOCAL, Route.REMOTE, Route.LOCAL]


def test_a_prefix_that_is_gone_is_prefilled_and_counted(tiny):
    # PD pool of 20 units with A in it since 2 s. At 5.1 s the transfer of B takes all of it. The view is that of 5 s.
    requests = [(0, 1000, 1, A), (5.1, 2000, 1, B), (6, 1500, 1, A)]
    run = Cached(tiny, requests, pool={"pd_capacity_bytes": 20 * UNIT, "metadata_age_s": 5.0})
    run.decide(0, threshold_tokens=NEVER).decide(5.5, threshold_tokens=1000.0).end()
    assert run.records.route[2] == Route.LOCAL  # seen l = 500
    assert run.records.incremental_tokens[2] == 1500
    assert run.counts["mispredictions"] == 1
    fresh = Cached(tiny, requests, pool={"pd_capacity_bytes": 20 * UNIT})
    fresh.decide(0, threshold_tokens=NEVER).decide(5.5, threshold_tokens=1000.0).end()
    assert fresh.records.route[2] == Route.REMOTE
    assert fresh.counts["mispredictions"] == 0


# ------------------------------------------------------------------------------------------ what is reported


def test_the_hit_share_of_the_door_is_what_prefill_was_spared(tiny):
    # l is 1,500 by the scarce rule, but the chosen remote side has 1,000 of it
    requests = [(0, 1000, 1, A), (10, 1500, 1, A)]
    run = Cached(tiny, requests, pool={"pd_capacity_bytes": 0}).decide(0, threshold_tokens=ALWAYS).at(12)
    pd = run.engine.telemetry().pd[0]
    assert pd.hit_share == 1000 / 2500
    assert pd.input_token_rate_5s_tps == 1500 / 5
    assert run.engine.telemetry().recent_lengths_tokens[0].tolist() == [1000, 1500]


def test_a_sequence_prefilled_again_keeps_what_it_had(tiny):
    """Drain limit: the prompt behind its first match is prefilled again, and the tokens produced."""
    # Request 1: 1,000 of 1,500 cached, prefill 2.5..3.5, decode from 3.5005 on the first decode instance; request 2
    # from 3.7001 on the second. At 5 s both have one sequence: the first is taken, its limit is 5.5 s, when request 1
    # has 199 tokens. New: 1,500 + 199 - 1,000 = 699 tokens, 1.398 s.
    requests = [(0, 1000, 1, A), (2.5, 1500, 3000, A), (3.5, 100, 3000, B)]
    run = Cached(tiny, requests, pd={"n_decode": 2}, conversion={"switch_s": 2.0, "drain_limit_s": 0.5})
    run.decide(0, threshold_tokens=NEVER)
    run.decide(5, threshold_tokens=NEVER, move=Move.DECODE_TO_PREFILL).end()
    assert run.records.attempts.tolist() == [1, 2, 1]
    assert run.records.incremental_tokens.tolist() == [1000, 500, 100]
    assert run.engine.totals().prefill_busy_ns == (2000 + 1000 + 200 + 1398) * 1_000_000
    assert run.counts["hit_tokens"] == 1000  # a request counts once
    assert run.pool(PD_POOL)[2:4] == (0, 0)


# ------------------------------------------------------------------------------------------- declared hits


def test_a_declared_hit_is_spared_everywhere(tiny):
    """A hit rate without prefix data: 600 of 1,000 tokens are cached in every cluster, whoever prefills."""
    scenario = tiny.scenario()
    world = tiny.world(scenario, [(0, 1000, 1), (20, 1000, 1)])
    declared = dataclasses.replace(world.requests, cached_tokens=np.array([600, 600]))
    world = dataclasses.replace(world, requests=declared)
    engine = make_engine(tiny.engine_name, world)
    engine.apply(Decision.same(1, threshold_tokens=300.0))
    engine.run_until(10 * S)
    engine.apply(Decision.same(1, threshold_tokens=400.0))
    engine.run_to_end()
    # 400 tokens are new: above 300 it goes remote, 0.4 s of prefill and 0.4 s on the link; at 400 it stays, 0.8 s
    assert engine.records.route.tolist() == [Route.REMOTE, Route.LOCAL]
    assert engine.records.transfer_end_ns.tolist() == [800_000_000, 20 * S + 800_400_000]
    assert engine.records.incremental_tokens.tolist() == [400, 400]
    assert engine.totals().egress_bits == (3.2e6,)
    assert engine.telemetry().pd[0].hit_share == pytest.approx(0.6)
