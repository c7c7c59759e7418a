"""The reward `remote`: calls are scored by servers that speak
docs/reward-service.md#serve-a-reward-over-http.

Promises:
- Every submitted call gets its verdicts exactly once. A call begins when it is sent. It has the reward's
  deadline and `ANSWER_GRACE_S` for the way back.
- A dead server loses no call. Its calls go to another server or wait for its return, at most `outage_s` while
  no server answers.
- A call that servers break, refuse or lose repeatedly is an error with the reason. It is the answer's own
  fault only if the answer alone is too large for the server.
- At most `MAX_QUEUED` calls wait.

A call may be scored twice if its first answer was lost. One verdict counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.retry import pause_s
from areal_async.base.verdicts import Failure, FaultOf, Timeout, Verdict
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from areal_async.trajectory import TrajectoryError
from reward_service import metrics
from reward_service.backends import Call, OnVerdicts, inputs_of, set_within
from reward_service.backends.remote import RemoteArguments
from reward_service.backends.remote.connection import RemoteError, RemoteServer
from reward_service.backends.remote.schema import NOT_RUN, to_wire
from reward_service.checking import as_verdict, clip
from reward_service.sdk import RewardInput, RewardLoadError
from reward_service.verifiers import NEUTRAL

log = get_logger("reward")

VERDICT_DECODER = msgspec.json.Decoder(Verdict)
MAX_QUEUED = 8192
CLOSED = Failure("pool", "the connection to the reward servers was closed")
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0  # longest pause before a busy server is asked again, if it does not name a time
TICK_S = 0.25  # seconds between checks for calls that have waited too long
REQUEST_ROOM_BYTES = 64 << 10  # part of a request's limit that is reserved for its head and its arguments


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
    """Whether to send the call alone, because it may have made a request with several calls fail."""


class RemoteBackend:
    """A `ScoringBackend`. Entering waits for a first server, and raises `RewardLoadError` if none is
    usable."""

    def __init__(self, spec: RewardSpec, section: RewardSection) -> None:
        try:
            self._arguments = RemoteArguments.model_validate(spec.args)
            self._token = self._arguments.token()
        except ValueError as error:
            raise RewardLoadError(f"the reward remote: {error}") from error
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Done only after a bug on this side, because an unavailable server may come back."""
        self._spec = spec
        self._rng = random.Random()
        self._batch = self._arguments.batch if spec.scope == "episode" else 1
        self.call_seconds = 0.05
        self.replicas: list[RemoteServer] = []
        self._open: set[Pending] = set()
        """Calls without verdicts, in the queue and in requests in flight."""
        self._queue: deque[Pending] = deque()
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._away_since_s: float | None = None
        self._closed = False

    @property
    def capacity(self) -> int:
        return sum(replica.slots for replica in self.replicas) * self._batch

    @property
    def alive(self) -> int:
        now_s = time.monotonic()
        return sum(r.slots for r in self.replicas if r.ready(now_s)) * self._batch

    async def __aenter__(self) -> Self:
        arguments = self._arguments
        try:
            for url in dict.fromkeys(arguments.urls):
                replica = RemoteServer(
                    url, arguments, self._spec, token=self._token, rng=self._rng, changed=self._news.set
                )
                self.replicas.append(replica)
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
        """Queue calls. Waits while the queue is full. `on_verdicts` must not raise."""
        for index, call in enumerate(calls):
            pending = Pending(index, inputs_of(call), on_verdicts)
            while len(self._queue) >= MAX_QUEUED and not self._closed:
                self._room.clear()
                await self._room.wait()
            self._open.add(pending)
            if self._closed:
                self._fail(pending, CLOSED)
            else:
                self._queue.append(pending)
                self._news.set()

    async def close(self) -> None:
        """Stop the requests in flight and give every call its verdict. A repeated call is harmless."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._open:
            self._fail(next(iter(self._open)), CLOSED)
        self._queue.clear()
        self._room.set()
        while self.replicas:
            await self.replicas.pop().close()

    # --- servers -------------------------------------------------------------------------------------

    async def _await_first(self) -> None:
        """Wait until one server is ready, or all report that they cannot be used, or the limit is over."""
        until_s = time.monotonic() + self._arguments.connect_s
        while not self.alive and not (unfit := all(replica.unfit for replica in self.replicas)):
            self._news.clear()
            if not await set_within(self._news, until_s - time.monotonic()):
                break
        if not self.alive:
            told = f"the reward remote: none of its servers can be used. {self._troubles()}."
            mend = "Start one (`areal-async reward serve`), or correct reward.args."
            raise RewardLoadError(f"{told} {mend}", may_pass=not unfit)

    def _troubles(self) -> str:
        return "; ".join(f"{replica.url}: {replica.trouble}" for replica in self.replicas)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a task. An error in a task must be reported, or calls would wait forever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
            self.broken.set_result(RewardLoadError(f"the reward remote: {type(error).__name__}: {error}"))

    # --- calls ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Send waiting calls whenever there is room, and end calls that have waited too long."""
        while True:
            self._news.clear()
            now_s = time.monotonic()
            while self._queue:
                free = [replica for replica in self.replicas if replica.has_room(now_s)]
                if not free:
                    break
                replica = min(free, key=lambda one: (one.state.in_flight / one.slots, self._rng.random()))
                batch, inputs = self._cut(replica)
                if batch:
                    replica.state.begin()
                    self._start(self._request(replica, batch, inputs))
            self._note_outage(now_s)
            if len(self._queue) < MAX_QUEUED:
                self._room.set()
            # Rests and breakers end by the clock, without an event.
            await set_within(self._news, TICK_S if self._queue else None)

    def _cut(self, replica: RemoteServer) -> tuple[list[Pending], list[msgspec.Raw]]:
        """Return the next calls for `replica`, as many as fit into a request, and their encoded inputs."""
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
                self._fail(self._queue.popleft(), Failure("episode", clip(str(error))))
                continue
            except (TypeError, ValueError, OverflowError) as error:
                self._fail(
                    self._queue.popleft(), Failure("input", clip(f"the input cannot be sent: {error}"))
                )
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
        """Send one request, and handle its result for each of its calls."""
        began_s = time.monotonic()
        try:
            answered = await replica.score(inputs)
        except RemoteError as error:
            await self._after_error(replica, batch, error, (time.monotonic() - began_s) * 1000)
            return
        except Exception:  # a bug on this side: each call still gets its verdict
            for call in batch:
                self._fail(call, Failure("pool", "the request to the reward server was broken off"))
            raise
        elapsed_s = time.monotonic() - began_s
        self.call_seconds += 0.2 * (elapsed_s - self.call_seconds)
        asked = [one for call in batch for one in call.inputs]
        verdicts = [_read_verdict(*each) for each in zip(answered, asked, strict=True)]
        # In reverse, because retries go to the head of the queue and keep their order.
        for call in reversed(batch):
            own, verdicts = verdicts[-len(call.inputs) :], verdicts[: -len(call.inputs)]
            if any(isinstance(verdict, Failure) and verdict.kind == NOT_RUN for verdict in own):
                self._wait(call, NOT_RUN, "the server did not get to it in time")
            else:
                self._end(call, own, elapsed_s * 1000)

    async def _after_error(
        self, replica: RemoteServer, batch: list[Pending], error: RemoteError, elapsed_ms: float
    ) -> None:
        told = clip(f"the server {replica.url}: {error}")
        # In reverse, because retries go to the head of the queue and keep their order.
        for call in reversed(batch):
            match error.kind:
                case "busy" | "unavailable":
                    self._wait(call, error.kind, told)
                case "late" | "invalid" | "too_large" if len(batch) > 1:
                    # The failing call is unknown, and other calls must not fail with it.
                    call.alone = True
                    self._again(call, error.kind)
                case "late":
                    limit_ms = round(self._spec.timeout_s * 1000)
                    self._end(call, [Timeout(limit_ms)] * len(call.inputs), elapsed_ms)
                case "broken" | "invalid" | "too_large":
                    fault = await self._fault(error, replica, call)
                    self._fail(call, Failure("remote", told, fault=fault), elapsed_ms)
                case _:  # the server is lost, or another one has its address; its offer is requested again
                    call.lost, call.alone = call.lost + 1, True
                    if call.lost <= self._arguments.retries:
                        self._again(call, error.kind)
                        continue
                    kind = "unreachable" if error.kind == "gone" else "remote"
                    self._fail(call, Failure(kind, f"{told} (for the {call.lost}. time)"))
        if error.kind in ("busy", "unavailable"):
            tries = min(call.refused for call in batch)
            pause = pause_s(tries, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            asked_s = error.retry_after_s * self._rng.uniform(1.0, 1.25)
            replica.state.rest(max(pause, asked_s), time.monotonic())

    def _wait(self, call: Pending, cause: str, told: str) -> None:
        """Retry a call after the server was busy, up to a limit."""
        now_s = time.monotonic()
        call.refused += 1
        call.refused_s = call.refused_s or now_s
        if now_s - call.refused_s > self._arguments.outage_s:
            self._fail(call, Failure("rate_limited", f"{told} (for {self._arguments.outage_s:g} s)"))
        else:
            self._again(call, cause)

    def _again(self, call: Pending, cause: str) -> None:
        metrics.REMOTE_RESENT.labels(cause).inc()
        self._queue.appendleft(call)
        self._news.set()

    def _end(self, call: Pending, verdicts: list[Verdict], elapsed_ms: float) -> None:
        self._open.discard(call)
        call.on_verdicts(call.index, verdicts, elapsed_ms)

    def _fail(self, call: Pending, failure: Failure, elapsed_ms: float = 0.0) -> None:
        self._end(call, [failure] * len(call.inputs), elapsed_ms)

    async def _fault(self, error: RemoteError, replica: RemoteServer, call: Pending) -> FaultOf:
        """Return the fault of a refused call. The answer is at fault if the server accepts the same task with
        other answers."""
        if error.kind == "too_large":
            size_bytes = sum(map(len, _with_answers(call, "")))
            if size_bytes <= replica.limits.max_body_bytes - REQUEST_ROOM_BYTES:
                return FaultOf.ANSWER
        if error.kind == "invalid":
            replica.state.begin()
            with contextlib.suppress(RemoteError):
                await replica.score(_with_answers(call, NEUTRAL))
                return FaultOf.ANSWER
        return FaultOf.INFRASTRUCTURE

    def _note_outage(self, now_s: float) -> None:
        """Give waiting calls their verdict if no server was available for `outage_s`."""
        if self.alive or any(replica.state.in_flight for replica in self.replicas):
            self._away_since_s = None
            return
        self._away_since_s = now_s if self._away_since_s is None else self._away_since_s
        limit_s = self._arguments.outage_s
        while self._queue and now_s - max(self._away_since_s, self._queue[0].queued_s) > limit_s:
            told = clip(f"no reward server for {limit_s:g} s: {self._troubles()}")
            self._fail(self._queue.popleft(), Failure("unreachable", told))


def _with_answers(call: Pending, response: str) -> list[msgspec.Raw]:
    """Return the inputs of a call in the form to send, with `response` as each answer."""
    bare = (msgspec.structs.replace(g, response=response, metadata={}, blob=b"") for g in call.inputs)
    return [msgspec.Raw(msgspec.json.encode(to_wire(given, ()))) for given in bare]


def _read_verdict(raw: msgspec.Raw, given: RewardInput) -> Verdict:
    """Return a verdict, checked like the pool's verdicts.

    An invalid verdict becomes an error of the kind `remote` and does not affect others.
    """
    try:
        return as_verdict(VERDICT_DECODER.decode(raw), given)
    except (ValueError, RecursionError) as error:
        return Failure("remote", clip(f"the server's verdict is none: {error}"))
