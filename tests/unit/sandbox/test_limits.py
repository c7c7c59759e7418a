"""Limits that end a run: the program's own make it wrong, ours leave it without a score."""

import re

import pytest

from reward_service.sandbox import Program, RunLimits
from reward_service.sandbox.isolation import process_tree
from reward_service.sdk import RewardInput, deadline_in
from reward_service.verifiers.code_rewards import code_stdio, code_tests
from reward_service.verifiers.run_cases import GRACE_S

DEEP = """
import sys
from functools import lru_cache
sys.setrecursionlimit(10**7)
@lru_cache(None)
def f(n):
    return 0 if n == 0 else 1 + f(n - 1)
print(f(int(input())))
"""
ON_A_LARGE_STACK = """
import sys, threading
sys.setrecursionlimit(10**7)
threading.stack_size(1 << 28)
thread = threading.Thread(target=lambda: print(int(input())))
thread.start()
thread.join()
"""
ECHO = "print(int(input()))"
LINES = "for k in range(int(input())): print(k)"
MUTTERING = "import sys\nsys.stderr.write('x' * 999_999)\nprint(int(input()))"
RIGHT = {
    "many cases": (ECHO, range(120), str),
    "a long output": (LINES, [100_000], lambda n: "\n".join(map(str, range(n)))),
    "much on standard error": (MUTTERING, [7], str),
    "deep in C": (DEEP, [40_000], str),
    "a large stack of a thread": (ON_A_LARGE_STACK, [7], str),
}


def asked(program, inputs, outputs, tag="python"):
    truth = {"inputs": [f"{one}\n" for one in inputs], "outputs": outputs}
    return RewardInput(response=f"```{tag}\n{program}\n```", ground_truth=truth)


@pytest.mark.parametrize("name", RIGHT)
def test_no_limit_of_ours_makes_a_right_program_wrong(best, name):
    program, inputs, output = RIGHT[name]
    given = asked(program, inputs, [output(one) for one in inputs])
    verdict = code_stdio(given)
    assert (verdict.value, verdict.components["passed"]) == (1, 1)
    assert 0 < verdict.components["spent_s"] < 8


def test_the_limits_of_function_tests_grow_with_their_number(best):
    tests = [f"assert f({n}) == {n}" for n in range(4_500)]
    assert (
        code_tests(RewardInput(response="```python\ndef f(n): return n\n```", ground_truth=tests)).value == 1
    )
    busy = "end = time.process_time() + 0.2\n    while time.process_time() < end: pass\n    return n"
    busy = f"import time\ndef f(n):\n    {busy}"
    given = RewardInput(response=f"```python\n{busy}\n```", ground_truth=tests[:5])
    assert code_tests(given, cpu_s=0.4).value == 1
    assert code_tests(given, cpu_s=0.4, budget_s=0.5).components["out_of_time"] == 1


