"""Workers from a watched file and from Kubernetes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from prfaas_env.base import PrfaasError
from prfaas_serving.config import Kubernetes
from prfaas_serving.discovery import KubernetesSource
from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker
from tests.serving.support import LONG, run, serving, until

PAIR = (("l1", "pd0", "prefill"), ("d1", "pd0", "decode"))


def entry(worker: FakeWorker, **fields: Any) -> dict[str, Any]:
    return {"name": worker.spec.name, "url": worker.url, "cluster": "prfaas0", "role": "prefill", **fields}


@contextlib.asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    found = [FakeWorker(FakeSpec(name=name, role="prefill")) for name in ("a", "b")]
    for worker in found:
        await worker.start()
    try:
        yield found[0], found[1]
    finally:
        for worker in found:
            await worker.close()


def test_a_watched_file_adds_changes_and_removes(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"

    def write(*entries: dict[str, Any]) -> None:
        temporary = tmp_path / "new"
        temporary.write_text(yaml.safe_dump({"workers": list(entries)}))
        temporary.replace(file)

    async def work() -> None:
        async with two_workers() as (a, b):
            write(entry(a))
            discovery = {"file": str(file), "file_poll_s": 0.02}
            async with serving(workers=PAIR, discovery=discovery) as s:
                fleet = s.router.forwarder.fleet
                await s.complete(LONG)
                assert a.seen
                fleet.workers["a"].requests = 41
                write(entry(a), entry(b))
                await until(lambda: "b" in fleet.workers and fleet.workers["b"].state == "up", "b comes")
                assert fleet.workers["a"].requests == 41, "an unchanged entry keeps its worker"
                for broken in ("workers: [{name: c}]", "workers: {", "nope: 1", ""):
                    file.write_text(broken)
                    await until(lambda: s.router.discoverer.problem is not None, "the mistake is noticed")
                    assert set(fleet.workers) == {"l1", "d1", "a", "b"}
                    write(entry(a), entry(b))
                    await until(lambda: s.router.discoverer.problem is None, "it is well again")
                write(entry(b))
                await until(lambda: "a" not in fleet.workers, "a leaves")
                file.unlink()
                await until(lambda: s.router.discoverer.problem is not None, "the file is missed")
                assert set(fleet.workers) == {"l1", "d1", "b"}
                b.seen.clear()
                await s.complete(LONG + "x")
                assert b.seen

    run(work)


def test_a_wrong_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text("workers: [{name: a, url: 'http://h:1', cluster: mars, role: prefill}]")

    async def work() -> None:
        with pytest.raises(PrfaasError, match=r"workers\.yaml: worker 'a': cluster is 'mars'"):
            async with serving(workers=PAIR, discovery={"file": str(file)}):
                pass

    run(work)


def slice_of(
    *endpoints: tuple[str, str, bool | None], port: int = 8000, name: str = "http"
) -> dict[str, Any]:
    """An EndpointSlice as the API lists it."""
    return {
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {}
                if ready is None
                else {"ready": ready, "serving": ready, "terminating": not ready},
                "targetRef": {"kind": "Pod", "name": pod},
            }
            for pod, address, ready in endpoints
        ],
        "metadata": {"name": "x"},
        "ports": [
            {"name": "metrics", "port": 9, "protocol": "TCP"},
            {"name": name, "port": port, "protocol": "TCP"},
        ],
    }


class Api:
    """A recorded Kubernetes API: pages of EndpointSlices by service."""

    def __init__(self) -> None:
        self.pages: dict[str, list[list[dict[str, Any]]]] = {}
        self.status = 200
        self.asked: list[tuple[str, str]] = []

    async def handle(self, request: web.BaseRequest) -> web.Response:
        service = request.query["labelSelector"].removeprefix("kubernetes.io/service-name=")
        self.asked.append((request.path, request.headers["Authorization"]))
        if self.status != 200:
            return web.json_response({"kind": "Status"}, status=self.status)
        pages = self.pages.get(service, [[]])
        k = int(request.query.get("continue", "0"))
        metadata = {"continue": str(k + 1)} if k + 1 < len(pages) else {}
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": pages[k]})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        runner = web.ServerRunner(web.Server(self.handle))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        finally:
            await runner.cleanup()


def settings(url: str, token: Path, **fields: Any) -> dict[str, Any]:
    token.write_text("tok\n")
    return {
        "api_url": url,
        "namespace": "llm",
        "token_file": str(token),
        "ca_file": None,
        "poll_s": 0.05,
        "services": [{"service": "prefill", "cluster": "prfaas0", "role": "prefill", "port_name": "http"}],
        **fields,
    }


def test_ready_endpoints_become_workers(tmp_path: Path) -> None:
    async def work() -> None:
        api = Api()
        api.pages["prefill"] = [
            [slice_of(("pod-a", "10.0.0.1", True), ("pod-b", "10.0.0.2", False))],
            [slice_of(("pod-c", "10.0.0.3", None))],
        ]
        async with api.running() as url:
            source = KubernetesSource(Kubernetes.model_validate(settings(url, tmp_path / "token")))
            try:
                found = await source.workers()
                assert [(w.name, w.url, w.role) for w in found] == [
                    ("pod-a", "http://10.0.0.1:8000", "prefill"),
                    ("pod-c", "http://10.0.0.3:8000", "prefill"),
                ]
                assert api.asked[0] == (
                    "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices",
                    "Bearer tok",
                )
                api.status = 403
                with pytest.raises(PrfaasError, match="service prefill: the API answered 403"):
                    await source.workers()
            finally:
                await source.close()

    run(work)


def test_the_fleet_follows_the_endpoints(tmp_path: Path) -> None:
    async def work() -> None:
        api = Api()
        async with two_workers() as (a, b), api.running() as url:
            api.pages["prefill"] = [[slice_of(("pod-a", "127.0.0.1", True), port=a.port)]]
            kubernetes = settings(url, tmp_path / "token")
            async with serving(workers=PAIR, discovery={"kubernetes": kubernetes}, ready=False) as s:
                fleet = s.router.forwarder.fleet
                await until(
                    lambda: "pod-a" in fleet.workers and fleet.workers["pod-a"].state == "up", "a comes"
                )
                api.status = 500
                await until(lambda: s.router.discoverer.problem is not None, "the API is ill")
                assert "pod-a" in fleet.workers
                api.pages["prefill"] = [[slice_of(("pod-b", "127.0.0.1", True), port=b.port)]]
                api.status = 200
                await until(
                    lambda: "pod-b" in fleet.workers and "pod-a" not in fleet.workers, "b instead of a"
                )

    run(work)
