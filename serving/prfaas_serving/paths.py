"""What the router predicts and counts about the ways a prompt can go: links, KV bytes, first-token times.

The formulas are the simulator's (`prfaas_env.prediction`, `formulas`); this module feeds them with the router's own
counters.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas_env.prediction import PathState, first_token_s
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.scenarios.models import Link, Scenario
from prfaas_env.simulator.formulas import BITS_PER_BYTE, decode_step_s, prefill_s, rdma_s
from prfaas_serving.config import Resolved

#: Transfers remembered for the delivered rate, and for how long.
_RECENT = 64
_RECENT_S = 60.0
#: Observed capacity never falls below this share of nominal.
_FLOOR = 0.01


@dataclass(eq=False)
class Flow:
    """One KV cache on its way over a link."""

    bits: float
    open: bool = False
    done: bool = False
    at: str = ""
    """Name of the decode worker that fetches it."""


class LinkListener(Protocol):
    """Told about the transfers of a link as they happen. Times are of the monotonic clock."""

    def opened(self, flow: Flow, now_s: float) -> None:
        """A transfer begins."""

    def closed(self, flow: Flow, now_s: float, arrived: bool) -> None:
        """It has arrived, or will not."""

    def unsent_bits(self, now_s: float) -> float:
        """Bits of open transfers that should still be on their way."""


class LinkState:
    """Counters of one link; rates are bits per real second.

    `backlog_bits` is what prediction reads: bits of every request routed over the link that have not arrived, less
    what a link at the observed rate has carried since. `observed_bps` may be set from outside (telemetry); without
    that it is the delivered rate over the time with a transfer open, never above nominal.
    """

    def __init__(self, spec: Link, nominal_bps: float) -> None:
        self.spec = spec
        self.nominal_bps = nominal_bps
        self.listener: LinkListener | None = None
        self.measured_bps: float | None = None
        """Set by telemetry; None = the router's own estimate."""
        self._pending_bits = 0.0
        self._open_bits = 0.0
        self._unsent_bits = 0.0
        self._open = 0
        self._at_s = 0.0
        self._busy_from_s = 0.0
        #: (end, busy seconds, bits) of stretches with a transfer open
        self._stretches: deque[tuple[float, float, float]] = deque(maxlen=_RECENT)
        self._stretch_bits = 0.0
        self._own_bps = nominal_bps
        self.delivered_bits = 0.0
        """Bits of all transfers that arrived."""
        self._carried_bits = 0.0

    @property
    def open_flows(self) -> int:
        """Transfers under way."""
        return self._open

    def observed_bps(self, now_s: float) -> float:
        """Capacity to reckon with."""
        if self.measured_bps is not None:
            return min(max(self.measured_bps, _FLOOR * self.nominal_bps), self.nominal_bps)
        if self._stretches and self._stretches[0][0] < now_s - _RECENT_S:
            while self._stretches and self._stretches[0][0] < now_s - _RECENT_S:
                self._stretches.popleft()
            self._sum_up()
        return self._own_bps

    def _sum_up(self) -> None:
        """The delivered rate over the remembered stretches with a transfer open."""
        busy_s = sum(s for _, s, _ in self._stretches)
        bits = sum(b for _, _, b in self._stretches)
        if busy_s <= 0.0 or bits <= 0.0:
            self._own_bps = self.nominal_bps
        else:
            self._own_bps = min(max(bits / busy_s, _FLOOR * self.nominal_bps), self.nominal_bps)

    def _advance(self, now_s: float) -> None:
        if self._open and self._unsent_bits > 0.0:
            carried = self.observed_bps(now_s) * (now_s - self._at_s)
            self._unsent_bits = max(self._unsent_bits - carried, 0.0)
        self._at_s = now_s

    def backlog_bits(self, now_s: float) -> float:
        """Bits routed over the link and not yet arrived, as far as the router can tell."""
        if self.listener is not None:
            return self._pending_bits + self.listener.unsent_bits(now_s)
        self._advance(now_s)
        return self._pending_bits + self._unsent_bits

    def carried_bits(self, now_s: float) -> float:
        """Bits that the link has carried since the start: of transfers that arrived, and of those under way as far as
        the observed rate tells. Never falls."""
        self._advance(now_s)
        under_way = max(self._open_bits - self._unsent_bits, 0.0)
        self._carried_bits = max(self._carried_bits, self.delivered_bits + under_way)
        return self._carried_bits

    def routed(self, bits: float) -> Flow:
        """A request was routed over the link."""
        self._pending_bits += bits
        return Flow(bits)

    def opened(self, flow: Flow, now_s: float) -> None:
        """Its transfer begins."""
        if flow.open or flow.done:
            return
        self._advance(now_s)
        flow.open = True
        self._pending_bits = max(self._pending_bits - flow.bits, 0.0)
        if self._open == 0:
            self._busy_from_s, self._stretch_bits = now_s, 0.0
        self._open += 1
        self._open_bits += flow.bits
        self._unsent_bits += flow.bits
        if self.listener is not None:
            self.listener.opened(flow, now_s)

    def closed(self, flow: Flow, now_s: float, arrived: bool) -> None:
        """It arrived, or will not; the second call for a flow changes nothing."""
        if flow.done:
            return
        flow.done = True
        if not flow.open:
            self._pending_bits = max(self._pending_bits - flow.bits, 0.0)
            return
        self._advance(now_s)
        if self.listener is not None:
            self.listener.closed(flow, now_s, arrived)
        self._open -= 1
        self._open_bits = max(self._open_bits - flow.bits, 0.0) if self._open else 0.0
        self._unsent_bits = min(self._unsent_bits, self._open_bits)
        if arrived:
            self.delivered_bits += flow.bits
            self._stretch_bits += flow.bits
        if self._open == 0 and self._stretch_bits > 0.0:
            self._stretches.append((now_s, now_s - self._busy_from_s, self._stretch_bits))
            self._sum_up()


