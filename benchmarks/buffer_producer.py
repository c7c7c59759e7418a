"""One producer of `buffer.py`: a process that puts episodes as a rollout worker does, or SETs them with
redis-py.

It reads one JSON command per line and answers with one: `prepare` packs episodes and says how many, `go`
sends them to one of the two and gives back when it began and ended (CLOCK_MONOTONIC, seconds) and how long
each acknowledgement took (ms)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import redis
from buffer_service import JOB, episode, keys_at

from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.messages import Lease, LeasedGroup, PutEpisodes
from rollout_service.worker.uploader import PutBatch, UploadQueue

MAX_PUTS = 4
"""As in `rollout_service.worker`, which would import torch."""


class Producer:
    def __init__(self, name: str, endpoint: str, redis_url: str) -> None:
        self.name = name
        self.buffer = Client(
            endpoint, job=JOB, role="rollout", name=name, access=keys_at(endpoint, "rollout")
        )
        self.redis = redis.Redis.from_url(redis_url)
        self.held: list[tuple[LeasedGroup, dict[int, bytes]]] = []
        self.sets = 0

    async def prepare(self, groups: int, units: int) -> dict[str, Any]:
        self.held = []
        tag = VersionTag("policy", 1, 0)
        while len(self.held) < groups:
            leases = await self.buffer.call(Lease(self.name, groups - len(self.held), [tag], wait_ms=1000))
            assert leases.groups, leases.reason
            for group in leases.groups:
                blobs = {
                    sample: episode(group.task.task_id, group.group_id, sample, units, version=0, epoch=1)
                    for sample in group.missing
                }
                self.held.append((group, blobs))
        sizes = [len(blob) for _, blobs in self.held for blob in blobs.values()]
        return {"items": len(sizes), "size_bytes": sum(sizes)}

    async def put(self) -> dict[str, Any]:
        """As the worker sends what has finished: one message per lease at a time, `MAX_PUTS` in all."""
        queue, sending, acks_ms = UploadQueue(), set[asyncio.Task[None]](), list[float]()

        async def send(batches: list[PutBatch]) -> None:
            asked_s = time.perf_counter()
            ack = await self.buffer.call(
                PutEpisodes([batch.as_message() for batch in batches]),
                attachments=[blob for batch in batches for blob in batch.attachments()],
            )
            acks_ms.append(1e3 * (time.perf_counter() - asked_s))
            for batch, answer in zip(batches, ack.groups, strict=True):
                assert not answer.refused, answer.refused
                queue.settled(batch)

        began_s = time.monotonic()
        for group, blobs in self.held:
            queue.open(group.lease_id, group.group_id, len(blobs))
            for sample, blob in blobs.items():
                queue.add(group.lease_id, sample, blob)
            queue.complete(group.lease_id)
        while queue.episodes:
            while len(sending) < MAX_PUTS and (batches := queue.take()):
                sending.add(asyncio.create_task(send(batches)))
            done, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return {"began_s": began_s, "ended_s": time.monotonic(), "acks_ms": acks_ms}

    def set(self, *, pipelined: bool) -> dict[str, Any]:
        """One SET per episode: each waited for, or as many at once as a put has."""
        acks_ms = []
        began_s = time.monotonic()
        for _, blobs in self.held:
            pending = list(blobs.values())
            while pending:
                n = max(1, min(len(pending), (8 << 20) // len(pending[0]))) if pipelined else 1
                asked_s = time.perf_counter()
                if pipelined:
                    batch = self.redis.pipeline(transaction=False)
                    for blob in pending[:n]:
                        batch.set(self._key(), blob)
                    batch.execute()
                else:
                    self.redis.set(self._key(), pending[0])
                acks_ms.append(1e3 * (time.perf_counter() - asked_s))
                del pending[:n]
        return {"began_s": began_s, "ended_s": time.monotonic(), "acks_ms": acks_ms}

    def _key(self) -> str:
        self.sets += 1
        return f"{self.name}:{self.sets}"


async def main() -> None:
    producer = Producer(*sys.argv[1:])
    await producer.buffer.connect(60)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        match order["do"]:
            case "prepare":
                answer = await producer.prepare(order["groups"], order["units"])
            case "areal-async":
                answer = await producer.put()
            case system:
                answer = producer.set(pipelined=system == "redis-py, pipelined")
        print(json.dumps(answer), flush=True)
    await producer.buffer.close()


if __name__ == "__main__":
    asyncio.run(main())
