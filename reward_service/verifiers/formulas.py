"""Equality of two formulas in LaTeX by value. sympy reads, computes and compares them.

Rational numbers are compared exactly. Other numbers are computed with more and more digits until they differ
or the digit limit is reached. Formulas with unknowns are equal if they have the same value at every sample
point at which both are defined as real numbers. An unreadable formula equals nothing.

Too costly formulas raise `TooCostly` before sympy computes anything. They are refused so early because the
memory and the work of C functions cannot be limited once they run. The caller limits the time of all other
work. The libraries are imported at the first comparison that needs them, or by `preload`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from reward_service.verifiers import BudgetSpent, TooCostly

log = logging.getLogger(__name__)

LONGEST = 400  # characters of a formula; a longer one is not compared
MOST_BITS = 20_000  # size of an intermediate number: some 6000 decimal digits
SMALL_BITS = 64
MOST_NODES = 500
MOST_TERMS = 1_000  # terms of an expanded formula
FEWEST_DIGITS, MOST_DIGITS = 60, 12_000  # decimal digits to which two numbers must agree
FUNCTION = r"\\(sin|cos|tan|cot|sec|csc|ln|log|arcsin|arccos|arctan)"
IN_DEGREES = re.compile(rf"{FUNCTION}\s*[({{]?\s*(\d+(?:\.\d+)?)\s*\^\\circ\s*[)}}]?")
# In `\sin x \cdot y`, the parser would take the sine of x y.
BEFORE_TIMES = re.compile(rf"{FUNCTION}\s*([a-zA-Z]|\d+)\s*(?=\\(?:cdot|times)(?![a-zA-Z]))")
# The parser computes these at once, at any size.
COMPUTED = re.compile(r"\\[td]?binom|\\choose|matrix|\\det|\\operatorname|\\text")
LONG_NUMBER = re.compile(r"\d{4,}")
NAME = re.compile(
    r"\\(?P<mark>angle|triangle|square|overline|overrightarrow|overleftrightarrow|vec|widehat)(?![a-zA-Z])"
    r"\s*\{?\s*(?P<marked>[a-zA-Z]{2,})\s*\}?"
    r"|\\(?:text|begin|end)\s*\{[^{}]*\}|_\s*\{[^{}]*\}|\\[a-zA-Z]+"
    r"|(?P<word>[a-zA-Z]{4,})|(?P<capitals>[A-Z](?:\s*[A-Z])+)"
)
"""Pattern for letters whose order matters (`\\angle ABC`, `AB`, `left`), and for texts that the search for
them must skip."""
CROSS = re.compile(r"\\vec\s*\{([a-zA-Z]+)\}\s*\\times\s*\\vec\s*\{([a-zA-Z]+)\}")

NESTED_CROSS = re.compile(r"\\vec\s*\{[a-zA-Z]+\}\s*\\times|\\times\s*\\vec")


def preload() -> None:
    """Import the libraries and build the parser's tables. This takes about a second, so it should happen
    before the first call."""
    same_formula("x+1", "1+x")


def same_formula(truth: str, answer: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Return whether both formulas are equal. Raises `TooCostly`.

    `tolerance` is relative. It applies only if the truth is a number but not an integer, and at least one of
    the texts contains a decimal.
    """
    if max(len(truth), len(answer)) > LONGEST or (COMPUTED.search(answer) and LONG_NUMBER.search(answer)):
        raise TooCostly("the formula is too long, or computes something of many digits")
    try:
        wanted, given = _parsed(truth), _parsed(answer)
        if not (_bounded(wanted) and _bounded(given)):
            raise TooCostly("the formula would be too large when it is computed")
        return _same(wanted, given, tolerance)
    except (MemoryError, ImportError, TooCostly):
        raise
    except BudgetSpent:
        _forget()
        raise
    except Exception as error:
        # sympy raises errors of any kind on meaningless formulas such as i < 3, which equal nothing.
        log.debug("a formula cannot be compared: %r", error)
        return False


def _forget() -> None:
    """Clear sympy's caches, because an interrupted computation may have left a wrong result there."""
    from sympy.core.cache import clear_cache

    _parsed.cache_clear()
    clear_cache()


