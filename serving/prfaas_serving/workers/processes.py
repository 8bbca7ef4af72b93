"""Workers as processes of another environment, which has what they need; this module needs none of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas_env.base import PrfaasError
from prfaas_serving.processes import end_child

#: A busy machine may take a minute to import torch a few times.
_START_S = 300.0


def clean_environment() -> dict[str, str]:
    """Settings for processes of another environment: one thread each, and none of this one's paths."""
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def write_tiny_models(python: Path, folder: Path, *names: str) -> None:
    """Write tiny models with random weights (names of `tiny_models.MAKERS`).

    Raises:
        PrfaasError: that failed.
    """
    script = Path(__file__).parent / "tiny_models.py"
    done = subprocess.run(
        [str(python), str(script), str(folder), *names],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PrfaasError(f"{script.name}: {last}")


@dataclass(eq=False)
class WorkerProcess:
    """One worker. It ends with this process.

    Args:
        name: of the worker.
        role: at the start.
        model: folder of the model.
        python: interpreter of the environment.
        folder: for its log and its ports.
        values: further settings (`WorkerSettings`).
    """

    name: str
    role: str
    model: Path
    python: Path
    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; `ready` tells when it is up."""
        ready = self.folder / f"{self.name}.ready.json"
        ready.unlink(missing_ok=True)
        command = [
            *(str(self.python), "-m", "prfaas_serving.workers", "--model", str(self.model), "--attached"),
            *("--role", self.role, "--port", "0", "--ready-file", str(ready)),
            *(part for name, value in self.values.items() for part in ("--set", f"{name}={value}")),
        ]
        with (self.folder / f"{self.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=clean_environment()
            )

    async def ready(self) -> None:
        """Wait for its ports.

        Raises:
            PrfaasError: it ended, or takes too long.
        """
        assert self._process is not None
        file, end_s = self.folder / f"{self.name}.ready.json", time.monotonic() + _START_S
        while not file.exists():
            if self._process.poll() is not None or time.monotonic() > end_s:
                log = self.folder / f"{self.name}.log"
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise PrfaasError(
                    f"worker {self.name} did not start: {lines[-1] if lines else 'no reason given'}"
                )
            await asyncio.sleep(0.1)
        self.port = json.loads(file.read_text(encoding="utf-8"))["port"]

    async def close(self) -> None:
        """End it; safe to call again."""
        process, self._process = self._process, None
        if process is None:
            return
        await end_child(process)
