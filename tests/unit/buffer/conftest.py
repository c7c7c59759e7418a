"""A ledger driven by hand: decisions on a simulated clock, applied in memory."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from redis import Redis

from areal_async.base.records import ImageFile, Task
from areal_async.base.verdicts import Score, Verdict
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.launch.one_host import short_socket_dir
from areal_async.rpc.client import Client
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    ClaimedEpisode,
    Commit,
    EpisodeVerdict,
    ExportLedger,
    Heartbeat,
    Lease,
    LeasedGroup,
    NextBatch,
    PutAck,
    PutVerdicts,
    Release,
    StoredGroup,
    VerdictAck,
    Waiting,
)
from areal_async.rpc.schema import Message, Ok
from areal_async.service.context import ServiceContext
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, pack
from replay_buffer.attachments import AttachmentFiles
from replay_buffer.coordinator import Coordinator, GroupBytes
from replay_buffer.ledger.decide import Command, ExpireDeadlines, decide
from replay_buffer.ledger.index import Index, LedgerRecords
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState, GroupState, LedgerMeta, Versions
from replay_buffer.ledger.rules import Rules, VerdictPolicy
from replay_buffer.ledger.transaction import Decision, Transaction
from replay_buffer.redis.address import RedisAddress
from replay_buffer.redis.embedded import EmbeddedRedis
from replay_buffer.redis.store import Store
from replay_buffer.redis.writer import LedgerClock
from replay_buffer.server import main
from tests.contexts import context_for_test
from tests.waiting import LIMIT_S

RULES = Rules.alone(group_size=2, batch_groups=2, max_staleness=1)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, stop=(), seed=1)


class CountedTasks:
    """`rows` tasks, in file order, for `passes` passes, of the data `sources` in turn."""

    dataset_hash = "cafe0123"

    def __init__(
        self, rows: int = 1000, passes: int | None = None, sources: Sequence[str] = ("test",)
    ) -> None:
        self.rows, self.passes, self.sources = rows, passes, sources

    def at(self, position: int) -> tuple[int, int] | None:
        pass_index, row = divmod(position, self.rows)
        return None if self.passes is not None and pass_index >= self.passes else (row, pass_index)

    def task(self, row: int, pass_index: int) -> Task:
        source = self.sources[row % len(self.sources)]
        return Task(f"{self.dataset_hash}:{row}:{pass_index}", f"prompt {row}", data_source=source)

    def images(self, row: int) -> Sequence[ImageFile]:
        return []


class Driver:
    """One ledger with its clock. Commands go in by name; the reply comes out, its writes applied."""

    def __init__(self, tasks: CountedTasks | None = None, **rules: Any) -> None:
        if (retries := rules.pop("retries", None)) is not None:
            rules |= {f"on_{kind}": VerdictPolicy(retries) for kind in ("timeout", "error", "abstain")}
        make = Rules
        if "consumers" not in rules:
            make, rules = Rules.alone, {"batch_groups": 2, "max_staleness": 1} | rules
        self.rules = make(**{"group_size": 2} | rules)
        self.tasks = tasks or CountedTasks()
        self.now_ms = 1_000_000
        self.epoch = 0
        self.decisions: list[Decision] = []
        self.fired: set[str] = set()
        """What the last command has made possible."""
        self.index = self.index_of(
            LedgerRecords(LedgerMeta(ledger_id="ledger", dataset_hash=self.tasks.dataset_hash))
        )

    def index_of(self, records: LedgerRecords, revision: int = 0) -> Index:
        return Index(self.rules, self.tasks, records, nonce="n", revision=revision)

    def send(self, command: Command) -> Message:
        return self.decide(command).reply

    def decide(self, command: Command) -> Decision:
        due_ms = self.index.next_deadline_ms
        if due_ms is not None and due_ms <= self.now_ms:
            self.take(ExpireDeadlines())
        return self.take(command)

    def take(self, command: Command) -> Decision:
        decision = decide(self.index, command, self.now_ms)
        self.fired = set() if decision.writes is None else self.index.apply(decision.writes)
        self.decisions.append(decision)
        return decision

    def rebuilt(self) -> Index:
        """The index that a new front would make of the records alone."""
        now = self.index
        records = LedgerRecords(
            now.meta, dict(now.groups), dict(now.leases), dict(now.claims), dict(now.batches)
        )
        return self.index_of(records, now.revision)

    def open(self, step: int = 0, copy: bytes | None = None) -> Message:
        reply = self.send(OpenedWith("policy", "trainer", step, copy))
        self.epoch = getattr(reply, "epoch", self.epoch)
        return reply

    @property
    def v_train(self) -> int:
        return self.index.consumer("policy").v_train

    def tag(self, version: int | None = None) -> VersionTag:
        return VersionTag("policy", self.epoch, self.v_train if version is None else version)

    def lease(self, capacity: int = 1, version: int | None = None, worker: str = "rollout-0") -> Any:
        return self.send(Lease(worker, capacity, [self.tag(version)])).groups  # type: ignore[attr-defined]

    def why_not(self, version: int | None = None) -> str:
        return self.send(Lease("rollout-0", 1, [self.tag(version)])).reason  # type: ignore[attr-defined]

    def put(
        self,
        lease: LeasedGroup,
        samples: Iterable[int] | None = None,
        version: int | None = None,
        newest: int | None = None,
        epoch: int | None = None,
        size_bytes: int = 100,
        rows: bytes = b"",
    ) -> StoredGroup:
        version = self.v_train if version is None else version
        epoch = self.epoch if epoch is None else epoch
        versions = Versions(version, version if newest is None else newest, epoch, rows)
        by_policy = {} if version < 0 else {"policy": versions}
        samples = lease.missing if samples is None else samples
        arrivals = tuple(Arrival(sample, size_bytes, 8, 4, by_policy) for sample in samples)
        reply = self.send(StoreEpisodes((GroupArrivals(lease.lease_id, lease.group_id, arrivals),)))
        assert isinstance(reply, PutAck)
        (answer,) = reply.groups
        return answer

    def generated(self, groups: int = 1) -> list[LeasedGroup]:
        """Groups leased and stored whole, as many as there is room for."""
        leases: list[LeasedGroup] = self.lease(groups)
        for lease in leases:
            self.put(lease)
        return leases

    def claim(self, most: int = 1000, scorer: str = "reward-0") -> list[ClaimedEpisode]:
        return self.send(Claim(scorer, most)).items  # type: ignore[attr-defined]

    def judge(
        self, items: Sequence[ClaimedEpisode], verdict: Verdict | None = None, scorer: str = "reward-0"
    ) -> VerdictAck:
        return self.judge_each([(item, verdict or Score(1.0)) for item in items], scorer)

    def judge_each(
        self, items: Iterable[tuple[ClaimedEpisode, Verdict]], scorer: str = "reward-0"
    ) -> VerdictAck:
        """Each with a verdict of its own, in one message."""
        verdicts = [EpisodeVerdict(item.episode_id, item.claim_id, verdict) for item, verdict in items]
        reply = self.send(PutVerdicts(scorer, verdicts))
        assert isinstance(reply, VerdictAck)
        return reply

    def scored(
        self, groups: int = 1, version: int | None = None, serving: int | None = None
    ) -> list[LeasedGroup]:
        """`groups` groups leased, generated at `version` and scored."""
        leases = self.lease(groups, serving if serving is not None else version)
        assert len(leases) == groups, self.why_not(version)
        for lease in leases:
            self.put(lease, version=version)
        mine = {lease.group_id for lease in leases}
        self.judge([item for item in self.claim() if item.episode_id.rpartition(".")[0] in mine])
        return leases

    def ask(self, step: int | None = None, epoch: int | None = None) -> Message:
        step = self.v_train if step is None else step
        return self.send(NextBatch("policy", self.epoch if epoch is None else epoch, step))

    def batch(self, step: int | None = None) -> Batch:
        reply = self.ask(step)
        assert isinstance(reply, Batch), reply
        return reply

    def waiting(self, step: int | None = None) -> Waiting:
        reply = self.ask(step)
        assert isinstance(reply, Waiting), reply
        return reply

    def commit(self, step: int | None = None, same_as: Sequence[int] = ()) -> Message:
        step = self.v_train if step is None else step
        return self.send(Commit("policy", self.epoch, step, list(same_as)))

    def step(self) -> Batch:
        """Generate what is needed, and train it."""
        missing = self.rules.consumers["policy"].batch_groups - self.index.group_counts[GroupState.SCORED]
        if missing > 0:
            self.scored(missing)
        batch = self.batch()
        self.commit()
        return batch

    def steps(self, n: int) -> list[Batch]:
        return [self.step() for _ in range(n)]

    def checkpointed(self, step: int | None = None) -> Message:
        return self.send(Checkpointed("policy", self.epoch, self.v_train if step is None else step))

    def export(self) -> bytes:
        """The ledger's copy for a checkpoint of now."""
        return self.decide(ExportLedger("policy", self.epoch, self.v_train)).payload

    def heartbeat(self, *leases: LeasedGroup, worker: str = "rollout-0") -> list[str]:
        ids = [lease.lease_id for lease in leases]
        return self.send(Heartbeat(worker, ids)).lost  # type: ignore[attr-defined]

    def release(self, lease: LeasedGroup, worker: str = "rollout-0") -> Message:
        return self.send(Release(worker, lease.lease_id, "test"))

    def decide_batch_without(self, group: LeasedGroup) -> Batch:
        """The next batch, not waiting for `group`, which nevertheless lives on: as a put that was on its way
        when its group was overtaken."""
        rules, self.index.rules = self.index.rules, replace(self.index.rules, overtaken_waits=False)
        batch = self.batch()
        self.index.rules = rules
        assert group.group_id not in [held.group_id for held in batch.groups]
        return batch

    def drop_by_name(self, group: LeasedGroup, reason: str) -> None:
        """Drop a group as some other part of the ledger would."""
        tx = Transaction(self.index, self.now_ms)
        tx.drop(self.index.groups[group.group_id], reason)
        writes = tx.decide(Ok()).writes
        assert writes is not None
        self.index.apply(writes)

    def set_consumer(self, **changes: Any) -> None:
        """Change the ledger's record of the policy behind its back."""
        meta = self.index.meta
        changed = msgspec.structs.replace(meta.consumer("policy"), **changes)
        self.index.meta = msgspec.structs.replace(meta, consumers={"policy": changed})

    def state(self, group: LeasedGroup | str) -> str | None:
        group_id = group if isinstance(group, str) else group.group_id
        held = self.index.groups.get(group_id)
        return None if held is None else GroupState(held.state_for("policy")).name

    def states(self, group: LeasedGroup) -> list[str]:
        """Of each episode of a group."""
        return [EpisodeState(e.state).name for e in self.index.groups[group.group_id].episodes]

    def count(self, reason: str) -> int:
        return self.index.meta.counts.get(reason, 0)


