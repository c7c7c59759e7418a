"""The reward `judge`: a language model behind OpenAI-compatible servers grades the responses.

Promises: every call gets its verdicts exactly once, within `timeout_s` of the moment its last request was let
begin; a reply without a grade is a `Failure`, never a grade of 0; no 60 seconds hold more requests than
`requests_per_minute`; at most `max_in_flight` requests are under way; equal requests under way are one; what
waits, what is kept and what is read of an answer is bounded.

Waiting for the rate limit is not part of a call's time: the call has not begun, and the buffer keeps its
episode. Waiting as long as a server asks (Retry-After) is. Limits and cache belong to one scoring process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Self

import msgspec
from pydantic import ValidationError

from areal_async.config.reward import RewardSection
from areal_async.rewards import RewardSpec
from areal_async.rpc.verdicts import Failure, Timeout, Verdict
from areal_async.runtime.log import get_logger
from reward_service import metrics
from reward_service.backends import Call, MissingText, OnVerdicts, fill
from reward_service.backends.judge import JudgeArguments
from reward_service.backends.judge.replies import (
    Endpoint,
    JudgeReply,
    NoGrade,
    Parser,
    Trouble,
    advice,
    verdict_of,
)
from reward_service.backends.servers import ServerState, choose
from reward_service.sdk import RewardInput, RewardLoadError

log = get_logger("judge")

MAX_QUEUED = 8192
START_LIMIT_S = 30.0
START_PAUSE_S = 0.5
GREETING = "1 + 1 ="
"""The request that shows at the start that a server answers. Not cut short: some servers refuse that."""
MINUTE_S = 60.0

Vote = float | Failure | Timeout


class Flight:
    """One request under way, for everyone who asks the same."""

    def __init__(self) -> None:
        self.begun_s: float | None = None
        """When the rate limit let it begin."""
        self.on_the_wire = False
        self.trouble: Trouble | None = None
        self.task: asyncio.Task[Vote]


class Judge:
    """A `ScoringBackend`; `spec.args` are `JudgeArguments`."""

    def __init__(self, spec: RewardSpec, section: RewardSection) -> None:
        """Raises `RewardLoadError` for arguments that are wrong."""
        try:
            self._arguments = JudgeArguments.model_validate(spec.args)
        except ValidationError as error:
            raise RewardLoadError(f"the reward 'judge' cannot take these arguments: {error}") from error
        given = self._arguments
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        self._timeout_s = spec.timeout_s
        self._needed = given.votes // 2 + 1
        self._parse = Parser(given.parse, given.scale, given.grades)
        self._label = spec.label
        self._requests_per_s = (given.requests_per_minute or math.inf) / MINUTE_S
        self._next_s = -math.inf
        rng = random.Random()
        self._servers = [ServerState(url, rng) for url in given.base_url]
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(given.max_in_flight)
        self._kept: OrderedDict[bytes, float] = OrderedDict()
        """Grades that are kept, by request: the one used last at the end."""
        self._flights: dict[bytes, Flight] = {}
        self._waiting: asyncio.Queue[tuple[int, Call, OnVerdicts]] = asyncio.Queue(MAX_QUEUED)
        self._closed = False
        self._runners: list[asyncio.Task[None]] = []
        self._endpoint: Endpoint | None = None
        self._call_s = 1.0
        self._requests_most = given.votes
        self._trouble: Trouble | None = None
        """The last one of any request, until a request succeeds."""

    @property
    def capacity(self) -> int:
        """As many as may be under way, and no more than the rate lets begin within one deadline."""
        by_rate = self._requests_per_s * self._timeout_s
        return max(1, math.floor(min(self._arguments.max_in_flight, by_rate) / self._requests_most))

    @property
    def alive(self) -> int:
        resting = isinstance(choose(self._servers, time.monotonic()), float)
        return 0 if resting or self.broken.done() or self._endpoint is None else self.capacity

    @property
    def call_seconds(self) -> float:
        """What a call takes; more where the rate limit is what calls wait for."""
        by_rate = self._requests_per_s / self._requests_most
        return max(self._call_s, self.capacity / by_rate)

    async def __aenter__(self) -> Self:
        """Raises `RewardLoadError` when no server takes a request."""
        name = self._arguments.api_key_env
        key = os.environ.get(name, "") if name else ""
        if name and not key:
            raise RewardLoadError(
                f"the reward 'judge': api_key_env names the variable {name}, which is not set where the "
                "reward service runs. Set it to the key, or remove api_key_env."
            )
        self._endpoint = Endpoint(key)
        try:
            await self._greet()
        except BaseException:
            await self._endpoint.close()
            self._endpoint = None
            raise
        self._runners = [
            asyncio.create_task(self._run(), name="judge") for _ in range(self._arguments.max_in_flight)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends what is under way; every call left gets its verdict."""
        self._closed = True
        flights = [flight.task for flight in self._flights.values()]
        for task in [*self._runners, *flights]:
            task.cancel()
        await asyncio.gather(*self._runners, *flights, return_exceptions=True)
        self._refuse_waiting()
        if self._endpoint is not None:
            await self._endpoint.close()
            self._endpoint = None

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls; waits while the queue is full."""
        for index, call in enumerate(calls):
            episodes = len(call) if isinstance(call, list) else 1
            self._requests_most = max(self._requests_most, self._arguments.votes * episodes)
            await self._waiting.put((index, call, on_verdicts))
            if self._closed:
                self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Give what waits its verdict; whoever waited for room comes here too."""
        while not self._waiting.empty():
            index, call, on_verdicts = self._waiting.get_nowait()
            on_verdicts(index, _closed(call), 0.0)

    async def _greet(self) -> None:
        """One request to each server: key, model and path are right, and at least one answers."""
        body = self._body(GREETING, "", 0)
        until_s = time.monotonic() + START_LIMIT_S
        while True:
            found = await asyncio.gather(*(self._hello(server.url, body) for server in self._servers))
            troubles = [trouble for trouble in found if trouble is not None]
            for trouble in troubles:
                if not trouble.passes:
                    raise RewardLoadError(
                        f"the reward 'judge' is refused: {trouble}. {advice(trouble.status)}"
                    )
                log.warning("a judge's server does not take requests", error=str(trouble))
            # A server that limits the rate is there.
            if len(troubles) < len(found) or any(trouble.status == 429 for trouble in troubles):
                return
            if time.monotonic() >= until_s:
                message = (
                    f"no server takes requests: {troubles[0]}. Start it, or correct base_url in reward.args."
                )
                raise RewardLoadError(f"the reward 'judge': {message}", may_pass=True)
            await asyncio.sleep(START_PAUSE_S)

    async def _hello(self, url: str, body: bytes) -> Trouble | None:
        assert self._endpoint is not None
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self._endpoint.ask(url, body)
        except TimeoutError:
            return Trouble("unreachable", f"{url} did not answer within {START_LIMIT_S:g} s", passes=True)
        except Trouble as trouble:
            return trouble
        return None

    # --- calls ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            index, call, on_verdicts = await self._waiting.get()
            flights: list[Flight] = []
            began_s = time.monotonic()
            inputs = call if isinstance(call, list) else [call]
            try:
                verdicts = list(await asyncio.gather(*(self._score(given, flights) for given in inputs)))
            except asyncio.CancelledError:
                on_verdicts(index, _closed(call), 0.0)
                raise
            except Exception as error:  # a mistake of ours must not leave a call without a verdict
                log.exception("the judge failed")
                verdicts = [Failure("judge", f"{type(error).__name__}: {error}")] * len(inputs)
            ended_s = time.monotonic()
            # The call began when its last request was let begin; one that needed none took no time.
            elapsed_s = min((ended_s - (flight.begun_s or began_s) for flight in flights), default=0.0)
            self._call_s += 0.1 * (elapsed_s - self._call_s)
            on_verdicts(index, verdicts, elapsed_s * 1000)

    async def _score(self, given: RewardInput, flights: list[Flight]) -> Verdict:
        try:
            text = fill(self._arguments.template, given)
            system = fill(self._arguments.system, given)
        except MissingText as error:
            return Failure("input", str(error))
        votes = await asyncio.gather(
            *(self._vote(text, system, vote, flights) for vote in range(self._arguments.votes))
        )
        grades = [vote for vote in votes if isinstance(vote, float)]
        lost = [vote for vote in votes if not isinstance(vote, float)]
        return verdict_of(grades, lost, self._needed, self._arguments.aggregate)

    async def _vote(self, text: str, system: str, vote: int, flights: list[Flight]) -> Vote:
        """One vote: kept, under way, or asked for."""
        body = self._body(text, system, vote)
        key = blake2b(b"%d\0%s" % (vote, body), digest_size=20).digest()
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            metrics.CACHE.labels(self._label, "hit").inc()
            return kept
        flight = self._flights.get(key)
        metrics.CACHE.labels(self._label, "miss" if flight is None else "hit").inc()
        if flight is None:
            flight = self._flights[key] = Flight()
            flight.task = asyncio.create_task(self._fly(flight, key, body))
            flight.task.add_done_callback(lambda _: self._flights.pop(key, None))
        flights.append(flight)
        return await flight.task

    def _body(self, text: str, system: str, vote: int) -> bytes:
        given = self._arguments
        body: dict[str, Any] = {"model": given.model}
        messages = [{"role": "system", "content": system}] if system else []
        body["messages"] = [*messages, {"role": "user", "content": text}]
        body["max_tokens"] = given.max_tokens
        body["temperature"] = given.temperature
        if given.seed is not None:
            body["seed"] = given.seed + vote
        body |= given.extra_body
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})

    # --- requests ------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight, key: bytes, body: bytes) -> Vote:
        """Wait for the rate limit and ask; the vote, or the reason why there is none."""
        async with self._slots:
            await self._admit()
            flight.begun_s = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout_s):
                    left = self._arguments.retries
                    while True:
                        outcome = await self._attempt(flight, body)
                        if isinstance(outcome, JudgeReply):
                            return self._graded(key, outcome)
                        if not outcome.passes or left == 0:
                            return Failure(outcome.kind, str(outcome))
                        left -= 1
                        await self._admit()
            except TimeoutError:
                trouble = None if flight.on_the_wire else flight.trouble or self._trouble
                if trouble is None:
                    return Timeout(round(self._timeout_s * 1000))
                return Failure(trouble.kind, f"{trouble} (until the deadline of {self._timeout_s:g} s)")

    async def _admit(self) -> None:
        """Wait for the rate limit: requests are spaced evenly; first come, first served."""
        now_s = time.monotonic()
        begins_s = max(now_s, self._next_s)
        self._next_s = begins_s + 1 / self._requests_per_s
        if begins_s > now_s:
            await asyncio.sleep(begins_s - now_s)

    async def _attempt(self, flight: Flight, body: bytes) -> JudgeReply | Trouble:
        server = await self._take()
        assert self._endpoint is not None
        flight.on_the_wire = True
        began_s = time.monotonic()
        try:
            reply = await self._endpoint.ask(server.url, body)
        except Trouble as trouble:
            now_s = time.monotonic()
            if trouble.passes:
                server.failed(began_s, now_s, trouble.told_s)
                self._trouble = trouble
            else:
                server.answered(now_s)
            metrics.JUDGE_REQUESTS.labels(trouble.kind if trouble.passes else "refused").inc()
            flight.trouble, flight.on_the_wire = trouble, False
            return trouble
        except asyncio.CancelledError:
            server.abandoned(began_s, time.monotonic())
            metrics.JUDGE_REQUESTS.labels("abandoned").inc()
            raise
        else:
            server.answered(time.monotonic())
            flight.on_the_wire = False
        finally:
            self._changed.set()
        self._trouble = None
        return reply

    async def _take(self) -> ServerState:
        """A server for one request; waits while all rest."""
        while True:
            choice = choose(self._servers, time.monotonic())
            if isinstance(choice, ServerState):
                choice.begin()
                return choice
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(choice):
                    await self._changed.wait()

    def _graded(self, key: bytes, reply: JudgeReply) -> Vote:
        try:
            grade = self._parse(reply.text)
        except NoGrade as error:
            metrics.JUDGE_REQUESTS.labels("no_grade").inc()
            cut = " (it was cut at max_tokens)" if reply.finish_reason == "length" else ""
            return Failure("judge", f"{error}{cut}")
        metrics.JUDGE_REQUESTS.labels("ok").inc()
        # Only a reply with a grade is kept: another attempt at the others may bring one.
        self._kept[key] = grade
        if len(self._kept) > self._arguments.cache_entries:
            self._kept.popitem(last=False)
        return grade


def _closed(call: Call) -> list[Verdict]:
    return [Failure("pool", "the judge was closed")] * (len(call) if isinstance(call, list) else 1)
