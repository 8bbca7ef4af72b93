"""`prfaas plan`: the throughput model's best threshold and split, the cheapest deployment for a demand."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios.loader import load_scenario
from prfaas_env.scenarios.models import Scenario
from prfaas_env.theory import Means, Optimum, Sizing, cheapest, plan, plan_sites
from prfaas_env.workload.means import mean_rate_rps

_EQUATIONS_ONLY = (
    "This is the equations' answer: no queueing, no bursts, no transfer time, no cost of conversions. "
    "Close to the largest rate real queues are long; simulate the deployment before you rely on it."
)
_DEPLOYMENTS = ("prfaas", "homogeneous", "naive")


def plan_command(
    scenario: Annotated[
        str, typer.Option("--scenario", "-s", help="Shipped scenario or path of a YAML file.")
    ] = "paper",
    deployment: Annotated[
        str | None, typer.Option("--deployment", "-d", help="Scenario whose deployment replaces this one's.")
    ] = None,
    means: Annotated[
        Literal["representative", "service"] | None,
        typer.Option(
            help="The paper's representative lengths, or true mean service times. "
            "Default: representative; with --rate, service."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="field.path=value, applied last; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    rate_rps: Annotated[
        float | None,
        typer.Option("--rate", help="Plan backwards: requests per second to carry (with --ttft-p90)."),
    ] = None,
    ttft_p90_s: Annotated[
        float | None,
        typer.Option("--ttft-p90", help="Plan backwards: largest P90 of prefill service time, s."),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="Plan backwards: price of an instance by hardware, as h200=2,h20=1; 1 if not given."
        ),
    ] = None,
    link_price: Annotated[
        float | None, typer.Option(help="Plan backwards: price of 1 Gbps of link; 0 if not given.")
    ] = None,
) -> None:
    """Best threshold and prefill/decode split by the paper's throughput model.

    With several clusters: one plan per PD cluster. With --rate and --ttft-p90: the cheapest deployment that
    carries the rate.
    """
    resolved = load_scenario(scenario, deployment=deployment, overrides=overrides or ())
    if rate_rps is None and ttft_p90_s is None:
        if price is not None or link_price is not None:
            raise PrfaasError("--price and --link-price need --rate and --ttft-p90")
        _forwards(resolved, means or "representative", as_json)
        return
    if rate_rps is None or ttft_p90_s is None:
        raise PrfaasError("--rate and --ttft-p90 belong together; give both or neither")
    prices = parse_prices(price) if price is not None else {}
    means = means or "service"
    sizing = cheapest(
        resolved,
        rate_rps=rate_rps,
        ttft_p90_s=ttft_p90_s,
        prices=prices,
        link_price_per_gbps=link_price or 0.0,
        means=means,
    )
    if as_json:
        _echo_json(_header(resolved, means) | _sizing_json(sizing, rate_rps, ttft_p90_s))
    else:
        _print_sizing(resolved, sizing, rate_rps, ttft_p90_s)


def parse_prices(text: str) -> dict[str, float]:
    """`{hardware: price}` of a text such as `h200=2,h20=1`; PrfaasError naming the faulty part."""
    prices: dict[str, float] = {}
    for item in text.split(","):
        hardware, separator, number = item.partition("=")
        hardware = hardware.strip()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not separator or not hardware or math.isnan(value):
            raise PrfaasError(f"--price: {item!r} is not hardware=price; write it as h200=2,h20=1")
        if hardware in prices:
            raise PrfaasError(f"--price: {hardware!r} is given twice")
        prices[hardware] = value
    return prices


def _header(scenario: Scenario, means: Means) -> dict[str, Any]:
    return {"scenario": scenario.name, "scenario_hash": scenario.hash, "means": means}


def _echo_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def _forwards(scenario: Scenario, means: Means, as_json: bool) -> None:
    if len(scenario.deployment.prfaas) > 1 or len(scenario.deployment.pd) > 1:
        _several(scenario, means, as_json)
        return
    found = plan(scenario, means)
    if as_json:
        deployments = {name: found[name].as_json() if name in found else None for name in _DEPLOYMENTS}
        _echo_json(_header(scenario, means) | {"deployments": deployments})
        return
    console = Console()
    table = _table(f"{scenario.name}: optimum of the throughput model ({means} means)", *found)
    for label, cells in _rows(list(found.values())):
        table.add_row(label, *cells)
    console.print(table)
    rate_rps = mean_rate_rps(scenario.workload)
    load = rate_rps / found["prfaas"].lambda_max_rps
    _say(
        console,
        f"The scenario's mean arrival rate is {rate_rps:.3g} req/s, {load:.0%} of the first column's.",
    )
    _say(console, "Service TTFT is prefill service time alone: no queue, no transfer.")
    missing = [name for name in _DEPLOYMENTS if name not in found]
    if missing:
        _say(console, f"Left out: {', '.join(missing)}; model {scenario.model.name} lacks that hardware.")
    _print_sources(console, scenario)


def _several(scenario: Scenario, means: Means, as_json: bool) -> None:
    """The plan of every PD cluster, where there is more than one cluster of a kind."""
    found = plan_sites(scenario, means)
    limit = min(found, key=lambda site: site.scenario_limit_rps)
    if as_json:
        sites = {site.name: {"arrival_share": site.arrival_share, **site.optimum.as_json()} for site in found}
        total = {"lambda_max_rps": limit.scenario_limit_rps, "limited_by": limit.name}
        _echo_json(_header(scenario, means) | {"sites": sites, "deployment": total})
        return
    console = Console()
    table = _table(
        f"{scenario.name}: optimum of the throughput model per PD cluster ({means} means)",
        *(site.name for site in found),
    )
    table.add_row("share of the arrivals", *(f"{site.arrival_share:.1%}" for site in found))
    for label, cells in _rows([site.optimum for site in found]):
        table.add_row(label, *cells)
    rate_rps = mean_rate_rps(scenario.workload)
    loads = [rate_rps / site.scenario_limit_rps for site in found]
    table.add_row("load at the scenario's rate", *(f"{load:.0%}" for load in loads))
    console.print(table)
    _say(
        console,
        f"The whole deployment carries {limit.scenario_limit_rps:.3g} req/s, limited by {limit.name}; the "
        f"scenario's mean arrival rate is {rate_rps:.3g} req/s, {rate_rps / limit.scenario_limit_rps:.0%} of that.",
    )
    _say(
        console,
        "Each PD cluster is planned by itself. A PrfaaS cluster with links to several of them is divided in "
        "proportion to their arrivals, so its instances need not be whole; links are not shared.",
    )
    _say(console, "Service TTFT is prefill service time alone: no queue, no transfer.")
    _print_sources(console, scenario)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(escape(column), justify="right")
    return table


def _rows(points: list[Optimum]) -> list[tuple[str, list[str]]]:
    return [
        ("threshold (tokens)", [_threshold(o) for o in points]),
        (
            "PrfaaS / prefill / decode",
            [f"{_count(o.n_prfaas)} / {o.n_prefill} / {o.n_decode}" for o in points],
        ),
        ("Theta PrfaaS (req/s)", [_theta(o.theta_prfaas_rps) for o in points]),
        ("Theta PD-P (req/s)", [_theta(o.theta_pdp_rps) for o in points]),
        ("Theta PD-D (req/s)", [_theta(o.theta_pdd_rps) for o in points]),
        ("Lambda max (req/s)", [f"{o.lambda_max_rps:.3f}" for o in points]),
        ("offloaded", [f"{o.offload_share:.1%}" for o in points]),
        ("egress at Lambda max (Gbps)", [f"{o.egress_bps / 1e9:.2f}" for o in points]),
        ("service TTFT mean (s)", [f"{o.service_ttft_mean_s:.2f}" for o in points]),
        ("service TTFT P90 (s)", [f"{o.service_ttft_p90_s:.2f}" for o in points]),
    ]


def _theta(value_rps: float) -> str:
    return f"{value_rps:.3f}" if value_rps else "-"


def _count(instances: float) -> str:
    return f"{instances:g}" if float(instances).is_integer() else f"{instances:.2f}"


def _threshold(point: Optimum) -> str:
    if math.isinf(point.threshold_tokens):
        return "never"
    return "always" if point.threshold_tokens == 0 else f"{point.threshold_tokens:,.0f}"


def _print_sources(console: Console, scenario: Scenario) -> None:
    """Where the figures behind the answer come from, in the words of the profiles."""
    _say(
        console, "Sources (back-solved: fitted to published results, itself neither published nor measured):"
    )
    for hardware, profile in scenario.model.hardware.items():
        _say(console, f"- {hardware} prefill: {profile.prefill.source.strip()}")
        if profile.decode is not None:
            _say(console, f"- {hardware} decode: {profile.decode.source.strip()}")


def _say(console: Console, text: str) -> None:
    """Plain text, unwrapped whatever the width, so that it can be searched."""
    console.print(escape(text), soft_wrap=True, highlight=False)


def _sizing_json(sizing: Sizing, rate_rps: float, ttft_p90_s: float) -> dict[str, Any]:
    return {
        "demand": {"rate_rps": rate_rps, "ttft_p90_s": ttft_p90_s},
        "cheapest": sizing.optimum.as_json()
        | {"link_bps": sizing.link_bps, "egress_at_rate_bps": sizing.egress_bps, "cost": sizing.cost},
        "note": _EQUATIONS_ONLY,
    }


def _print_sizing(scenario: Scenario, sizing: Sizing, rate_rps: float, ttft_p90_s: float) -> None:
    console = Console()
    title = f"{scenario.name}: cheapest for {rate_rps:g} req/s, service TTFT P90 <= {ttft_p90_s:g} s"
    table = _table(title, "cheapest")
    for label, cells in _rows([sizing.optimum]):
        table.add_row(label, *cells)
    table.add_row("link (Gbps)", f"{sizing.link_bps / 1e9:g}" if sizing.link_bps else "none")
    table.add_row("egress at the rate (Gbps)", f"{sizing.egress_bps / 1e9:.2f}")
    table.add_row("cost", f"{sizing.cost:g}")
    console.print(table)
    _say(console, _EQUATIONS_ONLY)
    _print_sources(console, scenario)
