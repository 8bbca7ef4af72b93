"""Policy bundles: what they decide, what is refused and how, and exchanging a running policy."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from typer.testing import CliRunner

from prfaas_env import bundle_manifest
from prfaas_env.base import PrfaasError
from prfaas_env.bundle import BundlePolicy, ReloadablePolicy
from prfaas_env.cli import app
from prfaas_env.decision import MARGIN_GRID_S, Decision, Move
from prfaas_env.policy import Policy, PolicyContext, make_policy
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.run import simulate
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.telemetry import Telemetry

from .bundles import SHORT, linear_network, make_bundle

N_GRID = len(MARGIN_GRID_S)
CONTEXT = PolicyContext(SHORT, scenario_schema(SHORT), 0)
FREE, BOUND = (True, True, True), (False, True, False)


def reading(
    time_s: float = 0.0, seed: int = 0, legal: tuple[bool, bool, bool] = FREE, scenario: Scenario = SHORT
) -> Telemetry:
    """A random reading."""
    schema = scenario_schema(scenario)
    rng = np.random.default_rng(seed)
    values = np.array([rng.uniform(f.low, min(f.high, 50.0)) for f in schema.fields])
    return Telemetry(
        schema,
        round(time_s * 1e9),
        values,
        conversion_tick=True,
        legal_moves=(legal,) * schema.n_pd,
        recent_lengths_tokens=(np.array([], dtype=np.int64),) * schema.n_pd,
    )


def ready(path: Path, scenario: Scenario = SHORT, **options: Any) -> BundlePolicy:
    policy = BundlePolicy(path, **options)
    policy.reset(PolicyContext(scenario, scenario_schema(scenario), 0))
    return policy


def refused(path: Path, *parts: str) -> str:
    """The one line that refuses a bundle; it holds every part."""
    with pytest.raises(PrfaasError) as caught:
        ready(path)
    told = str(caught.value)
    assert len(told.splitlines()) == 1, told
    assert len(told) < 700
    for part in parts:
        assert part in told, told
    return told


def logits_of(policy: BundlePolicy, telemetry: Telemetry) -> np.ndarray[Any, Any]:
    """By hand: observation times weights."""
    weights = (
        np.random.default_rng(0).normal(0.0, 3.0, (len(telemetry.values), N_GRID + 3)).astype(np.float32)
    )
    return telemetry.encode() @ weights


# -------------------------------------------------------------------------------------- deciding


def test_it_is_a_policy(tmp_path: Path) -> None:
    policy = BundlePolicy(make_bundle(tmp_path / "b"))
    assert isinstance(policy, Policy)
    assert policy.learned
    assert policy.seen_seeds == ((0, 1_000_000),)
    assert policy.seen_slices == (("bundled:x", 0.0, 60.0),)
    assert len(policy.fingerprint) == 12


@pytest.mark.parametrize("masked", [False, True])
def test_moves_that_are_not_legal_are_masked_or_become_none(tmp_path: Path, masked: bool) -> None:
    policy = ready(make_bundle(tmp_path / "b", masked=masked))
    seen = set()
    for k in range(60):
        legal = ((True, True, True), (False, True, True), (True, True, False), BOUND)[k % 4]
        telemetry = reading(float(k), k, legal)
        logits = logits_of(policy, telemetry)
        moves = logits[N_GRID:]
        if masked:
            move = max((m for m in range(3) if legal[m]), key=lambda m: moves[m])
        else:
            move = int(moves.argmax())
            if not legal[move]:
                move = int(Move.NONE)
        (cluster,) = policy.decide(telemetry).clusters
        assert cluster.margin_s == MARGIN_GRID_S[int(logits[:N_GRID].argmax())]
        assert cluster.move == move
        seen.add((cluster.margin_s, move, int(moves.argmax())))
    assert len({m for m, _, _ in seen}) > 3
    assert any(best != move for _, move, best in seen)


def test_margins_of_the_training_are_decided(tmp_path: Path) -> None:
    given = tuple(m + 0.25 for m in MARGIN_GRID_S)
    policies = [
        ready(make_bundle(tmp_path / name, margins_s=margins))
        for name, margins in (("usual", MARGIN_GRID_S), ("own", given))
    ]
    usual, own = ([p.decide(reading(float(k), k)).clusters[0].margin_s for k in range(60)] for p in policies)
    assert len(set(usual)) > 3
    assert own == [m + 0.25 for m in usual if m is not None]


def test_a_grid_that_is_not_the_networks_is_refused(tmp_path: Path) -> None:
    def spoil(manifest: dict[str, Any]) -> None:
        manifest["decision"]["routing_grid"] = [0.0, 1.0]

    refused(
        make_bundle(tmp_path / "b", change=spoil), "policy.onnx", "(1, 16)", "the manifest asks for (1, 5)"
    )


def test_a_decision_is_held_and_a_move_ordered_once(tmp_path: Path) -> None:
    policy = ready(make_bundle(tmp_path / "b", interval_s=5.0))
    moves, margins = [], []
    for k in range(40):
        (cluster,) = policy.decide(reading(float(k), k)).clusters
        moves.append(cluster.move)
        margins.append(cluster.margin_s)
    assert all(move is Move.NONE for k, move in enumerate(moves) if k % 5)
    assert any(move is not Move.NONE for move in moves)
    assert all(margins[k] == margins[k - k % 5] for k in range(40))
    assert len(set(margins)) > 1


def test_recurrent_state_moves_on_and_starts_anew_with_reset(tmp_path: Path) -> None:
    """memory' = seen + memory / 2, which is also what is decided on."""
    policy = ready(make_bundle(tmp_path / "b", recurrent=True))
    plain = ready(make_bundle(tmp_path / "plain"))
    memory = np.zeros(N_GRID + 3)
    differed = False
    for k in range(12):
        if k == 7:
            policy.reset(CONTEXT)
            memory[:] = 0.0
        telemetry = reading(float(k), k)
        memory = logits_of(policy, telemetry) + 0.5 * memory
        (cluster,) = policy.decide(telemetry).clusters
        assert cluster.margin_s == MARGIN_GRID_S[int(memory[:N_GRID].argmax())]
        assert cluster.move == int(memory[N_GRID:].argmax())
        differed |= plain.decide(telemetry) != policy._clock.held
    assert differed


