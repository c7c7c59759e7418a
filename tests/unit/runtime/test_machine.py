"""Trouble of the machine, its disk and its limits: told in a paragraph with the fix, wherever it is met."""

import errno
import os
import resource
from contextlib import contextmanager, nullcontext

import pytest
import typer

from areal_async.base.errors import DISK_TROUBLE, ArealError, FaultError, MachineError, errno_of
from areal_async.base.own_files import append_beneath, map_open
from areal_async.cli.tools import own_tracebacks, readable_errors
from areal_async.cluster import attempt_process
from areal_async.service import main as service
from areal_async.storage.remote import REFUSED
from trainer_service.durable_files import room_for
from trainer_service.errors import DiskFull

DISK = ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE"]
LIMITS = ["EMFILE", "ENFILE"]


def of(name, path=None):
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), path)


def told_by_command(capsys, error):
    with pytest.raises(typer.Exit) as ending, readable_errors():
        raise error
    said = " ".join(capsys.readouterr().err.split())
    return ending.value.exit_code, said


@pytest.mark.parametrize("name", DISK)
@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "below another"])
def test_a_command_tells_what_is_wrong_with_the_disk_and_never_that_it_is_a_bug(capsys, name, wrapped):
    error = of(name, "/runs/x/metrics.jsonl")
    if wrapped:
        above = RuntimeError("the model cannot be saved")
        above.__cause__ = error
        error = above
    status, said = told_by_command(capsys, error)
    assert status == 1
    assert "the disk of /runs/x/metrics.jsonl" in said
    assert DISK_TROUBLE[getattr(errno, name)][1] in said
    assert "bug" not in said


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("kind", ["as it is", "an error of ours"])
def test_too_many_open_files_name_the_limit_and_the_fix(capsys, name, kind):
    error = of(name, "/dev/shm/x")
    if kind == "an error of ours":
        above = ArealError("the socket cannot be served: too many open files.")
        above.__cause__ = error
        error = above
    _, said = told_by_command(capsys, error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (str(soft) in said and "ulimit -n 65536" in said) if name == "EMFILE" else "fs.file-max" in said
    assert "bug" not in said


@pytest.mark.parametrize("error", [KeyError("x"), of("EINVAL"), of("EBADF")])
def test_what_is_no_trouble_of_the_machine_is_still_a_bug(capsys, error):
    _, said = told_by_command(capsys, error)
    assert "This is a bug of areal-async" in said


@pytest.mark.parametrize("name", DISK)
def test_the_trainer_ends_for_a_disk_that_takes_no_writes(tmp_path, name):
    with pytest.raises(DiskFull, match="What was there before is whole"), room_for("a step", tmp_path):
        raise of(name, str(tmp_path))
    of_rust = OSError(f"Error while serializing: I/O error (os error {getattr(errno, name)})")
    with pytest.raises(DiskFull), room_for("a model", tmp_path):
        raise of_rust


@pytest.mark.parametrize("name", DISK)
def test_the_number_of_an_error_comes_through_a_fault(name):
    assert errno_of(FaultError("failed", str(of(name, "/x")))) == getattr(errno, name)
    assert (getattr(errno, name) in REFUSED) is (name != "EIO"), "a link to a store fails with EIO"


@pytest.mark.parametrize("name", [*DISK, *LIMITS])
def test_a_service_tells_it_in_one_paragraph(capsys, name):
    service._report("reward", of(name, "/runs/x"))
    said = capsys.readouterr().err
    assert said.startswith("reward: ")
    assert "Traceback" not in said
    assert MachineError.of(of(name, "/runs/x")) is not None


@pytest.mark.parametrize("name", [*DISK, *LIMITS])
def test_an_inline_run_and_an_attempt_of_the_controller_tell_it_without_a_traceback(
    capsys, monkeypatch, tmp_path, name
):
    def fail(*_):
        raise of(name, "/runs/x")

    with pytest.raises(typer.Exit), own_tracebacks():
        fail()
    monkeypatch.setattr(attempt_process, "read_own", fail)
    monkeypatch.setattr(attempt_process, "_stoppable", lambda folder: nullcontext())
    ending = attempt_process.attempt(tmp_path)
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert ending.how == "failed"
    assert str(MachineError.of(of(name, "/runs/x"))) == ending.words


@contextmanager
def few_files(most):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def take_all(taken):
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))


def test_a_real_limit_is_named():
    most, taken = len(os.listdir("/proc/self/fd")) + 3, []
    with few_files(most), pytest.raises(OSError, match="Too many open files") as met:
        take_all(taken)
    with few_files(most):
        said = str(MachineError.of(met.value))
    for fd in taken:
        os.close(fd)
    assert f"may have {most} files open here" in said


def test_a_full_disk_takes_all_of_a_piece_or_nothing(small_disk):
    append_beneath(small_disk, "logs/x.log", b"before")
    with pytest.raises(OSError, match=r"No space|only") as met:
        append_beneath(small_disk, "logs/x.log", bytes(8 << 20))
    assert met.value.errno == errno.ENOSPC
    assert (small_disk / "logs" / "x.log").read_bytes() == b"before"


def test_a_file_with_holes_is_read_and_not_mapped(tmp_path):
    path = tmp_path / "holes"
    path.write_bytes(b"begin")
    with path.open("r+b") as file:
        file.truncate(1 << 20)
        content = map_open(file.fileno())
        os.pwrite(file.fileno(), b"other", 0)
    assert (bytes(content[:5]), len(content)) == (b"begin", 1 << 20)
