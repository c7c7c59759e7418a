"""A run's folder is mirrored to a store, claimed there, and brought back."""

import itertools
import os
import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from areal_async.base.errors import RunError, RunFolderError
from areal_async.base.own_files import read_record
from areal_async.config.content import store_url
from areal_async.config.load import load_job
from areal_async.launch import stored_runs
from areal_async.launch.stored_runs import bring_run, bring_run_of, mirrored, run_at
from areal_async.storage.mirror import MARK, Mirror, MirrorLost, MirrorMark, mark_there
from areal_async.storage.remote import Remote
from tests.waiting import LIMIT_S


def run_folder(root, **files):
    run_dir = root / "job"
    (run_dir / "logs").mkdir(parents=True)
    for name in ("run.lock", "job.yaml", "metrics.jsonl", "topology.json", "logs/trainer.log"):
        (run_dir / name).write_text(name)
    for name in ("buffer/appendonly.aof", "checkpoints/step-000002/manifest.json", "model/config.json"):
        (run_dir / name).parent.mkdir(parents=True)
        (run_dir / name).write_text(name)
    return run_dir


def names(url):
    return sorted(Remote(url).listing())


MIRRORED = ["job.yaml", MARK, "logs/trainer.log", "metrics.jsonl"]


@pytest.fixture
def job(place, tmp_path):
    content = {"job": "job", "run_dir": place, "model": "model", "tasks": {"train": "train.jsonl"}}
    return load_job(content, source="job", base=tmp_path, files=False)


def test_what_changes_is_in_the_store_a_little_later(place, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "log").write_text("one")
    (folder / "unfinished.tmp").write_text("half")
    (folder / ".hidden").write_text("")
    (folder / "link").symlink_to(folder / "log")
    os.mkfifo(folder / "pipe")
    mirror = Mirror(folder, place)
    mirror.start()
    mirror.once()
    assert names(place) == ["log", MARK]
    (folder / "log").write_text("one and two")
    (folder / "new").write_text("more")
    mirror.once()
    assert Remote(place).read("log") == b"one and two"
    (folder / "new").unlink()
    mirror.stop()
    assert names(place) == ["log", MARK]
    assert mark_there(place).ended
    assert mark_there(place) == read_record(folder / MARK, MirrorMark)


def test_only_what_changed_is_put_there_again(place, tmp_path, monkeypatch):
    folder, put = tmp_path / "folder", []
    folder.mkdir()
    (folder / "large").write_text("same")
    really = Remote.put
    monkeypatch.setattr(Remote, "put", lambda self, name, path: put.append(name) or really(self, name, path))
    mirror = Mirror(folder, place)
    mirror.start()
    for _ in range(3):
        mirror.once()
    assert put == ["large"]


