"""`areal-async reward new`: what it makes works as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.cli.new_reward import RewardFilesError, write_reward_files
from areal_async.config.reward import RewardSection
from areal_async.data.tasks import read_tasks
from tests.waiting import LIMIT_S

REPOSITORY = Path(__file__).parents[3]


def call(*arguments):
    """A program in a process of its own, with this package on its path."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    command, places = [sys.executable, "-m", *arguments], {"PYTHONPATH": path, "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | places)


def test_the_files_of_a_new_reward_work_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["reward", "new", "tidy"])
    assert made.exit_code == 0, made.stderr
    assert "areal-async reward test tidy/tidy.py:tidy --data tidy/tasks.jsonl" in made.stdout
    own_test = call("pytest", "-q", "-p", "no:cacheprovider", "tidy")
    assert own_test.returncode == 0, own_test.stdout
    tried = call("areal_async.cli.main", "reward", "test", "tidy/tidy.py:tidy", "--data", "tidy/tasks.jsonl")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert tried.stdout.rstrip().endswith("ok")
    assert "sums/carry" in tried.stdout


def test_the_job_file_of_a_new_reward_names_it(tmp_path):
    folder = write_reward_files("tidy", tmp_path)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    section = RewardSection.model_validate(job["reward"])
    assert section.name == "tidy.py:tidy"
    assert len(read_tasks(folder / job["tasks"]["train"])) == 64
    wrong = CliRunner().invoke(app, ["validate", str(folder / "job.yaml")])
    assert wrong.exit_code == 2, "all that is missing is the model"
    assert wrong.stderr.count("\n") == 1
    assert "model: " in wrong.stderr


def test_the_page_shows_what_is_made_and_the_tasks_are_the_same_every_time(tmp_path):
    one, two = (write_reward_files("tidy", tmp_path / name) for name in "ab")
    code = (one / "tidy.py").read_text().partition("\n\n")[2].strip()
    assert code in (REPOSITORY / "docs" / "rewards.md").read_text()
    assert (one / "tasks.jsonl").read_bytes() == (two / "tasks.jsonl").read_bytes()
    sources = {json.loads(line)["data_source"] for line in (one / "tasks.jsonl").read_text().splitlines()}
    assert sources == {"sums/carry", "sums/plain"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-reward", "no name for a Python function"),
        ("class", "no name for a Python function"),
        ("exact_match", "built-in reward"),
        ("json", "Python module"),
    ],
)
def test_a_name_that_cannot_serve_is_refused(tmp_path, name, words):
    with pytest.raises(RewardFilesError, match=words):
        write_reward_files(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_that_exists_is_replaced(tmp_path):
    (tmp_path / "tidy").mkdir()
    (tmp_path / "tidy" / "tidy.py").write_text("mine")
    result = CliRunner().invoke(app, ["reward", "new", "tidy", "--in", str(tmp_path)])
    assert result.exit_code == 1
    assert "exists" in result.stderr
    assert (tmp_path / "tidy" / "tidy.py").read_text() == "mine"
