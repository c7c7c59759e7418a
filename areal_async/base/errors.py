"""The hierarchy of this project's exceptions.

    ArealError
    ├── WireError                an error between two processes
    │   ├── EndpointError        an address cannot be served: busy, too long, not loopback and no keys
    │   ├── ProtocolError        bytes that are not one of our messages
    │   │   └── MessageTooLarge  a message beyond the limits, found before it is sent
    │   ├── RpcTimeout           no answer within the caller's deadline
    │   ├── PeerGone             the connection was closed during the call
    │   └── FaultError           the service answered with a `Fault`
    ├── InfrastructureFault      an episode cannot continue for a reason outside its answers
    ├── SnapshotError            an incomplete, mixed, corrupt or missing snapshot
    └── MachineError             a problem of the disk or a limit of this machine, not of the code or the job

A package with further errors derives them from `ArealError`. The text of every error is one paragraph that
tells a person what to do. A service prints it before it exits with status 1.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

MOST_SHOWN = 500  # Most characters of a server's answer in an error
FaultKind = Literal[
    "schema",  # the peer has another schema or another job
    "invalid",  # the request itself is wrong; do not retry
    "forbidden",  # the role of the peer's key may not send this request
    "fenced",  # a newer front, lease or trainer epoch has replaced the caller
    "busy",  # back-pressure: retry later
    "unavailable",  # the service cannot reach a dependency (Redis); retry later
    "stale",  # the staleness limit would be broken; fatal
    "failed",  # the job's rules end the job here, and the message gives the reason; fatal
    "internal",
]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that is not blank, or else its kind."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class ArealError(Exception):
    """Base of every error that this project raises on purpose."""

    restart_helps: bool | None = None
    """Whether a restart may help a service that ends with this error.

    None means that a restart helps only if the service has served before: this shows that its configuration
    works.
    """

    exit_status = 1
    """Exit status of a command that raises this error (docs/cli.md)."""


class InfrastructureFault(ArealError):
    """An episode cannot continue for a reason outside its answers: a service that an agent needs is
    unavailable.

    An agent, environment or workflow raises it. The episode then has no score and is tried again.
    """


class WireError(ArealError):
    """Base of all errors between two processes."""

    restart_helps: bool | None = True


class EndpointError(WireError):
    """An address cannot be served or reached as configured."""

    restart_helps = None


class ProtocolError(WireError):
    """Bytes arrived that are not one of our messages."""


class MessageTooLarge(ProtocolError):
    """A message exceeds the limits of the wire. The sender raises it before it sends anything."""


class RpcTimeout(WireError):
    """No answer within the deadline. `last_fault` is the last fault `busy` or `unavailable` before the
    deadline, if any."""

    def __init__(self, message: str, last_fault: FaultError | None = None) -> None:
        super().__init__(message)
        self.last_fault = last_fault


class PeerGone(WireError):
    """The client was closed during the call, or was never connected."""


class FaultError(WireError):
    """A service's typed refusal. Handlers raise it to answer with a `Fault`, and clients raise it when they
    receive a `Fault`."""

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
    """A snapshot that is incomplete, mixed, corrupt or missing. It must not be served."""


class WrongBase(SnapshotError):
    """Error for a delta whose base is not the present snapshot. The full snapshot is needed."""


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
"""Errors of a disk, each with its meaning and its fix.

An exceeded quota or file size limit counts as a full disk.
"""
_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")


class MachineError(ArealError):
    """A problem of the disk, or a limit of this machine, prevents an action."""

    @classmethod
    def of(cls, error: BaseException, *, then: str = "do the same again") -> MachineError | None:
        """Return the machine problem that `error` or one of its causes shows, or None if there is none."""
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
    """Return `error` as an `ArealError` if it is one or has a machine problem as its cause.

    None means that the error is a bug, or comes from the user's own code.
    """
    return error if isinstance(error, ArealError) else MachineError.of(error)


def errno_of(error: BaseException) -> int | None:
    """Return the error number of an `OSError`, or the number in the text of another error."""
    number = getattr(error, "errno", None)
    if isinstance(number, int):
        return number
    found = _NUMBER.search(str(error))
    return int(found[1] or found[2]) if found else None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and then its causes, from the newest to the oldest."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def with_limit(error: ArealError) -> str:
    """Return the text of an error. If too many open files caused it, the text adds the limit and the fix."""
    if isinstance(error, MachineError):
        return str(error)
    numbers = (errno_of(cause) for cause in causes_of(error))
    limit = next((n for n in numbers if n is not None and n in (errno.EMFILE, errno.ENFILE)), None)
    return str(error) if limit is None else f"{error} {open_files_text(limit)}."


def error_message(content: bytes) -> str:
    """Return the message in a server's error body, or else the body's beginning."""
    text = content.decode(errors="replace")
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(content)
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return (value if isinstance(value, str) else text)[:MOST_SHOWN]


def open_files_text(number: int) -> str:
    """Return a text with the exceeded limit on open files and the way to raise it."""
    if number == errno.ENFILE:
        return "All programs of this machine together have too many files open: raise `sysctl fs.file-max`"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"A process may have {soft} files open here (`ulimit -n`; at most {hard}): raise it to 65536 "
        "(`ulimit -n 65536`, `LimitNOFILE=` of a systemd unit, nofile in /etc/security/limits.conf)"
    )


class RunError(ArealError):
    """Base of all errors that keep a run from starting or finishing."""


class RunFolderError(RunError):
    """The run folder cannot be used: busy, already finished, or not ours."""


class RunFailed(RunError):
    """A service did not start, or ended before the job was done."""


class RunInterrupted(RunError):
    """A person or the system asked the run to stop."""
