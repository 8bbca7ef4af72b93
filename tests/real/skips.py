"""A pytest plugin: what is skipped is shown, counted, and must be on the recorded list; measured figures at the end.

The list is `skips.yaml` beside this file (`PRFAAS_SKIPS` names another one): file or file::test -> the start of the
only reason it may be skipped for. Anything else that is skipped makes the run fail.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

MEASURED: list[str] = []
"""Lines for the end of the run."""

_skipped: list[tuple[str, str]] = []


def recorded() -> dict[str, str]:
    """The recorded list."""
    file = Path(os.environ.get("PRFAAS_SKIPS", str(Path(__file__).parent / "skips.yaml")))
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


def allowed(test: str, reason: str, listed: Mapping[str, str]) -> bool:
    """Whether a test (`path::name[parameters]`) may be skipped for this reason."""
    file, _, name = test.partition("::")
    keys = (Path(file).name, f"{Path(file).name}::{name.partition('[')[0]}")
    return any(key in listed and reason.startswith(listed[key]) for key in keys)


def refused() -> list[tuple[str, str]]:
    """Skipped tests that are not on the list."""
    listed = recorded()
    return [(test, reason) for test, reason in _skipped if not allowed(test, reason, listed)]


def _note(report: Any) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped.append((report.nodeid, report.longrepr[2].removeprefix("Skipped: ")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A skipped test."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A skipped file."""
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail where more is skipped than recorded."""
    if refused() and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured and what was skipped."""
    write = terminalreporter.write_line
    if MEASURED:
        terminalreporter.section("measured")
        for line in MEASURED:
            write(line)
    if not _skipped:
        return
    terminalreporter.section("skipped")
    unrecorded = refused()
    for skip in _skipped:
        write(f"SKIPPED {skip[0]}: {skip[1]}{' (NOT on the recorded list)' if skip in unrecorded else ''}")
    write(f"{len(_skipped)} skipped, {len(unrecorded)} of them not on the recorded list")
