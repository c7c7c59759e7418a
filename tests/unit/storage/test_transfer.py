"""What is fetched is whole or not there, and what is half-pushed is refused."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from areal_async.base.retry import Tries
from areal_async.storage.remote import (
    HalfWritten,
    Remote,
    StorageAway,
    StorageError,
    StorageMissing,
    StoredFile,
)
from areal_async.storage.transfer import MARKER, fetch, push
from tests.waiting import LIMIT_S

FETCH = """
import sys
from pathlib import Path
from areal_async.storage.transfer import fetch
fetch(sys.argv[1], Path(sys.argv[2]), begun=lambda size: print("begun", size, flush=True))
"""
KILLED_PUSH = """
import sys
from pathlib import Path
from areal_async.base.events import arm
from areal_async.storage.transfer import push
arm("storage.mid_push")
push(Path(sys.argv[1]), sys.argv[2])
"""
KILLED_FETCH = """
import os, signal, sys
from pathlib import Path
from areal_async.storage.transfer import fetch
fetch(sys.argv[1], Path(sys.argv[2]), check=lambda fresh: os.kill(os.getpid(), signal.SIGKILL))
"""


def started(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_a_folder_and_a_file_come_as_they_were_pushed(place, folder, tmp_path):
    push(folder, f"{place}/model")
    fetch(f"{place}/model", tmp_path / "here" / "model")
    assert content(tmp_path / "here" / "model") == content(folder)
    fetch(f"{place}/model/config.json", tmp_path / "config.json")
    assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_what_is_here_is_not_fetched_again_until_it_changes(place, folder, tmp_path):
    came = []
    url, target = f"{place}/model", tmp_path / "here"
    push(folder, url)
    for _ in range(2):
        fetch(url, target, begun=came.append)
    assert len(came) == 1
    (target / "config.json").unlink()
    fetch(url, target, begun=came.append)
    assert len(came) == 2
    (folder / "config.json").write_text('{"hidden": 4, "more": true}')
    (folder / "below" / "empty").unlink()
    push(folder, url)
    fetch(url, target, begun=came.append)
    assert len(came) == 3
    assert content(target) == content(folder)


def test_a_folder_that_others_uploaded_is_compared_with_what_the_store_says(s3, folder, tmp_path):
    url = s3.bucket()
    s3.put(folder, f"{url}/model")
    fetch(f"{url}/model", tmp_path / "here")
    assert content(tmp_path / "here") == content(folder)
    # Uploaded in one piece it has an MD5 for its tag.
    assert "-" not in s3.files.info(f"{url}/model/config.json")["ETag"]


def test_a_file_whose_bytes_are_not_those_of_its_tag_is_refused(s3, folder, tmp_path, monkeypatch):
    url = s3.bucket()
    s3.put(folder, f"{url}/model")
    read = Remote.read
    monkeypatch.setattr(Remote, "read", lambda *a: read(*a).replace(b"hidden", b"broken"))
    with pytest.raises(StorageError, match=r"config\.json has not come as it was written"):
        fetch(f"{url}/model", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_nothing_at_the_url_is_said_so(place, tmp_path):
    with pytest.raises(StorageMissing, match="there is nothing there"):
        fetch(f"{place}/none", tmp_path / "here")


@pytest.mark.parametrize(
    "harm",
    [
        lambda remote: remote.remove(["config.json"]),
        lambda remote: remote.write("config.json", b"{}"),
        lambda remote: remote.write(MARKER, b'{"complete": fal'),
    ],
    ids=["a file is missing", "a file has another size", "the marker is torn"],
)
def test_a_pushed_folder_that_is_not_whole_is_refused_and_what_was_here_stays(place, folder, tmp_path, harm):
    url, target = f"{place}/model", tmp_path / "here"
    push(folder, url)
    fetch(url, target)
    before = content(target)
    harm(Remote(url))
    with pytest.raises(HalfWritten, match="half-written"):
        fetch(url, target)
    assert content(target) == before


def test_a_pushed_file_that_was_changed_behind_the_marker_is_refused(place, folder, tmp_path):
    push(folder, f"{place}/model")
    Remote(f"{place}/model").write("config.json", b'{"hidden": 7}')
    with pytest.raises(StorageError, match=r"config\.json has not come as it was written"):
        fetch(f"{place}/model", tmp_path / "here")


def test_a_push_that_was_killed_is_refused_until_it_is_made_again(s3, folder, tmp_path):
    url = f"{s3.bucket()}/model"
    killed = started(KILLED_PUSH, folder, url)
    assert killed.wait(LIMIT_S) == -signal.SIGKILL
    with pytest.raises(HalfWritten):
        fetch(url, tmp_path / "here")
    push(folder, url)
    fetch(url, tmp_path / "here")
    assert content(tmp_path / "here") == content(folder)


def test_a_fetch_that_was_killed_leaves_nothing_that_is_taken_for_whole(s3, folder, tmp_path):
    url, target = f"{s3.bucket()}/model", tmp_path / "here" / "model"
    push(folder, url)
    killed = started(KILLED_FETCH, url, target)
    assert killed.wait(LIMIT_S) == -signal.SIGKILL
    assert not target.exists()
    fetch(url, target)
    assert content(target) == content(folder)
    assert list(target.parent.glob(".model.*.tmp")) == []


def test_of_several_processes_one_fetches_and_all_have_it(s3, folder, tmp_path):
    url, target = f"{s3.bucket()}/model", tmp_path / "here"
    push(folder, url)
    both = [started(FETCH, url, target) for _ in range(3)]
    told = [process.communicate(timeout=LIMIT_S) for process in both]
    assert [process.returncode for process in both] == [0, 0, 0], told
    assert b"".join(out for out, _ in told).count(b"begun") == 1
    assert content(target) == content(folder)


def test_a_store_that_comes_back_is_asked_again(s3, folder, tmp_path):
    url, away, back = f"{s3.bucket()}/model", [], []
    push(folder, url)
    s3.stop()
    tries = Tries(60, away.append, lambda: back.append(1), sleep=lambda pause_s: s3.start())
    fetch(url, tmp_path / "here", tries)
    assert content(tmp_path / "here") == content(folder)
    assert away
    assert back == [1]


def test_a_store_that_stays_away_is_given_up_in_time(s3, tmp_path):
    url, now_s, away = s3.bucket(), [0.0], []

    def sleep(pause_s):
        now_s[0] += pause_s

    s3.stop()
    tries = Tries(20, away.append, clock=lambda: now_s[0], sleep=sleep, rng=random.Random(0))
    with pytest.raises(StorageAway, match=f"{url}/m could not be listed within 20 s") as given_up:
        fetch(f"{url}/m", tmp_path / "here", tries)
    assert given_up.value.restart_helps
    assert 10 <= now_s[0] <= 20
    assert len(away) >= 3


def test_who_may_not_is_told_so_at_once(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    remote = Remote("memory://shut", Tries(1e9, sleep=lambda pause_s: pytest.fail("it is asked again")))
    with pytest.raises(StorageError, match="memory://shut/x could not be read: PermissionError: Access Den"):
        remote.read("x")


def test_a_request_without_an_answer_ends():
    never = threading.Event()
    asked = Remote("memory://silent", Tries(0))
    with pytest.raises(StorageAway, match="no answer within"):
        asked._ask("read", "memory://silent", never.wait, 0.01)
    never.set()


def test_a_bucket_that_is_not_there_cannot_be_written_to(s3, folder):
    with pytest.raises(StorageError, match=r"could not be written: .* Make the bucket or folder first"):
        push(folder, "s3://bucket-of-nobody/model")


def test_a_file_that_goes_while_it_is_put_there_is_no_fault_of_the_store(place, tmp_path):
    with pytest.raises(FileNotFoundError):
        Remote(place).put("gone", tmp_path / "gone")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "..", "a//evil", "./evil", "a/\0evil"]
)
def test_a_store_s_name_that_leads_out_of_the_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(Remote, "listing", lambda self: {name: StoredFile(1), "good": StoredFile(1)})
    with pytest.raises(StorageError, match="no folder here can hold"):
        fetch("memory://store/model", tmp_path / "here" / "model")
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [".model.lock"]
