"""A comparison or a sweep as tables and plain lines for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prfaas_env.intervals import Interval
from prfaas_trainings.compare import HOW_AVERAGED, Comparison
from prfaas_trainings.episodes import FIGURES, Figure, is_trace
from prfaas_trainings.sweep import SweepResult

#: Figures of the table in order (the difference column follows the first); the rest are in the files.
LATENCY = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_mean_s")
SERVICE = (
    "goodput_rps",
    "throughput_rps",
    "egress_mean_bps",
    "offload_share",
    "conversions",
    "invalid_moves",
    "rejected",
    "aborted",
    "open_at_end",
)
_BY_NAME = {figure.name: figure for figure in FIGURES}
#: Columns of text that the one-table form needs.
ONE_TABLE_WIDTH = 168
#: Width where the output is not a terminal.
FILE_WIDTH = 180


def console_for_tables() -> Console:
    """Standard output; wide when it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def show(comparison: Comparison, console: Console) -> None:
    """Print one table per scenario (two where the terminal is narrow), then the plain lines."""
    for s in range(len(comparison.scenarios)):
        parts = (
            [(LATENCY + SERVICE, True)]
            if console.width >= ONE_TABLE_WIDTH
            else [(LATENCY, True), (SERVICE, False)]
        )
        console.print(f"[bold]{escape(_title(comparison, s))}[/bold]", soft_wrap=True, highlight=False)
        for names, with_difference in parts:
            console.print(_table(comparison, s, names, with_difference))
        _notes(comparison, s, console)
    for line in comparison.lines():
        _say(console, line)
    _say(console, f"{HOW_AVERAGED} Differences are paired by seed, with 95% intervals.")


def _say(console: Console, text: str) -> None:
    console.print(escape(text), soft_wrap=True, highlight=False)


def _title(comparison: Comparison, s: int) -> str:
    n = len(comparison.seeds)
    first, last = comparison.seeds[0], comparison.seeds[-1]
    seeds = f"{n} {comparison.split} seeds {first}..{last}" if n > 1 else f"{comparison.split} seed {first}"
    scenario = comparison.scenarios[s]
    kind = ", one replayed trace" if is_trace(scenario) else ""
    horizon = f"{scenario.measure.horizon_s:,.0f} s"
    return f"{comparison.labels[s]} ({scenario.hash}): {seeds}, {horizon} each{kind}"


def _table(comparison: Comparison, s: int, names: tuple[str, ...], with_difference: bool) -> Table:
    reference = comparison.rows[comparison.reference].label
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", overflow="fold")
    for name in names:
        table.add_column(_BY_NAME[name].title, justify="right", no_wrap=True)
        if with_difference and name == "ttft_mean_s":
            table.add_column(f"mean minus\n{escape(reference)}", justify="right", no_wrap=True)
    for r, row in enumerate(comparison.rows):
        mark = "* " if _flags(comparison, s, r) else ""
        cells = [mark + escape(row.label)]
        for name in names:
            cells.append(_cell(comparison.own(s, r, name).mean, _BY_NAME[name]))
            if with_difference and name == "ttft_mean_s":
                difference = comparison.difference(s, r, comparison.reference, name)
                cells.append("" if r == comparison.reference else escape(_difference(difference)))
        table.add_row(*cells, style="bold" if comparison.facts[r].learned else None)
    return table


def _cell(value: float, figure: Figure) -> str:
    if value != value:
        return "-"
    return f"{value * figure.factor:,.{figure.digits}f}"


def _difference(interval: Interval) -> str:
    if interval.mean != interval.mean:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.2f}"
    return f"{interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"


