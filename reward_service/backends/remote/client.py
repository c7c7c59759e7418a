"""The reward `remote`: calls are scored by servers that speak docs/reward-rpc.md.

Promises: every call submitted gets its verdicts exactly once. A call begins when it is sent; it has the
reward's deadline then, and `ANSWER_GRACE_S` for the way back. A server that dies loses nothing: what it had
goes to another one, or waits for it to come back, at most `outage_s` while none answers. What a server
breaks, refuses or loses again and again is an error that says so, never a score of 0. At most `MAX_QUEUED`
calls wait.

A call may be scored twice, where the answer to the first time was lost; one verdict counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from areal_async.config.reward import RewardSection
from areal_async.rewards import RewardSpec
from areal_async.rpc.verdicts import Failure, Timeout, Verdict
from areal_async.runtime.log import get_logger
from areal_async.trajectory import TrajectoryError
from reward_service import metrics
from reward_service.backends import Call, OnVerdicts
from reward_service.backends.remote import RemoteArguments
from reward_service.backends.remote.connection import (
    RemoteServer,
    ServerBroken,
    ServerGone,
    ServerLate,
    ServerRefused,
)
from reward_service.backends.remote.schema import NOT_RUN, to_wire
from reward_service.backends.servers import pause_s
from reward_service.checking import as_verdict, clip
from reward_service.sdk import RewardInput, RewardLoadError

log = get_logger("reward")

VERDICT_DECODER = msgspec.json.Decoder(Verdict)
MAX_QUEUED = 8192
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Before a server that has no time is asked again, where it does not say when."""
TICK_S = 0.25
"""How often it is looked whether calls have waited too long for a server."""
REQUEST_ROOM_BYTES = 64 << 10
"""Part of a request's limit that its head and its arguments may take."""


@dataclass(eq=False)
class Pending:
    """One call on its way to its verdicts."""

    index: int
    inputs: list[RewardInput]
    on_verdicts: OnVerdicts
    queued_s: float = field(default_factory=time.monotonic)
    lost: int = 0
    refused: int = 0
    refused_s: float = 0.0
    alone: bool = False
    """It is sent by itself: what went wrong with it among others may be its own doing."""

    def end(self, verdicts: list[Verdict], elapsed_ms: float) -> None:
        self.on_verdicts(self.index, verdicts, elapsed_ms)

    def fail(self, kind: str, message: str, elapsed_ms: float = 0.0) -> None:
        self.end([Failure(kind, clip(message))] * len(self.inputs), elapsed_ms)


