"""The control loop: telemetry in, a decision out on the fast clock, node moves on the slow one, within guard rails.

Every control interval the state is read anew. A policy decides (mode `active`), or is asked and only logged while a
rule acts (`shadow`), or nobody is asked (`off`). Whatever they say passes the guard rails:

- figures of workers older than `stale_after_s`, or a policy that fails: the last decision is held, no moves;
- the same for `fallback_after_s`, or too many fields outside their range: the planned static threshold, no moves;
- thresholds and margins are clamped, and a threshold changes by a factor per second at most;
- moves must be legal by the simulator's rule, never take the last worker of a role, and wait after an operator's own;
- an operator's override lies over everything and stops moves.

Policies run in a thread of their own; requests are routed by the number that was last put in force.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import prfaas_env
from prfaas_env.base import PrfaasError, one_line
from prfaas_env.bundle import ReloadablePolicy, ReloadResult
from prfaas_env.decision import ClusterDecision, Decision, Move
from prfaas_env.policy import PolicyContext, policy_hash
from prfaas_env.simulator.formulas import NS_PER_S, ns_from_s
from prfaas_env.telemetry import LENGTH_BIN_MIN_TOKENS, Telemetry, threshold_field
from prfaas_serving.config import ControlMode, ControlSettings
from prfaas_serving.decision_log import (
    By,
    ConversionLine,
    DecisionLine,
    DecisionLog,
    EventLine,
    Guard,
    HeaderLine,
    LegTimes,
    RequestLine,
    What,
    decision_json,
)
from prfaas_serving.drift import outside_share, ranges_of
from prfaas_serving.fleet import RoleChange
from prfaas_serving.forward import Ended, Forwarder, Legs
from prfaas_serving.live import LiveTelemetry, RouterClock
from prfaas_serving.moves.orders import ChangeRole, MoveFailed, MoveOrders, MoveRefused

log = logging.getLogger("prfaas_serving.control")

#: Lines kept for the page.
RECENT = 256
#: Request lines kept for those who fit a profile.
RECENT_REQUESTS = 5000
_STAY = Move.NONE


@dataclass
class _Asked:
    """What a policy said. `fresh`: now, not at an earlier tick."""

    decision: Decision | None
    fresh: bool = False
    decide_us: float = 0.0
    error: str | None = None


class Seat:
    """A policy in its place: asked at its own interval, holding its routing between, exchangeable while it runs.

    Args:
        spec: the first policy.
        context: what it may know.
        pool: the thread that it runs in.

    Raises:
        PrfaasError: the policy is wrong.
    """

    def __init__(self, spec: str, context: PolicyContext, pool: ThreadPoolExecutor) -> None:
        self.policy = ReloadablePolicy(spec)
        self.policy.reset(context)
        self._context = context
        self._pool = pool
        self._control_s = context.scenario.control.control_interval_s
        self._held: Decision | None = None
        self._period = -1
        self._running: asyncio.Future[tuple[Decision, float]] | None = None

    @property
    def spec(self) -> str:
        """What it is."""
        return self.policy.active.spec

    @property
    def hash(self) -> str:
        """12 hex digits."""
        return policy_hash(self.policy.policy, self.spec)

    def forget(self) -> None:
        """What it said no longer holds: it is asked at its next interval, and its routing is not held until then."""
        self._held = None

    async def restart(self) -> None:
        """Begin anew, without what it remembers."""
        await self._settled()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self.policy.reset, self._context)
        self._held, self._period = None, -1

    async def reload(self, spec: str | None) -> ReloadResult:
        """Exchange it, or read it anew; a wrong one leaves the present one in place."""
        await self._settled()
        result = await asyncio.get_running_loop().run_in_executor(self._pool, self.policy.reload, spec)
        if result.error is None:
            self._held, self._period = None, -1
        return result

    async def _settled(self) -> None:
        if self._running is not None:
            await asyncio.wait({self._running})
            self._running = None

    async def ask(self, telemetry: Telemetry, patience_s: float) -> _Asked:
        """Its decision for a tick.

        Args:
            telemetry: the reading.
            patience_s: real seconds that it may take.
        """
        interval_s = getattr(self.policy.policy, "decision_interval_s", None) or self._control_s
        period = telemetry.time_ns // ns_from_s(interval_s)
        if period == self._period:
            return _Asked(self._held)
        if self._running is not None and not self._running.done():
            return _Asked(None, error="it has not answered the last question yet")
        self._running = asyncio.get_running_loop().run_in_executor(self._pool, self._decide, telemetry)
        done, _ = await asyncio.wait({self._running}, timeout=patience_s)
        if not done:
            return _Asked(None, error=f"no answer within {patience_s:g} s")
        running, self._running = self._running, None
        try:
            decision, took_us = running.result()
            n = telemetry.schema.n_pd
            if not isinstance(decision, Decision) or len(decision.clusters) != n:
                raise PrfaasError(f"policy {self.spec!r}: its decision is not one for {n} PD clusters")
        except Exception as error:  # whatever a policy raises, the router goes on
            self._held = None
            return _Asked(None, error=one_line(error))
        self._period = period
        self._held = Decision(tuple(c.without_move for c in decision.clusters))
        return _Asked(decision, True, took_us)

    def _decide(self, telemetry: Telemetry) -> tuple[Decision, float]:
        began_s = time.perf_counter()
        decision = self.policy.decide(telemetry)
        return decision, (time.perf_counter() - began_s) * 1e6


@dataclass(frozen=True)
class _Verdict:
    """What a tick puts in force, and who says so."""

    decision: ClusterDecision
    by: By
    reason: str
    move: Move = _STAY
    proposed: Decision | None = None
    decide_us: float = 0.0


class ControlLoop:
    """Telemetry, policy, guard rails, decision, log.

    Args:
        forwarder: of the router.
        change_role: `Mover.change_role`.
        start_s: monotonic time of instant 0; default now.

    Raises:
        PrfaasError: the policy or the rule is wrong, or the log cannot be written.
    """

    def __init__(
        self, forwarder: Forwarder, change_role: ChangeRole, *, start_s: float | None = None
    ) -> None:
        settings = forwarder.config.control
        assert settings is not None
        resolved = forwarder.resolved
        self.settings: ControlSettings = settings
        self._f = forwarder
        self._pd = resolved.pd_index
        self.clock = RouterClock(
            time.monotonic() if start_s is None else start_s, forwarder.config.time_scale
        )
        changes = forwarder.fleet.changes
        self.live = LiveTelemetry(forwarder, changes, self.clock, settings.stale_after_s)
        self.live.on_end = self._request_ended
        self.orders = MoveOrders(forwarder.fleet, change_role, settings.flip_back_s, settings.switch_s)
        scenario = resolved.scenario
        self.control_ns = ns_from_s(scenario.control.control_interval_s)
        self.patience_s = max(self.control_ns / NS_PER_S * self.clock.time_scale, 0.05)
        """How long a policy may take, real seconds: one interval."""
        self._drain_s = settings.drain_s or scenario.conversion.drain_limit_s * self.clock.time_scale
        self._pool = ThreadPoolExecutor(1, "policy")
        context = PolicyContext(scenario, self.live.schema, forwarder.config.seed)
        self._policy = Seat(settings.policy, context, self._pool)
        self._rule = Seat(settings.rule, context, self._pool)
        self._planned = ClusterDecision(threshold_tokens=resolved.planned_threshold())
        self.mode: ControlMode = settings.mode
        self.guard: Guard = "ok"
        self.last: Telemetry | None = None
        """The last reading."""
        self.recent: deque[DecisionLine] = deque(maxlen=RECENT)
        self._recent_ended: deque[tuple[float, Ended]] = deque(maxlen=RECENT_REQUESTS)
        self.alarms: dict[str, str] = {}
        """What is wrong now, by name."""
        self.n = 0
        """Decisions so far."""
        self.late_ticks = 0
        self.counts: Counter[str] = Counter()
        """Ticks by who decided, and `moves`, `moves_refused`, `illegal_moves`."""
        self._last_ns: int | None = None
        self._read_s = self.clock.start_s
        self._failing_since_s: float | None = None
        self._roles = {w.name: w.role for w in forwarder.fleet}
        self._own_changes: set[tuple[str, str]] = set()
        self._moves_from_s = -math.inf
        """No moves before: an operator changed a role."""
        self._moving: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._overridden = forwarder.holder.override
        changes.ended.append(self._change_ended)
        self.log = self._open_log()

    def _open_log(self) -> DecisionLog | None:
        s = self.settings
        if s.log_file is None:
            return None
        return DecisionLog(s.log_file, self.header(), s.log_bytes, s.log_keep)

    def header(self) -> HeaderLine:
        """What runs, as at the beginning of a log."""
        resolved = self._f.resolved
        return HeaderLine(
            prfaas_version=prfaas_env.__version__,
            unix_s=time.time(),
            schema_hash=self.live.schema.hash,
            names=self.live.schema.names,
            scenario=resolved.scenario.model_dump(mode="json"),
            scenario_hash=resolved.scenario.hash,
            policy_spec=self.policy_spec,
            policy_hash=self.policy_hash,
            backend=self._f.config.backend,
            mode=self.mode,
            policy_seed=self._f.config.seed,
        )

    @property
    def policy_spec(self) -> str:
        """The policy that decides, or is watched."""
        return self._policy.spec

    @property
    def policy_hash(self) -> str:
        """Its hash, 12 hex digits."""
        return self._policy.hash

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to decide."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; a move under way is given up or, once its engine was asked, left for the next start."""
        tasks = [t for t in (self._task, *self._moving) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.log is not None:
            await asyncio.to_thread(self.log.close)

    async def _run(self) -> None:
        """A tick at every instant of the fast clock; instants that are missed are skipped and counted."""
        k = 0
        while True:
            pause_s = self.clock.at_s(k * self.control_ns) - time.monotonic()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            try:
                await self.tick(self.clock.at_s(k * self.control_ns))
                self._alarm("control_loop", None)
            except Exception as error:  # a loop that dies would leave its last decision in force for ever
                log.exception("control loop")
                self._alarm("control_loop", one_line(error))
            following = max(k + 1, self.clock.ns(time.monotonic()) // self.control_ns)
            self.late_ticks += following - k - 1
            k = following

    # ------------------------------------------------------------------ orders of operators

    async def set_mode(self, mode: ControlMode, reason: str) -> None:
        """Change the mode. Off puts the configured decision in force; out of off the policies begin anew."""
        before = self.mode
        if mode == before:
            return
        if before == "off":
            await self._policy.restart()
            await self._rule.restart()
        self.mode = mode
        if mode == "off":
            self._f.holder.set(self._f.resolved.decision(), "config", f"mode off: {reason}")
        self._event("mode", f"{before} -> {mode}: {reason}")

    async def reload(self, spec: str | None, reason: str) -> ReloadResult:
        """Exchange the policy, or read it anew with None. A wrong one changes nothing, and the result says so."""
        result = await self._policy.reload(spec)
        told = f"{result}: {reason}"
        if result.error is None:
            self._failing_since_s = None
            self._event("reload", told, policy_spec=self.policy_spec, policy_hash=self.policy_hash)
        else:
            self._event("reload", told)
        return result

    # ------------------------------------------------------------------ one tick

    async def tick(self, now_s: float) -> None:
        """Read, decide, act, log.

        Args:
            now_s: monotonic time of the instant.
        """
        self._look_around(now_s)
        telemetry = self._read(now_s)
        self._judge(now_s, telemetry)
        asked = await self._ask(now_s, telemetry)
        verdict = self._decide(now_s, telemetry, asked)
        holder = self._f.holder
        if verdict.by not in {"operator", "off"} and verdict.decision != holder.base:
            holder.set(verdict.decision, "policy" if verdict.by == "policy" else "rule", verdict.reason)
        move, note = self._order(telemetry, verdict)
        if telemetry is None:
            return
        self.counts[verdict.by] += 1
        line = DecisionLine(
            n=self.n,
            time_ns=telemetry.time_ns,
            unix_s=time.time(),
            mode=self.mode,
            values=tuple(telemetry.values.tolist()),
            conversion_tick=telemetry.conversion_tick,
            legal_moves=telemetry.legal_moves,
            new_lengths=tuple(
                tuple(self.live.new_lengths) if i == self._pd else () for i in range(self.live.schema.n_pd)
            ),
            proposed=verdict.proposed,
            acted=self._whole(replace(verdict.decision, move=move)),
            by=verdict.by,
            reason=verdict.reason + note,
            policy_hash=self.policy_hash,
            guard=self.guard,
            decide_us=verdict.decide_us,
        )
        self.live.new_lengths.clear()
        self.n += 1
        self.recent.append(line)
        self._write(line)

    def _whole(self, own: ClusterDecision) -> Decision:
        """A decision for all PD clusters of the scenario; those of other routers get none of it."""
        return Decision(
            tuple(
                own if i == self._pd else ClusterDecision(threshold_tokens=math.inf)
                for i in range(self.live.schema.n_pd)
            )
        )

    def _look_around(self, now_s: float) -> None:
        """Notice what operators did since the last tick."""
        fleet, holder = self._f.fleet, self._f.holder
        roles = {w.name: w.role for w in fleet}
        for name in roles.keys() & self._roles.keys():
            if roles[name] != self._roles[name] and (name, roles[name]) not in self._own_changes:
                self._moves_from_s = now_s + self.settings.manual_hold_s
                self._event(
                    "manual_move",
                    f"worker {name}: {self._roles[name]} -> {roles[name]}; no moves for "
                    f"{self.settings.manual_hold_s:g} s",
                )
        self._roles = roles
        self._own_changes.clear()
        if holder.override is not self._overridden:
            self._overridden = holder.override
            self._event("override", "set" if holder.override is not None else "cleared")

    def _read(self, now_s: float) -> Telemetry | None:
        """The reading, None if a field of it is not finite."""
        allowed = self.guard == "ok" and now_s >= self._moves_from_s and self.settings.moves
        try:
            telemetry = self.live.read(now_s, self._last_ns, allowed)
        except ValueError as error:
            self._alarm("telemetry", one_line(error))
            return None
        self._alarm("telemetry", None)
        self._last_ns, self._read_s, self.last = telemetry.time_ns, now_s, telemetry
        return telemetry

    def _judge(self, now_s: float, telemetry: Telemetry | None) -> None:
        """Hold or fall back when what is known is too old, wrong, or unlike anything the fields were made for."""
        s = self.settings
        stale_s = max(self.live.stale_s(now_s), now_s - self._read_s)
        failing_s = 0.0 if self._failing_since_s is None else now_s - self._failing_since_s
        guard: Guard = "ok"
        if telemetry is None or stale_s > s.stale_after_s:
            guard = "hold"
        if max(stale_s, failing_s) > s.fallback_after_s:
            guard = "fallback"
        names = self.live.stale_workers(now_s)
        stale = f"figures are {stale_s:.0f} s old: {', '.join(names) or 'no reading'}"
        self._alarm("stale_metrics", stale if stale_s > s.stale_after_s else None)
        if telemetry is not None and self._out_of_range(telemetry):
            guard = "fallback"
        prefill, decode = self.live.split()
        spec = self._f.resolved.pd
        least = (max(spec.prefill_floor, 1), max(spec.min_decode, 1))
        starting = any(w.state == "probation" for w in self._f.fleet)
        below = not starting and (prefill < least[0] or decode < least[1])
        counts = (
            f"{prefill} prefill and {decode} decode workers in service; at least {least[0]} and {least[1]}"
        )
        self._alarm("below_minimum", counts if below else None)
        if guard != self.guard:
            self._event("guard", f"{self.guard} -> {guard}")
            if guard == "ok" or self.guard == "ok":
                self._policy.forget()
                self._rule.forget()
            self.guard = guard

    def _out_of_range(self, telemetry: Telemetry) -> bool:
        ranges = ranges_of(self._policy.policy.policy)
        if ranges is not None:
            share, of = outside_share(telemetry, ranges), "the range of the policy's training"
        else:
            share, of = telemetry.schema.encode(telemetry.values)[1] / len(telemetry.schema), "their range"
        beyond = share > self.settings.out_of_range_share
        self._alarm("out_of_range", f"{share:.0%} of the fields are out of {of}" if beyond else None)
        return beyond

    async def _ask(self, now_s: float, telemetry: Telemetry | None) -> tuple[_Asked, _Asked]:
        """What policy and rule say; neither is asked without a good reading."""
        policy = rule = _Asked(None)
        if telemetry is not None and self.guard != "hold" and self.mode != "off" and not self._blind(now_s):
            policy = await self._policy.ask(telemetry, self.patience_s)
            if self.mode == "shadow":
                rule = await self._rule.ask(telemetry, self.patience_s)
        if policy.error is None and policy.fresh:
            self._failing_since_s = None
        elif policy.error is not None and self._failing_since_s is None:
            self._failing_since_s = now_s
        failing = f"policy {self.policy_spec}: {policy.error}" if policy.error is not None else None
        if failing is not None or self._failing_since_s is None:
            self._alarm("policy", failing)
        return policy, rule

    def _blind(self, now_s: float) -> bool:
        """Whether figures are too old, or fields too strange, for anyone to be asked."""
        return self.live.stale_s(now_s) > self.settings.stale_after_s or "out_of_range" in self.alarms

    def _decide(self, now_s: float, telemetry: Telemetry | None, asked: tuple[_Asked, _Asked]) -> _Verdict:
        """Who decides, and what."""
        policy, rule = asked
        holder = self._f.holder
        who: By = "policy" if self.mode == "active" else "rule"
        acting = policy if self.mode == "active" else rule
        proposed = policy.decision

        def verdict(decision: ClusterDecision, by: By, reason: str, move: Move = _STAY) -> _Verdict:
            return _Verdict(decision, by, reason, move, proposed, policy.decide_us)

        if holder.override is not None:
            return verdict(holder.override, "operator", "an operator's override")
        if self.mode == "off":
            return verdict(holder.current, "off", "the control loop is off")
        if self.guard == "fallback":
            return verdict(self._planned, "fallback", self._why() or "fallback")
        if self.guard == "hold" or acting.decision is None:
            return verdict(holder.base.without_move, "hold", self._why() or "until it is asked again")
        wanted = acting.decision.clusters[self._pd]
        bounded, note = self._bounded(wanted.without_move)
        reason = ("decided" if acting.fresh else "between two decisions") + note
        return verdict(bounded, who, reason, wanted.move if acting.fresh else _STAY)

    def _why(self) -> str:
        names = ("telemetry", "stale_metrics", "out_of_range", "policy")
        return "; ".join(self.alarms[n] for n in names if n in self.alarms)

    def _bounded(self, wanted: ClusterDecision) -> tuple[ClusterDecision, str]:
        """A routing within the clamps and the rate limit, and a note if that changed it."""
        s = self.settings
        if wanted.margin_s is not None:
            low = -math.inf if s.margin_min_s is None else s.margin_min_s
            high = math.inf if s.margin_max_s is None else s.margin_max_s
            margin_s = min(max(wanted.margin_s, low), high)
            if margin_s == wanted.margin_s:
                return wanted, ""
            return replace(wanted, margin_s=margin_s), f"; margin {wanted.margin_s:g} s clamped"
        assert wanted.threshold_tokens is not None
        top = math.inf if s.threshold_max_tokens is None else s.threshold_max_tokens
        tokens = min(max(wanted.threshold_tokens, s.threshold_min_tokens), top)
        note = "" if tokens == wanted.threshold_tokens else f"; threshold {wanted.threshold_tokens:g} clamped"
        present = self._f.holder.base.threshold_tokens
        if s.threshold_factor_per_s is not None and present is not None:
            # "all" and "nothing" are as far away as the ends of the range that lengths can have
            a = max(threshold_field(present), float(LENGTH_BIN_MIN_TOKENS))
            b = max(threshold_field(tokens), float(LENGTH_BIN_MIN_TOKENS))
            most = s.threshold_factor_per_s ** (self.control_ns / NS_PER_S)
            near = min(max(b, a / most), a * most)
            if near != b:
                tokens = float(round(near))
                note += f"; on the way to {wanted.threshold_tokens:g}"
        return replace(wanted, threshold_tokens=tokens), note

    # ------------------------------------------------------------------ moves

    def _order(self, telemetry: Telemetry | None, verdict: _Verdict) -> tuple[Move, str]:
        """Order a move that is legal; gives what was ordered and a note."""
        move = verdict.move
        if move is _STAY or telemetry is None:
            return _STAY, ""
        if not telemetry.legal_moves[self._pd][move]:
            self.counts["illegal_moves"] += 1
            return _STAY, f"; {move.name.lower()} is not legal now"
        task = asyncio.create_task(self._move(move, verdict.by))
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)
        return move, ""

    async def _move(self, move: Move, by: str) -> None:
        try:
            name = await self.orders.move(self._f.fleet.pd, move, self._drain_s, by)
        except MoveRefused as refusal:
            self.counts["moves_refused"] += 1
            log.info("%s refused: %s", move.name.lower(), refusal)
            if isinstance(refusal, MoveFailed):
                self._alarm("conversion", f"{move.name.lower()}: {refusal}")
        except Exception as error:  # whatever an actuator raises, the loop goes on
            log.exception("node move")
            self._alarm("conversion", f"{move.name.lower()}: {one_line(error)}")
        else:
            self.counts["moves"] += 1
            self._alarm("conversion", None)
            log.info("worker %s: %s", name, move.name.lower())

    def _change_ended(self, change: RoleChange) -> None:
        if change.by != "operator" and change.outcome == "done":
            self._own_changes.add((change.worker, change.to_role))
        self._write(
            ConversionLine(
                ordered_ns=self.clock.ns(change.ordered_s),
                done_ns=self.clock.ns(change.done_s) if change.done_s and change.outcome == "done" else None,
                cluster=change.cluster,
                worker=change.worker,
                from_role=change.from_role,
                to_role=change.to_role,
                outcome=change.outcome,
            )
        )

    # ------------------------------------------------------------------ alarms and the log

    def _alarm(self, name: str, text: str | None) -> None:
        """Raise an alarm, or take it back with None."""
        if text is None:
            if self.alarms.pop(name, None) is not None:
                self._event("alarm", f"{name}: over")
            return
        if name not in self.alarms:
            log.warning("alarm %s: %s", name, text)
            self._event("alarm", f"{name}: {text}")
        self.alarms[name] = text

    def _event(self, what: What, text: str, **fields: Any) -> None:
        self._write(EventLine(time_ns=self.clock.ns(time.monotonic()), what=what, text=text, **fields))

    @property
    def requests(self) -> list[RequestLine]:
        """The last requests that ended, as in the log."""
        return [self._request_line(now_s, ended) for now_s, ended in self._recent_ended]

    def _request_ended(self, now_s: float, ended: Ended) -> None:
        self._recent_ended.append((now_s, ended))
        if self.log is not None:
            self._write(self._request_line(now_s, ended))

    def _request_line(self, now_s: float, ended: Ended) -> RequestLine:
        scale = self.clock.time_scale
        return RequestLine(
            arrival_ns=self.clock.ns(ended.arrival_s),
            input_tokens=ended.input_tokens,
            incremental_tokens=ended.incremental_tokens,
            output_tokens=ended.output_tokens,
            outcome=ended.outcome,
            remote=ended.remote,
            ttft_s=None if ended.ttft_s is None else ended.ttft_s / scale,
            tpot_s=None if ended.tpot_s is None else ended.tpot_s / scale,
            end_ns=self.clock.ns(now_s),
            pd=self._pd,
            legs=None if ended.legs is None else self._leg_times(ended.legs),
        )

    def _leg_times(self, legs: Legs) -> LegTimes:
        def ns(at_s: float | None) -> int | None:
            return None if at_s is None else self.clock.ns(at_s)

        return LegTimes(
            attempts=legs.attempts,
            prefill_cluster=legs.prefill_cluster,
            prefill_worker=legs.prefill_worker,
            prefill_sent_ns=ns(legs.prefill_sent_s),
            prefill_ahead=legs.prefill_ahead,
            prefill_end_ns=ns(legs.prefill_end_s),
            decode_worker=legs.decode_worker,
            decode_sent_ns=ns(legs.decode_sent_s),
            kv_bytes=legs.kv_bytes,
        )

    def _write(self, line: DecisionLine | RequestLine | ConversionLine | EventLine) -> None:
        if self.log is None:
            return
        self.log.write(line)
        fault = self.log.fault
        if fault is None:
            self.alarms.pop("decision_log", None)
        else:
            self.alarms["decision_log"] = f"{self.log.dropped} lines dropped: {fault}"

    def as_json(self) -> dict[str, Any]:
        """For the admin port."""
        now_s = time.monotonic()
        last = self.recent[-1] if self.recent else None
        return {
            "mode": self.mode,
            "policy": self.policy_spec,
            "policy_hash": self.policy_hash,
            "rule": self._rule.spec,
            "guard": self.guard,
            "alarms": dict(self.alarms),
            "stale_s": round(self.live.stale_s(now_s), 3),
            "decisions": self.n,
            "late_ticks": self.late_ticks,
            "counts": dict(self.counts),
            "moves_held_s": round(max(self._moves_from_s - now_s, 0.0), 1),
            "under_way": [
                {"worker": c.worker, "to": c.to_role, "by": c.by}
                for c in self._f.fleet.changes.under_way.values()
            ],
            "log": None
            if self.log is None
            else {"file": str(self.log.path), "dropped": self.log.dropped, "fault": self.log.fault},
            "planned": decision_json(self._whole(self._planned)),
            "last": None if last is None else last.as_json(),
            "telemetry": {} if self.last is None else self.last.as_dict(),
            "sources": self.live.sources,
        }
