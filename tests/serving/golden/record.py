"""Records what published routers send to their workers: `python -m tests.serving.golden.record VENV_SGLANG VENV_VLLM`.

Each VENV is a virtual environment of its own with one router in it (`sglang-router==0.3.2`, `vllm-router==0.1.17`).
The routers are run in front of fake workers; of every request that reaches one, paths, names of headers, and the body
without its prompt are stored, with what is minted anew each time replaced by its type. The tests compare the router of
this project with these files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker, Seen

HERE = Path(__file__).parent
#: Values that are kept as they are: everything else is replaced by the name of its type.
KEPT = {
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "do_remote_decode",
    "do_remote_prefill",
    "temperature",
}
#: Requests by name: (path, body).
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (
        "/v1/completions",
        {"model": "fake", "prompt": "hello there you", "max_tokens": 5, "temperature": 0.5},
    ),
    "completion_stream": (
        "/v1/completions",
        {
            "model": "fake",
            "prompt": "hello there you",
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "chat": (
        "/v1/chat/completions",
        {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
    ),
    "chat_stream": (
        "/v1/chat/completions",
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "max_completion_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
}
HEADERS = {"Authorization": "Bearer key", "X-Request-Id": "golden"}


def shape(value: Any, name: str = "") -> Any:
    """A value without what differs each time."""
    if isinstance(value, dict):
        return {k: shape(v, k) for k, v in sorted(value.items())}
    if name in KEPT or value is None:
        return value
    return type(value).__name__


def seen_shape(seen: Seen) -> dict[str, Any]:
    """What is kept of one request."""
    body = {k: v for k, v in seen.body.items() if k not in {"prompt", "messages"}}
    ours = {"authorization", "x-request-id", "content-type"}
    return {
        "path": seen.path,
        "headers": sorted(name.lower() for name in seen.headers if name.lower() in ours),
        "body": shape(body),
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def record(engine: str, command: list[str]) -> dict[str, Any]:
    """Run a router in front of a prefill and a decode worker and give what they got, by request."""
    prefill = FakeWorker(FakeSpec(name="p", engine=engine, role="prefill"))  # type: ignore[arg-type]
    decode = FakeWorker(FakeSpec(name="d", engine=engine, role="decode"))  # type: ignore[arg-type]
    await prefill.start()
    await decode.start()
    port = free_port()
    filled = [
        part.format(
            prefill=prefill.url, bootstrap=prefill.kv_port, decode=decode.url, port=port, metrics=free_port()
        )
        for part in command
    ]
    router = subprocess.Popen(filled, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = {}
    try:
        async with aiohttp.ClientSession() as session:
            await _wait_for(session, port, router)
            for name, (path, body) in REQUESTS.items():
                prefill.seen.clear()
                decode.seen.clear()
                async with session.post(
                    f"http://127.0.0.1:{port}{path}", json=body, headers=HEADERS
                ) as answer:
                    await answer.read()
                    assert answer.status == 200, (name, answer.status)
                found[name] = {
                    "prefill": [seen_shape(s) for s in prefill.seen],
                    "decode": [seen_shape(s) for s in decode.seen],
                }
    finally:
        router.terminate()
        router.wait(10)
        await prefill.close()
        await decode.close()
    return found


async def _wait_for(session: aiohttp.ClientSession, port: int, router: subprocess.Popen[bytes]) -> None:
    path, body = REQUESTS["completion"]
    for _ in range(300):
        assert router.poll() is None, "the router ended"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=5)
            async with session.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=timeout) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise AssertionError("the router did not become ready")


COMMANDS = {
    "sglang-router": (
        "sglang",
        "{venv}/bin/python -m sglang_router.launch_router --pd-disaggregation --prefill {{prefill}} {{bootstrap}} "
        "--decode {{decode}} --host 127.0.0.1 --port {{port}} --policy round_robin --prometheus-port {{metrics}}",
    ),
    "vllm-router": (
        "vllm",
        "{venv}/bin/vllm-router --vllm-pd-disaggregation --prefill {{prefill}} --decode {{decode}} "
        "--host 127.0.0.1 --port {{port}} --policy round_robin --prometheus-port {{metrics}}",
    ),
}


def main(venvs: list[str]) -> None:
    """Record both and write the files."""
    for (name, (engine, command)), venv in zip(COMMANDS.items(), venvs, strict=True):
        found = asyncio.run(record(engine, command.format(venv=venv).split()))
        (HERE / f"{name}.json").write_text(
            json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
