"""The reward model as a backend: a process of its own, batches, deadlines, deaths."""

import asyncio
import os
import signal

import psutil
import pytest

from areal_async.config.reward import RewardSection
from areal_async.rewards import RewardSpec
from reward_service.backends.reward_model.backend import START_LIMIT_S, RewardModel
from reward_service.sdk import RewardInput, RewardLoadError
from tests.scoring import verdicts_of
from tests.unit.reward_models.tiny import bare_scores, values, write_reward_model
from tests.waiting import until


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("model"))


def model(directory, *, timeout_s=30.0, **arguments):
    settings = {"model": str(directory), "device": "cpu", "template": "{response}", **arguments}
    spec = RewardSpec("reward_model", settings, timeout_s=timeout_s)
    return RewardModel(spec, RewardSection(name="reward_model", args=settings))


def inputs(n):
    return [RewardInput(prompt="12+34=", response=str(number)) for number in range(n)]


@pytest.mark.slow
async def test_verdicts_are_final_and_true_whatever_becomes_of_the_process(directory):
    """One backend for all of it: a start takes longer than everything else."""
    expected = bare_scores(directory, [str(number) for number in range(300)])

    found, calls = {}, inputs(300)
    async with model(directory, max_batch=16, timeout_s=1.5) as backend:
        assert backend.alive == backend.capacity == 16
        found["calls"] = await verdicts_of(backend.submit, calls)
        [first] = scoring_processes()
        # Stopped, the process is one that computes for ever.
        os.kill(first, signal.SIGSTOP)
        found["hung"] = await verdicts_of(backend.submit, calls[:40])
        [second] = scoring_processes()
        scoring = asyncio.create_task(verdicts_of(backend.submit, calls))
        await until(lambda: backend.busy, "a batch under way")
        os.kill(second, signal.SIGKILL)
        found["killed"] = await scoring
        [third] = scoring_processes()
        os.kill(third, signal.SIGSTOP)
        scoring = asyncio.create_task(verdicts_of(backend.submit, calls))
        await until(lambda: backend.busy, "a batch under way")
    found["closed"] = await scoring
    assert len({first, second, third}) == 3
    assert not any(map(psutil.pid_exists, (first, second, third)))
    assert values(found["calls"]) == pytest.approx(expected, abs=1e-4)
    # What was stopped and what was killed is computed again: nobody is to blame for it twice.
    assert values(found["hung"]) == pytest.approx(expected[:40], abs=1e-4)
    assert values(found["killed"]) == pytest.approx(expected, abs=1e-4)
    assert {verdict.kind for verdict in found["closed"]} == {"pool"}


def scoring_processes():
    return [
        process.pid
        for process in psutil.Process().children()
        if "reward_service.pool.worker" in process.cmdline()
    ]


async def test_a_model_that_cannot_be_loaded_is_said_before_the_job_begins(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(RewardLoadError, match="cannot be loaded"):
        async with model(tmp_path):
            pass


def test_a_call_may_wait_for_the_model_to_be_loaded_again(directory):
    spec = RewardSpec("reward_model", {"model": str(directory)}, timeout_s=1.0)
    assert spec.longest_s >= START_LIMIT_S
