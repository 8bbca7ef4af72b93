"""The kubernetes actuator: every call against recorded answers, then whole routers with a small cluster."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas_env.base import PrfaasError
from prfaas_serving.app import Router
from prfaas_serving.config import KubernetesActuator, Resolved, RouterConfig
from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker
from prfaas_serving.fleet import Fleet
from prfaas_serving.moves.base import Actuator, Site, StepFailed, within
from prfaas_serving.moves.kubernetes import Label, Scale
from prfaas_serving.moves.state import OpenMove
from prfaas_serving.requests import ClientError
from tests.serving.kubernetes_api import (
    JSON_PATCH,
    MERGE_PATCH,
    RECORDED,
    TOKEN,
    Call,
    Cluster,
    Tape,
    listening,
    recorded,
)
from tests.serving.support import FAST_HEALTH, run, until

POD = "vllm-5d9c7b6f4-x2lqp"
POD_PATH = f"/api/v1/namespaces/llm/pods/{POD}"
DEPLOYMENT_PATH = "/apis/apps/v1/namespaces/llm/deployments"
LABEL_PATH = "/metadata/labels/llm-d.ai~1role"
COST = "controller.kubernetes.io/pod-deletion-cost"


def settings(api: Tape | Cluster, folder: Path, **way: Any) -> dict[str, Any]:
    """Of the actuator; the token is in a file."""
    token = folder / "token"
    token.write_text(TOKEN + "\n")
    return {
        "kind": "kubernetes",
        "api_url": api.url,
        "namespace": "llm",
        "token_file": str(token),
        "ca_file": None,
        "poll_s": 0.02,
        **way,
    }


@contextlib.asynccontextmanager
async def playing(folder: Path, calls: list[Call], **way: Any) -> AsyncIterator[tuple[Actuator, Fleet, Tape]]:
    """An actuator in front of a tape; a fleet of the pod and a decode worker."""
    async with listening(Tape(calls)) as tape:
        entries = [
            {"name": POD, "url": "http://10.244.5.23:8000", "cluster": "pd0", "role": "prefill"},
            {"name": "other", "url": "http://10.244.5.24:8000", "cluster": "pd0", "role": "decode"},
        ]
        config = RouterConfig.model_validate({"backend": "vllm_nixl", "workers": entries})
        fleet = Fleet(config, "pd0", ("prfaas0",))
        for spec in config.workers:
            fleet.add(spec, "config")
        site = Site(fleet, None, None)  # type: ignore[arg-type]
        parsed = KubernetesActuator.model_validate(settings(tape, folder, **way))
        actuator: Actuator = (Label if parsed.label is not None else Scale)(site, parsed)
        try:
            yield actuator, fleet, tape
        finally:
            await actuator.close()


def a_move(**memo: Any) -> OpenMove:
    """The pod from prefill to decode."""
    return OpenMove(
        worker=POD,
        url="http://10.244.5.23:8000",
        cluster="pd0",
        from_role="prefill",
        to_role="decode",
        by="policy",
        kind="kubernetes",
        memo=memo,
    )


def read_pod(**changes: Any) -> Call:
    """GET of the pod."""
    return Call("GET", POD_PATH, recorded("pod", **changes))


def pod_with(role: str) -> dict[str, Any]:
    """The pod's labels with a role."""
    return {"metadata__labels": {**RECORDED["pod"]["metadata"]["labels"], "llm-d.ai/role": role}}


def patch_label(old: str, new: str) -> Call:
    """PATCH of the label, from the value that it must have."""
    body = [
        {"op": "test", "path": LABEL_PATH, "value": old},
        {"op": "replace", "path": LABEL_PATH, "value": new},
    ]
    return Call("PATCH", POD_PATH, recorded("pod", **pod_with(new)), 200, JSON_PATCH, body)


# ------------------------------------------------------------------------------------------------ label


