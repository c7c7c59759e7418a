"""Requests of processes on other hosts to read and write files of the run's home."""

from __future__ import annotations

from areal_async.rpc.schema import Message, Ok, Record, Request


class HomeFile(Record, frozen=True):
    size_bytes: int
    mtime_ns: int


class HomeFiles(Message, frozen=True):
    """Files by their names below the path that was asked for; a file itself has the empty name."""

    files: dict[str, HomeFile]


class ListHome(Request[HomeFiles], frozen=True):
    """List the files at and below `path`. `files/…` are the files that the job names, `run/…` is the run's
    folder."""

    path: str


class ReadHome(Request[Ok], frozen=True):
    """Up to `size_bytes` of the file from `begin` on, in the attachment of the answer; fewer at its end."""

    path: str
    begin: int
    size_bytes: int


class WriteHome(Request[Ok], frozen=True):
    """Write the attachment at `offset` of the file of this `upload`. The `last` request gives the file its
    name, `path`. A repeated request changes nothing."""

    path: str
    upload: str
    offset: int
    last: bool


class RemoveHome(Request[Ok], frozen=True):
    """Remove a file, or all files below a folder. A missing file is not an error."""

    path: str
