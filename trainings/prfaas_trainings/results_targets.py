"""Whether targets were reached, worked out from what was measured; a miss is told like a hit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas_env.intervals import Interval
from prfaas_trainings.compare import Comparison
from prfaas_trainings.episodes import DECISION_EDGES_S, TTFT_EDGES_S, FloatArray, is_trace
from prfaas_trainings.results_config import (
    AllBetter,
    BaseTarget,
    Better,
    FasterDecisions,
    NotWorse,
    Reduction,
    ResultsConfig,
    ShareOfWay,
    Target,
    Within,
)
from prfaas_trainings.statistics import histogram_quantile, quantile_ratio_interval, ratio_interval

TTFT = "ttft_mean_s"


class NotMeasuredError(Exception):
    """A target that speaks of something that was not run; the text says of what."""


@dataclass(frozen=True)
class Judged:
    """One target on one table.

    `met` is None where it was not measured. `sure`: the whole interval is on the side of the verdict; None without one.
    """

    statement: str
    table: str
    target: str
    measured: str
    met: bool | None
    sure: bool | None

    @property
    def word(self) -> str:
        """The verdict as it stands in the table."""
        if self.met is None:
            return "not measured"
        word = "yes" if self.met else "**no**"
        return f"{word} (not beyond doubt)" if self.sure is False else word


def row_of(comparison: Comparison, label: str) -> int:
    """Place of a policy; NotMeasuredError where it did not run."""
    labels = [row.label for row in comparison.rows]
    if label not in labels:
        raise NotMeasuredError(f"{label}: no figures on this scenario")
    return labels.index(label)


def paired(comparison: Comparison, labels: tuple[str, ...], figure: str = TTFT) -> list[FloatArray]:
    """A figure of some policies on the seeds where all of them have it, shape (seeds,) each."""
    values = [comparison.values(0, row_of(comparison, label), figure) for label in labels]
    there = np.all(np.isfinite(values), axis=0)
    return [v[there] for v in values]


def difference(comparison: Comparison, policy: str, against: str) -> Interval:
    """Paired difference of mean TTFT."""
    return comparison.difference(0, row_of(comparison, policy), row_of(comparison, against), TTFT)


def share_of_way(comparison: Comparison, policy: str, start: str, end: str) -> Interval:
    """How much of the mean TTFT between `start` and `end` a policy gains over `start`: 1 is all of it.

    Paired by seed; a trace is one sample and gives no limits.

    Raises:
        NotMeasuredError: `end` is not ahead of `start`, so there is no way.
    """
    mine, first, last = paired(comparison, (policy, start, end))
    if not first.sum() > last.sum():
        raise NotMeasuredError(f"{end} is not ahead of {start} here")
    return _of_trace(comparison, ratio_interval(first - mine, first - last))


def mean_ratio(comparison: Comparison, policy: str, against: str) -> Interval:
    """Mean TTFT over that of another policy, paired by seed."""
    mine, other = paired(comparison, (policy, against))
    return _of_trace(comparison, ratio_interval(mine, other))


def ttft_counts(comparison: Comparison, policy: str) -> FloatArray:
    """Accepted requests of the cohort by TTFT, shape (seeds, bins)."""
    outcomes = comparison.outcomes[0, row_of(comparison, policy)]
    return np.array([outcome.ttft_counts for outcome in outcomes], dtype=np.float64)


def pooled_p90_s(comparison: Comparison, policy: str) -> float:
    """P90 of TTFT over all requests of all seeds together."""
    return float(histogram_quantile(ttft_counts(comparison, policy).sum(axis=0), TTFT_EDGES_S, 0.9))


def p90_ratio(comparison: Comparison, policy: str, against: str) -> Interval:
    """P90 over all requests over that of another policy; seeds are drawn for the interval."""
    mine, other = (ttft_counts(comparison, label) for label in (policy, against))
    return _of_trace(comparison, quantile_ratio_interval(mine, other, TTFT_EDGES_S, 0.9))


def _of_trace(comparison: Comparison, interval: Interval) -> Interval:
    if not is_trace(comparison.scenarios[0]):
        return interval
    return Interval(interval.mean, None, None, interval.n, interval.method)


def decision_quantile_s(comparison: Comparison, policy: str, q: float) -> float:
    """Quantile of the wall time of a decision, all seeds together; NaN where it was not measured."""
    outcomes = comparison.outcomes[0, row_of(comparison, policy)]
    counts = [o.decision_counts for o in outcomes if o.decision_counts is not None]
    if not counts:
        return math.nan
    return float(histogram_quantile(np.sum(counts, axis=0).astype(np.float64), DECISION_EDGES_S, q))


def lost_seeds(comparison: Comparison, policy: str, against: str) -> list[tuple[int, float, float]]:
    """(seed, mean TTFT of the policy, of the other) where the policy's is larger, the largest loss first."""
    mine, other = (comparison.values(0, row_of(comparison, label), TTFT) for label in (policy, against))
    found = [
        (seed, float(a), float(b)) for seed, a, b in zip(comparison.seeds, mine, other, strict=True) if a > b
    ]
    return sorted(found, key=lambda each: each[2] - each[1])


