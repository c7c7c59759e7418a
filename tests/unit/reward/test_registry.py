"""The folder in which jobs and shared services find each other."""

import os
import subprocess
import sys

import pytest

from areal_async.launch.registry import (
    VARIABLE,
    JobEntry,
    Owner,
    Registry,
    RegistryError,
    Service,
    ServiceEntry,
    default_registry,
)


def ended_process():
    """The owner of an entry whose process has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(child.pid)
    child.communicate(b"\n")
    return owner


def entry(run_id, owner=None):
    return JobEntry(run_id, "demo", f"/run/{run_id}/context.json", owner or Owner.of(os.getpid()))


def test_a_job_is_found_until_it_is_removed(tmp_path):
    ours, theirs = Registry(tmp_path / "r"), Registry(tmp_path / "r")
    ours.add_job(entry("a"))
    ours.add_job(entry("b"))
    assert [found.run_id for found in theirs.jobs()] == ["a", "b"]
    ours.remove_job("a")
    ours.remove_job("a")
    assert theirs.jobs() == [entry("b")]


def test_the_entry_of_a_process_that_is_gone_counts_as_none(tmp_path):
    registry, gone = Registry(tmp_path / "r"), ended_process()
    registry.add_job(entry("dead", gone))
    registry.add_job(entry("reused", Owner(os.getpid(), 12.0, gone.host)))
    registry.write_service(ServiceEntry(gone, 2, 0))
    assert registry.jobs() == []
    assert registry.service() is None
    assert not list(registry.folder.glob("job-*"))


def test_entries_of_other_machines_are_left_alone(tmp_path):
    registry = Registry(tmp_path / "r")
    registry.add_job(entry("far", Owner(os.getpid(), 1.0, "another-machine")))
    assert registry.jobs() == []
    assert list(registry.folder.glob("job-*"))


def test_a_damaged_entry_is_no_entry(tmp_path):
    registry = Registry(tmp_path / "r")
    (registry.folder / "job-x.json").write_text("{")
    (registry.folder / "reward.json").write_text('{"owner": 3}')
    assert registry.jobs() == []
    assert registry.service() is None


def test_a_folder_has_one_service(tmp_path):
    registry = Registry(tmp_path / "r")
    held = registry.hold()
    told = ServiceEntry(Owner.of(os.getpid()), 2, 9000, {"a": Service("serving", workers_alive=2)})
    registry.write_service(told)
    assert registry.service() == told
    with pytest.raises(RegistryError, match=f"process {os.getpid()}.*--registry"):
        Registry(tmp_path / "r").hold()
    os.close(held)
    os.close(registry.hold())


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RegistryError, match="only you can write to"):
        Registry(folder)
    (tmp_path / "file").touch()
    with pytest.raises(RegistryError, match="cannot be used"):
        Registry(tmp_path / "file")


def test_the_folder_is_private_and_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named"))
    assert Registry().folder == tmp_path / "named"
    assert (tmp_path / "named").stat().st_mode & 0o077 == 0
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_registry() == tmp_path / "areal-async"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in default_registry().name
