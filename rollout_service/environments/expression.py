"""The value of a written expression of numbers, exactly and without running it as Python."""

from __future__ import annotations

import ast
from fractions import Fraction

LONGEST = 200
"""Most characters of an expression."""
MOST_DIGITS = 60
"""Most digits of a value on the way: products of long numbers end there."""
NUMBERS = frozenset("0123456789.")


class ExpressionError(ValueError):
    """What was written has no value; the text says why, in words a model can read."""


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """(value, the numbers used in order) of an expression of `+ - * /`, brackets and decimals.

    Raises `ExpressionError`."""
    if len(text) > LONGEST:
        raise ExpressionError(f"longer than {LONGEST} characters")
    text = text.strip().replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("not an expression") from None
    used: list[Fraction] = []
    return _value(tree.body, used, text), used


def written(value: Fraction, decimals: int = 10) -> str:
    """A whole number as such, else a decimal, rounded to so many places."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = f"{abs(round(value * 10**decimals)):0{decimals + 1}d}"
    whole, part = digits[:-decimals], digits[-decimals:].rstrip("0")
    sign = "-" if value < 0 and (whole != "0" or part) else ""
    return f"{sign}{whole}.{part}" if part else f"{sign}{whole}"


def _value(node: ast.expr, used: list[Fraction], text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            # As it was written: 0.1 is a tenth here, not the float next to it.
            source = ast.get_source_segment(text, node) or ""
            exact = Fraction(source) if source and set(source) <= NUMBERS else Fraction(number)
            used.append(_bounded(exact))
            return exact
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value = _value(inner, used, text)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_apply(operator, _value(left, used, text), _value(right, used, text)))
    raise ExpressionError("only numbers, + - * / and brackets are understood")


def _apply(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            if right == 0:
                raise ExpressionError("division by zero")
            return left / right
    raise ExpressionError("only + - * / are understood")


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MOST_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise ExpressionError("the numbers are too long")
    return value
