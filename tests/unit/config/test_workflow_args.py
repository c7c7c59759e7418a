"""`rollout.workflow_args` are known before anything is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_async.config.checks import check_fields
from areal_async.config.files import check_files
from areal_async.config.job import JobConfig
from areal_async.config.load import job_from_mapping
from rollout_service.workflows import WorkflowError, load_workflow


def job(workflow: str, arguments: dict[str, Any], reward: str = "exact_match") -> JobConfig:
    return JobConfig.model_validate(
        {
            "job": "test",
            "model": "m",
            "tasks": {"train": "t.jsonl"},
            "rollout": {"workflow": workflow, "workflow_args": arguments},
            "reward": {"name": reward},
        }
    )


WORLD = {"environment": "w.py:World"}


@pytest.mark.parametrize(
    ("workflow", "arguments"),
    [
        ("single_turn", {}),
        ("multi_turn", WORLD | {"environment_args": {"any": "thing"}, "reward": "final"}),
        ("tool_use", {"tools": ["calc", "t.py:look_up"], **WORLD}),
    ],
)
def test_right_arguments_are_no_mistake(workflow: str, arguments: dict[str, Any]) -> None:
    assert check_fields(job(workflow, arguments)) == []


def test_an_environments_reward_needs_a_workflow_that_makes_one() -> None:
    (mistake,) = check_fields(job("tool_use", {}, reward="environment"))
    assert mistake.field == "reward.name"
    assert check_fields(job("multi_turn", WORLD, reward="environment")) == []
    assert check_fields(job("tool_use", WORLD, reward="environment")) == []


OWN = """
async def flow(ctx, task, *, depth, width=3): ...
async def open_flow(ctx, task, **anything): ...
"""


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("flow", {"depth": 1}, None),
        ("flow", {"depth": 1, "width": 2}, None),
        ("flow", {}, "flow in .* needs 'depth'"),
        ("flow", {"depth": 1, "hight": 2}, "flow in .* has no argument 'hight'"),
        ("open_flow", {"depth": 1}, None),
    ],
)
def test_a_workflow_of_ones_own_takes_its_keyword_arguments(
    name: str, arguments: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    (tmp_path / "flow.py").write_text(OWN)
    workflow = f"{tmp_path}/flow.py:{name}"
    mistakes = [m for m in check_files(job(workflow, arguments)) if m.field.startswith("rollout.workflow")]
    if says is None:
        assert mistakes == []
        load_workflow(workflow, arguments)
    else:
        (mistake,) = mistakes
        assert re.search(says, mistake.problem)
        with pytest.raises(WorkflowError, match=r"workflow_args"):
            load_workflow(workflow, arguments)


def test_paths_in_the_arguments_are_relative_to_the_job_file(tmp_path: Path) -> None:
    content = yaml.safe_load(
        """
        job: test
        model: m
        tasks: {train: t.jsonl}
        rollout:
          workflow: tool_use
          workflow_args: {tools: [t.py:look_up, calc], environment: sub/w.py:World, answer: "x.py: {answer}"}
        """
    )
    read = job_from_mapping(content, source="test", base=tmp_path, files=False).rollout.workflow_args
    assert read["tools"] == [f"{tmp_path}/t.py:look_up", "calc"]
    assert read["environment"] == f"{tmp_path}/sub/w.py:World"
    assert read["answer"] == "x.py: {answer}"


@pytest.mark.parametrize(
    ("workflow", "arguments", "problem"),
    [
        ("tool_use", {"tools": ["t.py:nothing"]}, "t.py defines no 'nothing'"),
        ("tool_use", {"tools": ["no.py:f"]}, "no.py cannot be read: No such file"),
        ("multi_turn", {"environment": "t.py:Nowhere"}, "defines no 'Nowhere'"),
        ("tool_use", {"tools": ["t.py:look_up"], "environment": "t.py:World"}, None),
    ],
)
def test_code_that_the_arguments_name_is_looked_up_before_anything_starts(
    workflow: str, arguments: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text("def look_up(word): ...\nclass World: ...\n")
    content = {
        "job": "test",
        "model": "m",
        "tasks": {"train": "t.jsonl"},
        "rollout": {"workflow": workflow, "workflow_args": arguments},
    }
    read = job_from_mapping(content, source="test", base=tmp_path, files=False)
    found = [m for m in check_files(read) if m.field.startswith("rollout.workflow_args")]
    assert [problem in mistake.problem for mistake in found] == ([True] if problem else [])


def test_a_worker_says_what_is_wrong_too() -> None:
    with pytest.raises(WorkflowError, match="multi_turn has no argument 'max_turn'"):
        load_workflow("multi_turn", WORLD | {"max_turn": 3})
