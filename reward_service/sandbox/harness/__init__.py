"""The tests and the tested program, each in a jail of its own, connected by one link (`Sandbox.run_pair`).

    examiner.py    beside the tests: runs them, queries the program over the link, reports which pass
    candidate.py   beside the program: executes the examiner's requests
    plain.py       beside both: plain data and its encoding, the messages of the link

Only plain data crosses the link. From each message of the program, the examiner creates a new value of a
built-in Python type. The operations of the tests (`==`, `<`, `in`, `len`, use as a condition) act on that
value, not on the object of the program. With its end of the link, the program can return data, raise one of
Python's exceptions, call functions of the tests, or break the link. After a break, every further test fails.
The code and the expected values of the tests are never on the program's side.

The modules are copied into the jails as files, so they import each other relatively. They use little of the
standard library, so that the two interpreters for each tested program start quickly.
"""

from __future__ import annotations

import functools
from pathlib import Path

HERE = Path(__file__).parent
START = """\
import os, sys
sys.path.insert(0, os.getcwd())
from harness import {side}
sys.path.remove(os.getcwd())
{side}.main()
"""
"""Code that one side's interpreter runs first. After this code, nothing more is imported from the folder of
the run."""


@functools.cache
def files_of(side: str) -> dict[str, bytes]:
    """Return the files of one side, `examiner` or `candidate`, by their paths in its jail."""
    modules = {f"harness/{name}.py": (HERE / f"{name}.py").read_bytes() for name in ("plain", side)}
    return {"harness/__init__.py": b"", **modules}