def test_held_ticks_do_not_move_the_state(tmp_path: Path) -> None:
    policy = ready(make_bundle(tmp_path / "b", recurrent=True, interval_s=5.0))
    policy.decide(reading(0.0, 1))
    before = policy._inputs["memory"].copy()
    policy.decide(reading(4.0, 2))
    assert np.array_equal(policy._inputs["memory"], before)
    policy.decide(reading(5.0, 2))
    assert not np.array_equal(policy._inputs["memory"], before)


def test_a_copy_goes_its_own_way(tmp_path: Path) -> None:
    policy = ready(make_bundle(tmp_path / "b", recurrent=True))
    policy.decide(reading(0.0, 1))
    other = copy.deepcopy(policy)
    first = [policy.decide(reading(float(k), k)) for k in range(1, 6)]
    assert [other.decide(reading(float(k), k)) for k in range(1, 6)] == first


def test_the_continuous_form(tmp_path: Path) -> None:
    policy = ready(make_bundle(tmp_path / "b", form="continuous", routing="threshold"))
    weights = np.random.default_rng(0).normal(0.0, 3.0, (len(CONTEXT.schema), 2)).astype(np.float32)
    for k in range(20):
        telemetry = reading(float(k), k)
        x, y = np.tanh(telemetry.encode() @ weights)
        (cluster,) = policy.decide(telemetry).clusters
        assert cluster.threshold_tokens == pytest.approx(1000.0 * 131.072 ** ((x + 1) / 2), rel=1e-4)
        assert cluster.move == min(int((y + 1) * 1.5), 2)


