"""Every law holds on every engine."""

from __future__ import annotations

import pytest

from prfaas_env.simulator.engine import ENGINES


@pytest.fixture(scope="session", params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    """Name of an engine."""
    return request.param
