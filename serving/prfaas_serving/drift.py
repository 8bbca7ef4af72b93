"""Telemetry that leaves the range that a policy was trained on."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from prfaas_env.bundle_manifest import InputRanges
from prfaas_env.policy import Policy
from prfaas_env.telemetry import Telemetry, TelemetrySchema

#: How far a field may leave its range, as a share of its encoded scale, before it counts: what is nearer changes the
#: network's input by less than this.
TOLERANCE = 0.01
#: Share of fields outside above which the control loop's guard falls back, unless it is told otherwise.
OUT_OF_RANGE_SHARE = 0.1


def ranges_of(policy: Policy) -> InputRanges | None:
    """The input ranges that a policy brings along; None for a rule, and for a bundle without any."""
    found = getattr(getattr(policy, "manifest", None), "input_ranges", None)
    return found if isinstance(found, InputRanges) else None


@lru_cache(maxsize=8)
def _encoded(
    ranges: InputRanges, schema: TelemetrySchema
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Range of each field on its encoded scale with the tolerance, and which fields have one."""
    known = np.array([x is not None for x in ranges.low])
    ends = []
    for column in (ranges.low, ranges.high):
        values = np.array([0.0 if x is None else x for x in column])
        flags = schema.scales[-1]
        values[flags[flags >= 0]] = 1.0  # every field present, so that it is encoded
        ends.append(schema.encode(values)[0].astype(np.float64))
    low, high = ends
    for k in np.unique(flags[flags >= 0]):  # a flag has a range of its own
        for encoded, column in ((low, ranges.low), (high, ranges.high)):
            encoded[k] = min(max(column[k] or 0.0, 0.0), 1.0)
    return low - TOLERANCE, high + TOLERANCE, known


def outside(telemetry: Telemetry, ranges: InputRanges) -> NDArray[np.bool_]:
    """Which fields are outside their range, shape (len(schema),).

    A field that is absent now is not; one that is here and never was in training is. Fields are compared on their
    encoded scale, where a change of `TOLERANCE` does not count.
    """
    schema = telemetry.schema
    low, high, known = _encoded(ranges, schema)
    seen, _ = schema.encode(telemetry.values)
    beyond = ~known | (seen < low) | (seen > high)
    out: NDArray[np.bool_] = schema.present(telemetry.values) & beyond
    return out


def outside_share(telemetry: Telemetry, ranges: InputRanges) -> float:
    """Share of the fields of a reading that are outside the range of the training, 0 to 1."""
    return float(outside(telemetry, ranges).mean())
