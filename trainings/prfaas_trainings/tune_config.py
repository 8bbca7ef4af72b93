"""What a tuning searches, on what and how much, as frozen models; instances are in `trainings/configs/tune`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from optuna.trial import Trial
from pydantic import Field, ValidationError, field_validator, model_validator

from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.scenarios.loader import apply_overrides, read_yaml
from prfaas_env.simulator.engine import DEFAULT_ENGINE, EngineName
from prfaas_env.workload.means import mean_rate_rps
from prfaas_trainings.config import SeedRange, config_folder
from prfaas_trainings.load import at_load
from prfaas_trainings.seeds import SPLITS, Split, describe

#: Value of one searched field.
Value = bool | int | float | str
#: Significant digits of a searched number: what is written down is what was tried.
DIGITS = 4
#: Name of the file of families beside the tunings.
FAMILIES_FILE = "families.yaml"


class SpaceField(Frozen):
    """Values of one field: a range of numbers, or choices."""

    low: float | None = None
    high: float | None = None
    log: bool = Field(default=False, description="even in the logarithm")
    whole: bool = Field(default=False, description="whole numbers only")
    step: float | None = Field(default=None, gt=0, description="distance of the values from `low` on")
    choices: tuple[Value, ...] | None = Field(default=None, min_length=2)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log or self.whole or self.step:
                raise ValueError("give choices, or low and high, not both")
            if len({json.dumps(choice) for choice in self.choices}) < len(self.choices):
                raise ValueError("a choice is given twice")
            return self
        if self.low is None or self.high is None or not self.low < self.high:
            raise ValueError(f"needs choices, or low below high; found {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.step):
            raise ValueError("log needs low above 0 and no step")
        if self.whole and any(not float(x).is_integer() for x in (self.low, self.high, self.step or 1.0)):
            raise ValueError("whole needs whole low, high and step")
        return self

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that a limit would refuse first: both ends of a range, or all choices."""
        if self.choices is not None:
            return self.choices
        low, high = self._range
        return (int(low), int(high)) if self.whole else (low, high)

    @property
    def _range(self) -> tuple[float, float]:
        """`low` and `high` of a field without choices."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    def suggest(self, trial: Trial, name: str) -> Value:
        """The value that a trial tries, to `DIGITS` significant digits."""
        if self.choices is not None:
            chosen: Value = trial.suggest_categorical(name, self.choices)  # type: ignore[assignment]
            return chosen
        low, high = self._range
        if self.whole:
            step = int(self.step or 1)
            return trial.suggest_int(name, int(low), int(high), step=step, log=self.log)
        value = trial.suggest_float(name, low, high, step=self.step, log=self.log)
        return float(f"{value:.{DIGITS}g}")

    def holds(self, value: object) -> bool:
        """Whether a value can be tried."""
        if self.choices is not None:
            return any(value == choice and isinstance(value, type(choice)) for choice in self.choices)
        low, high = self._range
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


class FamilyScenario(Frozen):
    """One scenario of a family."""

    scenario: str = Field(description="shipped name, or path (relative to the file)")
    overrides: tuple[str, ...] = Field(default=(), description="field.path=value, applied in order")
    training: tuple[str, ...] = Field(default=(), description="overrides for training seeds alone")
    validation: tuple[str, ...] = Field(default=(), description="overrides for validation seeds alone")
    load: float | None = Field(
        default=None,
        gt=0,
        description="mean arrival rate as a share of what `plan` finds the deployment carries, with true means; "
        "the horizon of a trace becomes the time that its slice then takes",
    )


class Family(Frozen):
    """Scenarios that one set of parameters is to serve, and the seeds to judge it on."""

    description: str = ""
    scenarios: tuple[FamilyScenario, ...] = Field(min_length=1)
    training_seeds: SeedRange = SeedRange(first=0, count=36)
    validation_seeds: SeedRange = SeedRange(first=SPLITS["validation"].start, count=48)
    best_seeds: SeedRange = Field(
        default=SeedRange(first=SPLITS["validation"].start + 500, count=100),
        description="validation seeds that the best rule is chosen on",
    )
    block: int = Field(
        default=4, ge=1, description="training seeds after which a trial may be stopped, and again"
    )

    @model_validator(mode="after")
    def _seeds(self) -> Self:
        for name, split in _FAMILY_SEEDS.items():
            seeds, allowed = getattr(self, name).seeds, SPLITS[split]
            if seeds.start not in allowed or seeds.stop - 1 not in allowed:
                raise ValueError(f"{name}: {describe(split)}, found {seeds.start:,}..{seeds.stop - 1:,}")
        return self

    def cases(self, split: Split, overrides: Sequence[str] = ()) -> tuple[Scenario, ...]:
        """The scenarios for the seeds of a split, with further overrides, at their load.

        Raises:
            PrfaasError: a scenario, override or load that is wrong.
        """
        return tuple(_case(given, split, overrides) for given in self.scenarios)

    def labels(self) -> tuple[str, ...]:
        """A name per scenario."""
        return tuple(
            ", ".join((s.scenario, *s.overrides, *(() if s.load is None else (f"load {s.load:g}",))))
            for s in self.scenarios
        )


_FAMILY_SEEDS: dict[str, Split] = {
    "training_seeds": "training",
    "validation_seeds": "validation",
    "best_seeds": "validation",
}


def _case(given: FamilyScenario, split: Split, overrides: Sequence[str]) -> Scenario:
    own = given.training if split == "training" else given.validation
    scenario = load_scenario(given.scenario, overrides=[*given.overrides, *own, *overrides])
    return scenario if given.load is None else at_load(scenario, given.load)


class Tuning(Frozen):
    """One tuning: a rule's parameters on a family of scenarios, or fields of a training's configuration."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str = ""
    policy: str | None = Field(default=None, description="an installed policy, whose parameters are searched")
    family: str | None = Field(default=None, description="a family by name; --family says another")
    training: str | None = Field(default=None, description="a training, whose fields are searched")
    overrides: tuple[str, ...] = Field(
        default=(), description="field.path=value of every training of a trial, such as fewer steps"
    )
    space: dict[str, SpaceField] = Field(min_length=1)
    start: dict[str, Value] = Field(
        default_factory=dict, description="values of the first trial where the default is not a number"
    )
    more_starts: tuple[dict[str, Value], ...] = Field(
        default=(), description="trials after the first one: its values with these in their place"
    )
    trials: int = Field(default=200, ge=1)
    startup_trials: int = Field(default=30, ge=1, description="trials at random before the sampler learns")
    finalists: int = Field(default=8, ge=1, description="best trials that are compared on validation seeds")
    reduction_factor: int = Field(
        default=3,
        ge=2,
        description="of so many trials that reach a number of blocks one goes on to so many times it",
    )
    search_overrides: tuple[str, ...] = Field(
        default=(), description="field.path=value of the scenarios while searching, never for validation"
    )
    reference: str = Field(
        default="earliest_finish_conversion:period_s=15", description="policy whose mean TTFT counts as 1"
    )
    engine: EngineName = DEFAULT_ENGINE
    seed: int = Field(default=0, ge=0, description="seed of the sampler")

    @field_validator("space", mode="after")
    @classmethod
    def _no_pairs(cls, space: dict[str, SpaceField]) -> dict[str, SpaceField]:
        for name in space:
            if not name.strip():
                raise ValueError("a field without a name")
        return space

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        if (self.policy is None) == (self.training is None):
            raise ValueError("give policy or training, not both")
        if self.training is not None and (self.family is not None or self.search_overrides or self.start):
            raise ValueError("family, search_overrides and start belong to a tuning of a policy")
        if self.policy is not None and self.overrides:
            raise ValueError("overrides belong to a tuning of a training; use search_overrides")
        for where, values in (
            ("start", self.start),
            *((f"more_starts.{k}", v) for k, v in enumerate(self.more_starts)),
        ):
            for name, value in values.items():
                if name not in self.space:
                    raise ValueError(f"{where}.{name}: is not in the space")
                if not self.space[name].holds(value):
                    raise ValueError(f"{where}.{name}: {value!r} is not in the space of {name}")
        return self

    @cached_property
    def text(self) -> dict[str, Any]:
        """The whole tuning, ready for JSON."""
        return self.model_dump(mode="json")


