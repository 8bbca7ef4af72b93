"""What a training writes to TensorBoard beside Stable-Baselines3's own scalars."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

from prfaas_env.decision import MARGIN_MAX_S, ActionCodec
from prfaas_env.telemetry import TelemetrySchema
from prfaas_trainings.episodes import figures_of

#: Prefix of our scalars.
PREFIX = "prfaas"
#: Figures of episodes: those that ended in the rollout, else the running ones so far.
_EPISODE_FIGURES = ("ttft_mean_s", "ttft_p90_s", "goodput_rps")
#: Most running episodes that are looked at (their figures cost more than a step).
_MAX_RUNNING = 4
#: Cumulative counters of `info`, logged per hour of simulated time.
_COUNTERS = {"conversions": "conversions_per_hour", "invalid_moves": "invalid_moves_per_hour"}


class ScalarsCallback(BaseCallback):
    """Logs means over each rollout, so that tags appear although no episode ends in it.

    Reward and each of its terms, TTFT mean and P90 and goodput, egress, margin or threshold (log mean, infinite ones
    at the end of the grid), prefill instances, conversions and invalid moves per hour.
    """

    def __init__(self, codec: ActionCodec, schema: TelemetrySchema, decision_interval_s: float) -> None:
        super().__init__()
        self._codec = codec
        self._schema = schema
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
            before = self._before[k]
            for name in ("egress_bits", *_COUNTERS):
                self._sums[name] += info[name] - before[name]
                before[name] = info[name]
            if self.locals["dones"][k]:
                before.clear()
                self._finished.append(info)
        for i in range(self._schema.n_pd):
            seen = decoded(self._schema, f"pd{i}.prefill_instances", self.locals["new_obs"])
            self._sums["prefill_instances"] += float(seen.sum())
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
        some = range(min(self.training_env.num_envs, _MAX_RUNNING))
        ended = self._finished or [
            {"episode_metrics": m} for m in self.training_env.env_method("episode_metrics", indices=some)
        ]
        episodes = [figures_of(info["episode_metrics"]) for info in ended]
        for name in _EPISODE_FIGURES:
            values = [v for v in (figures[name] for figures in episodes) if v is not None]
            if values:
                self._record(name, float(np.mean(values)))
        self._clear()

    def _record(self, name: str, value: float) -> None:
        self.logger.record(f"{PREFIX}/{name}", value)


def decoded(schema: TelemetrySchema, name: str, observations: NDArray[np.float32]) -> NDArray[np.float64]:
    """A telemetry field in its unit again, from observations of shape (n, fields); shape (n,)."""
    k = schema.index[name]
    field = schema.fields[k]
    seen = observations[:, k].astype(np.float64)
    if field.scale == "linear":
        return seen * (field.high - field.low) + field.low
    low, high = (math.copysign(math.log1p(abs(x) / field.scale_at), x) for x in (field.low, field.high))
    bent = seen * (high - low) + low
    return np.copysign(np.expm1(np.abs(bent)) * field.scale_at, bent)


def _routing_values(codec: ActionCodec) -> NDArray[np.float64]:
    """What is averaged for each choice of the routing part: the margin in s, or the log of the threshold."""
    grid = np.array(codec.grid, dtype=np.float64)
    values: NDArray[np.float64]
    if codec.routing == "margin":
        values = np.clip(grid, -MARGIN_MAX_S, MARGIN_MAX_S)
    else:
        finite = grid[np.isfinite(grid) & (grid > 0)]
        values = np.log(np.clip(grid, finite.min(), finite.max()))
    return values
