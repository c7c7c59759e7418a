"""Hostile programs in every kind of isolation that this machine offers."""

import glob
from pathlib import Path

import psutil
import pytest
from hostile_programs import PROGRAMS, orphans_of_jails

from areal_async.config.rewardcheck import BUDGET_GRACE_S
from reward_service.sandbox import Program, RunLimits
from tests.waiting import wait_for

LIMITS = RunLimits(wall_s=1.5, cpu_s=0.8, memory_mb=160, processes=8, files_mb=8, output_kb=64)
# Slow, and where memory is summed they show nothing more.
ONCE = {"sleep", "stop itself", "clock trick", "signals blocked", "thread bomb", "deep recursion"}


def waited_by_launchers_s():
    """Seconds that the processes which watch jails have waited for a processor: a busy machine's doing."""
    files = [Path(f"/proc/{child.pid}/schedstat") for child in psutil.Process().children()]
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


@pytest.mark.parametrize("name", PROGRAMS)
def test_verdicts_are_final_of_hostile_programs(isolated, name):
    if "memory group" not in isolated.guards and name in ONCE:
        pytest.skip("shown with a memory group")
    one = PROGRAMS[name]
    before_s = waited_by_launchers_s()
    outcome = isolated.run(Program(source=one.source, limits=LIMITS))
    late_ms = outcome.wall_ms - outcome.waited_ms - (waited_by_launchers_s() - before_s) * 1000

    assert outcome.kind in one.kinds, outcome.describe()
    assert b"ESCAPED" not in outcome.stdout + outcome.stderr
    assert b"do-not-tell" not in outcome.stdout + outcome.stderr
    assert len(outcome.stdout) <= LIMITS.output_kb << 10
    assert outcome.level == "isolated"
    assert late_ms < (LIMITS.wall_s + BUDGET_GRACE_S) * 1000, "docs/sandbox.md gives a verdict one second"
    wait_for(lambda: not orphans_of_jails(), "the last processes of the jail to be gone")
    assert not glob.glob("/*/areal-was-here")


def test_a_program_after_a_hostile_one_ends_as_before_it(best):
    program = Program(source="print(sum(map(int, input().split())))", stdin=b"1 2 3", limits=LIMITS)
    before = best.run(program)
    for name in ("os._exit", "memory bomb", "fork bomb", "daemon left behind", "segfault"):
        best.run(Program(source=PROGRAMS[name].source, limits=LIMITS))
        after = best.run(program)
        assert (after.kind, after.stdout) == (before.kind, before.stdout) == ("ok", b"6\n")
