"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: a slow machine is not a fault. With CI set, hypothesis by itself takes its profile for CI, which has no
# deadline either and always tries the same examples.
settings.register_profile("local", deadline=None)
if "CI" not in os.environ:
    settings.load_profile("local")

# Tests with real engines need environments of their own; their make targets set this.
collect_ignore = [] if os.environ.get("PRFAAS_REAL") else ["real"]
