"""Real workers as processes. Each one leads a process group of its own.

A group is killed by `close`, at the exit of this process, and by a small watcher if this process itself is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

#: On a very busy machine all limits of the tests can be made longer; deadlines of the router stay as they are.
PATIENCE = float(os.environ.get("PRFAAS_PATIENCE", "1"))
#: Kills a process group once the process that started it is gone.
_WATCHER = 'while kill -0 "$0" 2>/dev/null; do sleep 1; done; kill -9 "-$1" 2>/dev/null'


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Group:
    """A process with all that it starts."""

    process: subprocess.Popen[bytes] | None = None
    _watcher: subprocess.Popen[bytes] | None = None
    _log: Path | None = None

    def run(self, command: Sequence[str], settings: Mapping[str, str], log: Path) -> None:
        """Start it.

        Args:
            command: program and arguments.
            settings: environment variables besides those of this process.
            log: where its output goes.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        environment = {**os.environ, **settings}
        for name in ("PYTHONPATH", "PYTHONHASHSEED"):
            environment.pop(name, None)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        atexit.register(self.close)
        self._end_watcher()
        self._watcher = subprocess.Popen(
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
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        if self._log is None:
            return ""
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