def test_a_label_is_changed_and_seen(tmp_path: Path) -> None:
    async def work() -> None:
        calls = [
            read_pod(),
            patch_label("prefill", "decode"),
            # not ready for a moment, then as it should be: ready, and the label
            read_pod(**pod_with("decode"), status__phase="Pending"),
            read_pod(**pod_with("decode")),
            read_pod(**pod_with("decode")),
            # asked again, nothing is changed again
            read_pod(**pod_with("decode")),
            # and back
            read_pod(**pod_with("decode")),
            patch_label("decode", "prefill"),
            # both
            read_pod(),
            patch_label("prefill", "prefill-decode"),
        ]
        async with playing(tmp_path, calls, label={}) as (actuator, _, tape):
            move = a_move()
            await actuator.switch(move, "decode")
            await actuator.verify(move, "decode")
            await actuator.switch(move, "decode")
            await actuator.switch(move, "prefill")
            await actuator.switch(move, "both")
            tape.played()

    run(work)


def test_a_label_of_ones_own(tmp_path: Path) -> None:
    async def work() -> None:
        labels = {"metadata__labels": {"pd~role": "P"}}
        body = [
            {"op": "test", "path": "/metadata/labels/pd~0role", "value": "P"},
            {"op": "replace", "path": "/metadata/labels/pd~0role", "value": "D"},
        ]
        calls = [
            read_pod(**labels),
            Call("PATCH", POD_PATH, recorded("pod"), 200, JSON_PATCH, body),
            read_pod(**labels),
        ]
        way = {"label": {"key": "pd.role", "prefill": "P", "decode": "D"}}
        async with playing(tmp_path, calls, **way) as (actuator, _, tape):
            actuator._key = "pd~role"  # type: ignore[attr-defined] # no valid label; the escape is what is tested
            await actuator.switch(a_move(), "decode")
            assert await actuator.role_of(a_move()) == "prefill"
            tape.played()

    run(work)


def refusal(name: str, method: str = "GET") -> Call:
    """A call that the API refuses."""
    call = read_pod() if method == "GET" else patch_label("prefill", "decode")
    call.answer, call.status = RECORDED[name], RECORDED[name]["code"]
    return call


@pytest.mark.parametrize(
    ("calls", "text", "busy"),
    [
        ([refusal("not_found")], 'pods "vllm-5d9c7b6f4-x2lqp" not found', False),
        ([read_pod(), refusal("forbidden", "PATCH")], "cannot patch resource", False),
        ([read_pod(), refusal("invalid", "PATCH")], "status 422", False),
        ([read_pod(), refusal("conflict", "PATCH")], "the object has been modified", True),
        ([read_pod(metadata__labels={"app": "vllm"})], "has no label llm-d.ai/role", False),
    ],
)
def test_what_the_api_refuses_is_a_failed_step(
    tmp_path: Path, calls: list[Call], text: str, busy: bool
) -> None:
    async def work() -> None:
        async with playing(tmp_path, list(calls), label={}) as (actuator, _, tape):
            with pytest.raises(StepFailed, match=text) as caught:
                await actuator.switch(a_move(), "decode")
            assert (caught.value.busy, caught.value.safe) == (busy, True)
            assert "\n" not in str(caught.value)
            tape.played()

    run(work)


def test_an_api_that_is_away_or_talks_nonsense(tmp_path: Path) -> None:
    async def work() -> None:
        async with playing(tmp_path, [Call("GET", POD_PATH, ["no pod"])], label={}) as (actuator, _, tape):
            with pytest.raises(StepFailed, match="kubernetes: pod"):
                await actuator.role_of(a_move())
            tape.played()
            (tmp_path / "token").unlink()
            with pytest.raises(StepFailed, match=r"moves\.actuator\.token_file"):
                await actuator.role_of(a_move())
        nobody = KubernetesActuator.model_validate(
            {"kind": "kubernetes", "api_url": "http://127.0.0.1:9", "token_file": None, "label": {}}
        )
        away = Label(Site(None, None, None), nobody)  # type: ignore[arg-type]
        with pytest.raises(StepFailed, match="ClientConnectorError") as caught:
            await away.role_of(a_move())
        assert caught.value.busy, "it may be back in a moment"
        await away.close()
        with pytest.raises(PrfaasError, match=r"moves\.actuator\.ca_file: /nowhere/ca"):
            Label(
                Site(None, None, None),  # type: ignore[arg-type]
                nobody.model_copy(update={"ca_file": "/nowhere/ca", "api_url": "https://127.0.0.1:9"}),
            )

    run(work)


