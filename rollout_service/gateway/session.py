"""The gateway's side of one agent's access to the policy: its limits and its calls.

Promises: a call's answers are recorded if and only if the agent received all of them. To that end, the sender
calls `record` once the agent has received the answers. A call is aborted if its client has disconnected.
Weight updates during generation are handled by the engine and have no effect here.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.base.errors import FaultError, RpcTimeout, WireError
from areal_async.config.rollout import GatewaySection
from areal_async.models.answers import opens_thought
from areal_async.rpc.client import Client
from areal_async.rpc.gateway_messages import (
    DropCall,
    OpenSession,
    PlacedImage,
    RecordCalls,
    RecordedCall,
    Sample,
    SampledAnswer,
    SampleRefused,
    Unrecorded,
)
from areal_async.trajectory import Sampling
from rollout_service.gateway.conversation import CallPlan, ConversationTree
from rollout_service.gateway.openai import ChatCall
from rollout_service.gateway.requests import ENDED, ApiError, Ids, SampledChoice, bad, unsupported
from rollout_service.gateway.template import canonical
from rollout_service.gateway.toolcalls import ParsedCall, aside, parse
from rollout_service.workflows.turns import SampledText

Logprobs = npt.NDArray[np.float32]


class GatewayCall(NamedTuple):
    """The answers of one call, with the plan of the call."""

    plan: CallPlan
    choices: tuple[SampledChoice, ...]


@dataclass(eq=False, slots=True)
class RunningCall:
    """A call in progress, until it is recorded or dropped."""

    number: int
    session: AgentCalls
    asked: ChatCall
    task: asyncio.Task[GatewayCall] = field(init=False)
    recorded: bool = False


class Recorder:
    """Sender of calls to record. Calls that end in the same turn of the event loop share a request, because
    requests are a large part of the gateway's work."""

    def __init__(self, worker: Client) -> None:
        self.worker = worker
        self._waiting: list[RecordedCall] = []
        self._sending: asyncio.Task[Unrecorded] | None = None

    def add(self, call: RecordedCall) -> tuple[asyncio.Task[Unrecorded], int]:
        """Return the request that will record the call, and the position of the call in it."""
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._sent())
        self._waiting.append(call)
        return self._sending, len(self._waiting) - 1

    async def _sent(self) -> Unrecorded:
        calls, self._waiting, self._sending = self._waiting, [], None
        return await self.worker.call(RecordCalls(calls))


