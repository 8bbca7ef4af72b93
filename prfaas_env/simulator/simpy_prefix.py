"""The prefix pools as the SimPy engine uses them: what routing sees, what a request claims, copies."""

from __future__ import annotations

from typing import NamedTuple

from prfaas_env.matching import SEE_NOW
from prfaas_env.simulator import prefix_pool as pools
from prfaas_env.simulator.formulas import Ints
from prfaas_env.simulator.records import NO_PREFIX
from prfaas_env.simulator.world import World


class Claim(NamedTuple):
    """What an accepted request found.

    `cached_tokens` its prefill need not compute, `had_tokens` the PD cluster has and need not be sent;
    `copied_tokens` cross `copy_link` before the prefill (-1: none).
    """

    cached_tokens: int
    had_tokens: int
    copy_link: int = -1
    copied_tokens: int = 0


class PrefixSide:
    """All pools of one world. Pools are numbered as clusters: PrfaaS clusters first, then PD clusters.

    Without pools every cluster has what a hit rate of the workload declares cached.
    """

    def __init__(self, world: World) -> None:
        self.pools: Ints = pools.start_pools(world).tolist()
        self.on = self.pools[pools.ON] != 0
        self._input: list[int] = world.requests.input_tokens.tolist()
        self._declared: list[int] = world.requests.cached_tokens.tolist()
        self.block_tokens = self.pools[pools.BLOCK_TOKENS] if self.on else 0

    def counters(self) -> tuple[int, ...]:
        """`Totals.prefix`."""
        return tuple(self.pools[pools.INPUT_TOKENS : pools.N_SCALARS]) if self.on else NO_PREFIX

    def _tokens(self, pool: int, request: int, view: int) -> int:
        blocks = pools.cached_blocks(self.pools, pool, request, self._input[request], view)
        return blocks * self.block_tokens

    def seen_tokens(self, pool: int, request: int, now_ns: int) -> int:
        """Cached tokens of a request in a cluster, as routing sees them."""
        if not self.on:
            return self._declared[request]
        return self._tokens(pool, request, pools.view_of(self.pools, now_ns))

    def seen_prefix(self, request: int, pd_pool: int, others: list[int], abundant: bool, now_ns: int) -> int:
        """Cached prefix that the cache rule counts at the door (paper 5.1).

        Scarce: what the PD cluster has. Abundant: the longest of the PD cluster and all linked PrfaaS clusters.
        """
        prefix = self.seen_tokens(pd_pool, request, now_ns)
        if abundant:
            prefix = max((prefix, *(self.seen_tokens(other, request, now_ns) for other in others)))
        return prefix

    def claim(
        self,
        request: int,
        pd_pool: int,
        others: list[tuple[int, int]],
        link: int,
        abundant: bool,
        now_ns: int,
    ) -> Claim:
        """Decide from what is really cached now what an accepted request need not compute; pin that.

        Args:
            request: the request.
            pd_pool: pool of its PD cluster.
            others: (link, pool of its PrfaaS cluster) of every link of the PD cluster, in their order.
            link: link it goes over, -1 for local.
            abundant: the cache rule.
            now_ns: now.
        """
        if not self.on:
            return Claim(self._declared[request], self._declared[request])
        candidates = others if link < 0 else [pair for pair in others if pair[0] == link]
        expected, _, _, _ = self._use(
            request, pd_pool, candidates, link, abundant, pools.view_of(self.pools, now_ns)
        )
        cached, had, other_link, found = self._use(request, pd_pool, candidates, link, abundant, SEE_NOW)
        own = self._tokens(pd_pool, request, SEE_NOW)
        local_copy = link < 0 and cached > own
        other = dict(others)[other_link] if link >= 0 or local_copy else -1
        pools.claim(
            self.pools,
            request,
            self._input[request],
            pd_pool,
            own // self.block_tokens,
            other,
            found // self.block_tokens if other >= 0 else 0,
            cached // self.block_tokens,
        )
        if cached < expected:
            self.pools[pools.MISPREDICTIONS] += 1
        here = own if link < 0 else found
        if cached == here:
            return Claim(cached, had)
        target = pd_pool if link < 0 else other
        pools.begin_copy(self.pools, request, target, cached // self.block_tokens)
        return Claim(cached, had, other_link, cached - here)

    def _use(
        self,
        request: int,
        pd_pool: int,
        candidates: list[tuple[int, int]],
        link: int,
        abundant: bool,
        view: int,
    ) -> tuple[int, int, int, int]:
        """(tokens prefill need not compute, tokens not to be sent, link of the other side, tokens found there)."""
        own = self._tokens(pd_pool, request, view)
        other_link, found = -1, 0
        if link >= 0 or abundant:
            for candidate, pool in candidates:
                tokens = self._tokens(pool, request, view)
                if other_link < 0 or tokens > found:
                    other_link, found = candidate, tokens
        cached = own if link < 0 else found
        if abundant:
            cached = max(own, found)
        return cached, cached if link < 0 else own, other_link, found

    def hold(self, pool: int, request: int, n_bytes: int, now_ns: int) -> None:
        """A prefill starts in the cluster of `pool`: hold room for what it will send."""
        if self.on:
            pools.hold(self.pools, pool, request, n_bytes, now_ns)

    def prefill_ended(self, pool: int, pd_pool: int, request: int, now_ns: int) -> None:
        """A prefill is done: let its matches go, store its prompt."""
        if self.on:
            pools.prefill_ended(self.pools, pool, pd_pool, request, self._input[request], now_ns)

    def handed_over(self, pd_pool: int, request: int, remote: bool, now_ns: int) -> None:
        """A cache is at the decode side."""
        if self.on:
            pools.handed_over(self.pools, pd_pool, request, self._input[request], remote, now_ns)

    def release(self, request: int) -> None:
        """A prefill was lost: what it would have sent needs no room."""
        if self.on:
            pools.release(self.pools, request)

    def forget(self, pd_pool: int, request: int) -> None:
        """A request is given up."""
        if self.on:
            pools.forget(self.pools, pd_pool, request)

    def copy_ended(self, request: int, now_ns: int) -> None:
        """A copied prefix has arrived."""
        pools.copy_ended(self.pools, request, now_ns)
