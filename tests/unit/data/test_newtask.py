"""`areal-async init`: what it makes works as it is, and replaces nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_async.base.mistakes import ConfigError
from areal_async.cli.main import app
from areal_async.cli.new_task import job_name
from areal_async.config.load import load_job
from areal_async.launch.prompt_trial import tokenizer_mistakes
from areal_async.models.prompts import prompt_ids
from tests.waiting import LIMIT_S

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, and what to do next."""
    folder = tmp_path_factory.mktemp("own") / "My Task"
    done = CliRunner().invoke(app, ["init", str(folder), "--json"])
    assert done.exit_code == 0, done.stderr
    return folder, json.loads(done.stdout)["next"]


def test_every_file_of_the_folder_works_as_it_is(made):
    folder, steps = made
    assert [step.split()[:3] for step in steps] == [
        ["areal-async", "reward", "test"],
        ["areal-async", "run", f"{folder.parent}/My"],
        ["areal-async", "validate", f"{folder.parent}/My"],
        ["areal-async", "run", f"{folder.parent}/My"],
    ]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    given = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": path}}
    command = [sys.executable, "-m", "areal_async.cli.main", "reward", "test", f"{folder}/reward.py:score"]
    tried = subprocess.run(
        [*command, "--data", f"{folder}/train.jsonl", "--limit", "50"], timeout=LIMIT_S, **given
    )
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert tried.stdout.rstrip().endswith("ok")
    warm = load_job(folder / "warm_start.yaml")
    assert warm.job == "my-task-warm"
    job = load_job(folder / "job.yaml", ["model=base"])  # the warm start makes the other
    assert job.model == folder / "base"
    checked = CliRunner().invoke(app, ["validate", str(folder / "job.yaml"), "model=base"])
    assert checked.exit_code == 0, checked.output
    assert "held-out prompts are in" not in checked.output


def test_one_that_is_interrupted_leaves_nothing_and_can_be_made_again(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("areal_async.cli.new_task._write_tiny", interrupted)
        CliRunner().invoke(app, ["init", str(tmp_path / "own")])
    assert list(tmp_path.rglob("*")) == [tmp_path / "own"]
    assert CliRunner().invoke(app, ["init", str(tmp_path / "own")]).exit_code == 0


def test_before_the_warm_start_the_job_names_it(made):
    folder, _ = made
    with pytest.raises(ConfigError, match="If the run my-task-warm is to make it, run its job first"):
        load_job(folder / "job.yaml")


def test_the_tiny_model_takes_a_chat_file_too_and_writes_every_character_of_a_task(made, tmp_path):
    from transformers import AutoTokenizer

    folder, _ = made
    asked = [({"role": "user", "content": f"{n} or 500?"}, str(max(n, 500))) for n in range(100, 140)]
    tasks = ({"prompt": [question], "reward_model": {"ground_truth": answer}} for question, answer in asked)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    job = load_job(folder / "warm_start.yaml", [f"tasks.train={tmp_path}/train.jsonl"])
    assert tokenizer_mistakes(job) == []
    tokenizer = AutoTokenizer.from_pretrained(job.model, local_files_only=True)
    assert tokenizer.decode(prompt_ids(tokenizer, [asked[0][0]])) == "100 or 500?="
    text = "Sort 3 words,\n\tdon't (ask): A_b{c}~="
    ids = tokenizer(text)["input_ids"]
    assert (len(ids), tokenizer.decode(ids)) == (len(text), text)
    assert tokenizer.unk_token_id not in ids


def test_what_is_there_is_left_alone(made):
    folder, _ = made
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    again = CliRunner().invoke(app, ["init", str(folder)])
    assert again.exit_code == 2
    assert "Name a folder that is new or empty" in again.stderr
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_model_of_ones_own_is_asked_in_messages(tmp_path, chat_model):
    done = CliRunner().invoke(app, ["init", str(tmp_path / "own"), "--model", str(chat_model), "--json"])
    assert done.exit_code == 0, done.stderr
    assert "warm" not in done.stdout
    job = load_job(tmp_path / "own" / "job.yaml", files=False)
    assert job.model == chat_model
    first = json.loads((tmp_path / "own" / "train.jsonl").read_text().splitlines()[0])
    assert first["prompt"][0]["role"] == "user"
    for wrong in (
        str(chat_model.with_name(f"{chat_model.name}s")),
        "./nowhere",
        "runs/sums/modle",
        "~/nowhere",
    ):
        refused = CliRunner().invoke(app, ["init", str(tmp_path / "none"), "--model", wrong])
        said = " ".join(refused.stderr.split())
        assert (refused.exit_code, "does not exist" in said) == (2, True)
        assert not (tmp_path / "none").exists()
    named = CliRunner().invoke(app, ["init", str(tmp_path / "hub"), "--model", "Qwen/Qwen2.5-0.5B"])
    assert named.exit_code == 0, named.stderr
    assert "model: Qwen/Qwen2.5-0.5B\n" in (tmp_path / "hub" / "job.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "job"), [("My Task", "my-task"), ("1", "1"), ("___", "own-task"), ("a.b_c", "a-b-c")]
)
def test_the_job_is_called_as_the_folder_as_far_as_it_may(tmp_path, name, job):
    assert job_name(tmp_path / name) == job
