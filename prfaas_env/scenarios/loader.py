"""Scenarios from YAML: `extends`, deployments by name, overrides, one-line errors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from prfaas_env.base import PrfaasError, first_error
from prfaas_env.profiles.catalogue import load_model, model_names
from prfaas_env.scenarios.models import Scenario

_DATA = resources.files("prfaas_env.scenarios") / "data"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice (YAML would silently keep the last)."""


def _unique_mapping(loader: _StrictLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue  # `<<: *anchor` stands for the anchor's keys
        key = loader.construct_object(key_node, deep=deep)
        if not isinstance(key, Hashable):
            continue  # refused by construct_mapping
        if key in seen:
            mark = key_node.start_mark
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is written twice", mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=deep)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file; PrfaasError with file and line if it is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PrfaasError(f"{path}: is not UTF-8 text") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """A YAML mapping from text; `where` names it in errors."""
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise PrfaasError(f"{where}:{line}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PrfaasError(f"{where}:{line}: not valid YAML: {error.reason}") from None
    if not isinstance(content, dict):
        raise PrfaasError(f"{where}: expected a mapping of scenario fields, found {type(content).__name__}")
    return content


def scenario_names() -> list[str]:
    """Names of the scenarios that ship with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in _DATA.iterdir() if p.name.endswith(".yaml"))


def _merge(base: Any, change: Any) -> Any:
    """`change` laid over `base`: mappings merge, except that one with another `kind` replaces the whole section."""
    if not (isinstance(base, Mapping) and isinstance(change, Mapping)):
        return change
    if "kind" in change and change["kind"] != base.get("kind"):
        return change
    merged = dict(base)
    for key, value in change.items():
        merged[key] = _merge(base[key], value) if key in base else value
    return merged


def _read(spec: str, seen: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """(raw fields with `extends` resolved, where they came from) of a shipped name or a path."""
    path = Path(spec)
    shipped = spec in scenario_names()
    identity = spec if shipped else str(path.resolve())
    if identity in seen:
        raise PrfaasError(
            f"scenario {seen[0]}: `extends` goes round in a circle: {' -> '.join((*seen, identity))}"
        )
    if shipped:
        where = f"scenario {spec}"
        raw = parse_yaml((_DATA / f"{spec}.yaml").read_text(encoding="utf-8"), where)
        folder = None
    elif path.suffix in {".yaml", ".yml"} or path.is_file():
        where = str(path)
        raw = read_yaml(path)
        folder = path.parent
    else:
        by = f"{seen[-1]}: extends: " if seen else ""
        raise PrfaasError(
            f"{by}unknown scenario {spec!r}; shipped: {', '.join(scenario_names())}; or give a path to a .yaml file"
        )
    workload = raw.get("workload")
    arrivals = workload.get("arrivals") if isinstance(workload, dict) else None
    for part in (workload, arrivals, raw.get("link_capacity")):
        _resolve_file(part, folder)
    parent = raw.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise PrfaasError(f"{where}: extends: must be a scenario name or path, found {parent!r}")
        if folder is not None and parent not in scenario_names():
            parent = str(folder / parent)
        base, _ = _read(parent, (*seen, identity))
        raw = _merge(base, raw)
    return raw, where


def _resolve_file(part: Any, folder: Path | None) -> None:
    """A file is relative to the scenario that names it; made absolute, so that a shown scenario can be moved."""
    if folder is None or not isinstance(part, dict):
        return
    file = part.get("file")
    if isinstance(file, str) and not file.startswith("bundled:") and not Path(file).is_absolute():
        part["file"] = str((folder / file).resolve())


def _override(raw: dict[str, Any], assignment: str) -> None:
    """Apply one `dotted.path=value` (value in YAML; list items by number) to the raw fields."""
    path, separator, text = assignment.partition("=")
    if not separator or not path:
        raise PrfaasError(f"--set {assignment!r}: write it as field.path=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise PrfaasError(f"--set {assignment!r}: the value is not valid YAML") from None
    node: Any = raw
    parts = path.split(".")
    model = raw.get("model")
    if parts[0] == "model" and len(parts) > 1 and isinstance(model, str) and model in model_names():
        raw["model"] = load_model(model).model_dump(mode="json")  # a name stands for the fields of that model
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        key: Any = part
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise PrfaasError(f"--set {path}: {part!r} is not an item of a list of {len(node)}")
            key = int(part)
        elif not isinstance(node, dict):
            raise PrfaasError(f"--set {path}: {'.'.join(parts[:position])!r} holds a plain value, not fields")
        if last:
            node[key] = value
        else:
            if isinstance(node, dict) and key not in node:
                node[key] = {}
            node = node[key]


def apply_overrides(raw: dict[str, Any], assignments: Sequence[str]) -> None:
    """Apply `dotted.path=value` assignments to raw fields in order; PrfaasError for one that cannot be."""
    for assignment in assignments:
        _override(raw, assignment)


def value_at(model: BaseModel, path: str) -> Any:
    """Value of a field of a model by the path that an override would name it with; None where there is none."""
    node: Any = model.model_dump(mode="json")
    for part in path.split("."):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return None
    return node


def _validate(raw: Mapping[str, Any], where: str) -> Scenario:
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        raise first_error(error, where) from None


def load_scenario(
    spec: str | Path | Scenario, *, deployment: str | None = None, overrides: Sequence[str] = ()
) -> Scenario:
    """A scenario by shipped name, path of a YAML file, or as it is.

    Args:
        spec: shipped name, path, or a Scenario.
        deployment: name or path of another scenario whose `deployment` section replaces this one's
            (`homogeneous`: 0/9/3, `naive`: 4/0/8).
        overrides: `dotted.path=value` assignments, applied last.

    Raises:
        PrfaasError: one line that names the file and the field.
    """
    if isinstance(spec, Scenario):
        raw: dict[str, Any] = spec.model_dump(mode="json")
        where = f"scenario {spec.name}"
        if deployment is None and not overrides:
            return spec
    else:
        raw, where = _read(str(spec))
    if deployment is not None:
        other, other_where = _read(deployment)
        if "deployment" not in other:
            raise PrfaasError(f"{other_where}: has no deployment section")
        raw = {**raw, "deployment": other["deployment"]}
        if raw.get("name") != deployment:
            raw["name"] = f"{raw.get('name')}@{deployment}"
    apply_overrides(raw, overrides)
    return _validate(raw, where)


def scenario_yaml(scenario: Scenario) -> str:
    """The whole resolved scenario as YAML; `load_scenario` of it gives an equal scenario."""
    return yaml.safe_dump(scenario.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
