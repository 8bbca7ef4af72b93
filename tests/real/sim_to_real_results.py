"""What the study of `sim_to_real` makes of its runs: predictions, intervals, order, plot and page."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_env.base import PrfaasError, write_whole
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.formulas import NEVER_NS
from prfaas_env.simulator.records import Route
from prfaas_env.simulator.run import run_world
from prfaas_env.simulator.world import draw_world

FloatArray = NDArray[np.float64]

#: Blocks of arrival time that are drawn anew for intervals: longer than a queue of this study lives.
BLOCK_S = 10.0
RESAMPLES = 4000
#: What the predictions are held against.
ALLOWED_ERROR = 0.15
#: What the page says of a kind of worker that was not measured.
NOTHING = "Not measured yet."


def marks(kind: str) -> tuple[str, str]:
    """What stands around the results of a kind of worker on the page."""
    return f"<!-- {kind} workers: begin -->", f"<!-- {kind} workers: end -->"


def json_of(page: Path, kind: str) -> Path:
    """Where the numbers of a kind of worker are."""
    return page.with_name(f"{page.stem}-{kind}.json")


@dataclass(frozen=True)
class Piece:
    """One policy on one trace: arrival and first-token time of every request, in order of arrival."""

    policy: str
    seed: int
    arrival_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    remote: int
    failed: int = 0
    foreign_share: float = 0.0
    """Share of the machine that other processes took meanwhile."""

    def as_json(self) -> dict[str, Any]:
        """For the file of the piece."""
        return {
            **self.__dict__,
            "arrival_s": [round(x, 6) for x in self.arrival_s],
            "ttft_s": [round(x, 6) for x in self.ttft_s],
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Piece:
        """From its file."""
        return cls(**{**raw, "arrival_s": tuple(raw["arrival_s"]), "ttft_s": tuple(raw["ttft_s"])})


def predicted(scenario: Scenario, policy: str, seed: int, seconds: float) -> Piece:
    """The same piece in the simulator, run to the last answer."""
    world = draw_world(scenario, seed, horizon_s=seconds)
    records = run_world(world, make_policy(policy), drain=True).records
    if not (records.first_token_ns < NEVER_NS).all():
        raise PrfaasError(f"{policy}: some requests never get a first token in the simulator")
    arrival = world.requests.arrival_ns
    return Piece(
        policy,
        seed,
        tuple((arrival / 1e9).tolist()),
        tuple(((records.first_token_ns - arrival) / 1e9).tolist()),
        int((records.route == Route.REMOTE).sum()),
    )


def _blocks(pieces: list[Piece]) -> list[FloatArray]:
    """First-token times by piece and block of arrival time."""
    out = []
    for piece in pieces:
        number = (np.array(piece.arrival_s) // BLOCK_S).astype(int)
        times = np.array(piece.ttft_s)
        out += [times[number == k] for k in np.unique(number)]
    return out


def figures(pieces: list[Piece], seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Mean and P90 of all requests of some pieces, with 95% intervals by drawing blocks anew."""
    blocks = _blocks(pieces)
    every = np.concatenate(blocks)
    luck = np.random.default_rng(np.random.SeedSequence(seed))
    means, p90s = np.empty(resamples), np.empty(resamples)
    for k in range(resamples):
        drawn = np.concatenate([blocks[i] for i in luck.integers(0, len(blocks), len(blocks))])
        means[k], p90s[k] = drawn.mean(), np.quantile(drawn, 0.9)

    def of(value: float, drawn: FloatArray) -> dict[str, float]:
        low, high = np.quantile(drawn, [0.025, 0.975])
        return {"value": float(value), "low": float(low), "high": float(high)}

    return {
        "requests": len(every),
        "pieces": len(pieces),
        "remote_share": sum(p.remote for p in pieces) / len(every),
        "mean_s": of(every.mean(), means),
        "p90_s": of(float(np.quantile(every, 0.9)), p90s),
        "failed": sum(p.failed for p in pieces),
        "foreign_share": float(np.mean([p.foreign_share for p in pieces])),
    }


def compared(measured: dict[str, Any], simulated: dict[str, Any]) -> dict[str, Any]:
    """One policy: both, and the error of the prediction."""
    return {
        "measured": measured,
        "predicted": {
            "mean_s": simulated["mean_s"]["value"],
            "p90_s": simulated["p90_s"]["value"],
            "remote_share": simulated["remote_share"],
        },
        "error": {
            name: simulated[name]["value"] / measured[name]["value"] - 1.0 for name in ("mean_s", "p90_s")
        },
    }