def stored(index: Index) -> tuple[Any, ...]:
    """All that is stored of a ledger, without the revision, which counts the openings too."""
    return (index.meta, index.groups, index.leases, index.claims, index.batches)


def ids(batch: Batch) -> list[str]:
    return [group.group_id for group in batch.groups]


def reasons(ack: StoredGroup | VerdictAck) -> list[str]:
    """Why each item was refused, in a word."""
    return [refusal.reason.split(":")[0] for refusal in ack.refused]


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """A new ledger with the given rules, its trainer opened at step 0."""

    def make(tasks: CountedTasks | None = None, **rules: Any) -> Driver:
        driver = Driver(tasks, **rules)
        driver.open()
        return driver

    return make


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis for the whole session; a test takes a job name of its own."""
    folder = short_socket_dir(tmp_path_factory.mktemp("redis"))
    folder.mkdir(exist_ok=True)
    server = EmbeddedRedis(folder / "data", folder / "redis", "everysec")
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())
    shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def front_of(
    url: str | RedisAddress,
    job: str,
    rules: Rules = RULES,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    dataset: str = "cafe0123",
    folder: Path | None = None,
    confirmed: int = 0,
    attachments: AttachmentFiles | None = None,
    tasks: CountedTasks | None = None,
    **options: Any,
) -> AsyncIterator[Coordinator]:
    """A front of the job on that Redis; `clock` is the local one, `folder` where large episodes go."""
    ledger_clock = LedgerClock(clock, wall)
    where: dict[str, Any] = {"folder": folder, "attachments": attachments, "confirmed": confirmed}
    store = Store(url, job, dataset, rules.durability, ledger_clock, **where)
    front = Coordinator(store, rules, tasks or CountedTasks(), ledger_clock, **options)
    try:
        await front.start()
        yield front
    finally:
        await front.stop()


@pytest.fixture
def a_front(redis_url: str, job_name: str) -> Callable[..., Any]:
    """`async with a_front() as front`: a front of this test's job."""
    return partial(front_of, redis_url, job_name)


