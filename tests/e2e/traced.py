"""Program: run a job inline and write the functions of the product that groups and versions passed through.

`python traced.py JOB_FILE OUT` writes `{"passed": {path: [function, …]}, "called": [path, …]}` to OUT; paths
lie below the project. A function is passed if an argument mentions the name of a group, or the tag of a
version that a step has made.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from areal_async import run
from areal_async.base.versions import VersionTag
from tests.imports import PACKAGES, ROOT

GROUP = re.compile(r"\b[0-9a-f]{8}:\d+:\d+#\d+")
PRODUCT = tuple(f"{ROOT}/{package}/" for package in PACKAGES)
DEPTH, WIDTH, LONG = 4, 40, 4000
MOST_CALLS = 400
"""Calls of a function that are looked at, so that a trace ends soon."""


def mentions(value: Any, depth: int = DEPTH) -> bool:
    """Tell whether `value`, or what it holds `depth` containers deep, names a group or a new version."""
    if isinstance(value, str):
        return GROUP.search(value[:LONG]) is not None
    if isinstance(value, bytes):
        return GROUP.search(value[:LONG].decode("latin-1")) is not None
    if isinstance(value, VersionTag):
        return value.version > 0
    if depth == 0 or isinstance(value, type):
        return False
    if isinstance(value, dict):
        parts = [part for item in list(value.items())[:WIDTH] for part in item]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)[:WIDTH]
    elif isinstance(value, msgspec.Struct):
        parts = [getattr(value, name, None) for name in value.__struct_fields__]
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return False
    return any(mentions(part, depth - 1) for part in parts)


class Trace:
    """A profiler of every thread that notes which functions are called and which are passed."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.passed: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PRODUCT):
            return
        function = (code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname)
        self.calls[function] += 1
        if function in self.passed or self.calls[function] > MOST_CALLS:
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        try:
            if any(mentions(frame.f_locals.get(name)) for name in arguments if name != "self"):
                self.passed.add(function)
        except RuntimeError:
            """Another thread changed a container meanwhile; the next call is looked at."""


def main(job_file: str, out: str) -> None:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        run(job_file, inline=True).wait()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    passed = defaultdict(list)
    for path, name in sorted(trace.passed):
        passed[path].append(name)
    called = sorted({path for path, _ in trace.calls})
    Path(out).write_text(json.dumps({"passed": passed, "called": called}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
