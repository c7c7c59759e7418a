"""Execution of a user's file, for parts named `path.py:name`.

This module imports nothing heavy, because a scoring process loads its reward through it
(`reward_service/pool/worker.py`)."""

from __future__ import annotations

import sys
import traceback
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from areal_async.base.errors import ArealError


def run_user_file(
    path: Path, *, kind: str, name: str, error: type[ArealError], source: bytes | None = None
) -> ModuleType:
    """Import the file at `path` as a separate module and return it. This runs the file's code.

    The file's folder is added to the import path, so that the file may import modules beside it. `kind` is
    the kind of part in the job (`reward`, `workflow`) and `name` its name there. `error` is raised with both
    in its text if the file is missing or raises an exception. With `source`, run that text instead of the
    file's text."""
    what = f"the {kind} {name!r}"
    if source is None and not path.is_file():
        raise error(f"{what}: there is no file {path}. Check it in the job file.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loader = SourceFileLoader(f"areal_{kind}_{path.stem}", str(path))
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=str(path)))
    module.__file__ = str(path)
    # Dataclasses and msgspec look up their module by name while they are defined.
    sys.modules[module.__name__] = module
    try:
        code = compile(path.read_bytes() if source is None else source, str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except (Exception, SystemExit) as raised:
        frames = traceback.extract_tb(raised.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = own[-1] if own else getattr(raised, "lineno", None)
        where = f" at line {line}" if line else ""
        said = f"{type(raised).__name__}: {raised}"
        raise error(f"{what}: {path} failed while it was imported{where}: {said}") from raised
    return module
