"""What a policy in shadow mode would have done: where it differs, what that is worth, what it had never seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_env.bundle_manifest import InputRanges
from prfaas_env.decision import Decision, Move
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.formulas import NS_PER_S
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import Telemetry
from prfaas_serving.decision_log import Log, read_log
from prfaas_serving.drift import TOLERANCE, outside, outside_share, ranges_of
from prfaas_serving.log_commands import shadow_report as shadow_command
from prfaas_serving.shadow_report import divergence, drift, shadow_report
from tests.prfaas_env.bundles import make_bundle
from tests.serving.log_producer import decision, produce, request, tiny_header, write

SHORT = load_scenario("paper", overrides=["measure.horizon_s=330", "workload.arrivals.rate_rps=2.6"])
SCHEMA = scenario_schema(SHORT)
APP = typer.Typer()
APP.command("shadow-report")(shadow_command)
APP.command("other")(lambda: None)


@pytest.fixture(scope="module")
def shadow(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Earliest finish in the shadow of a static threshold."""
    path = tmp_path_factory.mktemp("logs") / "shadow"
    produce(path, SHORT, "earliest_finish", rule="static")
    return read_log(path)


# ------------------------------------------------------------------------------ differences


def threshold(tokens: float, move: Move = Move.NONE) -> Decision:
    return Decision.same(1, threshold_tokens=tokens, move=move)


def test_where_a_policy_would_have_differed(tmp_path: Path) -> None:
    pairs: dict[int, dict[str, Any]] = {
        1: {"proposed": threshold(20_000.0), "new_lengths": ((),)},
        2: {"new_lengths": ((10_000, 10_001, 20_000, 20_001),)},  # what came after decision 1
        3: {"proposed": threshold(10_000.0, Move.DECODE_TO_PREFILL), "by": "rule"},
        4: {"proposed": Decision.same(1, margin_s=0.0), "new_lengths": ((5, 50_000),)},
        5: {"proposed": None, "new_lengths": ((15_000,),)},  # after a margin: not known
        6: {"acted": None, "new_lengths": ((15_000,),)},
        7: {"proposed": threshold(9_000.0), "by": "rule"},
    }
    lines = [decision(k, **pairs.get(k, {})) for k in range(10)]
    found = divergence(write(tmp_path / "log", tiny_header(), lines))
    assert found.intervals == 8
    assert found.differing == 4
    assert found.kinds == {"threshold": 2, "move": 1, "threshold or margin": 1}
    assert found.by == {"policy": 2, "rule": 2}
    assert (found.requests, found.routed_otherwise) == (6, 2)
    assert [example.n for example in found.examples] == [1, 3, 4, 7]
    assert found.as_json()["kinds"] == {"threshold": 2 / 8, "threshold or margin": 1 / 8, "move": 1 / 8}
    assert found.as_json()["examples"][0]["text"] == (
        f"{tmp_path / 'log'}:3: decision 1 at 1.000 s: acted threshold 10,000 tokens; "
        "proposed threshold 20,000 tokens"
    )


def test_few_examples_and_one_of_each_kind(tmp_path: Path) -> None:
    lines = [decision(k, proposed=threshold(1.0)) for k in range(30)]
    lines[25] = decision(25, proposed=threshold(10_000.0, Move.DECODE_TO_PREFILL))
    found = divergence(write(tmp_path / "log", tiny_header(), lines))
    assert [example.n for example in found.examples] == [0, 1, 2, 3, 25]


# ------------------------------------------------------------------------------------- effect


def test_the_effect_is_that_of_the_world_itself(shadow: Log) -> None:
    """Constant capacity: the estimate is what the two rules really do there, request by request."""
    report = shadow_report(shadow)
    effect = report.effect
    assert effect is not None
    n = len(shadow.requests)
    ttft = []
    for spec in ("earliest_finish", "static"):
        episode = simulate(SHORT, make_policy(spec), seed=0, n_requests=n)
        ttft.append((episode.records.first_token_ns - episode.world.requests.arrival_ns) / NS_PER_S)
    (run,) = effect.others
    estimate = effect.effect(run).ttft_mean_s
    assert estimate.mean == pytest.approx(float((ttft[0] - ttft[1]).mean()), abs=1e-9)
    assert estimate.mean < 0
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low < estimate.mean < estimate.high
    assert effect.model_error.ttft_mean_s.mean == 0.0
    assert report.identical_share == 1.0
    assert report.divergence.kinds == {"threshold or margin": len(shadow.decisions)}
    assert report.drift is None
    assert "earliest_finish has no input ranges" in report.no_drift


