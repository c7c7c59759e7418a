"""Languages that programs may be written in, and how each is compiled and run."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from reward_service.sandbox.program import CompilerMissing, RunLimits

COMPILE_LIMITS = RunLimits(
    wall_s=40.0, cpu_s=30.0, address_space=False, processes=64, open_files=512, output_kb=64
)
HARNESS_PYTHON = "harness-python"
"""The interpreter of Python programs for our own `sandbox.harness`: it imports nothing from the folder of the
run, and runs nothing of what is installed beside it before it begins."""


@dataclass(frozen=True)
class Language:
    """How to get from a source to a run. Paths are relative to the folder of the run."""

    name: str
    source: str  # File that the source is written to
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()  # What compiling leaves and running needs
    binds: tuple[str, ...] = ()  # Folders outside the system's that hold the compiler or runtime
    env: dict[str, str] = field(default_factory=dict)
    address_space: bool = True
    processes: int = 0  # Least limit that the runtime itself needs

    def adapted(self, limits: RunLimits) -> RunLimits:
        return msgspec.structs.replace(
            limits,
            address_space=limits.address_space and self.address_space,
            processes=max(limits.processes, self.processes),
        )


def language(name: str, *, for_others: bool = False) -> Language:
    """`for_others`: to be run by a user who may read what everyone may. Raises CompilerMissing, which says
    what to install."""
    found = spoken_by(name)
    if found == HARNESS_PYTHON:
        python = _python(for_others)
        return replace(python, run=(python.run[0], "-I", "-S", "-B", python.source))
    if found not in LANGUAGES:
        raise CompilerMissing(f"{name!r} is no language of the sandbox: it knows {', '.join(LANGUAGES)}")
    if found == "python":
        return _python(for_others)
    spoken = LANGUAGES[found]()
    for program in (spoken.run[0], *spoken.compile[:1]):
        if for_others and program.startswith("/") and not open_to_all(program):
            raise CompilerMissing(
                f"{name} needs {program}, which only its owner may read. Install it under /usr"
            )
    return spoken


def open_to_all(path: str) -> bool:
    """Whether any user may reach and run it."""
    real = Path(path).resolve()
    return all(part.stat().st_mode & 0o001 for part in (real, *real.parents))


def installed() -> list[str]:
    """Names of the languages that can be run here."""
    names = []
    for name in LANGUAGES:
        try:
            language(name)
        except CompilerMissing:
            continue
        names.append(name)
    return names


def _found(names: tuple[str, ...], needed_for: str) -> str:
    for name in names:
        path = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:" + os.environ.get("PATH", ""))
        if path is not None:
            return os.path.realpath(path)
    raise CompilerMissing(f"{needed_for} needs {' or '.join(names)}, which is not installed here")


def _prefix(path: str) -> tuple[str, ...]:
    """The folder to show in a jail for a program outside the system folders."""
    if path.startswith(("/usr/", "/bin/", "/lib")):
        return ()
    return (str(Path(path).parents[1]),)


@functools.cache
def _python(for_others: bool = False) -> Language:
    # The interpreter beneath a virtual environment: programs get the standard library, and nothing of ours.
    base = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    choice = [str(base / "bin" / version), "/usr/local/bin/python3", "/usr/bin/python3"]
    usable = [one for one in choice if os.path.exists(one) and (not for_others or open_to_all(one))]
    if not usable:
        raise CompilerMissing(
            f"python needs an interpreter that every user may run: none of {', '.join(choice)}"
        )
    path = os.path.realpath(usable[0])
    return Language(
        "python",
        "main.py",
        (path, "-E", "-s", "-B", "main.py"),
        binds=_prefix(path),
        env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
    )


def _native(name: str, source: str, compilers: tuple[str, ...], *flags: str) -> Language:
    compiler = _found(compilers, name)
    command = (compiler, "-o", "program", source, "-O1", "-w", *flags)
    return Language(name, source, ("./program",), command, ("program",), binds=_prefix(compiler))


@functools.cache
def _c() -> Language:
    return _native("c", "main.c", ("gcc", "cc", "clang"), "-std=gnu11", "-lm")


@functools.cache
def _cpp() -> Language:
    return _native("cpp", "main.cpp", ("g++", "c++", "clang++"), "-std=gnu++17")


STACK_KB = 120 << 10
"""Stack of Node.js, which keeps a limit of its own."""


@functools.cache
def _javascript() -> Language:
    path = _found(("node", "nodejs"), "javascript")
    return Language(
        "javascript",
        "main.js",
        (path, "--max-old-space-size=384", f"--stack-size={STACK_KB}", "main.js"),
        binds=_prefix(path),
        address_space=False,
        processes=24,
    )


LANGUAGES: dict[str, Callable[[], Language]] = {
    "python": _python,
    "c": _c,
    "cpp": _cpp,
    "javascript": _javascript,
}
ALIASES = {
    "py": "python",
    "pypy": "python",
    "cpython": "python",
    "c++": "cpp",
    "cc": "cpp",
    "cxx": "cpp",
    "gnu++": "cpp",
    "js": "javascript",
    "mjs": "javascript",
    "es": "javascript",
    "ecmascript": "javascript",
    "node": "javascript",
    "nodejs": "javascript",
}
VERSION = re.compile(r"[-_.]?\d[\d.]*$")


def spoken_by(tag: str) -> str:
    """Return the language that a name, with a version or not, or a file name stands for (`Python3.11`,
    `c++17`, `main.py`); another tag as it is, in small letters."""
    tag = tag.lower()
    plain = VERSION.sub("", tag) or tag
    ending = plain.rpartition(".")[2]
    return ALIASES.get(ending, ending if ending in LANGUAGES else tag)
