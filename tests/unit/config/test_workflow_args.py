"""`rollout.workflow_args` of a job that is read, and what a worker says of them."""

import pytest
import yaml

from areal_async.config.load import job_from_mapping
from rollout_service.workflows import WorkflowError, load_workflow


def test_paths_in_the_arguments_are_relative_to_the_job_file(tmp_path):
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


def test_a_worker_says_what_is_wrong_too(tmp_path):
    with pytest.raises(WorkflowError, match="multi_turn has no argument 'max_turn'"):
        load_workflow("multi_turn", {"environment": "w.py:World", "max_turn": 3})
    (tmp_path / "flow.py").write_text("async def flow(ctx, task, *, depth, width=3): ...")
    load_workflow(f"{tmp_path}/flow.py:flow", {"depth": 1})
    with pytest.raises(WorkflowError, match="workflow_args"):
        load_workflow(f"{tmp_path}/flow.py:flow", {"hight": 2})
