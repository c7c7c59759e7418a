"""The jobs of the controller, their states and their history, in one SQLite database.

Promises: after a call has returned, its changes survive the death of the process and of the machine. A call
writes all of its changes or none."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from areal_async.base.errors import ArealError
from areal_async.cluster.resources import Resources
from areal_async.cluster.states import ACTIVE, ENDED, STATES, JobRefused, Move, Standing, State, Wish

SCHEMA = 2
MOST_HISTORY = 200  # Newest history entries that are kept for one job
MOST_JOBS = 100_000
MOST_WAITING = 2000
BUSY_S = 10.0

TABLES = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, key TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    job TEXT NOT NULL);
CREATE INDEX jobs_by_name ON jobs (name, id);
CREATE INDEX jobs_by_state ON jobs (state, id);
"""


class JobStoreError(ArealError):
    """The database of the controller cannot be used."""

    restart_helps = False


class ShownJob(msgspec.Struct, frozen=True, kw_only=True):
    """The public fields of a job. Times are unix times in seconds."""

    id: int
    name: str
    state: State = "PENDING"
    priority: int
    submitted_s: float
    changed_s: float = 0.0
    """Time of the last state change, automatic or requested."""
    reason: str = "submitted"
    """Reason of the last state change. For a failed run, this is the error of the run."""
    attempt: int = 0
    """Number of starts."""
    needs: Resources
    gpus: list[int] = []
    """Numbers of the GPUs that the job holds."""


class HistoryEntry(msgspec.Struct, frozen=True):
    """One move of a job: its new state, the unix time in seconds, and the reason."""

    state: State
    wish: Wish
    time_s: float
    reason: str


class StoredJob(ShownJob, frozen=True, kw_only=True):
    """A job as the controller stores it."""

    key: str  # Key of the submission
    content: dict[str, Any]
    overrides: list[str] = []  # Overrides for the next attempt
    wish: Wish = "run"
    history: list[HistoryEntry] = []  # Newest moves, oldest first

    @property
    def standing(self) -> Standing:
        return Standing(self.state, self.wish, self.attempt)


J = TypeVar("J", bound=ShownJob)


class JobStore:
    """The database at `path`. A missing database is created. Raises `JobStoreError`."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in TABLES.split(";\n"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {SCHEMA}")
        except sqlite3.DatabaseError as error:
            raise JobStoreError(f"{path} is no database of a controller that can be read: {error}") from error
        if version not in (0, SCHEMA):
            self._db.close()
            raise JobStoreError(
                f"{path} was written by another release (schema {version}, this one has {SCHEMA}). Use that "
                "release, or another cluster folder."
            )
        self._last_id = max(self.ids(), default=0)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # --- reading -----------------------------------------------------------------------------------

    def find(self, name: str) -> StoredJob | None:
        """Return the newest job called `name`, or else the job with this id."""
        found = self._jobs("name = ? ORDER BY id DESC LIMIT 1", name)
        if not found and name.isascii() and name.isdecimal() and len(name) < 19:
            found = self._jobs("id = ?", int(name))
        return found[0] if found else None

    def get(self, id: int) -> StoredJob:
        """Return the job with this id, which must exist."""
        (job,) = self._jobs("id = ?", id)
        return job

    def in_states(self, states: Sequence[State], most: int = MOST_JOBS) -> list[StoredJob]:
        """Return the newest `most` jobs in these states, ordered by id."""
        marks = ", ".join("?" * len(states))
        found = self._jobs(f"state IN ({marks}) ORDER BY id DESC LIMIT ?", *states, most)
        return found[::-1]

    def waiting(self) -> list[ShownJob]:
        """Return the PENDING jobs without their contents, because there are many and they are read often."""
        return self._rows(ShownJob, "state = 'PENDING'")

    def of_submission(self, key: str) -> StoredJob | None:
        return next(iter(self._jobs("key = ?", key)), None)

    def counts(self) -> dict[State, int]:
        """Return the number of jobs in each state."""
        found = dict(self._db.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in STATES}

    def ids(self) -> set[int]:
        return {id for (id,) in self._db.execute("SELECT id FROM jobs")}

    def _jobs(self, where: str, *values: object) -> list[StoredJob]:
        return self._rows(StoredJob, where, *values)

    def _rows(self, kind: type[J], where: str, *values: object) -> list[J]:
        rows = self._db.execute(f"SELECT job FROM jobs WHERE {where}", values)
        return [msgspec.json.decode(stored, type=kind) for (stored,) in rows]

    # --- writing -----------------------------------------------------------------------------------

    def new_id(self) -> int:
        """Return an id that no job has and that was not returned before."""
        self._last_id += 1
        return self._last_id

    def pass_over(self, id: int) -> None:
        """Make `new_id` return only ids above `id` from now on."""
        self._last_id = max(self._last_id, id)

    def add(self, job: StoredJob) -> None:
        """Add a new job. Raises the errors of `check_room`."""
        with self._transaction():
            self.check_room(job)
            self._write(_noted(job))

    def check_room(self, job: StoredJob) -> None:
        """Raise `JobRefused` if there are too many jobs, or if an active or waiting job has the same name."""
        counts = self.counts()
        if counts["PENDING"] >= MOST_WAITING or sum(counts.values()) >= MOST_JOBS:
            raise JobRefused(
                f"the controller keeps at most {MOST_WAITING} waiting jobs and {MOST_JOBS} in all: it has "
                f"{counts['PENDING']} and {sum(counts.values())} already"
            )
        other = self.find(job.name)
        if other is not None and other.name == job.name and other.state not in ENDED:
            raise JobRefused(
                f"job {job.name} is {other.state} already (id {other.id}). Give this one another name "
                "(job=NAME), or stop that one"
            )

    def move(self, job: StoredJob, move: Move, *, gpus: Sequence[int] = (), **changes: Any) -> StoredJob:
        """Store a move and other columns of `job`.

        If the job is active after the move, it holds `gpus`, or the GPUs that it held before if `gpus` is
        empty. Raises `JobRefused` if the stored job has changed since `job` was read."""
        standing = move.standing
        changes |= {"state": standing.state, "wish": standing.wish, "attempt": standing.attempt}
        changes |= {"changed_s": move.at_s, "reason": move.reason}
        held = list(gpus or job.gpus) if standing.state in ACTIVE else []
        after = _noted(structs.replace(job, gpus=held, **changes))
        with self._transaction():
            if self.get(job.id).standing != job.standing:
                raise JobRefused(f"job {job.name} has changed meanwhile: look at it, and ask again")
            self._write(after)
        return after

    def set_needs(self, id: int, needs: Resources) -> None:
        """Store the present needs of a job."""
        with self._transaction():
            self._write(structs.replace(self.get(id), needs=needs))

    def _write(self, job: StoredJob) -> None:
        """Add or replace a job."""
        self._db.execute(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET state = excluded.state, job = excluded.job",
            (job.id, job.name, job.key, job.state, msgspec.json.encode(job).decode()),
        )


def _noted(job: StoredJob) -> StoredJob:
    """Return the job with its last change appended to its history."""
    entry = HistoryEntry(job.state, job.wish, job.changed_s, job.reason)
    return structs.replace(job, history=[*job.history, entry][-MOST_HISTORY:])
