"""Job files that consist of several files. `include` names files with initial fields.

Includes are resolved when the file is read, so run records, submitted jobs and printed jobs contain only
values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.yaml_file import read_mapping
from areal_async.config.job import merged
from areal_async.config.paths import resolve_paths


def read_composed(path: Path) -> dict[str, Any]:
    """Return the mapping of a job file, with its includes resolved.

    Later includes override earlier includes, and the file itself overrides all, section by section. Paths are
    relative to the file that contains them. They stay relative, because `submit` sends a job file together
    with the files below its folder. Raises `ConfigError`, which names the wrong file."""
    return _read(path, ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    here = path.resolve()
    if here in above:
        chain = " includes ".join(str(each) for each in (*above, here))
        mistake = Mistake("include", f"it includes itself: {chain}", "Remove one of them")
        raise ConfigError(str(path), [mistake])
    content = read_mapping(path)
    names = content.pop("include", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        fix = "Write `include: base.yaml`, or a list of files"
        raise ConfigError(str(path), [Mistake("include", "it does not name files", fix)])
    base: dict[str, Any] = {}
    for name in names:
        included = here.parent / os.path.expanduser(name)
        if not included.is_file():
            fix = "Correct the path, which is relative to the file that includes it"
            raise ConfigError(str(path), [Mistake("include", f"{included} is no file", fix)])
        inner = _read(included, (*above, here))
        if (folder := included.resolve().parent) != here.parent:
            resolve_paths(inner, folder, seen_from=here.parent)
        base = merged(base, inner)
    return merged(base, content) if base else content