def order(policies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Pairs of policies whose measured mean intervals do not overlap, and those that the simulator orders otherwise."""
    apart, wrong = [], []
    for a, b in itertools.combinations(sorted(policies), 2):
        first, second = (policies[name]["measured"]["mean_s"] for name in (a, b))
        if first["low"] <= second["high"] and second["low"] <= first["high"]:
            continue
        faster, slower = (a, b) if first["value"] < second["value"] else (b, a)
        apart.append([faster, slower])
        if policies[faster]["predicted"]["mean_s"] >= policies[slower]["predicted"]["mean_s"]:
            wrong.append([faster, slower])
    return {"pairs": len(policies) * (len(policies) - 1) // 2, "apart": apart, "otherwise": wrong}


# ------------------------------------------------------------------------------------ page and plot


def _ms(value: float) -> str:
    return f"{1e3 * value:,.0f}"


def _with(interval: dict[str, float]) -> str:
    return f"{_ms(interval['value'])} [{_ms(interval['low'])}, {_ms(interval['high'])}]"


def table(result: dict[str, Any]) -> str:
    """The results as Markdown; every figure is of the result."""
    rows = [
        "| policy | remote | mean measured | predicted | error | P90 measured | predicted | error | others' CPU |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in result["policies"].items():
        m, p, e = row["measured"], row["predicted"], row["error"]
        fitted = " (fitted on)" if row["fitted_on"] else ""
        rows.append(
            f"| `{name}`{fitted} | {m['remote_share']:.0%} | {_with(m['mean_s'])} | {_ms(p['mean_s'])} "
            f"| {e['mean_s']:+.1%} | {_with(m['p90_s'])} | {_ms(p['p90_s'])} | {e['p90_s']:+.1%} "
            f"| {m['foreign_share']:.0%} |"
        )
    others = {k: v for k, v in result["policies"].items() if v["threshold"] and not v["fitted_on"]}
    errors = [abs(row["error"][x]) for row in others.values() for x in ("mean_s", "p90_s")]
    within = sum(error <= ALLOWED_ERROR for error in errors)
    o, d = result["order"], result["deployment"]
    requests = sum(row["measured"]["requests"] for row in result["policies"].values())
    apart = len(o["apart"])
    wrong = "; ".join(f"`{a}` before `{b}`" for a, b in o["otherwise"])
    return "\n".join(
        (
            f"Model {d['model']}, {d['n_tokens_median']:,.0f} tokens in the median, {d['rate_rps']:.2f} requests a "
            f"second, link {d['link_bps'] / 1e6:.0f} Mbit/s; {requests:,} measured requests in pieces of "
            f"{d['piece_s']:g} s. Times in ms, with 95% intervals.",
            "",
            *rows,
            "",
            f"- Thresholds that were not fitted on: {within} of {len(errors)} figures (mean and P90) within "
            f"{ALLOWED_ERROR:.0%}; the largest error is {max(errors):.1%}.",
            f"- Order by the mean: {apart} of {o['pairs']} pairs have intervals that do not overlap; the simulator "
            f"orders {apart - len(o['otherwise'])} of them as measured{'; otherwise: ' + wrong if wrong else ''}.",
            *_fit_lines(result["fit"]),
        )
    )


def _fit_lines(fit: dict[str, Any]) -> list[str]:
    lines = [f"- The fit: {fit['requests']} requests of one run."]
    for name, q in fit["fits"].items():
        lines[0] += (
            f" {name}: {q['points']} points, {q['outliers']} set aside, residual P50 {q['residual_p50']:.1%}, "
            f"P90 {q['residual_p90']:.1%};"
        )
    lines[0] = lines[0].rstrip(";") + "."
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Predicted against measured, mean and P90, with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10.5, 4.8), layout="constrained")
    for axis, name, title in zip(axes, ("mean_s", "p90_s"), ("mean", "P90"), strict=True):
        highest = 0.0
        for k, (policy, row) in enumerate(result["policies"].items()):
            m, p = row["measured"][name], row["predicted"][name]
            highest = max(highest, m["high"], p)
            axis.errorbar(
                p,
                m["value"],
                yerr=[[max(m["value"] - m["low"], 0.0)], [max(m["high"] - m["value"], 0.0)]],
                fmt="s" if row["fitted_on"] else "o",
                color=f"C{k}",
                capsize=3,
                label=policy + (" (fitted on)" if row["fitted_on"] else ""),
            )
        line = np.array([0.0, 1.1 * highest])
        axis.plot(line, line, color="0.4", linewidth=1)
        axis.fill_between(
            line,
            line / (1 + ALLOWED_ERROR),
            line / (1 - ALLOWED_ERROR),
            color="0.85",
            zorder=0,
            label=f"prediction within {ALLOWED_ERROR:.0%}",
        )
        axis.set(
            title=f"{title} time to first token",
            xlabel="predicted (s)",
            ylabel="measured (s)",
            xlim=(0, line[1]),
            ylim=(0, line[1]),
        )
    axes[1].legend(fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_page(result: dict[str, Any], page: Path, kind: str) -> None:
    """Put the results between their marks on the page, and beside it as JSON."""
    text = page.read_text(encoding="utf-8")
    first, last = marks(kind)
    head, begin, rest = text.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise PrfaasError(f"{page}: the marks {first} and {last} are missing")
    write_whole(page, f"{head}{begin}\n{table(result)}\n{end}{tail}")
    write_whole(json_of(page, kind), json.dumps(result, indent=1) + "\n")