def test_several_clusters(tmp_path: Path) -> None:
    regions = load_scenario("two_regions", overrides=["measure.horizon_s=30"])
    policy = ready(make_bundle(tmp_path / "b", scenario=regions), regions)
    decisions = [policy.decide(reading(float(k), k, scenario=regions)) for k in range(20)]
    assert all(len(d.clusters) == 2 for d in decisions)
    assert any(d.clusters[0] != d.clusters[1] for d in decisions)


def test_samples_follow_the_distribution_and_the_seed(tmp_path: Path) -> None:
    path = make_bundle(
        tmp_path / "b",
        masked=True,
        network=linear_network(len(CONTEXT.schema), "discrete", N_GRID + 3, scale=0.3).SerializeToString(),
    )

    def draws(policy: BundlePolicy, n: int) -> list[Decision]:
        return [policy.decide(reading(float(k), 0, (False, True, True))) for k in range(n)]

    one, two = ready(path, sample=True, seed=5), ready(path, sample=True, seed=5)
    n = 4000
    found = draws(one, n)
    assert draws(two, n) == found
    assert draws(ready(path, sample=True, seed=6), 50) != found[:50]
    weights = np.random.default_rng(0).normal(0.0, 0.3, (len(CONTEXT.schema), N_GRID + 3)).astype(np.float32)
    logits = reading().encode() @ weights
    chances = np.exp(logits[:N_GRID]) / np.exp(logits[:N_GRID]).sum()
    counts = np.array([sum(d.clusters[0].margin_s == m for d in found) for m in MARGIN_GRID_S])
    assert np.abs(counts / n - chances).max() < 5 * math.sqrt(0.25 / n)
    assert {d.clusters[0].move for d in found} == {Move.NONE, Move.DECODE_TO_PREFILL}


