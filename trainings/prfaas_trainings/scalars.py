"""What a training writes to TensorBoard beside Stable-Baselines3's own scalars."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from prfaas_env.decision import MARGIN_MAX_S, ActionCodec

#: Prefix of our scalars.
PREFIX = "prfaas"
#: Figures of episodes: those that ended in the rollout, else the running ones so far.
_EPISODE_FIGURES = ("ttft_mean_s", "ttft_p90_s", "goodput_rps")
#: Cumulative counters of `info`, logged per hour of simulated time.
_COUNTERS = {"conversions": "conversions_per_hour", "invalid_moves": "invalid_moves_per_hour"}


class ScalarsCallback(BaseCallback):
    """Logs means over each rollout, so that tags appear although no episode ends in it.

    Reward and each of its terms, TTFT mean and P90 and goodput, egress, margin or threshold (log mean, infinite ones
    at the end of the grid), prefill instances, conversions and invalid moves per hour.
    """

    def __init__(self, codec: ActionCodec, decision_interval_s: float) -> None:
        super().__init__()
        self._codec = codec
        self._interval_s = decision_interval_s
        self._routing = _routing_values(codec)
        self._before: list[dict[str, float]] = []
        self._clear()

    def _clear(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._finished: list[dict[str, Any]] = []

    def _on_training_start(self) -> None:
        self._before = [defaultdict(float) for _ in range(self.training_env.num_envs)]

    def _on_step(self) -> bool:
        infos, actions = self.locals["infos"], self.locals["actions"]
        for k, info in enumerate(infos):
            self._steps += 1
            terms = info["reward_terms"]
            self._sums["reward"] += math.fsum(terms.values())
            for name, value in terms.items():
                self._sums[f"reward_{name}"] += value
            self._sums["prefill_instances"] += info["prefill_instances"]
            before = self._before[k]
            for name in ("egress_bits", *_COUNTERS):
                self._sums[name] += info[name] - before[name]
                before[name] = info[name]
            if self.locals["dones"][k]:
                before.clear()
                self._finished.append(info)
        parts = np.asarray(actions).reshape(len(infos), -1)[:, 0::2]
        self._sums["routing"] += float(self._routing[parts].mean(axis=1).sum())
        return True

    def _on_rollout_end(self) -> None:
        n = max(self._steps, 1)
        for name, total in self._sums.items():
            if name.startswith("reward") or name == "prefill_instances":
                self._record(name, total / n)
        seconds = n * self._interval_s
        self._record("egress_gbps", self._sums["egress_bits"] / seconds / 1e9)
        for name, tag in _COUNTERS.items():
            self._record(tag, self._sums[name] / seconds * 3600.0)
        mean = self._sums["routing"] / n
        if self._codec.routing == "margin":
            self._record("margin_mean_s", mean)
        else:
            self._record("threshold_log_mean_tokens", math.exp(mean))
        episodes = self._finished or self.training_env.env_method("running_figures")
        for name in _EPISODE_FIGURES:
            values = [e[name] for e in episodes if e[name] is not None]
            if values:
                self._record(name, float(np.mean(values)))
        self._clear()

    def _record(self, name: str, value: float) -> None:
        self.logger.record(f"{PREFIX}/{name}", value)


def _routing_values(codec: ActionCodec) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What is averaged for each choice of the routing part: the margin in s, or the log of the threshold."""
    grid = np.array(codec.grid)
    if codec.routing == "margin":
        return np.clip(grid, -MARGIN_MAX_S, MARGIN_MAX_S)
    finite = grid[np.isfinite(grid) & (grid > 0)]
    return np.log(np.clip(grid, finite.min(), finite.max()))