def test_a_policy_that_is_not_the_log_own_is_refused(shadow: Log) -> None:
    with pytest.raises(PrfaasError, match=r"--policy never: is \w{12}; the log is of"):
        shadow_report(shadow, policy="never", simulate=False)


def test_a_log_without_decisions(tmp_path: Path) -> None:
    log = write(tmp_path / "log", tiny_header(), [request(1.0)])
    with pytest.raises(PrfaasError, match="has no decisions: nothing to report"):
        shadow_report(log)


# -------------------------------------------------------------------------------------- drift


def reading(**fields: float) -> Telemetry:
    """A reading of zeros but for some fields, by their full name with `__` for the point."""
    values = np.zeros(len(SCHEMA))
    for name, value in fields.items():
        values[SCHEMA.index[name.replace("__", ".")]] = value
    return Telemetry(
        SCHEMA,
        0,
        values,
        conversion_tick=False,
        legal_moves=((False, True, False),),
        recent_lengths_tokens=(np.zeros(0, dtype=np.int64),),
    )


def ranges(**fields: tuple[float | None, float | None]) -> InputRanges:
    """All fields at 0 but for some."""
    ends: list[list[float | None]] = [[0.0] * len(SCHEMA), [0.0] * len(SCHEMA)]
    for name, limits in fields.items():
        for column, value in zip(ends, limits, strict=True):
            column[SCHEMA.index[name.replace("__", ".")]] = value
    return InputRanges(low=tuple(ends[0]), high=tuple(ends[1]), readings=10)


def names_outside(telemetry: Telemetry, limits: InputRanges) -> list[str]:
    return [SCHEMA.names[k] for k in np.flatnonzero(outside(telemetry, limits))]


def test_fields_outside_their_range() -> None:
    limits = ranges(pd0__prefill_instances=(3.0, 5.0), link0__utilisation_5s=(0.1, 0.5))
    inside = reading(pd0__prefill_instances=3.0, link0__utilisation_5s=0.5)
    assert names_outside(inside, limits) == []
    assert outside_share(inside, limits) == 0.0
    low = reading(pd0__prefill_instances=2.0, link0__utilisation_5s=0.3)
    assert names_outside(low, limits) == ["pd0.prefill_instances"]
    assert outside_share(low, limits) == 1 / len(SCHEMA)
    both = reading(pd0__prefill_instances=6.0, link0__utilisation_5s=0.52)
    assert names_outside(both, limits) == ["pd0.prefill_instances", "link0.utilisation_5s"]
    # less than the tolerance of the encoded scale does not count
    assert names_outside(reading(pd0__prefill_instances=4.0, link0__utilisation_5s=0.509), limits) == []
    assert TOLERANCE == 0.01


def test_absent_fields_are_not_outside_and_new_ones_are() -> None:
    never = ranges(pd0__output_tokens_mean=(None, None), pd0__output_valid=(0.0, 1.0))
    assert names_outside(reading(pd0__output_tokens_mean=500.0), never) == []
    assert names_outside(reading(pd0__output_tokens_mean=500.0, pd0__output_valid=1.0), never) == [
        "pd0.output_tokens_mean"
    ]
    seen = ranges(pd0__output_tokens_mean=(400.0, 600.0), pd0__output_valid=(1.0, 1.0))
    assert names_outside(reading(pd0__output_valid=1.0, pd0__output_tokens_mean=500.0), seen) == []
    # a flag that was always up and is down is itself outside
    assert names_outside(reading(), seen) == ["pd0.output_valid"]


@given(st.lists(st.floats(0, 1e12), min_size=len(SCHEMA), max_size=len(SCHEMA)))
def test_a_reading_is_inside_the_range_made_of_it(values: list[float]) -> None:
    telemetry = reading()
    telemetry.values[:] = values
    limits = InputRanges(low=tuple(values), high=tuple(values), readings=1)
    assert outside_share(telemetry, limits) == 0.0


