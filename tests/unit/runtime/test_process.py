"""What the kit for child processes promises, with real processes."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from areal_async.base.processes import ChildProcess, RestartPolicy, Restarts
from tests.processes import is_gone
from tests.waiting import LIMIT_S, wait_for

SLEEPS = "import time; time.sleep(600)"
DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "time.sleep(600)"
)
WITH_HELPER = (
    "import subprocess, sys, time\n"
    "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(helper.pid, flush=True)\n"
)


def python(code, *arguments):
    return [sys.executable, "-c", code, *arguments]


async def ended(child):
    return await asyncio.wait_for(child.wait(), LIMIT_S)


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
async def test_the_exit_status_is_that_of_the_command(code, status):
    child = ChildProcess(python(code))
    assert await ended(child) == status
    assert child.poll() == status
    assert not child.alive


async def test_a_process_may_open_as_many_files_as_the_machine_allows(tmp_path):
    code = (
        "import resource as r; from areal_async.base.processes import raise_file_limit as up\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 200)); up(); print(*r.getrlimit(r.RLIMIT_NOFILE)); up()"
    )
    child = ChildProcess(python(code), output=tmp_path / "log")
    assert await ended(child) == 0
    assert (tmp_path / "log").read_text() == "200 200\n"


async def test_a_command_that_does_not_exist_says_so(tmp_path):
    child = ChildProcess([str(tmp_path / "nothing")], output=tmp_path / "log")
    assert await ended(child) == 127
    assert "nothing cannot be started" in (tmp_path / "log").read_text()


async def test_a_child_gets_what_it_is_given_and_its_output_is_kept(tmp_path):
    code = "import os, sys; print(sys.stdin.read() + os.environ['COLOUR'])"
    (tmp_path / "log").write_text("before\n")
    child = ChildProcess(
        python(code), given=b"dark ", environment={"COLOUR": "blue"}, output=tmp_path / "log"
    )
    await ended(child)
    assert (tmp_path / "log").read_text() == "before\ndark blue\n"


def test_a_child_tells_once_that_it_is_ready():
    code = "import os, sys, time; os.write(int(sys.argv[2]), b'{\"port\": 7}\\n'); time.sleep(600)"
    child = ChildProcess(python(code), ready_option="--ready-fd")
    try:
        wait_for(child.ready_report)
        assert child.ready_report() == {"port": 7}
    finally:
        child.kill()
        child.close()


@pytest.mark.parametrize("guard", [{}, {"on_orphaned": "kill_all"}], ids=["plain", "guarded"])
async def test_what_a_child_started_ends_with_it_and_the_status_is_its_own(tmp_path, guard):
    child = ChildProcess(python(WITH_HELPER + "raise SystemExit(5)"), output=tmp_path / "log", **guard)
    assert await ended(child) == 5
    helper = int((tmp_path / "log").read_text().split()[0])
    wait_for(lambda: is_gone(helper))


@pytest.mark.parametrize(
    ("code", "grace_s", "status"),
    [(SLEEPS, 30.0, -signal.SIGTERM), (SLEEPS, 0.0, -signal.SIGKILL), (DEAF, 0.1, -signal.SIGKILL)],
)
async def test_a_child_is_asked_to_end_and_killed_if_it_does_not(tmp_path, code, grace_s, status):
    child = ChildProcess(python(code), output=tmp_path / "log")
    if code is DEAF:
        wait_for(lambda: (tmp_path / "log").read_text())
    assert await child.stop(grace_s=grace_s) == status
    child.kill()  # nothing that is gone is signalled
    child.terminate()


OUTSIDE = "os.setsid()"
AS_ORPHAN = "os.setsid(); os.fork() and os._exit(0)"


@pytest.mark.parametrize("leaves", [OUTSIDE, AS_ORPHAN], ids=["other session", "orphan"])
@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
async def test_a_guard_ends_after_every_process_of_its_command_has_ended(tmp_path, leaves, stopped):
    """The guard holds what it inherited, such as a lock, until then: a large process takes seconds to end."""
    code = (
        "import os, time; from pathlib import Path\n"
        f"if os.fork() == 0: {leaves}; held = b'x' * (200 << 20); print(os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    read, write = os.pipe()
    child = ChildProcess(python(code), output=tmp_path / "log", on_orphaned="kill_all", pass_fds=[write])
    os.close(write)
    wait_for(lambda: (tmp_path / "log").read_text())
    helper = int((tmp_path / "log").read_text())
    if stopped:
        os.kill(child.pid, signal.SIGSTOP)
    assert await child.stop() == -signal.SIGKILL
    assert is_gone(helper)
    assert os.read(read, 1) == b""  # nobody has it open any longer
    os.close(read)


async def test_the_command_keeps_what_it_inherited_if_its_guard_is_killed(tmp_path):
    """Its memory may be freed long after its guard has ended, and the lock must last until then."""
    code = "import os, sys, time; print(os.fstat(int(sys.argv[1])).st_ino, flush=True); time.sleep(600)"
    read, write = os.pipe()
    child = ChildProcess(
        python(code, str(write)), output=tmp_path / "log", on_orphaned="kill_all", pass_fds=[write]
    )
    pipe = os.fstat(write).st_ino
    os.close(write)
    wait_for(lambda: (tmp_path / "log").read_text())
    assert int((tmp_path / "log").read_text()) == pipe
    os.kill(child.pid, signal.SIGKILL)
    assert await ended(child) == -signal.SIGKILL
    assert os.read(read, 1) == b""  # the kernel ended the command too
    os.close(read)


@pytest.mark.parametrize("how", ["terminate", "kill", "kill_all"])
def test_a_child_does_not_outlive_the_process_that_started_it(tmp_path, how):
    log = tmp_path / "log"
    code = WITH_HELPER + "import os; print(os.getpid(), flush=True); time.sleep(600)"
    parent = subprocess.Popen(
        python(
            "import sys, time; from pathlib import Path\n"
            "from areal_async.base.processes import ChildProcess\n"
            "code, log, how = sys.argv[1:]\n"
            "ChildProcess([sys.executable, '-c', code], output=Path(log), on_orphaned=how)\n"
            "time.sleep(600)",
            code,
            str(log),
            how,
        )
    )
    try:
        wait_for(lambda: log.exists() and len(log.read_text().split()) == 2)
    finally:
        parent.kill()
        parent.wait()
    helper, child = map(int, log.read_text().split())
    wait_for(lambda: is_gone(child))
    if how == "kill_all":
        wait_for(lambda: is_gone(helper))
    else:
        os.kill(helper, signal.SIGKILL)


def test_the_pause_doubles_up_to_its_limit_and_deaths_are_counted_within_the_window():
    policy = RestartPolicy(limit=4, window_s=100.0, first_pause_s=0.5, longest_pause_s=3.0, steady_s=10.0)
    restarts = Restarts(policy)
    assert [restarts.died(now_s) for now_s in (1.0, 2.0, 3.0, 4.0)] == [0.5, 1.0, 2.0, 3.0]
    assert restarts.died(5.0) is None
    assert restarts.died(200.0, served_s=195.0) == 3.0
    assert restarts.died(220.0, served_s=205.0) == 0.0
    assert restarts.died(221.0, served_s=220.5) == 0.5


def test_an_error_that_a_restart_does_not_cure_is_final_at_once():
    policy = RestartPolicy(limit=9, first_pause_s=1.0)
    assert Restarts(policy).died(0.0, status=1) is None
    assert [Restarts(policy).died(0.0, status=status) for status in (-9, -11, 0, 75, 143)] == [1.0] * 5
