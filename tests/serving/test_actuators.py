"""What each actuator asks of its workers, and whole routers that use it. Kubernetes has a file of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prfaas_env.base import PrfaasError
from prfaas_serving.app import Router
from prfaas_serving.config import HttpActuator, Resolved, RouterConfig, SglangActuator
from prfaas_serving.fake.spec import Fault
from prfaas_serving.fleet import Fleet
from prfaas_serving.moves.base import Site, StepFailed
from prfaas_serving.moves.http import Http
from prfaas_serving.moves.sglang import Sglang
from prfaas_serving.moves.state import OpenMove
from tests.serving.support import SHORT, completion, expected_text, run, serving, until

PAIRS = (
    ("r1", "prfaas0", "prefill"),
    ("l1", "pd0", "prefill"),
    ("l2", "pd0", "prefill"),
    ("d1", "pd0", "decode"),
    ("d2", "pd0", "decode"),
)


class Scripted:
    """A worker that answers what the test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.answers: list[tuple[int, Any]] = []
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The next answer."""
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, body, request.headers.get("Authorization")))
        status, answer = self.answers.pop(0)
        if isinstance(answer, str):
            return web.Response(status=status, text=answer)
        return web.json_response(answer, status=status)


@contextlib.asynccontextmanager
async def scripted(peers: int = 0) -> AsyncIterator[tuple[Site, list[Scripted]]]:
    """A prefill worker l1 and decode workers d1..., each scripted; nobody generates."""
    workers = [Scripted() for _ in range(1 + peers)]
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            runner = web.ServerRunner(web.Server(worker.handle))
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            worker.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        names = ["l1", *(f"d{k}" for k in range(1, peers + 1))]
        entries = [
            {"name": n, "url": w.url, "cluster": "pd0", "role": "decode" if n != "l1" else "prefill"}
            for n, w in zip(names, workers, strict=True)
        ]
        config = RouterConfig.model_validate({"backend": "sglang", "workers": entries})
        fleet = Fleet(config, "pd0", ("prfaas0",))
        for spec in config.workers:
            fleet.add(spec, "config").api_key = "key-of-workers"
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(fleet, session, None), workers


def a_move(worker: Scripted, from_role: str = "prefill", to_role: str = "decode") -> OpenMove:
    """A move of l1."""
    return OpenMove.model_validate(
        {
            "worker": "l1",
            "url": worker.url,
            "cluster": "pd0",
            "from_role": from_role,
            "to_role": to_role,
            "by": "policy",
            "kind": "x",
        }
    )


def info(role: str, graphs: list[int] | None = None, memory_gb: float = 0.0) -> dict[str, Any]:
    """An answer of SGLang's /server_info, cut down to what is read."""
    state = {
        "disaggregation_mode": role,
        "decode_cuda_graph_bs": graphs or [],
        "decode_cuda_graph_memory_gb": memory_gb,
    }
    return {"disaggregation_mode": "prefill", "enable_pd_role_switch": True, "internal_states": [state]}


def switched(old: str, new: str) -> dict[str, Any]:
    """SGLang's answer to a switch that worked."""
    return {"success": True, "message": "ok", "old_role": old, "new_role": new, "safe_to_restore": False}


# ------------------------------------------------------------------------------------------------ sglang


def test_sglang_takes_the_graphs_of_a_decode_server() -> None:
    """The first switch to decode is told what a decode server says about its graphs; the answer decides."""

    async def work() -> None:
        async with scripted(peers=2) as (site, (l1, d1, d2)):
            actuator = Sglang(site, SglangActuator(kind="sglang"))
            l1.answers = [(200, info("prefill")), (200, switched("prefill", "decode"))]
            d1.answers = [(503, "starting")]
            d2.answers = [(200, info("decode", [1, 2, 4], 1.25))]
            await actuator.switch(a_move(l1), "decode")
            body = {
                "new_role": "decode",
                "decode_cuda_graph_bs": [1, 2, 4],
                "decode_cuda_graph_memory_gb": 1.25,
            }
            assert l1.asked == [
                ("GET", "/server_info", None, "Bearer key-of-workers"),
                ("POST", "/pd_role_switch", body, "Bearer key-of-workers"),
            ]
            # one that has captured its graphs needs nothing, nor does a switch to prefill
            l1.asked.clear()
            l1.answers = [(200, info("prefill", [1])), (200, switched("prefill", "decode"))]
            l1.answers += [(200, switched("decode", "prefill"))]
            await actuator.switch(a_move(l1), "decode")
            await actuator.switch(a_move(l1), "prefill")
            assert [asked[2] for asked in l1.asked] == [
                None,
                {"new_role": "decode"},
                {"new_role": "prefill"},
            ]

    run(work)


