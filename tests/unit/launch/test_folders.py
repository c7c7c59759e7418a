import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from areal_async.base.addresses import SOCKET_PATH_LIMIT
from areal_async.base.errors import RunFolderError
from areal_async.base.processes import start_of
from areal_async.launch.folders import Owner, claim_folders, describe_work, leftovers
from areal_async.launch.one_host import short_socket_dir
from areal_async.service.record import RunLog
from tests.unit.launch.launching import changed


@pytest.fixture
def claimed(job, shm):
    folders = claim_folders(job, overwrite=False, shm_root=shm)
    yield folders
    folders.release()


def test_snapshots_in_a_shared_directory_end_with_their_job_and_nothing_else_does(job, shm, tmp_path):
    job = changed(job, "weights", channel="disk", channel_args={"directory": str(tmp_path / "nfs")})
    root, other = tmp_path / "nfs" / job.job, tmp_path / "nfs" / "another" / "policy-e0-v1"
    other.mkdir(parents=True)
    for kept in (False, True):
        left = ("policy-e0-v7", "policy-e1-v12.delta", ".writing-e1-v13", "notes" if kept else "policy-e0-v8")
        for name in left:
            (root / name).mkdir(parents=True)
            (root / name / "model.safetensors").write_bytes(b"x")
        (root / ".spare-model").write_bytes(b"x")
        folders = claim_folders(job, overwrite=False, shm_root=shm)
        assert (root / "policy-e0-v7").is_dir()  # a publisher that starts decides what becomes of these
        folders.release()
        assert [path.name for path in tmp_path.glob(f"nfs/{job.job}/*")] == (["notes"] if kept else [])
        assert root.exists() is kept
    assert other.is_dir()


def test_a_second_run_of_a_running_job_is_refused_with_its_pid(job, shm, claimed):
    with pytest.raises(RunFolderError, match=f"already running .process {os.getpid()} "):
        claim_folders(job, overwrite=True, shm_root=shm)
    assert claimed.shm_dir.exists()


@pytest.mark.parametrize("entry", ["model/config.json", "checkpoints/a/b", "metrics.jsonl", "notes.txt"])
def test_work_is_never_deleted_silently(job, shm, entry):
    claim_folders(job, overwrite=False, shm_root=shm).release()
    kept = job.run_dir / "test" / entry
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("worth a lot")
    with pytest.raises(RunFolderError, match=r"unfinished run .*--overwrite"):
        claim_folders(job, overwrite=False, shm_root=shm)
    assert kept.read_text() == "worth a lot"
    claim_folders(job, overwrite=True, shm_root=shm).release()
    assert not kept.exists()


def test_a_run_that_did_nothing_is_simply_started_again(job, shm):
    folders = claim_folders(job, overwrite=False, shm_root=shm)
    (folders.logs / "buffer.log").write_text("died")
    with RunLog(folders.run_dir / "metrics.jsonl") as records:
        records.write("start")
        records.write("restart", service="rollout-0")
        records.write("end", ending="died", wall_s=1.0)
    (folders.run_dir / "model").mkdir()
    (folders.run_dir / "buffer").mkdir()
    (folders.run_dir / "buffer" / "appendonly.aof").write_text("state of the dead run")
    folders.release()
    assert describe_work(folders.run_dir) == ""
    again = claim_folders(job, overwrite=False, shm_root=shm)
    assert {path.name for path in again.run_dir.iterdir()} == {"run.lock", "logs"}
    assert list(again.logs.iterdir()) == []
    again.release()


def test_a_folder_that_no_run_made_is_never_touched(job, shm):
    foreign = job.run_dir / "test"
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="was not made by a run"):
        claim_folders(job, overwrite=True, shm_root=shm)
    assert (foreign / "thesis.tex").exists()
    assert not (foreign / "run.lock").exists()


def test_a_clock_that_is_set_ends_no_run(monkeypatch):
    owner = Owner(os.getpid(), start_of(os.getpid()))
    boot_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_s + 1.0)  # a second, as NTP may round it
    assert owner.alive


def test_a_supervisor_that_was_killed_and_not_reaped_does_not_live():
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = Owner(process.pid, start_of(process.pid))
        assert owner.alive
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not owner.alive


def test_leftovers_of_a_dead_run_are_found_and_cleaned_by_the_next(job, shm):
    dead = claim_folders(job, overwrite=False, shm_root=shm)
    os.close(dead.lock_fd)  # as the kernel does when the supervisor is killed
    roots = [shm, dead.socket_dir.parent]
    assert not {dead.shm_dir, dead.socket_dir} & set(leftovers(roots)), "its process, ours, still lives"
    for folder in (dead.shm_dir, dead.socket_dir):
        owner = json.loads((folder / "owner.json").read_text())
        (folder / "owner.json").write_text(json.dumps(owner | {"started": "another boot 1"}))
    assert {dead.shm_dir, dead.socket_dir} <= set(leftovers(roots))
    again = claim_folders(job, overwrite=False, shm_root=shm)
    assert not dead.shm_dir.exists()
    assert not dead.socket_dir.exists()
    again.release()


def test_without_shared_memory_the_weights_go_through_a_temporary_folder(job, tmp_path):
    folders = claim_folders(job, overwrite=False, shm_root=tmp_path / "absent")
    assert folders.shm_dir.is_dir()
    folders.release()
    assert not folders.shm_dir.exists()


def test_a_run_dir_that_cannot_be_made_is_one_paragraph(job, shm, tmp_path):
    (tmp_path / "file").write_text("")
    blocked = job.model_copy(update={"run_dir": tmp_path / "file"})
    with pytest.raises(RunFolderError, match=r"cannot be used.*run_dir"):
        claim_folders(blocked, overwrite=False, shm_root=shm)


def test_socket_paths_stay_below_the_kernel_limit():
    near = Path("/run/jobs/s")
    assert short_socket_dir(near) == near
    long = Path("/run") / ("d" * 100) / "s"
    short = short_socket_dir(long)
    assert short != long
    assert short == short_socket_dir(long)
    assert len(str(short)) + len("/rollout-service-0.socket") <= SOCKET_PATH_LIMIT
