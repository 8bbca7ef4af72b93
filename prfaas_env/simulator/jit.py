"""Compile plain functions with numba, together with everything of ours that they call.

The functions stay plain where they are written; here each gets a compiled twin whose calls go to the other twins.
Compiled code is kept in a folder named by a hash of all sources involved, numba's version and the processor, so
that an edited formula is never served from an old file (numba alone looks at the caller's file only).
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeGuard

_PACKAGE = "prfaas_env"


def _ours(value: Any) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and value.__module__.split(".")[0] == _PACKAGE


def closure(entries: Iterable[Callable[..., Any]]) -> list[FunctionType]:
    """The entries and all plain functions of ours that they call, directly or not, in a fixed order."""
    found: dict[str, FunctionType] = {}
    waiting = [entry for entry in entries if _ours(entry)]
    while waiting:
        function = waiting.pop()
        name = f"{function.__module__}.{function.__qualname__}"
        if name in found:
            continue
        found[name] = function
        for called in function.__code__.co_names:
            value = function.__globals__.get(called)
            if _ours(value):
                waiting.append(value)
    return [found[name] for name in sorted(found)]


def source_files(functions: Iterable[FunctionType]) -> list[Path]:
    """Files that hold the functions and the constants they read."""
    files = set()
    for function in functions:
        files.add(Path(function.__code__.co_filename))
        for called in function.__code__.co_names:
            module = sys.modules.get(getattr(function.__globals__.get(called), "__name__", ""))
            file = getattr(module, "__file__", None)
            if file is not None and module is not None and module.__name__.split(".")[0] == _PACKAGE:
                files.add(Path(file))
    # constants come from these modules by name, so their files count whoever imports them
    for module_name in (
        "telemetry",
        "decision",
        "simulator.formulas",
        "simulator.events",
        "simulator.layout",
    ):
        file = getattr(sys.modules.get(f"{_PACKAGE}.{module_name}"), "__file__", None)
        if file is not None:
            files.add(Path(file))
    return sorted(files)


def cache_key(files: Iterable[Path]) -> str:
    """Hash of the sources, the Python and numba versions, and the processor; 16 hex digits."""
    import llvmlite.binding as llvm
    import numba

    digest = hashlib.sha256()
    for part in (
        sys.version,
        numba.__version__,
        platform.machine(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    ):
        digest.update(part.encode() + b"\0")
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_root() -> Path:
    """Folder for compiled code: `PRFAAS_CACHE_DIR`, else the user's cache folder, else a temporary one."""
    chosen = os.environ.get("PRFAAS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    root = (Path(base) if base else Path.home() / ".cache") / "prfaas-env"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.gettempdir()) / f"prfaas-env-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def compile_functions(
    entries: Iterable[Callable[..., Any]], out_of_line: frozenset[str] = frozenset()
) -> tuple[dict[str, Callable[..., Any]], bool]:
    """Compiled twins of the entries by name, and whether they were compiled before (the cache is warm).

    Compilation itself happens at the first call of each entry. What the entries call is inlined, except the
    functions named in `out_of_line` (rare or large ones).
    """
    import numba

    entries = list(entries)
    functions = closure(entries)
    folder = cache_root() / cache_key(source_files(functions))
    warm = folder.is_dir() and any(folder.rglob("*.nbi"))
    folder.mkdir(parents=True, exist_ok=True)
    entry_ids = {id(function) for function in entries}
    twins: dict[int, Callable[..., Any]] = {}
    namespaces: dict[str, dict[str, Any]] = {}
    config: Any = numba.config
    kept, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        for function in functions:
            namespace = namespaces.setdefault(function.__module__, dict(function.__globals__))
            twin = FunctionType(
                function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
            )
            twin.__module__ = function.__module__
            twin.__qualname__ = function.__qualname__
            is_entry = id(function) in entry_ids
            # every array is seven arguments or more: a call costs more than most bodies
            options: dict[str, Any] = {
                "cache": is_entry,
                "nogil": True,
                "error_model": "numpy",
                "forceinline": not is_entry and function.__name__ not in out_of_line,
                # nothing here allocates; without it each array argument costs two atomic operations a call
                "_nrt": False,
            }
            twins[id(function)] = numba.njit(**options)(twin)
    finally:
        config.CACHE_DIR = kept
    for namespace in namespaces.values():
        for name, value in list(namespace.items()):
            if id(value) in twins:
                namespace[name] = twins[id(value)]
    return {function.__name__: twins[id(function)] for function in entries}, warm
