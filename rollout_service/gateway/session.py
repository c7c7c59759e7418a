"""One episode's access to the policy over HTTP: its key, its limits, and its calls.

Promises: a session's key works until the session ends and never again. A call's answers are in the episode
when, and only when, the agent was sent all of them: whoever sends them calls `record` then. Weight updates in
mid-generation are the engine's business and change nothing here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from areal_async.config.rollout import GatewaySection
from areal_async.trajectory import EpisodeBuilder, Sampling
from rollout_service import metrics
from rollout_service.engines.base import (
    DeadlinePassed,
    EngineError,
    GenerateResult,
    RequestError,
)
from rollout_service.gateway.conversation import CallPlan, ConversationTree
from rollout_service.gateway.requests import (
    ApiError,
    CompletionRequest,
    CompletionResult,
    GatewayError,
    Ids,
    Message,
    SampledChoice,
    ToolCall,
    bad,
    unsupported,
)
from rollout_service.gateway.template import SampledText, StreamedText, canonical
from rollout_service.gateway.toolcalls import MARKERS, ParsedCall, parse
from rollout_service.workflows.context import call_seed

if TYPE_CHECKING:
    from rollout_service.workflows.context import Context

T = TypeVar("T")

CALLS_FROM = 1 << 48  # Seeds of calls are numbered from here on, apart from those of `ctx.generate`
ENDED = "the episode of this API key has ended"


@dataclass(frozen=True, slots=True)
class _SampledAnswer:
    """An answer that the engine gave: how it was asked for, what the agent is told."""

    sampling: Sampling
    result: GenerateResult
    said: SampledText
    choice: SampledChoice


@dataclass(slots=True)
class GatewayCall:
    """The answers of one call, and what recording them takes."""

    completion: CompletionResult
    plan: CallPlan
    sampled: list[_SampledAnswer]


Pieces = asyncio.Queue[tuple[int, Ids]]
"""The index and the newest ids of an answer, again and again, for the one client that streams it."""


class Session:
    """An agent's access to the policy during one episode. `ctx.gateway()` makes it."""

    def __init__(
        self,
        episode: Context,
        tree: ConversationTree,
        section: GatewaySection,
        *,
        job: str,
        address: str,
        max_model_len: int,
        trains: bool,
    ) -> None:
        self.api_key = f"areal-{job}-{secrets.token_urlsafe(24)}"
        self.origin = address  # `http://127.0.0.1:PORT`
        self.job = job
        self.tree = tree
        self._episode = episode
        self._section = section
        self._max_model_len = max_model_len
        self._trains = trains
        self.running = 0  # Answers in the making
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False
        self._broken: Exception | None = None

    # --- for the agent -------------------------------------------------------------------------------

    @property
    def openai_base_url(self) -> str:
        return f"{self.origin}/v1"

    @property
    def builder(self) -> EpisodeBuilder:
        """The episode, for rewards, anchors, metadata and texts."""
        return self._episode.builder

    @property
    def calls(self) -> int:
        """Calls recorded in the episode."""
        return self.tree.calls

    # --- for the server ------------------------------------------------------------------------------

    def start(self, asked: CompletionRequest, pieces: Pieces | None = None) -> asyncio.Task[GatewayCall]:
        """The task that answers `asked`, to be cancelled when the caller is gone. `pieces` gets what is
        sampled on its way. Raises `ApiError`."""
        self.check_open()
        task = asyncio.ensure_future(self._answered(asked, pieces))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def check_open(self) -> None:
        if self._ended:
            raise ApiError(401, ENDED, code="invalid_api_key")

    def stream_text(self, asked: CompletionRequest) -> StreamedText:
        """What may be told of an answer to `asked` while it is sampled."""
        stop = self._episode.sampling.stop if asked.stop is None else asked.stop
        template = self.tree.template
        return StreamedText(template, stop, MARKERS[template.format] if asked.parse_tools else ())

    async def close(self) -> None:
        """End every call, and the key."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_whole(self) -> None:
        """Raises `GatewayError` when an answer that the agent was sent is not in the episode."""
        if self._broken is not None:
            raise GatewayError(
                f"an answer that the agent was sent could not be recorded: {self._broken}"
            ) from self._broken

    # --- a call --------------------------------------------------------------------------------------

    async def _answered(self, asked: CompletionRequest, pieces: Pieces | None) -> GatewayCall:
        n = asked.n
        if self.running + n > self._section.max_calls:
            raise ApiError(
                429,
                f"{self.running} answers of this session are being made and {n} more were asked for, the "
                f"limit is {self._section.max_calls} (rollout.gateway.max_calls)",
                code="rate_limit_exceeded",
            )
        self.running += n
        try:
            async with asyncio.timeout(self._section.call_timeout_s):
                return await self._sampled(asked, pieces)
        except TimeoutError:
            raise ApiError(
                504,
                f"no answer within {self._section.call_timeout_s:g} s (rollout.gateway.call_timeout_s)",
                code="timeout",
            ) from None
        except RequestError as error:
            raise ApiError(400, str(error)) from error
        except DeadlinePassed as error:
            raise ApiError(504, str(error), code="timeout") from error
        except EngineError as error:
            raise ApiError(503, str(error), code="engine_unavailable") from error
        finally:
            self.running -= n

    async def _sampled(self, asked: CompletionRequest, pieces: Pieces | None) -> GatewayCall:
        plan = self.tree.plan(asked.prompt)
        if len(plan.ids) >= self._max_model_len:
            raise bad(
                "messages",
                f"the prompt is too long: {len(plan.ids)} tokens leave no room for an answer, "
                f"rollout.max_model_len is {self._max_model_len}",
                code="context_length_exceeded",
            )
        samplings = self._sampling(asked)
        results = await every(
            [self._one(plan, sampling, index, pieces) for index, sampling in enumerate(samplings)]
        )
        if any(result.finish_reason == "abort" for result in results):
            raise ApiError(503, "the engine ended the request", code="engine_unavailable")
        pairs = zip(samplings, results, strict=True)
        sampled = [self._shown(asked, sampling, result) for sampling, result in pairs]
        choices = tuple(one.choice for one in sampled)
        return GatewayCall(CompletionResult(len(plan.ids), choices), plan, sampled)

    async def _one(
        self, plan: CallPlan, sampling: Sampling, index: int, pieces: Pieces | None
    ) -> GenerateResult:
        number, self.tree.requests = self.tree.requests, self.tree.requests + 1
        request = self._episode.request(f"gateway-{number}", plan.ids, sampling)
        engine = self._episode.engine
        if pieces is None:
            return await engine.generate(request)
        return await engine.generate(request, lambda ids: pieces.put_nowait((index, ids)))

    def _sampling(self, asked: CompletionRequest) -> list[Sampling]:
        """Parameters of each of the answers asked for. Raises `ApiError` for what must not be trained on."""
        job, episode = self._episode.sampling, self._episode
        changes: dict[str, Any] = {}
        if self._section.sampling == "agent":
            named = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
            changes = {name: value for name, value in named.items() if value is not None}
            if self._trains:
                _check_trainable(changes)
        if asked.stop is not None:
            changes["stop"] = asked.stop
        if asked.max_tokens is not None:
            changes["max_new_tokens"] = min(asked.max_tokens, job.max_new_tokens)
        number = CALLS_FROM + self.tree.requests
        if asked.seed is not None:
            # The episode's own seed stays part of it: the samples of a group must differ.
            number = (1 << 63) + asked.seed % (1 << 63)
        base = call_seed(episode.seed, episode.sample, episode.attempt, number)
        return [
            msgspec.structs.replace(job, **changes, seed=call_seed(base, choice, 0, 0))
            for choice in range(asked.n)
        ]

    def _shown(self, asked: CompletionRequest, sampling: Sampling, result: GenerateResult) -> _SampledAnswer:
        """What the agent is told."""
        template, ids = self.tree.template, result.token_ids
        end = template.end_of(ids, result.finish_reason)
        body = template.body(ids[:-1] if end else ids)
        content, called = result.text, tuple[ParsedCall, ...]()
        if asked.parse_tools:
            cut = min((at for stop in sampling.stop if (at := body.find(stop)) >= 0), default=None)
            parsed = parse(body[:cut], template.format, asked.prompt.tools)
            if parsed.calls:
                content, called = parsed.text if parsed.text.strip() else "", parsed.calls
        written = tuple((call.name, canonical(call.arguments)) for call in called)
        calls = tuple(
            ToolCall(f"call_{secrets.token_hex(12)}", name, arguments) for name, arguments in written
        )
        choice = SampledChoice(content, calls, result.finish_reason, ids, result.logprobs)
        return _SampledAnswer(
            sampling, result, SampledText(template.decode(ids), content, written, end), choice
        )

    # --- a call that the agent was sent --------------------------------------------------------------

    def record(self, call: GatewayCall) -> None:
        """Make the answers part of the episode, so that they may be gone on from. Nothing waits
        in here: an episode has all of a call; one that has ended, nothing of it."""
        if self._ended:
            return
        try:
            self._record(call.plan, call.sampled)
        except Exception as error:
            # The agent goes on from an answer that is not there: such an episode must not be trained on.
            self._broken = error
            raise

    def _record(self, plan: CallPlan, sampled: Sequence[_SampledAnswer]) -> None:
        before = sum(self.tree.roots.values())
        asked, results = [one.sampling for one in sampled], [one.result for one in sampled]
        segments = self.tree.record(self.builder, plan, asked, results)
        if sum(self.tree.roots.values()) > before and plan.root is not None:
            metrics.GATEWAY_ROOTS.labels(plan.root).inc()
        for segment, one in zip(segments, sampled, strict=True):
            choice = one.choice
            self.builder.text(response=choice.content)
            self.tree.remember(
                plan,
                segment,
                choice.token_ids,
                one.said,
                reply_message(choice.content, choice.tool_calls),
                tuple(call.id for call in choice.tool_calls),
            )
            metrics.GATEWAY_TOKENS.inc(len(choice.token_ids))


def reply_message(content: str, calls: Sequence[ToolCall]) -> Message:
    """An answer as the message that the agent sends back."""
    tool_calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _check_trainable(changes: dict[str, Any]) -> None:
    """An importance ratio compares the policy with what was sampled from: at a temperature, untruncated."""
    good = {"temperature": lambda v: v > 0, "top_p": lambda v: v == 1, "top_k": lambda v: v == 0}
    for name, value in changes.items():
        if not good[name](value):
            raise unsupported(
                name,
                f"tokens sampled with {name} {value} cannot be trained on. Leave it out, or set "
                "rollout.gateway.sampling: job in the job file, to have it ignored",
            )


async def every(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all return; the first to raise ends the others, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
