"""Running a router until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from prfaas_serving.app import Router
from prfaas_serving.config import Resolved

log = logging.getLogger("prfaas_serving")


def run_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, on uvloop where it is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def serve_until_told(resolved: Resolved, started: Callable[[Router], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT: then take nothing new, let open requests end, close. A second signal ends at once.

    Args:
        resolved: the configuration.
        started: called once the ports are open.
    """
    router = Router(resolved)
    stop, hurry = asyncio.Event(), asyncio.Event()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    await router.start()
    # what is loaded by now stays: a collector that walks through it all would only make requests wait
    gc.collect()
    gc.freeze()
    log.info(
        "listening on %s:%s, admin on %s",
        resolved.config.listen.host,
        router.port,
        router.admin_port or "no port",
    )
    if started is not None:
        started(router)
    try:
        await stop.wait()
        log.info("draining %s open requests", router.forwarder.open_requests)
        drained = asyncio.ensure_future(router.drain(resolved.config.drain_s))
        second = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({drained, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, second):
            task.cancel()
    finally:
        await router.close()
        log.info("stopped")


def run(resolved: Resolved) -> None:
    """Serve in this process with logs on standard error."""
    logging.basicConfig(
        level=resolved.config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    run_loop(serve_until_told(resolved))
