"""`areal-async reward test`: a reward over a file, through the pool that the service has."""

import json
from pathlib import Path

import pytest

from areal_async.cli.tools import RehearsalRequest
from areal_async.config.errors import ConfigError
from areal_async.tasks import read_tasks
from areal_async.trajectory import EpisodeBuilder, Sampling, pack
from areal_async.trajectory.parquet import EpisodeWriter, ExportedEpisode
from reward_service.tools.rehearse import main, target
from reward_service.tools.samples import SamplesError, read_samples, spaced

FILE = Path(__file__).with_name("trying.py")
SAMPLING = Sampling(1.0, 1.0, 0, 8, (), 7)


def row(response=None, truth="4", **columns):
    answer = {} if response is None else {"response": response}
    return {"prompt": "2+2=", "reward_model": {"style": "rule", "ground_truth": truth}, **answer, **columns}


def blob(task_id, response):
    builder = EpisodeBuilder("job", task_id, f"{task_id}#0", 0)
    prompt = builder.prompt([1, 2])
    builder.sampled([3], [-0.5], [1], parent=prompt, sampling=SAMPLING, finish_reason="stop")
    builder.text(prompt="2+2=", response=response)
    return pack(builder.build())


@pytest.fixture
def tasks(tmp_path):
    def write(*rows):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return path

    return write


@pytest.fixture
def run(capsys):
    def rehearse(function, data, *fields, **request):
        name = f"{FILE}:{function}" if function in FILE.read_text() else function
        fields = ["timeout_s=20", *fields]
        data = data or ""
        status = main(RehearsalRequest(name, str(data), fields=fields, as_json=True, **request))
        return status, json.loads(capsys.readouterr().out)

    return rehearse


def test_answers_come_from_the_column_and_a_list_is_one_group(tasks):
    path = tasks(row("4"), row(["4", "5", "6"]), row())
    found = read_samples(path, column="response", episodes=None, limit=10)
    assert [[one.given.response for one in group] for group in found.groups] == [["4"], ["4", "5", "6"]]
    assert (found.rows, found.left_out) == (3, 1)
    assert found.groups[1][2].given.ground_truth == "4"
    assert found.groups[1][0].row == 1


def test_without_answers_the_ground_truth_stands_in(tasks):
    found = read_samples(tasks(row(truth="4"), row(truth=[1, 2])), column="response", episodes=None, limit=10)
    assert [group[0].given.response for group in found.groups] == ["4", "[1, 2]"]
    assert "ground truth" in found.source


def test_chat_prompts_are_given_as_text(tasks):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    found = read_samples(tasks(row("4") | {"prompt": messages}), column="response", episodes=None, limit=1)
    assert found.groups[0][0].given.prompt == "Be brief.\n2+2?"


@pytest.mark.parametrize(
    ("column", "words"), [("answers", "no column 'answers'"), ("truth", "a list of texts")]
)
def test_a_column_that_is_missing_or_no_text_is_refused(tasks, column, words):
    with pytest.raises(SamplesError, match=words):
        read_samples(tasks(row("4", truth_=1) | {"truth": 4}), column=column, episodes=None, limit=10)


def test_a_limit_takes_tasks_from_the_whole_file(tasks):
    assert spaced(range(10), 20) == list(range(10))
    assert spaced(range(10), 3) == [0, 3, 6]
    found = read_samples(tasks(*(row(str(n)) for n in range(10))), column="response", episodes=None, limit=3)
    assert [group[0].given.response for group in found.groups] == ["0", "3", "6"]


def test_a_sound_reward_passes(run, tasks):
    status, report = run("right", tasks(row("4"), row("5"), row("4", data_source="sums")))
    assert status == 0
    assert not report["failed"]
    assert [(source["name"], source["mean"]) for source in report["sources"]] == [
        ("", 0.5),
        ("sums", 1.0),
        ("", pytest.approx(2 / 3)),
    ]
    assert report["histogram"] == [{"low": 0, "high": 0, "count": 2}, {"low": 1, "high": 1, "count": 4}]
    assert report["components"] == {"length": 1}
    assert report["p50_ms"] > 0


@pytest.mark.parametrize("function", ["forgetful", "lucky"])
def test_a_reward_with_luck_or_a_memory_is_found_out(run, tasks, function):
    status, report = run(function, tasks(*(row(str(n)) for n in range(20))))
    assert status == 1
    assert report["disagreeing"] == 20
    assert len(report["disagreements"]) == 5