def test_a_label_that_means_nothing_is_no_role(tmp_path: Path) -> None:
    async def work() -> None:
        calls = [read_pod(**pod_with("embedding"))]
        async with playing(tmp_path, calls, label={}) as (actuator, _, _tape):
            with pytest.raises(StepFailed, match=r"is 'embedding'; allowed: prefill, decode, prefill-decode"):
                await actuator.role_of(a_move())

    run(work)


# ------------------------------------------------------------------------------------------------ scale

TWO = {"scale": {"prefill": "vllm-prefill", "decode": "vllm-decode"}}


def read_scale(role: str, replicas: int) -> Call:
    """GET of a Deployment's scale."""
    answer = recorded("scale", metadata__name=f"vllm-{role}", spec__replicas=replicas)
    return Call("GET", f"{DEPLOYMENT_PATH}/vllm-{role}/scale", answer)


def patch_scale(role: str, old: int, new: int) -> Call:
    """PATCH of it, from the value that it must have."""
    body = [
        {"op": "test", "path": "/spec/replicas", "value": old},
        {"op": "replace", "path": "/spec/replicas", "value": new},
    ]
    answer = recorded("scale", metadata__name=f"vllm-{role}", spec__replicas=new)
    return Call("PATCH", f"{DEPLOYMENT_PATH}/vllm-{role}/scale", answer, 200, JSON_PATCH, body)


def mark(cost: str | None) -> Call:
    """PATCH of the pod's deletion cost."""
    body = {"metadata": {"annotations": {COST: cost}}}
    return Call("PATCH", POD_PATH, recorded("pod"), 200, MERGE_PATCH, body)


def read_deployment(role: str, size: int, **status: int) -> Call:
    """GET of a Deployment; by default it has settled."""
    full = {"observedGeneration": 4, "replicas": size, "readyReplicas": size, **status}
    answer = recorded("deployment", metadata__name=f"vllm-{role}", spec__replicas=size, status=full)
    return Call("GET", f"{DEPLOYMENT_PATH}/vllm-{role}", answer)


GONE = Call("GET", POD_PATH, RECORDED["not_found"], 404)
MEMO = {"replicas": {"prefill": 3, "decode": 2}, "known": ["other"]}


def test_two_deployments_change_their_sizes(tmp_path: Path) -> None:
    async def work() -> None:
        calls = [
            # before anything changes
            read_scale("prefill", 3),
            read_scale("decode", 2),
            # one down, marked to be the one that goes, then one up
            mark("-1000"),
            read_scale("prefill", 3),
            patch_scale("prefill", 3, 2),
            read_scale("decode", 2),
            patch_scale("decode", 2, 3),
            # the prefill pod ends, the controller has not seen the other one yet, it starts, it is ready
            read_deployment("prefill", 2, replicas=3),
            read_deployment("prefill", 2),
            read_deployment("decode", 3, observedGeneration=3, replicas=2, readyReplicas=2),
            read_deployment("decode", 3, readyReplicas=2),
            read_deployment("decode", 3),
            GONE,
        ]
        async with playing(tmp_path, calls, **TWO) as (actuator, fleet, tape):
            memo = await actuator.prepare(a_move())
            assert memo == MEMO
            move = a_move(**memo)
            await actuator.switch(move, "decode")
            seen = asyncio.create_task(actuator.verify(move, "decode"))
            await until(lambda: not tape.calls, "everything was looked at")
            assert not seen.done(), "no worker has come yet"
            spec = fleet.workers["other"].spec.model_copy(update={"name": "new", "url": "http://n:1"})
            fleet.add(spec, "kubernetes").came_up(0.0)
            await seen
            actuator.relabel(move, "decode")
            assert sorted(fleet.workers) == ["new", "other"]
            tape.played()

    run(work)


def test_two_deployments_go_back(tmp_path: Path) -> None:
    """After a kill in the middle one has its new size, the other one not: both get what they had."""

    async def work() -> None:
        calls = [
            read_scale("prefill", 2),
            read_scale("decode", 2),
            # back: nothing to do for decode; the pod is there still
            read_scale("decode", 2),
            read_scale("prefill", 2),
            patch_scale("prefill", 2, 3),
            read_pod(),
            mark(None),
            read_deployment("prefill", 3),
            read_deployment("decode", 2),
            read_pod(),
        ]
        async with playing(tmp_path, calls, **TWO) as (actuator, fleet, tape):
            move = a_move(**MEMO)
            assert await actuator.role_of(move) is None, "neither the one nor the other"
            await actuator.switch(move, "prefill")
            await actuator.verify(move, "prefill")
            assert POD in fleet.workers
            tape.played()

    run(work)


