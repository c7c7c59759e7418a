"""The process of the shared service between jobs that come and go, each a buffer on the real wire."""

import asyncio
import contextlib
import os
import signal
import sys
import time

import msgspec
import psutil
import pytest

from areal_async.config.job import JobConfig
from areal_async.launch.registry import JobEntry, Owner, Registry, RegistryError, Service
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.verdicts import Score
from areal_async.runtime.context import RunPlaces, ServiceContext, ServicePlace
from reward_service import metrics
from reward_service.attached import SharedRewardError, attach, why_waits
from reward_service.shared import SharedService
from tests.unit.reward.wire_buffer import DEADLINE_S, WireBuffer

SLOW = """
import time
from reward_service.sdk import reward

@reward
def f(given):
    time.sleep(0.5)
    return 0.5
"""


class Job:
    """A run that asks to be served: its folder, its buffer, its entry."""

    def __init__(self, folder, registry, name, total=0, reward="arithmetic", **settings):
        self.folder, self.registry, self.name = folder / name, registry, name
        self.folder.mkdir()
        self.endpoint = f"ipc://{self.folder}/b"
        self.buffer = WireBuffer(self.endpoint, total, name)
        reward = {"name": reward, "service": "shared", "registry": str(registry.folder), **settings}
        job = {"job": name, "model": "m", "tasks": {"train": "t.jsonl"}, "reward": reward}
        places = RunPlaces(
            run_id=name,
            supervisor_pid=os.getpid(),
            run_dir=str(self.folder),
            socket_dir=str(self.folder),
            shm_dir=str(self.folder),
            buffer_endpoint=self.endpoint,
            weights_endpoint="",
            services=[ServicePlace("reward", "reward", 0, "reward_service", 0)],
            job=JobConfig.model_validate(job).model_dump(mode="json"),
        )
        RunSecret.make(self.folder)
        self.context = self.folder / "context.json"
        self.context.write_bytes(msgspec.json.encode(places))

    def register(self):
        entry = JobEntry(self.name, self.name, str(self.context), Owner.of(os.getpid()))
        self.registry.add_job(entry)

    def state(self):
        service = self.registry.service()
        return None if service is None else service.jobs.get(self.name)

    async def judged(self):
        """Until every episode has its verdict."""
        await self.buffer.until(lambda: not self.buffer.left and len(self.buffer.taken) == self.total)

    @property
    def total(self):
        return len(set(self.buffer.left) | set(self.buffer.claimed))


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


@pytest.fixture
def job(tmp_path, registry):
    return lambda *given, **settings: Job(tmp_path, registry, *given, **settings)


@contextlib.asynccontextmanager
async def service(registry, workers=2):
    """The process of a service; yields it, and kills what is left of it."""
    command = [sys.executable, "-m", "reward_service.shared", "--registry", str(registry.folder)]
    log = os.open(registry.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    process = await asyncio.create_subprocess_exec(
        *command, "--workers", str(workers), stdout=log, stderr=log
    )
    os.close(log)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(holds):
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.to_thread(time.sleep, 0.01)


def family(process):
    return psutil.Process(process.pid).children(recursive=True)


async def all_gone(processes):
    await until(lambda: not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])


def test_jobs_come_and_go_and_share_one_pool(registry, job, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(SLOW.replace("0.5)", "0.001)"))

    async def run():
        first, second, third = job("first", 300), job("second", 300), job("third", 50, reward=f"{own}:f")
        async with first.buffer.serving(), second.buffer.serving(), third.buffer.serving():
            first.register()
            async with service(registry) as process:
                await first.judged()
                assert len(family(process)) == 2
                second.register()
                third.register()
                await second.judged()
                await third.judged()
                assert len(family(process)) == 3  # the third job's own code has a worker of its own
                await until(lambda: third.state().state == "serving")
                assert third.state().workers_alive == 1
                registry.remove_job("third")
                await until(lambda: third.state() is None)
                assert len(family(process)) == 2
                workers = family(process)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 60) == 0
                await all_gone(workers)
        assert registry.service() is None
        return first.buffer.taken, third.buffer.taken

    first, third = asyncio.run(run())
    assert all(verdict == Score(1.0) for verdict in first.values())
    assert all(verdict == Score(0.5) for verdict in third.values())


