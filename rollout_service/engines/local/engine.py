"""The local engine: `EngineCore` on a thread of its own, behind the engine protocol.

It keeps the promises of `engines/base.py`. In addition, the thread survives every failure of a request or a
step, and every call of `generate` returns or raises. Among waiting requests, the smallest priority goes
first, then the oldest. If a caller is cancelled, its request ends and frees its place, waiting or running.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from areal_async.base.log import get_logger
from areal_async.base.metrics import busy
from areal_async.base.versions import VersionTag
from areal_async.models.files import Mixture
from areal_async.rpc.board import board
from rollout_service.engines.base import (
    EngineError,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Piece,
    Tell,
    Weights,
)
from rollout_service.engines.local.core import EngineCore, Finished
from rollout_service.engines.local.model import LocalModel

log = get_logger("engine")
T = TypeVar("T")

IDLE_WAIT_S = 1.0
STOP_TIMEOUT_S = 2.0
TERMS = 4


NO_PASSES = (0.0,) * (TERMS * (TERMS + 1) // 2 + TERMS)


def with_pass(sums: tuple[float, ...], sampled: int, prompt_tokens: int, seconds: float) -> tuple[float, ...]:
    """Return the sums of the engine's passes with one more pass.

    A pass that samples n tokens and computes p prompt tokens takes about a + b·n + c·[p > 0] + d·p seconds of
    its thread's CPU time. The sums are the inputs of least squares for a, b, c and d. The difference of two
    readings has the sums of the passes between them. With the terms (1, n, [p > 0], p), the sums are of the
    products of term i and term j with i ≤ j, in the order (0, 0), (0, 1), … (3, 3), and then of each term
    times the seconds."""
    x = (1.0, float(sampled), float(prompt_tokens > 0), float(prompt_tokens))
    products = [x[i] * x[j] for i in range(TERMS) for j in range(i, TERMS)]
    added = (*products, *(term * seconds for term in x))
    return tuple(a + b for a, b in zip(sums, added, strict=True))


@dataclass(eq=False)
class LocalEngine:
    """One replica of the policy in this process. Implements `engines.base.Engine`, and reports units one by
    one."""

    directory: Path
    """Folder of the architecture and the tokenizer. Snapshots provide the weights."""
    _: KW_ONLY
    slots: int
    """Largest number of requests computed at once."""
    max_model_len: int
    update_mode: Literal["recompute", "keep"] = "recompute"
    device: str = "cpu"
    dtype: str = "float32"
    activity: str = "rollout"
    """Name of the engine's busy time in the metrics."""
    mixture: Mixture | None = None
    """The model's mixture of experts, if requests may ask for routes."""
    pixels: tuple[int | None, int | None] = (None, None)
    """Least and largest number of pixels to which images are scaled. None: the bound of the model's files."""

    def __post_init__(self) -> None:
        self._calls: dict[str, asyncio.Future[GenerateResult]] = {}
        self._tells: dict[str, Tell] = {}
        self._told: dict[str, int] = {}  # Units reported for each streamed request. Used only on the thread
        # Commands for the thread, sent at the end of the loop's round
        self._outbox: list[Callable[[], None]] = []
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._computing = self._paused = self._stopping = False
        self._passes = NO_PASSES
        self._core: EngineCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- the protocol --------------------------------------------------------------------------------

    @property
    def version(self) -> VersionTag:
        return self._started().tag

    def alive(self) -> bool:
        return not self._stopping and (self._core is None or self._thread.is_alive())

    async def start(self, snapshot: Weights) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

        def build() -> None:
            how: Any = {"device": self.device, "dtype": self.dtype, "pixels": self.pixels}
            model = LocalModel(self.directory, mixture=self.mixture, **how)
            limits = {"slots": self.slots, "max_model_len": self.max_model_len}
            core = EngineCore(model, **limits, update_mode=self.update_mode)
            core.swap(snapshot)
            model.check()
            self._core = core

        await self._call(build)

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        call = self.begin(request, tell)
        try:
            return await call
        finally:
            self._forget(request.request_id)

    def begin(self, request: GenerateRequest, tell: Tell | None = None) -> asyncio.Future[GenerateResult]:
        """Begin a request as `generate` does, without a task. Cancelling the future aborts the request."""
        request = self._started().checked(request)
        request_id = request.request_id
        if self._stopping:
            raise EngineError("the engine has stopped")
        if request_id in self._calls:
            raise EngineError(f"request {request_id!r} is in flight already")
        call = self._calls[request_id] = asyncio.get_running_loop().create_future()
        if tell is not None:
            self._tells[request_id] = tell
        self._post(partial(self._submit, request, telling=tell is not None))
        call.add_done_callback(partial(self._forget, request_id))
        return call

    def _forget(self, request_id: str, call: asyncio.Future[GenerateResult] | None = None) -> None:
        """Free the slot of a request whose caller is gone, and ignore its answer. Does nothing if the request
        has ended."""
        self._tells.pop(request_id, None)
        if call is not None and self._calls.get(request_id) is not call:
            return
        if self._calls.pop(request_id, None) is not None:
            self._post(lambda: self._deliver(self._started().abort([request_id])))

    async def pause(self) -> None:
        def pause() -> None:
            self._paused = True

        await self._call(pause)

    async def load(self, snapshot: Weights) -> None:
        def load() -> None:
            if not self._paused:
                raise EngineError("weights are exchanged while the engine is paused")
            self._started().swap(snapshot)

        await self._call(load)

    async def resume(self) -> None:
        def resume() -> None:
            self._paused = False
            self._guarded(self._started().rebuild)

        await self._call(resume)

    async def sleep(self) -> None:
        await self._call(lambda: self._started().sleep())

    async def wake(self) -> None:
        await self._call(lambda: self._started().wake())

    async def device_bytes(self) -> int | None:
        return await self._call(lambda: self._started().device_bytes)

    async def abort(self, request_ids: Iterable[str]) -> None:
        wanted = list(request_ids)
        await self._call(lambda: self._deliver(self._started().abort(wanted)))

    def stats(self) -> EngineStats:
        core = self._started()
        return EngineStats(
            running=core.running,
            waiting=len(core.waiting),
            capacity=self.slots,
            kv_used=core.kv_used,
            tokens_total=core.tokens_total,
            requests_total=core.requests_total,
            busy_s=busy.seconds(self.activity),
            passes=self._passes,
        )

    async def stop(self) -> None:
        self._stopping = True
        self._hand_over()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineError("the engine has stopped"))
        self._calls.clear()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    # --- between the event loop and the thread -------------------------------------------------------

    def _started(self) -> EngineCore:
        if self._core is None:
            raise EngineError("the engine has not started")
        return self._core

    def _post(self, command: Callable[[], None]) -> None:
        """Run `command` on the thread between two steps. Commands of one round of the event loop arrive
        together. So requests that start together are prefilled together, and the thread wakes once."""
        self._outbox.append(command)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        with self._wake:
            self._inbox += self._outbox
            self._outbox.clear()
            self._wake.notify()

    async def _call(self, command: Callable[[], T]) -> T:
        """Call `_post`, and return the command's result or raise its error. If the call is cancelled before
        the command's turn, the command does not run."""
        if self._stopping:
            raise EngineError("the engine has stopped")
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(command())
            except Exception as error:  # the caller handles it
                done.set_exception(error)

        self._post(run)
        return await asyncio.wrap_future(done)

    def _submit(self, request: GenerateRequest, *, telling: bool) -> None:
        if telling:
            self._told[request.request_id] = 0
        self._started().submit(request)

    def _step(self) -> None:
        board.follow_threads()
        core = self._started()
        begun_s, before = time.thread_time(), (core.tokens_total, core.prompt_tokens_total)
        finished = core.step()
        sampled, prompts = core.tokens_total - before[0], core.prompt_tokens_total - before[1]
        self._passes = with_pass(self._passes, sampled, prompts, time.thread_time() - begun_s)
        self._deliver(finished)
        if self._told and (pieces := core.grown(self._told)):
            assert self._loop is not None
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._tell, pieces)

    def _tell(self, pieces: list[tuple[str, Piece]]) -> None:
        for request_id, piece in pieces:
            if tell := self._tells.get(request_id):
                tell(piece)

    def _deliver(self, finished: list[Finished]) -> None:
        assert self._loop is not None
        for item in finished if self._told else ():
            self._told.pop(item.request_id, None)
        if finished and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resolve, finished)

    def _resolve(self, finished: list[Finished]) -> None:
        for item in finished:
            call = self._calls.pop(item.request_id, None)
            if call is None or call.done():
                continue
            if isinstance(item.outcome, GenerateResult):
                call.set_result(item.outcome)
            else:
                call.set_exception(item.outcome)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                self._keep_time()
                for command in self._commands():
                    command()
                self._keep_time()
                if self._computing:
                    self._guarded(self._step)
            # Commands from before the stop are still answered. None can follow.
            for command in self._inbox:
                command()
            if self._computing:
                busy.end(self.activity)

    def _keep_time(self) -> None:
        """Count the time with work to compute. Called before and after each wait."""
        computing = self._core is not None and not self._paused and not self._core.idle
        if computing != self._computing:
            (busy.begin if computing else busy.end)(self.activity)
            self._computing = computing

    def _commands(self) -> list[Callable[[], None]]:
        """Return the posted commands. Wait if there is no work."""
        with self._wake:
            if not self._inbox and not self._stopping:
                core = self._core
                if core is None or self._paused or core.idle:
                    self._wake.wait(IDLE_WAIT_S)
            inbox, self._inbox = self._inbox, []
            return inbox

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a part of the engine whose failure must not end the thread. Running requests fail with its
        error."""
        try:
            work()
        except Exception as error:
            log.error("engine step failed", error=f"{type(error).__name__}: {error}")
            self._deliver(self._started().fail(EngineError(f"the engine's step failed: {error!r}")))
