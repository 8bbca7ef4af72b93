"""`prfaas simulate`: one policy through one episode, as figures, JSON and a per-request CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prfaas_env.base import MAX_S, PrfaasError, write_whole
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.engine import DEFAULT_ENGINE, ENGINES, check_engine
from prfaas_env.simulator.formulas import NEVER_NS, NS_PER_S
from prfaas_env.simulator.records import RequestRecords, Route, Status
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import World
from prfaas_env.theory import plan
from prfaas_env.workload.formats import TRACE_FORMATS, is_rate_profile, sniff_format
from prfaas_env.workload.means import mean_rate_rps
from prfaas_env.workload.models import TraceWorkload
from prfaas_env.workload.traces import resolve_trace_file

#: Below this share of capacity a policy has nothing to decide, and the result says so.
LOW_LOAD_SHARE = 0.3

CSV_COLUMNS = (
    "request_id",
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "incremental_tokens",
    "route",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_end_s",
    "first_token_s",
    "finish_s",
    "attempts",
    "status",
)


def requests_csv(world: World, records: RequestRecords) -> str:
    """One line per request that arrived; stamps are absolute simulation seconds, empty if not reached."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)

    def seconds(ns: int) -> str:
        return "" if ns == NEVER_NS else f"{ns // 1_000_000_000}.{ns % 1_000_000_000:09d}"

    table = world.requests
    for i in range(len(table)):
        if records.status[i] == Status.PENDING:
            continue
        writer.writerow(
            (
                i,
                seconds(int(table.arrival_ns[i])),
                int(table.input_tokens[i]),
                int(table.output_tokens[i]),
                int(records.incremental_tokens[i]),
                Route(int(records.route[i])).name.lower(),
                seconds(int(records.prefill_start_ns[i])),
                seconds(int(records.prefill_end_ns[i])),
                seconds(int(records.transfer_end_ns[i])),
                seconds(int(records.first_token_ns[i])),
                seconds(int(records.finish_ns[i])),
                int(records.attempts[i]),
                Status(int(records.status[i])).name.lower(),
            )
        )
    return out.getvalue()


def _with_trace(scenario: Scenario, trace: str, trace_format: str | None) -> tuple[Scenario, str | None]:
    note = None
    if trace_format is None:
        path = resolve_trace_file(trace, None)
        if is_rate_profile(path):
            raise PrfaasError(
                f"--trace {trace}: a profile of rates, not requests; use arrivals of kind profile"
            )
        trace_format = sniff_format(path)
        if trace_format is None:
            raise PrfaasError(
                f"--trace {trace}: cannot tell the format from the first line; state --trace-format, one of "
                f"{', '.join(TRACE_FORMATS)}"
            )
        note = f"trace format {trace_format} (told from the first line)"
    elif trace_format not in TRACE_FORMATS:
        raise PrfaasError(f"--trace-format is {trace_format!r}; allowed: {', '.join(TRACE_FORMATS)}")
    workload = TraceWorkload.model_validate({"kind": "trace", "file": trace, "format": trace_format})
    return scenario.replace(workload=workload), note


def _low_load_warning(scenario: Scenario) -> str | None:
    try:
        capacity_rps = plan(scenario, means="service")["prfaas"].lambda_max_rps
        load = mean_rate_rps(scenario.workload) / capacity_rps
    except PrfaasError:
        return None  # several clusters, or nothing to measure: the equations do not say
    if load >= LOW_LOAD_SHARE:
        return None
    return (
        f"offered load is {load:.0%} of capacity by the paper's equations: below {LOW_LOAD_SHARE:.0%} "
        "every sensible policy looks alike"
    )