def test_verdicts_are_final_over_the_death_of_the_service_none_is_lost_or_repeated(registry, job):
    async def run():
        jobs = [job("one", 3000), job("two", 3000)]
        async with jobs[0].buffer.serving(), jobs[1].buffer.serving():
            for each in jobs:
                each.register()
            async with service(registry) as process:
                await jobs[0].buffer.until(lambda: len(jobs[0].buffer.taken) > 100)
                workers = family(process)
                process.kill()
                await process.wait()
                await all_gone(workers)
            left = [3000 - len(each.buffer.taken) for each in jobs]
            async with service(registry):
                await jobs[0].judged()
                await jobs[1].judged()
        return jobs, left

    jobs, left = asyncio.run(run())
    assert max(left) > 0  # it died at work
    for each in jobs:
        assert len(each.buffer.taken) == 3000
        assert each.buffer.arrivals >= 1
        assert all(verdict == Score(1.0) for verdict in each.buffer.taken.values())


def test_a_slow_job_delays_no_other_and_the_shared_pool_is_shared_in_turns(registry, job, tmp_path):
    own = tmp_path / "slow.py"
    own.write_text(SLOW)

    async def run():
        slow, quick = job("slow", 50, reward=f"{own}:f"), job("quick", 500)
        async with slow.buffer.serving(), quick.buffer.serving():
            slow.register()
            async with service(registry, workers=1):
                await slow.buffer.until(lambda: slow.buffer.taken)
                quick.register()
                await quick.judged()
                return len(slow.buffer.taken)

    assert asyncio.run(run()) < 50


def test_a_reward_that_cannot_be_loaded_fails_its_job_alone_and_says_why(registry, job):
    async def run():
        bad, good = job("bad", 5, reward="no_such_file.py:f"), job("good", 50)
        async with good.buffer.serving(), service(registry):
            bad.register()
            good.register()
            await good.judged()
            await until(lambda: bad.state() is not None and bad.state().state == "failed")
            return bad.state()

    assert "there is no file no_such_file.py" in asyncio.run(run()).text


def shown():
    """The reasons to wait that the metrics show."""
    return {s.labels["why"] for m in metrics.WAITS.collect() for s in m.samples if s.value}


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (Service("waiting", "rpc to ipc:///some/where timed out after 3.14 s"), "waiting"),
        (Service("starting", "anything"), "starting"),
        (Service("serving", "lets go of it"), ""),
        (Service("failed", "no such file"), ""),
    ],
)
def test_the_reason_to_wait_is_one_of_few_words(state, word):
    assert why_waits(state) == word


def test_a_job_waits_for_a_service_and_says_what_it_waits_for(registry, job, caplog):
    caplog.set_level("INFO", logger="areal.reward")

    async def run():
        waiting = job("waiting", 20)
        ctx = ServiceContext.load(waiting.context, "reward")
        attached = asyncio.create_task(attach(ctx))
        await until(lambda: "waiting for a shared reward service" in caplog.text)
        why = [r.areal_fields["why"] for r in caplog.records if "waiting" in r.message]
        assert shown() == {"no_service"}
        async with waiting.buffer.serving(), service(registry):
            await waiting.judged()
            await until(lambda: not shown())
            ctx.stop.set()
            await asyncio.wait_for(attached, DEADLINE_S)
            assert waiting.state() is None
        return why[0]

    why = asyncio.run(run())
    assert "areal-async reward up --registry" in why
    assert registry.jobs() == []


def test_a_job_whose_reward_the_service_cannot_load_ends_with_the_reason(registry, job):
    async def run():
        bad = job("bad", 5, reward="no_such_file.py:f")
        async with service(registry):
            await asyncio.wait_for(attach(ServiceContext.load(bad.context, "reward")), DEADLINE_S)

    with pytest.raises(SharedRewardError, match=r"there is no file no_such_file\.py"):
        asyncio.run(run())
    assert registry.jobs() == []


def test_a_second_service_of_one_registry_is_refused(registry):
    async def run():
        lock = registry.hold()
        try:
            await SharedService(registry, workers=1).run(asyncio.Event())
        finally:
            os.close(lock)

    with pytest.raises(RegistryError, match="already serves the jobs"):
        asyncio.run(run())
