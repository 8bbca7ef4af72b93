"""Hand-made telemetry for tests of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from prfaas_env.decision import legal_moves
from prfaas_env.scenarios.models import Scenario
from prfaas_env.telemetry import Telemetry, pack, schema_for

Overrides = Mapping[str, float] | Sequence[Mapping[str, float]]


def _of(overrides: Overrides | None, k: int) -> Mapping[str, float]:
    """Overrides of the k-th group: one mapping for all groups, or one per group."""
    if overrides is None:
        return {}
    return overrides if isinstance(overrides, Mapping) else overrides[k]


def make_telemetry(
    scenario: Scenario,
    *,
    time_s: float = 600.0,
    pd: Overrides | None = None,
    prfaas: Overrides | None = None,
    link: Overrides | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
    conversion_tick: bool = True,
    legal: Sequence[tuple[bool, bool, bool]] | None = None,
) -> Telemetry:
    """An idle reading of a scenario's deployment with some fields replaced.

    Args:
        scenario: gives topology, instance counts and nominal capacities.
        time_s: instant of the reading.
        pd, prfaas, link: fields to replace, for every group or one mapping per group.
        lengths: recent incremental lengths per PD cluster; none by default.
        conversion_tick: whether conversions may be legal.
        legal: legality per PD cluster; by default from the counts of the reading.
    """
    deployment = scenario.deployment
    schema = schema_for(len(deployment.pd), len(deployment.prfaas), len(deployment.links))
    readings: list[dict[str, float]] = []
    for group, fields in schema.groups:
        k = int(group.lstrip("pdrfaslink"))
        values = {f.name: min(max(0.0, f.low), f.high) for f in fields}
        if group.startswith("pd"):
            cluster = deployment.pd[k]
            values |= {"arrivals_valid": 1.0, "decode_instances": cluster.n_decode}
            values |= {"prefill_instances": cluster.n_prefill, **_of(pd, k)}
        elif group.startswith("prfaas"):
            values |= {"prefill_instances": deployment.prfaas[k].n_instances, **_of(prfaas, k)}
        else:
            nominal = deployment.links[k].capacity_bps
            values |= {"nominal_capacity_bps": nominal, "observed_capacity_bps": nominal, **_of(link, k)}
        readings.append(values)
    if legal is None:
        legal = [
            legal_moves(
                conversion_tick,
                int(r["converting_instances"]),
                int(r["prefill_instances"]),
                int(r["decode_instances"]),
                cluster.prefill_floor,
                cluster.min_decode,
                int(r["prefill_queue_requests"]),
            )
            for cluster, r in zip(deployment.pd, readings, strict=False)
        ]
    recent = lengths if lengths is not None else [[]] * len(deployment.pd)
    return Telemetry(
        schema,
        round(time_s * 1e9),
        pack(schema, readings),
        conversion_tick=conversion_tick,
        legal_moves=tuple(legal),
        recent_lengths_tokens=tuple(np.array(x, dtype=np.int64) for x in recent),
    )


@pytest.fixture(name="make_telemetry")
def _make_telemetry() -> Callable[..., Telemetry]:
    """The function `make_telemetry` (keyword overrides on a neutral reading)."""
    return make_telemetry


@pytest.fixture(scope="session")
def three_sites() -> Scenario:
    """Two PrfaaS and three PD clusters; the third PD cluster has no link."""
    from prfaas_env.scenarios.loader import load_scenario

    raw: dict[str, Any] = load_scenario("paper").model_dump(mode="json")
    pd = raw["deployment"]["pd"][0]
    raw["deployment"] = {
        "prfaas": [
            {"name": "east", "hardware": "h200", "n_instances": 4},
            {"name": "west", "hardware": "h200", "n_instances": 2},
        ],
        "pd": [
            {**pd, "name": "a", "arrival_share": 2.0},
            {**pd, "name": "b", "n_prefill": 2, "n_decode": 4},
            {**pd, "name": "c", "n_prefill": 6, "n_decode": 2},
        ],
        "links": [
            {"prfaas": "east", "pd": "a", "capacity_bps": 40e9},
            {"prfaas": "west", "pd": "a", "capacity_bps": 10e9},
            {"prfaas": "east", "pd": "b", "capacity_bps": 20e9},
        ],
    }
    return Scenario.model_validate(raw)
