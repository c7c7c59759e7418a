"""Equality of two formulas by math-verify (sympy underneath), with what would cost too much left out.

What is beyond the limits below is not compared: `TooCostly`, before sympy computes anything. They are for
what would not stay in Python code or in memory; the time that the rest takes is bounded by the caller
(`budget.py`). math-verify's own limit (SIGALRM) is off: it works in a main thread only.

The library is imported at the first comparison that needs it, or by `preload`.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from typing import Any

from reward_service.verifiers.budget import BudgetSpent, TooCostly

log = logging.getLogger(__name__)

LONGEST = 400
"""Characters of a formula; a longer one is not compared."""
MOST_BITS = 20_000
"""Size of a number on the way: some 6000 decimal digits."""
SMALL_BITS = 64
"""Size of an exponent."""
MOST_NODES = 500
"""Nodes of a formula as a tree."""
MOST_TERMS = 1_000
"""Terms of a formula that is multiplied out; some seconds of sympy's time."""
FUNCTION = r"\\(sin|cos|tan|cot|sec|csc|ln|log|arcsin|arccos|arctan)"
IN_DEGREES = re.compile(rf"{FUNCTION}\s*[({{]?\s*(\d+(?:\.\d+)?)\s*\^\\circ\s*[)}}]?")
# Of `\sin x \cdot y` the parser would take the sine of x y.
BEFORE_TIMES = re.compile(rf"{FUNCTION}\s*([a-zA-Z]|\d+)\s*(?=\\(?:cdot|times)(?![a-zA-Z]))")
# These the parser computes at once, whatever their size.
COMPUTED = re.compile(r"\\[td]?binom|\\choose|matrix|\\det|\\operatorname|\\text")
LONG_NUMBER = re.compile(r"\d{4,}")


def preload() -> None:
    """Import the libraries and build the parser's tables: a second, best spent before the first call."""
    same("x+1", "1+x")


def same(truth: str, answer: str) -> bool:
    """Whether both are the same formula. What cannot be read is the same as nothing. Raises `TooCostly`."""
    if max(len(truth), len(answer)) > LONGEST or _costly(answer):
        raise TooCostly("the formula is too long, or computes something of many digits")
    try:
        wanted, given = _parsed(truth), _parsed(answer)
        if not (wanted and given):
            return False
        if not all(map(_bounded, (*wanted, *given))):
            raise TooCostly("the formula would be too large when it is computed")
        return bool(_library().verify(wanted, given, timeout_seconds=None, allow_set_relation_comp=True))
    except (MemoryError, ImportError, TooCostly):
        raise
    except BudgetSpent:
        _forget()
        raise
    except Exception as error:
        # sympy raises errors of any kind on formulas that make no sense, such as i < 3: those equal nothing.
        log.debug("a formula cannot be compared: %r", error)
        return False


def _forget() -> None:
    """Drop what sympy remembers of formulas: a computation that was ended may have left half of an answer."""
    from sympy.core.cache import clear_cache

    _parsed.cache_clear()
    clear_cache()


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> list[Any]:
    """The formula as sympy has it; empty where it cannot be read."""
    library = _library()
    targets = [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
    # The library answers a text that it cannot read with nothing, or with the text itself.
    text = BEFORE_TIMES.sub(r"\\\1(\2) ", IN_DEGREES.sub(r"\\\1(\\frac{\2\\pi}{180})", text))
    read = library.parse(rf"\boxed{{{text}}}", targets, fallback_mode="no_fallback", parsing_timeout=None)
    return [_with_imaginary_unit(formula) for formula in read]


def _costly(text: str) -> bool:
    return COMPUTED.search(text) is not None and LONG_NUMBER.search(text) is not None


def _with_imaginary_unit(formula: Any) -> Any:
    """The formula with `i` as the root of -1: in answers it is that far oftener than a variable."""
    import sympy

    if not isinstance(formula, sympy.Basic | sympy.MatrixBase):
        return formula
    named = [symbol for symbol in formula.free_symbols if str(symbol) == "i"]
    return formula.xreplace(dict.fromkeys(named, sympy.I)) if named else formula


@functools.cache
def _library() -> Any:
    import math_verify

    # It warns once that its own limits are off, and later of every text that it cannot read.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify


def _bounded(formula: Any) -> bool:
    """Whether computing the formula stays small: no huge number, tree, or product that is multiplied out."""
    import sympy

    if not isinstance(formula, sympy.Basic | sympy.MatrixBase):
        return True
    for count, node in enumerate(sympy.preorder_traversal(formula)):
        if count > MOST_NODES:
            return False
        if isinstance(node, sympy.Sum | sympy.Product | sympy.Integral | sympy.Limit | sympy.Derivative):
            return False
    return _bits(formula) <= MOST_BITS and _most_terms(formula) <= MOST_TERMS


def _bits(node: Any) -> float:
    """Most binary digits of a number that computing the formula makes, judged without computing it."""
    import sympy

    if isinstance(node, sympy.Rational):
        return max(abs(int(node.p)), int(node.q)).bit_length()
    parts = [_bits(part) for part in node.args]
    largest = max(parts, default=1.0)
    if isinstance(node, sympy.Mul):
        return sum(parts)
    if isinstance(node, sympy.Pow | sympy.exp):
        base, exponent = node.as_base_exp()
        return max(largest, max(1.0, _bits(base)) * _size(exponent))
    growing = (sympy.factorial, sympy.factorial2, sympy.subfactorial, sympy.binomial, sympy.gamma)
    if isinstance(node, growing):
        return largest + math.prod(_size(part) for part in node.args) ** 1.5
    return largest + len(parts)


def _size(part: Any) -> float:
    """The size of an exponent or argument, at least 1; infinite where it would first have to be computed."""
    if part.free_symbols:
        return 1.0
    if _bits(part) > SMALL_BITS:
        return math.inf
    try:
        return max(1.0, abs(complex(part)))
    except (TypeError, ValueError, OverflowError):
        return math.inf


def _most_terms(formula: Any) -> int:
    """The most terms that a part of the formula has when it is multiplied out."""
    import sympy

    most, unknowns = 1, len(formula.free_symbols)
    polynomial = isinstance(formula, sympy.Expr) and bool(formula.is_polynomial())

    def terms_and_degree(node: Any) -> tuple[int, int]:
        nonlocal most
        parts = [terms_and_degree(part) for part in node.args]
        terms, degree = 1, 1
        if isinstance(node, sympy.Add):
            terms, degree = sum(part[0] for part in parts), max(part[1] for part in parts)
        elif isinstance(node, sympy.Mul):
            terms, degree = math.prod(part[0] for part in parts), sum(part[1] for part in parts)
        elif isinstance(node, sympy.Pow) and node.exp.is_Rational:
            power, (inner, inner_degree) = min(math.ceil(abs(node.exp)), MOST_TERMS), parts[0]
            terms, degree = math.comb(inner + power - 1, power), inner_degree * power
        elif node.is_number:
            degree = 0
        if polynomial:
            terms = min(terms, math.comb(degree + unknowns, unknowns))
        most = max(most, terms)
        return min(terms, MOST_TERMS + 1), min(degree, MOST_TERMS)

    terms_and_degree(formula)
    return most