def test_sampled_actions_of_the_continuous_form_spread_around_the_mean(tmp_path: Path) -> None:
    policy = ready(make_bundle(tmp_path / "b", form="continuous"), sample=True)
    weights = np.random.default_rng(0).normal(0.0, 3.0, (len(CONTEXT.schema), 2)).astype(np.float32)
    mean = reading().encode() @ weights
    drawn = np.arctanh(np.clip([policy.act(reading()) for _ in range(1500)], -1 + 1e-12, 1 - 1e-12))
    use = np.abs(mean) < 6  # further out tanh has no inverse in numbers
    assert use.any()
    assert np.abs(drawn.mean(axis=0) - mean)[use].max() < 0.2
    assert np.abs(drawn.std(axis=0) - 1.0)[use].max() < 0.2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sample": 1}, "sample is 1; allowed: true, false"),
        ({"sample": True, "seed": -1}, "seed is -1"),
        ({"sample": True, "seed": "x"}, "seed is 'x'"),
        ({"seed": 3}, "seed needs sample=true"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(PrfaasError, match=told):
        BundlePolicy(make_bundle(tmp_path / "b"), **options)


# ------------------------------------------------------------------------------- by name, in simulate


def test_a_folder_names_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle(tmp_path / "b")
    direct = simulate(SHORT, BundlePolicy(path), seed=3, engine="simpy").metrics
    monkeypatch.chdir(tmp_path)
    for spec in (str(path), "b", "./b", "b/"):
        assert simulate(SHORT, make_policy(spec), seed=3, engine="simpy").metrics == direct
    sampled = make_policy("b:sample=true,seed=4")
    assert isinstance(sampled, BundlePolicy)
    assert (sampled._sample, sampled._seed) == (True, 4)
    with pytest.raises(PrfaasError, match="unknown parameter 'path'; known: sample, seed"):
        make_policy("b:path=3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PrfaasError, match=r"policy 'empty': the folder holds no manifest\.json"):
        make_policy("empty")
    make_bundle(tmp_path / "never")
    assert not isinstance(make_policy("never"), BundlePolicy)
    assert isinstance(make_policy("./never"), BundlePolicy)


def test_simulate_command(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b")
    args = ["simulate", "--scenario", "paper", "--set", "measure.horizon_s=60", "--engine", "simpy", "--json"]
    result = CliRunner().invoke(app, [*args, "--policy", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["policy"] == str(path)
    assert figures["invalid_moves"] == 0
    assert figures["conversions"] == simulate(SHORT, BundlePolicy(path), seed=0).metrics["conversions"]


def test_without_onnxruntime_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle(tmp_path / "b")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused(path, "a policy bundle needs onnxruntime: pip install 'prfaas-env[policy]'")


def test_it_runs_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b", recurrent=True)
    code = f"""
import sys
for name in ("torch", "stable_baselines3", "sb3_contrib", "onnx", "tensorboard", "cloudpickle"):
    sys.modules[name] = None
from prfaas_env.policy import make_policy
from prfaas_env.scenarios import load_scenario
from prfaas_env.simulator.run import simulate
scenario = load_scenario("paper", overrides=["measure.horizon_s=20"])
print(simulate(scenario, make_policy({str(path)!r}), seed=0, engine="simpy").end.time_ns)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "20000000000"


def test_importing_it_does_not_load_the_runtime() -> None:
    code = "import sys, prfaas_env.bundle; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ------------------------------------------------------------------------------ what does not fit


def edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set one field of the raw manifest; with ... it is removed."""

    def change(raw: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for key in way:
            raw = raw[int(key)] if isinstance(raw, list) else raw[key]
        if value is ...:
            del raw[last]
        else:
            raw[int(last) if isinstance(raw, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("format", "other", "format: this version reads 'prfaas-policy' (found 'other')"),
        ("format", ..., "format: this version reads 'prfaas-policy' (found None)"),
        ("format_version", 2, "format_version: this version reads 1 (found 2)"),
        ("format_version", True, "format_version: this version reads 1 (found True)"),
        ("surprise", 1, "unknown field 'surprise'"),
        ("network.surprise", 1, "network: unknown field 'surprise'"),
        ("decision.masked", ..., "decision.masked: Field required"),
        ("decision.masked", "maybe", "decision.masked: "),
        ("decision.routing_grid", None, "decision: routing_grid is None; this version decodes"),
        ("decision.routing_grid", [1.0, 0.0], "decision: margins_s must be one or more rising numbers"),
        ("decision.routing_grid", ["inf"], "decision: margins_s need a finite one"),
        ("decision.routing_grid", ["much"], "decision.routing_grid.0"),
        ("decision.moves", ["none"], "decision: moves is ('none',)"),
        ("decision.routing", "length", "decision.routing: "),
        ("decision.decision_interval_s", 0, "decision.decision_interval_s: "),
        ("decision.n_pd", 2, "decision.n_pd is 2, topology.n_pd 1"),
        ("network.outputs", ["action"], "network.outputs is ['action']"),
        ("network.states", [{"input": "observation", "output": "x", "shape": [1]}], "a name is used twice"),
        ("network.states", [{"input": "m", "output": "x", "shape": [1 << 30]}], "network.states.0.shape.0: "),
        ("telemetry.version", 99, "telemetry.version is 99; this version reads 1"),
        ("telemetry.hash", "0" * 12, "telemetry.hash does not belong to the names and fields beside it"),
        ("topology.n_links", 3, "topology.n_links is 3, telemetry.n_links 1"),
        ("topology.links", [], "topology.links has 0 links, n_links is 1"),
        ("training.steps", -1, "training.steps: "),
        ("files", {}, "files names []; it must name ['MODEL_CARD.md', 'policy.onnx']"),
        ("files", {"../../etc/passwd": {"sha256": "0" * 64, "bytes": 1}}, "files names ['../../etc/passwd']"),
        ("files", [], "files: "),
    ],
)
def test_a_foreign_manifest_is_refused(tmp_path: Path, path: str, value: Any, told: str) -> None:
    refused(make_bundle(tmp_path / "b", change=edit(path, value)), "manifest.json", told)


def with_ranges(low: list[Any], high: list[Any], readings: int = 5) -> Any:
    return edit("input_ranges", {"low": low, "high": high, "readings": readings})


N_FIELDS = len(scenario_schema(SHORT))


def test_a_bundle_may_hold_the_ranges_of_its_inputs(tmp_path: Path) -> None:
    low, high = [None, 1.5] + [0.0] * (N_FIELDS - 2), [None, 1.5] + [2.0] * (N_FIELDS - 2)
    ranges = ready(make_bundle(tmp_path / "a", change=with_ranges(low, high))).manifest.input_ranges
    assert ranges is not None
    assert (ranges.low, ranges.high, ranges.readings) == (tuple(low), tuple(high), 5)
    # one without them, as all older ones are, reads and writes as before
    manifest = ready(make_bundle(tmp_path / "b")).manifest
    assert manifest.input_ranges is None
    assert "input_ranges" not in manifest.text()
    assert "input_ranges" in ready(tmp_path / "a").manifest.text()


@pytest.mark.parametrize(
    ("low", "high", "readings", "told"),
    [
        ([0.0], [0.0], 5, "input_ranges.low has 1 fields, telemetry"),
        ([0.0] * N_FIELDS, [0.0] * (N_FIELDS - 1), 5, "low has"),
        ([1.0] * N_FIELDS, [0.0] * N_FIELDS, 5, "field 0: low is 1.0, high 0.0"),
        ([None] * N_FIELDS, [0.0] * N_FIELDS, 5, "field 0: low is None, high 0.0"),
        ([0.0] * N_FIELDS, [0.0] * N_FIELDS, 0, "readings"),
    ],
)
def test_ranges_that_make_no_sense(
    tmp_path: Path, low: list[Any], high: list[Any], readings: int, told: str
) -> None:
    refused(make_bundle(tmp_path / "b", change=with_ranges(low, high, readings)), "manifest.json", told)


def _rehash(raw: dict[str, Any]) -> None:
    """Make the hash fit the changed fields, as another version of the code would have written it."""
    record = bundle_manifest.TelemetryRecord.model_validate(raw["telemetry"])
    raw["telemetry"]["hash"] = record.as_schema().hash


def _drop(raw: dict[str, Any]) -> None:
    raw["telemetry"]["names"].pop(3)
    raw["telemetry"]["fields"].pop(3)
    _rehash(raw)


def _add(raw: dict[str, Any]) -> None:
    raw["telemetry"]["names"].append("link0.new")
    raw["telemetry"]["fields"].append({**raw["telemetry"]["fields"][-1], "name": "new"})
    _rehash(raw)


def _swap(raw: dict[str, Any]) -> None:
    for part in ("names", "fields"):
        items = raw["telemetry"][part]
        items[1], items[2] = items[2], items[1]
    _rehash(raw)


def _rescale(raw: dict[str, Any]) -> None:
    raw["telemetry"]["fields"][1]["high"] = 7.0
    _rehash(raw)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_drop, "added: pd0.arrival_rate_120s_rps; moved: "),
        (_add, "removed: link0.new"),
        (_swap, "moved: pd0.arrival_rate_5s_rps, pd0.arrival_rate_30s_rps"),
        (_rescale, "same names, other units or scales"),
    ],
)
def test_other_telemetry_is_refused_by_field(tmp_path: Path, change: Any, told: str) -> None:
    n = len(CONTEXT.schema) + {_drop: -1, _add: 1}.get(change, 0)
    network = linear_network(n, "discrete", N_GRID + 3).SerializeToString()
    path = make_bundle(tmp_path / "b", change=change, network=network)
    refused(path, "trained on other telemetry than this deployment and version give", told)


def test_another_topology_is_refused(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b")
    regions = load_scenario("two_regions")
    with pytest.raises(PrfaasError, match=r"added: pd1\."):
        ready(path, regions)
    two = make_bundle(tmp_path / "two", scenario=regions, change=edit("topology.links.0", [1, 1]))
    with pytest.raises(PrfaasError, match="link0 joins prfaas0 and pd0, was prfaas1 and pd1"):
        ready(two, regions)


def test_a_clock_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    slow = load_scenario(SHORT, overrides=["control.control_interval_s=3"])
    with pytest.raises(PrfaasError, match=r"decides every 1 s; the scenario's control_interval_s 3 does not"):
        ready(make_bundle(tmp_path / "b"), slow)


def test_telemetry_of_another_schema_in_between_is_refused(tmp_path: Path) -> None:
    policy = ready(make_bundle(tmp_path / "b"))
    with pytest.raises(PrfaasError, match="another schema than the context"):
        policy.decide(reading(scenario=load_scenario("two_regions")))


# ------------------------------------------------------------------------------------ broken files


@pytest.mark.parametrize("name", ["policy.onnx", "MODEL_CARD.md"])
def test_damaged_cut_swapped_and_missing_files(tmp_path: Path, name: str) -> None:
    path = make_bundle(tmp_path / "b")
    file, whole = path / name, (path / name).read_bytes()
    file.write_bytes(whole[:-1])
    refused(path, name, "has", "manifest.json says")
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(path, name, "sha256 differs")
    file.write_bytes(b"")
    refused(path, name)
    file.unlink()
    refused(path, name, "cannot be read: No such file")
    file.mkdir()
    refused(path, name, "is not a plain file")
    file.rmdir()
    os.mkfifo(file)
    refused(path, name, "is not a plain file")


@pytest.mark.parametrize("name", ["manifest.json", "policy.onnx", "MODEL_CARD.md"])
def test_links_and_large_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle(tmp_path / "b")
    whole = (path / name).read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(whole)
    (path / name).unlink()
    (path / name).symlink_to(elsewhere)
    refused(path, name, "is a link; a bundle holds plain files")
    (path / name).unlink()
    (path / name).write_bytes(whole)
    ready(path)
    monkeypatch.setitem(bundle_manifest.MAX_BYTES, name, len(whole) - 1)
    refused(path, name, "at most")


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    make_bundle(tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    assert ready(tmp_path / "current").folder == tmp_path / "v1"
    (tmp_path / "gone").symlink_to("v9")
    refused(tmp_path / "gone", "no such folder")
    refused(tmp_path / "v1" / "policy.onnx", "is not a folder")
    refused(tmp_path / "none", "no such folder")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"format": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "key 'a' stands there twice"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"format": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"format: prfaas-policy\nformat_version: 1\n", "is not JSON"),
    ],
)
def test_manifests_that_are_no_json(tmp_path: Path, content: bytes, told: str) -> None:
    path = make_bundle(tmp_path / "b")
    (path / "manifest.json").write_bytes(content)
    refused(path, "manifest.json", told)


@settings(max_examples=60)
@given(st.data())
def test_one_wrong_byte_anywhere_is_one_line(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = make_bundle(tmp_path_factory.mktemp("bytes") / "b")
    file = path / data.draw(st.sampled_from(["manifest.json", "policy.onnx", "MODEL_CARD.md"]))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    if file.name != "manifest.json":
        refused(path, file.name)
        return
    with contextlib.suppress(PrfaasError):  # a free text such as a description may have changed
        ready(path)


# ----------------------------------------------------------------------------------------- attacks


class _Marker:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.file}",)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    attack = pickle.dumps(_Marker(marker))
    pickle.loads(attack)
    assert marker.exists()  # the attack works where pickles are read
    marker.unlink()
    refused(make_bundle(tmp_path / "a", network=attack), "policy.onnx", "is not")
    path = make_bundle(tmp_path / "b")
    (path / "manifest.json").write_bytes(attack)
    refused(path, "manifest.json", "is not JSON")
    card = make_bundle(tmp_path / "c", change=lambda raw: raw["files"]["MODEL_CARD.md"].update(
        sha256=bundle_manifest.sha256(attack), bytes=len(attack)
    ))  # fmt: skip
    (card / "MODEL_CARD.md").write_bytes(attack)
    ready(card)  # read as bytes, for its checksum, and no more
    assert not marker.exists()


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system ['touch {m}']", "a: !!python/object/new:os.system [touch {m}]"]
)
def test_yaml_tags_are_not_run(tmp_path: Path, text: str) -> None:
    marker = tmp_path / "marker"
    path = make_bundle(tmp_path / "b")
    (path / "manifest.json").write_text(text.format(m=marker))
    refused(path, "manifest.json", "is not JSON")
    inside = make_bundle(tmp_path / "c", change=edit("description", text.format(m=marker)))
    ready(inside)
    with pytest.raises(PrfaasError):
        make_policy(f"{inside}:sample={text.format(m=marker)}")
    assert not marker.exists()


def test_weights_outside_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear_network(len(CONTEXT.schema), "discrete", N_GRID + 3)
    (weights,) = (t for t in model.graph.initializer if t.name == "w")
    outside = tmp_path / "outside.bin"
    outside.write_bytes(weights.raw_data)
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="outside.bin")
    monkeypatch.chdir(tmp_path)
    refused(make_bundle(tmp_path / "b", network=model.SerializeToString()), "policy.onnx", "external data")
    weights.data_location = TensorProto.DEFAULT
    refused(make_bundle(tmp_path / "c", network=model.SerializeToString()), "policy.onnx", "external data")


