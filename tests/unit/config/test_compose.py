"""A job file that starts from others."""

import pytest

from areal_async.base.mistakes import ConfigError
from areal_async.config.load import load_job


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    return str(caught.value)


def test_a_file_starts_from_those_that_it_includes(folder):
    below = folder / "below"
    below.mkdir()
    (below / "one.yaml").write_text("trainer: {steps: 7, minibatches: 2}\nseed: 3\n")
    (below / "job.yaml").write_text("include: [../job.yaml, one.yaml]\ntrainer: {steps: 9}\n")
    job = load_job(below / "job.yaml")
    assert (job.trainer.steps, job.trainer.minibatches, job.seed) == (9, 2, 3)
    assert job.model == folder / "model"  # as the file says that names it
    assert job.run_dir == below / "runs"


@pytest.mark.parametrize(
    ("included", "said"),
    [("nowhere.yaml", "nowhere.yaml is no file"), ("job.yaml", "includes itself"), ("[1]", "does not name")],
)
def test_what_cannot_be_included_is_refused(folder, included, said):
    (folder / "job.yaml").write_text(f"include: {included}\njob: sums\n")
    assert "include: " in refusal(folder / "job.yaml")
    assert said in refusal(folder / "job.yaml")


def test_a_variable_of_the_environment_does_not_come_into_a_job(folder, monkeypatch):
    monkeypatch.setenv("STEPS", "12")
    with (folder / "job.yaml").open("a") as file:
        file.write("trainer: {steps: '${STEPS}'}\n")
    assert "trainer.steps: '${STEPS}' is not a whole number" in refusal(folder / "job.yaml")
