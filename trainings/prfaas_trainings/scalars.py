"""What a training writes to TensorBoard beside Stable-Baselines3's own scalars."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

from prfaas_env.decision import MARGIN_MAX_S, THRESHOLD_MAX_TOKENS, THRESHOLD_MIN_TOKENS, ActionCodec
from prfaas_env.telemetry import TelemetrySchema
from prfaas_trainings.episodes import figures_of

#: Prefix of our scalars.
PREFIX = "prfaas"
#: Figures of episodes: those that ended in the rollout, else the running ones so far.
_EPISODE_FIGURES = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "goodput_rps", "link_use")
#: Most running episodes that are looked at (their figures cost more than a step).
_MAX_RUNNING = 4
#: Cumulative counters of `info`, logged per hour of simulated time.
_COUNTERS = {"conversions": "conversions_per_hour", "invalid_moves": "invalid_moves_per_hour"}
#: Telemetry fields of each PD cluster that are logged as means, together the split of its instances.
_SPLIT = ("prefill_instances", "decode_instances", "converting_instances")


class ScalarsCallback(BaseCallback):
    """Logs means over each rollout, so that tags appear although no episode ends in it.

    Reward and each of its terms, TTFT mean and quantiles, goodput, egress and link use, margin or threshold (mean and
    histogram; log mean for thresholds, infinite ones at the end of the grid), the split of the instances, conversions
    and invalid moves per hour.

    Args:
        codec: how actions become decisions.
        schema: the telemetry behind an observation.
        decision_interval_s: simulated time of a step.
        log_steps: fewest steps of all envs between two entries. Above 0 (learners whose rollouts are single steps)
            Stable-Baselines3's own scalars are written with ours.
    """

    def __init__(
        self, codec: ActionCodec, schema: TelemetrySchema, decision_interval_s: float, log_steps: int = 0
    ) -> None:
        super().__init__()
        self._codec = codec
        self._schema = schema
        self._interval_s = decision_interval_s
        self._log_steps = log_steps
        self._grid = _routing_values(codec, np.array(codec.grid, dtype=np.float64))
        self._before: list[dict[str, float]] = []
        self._clear()

    def _clear(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._finished: list[dict[str, Any]] = []
        self._routing: list[NDArray[np.float64]] = []

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
            for name in _SPLIT:
                seen = decoded(self._schema, f"pd{i}.{name}", self.locals["new_obs"])
                self._sums[name] += float(seen.sum())
        self._routing.append(self._routing_of(np.asarray(actions).reshape(len(infos), -1)))
        return True

    def _routing_of(self, actions: NDArray[Any]) -> NDArray[np.float64]:
        """Margin in s or log of the threshold of each action and PD cluster, flat."""
        if self._codec.form == "discrete":
            return self._grid[actions[:, 0::2].astype(np.int64)].ravel()
        decided = [c for action in actions for c in self._codec.decode(action).clusters]
        values = [c.margin_s if c.threshold_tokens is None else c.threshold_tokens for c in decided]
        return _routing_values(self._codec, np.array(values, dtype=np.float64))

    def _on_rollout_end(self) -> None:
        if self._steps >= max(self._log_steps, 1):
            self._log()

    def _on_training_end(self) -> None:
        if self._steps and self._log_steps:
            self._log()

    def _log(self) -> None:
        n = self._steps
        for name, total in self._sums.items():
            if name.startswith("reward") or name in _SPLIT:
                self._record(name, total / n)
        seconds = n * self._interval_s
        self._record("egress_gbps", self._sums["egress_bits"] / seconds / 1e9)
        for name, tag in _COUNTERS.items():
            self._record(tag, self._sums[name] / seconds * 3600.0)
        routing = np.concatenate(self._routing)
        if self._codec.routing == "margin":
            self._record("margin_mean_s", float(routing.mean()))
            self._record("margins_s", routing)
        else:
            self._record("threshold_log_mean_tokens", math.exp(float(routing.mean())))
            self._record("thresholds_tokens", np.exp(routing))
        self._log_episodes()
        self._clear()
        if self._log_steps:
            self.model.dump_logs()

    def _log_episodes(self) -> None:
        some = range(min(self.training_env.num_envs, _MAX_RUNNING))
        ended = self._finished or [
            {"episode_metrics": m} for m in self.training_env.env_method("episode_metrics", indices=some)
        ]
        episodes = [figures_of(info["episode_metrics"]) for info in ended]
        for name in _EPISODE_FIGURES:
            values = [v for v in (figures[name] for figures in episodes) if v is not None]
            if values:
                self._record(name, float(np.mean(values)))

    def _record(self, name: str, value: float | NDArray[np.float64]) -> None:
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


def _routing_values(codec: ActionCodec, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is averaged for values of the routing part: the margin in s, or the log of the threshold."""
    if codec.routing == "margin":
        return np.clip(values, -MARGIN_MAX_S, MARGIN_MAX_S)
    return np.log(np.clip(values, THRESHOLD_MIN_TOKENS, THRESHOLD_MAX_TOKENS))
