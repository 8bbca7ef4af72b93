"""Configuration of a training, as frozen models; the YAML files in `trainings/configs` are instances of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from prfaas_agents.foresight import FORESIGHT, foresight_fields
from prfaas_agents.settings import (
    SETTINGS,
    AlgorithmName,
    LearnerSettings,
    MaskablePpoSettings,
    PpoSettings,
    RecurrentPpoSettings,
    RoutingFitSettings,
    SacSettings,
    TqcSettings,
    WarmStartSettings,
)
from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.bundle_manifest import GridValue, grid_of_json, json_grid
from prfaas_env.decision import MARGIN_GRID_S, ActionCodec, Routing
from prfaas_env.env import RewardName
from prfaas_env.scenarios import Scenario, load_scenario, scenario_names
from prfaas_env.scenarios.loader import apply_overrides, read_yaml
from prfaas_env.simulator.engine import DEFAULT_ENGINE, EngineName
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.sites import link_difference, link_pairs
from prfaas_trainings.randomise import Randomise, check
from prfaas_trainings.seeds import SPLITS, Split, describe

#: A queue of hundreds would drown all other experience; the log keeps its order and takes its weight.
RewardShape = Literal["plain", "sqrt", "log"]
#: What a stage learns; the other part of each action stays "no change".
Choices = Literal["both", "moves", "routing"]

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
    timeline: bool = Field(
        default=True, description="draw what the policy does over the first episode, for TensorBoard"
    )

    @model_validator(mode="after")
    def _split(self) -> Self:
        _check_split(self.seeds.seeds, "validation", "seeds")
        return self


class CurriculumStage(Frozen):
    """Some steps on other scenarios before the training's own."""

    steps: int = Field(ge=1, description="decisions; the stage ends with the update at or after them")
    scenarios: tuple[TrainingScenario, ...] | None = Field(
        default=None, min_length=1, description="default: those of the training"
    )
    randomise: Randomise | None = Field(default=None, description="default: that of the training")
    choices: Choices | None = Field(default=None, description="default: those of the training")


@dataclass(frozen=True)
class Stage:
    """One stretch of a training: what its envs play, and the step that it ends with (None: the end of all)."""

    index: int
    end: int | None
    scenarios: tuple[TrainingScenario, ...]
    randomise: Randomise
    choices: Choices


