"""What the page reads of run folders, and the file that is made of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from areal_async.show.figures import ChartRow
from areal_async.show.page import folder as reading
from areal_async.show.page.folder import UnknownName
from areal_async.show.page.report import MOST_ROWS, write_report
from tests.unit.page.runs import HOSTILE, append, episode, load, run_folder, step, write_samples


def test_records_are_read_on_from_where_the_last_answer_ended(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    assert reading.records_from(folder, 0) == {"offset": 0, "rows": [], "more": False, "reset": False}
    append(folder, [step(0), load(5.0, 1, trainer={"busy_s": {"train": 1.0}})])
    first = reading.records_from(folder, 0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    assert reading.records_from(folder, first["offset"])["rows"] == []
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('art"}\n')
    append(folder, [step(1), load(9.0, 2, trainer={"busy_s": {"train": 3.0}})])
    second = reading.records_from(folder, first["offset"])
    assert [row.x for row in first["rows"] + second["rows"]] == [0, 1, 2]
    assert second["rows"][1].figures == {"busy:trainer": 0.5}
    assert second["offset"] == (folder / "metrics.jsonl").stat().st_size
    (folder / "metrics.jsonl").write_text("")
    assert reading.records_from(folder, second["offset"])["reset"]


def pieces_of(folder: Path) -> tuple[list[list[ChartRow]], int]:
    """Return the rows of each answer until there are no more, and where the last one ended."""
    pieces, offset, more = [], 0, True
    while more:
        answer = reading.records_from(folder, offset)
        pieces.append(answer["rows"])
        offset, more = answer["offset"], answer["more"]
    return pieces, offset


def test_a_long_file_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1000)
    folder = run_folder(tmp_path)
    append(folder, map(step, range(20)))
    pieces, _ = pieces_of(folder)
    assert [row.x for rows in pieces for row in rows] == [*range(20)]
    assert len(pieces) > 5


def test_of_a_long_history_few_rows_come_and_the_last_of_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CHUNK_BYTES", 10_000), ("MOST_ROWS", 40), ("LEAST_ROWS", 5)):
        monkeypatch.setattr(reading, name, value)
    folder = run_folder(tmp_path)
    for at in range(0, 1000, 10):
        append(folder, [load(float(at), at, trainer={"busy_s": {"train": at / 2}})])
        append(folder, map(step, range(at, at + 10)))
    append(folder, [{"kind": "evaluation", "version": 1000, "accuracy": 0.5}])
    pieces, offset = pieces_of(folder)
    rows = [row for piece in pieces for row in piece]
    steps = [row.x for row in rows if "loss" in row.figures]
    assert steps == sorted(steps)
    assert (steps[-1], rows[-1].figures) == (999, {"accuracy": 0.5})
    assert len(pieces[0]) < 15
    assert 100 < len(rows) < 500
    assert {row.figures["busy:trainer"] for row in rows if "busy:trainer" in row.figures} == {0.5}
    append(folder, [step(1000), step(1001)])
    assert [row.x for row in reading.records_from(folder, offset)["rows"]] == [1000, 1001]


def test_a_run_that_ended_says_how(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    append(folder, [step(0), step(1), {"kind": "end", "ending": "finished", "time_s": 9.0}])
    told = reading.overview(folder)
    assert (told["state"], told["step"], told["bound"], told["alive"]) == ("FINISHED", 2, 4, False)
    append(folder, [{"kind": "resume", "time_s": 10.0}])
    assert reading.told_of(folder)["state"] == "KILLED"


@pytest.mark.parametrize("kind", ["sft", "preference", "reward_model"])
def test_a_training_on_a_file_is_listed_with_its_steps_and_its_last_accuracy(
    tmp_path: Path, kind: str
) -> None:
    folder = run_folder(tmp_path)
    figures = ({"accuracy": 0.25}, {"accuracy": 0.5}, {"accuracy": None}, {})
    append(
        folder, [{"kind": kind, "step": at, "loss": 1.0, **more} for at, more in enumerate(figures, start=1)]
    )
    told = reading.told_of(folder)
    assert (told["step"], told["accuracy"]) == (4, 0.5)
    assert reading.overview(folder)["waits"] == ""
    (folder / "summary.json").write_text('{"stopped": "held-out accuracy 0.5 lies within sft.stop_between"}')
    assert reading.overview(folder)["waits"] == "held-out accuracy 0.5 lies within sft.stop_between"


def test_runs_are_those_with_a_lock_that_are_ours_and_have_a_name(tmp_path: Path) -> None:
    for name in ("old", "new"):
        run_folder(tmp_path, name)
    os.utime(tmp_path / "old" / "run.lock", (1.0, 1.0))
    (tmp_path / "notes").mkdir()
    run_folder(tmp_path, "everybodys").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "old")
    bad = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(bad, 0o700)
    with open(bad + b"/run.lock", "w"):
        pass
    assert [path.name for path in reading.runs_in(tmp_path)] == ["new", "old"]
    assert reading.run_in(tmp_path, "old") == tmp_path / "old"
    assert reading.run_in(tmp_path / "old", "old") == tmp_path / "old"
    for name in ("notes", "everybodys", "link", "..", ".", "", "old/../new", str(tmp_path / "old"), "old/"):
        with pytest.raises(UnknownName):
            reading.run_in(tmp_path, name)
    with pytest.raises(UnknownName):
        reading.run_in(tmp_path / "old", "new")


def test_no_path_is_made_of_what_a_reader_names(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    inside = write_samples(folder, "step-00000009.jsonl", [episode()])
    write_samples(folder, "notes.txt", [episode()])
    (folder / "samples" / "step-00000010.jsonl").symlink_to(tmp_path / "secret.jsonl")
    for key in ("/../../secret.jsonl", "/../job.yaml", "/notes.txt", "", "/step-00000010.jsonl"):
        with pytest.raises(UnknownName):
            reading.episodes_in(folder, key)
    assert len(reading.episodes_in(folder, f"/{inside.name}")) == 1


def test_samples_are_listed_newest_first_and_found_by_text_task_and_policy(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    write_samples(folder, "step-00000009.jsonl", [episode(), episode(["no", " idea"], task="t2")])
    write_samples(folder, "evaluation-00000010.jsonl", [episode(["IDEA"])])
    write_samples(folder / "policies" / "tester", "step-00000003.jsonl", [episode()])
    listed = [(each["policy"], each["kind"], each["step"]) for each in reading.list_samples(folder)]
    assert listed == [("", "evaluation", 10), ("", "step", 9), ("tester", "step", 3)]
    found = reading.search_samples(folder, "idea")
    keys = ["/evaluation-00000010.jsonl", "/step-00000009.jsonl"]
    assert [(each["key"], each["index"]) for each in found] == [*zip(keys, (0, 1), strict=True)]
    assert found[1]["place"] == "no idea"
    assert [each["task"] for each in reading.search_samples(folder, "T2")] == ["t2"]


def test_a_report_is_one_small_file_that_names_what_jobs_differ_in(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path, "a"), run_folder(tmp_path, "b", buffer={"max_staleness": 2})]
    for folder in folders:
        append(folder, map(step, range(5000)))
        write_samples(folder, "step-00000009.jsonl", [episode([HOSTILE])])
    path = tmp_path / "compare.html"
    write_report(folders, path)
    html = path.read_text()
    assert path.stat().st_size < 700_000
    assert html.count("</script>") == 5  # the library, three of ours, the data
    assert not re.search(r'(src|href)="(?!#|data:)', html)
    data = json.loads(html.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["differences"] == [{"field": "buffer.max_staleness", "values": ["4", "2"]}]
    assert [len(run["rows"]) for run in data["runs"]] == [MOST_ROWS] * 2
    assert data["runs"][0]["samples"][0]["episodes"][0]["segments"][1]["tokens"] == [HOSTILE]