# --------------------------------------------------------------------------------------------- judging


def judge(config: ResultsConfig, found: Mapping[str, Comparison]) -> list[Judged]:
    """Every target on every table that it names, in the order of the configuration."""
    out = []
    for target in config.targets:
        for label in target.scenarios:
            for table in config.tables_of(label) or (label,):
                out.append(_judged(config, target, table, found.get(table)))
    return out


def _judged(config: ResultsConfig, target: Target, table: str, comparison: Comparison | None) -> Judged:
    policy = target.policy or config.subjects.learned
    wanted, measure = _JUDGES[type(target)]
    try:
        if comparison is None:
            raise NotMeasuredError("this scenario was not run")
        measured, met, sure = measure(target, config, comparison, policy)
    except NotMeasuredError as error:
        measured, met, sure = str(error), None, None
    return Judged(target.statement, table, wanted(target), measured, met, sure)


Verdict = tuple[str, bool | None, bool | None]


def seconds(interval: Interval) -> str:
    """A difference in seconds with its interval."""
    if math.isnan(interval.mean):
        return "-"
    text = f"{interval.mean:+.2f} s"
    if interval.low is None or interval.high is None:
        return f"{text} (no interval)"
    return f"{text} [{interval.low:+.2f}, {interval.high:+.2f}]"


def percent(interval: Interval, sign: str = "") -> str:
    """A share in percent with its interval."""
    if math.isnan(interval.mean):
        return "-"
    text = f"{100 * interval.mean:{sign}.1f}%"
    if interval.low is None or interval.high is None:
        return f"{text} (no interval)"
    return f"{text} [{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def lower_by(ratio: Interval) -> Interval:
    """How much lower, as a share, from a ratio."""
    low = None if ratio.high is None else 1.0 - ratio.high
    high = None if ratio.low is None else 1.0 - ratio.low
    return Interval(1.0 - ratio.mean, low, high, ratio.n, ratio.method)


def lower_text(lower: Interval) -> str:
    """`12.3% [10.0, 14.0] lower`, or the same as `higher`."""
    if lower.mean >= 0.0 or math.isnan(lower.mean):
        return f"{percent(lower)} lower"
    limits = [None if v is None else -v for v in (lower.high, lower.low)]
    return f"{percent(Interval(-lower.mean, limits[0], limits[1], lower.n, lower.method))} higher"


def _at_least(interval: Interval, least: float) -> tuple[bool | None, bool | None]:
    """Whether the mean reaches `least`, and whether the whole interval says the same."""
    if math.isnan(interval.mean):
        return None, None
    met = interval.mean >= least
    if interval.low is None or interval.high is None:
        return met, False
    return met, interval.low >= least if met else interval.high < least


def _better(target: Better, config: ResultsConfig, c: Comparison, policy: str) -> Verdict:
    d = difference(c, policy, target.against)
    if d.high is None or d.low is None:
        return seconds(d), None, None
    met = d.high < 0.0
    return seconds(d), met, True if met else d.low > 0.0


