"""The cache of compiled code never lies: a changed formula or constant is compiled anew, an unchanged one is not.

Most tests run in fresh interpreters on a copy of the package that holds only a small kernel (and the real formulas and
`jit`), so that compiling takes a fraction of a second.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas_env.base import PrfaasError
from prfaas_env.simulator import compiled_engine, jit, kernel

PACKAGE = Path(jit.__file__).parents[1]
MESSAGE = "compiling the simulator (once)"

KERNEL = """
from prfaas_env.simulator import limits
from prfaas_env.simulator.formulas import NS_PER_S, flow_end_ns, rdma_s
from prfaas_env.simulator.scale import FACTOR


def total(n, out):
    for k in range(n):
        out[k] = FACTOR * rdma_s(k, 8.0, 0.0) + limits.FLOOR + flow_end_ns(0, 1.0, 1.0) // NS_PER_S


def twice(x):
    return 2 * x
"""

RUN = """
import sys
import numpy as np
from prfaas_env.simulator import jit, tiny
out = np.zeros(3)
functions = jit.compile_functions(
    [tiny.total, tiny.twice], announce=lambda: sys.stderr.write("compiling the simulator (once)\\n")
)
functions["total"](3, out)
functions["twice"](21)
functions["total"](3, out)
plain = np.zeros(3)
tiny.total(3, plain)
assert out.tolist() == plain.tolist(), "compiled and plain disagree"
print(*out.tolist())
"""


class Copy:
    """A small `prfaas_env` in a folder of its own, with a cache folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.package = folder / "code" / "prfaas_env"
        simulator = self.package / "simulator"
        simulator.mkdir(parents=True)
        for package in (self.package, simulator):
            (package / "__init__.py").write_text("")
        (self.package / "base.py").write_text("class PrfaasError(Exception):\n    pass\n")
        for module in ("jit.py", "formulas.py"):
            shutil.copy(PACKAGE / "simulator" / module, simulator)
        (simulator / "limits.py").write_text("FLOOR = 0.0\n")
        (simulator / "scale.py").write_text("FACTOR = 1.0\n")
        (simulator / "tiny.py").write_text(KERNEL)

    def edit(self, module: str, old: str, new: str) -> None:
        """Replace a text that must be there, and keep the file's time: not even that tells of the edit."""
        file = self.package / "simulator" / f"{module}.py"
        text = file.read_text()
        assert text.count(old) == 1
        times = file.stat()
        file.write_text(text.replace(old, new))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def environment(self, more: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Environment variables of a run."""
        wanted = {
            **os.environ,
            "PYTHONPATH": str(self.package.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PRFAAS_CACHE_DIR": str(self.cache),
            **(more or {}),
        }
        return {name: value for name, value in wanted.items() if value is not None}

    def start(self, more: Mapping[str, str | None] | None = None, code: str = RUN) -> subprocess.Popen[str]:
        """A fresh interpreter on the copy."""
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(more),
            cwd=self.package.parents[1],
        )

    def run(self, more: Mapping[str, str | None] | None = None) -> tuple[str, int]:
        """(what it computed, how often it said that it compiles)."""
        return finished(self.start(more))


def finished(process: subprocess.Popen[str]) -> tuple[str, int]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert set(err.splitlines()) <= {MESSAGE}, err
    return out.strip(), err.count(MESSAGE)


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


FIRST = "1.0 2.0 3.0"


def test_an_edited_formula_or_constant_is_compiled_anew(copied: Copy) -> None:
    """Same cache folder, same file times: results follow the sources, and only a change compiles."""
    assert copied.run() == (FIRST, 1)
    assert copied.run() == (FIRST, 0)
    copied.edit("formulas", "n_bytes * BITS_PER_BYTE / rdma_bps + rdma_latency_s", "n_bytes * 5.0")
    assert copied.run() == ("1.0 6.0 11.0", 1)  # a function of another file
    copied.edit("scale", "FACTOR = 1.0", "FACTOR = 2.0")
    assert copied.run() == ("1.0 11.0 21.0", 1)  # a constant imported by name
    copied.edit("limits", "FLOOR = 0.0", "FLOOR = 7.0")
    assert copied.run() == ("8.0 18.0 28.0", 1)  # a constant read through its module
    copied.edit("limits", "FLOOR = 7.0", "FLOOR = 0.0")
    assert copied.run() == ("1.0 11.0 21.0", 0)  # back again: its code is still there
    copied.edit("formulas", "    return n_bytes * 5.0", "    # a comment\n    return n_bytes * 5.0")
    assert copied.run() == ("1.0 11.0 21.0", 0)  # nothing changed that runs


def test_processes_that_start_at_once_on_a_cold_cache_agree(copied: Copy) -> None:
    """Three at once: equal results, no complaint of any; then the cache is warm."""
    processes = [copied.start() for _ in range(3)]
    results = [finished(process) for process in processes]
    assert {out for out, _ in results} == {FIRST}
    assert copied.run() == (FIRST, 0)


def test_a_broken_off_compilation_is_taken_up(copied: Copy) -> None:
    """A process that ended between two compilations leaves a cache that the next one completes and says so."""
    half = RUN.split('functions["twice"]')[0]
    assert finished(copied.start(code=half)) == ("", 1)
    assert copied.run() == (FIRST, 1)


def test_nothing_is_written_beside_the_sources(copied: Copy) -> None:
    """An install that cannot be written to works: the package folder stays as it is.

    Permissions do not bind the root user, so the test looks at what was written instead of at refusals.
    """
    before = sorted(copied.package.rglob("*"))
    for folder in (copied.package / "simulator", copied.package):
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert copied.run() == (FIRST, 1)
    finally:
        for folder in (copied.package, copied.package / "simulator"):
            folder.chmod(stat.S_IRWXU)
    assert sorted(copied.package.rglob("*")) == before


def test_without_a_home_the_cache_is_temporary(copied: Copy, tmp_path: Path) -> None:
    """A home below a file can hold nothing, whoever asks; the temporary folder then keeps the code."""
    file, temporary = tmp_path / "file", tmp_path / "tmp"
    file.write_text("")
    temporary.mkdir()
    homeless = {"PRFAAS_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": f"{file}/home"}
    homeless |= {"TMPDIR": str(temporary)}
    assert copied.run(homeless) == (FIRST, 1)
    assert copied.run(homeless) == (FIRST, 0)
    assert list(temporary.rglob("*.nbi"))


# ------------------------------------------------------------------ choice of the folder


def test_choice_of_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PRFAAS_CACHE_DIR`, else the user's cache folder, else a temporary one, else none."""
    monkeypatch.setenv("PRFAAS_CACHE_DIR", str(tmp_path / "mine" / "deep"))
    assert jit.cache_root() == tmp_path / "mine" / "deep"
    monkeypatch.delenv("PRFAAS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_root() == tmp_path / "xdg" / "prfaas-env"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jit.cache_root() == tmp_path / "home" / ".cache" / "prfaas-env"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary = jit.cache_root()
    assert temporary is not None
    assert temporary.parent == tmp_path
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    temporary.chmod(0o777)  # others could put code there
    assert jit.cache_root() is None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert jit.cache_root() is None


def test_a_folder_without_write_permission_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an ordinary user finds it (simulated: permissions do not bind the root user)."""
    shut = tmp_path / "xdg" / "prfaas-env"
    monkeypatch.delenv("PRFAAS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != shut)
    chosen = jit.cache_root()
    assert chosen is not None
    assert chosen.parent == tmp_path


def test_a_chosen_folder_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PRFAAS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(
        PrfaasError, match=r"PRFAAS_CACHE_DIR: .*file' is not a folder that can be written to"
    ):
        jit.cache_root()


def test_without_any_folder_it_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cache_root", lambda: None)
    said: list[str] = []
    functions = jit.compile_functions([kernel.integral_at], announce=lambda: said.append("compiling"))
    counted = np.array([3, 10, 5], dtype=np.int64)
    assert functions["integral_at"](counted, 0, 9) == kernel.integral_at(counted, 0, 9) == 22
    functions["integral_at"](counted, 0, 9)
    assert said == ["compiling"]


# ------------------------------------------------------------------ what the key covers

ENTRIES = compiled_engine._ENTRIES


def key_of_the_engine() -> str:
    return jit.cache_key(jit.closure(ENTRIES), {})


def test_the_key_is_the_same_in_every_process() -> None:
    """Nothing of one process (addresses, order of sets) is in it."""
    code = "from tests.prfaas_env.simulator.test_jit import key_of_the_engine; print(key_of_the_engine())"
    root = Path(__file__).parents[3]
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == key_of_the_engine()


def test_every_module_of_formulas_is_compiled_in() -> None:
    modules = {function.__module__ for function in jit.closure(ENTRIES)}
    assert modules == {
        "prfaas_env.decision",
        "prfaas_env.prediction",
        "prfaas_env.simulator.events",
        "prfaas_env.simulator.formulas",
        "prfaas_env.simulator.kernel",
        "prfaas_env.simulator.kernel_prefix",
        "prfaas_env.simulator.prefix_pool",
        "prfaas_env.matching",
        "prfaas_env.telemetry",
    }


def constants_of(function: types.FunctionType) -> list[tuple[dict[str, Any], str]]:
    """(namespace, name) of the numbers and tuples that a function reads, those of modules of ours included."""
    found = []
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, int | float | tuple):
            found.append((function.__globals__, name))
        if isinstance(value, types.ModuleType) and value.__name__.startswith("prfaas_env."):
            known = vars(value)
            parts = [p for p in function.__code__.co_names if isinstance(known.get(p), int | float | tuple)]
            found += [(known, part) for part in parts]
    return found


def test_every_constant_of_the_engine_is_in_the_key() -> None:
    """Change each constant that compiled code reads, one at a time: the part of the key that it feeds differs."""
    checked = set()
    for function in jit.closure(ENTRIES):
        for namespace, name in constants_of(function):
            kept = namespace[name]
            before = list(jit._constant_parts(function))
            namespace[name] = kept + 1 if isinstance(kept, int | float) else (*kept, 1)
            try:
                assert list(jit._constant_parts(function)) != before, name
            finally:
                namespace[name] = kept
            checked.add(name)
    # from events, formulas, layout, telemetry and kernel
    assert checked >= {"REQUEST_BITS", "NS_PER_S", "W_INST", "N_BUCKETS", "PD_POOL_AT"}
    assert len(checked) > 200


def test_every_function_of_the_engine_is_in_the_key() -> None:
    """Change a constant inside each function, or its name where it has none: its part of the key differs."""
    for function in jit.closure(ENTRIES):
        before = list(jit._code_parts(function))
        code = function.__code__
        changed = code.replace(co_consts=(*code.co_consts, 12345.678))
        twin = types.FunctionType(changed, function.__globals__)
        twin.__module__ = function.__module__
        twin.__qualname__ = function.__qualname__
        assert list(jit._code_parts(twin)) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 2.5,
        lambda x: x + 2.0,
        lambda x, y=1: x * 2.0,
        lambda x: sum(x * 2.0 for _ in range(1)),
        lambda x: max(x * 2.0, 0.0),
    ],
)
def test_the_key_follows_the_code(change: Any) -> None:
    """Another constant, operator, default, nested code or name is another key; a copy is not."""

    def key(function: Any) -> str:
        function.__module__, function.__qualname__ = "prfaas_env.made_up", "f"
        return jit.cache_key([function], {})

    assert key(lambda x: x * 2.0) == key(lambda x: x * 2.0)
    assert key(change) != key(lambda x: x * 2.0)


def test_options_are_in_the_key() -> None:
    functions = jit.closure([kernel.integral_at])
    assert jit.cache_key(functions, {"prfaas_env.simulator.kernel.integral_at": {"fastmath": True}}) != (
        jit.cache_key(functions, {})
    )


# ------------------------------------------------------------------ the engine itself

ENGINE_RUN = """
import numpy as np
from prfaas_env.simulator.compiled_engine import compiled_kernel
functions = compiled_kernel()
z = np.zeros(1000, dtype=np.int64)
functions["begin"](z, z.reshape(10, 100))
ones = np.ones(2)
out = np.zeros(2, dtype=np.float32)
functions["encode_values"](ones, ones, ones, ones, ones, ones, np.zeros(2, dtype=np.int64), out)
assert compiled_kernel() is functions
"""


def test_the_engine_says_once_that_it_compiles(copied: Copy) -> None:
    """Two of its functions, cold: one line on stderr. Warm: none."""
    here = {"PYTHONPATH": str(PACKAGE.parent)}
    assert finished(copied.start(here, ENGINE_RUN)) == ("", 1)
    assert finished(copied.start(here, ENGINE_RUN)) == ("", 0)


WHOLE_RUN = """
import json
import gymnasium, numpy as np
import prfaas_env
assert prfaas_env.__file__.startswith({root!r}), prfaas_env.__file__
def played(**kwargs):
    env = gymnasium.make("PrfaaS-v0", **kwargs)
    env.reset(seed=3)
    return [float(env.step(np.array([9, 1]))[1]) for _ in range(40)]
env = gymnasium.make_vec("PrfaaS-v0", num_envs=2, vectorization_mode="vector_entry_point")
env.reset(seed=3)
many = [float(env.step(np.array([[9, 1], [9, 1]]))[1][0]) for _ in range(40)]
assert many == played() == played(engine="simpy")
print(json.dumps(many))
"""


@pytest.mark.slow
def test_the_whole_engine_follows_an_edited_formula(tmp_path: Path) -> None:
    """A copy of the whole package: cold, warm, and after an edit of a formula; both engines agree each time."""
    copied = Copy(tmp_path)
    shutil.rmtree(copied.package)
    shutil.copytree(PACKAGE, copied.package, ignore=shutil.ignore_patterns("__pycache__"))
    code = WHOLE_RUN.format(root=str(copied.package))
    cold, said = finished(copied.start(code=code))
    assert said == 1
    assert finished(copied.start(code=code)) == (cold, 0)
    copied.edit("formulas", "return a_s + b_s * batch", "return 100.0 * a_s + b_s * batch")
    edited, said = finished(copied.start(code=code))
    assert said == 1
    assert edited != cold
