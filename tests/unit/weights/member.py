"""A member of the process groups of channel `nccl`, over gloo: what an engine and its server do in one."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Message
from areal_async.rpc.weights_messages import (
    AskTensors,
    BreakGroup,
    NoNews,
    SendsNothing,
    SendsTensors,
    TakeBucket,
)
from areal_async.weights.channels.tensor_group import JOIN
from tests.waiting import deadline_s

LIMIT_S = deadline_s(300)


class Answers(Protocol):
    """A trainer, whether near or behind a socket."""

    async def answer(self, message: Message) -> Any: ...


class Member:
    """An engine's side, as a server has it."""

    def __init__(self, name: str = "rollout-0/0", ranks: int = 1, limit_s: float = LIMIT_S) -> None:
        """`limit_s` is the longest wait for the others in a broadcast. Processes that still start may join
        later than that."""
        self.name, self.ranks, self.limit_s = name, ranks, limit_s
        self.group = ""
        self.tag = VersionTag("policy", 0, 0)
        self.backends: list[Any] = []

    def ask(self, version: int, epoch: int = 0) -> AskTensors:
        self.tag = VersionTag("policy", epoch, version)
        return AskTensors(self.name, self.group, self.tag, self.ranks)

    def join(self, plan: SendsTensors) -> None:
        """Raises `RuntimeError`."""

        def member(rank: int) -> Any:
            limit = timedelta(seconds=LIMIT_S)
            store: dist.Store = dist.TCPStore(plan.host, plan.port, plan.world_size, False, timeout=limit)
            for prefix in (plan.group, f"{plan.group}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, rank, plan.world_size, limit)

        with ThreadPoolExecutor(self.ranks) as pool:
            self.backends = list(pool.map(member, range(plan.rank_offset, plan.rank_offset + self.ranks)))
        self.group = plan.group

    def receive(self, plan: SendsTensors, number: int) -> dict[str, torch.Tensor]:
        """One bucket, as SGLang's `flattened_bucket` takes it: an item must begin at a multiple of its
        size."""
        bucket, how = plan.buckets[number], dist.BroadcastOptions()
        how.rootRank, how.timeout = 0, timedelta(seconds=self.limit_s)
        dtypes = [getattr(torch, name) for name in bucket.dtypes]
        sizes = [
            torch.Size(shape).numel() * d.itemsize for d, shape in zip(dtypes, bucket.shapes, strict=True)
        ]
        runs = [torch.empty(sum(sizes), dtype=torch.uint8) for _ in self.backends]
        works = [backend.broadcast([run], how) for backend, run in zip(self.backends, runs, strict=True)]
        for work in works:
            work.wait()
        pieces = zip(bucket.names, runs[-1].split(sizes), dtypes, bucket.shapes, strict=True)
        return {name: piece.view(dtype).view(shape) for name, piece, dtype, shape in pieces}

    async def take(self, trainer: Answers, plan: SendsTensors) -> dict[str, torch.Tensor]:
        """All buckets, in step with the others. Raises `RuntimeError` where it cannot."""
        if plan.group != self.group:
            await self.in_step(trainer, plan, JOIN)
            await asyncio.to_thread(self.join, plan)
        taken: dict[str, torch.Tensor] = {}
        for number in range(len(plan.buckets)):
            await self.in_step(trainer, plan, number)
            taken |= await asyncio.to_thread(self.receive, plan, number)
        await self.in_step(trainer, plan, len(plan.buckets))
        return taken

    async def in_step(self, trainer: Answers, plan: SendsTensors, number: int) -> None:
        answer: Any = NoNews()
        while isinstance(answer, NoNews):
            answer = await trainer.answer(TakeBucket(self.name, plan.group, self.tag, number, 1000))
        if isinstance(answer, SendsNothing):
            raise RuntimeError(answer.reason)

    async def fail(self, trainer: Answers, plan: SendsTensors, reason: str = "refused") -> None:
        """As a receiver does after anything failed."""
        await trainer.answer(BreakGroup(self.name, plan.group, reason))
        self.group, self.backends = "", []
