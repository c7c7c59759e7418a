"""How tests wait for what raises no event: within a deadline."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 300.0


async def until(holds: Callable[[], object], what: str = "what is waited for") -> None:
    """Let other tasks run until it holds."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} did not come in time"
        await asyncio.sleep(0.002)


def wait_for(holds: Callable[[], object], what: str = "what is waited for") -> None:
    """The same for what other processes do."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} did not come in time"
        time.sleep(0.01)