def simulate_command(
    scenario: Annotated[str, typer.Option(help="A shipped name or a path of a YAML file.")] = "paper",
    policy: Annotated[
        str,
        typer.Option(
            help="NAME[:key=value,...], module:Class or the folder of a policy bundle; "
            "`static` is the plan's optimum."
        ),
    ] = "static",
    deployment: Annotated[
        str | None, typer.Option(help="Take the deployment of this scenario (homogeneous, naive, ...).")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="Replay this trace (a file, or bundled:NAME), drained to the end.")
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option(help=f"{', '.join(TRACE_FORMATS)}; told from the first line if absent.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Mean arrival rate in req/s; a trace is sped up or slowed down to it."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="This many arrivals, drained to the last finish.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Stop after this many seconds; default the scenario's horizon.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Episode seed.")] = 0,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES)}.")] = DEFAULT_ENGINE,
    requests_out: Annotated[
        Path | None, typer.Option(help="Write one line per request to this CSV file.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a field: dotted.path=value; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Run one policy through one episode and print what the requests and the sites went through."""
    if requests is not None and duration is not None:
        raise PrfaasError("--requests and --duration exclude each other")
    if duration is not None and not 0 < duration <= MAX_S:
        raise PrfaasError(f"--duration must be above 0 and at most {MAX_S:.0e} s, found {duration}")
    check_engine(engine)
    if requests_out is not None and not requests_out.parent.is_dir():
        raise PrfaasError(f"--requests-out: folder {requests_out.parent} does not exist")
    if trace_format is not None and trace is None:
        raise PrfaasError("--trace-format needs --trace")
    what = load_scenario(scenario, deployment=deployment, overrides=overrides or ())
    note = None
    if trace is not None:
        what, note = _with_trace(what, trace, trace_format)
    if rate is not None:
        what = what.with_rate(rate)
    warmup_s = what.measure.warmup_s
    if duration is not None and duration <= warmup_s:
        raise PrfaasError(
            f"--duration {duration:g} is within measure.warmup_s {warmup_s:g}: nothing to measure"
        )
    chosen = make_policy(policy)
    episode = simulate(
        what,
        chosen,
        seed=seed,
        engine=engine,
        n_requests=requests,
        duration_s=duration,
        whole_trace=trace is not None and requests is None and duration is None,
    )
    end_s = episode.end.time_ns / NS_PER_S
    if end_s <= warmup_s:
        raise PrfaasError(
            f"the last request finished at {end_s:.3f} s, within measure.warmup_s {warmup_s:g}: nothing to measure"
        )
    figures = {
        "scenario": what.name,
        "scenario_hash": what.hash,
        "policy": policy,
        "seed": seed,
        "engine": engine,
        **episode.metrics,
    }
    if note is not None:
        figures["notes"] = [note, *figures["notes"]]
    low = _low_load_warning(what)
    if low is not None:
        figures["warnings"] = [*figures["warnings"], low]
    if requests_out is not None:
        write_whole(requests_out, requests_csv(episode.world, episode.records))
    if as_json:
        typer.echo(json.dumps(figures, indent=2, allow_nan=False))
    else:
        _show(figures)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _show(figures: dict[str, Any]) -> None:
    console = Console()
    counts = figures["requests"]
    console.print(
        f"[bold]{figures['scenario']}[/bold] ({figures['scenario_hash']}), policy {figures['policy']}, "
        f"seed {figures['seed']}: {figures['window_s']:,.0f} s measured"
        f"{', drained' if figures['drained'] else ''}",
        highlight=False,
    )
    console.print(", ".join(f"{value:,} {name}" for name, value in counts.items()), highlight=False)
    table = Table("seconds", "mean", "p50", "p90", "p95", "p99")
    for key, label in (
        ("ttft_s", "TTFT (open at their age)"),
        ("ttft_open_inf_s", "TTFT (open at infinity)"),
        ("tpot_s", "TPOT"),
    ):
        row = figures[key]
        table.add_row(label, *(_number(row[q]) for q in ("mean", "p50", "p90", "p95", "p99")))
    service = figures["service_ttft_s"]
    table.add_row("service TTFT (the paper's)", _number(service["mean"]), "", _number(service["p90"]))
    console.print(table)
    stages = Table("stage", "mean s", "utilisation")
    use = figures["utilisation"]
    stages.add_row("queue wait", _number(figures["queue_wait_s"]))
    stages.add_row(
        "prefill", _number(figures["prefill_s"]), f"remote {use['prfaas']:.1%}, local {use['prefill']:.1%}"
    )
    stages.add_row("KV hand-over", _number(figures["transfer_s"]), f"link {use['link']:.1%}")
    stages.add_row("decode wait", _number(figures["decode_wait_s"]), f"decode {use['decode']:.1%}")
    stages.add_row("first step", _number(figures["first_step_s"]))
    console.print(stages)
    egress = figures["egress"]
    console.print(
        f"throughput {figures['throughput_rps']:.3f} req/s, goodput {figures['goodput_rps']:.3f} req/s, "
        f"egress mean {egress['mean_bps'] / 1e9:.2f} Gbps, peak {egress['peak_bps'] / 1e9:.2f} Gbps, "
        f"{figures['conversions']} conversions, {figures['invalid_moves']} invalid moves",
        highlight=False,
    )
    for line in figures["notes"]:
        console.print(f"note: {line}", markup=False, highlight=False)
    for line in figures["warnings"]:
        console.print(f"warning: {line}", style="yellow", markup=False, highlight=False)
