"""The prefix pools as the compiled engine uses them; twin of `simpy_prefix`. `C` is the array of `prefix_pool`."""

from __future__ import annotations

from prfaas_env.matching import SEE_NOW
from prfaas_env.simulator import layout as L
from prfaas_env.simulator import prefix_pool as X
from prfaas_env.simulator.formulas import IntArray
from prfaas_env.simulator.prefix_pool import begin_copy, cached_blocks, claim, view_of


def link_pool(Z: IntArray, k: int) -> int:
    """Cluster at the remote end of link k."""
    return Z[Z[L.O_LINK] + k * L.W_LINK + L.K_POOL]


def seen_tokens(Z: IntArray, C: IntArray, P: IntArray, pool: int, r: int, input_tokens: int) -> int:
    """Cached tokens of a request in a cluster, as routing sees them; without pools what a hit rate declares."""
    if C[X.ON] == 0:
        return P[r, L.P_HAD]
    return cached_blocks(C, pool, r, input_tokens, view_of(C, Z[L.NOW])) * C[X.BLOCK_TOKENS]


def seen_prefix(Z: IntArray, C: IntArray, P: IntArray, pd: int, r: int, input_tokens: int) -> int:
    """Cached prefix that the cache rule counts at the door (paper 5.1).

    Scarce: what the PD cluster has. Abundant: the longest of the PD cluster and all linked PrfaaS clusters.
    """
    site = Z[L.O_PD] + pd * L.W_PD
    prefix = seen_tokens(Z, C, P, Z[site + L.D_POOL], r, input_tokens)
    if Z[site + L.D_ABUNDANT] != 0 and C[X.ON] != 0:
        at = Z[L.O_LINKS_OF_PD] + pd * max(Z[L.N_LINK], 1)
        for n in range(Z[site + L.D_N_LINKS]):
            prefix = max(prefix, seen_tokens(Z, C, P, link_pool(Z, Z[at + n]), r, input_tokens))
    return prefix


def other_side(
    Z: IntArray, C: IntArray, pd: int, r: int, input_tokens: int, k: int, view: int
) -> tuple[int, int]:
    """(link, blocks found at its remote end): of link k, or with k < 0 of the link whose cluster has most (the first).

    (-1, 0) where the other side does not count: local prefill under the scarce rule, or no link.
    """
    if k >= 0:
        return k, cached_blocks(C, link_pool(Z, k), r, input_tokens, view)
    site = Z[L.O_PD] + pd * L.W_PD
    best = -1
    most = 0
    if Z[site + L.D_ABUNDANT] != 0:
        at = Z[L.O_LINKS_OF_PD] + pd * max(Z[L.N_LINK], 1)
        for n in range(Z[site + L.D_N_LINKS]):
            blocks = cached_blocks(C, link_pool(Z, Z[at + n]), r, input_tokens, view)
            if best < 0 or blocks > most:
                best = Z[at + n]
                most = blocks
    return best, most


def claim_prefix(Z: IntArray, C: IntArray, P: IntArray, pd: int, r: int, k: int) -> tuple[int, int, int]:
    """Decide from what is really cached now what an accepted request need not compute; pin that.

    Gives (tokens its prefill need not compute, link of a copy ahead of it or -1, tokens to copy), and notes in P what
    the PD cluster has and need not be sent.
    """
    site = Z[L.O_PD] + pd * L.W_PD
    pd_pool = Z[site + L.D_POOL]
    abundant = Z[site + L.D_ABUNDANT] != 0
    input_tokens = P[r, L.P_INPUT]
    own = cached_blocks(C, pd_pool, r, input_tokens, SEE_NOW)
    link, found = other_side(Z, C, pd, r, input_tokens, k, SEE_NOW)
    here = own if k < 0 else found
    used = max(own, found) if abundant else here
    P[r, L.P_HAD] = (used if k < 0 else own) * C[X.BLOCK_TOKENS]
    view = view_of(C, Z[L.NOW])
    if view != SEE_NOW:
        seen_own = cached_blocks(C, pd_pool, r, input_tokens, view)
        _, seen_found = other_side(Z, C, pd, r, input_tokens, k, view)
        expected = seen_own if k < 0 else seen_found
        if abundant:
            expected = max(seen_own, seen_found)
        C[X.MISPREDICTIONS] += 1 if used < expected else 0
    other = link_pool(Z, link) if k >= 0 or used > here else -1
    claim(C, r, input_tokens, pd_pool, own, other, found if other >= 0 else 0, used)
    if used == here:
        return used * C[X.BLOCK_TOKENS], -1, 0
    begin_copy(C, r, pd_pool if k < 0 else other, used)
    return used * C[X.BLOCK_TOKENS], link, (used - here) * C[X.BLOCK_TOKENS]
