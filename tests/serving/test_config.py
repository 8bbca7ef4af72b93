"""Configuration: unknown keys, wrong values and combinations end in one line; what is overridden or unread is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_serving.commands import serve
from prfaas_serving.config import RouterConfig, load_config, validate

BASE: dict[str, Any] = {
    "backend": "vllm_nixl",
    "workers": [
        {"name": "r1", "url": "http://10.0.0.1:8000", "cluster": "prfaas0", "role": "prefill"},
        {"name": "d1", "url": "http://10.0.0.2:8000", "cluster": "pd0", "role": "decode"},
    ],
}


def write(tmp_path: Path, change: dict[str, Any]) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text(yaml.safe_dump({**BASE, **change}))
    return path


def worker(**fields: Any) -> dict[str, Any]:
    return {"workers": [{**BASE["workers"][0], **fields}, BASE["workers"][1]]}


DYNAMO = {"url": "http://f:1", "groups": [{"component": "p", "cluster": "mars", "role": "prefill"}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"treshold": 1}, "unknown field 'treshold'; known: backend"),
        ({"decision": {"max_local_prefill_length": 5}}, "decision: unknown field 'max_local_prefill_length'"),
        ({"backend": "triton"}, "backend"),
        (
            {"decision": {"threshold_tokens": 5, "margin_s": 1}},
            "threshold_tokens and margin_s exclude each other",
        ),
        ({"decision": {"threshold_tokens": -1}}, "threshold_tokens"),
        ({"decision": {"margin_s": float("nan")}}, "margin_s"),
        (worker(url="10.0.0.1:8000"), "must be http://host:port"),
        (worker(url="http://h:1/v1"), "must be http://host:port"),
        (worker(url="http://h:99999"), "must be http://host:port"),
        (worker(name="a b"), "name"),
        (worker(name="d1"), "two workers have the name 'd1'"),
        (worker(url="http://10.0.0.2:8000"), "two workers have the url"),
        (worker(cluster="mars"), "worker 'r1': cluster is 'mars'; allowed: pd0, prfaas0"),
        (worker(role="decode"), "workers of a PrfaaS cluster only prefill"),
        (worker(api_key_env="PRFAAS_NO_SUCH"), "environment variable 'PRFAAS_NO_SUCH' is not set"),
        ({"workers": []}, "no workers"),
        ({"pd": "pd9"}, "no PD cluster 'pd9'"),
        ({"scenario": "nope"}, "unknown scenario 'nope'"),
        ({"admin": {}}, "exactly one of token_file and token_env"),
        ({"admin": {"token_env": "PRFAAS_NO_SUCH"}}, "at least 16 characters, found 0"),
        ({"admin": {"token_file": "missing"}}, "cannot be read"),
        ({"cache": {"checkpoints": "every_n_tokens"}}, "checkpoint_every_tokens"),
        (
            {"cache": {"checkpoints": "every_n_tokens", "checkpoint_every_tokens": 300}},
            "whole multiple of 256",
        ),
        ({"limits": {"queue": -1}}, "queue"),
        ({"retry": {"max_prefill_tries": 3}}, "max_prefill_tries"),
        ({"backend": "dynamo_direct"}, "instance_id must be digits"),
        ({"listen": {"port": 70000}}, "port"),
        ({"discovery": {"kubernetes": {"services": []}}}, "services"),
        ({"discovery": {"dynamo": DYNAMO}}, "discovery.dynamo goes with backend dynamo_direct"),
        (
            {"backend": "dynamo_direct", "workers": [], "discovery": {"dynamo": DYNAMO}},
            "discovery.dynamo.groups.0: cluster is 'mars'; allowed: pd0, prfaas0",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path, change)
    with pytest.raises(PrfaasError) as found:
        load_config(path)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_no_file_and_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(PrfaasError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(PrfaasError, match="expected a mapping"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "twice.yaml").write_text("backend: echo\nbackend: sglang\n")
    with pytest.raises(PrfaasError, match=r"twice\.yaml:2: .*written twice"):
        load_config(tmp_path / "twice.yaml")


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(serve)
    return CliRunner().invoke(app, list(arguments))


def test_check_prints_what_everything_resolves_to(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"cache": {"enabled": False, "block_tokens": 64}, "decision": {"threshold_tokens": 19400}}
    )
    result = invoke("--config", str(path), "--check", "--set", "decision.threshold_tokens=5000")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "backend: vllm_nixl" in lines
    assert "decision: threshold 5000 tokens, cache rule scarce" in lines
    assert "workers: 1 remote prefill, 0 local prefill, 1 decode, 0 both" in lines
    assert "note: decision.threshold_tokens: 19400 (file) is overridden by 5000 (--set)" in lines
    assert "note: cache.block_tokens has no effect: cache.enabled is false" in lines
    assert lines[-1] == "the configuration is valid"


def test_check_reads_the_files_that_a_start_would_read(tmp_path: Path) -> None:
    path = write(tmp_path, {"length": {"tokenizer": "none"}})
    result = invoke("--config", str(path), "--check")
    assert isinstance(result.exception, PrfaasError)
    path = write(tmp_path, {"discovery": {"file": "w.yaml"}})
    (tmp_path / "w.yaml").write_text("workers: [{name: x}]")
    result = invoke("--config", str(path), "--check")
    assert isinstance(result.exception, PrfaasError)
    assert "w.yaml" in str(result.exception)
    path = write(tmp_path, {"listen": {"tls": {"cert_file": "c", "key_file": "k"}}})
    assert "listen.tls" in str(invoke("--config", str(path), "--check").exception)


def test_without_a_decision_the_planned_threshold_holds(tmp_path: Path) -> None:
    resolved, _ = load_config(write(tmp_path, {}))
    assert resolved.decision().threshold_tokens == 19_400
    resolved, _ = load_config(write(tmp_path, {"decision": {"never_remote": True}}))
    assert resolved.decision().threshold_tokens == float("inf")


def test_a_configuration_survives_a_round_trip() -> None:
    config = RouterConfig.model_validate(BASE)
    assert validate(RouterConfig, config.model_dump(mode="json"), "x") == config


def test_dynamo_instances_share_an_address() -> None:
    workers = [{**w, "url": "http://f:1", "instance_id": str(k)} for k, w in enumerate(BASE["workers"])]
    assert len(RouterConfig.model_validate({"backend": "dynamo_direct", "workers": workers}).workers) == 2
