"""Worlds small enough to work out on paper.

Unless a test says otherwise: a remote instance prefills 1 token per ms, a local one 1 token per 2 ms; a token
weighs 1,000 bytes; the link carries 8e6 bit/s, which is 1 token per ms too; the hand-over inside the PD cluster
carries 8e9 bit/s (1 token per us); a decode step takes 10 ms whatever the batch. Nothing is pipelined, no latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from prfaas_env.decision import Decision, Move
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.engine import ENGINES, Engine, make_engine
from prfaas_env.simulator.faults import FaultTrace
from prfaas_env.simulator.world import CapacityTrace, World
from prfaas_env.workload.requests import RequestTable

Request = tuple[float, int, int]
"""(arrival in s, input tokens, output tokens)"""

NEVER, ALWAYS = float("inf"), 0.0
"""Thresholds: everything local, everything remote."""


def ns(seconds: float) -> int:
    """Whole nanoseconds of a time written in seconds."""
    return round(seconds * 1e9)


def tiny_scenario(**sections: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Scenario:
    """The small scenario with fields of its sections replaced.

    `pd`, `prfaas` and `link` take one mapping, or a list of them for several clusters or links.
    """
    base: dict[str, dict[str, Any]] = {
        "remote": {"kind": "polynomial", "c0_s": 0.0, "c1_s_per_token": 1e-3, "source": "made up"},
        "local": {"kind": "polynomial", "c0_s": 0.0, "c1_s_per_token": 2e-3, "source": "made up"},
        "decode": {"a_s": 0.01, "slots": 4, "source": "made up"},
        "kv": {"fixed_bytes": 0, "bytes_per_token": 1000, "n_layers": 1},
        "model": {"name": "tiny", "kv_source": "made up"},
        "pd": {"hardware": "local", "n_prefill": 1, "n_decode": 1, "rdma_bps": 8e9},
        "prfaas": {"hardware": "remote", "n_instances": 1},
        "link": {"capacity_bps": 8e6},
        "conversion": {"switch_s": 2.0},
        "control": {"control_interval_s": 1.0, "conversion_interval_s": 5.0},
        "transport": {},
        "admission": {},
        "faults": {},
        "slo": {},
        "measure": {},
    }
    lists: dict[str, list[dict[str, Any]]] = {}
    for name, fields in sections.items():
        if isinstance(fields, Mapping):
            base[name] = {**base[name], **fields}
        else:
            lists[name] = [{**base[name], **f} for f in fields]
    hardware = {
        "remote": {"prefill": base["remote"]},
        "local": {"prefill": base["local"], "decode": base["decode"]},
    }
    return Scenario.model_validate(
        {
            "name": "tiny",
            "model": {**base["model"], "kv": base["kv"], "hardware": hardware},
            "deployment": {
                "prfaas": lists.get("prfaas", [base["prfaas"]]),
                "pd": lists.get("pd", [base["pd"]]),
                "links": lists.get("link", [base["link"]]),
            },
            "workload": {
                "kind": "synthetic",
                "arrivals": {"kind": "deterministic", "rate_rps": 1.0},
                "input_tokens": {"kind": "fixed", "tokens": 1000},
                "output_tokens": {"kind": "fixed", "tokens": 10},
            },
            **{
                k: base[k]
                for k in ("conversion", "control", "transport", "admission", "faults", "slo", "measure")
            },
        }
    )


def tiny_world(
    scenario: Scenario,
    requests: Iterable[Request],
    *,
    capacity: Sequence[Sequence[tuple[float, float]]] | None = None,
    pd_of: Sequence[int] | None = None,
    faults: Sequence[tuple[float, int, int, float]] = (),
    give_up: Sequence[float] | None = None,
    luck: Sequence[float] | None = None,
) -> World:
    """A world of exactly these requests.

    `capacity[k]` is [(from s, bit/s), ...] of link k, else nominal; `faults` are (at s, cluster, instance, speed);
    `give_up` and `luck` have one time in s per request.
    """
    rows = list(requests)
    table = RequestTable.without_prefixes(
        np.array([ns(a) for a, _, _ in rows], dtype=np.int64),
        np.array([i for _, i, _ in rows], dtype=np.int64),
        np.array([o for _, _, o in rows], dtype=np.int64),
    )
    if capacity is None:
        capacity = [[(0.0, link.capacity_bps)] for link in scenario.deployment.links]
    traces = tuple(
        CapacityTrace(
            np.array([ns(t) for t, _ in steps], dtype=np.int64), np.array([float(c) for _, c in steps])
        )
        for steps in capacity
    )
    clusters = np.zeros(len(rows), dtype=np.int64) if pd_of is None else np.array(pd_of, dtype=np.int64)
    return World(
        scenario,
        0,
        table,
        clusters,
        traces,
        faults=FaultTrace.of((ns(at), cluster, instance, speed) for at, cluster, instance, speed in faults),
        give_up_ns=None if give_up is None else np.array([ns(t) for t in give_up], dtype=np.int64),
        jitter_ns=None if luck is None else np.array([ns(t) for t in luck], dtype=np.int64),
    )


class Tiny:
    """What a test needs to build and drive one engine."""

    ns = staticmethod(ns)
    scenario = staticmethod(tiny_scenario)
    world = staticmethod(tiny_world)

    def __init__(self, engine: str) -> None:
        self.engine_name = engine

    def engine(self, scenario: Scenario, requests: Iterable[Request], **world: Any) -> Engine:
        """An engine at time 0."""
        return make_engine(self.engine_name, tiny_world(scenario, requests, **world))

    def run(
        self,
        scenario: Scenario,
        requests: Iterable[Request],
        *,
        threshold: float | None = None,
        margin: float | None = None,
        moves: Mapping[float, Move] | None = None,
        until: float | None = None,
        **world: Any,
    ) -> Engine:
        """Run one decision for all PD clusters, with node moves at given seconds.

        Runs to the last finish, or to `until` seconds.
        """
        engine = self.engine(scenario, requests, **world)
        self.drive(engine, threshold=threshold, margin=margin, moves=moves)
        if until is None:
            engine.run_to_end(ns(1e7))
            assert engine.done, "not every request was resolved"
        else:
            engine.run_until(ns(until))
        return engine

    @staticmethod
    def drive(
        engine: Engine,
        *,
        threshold: float | None = None,
        margin: float | None = None,
        moves: Mapping[float, Move] | None = None,
    ) -> None:
        """Put the decision in force now and again with each move at its time."""
        n_pd = len(engine.world.scenario.deployment.pd)
        orders = {0.0: Move.NONE, **(moves or {})}
        for at_s in sorted(orders):
            engine.run_until(ns(at_s))
            engine.apply(Decision.same(n_pd, threshold_tokens=threshold, margin_s=margin, move=orders[at_s]))


@pytest.fixture(scope="session", params=ENGINES)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    """Small worlds on every engine."""
    return Tiny(request.param)


@pytest.fixture(scope="session")
def hand() -> type[Tiny]:
    """Builders of small scenarios and worlds, for tests that need no engine."""
    return Tiny
