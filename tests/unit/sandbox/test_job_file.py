"""What a job file may say about programs and their time."""

import pytest

from areal_async.config.checks import check_fields
from areal_async.config.job import JobConfig


def mistakes(reward):
    tasks = {"train": "train.jsonl"}
    written = {"job": "test", "model": "model", "tasks": tasks, "reward": reward}
    job = JobConfig.model_validate(written)
    return [(one.field, str(one)) for one in check_fields(job) if one.field.startswith("reward")]


@pytest.mark.parametrize(
    ("reward", "field"),
    [
        ({"name": "code_stdio", "timeout_s": 5}, "reward.timeout_s"),
        ({"name": "code_tests", "args": {"budget_s": 30}}, "reward.timeout_s"),
        ({"routes": [{"name": "code_stdio", "timeout_s": 3}]}, "reward.routes.0.timeout_s"),
    ],
)
def test_a_budget_that_the_deadline_cuts_off_is_a_mistake(reward, field):
    ((named, text),) = mistakes(reward)
    assert named == field
    assert "budget_s" in text


@pytest.mark.parametrize(
    "args",
    [
        {"sandbox": "none", "cpu_s": 1, "partial": True, "language": "auto"},
        {"budget_s": 20},
    ],
    ids=str,
)
def test_what_the_rewards_take_is_accepted(args):
    assert mistakes({"name": "code_stdio", "args": args, "timeout_s": 30}) == []


@pytest.mark.parametrize(
    "args", [{"sandbx": "none"}, {"sandbox": "chroot"}, {"cpu_s": 0}, {"language": "cobol"}]
)
def test_what_they_do_not_take_is_named(args):
    ((named, _),) = mistakes({"name": "code_stdio", "args": args})
    assert named.startswith("reward.args")
