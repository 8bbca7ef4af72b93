"""`prfaas export`: the policy of a training run as a bundle."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas_agents.export import fill_bundle
from prfaas_agents.learned import LearnedPolicy, load_network
from prfaas_agents.record import PolicyRecord, read_record, resolve
from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import MANIFEST_FILE, BundleManifest, InputRanges
from prfaas_env.decision import Decision
from prfaas_env.policy import PolicyContext
from prfaas_env.simulator.run import simulate
from prfaas_env.telemetry import Telemetry
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.folders import check_folder, whole_folder
from prfaas_trainings.progress import progress_bar
from prfaas_trainings.randomise import drawn
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


#: Training episodes per scenario that the ranges of a policy's inputs are taken from.
RANGE_EPISODES = 8


class _Watched:
    """A policy that remembers the least and the greatest value of every field that it was shown."""

    constant = False

    def __init__(self, policy: LearnedPolicy) -> None:
        self._policy = policy
        self.decision_interval_s = policy.decision_interval_s
        self.low: NDArray[np.float64] | None = None
        self.high: NDArray[np.float64] | None = None
        self.readings = 0

    def reset(self, context: PolicyContext) -> None:
        """Start an episode."""
        self._policy.reset(context)

    def decide(self, telemetry: Telemetry) -> Decision:
        """The policy's decision."""
        there = telemetry.schema.present(telemetry.values)
        low, high = (np.where(there, telemetry.values, end) for end in (np.inf, -np.inf))
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)
        self.readings += 1
        return self._policy.decide(telemetry)

    def ranges(self) -> InputRanges:
        """What was seen."""
        assert self.low is not None
        assert self.high is not None
        low, high = (
            tuple(x if math.isfinite(x) else None for x in column.tolist())
            for column in (self.low, self.high)
        )
        return InputRanges(low=low, high=high, readings=self.readings)


def input_ranges(config: TrainingConfig, policy: LearnedPolicy) -> InputRanges:
    """What every telemetry field is while a policy runs on its training scenarios, drawn as in its last stage.

    The first `RANGE_EPISODES` training seeds of each scenario.
    """
    watched = _Watched(policy)
    stage, scenarios = config.stages()[-1], config.load_scenarios()
    seeds = config.training_seeds.seeds[:RANGE_EPISODES]
    with progress_bar("episodes for the input ranges", len(scenarios) * len(seeds)) as advance:
        for scenario in scenarios:
            for seed in seeds:
                played = drawn(scenario, stage.randomise, np.random.default_rng(seed))
                simulate(played, watched, seed=seed)
                advance()
    return watched.ranges()


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
            input_ranges=None if config is None else input_ranges(config, LearnedPolicy(file)),
        )
