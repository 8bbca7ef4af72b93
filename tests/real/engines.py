"""Real vLLM workers as processes: start, watch, freeze, kill. Each one leads a process group of its own.

A group is killed by `close`, at the exit of this process, and by a small watcher if this process itself is killed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from prfaas_serving.backends.engines import VLLM_METRICS, prometheus_values

#: The engine's environment and where models and logs go; `make test-vllm` sets both.
ENVIRONMENT = Path(os.environ.get("PRFAAS_VLLM_ENV", ".envs/vllm")).absolute()
FOLDER = Path(os.environ.get("PRFAAS_VLLM_FOLDER", "runs/vllm")).absolute()
MODEL = "tiny"
MAX_MODEL_TOKENS = 16_384
#: On a very busy machine all limits of the tests can be made longer; deadlines of the router stay as they are.
PATIENCE = float(os.environ.get("PRFAAS_PATIENCE", "1"))
#: A machine of two cores with other work needs up to two minutes for three workers.
START_S = 300.0 * PATIENCE
#: Longest lease of staged KV: nothing that is seen to be free well before it was freed by the lease.
LEASE_S = 60
#: Threads of the hand-over; each one polls, which costs cores that are not there.
THREADS = 0

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    # without it the first request with logprobs compiles C++ for minutes
    "TORCHDYNAMO_DISABLE": "1",
    "UCX_TLS": "tcp",
    # calls that empty the prefix cache
    "VLLM_SERVER_DEV_MODE": "1",
}
#: Kills a process group once the process that started it is gone.
_WATCHER = 'while kill -0 "$0" 2>/dev/null; do sleep 1; done; kill -9 "-$1" 2>/dev/null'
_METRICS = VLLM_METRICS | {
    "vllm:nixl_bytes_transferred_count",
    "vllm:nixl_xfer_time_seconds_sum",
    "vllm:nixl_xfer_time_seconds_count",
    "vllm:request_success_total",
}


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass
class Engine:
    """One vLLM server.

    Args:
        name: of the worker.
        model: folder of the model.
        role: prefill or decode.
        host: address it listens on, for requests and for the hand-over.
        device: network device of the hand-over; none = any.
        namespace: network namespace it runs in; none = this one.
        dtype: of the weights.
        arguments: more arguments.
        settings: more environment variables.
    """

    name: str
    model: Path
    role: str
    host: str = "127.0.0.1"
    device: str | None = None
    namespace: str | None = None
    dtype: str = "float32"
    arguments: Sequence[str] = ()
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    watcher: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @property
    def url(self) -> str:
        """Address of its API."""
        return f"http://{self.host}:{self.port}"

    def start(self, port: int | None = None) -> None:
        """Start it, at a free port if none is given; `ready` tells when it is up."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if port is None else port
        self.log = FOLDER / f"{self.name}.log"
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S, "num_threads": THREADS},
        }
        settings = {
            **os.environ,
            **_SETTINGS,
            "VLLM_HOST_IP": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            **({} if self.device is None else {"UCX_NET_DEVICES": self.device}),
            **self.settings,
        }
        for name in ("PYTHONPATH", "PYTHONHASHSEED"):
            settings.pop(name, None)
        command = [
            *([] if self.namespace is None else ["ip", "netns", "exec", self.namespace]),
            *(str(ENVIRONMENT / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", MODEL),
            *("--host", self.host, "--port", str(self.port), "--dtype", self.dtype),
            *("--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", "8", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(128 * 2**20), "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(transfer)),
            *self.arguments,
        ]
        self._launch(command, settings)

    def _launch(self, command: Sequence[str], settings: dict[str, str]) -> None:
        assert self.log is not None
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=settings, start_new_session=True
            )
        atexit.register(self.close)
        self._end_watcher()
        self.watcher = subprocess.Popen(
            ["sh", "-c", _WATCHER, str(os.getpid()), str(self.process.pid)], start_new_session=True
        )

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def close(self) -> None:
        """Kill it if it runs; safe to call again."""
        if self.process is not None:
            self.kill()
            self.process = None
            self._end_watcher()
            atexit.unregister(self.close)

    def _end_watcher(self) -> None:
        if self.watcher is not None:
            self.watcher.kill()
            self.watcher.wait()
            self.watcher = None

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until it answers; RuntimeError with the end of its log if it does not."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                async with session.get(
                    self.url + "/health", timeout=aiohttp.ClientTimeout(total=2)
                ) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.25)
        raise RuntimeError(f"worker {self.name} did not start:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        if self.log is None:
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    # ------------------------------------------------------------------ asking it

    async def post(self, session: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
        """(status, parsed answer) of a direct request, past the router."""
        async with session.post(
            self.url + path, data=orjson.dumps(body), headers={"Content-Type": "application/json"}
        ) as answer:
            return answer.status, orjson.loads(await answer.read())

    async def figures(self, session: aiohttp.ClientSession) -> Figures:
        """Its counters now."""
        async with session.get(self.url + "/metrics") as answer:
            return Figures(prometheus_values((await answer.read()).decode(), _METRICS))


@dataclass(frozen=True)
class Figures:
    """Counters of a worker, by the names that the router reads them by."""

    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values.get(f"vllm:{name}", 0.0)

    def since(self, before: Figures) -> Figures:
        """What was counted since."""
        return Figures({name: value - before.values.get(name, 0.0) for name, value in self.values.items()})

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens it prefilled itself."""
        return self["prompt_tokens_by_source_total{local_compute}"]

    @property
    def cached_tokens(self) -> float:
        """Prompt tokens it had in its prefix cache."""
        return self["prompt_tokens_by_source_total{local_cache_hit}"]

    @property
    def fetched_tokens(self) -> float:
        """Prompt tokens whose KV came from another worker."""
        return self["prompt_tokens_by_source_total{external_kv_transfer}"]

    @property
    def fetched_bytes(self) -> float:
        """Bytes of KV that came from other workers."""
        return self["nixl_bytes_transferred_sum"]

    @property
    def transfer_s(self) -> float:
        """Time that transfers took, added up."""
        return self["nixl_xfer_time_seconds_sum"]

    @property
    def kv_use(self) -> float:
        """Share of its KV room in use (a gauge: of no use in a difference)."""
        return self["kv_cache_usage_perc"]

    @property
    def busy(self) -> float:
        """Requests running or waiting there."""
        return self["num_requests_running"] + self["num_requests_waiting"]
