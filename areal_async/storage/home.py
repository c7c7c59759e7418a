"""`home://…`: the files of a run's home host, for its processes on other hosts.

It is used if hosts share no disk and the job names no store. Processes then read from the home host and write
to it, over the control socket of the run's supervisor. Other code uses it like any fsspec file system.
`home://files/<path>` is a file or folder that the job names, with its path on the home host.
`home://run/<path>` is in the run's folder, where only the run's trainer may write."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec

from areal_async.base.addresses import Address
from areal_async.base.errors import FaultError, WireError, errno_of
from areal_async.rpc.client import SyncClient
from areal_async.rpc.home_messages import HomeFile, HomeFiles, ListHome, ReadHome, RemoveHome, WriteHome
from areal_async.rpc.secret import Access

PROTOCOL = "home"
FILES, RUN = "files", "run"
ANSWER_S = 60.0
PIECE_BYTES = 4 << 20  # Bytes of one request


class HomeFileSystem(fsspec.AbstractFileSystem):
    """The files that the connected supervisor serves. The methods are thread-safe."""

    protocol = PROTOCOL
    cachable = False
    _client: ClassVar[SyncClient | None] = None

    @classmethod
    def connect(cls, address: Address, *, job: str, role: str, name: str, access: Access) -> None:
        """Connect this process to a supervisor. All later requests for `home://` go to this supervisor."""
        cls.disconnect()
        cls._client = SyncClient(address, job=job, role=role, name=f"{name}/home", access=access)
        fsspec.register_implementation(PROTOCOL, cls, clobber=True)

    @classmethod
    def disconnect(cls) -> None:
        client, HomeFileSystem._client = HomeFileSystem._client, None
        if client is not None:
            client.close()

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found = self._listed(path)
        if (own := found.get("")) is not None:
            return self._entry(path, own)
        if found:
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def find(self, path: str, *args: Any, detail: bool = False, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        names = {f"{path}/{name}" if name else path: file for name, file in self._listed(path).items()}
        found = {name: self._entry(name, file) for name, file in sorted(names.items())}
        return found if detail else [*found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path, begin, parts = self._strip_protocol(path), start or 0, []
        while end is None or begin < end:
            wanted = PIECE_BYTES if end is None else min(PIECE_BYTES, end - begin)
            _, attached = self._exchange(ReadHome(path, begin, wanted))
            parts.append(bytes(attached[0]))
            begin += len(parts[-1])
            if len(parts[-1]) < wanted:
                break
        return b"".join(parts)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._write(path, iter([value]))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        with Path(lpath).open("rb") as file:
            self._write(rpath, iter(lambda: file.read(PIECE_BYTES), b""))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in [path] if isinstance(path, str) else path:
            self._exchange(RemoveHome(self._strip_protocol(each)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, because a folder exists as soon as it contains a file."""

    def _write(self, path: str, pieces: Iterator[bytes]) -> None:
        """Send the pieces under a temporary name. The last request renames the file."""
        path, upload, offset = self._strip_protocol(path), secrets.token_hex(8), 0
        for piece in pieces:
            for begin in range(0, max(1, len(piece)), PIECE_BYTES):
                part = piece[begin : begin + PIECE_BYTES]
                self._exchange(WriteHome(path, upload, offset, last=False), [part])
                offset += len(part)
        self._exchange(WriteHome(path, upload, offset, last=True), [b""])

    def _listed(self, path: str) -> dict[str, HomeFile]:
        reply, _ = self._exchange(ListHome(path))
        assert isinstance(reply, HomeFiles)
        return reply.files

    def _entry(self, name: str, file: HomeFile) -> dict[str, Any]:
        return {"name": name, "size": file.size_bytes, "type": "file", "mtime": file.mtime_ns}

    def _exchange(self, request: Any, attachments: list[bytes] | None = None) -> Any:
        client = HomeFileSystem._client
        if client is None:
            raise ValueError(f"{PROTOCOL}:// is known only to the processes of a run")
        try:
            client.connect(ANSWER_S)
            return client.exchange(request, attachments=attachments or [], timeout_s=ANSWER_S)
        except FaultError as error:
            if error.kind == "invalid":
                raise FileNotFoundError(error.message) from error
            if error.kind == "failed":
                raise OSError(errno_of(error) or errno.ENOSPC, error.message) from error
            raise PermissionError(error.message) from error
        except WireError as error:
            raise ConnectionError(str(error)) from error
