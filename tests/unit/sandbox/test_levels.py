"""What isolated and none are, what they are called, and what happens where a machine cannot isolate."""

import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from prometheus_client import REGISTRY

from areal_async.base.verdicts import Failure, Score
from areal_async.config.advice import advise
from areal_async.config.job import JobConfig
from reward_service import metrics
from reward_service.sandbox import Program, PythonMissing, Sandbox, SandboxError
from reward_service.sandbox import sandbox as sandbox_module
from reward_service.sandbox.isolation import seccomp
from reward_service.sdk import RewardInput
from reward_service.verifiers import run_cases
from reward_service.verifiers.code_rewards import CodeStdioArguments, code_stdio
from tests.waiting import LIMIT_S

HELLO = Program(command=("/bin/sh", "-c", "echo hello"))
GIVEN = RewardInput(response="```\nprint(1)\n```", ground_truth={"inputs": [""], "outputs": ["1"]})
ROOT = Path(__file__).parents[3]


def test_the_level_is_in_the_outcome_and_in_the_verdict(sandbox):
    outcome = sandbox.run(HELLO)
    assert outcome.ok
    assert outcome.stdout == b"hello\n"
    assert outcome.level == sandbox.level
    verdict = code_stdio(GIVEN, sandbox=sandbox.level)
    assert isinstance(verdict, Score)
    assert (verdict.value, verdict.sandbox) == (1, sandbox.level)


WITHOUT_NAMESPACES = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
"""In a user namespace of its own: nothing below it can have another."""


