"""What can go wrong between the buffer and Redis."""

from __future__ import annotations

from typing import Literal

from areal_async.errors import ArealError

Trouble = Literal["gone", "disk", "memory", "replica", "refused"]
"""Why Redis takes no writes: it does not answer, cannot write to its disk, is at its memory limit, is not the
master, or says something else."""


class StoreError(ArealError):
    """Base of the errors of the store."""


class StoreUnavailable(StoreError):
    """Redis does not answer, or refused a write. What was not acknowledged may or may not be written; after
    a rebuild of the index the same message can be asked again."""

    restart_helps = True

    def __init__(self, message: str, trouble: Trouble = "refused") -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class StoreFenced(StoreError):
    """Another front has taken over the job. This one must end."""


class StoreUnusable(StoreError):
    """This Redis cannot hold the ledger as configured, or what it holds is not this job's."""


REFUSALS: tuple[tuple[str, Trouble, str], ...] = (
    ("MISCONF", "disk", "Redis cannot write to its disk; free room there, and writing goes on by itself"),
    ("OOM ", "memory", "Redis is at its maxmemory; raise it, or free memory, and writing goes on by itself"),
    ("READONLY", "replica", "it is a replica now; the buffer looks for the master"),
    ("MASTERDOWN", "replica", "it is a replica now; the buffer looks for the master"),
    ("NOREPLICAS", "replica", "the master has fewer replicas than its min-replicas-to-write"),
    ("NOPERM", "refused", "give the user the rights in docs/redis.md"),
    ("MOVED", "refused", "this node of the cluster does not serve the job's keys: name the one that does"),
    ("CLUSTERDOWN", "gone", "the cluster is not whole; it serves again when it is"),
)


def refusal(answer: str) -> StoreUnavailable:
    """What an error answer of Redis, of a command or out of a script, means for whoever waits, and what to do
    about it."""
    for code, trouble, fix in REFUSALS:
        if code in answer:
            said = answer[answer.index(code) :]  # without what a script's traceback puts in front
            return StoreUnavailable(f"Redis refused: {said} ({fix})", trouble)
    return StoreUnavailable(f"Redis refused: {answer}")
