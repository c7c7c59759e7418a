"""The *front* of a job's ledger: the only process that may change the ledger. It sends a reply only after
Redis has confirmed the write.

Promises:

- Commands are decided one after the other, from the index in memory. Their writes go to Redis in the same
  order, and many may be in flight.
- A reply is sent only after its write and every earlier write are confirmed.
- If a write is not confirmed, the index is dropped immediately, waiting callers get `unavailable`, and the
  index is rebuilt from Redis.
- A front stops if another front has replaced it, or if Redis is unusable. The attribute `ended` then has the
  reason.

Deadlines use the ledger's clock, which ignores changes of the system clock. No deadline comes closer while
clients cannot renew leases and claims. The clock stands still while no front runs. After an outage of Redis,
or a time in which the front was blocked, every deadline moves back by that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from areal_async.base.errors import FaultError
from areal_async.base.events import failpoint, record, recording
from areal_async.base.log import get_logger
from areal_async.base.metrics import busy
from areal_async.base.records import Task
from areal_async.rpc.messages import Arrived, Lease, Leases, PutAck
from areal_async.rpc.schema import Message
from replay_buffer.attachments import AttachmentFile, Key, media_key, routes_key
from replay_buffer.ledger.decide import (
    BufferStarted,
    BytesLost,
    Command,
    ExpireDeadlines,
    ExtendDeadlines,
    KeepAlive,
    decide,
)
from replay_buffer.ledger.index import Edge, Index, WriteSet
from replay_buffer.ledger.leasing import StoreEpisodes
from replay_buffer.ledger.records import GroupRecord, GroupState, LedgerMeta, Versions
from replay_buffer.ledger.rules import Rules, Tasks
from replay_buffer.ledger.transaction import Decision
from replay_buffer.redis.address import StoreError, StoreUnavailable, Trouble
from replay_buffer.redis.large import BlobRef
from replay_buffer.redis.store import Opened, Store
from replay_buffer.redis.writer import Bytes, LedgerClock

BEAT_S = 0.5  # Longest time between two looks at the clock
OUTAGE_MS = 3_000  # A longer gap between two looks counts as an outage of this process
ALIVE_MS = 5_000
"""Time between the writes by which an idle front records the ledger's time. The next front continues from the
last recorded time."""
GATHER_S = 0.02  # Longest time by which a poll puts off its next look, while more is expected
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
RETRY_MS = 100
ROOM_PAUSE_S = 0.5
FULL_RETRY_MS = 500
FULL = "Redis is at its maxmemory: no episode can be stored until it is raised or memory is freed there"

EDGES: tuple[Edge, ...] = ("lease", "claim", "batch")

log = get_logger("buffer")


class GroupBytes(NamedTuple):
    """The bytes of one group in a put: its episodes, the routes of the samples in `routed`, and new media by
    digest."""

    blobs: Sequence[Bytes]
    routed: Sequence[int] = ()
    routes: Sequence[memoryview] = ()
    media: Mapping[str, memoryview] = {}

    def attachments(self) -> dict[Key, memoryview]:
        routes = zip(map(routes_key, self.routed), self.routes, strict=True)
        return {**dict(routes), **{media_key(digest): data for digest, data in self.media.items()}}


class Coordinator:
    """The front of a job's ledger. Call `start`, then `execute` and `poll` from any number of coroutines of
    one loop, then `stop`.

    `revive` is awaited before each attempt to reconnect to Redis. `on_confirmed` is called with each revision
    that Redis has confirmed, before the callers of its writes get their replies."""

    def __init__(
        self,
        store: Store,
        rules: Rules,
        tasks: Tasks,
        clock: LedgerClock,
        revive: Callable[[], Awaitable[None]] | None = None,
        on_confirmed: Callable[[int], None] = lambda revision: None,
    ) -> None:
        self.index: Index | None = None  # None during a rebuild
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.lost_writes = 0  # Acknowledged writes that Redis has lost
        self._why = "it starts"
        self._trouble: Trouble | None = None
        self._store = store
        self._rules = rules
        self._tasks = tasks
        self._clock = clock
        self._revive = revive
        self._on_confirmed = on_confirmed
        self._polls: dict[Edge, dict[asyncio.Event, None]] = {edge: {} for edge in EDGES}
        """The waiting polls of each edge (`index.Edge`), longest wait first, each with an event. The poll
        clears its event before it executes its command, and the edge sets the event."""
        self._seen_ms = 0
        self._wrote_ms = 0
        self._stopping = False
        self._workers: set[asyncio.Task[None]] = set()

    @property
    def front_epoch(self) -> int:
        return self._store.front_epoch

    @property
    def trouble(self) -> Trouble | None:
        """Reason why episodes cannot be written now, or None."""
        return self._trouble if self.index is None else ("memory" if self._store.full else None)

    @property
    def now_ms(self) -> int:
        return self._clock.now_ms()

    async def start(self) -> None:
        """Take over the job and load its ledger. Raises `StoreError`."""
        self._use(await self._store.open(self._on_failure))
        if self.index is not None and self.index.meta.failed:
            self._take(self.index, BufferStarted())
        self._spawn(self._beat())

    def stop_waiting(self) -> None:
        """Let waiting polls return empty replies. Later polls do not wait."""
        self._stopping = True
        self._fire()

    async def stop(self) -> None:
        """Write all decisions and the clock's present time, then disconnect from Redis. The next front
        continues the clock from this time."""
        self.stop_waiting()
        if self.index is not None:
            self._take(self.index, KeepAlive())
        for task in self._workers:
            task.cancel()
        if self._workers:
            await asyncio.wait(self._workers)
        await self._store.close()

    async def execute(self, command: Command, attachments: Sequence[Bytes | BlobRef] = ()) -> Decision:
        """Decide on the command, write the decision, and return it after Redis has confirmed it.

        Raises `FaultError("unavailable")` if the confirmation is unknown. The command may be repeated."""
        index = self._ready()
        self._pass_time(index)
        if self._store.full:
            if isinstance(command, StoreEpisodes):
                raise FaultError("unavailable", FULL, FULL_RETRY_MS)
            if isinstance(command, Lease):
                return Decision(Leases([], reason=FULL))
        decision, written = self._take(index, command, attachments)
        if written is not None:
            # Shielded: a cancelled caller must not cancel the confirmation for the others.
            try:
                await asyncio.shield(written)
            except StoreError as error:
                raise _unavailable(error) from error
        if decision.writes is not None:
            failpoint("buffer.before_reply")
        return decision

    async def store(self, command: StoreEpisodes, given: Sequence[GroupBytes]) -> Decision:
        """Execute a put with the bytes of each of its groups. Before the decision, write large episodes and
        attachments to disk."""
        self._ready()
        placed: list[Bytes | BlobRef] = []
        files: list[tuple[str, str]] = []  # Names of files with large episodes, and their groups
        attached: list[tuple[str, dict[Key, AttachmentFile]]] = []
        stored: dict[str, Sequence[int]] = {}
        try:
            for group_id, own in zip((put.group_id for put in command.groups), given, strict=True):
                if self._store.attachments is not None and (more := own.attachments()):
                    attached.append((group_id, await self._store.attachments.write(group_id, more)))
                    failpoint("buffer.after_attachments")
                blobs, name = await self._store.place_large(own.blobs)
                placed += blobs
                if name:
                    files.append((name, group_id))
                    failpoint("buffer.after_large")
            decision = await self.execute(command, placed)
            if isinstance(decision.reply, PutAck):
                answers = zip(command.groups, decision.reply.groups, strict=True)
                stored = {put.group_id: answer.stored for put, answer in answers}
            return decision
        except OSError as error:
            raise not_written(error) from error
        finally:
            for name, group_id in files:
                self._store.settled(name, group_id)
            for group_id, written in attached:
                self.settle(group_id, written, stored.get(group_id, ()))

    def settle(
        self, group_id: str, written: Mapping[Key, AttachmentFile], stored: Sequence[int] | None
    ) -> None:
        """Keep the written attachments of the samples `stored`, unless their bytes have been freed since.
        Media stay with any such sample, or for None with the group."""
        assert self._store.attachments is not None
        group = self.index.groups.get(group_id) if self.index is not None else None
        samples = () if group is None else {*(stored or ())}.intersection(group.held)
        keep_media = bool(samples) or (group is not None and stored is None)
        kept = {key for key in written if key[0] == "media" and keep_media} | {*map(routes_key, samples)}
        self._store.attachments.settled(group_id, written, kept=kept)

    async def poll(
        self,
        command: Command,
        wait_ms: int,
        edge: Edge,
        is_empty: Callable[[Message], bool],
        more_comes: Callable[[Index], bool] | None = None,
        again: asyncio.Event | None = None,
    ) -> Message:
        """Execute the command. While the reply is empty, execute the command again whenever `edge` fires, for
        at most `wait_ms`. Setting the event `again` repeats the command for this poll only.

        While `more_comes` returns true, an execution may be put off by `GATHER_S`, because fewer and larger
        replies cost less."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        gather_s: float | None = None
        fired = again or asyncio.Event()
        self._polls[edge][fired] = None
        try:
            while True:
                fired.clear()
                if more_comes is not None and self.index is not None and more_comes(self.index):
                    gather_s = gather_s or min(deadline_s, loop.time() + GATHER_S)
                    if not self._stopping and await _happens(fired, gather_s - loop.time()):
                        continue
                gather_s = None
                reply = (await self.execute(command)).reply
                left_s = deadline_s - loop.time()
                if left_s <= 0 or self._stopping or not is_empty(reply):
                    return reply
                await _happens(fired, self._until_change(edge, left_s))
        finally:
            del self._polls[edge][fired]

    def _fire(self, edges: Iterable[Edge] = EDGES) -> None:
        for edge in edges:
            for fired in self._polls[edge]:
                fired.set()

    async def blobs(self, wanted: Sequence[tuple[str, int]]) -> list[Bytes | None]:
        """Return episode bytes by (group id, sample). Raises `FaultError("unavailable")`."""
        try:
            return await self._store.blobs(wanted)
        except StoreUnavailable as error:
            raise _unavailable(error) from error

    async def attachments(self, wanted: Sequence[tuple[str, Key]]) -> list[memoryview | None]:
        """Return attachments by (group id, key). None means that the files do not have it."""
        files = self._store.attachments
        return [None] * len(wanted) if files is None else await files.read(wanted)

    def tasks(self, task_ids: Sequence[str]) -> list[Task]:
        """Return those of the given tasks that exist. Raises `FaultError("unavailable")`."""
        table, found = self._ready().tasks, []
        for task_id in task_ids:
            with contextlib.suppress(ValueError, IndexError):
                _, row, pass_index = task_id.rsplit(":", 2)
                task = table.task(int(row), int(pass_index))
                found += [task] if task.task_id == task_id else []
        return found

    # --- deciding ---

    def _ready(self) -> Index:
        if self.index is None:
            raise FaultError("unavailable", f"the buffer waits for Redis: {self._why}", RETRY_MS)
        return self.index

    def _take(
        self, index: Index, command: Command, attachments: Sequence[Bytes | BlobRef] = ()
    ) -> tuple[Decision, asyncio.Future[None] | None]:
        """Decide and apply. Return the decision and the future of its confirmation."""
        with busy("serve"):
            if self._store.attachments is not None:
                index.media_bytes = self._store.attachments.media_bytes
            decision = decide(index, command, self.now_ms)
            if decision.writes is None:
                return decision, self._store.tail
            note_decided(index, decision.writes, type(command).__name__, front_epoch=self.front_epoch)
            failpoint("buffer.before_write")
            written = self._store.submit(index.revision, decision.writes, attachments)
            self._wrote_ms = self._seen_ms
            written.add_done_callback(partial(self._note_confirmed, self.front_epoch, index.revision + 1))
            self._fire(index.apply(decision.writes))
            return decision, written

    def _note_confirmed(self, front_epoch: int, revision: int, written: asyncio.Future[None]) -> None:
        if not written.cancelled() and written.exception() is None:
            self._on_confirmed(revision)
            record("confirmed", front_epoch=front_epoch, revision=revision)
            failpoint("buffer.after_write")

    def _pass_time(self, index: Index) -> None:
        """Extend all deadlines after an outage, and end everything whose deadline has passed."""
        now_ms = self.now_ms
        gap_ms, self._seen_ms = now_ms - self._seen_ms, now_ms
        if gap_ms > OUTAGE_MS:
            log.warning("this process was held up; deadlines move on", held_up_s=gap_ms / 1000)
            self._take(index, ExtendDeadlines(gap_ms))
        due_ms = index.next_deadline_ms
        if due_ms is not None and due_ms <= now_ms:
            self._take(index, ExpireDeadlines())
        if now_ms - self._wrote_ms >= ALIVE_MS:
            self._take(index, KeepAlive())

    def _until_change(self, edge: Edge, left_s: float) -> float:
        """Return the longest time to wait for an edge. There is a limit because the trainer's wait for
        overtaken groups ends at a certain time, without an event."""
        due_ms = self.index.overtaken_due_ms if edge == "batch" and self.index is not None else None
        return left_s if due_ms is None else min(left_s, max(0.001, (due_ms - self.now_ms) / 1000))

    async def _beat(self) -> None:
        """Advance the ledger's time when no requests arrive."""
        while True:
            due_ms = self.index.next_deadline_ms if self.index is not None else None
            pause_s = BEAT_S if due_ms is None else min(BEAT_S, (due_ms - self.now_ms) / 1000)
            await asyncio.sleep(max(0.001, pause_s))
            if self.index is not None:
                self._pass_time(self.index)

    # --- loss and return of Redis ---

    def _use(self, opened: Opened) -> None:
        if opened.lost_writes:
            self.lost_writes += opened.lost_writes
            log.error(
                f"Redis came back without {opened.lost_writes} acknowledged writes; what they held and no "
                "checkpoint has is generated and scored again",
                lost=opened.lost_writes,
            )
        nonce = secrets.token_hex(3)
        index = Index(self._rules, self._tasks, opened.records, nonce=nonce, revision=opened.revision)
        self.index = index
        self._seen_ms = self._wrote_ms = self.now_ms
        note_loaded(
            index, front_epoch=opened.front_epoch, idle_ms=opened.idle_ms, lost_writes=opened.lost_writes
        )
        # Reset only after the loss is logged: if this front dies before, the next front logs it.
        self._on_confirmed(opened.revision)
        if opened.idle_ms:
            self._take(index, ExtendDeadlines(opened.idle_ms))
        if opened.lost_writes:
            # Claims that had ended exist again, and heartbeats of their scorers would keep them alive.
            for scorer in list(index.claims_of):
                self._take(index, Arrived(scorer))
        if opened.lost_episodes:
            log.error(
                "episodes are without their bytes; their tasks are tried again",
                lost=len(opened.lost_episodes),
            )
            self._take(index, BytesLost(opened.lost_episodes))
        log.info(
            "ledger loaded",
            front_epoch=opened.front_epoch,
            revision=opened.revision,
            groups=len(index.groups),
            v_train={policy: index.consumer(policy).v_train for policy in index.consumers},
        )

    def _on_failure(self, error: StoreError) -> None:
        """Handle a write that was not confirmed. Every decision based on it is invalid, so the index is
        dropped."""
        self.index = None
        self._note(error)
        self._fire()
        if not self._stopping:
            log.warning("a write was not confirmed", error=str(error))
            self._spawn(self._rebuild(error))

    def _note(self, error: StoreError) -> None:
        """Record the error, which calls during the outage get as their answer, and log each new reason
        once."""
        if str(error) != self._why and self._trouble is not None:
            log.warning("waiting for Redis", reason=str(error))
        self._why = str(error)
        self._trouble = error.trouble if isinstance(error, StoreUnavailable) else "refused"

    async def _rebuild(self, error: StoreError) -> None:
        pause_s = FIRST_PAUSE_S
        while isinstance(error, StoreUnavailable):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            try:
                if self._revive is not None:
                    await self._revive()
                opened = await self._store.open(self._on_failure)
                self._trouble = None
                self._use(opened)
                if self._store.full:
                    self._spawn(self._wait_for_room())
                return
            except StoreError as again:
                error = again
                self._note(error)
        log.error("the front ends", error=str(error))
        self._end(error)

    async def _wait_for_room(self) -> None:
        """Delay episodes and leases until Redis has memory again. Requests that free memory continue."""
        while self._store.full and self.index is not None:
            await asyncio.sleep(ROOM_PAUSE_S)
            with contextlib.suppress(StoreUnavailable):
                await self._store.used_bytes()
        if not self._store.full:
            log.info("Redis has room again")
            self._fire()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._workers.add(task)
        task.add_done_callback(self._on_worker_done)

    def _on_worker_done(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


async def _happens(event: asyncio.Event, limit_s: float) -> bool:
    """Wait for `event`, at most `limit_s`. Return whether it was set."""
    if limit_s <= 0:
        return False
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return False


def not_written(error: OSError) -> FaultError:
    log.error("episodes cannot be written to disk", error=str(error))
    return FaultError("unavailable", f"episodes cannot be written: {error}", FULL_RETRY_MS)


def _unavailable(error: StoreError) -> FaultError:
    return FaultError("unavailable", str(error), RETRY_MS)


# --- the event log (areal_async/base/events.py defines the format) ---


NO_VERSIONS = Versions(-1, -1, -1)


def note_loaded(index: Index, *, front_epoch: int, idle_ms: int, lost_writes: int) -> None:
    """Log that a ledger was taken over."""
    if not recording():
        return
    record(
        "loaded",
        front_epoch=front_epoch,
        revision=index.revision,
        idle_ms=idle_ms,
        lost_writes=lost_writes,
        groups={
            _named(index, id_, policy): [*_standing(group, policy), group.held]
            for id_, group in index.groups.items()
            for policy in group.training
        },
        **_place(index.meta, index),
    )


def note_decided(index: Index, writes: WriteSet, command: str, *, front_epoch: int) -> None:
    """Log the decided `writes`. `index` does not contain them yet."""
    if not recording():
        return
    moved: dict[str, list[Any]] = {}
    stored: list[list[Any]] = []
    unstored: list[str] = []
    for group_id, group in writes.groups.items():
        old = index.groups.get(group_id)
        for policy in {**(old.training if old else {}), **(group.training if group else {})}:
            (was, step), (now, next_step) = _standing(old, policy), _standing(group, policy)
            if (was, step) != (now, next_step):
                last = next_step if group is not None else step
                moved[_named(index, group_id, policy)] = [was, now, last]
        if group is None:
            continue
        before, after = set(old.held if old is not None else ()), group.held
        for sample in after:
            episode = group.episodes[sample]
            if sample not in before:
                for policy, held in episode.versions.items() or [("", NO_VERSIONS)]:
                    name = _named(index, f"{group_id}.{sample}", policy)
                    stored.append([name, held.epoch, held.oldest, held.newest])
        unstored += [f"{group_id}.{sample}" for sample in sorted(before.difference(after))]
    old_counts = index.meta.counts
    fields: dict[str, Any] = {
        "moved": moved,
        "stored": stored,
        "unstored": unstored,
        "batches": {
            _named(index, step, policy): plan and list(plan.group_ids)
            for (policy, step), plan in writes.batches.items()
        },
        "counts": {
            reason: count - old_counts.get(reason, 0)
            for reason, count in writes.meta.counts.items()
            if count != old_counts.get(reason, 0)
        },
    }
    record(
        "decided",
        front_epoch=front_epoch,
        revision=index.revision,
        command=command,
        **_place(writes.meta, index),
        **{name: value for name, value in fields.items() if value},
    )


def _place(meta: LedgerMeta, index: Index) -> dict[str, Any]:
    """Return the positions of the trainers and the cursor. In a job with one policy, its name and figures are
    top-level fields."""
    trainers = {
        policy: {"v_train": each.v_train, "trainer_epoch": each.epoch, "checkpoint": each.checkpoint}
        for policy in index.consumers
        for each in [meta.consumer(policy)]
    }
    only = next(iter(trainers))
    clocks = {"policy": only, **trainers[only]} if len(trainers) == 1 else {"policies": trainers}
    return {**clocks, "position": meta.position}


def _named(index: Index, what: Any, policy: str) -> Any:
    """Return `what` with the policy's name in front, or `what` alone in a job with one policy."""
    return what if len(index.consumers) == 1 else f"{policy}/{what}"


def _standing(group: GroupRecord | None, policy: str) -> tuple[str, int]:
    """Return the state of a group for a policy, and its step. Return ("", -1) if there is no group."""
    if group is None or policy not in group.training:
        return "", -1
    return GroupState(group.state_for(policy)).name, group.training[policy].step