# --- reading ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Return the formula as a sympy object, in which `i` is the root of -1. It may raise errors of any
    type."""
    import sympy

    text = BEFORE_TIMES.sub(r"\\\1(\2) ", IN_DEGREES.sub(r"\\\1(\\frac{\2\\pi}{180})", text))
    text = CROSS.sub(_cross_product, text)
    if NESTED_CROSS.search(text):
        raise ValueError("the order of this product would be lost")
    text = NAME.sub(_as_one_symbol, text)
    formula = _parser()(text, is_real=True)
    if not isinstance(formula, sympy.Basic | sympy.MatrixBase):
        raise ValueError(f"{formula!r:.80} is no formula")
    if isinstance(formula, sympy.MatrixBase):
        formula = formula.as_immutable()
    named = [symbol for symbol in formula.free_symbols if str(symbol) == "i"]
    return formula.xreplace(dict.fromkeys(named, sympy.I)) if named else formula


@functools.cache
def _parser() -> Any:
    """Return the parser. It keeps units and distinguishes `A` from `a`."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    normal = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    read = ConversionConfig(lowercase_symbols=False)
    return functools.partial(latex2sympy, normalization_config=normal, conversion_config=read)


def _as_one_symbol(match: re.Match[str]) -> str:
    """Return letters whose order matters as one symbol. Without this, the letters would be read as a product,
    in which the order does not count."""
    letters = match["marked"] or match["word"] or match["capitals"]
    return match[0] if letters is None else f" Q_{{0{match['mark'] or ''}{''.join(letters.split())}}} "


def _cross_product(match: re.Match[str]) -> str:
    """Return the cross product of two vectors as one symbol, with the sign that follows from their order."""
    first, second = sorted((match[1], match[2]))
    return f"({'' if first == match[1] else '-'}Q_{{1{first}x{second}}})" if first != second else "(0)"


# --- how large a formula becomes ----------------------------------------------------------------------


def _bounded(formula: Any) -> bool:
    """Return whether the formula stays small while it is computed, without a huge number, tree or expanded
    product."""
    import sympy

    costly = sympy.Sum | sympy.Product | sympy.Integral | sympy.Limit | sympy.Derivative
    for count, node in enumerate(sympy.preorder_traversal(formula)):
        if count > MOST_NODES or isinstance(node, costly):
            return False
    return _bits(formula) <= MOST_BITS and _most_terms(formula) <= MOST_TERMS


def _bits(node: Any, unknown: float = 1.0) -> float:
    """Return an upper bound of the binary digits of any intermediate number, without computing the formula.

    Unknowns count as numbers of `unknown` digits.
    """
    import sympy

    if isinstance(node, sympy.Rational):
        return max(abs(int(node.p)), int(node.q)).bit_length()
    if isinstance(node, sympy.Symbol):
        return unknown
    parts = [_bits(part, unknown) for part in node.args]
    largest = max(parts, default=1.0)
    if isinstance(node, sympy.Mul):
        return sum(parts)
    if isinstance(node, sympy.Pow | sympy.exp):
        base, exponent = node.as_base_exp()
        return max(largest, max(1.0, _bits(base, unknown)) * _size(exponent, unknown))
    growing = (sympy.factorial, sympy.factorial2, sympy.subfactorial, sympy.binomial, sympy.gamma)
    if isinstance(node, growing):
        return largest + math.lgamma(sum(_size(part, unknown) for part in node.args) + 1) / math.log(2)
    return largest + len(parts)


def _size(part: Any, unknown: float) -> float:
    """Return the size of an exponent or argument, at least 1. Return infinity if the size is not known
    without computing the value."""
    if part.free_symbols and unknown <= 1:
        return 1.0
    bits = _bits(part, unknown)
    if bits <= SMALL_BITS and part.free_symbols:
        return 2.0**bits
    try:
        return max(1.0, abs(complex(part))) if bits <= SMALL_BITS else math.inf
    except (TypeError, ValueError, OverflowError):
        return math.inf


def _most_terms(formula: Any) -> int:
    """Return the largest number of terms that a part of the formula has after expansion."""
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


