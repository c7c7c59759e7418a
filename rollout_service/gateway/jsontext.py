"""JSON that agents and models wrote, read so that whatever is made of it afterwards cannot fail.

Python's reader takes more than JSON has (NaN, numbers that become infinite, halves of surrogate pairs, which
no UTF-8 can carry), and nesting until its stack ends. What has any of that is no JSON here.
"""

from __future__ import annotations

import json
import math
from typing import Any

MOST_LEVELS = 64
"""Most objects and lists within one another; a tool's schema has a dozen."""


def loads(text: str) -> Any:
    """Raises `ValueError`."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise too_deep() from None
    check(value)
    return value


def raw_decode(text: str) -> tuple[Any, int]:
    """The value that `text` begins with, and where it ends. Raises `ValueError`."""
    try:
        value, end = _decoder.raw_decode(text)
    except RecursionError:
        raise too_deep() from None
    check(value)
    return value, end


def check(value: Any) -> None:
    """Raises `ValueError` for a decoded value that is too deep, or that has no JSON in UTF-8."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _check_text(one)
            elif isinstance(one, dict):
                for key in one:
                    _check_text(key)
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError("a number is too large")
        if not inner:
            return
        level = inner
    raise too_deep()


def too_deep() -> ValueError:
    return ValueError(f"nested more than {MOST_LEVELS} levels deep")


def _check_text(text: str) -> None:
    if not text.isascii():
        text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)
