"""`areal-async reward test`: a reward over a file, through the pool that the service has."""

import json
from pathlib import Path

import pytest

from areal_async.base.errors import ArealError
from areal_async.base.mistakes import ConfigError
from areal_async.cli.tools import TrialRequest
from reward_service.tools.trial import SamplesError, main, read_samples, short, target

FILE = Path(__file__).with_name("remote") / "offered.py"


def row(response=None, truth="4", **columns):
    answer = {} if response is None else {"response": response}
    return {"prompt": "2+2=", "reward_model": {"style": "rule", "ground_truth": truth}, **answer, **columns}


@pytest.fixture
def tasks(tmp_path):
    def write(*rows):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return path

    return write


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def trial(function, data, *fields):
        """The status, and the words of each line that is shown."""
        name = f"{FILE}:{function}" if function in FILE.read_text() else function
        status = main(TrialRequest(name, str(data or ""), fields=["timeout_s=20", *fields]))
        return status, [line.split() for line in capsys.readouterr().out.splitlines()]

    return trial


def test_answers_come_from_the_column_and_a_list_is_one_group(tasks):
    found, source = read_samples(tasks(row("4"), row(["4", "5", "6"]), row()), "response", 10)
    assert [(one.row, one.given.response) for one in found] == [(0, "4"), (1, "4"), (1, "5"), (1, "6")]
    assert source == "column response"
    assert found[3].given.ground_truth == "4"


def test_without_answers_the_ground_truth_stands_in(tasks):
    found, source = read_samples(tasks(row(truth="4"), row(truth=[1, 2])), "response", 10)
    assert [one.given.response for one in found] == ["4", "[1, 2]"]
    assert "ground truth" in source


def test_chat_prompts_are_given_as_text(tasks):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    found, _ = read_samples(tasks(row("4") | {"prompt": messages}), "response", 1)
    assert found[0].given.prompt == "Be brief.\n2+2?"


@pytest.mark.parametrize(
    ("column", "words"), [("answers", "no column 'answers'"), ("truth", "a list of texts")]
)
def test_a_column_that_is_missing_or_no_text_is_refused(tasks, column, words):
    with pytest.raises(SamplesError, match=words):
        read_samples(tasks(row("4") | {"truth": 4}), column, 10)


@pytest.mark.parametrize("period", [2, 4, 5, 10])
def test_a_limit_draws_tasks_at_random_from_the_whole_file_and_says_so(tasks, period):
    path = tasks(*(row(str(n % period)) for n in range(2000)))
    found, source = read_samples(path, "response", 200)
    assert source == "column response, 200 of 2000 rows drawn at random (--limit)"
    share = sum(one.given.response == "0" for one in found) / 200
    assert abs(share - 1 / period) < 0.1
    assert [one.row for one in found] == sorted({one.row for one in found})
    assert [one.row for one in read_samples(path, "response", 200)[0]] == [one.row for one in found]


def test_a_sound_reward_passes(run, tasks):
    path = tasks(row("4"), row("5"), row("4", data_source="sums"))
    status, lines = run("concise", path, "args.most=9")
    assert status == 0
    assert lines[-1] == ["ok"]
    assert ["–", "2", "2", "0", "0", "0", "0.5", "0", "1"] in lines
    assert ["sums", "1", "1", "0", "0", "0", "1", "1", "1"] in lines
    assert ["all", "3", "3", "0", "0", "0", "0.6667", "0", "1"] in lines
    assert ["1", "0", "5"] in lines


def test_errors_and_timeouts_fail_and_say_why(run, tasks):
    path = tasks(*(row(text) for text in ("fine", "raise", "hang", "abstain")))
    status, lines = run("behave", path, "timeout_s=0.3")
    assert status == 1
    assert lines[-1] == ["failed:", "1", "error,", "1", "timeout"]
    assert ["–", "4", "1", "1", "1", "1", "0.5", "0.5", "0.5"] in lines
    page = [" ".join(line) for line in lines]
    assert "abstain 1 3 no opinion" in page
    assert "timeout 1 2 no answer within 0.3 s" in page
    assert ["row", "verdict", "components", "answer"] in lines
    assert ["0", "0.5", "length", "4", "fine"] in lines
    assert any(line.startswith("error: exception 1 1 ") and "ValueError: on purpose" in line for line in page)


