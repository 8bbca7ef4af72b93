"""The life of one request: route, fall-back, refusals, and giving everything back on every way out.

An `Exchange` is one client request. It opens an answer, trying again within the rules (`LegRunner` runs each try), and
passes it on (`Relay`). Whatever ends it, `close` gives places at workers back, cancels what still runs, and has staged
KV released, each once.

Rules: at most two prefill tries; order other prefill worker, local prefill, decode worker alone; never after the first
byte went to the client; every further try costs one of the global retry budget; only prompts up to a set length fall
back to the local side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from multidict import CIMultiDict

from prfaas_serving.answers import Answer, PassedOn
from prfaas_serving.backends import Flow
from prfaas_serving.cache_index import blocks_of
from prfaas_serving.choice import Route
from prfaas_serving.fleet import Attempt, NoWorker, Worker
from prfaas_serving.forward import REFUSED_CODES, Ended, Forwarder, Outcome
from prfaas_serving.legs import LegRunner, Trip
from prfaas_serving.length import Prompt
from prfaas_serving.relay import Relay, Sink
from prfaas_serving.requests import REASON_HEADER, ROUTE_HEADER, ClientError, Job
from prfaas_serving.upstream import ILL, LegFailure

log = logging.getLogger("prfaas_serving.exchange")


class Exchange:
    """One client request on its way.

    Args:
        shared: what all requests share.
        job: the request.
        forced: for canaries: take this route and no other.
        pinned: for the check of one worker: by role, who serves it though the pools would not send it anything.
    """

    def __init__(
        self,
        shared: Forwarder,
        job: Job,
        forced: Route | None = None,
        pinned: Mapping[str, Worker] | None = None,
    ) -> None:
        self._f = shared
        start = Route("alone", shared.fleet.pd, job.local_reason or "route")
        self._trip = Trip(job, start if forced is None else forced, forced=forced, pinned=pinned or {})
        self._legs = LegRunner(shared, self._trip)
        self._relay = Relay(shared, self._legs)
        self._output_tokens = 0
        self._tpot_s: float | None = None
        self._refused: str | None = None
        """Code of the refusal that the client got."""
        self._last: LegFailure | None = None
        self._closed = False
        shared.open_requests += 1
        shared.budget.request()

    @property
    def route(self) -> Route:
        """The present one."""
        return self._trip.route

    @property
    def phase(self) -> str:
        """What it waits for: queue, prefill, transfer, decode, stream; done at the end."""
        return self._trip.phase

    @property
    def number(self) -> int:
        """Of the present try; the first is 1."""
        return self._trip.number

    @property
    def started_s(self) -> float:
        """When it came, by the monotonic clock."""
        return self._trip.started_s

    # ------------------------------------------------------------------ opening

    async def open(self) -> Answer:
        """An answer whose first content has come.

        Raises:
            ClientError: the request is refused or every way failed.
        """
        f, job = self._f, self._trip.job
        if self._trip.forced is not None:
            self._trip.prompt = Prompt(1, "estimate")
        elif job.local_reason is None:
            await self._decide()
        else:
            f.metrics.decisions.labels("alone", job.local_reason).inc()
        if (
            self._trip.route.kind != "remote"
            and not self._legs.may_be_alone()
            and not f.fleet.local_prefill.workers
            and "prefill" not in self._trip.pinned
        ):
            raise self._no_endpoint("no worker can take a whole prompt")
        if self._trip.route.kind == "alone" and not self._legs.may_be_alone():
            self._trip.route = Route("local", f.fleet.pd, self._trip.route.reason)
        while True:
            self._trip.number += 1
            try:
                return await self._legs.attempt()
            except LegFailure as failure:
                self._reword(failure)
                self._blame(failure)
                self._legs.drop()
                self._last = failure
                if failure.final:
                    raise self._passed_on(failure) from None
                following = self._after(failure)
            except NoWorker as missing:
                self._legs.drop()
                following = self._without_worker(missing)
            if following is None:
                raise self._given_up() from None
            self._retry(following)

    async def _decide(self) -> None:
        f, job = self._f, self._trip.job
        prompt = await f.counter.count(job.body, job.chat)
        self._trip.prompt = prompt
        if f.index is not None:
            self._trip.blocks = blocks_of(prompt, f.index.block_tokens, f.config.length.chars_per_token)
            self._trip.cached = f.chooser.look_up(self._trip.blocks)
        self._trip.choice = choice = f.chooser.choose(prompt.tokens, self._trip.cached, self._trip.started_s)
        self._trip.route = choice.route
        if self._over_model_length(prompt):
            # the engine words this refusal; asking a decode worker first leaves nothing staged behind
            self._trip.route = Route(
                "alone" if self._legs.may_be_alone() else "local", f.fleet.pd, "over_model_length"
            )
        f.metrics.lengths.labels(prompt.source).inc()
        f.metrics.decisions.labels(self._trip.route.kind, self._trip.route.reason).inc()
        f.metrics.prompt_tokens.labels(self._trip.route.kind).inc(prompt.tokens)
        for listener in f.listeners:
            listener.arrival(
                self._trip.started_s,
                prompt.tokens,
                choice.incremental_tokens,
                choice.cached_tokens,
                self._trip.route,
            )

    def _over_model_length(self, prompt: Prompt) -> bool:
        """Whether a count (no estimate) says that every decode worker will refuse: no room for one token, or more
        asked for than the whole length. In between engines give what room there is."""
        if prompt.source == "estimate":
            return False
        limits = [w.max_model_len for w in self._f.fleet.decode.workers if w.max_model_len is not None]
        if not limits:
            return False
        return prompt.tokens >= max(limits) or (self._trip.job.max_output_tokens or 0) > max(limits)

    # ------------------------------------------------------------------ passing the answer on

    def headers(self, answer: Answer) -> CIMultiDict[str]:
        """Headers for the client."""
        headers = answer.headers
        headers["X-Request-Id"] = self._trip.job.client_id
        headers[ROUTE_HEADER] = "remote" if self._trip.route.kind == "remote" else "local"
        headers[REASON_HEADER] = self._trip.route.reason
        return headers

    async def pass_on(self, answer: Answer, sink: Sink) -> None:
        """Send an answer to the client, as it comes."""
        await sink.start(answer.status, self.headers(answer))
        if await self._relay.pass_on(answer, sink):
            self._finished()

    def _finished(self) -> None:
        """The whole answer went out."""
        f, place = self._f, self._legs.decode
        self._trip.phase = "done"
        if place is not None:
            place.worker.answered()
            place.worker.probed = True
        now_s = time.monotonic()
        usage = self._relay.usage
        told = usage.get("completion_tokens") if usage is not None else None
        tokens = told if type(told) is int else max(self._relay.events - 1, 1)
        f.metrics.output_tokens.inc(tokens)
        self._output_tokens = tokens
        if self._legs.cached_tokens:
            f.metrics.cached_tokens.inc(self._legs.cached_tokens)
        if self._trip.job.local_reason is None and self._trip.forced is None:
            self._tpot_s = (now_s - self._trip.first_token_s) / (tokens - 1) if tokens > 1 else 0.0
            f.served(self._trip.first_token_s - self._trip.started_s, self._tpot_s)
            for listener in f.listeners:
                listener.finished(now_s, tokens, self._tpot_s)

    # ------------------------------------------------------------------ after a failure

    def _after(self, failure: LegFailure) -> Route | None:
        """The next route after a failed leg, None if there is none."""
        if self._trip.forced is not None:
            return None
        if failure.unread:
            return self._trip.route  # a dropped connection: the same again with a hand-over of its own
        if self._trip.job.local_reason is not None or self._trip.route.kind == "alone":
            return self._alone_again()
        if failure.leg == "decode" and self._legs.handle is not None and failure.kind in {"connect", "busy"}:
            fresh = [w for w in self._f.fleet.decode.usable(time.monotonic()) if w not in self._trip.avoid]
            if fresh and self._trip.decode_tries < 2:
                return self._trip.route  # staged KV waits: another decode worker can still fetch it
        if failure.transfer:
            return self._local_route("transfer_deadline")
        if (
            self._trip.route.kind == "remote"
            and self._trip.prefill_tries < self._f.config.retry.max_prefill_tries
        ):
            other = self._other_remote()
            if other is not None:
                return other
        following = self._local_route(f"{failure.leg}_{failure.kind}")
        return self._trip.route if following is None and self._other_decode(failure) else following

    def _other_decode(self, failure: LegFailure) -> bool:
        """Whether the same prefill worker may be tried with another decode worker: one answer stood for both."""
        f = self._f
        return (
            f.backend.flow is Flow.SINGLE
            and failure.at is None
            and self._trip.prefill_tries < f.config.retry.max_prefill_tries
            and any(w not in self._trip.avoid for w in f.fleet.decode.usable(time.monotonic()))
        )

    def _other_remote(self) -> Route | None:
        now_s = time.monotonic()
        names = [self._trip.route.cluster, *self._f.fleet.remote_prefill]
        for name in dict.fromkeys(names):
            usable = self._f.fleet.remote_prefill[name].usable(now_s)
            if any(w not in self._trip.avoid and w.has_room(now_s) for w in usable):
                return Route("remote", name, self._trip.route.reason)
        return None

    def _local_route(self, cause: str) -> Route | None:
        """Local prefill if it may still be tried, else a decode worker alone; None for a prompt that is too long."""
        f, now_s = self._f, time.monotonic()
        limit = f.config.retry.local_max_tokens
        tokens = 0 if self._trip.prompt is None else self._trip.prompt.tokens
        if self._trip.route.kind == "remote" and limit is not None and tokens > limit:
            return None
        if self._trip.prefill_tries < f.config.retry.max_prefill_tries:
            fresh = [w for w in f.fleet.local_prefill.usable(now_s) if w not in self._trip.avoid]
            if fresh:
                return Route("local", f.fleet.pd, cause)
        if self._legs.may_be_alone() and f.fleet.decode.any_usable(now_s):
            return Route("alone", f.fleet.pd, cause)
        return None

    def _alone_again(self) -> Route | None:
        """Another decode worker, if there is one that has not failed."""
        fresh = [w for w in self._f.fleet.decode.usable(time.monotonic()) if w not in self._trip.avoid]
        return self._trip.route if fresh and self._trip.number < 3 else None

    def _without_worker(self, missing: NoWorker) -> Route | None:
        """The next route where a pool has no worker to give."""
        if self._last is not None and self._last.kind == "busy":
            raise self._given_up()  # nobody is free because all have refused
        if (
            self._trip.forced is not None
            or self._trip.route.kind == "alone"
            or self._trip.job.local_reason is not None
        ):
            raise self._no_endpoint(str(missing), full=missing.full)
        if not self._f.fleet.decode.any_usable(time.monotonic()):
            raise self._no_endpoint(str(missing), full=missing.full)
        if self._trip.route.kind == "local":
            self._trip.prefill_tries = self._f.config.retry.max_prefill_tries
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
        if following.kind != self._trip.route.kind or following.cluster != self._trip.route.cluster:
            cause = following.reason if following.kind != "remote" else "other_remote"
            f.metrics.fallbacks.labels(following.kind, cause).inc()
        else:
            f.metrics.fallbacks.labels(following.kind, "other_worker").inc()
        if following is not self._trip.route:
            self._legs.give_back()
        self._trip.route = following

    def _reword(self, failure: LegFailure) -> None:
        """Take a refusal as this engine means it."""
        if failure.status is not None and failure.at is None:
            failure.kind = self._f.backend.refusal_kind(failure.status, failure.body) or failure.kind

    def _behind(self, failure: LegFailure, prefill: Attempt) -> Attempt:
        """The worker to blame where one answer stood for both."""
        decode = self._legs.decode
        if decode is None:
            return prefill
        if failure.at is not None:
            return decode if decode.worker is failure.at else prefill
        self._trip.avoid.add(decode.worker)  # it may be either, so the next try is for another pair
        if failure.kind in ILL and self._f.fleet.shared_blame.decode_at_fault(
            prefill.worker.name, decode.worker.name, time.monotonic()
        ):
            return decode
        return prefill

    def _blame(self, failure: LegFailure) -> None:
        """Tell the workers of the failed attempt."""
        f, now_s = self._f, time.monotonic()
        place = self._legs.prefill if failure.leg == "prefill" else self._legs.decode
        source = self._legs.handle.prefill if self._legs.handle is not None else None
        if source is None and self._legs.prefill is not None:
            source = self._legs.prefill.worker
        fetching = failure.leg == "decode" and self._legs.fetching and failure.kind in ILL
        if fetching and self._legs.decode is not None and source is not None:
            name = self._legs.decode.worker.name
            if f.fleet.pairs.failed(source.name, name, now_s):
                log.warning("workers %s and %s: transfers keep failing", source.name, name)
        self._legs.fetching = False
        if failure.transfer:
            # the link or the prefill side, not the decode worker, which serves others meanwhile
            if source is not None:
                source.failed(self._legs.prefill, now_s)
                f.metrics.worker_failures.labels(source.name, "transfer").inc()
                self._trip.avoid.add(source)
            return
        if (
            f.backend.flow is Flow.SINGLE
            and self._legs.prefill is not None
            and failure.kind not in {"connect", "client"}
        ):
            place = self._behind(failure, self._legs.prefill)  # it answered, so what failed is behind it
        if place is None:
            return
        f.blame(place, failure)
        if not failure.unread:
            self._trip.avoid.add(place.worker)
        if failure.leg == "prefill":
            f.backend.forget(place.worker)

    # ------------------------------------------------------------------ refusals

    def _refusal(self, message: str, code: str, status: int) -> ClientError:
        f = self._f
        self._refused = code
        f.metrics.rejected.labels(code).inc()
        for listener in f.listeners if self._trip.forced is None else ():
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
            error = self._refusal("all workers are busy", "busy", 429 if failure.status == 429 else 503)
            error.retry_after_s = failure.retry_after_s or error.retry_after_s
            return error
        if self._trip.route.kind == "remote" and not failure.final and failure.status is None:
            return self._refusal("no prefill worker can take this prompt now", "no_prefill", 503)
        if failure.kind in {"status", "stream_error", "aborted"} and failure.status is not None:
            return self._refusal(
                f"the worker failed with status {failure.status}", "upstream_error", failure.status
            )
        return self._refusal("the worker could not be reached or broke off", "upstream_error", 502)

    def _passed_on(self, failure: LegFailure) -> ClientError:
        """A worker's refusal of the client's own mistake, in the worker's words."""
        self._refused = "client"
        return PassedOn(failure, self._f.addresses())

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Give everything back. Safe to call at any point and more than once; nothing is awaited."""
        if self._closed:
            return
        self._closed = True
        self._f.open_requests -= 1
        self._legs.close()
        self._tell_ended()

    def _tell_ended(self) -> None:
        """Tell what became of a request that was decided about."""
        choice, prompt = self._trip.choice, self._trip.prompt
        if choice is None or prompt is None:
            return
        if self._trip.phase == "done":
            outcome: Outcome = "finished"
        elif self._refused is not None:
            outcome = "rejected" if self._refused in REFUSED_CODES else "failed"
        elif self._relay.failed not in {None, "client_stall"}:
            outcome = "failed"
        else:
            outcome = "aborted"
        cached = self._trip.cached.by_cluster
        clusters = (self._f.fleet.pd, *self._f.fleet.remote_prefill)
        ended = Ended(
            arrival_s=self._trip.started_s,
            input_tokens=prompt.tokens,
            incremental_tokens={name: prompt.tokens - cached.get(name, 0) for name in clusters},
            output_tokens=self._output_tokens,
            outcome=outcome,
            remote=choice.route.kind == "remote",
            ttft_s=self._trip.first_token_s - self._trip.started_s if self._trip.first_token_s else None,
            tpot_s=self._tpot_s,
            legs=self._trip.legs_run(),
        )
        now_s = time.monotonic()
        for listener in self._f.listeners:
            listener.ended(now_s, ended)
