"""`python -m prfaas_serving.workers --model FOLDER`: serve a model until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from prfaas_env.base import PrfaasError, first_error, write_whole
from prfaas_serving.processes import run_command
from prfaas_serving.workers.model import Model
from prfaas_serving.workers.server import ModelWorker
from prfaas_serving.workers.settings import WorkerSettings

log = logging.getLogger("prfaas_serving.workers")

#: Where the key that callers must show is taken from.
KEY_VARIABLE = "PRFAAS_WORKER_API_KEY"


async def serve(model: Model, settings: WorkerSettings, ready: Path | None, attached: bool) -> None:
    """Serve until SIGTERM or SIGINT, or, attached, until standard input ends."""
    stop = asyncio.Event()
    if attached:
        loop = asyncio.get_running_loop()

        def wait_for_end() -> None:
            sys.stdin.read()
            with contextlib.suppress(RuntimeError):  # the loop may be closed by then
                loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait_for_end, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    worker = ModelWorker(model, settings)
    await worker.start()
    log.info(
        "model %s, role %s, listening on %s, caches at port %s",
        model.name,
        worker.role,
        worker.url,
        worker.store.port,
    )
    if ready is not None:
        write_whole(ready, json.dumps({"port": worker.port, "kv_port": worker.store.port}) + "\n")
    try:
        await stop.wait()
    finally:
        await worker.close()


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model: weights, config.json, tokenizer.")],
    served_model_name: Annotated[str, typer.Option(help="What clients call it.")] = "tiny",
    role: Annotated[
        str, typer.Option(help="prefill, decode or both; changed at run time by POST /role.")
    ] = "both",
    host: Annotated[str, typer.Option(help="Address to listen on, for requests and caches.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = a free one.")] = 8000,
    kv_port: Annotated[int, typer.Option(help="Port that caches are fetched at; 0 = a free one.")] = 0,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the ports to this file once they are open.")
    ] = None,
    attached: Annotated[
        bool, typer.Option(help="End when standard input does, so as never to outlive who started it.")
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A further setting NAME=VALUE, for example chunk_tokens=512; may be repeated."
        ),
    ] = None,
) -> None:
    """Serve a hybrid model on this machine's CPUs."""
    values: dict[str, Any] = {"role": role, "host": host, "port": port, "kv_port": kv_port}
    for entry in setting or ():
        name, equals, value = entry.partition("=")
        if not equals:
            raise PrfaasError(f"--set {entry}: must be NAME=VALUE")
        values[name] = value
    if key := os.environ.get(KEY_VARIABLE):
        values["api_key"] = key
    try:
        settings = WorkerSettings.model_validate(values)
    except ValidationError as error:
        raise first_error(error, "worker") from None
    from prfaas_serving.workers.hybrid import HybridModel

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    loaded = HybridModel(model, served_model_name, int(os.environ.get("OMP_NUM_THREADS", "1")))
    asyncio.run(serve(loaded, settings, ready_file, attached))


if __name__ == "__main__":
    run_command(main)
