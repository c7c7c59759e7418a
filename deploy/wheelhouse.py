"""Wheels for a machine without a network: what it lacks that has Python, torch and transformers.

    python deploy/wheelhouse.py collect FOLDER [--python 3.12]
    python deploy/wheelhouse.py check FOLDER

`collect` (also `make wheelhouse`) downloads wheels of everything that areal-async needs beside torch,
transformers and what these bring along, in the versions of `constraints.txt`; `--python` chooses whose Python
they suit, that of this interpreter otherwise. pyarrow is left out: it is as large as all others together, and
only task files in parquet and exports of episodes need it.

`check` makes an environment that sees torch, transformers and their requirements alone, installs the wheels
there without an index, imports every module and generates, trains and draws (`benchmarks/gpu.py --tiny`). Its
last line says whether the wheelhouse works.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
THERE = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface-hub", "hf-xet")
LEFT_OUT = ("pyarrow",)
MOST_BYTES = 60_000_000
TRIED = ("train-none", "decode", "update", "quickstart")
"""The parts of `benchmarks/gpu.py` that `check` runs."""
IMPORT_ALL = """
import importlib, pkgutil, sys
failed = []
for name in ("areal_async", "rollout_service", "replay_buffer", "reward_service", "trainer_service"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "pyarrow":
                    failed.append(f"{module.name}: {error}")
print("\\n".join(failed) or "every module can be imported")
sys.exit(bool(failed))
"""


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
    command += ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder)]
    command += ["--python-version", python] if python else []
    subprocess.run([*command, *wanted()], check=True)
    wheels = sorted(folder.glob("*.whl"), key=lambda path: -path.stat().st_size)
    size = sum(path.stat().st_size for path in wheels)
    for path in wheels[:8]:
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")
    print(f"{size / 1e6:6.1f} MB  in {len(wheels)} wheels in {folder}")
    return 0 if size < MOST_BYTES else 1


def check(folder: Path) -> int:
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        print(f"There are no wheels in {folder}: collect them with make wheelhouse.")
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        seen = root / "seen"
        seen.mkdir()
        for name in sorted(closure(["torch", "transformers"])):
            for path in metadata.distribution(name).files or ():
                top = path.parts[0]
                source = Path(str(metadata.distribution(name).locate_file(top)))
                if top not in ("..", "__pycache__") and not (seen / top).exists():
                    (seen / top).symlink_to(source)
        subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
        python = root / "venv" / "bin" / "python"
        site = subprocess.run(
            [python, "-c", "import site; print(site.getsitepackages()[0])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        Path(site, "seen.pth").write_text(f"{seen}\n")
        environment = {name: value for name, value in os.environ.items() if not re.match("PIP_|PYTHON", name)}
        environment["PIP_NO_INDEX"] = "1"
        bare = subprocess.run(
            [python, "-c", "import msgspec"], env=environment, capture_output=True, check=False
        )
        if bare.returncode == 0:
            print("the environment is not bare: it sees msgspec")
            return 1
        target = root / "packages"
        pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target]
        if subprocess.run([*pip, *wheels], env=environment, check=False).returncode:
            print(f"The wheels in {folder} cannot be installed with Python {platform.python_version()}.")
            return 1
        told = environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{target}"}
        done = subprocess.run([python, "-c", IMPORT_ALL], env=told, check=False)
        if done.returncode:
            print(f"{folder} lacks what the modules above need: collect it anew with make wheelhouse.")
            return done.returncode
        out = root / "out"
        command = [python, ROOT / "benchmarks" / "gpu.py", "--device", "cpu", "--tiny", "--minutes", "8"]
        command += ["--parts", ",".join(TRIED), "--out", out, "--wheelhouse", folder]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                if not line.endswith("are written\n"):  # into a folder that is gone when this ends
                    print(line, end="", flush=True)
        parts = json.loads((out / "gpu.json").read_text())["parts"] if (out / "gpu.json").exists() else {}
    status, told = verdict(wheels, parts, drawn=run.returncode == 0)
    print(told)
    return status


def verdict(wheels: list[Path], parts: dict[str, Any], *, drawn: bool) -> tuple[int, str]:
    """The exit status of `check` and its closing sentence, by what became of the parts of `gpu.py`."""
    failed = [
        f"{name} ({found.get('error') or found['status']})"
        for name in ("model", *TRIED)
        if (found := parts.get(name, {"status": "not begun"}))["status"] != "ok"
    ]
    if failed or not drawn:
        return 1, f"The wheelhouse does not suffice: {', '.join(failed or ['the picture'])} did not work."
    size = sum(path.stat().st_size for path in wheels)
    return 0, (
        f"The wheelhouse works: beside torch and transformers, its {len(wheels)} wheels ({size / 1e6:.1f} MB)"
        " are all that areal-async needs to generate, train, update an engine and run the quickstart."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("collect", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", help="version of the other machine's Python, such as 3.12")
    options = parser.parse_args()
    return collect(options.folder, options.python) if options.what == "collect" else check(options.folder)


if __name__ == "__main__":
    sys.exit(main())
