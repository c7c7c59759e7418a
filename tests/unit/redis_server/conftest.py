"""Real Redis servers of a test's own: with TLS, with users, as a replica or a cluster node.

TLS needs Redis 7 as Debian packages it (`redis-tools` holds the server too, under the name of a checker);
where it is missing those tests are skipped and say so. Which server a job starts for itself stays as it is.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis as redis_sync

from areal_async.base.redis_binary import find_redis_server, redis_server_version
from areal_async.base.versions import VersionTag
from areal_async.launch.one_host import short_socket_dir
from areal_async.rpc.messages import Checkpointed, Commit, ExportLedger, Lease, NextBatch
from replay_buffer.coordinator import Coordinator
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.rules import Rules
from tests.unit.buffer.conftest import ask_to_store, front_of, judge
from tests.waiting import wait_for


def redis_7(folder: Path) -> Path | None:
    """A `redis-server` of version 7 or newer: on the PATH, or the checker of Debian's `redis-tools`, which is
    the same program."""
    for name in ("redis-server", "redis-check-rdb"):
        found = shutil.which(name)
        if found is None:
            continue
        link = folder / "redis-server"
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        if int((redis_server_version(link) or "0").split(".")[0]) >= 7:
            return link
    return None


class Server:
    """One redis-server on a port of its own and, for the test itself, on a unix socket."""

    def __init__(self, binary: Path, folder: Path, **options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.binary, self.folder, self.options = binary, folder, options
        self.port = free_port()
        self.socket = folder / "s"
        self.process: subprocess.Popen[bytes] | None = None
        self.served = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def admin(self) -> redis_sync.Redis:
        return redis_sync.Redis(unix_socket_path=str(self.socket), protocol=2)

    def start(self, before: Callable[[], None] | None = None) -> Server:
        """Start the server. If another process took its port before its first start, take another port."""
        self._spawn(before)
        while not self._answers():
            log = (self.folder / "log").read_text()
            assert "Address already in use" in log, log
            assert not self.served, log
            (self.folder / "log").unlink()
            self.port = free_port()
            self._spawn(before)
        self.served = True
        return self

    def _spawn(self, before: Callable[[], None] | None) -> None:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "logfile": str(self.folder / "log"),
            "save": "",
            "appendonly": "yes",
        } | {name.replace("_", "-"): value for name, value in self.options.items()}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(
            [self.binary, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=before,
        )

    def _answers(self) -> bool:
        """Wait until the server answers or has ended, and return whether it answers."""

        def ping() -> bool:
            with suppress(redis_sync.RedisError):
                return bool(self.admin.ping())
            return False

        process = self.process
        assert process is not None
        wait_for(lambda: process.poll() is not None or ping(), f"a redis-server ({self.folder})")
        return process.poll() is None

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    """A port that is free now, as is its cluster bus port (10000 above)."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            with suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    short = short_socket_dir(tmp_path)
    short.mkdir(exist_ok=True)
    yield short
    if short != tmp_path:
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def new_redis(tmp_path: Path) -> Path:
    """The server of Redis 7; the test is skipped where there is none."""
    binary = redis_7(tmp_path)
    if binary is None:
        pytest.skip("needs Redis 7 or newer: the Debian package redis-tools")
    return binary


@pytest.fixture(params=["embedded", "newer"])
def binary(request: pytest.FixtureRequest) -> Path:
    """The server that jobs start for themselves, and Redis 7."""
    if request.param == "newer":
        return request.getfixturevalue("new_redis")  # type: ignore[no-any-return]
    found = find_redis_server()
    assert found is not None
    return found


@pytest.fixture
def servers(folder: Path) -> Iterator[Callable[..., Server]]:
    """`servers(binary, name, …)`: a server that is ended with the test."""
    started: list[Server] = []

    def make(binary: Path, name: str, **options: str) -> Server:
        started.append(Server(binary, folder / name, **options))
        return started[-1]

    yield make
    for server in started:
        server.kill()


class Stored(NamedTuple):
    """The answer to a put of one group."""

    stored: list[int]
    durability: str


class Life:
    """A front and everybody who speaks to it. Raises what the front raises."""

    def __init__(self, front: Coordinator, epoch: int, step: int, durability: str) -> None:
        self.front, self.epoch, self.step, self.durability = front, epoch, step, durability

    async def send(self, command: Any) -> Any:
        return (await self.front.execute(command)).reply

    async def lease(self, capacity: int = 2) -> Any:
        return await self.send(Lease("w", capacity, [VersionTag("policy", self.epoch, self.step)]))

    async def put(self, group: Any, size_bytes: int = 10) -> Stored:
        blobs = [bytes([sample]) * size_bytes for sample in group.missing]
        ack = await ask_to_store(self.front, group, blobs, group.missing, version=self.step, epoch=self.epoch)
        return Stored(ack.groups[0].stored, ack.durability)

    async def train(self) -> Any:
        """One step, from lease to checkpoint; returns its batch."""
        for group in (await self.lease()).groups:
            await self.put(group)
        await judge(self.front)
        return await self.train_what_is_there()

    async def train_what_is_there(self) -> Any:
        """One step with scored groups, to the checkpoint that frees them."""
        batch = await self.send(NextBatch("policy", self.epoch, self.step))
        places = [(group.group_id, episode.sample) for group in batch.groups for episode in group.episodes]
        assert None not in await self.front.blobs(places)
        await self.send(Commit("policy", self.epoch, self.step))
        self.step += 1
        await self.send(ExportLedger("policy", self.epoch, self.step))
        await self.send(Checkpointed("policy", self.epoch, self.step))
        return batch


@pytest.fixture
def a_life(job_name: str) -> Callable[..., Any]:
    """`async with a_life(address) as life`: a front on that Redis, and its trainer opened."""

    @asynccontextmanager
    async def make(
        address: Any, durability: str = "everysec", step: int = 0, revive: Any = None, **rules: Any
    ) -> Any:
        small = {"group_size": 2, "batch_groups": 2, "max_staleness": 1, "durability": durability}
        async with front_of(address, job_name, Rules.alone(**small | rules), revive=revive) as front:
            opened = (await front.execute(OpenedWith("policy", "t", step))).reply
            yield Life(front, opened.epoch, step, durability)

    return make


@pytest.fixture
def job_name() -> str:
    return "job-a"
