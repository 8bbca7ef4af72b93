"""Exported networks: the model, the ONNX file and the runtime decide alike; what cannot be exported is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch
from sb3_contrib import TQC, MaskablePPO, RecurrentPPO
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv

from prfaas_agents import export
from prfaas_agents.export import export_network, fill_bundle
from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.ppo import FixedScaling, policy_kwargs
from prfaas_agents.record import CodecRecord, TrainedOn
from prfaas_env.base import PrfaasError, stream
from prfaas_env.bundle import BundlePolicy
from prfaas_env.decision import ActionCodec, ActionForm, Move, Routing
from prfaas_env.onnx_check import check_network
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.engine import make_engine
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import draw_world, scenario_schema
from prfaas_env.telemetry import Telemetry

from .conftest import SHORT, make_model, make_record

N = 1000
#: Readings before which the episode starts anew.
RESETS = (0, 137, 600)
CONTEXT = PolicyContext(SHORT, scenario_schema(SHORT), 0)


@pytest.fixture(scope="module")
def readings() -> list[Telemetry]:
    """Readings of an episode under random decisions, one per second."""
    world = draw_world(load_scenario("paper", overrides=[f"measure.horizon_s={N + 1}"]), 11)
    engine, codec = make_engine("simpy", world), ActionCodec(1, "margin", "discrete")
    rng = stream(11, "policy")
    found = []
    for k in range(N):
        engine.run_until(k * 1_000_000_000)
        found.append(engine.telemetry())
        engine.apply(codec.decode([rng.integers(len(codec.grid)), rng.integers(3)]))
    assert {t.legal_moves for t in found} >= {((True, True, True),), ((False, True, False),)}
    return found


def vec_env(form: ActionForm, routing: Routing) -> DummyVecEnv:
    def make() -> gym.Env[Any, Any]:
        return gym.make(
            "PrfaaS-v0",
            scenario=SHORT,
            routing=routing,
            action=form,
            engine="simpy",
            disable_env_checker=True,
        )

    return DummyVecEnv([make])


def shake(module: torch.nn.Module, scale: float = 1.0) -> None:
    """Weights large enough that different readings lead to different actions."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def model_of(name: str, readings: list[Telemetry], routing: Routing = "margin") -> Any:
    """An untrained model with fitted scaling and shaken output weights."""
    small = {"net_arch": [16, 16], "features_extractor_class": FixedScaling}
    discrete = name in {"ppo", "maskable_ppo", "recurrent_ppo"}
    env = vec_env("discrete" if discrete else "continuous", routing)
    common: dict[str, Any] = {"env": env, "seed": 3, "device": "cpu"}
    model: Any
    if name in {"ppo", "ppo_continuous"}:
        model = PPO("MlpPolicy", policy_kwargs=policy_kwargs((16, 16)), **common)
    elif name == "maskable_ppo":
        model = MaskablePPO("MlpPolicy", policy_kwargs=policy_kwargs((16,)), **common)
    elif name in {"recurrent_ppo", "recurrent_ppo_continuous"}:
        kwargs = {**policy_kwargs((16,)), "lstm_hidden_size": 12, "n_lstm_layers": 2}
        model = RecurrentPPO("MlpLstmPolicy", policy_kwargs=kwargs, **common)
    else:
        kind: Any = {"sac": SAC, "tqc": TQC}[name]
        model = kind("MlpPolicy", buffer_size=10, policy_kwargs=small, **common)
    env.close()
    observations = np.stack([t.encode() for t in readings])
    actor = getattr(model.policy, "actor", None)
    scaling = model.policy.pi_features_extractor if actor is None else actor.features_extractor
    scaling.fit(observations)
    if name.startswith("recurrent"):
        shake(model.policy.lstm_actor, 0.5)
    shake(model.policy.action_net if actor is None else actor.mu, 1.0 if actor is None else 0.3)
    if discrete:
        model.policy.action_net.bias.data.zero_()
    return model


def record_of(model: Any, routing: Routing, **changes: Any) -> Any:
    form: ActionForm = "continuous" if isinstance(model.action_space, gym.spaces.Box) else "discrete"
    fields = {"action": CodecRecord(n_pd=1, routing=routing, form=form), "decision_interval_s": 1.0}
    return make_record(**{**fields, **changes})


