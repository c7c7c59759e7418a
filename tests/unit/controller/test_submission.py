"""Jobs on their way to the controller, and what a hostile one cannot do."""

import base64
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from areal_async.base.mistakes import MOST_MISTAKES, ConfigError
from areal_async.cluster import submission as module
from areal_async.cluster.resources import Resources, resources_of
from areal_async.cluster.submission import (
    Submission,
    job_of,
    pack,
    read_job,
    read_submission,
    write_files,
)
from areal_async.config import fields
from areal_async.config.job import job_fields
from tests.unit.controller.world import JOB, submission

REWARD = """
import shared.rules
from helper import half


def mine(given):
    return half(1.0)
"""


@pytest.fixture
def there(tmp_path):
    """A folder with a job file, code of its own and tasks."""
    for name, text in {
        "rewards/mine.py": REWARD,
        "rewards/helper.py": "from below import it\n",
        "rewards/below/__init__.py": "it = 1\n",
        "rewards/shared/__init__.py": "",
        "rewards/shared/rules.py": "import helper\nimport numpy\n",
        "rewards/other.py": "nobody asks for it\n",
        "train.jsonl": "{}\n",
    }.items():
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "there" / "model").mkdir()
    return tmp_path / "there"


def packed(there, overrides=(), here=True, **changes):
    content = {"job": "sums", "model": "model", "tasks": {"train": "train.jsonl"}}
    content |= {"reward": {"name": "rewards/mine.py:mine"}, "run_dir": "elsewhere", **changes}
    (there / "job.yaml").write_text(json.dumps(content))
    return pack(there / "job.yaml", overrides, key="a-key-of-mine", here=here)


def test_code_with_what_it_imports_and_tasks_travel_and_the_rest_is_named_by_its_place(there):
    given = packed(there, ["trainer.steps=7"])
    code = {path.relative_to(there).as_posix() for path in there.glob("rewards/**/*.py")}
    assert given.files.keys() == {"train.jsonl", *code} - {"rewards/other.py"}
    assert given.job["reward"]["name"] == "rewards/mine.py:mine"
    assert given.job["model"] == str(there / "model")
    assert given.job["trainer"]["steps"] == 7
    assert "run_dir" not in given.job


def test_on_another_machine_a_folder_beside_the_job_file_is_refused(there):
    with pytest.raises(ConfigError, match=r"model: model is a folder, which stays here"):
        packed(there, here=False)
    given = packed(there, here=False, model="/models/tiny")
    assert given.job["model"] == "/models/tiny"
    with pytest.raises(ConfigError, match=r"tasks.train: \.\./x.jsonl is no file below"):
        packed(there, here=False, model="/models/tiny", tasks={"train": "../x.jsonl"})


def test_what_an_included_file_names_travels_as_if_the_job_file_named_it(there):
    (there / "below").mkdir()
    (there / "below" / "base.yaml").write_text("tasks: {train: ../train.jsonl, evaluation: held.jsonl}\n")
    (there / "below" / "held.jsonl").write_text("{}\n")
    given = packed(there, include="below/base.yaml", model="/models/tiny", tasks={}, here=False)
    assert given.job["tasks"] == {"train": "train.jsonl", "evaluation": "below/held.jsonl"}
    assert {"train.jsonl", "below/held.jsonl"} < set(given.files)
    (there.parent / "base.yaml").write_text("tasks: {train: far.jsonl}\n")
    with pytest.raises(ConfigError, match=r"tasks.train: \.\./far.jsonl is no file below"):
        packed(there, include="../base.yaml", model="/models/tiny", tasks={}, here=False)
    given = packed(there, include="../base.yaml", model="/models/tiny", tasks={})
    assert given.job["tasks"]["train"] == str(there.parent / "far.jsonl")


def test_files_that_are_too_many_or_too_large_stay(there, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="its files are more than"):
        packed(there)
    (there / "train.jsonl").write_text("{}\n" * 100)
    given = packed(there, reward={"name": "exact_match"})
    assert given.job["tasks"]["train"] == str(there / "train.jsonl")
    assert given.files == {}


def test_what_was_packed_is_the_same_job_where_it_is_unpacked(there, tmp_path):
    given = read_submission(msgspec.json.encode(packed(there)))
    content, _ = read_job(given, tmp_path / "jobs")
    folder = tmp_path / "jobs" / "1-sums" / "files"
    write_files(given.files, folder)
    job = job_of(content, folder, tmp_path / "runs")
    assert job.tasks.train == folder / "train.jsonl"
    assert job.reward.name == f"{folder}/rewards/mine.py:mine"
    assert job.run_dir == tmp_path / "runs"
    assert (folder / "rewards" / "mine.py").read_text() == REWARD
    assert {path.stat().st_mode & 0o077 for path in folder.rglob("*")} == {0}


