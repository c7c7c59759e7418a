"""`areal-async data check`: what it counts, and what it finds."""

import json

import pytest
from typer.testing import CliRunner

from areal_async.cli.main import app
from areal_async.config.data_check import length_figures, suggested


def task(prompt, truth="1", **more):
    return {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}, **more}


def check(*arguments, status=0):
    done = CliRunner().invoke(app, ["data", "check", *map(str, arguments), "--json"])
    assert done.exit_code == status, done.output + done.stderr
    return json.loads(done.stdout)


def test_a_good_file_is_counted(write, chat_model):
    rows = [task("a" * n, data_source=f"set{n % 2}") for n in range(1, 21)]
    report = check(write("tasks.jsonl", rows), "--model", chat_model)
    (file,) = report["files"]
    assert (file["kind"], file["rows"], file["broken"]) == ("rl", 20, 0)
    assert file["tokens"] == {"p50": 10, "p95": 19, "max": 20}
    assert {name: found["rows"] for name, found in file["sources"].items()} == {"set0": 10, "set1": 10}
    assert "math would fit" in file["sources"]["set0"]["reward"]


def test_broken_rows_are_named_by_their_lines_and_the_rest_is_counted(write):
    path = write("tasks.jsonl", [task("1+1"), {"prompt": "2+2"}, task(""), task("3+3")])
    path.write_text(path.read_text() + "{not json\n" + json.dumps(task("4+4")))
    (file,) = check(path, status=2)["files"]
    assert (file["rows"], file["broken"]) == (6, 3)
    for words in ("line 2: column `reward_model`", "line 3: column `prompt`", "line 5 is not JSON"):
        assert any(words in problem for problem in file["problems"]), file["problems"]


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([task("1+1", None), task("2+2", "")], (), "2 of 2 rows have no answer"),
        ([task("a" * 30)], ("--model",), "1 of 1 prompts have 30 tokens or more"),
        ([{"prompt": "q", "chosen": "a", "rejected": "a"}], (), "are the same"),
        (
            [{"question": "q", "reward_model": {"style": "rule", "ground_truth": "2"}}],
            (),
            "it is not there. Convert the file to the columns of a task",
        ),
        ([], (), "has no rows"),
    ],
)
def test_what_would_stop_a_job_is_found(write, chat_model, rows, options, words):
    options = [part for name in options for part in ((name, chat_model) if name == "--model" else (name,))]
    (file,) = check(write("tasks.jsonl", rows), *options, status=2)["files"]
    assert any(words in problem for problem in file["problems"]), file["problems"]


def test_two_answers_to_one_question_are_remarked_on(write):
    rows = [task("1+1", "2"), task("1+1", "2"), task("1+1", "3"), task("2+2", "4")]
    (file,) = check(write("tasks.jsonl", rows))["files"]
    assert any("1 rows ask what came before, with another answer" in each for each in file["remarks"])
    assert any("line 3 has '3', and a row before it '2'" in each for each in file["remarks"])


@pytest.mark.parametrize(
    "row",
    [
        task("cut \ud83d here"),
        task("q", "cut \udc00"),
        task("q", extra_info={"a": ["\ud83d"]}),
        {"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "a"}]},
        {"prompt": "q", "chosen": "a", "rejected": "\ud83d"},
    ],
)
def test_half_a_character_is_named_by_its_row(write, row):
    (file,) = check(write("tasks.jsonl", [row, row]), status=2)["files"]
    assert file["broken"] == 2
    assert "line 2: column `" in file["problems"][1]
    assert "half of a surrogate pair" in file["problems"][1]


def test_prompts_on_both_sides_are_found_also_where_a_file_has_them_twice(write):
    train = write("train.jsonl", [task("1+1"), task("1+1 "), task("2+2")])
    held_out = write("held_out.jsonl", [task("1+1"), task("3+3")])
    report = check(train, "--held-out", held_out, status=2)
    assert report["overlap"] == 1
    assert report["files"][0]["duplicates"] == 1
    assert report["files"][0]["remarks"]


def test_what_was_not_looked_at_for_want_of_a_model_is_said(write, tmp_path):
    train = write("train.jsonl", [task("1+1=")])
    assert check(train)["remarks"] == [
        "no --model is named, so prompts were not measured in tokens, nor rendered by its template."
    ]
    job = "job: own\nmodel: runs/warm/model\ntasks: {train: train.jsonl}\n"
    (tmp_path / "job.yaml").write_text(job)
    report = check(tmp_path / "job.yaml")
    assert f"the job's model, {tmp_path}/runs/warm/model, is not there (yet)" in report["remarks"][0]
    assert report["files"][0]["tokens"] == {}


def test_a_job_says_what_its_data_must_fit(write, tmp_path, chat_model):
    chats = [
        task([{"role": "user", "content": "a" * n}], data_source=of) for n, of in ((5, "x"), (9, "sums"))
    ]
    write("train.jsonl", chats)
    (tmp_path / "job.yaml").write_text(
        f"job: own\nmodel: {chat_model}\ntasks: {{train: train.jsonl}}\n"
        "rollout: {max_model_len: 13, sampling: {max_new_tokens: 2}}\n"
        "reward: {name: math, routes: [{data_source: sums, name: arithmetic}]}\n"
    )
    (file,) = check(tmp_path / "job.yaml")["files"]
    assert file["tokens"]["max"] == 12
    rewards = {name: found["reward"] for name, found in file["sources"].items()}
    assert rewards == {"sums": "arithmetic", "x": "math"}
    text = (tmp_path / "job.yaml").read_text()
    given = text.replace("rollout: {", "rollout: {template_args: {enable_thinking: false}, ")
    (tmp_path / "job.yaml").write_text(given)
    (file,) = check(tmp_path / "job.yaml", status=2)["files"]
    assert (file["tokens"]["max"], file["too_long"]) == (16, 1)


@pytest.mark.parametrize(
    ("truth", "reward"),
    [
        ("42", "math"),
        (7, "math"),
        ("\\frac{1}{2}", "math"),
        ("B", "choice"),
        ("so\n#### 4", "gsm8k"),
        ("bcd", "exact_match"),
    ],
)
def test_a_reward_is_suggested_by_the_form_of_the_answers(truth, reward):
    assert suggested(truth) == reward


def test_lengths_are_by_nearest_rank():
    assert length_figures([5]) == {"p50": 5, "p95": 5, "max": 5}
    assert length_figures(range(1, 101)) == {"p50": 50, "p95": 95, "max": 100}
