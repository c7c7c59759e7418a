"""The reward `remote`: servers score the calls, over the protocol of
docs/reward-service.md#serve-a-reward-over-http.

Promises:
- Every submitted call gets its verdicts exactly once. A call begins when it is sent. It may then take until
  the reward's deadline, plus `ANSWER_GRACE_S` for the answer to arrive.
- The death of a server loses no call. Its calls go to another server. If no server answers, they wait at most
  `outage_s` for one to return.
- If servers repeatedly reply to a call with a broken answer, a refusal or nothing, the verdict is an error
  with the reason. The model's answer counts as at fault only if the server would accept the same task with
  another answer.

If the reply to a call was lost, the call may be scored twice. Only one verdict counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from typing import Self

import msgspec

from areal_async.base.retry import pause_s
from areal_async.base.verdicts import Failure, FaultOf, Timeout, Verdict
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from areal_async.trajectory import TrajectoryError
from reward_service import metrics
from reward_service.backends import Call, inputs_of, set_within
from reward_service.backends.queued import QueuedBackend
from reward_service.backends.remote import RemoteArguments
from reward_service.backends.remote.connection import RemoteError, RemoteServer
from reward_service.backends.remote.schema import NOT_RUN, to_wire
from reward_service.checking import as_verdict, clip
from reward_service.sdk import RewardInput, RewardLoadError
from reward_service.verifiers import NEUTRAL

VERDICT_DECODER = msgspec.json.Decoder(Verdict)
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0  # longest pause before a busy server is asked again, if it does not name a time
TICK_S = 0.25  # seconds between two looks at servers without an event
REQUEST_ROOM_BYTES = 64 << 10  # part of a request's limit that is reserved for its head and its arguments


@dataclass
class FailedTries:
    """Counts of the failed tries of one call."""

    lost: int = 0
    refused: int = 0
    refused_s: float = 0.0
    """Time of the first refusal."""


class RemoteBackend(QueuedBackend):
    """A `ScoringBackend`. `async with` waits for a first server, and raises `RewardLoadError` if none is
    usable."""

    def __init__(self, spec: RewardSpec, section: RewardSection) -> None:
        super().__init__("remote", call_s=0.05)
        try:
            self._arguments = RemoteArguments.model_validate(spec.args)
            self._token = self._arguments.token()
        except ValueError as error:
            raise RewardLoadError(f"the reward remote: {error}") from error
        self._spec = spec
        self._rng = random.Random()
        self.replicas: list[RemoteServer] = []
        self._news = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._away_since_s: float | None = None

    @property
    def capacity(self) -> int:
        return sum(replica.slots for replica in self.replicas)

    @property
    def wants_images(self) -> bool:
        """Return whether a server wants images, or has not said yet."""
        return any(not one.reward.name or "media" in one.reward.wants for one in self.replicas)

    @property
    def alive(self) -> int:
        now_s = time.monotonic()
        return sum(r.slots for r in self.replicas if r.ready(now_s))

    async def __aenter__(self) -> Self:
        arguments = self._arguments
        try:
            for url in dict.fromkeys(arguments.urls):
                replica = RemoteServer(
                    url, arguments, self._spec, token=self._token, rng=self._rng, changed=self._news.set
                )
                self.replicas.append(replica)
                self._keepers.append(asyncio.create_task(replica.keep()))
            await self._await_first()
        except BaseException:
            await self.close()
            raise
        self.begin(arguments.max_in_flight * len(self.replicas))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the requests in flight and give every call its verdict. It is harmless to call this again."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self.end()
        while self.replicas:
            await self.replicas.pop().close()

    # --- servers -------------------------------------------------------------------------------------

    async def _await_first(self) -> None:
        """Wait until one server is ready, all servers have turned out unusable, or the time limit has
        passed."""
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

    # --- calls ---------------------------------------------------------------------------------------

    async def verdicts_of(self, call: Call, queued_s: float) -> tuple[list[Verdict], float]:
        inputs, tries = inputs_of(call), FailedTries()
        while True:
            if (replica := await self._take(queued_s)) is None:
                told = f"no reward server for {self._arguments.outage_s:g} s: {self._troubles()}"
                return [Failure("unreachable", clip(told))] * len(inputs), 0.0
            wants = replica.reward.wants
            if "media" in wants and not all(each.data for given in inputs for each in given.media):
                told = f"the server {replica.url} wants images only now: restart the reward service"
                return [Failure("remote", clip(told))] * len(inputs), 0.0
            try:
                written = [msgspec.Raw(msgspec.json.encode(to_wire(given, wants))) for given in inputs]
            except TrajectoryError as error:
                return [Failure("episode", clip(str(error)))] * len(inputs), 0.0
            except (TypeError, ValueError, OverflowError) as error:
                return [Failure("input", clip(f"the input cannot be sent: {error}"))] * len(inputs), 0.0
            replica.state.begin()
            began_s, cause = time.monotonic(), NOT_RUN
            failure: Failure | Timeout | None = None
            try:
                answered = await replica.score(written)
            except RemoteError as error:
                cause, failure = error.kind, await self._after(error, replica, inputs, tries)
            else:
                verdicts = [_read_verdict(*each) for each in zip(answered, inputs, strict=True)]
                if not any(isinstance(verdict, Failure) and verdict.kind == NOT_RUN for verdict in verdicts):
                    return verdicts, time.monotonic() - began_s
                failure = self._after_refusal(tries, "the server did not get to it in time")
            if failure is not None:
                return [failure] * len(inputs), time.monotonic() - began_s
            metrics.REMOTE_RESENT.labels(cause).inc()

    async def _take(self, queued_s: float) -> RemoteServer | None:
        """Wait for a server with room and return it, or return None if no server was available for
        `outage_s`."""
        while True:
            now_s = time.monotonic()
            free = [replica for replica in self.replicas if replica.has_room(now_s)]
            if free:
                self._away_since_s = None
                return min(free, key=lambda one: (one.state.in_flight / one.slots, self._rng.random()))
            if self.alive or any(replica.state.in_flight for replica in self.replicas):
                self._away_since_s = None
            else:
                self._away_since_s = now_s if self._away_since_s is None else self._away_since_s
                if now_s - max(self._away_since_s, queued_s) > self._arguments.outage_s:
                    return None
            # Rests and breakers end by the clock, without an event.
            self._news.clear()
            await set_within(self._news, TICK_S)

    async def _after(
        self, error: RemoteError, replica: RemoteServer, inputs: list[RewardInput], tries: FailedTries
    ) -> Failure | Timeout | None:
        """Return the verdict of a call after a failed request, or None to try again."""
        told = clip(f"the server {replica.url}: {error}")
        match error.kind:
            case "busy" | "unavailable":
                pause = pause_s(
                    tries.refused + 1, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S
                )
                asked_s = error.retry_after_s * self._rng.uniform(1.0, 1.25)
                replica.state.rest(max(pause, asked_s), time.monotonic())
                return self._after_refusal(tries, told)
            case "late":
                return Timeout(round(self._spec.timeout_s * 1000))
            case "broken" | "invalid" | "too_large":
                return Failure("remote", told, fault=await self._fault(error, replica, inputs))
        # The server is lost, or another one has its address; its offer is requested again.
        tries.lost += 1
        if tries.lost <= self._arguments.retries:
            return None
        kind = "unreachable" if error.kind == "gone" else "remote"
        return Failure(kind, f"{told} (for the {tries.lost}. time)")

    def _after_refusal(self, tries: FailedTries, told: str) -> Failure | None:
        """Return the verdict of a call that servers have refused for too long, or None to try again."""
        tries.refused += 1
        now_s = time.monotonic()
        tries.refused_s = tries.refused_s or now_s
        if now_s - tries.refused_s <= self._arguments.outage_s:
            return None
        return Failure("rate_limited", f"{told} (for {self._arguments.outage_s:g} s)")

    async def _fault(self, error: RemoteError, replica: RemoteServer, inputs: list[RewardInput]) -> FaultOf:
        """Return the fault text of a refused call. The answer is at fault if the server accepts the same task
        with other answers."""
        if error.kind == "too_large" and len(inputs) <= replica.limits.max_inputs:
            size_bytes = sum(map(len, _with_answers(inputs, "", replica)))
            if size_bytes <= replica.limits.max_body_bytes - REQUEST_ROOM_BYTES:
                return FaultOf.ANSWER
        if error.kind == "invalid":
            replica.state.begin()
            with contextlib.suppress(RemoteError):
                await replica.score(_with_answers(inputs, NEUTRAL, replica))
                return FaultOf.ANSWER
        return FaultOf.INFRASTRUCTURE


def _with_answers(inputs: list[RewardInput], response: str, replica: RemoteServer) -> list[msgspec.Raw]:
    """Return the inputs in the form for sending, each with `response` as its answer, and with its images."""
    wants = {*replica.reward.wants} - {"blob"}
    bare = (msgspec.structs.replace(g, response=response, metadata={}, blob=b"") for g in inputs)
    return [msgspec.Raw(msgspec.json.encode(to_wire(given, wants))) for given in bare]


def _read_verdict(raw: msgspec.Raw, given: RewardInput) -> Verdict:
    """Return a verdict, checked like the pool's verdicts.

    An invalid verdict becomes an error of the kind `remote` and does not affect other verdicts.
    """
    try:
        return as_verdict(VERDICT_DECODER.decode(raw), given)
    except (ValueError, RecursionError) as error:
        return Failure("remote", clip(f"the server's verdict is none: {error}"))