# --- hostile ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("../outside.py", "a/../../outside.py", "/etc/cron.d/x", ".", "..", "a//b", "./a", "a/", r"a\..\b"),
        *("", "a\x00b", "a\nb", "a/" * 9 + "b", "x" * 300, "é" * 150),
    ],
)
def test_no_file_gets_out_of_its_folder(name):
    given = Submission("a-key-of-mine", {"job": "sums"}, files={name: b"x"})
    with pytest.raises(ConfigError, match="cannot be the name of a file"):
        read_submission(msgspec.json.encode(given))


def test_a_file_that_is_a_folder_too_is_refused_and_nothing_is_written_through_a_link(tmp_path):
    given = Submission("a-key-of-mine", {"job": "sums"}, files={"a": b"x", "a/b": b"x"})
    with pytest.raises(ConfigError, match="'a' cannot be"):
        read_submission(msgspec.json.encode(given))
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "files").symlink_to(outside)
    with pytest.raises(FileExistsError):
        write_files({"x": b"x"}, tmp_path / "files")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "override", ["run_dir=/tmp/elsewhere", "run_dir=../../..", "run_dir={x: 1}", "run_dir="]
)
def test_runs_lie_in_the_jobs_folder_whatever_a_job_says(tmp_path, override):
    given = submission("sums", overrides=[override], job={"run_dir": "/tmp/elsewhere"})
    content, _ = read_job(given, tmp_path)
    assert content["run_dir"] == "runs"
    job = job_of(content, tmp_path / "files", tmp_path / "runs", [override])
    assert job.run_dir == tmp_path / "runs"


def test_a_job_keeps_its_name(tmp_path):
    content = {"job": "sums", **JOB}
    with pytest.raises(ConfigError, match="a job keeps its name"):
        job_of(content, tmp_path, tmp_path, ["job=other"])


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "", "A", "a b", "x" * 49, "a\n", "-a", 7, None, ["a"], {}]
)
def test_a_job_with_another_kind_of_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="job"):
        read_job(submission("sums", job={"job": name}), tmp_path)


def test_nothing_in_a_job_is_run_by_who_reads_it(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    trap = tmp_path / "sprung"
    (files / "trap.py").write_text(f"from pathlib import Path\nPath({str(trap)!r}).touch()\ndef it(): ...\n")
    own = f"{files}/trap.py:it"
    fields = {
        "reward": {"name": own, "args": {"inner": own}},
        "rollout": {"workflow": own, "engine": own, "workflow_args": {"agent": own, "tools": [own]}},
        "evaluation": {"engine": own},
        "weights": {"channel": own},
        "trainer": {
            "backend": own,
            "objective": {"advantage": own, "loss": own, "correction": own, "normaliser": own},
        },
    }
    before = set(sys.modules)
    for override in ("seed=!!python/object/apply:os.system ['touch x']", "seed=!!python/name:os.system"):
        with pytest.raises(ConfigError, match="not YAML"):
            read_job(submission("sums", overrides=[override]), files)
    for section, value in fields.items():
        with suppress(ConfigError):  # its text may be looked at
            read_job(submission("sums", job={section: value}), files)
    assert not trap.exists()
    assert not [name for name in set(sys.modules) - before if "trap" in name]


WEIRD: tuple[object, ...] = (None, True, -1, 10**30, 1e300, "", "x", "x" * 5000, "\x00", [], [[]], {})
WEIRD += ({"a": {"b": [None]}}, [1, "a"])


def test_whatever_is_in_a_field_is_read_or_refused_with_the_field(tmp_path):
    paths = [*job_fields(), *{path.partition(".")[0] for path in job_fields()}, "policies", "reward.routes.0"]
    for path in paths:
        for value in WEIRD:
            job = json.loads(json.dumps(JOB))
            *above, last = path.split(".")
            section = job
            for name in above:
                section = section.setdefault(name, {})
            section[last] = value
            with suppress(ConfigError):
                _, config = read_job(submission("sums", job=job), tmp_path)
                resources_of(config, Resources(4, 2))


def body_of(**fields):
    plain = {"key": "a-key-of-mine", "job": {"job": "sums"}}
    return json.dumps(plain | fields).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"\xff\xfe", "body"),
        (b'{"key": "a-key-of-mine"}', "job"),
        (body_of(surprise=1), "surprise"),
        (body_of(key="short"), "key"),
        (body_of(key="../../../etc"), "key"),
        (body_of(priority=1001), "priority"),
        (body_of(priority=2**80), "priority"),
        (body_of(overrides=["seed=1"] * 257), "overrides"),
        (body_of(overrides=["x" * 20_000]), "overrides"),
        (body_of(files={f"f{n}": "" for n in range(257)}), "files"),
        (body_of(files={"a": "no base64!"}), "body"),
        (b'{"key": "a-key-of-mine", "job": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "deep"),
        (b'{"key": "a-key-of-mine", "job": {"x": ' + b"[" * 200 + b"]" * 200 + b"}}", "nested too deep"),
        (body_of(files={"a\ud800b": ""}), "body|cannot be"),
    ],
)
def test_what_is_no_submission_is_refused_by_the_field(body, said):
    with pytest.raises(ConfigError, match=said):
        read_submission(body)


