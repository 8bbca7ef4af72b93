"""`prfaas train` from end to end, in seconds: files, tags, choice of the best, stopping, workers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prfaas_agents.learned import LearnedPolicy
from prfaas_agents.record import read_record
from prfaas_env.base import PrfaasError
from prfaas_env.policy import make_policy
from prfaas_env.simulator.run import simulate
from prfaas_trainings import envs, training
from prfaas_trainings.compare import compare
from prfaas_trainings.config import TrainingConfig, load_config
from prfaas_trainings.envs import make_vec_env
from prfaas_trainings.episodes import EpisodeRunner, Row
from prfaas_trainings.evaluating import evaluate
from prfaas_trainings.exporting import export_run
from prfaas_trainings.training import Run, StopSign, resume, short_run_warning, train

from .test_envs import check_episode_files

Quick = Callable[..., TrainingConfig]
TWO = [
    {"scenario": "paper", "overrides": ["measure.horizon_s=60"]},
    {"scenario": "mooncake", "overrides": ["workload.end_s=60", "measure.horizon_s=60"]},
]
#: Rewards so large and a rate so high that the policy does change within two updates.
WILD = {"n_steps": 8, "batch_size": 8, "n_epochs": 4, "hidden": [8], "scaling_steps": 4, "learning_rate": 0.3,
        "max_grad_norm": 100.0, "neutral_routing": 0.2, "neutral_move": 0.4}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, runner: EpisodeRunner) -> Any:
    """(folder, configuration, result) of one quick training."""
    from .conftest import quick

    out = tmp_path_factory.mktemp("training") / "run"
    validation = {**quick().validation.model_dump(), "timeline": True}
    config = quick(scenarios=TWO, ppo=WILD, validation=validation)
    return out, config, train(config, out, runner=runner)


def events(out: Path) -> EventAccumulator:
    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    return found


def test_the_run_folder_is_complete(finished: Any) -> None:
    out, config, result = finished
    assert sorted(p.name for p in out.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "episodes",
        "policy.json",
        "policy.zip",
        "run.json",
        "tensorboard",
        "validation.json",
    ]
    assert load_config(out / "config.yaml") == config
    facts = json.loads((out / "run.json").read_text())
    assert facts["status"] == result.stopped == "all steps done"
    assert facts["steps"] == result.steps == 32
    assert facts["seeds"] == {"learning": 0, "training": [0, 1_000_000], "validation": [1_000_000, 1_000_001]}
    assert {"torch", "stable-baselines3", "prfaas-env", "python"} <= set(facts["versions"])
    assert TrainingConfig.model_validate(facts["config"]) == config
    check_episode_files(out / "episodes", 2, 1)


def test_every_checkpoint_is_a_policy_of_its_own(finished: Any) -> None:
    out, config, result = finished
    folders = sorted((out / "checkpoints").iterdir())
    assert [f.name for f in folders] == ["step_000000000", "step_000000016", "step_000000032"]
    hashes = set()
    for folder, validated in zip(folders, result.validations, strict=True):
        policy = LearnedPolicy(folder / "policy.zip")
        assert policy.record.steps == validated.steps
        hashes.add(policy.fingerprint)
        # What it was validated as is what it still is.
        seeds = config.validation.seeds.seeds
        again = evaluate(folder, config, seeds=seeds, split="validation", runner=_inline())
        assert again.own(0, 0, "ttft_mean_s").mean == validated.ttft_mean_s["paper"]
    assert len(hashes) == 3


def _inline() -> EpisodeRunner:
    return EpisodeRunner(1)


def test_the_best_by_validation_is_kept(finished: Any) -> None:
    out, _, result = finished
    best = min(result.validations, key=lambda v: v.score)
    assert result.best is best
    kept = read_record(out / "policy.zip")
    assert kept.steps == best.steps
    assert kept.weights_sha256 == read_record(best.folder / "policy.zip").weights_sha256
    assert kept.validation["chosen"]["score"] == best.score
    listed = json.loads((out / "validation.json").read_text())
    assert [v["steps"] for v in listed] == [0, 16, 32]
    assert listed[0]["score"] == 1.0
    # The policy did change, so this is a choice.
    assert len({v.score for v in result.validations}) > 1


def test_the_first_policy_and_the_score_by_hand(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    config = quick(scenarios=[{**TWO[0], "weight": 3}, {**TWO[1], "weight": 1}], total_steps=16, ppo=WILD)
    result = train(config, tmp_path / "run", runner=runner)
    first, last = result.validations[0], result.validations[-1]
    for scenario in config.load_scenarios(validation=True):
        rule = [
            simulate(scenario, make_policy("earliest_finish"), seed=k).metrics["ttft_s"]["mean"]
            for k in config.validation.seeds.seeds
        ]
        assert first.ttft_mean_s[scenario.name] == pytest.approx(np.mean(rule), rel=1e-12)
    ratios = {k: last.ttft_mean_s[k] / first.ttft_mean_s[k] for k in first.ttft_mean_s}
    assert last.score == pytest.approx((3 * ratios["paper"] + ratios["mooncake"]) / 4)


def test_validation_equals_a_later_comparison(finished: Any, runner: EpisodeRunner) -> None:
    out, config, result = finished
    found = compare(
        config.load_scenarios(validation=True),
        [Row("kept", f"ppo:path={out / 'policy.zip'}")],
        seeds=config.validation.seeds.seeds,
        split="validation",
        runner=runner,
    )
    for s, label in enumerate(found.labels):
        assert found.own(s, 0, "ttft_mean_s").mean == result.best.ttft_mean_s[label]


def test_the_record_says_what_was_seen(finished: Any) -> None:
    out, config, _ = finished
    policy = LearnedPolicy(out)
    assert policy.seen_seeds == ((0, 1_000_000), (1_000_000, 1_000_002))
    assert policy.seen_slices == (("bundled:mooncake_conversation_first_32min.jsonl", 0.0, 60.0),)
    assert [t.hash for t in policy.record.trained_on] == [s.hash for s in config.load_scenarios()]
    assert policy.record.decision_interval_s == config.decision_interval_s


SCALARS = {
    "prfaas/reward", "prfaas/reward_waiting", "prfaas/reward_rejected", "prfaas/ttft_mean_s",
    "prfaas/ttft_p50_s", "prfaas/ttft_p90_s", "prfaas/ttft_p99_s", "prfaas/goodput_rps", "prfaas/egress_gbps",
    "prfaas/link_use", "prfaas/margin_mean_s", "prfaas/prefill_instances", "prfaas/decode_instances",
    "prfaas/converting_instances", "prfaas/conversions_per_hour", "prfaas/invalid_moves_per_hour",
    "prfaas_validation/score", "prfaas_validation/ttft_mean_s_paper", "train/value_loss",
    "train/policy_gradient_loss", "train/approx_kl", "train/clip_fraction", "train/entropy_loss",
    "train/explained_variance", "train/learning_rate",
}  # fmt: skip


def test_tags_of_the_event_file(finished: Any) -> None:
    out, _, _ = finished
    tags = events(out).Tags()
    assert set(tags["scalars"]) >= SCALARS | {"rollout/ep_rew_mean", "rollout/ep_len_mean"}
    texts = {tag.removesuffix("/text_summary") for tag in tags["tensors"]}
    assert texts >= {"run/config", "run/versions", "run/seeds", "run/scenarios"}
    assert tags["histograms"] == ["prfaas/margins_s"]
    pictures = events(out).Images("prfaas_validation/timeline")
    assert [picture.step for picture in pictures] == [0, 16, 32]
    assert all(picture.width > 300 and picture.height > 300 for picture in pictures)
    for tag in SCALARS:
        values = events(out).Scalars(tag)
        assert all(np.isfinite(v.value) for v in values), tag
        assert [v.step for v in values] == sorted(v.step for v in values)


def test_tags_appear_although_no_episode_ends(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [{"scenario": "paper", "overrides": ["measure.horizon_s=3600"]}]
    validation = {"seeds": {"first": 1_000_000, "count": 1}, "overrides": ["measure.horizon_s=30"]}
    config = quick(scenarios=long, validation=validation, total_steps=16)
    train(config, tmp_path / "run", runner=runner)
    assert "16 steps over 2 envs end before one episode of 240 steps does" in capsys.readouterr().err
    tags = set(events(tmp_path / "run").Tags()["scalars"])
    assert tags >= SCALARS
    assert "rollout/ep_rew_mean" not in tags


def test_no_warning_for_a_run_of_whole_episodes(quick: Quick) -> None:
    config = quick(total_steps=8)
    assert short_run_warning(config, config.load_scenarios()) is None
    config = quick(total_steps=7)
    assert short_run_warning(config, config.load_scenarios()) is not None


def test_scalars_by_hand(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    """A policy that nearly never leaves the neutral action, without traffic: every mean is known."""
    silent = [{"scenario": "paper", "overrides": ["measure.horizon_s=60", "workload.arrivals.rate_rps=0"]}]
    still = {**quick().ppo.model_dump(), "neutral_routing": 1 - 1e-9, "neutral_move": 1 - 1e-9}
    train(quick(scenarios=silent, ppo=still, total_steps=16), tmp_path / "run", runner=runner)
    found = events(tmp_path / "run")
    for tag, value in {
        "reward": 0.0,
        "egress_gbps": 0.0,
        "margin_mean_s": 0.0,
        "prefill_instances": 3.0,
        "conversions_per_hour": 0.0,
        "invalid_moves_per_hour": 0.0,
        "goodput_rps": 0.0,
    }.items():
        assert [v.value for v in found.Scalars(f"prfaas/{tag}")] == [value], tag
    assert "prfaas/ttft_mean_s" not in found.Tags()["scalars"]  # no request, no time to first token


def test_the_same_seed_learns_the_same(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(quick(total_steps=16, seed=seed, ppo=WILD), tmp_path / name, runner=runner)
        state = LearnedPolicy(tmp_path / name / "checkpoints" / "step_000000016")._network.state_dict()
        weights.append(torch.cat([v.flatten() for v in state.values()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "changes", [{"routing": "threshold"}, {"reward": "paired"}, {"reward_shape": "plain"}]
)
def test_other_routing_and_rewards(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path, changes: dict[str, Any]
) -> None:
    result = train(quick(total_steps=16, **changes), tmp_path / "run", runner=runner)
    assert result.steps == 16
    tags = set(events(tmp_path / "run").Tags()["scalars"])
    assert ("prfaas/threshold_log_mean_tokens" in tags) == (changes.get("routing") == "threshold")
    assert ("prfaas/reward_reference" in tags) == (changes.get("reward") == "paired")


def test_margins_of_ones_own_are_what_the_policy_decides(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path
) -> None:
    train(quick(total_steps=16, margins_s=[-0.5, 0.25, 0.5], ppo=WILD), tmp_path / "run", runner=runner)
    export_run(tmp_path / "run", tmp_path / "bundle")
    found = []
    for spec in (f"ppo:path={tmp_path / 'run' / 'policy.zip'}", str(tmp_path / "bundle")):
        episode = simulate(quick().load_scenarios()[0], make_policy(spec), seed=3, timeline=True)
        assert episode.timeline is not None
        found.append(episode.timeline["margin_s"].tolist())
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
    assert set(found[0]) <= {-0.5, 0.25, 0.5}


def test_time_ends_a_training(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    config = quick(total_steps=None, minutes=0.05)
    start_s = time.monotonic()
    result = train(config, tmp_path / "run", runner=runner)
    assert result.stopped == "time is up"
    assert result.steps > 0
    assert time.monotonic() - start_s < 60


# ------------------------------------------------------------------------------------------------ folders


def test_a_run_folder_in_use(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(quick(total_steps=16), out, runner=runner)
    with pytest.raises(PrfaasError, match="holds an earlier result"):
        train(quick(total_steps=16), out, runner=runner)
    (out / "stale").write_text("")
    train(quick(total_steps=16), out, runner=runner, force=True)
    assert not (out / "stale").exists()
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "a.jpg").write_text("")
    with pytest.raises(PrfaasError, match=r"holds no run\.json"):
        train(quick(), foreign, runner=runner, force=True)
    assert (foreign / "a.jpg").exists()


def test_scenarios_that_do_not_fit_leave_no_folder(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path
) -> None:
    with pytest.raises(PrfaasError, match="different observations"):
        train(
            quick(scenarios=[{"scenario": "paper"}, {"scenario": "homogeneous"}]),
            tmp_path / "run",
            runner=runner,
        )
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------- stopping


def test_ctrl_c_keeps_what_was_learned(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def interrupt() -> None:
        while not (out / "checkpoints" / "step_000000016").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    result = train(quick(total_steps=10_000_000), out, runner=runner)
    assert result.stopped == "stopped by Ctrl-C"
    assert 0 < result.steps < 10_000_000
    assert "what was learned is kept" in capsys.readouterr().err
    assert result.validations[-1].steps > 0
    assert LearnedPolicy(out).record.steps == result.best.steps
    assert json.loads((out / "run.json").read_text())["status"] == "stopped by Ctrl-C"
    assert signal.getsignal(signal.SIGINT) is handler  # a background job starts with the signal ignored


def test_a_stop_sign_outside_the_main_thread_is_never_set(quick: Quick) -> None:
    from prfaas_trainings.progress import ProgressReport

    seen = []

    def work() -> None:
        with training.stop_on_ctrl_c(ProgressReport("x", 1)) as sign:
            seen.append(sign.is_set)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    sign = StopSign()
    sign.set()
    assert sign.is_set


def test_a_dead_worker_ends_the_training_and_leaves_the_last_checkpoint(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(*arguments: Any) -> Any:
        made.append(make_vec_env(*arguments))
        return made[0]

    real = Run.checkpoint

    def checkpoint(self: Run) -> Any:
        validated = real(self)
        if validated.steps:
            os.kill(made[0].processes[1].pid, signal.SIGKILL)
        return validated

    monkeypatch.setattr(envs, "make_vec_env", make)
    monkeypatch.setattr(Run, "checkpoint", checkpoint)
    out = tmp_path / "run"
    with pytest.raises(PrfaasError, match=r"env worker 1 ended with signal 9; what was learned .* is in"):
        train(quick(total_steps=1000, vectorization="processes"), out, runner=runner)
    assert json.loads((out / "run.json").read_text())["status"] == "env worker 1 ended with signal 9"
    assert LearnedPolicy(out).record.steps == 0 or LearnedPolicy(out).record.steps == 16
    assert LearnedPolicy(out / "checkpoints" / "step_000000016").record.steps == 16
    assert not any(process.is_alive() for process in made[0].processes)


# ---------------------------------------------------------------------------------------------- command


def test_command(write_config: Callable[..., Path], run: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    path = write_config(total_steps=..., minutes=30)
    text = run("train", "-c", str(path), "--steps", "16", "--seed", "3", "--out", str(out), "--jobs", "1")
    assert "all steps done at step 16; kept the policy of step" in text
    assert f"ppo:path={out}/policy.zip" in text.replace("\n", "")
    config = load_config(out / "config.yaml")
    assert (config.total_steps, config.minutes, config.seed) == (16, None, 3)
    with pytest.raises(PrfaasError, match="holds an earlier result"):
        run("train", "-c", str(path), "--out", str(out))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "nothing"], "unknown training 'nothing'"),
        (["--set", "colour=red"], "unknown field 'colour'"),
        (["--minutes", "0"], "minutes"),
    ],
)
def test_mistakes_are_one_line(
    run: Callable[..., str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(PrfaasError, match=message) as caught:
        run("train", "--out", str(tmp_path / "run"), *arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


HEAVY = "print([m for m in ('torch', 'stable_baselines3', 'matplotlib') if m in sys.modules])"


@pytest.mark.parametrize(
    "modules",
    [
        "prfaas_trainings.commands",
        "prfaas_trainings.compare, prfaas_trainings.tables, prfaas_trainings.results",
    ],
)
def test_commands_and_comparing_rules_load_nothing_heavy(modules: str) -> None:
    code = f"import sys, {modules}; {HEAVY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


#: A batched training of node moves in seconds, for `quick`.
MOVES_ALONE: dict[str, Any] = {
    "scenarios": [{"scenario": "drift", "overrides": ["measure.horizon_s=60"]}],
    "engine": "compiled",
    "vectorization": "batched",
    "n_envs": 8,
    "algorithm": "maskable_ppo",
    "ppo": None,
    "maskable_ppo": {**WILD, "n_steps": 4, "batch_size": 16, "neutral_routing": 0.95},
    "choices": "moves",
    "validation": {"seeds": {"first": 1_000_000, "count": 2}, "every_steps": 64, "timeline": False},
}
ROUTING_FITTED: dict[str, Any] = {
    **MOVES_ALONE,
    "margins_s": [0.0, 0.5, 30.0],
    "margin_s": 0.5,
    "routing_fit": {"states": 24, "n_envs": 4, "horizon_s": 30, "epochs": 3, "learning_rate": 0.03},
    "total_steps": 64,
}


def test_moves_alone_with_foresight_and_a_warm_start(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path
) -> None:
    config = quick(
        **MOVES_ALONE,
        foresight=True,
        stagger=True,
        warm_start={"rounds": 2, "states": 8, "n_envs": 4, "horizon_s": 30, "epochs": 1},
        total_steps=160,
    )
    out = tmp_path / "run"
    result = train(config, out, runner=runner)
    # the first policy, then the warm start, whose states are steps, then updates of 32 decisions
    steps = [v.steps for v in result.validations]
    assert steps[0] == 0
    assert 16 <= steps[1] < 32
    assert (np.diff(steps[1:]) % 32 == 0).all()
    assert result.steps >= 160
    policy = LearnedPolicy(out)
    episode = simulate(config.load_scenarios()[0], policy, seed=1_000_100)
    assert episode.metrics["invalid_moves"] == 0
    assert read_record(out / "policy.zip").network == {"foresight_fields": 30}
    again = resume(out, runner=runner, total_steps=208)
    assert again.steps >= 208
    assert again.validations[: len(result.validations)] == result.validations


def test_the_routing_is_fitted_after_the_moves(quick: Quick, runner: EpisodeRunner, tmp_path: Path) -> None:
    config = quick(**ROUTING_FITTED)
    out = tmp_path / "run"
    result = train(config, out, runner=runner)
    moves, fitted = result.validations[-2:]
    assert moves.steps == 64
    assert 24 <= fitted.steps - 64 < 28
    assert fitted.steps == result.steps
    scenario = load_config(out / "config.yaml").load_scenarios()[0]
    margins = []
    for validated in (moves, fitted):
        episode = simulate(scenario, LearnedPolicy(validated.folder), seed=5, timeline=True)
        assert episode.timeline is not None
        margins.append(set(episode.timeline["margin_s"].tolist()))
    assert margins[0] == {0.5}
    assert margins[1] <= {0.0, 0.5, 30.0}
    before, after = (
        LearnedPolicy(v.folder)._network.state_dict()["action_net.weight"] for v in (moves, fitted)
    )
    assert not torch.equal(before, after)
    tags = set(events(out).Tags()["scalars"])
    assert {"prfaas_routing_fit/loss", "prfaas_routing_fit/loss_moves"} <= tags


@pytest.mark.parametrize("end", ["Ctrl-C", "killed"])
def test_a_run_that_ends_before_its_routing_fit_goes_on_with_it(
    quick: Quick, runner: EpisodeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    config = quick(**ROUTING_FITTED)
    whole = train(config, tmp_path / "whole", runner=runner)

    def interrupted(*given: Any) -> tuple[int, None]:
        if end == "killed":
            raise MemoryError
        os.kill(os.getpid(), signal.SIGINT)
        tell: Callable[[int], bool] = given[-1]
        assert tell(1)
        return 0, None

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(training, "routing_fit", interrupted)
        if end == "killed":
            with pytest.raises(MemoryError):
                train(config, out, runner=runner)
        else:
            assert train(config, out, runner=runner).interrupted
    again = resume(out, runner=runner)
    assert again.stopped == "all steps done"
    assert again.steps == whole.steps
    assert [v.as_json() for v in again.validations] == [v.as_json() for v in whole.validations]
    ends = [
        LearnedPolicy(v.folder)._network.state_dict() for v in (whole.validations[-1], again.validations[-1])
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    with pytest.raises(PrfaasError, match="all 64 steps are done; give more with --steps"):
        resume(out, runner=runner)


def test_choices_mask_what_is_not_learned(quick: Quick) -> None:
    for choices, free in (("moves", slice(13, 16)), ("routing", slice(0, 13)), ("both", slice(0, 16))):
        config = quick(
            engine="compiled", vectorization="batched", algorithm="maskable_ppo", ppo=None, maskable_ppo={"n_steps": 8,
            "batch_size": 8}, choices=choices,
        )  # fmt: skip
        vec_env = make_vec_env(config, None)
        vec_env.reset()
        vec_env.step(np.tile([6, 1], (2, 1)))
        masks = np.stack(vec_env.env_method("action_masks"))
        outside = np.ones(16, dtype=bool)
        outside[free] = False
        outside[[6, 14]] = False
        assert not masks[:, outside].any()
        assert masks[:, [6, 14]].all()
        vec_env.close()
