"""Kubernetes: another label on a pod, or a replica less in one Deployment and one more in the other.

Through the official client's asyncio side. Every change is a JSON patch that first tests the value it was made for, so
that nobody else's change is overwritten. Rights needed: pods get and patch; for `scale` also deployments get, and
deployments/scale get and patch.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException, NotFoundException, OpenApiException

from prfaas_env.base import PrfaasError
from prfaas_serving.config import KubernetesActuator, PodLabel, RoleName, TwoDeployments
from prfaas_serving.fleet import Worker
from prfaas_serving.moves.base import Actuator, Site, StepFailed, patiently
from prfaas_serving.moves.state import OpenMove

log = logging.getLogger("prfaas_serving.moves")

_Answer = TypeVar("_Answer")

#: Lets a ReplicaSet that shrinks take this pod before others.
_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_FIRST = "-1000"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_CALL_S = 10.0


class _NotThere(StepFailed):
    """The API knows no such object."""


class _Kubernetes(Actuator):
    """What both ways share: the client and how its errors are worded."""

    kind = "kubernetes"

    def __init__(self, site: Site, settings: KubernetesActuator) -> None:
        super().__init__(site)
        self._settings = settings
        configuration = client.Configuration(host=settings.api_url.rstrip("/"))
        if settings.ca_file is not None and settings.api_url.startswith("https"):
            configuration.ssl_ca_cert = settings.ca_file
        if settings.token_file is not None:
            configuration.api_key["BearerToken"] = ""  # read before each call
            configuration.api_key_prefix["BearerToken"] = "Bearer"
            configuration.refresh_api_key_hook = self._renew  # type: ignore[assignment]
        try:
            self._api = client.ApiClient(configuration)
        except (OSError, ssl.SSLError) as error:
            raise PrfaasError(f"moves.actuator.ca_file: {settings.ca_file}: {error}") from None
        self._core = client.CoreV1Api(self._api)
        self._apps = client.AppsV1Api(self._api)

    def _renew(self, configuration: Any) -> None:
        """Read every time: the token is renewed in place."""
        path = str(self._settings.token_file)
        try:
            configuration.api_key["BearerToken"] = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise StepFailed("not_switched", f"moves.actuator.token_file: {path}: {error.strerror}") from None

    async def close(self) -> None:
        """Close the client's connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def _call(self, what: str, call: Awaitable[_Answer]) -> _Answer:
        """An answer of the API.

        Raises:
            StepFailed: it refused, or did not answer.
        """
        try:
            async with asyncio.timeout(_CALL_S):
                return await call
        except NotFoundException as error:
            raise _NotThere("not_switched", f"kubernetes: {what}: {_message(error)}") from None
        except ApiException as error:
            raise StepFailed(
                "not_switched",
                f"kubernetes: {what}: status {error.status}: {_message(error)}",
                busy=error.status in (409, 429, 500, 503, 504),
            ) from None
        except TimeoutError:
            raise StepFailed(
                "not_switched", f"kubernetes: {what}: no answer in {_CALL_S:g} s", busy=True
            ) from None
        except (aiohttp.ClientError, OSError, OpenApiException, ValueError) as error:
            raise StepFailed(
                "not_switched", f"kubernetes: {what}: {type(error).__name__}", busy=True
            ) from None

    async def _pod(self, name: str) -> Any:
        return await self._call(f"pod {name}", self._core.read_namespaced_pod(name, self._settings.namespace))

    async def _patch_pod(self, name: str, body: Any, content_type: str) -> None:
        await self._call(
            f"pod {name}",
            self._core.patch_namespaced_pod(name, self._settings.namespace, body, _content_type=content_type),
        )


