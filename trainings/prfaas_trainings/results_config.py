"""What the page of results is made of, as frozen models; `trainings/configs/results/*.yaml` are instances of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.scenarios.loader import read_yaml
from prfaas_env.simulator.engine import DEFAULT_ENGINE, EngineName
from prfaas_trainings.config import config_folder
from prfaas_trainings.episodes import parse_row
from prfaas_trainings.load import at_load
from prfaas_trainings.seeds import SPLITS, describe

#: A label: no sign that means something in a spec or a table.
Label = Annotated[str, Field(pattern=r"^[^=:|\n]+$")]
#: What a policy is in the tables.
PolicyRole = Literal[
    "deployment", "rule", "tuned rule", "planner", "reference", "learned", "training seed", "ablation"
]
#: In a policy's spec or run: the folder of the configuration.
HERE = "{here}"
#: Stands for the family of a scenario in the spec of a policy.
FAMILY = "{family}"


class ResultsScenario(Frozen):
    """One scenario, or one per load."""

    label: Label
    scenario: str = Field(description="shipped name, or path (relative to the configuration's file)")
    set: dict[str, Any] = Field(default_factory=dict, description="field path to its value")
    loads: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(), description="rates as shares of capacity, one table each; default the scenario's own rate"
    )
    family: str | None = Field(default=None, description="takes the place of {family} in the policies' specs")
    seeds: int = Field(default=50, ge=1, description="test seeds; of a trace, replays of it")
    without: dict[str, str] = Field(
        default_factory=dict, description="policies that are left out here, each with the reason"
    )
    note: str = ""

    def labels(self) -> tuple[str, ...]:
        """A name per table."""
        return tuple(f"{self.label}, load {load:g}" for load in self.loads) or (self.label,)

    def resolved(self) -> tuple[Scenario, ...]:
        """The scenarios in the order of the labels.

        Raises:
            PrfaasError: a scenario, field or load that is wrong.
        """
        overrides = [f"{path}={json.dumps(value)}" for path, value in self.set.items()]
        try:
            base = load_scenario(self.scenario, overrides=overrides)
            return tuple(at_load(base, load) for load in self.loads) or (base,)
        except PrfaasError as error:
            raise PrfaasError(f"scenario {self.label}: {error}") from None


class ResultsPolicy(Frozen):
    """One row."""

    label: Label
    policy: str = Field(
        min_length=1,
        description="POLICY[:key=value,...][@DEPLOYMENT]; may hold {family}, and {here} for the folder of this file",
    )
    role: PolicyRole = "rule"
    scenarios: tuple[str, ...] = Field(default=(), description="scenarios it runs on; default all")
    by_scenario: dict[str, str] = Field(
        default_factory=dict,
        description="another spec on some scenarios, such as a bundle of another topology",
    )
    run: str | None = Field(
        default=None,
        description="folder of its training, for its time, which a bundle does not hold; {here} as above",
    )
    note: str = ""


class Subjects(Frozen):
    """Labels of the rows that the page speaks of."""

    learned: str = Field(description="the policy that the page is about")
    best_rule: str = Field(description="the best hand-written rule, as chosen on validation seeds")
    tuned_paper: str = Field(description="the paper's scheduler with tuned parameters")
    ahead: str = Field(description="the planner at the end of the way from the best rule")
    converting: str = Field(description="the rule that the P90 over all requests is compared with")


class BaseTarget(Frozen):
    """What every target has."""

    statement: str = Field(min_length=1)
    scenarios: tuple[str, ...] = Field(
        min_length=1, description="labels; one with loads stands for all of them"
    )
    policy: str | None = Field(default=None, description="label; default the learned one")


class Better(BaseTarget):
    """Mean TTFT below the other's: the interval of the paired difference excludes 0."""

    measure: Literal["better"]
    against: str


