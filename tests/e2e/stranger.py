"""Another user of the machine, a real one, who tries to reach sockets, ports, files and memory of a job."""

import json
import os
import socket
import traceback

from tests.waiting import LIMIT_S

STRANGER = 54321
"""A user id that nobody has."""
CONNECTIONS = 3000
"""Connections to each port."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def as_stranger(work):
    """Return the result (JSON) of `work` in a process of a user who owns nothing here."""
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
    sock.settimeout(LIMIT_S)
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


def is_refusal(said):
    """Metrics may be read on loopback, by any path; nothing else is answered with success."""
    if not said.startswith("http "):
        return False
    answers = dict(answer.rsplit(": ", 1) for answer in said.removeprefix("http ").split(", "))
    tells = ("GET /metrics", "GET /") if answers["GET /metrics"] == "200" else ()
    return all(name in tells or status == "closed" or status[0] in "45" for name, status in answers.items())
