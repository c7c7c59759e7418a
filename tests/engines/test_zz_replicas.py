"""A set over a real server: requests survive its death, the next one serves the newest weights, and the end
of the set leaves nothing. This file comes last, for it kills the server that the others share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from agreement import Snapshots

from areal_async.config.job import JobConfig
from areal_async.rpc.schema import VersionTag
from areal_async.runtime.process import RestartPolicy
from areal_async.trajectory import Sampling
from rollout_service.engines import make_engine
from rollout_service.engines.base import EngineError, GenerateRequest
from rollout_service.replicas import ReplicaSet
from tests.contexts import context_for_test
from tests.engines.conftest import LENGTH, processes

pytestmark = pytest.mark.engine
LONG = Sampling(temperature=1.0, max_new_tokens=48)


def job_of(name: str, model: Path, urls: list[str]) -> JobConfig:
    server = {"urls": urls}
    rollout = {"engine": name, "max_concurrent": 16, "max_model_len": LENGTH, "server": server}
    content = {"job": "replicas", "model": model, "tasks": {"train": "none"}, "rollout": rollout}
    return JobConfig.model_validate(content)


async def test_requests_survive_the_death_of_their_server(
    server_of: tuple[str, str], endless: Path, tmp_path: Path
) -> None:
    name, url = server_of
    written = Snapshots(endless, tmp_path / "snapshots")
    snapshots = [written.write(VersionTag("policy", 0, v)) for v in range(3)]
    made: list[Any] = []

    def make(index: int) -> Any:
        """The first is attached to the server that runs already, the next starts its own."""
        job = job_of(name, endless, [] if made else [url])
        place = context_for_test(job, tmp_path, "rollout", "rollout-0")
        made.append(make_engine(job, slots=16, activity="rollout", place=place, replica=index))
        return made[-1]

    replicas = ReplicaSet(make, restarts=RestartPolicy(limit=2, first_pause_s=0.1))

    def asking(number: int, of: str = "r") -> asyncio.Task[Any]:
        request = GenerateRequest(f"{of}{number}", [5, 6, 7], LONG, session=f"g#0.{number}")
        return asyncio.create_task(replicas.generate(request))

    await replicas.start(snapshots[0])
    watching = asyncio.create_task(replicas.watch())
    try:
        await replicas.exchange(snapshots[1])
        victims = processes(url)

        def kill(_: Any) -> None:
            while victims:
                with contextlib.suppress(ProcessLookupError):  # the others may end with the first
                    os.kill(victims.pop(0).pid, signal.SIGKILL)

        # It is killed at the first piece, long before the last: on a fast machine any detour is too late.
        longest = Sampling(temperature=1.0, max_new_tokens=LENGTH - 3)
        heard = asyncio.create_task(replicas.generate(GenerateRequest("heard", [5, 6, 7], longest), kill))
        asked = [asking(number) for number in range(24)]
        with pytest.raises(EngineError, match="had been streamed"):  # what was told cannot be unsaid
            await asyncio.wait_for(heard, 60)
        results = await asyncio.gather(*asked)
        assert not watching.done()
        assert len(made) == 2
        assert replicas.version == VersionTag("policy", 0, 1)
        for result in results:
            assert len(result.token_ids) == 48
            assert set(result.versions.tolist()) == {1}
        await replicas.exchange(snapshots[2])
        assert set((await asking(0, "after")).versions.tolist()) == {2}
        own = processes(made[1].url)
        last = [asking(number, "last") for number in range(8)]
        await asyncio.sleep(0)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await replicas.stop()
    for outcome in await asyncio.gather(*last, return_exceptions=True):
        assert isinstance(outcome, EngineError)
    assert not psutil.wait_procs(own, timeout=60)[1]