def test_sglang_graphs_of_the_configuration_come_first() -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            settings = SglangActuator(
                kind="sglang", decode_cuda_graph_memory_gb=4.0, decode_cuda_graph_bs=(8, 16)
            )
            l1.answers = [(200, switched("prefill", "decode"))]
            await Sglang(site, settings).switch(a_move(l1), "decode")
            assert l1.asked[0][2] == {
                "new_role": "decode",
                "decode_cuda_graph_bs": [8, 16],
                "decode_cuda_graph_memory_gb": 4.0,
            }

    run(work)


@pytest.mark.parametrize(
    ("status", "answer", "safe", "busy"),
    [
        (
            400,
            {
                "success": False,
                "message": "instance is not idle; drain all requests before switching",
                "safe_to_restore": True,
            },
            True,
            True,
        ),
        (
            400,
            {
                "success": False,
                "message": "another role switch is already in progress",
                "safe_to_restore": False,
            },
            True,
            True,
        ),
        (
            400,
            {
                "success": False,
                "message": "--enable-pd-role-switch is not set on this instance",
                "safe_to_restore": True,
            },
            True,
            False,
        ),
        (
            400,
            {
                "success": False,
                "message": "role switch failed; instance unhealthy, restart required: x",
                "safe_to_restore": False,
            },
            False,
            False,
        ),
        (400, {"success": False, "message": "an older server"}, True, False),
        (404, {"detail": "Not Found"}, True, False),
        (200, "no JSON", True, False),
        (200, {"success": False}, True, False),
    ],
)
def test_what_sglangs_refusals_mean(status: int, answer: Any, safe: bool, busy: bool) -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            l1.answers = [(status, answer)]
            with pytest.raises(StepFailed) as caught:
                await Sglang(site, SglangActuator(kind="sglang")).switch(
                    a_move(l1, "decode", "prefill"), "prefill"
                )
            assert (caught.value.safe, caught.value.busy) == (safe, busy)
            if isinstance(answer, dict) and "message" in answer:
                assert answer["message"] in str(caught.value)

    run(work)


def test_sglang_is_verified_by_its_own_words_and_a_switch_to_where_it_is() -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            actuator = Sglang(site, SglangActuator(kind="sglang"))
            already = {**switched("decode", "decode"), "message": "already in target role"}
            l1.answers = [(200, info("decode")), (200, already), (200, info("decode"))]
            await actuator.verify(a_move(l1), "decode")
            assert [asked[:3] for asked in l1.asked] == [
                ("GET", "/server_info", None),
                ("POST", "/pd_role_switch", {"new_role": "decode"}),
                ("GET", "/server_info", None),
            ]
            broken = {
                "success": False,
                "message": "instance is unhealthy after a failed role switch",
                "safe_to_restore": False,
            }
            l1.answers = [(200, info("decode")), (400, broken)]
            with pytest.raises(StepFailed, match="unhealthy") as caught:
                await actuator.verify(a_move(l1), "decode")
            assert not caught.value.safe

    run(work)


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"disaggregation_mode": "decode"}),
        (200, {"internal_states": []}),
        (200, {"internal_states": [{"disaggregation_mode": "null"}]}),
        (
            200,
            {"internal_states": [{"disaggregation_mode": "decode"}, {"disaggregation_mode": "prefill"}]},
        ),
        (500, {"internal_states": [{"disaggregation_mode": "decode"}]}),
        (200, "[]"),
    ],
)
def test_server_info_that_tells_no_role(answer: tuple[int, Any]) -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            l1.answers = [answer]
            with pytest.raises(StepFailed, match="internal_states"):
                await Sglang(site, SglangActuator(kind="sglang")).role_of(a_move(l1))

    run(work)


def test_sglang_servers_move_and_one_that_breaks_is_out(tmp_path: Path) -> None:
    """A whole router: the first switch captures graphs; a switch that breaks a server takes it out until it is well."""

    async def work() -> None:
        moves = {"state_file": str(tmp_path / "moves.json"), "retry_s": 0.2}
        async with serving("sglang", PAIRS, moves=moves) as s:
            reply = await s.admin("POST", "/workers/l1/role", {"role": "decode"})
            assert (reply.status, reply.json["role"]) == (200, "decode")
            assert s.workers["l1"].graphs == [1, 2, 4]
            assert [x.leg for x in s.workers["l1"].seen] == ["decode"], "the generation that verified it"
            reply = await s.admin("POST", "/workers/l1/role", {"role": "both"})
            assert (reply.status, reply.json["error"]["code"]) == (409, "role_refused")
            s.workers["d1"].faults.append(Fault("switch_refused"))
            reply = await s.admin("POST", "/workers/d1/role", {"role": "prefill"})
            assert (reply.status, reply.json["error"]["code"]) == (502, "not_switched")
            assert "it has its old role again" in reply.json["error"]["message"]
            assert s.worker("d1").usable(asyncio.get_running_loop().time())
            s.workers["d1"].faults.append(Fault("switch_refused", value=1.0))
            reply = await s.admin("POST", "/workers/d1/role", {"role": "prefill"})
            assert "it was taken out" in reply.json["error"]["message"]
            state = (await s.admin("GET", "/state")).json
            assert {w["name"]: w["state"] for w in state["workers"]}["d1"] == "out"
            assert "restart required" in state["moves"]["alarms"]["d1"]
            assert s.metric("alarm", alarm="worker_out", level="critical") == 1.0
            for k in range(6):
                assert (await s.complete(f"{SHORT} {k}")).status == 200
            assert s.workers["d1"].broken
            s.workers["d1"].broken = False  # restarted
            await until(lambda: "d1" not in s.router.mover.alarms, "it serves again")
            assert s.metric("alarm", alarm="worker_out", level="critical") == 0.0
            await s.settled()

    run(work)