class RemoteBackend:
    """A `ScoringBackend`. Entering waits for a first server and raises `RewardLoadError`
    when none can be used."""

    def __init__(self, spec: RewardSpec, section: RewardSection, *, rng: random.Random | None = None) -> None:
        try:
            self._arguments = RemoteArguments.model_validate(spec.args)
            self._token = self._arguments.token()
        except ValueError as error:
            raise RewardLoadError(f"the reward remote: {error}") from error
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Only by a fault of this side: a server that is away may come back."""
        self._spec = spec
        self._rng = rng or random.Random()
        self._batch = self._arguments.batch if spec.scope == "episode" else 1
        self._request_s = 0.05
        self._replicas: list[RemoteServer] = []
        self._queue: deque[Pending] = deque()
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._away_since_s: float | None = None
        self._closed = False

    @property
    def capacity(self) -> int:
        return sum(replica.slots for replica in self._replicas) * self._batch

    @property
    def alive(self) -> int:
        now_s = time.monotonic()
        return sum(r.slots for r in self._replicas if r.ready(now_s)) * self._batch

    @property
    def call_seconds(self) -> float:
        return self._request_s

    async def __aenter__(self) -> Self:
        arguments = self._arguments
        try:
            for url in dict.fromkeys(arguments.urls):
                replica = RemoteServer(
                    url, arguments, self._spec, token=self._token, rng=self._rng, changed=self._news.set
                )
                self._replicas.append(replica)
                self._start(replica.keep())
            await self._await_first()
        except BaseException:
            await self.close()
            raise
        self._start(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls; waits while the queue is full. `on_verdicts` must not raise."""
        for index, call in enumerate(calls):
            pending = Pending(index, call if isinstance(call, list) else [call], on_verdicts)
            while len(self._queue) >= MAX_QUEUED and not self._closed:
                self._room.clear()
                await self._room.wait()
            if self._closed:
                pending.fail("pool", "the connection to the reward servers was closed")
            else:
                self._queue.append(pending)
                self._news.set()

    async def close(self) -> None:
        """End the requests under way, give every call its verdict. Safe to repeat."""
        self._closed = True
        tasks = [*self._tasks, *self._requests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._queue:
            self._queue.popleft().fail("pool", "the connection to the reward servers was closed")
        self._room.set()
        while self._replicas:
            await self._replicas.pop().close()

    # --- servers -------------------------------------------------------------------------------------

    async def _await_first(self) -> None:
        """Until one server is ready, or all say that they cannot be used, or the limit is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._arguments.connect_s):
                while not self.alive and not all(replica.unfit for replica in self._replicas):
                    self._news.clear()
                    await self._news.wait()
        if not self.alive:
            told = "; ".join(f"{replica.url}: {replica.trouble}" for replica in self._replicas)
            raise RewardLoadError(
                f"the reward remote: none of its servers can be used. {told}. Start one "
                "(`areal-async reward serve`), or correct reward.args.",
                may_pass=not all(replica.unfit for replica in self._replicas),
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """None of these tasks ends on its own: a fault in one must be heard, or calls would wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
            self.broken.set_result(RewardLoadError(f"the reward remote: {type(error).__name__}: {error}"))

    # --- calls ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Hand out what waits whenever there is room; end what has waited too long."""
        while True:
            self._news.clear()
            now_s = time.monotonic()
            while self._queue:
                free = [replica for replica in self._replicas if replica.has_room(now_s)]
                if not free:
                    break
                self._hand_out(
                    min(free, key=lambda one: (one.state.in_flight / one.slots, self._rng.random()))
                )
            self._note_outage(now_s)
            if len(self._queue) < MAX_QUEUED:
                self._room.set()
            # Rests and breakers end by the clock, not by an event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S if self._queue else None):
                    await self._news.wait()

    def _hand_out(self, replica: RemoteServer) -> None:
        batch, inputs = self._cut(replica)
        if batch:
            replica.state.begin()
            task = asyncio.create_task(self._request(replica, batch, inputs))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    def _cut(self, replica: RemoteServer) -> tuple[list[Pending], list[msgspec.Raw]]:
        """The next calls for `replica`, as many as a request may hold, and their inputs as it wants them."""
        most = min(self._batch, replica.limits.max_inputs)
        room_bytes = max(1, replica.limits.max_body_bytes - REQUEST_ROOM_BYTES)
        batch: list[Pending] = []
        inputs: list[msgspec.Raw] = []
        while self._queue:
            call = self._queue[0]
            if batch and (call.alone or batch[0].alone or len(inputs) >= most or self._spec.scope == "group"):
                break
            try:
                wants = replica.reward.wants
                written = [msgspec.Raw(msgspec.json.encode(to_wire(g, wants))) for g in call.inputs]
            except TrajectoryError as error:
                self._queue.popleft().fail("episode", str(error))
                continue
            except (TypeError, ValueError, OverflowError) as error:
                self._queue.popleft().fail("input", f"the input cannot be sent: {error}")
                continue
            size_bytes = sum(len(one) for one in written)
            if size_bytes > room_bytes and batch:
                break
            self._queue.popleft()
            batch.append(call)
            inputs += written
            room_bytes -= size_bytes
        return batch, inputs

    async def _request(self, replica: RemoteServer, batch: list[Pending], inputs: list[msgspec.Raw]) -> None:
        """One request, and what its end means for each of its calls."""
        began_s = time.monotonic()

        def elapsed_ms() -> float:
            return (time.monotonic() - began_s) * 1000

        try:
            answer = await replica.score(inputs)
        except ServerRefused as error:
            self._after_refusal(replica, batch, error, elapsed_ms())
        except ServerGone as error:
            self._after_loss(batch, "gone", f"the server {replica.url} was lost: {error}")
        except ServerLate:
            for call in batch:
                if len(batch) == 1:
                    limit_ms = round(self._spec.timeout_s * 1000)
                    call.end([Timeout(limit_ms)] * len(call.inputs), elapsed_ms())
                else:
                    # Which of them is slow is not known, and the others must not pay for it.
                    call.alone = True
                    self._again([call], "late")
        except ServerBroken as error:
            for call in batch:
                call.fail("remote", f"{replica.url}: {error}", elapsed_ms())
        except BaseException:  # closed, or a fault of this side's: either way each call has its verdict
            for call in batch:
                call.fail("pool", "the request to the reward server was broken off", elapsed_ms())
            raise
        else:
            self._request_s += 0.2 * (elapsed_ms() / 1000 - self._request_s)
            given = [one for call in batch for one in call.inputs]
            verdicts = iter(read_verdicts(answer.verdicts, given))
            unknown = []
            for call in batch:
                own = list(itertools.islice(verdicts, len(call.inputs)))
                if any(isinstance(verdict, Failure) and verdict.kind == NOT_RUN for verdict in own):
                    unknown.append(call)
                else:
                    call.end(own, elapsed_ms())
            self._after_busy(replica, unknown, "the server did not get to it in time", NOT_RUN)

    def _after_refusal(
        self, replica: RemoteServer, batch: list[Pending], error: ServerRefused, elapsed_ms: float
    ) -> None:
        refusal = error.refusal
        told = f"the server {replica.url} refused it: {error}"
        if refusal.kind in ("busy", "unavailable"):
            self._after_busy(replica, batch, told, refusal.kind, refusal.retry_after_ms / 1000)
        elif refusal.kind in ("invalid", "too_large") and len(batch) > 1:
            for call in batch:
                call.alone = True
            self._again(batch, refusal.kind)
        elif refusal.kind in ("internal", "unauthorized", "unknown_reward", "protocol"):
            # All but the first say that the server has become another one: it is asked again what it is.
            self._after_loss(batch, refusal.kind, told)
        else:
            for call in batch:
                call.fail("remote", told, elapsed_ms)

    def _after_busy(
        self, replica: RemoteServer, batch: list[Pending], told: str, cause: str, asked_s: float = 0.0
    ) -> None:
        """The server had no time for it: send it again, but not for ever."""
        now_s = time.monotonic()
        again = []
        for call in batch:
            call.refused += 1
            call.refused_s = call.refused_s or now_s
            if now_s - call.refused_s > self._arguments.outage_s:
                call.fail("rate_limited", f"{told} (for {self._arguments.outage_s:g} s)")
            else:
                again.append(call)
        if again and cause != NOT_RUN:
            tries = min(call.refused for call in again)
            pause = pause_s(tries, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            replica.state.rest(max(pause, asked_s * self._rng.uniform(1.0, 1.25)), now_s)
        self._again(again, cause)

    def _after_loss(self, batch: list[Pending], cause: str, told: str) -> None:
        again = []
        for call in batch:
            call.lost += 1
            call.alone = True
            if call.lost > self._arguments.retries:
                call.fail(
                    "unreachable" if cause == "gone" else "remote", f"{told} (for the {call.lost}. time)"
                )
            else:
                again.append(call)
        self._again(again, cause)

    def _again(self, batch: list[Pending], cause: str) -> None:
        if self._closed:
            for call in batch:
                call.fail("pool", "the connection to the reward servers was closed")
            return
        metrics.REMOTE_RESENT.labels(cause).inc(len(batch))
        self._queue.extendleft(reversed(batch))
        self._news.set()

    def _note_outage(self, now_s: float) -> None:
        """Give what waits its verdict when no server could be asked for `outage_s`."""
        if self.alive or self._requests:
            self._away_since_s = None
            return
        if self._away_since_s is None:
            self._away_since_s = now_s
        limit_s = self._arguments.outage_s
        told = "; ".join(f"{replica.url}: {replica.trouble}" for replica in self._replicas)
        while self._queue and now_s - max(self._away_since_s, self._queue[0].queued_s) > limit_s:
            self._queue.popleft().fail("unreachable", f"no reward server for {limit_s:g} s: {told}")


def read_verdicts(answered: Sequence[msgspec.Raw], inputs: Sequence[RewardInput]) -> list[Verdict]:
    """The verdict for each of `inputs`, checked as those of the pool are. One that is none is an error of the
    kind `remote`, and spoils no other. Of the same length as `inputs`."""
    verdicts: list[Verdict] = []
    for raw, given in zip(answered, inputs, strict=True):
        try:
            verdict = VERDICT_DECODER.decode(raw)
        except msgspec.MsgspecError as error:
            verdicts.append(Failure("remote", clip(f"the server's verdict is none: {error}")))
        else:
            verdicts.append(as_verdict(verdict, given))
    return verdicts
