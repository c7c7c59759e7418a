"""Whether a function's result is the one that was expected."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def same_result(got: Any, expected: Any, tolerance: float, *, wrapped: bool) -> bool:
    """`got` is a plain value. What is given out piece by piece (an iterator, the keys of a dictionary) is
    compared as a list. `wrapped`: the data set puts every result into a list of its own, which a program may
    leave out."""
    if hasattr(type(got), "__next__") or isinstance(got, VIEWS):
        got = list(got)
    if wrapped and same_value(got, expected[0], tolerance):
        return True
    return same_value(got, expected, tolerance)


def same_value(got: Any, expected: Any, tolerance: float) -> bool:
    """Whether content and kind agree. `expected` comes from JSON, which has no tuples: these count as lists,
    and nothing else does. An integer is exact, a decimal is met up to `tolerance`, relative or absolute; True
    is no 1. Keys of a dictionary keep their types."""
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        return _same_number(got, expected, tolerance)
    if isinstance(expected, list):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(same_value(one, two, tolerance) for one, two in zip(got, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(got, dict) or len(got) != len(expected):
            return False
        typed = {(type(key), key): one for key, one in got.items()}  # else Python takes True and 1.0 for 1
        wanted = {(type(key), key): one for key, one in expected.items()}
        return typed.keys() == wanted.keys() and all(
            same_value(typed[key], wanted[key], tolerance) for key in wanted
        )
    return type(got) is type(expected) and bool(got == expected)


def _same_number(got: float, expected: float, tolerance: float) -> bool:
    if got == expected or (got != got and expected != expected):
        return True
    if isinstance(expected, int):
        return False
    try:
        error = abs(float(got) - expected)
        return error <= tolerance * max(1.0, abs(float(got)), abs(expected)) < float("inf")
    except OverflowError:  # an integer beyond every float
        return False
