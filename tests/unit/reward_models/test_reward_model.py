"""The reward model as a backend: a process of its own, batches, deadlines, deaths."""

import asyncio
import os
import runpy
import signal
import sys
from contextlib import suppress

import psutil
import pytest
import torch

from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from reward_service import processes
from reward_service.backends.reward_model.backend import START_LIMIT_S, RewardModel
from reward_service.sdk import RewardInput, RewardLoadError
from tests.forks import FORKS, PassedFd, start_fork_server
from tests.scoring import verdicts_of
from tests.unit.reward_models.tiny import bare_scores, values, write_reward_model
from tests.waiting import until

TEXTS = 20


class ForkedWorker:
    """Stand in for the `ChildProcess` of a pool, in a fork that has imported torch and transformers."""

    def __init__(self, command, *, environment, output, pass_fds, on_orphaned):
        start_fork_server()
        module, *arguments = command[command.index("-m") + 1 :]
        given = {str(fd): PassedFd(fd) for fd in pass_fds}
        self._process = FORKS.Process(
            target=_be_worker, args=(module, arguments, environment, PassedFd(output), given)
        )
        self._process.start()
        self.pid = self._process.pid

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self):
        ended, loop, fd = asyncio.Event(), asyncio.get_running_loop(), self._process.sentinel
        loop.add_reader(fd, ended.set)
        await ended.wait()
        loop.remove_reader(fd)
        return self._process.exitcode


def _be_worker(module, arguments, environment, output, given):
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = [module, *(str(given.get(argument, argument)) for argument in arguments)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    """The ids of the processes that score, in the order of their starts."""
    started = []

    def start(*command, **options):
        worker = ForkedWorker(*command, **options)
        started.append(worker.pid)
        return worker

    monkeypatch.setattr(processes, "ChildProcess", start)
    return started


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("model"))


def model(directory, *, timeout_s=30.0, **arguments):
    settings = {"model": str(directory), "device": "cpu", "template": "{response}", **arguments}
    spec = RewardSpec("reward_model", settings, timeout_s=timeout_s)
    return RewardModel(spec, RewardSection(name="reward_model", args=settings))


def inputs(n):
    return [RewardInput(prompt="12+34=", response=str(number % TEXTS)) for number in range(n)]


@pytest.mark.slow
async def test_verdicts_are_final_and_true_whatever_becomes_of_the_process(directory, workers):
    torch.set_num_threads(1)
    expected = bare_scores(directory, [str(number) for number in range(TEXTS)]) * 15
    found, calls = {}, inputs(15 * TEXTS)
    async with model(directory, max_batch=16, timeout_s=1.5) as backend:
        assert backend.alive == backend.capacity == 16
        found["calls"] = await verdicts_of(backend.submit, calls)
        # Stopped, the process is one that computes for ever.
        os.kill(workers[-1], signal.SIGSTOP)
        found["hung"] = await verdicts_of(backend.submit, calls[:TEXTS])
        scoring = asyncio.create_task(verdicts_of(backend.submit, calls))
        await until(lambda: backend.busy, "a batch under way")
        os.kill(workers[-1], signal.SIGKILL)
        found["killed"] = await scoring
        os.kill(workers[-1], signal.SIGSTOP)
        scoring = asyncio.create_task(verdicts_of(backend.submit, calls))
        await until(lambda: backend.busy, "a batch under way")
    found["closed"] = await scoring
    assert len(set(workers)) == 3
    assert not any(map(psutil.pid_exists, workers))
    assert values(found["calls"]) == pytest.approx(expected, abs=1e-4)
    # What was stopped and what was killed is computed again: nobody is to blame for it twice.
    assert values(found["hung"]) == pytest.approx(expected[:TEXTS], abs=1e-4)
    assert values(found["killed"]) == pytest.approx(expected, abs=1e-4)
    assert {verdict.kind for verdict in found["closed"]} == {"pool"}


async def test_a_model_that_cannot_be_loaded_is_said_before_the_job_begins(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(RewardLoadError, match="cannot be loaded"):
        async with model(tmp_path):
            pass


def test_a_call_may_wait_for_the_model_to_be_loaded_again(directory):
    spec = RewardSpec("reward_model", {"model": str(directory)}, timeout_s=1.0)
    assert spec.longest_s >= START_LIMIT_S
