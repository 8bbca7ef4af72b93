"""The link: fluid max-min fair sharing among open flows, exact at every change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from prfaas_env.simulator.formulas import (
    BIT_UNIT,
    LONG_AGO_NS,
    NEVER_NS,
    NO_RATE_BPS,
    RATE_UNIT_BPS,
    bit_units,
    flow_end_ns,
    left_bits,
    rate_units,
    sent_bits,
    water_level_bps,
)
from prfaas_env.telemetry import LinkMeter


@dataclass(slots=True, eq=False)
class Flow:
    """One request's KV cache on its way.

    With layer-wise sending prefill feeds it at `produce_bps` until `producing_until_ns`; without, everything is
    there when it opens. `cap_bps` is the present limit of its rate: never above `own_cap_bps`, nor above
    `produce_bps` while prefill runs. `remaining_bits` is as of `since_ns`, when its rate last changed.
    """

    request: int
    attempt: int
    bits: float
    opened_ns: int
    producing_until_ns: int
    produce_bps: float
    own_cap_bps: float
    owner: Any = None
    cap_bps: float = 0.0
    remaining_bits: float = 0.0
    since_ns: int = 0
    rate_bps: float = NO_RATE_BPS
    end_ns: int = NEVER_NS

    def __post_init__(self) -> None:
        self.remaining_bits = self.bits
        self.since_ns = self.opened_ns
        producing = self.opened_ns < self.producing_until_ns
        self.cap_bps = min(self.own_cap_bps, self.produce_bps) if producing else self.own_cap_bps

    def remaining_at(self, now_ns: int) -> float:
        """Bits not yet sent at `now_ns` (computed, not stored)."""
        return left_bits(self.remaining_bits, self.rate_bps, now_ns - self.since_ns)

    def set_rate(self, now_ns: int, rate_bps: float) -> None:
        """Go on at another rate from `now_ns`; at the same one nothing changes, not even a rounding."""
        if rate_bps == self.rate_bps:
            return
        self.remaining_bits = self.remaining_at(now_ns)
        self.since_ns = now_ns
        self.rate_bps = rate_bps
        self.end_ns = flow_end_ns(now_ns, self.remaining_bits, rate_bps)


@dataclass(slots=True)
class LinkState:
    """Open flows of one link with rates as last settled.

    Rates change only in `settle`, once at the end of an instant; between two settled instants they are constant.
    Sums over flows are sums of whole units (of rates, of bits): they do not depend on the order of the flows.
    """

    capacity_bps: float
    meter: LinkMeter
    flows: list[Flow] = field(default_factory=list)
    dirty: bool = False
    total_rate_bps: float = 0.0
    congested: bool = False
    completed_bits: float = 0.0
    next_end_ns: int = NEVER_NS
    setup_ns: int = 0
    idle_ns: int = NEVER_NS
    """Without a flow for this long, connections are closed."""
    idle_since_ns: int = LONG_AGO_NS

    def opening_ns(self, now_ns: int) -> int:
        """When a flow that is ready now may open: later if connections are to be set up first, or still are."""
        if self.setup_ns > 0 and not self.flows and now_ns - self.idle_since_ns >= self.idle_ns:
            self.idle_since_ns = now_ns + self.setup_ns
        return max(now_ns, self.idle_since_ns) if not self.flows else now_ns

    def open(self, flow: Flow) -> None:
        """Add a flow; it gets a rate at the end of the instant."""
        self.flows.append(flow)
        self.dirty = True

    def drop(self, flow: Flow, now_ns: int) -> float:
        """Take a flow out before its end; what has been sent counts as delivered. Gives the bits not sent."""
        # in the units that readings add up, so that what was delivered never falls
        left = bit_units(flow.remaining_at(now_ns)) * BIT_UNIT
        self.completed_bits += flow.bits - left
        self.flows.remove(flow)
        self._note_idle(now_ns)
        self.dirty = True
        return left

    def _note_idle(self, now_ns: int) -> None:
        if not self.flows:
            self.idle_since_ns = now_ns

    def prefill_ended(self, flow: Flow) -> None:
        """Everything of this flow is produced: its own cap alone holds from now on."""
        flow.cap_bps = flow.own_cap_bps
        self.dirty = True

    def end_due(self, now_ns: int) -> list[Flow]:
        """Take out the flows that end now, in order of request and attempt."""
        due = sorted((f for f in self.flows if f.end_ns == now_ns), key=lambda f: (f.request, f.attempt))
        if due:
            self.flows = [f for f in self.flows if f.end_ns != now_ns]
            for flow in due:
                self.completed_bits += flow.bits
            self._note_idle(now_ns)
            self.dirty = True
        return due

    def settle(self, now_ns: int) -> None:
        """Account the time up to now and share the capacity anew."""
        self.meter.advance(now_ns, self.total_rate_bps, self.congested)
        level_bps = water_level_bps(self.capacity_bps, [f.cap_bps for f in self.flows])
        for flow in self.flows:
            flow.set_rate(now_ns, min(flow.cap_bps, level_bps))
        self.congested = level_bps < math.inf
        self.next_end_ns = min((f.end_ns for f in self.flows), default=NEVER_NS)
        self.total_rate_bps = sum(rate_units(f.rate_bps) for f in self.flows) * RATE_UNIT_BPS
        self.dirty = False

    def unsent_bits(self, now_ns: int) -> float:
        """Bits of all open flows not yet sent."""
        return sum(bit_units(flow.remaining_at(now_ns)) for flow in self.flows) * BIT_UNIT

    def staged_bits(self, now_ns: int) -> float:
        """Bits that prefill has produced and the link has not yet sent."""
        units = 0
        for flow in self.flows:
            remaining = flow.remaining_at(now_ns)
            if now_ns < flow.producing_until_ns:
                to_come = sent_bits(flow.produce_bps, flow.producing_until_ns - now_ns)
                remaining = max(remaining - to_come, 0.0)
            units += bit_units(remaining)
        return units * BIT_UNIT

    def delivered_bits(self, now_ns: int) -> float:
        """Bits sent since the start."""
        return self.completed_bits + (sum(flow.bits for flow in self.flows) - self.unsent_bits(now_ns))
