"""Result folders that are whole or absent, and never someone else's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas_env.base import PrfaasError


def check_folder(out: Path, marker: str, *, replace: bool, how: str = "--force replaces it") -> None:
    """Refuse a result folder that is in use.

    Args:
        out: the folder; absent or empty is always right.
        marker: file that every result folder of this kind holds.
        replace: an earlier result of this kind may be replaced.
        how: what a user does to allow that.

    Raises:
        PrfaasError: it is a file, it holds an earlier result and `replace` is False, or something else.
    """
    if out.exists() and not out.is_dir():
        raise PrfaasError(f"--out {out}: is a file; give a folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / marker).is_file():
        raise PrfaasError(f"--out {out}: is not empty and holds no {marker}; give another folder")
    if not replace:
        raise PrfaasError(f"--out {out}: holds an earlier result; give another folder ({how})")


@contextmanager
def whole_folder(out: Path, marker: str) -> Iterator[Path]:
    """A temporary folder beside `out` to fill; it takes the place of `out` at the end, or goes if that fails.

    Call `check_folder` first: an existing `out` is removed once the new one is complete.
    """
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        replace_folder(temporary, out, marker)
    except OSError as error:
        raise PrfaasError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(new: Path, out: Path, marker: str) -> None:
    """Move the folder `new` to `out`; an earlier result of this kind there is removed afterwards."""
    if not (new / marker).is_file():
        raise PrfaasError(f"{new}: holds no {marker}, so it is not a whole result")
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(old)
    new.rename(out)
    if old.exists():
        shutil.rmtree(old)
