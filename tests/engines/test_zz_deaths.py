"""The death of a real server: requests survive it in a set, the next server serves the newest weights, and
the end leaves no process. This file comes last, for it kills the servers that the other tests share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_async.base.processes import RestartPolicy
from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, EngineLost, GenerateRequest, GenerateResult
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.replicas import ReplicaSet
from tests.engines.servers import Kind, Model, ask, processes
from tests.engines.updates import LIMIT_S, endless

pytestmark = pytest.mark.engine
LONG = Sampling(temperature=1.0, max_new_tokens=48)


async def test_requests_survive_the_death_of_their_server(
    owned: tuple[Kind, HttpEngine], model_of: Any, tmp_path: Path
) -> None:
    kind, owner = owned
    model: Model = model_of(kind)
    snapshots = [model.snapshot(version, kind.epoch) for version in range(3)]
    made: list[HttpEngine] = []

    def make(index: int) -> Any:
        """The first is attached to the server that runs already, the next starts its own."""
        made.append(kind.make(model, tmp_path, **({} if made else {"url": owner.url})))
        return made[-1]

    replicas = ReplicaSet(make, restarts=RestartPolicy(limit=2, first_pause_s=0.1))

    def asking(number: int, of: str = "r") -> asyncio.Task[GenerateResult]:
        request = GenerateRequest(f"{of}{number}", list(kind.prompt), LONG, session=f"g#0.{number}")
        return asyncio.create_task(replicas.generate(request))

    await replicas.start(snapshots[0])
    watching = asyncio.create_task(replicas.watch())
    try:
        await replicas.exchange(snapshots[1])
        victims = processes(owner.url)
        family = list(victims)

        def kill(_: Any) -> None:
            while victims:
                with contextlib.suppress(ProcessLookupError):  # the others may end with the first
                    os.kill(victims.pop(0).pid, signal.SIGKILL)

        # It is killed at the first piece, long before the last: on a fast machine any detour is too late.
        heard = asyncio.create_task(replicas.generate(endless("heard"), kill))
        own = ask(owner, 8, kind.prompt, LONG, "own")
        asked = [asking(number) for number in range(24)]
        with pytest.raises(EngineError, match="had been streamed"):  # what was told cannot be unsaid
            await asyncio.wait_for(heard, LIMIT_S)
        results = await asyncio.gather(*asked)
        assert not watching.done()
        assert len(made) == 2
        assert replicas.version == VersionTag("policy", kind.epoch, 1)
        for result in results:
            assert result.finish_reason in ("stop", "length")
            assert set(result.versions.tolist()) == {1}
            model.assert_true(kind.prompt, result)
        await replicas.exchange(snapshots[2])
        assert set((await asking(0, "after")).versions.tolist()) == {2}
        for outcome in await asyncio.gather(*own, return_exceptions=True):
            assert isinstance(outcome, GenerateResult | EngineLost)
        with pytest.raises(EngineLost):
            await owner.generate(endless("after"))
        assert not owner.alive()
        await owner.stop()
        with pytest.raises(EngineError):
            await owner.generate(endless("stopped"))
        family += processes(made[1].url)
        last = [asking(number, "last") for number in range(8)]
        await asyncio.sleep(0)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await replicas.stop()
    for outcome in await asyncio.gather(*last, return_exceptions=True):
        assert isinstance(outcome, EngineError)
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]
