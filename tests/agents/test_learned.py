"""The trained policy as a `Policy`: it holds its decisions, and refuses what it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from prfaas_agents.algorithms import make_learner
from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.record import CodecRecord, TelemetryRecord, TrainedOn, check_fits, read_record
from prfaas_agents.settings import PpoSettings
from prfaas_env.base import PrfaasError
from prfaas_env.decision import ActionCodec, Decision, Move
from prfaas_env.policy import PolicyContext, make_policy
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import PD_FIELDS, Telemetry, TelemetrySchema

from .conftest import SHORT, make_model

REGIONS = load_scenario("two_regions", overrides=["measure.horizon_s=60"])

Save = Callable[..., Path]


def loud(model: PPO, seed: int = 0) -> PPO:
    """Random output weights, so that the policy does many different things."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer: Any = model.policy.action_net
        layer.weight.normal_(0.0, 3.0, generator=generator)
        layer.bias.zero_()
    return model


class Recorder:
    """Passes a policy through and keeps what it saw and said."""

    constant = False

    def __init__(self, inner: LearnedPolicy) -> None:
        self.inner = inner
        self.said: list[tuple[Telemetry, Decision]] = []

    def reset(self, context: PolicyContext) -> None:
        self.inner.reset(context)
        self.said.clear()

    def decide(self, telemetry: Telemetry) -> Decision:
        decision = self.inner.decide(telemetry)
        self.said.append((telemetry, decision))
        return decision


@pytest.mark.parametrize("scenario", ["paper", "drift"])
def test_untrained_it_is_earliest_finish(untrained: PPO, save: Save, scenario: str) -> None:
    policy = make_policy(f"ppo:path={save(untrained)}")
    world = load_scenario(scenario, overrides=["measure.horizon_s=300"])
    own = simulate(world, policy, seed=2_000_001)
    rule = simulate(world, make_policy("earliest_finish"), seed=2_000_001)
    assert own.metrics == rule.metrics
    assert np.array_equal(own.records.first_token_ns, rule.records.first_token_ns)


def test_it_decides_as_the_saved_model_does(save: Save) -> None:
    model = loud(make_model())
    path = save(model, decision_interval_s=1.0)
    recorder = Recorder(LearnedPolicy(path))
    simulate(SHORT, recorder, seed=5)
    loaded = PPO.load(path, device="cpu")
    codec = ActionCodec(1, "margin", "discrete")
    choices = set()
    for telemetry, decision in recorder.said:
        action, _ = loaded.predict(telemetry.encode(), deterministic=True)
        expected = codec.decode(action).clusters[0]
        said = decision.clusters[0]
        assert said.margin_s == expected.margin_s
        legal = telemetry.legal_moves[0][expected.move]
        assert said.move == (expected.move if legal else Move.NONE)
        choices.add((expected.margin_s, expected.move, legal))
    assert len({margin for margin, _, _ in choices}) > 2
    assert {legal for _, move, legal in choices if move != Move.NONE} == {True, False}


def test_no_illegal_move_reaches_the_engine(save: Save) -> None:
    policy = LearnedPolicy(save(loud(make_model()), decision_interval_s=1.0))
    metrics = simulate(SHORT, policy, seed=5).metrics
    assert metrics["invalid_moves"] == 0
    assert metrics["conversions"] > 0


def test_decisions_are_held_and_moves_ordered_once(save: Save) -> None:
    recorder = Recorder(LearnedPolicy(save(loud(make_model()), decision_interval_s=5.0)))
    simulate(SHORT, recorder, seed=5)
    assert len(recorder.said) == 120
    margins = [d.clusters[0].margin_s for _, d in recorder.said]
    assert len(set(margins)) > 2
    for k, (_, decision) in enumerate(recorder.said):
        assert margins[k] == margins[k - k % 5]
        if k % 5:
            assert decision.clusters[0].move is Move.NONE


@pytest.mark.parametrize("interval_s", [5.0, 15.0])
def test_holding_is_what_a_longer_control_interval_does(save: Save, interval_s: float) -> None:
    """Training steps are decisions: the scenario with the decision interval as its control interval is the same."""
    policy = LearnedPolicy(save(loud(make_model()), decision_interval_s=interval_s))
    world = load_scenario("drift", overrides=["measure.horizon_s=240"])
    slow = load_scenario(world, overrides=[f"control.control_interval_s={interval_s}"])
    a, b = simulate(world, policy, seed=3), simulate(slow, policy, seed=3)
    assert a.metrics["conversions"] > 0
    assert a.metrics == b.metrics
    assert np.array_equal(a.records.finish_ns, b.records.finish_ns)


