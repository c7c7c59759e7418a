"""Tests against a program, each in its own jail, joined by one link (`Sandbox.run_pair`).

    examiner.py    beside the tests: runs them, queries the program over the link, reports which pass
    candidate.py   beside the program: executes the examiner's requests
    plain.py       beside both: plain data and its encoding, the messages of the link

Only plain data crosses the link. The examiner creates a new value of a built-in Python type from each message
of the program. The tests' operations (`==`, `<`, `in`, `len`, truth) act on that value. The program's side
controls its end of the link. It can return data, raise one of Python's exceptions, call functions of the
tests, or break the link. After a break every further test fails. Texts and expected values of the tests are
never on the program's side.

The modules are copied into the jails as files. They import each other relatively and use little of the
standard library, because every test of a program starts two interpreters.
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
"""Program of one side's interpreter. After it, nothing is imported from its folder."""


@functools.cache
def files_of(side: str) -> dict[str, bytes]:
    """Return the files of the `examiner` or the `candidate`, by their paths in its jail."""
    modules = {f"harness/{name}.py": (HERE / f"{name}.py").read_bytes() for name in ("plain", side)}
    return {"harness/__init__.py": b"", **modules}
