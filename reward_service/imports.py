"""The files that a reward of one's own imports from its folder: which they are, and running their kept texts.

Installed packages and ours are not among them, nor is what a reward imports only while it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import msgspec

OURS = {"__main__", "areal_async", "reward_service"}


class Import(msgspec.Struct, array_like=True, frozen=True):
    module: str
    path: str
    text: bytes | None = None
    """None: a worker does not report it."""

    def read(self) -> Import:
        """With the text that the file holds now. Raises `OSError`."""
        return Import(self.module, self.path, Path(self.path).read_bytes())


def imported_beside(file: Path) -> list[Import]:
    """The modules of this process that lie in the folder of `file`, or below it."""
    folder, own = file.resolve().parent, file.resolve()
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or name.partition(".")[0] in OURS:
            continue
        at = Path(path).resolve()
        if at.is_relative_to(folder) and not at.is_relative_to(sys.prefix) and at != own:
            found.append(Import(name, path))
    return found


class _Kept(SourceFileLoader):
    """Loads a given text as if the file held it."""

    def __init__(self, kept: Import) -> None:
        super().__init__(kept.module, kept.path)
        self._text = kept.text or b""

    def get_data(self, path: str) -> bytes:
        return self._text

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError("its bytecode is that of another text")


class _Finder:
    def __init__(self, imports: Iterable[Import]) -> None:
        self._imports = {one.module: one for one in imports}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        kept = self._imports.get(name)
        return None if kept is None else spec_from_file_location(name, kept.path, loader=_Kept(kept))


def keep(imports: Iterable[Import]) -> None:
    """From now on these modules are imported in this process as they are here, whatever their files hold."""
    sys.meta_path.insert(0, _Finder(imports))
