"""One episode's access to the policy, on the worker's side: what the engine is asked, and what is recorded.

Promise: a call's answers are in the episode when, and only when, the gateway says that the agent was sent all
of them: exactly the ids, log-probs and versions that the engine returned, after exactly the ids it was given.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from areal_async.rpc.gateway_messages import (
    OpenSession,
    RecordCall,
    Sample,
    Sampled,
    SampledAnswer,
    SampleRefused,
)
from areal_async.rpc.server import Answer
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, SegmentKind
from rollout_service import metrics
from rollout_service.engines.base import (
    DeadlinePassed,
    EngineError,
    GenerateRequest,
    GenerateResult,
    Piece,
    RequestError,
)
from rollout_service.gateway.requests import ENDED, GatewayError, Ids
from rollout_service.workflows.context import call_seed

if TYPE_CHECKING:
    from rollout_service.workflows.context import Context

T = TypeVar("T")

CALLS_FROM = 1 << 48  # Seeds of calls are numbered from here on, apart from those of `ctx.generate`


@dataclass(slots=True)
class RecordedCalls:
    """What of an episode's calls is recorded, over all its sessions. It does not hold the builder."""

    episode: int
    calls: int = 0
    requests: int = 0  # Answers asked for
    roots: Counter[str] = field(default_factory=Counter)
    segments: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Segment and turn of each answer."""
    prompts: dict[tuple[str, int, bytes], int] = field(default_factory=dict)
    """Segment of a policy, a parent's segment (-1: a root) and the ids after it."""


class _OpenCall:
    """A call between its beginning and its record."""

    def __init__(self, asked: Sample, ids: Ids, samplings: Sequence[Sampling]) -> None:
        self.asked, self.ids, self.samplings = asked, ids, samplings
        self.requests: dict[int, GenerateRequest] = {}
        self.results: Sequence[GenerateResult] = ()
        self.work: asyncio.Future[list[GenerateResult]] | None = None
        self._pieces: list[tuple[int, Piece]] = []
        self._more = asyncio.Event()

    def tell(self, index: int, piece: Piece) -> None:
        self._pieces.append((index, piece))
        self._more.set()

    def ended(self) -> None:
        self._more.set()

    async def take_pieces(self, wait_s: float) -> list[tuple[int, Piece]]:
        if not self._pieces:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), wait_s)
        taken, self._pieces = self._pieces, []
        if self.work is not None and not self.work.done():
            self._more.clear()
        return taken


