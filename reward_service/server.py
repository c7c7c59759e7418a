"""The reward service: it claims stored episodes from a buffer, has them scored and returns verdicts.

Promises:
- Every claimed episode gets exactly one verdict, which is sent until the buffer accepts or refuses it.
- A slow call delays neither the claims nor the verdicts of other calls.
- The amount of claimed work is bounded in episodes, bytes and seconds.
- The service waits while the buffer is unavailable.
- A stop takes at most `STOP_LIMIT_S` plus the time to close the scorers, and leaves no process.

The buffer, not this service, decides what happens after a verdict without a score.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal_async.base.errors import FaultError, RpcTimeout
from areal_async.base.events import failpoint, record, recording
from areal_async.base.log import get_logger
from areal_async.base.metrics import busy
from areal_async.base.verdicts import Failure, Score, Verdict, kind_of
from areal_async.config.reward_routing import RewardSpec
from areal_async.data.media import fetch_media
from areal_async.rpc.client import Client, wait_out
from areal_async.rpc.messages import Claim, ClaimedEpisode, EpisodeVerdict, PutVerdicts
from areal_async.trajectory import TrajectoryError, read_header
from reward_service import metrics
from reward_service.backends import Call, set_within
from reward_service.router import Router
from reward_service.sdk import RewardInput

log = get_logger("reward")

CLAIM_WAIT_MS = 2000  # longest time that the buffer may hold a claim until there is an episode to score
CLAIM_PAUSE_S = (
    0.025  # pause between two claims: at high rates episodes then arrive in groups instead of one by one
)
SEND_PAUSE_S = 0.01
RETRY_PAUSE_S = 0.5
STOP_LIMIT_S = 2.0  # time for running calls and unsent verdicts after the order to stop
MAX_VERDICTS = 512  # verdicts in one message, unless one claim has more
MAX_BYTES = 16 << 20
"""Size of a message of verdicts from which no further verdicts are added. The protocol accepts messages of
four times this size."""
VALUE_BYTES = 9  # size of a float in msgpack


ClaimedCall = list[tuple[ClaimedEpisode, RewardInput]]
"""One call: its episodes, each with its input."""


class RewardState:
    """Calls of one reward that the service is working on, and figures of earlier calls."""

    def __init__(self, spec: RewardSpec, *, sees_images: bool) -> None:
        self.spec = spec
        self.sees_images = sees_images
        self.pending = 0
        self.calls_done = 0
        self.per_call = 1  # episodes of one call: the largest group seen, under scope `group`
        self.waiting: OrderedDict[int, float] = OrderedDict()
        """Claim time of each call without verdicts, oldest first."""
        self.seconds = metrics.CALL_SECONDS.labels(spec.label)

    def media_bytes(self, given: RewardInput) -> int:
        """Return the bytes of an input's media, come or not. A reward of texts gets none."""
        return sum(each.size_bytes for each in given.media) if self.sees_images else 0

    def age_s(self) -> float:
        """Return the age of the oldest call without verdicts, in seconds."""
        return time.monotonic() - next(iter(self.waiting.values()), math.inf) if self.waiting else 0.0


