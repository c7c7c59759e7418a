"""A job file that starts from others and takes values from the environment."""

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


def test_variables_are_filled_in_with_their_types(folder, monkeypatch):
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("EMPTY", "")
    text = (folder / "job.yaml").read_text()
    more = "trainer: {steps: '${STEPS}', optimizer: {lr: '${RATE_OF_NOBODY:-3e-5}'}}\nseed: ${EMPTY:-5}\n"
    (folder / "job.yaml").write_text(text.replace("job: sums", "job: sums-${STEPS}-${x}") + more)
    assert "${x}" in refusal(folder / "job.yaml")  # only names in capitals are variables
    (folder / "job.yaml").write_text(text.replace("job: sums", "job: sums-${STEPS}") + more)
    job = load_job(folder / "job.yaml")
    assert (job.job, job.trainer.steps, job.trainer.optimizer.lr, job.seed) == ("sums-12", 12, 3e-5, 5)


def test_a_variable_that_is_not_set_or_holds_a_secret_is_refused_by_field(folder, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "hush")
    with (folder / "job.yaml").open("a") as file:
        file.write("trainer: {steps: '${STEPS_OF_NOBODY}'}\nreward: {args: {by: '${HUB_TOKEN}'}}\n")
    said = refusal(folder / "job.yaml")
    assert "trainer.steps: the environment variable STEPS_OF_NOBODY is not set" in said
    assert "reward.args.by: ${HUB_TOKEN} looks like a secret" in said
    assert "hush" not in said


@pytest.mark.parametrize("name", ["SITE_AUTH", "DATABASE_DSN", "COOKIE", "GH_PAT", "DB_PASS", "PLAIN"])
def test_variables_that_may_hold_a_secret_do_not_come_into_a_job(folder, monkeypatch, name):
    monkeypatch.setenv(name, "a8f5f167f44f4964e6c998dee827110c")
    with (folder / "job.yaml").open("a") as file:
        file.write(f"reward: {{args: {{by: '${{{name}}}'}}}}\n")
    said = refusal(folder / "job.yaml")
    assert f"reward.args.by: ${{{name}}} looks like a secret" in said
    assert "a8f5" not in said
