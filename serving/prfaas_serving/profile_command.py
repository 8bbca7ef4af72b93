"""`prfaas profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from prfaas_env.base import PrfaasError

if TYPE_CHECKING:
    from prfaas_serving.fitting import Fitted


def profile(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Decision log of a router, address of its admin port (http://HOST:PORT), or request log (CSV, JSON "
            "lines).",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for profile.yaml, scenario.yaml, trace.csv and report.json.")
    ],
    scenario: Annotated[
        str | None,
        typer.Option(help="Scenario to build on: clusters, counts, slots; default what the log ran."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the profile and the scenario.")] = "fitted",
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the token of the admin port.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Fit a latency profile and a scenario to a running deployment or to a request log."""
    from prfaas_env.scenarios import load_scenario
    from prfaas_serving.fitting import fit_deployment, write_fitted
    from prfaas_serving.measured import read_measured

    if not name.strip():
        raise PrfaasError("--name: must not be empty")
    base = None if scenario is None else load_scenario(scenario)
    fitted = fit_deployment(read_measured(source, token_env), base, name)
    files = write_fitted(fitted, out)
    if as_json:
        typer.echo(json.dumps(fitted.as_json(), indent=2, allow_nan=False))
        return
    _show(fitted)
    typer.echo(f"written: {', '.join(map(str, files))}")


def _show(fitted: Fitted) -> None:
    typer.echo(f"{fitted.where}: {fitted.n:,} requests used")
    for reason, n in fitted.left_out.items():
        typer.echo(f"left out: {n:,} ({reason})")
    table = Table("fit", "points", "set aside", "residual\nP50", "residual\nP90", "valid from", "to")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for what, q in fitted.qualities.items():
        low, high = f"{q.low:,.6g}", f"{q.high:,.6g}"
        table.add_row(
            what, str(q.points), str(q.outliers), f"{q.residual_p50:.1%}", f"{q.residual_p90:.1%}", low, high
        )
    Console().print(table)
    for what, value in fitted.figures.items():
        typer.echo(f"{what}: {value:,.6g}")
    for note in fitted.notes:
        typer.echo(f"note: {note}")
