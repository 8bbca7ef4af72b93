"""What every engine offers, and engines by name."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.simulator.formulas import NEVER_NS
from prfaas_env.simulator.records import RequestRecords, Totals
from prfaas_env.simulator.world import World
from prfaas_env.telemetry import Telemetry

EngineName = Literal["compiled", "simpy"]
ENGINES: tuple[EngineName, ...] = ("compiled", "simpy")
DEFAULT_ENGINE: EngineName = "compiled"


class Engine(Protocol):
    """One episode of one world."""

    name: str
    world: World

    @property
    def records(self) -> RequestRecords:
        """Per-request results so far."""

    @property
    def now_ns(self) -> int:
        """Present instant."""

    @property
    def done(self) -> bool:
        """Whether every request is resolved."""

    def apply(self, decision: Decision) -> None:
        """Put a decision in force."""

    def run_until(self, t_ns: int) -> None:
        """Handle everything before `t_ns`."""

    def run_to_end(self, limit_ns: int = NEVER_NS) -> None:
        """Run to the end of the instant in which the last request is resolved, or to `limit_ns`."""

    def telemetry(self) -> Telemetry:
        """What a scheduler can see now."""

    def encode(self, telemetry: Telemetry) -> tuple[NDArray[np.float32], int]:
        """Observation of a reading and the number of clipped values."""

    def legal(self) -> tuple[tuple[bool, bool, bool], ...]:
        """Legal moves per PD cluster now."""

    def totals(self) -> Totals:
        """Cumulative figures now."""

    def snapshot(self) -> Any:
        """The whole state; it holds its world as `world` and is otherwise the engine's own."""

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot of an engine of the same kind."""


def check_engine(name: str) -> None:
    """PrfaasError for a value of `--engine` that is no engine."""
    if name not in ENGINES:
        raise PrfaasError(f"--engine is {name!r}; allowed: {', '.join(ENGINES)}")


def make_engine(name: str, world: World) -> Engine:
    """An engine by name; PrfaasError names the known ones."""
    if name == "compiled":
        from prfaas_env.simulator.compiled_engine import CompiledEngine

        return CompiledEngine(world)
    if name == "simpy":
        from prfaas_env.simulator.simpy_engine import SimpyEngine

        return SimpyEngine(world)
    raise PrfaasError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