class Label(_Kubernetes):
    """Changes the label of the worker's pod. The engine serves either role, as vLLM behind llm-d does."""

    def __init__(self, site: Site, settings: KubernetesActuator) -> None:
        super().__init__(site, settings)
        assert settings.label is not None
        label: PodLabel = settings.label
        self._key = label.key
        self._values: dict[RoleName, str] = {
            "prefill": label.prefill,
            "decode": label.decode,
            "both": label.both,
        }

    async def switch(self, move: OpenMove, role: RoleName) -> None:
        """Change the label from what it is to the role's value."""
        now, wanted = self._label(move, await self._pod(move.worker)), self._values[role]
        if now == wanted:
            return
        path = "/metadata/labels/" + self._key.replace("~", "~0").replace("/", "~1")
        body = [
            {"op": "test", "path": path, "value": now},
            {"op": "replace", "path": path, "value": wanted},
        ]
        await self._patch_pod(move.worker, body, _JSON_PATCH)

    async def role_of(self, move: OpenMove) -> RoleName | None:
        """The role that the label names."""
        value = self._label(move, await self._pod(move.worker))
        for role, of_role in self._values.items():
            if value == of_role:
                return role
        raise StepFailed(
            "not_verified",
            f"kubernetes: pod {move.worker}: label {self._key} is {value!r}; "
            f"allowed: {', '.join(self._values.values())}",
        )

    async def verify(self, move: OpenMove, role: RoleName) -> None:
        """Label and readiness of the pod, then a generation."""
        while not _ready(await patiently(lambda: self._pod(move.worker))):
            await asyncio.sleep(self._settings.poll_s)
        await super().verify(move, role)

    def _label(self, move: OpenMove, pod: Any) -> str:
        value = (pod.metadata.labels or {}).get(self._key)
        if value is None:
            raise StepFailed("not_switched", f"kubernetes: pod {move.worker} has no label {self._key}")
        return str(value)