# --- comparing ----------------------------------------------------------------------------------------


def _same(wanted: Any, given: Any, tolerance: Fraction) -> bool:
    import sympy
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import BooleanFunction

    def both(*kinds: Any) -> bool:
        return isinstance(wanted, kinds) and isinstance(given, kinds)

    relations = Relational | BooleanFunction
    if isinstance(wanted, sympy.Set) and isinstance(given, relations):
        given = given.as_set()
    if isinstance(given, sympy.Set) and isinstance(wanted, relations):
        wanted = wanted.as_set()
    if isinstance(wanted, sympy.MatrixExpr) or isinstance(given, sympy.MatrixExpr):
        wanted, given = wanted.doit(), given.doit()
    if both(Relational):
        return _same_relation(wanted, given, tolerance)
    if both(sympy.MatrixBase):
        return wanted.shape == given.shape and _all_same(wanted.flat(), given.flat(), tolerance)
    if both(sympy.Interval):
        open_ends = [(one.left_open, one.right_open) for one in (wanted, given)]
        ends = [(one.start, one.end) for one in (wanted, given)]
        return open_ends[0] == open_ends[1] and _all_same(ends[0], ends[1], tolerance)
    if both(sympy.Expr):
        return _same_value(wanted, given, tolerance)
    if both(sympy.Tuple):
        return _all_same(wanted.args, given.args, tolerance)
    if type(wanted) is type(given) and both(sympy.FiniteSet, sympy.Union, BooleanFunction):
        orders = itertools.islice(itertools.permutations(given.args), MOST_TERMS)
        return any(_all_same(wanted.args, order, tolerance) for order in orders)
    return bool(wanted == given)


def _all_same(wanted: Sequence[Any], given: Sequence[Any], tolerance: Fraction) -> bool:
    pairs = zip(wanted, given, strict=False)
    return len(wanted) == len(given) and all(_same(left, right, tolerance) for left, right in pairs)


def _same_relation(wanted: Any, given: Any, tolerance: Fraction) -> bool:
    """Return whether one relation is the other times a number, which must be positive for an inequality."""
    import sympy

    left, right = wanted.lhs - wanted.rhs, given.lhs - given.rhs
    if type(given) is type(wanted.reversed) and not isinstance(wanted, sympy.Eq | sympy.Ne):
        right = -right
    elif type(given) is not type(wanted):
        return False
    if isinstance(wanted, sympy.Eq | sympy.Ne):
        left, right = (sympy.together(side.doit()).as_numer_denom()[0] for side in (left, right))
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    for values in _points(len(symbols)):
        point = dict(zip(symbols, values, strict=True))
        factors = [side.subs(point) for side in (left, right) if _bits(side, SMALL_POINT) <= MOST_BITS]
        if len(factors) == 2 and all(_value(factor, {}, FEWEST_DIGITS) for factor in factors):
            ratio = factors[0] / factors[1]
            positive = isinstance(wanted, sympy.Eq | sympy.Ne) or ratio.evalf().is_positive
            return bool(positive) and _same_value(left, ratio * right, tolerance)
    return False


SMALL_POINT = 2  # binary digits of the smallest values for unknowns
MOST_POINT_BITS = 4_000  # size of an intermediate number at a point
FEWEST_POINTS = 3


def _same_value(wanted: Any, given: Any, tolerance: Fraction) -> bool:
    """Return whether two expressions have the same value wherever both are defined."""
    import sympy

    decimal = wanted.has(sympy.Float) or given.has(sympy.Float)
    wanted, given = _exact(wanted), _exact(given)
    if wanted.has(sympy.nan, sympy.zoo) or given.has(sympy.nan, sympy.zoo):
        return False
    if wanted == given:
        return True
    symbols = sorted(wanted.free_symbols | given.free_symbols, key=str)
    if not symbols:
        slack = tolerance if decimal and not wanted.is_Integer else Fraction(0)
        return _agree(wanted, given, {}, slack) is True
    complex_ones = wanted.has(sympy.I) or given.has(sympy.I)
    agreed = 0
    for values in _points(len(symbols)):
        found = _agree(wanted, given, dict(zip(symbols, values, strict=True)))
        if found is False or (complex_ones and found is None):
            return False
        agreed += found is True
    return agreed >= FEWEST_POINTS


