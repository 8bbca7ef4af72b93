"""The plugin of the tests with real engines: skips are shown, counted, and refused unless they are recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

def test_runs():
    pass

def test_link():
    pytest.skip("no network namespaces here: not root")

@pytest.mark.parametrize("n", [1, 2])
def test_bytes(n):
    pytest.skip("the CPU has no avx512_bf16")
"""


def _run(folder: Path, listed: dict[str, str]) -> tuple[int, str]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "skips.yaml").write_text(yaml.safe_dump(listed))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.real.skips",
            "-p",
            "no:cacheprovider",
            "test_some.py",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PRFAAS_SKIPS": str(folder / "skips.yaml"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_recorded_skips_pass_and_are_counted(tmp_path: Path) -> None:
    listed = {
        "test_some.py::test_link": "no network namespaces here",
        "test_some.py::test_bytes": "the CPU has no avx512_bf16",
    }
    code, shown = _run(tmp_path, listed)
    assert code == 0, shown
    assert "SKIPPED test_some.py::test_link: no network namespaces here: not root" in shown
    assert "3 skipped, 0 of them not on the recorded list" in shown


@pytest.mark.parametrize(
    "listed",
    [
        {"test_some.py::test_link": "no network namespaces here"},
        {"test_some.py": "the CPU has no avx512_bf16"},
        {},
    ],
)
def test_anything_else_that_is_skipped_fails_the_run(tmp_path: Path, listed: dict[str, str]) -> None:
    code, shown = _run(tmp_path, listed)
    assert code == 1, shown
    assert "(NOT on the recorded list)" in shown


@pytest.mark.parametrize("asked", [False, True])
def test_real_engines_are_left_out_unless_asked_for(asked: bool) -> None:
    settings = {k: v for k, v in os.environ.items() if k != "PRFAAS_REAL"} | (
        {"PRFAAS_REAL": "1"} if asked else {}
    )
    others = [p for p in (ROOT / "tests").iterdir() if p.name != "real" and (p.is_dir() or "test_" in p.name)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
        + [f"--ignore={path}" for path in others],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("test_vllm_dense" in done.stdout) == asked, done.stdout
    assert done.returncode == (0 if asked else pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout
