"""TLS on both sides."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web

from prfaas_env.base import PrfaasError
from prfaas_serving.app import Router
from prfaas_serving.config import Resolved, RouterConfig
from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker, _request
from tests.serving.support import completion, expected_text, run, serving, until


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def files(authority: trustme.CA, folder: Path) -> dict[str, str]:
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return {n: str(folder / f"{n}.pem") for n in ("cert", "key", "ca")}


def test_clients_over_https(authority: trustme.CA, tmp_path: Path) -> None:
    f = files(authority, tmp_path)

    async def work() -> None:
        listen = {"port": 0, "tls": {"cert_file": f["cert"], "key_file": f["key"]}}
        async with serving(listen=listen) as s:
            context = ssl.create_default_context(cafile=f["ca"])
            url = f"https://127.0.0.1:{s.router.port}/v1/completions"
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                body = completion("hello", 3)
                async with session.post(url, json=body) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["choices"][0]["text"] == expected_text(body, 3)
            with pytest.raises(aiohttp.ClientError):
                async with s.session.get(url):
                    pass

    run(work)


def test_clients_must_show_a_certificate(authority: trustme.CA, tmp_path: Path) -> None:
    f = files(authority, tmp_path)

    async def work() -> None:
        tls = {"cert_file": f["cert"], "key_file": f["key"], "client_ca_file": f["ca"]}
        async with serving(listen={"port": 0, "tls": tls}) as s:
            url = f"https://127.0.0.1:{s.router.port}/health"
            context = ssl.create_default_context(cafile=f["ca"])
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                async with s.session.get(url, ssl=context) as answer:
                    await answer.read()
            context.load_cert_chain(f["cert"], f["key"])
            async with s.session.get(url, ssl=context) as answer:
                assert answer.status == 200

    run(work)


@pytest.mark.parametrize("trusted", [True, False])
def test_workers_over_https(authority: trustme.CA, tmp_path: Path, trusted: bool) -> None:
    f = files(authority, tmp_path)

    async def work() -> None:
        fake = FakeWorker(FakeSpec(name="d1", role="both"))
        runner = web.ServerRunner(web.Server(fake._handle, request_factory=_request))
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(f["cert"], f["key"])
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr,attr-defined]
        config = RouterConfig.model_validate(
            {
                "backend": "vllm_nixl",
                "listen": {"port": 0},
                "workers": [
                    {"name": "d1", "url": f"https://127.0.0.1:{port}", "cluster": "pd0", "role": "both"}
                ],
                "decision": {"threshold_tokens": 5},
                "upstream": {"ca_file": f["ca"]} if trusted else {},
                "health": {"canary": False, "probe_s": 0.05},
            }
        )
        router = Router(Resolved(config))
        await router.start()
        try:
            worker = router.forwarder.fleet.workers["d1"]
            if not trusted:
                await until(lambda: worker.failed_probes >= 2, "the certificate is not trusted")
                assert worker.state == "probation"
                return
            await until(lambda: worker.state == "up", "the worker is up")
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{router.port}/v1/completions"
                async with session.post(url, json=completion("hello", 3)) as answer:
                    assert answer.status == 200
        finally:
            await router.close()
            await runner.cleanup()
            await fake.close()

    run(work)


def test_missing_files_are_named(tmp_path: Path) -> None:
    def config(**change: object) -> Resolved:
        workers = [{"name": "d", "url": "http://h:1", "cluster": "pd0", "role": "both"}]
        raw = {"backend": "vllm_nixl", "workers": workers, "decision": {"threshold_tokens": 5}, **change}
        return Resolved(RouterConfig.model_validate(raw))

    tls = {"cert_file": str(tmp_path / "none"), "key_file": str(tmp_path / "none")}
    with pytest.raises(PrfaasError, match=r"listen\.tls"):
        Router(config(listen={"tls": tls}))

    async def work() -> None:
        router = Router(config(upstream={"ca_file": str(tmp_path / "none")}, listen={"port": 0}))
        with pytest.raises(PrfaasError, match="upstream: ca_file"):
            await router.start()

    run(work)
