"""Whether two pieces of maths are the same: structure by structure, numbers exactly, the rest by math-verify.

What has an order (points, intervals, matrices) must agree in order and brackets; what has none (sets, several
solutions) in any order. `x = 5` and `5` are the same, as are `50 %`, `50` (one of the two with the sign) and
`0.5`. A unit may be left out; two units must agree after conversion.

Formulas that would cost too much are not compared: `TooCostly`, before sympy computes anything. The limits
are for what would not stay in Python code or in memory; the caller bounds the time that the rest takes.
math-verify's own limit (SIGALRM) is off: it works in a main thread only. The library is imported at the first
comparison that needs it, or by `preload`.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from reward_service.verifiers import BudgetSpent, TooCostly
from reward_service.verifiers.writing import (
    Quantity,
    based,
    is_decimal,
    number,
    one_bracket,
    quantity,
    ratio,
    unwrapped,
)

log = logging.getLogger(__name__)

LONGEST = 400  # Characters of a formula; a longer one is not compared
MOST_BITS = 20_000  # Size of a number on the way: some 6000 decimal digits
SMALL_BITS = 64
MOST_NODES = 500
MOST_TERMS = 1_000  # Terms of a formula that is multiplied out; some seconds of sympy's time
FUNCTION = r"\\(sin|cos|tan|cot|sec|csc|ln|log|arcsin|arccos|arctan)"
IN_DEGREES = re.compile(rf"{FUNCTION}\s*[({{]?\s*(\d+(?:\.\d+)?)\s*\^\\circ\s*[)}}]?")
# Of `\sin x \cdot y` the parser would take the sine of x y.
BEFORE_TIMES = re.compile(rf"{FUNCTION}\s*([a-zA-Z]|\d+)\s*(?=\\(?:cdot|times)(?![a-zA-Z]))")
# These the parser computes at once, whatever their size.
COMPUTED = re.compile(r"\\[td]?binom|\\choose|matrix|\\det|\\operatorname|\\text")
LONG_NUMBER = re.compile(r"\d{4,}")


def preload() -> None:
    """Import the libraries and build the parser's tables: a second, best spent before the first call."""
    same_formula("x+1", "1+x")


def same_formula(truth: str, answer: str) -> bool:
    """Whether both are the same formula. What cannot be read is the same as nothing. Raises `TooCostly`."""
    if max(len(truth), len(answer)) > LONGEST or (COMPUTED.search(answer) and LONG_NUMBER.search(answer)):
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


# --- structure by structure --------------------------------------------------------------------------


