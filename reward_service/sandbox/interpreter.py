"""Python interpreters of programs, with their packages and start commands."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from reward_service.sandbox.program import PythonMissing

OFFERED = ("numpy",)
"""Packages of this project's environment that Python programs may use if the job names no environment."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables that limit numerical libraries to one thread, because they reserve memory for each
thread and a run may have only few threads."""
ASKED = """
import json, os, sys
names = ("site-packages", "dist-packages")
print(json.dumps([
    list(sys.version_info[:2]), os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    [path for path in sys.path if os.path.basename(path) in names and os.path.isdir(path)],
]))
"""
ASKED_LIMIT_S = 30.0


class PackageFolder(NamedTuple):
    """A folder of packages that Python programs may import."""

    path: str
    names: tuple[str, ...] = ()
    """Names of the packages that are visible to programs. Empty means all in the folder."""


SOURCE = "main.py"
"""Name of the program's file in the folder of its run."""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter of Python programs. Paths are absolute or relative to the folder of the run."""

    run: tuple[str, ...]
    binds: tuple[str, ...] = ()  # folders of the interpreter outside the system's folders
    env: dict[str, str] = field(default_factory=dict)
    packages: tuple[PackageFolder, ...] = ()


def open_to_all(path: str) -> bool:
    """Return whether any user may reach and execute the file."""
    real = Path(path).resolve()
    return all(part.stat().st_mode & 0o001 for part in (real, *real.parents))


@functools.cache
def python(for_others: bool = False, environment: str = "") -> Interpreter:
    """Return the Python interpreter for programs. Raises `PythonMissing` with the fix.

    With `for_others`, programs run as a user who may read only files that everybody may read. `environment`
    is an interpreter or a virtual environment.
    """
    # The interpreter is the base of a virtual environment, so programs get only the offered packages of ours.
    # A variable names packages, because jails show them in other folders.
    if environment:
        version, base, folders = _asked(environment)
        packages = [PackageFolder(folder) for folder in folders if not folder.startswith("/usr/")]
    else:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        base, packages = f"{Path(sys.base_prefix).resolve()}/bin/python{version}", []
    choice = [base, f"/usr/local/bin/python{version}", f"/usr/bin/python{version}"]
    choice += [] if environment else ["/usr/local/bin/python3", "/usr/bin/python3"]
    usable = [one for one in choice if os.path.exists(one) and (not for_others or open_to_all(one))]
    if not usable:
        why = "needs an interpreter that every user may run: none of"
        raise PythonMissing(f"python {why} {', '.join(choice)}")
    for folder in packages:
        if for_others and not open_to_all(folder.path):
            fix = f"Move {environment} to where everyone may"
            raise PythonMissing(f"{folder.path} may only be read by its owner. {fix}")
    path = os.path.realpath(usable[0])
    if not environment and path.endswith(f"python{version}"):
        packages = _offered(for_others)
    return Interpreter(
        (path, "-s", "-B", SOURCE),
        binds=() if path.startswith(("/usr/", "/bin/", "/lib")) else (str(Path(path).parents[1]),),
        env={"PYTHONHASHSEED": "0", **THREADS},
        packages=tuple(packages),
    )


@functools.cache
def _asked(environment: str) -> tuple[str, str, list[str]]:
    """Return version, interpreter and package folders of an environment. Raises `PythonMissing`."""
    place = Path(environment)
    choice = [place / "bin" / "python", place / "bin" / "python3"] if place.is_dir() else [place]
    found = next((one for one in choice if os.access(one, os.X_OK)), None)
    try:
        if found is None:
            raise OSError("there is none")
        said = subprocess.run(
            [found, "-I", "-c", ASKED], capture_output=True, timeout=ASKED_LIMIT_S, check=True
        )
        version, base, folders = json.loads(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        fix = "Name the folder of a virtual environment, or an interpreter"
        raise PythonMissing(f"{environment} is no Python environment: {error}. {fix}") from error
    return ".".join(map(str, version)), base, folders


def _offered(for_others: bool) -> list[PackageFolder]:
    """Return the folder with those of the `OFFERED` packages that are installed."""
    for folder in map(Path, sys.path):
        names = [name for one in OFFERED for name in (one, f"{one}.libs") if (folder / name).is_dir()]
        if names and folder.name in ("site-packages", "dist-packages"):
            readable = not for_others or all(open_to_all(str(folder / name)) for name in names)
            return [PackageFolder(str(folder), tuple(names))] if readable else []
    return []
