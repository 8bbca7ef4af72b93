"""Free parameters of a rule: named, with unit, range and default, in one frozen model per rule."""

from __future__ import annotations

from typing import Any, TypeVar, cast, get_args

from pydantic import Field, ValidationError

from prfaas_baselines.tuned_files import fingerprint, tuned_parameters
from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.decision import CacheRule

P = TypeVar("P", bound=Frozen)


def knob(default: Any, unit: str, meaning: str, left_open: str = "own", **limits: Any) -> Any:
    """A pydantic field that carries its unit and why the value is ours to choose.

    Args:
        default: value when it is not given.
        unit: unit of the value; `-` for a choice.
        meaning: what it does.
        left_open: the place of the paper that asks for such a value without giving one; `own` when the paper
            has nothing of the kind.
        limits: `ge`, `gt`, `le`, `lt` of pydantic.
    """
    extra: dict[str, Any] = {"unit": unit, "left_open": left_open}
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


def parameters_from(model: type[P], policy: str, given: dict[str, Any]) -> P:
    """The parameter model of a policy from its constructor keywords.

    The keyword `tuned` names tuned parameters (see `tuned_files`); the other keywords override them.

    Raises:
        PrfaasError: one line that names an unknown parameter and the known ones, or a value that is not allowed.
    """
    given = with_tuned(policy, given)
    for key in given:
        if key not in model.model_fields:
            known = ", ".join((*model.model_fields, "tuned"))
            raise PrfaasError(f"policy {policy!r}: unknown parameter {key!r}; known: {known}")
    try:
        return model(**given)
    except ValidationError as error:
        raise first_error(error, f"policy {policy!r}") from None


def with_tuned(policy: str, given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a policy with those of its tuned file, if `tuned` names one, laid under them.

    Raises:
        PrfaasError: no such tuned file, or a faulty one.
    """
    if given.get("tuned") is None:
        return {key: value for key, value in given.items() if key != "tuned"}
    own = {key: value for key, value in given.items() if key != "tuned" and value is not None}
    return {**tuned_parameters(policy, given["tuned"]), **own}


def tuned_fingerprint(policy: str, given: dict[str, Any]) -> str | None:
    """Fingerprint of a policy whose keywords name a tuned file: its spec alone does not say what it does.

    None for other keywords.
    """
    return None if given.get("tuned") is None else fingerprint(policy, with_tuned(policy, given))


def number(policy: str, name: str, value: object, low: float, unit: str) -> float:
    """A parameter that may be infinite: a number of `unit` of at least `low`.

    Raises:
        PrfaasError: one line with what was found and what is allowed.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= low:
        return float(value)
    raise PrfaasError(
        f"policy {policy!r}: {name} is {value!r}; allowed: a number of {unit} from {low:g} to inf"
    )


def cache_rule(policy: str, value: object) -> CacheRule:
    """The paper's cache rule by name.

    Raises:
        PrfaasError: one line with what was found and what is allowed.
    """
    for known in get_args(CacheRule):
        if value == known:
            return cast(CacheRule, known)
    raise PrfaasError(
        f"policy {policy!r}: cache_rule is {value!r}; allowed: {', '.join(get_args(CacheRule))}"
    )


def parameter_table(model: type[Frozen]) -> str:
    """The parameters of a model as a Markdown table: name, unit, default, meaning, where the paper leaves it open."""
    rows = ["| parameter | unit | default | meaning | left open by the paper |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        rows.append(
            f"| {name} | {extra.get('unit', '-')} | {field.default} | {field.description} "
            f"| {extra.get('left_open', 'own')} |"
        )
    return "\n".join(rows)
