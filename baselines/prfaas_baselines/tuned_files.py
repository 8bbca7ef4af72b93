"""Tuned parameters of rules: files in the package, one per rule and family of scenarios, written by `prfaas tune`.

`POLICY:tuned=FAMILY` takes the parameters of such a file (`tuned=PATH` those of a file of your own); further parameters
override them. `best_rule:family=FAMILY` is the rule that was best on the validation seeds of a family.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import Field, ValidationError

from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.policy import Policy, make_policy
from prfaas_env.scenarios.loader import read_yaml

T = TypeVar("T", bound=Frozen)

#: Name of the record of best rules in a folder of tuned parameters.
BEST_FILE = "best.yaml"


class Seeds(Frozen):
    """Episode seeds [first, first + count)."""

    first: int = Field(ge=0)
    count: int = Field(ge=1)


class Score(Frozen):
    """How a candidate did: relative to the reference (below 1 is better), and in seconds.

    `relative` is the mean over the scenarios of the family of mean TTFT over that of the reference on the same seeds;
    `low` and `high` are its 95% interval over seeds where there are enough. `ttft_mean_s` is per scenario.
    """

    relative: float
    low: float | None = None
    high: float | None = None
    ttft_mean_s: dict[str, float]


class Provenance(Frozen):
    """The study that made a tuned file."""

    trials: int
    pruned: int
    reference: str
    search_overrides: tuple[str, ...] = ()
    training_seeds: Seeds
    validation_seeds: Seeds
    scenarios: dict[str, str] = Field(description="scenario to its hash")
    validation_scenarios: dict[str, str]
    versions: dict[str, str]


class TunedFile(Frozen):
    """Tuned parameters of one rule on one family; empty parameters: nothing was better than the defaults."""

    policy: str
    family: str
    parameters: dict[str, bool | int | float | str]
    training: dict[str, Score] = Field(description="`default` and `tuned`, on training seeds")
    validation: dict[str, Score] = Field(description="the same on validation seeds, by which it was chosen")
    study: Provenance


class BestRule(Frozen):
    """The best rule of a family on validation seeds, and how every candidate did there."""

    spec: str
    reference: str
    validation_seeds: Seeds
    scenarios: dict[str, str]
    versions: dict[str, str]
    candidates: dict[str, Score]


class BestFile(Frozen):
    """The best rule per family."""

    families: dict[str, BestRule]


def tuned_folder() -> Path:
    """Folder of the shipped files."""
    return Path(str(resources.files("prfaas_baselines") / "tuned"))


def _read(path: Path, model: type[T]) -> T:
    try:
        return model.model_validate(read_yaml(path))
    except ValidationError as error:
        raise first_error(error, str(path)) from None


def tuned_families(policy: str, folder: Path | None = None) -> list[str]:
    """Families that a rule has tuned parameters for."""
    return sorted(path.stem for path in ((folder or tuned_folder()) / policy).glob("*.yaml"))


def read_tuned(policy: str, which: str) -> TunedFile:
    """The tuned file of a rule: of a family by name, or at a path.

    Raises:
        PrfaasError: no such file, a faulty one, or one of another rule.
    """
    path = Path(which) if which.endswith((".yaml", ".yml")) else tuned_folder() / policy / f"{which}.yaml"
    if not path.is_file():
        known = ", ".join(tuned_families(policy)) or "none"
        raise PrfaasError(
            f"policy {policy!r}: tuned is {which!r}; families with tuned parameters: {known}; or give a .yaml file"
        )
    found = _read(path, TunedFile)
    if found.policy != policy:
        raise PrfaasError(f"policy {policy!r}: {path} holds parameters of {found.policy!r}")
    return found


def tuned_parameters(policy: str, which: object) -> dict[str, Any]:
    """The parameters of `read_tuned`.

    Raises:
        PrfaasError: as `read_tuned`.
    """
    return dict(read_tuned(policy, str(which)).parameters)


def fingerprint(policy: str, parameters: dict[str, Any]) -> str:
    """12 hex digits of a rule with all parameters that it was given, wherever they came from."""
    content = json.dumps([policy, parameters], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def read_best(folder: Path | None = None) -> BestFile:
    """The record of best rules; empty where there is none yet.

    Raises:
        PrfaasError: a faulty file.
    """
    path = (folder or tuned_folder()) / BEST_FILE
    return _read(path, BestFile) if path.is_file() else BestFile(families={})


def best_spec(family: str) -> str:
    """Spec of the best rule of a family.

    Raises:
        PrfaasError: a family without a record.
    """
    families = read_best().families
    if family not in families:
        raise PrfaasError(f"policy 'best_rule': family is {family!r}; known: {', '.join(families) or 'none'}")
    return families[family].spec


def best_rule(family: str) -> Policy:
    """The best rule of a family of scenarios, as chosen on validation seeds.

    Args:
        family: a family with a record.
    """
    spec = best_spec(str(family))
    policy = make_policy(spec)
    if getattr(policy, "fingerprint", None) is None:
        policy.fingerprint = hashlib.sha256(spec.encode()).hexdigest()[:12]  # type: ignore[attr-defined]
    return policy


def tuned_yaml(record: Frozen) -> str:
    """A tuned file, or the record of best rules, as YAML."""
    return yaml.safe_dump(record.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def _shown(score: Score) -> str:
    limits = "" if score.low is None or score.high is None else f" [{score.low:.3f}, {score.high:.3f}]"
    return f"{score.relative:.3f}{limits}"


def _seconds(score: Score) -> str:
    return " / ".join(f"{mean:.2f}" for mean in score.ttft_mean_s.values())


def tuned_table(folder: Path | None = None) -> str:
    """Tuned files of a folder as a Markdown table, on validation seeds; `docs/baselines.md` shows the shipped ones."""
    rows = [
        "| family | rule | default, mean TTFT s | tuned, mean TTFT s | tuned / reference | trials |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    base = folder or tuned_folder()
    found = [_read(path, TunedFile) for path in sorted(base.glob("*/*.yaml"))]
    for each in sorted(found, key=lambda t: (t.family, t.validation["tuned"].relative)):
        default, tuned = each.validation["default"], each.validation["tuned"]
        rows.append(
            f"| `{each.family}` | `{each.policy}` | {_seconds(default)} | {_seconds(tuned)} | {_shown(tuned)} "
            f"| {each.study.trials} |"
        )
    return "\n".join(rows)


def best_table(folder: Path | None = None) -> str:
    """The best rule per family and the next one as a Markdown table."""
    rows = ["| family | best rule | mean TTFT s | / reference | next |", "| --- | --- | ---: | ---: | --- |"]
    for family, found in sorted(read_best(folder).families.items()):
        first, second = sorted(found.candidates, key=lambda spec: found.candidates[spec].relative)[:2]
        best, after = found.candidates[first], found.candidates[second]
        rows.append(
            f"| `{family}` | `{first}` | {_seconds(best)} | {_shown(best)} | `{second}` {_shown(after)} |"
        )
    return "\n".join(rows)
