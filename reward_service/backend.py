"""What scores calls: the pool of processes, remote servers, models. One protocol for all.

A call is one `RewardInput`, or under scope `group` the list of those of one group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from areal_async.rpc.verdicts import Verdict
from reward_service.sdk import RewardInput, RewardLoadError

Call = RewardInput | list[RewardInput]
OnVerdicts = Callable[[int, list[Verdict], float], None]
"""Called with (index among the submitted calls, one verdict for each episode of the call, milliseconds that
the call itself took)."""


class Backend(Protocol):
    """Scores the calls of one reward (of several, where the pool does). All methods belong to one event loop.
    One whose calls may wait for something that is away, or for more than their turn, says for how long by a
    property `patience_s`; it is read whenever a call would be given up.

    Promises: every call submitted gets its verdicts exactly once, within its reward's `timeout_s` (plus a
    second) of the moment it began; what is submitted beyond `capacity` waits its turn."""

    broken: asyncio.Future[RewardLoadError]
    """Done when no more call can succeed; the error says why and what to do."""

    @property
    def capacity(self) -> int:
        """Calls that it works on at once."""

    @property
    def alive(self) -> int:
        """Of `capacity`, what is ready now; 0 means that nothing can be scored at present."""

    @property
    def call_seconds(self) -> float:
        """Recent mean duration of a call, in seconds."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls; waits while the queue is full. `on_verdicts` must not raise."""
