"""`prfaas serve`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from prfaas_env.base import PrfaasError

_NEEDED = ("aiohttp", "orjson", "prometheus_client")


def need_serving(what: str) -> None:
    """PrfaasError if the packages of the `serving` extra are missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PrfaasError(f"{what} needs {', '.join(missing)}: pip install 'prfaas-env[serving]'")


def serve(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the router.")],
    check: Annotated[
        bool, typer.Option("--check", help="Validate, print what everything resolves to, and exit.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="field.path=value; may be repeated.")
    ] = None,
) -> None:
    """Route requests between prefill and decode workers (see docs/serving.md)."""
    need_serving("serve")
    from prfaas_serving.config import load_config

    resolved, notes = load_config(config, overrides or ())
    for name, text in resolved.modes():
        typer.echo(f"{name}: {text}")
    for note in (*notes, *resolved.without_effect()):
        typer.echo(f"note: {note}")
    if check:
        from prfaas_serving.checks import check_files

        check_files(resolved)
        typer.echo("the configuration is valid")
        return
    from prfaas_serving.running import run

    run(resolved)
