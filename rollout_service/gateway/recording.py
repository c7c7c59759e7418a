"""The worker's side of one episode's access to the policy: the requests to the engine, and their record.

Promise: a call's answers are in the episode if and only if the gateway reports that the agent received all of
them. The recorded answers have exactly the ids, log-probs and versions that the engine returned, and follow
exactly the ids that the engine was given.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from areal_async.rpc.gateway_messages import (
    OpenSession,
    RecordedCall,
    Sample,
    Sampled,
    SampledAnswer,
    SampleRefused,
)
from areal_async.rpc.server import Answer
from areal_async.trajectory import EpisodeBuilder, SegmentKind
from rollout_service import metrics
from rollout_service.engines.base import (
    DeadlinePassed,
    EngineError,
    GenerateRequest,
    GenerateResult,
    RequestError,
    RequestImage,
)
from rollout_service.gateway.requests import ENDED, Ids
from rollout_service.workflows.context import call_seed

if TYPE_CHECKING:
    from rollout_service.workflows.context import Context

T = TypeVar("T")

CALLS_FROM = 1 << 48  # First call number for seeds, so that they differ from the seeds of `ctx.generate`


@dataclass(slots=True)
class RecordedCalls:
    """Recorded calls of an episode, of all its sessions. This object has no reference to the episode's
    builder."""

    episode: int
    calls: int = 0
    requests: int = 0  # Number of requested answers
    roots: Counter[str] = field(default_factory=Counter)
    segments: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Segment and turn of each answer."""
    media: dict[tuple[int, int], tuple[RequestImage, ...]] = field(default_factory=dict)
    """Images of the path of each answer."""
    prompts: dict[tuple[str, int, bytes], int] = field(default_factory=dict)
    """(policy, the parent's segment or -1 for a root, the ids and images after the parent) → the prompt's
    segment."""


@dataclass(eq=False)
class _OpenCall:
    """A call that has begun and is not recorded yet."""

    asked: Sample
    ids: Ids
    media: tuple[RequestImage, ...]  # Images of the path
    requests: Sequence[GenerateRequest]
    results: Sequence[GenerateResult] = ()
    work: asyncio.Future[list[GenerateResult]] | None = None


