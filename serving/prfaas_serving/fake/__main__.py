"""Fake workers in a process of their own: `python -m prfaas_serving.fake SPECS READY`.

SPECS is a JSON list of `FakeSpec`; once all listen, READY holds their ports and the ports of their KV side channels.
The process ends with its standard input, so that it never outlives who started it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from prfaas_env.base import write_whole
from prfaas_serving.fake.spec import FakeSpec
from prfaas_serving.fake.worker import FakeWorker
from prfaas_serving.running import run_loop


async def _serve(specs: list[FakeSpec], ready: Path) -> None:
    workers = [FakeWorker(spec, own_process=True) for spec in specs]
    for worker in workers:
        await worker.start()
    write_whole(ready, json.dumps({w.spec.name: [w.port, w.kv_port] for w in workers}))
    await asyncio.to_thread(sys.stdin.read)
    for worker in workers:
        await worker.close()


def main(arguments: list[str]) -> None:
    """Serve until standard input ends."""
    specs = [FakeSpec.model_validate(s) for s in json.loads(Path(arguments[0]).read_text(encoding="utf-8"))]
    run_loop(_serve(specs, Path(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