class Scale(_Kubernetes):
    """One Deployment per role. The drained pod goes, a new one comes, and discovery finds it."""

    replaces = True

    def __init__(self, site: Site, settings: KubernetesActuator) -> None:
        super().__init__(site, settings)
        assert settings.scale is not None
        names: TwoDeployments = settings.scale
        self._names: dict[str, str] = {"prefill": names.prefill, "decode": names.decode}

    def refusal(self, worker: Worker, role: RoleName) -> str | None:
        """There is a Deployment for each role, none for both."""
        if "both" in (role, worker.role):
            return "there is no Deployment for workers of both roles"
        return None

    async def prepare(self, move: OpenMove) -> dict[str, Any]:
        """Replicas of both before anything changes, and the workers that the new role has already."""
        replicas = {role: await self._replicas(role) for role in (move.from_role, move.to_role)}
        if replicas[move.from_role] < 2:
            raise StepFailed(
                "last_of_role",
                f"kubernetes: deployment {self._names[move.from_role]} has "
                f"{replicas[move.from_role]} replicas; at least 1 must stay",
            )
        known = [w.name for w in self._site.fleet if w.role == move.to_role]
        return {"replicas": replicas, "known": known}

    async def switch(self, move: OpenMove, role: RoleName) -> None:
        """Scale one down, then the other up: the hardware must be free first."""
        before: dict[str, int] = move.memo["replicas"]
        source, target = move.from_role, move.to_role
        if role == move.to_role:
            await self._mark(move, _FIRST)
            await self._scale(source, before[source], before[source] - 1)
            await self._scale(target, before[target], before[target] + 1)
        else:
            await self._scale(target, before[target] + 1, before[target])
            await self._scale(source, before[source] - 1, before[source])
            await self._mark(move, None)

    async def role_of(self, move: OpenMove) -> RoleName | None:
        """The new role if both Deployments have their new size, the old one if both have the old size."""
        before: dict[str, int] | None = move.memo.get("replicas")
        if before is None:
            return None
        change = {role: await self._replicas(role) - count for role, count in before.items()}
        if change == {move.from_role: -1, move.to_role: 1}:
            return move.to_role
        return move.from_role if not any(change.values()) else None

    async def verify(self, move: OpenMove, role: RoleName) -> None:
        """Both Deployments have settled, and a worker generates in the role."""
        before: dict[str, int] | None = move.memo.get("replicas")
        if before is None:
            await self._generation(move, role)
            return
        moved = role == move.to_role
        sizes = {move.from_role: before[move.from_role] - moved, move.to_role: before[move.to_role] + moved}
        for of_role, size in sizes.items():
            while not await patiently(lambda r=of_role, n=size: self._settled(r, n)):  # type: ignore[misc]
                await asyncio.sleep(self._settings.poll_s)
        gone = await patiently(lambda: self._gone(move.worker))
        if not moved:
            self.relabel(move, role) if gone else await self._generation(move, role)
            return
        if not gone:
            log.warning("pod %s stayed: its Deployment let another one go", move.worker)
        newcomer = await self._newcomer(move)
        wrong = None if self._site.generate is None else await self._site.generate(newcomer, role)
        if wrong is not None:
            raise StepFailed("not_verified", f"worker {newcomer.name!r} does not generate as {role}: {wrong}")

    def relabel(self, move: OpenMove, role: RoleName) -> None:
        """The worker has gone with its pod."""
        worker = self._site.fleet.workers.get(move.worker)
        if worker is not None:
            self._site.fleet.remove(worker)

    # ------------------------------------------------------------------ Deployments and pods

    async def _replicas(self, role: str) -> int:
        name = self._names[role]
        scale = await self._call(
            f"deployment {name}",
            self._apps.read_namespaced_deployment_scale(name, self._settings.namespace),
        )
        return 0 if scale.spec is None else int(scale.spec.replicas or 0)

    async def _scale(self, role: str, before: int, after: int) -> None:
        """Set the replicas; StepFailed if they are neither what they were nor what they should be."""
        name, now = self._names[role], await self._replicas(role)
        if now == after:
            return
        if now != before:
            raise StepFailed(
                "not_switched",
                f"kubernetes: deployment {name} has {now} replicas, expected {before}: somebody else scales it",
            )
        body = [
            {"op": "test", "path": "/spec/replicas", "value": before},
            {"op": "replace", "path": "/spec/replicas", "value": after},
        ]
        await self._call(
            f"deployment {name}",
            self._apps.patch_namespaced_deployment_scale(
                name, self._settings.namespace, body, _content_type=_JSON_PATCH
            ),
        )

    async def _settled(self, role: str, size: int) -> bool:
        """Whether a Deployment's controller has seen its size and all pods of it, and no others, are ready."""
        name = self._names[role]
        found: Any = await self._call(
            f"deployment {name}", self._apps.read_namespaced_deployment(name, self._settings.namespace)
        )
        status = found.status
        if status is None or (status.observed_generation or 0) < (found.metadata.generation or 0):
            return False
        return (status.replicas or 0) == size and (status.ready_replicas or 0) == size

    async def _mark(self, move: OpenMove, cost: str | None) -> None:
        """Say that this pod should go first, or take that back; a pod that is gone needs nothing."""
        if cost is None and await self._gone(move.worker):
            return
        body = {"metadata": {"annotations": {_DELETION_COST: cost}}}
        await self._patch_pod(move.worker, body, _MERGE)

    async def _gone(self, name: str) -> bool:
        try:
            pod = await self._pod(name)
        except _NotThere:
            return True
        return pod.metadata.deletion_timestamp is not None

    async def _newcomer(self, move: OpenMove) -> Worker:
        """A worker that has the new role now and had it not before."""
        while True:
            for worker in self._site.fleet:
                known = worker.name in move.memo["known"] or worker.name == move.worker
                if not known and worker.role == move.to_role and worker.state == "up":
                    return worker
            await asyncio.sleep(min(self._settings.poll_s, 0.5))


def _ready(pod: Any) -> bool:
    """Whether a pod runs and its probes pass."""
    if pod.metadata.deletion_timestamp is not None or pod.status is None or pod.status.phase != "Running":
        return False
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())


def _message(error: ApiException) -> str:
    """What a Status object of the API says, else the reason phrase."""
    try:
        told = orjson.loads(error.body or b"")
    except orjson.JSONDecodeError:
        told = None
    text = told.get("message") if isinstance(told, dict) else None
    return str(text or error.reason or "no reason given")[:300]
