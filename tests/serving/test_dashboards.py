"""The dashboard and the alert rules name only what the router exports, and are valid where promtool can tell."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import prfaas_serving
from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig

FOLDER = Path(prfaas_serving.__file__).parent / "dashboards"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))
_NAME = re.compile(r"\bprfaas_router_\w+")
#: Labels that Prometheus adds.
_OUTER = {"job", "instance", "le"}


def _panels() -> list[dict[str, Any]]:
    return [p for p in DASHBOARD["panels"] if p["type"] != "row"]


def _expressions() -> dict[str, str]:
    """Where -> expression, Grafana's variables replaced by values."""
    found = {}
    for panel in _panels():
        for target in panel["targets"]:
            expression = (
                target["expr"]
                .replace("$__rate_interval", "5m")
                .replace("$job", ".*")
                .replace("$instance", ".*")
            )
            found[f"{panel['title']} {target['refId']}"] = expression
    for group in RULES["groups"]:
        for rule in group["rules"]:
            found[rule["alert"]] = rule["expr"]
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Sample name -> its labels, of a router with a margin in force, as its /metrics page has them."""

    async def page() -> str:
        raw = {
            "backend": "vllm_nixl",
            "listen": {"port": 0},
            "workers": [{"name": "d", "url": "http://127.0.0.1:9", "cluster": "pd0", "role": "decode"}],
            "decision": {"margin_s": 1.0},
            "health": {"canary": False},
        }
        router = Router(Resolved(RouterConfig.model_validate(raw)))
        await router.start()
        try:
            router.forwarder.fleet.workers["d"].kv_moved_share = 0.5
            m = router.metrics
            for metric in vars(m).values():
                names = getattr(metric, "_labelnames", ())
                if names:
                    metric.labels(*("x" for _ in names))
            return m.page().decode()
        finally:
            await router.close()

    found: dict[str, set[str]] = {}
    for line in asyncio.run(page()).splitlines():
        match = re.match(r"(prfaas_router_\w+)(?:\{(.*?)\})? ", line)
        if match:
            found.setdefault(match[1], set()).update(re.findall(r"(\w+)=", match[2] or ""))
    # what only a scenario with this objective, or a raised alarm, gives a sample of
    assert found["prfaas_router_slo_seconds"] == {"objective"}
    assert found["prfaas_router_alarm"] == {"alarm", "level"}
    return found


@pytest.mark.parametrize("where", list(_expressions()))
def test_every_metric_and_label_is_exported(where: str, exported: dict[str, set[str]]) -> None:
    expression = _expressions()[where]
    names = set(_NAME.findall(expression))
    assert names or expression.startswith("up{"), "what does it show?"
    assert names <= set(exported), f"not exported: {names - set(exported)}"
    labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expression))
    for inside in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression):
        labels |= {label.strip() for label in inside.split(",")}
    known = _OUTER.union(*(exported[name] for name in names))
    assert labels <= known, f"no such label: {labels - known}"


def test_legends_name_labels_that_are_left() -> None:
    for panel in _panels():
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {
                x.strip()
                for inside in re.findall(r"by \(([^)]*)\)", target["expr"])
                for x in inside.split(",")
            }
            assert wanted <= (kept or {"instance"}), panel["title"]


def test_panels_have_places_and_numbers_of_their_own() -> None:
    numbers = [p["id"] for p in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in _panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_alert_has_a_severity_and_a_text() -> None:
    names = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
    assert len(names) == len(set(names)) >= 10
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
            assert rule["for"], rule["alert"]
            assert rule["annotations"]["summary"], rule["alert"]


def _promtool(*arguments: str, cwd: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of Prometheus) is not on PATH")
    done = subprocess.run([promtool, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    _promtool("check", "rules", "alerts.yaml", cwd=FOLDER)
    _promtool("test", "rules", "alerts_test.yaml", cwd=FOLDER)


def test_promtool_takes_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:x:{k}", "expr": e} for k, e in enumerate(_expressions().values())]
    (tmp_path / "all.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}), encoding="utf-8"
    )
    _promtool("check", "rules", "all.yaml", cwd=tmp_path)
