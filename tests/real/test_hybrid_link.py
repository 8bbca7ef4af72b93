"""Layer-wise sending over a really shaped link: what is left to send when the prefill ends.

The link carries the cache of a prompt in about the time of its prefill. Sent layer by layer while it is computed, about
one layer's share is left at the end; fetched afterwards, all of it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from prfaas_env.simulator.formulas import BITS_PER_BYTE
from prfaas_serving.backends.vllm_nixl import PREFILL_PARAMS
from tests.real.engines import START_S
from tests.real.hybrid import MODELS, HybridEngine, folder_of, layout_of
from tests.real.net import BURST_BYTES, FAR, NEAR, ShapedNetwork
from tests.real.support import COMPLETIONS, Prompts, asked, direct, ids_of, run, say

#: Long enough that a prefill takes a second, in pieces of 256 tokens.
TOKENS = {"qwen3-next": 4000, "kimi-linear": 1000}
PREFILLS = "prfaas_worker_prefill_seconds_count"


@dataclass
class Linked:
    """A prefill worker behind the link, a decode worker before it."""

    model: str
    remote: HybridEngine
    decode: HybridEngine
    net: ShapedNetwork


@pytest.fixture(scope="module", params=MODELS)
def linked(request: pytest.FixtureRequest) -> Iterator[Linked]:
    """Started once per model, killed and taken down whatever happens."""
    try:
        net = ShapedNetwork()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    model = request.param
    remote = HybridEngine(
        f"link-{model}-remote", folder_of(model), "prefill", host=FAR, namespace=net.namespace
    )
    decode = HybridEngine(f"link-{model}-decode", folder_of(model), "decode", host=NEAR)

    async def up() -> None:
        async with direct() as session:
            await asyncio.gather(remote.ready(session), decode.ready(session))

    try:
        remote.start()
        decode.start()
        run(up, START_S + 60.0)
        yield Linked(model, remote, decode, net)
    finally:
        remote.close()
        decode.close()
        net.close()


async def _prefills(session: aiohttp.ClientSession, engine: HybridEngine) -> float:
    async with session.get(engine.url + "/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith(PREFILLS + " "):
                return float(line.split()[1])
    raise AssertionError(f"{PREFILLS} is not on the page")


async def _sent(
    linked: Linked, session: aiohttp.ClientSession, prompt: list[int], *, afterwards: bool
) -> dict[str, Any]:
    """Prefill there, decode here; gives the record of the transfer. `afterwards`: fetched once all is computed."""
    before = await _prefills(session, linked.remote)
    body = {**asked(prompt, 1), "kv_transfer_params": PREFILL_PARAMS}
    status, answer = await linked.remote.post(session, COMPLETIONS, body)
    assert status == 200, answer
    while afterwards and await _prefills(session, linked.remote) == before:
        await asyncio.sleep(0.02)
    handed = {**asked(prompt, 4), "kv_transfer_params": answer["kv_transfer_params"]}
    status, decoded = await linked.decode.post(session, COMPLETIONS, handed)
    assert status == 200, decoded
    status, alone = await linked.decode.post(session, COMPLETIONS, asked(prompt, 4))
    assert ids_of(decoded) == ids_of(alone)
    record = (await linked.remote.transfers(session))[-1]
    assert record["outcome"] == "done"
    assert record["tensor_bytes"] == layout_of(linked.model).transfer_bytes(len(prompt) - 1)
    return record


def test_about_one_layers_share_is_left_at_the_end(linked: Linked) -> None:
    """Time from the end of the prefill to the arrival of the cache, against that of one layer's share."""

    async def work() -> None:
        layout, tokens, prompts = layout_of(linked.model), TOKENS[linked.model], Prompts(17)
        async with direct() as session:
            # the first one gets everything ready
            warm = [await _sent(linked, session, prompts.fresh(tokens), afterwards=True) for _ in range(3)]
            n_bytes, prefill_s = warm[0]["tensor_bytes"], min(record["prefill_s"] for record in warm)
            rate_bps = round(n_bytes * BITS_PER_BYTE / prefill_s)
            linked.net.set_rate(rate_bps)
            whole_s = n_bytes * BITS_PER_BYTE / rate_bps
            share_s = whole_s / layout.n_layers
            after = await _sent(linked, session, prompts.fresh(tokens), afterwards=True)
            overlapped = [
                await _sent(linked, session, prompts.fresh(tokens), afterwards=False) for _ in range(5)
            ]
        tails_s = [record["tail_s"] for record in overlapped]
        prefills_s = [record["prefill_s"] for record in overlapped]
        say(
            f"{linked.model}: {n_bytes:,} B over {rate_bps / 1e6:.1f} Mbit/s take {whole_s:.2f} s, one of "
            f"{layout.n_layers} layers' share {share_s:.2f} s; prefills of {_list(prefills_s)} s left a tail of "
            f"{_list(tails_s)} s layer by layer; fetched afterwards it is {after['tail_s']:.2f} s"
        )
        # what was fetched afterwards took the link's whole time: the link is really that slow
        assert after["tail_s"] > 0.7 * (whole_s - BURST_BYTES * BITS_PER_BYTE / rate_bps)
        # a prefill that the machine gave more of its time to ended before the link could keep up
        behind_s = [max(whole_s - prefill_s, 0.0) for prefill_s in prefills_s]
        left_s = statistics.median(tail - behind for tail, behind in zip(tails_s, behind_s, strict=True))
        assert left_s < 2.0 * share_s + 0.1
        assert statistics.median(tails_s) < 0.6 * after["tail_s"]

    run(work, 300.0)


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
