"""Rewards: hand-computed terms, Little's law over whole episodes, prices, the paired difference."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision, Move
from prfaas_env.env import PrfaasEnv
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.rewards import REWARDS, reward_terms
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.scenarios.models import RewardSettings
from prfaas_env.simulator.engine import ENGINES
from prfaas_env.simulator.formulas import NEVER_NS
from prfaas_env.simulator.records import REJECT_REASONS, Status, Totals
from prfaas_env.telemetry import Telemetry

S = 1_000_000_000
ENGINE = pytest.mark.parametrize("engine", ENGINES)


def totals(**values: Any) -> Totals:
    """Totals that are 0 but for `values`."""
    zero: dict[str, Any] = dict.fromkeys(Totals._fields, 0)
    zero |= {"egress_bits": (0.0,), "egress_peak_bps": (0.0,), "reject_reasons": (0,) * len(REJECT_REASONS)}
    return Totals(**zero | values)


def scenario(*overrides: str, name: str = "paper", horizon_s: float = 60) -> Scenario:
    return load_scenario(name, overrides=[f"measure.horizon_s={horizon_s}", *overrides])


def episode(env: PrfaasEnv, seed: int, decide: Any = None) -> list[tuple[float, dict[str, Any]]]:
    """(reward, info) of every step; random actions, or those of `decide(telemetry, step)`."""
    env.reset(seed=seed)
    env.action_space.seed(seed)
    out: list[tuple[float, dict[str, Any]]] = []
    truncated = False
    while not truncated:
        if decide is None:
            _, reward, _, truncated, info = env.step(env.action_space.sample())
        else:
            _, reward, _, truncated, info = env.step_decision(decide(env.telemetry, len(out)))
        out.append((float(reward), info))
    return out


def records_of(env: PrfaasEnv) -> tuple[Any, Any, int]:
    """(requests, records, present instant) of the running episode."""
    assert env._run is not None
    engine = env._run.engine
    return engine.world.requests, engine.records, engine.totals().time_ns


# ------------------------------------------------------------------ terms by hand


def test_waiting_by_hand() -> None:
    """Two requests wait for all of two seconds and one for half a second: 4.5 request-seconds in 2 s, scale 3."""
    settings = RewardSettings(scale=3.0, reject_penalty_s=60.0)
    before = totals(time_ns=S, waiting_ns=7 * S, rejected=1)
    after = totals(time_ns=3 * S, waiting_ns=11 * S + S // 2, rejected=2, aborted=2)
    terms = reward_terms("waiting")(settings, before, after)
    assert terms == {"waiting": -4.5 / 2 / 3, "rejected": -60.0 * 3 / (3.0 * 2)}
    assert reward_terms("paired") is reward_terms("waiting")


def test_goodput_by_hand() -> None:
    terms = reward_terms("goodput")(
        RewardSettings(), totals(time_ns=S, good=4), totals(time_ns=3 * S, good=9)
    )
    assert terms == {"goodput": 2.5}


def test_cost_by_hand() -> None:
    """50 Gbit at 0.1 s each and two conversions of 7 s, in a step of 0.5 s, scale 20."""
    settings = RewardSettings(egress_price_s_per_gbit=0.1, conversion_price_s=7.0)
    before = totals(egress_bits=(1e9, 4e9), conversions=1)
    after = totals(time_ns=S // 2, egress_bits=(21e9, 34e9), conversions=3, waiting_ns=S)
    terms = reward_terms("cost")(settings, before, after)
    assert terms == {
        "waiting": -1 / 0.5 / 20,
        "rejected": 0.0,
        "egress": pytest.approx(-0.1 * 50 / (20 * 0.5)),
        "conversion": -7.0 * 2 / (20 * 0.5),
    }


def test_names() -> None:
    assert list(REWARDS) == ["waiting", "goodput", "cost", "paired"]
    with pytest.raises(PrfaasError, match="unknown reward 'ttft'; known: waiting, goodput, cost, paired"):
        reward_terms("ttft")


# ------------------------------------------------------------------ over whole episodes


@ENGINE
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("paper", []),
        ("drift", ["measure.warmup_s=20"]),
        ("paper", ["workload.arrivals.rate_rps=9"]),  # overload: most requests are open at the end
        ("paper", ["workload.arrivals.rate_rps=9", "admission.max_queue_requests=2"]),
        ("naive", ["conversion.drain_limit_s=1"]),
        ("paper", ["conversion.drain_limit_s=1", "conversion.switch_s=2", "reward.scale=1"]),
        (
            "paper",
            ["measure.horizon_s=60.25", "control={control_interval_s: 0.75, conversion_interval_s: 3}"],
        ),
    ],
)
def test_the_sum_of_waiting_is_the_total_time_to_first_token(
    name: str, overrides: list[str], engine: str
) -> None:
    """Little's law, exactly: open requests count at their age, rejected ones not at all."""
    s = scenario(*overrides, name=name)
    env = PrfaasEnv(s, engine=engine)
    steps = episode(env, seed=3)
    requests, records, end_ns = records_of(env)
    accepted = np.isin(records.status, (Status.OPEN, Status.FINISHED))
    first = np.minimum(records.first_token_ns[accepted], end_ns)
    ttft_ns = int((first - requests.arrival_ns[accepted]).sum())
    assert ttft_ns > 0
    lengths_s = np.diff([0.0, *(info["time_s"] for _, info in steps)])
    paid_s = -math.fsum(
        info["reward_terms"]["waiting"] * dt * s.reward.scale
        for (_, info), dt in zip(steps, lengths_s, strict=True)
    )
    assert paid_s == pytest.approx(ttft_ns / 1e9, rel=1e-12)
    if s.measure.warmup_s == 0:
        cohort = steps[-1][1]["episode_metrics"]
        assert cohort["ttft_s"]["mean"] * cohort["cohort"] == pytest.approx(paid_s, rel=1e-9)
    opened = int((records.first_token_ns[accepted] == NEVER_NS).sum())
    assert opened > 0 or "9" not in "".join(overrides)


