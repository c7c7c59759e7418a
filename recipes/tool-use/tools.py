"""A pocket calculator: two numbers at a time."""

import re

from areal_async import tool

TWO_NUMBERS = re.compile(r"(-?\d{1,9})([-+*])(\d{1,9})")


@tool(inline=True)
def calc(expression: str) -> str:
    """Add, subtract or multiply two whole numbers."""
    found = TWO_NUMBERS.fullmatch(expression)
    if found is None:
        raise ValueError("two numbers and one of + - * are needed")
    left, right = int(found[1]), int(found[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[found[2]])
