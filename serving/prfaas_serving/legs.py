"""The legs of a request: places at workers, prefill and decode legs in the order of the backend, links, staged KV.

`Trip` is what is known of a request while it is on its way; `LegRunner` runs one try after another on the trip's
present route. Which route comes next is the exchange's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from aiohttp import ClientResponse
from multidict import CIMultiDict

from prfaas_serving import sse
from prfaas_serving.answers import Answer, prefill_answer, read_to_end, stream_failure, whole_answer
from prfaas_serving.backends import Flow, HandOver, Leg
from prfaas_serving.backends.vllm_mooncake import NoEngineId
from prfaas_serving.cache_index import Blocks
from prfaas_serving.choice import Cached, Choice, Route
from prfaas_serving.fleet import Attempt, NoWorker, Pool, Worker
from prfaas_serving.forward import Forwarder, Handle, Legs
from prfaas_serving.length import Prompt
from prfaas_serving.paths import Flow as LinkFlow
from prfaas_serving.requests import KV_BYTES_HEADER, Job, answer_headers, cached_tokens_of
from prfaas_serving.upstream import LegFailure

log = logging.getLogger("prfaas_serving.legs")

#: After a failed decode leg, how long its partner may take to say that it failed first.
_BLAME_S = 0.05
#: How long a prefill leg whose client has left may take to hand over a name for what it staged. Cut off in the moment
#: it answers, its cache would stay until the lease ends.
_LATE_S = 0.2


@dataclass(eq=False)
class Trip:
    """One client request on its way. Times are of the monotonic clock."""

    job: Job
    route: Route
    """The present one."""
    started_s: float = field(
        default_factory=lambda: time.monotonic()
    )  # looked up anew: tests replace the clock
    forced: Route | None = None
    """For canaries: take this route and no other."""
    pinned: Mapping[str, Worker] = field(default_factory=dict)
    """For the check of one worker: by role, who serves it though the pools would not send it anything."""
    number: int = 0
    """Of the present try; the first is 1."""
    phase: str = "queue"
    """queue, prefill, transfer, decode, stream or done."""
    first_token_s: float = 0.0
    """0 before it."""
    choice: Choice | None = None
    prompt: Prompt | None = None
    blocks: Blocks | None = None
    cached: Cached = field(default_factory=Cached)
    avoid: set[Worker] = field(default_factory=set)
    """Workers that have failed it."""
    prefill_tries: int = 0
    decode_tries: int = 0
    ran: Legs = field(default_factory=Legs)
    """When its legs ran; `legs_run` once it has ended."""

    @property
    def attempt_id(self) -> str:
        """Id of the try under way, the same on both legs."""
        return self.job.attempt_id(self.number)

    def legs_run(self) -> Legs:
        """When its legs ran; a prefill whose cache was not used is none of the answer's."""
        ran = replace(self.ran, attempts=max(self.number, 1))
        if self.route.kind == "alone":
            ran.prefill_cluster = ran.prefill_worker = None
            ran.prefill_sent_s = ran.prefill_ahead = ran.prefill_end_s = None
        return ran