def onnx_actions(
    content: bytes, policy: BundlePolicy, readings: list[Telemetry]
) -> list[np.ndarray[Any, Any]]:
    """What the file alone gives, run and decoded by hand from the manifest."""
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    manifest = policy.manifest
    state: dict[str, Any] = {}
    found = []
    for k, telemetry in enumerate(readings):
        if k in RESETS:
            state = {s.input: np.zeros(s.shape, dtype=np.float32) for s in manifest.network.states}
        names = [o.name for o in session.get_outputs()]
        out = dict(
            zip(names, session.run(names, {"observation": telemetry.encode()[None], **state}), strict=True)
        )
        state = {s.input: out[s.output] for s in manifest.network.states}
        if manifest.decision.form == "continuous":
            found.append(out["action"][0])
            continue
        grid = len(manifest.decision.routing_grid or ())
        logits = out["logits"][0]
        if manifest.decision.masked:
            logits = np.where(
                ActionCodec(1, manifest.decision.routing, "discrete").masks(telemetry.legal_moves),
                logits,
                -1e30,
            )
        found.append(np.array([logits[:grid].argmax(), logits[grid:].argmax()]))
    return found


def predicted(name: str, model: Any, readings: list[Telemetry]) -> list[np.ndarray[Any, Any]]:
    """What `predict` of the model gives."""
    state, found = None, []
    for k, telemetry in enumerate(readings):
        observation = telemetry.encode()
        if name == "maskable_ppo":
            masks = ActionCodec(1, "margin", "discrete").masks(telemetry.legal_moves)
            action, _ = model.predict(observation, deterministic=True, action_masks=masks)
        else:
            start = np.array([k in RESETS])
            action, state = model.predict(observation, state=state, episode_start=start, deterministic=True)
        found.append(action)
    return found


@pytest.mark.parametrize(
    ("name", "routing"),
    [
        ("ppo", "margin"),
        ("ppo", "threshold"),
        ("maskable_ppo", "margin"),
        ("recurrent_ppo", "margin"),
        ("sac", "margin"),
        ("tqc", "threshold"),
        ("ppo_continuous", "margin"),
        ("recurrent_ppo_continuous", "margin"),
    ],
)
def test_model_file_and_runtime_agree(
    name: str, routing: Routing, readings: list[Telemetry], tmp_path: Path
) -> None:
    model = model_of(name, readings, routing)
    manifest = fill_bundle(tmp_path, model, record_of(model, routing), name=name)
    assert manifest.training.algorithm == name.removesuffix("_continuous")
    assert manifest.decision.masked == (name == "maskable_ppo")
    assert len(manifest.network.states) == (2 if name.startswith("recurrent") else 0)
    policy = BundlePolicy(tmp_path)
    expected = predicted(name, model, readings)
    from_file = onnx_actions((tmp_path / "policy.onnx").read_bytes(), policy, readings)
    codec = manifest.decision.codec()
    for k, telemetry in enumerate(readings):
        if k in RESETS:
            policy.reset(CONTEXT)
        # the period is that of a run whose clock goes on, so that every reading is decided on
        held = copy.deepcopy(policy)
        action = policy.act(telemetry)
        if codec.form == "discrete":
            assert np.array_equal(action, expected[k])
            assert np.array_equal(from_file[k], expected[k])
        else:
            np.testing.assert_allclose(action, expected[k], atol=1e-5, rtol=0)
            np.testing.assert_allclose(from_file[k], expected[k], atol=1e-5, rtol=0)
        (said,) = held.decide(telemetry).clusters
        (wanted,) = codec.decode(action).clusters
        assert (said.margin_s, said.threshold_tokens) == (wanted.margin_s, wanted.threshold_tokens)
        assert said.move == (wanted.move if telemetry.legal_moves[0][wanted.move] else Move.NONE)
    different = {tuple(np.round(np.asarray(a, dtype=float), 2)) for a in expected}
    assert len(different) > 5, different
    if codec.form == "discrete":
        assert {int(a[1]) for a in expected} == {0, 1, 2}