class Session:
    """An agent's access to the policy during one episode. `ctx.gateway()` makes it."""

    def __init__(self, episode: Context, record: RecordedCalls, job: str, address: str) -> None:
        self.api_key = f"areal-{job}-{secrets.token_urlsafe(24)}"
        self.origin = address  # `http://127.0.0.1:PORT`
        self.digest = digest_of(self.api_key)
        self.open: dict[int, _OpenCall] = {}
        self.broken: Exception | None = None  # Why the episode is not what its agent has seen
        self._episode = episode
        self._record = record
        self._ended = False

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
        return self._record.calls

    @property
    def running(self) -> int:
        """Answers that are made, or on their way to the agent."""
        return sum(call.asked.n for call in self.open.values())

    def opening(self, forget: Sequence[int] = ()) -> OpenSession:
        sampling = {policy: each.sampling for policy, each in self._episode.engines.items()}
        return OpenSession(self.digest, self._record.episode, sampling, list(forget))

    def close(self) -> None:
        """End every call, and record no more."""
        self._ended = True
        for number in list(self.open):
            self.drop(number)

    def interrupted(self, why: Exception) -> None:
        """The gateway was away while the agent might have called: what it failed by is not its own fault."""
        self._episode.trouble = self._episode.trouble or why

    def check_whole(self) -> None:
        """Raises `GatewayError` when an answer that the agent was sent may not be in the episode."""
        if self.broken is not None:
            raise GatewayError(
                f"an answer to the agent could not be recorded: {self.broken}"
            ) from self.broken

    # --- a call --------------------------------------------------------------------------------------

    async def sample(self, asked: Sample, ids: Ids) -> Answer:
        """The engine's answers to a call, or why there are none."""
        if self._ended:
            return SampleRefused(401, ENDED, "invalid_api_key")
        call = self.open[asked.call] = _OpenCall(asked, ids, self._samplings(asked))
        call.work = asyncio.ensure_future(every([self._one(call, i) for i in range(asked.n)]))
        try:
            results = call.results = await call.work
        except asyncio.CancelledError:
            refused = SampleRefused(401, ENDED, "invalid_api_key")
        except RequestError as error:
            refused = SampleRefused(400, str(error))
        except DeadlinePassed as error:
            refused = SampleRefused(504, str(error), "timeout")
        except EngineError as error:
            refused = SampleRefused(503, str(error), "engine_unavailable")
        else:
            if all(result.finish_reason != "abort" for result in results):
                answers = [SampledAnswer(len(r.token_ids), r.finish_reason, r.text) for r in results]
                ids_of = bytes_of([r.token_ids for r in results], np.int32)
                return Sampled(answers), [ids_of, bytes_of([r.logprobs for r in results], np.float32)]
            refused = SampleRefused(503, "the engine ended the request", "engine_unavailable")
        finally:
            call.ended()
        self.open.pop(asked.call, None)
        return refused

    async def _one(self, call: _OpenCall, index: int) -> GenerateResult:
        number, self._record.requests = self._record.requests, self._record.requests + 1
        policy = call.asked.policy
        gone_on_with = self._record.segments.get(call.asked.parent) if call.asked.parent else None
        parent = gone_on_with[0] if gone_on_with else None
        request = self._episode.request(f"gateway-{number}", call.ids, call.samplings[index], policy, parent)
        call.requests[index] = request
        tell = (lambda ids: call.tell(index, ids)) if call.asked.stream else None
        return await self._episode.ask(policy, request, tell)

    def _samplings(self, asked: Sample) -> list[Sampling]:
        episode, number = self._episode, CALLS_FROM + self._record.requests
        if asked.seed is not None:
            # The episode's own seed stays part of it: the samples of a group must differ.
            number = (1 << 63) + asked.seed % (1 << 63)
        base = call_seed(episode.seed, episode.sample, episode.attempt, number)
        seeds = (call_seed(base, choice, 0, 0) for choice in range(asked.n))
        return [msgspec.structs.replace(episode.drawn(asked.sampling), seed=seed) for seed in seeds]

    def drop(self, number: int) -> None:
        """Forget a call, and abort what is still sampled for it."""
        call = self.open.pop(number, None)
        if call is not None and call.work is not None:
            call.work.cancel()

    def record(self, sent: RecordCall) -> None:
        """Make the answers of a call part of the episode. Nothing waits in here: an episode has all of a
        call; one that has ended, nothing of it."""
        call = self.open.pop(sent.call, None)
        if call is None or self._ended:
            return
        try:
            self._add(call, sent)
        except Exception as error:
            # The agent goes on from an answer that is not there: such an episode must not be trained on.
            self.broken = error
            raise
        metrics.GATEWAY_CALLS.labels("ok").inc()

    def _add(self, call: _OpenCall, sent: RecordCall) -> None:
        """The answers of a call as branches of one prompt."""
        record, builder, asked = self._record, self.builder, call.asked
        parent, depth = (-1, 0) if asked.parent is None else record.segments[asked.parent]
        new = call.ids[asked.known :]
        agent, policy = self._episode.speaker(None, asked.policy)
        place = (policy, parent, new.tobytes())
        if len(new) == 0 and parent >= 0:
            prompt = parent
        elif place in record.prompts:
            prompt = record.prompts[place]
        else:
            above = None if parent < 0 else parent
            kind = SegmentKind(asked.kind)
            prompt = record.prompts[place] = builder.observed(kind, new, above, agent, depth)
            if asked.root:
                record.roots[asked.root] += 1
                metrics.GATEWAY_ROOTS.labels(asked.root).inc()
        for index, (sampling, result) in enumerate(zip(call.samplings, call.results, strict=True)):
            segment = builder.sampled(
                result.token_ids,
                result.logprobs,
                result.versions,
                parent=prompt,
                call=Call(
                    sampling=sampling, finish_reason=result.finish_reason, logprobs_of=result.logprobs_of
                ),
                epoch=result.epochs,
                agent=agent,
                turn=depth,
                mask=self._episode.mask_of(len(result.token_ids)),
            )
            self._episode.routed(segment, call.requests[index], result)
            record.segments[asked.call, index] = (segment, depth + 1)
            builder.text(response=sent.responses[index])
            metrics.GATEWAY_TOKENS.inc(len(result.token_ids))
        if not record.calls:
            builder.text(prompt=sent.prompt)
        record.calls += 1
        builder.meta(
            roots=sum(record.roots.values()), roots_by_reason=dict(record.roots), gateway_calls=record.calls
        )


def digest_of(key: str) -> bytes:
    """Keys are looked up by digest: the time that takes says nothing about the key."""
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()


def bytes_of(arrays: Sequence[np.ndarray[Any, Any]], dtype: Any) -> bytes:
    return b"".join(np.ascontiguousarray(array, dtype).tobytes() for array in arrays)


async def every(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all return; the first to raise ends the others, and its error is raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
