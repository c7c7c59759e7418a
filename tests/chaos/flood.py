"""A job whose every socket is flooded while it runs: does it end by itself, with exact counts?

    PYTHONPATH=benchmarks python -m tests.chaos.flood [--messages 10000] [--connections 3000]
                                                      [--steps 1800] [--result FILE]

The job has all kinds of sockets: RPC and Redis in its folder, servers of chunks, gateway and metrics on
ports, and a reward server of its own. Each gets so many malformed messages from somebody who knows its
secret, as many from a stranger, and so many connections that are held open together. Then the job is let
run to its end, and the checker of the chaos runs judges it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from hostile_http import Subject, free_port, listens, many_files, send_malformed, until

from areal_async.rpc.secret import CHUNKS, Access, RunSecret
from tests.chaos.history import Verdict
from tests.chaos.job import Job, JobFailed, write_job
from tests.chaos.plan import Disturbance
from tests.chaos.storm import Storm
from tests.jobs import make_workspace
from tests.processes import listening, processes_of
from tests.unit.rpc.noise import flood, shapes
from tests.waiting import LIMIT_S

TOKEN = "token-of-this-server"
CONNECT_LIMIT = struct.pack("ll", 20, 0)
"""Seconds and microseconds; without it, a socket in a folder whose queue is full refuses."""
MOST_GROWTH_MB = 128
"""Of a process, which trains or generates meanwhile, by the whole flood after the first tenth."""
AGENT = """
import asyncio
import json
import os
import sys
import urllib.request


async def agent(session, task):
    def ask():
        messages = [{"role": "user", "content": task.prompt}]
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 16}).encode()
        headers = {"authorization": "Bearer " + session.api_key}
        request = urllib.request.Request(session.openai_base_url + "/chat/completions", body, headers)
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]

    return await asyncio.to_thread(ask)
"""


def job_of_all_kinds(folder: Path, steps: int, reward_url: str, token_file: Path) -> Path:
    """The chaos runs' job with every kind of socket in it."""
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    grader = {"urls": [reward_url], "reward": "share_of_ones", "token_file": str(token_file)}
    changes = {
        "buffer__lease_s": 60.0,
        "rollout__workflow": "agent",
        "rollout__workflow_args": {"agent": "agent.py:agent"},
        "placement": {"pretend": {"rollout-0": "a", "rollout-1": "b"}},
        "reward": {"name": "remote", "timeout_s": 60, "args": grader},
    }
    return write_job(folder, "flooded", steps=steps, seed=7, durability="always", **changes)


@dataclass(frozen=True)
class Rewards:
    process: subprocess.Popen[bytes]
    port: int
    token_file: Path


