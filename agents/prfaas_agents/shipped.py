"""The policy that ships with the project, by name: `learned`. It needs onnxruntime (extra `policy`), not torch."""

from __future__ import annotations

from pathlib import Path

from prfaas_env.bundle import BundlePolicy

#: The bundle that `learned` is; see its MODEL_CARD.md for what it was trained on and where it loses.
BUNDLE = Path(__file__).resolve().parent / "shipped" / "one_site"


def learned(sample: bool = False, seed: int | None = None) -> BundlePolicy:
    """The shipped bundle as a policy, for one PD cluster and one PrfaaS cluster.

    Args:
        sample: draw from the network's distribution; default the best action.
        seed: of the draws.

    Raises:
        PrfaasError: in `reset`, a deployment of another topology.
    """
    return BundlePolicy(str(BUNDLE), sample, seed)
