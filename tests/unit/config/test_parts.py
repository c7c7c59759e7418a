"""Every part that a job names is asked what it has against the job."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_async.base.mistakes import Mistake
from areal_async.config import registry
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job, load_job
from areal_async.config.parts import PART_FIELDS, named_parts, own_part_mistakes, part_mistakes
from rollout_service.workflows import WorkflowError, load_workflow


def careful(episode: object, *, limit: int = 1) -> float:
    return float(limit)


def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
    yield Mistake(field, f"{job.job} gives {dict(arguments)}", "Mend it")


careful.check_job = check_job  # type: ignore[attr-defined]


@pytest.fixture
def careful_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.REWARDS.built_in, "careful", f"{__name__}:careful")


def job_with(tmp_path: Path, name: str, **arguments: object) -> JobConfig:
    content: dict[str, object] = {"job": "test", "model": tmp_path, "tasks": {"train": tmp_path / "t.jsonl"}}
    return JobConfig.model_validate(content | {"reward": {"name": name, "args": arguments}})


def about_rewards(mistakes: Iterator[Mistake]) -> list[str]:
    return [str(mistake) for mistake in mistakes if mistake.field.startswith("reward")]


def test_every_part_that_a_job_names_is_asked(tmp_path):
    fields = {part.field for part in named_parts(job_with(tmp_path, "exact_match"))}
    objective = {f"trainer.objective.{part}" for part in ("advantage", "loss", "correction", "normaliser")}
    others = {"rollout.engine", "rollout.workflow", "reward.name", "trainer.backend", "weights.channel"}
    assert fields == objective | others


FLOW = "rollout={workflow: "


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        *((f"{field}=parts/mine.py:part", kind) for field, kind in PART_FIELDS.items()),
        ("reward.name=parts/mine.py:part", registry.REWARDS),
        ("reward.routes=[{name: 'parts/mine.py:part'}]", registry.REWARDS),
        ("reward={name: weighted, args: {parts: [{name: 'parts/mine.py:part'}]}}", registry.REWARDS),
        (f"{FLOW}multi_turn, workflow_args: {{environment: 'parts/mine.py:part'}}}}", registry.ENVIRONMENTS),
        (f"{FLOW}tool_use, workflow_args: {{tools: ['parts/mine.py:part']}}}}", registry.TOOLS),
    ],
)
def test_a_part_of_every_kind_is_in_a_file_beside_the_job_file(override, kind, folder, monkeypatch):
    (folder / "parts").mkdir()
    (folder / "parts" / "mine.py").write_text("part = 'mine'\n")
    monkeypatch.chdir("/")
    written = dump_job(load_job(folder / "job.yaml", [override]))
    name = f"{folder}/parts/mine.py:part"
    assert name in written
    assert kind.find(name) == "mine"


@pytest.mark.usefixtures("careful_rewards")
def test_a_part_judges_the_job_once_its_own_arguments_are_right(tmp_path):
    job = job_with(tmp_path, "careful", limit=3)
    assert about_rewards(part_mistakes(job)) == ["reward.args: test gives {'limit': 3}. Mend it."]
    wrong = job_with(tmp_path, "careful", limits=3)
    assert about_rewards(part_mistakes(wrong)) == [
        "reward.args.limits: careful has no argument 'limits'. It takes limit."
    ]


@pytest.mark.usefixtures("careful_rewards")
def test_a_name_that_nothing_has_is_a_mistake_and_a_users_file_is_read_apart(tmp_path):
    (said,) = about_rewards(part_mistakes(job_with(tmp_path, "carefull")))
    assert said.startswith("reward.name: there is no reward 'carefull'")
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit\ndef mine(episode, *, size): ...\n")
    own = job_with(tmp_path, f"{file}:mine")
    assert about_rewards(part_mistakes(own)) == about_rewards(own_part_mistakes(own)) == []
    file.write_text("def mine(episode, *, size): ...\n")
    assert about_rewards(own_part_mistakes(own, run=True)) == [
        f"reward.args.size: {file}:mine needs 'size', and it is missing. Add it."
    ]


def test_paths_in_the_arguments_are_relative_to_the_job_file(tmp_path):
    given = {"tools": ["t.py:look_up"], "environment": "sub/w.py:World", "answer": "x.py: {answer}"}
    content = {"job": "test", "model": "m", "tasks": {"train": "t.jsonl"}}
    content["rollout"] = {"workflow": "tool_use", "workflow_args": given}
    read = load_job(content, source="test", base=tmp_path, files=False).rollout.workflow_args
    assert read["tools"] == [f"{tmp_path}/t.py:look_up"]
    assert read["environment"] == f"{tmp_path}/sub/w.py:World"
    assert read["answer"] == "x.py: {answer}"


def test_a_worker_says_what_is_wrong_too(tmp_path):
    with pytest.raises(WorkflowError, match="multi_turn has no argument 'max_turn'"):
        load_workflow("multi_turn", {"environment": "w.py:World", "max_turn": 3})
    (tmp_path / "flow.py").write_text("async def flow(ctx, task, *, depth, width=3): ...")
    load_workflow(f"{tmp_path}/flow.py:flow", {"depth": 1})
    with pytest.raises(WorkflowError, match="workflow_args"):
        load_workflow(f"{tmp_path}/flow.py:flow", {"hight": 2})
