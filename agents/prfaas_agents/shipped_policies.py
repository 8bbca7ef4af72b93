"""The trained policies that come with the package, one bundle per topology; no torch is needed to run them."""

from __future__ import annotations

from pathlib import Path

from prfaas_env.base import PrfaasError
from prfaas_env.bundle import BundlePolicy

FOLDER = Path(__file__).parent / "shipped"


def topologies() -> list[str]:
    """Names of the topologies that have a bundle."""
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def learned(topology: str = "one_site") -> BundlePolicy:
    """The shipped policy `learned`.

    Args:
        topology: `one_site`: one PD cluster and one PrfaaS cluster with a link.

    Raises:
        PrfaasError: no bundle for such a topology, or what `BundlePolicy` raises (in `reset`, where a scenario has
            another topology than the bundle, its fields are named).
    """
    if topology not in topologies():
        raise PrfaasError(
            f"policy learned: no bundle for topology {topology!r}; there is {', '.join(topologies())}"
        )
    return BundlePolicy(FOLDER / topology)
