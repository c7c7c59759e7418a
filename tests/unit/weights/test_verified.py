"""A host verifies a snapshot once: who trusts whose word, and when not."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from areal_async.base.errors import SnapshotError
from areal_async.weights import tensor_file
from areal_async.weights.manifest import hash_of
from areal_async.weights.snapshot import MODEL_FILE, Snapshot, SnapshotInfo, open_snapshot
from areal_async.weights.verified import HostRecords
from tests.unit.weights.world import written
from tests.waiting import LIMIT_S

LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hashed(monkeypatch):
    """Sizes of the parts that were hashed, in any thread."""
    sizes = []

    def counting(data):
        sizes.append(len(data))
        return hash_of(data)

    monkeypatch.setattr(tensor_file, "hash_of", counting)
    return sizes


def opened(info: SnapshotInfo, records: HostRecords, *, tensors: bool = True) -> Snapshot:
    return open_snapshot(info.path, manifest_hash=info.manifest_hash, tensors=tensors, records=records)


def parts(hashed: list[int]) -> int:
    return sum(size > 1 << 20 for size in hashed)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_what_one_process_has_hashed_the_next_does_not_hash(tmp_path, hashed, first, then):
    info = written(tmp_path / "shm")
    want = open_snapshot(info.path).tensors
    opened(info, HostRecords(tmp_path / "verified"), tensors=first)
    hashed.clear()
    found = opened(info, HostRecords(tmp_path / "verified"), tensors=then)
    assert parts(hashed) == 0
    assert found.tensors.keys() == (want.keys() if then else set())
    assert all(torch.equal(tensor, want[name]) for name, tensor in found.tensors.items())


def test_without_records_or_an_announced_hash_everything_is_hashed(tmp_path, hashed):
    info, records = written(tmp_path / "shm"), HostRecords(tmp_path / "verified")
    opened(info, records)
    for again in (
        lambda: open_snapshot(info.path, manifest_hash=info.manifest_hash),
        lambda: open_snapshot(info.path, records=records),
    ):
        hashed.clear()
        again()
        assert parts(hashed) == 1


def test_versions_are_true_a_file_that_was_changed_or_exchanged_is_hashed_again(tmp_path):
    records = HostRecords(tmp_path / "verified")
    for version, damage in enumerate(("written to", "replaced", "renamed and written to")):
        info = written(tmp_path / "shm", version)
        opened(info, records)
        model = info.path / MODEL_FILE
        data = bytearray(model.read_bytes())
        data[-1] ^= 1
        times = model.stat()
        if damage == "replaced":
            model.unlink()
        if damage == "renamed and written to":
            model.rename(model.with_suffix(".x")).rename(model)
        model.write_bytes(data)
        os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
        for tensors in (True, False):
            with pytest.raises(SnapshotError, match="does not match its hash"):
                opened(info, records, tensors=tensors)


def test_versions_are_true_another_snapshot_in_the_same_memory_is_hashed(tmp_path, hashed):
    """An allocation that is filled again is another version's, though it is the same inode."""
    records = HostRecords(tmp_path / "verified")
    first = written(tmp_path / "shm")
    opened(first, records)
    second = written(tmp_path / "shm", 1)
    hashed.clear()
    opened(second, records)
    assert parts(hashed) == 1


def test_versions_are_true_what_does_not_match_leaves_no_record(tmp_path):
    info, records = written(tmp_path / "shm"), HostRecords(tmp_path / "verified")
    model = info.path / MODEL_FILE
    data = model.read_bytes()
    model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(SnapshotError, match="does not match its hash"):
            opened(info, records)


@pytest.mark.parametrize("open_to_others", ["folder", "record"])
def test_versions_are_true_a_record_that_others_could_have_written_is_not_believed(
    tmp_path, hashed, open_to_others
):
    info, folder = written(tmp_path / "shm"), tmp_path / "verified"
    opened(info, HostRecords(folder))
    (record,) = [path for path in folder.iterdir() if not path.suffix]
    (folder if open_to_others == "folder" else record).chmod(0o722)
    hashed.clear()
    opened(info, HostRecords(folder))
    assert parts(hashed) == 1


def test_versions_are_true_a_file_that_changes_while_it_is_hashed_leaves_no_record(
    tmp_path, hashed, monkeypatch
):
    info, records = written(tmp_path / "shm"), HostRecords(tmp_path / "verified")
    real = tensor_file.TensorFile.verify

    def verify(self):
        real(self)
        os.utime(info.path / MODEL_FILE)

    monkeypatch.setattr(tensor_file.TensorFile, "verify", verify)
    opened(info, records, tensors=False)
    hashed.clear()
    opened(info, records)
    assert parts(hashed) == 1


def test_two_at_once_hash_once(tmp_path, monkeypatch):
    info, counted = written(tmp_path / "shm"), []
    both = threading.Barrier(2)
    real = tensor_file.TensorFile.read

    def read(self, *, verify=True):
        counted.append(verify)
        return real(self, verify=verify)

    def one() -> Snapshot:
        both.wait(LIMIT_S)
        return opened(info, HostRecords(tmp_path / "verified"))

    monkeypatch.setattr(tensor_file.TensorFile, "read", read)
    with ThreadPoolExecutor(2) as pool:
        for running in [pool.submit(one) for _ in range(2)]:
            running.result(LIMIT_S)
    assert sorted(counted) == [False, True]


def test_when_the_one_that_verifies_dies_the_next_one_does(tmp_path, hashed):
    info, folder = written(tmp_path / "shm"), tmp_path / "verified"
    folder.mkdir(mode=0o700)
    hashed.clear()
    lock = folder / (info.manifest_hash.removeprefix("blake3:") + ".lock")
    locker = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert locker.stdout is not None
        assert locker.stdout.readline() == b"locked\n"
        # One that hangs is waited for, but not for ever.
        opened(info, HostRecords(folder, wait_s=0.05))
        assert parts(hashed) == 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(opened, info, HostRecords(folder))
            locker.kill()
            waiting.result(LIMIT_S)
        assert parts(hashed) == 2
    finally:
        locker.kill()
        locker.communicate()
    opened(info, HostRecords(folder))
    assert parts(hashed) == 2


def test_nothing_is_unbounded_records_of_old_versions_go(tmp_path):
    records = HostRecords(tmp_path / "verified")
    for version in range(40):
        opened(written(tmp_path / "shm", version, mib=0.01), records)
    assert len(list((tmp_path / "verified").iterdir())) <= 2 * 16
