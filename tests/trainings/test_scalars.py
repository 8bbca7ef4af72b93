"""What is read back from observations and actions for the log."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from prfaas_env.decision import MARGIN_GRID_S, THRESHOLD_GRID_TOKENS, ActionCodec, Routing
from prfaas_env.telemetry import schema_for
from prfaas_trainings.scalars import _routing_values, decoded


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("pd0.prefill_instances", [0.0, 1.0, 3.0, 12.0]),
        ("pd1.prefill_instances", [2.0, 5.0]),
        ("pd0.decode_slot_use", [0.0, 0.25, 1.0]),
        ("pd0.margin_s", [-30.0, -1.0, 0.0, 0.5, 8.0]),
        ("link0.observed_capacity_bps", [6e9, 1e11]),
    ],
)
def test_decoding_undoes_encoding(name: str, values: list[float]) -> None:
    schema = schema_for(2, 1, 2)
    rows = []
    for value in values:
        reading = np.array([max(f.low, 0.0) for f in schema.fields])
        for flag in ("pd0.margin_valid", "pd1.margin_valid"):
            reading[schema.index[flag]] = 1.0
        reading[schema.index[name]] = value
        rows.append(schema.encode(reading)[0])
    assert decoded(schema, name, np.stack(rows)) == pytest.approx(values, rel=1e-4, abs=1e-4)


def _of_grid(routing: Routing) -> NDArray[np.float64]:
    codec = ActionCodec(1, routing, "discrete")
    return _routing_values(codec, np.array(codec.grid))


def test_routing_values_are_finite_at_the_ends() -> None:
    margins = _of_grid("margin")
    assert margins.tolist() == [-30.0, *MARGIN_GRID_S[1:-1], 30.0]
    thresholds = _of_grid("threshold")
    assert np.isfinite(thresholds).all()
    assert thresholds[0] == thresholds[1] == math.log(THRESHOLD_GRID_TOKENS[1])
    assert thresholds[-1] == thresholds[-2] == math.log(THRESHOLD_GRID_TOKENS[-2])
