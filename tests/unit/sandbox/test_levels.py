"""Which isolation is chosen, what it is called, and what happens where there is none."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from areal_async.wire.verdicts import Failure, Score
from reward_service.jail import landlock, linux, seccomp
from reward_service.sandbox import CompilerMissing, Limits, Outcome, Program, Sandbox, SandboxError, ladder
from reward_service.sandbox.languages import installed, language
from reward_service.sdk import RewardInput
from reward_service.verifiers import run_cases
from reward_service.verifiers.code_stdio import code_stdio

HELLO = Program(command=("/bin/sh", "-c", "echo hello"))
ROOT = Path(__file__).parents[3]


def refusing(monkeypatch, *levels):
    """A machine that does not offer some levels."""
    works = ladder._try
    monkeypatch.setattr(
        ladder, "_try", lambda jailer, rung: "not here" if rung.level in levels else works(jailer, rung)
    )


def test_the_best_level_is_chosen_and_named_in_the_outcome(best):
    outcome = best.run(HELLO)
    assert outcome.ok
    assert outcome.stdout == b"hello\n"
    assert outcome.level == best.level
    assert outcome.guards == best.guards


def test_without_namespaces_the_next_rung_is_taken(monkeypatch):
    refusing(monkeypatch, "seccomp", "bubblewrap", "namespaces")
    with Sandbox.best() as sandbox:
        assert sandbox.level == "rlimits"
        assert sandbox.run(HELLO).level == "rlimits"


def test_less_than_the_least_level_is_refused_with_what_to_do(monkeypatch):
    refusing(monkeypatch, "seccomp", "bubblewrap", "namespaces")
    with pytest.raises(SandboxError, match=r"'namespaces' is the least asked for.*not here.*user namespaces"):
        Sandbox.best(least="namespaces")


def test_no_sandbox_is_an_error_and_never_a_score(monkeypatch):
    refusing(monkeypatch, "seccomp", "bubblewrap", "namespaces", "rlimits")
    monkeypatch.setattr(run_cases, "_runners", {})
    given = RewardInput(response="```\nprint(1)\n```", ground_truth={"inputs": [""], "outputs": ["1"]})
    verdict = code_stdio(given, least="namespaces")
    assert isinstance(verdict, Failure)
    assert verdict.kind == "sandbox"


def test_the_level_is_in_the_verdict(best):
    given = RewardInput(response="```\nprint(1)\n```", ground_truth={"inputs": [""], "outputs": ["1"]})
    verdict = code_stdio(given)
    assert isinstance(verdict, Score)
    assert verdict.value == 1
    assert verdict.sandbox == best.level


def test_a_missing_compiler_is_an_error_and_never_a_score(monkeypatch):
    def gone(name, **_):
        raise CompilerMissing(f"{name} is not installed")

    monkeypatch.setattr("reward_service.sandbox.box.language", gone)
    given = RewardInput(response="```\nx\n```", ground_truth={"inputs": [""], "outputs": ["1"]})
    verdict = code_stdio(given, language="rust")
    assert isinstance(verdict, Failure)
    assert verdict.kind == "compile"


def test_an_unknown_language_names_those_that_are_known():
    with pytest.raises(CompilerMissing, match="python, c, cpp"):
        language("cobol")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", "a/../../b", "nul\0"])
def test_files_stay_in_the_folder_of_the_run(best, name):
    with pytest.raises(ValueError, match="is not a path inside"):
        best.run(msgspec.structs.replace(HELLO, files={name: b""}))


def test_files_go_in_and_come_back(sandbox):
    command = ("/bin/sh", "-c", "cat sub/in >out; mkdir folder; ln -s /etc/passwd link; cat")
    program = Program(
        command=command,
        files={"sub/in": b"\x00\xff"},
        stdin=b"typed",
        collect=("out", "link", "folder", "missing"),
    )
    outcome = sandbox.run(program)
    assert outcome.stdout == b"typed", outcome.describe()
    assert outcome.artifacts == {"out": b"\x00\xff"}


def test_every_installed_language_runs_and_says_what_does_not_compile(best):
    hello = {
        "python": "print(7)",
        "c": '#include <stdio.h>\nint main(void) { puts("7"); return 0; }',
        "cpp": "#include <iostream>\nint main() { std::cout << 7 << std::endl; }",
        "javascript": "console.log(7)",
    }
    for name in [one for one in installed() if one in hello]:
        outcome = best.run(Program(source=hello[name], language=name))
        assert (outcome.kind, outcome.stdout) == ("ok", b"7\n"), (name, outcome.describe())
    if "c" in installed():
        broken = best.run(Program(source="int main(", language="c"))
        assert broken.kind == "compile"
        assert b"error" in broken.stderr


@pytest.mark.skipif("cpp" not in installed(), reason="needs a C++ compiler: the Debian package g++")
def test_a_compiler_that_ran_out_of_time_is_tried_again():
    source = "#include <iostream>\nint main() { std::cout << 40 + 2 << std::endl; }"
    given = RewardInput(response=f"```cpp\n{source}\n```", ground_truth={"inputs": [""], "outputs": ["42"]})
    cut = code_stdio(given, language="cpp", budget_s=0.1)
    assert isinstance(cut, Score)
    assert (cut.value, cut.components["out_of_time"]) == (0.0, 1.0)
    again = code_stdio(given, language="cpp", budget_s=60.0)
    assert isinstance(again, Score)
    assert (again.value, again.components["out_of_time"]) == (1.0, 0.0)


def test_cpu_and_memory_are_reported(best):
    source = "x = bytearray(64 << 20)\nimport time\nfor i in range(10**6): pass\ntime.sleep(0.1)"
    outcome = best.run(Program(source=source, limits=Limits(memory_mb=256)))
    assert outcome.ok
    assert outcome.cpu_ms > 5
    assert 60 < outcome.peak_mb < 200


def test_a_jailer_that_dies_is_started_again(best):
    assert best.run(HELLO).ok
    process = best._jailer._process
    process.kill()
    process.wait()
    assert best.run(HELLO).ok


@pytest.mark.parametrize("victim", ["client", "jailer"])
def test_one_death_is_local_who_dies_takes_the_jail_with_it(victim):
    script = (
        "from reward_service.sandbox import *\n"
        "sandbox = Sandbox.best()\nprint(sandbox._jailer._process.pid, flush=True)\n"
        "sandbox.run(Program(command=('/bin/sh', '-c', 'sleep 1000'), limits=Limits(wall_s=1000)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    client = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    jailer = int(client.stdout.readline())
    deadline_s = time.monotonic() + 20
    while not (sleeping := named("sleep", psutil.Process(client.pid))):
        assert time.monotonic() < deadline_s
    os.kill(client.pid if victim == "client" else jailer, signal.SIGKILL)
    _, alive = psutil.wait_procs(sleeping, timeout=20)
    client.kill()
    client.wait()
    client.stdout.close()
    assert not alive


def test_the_filter_is_in_place_where_it_is_named(sandbox):
    source = "import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    print('refused')"
    outcome = sandbox.run(Program(source=source))
    assert (outcome.stdout == b"refused\n") == ("seccomp" in sandbox.guards)


def named(name, root):
    """Processes of that name below `root`."""
    found = []
    for process in root.children(recursive=True):
        try:
            if process.name() == name:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_the_filter_names_calls_by_their_right_numbers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("needs the kernel's headers: the Debian package linux-libc-dev")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    ours = {name: column[0] for name, column in seccomp.REFUSED.items() if column[0] is not None}
    ours |= {
        "clone": seccomp.CLONE[0],
        "clone3": seccomp.CLONE3[0],
        "socket": seccomp.SOCKET[0],
        "ioctl": seccomp.IOCTL[0],
    }
    known = {name: number for name, number in ours.items() if name in numbers}
    assert known == {name: int(numbers[name]) for name in known}
    assert len(known) > 50


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_as_it_says(machine):
    code = seccomp.program(machine)
    column, audit = seccomp.ARCHITECTURES[machine]

    def decide(number, *arguments, architecture=audit):
        return run_filter(code, number, architecture, arguments)

    refused = seccomp.refuse(1)
    for name, numbers in seccomp.REFUSED.items():
        if numbers[column] is not None:
            assert decide(numbers[column]) == refused, name
    assert decide(0) == seccomp.ALLOW
    assert decide(seccomp.CLONE3[column]) == seccomp.refuse(38)
    assert decide(seccomp.CLONE[column], 17) == seccomp.ALLOW
    assert decide(seccomp.CLONE[column], linux.CLONE_NEWUSER | 17) == refused
    assert decide(seccomp.SOCKET[column], seccomp.AF_UNIX) == seccomp.ALLOW
    assert decide(seccomp.SOCKET[column], 2) == refused
    assert decide(seccomp.IOCTL[column], 0, seccomp.TIOCSTI) == refused
    assert decide(seccomp.IOCTL[column], 0, 0x5401) == seccomp.ALLOW
    assert decide(0, architecture=3) == seccomp.KILL
    if machine == "x86_64":
        assert decide(seccomp.X32_BIT) == seccomp.KILL
    assert seccomp.program("mips") is None


def run_filter(code, number, architecture, arguments):
    """What the kernel would answer: the few instructions that the filter uses."""
    import struct

    words = [0, *[word for value in (*arguments, *[0] * 6)[:6] for word in (value & 0xFFFFFFFF, value >> 32)]]
    data = struct.pack("=IIQ12I", number, architecture, 0, *words[1:13])
    instructions = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at = accumulator = 0
    while True:
        operation, yes, no, value = instructions[at]
        at += 1
        if operation == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == seccomp.RETURN:
            return value
        else:
            true = {
                seccomp.JEQ: accumulator == value,
                seccomp.JGE: accumulator >= value,
                seccomp.JSET: bool(accumulator & value),
            }[operation]
            at += yes if true else no


def test_as_an_ordinary_user_the_same_levels_work():
    """Run as `nobody`, with an interpreter that it may run."""
    python = Path("/usr/bin/python3.11")
    if os.geteuid() != 0 or not python.exists() or sys.version_info[:2] != (3, 11):
        pytest.skip("needs root, to become another user, and a system Python of this version")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    script = (
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {packages!r}]\n"
        "from reward_service.sandbox import *\n"
        "for level in ('rlimits', None):\n"
        "    with (Sandbox.at(level) if level else Sandbox.best()) as sandbox:\n"
        "        count = 'import os\\nn = 0\\ntry:\\n    while n < 40:\\n        n += 1\\n'\\\n"
        "            '        if os.fork() == 0:\\n            import time; time.sleep(5)\\n'\\\n"
        "            'except OSError:\\n    print(n)'\n"
        "        outcome = sandbox.run(Program(source=count, limits=Limits(wall_s=8, processes=8)))\n"
        "        print(sandbox.level, outcome.kind, outcome.stdout.decode().strip())\n"
    )
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd="/", env={"HOME": "/tmp"}
    )
    if "Permission denied" in done.stderr:
        pytest.skip("the project's folder is closed to other users")
    assert done.returncode == 0, done.stderr
    low, best = (line.split() for line in done.stdout.splitlines())
    assert low[0] == "rlimits"
    assert low[1] in ("ok", "processes")
    assert best[1:] == ["ok", "8"] or best[0] == "rlimits"


def test_landlock_is_used_where_the_kernel_has_it():
    with Sandbox.at("rlimits") as sandbox:
        assert ("landlock" in sandbox.guards) == (landlock.version() > 0)
        outcome: Outcome = sandbox.run(Program(command=("/bin/sh", "-c", "cat /etc/shells; ls /")))
        assert not landlock.version() or outcome.stdout == b""