def test_it_mirrors_by_itself_and_goes_on_after_the_store_was_away(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("areal_async.storage.mirror.EVERY_S", 0.01)
    monkeypatch.setattr("areal_async.storage.mirror.ROUND_S", 0.1)
    folder, url = tmp_path / "folder", s3.bucket()
    folder.mkdir()
    mirror = Mirror(folder, url)
    failed = threading.Event()
    once = mirror.once

    def watched():
        try:
            once()
        except Exception:
            failed.set()
            raise

    mirror.once = watched
    mirror.start()
    s3.stop()
    assert failed.wait(LIMIT_S)
    (folder / "log").write_text("written meanwhile")
    s3.start()
    mirror.stop()
    assert Remote(url).read("log") == b"written meanwhile"


def test_who_lost_the_place_to_another_host_writes_no_more(place, tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
    one, other = Mirror(first, place), Mirror(second, place)
    one.start()
    other.start()
    (first / "log").write_text("of the first")
    with pytest.raises(MirrorLost, match="the job was resumed there"):
        one.once()
    assert "log" not in names(place)


def test_a_run_is_mirrored_but_for_what_is_this_hosts_and_comes_back(job, place, cache, tmp_path):
    run_dir, url = run_folder(job.run_dir), f"{place}/job"
    with mirrored(job, run_dir, overwrite=False, resume=False):
        pass
    assert names(url) == MIRRORED
    before = {path.name for path in run_dir.iterdir()}
    bring_run(url, run_dir)
    assert {path.name for path in run_dir.iterdir()} == before, "what was mirrored from here is as new"
    os.rename(cache, tmp_path / "lost")
    assert run_at(url) == run_dir
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "job.yaml",
        "logs",
        "metrics.jsonl",
        "run.lock",
    ]
    assert (run_dir / "metrics.jsonl").read_text() == "metrics.jsonl"
    assert run_dir.stat().st_mode & 0o077 == 0


def test_a_run_that_went_on_elsewhere_takes_the_place_of_what_is_here(job, place):
    run_dir, url = run_folder(job.run_dir), f"{place}/job"
    with mirrored(job, run_dir, overwrite=False, resume=False):
        pass
    remote = Remote(url)
    remote.write("metrics.jsonl", b"further on")
    mark = msgspec.structs.replace(mark_there(url), owner="another", host="elsewhere")
    remote.write(MARK, msgspec.json.encode(mark))
    bring_run_of(job)
    assert (run_dir / "metrics.jsonl").read_text() == "further on"
    assert not (run_dir / "buffer").exists(), "its ledger is older than the checkpoint's"
    assert not (run_dir / "checkpoints").exists()


def test_work_in_the_store_is_deleted_only_when_asked(job, place, tmp_path):
    run_dir, url = run_folder(job.run_dir), f"{place}/job"
    with mirrored(job, run_dir, overwrite=False, resume=False):
        Remote(url).write("checkpoints/step-000002/manifest.json", b"{}")
    with pytest.raises(RunFolderError, match=f"{url} holds an unfinished run.*areal-async resume {url}"):
        with mirrored(job, run_dir, overwrite=False, resume=False):
            pytest.fail("it runs")
    with mirrored(job, run_dir, overwrite=False, resume=True):
        assert "checkpoints/step-000002/manifest.json" in names(url)
    with mirrored(job, run_dir, overwrite=True, resume=False):
        assert "checkpoints/step-000002/manifest.json" not in names(url)


def test_what_no_run_made_is_never_touched(job, place, tmp_path):
    Remote(f"{place}/job").write("thesis.tex", b"all of it")
    with pytest.raises(RunFolderError, match="was not made by a run"):
        with mirrored(job, run_folder(job.run_dir), overwrite=True, resume=False):
            pytest.fail("it runs")
    assert names(f"{place}/job") == ["thesis.tex"]


def test_a_run_that_another_host_is_at_is_not_taken_over(job, place, monkeypatch):
    run_dir, url = run_folder(job.run_dir), f"{place}/job"
    monkeypatch.setattr(socket, "gethostname", lambda: "other-host")
    other = Mirror(run_dir, url)
    other.start()
    monkeypatch.undo()
    clock = SimpleNamespace(sleep=lambda pause_s: other.once(), monotonic=time.monotonic)
    monkeypatch.setattr(stored_runs, "time", clock)
    with pytest.raises(RunFolderError, match="is running on other-host"):
        stored_runs._claim(url, overwrite=False, resume=True)
    now_s = itertools.count(0, 5)
    clock.sleep, clock.monotonic = lambda pause_s: None, lambda: next(now_s)
    stored_runs._claim(url, overwrite=False, resume=True)  # nobody is there any more


def test_with_a_store_of_checkpoints_alone_what_a_resume_needs_goes_there(place, tmp_path):
    content = {"job": "job", "run_dir": "runs", "model": "model", "tasks": {"train": "train.jsonl"}}
    content["checkpoint"] = {"store": place}
    job = load_job(content, source="job", base=tmp_path, files=False)
    run_dir = run_folder(job.run_dir)
    with mirrored(job, run_dir, overwrite=False, resume=False):
        pass
    assert names(store_url(job)) == ["job.yaml", MARK, "metrics.jsonl"]
    os.rename(job.run_dir, tmp_path / "lost")
    bring_run_of(job)
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "job.yaml",
        "logs",
        "metrics.jsonl",
        "run.lock",
    ]


def test_a_finished_run_whose_folder_did_not_all_come_is_no_success(job, place, monkeypatch, capsys):
    run_dir = run_folder(job.run_dir)

    def away(self, limit_s):
        raise stored_runs.StorageError("the store is away.")

    monkeypatch.setattr(Mirror, "stop", away)
    with pytest.raises(RunError, match=f"not all of the run's folder has come to {place}/job"):
        with mirrored(job, run_dir, overwrite=False, resume=False):
            pass
    with pytest.raises(KeyError):  # why a run failed is not hidden by it
        with mirrored(job, run_dir, overwrite=False, resume=True):
            raise KeyError
    assert "not all of the run's folder" in capsys.readouterr().err


def test_a_url_without_a_run_is_said_so(place):
    with pytest.raises(RunFolderError, match="there is no run at"):
        run_at(f"{place}/none")
