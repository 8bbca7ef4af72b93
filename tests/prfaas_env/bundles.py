"""Bundles made by hand, without torch: one linear layer from the observation to the heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from prfaas_env.bundle_manifest import (
    CARD_FILE,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    NETWORK_FILE,
    OBSERVATION,
    OUTPUTS,
    BundleManifest,
    DecisionRecord,
    FileRecord,
    NetworkRecord,
    StateRecord,
    TelemetryRecord,
    TopologyRecord,
    TrainedOn,
    TrainingRecord,
    sha256,
)
from prfaas_env.decision import MARGIN_GRID_S, N_MOVES, ActionCodec, ActionForm, Routing
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.world import scenario_schema
from prfaas_env.sites import link_pairs

SHORT = load_scenario("paper", overrides=["measure.horizon_s=60"])


def _tensor(name: str, shape: Sequence[int]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def linear_network(
    n_fields: int, form: ActionForm, parts: int, *, recurrent: bool = False, scale: float = 3.0, seed: int = 0
) -> onnx.ModelProto:
    """Random weights; the recurrent form adds 0.5 x the state, which becomes the sum."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0.0, scale, (n_fields, parts)).astype(np.float32)
    nodes = [helper.make_node("MatMul", [OBSERVATION, "w"], ["seen"])]
    inputs = [_tensor(OBSERVATION, (1, n_fields))]
    outputs = [_tensor(name, (1, parts)) for name in OUTPUTS[form]]
    last = "seen"
    if recurrent:
        nodes.append(helper.make_node("Mul", ["memory", "half"], ["old"]))
        nodes.append(helper.make_node("Add", ["seen", "old"], ["memory_next"]))
        inputs.append(_tensor("memory", (1, parts)))
        outputs.append(_tensor("memory_next", (1, parts)))
        last = "memory_next"
    if form == "discrete":
        nodes.append(helper.make_node("Identity", [last], ["logits"]))
    else:
        nodes.append(helper.make_node("Identity", [last], ["mean"]))
        nodes.append(helper.make_node("Tanh", [last], ["action"]))
        nodes.append(helper.make_node("Mul", [last, "zero"], ["log_std"]))
    constants = {"w": weights, "half": np.float32(0.5).reshape(1), "zero": np.float32(0.0).reshape(1)}
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [numpy_helper.from_array(v, k) for k, v in constants.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def make_bundle(
    folder: Path,
    *,
    scenario: Scenario = SHORT,
    form: ActionForm = "discrete",
    routing: Routing = "margin",
    masked: bool = False,
    recurrent: bool = False,
    interval_s: float = 1.0,
    margins_s: tuple[float, ...] = MARGIN_GRID_S,
    seed: int = 0,
    network: bytes | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Write a bundle; `change` may spoil the manifest (checksums are those of the files)."""
    schema = scenario_schema(scenario)
    n_pd = schema.n_pd
    codec = ActionCodec(n_pd, routing, form, margins_s)
    parts = (len(codec.grid) + N_MOVES) * n_pd if form == "discrete" else 2 * n_pd
    if network is None:
        network = linear_network(len(schema), form, parts, recurrent=recurrent, seed=seed).SerializeToString()
    card = b"# A policy for tests\n"
    memory = StateRecord(input="memory", output="memory_next", shape=(1, parts))
    manifest = BundleManifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        name="by hand",
        description="",
        network=NetworkRecord(
            opset=17,
            outputs=OUTPUTS[form],
            squashed=form == "continuous",
            states=(memory,) if recurrent else (),
        ),
        telemetry=TelemetryRecord.of(schema),
        topology=TopologyRecord(
            n_pd=n_pd,
            n_prfaas=schema.n_prfaas,
            n_links=schema.n_links,
            links=link_pairs(scenario.deployment),
        ),
        decision=DecisionRecord.of(
            codec, masked=masked, decision_interval_s=interval_s, conversion_interval_s=15.0
        ),
        training=TrainingRecord(
            algorithm="ppo",
            steps=0,
            seed=0,
            reward="waiting",
            scenarios=(TrainedOn(name="mooncake", hash="0", weight=1.0, slice=("bundled:x", 0.0, 60.0)),),
            seed_ranges={"training": (0, 1_000_000)},
            weights_sha256="",
        ),
        evaluation={},
        versions={},
        files={
            NETWORK_FILE: FileRecord(sha256=sha256(network), bytes=len(network)),
            CARD_FILE: FileRecord(sha256=sha256(card), bytes=len(card)),
        },
    )
    raw = json.loads(manifest.text())
    if change is not None:
        change(raw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NETWORK_FILE).write_bytes(network)
    (folder / CARD_FILE).write_bytes(card)
    (folder / MANIFEST_FILE).write_text(json.dumps(raw))
    return folder
