"""Which room may import which, and what the light rooms may never use.

The rules are read from the source of every module (all import statements, also those inside functions), then
each room's modules are imported in a process of its own. The last tests feed the checker with bad code.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Room:
    """One import package: its folder, the rooms it may import, and whether it must stay light (see HEAVY)."""

    folder: str
    may_import: frozenset[str] = frozenset()
    light: bool = True


_WORLD = "prfaas_env"
_RULES = "prfaas_baselines"
_LEARNED = "prfaas_agents"
ROOMS = {
    _WORLD: Room("prfaas_env"),
    _RULES: Room("baselines/prfaas_baselines", frozenset({_WORLD})),
    _LEARNED: Room("agents/prfaas_agents", frozenset({_WORLD, _RULES}), light=False),
    "prfaas_trainings": Room(
        "trainings/prfaas_trainings", frozenset({_WORLD, _RULES, _LEARNED}), light=False
    ),
    "prfaas_serving": Room("serving/prfaas_serving", frozenset({_WORLD, _RULES})),
}
#: Parts of a light room that may be heavy.
EXEMPT = ("prfaas_serving.workers",)
#: Learning and plotting: a light room runs where none of these is installed.
HEAVY = frozenset({"torch", "stable_baselines3", "sb3_contrib", "matplotlib", "tensorboard"})
#: Modules with hidden global state, and formats that run code when they are read.
BANNED_MODULES = frozenset(
    {"random", "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
)
#: What numpy.random has without global state.
NUMPY_GENERATORS = frozenset(
    {"BitGenerator", "Generator", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "SeedSequence"}
    | {"default_rng"}
)
SAFE_LOADERS = frozenset({"yaml.SafeLoader", "yaml.CSafeLoader"})
UNSAFE_YAML = frozenset(
    {"yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all"}
    | {"yaml.Loader", "yaml.CLoader", "yaml.FullLoader", "yaml.UnsafeLoader"}
)


class _Checker:
    """The faults of one module's source, as `line: what`."""

    def __init__(self, source: str, module: str, *, is_package: bool = False) -> None:
        self.tree = ast.parse(source)
        self.module = module
        self.package = module if is_package else module.rpartition(".")[0]
        self.room_name = module.partition(".")[0]
        self.room = ROOMS[self.room_name]
        self.light = self.room.light and not any(
            module == part or module.startswith(part + ".") for part in EXEMPT
        )
        self.found: set[tuple[int, str]] = set()
        self.names: dict[str, str] = {}  # local name -> dotted name that an import bound to it

    def faults(self) -> list[str]:
        nodes = list(ast.walk(self.tree))
        for node in nodes:
            for bound, target in self._imported(node):
                self.names[bound] = target
        self.safe_loaders = SAFE_LOADERS | {
            node.name
            for node in nodes
            if isinstance(node, ast.ClassDef) and {self._dotted(base) for base in node.bases} & SAFE_LOADERS
        }
        for node in nodes:
            self._imports(node)
            if self.light:
                self._uses(node)
        return [f"{line}: {what}" for line, what in sorted(self.found)]

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """(name bound here, dotted name of what it is) of an import statement."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{self._origin(node)}.{alias.name}"

    def _origin(self, node: ast.ImportFrom) -> str:
        """Absolute name of the module that a `from ... import` names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _dotted(self, node: ast.AST) -> str | None:
        """Dotted name of `a.b.c` with the first name replaced by what it was imported from."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def _add(self, node: ast.AST, what: str) -> None:
        self.found.add((getattr(node, "lineno", 0), what))

    def _imports(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._target(node, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self._target(node, f"{self._origin(node)}.{alias.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module or an entry point named in a text is an arrow too, only a hidden one.
            if re.fullmatch(r"prfaas_\w+(\.\w+)*(:\w+)?", node.value):
                self._arrow(node, re.split(r"[.:]", node.value)[0], "names")
        elif isinstance(node, ast.Call) and self._dotted(node.func) in {
            "importlib.import_module",
            "__import__",
        }:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                self._target(node, first.value)

    def _arrow(self, node: ast.AST, other: str, verb: str) -> None:
        if other in ROOMS and other != self.room_name and other not in self.room.may_import:
            allowed = ", ".join(sorted(self.room.may_import)) or "no other room"
            self._add(node, f"{self.room_name} {verb} {other}; allowed: {allowed}")

    def _target(self, node: ast.AST, target: str) -> None:
        top = target.partition(".")[0]
        self._arrow(node, top, "imports")
        if self.light and top in HEAVY:
            self._add(node, f"{self.room_name} imports {top}, which a light room may not")
        if self.light and top in BANNED_MODULES:
            self._add(node, f"{self.room_name} imports {top}")
        if self.light:
            self._banned_name(node, target)

    def _banned_name(self, node: ast.AST, dotted: str) -> None:
        parts = dotted.split(".")
        if parts[:2] == ["numpy", "random"] and len(parts) > 2 and parts[2] not in NUMPY_GENERATORS:
            self._add(node, f"global random state {dotted}")
        if dotted in UNSAFE_YAML:
            self._add(node, f"{dotted} can run code")

    def _uses(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            self._banned_name(node, self._dotted(node) or "")
        if not isinstance(node, ast.Call):
            return
        called = self._dotted(node.func) or ""
        if called.startswith("numpy.random.") and not node.args and not node.keywords:
            self._add(node, f"{called}() without a seed")
        if called in {"yaml.load", "yaml.load_all"}:
            given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "Loader")]
            if not given or self._dotted(given[0]) not in self.safe_loaders:
                self._add(node, f"{called} without a SafeLoader")
        for keyword in node.keywords:
            if keyword.arg == "allow_pickle" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                self._add(node, "allow_pickle reads pickles")


def check(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Faults of the source of one module of a room, as `line: what`."""
    return _Checker(source, module, is_package=is_package).faults()


