"""A section of which a file gives a part has the rest as the page of the job file says."""

from typing import Any

import pytest

from areal_async.base.mistakes import ConfigError
from areal_async.config.fields import Field
from areal_async.config.job import JobConfig, job_fields
from areal_async.config.load import load_job

BASE: dict[str, Any] = {"job": "sums", "model": "model", "tasks": {"train": "train.jsonl"}}


def fields_with_a_default() -> list[Field]:
    """Those of sections that stand once; of a list of sections each has what its own type says."""
    return [
        field
        for field in job_fields().values()
        if not field.required and not field.path.startswith(("reward.routes.", "observe.loggers."))
    ]


def job_with(path: str, value: Any) -> JobConfig:
    """The least job that gives `path`, and no other field of its sections."""
    content: dict[str, Any] = {**BASE, "tasks": dict(BASE["tasks"])}
    place = content
    *sections, name = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    return JobConfig.model_validate(content)


def value_at(job: JobConfig, path: str) -> Any:
    value: Any = job
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", [field.path for field in fields_with_a_default()])
def test_a_field_given_as_its_default_changes_no_other(path):
    given = job_with(path, job_fields()[path].default)
    different = {
        field.path: value_at(given, field.path)
        for field in fields_with_a_default()
        if value_at(given, field.path) != field.default
    }
    assert different == {}


def test_evaluation_is_greedy_whatever_part_of_its_section_is_given(folder):
    for part in ("max_new_tokens=8", "stop=['.']", "top_p=1.0", "top_k=0"):
        job = load_job(folder / "job.yaml", [f"evaluation.sampling.{part}"])
        assert job.evaluation_sampling.temperature == 0, part


def test_evaluation_answers_are_as_long_as_the_rollouts_unless_told_otherwise(folder):
    told = ["rollout.sampling.max_new_tokens=7", "evaluation.sampling.max_new_tokens=9"]
    for overrides, tokens in ((told[:1], 7), (told, 9)):
        job = load_job(folder / "job.yaml", overrides)
        assert job.evaluation_sampling.max_new_tokens == tokens


def test_the_length_of_evaluation_answers_matters_only_where_there_is_an_evaluation(folder):
    short = ["rollout.max_model_len=64", "rollout.sampling.max_new_tokens=8"]
    load_job(folder / "job.yaml", short)
    short.append("evaluation.sampling.max_new_tokens=64")
    with pytest.raises(ConfigError, match=r"evaluation\.sampling\.max_new_tokens"):
        load_job(folder / "job.yaml", short)
    load_job(folder / "job.yaml", [*short, "tasks.evaluation=null"])
