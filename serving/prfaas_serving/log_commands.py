"""`prfaas replay` and `prfaas shadow-report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prfaas_env.base import PrfaasError
from prfaas_env.intervals import Interval
from prfaas_env.simulator.engine import DEFAULT_ENGINE, ENGINES, check_engine
from prfaas_serving.drift import OUT_OF_RANGE_SHARE

if TYPE_CHECKING:
    from prfaas_serving.decision_log import Log
    from prfaas_serving.replay import Rerun
    from prfaas_serving.shadow_report import Comparison, ShadowReport

LogFile = Annotated[Path, typer.Argument(help="Decision log; older files of the run beside it are read too.")]
OneFile = Annotated[
    bool, typer.Option("--one-file", help="Read this file alone, not the older ones beside it.")
]
Engine = Annotated[str, typer.Option(help=f"Engine of the simulation: {', '.join(ENGINES)}.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _read(path: Path, one_file: bool) -> Log:
    from prfaas_serving.decision_log import read_log

    return read_log(path, parts=not one_file)


def replay(
    log: LogFile,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Another policy than the log's: NAME[:key=value,...], module:Class or a bundle's folder; "
            "with --simulate it may be repeated."
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Simulate the recorded traffic: what would these policies have done?"
        ),
    ] = False,
    one_file: OneFile = False,
    engine: Engine = DEFAULT_ENGINE,
    as_json: AsJson = False,
) -> None:
    """Run the policy of a decision log again on what it saw, or simulate other policies on the recorded traffic."""
    check_engine(engine)
    specs = list(policy or ())
    if not simulate and len(specs) > 1:
        raise PrfaasError("--policy: one at most without --simulate")
    if len(set(specs)) < len(specs):
        raise PrfaasError("--policy: a policy is named twice")
    read = _read(log, one_file)
    if simulate:
        from prfaas_serving.shadow_report import compare_on_log

        found = compare_on_log(read, specs, own=True, engine=engine)
        _print_json(found.as_json()) if as_json else _show_comparison(read, found)
        return
    from prfaas_serving.replay import rerun

    again = rerun(read, specs[0] if specs else None)
    _print_json(again.as_json()) if as_json else _show_rerun(read, again)
    if again.is_own and again.identical < again.compared:
        raise typer.Exit(1)


def shadow_report(
    log: LogFile,
    policy: Annotated[
        str | None,
        typer.Option(help="Where the log's policy is now, if it was moved; its hash must be the log's."),
    ] = None,
    out_of_range_share: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of fields outside above which the router's guard falls back."
        ),
    ] = OUT_OF_RANGE_SHARE,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Estimate the effect in the simulator.")
    ] = True,
    one_file: OneFile = False,
    engine: Engine = DEFAULT_ENGINE,
    as_json: AsJson = False,
) -> None:
    """Report on a policy in shadow mode: where it would have differed, the estimated effect, drift of what it saw."""
    check_engine(engine)
    from prfaas_serving.shadow_report import shadow_report as report

    read = _read(log, one_file)
    found = report(read, policy=policy, limit=out_of_range_share, simulate=simulate, engine=engine)
    _print_json(found.as_json()) if as_json else _show_report(found)


# ------------------------------------------------------------------------------------------- text


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def _head(log: Log) -> str:
    header, lines = log.header, log.decisions
    span_s = (lines[-1].time_ns - lines[0].time_ns) / 1e9 if lines else 0.0
    cut = f", {log.cut} cut-off lines left out" if log.cut else ""
    parts = f" in {log.parts} files" if log.parts > 1 else ""
    return (
        f"{log.path}{parts}: {len(lines):,} decisions over {span_s:,.0f} s, {len(log.requests):,} requests, policy "
        f"{header.policy_spec} ({header.policy_hash}), scenario {header.scenario.get('name')}{cut}"
    )


def _show_rerun(log: Log, again: Rerun) -> None:
    typer.echo(_head(log))
    which = "the log's policy" if again.is_own else "another policy"
    if again.compared:
        typer.echo(
            f"{again.policy} ({again.policy_hash}, {which}): {again.identical:,} of {again.compared:,} decisions are "
            f"identical ({again.share:.2%})"
        )
    else:
        typer.echo(f"{again.policy} ({again.policy_hash}, {which}): no decision to compare")
    for n, what in (
        (again.not_asked, "decisions without a policy (held, fallen back or off)"),
        (again.other_policy, "decisions of a policy that the log does not name"),
    ):
        if n:
            typer.echo(f"not compared: {n:,} {what}")
    if again.first is not None:
        typer.echo("differences: " + ", ".join(f"{kind} {n:,}" for kind, n in again.kinds.most_common()))
        typer.echo(f"the first: {again.first}")


def _signed(interval: Interval, digits: int = 3, factor: float = 1.0) -> str:
    text = f"{interval.mean * factor:+.{digits}f}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{interval.low * factor:+.{digits}f}, {interval.high * factor:+.{digits}f}]"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _show_comparison(log: Log, found: Comparison) -> None:
    typer.echo(_head(log))
    _show_table(found)


def _show_table(found: Comparison) -> None:
    table = Table()
    table.add_column("run", overflow="fold", min_width=16)
    for head in ("TTFT\nmean s", "P50\ns", "P90\ns", "goodput\nreq/s", "egress\nGbps"):
        table.add_column(head, justify="right")
    table.add_column("conver-\nsions", justify="right")
    table.add_column("not\nserved", justify="right")
    for run in (found.happened, found.acted, *found.others):
        row = run.figures()
        lost = row["rejected"] + row["aborted"] + row["unserved"]
        table.add_row(
            run.label,
            *(_number(row[f"ttft_{name}_s"]) for name in ("mean", "p50", "p90")),
            _number(row["goodput_rps"], 3),
            _number(row["egress_mean_bps"] / 1e9),
            str(row["conversions"]),
            str(lost),
        )
    Console().print(table)
    error = found.model_error.ttft_mean_s
    typer.echo(
        f"the simulator under the recorded decisions, less what happened: mean TTFT {_signed(error)} s; "
        "what follows can be trusted about that far"
    )
    for run in found.others:
        effect = found.effect(run)
        typer.echo(
            f"{run.label}, less what acted, simulated: mean TTFT {_signed(effect.ttft_mean_s)} s; "
            f"requests within every objective {_signed(effect.goodput_share, 2, 100.0)} points "
            "[95% by moving blocks of 60 s]"
        )
    if found.others and all(found.effect(run).ttft_mean_s.low is None for run in found.others):
        typer.echo("note: no intervals, the log is shorter than 5 blocks of 60 s")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _show_report(found: ShadowReport) -> None:
    from prfaas_serving.replay import KINDS
    from prfaas_serving.shadow_report import example_text

    typer.echo(_head(found.log))
    d = found.divergence
    if d.intervals:
        typer.echo(
            f"the policy differs from what acted in {d.differing:,} of {d.intervals:,} intervals "
            f"({d.differing / d.intervals:.1%})"
        )
    else:
        typer.echo("no interval has both a proposal and something in force")
    for kind in KINDS:
        if d.kinds[kind]:
            typer.echo(f"  {kind}: {d.kinds[kind] / d.intervals:.1%} of the intervals")
    if d.requests:
        typer.echo(
            f"  the two thresholds send {d.routed_otherwise:,} of {d.requests:,} requests different ways "
            f"({d.routed_otherwise / d.requests:.1%})"
        )
    for example in d.examples:
        typer.echo(f"  {example_text(example)}")
    if found.identical_share is not None and found.identical_share < 1.0:
        typer.echo(
            f"warning: on the same readings the policy says only {found.identical_share:.2%} of this again"
        )
    if found.drift is None:
        typer.echo(f"drift: {found.no_drift}")
    else:
        _show_drift(found)
    if found.effect is not None:
        typer.echo("estimated effect, by simulating the recorded traffic:")
        _show_table(found.effect)


#: Fields that the text names; `--json` has all.
_MAX_FIELDS = 20


def _show_drift(found: ShadowReport) -> None:
    drift = found.drift
    assert drift is not None
    typer.echo(
        f"drift: {drift.mean_share:.1%} of the fields are outside the range of the training on average; more than "
        f"{drift.limit:.0%} in {drift.over_limit:.1%} of the readings, in which the guard falls back"
    )
    for f in drift.fields[:_MAX_FIELDS]:
        training = "never there in training" if f.low is None else f"{f.low:g} to {f.high:g} in training"
        typer.echo(
            f"  {f.name}: outside in {f.share:.1%} of the readings; {f.least:g} to {f.greatest:g} here, {training}"
        )
    if len(drift.fields) > _MAX_FIELDS:
        typer.echo(f"  and {len(drift.fields) - _MAX_FIELDS} more (--json names them)")
