"""`prfaas export`: the policy of a training run as a bundle."""

from __future__ import annotations

from pathlib import Path

from prfaas_agents.export import fill_bundle
from prfaas_agents.learned import load_network
from prfaas_agents.record import PolicyRecord, read_record, resolve
from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import MANIFEST_FILE, BundleManifest
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.folders import check_folder, whole_folder


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


def export_run(run: Path, out: Path, *, name: str | None = None, force: bool = False) -> BundleManifest:
    """Write the policy of a run as a bundle, whole or not at all.

    Args:
        run: folder of a training or checkpoint, or a `policy.zip`.
        out: folder of the bundle.
        name: name for readers; by default that of the run's configuration, or of its folder.
        force: replace an earlier bundle in `out`.

    Raises:
        PrfaasError: no policy there, one that cannot be exported, a folder in use.
    """
    file = resolve(run)
    check_folder(out, MANIFEST_FILE, replace=force)
    record = read_record(file)
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
