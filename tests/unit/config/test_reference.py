import re
from pathlib import Path

import pytest
import yaml

from areal_async.config.fields import suggest
from areal_async.config.job import JobConfig, job_fields
from tests.unit.config.job_file_tables import renew

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "job-file.md"


def test_the_page_of_the_job_file_is_in_step_with_the_models():
    page = PAGE.read_text(encoding="utf-8")
    assert renew(page) == page, "run `python tests/unit/config/job_file_tables.py docs/job-file.md`"


def test_a_page_that_leaves_a_section_out_is_noticed():
    page = PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"tasks\.train"):
        renew(page.replace("<!-- fields: tasks -->", ""))


def test_the_example_of_the_page_is_a_valid_job():
    example = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    JobConfig.model_validate(yaml.safe_load(example[1]))


def test_every_field_says_what_it_means():
    assert [path for path, field in job_fields().items() if not field.description] == []


def test_a_default_is_that_of_its_place():
    assert job_fields()["evaluation.sampling.temperature"].default == 0.0
    assert job_fields()["rollout.sampling.temperature"].default == 1.0
    assert job_fields()["model"].required


def test_an_unknown_key_that_is_like_none_is_left_alone():
    assert suggest(JobConfig, "", "job_name") is suggest(JobConfig, "reward", "xyzzy") is None
    assert suggest(JobConfig, "nowhere", "metrics_port") == "observe.metrics_port"
