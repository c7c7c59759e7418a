"""Requests of processes on other hosts to read and write files of the run's home."""

from __future__ import annotations

from areal_async.rpc.schema import Message, Ok, Record, Request


class HomeFile(Record, frozen=True):
    size_bytes: int
    mtime_ns: int


class HomeFiles(Message, frozen=True):
    """Files by their names relative to the requested path. If the path is a file, its name is empty."""

    files: dict[str, HomeFile]


class ListHome(Request[HomeFiles], frozen=True):
    """List the files at and below `path`. `files/…` are files that the job names, and `run/…` is the run's
    folder."""

    path: str


class ReadHome(Request[Ok], frozen=True):
    """Read up to `size_bytes` of the file from `begin` on, as an attachment. The attachment is shorter only
    at the end of the file."""

    path: str
    begin: int
    size_bytes: int


class WriteHome(Request[Ok], frozen=True):
    """Write the attachment at `offset` of an upload.

    After the `last` request of an `upload`, the file gets its name `path`. A repeated write changes nothing.
    """

    path: str
    upload: str
    offset: int
    last: bool


class RemoveHome(Request[Ok], frozen=True):
    """Remove a file, or everything below a folder. Removing a missing file succeeds."""

    path: str
