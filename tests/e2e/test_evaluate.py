"""Models of finished runs: evaluated, sampled from, and trained on."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.e2e.conftest import told_by
from tests.jobs import command
from tests.waiting import deadline_s

pytestmark = pytest.mark.slow

LIMIT_S = deadline_s(600)


def evaluated(*arguments):
    return json.loads(told_by("evaluate", *arguments, "--json"))


def test_a_model_evaluated_afterwards_has_the_figures_of_the_runs_own_evaluator(finished, tmp_path):
    run = finished("plain")
    first, *_, last = run.records("evaluation")
    told = evaluated(run.folder, "--out", tmp_path / "answers.jsonl")
    assert told["mean"] == pytest.approx(last["mean"])
    assert (told["n"], told["unscored"], told["rewards"]) == (last["n"], last["unscored"], last["rewards"])
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == told["n"] * told["samples"]
    assert sum(answer["reward"] for answer in answers) / len(answers) == pytest.approx(last["accuracy"])
    few = evaluated(f"{run.folder}@newest", "--limit", 8, "--samples", 2, "--temperature", 1)
    assert (few["n"], few["samples"]) == (8, 2)
    assert few["target"] == f"{run.folder}, step {run.records('step')[-1]['step'] + 1}"
    folder = run.workspace.folder
    data, reward = folder / "held_out.jsonl", f"{folder / 'reward.py'}:share_of_ones"
    of_run = ("rollout.max_model_len=192", f"rollout.workflow={folder / 'workflow.py'}:four_turns")
    settings = [word for field in of_run for word in ("--set", field)]
    untrained = evaluated(
        folder / "model", "--data", data, "--reward", reward, "--max-new-tokens", 8, *settings
    )
    assert untrained["mean"] == pytest.approx(first["mean"])
    (answer, other) = json.loads(told_by("generate", run.folder, "1+1=", "--raw", "-n", 2, "--json"))[
        "answers"
    ]
    assert {*answer} == {*other} == {"text", "finish_reason", "tokens"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate", "MODEL"], "--data: a model folder has none of its own"),
        (["evaluate", "MODEL", "--data", "held_out.jsonl"], "--reward: a model folder has none of its own"),
        (["evaluate", "nowhere@3"], "there is no run folder or job file nowhere"),
        (["generate", "MODEL", "hello"], "has no chat template. Add --raw"),
        (["generate", "MODEL", ""], "PROMPT: it is empty"),
    ],
)
def test_what_cannot_be_evaluated_or_asked_is_refused_with_the_option_that_is_missing(
    workspace, arguments, said
):
    words = command(*("model" if word == "MODEL" else word for word in arguments))
    done = subprocess.run(words, cwd=workspace.folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_finished_run_that_gets_more_steps_trains_what_one_longer_run_would(workspace, finished):
    synchronous = finished("synchronous")  # 10 steps
    job_file = workspace.job("more", trainer__steps=4, buffer__max_staleness=0)
    folder = workspace.folder / "runs" / "more"

    told_by("run", job_file, "--inline", "--plain")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4
    refused = subprocess.run(command("resume", folder), capture_output=True, text=True, timeout=LIMIT_S)
    assert (refused.returncode, "trainer.steps=N" in refused.stderr) == (2, True)
    told_by("resume", job_file, "--inline", "--plain", "trainer.steps=7")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == [*range(7)]
    expected = [record["loss"] for record in synchronous.records("step")[:7]]
    assert [step["loss"] for step in steps] == pytest.approx(expected, abs=1e-4)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 7
