"""Attachments that are passed between processes of one host in files, and not through a socket.

A server that stores attachments in files names two folders in its welcome (`FilesHere`). A client that finds
the server's token there writes large attachments into a file of the first folder and sends their places in
it. The server reads them from the file, and may keep it under another name without a copy. Attachments in
files of the second folder are answered by name, and the client maps them. All others, and peers on other
hosts, use the socket.

Promises: a file that a client wrote is removed by it when its call is over, however it ends; one that a dead
client left is removed by `sweep`. The server copies attachments into its own memory before it looks at them,
or leaves them in the file unread, so a file that is truncated meanwhile does not end the process. Names never
lead out of the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from typing_extensions import Buffer

from areal_async.base.errors import ProtocolError
from areal_async.base.own_files import NotBeneath, map_open, open_beneath
from areal_async.rpc.schema import FilesHere

LEAST_BYTES = 32 << 10  # Attachments of a message from which on a file is cheaper than the socket
ALIGN_BYTES = 4096
STALE_S = 900.0  # A file that a client has not removed after so long has no client any more
TOKEN = ".token"
_NAME = re.compile(r"[0-9a-f]{1,16}\.[0-9a-f]{1,16}")


class FilePart(NamedTuple):
    """Bytes of a file of one of the two folders."""

    name: str
    at: Annotated[int, msgspec.Meta(ge=0)]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Filed(list[memoryview]):
    """Attachments that came in the file at `path`, each at the offset of the same index. The last ones may
    have been left there (`Request.left_in_file`): they are empty here."""

    path: Path
    offsets: list[int]
    sizes: list[int]

    def parts(self, start: int, stop: int | None = None) -> Filed:
        """Return the attachments from `start` to `stop`."""
        found = Filed(self[start:stop])
        found.path, found.offsets, found.sizes = self.path, self.offsets[start:stop], self.sizes[start:stop]
        return found


_encode = msgspec.msgpack.Encoder().encode
_read_parts = msgspec.msgpack.Decoder(list[FilePart | None]).decode


def write_parts(parts: Sequence[FilePart | None]) -> bytes:
    """Return the frame with the places of the attachments, or None if they follow as frames."""
    return _encode(parts)


def read_parts(frame: Buffer) -> list[FilePart | None]:
    """Return the inverse of `write_parts`. Raises `ProtocolError`."""
    try:
        return _read_parts(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"not the places of attachments: {error}") from error


class ServerFiles:
    """The server's side. `incoming` is created if it is missing; `held` is the folder of the server's own
    files."""

    def __init__(self, incoming: Path, held: Path, *, flush: bool) -> None:
        self._incoming = incoming
        incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._seen_s: dict[str, float] = {}
        token = secrets.token_hex(8)
        (incoming / TOKEN).write_text(token)
        self.here = FilesHere(str(incoming), str(held), token, flush)

    def read(self, parts: Sequence[FilePart | None], left: int = 0) -> Filed:
        """Attachments that a client wrote, but for the last `left`. Blocks for the reading. Raises
        `ProtocolError`."""
        names = {part.name if part else "" for part in parts}
        name = names.pop() if len(names) == 1 else ""
        if not _NAME.fullmatch(name):
            raise ProtocolError("attachments are not all in one file of a client")
        filed = Filed()
        filed.path, filed.offsets, filed.sizes = self._incoming / name, [], []
        try:
            with os.fdopen(open_beneath(self._incoming, name), "rb", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                for number, part in enumerate(filter(None, parts)):
                    whole = part.at + part.size_bytes <= size_bytes
                    stays = number >= len(parts) - left
                    held = os.pread(file.fileno(), part.size_bytes, part.at) if whole and not stays else b""
                    if not whole or (len(held) != part.size_bytes and not stays):
                        raise ProtocolError("the file of the attachments is too short")
                    filed.append(memoryview(held))
                    filed.offsets.append(part.at)
                    filed.sizes.append(part.size_bytes)
        except OSError as error:
            raise ProtocolError(f"the file of the attachments cannot be read: {error.strerror}") from error
        return filed

    def sweep(self) -> None:
        """Remove files of dead clients, which are the files that still exist `STALE_S` after they were first
        seen."""
        now_s, before = time.monotonic(), self._seen_s
        names = {entry.name for entry in os.scandir(self._incoming)} - {TOKEN}
        self._seen_s = {name: before.get(name, now_s) for name in names}
        for name, seen_s in self._seen_s.items():
            if now_s - seen_s > STALE_S:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._incoming / name)


class ClientFiles:
    """The client's side. `find` returns None if the folders are not on this host."""

    def __init__(self, here: FilesHere) -> None:
        self._incoming, self._held, self._flush = Path(here.incoming), Path(here.held), here.flush

    @classmethod
    def find(cls, here: FilesHere | None) -> ClientFiles | None:
        if here is None:
            return None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if Path(here.incoming, TOKEN).read_text() == here.token and os.access(here.incoming, os.W_OK):
                return cls(here)
        return None

    def write(self, name: str, attachments: Sequence[Buffer]) -> bytes:
        """Write attachments into the file `name`, and return the frame with their places. Blocks. Raises
        OSError, and then leaves no file."""
        path, at, parts = self._incoming / name, 0, list[FilePart | None]()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                for attachment in attachments:
                    rest = memoryview(attachment).cast("B")
                    parts.append(FilePart(name, at, len(rest)))
                    file.seek(at)
                    at += -(-len(rest) // ALIGN_BYTES) * ALIGN_BYTES
                    while rest:
                        rest = rest[file.write(rest) :]
                if self._flush:
                    os.fsync(fd)
        except BaseException:
            self.remove(name)
            raise
        return write_parts(parts)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._incoming / name)

    def read(self, frames: Sequence[Buffer]) -> list[memoryview]:
        """Return the attachments of a reply: maps of the server's files, and the frames after the first. One
        whose file is gone is empty: the server holds it no more. Raises `ProtocolError`."""
        maps: dict[str, memoryview] = {}
        ends: dict[str, int] = {}
        following = iter(frames[1:])
        try:
            parts = read_parts(frames[0])
            for part in filter(None, parts):
                ends[part.name] = max(ends.get(part.name, 0), part.at + part.size_bytes)
            return [
                memoryview(next(following)) if part is None else self._map(part, ends[part.name], maps)
                for part in parts
            ]
        except (IndexError, StopIteration, RuntimeError) as error:
            raise ProtocolError("fewer attachments came than were announced") from error

    def _map(self, part: FilePart, end: int, maps: dict[str, memoryview]) -> memoryview:
        """Map a part of its file, up to `end`."""
        whole = maps.get(part.name)
        if whole is None:
            try:
                with os.fdopen(open_beneath(self._held, part.name), "rb") as file:
                    whole = memoryview(map_open(file.fileno(), 0, end, populate=True))
            except NotBeneath as error:
                raise ProtocolError(f"an attachment lies outside of its folder: {error}") from error
            except (OSError, ValueError):
                whole = memoryview(b"")
            maps[part.name] = whole
        view = whole[part.at : part.at + part.size_bytes]
        return view if len(view) == part.size_bytes else memoryview(b"")