@contextlib.contextmanager
def reward_server(folder: Path) -> Iterator[Rewards]:
    """A `reward serve` of the job's reward."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    port = free_port()
    command = [sys.executable, "-m", "areal_async.cli.main", "reward", "serve", "reward.py:share_of_ones"]
    command += ["--listen", f"127.0.0.1:{port}"]
    with open(folder / "reward.out", "wb") as output:
        process = subprocess.Popen(
            [*command, "--token-file", str(token_file)], cwd=folder, stdout=output, stderr=output
        )
    try:
        until(lambda: listens(port), "the reward server does not start")
        yield Rewards(process, port, token_file)
    finally:
        process.terminate()
        process.wait(LIMIT_S)


class Face(NamedTuple):
    """A socket that is flooded."""

    name: str
    at: int | str
    """Port, or path."""
    send: Callable[[int], dict[str, int]]
    """Sends so many messages; how many of them by whom."""


@dataclass
class Flood:
    """What is done to the job, and what came of it."""

    job: Job
    rewards: Rewards
    messages: int
    connections: int
    quiet_steps: int
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def plan(self) -> Iterator[Disturbance]:
        """To be gone through once the job serves: the whole flood, and no disturbance. A tenth of it comes
        first, for what is allocated once, and then some steps without any, for what the job itself needs."""
        until(lambda: self.job.steps_logged() >= 2, "two steps")
        record = json.loads((self.job.run_dir / "run.lock").read_text())
        processes = [*processes_of(record["run_id"]), psutil.Process(self.rewards.process.pid)]
        faces = list(self._faces(Path(record["socket_dir"]), processes[:-1]))
        names = {process: named(process) for process in processes}
        sizes = [sizes_of(names)]
        self._round(faces, self.messages // 10, self.connections)
        sizes.append(sizes_of(names))
        steps = self.job.steps_logged() + self.quiet_steps
        until(lambda: self.job.steps_logged() >= steps or not self.job.running, "some steps")
        sizes.append(sizes_of(names))
        self.figures |= self._round(faces, self.messages, self.connections)
        sizes.append(sizes_of(names))
        if ended := names.keys() - sizes[-1].keys():
            raise JobFailed(f"processes have ended: {sorted(names[one] for one in ended)}")
        for what, before, after in zip(("first", "quiet", "growth"), sizes, sizes[1:], strict=False):
            grown = {names[one]: round(after[one] - before[one], 1) for one in after}
            self.figures[f"{what}_mb"] = grown
            print(what, json.dumps(grown), flush=True)
        yield from ()

    def _faces(self, socket_dir: Path, processes: list[psutil.Process]) -> Iterator[Face]:
        secret = RunSecret.read(socket_dir)
        for path in sorted(path for path in socket_dir.rglob("*") if path.is_socket()):
            if path.name == "redis":
                yield Face("redis", str(path), lambda n, at=path: flood_redis(at, secret, n))
            else:
                yield Face(path.name, str(path), self._zmq(f"ipc://{path}", secret.of("cli")))
        for port, process in sorted(listening(processes).items()):
            kind, name = kind_of(port), named(process).rpartition(" ")[0]
            keys = secret.of("rollout").shown(f"tcp://127.0.0.1:{port}", CHUNKS)
            send = self._zmq(f"tcp://127.0.0.1:{port}", keys) if kind == "chunks" else http(kind, port)
            yield Face(f"{kind} of {name}", port, send)
        port = self.rewards.port
        yield Face("reward server, http", port, http("reward", port, TOKEN))

    def _round(self, faces: list[Face], messages: int, connections: int) -> dict[str, dict[str, Any]]:
        done: dict[str, dict[str, Any]] = {}
        for face in faces:
            if not self.job.running:
                raise JobFailed(f"the job ended before {face.name} was flooded: {self.job.told()}")
            begun_s = time.monotonic()
            done[face.name] = {**face.send(messages), **crowd(face.at, connections)}
            done[face.name]["wall_s"] = round(time.monotonic() - begun_s, 1)
            print(face.name, json.dumps(done[face.name]), flush=True)
        return done

    def _zmq(
        self, endpoint: str, access: Access, shape: Callable[[random.Random], list[bytes]] = shapes
    ) -> Callable[[int], dict[str, int]]:
        def send(messages: int) -> dict[str, int]:
            greeted, job = endpoint.startswith("ipc://"), self.job.config.job
            known = flood(endpoint, access, messages, greeted=greeted, job=job, seed=1, shape=shape)
            return {"known": known, "stranger": flood(endpoint, None, messages, seed=2, shape=shape)}

        return send


def http(kind: str, port: int, token: str = "") -> Callable[[int], dict[str, int]]:
    """Malformed requests, with the token if there is one."""
    ended = subprocess.Popen(["true"], text=True)
    ended.wait()
    subject = Subject(kind, ended, port, Path(), token, token)

    def send(messages: int) -> dict[str, int]:
        send_malformed(subject, messages)
        return {"known" if token else "stranger": messages}

    return send


def flood_redis(path: Path, secret: RunSecret, messages: int) -> dict[str, int]:
    """Each over a connection of its own, after a password or without one."""
    rng, password = random.Random(3), secret.token("redis").encode()
    hello = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n" % (len(password), password)
    for first in (hello, b""):
        for _ in range(messages):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, CONNECT_LIMIT)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, CONNECT_LIMIT)
                sock.connect(str(path))
                with contextlib.suppress(ConnectionError):  # it closes at once on what is no protocol
                    sock.sendall(first + resp(rng))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        continue
    return {"known": messages, "stranger": messages}


def crowd(at: int | str, connections: int) -> dict[str, int]:
    """Connections that say nothing, held together: how many were made, and how many of them the server has
    closed by the time the last was."""
    family = socket.AF_INET if isinstance(at, int) else socket.AF_UNIX
    address: Any = ("127.0.0.1", at) if isinstance(at, int) else at
    with many_files(connections + 256), contextlib.ExitStack() as stack:
        held = []
        for _ in range(connections):
            sock = stack.enter_context(socket.socket(family))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, CONNECT_LIMIT)
            if sock.connect_ex(address) == 0:
                held.append(sock)
        return {"connections": len(held), "closed_at_once": sum(map(is_closed, held))}


def sizes_of(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    """Resident memory of those that live, in MiB."""
    return {one: one.memory_info().rss / 2**20 for one in processes if one.is_running()}


def resp(rng: random.Random) -> bytes:
    """What is no command of Redis."""
    forms: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(1, 300)),
        lambda: b"*%d\r\n" % rng.choice([-5, 0, 2**31, 2**63]),
        lambda: b"*2\r\n$%d\r\nx" % rng.choice([-5, 2**31, 2**40]),
        lambda: b"*1\r\n$4\r\nNOPE\r\n",
        lambda: b"GET\r\n" + b"a" * 70_000,
        lambda: b"*3\r\n$3\r\nSET\r\n$1\r\n",
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    return rng.choice(forms)()


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed; what it has said is read."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while sock.recv(4096):
                continue
            return True
        except ConnectionError:
            return True
    return False


def kind_of(port: int) -> str:
    """What listens there: metrics, which are told to everybody, a gateway, which asks for a key, or a server
    of chunks over ZMQ, which greets, and closes at what is no greeting."""
    said = b"\xff"
    with (
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as sock,
        contextlib.suppress(ConnectionError),
    ):
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        said = sock.recv(64)
    if said.startswith(b"\xff"):
        return "chunks"
    return "metrics" if said.startswith(b"HTTP/1.1 200") else "gateway"


def named(process: psutil.Process) -> str:
    """By its name in the job, or by its module, and by its id."""
    words = process.cmdline()
    at = next((words.index(flag) + 1 for flag in ("--name", "-m") if flag in words), 0)
    return f"{Path(words[at]).name} {process.pid}"


def run(
    folder: Path, *, steps: int, messages: int, connections: int, quiet_steps: int, limit_s: float
) -> tuple[Verdict, dict[str, Any]]:
    """The verdict on the job, and the figures of the flood. Raises `JobFailed`."""
    make_workspace(folder)
    with reward_server(folder) as rewards:
        url = f"http://127.0.0.1:{rewards.port}"
        job = Job(job_of_all_kinds(folder, steps, url, rewards.token_file))
        flooding = Flood(job, rewards, messages, connections, quiet_steps)
        storm = Storm(job, limit_s=limit_s)
        storm.run(flooding.plan())
        verdict = storm.judge()
    return verdict, {**flooding.figures, "job": verdict.figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000, help="malformed ones at each socket")
    parser.add_argument("--connections", type=int, default=3000, help="held together at each socket")
    parser.add_argument("--steps", type=int, default=1800, help="of the job, which is to outlast the flood")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flood-") as folder:
        verdict, figures = run(
            Path(folder),
            steps=options.steps,
            messages=options.messages,
            connections=options.connections,
            quiet_steps=100,
            limit_s=3000,
        )
    for violation in verdict.violations:
        print(violation)
    print(json.dumps(figures["job"]))
    if options.result:
        head = {"messages": options.messages, "connections": options.connections, "steps": options.steps}
        options.result.write_text(json.dumps(head | figures, indent=2) + "\n", encoding="utf-8")
    return bool(verdict.violations) or max(figures["growth_mb"].values()) > MOST_GROWTH_MB


if __name__ == "__main__":
    sys.exit(main())
