"""What is written beside the weights of a policy, and the checks before they are used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import ValidationError

from prfaas_agents.settings import ActivationName, AlgorithmName
from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.bundle_manifest import CodecRecord, TelemetryRecord, TrainedOn
from prfaas_env.policy import PolicyContext
from prfaas_env.sites import link_pairs

POLICY_FILE = "policy.zip"
RECORD_FILE = "policy.json"


class PolicyRecord(Frozen):
    """`policy.json`: everything that `policy.zip` does not say about itself."""

    format: Literal[1] = 1
    algorithm: AlgorithmName = "ppo"
    telemetry: TelemetryRecord
    links: tuple[tuple[int, int], ...] | None = None
    """(PrfaaS cluster, PD cluster) that each link joined, by place; None where it was not kept."""
    action: CodecRecord
    decision_interval_s: float
    hidden: tuple[int, ...]
    activation: ActivationName = "tanh"
    network: dict[str, int] = pydantic.Field(default_factory=dict)
    """Sizes of the network beside `hidden`, by Stable-Baselines3's names."""
    weights_sha256: str
    steps: int
    reward: str
    trained_on: tuple[TrainedOn, ...]
    training_seed: int
    seed_ranges: dict[str, tuple[int, int]]
    """[first, end) of the episode seeds by purpose."""
    validation: dict[str, Any]
    versions: dict[str, str]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def resolve(path: str | Path) -> Path:
    """The policy file of a path that is either that file or its folder; PrfaasError when there is none."""
    given = Path(path)
    file = given / POLICY_FILE if given.is_dir() else given
    if not file.is_file():
        raise PrfaasError(f"policy file {file}: not found; give FOLDER/{POLICY_FILE} of a training run")
    return file


def read_record(file: Path) -> PolicyRecord:
    """The record beside a policy file; PrfaasError with the fault in one line."""
    beside = file.with_suffix(".json")
    try:
        raw = json.loads(beside.read_text(encoding="utf-8"))
    except OSError as error:
        raise PrfaasError(
            f"{beside}: cannot be read: {error.strerror}; it belongs beside {file.name}"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PrfaasError(f"{beside}: is not JSON: {error}") from None
    try:
        record = PolicyRecord.model_validate(raw)
    except ValidationError as error:
        raise first_error(error, str(beside)) from None
    if file_sha256(file) != record.weights_sha256:
        raise PrfaasError(f"{file}: is not the file that {beside.name} beside it describes")
    return record


def check_fits(record: PolicyRecord, context: PolicyContext, file: Path) -> None:
    """Refuse a policy that was trained on another observation; the message names the fields or links."""
    misfit = record.telemetry.misfit(context.schema, record.links, link_pairs(context.scenario.deployment))
    if misfit:
        raise PrfaasError(f"policy {file}: {misfit}")