def test_custom_operators_are_refused(tmp_path: Path) -> None:
    model = linear_network(len(CONTEXT.schema), "discrete", N_GRID + 3)
    model.graph.node[-1].domain = "evil"
    model.opset_import.append(helper.make_opsetid("evil", 1))
    refused(make_bundle(tmp_path / "b", network=model.SerializeToString()), "policy.onnx", "'evil'")


def test_a_network_that_is_not_that_of_the_manifest_is_refused(tmp_path: Path) -> None:
    n = len(CONTEXT.schema)

    def build(name: str, network: Any) -> Path:
        return make_bundle(tmp_path / name, network=network.SerializeToString())

    refused(build("a", linear_network(n - 1, "discrete", N_GRID + 3)), "input 'observation' is tensor(float)")
    refused(build("b", linear_network(n, "discrete", N_GRID)), "output 'logits' has shape (1, 13)")
    refused(build("c", linear_network(n, "continuous", 2)), "is in only one of network and manifest")
    refused(
        build("d", linear_network(n, "discrete", N_GRID + 3, recurrent=True)),
        "input 'memory' is in only one of network and manifest",
    )
    broken = linear_network(n, "discrete", N_GRID + 3)
    broken.graph.node[0].input[1] = "nowhere"
    refused(build("e", broken), "policy.onnx", "onnxruntime refuses it")
    refused(build("f", linear_network(n, "discrete", N_GRID + 3, scale=math.nan)), "'logits' is not finite")


