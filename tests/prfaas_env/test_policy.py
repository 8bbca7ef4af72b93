"""Policies by name or by module:Class, their parameters, and the mistakes one can make with them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from prfaas_env.base import PrfaasError
from prfaas_env.decision import Decision
from prfaas_env.policy import (
    Policy,
    PolicyContext,
    is_simulator_only,
    make_policy,
    policy_names,
    refuse_simulator_only,
)
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import Telemetry

MODULE = "my_policies_for_tests"


class Recording:
    """A policy as a user writes one."""

    constant = False

    def __init__(self, threshold_tokens: float = 5_000.0, label: str = "none", **more: Any) -> None:
        self.threshold_tokens = threshold_tokens
        self.label = label
        self.more = more
        self.contexts: list[PolicyContext] = []
        self.times_s: list[float] = []

    def reset(self, context: PolicyContext) -> None:
        self.contexts.append(context)

    def decide(self, telemetry: Telemetry) -> Decision:
        self.times_s.append(telemetry.time_s)
        return Decision.same(telemetry.schema.n_pd, threshold_tokens=self.threshold_tokens)


class Plain(Recording):
    """Two parameters and no more."""

    def __init__(self, a: Any = None, b: Any = None) -> None:
        super().__init__()
        self.given = {"a": a, "b": b}


class NoDecide:
    constant = True

    def reset(self, context: PolicyContext) -> None: ...


class Checked(BaseModel):
    x: int = 0
    y: int = 0


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above as a module that users could have."""
    monkeypatch.setitem(sys.modules, MODULE, sys.modules[__name__])


def refused(spec: str) -> str:
    with pytest.raises(PrfaasError) as caught:
        make_policy(spec)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert spec.partition(":")[0] in message
    return message


RULES = ("never", "always", "static", "dual_timescale", "earliest_finish", "earliest_finish_conversion")


@pytest.mark.parametrize("name", RULES)
def test_every_rule_decides_for_every_scenario(name: str) -> None:
    for scenario_name in ("paper", "homogeneous", "naive"):
        scenario = load_scenario(scenario_name, overrides=["measure.horizon_s=3"])
        policy = make_policy(name)
        assert isinstance(policy, Policy)
        assert simulate(scenario, policy, seed=1).end.time_ns == 3_000_000_000


def test_the_rules_are_installed() -> None:
    assert set(RULES) <= set(policy_names())


def test_a_policy_gets_the_scenario_and_a_seed_but_not_the_workload() -> None:
    scenario = load_scenario("paper", overrides=["measure.horizon_s=4.5"])
    policy = make_policy(f"{MODULE}:Recording")
    assert isinstance(policy, Recording)
    simulate(scenario, policy, seed=8, policy_seed=3)
    assert policy.contexts == [PolicyContext(scenario, scenario_schema(scenario), 3)]
    assert policy.times_s == [0.0, 1.0, 2.0, 3.0, 4.0]
    simulate(scenario, policy, seed=9)
    assert len(policy.contexts) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e4", 1e4),
        ("1.5", 1.5),
        ("inf", math.inf),
        ("-inf", -math.inf),
        (".inf", math.inf),
        ("true", True),
        ("null", None),
        ("word", "word"),
        ("runs/best.onnx", "runs/best.onnx"),
        ("a:b", "a:b"),
        ("'7'", 7.0),
    ],
)
def test_parameter_values_are_read_as_yaml(text: str, value: Any) -> None:
    policy = make_policy(f"{MODULE}:Plain:a={text},b=2")
    assert isinstance(policy, Plain)
    assert policy.given == {"a": value, "b": 2}