class Paths:
    """Predictions for one PD cluster and the remote clusters it can reach, by the scenario's profiles.

    All times that go in and come out are real seconds: `time_scale` of them to a second of the scenario.

    Raises:
        PrfaasError: as `Resolved`.
    """

    def __init__(self, resolved: Resolved) -> None:
        scenario: Scenario = resolved.scenario
        self.scenario = scenario
        self.pd = resolved.pd
        self.kv: KVLayout = scenario.model.kv
        nominal = resolved.config.link_bps
        self.time_scale = scale = resolved.config.time_scale
        self.links = {
            link.prfaas: LinkState(link, (link.capacity_bps if nominal is None else nominal) / scale)
            for link in resolved.links
        }
        hardware = scenario.model.hardware
        self._profiles = {
            c.name: hardware[c.hardware].prefill.arrays()
            for c in scenario.deployment.prfaas
            if c.name in self.links
        }
        self._profiles[self.pd.name] = hardware[self.pd.hardware].prefill.arrays()
        lists = {
            name: (a.start_tokens.tolist(), a.c0_s.tolist(), a.c1_s.tolist(), a.c2_s.tolist())
            for name, a in self._profiles.items()
        }
        self._pieces = lists
        decode = hardware[self.pd.hardware].decode
        assert decode is not None  # a scenario refuses a PD cluster without one
        self.decode = decode
        self.first_step_s = self.step_s(1)
        self.layers = self.kv.n_layers if scenario.transport.pipelining else 1

    def step_s(self, batch: int) -> float:
        """Time of one decode step, contexts apart."""
        d = self.decode
        return self.time_scale * decode_step_s(d.a_s, d.b_s_per_sequence, d.c_s_per_token, batch, 0)

    def prefill_s(self, cluster: str, new_tokens: int, cached_tokens: int) -> float:
        """Prefill time on a cluster's hardware."""
        return self.time_scale * prefill_s(*self._pieces[cluster], new_tokens, cached_tokens)

    def kv_bits(self, tokens: int) -> float:
        """Bits of the KV cache of so many tokens."""
        return float(self.kv.transfer_bytes(max(tokens, 0)) * BITS_PER_BYTE)

    def remote_s(
        self,
        cluster: str,
        state: PathState,
        new_tokens: int,
        cached_tokens: int,
        had_tokens: int,
        now_s: float,
    ) -> float:
        """Predicted first-token time over a link; the PD cluster already has `had_tokens`."""
        link = self.links[cluster]
        return first_token_s(
            replace(state, backlog_bits=link.backlog_bits(now_s), observed_bps=link.observed_bps(now_s)),
            self.prefill_s(cluster, new_tokens, cached_tokens),
            self.kv_bits(new_tokens + cached_tokens - had_tokens),
            self.time_scale * link.spec.latency_s,
            self.layers,
            self.first_step_s,
        )

    def local_s(self, state: PathState, new_tokens: int, cached_tokens: int) -> float:
        """Predicted first-token time of local prefill."""
        n_bytes = self.kv.transfer_bytes(new_tokens)
        return first_token_s(
            state,
            self.prefill_s(self.pd.name, new_tokens, cached_tokens),
            float(n_bytes * BITS_PER_BYTE),
            self.time_scale * rdma_s(n_bytes, self.pd.rdma_bps, self.pd.rdma_latency_s),
            self.layers,
            self.first_step_s,
        )

    def transfer_deadline_s(
        self, cluster: str, bits: float, factor: float, floor_s: float, now_s: float
    ) -> float:
        """Time for a KV cache to arrive: factor x bits on the link / observed bandwidth + floor.

        The bits of transfers that share the link count too: under fair sharing they may all be served first.
        """
        link = self.links.get(cluster)
        if link is None:
            return factor * self.time_scale * bits / self.pd.rdma_bps + floor_s
        return factor * max(bits, link.backlog_bits(now_s)) / link.observed_bps(now_s) + floor_s


def finite(value: float) -> float | None:
    """A number for JSON: None for infinity."""
    return value if math.isfinite(value) else None