@dataclass(eq=False)
class AgentCalls:
    """Calls of one key to one policy."""

    opened: OpenSession
    tree: ConversationTree
    recorder: Recorder
    section: GatewaySection
    policy: str
    max_model_len: int
    trains: bool

    def __post_init__(self) -> None:
        self._job_sampling = self.opened.sampling[self.policy]
        self._running, self.ended = 0, False  # Answers in progress; whether the key has ended
        self._calls: dict[RunningCall, None] = {}
        self.worker = self.recorder.worker
        self._recording: set[asyncio.Future[Any]] = set()

    def start(self, number: int, asked: ChatCall) -> RunningCall:
        """Begin to answer the conversation `asked`. The caller must call `let_go` at the end. Raises
        `ApiError`."""
        if self.ended:
            raise ApiError(401, ENDED, code="invalid_api_key")
        call = RunningCall(number, self, asked)
        call.task = asyncio.ensure_future(self._answered(call))
        self._calls[call] = None
        return call

    def let_go(self, call: RunningCall) -> None:
        """End a call, whatever its state."""
        del self._calls[call]
        if not call.recorded:
            call.task.cancel()
            self._keep(self.worker.call(DropCall(self.opened.key, call.number)))

    async def close(self) -> None:
        """End every call, and invalidate the key. When this returns, all answers that the agent received are
        recorded."""
        self.ended = True
        tasks = [call.task for call in self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._recording, return_exceptions=True)

    # --- a call --------------------------------------------------------------------------------------

    async def _answered(self, call: RunningCall) -> GatewayCall:
        n = call.asked.body.n
        if self._running + n > self.section.max_calls:
            raise ApiError(
                429,
                f"{self._running} answers of this session are being made and {n} more were asked for, the "
                f"limit is {self.section.max_calls} (rollout.gateway.max_calls)",
                code="rate_limit_exceeded",
            )
        self._running += n
        try:
            return await self._sampled(call.number, call.asked)
        finally:
            self._running -= n

    async def _sampled(self, number: int, asked: ChatCall) -> GatewayCall:
        if asked.prompt.images.any:
            plan = await self.tree.template.aside(self.tree.plan, asked.prompt)
        else:
            plan = self.tree.plan(asked.prompt)
        if len(plan.ids) >= self.max_model_len:
            raise bad(
                "messages",
                f"the prompt is too long: {len(plan.ids)} tokens leave no room for an answer, "
                f"rollout.max_model_len is {self.max_model_len}",
                code="context_length_exceeded",
            )
        parent = plan.parent
        request = Sample(
            self.opened.key,
            number,
            self._sampling(asked),
            self.policy,
            asked.body.n,
            asked.body.seed,
            None if parent is None else parent.answer,
            0 if parent is None else len(parent.path),
            plan.kind,
            plan.root or "",
            [PlacedImage(image.digest, image.first, image.count) for image in plan.new_media],
        )
        sent = [plan.ids.tobytes(), *(image.data for image in plan.new_media)]
        limit_s = self.section.call_timeout_s
        try:
            reply, attachments = await self.worker.exchange(request, timeout_s=limit_s, attachments=sent)
        except RpcTimeout:
            late = f"no answer within {limit_s:g} s (rollout.gateway.call_timeout_s)"
            raise ApiError(504, late, code="timeout") from None
        except WireError as error:
            raise ApiError(503, f"the worker does not answer: {error}", code="engine_unavailable") from error
        if isinstance(reply, SampleRefused):
            raise ApiError(reply.status, reply.message, code=reply.code)
        ids = np.frombuffer(attachments[0], np.int32)
        logprobs = np.frombuffer(attachments[1], np.float32)
        opened, choices, end = opens_thought(plan.given.text), list[SampledChoice](), 0
        for answer in reply.answers:
            begin, end = end, end + answer.units
            own = (answer, ids[begin:end], logprobs[begin:end])
            choices.append(await self._shown(asked, opened, *own))
        return GatewayCall(plan, tuple(choices))

    def _sampling(self, asked: ChatCall) -> Sampling:
        """Return the sampling parameters of the answers, without seeds. Raises `ApiError` for values with
        which answers cannot be trained."""
        job = self._job_sampling
        changes: dict[str, Any] = {}
        if self.section.sampling == "agent":
            changes |= asked.sampling
            if self.trains:
                _check_trainable(changes)
        if asked.stop is not None:
            changes["stop"] = asked.stop
        if asked.max_tokens is not None:
            changes["max_new_tokens"] = min(asked.max_tokens, job.max_new_tokens)
        return msgspec.structs.replace(job, **changes) if changes else job

    async def _shown(
        self, asked: ChatCall, opened: bool, result: SampledAnswer, ids: Ids, logprobs: Logprobs
    ) -> SampledChoice:
        """Return an answer in the form that the agent gets. `opened` means that the prompt has opened a
        thought."""
        template = self.tree.template
        content, called = result.text, tuple[ParsedCall, ...]()
        if asked.parse_tools:
            parsed = await aside(parse, content, template.format, asked.prompt.tools, opened=opened)
            if parsed.calls:
                content, called = parsed.text if parsed.text.strip() else "", parsed.calls
        written = tuple((call.name, canonical(call.arguments)) for call in called)
        calls: list[dict[str, Any]] = []
        for name, arguments in written:
            function = {"name": name, "arguments": arguments}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        said = SampledText(template.raw(ids), content, written, template.end_of(ids))
        return SampledChoice(content, calls, result.finish_reason, ids, logprobs, said)

    # --- a call whose answers were sent ---------------------------------------------------------------------

    async def record(self, call: RunningCall) -> None:
        """Let the worker add the answers to the episode, so that later calls can continue them. Raises
        `WireError` if the worker has not confirmed this."""
        call.recorded, made = True, call.task.result()
        for index, choice in enumerate(made.choices):
            self.tree.remember(made.plan, (call.number, index), choice)
        responses = [choice.content for choice in made.choices]
        prompt = self.tree.template.plain(made.plan.given.text)
        sent = RecordedCall(self.opened.key, call.number, prompt, responses)
        sending, place = self.recorder.add(sent)
        # The request also records other calls, and a client that disconnects now has received its answer.
        reasons = (await asyncio.shield(self._keep(sending))).reasons
        if place in reasons:
            raise FaultError("internal", reasons[place])

    def _keep(self, work: Any) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(work)
        self._recording.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._recording.discard(task)
        if not task.cancelled():
            task.exception()  # its waiter has the exception


def _check_trainable(changes: dict[str, Any]) -> None:
    """Raise `ApiError` for top-p, top-k or temperature 0. Training uses importance ratios, which need samples
    at a positive temperature without truncation."""
    good = {"temperature": lambda v: v > 0, "top_p": lambda v: v == 1, "top_k": lambda v: v == 0}
    for name, value in changes.items():
        if not good[name](value):
            raise unsupported(
                name,
                f"tokens sampled with {name} {value} cannot be trained on. Leave it out, or set "
                "rollout.gateway.sampling: job in the job file, to have it ignored",
            )
