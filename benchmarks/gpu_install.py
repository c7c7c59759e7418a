"""Install commands of a GPU user, resolved for CUDA on Linux without a GPU: wheels, sizes and requirements.

    python benchmarks/gpu_install.py [--out benchmarks/results/gpu_install.json]

Each command of `COMMANDS` is resolved by `pip install --dry-run`, which downloads metadata alone. `--out`
gets the wheels and the sizes of their files. The requirements that the pinned wheels declare are written to
`tests/deploy/wheels.json`, with which tests compare the locks and the version matrix. Nothing is installed,
and no figure here is of a GPU. It needs CPython 3.11 on x86-64 Linux and the network, and takes minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "deploy"))
import pins  # type: ignore[import-not-found] # noqa: E402

WHEELS = ROOT / "tests" / "deploy" / "wheels.json"
COMMANDS: Mapping[str, str] = {
    "make install-gpu": "cuda",
    "make engines-gpu ENGINE=sglang": "sglang-cuda",
    "make engines-gpu ENGINE=vllm": "vllm-cuda",
    "docker build --target trainer": "cuda-image",
    "pip install '.[cuda]' --constraint deploy/cuda/constraints.txt": "",
    "pip install 'areal-async[cuda]'": "",
}
"""Command → the set of `deploy/pins.py` that it installs, or empty if pip resolves it when it runs. This
checkout stands for the package `areal-async`."""
ENVIRONMENT = {
    "python_version": "3.11",
    "python_full_version": "3.11.13",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}


def resolve(python: Path, command: str) -> list[dict[str, Any]]:
    """Return pip's report on the files of a command."""
    if name := COMMANDS[command]:
        below, wanted = pins.SETS[name]
        return pins.resolved(python, "--constraint", f"{below}/constraints.txt", *wanted)
    words = shlex.split(command.replace("areal-async[", ".["))[2:]
    return pins.resolved(python, *words)


def requirements(reports: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, list[str]]:
    """Return the requirements of each wheel, by `name==version`. Requirements for other platforms and for
    extras that nothing asks for are left out. `wanted` are the requirements of the set itself."""
    extras: dict[str, set[str]] = defaultdict(lambda: {""})
    declared = {canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in reports}
    needed: dict[str, list[str]] = {}
    queue = [Requirement(text) for text in wanted]
    seen: set[tuple[str, str]] = set()
    while queue:
        asked = queue.pop()
        name = canonicalize_name(asked.name)
        for extra in {"", *asked.extras}:
            if name in declared and (name, extra) not in seen:
                seen.add((name, extra))
                extras[name].add(extra)
                queue += applying(declared[name], {extra})
    for name, metadata in declared.items():
        lines = {f"{r.name}{_extras(r)}{r.specifier}" for r in applying(metadata, extras[name])}
        needed[f"{name}=={metadata['version']}"] = sorted(lines)
    return dict(sorted(needed.items()))


def applying(metadata: Mapping[str, Any], extras: set[str]) -> list[Requirement]:
    """Return the requirements of a wheel that apply to `ENVIRONMENT` with these extras."""
    found = map(Requirement, metadata.get("requires_dist", ()))
    contexts = [ENVIRONMENT | {"extra": extra} for extra in extras]
    return [one for one in found if one.marker is None or any(map(one.marker.evaluate, contexts))]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def roots(name: str) -> list[str]:
    """Return what pip is asked for a set, as requirements of packages."""
    words = [word for word in pins.SETS[name][1] if not word.startswith("-")]
    return [word.replace(".[", "areal-async[") for word in words]


def size_bytes(url: str) -> int:
    if url.startswith("file:"):
        return Path(url.removeprefix("file://")).stat().st_size
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_install.json")
    options = parser.parse_args()
    if why := pins.unchecked():
        sys.exit(why)
    found: dict[str, list[dict[str, Any]]] = {}
    with pins.newest_pip() as python:
        for command in COMMANDS:
            found[command] = resolve(python, command)
            print(f"{len(found[command])} files  {command}", flush=True)
    urls = sorted({each["download_info"]["url"] for reports in found.values() for each in reports})
    with ThreadPoolExecutor(8) as pool:
        sizes = dict(zip(urls, pool.map(size_bytes, urls), strict=True))
    locks: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for command, name in COMMANDS.items():
        if name:
            own = {"metadata": _project()} if "." in "".join(pins.SETS[name][1]) else None
            reports = [*found[command], *([own] if own else [])]
            needed = requirements(reports, roots(name))
            needed.pop(f"areal-async=={_project()['version']}", None)
            for pin, lines in needed.items():
                its = locks[pins.SETS[name][0]]
                its[pin] = sorted({*its.get(pin, ()), *lines})
    _write(WHEELS, {folder: dict(sorted(its.items())) for folder, its in locks.items()})
    _write(options.out, {command: _listed(reports, sizes) for command, reports in found.items()})


def _project() -> dict[str, Any]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra, lines in project["optional-dependencies"].items():
        asked += [f'{line}; extra == "{extra}"' for line in lines]
    return {"name": project["name"], "version": project["version"], "requires_dist": asked}


def _listed(reports: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> dict[str, Any]:
    urls = [each["download_info"]["url"] for each in reports]
    files = {unquote(url.rpartition("/")[2]): sizes[url] for url in urls}
    ordered = dict(sorted(files.items(), key=lambda item: -item[1]))
    return {"files": len(files), "gb": round(sum(files.values()) / 1e9, 2), "bytes": ordered}


def _write(path: Path, content: Mapping[str, Mapping[str, Any]]) -> None:
    """Write one line for each entry of the second level."""
    parts = []
    for name, its in content.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in its.items()]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
