"""Long-run figures of sessions: turns per session, law of the prompt length, law of the output length.

The prompt of turn k is a sum of independent lengths, so its law is a chain of convolutions, cut at the context
limit after each one (lengths are positive: what is above the limit stays above it). Lengths that follow a regime
chain hold for a whole session; each combination of regimes is convolved apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from prfaas_env.simulator.formulas import FloatArray
from prfaas_env.workload.laws import LengthLaw, Part, atoms_law, length_law
from prfaas_env.workload.models import (
    EmpiricalTurns,
    FixedTurns,
    Lengths,
    SessionWorkload,
    SystemPrompts,
    Turns,
)

#: Cells of the grid of prompt lengths. A limit below it gives one cell per token, and exact figures; above it
#: a length is split between its two neighbours so that means stay exact.
_CELLS = 1 << 15
#: Turns whose requests are rarer than this per session are left out.
_RARE = 1e-13


@dataclass(frozen=True)
class SessionLaw:
    """Long-run figures per session and per request."""

    #: Mean number of turns that take place: within the law of turns and the context limit.
    mean_turns: float
    #: Law of the prompt length over requests; None when no session has a request.
    prompts: LengthLaw | None
    #: Law of the output length over requests; None when no session has a request.
    outputs: LengthLaw | None


def session_law(workload: SessionWorkload) -> SessionLaw:
    """Long-run figures of a workload; kept in memory, and the same for any arrivals."""
    return _session_law(
        workload.turns,
        workload.system_prompts,
        workload.first_tokens,
        workload.new_tokens,
        workload.output_tokens,
        workload.context_limit_tokens,
    )


@lru_cache(maxsize=32)
def _session_law(
    turns: Turns,
    system_prompts: SystemPrompts | None,
    first: Lengths,
    new: Lengths,
    output: Lengths,
    limit: int,
) -> SessionLaw:
    width = -(-(limit + 1) // _CELLS)
    cells = limit // width + 1
    start = _mixture(first, cells, width)
    if system_prompts is not None:
        start = _convolved(start, _transform(_system_masses(system_prompts, cells, width), cells), cells)
    survival = _survival(turns)
    weights = np.zeros(cells)
    outputs: list[tuple[float, Part]] = []
    for output_share, output_part in length_law(output).parts:
        answer = _masses(output_part, cells, width)
        of_output = 0.0
        for new_share, new_part in length_law(new).parts:
            growth = _convolved(answer, _transform(_masses(new_part, cells, width), cells), cells)
            found = _prompt_masses(start, _transform(growth, cells), survival, cells)
            weights += output_share * new_share * found
            of_output += new_share * float(found.sum())
        outputs.append((output_share * of_output, output_part))
    mean_turns = float(weights.sum())
    if mean_turns < 1e-12:
        return SessionLaw(0.0, None, None)
    at = np.flatnonzero(weights > 0)
    prompts = atoms_law(np.maximum(at * width, 1).astype(np.float64), weights[at] / mean_turns)
    return SessionLaw(mean_turns, prompts, LengthLaw([(w / mean_turns, part) for w, part in outputs]))


def _prompt_masses(start: FloatArray, growth: FloatArray, survival: FloatArray, cells: int) -> FloatArray:
    """Expected number of turns of a session per cell of the prompt length."""
    total = np.zeros(cells)
    masses = start
    for k, alive in enumerate(survival):
        if k:
            masses = _convolved(masses, growth, cells)
        if alive * masses.sum() < _RARE:
            break
        total += alive * masses
    return total


def _survival(turns: Turns) -> FloatArray:
    """P(at least k + 1 turns) for k = 0, 1, ..."""
    if isinstance(turns, FixedTurns):
        return np.ones(turns.turns)
    if isinstance(turns, EmpiricalTurns):
        observed = np.sort(np.array(turns.turns))
        k = np.arange(int(observed[-1]))
        return 1.0 - np.searchsorted(observed, k, side="right") / len(observed)
    return np.asarray((1.0 - 1.0 / turns.mean_turns) ** np.arange(turns.max_turns), dtype=np.float64)


# --- masses on a grid --------------------------------------------------------------------------------


def _masses(part: Part, cells: int, width: int) -> FloatArray:
    """Probabilities of a length in whole tokens on the grid; what lies above the last cell is left out."""
    tokens = np.arange(cells * width, dtype=np.float64)
    # A hair below the next token: whole lengths count up to it, continuous ones are rounded down.
    upto = part.split(tokens + 1.0 - 1e-9)[1]
    return _on_grid(np.diff(upto, prepend=0.0), cells, width)


def _mixture(lengths: Lengths, cells: int, width: int) -> FloatArray:
    masses = np.zeros(cells)
    for share, part in length_law(lengths).parts:
        masses += share * _masses(part, cells, width)
    return masses


def _system_masses(library: SystemPrompts, cells: int, width: int) -> FloatArray:
    lengths, chances = np.array(library.lengths), np.array(library.probabilities)
    within = lengths < cells * width
    masses = np.zeros(cells * width)
    np.add.at(masses, lengths[within], chances[within])
    return _on_grid(masses, cells, width)


def _on_grid(by_token: FloatArray, cells: int, width: int) -> FloatArray:
    """Masses per cell of `width` tokens: each token's mass goes to its two neighbours by nearness."""
    if width == 1:
        return by_token
    rows = by_token.reshape(cells, width)
    up = np.arange(width) / width
    masses = rows @ (1.0 - up)
    masses[1:] += (rows @ up)[:-1]
    return np.asarray(masses, dtype=np.float64)


def _transform(masses: FloatArray, cells: int) -> FloatArray:
    # Twice as long, so that nothing wraps round.
    return np.asarray(rfft(masses, next_fast_len(2 * cells, real=True)))


def _convolved(masses: FloatArray, kernel: FloatArray, cells: int) -> FloatArray:
    size = next_fast_len(2 * cells, real=True)
    both = irfft(rfft(masses, size) * kernel, size)[:cells]
    return np.maximum(np.asarray(both, dtype=np.float64), 0.0)