class TrainingConfig(Frozen):
    """One training: what is learned, on what, for how long. A step is one decision of one env."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str = ""
    scenarios: tuple[TrainingScenario, ...] = Field(min_length=1)
    randomise: Randomise = Field(
        default={},
        description="scenario fields that are drawn: for every episode, or (batched) once per group of envs and stage",
    )
    randomise_groups: int = Field(
        default=16, ge=1, description="most groups per scenario of a batched training; each draws for itself"
    )
    curriculum: tuple[CurriculumStage, ...] = Field(
        default=(), description="stages before the training's own scenarios, which validation always plays"
    )
    routing: Routing = "margin"
    margins_s: tuple[GridValue, ...] = Field(
        default=json_grid(MARGIN_GRID_S),
        description="what discrete margins can be, rising",
    )
    margin_s: float | None = Field(
        default=None, description='the margin of "no change", one of margins_s; default: the one nearest to 0'
    )
    reward: RewardName = "waiting"
    reward_shape: RewardShape = Field(
        default="log",
        description="what is learned from: the reward itself, sign(r) (sqrt(1 + |r|) - 1), or sign(r) log(1 + |r|)",
    )
    reference: str = Field(default="earliest_finish", description="policy of the paired reward")
    decision_interval_s: float = Field(default=15.0, gt=0, description="time between two decisions")
    choices: Choices = Field(
        default="both",
        description="what is learned (maskable PPO); the other part of each action stays no change",
    )
    foresight: bool = Field(
        default=False,
        description="the critic also reads the work to come, which the policy never does (PPO, maskable PPO; batched)",
    )
    stagger: bool = Field(
        default=False,
        description="first episodes of different length, so that a batch is at all times of an episode (batched)",
    )
    warm_start: WarmStartSettings | None = Field(
        default=None,
        description="fit the first policy to roll-outs; each priced state counts as a step (PPO on margins)",
    )
    routing_fit: RoutingFitSettings | None = Field(
        default=None,
        description="at the end fit the routing to roll-outs; each priced state counts as a step (PPO on margins)",
    )
    total_steps: int | None = Field(default=None, ge=1, description="stop after this many decisions")
    minutes: float | None = Field(default=None, gt=0, description="stop after this time, validation included")
    engine: EngineName = DEFAULT_ENGINE
    n_envs: int = Field(default=64, ge=1)
    vectorization: Literal["batched", "processes", "none"] = Field(
        default="batched",
        description="all envs in one compiled call, one process per env, or one after another in this process",
    )
    seed: int = Field(default=0, ge=0, description="seed of weights, action sampling and episode seeds")
    seeds: tuple[int, ...] = Field(
        default=(), description="several trainings, one per seed, each with all the steps and minutes"
    )
    training_seeds: SeedRange = SeedRange(first=0, count=SPLITS["training"].stop)
    validation: Validation = Validation()
    algorithm: AlgorithmName = "ppo"
    ppo: PpoSettings | None = None
    maskable_ppo: MaskablePpoSettings | None = None
    recurrent_ppo: RecurrentPpoSettings | None = None
    sac: SacSettings | None = None
    tqc: TqcSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_algorithm(cls, value: Any) -> Any:
        """Fill in the section of the algorithm; one of another algorithm would be ignored, so it is refused."""
        if not isinstance(value, dict):
            return value
        chosen = value.get("algorithm", "ppo")
        for name in SETTINGS:
            if name != chosen and value.get(name) is not None and chosen in SETTINGS:
                raise ValueError(f"{name}: has no effect, the algorithm is {chosen}")
        return (
            value
            if value.get(chosen) is not None
            else {**value, **({chosen: {}} if chosen in SETTINGS else {})}
        )

    @property
    def settings(self) -> LearnerSettings:
        """Hyper-parameters of the algorithm."""
        found = getattr(self, self.algorithm)
        assert isinstance(found, LearnerSettings)
        return found

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_split(self.training_seeds.seeds, "training", "training_seeds")
        if self.total_steps is None and self.minutes is None:
            raise ValueError("give total_steps, minutes, or both (the first one reached ends the training)")
        if self.vectorization == "batched":
            if self.engine != "compiled":
                raise ValueError(f"vectorization batched needs engine compiled, found {self.engine}")
            for stage in self.stages():
                if self.n_envs < len(stage.scenarios):
                    raise ValueError(
                        f"n_envs {self.n_envs} is fewer than one per scenario ({len(stage.scenarios)})"
                    )
        if isinstance(self.settings, PpoSettings):
            rollout = self.settings.n_steps * self.n_envs
            if self.settings.batch_size > rollout:
                raise ValueError(
                    f"{self.algorithm}.batch_size {self.settings.batch_size} exceeds the {rollout} decisions of one "
                    f"rollout (n_envs {self.n_envs} x {self.algorithm}.n_steps {self.settings.n_steps})"
                )
        self._codec_of(1)
        if any(stage.choices != "both" for stage in self.stages()) and self.algorithm != "maskable_ppo":
            raise ValueError(
                f"choices: a part of the actions alone needs maskable_ppo, found {self.algorithm}"
            )
        self._check_roll_outs()
        if self.foresight and (
            self.algorithm not in ("ppo", "maskable_ppo") or self.vectorization != "batched"
        ):
            raise ValueError(
                "foresight needs ppo or maskable_ppo and vectorization batched; found "
                f"{self.algorithm}, {self.vectorization}"
            )
        if self.stagger and self.vectorization != "batched":
            raise ValueError(f"stagger needs vectorization batched, found {self.vectorization}")
        before = sum(stage.steps for stage in self.curriculum)
        if self.curriculum and self.total_steps is not None and before >= self.total_steps:
            raise ValueError(
                f"the curriculum's {before} steps leave none of total_steps {self.total_steps} for the scenarios"
            )
        if len(set(self.seeds)) != len(self.seeds) or any(seed < 0 for seed in self.seeds):
            raise ValueError(f"seeds must be different numbers of 0 or more, found {list(self.seeds)}")
        return self

    def _check_roll_outs(self) -> None:
        for name in ("warm_start", "routing_fit"):
            if getattr(self, name) is not None and (
                self.algorithm not in ("ppo", "maskable_ppo")
                or self.routing != "margin"
                or self.engine != "compiled"
            ):
                raise ValueError(
                    f"{name} needs ppo or maskable_ppo, routing margin and engine compiled; found "
                    f"{self.algorithm}, {self.routing}, {self.engine}"
                )
        if self.routing_fit is not None and self.stages()[-1].choices != "moves":
            raise ValueError(f"routing_fit goes with choices moves, found {self.stages()[-1].choices}")

    def stages(self) -> tuple[Stage, ...]:
        """The curriculum, then the training's own scenarios."""
        out, end = [], 0
        for k, given in enumerate(self.curriculum):
            end += given.steps
            randomise = self.randomise if given.randomise is None else given.randomise
            choices = self.choices if given.choices is None else given.choices
            out.append(Stage(k, end, given.scenarios or self.scenarios, randomise, choices))
        return (*out, Stage(len(out), self.total_steps, self.scenarios, self.randomise, self.choices))

    def stage_at(self, steps: int) -> Stage:
        """The stage after this many steps."""
        return next((s for s in self.stages() if s.end is not None and steps < s.end), self.stages()[-1])

    def network(self) -> dict[str, int]:
        """Sizes of the network beside the hidden layers, by name."""
        sizes = dict(self.settings.network)
        if self.foresight:
            deployment = self.load_scenarios()[0].deployment
            sizes[FORESIGHT] = foresight_fields(len(deployment.pd), len(deployment.links))
        return sizes

    def of_seed(self, seed: int) -> TrainingConfig:
        """The training of one of its `seeds`."""
        return self.model_copy(update={"seed": seed, "seeds": ()})

    def load_scenarios(self, *, validation: bool = False) -> tuple[Scenario, ...]:
        """The scenarios with their overrides, and with those of the validation if asked for.

        Raises:
            PrfaasError: a scenario or override that is wrong, scenarios with different observations, a decision
                interval that does not fit a scenario's clocks.
        """
        extra = self.validation.overrides if validation else ()
        found = self._load(self.scenarios, extra)
        self._check_alike(found)
        return found

    def stage_scenarios(self, stage: Stage) -> tuple[Scenario, ...]:
        """The scenarios of a stage with their overrides, before anything is drawn.

        Raises:
            PrfaasError: as `load_scenarios`, of the drawn values too.
        """
        found = self._load(stage.scenarios)
        drawn = [each for scenario in found for each in check(scenario, stage.randomise)]
        self._check_alike((*self._load(self.scenarios[:1]), *found, *drawn))
        return found

    @staticmethod
    def _load(given: Sequence[TrainingScenario], extra: Sequence[str] = ()) -> tuple[Scenario, ...]:
        return tuple(load_scenario(s.scenario, overrides=[*s.overrides, *extra]) for s in given)

    def _check_alike(self, found: Sequence[Scenario]) -> None:
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
        """Action codec for the scenarios' PD clusters, of the form that the algorithm learns."""
        return self._codec_of(len(self.load_scenarios()[0].deployment.pd))

    def _codec_of(self, n_pd: int) -> ActionCodec:
        return ActionCodec(
            n_pd, self.routing, self.settings.form, grid_of_json(self.margins_s), self.margin_s
        )

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
    folder = folder.resolve()

    def resolved(given: Sequence[TrainingScenario]) -> tuple[TrainingScenario, ...]:
        return tuple(
            s
            if s.scenario in scenario_names() or Path(s.scenario).is_absolute()
            else s.model_copy(update={"scenario": str(folder / s.scenario)})
            for s in given
        )

    stages = tuple(
        stage
        if stage.scenarios is None
        else stage.model_copy(update={"scenarios": resolved(stage.scenarios)})
        for stage in config.curriculum
    )
    return config.model_copy(update={"scenarios": resolved(config.scenarios), "curriculum": stages})