def test_sizes_say_how_far_a_move_came(tmp_path: Path) -> None:
    async def work() -> None:
        calls = [
            *(read_scale("prefill", 2), read_scale("decode", 3)),
            *(read_scale("prefill", 3), read_scale("decode", 2)),
            *(read_scale("prefill", 5), read_scale("decode", 3)),
        ]
        async with playing(tmp_path, calls, **TWO) as (actuator, _, tape):
            found = [await actuator.role_of(a_move(**MEMO)) for _ in range(3)]
            assert found == ["decode", "prefill", None]
            tape.played()

    run(work)


def test_who_else_scales_is_noticed(tmp_path: Path) -> None:
    async def work() -> None:
        conflict = patch_scale("decode", 2, 3)
        conflict.answer, conflict.status = RECORDED["invalid"], 422
        for calls, text in (
            ([mark("-1000"), read_scale("prefill", 7)], "has 7 replicas, expected 3"),
            ([mark("-1000"), read_scale("prefill", 2), read_scale("decode", 2), conflict], "status 422"),
        ):
            async with playing(tmp_path, calls, **TWO) as (actuator, _, tape):
                with pytest.raises(StepFailed, match=text):
                    await actuator.switch(a_move(**MEMO), "decode")
                tape.played()

    run(work)


def test_the_last_replica_stays(tmp_path: Path) -> None:
    async def work() -> None:
        calls = [read_scale("prefill", 1), read_scale("decode", 2)]
        async with playing(tmp_path, calls, **TWO) as (actuator, fleet, tape):
            with pytest.raises(StepFailed, match="has 1 replicas; at least 1 must stay"):
                await actuator.prepare(a_move())
            assert "no Deployment" in str(actuator.refusal(fleet.workers[POD], "both"))
            assert actuator.refusal(fleet.workers[POD], "decode") is None
            tape.played()

    run(work)


def test_pods_that_never_get_ready_end_at_the_deadline(tmp_path: Path) -> None:
    async def work() -> None:
        calls = [read_deployment("prefill", 2, readyReplicas=1)] * 1000
        async with playing(tmp_path, calls, **TWO) as (actuator, _, _tape):
            with pytest.raises(StepFailed, match="waited after"):
                await within(0.3, actuator.verify(a_move(**MEMO), "decode"), "not_verified", lambda: "waited")

    run(work)


# ------------------------------------------------------------------------------------------------ whole routers


@contextlib.asynccontextmanager
async def clustered(
    folder: Path, way: dict[str, Any], spare: int = 0
) -> AsyncIterator[tuple[Router, Cluster]]:
    """A router whose workers are the ready pods of a small cluster."""
    names = [("p-1", "prefill"), ("p-2", "prefill"), ("d-1", "decode"), ("d-2", "decode")]
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeWorker(FakeSpec(name=f"w{k}")) for k in range(len(names) + spare)]
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.close)
        cluster = Cluster([(n, r, f.port) for (n, r), f in zip(names, fakes, strict=False)])
        cluster.spare = [(f"new-{k}", f.port) for k, f in enumerate(fakes[len(names) :])]
        await stack.enter_async_context(listening(cluster))
        actuator = settings(cluster, folder, **way)
        shared = {k: actuator[k] for k in ("api_url", "namespace", "token_file", "ca_file")}
        services = [{"service": f"vllm-{r}", "cluster": "pd0", "role": r} for r in ("prefill", "decode")]
        raw = {
            "backend": "vllm_nixl",
            "listen": {"port": 0},
            "discovery": {"kubernetes": {**shared, "services": services, "poll_s": 0.05}},
            "moves": {"actuator": actuator, "state_file": str(folder / "moves.json"), "verify_s": 5.0},
            "health": {**FAST_HEALTH, "canary": False},
            "decision": {"never_remote": True},
        }
        router = Router(Resolved(RouterConfig.model_validate(raw)))
        await router.start()
        stack.push_async_callback(router.close)
        await until(
            lambda: (
                len(list(router.forwarder.fleet)) == 4
                and all(w.state == "up" for w in router.forwarder.fleet)
            ),
            "all pods are workers",
        )
        yield router, cluster