def test_a_bundle_does_what_the_policy_file_does(tmp_path: Path, save: Callable[..., Path]) -> None:
    model = make_model()
    shake(model.policy.action_net, 3.0)
    model.policy.action_net.bias.data.zero_()
    record = make_record(decision_interval_s=5.0)
    (tmp_path / "bundle").mkdir()
    fill_bundle(tmp_path / "bundle", model, record, name="x")
    own = simulate(SHORT, BundlePolicy(tmp_path / "bundle"), seed=5, engine="simpy").metrics
    file = simulate(
        SHORT, LearnedPolicy(save(model, decision_interval_s=5.0)), seed=5, engine="simpy"
    ).metrics
    assert own == file
    assert own["conversions"] > 0


def test_exporting_leaves_the_model_as_it_was_and_gives_the_same_bytes() -> None:
    model = make_model()
    model.policy.set_training_mode(True)
    before = copy.deepcopy(model.policy.state_dict())
    codec = ActionCodec(1, "margin", "discrete")
    first, second = (export_network(m, codec, len(CONTEXT.schema)) for m in (model, model.policy))
    assert first == second
    assert model.policy.training
    assert all(torch.equal(before[k], v) for k, v in model.policy.state_dict().items())
    check_network(first.content)
    assert b"/tests/" not in first.content  # no path of the machine that wrote it


def test_what_cannot_be_exported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    n, codec = len(CONTEXT.schema), ActionCodec(1, "margin", "discrete")
    model = make_model()

    def refused(what: Any, told: str, codec: ActionCodec = codec, n: int = n) -> None:
        with pytest.raises(PrfaasError, match=told) as caught:
            export_network(what, codec, n)
        assert len(str(caught.value).splitlines()) == 1

    refused(object(), "object is not a Stable-Baselines3 model")
    refused(model, "the telemetry has 7 values", n=7)
    refused(model, "the policy acts in MultiDiscrete", ActionCodec(1, "threshold", "discrete"))
    refused(model, "the policy acts in MultiDiscrete", ActionCodec(2, "margin", "discrete"))
    other = DQN("MlpPolicy", gym.make("CartPole-v1"), buffer_size=10, device="cpu")
    refused(other, "DQNPolicy is not supported")
    sde = SAC("MlpPolicy", vec_env("continuous", "margin"), buffer_size=10, use_sde=True, device="cpu")
    refused(sde, "use_sde", ActionCodec(1, "margin", "continuous"))
    spoiled = make_model()
    with torch.no_grad():
        spoiled.policy.action_net.bias[0] = float("nan")
    refused(spoiled, "does not give what the policy gives")
    # a network that is not the one traced
    written = export._traced

    def other_seed(module: torch.nn.Module, *rest: Any) -> bytes:
        changed = copy.deepcopy(module)
        shake(changed, 1e-3)
        return written(changed, *rest)

    monkeypatch.setattr(export, "_traced", other_seed)
    refused(model, "does not give what the policy gives")


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    record = make_record(
        trained_on=(TrainedOn(name="dr|ft", hash="abc", weight=2.0, slice=("bundled:x", 0.0, 60.0)),),
        steps=12_345,
        validation={
            "chosen": {"steps": 8, "score": 0.5, "ttft_mean_s": {"drift": 6.25, "mooncake": None}},
            "first_policy_ttft_mean_s": {"drift": 10.5, "mooncake": None},
            "seeds": [1_000_000, 1_000_004],
        },
    )
    fill_bundle(tmp_path, make_model(), record, name="mine <b>", description="For  tests.")
    card = (tmp_path / "MODEL_CARD.md").read_text()
    assert card.startswith("# mine &lt;b>\n\nFor tests.\n")
    for line in (
        "PPO, 12,345 decisions, reward `waiting`, learning seed 0.",
        "| dr\\|ft | `abc` | 2 | bundled:x, 0 to 60 s |",
        "| drift | 6.25 | 10.5 |",
        "| mooncake | - | - |",
        "- training: 0 to 999,999",
        "- seeds: 1,000,000, 1,000,004",
    ):
        assert line in card.splitlines() or line in card, line
    assert BundlePolicy(tmp_path).manifest.evaluation["chosen"]["score"] == 0.5


def test_a_card_without_evaluation_says_so(tmp_path: Path) -> None:
    fill_bundle(tmp_path, make_model(), make_record(), name="x")
    assert "nothing is known of how well this policy does" in (tmp_path / "MODEL_CARD.md").read_text()
