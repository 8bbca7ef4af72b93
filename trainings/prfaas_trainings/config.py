"""Configuration of a training, as frozen models; the YAML files in `trainings/configs` are instances of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from prfaas_agents.settings import PpoSettings
from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.decision import ActionCodec, Routing
from prfaas_env.env import RewardName
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.scenarios.loader import apply_overrides, read_yaml
from prfaas_env.simulator.engine import DEFAULT_ENGINE, EngineName
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.sites import link_difference, link_pairs
from prfaas_trainings.seeds import SPLITS, Split, describe

#: A queue of hundreds would drown all other experience; the log keeps its order and takes its weight.
RewardShape = Literal["plain", "log"]

_PACKAGE = Path(__file__).resolve().parent


class TrainingScenario(Frozen):
    """One scenario of the mix that episodes are drawn from."""

    scenario: str = Field(description="shipped name, or path (relative to the configuration's file)")
    overrides: tuple[str, ...] = Field(default=(), description="field.path=value, applied in order")
    weight: float = Field(default=1.0, gt=0, description="relative share of the episodes")


class SeedRange(Frozen):
    """Episode seeds [first, first + count)."""

    first: int = Field(ge=0)
    count: int = Field(ge=1)

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.first, self.first + self.count)


def _check_split(seeds: range, split: Split, field: str) -> None:
    allowed = SPLITS[split]
    if seeds.start not in allowed or seeds.stop - 1 not in allowed:
        raise ValueError(f"{field}: {describe(split)}, found {seeds.start:,}..{seeds.stop - 1:,}")


class Validation(Frozen):
    """How the best policy of a training is chosen: on its scenarios, with seeds of their own, without chance."""

    seeds: SeedRange = SeedRange(first=SPLITS["validation"].start, count=32)
    every_steps: int = Field(default=8192, ge=1, description="decisions between two checkpoints")
    overrides: tuple[str, ...] = Field(
        default=(), description="field.path=value for the validation scenarios alone"
    )

    @model_validator(mode="after")
    def _split(self) -> Self:
        _check_split(self.seeds.seeds, "validation", "seeds")
        return self


class TrainingConfig(Frozen):
    """One training: what is learned, on what, for how long. A step is one decision of one env."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str = ""
    scenarios: tuple[TrainingScenario, ...] = Field(min_length=1)
    routing: Routing = "margin"
    reward: RewardName = "waiting"
    reward_shape: RewardShape = Field(
        default="log", description="what is learned from: the reward itself, or sign(r) log(1 + |r|)"
    )
    reference: str = Field(default="earliest_finish", description="policy of the paired reward")
    decision_interval_s: float = Field(default=15.0, gt=0, description="time between two decisions")
    total_steps: int | None = Field(default=None, ge=1, description="stop after this many decisions")
    minutes: float | None = Field(default=None, gt=0, description="stop after this time, validation included")
    engine: EngineName = DEFAULT_ENGINE
    n_envs: int = Field(default=64, ge=1)
    vectorization: Literal["batched", "processes", "none"] = Field(
        default="batched",
        description="all envs in one compiled call, one process per env, or one after another in this process",
    )
    seed: int = Field(default=0, ge=0, description="seed of weights, action sampling and episode seeds")
    training_seeds: SeedRange = SeedRange(first=0, count=SPLITS["training"].stop)
    validation: Validation = Validation()
    ppo: PpoSettings = PpoSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_split(self.training_seeds.seeds, "training", "training_seeds")
        if self.total_steps is None and self.minutes is None:
            raise ValueError("give total_steps, minutes, or both (the first one reached ends the training)")
        if self.vectorization == "batched":
            if self.engine != "compiled":
                raise ValueError(f"vectorization batched needs engine compiled, found {self.engine}")
            if self.n_envs < len(self.scenarios):
                raise ValueError(
                    f"n_envs {self.n_envs} is fewer than one per scenario ({len(self.scenarios)})"
                )
        rollout = self.ppo.n_steps * self.n_envs
        if self.ppo.batch_size > rollout:
            raise ValueError(
                f"ppo.batch_size {self.ppo.batch_size} exceeds the {rollout} decisions of one rollout "
                f"(n_envs {self.n_envs} x ppo.n_steps {self.ppo.n_steps})"
            )
        return self

    def load_scenarios(self, *, validation: bool = False) -> tuple[Scenario, ...]:
        """The scenarios with their overrides, and with those of the validation if asked for.

        Raises:
            PrfaasError: a scenario or override that is wrong, scenarios with different observations, a decision
                interval that does not fit a scenario's clocks.
        """
        extra = self.validation.overrides if validation else ()
        found = tuple(load_scenario(s.scenario, overrides=[*s.overrides, *extra]) for s in self.scenarios)
        for scenario in found:
            self._check_clock(scenario)
        first = scenario_schema(found[0])
        for scenario in found[1:]:
            difference = scenario_schema(scenario).difference(first) or link_difference(
                link_pairs(scenario.deployment), link_pairs(found[0].deployment)
            )
            if difference:
                raise PrfaasError(
                    f"training {self.name}: scenarios {found[0].name} and {scenario.name} have different "
                    f"observations: {difference}"
                )
        return found

    def at_decision_interval(self, scenarios: Sequence[Scenario]) -> tuple[Scenario, ...]:
        """The scenarios with the decision interval as their control interval.

        An env step is then one decision: an action repeat without a wrapper, whose reward is the mean over the
        interval. In the scenario itself the policy holds its decision in between, which gives the same episode,
        event for event, so validation uses this quicker form too.
        """
        interval = f"control.control_interval_s={self.decision_interval_s!r}"
        return tuple(load_scenario(scenario, overrides=[interval]) for scenario in scenarios)

    def _check_clock(self, scenario: Scenario) -> None:
        ratio = self.decision_interval_s / scenario.control.control_interval_s
        if abs(ratio - round(ratio)) > 1e-9 or round(ratio) < 1:
            raise PrfaasError(
                f"training {self.name}: decision_interval_s {self.decision_interval_s:g} must be a whole multiple "
                f"of control_interval_s {scenario.control.control_interval_s:g} of scenario {scenario.name}"
            )

    def codec(self) -> ActionCodec:
        """Action codec (discrete) for the scenarios' PD clusters."""
        return ActionCodec(len(self.load_scenarios()[0].deployment.pd), self.routing, "discrete")

    def yaml(self) -> str:
        """The whole configuration as YAML; `load_config` of it gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def config_folder() -> Path:
    """Folder of the shipped configurations: inside the installed package, or beside it in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(path.stem for path in config_folder().glob("*.yaml"))


def load_config(spec: str | Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """A configuration by shipped name or path of a YAML file.

    Args:
        spec: name or path.
        overrides: `field.path=value` assignments, applied last.

    Raises:
        PrfaasError: one line that names the file and the field.
    """
    path = Path(spec)
    if str(spec) in config_names():
        path = config_folder() / f"{spec}.yaml"
        where = f"training {spec}"
    elif path.suffix in {".yaml", ".yml"} or path.is_file():
        where = str(path)
    else:
        raise PrfaasError(
            f"unknown training {str(spec)!r}; shipped: {', '.join(config_names())}; or give a path to a .yaml file"
        )
    raw = read_yaml(path)
    apply_overrides(raw, overrides)
    try:
        config = TrainingConfig.model_validate(raw)
    except ValidationError as error:
        raise first_error(error, where) from None
    return _with_paths(config, path.parent)


def _with_paths(config: TrainingConfig, folder: Path) -> TrainingConfig:
    """Scenario paths are relative to the configuration's file."""
    resolved = tuple(
        s
        if s.scenario in scenario_names() or Path(s.scenario).is_absolute()
        else s.model_copy(update={"scenario": str(folder / s.scenario)})
        for s in config.scenarios
    )
    return config.model_copy(update={"scenarios": resolved})
