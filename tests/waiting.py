"""How tests wait for something that raises no event: within a deadline (`tests/harness/calibration.py`)."""

import asyncio
import time
from collections.abc import Callable

from tests.harness.calibration import Deadline, deadline_s

__all__ = ["LIMIT_S", "deadline_s", "until", "wait_for"]

LIMIT_S = deadline_s(600)


async def until(holds: Callable[[], object], what: str = "what is waited for") -> None:
    """Let other tasks run until it holds."""
    deadline = Deadline(LIMIT_S)
    while not holds():
        assert not deadline.is_over(), f"{what} did not come within {deadline.seconds:g} s"
        await asyncio.sleep(0.002)


def wait_for(
    holds: Callable[[], object],
    what: str = "what is waited for",
    *,
    limit_s: float = LIMIT_S,
    every_s: float = 0.01,
) -> None:
    """The same for what other processes do."""
    deadline = Deadline(limit_s)
    while not holds():
        assert not deadline.is_over(), f"{what} did not come within {deadline.seconds:g} s"
        time.sleep(every_s)
