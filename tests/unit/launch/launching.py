"""What the tests of the supervisor share."""

from __future__ import annotations

import time
from collections.abc import Callable

from areal_async.launch.plan import MODULES

STAND_IN = dict.fromkeys(MODULES, "stand_in")
Behave = Callable[[dict[str, str]], None]
"""Has the stand-in services behave as told, by process name."""


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.02)
