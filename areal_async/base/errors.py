"""One exception hierarchy.

    ArealError
    ├── WireError                errors between two processes
    │   ├── EndpointError        an address cannot be served: busy, too long, not loopback and no keys
    │   ├── ProtocolError        bytes that are not a valid message
    │   │   └── MessageTooLarge  a message beyond the limits, found before it is sent
    │   ├── RpcTimeout           no answer within the caller's deadline
    │   ├── PeerGone             the connection was closed during the call
    │   └── FaultError           the service answered, with a `Fault`
    ├── InfrastructureFault      an agent, environment or workflow failed, but no answer was at fault
    ├── SnapshotError            a snapshot that is torn, mixed, corrupt or missing
    └── MachineError             the disk, or a limit of this machine, not a bug or a mistake in the job

Packages derive their own errors from `ArealError`. The text of every error is one paragraph that a person can
act on. A service prints it before it exits with status 1.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from typing import Any, Literal

FaultKind = Literal[
    "schema",  # the peer speaks another schema, or another job
    "invalid",  # the request itself is wrong; do not retry
    "forbidden",  # the role of the asker's key may not make this request
    "fenced",  # a newer front, lease or trainer epoch has replaced the caller
    "busy",  # back-pressure: retry later
    "unavailable",  # the service cannot reach what it needs (Redis); retry later
    "stale",  # the hard staleness bound would be broken; fatal
    "failed",  # the job file has the job end here, and the message says why; fatal
    "internal",
]


class ArealError(Exception):
    """Base of every error this project raises on purpose."""

    restart_helps: bool | None = None
    """Whether a service that ends with this error may do better when started again. None: if it has served
    before, for then its configuration was right."""

    exit_status = 1
    """Status with which a command ends that raises it (docs/cli.md)."""


class InfrastructureFault(ArealError):
    """An episode cannot go on, and its answers are not to blame: a service that an agent needs is away.
    Raised by an agent, environment or workflow, it leaves the episode without a score, to be tried again."""


class WireError(ArealError):
    """Base of everything that can go wrong between two processes."""

    restart_helps: bool | None = True


class EndpointError(WireError):
    """An address cannot be served or reached as configured."""

    restart_helps = None


class ProtocolError(WireError):
    """Bytes arrived that are not a message of ours."""


class MessageTooLarge(ProtocolError):
    """A message exceeds the limits of the wire; raised by the sender, before anything is sent."""


class RpcTimeout(WireError):
    """No answer within the deadline. `last_fault` is the last `busy` or `unavailable` on the way, if any."""

    def __init__(self, message: str, last_fault: FaultError | None = None) -> None:
        super().__init__(message)
        self.last_fault = last_fault


class PeerGone(WireError):
    """The client was closed while the call was under way, or never connected."""


class FaultError(WireError):
    """A service's typed refusal. Handlers raise it to answer a `Fault`; clients raise it on receiving one."""

    def __init__(self, kind: FaultKind, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: FaultKind = kind
        self.message = message
        if kind in ("schema", "invalid", "forbidden", "stale"):
            self.restart_helps = None
        elif kind == "failed":
            self.restart_helps = False
        self.retry_after_ms = retry_after_ms

    @classmethod
    def of(cls, fault: Any) -> FaultError:
        """Return the error for `fault`, the message `areal_async.rpc.schema.Fault`."""
        return cls(fault.kind, fault.message, fault.retry_after_ms)


class SnapshotError(ArealError):
    """A snapshot that is torn, mixed, corrupt or missing: it must not be served."""


class WrongBase(SnapshotError):
    """A delta whose base is not the snapshot at hand: the full snapshot is needed."""


DISK_TROUBLE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ("has no room", "Free room there")),
    errno.EROFS: (
        "is read-only",
        "Mount it writable again (after an error of the file system: `dmesg`, then fsck)",
    ),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE), ("fails", "See what is wrong with it (`dmesg`), and mount it again")
    ),
}
"""Errors of a disk, each with its meaning and what to do about it. A quota and a limit on file sizes are of
room."""
_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")


class MachineError(ArealError):
    """The disk, or a limit of this machine, keeps something from being done."""

    @classmethod
    def of(cls, error: BaseException, *, then: str = "do the same again") -> MachineError | None:
        """Return the machine error (disk, limit) that `error` or one of its causes stands for, or None."""
        for cause in causes_of(error):
            if (number := errno_of(cause)) is None:
                continue
            if number in DISK_TROUBLE:
                what, fix = DISK_TROUBLE[number]
                place = getattr(cause, "filename", None)
                where = f"the disk of {os.fsdecode(place)}" if place else "the disk"
                return cls(f"{where} {what} ({error}). {fix}, and {then}.")
            if number in (errno.EMFILE, errno.ENFILE):
                return cls(f"{error}. {open_files_text(number)}, and {then}.")
        return None


def as_ours(error: BaseException) -> ArealError | None:
    """Return an error of ours, or a problem of this machine, as an error that a person can act on. Return
    None for any other error, which is a bug or a fault of the user's code."""
    return error if isinstance(error, ArealError) else MachineError.of(error)


def errno_of(error: BaseException) -> int | None:
    """Return the error number of an OSError, or the one that the text of another error names."""
    number = getattr(error, "errno", None)
    if isinstance(number, int):
        return number
    found = _NUMBER.search(str(error))
    return int(found[1] or found[2]) if found else None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, the newest first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def with_limit(error: ArealError) -> str:
    """Return the text of an error; where it came of too many open files, with the limit and the fix."""
    if isinstance(error, MachineError):
        return str(error)
    numbers = (errno_of(cause) for cause in causes_of(error))
    limit = next((n for n in numbers if n is not None and n in (errno.EMFILE, errno.ENFILE)), None)
    return str(error) if limit is None else f"{error} {open_files_text(limit)}."


def open_files_text(number: int) -> str:
    """Return which limit on open files was met, and how to raise it."""
    if number == errno.ENFILE:
        return "All programs of this machine together have too many files open: raise `sysctl fs.file-max`"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"A process may have {soft} files open here (`ulimit -n`; at most {hard}): raise it to 65536 "
        "(`ulimit -n 65536`, `LimitNOFILE=` of a systemd unit, nofile in /etc/security/limits.conf)"
    )


class RunError(ArealError):
    """Base of everything that keeps a run from starting or from finishing."""


class RunFolderError(RunError):
    """The run folder cannot be used: busy, finished before, or not ours."""


class RunFailed(RunError):
    """A service did not start, or ended before the job was done."""


class RunInterrupted(RunError):
    """A person or the system asked the run to stop."""
