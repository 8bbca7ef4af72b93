"""Long runs in parts: every finished part is a file, whole or absent, and is not run again.

`prfaas compare` and `prfaas sweep` share this. A folder holds one file that says everything its results depend on,
and a sub-folder with a file per finished part. Going on with another configuration is refused by the field that
differs.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas_env.base import PrfaasError, write_whole
from prfaas_trainings.episodes import EpisodeRunner, Job, Outcome
from prfaas_trainings.folders import check_folder

#: Exit code after Ctrl-C, as of a shell.
INTERRUPTED = 130


def first_difference(wanted: Any, found: Any, path: str = "") -> str | None:
    """Where two configurations differ first, as `field: found ..., now ...`; None if they are equal."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in (*wanted, *(k for k in found if k not in wanted)):
            where = f"{path}.{key}" if path else str(key)
            if key not in found or key not in wanted:
                return f"{where}: {_short(found.get(key))} there, {_short(wanted.get(key))} now"
            inner = first_difference(wanted[key], found[key], where)
            if inner is not None:
                return inner
        return None
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        inside = (first_difference(a, b, f"{path}.{k}") for k, (a, b) in pairs)
        return next((d for d in inside if d is not None), None)
    return None if wanted == found else f"{path}: {_short(found)} there, {_short(wanted)} now"


def _short(value: Any) -> str:
    text = f"{len(value)} entries" if isinstance(value, list) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def command_line(command: str, options: Mapping[str, Any]) -> str:
    """`prfaas COMMAND` with the given options, ready for a shell.

    None and False are left out, True is a flag, a list repeats its option.
    """
    words = ["prfaas", command]
    for name, value in options.items():
        if value is None or value is False:
            continue
        if value is True:
            words.append(name)
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [name, str(each)]
    return shlex.join(words)


class PartsFolder:
    """A folder of finished parts, new or to be gone on with.

    Args:
        out: the folder.
        kind: what it is in a message ("sweep").
        marker: the file that marks it and holds `configuration`.
        parts: name of the sub-folder with a file per part.
        part: what one part is called in a message ("cell").
        configuration: everything that a result depends on, ready for JSON.
        force: an earlier folder of this kind is removed first.

    Raises:
        PrfaasError: the folder holds something else, or results of another configuration (the field is named).
    """

    def __init__(
        self,
        out: Path,
        *,
        kind: str,
        marker: str,
        parts: str,
        part: str,
        configuration: dict[str, Any],
        force: bool = False,
    ) -> None:
        self.out = out
        self._kind, self._marker, self._parts, self._part = kind, marker, parts, part
        wanted = json.loads(json.dumps(configuration))
        check_folder(out, marker, replace=True)
        try:
            if force and out.exists():
                shutil.rmtree(out)
            if (out / marker).exists():
                self._check(wanted)
            (out / parts).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PrfaasError(f"--out {out}: cannot be written: {error.strerror or error}") from None
        write_whole(out / marker, json.dumps(wanted, indent=2) + "\n")

    def _check(self, wanted: dict[str, Any]) -> None:
        file = self.out / self._marker
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PrfaasError(f"{file}: cannot be read: {error}; --force starts anew") from None
        difference = first_difference(wanted, found)
        if difference is not None:
            raise PrfaasError(
                f"--out {self.out}: holds a {self._kind} of another configuration: {difference}; "
                "give another folder (--force replaces it)"
            )

    def file_of(self, name: str) -> Path:
        """The file of a part."""
        return self.out / self._parts / f"{name}.json"

    def has(self, name: str) -> bool:
        """Whether a part is finished."""
        return self.file_of(name).is_file()

    def write_part(self, name: str, content: Any) -> None:
        """Keep a finished part, whole."""
        write_whole(self.file_of(name), json.dumps(content, allow_nan=False) + "\n")

    def read_part(self, name: str, label: str, read: Callable[[Any], Any]) -> Any:
        """What `read` makes of the content of a part's file.

        Args:
            name: of the part.
            label: what the part is, for the message.
            read: gives None for the content of another part.

        Raises:
            PrfaasError: the file is broken, or belongs to another part.
        """
        file = self.file_of(name)
        try:
            found = read(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise PrfaasError(
                f"{file}: is not a finished {self._part} ({error}); remove it to run it again"
            ) from None
        if found is None:
            raise PrfaasError(f"{file}: is not the {self._part} {label}; remove it to run it again")
        return found


@dataclass(frozen=True)
class Part:
    """Episodes that are kept together; `says[k]` names job k in an error."""

    label: str
    jobs: tuple[Job, ...]
    says: tuple[str, ...]


def run_parts(
    parts: Sequence[Part],
    runner: EpisodeRunner,
    finish: Callable[[int, list[Outcome]], None],
    on_done: Callable[[int], None] | None = None,
) -> None:
    """Run parts; `finish` gets the place of a part and its outcomes as soon as its last episode has ended.

    Args:
        parts: what to run.
        runner: processes to run in.
        finish: keeps a part.
        on_done: called with the place of its part after each episode.

    Raises:
        PrfaasError: an episode failed; the message names its part and job. Finished parts have been kept.
    """
    keys = [(p, k) for p, part in enumerate(parts) for k in range(len(part.jobs))]
    found: dict[int, dict[int, Outcome]] = {p: {} for p in range(len(parts))}
    for place, outcome in runner.each([parts[p].jobs[k] for p, k in keys]):
        p, k = keys[place]
        part = parts[p]
        if isinstance(outcome, Exception):
            what = (
                str(outcome) if isinstance(outcome, PrfaasError) else f"{type(outcome).__name__}: {outcome}"
            )
            raise PrfaasError(f"{part.label}, {part.says[k]}: {what}") from outcome
        found[p][k] = outcome
        if len(found[p]) == len(part.jobs):
            whole = found.pop(p)
            finish(p, [whole[j] for j in range(len(part.jobs))])
        if on_done is not None:
            on_done(p)
