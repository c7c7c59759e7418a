"""What programs have got out of a sandbox by, or might: each tries, and says ESCAPED where it got further."""

import fcntl
import os
import socket
import tempfile
import time

import pytest

from reward_service.sandbox import Program, RunLimits
from tests.unit.sandbox.conftest import LIMITS, PROGRAMS
from tests.waiting import LIMIT_S

X86 = os.uname().machine == "x86_64"

# --- ways to the host -----------------------------------------------------------------------------------


def test_no_server_of_the_host_is_reached_by_a_path_or_a_name(attempt):
    """A Redis of the job listens on a path, others on abstract names: with a pair's end one could connect."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as by_path:
        os.chmod(folder, 0o755)
        by_path.bind(f"{folder}/redis.sock")
        os.chmod(f"{folder}/redis.sock", 0o777)
        by_path.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_name:
            by_name.bind(f"\0areal-test-{os.getpid()}")
            by_name.setblocking(False)
            attempt(
                f"places = ['{folder}/redis.sock', '\\0areal-test-{os.getpid()}']\n"
                "for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n"
                "    for place in places:\n"
                "        end = socket.socketpair(socket.AF_UNIX, kind)[0]\n"
                "        tried('connect', end.connect, place)\n"
                "        tried('bind', end.bind, '\\0mine')\n"
                "        tried('bind', end.bind, 'mine')\n"
                "        tried('sendto', end.sendto, b'SET', place)\n"
                "        tried('sendmsg', end.sendmsg, [b'SET'], [], 0, place)\n"
                "try:\n    listed = open('/proc/self/net/unix').read()\n"
                "except OSError:\n    listed = ''\n"
                f"if '{folder}' in listed or 'areal-test' in listed: print('ESCAPED', listed)"
            )
            with pytest.raises(BlockingIOError):
                by_name.recv(1)
            by_path.setblocking(False)
            with pytest.raises(BlockingIOError):
                by_path.accept()


def test_no_file_of_the_host_can_be_locked_watched_or_changed(attempt):
    """The system folders are the host's: `sh` is read in every jail."""
    attempt(PROGRAMS["files of the host"])
    with open("/bin/sh", "rb") as file:  # and it is not locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_deep_folders_are_removed_with_the_run(every_sandbox):
    before = set(os.listdir(tempfile.gettempdir()))
    outcome = every_sandbox.run(Program(source=PROGRAMS["deep folders"], limits=LIMITS))
    assert outcome.ok, outcome.describe()
    left = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("areal-jail-")} - before
    deadline_s = time.monotonic() + LIMIT_S  # others' runs on this machine have such folders for a while
    while left := left & set(os.listdir(tempfile.gettempdir())):
        assert time.monotonic() < deadline_s, left


# --- the kernel's wide doors ----------------------------------------------------------------------------


@pytest.mark.skipif(not X86, reason="the numbers are those of x86-64")
def test_the_calls_with_a_history_of_holes_are_refused(attempt):
    """By EPERM of the filter, whatever their arguments: other errors would say that the kernel looked."""
    attempt(f"calls = {PROGRAMS['calls']!r}\n{PROGRAMS['call them']}")


@pytest.mark.skipif(not X86, reason="the numbers are those of x86-64")
def test_a_call_by_the_numbers_of_another_architecture_ends_the_program(attempt):
    assert attempt("refused('x32', 0x40000000 + 41, 1, 1, 0)", ok=False).kind == "signal"


@pytest.mark.parametrize("name", PROGRAMS["attempts"])
def test_nothing_comes_of(attempt, name):
    outcome = attempt(PROGRAMS["attempts"][name], ok=False)
    assert outcome.kind in ("ok", "exit", "files"), outcome.describe()


def test_a_jail_does_not_reach_another_that_runs_beside_it(isolated, opening):
    """Both know of the other, and try its processes, its folder and its memory."""
    pair = [Program(source=opening + PROGRAMS["looks for another"], limits=LIMITS) for _ in range(2)]
    for outcome in isolated.run_pair(*pair):
        assert b"ESCAPED" not in outcome.stdout
        assert outcome.stdout.endswith(b"b'y'\n") or outcome.kind == "ended", outcome.describe()


def test_no_descriptor_and_no_identity_crosses_the_link(isolated, opening):
    takes, sends = PROGRAMS["takes of the link"], PROGRAMS["sends over the link"]
    tests, program = isolated.run_pair(
        Program(source=opening + takes, limits=LIMITS), Program(source=opening + sends, limits=LIMITS)
    )
    assert tests.stdout == b"looked\n", tests.describe()
    assert b"ESCAPED" not in program.stdout


def test_what_ordinary_programs_need_works(attempt):
    """The filter takes nothing away that solutions of tasks use."""
    outcome = attempt(PROGRAMS["ordinary"], RunLimits(wall_s=30, cpu_s=20, memory_mb=512, processes=32))
    lines = ["[0, 1, 4, 9]", "[0, 1, 4, 9]", "7", "b'shell\\n'", "(2,)", "3", "b'abcd'"]
    assert outcome.stdout.decode().split("\n")[:7] == lines