# -------------------------------------------------------------------------------------------- files


def tune_folder() -> Path:
    """Folder of the shipped tunings and families."""
    return config_folder() / "tune"


def tuning_names() -> list[str]:
    """Names of the shipped tunings."""
    return sorted(p.stem for p in tune_folder().glob("*.yaml") if p.name != FAMILIES_FILE)


def load_tuning(spec: str, overrides: Sequence[str] = ()) -> Tuning:
    """A tuning by shipped name or path of a YAML file.

    Raises:
        PrfaasError: one line that names the file and the field.
    """
    path = tune_folder() / f"{spec}.yaml" if spec in tuning_names() else Path(spec)
    where = f"tuning {spec}" if spec in tuning_names() else spec
    if path.suffix not in {".yaml", ".yml"} or not path.is_file():
        raise PrfaasError(
            f"unknown tuning {spec!r}; shipped: {', '.join(tuning_names())}; or give a path to a .yaml file"
        )
    raw = read_yaml(path)
    apply_overrides(raw, overrides)
    try:
        return Tuning.model_validate(raw)
    except ValidationError as error:
        raise first_error(error, where) from None


class _FamiliesFile(Frozen):
    families: dict[str, Family] = Field(min_length=1)


def read_families(path: Path) -> dict[str, Family]:
    """The families of a file by name.

    Raises:
        PrfaasError: one line that names the file and the field.
    """
    try:
        found = _FamiliesFile.model_validate(read_yaml(path)).families
    except ValidationError as error:
        raise first_error(error, str(path)) from None
    return {name: _with_paths(family, path.parent.resolve()) for name, family in found.items()}


def _with_paths(family: Family, folder: Path) -> Family:
    """Scenario paths are relative to the file."""
    scenarios = tuple(
        s
        if s.scenario in scenario_names() or Path(s.scenario).is_absolute()
        else s.model_copy(update={"scenario": str(folder / s.scenario)})
        for s in family.scenarios
    )
    return family.model_copy(update={"scenarios": scenarios})


@dataclass(frozen=True)
class NamedFamily:
    """A family with its name."""

    name: str
    family: Family


def load_family(spec: str) -> NamedFamily:
    """A shipped family by name, or `FILE.yaml:NAME`.

    Raises:
        PrfaasError: unknown name or file, a faulty family.
    """
    shipped = read_families(tune_folder() / FAMILIES_FILE)
    if spec in shipped:
        return NamedFamily(spec, shipped[spec])
    file, separator, name = spec.rpartition(":")
    if not separator or not Path(file).is_file():
        raise PrfaasError(f"unknown family {spec!r}; shipped: {', '.join(shipped)}; or give FILE.yaml:NAME")
    found = read_families(Path(file))
    if name not in found:
        raise PrfaasError(f"{file}: has no family {name!r}; it has {', '.join(found)}")
    return NamedFamily(name, found[name])


def rates_rps(cases: Sequence[Scenario]) -> list[float]:
    """Mean arrival rate of each case."""
    return [mean_rate_rps(case.workload) for case in cases]