def test_an_sglang_server_that_was_restarted_is_what_it_says() -> None:
    async def work() -> None:
        async with serving("sglang", PAIRS) as s:
            await s.admin("POST", "/workers/l1/role", {"role": "decode"})
            s.workers["l1"].faults.append(Fault("unhealthy", count=None))
            await until(lambda: s.worker("l1").state == "down", "it is down")
            s.workers["l1"].role = "prefill"
            s.workers["l1"].faults.clear()
            await until(lambda: s.worker("l1").state == "up", "it is up")
            assert s.worker("l1").role == "prefill"
            assert s.worker("l1") in s.router.forwarder.fleet.local_prefill.workers

    run(work)


# ------------------------------------------------------------------------------------------------ http


def test_http_asks_and_is_told() -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            actuator = Http(site, HttpActuator(kind="http"))
            l1.answers = [(200, {"role": "decode"}), (200, {"role": "prefill"}), (200, {"role": "decode"})]
            await actuator.switch(a_move(l1), "decode")
            await actuator.verify(a_move(l1), "decode")
            assert [asked[:3] for asked in l1.asked] == [
                ("POST", "/role", {"role": "decode"}),
                ("GET", "/role", None),
                ("GET", "/role", None),
            ]
            assert {asked[3] for asked in l1.asked} == {"Bearer key-of-workers"}
            l1.asked.clear()
            l1.answers = [(204, "")]
            await Http(site, HttpActuator(kind="http", path="/v2/role")).switch(a_move(l1), "both")
            assert l1.asked[0][:3] == ("POST", "/v2/role", {"role": "both"})

    run(work)


@pytest.mark.parametrize(
    ("status", "answer", "text", "busy"),
    [
        (409, {"error": {"message": "2 requests are running"}}, "2 requests are running", True),
        (503, "later", "no reason given", True),
        (400, {"error": "unknown role"}, "unknown role", False),
        (500, {"message": "out of memory"}, "out of memory", False),
    ],
)
def test_what_http_refusals_mean(status: int, answer: Any, text: str, busy: bool) -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            l1.answers = [(status, answer)]
            with pytest.raises(StepFailed, match=text) as caught:
                await Http(site, HttpActuator(kind="http")).switch(a_move(l1), "decode")
            assert (caught.value.safe, caught.value.busy) == (True, busy)

    run(work)


@pytest.mark.parametrize("answer", [(200, {"role": "cook"}), (404, {"role": "decode"}), (200, "decode")])
def test_http_answers_that_tell_no_role(answer: tuple[int, Any]) -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            l1.answers = [answer]
            with pytest.raises(StepFailed, match="does not tell its role"):
                await Http(site, HttpActuator(kind="http")).role_of(a_move(l1))

    run(work)


def test_nobody_there_is_a_failed_step() -> None:
    async def work() -> None:
        async with scripted() as (site, (l1,)):
            move = a_move(l1).model_copy(update={"url": "http://127.0.0.1:9"})
            for call in (
                Http(site, HttpActuator(kind="http")).switch(move, "decode"),
                Sglang(site, SglangActuator(kind="sglang")).role_of(move),
            ):
                with pytest.raises(StepFailed, match="'l1' cannot be reached"):
                    await call

    run(work)


# ------------------------------------------------------------------------------------------------ relabel, and all


def test_relabel_generates_in_the_new_role_before_traffic_comes() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", PAIRS) as s:
            for name, role in (("l1", "decode"), ("l1", "prefill"), ("d1", "prefill")):
                s.workers[name].seen.clear()
                reply = await s.admin("POST", f"/workers/{name}/role", {"role": role})
                assert reply.status == 200
                assert [x.leg for x in s.workers[name].seen] == [role]
            await s.settled()

    run(work)


