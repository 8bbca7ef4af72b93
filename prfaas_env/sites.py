"""Deployments with several clusters: what of the remote side counts for each PD cluster when it is planned.

Each PD cluster is planned by itself. A PrfaaS cluster that several PD clusters are linked to is divided between
them in proportion to their arrivals; a link belongs to one pair, so it is not divided. With one cluster of each
kind the share is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas_env.profiles.latency import DecodeProfile, PrefillProfile
from prfaas_env.scenarios.models import Deployment, Link, PdCluster, PrfaasCluster, Scenario


@dataclass(frozen=True, slots=True)
class RemoteRoute:
    """One link of a PD cluster and the PrfaaS cluster behind it.

    `k` and `j` are their places in the deployment; `rivals` those of all PD clusters linked to that PrfaaS cluster,
    this one included, and `share` the part of it that counts here.
    """

    k: int
    j: int
    link: Link
    cluster: PrfaasCluster
    prefill: PrefillProfile
    rivals: tuple[int, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Site:
    """What is fixed of one PD cluster (number `index`) and of the remote side it can reach, in the order of links."""

    index: int
    cluster: PdCluster
    routes: tuple[RemoteRoute, ...]
    prefill: PrefillProfile
    decode: DecodeProfile

    @property
    def links(self) -> tuple[int, ...]:
        """Places of its links in the deployment."""
        return tuple(route.k for route in self.routes)

    @property
    def splits(self) -> range:
        """Numbers of prefill instances that its floors allow; "no local prefill" is left out."""
        n_local = self.cluster.n_prefill + self.cluster.n_decode
        return range(max(1, self.cluster.prefill_floor), n_local - self.cluster.min_decode + 1)


def share_of(arrivals: Sequence[float], place: int) -> float:
    """Part of a shared PrfaaS cluster that goes to PD cluster `place`: its arrivals over those of all that share it.

    Without any arrivals every one gets the same.

    Args:
        arrivals: arrival rates, or weights, of the PD clusters that share it.
        place: position in `arrivals`.
    """
    total = sum(arrivals)
    return arrivals[place] / total if total > 0 else 1.0 / len(arrivals)


def arrival_shares(deployment: Deployment) -> tuple[float, ...]:
    """Share of the scenario's arrivals at the door of each PD cluster; they add up to 1."""
    total = sum(cluster.arrival_share for cluster in deployment.pd)
    return tuple(cluster.arrival_share / total for cluster in deployment.pd)


#: (place of the PrfaaS cluster, place of the PD cluster) of each link.
LinkPairs = tuple[tuple[int, int], ...]


def link_pairs(deployment: Deployment) -> LinkPairs:
    """Which clusters each link joins, by place: what the observation's link groups mean."""
    pd_place = {cluster.name: i for i, cluster in enumerate(deployment.pd)}
    prfaas_place = {cluster.name: j for j, cluster in enumerate(deployment.prfaas)}
    return tuple((prfaas_place[link.prfaas], pd_place[link.pd]) for link in deployment.links)


def link_difference(now: LinkPairs, then: LinkPairs) -> str:
    """One line that names the links which join other clusters now than then; empty if none does.

    Two deployments with as many clusters and links have the same observation fields, which then mean other links.
    """
    return "; ".join(
        f"link{k} joins prfaas{a[0]} and pd{a[1]}, was prfaas{b[0]} and pd{b[1]}"
        for k, (a, b) in enumerate(zip(now, then, strict=False))
        if a != b
    )


def sites_of(scenario: Scenario) -> tuple[Site, ...]:
    """One `Site` per PD cluster, in the order of the deployment."""
    deployment = scenario.deployment
    pd_place = {cluster.name: i for i, cluster in enumerate(deployment.pd)}
    prfaas_place = {cluster.name: j for j, cluster in enumerate(deployment.prfaas)}
    rivals: dict[str, list[int]] = {}
    for link in deployment.links:
        rivals.setdefault(link.prfaas, []).append(pd_place[link.pd])
    sites = []
    for i, cluster in enumerate(deployment.pd):
        hardware = scenario.hardware_of(cluster)
        assert hardware.decode is not None  # a scenario refuses a PD cluster that cannot decode
        routes = []
        for k, link in enumerate(deployment.links):
            if link.pd == cluster.name:
                remote = deployment.prfaas[prfaas_place[link.prfaas]]
                there = tuple(rivals[link.prfaas])
                weights = [deployment.pd[r].arrival_share for r in there]
                routes.append(
                    RemoteRoute(
                        k=k,
                        j=prfaas_place[link.prfaas],
                        link=link,
                        cluster=remote,
                        prefill=scenario.hardware_of(remote).prefill,
                        rivals=there,
                        share=share_of(weights, there.index(i)),
                    )
                )
        sites.append(Site(i, cluster, tuple(routes), hardware.prefill, hardware.decode))
    return tuple(sites)
