"""What is found under a name of ours may be another user's: it is not read, run, deleted or waited for."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_async.base.errors import RunFolderError
from areal_async.base.mistakes import ConfigError
from areal_async.base.own_files import is_locked, private_files, take_lock
from areal_async.config.load import load_job
from areal_async.launch.folders import claim_folders, leftovers
from areal_async.launch.run_handle import find_run, job_to_resume
from tests.waiting import LIMIT_S

STRANGER = 54321
"""A user id that nobody has."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
MODE = 0o777


def dead_run(job, shm, victim):
    """The folder of a run whose supervisor is gone, and whose record names `victim` for deletion."""
    folders = claim_folders(job, overwrite=False, shm_root=shm)
    os.close(folders.lock_fd)
    (folders.run_dir / "job.yaml").write_text("job: test\n")
    lock = folders.run_dir / "run.lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"socket_dir": str(victim)}))
    return folders.run_dir


def worth(folder):
    folder.mkdir()
    (folder / "thesis").write_text("years of work")
    return folder


def give_away(path):
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.parametrize(
    ("what", "spoil", "words"),
    [
        pytest.param("", give_away, f"belongs to user {STRANGER}", marks=as_root),
        pytest.param("run.lock", give_away, f"belongs to user {STRANGER}", marks=as_root),
        ("run.lock", lambda path: path.chmod(0o666), r"others may write to .*run\.lock"),
    ],
)
def test_what_another_user_made_or_may_change_is_neither_run_in_nor_believed(
    job, shm, tmp_path, what, spoil, words
):
    victim = worth(tmp_path / f"areal-{os.getuid()}-mine")
    run_dir = dead_run(job, shm, victim)
    spoil(run_dir / what)
    for use in (
        lambda: claim_folders(job, overwrite=True, shm_root=shm),
        lambda: claim_folders(job, overwrite=False, resume=True, shm_root=shm),
        lambda: job_to_resume(run_dir),
        lambda: find_run(run_dir),
    ):
        with pytest.raises(RunFolderError, match=words):
            use()
    assert (victim / "thesis").exists()
    assert (run_dir / "job.yaml").exists()


@pytest.mark.parametrize("name", ["areal-notes", f"areal-{os.getuid() + 1}-x"])
def test_only_volatile_folders_of_this_user_are_deleted_after_a_dead_run(job, shm, tmp_path, name):
    victim = worth(tmp_path / name)
    dead_run(job, shm, victim)
    claim_folders(job, overwrite=True, shm_root=shm).release()
    assert (victim / "thesis").exists()


def test_no_link_is_followed_to_what_a_dead_run_is_said_to_have_left(job, shm, tmp_path):
    victim = worth(tmp_path / "elsewhere")
    link = tmp_path / f"areal-{os.getuid()}-x"
    link.symlink_to(victim)
    dead_run(job, shm, link)
    claim_folders(job, overwrite=True, shm_root=shm).release()
    assert (victim / "thesis").exists()


def test_threads_that_write_private_files_at_once_leave_the_umask_as_it_was(tmp_path):
    """The first one in is the first one out: it must not open the files of the other."""
    first, second = private_files(), private_files()
    before = os.umask(0o022)
    try:
        with ThreadPoolExecutor(1) as other:
            first.__enter__()
            other.submit(second.__enter__).result(LIMIT_S)
            first.__exit__(None, None, None)
            (tmp_path / "mine").touch()
            other.submit(second.__exit__, None, None, None).result(LIMIT_S)
    finally:
        left = os.umask(before)
    assert (tmp_path / "mine").stat().st_mode & 0o077 == 0
    assert left == 0o022


def test_a_run_is_closed_to_others_from_the_start_whatever_the_umask(job, shm):
    before = os.umask(0)
    try:
        folders = claim_folders(job, overwrite=False, shm_root=shm)
    finally:
        os.umask(before)
    closed = [folders.run_dir, folders.socket_dir, folders.shm_dir, folders.logs]
    closed += [folders.run_dir / "run.lock", folders.socket_dir / "secret"]
    assert [oct(path.stat().st_mode & 0o077) for path in closed] == ["0o0"] * len(closed)
    folders.release()


def test_an_open_run_folder_of_ours_is_closed_before_it_is_used(job, shm):
    run_dir = job.run_dir / "test"
    run_dir.mkdir(parents=True)
    run_dir.chmod(MODE)
    claim_folders(job, overwrite=False, shm_root=shm).release()
    assert run_dir.stat().st_mode & MODE == 0o700


def pipes(folder, name):
    os.mkfifo(folder / name)
    return folder / name


def test_a_pipe_in_place_of_a_record_is_not_waited_for(job, shm, tmp_path):
    left = shm / f"areal-{os.getuid()}-x-shm"
    left.mkdir(mode=0o700)
    pipes(left, "owner.json")
    assert list(leftovers([shm])) == []
    run_dir = job.run_dir / "test"
    run_dir.mkdir(parents=True)
    pipes(run_dir, "run.lock")
    for use in (lambda: claim_folders(job, overwrite=True, shm_root=shm), lambda: find_run(run_dir)):
        with pytest.raises(RunFolderError, match=r"run\.lock"):
            use()


