"""Whether a wheelhouse suffices: `make wheelhouse-check`, or this program with the folder.

It makes an environment that sees torch, transformers and their requirements alone, installs the wheels there
without an index, imports every module and runs `areal-async gpu check --tiny` on the CPU. The last
line says whether the wheelhouse works.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))

from wheelhouse import closure  # noqa: E402, the collecting program

TRIED = ("machine", "logprobs", "steps", "local")
"""The parts of `areal-async gpu check` that `check` runs: the last is a job with the local engine."""
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
        ask = [python, "-c", "import site; print(site.getsitepackages()[0])"]
        site = subprocess.check_output(ask, text=True).strip()
        Path(site, "seen.pth").write_text(f"{seen}\n")
        environment = {name: value for name, value in os.environ.items() if not re.match("PIP_|PYTHON", name)}
        environment["PIP_NO_INDEX"] = "1"
        ask = [python, "-c", "import msgspec"]
        if subprocess.run(ask, env=environment, capture_output=True, check=False).returncode == 0:
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
        command = [python, "-m", "areal_async", "gpu", "check", "--device", "cpu", "--tiny", "--json"]
        command += ["--minutes", "8", "--parts", ",".join(TRIED)]
        done = subprocess.run(command, env=told, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
        parts = json.loads(done.stdout)["parts"] if done.stdout else {}
    status, told = verdict(wheels, parts)
    print(told)
    return status


def verdict(wheels: list[Path], parts: dict[str, Any]) -> tuple[int, str]:
    """The exit status of `check` and its closing sentence, by the outcomes of the parts."""
    failed = [
        f"{name} ({found.get('why') or found['status']})"
        for name in TRIED
        if (found := parts.get(name, {"status": "not begun"}))["status"] != "ok"
    ]
    if failed:
        return 1, f"The wheelhouse does not suffice: {', '.join(failed)} did not work."
    size = sum(path.stat().st_size for path in wheels)
    return 0, (
        f"The wheelhouse works: beside torch and transformers, its {len(wheels)} wheels ({size / 1e6:.1f} MB)"
        " are all that areal-async needs to generate, train and update an engine."
    )


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[1])))
