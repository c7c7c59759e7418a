"""Two programs at once, each in a jail of its own, joined by one link."""

import os

import psutil
import pytest

from reward_service.sandbox import Program, RunLimits, Sandbox, SandboxError
from tests.scoring import processes_below
from tests.waiting import LIMIT_S

LIMITS = RunLimits(wall_s=20, cpu_s=10, processes=8)
OPENING = "import os, sys, time\nLINK = 3\n"
HANGS = RunLimits(wall_s=60, cpu_s=30)


def python(source, **options):
    return Program(source=OPENING + source, **{"limits": LIMITS, **options})


ECHO = "while data := os.read(LINK, 1 << 16):\n    os.write(LINK, data.upper())\ntime.sleep(1000)"


def test_bytes_go_both_ways_and_the_program_is_ended_with_its_tests(sandbox):
    asks = "os.write(LINK, b'one')\nprint(os.read(LINK, 100).decode())"
    tests, program = sandbox.run_pair(python(asks), python(ECHO, limits=HANGS))
    assert (tests.kind, tests.stdout) == ("ok", b"ONE\n"), tests.describe()
    assert program.kind == "ended", program.describe()
    assert program.wall_ms < 30_000


def test_tests_read_the_end_of_the_link_when_the_program_ends_and_finish(sandbox):
    waits = "print(os.read(LINK, 100), os.read(LINK, 100))"
    for ending, kind in (("os.write(LINK, b'last')", "ok"), ("os.write(LINK, b'last')\nos._exit(3)", "exit")):
        tests, program = sandbox.run_pair(python(waits), python(ending))
        assert tests.stdout == b"b'last' b''\n", tests.describe()
        assert program.kind == kind


def test_a_child_that_keeps_the_link_ends_with_its_program(sandbox):
    leaves = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint('gone')"
    tests, program = sandbox.run_pair(python("print(os.read(LINK, 1))"), python(leaves))
    assert (tests.stdout, program.stdout) == (b"b''\n", b"gone\n")


HALF = RunLimits(wall_s=0.5)
SLEEPS = "time.sleep(1000)"


@pytest.mark.parametrize(
    ("tests", "limits", "program", "own_limits", "kinds"),
    [
        ("print(os.read(LINK, 1))", LIMITS, SLEEPS, HALF, ("ok", "timeout")),
        (SLEEPS, HALF, SLEEPS, HANGS, ("timeout", "ended")),
        ("while True: pass", RunLimits(wall_s=30, cpu_s=0.3), SLEEPS, HANGS, ("cpu", "ended")),
        # A link is filled without a reader; the program may see it broken before it is ended.
        (SLEEPS, HALF, "while True: os.write(LINK, bytes(1 << 16))", HANGS, ("timeout", "ended exit")),
    ],
)
def test_each_has_its_own_limits_and_a_hang_of_one_ends_in_time(
    tests, limits, program, own_limits, kinds, sandbox
):
    pair = sandbox.run_pair(python(tests, limits=limits), python(program, limits=own_limits))
    assert pair[0].kind == kinds[0]
    assert pair[1].kind in kinds[1].split()
    assert pair[0].stdout == (b"b''\n" if kinds[0] == "ok" else b"")


def test_the_two_have_no_folder_and_no_file_of_the_other(sandbox):
    marks = (
        "open('mark', 'w').write('here')\nos.write(LINK, b'x')\nos.read(LINK, 1)\n"
        "print(sorted(os.listdir('.')))"
    )
    one, other = sandbox.run_pair(
        python(marks, files={"tests.json": b"{}"}), python(marks, files={"theirs": b"1"})
    )
    assert b"theirs" not in one.stdout
    assert b"tests.json" not in other.stdout
    assert b"mark" in one.stdout


def test_no_other_descriptor_is_open_in_either(sandbox):
    looks = "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd') if int(fd) < 1 << 16)[:-1])"
    for outcome in sandbox.run_pair(python(looks), python(looks + "\nos.read(LINK, 1)")):
        assert outcome.stdout in (b"[0, 1, 2, 3]\n", b""), outcome.describe()
    assert sandbox.run(python(looks)).stdout == b"[0, 1, 2]\n"


def test_pairs_follow_one_another_and_leave_nothing(sandbox):
    sandbox.run_pair(python(""), python(""))
    processes, descriptors = processes_below(), len(os.listdir("/proc/self/fd"))
    for n in range(4):
        tests, _ = sandbox.run_pair(
            python(f"os.write(LINK, b'n{n}')\nprint(os.read(LINK, 9).decode())"), python(ECHO)
        )
        assert tests.stdout == f"N{n}\n".encode(), tests.describe()
        assert sandbox.run(python(f"print({n})")).stdout == f"{n}\n".encode()
    assert processes_below() <= processes  # what other tests left may end meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_launcher_that_dies_is_started_again(sandbox):
    before = processes_below()
    with Sandbox.at(sandbox.level) as own:
        own.run_pair(python(""), python(""))
        for launcher in map(psutil.Process, processes_below() - before):
            launcher.kill()
            launcher.wait(LIMIT_S)
            tests, _ = own.run_pair(python("os.write(LINK, b'a')\nprint(os.read(LINK, 1))"), python(ECHO))
            assert tests.stdout == b"b'A'\n"
        for launcher in map(psutil.Process, processes_below() - before):
            launcher.kill()
            launcher.wait(LIMIT_S)
        assert own.run(python("print(1)")).ok


def test_a_pair_that_cannot_be_started_is_an_error_and_leaves_nothing(sandbox):
    before = processes_below()
    missing = Program(command=("/usr/bin/areal-is-not-here",), limits=LIMITS)
    for pair in ((missing, python("time.sleep(1000)", limits=HANGS)), (python(ECHO, limits=HANGS), missing)):
        with pytest.raises(SandboxError, match="areal-is-not-here"):
            sandbox.run_pair(*pair)
    assert len(processes_below()) <= len(before)
    assert sandbox.run(python("print(1)")).ok


def test_tests_that_end_while_the_other_jail_is_made_end_it(sandbox):
    nothing = Program(command=("/bin/sh", "-c", ":"), limits=LIMITS)
    for _ in range(8):
        tests, program = sandbox.run_pair(nothing, nothing)
        assert tests.kind == "ok", tests.describe()
        assert program.kind in ("ok", "ended"), program.describe()
