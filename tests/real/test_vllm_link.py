"""Two real vLLM workers with a really shaped link between them: transfer times, and a link that is cut.

The prefill worker lives in a network namespace; everything between it and the decode worker crosses a veth pair with a
token bucket.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from prfaas_env.simulator.formulas import BITS_PER_BYTE, flow_end_ns
from prfaas_serving.exchange import Exchange
from tests.real.engines import LEASE_S, START_S, Engine
from tests.real.models import folder_of, layout_of
from tests.real.net import FAR, NEAR, ShapedNetwork
from tests.real.support import Live, Pair, Prompts, direct, ids_of, routing, run, say, streamed_ids, watched
from tests.serving.support import until

PAGE_TOKENS = 128
ALWAYS = 0.0


@dataclass
class LinkedPair(Pair):
    """Two workers and the link between them."""

    net: ShapedNetwork
    prompts: Prompts


@pytest.fixture(scope="module")
def pair() -> Iterator[LinkedPair]:
    """Started once, killed and taken down whatever happens."""
    try:
        net = ShapedNetwork()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    model = folder_of("dense")
    remote = Engine("link-remote", model, "prefill", host=FAR, device=net.far, namespace=net.namespace)
    decode = Engine("link-decode", model, "decode", host=NEAR, device=net.near)

    async def up() -> None:
        async with direct() as session:
            await asyncio.gather(remote.ready(session), decode.ready(session))
        async with routing(Pair(remote, decode).places, ALWAYS) as live:
            # the first hand-over of two workers gets to know each other
            assert (await live.ask(Prompts(4).fresh(200), 1)).headers["X-Prfaas-Route"] == "remote"

    try:
        remote.start()
        decode.start()
        run(up, START_S + 100.0)
        yield LinkedPair(remote, decode, net, Prompts(2))
    finally:
        remote.close()
        decode.close()
        net.close()


@pytest.mark.parametrize("rate_mbps", [200, 50])
def test_transfer_times_are_those_of_the_link_formula(pair: LinkedPair, rate_mbps: int) -> None:
    """The engine's own transfer time against the simulator's for the same bytes, within 10%."""

    async def work() -> None:
        rate_bps = rate_mbps * 1_000_000
        pair.net.set_rate(rate_bps)
        async with routing(pair.places, ALWAYS, link_bps=rate_bps) as live:
            for tokens in (4096, 8192):
                ratios, seconds, moved = [], [], 0.0
                for _ in range(3):
                    before = await pair.decode.figures(live.session)
                    crossed = pair.net.arrived_bytes
                    reply = await live.ask(pair.prompts.fresh(tokens), 2)
                    assert reply.status == 200, reply.body
                    assert reply.headers["X-Prfaas-Route"] == "remote"
                    crossed = pair.net.arrived_bytes - crossed
                    counted = (await pair.decode.figures(live.session)).since(before)
                    moved = counted.fetched_bytes
                    assert moved == layout_of("dense").reserved_bytes(tokens, PAGE_TOKENS)
                    assert moved < crossed < 1.15 * moved + 200_000, "it crossed this link, once"
                    predicted_s = flow_end_ns(0, moved * BITS_PER_BYTE, float(rate_bps)) / 1e9
                    seconds.append(counted.transfer_s)
                    ratios.append(counted.transfer_s / predicted_s)
                say(
                    f"link at {rate_mbps} Mbit/s: {moved / 1e6:.2f} MB took "
                    f"{', '.join(f'{1e3 * s:.0f}' for s in seconds)} ms, the formula says {1e3 * predicted_s:.0f} ms"
                )
                assert abs(statistics.median(ratios) - 1) < 0.10, ratios
            observed_bps = live.router.forwarder.paths.links["prfaas0"].observed_bps(time.monotonic())
            say(f"link at {rate_mbps} Mbit/s: the router observed {observed_bps / 1e6:.0f} Mbit/s")
            assert 0.3 * rate_bps < observed_bps <= rate_bps
            await live.idle()

    run(work)


@pytest.mark.parametrize("rate_mbps", [200, 50])
def test_the_link_is_cut_in_mid_transfer(
    pair: LinkedPair, rate_mbps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would wait for ever; the router's deadline does not. Same tokens, by local prefill."""

    async def work() -> None:
        rate_bps = rate_mbps * 1_000_000
        tokens = 4096 if rate_mbps == 50 else 6000
        prompt = pair.prompts.fresh(tokens)
        n_bytes = layout_of("dense").reserved_bytes(tokens, PAGE_TOKENS)
        pair.net.set_rate(rate_bps)
        deadlines = {"transfer_factor": 1.5, "transfer_floor_s": 0.5}
        with watched(monkeypatch) as seen:
            async with routing(pair.places, ALWAYS, link_bps=rate_bps, deadlines=deadlines) as live:
                await _cut(live, seen, prompt, n_bytes, rate_mbps)

    async def _cut(live: Live, seen: list[Exchange], prompt: list[int], n_bytes: int, rate_mbps: int) -> None:
        before, crossed = await pair.decode.figures(live.session), pair.net.arrived_bytes
        task = asyncio.create_task(live.ask(prompt, 8, stream=True))
        try:
            await until(
                lambda: pair.net.arrived_bytes - crossed > 0.3 * n_bytes, "the transfer is under way", 60.0
            )
            pair.net.cut()
            cut_s = time.monotonic()
            assert seen[0].phase == "transfer"
            await until(lambda: live.metric("deadline_hits_total", leg="transfer") == 1, "the deadline", 30.0)
            hit_s = time.monotonic()
            await until(lambda: seen[0].number == 2 and seen[0].phase == "decode", "the other way", 30.0)
            taken_s = time.monotonic()
            reply = await task
            first_s = reply.at_s[0]
            arrived = pair.net.arrived_bytes - crossed
            assert arrived < n_bytes, "the link was cut before everything was over"
            assert reply.status == 200, reply.body
            assert reply.headers["X-Prfaas-Route"] == "local"
            assert reply.headers["X-Prfaas-Reason"] == "transfer_deadline"
            assert taken_s - hit_s < 2.0
            counted = (await pair.decode.figures(live.session)).since(before)
            assert counted["nixl_bytes_transferred_count"] == 0, (
                "the engine itself has not given up nor finished"
            )
            say(
                f"link at {rate_mbps} Mbit/s cut with {arrived / n_bytes:.0%} of {n_bytes / 1e6:.1f} MB over: deadline "
                f"{hit_s - cut_s:.2f} s after the cut, other way {1e3 * (taken_s - hit_s):.0f} ms after it, "
                f"first token {first_s - hit_s:.2f} s after it"
            )
        finally:
            task.cancel()
            pair.net.mend()
        mended_s = time.monotonic()
        await live.idle(within_s=LEASE_S + 15.0)
        say(f"link at {rate_mbps} Mbit/s mended: all KV free after {time.monotonic() - mended_s:.1f} s")
        # the same pair of workers goes on
        await until(lambda: live.worker("remote").usable(time.monotonic()), "the far worker is back", 60.0)
        again = await live.ask(pair.prompts.fresh(1000), 4)
        assert again.status == 200
        # one process, past the router, with empty caches
        async with live.session.post(pair.decode.url + "/reset_prefix_cache") as answer:
            assert answer.status == 200
        assert streamed_ids(reply) == ids_of(await live.alone(pair.decode, prompt, 8))
        await live.idle()

    run(work, 240.0)
