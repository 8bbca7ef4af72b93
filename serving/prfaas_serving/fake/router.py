"""A router in a process of its own: `python -m prfaas_serving.fake.router CONFIG PORT_FILE [CORES]`.

The port is written to PORT_FILE once every worker is up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from prfaas_env.base import write_whole
from prfaas_serving.app import Router
from prfaas_serving.config import load_config
from prfaas_serving.running import run_loop, serve_until_told


def main(arguments: list[str]) -> None:
    """Serve until told to stop."""
    config, port_file, *cores = arguments
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(c) for c in cores[0].split(",")])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    resolved, _ = load_config(config)
    tasks: set[asyncio.Task[None]] = set()

    async def tell(router: Router) -> None:
        while not all(w.state == "up" for w in router.forwarder.fleet):
            await asyncio.sleep(0.02)
        write_whole(Path(port_file), f"{router.port}\n")

    def started(router: Router) -> None:
        tasks.add(asyncio.get_running_loop().create_task(tell(router)))

    run_loop(serve_until_told(resolved, started))


if __name__ == "__main__":
    main(sys.argv[1:])