def _not_worse(target: NotWorse, config: ResultsConfig, c: Comparison, policy: str) -> Verdict:
    d = difference(c, policy, target.against)
    if d.high is None or d.low is None:
        return seconds(d), None, None
    met = d.low <= 0.0
    return seconds(d), met, d.high <= 0.0 if met else True


def _reduction(target: Reduction, config: ResultsConfig, c: Comparison, policy: str) -> Verdict:
    ratio = (mean_ratio if target.figure == "mean" else p90_ratio)(c, policy, target.against)
    lower = lower_by(ratio)
    return lower_text(lower), *_at_least(lower, target.at_least)


def _share(target: ShareOfWay, config: ResultsConfig, c: Comparison, policy: str) -> Verdict:
    share = share_of_way(c, policy, target.start, target.end)
    return percent(share), *_at_least(share, target.at_least)


def _within(target: Within, config: ResultsConfig, c: Comparison, policy: str) -> Verdict:
    ratio = mean_ratio(c, policy, target.against)
    if math.isnan(ratio.mean):
        return "-", None, None
    more, most = ratio.mean - 1.0, target.at_most
    met = abs(more) <= most
    if ratio.low is None or ratio.high is None:
        return percent(Interval(more, None, None, ratio.n, ratio.method), "+"), met, False
    low, high = ratio.low - 1.0, ratio.high - 1.0
    sure = -most <= low and high <= most if met else low > most or high < -most
    return percent(Interval(more, low, high, ratio.n, ratio.method), "+"), met, sure


def _all_better(target: AllBetter, config: ResultsConfig, c: Comparison, policy: str) -> Verdict:
    """Each policy counts on whose difference the interval excludes 0."""
    others = [p.label for p in config.policies if p.role == target.role and p.label != policy]
    if not others:
        raise NotMeasuredError(f"no policy with the role {target.role!r}")
    labels = [policy, *others]
    found = [difference(c, label, target.against) for label in labels]
    if any(d.high is None for d in found):
        return "; ".join(seconds(d) for d in found), None, None
    won = sum(d.sign < 0 for d in found)
    return f"{won} of {len(found)}: {'; '.join(seconds(d) for d in found)}", won == len(found), None


def _faster(target: FasterDecisions, config: ResultsConfig, c: Comparison, policy: str) -> Verdict:
    mine, other = (decision_quantile_s(c, label, 0.5) for label in (policy, target.against))
    if math.isnan(mine) or math.isnan(other):
        raise NotMeasuredError("decisions were not timed")
    return f"{milliseconds(mine)} ms against {milliseconds(other)} ms", mine < other, None


def milliseconds(value_s: float) -> str:
    """A time in ms with three figures."""
    return "-" if math.isnan(value_s) else f"{1e3 * value_s:.3g}"


def _aim(target: ShareOfWay) -> str:
    aim = "" if target.aim is None else f" (aim {100 * target.aim:.0f}%)"
    return f"at least {100 * target.at_least:.0f}% of the way from {target.start} to {target.end}{aim}"


_JUDGES: dict[type[BaseTarget], tuple[Callable[[Any], str], Callable[..., Verdict]]] = {
    Better: (lambda t: f"below {t.against}, interval excludes 0", _better),
    NotWorse: (lambda t: f"not above {t.against} within the interval", _not_worse),
    Reduction: (
        lambda t: (
            f"{'mean' if t.figure == 'mean' else 'P90 over all requests'} at least "
            f"{100 * t.at_least:.0f}% below {t.against}"
        ),
        _reduction,
    ),
    ShareOfWay: (_aim, _share),
    Within: (lambda t: f"within {100 * t.at_most:g}% of {t.against}", _within),
    AllBetter: (lambda t: f"every one below {t.against}, interval excludes 0", _all_better),
    FasterDecisions: (lambda t: f"median decision quicker than that of {t.against}", _faster),
}