class Session:
    """An agent's access to the policy during one episode. `ctx.gateway()` creates it."""

    def __init__(self, episode: Context, record: RecordedCalls, job: str, address: str) -> None:
        self.api_key = f"areal-{job}-{secrets.token_urlsafe(24)}"
        self.origin = address  # `http://127.0.0.1:PORT`
        self.digest = digest_of(self.api_key)
        self.open: dict[int, _OpenCall] = {}
        # Why the episode differs from the answers that its agent received
        self.broken: Exception | None = None
        self._episode = episode
        self._record = record
        self._ended = False

    @property
    def openai_base_url(self) -> str:
        return f"{self.origin}/v1"

    @property
    def builder(self) -> EpisodeBuilder:
        """Builder of the episode, for rewards, anchors, metadata and texts."""
        return self._episode.builder

    @property
    def calls(self) -> int:
        """Number of calls recorded in the episode."""
        return self._record.calls

    def opening(self, forget: Sequence[int] = ()) -> OpenSession:
        sampling = {policy: each.sampling for policy, each in self._episode.engines.items()}
        return OpenSession(self.digest, self._record.episode, sampling, list(forget))

    def close(self) -> None:
        """End every call, and record no more."""
        self._ended = True
        for number in list(self.open):
            self.drop(number)

    def interrupted(self, why: Exception) -> None:
        """Record that the gateway was unavailable while the agent might have called it. If the episode then
        fails, the agent is not at fault."""
        self._episode.trouble = self._episode.trouble or why

    # --- a call --------------------------------------------------------------------------------------

    async def sample(self, asked: Sample, ids: Ids, images: Sequence[memoryview] = ()) -> Answer:
        """Return the engine's answers to a call, or the reason why there are none."""
        if self._ended:
            return SampleRefused(401, ENDED, "invalid_api_key")
        media = self._record.media.get(asked.parent, ()) if asked.parent is not None else ()
        for placed, data in zip(asked.media, images, strict=True):
            media += (RequestImage(placed.digest, bytes(data), placed.first, placed.count),)
        call = _OpenCall(asked, ids, media, self._requests(asked, ids, media))
        self.open[asked.call] = call
        call.work = asyncio.ensure_future(
            every([self._episode.ask(asked.policy, request) for request in call.requests])
        )
        try:
            results = call.results = await call.work
        except asyncio.CancelledError:
            refused = SampleRefused(401, ENDED, "invalid_api_key")
        except (RequestError, EngineError) as error:
            refused = SampleRefused(503, str(error), "engine_unavailable")
            if isinstance(error, RequestError | DeadlinePassed):
                late = isinstance(error, DeadlinePassed)
                refused = SampleRefused(504 if late else 400, str(error), "timeout" if late else None)
        else:
            if all(result.finish_reason != "abort" for result in results):
                answers = [SampledAnswer(len(r.token_ids), r.finish_reason, r.text) for r in results]
                ids_of = bytes_of([r.token_ids for r in results], np.int32)
                return Sampled(answers), [ids_of, bytes_of([r.logprobs for r in results], np.float32)]
            refused = SampleRefused(503, "the engine ended the request", "engine_unavailable")
        if self.open.pop(asked.call, None) is not None:
            metrics.GATEWAY_CALLS.labels(str(refused.status)).inc()
        return refused

    def _requests(self, asked: Sample, ids: Ids, media: tuple[RequestImage, ...]) -> list[GenerateRequest]:
        episode, number = self._episode, CALLS_FROM + self._record.requests
        if asked.seed is not None:
            # The episode's own seed is always part of it, because the samples of a group must differ.
            number = (1 << 63) + asked.seed % (1 << 63)
        base = call_seed(episode.seed, episode.sample, episode.attempt, number)
        seeds = (call_seed(base, choice, 0, 0) for choice in range(asked.n))
        first, self._record.requests = self._record.requests, self._record.requests + asked.n
        parent = self._record.segments[asked.parent][0] if asked.parent in self._record.segments else None
        requests = []
        for index, seed in enumerate(seeds):
            sampling = msgspec.structs.replace(episode.drawn(asked.sampling), seed=seed)
            name = f"gateway-{first + index}"
            request = episode.request(name, ids, sampling, asked.policy, parent)
            requests.append(replace(request, media=media))
        return requests

    def drop(self, number: int) -> None:
        """Forget a call, and abort its requests."""
        call = self.open.pop(number, None)
        if call is not None and call.work is not None:
            metrics.GATEWAY_CALLS.labels("abandoned").inc()
            call.work.cancel()

    def record(self, sent: RecordedCall) -> None:
        """Add the answers of a call to the episode. The method has no `await`, so an episode contains a call
        completely or not at all."""
        call = self.open.pop(sent.call, None)
        if call is None or self._ended:
            return
        try:
            self._add(call, sent)
        except Exception as error:
            # The agent continues an answer that is missing. Such an episode must not be trained on.
            self.broken = error
            raise
        metrics.GATEWAY_CALLS.labels("ok").inc()

    def _add(self, call: _OpenCall, sent: RecordedCall) -> None:
        """Add the answers of a call as branches of one prompt."""
        record, builder, asked = self._record, self.builder, call.asked
        parent, depth = (-1, 0) if asked.parent is None else record.segments[asked.parent]
        new = call.ids[asked.known :]
        agent, policy = self._episode.speaker(None, asked.policy)
        own = call.media[len(call.media) - len(asked.media) :]
        place = (policy, parent, new.tobytes() + b"".join(image.digest.encode() for image in own))
        if len(new) == 0 and parent >= 0:
            prompt = parent
        elif place in record.prompts:
            prompt = record.prompts[place]
        else:
            above = None if parent < 0 else parent
            kind = SegmentKind(asked.kind)
            prompt = record.prompts[place] = builder.observed(kind, new, above, agent, depth)
            self._episode.show(prompt, [image._replace(first=image.first - asked.known) for image in own])
            if asked.root:
                record.roots[asked.root] += 1
                metrics.GATEWAY_ROOTS.labels(asked.root).inc()
        for index, result in enumerate(call.results):
            request = call.requests[index]
            segment = self._episode.answered(request, result, parent=prompt, agent=agent, turn=depth)
            record.segments[asked.call, index] = (segment, depth + 1)
            record.media[asked.call, index] = call.media
            builder.text(response=sent.responses[index])
            metrics.GATEWAY_TOKENS.inc(len(result.token_ids))
        if not record.calls:
            builder.text(prompt=sent.prompt)
        record.calls += 1
        builder.meta(
            roots=sum(record.roots.values()), roots_by_reason=dict(record.roots), gateway_calls=record.calls
        )


def digest_of(key: str) -> bytes:
    """Return the digest of a key, for looking it up. With a digest, the duration of the lookup reveals
    nothing about the key."""
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()


def bytes_of(arrays: Sequence[np.ndarray[Any, Any]], dtype: Any) -> bytes:
    return b"".join(np.ascontiguousarray(array, dtype).tobytes() for array in arrays)


async def every(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return all results. The first error cancels the other coroutines and is
    raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