def test_a_worker_that_does_not_decode_stays_a_prefill_worker() -> None:
    async def work() -> None:
        async with serving("vllm_nixl", PAIRS) as s:
            s.workers["l1"].faults.append(Fault("status", "decode", count=None, value=500))
            reply = await s.admin("POST", "/workers/l1/role", {"role": "decode"})
            assert (reply.status, reply.json["error"]["code"]) == (409, "not_verified")
            assert "does not generate as decode" in reply.json["error"]["message"]
            assert "127.0.0.1" not in reply.json["error"]["message"]
            assert s.worker("l1").role == "prefill"
            assert not s.worker("l1").holds
            body = completion(SHORT, 5)
            assert (await s.post("/v1/completions", body)).text == expected_text(body, 5)
            await s.settled()

    run(work)


def test_roles_as_moved_and_an_unfinished_move_survive_a_restart(tmp_path: Path) -> None:
    """The same workers, one router after the other; the second one finds the first one's file."""

    async def work() -> None:
        moves = {"state_file": str(tmp_path / "moves.json")}
        async with serving("vllm_nixl", PAIRS, moves=moves) as s:
            assert (await s.admin("POST", "/workers/l1/role", {"role": "decode"})).status == 200
            spec = s.worker("d1").spec
            s.router.forwarder.fleet.state.open(
                OpenMove(
                    worker="d1",
                    url=spec.url,
                    cluster="pd0",
                    from_role="decode",
                    to_role="prefill",
                    by="policy",
                    kind="relabel",
                    step="verify",
                )
            )
            second = Router(s.router.resolved)
            await second.start()
            try:
                fleet = second.forwarder.fleet
                assert fleet.workers["l1"].role == "decode"
                assert fleet.workers["l1"] in fleet.decode.workers
                await until(lambda: not fleet.changes.under_way, "the unfinished move is settled")
                assert fleet.changes.past[-1].outcome == "rolled_back"
                assert (fleet.workers["d1"].role, fleet.workers["d1"].holds) == ("decode", set())
                assert fleet.state.move is None
            finally:
                await second.close()

    run(work)


@pytest.mark.parametrize(
    ("moves", "named"),
    [
        ({"actuator": {"kind": "magic"}}, "magic"),
        ({"actuator": {}}, "actuator"),
        ({"actuator": {"kind": "relabel", "path": "/role"}}, "path"),
        ({"actuator": {"kind": "relabel"}, "generate": False}, "without any check"),
        ({"generate": False}, "without any check"),
        ({"actuator": {"kind": "http", "path": "role"}}, "path"),
        ({"actuator": {"kind": "sglang", "decode_cuda_graph_memory_gb": -1}}, "decode_cuda_graph_memory_gb"),
        ({"actuator": {"kind": "kubernetes"}}, "exactly one of label and scale"),
        (
            {"actuator": {"kind": "kubernetes", "label": {}, "scale": {"prefill": "p", "decode": "d"}}},
            "one of",
        ),
        ({"actuator": {"kind": "kubernetes", "label": {"key": "a b"}}}, "key"),
        (
            {"actuator": {"kind": "kubernetes", "scale": {"prefill": "p", "decode": "d"}}},
            "needs discovery.kubernetes",
        ),
        ({"verify_s": 0}, "verify_s"),
        ({"kind": "http"}, "kind"),
    ],
)
def test_settings_that_make_no_sense(moves: dict[str, Any], named: str) -> None:
    worker = {"name": "d", "url": "http://h:1", "cluster": "pd0", "role": "decode"}
    with pytest.raises(ValueError, match=named):
        RouterConfig.model_validate({"backend": "vllm_nixl", "workers": [worker], "moves": moves})


def test_the_actuator_follows_the_backend() -> None:
    worker = {"name": "d", "url": "http://h:1", "cluster": "pd0", "role": "decode"}
    for backend, kind in (("vllm_nixl", "relabel"), ("sglang", "sglang"), ("echo", "relabel")):
        config = RouterConfig.model_validate({"backend": backend, "workers": [worker]})
        assert config.actuator.kind == kind
        assert ("node moves", f"{kind}, roles as moved are not kept over a restart") in Resolved(
            config
        ).modes()


def test_a_router_does_not_start_with_a_damaged_state_file(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "moves.json"
        file.write_text("{}")
        worker = {"name": "d", "url": "http://127.0.0.1:1", "cluster": "pd0", "role": "decode"}
        config = RouterConfig.model_validate(
            {
                "backend": "vllm_nixl",
                "workers": [worker],
                "listen": {"port": 0},
                "moves": {"state_file": str(file)},
            }
        )
        with pytest.raises(PrfaasError, match=r"moves\.json: pd"):
            await Router(Resolved(config)).start()

    run(work)