def test_a_reward_of_groups_gets_all_answers_of_a_task(run, tasks):
    status, lines = run("longest", tasks(row(["a", "bb", "c"]), row(["aaa", "b"])), "workers=2")
    assert status == 0
    assert [line[1] for line in lines if line and line[0] in ("0", "1")] == ["0", "1", "0", "1", "0"]


def test_the_page_fits_a_narrow_terminal_and_obeys_no_text(tasks, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tasks(row("fine " * 100), row("raise", data_source="a_source_with_a_rather_long_name_of_its_own"))
    request = TrialRequest(f"{FILE}:behave", str(path), fields=["timeout_s=20"])
    assert main(request) == 1
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert "failed: 1 error" in page
    assert "on purpose\\x1b[2J" in page
    assert short("a\nb\x1b[31m  c") == "a b\\x1b[31m c"
    assert len(short("x" * 1000)) == 60


def test_a_script_reads_the_components_of_each_answer(tasks, capsys):
    path = tasks(row("fine"), row("abstain"))
    main(TrialRequest(f"{FILE}:behave", str(path), fields=["timeout_s=20"], as_json=True))
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [one["components"] for one in answers] == [{"length": 4}, {}]


def test_what_a_reward_prints_is_shown(tasks, capsys):
    request = TrialRequest(f"{FILE}:concise", str(tasks(row("4"))), fields=["timeout_s=20"])
    assert main(request) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["printed: judging 4 \\x1b[31m"]
    assert "printed" not in captured.out


def test_a_job_file_brings_its_reward_and_its_tasks(run, tasks, tmp_path):
    path = tasks(row("4"), row("5"))
    job = tmp_path / "job.yaml"
    job.write_text(
        f"job: tried\nmodel: nowhere\ntasks: {{train: {path.name}}}\ntrainer: {{steps: 1}}\n"
        f"reward: {{name: '{FILE}:concise'}}\n"
    )
    status, lines = run(str(job), "")
    assert (status, lines[0][0]) == (0, "offered.py:concise,")


@pytest.mark.parametrize(
    ("reward", "data", "fields", "words"),
    [
        ("exact_match", "", [], "--data"),
        ("exact_match", "t.jsonl", ["workers=0"], "line: workers: 0 is too small"),
        ("exact_match", "t.jsonl", ["reward.workers=0"], "line: workers: 0 is too small"),
        ("exact_match", "t.jsonl", ["worker=2"], "Did you mean workers?"),
        ("exact_match", "t.jsonl", ["args"], "not key=value"),
        ("exact_match", "t.jsonl", ["model=m"], "Write args.model if the part takes it"),
        ("exact_match", "t.jsonl", ["on_error.model=m"], "on_error.model: there is no such field. Remove it"),
        ("gsm8k", "t.jsonl", ["args.most=3"], "line: args.most: gsm8k has no argument 'most'"),
    ],
)
def test_mistakes_of_the_command_line_are_found_first(reward, data, fields, words):
    with pytest.raises(ConfigError) as caught:
        target(TrialRequest(reward, data, fields=fields))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("wrong_name", [], "concise"),
        ("needs", [], r"reward\.args\.word: .*:needs needs 'word', and it is missing\. Add it"),
        ("needs", ["args.wrd=3"], r"reward\.args\.wrd: .*:needs has no argument 'wrd'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_so(tasks, name, fields, words):
    with pytest.raises(ArealError, match=words):
        main(TrialRequest(f"{FILE}:{name}", str(tasks(row("4"))), fields=fields))
