"""What hostile clients can do to each kind of HTTP server: metrics, gateway, rewards.

    python benchmarks/hostile_http.py [--kinds metrics,gateway] [--connections 3000] [--requests 10000]
                                      [--json FILE]

Each server is a process of its own that may open 1,024 files. Connections that do nothing, or never end what
they began, are held while an honest client asks; malformed requests of some fifty forms come 32 at a time.
Measured: whether the honest client is answered, and how soon; descriptors, threads and memory before and
after; lines and bytes of the log. Exit status 1 when a server does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
KINDS = ("metrics", "gateway", "reward")
OPEN_FILES = 1024
TOKEN = "token-of-this-server"
HONEST_S = 200.0
BUSY = (429, 503)
"""Of those who have the token, some of what is malformed are requests to be carried out."""
START_S = 120.0
MOST_MORE = {"descriptors": 8, "threads": 4, "memory_mb": 128, "log_lines": 60, "log_kb": 400}
"""What a server may have more of after everything than before it."""

METRICS = """
import sys
from areal_async.base.log import setup_logging
from areal_async.base.metrics import start_metrics_server
setup_logging("hostile", "metrics")
print(start_metrics_server(0), flush=True)
sys.stdin.read()
"""
SCORE = {
    "protocol": 1,
    "request_id": "r",
    "reward": "exact_match",
    "timeout_ms": 20_000,
    "deadline_ms": 20_000,
    "inputs": [{"response": "57", "ground_truth": "57"}],
}
ASKED: dict[str, tuple[str, Any]] = {
    "metrics": ("/metrics", None),
    "gateway": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "go"}]}),
    "reward": ("/v1/score", SCORE),
}


@dataclass
class Subject:
    """A server that runs."""

    kind: str
    process: subprocess.Popen[str]
    port: int
    log: Path
    key: str = ""
    other_key: str = ""
    """What hostile clients have: at the gateway an episode of their own, else the token."""
    descriptors: int = 0
    """When it had just started."""
    before: dict[str, float] = field(default_factory=dict)
    slowest_s: float = 0.0

    @property
    def authorized(self) -> str:
        return f"Authorization: Bearer {self.other_key}\r\n" if self.other_key else ""

    def honest(self) -> None:
        """A request as it should be, asked again while the server is busy, as real clients do. Raises when
        its answer is not as it should be."""
        began_s = time.monotonic()
        while (found := self._asked())[0] in BUSY and time.monotonic() - began_s < HONEST_S:
            time.sleep(0.1)
        if found[0] != 200:
            raise RuntimeError(f"{self.kind}: status {found[0]}: {found[1][:200]!r}")
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    def _asked(self) -> tuple[int, bytes]:
        path, body = ASKED[self.kind]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HONEST_S)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            if self.key:
                headers["authorization"] = f"Bearer {self.key}"
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def usage(self) -> dict[str, float]:
        process = psutil.Process(self.process.pid)
        process = next(iter(process.children()), process)  # the gateway is its worker's child
        log = self.log.read_bytes()
        return {
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "memory_mb": round(process.memory_info().rss / 2**20, 1),
            "log_lines": log.count(b"\n"),
            "log_kb": round(len(log) / 1024, 1),
        }


@contextlib.contextmanager
def served(kind: str, folder: Path, open_files: int = OPEN_FILES) -> Iterator[Subject]:
    """A server of its own process, which may open so many files."""
    log = folder / f"{kind}.log"
    port = free_port()
    python = [sys.executable]
    command = {
        "metrics": [*python, "-c", METRICS],
        "gateway": [*python, str(ROOT / "benchmarks" / "hostile_http_gateway.py")],
        "reward": [*python, "-m", "areal_async.cli.main", "reward", "serve", "exact_match"],
    }[kind]
    if kind == "reward":
        token = folder / "token"
        token.write_text(TOKEN)
        command += ["--listen", f"127.0.0.1:{port}", "--token-file", str(token)]
    with open(log, "wb") as written:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if kind in ("metrics", "gateway") else written,
            stderr=written,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files)),
        )
    try:
        subject = Subject(kind, process, port, log)
        if kind == "reward":
            subject.key = subject.other_key = TOKEN
        if process.stdout is not None:
            said = json.loads(process.stdout.readline())
            if kind == "gateway":
                subject.port = int(said["url"].rpartition(":")[2])
                subject.key, subject.other_key = said["keys"]
            else:
                subject.port = said
        until(lambda: listens(subject.port), f"{kind} does not start")
        for _ in range(3):
            subject.honest()
        subject.descriptors = int(subject.usage()["descriptors"])
        yield subject
    finally:
        process.terminate()
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


# --- connections that are held -----------------------------------------------------------------------


def beginning(subject: Subject, length: int) -> bytes:
    """Headers of a request whose body is so long."""
    path = ASKED[subject.kind][0]
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{subject.authorized}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def whole(subject: Subject) -> bytes:
    path, body = ASKED[subject.kind]
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    content = json.dumps(body).encode()
    return beginning(subject, len(content)) + content


def unknown(subject: Subject, request: bytes) -> bytes:
    """The same with a key that nobody was given."""
    return request.replace(subject.other_key.encode() or b"\0", b"guess")


HELD: dict[str, Callable[[Subject], bytes]] = {
    "idle": lambda subject: b"",
    "headers that do not end": lambda subject: b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "bodies that do not end": lambda subject: beginning(subject, 100_000) + b"{",
    "bodies that do not end, unknown key": lambda subject: (
        unknown(subject, beginning(subject, 1 << 24)) + b" " * 65536
    ),
    "answered once, then idle": lambda subject: b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    # Who has the token of a reward server may keep it busy, as anyone whom it serves.
    "answers that are not read": lambda subject: (
        (unknown(subject, whole(subject)) if subject.key == TOKEN else whole(subject)) * 4
    ),
}


def hold(subject: Subject, what: str, n: int) -> None:
    """Keep `n` such connections open while an honest client asks."""
    with many_files(n + 256), contextlib.ExitStack() as stack:
        for _ in range(n):
            try:
                client = stack.enter_context(socket.socket())
            except OSError:  # this process may open no more
                break
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(HONEST_S)
            with contextlib.suppress(OSError):
                client.connect(("127.0.0.1", subject.port))
                client.setblocking(False)
                client.send(HELD[what](subject))
        subject.honest()


# --- malformed requests ------------------------------------------------------------------------------


def malformed(subject: Subject) -> list[bytes]:
    """Requests that are wrong, or strange, in one way each."""
    path, authorized = ASKED[subject.kind][0], subject.authorized
    post = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{authorized}"
    get = f"GET {path} HTTP/1.1\r\nHost: x\r\n{authorized}"
    chunked = post + "Transfer-Encoding: chunked\r\n"
    body = json.dumps(ASKED[subject.kind][1])

    def sent(content: bytes | str) -> bytes:
        raw = content.encode() if isinstance(content, str) else content
        return post.encode() + b"Content-Length: %d\r\n\r\n" % len(raw) + raw

    lines = [
        b"\r\n\r\n\r\n",
        b"\x00" * 200 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 300,
        random.Random(1).randbytes(4000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / \r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"G\xc3\x89T / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"%ff" * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%00/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX\x00: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nAccept: \xff\r\n\r\n".encode(
            "latin-1"
        ),
        get.encode() + b"\r\n" + (get.encode() + b"\r\n") * 50,
        post.encode() + b"Content-Length: -1\r\n\r\n{}",
        post.encode() + b"Content-Length: many\r\n\r\n{}",
        post.encode() + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        post.encode() + b"Content-Length: 2, 2\r\n\r\n{}",
        post.encode() + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n{}",
        post.encode() + b"Content-Length: 999999999999\r\n\r\n" + b" " * 100_000,
        post.encode() + b"Content-Length: 100000\r\n\r\n{",
        post.encode() + b"Content-Length: 100000\r\nExpect: 100-continue\r\n\r\n",
        chunked.encode() + b"Content-Length: 2\r\n\r\n0\r\n\r\n" + get.encode() + b"\r\n",
        chunked.encode().replace(b"chunked", b"gzip, chunked") + b"\r\n0\r\n\r\n",
        chunked.encode().replace(b": chunked", b":\x0bchunked") + b"\r\n0\r\n\r\n",
        chunked.encode() + b"\r\nzz\r\n",
        chunked.encode() + b"\r\n" + b"f" * 40 + b"\r\nx",
        chunked.encode() + b"\r\n" + b"1;" + b"x" * 100_000 + b"\r\n",
        chunked.encode() + b"\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 8,
        sent("["),
        sent("[" * 100_000),
        sent('{"a":' * 3000 + "1" + "}" * 3000),
        sent('{"inputs": ' + "[" * 900 + "]" * 900 + "}"),
        sent(b'{"a": "\xff\xfe"}'),
        sent('{"a": "\\ud800"}'),
        sent('{"a": NaN}'),
        sent('{"a": ' + "9" * 10_000 + "}"),
        sent("null"),
        sent('{"a": 1e999, "a": 2}'),
        sent('"' + "x" * 500_000 + '"'),
        sent(body[:-1]),
        sent(body.replace('"', "'")),
        sent(body.replace(":", ": {},")),
    ]
    return lines


LEFT_EARLY = 0.25
"""Share of clients that leave without waiting for an answer, half of them with a reset."""


def send_malformed(subject: Subject, n: int, *, at_once: int = 32, seed: int = 0) -> None:
    """`n` malformed requests over connections of their own."""
    forms = malformed(subject)

    def one(number: int) -> None:
        chance = random.Random(seed * n + number)
        raw, early = forms[number % len(forms)], chance.random()
        with socket.socket() as client, contextlib.suppress(OSError):
            client.settimeout(2.0)
            client.connect(("127.0.0.1", subject.port))
            client.sendall(raw)
            if early < LEFT_EARLY / 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif early > LEFT_EARLY:
                client.shutdown(socket.SHUT_WR)
                client.recv(65536)

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(one, range(n)))


# --- one server --------------------------------------------------------------------------------------


def attack(subject: Subject, connections: int, requests: int) -> dict[str, Any]:
    """Everything, and what the server has more of afterwards. Raises where it does not answer an honest
    client, or has ended."""
    send_malformed(subject, 2 * len(malformed(subject)))  # what is allocated once
    settle(subject)
    subject.before, began_s = subject.usage(), time.monotonic()
    for what in HELD:
        hold(subject, what, connections)
    for part in range(10):
        send_malformed(subject, requests // 10, seed=part + 1)
        subject.honest()
    settle(subject)
    subject.honest()
    if subject.process.poll() is not None:
        raise RuntimeError(f"{subject.kind} has ended with status {subject.process.returncode}")
    after = subject.usage()
    more = {name: round(after[name] - subject.before[name], 1) for name in after}
    return {
        "before": subject.before,
        "more": more,
        "honest_slowest_s": round(subject.slowest_s, 3),
        "wall_s": round(time.monotonic() - began_s, 1),
        "holds": all(more[name] <= most for name, most in MOST_MORE.items()),
    }


def settle(subject: Subject) -> None:
    """Wait until the connections that were left are closed there too."""
    limit = subject.descriptors + MOST_MORE["descriptors"]
    with contextlib.suppress(TimeoutError):
        until(lambda: subject.usage()["descriptors"] <= limit, "")


@contextlib.contextmanager
def many_files(n: int) -> Iterator[None]:
    """This process may open `n` files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(n, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def until(holds: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.05)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--connections", type=int, default=3000, help="held at a time, of each form")
    parser.add_argument("--requests", type=int, default=10_000, help="malformed ones to each server")
    parser.add_argument("--json", type=Path, help="its entries of other kinds stay")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder, served(kind, Path(folder)) as subject:
            try:
                found[kind] = attack(subject, options.connections, options.requests)
            except Exception as error:
                found[kind] = {"holds": False, "error": f"{type(error).__name__}: {error}"}
                with contextlib.suppress(psutil.Error):
                    found[kind]["usage"] = subject.usage()
        found[kind] |= {"connections": options.connections, "requests": options.requests}
        print(kind, json.dumps(found[kind]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.exit(not all(found[kind]["holds"] for kind in options.kinds.split(",")))


if __name__ == "__main__":
    main()
