"""Decision logs made by the simulator: what a router in that world would have written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas_env import __version__
from prfaas_env.decision import Decision, Move
from prfaas_env.policy import PolicyContext, make_policy, policy_hash
from prfaas_env.scenarios import Scenario
from prfaas_env.simulator.formulas import NEVER_NS, NS_PER_S, ns_from_s
from prfaas_env.simulator.records import Route, Status
from prfaas_env.simulator.run import EpisodeRun
from prfaas_env.simulator.world import World, draw_world
from prfaas_serving.decision_log import (
    ConversionLine,
    DecisionLine,
    DecisionLog,
    HeaderLine,
    RequestLine,
    lengths_since,
)
from prfaas_serving.replay import POLICY_SEED

UNIX_S = 1_700_000_000.0
_OUTCOMES = {Status.FINISHED: "finished", Status.REJECTED: "rejected", Status.ABORTED: "aborted"}


def header_of(scenario: Scenario, spec: str, **changes: Any) -> HeaderLine:
    """Header of a log."""
    from prfaas_env.simulator.world import scenario_schema

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
    import dataclasses

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
    policy, acting = make_policy(spec), make_policy(rule or spec)
    for each in (policy, acting):
        each.reset(PolicyContext(scenario, world.schema, POLICY_SEED))
    head = header_of(scenario, spec, **(header or {}))
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
                ),
            )
        )
    return out
