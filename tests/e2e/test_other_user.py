"""Another user of the machine, a real one, tries all that a running job has: sockets, ports, files, memory.

What they may have is what a loopback port gives everybody: a connection, which is refused or runs out, and
the metrics. The job goes on meanwhile, and costs afterwards what it did before.
"""

import json
import os
import shutil
import signal
import socket
import tempfile
import traceback
from pathlib import Path

import psutil
import pytest

from tests.processes import listening, processes_of

STRANGER = 54321
"""A user id that nobody has."""
CONNECTIONS = 3000
"""At each port."""
LIMIT_S = 600.0
MOST_GROWTH_BYTES = 200 << 20
"""Of a process that trains or generates meanwhile."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a second user of the machine"),
]


@pytest.fixture
def open_folder():
    """Where everybody may enter, unlike the folders of pytest: what is closed is closed by the job itself."""
    folder = Path(tempfile.mkdtemp(prefix="other-user-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def as_stranger(work):
    """What `work` returns (as JSON) in a process of a user who owns nothing here."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_fd)
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            said = json.dumps(work())
            status = 0
        except BaseException:
            said = json.dumps(traceback.format_exc())
        with os.fdopen(write_fd, "w") as out:
            out.write(said)
        os._exit(status)
    os.close(write_fd)
    with os.fdopen(read_fd) as told:
        said = told.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, json.loads(said)
    return json.loads(said)


def allowed(call, *arguments):
    """Whether this user may do it."""
    try:
        call(*arguments)
    except OSError:
        return False
    return True


def opened(path):
    """How `path` could be opened by this user; empty where it could not."""

    def by(flags):
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))

    ways = {"read": os.O_RDONLY, "write": os.O_WRONLY, "append": os.O_WRONLY | os.O_APPEND}
    return [way for way, flags in ways.items() if allowed(by, flags)]


def connects(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        return allowed(sock.connect, path)


def connected(port):
    """Without a look at a name: the stranger may not read the modules that Python would load for it."""
    sock = socket.socket()
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    return sock


def talk(port):
    """What a port says to somebody who has no secret: `closed`, `zmq refuses`, or the status of HTTP."""
    with connected(port) as sock:
        sock.sendall(GREETING[:10])
        first = sock.recv(1)
        if first != b"\xff":
            return http_status(port)
        greeting = first
        while len(greeting) < 64:
            sock.sendall(GREETING[10:] if len(greeting) <= 12 else b"")
            more = sock.recv(64 - len(greeting))
            if not more:
                return "closed"
            greeting += more
        mechanism = greeting[12:32].rstrip(b"\0")
        try:
            sock.sendall(READY + b"\x01\x04" + b"part")
            answer = sock.recv(4096)
        except ConnectionError:
            answer = b""
        return f"zmq refuses ({mechanism.decode()})" if not answer else f"zmq answered {answer!r}"


def http_status(port):
    said = []
    for request in ("GET /metrics", "GET /", "POST /v1/chat/completions", "POST /update_weights_from_disk"):
        with connected(port) as sock:
            sock.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            line = sock.recv(4096).split(b"\r\n")[0].decode(errors="replace")
            said.append(f"{request}: {line.partition(' ')[2][:3] or 'closed'}")
    return "http " + ", ".join(said)


def crowd(port):
    """Open many connections that say nothing, hold them together, and let them go; how many were accepted."""
    held = []
    for _ in range(CONNECTIONS):
        sock = socket.socket()
        sock.settimeout(1)
        try:
            sock.connect(("127.0.0.1", port))
        except OSError:
            sock.close()
            break
        held.append(sock)
    for sock in held:
        sock.close()
    return len(held)


def sysv_segments():
    with open("/proc/sysvipc/shm") as table:
        return sum(1 for line in table) - 1


def test_another_user_gets_nothing_but_refusals_and_the_job_goes_on(workspace, running, open_folder):
    segments = sysv_segments()
    job_file = workspace.job(
        "other-user",
        evaluated=True,
        run_dir=str(open_folder),
        placement={"pretend": {"rollout-0": "there"}},
        trainer__steps=100_000,
        checkpoint={"every_steps": 50},
    )
    with running("run", job_file) as job:
        job.folder = open_folder / "other-user"
        job.wait_for(lambda: (job.folder / "run.lock").exists() and len(job.steps()) >= 2, "two steps")
        record = job.record
        processes = [psutil.Process(job.process.pid), *processes_of(record["run_id"])]
        before = {process.pid: (process.num_fds(), process.memory_info().rss) for process in processes}
        ports = {at: " ".join(one.cmdline()[-6:]) for at, one in listening(processes).items()}
        folders = [str(job.folder), record["socket_dir"], record["shm_dir"]]
        paths = [str(path) for folder in folders for path in [Path(folder), *Path(folder).rglob("*")]]
        sockets = [path for path in paths if Path(path).is_socket()]
        assert len(sockets) >= 3, "buffer, weights, control"
        assert any("trainer" in name for name in ports.values())
        proc = ("environ", "mem", "maps", "fd", "map_files")
        maps = [f"/proc/{process.pid}/{name}" for process in processes for name in proc]
        pids = list(before)

        def try_everything():
            return {
                "paths": {path: ways for path in [*paths, *maps] if (ways := opened(path))},
                "listed": [
                    path
                    for path in [*folders, *(path for path in maps if path.endswith(("fd", "map_files")))]
                    if allowed(os.listdir, path)
                ],
                "sockets": [path for path in sockets if connects(path)],
                "signals": [pid for pid in pids if allowed(os.kill, pid, 0)],
                "ports": {str(port): talk(port) for port in ports},
                "crowds": {str(port): crowd(port) for port in ports},
            }

        found = as_stranger(try_everything)
        assert found["paths"] == {}
        assert found["listed"] == []
        assert found["sockets"] == []
        assert found["signals"] == []
        for port, said in found["ports"].items():
            refused = said in ("closed", "zmq refuses (CURVE)") or is_refusal(said)
            assert refused, f"{ports[int(port)]} at {port}: {said}"
        assert any("CURVE" in said for said in found["ports"].values())
        assert sysv_segments() == segments
        secret = (Path(record["socket_dir"]) / "secret").read_text().strip()
        assert not [p for p in processes if p.is_running() and secret in " ".join(p.cmdline())]
        # Nobody has gone, and nothing is kept of those who came.
        assert [pid for pid in pids if not psutil.pid_exists(pid)] == []
        # But for a few descriptors of the job's own.
        most = {process: before[process.pid][0] + 32 for process in processes}
        ended = "the end of the connections"
        job.wait_for(lambda: all(p.num_fds() <= most[p] for p in processes), ended, LIMIT_S)
        grown = {p.pid: p.memory_info().rss - before[p.pid][1] for p in processes}
        assert {pid: size for pid, size in grown.items() if size > MOST_GROWTH_BYTES} == {}
        job.wait_for_steps(3)
        assert job.folder.joinpath("run.lock").exists()
        job.process.send_signal(signal.SIGTERM)
        job.read_all()
        steps = [step["step"] for step in job.steps()]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert {step["episodes"] for step in job.steps()} == {32}
        assert not job.events("restart")


def is_refusal(said):
    """Metrics may be read on loopback, by any path; nothing else is answered with success."""
    if not said.startswith("http "):
        return False
    answers = dict(answer.rsplit(": ", 1) for answer in said.removeprefix("http ").split(", "))
    tells = ("GET /metrics", "GET /") if answers["GET /metrics"] == "200" else ()
    return all(name in tells or status == "closed" or status[0] in "45" for name, status in answers.items())