MOST_PARTS = 40
DEEPEST = 6  # Brackets in brackets; what is nested deeper is not the same as anything but its like
ASSIGNED = re.compile(
    r"\s*(\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-z](?:,[a-z])*\))?|\([a-z](?:,\s*[a-z])+\))\s*(?:=|\\in(?![a-z]))\s*(?!=)"
)
MATRIX = re.compile(r"\\begin\{([bpvB]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
IN_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")
NUMBER_IN_WORDS = re.compile(r"\\text\s*\{[^{}]*\d")
LETTERS = re.compile(r"[^\W_]+", re.UNICODE)
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
RELATION = re.compile(r"<|>|\\(?:le|ge|lt|gt|ne|in)(?![a-zA-Z])|=")
ORDER = re.compile(r"<|>|\\(?:le|ge|lt|gt)(?![a-zA-Z])")
BOUND = re.compile(r"[^=\\a-zA-Z]+|[^=]*\\(?:frac|sqrt|pi)[^=]*")
MORE = re.compile(
    r"['¬]|\\(?:ne|not|neg|lnot|notin|ll|gg|lesssim|gtrsim|nless|ngtr|nleq|ngeq|propto|sim|cong|equiv|b?mod|pmod"
    r"|to|(?:R|r)ightarrow|implies|iff|langle|rangle|lor|vee|land|wedge|n?mid|subset|subseteq|supset|ni|mp"
    r"|forall|exists)(?![a-zA-Z])"
)
"""Signs that say something about a value; an answer with one that the truth does not have is another one."""
NOT_STRICT = (r"\le", r"\ge")
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\lt": r"\gt", r"\gt": r"\lt"}
UNION = re.compile(r"\\cup(?![a-zA-Z])")
OPENING, CLOSING = "([{", ")]}"


class Bracketed(NamedTuple):
    """A bracketed or listed text: its brackets (`\\{`, `(`, `[`, or nothing) and what the commas part."""

    opening: str
    closing: str
    items: list[str]


def same(truth: str, answer: str, tolerance: Fraction, depth: int = 0) -> bool:
    """Whether two tidied texts are the same. `tolerance` is relative, for numbers, one of them a decimal."""
    if not answer or not truth:
        return False
    if truth == answer or _as_words(truth) == _as_words(answer) != "":
        return True
    if depth > DEEPEST or _says_more(truth, answer):
        return False
    wanted, given = _without_name(truth, answer)
    if (by_value := _quantities(quantity(wanted), quantity(given), tolerance)) is not None:
        return by_value
    for compare in (_based, _matrices, _unions, _parts):
        if (verdict := compare(wanted, given, tolerance, depth + 1)) is not None:
            return verdict
    bodies = quantity(wanted).body, quantity(given).body
    if NUMBER_IN_WORDS.search(given) or (IN_WORDS.search(bodies[1]) and not IN_WORDS.search(bodies[0])):
        # math-verify takes any words for a unit, and so would let a second answer in them pass.
        return False
    return same_formula(*bodies)


def _says_more(truth: str, answer: str) -> bool:
    """Whether the answer denies or compares where the truth does not: math-verify reads over such signs."""
    if not set(MORE.findall(answer)) <= set(MORE.findall(truth)):
        return True
    is_a_set = truth[:1] in ("(", "[", "{") or truth.startswith(r"\{") or UNION.search(truth)
    return bool(ORDER.search(answer) and not ORDER.search(truth) and not is_a_set)


def _without_name(truth: str, answer: str) -> tuple[str, str]:
    """Both without the `x =` that only one of them has, or that both have alike."""
    wanted, given = ASSIGNED.match(truth), ASSIGNED.match(answer)
    if wanted and given and wanted[1].replace(" ", "") != given[1].replace(" ", ""):
        return truth, answer
    if wanted and (given or not RELATION.search(answer)):
        truth = truth[wanted.end() :]
    if given and (wanted or not RELATION.search(truth)):
        answer = answer[given.end() :]
        if "," not in answer and not wanted:
            answer = answer.rpartition("=")[2].strip()
    elif "=" in answer and "," not in answer and not RELATION.search(truth):
        # A calculation that ends in its result.
        answer = answer.rpartition("=")[2].strip()
    return truth, answer


def _quantities(truth: Quantity, answer: Quantity, tolerance: Fraction) -> bool | None:
    """Whether the values are the same, when both are numbers; False for units that cannot agree."""
    units = [quantity.unit for quantity in (truth, answer) if quantity.unit and quantity.unit.kind]
    if len({unit.kind for unit in units}) > 1:
        return False
    wanted, given = number(unwrapped(truth.body)), number(unwrapped(answer.body))
    if wanted is None or given is None:
        pairs = ratio(truth.body), ratio(answer.body)
        return pairs[0] == pairs[1] if None not in pairs else None
    if len(units) == 2:
        wanted, given = wanted * units[0].size, given * units[1].size
    rounded = wanted.denominator > 1 and (is_decimal(truth.body) or is_decimal(answer.body))
    slack = tolerance if rounded else Fraction(0)
    if _near(wanted, given, slack):
        return True
    if truth.percent != answer.percent:
        hundredth = Fraction(1, 100)
        return _near(
            wanted * (hundredth if truth.percent else 1), given * (hundredth if answer.percent else 1), slack
        )
    return False


def _near(left: Fraction, right: Fraction, tolerance: Fraction) -> bool:
    return left == right or abs(left - right) <= tolerance * max(abs(left), abs(right))


def _based(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    wanted, given = based(truth), based(answer)
    if wanted and given and wanted[0].isdigit():
        return wanted == given
    if wanted and wanted[0].isdigit():
        return wanted[0] == answer.strip()
    return None


def _matrices(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    wanted, given = _cells(truth), _cells(answer)
    if wanted is None or given is None:
        return None if wanted is given else False
    if [len(row) for row in wanted] != [len(row) for row in given]:
        return False
    rows = zip(wanted, given, strict=True)
    return all(same(left, right, tolerance, depth) for row in rows for left, right in zip(*row, strict=True))


def _cells(text: str) -> list[list[str]] | None:
    match = MATRIX.fullmatch(text.strip())
    if match is None:
        return None
    rows = [row.strip() for row in match[2].split(r"\\")]
    cells = [[cell.strip() for cell in row.split("&")] for row in rows if row]
    return cells if sum(map(len, cells)) <= MOST_PARTS else None


def _unions(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    wanted, given = _pieces(truth), _pieces(answer)
    if (wanted, given) == ([truth.strip()], [answer.strip()]):
        return None
    if _matched(wanted, given, tolerance, depth):
        return True
    return None


def _pieces(text: str) -> list[str]:
    """The intervals that a union, or inequalities parted by commas, are made of."""
    if UNION.search(text):
        return [piece.strip() for piece in UNION.split(text)]
    return [_interval(piece) for piece in (_at_commas(text) if RELATION.search(text) else [text])]


def _interval(text: str) -> str:
    """`x > 3` as `(3,\\infty)`, `1 < x \\le 2` as `(1,2]`; anything else as it is."""
    signs = ORDER.findall(text)
    sides = [side.strip() for side in ORDER.split(text)]
    if len(signs) == 2 and _is_unknown(sides[1]) and all(map(BOUND.fullmatch, (sides[0], sides[2]))):
        first, second = signs
        if {first, second} <= {"<", r"\le", r"\lt"}:
            opening, ending = "[" if first in NOT_STRICT else "(", "]" if second in NOT_STRICT else ")"
            return f"{opening}{sides[0]},{sides[2]}{ending}"
    if len(signs) != 1:
        return text
    (relation,), (left, right) = signs, sides
    if _is_unknown(right):
        relation, left, right = FLIPPED[relation], right, left
    if not _is_unknown(left) or not BOUND.fullmatch(right):
        return text
    if relation in ("<", r"\le", r"\lt"):
        return rf"(-\infty,{right}{']' if relation in NOT_STRICT else ')'}"
    return rf"{'[' if relation in NOT_STRICT else '('}{right},\infty)"


def _is_unknown(text: str) -> bool:
    return len(text) == 1 and "a" <= text <= "z"


def _parts(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    """Lists, sets, points and intervals; None where neither is one of these."""
    wanted, given = _split(truth), _split(answer)
    if wanted is None and given is None:
        return None
    if wanted is None or given is None:
        if RELATION.search(truth) or RELATION.search(answer):
            return None
        parts, alone = (wanted, answer) if given is None else (given, truth)
        assert parts is not None
        return (
            parts.opening == r"\{" and len(parts.items) == 1 and same(parts.items[0], alone, tolerance, depth)
        )
    if max(len(wanted.items), len(given.items)) > MOST_PARTS or len(wanted.items) != len(given.items):
        return False
    unordered = {"", r"\{"}
    if wanted.opening in unordered and given.opening in unordered:
        return _matched(wanted.items, given.items, tolerance, depth)
    brackets = (wanted.opening, wanted.closing), (given.opening, given.closing)
    bare_point = given.opening == "" and brackets[0] == ("(", ")")
    if brackets[0] != brackets[1] and not bare_point:
        return False
    return all(
        same(left, right, tolerance, depth) for left, right in zip(wanted.items, given.items, strict=True)
    )


def _matched(wanted: list[str], given: list[str], tolerance: Fraction, depth: int) -> bool:
    """Whether each has its like among the others, whatever their order."""
    left = [item.strip() for item in given]
    for item in wanted:
        found = next((i for i, other in enumerate(left) if same(item.strip(), other, tolerance, depth)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _split(text: str) -> Bracketed | None:
    text = text.strip()
    if number(quantity(text).body) is not None:
        return None
    inner, opening, ending = text, "", ""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner, opening, ending = text[2:-2], r"\{", r"\}"
    elif text and text[0] in "([" and text[-1] in ")]" and one_bracket(text, OPENING, CLOSING):
        inner, opening, ending = text[1:-1], text[0], text[-1]
    items = [item for part in _at_commas(inner) for item in _both_signs(part)]
    if len(items) < 2 and opening not in (r"\{", "["):
        return None
    return Bracketed(opening, ending, [_unnamed(item) for item in items])


def _unnamed(item: str) -> str:
    """`x = 1` as one of several solutions is 1."""
    match = ASSIGNED.match(item)
    return item[match.end() :].strip() if match else item.strip()


def _both_signs(text: str) -> list[str]:
    if len(PLUS_MINUS.findall(text)) != 1:
        return [text]
    plus = PLUS_MINUS.sub("+", text).strip()
    return [plus.removeprefix("+"), PLUS_MINUS.sub("-", text)]


def _at_commas(text: str) -> list[str]:
    """Split at the commas and semicolons that no bracket holds."""
    items, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if character in ",;" and depth <= 0:
            items.append(text[start:index].strip())
            start = index + 1
    items.append(text[start:].strip())
    return items


def _as_words(text: str) -> str:
    """The letters of an answer in words, without case; nothing for what is maths."""
    words = IN_WORDS.sub(r"\1", text).strip()
    bare = words.strip("() .").casefold()
    if "\\" in words or any(character in words for character in "^_=+*/<>") or not LETTERS.search(bare):
        return ""
    if any(character.isdigit() for character in bare):
        return ""
    if len(bare) == 1 or IN_WORDS.search(text) or all(len(word) > 1 for word in bare.split()):
        return " ".join(bare.split())
    return ""
