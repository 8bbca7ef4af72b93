"""Decision logs made by the simulator: what a router in that world would have written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas_env import __version__
from prfaas_env.decision import Decision, Move
from prfaas_env.policy import PolicyContext, make_policy, policy_hash
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.formulas import NEVER_NS, NS_PER_S, ns_from_s
from prfaas_env.simulator.records import Route, Status
from prfaas_env.simulator.run import EpisodeRun
from prfaas_env.simulator.world import World, draw_world, scenario_schema
from prfaas_serving.decision_log import (
    ConversionLine,
    DecisionLine,
    DecisionLog,
    HeaderLine,
    LegTimes,
    Log,
    RequestLine,
    lengths_since,
    line_bytes,
    read_log,
)

UNIX_S = 1_700_000_000.0
_OUTCOMES = {Status.FINISHED: "finished", Status.REJECTED: "rejected", Status.ABORTED: "aborted"}


def header_of(scenario: Scenario, spec: str, **changes: Any) -> HeaderLine:
    """Header of a log."""
    schema = scenario_schema(scenario)
    fields: dict[str, Any] = {
        "prfaas_version": __version__,
        "unix_s": UNIX_S,
        "schema_hash": schema.hash,
        "names": schema.names,
        "scenario": scenario.model_dump(mode="json"),
        "scenario_hash": scenario.hash,
        "policy_spec": spec,
        "policy_hash": policy_hash(make_policy(spec), spec),
        "backend": "simulator",
        "mode": "active",
    }
    return HeaderLine(**{**fields, **changes})


def _legal(decision: Decision, legal: tuple[tuple[bool, bool, bool], ...]) -> Decision:
    """A decision whose moves are all legal."""
    return Decision(
        tuple(
            c if legal[i][c.move] else dataclasses.replace(c, move=Move.NONE)
            for i, c in enumerate(decision.clusters)
        )
    )


@dataclass
class Produced:
    """A log and the run that it is of."""

    path: Path
    world: World
    run: EpisodeRun
    lines: list[Any] = field(default_factory=list)


def produce(
    path: Path,
    scenario: Scenario,
    spec: str,
    *,
    seed: int = 0,
    rule: str | None = None,
    drain: bool = True,
    header: dict[str, Any] | None = None,
    **options: Any,
) -> Produced:
    """Run a policy (with `rule` in its shadow: the rule acts) and write the log.

    With `drain` the log goes on to the last finish; without, requests open at the horizon are not in it.
    """
    world = draw_world(scenario, seed)
    run = EpisodeRun(world, "compiled")
    head = header_of(scenario, spec, **(header or {}))
    policy, acting = make_policy(spec), make_policy(rule or spec)
    for each in (policy, acting):
        each.reset(PolicyContext(scenario, world.schema, head.policy_seed))
    out = Produced(path, world, run)
    timed: list[tuple[int, int, Any]] = []
    end_ns = ns_from_s(scenario.measure.horizon_s)
    recent = tuple([] for _ in scenario.deployment.pd)
    converting: list[tuple[int, int] | None] = [None] * len(scenario.deployment.pd)
    n = t = 0
    while t < end_ns or (drain and not run.engine.done):
        telemetry = run.engine.telemetry()
        proposed = policy.decide(telemetry)
        acted = _legal(proposed if rule is None else acting.decide(telemetry), telemetry.legal_moves)
        line = DecisionLine(
            n=n,
            time_ns=t,
            unix_s=UNIX_S + t / NS_PER_S,
            mode="active" if rule is None else "shadow",
            values=tuple(telemetry.values.tolist()),
            conversion_tick=telemetry.conversion_tick,
            legal_moves=telemetry.legal_moves,
            new_lengths=lengths_since(recent, telemetry.recent_lengths_tokens),
            proposed=proposed,
            acted=acted,
            by="policy" if rule is None else "rule",
            reason="",
            policy_hash=head.policy_hash,
            guard="ok",
            decide_us=1.0,
        )
        timed.append((t, 1, line))
        recent = tuple(column.copy() for column in telemetry.recent_lengths_tokens)
        for i, pd in enumerate(telemetry.pd):
            begun = converting[i]
            if begun is not None and pd.converting_instances == 0:
                timed.append((t, 0, _conversion(scenario, i, begun, t)))
                converting[i] = None
            if acted.clusters[i].move is not Move.NONE:
                converting[i] = (t, int(acted.clusters[i].move))
        run.engine.apply(acted)
        n, t = n + 1, t + run.control_ns
        run.run_until(t)
    timed += [(int(when), 0, line) for when, line in _requests(world, run)]
    timed.sort(key=lambda item: item[:2])
    out.lines = [line for _, _, line in timed]
    log = DecisionLog(path, head, **options)
    for number, line in enumerate(out.lines):
        log.write(line)
        if number % 1000 == 0:
            assert log.flush(60)
    assert log.flush(60)
    log.close()
    assert log.dropped == 0
    return out


def _conversion(scenario: Scenario, i: int, begun: tuple[int, int], t: int) -> ConversionLine:
    roles = ("prefill", "decode") if begun[1] == Move.PREFILL_TO_DECODE else ("decode", "prefill")
    return ConversionLine(
        ordered_ns=begun[0],
        done_ns=t,
        cluster=scenario.deployment.pd[i].name,
        worker="w",
        from_role=roles[0],
        to_role=roles[1],
        outcome="done",
    )


def _requests(world: World, run: EpisodeRun) -> list[tuple[int, RequestLine]]:
    records, table = run.engine.records, world.requests
    names = [c.name for c in (*world.scenario.deployment.prfaas, *world.scenario.deployment.pd)]
    out = []
    for k in range(len(table)):
        outcome = _OUTCOMES.get(Status(int(records.status[k])))
        if outcome is None:
            continue
        first, finish, arrival = (
            int(x[k]) for x in (records.first_token_ns, records.finish_ns, table.arrival_ns)
        )
        ended = finish if outcome == "finished" else min(int(records.abort_ns[k]), NEVER_NS)
        ended = arrival if ended == NEVER_NS else ended
        n_out = int(table.output_tokens[k])
        incremental = int(records.incremental_tokens[k])
        out.append(
            (
                ended,
                RequestLine(
                    arrival_ns=arrival,
                    input_tokens=int(table.input_tokens[k]),
                    incremental_tokens=dict.fromkeys(names, incremental),
                    output_tokens=n_out if outcome == "finished" else 0,
                    outcome=outcome,  # type: ignore[arg-type]
                    remote=bool(records.route[k] == Route.REMOTE),
                    ttft_s=None if first == NEVER_NS else (first - arrival) / NS_PER_S,
                    tpot_s=(finish - first) / NS_PER_S / (n_out - 1)
                    if n_out > 1 and finish < NEVER_NS
                    else None,
                    end_ns=ended,
                    pd=int(world.pd_of[k]),
                    legs=_legs(world, run, k),
                ),
            )
        )
    return out


def _legs(world: World, run: EpisodeRun, k: int) -> LegTimes:
    """Legs as a router has them that sends each prefill leg to an idle worker and the decode leg after it."""
    records, deployment = run.engine.records, world.scenario.deployment
    remote = records.route[k] == Route.REMOTE
    cluster = deployment.prfaas[records.prfaas[k]] if remote else deployment.pd[world.pd_of[k]]
    start, end = (
        None if x[k] == NEVER_NS else int(x[k]) for x in (records.prefill_start_ns, records.prefill_end_ns)
    )
    return LegTimes(
        attempts=max(int(records.attempts[k]), 1),
        prefill_cluster=cluster.name if start is not None else None,
        prefill_worker=f"{cluster.name}-p" if start is not None else None,
        prefill_sent_ns=start,
        prefill_ahead=None if start is None else 0,
        prefill_end_ns=end,
        decode_worker="d" if end is not None else None,
        decode_sent_ns=end,
        kv_bytes=int(records.sent_bytes[k]) if remote and end is not None else None,
    )


# ----------------------------------------------------------------------------------- by hand

#: A scenario for logs written by hand.
TINY = load_scenario("paper", overrides=["slo.ttft_s=2", "slo.tpot_s=0.05"])


def tiny_header() -> HeaderLine:
    return header_of(TINY, "static")


def decision(n: int, **changes: Any) -> DecisionLine:
    names = tiny_header().names
    values = dict.fromkeys(names, 0.0)
    values |= {"pd0.prefill_instances": 2.0, "pd0.decode_instances": 5.0, "prfaas0.prefill_instances": 3.0}
    values |= {"link0.nominal_capacity_bps": 80e9, "link0.observed_capacity_bps": 80e9}
    values |= changes.pop("fields", {})
    fields: dict[str, Any] = {
        "n": n,
        "time_ns": n * NS_PER_S,
        "unix_s": 0.0,
        "mode": "active",
        "values": tuple(values[name] for name in names),
        "conversion_tick": False,
        "legal_moves": ((True, True, True),),
        "new_lengths": ((),),
        "proposed": Decision.same(1, threshold_tokens=10_000.0),
        "acted": Decision.same(1, threshold_tokens=10_000.0),
        "by": "policy",
        "reason": "",
        "policy_hash": tiny_header().policy_hash,
        "guard": "ok",
        "decide_us": 1.0,
    }
    return DecisionLine(**{**fields, **changes})


def request(arrival_s: float, **changes: Any) -> RequestLine:
    fields: dict[str, Any] = {
        "arrival_ns": round(arrival_s * NS_PER_S),
        "input_tokens": 4000,
        "incremental_tokens": {"pd0": 3000, "prfaas0": 3000},
        "output_tokens": 11,
        "outcome": "finished",
        "remote": False,
        "ttft_s": 1.0,
        "tpot_s": 0.02,
    }
    return RequestLine(**{**fields, **changes})


def conversion(ordered_s: float, **changes: Any) -> ConversionLine:
    fields: dict[str, Any] = {
        "ordered_ns": round(ordered_s * NS_PER_S),
        "done_ns": round((ordered_s + 5) * NS_PER_S),
        "cluster": "pd0",
        "worker": "w1",
        "from_role": "decode",
        "to_role": "prefill",
        "outcome": "done",
    }
    return ConversionLine(**{**fields, **changes})


def write(path: Path, header: HeaderLine, lines: Any) -> Log:
    path.write_bytes(b"".join(line_bytes(line) for line in (header, *lines)))
    return read_log(path)