async def lease(front: Coordinator, capacity: int = 1, epoch: int = 1, version: int = 0) -> Any:
    reply = await front.execute(Lease("w", capacity, [VersionTag("policy", epoch, version)]))
    return reply.reply.groups  # type: ignore[attr-defined]


async def store(front: Coordinator, group: Any, blobs: Sequence[Any], samples: Any = None, **tag: int) -> Any:
    """Put `blobs`, of the first samples or of these, as sampled from `version` of `epoch`."""
    return (await ask_to_store(front, group, blobs, samples, **tag)).groups[0]


async def ask_to_store(
    front: Coordinator, group: Any, blobs: Sequence[Any], samples: Any = None, **tag: int
) -> PutAck:
    """Put blobs as `store` does, and return the whole acknowledgement."""
    version, samples = tag.get("version", 0), range(len(blobs)) if samples is None else samples
    versions = {"policy": Versions(version, version, tag.get("epoch", 1))}
    arrivals = tuple(Arrival(i, len(b), 8, 4, versions) for i, b in zip(samples, blobs, strict=True))
    command = StoreEpisodes((GroupArrivals(group.lease_id, group.group_id, arrivals),))
    reply = (await front.store(command, [GroupBytes(blobs)])).reply
    assert isinstance(reply, PutAck)
    return reply


