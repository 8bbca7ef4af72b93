"""The Kubernetes API for tests: recorded answers played back call by call, and a small cluster that behaves.

Answers have the shape that the API's reference gives (`recorded/kubernetes.json`).
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

RECORDED: dict[str, Any] = orjson.loads((Path(__file__).parent / "recorded" / "kubernetes.json").read_bytes())
TOKEN = "a-token-of-the-service-account"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"


def recorded(name: str, **changes: Any) -> Any:
    """A recorded answer; `changes` are values by dotted path, with `__` for the dot."""
    found = copy.deepcopy(RECORDED[name])
    for path, value in changes.items():
        *way, last = path.split("__")
        part = found
        for key in way:
            part = part[key]
        part[last] = value
    return found


@dataclass
class Call:
    """One call that is expected, and its answer."""

    method: str
    path: str
    answer: Any
    status: int = 200
    content_type: str | None = None
    body: Any = None


@dataclass
class Tape:
    """Plays answers back in order. A call that is another one than expected is answered with 500 and noted."""

    calls: list[Call] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The next call."""
        raw = await request.read()
        body = orjson.loads(raw) if raw else None
        kind = request.headers.get("Content-Type") if raw else None
        got = (request.method, request.path, kind, body, request.headers.get("Authorization"))
        if not self.calls:
            self.wrong.append(f"one call too many: {got}")
            return web.json_response({}, status=500)
        call = self.calls.pop(0)
        expected = (call.method, call.path, call.content_type, call.body, f"Bearer {TOKEN}")
        if got != expected:
            self.wrong.append(f"expected {expected}, got {got}")
            return web.json_response({}, status=500)
        return web.json_response(call.answer, status=call.status)

    def played(self) -> None:
        """Every call came, and no other one."""
        assert self.wrong == []
        assert self.calls == [], f"not asked for: {[(c.method, c.path) for c in self.calls]}"


@contextlib.asynccontextmanager
async def listening(part: Any) -> AsyncIterator[Any]:
    """Serve `part.handle` and give `part` with its address."""
    runner = web.ServerRunner(web.Server(part.handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    part.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield part
    finally:
        await runner.cleanup()


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.answer = RECORDED[name]


class Cluster:
    """Pods with labels and two Deployments, with what is needed of their controllers.

    Args:
        pods: (name, role, port) of each.
    """

    namespace = "llm"

    def __init__(self, pods: list[tuple[str, str, int]]) -> None:
        self.url = ""
        self.pods = {name: recorded("pod", metadata__name=name) for name, _, _ in pods}
        self.ports = {name: port for name, _, port in pods}
        for name, role, _ in pods:
            self.pods[name]["metadata"]["labels"]["llm-d.ai/role"] = role
        self.sizes = {
            role: sum(r == role for _, r, _ in pods) for role in dict.fromkeys(role for _, role, _ in pods)
        }
        self.spare: list[tuple[str, int]] = []
        """(name, port) of pods that a Deployment may still start."""
        self.patches: list[tuple[str, str, Any]] = []
        self.starts = True
        """Whether new pods get ready."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One call."""
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        raw = await request.read()
        body = orjson.loads(raw) if raw else None
        try:
            return web.json_response(self._answer(request, body))
        except Refused as refused:
            return web.json_response(refused.answer, status=refused.answer["code"])

    def _answer(self, request: web.BaseRequest, body: Any) -> Any:
        base = rf"/namespaces/{self.namespace}"
        if (match := re.fullmatch(rf"/api/v1{base}/pods/([\w-]+)", request.path)) is not None:
            if match[1] not in self.pods:
                raise Refused("not_found")
            if request.method == "PATCH":
                self._patch(self.pods[match[1]], request, body)
            return self.pods[match[1]]
        if (
            match := re.fullmatch(rf"/apis/apps/v1{base}/deployments/vllm-(\w+)(/scale)?", request.path)
        ) is not None:
            role, scale = match[1], bool(match[2])
            if request.method == "PATCH":
                assert scale
                held = {"spec": {"replicas": self.sizes[role]}}
                self._patch(held, request, body)
                self._resize(role, held["spec"]["replicas"])
            return self._scale(role) if scale else self._deployment(role)
        assert request.path == f"/apis/discovery.k8s.io/v1{base}/endpointslices", request.path
        service = request.query["labelSelector"].rpartition("=")[2]
        return self._slices(service)

    def _patch(self, held: Any, request: web.BaseRequest, body: Any) -> None:
        """Apply a JSON patch of tests and replacements, or a merge patch."""
        kind = request.headers["Content-Type"]
        if kind == MERGE_PATCH:
            _merge(held, body)
            return
        assert kind == JSON_PATCH, kind
        for op in body:
            *way, last = [p.replace("~1", "/").replace("~0", "~") for p in op["path"].split("/")[1:]]
            part = held
            for key in way:
                part = part[key]
            if last not in part:
                raise Refused("invalid")
            if op["op"] == "test" and part[last] != op["value"]:
                raise Refused("invalid")
            if op["op"] == "replace":
                part[last] = op["value"]
                self.patches.append((request.path, op["path"], op["value"]))

    def _of(self, role: str) -> list[str]:
        return [n for n, pod in self.pods.items() if pod["metadata"]["labels"]["llm-d.ai/role"] == role]

    def _resize(self, role: str, size: int) -> None:
        self.sizes[role] = size
        while len(self._of(role)) > size:
            # the ReplicaSet lets pods with the lowest deletion cost go first
            cost = "controller.kubernetes.io/pod-deletion-cost"
            first = min(
                self._of(role), key=lambda n: int(self.pods[n]["metadata"]["annotations"].get(cost) or 0)
            )
            del self.pods[first]
        while len(self._of(role)) < size and self.spare:
            name, port = self.spare.pop(0)
            self.pods[name] = recorded("pod", metadata__name=name)
            self.pods[name]["metadata"]["labels"]["llm-d.ai/role"] = role
            self.ports[name] = port

    def _scale(self, role: str) -> Any:
        return recorded(
            "scale",
            metadata__name=f"vllm-{role}",
            spec__replicas=self.sizes[role],
            status__replicas=len(self._of(role)),
        )

    def _deployment(self, role: str) -> Any:
        found = recorded("deployment", metadata__name=f"vllm-{role}", spec__replicas=self.sizes[role])
        n = len(self._of(role))
        ready = n if self.starts else 0
        found["status"].update(replicas=n, updatedReplicas=n, readyReplicas=ready, availableReplicas=ready)
        return found

    def _slices(self, service: str) -> Any:
        role = service.removeprefix("vllm-")
        items = [
            {
                "ports": [{"name": "http", "port": self.ports[name]}],
                "endpoints": [
                    {
                        "addresses": ["127.0.0.1"],
                        "conditions": {"ready": True},
                        "targetRef": {"kind": "Pod", "name": name},
                    }
                ],
            }
            for name in self._of(role)
        ]
        return {
            "kind": "EndpointSliceList",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": {},
            "items": items,
        }


def _merge(held: Any, patch: Any) -> None:
    for key, value in patch.items():
        if value is None:
            held.pop(key, None)
        elif isinstance(value, dict):
            _merge(held.setdefault(key, {}), value)
        else:
            held[key] = value
