"""What tests with real engines share: the recorded list of skips and the measured figures."""

import signal
from types import FrameType

import pytest

from tests.real.skips import (
    pytest_collectreport,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)

__all__ = [
    "pytest_collection",
    "pytest_collectreport",
    "pytest_runtest_logreport",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
]


def pytest_collection(session: pytest.Session) -> None:
    """End on SIGTERM as on Ctrl-C, so that workers are killed and networks taken down."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
