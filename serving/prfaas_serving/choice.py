"""The route of a request at the door: the simulator's rule, from the router's own counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from prfaas_env.decision import offload_by_margin, offload_by_threshold
from prfaas_env.prediction import PathState
from prfaas_serving.cache_index import Blocks, PrefixIndex
from prfaas_serving.decisions import DecisionHolder
from prfaas_serving.fleet import Fleet, Pool, Worker
from prfaas_serving.paths import Paths

RouteKind = Literal["remote", "local", "alone"]


@dataclass(slots=True)
class Cached:
    """Tokens of one prompt that caches are believed to hold, and who holds most."""

    by_cluster: dict[str, int] = field(default_factory=dict)
    holder: dict[str, Worker] = field(default_factory=dict)
    decode_tokens: int = 0
    decode_holder: Worker | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt is prefilled: over a link (`remote`), by a local prefill worker, or where it is decoded."""

    kind: RouteKind
    cluster: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided at the door."""

    route: Route
    incremental_tokens: int
    cached_tokens: int
    """On the chosen path."""
    had_tokens: int
    """In the decode worker's cluster: not sent."""


class Chooser:
    """Applies the decision in force to requests.

    The comparison is `incremental > threshold` (at equality local), or `remote + margin < local` of predicted
    first-token times. A path without a usable worker is no path, whatever the decision says.
    """

    def __init__(
        self, fleet: Fleet, paths: Paths, holder: DecisionHolder, index: PrefixIndex | None, shared: bool
    ) -> None:
        self._fleet = fleet
        self._paths = paths
        self._holder = holder
        self._index = index
        self._shared = shared

    def cache_key(self, worker: Worker) -> str:
        """Name of the cache that a worker uses."""
        return worker.cluster if self._shared else worker.name

    def look_up(self, blocks: Blocks | None) -> Cached:
        """What each cluster has of a prompt."""
        found = Cached()
        if self._index is None or blocks is None or not blocks.hashes:
            return found
        match = self._index.match
        for pool in (*self._fleet.remote_prefill.values(), self._fleet.local_prefill):
            self._best(found, pool, lambda w: match(self.cache_key(w), blocks))
        for worker in self._fleet.decode.workers:
            tokens = match(self.cache_key(worker), blocks)
            if tokens > found.decode_tokens and not worker.known_down:
                found.decode_tokens, found.decode_holder = tokens, worker
        if not self._fleet.local_prefill.workers:
            found.by_cluster[self._fleet.pd] = found.decode_tokens
        return found

    def _best(self, found: Cached, pool: Pool, tokens_of: Callable[[Worker], int]) -> None:
        best = 0
        for worker in pool.workers:
            if worker.known_down:
                continue
            tokens = tokens_of(worker)
            if tokens > best:
                best = tokens
                found.holder[pool.cluster] = worker
            if self._shared:
                break  # one cache for all of them
        found.by_cluster[pool.cluster] = best

    def choose(self, tokens: int, cached: Cached, now_s: float) -> Choice:
        """The route of a prompt of so many tokens."""
        fleet, holder = self._fleet, self._holder
        own = cached.by_cluster.get(fleet.pd, 0)
        prefix = own
        if holder.cache_rule == "abundant":
            prefix = max((own, *cached.by_cluster.values()))
        incremental = tokens - prefix
        remote = [name for name, pool in fleet.remote_prefill.items() if pool.any_usable(now_s)]
        has_local = fleet.local_prefill_usable(now_s)
        had = max(own, cached.decode_tokens)
        if not remote:
            return self._local(incremental, own, "no_remote" if fleet.remote_prefill else "rule")
        if holder.margin_s is None:
            if has_local and not offload_by_threshold(incremental, holder.threshold_tokens):
                return self._local(incremental, own, "rule")
            if len(remote) == 1:
                return self._remote(remote[0], incremental, cached, had, has_local)
        best, best_s = remote[0], float("inf")
        for name in remote:
            found = cached.by_cluster.get(name, 0)
            state = fleet.remote_prefill[name].path_state(now_s)
            predicted_s = self._paths.remote_s(name, state, tokens - found, found, had, now_s)
            if predicted_s < best_s:
                best, best_s = name, predicted_s
        if holder.margin_s is not None and has_local:
            local_s = self._paths.local_s(self._local_state(now_s), tokens - own, own)
            if not offload_by_margin(best_s, local_s, holder.margin_s * self._paths.time_scale):
                return self._local(incremental, own, "rule")
        return self._remote(best, incremental, cached, had, has_local)

    def _local_state(self, now_s: float) -> PathState:
        pool = self._fleet.local_prefill
        return (pool if pool.any_usable(now_s) else self._fleet.decode).path_state(now_s)

    def _local(self, incremental: int, own: int, reason: str) -> Choice:
        kind: RouteKind = "local" if self._fleet.local_prefill.workers else "alone"
        return Choice(Route(kind, self._fleet.pd, reason), incremental, own, own)

    def _remote(self, name: str, incremental: int, cached: Cached, had: int, has_local: bool) -> Choice:
        reason = "rule" if has_local else "no_local"
        return Choice(Route("remote", name, reason), incremental, cached.by_cluster.get(name, 0), had)
