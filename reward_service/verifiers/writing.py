"""One way of writing maths out of the many: LaTeX variants, Unicode signs, and where in a text the maths
stands.

Pure and linear in the text's length. Nothing is evaluated here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from reward_service.verifiers.answers import boxes, closing, last_match

SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": "=",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "±": r"\pm ",
        "°": r"^\circ ",
        "∅": r"\emptyset ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "²": "^2",
        "³": "^3",
        "，": ",",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)
REPLACED = [
    (re.compile(r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr)(?![a-zA-Z])\s*\.?"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|split)\}"), " "),
    (re.compile(r"\\(?:mathrm|textbf|textit|textrm|operatorname|mbox|mathsf|texttt)(?=\s*\{)"), r"\\text"),
    (re.compile(r"\\(?:mathbf|mathit|boldsymbol|bm|mathnormal)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\text\s*\{\s*([-+]?[\d.,/]+\s*\\?%?)\s*\}"), r"\1"),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3})"), ","),
    (re.compile(r"(?<=\d)(?:(?<!\\)\\[,:; ]|~)\s*(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<!\\)\\(?:[,:;> ]|q?quad(?![a-zA-Z]))|~"), " "),
    (re.compile(r"\\(?:varnothing|O)(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\(leq|leqslant)(?![a-zA-Z])"), r"\\le "),
    (re.compile(r"\\(geq|geqslant)(?![a-zA-Z])"), r"\\ge "),
    (re.compile(r"\\neq(?![a-zA-Z])|\\not\s*=|(?<![\w)}!])!="), r"\\ne "),
    (re.compile(r"\\(?:approx|simeq|doteq)(?![a-zA-Z])"), "="),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\^\s*\{?\s*\\degree\s*\}?|\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\text\s*\{\s*(and|or)\s*\}|(?<![a-zA-Z])(and|or)(?![a-zA-Z])"), " , "),
    (re.compile(r",\s*,"), ","),
    (re.compile(r"\\mathbb\s*\{?\s*R\s*\}?"), r"(-\\infty,\\infty)"),
    # x^10 means x to the tenth to everyone but TeX.
    (re.compile(r"\^(\d{2,})"), r"^{\1}"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*(\d+|[a-zA-Z])"), r"\\sqrt{\1}"),
]  # fmt: skip
MOST_WRAPPINGS = 8
"""Boxes in boxes and brackets around brackets that are taken off."""
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
IN_WORDS = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?({'|'.join(POWERS)})\b\s*\}}?")
HEDGE = re.compile(
    r"\A\s*(?:approximately|about|roughly|exactly|simply|just|equal to|\\approx|:)\s+", re.IGNORECASE
)
OVER = re.compile(r"\\over(?![a-zA-Z])")
MATHS_SIGN = re.compile(r"\\.|\$\$?", re.DOTALL)
CLOSED_BY = {"$$": "$$", r"\[": r"\]", r"\(": r"\)"}
INLINE = re.compile(r"(?!\s)[^$\n]++(?<!\\)\$")
NUMBER = re.compile(
    r"(?<![\w.,])[-+−]?[$€£¥]?(?:\d{1,3}(?:,\d{3})++(?:\.\d++)?|\d++(?:\.\d++)?|\.\d++)(?:[eE][-+]?\d{1,3})?"
    r"(?:\s?/\s?\d++|\s\d++/\d++|:\d++)?(?:\s?\\?%)?(?!\w)"
)
BECAUSE = re.compile(r",? (?:because|since|as|so|which|when|where|after|for|given)\b.*", re.DOTALL)


def tidy(text: str) -> str:
    """The maths in `text` in one way of writing, without the signs that show where it begins and ends."""
    text = one_spaced(text)
    held = boxes(text)
    if held:
        text = held[-1]
        for _ in range(MOST_WRAPPINGS):
            text = (boxes(text) or [text])[-1]
    text = undollared(text).translate(SIGNS)
    for pattern, replacement in REPLACED:
        text = pattern.sub(replacement, text)
    text = one_spaced(IN_WORDS.sub(lambda match: rf"\times 10^{{{POWERS[match[1]]}}}", text))
    parts = OVER.split(text.removeprefix("{").removesuffix("}"))
    if len(parts) == 2 and not any(brace in part for part in parts for brace in "{}"):
        text = rf"\frac{{{parts[0].strip()}}}{{{parts[1].strip()}}}"
    text = text.replace("**", "^").strip().strip("*").rstrip(".,;:").strip()
    return unwrapped(text)


def one_spaced(text: str) -> str:
    """The text with one space for each run of white space: TeX sees no more, and no pattern goes back over a
    run."""
    return " ".join(text.split())


def formulas(text: str) -> Iterator[tuple[int, str]]:
    """Where each formula between `$…$`, `$$…$$`, `\\(…\\)` or `\\[…\\]` ends, and what it is, in order."""
    position = 0
    unclosed: set[str] = set()
    while (sign := MATHS_SIGN.search(text, position)) is not None:
        opening, position = sign[0], sign.end()
        ending = CLOSED_BY.get(opening)
        if ending is not None and ending not in unclosed:
            end = text.find(ending, position + 1)
            if end < 0:
                unclosed.add(ending)
            else:
                yield end + len(ending), text[position:end]
                position = end + len(ending)
        elif opening == "$" and (inline := INLINE.match(text, position)) is not None:
            yield inline.end(), text[position : inline.end() - 1]
            position = inline.end()


def undollared(text: str) -> str:
    """The text without `$…$`, `\\(…\\)` or `\\[…\\]` around the whole."""
    for opening, ending in (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ("$", "$")):
        if len(text) >= len(opening) + len(ending) and text.startswith(opening) and text.endswith(ending):
            inner = text[len(opening) : -len(ending)]
            if opening not in inner:
                return inner.strip()
    return text


def unwrapped(text: str) -> str:
    """The text without braces, or round brackets around no comma, that hold the whole."""
    for _ in range(MOST_WRAPPINGS):
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1].strip()
    for _ in range(MOST_WRAPPINGS):
        if text.startswith("(") and text.endswith(")") and "," not in text and _spans(text):
            text = text[1:-1].strip()
    return text


def last_maths(text: str) -> str | None:
    """The last formula or number of a text that marks no answer; None where it has neither.

    A formula that stands later than the last number wins, and the other way round."""
    formula, number = deque(formulas(text), maxlen=1), last_match(NUMBER, text)
    if formula and (number is None or number.end() <= formula[0][0]):
        return formula[0][1]
    return number[0] if number is not None else None


def said_maths(sentence: str) -> str:
    """The answer in what follows "the answer is": its first formula, else what stands before a reason."""
    for _, formula in formulas(sentence):
        return formula
    return BECAUSE.sub("", HEDGE.sub("", one_spaced(sentence)))


def _spans(text: str) -> bool:
    """Whether the bracket that opens the text is closed by its last character."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index == len(text) - 1
    return False