class NotWorse(BaseTarget):
    """Mean TTFT not above the other's: the interval of the paired difference does not lie above 0."""

    measure: Literal["not_worse"]
    against: str


class Reduction(BaseTarget):
    """A figure lower than the other's by a share of it: mean TTFT, or the P90 over all requests of all seeds."""

    measure: Literal["reduction"]
    against: str
    figure: Literal["mean", "p90"] = "mean"
    at_least: float = Field(gt=0, lt=1)


class ShareOfWay(BaseTarget):
    """How much of the difference of two others' mean TTFT is gained."""

    measure: Literal["share_of_way"]
    start: str
    end: str
    at_least: float = Field(gt=0)
    aim: float | None = None


class Within(BaseTarget):
    """Mean TTFT near the other's, above or below."""

    measure: Literal["within"]
    against: str
    at_most: float = Field(gt=0)


class AllBetter(BaseTarget):
    """`better` for the policy, which is of one training seed, and for every one of a role."""

    measure: Literal["all_better"]
    against: str
    role: PolicyRole = "training seed"


class FasterDecisions(BaseTarget):
    """The median time of a decision below the other's."""

    measure: Literal["faster_decisions"]
    against: str


Target = Annotated[
    Better | NotWorse | Reduction | ShareOfWay | Within | AllBetter | FasterDecisions,
    Field(discriminator="measure"),
]


class ResultsConfig(Frozen):
    """A page of results: every policy on every scenario, what is compared with what, what was to be reached."""

    title: str = "Results"
    description: str = ""
    engine: EngineName = DEFAULT_ENGINE
    first_seed: int = Field(default=SPLITS["test"].start, description="first test seed, of every scenario")
    headline: str = Field(description="label of the scenario that shares, losses and times are told of")
    scenarios: tuple[ResultsScenario, ...] = Field(min_length=1)
    policies: tuple[ResultsPolicy, ...] = Field(min_length=2)
    subjects: Subjects
    targets: tuple[Target, ...] = ()

    @model_validator(mode="after")
    def _seeds(self) -> Self:
        last = self.first_seed + max(s.seeds for s in self.scenarios) - 1
        for seed in (self.first_seed, last):
            if seed not in SPLITS["test"]:
                raise ValueError(f"first_seed: {describe('test')}, found {self.first_seed:,}..{last:,}")
        return self

    @property
    def table_labels(self) -> tuple[str, ...]:
        """Labels of all tables."""
        return tuple(label for scenario in self.scenarios for label in scenario.labels())

    def tables_of(self, label: str) -> tuple[str, ...]:
        """The tables that a scenario's label stands for: itself, or one per load; nothing for an unknown one."""
        found = {s.label: s.labels() for s in self.scenarios}
        return found.get(label, (label,) if label in self.table_labels else ())

    def runs_on(self, policy: ResultsPolicy, scenario: ResultsScenario) -> bool:
        """Whether a policy belongs into the tables of a scenario."""
        return not policy.scenarios or scenario.label in policy.scenarios

    def only(
        self, scenarios: Sequence[str] = (), policies: Sequence[str] = (), seeds: int | None = None
    ) -> ResultsConfig:
        """A part of it: some scenarios, some policies, at most so many seeds.

        Raises:
            PrfaasError: an unknown label.
        """
        kept_scenarios = _picked("--scenario", scenarios, self.scenarios)
        kept_policies = _picked("--policy", policies, self.policies)
        if seeds is not None:
            kept_scenarios = tuple(
                s.model_copy(update={"seeds": min(s.seeds, seeds)}) for s in kept_scenarios
            )
        return self.model_copy(update={"scenarios": kept_scenarios, "policies": kept_policies})


def _picked(option: str, labels: Sequence[str], known: Sequence[Any]) -> tuple[Any, ...]:
    names = [each.label for each in known]
    for label in labels:
        if label not in names:
            raise PrfaasError(f"{option} {label!r}: is not among {', '.join(names)}")
    return tuple(each for each in known if not labels or each.label in labels)


