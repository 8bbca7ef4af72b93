"""Real Dynamo processes: mocker instances and frontends that find each other through files, and their tiny model.

A mocker has Dynamo's scheduler, cache and hand-over with made-up times; its tokens are random ids from 1000 to 1999.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prfaas_serving.backends.dynamo_instances import read_instances
from tests.real.processes import PATIENCE, Group

#: Dynamo's environment and where the model, logs and instance files go; `make test-dynamo` sets both.
ENVIRONMENT = Path(os.environ.get("PRFAAS_DYNAMO_ENV", ".envs/dynamo")).absolute()
FOLDER = Path(os.environ.get("PRFAAS_DYNAMO_FOLDER", "runs/dynamo")).absolute()
START_S = 60.0 * PATIENCE
#: How long a dead instance may stay listed: Dynamo's lease of 10 s, with room for a busy machine.
LEASE_S = 30.0 * PATIENCE
#: Hosts tell near and far prefill instances apart.
NEAR, FAR = "127.0.0.1", "127.0.0.2"
VOCABULARY = 2048
MAX_TOKENS = 16_384
#: Words of the vocabulary begin here; a prompt of ids below it is a prompt of single bytes.
FIRST_WORD = 256

_SETTINGS = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_FILE_KV": str(FOLDER / "instances"),
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_SYSTEM_HOST": NEAR,
    "HF_HUB_OFFLINE": "1",
    # plain text in the logs
    "DYN_LOGGING_JSONL": "0",
    "NO_COLOR": "1",
}
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_model(folder: Path) -> Path:
    """A configuration and a tokenizer, no weights: bytes are tokens, and every other id is a word of its own, so that
    the random tokens of a mocker show as text, one word each."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number}Ġ" for number in range(len(alphabet), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_bytes(orjson.dumps(config))
    return folder


#: Below those that the system gives to outgoing connections, so that nobody takes one before it is bound; and Dynamo
#: 1.6.1 reads the port of its metrics as a signed number of 16 bits.
_PORTS = iter(range(20_000 + os.getpid() % 10_000, 2**15))


def _free_port() -> int:
    """A free port that was not given before."""
    for port in _PORTS:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("", port))
            return port
    raise RuntimeError("no free port below 32768")


@dataclass
class Mocker(Group):
    """One instance.

    Args:
        name: of it here; its id is Dynamo's own and another one after every start.
        model: folder of the model.
        role: prefill or decode.
        host: address it takes requests at.
        speed: of its prefill or decode steps; 1 is Dynamo's default.
    """

    name: str
    model: Path
    role: str
    host: str = NEAR
    speed: float = 1.0
    metrics_port: int = 0

    def start(self) -> None:
        """Start it as a new instance."""
        self.metrics_port = _free_port()
        command = [
            *(str(ENVIRONMENT / "bin" / "python"), "-m", "dynamo.mocker", "--model-path", str(self.model)),
            *("--disaggregation-mode", self.role, "--speedup-ratio", str(self.speed)),
            *("--kv-transfer-bandwidth", "1.0", "--kv-bytes-per-token", "65536"),
            *(("--bootstrap-ports", str(_free_port())) if self.role == "prefill" else ()),
        ]
        settings = {**_SETTINGS, "DYN_TCP_RPC_HOST": self.host, "DYN_SYSTEM_PORT": str(self.metrics_port)}
        self.run(command, settings, FOLDER / f"{self.name}.log")

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Its own counters for the endpoint that requests go to, by name, and its id in hex."""
        async with session.get(f"http://{NEAR}:{self.metrics_port}/metrics") as answer:
            text = (await answer.read()).decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, brace, rest = line.partition("{")
            if brace and 'dynamo_endpoint="generate"' in rest and "le=" not in rest:
                found[name.removeprefix("dynamo_component_")] = float(line.rpartition(" ")[2])
        return found

    async def instance_id(self, session: aiohttp.ClientSession) -> str:
        """Its id in decimal digits, as its own metrics tell it (in hex); waits until it has started.

        Raises:
            RuntimeError: with the end of its log.
        """
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process is not None and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                async with session.get(f"http://{NEAR}:{self.metrics_port}/metrics") as answer:
                    _, found, rest = (await answer.read()).decode().partition('worker_id="')
                    if found:
                        return str(int(rest.partition('"')[0], 16))
            await asyncio.sleep(0.1)
        raise RuntimeError(f"instance {self.name} did not start:\n{self.tail()}")


@dataclass
class Frontend(Group):
    """The HTTP side, with its router.

    Args:
        mode: `direct` or `kv`.
    """

    mode: str
    port: int = 0

    @property
    def url(self) -> str:
        """Address of its API."""
        return f"http://{NEAR}:{self.port}"

    def start(self) -> None:
        """Start it, again at the port that it had; `ready` tells when it is up."""
        self.port = self.port or _free_port()
        command = [
            *(str(ENVIRONMENT / "bin" / "python"), "-m", "dynamo.frontend", "--http-host", NEAR),
            *("--http-port", str(self.port), "--router-mode", self.mode, "--kv-cache-block-size", "64"),
        ]
        self.run(command, {**_SETTINGS, "DYN_TCP_RPC_HOST": NEAR}, FOLDER / f"frontend-{self.mode}.log")

    async def ready(self, session: aiohttp.ClientSession, instances: set[str]) -> None:
        """Wait until it lists these instances and no others, and serves the model.

        Raises:
            RuntimeError: with the end of its log.
        """
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process is not None and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                if set(await self.listed(session)) == instances and await self.models(session):
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the frontend did not start:\n{self.tail()}")

    async def listed(self, session: aiohttp.ClientSession) -> list[str]:
        """Ids of the instances that it lists."""
        async with session.get(self.url + "/health") as answer:
            return [i.instance_id for i in read_instances(orjson.loads(await answer.read())) or ()]

    async def models(self, session: aiohttp.ClientSession) -> list[str]:
        """Names of the models that it serves."""
        async with session.get(self.url + "/v1/models") as answer:
            return [entry["id"] for entry in orjson.loads(await answer.read())["data"]]

    async def post(
        self, session: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """(status, parsed answer) of a direct request, past the router."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with session.post(self.url + path, data=orjson.dumps(body), headers=sent) as answer:
            return answer.status, orjson.loads(await answer.read())


def groups_of_instances() -> list[dict[str, Any]]:
    """How the router tells instances apart: near and far prefill by address, decode by component."""
    return [
        {"component": "prefill", "networks": [f"{FAR}/32"], "cluster": "prfaas0", "role": "prefill"},
        {"component": "prefill", "cluster": "pd0", "role": "prefill"},
        {"component": "backend", "cluster": "pd0", "role": "decode"},
    ]


def close_all(groups: Sequence[Group]) -> None:
    """Kill all of them."""
    for group in groups:
        group.close()
