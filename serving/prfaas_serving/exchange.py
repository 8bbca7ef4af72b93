"""The life of one request: route, legs, fall-back, stream, and giving everything back on every way out.

An `Exchange` is one client request. It opens an answer (trying again within the rules), and passes it on. Whatever
ends it, `close` gives places at workers back, cancels what still runs, and has staged KV released, each once.

Rules: at most two prefill tries; order other prefill worker, local prefill, decode worker alone; never after the first
byte went to the client; every further try costs one of the global retry budget; only prompts up to a set length fall
back to the local side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
import orjson
from aiohttp import ClientResponse
from multidict import CIMultiDict

from prfaas_serving import sse
from prfaas_serving.answers import (
    Answer,
    CutOff,
    PassedOn,
    prefill_answer,
    read_to_end,
    stream_failure,
    whole_answer,
)
from prfaas_serving.backends import Flow, HandOver, Leg
from prfaas_serving.backends.vllm_mooncake import NoEngineId
from prfaas_serving.cache_index import Blocks, blocks_of
from prfaas_serving.choice import Cached, Choice, Route
from prfaas_serving.fleet import Attempt, NoWorker, Pool, Worker
from prfaas_serving.forward import REFUSED_CODES, Ended, Forwarder, Handle, Legs, Outcome
from prfaas_serving.length import Prompt
from prfaas_serving.paths import Flow as LinkFlow
from prfaas_serving.requests import (
    REASON_HEADER,
    ROUTE_HEADER,
    ClientError,
    Job,
    answer_headers,
    cached_tokens_of,
    error_body,
    merge_usage,
    scrub,
)
from prfaas_serving.upstream import ILL, LegFailure

log = logging.getLogger("prfaas_serving.exchange")


#: Where a decode worker says how many bytes of KV it fetched (the project's own worker does).
KV_BYTES_HEADER = "X-Prfaas-Kv-Bytes"
#: After a failed decode leg, how long its partner may take to say that it failed first.
_BLAME_S = 0.05
#: How long a prefill leg whose client has left may take to hand over a name for what it staged. Cut off in the moment
#: it answers, its cache would stay until the lease ends.
_LATE_S = 0.2


class Sink(Protocol):
    """Where an answer goes."""

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Status and headers."""

    async def write(self, data: bytes) -> None:
        """A piece of the body."""


