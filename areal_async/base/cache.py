"""Cache of answers in a folder of the user. The key of an answer is the digest of its input.

    key = digest_of([model / "tokenizer.json", tasks], "version 1")
    answer = recall("checked", key)
    keep("checked", key, b"[]")

A changed file has another digest, so an outdated answer is never found. An answer only saves time, and the
caller must work correctly without it. A cached file that another user could write is not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from blake3 import blake3

from areal_async.base.own_files import NotOurs, map_path, private_files, read_own, write_whole

CACHE_VARIABLE = "AREAL_ASYNC_CACHE"
"""Environment variable that names the cache folder. The default is `~/.cache/areal-async`."""
FOLDER = "known"
MOST_ANSWERS = 512  # of one kind; above it the older half is deleted
MOST_BYTES = 1 << 16  # of one answer


def cache_root() -> Path:
    """Return the cache folder of the user."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "areal-async").absolute()


def digest_of(files: Iterable[Path], *values: str, packages: Iterable[str] = ("transformers",)) -> str:
    """Return the digest of the names and contents of `files`, of `values`, and of the versions of `packages`.

    Raises `OSError` for an unreadable file.
    """
    digest = blake3()
    for text in (*values, *(f"{package} {version(package)}" for package in packages)):
        digest.update(f"{len(text.encode())} {text}".encode())
    for path in files:
        content = map_path(path)
        digest.update(f"{len(content)} {path.name}/".encode())
        digest.update(content)
    return digest.hexdigest()


def recall(kind: str, key: str) -> bytes | None:
    """Return the answer stored for `key`, or None if there is none. A file that others may write is
    ignored."""
    try:
        return read_own(_path(kind, key), max_bytes=MOST_BYTES)
    except (OSError, NotOurs):
        return None


def keep(kind: str, key: str, answer: bytes) -> None:
    """Store `answer` for `key`. Does nothing if the cache folder is not writable."""
    path = _path(kind, key)
    with suppress(OSError), private_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path.parent)
        write_whole(path, answer)


def _path(kind: str, key: str) -> Path:
    return cache_root() / FOLDER / kind / key


def _make_room(folder: Path) -> None:
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in files[: len(files) // 2] if len(files) >= MOST_ANSWERS else ():
        path.unlink(missing_ok=True)
