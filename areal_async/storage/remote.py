"""One place in a store. It is accessed through fsspec, by requests with a time limit.

A request ends within `REQUEST_S` or counts as failed. A large upload has a longer limit. After a transient
failure (no connection, no answer, a server's error), `Tries` determines the retries. Every error names the
URL and a fix. Credentials come from the environment, which the store's own library reads: `AWS_*` and
`~/.aws` for S3, and `FSSPEC_*` for options of fsspec."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_async.base.errors import DISK_TROUBLE, ArealError
from areal_async.base.log import get_logger
from areal_async.base.retry import Tries
from areal_async.rpc.board import board
from areal_async.storage.urls import joined, protocol_problem, url_problem

PART_BYTES = 8 << 20  # Bytes of one request of a large file
PARALLEL = 4  # Number of concurrent requests
REQUEST_S = 120.0
LEAST_BYTES_PER_S = 256 << 10  # A slower upload counts as unanswered
PATIENCE_S = 60.0  # Default time for retries if a store does not answer
CONNECT_S, READ_S = 10.0, 60.0
TAGS = ("ETag", "etag", "md5Hash", "crc32c", "checksum", "mtime", "LastModified", "updated", "created")
"""Fields in which stores report that the content of a file changed. The first existing field counts."""
HOPELESS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "ParamValidationError",
    "InvalidRegionError",
)
"""Names of errors of store libraries for which a retry does not help."""

log = get_logger("storage")
T = TypeVar("T")


class StorageError(ArealError):
    """Error if a store refuses a request, or has unexpected content."""

    restart_helps = False


class StorageMissing(StorageError):
    """Error if nothing exists at the URL."""


class HalfWritten(StorageError):
    """Error if the writer of a folder has not completed it."""


class StorageAway(StorageError):
    """Error if a store does not answer before its retries end."""

    restart_helps = True


class StoredFile(msgspec.Struct, frozen=True):
    """Size and tag of a file in a store. `tag` changes with the content; it is empty if the store has
    none."""

    size_bytes: int
    tag: str = ""


def tries_for(url: str, limit_s: float = PATIENCE_S) -> Tries:
    """Return a retry rule with the limit `limit_s`. While the store does not answer, the log and the status
    of this process say so."""
    subject = f"store {url}"
    told = threading.Event()

    def away(error: Exception) -> None:
        board.waits(subject, f"an answer ({_text(error)})")
        if not told.is_set():
            told.set()
            log.warning("the store does not answer; it is asked again", url=url, error=_text(error))

    def back() -> None:
        board.waits(subject, "")
        if told.is_set():
            told.clear()
            log.info("the store answers again", url=url)

    return Tries(limit_s, away, back)


class Remote:
    """A file or folder at a URL. All methods block and are thread-safe. Each method raises `StorageAway` if
    the store does not answer in time, and `StorageError` if it refuses."""

    def __init__(self, url: str, tries: Tries | None = None) -> None:
        self.url = url.rstrip("/")
        self._tries = tries or tries_for(self.url)
        if (problem := url_problem(self.url) or protocol_problem(self.url)) is not None:
            raise StorageError(f"{url}: {problem[0]}. {problem[1]}.")
        import fsspec  # Imported here because most jobs have no URL

        self._is_s3 = self.url.startswith(("s3://", "s3a://"))
        # Only `Tries` retries. The library tries once, with a time limit.
        config = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"total_max_attempts": 1}}
        options: dict[str, Any] = {"config_kwargs": config} if self._is_s3 else {}
        self._fs, self._path = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        if self._is_s3:
            self._fs.retries = 1

    def listing(self) -> dict[str, StoredFile]:
        """Return the files at the URL by their names below it. A single file has the name "". The result is
        empty if nothing exists."""

        def find() -> dict[str, StoredFile]:
            found = {}
            with suppress(FileNotFoundError):
                for path, info in self._fs.find(self._path, detail=True).items():
                    name = path[len(self._path) :].strip("/") if path != self._path else ""
                    found[name] = _stored(info)
            return found

        return self._ask("list", self.url, find)

    def read(self, name: str = "", begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file from `begin` to `end`, exclusive. Raises `StorageMissing`."""

        def get() -> bytes:
            data: bytes = self._fs.cat_file(self._at(name), start=begin or None, end=end)
            if end is not None and len(data) != end - begin:
                raise OSError(None, f"{len(data)} bytes came of {end - begin}")
            return data

        return self._ask("read", self._named(name), get)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, and replace an existing file of that name."""

        def put() -> None:
            self._make_parent(name)
            self._fs.pipe_file(self._at(name), content)

        self._ask("write", self._named(name), put)

    def put(self, name: str, path: Path) -> int:
        """Upload a local file and return its size. Raises FileNotFoundError if the local file does not
        exist."""
        size = path.stat().st_size
        options: dict[str, Any] = (
            {"chunksize": PART_BYTES, "max_concurrency": PARALLEL} if self._is_s3 else {}
        )

        def upload() -> None:
            self._make_parent(name)
            self._fs.put_file(str(path), self._at(name), **options)
            if (there := _stored(self._fs.info(self._at(name))).size_bytes) < size:  # A log may have grown
                raise OSError(None, f"{there} bytes have come of {size}")

        try:
            self._ask("write", self._named(name), upload, REQUEST_S + size / LEAST_BYTES_PER_S)
        except StorageError:
            path.stat()  # Raises if the local file is gone: the mirror of a changing folder must know this
            raise
        return size

    def remove(self, names: Collection[str] = ("",)) -> None:
        """Remove these files, or everything below a folder. A missing file is not an error."""
        for name in names:

            def delete(name: str = name) -> None:
                with suppress(FileNotFoundError):
                    self._fs.rm(self._at(name), recursive=True)

            self._ask("remove", self._named(name), delete)

    def each(self, work: Callable[[T], object], items: Iterable[T]) -> None:
        """Call `work` for each item, a few at a time. Running calls finish before the first error is
        raised."""
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="storage") as pool:
            for _ in pool.map(work, items):  # `map` cancels the rest after an error
                pass

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _named(self, name: str) -> str:
        return joined(self.url, name) if name else self.url

    def _make_parent(self, name: str) -> None:
        """Create the parent folder, which a file system needs. Object stores have no folders."""
        if not self._is_s3:
            self._fs.makedirs(self._fs._parent(self._at(name)), exist_ok=True)

    def _ask(self, what: str, url: str, work: Callable[[], T], limit_s: float = REQUEST_S) -> T:
        try:
            return self._tries.run(lambda: _within(work, limit_s), _passes)
        except FileNotFoundError as error:
            if what == "write":
                raise StorageError(
                    f"{url} could not be written: {_text(error)}. Make the bucket or folder first, or "
                    "correct the URL."
                ) from error
            raise StorageMissing(
                f"{url}: there is nothing there ({_text(error)}). Correct the URL, or put it there."
            ) from error
        except Exception as error:  # A store's library may raise anything
            if _passes(error):
                raise StorageAway(
                    f"{url} could not be {PAST[what]} within {self._tries.limit_s:g} s ({_text(error)}). See "
                    "whether the store is up and can be reached from this host."
                ) from error
            raise StorageError(
                f"{url} could not be {PAST[what]}: {_text(error)}. Correct the URL or who this host says it "
                "is (docs/storage.md)."
            ) from error


PAST = {"list": "listed", "read": "read", "write": "written", "remove": "removed"}


def _within(work: Callable[[], T], limit_s: float) -> T:
    """Return the result of `work`. It runs in a daemon thread, which is abandoned after `limit_s` because
    some libraries wait forever. Raises TimeoutError."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="storage-request", daemon=True).start()
    try:
        return result.result(limit_s)
    except NoAnswer:
        if result.done():
            return result.result()
        raise TimeoutError(f"no answer within {limit_s:g} s") from None


def _passes(error: Exception) -> bool:
    """Return whether a retry may help."""
    if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError):
        return False
    if isinstance(error, NotImplementedError | TypeError | ValueError | AttributeError | KeyError):
        return False
    if isinstance(error, OSError) and error.errno in REFUSED:
        return False
    return type(error).__name__ not in HOPELESS


REFUSED = frozenset({errno.EINVAL, *DISK_TROUBLE}) - {errno.EIO}
"""Errors of impossible requests, or of a disk that accepts no writes. EIO is not included, because a network
file system may fail with EIO for a while."""


def _stored(info: dict[str, Any]) -> StoredFile:
    tag = next((str(info[name]).strip('"') for name in TAGS if info.get(name)), "")
    return StoredFile(int(info.get("size") or 0), tag)


def _text(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said:.200}" if said else type(error).__name__