def test_an_episode_starts_anew(save: Save) -> None:
    policy = LearnedPolicy(save(loud(make_model()), decision_interval_s=15.0))
    first = simulate(SHORT, policy, seed=5).metrics
    simulate(SHORT, policy, seed=6)
    assert simulate(SHORT, policy, seed=5).metrics == first


# ------------------------------------------------------------------------------------------ what it refuses


def _reset(policy: LearnedPolicy, scenario: Any) -> None:
    policy.reset(PolicyContext(scenario, scenario_schema(scenario), 0))


def test_a_deployment_with_other_telemetry_is_refused_by_field(untrained: PPO, save: Save) -> None:
    path = save(untrained)
    with pytest.raises(
        PrfaasError, match=r"other telemetry .*removed: prfaas0\.prefill_queue_requests"
    ) as caught:
        _reset(LearnedPolicy(path), load_scenario(SHORT, deployment="homogeneous"))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["two_regions", "shared_prfaas"])
def test_a_policy_of_one_site_is_refused_at_several(untrained: PPO, save: Save, name: str) -> None:
    """And the other way round: the message names the groups of fields that have come or gone."""
    path = save(untrained)
    several, one = load_scenario(name), scenario_schema(SHORT)
    with pytest.raises(PrfaasError, match=r"other telemetry .*: added: pd1\.arrivals_valid, .* and \d+ more"):
        _reset(LearnedPolicy(path), several)
    schema = scenario_schema(several)
    extra = len(schema) - len(one)
    record = TelemetryRecord.of(schema)
    assert one.difference(record.as_schema()).startswith("removed: pd1.arrivals_valid, ")
    assert f"and {extra - 5} more" in one.difference(record.as_schema())


def _at_regions(**changes: Any) -> Any:
    return {
        "telemetry": TelemetryRecord.of(scenario_schema(REGIONS)),
        "action": CodecRecord(n_pd=2, routing="margin", form="discrete"),
        "links": ((0, 0), (0, 1), (1, 0), (1, 1)),
        "decision_interval_s": 1.0,
        **changes,
    }


def test_a_policy_of_several_sites_decides_for_each(save: Save) -> None:
    """An untrained one is earliest finish everywhere; a loud one differs between the clusters."""
    env = DummyVecEnv(
        [lambda: gym.make("PrfaaS-v0", scenario=REGIONS, routing="margin", disable_env_checker=True)]
    )
    settings = PpoSettings(hidden=(16,), n_steps=16, batch_size=16, n_epochs=1)
    model = make_learner(env, ActionCodec(2, "margin", "discrete"), settings, 0)
    path = save(model, **_at_regions())
    found = simulate(REGIONS, LearnedPolicy(path), seed=3).metrics
    assert found == simulate(REGIONS, make_policy("earliest_finish"), seed=3).metrics
    recorder = Recorder(LearnedPolicy(save(loud(model), **_at_regions())))
    simulate(REGIONS, recorder, seed=3)
    assert {len(decision.clusters) for _, decision in recorder.said} == {2}
    assert any(d.clusters[0].margin_s != d.clusters[1].margin_s for _, d in recorder.said)
    for telemetry, decision in recorder.said:
        assert all(telemetry.legal_moves[i][c.move] for i, c in enumerate(decision.clusters))


def test_links_between_other_clusters_are_refused_by_name(untrained: PPO, save: Save) -> None:
    """As many clusters and links, so the same fields; but link1 and link2 have changed places."""
    record = read_record(save(untrained, **_at_regions(links=((0, 0), (1, 0), (0, 1), (1, 1)))))
    context = PolicyContext(REGIONS, scenario_schema(REGIONS), 0)
    with pytest.raises(
        PrfaasError, match=r"other links .*: link1 joins prfaas0 and pd1, was prfaas1 and pd0; link2"
    ):
        check_fits(record, context, Path("policy.zip"))
    check_fits(read_record(save(untrained, **_at_regions())), context, Path("policy.zip"))
    check_fits(read_record(save(untrained, **_at_regions(links=None))), context, Path("policy.zip"))


def test_a_field_that_has_gone_or_come_is_named(untrained: PPO, save: Save) -> None:
    schema = scenario_schema(SHORT)
    old = TelemetrySchema(1, 1, 1)
    extra = PD_FIELDS[1].__class__("moon_phase", "share", 0.0, 1.0, "linear", "gone since")
    old.__dict__["names"] = ("pd0.moon_phase", *schema.names[1:])
    old.__dict__["fields"] = (extra, *schema.fields[1:])
    path = save(untrained, telemetry=TelemetryRecord.of(old))
    with pytest.raises(PrfaasError, match=rf"added: {schema.names[0]}; removed: pd0\.moon_phase"):
        _reset(LearnedPolicy(path), SHORT)


