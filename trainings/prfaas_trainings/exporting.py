"""`prfaas export`: the policy of a training run as a bundle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prfaas_agents.export import fill_bundle
from prfaas_agents.learned import load_network
from prfaas_agents.record import PolicyRecord, read_record, resolve
from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import MANIFEST_FILE, BundleManifest
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.folders import check_folder, whole_folder
from prfaas_trainings.results import METRICS


def _run_config(file: Path, record: PolicyRecord) -> TrainingConfig | None:
    """The configuration of the run that a policy file lies in, None where it is gone or of other scenarios."""
    for folder in (file.parent, file.parent.parent.parent):  # the run itself, or one of its checkpoints
        path = folder / "config.yaml"
        if not path.is_file():
            continue
        try:
            config = load_config(path)
            hashes = tuple(s.hash for s in config.load_scenarios())
        except PrfaasError:
            return None
        return config if hashes == tuple(t.hash for t in record.trained_on) else None
    return None


#: Figures of a comparison that a bundle keeps.
_KEPT = ("ttft_mean_s", "ttft_p90_s", "goodput_rps", "conversions")


def comparison_figures(path: Path, fingerprint: str) -> dict[str, Any]:
    """What a comparison found out about a policy, beside the others in it.

    Args:
        path: folder of a comparison, or its `metrics.json`.
        fingerprint: hash of the policy as the comparison gives it.

    Raises:
        PrfaasError: no such file, not a comparison, or one without this policy.
    """
    file = path / METRICS if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        labels = [row["label"] for row in raw["rows"]]
        own = [row["label"] for row in raw["rows"] if row["policy_hash"] == fingerprint]
        scenarios = {
            s["label"]: {
                label: {name: s["results"][label]["figures"][name] for name in _KEPT} for label in labels
            }
            for s in raw["scenarios"]
        }
        facts = {key: raw[key] for key in ("split", "seeds", "how_averaged")}
    except OSError as error:
        raise PrfaasError(f"--evaluation {file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PrfaasError(
            f"--evaluation {file}: is not the {METRICS} of a comparison ({type(error).__name__}: {error})"
        ) from None
    if not own:
        raise PrfaasError(
            f"--evaluation {file}: compares no policy with hash {fingerprint}, which is that of this one"
        )
    return {"policy": own[0], **facts, "scenarios": scenarios}


def export_run(
    run: Path, out: Path, *, name: str | None = None, force: bool = False, evaluations: Sequence[Path] = ()
) -> BundleManifest:
    """Write the policy of a run as a bundle, whole or not at all.

    Args:
        run: folder of a training or checkpoint, or a `policy.zip`.
        out: folder of the bundle.
        name: name for readers; by default that of the run's configuration, or of its folder.
        force: replace an earlier bundle in `out`.
        evaluations: comparisons with this policy, for the manifest and the card; by default the one in its folder.

    Raises:
        PrfaasError: no policy there, one that cannot be exported, a folder in use.
    """
    file = resolve(run)
    check_folder(out, MANIFEST_FILE, replace=force)
    record = read_record(file)
    fingerprint = record.weights_sha256[:12]
    found = [comparison_figures(path, fingerprint) for path in evaluations]
    if not evaluations and (file.parent / METRICS).is_file():
        with contextlib.suppress(PrfaasError):  # a comparison beside the policy may be one of others
            found = [comparison_figures(file.parent, fingerprint)]
    if found:
        record = record.model_copy(update={"validation": {**record.validation, "comparisons": found}})
    network = load_network(file, record)
    config = _run_config(file, record)
    clocks = (
        {s.control.conversion_interval_s for s in config.load_scenarios()} if config is not None else set()
    )
    own_name = config.name if config is not None else file.parent.resolve().name
    with whole_folder(out, MANIFEST_FILE) as folder:
        return fill_bundle(
            folder,
            network,
            record,
            name=name or own_name,
            description=config.description if config is not None else "",
            conversion_interval_s=clocks.pop() if len(clocks) == 1 else None,
        )
