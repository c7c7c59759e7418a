"""Wheels for a machine without a network: what it lacks that has Python, torch and transformers.

    python deploy/wheelhouse.py FOLDER [--python 3.12]

`make wheelhouse` does it: wheels are downloaded of everything that areal-async needs beside torch,
transformers and what these bring along, in the versions of `constraints.txt` and checked against
`hashes.txt` where that is for this Python; `--python` chooses whose Python they suit, that of this
interpreter otherwise. pyarrow is left out: it is as large as all others
together, and only task files in parquet and exports of episodes need it. `make wheelhouse-check` tries
them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
THERE = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface-hub", "hf-xet")
LEFT_OUT = ("pyarrow",)
MOST_BYTES = 60_000_000


def closure(names: list[str], *, deep: bool = True) -> set[str]:
    """Canonical names of packages and, with `deep`, of all that they require here."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in found:
            continue
        found.add(name)
        for text in (metadata.requires(name) or ()) if deep else ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return found


def wanted() -> list[str]:
    """Names of the packages whose wheels are collected."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = closure([Requirement(text).name for text in project["dependencies"] if not _is(text, LEFT_OUT)])
    brought = closure(["torch"]) | closure([*THERE], deep=False)
    return sorted(needed - brought)


def _is(text: str, names: tuple[str, ...]) -> bool:
    return canonicalize_name(Requirement(text).name) in names


def collect(folder: Path, python: str | None) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), *(["--python-version", python] if python else [])]
    if why := pins.unchecked(python):
        print(why)
        command += ["--constraint", str(ROOT / "constraints.txt"), *wanted()]
        lines = []
    else:
        of_name = {line.partition("==")[0]: line for line in pins.locked(ROOT, "dev")}
        lines = [of_name[name] for name in wanted()]
        command += ["--require-hashes", "--requirement", "/dev/stdin"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    wheels = sorted(folder.glob("*.whl"), key=lambda path: -path.stat().st_size)
    size = sum(path.stat().st_size for path in wheels)
    for path in wheels[:8]:
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")
    print(f"{size / 1e6:6.1f} MB  in {len(wheels)} wheels in {folder}")
    return 0 if size < MOST_BYTES else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", help="version of the other machine's Python, such as 3.12")
    options = parser.parse_args()
    return collect(options.folder, options.python)


if __name__ == "__main__":
    sys.exit(main())