def test_numbers_that_are_not_finite_later_are_refused(tmp_path: Path) -> None:
    network = linear_network(len(CONTEXT.schema), "discrete", N_GRID + 3, scale=7e37)
    policy = ready(make_bundle(tmp_path / "b", network=network.SerializeToString()))
    with pytest.raises(PrfaasError, match="output 'logits' is not finite"):
        policy.decide(reading())


# ---------------------------------------------------------------------------------------- exchange


def test_reload_takes_the_new_content_of_a_folder(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b", seed=1)
    policy = ReloadablePolicy(str(path))
    policy.reset(CONTEXT)
    first = policy.active
    assert (first.spec, first.generation) == (str(path), 1)
    before = [policy.decide(reading(float(k), k)) for k in range(5)]
    make_bundle(path, seed=2)
    result = policy.reload()
    assert result.error is None
    assert result.active is policy.active
    assert policy.active.generation == 2
    assert policy.active.fingerprint not in {"", first.fingerprint}
    assert str(result) == f"policy {path} ({policy.active.fingerprint}) is active"
    fresh = ready(path)
    after = [policy.decide(reading(float(k), k)) for k in range(5)]
    assert after == [fresh.decide(reading(float(k), k)) for k in range(5)]
    assert after != before


def test_a_failed_reload_keeps_the_last_good_policy(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b", recurrent=True)
    policy, alone = ReloadablePolicy(str(path)), ready(path)
    policy.reset(CONTEXT)
    first = policy.active
    regions = make_bundle(tmp_path / "two", scenario=load_scenario("two_regions"))
    wrong = {
        None: "sha256 differs",
        str(tmp_path / "nowhere"): "unknown policy",
        str(regions): "trained on other telemetry",
        "static:threshold_tokens=-1": "threshold_tokens is -1",
        "json:loads": "missing 1 required positional argument",
    }
    content = bytearray((path / "policy.onnx").read_bytes())
    content[-1] ^= 1
    (path / "policy.onnx").write_bytes(content)
    for k, (spec, told) in enumerate(wrong.items()):
        assert policy.decide(reading(float(k), k)) == alone.decide(reading(float(k), k))
        result = policy.reload(spec)
        assert result.error is not None
        assert told in result.error
        assert result.active == policy.active == first
        assert str(result).startswith(f"policy {path} ({first.fingerprint}) stays active: ")
        assert len(str(result).splitlines()) == 1
    # the state of the policy that stayed is whole
    assert policy.decide(reading(9.0, 9)) == alone.decide(reading(9.0, 9))


def test_rules_and_bundles_run_under_the_same_runtime(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b")
    policy = ReloadablePolicy("earliest_finish")
    assert isinstance(policy, Policy)
    own = simulate(SHORT, policy, seed=1, engine="simpy").metrics
    assert own == simulate(SHORT, make_policy("earliest_finish"), seed=1, engine="simpy").metrics
    assert str(policy.active) == "earliest_finish"
    assert policy.reload(str(path)).error is None
    assert policy.active.generation == 2
    own = simulate(SHORT, policy, seed=1, engine="simpy").metrics
    assert own == simulate(SHORT, BundlePolicy(path), seed=1, engine="simpy").metrics
    assert policy.reload("never").error is None
    assert policy.decide(reading()).clusters[0].threshold_tokens == math.inf


def test_the_first_policy_must_be_right(tmp_path: Path) -> None:
    with pytest.raises(PrfaasError, match="unknown policy"):
        ReloadablePolicy(str(tmp_path / "nowhere"))


# ---------------------------------------------------------------------------------------- the page


def test_the_page_names_every_field_of_the_manifest() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "bundle.md").read_text(encoding="utf-8")
    models = (
        bundle_manifest.BundleManifest,
        bundle_manifest.NetworkRecord,
        bundle_manifest.StateRecord,
        bundle_manifest.DecisionRecord,
        bundle_manifest.TopologyRecord,
        bundle_manifest.TrainingRecord,
        bundle_manifest.FileRecord,
        bundle_manifest.TelemetryRecord,
        bundle_manifest.FieldRecord,
    )
    wanted = {name for model in models for name in model.model_fields} - {"n_prfaas"}
    shown = set(re.findall(r"`([a-z_0-9]+)`", page))
    assert wanted <= shown | {"name", "fields"}, wanted - shown
    for file, limit in bundle_manifest.MAX_BYTES.items():
        assert re.search(rf"^\| `{re.escape(file)}` \|.*\| {limit >> 20} MiB \|$", page, flags=re.MULTILINE)


def test_asked_at_its_own_interval_alone_it_does_the_same(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b", interval_s=15.0, masked=True)
    scenario = load_scenario("paper", overrides=["measure.horizon_s=400"])
    seldom = BundlePolicy(folder)
    assert seldom.decision_interval_s == 15.0

    class Often(BundlePolicy):
        decision_interval_s = None  # type: ignore[assignment]

    runs = [simulate(scenario, policy, seed=1) for policy in (seldom, Often(folder))]
    assert runs[0].metrics == runs[1].metrics
    assert runs[0].metrics["conversions"] > 0
