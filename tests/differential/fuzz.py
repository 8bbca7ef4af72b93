"""Fuzz the two engines against each other for as long as one likes: `make fuzz MINUTES=30 FIRST=1000000`.

Run as `python -m tests.differential.fuzz`. Stops at the first disagreement, shrunk, with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.differential.cases import Case, disagreement, shrink


def main() -> int:
    """Exit code 0 when no disagreement was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=1_000_000, help="first case number")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    seed = arguments.first
    while time.monotonic() < end:
        if disagreement(Case(seed, max_requests=120, max_ticks=90)) is not None:
            small = shrink(Case(seed, max_requests=120, max_ticks=90))
            sys.stdout.write(f"{small}\n{disagreement(small)}\n")
            return 1
        seed += 1
        if seed % 200 == 0:
            sys.stdout.write(f"{seed - arguments.first} cases agree\n")
            sys.stdout.flush()
    sys.stdout.write(f"{seed - arguments.first} cases agree\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
