"""Memory is held whoever maps it, and what was used is told."""

import os
import threading

import psutil
import pytest

from reward_service.sandbox import Program, RunLimits, Sandbox
from reward_service.sandbox.isolation import cgroup
from tests.scoring import processes_below
from tests.unit.sandbox.conftest import LIMITS, PROGRAMS
from tests.waiting import LIMIT_S

EATERS = PROGRAMS["eaters"]


@pytest.mark.parametrize("name", EATERS)
def test_memory_is_held_whoever_maps_it(isolated, attempt, name):
    outcome = attempt(EATERS[name], LIMITS, ok=False)
    assert outcome.kind in ("memory", "exit", "timeout") or name == "pages lent to pipes", outcome.describe()
    assert outcome.kind == "memory" or name != "many processes"
    if "memory group" in isolated.guards:  # else it depends on how often it can be looked at
        assert outcome.peak_mb < LIMITS.memory_mb + 10


def test_memory_is_held_of_a_program_started_by_another(isolated):
    eats = "kept = []\nwhile True: kept.append(b'x' * (8 << 20))"
    starts = (
        "import os, sys\n"
        f"for _ in range(4): os.fork() or os.execv(sys.executable, [sys.executable, '-c', {eats!r}])\n"
        "os.wait()"
    )
    outcome = isolated.run(Program(source=starts, limits=LIMITS))
    assert outcome.kind == "memory", outcome.describe()
    if "memory group" in isolated.guards:
        assert outcome.peak_mb < LIMITS.memory_mb + 10


def test_the_peak_is_told_truthfully_of_one_process_and_of_several(isolated, attempt):
    # Where memory is only looked at, all that a program holds has been seen when its CPU time is over.
    spin = "" if "memory group" in isolated.guards else "while True: pass"
    limits = RunLimits(wall_s=60, cpu_s=1, memory_mb=256)
    one = attempt("x = bytearray(80 << 20)\n" + spin, limits, ok=not spin)
    several = attempt(PROGRAMS["several that hold memory"] + spin, limits, ok=not spin)
    files = attempt("open('file', 'wb').write(bytes(24 << 20))\n" + spin, limits, ok=not spin)
    assert 80 <= one.peak_mb < 110
    assert one.cpu_ms > 5
    assert 120 <= several.peak_mb < 160
    assert 24 <= files.peak_mb < 70


def test_memory_shared_since_a_fork_counts_once(attempt):
    source = "kept = bytearray(60 << 20)\nfor _ in range(4): os.fork() or time.sleep(1000)\nwhile True: pass"
    limits = RunLimits(wall_s=30, cpu_s=1, memory_mb=128, processes=16)
    assert attempt(source, limits, ok=False).kind == "cpu"  # no limit before this one


def test_it_cannot_spare_itself_when_memory_runs_out(attempt):
    outcome = attempt(
        "print(open('/proc/self/oom_score_adj').read())\n"
        "for name in ('oom_score_adj', 'oom_adj'):\n"
        "    tried(name, lambda: open(f'/proc/self/{name}', 'w').write('-1000'))\n"
        "    tried(name, lambda: open(f'/proc/{os.getppid()}/{name}', 'w').write('0'))"
    )
    assert int(outcome.stdout) == 1000


def test_two_sandboxes_at_once_hold_each_its_own_memory(best, opening):
    """Their groups are not each other's."""

    found = {}

    def bomb():
        with Sandbox.at("isolated") as other:
            found["bomb"] = other.run(Program(source=opening + EATERS["many processes"], limits=LIMITS))

    thread = threading.Thread(target=bomb)
    thread.start()
    source, good = "x = bytearray(100 << 20)\nfor _ in range(10**7): pass", []
    while thread.is_alive() or not good:
        good.append(best.run(Program(source=source, limits=LIMITS)))
    assert all(one.ok for one in good), [one.describe() for one in good]
    assert found["bomb"].kind == "memory"


def test_no_group_is_left_when_its_launcher_has_ended_or_was_killed():
    def groups():
        return {
            os.path.join(above, name)
            for above, _ in cgroup.places()
            for name in os.listdir(above)
            if name.startswith(cgroup.PREFIX)
        }

    before = processes_below()
    with Sandbox.at("isolated") as box:
        if "memory group" not in box.guards:
            pytest.skip("no memory group can be had here")
        (launcher,) = processes_below() - before
        ended = f"{cgroup.PREFIX}{launcher}"
        assert any(path.endswith(ended) for path in groups())
    assert not any(path.endswith(ended) for path in groups())
    box = Sandbox.at("isolated")
    (launcher,) = processes_below() - before
    killed = f"{cgroup.PREFIX}{launcher}"
    psutil.Process(launcher).kill()
    psutil.Process(launcher).wait(LIMIT_S)
    with Sandbox.at("isolated"):
        assert not any(path.endswith(killed) for path in groups())
    box.close()


def test_what_is_typed_in_is_not_the_programs_memory(isolated):
    limits = RunLimits(wall_s=30, memory_mb=64, files_mb=48)
    source = "import sys\nprint(len(sys.stdin.read()))"
    outcome = isolated.run(Program(source=source, stdin=b"x" * (4 << 20), limits=limits))
    assert (outcome.kind, outcome.stdout) == ("ok", b"%d\n" % (4 << 20)), outcome.describe()
    assert outcome.peak_mb < 64
