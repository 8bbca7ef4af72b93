"""A table of length and first-token time (NVIDIA Dynamo's global router): one length threshold per row."""

from __future__ import annotations

import math
from typing import Any, Literal

from prfaas_baselines.parameters import knob, parameter_table, parameters_from, tuned_fingerprint
from prfaas_env.base import Frozen
from prfaas_env.decision import CacheRule, ClusterDecision, Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.prediction import PathState, first_token_s
from prfaas_env.profiles.latency import PrefillProfile
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.formulas import BITS_PER_BYTE, decode_step_s
from prfaas_env.sites import Site, sites_of
from prfaas_env.telemetry import Telemetry
from prfaas_env.workload.means import input_law


class GridParameters(Frozen):
    """Parameters of the grid: its rows, and per row the length above which a request goes remote."""

    basis: Literal["local", "ahead"] = knob(
        "local",
        "-",
        "what the rows are: the local first-token time, or how far it lies behind the remote one",
    )
    border_s: float = knob(2.0, "s", "first-token time from which the second row holds")
    second_row_s: float = knob(4.0, "s", "height of the second row: the third begins so much later", ge=0)
    third_row_s: float = knob(9.0, "s", "height of the third row", ge=0)
    threshold_1_tokens: float = knob(40_000.0, "tokens", "threshold of the first row", ge=0)
    threshold_2_tokens: float = knob(19_400.0, "tokens", "threshold of the second row", ge=0)
    threshold_3_tokens: float = knob(10_000.0, "tokens", "threshold of the third row", ge=0)
    threshold_4_tokens: float = knob(4_000.0, "tokens", "threshold of the fourth row", ge=0)
    cache_rule: CacheRule = knob(
        "scarce", "-", "`scarce` or `abundant` (paper section 3.4.3)", "3.4.3, short term: no border is given"
    )


class LengthTtftGrid:
    """A threshold per row of a table; which row holds is what the first-token time is predicted to be now.

    Dynamo's global router picks a pool from a table of input length by TTFT target. Requests here have one objective,
    so the rows are the state instead: the first-token time that a prompt of mean length would have on the local path
    if it came now (`basis=local`), or how much later it would have it than on the best remote path (`ahead`). No node
    moves: that router leaves them to a planner.

    Args:
        parameters: any field of `GridParameters` by name, and `tuned`.

    Raises:
        PrfaasError: an unknown parameter or a value that is not allowed.
    """

    constant = False
    Parameters = GridParameters

    def __init__(self, **parameters: Any) -> None:
        p = self.parameters = parameters_from(GridParameters, "length_ttft_grid", parameters)
        self.fingerprint = tuned_fingerprint("length_ttft_grid", parameters)
        self._borders_s = (
            p.border_s,
            p.border_s + p.second_row_s,
            p.border_s + p.second_row_s + p.third_row_s,
        )
        self._rows = tuple(
            ClusterDecision(threshold_tokens=threshold, cache_rule=p.cache_rule)
            for threshold in (
                p.threshold_1_tokens,
                p.threshold_2_tokens,
                p.threshold_3_tokens,
                p.threshold_4_tokens,
            )
        )
        self._scenario: Scenario | None = None
        self._sites: tuple[Site, ...] = ()
        self._planned_tokens = 0

    def reset(self, context: PolicyContext) -> None:
        """Start an episode: the planned mean length holds until requests have come."""
        self._scenario = context.scenario
        self._sites = sites_of(context.scenario)
        self._planned_tokens = round(input_law(context.scenario.workload).mean)

    def decide(self, telemetry: Telemetry) -> Decision:
        """The threshold of the row that holds now, per cluster."""
        return Decision(tuple(self._rows[self.row(telemetry, site)] for site in self._sites))

    def row(self, telemetry: Telemetry, site: Site) -> int:
        """Row of a PD cluster now, from 0."""
        value_s = self.first_token_s(telemetry, site)
        return sum(value_s >= border for border in self._borders_s)

    def first_token_s(self, telemetry: Telemetry, site: Site) -> float:
        """What the rows are about, in seconds, for a prompt of mean length that comes now.

        Infinite where only the remote path exists, and with `ahead` minus infinity where only the local one does.
        """
        assert self._scenario is not None
        recent = telemetry.recent_lengths_tokens[site.index]
        tokens = round(float(recent.mean())) if len(recent) else self._planned_tokens
        kv, transport = self._scenario.model.kv, self._scenario.transport
        bits = BITS_PER_BYTE * kv.transfer_bytes(tokens)
        layers = kv.n_layers if transport.pipelining else 1
        d = site.decode
        step_s = decode_step_s(d.a_s, d.b_s_per_sequence, d.c_s_per_token, 1, tokens)
        local_s = first_token_s(
            _path(telemetry.pd[site.index]),
            _prefill_s(site.prefill, tokens),
            bits,
            bits / site.cluster.rdma_bps + site.cluster.rdma_latency_s,
            layers,
            step_s,
        )
        if self.parameters.basis == "local":
            return local_s
        remote_s = min(
            (
                first_token_s(
                    _path(telemetry.prfaas[r.j], telemetry.link[r.k]),
                    _prefill_s(r.prefill, tokens),
                    bits,
                    r.link.latency_s,
                    layers,
                    step_s,
                )
                for r in site.routes
            ),
            default=math.inf,
        )
        if math.isinf(remote_s):
            return -math.inf
        return local_s - remote_s


def _path(prefill: Any, link: Any = None) -> PathState:
    """A path as telemetry shows it; the first running prefill ends after the mean of what they have left."""
    busy, active = int(prefill.prefill_busy_instances), int(prefill.prefill_instances)
    idle = max(active - busy, 0)
    residual_s = 0.0 if idle or not busy else prefill.prefill_residual_s / busy
    if link is None:
        return PathState(prefill.prefill_queue_work_s, idle, active, residual_s)
    return PathState(
        prefill.prefill_queue_work_s,
        idle,
        active,
        residual_s,
        BITS_PER_BYTE * link.backlog_bytes,
        link.observed_capacity_bps,
    )


def _prefill_s(profile: PrefillProfile, tokens: int) -> float:
    return float(profile.seconds(tokens))


LengthTtftGrid.__doc__ = f"{LengthTtftGrid.__doc__}\n\n{parameter_table(GridParameters)}\n"
