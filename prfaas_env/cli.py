"""The `prfaas` command: its own sub-commands here, those of the other rooms through entry points.

A user's mistake ends in one line on standard error and exit code 2, never in a traceback.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from prfaas_env import __version__, cli_trace
from prfaas_env.base import PrfaasError
from prfaas_env.cli_bench import bench_command
from prfaas_env.cli_plan import plan_command
from prfaas_env.cli_simulate import simulate_command
from prfaas_env.cli_watch import watch_command
from prfaas_env.scenarios import load_scenario, scenario_names
from prfaas_env.scenarios.loader import scenario_yaml
from prfaas_env.telemetry import schema_rows

_GROUP = "prfaas.commands"


class _Commands(TyperGroup):
    """Own commands, then those of other installed rooms; a room is imported when its command is run or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        others = sorted(entry.name for entry in metadata.entry_points(group=_GROUP))
        return [*super().list_commands(ctx), *others]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = [entry for entry in metadata.entry_points(group=_GROUP) if entry.name == cmd_name]
        return _installed(found[0]) if found else None


def _installed(entry: metadata.EntryPoint) -> Any:
    """The command of another room; one that says why where its room cannot be imported."""
    mounted = typer.Typer(add_completion=False)
    try:
        mounted.command(entry.name)(entry.load())
    except (ImportError, AttributeError) as error:
        reason = f"command {entry.name!r} cannot be loaded: {' '.join(str(error).split())}"

        def unavailable() -> None:
            raise PrfaasError(reason)

        anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
        mounted.command(entry.name, help=reason, context_settings=anything)(unavailable)
    return typer.main.get_command(mounted)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    help="Plan, simulate, learn and compare schedulers of a Prefill-as-a-Service deployment.",
)
scenario_app = typer.Typer(no_args_is_help=True, help="Scenarios: what they hold, as YAML.")
app.add_typer(scenario_app, name="scenario")
app.add_typer(cli_trace.app, name="trace")
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)
app.command("watch")(watch_command)
app.command("bench")(bench_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"prfaas-env {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, simulate, learn and compare schedulers of a Prefill-as-a-Service deployment."""


@scenario_app.command("list")
def scenario_list() -> None:
    """Names of the scenarios that ship with the package."""
    console = Console()
    table = Table("name", "what it is")
    for name in scenario_names():
        table.add_row(name, load_scenario(name).description)
    console.print(table)


@scenario_app.command("show")
def scenario_show(
    name: Annotated[str, typer.Argument(help="A shipped name or a path of a YAML file.")],
    deployment: Annotated[
        str | None, typer.Option(help="Take the deployment of this scenario (homogeneous, naive, ...).")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a field: dotted.path=value; repeatable.")
    ] = None,
) -> None:
    """Print the whole resolved scenario as YAML; it can be edited and given back as a path."""
    scenario = load_scenario(name, deployment=deployment, overrides=overrides or ())
    typer.echo(f"# hash {scenario.hash}\n{scenario_yaml(scenario)}", nl=False)


@scenario_app.command("fields")
def scenario_fields(
    name: Annotated[str, typer.Argument(help="A shipped name or a path of a YAML file.")] = "paper",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the observation fields of a scenario: name, unit, range, scale, meaning."""
    from prfaas_env.simulator.world import scenario_schema

    rows = schema_rows(scenario_schema(load_scenario(name)))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("field", "unit", "low", "high", "scale", "flag", "meaning")
    for row in rows:
        table.add_row(
            row["name"],
            row["unit"],
            f"{row['low']:g}",
            f"{row['high']:g}",
            row["scale"],
            row["flag"],
            row["meaning"],
        )
    Console().print(table)


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(2)


def main() -> None:
    """Entry point of the `prfaas` command."""
    sys.path.append(str(Path.cwd()))  # a policy `module:Class` may be a file of this folder
    try:
        app()
    except PrfaasError as error:
        _fail(str(error))
    except BrokenPipeError:
        # the reader of our output went away (`prfaas ... | head`): nothing to say
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
