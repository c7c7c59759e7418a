"""The rewards that a pool holds: their code as it was last found good, and whether a file has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reward_service.channel import Load
from reward_service.imports import Import
from reward_service.sdk import RewardLoadError
from reward_service.spec import RewardSpec


class Version(NamedTuple):
    """What a reward of one's own runs."""

    source: bytes
    """The text of its file."""
    imports: tuple[Import, ...] = ()
    """With their texts: the files beside it that it imports."""


class Program:
    """One reward of a pool. `number` is what its workers know it by.

    Of a reward of one's own the text of its file is kept, and those of what it imports from its folder: every
    worker runs the same version, also one that is started after a file was changed, broken or deleted."""

    def __init__(self, number: int, spec: RewardSpec) -> None:
        """Raises `RewardLoadError` for a file that is not there."""
        self.number = number
        self.spec = spec
        self.file = own_file(spec.name)
        self._version = None if self.file is None else Version(read_source(spec.name, self.file))
        self.batch = 0
        """Inputs that one invocation takes; 0: one, or those of a group. Known once it is loaded."""
        self.users: list[str] = []
        """The jobs that share it."""
        self.loaded_once = False
        """A worker was ready with it."""
        self.broken = ""
        """Why it can be loaded no longer."""
        self._seen: list[tuple[int, int] | None] = []
        self._refused: Version | None = None

    def load(self, version: Version | None = None) -> Load:
        """The order to load it, or this version of it."""
        source, imports = version or self._version or (None, ())
        return Load(self.number, self.spec.name, self.spec.args, self.spec.scope, source, list(imports))

    def loaded(self, imports: Sequence[Import]) -> None:
        """A worker has loaded the version in use, and imported these files for it."""
        if self._version is not None and not self.loaded_once:
            self._version = completed(self._version, imports)

    def changed(self) -> Version | None:
        """The version that the files hold, when it is another than the one in use and than the one refused
        last. None also while a file is not there, unless the reward's own says something else by now: an
        editor may be writing it."""
        if self.file is None or self._version is None:
            return None
        imports = self._version.imports
        seen = [stamp(path) for path in (self.file, *(Path(one.path) for one in imports))]
        if seen == self._seen or seen[0] is None:
            return None
        try:
            source = self.file.read_bytes()
            there = [one.read() for one, known in zip(imports, seen[1:], strict=True) if known is not None]
        except OSError:
            return None
        if None in seen and source == self._version.source:
            return None
        self._seen = seen
        version = Version(source, tuple(there))
        return None if version in (self._version, self._refused) else version

    def take(self, version: Version, imports: Sequence[Import]) -> None:
        """This version has loaded, and imports these files: it is the one in use."""
        self._version = completed(version, imports)
        self.broken = ""

    def refuse(self, version: Version) -> bool:
        """Do not offer this version again. False when it was refused before."""
        again = self._refused == version
        self._refused = version
        return not again


def stamp(file: Path) -> tuple[int, int] | None:
    """What changes with the file; none when it cannot be found."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def completed(version: Version, imports: Sequence[Import]) -> Version:
    """With exactly these imports; what it does not hold of them is read. One that has gone is left out."""
    texts = {one.module: one for one in version.imports}
    complete = []
    for one in imports:
        with contextlib.suppress(OSError):
            complete.append(texts.get(one.module) or one.read())
    return Version(version.source, tuple(complete))


def own_file(name: str) -> Path | None:
    """The file of a reward of one's own; none for a built-in one."""
    path_text, _, attribute = name.rpartition(":")
    return Path(path_text) if attribute and path_text.endswith(".py") else None


def read_source(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        problem = "there is no file" if isinstance(error, FileNotFoundError) else f"{error.strerror}:"
        raise RewardLoadError(f"the reward {name!r}: {problem} {file}. Check it in the job file.") from None
