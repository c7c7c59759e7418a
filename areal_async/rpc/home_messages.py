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
    """The files at and below `path`: `files/…` is what the job names, `run/…` the run's folder."""

    path: str


class ReadHome(Request[Ok], frozen=True):
    """Up to `size_bytes` of the file from `begin` on, in the attachment of the answer; fewer at its end."""

    path: str
    begin: int
    size_bytes: int


class WriteHome(Request[Ok], frozen=True):
    """The attachment belongs at `offset` of a file that gets its name, `path`, with the `last` request of the
    same `upload`. Writing the same again changes nothing."""

    path: str
    upload: str
    offset: int
    last: bool


class RemoveHome(Request[Ok], frozen=True):
    """Remove a file or, of a folder, all below it. What is not there is as good as removed."""

    path: str