def test_drift_of_a_log(tmp_path: Path) -> None:
    def fields(k: int) -> dict[str, float]:
        return {
            "pd0.prefill_queue_requests": 40.0 if k >= 30 else 2.0,
            "link0.open_flows": 9.0 if k < 4 else 0.0,
        }

    lines = [decision(k, fields=fields(k)) for k in range(40)]
    log = write(tmp_path / "log", tiny_header(), lines)
    known = {
        "pd0__prefill_instances": (2.0, 2.0),
        "pd0__decode_instances": (5.0, 5.0),
        "prfaas0__prefill_instances": (3.0, 3.0),
        "link0__nominal_capacity_bps": (80e9, 80e9),
        "link0__observed_capacity_bps": (80e9, 80e9),
        "pd0__prefill_queue_requests": (0.0, 10.0),
        "link0__open_flows": (0.0, 3.0),
    }
    found = drift(log, ranges(**known), 0.5 / len(SCHEMA))
    assert [(f.name, f.share) for f in found.fields] == [
        ("pd0.prefill_queue_requests", 0.25),
        ("link0.open_flows", 0.1),
    ]
    first = found.fields[0]
    assert (first.least, first.greatest, first.low, first.high) == (2.0, 40.0, 0.0, 10.0)
    assert found.mean_share == pytest.approx(14 / 40 / len(SCHEMA))
    assert found.over_limit == pytest.approx(14 / 40)
    assert found.readings == 40
    assert drift(log, ranges(**known), 0.5).over_limit == 0.0


def with_ranges(**fields: Any) -> Any:
    limits = ranges(**fields)

    def change(raw: dict[str, Any]) -> None:
        raw["input_ranges"] = limits.model_dump(mode="json")

    return change


def test_a_bundle_brings_its_ranges(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "b", change=with_ranges(link0__open_flows=(0.0, 3.0)))
    assert ranges_of(make_policy(str(bundle))) == ranges(link0__open_flows=(0.0, 3.0))
    assert ranges_of(make_policy(str(make_bundle(tmp_path / "old")))) is None
    assert ranges_of(make_policy("never")) is None


# ------------------------------------------------------------------------------------ command


def call(*args: Any) -> Any:
    return CliRunner().invoke(APP, ["shadow-report", *map(str, args)])


def test_the_command_reports(shadow: Log) -> None:
    found = call(shadow.path)
    assert found.exit_code == 0, found.output
    n = len(shadow.decisions)
    assert f"the policy differs from what acted in {n:,} of {n:,} intervals (100.0%)" in found.output
    assert "threshold or margin: 100.0% of the intervals" in found.output
    assert "drift: earliest_finish has no input ranges" in found.output
    assert "earliest_finish, simulated, less what acted, simulated: mean TTFT -" in found.output
    raw = json.loads(call(shadow.path, "--json").output)
    assert raw["divergence"]["differing_share"] == 1.0
    assert raw["effect"]["less_acted"]["earliest_finish, simulated"]["ttft_mean_s"]["high"] < 0
    assert raw["modes"] == {"shadow": n}


def test_the_command_names_drift(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "b", change=with_ranges())
    produce(
        tmp_path / "log", SHORT.replace(measure={"horizon_s": 40}), str(bundle), rule="never", drain=False
    )
    found = call(tmp_path / "log", "--no-simulate")
    assert found.exit_code == 0, found.output
    assert "prfaas0.prefill_instances: outside in 100.0% of the readings; 4 to 4 here, 0 to 0" in found.output
    assert "estimated effect" not in found.output
    raw = json.loads(call(tmp_path / "log", "--no-simulate", "--json", "--out-of-range-share", 0.01).output)
    assert raw["effect"] is None
    assert raw["drift"]["over_limit_share"] == 1.0
    assert raw["drift"]["fields"][0]["share"] == 1.0
    bundle.rename(tmp_path / "c")
    assert isinstance(call(tmp_path / "log", "--no-simulate").exception, PrfaasError)
    assert call(tmp_path / "log", "--no-simulate", "--policy", tmp_path / "c").exit_code == 0
