"""Pictures and text of the state: one size per deployment, the same for the same reading, what they say."""

from __future__ import annotations

import builtins
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled

from prfaas_env import rendering
from prfaas_env.decision import Decision
from prfaas_env.env import PrfaasEnv
from prfaas_env.scenarios import load_scenario
from prfaas_env.sites import link_pairs

NAMES = pytest.mark.parametrize("name", ["paper", "homogeneous", "naive", "two_regions", "shared_prfaas"])


def played(name: str, steps: int, decision: Decision | None = None) -> PrfaasEnv:
    env = PrfaasEnv(
        load_scenario(name, overrides=["control.conversion_interval_s=5"]),
        engine="simpy",
        render_mode="rgb_array",
    )
    env.reset(seed=3)
    for _ in range(steps):
        env.step_decision(decision or Decision.same(env.schema.n_pd, margin_s=0.0))
    return env


def has(picture: np.ndarray[Any, Any], colour: tuple[int, int, int]) -> bool:
    return bool((picture == np.array(colour, dtype=np.uint8)).all(axis=2).any())


@NAMES
def test_a_picture_has_one_size_and_is_the_same_for_the_same_reading(name: str) -> None:
    env = played(name, 0)
    empty = env.render()
    for _ in range(15):
        env.step_decision(Decision.same(env.schema.n_pd, margin_s=0.0))
    busy = env.render()
    for picture in (empty, busy):
        assert picture.dtype == np.uint8
        assert picture.shape == (empty.shape[0], 1000, 3)
        assert picture.shape[0] % 2 == 0
    assert not np.array_equal(empty, busy)
    assert np.array_equal(busy, env.render())
    assert np.array_equal(played(name, 15).render(), busy)


@pytest.mark.parametrize("mode", ["rgb_array", "ansi", "human"])
def test_gymnasiums_checker_accepts_every_mode(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make("PrfaaS-v0", scenario="two_regions", engine="simpy", render_mode=mode)
        env.reset(seed=1)
        env.step(env.action_space.sample())
        env.render()
    env.close()
    assert ("local 1" in capsys.readouterr().out) == (mode == "human")


def test_more_sites_need_a_taller_picture() -> None:
    heights = {name: played(name, 0).render().shape[0] for name in ("paper", "two_regions", "shared_prfaas")}
    assert heights["paper"] < heights["two_regions"] < heights["shared_prfaas"]


def test_colours_follow_the_state() -> None:
    quiet = rendering.picture(played("paper", 0).telemetry)
    assert not has(quiet[:-30], rendering._RED)  # the legend at the bottom has every colour
    assert not has(quiet[:-30], rendering._ORANGE)
    env = played("homogeneous", 60, Decision.same(1, threshold_tokens=np.inf))
    env.step_decision(Decision.same(1, threshold_tokens=np.inf, move=-1))
    assert env.telemetry.pd[0].prefill_queue_requests > 0
    assert has(env.render()[:-30], rendering._RED)
    converting = played("paper", 5, Decision.same(1, margin_s=0.0))
    converting.step_decision(Decision.same(1, margin_s=30.0, move=1))
    assert converting.telemetry.pd[0].converting_instances == 1
    local = converting.render()[:-30, 670:]  # right of the lines of the link
    assert has(local, rendering._ORANGE)
    assert not has(played("paper", 6).render()[:-30, 670:], rendering._ORANGE)


def test_the_text_says_what_the_telemetry_says() -> None:
    env = played("two_regions", 20)
    said = rendering.text(env.telemetry, link_pairs(env.scenario.deployment))
    for k, (j, i) in enumerate(link_pairs(env.scenario.deployment)):
        link = env.telemetry.link[k]
        line = next(text for text in said.splitlines() if text.startswith(f"link {k} ({j} to {i})"))
        assert f"{link.utilisation_5s * 100:.0f}% of {link.nominal_capacity_bps / 1e9:.0f} Gbps" in line
    for i, pd in enumerate(env.telemetry.pd):
        assert f"local {i}: margin +0.0 s, {pd.prefill_instances:.0f} prefill" in said


def test_ten_thousand_instances_fit() -> None:
    wide = load_scenario(
        "paper",
        overrides=[
            "deployment.pd=[{name: pd0, hardware: h20, n_prefill: 400, n_decode: 600}]",
            "deployment.prfaas=[{name: prfaas0, hardware: h200, n_instances: 250}]",
            "measure.horizon_s=5",
        ],
    )
    env = PrfaasEnv(wide, engine="simpy", render_mode="rgb_array")
    env.reset(seed=1)
    assert env.render().shape == played("paper", 0).render().shape


def test_a_long_title_does_not_leave_the_picture() -> None:
    telemetry = played("paper", 1).telemetry
    long = rendering.picture(telemetry, title="x" * 1000)
    assert long.shape == rendering.picture(telemetry).shape
    assert (long[:50, -10:] == 255).all()


def test_without_pillow_one_line_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    env = played("paper", 0)
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DependencyNotInstalled, match=r"pip install \"prfaas-env\[render\]\""):
        env.render()
