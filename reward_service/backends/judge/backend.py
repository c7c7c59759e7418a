"""The reward `judge`: a language model behind OpenAI-compatible servers grades the responses.

Promises:
- Every call gets its verdicts exactly once, within `timeout_s` of the start of its last request.
- The call of an answer that gets no grade takes up to the same time again, because the judge is then asked to
  grade a neutral answer to the same task. If the neutral answer gets a grade, the first answer is at fault.
  Otherwise the verdict is a `Failure` of the infrastructure.
- At most `max_in_flight` requests are in flight. The queue of calls and the length of a reply are bounded.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.verdicts import Failure, FaultOf, Timeout, Verdict
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from areal_async.data.images import ImageError
from reward_service import metrics
from reward_service.backends import Call, MissingText, arguments_of, fill, inputs_of, set_within
from reward_service.backends.judge import JudgeArguments
from reward_service.backends.judge.images import REFUSED, image_parts, without_marks
from reward_service.backends.judge.replies import (
    ADVICE,
    CUT_BY,
    JudgeReply,
    NoGrade,
    Parser,
    Trouble,
    ask,
    clipped,
    field_of,
    quoted,
    verdict_of,
)
from reward_service.backends.queued import QueuedBackend
from reward_service.backends.servers import ClientLimits, HttpClient, ServerState, choose
from reward_service.sdk import RewardInput, RewardLoadError
from reward_service.verifiers import NEUTRAL

log = get_logger("judge")

START_PAUSE_S = 0.5
LIMITS = ClientLimits(
    most_bytes=4 << 20, connect_s=10.0, keepalive_s=2.0
)  # servers close their connections after 5 s
GREETING = "1 + 1 ="
"""Request at the start that shows whether a server answers. The request sets no limit for the length of the
reply, because some servers refuse such a limit."""

Vote = float | Failure | Timeout


class Judge(QueuedBackend):
    """A `ScoringBackend`. `spec.args` are `JudgeArguments`. The start waits up to `start_s` for a first
    server to answer."""

    def __init__(self, spec: RewardSpec, section: RewardSection, *, start_s: float = 30.0) -> None:
        """Create the judge. Raises `RewardLoadError` for invalid arguments."""
        super().__init__("judge", call_s=1.0)
        self._arguments = given = arguments_of(spec, JudgeArguments)
        self._timeout_s = spec.timeout_s
        self._start_s = start_s
        self._parse = Parser(given.parse, given.scale, given.grades)
        rng = random.Random()
        self._servers = [ServerState(url, rng) for url in dict.fromkeys(given.base_url)]
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(given.max_in_flight)
        self._structured = False  # whether its servers accept a schema for the reply
        self._http = HttpClient(self._key(), LIMITS)
        self._requests_most = given.votes
        self._trouble: Trouble | None = None  # the last trouble of any request, until a request succeeds

    @property
    def capacity(self) -> int:
        return max(1, self._arguments.max_in_flight // self._requests_most)

    @property
    def alive(self) -> int:
        resting = isinstance(choose(self._servers, time.monotonic()), float)
        return 0 if resting or not self._tasks else self.capacity

    async def __aenter__(self) -> Self:
        """Start the judge. Raises `RewardLoadError` if no server accepts a request."""
        try:
            await self._greet()
        except BaseException:
            await self._http.close()
            raise
        self.begin(self._arguments.max_in_flight)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()
        await self._http.close()

    def _key(self) -> str:
        name = self._arguments.api_key_env
        key = os.environ.get(name, "") if name else ""
        if name and not key:
            why = f"api_key_env names {name}, which is not set where the reward service runs"
            raise RewardLoadError(f"the reward 'judge': {why}. Set it to the key, or remove api_key_env.")
        return key

    async def _greet(self) -> None:
        """Send one request to each server, to check its key, model and path. At least one server must
        answer."""
        until_s = time.monotonic() + self._start_s
        while True:
            found = await asyncio.gather(*(self._hello(one.url) for one in self._servers))
            troubles = [trouble for trouble in found if isinstance(trouble, Trouble)]
            for trouble in troubles:
                if not trouble.passes or trouble.status == 200:
                    mend = ADVICE.get(trouble.status, "Correct reward.args.")
                    raise RewardLoadError(f"the reward 'judge' is refused: {trouble}. {mend}")
                log.warning("a judge's server does not take requests", error=str(trouble))
            # A server that limits the rate works.
            if len(troubles) < len(found) or any(trouble.status == 429 for trouble in troubles):
                there = [one for one in found if isinstance(one, bool)]
                self._structured = bool(there) and all(there)
                return
            if time.monotonic() >= until_s:
                told = f"the reward 'judge': no server takes requests: {troubles[0]}"
                raise RewardLoadError(f"{told}. Start it, or correct base_url in reward.args.", may_pass=True)
            await asyncio.sleep(START_PAUSE_S)

    async def _hello(self, url: str) -> Trouble | bool:
        """Return whether a server accepts a schema for the reply, or the reason why it accepts no
        requests."""
        try:
            async with asyncio.timeout(self._start_s):
                for structured in (True, False) if self._parse.form(structured=True) else (False,):
                    body = self._body(GREETING, "", 0, structured=structured)
                    try:
                        reply = await ask(self._http, url, body)
                        if structured:
                            field_of(reply.text)
                        return structured
                    except NoGrade:
                        continue
                    except Trouble as trouble:
                        if trouble.passes or not structured:
                            return trouble
        except TimeoutError:
            return Trouble("unreachable", f"{url} did not answer within {self._start_s:g} s", passes=True)
        return False

    # --- calls ---------------------------------------------------------------------------------------

    async def verdicts_of(self, call: Call, queued_s: float) -> tuple[list[Verdict], float]:
        inputs, begun_s = inputs_of(call), list[float]()
        self._requests_most = max(self._requests_most, self._arguments.votes * len(inputs))
        verdicts = list(await asyncio.gather(*(self._score(given, begun_s) for given in inputs)))
        # The call began with its last request. A call without a request took no time.
        return verdicts, time.monotonic() - max(begun_s) if begun_s else 0.0

    async def _score(self, given: RewardInput, begun_s: list[float]) -> Verdict:
        arguments = self._arguments
        try:
            most, media = arguments.max_images, given.media
            images = await asyncio.to_thread(image_parts, media, most) if media else []
            asked = self._question(given, images)
            neutral = self._question(msgspec.structs.replace(given, response=NEUTRAL), images)
        except (MissingText, ImageError) as error:
            return Failure("input", str(error))
        votes = await asyncio.gather(*(self._vote(asked, vote, begun_s) for vote in range(arguments.votes)))
        grades = [vote for vote in votes if isinstance(vote, float)]
        lost = [vote for vote in votes if not isinstance(vote, float)]
        verdict = verdict_of(grades, lost, arguments.votes // 2 + 1, arguments.aggregate)
        # Unavailable servers have other kinds. This kind means a refusal or a reply without a grade. The
        # neutral answer is sent now, because earlier replies do not show whether a key has been revoked
        # since.
        unjudged = isinstance(verdict, Failure) and verdict.kind == "judge"
        if unjudged and isinstance(await self._vote(neutral, 0, begun_s), float):
            return msgspec.structs.replace(verdict, fault=FaultOf.ANSWER)
        if unjudged and images and "status" in verdict.message:
            told = REFUSED.format(message=verdict.message.rstrip("."), images=len(images))
            return msgspec.structs.replace(verdict, message=told)
        return verdict

    def _question(self, given: RewardInput, images: Sequence[dict[str, Any]]) -> Callable[[int], bytes]:
        """Return a function that writes the request of a vote. Raises `MissingText`."""
        arguments, structured = self._arguments, self._structured
        shown = msgspec.structs.replace(given, response=quoted(given.response, arguments.quote))
        text = fill(arguments.template, shown) + self._parse.form(structured=structured)
        system = fill(arguments.system, shown)
        if given.media:
            text, system = without_marks(text), without_marks(system)
        content = [*images, {"type": "text", "text": text}] if images else text
        return partial(self._body, content, system, structured=structured)

    def _body(self, content: Any, system: str, vote: int, *, structured: bool = False) -> bytes:
        given = self._arguments
        messages = [{"role": "system", "content": system}] if system else []
        body = {
            "model": given.model,
            "messages": [*messages, {"role": "user", "content": content}],
            "max_tokens": given.max_tokens,
            "temperature": given.temperature,
            "seed": None if given.seed is None else given.seed + vote,
            "response_format": self._parse.schema if structured else None,
        }
        sent = {name: value for name, value in (body | given.extra_body).items() if value is not None}
        return msgspec.json.encode(sent)

    # --- requests ------------------------------------------------------------------------------------

    async def _vote(self, asked: Callable[[int], bytes], vote: int, begun_s: list[float]) -> Vote:
        """Return one vote, or the reason why there is none, and record when its request began."""
        async with self._slots:
            body = asked(vote)  # written here, because with images it may have megabytes
            begun_s.append(time.monotonic())
            trouble: Trouble | None = None
            on_the_wire = False
            left = self._arguments.retries
            try:
                async with asyncio.timeout(self._timeout_s):
                    while True:
                        server = await self._take()
                        on_the_wire = True
                        try:
                            return self._graded(await self._ask(server, body))
                        except Trouble as error:
                            on_the_wire, trouble = False, error
                        if not trouble.passes or left == 0:
                            return Failure(trouble.kind, str(trouble))
                        left -= 1
            except TimeoutError:
                told = trouble or self._trouble
                if on_the_wire or told is None:
                    return Timeout(round(self._timeout_s * 1000))
                return Failure(told.kind, f"{told} (until the deadline of {self._timeout_s:g} s)")

    async def _take(self) -> ServerState:
        """Return a server for one request. Waits while all servers rest after failures (`ServerState`)."""
        while True:
            choice = choose(self._servers, time.monotonic())
            if isinstance(choice, ServerState):
                choice.begin()
                return choice
            self._changed.clear()
            await set_within(self._changed, choice)

    async def _ask(self, server: ServerState, body: bytes) -> JudgeReply:
        """Send one request, after `begin()` of its server. Raises `Trouble`."""
        began_s = time.monotonic()
        try:
            reply = await ask(self._http, server.url, body)
        except Trouble as trouble:
            if trouble.passes:
                server.failed(began_s, time.monotonic(), trouble.told_s)
                self._trouble = trouble
            else:
                server.answered(time.monotonic())
            metrics.JUDGE_REQUESTS.labels(trouble.kind if trouble.passes else "refused").inc()
            raise
        except asyncio.CancelledError:
            server.abandoned(began_s, time.monotonic())
            metrics.JUDGE_REQUESTS.labels("abandoned").inc()
            raise
        finally:
            self._changed.set()
        server.answered(time.monotonic())
        self._trouble = None
        return reply

    def _graded(self, reply: JudgeReply) -> Vote:
        try:
            if reply.finish_reason in CUT_BY:  # its grade may be cut too, such as a 1 of a 10
                raise NoGrade(f"the reply was cut ({reply.finish_reason}): {clipped(reply.text)}")
            grade = self._parse(reply.text, structured=self._structured)
        except NoGrade as error:
            metrics.JUDGE_REQUESTS.labels("no_grade").inc()
            return Failure("judge", str(error))
        metrics.JUDGE_REQUESTS.labels("ok").inc()
        return grade
