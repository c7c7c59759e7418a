"""Expressions of numbers, exactly: what the tool `calc` computes and what `countdown` reads.

workflow_args: {tools: [examples/environments/expressions.py:calc]}
"""

from __future__ import annotations

import ast
import warnings
from fractions import Fraction

from areal_async import tool

LONGEST = 200  # Most characters of an expression
DECIMAL = frozenset("0123456789.")
MOST_BITS = 256  # Most bits of a value on the way: products of long numbers end there


class ExpressionError(ValueError):
    """What was written has no value; the text says why, in words a model can read."""


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """(value, the numbers used in order) of an expression of `+ - * /`, brackets and decimals.

    Raises `ExpressionError`."""
    if len(text) > LONGEST:
        raise ExpressionError(f"longer than {LONGEST} characters")
    text = text.strip().replace("×", "*").replace("÷", "/").replace("−", "-")
    used: list[Fraction] = []
    try:
        return _value(parsed(text), used, text), used
    except ExpressionError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("not an expression") from None


def parsed(text: str) -> ast.expr:
    """The syntax tree of an expression. Raises what `ast.parse` does; its warnings about bad style are for
    people who write programs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def _value(node: ast.expr, used: list[Fraction], text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            # As it was written: 0.1 is a tenth here, not the float next to it.
            source = ast.get_source_segment(text, node) or ""
            exact = Fraction(source) if source and set(source) <= DECIMAL else Fraction(number)
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
        case ast.Div() if right == 0:
            raise ExpressionError("division by zero")
        case ast.Div():
            return left / right
    raise ExpressionError("only + - * / are understood")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ExpressionError("the numbers are too long")
    return value


@tool(inline=True)
def calc(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / and brackets."""
    value, decimals = evaluate(expression)[0], 10
    if value.denominator == 1:
        return str(value.numerator)
    digits = f"{abs(round(value * 10**decimals)):0{decimals + 1}d}"
    whole, part = digits[:-decimals], digits[-decimals:].rstrip("0")
    sign = "-" if value < 0 and (whole != "0" or part) else ""
    return f"{sign}{whole}.{part}" if part else f"{sign}{whole}"
