"""Tests against a program, each in a jail of its own, joined by one link (`Sandbox.run_pair`).

    examiner.py    beside the tests: runs them, asks the program over the link, says what passed
    candidate.py   beside the program: does what the examiner asks
    plain.py       beside both: plain data and its encoding, the messages of the link

What crosses the link is plain data: whatever the program sends becomes a value of one of Python's own types,
made anew by the examiner, and the tests' questions (`==`, `<`, `in`, `len`, truth) are answered by it. The
program's side may do what it likes with its end of the link; it can return data, raise one of Python's
exceptions, call functions that tests have handed it, or break the link, which fails every test from there
on. Texts and expected values of the tests are never on its side.

The modules are laid into the jails as files. They import each other relatively and of the standard library
little, since every test of a program starts two interpreters.
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
"""Text that a side's interpreter runs: nothing is imported from its folder afterwards."""


@functools.cache
def files_of(side: str) -> dict[str, bytes]:
    """Return the files of the `examiner` or the `candidate`, by their paths in its jail."""
    modules = {f"harness/{name}.py": (HERE / f"{name}.py").read_bytes() for name in ("plain", side)}
    return {"harness/__init__.py": b"", **modules}