@ENGINE
@pytest.mark.parametrize("reward", list(REWARDS))
def test_the_reward_is_the_sum_of_its_terms(reward: str, engine: str) -> None:
    env = PrfaasEnv(scenario("slo.ttft_s=3", "admission.max_queue_requests=4"), reward=reward, engine=engine)
    names = {
        "waiting": {"waiting", "rejected"},
        "goodput": {"goodput"},
        "cost": {"waiting", "rejected", "egress", "conversion"},
        "paired": {"waiting", "rejected", "reference"},
    }[reward]
    for value, info in episode(env, seed=1):
        assert set(info["reward_terms"]) == names
        assert value == math.fsum(info["reward_terms"].values())


def test_rejections_are_charged_so_that_shedding_never_wins() -> None:
    """Each rejection costs reject_penalty_s of waiting; a door that turns most away is worse than one that queues."""
    load = "workload.arrivals.rate_rps=9"
    shed = PrfaasEnv(scenario(load, "admission.max_queue_requests=1"))
    steps = episode(shed, seed=2)
    rejected = steps[-1][1]["rejected"]
    assert rejected > 50
    scale = shed.scenario.reward.scale
    paid_s = -math.fsum(info["reward_terms"]["rejected"] for _, info in steps) * scale
    assert paid_s == pytest.approx(60.0 * rejected, rel=1e-12)
    queue = episode(PrfaasEnv(scenario(load)), seed=2)
    assert math.fsum(r for r, _ in steps) < math.fsum(r for r, _ in queue)
    free = PrfaasEnv(scenario(load, "admission.max_queue_requests=1", "reward.reject_penalty_s=0"))
    assert math.fsum(r for r, _ in episode(free, seed=2)) > math.fsum(r for r, _ in queue)


@ENGINE
def test_goodput_counts_the_good_requests(engine: str) -> None:
    s = scenario("slo.ttft_s=2.5", horizon_s=120)
    env = PrfaasEnv(s, reward="goodput", engine=engine)
    total = math.fsum(r for r, _ in episode(env, seed=4))  # a step is one second
    requests, records, _ = records_of(env)
    done = records.finish_ns != NEVER_NS
    ttft_s = (records.first_token_ns[done] - requests.arrival_ns[done]) / 1e9
    tpot_s = (
        (records.finish_ns[done] - records.first_token_ns[done]) / 1e9 / (requests.output_tokens[done] - 1)
    )
    good = int(((ttft_s <= 2.5) & (tpot_s <= 0.025 * (1 + 1e-9))).sum())
    assert 10 < good < done.sum()
    assert total == pytest.approx(good, rel=1e-12)
    end = env.telemetry.time_s
    assert env._run is not None
    assert env._run.metrics()["goodput_rps"] == pytest.approx(good / end)