class Exchange:
    """One client request on its way."""

    def __init__(self, shared: Forwarder, job: Job) -> None:
        self._f = shared
        self.job = job
        self.started_s = time.monotonic()
        self.route = Route("alone", shared.fleet.pd, job.local_reason or "route")
        self.choice: Choice | None = None
        self.number = 0
        self.phase = "queue"
        self.first_token_s = 0.0
        self.output_events = self.output_tokens = 0
        self.tpot_s: float | None = None
        self.refused: str | None = None
        """Code of the refusal that the client got."""
        self.usage: dict[str, Any] | None = None
        self.legs = Legs()
        self.forced: Route | None = None
        """For canaries: take this route and no other."""
        self._prompt: Prompt | None = None
        self._blocks: Blocks | None = None
        self._cached = Cached()
        self._cached_tokens: int | None = None
        self._prefill: Attempt | None = None
        self._decode: Attempt | None = None
        self._handle: Handle | None = None
        self._flow: tuple[str, LinkFlow] | None = None
        self._prefill_task: asyncio.Task[dict[str, Any]] | None = None
        self._decode_task: asyncio.Task[Answer] | None = None
        self._response: ClientResponse | None = None
        self._prefill_answered = False
        self._fetching = False
        self._closed = False
        self._avoid: set[Worker] = set()
        self._prefill_tries = 0
        self._decode_tries = 0
        self._last: LegFailure | None = None
        self._answer: Answer | None = None
        self.stream_failed: str | None = None
        shared.open_requests += 1
        shared.budget.request()

    @property
    def attempt_id(self) -> str:
        """Id of the attempt under way, the same on both legs."""
        return self.job.attempt_id(self.number)

    # ------------------------------------------------------------------ opening

    async def open(self) -> Answer:
        """An answer whose first content has come.

        Raises:
            ClientError: the request is refused or every way failed.
        """
        f, job = self._f, self.job
        if self.forced is not None:
            self.route = self.forced
            self._prompt = Prompt(1, "estimate")
        elif job.local_reason is None:
            await self._decide()
        else:
            f.metrics.decisions.labels("alone", job.local_reason).inc()
            self.route = Route("alone", f.fleet.pd, job.local_reason)
        if self.route.kind != "remote" and not self._may_be_alone() and not f.fleet.local_prefill.workers:
            raise self._no_endpoint("no worker can take a whole prompt")
        if self.route.kind == "alone" and not self._may_be_alone():
            self.route = Route("local", f.fleet.pd, self.route.reason)
        while True:
            self.number += 1
            try:
                answer = await self._attempt()
                self._answer = answer
                return answer
            except LegFailure as failure:
                self._blame(failure)
                self._drop()
                self._last = failure
                if failure.final:
                    raise self._passed_on(failure) from None
                following = self._after(failure)
            except NoWorker as missing:
                self._drop()
                following = self._without_worker(missing)
            if following is None:
                raise self._given_up() from None
            self._retry(following)

    def _may_be_alone(self) -> bool:
        return self._f.backend.decode_alone or any(w.role == "both" for w in self._f.fleet.decode.workers)

    async def _decide(self) -> None:
        f, job = self._f, self.job
        prompt = await f.counter.count(job.body, job.chat)
        self._prompt = prompt
        if f.index is not None:
            self._blocks = blocks_of(prompt, f.index.block_tokens, f.config.length.chars_per_token)
            self._cached = f.chooser.look_up(self._blocks)
        self.choice = choice = f.chooser.choose(prompt.tokens, self._cached, self.started_s)
        self.route = choice.route
        if self._over_model_length(prompt):
            # the engine words this refusal; asking a decode worker first leaves nothing staged behind
            self.route = Route("alone" if self._may_be_alone() else "local", f.fleet.pd, "over_model_length")
        f.metrics.lengths.labels(prompt.source).inc()
        f.metrics.decisions.labels(self.route.kind, self.route.reason).inc()
        f.metrics.prompt_tokens.labels(self.route.kind).inc(prompt.tokens)
        for listener in f.listeners:
            listener.arrival(
                self.started_s, prompt.tokens, choice.incremental_tokens, choice.cached_tokens, self.route
            )

    def _over_model_length(self, prompt: Prompt) -> bool:
        """Whether a count (no estimate) says that every decode worker will refuse: no room for one token, or more
        asked for than the whole length. In between engines give what room there is."""
        if prompt.source == "estimate":
            return False
        limits = [w.max_model_len for w in self._f.fleet.decode.workers if w.max_model_len is not None]
        if not limits:
            return False
        return prompt.tokens >= max(limits) or (self.job.max_output_tokens or 0) > max(limits)

    async def _attempt(self) -> Answer:
        """One try on the present route."""
        f = self._f
        if self.route.kind == "alone":
            return await self._alone()
        if self._prefill is None and self._handle is None:
            await self._take_prefill()
        if f.backend.flow is Flow.SEQUENTIAL:
            return await self._sequential()
        if f.backend.flow is Flow.CONCURRENT:
            return await self._concurrent()
        return await self._single()

    # ------------------------------------------------------------------ places at workers

    def _pool(self) -> Pool:
        fleet = self._f.fleet
        return fleet.local_prefill if self.route.kind == "local" else fleet.remote_prefill[self.route.cluster]

    def _new_and_cached(self) -> tuple[int, int]:
        tokens = 1 if self._prompt is None else self._prompt.tokens
        cached = min(self._cached.by_cluster.get(self.route.cluster, 0), tokens - 1)
        return tokens - cached, cached

    async def _take_prefill(self) -> None:
        f = self._f
        pool = self._pool()
        if not f.fleet.decode.any_usable(time.monotonic()):
            raise NoWorker(f"no usable decode worker in {f.fleet.pd}", full=False)
        new, cached = self._new_and_cached()
        predicted_s = f.paths.prefill_s(self.route.cluster, new, cached)
        if self.route.kind == "remote":
            link = f.paths.links[self.route.cluster]
            had = self.choice.had_tokens if self.choice is not None else 0
            self._flow = (self.route.cluster, link.routed(f.paths.kv_bits(new + cached - had)))
        self.phase = "queue"
        _, self._prefill = await pool.acquire(
            f.config.deadlines.queue_s,
            predicted_s,
            new,
            affinity=self._cached.holder.get(self.route.cluster),
            avoid=self._avoid,
        )
        self._prefill_tries += 1
        self.phase = "prefill"
        legs, worker = self.legs, self._prefill.worker
        legs.prefill_cluster, legs.prefill_worker = worker.cluster, worker.name
        legs.prefill_sent_s, legs.prefill_end_s = self._prefill.sent_s, None
        legs.prefill_ahead = len(worker.assigned) - 1

    async def _take_decode(self) -> Worker:
        f = self._f
        apart: Callable[[Worker], bool] | None = None
        if self._prefill is not None or self._handle is not None:
            source = self._handle.prefill if self._handle is not None else self._prefill.worker  # type: ignore[union-attr]
            now_s = time.monotonic()

            def apart(worker: Worker) -> bool:
                return f.fleet.pairs.apart(source.name, worker.name, now_s)

        worker, self._decode = await f.fleet.decode.acquire(
            f.config.deadlines.queue_s,
            tokens=1 if self._prompt is None else self._prompt.tokens,
            affinity=self._cached.decode_holder,
            avoid=self._avoid,
            apart=apart,
        )
        return worker

    def _prefill_deadline_s(self, place: Attempt) -> float:
        d = self._f.config.deadlines
        return d.prefill_floor_s + d.prefill_factor * place.worker.work_s(time.monotonic())

    def _transfer_deadline_s(self) -> float:
        """Time from the end of the prefill to the first content."""
        f, d = self._f, self._f.config.deadlines
        new, cached = self._new_and_cached()
        bits = self._flow[1].bits if self._flow is not None else f.paths.kv_bits(new + cached)
        return f.paths.transfer_deadline_s(
            self.route.cluster, bits, d.transfer_factor, d.transfer_floor_s, time.monotonic()
        )

    # ------------------------------------------------------------------ the flows

    async def _alone(self) -> Answer:
        """The whole request on one worker of the decode side."""
        f = self._f
        self.phase = "queue"
        worker = await self._take_decode_alone()
        self.phase = "decode"
        leg = f.backend.alone_leg(self.job, worker)
        return await self._open_decode(worker, leg, f.config.deadlines.first_token_s, transfer=False)

    async def _take_decode_alone(self) -> Worker:
        f = self._f
        if f.backend.decode_alone:
            return await self._take_decode()
        others = {w for w in f.fleet.decode.workers if w.role != "both"}
        self._avoid |= others
        worker = await self._take_decode()
        if worker in others:
            raise NoWorker("no worker of both roles is usable", full=False)
        return worker

    async def _sequential(self) -> Answer:
        f = self._f
        if self._handle is None:
            await self._prefill_leg()
        handle = self._handle
        if handle is None:  # nothing was handed over: the decode worker has to prefill
            self._settle_link(arrived=False)
            self.route = Route("alone", f.fleet.pd, "no_handover")
            return await self._alone()
        self.phase = "queue"
        worker = await self._take_decode()
        self.phase = "transfer"
        leg = f.backend.decode_leg(self.job, handle.prefill, worker, handle.handover)
        self._open_link()
        self._fetching = True
        self._decode_tries += 1
        answer = await self._open_decode(worker, leg, self._transfer_deadline_s(), transfer=True)
        f.fetched(handle)
        self._transferred(handle.prefill, worker)
        return answer

    async def _prefill_leg(self) -> None:
        """Run the prefill leg; leaves `_handle` None if it handed nothing over."""
        f, place = self._f, self._prefill
        assert place is not None
        worker = place.worker
        leg = f.backend.prefill_leg(self.job, {})
        self._prefill_answered = False
        self._prefill_task = asyncio.get_running_loop().create_task(
            self._run_prefill(place, leg, self._prefill_deadline_s(place))
        )
        # not `await task`: were this request cancelled, so would be an answer that names staged KV
        await asyncio.wait({self._prefill_task})
        answer = self._prefill_task.result()
        self._prefill_task = None
        self._cached_tokens = cached_tokens_of(answer)
        self._prefilled(place)
        self._prefill = None
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
        self._handle = handle

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
                    worker, self.job, leg, self.attempt_id, "prefill", resend=f.backend.resend
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
        f.metrics.prefill_seconds.labels(self.route.kind).observe(time.monotonic() - began_s)
        return answer

    def _prefilled(self, place: Attempt) -> None:
        """A prefill has ended well."""
        f = self._f
        place.worker.answered()
        place.worker.probed = True
        f.fleet.release(place)
        if f.backend.flow is not Flow.SINGLE:
            self.legs.prefill_end_s = time.monotonic()
        if f.index is not None and self._blocks is not None:
            f.index.store(f.chooser.cache_key(place.worker), self._blocks)

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
        f, place = self._f, self._prefill
        assert place is not None
        prefill = place.worker
        decode = await self._take_decode()
        try:
            async with asyncio.timeout(f.config.upstream.connect_s):
                handover = await f.backend.open(self.job, prefill, f.upstream.fetch_json)
        except (NoEngineId, TimeoutError):
            raise LegFailure("prefill", "connect") from None
        deadline_s = self._prefill_deadline_s(place)
        self._open_link()
        loop = asyncio.get_running_loop()
        self.phase = "prefill"
        self._fetching = True
        self._prefill_task = loop.create_task(
            self._run_prefill(place, f.backend.prefill_leg(self.job, handover), deadline_s)
        )
        self._decode_task = loop.create_task(
            self._open_decode(
                decode,
                f.backend.decode_leg(self.job, prefill, decode, handover),
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
            place = self._prefill
            if place is not None:
                place.worker.prefill_done(place, time.monotonic())
            self.phase = "transfer"
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
        place, self._prefill, self._prefill_task = self._prefill, None, None
        if place is None:
            return
        if task.cancelled() or task.exception() is not None:
            self._f.fleet.release(place)
            return
        self._cached_tokens = cached_tokens_of(task.result())
        self._prefilled(place)

    async def _single(self) -> Answer:
        """One request to the decode side, which runs the prefill elsewhere by itself."""
        f, place = self._f, self._prefill
        assert place is not None
        decode = await self._take_decode()
        leg = f.backend.decode_leg(self.job, place.worker, decode, {})
        self._open_link()
        deadline_s = self._prefill_deadline_s(place) + self._transfer_deadline_s()
        answer = await self._open_decode(decode, leg, deadline_s, transfer=True)
        self._prefilled(place)
        self._prefill = None
        self._transferred(place.worker, decode)
        return answer

    # ------------------------------------------------------------------ links

    def _open_link(self) -> None:
        if self._flow is not None:
            name, flow = self._flow
            flow.at = "" if self._decode is None else self._decode.worker.name
            self._f.paths.links[name].opened(flow, time.monotonic())

    def _settle_link(self, *, arrived: bool) -> None:
        if self._flow is not None:
            name, flow = self._flow
            self._f.paths.links[name].closed(flow, time.monotonic(), arrived)
            if arrived:
                self._f.metrics.kv_bytes.labels(name).inc(flow.bits / 8)
            self._flow = None

    def _asked(self, decode: Worker) -> None:
        """A decode worker that was told to fetch this prompt's KV has answered."""
        if self._prompt is not None and self._prompt.source != "estimate":
            decode.kv_asked_tokens += self._prompt.tokens

    def _transferred(self, prefill: Worker, decode: Worker) -> None:
        f = self._f
        self._fetching = False
        new, cached = self._new_and_cached()
        decode.told_bits += self._flow[1].bits if self._flow is not None else f.paths.kv_bits(new + cached)
        self._settle_link(arrived=True)
        self._asked(decode)
        f.fleet.pairs.worked(prefill.name, decode.name)
        if f.index is not None and self._blocks is not None:
            f.index.store(f.chooser.cache_key(decode), self._blocks)

    # ------------------------------------------------------------------ the decode leg

    async def _open_decode(self, worker: Worker, leg: Leg, deadline_s: float, *, transfer: bool) -> Answer:
        """Send the leg whose answer the client gets, and wait for its first content.

        Raises:
            LegFailure: nothing of it may have reached the client.
        """
        f = self._f
        self.legs.decode_worker, self.legs.decode_sent_s = worker.name, time.monotonic()
        if not self.job.stream:
            deadline_s += self._generation_s()
        try:
            async with asyncio.timeout(deadline_s):
                response = await f.upstream.send(
                    worker, self.job, leg, self.attempt_id, "decode", resend=f.backend.resend or not transfer
                )
                self._response = response
                if response.status >= 400:
                    raise await f.upstream.refuse(response, "decode")
                headers = answer_headers(response.headers, f.addresses())
                self.legs.kv_bytes = _whole(response.headers.get(KV_BYTES_HEADER))
                if not self.job.body:
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
        f, tokens = self._f, self.job.max_output_tokens
        if tokens is None:
            return f.config.deadlines.total_s
        step_s = f.paths.step_s(f.paths.decode.slots)
        return min(f.config.deadlines.generation_factor * step_s * max(tokens, 0), f.config.deadlines.total_s)

    def _edited(self, answer: Answer) -> bytes:
        """A whole answer for the client: hand-over fields removed, cached tokens put in."""
        assert answer.body is not None
        parsed = answer.parsed
        if parsed is None:
            return answer.body
        usage = parsed.get("usage")
        self.usage = usage if isinstance(usage, dict) else None
        changed = parsed.get("kv_transfer_params") is not None
        if changed:
            parsed["kv_transfer_params"] = None
        changed |= merge_usage(usage, self._cached_tokens)
        return orjson.dumps(parsed) if changed else answer.body

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
        self.first_token_s = now_s
        self.phase = "stream"
        if self._decode is not None:
            self._decode.answering = True
        ttft_s = now_s - self.started_s
        f.metrics.ttft.labels(self.route.kind).observe(ttft_s)
        if self.forced is None:
            for listener in f.listeners:
                listener.first_token(now_s, ttft_s, self.route)

    # ------------------------------------------------------------------ passing the answer on

    def headers(self, answer: Answer) -> CIMultiDict[str]:
        """Headers for the client."""
        headers = answer.headers
        headers["X-Request-Id"] = self.job.client_id
        headers[ROUTE_HEADER] = "remote" if self.route.kind == "remote" else "local"
        headers[REASON_HEADER] = self.route.reason
        return headers

    async def pass_on(self, answer: Answer, sink: Sink) -> None:
        """Send an answer to the client, as it comes."""
        await sink.start(answer.status, self.headers(answer))
        if answer.body is not None:
            await sink.write(self._edited(answer))
            self._finished()
        elif answer.events is None:
            await self._raw(answer, sink)
        else:
            await self._stream(answer, sink)

    async def _raw(self, answer: Answer, sink: Sink) -> None:
        """Pass the body of another route on as it comes; one that breaks off is cut off."""
        idle_s = self._f.config.deadlines.idle_s
        try:
            while True:
                async with asyncio.timeout(idle_s):
                    piece = await answer.response.content.readany()
                    if not piece:
                        break
                    await sink.write(piece)
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            raise CutOff from None
        self._finished()

    async def _stream(self, answer: Answer, sink: Sink) -> None:
        """Pass events on; a stream that breaks off ends with an error event and without an end marker."""
        f, loop = self._f, asyncio.get_running_loop()
        limits, idle_s = f.config.limits, f.config.deadlines.idle_s
        readany, events = answer.response.content.readany, answer.events
        assert events is not None
        done = writing = False
        problem: str | None = None
        start = loop.time()
        total = start + max(f.config.deadlines.total_s - (time.monotonic() - self.started_s), 0.0)
        renewed = start
        try:
            async with asyncio.timeout_at(min(start + idle_s, total)) as clock:
                block = answer.first
                while True:
                    if block:
                        block, done, problem = self._edit(block)
                        self.output_events += block.count(b"\n\n")
                        writing = True
                        now = loop.time()
                        if now - renewed > 0.25 * min(idle_s, limits.client_stall_s):
                            renewed = now
                            clock.reschedule(min(now + idle_s, total))
                        await sink.write(block)
                        writing = False
                    if done or problem is not None:
                        break
                    piece = await readany()
                    if not piece:
                        break
                    block = events.whole(piece)
        except TimeoutError:
            if writing:
                self.stream_failed = "client_stall"
                raise CutOff from None
            f.metrics.deadlines.labels("stream").inc()
            problem = "timeout"
        except (aiohttp.ClientError, ConnectionError, sse.EventTooLong):
            problem = "broken"
        if problem is None and not done:
            problem = "broken"
        if problem is not None:
            await self._stream_broke(sink, problem)
            return
        self._finished()

    async def _stream_broke(self, sink: Sink, problem: str) -> None:
        f = self._f
        self.stream_failed = problem
        f.metrics.stream_errors.labels(problem).inc()
        if problem != "upstream_error":
            if self._decode is not None:
                self._decode.worker.failed(self._decode, time.monotonic())
                f.metrics.worker_failures.labels(self._decode.worker.name, problem).inc()
            text = "the answer took too long" if problem == "timeout" else "the worker stopped in the middle"
            await sink.write(b"data: " + error_body(text, "server_error", f"stream_{problem}") + b"\n\n")

    def _edit(self, block: bytes) -> tuple[bytes, bool, str | None]:
        """(whole events for the client, whether the end marker is among them, what went wrong in them)."""
        done = block.rstrip().endswith(b"data: [DONE]")
        if b'"usage"' not in block and b'"error"' not in block and b'"kv_transfer_params"' not in block:
            return block, done, None
        kept: list[bytes] = []
        for event in sse.split(block):
            data = sse.data_of(event)
            chunk = None if data is None else sse.parse(data)
            if chunk is None:
                kept.append(event)
                continue
            if sse.error_of(chunk) is not None:
                kept.append(b"data: " + scrub(data.decode(), self._f.addresses()).encode() + b"\n\n")  # type: ignore[union-attr]
                return b"".join(kept), False, "upstream_error"
            usage = chunk.get("usage")
            if isinstance(usage, dict):
                self.usage = usage
                self._late_prefill_answer()
            changed = merge_usage(usage, self._cached_tokens)
            if chunk.get("kv_transfer_params") is not None:
                chunk["kv_transfer_params"] = None
                changed = True
            kept.append(sse.event(chunk) if changed else event)
        return b"".join(kept), done, None

    def _late_prefill_answer(self) -> None:
        task = self._prefill_task
        if task is not None and task.done():
            self._take_prefill_answer(task)

    def _finished(self) -> None:
        """The whole answer went out."""
        f, place = self._f, self._decode
        self.phase = "done"
        if place is not None:
            place.worker.answered()
            place.worker.probed = True
        now_s = time.monotonic()
        told = self.usage.get("completion_tokens") if self.usage is not None else None
        tokens = told if type(told) is int else max(self.output_events - 1, 1)
        f.metrics.output_tokens.inc(tokens)
        self.output_tokens = tokens
        if self._cached_tokens:
            f.metrics.cached_tokens.inc(self._cached_tokens)
        if self.job.local_reason is None and self.forced is None:
            self.tpot_s = (now_s - self.first_token_s) / (tokens - 1) if tokens > 1 else 0.0
            f.served(self.first_token_s - self.started_s, self.tpot_s)
            for listener in f.listeners:
                listener.finished(now_s, tokens, self.tpot_s)

    # ------------------------------------------------------------------ after a failure

    def _after(self, failure: LegFailure) -> Route | None:
        """The next route after a failed leg, None if there is none."""
        if self.forced is not None:
            return None
        if failure.unread:
            return self.route  # a dropped connection: the same again with a hand-over of its own
        if self.job.local_reason is not None or self.route.kind == "alone":
            return self._alone_again()
        if failure.leg == "decode" and self._handle is not None and failure.kind in {"connect", "busy"}:
            fresh = [w for w in self._f.fleet.decode.usable(time.monotonic()) if w not in self._avoid]
            if fresh and self._decode_tries < 2:
                return self.route  # staged KV waits: another decode worker can still fetch it
        if failure.transfer:
            return self._local_route("transfer_deadline")
        if self.route.kind == "remote" and self._prefill_tries < self._f.config.retry.max_prefill_tries:
            other = self._other_remote()
            if other is not None:
                return other
        return self._local_route(f"{failure.leg}_{failure.kind}")

    def _other_remote(self) -> Route | None:
        now_s = time.monotonic()
        names = [self.route.cluster, *self._f.fleet.remote_prefill]
        for name in dict.fromkeys(names):
            usable = self._f.fleet.remote_prefill[name].usable(now_s)
            if any(w not in self._avoid and w.has_room(now_s) for w in usable):
                return Route("remote", name, self.route.reason)
        return None

    def _local_route(self, cause: str) -> Route | None:
        """Local prefill if it may still be tried, else a decode worker alone; None for a prompt that is too long."""
        f, now_s = self._f, time.monotonic()
        limit = f.config.retry.local_max_tokens
        tokens = 0 if self._prompt is None else self._prompt.tokens
        if self.route.kind == "remote" and limit is not None and tokens > limit:
            return None
        if self._prefill_tries < f.config.retry.max_prefill_tries:
            fresh = [w for w in f.fleet.local_prefill.usable(now_s) if w not in self._avoid]
            if fresh:
                return Route("local", f.fleet.pd, cause)
        if self._may_be_alone() and f.fleet.decode.any_usable(now_s):
            return Route("alone", f.fleet.pd, cause)
        return None

    def _alone_again(self) -> Route | None:
        """Another decode worker, if there is one that has not failed."""
        fresh = [w for w in self._f.fleet.decode.usable(time.monotonic()) if w not in self._avoid]
        return self.route if fresh and self.number < 3 else None

    def _without_worker(self, missing: NoWorker) -> Route | None:
        """The next route where a pool has no worker to give."""
        if self._last is not None and self._last.kind == "busy":
            raise self._given_up()  # nobody is free because all have refused
        if self.forced is not None or self.route.kind == "alone" or self.job.local_reason is not None:
            raise self._no_endpoint(str(missing), full=missing.full)
        if not self._f.fleet.decode.any_usable(time.monotonic()):
            raise self._no_endpoint(str(missing), full=missing.full)
        if self.route.kind == "local":
            self._prefill_tries = self._f.config.retry.max_prefill_tries
        following = self._local_route("no_prefill_worker")
        if following is None:
            raise self._no_endpoint(str(missing), full=missing.full)
        return following

    def _retry(self, following: Route) -> None:
        """Go on with another try, if the budget allows it."""
        f = self._f
        same = self._last is not None and self._last.unread
        if not same and not f.budget.take():
            f.metrics.retries_refused.inc()
            raise self._refusal("the router is short of retries; try again later", "retry_budget", 503)
        if following.kind != self.route.kind or following.cluster != self.route.cluster:
            cause = following.reason if following.kind != "remote" else "other_remote"
            f.metrics.fallbacks.labels(following.kind, cause).inc()
        else:
            f.metrics.fallbacks.labels(following.kind, "other_worker").inc()
        if following is not self.route:
            self._settle_link(arrived=False)
            if self._handle is not None:
                f.release(self._handle, self.job, self.attempt_id)
                self._handle = None
        self.route = following

    def _blame(self, failure: LegFailure) -> None:
        """Tell the workers of the failed attempt."""
        f, now_s = self._f, time.monotonic()
        place = self._prefill if failure.leg == "prefill" else self._decode
        source = self._handle.prefill if self._handle is not None else None
        if source is None and self._prefill is not None:
            source = self._prefill.worker
        fetching = failure.leg == "decode" and self._fetching and failure.kind in ILL
        if fetching and self._decode is not None and source is not None:
            name = self._decode.worker.name
            if f.fleet.pairs.failed(source.name, name, now_s):
                log.warning("workers %s and %s: transfers keep failing", source.name, name)
        self._fetching = False
        if failure.transfer:
            # the link or the prefill side, not the decode worker, which serves others meanwhile
            if source is not None:
                source.failed(self._prefill, now_s)
                f.metrics.worker_failures.labels(source.name, "transfer").inc()
                self._avoid.add(source)
            return
        if (
            f.backend.flow is Flow.SINGLE
            and self._prefill is not None
            and failure.kind not in {"connect", "client"}
        ):
            place = self._prefill  # it answered, so what failed is behind it
        if place is None:
            return
        f.blame(place, failure)
        if not failure.unread:
            self._avoid.add(place.worker)
        if failure.leg == "prefill":
            f.backend.forget(place.worker)

    def _drop(self) -> None:
        """Give up the attempt under way; staged KV that another decode worker may fetch stays."""
        self._cancel_legs()
        prefill, decode = self._prefill, self._decode
        self._prefill = self._decode = None
        self._release_places(prefill, decode)
        if self._handle is None:
            self._settle_link(arrived=False)
        if self._response is not None:
            self._response.close()
            self._response = None

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

    # ------------------------------------------------------------------ refusals

    def _refusal(self, message: str, code: str, status: int) -> ClientError:
        f = self._f
        self.refused = code
        f.metrics.rejected.labels(code).inc()
        for listener in f.listeners if self.forced is None else ():
            listener.rejected(time.monotonic(), code)
        return ClientError(status, message, code, retry_after_s=f.config.retry.retry_after_s)

    def _no_endpoint(self, message: str, full: bool = False) -> ClientError:
        """503 where nobody can take the request, 429 where all are full."""
        return self._refusal(message, "saturated" if full else "no_endpoint", 429 if full else 503)

    def _given_up(self) -> ClientError:
        """What the client hears when no way is left."""
        failure = self._last
        assert failure is not None
        if failure.kind == "timeout":
            return self._refusal("no worker answered in time", "deadline", 504)
        if failure.kind == "busy":
            error = self._refusal("all workers are busy", "busy", failure.status or 503)
            error.retry_after_s = failure.retry_after_s or error.retry_after_s
            return error
        if self.route.kind == "remote" and not failure.final and failure.status is None:
            return self._refusal("no prefill worker can take this prompt now", "no_prefill", 503)
        if failure.kind in {"status", "stream_error", "aborted"} and failure.status is not None:
            return self._refusal(
                f"the worker failed with status {failure.status}", "upstream_error", failure.status
            )
        return self._refusal("the worker could not be reached or broke off", "upstream_error", 502)

    def _passed_on(self, failure: LegFailure) -> ClientError:
        """A worker's refusal of the client's own mistake, in the worker's words."""
        self.refused = "client"
        return PassedOn(failure, self._f.addresses())

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Give everything back. Safe to call at any point and more than once; nothing is awaited."""
        if self._closed:
            return
        self._closed = True
        f = self._f
        f.open_requests -= 1
        late = self._prefill_task
        if late is not None and f.backend.flow is Flow.SEQUENTIAL:
            # its answer may be on the way: wait for it a moment, so that what it staged can be released
            place, self._prefill, self._prefill_task = self._prefill, None, None
            f.spawn(self._late(late, place))
        elif late is not None and late.done() and f.backend.flow is Flow.CONCURRENT:
            self._take_prefill_answer(late)
        self._cancel_legs()
        self._release_places(self._prefill, self._decode)
        self._settle_link(arrived=False)
        if self._handle is not None:
            f.release(self._handle, self.job, self.attempt_id)
        self._tell_ended()
        response = self._response
        if response is None:
            return
        if self.phase != "done":
            response.close()
        elif response.content.at_eof():
            response.release()
        else:
            f.spawn(read_to_end(response))

    def _tell_ended(self) -> None:
        """Tell what became of a request that was decided about."""
        choice, prompt = self.choice, self._prompt
        if choice is None or prompt is None:
            return
        if self.phase == "done":
            outcome: Outcome = "finished"
        elif self.refused is not None:
            outcome = "rejected" if self.refused in REFUSED_CODES else "failed"
        elif self.stream_failed not in {None, "client_stall"}:
            outcome = "failed"
        else:
            outcome = "aborted"
        cached = self._cached.by_cluster
        clusters = (self._f.fleet.pd, *self._f.fleet.remote_prefill)
        ended = Ended(
            arrival_s=self.started_s,
            input_tokens=prompt.tokens,
            incremental_tokens={name: prompt.tokens - cached.get(name, 0) for name in clusters},
            output_tokens=self.output_tokens,
            outcome=outcome,
            remote=choice.route.kind == "remote",
            ttft_s=self.first_token_s - self.started_s if self.first_token_s else None,
            tpot_s=self.tpot_s,
            legs=self._legs(),
        )
        now_s = time.monotonic()
        for listener in self._f.listeners:
            listener.ended(now_s, ended)

    def _legs(self) -> Legs:
        """When its legs ran; a prefill whose cache was not used is none of the answer's."""
        legs = self.legs
        legs.attempts = max(self.number, 1)
        if self.route.kind == "alone":
            legs.prefill_cluster = legs.prefill_worker = None
            legs.prefill_sent_s = legs.prefill_ahead = legs.prefill_end_s = None
        return legs

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
            f.release(handle, self.job, self.attempt_id)


def _whole(text: str | None) -> int | None:
    """A whole number of a header, None if it is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def _read(task: asyncio.Task[Any]) -> None:
    """Take the outcome of a task nobody waits for."""
    if not task.cancelled():
        task.exception()