def show_sweep(result: SweepResult, console: Console) -> None:
    """Print one table per metric of the study: a row per cell and policy, with the paired difference."""
    plan = result.plan
    keys = [(c, r) for c in range(len(plan.cells)) for r in range(len(plan.rows))]
    common = set.intersection(*(set(result.warnings(c, r)) for c, r in keys))
    console.print(f"[bold]{escape(_sweep_title(result))}[/bold]", soft_wrap=True, highlight=False)
    for name in plan.study.metrics:
        figure = _BY_NAME[name]
        unit = " ".join(figure.title.replace("-\n", "").split())
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for axis in plan.study.axes:
            table.add_column(escape(axis.rpartition(".")[2]), overflow="fold")
        table.add_column("policy", overflow="fold")
        table.add_column(f"{name}\n({escape(unit)})", justify="right", no_wrap=True)
        table.add_column(f"minus\n{escape(plan.labels[plan.reference])}", justify="right", no_wrap=True)
        for c, r in keys:
            cell = plan.cells[c]
            mark = "* " if set(result.warnings(c, r)) - common else ""
            difference = (
                "" if r == plan.reference else interval_text(result.difference(c, r, name), figure, "+")
            )
            table.add_row(
                *(escape(text) if r == 0 else "" for text in cell.texts),
                mark + escape(plan.labels[r]),
                escape(interval_text(result.own(c, r, name), figure, "")),
                escape(difference),
                end_section=r == len(plan.rows) - 1,
            )
        console.print(table)
    for text in dict.fromkeys(t for c, r in keys for t in result.warnings(c, r) if t not in common):
        _say(console, f"* on one seed or more: {text} (which ones: results.csv)")
    for text in sorted(common):
        _say(console, f"note: every cell and policy, on one seed or more: {text}")
    if plan.split != "test":
        _say(console, f"note: {plan.split} seeds, so not a test of what was trained or chosen on them")
    _say(
        console,
        f"{HOW_AVERAGED} Brackets are 95% intervals; differences are paired by seed. A replayed trace is one "
        "sample and has none.",
    )


def _sweep_title(result: SweepResult) -> str:
    plan = result.plan
    n = len(plan.seeds)
    seeds = f"{n} {plan.split} seed{'s' if n > 1 else ''} {plan.seeds[0]}..{plan.seeds[-1]}"
    varied = " x ".join(plan.study.axes)
    return f"{plan.study.name} ({plan.study.scenario}): {varied}, {len(plan.cells)} cells, {seeds}"


def interval_text(interval: Interval, figure: Figure, sign: str) -> str:
    """Mean and limits of a figure in the units of the table."""
    if interval.mean != interval.mean:
        return "-"
    form = f"{{:{sign},.{figure.digits}f}}"
    shown = form.format(interval.mean * figure.factor)
    if interval.low is None or interval.high is None:
        return shown
    low, high = (form.format(v * figure.factor) for v in (interval.low, interval.high))
    return f"{shown} [{low}, {high}]"


def _everywhere(comparison: Comparison, s: int) -> list[str]:
    """Warnings that every row gave on every seed."""
    total = len(comparison.seeds)
    counts = [comparison.warnings(s, k) for k in range(len(comparison.rows))]
    return [text for text in counts[0] if all(count[text] == total for count in counts)]


def _flags(comparison: Comparison, s: int, r: int) -> dict[str, int]:
    """Warnings of one row that are not those of every row and seed, with the number of seeds."""
    common = _everywhere(comparison, s)
    return {text: n for text, n in comparison.warnings(s, r).items() if text not in common}


def _notes(comparison: Comparison, s: int, console: Console) -> None:
    n_seeds = len(comparison.seeds)
    by_text: dict[str, list[str]] = {}
    for r, row in enumerate(comparison.rows):
        for text, n in _flags(comparison, s, r).items():
            by_text.setdefault(text, []).append(row.label if n == n_seeds else f"{row.label} (on {n})")
    for text, labels in by_text.items():
        _say(console, f"* {text}, of {n_seeds} seed{'s' if n_seeds > 1 else ''}: {', '.join(labels)}")
    notes = dict.fromkeys(
        n for r in range(len(comparison.rows)) for o in comparison.outcomes[s, r] for n in o.notes
    )
    for note in notes:
        _say(console, f"note: {note}")
    for text in _everywhere(comparison, s):
        _say(console, f"note: every policy and seed: {text}")
    if comparison.split != "test":
        _say(console, f"note: {comparison.split} seeds, so not a test of what was trained or chosen on them")
    console.print()