class RewardServer:
    """The loops between one buffer and the scorers of its episodes."""

    def __init__(self, buffer: Client, router: Router, *, scorer: str) -> None:
        self._buffer = buffer
        self._router = router
        self._scorer = scorer
        self._of = {
            spec.key: RewardState(spec, sees_images=router.sees_images(spec)) for spec in router.specs
        }
        self.pending = 0  # claimed episodes whose verdict the buffer does not have yet
        self._pending_bytes = 0
        self._calls_open = 0
        self._call_numbers = 0
        self._submitting: set[asyncio.Task[None]] = set()
        self._deadline_s = math.inf
        self._held: Counter[str] = Counter()  # episodes without an acknowledged verdict, by claim
        self._outbox: list[tuple[EpisodeVerdict, int, RewardState]] = []
        """Verdicts to send, each with the size of its episode."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Score until `stop` is set.

        Raises errors after which scoring cannot continue: a `RewardLoadError`, or a `FaultError` for which a
        retry is pointless.
        """
        for held in self._of.values():
            metrics.QUEUE_AGE.labels(held.spec.label).set_function(held.age_s)
        loops = [
            asyncio.create_task(self._claim(), name="claim"),
            asyncio.create_task(self._send(), name="send"),
        ]
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            ends: list[asyncio.Future[Any]] = [*loops, stopping, self._router.broken, self._failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._router.broken.done():
                raise self._router.broken.result()
            for one in (self._failed, *loops):
                if one.done():
                    one.result()
            loops[0].cancel()
            await set_within(self._idle, STOP_LIMIT_S)
            if self.pending:
                log.info("stopped with episodes unscored", episodes=self.pending)
        finally:
            tasks: list[asyncio.Task[Any]] = [*loops, stopping, *self._submitting]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- in ------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        while True:
            wanted = episodes_to_claim(self._loads())
            if wanted == 0:
                self._room.clear()
                await self._room.wait()
                continue
            began_s = time.monotonic()
            try:
                claims, blobs = await self._buffer.exchange(
                    Claim(self._scorer, wanted, CLAIM_WAIT_MS, list(self._held))
                )
            except (RpcTimeout, FaultError) as error:
                await wait_out(error, "claim", RETRY_PAUSE_S)
                continue
            if claims.items:
                record("claimed", claims=[[item.episode_id, item.claim_id] for item in claims.items])
                failpoint("reward.after_claim")
            self._take(claims.items, blobs)
            spent_s = time.monotonic() - began_s
            await asyncio.sleep(max(0.0, CLAIM_PAUSE_S - spent_s))

    def _loads(self) -> list[ClaimLoad]:
        return [
            ClaimLoad(
                # In episodes, as all fields of a load except `call_s`. A worker has a whole group at a time.
                workers=self._router.capacity(held.spec) * held.per_call,
                call_s=self._router.call_seconds(held.spec),
                calls_done=held.calls_done * held.per_call,
                pending=held.pending,
                pending_bytes=self._pending_bytes,
                deadline_s=self._deadline_s,
            )
            for held in self._of.values()
        ]

    def _take(self, items: list[ClaimedEpisode], blobs: Sequence[memoryview]) -> None:
        """Give claimed episodes to their scorers. An unreadable episode gets a verdict at once."""
        calls: defaultdict[str, list[ClaimedCall]] = defaultdict(list)
        for episodes in _calls(items, blobs):
            held = self._of[self._router.routing.of(episodes[0][0].task).key]
            if held.spec.scope == "group":
                held.per_call = max(held.per_call, len(episodes))
            self._idle.clear()
            for item, blob in episodes:
                self._held[item.claim_id] += 1
                self._deadline_s = item.deadline_ms / 1000
                self._pending_bytes += len(blob)
            held.pending += len(episodes)
            self.pending += len(episodes)
            try:
                inputs = [
                    RewardInput.of_episode(item.task, *read_header(blob), bytes(blob))
                    for item, blob in episodes
                ]
            except TrajectoryError as error:
                for item, blob in episodes:
                    self._end(held, item, len(blob), Failure("episode", str(error)), 0.0)
            else:
                self._pending_bytes += sum(map(held.media_bytes, inputs))
                items_of_call = (item for item, _ in episodes)
                calls[held.spec.key].append(list(zip(items_of_call, inputs, strict=True)))
        for key, taken_calls in calls.items():
            submitting = asyncio.create_task(self._submit(self._of[key], taken_calls))
            self._submitting.add(submitting)
            submitting.add_done_callback(self._submitted)

    async def _submit(self, held: RewardState, calls: list[ClaimedCall]) -> None:
        if held.sees_images and any(given.media for call in calls for _, given in call):
            calls = await self._with_media(held, calls)
        first = self._call_numbers
        self._call_numbers += len(calls)
        now_s = time.monotonic()
        held.waiting.update((first + index, now_s) for index in range(len(calls)))

        def on_verdicts(index: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
            held.seconds.observe(elapsed_ms / 1000)
            held.calls_done += 1
            del held.waiting[first + index]
            self._calls_open -= 1
            if self._calls_open == 0:
                busy.end("score")
            for (item, given), verdict in zip(calls[index], verdicts, strict=True):
                self._end(held, item, len(given.blob) + held.media_bytes(given), verdict, elapsed_ms)

        if self._calls_open == 0:
            busy.begin("score")
        self._calls_open += len(calls)
        is_group = held.spec.scope == "group"
        inputs: list[Call] = [[one for _, one in call] if is_group else call[0][1] for call in calls]
        await self._router.submit(held.spec, inputs, on_verdicts)

    async def _with_media(self, held: RewardState, calls: list[ClaimedCall]) -> list[ClaimedCall]:
        """Fetch the media of calls. Return the calls whose media have all come. The others get a verdict."""
        wanted: defaultdict[str, list[str]] = defaultdict(list)
        for item, given in itertools.chain(*calls):
            if given.media:
                wanted[item.episode_id.rpartition(".")[0]] += [each.digest for each in given.media]
        fetch = await fetch_media(self._buffer, wanted, retry_pause_s=RETRY_PAUSE_S)
        found = {digest: bytes(data) for digest, data in fetch.found.items()}
        whole = []
        for call in calls:
            lost = [each.digest for _, given in call for each in given.media if each.digest in fetch.lost]
            for item, given in call:
                for each in given.media:
                    each.data = found.get(each.digest, b"")
                if lost:
                    failure = Failure("episode", f"the buffer no longer has {lost[0]}")
                    self._end(held, item, len(given.blob) + held.media_bytes(given), failure, 0.0)
            whole += [] if lost else [call]
        return whole

    def _submitted(self, task: asyncio.Task[None]) -> None:
        self._submitting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            # If a backend cannot accept calls, claims would never end, so the service must stop.
            self._failed.set_exception(error)

    def _end(
        self, held: RewardState, item: ClaimedEpisode, size_bytes: int, verdict: Verdict, elapsed_ms: float
    ) -> None:
        metrics.count(held.spec.label, verdict)
        result = EpisodeVerdict(item.episode_id, item.claim_id, verdict, elapsed_ms)
        self._outbox.append((result, size_bytes, held))
        self._news.set()

    # --- out -----------------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(SEND_PAUSE_S)
            verdicts = [verdict for verdict, _, _ in self._outbox]
            del verdicts[portion(verdicts) :]
            batch = self._outbox[: len(verdicts)]
            while True:
                if recording():
                    record("verdicts", items=[_as_event(verdict) for verdict in verdicts])
                failpoint("reward.before_verdict")
                try:
                    ack = await self._buffer.call(PutVerdicts(self._scorer, verdicts))
                    break
                except (RpcTimeout, FaultError) as error:
                    await wait_out(error, "verdicts", RETRY_PAUSE_S)
            refused = {refusal.item: refusal.reason for refusal in ack.refused}
            if recording():
                taken = [[one.episode_id, one.claim_id] for one in verdicts if one.episode_id not in refused]
                record("verdicts_acked", items=taken, refused=[list(pair) for pair in refused.items()])
            if refused:
                metrics.REFUSED.inc(len(refused))
                item, reason = next(iter(refused.items()))
                log.info("verdicts refused", n=len(refused), item=item, reason=reason)
            del self._outbox[: len(batch)]
            if not self._outbox:
                self._news.clear()
            self._held -= Counter(verdict.claim_id for verdict in verdicts)
            self.pending -= len(batch)
            for _, size_bytes, held in batch:
                held.pending -= 1
                self._pending_bytes -= size_bytes
            self._room.set()
            if self.pending == 0:
                self._idle.set()


def _as_event(item: EpisodeVerdict) -> list[str | float | None]:
    score = item.verdict.value if isinstance(item.verdict, Score) else None
    return [item.episode_id, item.claim_id, kind_of(item.verdict), score]


def _calls(
    items: list[ClaimedEpisode], blobs: Sequence[memoryview]
) -> Iterator[list[tuple[ClaimedEpisode, memoryview]]]:
    """Yield the episodes of each call: a single episode, or under scope `group` all episodes of one claim."""

    def call(pair: tuple[ClaimedEpisode, memoryview]) -> str | int:
        return pair[0].claim_id if pair[0].scope == "group" else id(pair[0])

    for _, run in itertools.groupby(zip(items, blobs, strict=True), call):
        yield list(run)


def portion(waiting: Sequence[EpisodeVerdict]) -> int:
    """Return the number of verdicts in the next message, or 0 if no verdict waits.

    Consecutive verdicts of one claim stay together. This matters for a group that is scored in one call: if
    its verdicts were split, the buffer could mask or drop the first half of the group before a verdict in the
    second half requests that the whole group be scored again.
    """
    size_bytes = 0
    for index, verdict in enumerate(waiting):
        full = index >= MAX_VERDICTS or size_bytes >= MAX_BYTES
        if full and verdict.claim_id != waiting[index - 1].claim_id:
            return index
        size_bytes += _size_bytes(verdict)
    return len(waiting)


def _size_bytes(item: EpisodeVerdict) -> int:
    """Return the approximate size of a verdict, from the fields that can be large."""
    parts = item.verdict.parts if isinstance(item.verdict, Score) else None
    values = 0 if parts is None else len(parts.units) + 2 * (len(parts.segments) + len(parts.agents))
    return len(item.episode_id) + len(item.claim_id) + VALUE_BYTES * values


# --- how many episodes to claim ----------------------------------------------------------------------


MAX_PENDING = 1024  # most episodes held at once, for any speed
MAX_PENDING_BYTES = 64 << 20
MAX_CLAIM = 256
HOLD_S = 1.0  # work held at once, in seconds of all workers: enough that no worker waits for a claim
DEADLINE_SHARE = 0.25
"""Share of the time until a claim's deadline that the claimed work may take at most. With more, claims could
expire in the queue of this service."""


@dataclass(frozen=True)
class ClaimLoad:
    """Figures of one reward's calls, which determine how many episodes to claim."""

    workers: int
    """Number of episodes that can be scored at once. Under scope `group`, each worker scores a whole
    group."""
    call_s: float
    calls_done: int
    """Number of episodes of finished calls."""
    pending: int
    """Number of this reward's episodes that are claimed and have no verdict."""
    pending_bytes: int
    """Bytes of the claimed episodes of all rewards together."""
    deadline_s: float
    """Seconds from the last claim to its deadline, or infinity before the first claim."""


def episodes_to_claim(loads: Sequence[ClaimLoad]) -> int:
    """Return the number of episodes to claim now: at most `MAX_CLAIM`, and 0 if enough are already claimed.

    Only after the claim of an episode is it known which reward it needs. As long as no reward has reached its
    limit, the number is therefore chosen for the reward with the least claimed work. So a slow reward does
    not starve a quick one, unless nearly all episodes are for the slow one.

    The number starts small and grows with the finished calls, because the speed of a reward is unknown at
    first. An episode must not be claimed too early, because then no other scorer can take it, and its claim
    may expire.
    """
    if any(load.pending >= _most(load) for load in loads):
        return 0
    room = max(_wanted(load) - load.pending for load in loads)
    pending, pending_bytes = sum(load.pending for load in loads), max(load.pending_bytes for load in loads)
    room = min(room, max(MAX_PENDING, 2 * max(load.workers for load in loads)) - pending)
    if pending:
        mean_bytes = max(1, pending_bytes // pending)
        room = min(room, (MAX_PENDING_BYTES - pending_bytes) // mean_bytes)
    return max(0, min(room, MAX_CLAIM))


def _wanted(load: ClaimLoad) -> int:
    """Return the number of episodes that keep a reward's workers busy."""
    hold_s = min(HOLD_S, load.deadline_s * DEADLINE_SHARE)
    by_experience = 4 * load.workers + 2 * load.calls_done
    return max(2 * load.workers, min(_within(load, hold_s), by_experience, MAX_PENDING))


def _most(load: ClaimLoad) -> int:
    """Return the largest number of episodes that the reward can score well before their claims expire, with a
    fixed minimum."""
    if math.isinf(load.deadline_s):
        return max(_wanted(load), MAX_PENDING)
    return max(_wanted(load), 4 * load.workers, _within(load, load.deadline_s * 2 * DEADLINE_SHARE))


def _within(load: ClaimLoad, seconds: float) -> int:
    """Return the number of episodes that the reward's workers score in `seconds`."""
    return int(min(load.workers * seconds / max(load.call_s, 1e-6), 1e9))
