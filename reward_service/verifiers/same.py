"""Whether a program's output is what was expected."""

from __future__ import annotations

import math


def same_output(got: bytes, expected: str, *, compare: str, tolerance: float) -> bool:
    """`compare`: `tokens`, `lines` or `exact`, as `CodeStdioArguments` describes them."""
    if compare == "exact":
        return got == expected.encode("utf-8", "replace")
    text = got.decode("utf-8", "replace")
    if compare == "lines":
        return _lines(text) == _lines(expected)
    mine, wanted = text.split(), expected.split()
    return len(mine) == len(wanted) and all(
        same_token(one, two, tolerance) for one, two in zip(mine, wanted, strict=True)
    )


def same_token(got: str, expected: str, tolerance: float) -> bool:
    """Equal, or both numbers and near each other where a decimal is expected: `3` is no `3.5`, and `7` no
    `7a`."""
    if got == expected:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    try:
        one, two = float(got), float(expected)
    except ValueError:
        return False
    return math.isclose(one, two, rel_tol=tolerance, abs_tol=tolerance)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