def test_another_scale_of_a_field_is_refused(untrained: PPO, save: Save) -> None:
    record = TelemetryRecord.of(scenario_schema(SHORT))
    fields = (record.fields[0].model_copy(update={"high": 2.0}), *record.fields[1:])
    path = save(untrained, telemetry=record.model_copy(update={"fields": fields}))
    with pytest.raises(PrfaasError, match="same names, other units or scales"):
        _reset(LearnedPolicy(path), SHORT)


def test_the_record_gives_back_the_schema() -> None:
    schema = scenario_schema(SHORT)
    again = TelemetryRecord.of(schema).as_schema()
    assert again.names == schema.names
    assert again.fields == schema.fields
    assert schema.difference(again) == ""


def test_a_control_interval_that_does_not_divide_is_refused(untrained: PPO, save: Save) -> None:
    policy = LearnedPolicy(save(untrained, decision_interval_s=5.0))
    slow = load_scenario(
        SHORT, overrides=["control.control_interval_s=2", "control.conversion_interval_s=16"]
    )
    with pytest.raises(PrfaasError, match="decides every 5 s; the scenario's control_interval_s 2 does not"):
        _reset(policy, slow)


def test_files_that_are_not_a_policy(untrained: PPO, save: Save, tmp_path: Path) -> None:
    with pytest.raises(PrfaasError, match=r"nowhere/policy\.zip: not found"):
        make_policy(f"ppo:path={tmp_path}/nowhere/policy.zip")
    with pytest.raises(PrfaasError, match=r"ppo:path=FOLDER/policy\.zip"):
        make_policy("ppo")
    path = save(untrained)
    assert make_policy(f"ppo:path={path.parent}").fingerprint == LearnedPolicy(path).fingerprint  # type: ignore[attr-defined]
    record = json.loads(path.with_suffix(".json").read_text())
    path.write_bytes(b"not a zip")
    with pytest.raises(PrfaasError, match=r"is not the file that policy\.json beside it describes"):
        LearnedPolicy(path)
    import hashlib

    record["weights_sha256"] = hashlib.sha256(b"not a zip").hexdigest()
    path.with_suffix(".json").write_text(json.dumps(record))
    with pytest.raises(PrfaasError, match="is not the policy that its record describes") as caught:
        LearnedPolicy(path)
    assert "\n" not in str(caught.value)
    path.with_suffix(".json").unlink()
    with pytest.raises(PrfaasError, match=r"policy\.json: cannot be read"):
        LearnedPolicy(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format: "),
        ({"hidden": "wide"}, "hidden: "),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"decision_interval_s": None}, "decision_interval_s: "),
        (
            {"action": {"n_pd": 1, "routing": "margin", "form": "discrete", "margins_s": [1, 0]}},
            "action: margins_s must be one or more rising numbers",
        ),
    ],
)
def test_a_wrong_record_is_named_by_field(
    untrained: PPO, save: Save, change: dict[str, Any], message: str
) -> None:
    path = save(untrained)
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **change}))
    with pytest.raises(PrfaasError, match=message) as caught:
        LearnedPolicy(path)
    assert "policy.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_of_another_network_is_refused(untrained: PPO, save: Save) -> None:
    with pytest.raises(PrfaasError, match="is not the policy that its record describes"):
        LearnedPolicy(save(untrained, hidden=(32,)))
    with pytest.raises(PrfaasError, match="is not the policy that its record describes"):
        LearnedPolicy(save(untrained, action=CodecRecord(n_pd=1, routing="threshold", form="discrete")))


def test_what_it_says_of_itself(untrained: PPO, save: Save) -> None:
    trained = TrainedOn(name="mooncake", hash="x", weight=1.0, slice=("bundled:a.jsonl", 0.0, 1200.0))
    path = save(untrained, trained_on=(TrainedOn(name="drift", hash="y", weight=1.0), trained))
    policy = LearnedPolicy(path)
    assert policy.learned
    assert not policy.constant
    assert policy.seen_seeds == ((0, 1_000_000), (1_000_000, 1_000_004))
    assert policy.decision_interval_s == policy.record.decision_interval_s
    assert policy.seen_slices == (("bundled:a.jsonl", 0.0, 1200.0),)
    assert policy.fingerprint == read_record(path).weights_sha256[:12]
    check_fits(policy.record, PolicyContext(SHORT, scenario_schema(SHORT), 0), path)


def test_saving_leaves_two_whole_files(untrained: PPO, save: Save) -> None:
    path = save(untrained)
    assert sorted(p.name for p in path.parent.iterdir()) == ["policy.json", "policy.zip"]
    first = read_record(path)
    save(loud(make_model()))
    assert read_record(path).weights_sha256 != first.weights_sha256
    assert sorted(p.name for p in path.parent.iterdir()) == ["policy.json", "policy.zip"]
