"""What a critic may know while it learns and a policy never: the work that is still to come.

Most of the noise in a queue's returns is the arrivals, not the actions. A critic that knows what comes explains it
away, and the policy gradient stays unbiased, for what comes does not depend on the actions ("input-dependent
baselines", Mao et al., ICLR 2019). The actor does not read these columns (`foresight_networks`), and a bundle holds the
actor alone.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from prfaas_env.decision import PAPER_THRESHOLD_TOKENS
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.formulas import NS_PER_S, FloatArray
from prfaas_env.simulator.world import World

#: Edges in s after the decision of the stretches of which the critic knows the means.
EDGES_S = (0.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0)
#: Per PD cluster: requests, their input tokens, those of long requests, output tokens. Then capacity per link.
_PER_PD = 4
#: Size in `PolicyRecord.network`: how many columns the critic alone reads.
FORESIGHT = "foresight_fields"
#: Units that bring the columns near 1: tokens of an input and an output, requests/s, bit/s.
_INPUT_TOKENS, _OUTPUT_TOKENS, _CAPACITY_BPS = 20_000.0, 1_000.0, 10e9


def foresight_fields(n_pd: int, n_links: int) -> int:
    """Number of columns."""
    return (len(EDGES_S) - 1) * (_PER_PD * n_pd + n_links)


class Foresight:
    """The work to come in the worlds of one scenario.

    Args:
        scenario: what is played.
        interval_s: time between two steps.
    """

    def __init__(self, scenario: Scenario, interval_s: float) -> None:
        deployment = scenario.deployment
        self.n_pd, self.n_links = len(deployment.pd), len(deployment.links)
        self._interval_s = interval_s
        self._bins = max(math.ceil(scenario.measure.horizon_s / interval_s), 1)
        edges = [round(edge_s / interval_s) for edge_s in EDGES_S]
        # a stretch shorter than a step is that step
        self._stretches = [(a, max(b, a + 1)) for a, b in itertools.pairwise(edges)]

    @property
    def n_fields(self) -> int:
        """Number of columns."""
        return foresight_fields(self.n_pd, self.n_links)

    def table(self, world: World) -> FloatArray:
        """Sums from the start to the end of each step, shape (kinds, steps + 1); nothing comes after the horizon."""
        requests, width_ns = world.requests, self._interval_s * NS_PER_S
        at = np.minimum((requests.arrival_ns / width_ns).astype(np.int64), self._bins - 1)
        long = requests.input_tokens > PAPER_THRESHOLD_TOKENS
        kinds = []
        for pd in range(self.n_pd):
            here = world.pd_of == pd
            for weights in (
                np.ones(len(requests)),
                requests.input_tokens / _INPUT_TOKENS,
                long * requests.input_tokens / _INPUT_TOKENS,
                requests.output_tokens / _OUTPUT_TOKENS,
            ):
                counted = np.bincount(at, weights=here * weights, minlength=self._bins)
                kinds.append(counted / self._interval_s)
        middle_ns = (np.arange(self._bins) + 0.5) * width_ns
        for trace in world.links:
            held = trace.capacity_bps[np.searchsorted(trace.time_ns, middle_ns, side="right") - 1]
            kinds.append(np.log1p(held / _CAPACITY_BPS))
        sums: FloatArray = np.concatenate([np.zeros((len(kinds), 1)), np.cumsum(kinds, axis=1)], axis=1)
        return sums

    def rows(self, tables: FloatArray, steps: NDArray[np.int64]) -> NDArray[np.float32]:
        """Mean of each kind over each stretch to come, shape (n, n_fields).

        Args:
            tables: of `table`, shape (n, kinds, steps + 1).
            steps: steps done in each world, shape (n,).
        """
        each, last = np.arange(len(tables)), tables.shape[2] - 1
        columns = [
            (tables[each, :, np.minimum(steps + b, last)] - tables[each, :, np.minimum(steps + a, last)])
            / (b - a)
            for a, b in self._stretches
        ]
        return np.concatenate(columns, axis=1).astype(np.float32)
