"""`prfaas bench`: the speed of this machine's installation, as a table, JSON, and the table of the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prfaas_env.base import PrfaasError, write_whole


def bench_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: see that everything runs; the figures say little.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run this benchmark alone; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    write_docs: Annotated[
        Path | None,
        typer.Option(help="Write the table between the markers of this page (docs/performance.md)."),
    ] = None,
) -> None:
    """Measure speed, memory and start-up against the targets. Takes minutes; leave the machine alone meanwhile."""
    # the environments and both engines, which the other commands do without
    from prfaas_env import bench

    page = None
    if write_docs is not None:
        if quick or only:
            raise PrfaasError("--write-docs needs a whole run: neither --quick nor --only")
        page = _page(write_docs)
        bench.with_table(page, bench.Report(quick, bench.machine_facts()), str(write_docs))
    if out is not None and not out.parent.is_dir():
        raise PrfaasError(f"--out: folder {out.parent} does not exist")
    report = bench.run_benchmarks(only or (), quick=quick, say=lambda text: typer.echo(text, err=True))
    content = json.dumps(report.as_json(), indent=2, allow_nan=False)
    if out is not None:
        write_whole(out, content + "\n")
    if write_docs is not None and page is not None:
        write_whole(write_docs, bench.with_table(page, report, str(write_docs)))
    if as_json:
        typer.echo(content)
    else:
        _show(report)


def _page(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrfaasError(f"--write-docs: {path} cannot be read: {error}") from None


def _show(report: object) -> None:
    from prfaas_env import bench

    assert isinstance(report, bench.Report)
    console = Console()
    table = Table("", "value", "unit", "min / median / max", "target", "")
    table.columns[1].justify = "right"
    for name, figures in report.found.items():
        table.add_row(f"[bold]{escape(name)}[/bold]")
        for figure in figures.values():
            met = bench.verdict(figure)
            colour = {"met": "green", "missed": "red"}.get(met)
            table.add_row(
                escape(figure.what),
                bench.number(figure.value),
                figure.unit,
                " / ".join(map(bench.number, figure.spread)) if len(figure.samples) > 1 else "",
                bench.target(figure),
                f"[{colour}]{met}[/{colour}]" if colour else "",
            )
    console.print(table)
    for name, reason in report.skipped.items():
        console.print(f"not measured: {name} ({reason})", markup=False, highlight=False)
    console.print(bench.facts_line(report), markup=False, highlight=False, soft_wrap=True)
