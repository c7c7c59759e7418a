"""Equality of two pieces of maths. Structures are compared part by part, numbers exactly, and formulas by
value.

Ordered objects (points, intervals, matrices) must agree in order and brackets. Unordered objects (sets,
several solutions) may have any order. Words, and letters whose order matters (such as `ABC` for a triangle),
must agree letter by letter. `x = 5` equals `5`. `50 %` equals `0.5`. It also equals `50` if only one side has
the percent sign. A unit may be missing on one side, but two units must be the same. If two formulas are
written differently, `formulas.py` compares their values.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from reward_service.verifiers.formulas import preload as preload
from reward_service.verifiers.formulas import same_formula
from reward_service.verifiers.latex import (
    GREEK,
    Quantity,
    based,
    is_decimal,
    number,
    one_bracket,
    quantity,
    ratio,
    unwrapped,
)

MOST_PARTS = 40
DEEPEST = 6  # nesting of brackets; deeper texts must be literally equal
NAMES = r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-z](?:,[a-z])*\))?"
TUPLE = r"\(\s*[a-z](?:_\{?\d\}?)?(?:,\s*[a-z](?:_\{?\d\}?)?)+\s*\)"
ASSIGNED = re.compile(rf"\s*({NAMES}|{TUPLE})\s*(?:=|\\in(?![a-z]))\s*(?!=)")
NAMED_TUPLE = re.compile(rf"\s*({TUPLE})\s*=\s*(?=\()")
MATRIX = re.compile(
    r"(\(|\[|\||\\\||\\\{)?\s*\\begin\{([bpvBV]?(?:small)?matrix|array)\*?\}\s*(?:\{([^{}]*)\}|\[\w\])?(.*)\\end\{\2\*?\}"
    r"\s*(\)|\]|\||\\\||\\\})?",
    re.DOTALL,
)
MATRIX_INSIDE = re.compile(r"\\begin\{(?:[bpvBV]?(?:small)?matrix|array)")
MATRIX_KINDS = {"p": "", "b": "", "B": "set", "v": "determinant", "V": "norm"}
BRACKET_KINDS = {None: "", "(": "", "[": "", "|": "determinant", r"\|": "norm", r"\{": "set"}
IN_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")
WORDY = re.compile(r"(?<![^\s(])[^\W\d_]{3,}(?![^\s).,!?'’-])")
"""Pattern for a word: letters that are not next to a digit or an operator."""
LETTERS_ALONE = re.compile(r"(?:[^\W\d_]|[\s.'’()])+")
SEQUENCE = re.compile(r"[A-Z](?:\s*-\s*[A-Z]){2,}")
LABEL = re.compile(r"[a-zA-Z]+\d[a-zA-Z\d]*")
"""Pattern for a label of letters and then digits, as for a chess square or a seat. A product would be written
with the digits first."""
PRODUCT = re.compile(r"\\(?:cdot|times)(?![a-zA-Z])|[\s{}()*]")
NUMBER_IN_WORDS = re.compile(r"\\text\s*\{[^{}]*\d")
LETTERS = re.compile(r"[^\W_]+", re.UNICODE)
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
RELATION = re.compile(r"<|>|\\(?:le|ge|lt|gt|ne|in)(?![a-zA-Z])|=")
ORDER = re.compile(r"<|>|\\(?:le|ge|lt|gt)(?![a-zA-Z])")
BOUND = re.compile(r"[^=\\a-zA-Z]+|[^=]*\\(?:frac|sqrt|pi|infty)[^=]*")
UNKNOWN = re.compile(rf"[a-zA-Z]|\\(?:{'|'.join(GREEK)})(?![a-zA-Z])")
BUILDER = re.compile(
    rf"\\\{{\s*({UNKNOWN.pattern})\s*(?:\\in\s*(\(-\\infty,\\infty\))\s*)?(?:\\mid|\||:)\s*(.*)\\\}}",
    re.DOTALL,
)
MEMBER = re.compile(rf"({UNKNOWN.pattern})\s*\\in(?![a-zA-Z])\s*(.*)", re.DOTALL)
PUNCTURED = re.compile(r"\(-\\infty,\\infty\)\s*\\(?:setminus|backslash)\s*\\\{(.*)\\\}", re.DOTALL)
MORE = re.compile(
    r"['¬]|\.\.|(?<=\d)_|(?<=\d\})_"
    r"|\\(?:[lc]?dots|ne|not|neg|lnot|notin|ll|gg|lesssim|gtrsim|nless|ngtr|nleq|ngeq|propto|sim|cong|equiv|b?mod|pmod"
    r"|to|(?:R|r)ightarrow|implies|iff|langle|rangle|lor|vee|land|wedge|n?mid|subset|subseteq|supset|ni|mp"
    r"|forall|exists)(?![a-zA-Z])"
)
"""Pattern for signs that change a value. If only the answer has such a sign, the answer differs from the
truth."""
NOT_STRICT = (r"\le", r"\ge")
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\lt": r"\gt", r"\gt": r"\lt"}
UNION = re.compile(r"\\cup(?![a-zA-Z])")
FUNCTION_OR_MARK = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|angle|triangle|vec|overline|overrightarrow|text|frac\{d)|[A-Z]"
)
SAID_OF = re.compile(rf"{NAMES}(?:\(-?\d+\))?")
LETTER = re.compile(rf"{UNKNOWN.pattern}|(?:\\[a-zA-Z]+)")
DECIMALS = re.compile(r"\d\.(\d+)")
OPENING, CLOSING = "([{", ")]}"


class Bracketed(NamedTuple):
    """A bracketed or listed text: its brackets (`\\{`, `(`, `[`, or nothing) and its items."""

    opening: str
    closing: str
    items: list[str]
    names: tuple[str, ...] = ()
    """Names of the items, all different, as in `x = 1, y = 2`."""


def same(truth: str, answer: str, tolerance: Fraction, depth: int = 0) -> bool:
    """Return whether two tidied texts are equal. `tolerance` is relative, for numbers if one is a decimal."""
    if not answer or not truth:
        return False
    if truth == answer or _as_words(truth) == _as_words(answer) != "":
        return True
    if depth > DEEPEST:
        return False
    if (one := _region(truth)) and (other := _region(answer)):
        names = {one.unknown, other.unknown} - {""}
        plain = not names and len(one.pieces) == len(other.pieces) == 1
        if not plain and len(names) < 2 and _matched(one.pieces, other.pieces, tolerance, depth + 1):
            return True
    if _says_more(truth, answer):
        return False
    wanted, given = _without_name(truth, answer, tolerance, depth + 1)
    if (by_value := _quantities(quantity(wanted), quantity(given), tolerance)) is not None:
        return by_value
    for compare in (_words, _based, _matrices, _parts):
        if (verdict := compare(wanted, given, tolerance, depth + 1)) is not None:
            return verdict
    bodies = quantity(wanted).body, quantity(given).body
    if NUMBER_IN_WORDS.search(given) or (IN_WORDS.search(bodies[1]) and not IN_WORDS.search(bodies[0])):
        return False
    return same_formula(*bodies, tolerance)


def _words(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    """Return whether words, and letters whose order matters, agree letter by letter. Return None if both
    texts are maths."""
    bodies = quantity(truth).body, quantity(answer).body
    if not any(map(_in_letters, bodies)):
        return None
    wanted, given = (PRODUCT.sub("", IN_WORDS.sub(r"\1", body)) for body in bodies)
    if {*wanted, *given} <= {*"xyz"}:
        return sorted(wanted) == sorted(given)
    return wanted == given or (wanted.casefold() == given.casefold() and all(map(WORDY.search, bodies)))


def _in_letters(text: str) -> bool:
    """Return whether the text consists of words, or of letters whose order matters, and is not a list."""
    if "," in text or ";" in text:
        return False
    alone = len(_as_words(text)) > 1 and LETTERS_ALONE.fullmatch(IN_WORDS.sub(r"\1", text))
    return bool(alone or SEQUENCE.fullmatch(text) or LABEL.fullmatch(text) or WORDY.search(text))


def _says_more(truth: str, answer: str) -> bool:
    """Return whether the answer has a sign of denial or comparison that the truth lacks. This is checked here
    because the parser ignores such signs."""
    if not set(MORE.findall(answer)) <= set(MORE.findall(truth)):
        return True
    is_a_set = truth[:1] in ("(", "[", "{") or truth.startswith(r"\{") or UNION.search(truth)
    return bool(ORDER.search(answer) and not ORDER.search(truth) and not is_a_set)


def _without_name(truth: str, answer: str, tolerance: Fraction, depth: int) -> tuple[str, str]:
    """Return both texts without the name in `x = …`, if only one of them has it or both have the same."""
    truth, answer = _by_names(truth), _by_names(answer)
    wanted, given = ASSIGNED.match(truth), ASSIGNED.match(answer)
    others = wanted and given and wanted[1].replace(" ", "") != given[1].replace(" ", "")
    if others or any(len(_at_commas(text)) > 1 for text in (truth, answer)):
        return truth, answer
    if wanted and (given or not RELATION.search(answer)) and _in_their_order(wanted[1]):
        truth = truth[wanted.end() :]
    if given and (wanted or not RELATION.search(truth)) and _in_their_order(given[1]):
        answer = answer[given.end() :]
        if "," not in answer and not wanted:
            answer = _result(answer, tolerance, depth, named=True)
    elif "=" in answer and "," not in answer and not RELATION.search(truth):
        answer = _result(answer, tolerance, depth)
    return truth, answer


def _by_names(text: str) -> str:
    """Return `y=2, x=1` for `(y,x) = (2,1)`, and any other text unchanged."""
    match = NAMED_TUPLE.match(text)
    if match is None or not one_bracket(text[match.end() :], OPENING, CLOSING):
        return text
    names, values = _at_commas(match[1].strip("() ")), _at_commas(text[match.end() + 1 : -1])
    if len(names) != len(values):
        return text
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _in_their_order(names: str) -> bool:
    """Return whether names are written as an ordered tuple, such as `(x,y)`. A single name counts as
    ordered."""
    listed = [name.strip() for name in names.strip("()").split(",")]
    return not names.startswith("(") or listed == sorted(listed)


def _result(answer: str, tolerance: Fraction, depth: int, *, named: bool = False) -> str:
    """Return the last value of a calculation (`2 + 3 = 5`) or of a statement (`x + y = 5`).

    Return the answer unchanged if its earlier values differ from the last one. An equation in one unknown
    (`|x| = 5`) also stays unchanged, unless it follows a name as in `A = r^2 = 9`.
    """
    *before, last = (part.strip() for part in answer.split("="))
    value, decimals = number(quantity(last).body), DECIMALS.search(last)
    if value and decimals:
        # The last value may be rounded.
        tolerance = max(tolerance, Fraction(1, 2 * 10 ** len(decimals[1])) / abs(value))
    for part in filter(None, before):
        letters = {letter for letter in LETTER.findall(part) if UNKNOWN.fullmatch(letter)}
        if letters <= {"e", "i"}:
            if not same(last, part, tolerance, depth):
                return answer
        elif len(letters) == 1 and not (named or SAID_OF.fullmatch(part) or FUNCTION_OR_MARK.search(part)):
            return answer
    return last


def _quantities(truth: Quantity, answer: Quantity, tolerance: Fraction) -> bool | None:
    """Return False for different units. Otherwise return whether the values are equal, or None unless both
    are numbers or ratios."""
    if len({truth.unit, answer.unit} - {""}) > 1:
        return False
    wanted, given = number(unwrapped(truth.body)), number(unwrapped(answer.body))
    if wanted is None or given is None:
        pairs = ratio(truth.body), ratio(answer.body)
        return pairs[0] == pairs[1] if None not in pairs else None
    rounded = wanted.denominator > 1 and (is_decimal(truth.body) or is_decimal(answer.body))
    slack = tolerance if rounded else Fraction(0)
    if _near(wanted, given, slack):
        return True
    shares = [n / 100 if one.percent else n for n, one in ((wanted, truth), (given, answer))]
    return truth.percent != answer.percent and _near(shares[0], shares[1], slack)


def _near(left: Fraction, right: Fraction, tolerance: Fraction) -> bool:
    return left == right or abs(left - right) <= tolerance * max(abs(left), abs(right))


def _based(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    wanted, given = based(truth), based(answer)
    if wanted is None or not wanted[0].isdigit():
        return None
    return wanted == given if given else wanted[0] == answer.strip()


def _all_same(truths: list[str], answers: list[str], tolerance: Fraction, depth: int) -> bool:
    """Return whether two lists of parts are equal, part by part."""
    pairs = zip(truths, answers, strict=False)
    return len(truths) == len(answers) and all(same(*pair, tolerance, depth) for pair in pairs)


def _matrices(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    wanted, given = _cells(truth), _cells(answer)
    if wanted is None or given is None:
        alone, other = wanted or given, answer if given is None else truth
        if alone is None or alone[0] == "determinant" or MATRIX_INSIDE.search(other):
            return None
        # A vector may be written as a point.
        cells = [cell for row in alone[1] for cell in row]
        line = alone[0] == "" and 1 < len(cells) == max(len(alone[1]), len(alone[1][0]))
        point = _split(other) if line else None
        if point is None or (point.opening, point.closing) != ("(", ")"):
            return False
        return _all_same(cells, point.items, tolerance, depth)
    rows = zip(wanted[1], given[1], strict=False)
    alike = wanted[0] == given[0] and len(wanted[1]) == len(given[1])
    return alike and all(_all_same(*pair, tolerance, depth) for pair in rows)


def _cells(text: str) -> tuple[str, list[list[str]]] | None:
    """Return the kind of a matrix and its cells. The kind is empty for round and square brackets."""
    match = MATRIX.fullmatch(text.strip())
    if match is None or r"\begin" in match[4]:
        return None
    opening, environment, columns, body, _ = match.groups()
    kind = MATRIX_KINDS.get(environment[0], BRACKET_KINDS[opening]) + ("|" if "|" in (columns or "") else "")
    rows = [row.strip() for row in body.split(r"\\")]
    cells = [[cell.strip() for cell in row.split("&")] for row in rows if row]
    return (kind, cells) if sum(map(len, cells)) <= MOST_PARTS else None


class Region(NamedTuple):
    """The set of numbers that a relation, an interval, a union or a set builder describes."""

    unknown: str
    """Name of the unknown, or empty."""
    pieces: list[str]


def _region(text: str) -> Region | None:
    """Return the region that a text describes, or None if the text has neither an unknown nor a union."""
    text = text.strip()
    if match := BUILDER.fullmatch(text):
        unknown, rest = match[1], match[3].strip()
        inner = _region(rest)
        return inner if inner and inner.unknown == unknown else None
    if match := PUNCTURED.fullmatch(text):
        gaps = _at_commas(match[1])
        return Region("", [piece for gap in gaps for piece in _interval(rf"x\ne {gap}")[1]])
    if match := MEMBER.fullmatch(text):
        return Region(match[1], [piece.strip() for piece in UNION.split(match[2])])
    if UNION.search(text):
        return Region("", [piece.strip() for piece in UNION.split(text)])
    if not ORDER.search(text) and r"\ne" not in text:
        return Region("", [text]) if text[0] in "([" and text[-1] in ")]" else None
    found = [_interval(piece) for piece in _at_commas(text)]
    unknowns = {unknown for unknown, _ in found}
    pieces = [piece for _, intervals in found for piece in intervals]
    return Region(unknowns.pop(), pieces) if len(unknowns) == 1 and all(pieces) else None


def _interval(text: str) -> tuple[str, list[str]]:
    """Return the unknown and the intervals of a relation: `x > 3` is `(3,\\infty)`, `1 < x \\le 2` is
    `(1,2]`.

    Both are empty if the text is not such a relation.
    """
    signs = RELATION.findall(text)
    sides = [side.strip() for side in RELATION.split(text)]
    if len(signs) == 2 and UNKNOWN.fullmatch(sides[1]) and all(map(BOUND.fullmatch, (sides[0], sides[2]))):
        if {*signs} <= {">", r"\ge", r"\gt"}:
            signs, sides = [FLIPPED[sign] for sign in reversed(signs)], sides[::-1]
        if {*signs} <= {"<", r"\le", r"\lt"}:
            opening, ending = "[" if signs[0] in NOT_STRICT else "(", "]" if signs[1] in NOT_STRICT else ")"
            return sides[1], [f"{opening}{sides[0]},{sides[2]}{ending}"]
    if len(signs) != 1:
        return "", [""]
    (relation,), (left, right) = signs, sides
    if UNKNOWN.fullmatch(right):
        relation, left, right = FLIPPED.get(relation, relation), right, left
    if not UNKNOWN.fullmatch(left) or not BOUND.fullmatch(right) or relation in ("=", r"\in"):
        return "", [""]
    if relation == r"\ne":
        return left, [rf"(-\infty,{right})", rf"({right},\infty)"]
    if relation in ("<", r"\le", r"\lt"):
        return left, [rf"(-\infty,{right}{']' if relation in NOT_STRICT else ')'}"]
    return left, [rf"{'[' if relation in NOT_STRICT else '('}{right},\infty)"]


def _parts(truth: str, answer: str, tolerance: Fraction, depth: int) -> bool | None:
    """Return whether two lists, sets, points or intervals are equal, or None if neither text is one of
    these."""
    wanted, given = _split(truth), _split(answer)
    if wanted is None and given is None:
        return None
    if wanted is None or given is None:
        if RELATION.search(truth) or RELATION.search(answer):
            return None
        parts, alone = (wanted, answer) if given is None else (given, truth)
        assert parts is not None
        return parts.opening == r"\{" and _all_same(parts.items, [alone], tolerance, depth)
    if max(len(wanted.items), len(given.items)) > MOST_PARTS or len(wanted.items) != len(given.items):
        return False
    if wanted.names and given.names and {*wanted.names} != {*given.names}:
        return False
    if wanted.names or given.names:
        wanted, given = _in_order(wanted, given), _in_order(given, wanted)
    unordered = {"", r"\{"}
    if wanted.opening in unordered and given.opening in unordered:
        return _matched(wanted.items, given.items, tolerance, depth)
    brackets = (wanted.opening, wanted.closing), (given.opening, given.closing)
    bare_point = given.opening == "" and brackets[0] == ("(", ")")
    if brackets[0] != brackets[1] and not bare_point:
        return False
    return _all_same(wanted.items, given.items, tolerance, depth)


def _in_order(parts: Bracketed, others: Bracketed) -> Bracketed:
    """Return named parts as a point in the order of their names (Greek names keep their order).

    A list without brackets and names also becomes a point if the other side has named parts. `x_1` and `x_2`
    are solutions in any order, unless the other side is a point.
    """
    several = len({name.partition("_")[0] for name in parts.names or others.names}) == 1
    if not parts.names:
        return parts if parts.opening or several else parts._replace(opening="(", closing=")")
    if several and others.opening != "(" and not others.names:
        return parts
    items = list(zip(parts.names, parts.items, strict=True))
    if not any(name.startswith("\\") for name in parts.names):
        items.sort()
    return Bracketed("(", ")", [item for _, item in items])


def _matched(wanted: list[str], given: list[str], tolerance: Fraction, depth: int) -> bool:
    """Return whether each part equals a different one of the other parts, in any order."""
    left = [item.strip() for item in given]
    for item in wanted:
        if (found := next((one for one in left if same(item.strip(), one, tolerance, depth)), None)) is None:
            return False
        left.remove(found)
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
    named = [_part(item) for item in items]
    names = tuple(name for name, _ in named)
    different = all(names) and len({*names}) == len(names) and opening in ("", "(")
    return Bracketed(opening, ending, [value for _, value in named], names if different else ())


def _part(item: str) -> tuple[str, str]:
    """Return the name and the value of one of several solutions: `x = 1` has the value 1."""
    match = ASSIGNED.match(item)
    if match is None or not _in_their_order(match[1]):
        return "", item.strip()
    return match[1].replace(" ", ""), item[match.end() :].strip()


def _both_signs(text: str) -> list[str]:
    if len(PLUS_MINUS.findall(text)) != 1:
        return [text]
    plus = PLUS_MINUS.sub("+", text).strip()
    return [plus.removeprefix("+"), PLUS_MINUS.sub("-", text)]


def _at_commas(text: str) -> list[str]:
    """Split at the commas and semicolons outside brackets."""
    items, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if character in ",;" and depth <= 0:
            items.append(text[start:index].strip())
            start = index + 1
    items.append(text[start:].strip())
    return items


def _as_words(text: str) -> str:
    """Return the letters of an answer that consists of words, in lower case, or an empty text for maths."""
    words = IN_WORDS.sub(r"\1", text).strip()
    bare = words.strip("() .")
    lengths = {min(len(word), 2) for word in bare.split()}
    is_maths = any(sign in words for sign in r"\^_=+*/<>") or any(sign.isdigit() for sign in bare)
    if is_maths or not LETTERS.search(bare) or not (IN_WORDS.search(text) or len(lengths) == 1):
        return ""
    return " ".join((bare.casefold() if 2 in lengths else bare).split())