def roles(router: Router) -> dict[str, str]:
    """Of all workers."""
    return {w.name: w.role for w in router.forwarder.fleet}


def test_pods_move_by_label_and_discovery_follows(tmp_path: Path) -> None:
    """The listing of a pod changes with its label: its worker stays the same one, in the middle of the move too."""

    async def work() -> None:
        async with clustered(tmp_path, {"label": {}}) as (router, cluster):
            fleet = router.forwarder.fleet
            before = fleet.workers["p-1"]
            await router.mover.change_role(before, "decode", 5.0)
            assert cluster.patches == [("/api/v1/namespaces/llm/pods/p-1", LABEL_PATH, "decode")]
            await until(lambda: before.spec.role == "decode", "discovery says so too")
            await asyncio.sleep(0.2)
            assert fleet.workers["p-1"] is before
            assert roles(router) == {"p-1": "decode", "p-2": "prefill", "d-1": "decode", "d-2": "decode"}
            with pytest.raises(ClientError, match="last usable"):
                await router.mover.change_role(fleet.workers["p-2"], "decode", 5.0)
            # somebody changes a label by hand: discovery takes the pod in anew, in its new role
            cluster.pods["d-2"]["metadata"]["labels"]["llm-d.ai/role"] = "prefill"
            await until(lambda: roles(router).get("d-2") == "prefill", "it is noticed")

    run(work)


def test_pods_are_replaced_by_scaling(tmp_path: Path) -> None:
    async def work() -> None:
        async with clustered(tmp_path, TWO, spare=2) as (router, cluster):
            fleet = router.forwarder.fleet
            await router.mover.change_role(fleet.workers["p-1"], "decode", 5.0)
            assert cluster.sizes == {"prefill": 1, "decode": 3}
            assert "p-1" not in cluster.pods, "the drained pod went, not the other one"
            expected = {"p-2": "prefill", "d-1": "decode", "d-2": "decode", "new-0": "decode"}
            assert roles(router) == expected
            assert fleet.state.move is None
            with pytest.raises(ClientError, match="last usable"):
                await router.mover.change_role(fleet.workers["p-2"], "decode", 5.0)
            await router.mover.change_role(fleet.workers["d-2"], "prefill", 5.0)
            assert cluster.sizes == {"prefill": 2, "decode": 2}
            assert roles(router) == {
                "p-2": "prefill",
                "d-1": "decode",
                "new-0": "decode",
                "new-1": "prefill",
            }

    run(work)


def test_a_new_pod_that_does_not_start_gives_both_their_size_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with clustered(tmp_path, TWO, spare=0) as (router, cluster):
            fleet = router.forwarder.fleet
            router.mover._s = router.mover._s.model_copy(update={"verify_s": 0.5})
            cluster.spare = []  # no node has room
            task = asyncio.create_task(router.mover.change_role(fleet.workers["p-1"], "decode", 5.0))
            await until(lambda: cluster.sizes == {"prefill": 1, "decode": 3}, "scaled")
            await until(lambda: fleet.state.move and fleet.state.move.step == "rollback", "given up")
            cluster.spare = [("p-3", cluster.ports["p-1"])]  # the prefill Deployment starts another pod
            with pytest.raises(ClientError, match="it has its old role again"):
                await task
            assert cluster.sizes == {"prefill": 2, "decode": 2}
            await until(lambda: "p-3" in roles(router), "discovery finds it")
            await until(lambda: "p-1" not in roles(router), "and misses the old one")
            assert router.mover.alarms == {}

    run(work)


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prfaas_serving.moves.making import make_actuator

    original = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "prfaas_serving.moves.kubernetes":
            raise ModuleNotFoundError("No module named 'kubernetes'", name="kubernetes")
        return original(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    wanted = KubernetesActuator.model_validate({"kind": "kubernetes", "label": {}})
    with pytest.raises(PrfaasError, match=r"pip install 'prfaas-env\[serving,kubernetes\]'"):
        make_actuator(wanted, Site(None, None, None))  # type: ignore[arg-type]
