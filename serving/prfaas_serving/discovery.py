"""Workers that come and go: from a watched file, Kubernetes EndpointSlices, or the instances of a Dynamo frontend."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import orjson
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from pydantic import ValidationError

from prfaas_env.base import PrfaasError
from prfaas_env.scenarios.loader import read_yaml
from prfaas_serving.backends.dynamo_instances import Instance, read_instances
from prfaas_serving.config import (
    Dynamo,
    DynamoGroup,
    Kubernetes,
    KubernetesService,
    WorkersFile,
    WorkerSpec,
    validate,
)
from prfaas_serving.forward import Forwarder
from prfaas_serving.health import HealthChecker

log = logging.getLogger("prfaas_serving.discovery")


class Source(Protocol):
    """A service that lists workers."""

    async def workers(self) -> list[WorkerSpec]:
        """All that are there now.

        Raises:
            PrfaasError: it cannot be asked or answers something else.
        """

    async def close(self) -> None:
        """Close connections."""


class Discoverer:
    """Keeps the fleet equal to what its sources list. A source that cannot be read changes nothing."""

    def __init__(self, forwarder: Forwarder, health: HealthChecker, where: str) -> None:
        self._f = forwarder
        self._health = health
        self._where = where
        self._tasks: list[asyncio.Task[None]] = []
        self._stamp: tuple[int, int, int] | None = None
        self._sources: list[Source] = []
        self.problem: str | None = None
        """Why the last reading of a source failed."""

    async def start(self) -> None:
        """Read every source once and go on watching.

        Raises:
            PrfaasError: the workers file is wrong at the start.
        """
        settings = self._f.config.discovery
        if settings.file is not None:
            self._apply("file", self._read_file(Path(settings.file)))
            self._tasks.append(asyncio.create_task(self._every(settings.file_poll_s, self._look_at_file)))
        if settings.kubernetes is not None:
            self._follow("kubernetes", KubernetesSource(settings.kubernetes), settings.kubernetes.poll_s)
        if settings.dynamo is not None:
            self._follow("dynamo", DynamoSource(settings.dynamo), settings.dynamo.poll_s)

    def _follow(self, name: str, source: Source, poll_s: float) -> None:
        self._sources.append(source)

        async def ask() -> None:
            await self._ask(name, source)

        self._tasks.append(asyncio.create_task(self._every(poll_s, ask)))

    async def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for source in self._sources:
            await source.close()

    async def _every(self, pause_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await act()
            await asyncio.sleep(pause_s)

    def _tell(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            log.error("%s; the workers stay as they are", problem)
        self.problem = problem

    # ------------------------------------------------------------------ file

    def _read_file(self, path: Path) -> Sequence[WorkerSpec]:
        try:
            info = path.stat()
        except OSError as error:
            raise PrfaasError(f"{path}: cannot be read: {error.strerror}") from None
        self._stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
        found: WorkersFile = validate(WorkersFile, read_yaml(path), str(path))
        for spec in found.workers:
            self._f.resolved.check_worker(spec, str(path))
        return found.workers

    async def _look_at_file(self) -> None:
        path = Path(str(self._f.config.discovery.file))
        try:
            info = path.stat()
            if (info.st_mtime_ns, info.st_size, info.st_ino) == self._stamp:
                return
            self._apply("file", self._read_file(path))
            self._tell(None)
        except (PrfaasError, OSError) as error:
            self._tell(str(error))

    # ------------------------------------------------------------------ services that list workers

    async def _ask(self, name: str, source: Source) -> None:
        try:
            self._apply(name, await source.workers())
            self._tell(None)
        except PrfaasError as error:
            self._tell(str(error))

    # ------------------------------------------------------------------ the fleet

    def _apply(self, source: str, wanted: Sequence[WorkerSpec]) -> None:
        """Make the workers of one source those that it lists; one whose entry changed is taken in anew."""
        fleet = self._f.fleet
        by_name = {spec.name: spec for spec in wanted}
        for worker in [w for w in fleet if w.source == source]:
            if not fleet.keeps(worker, by_name.get(worker.name)):
                log.info("worker %s leaves (%s)", worker.name, source)
                fleet.remove(worker)
        for spec in wanted:
            if spec.name in fleet.workers and fleet.workers[spec.name].source == source:
                continue
            try:
                self._f.resolved.check_worker(spec, source)
                worker = fleet.add(spec, source)
            except (ValueError, PrfaasError) as error:
                log.error("%s: worker %s is not taken in: %s", source, spec.name, error)
                continue
            log.info("worker %s comes (%s)", spec.name, source)
            self._health.watch(worker)


async def _get_json(session: ClientSession, who: str, url: str, **options: Any) -> Any:
    """The parsed answer.

    Raises:
        PrfaasError: none came, or another status than 200.
    """
    try:
        async with session.get(url, **options) as answer:
            if answer.status != 200:
                raise PrfaasError(f"{who} answered {answer.status}")
            return orjson.loads(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
        raise PrfaasError(f"{who} cannot be read: {type(error).__name__}") from None


class KubernetesSource:
    """Lists the EndpointSlices of Services (API group discovery.k8s.io/v1)."""

    def __init__(self, settings: Kubernetes) -> None:
        self._settings = settings
        context: ssl.SSLContext | bool = True
        if settings.api_url.startswith("https") and settings.ca_file is not None:
            try:
                context = ssl.create_default_context(cafile=settings.ca_file)
            except (OSError, ssl.SSLError) as error:
                raise PrfaasError(f"discovery.kubernetes.ca_file: {settings.ca_file}: {error}") from None
        self._session = ClientSession(connector=TCPConnector(ssl=context), timeout=ClientTimeout(total=10.0))

    async def close(self) -> None:
        """Close connections."""
        await self._session.close()

    async def workers(self) -> list[WorkerSpec]:
        """All ready endpoints.

        Raises:
            PrfaasError: the API cannot be asked or answers something else.
        """
        try:
            # read every time: the token is renewed in place
            token = Path(self._settings.token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise PrfaasError(
                f"discovery.kubernetes.token_file: {self._settings.token_file}: {error.strerror}"
            ) from None
        found: list[WorkerSpec] = []
        for service in self._settings.services:
            found += self._of(service, await self._slices(service, token))
        return found

    async def _slices(self, service: KubernetesService, token: str) -> list[Any]:
        settings = self._settings
        url = f"{settings.api_url}/apis/discovery.k8s.io/v1/namespaces/{settings.namespace}/endpointslices"
        where = f"kubernetes: service {service.service}"
        slices: list[Any] = []
        parameters = {"labelSelector": f"kubernetes.io/service-name={service.service}", "limit": "500"}
        while True:
            page = await _get_json(
                self._session,
                f"{where}: the API",
                url,
                params=parameters,
                headers={"Authorization": f"Bearer {token}"},
            )
            if not isinstance(page, dict) or not isinstance(page.get("items"), list):
                raise PrfaasError(f"{where}: the API did not answer with a list")
            slices += page["items"]
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return slices
            parameters["continue"] = more

    def _of(self, service: KubernetesService, slices: list[Any]) -> list[WorkerSpec]:
        found: dict[str, WorkerSpec] = {}
        for part in slices:
            ports = [
                p["port"]
                for p in part.get("ports") or ()
                if p.get("port") and (service.port_name is None or p.get("name") == service.port_name)
            ]
            for endpoint in part.get("endpoints") or () if ports else ():
                if (endpoint.get("conditions") or {}).get("ready") is False:
                    continue  # absent means ready
                for address in (endpoint.get("addresses") or ())[:1]:
                    host = f"[{address}]" if ":" in address else address
                    name = ((endpoint.get("targetRef") or {}).get("name") or address).replace(":", "-")
                    try:
                        found[name] = WorkerSpec(
                            name=name,
                            url=f"{service.scheme}://{host}:{ports[0]}",
                            cluster=service.cluster,
                            role=service.role,
                            bootstrap_port=service.bootstrap_port,
                        )
                    except ValidationError:
                        log.error("kubernetes: endpoint %s of %s is not usable", name, service.service)
        return [found[name] for name in sorted(found)]


class DynamoSource:
    """Lists the instances of a Dynamo frontend (`GET /health`)."""

    def __init__(self, settings: Dynamo) -> None:
        self._settings = settings
        self._session = ClientSession(timeout=ClientTimeout(total=10.0))

    async def close(self) -> None:
        """Close connections."""
        await self._session.close()

    async def workers(self) -> list[WorkerSpec]:
        """All instances that a group fits.

        Raises:
            PrfaasError: the frontend cannot be asked or answers something else.
        """
        page = f"{self._settings.url}/health"
        found = read_instances(await _get_json(self._session, f"dynamo: {page}", page))
        if found is None:
            raise PrfaasError(f"dynamo: {page} has no list of instances")
        specs = [self._of(group, i) for i in found if (group := self._group(i)) is not None]
        return sorted(specs, key=lambda spec: spec.name)

    def _group(self, instance: Instance) -> DynamoGroup | None:
        for group in self._settings.groups:
            if (group.namespace, group.component) != (instance.namespace, instance.component):
                continue
            if not group.networks or _within(instance, group):
                return group
        return None

    def _of(self, group: DynamoGroup, instance: Instance) -> WorkerSpec:
        return WorkerSpec(
            name=f"{group.role}-{int(instance.instance_id):x}",
            url=self._settings.url,
            cluster=group.cluster,
            role=group.role,
            instance_id=instance.instance_id,
        )


def _within(instance: Instance, group: DynamoGroup) -> bool:
    address = instance.address
    return address is not None and any(address in ipaddress.ip_network(n) for n in group.networks)
