"""A shaped link between two network namespaces: a veth pair with a token bucket at the sender's end. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

NEAR, FAR = "10.77.0.1", "10.77.0.2"
#: What the token bucket lets through at once: transfers below about 1 MB look faster than the rate.
BURST_BYTES = 256 * 1024
BURST = f"{BURST_BYTES}b"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class ShapedNetwork:
    """A namespace behind a link whose rate can be set and that can be cut.

    Args:
        near: address of this side's end; those who run at the same time need networks (/24) of their own.
        far: address inside the namespace.

    Raises:
        OSError: namespaces or shaping cannot be had here; nothing is left behind.
    """

    def __init__(self, near: str = NEAR, far: str = FAR) -> None:
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise OSError("ip or tc is not installed (Debian: iproute2)")
        self._addresses = near, far
        self.namespace = f"prfaas{os.getpid()}"
        self.near, self.far = f"pn{os.getpid()}", f"pf{os.getpid()}"
        try:
            self._make()
            self.set_rate(1_000_000_000)
        except OSError:
            self.close()
            raise

    def _make(self) -> None:
        _run("ip", "netns", "add", self.namespace)
        _run("ip", "link", "add", self.near, "type", "veth", "peer", "name", self.far)
        _run("ip", "link", "set", self.far, "netns", self.namespace)
        _run("ip", "addr", "add", f"{self._addresses[0]}/24", "dev", self.near)
        _run("ip", "link", "set", self.near, "up")
        self._inside("ip", "addr", "add", f"{self._addresses[1]}/24", "dev", self.far)
        self._inside("ip", "link", "set", self.far, "up")
        self._inside("ip", "link", "set", "lo", "up")

    def _inside(self, *command: str) -> str:
        return _run("ip", "netns", "exec", self.namespace, *command)

    def set_rate(self, rate_bps: int, burst: str = BURST, queue: str = "200ms") -> None:
        """Capacity of the link from the namespace to here, bit/s; `queue` is the longest wait in front of it."""
        shape = ("tbf", "rate", f"{rate_bps}bit", "burst", burst, "latency", queue)
        self._inside("tc", "qdisc", "replace", "dev", self.far, "root", *shape)

    def cut(self) -> None:
        """Nothing passes from now on; connections are not told."""
        self._inside("ip", "link", "set", self.far, "down")

    def mend(self) -> None:
        """The link is whole again."""
        self._inside("ip", "link", "set", self.far, "up")

    @property
    def arrived_bytes(self) -> int:
        """Bytes that came out of the link here, headers counted."""
        return int(Path(f"/sys/class/net/{self.near}/statistics/rx_bytes").read_text())

    def close(self) -> None:
        """Take it all down; the pair goes with its namespace."""
        for command in (
            ("ip", "netns", "del", self.namespace),
            ("ip", "link", "del", self.near),
        ):
            with contextlib.suppress(OSError):
                _run(*command)