def test_a_class_may_take_any_parameter() -> None:
    policy = make_policy(f"{MODULE}:Recording:label=x,colour=red,threshold_tokens=7")
    assert isinstance(policy, Recording)
    assert (policy.label, policy.threshold_tokens, policy.more) == ("x", 7, {"colour": "red"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nope", "unknown policy 'nope'; installed: always, "),
        ("", "unknown policy ''; installed: always, "),
        ("nope:Class", "module 'nope' cannot be imported: No module named 'nope'"),
        (":Class", "module '' cannot be imported: "),
        (".here:Class", "module '.here' cannot be imported: "),
        ("a..b:Class", "module 'a..b' cannot be imported: "),
        ("json:Class", "module 'json' has no 'Class'"),
        ("json:__name__", "'__name__' is not a class or function"),
        ("json:loads", "missing 1 required positional argument"),
        ("collections:OrderedDict", "policy 'collections:OrderedDict'"),
        (f"{MODULE}:NoDecide", "does not make a policy (reset, decide, constant)"),
        (f"{MODULE}:Plain:c=1", "unknown parameter 'c'; known: a, b"),
        (f"{MODULE}:Plain:a=1,a=2", "parameter 'a' is given twice"),
        (f"{MODULE}:Plain:a=[", "the value of 'a' is not valid YAML: '['"),
        (f"{MODULE}:Plain:a=", "'a=' is not key=value"),
        (f"{MODULE}:Plain:a=1,b", "'b' is not key=value"),
        (f"{MODULE}:Plain:=1", "'=1' is not key=value"),
        (f"{MODULE}:Checked:x=a,y=b", "2 validation errors for Checked x Input should be a valid integer"),
        ("never:threshold_tokens=3", "policy 'never': unknown parameter 'threshold_tokens'; known: none"),
        (
            "static:treshold_tokens=3",
            "policy 'static': unknown parameter 'treshold_tokens'; known: threshold_tokens",
        ),
        ("static:threshold_tokens", "'threshold_tokens' is not key=value"),
        ("static:threshold_tokens=few", "threshold_tokens is 'few'"),
        ("static:threshold_tokens=-1", "threshold_tokens is -1"),
        ("static:threshold_tokens=nan", "threshold_tokens is nan"),
        ("earliest_finish:margin_s=nan", "margin_s is nan"),
    ],
)
def test_mistakes_are_one_line(spec: str, message: str) -> None:
    assert message in refused(spec)


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_text_is_a_policy_or_refused_in_one_line(name: str, text: str) -> None:
    for spec in (f"static:{text}", f"static:threshold_tokens={text}", f"{MODULE}:{name}", f"{name}={text}"):
        try:
            make_policy(spec)
        except PrfaasError as error:
            told = str(error)
        else:
            told = ""
        assert len(told.splitlines()) <= 1, repr(told)


def test_a_policy_of_a_room_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prfaas_baselines.fixed", None)
    told = refused("static")
    assert told.startswith("policy 'static': cannot be loaded: ")


def test_a_module_that_fails_with_many_lines_is_told_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policy_module.py").write_text("raise ImportError('first\\n\\nsecond')\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = refused("broken_policy_module:Class")
    assert told.endswith("module 'broken_policy_module' cannot be imported: first second")


def test_policies_are_found_without_importing_them() -> None:
    """Names come from entry points alone: listing them loads no other room."""
    code = (
        "import sys; from prfaas_env.policy import policy_names; print(len(policy_names()), "
        "[m for m in sys.modules if m.startswith('prfaas_') and not m.startswith('prfaas_env')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert result.stdout.strip() == f"{len(policy_names())} []"


# ------------------------------------------------------------------ policies that look into the simulator


class Looking(Recording):
    """Notes in which order it is called, and what it sees of the engine."""

    simulator_only = True
    name = "looking"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def reset(self, context: PolicyContext) -> None:
        self.calls.append("reset")

    def attach(self, engine: Any) -> None:
        self.calls.append(f"attach {engine.name} {engine.now_ns}")
        self.engine = engine

    def decide(self, telemetry: Telemetry) -> Decision:
        self.calls.append(f"decide {self.engine.now_ns == telemetry.time_ns}")
        return Decision.same(telemetry.schema.n_pd, margin_s=0.0)


def test_a_planner_gets_the_engine_before_it_decides() -> None:
    policy = Looking()
    simulate(load_scenario("paper"), policy, seed=0, duration_s=2.0)
    assert policy.calls == ["reset", "attach compiled 0", "decide True", "decide True"]
    assert is_simulator_only(policy)
    assert not is_simulator_only(Recording())


def test_a_planner_is_refused_where_it_cannot_look() -> None:
    with pytest.raises(PrfaasError, match=r"'looking' looks into the simulator.*only; found engine 'simpy'"):
        simulate(load_scenario("paper"), Looking(), seed=0, duration_s=2.0, engine="simpy")
    with pytest.raises(
        PrfaasError, match=r"policy 'x:y' looks into the simulator and cannot fly; it runs in"
    ):
        refuse_simulator_only(Looking(), "x:y", "fly")
    refuse_simulator_only(Recording(), "x:y", "fly")
