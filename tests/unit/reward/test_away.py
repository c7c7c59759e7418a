"""A job whose reward is away when its service starts: waited for where it was there before, else an error."""

import asyncio

import pytest

from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from areal_async.runtime.service import restart_may_help
from reward_service import __main__ as own
from reward_service.sdk import RewardLoadError

LIMIT_S = 60.0
JOB = {"job": "j", "model": "m", "tasks": {"train": "t.jsonl"}, "reward": {"name": "arithmetic"}}


@pytest.mark.parametrize("may_pass", [True, False])
@pytest.mark.parametrize("served_before", [True, False])
def test_a_reward_process_starts_again_while_its_reward_is_away_if_it_was_there_before(
    monkeypatch, tmp_path, may_pass, served_before
):
    class Router:
        def __init__(self, section):
            pass

        async def __aenter__(self):
            raise RewardLoadError("no server", may_pass=may_pass)

    monkeypatch.setattr(own, "Router", Router)
    ctx = ServiceContext.for_test(JobConfig.model_validate(JOB), tmp_path, "reward", "reward")
    object.__setattr__(ctx, "served_before", served_before)
    with pytest.raises(RewardLoadError) as caught:
        asyncio.run(own.main(ctx))
    assert restart_may_help(caught.value, served=False) is (may_pass and served_before)
