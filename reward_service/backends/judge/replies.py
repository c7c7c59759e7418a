"""Replies of a judge that are kept: in memory, and in a file beyond the job. Bounded both ways."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from areal_async.runtime.log import get_logger

log = get_logger("judge")

SWEEP_EVERY = 256
"""Replies written between two looks at the size of the file."""
WAIT_S = 0.5
"""For another process that writes the same file; then the reply is not kept."""


class Replies:
    """The `most` replies used last, by request; those not in memory are looked for in `file`.

    A file that cannot be read or written costs the cache, never a verdict: it is said once, and left alone
    from then on. Several processes may share one file on a local disk."""

    def __init__(self, most: int, file: Path | None = None) -> None:
        self._most = most
        self._memory: OrderedDict[bytes, str] = OrderedDict()
        self._file = _open(file) if file is not None and most else None
        self._written = 0

    def get(self, key: bytes) -> str | None:
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        if self._file is None:
            return None
        try:
            row = self._file.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._leave_file(error)
            return None
        if row is None:
            return None
        self._remember(key, str(row[0]))
        return str(row[0])

    def put(self, key: bytes, reply: str) -> None:
        if not self._most:
            return
        self._remember(key, reply)
        if self._file is None:
            return
        try:
            self._file.execute("INSERT OR REPLACE INTO replies (key, reply) VALUES (?, ?)", (key, reply))
            self._written += 1
            if self._written % SWEEP_EVERY == 0:
                self._file.execute(
                    "DELETE FROM replies WHERE rowid <= (SELECT max(rowid) FROM replies) - ?", (self._most,)
                )
        except sqlite3.Error as error:
            self._leave_file(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remember(self, key: bytes, reply: str) -> None:
        self._memory[key] = reply
        self._memory.move_to_end(key)
        if len(self._memory) > self._most:
            self._memory.popitem(last=False)

    def _leave_file(self, error: sqlite3.Error) -> None:
        log.warning("the judge's cache file is left alone from now on", error=str(error))
        self.close()


def _open(file: Path) -> sqlite3.Connection | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(file, timeout=WAIT_S, isolation_level=None)
        file.chmod(0o600)  # replies may quote the tasks
        connection.execute("PRAGMA journal_mode = WAL")
        # What a power cut takes is asked again.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS replies (rowid INTEGER PRIMARY KEY AUTOINCREMENT,"
            " key BLOB UNIQUE NOT NULL, reply TEXT NOT NULL)"
        )
    except (sqlite3.Error, OSError) as error:
        log.warning("the judge's cache file cannot be used", file=str(file), error=str(error))
        return None
    return connection


def key_of(api: str, body: bytes, vote: int) -> bytes:
    """Of one request: the endpoint, all that is sent, and which vote it is."""
    return blake2b(b"%s\0%d\0%s" % (api.encode(), vote, body), digest_size=20).digest()