def test_a_job_is_bounded_in_all_that_it_holds(tmp_path):
    with pytest.raises(ConfigError):
        read_job(submission("sums", job={"trainer": {"steps": 10**30}}), tmp_path)
    bomb = "seed=&a [*a]"
    with pytest.raises(ConfigError):
        read_job(submission("sums", overrides=[bomb]), tmp_path)
    many = "[" + ",".join(["&a [" + ",".join(["x"] * 100) + "]"] + ["*a"] * 100) + "]"
    with pytest.raises(ConfigError):
        read_job(submission("sums", overrides=[f"seed={many}"]), tmp_path)


MANY = {f"unknown_{n}": n for n in range(50_000)}


@pytest.mark.parametrize(
    "changes",
    [
        MANY,
        {"trainer": MANY},
        {"trainer": {"objective": {"loss_args": MANY}}},
        {"reward": {"args": MANY}},
        {"rollout": {"workflow_args": {"a": [MANY]}, **MANY}},
        {"observe": {"loggers": [MANY, MANY]}},
        {"buffer": {f"max_stalenes{n}": n for n in range(50_000)}},
        {"x" * 3_000_000: 1},
        {"seed": "x" * 3_000_000},
        {"seed": ["x"] * 150_000},
    ],
    ids=lambda changes: next(iter(changes))[:20],
)
def test_mistakes_are_counted_before_they_are_worded(tmp_path, monkeypatch, changes):
    asked = []
    close = fields.suggest
    monkeypatch.setattr(fields, "suggest", lambda *args: asked.append(args) or close(*args))
    with pytest.raises(ConfigError) as refused:
        read_job(submission("sums", job=changes), tmp_path)
    assert len(refused.value.mistakes) <= MOST_MISTAKES + 1
    assert len(str(refused.value)) < 500_000
    assert len(asked) <= 2 * MOST_MISTAKES
    if len(changes) > 1:
        assert re.search(r"more mistakes|of which these are the first", str(refused.value))


@pytest.mark.parametrize(
    "given",
    [
        {"job": {f"unknown_{n}": n for n in range(400_000)}},
        {"job": {"policies": {f"p{n}": {} for n in range(1000)}}},
        {"files": {"a/" * 1_500_000: ""}},
        {"files": {f"f{n}//": "" for n in range(200_000)}},
    ],
    ids=["fields", "policies", "folders", "files"],
)
def test_a_submission_of_five_megabytes_is_refused_before_anything_is_made_of_it(tmp_path, given):
    with pytest.raises(ConfigError) as refused:
        read_job(read_submission(body_of(**given)), tmp_path)
    assert len(refused.value.mistakes) <= MOST_MISTAKES + 1
    assert len(str(refused.value)) < 100_000


def test_files_are_bounded_together(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    content = base64.b64encode(b"x" * 6).decode()
    assert read_submission(body_of(files={"a": content})).files == {"a": b"x" * 6}
    with pytest.raises(ConfigError, match="they have 12 bytes, and 10 is the limit"):
        read_submission(body_of(files={"a": content, "b": content}))


def test_a_pipe_beside_the_job_file_is_not_waited_for(there):
    os.mkfifo(there / "pipe.py")
    given = packed(there, reward={"name": "pipe.py:mine"})
    assert not given.files.keys() - {"train.jsonl"}
    assert given.job["reward"]["name"] == f"{there}/pipe.py:mine"
    assert Path(there / "pipe.py").exists()
