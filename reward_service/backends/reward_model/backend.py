"""The reward `reward_model`: a sequence-classification model, computed in a process of its own.

Promises: every call gets its verdicts exactly once, within `timeout_s` of the moment its batch began; texts
are computed in batches of like lengths, the oldest always among them, and none waits for company longer than
`max_wait_ms` while the model is idle; a batch that runs past the deadline is ended by killing the process,
and only its calls are a `Timeout`; a death is a `Failure` of the text that brings it about twice, once among
others and once alone, and everything else is scored by the next process; closing leaves no process.

Does not promise to be quick after a death: the model is loaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from pydantic import ValidationError

from areal_async.config.reward import RewardSection
from areal_async.rpc.verdicts import Failure, Timeout, Verdict
from areal_async.runtime.log import get_logger
from reward_service import metrics
from reward_service.backends import Call, OnVerdicts
from reward_service.backends.inbox import Inbox
from reward_service.backends.reward_model import START_LIMIT_S, RewardModelArguments
from reward_service.backends.reward_model.batching import WINDOW, choose_batch, is_due
from reward_service.backends.reward_model.process import ModelProcess
from reward_service.backends.reward_model.protocol import Loaded, LoadFailed, Report, Scored, Texts
from reward_service.backends.templates import MissingText, fill
from reward_service.sdk import RewardInput, RewardLoadError
from reward_service.spec import RewardSpec

log = get_logger("reward_model")

MAX_QUEUED = 8192
"""Texts that wait."""
AHEAD = 2
"""Batches that the process has: one it computes, and one that is ready when that is done."""
MAX_FAILED_STARTS = 4
"""In a row, before the backend gives up."""
TICK_S = 0.05
CLOSE_LIMIT_S = 5.0


class Open:
    """A call whose verdicts are not complete."""

    __slots__ = ("began_s", "index", "left", "on_verdicts", "verdicts")

    def __init__(self, index: int, n: int, on_verdicts: OnVerdicts) -> None:
        self.index = index
        self.on_verdicts = on_verdicts
        self.verdicts: list[Verdict] = [Failure("model", "")] * n
        self.left = n
        self.began_s: float | None = None


class Row:
    """One text on its way to a verdict."""

    __slots__ = ("arrived_s", "call", "length", "position", "suspect", "text")

    def __init__(self, call: Open, position: int, text: tuple[str, str], now_s: float) -> None:
        self.call = call
        self.position = position
        self.text = text
        self.length = len(text[0]) + len(text[1])
        self.arrived_s = now_s
        self.suspect = False
        """It was in a batch whose process died: it is computed alone."""

    def finish(self, verdict: Verdict, now_s: float) -> None:
        call = self.call
        call.verdicts[self.position] = verdict
        call.left -= 1
        if call.left == 0:
            elapsed_s = now_s - call.began_s if call.began_s is not None else 0.0
            call.on_verdicts(call.index, call.verdicts, elapsed_s * 1000)


class Batch:
    """Texts that the process has."""

    __slots__ = ("began_s", "number", "rows", "sent_s")

    def __init__(self, number: int, rows: list[Row], now_s: float) -> None:
        self.number = number
        self.rows = rows
        self.sent_s = now_s
        self.began_s = now_s

    def begin(self, now_s: float) -> None:
        self.began_s = now_s
        for row in self.rows:
            row.call.began_s = now_s


class RewardModel:
    """A `Backend`; `spec.args` are `RewardModelArguments`."""

    def __init__(self, spec: RewardSpec, section: RewardSection) -> None:
        """Raises `RewardLoadError` for arguments that are wrong."""
        try:
            self._arguments = RewardModelArguments.model_validate(spec.args)
        except ValidationError as error:
            raise RewardLoadError(
                f"the reward 'reward_model' cannot take these arguments: {error}"
            ) from error
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        self._timeout_s = spec.timeout_s
        self._inbox: Inbox[Row] = Inbox(MAX_QUEUED)
        self._inflight: deque[Batch] = deque()
        self._numbers = itertools.count()
        self._process: ModelProcess | None = None
        self._loaded = False
        self._overdue = False
        """The process is being killed for its deadline."""
        self._failed_starts = 0
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None
        self._call_s = 0.05

    @property
    def capacity(self) -> int:
        return AHEAD * self._arguments.max_batch

    @property
    def alive(self) -> int:
        return self.capacity if self._loaded else 0

    @property
    def call_seconds(self) -> float:
        return self._call_s

    @property
    def patience_s(self) -> float:
        """Beyond its deadline and its turn, how long a call may wait: the process may die at any moment, and
        the next one loads the model first."""
        return START_LIMIT_S

    @property
    def pid(self) -> int | None:
        """Of the model's process."""
        return self._process.pid if self._process is not None else None

    async def __aenter__(self) -> Self:
        """Raises `RewardLoadError` when the model cannot be loaded."""
        try:
            self._start()
            async with asyncio.timeout(START_LIMIT_S):
                while not self._loaded and not self.broken.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._break(f"the model was not loaded within {START_LIMIT_S:.0f} s")
        except OSError as error:
            self._break(f"its process cannot be started: {error}")
        except BaseException:
            await self._close()
            raise
        if self.broken.done():
            await self._close()
            raise self.broken.result()
        self._tasks = [
            asyncio.create_task(self._feed(), name="reward-model-feed"),
            asyncio.create_task(self._watch(), name="reward-model-watch"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls; waits while the queue is full."""
        for index, call in enumerate(calls):
            inputs = call if isinstance(call, list) else [call]
            if not inputs:
                on_verdicts(index, [], 0.0)
            pending = Open(index, len(inputs), on_verdicts)
            for position, given in enumerate(inputs):
                now_s = time.monotonic()
                row = Row(pending, position, ("", ""), now_s)
                try:
                    row.text = self._text(given)
                except MissingText as error:
                    row.finish(Failure("input", str(error)), now_s)
                    continue
                row.length = len(row.text[0]) + len(row.text[1])
                if not await self._inbox.put(row):
                    row.finish(self._refusal(), now_s)

    def _text(self, given: RewardInput) -> tuple[str, str]:
        if self._arguments.template == "chat":
            return given.prompt, given.response
        return fill(self._arguments.template, given), ""

    # --- the process ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._loaded = self._overdue = False
        self._process = ModelProcess(self._arguments, on_report=self._on_report, on_exit=self._on_exit)

    def _on_report(self, report: Report) -> None:
        now_s = time.monotonic()
        match report:
            case Scored(number, verdicts):
                head = self._inflight[0] if self._inflight else None
                if head is None or head.number != number or len(head.rows) != len(verdicts):
                    raise ValueError(
                        f"{len(verdicts)} verdicts for batch {number}, which it was not given so"
                    )
                batch = self._inflight.popleft()
                if self._inflight:
                    self._inflight[0].begin(now_s)
                self._call_s += 0.1 * (now_s - batch.sent_s - self._call_s)
                metrics.MODEL_BATCH.observe(len(batch.rows))
                for row, verdict in zip(batch.rows, verdicts, strict=True):
                    row.finish(verdict, now_s)
                self._inbox.news.set()
            case Loaded(device, dtype, max_tokens):
                log.info("reward model loaded", device=device, dtype=dtype, max_tokens=max_tokens)
                self._loaded = True
                self._failed_starts = 0
                self._changed.set()
                self._inbox.news.set()
            case LoadFailed(message):
                self._break(message)

    def _on_exit(self, cause: str) -> None:
        """The process is gone and its last reports are in."""
        was_loaded, self._loaded, self._process = self._loaded, False, None
        if self._inbox.closed or self.broken.done():
            self._refuse()
            return
        metrics.MODEL_DEATHS.inc()
        self._settle(cause)
        if not was_loaded:
            self._failed_starts += 1
            first = not self._tasks
            if first or self._failed_starts >= MAX_FAILED_STARTS:
                self._break(f"its process ended while loading the model: {cause}")
                return
        self._restarting = asyncio.create_task(self._restart())

    def _settle(self, cause: str) -> None:
        """Give the batch that a dead process computed its verdicts, and send the others round again."""
        if not self._inflight:
            log.warning("reward model died", cause=cause)
            return
        now_s = time.monotonic()
        head = self._inflight.popleft()
        back: list[Row] = []
        if self._overdue:
            log.warning("reward model was killed", reason="deadline", texts=len(head.rows))
            for row in head.rows:
                row.finish(Timeout(round(self._timeout_s * 1000)), now_s)
        elif len(head.rows) == 1:
            log.warning("reward model died", cause=cause)
            head.rows[0].finish(Failure("process_died", cause), now_s)
        else:
            log.warning("reward model died; each text of the batch goes alone", cause=cause)
            for row in head.rows:
                row.suspect = True
            back += head.rows
        for batch in self._inflight:
            back += batch.rows
        self._inflight.clear()
        self._inbox.items.extendleft(reversed(back))

    async def _restart(self) -> None:
        while not self._inbox.closed and not self.broken.done():
            if self._failed_starts:
                await asyncio.sleep(0.25 * 2**self._failed_starts)
            try:
                self._start()
                return
            except OSError as error:
                self._failed_starts += 1
                if self._failed_starts >= MAX_FAILED_STARTS:
                    self._break(f"its process cannot be started: {error}")

    # --- batches -------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Send batches as they fall due."""
        items, news, max_wait_s = self._inbox.items, self._inbox.news, self._arguments.max_wait_ms / 1000
        while True:
            news.clear()
            now_s = time.monotonic()
            while self._loaded and self._process is not None and (rows := self._due(now_s)):
                batch = Batch(next(self._numbers), rows, now_s)
                self._inflight.append(batch)
                if len(self._inflight) == 1:
                    batch.begin(now_s)
                self._process.send(Texts(batch.number, [row.text for row in rows]))
            idle = self._loaded and not self._inflight
            left_s = max(0.0, items[0].arrived_s + max_wait_s - now_s) if idle and items else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()

    def _due(self, now_s: float) -> list[Row]:
        """The next batch, taken out of what waits; empty when none is due."""
        items, size = self._inbox.items, self._arguments.max_batch
        idle = not self._inflight
        if not items or len(self._inflight) >= AHEAD or any(b.rows[0].suspect for b in self._inflight):
            return []
        if items[0].suspect:
            return [self._take(1)[0]] if idle else []
        if not is_due(
            len(items),
            now_s - items[0].arrived_s,
            idle=idle,
            max_batch=size,
            max_wait_s=self._arguments.max_wait_ms / 1000,
        ):
            return []
        # Whoever must go alone keeps its place at the front of the rest.
        oldest = list(
            itertools.takewhile(lambda row: not row.suspect, itertools.islice(items, WINDOW * size))
        )
        chosen = set(choose_batch([row.length for row in oldest], size))
        taken = self._take(len(oldest))
        items.extendleft(reversed([row for index, row in enumerate(taken) if index not in chosen]))
        return [row for index, row in enumerate(taken) if index in chosen]

    def _take(self, n: int) -> list[Row]:
        taken = [self._inbox.items.popleft() for _ in range(n)]
        self._inbox.taken()
        return taken

    async def _watch(self) -> None:
        """Enforce the deadline of the batch that is computed."""
        while True:
            await asyncio.sleep(min(TICK_S, self._timeout_s / 4))
            if not self._inflight or self._process is None or self._overdue:
                continue
            if time.monotonic() - self._inflight[0].began_s > self._timeout_s:
                self._overdue = True
                self._process.kill()

    # --- the end -------------------------------------------------------------------------------------

    def _break(self, message: str) -> None:
        if not self.broken.done():
            self.broken.set_result(RewardLoadError(f"the reward 'reward_model': {message}"))
        self._changed.set()
        self._refuse()

    def _refusal(self) -> Failure:
        why = str(self.broken.result()) if self.broken.done() else "the reward model was closed"
        return Failure("pool", why)

    def _refuse(self) -> None:
        now_s, refusal = time.monotonic(), self._refusal()
        rows = [row for batch in self._inflight for row in batch.rows]
        self._inflight.clear()
        for row in [*rows, *self._inbox.close()]:
            row.finish(refusal, now_s)

    async def _close(self) -> None:
        tasks = [*self._tasks, *([self._restarting] if self._restarting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._refuse()
        if self._process is not None:
            process = self._process
            process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await process.ended.wait()