class LegRunner:
    """The legs of one request, one try at a time.

    Args:
        shared: what all requests share.
        trip: the request.
    """

    def __init__(self, shared: Forwarder, trip: Trip) -> None:
        self._f = shared
        self.trip = trip
        self.prefill: Attempt | None = None
        """Place at a prefill worker."""
        self.decode: Attempt | None = None
        """Place at the worker whose answer the client gets."""
        self.handle: Handle | None = None
        """Staged KV that no decode worker has fetched yet."""
        self.link_flow: tuple[str, LinkFlow] | None = None
        """Cluster and share of its link."""
        self.response: ClientResponse | None = None
        self.fetching = False
        """Whether a decode worker was told to fetch KV and has not begun to answer."""
        self.cached_tokens: int | None = None
        """Cached prompt tokens that the prefill leg reported."""
        self._prefill_task: asyncio.Task[dict[str, Any]] | None = None
        self._decode_task: asyncio.Task[Answer] | None = None
        self._prefill_answered = False

    def may_be_alone(self) -> bool:
        """Whether there is a worker that can take a whole prompt by itself."""
        return self._f.backend.decode_alone or any(w.role == "both" for w in self._f.fleet.decode.workers)

    async def attempt(self) -> Answer:
        """One try on the present route.

        Raises:
            LegFailure: a leg failed before anything reached the client.
            NoWorker: a pool has nobody to give.
        """
        f = self._f
        if self.trip.route.kind == "alone":
            return await self._alone()
        if self.prefill is None and self.handle is None:
            await self._take_prefill()
        if f.backend.flow is Flow.SEQUENTIAL:
            return await self._sequential()
        if f.backend.flow is Flow.CONCURRENT:
            return await self._concurrent()
        return await self._single()

    # ------------------------------------------------------------------ places at workers

    def _pool(self) -> Pool:
        fleet = self._f.fleet
        return (
            fleet.local_prefill
            if self.trip.route.kind == "local"
            else fleet.remote_prefill[self.trip.route.cluster]
        )

    def _tokens(self) -> int:
        return 1 if self.trip.prompt is None else self.trip.prompt.tokens

    def _kv_bits(self) -> float:
        """Bits of KV that go from the prefill worker to the decode worker."""
        return self.link_flow[1].bits if self.link_flow is not None else self._f.paths.kv_bits(self._tokens())

    def _new_and_cached(self) -> tuple[int, int]:
        tokens = self._tokens()
        cached = min(self.trip.cached.by_cluster.get(self.trip.route.cluster, 0), tokens - 1)
        return tokens - cached, cached

    async def _take_prefill(self) -> None:
        f = self._f
        pool = self._pool()
        if "decode" not in self.trip.pinned and not f.fleet.decode.any_usable(time.monotonic()):
            raise NoWorker(f"no usable decode worker in {f.fleet.pd}", full=False)
        new, cached = self._new_and_cached()
        predicted_s = f.paths.prefill_s(self.trip.route.cluster, new, cached)
        if self.trip.route.kind == "remote":
            link = f.paths.links[self.trip.route.cluster]
            had = self.trip.choice.had_tokens if self.trip.choice is not None else 0
            self.link_flow = (self.trip.route.cluster, link.routed(f.paths.kv_bits(new + cached - had)))
        self.trip.phase = "queue"
        pinned = self.trip.pinned.get("prefill")
        if pinned is not None:
            self.prefill = pinned.begin(time.monotonic(), predicted_s, new)
        else:
            _, self.prefill = await pool.acquire(
                f.config.deadlines.queue_s,
                predicted_s,
                new,
                affinity=self.trip.cached.holder.get(self.trip.route.cluster),
                avoid=self.trip.avoid,
            )
        self.trip.prefill_tries += 1
        self.trip.phase = "prefill"
        ran, worker = self.trip.ran, self.prefill.worker
        ran.prefill_cluster, ran.prefill_worker = worker.cluster, worker.name
        ran.prefill_sent_s, ran.prefill_end_s = self.prefill.sent_s, None
        ran.prefill_ahead = len(worker.assigned) - 1

    async def _take_decode(self) -> Worker:
        f = self._f
        pinned = self.trip.pinned.get("decode")
        if pinned is not None:
            self.decode = pinned.begin(time.monotonic(), tokens=1)
            return pinned
        apart: Callable[[Worker], bool] | None = None
        if self.prefill is not None or self.handle is not None:
            source = self.handle.prefill if self.handle is not None else self.prefill.worker  # type: ignore[union-attr]
            now_s = time.monotonic()

            def apart(worker: Worker) -> bool:
                return f.fleet.pairs.apart(source.name, worker.name, now_s)

        worker, self.decode = await f.fleet.decode.acquire(
            f.config.deadlines.queue_s,
            tokens=self._tokens(),
            affinity=self.trip.cached.decode_holder,
            avoid=self.trip.avoid,
            apart=apart,
        )
        return worker

    def _prefill_deadline_s(self, place: Attempt) -> float:
        d = self._f.config.deadlines
        return d.prefill_floor_s + d.prefill_factor * place.worker.work_s(time.monotonic())

    def _transfer_deadline_s(self) -> float:
        """Time from the end of the prefill to the first content."""
        f, d = self._f, self._f.config.deadlines
        return f.paths.transfer_deadline_s(
            self.trip.route.cluster, self._kv_bits(), d.transfer_factor, d.transfer_floor_s, time.monotonic()
        )

    # ------------------------------------------------------------------ the flows

    async def _alone(self) -> Answer:
        """The whole request on one worker of the decode side."""
        f = self._f
        self.trip.phase = "queue"
        worker = await self._take_decode_alone()
        self.trip.phase = "decode"
        leg = f.backend.alone_leg(self.trip.job, worker)
        return await self._open_decode(worker, leg, f.config.deadlines.first_token_s, transfer=False)

    async def _take_decode_alone(self) -> Worker:
        f = self._f
        if f.backend.decode_alone:
            return await self._take_decode()
        others = {w for w in f.fleet.decode.workers if w.role != "both"}
        self.trip.avoid |= others
        worker = await self._take_decode()
        if worker in others:
            raise NoWorker("no worker of both roles is usable", full=False)
        return worker

    async def _sequential(self) -> Answer:
        f = self._f
        if self.handle is None:
            await self._prefill_leg()
        handle = self.handle
        if handle is None:  # nothing was handed over: the decode worker has to prefill
            self.settle_link(arrived=False)
            self.trip.route = Route("alone", f.fleet.pd, "no_handover")
            return await self._alone()
        self.trip.phase = "queue"
        worker = await self._take_decode()
        self.trip.phase = "transfer"
        leg = f.backend.decode_leg(self.trip.job, handle.prefill, worker, handle.handover)
        self._open_link()
        self.fetching = True
        self.trip.decode_tries += 1
        answer = await self._open_decode(worker, leg, self._transfer_deadline_s(), transfer=True)
        f.fetched(handle)
        self._transferred(handle.prefill, worker)
        return answer

    async def _prefill_leg(self) -> None:
        """Run the prefill leg; leaves `handle` None if it handed nothing over."""
        f, place = self._f, self.prefill
        assert place is not None
        worker = place.worker
        leg = f.backend.prefill_leg(self.trip.job, {})
        self._prefill_answered = False
        self._prefill_task = asyncio.get_running_loop().create_task(
            self._run_prefill(place, leg, self._prefill_deadline_s(place))
        )
        # not `await task`: were this request cancelled, so would be an answer that names staged KV
        await asyncio.wait({self._prefill_task})
        answer = self._prefill_task.result()
        self._prefill_task = None
        self.cached_tokens = cached_tokens_of(answer)
        self._prefilled(place)
        self.prefill = None
        handover = f.backend.read_prefill(answer)
        if handover is None:
            f.metrics.no_handover.labels(worker.name).inc()
            return
        self._new_peer(worker, handover)
        handle = Handle(worker, handover)
        f.hold(handle)
        if f.backend.mismatch(answer, handover):
            f.metrics.mismatches.labels(worker.name).inc()
            f.fetched(handle)  # it would kill whoever fetches it: left to its lease
            return
        self.handle = handle

    async def _run_prefill(self, place: Attempt, leg: Leg, deadline_s: float) -> dict[str, Any]:
        """Send a prefill leg and read its answer.

        Raises:
            LegFailure: also for an answer that says the engine gave up.
        """
        f, worker, began_s = self._f, place.worker, time.monotonic()
        response: ClientResponse | None = None
        try:
            async with asyncio.timeout(deadline_s):
                response = await f.upstream.send(
                    worker, self.trip.job, leg, self.trip.attempt_id, "prefill", resend=f.backend.resend
                )
                self._prefill_answered = True
                if response.status >= 400:
                    raise await f.upstream.refuse(response, "prefill")
                raw = await f.upstream.read(response, "prefill")
        except TimeoutError:
            f.metrics.deadlines.labels("prefill").inc()
            raise LegFailure("prefill", "timeout") from None
        finally:
            if response is not None:
                response.release() if response.content.at_eof() else response.close()
        answer = prefill_answer(raw, response.headers.get("Content-Type", ""))
        ended_s = self.trip.ran.prefill_end_s = time.monotonic()
        f.metrics.prefill_seconds.labels(self.trip.route.kind).observe(ended_s - began_s)
        return answer

    def _prefilled(self, place: Attempt) -> None:
        """A prefill has ended well."""
        f = self._f
        place.worker.answered()
        place.worker.probed = True
        f.fleet.release(place)
        if f.index is not None and self.trip.blocks is not None:
            f.index.store(f.chooser.cache_key(place.worker), self.trip.blocks)

    def _new_peer(self, worker: Worker, handover: HandOver) -> None:
        """A prefill worker with another engine id has started anew: what was known of its pairs is void."""
        engine_id = handover.get("remote_engine_id")
        if isinstance(engine_id, str) and engine_id != worker.engine_id:
            if worker.engine_id is not None:
                log.info("worker %s: new engine", worker.name)
                self._f.fleet.pairs.forget(worker.name)
                if self._f.index is not None:
                    self._f.index.forget(self._f.chooser.cache_key(worker))
            worker.engine_id = engine_id

    async def _concurrent(self) -> Answer:
        f, place = self._f, self.prefill
        assert place is not None
        prefill = place.worker
        decode = await self._take_decode()
        try:
            async with asyncio.timeout(f.config.upstream.connect_s):
                handover = await f.backend.open(self.trip.job, prefill, f.upstream.fetch_json)
        except (NoEngineId, TimeoutError):
            raise LegFailure("prefill", "connect") from None
        deadline_s = self._prefill_deadline_s(place)
        self._open_link()
        loop = asyncio.get_running_loop()
        self.trip.phase = "prefill"
        self.fetching = True
        self._prefill_task = loop.create_task(
            self._run_prefill(place, f.backend.prefill_leg(self.trip.job, handover), deadline_s)
        )
        self._decode_task = loop.create_task(
            self._open_decode(
                decode,
                f.backend.decode_leg(self.trip.job, prefill, decode, handover),
                deadline_s + self._transfer_deadline_s(),
                transfer=True,
            )
        )
        await self._both(self._prefill_task, self._decode_task)
        answer = self._decode_task.result()
        self._decode_task = None
        if answer.body is not None and not self._prefill_task.done():
            await asyncio.wait({self._prefill_task}, timeout=_BLAME_S)  # it knows the cached tokens
        if self._prefill_task.done():
            self._take_prefill_answer(self._prefill_task)
        self._transferred(prefill, decode)
        return answer

    async def _both(self, prefill: asyncio.Task[dict[str, Any]], decode: asyncio.Task[Answer]) -> None:
        """Wait until the decode leg has its first content; the first failure ends both.

        Raises:
            LegFailure: of the leg that failed first; of the prefill leg if both do at about the same time.
        """
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if prefill.done() and prefill.exception() is None and not decode.done():
            place = self.prefill
            if place is not None:
                place.worker.prefill_done(place, time.monotonic())
            self.trip.phase = "transfer"
            await asyncio.wait({decode})
        if not decode.done():
            error = prefill.exception()
            assert error is not None
            raise error
        error = decode.exception()
        if error is None:
            return
        if not prefill.done():
            await asyncio.wait({prefill}, timeout=_BLAME_S)
        first = prefill.exception() if prefill.done() and not prefill.cancelled() else None
        raise first or error

    def _take_prefill_answer(self, task: asyncio.Task[dict[str, Any]]) -> None:
        """Read what the prefill leg of a concurrent flow answered, if it did."""
        place, self.prefill, self._prefill_task = self.prefill, None, None
        if place is None:
            return
        if task.cancelled() or task.exception() is not None:
            self._f.fleet.release(place)
            return
        self.cached_tokens = cached_tokens_of(task.result())
        self._prefilled(place)

    def late_prefill_answer(self) -> None:
        """Read a prefill leg that ended after the first content did come, if there is one."""
        task = self._prefill_task
        if task is not None and task.done():
            self._take_prefill_answer(task)

    async def _single(self) -> Answer:
        """One request to the decode side, which runs the prefill elsewhere by itself."""
        f, place = self._f, self.prefill
        assert place is not None
        decode = await self._take_decode()
        leg = f.backend.decode_leg(self.trip.job, place.worker, decode, {})
        self._open_link()
        deadline_s = self._prefill_deadline_s(place) + self._transfer_deadline_s()
        try:
            answer = await self._open_decode(decode, leg, deadline_s, transfer=True)
        except LegFailure as failure:
            if failure.final:
                await self._refuse_gone(failure, place.worker, decode)
            raise
        f.fleet.shared_blame.worked(place.worker.name, decode.name)
        self._prefilled(place)
        self.prefill = None
        self._transferred(place.worker, decode)
        return answer

    async def _refuse_gone(self, failure: LegFailure, *workers: Worker) -> None:
        """Tell a request to a worker that does not exist any more from a client's mistake.

        Raises:
            LegFailure: a worker is gone.
        """
        f = self._f
        gone = await f.backend.gone(failure.status or 0, workers, f.upstream.fetch_json)
        if gone is not None:
            gone.state = "down"
            log.warning("worker %s is gone", gone.name)
            raise LegFailure("decode", "status", status=503, at=gone) from None

    # ------------------------------------------------------------------ links

    def _open_link(self) -> None:
        if self.link_flow is not None:
            name, flow = self.link_flow
            flow.at = "" if self.decode is None else self.decode.worker.name
            self._f.paths.links[name].opened(flow, time.monotonic())

    def settle_link(self, *, arrived: bool) -> None:
        """The share of a link is over."""
        if self.link_flow is not None:
            name, flow = self.link_flow
            self._f.paths.links[name].closed(flow, time.monotonic(), arrived)
            if arrived:
                self._f.metrics.kv_bytes.labels(name).inc(flow.bits / 8)
            self.link_flow = None

    def _asked(self, decode: Worker) -> None:
        """A decode worker that was told to fetch this prompt's KV has answered."""
        if self.trip.prompt is not None and self.trip.prompt.source != "estimate":
            decode.kv_asked_tokens += self.trip.prompt.tokens

    def _transferred(self, prefill: Worker, decode: Worker) -> None:
        f = self._f
        self.fetching = False
        decode.told_bits += self._kv_bits()
        self.settle_link(arrived=True)
        self._asked(decode)
        f.fleet.pairs.worked(prefill.name, decode.name)
        if f.index is not None and self.trip.blocks is not None:
            f.index.store(f.chooser.cache_key(decode), self.trip.blocks)

    # ------------------------------------------------------------------ the decode leg

    async def _open_decode(self, worker: Worker, leg: Leg, deadline_s: float, *, transfer: bool) -> Answer:
        """Send the leg whose answer the client gets, and wait for its first content.

        Raises:
            LegFailure: nothing of it may have reached the client.
        """
        f = self._f
        self.trip.ran.decode_worker, self.trip.ran.decode_sent_s = worker.name, time.monotonic()
        if not self.trip.job.stream:
            deadline_s += self._generation_s()
        try:
            async with asyncio.timeout(deadline_s):
                response = await f.upstream.send(
                    worker,
                    self.trip.job,
                    leg,
                    self.trip.attempt_id,
                    "decode",
                    resend=f.backend.resend or not transfer,
                )
                self.response = response
                if response.status >= 400:
                    raise await f.upstream.refuse(response, "decode")
                headers = answer_headers(response.headers, f.addresses())
                self.trip.ran.kv_bytes = _whole(response.headers.get(KV_BYTES_HEADER))
                if not self.trip.job.body:
                    self._first_token()  # another route: its answer is passed on as it is
                    return Answer(response, response.status, headers, None)
                if response.headers.get("Content-Type", "").startswith("text/event-stream"):
                    return await self._first_content(response, headers)
                body = await f.upstream.read(response, "decode")
        except TimeoutError:
            f.metrics.deadlines.labels("transfer" if transfer else "decode").inc()
            raise LegFailure("decode", "timeout", transfer=transfer) from None
        parsed = whole_answer(response, body)
        self._first_token()
        return Answer(response, response.status, headers, body, parsed=parsed)

    def _generation_s(self) -> float:
        """What an answer that is not streamed may take beyond its first token: its head comes with its end."""
        f, tokens = self._f, self.trip.job.max_output_tokens
        if tokens is None:
            return f.config.deadlines.total_s
        step_s = f.paths.step_s(f.paths.decode.slots)
        return min(f.config.deadlines.generation_factor * step_s * max(tokens, 0), f.config.deadlines.total_s)

    async def _first_content(self, response: ClientResponse, headers: CIMultiDict[str]) -> Answer:
        """Hold a stream until something was generated: until then another worker may still take over."""
        events, held = sse.Events(), b""
        while True:
            try:
                piece = await response.content.readany()
                block = events.whole(piece)
            except (aiohttp.ClientError, ConnectionError, TimeoutError, sse.EventTooLong):
                raise LegFailure("decode", "broken") from None
            if not piece:
                raise LegFailure("decode", "broken")
            if not block:
                continue
            held += block
            for event in sse.split(block):
                data = sse.data_of(event)
                chunk = None if data is None or data == b"[DONE]" else sse.parse(data)
                if chunk is None:
                    if data is not None:
                        raise LegFailure("decode", "broken")  # an end, or rubbish, before any content
                    continue
                error = sse.error_of(chunk)
                if error is not None:
                    raise stream_failure(error)
                if sse.has_content(chunk):
                    self._first_token()
                    return Answer(response, response.status, headers, None, held, events)

    def _first_token(self) -> None:
        f, now_s = self._f, time.monotonic()
        self.trip.first_token_s = now_s
        self.trip.phase = "stream"
        if self.decode is not None:
            self.decode.answering = True
        ttft_s = now_s - self.trip.started_s
        f.metrics.ttft.labels(self.trip.route.kind).observe(ttft_s)
        if self.trip.forced is None:
            for listener in f.listeners:
                listener.first_token(now_s, ttft_s, self.trip.route)

    # ------------------------------------------------------------------ giving up and the end

    def drop(self) -> None:
        """Give up the attempt under way; staged KV that another decode worker may fetch stays."""
        self._cancel_legs()
        prefill, decode = self.prefill, self.decode
        self.prefill = self.decode = None
        self._release_places(prefill, decode)
        if self.handle is None:
            self.settle_link(arrived=False)
        if self.response is not None:
            self.response.close()
            self.response = None

    def _release_places(self, *places: Attempt | None) -> None:
        for place in places:
            if place is not None:
                place.worker.breaker.abandoned(place.trial)
                self._f.fleet.release(place)

    def _cancel_legs(self) -> None:
        for task in (self._prefill_task, self._decode_task):
            if task is not None:
                if not task.done():
                    task.cancel()
                task.add_done_callback(_read)
        self._prefill_task = self._decode_task = None

    def give_back(self) -> None:
        """Have what is staged and routed for the present way given back."""
        self.settle_link(arrived=False)
        if self.handle is not None:
            self._f.release(self.handle, self.trip.job, self.trip.attempt_id)
            self.handle = None

    def close(self) -> None:
        """Give everything back; nothing is awaited."""
        f, late = self._f, self._prefill_task
        if late is not None and f.backend.flow is Flow.SEQUENTIAL:
            # its answer may be on the way: wait for it a moment, so that what it staged can be released
            place, self.prefill, self._prefill_task = self.prefill, None, None
            f.spawn(self._late(late, place))
        elif late is not None and late.done() and f.backend.flow is Flow.CONCURRENT:
            self._take_prefill_answer(late)
        self._cancel_legs()
        self._release_places(self.prefill, self.decode)
        self.give_back()
        response = self.response
        if response is None:
            return
        if self.trip.phase != "done":
            response.close()
        elif response.content.at_eof():
            response.release()
        else:
            f.spawn(read_to_end(response))

    async def _late(self, task: asyncio.Task[dict[str, Any]], place: Attempt | None) -> None:
        """The client left during a prefill leg: stop it, unless it has ended or is just about to."""
        f = self._f
        try:
            await asyncio.wait({task}, timeout=_LATE_S)
            if not self._prefill_answered:
                task.cancel()
            answer = await task
        except LegFailure as failure:
            if place is not None:
                f.blame(place, failure)
            return
        except asyncio.CancelledError:
            return
        finally:
            if place is not None:
                place.worker.breaker.abandoned(place.trial)
                f.fleet.release(place)
        handover = f.backend.read_prefill(answer)
        if handover is not None and place is not None:
            handle = Handle(place.worker, handover)
            f.hold(handle)
            f.release(handle, self.trip.job, self.trip.attempt_id)


def _read(task: asyncio.Task[Any]) -> None:
    """Take the outcome of a task nobody waits for."""
    if not task.cancelled():
        task.exception()


def _whole(text: str | None) -> int | None:
    """A whole number of a header, None if it is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None