def spec_of(policy: ResultsPolicy, scenario: ResultsScenario) -> str:
    """The spec of a policy on a scenario.

    Raises:
        PrfaasError: it needs a family and the scenario has none.
    """
    spec = policy.by_scenario.get(scenario.label, policy.policy)
    if FAMILY in spec:
        if scenario.family is None:
            raise PrfaasError(
                f"policy {policy.label}: its spec {spec!r} needs a family; scenario {scenario.label} has none"
            )
        spec = spec.replace(FAMILY, scenario.family)
    return spec


def _known(field: str, label: str, among: Sequence[str]) -> None:
    if label not in among:
        raise PrfaasError(f"{field}: {label!r} is not among {', '.join(among)}")


def _check_names(config: ResultsConfig) -> None:
    """Refuse labels that are given twice or that nothing has."""
    policies = [p.label for p in config.policies]
    for field, labels in (("scenarios", config.table_labels), ("policies", policies)):
        for label, count in Counter(labels).items():
            if count > 1:
                raise PrfaasError(f"{field}: label {label!r} is given {count} times")
    _known("headline", config.headline, config.table_labels)
    for name, label in config.subjects.model_dump().items():
        _known(f"subjects.{name}", label, policies)
    for k, scenario in enumerate(config.scenarios):
        for label in scenario.without:
            _known(f"scenarios.{k}.without", label, policies)
    _check_policies(config)
    for k, target in enumerate(config.targets):
        for label in target.scenarios:
            _known(
                f"targets.{k}.scenarios", label, [*(s.label for s in config.scenarios), *config.table_labels]
            )
        for field in ("policy", "against", "start", "end"):
            named = getattr(target, field, None)
            if named is not None:
                _known(f"targets.{k}.{field}", named, policies)


def _check_policies(config: ResultsConfig) -> None:
    scenarios = [s.label for s in config.scenarios]
    for k, policy in enumerate(config.policies):
        for field, labels in (("scenarios", policy.scenarios), ("by_scenario", tuple(policy.by_scenario))):
            for label in labels:
                _known(f"policies.{k}.{field}", label, scenarios)
        for scenario in config.scenarios:
            if config.runs_on(policy, scenario):
                parse_row(f"{policy.label}={spec_of(policy, scenario)}")


def load_results_config(spec: str) -> ResultsConfig:
    """A shipped configuration by name, or that of a YAML file; paths in it are relative to the file.

    Raises:
        PrfaasError: one line that names the file and the field.
    """
    shipped = config_folder() / "results" / f"{spec}.yaml"
    path = shipped if shipped.is_file() else Path(spec)
    if not path.is_file():
        raise PrfaasError(f"--config {spec!r}: is neither a shipped configuration nor a file")
    try:
        config = ResultsConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        raise first_error(error, str(path)) from None
    try:
        _check_names(config)
    except PrfaasError as error:
        raise PrfaasError(f"{path}: {error}") from None
    scenarios = tuple(
        s.model_copy(update={"scenario": _path(s.scenario, path.parent)}) for s in config.scenarios
    )
    policies = tuple(_placed(p, path.parent) for p in config.policies)
    return config.model_copy(update={"scenarios": scenarios, "policies": policies})


def _placed(policy: ResultsPolicy, folder: Path) -> ResultsPolicy:
    """A row whose files lie beside the configuration."""
    here = str(folder.resolve())
    placed = {
        "policy": policy.policy.replace(HERE, here),
        "by_scenario": {label: spec.replace(HERE, here) for label, spec in policy.by_scenario.items()},
        "run": None if policy.run is None else policy.run.replace(HERE, here),
    }
    return policy.model_copy(update=placed)


def _path(scenario: str, folder: Path) -> str:
    known = scenario in scenario_names() or Path(scenario).is_absolute()
    return scenario if known else str(folder / scenario)
