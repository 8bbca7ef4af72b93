"""What every part shares: the frozen model base, quantities with units, user errors, random streams."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


class PrfaasError(Exception):
    """A user's mistake, told in one line that names the file, field or line. The command line prints it and exits 2."""


class Frozen(BaseModel):
    """Base of every configuration model: immutable, unknown keys refused, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_field(cls, value: Any) -> Any:
        """Refuse an unknown field before pydantic does, to say which ones there are."""
        for key in value if isinstance(value, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"unknown field {key!r}; known: {', '.join(cls.model_fields)}")
        return value


def first_error(error: ValidationError, where: str) -> PrfaasError:
    """The first fault of a pydantic error as one line: `where: field: what was found and what is allowed`."""
    details = error.errors(include_url=False)
    first = details[0]
    field = ".".join(str(part) for part in first["loc"]) or "(top level)"
    message = first["msg"].removeprefix("Value error, ")
    found = first.get("input")
    shown = ""
    if first["type"] not in {"missing", "value_error"} and not isinstance(found, dict | list):
        shown = f" (found {found!r})"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return PrfaasError(f"{where}: {field}: {message}{shown}{more}")


def one_line(error: BaseException) -> str:
    """What an error says on one line of at most some 300 characters; its class where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."


_RATE_UNITS = {
    "bps": 1.0,
    "bit/s": 1.0,
    "kbps": 1e3,
    "mbps": 1e6,
    "gbps": 1e9,
    "tbps": 1e12,
    "gbit/s": 1e9,
    "mbit/s": 1e6,
}
_BYTE_RATE_UNITS = {"B/s": 8.0, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9, "TB/s": 8e12}


def parse_bps(value: Any) -> Any:
    """A rate in bit/s from a number (already bit/s) or a text such as "100 Gbps" or "12.5 GB/s" (powers of 1000)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z/]*)\s*", value)
    if match is None:
        raise ValueError(f"not a rate: {value!r}; write a number of bit/s or a text like '100 Gbps'")
    text, unit = match.groups()
    try:
        number = float(text)
    except ValueError:
        raise ValueError(
            f"not a rate: {value!r}; write a number of bit/s or a text like '100 Gbps'"
        ) from None
    if not unit:
        return number
    if unit in _BYTE_RATE_UNITS:
        return number * _BYTE_RATE_UNITS[unit]
    if unit.lower() in _RATE_UNITS and "B" not in unit:  # GBps could mean bits or bytes
        return number * _RATE_UNITS[unit.lower()]
    raise ValueError(f"unknown unit {unit!r} in {value!r}; allowed: Gbps, Mbps, bit/s, GB/s, MB/s")


#: A rate in bit/s; accepts texts with a unit.
Bps = Annotated[float, BeforeValidator(parse_bps)]

_BYTE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_bytes(value: Any) -> Any:
    """Whole bytes from a number or a text such as "256 GB" (powers of 1000) or "2 TiB" (powers of 1024)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]*)\s*", value)
    hint = "write a number of bytes or a text like '256 GB' or '2 TiB'"
    if match is None:
        raise ValueError(f"not a number of bytes: {value!r}; {hint}")
    text, unit = match.groups()
    if unit and unit not in _BYTE_UNITS:
        raise ValueError(f"unknown unit {unit!r} in {value!r}; allowed: {', '.join(_BYTE_UNITS)}")
    try:
        return float(text) * _BYTE_UNITS.get(unit, 1)
    except ValueError:
        raise ValueError(f"not a number of bytes: {value!r}; {hint}") from None


#: Whole bytes; accepts texts with a unit.
Bytes = Annotated[int, BeforeValidator(parse_bytes)]

#: Longest time that anything may name: far beyond any use, far within what int64 nanoseconds hold.
MAX_S = 1e9
Seconds = Annotated[float, Field(ge=0, le=MAX_S)]

#: Most input or output tokens of one request; more is a mistake in units or a broken line.
MAX_TOKENS = 1_000_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]

#: Random streams of an episode, by name. The number is part of every result: never renumber, only append.
STREAMS = {
    "arrivals": 0,
    "input_lengths": 1,
    "output_lengths": 2,
    "prefixes": 3,
    "link": 4,
    "faults": 5,
    "background": 6,
    "policy": 7,
    "sessions": 8,
}


def stream(episode_seed: int, name: str, *index: int) -> np.random.Generator:
    """Generator of the stream `name` of one episode; `index` gives independent sub-streams (for example per link)."""
    return np.random.default_rng(np.random.SeedSequence(episode_seed, spawn_key=(STREAMS[name], *index)))


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: under a temporary name first, then renamed.

    A link stays a link; a pipe or device (`/dev/stdout`) is written to, not replaced.
    """
    target = path if path.exists() and not path.is_file() else path.resolve()
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        # gone after a rename; left behind by a failure or Ctrl-C
        with contextlib.suppress(OSError):
            temporary.unlink()
