"""What the worker's process adds to the worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from areal_async.base.errors import RpcTimeout
from areal_async.base.versions import VersionTag
from areal_async.launch.plan import name_is_held
from areal_async.rpc.weights_messages import SnapshotNotice
from areal_async.service.context import ServiceContext
from rollout_service import service
from rollout_service.service import NameTaken, name_of_our_own
from tests.contexts import context_for_test
from tests.unit.rollout.fakes import job


def test_a_second_worker_of_the_same_name_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    ctx = context_for_test(job(), tmp_path, "rollout", "rollout-7")
    other = context_for_test(job(), tmp_path, "rollout", "rollout-8")
    with name_of_our_own(ctx):
        with pytest.raises(NameTaken, match=rf"rollout-7 works .* \(process {os.getpid()}\).*--name"):
            with name_of_our_own(ctx):
                pass
        assert name_is_held(ctx.host, "rollout-7")
        with name_of_our_own(other):
            pass
    with name_of_our_own(ctx):
        pass


async def test_each_restart_holds_its_snapshot_for_itself_and_outlives_the_trainer(tmp_path, monkeypatch):
    names: list[str] = []

    class Source:
        async def connect(self) -> None: ...

        async def next(self, after: VersionTag | None) -> SnapshotNotice:
            return SnapshotNotice(VersionTag("policy", 1, 2), "here", "hash")

        async def open(self, notice: SnapshotNotice) -> str:
            return notice.path

        async def ack(self, tag: VersionTag) -> None:
            raise RpcTimeout("the trainer restarts")

        async def close(self) -> None: ...

    def make_receiver(ctx: ServiceContext, purpose: str, *, name: str, tensors: bool) -> Source:
        names.append(name)
        return Source()

    given: dict[str, Any] = {}
    monkeypatch.setattr(service, "make_receiver", make_receiver)
    monkeypatch.setattr(service, "ReplicaSet", lambda *positional, **named: given.update(named))
    ctx = context_for_test(job(), tmp_path, "rollout", "rollout-0")
    service.make_replicas(ctx, on_serving=lambda share: None)

    async with given["newest"]() as one, given["newest"]() as other:
        assert one == other == "here"
    assert len({ctx.name, *names}) == 3
