"""Commands that are run as modules, and child processes that end with their standard input."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import typer

from prfaas_env.base import PrfaasError

#: How long a child may take to end by itself.
_END_S = 5.0


def run_command(command: Callable[..., Any]) -> None:
    """Run a function as the only command of this process; a user's mistake is one line and status 2."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    try:
        app()
    except PrfaasError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


async def end_child(process: subprocess.Popen[bytes]) -> None:
    """Close the standard input of a child, which ends it, and kill it if that takes too long; safe to call again."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        await asyncio.to_thread(process.wait, _END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