@as_root
def test_folders_of_another_user_under_our_name_are_no_leftovers(shm):
    left = shm / f"areal-{os.getuid()}-x-shm"
    left.mkdir(mode=0o700)
    (left / "owner.json").write_text(json.dumps({"pid": 1, "started": "another boot 1", "job": "x"}))
    assert list(leftovers([shm])) == [left]
    os.chown(left, STRANGER, STRANGER)
    assert list(leftovers([shm])) == []


@pytest.mark.parametrize("what", ["reward", "workflow", "tasks"])
def test_a_pipe_that_a_job_names_is_a_mistake_and_not_waited_for(tmp_path, what):
    files = {"reward": "r.py", "workflow": "w.py", "tasks": "t.jsonl"}
    (tmp_path / "r.py").write_text("def score(given): return 1.0\n")
    (tmp_path / "w.py").write_text("async def play(ctx, task): ...\n")
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1", "ground_truth": "2"}\n')
    (tmp_path / files[what]).unlink()
    pipe = pipes(tmp_path, files[what])
    (tmp_path / "job.yaml").write_text(
        "job: test\nmodel: model\ntasks: {train: t.jsonl}\nreward: {name: 'r.py:score'}\n"
        "rollout: {workflow: 'w.py:play'}\n"
    )
    with pytest.raises(ConfigError, match=pipe.name):
        load_job(tmp_path / "job.yaml")


def test_doctor_is_not_stopped_by_a_pipe_named_like_a_leftover(tmp_path):
    folder = tmp_path / f"areal-{os.getuid()}-0badcafe"
    folder.mkdir(mode=0o700)
    pipes(folder, "owner.json")
    command = [sys.executable, "-m", "areal_async.cli.main", "doctor"]
    ended = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "leftovers" in ended.stdout


def test_who_asks_for_a_lock_keeps_nobody_from_taking_it(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    flags = os.O_RDWR | os.O_CLOEXEC
    asking, taking, other = (
        os.open(path, os.O_RDONLY | os.O_CLOEXEC),
        os.open(path, flags),
        os.open(path, flags),
    )
    assert not is_locked(asking)
    assert take_lock(taking)  # while who has asked still has the file open
    assert is_locked(asking)
    assert not take_lock(other)
    copy = os.dup(taking)
    os.close(taking)
    assert is_locked(asking)
    os.close(copy)
    assert not is_locked(asking)
    assert take_lock(other)
    for fd in (asking, other):
        os.close(fd)


@pytest.fixture
def full_disk(small_disk):
    """A file system in memory with room for 1 MiB, and two files on it: one with holes, one without."""
    (small_disk / "ballast").write_bytes(bytes(3 << 20))
    (small_disk / "whole").write_bytes(b"x" * (64 << 10))
    with (small_disk / "holes").open("wb") as file:
        file.truncate(2 << 20)
        file.write(b"y")
    (small_disk / "rest").touch()
    return small_disk


FILLED = """
import os, sys
from pathlib import Path
disk = Path(sys.argv[1])
def fill():
    fd = os.open(disk / "rest", os.O_WRONLY)
    try:
        while os.write(fd, bytes(4096)):
            pass
    except OSError as error:
        assert error.errno == 28
"""
READERS = {
    "map_open": """
from areal_async.base.own_files import map_open
fill()
with open(disk / "holes", "rb") as file:
    content = map_open(file.fileno())
    assert bytes(content[:2]) == b"y\\0" and len(content) == 2 << 20 and sum(bytes(content)) == ord("y")
    part = map_open(file.fileno(), 4096, 1 << 20, populate=True)
    assert len(part) == 1 << 20 and sum(bytes(part)) == 0
""",
    "digest": """
from areal_async.base.cache import digest_of
fill()
assert digest_of([disk / "holes"]) != digest_of([disk / "whole"])
""",
    "checkpoint": """
from trainer_service.durable_files import hashed_in
fill()
assert hashed_in(disk, "holes").size_bytes == 2 << 20
""",
    "pushed": """
from areal_async.storage.transfer import _blake3
fill()
_blake3(disk / "holes")
""",
    "reserve": """
from areal_async.base.own_files import reserve
fd = os.open(disk / "new", os.O_RDWR | os.O_CREAT)
for _ in range(2):
    try:
        reserve(fd, 2 << 20)
    except OSError as error:
        assert error.errno == 28
    else:
        raise AssertionError
""",
    "tensors": """
from areal_async.weights.tensor_file import MappedFile
for _ in range(2):
    try:
        MappedFile(disk / "new", 2 << 20)
    except OSError as error:
        assert error.errno == 28 and not (disk / "new").exists()
    else:
        raise AssertionError
""",
}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_with_holes_on_a_full_disk_in_memory_ends_no_process(full_disk, kind):
    code = FILLED + READERS[kind]
    done = subprocess.run([sys.executable, "-c", code, full_disk], timeout=LIMIT_S, check=False)
    assert done.returncode == 0