def _exact(formula: Any) -> Any:
    """Return the formula with fractions instead of decimals, computed as far as is possible without rounding.

    Values of unknown functions become symbols.
    """
    import sympy
    from sympy.core.function import AppliedUndef

    known = {part: sympy.Rational(str(part)) for part in formula.atoms(sympy.Float)}
    known |= {part: sympy.Symbol(str(part), real=True) for part in formula.atoms(AppliedUndef)}
    known |= {part: _real_root(part) for part in formula.atoms(sympy.Pow) if not formula.has(sympy.I)}
    return formula.xreplace(known).doit()


def _real_root(power: Any) -> Any:
    """Return an odd root of a negative number as a real root, as schools teach it, and any other value
    unchanged."""
    import sympy

    base, exponent = power.args
    odd = exponent.is_Rational and not exponent.is_Integer and exponent.q % 2
    return sympy.Integer(-1) ** exponent.p * (-base) ** exponent if odd and base.is_negative else power


def _points(unknowns: int) -> Iterator[list[Any]]:
    """Yield fixed values for the unknowns: small and large fractions of both signs, then whole numbers."""
    import sympy

    draw = random.Random(unknowns)
    for scale, sign in itertools.product((4, 1000), (1, -1, 0, 0)):
        sizes = (sympy.Rational(draw.randrange(1, 997 * scale), 997) for _ in range(unknowns))
        yield [size * (sign or draw.choice((1, -1))) for size in sizes]
    for _ in range(FEWEST_POINTS):
        yield [sympy.Integer(draw.randrange(2, 12)) for _ in range(unknowns)]


def _agree(wanted: Any, given: Any, point: dict[Any, Any], slack: Fraction = Fraction(0)) -> bool | None:
    """Return whether both formulas have the same value at a point.

    Returns None if one of the values is undefined, not real or too large to compute.
    """
    import sympy

    unknown = max((int(abs(value)).bit_length() for value in point.values()), default=0)
    bits = sum(_bits(side, max(unknown, SMALL_POINT)) for side in (wanted, given))
    if bits > 2 * (MOST_POINT_BITS if point else MOST_BITS):
        return None
    digits = min(MOST_DIGITS, FEWEST_DIGITS + int(0.7 * bits))
    left, right = (_value(side, point, digits) for side in (wanted, given))
    if left is None or right is None:
        return None if point else False
    difference = _value(wanted - given, point, digits) if left and right else left - right
    if not difference:
        return difference is not None
    if slack and abs(difference) <= sympy.Rational(slack) * max(abs(left), abs(right)):
        return True
    real = _real(left) and _real(right) and _defined(wanted, point) and _defined(given, point)
    return False if not point or real else None


def _value(formula: Any, point: dict[Any, Any], digits: int) -> Any:
    """Return the value of a formula to 15 digits, computed with as many digits as necessary.

    Returns 0 if the value cannot be distinguished from 0 with `digits` digits, and None if it is undefined.
    """
    import sympy

    try:
        value = formula.evalf(15, subs=point, maxn=digits, strict=True)
    except sympy.PrecisionExhausted:
        # A quotient by a number near 0 also ends here, but is not small.
        rough = formula.evalf(15, subs=point, maxn=digits)
        return sympy.Integer(0) if abs(rough) < sympy.Rational(1, 10**30) else None
    return value if value.is_finite and value.is_number and not value.has(sympy.nan) else None


def _defined(formula: Any, point: dict[Any, Any]) -> bool:
    """Return whether the formula is real, which means that it has no root or logarithm of a negative
    number."""
    import sympy

    return all(
        node.args[0].evalf(15, subs=point).is_nonnegative
        for node in formula.atoms(sympy.Pow, sympy.log)
        if isinstance(node, sympy.log) or not node.exp.subs(point).is_integer
    )


def _real(value: Any) -> bool:
    return bool(abs(value.as_real_imag()[1]) <= abs(value) * 1e-9)