FAULTY = {
    "spins": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "waits for a child that sleeps": "import subprocess\nsubprocess.run(['sleep', '1000'])",
    "waits as vfork does": "import os\nos.posix_spawn('/bin/sleep', ['sleep', '1000'], {})\nos.wait()",
    "prints without end": "while True: print('x' * 9999)",
    "complains without end": "import sys\nwhile True: sys.stderr.write('x' * 9999)",
    "prints more than is right": "print('7\\n' * 999_999)",
    "recurs without end": "def f(n): return f(n + 1)\nf(0)",
    "gives way to all others": "import os\nos.nice(19)\nprint(7)",
    "gives way to everything": "import os\nos.sched_setscheduler(0, 5, os.sched_param(0))\nprint(7)",
    "leaves its processor": "import os\nos.sched_setaffinity(0, {0})\nprint(7)",
    "limits its first process": "import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\nprint(7)",
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_program_at_fault_is_wrong_and_never_without_a_score(best, name):
    verdict = code_stdio(asked(FAULTY[name], [7], ["7"]), cpu_s=0.5, wall_s=1.0)
    assert (verdict.value, verdict.components["passed"]) == (0, 0)


def test_the_deadline_of_the_call_gives_no_score_and_says_so(best):
    given = asked("import time\ntime.sleep(1000)", range(30), ["7"] * 30)
    with deadline_in(GRACE_S + 0.4):
        verdict = code_stdio(given, wall_s=500.0, budget_s=600.0)
    assert verdict.kind == "overloaded"
    assert re.search(r"after 0 of 30 cases.*reward\.timeout_s", verdict.message)
    sleeps = "```python\nimport time\ndef f(x): time.sleep(1000)\n```"
    with deadline_in(GRACE_S + 0.4):
        verdict = code_tests(
            RewardInput(response=sleeps, ground_truth=["assert f(1)"]), wall_s=500.0, budget_s=600.0
        )
    assert verdict.kind == "overloaded"
    with deadline_in(GRACE_S):
        assert (
            code_tests(RewardInput(response="```python\nf = 1\n```", ground_truth=["f(1)"])).kind
            == "overloaded"
        )


def test_a_limit_by_the_clock_is_no_limit_of_the_program(sandbox):
    sleeps = Program(source="import time\ntime.sleep(1000)", limits=RunLimits(wall_s=500.0, clock_s=0.5))
    assert sandbox.run(sleeps).kind == "clock"
    for pair in sandbox.run_pair(sleeps, sleeps), sandbox.run_pair(sleeps, Program(source="pass")):
        assert pair[0].kind == "clock"


def test_a_jail_is_laid_out_anew_for_each_input(isolated):
    source = """
import os, subprocess, sys, time
print(sorted(os.listdir('.')), sorted(os.listdir('.tmp')), open('main.py').read().count('LEFT'))
subprocess.Popen(['sleep', '1000'])
os.makedirs('deep/er')
os.symlink('/usr', 'deep/link')
open('.tmp/x', 'w').write('LEFT')
open('main.py', 'w').write('print("LEFT")')
os.chmod('deep', 0)
os.set_blocking(1, False)
print(input(), flush=True)
sys.exit(input() == 'last')
"""
    inputs = [f"{n}\n{'last' if n == 2 else ''}\n".encode() for n in range(5)]
    outcomes = isolated.run_each(Program(source=source, files={"data": b"1"}), inputs)
    assert [one.kind for one in outcomes] == ["ok", "ok", "exit"]
    assert [one.stdout.split() for one in outcomes] == [
        [b"['.tmp',", b"'data',", b"'main.py']", b"[]", b"3", b"%d" % n] for n in range(3)
    ]
    assert all(0 < one.spent_ms <= one.wall_ms + one.cpu_ms for one in outcomes)


def test_the_runs_of_a_jail_share_the_time_of_all(best):
    spins = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    outcomes = best.run_each(Program(source=spins, within_s=0.8, limits=RunLimits(wall_s=600.0)), [b""] * 9)
    assert [one.kind for one in outcomes] in (["ok", "timeout"], ["ok", "ok", "timeout"])


# Looks at the threads of a program, one each second: state, nanoseconds run and waited. Then what counts.
LOOKS = {
    "it runs": ([{1: "R 0 0"}, {1: "R 9 0"}, {1: "R 18 0"}], 0.0),
    "it waits, and the kernel has counted it": (
        [{1: "R 0 0"}, {1: "R 9 600000000"}, {1: "R 18 1600000000"}],
        1.6,
    ),
    "it waits on": ([{1: "R 0 0"}, {1: "R 0 0"}, {1: "R 0 0"}], 2.0),
    "it has waited and runs again": ([{1: "R 0 0"}, {1: "R 0 0"}, {1: "R 9 1100000000"}], 1.1),
    "it sleeps": ([{1: "S 0 0"}, {1: "S 0 0"}, {1: "S 0 9000000000"}], 0.0),
    "another sleeps": ([{1: "R 0 0", 2: "S 0 0"}, {1: "R 0 0", 2: "S 0 0"}], 1.0),
    "two take turns": ([{1: "R 0 0"}, {2: "R 0 0"}, {1: "R 9 800000000"}, {2: "R 9 900000000"}], 1.7),
    "two wait for each other": ([{1: "R 0 0", 2: "R 0 0"}, {1: "R 9 900000000", 2: "R 9 900000000"}], 0.0),
    "each look shows another": ([{1: "R 0 0"}, {2: "R 0 900000000"}, {3: "R 0 900000000"}], 0.0),
    "the kernel does not tell": ([{1: "R"}, {1: "R"}], 0.0),
}


@pytest.mark.parametrize("name", LOOKS)
def test_only_the_wait_of_a_lone_thread_counts(monkeypatch, name):
    looks, waited_s = LOOKS[name]
    meter = process_tree.WaitMeter()
    for now_s, threads in enumerate(looks):

        def read(path, threads=threads):
            state, *figures = threads[int(path.split("/")[4])].split()
            return f"1 (x) {state} 0" if path.endswith("/stat") else " ".join(figures)

        tids = list(map(str, threads))
        monkeypatch.setattr(process_tree, "descendants", lambda root: [7])
        monkeypatch.setattr(process_tree.os, "listdir", lambda path, tids=tids: tids)
        monkeypatch.setattr(process_tree, "read", read)
        meter.look([1], float(now_s))
    assert meter.waited_s == pytest.approx(waited_s)
