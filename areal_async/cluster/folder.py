"""The folder of a cluster: its lock, the controller's address, and the tokens.

    lock           held by the controller's process as long as it lives
    address        the URL of its API
    tokens         hashes of the accepted tokens, one per line: `submit HASH` or `look HASH`
    submit.token   the tokens themselves, for commands; the controller does not read them
    look.token
    cluster.yaml   the cluster file of the last start
    jobs.sqlite3   jobs and their history
    jobs/          a folder for each job
    controller.log

All files are closed to other users from the start."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import msgspec

from areal_async.base.errors import ArealError
from areal_async.base.log import get_logger
from areal_async.base.own_files import NotOurs, close_folder, is_locked, lock_file, read_own, write_whole
from areal_async.base.processes import start_of
from areal_async.cluster.states import ACTIVE
from areal_async.cluster.store import JobStore
from areal_async.config.cluster import ClusterConfig, dump_cluster, load_cluster
from areal_async.launch.folders import Owner

Right = Literal["submit", "look"]
"""Right of a token. A `look` token can only read."""
RIGHTS: tuple[Right, ...] = ("submit", "look")
TOKEN_BYTES = 32
MOST_TOKENS = 1000
SMALL_BYTES = 256 << 10
LINE = re.compile(r"(submit|look)\s+([0-9a-f]{64})(\s.*)?")

log = get_logger("controller")


class ClusterFolderError(ArealError):
    """The folder of a cluster cannot be used."""

    restart_helps = False


class ClusterFolder:
    """The paths in the folder of a cluster. The folder need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = self.path / "address"
        self.tokens = self.path / "tokens"
        self.database = self.path / "jobs.sqlite3"
        self.jobs = self.path / "jobs"
        self.log = self.path / "controller.log"
        self.config = self.path / "cluster.yaml"

    def make(self) -> None:
        """Make the folder. If it exists, close it to other users. Raises `ClusterFolderError`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            close_folder(self.path)
        except (OSError, NotOurs) as error:
            raise ClusterFolderError(f"{self.path} cannot be the folder of a cluster: {error}") from error
        known = {"cluster.yaml", "lock", "jobs.sqlite3", "controller.log", "tokens"}
        inside = {entry.name for entry in self.path.iterdir()}
        if inside and not inside & known:
            raise ClusterFolderError(
                f"{self.path} is not empty and is no folder of a cluster; nothing in it is touched. Name "
                "another in `dir` of the cluster file, or in AREAL_ASYNC_CLUSTER_DIR."
            )

    def lock(self) -> int | None:
        """Take the lock of the cluster and return its descriptor. This process is the controller until it
        closes the descriptor.

        Returns None if another process is the controller. The address of a dead controller is removed."""
        try:
            fd = lock_file(self.path / "lock")
        except NotOurs as error:
            raise ClusterFolderError(str(error)) from error
        if fd is None:
            return None
        self.address.unlink(missing_ok=True)
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(Owner(os.getpid(), start_of(os.getpid()))), 0)
        return fd

    def controller(self) -> Owner | None:
        """Return the process that is the controller now; None if no controller runs."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError), os.fdopen(os.open(self.path / "lock", flags), "rb") as lock:
            if is_locked(lock.fileno()):
                return Owner.read(self.path / "lock") or Owner(0, "")  # it has not recorded its pid yet
        return None

    def url(self) -> str | None:
        """Return the URL of the controller; None if no controller runs. The address of a dead controller is
        never returned."""
        if self.controller() is None:
            return None
        with suppress(OSError, NotOurs, UnicodeDecodeError):
            return read_own(self.address, max_bytes=1024).decode().strip() or None
        return None

    def token(self, right: Right = "submit") -> str:
        """Return a token of this folder. Raises `ClusterFolderError`."""
        path = self.path / f"{right}.token"
        try:
            return read_own(path, max_bytes=1024).decode("ascii").strip()
        except (OSError, NotOurs, UnicodeDecodeError) as error:
            raise ClusterFolderError(f"the token in {path} cannot be read: {error}") from error

    def leaves_jobs(self) -> bool:
        """Return whether a dead controller left active jobs. Call it only if no controller runs."""
        if not self.database.exists():
            return False
        with closing(JobStore(self.database)) as store:
            return bool(store.in_states(ACTIVE, most=1))

    def make_tokens(self) -> None:
        """Make tokens if none exist."""
        if self.tokens.exists():
            return
        lines = []
        for right in RIGHTS:
            token = secrets.token_hex(TOKEN_BYTES)
            write_whole(self.path / f"{right}.token", f"{token}\n".encode(), durable=True)
            lines.append(f"{right} {hash_of(token)}\n")
        write_whole(self.tokens, "".join(lines).encode(), durable=True)

    def right_of(self, token: str) -> Right | None:
        """Return the right of `token`; None if it is not accepted. The check takes the same time for every
        token, so its duration reveals nothing."""
        given = hash_of(token)
        found = {right for right, known in self.hashes() if hmac.compare_digest(known, given)}
        return next((right for right in RIGHTS if right in found), None)

    def hashes(self) -> list[tuple[Right, str]]:
        """Return rights and hashes of the accepted tokens; none if their file cannot be read."""
        try:
            return [*_hashes_in(read_own(self.tokens, max_bytes=SMALL_BYTES).decode().splitlines())]
        except (OSError, NotOurs, ValueError) as error:
            log.error("tokens cannot be read, so that nobody is let in", error=str(error))
            return []

    def record(self, cluster: ClusterConfig) -> None:
        """Record the cluster for the next start."""
        write_whole(self.config, dump_cluster(cluster).encode(), durable=True)

    def recorded(self) -> ClusterConfig | None:
        """Return the cluster of the last start. Raises `ConfigError`."""
        return load_cluster(self.config) if self.config.is_file() else None


def hash_of(token: str) -> str:
    """Return the SHA-256 of a token, in hexadecimal digits. Tokens are random, so they need no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def _hashes_in(lines: list[str]) -> Iterator[tuple[Right, str]]:
    written = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for number, line in enumerate(written, start=1):
        if (match := LINE.fullmatch(line)) is None or number > MOST_TOKENS:
            raise ValueError(f"token {number} is not `submit HASH` or `look HASH`, or there are too many")
        yield ("submit" if match[1] == "submit" else "look"), match[2]
