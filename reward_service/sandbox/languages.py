"""Languages that programs may be written in, and how each is compiled and run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from reward_service.sandbox.program import CompilerMissing, RunLimits

COMPILE_LIMITS = RunLimits(
    wall_s=40.0, cpu_s=30.0, address_space=False, processes=64, open_files=512, output_kb=64
)
HARNESS_PYTHON = "harness-python"
"""The interpreter of Python programs that runs our own `sandbox.harness`. It imports nothing from the folder
of the run, and runs no installed code before it begins."""


OFFERED = ("numpy",)
"""Packages of our own environment that Python programs can use if no environment is named."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Numerical libraries reserve memory for each thread, and a run has few."""
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
    """Packages in it that are shown; all of them if empty."""


@dataclass(frozen=True)
class Language:
    """The way from a source to a run. Paths are relative to the folder of the run."""

    name: str
    source: str  # File that the source is written to
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()  # What compiling leaves and running needs
    binds: tuple[str, ...] = ()  # Folders outside the system's that hold the compiler or runtime
    env: dict[str, str] = field(default_factory=dict)
    address_space: bool = True
    processes: int = 0  # Least limit that the runtime itself needs
    packages: tuple[PackageFolder, ...] = ()

    def adapted(self, limits: RunLimits) -> RunLimits:
        return msgspec.structs.replace(
            limits,
            address_space=limits.address_space and self.address_space,
            processes=max(limits.processes, self.processes),
        )


def language(name: str, *, for_others: bool = False, environment: str = "") -> Language:
    """Return the language. `for_others` means that a user with no special read rights runs it. `environment`
    is an interpreter or a virtual environment for Python. Raises CompilerMissing, which says what to
    install."""
    found = spoken_by(name)
    if found == HARNESS_PYTHON:
        python = _python(for_others, environment)
        return replace(python, run=(python.run[0], "-I", "-S", "-B", python.source))
    if found not in LANGUAGES:
        raise CompilerMissing(f"{name!r} is no language of the sandbox: it knows {', '.join(LANGUAGES)}")
    if found == "python":
        return _python(for_others, environment)
    spoken = LANGUAGES[found]()
    for program in (spoken.run[0], *spoken.compile[:1]):
        if for_others and program.startswith("/") and not open_to_all(program):
            why = "which only its owner may read. Install it under /usr"
            raise CompilerMissing(f"{name} needs {program}, {why}")
    return spoken


def open_to_all(path: str) -> bool:
    """Return whether any user may reach and run it."""
    real = Path(path).resolve()
    return all(part.stat().st_mode & 0o001 for part in (real, *real.parents))


def installed() -> list[str]:
    """Names of the languages that can be run here."""
    names = []
    for name in LANGUAGES:
        with contextlib.suppress(CompilerMissing):
            names.append(language(name).name)
    return names


def _found(names: tuple[str, ...], needed_for: str) -> str:
    for name in names:
        path = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:" + os.environ.get("PATH", ""))
        if path is not None:
            return os.path.realpath(path)
    raise CompilerMissing(f"{needed_for} needs {' or '.join(names)}, which is not installed here")


def _prefix(path: str) -> tuple[str, ...]:
    """Return the folder to show in a jail for a program outside the system folders."""
    if path.startswith(("/usr/", "/bin/", "/lib")):
        return ()
    return (str(Path(path).parents[1]),)


@functools.cache
def _python(for_others: bool = False, environment: str = "") -> Language:
    # The interpreter beneath a virtual environment: of our packages programs get those that are offered. A
    # variable names packages, since jails show them at places of their own.
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
        raise CompilerMissing(f"python {why} {', '.join(choice)}")
    for folder in packages:
        if for_others and not open_to_all(folder.path):
            fix = f"Move {environment} to where everyone may"
            raise CompilerMissing(f"{folder.path} may only be read by its owner. {fix}")
    path = os.path.realpath(usable[0])
    if not environment and path.endswith(f"python{version}"):
        packages = _offered(for_others)
    return Language(
        "python",
        "main.py",
        (path, "-s", "-B", "main.py"),
        binds=_prefix(path),
        env={"PYTHONHASHSEED": "0", **THREADS},
        packages=tuple(packages),
    )


@functools.cache
def _asked(environment: str) -> tuple[str, str, list[str]]:
    """Version, interpreter and package folders of an environment. Raises CompilerMissing."""
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
        raise CompilerMissing(f"{environment} is no Python environment: {error}. {fix}") from error
    return ".".join(map(str, version)), base, folders


def _offered(for_others: bool) -> list[PackageFolder]:
    """Return the folder with our own packages that are offered and installed."""
    for folder in map(Path, sys.path):
        names = [name for one in OFFERED for name in (one, f"{one}.libs") if (folder / name).is_dir()]
        if names and folder.name in ("site-packages", "dist-packages"):
            readable = not for_others or all(open_to_all(str(folder / name)) for name in names)
            return [PackageFolder(str(folder), tuple(names))] if readable else []
    return []


def _native(name: str, source: str, compilers: tuple[str, ...], *flags: str) -> Language:
    compiler = _found(compilers, name)
    command = (compiler, "-o", "program", source, "-O1", "-w", *flags)
    return Language(name, source, ("./program",), command, ("program",), binds=_prefix(compiler))


STACK_KB = 120 << 10
"""Stack of Node.js, which keeps a limit of its own."""


def _javascript() -> Language:
    path = _found(("node", "nodejs"), "javascript")
    command = (path, "--max-old-space-size=384", f"--stack-size={STACK_KB}", "main.js")
    return Language("javascript", "main.js", command, binds=_prefix(path), address_space=False, processes=24)


LANGUAGES: dict[str, Callable[[], Language]] = {
    "python": _python,
    "c": lambda: _native("c", "main.c", ("gcc", "cc", "clang"), "-std=gnu11", "-lm"),
    "cpp": lambda: _native("cpp", "main.cpp", ("g++", "c++", "clang++"), "-std=gnu++17"),
    "javascript": _javascript,
}
_ALIASES = {
    "python": "py pypy cpython",
    "cpp": "c++ cc cxx gnu++",
    "javascript": "js mjs es ecmascript node nodejs",
}
ALIASES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
VERSION = re.compile(r"[-_.]?\d[\d.]*$")


def spoken_by(tag: str) -> str:
    """Return the language that a name, with a version or not, or a file name stands for (`Python3.11`,
    `c++17`, `main.py`); another tag as it is, in small letters."""
    tag = tag.lower()
    plain = VERSION.sub("", tag) or tag
    ending = plain.rpartition(".")[2]
    return ALIASES.get(ending, ending if ending in LANGUAGES else tag)