def _files(room: str) -> list[Path]:
    return sorted((ROOT / ROOMS[room].folder).rglob("*.py"))


def _module(room: str, path: Path) -> str:
    parts = path.relative_to(ROOT / ROOMS[room].folder).with_suffix("").parts
    return ".".join([room, *(parts[:-1] if parts[-1] == "__init__" else parts)])


EXISTING = [room for room in ROOMS if _files(room)]
LIGHT = [room for room in EXISTING if ROOMS[room].light]


def test_the_world_exists() -> None:
    assert _WORLD in EXISTING


@pytest.mark.parametrize("room", EXISTING)
def test_sources_keep_the_rules(room: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in _files(room)
        for fault in check(
            path.read_text(encoding="utf-8"), _module(room, path), is_package=path.name == "__init__.py"
        )
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("room", EXISTING)
def test_every_folder_with_code_is_a_package(room: str) -> None:
    folders = {path.parent for path in _files(room)}
    missing = sorted(
        str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()
    )
    assert not missing, f"without __init__.py: {missing}"


# Imports all modules given and prints the top-level names in sys.modules; then, for a light room, imports
# each of them first in a room not yet imported, so that none works only because another came before it.
_IMPORT_ALL = """
import importlib, json, sys
room, light, *modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
for name in modules if light == "light" else ():
    for loaded in [m for m in sys.modules if m == room or m.startswith(room + ".")]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


def _import_all(room: str, modules: list[str]) -> set[str]:
    """Top-level names in sys.modules after importing `modules`; fails when one cannot be imported."""
    command = [sys.executable, "-c", _IMPORT_ALL, room, "light" if ROOMS[room].light else "heavy", *modules]
    # Not the root of the checkout: the installed packages must be enough.
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=Path(sys.executable).parent, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("room", EXISTING)
def test_every_module_imports(room: str) -> None:
    modules = [_module(room, path) for path in _files(room) if path.name != "__main__.py"]
    modules = [m for m in modules if not any(m == part or m.startswith(part + ".") for part in EXEMPT)]
    loaded = _import_all(room, modules)
    assert room in loaded
    if ROOMS[room].light:
        assert not loaded & HEAVY


def test_import_check_sees_a_heavy_module() -> None:
    assert "matplotlib" in _import_all(_WORLD, ["matplotlib"]) & HEAVY


_BAD = [
    ("prfaas_env.x", "import prfaas_baselines", "imports prfaas_baselines"),
    (
        "prfaas_env.x",
        "def f():\n    from prfaas_agents.sb3 import Model",
        "2: prfaas_env imports prfaas_agents",
    ),
    (
        "prfaas_env.x",
        "import importlib\nimportlib.import_module('prfaas_trainings.tune')",
        "prfaas_trainings",
    ),
    ("prfaas_env.x", "DEFAULT = 'prfaas_baselines.fixed:Never'", "names prfaas_baselines"),
    (
        "prfaas_baselines.x",
        "from prfaas_trainings import tune",
        "imports prfaas_trainings; allowed: prfaas_env",
    ),
    ("prfaas_agents.x", "from prfaas_trainings import tune", "imports prfaas_trainings"),
    ("prfaas_serving.router", "import prfaas_agents.writer as w", "imports prfaas_agents"),
    ("prfaas_trainings.x", "import prfaas_serving", "imports prfaas_serving"),
    ("prfaas_env.x", "import torch", "imports torch"),
    (
        "prfaas_env.x",
        "try:\n    import torch.nn\nexcept ImportError:\n    pass",
        "2: prfaas_env imports torch",
    ),
    ("prfaas_env.x", "__import__('matplotlib.pyplot')", "imports matplotlib"),
    ("prfaas_baselines.x", "from stable_baselines3 import PPO", "imports stable_baselines3"),
    ("prfaas_serving.router", "import sb3_contrib", "imports sb3_contrib"),
    ("prfaas_env.x", "import random", "imports random"),
    ("prfaas_env.x", "from random import choice", "imports random"),
    ("prfaas_env.x", "import pickle as p", "imports pickle"),
    ("prfaas_env.x", "import numpy as np\nnp.random.seed(1)", "2: global random state numpy.random.seed"),
    ("prfaas_env.x", "import numpy\nx = numpy.random.rand", "numpy.random.rand"),
    ("prfaas_env.x", "from numpy import random as r\nr.normal(0, 1)", "numpy.random.normal"),
    ("prfaas_env.x", "import numpy.random as r\nr.shuffle([])", "numpy.random.shuffle"),
    ("prfaas_env.x", "from numpy.random import exponential", "numpy.random.exponential"),
    ("prfaas_env.x", "import numpy as np\nnp.random.RandomState(3)", "numpy.random.RandomState"),
    ("prfaas_env.x", "import numpy as np\nrng = np.random.default_rng()", "without a seed"),
    ("prfaas_env.x", "import numpy as np\nnp.load('f', allow_pickle=True)", "allow_pickle"),
    ("prfaas_baselines.x", "import yaml\nyaml.load('')", "yaml.load without a SafeLoader"),
    (
        "prfaas_baselines.x",
        "import yaml\nyaml.load('', Loader=yaml.Loader)",
        "yaml.load without a SafeLoader",
    ),
    (
        "prfaas_env.x",
        "from yaml import load as read, FullLoader\nread('', FullLoader)",
        "without a SafeLoader",
    ),
    ("prfaas_env.x", "import yaml\nyaml.unsafe_load('')", "yaml.unsafe_load can run code"),
    (
        "prfaas_env.x",
        "import yaml\nclass L(yaml.FullLoader):\n    pass\nyaml.load('', Loader=L)",
        "4: yaml.load without",
    ),
]

_GOOD = [
    ("prfaas_env.sub.x", "from .y import f\nfrom ..base import PrfaasError\nimport prfaas_env.base"),
    ("prfaas_env.x", "GROUP = 'prfaas.policies'\nGYM_ID = 'prfaas_env:PrfaasV0'"),
    ("prfaas_baselines.x", "from prfaas_env.policy import Policy"),
    ("prfaas_agents.x", "import random\nimport torch\nfrom prfaas_baselines import fixed"),
    (
        "prfaas_trainings.x",
        "from prfaas_agents import ppo\nfrom prfaas_baselines import fixed\nimport prfaas_env",
    ),
    ("prfaas_serving.workers.torch_worker", "import torch"),
    (
        "prfaas_env.x",
        "import numpy as np\nrng = np.random.default_rng(np.random.SeedSequence(1))\nrng.random()",
    ),
    ("prfaas_env.x", "def f(random):\n    return random.choice([1])"),
    ("prfaas_env.x", "import yaml\nyaml.safe_load('')\nyaml.load('', Loader=yaml.SafeLoader)"),
    ("prfaas_env.x", "import yaml\nclass L(yaml.SafeLoader):\n    pass\nyaml.load('', Loader=L)"),
]


@pytest.mark.parametrize(("module", "source", "expected"), _BAD)
def test_checker_finds(module: str, source: str, expected: str) -> None:
    faults = check(source, module)
    assert any(expected in fault for fault in faults), faults


@pytest.mark.parametrize(("module", "source"), _GOOD)
def test_checker_passes(module: str, source: str) -> None:
    assert check(source, module) == []


def test_relative_import_out_of_a_package_is_resolved() -> None:
    checker = _Checker("from . import y\nfrom .. import base", "prfaas_env.sub", is_package=True)
    origins = [checker._origin(node) for node in checker.tree.body if isinstance(node, ast.ImportFrom)]
    assert origins == ["prfaas_env.sub", "prfaas_env"]
