"""Exchanging the weights of an engine, and how long that kept it from sampling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from areal_async.runtime.log import get_logger
from rollout_service.engines.base import Weights

log = get_logger("updates")


class Pausable(Protocol):
    """The part of an engine that is used here."""

    async def pause(self) -> None: ...

    async def load(self, snapshot: Weights) -> None: ...

    async def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds of one update in which an engine sampled nothing."""

    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.pause_s + self.load_s + self.resume_s


@runtime_checkable
class Exchanges(Protocol):
    """An engine that exchanges its weights in a way of its own, such as part by part."""

    async def exchange(self, snapshot: Weights) -> Stall:
        """Serve `snapshot`. Returns the longest stall of any request. Raises `EngineError`."""
        ...


async def exchange(engine: Pausable, snapshot: Weights) -> Stall:
    """Have `engine` serve `snapshot`, in its own way if it has one. Raises `EngineError`; then the old
    weights are in place, or the engine is lost."""
    if isinstance(engine, Exchanges):
        return await engine.exchange(snapshot)
    return await pause_load_resume(engine, snapshot)


async def pause_load_resume(
    engine: Pausable, snapshot: Weights, loaded: Callable[[], None] = lambda: None
) -> Stall:
    """`exchange` in three steps: resumed also when the load fails. The first error is the one raised: that of
    a resume after it is most often its consequence, and only logged. `loaded` is called before any unit of
    the new weights is sampled."""
    began_s = paused_s = time.monotonic()
    try:
        await engine.pause()
        paused_s = time.monotonic()
        await engine.load(snapshot)
        loaded()
    except BaseException as first:
        try:
            await engine.resume()
        except Exception as error:  # the first one is the one to act on
            log.warning("engine did not resume", error=str(error), after=f"{type(first).__name__}: {first}")
        raise
    loaded_s = time.monotonic()
    await engine.resume()
    return Stall(paused_s - began_s, loaded_s - paused_s, time.monotonic() - loaded_s)
