"""Compile plain functions with numba, together with everything of ours that they call.

The functions stay plain where they are written; here each gets a compiled twin whose calls go to the other twins.
Compiled code is kept in a folder named by a hash of what goes into it: the code of all functions involved, the values
of all constants they read, the options, the versions and the processor. So an edited formula is never served from an
old file (numba alone looks at the caller's file only).
"""

from __future__ import annotations

import enum
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import numpy as np

from prfaas_env.base import PrfaasError

_PACKAGE = "prfaas_env"


def _ours(value: Any) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and value.__module__.split(".")[0] == _PACKAGE


def _title(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it (comprehensions, lambdas)."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(function: FunctionType) -> list[str]:
    """Global and attribute names that a function reads."""
    return sorted({name for code in _codes(function.__code__) for name in code.co_names})


def closure(entries: Iterable[Callable[..., Any]]) -> list[FunctionType]:
    """The entries and all plain functions of ours that they call, directly or not, in a fixed order."""
    found: dict[str, FunctionType] = {}
    waiting = [entry for entry in entries if _ours(entry)]
    while waiting:
        function = waiting.pop()
        name = _title(function)
        if name in found:
            continue
        found[name] = function
        for called in _names(function):
            value = function.__globals__.get(called)
            if _ours(value):
                waiting.append(value)
    return [found[name] for name in sorted(found)]


# ------------------------------------------------------------------ what compiled code depends on


def _described(value: Any) -> str:
    """A text that differs whenever the value compiles to something else."""
    if isinstance(value, enum.Enum):
        return f"{value!r}"
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return f"{value.__qualname__}{list(value)!r}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}[{','.join(_described(item) for item in value)}]"
    if isinstance(value, frozenset | set):
        return f"set{sorted(_described(item) for item in value)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, CodeType):
        return ""  # nested code is described by itself
    # functions of ours are described by themselves; nothing else is a constant to numba
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _code_parts(function: FunctionType) -> Iterator[str]:
    """What one function itself says: its code without line numbers, its defaults, its free variables."""
    yield _title(function)
    for code in _codes(function.__code__):
        yield code.co_code.hex() + code.co_exceptiontable.hex()
        yield _described(code.co_consts)
        yield _described((code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars))
        yield _described((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags))
    yield _described(function.__defaults__)
    yield _described(tuple(sorted((function.__kwdefaults__ or {}).items())))
    yield _described(tuple(cell.cell_contents for cell in function.__closure__ or ()))


def _constant_parts(function: FunctionType) -> Iterator[str]:
    """Values of the globals that one function reads, `module.NAME` included."""
    names = _names(function)
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield f"{name} {_described(value)}"
        if isinstance(value, ModuleType):
            yield f"{name} {value.__name__}"
            if value.__name__.split(".")[0] == _PACKAGE:
                known = vars(value)
                yield from (f"{name}.{part} {_described(known[part])}" for part in names if part in known)


def cache_key(functions: Iterable[FunctionType], options: Mapping[str, Mapping[str, Any]]) -> str:
    """Hash of functions, constants, options by `module.name`, versions and processor; 16 hex digits.

    It is taken from the functions in memory, so a file edited since they were loaded does not mislead it.
    """
    import llvmlite.binding as llvm
    import numba

    digest = hashlib.sha256()

    def add(part: str) -> None:
        digest.update(part.encode() + b"\0")

    for part in (
        sys.version,
        numba.__version__,
        np.__version__,
        platform.machine(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    ):
        add(part)
    for function in functions:
        for part in (*_code_parts(function), *_constant_parts(function)):
            add(part)
        add(repr(sorted(options.get(_title(function), {}).items())))
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------ where compiled code is kept


def _writable(root: Path) -> bool:
    """Whether a folder is there (made if need be) and takes files."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return root.is_dir() and os.access(root, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):
        return False


def _ours_alone(root: Path) -> bool:
    """Whether nobody else can write to a folder: code is loaded from it, and others can reach its parent."""
    if not hasattr(os, "getuid"):
        return True
    status = root.lstat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def cache_root() -> Path | None:
    """Folder for compiled code: `PRFAAS_CACHE_DIR`, else the user's cache folder, else a temporary one.

    None where none of the latter two can be used: then every process compiles for itself.

    Raises:
        PrfaasError: `PRFAAS_CACHE_DIR` is set and cannot be written to.
    """
    chosen = os.environ.get("PRFAAS_CACHE_DIR")
    if chosen:
        if not _writable(Path(chosen)):
            raise PrfaasError(f"PRFAAS_CACHE_DIR: {chosen!r} is not a folder that can be written to")
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        root = (Path(base) if base else Path.home() / ".cache") / "prfaas-env"
        if _writable(root):
            return root
    except RuntimeError:  # no home
        pass
    user = os.getuid() if hasattr(os, "getuid") else "cache"
    root = Path(tempfile.gettempdir()) / f"prfaas-env-{user}"
    return root if _writable(root) and _ours_alone(root) else None


# ------------------------------------------------------------------ compiling


def _announce_compiling(twins: Iterable[Any], announce: Callable[[], None]) -> None:
    """Call `announce` when one of the twins is really compiled, once."""
    from numba.core import event

    ids = {id(twin) for twin in twins}

    class Announcer(event.Listener):
        def on_start(self, started: Any) -> None:
            if id(started.data["dispatcher"]) in ids:
                ids.clear()
                announce()

        def on_end(self, ended: Any) -> None:
            pass

    event.register("numba:compile", Announcer())  # type: ignore[no-untyped-call]


def compile_functions(
    entries: Iterable[Callable[..., Any]],
    out_of_line: frozenset[str] = frozenset(),
    announce: Callable[[], None] | None = None,
) -> dict[str, Callable[..., Any]]:
    """Compiled twins of the entries by name.

    Compilation itself happens at the first call of each entry, unless an earlier process left its result;
    `announce` is called once, before the first that has to happen. What the entries call is inlined, except the
    functions named in `out_of_line` (rare or large ones).
    """
    import numba

    entries = list(entries)
    functions = closure(entries)
    root = cache_root()
    entry_ids = {id(function) for function in entries}
    options: dict[str, dict[str, Any]] = {}
    for function in functions:
        is_entry = id(function) in entry_ids
        options[_title(function)] = {
            "cache": is_entry and root is not None,
            "nogil": True,
            "error_model": "numpy",
            # every array is seven arguments or more: a call costs more than most bodies
            "forceinline": not is_entry and function.__name__ not in out_of_line,
            # nothing here allocates; without it each array argument costs two atomic operations a call
            "_nrt": False,
        }
    config: Any = numba.config
    kept = config.CACHE_DIR
    if root is not None:
        folder = root / cache_key(functions, options)
        folder.mkdir(parents=True, exist_ok=True)
        config.CACHE_DIR = str(folder)
    twins: dict[int, Callable[..., Any]] = {}
    namespaces: dict[str, dict[str, Any]] = {}
    try:
        for function in functions:
            namespace = namespaces.setdefault(function.__module__, dict(function.__globals__))
            twin = FunctionType(
                function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
            )
            twin.__module__ = function.__module__
            twin.__qualname__ = function.__qualname__
            twins[id(function)] = numba.njit(**options[_title(function)])(twin)
    finally:
        config.CACHE_DIR = kept
    for namespace in namespaces.values():
        for name, value in list(namespace.items()):
            if id(value) in twins:
                namespace[name] = twins[id(value)]
    if announce is not None:
        _announce_compiling(twins.values(), announce)
    return {function.__name__: twins[id(function)] for function in entries}
