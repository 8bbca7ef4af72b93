"""The project's own model workers as processes, and the tiny hybrid models that they serve."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from prfaas_env.profiles.hf_config import kv_layout_from_hf_config
from prfaas_env.profiles.kv import KVLayout
from prfaas_serving.workers.processes import clean_environment, write_tiny_models
from tests.real.engines import START_S, Engine

#: The workers' environment and where models and logs go; `make test-hybrid` sets both.
ENVIRONMENT = Path(os.environ.get("PRFAAS_HYBRID_ENV", ".envs/hybrid")).absolute()
FOLDER = Path(os.environ.get("PRFAAS_HYBRID_FOLDER", "runs/hybrid")).absolute()
MODELS = ("qwen3-next", "kimi-linear")


def _python(*arguments: str, given: str | None = None) -> str:
    """Run the environment's Python; gives what it writes."""
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python"), *arguments],
        env=clean_environment(),
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


@cache
def _written() -> Path:
    folder = FOLDER / "models"
    write_tiny_models(ENVIRONMENT / "bin" / "python", folder, *MODELS)
    return folder


def folder_of(name: str) -> Path:
    """Folder of a model, written once per run."""
    return _written() / name


def layout_of(name: str) -> KVLayout:
    """Bytes of its cache, all in fp32."""
    return kv_layout_from_hf_config(
        folder_of(name), kv_dtype_bytes=4, state_dtype_bytes=4, conv_dtype_bytes=4
    )


def generated(name: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What transformers' own greedy `generate` makes of prompts, in one process without any of our code."""
    given = json.dumps({"folder": str(folder_of(name)), "prompts": prompts, "tokens": tokens})
    found: list[list[int]] = json.loads(_python("-c", _GENERATE, given=given))
    return found


_GENERATE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
asked = json.load(sys.stdin)
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32).eval()
found = []
for ids in asked["prompts"]:
    made = model.generate(
        torch.tensor([ids]), max_new_tokens=asked["tokens"], do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found.append(made[0, len(ids):].tolist())
json.dump(found, sys.stdout)
"""


@dataclass
class HybridEngine(Engine):
    """One of the project's own workers."""

    @property
    def _ports(self) -> Path:
        return FOLDER / f"{self.name}.ready.json"

    def start(self, port: int | None = None) -> None:
        """Start it, at a port of its own choice if none is given; `ready` tells when it is up."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._ports.unlink(missing_ok=True)
        command = [
            *([] if self.namespace is None else ["ip", "netns", "exec", self.namespace]),
            *(
                str(ENVIRONMENT / "bin" / "python"),
                "-m",
                "prfaas_serving.workers",
                "--model",
                str(self.model),
            ),
            *("--role", self.role, "--host", self.host, "--port", str(port or 0)),
            *("--ready-file", str(self._ports)),
        ]
        self.run(command, {"OMP_NUM_THREADS": "1"}, FOLDER / f"{self.name}.log")

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait for its ports, then until it answers; RuntimeError with the end of its log if it does not."""
        end_s = time.monotonic() + START_S
        while not self._ports.exists():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"worker {self.name} did not start:\n{self.tail()}")
            await asyncio.sleep(0.1)
        self.port = json.loads(self._ports.read_text(encoding="utf-8"))["port"]
        await super().ready(session)

    async def transfers(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """Its record of transfers."""
        async with session.get(self.url + "/transfers") as answer:
            found: list[dict[str, Any]] = (await answer.json())["transfers"]
            return found

    async def turn(self, session: aiohttp.ClientSession, role: str, drain_s: float = 0.0) -> tuple[int, Any]:
        """Change its role: (status, answer)."""
        return await self.post(session, "/role", {"role": role, "drain_s": drain_s})
