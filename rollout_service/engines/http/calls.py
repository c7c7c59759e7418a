"""The requests of a server engine that are in flight: counted, held, aborted, failed together.

Promises: each `run` ends, with the answer or in a typed error; a request is aborted whenever the abort comes:
held back here, on its way, or in the server (where an abort that overtakes its request is forgotten: it is
sent until the request ends). A caller that is cancelled leaves nothing running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from areal_async.base.metrics import busy
from rollout_service.engines.base import (
    EngineError,
    EngineLost,
    GenerateRequest,
    GenerateResult,
    nothing_sampled,
)

ABORT_AGAIN_S = 0.25  # An abort that found no request in the server is sent again after this time
SETTLE_S = 5.0


_HELD_BACK = EngineError("aborted before it was sent")


@dataclass(eq=False, slots=True)
class _Call:
    rid: str
    task: asyncio.Task[GenerateResult] = field(init=False)
    sent: bool = False
    ending: bool = False
    error: EngineError | None = None


class Calls:
    """`abort_rid` asks the server to end a request, known there by its `rid`."""

    def __init__(self, abort_rid: Callable[[str], Awaitable[None]]) -> None:
        self._abort_rid = abort_rid
        self._calls: dict[str, _Call] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._open = asyncio.Event()
        self._open.set()

    def __len__(self) -> int:
        return len(self._calls)

    async def run(
        self,
        request: GenerateRequest,
        rid: str,
        answer: Callable[[], Coroutine[Any, Any, GenerateResult]],
    ) -> GenerateResult:
        """The outcome of `answer()`, which asks the server; while held, it is not begun.

        A request that was aborted before it was begun has sampled nothing. Raises what `answer` raises, and
        what `fail` was given."""
        if request.request_id in self._calls:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        call = _Call(rid)
        call.task = asyncio.create_task(self._sent(call, answer))
        self._calls[request.request_id] = call
        try:
            result = await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if not call.task.cancelled() or call.error is None:
                # The caller was cancelled: what it asked for is ended behind its back.
                self._end(call)
                raise
            if call.error is _HELD_BACK:
                return nothing_sampled()
            raise call.error from None
        finally:
            del self._calls[request.request_id]
        if result.finish_reason == "abort" and not call.ending:
            raise EngineLost("the server ended a request that nobody aborted: send it again")
        return result

    def hold(self) -> None:
        """Begin no request until `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests. Unknown ids have finished already."""
        for request_id in request_ids:
            if call := self._calls.get(request_id):
                self._end(call)

    def fail(self, error: EngineError) -> None:
        """End everything in flight with `error`; nothing is held any more."""
        for call in list(self._calls.values()):
            call.error = error
            call.task.cancel()
        self._open.set()

    async def settle(self) -> None:
        """Wait for what runs behind the callers' backs."""
        tasks = set(self._background)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLE_S)

    async def _sent(
        self, call: _Call, answer: Callable[[], Coroutine[Any, Any, GenerateResult]]
    ) -> GenerateResult:
        if not self._open.is_set():
            await self._open.wait()
        call.sent = True
        return await answer()

    def _end(self, call: _Call) -> None:
        if call.task.done() or call.ending:
            return
        call.ending = True
        if not call.sent:
            call.error = _HELD_BACK
            call.task.cancel()
            return
        self._spawn(self._abort_until_done(call))

    async def _abort_until_done(self, call: _Call) -> None:
        while not call.task.done():
            # A lost connection is found by the request's own, or by the watch over the server.
            with suppress(EngineLost):
                await self._abort_rid(call.rid)
            await asyncio.wait({call.task}, timeout=ABORT_AGAIN_S)
        if not call.task.cancelled():
            call.task.exception()  # looked at: its caller may be gone

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Account:
    """What goes through a server engine, counted on this side of the wire: calls in flight, units, and busy
    time, which the metrics have under `activity`. Counters never fall."""

    def __init__(self, activity: str) -> None:
        self.in_flight = 0
        self.tokens_total = 0
        self.requests_total = 0
        self._activity = activity
        self._paused = False
        self._computing = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count one request. Its units are added with `sampled`."""
        self.in_flight += 1
        self._keep_time()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.requests_total += 1
            self._keep_time()

    def sampled(self, n_units: int) -> None:
        self.tokens_total += n_units

    def paused(self, paused: bool) -> None:
        """A paused engine computes nothing, whatever it holds."""
        self._paused = paused
        self._keep_time()

    @property
    def busy_s(self) -> float:
        return busy.seconds(self._activity)

    def close(self) -> None:
        """Nothing is computed any more."""
        self._keep_time(over=True)

    def _keep_time(self, *, over: bool = False) -> None:
        computing = self.in_flight > 0 and not self._paused and not over
        if computing != self._computing:
            (busy.begin if computing else busy.end)(self._activity)
            self._computing = computing
