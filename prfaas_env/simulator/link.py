"""The link: fluid max-min fair sharing among open flows, exact at every change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prfaas_env.simulator.formulas import NEVER_NS, flow_end_ns, max_min_rates, sent_bits
from prfaas_env.telemetry import LinkMeter


@dataclass(slots=True, eq=False)
class Flow:
    """One request's KV cache on its way.

    With layer-wise sending prefill feeds it at `produce_bps` until `producing_until_ns`; without, everything is
    there when it opens. `cap_bps` is the present limit of its rate: never above `own_cap_bps`, nor above
    `produce_bps` while prefill runs. `remaining_bits` is as of the link's last settled instant.
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
    rate_bps: float = 0.0
    end_ns: int = NEVER_NS

    def __post_init__(self) -> None:
        self.remaining_bits = self.bits
        producing = self.opened_ns < self.producing_until_ns
        self.cap_bps = min(self.own_cap_bps, self.produce_bps) if producing else self.own_cap_bps


@dataclass(slots=True)
class LinkState:
    """Flows of one link in order of opening, with rates as last settled.

    Rates change only in `settle`, once at the end of an instant; between two settled instants they are constant.
    """

    capacity_bps: float
    meter: LinkMeter
    flows: list[Flow] = field(default_factory=list)
    dirty: bool = False
    settled_ns: int = 0
    total_rate_bps: float = 0.0
    congested: bool = False
    completed_bits: float = 0.0
    next_end_ns: int = NEVER_NS

    def open(self, flow: Flow) -> None:
        """Add a flow; it gets a rate at the end of the instant."""
        self.flows.append(flow)
        self.dirty = True

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
            self.dirty = True
        return due

    def settle(self, now_ns: int) -> None:
        """Store progress up to now and share the capacity anew."""
        elapsed_ns = now_ns - self.settled_ns
        if elapsed_ns > 0:
            for flow in self.flows:
                flow.remaining_bits = self.remaining_at(flow, now_ns)
            self.meter.advance(now_ns, self.total_rate_bps, self.congested)
            self.settled_ns = now_ns
        n = len(self.flows)
        caps = [f.cap_bps for f in self.flows]
        rates = [0.0] * n
        order = sorted(range(n), key=caps.__getitem__)
        self.congested = max_min_rates(self.capacity_bps, caps, order, rates)
        total = 0.0
        self.next_end_ns = NEVER_NS
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.rate_bps = rate
            flow.end_ns = flow_end_ns(now_ns, flow.remaining_bits, rate)
            self.next_end_ns = min(self.next_end_ns, flow.end_ns)
            total += rate
        self.total_rate_bps = total
        self.dirty = False

    def remaining_at(self, flow: Flow, now_ns: int) -> float:
        """Bits of a flow not yet sent at `now_ns` (computed, not stored)."""
        return max(flow.remaining_bits - sent_bits(flow.rate_bps, now_ns - self.settled_ns), 0.0)

    def unsent_bits(self, now_ns: int) -> float:
        """Bits of all open flows not yet sent."""
        total = 0.0
        for flow in self.flows:
            total += self.remaining_at(flow, now_ns)
        return total

    def staged_bits(self, now_ns: int) -> float:
        """Bits that prefill has produced and the link has not yet sent."""
        total = 0.0
        for flow in self.flows:
            remaining = self.remaining_at(flow, now_ns)
            if now_ns < flow.producing_until_ns:
                to_come = sent_bits(flow.produce_bps, flow.producing_until_ns - now_ns)
                remaining = max(remaining - to_come, 0.0)
            total += remaining
        return total

    def delivered_bits(self, now_ns: int) -> float:
        """Bits sent since the start."""
        total = self.completed_bits
        for flow in self.flows:
            total += flow.bits - self.remaining_at(flow, now_ns)
        return total
