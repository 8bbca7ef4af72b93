"""What a sweep varies: one or two scenario fields or a list of cases, from the command line or a YAML study file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.scenarios.loader import read_yaml, value_at
from prfaas_trainings.config import config_folder
from prfaas_trainings.episodes import FIGURE_NAMES

#: Most things that a study varies at once: what a plot can show.
MAX_AXES = 2
#: Figures that are shown and drawn when a study names none.
DEFAULT_METRICS = ("ttft_mean_s", "ttft_p90_s", "goodput_rps", "egress_mean_bps")
#: Most cells of a study; more is a mistake in a list.
MAX_CELLS = 10_000


class Case(Frozen):
    """One named variant of the scenario: other hardware, other fields, or both."""

    name: str = Field(min_length=1)
    scenario: str | None = Field(default=None, description="scenario in place of the study's")
    deployment: str | None = Field(default=None, description="scenario whose deployment section is taken")
    set: dict[str, Any] = Field(default_factory=dict, description="field path to its value")


class Study(Frozen):
    """Policies on every combination of the values of `vary` and the `cases`."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str = ""
    scenario: str = Field(default="paper", description="shipped name, or path relative to the study file")
    set: dict[str, Any] = Field(default_factory=dict, description="fields that every cell has")
    vary: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="field path to its values; the first one is the plot's x axis"
    )
    cases: tuple[Case, ...] = ()
    policies: tuple[str, ...] = Field(min_length=1)
    reference: str | None = Field(
        default=None, description="label of the policy that differences are taken from"
    )
    seeds: int = Field(default=10, ge=1, description="episodes per cell and policy")
    metrics: tuple[str, ...] = Field(default=DEFAULT_METRICS, min_length=1)

    @field_validator("vary")
    @classmethod
    def _values(cls, vary: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for path, values in vary.items():
            if len(values) < 2:
                raise ValueError(f"{path}: needs two or more values, found {len(values)}; use `set` for one")
            texts = [text_of(v) for v in values]
            if len(set(texts)) < len(texts):
                raise ValueError(f"{path}: a value is given twice in {', '.join(texts)}")
        return vary

    @model_validator(mode="after")
    def _axes(self) -> Self:
        n = len(self.vary) + bool(self.cases)
        if not 1 <= n <= MAX_AXES:
            raise ValueError(
                f"a study varies one or two things (fields with several values, cases), found {n}"
            )
        names = [case.name for case in self.cases]
        if len(set(names)) < len(names):
            raise ValueError(f"cases: names must differ, found {', '.join(names)}")
        for metric in self.metrics:
            if metric not in FIGURE_NAMES:
                raise ValueError(f"metrics: unknown figure {metric!r}; known: {', '.join(FIGURE_NAMES)}")
        return self

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """What is varied, in order: field paths, then "case"."""
        return (*self.vary, *(("case",) if self.cases else ()))

    def cells(self) -> tuple[Cell, ...]:
        """Every combination, the first axis outermost.

        Raises:
            PrfaasError: a cell whose scenario is wrong; the message names the cell and the field.
        """
        points: list[list[tuple[str, Case]]] = [
            [(text_of(v), Case(name=path, set={path: v})) for v in values]
            for path, values in self.vary.items()
        ]
        if self.cases:
            points.append([(case.name, case) for case in self.cases])
        combinations = list(itertools.product(*points))
        if len(combinations) > MAX_CELLS:
            raise PrfaasError(f"study {self.name}: {len(combinations):,} cells; at most {MAX_CELLS:,}")
        return tuple(self._cell(k, found) for k, found in enumerate(combinations))

    def _cell(self, k: int, found: tuple[tuple[str, Case], ...]) -> Cell:
        texts = tuple(text for text, _ in found)
        label = ", ".join(f"{axis}={text}" for axis, text in zip(self.axes, texts, strict=True))
        case = found[-1][1]  # the cases are the last axis; those of `vary` only set a field
        fields = [*self.set.items(), *(item for _, point in found for item in point.set.items())]
        try:
            scenario = load_scenario(
                case.scenario or self.scenario,
                deployment=case.deployment,
                overrides=[f"{path}={json.dumps(value)}" for path, value in fields],
            )
        except PrfaasError as error:
            raise PrfaasError(f"study {self.name}, cell {label}: {error}") from None
        numbers = tuple(_number(scenario, axis) if axis in self.vary else None for axis in self.axes)
        return Cell(k, label, texts, numbers, scenario)


@dataclass(frozen=True)
class Cell:
    """One scenario of a study: its place, its label, and per axis the text and the number (None: not a number)."""

    index: int
    label: str
    texts: tuple[str, ...]
    numbers: tuple[float | None, ...]
    scenario: Scenario


def text_of(value: Any) -> str:
    """A value as a label."""
    return value if isinstance(value, str) else json.dumps(value)


def _number(scenario: Scenario, path: str) -> float | None:
    """Value of a field of the resolved scenario ("5 Gbps" is then 5e9), None where it is not a number."""
    value = value_at(scenario, path)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# ------------------------------------------------------------------------------------ study files


class _StudyFile(Frozen):
    studies: dict[str, dict[str, Any]] = Field(min_length=1)


def study_folder() -> Path:
    """Folder of the shipped study files."""
    return config_folder() / "study"


def study_names() -> list[str]:
    """Names of the shipped studies."""
    return sorted(name for path in study_folder().glob("*.yaml") for name in read_studies(path))


def read_studies(path: Path) -> dict[str, Study]:
    """The studies of a file by name.

    Raises:
        PrfaasError: one line that names the file and the field.
    """
    raw = read_yaml(path)
    found = {}
    try:
        for name, fields in _StudyFile.model_validate(raw).studies.items():
            if "name" in fields:
                raise PrfaasError(f"{path}: studies.{name}.name: the key is the name; leave it out")
            try:
                study = Study.model_validate({**fields, "name": name})
            except ValidationError as error:
                raise first_error(error, f"{path}: studies.{name}") from None
            found[name] = _with_path(study, path.parent)
    except ValidationError as error:
        raise first_error(error, str(path)) from None
    return found


def _with_path(study: Study, folder: Path) -> Study:
    """Scenario paths are relative to the study file."""

    def resolved(scenario: str | None) -> str | None:
        known = scenario is None or scenario in scenario_names() or Path(scenario).is_absolute()
        return scenario if known else str(folder / str(scenario))

    cases = tuple(case.model_copy(update={"scenario": resolved(case.scenario)}) for case in study.cases)
    return study.model_copy(update={"scenario": resolved(study.scenario), "cases": cases})


def load_study(spec: str) -> Study:
    """A shipped study by name, or `FILE` with one study, or `FILE:NAME`.

    Raises:
        PrfaasError: unknown name or file, a file with several studies and no name, a faulty study.
    """
    for path in sorted(study_folder().glob("*.yaml")):
        shipped = read_studies(path)
        if spec in shipped:
            return shipped[spec]
    file, _, name = spec.partition(".yaml:")
    if name:
        file += ".yaml"
    if not Path(file).is_file():
        raise PrfaasError(
            f"unknown study {spec!r}; shipped: {', '.join(study_names())}; or give FILE.yaml or FILE.yaml:NAME"
        )
    found = read_studies(Path(file))
    if name and name not in found:
        raise PrfaasError(f"{file}: has no study {name!r}; it has {', '.join(found)}")
    if not name and len(found) > 1:
        raise PrfaasError(f"{file}: holds several studies: {', '.join(found)}; write {file}:NAME")
    return found[name] if name else next(iter(found.values()))


# ---------------------------------------------------------------------------------- command line


def split_assignments(assignments: Sequence[str]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """(fields with one value, fields with several) of `--set path=value[,value...]`; a value is YAML.

    Raises:
        PrfaasError: not of that form, a field given twice.
    """
    single: dict[str, Any] = {}
    several: dict[str, tuple[Any, ...]] = {}
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        try:
            values = yaml.safe_load(f"[{text}]")
        except yaml.YAMLError:
            raise PrfaasError(f"--set {assignment!r}: the values are not valid YAML") from None
        if not separator or not path or not values:
            raise PrfaasError(
                f"--set {assignment!r}: write it as field.path=value or field.path=value,value,..."
            )
        if path in single or path in several:
            raise PrfaasError(f"--set {path}: is given twice; write its values as one list")
        if len(values) == 1:
            single[path] = values[0]
        else:
            several[path] = tuple(values)
    return single, several


def study_of_options(
    scenario: str, assignments: Sequence[str], policies: Sequence[str], **fields: Any
) -> Study:
    """The study that the options of `prfaas sweep` describe.

    Raises:
        PrfaasError: one line that names the option.
    """
    single, several = split_assignments(assignments)
    if not 1 <= len(several) <= MAX_AXES:
        raise PrfaasError(
            f"a sweep varies one or two fields: give --set field.path=value,value,... once or twice "
            f"(found {len(several)} with several values), or --study"
        )
    try:
        return Study(
            name="sweep", scenario=scenario, set=single, vary=several, policies=tuple(policies), **fields
        )
    except ValidationError as error:
        raise first_error(error, "sweep") from None
