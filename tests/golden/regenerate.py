"""Write what the present version makes of the golden traces: `python -m tests.golden.regenerate`.

For a change of dynamics that is wanted; it needs a line in CHANGELOG.md.
"""

from __future__ import annotations

import sys

from prfaas_env.base import write_whole
from prfaas_env.simulator.engine import ENGINES

from .cases import FOLDER, NAMES, difference, play, read, text


def main() -> int:
    """Exit code 1 when the engines disagree; then nothing is written for that episode."""
    failed = False
    for name in NAMES:
        stored = read(name)
        first, *others = (play(stored, engine) for engine in ENGINES)
        if any(first != other for other in others):
            sys.stdout.write(f"{name}: the engines disagree; not written\n")
            failed = True
            continue
        found = difference(stored.get("expected"), first)
        stored["expected"] = first
        write_whole(FOLDER / f"{name}.json", text(stored))
        sys.stdout.write(f"{name}: {'unchanged' if found is None else f'changed, first at {found}'}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