async def judge(front: Coordinator, verdict: Verdict | None = None) -> None:
    """Score all that waits for it."""
    items = (await front.execute(Claim("s", 100))).reply.items  # type: ignore[attr-defined]
    verdicts = [EpisodeVerdict(item.episode_id, item.claim_id, verdict or Score(1.0)) for item in items]
    await front.execute(PutVerdicts("s", verdicts))


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """A client of that Redis, to look past the buffer at what is in it. It blocks."""
    with Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def job_name() -> str:
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def blob() -> Callable[..., bytes]:
    """A codec blob as a worker puts it: three sampled units of `version`."""

    def make(job: str, group_id: str, sample: int, *, version: int = 0, epoch: int = 1, n: int = 3) -> bytes:
        builder = EpisodeBuilder(job, group_id.rpartition("#")[0], group_id, sample)
        prompt = builder.prompt([5, 6, 7])
        builder.sampled(
            list(range(n)),
            [-0.5] * n,
            [version] * n,
            parent=prompt,
            call=Call(sampling=SAMPLING),
            epoch=epoch,
        )
        return pack(builder.build())

    return make


@pytest.fixture
def context(tmp_path: Path, redis_url: str, job_name: str) -> Callable[..., ServiceContext]:
    """`context(redis=…)`: the service context of this test's job."""

    def make(redis: str = redis_url, rows: int = 20, **buffer: Any) -> ServiceContext:
        job = sums_job(tmp_path, job_name, rows, redis=redis, **buffer)
        return context_for_test(job, tmp_path, "buffer", "buffer")

    return make


def sums_job(folder: Path, name: str, rows: int = 20, **buffer: Any) -> JobConfig:
    """A job of `rows` sums in file order, two episodes a group and two groups a step."""
    tasks = [
        {"prompt": f"{i}+1=", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": i + 1}}
        for i in range(rows)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return JobConfig.model_validate(
        {
            "job": name,
            "model": str(folder),
            "run_dir": str(folder / "runs"),
            "tasks": {"train": str(folder / "tasks.jsonl"), "shuffle": False},
            "rollout": {"group_size": 2},
            "buffer": {"batch_groups": 2, "max_staleness": 1} | buffer,
            "reward": {"on_error": {"retries": 0}},
            "trainer": {"steps": 10_000},
        }
    )


@asynccontextmanager
async def serving(ctx: ServiceContext, registry: CollectorRegistry | None = None) -> AsyncIterator[Client]:
    """The service in this loop, and a client of it."""
    service = asyncio.create_task(main(ctx, registry or CollectorRegistry()))
    client = Client(
        ctx.buffer.endpoint, job=ctx.job.job, role="test", name="test", timeout_s=10.0, access=ctx.keys
    )
    connecting = asyncio.create_task(client.connect())
    await asyncio.wait({service, connecting}, return_when=asyncio.FIRST_COMPLETED)
    if service.done():
        connecting.cancel()
        await client.close()
        service.result()
    try:
        yield client
    finally:
        ctx.stop.set()
        await client.close()
        await asyncio.wait_for(service, LIMIT_S)
