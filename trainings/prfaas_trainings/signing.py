"""Signatures of checkpoints: whether the files are as this user's own training wrote them.

A key of the user's own is made at first use (`prfaas-env/signing.key` in the user's data folder, readable by nobody
else). A checkpoint stores the SHA-256 of its files and an HMAC of that list. It says nothing about who else wrote a
checkpoint, only that this user did not, or that a file was changed since.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path

from prfaas_env.base import PrfaasError, write_whole

SIGNATURE = "signature.json"


def key_file() -> Path:
    """Where the user's key is: in `$XDG_DATA_HOME`, or `~/.local/share`."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "prfaas-env" / "signing.key"


def _key() -> bytes:
    """The user's key, made where there is none."""
    path = key_file()
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(temporary, path)  # fails where another process was quicker: its key then counts
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        return path.read_bytes()
    except OSError as error:
        raise PrfaasError(f"{path}: the key that signs checkpoints: {error.strerror}") from None


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != SIGNATURE)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _mac(files: dict[str, str]) -> str:
    return hmac.new(_key(), json.dumps(files, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def sign(folder: Path) -> None:
    """Sign the files that are in a folder now."""
    files = _hashes(folder)
    write_whole(folder / SIGNATURE, json.dumps({"files": files, "hmac": _mac(files)}, indent=2) + "\n")


def distrust(folder: Path, may_lack: frozenset[str] = frozenset()) -> str | None:
    """Why a folder is not as this user signed it, in words; None if it is.

    Args:
        folder: a signed folder.
        may_lack: files that may have been removed since.
    """
    try:
        stored = json.loads((folder / SIGNATURE).read_text(encoding="utf-8"))
        files, mac = dict(stored["files"]), str(stored["hmac"])
    except (OSError, ValueError, TypeError, KeyError):
        return f"holds no readable {SIGNATURE}"
    if not hmac.compare_digest(_mac(files), mac):
        return "was signed with another key than this user's"
    found = _hashes(folder)
    changed = sorted(name for name in found.keys() & files.keys() if found[name] != files[name])
    missing = sorted(files.keys() - found.keys() - may_lack)
    extra = sorted(found.keys() - files.keys())
    parts = (("changed", changed), ("missing", missing), ("not signed", extra))
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names) or None