def where_none_can_be_isolated(*command, **options):
    """Run there, for real."""
    wrapped = ["unshare", "--user", "--map-root-user", "sh", "-c", WITHOUT_NAMESPACES, "sh", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    done = subprocess.run(
        wrapped, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment, **options
    )
    if "unshare" in done.stderr or "max_user_namespaces" in done.stderr.splitlines()[:1]:
        pytest.skip("this machine allows no user namespace to refuse others in")
    return done


TO_CHANGE = ("reward serve", "seccomp=unconfined", "user.max_user_namespaces", "`sandbox: none`")


def test_where_programs_cannot_be_isolated_the_sandbox_says_what_to_change():
    assert CodeStdioArguments().sandbox == "isolated"
    done = where_none_can_be_isolated(sys.executable, "-m", "reward_service.sandbox")
    assert done.returncode == 1
    why, fix = done.stderr.strip().split("\n")
    assert why.startswith("this machine cannot isolate programs (")
    assert "bubblewrap: " in why
    assert all(one in fix for one in TO_CHANGE)


JOB = """
import json, sys
from areal_async.base.mistakes import ConfigError
from areal_async.config.job import JobConfig
from areal_async.launch.preflight import check_machine
for reward in json.loads(sys.argv[1]):
    written = {"job": "test", "model": "model", "tasks": {"train": "train.jsonl"}, "reward": reward}
    try:
        check_machine(JobConfig.model_validate(written), ())
        print("accepted")
    except ConfigError as error:
        print(" ".join(str(error).split()))
"""


def test_a_job_with_a_code_reward_is_refused_before_anything_starts():
    code = {"name": "code_tests"}
    rewards = [
        code,
        {"name": "exact_match", "routes": [{"data_source": "x", "name": "code_stdio"}]},
        {"name": "weighted", "args": {"parts": [{"name": "code_stdio"}, {"name": "exact_match"}]}},
        code | {"args": {"sandbox": "none"}},
        {"name": "exact_match"},
    ]
    done = where_none_can_be_isolated(sys.executable, "-c", JOB, json.dumps(rewards))
    plain, route, part, none, other = done.stdout.splitlines()
    for told, field in ((plain, "reward.args"), (route, "reward.routes.0.args"), (part, "parts.0.args")):
        assert f"{field}.sandbox" in told
        assert "cannot isolate programs" in told
        assert all(one in told for one in TO_CHANGE)
    assert (none, other) == ("accepted", "accepted")


def test_a_job_without_protection_is_warned_of():
    written = {"job": "test", "model": "model", "tasks": {"train": "train.jsonl"}}
    written["reward"] = {"name": "code_stdio", "args": {"sandbox": "none"}}
    (warning,) = (one for one in advise(JobConfig.model_validate(written)) if "sandbox" in one.field)
    assert "without any protection" in str(warning)


def test_verdicts_are_counted_by_their_level():
    def counted(level):
        labels = {"reward": "code_stdio", "sandbox": level}
        return REGISTRY.get_sample_value("areal_reward_sandboxed_verdicts_total", labels) or 0

    before = {level: counted(level) for level in ("isolated", "none", "other")}
    for name in ("isolated", "none", "none", "mine", ""):
        metrics.count("code_stdio", Score(1.0, sandbox=name))
    assert {level: counted(level) - before[level] for level in before} == {
        "isolated": 1,
        "none": 2,
        "other": 1,
    }


@pytest.mark.parametrize(
    ("missing", "error"),
    [(Sandbox, SandboxError("not today")), (sandbox_module, PythonMissing("no Python"))],
)
def test_what_cannot_be_run_is_an_error_and_never_a_score(monkeypatch, missing, error):
    def gone(*_, **__):
        raise error

    run_cases.runner.cache_clear()
    monkeypatch.setattr(missing, "at" if missing is Sandbox else "python", gone)
    verdict = code_stdio(GIVEN)
    assert isinstance(verdict, Failure)
    assert verdict.kind == "sandbox"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", "a/../../b", "nul\0"])
def test_files_stay_in_the_folder_of_the_run(best, name):
    with pytest.raises(ValueError, match="is not a path inside"):
        best.run(msgspec.structs.replace(HELLO, files={name: b""}))


def test_files_and_input_go_in(sandbox):
    command = ("/bin/sh", "-c", "cat sub/in; cat")
    program = Program(
        command=command,
        files={"sub/in": b"\x00\xff"},
        stdin=b"typed",
    )
    outcome = sandbox.run(program)
    assert outcome.stdout == b"\x00\xfftyped", outcome.describe()


@pytest.mark.parametrize("victim", ["client", "launcher"])
def test_one_death_is_local_who_dies_takes_the_jail_with_it(victim):
    script = (
        "from reward_service.sandbox import *\n"
        "sandbox = Sandbox.at('isolated')\nprint('ready', flush=True)\n"
        "sandbox.run(Program(command=('/bin/sh', '-c', 'sleep 1000'), limits=RunLimits(wall_s=1000)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    client = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert client.stdout.readline() == b"ready\n"
    (launcher,) = psutil.Process(client.pid).children()
    deadline_s = time.monotonic() + LIMIT_S
    while not (sleeping := named("sleep", psutil.Process(client.pid))):
        assert time.monotonic() < deadline_s
    os.kill(client.pid if victim == "client" else launcher.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(sleeping, timeout=LIMIT_S)
    client.kill()
    client.wait()
    client.stdout.close()
    assert not alive


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


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {"x86_64": (435, 56, 53, 44, 16, 72, 9, 302), "aarch64": (435, 220, 199, 206, 29, 25, 222, 261)}
CALL_NAMES = ("clone3", "clone", "socketpair", "sendto", "ioctl", "fcntl", "mmap", "prlimit64")
X86_ONLY = {"inotify_init", "iopl", "ioperm", "modify_ldt"}
X32_BIT = 0x40000000


def refused_by_number(machine):
    """Number of each call that is refused whatever its arguments; those with none there are left out."""
    library = ctypes.CDLL(seccomp.LIBRARY)
    found = {}
    for name in seccomp.REFUSED:
        number = library.seccomp_syscall_resolve_name_arch(ARCHITECTURES[machine], name.encode())
        found[name] = number if number >= 0 else seccomp.NEWER.get(name, number)
    return {name: number for name, number in found.items() if number >= 0}


def test_the_filter_names_calls_by_their_right_numbers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("needs the kernel's headers: the Debian package linux-libc-dev")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    ours = refused_by_number("x86_64")
    ours |= dict(zip(CALL_NAMES, CALLS["x86_64"], strict=True))
    known = {name: number for name, number in ours.items() if name in numbers}
    assert known == {name: int(numbers[name]) for name in known}
    assert len(known) > 50
    assert set(ours) >= set(seccomp.REFUSED)
    assert set(seccomp.REFUSED) - set(refused_by_number("aarch64")) == X86_ONLY


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("grouped", [True, False])
def test_the_filter_decides_as_it_says(machine, grouped):
    code = seccomp.program(machine=ARCHITECTURES[machine], grouped=grouped)
    clone3, clone, socketpair, sendto, ioctl, fcntl, mmap, prlimit = CALLS[machine]

    def decide(number, *arguments, architecture=ARCHITECTURES[machine]):
        return run_filter(code, number, architecture, arguments)

    refused, allowed = seccomp.ERRNO | 1, seccomp.ALLOW
    for name, number in refused_by_number(machine).items():
        assert decide(number) == refused, name
    assert decide(500) == allowed
    assert decide(clone3) == seccomp.ERRNO | 38
    anonymous, above = seccomp.MAP_ANONYMOUS, 1 << 32
    shared, private = seccomp.MAP_SHARED | anonymous, 2 | anonymous
    for call, arguments, answer in (
        (clone, (17,), allowed),
        *((clone, (flag | 17,), refused) for flag in seccomp.NAMESPACE_FLAGS),
        (socketpair, (seccomp.AF_UNIX,), allowed),
        (socketpair, (30,), refused),
        (sendto, (3, 1 << 40, 1 << 40, 0, 0), allowed),
        (sendto, (3, 0, 0, 0, 1 << 40), refused),
        (sendto, (3, 0, 0, 0, 8), refused),
        (ioctl, (0, seccomp.TIOCSTI), refused),
        (ioctl, (0, seccomp.TIOCLINUX), refused),
        (ioctl, (0, seccomp.TIOCSTI | above), refused),  # the kernel looks at the lower half alone
        (ioctl, (0, 0x5401), allowed),
        (prlimit, (0, 7), allowed),
        (prlimit, (1, 0), refused),
        (prlimit, (1 << 32, 0), refused),
        (fcntl, (3, 1), allowed),
        (fcntl, (3, 1030), allowed),
        *((fcntl, (3, command), refused) for command in seccomp.FCNTL_REFUSED),
        *((fcntl, (3, command | above), refused) for command in seccomp.FCNTL_REFUSED),
        (mmap, (0, 4096, 3, private), allowed),
        (mmap, (0, 4096, 3, private | seccomp.MAP_HUGETLB), refused),
        (mmap, (0, 4096, 3, seccomp.MAP_SHARED, 5), allowed),
        (mmap, (0, 4096, 3, shared), allowed if grouped else refused),
        (mmap, (0, 4096, 3, shared | 2), allowed if grouped else refused),
    ):
        assert decide(call, *arguments) == answer, (call, arguments)
    assert decide(500, architecture=3) == seccomp.KILL
    if machine == "x86_64":
        assert decide(X32_BIT) == seccomp.KILL


LOAD, JUMP, JEQ, JGT, JGE, JSET, AND, RETURN = 0x20, 0x05, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06


def run_filter(code, number, architecture, arguments):
    """What the kernel would answer: the few instructions that the filter uses."""
    words = [word for value in (*arguments, *[0] * 6)[:6] for word in (value & 0xFFFFFFFF, value >> 32)]
    data = struct.pack("=IIQ12I", number, architecture, 0, *words)
    instructions = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at = accumulator = 0
    while True:
        operation, yes, no, value = instructions[at]
        at += 1
        if operation == LOAD:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == AND:
            accumulator &= value
        elif operation == JUMP:
            at += value
        elif operation == RETURN:
            return value
        else:
            true = {
                JEQ: accumulator == value,
                JGT: accumulator > value,
                JGE: accumulator >= value,
                JSET: bool(accumulator & value),
            }[operation]
            at += yes if true else no


def test_an_ordinary_user_isolates_programs_too_and_memory_is_held():
    """Run as `nobody`, with an interpreter that it may run: no user ids to give, and no memory group."""
    python = Path("/usr/bin/python3.11")
    if os.geteuid() != 0 or not python.exists() or sys.version_info[:2] != (3, 11):
        pytest.skip("needs root, to become another user, and a system Python of this version")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    script = (
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {packages!r}]\n"
        "from reward_service.sandbox import *\n"
        "with Sandbox.at('isolated') as sandbox:\n"
        "    count = 'import os\\nn = 0\\ntry:\\n    while n < 40:\\n        n += 1\\n'\\\n"
        "        '        if os.fork() == 0:\\n            import time; time.sleep(5)\\n'\\\n"
        "        'except OSError:\\n    print(n)'\n"
        "    outcome = sandbox.run(Program(source=count, limits=RunLimits(wall_s=8, processes=8)))\n"
        "    print(outcome.level, outcome.kind, outcome.stdout.decode().strip(), sep='|')\n"
        "    print(*sandbox.guards, sep='|')\n"
        "    bomb = 'import os, time\\nfor _ in range(6):\\n    if os.fork() == 0:\\n'\\\n"
        "        '        kept = bytearray(50 << 20)\\n        time.sleep(9)\\ntime.sleep(9)'\n"
        "    outcome = sandbox.run(Program(source=bomb, limits=RunLimits(wall_s=30, memory_mb=160)))\n"
        "    print(outcome.kind)\n"
        "    print(sandbox.run(Program(source=\"open('/proc/self/oom_score_adj', 'w')\")).describe())\n"
    )
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/", env={"HOME": "/tmp"}
    )
    if "Permission denied" in done.stderr:
        pytest.skip("the project's folder is closed to other users")
    if "cannot isolate" in done.stderr:
        pytest.skip("user namespaces are for root alone here")
    assert done.returncode == 0, done.stderr
    ended, guards, bomb, score = done.stdout.splitlines()
    assert ended == "isolated|ok|8"
    assert "memory sum" in guards.split("|")
    assert "uid" not in guards.split("|")
    assert bomb == "memory"
    assert "Read-only file system" in score