@ENGINE
def test_cost_charges_what_was_sent_and_converted(engine: str) -> None:
    s = scenario("reward.egress_price_s_per_gbit=0.5", "reward.conversion_price_s=3", "conversion.switch_s=1")
    env = PrfaasEnv(s, reward="cost", engine=engine)
    steps = episode(env, seed=5)
    info = steps[-1][1]
    scale = s.reward.scale

    def paid_s(term: str) -> float:
        return -math.fsum(i["reward_terms"][term] for _, i in steps) * scale

    assert info["conversions"] > 0
    assert paid_s("egress") == pytest.approx(0.5 * info["egress_bits"] / 1e9, rel=1e-9)
    assert paid_s("conversion") == pytest.approx(3.0 * info["conversions"], rel=1e-12)
    plain = episode(PrfaasEnv(s, engine=engine), seed=5)
    for (_, a), (_, b) in zip(steps, plain, strict=True):
        assert {k: a["reward_terms"][k] for k in b["reward_terms"]} == b["reward_terms"]


# ------------------------------------------------------------------ paired


@ENGINE
@pytest.mark.parametrize("reference", ["earliest_finish", "static:threshold_tokens=8000", "dual_timescale"])
def test_playing_the_reference_gives_zero(reference: str, engine: str) -> None:
    load = "workload.arrivals={kind: poisson, rate_rps: 4}"
    s = scenario(load, "admission.max_queue_requests=3", name="drift", horizon_s=100)
    env = PrfaasEnv(s, reward="paired", reference=reference, engine=engine)
    mine = make_policy(reference)
    mine.reset(PolicyContext(s, env.schema, 0))
    steps = episode(env, 6, lambda telemetry, _: mine.decide(telemetry))
    assert all(abs(reward) <= 1e-15 * abs(i["reward_terms"]["reference"]) for reward, i in steps)
    assert any(i["reward_terms"]["reference"] > 0 for _, i in steps)


class Feedback:
    """A reference whose decisions follow its own queues."""

    constant = False

    def reset(self, context: PolicyContext) -> None:
        pass

    def decide(self, telemetry: Telemetry) -> Decision:
        waiting = telemetry.pd[0].prefill_queue_requests - telemetry.prfaas[0].prefill_queue_requests
        return Decision.same(1, threshold_tokens=max(15_000.0 - 5_000.0 * waiting, 0.0))


@ENGINE
def test_paired_is_the_difference_of_two_waiting_rewards(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reference_for_tests", sys.modules[__name__])
    s = scenario("workload.arrivals={kind: poisson, rate_rps: 5}", name="drift", horizon_s=80)

    def agent(_: Any, step: int) -> Decision:
        return Decision.same(1, threshold_tokens=2_000.0 * (step % 7), move=Move(step // 15 % 3))

    rule = Feedback()
    paired_env = PrfaasEnv(s, reward="paired", reference="reference_for_tests:Feedback", engine=engine)
    paired = episode(paired_env, 7, agent)
    mine = episode(PrfaasEnv(s, engine=engine), 7, agent)
    theirs = episode(PrfaasEnv(s, engine=engine), 7, lambda telemetry, _: rule.decide(telemetry))
    for (difference, info), (a, _), (b, _) in zip(paired, mine, theirs, strict=True):
        assert info["reward_terms"]["reference"] == -b
        assert difference == pytest.approx(a - b, abs=1e-12)
    assert any(difference != 0 for difference, _ in paired)
    # the figures at the end are the agent's own
    assert paired[-1][1]["episode_metrics"] == mine[-1][1]["episode_metrics"]


def test_a_stateful_reference_starts_anew_each_episode() -> None:
    env = PrfaasEnv(scenario(horizon_s=60), reward="paired", reference="dual_timescale")
    first = [r for r, _ in episode(env, seed=8)]
    episode(env, seed=9)
    assert [r for r, _ in episode(env, seed=8)] == first


# ------------------------------------------------------------------ any interval


@given(
    st.integers(1, 10**13),
    st.integers(0, 10**16),
    st.floats(1e-3, 1e3),
    st.integers(0, 1000),
)
def test_waiting_is_exact_for_any_interval(dt_ns: int, waiting_ns: int, scale: float, lost: int) -> None:
    settings = RewardSettings(scale=scale)
    after = totals(time_ns=dt_ns, waiting_ns=waiting_ns, rejected=lost)
    terms = reward_terms("waiting")(settings, totals(), after)
    exact = -Fraction(waiting_ns, dt_ns) / Fraction(scale)
    assert terms["waiting"] == pytest.approx(float(exact), rel=1e-14)
    assert terms["rejected"] == pytest.approx(-60.0 * lost / scale / (dt_ns / 1e9), rel=1e-12)
