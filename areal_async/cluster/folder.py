"""The folder of a cluster: who may be its controller, where that answers, and who is let in.

    lock           the controller's process holds it as long as it lives
    address        the URL of its API
    tokens         hashes of the tokens that are let in, one a line: `submit HASH` or `look HASH`
    submit.token   the tokens themselves, for this user's commands and for whom they are given to;
    look.token     the controller does not read them
    cluster.yaml   the cluster as it was brought up last
    jobs.sqlite3   jobs and their history
    jobs/          a folder for each job
    controller.log

Everything is closed to other users from the moment that it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from areal_async.base.errors import ArealError
from areal_async.base.log import get_logger
from areal_async.base.own_files import (
    NotOurs,
    check_own,
    close_folder,
    is_locked,
    read_own,
    take_lock,
    write_whole,
)
from areal_async.base.processes import start_of
from areal_async.cluster.states import ACTIVE
from areal_async.cluster.store import JobStore
from areal_async.config.cluster import ClusterConfig, dump_cluster, load_cluster
from areal_async.launch.folders import Owner

Right = Literal["submit", "look"]
"""What a token allows: `look` only reads."""
RIGHTS: tuple[Right, ...] = ("submit", "look")
TOKEN_BYTES = 32
MOST_TOKENS = 1000
SMALL_BYTES = 256 << 10
LINE = re.compile(r"(submit|look)\s+([0-9a-f]{64})(\s.*)?")

log = get_logger("controller")


class ClusterFolderError(ArealError):
    """The folder of a cluster cannot be used."""

    restart_helps = False


@dataclass
class ClusterFolder:
    """The paths in the folder of a cluster, which need not be there yet."""

    path: Path

    def __post_init__(self) -> None:
        self.address = self.path / "address"
        self.tokens = self.path / "tokens"
        self.database = self.path / "jobs.sqlite3"
        self.jobs = self.path / "jobs"
        self.log = self.path / "controller.log"
        self.config = self.path / "cluster.yaml"

    def make(self) -> None:
        """Make the folder, or close it if it is there. Raises `ClusterFolderError`."""
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
        """A descriptor that makes this process the controller as long as it is open; None where another is.
        The address of one that died is removed."""
        path = self.path / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            check_own(fd, path)
        except NotOurs as error:
            os.close(fd)
            raise ClusterFolderError(str(error)) from error
        if not take_lock(fd):
            os.close(fd)
            return None
        self.address.unlink(missing_ok=True)
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(Owner(os.getpid(), start_of(os.getpid()))), 0)
        return fd

    def controller(self) -> Owner | None:
        """The process that is the controller now; None while nobody is."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if not is_locked(fd):
                return None
        finally:
            os.close(fd)
        return Owner.read(self.path / "lock") or Owner(0, "")  # it has not said yet who it is

    def url(self) -> str | None:
        """Where the controller answers; None while there is none. A port that it has left is never taken for
        its own, whoever has it now."""
        if self.controller() is None:
            return None
        with suppress(OSError, NotOurs, UnicodeDecodeError):
            return read_own(self.address, max_bytes=1024).decode().strip() or None
        return None

    def token(self, right: Right = "submit") -> str:
        """A token of this folder. Raises `ClusterFolderError`."""
        path = self.path / f"{right}.token"
        try:
            return read_own(path, max_bytes=1024).decode("ascii").strip()
        except (OSError, NotOurs, UnicodeDecodeError) as error:
            raise ClusterFolderError(f"the token in {path} cannot be read: {error}") from error

    def leaves_jobs(self) -> bool:
        """Whether jobs run, or are about to, of which a controller that died was in charge. Only while there
        is none."""
        if not self.database.exists():
            return False
        store = JobStore(self.database)
        try:
            return bool(store.in_states(ACTIVE, most=1))
        finally:
            store.close()

    def make_tokens(self) -> None:
        """Tokens where there are none: what there is stays as it is."""
        if self.tokens.exists():
            return
        lines = []
        for right in RIGHTS:
            token = secrets.token_hex(TOKEN_BYTES)
            write_whole(self.path / f"{right}.token", f"{token}\n".encode(), durable=True)
            lines.append(f"{right} {hash_of(token)}\n")
        write_whole(self.tokens, "".join(lines).encode(), durable=True)

    def record(self, cluster: ClusterConfig) -> None:
        """Write down how the cluster is brought up, for the next time."""
        write_whole(self.config, dump_cluster(cluster).encode(), durable=True)

    def recorded(self) -> ClusterConfig | None:
        """The cluster as it was brought up last. Raises `ConfigError`."""
        return load_cluster(self.config) if self.config.is_file() else None


def hash_of(token: str) -> str:
    """The SHA-256 of a token, in hexadecimal digits. Tokens are random, so that it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass
class TokenBook:
    """The tokens that are let in, read again when their file has changed. A file that cannot be read lets
    nobody in."""

    path: Path
    _seen: tuple[int, ...] = ()
    _hashes: list[tuple[Right, str]] = field(default_factory=list)

    def right_of(self, token: str) -> Right | None:
        """What `token` allows; None where it is not let in. Takes as long whatever is given."""
        self._read()
        given = hash_of(token)
        found: set[Right] = {right for right, known in self._hashes if hmac.compare_digest(known, given)}
        if not found:
            return None
        return "submit" if "submit" in found else "look"

    @property
    def empty(self) -> bool:
        self._read()
        return not self._hashes

    def _read(self) -> None:
        try:
            now = self.path.stat()
            seen = (now.st_mtime_ns, now.st_ino, now.st_size)
            if seen == self._seen:
                return
            lines = read_own(self.path, max_bytes=SMALL_BYTES).decode().splitlines()
            self._hashes = [*_hashes_in(lines)]
            self._seen = seen
        except (OSError, NotOurs, ValueError) as error:
            log.error("tokens cannot be read, so that nobody is let in", error=str(error))
            self._hashes, self._seen = [], ()


def _hashes_in(lines: list[str]) -> list[tuple[Right, str]]:
    found: list[tuple[Right, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None or len(found) == MOST_TOKENS:
            raise ValueError(f"line {number} is not `submit HASH` or `look HASH`, or there are too many")
        found.append(("submit" if match[1] == "submit" else "look", match[2]))
    return found
