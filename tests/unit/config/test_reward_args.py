"""What is wrong with the rewards of a job is known before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_async.config.checks import check_fields
from areal_async.config.files import check_files
from areal_async.config.job import JobConfig
from areal_async.config.load import job_from_mapping

OWN = """
from reward_service.sdk import reward
import reward_service.sdk as sdk

@reward
def close(given, *, digits, scale=1.0): ...

@reward(batch=8)
def many(inputs): ...

@sdk.reward(scope="group")
async def tournament(inputs, *, rounds=3): ...

@reward(**{"scope": "group"})
def hidden(inputs, **anything): ...
"""


def mapping(reward: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    tasks = {"train": "train.jsonl"}
    return {"job": "test", "model": "model", "tasks": tasks, "reward": reward, "rollout": rollout}


def found(mistakes: list[Any]) -> list[tuple[str, str]]:
    return [(mistake.field, str(mistake)) for mistake in mistakes if mistake.field.startswith("reward")]


FIELDS = [
    ({"name": "nothing"}, "reward.name", "no reward 'nothing'"),
    ({"args": {"x": 1}}, "reward.args.x", "exact_match has no argument 'x'"),
    (
        {"routes": [{"name": "arithmetic", "args": {"x": 1}}]},
        "reward.routes.0.args.x",
        "arithmetic has no argument 'x'",
    ),
    (
        {"name": "code_matrix", "scope": "group", "timeout_s": 30, "args": {"extract": "whole"}},
        "reward.args.extract",
        "code_matrix has no argument 'extract'",
    ),
    ({"scope": "group"}, "reward.scope", "judges one episode at a time"),
    ({"routes": [{"name": "environment"}]}, "reward.routes.0.name", "records none here"),
    ({"on_error": {"then": "mask"}, "min_scored": 99}, "reward.min_scored", "Set it to"),
    ({"on_timeout": {"then": "mask"}, "min_scored": 1}, "reward.min_scored", "is zero"),
]


@pytest.mark.parametrize(("reward", "field", "text"), FIELDS)
def test_a_mistake_in_the_reward_names_the_field_and_the_fix(reward, field, text):
    [(where, message)] = found(check_fields(JobConfig.model_validate(mapping(reward))))
    assert where == field
    assert text in message


def test_good_rewards_have_no_mistakes():
    reward = {"name": "arithmetic", "routes": [{"name": "exact_match", "data_source": "text*"}]}
    reward |= {"on_error": {"then": "mask"}}
    assert found(check_fields(JobConfig.model_validate(mapping(reward)))) == []


OWN_MISTAKES = [
    ({"name": "own.py:close"}, "reward.args.digits", "needs 'digits'"),
    ({"name": "own.py:close", "args": {"digits": 2, "scal": 1}}, "reward.args.scal", "takes digits, scale"),
    ({"name": "own.py:many", "args": {"x": 1}}, "reward.args.x", "has no argument"),
    ({"name": "own.py:many", "scope": "group"}, "reward.scope", "not marked as judging whole groups"),
    ({"name": "own.py:tournament"}, "reward.scope", "Set it to group"),
    ({"name": "own.py:nothing"}, "reward.name", "defines no 'nothing'"),
    ({"routes": [{"name": "own.py:nothing"}]}, "reward.routes.0.name", "defines no 'nothing'"),
    ({"routes": [{"name": "own.py:close"}]}, "reward.routes.0.args.digits", "needs 'digits'"),
]


@pytest.mark.parametrize(("reward", "field", "text"), OWN_MISTAKES)
def test_a_reward_of_ones_own_is_checked_by_the_text_of_its_file(tmp_path, reward, field, text):
    [(where, message)] = found(check_files(own_job(tmp_path, reward)))
    assert where == field
    assert text in message


@pytest.mark.parametrize(
    "reward",
    [
        {"name": "own.py:close", "args": {"digits": 2}},
        {"name": "own.py:tournament", "scope": "group", "args": {"rounds": 1}},
        {"name": "own.py:hidden", "scope": "group", "args": {"whatever": 1}},
        {"routes": [{"name": "own.py:many"}]},
    ],
)
def test_a_good_reward_of_ones_own_has_no_mistakes(tmp_path, reward):
    job = own_job(tmp_path, reward)
    assert found(check_fields(job)) == []
    assert found(check_files(job)) == []


def own_job(tmp_path: Path, reward: dict[str, Any]) -> JobConfig:
    (tmp_path / "own.py").write_text(OWN)
    return job_from_mapping(mapping(reward), source="job.yaml", base=tmp_path, files=False)


def test_code_in_routes_and_arguments_is_found_from_the_folder_of_the_job_file(tmp_path):
    reward = {"routes": [{"name": "own.py:many"}]}
    job = job_from_mapping(mapping(reward), source="job.yaml", base=tmp_path, files=False)
    assert job.reward.routes[0].name == f"{tmp_path}/own.py:many"