def test_a_reward_that_goes_by_the_order_is_found_out(run, tasks):
    status, report = run("envious", tasks(*(row(f"{n:02}") for n in range(40))))
    assert status == 1
    assert report["disagreeing"] > 5, "repeats take the answers in another order"


def test_errors_and_timeouts_fail_and_say_why(run, tasks):
    path = tasks(*(row(text) for text in ("fine", "raise", "hang", "nothing")))
    status, report = run("mixed", path, "timeout_s=0.3", repeats=1)
    assert status == 1
    assert report["sources"][-1]["kinds"] == {"score": 1, "error": 1, "timeout": 1, "abstain": 1}
    said = {problem["kind"]: problem["message"] for problem in report["problems"]}
    assert "ValueError: on purpose" in said["error: exception"]
    assert said["timeout"] == "not back within 0.3 s"
    assert said["abstain"] == "cannot say"


def test_arguments_reach_the_reward(run, tasks):
    status, report = run("lengths", tasks(row("aaa"), row("a")), "args.scale=0.5", "workers=2")
    assert status == 0
    assert [bar["low"] for bar in report["histogram"]] == [0.5, 1.5]


def test_a_reward_of_groups_gets_all_answers_of_a_task(run, tasks):
    status, report = run("longest", tasks(row(["a", "bb", "c"]), row(["aaa", "b"])))
    assert status == 0
    assert report["histogram"] == [{"low": 0, "high": 0, "count": 6}, {"low": 1, "high": 1, "count": 4}]


def test_a_built_in_reward_can_be_tried(run, tasks):
    status, report = run("exact_match", tasks(row("4"), row("5")))
    assert status == 0
    assert report["sources"][-1]["mean"] == 0.5


def test_the_page_fits_a_narrow_terminal(tasks, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tasks(row("fine " * 100), row("raise", data_source="a_source_with_a_rather_long_name_of_its_own"))
    request = RehearsalRequest(f"{FILE}:mixed", str(path), fields=["timeout_s=20"])
    assert main(request) == 1
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert "failed: 2 errors" in page
    assert "on purpose\\x1b[2J" in page


def test_what_a_reward_prints_is_shown(tasks, capsys):
    request = RehearsalRequest(f"{FILE}:talkative", str(tasks(row("4"))), fields=["timeout_s=20"], repeats=1)
    assert main(request) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["printed: judging 4 \\x1b[31m"]
    assert "printed" not in captured.out


def test_a_job_file_brings_its_reward_and_its_tasks(run, tasks, tmp_path):
    path = tasks(row("4"), row("5"))
    job = tmp_path / "job.yaml"
    job.write_text(
        f"job: tried\nmodel: nowhere\ntasks: {{train: {path.name}}}\ntrainer: {{steps: 1}}\n"
        f"reward: {{name: '{FILE}:right'}}\n"
    )
    status, report = run(str(job), "")
    assert (status, report["reward"]) == (0, f"{FILE}:right")


@pytest.mark.parametrize(
    ("reward", "data", "fields", "words"),
    [
        ("exact_match", "", [], "--data"),
        ("exact_match", "t.jsonl", ["workers=0"], "reward.workers"),
        ("exact_match", "t.jsonl", ["worker=2"], "reward.workers?"),
        ("exact_match", "t.jsonl", ["args"], "not key=value"),
    ],
)
def test_mistakes_of_the_command_line_are_found_first(reward, data, fields, words):
    with pytest.raises(ConfigError) as caught:
        target(RehearsalRequest(reward, data, fields=fields))
    assert words in str(caught.value)


def test_a_reward_that_cannot_be_loaded_says_so(tasks):
    request = RehearsalRequest(f"{FILE}:wrong_name", str(tasks(row("4"))))
    with pytest.raises(ConfigError, match="forgetful"):
        main(request)


def test_episodes_of_an_export_are_matched_with_their_tasks(run, tasks, tmp_path):
    path = tasks(row("x", truth="4"), row("x", truth="5"))
    dataset = read_tasks(path).dataset_hash
    export = tmp_path / "held.parquet"
    with EpisodeWriter(export, "job") as file:
        for task_row, answer in ((0, "4"), (1, "4")):
            held = blob(f"{dataset}:{task_row}:0", answer)
            file.add(ExportedEpisode(held, "", "SCORED", "VERDICT", [], 1.0))
    status, report = run("right", path, episodes=str(export))
    assert status == 0
    assert report["sources"][-1]["mean"] == 0.5
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(row("x", truth="9")) + "\n")
    with pytest.raises(SamplesError, match="none of the 2 episodes"):
        read_samples(other, column="response", episodes=export, limit=10)
