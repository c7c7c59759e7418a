"""What the tests of the supervisor share."""

from __future__ import annotations

import time
from collections.abc import Callable

from areal_async.launch.plan import MODULES
from areal_async.runtime.context import ServicePlace

STAND_IN = dict.fromkeys(MODULES, "stand_in")
NAMES = ("buffer", "trainer", "reward", "rollout-0", "rollout-1", "evaluator")
ROLES = [name.partition("-")[0] for name in NAMES]
PLACES = [ServicePlace(name, role, 0, MODULES[role], 0) for name, role in zip(NAMES, ROLES, strict=True)]
Behave = Callable[[dict[str, str]], None]
"""Has the stand-in services behave as told, by process name."""


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.02)
