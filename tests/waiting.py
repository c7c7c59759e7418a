"""How tests wait for what raises no event: within a deadline."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 900.0


async def until(holds: Callable[[], object], what: str = "what is waited for") -> None:
    """Let other tasks run until it holds."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} did not come in time"
        await asyncio.sleep(0.002)


def wait_for(
    holds: Callable[[], object],
    what: str = "what is waited for",
    *,
    limit_s: float = LIMIT_S,
    every_s: float = 0.01,
) -> None:
    """The same for what other processes do."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} did not come within {limit_s:g} s"
        time.sleep(every_s)
